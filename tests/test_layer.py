"""The layer functions against gdn_jax.reference in float64, the golden trace, and what a serving stack relies on."""

import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_mixed, make_state, make_weights

import gdn_jax
import golden
from gdn_jax import GDNConfig, GDNOutput, GDNState, GDNWeights, reference

pytestmark = pytest.mark.usefixtures("quick_compiles")

F32, INT = np.float32, np.int32
SIZES: dict[str, Any] = dict(num_v_heads=4, num_k_heads=2, head_k_dim=8, head_v_dim=6, conv_kernel_dim=4)
PLAIN = GDNConfig(**SIZES, ssm_dtype="float32", conv_dtype="float32")
MTP = GDNConfig(**SIZES, mtp_step=2, ssm_dtype="float32", conv_dtype="float32")
HUGE = 2**31 - 1

# Three static shapes serve nearly all tests: prefill (T, N) = (24, 5), decode N = 4, verify (T, N) = (12, 4); 7 slots.
T, N, DN, VT, SLOTS = 24, 5, 4, 12, 7

COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: COMPILES.append(event) if event.endswith("backend_compile_duration") else None
)


def starts(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(INT)


def ints(*values: int) -> np.ndarray:
    return np.array(values, INT)


class Case:
    """Weights, a random state, random inputs and a norm weight of one configuration, and a fixed ragged batch for each
    function, with every kind of sequence in it."""

    def __init__(self, seed: int, config: GDNConfig, dtype: Any = F32) -> None:
        rng = np.random.default_rng(seed)
        self.config, self.dtype = config, dtype
        self.weights, self.state = make_weights(rng, config), make_state(rng, config, SLOTS)
        self.prompt, self.norm_weight = make_mixed(rng, config, T, dtype), jnp.asarray(rng.uniform(0.5, 1.5, 6), dtype)
        self.step, self.drafts = make_mixed(rng, config, DN, dtype), make_mixed(rng, config, VT, dtype)

    def prefill(self, **changes: Any) -> dict[str, Any]:
        """Sequences: from its own slot; padding; empty; from zeros, whatever its slots hold; of one token, from slot 4."""
        call: dict[str, Any] = dict(
            weights=self.weights, state=self.state, mixed_qkvzba=self.prompt, config=self.config,
            norm_weight=self.norm_weight, query_start_loc=starts(5, 3, 0, 11, 1), state_indices=ints(3, -1, 1, 6, 0),
            has_initial_state=np.array([True, True, False, False, True]), initial_state_indices=ints(3, 2, 1, 2, 4),
        )  # fmt: skip
        if self.config.mtp_step:
            call["num_accepted_tokens"] = ints(3, 1, 77, 77, 2)
        return {**call, **changes}

    def decode(self, **changes: Any) -> dict[str, Any]:
        call = dict(
            weights=self.weights, state=self.state, mixed_qkvzba=self.step, config=self.config,
            norm_weight=self.norm_weight, state_indices=ints(2, -1, 0, 6),
            has_initial_state=np.array([True, True, False, True]),
        )  # fmt: skip
        return {**call, **changes}

    def verify(self, **changes: Any) -> dict[str, Any]:
        call = dict(
            weights=self.weights, state=self.state, mixed_qkvzba=self.drafts, config=self.config,
            norm_weight=self.norm_weight, state_indices=ints(2, 1, 0, 4), num_accepted_tokens=ints(1, 2, 3, 2),
            query_start_loc=starts(3, 0, 1, 2),
        )  # fmt: skip
        return {**call, **changes}

    def calls(self) -> dict[str, dict[str, Any]]:
        if self.config.mtp_step:
            return {"gdn_prefill": self.prefill(), "gdn_mtp_decode": self.verify()}
        return {"gdn_prefill": self.prefill(), "gdn_decode": self.decode()}


# Of each function's batch: the tokens that are valid, and the request slots it names.
VALID = {
    "gdn_prefill": np.r_[0:5, 8:20],
    "gdn_decode": ints(0, 2, 3),
    "gdn_mtp_decode": np.arange(6),
}
NAMED = {"gdn_prefill": ints(3, 6, 0), "gdn_decode": ints(2, 0, 6), "gdn_mtp_decode": ints(2, 0, 4)}
EACH = [("gdn_prefill", PLAIN), ("gdn_prefill", MTP), ("gdn_decode", PLAIN), ("gdn_mtp_decode", MTP)]
EACH_IDS = ["prefill", "prefill after verify", "decode", "verify"]


def run(function: str, call: dict[str, Any]) -> GDNOutput:
    return getattr(gdn_jax, function)(**call)


def same(x: Any, y: Any) -> None:
    """Bit for bit (NaN equal to NaN), with equal shapes and dtypes, leaf by leaf."""
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def others(num: int, named: Any) -> np.ndarray:
    return np.setdiff1d(np.arange(num), np.asarray(named))


def untouched(state: GDNState, before: GDNState, named: Any, config: GDNConfig, verify: bool = False) -> None:
    """Every row of every slot that is not named is as it was, and of a named one the rows behind the first, in prefill."""
    each, conv = config.mtp_step + 1, others(before.conv.shape[0], named)
    rows = (conv[:, None] * each + np.arange(each)).ravel()
    if not verify:
        rows = others(before.ssm.shape[0], np.asarray(named) * each)
    assert len(conv) and len(rows)
    same(state.conv[conv], before.conv[conv])
    same(state.ssm[rows], before.ssm[rows])


def compare(function: str, call: dict[str, Any], output: float, ssm: float, out: GDNOutput | None = None) -> GDNOutput:
    """Runs, and measures against the float64 reference."""
    out = run(function, call) if out is None else out
    want = getattr(reference, function)(**call)
    assert golden.rel(out.o, want.o) <= output, golden.rel(out.o, want.o)
    assert golden.rel(out.state.ssm, want.state.ssm) <= ssm, golden.rel(out.state.ssm, want.state.ssm)
    assert golden.rel(out.state.conv, want.state.conv) == 0, "the conv pool holds inputs, rounded to its dtype at most"
    assert out.o.dtype == out.z.dtype == call["mixed_qkvzba"].dtype
    assert [x.dtype for x in out.state] == [x.dtype for x in call["state"]]
    pad = (want.o == 0).reshape(len(want.o), -1).all(axis=1)
    assert pad.any() and not pad.all(), "the batch has padding and valid tokens"
    assert not np.asarray(out.o)[pad].any()
    z = gdn_jax.split_qkvzba(call["mixed_qkvzba"], call["config"])[1]
    same(out.z, z)
    return out


# ---- against the reference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "config"), EACH, ids=EACH_IDS)
def test_float32(function: str, config: GDNConfig) -> None:
    case = Case(1, config)
    call = case.calls()[function]
    out = compare(function, call, 1e-5, 1e-5)
    untouched(out.state, case.state, NAMED[function], config, verify=function == "gdn_mtp_decode")
    pad = others(len(out.o), VALID[function])
    assert not np.asarray(out.o)[pad].any()
    assert np.asarray(out.o)[VALID[function]].any(axis=(1, 2)).all()


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1.0), ("float16", 0.25)])
@pytest.mark.parametrize(("function", "config"), [EACH[0], *EACH[2:]], ids=[EACH_IDS[0], *EACH_IDS[2:]])
def test_low_precision(function: str, config: GDNConfig, dtype: str, scale: float) -> None:
    """Without the norm, which enlarges the error of tokens whose output nearly cancels (q orthogonal to every key)."""
    call = {**Case(2, config, dtype).calls()[function], "norm_weight": None}
    compare(function, call, 6e-3 * scale, 1e-3 * scale)


