"""causal_conv1d_update: the conv of one token a sequence, or of a verify step, its history in slots that move on in place.

    y[t] = act(bias + sum over i < W of weight[:, i] window_t[i])

A sequence moves its conv rows, 2 D (W - 1 + S) elements, and 2 D a token; the weights come from the L2 cache for all but the
first. A CTA takes some channels of one sequence through all its tokens, one or more channels a thread: each is on its own, and
nothing goes through shared memory. All is loaded before anything is stored, because no load passes a store.

| channels a CTA | when | why |
|---|---|---|
| 512, 256 | there are 2,112 such CTAs, 16 for each of 132 SMs | four or two loads of a thread under way for each of its inputs |
| 128 | else, and in long windows | more CTAs; registers |
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import SMS, channels_layout, i32, keep, launch, load, sigmoid, tokens_of
from gdn_jax.varlen import inside

MANY = 16 * SMS  # CTAs
LONG = 8  # entries of a window: history and new inputs


def channels_of_block(n: int, channels: int, entries: int) -> int:
    """How many channels one CTA takes, of windows with so many entries."""
    wide = (512, 256) if entries <= LONG else ()
    return next((size for size in wide if channels % size == 0 and n * channels >= MANY * size), 128)


def load_channels(
    ref: dict[str, Any], pool_ref: Any, row: Any, here: Any, offset: Any, tokens: Any, has: Any, width: int, lanes: Any
) -> tuple[Array | None, list[Array], list[Array]]:
    """`(bias, taps, window)` of the channels `here`, of the refs bias, weight and x; the window is the history, from column
    `offset` of the pool's row on and zeros where not `has`, then the new inputs.
    """
    bias = load(ref["bias"].at[here], lanes) if "bias" in ref else None
    taps = [load(ref["weight"].at[here, j], lanes) for j in range(width)]
    history = [load(pool_ref.at[row, here, offset + j], lanes) for j in range(width - 1)]
    history = [old if has is None else keep(has, old, lanes) for old in history]
    return bias, taps, history + [load(ref["x"].at[token, here], lanes) for token in tokens]


def convolve(bias: Array | None, taps: list[Array], window: list[Array], t: int, activation: str | None) -> Array:
    """The output of the new token `t`."""
    y = taps[0] * window[t]
    for j in range(1, len(taps)):
        y += taps[j] * window[t + j]
    y = y if bias is None else y + bias
    return y if activation is None else y * sigmoid(y)


def new_column(window: list[Array], j: int, width: int, length: Array, lanes: Any) -> Array:
    """Column j of the row afterwards: of the window of the first new token and on, zeros behind the last of `length`."""
    value, t = window[j + 1], j - (width - 2)  # of which token
    return value if t < 1 else keep(length > t, value, lanes)


def conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    pool: Array,
    slots: Array,
    has_initial_state: Array | None,
    num_accepted_tokens: Array | None,
    query_start_loc: Array | None,
    layer: Array,
    *,
    activation: str | None,
) -> tuple[Array, Array]:
    """`x` `[T, D]`, `weight` `[D, W]`, `bias` `[D]`, `pool` `[L, num_slots, D, W - 1 + S]`, `slots` int32 `[N]` of any value,
    `has_initial_state` bool `[N]`, `layer` int32 of any value. With `query_start_loc` `[N + 1]` and perhaps
    `num_accepted_tokens` `[N]` a verify step, else T = N tokens of one sequence each. T, N, L and num_slots are at least 1.

    Returns `y` `[T, D]` in `x.dtype` and the updated pool.
    """
    (num_tokens, channels), width, n, dtype = x.shape, weight.shape[1], slots.shape[0], x.dtype
    num_layers, num_slots, _, columns = pool.shape
    verify = query_start_loc is not None
    longest = columns - (width - 1) + 1 if verify else 1
    size = channels_of_block(n, channels, width - 1 + longest)
    lanes, parts = channels_layout(size), channels // size

    inputs = dict(
        x=x, weight=weight, bias=bias, slots=slots, layer=layer[None], accepted=num_accepted_tokens, loc=query_start_loc,
        has=has_initial_state,
    )  # fmt: skip
    given = {name: array for name, array in inputs.items() if array is not None}

    def body(*refs: Any) -> None:
        ref = dict(zip(given, refs))
        pool_ref, y_ref = refs[len(given) :]
        cta = lax.axis_index("cta")  # one axis: others end at 65,535
        i, here = lax.div(cta, i32(parts)), pl.ds(lax.rem(cta, i32(parts)) * size, size)
        slot, at = ref["slots"][i], ref["layer"][0]
        has = ref["has"][i] if "has" in ref else None
        start, end, offset = i, i + 1, 0
        valid = inside(slot, num_slots) & inside(at, num_layers)
        if verify:
            start, end = tokens_of(ref["loc"], i, num_tokens)
            valid &= end - start <= longest
        if "accepted" in ref:
            offset = ref["accepted"][i] - 1
            offset = offset if has is None else jnp.where(has, offset, 0)
            valid &= inside(offset, longest)
        length, row = end - start, at * num_slots + slot

        @pl.when(valid & (length > 0))
        def _() -> None:
            tokens = [jnp.minimum(start + t, num_tokens - 1) for t in range(longest)]
            bias, taps, window = load_channels(ref, pool_ref, row, here, offset, tokens, has, width, lanes)
            for j in range(columns if verify else width - 1):
                pool_ref[row, here, j] = new_column(window, j, width, length, lanes).astype(pool.dtype)
            for t in range(longest):
                y = convolve(bias, taps, window, t, activation)

                @pl.when(length > t)
                def _() -> None:
                    y_ref[tokens[t], here] = y.astype(dtype)

        # Zeros for the tokens of padding, and behind the last sequence.
        def zero(token: Array, _: None) -> None:
            y_ref[token, here] = plgpu.layout_cast(jnp.zeros((size,), dtype), lanes)

        lax.fori_loop(jnp.where(valid, end, start), end, zero, None)
        if verify:
            lax.fori_loop(end, jnp.where(i == n - 1, num_tokens, end), zero, None)

    out = jax.ShapeDtypeStruct(x.shape, dtype)
    y, pool = launch(body, "gdn_conv", dict(cta=n * parts), tuple(given.values()), (pool,), out)
    return y, pool
