"""Every operator under jit, vmap, scan, remat, grad, jvp and shard_map, with x64 on, and under another matmul precision."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gdn_jax
import golden
from gdn_jax import GDNConfig, GDNState, GDNWeights, reference

pytestmark = pytest.mark.usefixtures("quick_compiles")

F32, INT = np.float32, np.int32
H, HV, K, V, W, S = 2, 4, 8, 6, 4, 1
D = 2 * H * K + HV * V
PLAIN = GDNConfig(HV, H, K, V, W, ssm_dtype="float32", conv_dtype="float32")
MTP = GDNConfig(HV, H, K, V, W, mtp_step=S, ssm_dtype="float32", conv_dtype="float32")
T, N, SLOTS = 6, 3, 5
STARTS = np.array([0, 3, 3, 5], INT)  # three tokens, none, two, and one of padding
SHORT = np.array([0, 2, 2, 4], INT)  # for verify steps of at most two
TABLE = np.array([[0, 1], [2, 3], [4, 5]], INT)
ACCEPTED = np.array([2, 1, 1], INT)

Call = dict[str, Any]
Op = Callable[[Call, Call], Any]  # (float arrays, index arrays) to results

# How the arrays of each operator are split over heads (or channels), for shard_map.
HEADS = dict(
    A_log=P("h"), dt_bias=P("h"), a=P(None, "h"), b=P(None, "h"), g=P(None, "h"), beta=P(None, "h"),
    q=P(None, "h"), k=P(None, "h"), v=P(None, "h"), o=P(None, "h"), z=P(None, "h"), ssm_state=P(None, "h"),
    x=P(None, "h"), bias=P("h"), conv_state=P(None, "h"), weight=P("h"),
)  # fmt: skip


def inputs(name: str, seed: int = 0) -> tuple[Call, Call]:
    """The float arrays and the index arrays of a call of operator `name`."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape).astype(F32))

    def rule(tokens: int, rows: int) -> Call:
        g, beta = -jnp.abs(normal(tokens, HV)), jax.nn.sigmoid(normal(tokens, HV))
        q, k, v = normal(tokens, H, K), normal(tokens, H, K), normal(tokens, HV, V)
        return dict(q=q, k=k, v=v, g=g, beta=beta, ssm_state=normal(rows, HV, K, V))

    def conv(tokens: int) -> Call:
        return dict(x=normal(tokens, D), weight=normal(D, W), bias=normal(D), conv_state=normal(SLOTS, D, W - 1 + S))

    slots, has = np.array([3, 1, 0], INT), np.array([True, True, False])
    pads = np.array([3, -1, 0], INT)
    match name:
        case "gdn_gating":
            return dict(A_log=normal(HV), a=normal(T, HV), b=normal(T, HV), dt_bias=normal(HV)), {}
        case "gated_rms_norm":
            return dict(o=normal(T, HV, V), z=normal(T, HV, V), weight=normal(V)), {}
        case "causal_conv1d":
            return conv(T), dict(state_indices=slots, query_start_loc=STARTS, has_initial_state=has)
        case "causal_conv1d_update":
            return conv(N), dict(state_indices=pads)
        case "verify_conv":
            return conv(T), dict(state_indices=slots, query_start_loc=SHORT, num_accepted_tokens=ACCEPTED)
        case "chunk_gated_delta_rule":
            return rule(T, SLOTS), dict(state_indices=slots, query_start_loc=STARTS, has_initial_state=has)
        case "recurrent_gated_delta_rule":
            return rule(N, SLOTS), dict(state_indices=pads)
        case "mtp_gated_delta_rule":
            tables = dict(read_indices=TABLE, write_indices=TABLE, num_accepted_tokens=ACCEPTED)
            return rule(T, 2 * SLOTS), dict(**tables, query_start_loc=SHORT)
    config = MTP if name == "gdn_mtp_decode" else PLAIN
    tokens = N if name == "gdn_decode" else T
    state = GDNState(normal(SLOTS, D, config.conv_state_len), normal(SLOTS * (config.mtp_step + 1), HV, K, V))
    weights = GDNWeights(normal(D, W), normal(D), normal(HV), normal(HV))
    arrays = dict(weights=weights, state=state, mixed_qkvzba=normal(tokens, config.qkvz_dim + config.ba_dim))
    arrays["norm_weight"] = normal(V)
    match name:
        case "gdn_prefill":
            return arrays, dict(state_indices=slots, query_start_loc=STARTS, has_initial_state=has)
        case "gdn_decode":
            return arrays, dict(state_indices=pads)
        case "gdn_mtp_decode":
            return arrays, dict(state_indices=slots, query_start_loc=SHORT, num_accepted_tokens=ACCEPTED)
    raise ValueError(name)


