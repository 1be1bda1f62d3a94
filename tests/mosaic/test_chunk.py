"""The chunk kernels: in the interpreter against the reference, lowered for an H200, and on a GPU."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import INT, close, close_rows, exact, normal, rule_inputs, same, starts, zero
from kernels import BF16, F16, F32, h200, interpret, lowered, on_gpu

import gdn_jax
from gdn_jax import chunk_gated_delta_rule, reference
from gdn_jax.mosaic import chunk, follow
from gdn_jax.varlen import resolve, sequences

LAYERS = 2
TOL = {BF16: 5e-3, F16: 1.3e-3}  # of outputs and of float32 states
STATE_TOL = {BF16: 3e-3, F32: 0, F16: 4e-4}  # what rounding the state adds
DTYPES = {"bf16": (BF16, F32), "bf16-bf16": (BF16, BF16), "f16": (F16, F32), "f16-f16": (F16, F16)}
TOKENS = ("q", "k", "v", "g", "beta")


def make(
    seed: int, lengths: tuple[int, ...], dtypes: Any, K: int, V: int, H: int = 1, HV: int = 2, behind: int = 0
) -> dict[str, Any]:
    """A stacked call; some sequences start from zeros, some from another slot, every fourth is padding."""
    rng, (dtype, state_dtype), n = np.random.default_rng(seed), dtypes, len(lengths)
    slots = 2 * n + 3
    index, sources = rng.permutation(slots)[: 2 * n].reshape(2, n).astype(INT)
    index[3::4] = np.resize([-1, -7, slots, 2**31 - 1], len(index[3::4]))
    sources[::3] = index[::3]
    if n > 4:
        sources[4] = slots  # zeros
    return {
        **rule_inputs(rng, sum(lengths) + behind, H=H, HV=HV, K=K, V=V, dtype=dtype),
        "ssm_state": normal(rng, LAYERS, slots, HV, K, V).astype(state_dtype),
        "query_start_loc": starts(*lengths),
        "state_indices": index,
        "has_initial_state": np.arange(n) % 3 != 1,
        "initial_state_indices": sources,
    }


def real(call: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The sequences that count, and their tokens."""
    slots, bounds = call["state_indices"], call["query_start_loc"]
    live = (slots >= 0) & (slots < call["ssm_state"].shape[1])
    tokens = np.zeros(len(call["v"]), bool)
    for n in np.flatnonzero(live):
        tokens[bounds[n] : bounds[n + 1]] = True
    return live & (np.diff(bounds) > 0), tokens


def poisoned(call: dict[str, Any]) -> dict[str, Any]:
    """NaN wherever nothing may look."""
    call = {name: np.array(x) for name, x in call.items()}
    live, tokens = real(call)
    for name in TOKENS:
        call[name][~tokens] = np.nan
    pool, sources = call["ssm_state"], call["initial_state_indices"]
    reads = sources[live & call["has_initial_state"]]
    pool[1, np.setdiff1d(np.arange(pool.shape[1]), reads)] = np.nan
    pool[0] = np.nan
    return call


def run(call: dict[str, Any], layer: int = 1, norm: bool = True, races: bool | None = False) -> tuple[Any, Any]:
    """The kernels in the interpreter."""

    def kernels(q, k, v, g, beta, ssm_state, query_start_loc, **indices):
        first, lengths = sequences(query_start_loc, v.shape[0])
        sizes = dict(num_layers=ssm_state.shape[0], num_slots=ssm_state.shape[1])
        batch = resolve(starts=first, lengths=lengths, layer=jnp.int32(layer), **sizes, **indices)
        scale = jnp.float32(q.shape[-1] ** -0.5)
        options = dict(use_qk_l2norm=norm)
        return chunk.chunk(q, k, v, g, beta, ssm_state, batch, first + lengths, scale, **options)

    arrays = {name: jnp.asarray(x) for name, x in call.items()}
    return interpret(lambda arrays: kernels(**arrays), arrays, races=races)


