"""causal_conv1d and causal_conv1d_update: golden cases, random batches, dtypes, forms, gradients, the faults of the field.

Most tests share one static shape for each operator: 24 tokens, 6 sequences, 5 channels, W = 4, S = 2, 14 slots.
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
    conv_inputs,
    device,
    given,
    grads_match,
    normal,
    ragged,
    same,
    settings,
    st,
    starts,
    zero,
)

import golden
from gdn_jax import causal_conv1d, causal_conv1d_update, reference

T, N, SLOTS, D, W, S = 24, 6, 14, 5, 4, 2
GOLDEN = [name for name, op in golden.CASES.items() if op.startswith("causal_conv1d")]


def slot_array(*slots: int) -> np.ndarray:
    """`state_indices` of N sequences: the given ones, the others padding."""
    return np.array([*slots, *[-1] * (N - len(slots))], INT)


def packed(*lengths: int) -> np.ndarray:
    """`query_start_loc` of N sequences: the given lengths, the others empty."""
    return starts(*lengths, *[0] * (N - len(lengths)))


def prefill(rng: np.random.Generator, lengths: tuple[int, ...], slots: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A whole call of causal_conv1d of the shared shape (without counts and other sources)."""
    return {
        **conv_inputs(rng, T),
        "conv_state": normal(rng, SLOTS, D, W - 1 + S),
        "query_start_loc": packed(*lengths),
        "state_indices": slot_array(*slots),
        "has_initial_state": np.ones(N, bool),
        **more,
    }


def agree(call: dict[str, Any], touched: Any, *, update: bool = False, tol: float = 2e-6) -> tuple[Any, Any]:
    """Runs a call and holds it against the reference: outputs within `tol`, the pool exact (it only holds inputs)."""
    run, ref = (
        (causal_conv1d_update, reference.causal_conv1d_update) if update else (causal_conv1d, reference.causal_conv1d)
    )
    y, pool = run(**call)
    want_y, want_pool = ref(**call)
    close(y, want_y, tol)
    close_rows(pool, want_pool.astype(pool.dtype), call["conv_state"], touched, 0)
    assert y.dtype == call["x"].dtype and pool.dtype == call["conv_state"].dtype
    return np.asarray(y), np.asarray(pool)


# ---- golden cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    check_golden(name, 6e-3 if name == "conv_bf16" else 2e-6, 0)  # the state holds inputs: exact


# ---- random batches -------------------------------------------------------------------------------------------------


def agree_on_random(batch: Ragged, *, update: bool) -> None:
    rng = np.random.default_rng(batch.seed)
    inputs = conv_inputs(rng, T)
    pool = normal(rng, SLOTS, D, W - 1 + S)
    batch.poison({"x": inputs["x"]}, pool)
    run, ref = (
        (causal_conv1d_update, reference.causal_conv1d_update) if update else (causal_conv1d, reference.causal_conv1d)
    )

    def call(order: Any) -> dict[str, Any]:
        more = {} if update else {"initial_state_indices": batch.sources[order]}
        return dict(state_indices=batch.slots[order], has_initial_state=batch.has[order],
                    num_accepted_tokens=batch.accepted[order], **more)  # fmt: skip

    first = {**inputs, **call(slice(None)), "conv_state": pool, "query_start_loc": batch.starts}
    y, new = (np.asarray(x) for x in run(**first))
    want_y, want_pool = ref(**first)
    close(y, want_y, 2e-6)
    close_rows(new, want_pool.astype(np.float32), pool, batch.touched(), 0)
    zero(y[np.setdiff1d(np.arange(T), batch.tokens())])

    new_starts, tokens = batch.permuted()
    second = {**first, **call(batch.order), "query_start_loc": new_starts, "x": inputs["x"][tokens[:T]]}
    moved, moved_pool = run(**second)
    same(moved, y[tokens[:T]])
    same(moved_pool, new)


if st is not None:

    @settings(max_examples=30)
    @given(ragged(T, N, SLOTS, S))
    def test_random_prefill(batch: Ragged) -> None:
        agree_on_random(batch, update=False)

    @settings(max_examples=30)
    @given(ragged(T, N, SLOTS, S, longest=S + 1))
    def test_random_verify_step(batch: Ragged) -> None:
        reads = [int(slot) if x and has else None for slot, x, has in zip(batch.slots, batch.live, batch.has)]
        agree_on_random(batch._replace(reads=reads, sources=batch.slots), update=True)


