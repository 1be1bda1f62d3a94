"""What the tests of Mosaic kernels share.

Without a GPU they run in Pallas' GPU interpreter, which looks for races, and are lowered for an H200 that is not there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from batches import same
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

BF16, F32, F16 = ml_dtypes.bfloat16, np.float32, np.float16
DTYPES = {"bf16": (BF16, BF16), "bf16-f32": (BF16, F32), "f32": (F32, F32), "f16": (F16, F16)}  # of tokens, of states
TOL = {BF16: 3e-3, F32: 2e-6, F16: 3e-3 / 4}  # of outputs
POOL_TOL = {BF16: 3e-3, F32: 1e-5, F16: 4e-4}
SIZES = [(64, 64), (128, 128), (256, 256), (64, 256)]  # K, V
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@contextmanager
def h200() -> Iterator[None]:
    """What is traced inside takes the chip for an H200."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H200)):
        yield


def interpret(f: Callable[..., Any], *args: Any, races: bool | None = False) -> Any:
    """`f(*args)` in the interpreter; with or without races between threads, as the caller expects (None: either)."""
    with h200(), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        out = jax.block_until_ready(jax.jit(f)(*args))
    assert races is None or gpu_callbacks.get_races().races_found is races
    return out


def lowered(f: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The program for CUDA: lays out every array of every kernel, and finds what the chip could not do."""
    with h200():
        return jax.jit(f, **options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def run_kernel(
    kernel: Callable[..., Any],
    names: Sequence[str],
    call: dict[str, Any],
    layer: int = 1,
    races: bool | None = False,
    norm: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """A kernel of the rule itself, in the interpreter, on the arguments `names` of a stacked call."""
    arrays = [None if call[name] is None else jnp.asarray(call[name]) for name in names]
    scale = jnp.float32(call["q"].shape[-1] ** -0.5)
    o, pool = interpret(partial(kernel, use_qk_l2norm=norm), *arrays, jnp.int32(layer), scale, races=races)
    return np.asarray(o), np.asarray(pool)


def twice(step: Callable[..., Any], state: Any, *args: Any) -> Any:
    """`step(state, *args)`, which returns `(o, state)`, jitted on a donated state that must stay where it is; its bits twice."""
    jitted = jax.jit(step, donate_argnums=0)
    results = []
    for _ in range(2):
        given = jax.tree.map(jnp.array, state)
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(given)]
        o, given = jitted(given, *args)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(given)] == pointers
        results.append(jax.tree.map(np.asarray, (o, given)))
    jax.tree.map(same, *results)
    return results[0]


def on_gpu(operator: Callable[..., Any], call: dict[str, Any], layer: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A rule on a stacked call."""
    rest = {name: jnp.asarray(x) for name, x in call.items() if name != "ssm_state"}

    def step(pool: Any, rest: Any) -> Any:
        return operator(**rest, ssm_state=pool, layer=layer, implementation="mosaic")

    return twice(step, call["ssm_state"], rest)
