"""chunk_gated_delta_rule: golden cases, random batches, dtypes, forms, gradients, the faults of the field.

Most tests share one static shape: 96 tokens, 5 sequences, H = 1, HV = 2, K = 4, V = 3, 12 slots, chunks of 32.
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
    Ragged,
    at,
    check_golden,
    close,
    close_rows,
    device,
    given,
    grads_match,
    normal,
    ragged,
    rule_inputs,
    same,
    settings,
    st,
    starts,
    zero,
)

import golden
from gdn_jax import chunk_gated_delta_rule, reference

T, N, SLOTS, H, HV, K, V = 96, 5, 12, 1, 2, 4, 3
TOKENS = ("q", "k", "v", "g", "beta")
GOLDEN = [name for name, op in golden.CASES.items() if op == "chunk_gated_delta_rule"]
TOL = 1e-5


def slot_array(*slots: int) -> np.ndarray:
    return np.array([*slots, *[-1] * (N - len(slots))], INT)


def packed(*lengths: int) -> np.ndarray:
    return starts(*lengths, *[0] * (N - len(lengths)))


def make(rng: np.random.Generator, lengths: tuple[int, ...], slots: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A whole call of the shared shape."""
    return {
        **rule_inputs(rng, T, H=H, HV=HV, K=K, V=V),
        "ssm_state": normal(rng, SLOTS, HV, K, V),
        "query_start_loc": packed(*lengths),
        "state_indices": slot_array(*slots),
        "has_initial_state": np.ones(N, bool),
        "initial_state_indices": slot_array(*slots),
        "chunk_size": 32,
        **more,
    }


def agree(call: dict[str, Any], touched: Any, tol: float = TOL, state_tol: float | None = None) -> tuple[Any, Any]:
    """Runs a call and holds it against the reference; rows not `touched` bit for bit."""
    o, pool = chunk_gated_delta_rule(**call)
    want_o, want_pool = reference.chunk_gated_delta_rule(**call)
    close(o, want_o, tol)
    close_rows(pool, want_pool, call["ssm_state"], touched, tol if state_tol is None else state_tol)
    assert o.dtype == call["v"].dtype and pool.dtype == call["ssm_state"].dtype
    return np.asarray(o), np.asarray(pool)


def of_sequence(call: dict[str, Any], n: int) -> dict[str, Any]:
    """Sequence n of a call as the only one, in front, NaN behind it; the same static shape."""
    first, last = (int(x) for x in call["query_start_loc"][n : n + 2])
    alone = {**call, "query_start_loc": packed(last - first)}
    for name in TOKENS:
        alone[name] = np.full_like(call[name], np.nan)
        alone[name][: last - first] = call[name][first:last]
    for name in ("state_indices", "has_initial_state", "initial_state_indices"):
        alone[name] = np.roll(call[name], -n)
    return alone


# ---- golden cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    tol, state_tol = (6e-3, 3e-3) if name == "chunk_bf16" else (TOL, TOL)
    check_golden(name, tol, state_tol)


@pytest.mark.parametrize("chunk_size", [1, 100])
def test_chunk_size_is_a_hint(chunk_size: int) -> None:
    kwargs, wants = golden.load("chunk_varlen")
    o, pool = chunk_gated_delta_rule(**kwargs, chunk_size=chunk_size)
    close(o, wants["o"], TOL)
    close(pool, wants["ssm_state"], TOL)


# ---- random batches -------------------------------------------------------------------------------------------------