def test_bad_count_beside_an_initial_slot_outside_the_pool() -> None:
    """Such a slot means zeros, but the count is looked at all the same; only has_initial_state=False hides it."""
    call = prefill(np.random.default_rng(0), (4, 3, 2), (2, 5, 7))
    call |= {"initial_state_indices": slot_array(-1, 5, -1), "num_accepted_tokens": np.array([0, 1, 0, 1, 1, 1], INT)}
    call["has_initial_state"] = np.array([1, 1, 0, 1, 1, 1], bool)
    y, _ = agree(call, [5, 7])
    zero(y[:4])
    assert y[4:9].any()


# ---- dtypes and index arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [(BF16, BF16), (np.float16, np.float16), (BF16, np.float32), (np.float32, BF16)]
)
def test_conv_11_dtypes_and_mixed_pools(dtype: Any, pool_dtype: Any) -> None:
    """y in x's dtype; history from the pool, inputs unrounded, the store rounds (once): so the pool is exact."""
    rng, tol = np.random.default_rng(1), 2e-6 if dtype == np.float32 else 3e-3 * EPS[dtype]
    has = np.array([1, 0, 1, 0, 1, 1], bool)
    call = prefill(rng, (1, 1, 2, 8), (3, 0, 6, 9), has_initial_state=has)
    call |= {name: call[name].astype(dtype) for name in ("x", "weight", "bias")}
    call["conv_state"] = call["conv_state"].astype(pool_dtype)
    agree(call, [3, 0, 6, 9], tol=tol)
    step = {**call, "x": call["x"][:N]}
    del step["query_start_loc"]
    agree(step, [3, 0, 6, 9], update=True, tol=tol)


def test_slot_10_index_arrays_of_any_integer_dtype() -> None:
    call = prefill(np.random.default_rng(2), (3, 0, 5, 2), (4, 1, 0, 7))
    want = causal_conv1d(**call)
    slots, bounds = call["state_indices"].copy(), call["query_start_loc"]
    slots[4:] = 99  # padding for unsigned dtypes too
    wide = np.zeros((2 * N,), INT)
    wide[::2] = slots
    for other in (
        slots.astype(np.int64),
        slots.astype(np.uint8),
        slots.astype(np.int16),
        wide[::2],
        slots.astype(np.uint64),
    ):
        for got in (other, jnp.asarray(other)):
            for x, y in zip(causal_conv1d(**{**call, "state_indices": got}), want):
                same(x, y)
    for x, y in zip(causal_conv1d(**{**call, "query_start_loc": bounds.astype(np.int64)}), want):
        same(x, y)
    step = {**call, "x": call["x"][:N], "query_start_loc": None}
    for entry, arguments in ((causal_conv1d, call), (causal_conv1d_update, step)):
        for other in (slots.astype(np.float32), slots > 0):
            with pytest.raises(TypeError, match="state_indices"):
                entry(**{**arguments, "state_indices": other})
        for other in (slots[:, None], np.append(slots, 0)):
            with pytest.raises(ValueError, match="state_indices"):
                entry(**{**arguments, "state_indices": other})


def test_wide_indices_are_judged_before_they_are_narrowed() -> None:
    call = prefill(np.random.default_rng(3), (3, 4), (2, 5))
    call["state_indices"] = call["state_indices"].astype(np.int64)
    call["state_indices"][1] = HUGE
    y, pool = causal_conv1d(**call)
    zero(y[3:])
    same(np.asarray(pool)[1], call["conv_state"][1])
    agree(call, [2])
    counts = np.array([1, HUGE, 1, 1, 1, 1])
    y, _ = causal_conv1d(**{**call, "state_indices": slot_array(2, 5), "num_accepted_tokens": counts})
    zero(y[3:])
    assert np.asarray(y)[:3].all()


# ---- layers, forms, empties -----------------------------------------------------------------------------------------


