"""The verify step: one read of the accepted state, one write a token, the state in registers between a sequence's tokens.

    per token: M <- e^g M;   u = beta (v - M^T k');   M <- M + k' u^T;   o = M^T q';   store M

A sequence of L tokens moves (1 + L) HV K V elements of state. A CTA takes one tile of one value head through all its tokens.
What the tokens need (k, q, v, gates, where to store) is fetched before the first of them, because no load passes a store; the
tile leaves through two buffers in turn, so that a token does not wait for the store of the one before.

| tiles | when |
|---|---|
| 32 columns | N HV <= 64 |
| 64 columns, swizzled | else |
| 128 columns, swizzled | 16-bit states, N HV > 64 |
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import by_tma, f32, i32, launch, layout_of_tile, load, rule_step, swizzled, tokens_of
from gdn_jax.varlen import inside

BUFFERS = 2


def columns_of_tile(n: int, num_v_heads: int, k_dim: int, v_dim: int, itemsize: int) -> int:
    """`vb`: how many columns of a state one CTA takes."""
    if n * num_v_heads <= 64:
        return 32
    return 128 if itemsize == 2 and v_dim >= 128 and k_dim <= 128 else 64


def mtp(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: Array,
    read_indices: Array,
    write_indices: Array,
    num_accepted_tokens: Array,
    query_start_loc: Array,
    layer: Array,
    scale: Array,
    *,
    use_qk_l2norm: bool,
) -> tuple[Array, Array]:
    """`q`, `k` `[T, H, K]`, `v` `[T, HV, V]`, `g`, `beta` `[T, HV]`, `pool` `[L, num_slots, HV, K, V]`; `read_indices`,
    `write_indices` `[N, S + 1]`, `num_accepted_tokens` `[N]`, `query_start_loc` `[N + 1]`, `layer` int32 of any value. T, N, L
    and num_slots are at least 1.

    Returns `o` `[T, HV, V]` in `v.dtype` and the updated pool.
    """
    (num_tokens, num_k_heads, k_dim), (_, num_v_heads, v_dim) = q.shape, v.shape
    n, longest = read_indices.shape
    num_layers, num_slots = pool.shape[:2]
    vb = columns_of_tile(n, num_v_heads, k_dim, v_dim, pool.dtype.itemsize)
    layout = layout_of_tile(vb, pool.dtype)
    of_k, of_v = layout.reduce(1), layout.reduce(0)

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, g_ref, beta_ref, layer_ref, scale_ref = refs[:7]
        read_ref, write_ref, accepted_ref, loc_ref = refs[7:11]
        pool_ref, o_ref, tile_sm, q_sm, k_sm, v_sm, tile_arrived, rest_arrived = refs[11:]
        i, hv, part = (lax.axis_index(name) for name in ("n", "hv", "part"))
        h, cols = lax.div(hv, i32(num_v_heads // num_k_heads)), pl.ds(part * vb, vb)
        start, end = tokens_of(loc_ref, i, num_tokens)
        length, accepted, at = end - start, accepted_ref[i], layer_ref[0]
        slot = read_ref[i, jnp.clip(accepted - 1, 0, longest - 1)]
        valid = inside(slot, num_slots) & inside(at, num_layers)
        valid &= inside(accepted - 1, longest) & (length <= longest)

        @pl.when(valid & (length > 0))
        def _() -> None:
            plgpu.copy_gmem_to_smem(pool_ref.at[at * num_slots + slot, hv, :, cols], tile_sm.at[0], tile_arrived)
            tokens = [jnp.minimum(start + t, num_tokens - 1) for t in range(longest)]
            for t, token in enumerate(tokens):
                plgpu.copy_gmem_to_smem(k_ref.at[token, h], k_sm.at[t], rest_arrived)
                plgpu.copy_gmem_to_smem(q_ref.at[token, h], q_sm.at[t], rest_arrived)
                plgpu.copy_gmem_to_smem(v_ref.at[token, hv, cols], v_sm.at[t, pl.ds(0, vb)], rest_arrived)
            targets = [write_ref[i, t] for t in range(longest)]
            decays = [jnp.exp(g_ref[token, hv]) for token in tokens]
            writes = [beta_ref[token, hv] for token in tokens]
            factor = scale_ref[0]
            plgpu.barrier_wait(rest_arrived)
            plgpu.barrier_wait(tile_arrived)
            m = load(tile_sm.at[0], layout)
            for t in range(longest):
                # A token beyond the sequence is computed like the others (the state after it is nobody's), and stored nowhere.
                real = length > t
                query, key, value = load(q_sm.at[t], of_k), load(k_sm.at[t], of_k), load(v_sm.at[t, pl.ds(0, vb)], of_v)
                m, o = rule_step(m, query, key, value, decays[t], writes[t], factor, use_qk_l2norm, layout)
                store, buffer = real & inside(targets[t], num_slots), tile_sm.at[t % BUFFERS]

                @pl.when(store)
                def _() -> None:
                    plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
                    buffer[...] = m.astype(pool.dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(buffer, pool_ref.at[at * num_slots + targets[t], hv, :, cols])

                @pl.when(jnp.logical_not(store))  # no store was begun: the count above would be one too few
                def _() -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                @pl.when(real)
                def _() -> None:
                    o_ref[tokens[t], hv, cols] = o.astype(v.dtype)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # Zeros for the tokens of padding, and behind the last sequence.
        def zero(token: Array, _: None) -> None:
            o_ref[token, hv, cols] = plgpu.layout_cast(jnp.zeros((vb,), v.dtype), of_v)

        lax.fori_loop(jnp.where(valid, end, start), end, zero, None)
        lax.fori_loop(end, jnp.where(i == n - 1, num_tokens, end), zero, None)

    tokens = (q, k, v, g.astype(f32), beta.astype(f32), layer[None], scale[None])
    o, pool = launch(
        body,
        "gdn_mtp",
        dict(n=n, hv=num_v_heads, part=v_dim // vb),
        (*tokens, read_indices, write_indices, num_accepted_tokens, query_start_loc),
        (pool,),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        (
            plgpu.SMEM((BUFFERS, k_dim, vb), pool.dtype, transforms=swizzled(pool.dtype) if by_tma(vb) else ()),
            # A row of v begins at a multiple of 128 bytes, where a TMA copy may end.
            *(plgpu.SMEM((longest, size), v.dtype) for size in (k_dim, k_dim, max(vb, 64))),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=3 * longest),
        ),
    )
    return o, pool