@pytest.mark.parametrize(("function", "config"), [EACH[0], *EACH[2:]], ids=[EACH_IDS[0], *EACH_IDS[2:]])
def test_bfloat16_pools(function: str, config: GDNConfig) -> None:
    """The defaults of GDNConfig: bfloat16 throughout."""
    call = Case(3, dataclasses.replace(config, ssm_dtype="bfloat16", conv_dtype="bfloat16"), "bfloat16").calls()[
        function
    ]
    compare(function, {**call, "norm_weight": None}, 9e-3, 4e-3)


@pytest.mark.parametrize(("function", "config"), EACH[2:], ids=EACH_IDS[2:])
def test_without_a_norm(function: str, config: GDNConfig) -> None:
    compare(function, {**Case(4, config).calls()[function], "norm_weight": None}, 1e-5, 1e-5)


def test_the_norm_is_gated_rms_norm_of_o_and_z() -> None:
    case = Case(5, PLAIN, "bfloat16")
    plain, normed = gdn_jax.gdn_decode(**case.decode(norm_weight=None)), gdn_jax.gdn_decode(**case.decode())
    want = gdn_jax.gated_rms_norm(plain.o, plain.z, case.norm_weight)
    assert golden.rel(normed.o, want) <= 4e-3
    same(plain.state, normed.state)
    far = gdn_jax.gdn_decode(**case.decode(norm_eps=100.0))
    want = reference.gdn_decode(**case.decode(norm_eps=100.0))
    assert golden.rel(far.o, want.o) <= 6e-3
    assert golden.rel(far.o, normed.o) > 0.5, "norm_eps is read"


@pytest.mark.parametrize("activation", ["swish", None])
def test_activation(activation: str | None) -> None:
    config = GDNConfig(**SIZES, ssm_dtype="float32", conv_dtype="float32", activation=activation)
    compare("gdn_decode", Case(6, config).decode(), 1e-5, 1e-5)


def test_without_a_conv_bias() -> None:
    case = Case(7, PLAIN)
    call = case.decode(weights=case.weights._replace(conv_bias=None))
    out = compare("gdn_decode", call, 1e-5, 1e-5)
    zeros = case.decode(weights=case.weights._replace(conv_bias=jnp.zeros_like(case.weights.conv_bias)))
    same(out, gdn_jax.gdn_decode(**zeros))


def test_no_optional_argument_is_every_default() -> None:
    """JAX-11: None against what it stands for, bit for bit."""
    case = Case(8, MTP)
    given = dict(
        state_indices=np.arange(N, dtype=INT), has_initial_state=np.ones(N, bool), initial_state_indices=None,
        num_accepted_tokens=np.ones(N, INT),
    )  # fmt: skip
    left_out = dict.fromkeys(given)
    same(gdn_jax.gdn_prefill(**case.prefill(**given)), gdn_jax.gdn_prefill(**case.prefill(**left_out)))
    whole = case.verify(query_start_loc=starts(3, 3, 3, 3))
    same(gdn_jax.gdn_mtp_decode(**whole), gdn_jax.gdn_mtp_decode(**{**whole, "query_start_loc": None}))


# ---- golden ---------------------------------------------------------------------------------------------------------


def test_golden_mtp_trace() -> None:
    given, wants = golden.load("mtp_trace")
    config = GDNConfig(2, 1, 8, 6, 4, mtp_step=2, ssm_dtype="float32", conv_dtype="float32")
    weights = GDNWeights(*(given[name] for name in GDNWeights._fields))
    state = gdn_jax.init_state(config, given["num_slots"])
    common = dict(config=config, state_indices=given["state_indices"], norm_weight=given["norm_weight"])
    for stage in ("prefill", "step0", "step1", "step2", "step3", "after"):
        arguments = {
            name: given[f"{stage}_{name}"]
            for name in ("mixed_qkvzba", "query_start_loc", "num_accepted_tokens")
            if f"{stage}_{name}" in given
        }
        function = gdn_jax.gdn_mtp_decode if stage.startswith("step") else gdn_jax.gdn_prefill
        o, _, state = function(weights, state, **arguments, **common)
        assert golden.rel(o, wants[f"{stage}_o"]) <= 1e-5, stage
    assert golden.rel(state.conv, wants["conv"]) <= 1e-5
    assert golden.rel(state.ssm, wants["ssm"]) <= 1e-5
    unnamed = others(given["num_slots"], given["state_indices"])
    assert not np.asarray(state.conv)[unnamed].any()
    assert not np.asarray(state.ssm).reshape(given["num_slots"], -1)[unnamed].any()


# ---- tensor-parallel ranks ------------------------------------------------------------------------------------------


def of_rank(x: Any, sizes: list[int], rank: int, axis: int) -> jax.Array:
    """The second half (rank 1) or the first of every part of `x` along `axis`."""
    parts = jnp.split(x, np.cumsum(sizes)[:-1], axis=axis)
    return jnp.concatenate([jnp.split(part, 2, axis=axis)[rank] for part in parts], axis=axis)


@pytest.mark.parametrize(("function", "config"), [EACH[0], *EACH[2:]], ids=[EACH_IDS[0], *EACH_IDS[2:]])
def test_two_ranks_are_the_halves_of_the_whole(function: str, config: GDNConfig) -> None:
    case = Case(9, config)
    call = case.calls()[function]
    whole = run(function, call)
    channels = [config.key_dim, config.key_dim, config.value_dim]
    everything = [*channels, config.value_dim, config.tp_num_v_heads, config.tp_num_v_heads]
    for rank in (0, 1):
        weights = GDNWeights(
            of_rank(case.weights.conv_weight, channels, rank, 0),
            of_rank(case.weights.conv_bias, channels, rank, 0),
            jnp.split(case.weights.A_log, 2)[rank],
            jnp.split(case.weights.dt_bias, 2)[rank],
        )
        conv, ssm = case.state
        state = GDNState(of_rank(conv, channels, rank, 1), jnp.split(ssm, 2, axis=1)[rank])
        part = dict(
            weights=weights,
            state=state,
            config=dataclasses.replace(config, tp_size=2),
            mixed_qkvzba=of_rank(call["mixed_qkvzba"], everything, rank, 1),
        )
        out = run(function, {**call, **part})
        assert golden.rel(out.o, jnp.split(whole.o, 2, axis=1)[rank]) <= 1e-6
        same(out.z, jnp.split(whole.z, 2, axis=1)[rank])
        same(out.state.conv, of_rank(whole.state.conv, channels, rank, 1))
        assert golden.rel(out.state.ssm, jnp.split(whole.state.ssm, 2, axis=1)[rank]) <= 1e-6


