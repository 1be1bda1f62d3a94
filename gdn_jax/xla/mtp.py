"""The verify step: a loop over sequences, in it a loop over their tokens, the state float32 from the first to the last."""

import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.varlen import Batch, token_table, where_inside
from gdn_jax.xla.common import f32, read_row, round_to, rule_step, vary_like, write_row
from gdn_jax.xla.recurrent import tokens


def mtp(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: Array,
    write_indices: Array,
    batch: Batch,
    *,
    scale: Array,
    use_qk_l2norm: bool,
) -> tuple[Array, Array]:
    """`q`, `k` `[T, H, K]`, `v` `[T, HV, V]`, `g`, `beta` `[T, HV]`, `pool` `[L, num_slots, HV, K, V]`, `write_indices`
    `[N, S + 1]`. `batch.read` is the slot to start from; tokens go to `write_indices`, not to `batch.write`.

    Returns `o` `[T, HV, V]` in `v.dtype` and the updated pool.
    """
    num_tokens, longest = v.shape[0], write_indices.shape[1]
    if 0 in (num_tokens, batch.starts.shape[0], *pool.shape[:2]):
        return jnp.zeros_like(v), pool
    arguments = tokens(q, k, v, g, beta, token_table(batch, num_tokens)[0], scale, use_qk_l2norm)
    write_indices = where_inside(write_indices, pool.shape[1])

    def sequence(carry: tuple[Array, Array], xs: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        start, length, read, targets = xs
        pool, o = carry
        m = read_row(pool, batch.layer, read, zero=read < 0).astype(f32)

        def token(carry: tuple[Array, Array, Array], t: Array) -> tuple[tuple[Array, Array, Array], None]:
            pool, o, m = carry
            valid, at = t < length, jnp.minimum(start + t, num_tokens - 1)
            inputs = (jnp.where(valid, lax.dynamic_index_in_dim(x, at, keepdims=False), 0) for x in arguments)
            stepped, out = rule_step(m, *inputs)
            m = jnp.where(valid, stepped, m)
            old = read_row(pool, batch.layer, targets[t])
            row = jnp.where(valid & (targets[t] >= 0), round_to(m, pool.dtype), old)
            out = jnp.where(valid, out, lax.dynamic_index_in_dim(o, at, keepdims=False))
            return (
                write_row(pool, batch.layer, targets[t], row),
                lax.dynamic_update_index_in_dim(o, out, at, 0),
                m,
            ), None

        steps = jnp.arange(longest, dtype=jnp.int32)
        (pool, o, _), _ = lax.scan(token, (pool, o, vary_like(m, pool, o)), steps)
        return (pool, o), None

    xs = (batch.starts, batch.lengths, batch.read, write_indices)
    o = jnp.zeros(v.shape, f32)
    carry = (vary_like(pool, *xs, *arguments), vary_like(o, pool, *xs, *arguments))
    (pool, o), _ = lax.scan(sequence, carry, xs)
    return round_to(o, v.dtype), pool