if st is not None:

    @settings(max_examples=30)
    @given(ragged(T, N, SLOTS))
    def test_random_batches(batch: Ragged) -> None:
        # Without counts, a sequence with a bad one (where it would be looked at) is an ordinary one.
        lengths = np.diff(batch.starts)
        live = [bool(lengths[n] > 0 and 0 <= batch.slots[n] < SLOTS) for n in range(N)]
        reading = [bool(x and h and 0 <= s < SLOTS) for x, h, s in zip(live, batch.has, batch.sources)]
        batch = batch._replace(live=live, reads=[int(s) if x else None for s, x in zip(batch.sources, reading)])
        rng = np.random.default_rng(batch.seed)
        inputs, pool = rule_inputs(rng, T, H=H, HV=HV, K=K, V=V), normal(rng, SLOTS, HV, K, V)
        resets = rng.uniform(size=(T, HV))
        inputs["g"] = np.where(resets < 0.03, -np.inf, np.where(resets < 0.06, -1e4, inputs["g"])).astype(np.float32)
        batch.poison(inputs, pool)

        def call(order: Any) -> dict[str, Any]:
            names = dict(state_indices=batch.slots, has_initial_state=batch.has, initial_state_indices=batch.sources)
            return {name: array[order] for name, array in names.items()}

        first = {**inputs, **call(slice(None)), "ssm_state": pool, "query_start_loc": batch.starts, "chunk_size": 32}
        o, new = agree(first, batch.touched())
        zero(o[np.setdiff1d(np.arange(T), batch.tokens())])
        new_starts, tokens = batch.permuted()
        second = {**first, **call(batch.order), **at(inputs, tokens[:T]), "query_start_loc": new_starts}
        moved, moved_pool = chunk_gated_delta_rule(**second)
        same(moved, o[tokens[:T]])
        same(moved_pool, new)


# ---- dtypes and index arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [(BF16, np.float32), (np.float16, np.float16), (np.float32, BF16)]
)  # golden: bfloat16 in a bfloat16 pool
def test_dtypes(dtype: Any, pool_dtype: Any) -> None:
    call = make(np.random.default_rng(1), (40, 1, 30), (3, 0, 7))
    call |= {name: call[name].astype(dtype) for name in "qkv"}
    call["ssm_state"] = call["ssm_state"].astype(pool_dtype)
    out = TOL if dtype == np.float32 else 3e-3 * EPS[dtype]
    store = {np.float32: 0.0, BF16: 3e-3, np.float16: 4e-4}[pool_dtype]
    state = TOL if dtype == np.float32 else 1e-3 * EPS[dtype]
    agree(call, [3, 0, 7], out + store, max(state, store))


def test_gates_of_any_dtype_are_used_in_float32() -> None:
    call = make(np.random.default_rng(2), (40, 1, 30), (3, 0, 7))
    agree({**call, "g": call["g"].astype(BF16), "beta": call["beta"].astype(np.float16)}, [3, 0, 7])
    with pytest.raises(TypeError, match="`v` has dtype"):
        chunk_gated_delta_rule(**{**call, "v": call["v"].astype(BF16)})
    with pytest.raises(TypeError, match="float64"):
        chunk_gated_delta_rule(**{**call, "g": call["g"].astype(np.float64)})


def test_slot_10_index_arrays_of_any_integer_dtype() -> None:
    call = make(np.random.default_rng(3), (3, 60, 5), (4, 1, 0))
    slots = call["state_indices"].copy()
    slots[3:] = 99
    want = chunk_gated_delta_rule(**call)
    wide = np.zeros(2 * N, INT)
    wide[::2] = slots
    for other in (slots.astype(np.int64), slots.astype(np.uint8), wide[::2], slots.astype(np.uint32)):
        for got in (other, jnp.asarray(other)):
            for x, y in zip(
                chunk_gated_delta_rule(**{**call, "state_indices": got, "initial_state_indices": got}), want
            ):
                same(x, y)
    for other in (slots.astype(np.float32), slots > 0):
        with pytest.raises(TypeError, match="state_indices"):
            chunk_gated_delta_rule(**{**call, "state_indices": other})
    for other in (slots[:, None], np.append(slots, 0)):
        with pytest.raises(ValueError, match="state_indices"):
            chunk_gated_delta_rule(**{**call, "state_indices": other})
    huge = call["state_indices"].astype(np.int64)
    huge[1] = HUGE
    o, pool = agree({**call, "state_indices": huge}, [4, 0])
    zero(o[3:63])
    same(pool[1], call["ssm_state"][1])


# ---- layers, forms, empties -----------------------------------------------------------------------------------------