# ---- padding, empty sequences, poison -------------------------------------------------------------------------------


def poisoned(function: str, call: dict[str, Any], keep: Any = ()) -> dict[str, Any]:
    """NaN and Inf in every padding token (q, k, v, z, b and a of it) and in every slot that is not named or in `keep`."""
    config, mixed = call["config"], np.array(call["mixed_qkvzba"])
    pad = others(len(mixed), VALID[function])
    mixed[pad] = np.nan
    mixed[pad[-1]], mixed[pad[0]] = -np.inf, np.inf
    each, slots = config.mtp_step + 1, others(SLOTS, [*NAMED[function], *keep])
    conv, ssm = (np.array(x) for x in call["state"])
    conv[slots], ssm[(slots[:, None] * each + np.arange(each)).ravel()] = np.nan, np.nan
    return {**call, "mixed_qkvzba": jnp.asarray(mixed), "state": GDNState(jnp.asarray(conv), jnp.asarray(ssm))}


@pytest.mark.parametrize(("function", "config"), EACH, ids=EACH_IDS)
def test_poison_reaches_no_valid_result(function: str, config: GDNConfig) -> None:
    call = Case(10, config).calls()[function]
    bad = poisoned(function, call, keep=[4] if function == "gdn_prefill" else [])
    clean, out = run(function, call), run(function, bad)
    same(out.o, clean.o)
    assert not np.asarray(out.o)[others(len(out.o), VALID[function])].any()
    same(out.z, gdn_jax.split_qkvzba(bad["mixed_qkvzba"], config)[1])
    each, named = config.mtp_step + 1, NAMED[function]
    rows = (named[:, None] * each + np.arange(each)).ravel()
    same(out.state.conv[named], clean.state.conv[named])
    same(out.state.ssm[rows], clean.state.ssm[rows])
    untouched(out.state, bad["state"], named, config, verify=function == "gdn_mtp_decode")
    assert np.isnan(np.asarray(out.state.ssm)).any(), "the poison is still there"


@pytest.mark.parametrize(("function", "config"), EACH[1:], ids=EACH_IDS[1:])
def test_poison_reaches_no_gradient(function: str, config: GDNConfig) -> None:
    call = Case(11, config).calls()[function]
    named, each = NAMED[function], config.mtp_step + 1
    rows = (named[:, None] * each + np.arange(each)).ravel()
    cotangent = np.random.default_rng(0).standard_normal((len(call["mixed_qkvzba"]), 4, 6)).astype(F32)

    @jax.jit
    def loss(weights: GDNWeights, state: GDNState, mixed: jax.Array, norm_weight: jax.Array) -> jax.Array:
        arrays = dict(weights=weights, state=state, mixed_qkvzba=mixed, norm_weight=norm_weight)
        out = run(function, {**call, **arrays})
        return jnp.sum(out.o * cotangent) + jnp.sum(out.state.ssm[rows] ** 2) + jnp.sum(out.state.conv[named] ** 2)

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))

    def of(call: dict[str, Any]) -> Any:
        return grad(call["weights"], call["state"], call["mixed_qkvzba"], call["norm_weight"])

    clean, out = of(call), of(poisoned(function, call, keep=[4] if function == "gdn_prefill" else []))
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(clean), strict=True):
        assert np.isfinite(np.asarray(x)).all()
        assert golden.rel(x, y) <= 1e-6
        assert np.asarray(y).any()
    weights, state, mixed, _ = out
    pad = others(len(mixed), VALID[function])
    assert not np.asarray(mixed)[pad].any(), "padding gets zero gradients"
    assert np.asarray(mixed)[VALID[function]].any(axis=1).all()
    assert all(np.asarray(leaf).any() for leaf in weights)
    idle = others(SLOTS, [*named, 4] if function == "gdn_prefill" else named)
    assert not np.asarray(state.conv)[idle].any(), "slots that nothing reads get none"


def test_slots_outside_the_pool_are_padding_in_every_function() -> None:
    for function, config in EACH:
        case = Case(12, config)
        call = case.calls()[function]
        for slot in (-1, -7, SLOTS, SLOTS * 3, HUGE, -(2**31)):
            bad = {**call, "state_indices": np.full_like(call["state_indices"], slot)}
            out = run(function, bad)
            assert not np.asarray(out.o).any(), (function, slot)
            same(out.state, case.state)
        wide = np.full(len(call["state_indices"]), 2**32 + 1, np.int64)
        same(run(function, {**call, "state_indices": wide}).state, case.state)


def test_a_row_far_beyond_the_pool_leaves_the_others_right() -> None:
    """SRV-03."""
    case = Case(13, PLAIN)
    out = compare("gdn_decode", case.decode(state_indices=ints(2, 75, 0, 6)), 1e-5, 1e-5)
    same(out, gdn_jax.gdn_decode(**case.decode()))


def test_a_shared_dummy_slot_spoils_nothing_else() -> None:
    """SLOT-04, SLOT-01: captured batches are padded with stale or equal slots; the others stay right, every time."""
    case = Case(14, PLAIN)
    outs = [gdn_jax.gdn_decode(**case.decode(state_indices=ints(5, 2, 5, 6))) for _ in range(5)]
    want = reference.gdn_decode(**case.decode(state_indices=ints(-1, 2, -1, 6)))
    for out in outs:
        assert golden.rel(np.asarray(out.o)[[1, 3]], want.o[[1, 3]]) <= 1e-5
        keep = ints(0, 1, 2, 3, 4, 6)
        assert golden.rel(np.asarray(out.state.ssm)[keep], want.state.ssm[keep]) <= 1e-5
        assert golden.rel(np.asarray(out.state.conv)[keep], want.state.conv[keep]) == 0


