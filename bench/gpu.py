"""Times on a GPU: kernels by CUPTI, chains of layers by the clock, and a plain copy to measure them by."""

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

COPIED = 2**31  # bytes of the plain copy
ROWS = 5  # of calls that the clock takes


class Chain:
    """A jitted chain of steps on one donated, stacked state that goes from layer to layer and from call to call.

    `step(state, layer, *arguments)` returns `(o, state)`. The layers are unrolled, or with `scan` traced; `turns` times all
    layers in one program.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        state: Any,
        arguments: Sequence[Any],
        layers: int,
        scan: bool = False,
        turns: int = 1,
    ) -> None:
        def unrolled(state: Any, *arguments: Any) -> Any:
            o = None
            for layer in range(layers):
                o, state = step(state, layer, *arguments)
            return o, state

        def first(state: Any, *arguments: Any) -> Any:
            o = jax.eval_shape(step, state, 0, *arguments)[0]
            return jax.tree.map(jnp.zeros_like, o), state

        def scanned(state: Any, *arguments: Any) -> Any:
            along = jnp.arange(layers, dtype=jnp.int32)
            start = first(state, *arguments)
            return lax.scan(lambda carry, layer: (step(carry[1], layer, *arguments), None), start, along)[0]

        def repeated(state: Any, *arguments: Any) -> Any:
            return lax.fori_loop(0, turns, lambda _, carry: unrolled(carry[1], *arguments), first(state, *arguments))

        self.call = jax.jit(scanned if scan else unrolled if turns == 1 else repeated, donate_argnums=0)
        self.state, self.arguments, self.layers = state, arguments, layers * turns

    def __call__(self) -> Any:
        o, self.state = self.call(self.state, *self.arguments)
        return o

    def wait(self) -> None:
        jax.block_until_ready(self.state)


def kernels(call: Callable[[], Any], wait: Callable[[], Any], repeat: int) -> list[tuple[str, float]]:
    """Name and µs of every kernel of `repeat` calls, after one that does not count."""
    profiler = importlib.import_module("jax.experimental.mosaic.gpu.profiler")
    engine = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # `profiler.measure` calls twice with the same, donated, arguments
    call()
    wait()
    engine._cupti_init()
    for _ in range(repeat):
        call()
    wait()
    return [(name, 1e3 * ms) for name, ms in engine._cupti_get_timings(True)]


def kernel_us(chain: Chain, name: str, repeat: int) -> tuple[float, float]:
    """The median µs of the kernels called `name` in a chain, and how many others there are a layer."""
    times = kernels(chain, chain.wait, repeat)
    own = [us for kernel, us in times if name in kernel]
    return statistics.median(own), (len(times) - len(own)) / (repeat * chain.layers)


def wall_us(call: Callable[[], Any], wait: Callable[[], Any], repeat: int) -> float:
    """µs of one of `repeat` calls in a row, nobody waiting in between; the median of some such rows."""
    rows = []
    call()
    for _ in range(ROWS):
        wait()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        wait()
        rows.append((time.perf_counter() - start) / repeat)
    return statistics.median(rows) * 1e6


def copy_rate(repeat: int) -> float:
    """Bytes a second, read and written, of an elementwise kernel on a large array in its own memory."""
    chain = Chain(lambda x, _: (None, x * 1.0000001), jnp.ones(COPIED // 4, jnp.float32), (), 1)
    times = [us for _, us in kernels(chain, chain.wait, repeat)]
    return 2 * COPIED / statistics.median(times) * 1e6