def test_layers() -> None:
    """A layer of a stack is that layer alone; an int outside is refused, a JAX scalar outside is all padding."""
    rng = np.random.default_rng(4)
    call = prefill(rng, (3, 4, 2), (2, 5, 0))
    stack = normal(rng, 3, SLOTS, D, W - 1 + S)
    for layer in (0, 2, np.int64(1), jnp.int32(2)):
        y, pool = causal_conv1d(**{**call, "conv_state": stack}, layer=layer)
        want_y, want = causal_conv1d(**{**call, "conv_state": stack[int(layer)]})
        same(y, want_y)
        same(np.asarray(pool)[int(layer)], want)
        others = [n for n in range(3) if n != int(layer)]
        same(np.asarray(pool)[others], stack[others])
    for layer in (3, -1):
        with pytest.raises(ValueError, match="layer"):
            causal_conv1d(**{**call, "conv_state": stack}, layer=layer)
        y, pool = causal_conv1d(**{**call, "conv_state": stack}, layer=jnp.int32(layer))
        zero(y)
        same(pool, stack)
    step = {**call, "x": call["x"][:N], "query_start_loc": None}
    y, pool = causal_conv1d_update(**{**step, "conv_state": stack}, layer=1)
    want_y, want = causal_conv1d_update(**{**step, "conv_state": stack[1]})
    same(y, want_y)
    same(np.asarray(pool)[1], want)
    same(np.asarray(pool)[[0, 2]], stack[[0, 2]])


def test_stateless_and_batched_forms() -> None:
    rng = np.random.default_rng(5)
    inputs = conv_inputs(rng, 4, 6)
    y, last = causal_conv1d(**inputs)
    want_y, want_last = reference.causal_conv1d(**inputs)
    close(y, want_y, 2e-6)
    same(last, want_last.astype(np.float32))
    flat, flat_last = causal_conv1d(**{**inputs, "x": inputs["x"].reshape(24, D)}, query_start_loc=starts(6, 6, 6, 6))
    same(np.asarray(flat).reshape(4, 6, D), y)
    same(flat_last, last)
    _, last = causal_conv1d(**{**inputs, "x": inputs["x"].astype(BF16)})
    assert last.shape == (4, D, W - 1) and last.dtype == jnp.bfloat16
    for refused in ("state_indices", "initial_state_indices", "num_accepted_tokens"):
        with pytest.raises(ValueError, match=refused):
            causal_conv1d(**inputs, **{refused: np.zeros(4, INT)})
    with pytest.raises(ValueError, match="x"):
        causal_conv1d(**inputs, query_start_loc=starts(6, 6, 6, 6))
    with pytest.raises(ValueError, match="num_accepted_tokens"):
        causal_conv1d_update(
            normal(rng, 2, D), inputs["weight"], conv_state=normal(rng, 2, D, 5), num_accepted_tokens=np.ones(2, INT)
        )


def test_swish_is_silu_and_none_is_linear() -> None:
    call = prefill(np.random.default_rng(6), (5, 3), (2, 4))
    for x, y in zip(causal_conv1d(**call), causal_conv1d(**call, activation="swish")):
        same(x, y)
    agree({**call, "activation": None}, [2, 4])


def test_srv_08_nothing_to_do() -> None:
    rng = np.random.default_rng(7)
    weights = conv_inputs(rng)
    weights.pop("x")
    pool = normal(rng, SLOTS, D, 5)
    for x, n in ((np.zeros((0, D), np.float32), 0), (np.zeros((0, D), np.float32), 2), (normal(rng, 4, D), 0)):
        y, new = causal_conv1d(
            x, **weights, conv_state=pool, query_start_loc=starts(*[0] * n), state_indices=np.zeros(n, INT)
        )
        assert y.shape == x.shape
        zero(y)
        same(new, pool)
        y, new = causal_conv1d_update(
            x, **weights, conv_state=pool, query_start_loc=starts(*[0] * n), state_indices=np.zeros(n, INT)
        )
        zero(y)
        same(new, pool)
    y, new = causal_conv1d_update(
        np.zeros((0, D), np.float32), **weights, conv_state=pool, state_indices=np.zeros(0, INT)
    )
    assert y.shape == (0, D)
    same(new, pool)
    call = prefill(rng, (3, 4, 5), (-1, -1, -1))
    agree(call, [])
    zero(causal_conv1d(**call)[0])
    assert causal_conv1d(np.zeros((2, 0, D), np.float32), **weights)[1].shape == (2, D, 3)


def test_real_dims() -> None:
    """Qwen3-Next: 2 * 16 * 128 + 32 * 128 = 8,192 channels, bfloat16."""
    rng = np.random.default_rng(8)
    call: dict[str, Any] = conv_inputs(rng, 12, D=8192, dtype=BF16)
    call |= dict(
        conv_state=normal(rng, 4, 8192, 3, dtype=BF16),
        query_start_loc=starts(7, 2, 1),
        state_indices=np.array([2, 0, 9]),
    )
    agree(call, [2, 0], tol=3e-3)
    step = {**call, "x": call["x"][:3]}
    del step["query_start_loc"]
    agree(step, [2, 0], update=True, tol=3e-3)