@pytest.mark.parametrize("count", [0, -1, 4, HUGE, -(2**31)])
def test_a_count_out_of_range_is_padding(count: int) -> None:
    case = Case(15, MTP)
    counts = ints(1, 2, count, 2)
    out = compare("gdn_mtp_decode", case.verify(num_accepted_tokens=counts), 1e-5, 1e-5)
    untouched(out.state, case.state, ints(2, 4), MTP, verify=True)
    assert not np.asarray(out.o)[3:4].any()
    counts = ints(count, 1, 77, 77, 2)
    out = compare("gdn_prefill", case.prefill(num_accepted_tokens=counts), 1e-5, 1e-5)
    untouched(out.state, case.state, ints(6, 0), MTP)
    assert not np.asarray(out.o)[:5].any()


def test_a_verify_sequence_that_is_too_long_is_padding() -> None:
    case = Case(16, MTP)
    out = compare("gdn_mtp_decode", case.verify(query_start_loc=starts(3, 0, 4, 2)), 1e-5, 1e-5)
    assert not np.asarray(out.o)[3:7].any()
    untouched(out.state, case.state, ints(2, 4), MTP, verify=True)


def test_a_malformed_start_list_stays_inside_the_arrays() -> None:
    """Unspecified values, but other slots are as they were, and nothing is out of the arrays."""
    for function, config in EACH:
        if function == "gdn_decode":
            continue
        case = Case(17, config)
        call = case.calls()[function]
        n = len(call["state_indices"])
        for bad in (np.full(n + 1, HUGE, INT), np.full(n + 1, -5, INT), np.arange(n + 1, dtype=INT)[::-1] * 4):
            out = run(function, {**call, "query_start_loc": bad})
            named = call["state_indices"]
            untouched(out.state, case.state, named[named >= 0], config, verify=True)


@pytest.mark.parametrize(("function", "config"), [EACH[0], EACH[2]], ids=["prefill", "decode"])
def test_has_initial_state_false_looks_at_no_slot(function: str, config: GDNConfig) -> None:
    """SLOT-06: NaN in the slot of a fresh request, also in decode."""
    case = Case(18, config)
    call = case.calls()[function]
    n = len(call["state_indices"])
    fresh: dict[str, Any] = dict(has_initial_state=np.zeros(n, bool))
    nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), case.state)
    zero = jax.tree.map(jnp.zeros_like, case.state)
    out, want = run(function, {**call, **fresh, "state": nan}), run(function, {**call, "state": zero})
    same(out.o, want.o)
    named = NAMED[function]
    same(out.state.conv[named], want.state.conv[named])
    same(out.state.ssm[named], want.state.ssm[named])
    untouched(out.state, nan, named, config)


def test_initial_state_indices() -> None:
    """Read one slot, write another; a source outside the pool is no initial state, and does not make padding."""
    case = Case(19, MTP)
    for source in (-1, SLOTS, HUGE, -9):
        call = case.prefill(initial_state_indices=ints(source, 2, 1, 2, 4))
        out = compare("gdn_prefill", call, 1e-5, 1e-5)
        assert np.asarray(out.o)[:5].any(axis=(1, 2)).all()
        fresh = np.array([False, True, False, False, True])
        same(out, gdn_jax.gdn_prefill(**case.prefill(has_initial_state=fresh)))
    # Two requests start from one prefix, slot 5, which stays.
    call = case.prefill(initial_state_indices=ints(5, 2, 1, 2, 5), num_accepted_tokens=ints(1, 1, 1, 1, 1))
    out = compare("gdn_prefill", call, 1e-5, 1e-5)
    untouched(out.state, case.state, NAMED["gdn_prefill"], MTP)


def test_prefill_after_a_verify_step_reads_at_the_accepted_offset() -> None:
    case = Case(20, MTP)
    outs = []
    for count in (1, 2, 3):
        call = case.prefill(num_accepted_tokens=ints(count, 1, 1, 1, count))
        outs.append(compare("gdn_prefill", call, 1e-5, 1e-5).o)
    assert golden.rel(outs[0], outs[1]) > 1e-2
    assert golden.rel(outs[1], outs[2]) > 1e-2


# ---- stacked layers -------------------------------------------------------------------------------------------------

LAYERS = 3


@pytest.mark.parametrize(("function", "config"), EACH, ids=EACH_IDS)
def test_a_layer_of_a_stacked_state(function: str, config: GDNConfig) -> None:
    case = Case(21, config)
    call = case.calls()[function]
    state = make_state(np.random.default_rng(22), config, SLOTS, LAYERS)
    for layer in (2, np.int64(0), jnp.int32(1), np.array(2, np.int8)):
        out = run(function, {**call, "state": state, "layer": layer})
        at = int(layer)
        want = run(function, {**call, "state": jax.tree.map(lambda x, at=at: x[at], state)})
        same(out.o, want.o)
        same(jax.tree.map(lambda x, at=at: x[at], out.state), want.state)
        rest = others(LAYERS, [at])
        same(jax.tree.map(lambda x, rest=rest: x[rest], out.state), jax.tree.map(lambda x, rest=rest: x[rest], state))
    for outside in (jnp.int32(LAYERS), jnp.int32(-1), jnp.int32(HUGE)):
        out = run(function, {**call, "state": state, "layer": outside})
        assert not np.asarray(out.o).any(), "a traced layer outside makes everything padding"
        same(out.state, state)


@pytest.mark.parametrize(("function", "config"), [EACH[0], *EACH[2:]], ids=[EACH_IDS[0], *EACH_IDS[2:]])
def test_scan_over_layers(function: str, config: GDNConfig) -> None:
    cases = [Case(23 + layer, config) for layer in range(LAYERS)]
    call = cases[0].calls()[function]
    weights = jax.tree.map(lambda *x: jnp.stack(x), *(case.weights for case in cases))
    state = jax.tree.map(lambda *x: jnp.stack(x), *(case.state for case in cases))

    @jax.jit
    def model(weights: GDNWeights, state: GDNState, mixed: jax.Array) -> tuple[GDNState, jax.Array]:
        def body(state: GDNState, xs: tuple[jax.Array, GDNWeights]) -> tuple[GDNState, jax.Array]:
            layer, weights = xs
            out = run(function, {**call, "weights": weights, "state": state, "mixed_qkvzba": mixed, "layer": layer})
            return out.state, out.o

        return jax.lax.scan(body, state, (jnp.arange(LAYERS, dtype=jnp.int32), weights))

    stacked, o = model(weights, state, call["mixed_qkvzba"])
    for layer, case in enumerate(cases):
        want = run(function, {**call, "weights": case.weights, "state": case.state})
        assert golden.rel(o[layer], want.o) <= 1e-6
        assert golden.rel(stacked.ssm[layer], want.state.ssm) <= 1e-6
        same(stacked.conv[layer], want.state.conv)


# ---- pieces and steps -----------------------------------------------------------------------------------------------