RULES = ["chunk_gated_delta_rule", "recurrent_gated_delta_rule", "mtp_gated_delta_rule"]
SIMPLE = ["gdn_gating", "gated_rms_norm", "causal_conv1d", "causal_conv1d_update", "verify_conv", *RULES]
LAYERS = ["gdn_prefill", "gdn_decode", "gdn_mtp_decode"]
ALL = [*SIMPLE, *LAYERS]


def op(name: str, module: Any = gdn_jax) -> Op:
    function = getattr(module, "causal_conv1d_update" if name == "verify_conv" else name)
    static = dict(config=MTP if name == "gdn_mtp_decode" else PLAIN) if name in LAYERS else {}
    return lambda arrays, indices: function(**arrays, **indices, **static)


@functools.cache
def compiled(name: str) -> Any:
    return jax.jit(op(name))


def near(x: Any, y: Any, tol: float) -> None:
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert golden.rel(a, b) <= tol, golden.rel(a, b)


# ---- jit, vmap, scan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_jit(name: str) -> None:
    arrays, indices = inputs(name)
    got = compiled(name)(arrays, indices)
    near(got, op(name)(arrays, indices), 1e-6)
    want = op(name, reference)(arrays, indices)
    near(got, want, 1e-5)


@pytest.mark.parametrize("name", ALL)
def test_vmap(name: str) -> None:
    """Two batches, each with its own pool and indices."""
    cases = [inputs(name, 1), inputs(name, 2)]
    if "state_indices" in cases[1][1]:
        cases[1][1]["state_indices"] = np.array([2, 4, -1], INT)
    if name == "mtp_gated_delta_rule":
        cases[1][1]["read_indices"] = cases[1][1]["write_indices"] = TABLE[::-1].copy() + 2
    arrays, indices = jax.tree.map(lambda *x: jnp.stack(x), *cases)
    got = jax.jit(jax.vmap(op(name)))(arrays, indices)
    for i, case in enumerate(cases):
        near(jax.tree.map(lambda x, i=i: x[i], got), compiled(name)(*case), 2e-6)


@pytest.mark.parametrize("name", ["causal_conv1d_update", *RULES, *LAYERS])
def test_scan_over_steps(name: str) -> None:
    """Three steps in one program, the state as carry."""
    arrays, indices = inputs(name)
    pool = next(key for key in ("conv_state", "ssm_state", "state") if key in arrays)
    rest = {key: x for key, x in arrays.items() if key != pool}

    def body(state: Any, factor: jax.Array) -> tuple[Any, Any]:
        moved = {key: x * factor if key in ("x", "v", "mixed_qkvzba") else x for key, x in rest.items()}
        out = op(name)({**moved, pool: state}, indices)
        return out[-1], out[0]

    factors = jnp.array([1.0, 0.5, 2.0])
    state, outputs = jax.jit(lambda state: lax.scan(body, state, factors))(arrays[pool])
    want = arrays[pool]
    for i, factor in enumerate(factors):
        moved = {key: x * factor if key in ("x", "v", "mixed_qkvzba") else x for key, x in rest.items()}
        out = compiled(name)({**moved, pool: want}, indices)
        want = out[-1]
        near(outputs[i], out[0], 5e-6)
    near(state, want, 5e-6)


# ---- derivatives ----------------------------------------------------------------------------------------------------

# A naive twin of every operator, written with plain jnp and Python loops over tokens, differentiable by JAX.


