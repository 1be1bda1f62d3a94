"""Faults met in the field that belong to no single operator, and what became of every row of the list.

A test named after its case (`test_conv_03_…`) stands in the file of its operator; many rows have one in each operator's file.

    CONV-03 06 07 10 11 12 13 16 17 18, MTP-01 03 08 11 12 16, PRE-08, NUM-06, SLOT-*, SRV-03 08, JAX-03 11, SCALE-02
                                                test_conv.py (CONV-18, MTP-12, SLOT-07 for the whole layer: test_layer.py)
    PRE-04 06 07 08 12, CONV-13, NUM-02 (bfloat16) 06 07, DEC-06, LAY-05, SLOT-01 02 07 10 12, SRV-03 08, JAX-03 11
                                                test_chunk.py
    PRE-14, DEC-01 04 06, NUM-04 06, LAY-03, MTP-07, SLOT-01 02 04 06 10, SRV-03 08, JAX-03 11
                                                test_recurrent.py
    MTP-01 03 04 05 07 08 12 13 15 16, GATE-05, DEC-06, SLOT-10, SRV-03 08, JAX-03
                                                test_mtp.py
    GATE-01 03, SCALE-02, NUM-06                test_gating.py, test_norm.py
    PRE-10, GATE-05, JAX-01 07 13, SRV-08       test_layer.py
    DEC-08, JAX-05 (shapes and dtypes)          test_checks.py, and below
    JAX-09                                      test_dispatch.py, and below
    LAY-07                                      below, and the splits in test_layer.py
    NUM-02 (float32); MTP-03 08, SLOT-04 for the whole layer
                                                below

Not here, with the reason:

    CONV-01, PRE-01     more than 2**31 elements: 8 GB and more, for a large machine (`gpu`), not for this suite. Below: the
                        index arithmetic that could wrap is int32 on token and slot numbers only, never on elements.
    CONV-04, LAY-01, DLP-01 02 03 05 07 09 11 13
                        torch tensors: tests/interop.
    JAX-02; MTP-04, GATE-01 for the kernels
                        tests/mosaic.
    SRV-01              warm-up of buckets: operators.md has none; one compilation for each static shape is in test_layer.py.
    SRV-06              a slot allocator: operators.md has none (interop's is tested in tests/interop).
    SLOT-13 14 17, SRV-10
                        checkpoints inside a prefill: operators.md has none; a caller cuts the prefill there, which
                        CONV-13 and NUM-06 (bit for bit on the grid of chunks) show to be right.
    MTP-15              draft trees: operators.md has none; test_mtp.py shows that the argument is refused.
    PRE-11              lengths or a mask beside starts: operators.md has no such argument.
    SLOT-02's second half
                        a configurable sentinel: operators.md has one rule, anything outside the pool; slot 0 is ordinary.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import INT, close, normal, rule_inputs, same, starts, zero

import gdn_jax
import golden
from gdn_jax import GDNConfig, GDNState, GDNWeights, reference

pytestmark = pytest.mark.usefixtures("quick_compiles")

CONFIG = GDNConfig(
    num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=3, conv_kernel_dim=4, mtp_step=2, ssm_dtype="float32",
    conv_dtype="float32",
)  # fmt: skip
WIDTH = CONFIG.qkvz_dim + CONFIG.ba_dim
T, N, SLOTS = 12, 4, 7


def weights(rng: np.random.Generator) -> GDNWeights:
    return GDNWeights(normal(rng, CONFIG.conv_dim, 4), normal(rng, CONFIG.conv_dim), normal(rng, 2), normal(rng, 2))


def pools(rng: np.random.Generator) -> GDNState:
    zeros = reference.init_state(CONFIG, SLOTS)
    return GDNState(normal(rng, *zeros.conv.shape), normal(rng, *zeros.ssm.shape))


def verify(w: GDNWeights, state: Any, tokens: Any, lengths: tuple[int, ...], slots: Any, accepted: Any) -> Any:
    """One verify step of the shared static shape, checked against the reference."""
    x = np.full((T, WIDTH), np.nan, np.float32)
    x[: len(tokens)] = tokens
    call: dict[str, Any] = dict(
        config=CONFIG, state_indices=np.array(slots, INT), num_accepted_tokens=np.array(accepted, INT),
        query_start_loc=starts(*lengths),
    )  # fmt: skip
    out = gdn_jax.gdn_mtp_decode(w, state, x, **call)
    want = reference.gdn_mtp_decode(w, state, x, **call)
    close(out.o, want.o, 1e-5)
    close(out.state.conv, want.state.conv, 0)
    close(out.state.ssm, want.state.ssm, 1e-5)
    return out


def test_mtp_08_layer_rejected_tokens_leave_no_trace() -> None:
    """Acceptance 3, 1, 2, 3, 1 over five steps with rejected drafts of 1e3; then the accepted stream in one prefill."""
    rng = np.random.default_rng(0)
    w, stream = weights(rng), normal(rng, 10, WIDTH)
    state: Any = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), reference.init_state(CONFIG, SLOTS))
    plain = dict(config=CONFIG, state_indices=np.array([5]))
    want = reference.gdn_prefill(w, reference.init_state(CONFIG, SLOTS), stream, query_start_loc=starts(10), **plain)
    done, accepted = 0, 1
    for correct in (3, 1, 2, 3, 1):
        drafts = np.full((3, WIDTH), 1e3, np.float32)
        drafts[:correct] = stream[done : done + correct]
        out = verify(w, state, drafts, (3, 0, 0, 0), [5, -1, -1, -1], [accepted, 1, 1, 1])
        close(np.asarray(out.o)[:correct], want.o[done : done + correct], 1e-5)
        state, done, accepted = out.state, done + correct, correct
    close(np.asarray(state.ssm)[5 * 3 + accepted - 1], want.state.ssm[5 * 3], 1e-5)
    assert (np.abs(np.asarray(state.conv)[5, :, accepted - 1 : accepted + 2]) < 100).all()


def test_mtp_03_layer_ragged_rows_equal_themselves_alone() -> None:
    rng = np.random.default_rng(1)
    w, before, x = weights(rng), pools(rng), normal(rng, 7, WIDTH)
    lengths, slots, accepted = (1, 3, 1, 2), [4, 1, 0, 6], [1, 2, 1, 3]
    out = verify(w, before, x, lengths, slots, accepted)
    bounds = starts(*lengths)
    for n in range(N):
        part = slice(bounds[n], bounds[n + 1])
        alone = verify(w, before, x[part], (lengths[n], 0, 0, 0), [slots[n], -1, -1, -1], [accepted[n], 1, 1, 1])
        same(np.asarray(alone.o)[: lengths[n]], np.asarray(out.o)[part])
        same(np.asarray(alone.state.conv)[slots[n]], np.asarray(out.state.conv)[slots[n]])
        rows = slice(slots[n] * 3, slots[n] * 3 + lengths[n])
        same(np.asarray(alone.state.ssm)[rows], np.asarray(out.state.ssm)[rows])


def test_slot_04_layer_empty_sequences_with_stale_ids() -> None:
    """Padding that carries the slots of live sequences, but no tokens, never touches them; a hundred equal runs."""
    rng = np.random.default_rng(2)
    w, before, x = weights(rng), pools(rng), normal(rng, 5, WIDTH)
    first = verify(w, before, x, (2, 3, 0, 0), [3, 1, 3, 1], [1, 2, 3, 1])
    run = functools.partial(
        gdn_jax.gdn_mtp_decode, w, before, np.concatenate([x, np.zeros((T - 5, WIDTH), np.float32)]), config=CONFIG,
        state_indices=np.array([3, 1, 3, 1], INT), num_accepted_tokens=np.array([1, 2, 3, 1], INT),
        query_start_loc=starts(2, 3, 0, 0),
    )  # fmt: skip
    for _ in range(100):
        again = run()
        same(again.o, first.o)
        jax.tree.map(same, again.state, first.state)


def test_slots_with_huge_numbers_do_not_wrap_when_multiplied() -> None:
    """Slot r has ssm rows 3 r …; (2**32 / 3) times 3 wraps to row 1 in int32, and 2**31 / 3 to a negative row."""
    rng = np.random.default_rng(3)
    w, before, x = weights(rng), pools(rng), normal(rng, 12, WIDTH)
    wild = [(2**32 + 2) // 3 - 2**31, 2**31 // 3 + 1, 1431655766, 2]
    out = verify(w, before, x, (3, 3, 3, 3), wild, [1, 1, 1, 1])
    zero(np.asarray(out.o)[:9])
    assert np.asarray(out.o)[9:].any()
    same(np.delete(np.asarray(out.state.ssm), [6, 7, 8], axis=0), np.delete(np.asarray(before.ssm), [6, 7, 8], axis=0))


def dots(jaxpr: Any) -> list[Any]:
    """The precision of every product in a jaxpr, in the ones inside it too."""
    found = [equation.params["precision"] for equation in jaxpr.eqns if equation.primitive.name == "dot_general"]
    for equation in jaxpr.eqns:
        for leaf in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(leaf, "jaxpr", leaf)
            found += dots(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize("operator", ["recurrent_gated_delta_rule", "chunk_gated_delta_rule", "mtp_gated_delta_rule"])
def test_num_02_every_product_is_true_float32(operator: str) -> None:
    """HIGHEST is asked for in every product, so that no flag and no device's default makes one of them TF32 or bfloat16."""
    rows = np.zeros((1, 1), INT)
    more: dict[str, Any] = dict(
        recurrent_gated_delta_rule=dict(),
        chunk_gated_delta_rule=dict(query_start_loc=starts(1)),
        mtp_gated_delta_rule=dict(
            query_start_loc=starts(1), read_indices=rows, write_indices=rows, num_accepted_tokens=np.ones(1, INT)
        ),
    )[operator]
    inputs = dict(rule_inputs(np.random.default_rng(7), 1), ssm_state=np.zeros((1, 2, 4, 3), np.float32))
    with jax.default_matmul_precision("bfloat16"):
        jaxpr = jax.make_jaxpr(lambda inputs: getattr(gdn_jax, operator)(**inputs, **more))(inputs)
    found = dots(jaxpr.jaxpr)
    assert found and set(found) == {(jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)}, found