def test_prefill_in_pieces_is_the_whole() -> None:
    """CONV-13: 24 tokens at once, and as 7, 1, 2 and 14, the states carried along."""
    case = Case(30, PLAIN)
    one: dict[str, Any] = dict(
        state_indices=ints(4, -1, -1, -1, -1),
        initial_state_indices=ints(4, 0, 0, 0, 0),
        has_initial_state=np.ones(N, bool),
    )
    call = case.prefill(query_start_loc=starts(24, 0, 0, 0, 0), **one)
    whole = gdn_jax.gdn_prefill(**call)
    want = reference.gdn_prefill(**call)
    assert golden.rel(whole.o, want.o) <= 1e-5
    state, done, o = case.state, 0, []
    for length in (7, 1, 2, 14):
        mixed = jnp.zeros_like(case.prompt).at[:length].set(case.prompt[done : done + length])
        out = gdn_jax.gdn_prefill(
            **case.prefill(state=state, mixed_qkvzba=mixed, query_start_loc=starts(length, 0, 0, 0, 0), **one)
        )
        state, done = out.state, done + length
        o.append(out.o[:length])
    assert golden.rel(jnp.concatenate(o), want.o) <= 1e-5
    assert golden.rel(state.ssm, want.state.ssm) <= 1e-5
    same(state.conv, whole.state.conv)
    untouched(state, case.state, [4], PLAIN)


def speculate(config: GDNConfig, seed: int, steps: int = 6) -> None:
    """MTP-08: requests that guess well or badly, against plain decoding of the true tokens and against float64."""
    rng, S, n = np.random.default_rng(seed), config.mtp_step, DN
    plain = dataclasses.replace(config, mtp_step=0)
    weights = make_weights(rng, config)
    slots, prompts = ints(5, 0, 3, 2), [4, 1, 9, 2]
    streams = [np.asarray(make_mixed(rng, config, 9 + steps * (S + 1))) for _ in range(n)]

    packed = np.zeros((T, streams[0].shape[1]), F32)
    packed[: sum(prompts)] = np.concatenate([stream[:length] for stream, length in zip(streams, prompts, strict=True)])
    prefill = dict(
        query_start_loc=starts(*prompts, 0),
        state_indices=np.append(slots, INT(-1)),
        has_initial_state=np.zeros(N, bool),
    )
    state = gdn_jax.gdn_prefill(weights, gdn_jax.init_state(config, SLOTS), packed, config=config, **prefill).state
    simple = gdn_jax.gdn_prefill(weights, gdn_jax.init_state(plain, SLOTS), packed, config=plain, **prefill).state

    at, accepted, got = list(prompts), np.ones(n, INT), [[] for _ in range(n)]
    tokens = n * (S + 1)
    for _ in range(steps):
        lengths = rng.integers(0, S + 2, n)
        right = [int(rng.integers(0, max(length, 1))) for length in lengths]  # of the drafts behind the first token
        mixed, bounds = np.full((tokens, packed.shape[1]), np.nan, F32), starts(*lengths)
        for i in range(n):
            rows = np.full((lengths[i], packed.shape[1]), 1e3, F32)  # a wrong draft
            kept = min(int(lengths[i]), 1 + right[i])
            rows[:kept] = streams[i][at[i] : at[i] + kept]
            mixed[bounds[i] : bounds[i + 1]] = rows
        out = gdn_jax.gdn_mtp_decode(
            weights,
            state,
            mixed,
            config=config,
            state_indices=slots,
            num_accepted_tokens=accepted,
            query_start_loc=bounds,
        )
        state = out.state
        for i in range(n):
            if lengths[i]:
                got[i] += list(np.asarray(out.o)[bounds[i] : bounds[i] + 1 + right[i]])
                accepted[i], at[i] = 1 + right[i], at[i] + 1 + right[i]

    wanted = [[] for _ in range(n)]
    for t in range(max(map(len, got))):
        live = np.array([t < len(tokens) for tokens in got])
        mixed = np.stack([stream[prompt + t] for stream, prompt in zip(streams, prompts, strict=True)])
        out = gdn_jax.gdn_decode(
            weights, simple, mixed, config=plain, state_indices=np.where(live, slots, -1).astype(INT)
        )
        simple = out.state
        for i in np.flatnonzero(live):
            wanted[i].append(np.asarray(out.o)[i])
    for i in range(n):
        assert got[i], "each request got on"
        assert golden.rel(np.stack(got[i]), np.stack(wanted[i])) <= 1e-5, i
        row = int(slots[i]) * (S + 1) + int(accepted[i]) - 1
        assert golden.rel(state.ssm[row], simple.ssm[slots[i]]) <= 1e-5
        offset = int(accepted[i]) - 1
        same(state.conv[slots[i], :, offset : offset + 3], simple.conv[slots[i]])
        exact = reference.gdn_prefill(
            weights, reference.init_state(plain, 1), streams[i][: at[i]], config=plain,
            query_start_loc=starts(at[i]), state_indices=ints(0),
        )  # fmt: skip
        assert golden.rel(np.stack(got[i]), exact.o[prompts[i] :]) <= 1e-5
        assert golden.rel(state.ssm[row], exact.state.ssm[0]) <= 1e-5