def check(call: dict[str, Any], o: Any, pool: Any, norm: bool = True, tol: float = 0) -> None:
    """Every sequence against the reference in float64; padding zero; every row that nobody names bit for bit."""
    o, pool = np.asarray(o), np.asarray(pool)
    one = exact(call | {"ssm_state": call["ssm_state"][1]})
    want_o, want = reference.chunk_gated_delta_rule(**one, use_qk_l2norm=norm)
    live, tokens = real(call)
    tol = tol or TOL[call["v"].dtype.type]
    bounds = call["query_start_loc"]
    for n in np.flatnonzero(live):
        close(o[bounds[n] : bounds[n + 1]], want_o[bounds[n] : bounds[n + 1]], tol)
    zero(o[~tokens])
    state_tol = tol + STATE_TOL[call["ssm_state"].dtype.type]
    close_rows(pool[1], want, call["ssm_state"][1], call["state_indices"][live], state_tol)
    same(pool[0], call["ssm_state"][0])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_against_the_reference(dtypes: Any) -> None:
    K, V = (64, 128) if dtypes[0] == dtypes[1] else (128, 64)
    call = poisoned(make(K, (70, 0, 1, 5, 64), dtypes, K, V, HV=1, behind=67))
    check(call, *run(call))


@pytest.mark.parametrize("chains", [1, 2])
def test_a_cta_goes_from_sequence_to_sequence(monkeypatch: pytest.MonkeyPatch, chains: int) -> None:
    monkeypatch.setattr(follow, "SMS", 1)
    monkeypatch.setattr(chunk, "chains_of_cta", lambda *sizes: chains)
    call = poisoned(make(1, (3, 0, 200, 64, 1, 70), (BF16, F32), 64, 64 * chains, HV=1))
    check(call, *run(call))


@pytest.mark.parametrize(("pieces", "K", "V"), [(2, 64, 64), (4, 64, 128)])
def test_segments(monkeypatch: pytest.MonkeyPatch, pieces: int, K: int, V: int) -> None:
    monkeypatch.setattr(chunk, "segments", lambda *sizes: pieces)
    call = poisoned(make(3, (200, 0, 3, 64, 130), (BF16, BF16 if pieces == 2 else F32), K, V, HV=1, behind=5))
    check(call, *run(call))


@pytest.mark.parametrize(("H", "HV", "length"), [(1, 3, 67), (2, 4, 67), (1, 8, 9)])
def test_value_heads_of_a_key_head(H: int, HV: int, length: int) -> None:
    call = poisoned(make(2, (length,), (BF16, F32), 64, 64, H=H, HV=HV))
    check(call, *run(call))


@pytest.mark.parametrize("lengths", [(1, 15, 16), (63, 64, 65), (127, 128, 129)], ids=str)
def test_lengths(lengths: tuple[int, ...]) -> None:
    call = poisoned(make(lengths[0], lengths, (BF16, BF16), 64, 64, HV=1))
    check(call, *run(call))


def test_few_tokens_without_norm() -> None:
    call = make(4, (20,), (BF16, F32), 64, 64, HV=1)
    call["k"] = (call["k"].astype(F32) / 8).astype(BF16)
    check(call, *run(call, norm=False), norm=False)


def strange(what: str, call: dict[str, Any]) -> dict[str, Any]:
    """The same call with extreme values."""
    tokens, rng = len(call["v"]), np.random.default_rng(0)
    if what == "decay":
        call["g"][rng.random(call["g"].shape) < 0.2] = -np.inf
        call["g"][rng.random(call["g"].shape) < 0.2] = -1e4
        call["g"][rng.random(call["g"].shape) < 0.2] = -50
    if what == "no decay":
        call["g"][:] = 0
    if what == "one key":
        call["k"][:], call["beta"][:] = call["k"][:1], 1
        call["g"][:] = 0
    if what == "large":
        call["q"], call["k"] = (np.array(1e4 * call[x].astype(F32)).astype(call[x].dtype) for x in "qk")
    if what == "beta":
        call["beta"][:] = np.arange(tokens)[:, None] % 3 == 0
    return call


STRANGE = ["decay", "no decay", "one key", "large", "beta"]


@pytest.mark.parametrize("what", STRANGE)
def test_extreme_values(what: str) -> None:
    for dtype in (BF16, F16) if what in ("large", "decay") else (BF16,):
        call = strange(what, make(5, (100,), (dtype, F32), 64, 64, HV=1))
        check(call, *run(call))