# ---- gradients, donation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", [False, True])
def test_gradients(update: bool) -> None:
    """Against finite differences of the reference; padding (NaN in it) gets exact zeros."""
    rng = np.random.default_rng(9)
    run, ref = (
        (causal_conv1d_update, reference.causal_conv1d_update) if update else (causal_conv1d, reference.causal_conv1d)
    )
    has = np.array([1, 1, 0, 1, 1, 1], bool)
    call = prefill(rng, (3, 2, 3, 2), (4, 99, 6, 1), has_initial_state=has)
    call["num_accepted_tokens"] = np.array([2, 1, 1, 3, 1, 1], INT)
    arrays = {name: call.pop(name) for name in ("x", "weight", "bias", "conv_state")}
    padding, unread = np.r_[3:5, 10:T], [n for n in range(SLOTS) if n not in (4, 1)]
    arrays["x"][padding] = np.nan
    arrays["conv_state"][unread] = np.nan
    wy, wp = rng.standard_normal((T, D)), np.zeros((SLOTS, D, W - 1 + S))
    wp[[4, 6, 1], :, : W - 1] = rng.standard_normal((3, D, W - 1))

    def total(xp: Any, function: Any) -> Any:
        def f(**arrays: Any) -> Any:
            y, pool = function(**arrays, **call)
            return xp.sum(y * xp.asarray(wy, y.dtype)) + xp.sum(xp.where(wp != 0, pool, 0) * xp.asarray(wp, y.dtype))

        return f

    grads = jax.grad(lambda arrays: total(jnp, run)(**arrays))(arrays)
    zero(grads["x"][padding])
    zero(grads["conv_state"][np.array(unread)])
    assert all(np.isfinite(np.asarray(x)).all() for x in grads.values())
    arrays["x"][padding], arrays["conv_state"][unread] = 0, 0
    grads_match(total(np, ref), arrays, grads, rng)


@pytest.mark.parametrize("update", [False, True])
def test_donated_pool_stays_in_place(update: bool) -> None:
    call = prefill(np.random.default_rng(10), (3, 4), (2, 5))
    pool = device(call.pop("conv_state"))
    if update:
        call |= {"x": call["x"][:N], "query_start_loc": None}
    run = causal_conv1d_update if update else causal_conv1d
    step = jax.jit(lambda pool, x: run(**{**call, "x": x}, conv_state=pool), donate_argnums=0)
    want = step(pool + 0, call["x"])
    where = pool.unsafe_buffer_pointer()
    y, new = step(pool, call["x"])
    assert new.unsafe_buffer_pointer() == where and pool.is_deleted()
    same(y, want[0])
    same(new, want[1])


# ---- faults met in the field ----------------------------------------------------------------------------------------


def test_conv_03_tile_tails() -> None:
    """Lengths at the borders of tiles, packed together (some starting from zeros), and a few alone."""
    rng = np.random.default_rng(1)
    lengths = [1, 2, 3, 4, 5, *range(62, 68), *range(126, 131), *range(1022, 1029)]
    n = len(lengths)
    call: dict[str, Any] = conv_inputs(rng, sum(lengths), D=64)
    call |= dict(
        conv_state=normal(rng, n, 64, 3), query_start_loc=starts(*lengths), has_initial_state=np.arange(n) % 3 != 1
    )
    y, pool = agree(call, range(n))
    for i in (0, 3, 6, n - 1):
        part = slice(call["query_start_loc"][i], call["query_start_loc"][i + 1])
        alone = {
            **call,
            "x": call["x"][part],
            "query_start_loc": starts(lengths[i]),
            "state_indices": np.array([i], INT),
        }
        alone["has_initial_state"] = call["has_initial_state"][i : i + 1]
        got_y, got_pool = agree(alone, [i])
        close(got_y, y[part], 2e-6)
        same(got_pool[i], pool[i])


