"""The prefill form of causal_conv1d, and beside it, where asked, the gating: all that comes before the chunked rule.

    y[t] = act(bias + sum over i < W of weight[:, i] window_t[i]);   g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)

It moves the bytes of x and y and nothing else that counts: 4 D a token in bfloat16, of which an SM gets 18 a cycle, 4.5 channels.
There is time for 28 instructions a channel and token; W = 4 takes 13 or 14: W for the sum, 6 for silu, the rest to load, convert
and store. (A division in silu would make them 25, with a branch.)

A sequence owns the tokens up to where the next one starts, its own and padding behind them, cut into tiles. A CTA takes some
channels of a tile, vectors of up to 16 bytes a thread, and rolls a window over the tokens, so that a row is loaded and converted
once; the W - 1 rows before the tile are the neighbour's and come from the L2 cache. At the first tile of a sequence they are its
history, and the CTA moves the slot on too: nobody else touches these channels of it. The weights and the history, `[D, W]` with
the channel first, go through shared memory from a thread a channel to a vector a thread. One more CTA a tile does the gating.

| choice | when | why |
|---|---|---|
| 512 channels a CTA | they divide D, and 4 the row of x | 60 registers, so 8 CTAs on an SM with 8 rows each under way: 64 KB |
| 256, 128 | else | shorter vectors, aligned whatever the row |
| tiles of 64 tokens | there are 528 such CTAs, 4 for each of 132 SMs | 5 % of the rows are read twice |
| 32, 16 | else | more CTAs |
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import (
    SMS,
    block_layout,
    channels_layout,
    f32,
    i32,
    launch,
    load,
    log_decay,
    powers_of_two,
    sigmoid,
)
from gdn_jax.varlen import tile_table

MANY = 4 * SMS  # CTAs
WIDEST = 128  # heads of a piece
ROWS = 8  # tokens whose loads are under way together

Gates = tuple[Array, Array, int, int]


def channels_of_block(channels: int, columns: int, itemsize: int) -> int:
    """How many channels one CTA takes of `channels`, in rows of `columns` elements: a vector a thread, aligned in every row."""

    def fits(size: int) -> bool:
        vec = size // 128
        return channels % size == 0 and columns % vec == 0 and vec * itemsize <= 16

    return next(size for size in (512, 256, 128) if fits(size))


def tokens_of_tile(num_tokens: int, parts: int) -> int:
    """How many tokens one CTA takes, where the channels are cut into `parts`."""
    return next((size for size in (64, 32) if num_tokens * parts >= MANY * size), 16)


def rows_of_gates(num_v_heads: int) -> int:
    """How many tokens of a tile are gated at once: a power of two, 4 elements a thread."""
    heads = min(1 << num_v_heads.bit_length() - 1, WIDEST)
    return min(512 // heads, 16)


def tiles(starts: Array, lengths: Array, num_tokens: int, size: int) -> Array:
    """Int32 `[5, entries]`: the sequence of each tile, its first token, how many tokens it has (0: an unused entry), how many
    of them are valid, and where in its sequence it begins. Every token from `starts[0]` on is in one tile.
    """
    ends = jnp.append(starts[1:], i32(num_tokens))
    spans = jnp.maximum(ends - starts, 0)
    sequence, first, tokens = tile_table(starts, spans, num_tokens, size)
    position = first - starts[sequence]
    return jnp.stack([sequence, first, tokens, jnp.clip(lengths[sequence] - position, 0, tokens), position])


def silu(y: Array) -> Array:
    """y / (1 + e^-y), by the root of the reciprocal, which the special function unit has."""
    root = lax.rsqrt(1 + jnp.exp(-y))
    return y * root * root


def convolve(bias: Array | None, taps: list[Array], window: list[Array], activation: str | None) -> Array:
    """The output whose inputs are `window`, the oldest first."""
    y = taps[0] * window[0]
    y = y if bias is None else y + bias
    for tap, entry in zip(taps[1:], window[1:], strict=True):
        y += tap * entry
    return y if activation is None else silu(y)


def prologue(
    x: Array,
    weight: Array,
    bias: Array | None,
    pool: Array,
    starts: Array,
    lengths: Array,
    read: Array,
    write: Array,
    offset: Array,
    layer: Array,
    gates: Gates | None = None,
    *,
    activation: str | None,
) -> tuple[Array, tuple[Array, ...], Array]:
    """`x` `[T, C]`, of which the conv takes the first D columns; `weight` `[D, W]`, `bias` `[D]`, `pool` `[L, num_slots, D,
    W - 1 + S]`; then the fields of a `varlen.Batch`. `gates`: `A_log`, `dt_bias` `[HV]` and the columns of x where b and a begin.
    T, N, L and num_slots are at least 1; D is a multiple of 128; W is at most 8.

    Returns `y` `[T, D]` in `x.dtype`, float32 `(g, beta)` `[T, HV]` (without `gates` none), all zero at padding, and the
    updated pool, where the first W - 1 columns of a slot are the last inputs of its sequence and the others stay.
    """
    (num_tokens, columns), (channels, width), dtype = x.shape, weight.shape, x.dtype
    num_slots, history = pool.shape[1], width - 1
    size = channels_of_block(channels, columns, dtype.itemsize)
    parts = channels // size
    tile, per_tile = tokens_of_tile(num_tokens, parts), parts + (gates is not None)
    single, wide = channels_layout(size), channels_layout(size, size // 128)

    inputs = dict(
        x=x, weight=weight, bias=bias, table=tiles(starts, lengths, num_tokens, tile), lengths=lengths, read=read, write=write,
        offset=offset, layer=layer[None], A_log=gates and gates[0], dt_bias=gates and gates[1],
    )  # fmt: skip
    given = {name: array for name, array in inputs.items() if array is not None}

    def body(*refs: Any) -> None:
        ref = dict(zip(given, refs))
        pool_ref, y_ref, *gate_refs, taps_sm, history_sm, staged = refs[len(given) :]
        cta = lax.axis_index("cta")  # one axis: others end at 65,535
        entry, part = lax.div(cta, i32(per_tile)), lax.rem(cta, i32(per_tile))
        n, first, tokens, valid, position = (ref["table"][field, entry] for field in range(5))

        def of_channels() -> None:
            here, fresh = pl.ds(part * size, size), position == 0

            def one_each(source: Any) -> Array:
                return plgpu.load(source, layout=single, optimized=False)

            def zeros(dtype: Any, layout: Any) -> Array:
                return plgpu.layout_cast(jnp.zeros((size,), dtype), layout)

            def rows_of(i: Any) -> list[Array]:
                """The i-th ROWS tokens, as they are stored."""
                rows = ref["x"].at[pl.ds(first + i * ROWS, ROWS)]  # then a static row: one address for all
                return [plgpu.load(rows.at[t, here], layout=wide, optimized=False) for t in range(ROWS)]

            @pl.when(valid > 0)
            def _() -> None:
                done = lax.div(valid, i32(ROWS))
                before = lax.cond(
                    fresh,
                    lambda: [zeros(f32, wide) for _ in range(history)],
                    lambda: [load(ref["x"].at[first - history + j, here], wide) for j in range(history)],
                )
                for j in range(width):
                    taps_sm[j] = one_each(ref["weight"].at[here, j])

                @pl.when(fresh)
                def _() -> None:
                    length, source, target = ref["lengths"][n], ref["read"][n], ref["write"][n]
                    rows = [ref["layer"][0] * num_slots + slot for slot in (source, target)]

                    def old(column: Any) -> Array:
                        """A column of the history."""

                        def stored() -> Array:
                            return one_each(pool_ref.at[rows[0], here, ref["offset"][n] + column])

                        return lax.cond(source >= 0, stored, lambda: zeros(pool.dtype, single))

                    def new(j: int) -> Array:
                        """Column j of the row afterwards: entry `length + j` of history ++ x."""
                        token = length + (j - history)

                        def own() -> Array:
                            return load(ref["x"].at[first + token, here], single).astype(pool.dtype)

                        return lax.cond(token >= 0, own, lambda: old(length + j))

                    for j in range(history):
                        history_sm[j] = old(j)
                    after = [new(j) for j in range(history)]  # all is loaded before anything is stored

                    @pl.when(target >= 0)
                    def _() -> None:
                        for j in range(history):
                            pool_ref[rows[1], here, j] = after[j]

                plgpu.barrier_arrive(staged)
                plgpu.barrier_wait(staged)
                bias = load(ref["bias"].at[here], wide) if "bias" in ref else None
                taps = [load(taps_sm.at[j], wide) for j in range(width)]
                window = lax.cond(fresh, lambda: [load(history_sm.at[j], wide) for j in range(history)], lambda: before)

                def whole(i: Array, window: list[Array]) -> list[Array]:
                    """ROWS tokens."""
                    window = window + [row.astype(f32) for row in rows_of(i)]
                    y_rows = y_ref.at[pl.ds(first + i * ROWS, ROWS)]
                    for t in range(ROWS):
                        y_rows[t, here] = convolve(bias, taps, window[t : t + width], activation).astype(dtype)
                    return window[ROWS:]

                window = lax.fori_loop(0, done, whole, window)
                rest, at = lax.rem(valid, i32(ROWS)), first + done * ROWS

                @pl.when(rest > 0)
                def _() -> None:
                    last = at + rest - 1
                    few = window + [load(ref["x"].at[jnp.minimum(at + t, last), here], wide) for t in range(ROWS - 1)]
                    for t in range(ROWS - 1):

                        @pl.when(rest > t)
                        def _() -> None:
                            y_ref[at + t, here] = convolve(bias, taps, few[t : t + width], activation).astype(dtype)

            def zero(t: Array, _: None) -> None:
                y_ref[first + t, here] = zeros(dtype, wide)

            lax.fori_loop(valid, tokens, zero, None)

        def of_gates(A_log: Array, dt_bias: Array, first_b: int, first_a: int) -> None:
            g_ref, beta_ref = gate_refs
            pieces = list(powers_of_two(A_log.shape[0], WIDEST))

            def block(at: Any, rows: int) -> None:
                for head, heads in pieces:
                    tokens, here, layout = pl.ds(at, rows), pl.ds(head, heads), block_layout(rows, heads)

                    def of_heads(name: str) -> Array:
                        vector = load(ref[name].at[here], layout.reduce(0))
                        return plgpu.layout_cast(lax.broadcast_in_dim(vector, (rows, heads), (1,)), layout)

                    b, a = (
                        load(ref["x"].at[tokens, pl.ds(column + head, heads)], layout) for column in (first_b, first_a)
                    )
                    g = log_decay(of_heads("A_log"), a, of_heads("dt_bias"))
                    g_ref[tokens, here] = g
                    beta_ref[tokens, here] = sigmoid(b)

            most = rows_of_gates(A_log.shape[0])
            done = lax.div(valid, i32(most))

            def whole(i: Array, _: None) -> None:
                block(first + i * most, most)

            lax.fori_loop(0, done, whole, None)
            at = first + done * most
            for rows in (size for _, size in powers_of_two(most - 1, most)):  # the powers of two that make up the rest
                some = (valid & rows) != 0

                @pl.when(some)
                def _() -> None:
                    block(at, rows)

                at += jnp.where(some, rows, 0)

            def zero(t: Array, _: None) -> None:
                for head, heads in pieces:
                    for out in gate_refs:
                        zeros = plgpu.layout_cast(jnp.zeros((1, heads), f32), block_layout(1, heads))
                        out[pl.ds(first + t, 1), pl.ds(head, heads)] = zeros

            lax.fori_loop(valid, tokens, zero, None)

        pl.when(part < parts)(of_channels)
        if gates is not None:
            pl.when(part == parts)(partial(of_gates, *gates))

    out = [jax.ShapeDtypeStruct((num_tokens, channels), dtype)]
    out += [jax.ShapeDtypeStruct((num_tokens, gates[0].shape[0]), f32)] * 2 if gates else []
    y, *g_and_beta, pool = launch(
        body,
        "gdn_prologue",
        dict(cta=given["table"].shape[1] * per_tile),
        tuple(given.values()),
        (pool,),
        tuple(out),
        (
            plgpu.SMEM((width, size), weight.dtype),
            plgpu.SMEM((history, size), pool.dtype),
            plgpu.Barrier(),
        ),
    )
    return y, tuple(g_and_beta), pool