def test_lay_07_rows_of_the_grouped_projections() -> None:
    """Hugging Face's grouped rows, numbered: the order q | k | v | z | b | a that the golden case gives."""
    arrays, _ = golden.load("hf_layer")
    H, HV, K, V, W, _ = arrays["dims"].tolist()
    config = GDNConfig(num_v_heads=HV, num_k_heads=H, head_k_dim=K, head_v_dim=V, conv_kernel_dim=W)
    rows = np.arange(len(arrays["proj_order"]), dtype=np.float32)[:, None]
    border = len(arrays["in_proj_qkvz__weight"])
    packed = gdn_jax.pack_hf_projections(rows[:border], rows[border:], config)
    same(packed, arrays["proj_order"][:, None].astype(np.float32))


def test_lay_07_column_maps_in_integers() -> None:
    """H = 2, HV = 4, K = V = 2: the columns numbered, one order only: q | k | v | z | b | a."""
    config = GDNConfig(num_v_heads=4, num_k_heads=2, head_k_dim=2, head_v_dim=2, conv_kernel_dim=4)
    columns = np.arange(config.qkvz_dim + config.ba_dim, dtype=np.float32)[None]
    mixed_qkv, z, b, a = gdn_jax.split_qkvzba(columns, config)
    q, k, v = gdn_jax.split_qkv(mixed_qkv, config)
    parts = dict(
        q=(q, 0, (2, 2)), k=(k, 4, (2, 2)), v=(v, 8, (4, 2)), z=(z, 16, (4, 2)), b=(b, 24, (4,)), a=(a, 28, (4,))
    )
    for part, first, shape in parts.values():
        same(part, (first + np.arange(np.prod(shape), dtype=np.float32)).reshape(1, *shape))