def test_conv_06_accepted_offsets_in_integers() -> None:
    """x_t = t, three tokens a step; all three accepted, then one: the window is that of the accepted stream."""
    weight, pool = np.array([[1, 10, 100, 1000]] * 4, np.float32), np.zeros((2, 4, 5), np.float32)

    def step(tokens: list[int], accepted: int, pool: Any) -> Any:
        x = np.repeat(np.array(tokens, np.float32)[:, None], 4, axis=1)
        return causal_conv1d_update(
            x, weight, conv_state=pool, state_indices=np.array([1]), query_start_loc=starts(len(tokens)),
            num_accepted_tokens=np.array([accepted]), activation=None,
        )  # fmt: skip

    y, pool = step([1, 2, 3], 1, pool)
    same(np.asarray(y)[:, 0], np.array([1000, 2100, 3210], np.float32))
    same(np.asarray(pool)[1, 0], np.array([0, 0, 1, 2, 3], np.float32))
    y, pool = step([4, 5, 6], 3, pool)
    same(np.asarray(y)[:, 0], np.array([4321, 5432, 6543], np.float32))
    same(np.asarray(pool)[1, 0], np.array([2, 3, 4, 5, 6], np.float32))
    y, pool = step([7, 8, 9], 1, pool)  # 4 alone was accepted: 5 and 6 leave no trace
    same(np.asarray(y)[:, 0], np.array([7432, 8743, 9874], np.float32))
    same(np.asarray(pool)[1, 0], np.array([3, 4, 7, 8, 9], np.float32))
    zero(pool[0])


def test_conv_07_tap_order() -> None:
    weight = np.array([[1, 10, 100, 1000]], np.float32)
    x = np.arange(1, 6, dtype=np.float32)[:, None]
    y, pool = causal_conv1d(x[None, :4], weight, activation=None)
    same(np.asarray(y)[0, :, 0], np.array([1000, 2100, 3210, 4321], np.float32))
    y, pool = causal_conv1d_update(x[4:], weight, conv_state=pool, activation=None)
    same(y, np.array([[5432]], np.float32))
    same(np.asarray(pool)[0, 0], np.array([3, 4, 5], np.float32))


@pytest.mark.parametrize("width", [2, 3, 5, 8])
def test_conv_10_widths(width: int) -> None:
    rng = np.random.default_rng(11)
    call: dict[str, Any] = conv_inputs(rng, 20, D=16, W=width)
    call |= dict(
        conv_state=normal(rng, 3, 16, width), query_start_loc=starts(1, 12, 7), state_indices=np.array([2, 0, 1])
    )
    _y, pool = agree(call, [0, 1, 2])
    step = {**call, "x": call["x"][:3], "conv_state": pool}
    del step["query_start_loc"]
    agree(step, [0, 1, 2], update=True)
    with pytest.raises(ValueError, match="conv_kernel_dim=1"):
        causal_conv1d(**{**call, "weight": call["weight"][:, :1]})


def test_conv_12_bucket_padding() -> None:
    call = prefill(np.random.default_rng(12), (9,), (3,))
    call["x"][9:] = 1e4
    y, pool = agree(call, [3])
    zero(y[9:])
    same(pool[3, :, : W - 1], call["x"][6:9].T)


def test_conv_13_whole_and_in_pieces() -> None:
    rng = np.random.default_rng(3)
    call = prefill(rng, (T,), (2,))
    whole, _ = causal_conv1d(**call)
    close(whole, reference.causal_conv1d(**call)[0], 2e-6)
    pool, done = call["conv_state"], 0
    for length in (9, 2, 1, 12):
        x = np.full((T, D), np.nan, np.float32)
        x[:length] = call["x"][done : done + length]
        y, pool = causal_conv1d(**{**call, "x": x, "conv_state": pool, "query_start_loc": packed(length)})
        close(np.asarray(y)[:length], np.asarray(whole)[done : done + length], 2e-6)
        done += length
    same(np.asarray(pool)[2, :, : W - 1], call["x"][-3:].T)
    same(np.asarray(pool)[2, :, W - 1 :], call["conv_state"][2, :, W - 1 :])


def test_conv_16_decode_continues_the_prefill_exactly() -> None:
    x = (10 * np.arange(10)[:, None] + np.arange(5)).astype(np.float32)
    weight = np.arange(20, dtype=np.float32).reshape(5, 4) % 7
    whole, _ = causal_conv1d(x[None], weight, activation=None)
    y, pool = causal_conv1d(x[:6], weight, conv_state=np.zeros((3, 5, 3), np.float32), query_start_loc=starts(6),
                            state_indices=np.array([1]), activation=None)  # fmt: skip
    same(y, np.asarray(whole)[0, :6])
    for t in range(6, 10):
        y, pool = causal_conv1d_update(
            x[t : t + 1], weight, conv_state=pool, state_indices=np.array([1]), activation=None
        )
        same(np.asarray(y)[0], np.asarray(whole)[0, t])
    zero(np.asarray(pool)[[0, 2]])


