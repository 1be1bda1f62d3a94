"""recurrent_gated_delta_rule: golden cases, random batches, dtypes, gradients, the faults of the field.

Most tests share one static shape: 6 sequences, H = 1, HV = 2, K = 4, V = 3, 12 slots.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
    BF16,
    EPS,
    HUGE,
    INT,
    at,
    check_golden,
    close,
    close_rows,
    device,
    given,
    grads_match,
    normal,
    rule_inputs,
    same,
    settings,
    st,
    zero,
)

from gdn_jax import chunk_gated_delta_rule, recurrent_gated_delta_rule, reference

N, SLOTS, H, HV, K, V = 6, 12, 1, 2, 4, 3
TOKENS = ("q", "k", "v", "g", "beta")
TOL = 2e-6


def slot_array(*slots: int) -> np.ndarray:
    return np.array([*slots, *[-1] * (N - len(slots))], INT)


def make(rng: np.random.Generator, *slots: int, **more: Any) -> dict[str, Any]:
    """A whole call of the shared shape."""
    return {
        **rule_inputs(rng, N, H=H, HV=HV, K=K, V=V),
        "ssm_state": normal(rng, SLOTS, HV, K, V),
        "state_indices": slot_array(*slots),
        "has_initial_state": np.ones(N, bool),
        **more,
    }


def agree(call: dict[str, Any], touched: Any, tol: float = TOL, state_tol: float | None = None) -> tuple[Any, Any]:
    o, pool = recurrent_gated_delta_rule(**call)
    want_o, want_pool = reference.recurrent_gated_delta_rule(**call)
    close(o, want_o, tol)
    close_rows(pool, want_pool, call["ssm_state"], touched, tol if state_tol is None else state_tol)
    assert o.dtype == call["v"].dtype and pool.dtype == call["ssm_state"].dtype
    return np.asarray(o), np.asarray(pool)


# ---- golden cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tol", "state_tol"), [("recurrent", TOL, TOL), ("recurrent_bf16", 3e-3, 1e-5)])
def test_golden(name: str, tol: float, state_tol: float) -> None:
    check_golden(name, tol, state_tol)


# ---- random batches -------------------------------------------------------------------------------------------------

if st is not None:

    @st.composite
    def decode_batches(draw: Any) -> tuple[np.ndarray, np.ndarray, list[int], int]:
        rows = draw(st.permutations(range(SLOTS)))
        bad = st.sampled_from([-1, -7, SLOTS, 2**31 - 1])
        slots = [draw(bad) if draw(st.integers(0, 3)) == 0 else rows[n] for n in range(N)]
        has = draw(st.lists(st.booleans(), min_size=N, max_size=N))
        return np.array(slots, INT), np.array(has), list(draw(st.permutations(range(N)))), draw(st.integers(0, 2**16))

    @settings(max_examples=30)
    @given(decode_batches())
    def test_random_batches(batch: Any) -> None:
        slots, has, order, seed = batch
        rng = np.random.default_rng(seed)
        live = (slots >= 0) & (slots < SLOTS)
        inputs, pool = rule_inputs(rng, N, H=H, HV=HV, K=K, V=V), normal(rng, SLOTS, HV, K, V)
        for array in inputs.values():
            array[~live] = np.nan
        inputs["g"][live] = np.where(rng.uniform(size=(live.sum(), HV)) < 0.1, -np.inf, inputs["g"][live])
        pool[np.setdiff1d(np.arange(SLOTS), slots[live & has])] = np.nan
        call = dict(**inputs, state_indices=slots, has_initial_state=has)
        o, new = agree({**call, "ssm_state": pool}, slots[live].tolist())
        zero(o[~live])
        moved, moved_pool = recurrent_gated_delta_rule(**at(call, order), ssm_state=pool)
        same(moved, o[order])
        same(moved_pool, new)


# ---- dtypes and index arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [(BF16, BF16), (np.float16, np.float16), (BF16, np.float16), (np.float32, BF16)]
)
def test_dtypes(dtype: Any, pool_dtype: Any) -> None:
    call = make(np.random.default_rng(1), 3, 0, 7, 11)
    call |= {name: call[name].astype(dtype) for name in "qkv"}
    call["ssm_state"] = call["ssm_state"].astype(pool_dtype)
    store = {BF16: 3e-3, np.float16: 4e-4}[pool_dtype]
    agree(call, [3, 0, 7, 11], TOL if dtype == np.float32 else 3e-3 * EPS[dtype], store)


def test_slot_10_index_arrays_of_any_integer_dtype() -> None:
    call = make(np.random.default_rng(2), 4, 1, 0)
    slots = call["state_indices"].copy()
    slots[3:] = 99
    want = recurrent_gated_delta_rule(**call)
    wide = np.zeros(2 * N, INT)
    wide[::2] = slots
    for other in (slots.astype(np.int64), slots.astype(np.uint8), wide[::2], slots.astype(np.uint32)):
        for got in (other, jnp.asarray(other)):
            for x, y in zip(recurrent_gated_delta_rule(**{**call, "state_indices": got}), want):
                same(x, y)
    for other in (slots.astype(np.float32), slots > 0):
        with pytest.raises(TypeError, match="state_indices"):
            recurrent_gated_delta_rule(**{**call, "state_indices": other})
    for other in (slots[:, None], np.append(slots, 0)):
        with pytest.raises(ValueError, match="state_indices"):
            recurrent_gated_delta_rule(**{**call, "state_indices": other})
    huge = call["state_indices"].astype(np.int64)
    huge[1] = HUGE
    o, pool = agree({**call, "state_indices": huge}, [4, 0])
    zero(o[1])
    same(pool[1], call["ssm_state"][1])


def test_layers() -> None:
    rng = np.random.default_rng(3)
    call, stack = make(rng, 2, 5, 0), normal(rng, 3, SLOTS, HV, K, V)
    for layer in (0, np.int64(1), jnp.int32(2)):
        o, pool = recurrent_gated_delta_rule(**{**call, "ssm_state": stack}, layer=layer)
        want_o, want = recurrent_gated_delta_rule(**{**call, "ssm_state": stack[int(layer)]})
        same(o, want_o)
        same(np.asarray(pool)[int(layer)], want)
        others = [n for n in range(3) if n != int(layer)]
        same(np.asarray(pool)[others], stack[others])
    for layer in (3, -1):
        with pytest.raises(ValueError, match="layer"):
            recurrent_gated_delta_rule(**{**call, "ssm_state": stack}, layer=layer)
        o, pool = recurrent_gated_delta_rule(**{**call, "ssm_state": stack}, layer=jnp.int32(layer))
        zero(o)
        same(pool, stack)


def test_srv_08_nothing_to_do() -> None:
    rng = np.random.default_rng(4)
    pool = normal(rng, SLOTS, HV, K, V)
    o, new = recurrent_gated_delta_rule(**rule_inputs(rng, 0), ssm_state=pool, state_indices=np.zeros(0, INT))
    assert o.shape == (0, HV, V)
    same(new, pool)
    zero(agree(make(rng), [])[0])
    o, new = recurrent_gated_delta_rule(**rule_inputs(rng, 2), ssm_state=pool[:0], state_indices=np.zeros(2, INT))
    zero(o)
    assert new.shape == (0, HV, K, V)


def test_real_dims() -> None:
    rng = np.random.default_rng(5)
    call: dict[str, Any] = rule_inputs(rng, 3, H=16, HV=32, K=128, V=128, dtype=BF16)
    call |= dict(ssm_state=normal(rng, 3, 32, 128, 128), state_indices=np.array([2, -1, 0]))
    agree(call, [2, 0], 3e-3, 1e-5)


# ---- gradients, donation --------------------------------------------------------------------------------------------


def test_gradients() -> None:
    """Against finite differences of the reference; padding (NaN in it) gets exact zeros."""
    rng = np.random.default_rng(6)
    call = make(rng, 4, 99, 6, 1, has_initial_state=np.array([1, 1, 0, 1, 1, 1], bool))
    arrays = {name: call.pop(name) for name in (*TOKENS, "ssm_state")}
    padding, unread = np.array([1, 4, 5]), np.array([n for n in range(SLOTS) if n not in (4, 1)])
    for name in arrays:
        arrays[name][unread if name == "ssm_state" else padding] = np.nan
    wo, wp = rng.standard_normal((N, HV, V)), np.zeros((SLOTS, HV, K, V))
    wp[[4, 6, 1]] = rng.standard_normal((3, HV, K, V))

    def weighted(xp: Any, function: Any) -> Any:
        def f(**arrays: Any) -> Any:
            o, pool = function(**arrays, **call)
            return xp.sum(o * xp.asarray(wo, o.dtype)) + xp.sum(xp.where(wp != 0, pool, 0) * xp.asarray(wp, o.dtype))

        return f

    grads = jax.grad(lambda arrays: weighted(jnp, recurrent_gated_delta_rule)(**arrays))(arrays)
    for name in arrays:
        zero(np.asarray(grads[name])[unread if name == "ssm_state" else padding])
        arrays[name][unread if name == "ssm_state" else padding] = 0
    grads_match(weighted(np, reference.recurrent_gated_delta_rule), arrays, grads, rng)


def test_donated_pool_stays_in_place() -> None:
    call = make(np.random.default_rng(7), 2, 5, 0)
    pool = device(call.pop("ssm_state"))
    step = jax.jit(lambda pool, q: recurrent_gated_delta_rule(**{**call, "q": q}, ssm_state=pool), donate_argnums=0)
    want = step(pool + 0, call["q"])
    where = pool.unsafe_buffer_pointer()
    o, new = step(pool, call["q"])
    assert new.unsafe_buffer_pointer() == where and pool.is_deleted()
    same(o, want[0])
    same(new, want[1])


# ---- faults met in the field ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_dec_01_formula(norm: bool, scale: float | None) -> None:
    """Written out, for K != V."""
    rng = np.random.default_rng(11)
    call: dict[str, Any] = rule_inputs(rng, 1, H=1, HV=1, K=8, V=12)
    S = normal(rng, 1, 1, 8, 12)
    o, state = recurrent_gated_delta_rule(**call, ssm_state=S, scale=scale, use_qk_l2norm=norm)
    q, k, v, g, beta = (call[name][0, 0].astype(np.float64) for name in TOKENS)
    if norm:
        q, k = (x / np.sqrt(x @ x + 1e-6) for x in (q, k))
    decayed = np.exp(g) * S[0, 0].astype(np.float64)
    want = decayed + np.outer(k, beta * (v - decayed.T @ k))
    close(state[0, 0], want, TOL)
    close(o[0, 0], (8**-0.5 if scale is None else scale) * want.T @ q, TOL)


@pytest.mark.parametrize("pool_dtype", [np.float32, BF16])
def test_dec_04_two_thousand_steps(pool_dtype: Any) -> None:
    """The arithmetic is float32 and only the store rounds: no worse than a float64 loop with that rounding, x 1.5."""
    steps, rng = 2048, np.random.default_rng(9)
    inputs = rule_inputs(rng, steps, 1, H=2, HV=2, K=32, V=32)
    inputs["g"] = rng.uniform(-0.01, 0, (steps, 1, 2)).astype(np.float32)

    def step(pool: Any, x: Any) -> Any:
        return recurrent_gated_delta_rule(**x, ssm_state=pool)[1], None

    pool = jnp.zeros((1, 2, 32, 32), pool_dtype)
    final = jax.jit(lambda pool, inputs: jax.lax.scan(step, pool, inputs)[0])(pool, inputs)
    packed = {name: x[:, 0] for name, x in inputs.items()}
    _, want = reference.chunk_gated_delta_rule(**packed, query_start_loc=np.array([0, steps]))
    if pool_dtype == np.float32:
        return close(final, want, 1e-4)
    rounded = np.zeros((2, 32, 32))
    x = {name: array.astype(np.float64) for name, array in packed.items()}
    k = x["k"] / np.sqrt(np.sum(x["k"] ** 2, axis=-1, keepdims=True) + 1e-6)
    for t in range(steps):
        rounded *= np.exp(x["g"][t])[:, None, None]
        u = x["beta"][t][:, None] * (x["v"][t] - np.einsum("hkv,hk->hv", rounded, k[t]))
        rounded = (rounded + k[t][:, :, None] * u[:, None]).astype(BF16).astype(np.float64)
    allowed = 1.5 * np.linalg.norm(rounded - want[0]) / np.linalg.norm(want[0])
    close(final, want, float(allowed))


def test_dec_06_value_heads_share_key_heads_in_order() -> None:
    e = np.eye(4, dtype=np.float32)[None, :2]
    v = np.broadcast_to(1 + np.arange(6, dtype=np.float32)[:, None], (1, 6, 4))
    gate, pool = np.zeros((1, 6), np.float32), np.zeros((1, 6, 4, 4), np.float32)
    _, state = recurrent_gated_delta_rule(e, e, v, gate, gate + 1, ssm_state=pool, scale=1.0, use_qk_l2norm=False)
    want = np.zeros((6, 4, 4), np.float32)
    for h in range(6):
        want[h, h // 3] = h + 1
    same(np.asarray(state)[0], want)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (80, 16), (96, 80), (256, 128)])
def test_pre_14_head_sizes(K: int, V: int) -> None:
    rng = np.random.default_rng(12)
    call: dict[str, Any] = rule_inputs(rng, 3, K=K, V=V)
    agree({**call, "ssm_state": normal(rng, 4, HV, K, V), "state_indices": np.array([3, 0, 1])}, [3, 0, 1])


def test_num_04_float16_pool_overflows_in_its_own_row_only() -> None:
    call = make(np.random.default_rng(13), 2, 5, 0)
    call["ssm_state"] = call["ssm_state"].astype(np.float16)
    call["ssm_state"][5] = 0
    call["k"][:] = np.eye(4)[0]
    call["g"][:], call["beta"][:] = 0, 1
    call["v"][1] = 400
    _o, pool = agree(call, [2, 5, 0], TOL, 4e-4)
    call["v"][1] = 7e4  # not a float16: stored as inf
    _, hot = recurrent_gated_delta_rule(**call)
    hot = np.asarray(hot)
    assert np.isposinf(hot[5, :, 0]).all() and not hot[5, :, 1:].any()
    same(np.delete(hot, 5, axis=0), np.delete(pool, 5, axis=0))


def test_num_06_a_row_alone_and_among_others() -> None:
    """At one static shape bit for bit (the property test); across N within rounding."""
    call = make(np.random.default_rng(15), 2, 5, 0, 7, 1, 9)
    o, pool = recurrent_gated_delta_rule(**call)
    for n in (0, 3, 5):
        alone = {**at({name: call[name] for name in (*TOKENS, "state_indices")}, [n]), "ssm_state": call["ssm_state"]}
        got, got_pool = recurrent_gated_delta_rule(**alone)
        close(got[0], np.asarray(o)[n], TOL)
        slot = call["state_indices"][n]
        close(got_pool[slot], np.asarray(pool)[slot], TOL)


def test_mtp_07_and_slot_01_padding_does_not_wrap() -> None:
    call = make(np.random.default_rng(16))
    call["state_indices"] = np.array([-1, 0, -1, -1, -1, -1], INT)
    for name in TOKENS:
        call[name][[0, 2, 3, 4, 5]] = 1e4
    o, _ = agree(call, [0])
    zero(o[[0, 2, 3, 4, 5]])


def test_slot_02_slot_zero_is_ordinary() -> None:
    call = make(np.random.default_rng(17), 0, 2, -1)
    _, pool = agree(call, [0, 2])
    assert (pool[0] != call["ssm_state"][0]).any()


def test_slot_04_repeated_runs_and_padding_behind_them() -> None:
    """The field's padding rows carry stale ids; here a caller writes -1 there. The same bits in every run."""
    call = make(np.random.default_rng(18), 3, 1)
    first = agree(call, [3, 1])
    for _ in range(20):
        for x, y in zip(recurrent_gated_delta_rule(**call), first):
            same(x, y)