@pytest.mark.parametrize("step", [1, 2, 3])
def test_speculative_decoding_equals_plain_decoding(step: int) -> None:
    config = GDNConfig(**SIZES, mtp_step=step, ssm_dtype="float32", conv_dtype="float32")
    for seed in (40, 41, 42):
        speculate(config, seed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_05_decode_is_a_prefill_and_a_verify_step_of_one_token(dtype: str) -> None:
    case = Case(50, PLAIN, dtype)
    slots, counts = ints(2, -1, 0, 6), np.ones(DN, INT)
    decode = gdn_jax.gdn_decode(**case.decode(has_initial_state=None))
    prefill = gdn_jax.gdn_prefill(
        case.weights, case.state, case.step, config=PLAIN, norm_weight=case.norm_weight, state_indices=slots,
        query_start_loc=starts(1, 1, 1, 1),
    )  # fmt: skip
    verify = gdn_jax.gdn_mtp_decode(
        case.weights, case.state, case.step, config=PLAIN, norm_weight=case.norm_weight, state_indices=slots,
        num_accepted_tokens=counts,
    )  # fmt: skip
    for out in (prefill, verify):
        same(out.state.conv, decode.state.conv)
        for x, y in ((out.o, decode.o), (out.state.ssm, decode.state.ssm)):
            a, b = np.asarray(x, F32), np.asarray(y, F32)
            ulp = np.spacing(np.abs(b)) if x.dtype == F32 else np.float32(0)  # outputs in bfloat16: the same bits
            assert (np.abs(a - b) <= ulp).all(), np.abs(a - b).max()
    # In a model with drafts: the first row of a request, the counts 1.
    mtp = Case(50, MTP, dtype)
    verify = gdn_jax.gdn_mtp_decode(
        mtp.weights, GDNState(mtp.state.conv.at[:, :, :3].set(case.state.conv), mtp.state.ssm.at[::3].set(case.state.ssm)),
        case.step, config=MTP, norm_weight=case.norm_weight, state_indices=slots, num_accepted_tokens=counts,
        query_start_loc=starts(1, 1, 1, 1),
    )  # fmt: skip
    same(mtp.weights, case.weights)
    assert golden.rel(verify.o, decode.o) <= (1e-6 if dtype == "float32" else 0)
    assert golden.rel(verify.state.ssm[::3], decode.state.ssm) <= 1e-6


# ---- state helpers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("config", [PLAIN, MTP], ids=["plain", "mtp"])
def test_init_state(config: GDNConfig, layers: int | None) -> None:
    state = gdn_jax.init_state(config, 5, layers)
    want = reference.init_state(config, 5, layers)
    assert isinstance(state, GDNState)
    assert [x.shape for x in state] == [x.shape for x in want]
    assert not any(np.asarray(x).any() for x in state)
    assert [x.dtype for x in gdn_jax.init_state(GDNConfig(**SIZES), 2)] == ["bfloat16", "bfloat16"]
    mixed = GDNConfig(**SIZES, ssm_dtype="float16", conv_dtype="float32", tp_size=2)
    assert [(x.dtype.name, x.shape) for x in gdn_jax.init_state(mixed, 2)] == [
        ("float32", (2, mixed.conv_dim, 3)),
        ("float16", (2, 2, 8, 6)),
    ]


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("config", [PLAIN, MTP], ids=["plain", "mtp"])
def test_reset_slots(config: GDNConfig, layers: int | None) -> None:
    state = make_state(np.random.default_rng(60), config, SLOTS, layers)
    for slots in (
        ints(2, 0, 6, 2),
        ints(-1, SLOTS, HUGE, -(2**31)),
        ints(-1, 3, -SLOTS, 3),
        np.array([1, 2**32 + 2, 4, -1]),
    ):
        out = gdn_jax.reset_slots(state, slots, config)
        want = reference.reset_slots(state, slots, config, dtype=F32)
        same(out, want)
    same(gdn_jax.reset_slots(state, ints(), config), state)
    assert np.asarray(out.ssm).any() and not np.asarray(out.conv)[..., 1, :, :].any()


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("config", [PLAIN, MTP], ids=["plain", "mtp"])
def test_copy_slots(config: GDNConfig, layers: int | None) -> None:
    state = make_state(np.random.default_rng(61), config, SLOTS, layers)
    for src, dst in [
        (ints(0, 1, 2), ints(1, 2, 3)),  # a chain: every source is read before any slot is written
        (ints(4, 5, 6), ints(5, 6, 4)),  # a ring
        (ints(0, 0, 0), ints(1, 2, 6)),  # a prefix that several share
        (ints(-1, 2, SLOTS), ints(1, -1, 3)),  # skipped
        (ints(3, HUGE, 0), ints(SLOTS, 0, 0)),
        (np.array([2**32 + 1, 2, 1]), np.array([3, 2**32 + 5, 4])),
    ]:
        out = gdn_jax.copy_slots(state, src, dst, config)
        same(out, reference.copy_slots(state, src, dst, config, dtype=F32))
    same(gdn_jax.copy_slots(state, ints(), ints(), config), state)


def test_copies_under_jit_and_donation() -> None:
    state = make_state(np.random.default_rng(62), MTP, SLOTS)
    src, dst = ints(1, 2, 0), ints(2, 1, -1)
    want = reference.copy_slots(state, src, dst, MTP, dtype=F32)
    copy = jax.jit(gdn_jax.copy_slots, static_argnums=3, donate_argnums=0)
    same(copy(jax.tree.map(jnp.copy, state), src, dst, MTP), want)
    reset = jax.jit(gdn_jax.reset_slots, static_argnums=2, donate_argnums=0)
    same(reset(jax.tree.map(jnp.copy, state), src, MTP), reference.reset_slots(state, src, MTP, dtype=F32))


def test_copied_requests_go_on_alike() -> None:
    case = Case(63, MTP)
    state = gdn_jax.copy_slots(case.state, ints(2), ints(6), MTP)
    one = case.verify(state=state, state_indices=ints(2, -1, -1, -1), query_start_loc=starts(3, 0, 0, 0))
    two = {**one, "state_indices": ints(6, -1, -1, -1)}
    a, b = gdn_jax.gdn_mtp_decode(**one), gdn_jax.gdn_mtp_decode(**two)
    same(a.o, b.o)
    same(a.state.ssm[6:9], b.state.ssm[18:21])


def test_splits() -> None:
    """LAY-07: columns are numbered, so that every one is followed."""
    config = GDNConfig(num_v_heads=4, num_k_heads=2, head_k_dim=2, head_v_dim=3, conv_kernel_dim=4)
    width = config.qkvz_dim + config.ba_dim
    mixed = np.arange(3 * width, dtype=F32).reshape(3, width)
    qkv, z, b, a = gdn_jax.split_qkvzba(mixed, config)
    for got, want in zip((qkv, z, b, a), reference.split_qkvzba(mixed, config, dtype=F32), strict=True):
        same(got, want)
    assert qkv[0].tolist() == list(range(20))
    assert z[0].ravel().tolist() == list(range(20, 32))
    assert b[0].tolist() == [32, 33, 34, 35]
    assert a[0].tolist() == [36, 37, 38, 39]
    q, k, v = gdn_jax.split_qkv(qkv, config)
    assert q[0].tolist() == [[0, 1], [2, 3]]
    assert k[0].tolist() == [[4, 5], [6, 7]]
    assert v[0].tolist() == [[8, 9, 10], [11, 12, 13], [14, 15, 16], [17, 18, 19]]
    half = gdn_jax.split_qkvzba(jnp.asarray(mixed, "bfloat16"), config)
    assert {x.dtype.name for x in half} == {"bfloat16"}


# ---- in place, traced once ------------------------------------------------------------------------------------------


def jitted(function: str, call: dict[str, Any], donate: bool = True) -> Callable[..., GDNOutput]:
    def step(state: GDNState, mixed_qkvzba: jax.Array) -> GDNOutput:
        return run(function, {**call, "state": state, "mixed_qkvzba": mixed_qkvzba})

    return jax.jit(step, donate_argnums=0 if donate else ())


@pytest.mark.parametrize(("function", "config"), [EACH[0], *EACH[2:]], ids=[EACH_IDS[0], *EACH_IDS[2:]])
def test_a_donated_state_is_updated_in_place(function: str, config: GDNConfig) -> None:
    case = Case(70, config)
    call, mixed = case.calls()[function], case.calls()[function]["mixed_qkvzba"]
    want = run(function, call)
    sizes = []
    for num_slots in (SLOTS, 40 * SLOTS):
        pools = jax.tree.map(lambda x, z: z.at[: x.shape[0]].set(x), case.state, gdn_jax.init_state(config, num_slots))
        compiled: Any = jitted(function, call).lower(pools, mixed).compile()  # pyright: ignore[reportFunctionMemberAccess]
        sizes.append((compiled.memory_analysis().temp_size_in_bytes, sum(x.nbytes for x in pools)))
        before = [x.unsafe_buffer_pointer() for x in pools]
        out = compiled(pools, mixed)
        assert [x.unsafe_buffer_pointer() for x in out.state] == before
        assert all(x.is_deleted() for x in pools)
        same(out.o, want.o)
        same(jax.tree.map(lambda x, y: y[: x.shape[0]], case.state, out.state), want.state)
    (temp, _), (more, pool) = sizes
    assert more - temp < pool // 20, f"temporary memory grows with the pool: {sizes}"


def test_one_trace_for_each_static_shape() -> None:
    """SRV-01: values of slots, starts, flags and counts never retrace; another shape or None does, once."""
    case, count = Case(71, MTP), []
    indices = ("state_indices", "query_start_loc", "num_accepted_tokens")

    @jax.jit
    def step(state: GDNState, mixed: jax.Array, indices: dict[str, Any]) -> GDNOutput:
        count.append(1)
        return gdn_jax.gdn_mtp_decode(**{**case.verify(), "state": state, "mixed_qkvzba": mixed, **indices})

    def batch(**changes: Any) -> dict[str, Any]:
        return {name: jnp.asarray(x) for name, x in {**case.verify(), **changes}.items() if name in indices}

    step(case.state, case.drafts, batch())
    for counts in (ints(1, 1, 1, 1), ints(3, 2, 1, 9), ints(0, 0, 0, 0)):
        step(case.state, case.drafts, batch(num_accepted_tokens=counts))
    step(case.state, case.drafts, batch(query_start_loc=starts(1, 1, 1, 1), state_indices=ints(-1, 0, 9, 3)))
    assert len(count) == 1
    step(case.state, case.drafts[:9], batch())
    assert len(count) == 2


@pytest.mark.parametrize(("function", "config"), EACH, ids=EACH_IDS)
def test_nothing_is_compiled_twice_outside_jit(function: str, config: GDNConfig) -> None:
    case = Case(72, config)
    call = case.calls()[function]
    run(function, {**call, "norm_eps": 1e-6})
    arrays = {name: x for name, x in call.items() if isinstance(x, np.ndarray)}
    COMPILES.clear()
    for i in range(3):
        changes: dict[str, Any] = {
            name: np.roll(x, i) if name != "query_start_loc" else x for name, x in arrays.items()
        }
        jax.block_until_ready(run(function, {**call, **changes, "norm_eps": 1e-6 * (i + 2)}))
    assert not COMPILES, "other values of slots, flags, counts and eps compile nothing"


def test_scale_is_no_static_argument() -> None:
    one, gate = jnp.ones((3, 1, 8)), jnp.zeros((3, 1))
    call: dict[str, Any] = dict(ssm_state=jnp.ones((4, 1, 8, 8)), state_indices=ints(0, 2, 3))
    gdn_jax.recurrent_gated_delta_rule(one, one, one, gate, gate, scale=0.25, **call)
    COMPILES.clear()
    outs = [gdn_jax.recurrent_gated_delta_rule(one, one, one, gate, gate, scale=s, **call)[0] for s in (0.5, 1.0, 2.0)]
    jax.block_until_ready(outs)
    assert not COMPILES
    assert golden.rel(outs[2], 4 * np.asarray(outs[0])) <= 1e-6


# ---- faults met in the field ----------------------------------------------------------------------------------------


def test_conv_18_all_channel_groups_of_the_row_shift() -> None:
    case = Case(80, PLAIN)
    first, second = case.step, case.step + 10
    out = gdn_jax.gdn_decode(**case.decode(mixed_qkvzba=first, has_initial_state=None))
    out = gdn_jax.gdn_decode(**case.decode(mixed_qkvzba=second, state=out.state, has_initial_state=None))
    D = PLAIN.conv_dim
    for n, slot in enumerate((2, None, 0, 6)):
        if slot is not None:
            old, row = np.asarray(case.state.conv)[slot], np.asarray(out.state.conv)[slot]
            same(row[:, 0], old[:, 2])
            same(row[:, 1], np.asarray(first)[n, :D])
            same(row[:, 2], np.asarray(second)[n, :D])
            assert (row != old).all()


def test_pre_10_no_leak_from_the_sequence_before() -> None:
    case, rng = Case(81, PLAIN), np.random.default_rng(81)
    own = np.asarray(make_mixed(rng, PLAIN, 9))
    loud = np.asarray(make_mixed(rng, PLAIN, 7)) * 1e3
    after, alone = np.zeros(case.prompt.shape, F32), np.zeros(case.prompt.shape, F32)
    after[:7], after[7:16], alone[:9] = loud, own, own
    fresh = np.zeros(N, bool)
    packed = gdn_jax.gdn_prefill(
        **case.prefill(
            mixed_qkvzba=after, query_start_loc=starts(7, 9, 0, 0, 0), state_indices=ints(1, 2, -1, -1, -1),
            has_initial_state=fresh,
        )
    )  # fmt: skip
    single = gdn_jax.gdn_prefill(
        **case.prefill(
            mixed_qkvzba=alone, query_start_loc=starts(9, 0, 0, 0, 0), state_indices=ints(2, -1, -1, -1, -1),
            has_initial_state=fresh,
        )
    )  # fmt: skip
    same(packed.o[7:16], single.o[:9])
    same(packed.state.ssm[2], single.state.ssm[2])
    same(packed.state.conv[2], single.state.conv[2])
    assert np.abs(np.asarray(packed.o[7:16])).any()


def test_slot_07_the_same_prompt_again_into_a_used_slot() -> None:
    case = Case(82, PLAIN)
    call = case.prefill(
        query_start_loc=starts(10, 0, 0, 0, 0),
        state_indices=ints(2, -1, -1, -1, -1),
        has_initial_state=np.zeros(N, bool),
    )
    first = gdn_jax.gdn_prefill(**call)
    second = gdn_jax.gdn_prefill(**{**call, "state": first.state})
    same(first, second)
    third = gdn_jax.gdn_prefill(**{**call, "state": first.state, "has_initial_state": np.ones(N, bool),
                                   "initial_state_indices": None})  # fmt: skip
    assert golden.rel(third.o, first.o) > 1e-3, "with the state it would have been another result"


def test_mtp_12_counts_follow_the_array_of_each_call() -> None:
    case, rng = Case(83, MTP), np.random.default_rng(83)
    traced = []

    @jax.jit
    def step(state: GDNState, mixed: jax.Array, counts: jax.Array) -> GDNOutput:
        traced.append(1)
        return gdn_jax.gdn_mtp_decode(
            **case.verify(
                state=state, mixed_qkvzba=mixed, num_accepted_tokens=counts, query_start_loc=starts(3, 3, 3, 3)
            )
        )

    state, want = case.state, case.state
    for count in (1, 3, 2, 1):
        mixed, counts = make_mixed(rng, MTP, VT), jnp.full(DN, count, jnp.int32)
        call = case.verify(
            state=want, mixed_qkvzba=mixed, num_accepted_tokens=counts, query_start_loc=starts(3, 3, 3, 3)
        )
        out, exact = step(state, mixed, counts), reference.gdn_mtp_decode(**call)
        assert golden.rel(out.o, exact.o) <= 1e-5
        state, want = out.state, exact.state
    assert len(traced) == 1
    # Saved after 2 accepted tokens: the window is the last W - 1 accepted inputs.
    last = np.asarray(mixed)[:, : MTP.conv_dim].reshape(DN, 3, -1)
    window = np.asarray(state.conv)[2, :, 1:4]  # slot 2 is sequence 0
    same(window[:, 1:], last[0, :2].T)


@pytest.mark.parametrize("pools_first", [False, True])
def test_jax_01_donated_and_undonated_steps_agree(pools_first: bool) -> None:
    case = Case(84, PLAIN)

    def step(state: GDNState, other: jax.Array, mixed: jax.Array) -> tuple[Any, ...]:
        out = gdn_jax.gdn_decode(**case.decode(state=state, mixed_qkvzba=mixed))
        results = (out.o, other + 1)
        return (*out.state, *results) if pools_first else (*results, *out.state)

    other = jnp.zeros(case.state.ssm.shape, F32)  # of the shape and dtype of a pool
    want = jax.jit(step)(case.state, other, case.step)
    got = jax.jit(step, donate_argnums=(0, 1))(jax.tree.map(jnp.copy, case.state), jnp.copy(other), case.step)
    same(got, want)


def test_jax_07_a_hundred_donated_steps() -> None:
    case = Case(85, PLAIN)
    call = case.decode(has_initial_state=None)
    step = jitted("gdn_decode", call)
    old = state = jax.tree.map(jnp.copy, case.state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable"
        for _ in range(100):
            old, state = state, step(state, case.step).state
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old.ssm)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        step(old, case.step)
    want = case.state
    for _ in range(100):
        want = reference.gdn_decode(**{**call, "state": want}).state
    assert golden.rel(state.ssm, want.ssm) <= 1e-4
    idle = others(SLOTS, NAMED["gdn_decode"])
    same(state.ssm[idle], case.state.ssm[idle])


def test_jax_13_threads() -> None:
    """Eight threads on a cold cache, mixed shapes, own pools, one of them under another precision: the bits of a serial run."""
    config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=3, ssm_dtype="float32",
                       conv_dtype="float32")  # fmt: skip
    rng = np.random.default_rng(86)
    weights = make_weights(rng, config)
    jobs = []
    for i in range(8):
        n = 2 + i % 2
        jobs.append((make_state(rng, config, 4), make_mixed(rng, config, n), np.arange(n, dtype=INT)[::-1]))

    def work(i: int) -> list[GDNOutput]:
        state, mixed, slots = jobs[i]
        outs = []
        for _ in range(10):
            outs.append(gdn_jax.gdn_decode(weights, state, mixed, config=config, state_indices=slots))
            state = outs[-1].state
        return outs

    results: dict[int, Any] = {}
    barrier = threading.Barrier(8)

    def thread(i: int) -> None:
        barrier.wait()
        try:
            if i == 0:
                with jax.default_matmul_precision("bfloat16"):
                    results[i] = work(i)
            else:
                results[i] = work(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=thread, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(8):
        assert not isinstance(results[i], Exception), results[i]
        same(results[i], work(i))


def empty(function: str, case: Case, mixed: jax.Array, sequences: int = 0) -> dict[str, Any]:
    """A call of `sequences` sequences without tokens."""
    arrays: dict[str, Any] = dict(
        weights=case.weights, state=case.state, config=case.config, norm_weight=case.norm_weight
    )
    arrays |= dict(mixed_qkvzba=mixed, state_indices=np.arange(sequences, dtype=INT))
    if function != "gdn_decode":
        arrays["query_start_loc"] = np.zeros(sequences + 1, INT)
    if function == "gdn_mtp_decode":
        arrays["num_accepted_tokens"] = np.ones(sequences, INT)
    return arrays


@pytest.mark.parametrize(("function", "config"), EACH, ids=EACH_IDS)
def test_srv_08_no_sequence(function: str, config: GDNConfig) -> None:
    case = Case(87, config)
    out = run(function, empty(function, case, case.prompt[:0]))
    assert (out.o.shape, out.z.shape, out.o.dtype) == ((0, 4, 6), (0, 4, 6), F32)
    same(out.state, case.state)
    if function == "gdn_mtp_decode":
        out = run(function, {**empty(function, case, case.prompt[:0]), "query_start_loc": None})
        assert out.o.shape == (0, 4, 6)
        same(out.state, case.state)
    if function != "gdn_decode":  # tokens of no sequence
        out = run(function, empty(function, case, case.drafts))
        assert out.o.shape == (VT, 4, 6)
        assert not np.asarray(out.o).any()
        same(out.state, case.state)


@pytest.mark.parametrize(("function", "config"), [EACH[0], EACH[3]], ids=["prefill", "verify"])
def test_srv_08_sequences_but_no_token(function: str, config: GDNConfig) -> None:
    case = Case(88, config)
    out = run(function, empty(function, case, case.prompt[:0], sequences=2))
    assert out.o.shape == (0, 4, 6)
    same(out.state, case.state)


@pytest.mark.parametrize(("function", "config"), EACH[1:], ids=EACH_IDS[1:])
def test_srv_08_nothing_but_padding(function: str, config: GDNConfig) -> None:
    case = Case(89, config)
    call = case.calls()[function]
    out = run(function, {**call, "state_indices": np.full_like(call["state_indices"], -1)})
    assert not np.asarray(out.o).any()
    same(out.state, case.state)


@pytest.mark.parametrize(("function", "config"), EACH[1:], ids=EACH_IDS[1:])
def test_a_pool_without_slots(function: str, config: GDNConfig) -> None:
    """init_state(config, 0) is legal; every sequence is then padding."""
    none = gdn_jax.init_state(config, 0)
    out = run(function, {**Case(90, config).calls()[function], "state": none})
    assert not np.asarray(out.o).any()
    same(out.state, none)
    same(gdn_jax.reset_slots(none, ints(0, -1), config), none)
    same(gdn_jax.copy_slots(none, ints(0, 1), ints(1, 0), config), none)