def naive_rule(arrays: Call, starts: Any, reads: Any, writes: Any) -> Any:
    q, k, v, g, beta, pool = (arrays[name] for name in ("q", "k", "v", "g", "beta", "ssm_state"))
    q, k = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, HV // H, axis=1) for x in (q * K**-0.5, k))
    o, new = jnp.zeros_like(v), pool
    for n, read in enumerate(reads):
        if not writes[n]:
            continue
        m = jnp.zeros(pool.shape[1:]) if read is None else pool[read]
        for j, t in enumerate(range(starts[n], starts[n + 1])):
            m = jnp.exp(g[t])[:, None, None] * m
            u = beta[t][:, None] * (v[t] - jnp.einsum("hkv,hk->hv", m, k[t]))
            m = m + k[t][:, :, None] * u[:, None, :]
            o = o.at[t].set(jnp.einsum("hkv,hk->hv", m, q[t]))
            if writes[n][j] is not None:
                new = new.at[writes[n][j]].set(m)
    return o, new


def naive_conv(arrays: Call, starts: Any, reads: Any, verify: bool, offsets: Any) -> Any:
    x, weight, bias, pool = (arrays[name] for name in ("x", "weight", "bias", "conv_state"))
    y, new = jnp.zeros_like(x), pool
    for n, (read, write) in enumerate(reads):
        tokens = range(starts[n], starts[n + 1])
        if write is None or not tokens:
            continue
        history = jnp.zeros((D, W - 1)) if read is None else pool[read, :, offsets[n] : offsets[n] + W - 1]
        row = jnp.concatenate([history, x[tokens.start : tokens.stop].T], axis=1)
        for j, t in enumerate(tokens):
            pre = bias + jnp.sum(weight * row[:, j : j + W], axis=1)
            y = y.at[t].set(pre * jax.nn.sigmoid(pre))
        if verify:
            kept = row[:, 1:]
            new = new.at[write].set(jnp.pad(kept, ((0, 0), (0, pool.shape[2] - kept.shape[1]))))
        else:
            new = new.at[write, :, : W - 1].set(row[:, len(tokens) :])
    return y, new


def naive(name: str) -> Callable[[Call], Any]:
    """The same as `op(name)` on the fixed indices of `inputs(name)`."""
    match name:
        case "gdn_gating":
            return lambda c: (
                -jnp.exp(c["A_log"]) * jnp.log1p(jnp.exp(c["a"] + c["dt_bias"])),
                1 / (1 + jnp.exp(-c["b"])),
            )
        case "gated_rms_norm":
            return lambda c: (
                c["o"] / jnp.sqrt(jnp.mean(c["o"] ** 2, -1, keepdims=True) + 1e-6)
                * c["weight"] * c["z"] / (1 + jnp.exp(-c["z"]))
            )  # fmt: skip
        case "causal_conv1d":
            return lambda c: naive_conv(c, STARTS, [(3, 3), (1, None), (None, 0)], False, [0, 0, 0])
        case "causal_conv1d_update":
            return lambda c: naive_conv(c, range(4), [(3, 3), (None, None), (0, 0)], False, [0, 0, 0])
        case "verify_conv":
            return lambda c: naive_conv(c, SHORT, [(3, 3), (1, None), (0, 0)], True, [1, 0, 0])
        case "chunk_gated_delta_rule":
            return lambda c: naive_rule(c, STARTS, [3, 1, None], [[None, None, 3], [], [None, 0]])
        case "recurrent_gated_delta_rule":
            return lambda c: naive_rule(c, range(4), [3, None, 0], [[3], [], [0]])
        case "mtp_gated_delta_rule":
            return lambda c: naive_rule(c, SHORT, [1, 2, 4], [[0, 1], [], [4, 5]])
    raise ValueError(name)


def scalar(function: Callable[[Call], Any], weights: Any) -> Callable[[Call], jax.Array]:
    def loss(arrays: Call) -> jax.Array:
        leaves = zip(jax.tree.leaves(function(arrays)), weights, strict=True)
        return sum((jnp.sum(leaf * w) for leaf, w in leaves), jnp.float32(0))

    return loss