def test_layers() -> None:
    rng = np.random.default_rng(4)
    call = make(rng, (3, 40, 2), (2, 5, 0))
    stack = normal(rng, 3, SLOTS, HV, K, V)
    for layer in (0, jnp.int32(2)):
        o, pool = chunk_gated_delta_rule(**{**call, "ssm_state": stack}, layer=layer)
        want_o, want = chunk_gated_delta_rule(**{**call, "ssm_state": stack[int(layer)]})
        same(o, want_o)
        same(np.asarray(pool)[int(layer)], want)
        others = [n for n in range(3) if n != int(layer)]
        same(np.asarray(pool)[others], stack[others])
    for layer in (3, -1):
        with pytest.raises(ValueError, match="layer"):
            chunk_gated_delta_rule(**{**call, "ssm_state": stack}, layer=layer)
        o, pool = chunk_gated_delta_rule(**{**call, "ssm_state": stack}, layer=jnp.int32(layer))
        zero(o)
        same(pool, stack)


def test_stateless_and_batched_forms() -> None:
    rng = np.random.default_rng(5)
    inputs = rule_inputs(rng, 4, 24)
    o, last = chunk_gated_delta_rule(**inputs, chunk_size=16)
    want_o, want_last = reference.chunk_gated_delta_rule(**inputs)
    assert last.shape == (4, HV, K, V) and last.dtype == jnp.float32
    close(o, want_o, TOL)
    close(last, want_last, TOL)
    flat = {name: x.reshape(T, *x.shape[2:]) for name, x in inputs.items()}
    for x, y in zip(chunk_gated_delta_rule(**flat, query_start_loc=starts(24, 24, 24, 24), chunk_size=16), (o, last)):
        same(np.asarray(x).reshape(y.shape), y)
    pool, slots = normal(rng, SLOTS, HV, K, V), np.array([5, -1, 0, 9], INT)
    agree({**inputs, "ssm_state": pool, "state_indices": slots, "chunk_size": 16}, [5, 0, 9])
    for refused in ("state_indices", "initial_state_indices"):
        with pytest.raises(ValueError, match=refused):
            chunk_gated_delta_rule(**inputs, **{refused: slots})


def test_lay_05_batch_axis_with_starts() -> None:
    """A batch of 2 without starts is right (see the test before); with them it is an error, as are packed tokens without."""
    inputs = rule_inputs(np.random.default_rng(6), 2, 8)
    with pytest.raises(ValueError, match="`q` has shape"):
        chunk_gated_delta_rule(**inputs, query_start_loc=starts(8, 8))
    with pytest.raises(ValueError, match="`q` has shape"):
        chunk_gated_delta_rule(**at(inputs, 0))


def test_srv_08_nothing_to_do() -> None:
    rng = np.random.default_rng(7)
    pool = normal(rng, SLOTS, HV, K, V)
    for tokens, n in ((0, 0), (0, 2), (4, 0)):
        inputs = rule_inputs(rng, tokens)
        o, new = chunk_gated_delta_rule(
            **inputs, ssm_state=pool, query_start_loc=starts(*[0] * n), state_indices=np.zeros(n, INT)
        )
        assert o.shape == (tokens, HV, V)
        zero(o)
        same(new, pool)
        o, new = chunk_gated_delta_rule(**inputs, query_start_loc=starts(*[0] * n))
        zero(o)
        zero(new)
        assert new.shape == (n, HV, K, V)
    call = make(rng, (30, 40, 5), (-1, -1, -1))
    o, _ = agree(call, [])
    zero(o)


def test_real_dims() -> None:
    rng = np.random.default_rng(8)
    call: dict[str, Any] = rule_inputs(rng, 20, H=16, HV=32, K=128, V=128, dtype=BF16)
    call |= dict(ssm_state=normal(rng, 3, 32, 128, 128), query_start_loc=starts(17, 1), state_indices=np.array([2, 0]))
    agree(call, [2, 0], 3e-3, 1e-3)


# ---- gradients, donation --------------------------------------------------------------------------------------------


def gradient_case(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any], Any, Any]:
    call = make(rng, (20, 9, 1, 30), (4, 99, 6, 1), chunk_size=16, has_initial_state=np.array([1, 1, 1, 0, 1], bool))
    arrays = {name: call.pop(name) for name in (*TOKENS, "ssm_state")}
    wo, wp = rng.standard_normal((T, HV, V)), np.zeros((SLOTS, HV, K, V))
    wp[[4, 6, 1]] = rng.standard_normal((3, HV, K, V))
    return call, arrays, wo, wp


def weighted(xp: Any, function: Any, call: dict[str, Any], wo: Any, wp: Any) -> Any:
    def f(**arrays: Any) -> Any:
        o, pool = function(**arrays, **call)
        return xp.sum(o * xp.asarray(wo, o.dtype)) + xp.sum(xp.where(wp != 0, pool, 0) * xp.asarray(wp, o.dtype))

    return f


