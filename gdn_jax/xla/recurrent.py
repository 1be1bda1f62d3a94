"""The gated delta rule, one token a sequence: a loop over sequences that updates each slot in place."""

import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.varlen import Batch
from gdn_jax.xla.common import f32, l2norm, masked, per_v_head, read_row, round_to, rule_step, vary_like, write_row


def tokens(
    q: Array, k: Array, v: Array, g: Array, beta: Array, valid: Array, scale: Array, use_qk_l2norm: bool
) -> tuple[Array, Array, Array, Array, Array]:
    """The float32 arguments of `rule_step` for many tokens: q scaled, q and k `[T, HV, K]`; zeros where `valid` `[T]` is not."""
    q, k, v, g, beta = (masked(x, valid).astype(f32) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    return per_v_head(q * scale, v.shape[1], 1), per_v_head(k, v.shape[1], 1), v, g, beta


def recurrent(
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
) -> tuple[Array, Array]:
    """`q`, `k` `[N, H, K]`, `v` `[N, HV, V]`, `g`, `beta` `[N, HV]`, `pool` `[L, num_slots, HV, K, V]`.

    Returns `o` `[N, HV, V]` in `v.dtype` and the updated pool.
    """

    if 0 in (v.shape[0], *pool.shape[:2]):
        return jnp.zeros_like(v), pool

    def step(pool: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
        read, write, *token = xs
        pad = write < 0  # some row is then read and written back as it is
        row = read_row(pool, batch.layer, jnp.where(read < 0, write, read), zero=(read < 0) & ~pad)
        m, o = rule_step(row.astype(f32), *(jnp.where(pad, 0, x) for x in token))
        row = jnp.where(pad, row, round_to(m, pool.dtype))
        return write_row(pool, batch.layer, write, row), jnp.where(pad, 0, o)

    xs = (batch.read, batch.write, *tokens(q, k, v, g, beta, batch.write >= 0, scale, use_qk_l2norm))
    pool, o = lax.scan(step, vary_like(pool, *xs), xs)
    return round_to(o, v.dtype), pool