def test_slot_04_duplicates_leave_every_other_slot_right() -> None:
    call = make(np.random.default_rng(19), 3, 1, 3, 7)
    o, pool = recurrent_gated_delta_rule(**call)
    want_o, want = reference.recurrent_gated_delta_rule(**call)
    close(np.asarray(o)[[1, 3]], want_o[[1, 3]], TOL)
    close(np.asarray(pool)[[1, 7]], want[[1, 7]], TOL)
    others = [n for n in range(SLOTS) if n not in (1, 3, 7)]
    same(np.asarray(pool)[others], call["ssm_state"][others])


def test_slot_06_fresh_rows_in_decode() -> None:
    call = make(np.random.default_rng(20), 4, 2, has_initial_state=np.array([1, 0, 1, 1, 1, 1], bool))
    call["ssm_state"][2] = np.nan
    o, pool = agree(call, [4, 2])
    want_o, want = chunk_gated_delta_rule(**{name: call[name][None, 1:2] for name in TOKENS}, chunk_size=16)
    close(o[1], np.asarray(want_o)[0, 0], TOL)
    close(pool[2], np.asarray(want)[0], TOL)


def test_srv_03_one_wild_slot_of_four() -> None:
    agree(make(np.random.default_rng(21), 0, 75, 7, 2), [0, 7, 2])


