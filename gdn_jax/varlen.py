"""Ragged batches on the device: which tokens, slots and chunks belong to which sequence.

Everything here is static in shape and safe for any value: a malformed `query_start_loc` or a wild slot gives unspecified
results, never an index outside the arrays.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

INT32_MAX = 2**31 - 1


class Batch(NamedTuple):
    """The sequences of a batch, `N` of them, with every rule on padding applied.

    Attributes:
        starts: int32 `[N]`, the first token.
        lengths: int32 `[N]`, the number of tokens; 0 for padding as for empty sequences.
        read: int32 `[N]`, the slot to start from; -1: start from zeros.
        write: int32 `[N]`, the slot to update; -1: none (padding or empty).
        offset: int32 `[N]`, accepted tokens - 1 of the last verify step; 0 where nobody asks.
        layer: int32 scalar, the layer of a stacked pool (0 for a pool that is not stacked).
    """

    starts: Array
    lengths: Array
    read: Array
    write: Array
    offset: Array
    layer: Array


def narrow(index: Array | np.ndarray) -> Array:
    """An integer array as int32, saturated: what does not fit stays outside every pool. Negative values become -1."""
    limits = jnp.iinfo(index.dtype)  # numpy's own does not know int4
    least, most = int(limits.min), int(limits.max)
    xp = jnp if isinstance(index, Array) else np
    if most > INT32_MAX:  # also judged before narrowing: uint32, int64, uint64
        index = xp.clip(index, max(least, -1), INT32_MAX)
    return jnp.asarray(index.astype(np.int32))


def stacked(pool: Array, layer: Array | None) -> tuple[Array, Array]:
    """A pool as `[L, num_slots, …]` and the layer in it, whether it came so or as the pool of one layer."""
    return (pool[None], jnp.int32(0)) if layer is None else (pool, layer)


def unstacked(pool: Array, layer: Array | None) -> Array:
    """The way back from `stacked`."""
    return pool[0] if layer is None else pool


def slots_of(state_indices: Array | None, num_sequences: int) -> Array:
    """Int32 `[N]`: the slots given, or for None row n for sequence n."""
    return jnp.arange(num_sequences, dtype=jnp.int32) if state_indices is None else state_indices


def inside(index: Array, size: int | Array) -> Array:
    """Bool, like `index` (int32): whether it names one of `size` rows."""
    return (index >= 0) & (index < size)


def where_inside(index: Array, size: int, also: Array | bool = True) -> Array:
    """`index` where it names one of `size` rows (and `also` holds), else -1."""
    return jnp.where(inside(index, size) & also, index, -1)


def sequences(query_start_loc: Array, num_tokens: int) -> tuple[Array, Array]:
    """`query_start_loc` int32 `[N + 1]` to starts and lengths `[N]`, all inside `[0, num_tokens]`."""
    starts = jnp.clip(query_start_loc[:-1], 0, num_tokens)
    return starts, jnp.clip(query_start_loc[1:], starts, num_tokens) - starts


def equal_starts(num_sequences: int, length: int) -> Array:
    """The `query_start_loc` of `num_sequences` sequences of `length` tokens each."""
    return jnp.arange(num_sequences + 1, dtype=jnp.int32) * length


def resolve(
    *,
    starts: Array,
    lengths: Array,
    num_slots: int,
    num_layers: int,
    layer: Array,
    state_indices: Array | None,
    has_initial_state: Array | None = None,
    initial_state_indices: Array | None = None,
    num_accepted_tokens: Array | None = None,
    max_accepted: int = 1,
    max_length: int | None = None,
) -> Batch:
    """Applies the rules of padding: any slot, layer or accepted count out of range makes the sequence padding."""
    n = starts.shape[0]
    slot = slots_of(state_indices, n)
    has = jnp.ones(n, bool) if has_initial_state is None else has_initial_state
    ok = inside(slot, num_slots) & inside(layer, num_layers)
    if max_length is not None:
        ok &= lengths <= max_length
    offset = jnp.zeros(n, jnp.int32)
    if num_accepted_tokens is not None:
        ok &= inside(num_accepted_tokens - 1, max_accepted) | ~has
        offset = jnp.where(has & ok, num_accepted_tokens - 1, 0)
    source = slot if initial_state_indices is None else initial_state_indices
    lengths = jnp.where(ok, lengths, 0)
    write = jnp.where(lengths > 0, slot, -1)
    read = where_inside(source, num_slots, has & (lengths > 0))
    return Batch(starts, lengths, read, write, offset, jnp.where(inside(layer, num_layers), layer, 0))


def state_rows(batch: Batch, per_slot: int) -> Batch:
    """The same batch on a pool with `per_slot` rows a slot: the accepted one is read, the first written."""
    read = jnp.where(batch.read < 0, -1, batch.read * per_slot + batch.offset)
    return batch._replace(read=read, write=jnp.where(batch.write < 0, -1, batch.write * per_slot))


def accepted_slots(read_indices: Array, num_accepted_tokens: Array) -> Array:
    """Int32 `[N]`: what stands at the accepted column of `read_indices` `[N, S + 1]`; a count out of range is clipped."""
    column = jnp.clip(num_accepted_tokens - 1, 0, read_indices.shape[1] - 1)
    return jnp.take_along_axis(read_indices, column[:, None], axis=1, mode="clip")[:, 0]


def resolve_verify(
    *,
    starts: Array,
    lengths: Array,
    num_slots: int,
    num_layers: int,
    layer: Array,
    read_indices: Array,
    num_accepted_tokens: Array,
) -> Batch:
    """The same for `mtp_gated_delta_rule`: the slot to read stands at the accepted column of `read_indices` `[N, S + 1]`."""
    longest = read_indices.shape[1]
    return resolve(
        starts=starts,
        lengths=lengths,
        num_slots=num_slots,
        num_layers=num_layers,
        layer=layer,
        state_indices=accepted_slots(read_indices, num_accepted_tokens),
        num_accepted_tokens=num_accepted_tokens,
        max_accepted=longest,
        max_length=longest,
    )


def token_table(batch: Batch, num_tokens: int) -> tuple[Array, Array]:
    """For each of `num_tokens` (> 0) tokens whether it is valid (bool `[T]`), and its position in its sequence (int32 `[T]`)."""
    if batch.starts.shape[0] == 0:
        return jnp.zeros(num_tokens, bool), jnp.zeros(num_tokens, jnp.int32)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    # The last sequence that starts at or before the token: of several that start there, all but the last are empty.
    n = jnp.searchsorted(batch.starts, token, side="right").astype(jnp.int32) - 1
    n = jnp.maximum(n, 0)
    position = token - batch.starts[n]
    return (position >= 0) & (position < batch.lengths[n]), position


def valid_tokens(batch: Batch, num_tokens: int) -> Array:
    """The first half of `token_table`, token against sequence: T N comparisons, but no loop, which a GPU would launch."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    return jnp.any(inside(token - batch.starts, batch.lengths), axis=1)


