"""Causal convolution over ragged batches: prefill, decode and verify are one computation.

    y[t] = act(bias + sum over i < W of weight[:, i] * window_t[i])       window_t: the last W entries of history ++ x up to t

The taps that fall inside the sequence are W shifted copies of x; those that fall into the history touch only its first
W - 1 tokens and are added there. The new row is a window of history ++ x.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.varlen import Batch, token_table
from gdn_jax.xla.common import f32, masked, round_to


def conv(
    x: Array,
    weight: Array,
    bias: Array | None,
    pool: Array,
    batch: Batch,
    *,
    activation: str | None,
    verify: bool,
) -> tuple[Array, Array]:
    """`x` `[T, D]`, `weight` `[D, W]`, `bias` `[D]`, `pool` `[L, num_slots, D, W - 1 + S]`.

    Returns `y` `[T, D]` in `x.dtype` and the updated pool: with `verify` a row afterwards holds the window of the first new
    token and on, else its first W - 1 columns the last W - 1 entries.
    """
    num_tokens, n = x.shape[0], batch.starts.shape[0]
    columns = weight.shape[1] - 1  # of history
    weight = weight.astype(f32).T
    if 0 in (num_tokens, n, *pool.shape[:2]):
        return jnp.zeros_like(x), pool
    source = jnp.where(batch.read < 0, pool.shape[1], batch.read)
    rows = pool.at[batch.layer, source].get(mode="fill", fill_value=0)
    rows = lax.optimization_barrier(rows).astype(f32)  # read before the pool is written, else XLA may copy it
    column = batch.offset[:, None, None] + jnp.arange(columns)
    history = jnp.take_along_axis(rows, column, axis=2, mode="clip").transpose(0, 2, 1)

    valid, position = token_table(batch, num_tokens)
    inputs = masked(x, valid).astype(f32)
    y = jnp.zeros((), f32) if bias is None else bias.astype(f32)
    for back in range(columns, -1, -1):
        shifted = jnp.pad(inputs, ((back, 0), (0, 0)))[:num_tokens]
        y = y + jnp.where((position >= back)[:, None], shifted, 0) * weight[columns - back]
    # Token p < W - 1 of a sequence: its window starts at column p of the history.
    head = jnp.arange(columns)
    from_history = jnp.stack(
        [sum(history[:, c] * weight[c - p] for c in range(p, columns)) for p in range(columns)], axis=1
    )
    token = jnp.where(head < batch.lengths[:, None], batch.starts[:, None] + head, num_tokens)
    y = y.at[token].add(from_history, mode="drop")
    y = y if activation is None else jax.nn.silu(y)
    y = round_to(masked(y, valid), x.dtype)

    def window(first: Array, size: int) -> Array:
        """Entries `first[n] + j`, j < size, of history ++ x of each sequence, zeros behind the end: `[N, D, size]`, float32."""
        entry = first[:, None] + jnp.arange(size)
        token = entry - columns
        inside = (token >= 0) & (token < batch.lengths[:, None])
        taken = x.at[jnp.where(inside, batch.starts[:, None] + token, num_tokens)].get(mode="fill", fill_value=0)
        kept = jnp.take_along_axis(history, jnp.clip(entry, 0, columns - 1)[..., None], axis=1, mode="clip")
        return jnp.where((token < 0)[..., None], kept, taken.astype(f32)).transpose(0, 2, 1)

    new = window(jnp.ones_like(batch.lengths), pool.shape[3]) if verify else window(batch.lengths, columns)
    target = jnp.where(batch.write < 0, pool.shape[1], batch.write)
    return y, pool.at[batch.layer, target, :, : new.shape[2]].set(round_to(new, pool.dtype), mode="drop")