def test_conv_17_prompts_shorter_than_the_window() -> None:
    has = np.array([0, 1, 0, 1, 1, 1], bool)
    call = prefill(np.random.default_rng(13), (1, 1, 2, 2, 5), (0, 1, 2, 3, 4), has_initial_state=has)
    call["conv_state"][:, :, :3] = [7, 8, 9]
    x = call["x"][..., 0]
    _, pool = agree(call, range(5))
    rows = [[0, 0, x[0]], [8, 9, x[1]], [0, x[2], x[3]], [9, x[4], x[5]], [*x[8:11]]]
    same(pool[:5, 0, :3], np.array(rows, np.float32))
    step = {**call, "conv_state": pool, "has_initial_state": np.ones(N, bool)}
    del step["query_start_loc"]
    for t in range(3):
        step["x"] = normal(np.random.default_rng(t), N, D)
        _, step["conv_state"] = agree(step, range(5), update=True)


def test_conv_18_every_channel_group_shifts() -> None:
    call = prefill(np.random.default_rng(14), (), (3, 1), x=1 + np.arange(N * D, dtype=np.float32).reshape(N, D))
    del call["query_start_loc"]
    before = call["conv_state"]
    _, pool = agree(call, [3, 1], update=True)
    same(pool[3, :, :3], np.column_stack([before[3, :, 1:3], call["x"][0]]))
    _, pool = agree({**call, "conv_state": pool}, [3, 1], update=True)
    same(pool[3, :, :3], np.column_stack([before[3, :, 2], call["x"][0], call["x"][0]]))
    assert (pool[[3, 1], :, :3] != before[[3, 1], :, :3]).all()


def test_mtp_01_short_step_after_three_accepted() -> None:
    rng = np.random.default_rng(15)
    weights = conv_inputs(rng)
    del weights["x"]
    x, slots = normal(rng, 6, D), slot_array(3)
    stream = normal(rng, SLOTS, D, W - 1 + S)
    verify: dict[str, Any] = dict(state_indices=slots, has_initial_state=np.ones(N, bool))
    pad = np.zeros((T - 3, D), np.float32)
    for accepted in (1, 2, 3):
        first = dict(x=np.vstack([x[:3], pad]), query_start_loc=packed(3), num_accepted_tokens=np.ones(N, INT))
        _y, pool = causal_conv1d_update(**weights, **first, **verify, conv_state=stream)
        second = dict(
            x=np.vstack([x[3:4], pad, pad[:2]]),
            query_start_loc=packed(1),
            num_accepted_tokens=np.full(N, accepted, INT),
        )
        got, _ = causal_conv1d_update(**weights, **second, **verify, conv_state=pool)
        accepted_x = np.vstack([x[:accepted], x[3:4]])
        want, _ = reference.causal_conv1d(
            accepted_x, **weights, conv_state=stream, state_indices=[3], query_start_loc=[0, accepted + 1]
        )
        close(np.asarray(got)[0], want[-1], 2e-6)


def test_mtp_03_ragged_verify_rows_equal_themselves_alone() -> None:
    rng = np.random.default_rng(16)
    call = prefill(rng, (1, 3, 1, 2), (4, 9, 0, 7))
    call["num_accepted_tokens"] = np.array([1, 2, 1, 3, 1, 1], INT)
    y, pool = agree(call, [4, 9, 0, 7], update=True)
    for n, (slot, first, last) in enumerate([(4, 0, 1), (9, 1, 4), (0, 4, 5), (7, 5, 7)]):
        x = np.vstack([call["x"][first:last], np.full((T - (last - first), D), np.nan, np.float32)])
        counts = np.full(N, call["num_accepted_tokens"][n], INT)
        alone = {
            **call,
            "x": x,
            "query_start_loc": packed(last - first),
            "state_indices": slot_array(slot),
            "num_accepted_tokens": counts,
        }
        got, got_pool = causal_conv1d_update(**alone)
        same(np.asarray(got)[: last - first], y[first:last])
        same(np.asarray(got_pool)[slot], pool[slot])


