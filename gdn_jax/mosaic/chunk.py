"""The gated delta rule over whole prompts, in chunks of 64 tokens.

For one chunk and one value head, with M the state before it, b_i the sum of g from its start to i, and raw keys and queries:

    A_ij = beta_i e^{b_i - b_j} k_i.k_j / |k_i||k_j|  (j < i)      T = (I + A)^-1 diag(beta)
    V'   = T (v - diag(e1) k M)                                    e1 = e^b / |k|
    o    = diag(eq) q M + P V'                                     eq = e^b scale / |q|,  P_ij = q_i.k_j e^{b_i - b_j} …  (j <= i)
    M   <- e^{b_C} M + (diag(w) k)^T V'                            w  = e^{b_C - b} / |k|

`prepare` computes T, P and the vectors of every chunk, all chunks at once, and `follow` walks along the sequences with what it
made, a warpgroup for 64 columns of a head's state, a tile.

| tiles of states in all | launches | CTAs |
|---|---|---|
| up to a quarter of the SMs, long sequences | three | a segment of a sequence: first without its start, then with it |
| up to half of the SMs | one | the first ones prepare, and raise a flag for each chunk, the last ones follow |
| up to the SMs | two | one tile each |
| more | two | two tiles each: they share k, q, T, P, and one computes while the other waits |
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from gdn_jax.mosaic.common import SMS, await_flag, f32, flags, i32, interpreted, launch, overlay, parts_of, raise_flag
from gdn_jax.mosaic.follow import Places, Walk
from gdn_jax.mosaic.prepare import C, Heads, Preparation
from gdn_jax.varlen import Batch, tile_base, tile_table

TOGETHER = 2  # warpgroups of a CTA, where both parts run in one launch


def stages(chains: int) -> int:
    """The chunks in shared memory, of so many tiles a CTA."""
    return 4 - chains


def segments(tiles: int, length: int) -> int:
    """Into how many segments sequences of `length` tokens on average are cut, of `tiles` tiles of 64 columns in all."""
    if tiles > SMS // 4 or length < 2048:
        return 1
    return min(8, SMS // tiles)


def chains_of_cta(tiles: int, v_dim: int) -> int:
    """How many warpgroups with states one CTA has, of so many tiles of 64 columns in all."""
    return 1 if tiles <= SMS or v_dim == C else 2


def at_once(tiles: int) -> bool:
    """Whether both parts run in one launch. The interpreter runs CTAs one after the other: none may wait for another."""
    return tiles <= SMS // 2 and not interpreted()


def rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: Array,
    batch: Batch,
    ends: Array,
    scale: Array,
    *,
    heads: Heads,
    use_qk_l2norm: bool,
) -> tuple[Array, Array]:
    """The rule on heads that begin at the columns `heads.first` of `q`, `k`, `v` `[T, …]`, which may be one array; `g`, `beta`
    `[T, HV]` float32, `pool` `[L, num_slots, HV, K, V]`. `ends` int32 `[N]`: where the tokens of a sequence end, padding too.

    Returns `o` `[T, HV V]` in `v.dtype` and the updated pool.
    """
    num_tokens, n, dtype, num_v_heads = v.shape[0], batch.starts.shape[0], v.dtype, heads.num_v_heads
    rows, more_heads = max(0, C - num_tokens), -num_v_heads % 4
    if rows:
        q, k, v = (jnp.pad(x, ((0, rows), (0, 0))) for x in (q, k, v))
    if rows or more_heads:
        g, beta = (jnp.pad(x, ((0, rows), (0, more_heads))) for x in (g, beta))
    _, starts, tokens = tile_table(batch.starts, batch.lengths, num_tokens, C)
    chunks, tiles = starts.shape[0], n * num_v_heads * heads.v_dim // C
    given = dict(q=q, k=k, g=g, beta=beta, starts=starts, tokens=tokens, scale=scale[None])
    matrix = jax.ShapeDtypeStruct((chunks, num_v_heads, C, C), dtype)
    made: dict[str, Any] = dict(t=matrix, p=matrix, vectors=jax.ShapeDtypeStruct((chunks, num_v_heads, 4, C), f32))
    outs = dict(o=jax.ShapeDtypeStruct((v.shape[0], num_v_heads * heads.v_dim), dtype))
    base = tile_base(batch.lengths, num_tokens, C)
    ends = jnp.where(jnp.arange(n) == n - 1, v.shape[0], ends)
    places = Places(batch.starts, batch.lengths, base, ends, batch.read, batch.write)
    layer = dict(layer=batch.layer[None])

    pieces = segments(tiles, num_tokens // n)
    if pieces == 1 and at_once(tiles):
        prepare, walk = Preparation(heads, dtype, use_qk_l2norm, TOGETHER), Walk(heads, dtype, pool, n, 1, stages(1))
        ctas = prepare.ctas(chunks, SMS - walk.ctas)

        def both(ref: Any, of_prepare: Any, of_walk: Any, cta: Array, wg: Array) -> None:
            flag = flags((chunks, prepare.parts))

            @pl.when(cta < ctas)  # they come first and wait for nobody
            def _() -> None:
                prepare.work(ref, of_prepare, cta, ctas, wg, lambda chunk, part: raise_flag(flag.at[chunk, part]))

            @pl.when(cta >= ctas)
            def _() -> None:
                def ready(chunk: Array, hv: Array) -> None:
                    await_flag(flag.at[chunk, lax.div(hv, i32(heads.group))])

                walk.work(ref, of_walk, cta - ctas, wg, ready)

        ins = given | dict(v=v, places=jnp.stack(places, axis=-1)) | layer
        *_, o, pool = _run(both, "gdn_chunk", ctas + walk.ctas, TOGETHER, (prepare, walk), ins, pool, made | outs)
        return o[:num_tokens], pool

    prepare = Preparation(heads, dtype, use_qk_l2norm, 1)
    ctas = prepare.ctas(chunks, 2 * SMS)  # two have room on an SM

    def first(ref: Any, sm: Any, cta: Array, wg: Array) -> None:
        prepare.work(ref, sm, cta, ctas, wg)

    prepared = _run(first, "gdn_chunk_prepare", ctas, 1, (prepare,), given, None, made)
    read = dict(q=q, k=k, v=v, **dict(zip(made, prepared)))

    def follow(pool: Array, places: Places, outs: dict[str, Any], **more: Array) -> tuple[Array, ...]:
        n, table = places.start.size, jnp.stack([x.reshape(-1) for x in places], axis=-1)
        columns = (
            heads.v_dim if outs else min(heads.k_dim, heads.v_dim)
        )  # the two tiles of a CTA have values, or none of them
        chains = chains_of_cta(n * num_v_heads * pool.shape[-1] // C, columns)
        walk = Walk(heads, dtype, pool, n, chains, stages(chains), bool(outs), "given" in more)
        if walk.items > walk.ctas:
            table = table[_longest_first(places.length)]
        name = "gdn_chunk" if outs else "gdn_chunk_states"
        return _run(walk.work, name, walk.ctas, chains + 1, (walk,), read | dict(places=table) | more, pool, outs)

    if pieces == 1:
        o, pool = follow(pool, places, outs, **layer)
        return o[:num_tokens], pool
    places, begin = _cut(places, pieces), _states(pool, batch)
    # What every segment but the last makes of zeros, and of the columns of the unit matrix: its start is a sum of products.
    empty = jnp.zeros((n, pieces - 2, *begin.shape[1:]), f32)
    work = jnp.concatenate([begin[:, None], empty], axis=1)
    if pieces > 2:
        unit = jnp.broadcast_to(jnp.eye(heads.k_dim, dtype=f32), (*work.shape[:-1], heads.k_dim))
        work = jnp.concatenate([work, unit], axis=-1)
    rows = jnp.arange(n * (pieces - 1), dtype=jnp.int32).reshape(n, -1)
    early = Places(*(x[:, :-1] for x in places))._replace(read=rows, write=rows)
    (work,) = follow(work.reshape(1, -1, *work.shape[2:]), early, {}, layer=jnp.zeros(1, jnp.int32))
    work = work.reshape(n, pieces - 1, *work.shape[2:])
    starts_of = [begin, work[:, 0, ..., : heads.v_dim]]
    for piece in range(1, pieces - 1):
        through = jnp.einsum("nhij,nhjv->nhiv", work[:, piece, ..., heads.v_dim :], starts_of[-1], precision="highest")
        starts_of.append(through + work[:, piece, ..., : heads.v_dim])
    o, pool = follow(pool, places, outs, given=jnp.stack(starts_of, axis=1).reshape(-1, *begin.shape[1:]), **layer)
    return o[:num_tokens], pool


def _run(
    body: Callable[..., None],
    name: str,
    ctas: int,
    warpgroups: int,
    workers: tuple[Any, ...],
    ins: dict[str, Array],
    pool: Array | None,
    outs: dict[str, jax.ShapeDtypeStruct],
) -> Any:
    """Launches `body(ref, *memories, cta, wg)`: the refs by name, and for each worker what it has in shared memory, barriers
    included.
    """
    pools = {} if pool is None else dict(pool=pool)
    names, memories = [*ins, *pools, *outs], [worker.memory for worker in workers]

    def named(*refs: Any) -> None:
        ref, scratch, rest = dict(zip(names, refs)), refs[len(names)], list(refs[len(names) + 1 :])
        own = [
            sm | {name: rest.pop(0) for name in worker.barriers}
            for sm, worker in zip(parts_of(scratch, *memories), workers)
        ]
        body(ref, *own, lax.axis_index("cta"), lax.axis_index("wg") if warpgroups > 1 else 0)

    barriers = (barrier for worker in workers for barrier in worker.barriers.values())
    scratch = (overlay(*memories), *barriers)
    arrays = tuple(ins.values()), tuple(pools.values()), tuple(outs.values())
    return launch(
        named, name, dict(cta=ctas), *arrays, scratch, warpgroups=warpgroups if warpgroups > 1 else None, lane=True
    )


def _longest_first(lengths: Array) -> Array:
    """Which sequence is the longest, and so on, without a sort: the CTAs take them in turn and end together."""
    number = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    more, equal = lengths > lengths[:, None], (lengths == lengths[:, None]) & (number < number[:, None])
    return jnp.zeros_like(number).at[jnp.sum(more | equal, axis=1)].set(number, unique_indices=True)


def _cut(places: Places, pieces: int) -> Places:
    """The places `[N]` of sequences as those of their segments `[N, pieces]`, equally many chunks each; the last one writes."""
    start, length, base, end, read, write = (x[:, None] for x in places)
    number = jnp.arange(pieces, dtype=jnp.int32)
    each = -(-length // (C * pieces))  # chunks
    begin = jnp.minimum(number * each * C, length)
    tokens = jnp.minimum(length - begin, each * C)
    last = number == pieces - 1
    end, write = jnp.where(last, end, start + begin + tokens), jnp.where(last, write, -1)
    return Places(start + begin, tokens, base + number * each, end, jnp.broadcast_to(read, end.shape), write)


def _states(pool: Array, batch: Batch) -> Array:
    """The states `[N, HV, K, V]` before the sequences, float32."""
    rows = pool[jnp.clip(batch.layer, 0, pool.shape[0] - 1), jnp.maximum(batch.read, 0)]
    return jnp.where(batch.read[:, None, None, None] >= 0, rows, 0).astype(f32)


def chunk(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    pool: Array,
    batch: Batch,
    ends: Array,
    scale: Array,
    *,
    use_qk_l2norm: bool,
) -> tuple[Array, Array]:
    """`q`, `k` `[T, H, K]`, `v` `[T, HV, V]`, all bfloat16 or float16, `g`, `beta` `[T, HV]`, `pool` `[L, num_slots, HV, K, V]`,
    `batch` with every rule on padding applied, `ends` int32 `[N]`: where the tokens of a sequence end, padding too, and
    `scale` float32. K and V are 64 or 128; T, N, L and num_slots at least 1.

    Returns `o` `[T, HV, V]` in `v.dtype`, zeros at padding, and the updated pool.
    """
    (num_tokens, num_k_heads, k_dim), (num_v_heads, v_dim) = q.shape, v.shape[1:]
    if q.dtype == jnp.float16 and use_qk_l2norm:  # its range is too small for keys with their norms as factors
        wide = [x.astype(f32) for x in (q, k)]
        q, k = ((x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)).astype(q.dtype) for x in wide)
        use_qk_l2norm = False
    q2, k2, v2 = (x.reshape(num_tokens, -1) for x in (q, k, v))
    heads = Heads(num_k_heads, num_v_heads, k_dim, v_dim)
    o, pool = rule(
        q2, k2, v2, g.astype(f32), beta.astype(f32), pool, batch, ends, scale, heads=heads, use_qk_l2norm=use_qk_l2norm
    )
    return o.reshape(v.shape), pool
