"""The kernel of the prefill form of the conv, with the gating beside it: in the interpreter, lowered, and on a GPU."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import INT, close, close_rows, exact, normal, same, zero
from kernels import BF16, F16, F32, LAYERS, TOL, h200, interpret, live_prefill, lowered, prefill_places, twice

import gdn_jax
from gdn_jax import causal_conv1d, gdn_gating, reference
from gdn_jax.mosaic import prologue
from gdn_jax.varlen import resolve, sequences

LAYER, TAIL = 1, 3
DTYPES = {  # of x, of the weights, of the pool
    "bf16": (BF16, BF16, BF16),
    "f32": (F32, F32, F32),
    "f16": (F16, F16, F16),
    "bf16-f32-f16": (BF16, F32, F16),
    "f32-bf16-bf16": (F32, BF16, BF16),
}
LENGTHS = (5, 0, 3, 17, 1, 64, 2, 65, 3, 130, 1, 2)
INDICES = ("state_indices", "has_initial_state", "initial_state_indices", "num_accepted_tokens")
TENSORS = ("x", "weight", "bias", "conv_state", "A_log", "dt_bias")


def make(
    seed: int,
    dtypes: Any = (BF16,) * 3,
    lengths: Any = LENGTHS,
    D: int = 256,
    W: int = 4,
    S: int = 0,
    heads: int = 0,
    slots: int = 30,
    between: int = 0,
) -> dict[str, Any]:
    """A stacked call on `prefill_places`. With `heads` the rows of x go on: `between`, b, a."""
    rng, (dtype, weight_dtype, pool_dtype) = np.random.default_rng(seed), dtypes
    call = dict(
        x=normal(rng, sum(lengths) + TAIL, D + between + 2 * heads).astype(dtype),
        weight=normal(rng, D, W).astype(weight_dtype),
        bias=normal(rng, D).astype(weight_dtype),
        conv_state=normal(rng, LAYERS, slots, D, W - 1 + S).astype(pool_dtype),
    )
    if heads:
        call |= {name: normal(rng, heads).astype(weight_dtype) for name in ("A_log", "dt_bias")}
    return call | prefill_places(rng, lengths, slots, S)


def live(call: dict[str, Any]) -> Any:
    num_slots, _, columns = call["conv_state"].shape[1:]
    return live_prefill(call, len(call["x"]), num_slots, columns - call["weight"].shape[1] + 2)


def poisoned(call: dict[str, Any]) -> dict[str, Any]:
    """NaN in every token of padding, between the columns of x that are used, and wherever in the pool no history stands."""
    (valid, found), (channels, width) = live(call), call["weight"].shape
    x, pool = (np.array(call[name]) for name in ("x", "conv_state"))
    x[~valid] = np.nan
    heads = len(call.get("A_log", ()))
    x[:, channels : x.shape[1] - 2 * heads] = np.nan
    poison = np.ones(pool.shape, bool)
    for _, source, first in found:
        if source is not None:
            poison[LAYER, source, :, first : first + width - 1] = False
    pool[poison] = np.nan
    return call | {"x": x, "conv_state": pool}


def step(pool: Any, call: dict[str, Any], layer: Any, activation: Any = "silu") -> Any:
    """`((y, gates), pool)` of the kernel, as the operators call it."""
    x, (num_layers, num_slots, _, columns) = call["x"], pool.shape
    loc, at, width = sequences(call["query_start_loc"], x.shape[0]), jnp.int32(layer), call["weight"].shape[1]
    indices = {name: call.get(name) for name in INDICES}
    sizes: Any = dict(num_slots=num_slots, num_layers=num_layers, max_accepted=columns - width + 2)
    batch = resolve(starts=loc[0], lengths=loc[1], layer=at, **sizes, **indices)
    heads = 0 if call.get("A_log") is None else call["A_log"].shape[0]
    gates = (call["A_log"], call["dt_bias"], x.shape[1] - 2 * heads, x.shape[1] - heads) if heads else None
    y, gates, pool = prologue.prologue(x, call["weight"], call.get("bias"), pool, *batch, gates, activation=activation)
    return (y, gates), pool


def arrays(call: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in call.items() if x is not None and name != "conv_state"}


def run(call: dict[str, Any], layer: int = LAYER, activation: Any = "silu", races: bool | None = False) -> Any:
    """The kernel itself, in the interpreter."""
    f = partial(step, layer=layer, activation=activation)
    return jax.tree.map(np.asarray, interpret(f, jnp.asarray(call["conv_state"]), arrays(call), races=races))


def check(call: dict[str, Any], out: Any, pool: Any, activation: Any = "silu") -> None:
    """Against the reference in float64; padding zero; every column that nobody writes bit for bit, the others exact."""
    (y, gates), before, (channels, width) = out, call["conv_state"], call["weight"].shape
    one = exact({name: x for name, x in call.items() if name not in ("A_log", "dt_bias")})
    one |= {"x": one["x"][:, :channels], "conv_state": one["conv_state"][LAYER]}
    want_y, want = reference.causal_conv1d(**one, activation=activation)
    valid, found = live(call)
    assert y.dtype == call["x"].dtype and pool.dtype == before.dtype
    close(np.asarray(y)[valid], want_y[valid], TOL[call["x"].dtype.type])
    zero(np.asarray(y)[~valid])
    used, old = [slot for slot, *_ in found], width - 1
    close_rows(pool[LAYER, ..., :old], want.astype(before.dtype)[..., :old], before[LAYER, ..., :old], used, 0)
    same(pool[LAYER, ..., old:], before[LAYER, ..., old:])
    same(pool[0], before[0])
    if gates:
        heads = len(call["A_log"])
        b, a = (
            call["x"][valid, first : first + heads]
            for first in (call["x"].shape[1] - 2 * heads, call["x"].shape[1] - heads)
        )
        wants = reference.gdn_gating(*(x.astype(np.float64) for x in (call["A_log"], a, b, call["dt_bias"])))
        for got, want in zip(gates, wants, strict=True):
            assert got.dtype == F32
            close(np.asarray(got)[valid], want, 2e-6)
            zero(np.asarray(got)[~valid])


@pytest.mark.parametrize(("dtypes", "S"), [*((name, 2) for name in DTYPES), ("bf16", 0), ("f32", 0)])
def test_against_the_reference(dtypes: str, S: int) -> None:
    call = poisoned(make(1, DTYPES[dtypes], S=S, heads=3))
    check(call, *run(call))


@pytest.mark.parametrize(
    "sizes",
    [dict(W=2), dict(W=3, S=1), dict(W=5, heads=9), dict(W=8, S=7, between=40, heads=1), dict(heads=130, D=128)],
    ids=str,
)
def test_other_widths_without_bias_flags_and_activation(sizes: Any) -> None:
    call = make(2, (F32,) * 3, (1, 2, 0, 9, 17, 3, 24), **{"D": 384, "slots": 12, **sizes})
    call["state_indices"][4] = 12
    call |= dict(bias=None, has_initial_state=None, initial_state_indices=None)
    if "num_accepted_tokens" in call:
        call["num_accepted_tokens"] %= sizes["S"] + 2  # some are 0
    call = poisoned(call)
    check(call, *run(call, activation=None), activation=None)


@pytest.mark.parametrize(
    ("tile", "size", "rows"),
    [(64, 256, 8), (32, 128, 16), (16, 128, 2)],
)
def test_every_tile_against_the_reference(monkeypatch: pytest.MonkeyPatch, tile: int, size: int, rows: int) -> None:
    monkeypatch.setattr(prologue, "channels_of_block", lambda *sizes: size)
    monkeypatch.setattr(prologue, "tokens_of_tile", lambda *sizes: tile)
    monkeypatch.setattr(prologue, "ROWS", rows)
    monkeypatch.setattr(prologue, "rows_of_gates", lambda heads: rows)
    call = poisoned(make(3, S=1, heads=4, between=8))
    check(call, *run(call))


@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1])
def test_another_layer_is_padding(layer: int) -> None:
    call = make(4, lengths=(9, 2), D=128, heads=2)
    (y, gates), pool = run(call, layer)
    zero(y)
    jax.tree.map(zero, gates)
    same(pool, call["conv_state"])


def test_gates_are_never_nan() -> None:
    """Finite inputs whose factors overflow and underflow; -inf where g does not fit float32."""
    call = make(13, (F32,) * 3, (11,), D=128, heads=6) | dict(initial_state_indices=None)
    x = np.array([-3e38, -1e4, -200, -88, -17, 0, 20, 88, 200, 1e4, 3e38], F32)
    call["A_log"][:], call["dt_bias"][:] = [-3e38, -100, 0, 60, 100, 3e38], [3e38, 0, -3e38, 1, -1, 0]
    call["x"][:11, 128:] = x[:, None]
    (_, (g, beta)), _ = run(call)
    wants = gdn_gating(call["A_log"], call["x"][:11, 134:], call["x"][:11, 128:134], call["dt_bias"])
    for got, want in zip((g, beta), wants):
        want = np.asarray(want)
        same(np.isinf(got[:11]), np.isinf(want))
        np.testing.assert_allclose(got[:11], want, rtol=1e-5, atol=1.2e-38)


def test_nothing_but_padding_and_nothing_but_empty_sequences() -> None:
    call = make(5, lengths=(7, 20), D=128, heads=2)
    call["state_indices"][:] = -1, 30
    check(poisoned(call), *run(poisoned(call)))
    call = make(6, lengths=(0, 0, 0), D=128)
    check(poisoned(call), *run(poisoned(call)))


def test_wild_counts_are_padding() -> None:
    call = make(7, (F32,) * 3, (2,) * 6, S=1, D=128)
    call["num_accepted_tokens"][:] = [0, 3, -1, 2**31 - 1, -(2**31), 2]
    call = poisoned(call | {"has_initial_state": None})
    assert len(live(call)[1]) == 1
    check(call, *run(call))


def test_a_sequence_has_the_same_bits_elsewhere_beside_others() -> None:
    call, other = (make(seed, lengths=lengths, D=128, heads=2) for seed, lengths in ((8, (3, 41, 6)), (9, (5, 4, 41))))
    other |= {name: call[name] for name in ("weight", "bias", "A_log", "dt_bias")}
    for one in (call, other):
        one |= dict(initial_state_indices=None, has_initial_state=None)
    other["x"][9:50] = call["x"][3:44]
    slot, moved_slot = call["state_indices"][1], other["state_indices"][2]
    other["conv_state"][LAYER, moved_slot] = call["conv_state"][LAYER, slot]
    (out, pool), (moved, moved_pool) = run(call), run(other)
    jax.tree.map(lambda x, y: same(y[9:50], x[3:44]), out, moved)
    same(moved_pool[LAYER, moved_slot], pool[LAYER, slot])


@pytest.mark.parametrize("loc", [(0, 2**31 - 1, -5, 10**6), (40, 3, 60, 1), (-9, 90, 0, 0)])
def test_a_malformed_start_stays_inside_the_arrays(loc: Any) -> None:
    call = make(10, lengths=(20, 37, 6), D=128, heads=2, S=1)
    call["query_start_loc"][:] = loc
    run(call, races=None)  # two tiles may own a token; the interpreter checks every index


def test_the_detector_sees_a_slot_named_twice() -> None:
    call = make(11, lengths=(2, 2), D=128)
    call["state_indices"][:] = 3
    run(call, races=True)


def test_what_a_block_takes() -> None:
    """Vectors that divide D and the rows of x; the card is filled by few tokens."""
    sizes = {
        (8192, 12352, 2): 512,
        (8192, 12354, 2): 256,
        (8192, 12353, 2): 128,
        (384, 384, 2): 128,
        (768, 768, 4): 256,
    }
    for of_block, size in sizes.items():
        assert prologue.channels_of_block(*of_block) == size
    for of_tile, size in {(8192, 16): 64, (2112, 16): 64, (2048, 16): 32, (1024, 16): 16, (1, 1): 16}.items():
        assert prologue.tokens_of_tile(*of_tile) == size
    assert [prologue.rows_of_gates(heads) for heads in (1, 32, 48, 64, 1000)] == [16, 16, 16, 8, 4]


def test_every_token_is_in_one_tile() -> None:
    rng = np.random.default_rng(12)
    for size, n in itertools.product((16, 64), (1, 5, 40)):
        loc = np.sort(rng.integers(0, 300, n + 1)).astype(INT)
        loc[0] = 0
        lengths = np.diff(loc) * rng.integers(0, 2, n).astype(INT)
        sequence, first, tokens, valid, position = np.asarray(prologue.tiles(loc[:-1], lengths, 300, size))
        owner, known = np.full(300, -1), np.zeros(300, bool)
        for i in np.flatnonzero(tokens):
            assert (owner[first[i] : first[i] + tokens[i]] == -1).all() and position[i] % size == 0
            owner[first[i] : first[i] + tokens[i]] = sequence[i]
            known[first[i] : first[i] + valid[i]] = True
        want = np.zeros(300, bool)
        for i in np.flatnonzero(lengths):
            want[loc[i] : loc[i] + lengths[i]] = True
            assert (owner[loc[i] : loc[i] + lengths[i]] == i).all()
        same(known, want)
        assert (owner >= 0).all() and tokens.max() <= size


def lowers_in_place(call: dict[str, Any], num_tokens: int | None = None, n: int | None = None) -> None:
    """With other numbers of tokens and sequences than the call has."""
    sizes = {name: (num_tokens, *x.shape[1:]) for name, x in call.items() if name == "x" and num_tokens}
    if n is not None:
        sizes |= {name: (n + (name == "query_start_loc"),) for name in (*INDICES, "query_start_loc") if name in call}
    specs = {name: jax.ShapeDtypeStruct(sizes.get(name, x.shape), x.dtype) for name, x in call.items()}
    pool = specs.pop("conv_state")
    text = lowered(step, pool, specs, jax.ShapeDtypeStruct((), jnp.int32), donate_argnums=0)
    assert text.count("mosaic_gpu_v2") == 1 and "tf.aliasing_output" in text
    assert "stablehlo.while" not in text and "stablehlo.exp" not in text and "stablehlo.transpose" not in text


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_every_dtype_lowers_in_place(monkeypatch: pytest.MonkeyPatch, dtypes: Any) -> None:
    monkeypatch.setattr(prologue, "ROWS", 2)
    lowers_in_place(make(0, dtypes, (1, 1), D=8192, slots=4, S=3, heads=32))


@pytest.mark.parametrize(("n", "between"), [(1, 0), (48, 4096)])
def test_real_sizes_lower_in_place(n: int, between: int) -> None:
    call = make(0, lengths=(1, 1), D=8192, slots=4, heads=32, between=between)
    assert call["x"].shape[1] == 8192 + 64 + between
    lowers_in_place(call, 8192, n)


@pytest.mark.parametrize(
    ("D", "heads", "between", "W", "S"),
    [(384, 3, 0, 2, 0), (2048, 48, 1, 4, 3), (512, 200, 0, 8, 7), (512, 0, 0, 4, 0)],
)
def test_every_size_lowers_in_place(
    monkeypatch: pytest.MonkeyPatch, D: int, heads: int, between: int, W: int, S: int
) -> None:
    monkeypatch.setattr(prologue, "ROWS", 2)
    lowers_in_place(make(0, lengths=(1, 1), slots=4, D=D, W=W, S=S, heads=heads, between=between), 5000, 3)


def operator(pool: Any, rest: Any, layer: Any = LAYER, implementation: Any = None) -> Any:
    """`causal_conv1d` itself; `pool` None: stateless."""
    where = {} if pool is None else dict(conv_state=pool, layer=layer)
    return causal_conv1d(**rest, **where, implementation=implementation)


def test_the_operator_has_the_kernel() -> None:
    """For CUDA, in place, with a pool and without; vmap and the backward pass take the XLA form."""
    call = make(14, (F32,) * 3, S=2, D=128)
    pool, rest = jnp.asarray(call["conv_state"]), arrays(call)
    alone = dict(x=jnp.ones((2, 3, 128), F32), weight=rest["weight"])

    def loss(pool: Any, x: Any, implementation: Any = None) -> Any:
        y, pool = operator(pool, rest | {"x": x}, implementation=implementation)
        return jnp.sum(y**2) + jnp.sum(jnp.sin(pool))

    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    with h200():
        traces = [jax.jit(operator).trace(None, alone), jax.jit(gradient).trace(pool, rest["x"])]
        batched = jax.jit(jax.vmap(operator)).trace(*jax.tree.map(lambda x: jnp.stack([x, x]), (pool, rest)))
    for traced in traces:
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1
        assert "mosaic" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "mosaic" not in batched.lower(lowering_platforms=("cuda",)).as_text()
    text = lowered(operator, pool, rest, jax.ShapeDtypeStruct((), jnp.int32), donate_argnums=0)
    assert text.count("mosaic_gpu_v2") == 1 and "tf.aliasing_output" in text
    got = traces[1].lower(lowering_platforms=("cpu",)).compile()(pool, rest["x"])
    by_name = jax.value_and_grad(partial(loss, implementation="xla"), argnums=(0, 1))
    jax.tree.map(partial(close, tol=1e-6), got, by_name(pool, rest["x"]))


def test_explain() -> None:
    call = make(15, D=128)
    with h200():
        assert str(gdn_jax.explain(causal_conv1d, **call)).startswith("mosaic runs; xla is passed over")
        assert gdn_jax.explain(causal_conv1d, np.zeros((2, 3, 128)), np.zeros((128, 4))).implementation == "mosaic"
        for bad, why in (
            (make(15, D=96), "a multiple of 128 channels, and `x` has 96"),
            (make(15, D=128, W=9), "widths up to 8, and `weight` has 9"),
            (call | {"x": call["x"][:0]}, "`x` is empty"),
            (call | {"query_start_loc": np.zeros(1, INT)}, "has no sequence"),
        ):
            told = gdn_jax.explain(causal_conv1d, **bad)
            assert told.implementation == "xla" and why in str(told), told
        with pytest.raises(ValueError, match=r"'mosaic', which cannot run here: its kernel takes a multiple of 128"):
            causal_conv1d(**make(15, D=96), layer=LAYER, implementation="mosaic")


# ------------------------------------------------------------------------------------------------------------- on a GPU


def on_gpu(call: dict[str, Any], activation: Any = "silu") -> Any:
    return twice(lambda pool, call: step(pool, call, LAYER, activation), call["conv_state"], arrays(call))


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(D=8192, heads=32, between=4096),
        dict(D=2048, heads=7, between=1, S=3),
        dict(D=384, W=8, S=2, heads=48),
        dict(D=1024, W=2),
    ],
    ids=str,
)
def test_gpu_against_the_reference(dtypes: Any, sizes: Any) -> None:
    for lengths in (LENGTHS, (700,), (1,) * 40, (63, 64, 65, 127, 128, 129)):
        call = poisoned(make(20, dtypes, lengths, slots=70, **sizes))
        check(call, *on_gpu(call))


@pytest.mark.gpu
def test_gpu_the_operator_against_the_reference() -> None:
    call = poisoned(make(24, D=1024, S=2))
    y, pool = twice(lambda pool, rest: operator(pool, rest, LAYER, "mosaic"), call["conv_state"], arrays(call))
    check(call, (y, ()), pool)
    x, weight = (normal(np.random.default_rng(25), *shape, dtype=BF16) for shape in ((3, 70, 256), (256, 4)))
    want = reference.causal_conv1d(x.astype(np.float64), weight.astype(np.float64))
    jax.tree.map(partial(close, tol=TOL[BF16]), causal_conv1d(x, weight, implementation="mosaic"), want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2048, 8192])
@pytest.mark.parametrize("n", [1, 48])
def test_gpu_real_sizes_against_xla(num_tokens: int, n: int) -> None:
    """The whole mixed row against the XLA forms on the same inputs, in every tile that the sizes choose."""
    rng = np.random.default_rng(n)
    cuts = np.sort(rng.integers(0, num_tokens, n - 1))
    lengths = np.diff([0, *cuts, num_tokens])
    call = make(21, lengths=tuple(lengths), D=8192, heads=32, between=4096, slots=2 * n + 2, S=1)
    (y, gates), pool = on_gpu(call)

    def plain(pool: Any, call: Any) -> Any:
        one = {name: x for name, x in call.items() if name not in ("A_log", "dt_bias")} | {"x": call["x"][:, :8192]}
        y, pool = causal_conv1d(**one, conv_state=pool, layer=LAYER, implementation="xla")
        b, a = call["x"][:, -64:-32], call["x"][:, -32:]
        return y, gdn_gating(call["A_log"], a, b, call["dt_bias"], implementation="xla"), pool

    want_y, want_gates, want_pool = jax.jit(plain)(jnp.asarray(call["conv_state"]), arrays(call))
    valid, _ = live(call)
    close(y, want_y, TOL[BF16])
    jax.tree.map(lambda got, want: close(got[valid], np.asarray(want)[valid], 2e-6), gates, want_gates)
    same(pool, want_pool)


@pytest.mark.gpu
def test_gpu_more_tiles_than_an_axis_of_the_grid() -> None:
    """A token a sequence and the identity for weights: outputs and new states are the inputs."""
    n = 70000
    x = normal(np.random.default_rng(22), n, 128)
    call = dict(x=x, weight=np.tile(np.array([0, 1], F32), (128, 1)), query_start_loc=np.arange(n + 1, dtype=INT))
    call |= dict(conv_state=np.zeros((LAYERS, n, 128, 1), F32), state_indices=np.arange(n, dtype=INT))
    (y, _), pool = on_gpu(call, activation=None)
    same(y, x)
    same(pool[LAYER, :, :, 0], x)


@pytest.mark.gpu
def test_gpu_arrays_of_more_than_2_31_elements() -> None:
    """A slot and tokens behind the first 2^31 elements of the pool, of x and of y."""
    D, num_tokens, num_slots = 8192, 270_000, 90_000
    assert min(D * num_tokens, 3 * D * num_slots) > 2**31
    rng = np.random.default_rng(23)
    tail, weight = (normal(rng, *shape, dtype=BF16) for shape in ((9, D), (D, 4)))
    history = normal(rng, D, 3, dtype=BF16)
    x = jnp.zeros((num_tokens, D), jnp.bfloat16).at[-9:].set(tail)
    pool = jnp.zeros((1, num_slots, D, 3), jnp.bfloat16).at[0, -2].set(history)
    loc = np.array([0, num_tokens - 9, num_tokens], INT)
    call = dict(x=x, weight=weight, query_start_loc=loc, state_indices=np.array([0, num_slots - 2], INT))
    (y, _), pool = jax.jit(partial(step, layer=0), donate_argnums=0)(pool, arrays(call))
    small = dict(x=tail, weight=weight, conv_state=history[None], query_start_loc=np.array([0, 9], INT))
    want, row = reference.causal_conv1d(**exact(small))
    close(y[-9:], want, TOL[BF16])
    assert not bool(jnp.any(y[:-9])) and not bool(jnp.any(pool[0, :-2])) and not bool(jnp.any(pool[0, -1]))
    same(pool[0, -2], row[0].astype(BF16))