def cotangents(results: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(9)
    return [rng.standard_normal(leaf.shape).astype(F32) for leaf in jax.tree.leaves(results)]


@functools.cache
def gradient(name: str) -> tuple[Call, Call, list[np.ndarray], Any]:
    """Inputs, indices, cotangents of the results, and the gradient that the library gives: shared by three tests."""
    arrays, indices = inputs(name, 3)
    weights = cotangents(compiled(name)(arrays, indices))
    loss = scalar(lambda arrays: op(name)(arrays, indices), weights)
    return arrays, indices, weights, jax.jit(jax.grad(loss))(arrays)


@pytest.mark.parametrize("name", SIMPLE)
def test_grad(name: str) -> None:
    arrays, indices, weights, got = gradient(name)
    twin = naive(name)
    near(twin(arrays), compiled(name)(arrays, indices), 1e-5)
    want = jax.jit(jax.grad(scalar(twin, weights)))(arrays)
    for key in want:
        near(got[key], want[key], 2e-5)
        assert np.asarray(want[key]).any(), key


@pytest.mark.parametrize("name", LAYERS)
def test_grad_of_a_layer(name: str) -> None:
    """Against the float64 reference's central differences along a random direction."""
    arrays, indices, weights, got = gradient(name)
    rng = np.random.default_rng(10)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), arrays)
    exact = op(name, reference)

    def loss(step: float) -> float:
        moved = jax.tree.map(lambda x, d: np.asarray(x, np.float64) + step * d, arrays, direction)
        leaves = zip(jax.tree.leaves(exact(moved, indices)), weights, strict=True)
        return sum(float(np.sum(leaf * w)) for leaf, w in leaves)

    want = (loss(1e-6) - loss(-1e-6)) / 2e-6
    along = sum(
        float(np.sum(np.asarray(g, np.float64) * d))
        for g, d in zip(jax.tree.leaves(got), jax.tree.leaves(direction), strict=True)
    )
    assert abs(along - want) <= 1e-4 * max(abs(want), 1.0), (along, want)


@pytest.mark.parametrize("name", ["causal_conv1d", *RULES, "gdn_decode"])
def test_remat(name: str) -> None:
    arrays, indices, weights, want = gradient(name)
    saved = jax.checkpoint(scalar(lambda arrays: op(name)(arrays, indices), weights))
    near(jax.jit(jax.grad(saved))(arrays), want, 2e-6)


@pytest.mark.parametrize("name", ALL)
def test_jvp(name: str) -> None:
    """Forward mode along a direction is the gradient times the direction."""
    arrays, indices, weights, grad = gradient(name)
    rng = np.random.default_rng(11)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape).astype(F32)), arrays)
    loss = scalar(lambda arrays: op(name)(arrays, indices), weights)
    value, got = jax.jit(lambda a, d: jax.jvp(loss, (a,), (d,)))(arrays, direction)
    pairs = zip(jax.tree.leaves(grad), jax.tree.leaves(direction), strict=True)
    terms = [np.asarray(g, np.float64) * np.asarray(d, np.float64) for g, d in pairs]
    want, size = sum(term.sum() for term in terms), sum(np.abs(term).sum() for term in terms)
    assert np.isfinite(float(value))
    assert abs(float(got) - want) <= 1e-5 * size, (float(got), want)


# ---- shard_map ------------------------------------------------------------------------------------------------------


def devices() -> list[Any]:
    """conftest.py asks for two on the CPU before jax starts."""
    return jax.devices("cpu")[:2]


@pytest.mark.parametrize("name", SIMPLE)
def test_shard_map_over_heads(name: str) -> None:
    """Each of two devices has half of the heads (or channels): the same results, no communication."""
    assert len(devices()) == 2
    mesh = jax.make_mesh((2,), ("h",), axis_types=(AxisType.Auto,), devices=devices())
    arrays, indices = inputs(name)
    specs = {key: HEADS[key] for key in arrays}
    if name == "gated_rms_norm":
        specs["weight"] = P()
    out_specs = P(None, "h")
    sharded = jax.shard_map(
        lambda arrays, indices: op(name)(arrays, indices), mesh=mesh, in_specs=(specs, P()), out_specs=out_specs
    )
    placed = {key: jax.device_put(x, NamedSharding(mesh, specs[key])) for key, x in arrays.items()}
    program = jax.jit(sharded).lower(placed, indices).compile()
    got = program(placed, indices)
    assert all(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(got))
    text = str(program.as_text())
    assert "fusion" in text or "while" in text, "it is the compiled program"
    assert not [word for word in ("all-reduce", "all-gather", "collective-permute", "all-to-all") if word in text]
    near(got, compiled(name)(arrays, indices), 1e-6)


