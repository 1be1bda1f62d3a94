"""The gated delta rule over whole prompts, in chunks.

For one chunk of C tokens and one value head, with M the state before it, b_i the sum of g from its start to i, and
D_ij = b_i - b_j formed as the sum of g over j + 1 … i (a difference of running sums loses the neighbours of a strong decay):

    A_ij = beta_i e^{D_ij} k_i.k_j  (j < i)      R = (I + A)^-1
    U    = R (beta (v - e^b k M))
    o    = e^b q M + tril(q k^T e^D) U           M <- e^{b_C} M + (e^{b_C - b} k)^T U

One loop walks over the chunks of all sequences, one sequence after the other. Everything inside a chunk is a product batched
over heads, which fills a CPU and stays in its cache; a short chunk takes a small tile, and sequences of one token go through
the recurrent loop.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.varlen import Batch, Chunks, chunk_table
from gdn_jax.xla.common import dot, f32, l2norm, masked, per_v_head, read_row, round_to, vary_like, write_row
from gdn_jax.xla.recurrent import recurrent

BLOCK = 16  # rows of the diagonal blocks that are inverted by substitution
SMALLEST_TILE, LARGEST_TILE = 16, 256
LEAST_G = -1e4  # e^g is 0 in float32 from -104 on; a finite sum of g's needs finite g's


def tile_size(chunk_size: int) -> int:
    """The rows of a tile: the power of two from `chunk_size` on, within what the inverse supports."""
    return min(max(SMALLEST_TILE, 1 << (chunk_size - 1).bit_length()), LARGEST_TILE)


def unit_lower_inverse(a: Array) -> Array:
    """`(I + a)^-1` for strictly lower triangular `a` `[B, C, C]`, C a power of two times `BLOCK`.

    Substitution on the diagonal blocks, then the merge of neighbours by products: [[P, 0], [X, Q]]^-1 has -Q^-1 X P^-1
    below the diagonal.
    """
    batch, size, _ = a.shape

    def blocks(row: int, rows: int, step: int) -> Array:
        """The blocks of `rows` rows at (row, 0), (row + step, step), …: `[size // step * B, rows, rows]`."""
        return jnp.concatenate([a[:, i + row : i + row + rows, i : i + rows] for i in range(0, size, step)])

    diagonal = blocks(0, BLOCK, BLOCK)
    unit = jnp.broadcast_to(jnp.eye(BLOCK, dtype=f32), diagonal.shape)
    inverse = lax.linalg.triangular_solve(diagonal, unit, left_side=True, lower=True, unit_diagonal=True)
    half = BLOCK
    while half < size:
        upper, lower = inverse.reshape(-1, 2, batch, half, half).swapaxes(0, 1)
        upper, lower = upper.reshape(-1, half, half), lower.reshape(-1, half, half)
        corner = -dot(lower, dot(blocks(half, half, 2 * half), upper))
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=2)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=2)], axis=1)
        half *= 2
    return inverse


def tile(
    m: Array, q: Array, k: Array, v: Array, g: Array, beta: Array, count: Array, *, scale: Array, use_qk_l2norm: bool
) -> tuple[Array, Array]:
    """One chunk: `m` `[HV, K, V]`; `q`, `k` `[C, H, K]`, `v` `[C, HV, V]`, `g`, `beta` `[C, HV]`, the first `count` rows valid.

    Returns the state after it and `o` `[C, HV, V]` (zeros behind `count`), float32.
    """
    size, num_v_heads = v.shape[:2]
    valid = jnp.arange(size) < count
    q, k, v, g, beta = (masked(x, valid).astype(f32).swapaxes(0, 1) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, g, beta = q * scale, jnp.maximum(g, LEAST_G), beta[..., None]
    below = jnp.tril(jnp.ones((size, size), bool), -1)
    on_or_below = jnp.tril(jnp.ones((size, size), bool))

    # D_ij = sum over l <= i of (g_l where l > j); e^b is the decay since the chunk's start.
    ones = jnp.broadcast_to(on_or_below.astype(f32), (num_v_heads, size, size))
    sums = dot(ones, jnp.where(below, g[..., None], 0))
    decay = jnp.where(on_or_below, jnp.exp(sums), 0)
    since_start = jnp.exp(sums[..., 0] + g[:, :1])[..., None]
    to_end = decay[:, -1, :, None]

    kk, qk = (per_v_head(dot(x, k, (2, 2)), num_v_heads) for x in (k, q))
    q, k = per_v_head(q, num_v_heads), per_v_head(k, num_v_heads)
    inverse = unit_lower_inverse(jnp.where(below, beta * decay * kk, 0))
    u = dot(inverse, beta * (v - dot(since_start * k, m)))
    o = dot(since_start * q, m) + dot(decay * qk, u)
    m = since_start[:, -1:] * m + dot(to_end * k, u, (1, 1))
    return m, masked(o.swapaxes(0, 1), valid)  # also where the state is not finite: these rows may be padding


Carry = tuple[Array, Array, Array]  # pool, o, and the state `[HV, K, V]` between two chunks


def _step(
    norm_and_size: tuple[bool, int], carry: Carry, inputs: list[Array], scale: Array, batch: Batch, entry: Chunks
) -> Carry:
    """One entry of the chunk table; an unused one writes zeros behind the tokens and changes nothing else."""
    use_qk_l2norm, size = norm_and_size
    pool, o, m = carry
    read, write = batch.read[entry.sequence], batch.write[entry.sequence]

    @functools.partial(jax.checkpoint, prevent_cse=False)  # a backward pass keeps the states between chunks, no more
    def compute(m: Array, inputs: list[Array], scale: Array) -> tuple[Array, Array]:
        def of(rows: int, m: Array) -> tuple[Array, Array]:
            q, k, v, g, beta = (lax.dynamic_slice_in_dim(x, entry.start, rows) for x in inputs)
            m, out = tile(m, q, k, v, g, beta, entry.tokens, scale=scale, use_qk_l2norm=use_qk_l2norm)
            return m, jnp.pad(round_to(out, o.dtype), ((0, size - rows), (0, 0), (0, 0)))

        if size == SMALLEST_TILE:
            return of(size, m)
        small, large = (functools.partial(of, rows) for rows in (SMALLEST_TILE, size))
        return lax.cond(entry.tokens > SMALLEST_TILE, large, small, m)

    m = lax.cond(entry.first, lambda: read_row(pool, batch.layer, read, zero=read < 0).astype(f32), lambda: m)
    m, out = compute(m, inputs, scale)
    pool = lax.cond(entry.last, lambda: write_row(pool, batch.layer, write, round_to(m, pool.dtype)), lambda: pool)
    # The zeros behind its tokens fall on rows that the chunks after this one fill.
    return pool, lax.dynamic_update_slice_in_dim(o, out, entry.start, 0), m


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _walk(
    norm_and_size: tuple[bool, int], carry: Carry, inputs: list[Array], scale: Array, batch: Batch, chunks: Chunks
) -> Carry:
    """All used entries of the chunk table, in order. As many steps as there are chunks, which no derivative can follow."""

    def step(i: Array, carry: Carry) -> Carry:
        return _step(norm_and_size, carry, inputs, scale, batch, Chunks(*(x[i] for x in chunks)))

    return lax.fori_loop(0, jnp.sum(chunks.tokens > 0, dtype=jnp.int32), step, carry)


@_walk.defjvp
def _walk_jvp(
    norm_and_size: tuple[bool, int], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Carry, Carry]:
    """The derivative: that of the same walk over all entries, used or not."""

    def scan(carry: Carry, inputs: list[Array], scale: Array, batch: Batch, chunks: Chunks) -> Carry:
        def step(carry: Carry, entry: Chunks) -> tuple[Carry, None]:
            return _step(norm_and_size, carry, inputs, scale, batch, entry), None

        return lax.scan(step, carry, chunks)[0]

    return jax.jvp(scan, primals, tangents)


def chunk(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: Array,
    batch: Batch,
    *,
    scale: Array,
    use_qk_l2norm: bool,
    chunk_size: int,
) -> tuple[Array, Array]:
    """`q`, `k` `[T, H, K]`, `v` `[T, HV, V]`, `g`, `beta` `[T, HV]`, `pool` `[L, num_slots, HV, K, V]`.

    Returns `o` `[T, HV, V]` in `v.dtype` and the updated pool.
    """
    num_tokens, n = v.shape[0], batch.starts.shape[0]
    if 0 in (num_tokens, n, *pool.shape[:2]):
        return jnp.zeros_like(v), pool
    inputs, size = [q, k, v, g, beta], tile_size(chunk_size)
    single = batch.lengths == 1
    chunks = chunk_table(batch.starts, jnp.where(single, 0, batch.lengths), num_tokens, size)
    padded = [jnp.pad(x, ((0, size), *[(0, 0)] * (x.ndim - 1))) for x in inputs]  # room for the last tile
    o = jnp.zeros((num_tokens + size, *v.shape[1:]), v.dtype)
    m = jnp.zeros(pool.shape[2:], f32)
    pool, o, m = (vary_like(x, pool, scale, *inputs, *batch) for x in (pool, o, m))
    walked: Any = _walk((use_qk_l2norm, size), (pool, o, m), padded, scale, batch, chunks)
    pool, o, _ = walked

    token = jnp.where(single, batch.starts, num_tokens)
    read, write = (jnp.where(single, x, -1) for x in (batch.read, batch.write))
    q, k, v, g, beta = (x.at[token].get(mode="fill", fill_value=0) for x in inputs)
    alone = batch._replace(read=read, write=write)
    out, pool = recurrent(q, k, v, g, beta, pool, alone, scale=scale, use_qk_l2norm=use_qk_l2norm)
    return o[:num_tokens].at[token].set(out, mode="drop"), pool