class Chunks(NamedTuple):
    """The chunks of a batch, sequence after sequence; each array has one entry a chunk.

    Attributes:
        sequence: int32, the sequence it belongs to.
        start: int32, its first token; `num_tokens` for the unused entries at the end.
        tokens: int32, how many; 0 for the unused entries.
        first: bool, whether it is the first of its sequence.
        last: bool, whether it is the last.
    """

    sequence: Array
    start: Array
    tokens: Array
    first: Array
    last: Array


def chunk_table(starts: Array, lengths: Array, num_tokens: int, chunk_size: int) -> Chunks:
    """Cuts `N` > 0 sequences into chunks, each aligned to the start of its own sequence.

    The number of entries is the static bound `num_tokens // chunk_size + N`, however the tokens are spread.
    """
    n = starts.shape[0]
    per_sequence = -(-lengths // chunk_size)
    ends = jnp.cumsum(per_sequence, dtype=jnp.int32)
    entry = jnp.arange(num_tokens // chunk_size + n, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, entry, side="right").astype(jnp.int32), n - 1)
    nth = entry - (ends - per_sequence)[sequence]
    left = lengths[sequence] - nth * chunk_size
    used = entry < ends[-1]
    return Chunks(
        sequence=sequence,
        start=jnp.where(used, starts[sequence] + nth * chunk_size, num_tokens),
        tokens=jnp.where(used, jnp.minimum(left, chunk_size), 0),
        first=used & (nth == 0),
        last=used & (left <= chunk_size),
    )


def tile_table(starts: Array, lengths: Array, num_tokens: int, size: int) -> tuple[Array, Array, Array]:
    """The same chunks without a search and without a loop, which a GPU would launch: N comparisons an entry.

    Returns the sequence, the first token and the number of tokens (0: unused) of each entry, int32, as many entries as
    `chunk_table` has, the used ones first.
    """
    base = tile_base(lengths, num_tokens, size)
    entry = jnp.arange(num_tokens // size + starts.shape[0], dtype=jnp.int32)
    # No comparison with base[0], which is 0.
    sequence = jnp.sum(base[None, 1:] <= entry[:, None], axis=1, dtype=jnp.int32)
    first = (entry - base[sequence]) * size
    tokens = jnp.clip(lengths[sequence] - first, 0, size)
    return sequence, jnp.where(tokens > 0, starts[sequence] + first, 0), tokens


def tile_base(lengths: Array, num_tokens: int, size: int) -> Array:
    """The entry of `tile_table` where each sequence has its first chunk; none of its entries is outside the table."""
    tiles, n = -(-lengths // size), jnp.arange(lengths.shape[0], dtype=jnp.int32)
    base = jnp.sum(jnp.where(n < n[:, None], tiles, 0), axis=1, dtype=jnp.int32)
    return jnp.minimum(base, num_tokens // size + lengths.shape[0] - tiles)
