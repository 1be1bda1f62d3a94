"""The gated delta rule, one token a sequence: every state is read once and written once.

    M <- e^g M;   u = beta (v - M^T k');   M <- M + k' u^T;   o = M^T q'

A step moves 2 HV K V elements of state a sequence and does 8 operations on each: memory bound by far. A CTA takes one tile of
one value head, so that many are in flight on an SM; nothing is shared between tiles.

| tiles | when | why |
|---|---|---|
| 32 columns, registers filled straight from global memory | N HV <= 64 | few heads: more CTAs than SMs, the shortest way |
| 64 columns, by TMA through swizzled shared memory | else | one long copy a tile, no registers while it is under way |
| 128 columns, likewise | 16-bit states, N >= 64 | the same bytes a tile as 64 columns of float32 |
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import by_tma, f32, i32, keep, launch, layout_of_tile, load, rule_step, swizzled
from gdn_jax.varlen import inside


def columns_of_tile(n: int, num_v_heads: int, k_dim: int, v_dim: int, itemsize: int) -> int:
    """`vb`: how many columns of a state one CTA takes."""
    if n * num_v_heads <= 64:
        return 32
    return 128 if itemsize == 2 and n >= 64 and v_dim >= 128 and k_dim <= 128 else 64


def recurrent(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: Array,
    slots: Array,
    has_initial_state: Array | None,
    layer: Array,
    scale: Array,
    *,
    use_qk_l2norm: bool,
) -> tuple[Array, Array]:
    """`q`, `k` `[N, H, K]`, `v` `[N, HV, V]`, `g`, `beta` `[N, HV]`, `pool` `[L, num_slots, HV, K, V]`, `slots` int32 `[N]` of
    any value, `has_initial_state` bool `[N]`, `layer` int32 scalar of any value. N, L and num_slots are at least 1.

    Returns `o` `[N, HV, V]` in `v.dtype` and the updated pool.
    """
    (n, num_k_heads, k_dim), (_, num_v_heads, v_dim) = q.shape, v.shape
    num_layers, num_slots = pool.shape[:2]
    vb = columns_of_tile(n, num_v_heads, k_dim, v_dim, pool.dtype.itemsize)
    staged, layout = by_tma(vb), layout_of_tile(vb, pool.dtype)
    of_k, of_v = layout.reduce(1), layout.reduce(0)
    fresh = () if has_initial_state is None else (has_initial_state,)

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, g_ref, beta_ref, slot_ref, layer_ref, scale_ref = refs[:8]
        has_ref = refs[8] if fresh else None
        pool_ref, o_ref = refs[8 + len(fresh) : 10 + len(fresh)]
        shared: Any = refs[10 + len(fresh) :] if staged else (None, None)
        tile_sm, arrived = shared
        i, hv, part = (lax.axis_index(name) for name in ("n", "hv", "part"))
        h, cols = lax.div(hv, i32(num_v_heads // num_k_heads)), pl.ds(part * vb, vb)
        slot, at = slot_ref[i], layer_ref[0]
        valid = inside(slot, num_slots) & inside(at, num_layers)

        @pl.when(valid)
        def _() -> None:
            tile = pool_ref.at[at * num_slots + slot, hv, :, cols]
            m: Any = None
            if staged:
                plgpu.copy_gmem_to_smem(tile, tile_sm, arrived)
            else:
                m = load(tile, layout)
            key, query = load(k_ref.at[i, h], of_k), load(q_ref.at[i, h], of_k)
            value = load(v_ref.at[i, hv, cols], of_v)
            decay, write, factor = jnp.exp(g_ref[i, hv]), beta_ref[i, hv], scale_ref[0]
            if staged:
                plgpu.barrier_wait(arrived)
                m = plgpu.load(tile_sm, layout=layout).astype(f32)
            if has_ref is not None:
                m = keep(has_ref[i], m, layout)
            m, o = rule_step(m, query, key, value, decay, write, factor, use_qk_l2norm, layout)
            if staged:
                tile_sm[...] = m.astype(pool.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tile_sm, tile)
            else:
                pool_ref[at * num_slots + slot, hv, :, cols] = m.astype(pool.dtype)
            o_ref[i, hv, cols] = o.astype(v.dtype)
            if staged:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(jnp.logical_not(valid))
        def _() -> None:
            o_ref[i, hv, cols] = plgpu.layout_cast(jnp.zeros((vb,), v.dtype), of_v)

    tile = plgpu.SMEM((k_dim, vb), pool.dtype, transforms=swizzled(pool.dtype))
    o, pool = launch(
        body,
        "gdn_recurrent",
        dict(n=n, hv=num_v_heads, part=v_dim // vb),
        (q, k, v, g.astype(f32), beta.astype(f32), slots, layer[None], scale[None], *fresh),
        (pool,),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        (tile, plgpu.Barrier()) if staged else (),
    )
    return o, pool