@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1])
def test_another_layer_is_padding(layer: int) -> None:
    call = make(6, (70, 3), (BF16, F32), 64, 64, HV=1)
    o, pool = run(call, layer)
    zero(o)
    same(pool, call["ssm_state"])


def test_a_sequence_has_the_same_bits_elsewhere_beside_others() -> None:
    lengths = (70, 9, 130)
    call, other = (make(seed, lengths, (BF16, F32), 64, 64, HV=1, behind=20) for seed in (7, 8))
    moved = {name: np.array(x) for name, x in other.items()}
    moved["query_start_loc"] = starts(17, 70, 142)
    for name in TOKENS:
        moved[name][17:87] = call[name][:70]
    for name in ("has_initial_state",):
        moved[name][1] = call[name][0]
    moved["state_indices"][:], moved["initial_state_indices"][:] = [2, 5, 0], [2, 4, 0]
    moved["ssm_state"][1, 4] = call["ssm_state"][1, call["initial_state_indices"][0]]
    (o, pool), (moved_o, moved_pool) = run(call), run(moved)
    same(np.asarray(moved_o)[17:87], np.asarray(o)[:70])
    same(np.asarray(moved_pool)[1, 5], np.asarray(pool)[1, call["state_indices"][0]])


def test_malformed_starts_stay_inside() -> None:
    call = make(10, (60, 60, 60), (BF16, F32), 64, 64, HV=1)
    for bounds in ([100, 20, 300, 5], [-5, 170, 170, 2**31 - 1]):
        call["query_start_loc"] = np.array(bounds, INT)
        _, pool = run(call, races=None)
        others = np.setdiff1d(np.arange(pool.shape[1]), call["state_indices"])
        same(np.asarray(pool)[1, others], call["ssm_state"][1, others])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_every_shape_lowers_in_place(dtypes: Any) -> None:
    def step(pool: Any, q: Any, k: Any, v: Any, g: Any, loc: Any, index: Any, layer: Any) -> Any:
        places = dict(query_start_loc=loc, state_indices=index, layer=layer, implementation="mosaic")
        return chunk_gated_delta_rule(q, k, v, g, g, ssm_state=pool, **places)

    shapes = [  # and the number of launches
        (8192, 48, 16, 32, 128, 128, 2),
        (40, 3, 1, 3, 64, 128, 1),
        (2048, 1, 16, 32, 128, 128, 1),
        (8192, 1, 4, 8, 128, 128, 3),
    ]
    for tokens, n, H, HV, K, V, launches in shapes if dtypes == (BF16, F32) else shapes[:2]:
        s = jax.ShapeDtypeStruct
        pool = s((LAYERS, 2 * n, HV, K, V), dtypes[1])
        q, v = s((tokens, H, K), dtypes[0]), s((tokens, HV, V), dtypes[0])
        gates, loc, index, layer = (s(x, t) for x, t in (((tokens, HV), F32), ((n + 1,), INT), ((n,), INT), ((), INT)))
        text = lowered(step, pool, q, q, v, gates, loc, index, layer, donate_argnums=0)
        assert text.count("mosaic_gpu_v2") == launches and "tf.aliasing_output" in text, (tokens, K, V)
        assert "stablehlo.while" not in text, (tokens, K, V)