def test_jax_05_pool_with_swapped_axes() -> None:
    """[slots, HV, V, K] in place of [slots, HV, K, V] is an error that names the argument, what came and what was wanted."""
    inputs = rule_inputs(np.random.default_rng(4), 3)
    message = r"`ssm_state` has shape \(5, 2, 3, 4\), expected \(num_slots, num_v_heads=2, head_k_dim=4, head_v_dim=3\)"
    with pytest.raises(ValueError, match="recurrent_gated_delta_rule: " + message):
        gdn_jax.recurrent_gated_delta_rule(**inputs, ssm_state=np.zeros((5, 2, 3, 4), np.float32))
    with pytest.raises(TypeError, match="`ssm_state` has dtype int32"):
        gdn_jax.recurrent_gated_delta_rule(**inputs, ssm_state=np.zeros((5, 2, 4, 3), np.int32))


def test_jax_09_smallest_sizes_run_by_default() -> None:
    """HV = 1, K = V = 16, one sequence: with no implementation named, whatever can run, with the right answer."""
    inputs = rule_inputs(np.random.default_rng(5), 1, H=1, HV=1, K=16, V=16)
    pool = normal(np.random.default_rng(6), 1, 1, 16, 16)
    o, state = gdn_jax.recurrent_gated_delta_rule(**inputs, ssm_state=pool)
    want_o, want = reference.recurrent_gated_delta_rule(**inputs, ssm_state=pool)
    close(o, want_o, 2e-6)
    close(state, want, 2e-6)