def test_gradients() -> None:
    """Against finite differences of the reference; padding (NaN in it) gets exact zeros."""
    rng = np.random.default_rng(9)
    call, arrays, wo, wp = gradient_case(rng)
    padding, unread = np.r_[20:29, 60:T], np.array([n for n in range(SLOTS) if n not in (4, 6)])
    for name in TOKENS:
        arrays[name][padding] = np.nan
    arrays["ssm_state"][unread] = np.nan
    f = weighted(jnp, chunk_gated_delta_rule, call, wo, wp)
    grads = jax.grad(lambda arrays: f(**arrays))(arrays)
    for name in TOKENS:
        zero(grads[name][padding])
    zero(grads["ssm_state"][unread])
    for name in arrays:
        arrays[name][unread if name == "ssm_state" else padding] = 0
    grads_match(weighted(np, reference.chunk_gated_delta_rule, call, wo, wp), arrays, grads, rng)


def test_slot_12_gradients_at_zero_keys_and_resets_are_finite() -> None:
    rng = np.random.default_rng(10)
    call, arrays, wo, wp = gradient_case(rng)
    arrays["k"][[0, 5, 6, 40]] = 0
    arrays["q"][[1, 5]] = 0
    arrays["g"][[3, 33]] = -np.inf
    arrays["g"][[4, 34]] = -1e4
    f = weighted(jnp, chunk_gated_delta_rule, call, wo, wp)
    grads = jax.grad(lambda arrays: f(**arrays))(arrays)
    assert all(np.isfinite(np.asarray(x)).all() for x in grads.values())
    reset = {**arrays, "g": np.maximum(arrays["g"], -1e4)}  # e^g and its derivative are 0 either way
    grads_match(weighted(np, reference.chunk_gated_delta_rule, call, wo, wp), reset, grads, rng)
    o, _ = chunk_gated_delta_rule(**arrays, **call)
    close(o, reference.chunk_gated_delta_rule(**arrays, **call)[0], TOL)


def test_donated_pool_stays_in_place() -> None:
    call = make(np.random.default_rng(11), (30, 1, 40), (2, 5, 0))
    pool = device(call.pop("ssm_state"))
    step = jax.jit(lambda pool, q: chunk_gated_delta_rule(**{**call, "q": q}, ssm_state=pool), donate_argnums=0)
    want = step(pool + 0, call["q"])
    where = pool.unsafe_buffer_pointer()
    o, new = step(pool, call["q"])
    assert new.unsafe_buffer_pointer() == where and pool.is_deleted()
    same(o, want[0])
    same(new, want[1])


# ---- faults met in the field ----------------------------------------------------------------------------------------


def test_conv_13_whole_and_in_pieces() -> None:
    call = make(np.random.default_rng(3), (T,), (2,))
    whole, final = agree(call, [2])
    pool, done = call["ssm_state"], 0
    for length in (37, 2, 1, 56):
        part = {**call, "ssm_state": pool, "query_start_loc": packed(length)}
        for name in TOKENS:
            part[name] = np.full_like(call[name], np.nan)
            part[name][:length] = call[name][done : done + length]
        o, pool = chunk_gated_delta_rule(**part)
        close(np.asarray(o)[:length], whole[done : done + length], TOL)
        done += length
    close(pool, final, TOL)


