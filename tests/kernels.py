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
from batches import INT, make_mixed, make_state, make_weights, same, starts
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from gdn_jax import GDNConfig

BF16, F32, F16 = ml_dtypes.bfloat16, np.float32, np.float16
DTYPES = {"bf16": (BF16, BF16), "bf16-f32": (BF16, F32), "f32": (F32, F32), "f16": (F16, F16)}  # of tokens, of states
TOL = {BF16: 3e-3, F32: 2e-6, F16: 3e-3 / 4}  # of outputs
POOL_TOL = {BF16: 3e-3, F32: 1e-5, F16: 4e-4}
SIZES = [(64, 64), (128, 128), (256, 256), (64, 256)]  # K, V
LAYERS = 2  # of a stacked pool
SLOTS = (None, None, -1, None, None, None, None, -7, None, None, 2**31 - 1, None)  # of twelve sequences; None: its own
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


# ---- the layer ------------------------------------------------------------------------------------------------------


def layer_config(dtypes: Any, H: int = 1, HV: int = 2, K: int = 64, V: int = 64, **more: Any) -> GDNConfig:
    dtype, state_dtype = dtypes
    sizes = dict(num_k_heads=H, num_v_heads=HV, head_k_dim=K, head_v_dim=V, conv_kernel_dim=4)
    return GDNConfig(**(sizes | dict(conv_dtype=dtype, ssm_dtype=state_dtype) | more))


def layer_call(seed: int, config: GDNConfig, dtype: Any, n: int, num_tokens: int, slots: int, bias: bool = True) -> Any:
    """A stacked call: random weights, pools and inputs, of which the last sequences are up to the caller."""
    rng = np.random.default_rng(seed)
    weights = make_weights(rng, config, dtype)
    weights = weights._replace(
        conv_bias=weights.conv_bias if bias else None,
        A_log=jnp.float32(weights.A_log),
        dt_bias=jnp.float32(weights.dt_bias),
    )
    state, mixed = make_state(rng, config, slots, LAYERS), make_mixed(rng, config, num_tokens, dtype)
    weights, state, mixed = jax.tree.map(np.array, (weights, state, mixed))
    return dict(
        weights=weights,
        state=state,
        mixed_qkvzba=mixed,
        config=config,
        state_indices=rng.permutation(slots)[:n].astype(INT),
        norm_weight=rng.uniform(0.5, 1.5, config.head_v_dim).astype(dtype),
    )


# ---- packed prompts -------------------------------------------------------------------------------------------------


def prefill_places(rng: np.random.Generator, lengths: Sequence[int], slots: int, S: int) -> dict[str, Any]:
    """The indices of sequences. Every fourth starts from zeros, every fifth from another slot; of twelve, three have no slot,
    and the ninth starts from none; with S from a random column, and one count of twelve is out of range.
    """
    n, rows = len(lengths), rng.permutation(slots).astype(INT)
    index, source, has = rows[:n].copy(), rows[:n].copy(), np.arange(n) % 4 != 3
    source[::5] = rows[n : n + len(source[::5])]
    counts = rng.integers(1, S + 2, n).astype(INT)
    counts[3::4] = 99  # not looked at
    if n == len(SLOTS):
        for i, slot in enumerate(SLOTS):
            index[i] = index[i] if slot is None else slot
        source[8], counts[9] = slots, 0
    places = dict(
        query_start_loc=starts(*lengths), state_indices=index, has_initial_state=has, initial_state_indices=source
    )
    return places | ({"num_accepted_tokens": counts} if S else {})


def live_prefill(
    call: dict[str, Any], num_tokens: int, num_slots: int, longest: int
) -> tuple[np.ndarray, list[tuple[int, int | None, int]]]:
    """Which tokens are valid, and `(slot, slot to read or None, column)` of each sequence that is."""
    loc, slots = call["query_start_loc"], call["state_indices"]
    n, has, source = len(loc) - 1, call.get("has_initial_state"), call.get("initial_state_indices")
    counts = call.get("num_accepted_tokens", np.ones(n, INT))
    has = np.ones(n, bool) if has is None else has
    source = slots if source is None else source
    valid, found = np.zeros(num_tokens, bool), []
    for slot, old, other, count, begin, end in zip(slots, has, source, counts, loc[:-1], loc[1:]):
        if 0 <= slot < num_slots and (1 <= count <= longest or not old) and begin < end:
            valid[begin:end] = True
            reads = bool(old) and 0 <= other < num_slots
            found.append((int(slot), int(other) if reads else None, int(count) - 1 if reads else 0))
    return valid, found
