"""Suite `interop`: what one `InPlace` call costs on the host beside the jitted call it makes, and what it copies."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

import gdn_jax
from bench.report import Table
from gdn_jax import GDNConfig, GDNWeights
from interop import GDNCache, InPlace

H, HV, K, V, W, S = 16, 32, 128, 128, 4, 3
LAYERS, SLOTS, REQUESTS = 36, 32, 8
STEPS = 1000
TARGET_US = {"cpu": 150, "cuda": 100}
PHASES = ("import", "run", "export")


class Timed(InPlace):
    """`InPlace` that keeps the time of its phases and counts the traces, the programs and the caches that moved."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        self.traces = self.programs = self.moved = 0
        self.times: dict[str, float] = {}

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.traces += 1
            return fn(*args, **kwargs)

        super().__init__(counted, **options)

    def __call__(self, caches: Any, /, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super().__call__(caches, *args, **kwargs)
        self.times["all"] = time.perf_counter() - start
        self.times["guard"] = self.times["all"] - sum(self.times[phase] for phase in PHASES)
        return result

    def _clocked(self, phase: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        self.times[phase] = time.perf_counter() - start
        return result

    def _import(self, seen: Any, leaves: Any, device: Any) -> Any:
        return self._clocked("import", super()._import, seen, leaves, device)

    def _run(self, run: Any, arrays: Any, device: Any) -> Any:
        return self._clocked("run", super()._run, run, arrays, device)

    def _export(self, seen: Any, done: Any, device: Any, strict: Any, name: Any) -> Any:
        self.moved += sum(new.unsafe_buffer_pointer() != old.begin for old, new in zip(seen, done[0]))
        return self._clocked("export", super()._export, seen, done, device, strict, name)

    def _compile(self, key: Any, strict: Any, name: Any) -> Any:
        self.programs += 1
        return super()._compile(key, strict, name)


class Model:
    """A cache of all layers, seeded inputs, and the two steps on them."""

    def __init__(self, device: torch.device, mtp_step: int) -> None:
        self.config = GDNConfig(
            num_v_heads=HV, num_k_heads=H, head_k_dim=K, head_v_dim=V, conv_kernel_dim=W, mtp_step=mtp_step
        )
        self.device, config = device, self.config
        self.cache = GDNCache(config, LAYERS, SLOTS, device=device)
        self.pools: Any = self.cache.state
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(device, torch.bfloat16)

        weights: Any = GDNWeights  # of torch tensors, which its annotations do not foresee
        self.weights = weights(normal(config.conv_dim, W), None, normal(HV).float(), normal(HV).float())
        self.mixed = normal(REQUESTS * (mtp_step + 1), config.qkvz_dim + config.ba_dim)
        self.slots = torch.arange(0, SLOTS, SLOTS // REQUESTS, dtype=torch.int32, device=device)[:REQUESTS]
        self.accepted = torch.ones(REQUESTS, dtype=torch.int32, device=device)

    def decode(self, state: Any, weights: Any, mixed: Any, slots: Any, layer: Any = None) -> Any:
        out = gdn_jax.gdn_decode(weights, state, mixed, config=self.config, state_indices=slots, layer=layer)
        return out.state, out.o

    def verify(self, state: Any, weights: Any, mixed: Any, slots: Any, accepted: Any, layer: Any = None) -> Any:
        out = gdn_jax.gdn_mtp_decode(
            weights, state, mixed, config=self.config, state_indices=slots, num_accepted_tokens=accepted, layer=layer
        )
        return out.state, out.o

    def step(self, call: Callable[..., Any], layer: int) -> Any:
        """One layer of one step. JAX copies the caches of a CPU call, so that it is given that layer's views there."""
        extra = () if self.config.mtp_step == 0 else (self.accepted,)
        if self.device.type == "cpu":
            return call(self.cache.layer(layer), self.weights, self.mixed, self.slots, *extra)
        return call(self.cache.state, self.weights, self.mixed, self.slots, *extra, layer=layer)

    def call(self) -> Timed:
        return Timed(self.verify if self.config.mtp_step else self.decode)


def _median_us(times: list[float]) -> float:
    return statistics.median(times) * 1e6


def small_call(device: torch.device, repeat: int, caches: int, arguments: int) -> list[float]:
    """µs of the jitted call alone, and of guard, import, run, export and all of an `InPlace` call that adds 1.

    The tensors are small, so that the host's work is all. As in a decode step, a call a layer follows the other, and
    nobody waits for the GPU before the last.
    """
    pools = [torch.zeros(64, 16, device=device) for _ in range(caches)]
    rest = [torch.zeros(64, 16, device=device) for _ in range(arguments)]

    def add(caches: Any, *rest: Any, layer: Any) -> Any:
        return [cache + layer for cache in caches], rest[0] + layer

    jitted, call = jax.jit(add, donate_argnums=0), Timed(add)
    place = jax.devices("cpu" if device.type == "cpu" else "gpu")[0]
    arrays = [jax.device_put(np.zeros((64, 16), np.float32), place) for _ in range(caches + arguments)]
    state, others = arrays[:caches], arrays[caches:]
    alone: list[float] = []
    parts: dict[str, list[float]] = {name: [] for name in ("guard", *PHASES, "all")}
    for _ in range(1 + 5 * repeat):
        for _ in range(LAYERS):
            start = time.perf_counter()
            state, out = jitted(state, *others, layer=1)
            if device.type == "cpu":
                jax.block_until_ready((state, out))
            alone.append(time.perf_counter() - start)
        jax.block_until_ready(state)
        for _ in range(LAYERS):
            call(pools, *rest, layer=1)
            for name, own in parts.items():
                own.append(call.times[name])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return [_median_us(own[LAYERS:]) for own in (alone, *parts.values())]


def host_time(device: torch.device, repeat: int) -> Table:
    """What `InPlace` adds on the host."""
    columns = ["tensors", "jitted call µs", "guard µs", "import µs", "run µs", "export µs", "all µs"]
    table = Table("host time of one InPlace call", [*columns, "over the jitted call µs", "target"], [])
    for caches, arguments in ((1, 1), (2, 6)):
        row = small_call(device, repeat, caches, arguments)
        name = f"{caches} cache{'s' * (caches > 1)}, {arguments} argument{'s' * (arguments > 1)}, a number"
        table.rows.append([name, *row, row[-1] - row[0], f"<= {TARGET_US[device.type]}"])
    return table


def jax_bytes() -> int:
    """What JAX holds on the card."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)


def many_steps(device: torch.device, name: str, mtp_step: int, steps: int) -> list[Any]:
    """A row: steps of all layers, and what moved, was copied, traced, compiled and allocated after the first."""
    model = Model(device, mtp_step)
    call, cuda = model.call(), device.type == "cuda"
    pointers = [pool.data_ptr() for pool in model.pools]

    def run(times: int) -> None:
        for _ in range(times):
            for layer in range(LAYERS):
                model.step(call, layer)
        if cuda:
            torch.cuda.synchronize(device)

    def memory() -> tuple[int, int]:
        return (torch.cuda.memory_allocated(device), jax_bytes()) if cuda else (0, 0)

    run(1)
    before, traces, programs, moved = memory(), call.traces, call.programs, call.moved
    run(steps - 1)
    grown = [(after - was) / 2**20 if cuda else "" for was, after in zip(before, memory())]
    elsewhere = sum(pointer != pool.data_ptr() for pointer, pool in zip(pointers, model.pools))
    copied = (call.moved - moved) / ((steps - 1) * LAYERS)
    made = [call.traces - traces, call.programs - programs]
    return [f"{steps} x {name}", steps * LAYERS, elsewhere, copied, *made, *grown]


def copies(device: torch.device, steps: int) -> Table:
    """Decode steps, and a fifth as many verify steps."""
    title = f"{LAYERS} layers, N={REQUESTS}, H={H} HV={HV} K={K} V={V}, bfloat16 states"
    columns = ["steps", "calls", "pools that moved", "caches copied a call", "traces after the first step"]
    columns += ["programs after it", "torch memory grown MiB", "JAX memory grown MiB"]
    verify = many_steps(device, f"verify S={S}", S, max(steps // 5, 2))
    return Table(title, columns, [many_steps(device, "decode", 0, steps), verify])


def suite(repeat: int) -> list[Table]:
    """The tables of the suite; on a CPU, where JAX copies donated imports, with few steps."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [host_time(device, repeat), copies(device, STEPS if device.type == "cuda" else 3)]