def test_dec_06_value_heads_share_key_heads_in_order() -> None:
    """Head h writes h + 1 on e_{h // 3}."""
    e = np.eye(4, dtype=np.float32)[None, None, :2]
    v = np.broadcast_to(1 + np.arange(6, dtype=np.float32)[:, None], (1, 1, 6, 4))
    gate = np.zeros((1, 1, 6), np.float32)
    _, state = chunk_gated_delta_rule(e, e, v, gate, gate + 1, scale=1.0, use_qk_l2norm=False, chunk_size=16)
    want = np.zeros((6, 4, 4), np.float32)
    for h in range(6):
        want[h, h // 3] = h + 1
    same(np.asarray(state)[0], want)


RAW = {"use_qk_l2norm": False, "chunk_size": 64}


def keys_of_one_direction(length: float, sign: int, beta: float, g: float) -> dict[str, Any]:
    call = make(np.random.default_rng(12), (T,), (2,))
    call["k"] = np.zeros_like(call["k"])
    call["k"][..., 0] = length
    call["k"][1::2] *= sign
    call["beta"] = np.full_like(call["beta"], beta)
    call["g"] = np.full_like(call["g"], g)
    return call


def test_pre_04_identical_keys() -> None:
    call = keys_of_one_direction(1, 1, 1, 0)
    _, pool = agree({**call, **RAW}, [2])
    close(pool[2, :, 0], call["v"][-1].astype(np.float64), TOL)  # the state is the last v on e0
    agree(call, [2])


def test_pre_04_keys_longer_than_one() -> None:
    """k = 1.4 e0, beta = 1: each step overshoots by 1.96 - 1, so that errors do not die out."""
    agree({**keys_of_one_direction(1.4, 1, 1, 0), **RAW}, [2], 1e-4)


def test_num_07_entries_of_the_triangle_far_above_one() -> None:
    """k = ±3 e0, beta = 0.9, g = -2: entries of about 8 in the triangle, the true result finite."""
    call = keys_of_one_direction(3, -1, 0.9, -2)
    o, _ = agree({**call, **RAW}, [2], 1e-4)
    assert np.isfinite(o).all()


def test_pre_06_tails() -> None:
    rng = np.random.default_rng(13)
    for length in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65):
        call = make(rng, (length, 2), (7, 3))
        call["g"] = np.full_like(call["g"], -0.5)
        agree(call, [7, 3])


def test_pre_06_tails_of_whole_chunks() -> None:
    """Chunks of 64, lengths beyond two of them, packed."""
    rng, lengths = np.random.default_rng(14), (127, 129, 128, 1)
    call: dict[str, Any] = rule_inputs(rng, sum(lengths))
    agree({**call, "ssm_state": normal(rng, 4, HV, K, V), "query_start_loc": starts(*lengths)}, range(4))


def test_pre_07_many_lengths_bfloat16() -> None:
    rng, lengths = np.random.default_rng(7), (1025, 511, 257, 64, 65, 33, 2, 1, 3, 1, 63, 1)
    call: dict[str, Any] = rule_inputs(rng, sum(lengths), H=2, HV=2, K=128, V=128, dtype=BF16)
    call["g"] = -np.logaddexp(0, -normal(rng, sum(lengths), 2)).astype(np.float32)
    call |= dict(ssm_state=normal(rng, 12, 2, 128, 128), query_start_loc=starts(*lengths))
    o, pool = chunk_gated_delta_rule(**call)
    want_o, want_pool = reference.chunk_gated_delta_rule(**call, dtype=np.float32)
    for n in range(12):
        part = slice(*call["query_start_loc"][n : n + 2])
        close(o[part], want_o[part], 3e-3)
        close(pool[n], want_pool[n], 1e-3)


def test_pre_07_a_sequence_equals_itself_alone() -> None:
    """Bit for bit at one static shape, wherever it stands and whatever is beside it."""
    call = make(np.random.default_rng(15), (33, 1, 40, 2), (3, 8, 1, 5))
    o, pool = agree(call, [3, 8, 1, 5])
    for n, slot in enumerate((3, 8, 1, 5)):
        first, last = call["query_start_loc"][n : n + 2]
        got, got_pool = chunk_gated_delta_rule(
            **of_sequence(call, n) | {"state_indices": slot_array(slot), "initial_state_indices": slot_array(slot)}
        )
        same(np.asarray(got)[: last - first], o[first:last])
        same(np.asarray(got_pool)[slot], pool[slot])


def test_pre_08_empty_sequences() -> None:
    call = make(
        np.random.default_rng(16), (0, 5, 0, 4, 0), (0, 1, 2, 3, 4), has_initial_state=np.array([0, 1, 0, 1, 1], bool)
    )
    agree(call, [1, 3])


def test_pre_12_batch_at_the_end_of_its_arrays() -> None:
    inputs = rule_inputs(np.random.default_rng(17), 2, 320, H=2, HV=2, K=64, V=64, dtype=BF16)
    o, state = chunk_gated_delta_rule(**inputs)
    want_o, want_state = reference.chunk_gated_delta_rule(**inputs)
    close(o, want_o, 3e-3)
    close(state, want_state, 1e-3)


