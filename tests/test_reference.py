"""gdn_jax.reference against the golden arrays, against Hugging Face's layer, and against its own invariants."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import golden
from gdn_jax import reference
from gdn_jax.types import PAD_SLOT, GDNConfig, GDNState, GDNWeights

pytestmark = pytest.mark.filterwarnings("error")  # numpy's overflow and invalid warnings are findings here

HUGE = 2**32 + 1  # narrows to slot 1
CONFIG = GDNConfig(num_v_heads=4, num_k_heads=2, head_k_dim=6, head_v_dim=5, conv_kernel_dim=4)
MTP = GDNConfig(num_v_heads=4, num_k_heads=2, head_k_dim=6, head_v_dim=5, conv_kernel_dim=4, mtp_step=2)
INT = np.int32


def same(x: Any, y: Any) -> None:
    """Bit for bit, NaN equal to NaN."""
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def close(x: Any, y: Any, tol: float = 1e-12) -> None:
    assert golden.rel(x, y) <= tol


def starts(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(INT)


def rule_inputs(
    rng: np.random.Generator, *lead: int, H: int = 2, HV: int = 4, K: int = 6, V: int = 5
) -> dict[str, Any]:
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((*lead, *shape)).astype(np.float32)

    beta = rng.uniform(0, 1, (*lead, HV)).astype(np.float32)
    return dict(q=normal(H, K), k=normal(H, K), v=normal(HV, V), g=-np.exp(normal(HV)), beta=beta)


def conv_inputs(rng: np.random.Generator, *lead: int, D: int = 5, W: int = 4) -> dict[str, Any]:
    shapes = dict(x=(*lead, D), weight=(D, W), bias=(D,))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def pool(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def weights(rng: np.random.Generator, config: GDNConfig) -> GDNWeights:
    D, W, HV = config.conv_dim, config.conv_kernel_dim, config.tp_num_v_heads
    return GDNWeights(*(rng.standard_normal(shape).astype(np.float32) for shape in ((D, W), (D,), (HV,), (HV,))))


def state(rng: np.random.Generator, config: GDNConfig, num_slots: int) -> GDNState:
    zeros = reference.init_state(config, num_slots)
    return GDNState(pool(rng, *zeros.conv.shape), pool(rng, *zeros.ssm.shape))


def mixed(rng: np.random.Generator, config: GDNConfig, num_tokens: int) -> np.ndarray:
    return rng.standard_normal((num_tokens, config.qkvz_dim + config.ba_dim)).astype(np.float32)


def per_token(inputs: dict[str, Any], part: Any) -> dict[str, Any]:
    return {name: array[part] for name, array in inputs.items()}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# ---- golden arrays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.CASES)
def test_golden_case(name: str) -> None:
    kwargs, wants = golden.load(name)
    before = {key: np.copy(value) for key, value in kwargs.items() if isinstance(value, np.ndarray)}
    results = golden.named(name, getattr(reference, golden.CASES[name])(**kwargs))
    for key, want in wants.items():
        assert results[key].dtype == np.float64
        close(results[key], want, 1e-12 if want.dtype == np.float64 else 1e-7)
        if key in kwargs:
            rows = golden.unchanged(kwargs, wants, key)
            same(results[key][rows], kwargs[key][rows].astype(np.float64))
        elif key != "beta":
            assert not results[key][golden.padding(wants, key)].any()
    for key, value in before.items():
        same(kwargs[key], value)


@pytest.mark.parametrize("name", golden.CASES)
def test_computes_in_the_dtype_asked_for(name: str) -> None:
    kwargs, wants = golden.load(name)
    results = golden.named(name, getattr(reference, golden.CASES[name])(**kwargs, dtype=np.float32))
    for key, want in wants.items():
        assert results[key].dtype == np.float32
        close(results[key], want, 1e-5)


def test_mtp_trace() -> None:
    arrays, wants = golden.load("mtp_trace")
    config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=8, head_v_dim=6, conv_kernel_dim=4, mtp_step=2)
    common: dict[str, Any] = dict(
        config=config, state_indices=arrays["state_indices"], norm_weight=arrays["norm_weight"]
    )
    args = GDNWeights(*(arrays[name] for name in GDNWeights._fields))
    state = reference.init_state(config, arrays["num_slots"])
    for part in ("prefill", "step0", "step1", "step2", "step3", "after"):
        operator = reference.gdn_mtp_decode if part.startswith("step") else reference.gdn_prefill
        own = {
            name: arrays[f"{part}_{name}"]
            for name in ("query_start_loc", "num_accepted_tokens")
            if f"{part}_{name}" in arrays
        }
        o, z, state = operator(args, state, arrays[f"{part}_mixed_qkvzba"], **common, **own)
        close(o, wants[f"{part}_o"])
        same(z, reference.split_qkvzba(arrays[f"{part}_mixed_qkvzba"], config)[1])
    close(state.conv, wants["conv"])
    close(state.ssm, wants["ssm"])
    assert not state.conv[[0, 2]].any() and not state.ssm[[0, 1, 2, 6, 7, 8]].any()


def test_hugging_face_layer() -> None:
    arrays, wants = golden.load("hf_layer")
    H, HV, K, V, W, hidden = arrays["dims"].tolist()
    config = GDNConfig(num_v_heads=HV, num_k_heads=H, head_k_dim=K, head_v_dim=V, conv_kernel_dim=W)
    projection = np.concatenate([arrays["in_proj_qkvz__weight"], arrays["in_proj_ba__weight"]])[arrays["proj_order"]]
    assert projection.shape == (config.qkvz_dim + config.ba_dim, hidden)
    args = GDNWeights(arrays["conv1d__weight"][:, 0], None, arrays["A_log"], arrays["dt_bias"])
    common: dict[str, Any] = dict(
        config=config,
        state_indices=np.array([2, 0], INT),
        norm_weight=arrays["norm__weight"],
        norm_eps=arrays["norm_eps"],
    )

    def project(o: Any) -> np.ndarray:
        return o.reshape(-1, HV * V) @ arrays["out_proj__weight"].astype(np.float64).T

    inputs = arrays["hidden_states"].astype(np.float64) @ projection.astype(np.float64).T  # [2, 25, …]
    state = reference.init_state(config, 3)
    packed = inputs[:, :21].reshape(42, -1)
    o, _, state = reference.gdn_prefill(args, state, packed, query_start_loc=starts(21, 21), **common)
    close(project(o).reshape(2, 21, hidden), wants["prefill"], 1e-5)
    for t in range(4):
        o, _, state = reference.gdn_decode(args, state, inputs[:, 21 + t], **common)
        close(project(o), wants["decode"][:, t], 1e-5)
    close(state.ssm[[2, 0]], wants["ssm"], 1e-5)
    close(state.conv[[2, 0]], wants["conv"], 1e-5)
    assert not state.ssm[1].any() and not state.conv[1].any()


# ---- gating, norm, splits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_gating_at_the_limits(dtype: Any) -> None:
    A_log = np.array([100, 1000, 3e38, -3e38, 3e38, 0, 0], np.float32)
    a = np.array([-200, -2000, -3e38, 3e38, 3e38, 20, -1e4], np.float32)
    g, beta = reference.gdn_gating(A_log, a, np.full(7, -1e4, np.float32), np.zeros(7, np.float32), dtype=dtype)
    want = [-np.exp(-100.0), -np.exp(-1000.0), -1, 0, -np.inf, -np.log1p(np.exp(20.0)), 0]
    np.testing.assert_allclose(g, np.array(want, dtype), rtol=1e-5)
    same(beta, np.zeros(7))


def test_gating_matches_the_formula(rng: np.random.Generator) -> None:
    a, b = rng.uniform(-30, 30, (2, 50, 3))
    A_log, dt_bias = rng.uniform(-3, 3, (2, 3))
    g, beta = reference.gdn_gating(A_log, a, b, dt_bias)
    x = a + dt_bias
    np.testing.assert_allclose(g, -np.exp(A_log) * np.where(x > 20, x, np.log1p(np.exp(x))), rtol=1e-13)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-b)), rtol=1e-13)


def test_bfloat16_is_converted_exactly(rng: np.random.Generator) -> None:
    o, z, weight = rng.standard_normal((3, 2, 8)).astype(ml_dtypes.bfloat16)
    want = reference.gated_rms_norm(o.astype(np.float64), z.astype(np.float64), weight[0].astype(np.float64))
    same(reference.gated_rms_norm(o, z, weight[0]), want)
    same(reference.gated_rms_norm(jnp.asarray(o), jnp.asarray(z), jnp.asarray(weight[0])), want)


def test_splits(rng: np.random.Generator) -> None:
    columns = np.arange(CONFIG.qkvz_dim + CONFIG.ba_dim)[None]
    qkv, z, b, a = reference.split_qkvzba(columns, CONFIG)
    q, k, v = reference.split_qkv(qkv, CONFIG)
    assert [part.shape[1:] for part in (q, k, v, z, b, a)] == [(2, 6), (2, 6), (4, 5), (4, 5), (4,), (4,)]
    same(np.concatenate([part.ravel() for part in (q, k, v, z, b, a)]), columns[0])


# ---- convolution ----------------------------------------------------------------------------------------------------


def test_conv_by_hand() -> None:
    kwargs: dict[str, Any] = dict(weight=np.array([[1, 10, 100, 1000]]), activation=None)
    y, rows = reference.causal_conv1d(np.arange(1, 5)[None, :, None], **kwargs)
    same(y[0, :, 0], [1000, 2100, 3210, 4321])
    same(rows[0, 0], [2, 3, 4])
    y, rows = reference.causal_conv1d_update(np.array([[5]]), conv_state=rows, **kwargs)
    same(y, [[5432]])
    same(rows[0, 0], [3, 4, 5])


@pytest.mark.parametrize("W", [2, 3, 4, 8])
def test_conv_in_pieces_equals_whole(rng: np.random.Generator, W: int) -> None:
    inputs = conv_inputs(rng, 20, W=W)
    x = inputs.pop("x")
    whole, last = reference.causal_conv1d(x[None], **inputs)
    state, parts = pool(rng, 3, 5, W + 1), []  # S = 2; the state of slot 1 is not looked at
    for n, part in enumerate(np.split(x, [1, 3, 4, 14])):
        y, state = reference.causal_conv1d(
            part,
            **inputs,
            conv_state=state,
            state_indices=np.array([1]),
            query_start_loc=starts(len(part)),
            has_initial_state=np.array([n > 0]),
        )
        parts.append(y)
    same(np.concatenate(parts), whole[0])
    same(state[1, :, : W - 1], last[0])


@pytest.mark.parametrize("W", [2, 4])
def test_conv_verify_equals_single_updates(rng: np.random.Generator, W: int) -> None:
    inputs, S = conv_inputs(rng, 3, W=W), 2
    x = inputs.pop("x")
    state = pool(rng, 4, 5, W - 1 + S)
    index: dict[str, Any] = dict(state_indices=np.array([2]))
    for accepted in (1, 2, 3):
        y, row = reference.causal_conv1d_update(
            x, **inputs, conv_state=state, **index, query_start_loc=starts(3), num_accepted_tokens=np.array([accepted])
        )
        single = np.roll(state, 1 - accepted, axis=-1)[..., : W - 1]
        for t in range(3):
            want, single = reference.causal_conv1d_update(x[t : t + 1], **inputs, conv_state=single, **index)
            same(y[t], want[0])
            same(row[2, :, t : t + W - 1], single[2])  # what a step that accepts t + 1 tokens reads
    default = reference.causal_conv1d_update(x, **inputs, conv_state=state, **index, query_start_loc=starts(3))
    ones = reference.causal_conv1d_update(
        x, **inputs, conv_state=state, **index, query_start_loc=starts(3), num_accepted_tokens=np.array([1])
    )
    same(default[0], ones[0])
    same(default[1], ones[1])


def test_conv_verify_of_a_short_sequence_puts_zeros_behind_it(rng: np.random.Generator) -> None:
    inputs = conv_inputs(rng, 1)
    state = pool(rng, 1, 5, 6)
    kwargs: dict[str, Any] = dict(query_start_loc=starts(1), num_accepted_tokens=np.array([2]))
    _, row = reference.causal_conv1d_update(**inputs, conv_state=state, **kwargs)
    same(row[0], np.concatenate([state[0, :, 2:4], inputs["x"].T, np.zeros((5, 3))], axis=1))


def test_conv_update_keeps_the_further_columns(rng: np.random.Generator) -> None:
    inputs, state = conv_inputs(rng, 2), pool(rng, 3, 5, 5)
    _, rows = reference.causal_conv1d_update(**inputs, conv_state=state)
    same(rows[:2, :, 3:], state[:2, :, 3:])
    same(rows[:2, :, :3], np.concatenate([state[:2, :, 1:3], inputs["x"][..., None]], axis=-1))
    same(rows[2], state[2])


# ---- the rule -------------------------------------------------------------------------------------------------------


def test_rule_in_pieces_equals_whole_and_single_steps(rng: np.random.Generator) -> None:
    inputs = rule_inputs(rng, 9)
    initial = pool(rng, 2, 4, 6, 5)
    index: dict[str, Any] = dict(state_indices=np.array([1]))
    whole, last = reference.chunk_gated_delta_rule(**inputs, ssm_state=initial, query_start_loc=starts(9), **index)
    for cuts in ([4], [1, 2, 8]):
        parts, state = [], initial
        for part in np.split(np.arange(9), cuts):
            o, state = reference.chunk_gated_delta_rule(
                **per_token(inputs, part), ssm_state=state, query_start_loc=starts(len(part)), **index
            )
            parts.append(o)
        same(np.concatenate(parts), whole)
        same(state, last)
    state = initial
    for t in range(9):
        o, state = reference.recurrent_gated_delta_rule(**per_token(inputs, [t]), ssm_state=state, **index)
        same(o[0], whole[t])
    same(state, last)


def test_rule_by_its_definition(rng: np.random.Generator) -> None:
    inputs = rule_inputs(rng, 1, 3, H=1, HV=1)
    o, last = reference.chunk_gated_delta_rule(**inputs, scale=0.5)
    M = np.zeros((6, 5))
    for t in range(3):
        q, k, v, g, beta = (inputs[name][0, t, 0].astype(np.float64) for name in ("q", "k", "v", "g", "beta"))
        q, k = q / np.sqrt(q @ q + 1e-6) * 0.5, k / np.sqrt(k @ k + 1e-6)
        M = np.exp(g) * M
        M = M + np.outer(k, beta * (v - M.T @ k))
        close(o[0, t, 0], M.T @ q)
    close(last[0, 0], M)


def test_mtp_verify_equals_single_steps(rng: np.random.Generator) -> None:
    inputs, initial = rule_inputs(rng, 3), pool(rng, 8, 4, 6, 5)
    slots = np.array([[7, 2, 5]])
    for accepted in (1, 2, 3):
        o, rows = reference.mtp_gated_delta_rule(
            **inputs,
            ssm_state=initial,
            read_indices=slots,
            write_indices=slots,
            num_accepted_tokens=np.array([accepted]),
            query_start_loc=starts(3),
        )
        state = initial[slots[0, accepted - 1]][None]
        for t in range(3):
            want, state = reference.recurrent_gated_delta_rule(**per_token(inputs, [t]), ssm_state=state)
            same(o[t], want[0])
            same(rows[slots[0, t]], state[0])
        same(rows[[0, 1, 3, 4, 6]], initial[[0, 1, 3, 4, 6]])


# ---- forms ----------------------------------------------------------------------------------------------------------


def test_stateless_and_batched_forms(rng: np.random.Generator) -> None:
    inputs, conv = rule_inputs(rng, 2, 4), conv_inputs(rng, 2, 4)
    o, last = reference.chunk_gated_delta_rule(**inputs)
    y, columns = reference.causal_conv1d(**conv)
    assert o.shape == (2, 4, 4, 5) and last.shape == (2, 4, 6, 5)
    assert y.shape == (2, 4, 5) and columns.shape == (2, 5, 3)
    flat = {name: array.reshape(8, *array.shape[2:]) for name, array in inputs.items()}
    zeros, empty, three = np.zeros((5, 4, 6, 5)), starts(4, 0, 4), np.array([4, 0, 2])
    o2, rows = reference.chunk_gated_delta_rule(**flat, ssm_state=zeros, query_start_loc=empty, state_indices=three)
    same(o2, o.reshape(8, 4, 5))
    same(rows[[4, 2]], last)
    assert not rows[[0, 1, 3]].any()
    o3, last3 = reference.chunk_gated_delta_rule(**flat, query_start_loc=empty)
    same(o3, o2)
    same(last3, [last[0], zeros[0], last[1]])
    o4, rows4 = reference.chunk_gated_delta_rule(**inputs, ssm_state=zeros, state_indices=np.array([4, 2]))
    same(o4, o)
    same(rows4, rows)
    y2, columns2 = reference.causal_conv1d(conv["x"].reshape(8, 5), conv["weight"], conv["bias"], query_start_loc=empty)
    same(y2, y.reshape(8, 5))
    same(columns2[[0, 2]], columns)
    assert not columns2[1].any()


def test_no_tokens_and_no_sequences(rng: np.random.Generator) -> None:
    initial, one = pool(rng, 3, 4, 6, 5), np.zeros(1, INT)
    for loc, slots in ((one, one[:0]), (starts(0), one)):
        for results in (
            reference.chunk_gated_delta_rule(
                **rule_inputs(rng, 0), ssm_state=initial, query_start_loc=loc, state_indices=slots
            ),
            reference.mtp_gated_delta_rule(
                **rule_inputs(rng, 0),
                ssm_state=initial,
                read_indices=slots[:, None],
                write_indices=slots[:, None],
                num_accepted_tokens=slots + 1,
                query_start_loc=loc,
            ),
        ):
            assert results[0].shape == (0, 4, 5)
            same(results[1], initial)
    assert reference.recurrent_gated_delta_rule(**rule_inputs(rng, 0), ssm_state=initial)[0].shape == (0, 4, 5)
    assert reference.causal_conv1d(**conv_inputs(rng, 0), query_start_loc=one)[1].shape == (0, 5, 3)
    o, _, new = reference.gdn_decode(
        weights(rng, CONFIG),
        state(rng, CONFIG, 0),
        mixed(rng, CONFIG, 1),
        config=CONFIG,
        state_indices=np.array([PAD_SLOT]),
    )
    assert not o.any() and new.ssm.shape == (0, 4, 6, 5)


def run_every_operator(rng: np.random.Generator, layer: Any, pools: GDNState) -> list[tuple[Any, Any]]:
    """Every operator and layer function on one MTP state of 4 slots, stacked or not: output, (conv, ssm) or None."""
    rows, slots, loc, accepted = (np.array(x, INT) for x in ([2, 5], [3, PAD_SLOT], [0, 3, 5], [2, 1]))
    three, W = rows[:, None] + np.arange(3), weights(rng, MTP)
    conv, rule, tokens = conv_inputs(rng, 5, D=MTP.conv_dim), rule_inputs(rng, 5), mixed(rng, MTP, 5)
    single, pair = dict(conv, x=conv["x"][:2]), per_token(rule, slice(2))
    on_conv: dict[str, Any] = dict(conv_state=pools.conv, state_indices=slots, layer=layer)
    on_ssm: dict[str, Any] = dict(ssm_state=pools.ssm, layer=layer)
    verify: dict[str, Any] = dict(query_start_loc=loc, num_accepted_tokens=accepted)
    mtp: dict[str, Any] = dict(read_indices=three, write_indices=three, **verify)
    whole: dict[str, Any] = dict(config=MTP, state_indices=slots, norm_weight=np.ones(5, np.float32), layer=layer)
    convs = [
        reference.causal_conv1d(**conv, **on_conv, **verify),
        reference.causal_conv1d_update(**conv, **on_conv, **verify),
        reference.causal_conv1d_update(**single, **on_conv),
    ]
    rules = [
        reference.chunk_gated_delta_rule(**rule, **on_ssm, state_indices=rows, query_start_loc=loc),
        reference.recurrent_gated_delta_rule(**pair, **on_ssm, state_indices=rows),
        reference.mtp_gated_delta_rule(**rule, **on_ssm, **mtp),
    ]
    layers = [
        operator(W, pools, tokens, **whole, **verify) for operator in (reference.gdn_prefill, reference.gdn_mtp_decode)
    ]
    return (
        [(y, (new, None)) for y, new in convs]
        + [(o, (None, new)) for o, new in rules]
        + [(o, tuple(new)) for o, _, new in layers]
    )


@pytest.mark.parametrize("layer", [1, np.int64(1), jnp.int32(1)])
def test_layer_equals_unstacked(layer: Any) -> None:
    stacked = [state(np.random.default_rng(n), MTP, 4) for n in range(3)]
    pools = GDNState(*(np.stack(arrays) for arrays in zip(*stacked, strict=True)))
    plain = run_every_operator(np.random.default_rng(3), None, stacked[1])
    for (o, new), (want_o, want) in zip(run_every_operator(np.random.default_rng(3), layer, pools), plain, strict=True):
        same(o, want_o)
        for got, expected, old in zip(new, want, pools, strict=True):
            if expected is not None:
                same(got[1], expected)
                same(got[[0, 2]], old[[0, 2]])
                assert (got[1] != old[1]).any()


@pytest.mark.parametrize("layer", [3, -1])
def test_layer_outside(layer: int) -> None:
    pools = GDNState(*(np.stack([x] * 3) for x in state(np.random.default_rng(0), MTP, 4)))
    for bad in (layer, np.int32(layer)):
        with pytest.raises(ValueError, match="`layer`"):
            run_every_operator(np.random.default_rng(3), bad, pools)
    for o, new in run_every_operator(np.random.default_rng(3), jnp.int32(layer), pools):
        assert not np.asarray(o).any()
        for got, old in zip(new, pools, strict=True):
            if got is not None:
                same(got, old)


def test_arguments_may_be_jax_arrays_and_are_never_changed() -> None:
    kwargs, wants = golden.load("chunk_padding_slots")
    o, rows = reference.chunk_gated_delta_rule(**jax.tree.map(jnp.asarray, kwargs))
    close(o, wants["o"])
    close(rows, wants["ssm_state"])
    before = state(np.random.default_rng(0), MTP, 4)
    after = GDNState(*(np.copy(x) for x in before))
    run_every_operator(np.random.default_rng(3), None, before)
    same(before.conv, after.conv)
    same(before.ssm, after.ssm)


# ---- slots and padding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [PAD_SLOT, 6, 2**31 - 1, HUGE, -(2**32) + 1, 2**62, 2**63 - 1])
def test_an_index_outside_is_padding(rng: np.random.Generator, bad: int) -> None:
    inputs, initial = rule_inputs(rng, 5), pool(rng, 6, 4, 6, 5)
    loc, slots = starts(2, 2, 1), np.array([0, bad, 3])
    o, rows = reference.chunk_gated_delta_rule(**inputs, ssm_state=initial, state_indices=slots, query_start_loc=loc)
    assert not o[2:4].any() and o[[0, 1, 4]].all()
    same(rows[[1, 2, 4, 5]], initial[[1, 2, 4, 5]])
    o, rows = reference.recurrent_gated_delta_rule(
        **per_token(inputs, slice(3)), ssm_state=initial, state_indices=slots
    )
    assert not o[1].any() and o[[0, 2]].all()
    same(rows[[1, 2, 4, 5]], initial[[1, 2, 4, 5]])
    for operator, kwargs in (
        (reference.causal_conv1d, dict(query_start_loc=loc)),
        (reference.causal_conv1d_update, dict(query_start_loc=loc)),
    ):
        columns = pool(rng, 6, 5, 6)
        y, rows = operator(**conv_inputs(rng, 5), conv_state=columns, state_indices=slots, **kwargs)
        assert not y[2:4].any() and y[[0, 1, 4]].all()
        same(rows[[1, 2, 4, 5]], columns[[1, 2, 4, 5]])
    before = state(rng, MTP, 6)
    for operator in (reference.gdn_prefill, reference.gdn_mtp_decode):  # slot * (S + 1) does not wrap either
        o, _, after = operator(
            weights(rng, MTP),
            before,
            mixed(rng, MTP, 5),
            config=MTP,
            query_start_loc=loc,
            state_indices=slots,
            num_accepted_tokens=np.ones(3, INT),
        )
        assert not o[2:4].any() and o[[0, 1, 4]].all()
        same(after.conv[[1, 2, 4, 5]], before.conv[[1, 2, 4, 5]])
        same(after.ssm[[3, 4, 5, 6, 7, 8, 12, 13]], before.ssm[[3, 4, 5, 6, 7, 8, 12, 13]])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_any_integer_dtype(rng: np.random.Generator, dtype: Any) -> None:
    inputs, initial = rule_inputs(rng, 2), pool(rng, 3, 4, 6, 5)
    slots = np.array([2, np.iinfo(dtype).max], dtype)
    o, rows = reference.recurrent_gated_delta_rule(**inputs, ssm_state=initial, state_indices=slots)
    assert o[0].all() and not o[1].any()
    same(rows[:2], initial[:2])


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_other_index_dtypes_are_refused(rng: np.random.Generator, dtype: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        reference.recurrent_gated_delta_rule(
            **rule_inputs(rng, 1), ssm_state=pool(rng, 3, 4, 6, 5), state_indices=np.zeros(1, dtype)
        )


@pytest.mark.parametrize("accepted", [0, 4, -1, HUGE, 2**63 - 1])
def test_an_accepted_count_outside_is_padding(rng: np.random.Generator, accepted: int) -> None:
    before, counts = state(rng, MTP, 4), np.array([accepted, 3])
    common: dict[str, Any] = dict(config=MTP, query_start_loc=starts(2, 3), state_indices=np.array([1, 3]))
    for operator in (reference.gdn_prefill, reference.gdn_mtp_decode):
        o, _, after = operator(weights(rng, MTP), before, mixed(rng, MTP, 5), **common, num_accepted_tokens=counts)
        assert not o[:2].any() and o[2:].all()
        same(after.conv[:3], before.conv[:3])
        same(after.ssm[:9], before.ssm[:9])
    # `has_initial_state=False` is what keeps the count from being looked at; an initial slot outside the pool does not.
    W, tokens, fresh = weights(rng, MTP), mixed(rng, MTP, 5), dict(has_initial_state=np.array([False, True]))
    o, _, after = reference.gdn_prefill(W, before, tokens, **common, **fresh, num_accepted_tokens=counts)
    want, _, state_after = reference.gdn_prefill(
        W, before, tokens, **common, **fresh, num_accepted_tokens=np.array([1, 3])
    )
    assert o.all()
    same(o, want)
    same(after.ssm, state_after.ssm)
    outside = dict(initial_state_indices=np.array([PAD_SLOT, 3]), num_accepted_tokens=counts)
    o, _, after = reference.gdn_prefill(W, before, tokens, **common, **outside)
    assert not o[:2].any() and o[2:].all()
    same(after.ssm[:9], before.ssm[:9])


def test_a_verify_sequence_that_is_too_long_is_padding(rng: np.random.Generator) -> None:
    before = state(rng, MTP, 4)
    o, _, after = reference.gdn_mtp_decode(
        weights(rng, MTP),
        before,
        mixed(rng, MTP, 6),
        config=MTP,
        query_start_loc=starts(4, 2),
        state_indices=np.array([0, 1]),
        num_accepted_tokens=np.array([1, 1]),
    )
    assert not o[:4].any() and o[4:].all()
    same(after.conv[0], before.conv[0])
    same(after.ssm[:3], before.ssm[:3])


@pytest.mark.parametrize("bad", [PAD_SLOT, 8, HUGE, 2**63 - 1])
def test_mtp_rule_skips(rng: np.random.Generator, bad: int) -> None:
    inputs, initial = rule_inputs(rng, 8), pool(rng, 8, 4, 6, 5)
    loc, one, slots = starts(3, 3, 2), np.ones(3, INT), np.array([[0, 1, 2], [3, 4, 5], [6, 7, bad]])
    index: dict[str, Any] = dict(read_indices=slots, write_indices=slots, num_accepted_tokens=one)
    want_o, want = reference.mtp_gated_delta_rule(**inputs, ssm_state=initial, query_start_loc=loc, **index)
    assert want_o.all() and not (want == initial).any()

    def check(padding: slice, untouched: list[int], **other: Any) -> None:
        kwargs = dict(index, query_start_loc=loc) | other
        o, rows = reference.mtp_gated_delta_rule(**inputs, ssm_state=initial, **kwargs)
        assert not o[padding].any()
        same(np.delete(o, padding, axis=0), np.delete(want_o, padding, axis=0))
        same(rows[untouched], initial[untouched])
        same(np.delete(rows, untouched, axis=0), np.delete(want, untouched, axis=0))

    def replaced(n: int, j: int) -> np.ndarray:
        return np.where((np.arange(3)[:, None] == n) & (np.arange(3) == j), bad, slots)

    check(slice(3, 6), [3, 4, 5], read_indices=replaced(1, 0))
    check(slice(0, 0), [], read_indices=replaced(1, 1))  # not the accepted one
    check(slice(0, 0), [4], write_indices=replaced(1, 1))  # the next token goes on
    check(slice(6, 8), [6, 7], num_accepted_tokens=np.array([1, 1, 3]))
    for count in (0, -1, 4, HUGE):
        check(slice(3, 6), [3, 4, 5], num_accepted_tokens=np.array([1, count, 1]))


def test_mtp_rule_of_too_many_tokens_is_padding(rng: np.random.Generator) -> None:
    initial, slots = pool(rng, 4, 4, 6, 5), np.array([[0, 1], [2, 3]])
    o, rows = reference.mtp_gated_delta_rule(
        **rule_inputs(rng, 5),
        ssm_state=initial,
        read_indices=slots,
        write_indices=slots,
        num_accepted_tokens=np.array([1, 2]),
        query_start_loc=starts(3, 2),
    )
    assert not o[:3].any() and o[3:].all()
    same(rows[:2], initial[:2])
    assert (rows[2:] != initial[2:]).all()


def test_empty_sequences_leave_their_slots(rng: np.random.Generator) -> None:
    before, loc = state(rng, MTP, 4), starts(0, 2, 0)
    before.ssm[:3] = np.nan
    common: dict[str, Any] = dict(config=MTP, query_start_loc=loc, state_indices=np.array([0, 2, 3]))
    W, tokens = weights(rng, MTP), mixed(rng, MTP, 4)  # two tokens behind the last sequence
    for o, _, after in (
        reference.gdn_prefill(W, before, tokens, **common, has_initial_state=np.array([False, True, False])),
        reference.gdn_mtp_decode(W, before, tokens, **common, num_accepted_tokens=np.array([1, 2, 9])),
    ):
        assert o[:2].all() and not o[2:].any()
        same(after.conv[[0, 1, 3]], before.conv[[0, 1, 3]])
        same(after.ssm[[0, 1, 2, 3, 4, 5, 9, 10, 11]], before.ssm[[0, 1, 2, 3, 4, 5, 9, 10, 11]])


def test_initial_state_indices(rng: np.random.Generator) -> None:
    before, W, tokens = state(rng, MTP, 5), weights(rng, MTP), mixed(rng, MTP, 6)
    counts, loc = np.array([3, 1, 2]), starts(2, 3, 1)
    common: dict[str, Any] = dict(config=MTP, query_start_loc=loc, num_accepted_tokens=counts)
    sources, slots = np.array([2, 2, HUGE]), np.array([0, 4, 1])
    o, _, after = reference.gdn_prefill(W, before, tokens, **common, state_indices=slots, initial_state_indices=sources)
    copied = reference.copy_slots(before, sources, slots, MTP)
    want_o, _, want = reference.gdn_prefill(
        W, copied, tokens, **common, state_indices=slots, has_initial_state=np.array([True, True, False])
    )
    same(o, want_o)
    same(after.conv[slots, :, :3], want.conv[slots, :, :3])
    same(after.conv[..., 3:], before.conv[..., 3:])
    same(after.ssm[slots * 3], want.ssm[slots * 3])
    rest = np.setdiff1d(np.arange(15), slots * 3)
    same(after.ssm[rest], before.ssm[rest])
    same(after.conv[[2, 3]], before.conv[[2, 3]])
    ignored = reference.gdn_prefill(
        W,
        before,
        tokens,
        **common,
        state_indices=slots,
        initial_state_indices=sources,
        has_initial_state=np.zeros(3, bool),
    )
    assert not np.array_equal(ignored.o, o)
    fresh: dict[str, Any] = dict(config=MTP, query_start_loc=loc, state_indices=slots)
    same(ignored.o, reference.gdn_prefill(W, reference.init_state(MTP, 5), tokens, **fresh).o)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_padding_and_foreign_slots_never_leak(rng: np.random.Generator, value: float) -> None:
    clean, W, tokens = state(rng, MTP, 5), weights(rng, MTP), mixed(rng, MTP, 8)
    dirty_tokens = tokens.copy()
    dirty_tokens[[3, 4, 7]] = value  # tokens of the padding slot, and behind the last sequence
    dirty = GDNState(np.copy(clean.conv), np.copy(clean.ssm))
    dirty.conv[[0, 2]], dirty.ssm[[0, 1, 2, 6, 7, 8]] = value, value
    common: dict[str, Any] = dict(
        config=MTP,
        query_start_loc=starts(3, 2, 2),
        state_indices=np.array([4, PAD_SLOT, 1]),
        num_accepted_tokens=np.array([2, 1, 1]),
        norm_weight=np.ones(5, np.float32),
    )
    for operator in (reference.gdn_prefill, reference.gdn_mtp_decode):
        o, z, after = operator(W, dirty, dirty_tokens, **common)
        want_o, _, want = operator(W, clean, tokens, **common)
        same(o, want_o)
        assert not o[[3, 4, 7]].any()
        same(z, reference.split_qkvzba(dirty_tokens, MTP)[1])
        same(after.conv[[1, 3, 4]], want.conv[[1, 3, 4]])
        same(after.conv[[0, 2]], dirty.conv[[0, 2]])
        same(after.ssm[[3, 4, 5, *range(9, 15)]], want.ssm[[3, 4, 5, *range(9, 15)]])
        same(after.ssm[[0, 1, 2, 6, 7, 8]], dirty.ssm[[0, 1, 2, 6, 7, 8]])


def test_without_initial_state_the_slot_is_not_read(rng: np.random.Generator) -> None:
    zeros, W, tokens = reference.init_state(CONFIG, 2), weights(rng, CONFIG), mixed(rng, CONFIG, 2)
    dirty = GDNState(np.full(zeros.conv.shape, np.nan), np.full(zeros.ssm.shape, np.nan))
    common: dict[str, Any] = dict(config=CONFIG, state_indices=np.array([1, 0]))
    fresh: dict[str, Any] = dict(common, has_initial_state=np.zeros(2, bool))
    want_o, _, want = reference.gdn_decode(W, zeros, tokens, **common)
    for o, _, after in (
        reference.gdn_decode(W, dirty, tokens, **fresh),
        reference.gdn_prefill(W, dirty, tokens, query_start_loc=starts(1, 1), **fresh),
    ):
        same(o, want_o)
        same(after.conv, want.conv)
        same(after.ssm, want.ssm)


# ---- the layer ------------------------------------------------------------------------------------------------------


def test_layer_in_pieces_and_token_by_token_equals_whole(rng: np.random.Generator) -> None:
    W, tokens, zeros = weights(rng, CONFIG), mixed(rng, CONFIG, 7), reference.init_state(CONFIG, 2)
    common: dict[str, Any] = dict(config=CONFIG, state_indices=np.array([1]), norm_weight=pool(rng, 5))
    whole, _, last = reference.gdn_prefill(W, zeros, tokens, query_start_loc=starts(7), **common)
    first, _, now = reference.gdn_prefill(W, zeros, tokens[:2], query_start_loc=starts(2), **common)
    second, _, now = reference.gdn_prefill(W, now, tokens[2:5], query_start_loc=starts(3), **common)
    parts = [first, second]
    for t in (5, 6):
        o, _, now = reference.gdn_decode(W, now, tokens[t : t + 1], **common)
        parts.append(o)
    same(np.concatenate(parts), whole)
    same(now.conv, last.conv)
    same(now.ssm, last.ssm)


def test_speculation_equals_plain_decoding(rng: np.random.Generator) -> None:
    """Wrong drafts of size 1e3 leave no trace: only accepted tokens count. Accepted counts 3, 1, 2 over three steps."""
    W, stream = weights(rng, MTP), mixed(rng, MTP, 10)
    common: dict[str, Any] = dict(config=MTP, state_indices=np.array([2]))
    plain: dict[str, Any] = dict(config=CONFIG, state_indices=np.array([2]))
    want = reference.gdn_prefill(W, reference.init_state(CONFIG, 4), stream, query_start_loc=starts(10), **plain).o
    o, _, now = reference.gdn_prefill(W, reference.init_state(MTP, 4), stream[:2], query_start_loc=starts(2), **common)
    same(o, want[:2])
    done, accepted = 2, 1
    for correct in (3, 1, 2):
        drafts = np.full((3, stream.shape[1]), 1e3, np.float32)
        drafts[:correct] = stream[done : done + correct]
        o, _, now = reference.gdn_mtp_decode(W, now, drafts, **common, num_accepted_tokens=np.array([accepted]))
        same(o[:correct], want[done : done + correct])
        done, accepted = done + correct, correct
    o, _, now = reference.gdn_prefill(
        W, now, stream[done:], query_start_loc=starts(2), **common, num_accepted_tokens=np.array([accepted])
    )
    same(o, want[done:])


def test_verify_without_drafts_is_decode(rng: np.random.Generator) -> None:
    W, tokens, before = weights(rng, CONFIG), mixed(rng, CONFIG, 2), state(rng, CONFIG, 3)
    common: dict[str, Any] = dict(config=CONFIG, state_indices=np.array([2, 0]))
    want = reference.gdn_decode(W, before, tokens, **common)
    got = reference.gdn_mtp_decode(W, before, tokens, **common, num_accepted_tokens=np.array([1, 1]))
    jax.tree.map(same, got, want)


@pytest.mark.parametrize("num_layers", [None, 2])
def test_init_reset_and_copy(rng: np.random.Generator, num_layers: int | None) -> None:
    zeros = reference.init_state(MTP, 4, num_layers)
    lead = () if num_layers is None else (num_layers,)
    assert zeros.conv.shape == (*lead, 4, MTP.conv_dim, 5) and zeros.ssm.shape == (*lead, 12, 4, 6, 5)
    assert not zeros.conv.any() and not zeros.ssm.any()
    before = GDNState(pool(rng, *zeros.conv.shape), pool(rng, *zeros.ssm.shape))
    after = reference.reset_slots(before, np.array([3, PAD_SLOT, HUGE, 4, 1]), MTP)
    assert not after.conv[..., [1, 3], :, :].any() and not after.ssm[..., [3, 4, 5, 9, 10, 11], :, :, :].any()
    same(after.conv[..., [0, 2], :, :], before.conv[..., [0, 2], :, :])
    same(after.ssm[..., [0, 1, 2, 6, 7, 8], :, :, :], before.ssm[..., [0, 1, 2, 6, 7, 8], :, :, :])
    after = reference.copy_slots(before, np.array([0, 1, HUGE, 2]), np.array([1, 3, 2, PAD_SLOT]), MTP)
    same(after.conv, before.conv[..., [0, 0, 2, 1], :, :])
    same(after.ssm, before.ssm[..., [0, 1, 2, 0, 1, 2, 6, 7, 8, 3, 4, 5], :, :, :])


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_calls_that_would_be_misread_are_refused(rng: np.random.Generator) -> None:
    rule, conv, W = rule_inputs(rng, 4), conv_inputs(rng, 4), weights(rng, MTP)
    before, tokens, slots = state(rng, MTP, 4), mixed(rng, MTP, 4), np.zeros(1, INT)
    ones: dict[str, Any] = dict(num_accepted_tokens=np.ones(1, INT))
    calls: list[Any] = [
        lambda: reference.chunk_gated_delta_rule(**rule),
        lambda: reference.chunk_gated_delta_rule(**rule_inputs(rng, 1, 4), query_start_loc=starts(4)),
        lambda: reference.chunk_gated_delta_rule(**rule, query_start_loc=starts(4), state_indices=slots),
        lambda: reference.chunk_gated_delta_rule(**rule, query_start_loc=starts(4), layer=0),
        lambda: reference.recurrent_gated_delta_rule(**rule, ssm_state=pool(rng, 3, 4, 6, 5)),
        lambda: reference.causal_conv1d(**conv),
        lambda: reference.causal_conv1d(**conv_inputs(rng, 1, 4), query_start_loc=starts(4)),
        lambda: reference.causal_conv1d(**conv, query_start_loc=starts(4), initial_state_indices=slots),
        lambda: reference.causal_conv1d(**conv, query_start_loc=starts(4), activation="relu"),
        lambda: reference.causal_conv1d_update(**conv, conv_state=pool(rng, 4, 5, 3), **ones),
        lambda: reference.gdn_decode(W, before, tokens, config=MTP, state_indices=slots),
        lambda: reference.gdn_mtp_decode(W, before, tokens, config=MTP, state_indices=slots, **ones),
        lambda: reference.gdn_prefill(
            weights(rng, CONFIG),
            state(rng, CONFIG, 4),
            tokens,
            config=CONFIG,
            query_start_loc=starts(4),
            state_indices=slots,
            **ones,
        ),
        lambda: reference.gdn_prefill(
            W,
            GDNState(before.conv, before.ssm[:-1]),
            tokens,
            config=MTP,
            query_start_loc=starts(4),
            state_indices=slots,
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="reference"):
            call()
