"""gdn_jax.varlen against plain Python: tables of tokens and chunks, the rules of padding, wild values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
    HUGE,
    INT,
    Ragged,
    given,
    ragged,
    same,
    settings,
    st,
    starts,
)

from gdn_jax import varlen

T, N, SLOTS, S, CHUNK = 40, 6, 14, 2, 8

resolve = jax.jit(
    lambda starts, lengths, layer, **indices: varlen.resolve(
        starts=starts, lengths=lengths, num_slots=SLOTS, num_layers=3, layer=layer, max_accepted=S + 1, **indices
    )
)
sequences = jax.jit(varlen.sequences, static_argnums=1)
token_table = jax.jit(varlen.token_table, static_argnums=1)
valid_tokens = jax.jit(varlen.valid_tokens, static_argnums=1)
state_rows = jax.jit(varlen.state_rows, static_argnums=1)
chunk_table = jax.jit(varlen.chunk_table, static_argnums=(2, 3))
tile_table = jax.jit(varlen.tile_table, static_argnums=(2, 3))
tile_base = jax.jit(varlen.tile_base, static_argnums=(1, 2))


def resolved(batch: Ragged, layer: int = 0) -> varlen.Batch:
    first, lengths = sequences(batch.starts, T)
    indices = dict(
        state_indices=batch.slots,
        has_initial_state=batch.has,
        initial_state_indices=batch.sources,
        num_accepted_tokens=batch.accepted,
    )
    return resolve(first, lengths, jnp.int32(layer), **indices)


if st is not None:

    @settings(max_examples=40)
    @given(ragged(T, N, SLOTS, S))
    def test_random_batches(batch: Ragged) -> None:
        got = resolved(batch)
        lengths = np.diff(batch.starts)
        for n in range(N):
            read = batch.reads[n]
            assert got.lengths[n] == (lengths[n] if batch.live[n] else 0)
            assert got.write[n] == (batch.slots[n] if batch.live[n] else -1)
            assert got.read[n] == (-1 if read is None else read)
            if read is not None:
                assert got.offset[n] == batch.accepted[n] - 1
        valid, position = token_table(got, T)
        want = np.zeros(T, bool)
        want[batch.tokens()] = True
        same(valid, want)
        same(valid_tokens(got, T), want)
        rows = state_rows(got, S + 1)
        for n in range(N):
            assert rows.write[n] == (got.write[n] * (S + 1) if batch.live[n] else -1)
            assert rows.read[n] == (-1 if got.read[n] < 0 else got.read[n] * (S + 1) + got.offset[n])
            if batch.live[n]:
                part = slice(batch.starts[n], batch.starts[n + 1])
                same(np.asarray(position)[part], np.arange(lengths[n], dtype=INT))

        chunks = chunk_table(got.starts, got.lengths, T, CHUNK)
        assert chunks.start.shape == (T // CHUNK + N,)
        rows = [
            (n, int(batch.starts[n]) + at, min(CHUNK, int(lengths[n]) - at), at == 0, at + CHUNK >= lengths[n])
            for n in range(N)
            if batch.live[n]
            for at in range(0, int(lengths[n]), CHUNK)
        ]
        for entry in range(len(chunks.start)):
            if entry < len(rows):
                assert tuple(x[entry].item() for x in chunks) == rows[entry]
            else:
                assert (chunks.tokens[entry], chunks.first[entry], chunks.last[entry]) == (0, False, False)

        sequence, start, tokens = tile_table(got.starts, got.lengths, T, CHUNK)
        base = tile_base(got.lengths, T, CHUNK)
        for n in range(N):
            of_sequence = [entry for entry, row in enumerate(rows) if row[0] == n]
            assert not of_sequence or base[n] == of_sequence[0]
        for entry in range(len(tokens)):
            if entry < len(rows):
                assert (sequence[entry], start[entry], tokens[entry]) == rows[entry][:3]
            else:
                assert (start[entry], tokens[entry]) == (0, 0)

    @settings(max_examples=60)
    @given(
        st.lists(st.sampled_from([-(2**31), -5, 0, 1, 7, T - 1, T, T + 1, 2**31 - 1]), min_size=N + 1, max_size=N + 1),
        st.lists(st.sampled_from([-(2**31), -1, 0, 3, SLOTS, 2**31 - 1]), min_size=N, max_size=N),
    )
    def test_malformed_values_never_lead_outside(bounds: list[int], wild: list[int]) -> None:
        """Whatever the starts: every token, slot and chunk that would be touched is inside the arrays."""
        first, lengths = sequences(np.array(bounds, INT), T)
        indices = dict.fromkeys(("state_indices", "initial_state_indices", "num_accepted_tokens"), np.array(wild, INT))
        batch = resolve(first, lengths, jnp.int32(0), has_initial_state=np.ones(N, bool), **indices)
        begin, count = np.asarray(batch.starts), np.asarray(batch.lengths)
        assert (begin >= 0).all() and (count >= 0).all() and (begin + count <= T).all()
        for rows in (batch.read, batch.write):
            assert ((np.asarray(rows) >= -1) & (np.asarray(rows) < SLOTS)).all()
        assert ((np.asarray(batch.offset) >= 0) & (np.asarray(batch.offset) <= S)).all()
        valid, position = token_table(batch, T)
        assert (np.asarray(position)[np.asarray(valid)] >= 0).all()
        base, tiles = np.asarray(tile_base(batch.lengths, T, CHUNK)), -(-count // CHUNK)
        assert (base >= 0).all() and (base + tiles <= T // CHUNK + N).all()
        chunks = chunk_table(batch.starts, batch.lengths, T, CHUNK)
        begin, count = np.asarray(chunks.start), np.asarray(chunks.tokens)
        assert (count >= 0).all() and (count <= CHUNK).all()
        assert ((np.asarray(chunks.sequence) >= 0) & (np.asarray(chunks.sequence) < N)).all()
        assert (begin[count > 0] >= 0).all() and ((begin + count)[count > 0] <= T).all()


@pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1])
def test_a_layer_outside_makes_everything_padding(layer: int) -> None:
    ones = np.ones(N, INT)
    batch = resolve(
        jnp.arange(N, dtype=INT), ones, jnp.int32(layer), state_indices=np.arange(N, dtype=INT), has_initial_state=ones > 0,
        initial_state_indices=np.arange(N, dtype=INT), num_accepted_tokens=ones,
    )  # fmt: skip
    same(batch.write, np.full(N, -1, INT))
    same(batch.read, np.full(N, -1, INT))
    same(batch.lengths, np.zeros(N, INT))
    assert batch.layer == 0


def test_too_long_verify_sequences_are_padding() -> None:
    first, lengths = starts(4, 3, 0, 1)[:-1], np.array([4, 3, 0, 1], INT)
    rows = np.arange(12, dtype=INT).reshape(4, 3)
    batch = varlen.resolve_verify(
        starts=jnp.asarray(first), lengths=jnp.asarray(lengths), num_slots=11, num_layers=1, layer=jnp.int32(0),
        read_indices=jnp.asarray(rows), num_accepted_tokens=jnp.array([1, 2, 1, 3]),
    )  # fmt: skip
    same(batch.lengths, np.array([0, 3, 0, 0], INT))  # the last one reads row 11 of 11
    same(batch.read, np.array([-1, 4, -1, -1], INT))


@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray])
def test_narrow(wrap: Any) -> None:
    """int32 with saturation; what is outside every pool stays outside."""
    same(varlen.narrow(wrap(np.array([-5, 0, 7], np.int8))), np.array([-5, 0, 7], INT))
    same(varlen.narrow(wrap(np.array([0, 255], np.uint8))), np.array([0, 255], INT))
    same(varlen.narrow(wrap(np.array([-8, 7]).astype(jnp.int4))), np.array([-8, 7], INT))
    same(varlen.narrow(wrap(np.array([3, 2**32 - 1], np.uint32))), np.array([3, 2**31 - 1], INT))
    assert varlen.narrow(wrap(np.array([2**31 - 1], INT)))[0] == 2**31 - 1


def test_narrow_judges_before_it_narrows() -> None:
    wide = np.array([HUGE, 2**32, -(2**32) + 1, -(2**63), 2**63 - 1, 3, -1])
    same(varlen.narrow(wide), np.array([2**31 - 1, 2**31 - 1, -1, -1, 2**31 - 1, 3, -1], INT))
    same(varlen.narrow(np.array([2**64 - 1, 5], np.uint64)), np.array([2**31 - 1, 5], INT))
    with jax.enable_x64(True):
        same(varlen.narrow(jnp.asarray(wide)), np.array([2**31 - 1, 2**31 - 1, -1, -1, 2**31 - 1, 3, -1], INT))


def test_stacked() -> None:
    pool = jnp.zeros((4, 2))
    assert [x.shape for x in varlen.stacked(pool, None)] == [(1, 4, 2), ()]
    same(varlen.stacked(pool, jnp.int32(3))[1], np.array(3, INT))
    assert varlen.stacked(pool, jnp.int32(3))[0] is pool


def test_equal_starts() -> None:
    same(varlen.equal_starts(3, 4), np.array([0, 4, 8, 12], INT))
    same(varlen.equal_starts(0, 4), np.array([0], INT))


def test_no_sequences() -> None:
    none = jnp.zeros(0, INT)
    batch = varlen.Batch(none, none, none, none, none, jnp.int32(0))
    valid, position = varlen.token_table(batch, 3)
    same(valid, np.zeros(3, bool))
    same(position, np.zeros(3, INT))
