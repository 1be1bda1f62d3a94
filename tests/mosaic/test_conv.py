"""The conv kernel: in the interpreter against the reference, lowered for an H200, and on a GPU."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import INT, close, close_rows, exact, normal, same, starts, zero
from jax.experimental import checkify
from kernels import BF16, F16, F32, TOL, h200, interpret, lowered, twice

import gdn_jax
from gdn_jax import causal_conv1d_update, reference
from gdn_jax.mosaic import conv

LAYERS, LAYER, TAIL = 2, 1, 2
BAD = [-1, -7, 2**31 - 1]  # and num_slots
DTYPES = {  # of x, of the weights, of the pool
    "bf16": (BF16, BF16, BF16),
    "f32": (F32, F32, F32),
    "f16": (F16, F16, F16),
    "bf16-f32-f16": (BF16, F32, F16),
    "f32-bf16-bf16": (F32, BF16, BF16),
}
VERIFY = (3, 2, 2, 0, 1, 4, 2)  # lengths for S = 2: 1 and 2 are padding, 5 is too long
NAMES = ("x", "weight", "bias", "conv_state", "state_indices", "has_initial_state", "num_accepted_tokens")
NAMES = (*NAMES, "query_start_loc")


def make(
    seed: int, dtypes: Any, lengths: Any = None, n: int = 6, D: int = 256, W: int = 4, S: int = 0, slots: int = 9
) -> dict[str, Any]:
    """A stacked call. One token a sequence: every second starts from zeros, every third is padding. With `lengths` a verify step
    with random counts, where of five or more sequences 1 has no slot, 2 a count of 0, and 4 starts from zeros whatever its count.
    """
    rng, (dtype, weight_dtype, pool_dtype) = np.random.default_rng(seed), dtypes
    n = n if lengths is None else len(lengths)
    index = rng.permutation(max(slots, n))[:n].astype(INT)
    call: dict[str, Any] = dict(
        x=normal(rng, n if lengths is None else sum(lengths) + TAIL, D).astype(dtype),
        weight=normal(rng, D, W).astype(weight_dtype),
        bias=normal(rng, D).astype(weight_dtype),
        conv_state=normal(rng, LAYERS, max(slots, n), D, W - 1 + S).astype(pool_dtype),
        state_indices=index,
        has_initial_state=np.arange(n) % 2 == 0,
    )
    if lengths is None:
        index[2::3] = np.resize([*BAD, max(slots, n)], len(index[2::3]))
        return call
    counts = rng.integers(1, S + 2, n).astype(INT)
    has = np.ones(n, bool)
    if n >= 5:
        index[1], counts[2], counts[4], has[4] = max(slots, n), 0, 99, False
    return call | dict(num_accepted_tokens=counts, query_start_loc=starts(*lengths), has_initial_state=has)


def live(call: dict[str, Any]) -> tuple[np.ndarray, list[tuple[int, int | None]]]:
    """Which tokens are valid, and `(slot, first column of the history or None)` of each sequence that is."""
    slots, (_, num_slots, _, columns), W = call["state_indices"], call["conv_state"].shape, call["weight"].shape[1]
    n, longest = len(slots), columns - (W - 1) + 1
    loc, counts, has = (call.get(name) for name in ("query_start_loc", "num_accepted_tokens", "has_initial_state"))
    loc = np.arange(n + 1) if loc is None else loc
    counts = np.ones(n, INT) if counts is None else counts
    has = np.ones(n, bool) if has is None else has
    valid, sequences = np.zeros(len(call["x"]), bool), []
    for slot, count, old, begin, end in zip(slots, counts, has, loc[:-1], loc[1:]):
        if 0 <= slot < num_slots and (1 <= count <= longest or not old) and 0 < end - begin <= longest:
            valid[begin:end] = True
            sequences.append((int(slot), int(count) - 1 if old else None))
    return valid, sequences


def poisoned(call: dict[str, Any]) -> dict[str, Any]:
    """NaN in every token of padding, and in every column of every row that nobody starts from."""
    (valid, sequences), history = live(call), call["weight"].shape[1] - 1
    x, pool = (np.array(call[name]) for name in ("x", "conv_state"))
    x[~valid] = np.nan
    poison = np.ones(pool.shape, bool)
    for slot, first in sequences:
        if first is not None:
            poison[LAYER, slot, :, first : first + history] = False
    pool[poison] = np.nan
    return call | {"x": x, "conv_state": pool}


def run(call: dict[str, Any], layer: int = LAYER, activation: Any = "silu", races: bool | None = False) -> Any:
    """The kernel itself, in the interpreter."""
    arrays = [None if call.get(name) is None else jnp.asarray(call[name]) for name in NAMES]
    y, pool = interpret(partial(conv.conv, activation=activation), *arrays, jnp.int32(layer), races=races)
    return np.asarray(y), np.asarray(pool)


def check(call: dict[str, Any], y: Any, pool: Any, activation: Any = "silu") -> None:
    """Against the reference in float64; padding zero; every row that nobody writes bit for bit, the others exact."""
    before = call["conv_state"]
    one = exact(call | {"conv_state": before[LAYER]})
    want_y, want = reference.causal_conv1d_update(**one, activation=activation)
    valid, sequences = live(call)
    close(np.asarray(y)[valid], want_y[valid], TOL[call["x"].dtype.type])
    zero(np.asarray(y)[~valid])
    used = [slot for slot, _ in sequences]
    close_rows(pool[LAYER], want.astype(before.dtype), before[LAYER], used, 0)
    same(pool[0], before[0])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", [128, 256])
def test_one_token_against_the_reference(monkeypatch: pytest.MonkeyPatch, dtypes: Any, size: int) -> None:
    monkeypatch.setattr(conv, "channels_of_block", lambda *sizes: size)
    call = poisoned(make(1, dtypes))
    check(call, *run(call))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", [128, 256])
def test_verify_against_the_reference(monkeypatch: pytest.MonkeyPatch, dtypes: Any, size: int) -> None:
    monkeypatch.setattr(conv, "channels_of_block", lambda *sizes: size)
    call = poisoned(make(2, dtypes, VERIFY, S=2))
    check(call, *run(call))


@pytest.mark.parametrize(
    "sizes",
    [dict(W=2), dict(W=8), dict(S=2), dict(W=2, S=1, lengths=(2, 1, 0)), dict(W=8, S=7, lengths=(8, 1))],
    ids=str,
)
def test_other_widths_without_bias_flags_and_activation(sizes: Any) -> None:
    """One token a sequence with S > 0: the columns behind the first W - 1 stay as they were, NaN and all."""
    call = make(3, (F32, F32, F32), n=3, D=128, **{"lengths": None, **sizes})
    call = poisoned(call | {"bias": None, "has_initial_state": None})
    check(call, *run(call, activation=None), activation=None)


def test_verify_without_counts() -> None:
    call = poisoned(make(4, (F32, F32, F32), (2, 1), S=1, D=128) | {"num_accepted_tokens": None})
    check(call, *run(call))


@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1])
def test_another_layer_is_padding(layer: int) -> None:
    for call in (make(5, (BF16,) * 3, n=2, D=128), make(6, (BF16,) * 3, (2, 1), S=1, D=128)):
        y, pool = run(call, layer)
        zero(y)
        same(pool, call["conv_state"])


def test_wild_counts_are_padding() -> None:
    call = make(7, (F32, F32, F32), (1,) * 6, S=1, D=128)
    call["num_accepted_tokens"][:] = [0, 3, -1, 2**31 - 1, -(2**31), 2]
    call["has_initial_state"][:] = True
    call = poisoned(call)
    assert len(live(call)[1]) == 1
    check(call, *run(call))


def test_a_sequence_has_the_same_bits_elsewhere_beside_others() -> None:
    call, other = (make(seed, (BF16,) * 3, (2, 3, 1, 2), S=2, D=128) for seed in (8, 9))
    call["state_indices"][:], other["state_indices"][:] = [0, 4, -1, 2], [1, -7, 3, 5]
    other |= {name: call[name] for name in ("weight", "bias")} | {"query_start_loc": starts(1, 2, 2, 3)}
    other["num_accepted_tokens"][3] = call["num_accepted_tokens"][1]
    other["x"][5:8], other["conv_state"][LAYER, 5] = call["x"][2:5], call["conv_state"][LAYER, 4]
    (y, pool), (moved_y, moved_pool) = run(call), run(other)
    same(moved_y[5:8], y[2:5])
    same(moved_pool[LAYER, 5], pool[LAYER, 4])


def test_a_malformed_start_stays_inside_the_arrays() -> None:
    call = make(10, (BF16,) * 3, (2, 2, 1), S=1, D=128)
    call["query_start_loc"][:] = [0, 2**31 - 1, -5, 10**6]
    run(call, races=None)  # two sequences may own a token; the interpreter checks every index


def test_the_detector_sees_a_slot_named_twice() -> None:
    call = make(11, (BF16,) * 3, n=2, D=128)
    call["state_indices"][:] = 3
    run(call, races=True)


def test_what_a_block_takes() -> None:
    """The card is filled by few sequences; wide blocks divide the channels, and are not for long windows."""
    assert conv.channels_of_block(1, 8192, 4) == 128
    assert conv.channels_of_block(1024, 8192, 4) == 512
    assert conv.channels_of_block(1024, 8192, 11) == 128
    assert conv.channels_of_block(4096, 256, 4) == 256
    assert conv.channels_of_block(4096, 384, 4) == 128


def specs(call: dict[str, Any]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.items()}


def lowers_in_place(call: dict[str, Any]) -> None:
    rest = specs(call)
    pool = rest.pop("conv_state")

    def step(pool: Any, rest: Any, layer: Any) -> Any:
        return causal_conv1d_update(**rest, conv_state=pool, layer=layer, implementation="mosaic")

    text = lowered(step, pool, rest, jax.ShapeDtypeStruct((), jnp.int32), donate_argnums=0)
    assert text.count("mosaic_gpu_v2") == 1 and "tf.aliasing_output" in text
    assert "stablehlo.while" not in text and "stablehlo.gather" not in text


@pytest.mark.parametrize("dtype", [BF16, F32, F16])
def test_every_dtype_lowers_in_place(dtype: Any) -> None:
    for number, others in enumerate(itertools.product((BF16, F32, F16), repeat=2)):
        form: dict[str, Any] = dict(lengths=(4, 4), S=3) if number % 2 else dict(n=2)
        lowers_in_place(make(0, (dtype, *others), slots=2, D=8192, **form))


@pytest.mark.parametrize(("n", "D"), [(1, 384), (600, 2048)])
def test_every_size_lowers_in_place(n: int, D: int) -> None:
    for W, S in ((2, 0), (4, 3), (8, 7)):
        lowers_in_place(make(0, (BF16,) * 3, n=n, slots=2, D=D, W=W, S=S))
        lowers_in_place(make(0, (BF16,) * 3, (S + 1,) * n, slots=2, D=D, W=W, S=S))


def test_explain_and_what_is_refused() -> None:
    call: dict[str, Any] = make(0, (BF16,) * 3, n=3) | {"layer": 0}
    verify = make(0, (BF16,) * 3, (1, 1), S=8) | {"layer": 0}
    narrow = make(0, (BF16,) * 3, D=96) | {"layer": 0}
    with h200():
        for good in (call, verify | make(0, (BF16,) * 3, (1, 1), S=7)):
            assert str(gdn_jax.explain(causal_conv1d_update, **good)).startswith("mosaic runs; xla is passed over")
        for bad, why in (
            (narrow, "a multiple of 128 channels, and `x` has 96"),
            (make(0, (BF16,) * 3, W=9), "widths up to 8, and `weight` has 9"),
            (verify, "verifies up to 7 draft tokens, and `conv_state` has room for 8"),
            (call | {"x": call["x"][:0], "state_indices": None}, "`x` is empty"),
            (verify | {"query_start_loc": np.zeros(1, INT)}, "has no sequence"),
        ):
            told = gdn_jax.explain(causal_conv1d_update, **bad)
            assert told.implementation == "xla" and why in str(told), told
        assert "has 96" in str(gdn_jax.explain("causal_conv1d_update", np.zeros((1, 96)), np.zeros((96, 4))))
        without_verify = {
            name: x for name, x in verify.items() if name not in ("query_start_loc", "num_accepted_tokens")
        }
        assert gdn_jax.explain(causal_conv1d_update, **without_verify).implementation == "mosaic"
        with pytest.raises(ValueError, match=r"'mosaic', which cannot run here: its kernel takes a multiple of 128"):
            causal_conv1d_update(**narrow, implementation="mosaic")


def test_beside_the_kernel() -> None:
    """jit and scan hold a kernel for CUDA and none for a CPU; vmap and the backward pass take the XLA form."""
    for call in (make(12, (F32,) * 3, D=128), make(13, (F32,) * 3, VERIFY, S=2, D=128)):
        arrays = {name: jnp.asarray(x) for name, x in call.items()}
        rest, pool = {name: x for name, x in arrays.items() if name != "conv_state"}, arrays["conv_state"]

        def step(pool: Any, rest: Any, layer: Any = LAYER) -> Any:
            return causal_conv1d_update(**rest, conv_state=pool, layer=layer)

        def loss(pool: Any, x: Any, rest: Any = rest, step: Any = step) -> Any:
            y, pool = step(pool, rest | {"x": x})
            return jnp.sum(y**2) + jnp.sum(jnp.sin(pool))

        def layers(pool: Any, rest: Any, step: Any = step) -> Any:
            return jax.lax.scan(lambda pool, at: step(pool, rest, at)[::-1], pool, jnp.arange(LAYERS))

        two: Any = jax.tree.map(lambda x: jnp.stack([x, x]), (pool, rest))
        with h200():
            traces = [
                jax.jit(step).trace(pool, rest),
                jax.jit(layers).trace(pool, rest),
                jax.jit(checkify.checkify(step, errors=checkify.all_checks)).trace(pool, rest),
                jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(pool, rest["x"]),
            ]
            batched = jax.jit(jax.vmap(step)).trace(*two)
        for traced in traces:
            assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1
            assert "mosaic" not in traced.lower(lowering_platforms=("cpu",)).as_text()
        assert "mosaic" not in batched.lower(lowering_platforms=("cuda",)).as_text()
        got = traces[3].lower(lowering_platforms=("cpu",)).compile()(pool, rest["x"])
        jax.tree.map(partial(close, tol=1e-6), got, jax.value_and_grad(loss, argnums=(0, 1))(pool, rest["x"]))


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("D", "W", "batches"), [(8192, 4, (1, 8, 64)), (4096, 4, (300,)), (384, 8, (1, 8))])
def test_gpu_against_the_reference(dtypes: Any, D: int, W: int, batches: Any) -> None:
    for n in batches:
        for lengths, S in ((None, 0), (None, 2), ((VERIFY + (3,) * n)[:n], 2)):
            call = poisoned(make(n, dtypes, lengths, n=n, D=D, W=W, S=S, slots=n + 3))
            rest = {name: jnp.asarray(x) for name, x in call.items() if name != "conv_state"}

            def step(pool: Any, rest: Any) -> Any:
                return causal_conv1d_update(**rest, conv_state=pool, layer=LAYER, implementation="mosaic")

            check(call, *twice(step, call["conv_state"], rest))


@pytest.mark.gpu
def test_gpu_more_sequences_than_an_axis_of_the_grid() -> None:
    n = 70000
    x = normal(np.random.default_rng(14), n, 128)
    pool = jnp.zeros((n, 128, 1), jnp.float32)
    y, pool = causal_conv1d_update(x, np.ones((128, 2), F32), conv_state=pool, activation=None, implementation="mosaic")
    same(y, x)
    same(pool[:, :, 0], x)


@pytest.mark.gpu
def test_gpu_vmap_scan_and_grad() -> None:
    call = make(15, (F32,) * 3, VERIFY, S=2)
    pool, rest = jnp.asarray(call["conv_state"]), {k: jnp.asarray(x) for k, x in call.items() if k != "conv_state"}

    def results(implementation: str) -> Any:
        def step(pool: Any, x: Any, layer: Any = LAYER) -> Any:
            flags = dict(conv_state=pool, layer=layer, implementation=implementation)
            return causal_conv1d_update(**rest | {"x": x}, **flags)

        def loss(pool: Any, x: Any) -> Any:
            y, pool = step(pool, x)
            return jnp.sum(y**2) + jnp.sum(jnp.sin(pool))

        def layers(pool: Any, at: Any) -> Any:
            return step(pool, rest["x"], at)[::-1]

        two = [jnp.stack([x, x[::-1]]) for x in (pool, rest["x"])]
        return (
            jax.jit(lambda pool: jax.lax.scan(layers, pool, jnp.arange(LAYERS)))(pool),
            jax.jit(jax.grad(loss, argnums=(0, 1)))(pool, rest["x"]),
            jax.jit(jax.vmap(step))(*two),
        )

    jax.tree.map(partial(close, tol=1e-5), results("mosaic"), results("xla"))