def test_explain_and_what_is_refused() -> None:
    call = make(0, (70,), (BF16, F32), 64, 48) | {"layer": 0}
    with h200():
        told = gdn_jax.explain(chunk_gated_delta_rule, **call)
        assert told.implementation == "xla" and "head dimensions of 64, 128, and `v` has 48" in str(told)
        with pytest.raises(
            ValueError, match=r"'mosaic', which cannot run here: its kernel takes head dimensions of 64"
        ):
            chunk_gated_delta_rule(**call, implementation="mosaic")
        wide = make(0, (70,), (F32, F32), 64, 64)
        assert "float32 keeps its own products" in str(gdn_jax.explain(chunk_gated_delta_rule, **wide))
        many = make(0, (70,), (BF16, F32), 64, 64, HV=16)
        assert "up to 8 value heads" in str(gdn_jax.explain(chunk_gated_delta_rule, **many))
        good = make(0, (70,), (BF16, F32), 64, 64)
        assert gdn_jax.explain(chunk_gated_delta_rule, **good).implementation == "mosaic"
        nobody = good | {"query_start_loc": np.zeros(1, INT)}
        assert "no sequence" in str(gdn_jax.explain(chunk_gated_delta_rule, **nobody))


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("H", "HV"), [(16, 32), (2, 16), (1, 1), (3, 9)])
def test_gpu_against_the_reference(dtypes: Any, H: int, HV: int) -> None:
    lengths = (1000, 0, 1, 15, 16, 63, 64, 65, 127, 128, 129) if HV < 32 else (300, 0, 1, 70, 129)
    for seed, (K, V) in enumerate(itertools.product((64, 128), (64, 128)) if HV == 9 else [(128, 128)]):
        call = poisoned(make(seed, lengths, dtypes, K, V, H=H, HV=HV, behind=71))
        check(call, *on_gpu(chunk_gated_delta_rule, call))


@pytest.mark.gpu
@pytest.mark.parametrize("what", STRANGE)
def test_gpu_extreme_values(what: str) -> None:
    for dtype in (BF16, F16):
        call = strange(what, make(5, (1500, 3, 200), (dtype, F32), 128, 128, HV=2))
        check(call, *on_gpu(chunk_gated_delta_rule, call))


@pytest.mark.gpu
def test_gpu_one_long_sequence() -> None:
    call = poisoned(make(6, (8191,), (BF16, F32), 128, 128, HV=2))
    call["g"][:] = 0
    check(call, *on_gpu(chunk_gated_delta_rule, call))


@pytest.mark.gpu
def test_gpu_random_batches() -> None:
    """300 batches in one static shape: other lengths, slots, flags and padding each time."""
    step = jax.jit(partial(chunk_gated_delta_rule, layer=1, implementation="mosaic"))
    for seed in range(300):
        rng = np.random.default_rng(seed)
        cuts = np.sort(rng.integers(0, 301, 6))
        call = make(
            seed, tuple(np.diff(cuts).tolist()), (BF16, F32), 64, 64, H=1, HV=2, behind=int(300 - cuts[-1] + cuts[0])
        )
        call["has_initial_state"] = rng.random(5) < 0.5
        call["g"][rng.random(call["g"].shape) < 0.05] = -np.inf
        call = poisoned(call)
        check(call, *jax.tree.map(np.asarray, step(**call)))


@pytest.mark.gpu
def test_gpu_grids_of_more_than_65535_blocks() -> None:
    """A sequence of a million tokens, and 3,000 of them: the last tokens against the same tokens alone from the same state."""
    rng = np.random.default_rng(0)
    T, tail = 1_000_003, 131
    call = {name: jnp.asarray(x) for name, x in rule_inputs(rng, T, H=1, HV=4, K=64, V=64, dtype=BF16).items()}
    pool = jnp.zeros((3, 4, 64, 64), F32)
    run = jax.jit(partial(chunk_gated_delta_rule, implementation="mosaic"))
    first = jnp.array([0, T - tail], INT)
    place = dict(state_indices=jnp.array([1], INT))
    o, whole = run(**call, ssm_state=pool, query_start_loc=jnp.array([0, T], INT), **place)
    _, before = run(**call, ssm_state=pool, query_start_loc=first, **place)
    behind = {name: x[T - tail :] for name, x in call.items()}
    o_tail, after = run(**behind, ssm_state=before, query_start_loc=jnp.array([0, tail], INT), **place)
    close(o[T - tail :], o_tail, 5e-3)
    close(whole, after, 5e-3)
    n = 3000
    many = rule_inputs(rng, 2 * n, H=8, HV=32, K=64, V=64, dtype=BF16)
    bounds = jnp.arange(0, 2 * n + 1, 2, dtype=INT)
    o, states = run(**many, query_start_loc=bounds)
    last = {name: x[-2:] for name, x in many.items()}
    want_o, want = reference.chunk_gated_delta_rule(**exact(last), query_start_loc=np.array([0, 2], INT))
    close(o[-2:], want_o, 5e-3)
    close(states[-1:], want, 5e-3)