def test_lay_03_slices_of_one_packed_array() -> None:
    """q, k, v as strided views of the projections: the bits of contiguous copies."""
    rng = np.random.default_rng(22)
    call, mixed = make(rng, 2, 5, 0), normal(rng, N, 2 * H * K + HV * V)
    views = [mixed[:, :K].reshape(N, H, K), mixed[:, K : 2 * K].reshape(N, H, K), mixed[:, 2 * K :].reshape(N, HV, V)]
    split = mixed[:, 2 * K :]
    strided_v = np.lib.stride_tricks.as_strided(split, (N, HV, V), (mixed.strides[0], V * 4, 4))
    assert not strided_v.flags.c_contiguous
    want = recurrent_gated_delta_rule(**{**call, **dict(zip("qkv", (np.ascontiguousarray(x) for x in views)))})
    for x, y in zip(recurrent_gated_delta_rule(**{**call, "q": views[0], "k": views[1], "v": strided_v}), want):
        same(x, y)


def test_jax_03_padding_is_zero_not_somebody_elses_data() -> None:
    call = make(np.random.default_rng(23), -1, 5)
    for _ in range(3):
        jnp.full((N, HV, V), jnp.nan).block_until_ready()
        zero(np.delete(np.asarray(recurrent_gated_delta_rule(**call)[0]), 1, axis=0))


def test_jax_11_defaults_are_what_they_stand_for() -> None:
    call = make(np.random.default_rng(24), 0, 1, 2, 3, 4, 5)
    want = recurrent_gated_delta_rule(**call)
    bare = {name: x for name, x in call.items() if name not in ("state_indices", "has_initial_state")}
    for x, y in zip(recurrent_gated_delta_rule(**bare, scale=K**-0.5), want):
        same(x, y)
    with pytest.raises(ValueError, match="num_slots=3"):
        recurrent_gated_delta_rule(**{**bare, "ssm_state": call["ssm_state"][:3]})
    zeros = {**call, "ssm_state": np.zeros_like(call["ssm_state"])}
    fresh = {**call, "has_initial_state": np.zeros(N, bool)}
    for x, y in zip(recurrent_gated_delta_rule(**zeros), recurrent_gated_delta_rule(**fresh)):
        same(np.asarray(x)[:N], np.asarray(y)[:N])
