"""mtp_gated_delta_rule: golden cases, random verify steps, dtypes, gradients, the faults of the field.

Most tests share one static shape: 12 tokens, 5 sequences, S = 2, H = 1, HV = 2, K = 4, V = 3, 20 rows.
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
    starts,
    zero,
)

from gdn_jax import mtp_gated_delta_rule, recurrent_gated_delta_rule, reference

T, N, S, ROWS, H, HV, K, V = 12, 5, 2, 20, 1, 2, 4, 3
TOKENS = ("q", "k", "v", "g", "beta")
TOL = 2e-6


def table(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array([*rows, *[(-1,) * (S + 1)] * (N - len(rows))], INT)


def packed(*lengths: int) -> np.ndarray:
    return starts(*lengths, *[0] * (N - len(lengths)))


def counts(*accepted: int) -> np.ndarray:
    return np.array([*accepted, *[1] * (N - len(accepted))], INT)


def make(
    rng: np.random.Generator, lengths: tuple[int, ...], rows: Any, accepted: tuple[int, ...], **more: Any
) -> dict[str, Any]:
    """A whole call of the shared shape."""
    return {
        **rule_inputs(rng, T, H=H, HV=HV, K=K, V=V),
        "ssm_state": normal(rng, ROWS, HV, K, V),
        "read_indices": table(*rows),
        "write_indices": table(*rows),
        "num_accepted_tokens": counts(*accepted),
        "query_start_loc": packed(*lengths),
        **more,
    }


def written(call: dict[str, Any]) -> list[int]:
    """The rows that the valid sequences of a call write."""
    rows, bounds, found = len(call["ssm_state"]), call["query_start_loc"].tolist(), []
    width = call["read_indices"].shape[1]
    for n, accepted in enumerate(call["num_accepted_tokens"].tolist()):
        length = bounds[n + 1] - bounds[n]
        if length <= width and 1 <= accepted <= width and 0 <= call["read_indices"][n, accepted - 1] < rows:
            found += [int(row) for row in call["write_indices"][n, :length] if 0 <= row < rows]
    return found


def agree(call: dict[str, Any], tol: float = TOL, state_tol: float | None = None) -> tuple[Any, Any]:
    o, pool = mtp_gated_delta_rule(**call)
    want_o, want_pool = reference.mtp_gated_delta_rule(**call)
    close(o, want_o, tol)
    close_rows(pool, want_pool, call["ssm_state"], written(call), tol if state_tol is None else state_tol)
    assert o.dtype == call["v"].dtype and pool.dtype == call["ssm_state"].dtype
    return np.asarray(o), np.asarray(pool)


# ---- golden cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mtp_rule", "mtp_rule_skips"])
def test_golden(name: str) -> None:
    check_golden(name, TOL, TOL)


# ---- random batches -------------------------------------------------------------------------------------------------

if st is not None:

    @st.composite
    def verify_batches(draw: Any) -> Any:
        """Lengths, both tables, counts, an order, a seed: each sequence writes rows of its own and reads those or rest rows."""
        bad = st.sampled_from([-1, -7, ROWS, 2**31 - 1])
        rows, rest = range((S + 1) * N), range((S + 1) * N, ROWS)
        shuffled = draw(st.permutations(rows))
        lengths, reads, writes, accepted, room = [], [], [], [], T
        for n in range(N):
            length = min(draw(st.integers(0, S + 2)), room)
            room -= length
            own = shuffled[n * (S + 1) : (n + 1) * (S + 1)]
            lengths.append(length)
            writes.append([draw(bad) if draw(st.integers(0, 4)) == 0 else row for row in own])
            other = draw(st.booleans())
            choices = st.sampled_from(rest) if other else st.sampled_from(own)
            reads.append([draw(bad) if draw(st.integers(0, 6)) == 0 else draw(choices) for _ in own])
            wrong = draw(st.integers(0, 6)) == 0
            accepted.append(
                draw(st.sampled_from([0, -1, S + 2, 2**31 - 1, -(2**31)]) if wrong else st.integers(1, S + 1))
            )
        order = draw(st.permutations(range(N)))
        return (
            lengths,
            np.array(reads, INT),
            np.array(writes, INT),
            np.array(accepted, INT),
            order,
            draw(st.integers(0, 2**16)),
        )

    @settings(max_examples=30)
    @given(verify_batches())
    def test_random_batches(batch: Any) -> None:
        lengths, reads, writes, accepted, order, seed = batch
        rng, bounds = np.random.default_rng(seed), starts(*lengths)
        inputs, pool = rule_inputs(rng, T, H=H, HV=HV, K=K, V=V), normal(rng, ROWS, HV, K, V)
        call = dict(read_indices=reads, write_indices=writes, num_accepted_tokens=accepted)
        sources = [int(reads[n, accepted[n] - 1]) if 1 <= accepted[n] <= S + 1 else -1 for n in range(N)]
        live = [lengths[n] <= S + 1 and 0 <= sources[n] < ROWS for n in range(N)]
        tokens = np.concatenate(
            [np.arange(bounds[n], bounds[n + 1]) for n in range(N) if live[n]] or [np.zeros(0, int)]
        )
        padding = np.setdiff1d(np.arange(T), tokens)
        for array in inputs.values():
            array[padding] = np.nan
        pool[np.setdiff1d(np.arange(ROWS), [sources[n] for n in range(N) if live[n] and lengths[n]])] = np.nan
        first = {**inputs, **call, "ssm_state": pool, "query_start_loc": bounds}
        o, new = agree(first)
        zero(o[padding])
        place = np.concatenate([*(np.arange(bounds[n], bounds[n + 1]) for n in order), np.arange(bounds[-1], T)])
        second = {
            **first,
            **at(inputs, place),
            **at(call, list(order)),
            "query_start_loc": starts(*(lengths[n] for n in order)),
        }
        moved, moved_pool = mtp_gated_delta_rule(**second)
        same(moved, o[place])
        same(moved_pool, new)


# ---- dtypes and index arrays ----------------------------------------------------------------------------------------

ROWS_OF_THREE = [(2, 3, 1), (7, 0, 9), (19, 5, 6)]


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [(BF16, np.float32), (BF16, BF16), (np.float16, np.float16), (np.float32, BF16)]
)
def test_mtp_05_dtypes(dtype: Any, pool_dtype: Any) -> None:
    call = make(np.random.default_rng(1), (3, 2, 3), ROWS_OF_THREE, (1, 2, 3))
    call |= {name: call[name].astype(dtype) for name in "qkv"}
    call["ssm_state"] = call["ssm_state"].astype(pool_dtype)
    store = {np.float32: 1e-5, BF16: 3e-3, np.float16: 4e-4}[pool_dtype]
    agree(call, TOL if dtype == np.float32 else 3e-3 * EPS[dtype], store)  # float32 between tokens, whatever the pool


def test_slot_10_index_arrays_of_any_integer_dtype() -> None:
    call = make(np.random.default_rng(2), (3, 2, 3), ROWS_OF_THREE, (1, 2, 3))
    names = ("read_indices", "write_indices", "num_accepted_tokens", "query_start_loc")
    for name in names[:2]:
        call[name][3:] = 99
    want = mtp_gated_delta_rule(**call)
    for dtype in (np.int64, np.uint8, np.int16):
        for x, y in zip(mtp_gated_delta_rule(**{**call, **{name: call[name].astype(dtype) for name in names}}), want):
            same(x, y)
    strided = {name: np.repeat(call[name], 2, axis=-1)[..., ::2] for name in names}
    for x, y in zip(mtp_gated_delta_rule(**{**call, **strided}), want):
        same(x, y)
    for name in names:
        for other in (call[name].astype(np.float32), call[name] > 0):
            with pytest.raises(TypeError, match=name):
                mtp_gated_delta_rule(**{**call, name: other})
        with pytest.raises(ValueError, match=name):
            mtp_gated_delta_rule(**{**call, name: call[name][..., None]})
        if name != "query_start_loc":
            with pytest.raises(ValueError, match=name if name != "query_start_loc" else "read_indices"):
                mtp_gated_delta_rule(**{**call, name: call[name][:-1]})


def test_wide_indices_are_judged_before_they_are_narrowed() -> None:
    call = make(np.random.default_rng(3), (3, 2, 3), ROWS_OF_THREE, (1, 2, 3))
    for name in ("read_indices", "write_indices", "num_accepted_tokens"):
        call[name] = call[name].astype(np.int64)
    call["read_indices"][0, 0] = call["write_indices"][1, 0] = HUGE  # row 1 when narrowed
    call["num_accepted_tokens"][2] = HUGE
    o, pool = agree(call)
    zero(o[np.r_[:3, 5:8]])
    assert o[3:5].any()
    same(pool[1], call["ssm_state"][1])


def test_layers() -> None:
    rng = np.random.default_rng(4)
    call, stack = make(rng, (3, 2, 3), ROWS_OF_THREE, (1, 2, 3)), normal(rng, 3, ROWS, HV, K, V)
    for layer in (0, jnp.int32(2)):
        o, pool = mtp_gated_delta_rule(**{**call, "ssm_state": stack}, layer=layer)
        want_o, want = mtp_gated_delta_rule(**{**call, "ssm_state": stack[int(layer)]})
        same(o, want_o)
        same(np.asarray(pool)[int(layer)], want)
        others = [n for n in range(3) if n != int(layer)]
        same(np.asarray(pool)[others], stack[others])
    for layer in (3, -1):
        with pytest.raises(ValueError, match="layer"):
            mtp_gated_delta_rule(**{**call, "ssm_state": stack}, layer=layer)
        o, pool = mtp_gated_delta_rule(**{**call, "ssm_state": stack}, layer=jnp.int32(layer))
        zero(o)
        same(pool, stack)


def test_srv_08_nothing_to_do() -> None:
    rng = np.random.default_rng(5)
    pool = normal(rng, ROWS, HV, K, V)
    for tokens, n in ((0, 0), (0, 2), (4, 0)):
        rows = np.zeros((n, S + 1), INT)
        o, new = mtp_gated_delta_rule(
            **rule_inputs(rng, tokens), ssm_state=pool, read_indices=rows, write_indices=rows,
            num_accepted_tokens=np.ones(n, INT), query_start_loc=starts(*[0] * n),
        )  # fmt: skip
        assert o.shape == (tokens, HV, V)
        zero(o)
        same(new, pool)
    o, _ = agree(make(rng, (3, 3, 3, 3), [], ()))
    zero(o)


def test_real_dims() -> None:
    rng = np.random.default_rng(6)
    call: dict[str, Any] = rule_inputs(rng, 3, H=16, HV=32, K=128, V=128, dtype=BF16)
    rows = np.array([[2, 1], [0, 3]], INT)
    call |= dict(
        read_indices=rows, write_indices=rows, num_accepted_tokens=np.array([2, 1]), query_start_loc=starts(2, 1)
    )
    agree({**call, "ssm_state": normal(rng, 4, 32, 128, 128)}, 3e-3, 1e-5)


# ---- gradients, donation --------------------------------------------------------------------------------------------


def test_gradients() -> None:
    """Against finite differences of the reference; padding (NaN in it) gets exact zeros."""
    rng = np.random.default_rng(7)
    call = make(rng, (3, 2, 3), [(2, 3, 1), (7, 99, 9), (19, 5, 6)], (1, 2, 3))  # the second one is padding
    arrays = {name: call.pop(name) for name in (*TOKENS, "ssm_state")}
    padding, unread = np.r_[3:5, 8:T], np.array([n for n in range(ROWS) if n not in (2, 6)])
    for name in arrays:
        arrays[name][unread if name == "ssm_state" else padding] = np.nan
    wo, wp = rng.standard_normal((T, HV, V)), np.zeros((ROWS, HV, K, V))
    wp[[2, 3, 1, 19, 5, 6]] = rng.standard_normal((6, HV, K, V))

    def weighted(xp: Any, function: Any) -> Any:
        def f(**arrays: Any) -> Any:
            o, pool = function(**arrays, **call)
            return xp.sum(o * xp.asarray(wo, o.dtype)) + xp.sum(xp.where(wp != 0, pool, 0) * xp.asarray(wp, o.dtype))

        return f

    grads = jax.grad(lambda arrays: weighted(jnp, mtp_gated_delta_rule)(**arrays))(arrays)
    for name in arrays:
        zero(np.asarray(grads[name])[unread if name == "ssm_state" else padding])
        arrays[name][unread if name == "ssm_state" else padding] = 0
    grads_match(weighted(np, reference.mtp_gated_delta_rule), arrays, grads, rng)


def test_donated_pool_stays_in_place() -> None:
    call = make(np.random.default_rng(8), (3, 2, 3), ROWS_OF_THREE, (1, 2, 3))
    pool = device(call.pop("ssm_state"))
    step = jax.jit(lambda pool, q: mtp_gated_delta_rule(**{**call, "q": q}, ssm_state=pool), donate_argnums=0)
    want = step(pool + 0, call["q"])
    where = pool.unsafe_buffer_pointer()
    o, new = step(pool, call["q"])
    assert new.unsafe_buffer_pointer() == where and pool.is_deleted()
    same(o, want[0])
    same(new, want[1])


# ---- faults met in the field ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_mtp_01_short_step_after_some_accepted(accepted: int) -> None:
    """A step of three, then one of a single token that starts from the row of the last accepted one."""
    rng = np.random.default_rng(9)
    call = make(rng, (3,), [(3, 5, 7)], (1,))
    _, pool = agree(call)
    second = {**call, "ssm_state": pool, "query_start_loc": packed(1), "num_accepted_tokens": counts(accepted)}
    second |= {name: np.roll(call[name], -3, axis=0) for name in TOKENS}
    o, pool = agree(second)
    stream = {name: np.concatenate([call[name][:accepted], call[name][3:4]]) for name in TOKENS}
    want_o, want = reference.chunk_gated_delta_rule(
        **stream, ssm_state=call["ssm_state"], state_indices=[3], query_start_loc=[0, accepted + 1]
    )
    close(o[0], want_o[-1], TOL)
    close(pool[3], want[3], TOL)


def test_mtp_03_ragged_rows_equal_themselves_alone() -> None:
    rows = [(4, 3, 2), (7, 1, 0), (9, 8, -1), (19, 5, 6)]
    call = make(np.random.default_rng(10), (1, 3, 1, 2), rows, (1, 2, 1, 3))
    o, pool = agree(call)
    for n in range(4):
        first, last = call["query_start_loc"][n : n + 2]
        alone = {
            **call,
            "query_start_loc": packed(last - first),
            "num_accepted_tokens": np.roll(call["num_accepted_tokens"], -n),
        }
        alone |= {name: np.roll(call[name], -n, axis=0) for name in ("read_indices", "write_indices")}
        alone |= {name: np.roll(call[name], -first, axis=0) for name in TOKENS}
        got, got_pool = mtp_gated_delta_rule(**alone)
        same(np.asarray(got)[: last - first], o[first:last])
        mine = [row for row in rows[n][: last - first] if row >= 0]
        same(np.asarray(got_pool)[mine], pool[mine])


@pytest.mark.parametrize("pool_dtype", [np.float32, BF16])
def test_mtp_04_and_16_verify_equals_decode_steps(pool_dtype: Any) -> None:
    """A float32 pool: single decode steps, within rounding. A bfloat16 one: the state stays float32 between the tokens of a step,
    and each row holds its rounding (so a decode loop, which rounds after every token, is a little further off)."""
    rng = np.random.default_rng(21)
    call = make(rng, (3, 3, 3), ROWS_OF_THREE, (1, 1, 1))
    call["ssm_state"] = call["ssm_state"].astype(pool_dtype)
    o, pool = agree(call, TOL, TOL if pool_dtype == np.float32 else 3e-3)
    single = call["ssm_state"][[2, 7, 19]].astype(np.float32)
    for t in range(3):
        want, single = recurrent_gated_delta_rule(**{name: call[name][t:9:3] for name in TOKENS}, ssm_state=single)
        close(o[t:9:3], np.asarray(want), TOL)
        close(
            pool[[rows[t] for rows in ROWS_OF_THREE]],
            np.asarray(single.astype(pool_dtype)),
            TOL if pool_dtype == np.float32 else 1e-3,
        )


@pytest.mark.parametrize("length", [1, 5, 17])
def test_mtp_16_lengths(length: int) -> None:
    rng = np.random.default_rng(11)
    call: dict[str, Any] = rule_inputs(rng, 2 * length, K=16, V=16)
    rows = np.arange(2 * length, dtype=INT).reshape(2, length)
    call |= dict(read_indices=rows, write_indices=rows, num_accepted_tokens=np.array([1, length], INT))
    call |= dict(query_start_loc=starts(length, length), ssm_state=normal(rng, 2 * length, HV, 16, 16))
    agree(call)


def test_mtp_16_too_many_tokens_are_padding() -> None:
    call = make(np.random.default_rng(12), (4, 3), ROWS_OF_THREE, (1, 2))
    o, _ = agree(call)
    zero(o[:4])
    assert o[4:7].any()


def test_mtp_07_padding_does_not_wrap() -> None:
    call = make(np.random.default_rng(13), (3, 3), [(2, 3, 1), (-1, -1, -1)], (1, 1))
    for name in TOKENS:
        call[name][3:] = 1e4
    o, pool = agree(call)
    zero(o[3:])
    same(pool[[0, ROWS - 1]], call["ssm_state"][[0, ROWS - 1]])
    agree(make(np.random.default_rng(14), (3, 2), [(0, 3, 1), (4, 5, 6)], (1, 1)))  # row 0 is an ordinary row


def test_mtp_08_rejected_tokens_leave_no_trace() -> None:
    """Acceptance 3, 1, 2, 3, 1 with drafts of 1e3 behind the accepted ones."""
    rng = np.random.default_rng(15)
    stream = rule_inputs(rng, T, H=H, HV=HV, K=K, V=V)
    call = make(rng, (3,), [(3, 5, 7)], (1,))
    want_o, _ = reference.chunk_gated_delta_rule(
        **stream, ssm_state=call["ssm_state"], state_indices=[3], query_start_loc=[0, T]
    )
    pool, done, accepted = call["ssm_state"], 0, 1
    for correct in (3, 1, 2, 3, 1):
        step = {**call, "ssm_state": pool, "num_accepted_tokens": counts(accepted)}
        for name in TOKENS:
            step[name] = np.full_like(call[name], -1e3 if name == "g" else 1e3)
            step[name][:correct] = stream[name][done : done + correct]
        o, pool = mtp_gated_delta_rule(**step)
        close(np.asarray(o)[:correct], want_o[done : done + correct], TOL)
        done, accepted = done + correct, correct
    _, want = reference.chunk_gated_delta_rule(
        **at(stream, slice(done)), ssm_state=call["ssm_state"], state_indices=[3], query_start_loc=[0, done]
    )
    close(np.asarray(pool)[(3, 5, 7)[accepted - 1]], want[3], TOL)


def test_mtp_12_counts_are_data_not_constants() -> None:
    traced = []
    call = make(np.random.default_rng(16), (3, 2), ROWS_OF_THREE, ())

    @jax.jit
    def step(pool: Any, accepted: Any) -> Any:
        traced.append(1)
        return mtp_gated_delta_rule(**{**call, "ssm_state": pool, "num_accepted_tokens": accepted})

    pool = call["ssm_state"]
    for count in (1, 3, 2, 1):
        accepted = np.full(N, count, INT)
        want_o, want = reference.mtp_gated_delta_rule(**{**call, "ssm_state": pool, "num_accepted_tokens": accepted})
        o, pool = step(pool, accepted)
        close(o, want_o, TOL)
        close(pool, want, TOL)
    assert len(traced) == 1


def test_mtp_13_separate_tables_and_conflicts() -> None:
    """Snapshots may go elsewhere than they come from; tables that do not fit each other are an error."""
    call = make(np.random.default_rng(17), (3, 1, 2), ROWS_OF_THREE, (3, 1, 2))
    agree({**call, "write_indices": table((10, 11, 12), (13, -1, -1), (14, 15, -1))})
    with pytest.raises(ValueError, match="write_indices"):
        mtp_gated_delta_rule(**{**call, "write_indices": call["write_indices"][:, :2]})
    with pytest.raises(ValueError, match="read_indices"):
        mtp_gated_delta_rule(
            **{**call, "read_indices": call["read_indices"][:, :0], "write_indices": call["write_indices"][:, :0]}
        )


def test_mtp_15_no_draft_trees() -> None:
    """Not supported, and no argument of the name is swallowed."""
    call = make(np.random.default_rng(18), (3,), [(3, 5, 7)], (1,))
    with pytest.raises(TypeError, match="parents"):
        mtp_gated_delta_rule(**call, parents=np.array([-1, 0, 0]))


def test_gate_05_verify_of_one_token_is_decode_bit_for_bit() -> None:
    rng = np.random.default_rng(5)
    call = make(rng, (1, 1, 1, 1), [(3, 5, 7), (2, 6, 8), (0, 1, 4), (9, 10, 11)], (1, 1, 1, 1))
    call |= {name: call[name].astype(BF16) for name in "qkv"}
    o, pool = mtp_gated_delta_rule(**call)
    slots = np.array([3, 2, 0, 9], INT)
    want_o, want = recurrent_gated_delta_rule(
        **at({name: call[name] for name in TOKENS}, slice(4)), ssm_state=call["ssm_state"], state_indices=slots
    )
    same(np.asarray(o)[:4], want_o)
    same(pool, want)


def test_reads_come_before_writes_of_the_same_sequence() -> None:
    """The tables may cross: token 0 writes the row that the sequence started from, and others write what was not read."""
    call = make(np.random.default_rng(19), (3,), [(3, 5, 7)], (2,))
    agree({**call, "write_indices": table((5, 3, 7))})


def test_dec_06_value_heads_share_key_heads_in_order() -> None:
    e = np.eye(4, dtype=np.float32)[None, :2]
    v = np.broadcast_to(1 + np.arange(6, dtype=np.float32)[:, None], (1, 6, 4))
    gate, pool, rows = np.zeros((1, 6), np.float32), np.zeros((1, 6, 4, 4), np.float32), np.zeros((1, 1), INT)
    _, state = mtp_gated_delta_rule(
        e, e, v, gate, gate + 1, ssm_state=pool, read_indices=rows, write_indices=rows, num_accepted_tokens=np.ones(1, INT),
        query_start_loc=starts(1), scale=1.0, use_qk_l2norm=False,
    )  # fmt: skip
    want = np.zeros((6, 4, 4), np.float32)
    for h in range(6):
        want[h, h // 3] = h + 1
    same(np.asarray(state)[0], want)


def test_srv_03_one_wild_row_of_four() -> None:
    rows = [(2, 3, 1), (75, 76, 77), (19, 5, 6), (0, 9, 10)]
    agree(make(np.random.default_rng(21), (3, 3, 2, 1), rows, (1, 1, 2, 3)))


def test_jax_03_padding_is_zero_not_somebody_elses_data() -> None:
    call = make(np.random.default_rng(22), (3, 2), [(-1, -1, -1), (4, 5, 6)], ())
    for _ in range(3):
        jnp.full((T, HV, V), jnp.nan).block_until_ready()
        zero(np.delete(np.asarray(mtp_gated_delta_rule(**call)[0]), [3, 4], axis=0))