def test_mtp_08_rejected_tokens_leave_no_trace() -> None:
    """Acceptance 3, 1, 2, 3, 1 with drafts of 1e3 behind the accepted ones."""
    rng = np.random.default_rng(17)
    weights, stream = conv_inputs(rng), normal(rng, 20, D)
    del weights["x"]
    want = reference.causal_conv1d(stream[None], **weights)[0][0]
    pool: Any = np.zeros((SLOTS, D, W - 1 + S), np.float32)
    done, accepted = 0, 1
    for correct in (3, 1, 2, 3, 1):
        x = np.full((T, D), 1e3, np.float32)
        x[:correct] = stream[done : done + correct]
        y, pool = causal_conv1d_update(
            x, **weights, conv_state=pool, state_indices=slot_array(6), has_initial_state=np.ones(N, bool),
            query_start_loc=packed(3), num_accepted_tokens=np.full(N, accepted, INT),
        )  # fmt: skip
        close(np.asarray(y)[:correct], want[done : done + correct], 2e-6)
        done, accepted = done + correct, correct


def test_mtp_11_read_one_slot_write_another() -> None:
    call = prefill(np.random.default_rng(18), (4,), (5,))
    call["conv_state"][5] = np.nan
    call |= {"initial_state_indices": slot_array(2), "num_accepted_tokens": np.full(N, 2, INT)}
    y, pool = agree(call, [5])
    assert np.isfinite(y).all()
    same(pool[5, :, :3], call["x"][1:4].T)
    assert np.isnan(pool[5, :, 3:]).all(), "columns from W - 1 on stay as they were"


def test_mtp_12_counts_are_data_not_constants() -> None:
    """One compilation for counts 1, 3, 2, 1; then a prefill after two accepted reads the last three accepted inputs."""
    traced = []
    call = prefill(np.random.default_rng(19), (2,), (4,))

    @jax.jit
    def step(pool: Any, counts: Any) -> Any:
        traced.append(1)
        return causal_conv1d_update(**{**call, "conv_state": pool}, num_accepted_tokens=counts)

    pool = call["conv_state"]
    for count in (1, 3, 2, 1):
        counts = np.full(N, count, INT)
        want = reference.causal_conv1d_update(**{**call, "conv_state": pool}, num_accepted_tokens=counts)
        y, pool = step(pool, counts)
        close(y, want[0], 2e-6)
        close(pool, want[1], 0)
    assert len(traced) == 1
    y, _ = causal_conv1d(**{**call, "conv_state": pool}, num_accepted_tokens=np.full(N, 2, INT))
    history = np.asarray(pool)[4, :, 1:4]
    want, _ = reference.causal_conv1d(
        call["x"][:2], call["weight"], call["bias"], conv_state=history[None], query_start_loc=[0, 2]
    )
    close(np.asarray(y)[:2], want, 2e-6)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 17])
def test_mtp_16_verify_equals_single_steps(length: int) -> None:
    rng = np.random.default_rng(20)
    call: dict[str, Any] = conv_inputs(rng, 2 * length, D=8)
    call |= dict(
        conv_state=normal(rng, 3, 8, 2 + length), state_indices=np.array([2, 0]), query_start_loc=starts(length, length)
    )
    call["num_accepted_tokens"] = np.array([1, length], INT)
    y, _ = agree(call, [2, 0], update=True)
    single = np.stack([call["conv_state"][2, :, :3], call["conv_state"][0, :, length - 1 : length + 2]])
    for t in range(length):
        want, single = causal_conv1d_update(call["x"][t::length], call["weight"], call["bias"], conv_state=single)
        close(want, y[t::length], 2e-6)
    too_long = {
        **call,
        "x": np.vstack([call["x"], call["x"][:1]]),
        "query_start_loc": np.array([0, length, 2 * length + 1]),
    }
    zero(causal_conv1d_update(**too_long)[0][length:])


def test_num_06_a_sequence_alone_and_among_others() -> None:
    """Across static shapes within rounding, the state bit for bit (the property tests: all bits at one static shape)."""
    call = prefill(np.random.default_rng(21), (5, 7, 4), (3, 8, 1))
    y, pool = causal_conv1d(**call)
    alone = {**call, "x": call["x"][5:12], "query_start_loc": starts(7), "state_indices": np.array([8], INT)}
    alone["has_initial_state"] = np.ones(1, bool)
    got, got_pool = causal_conv1d(**alone)
    close(got, np.asarray(y)[5:12].astype(np.float64), 1e-6)
    same(np.asarray(got_pool)[8], np.asarray(pool)[8])


def test_pre_08_empty_sequences() -> None:
    call = prefill(
        np.random.default_rng(22),
        (0, 5, 0, 4, 0),
        (0, 1, 2, 3, 4),
        has_initial_state=np.array([0, 1, 0, 1, 1, 0], bool),
    )
    agree(call, [1, 3])