def test_num_02_bfloat16_at_real_sizes() -> None:
    inputs = rule_inputs(np.random.default_rng(19), 1, 512, K=128, V=128, dtype=BF16)
    o, state = chunk_gated_delta_rule(**inputs)
    want_o, want_state = reference.chunk_gated_delta_rule(**inputs)
    close(o, want_o, 3e-3)
    close(state, want_state, 1e-3)


def test_num_06_no_state_zeros_and_equal_lengths() -> None:
    """No initial state equals zeros in the slot, bit for bit; and a split on the grid of chunks equals the whole."""
    call = make(np.random.default_rng(20), (70, 20), (3, 1), has_initial_state=np.zeros(N, bool))
    first = chunk_gated_delta_rule(**call)
    zeros = {**call, "ssm_state": np.zeros_like(call["ssm_state"]), "has_initial_state": np.ones(N, bool)}
    second = chunk_gated_delta_rule(**zeros)
    same(first[0], second[0])
    same(np.asarray(first[1])[[3, 1]], np.asarray(second[1])[[3, 1]])
    part = {**call, "query_start_loc": packed(64)}
    _, pool = chunk_gated_delta_rule(**part)
    rest = {**call, "ssm_state": pool, "has_initial_state": np.ones(N, bool), "query_start_loc": packed(6)}
    for name in TOKENS:
        rest[name] = np.roll(call[name], -64, axis=0)
    o, pool = chunk_gated_delta_rule(**rest)
    same(np.asarray(o)[:6], np.asarray(first[0])[64:70])
    same(np.asarray(pool)[3], np.asarray(first[1])[3])


def test_resets_keep_the_accuracy_of_their_neighbours() -> None:
    """One g of -1e4 or -inf among mild ones costs nobody a digit (spec: the sums of g, never differences)."""
    call = make(np.random.default_rng(21), (T,), (2,))
    call["g"] = np.full_like(call["g"], -1e-3)
    call["g"][[10, 40, 41, 77]] = np.array([-1e4, -np.inf, -3e38, -90.0], np.float32)[:, None]
    o, _ = chunk_gated_delta_rule(**call)
    want, _ = reference.chunk_gated_delta_rule(**call)
    for first, last in ((0, 10), (10, 40), (41, 77), (77, T)):
        close(np.asarray(o)[first:last], want[first:last], TOL)


def test_slot_01_and_02_padding_does_not_wrap() -> None:
    call = make(np.random.default_rng(22), (3, 20, 4), (0, -1, -1))
    for name in TOKENS:
        call[name][3:] = 1e4
    o, _ = agree(call, [0])
    zero(o[3:])


def test_slot_07_a_slot_used_again() -> None:
    call = make(np.random.default_rng(23), (10,), (2,), has_initial_state=np.zeros(N, bool))
    first = chunk_gated_delta_rule(**call)
    for x, y in zip(chunk_gated_delta_rule(**{**call, "ssm_state": first[1]}), first):
        same(x, y)


def test_srv_03_one_wild_slot_of_four() -> None:
    agree(make(np.random.default_rng(24), (30, 4, 50, 2), (0, 75, 7, 2)), [0, 7, 2])


def test_jax_03_padding_is_zero_not_somebody_elses_data() -> None:
    call = make(np.random.default_rng(25), (30, 40), (-1, 5))
    for _ in range(3):
        jnp.full((T, HV, V), jnp.nan).block_until_ready()
        o, _ = chunk_gated_delta_rule(**call)
        zero(np.asarray(o)[np.r_[:30, 70:T]])


def test_jax_11_defaults_are_what_they_stand_for() -> None:
    call = make(np.random.default_rng(26), (30, 40, 1), (0, 1, 2))
    call["state_indices"] = call["initial_state_indices"] = np.arange(N, dtype=INT)
    want = chunk_gated_delta_rule(**call)
    defaults = ("state_indices", "has_initial_state", "initial_state_indices")
    for x, y in zip(chunk_gated_delta_rule(**{name: x for name, x in call.items() if name not in defaults}), want):
        same(x, y)
    for x, y in zip(chunk_gated_delta_rule(**call, scale=K**-0.5, use_qk_l2norm=True), want):
        same(x, y)