def test_srv_06_and_mtp_15_no_argument_is_swallowed() -> None:
    """No operator takes **kwargs: an unknown option (parents, checkpoints, a sentinel) is a TypeError."""
    for name in gdn_jax.__all__:
        function = getattr(gdn_jax, name)
        if inspect.isfunction(function) and name != "explain":
            kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
            assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name


# ---- found in review: what is not finite stays where it is ----------------------------------------------------------


def test_a_sequence_that_is_not_finite_leaves_padding_zero() -> None:
    rng = np.random.default_rng(5)
    inputs = rule_inputs(rng, 80)
    inputs["v"][0] = np.inf
    pool = normal(rng, 3, *inputs["v"].shape[1:2], inputs["k"].shape[2], inputs["v"].shape[2])
    slots, lengths = np.array([0, -1, 2], np.int32), np.array([0, 40, 60, 70], np.int32)
    o, _ = gdn_jax.chunk_gated_delta_rule(**inputs, ssm_state=pool, state_indices=slots, query_start_loc=lengths)
    assert not np.isfinite(np.asarray(o[:40])).all()
    assert not np.asarray(o[40:60]).any() and not np.asarray(o[70:]).any()
    assert np.isfinite(np.asarray(o[60:70])).all()


@pytest.mark.parametrize("operator", ["recurrent_gated_delta_rule", "chunk_gated_delta_rule"])
def test_a_foreign_slot_does_not_reach_the_gradient_of_scale(operator: str) -> None:
    rng = np.random.default_rng(6)
    inputs = rule_inputs(rng, 3)
    clean = normal(rng, 4, inputs["v"].shape[1], inputs["k"].shape[2], inputs["v"].shape[2])
    poisoned = clean.copy()
    poisoned[3] = np.nan
    chunked = operator == "chunk_gated_delta_rule"
    more = dict(query_start_loc=np.array([0, 2, 3], np.int32)) if chunked else {}
    slots = np.array([0, -1] if chunked else [0, -1, 1], np.int32)

    def total(scale: jax.Array, pool: np.ndarray) -> jax.Array:
        o, _ = getattr(gdn_jax, operator)(**inputs, ssm_state=pool, state_indices=slots, scale=scale, **more)
        return jnp.sum(o)

    got, want = (jax.grad(total)(jnp.float32(0.3), pool) for pool in (poisoned, clean))
    assert np.isfinite(float(got)) and float(got) == float(want)


def test_padding_is_zero_also_with_norm_eps_0() -> None:
    rng = np.random.default_rng(7)
    config = GDNConfig(2, 1, 8, 8, 4, ssm_dtype="float32", conv_dtype="float32")
    weights = GDNWeights(*(jnp.asarray(normal(rng, *shape)) for shape in ((32, 4), (32,), (2,), (2,))))
    state, mixed = gdn_jax.init_state(config, 2), jnp.asarray(normal(rng, 3, 52))

    def run(mixed: jax.Array) -> jax.Array:
        slots = np.array([1, -1, 0], np.int32)
        return gdn_jax.gdn_decode(
            weights, state, mixed, config=config, state_indices=slots, norm_weight=jnp.ones(8), norm_eps=0.0
        ).o

    assert not np.asarray(run(mixed)[1]).any()
    slope = jax.grad(lambda mixed: jnp.sum(run(mixed)))(mixed)
    assert np.isfinite(np.asarray(slope)).all() and not np.asarray(slope[1]).any()