def test_slot_01_and_02_padding_does_not_wrap() -> None:
    call = prefill(np.random.default_rng(23), (3, 2, 4), (1, -1, -1))
    call["x"][3:] = 1e4
    y, _ = agree(call, [1])
    zero(y[3:])
    step = {**call, "state_indices": slot_array(0, 2, -1), "x": call["x"][:N]}
    del step["query_start_loc"]
    agree(step, [0, 2], update=True)


def test_slot_04_stale_ids_in_padding_rows() -> None:
    """Rows 2 and 3 carry the slots of rows 0 and 1; being empty, they write nothing. Repeated runs agree bit for bit."""
    call = prefill(np.random.default_rng(24), (2, 3), (3, 1, 3, 1))
    first = agree(call, [3, 1])
    for _ in range(20):
        for x, y in zip(causal_conv1d(**call), first):
            same(x, y)


def test_slot_06_fresh_rows_in_decode() -> None:
    call = prefill(np.random.default_rng(25), (), (4, 2), has_initial_state=np.array([1, 0, 1, 1, 1, 1], bool))
    del call["query_start_loc"]
    call["x"] = call["x"][:N]
    call["conv_state"][2] = np.nan
    y, pool = agree(call, [4, 2], update=True)
    assert np.isfinite(y).all() and np.isfinite(pool[2, :, :3]).all()
    want, _ = reference.causal_conv1d(call["x"][None, 1:2], call["weight"], call["bias"])
    close(y[1], want[0, 0], 2e-6)


def test_slot_07_a_slot_used_again() -> None:
    call = prefill(np.random.default_rng(26), (10,), (2,), has_initial_state=np.zeros(N, bool))
    first, pool = causal_conv1d(**call)
    for x, y in zip(causal_conv1d(**{**call, "conv_state": pool}), (first, pool)):
        same(x, y)


def test_srv_03_one_wild_slot_of_four() -> None:
    call = prefill(np.random.default_rng(27), (3, 4, 5, 2), (0, 75, 7, 2))
    agree(call, [0, 7, 2])


def test_jax_03_padding_is_zero_not_somebody_elses_data() -> None:
    call = prefill(np.random.default_rng(28), (3, 4), (-1, 5))
    for _ in range(3):
        jnp.full((T, D), jnp.nan).block_until_ready()
        y, _ = causal_conv1d(**call)
        zero(np.asarray(y)[np.r_[:3, 7:T]])


def test_jax_11_defaults_are_what_they_stand_for() -> None:
    call = prefill(np.random.default_rng(29), (3, 4), (2, 5))
    want = causal_conv1d(**call)
    written = dict(initial_state_indices=call["state_indices"], num_accepted_tokens=np.ones(N, INT))
    for x, y in zip(causal_conv1d(**call, **written), want):
        same(x, y)
    for x, y in zip(causal_conv1d(**{**call, "has_initial_state": None}), want):
        same(x, y)
    none, zeros = (causal_conv1d(**{**call, "bias": bias}) for bias in (None, np.zeros(D, np.float32)))
    for x, y in zip(none, zeros):
        same(x, y)
    rows = {**call, "query_start_loc": starts(*[2] * N), "state_indices": None}
    for x, y in zip(causal_conv1d(**rows), causal_conv1d(**{**rows, "state_indices": np.arange(N, dtype=INT)})):
        same(x, y)
    with pytest.raises(ValueError, match="num_slots=3"):
        causal_conv1d(**{**rows, "conv_state": call["conv_state"][:3]})


def test_scale_02_last_row_of_many() -> None:
    x = np.ones((65537, 2), np.float32)
    x[-1] = 5
    weight = np.array([[1, 10, 100, 1000]] * 2, np.float32)
    y, last = causal_conv1d(x, weight, query_start_loc=starts(65537), activation=None)
    y = np.asarray(y)
    assert (y[3:-1] == 1111).all() and (y[-1] == 5111).all() and (y[0] == 1000).all()
    same(np.asarray(last)[0], np.array([[1, 1, 5]] * 2, np.float32))


def test_per_token_arrays_are_not_changed() -> None:
    """numpy arguments stay as they are."""
    call = prefill(np.random.default_rng(30), (3, 4), (2, 5))
    before = {name: np.copy(x) for name, x in call.items()}
    causal_conv1d(**call)
    for name, x in at(before, slice(None)).items():
        same(call[name], x)