def part(x: jax.Array, sizes: list[int], rank: int, axis: int) -> jax.Array:
    pieces = jnp.split(x, np.cumsum(sizes)[:-1], axis=axis)
    return jnp.concatenate([jnp.split(piece, 2, axis=axis)[rank] for piece in pieces], axis=axis)


@pytest.mark.parametrize("name", LAYERS)
def test_shard_map_of_a_layer(name: str) -> None:
    """Two tensor-parallel ranks in one program, each with its own config, weights and pools."""
    mesh = jax.make_mesh((2,), ("h",), axis_types=(AxisType.Auto,), devices=devices())
    arrays, indices = inputs(name)
    config = MTP if name == "gdn_mtp_decode" else PLAIN
    qkv, everything = [H * K, H * K, HV * V], [H * K, H * K, HV * V, HV * V, HV, HV]
    weights, state = arrays["weights"], arrays["state"]
    ranks = [
        dict(
            weights=GDNWeights(
                part(weights.conv_weight, qkv, r, 0), part(weights.conv_bias, qkv, r, 0), part(weights.A_log, [HV], r, 0),
                part(weights.dt_bias, [HV], r, 0),
            ),
            state=GDNState(part(state.conv, qkv, r, 1), part(state.ssm, [HV], r, 1)),
            mixed_qkvzba=part(arrays["mixed_qkvzba"], everything, r, 1),
            norm_weight=arrays["norm_weight"],
        )
        for r in (0, 1)
    ]  # fmt: skip
    both = jax.tree.map(lambda *x: jnp.stack(x), *ranks)
    half, function = dataclasses.replace(config, tp_size=2), getattr(gdn_jax, name)

    def rank(arrays: Call, indices: Call) -> Any:
        own = jax.tree.map(lambda x: x[0], arrays)
        return jax.tree.map(lambda x: x[None], tuple(function(**own, **indices, config=half)))

    got = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(P("h"), P()), out_specs=P("h")))(both, indices)
    want = compiled(name)(arrays, indices)
    near(jnp.concatenate([got[0][0], got[0][1]], axis=1), want.o, 2e-6)
    for r in (0, 1):
        near(got[2].ssm[r], part(want.state.ssm, [HV], r, 1), 2e-6)
        near(got[2].conv[r], part(want.state.conv, qkv, r, 1), 0)


# ---- x64, precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_x64_changes_no_dtype(name: str) -> None:
    arrays, indices = inputs(name)
    want = compiled(name)(arrays, indices)
    wide = {key: x.astype(np.int64) if x.dtype == INT else x for key, x in indices.items()}
    with jax.enable_x64(True):
        got = op(name)(arrays, wide)
        assert jnp.asarray(np.zeros(1)).dtype == jnp.float64, "x64 is on"
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype == F32
    near(got, want, 1e-6)


@pytest.mark.parametrize("name", [*RULES, "causal_conv1d"])
def test_x64_with_bfloat16(name: str) -> None:
    arrays, indices = inputs(name)
    low = {key: x if key in ("g", "beta", "ssm_state") else x.astype("bfloat16") for key, x in arrays.items()}
    with jax.enable_x64(True):
        output, pool = op(name)(low, indices)
    assert (output.dtype, pool.dtype) == ("bfloat16", low["conv_state" if "conv_state" in low else "ssm_state"].dtype)


@pytest.mark.parametrize("name", [*RULES, "gdn_prefill"])
def test_num_02_the_matmul_precision_flag_changes_nothing(name: str) -> None:
    arrays, indices = inputs(name)
    want = op(name, reference)(arrays, indices)
    with jax.default_matmul_precision("bfloat16"):
        low = op(name)(arrays, indices)
        program = jax.jit(op(name)).lower(arrays, indices).as_text()
    near(low, want, 1e-5 if name in ("chunk_gated_delta_rule", "gdn_prefill") else 2e-6)
    # A CPU multiplies float32 anyway: that every product asks for it stands in the program.
    dots = [line for line in program.splitlines() if "dot_general" in line]
    assert dots
    assert all("HIGHEST" in line for line in dots), dots
