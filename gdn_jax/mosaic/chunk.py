"""The gated delta rule over whole prompts, in chunks of 64 tokens: two launches.

For one chunk and one value head, with M the state before it, b_i the sum of g from its start to i, and raw keys and queries:

    A_ij = beta_i e^{b_i - b_j} k_i.k_j / |k_i||k_j|  (j < i)      T = (I + A)^-1 diag(beta)
    V'   = T (v - diag(e1) k M)                                    e1 = e^b / |k|
    o    = diag(eq) q M + P V'                                     eq = e^b scale / |q|,  P_ij = q_i.k_j e^{b_i - b_j} …  (j <= i)
    M   <- e^{b_C} M + (diag(w) k)^T V'                            w  = e^{b_C - b} / |k|

`prepare` computes T, P and the vectors of every chunk, all chunks at once: one CTA a chunk and one or two value heads, which
share k.k and q.k. The inverse is substitution in the 16 x 16 blocks on the diagonal, all of them at once, then products.

`follow` walks along the sequences. A warpgroup has 64 columns of one head's state, transposed and in float32, in the
accumulators of its products; every product takes its left side from registers, so that nothing of the chain passes through
shared memory. A second or third warpgroup fetches the next chunks by TMA.

| warpgroups with states in a CTA | when | why |
|---|---|---|
| 1 | up to 132 of them in all | every one has an SM to itself |
| 2, on the halves of a head | else | they share k, q, T, P, and one computes while the other waits |
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import (
    COL,
    ROW,
    TRANSPOSED,
    WGMMA,
    Accumulator,
    accumulate,
    block_layout,
    f32,
    i32,
    interpreted,
    launch,
    product,
    store_rows,
    tile_transforms,
    two_views,
    views,
)
from gdn_jax.varlen import Batch, tile_base, tile_table

C = 64  # tokens of a chunk, and columns of a tile of the state
BLOCK = 16  # rows of the diagonal blocks that are inverted by substitution
LEAST_G = -104.0  # e^g is 0 in float32 from here on; running sums of larger g's would lose digits
SMS = 132
E1, W, EQ, DECAY = range(4)  # the vectors of a chunk; the last is e^{b_C} in every element


def chains_of_cta(tiles: int, v_dim: int) -> int:
    """How many warpgroups with states one CTA has, of so many tiles of 64 columns in all."""
    return 1 if tiles <= SMS or v_dim == C else 2


def stages(k_dim: int, chains: int) -> int:
    """The chunks in shared memory."""
    return 3


def _rows(x: Array, columns: int = C) -> Array:
    """A vector (ROW) beside itself."""
    return lax.broadcast_in_dim(x, (C, columns), [0])


def _columns(x: Array) -> Array:
    """A vector (COL) below itself."""
    return lax.broadcast_in_dim(x, (C, C), [1])


def substitute(entry: Callable[[int, int], Array], blocks: int, like: Callable[[Array], Array]) -> list[Array]:
    """Row by row `(I + a)^-1` of `blocks` strictly lower triangular blocks `[BLOCK, BLOCK]`; `entry(i, j)` `[blocks]` is a_ij
    of each, and every row comes as `[blocks, BLOCK]`.
    """
    column = like(lax.broadcasted_iota(i32, (blocks, BLOCK), 1))
    one, zero = (like(jnp.full((blocks, BLOCK), x, f32)) for x in (1, 0))
    rows: list[Array] = []
    for i in range(BLOCK):
        row = jnp.where(column == i, one, zero)
        for j in range(i):
            row = row - like(lax.broadcast_in_dim(entry(i, j), (blocks, BLOCK), [0])) * rows[j]
        rows.append(row)
    return rows


def prepare(
    q: Array,
    k: Array,
    g: Array,
    beta: Array,
    starts: Array,
    tokens: Array,
    scale: Array,
    *,
    first: tuple[int, int],
    k_dim: int,
    num_k_heads: int,
    num_v_heads: int,
    use_qk_l2norm: bool,
) -> tuple[Array, ...]:
    """`q`, `k` `[T, …]` with head h of k_dim columns at `first[0] + h k_dim` and `first[1] + h k_dim`, `g`, `beta` `[T, HV]`
    float32, HV a multiple of 4; `starts`, `tokens` int32, the chunks (`tokens` 0: none), `scale` `[1]`. T is at least C.

    Returns T and P `[chunks, HV, C, C]` in `q.dtype`, and the vectors `[chunks, HV, 4, C]`, float32.
    """
    per_k_head, halves, dtype = num_v_heads // num_k_heads, k_dim // C, q.dtype
    group = 2 if per_k_head % 2 == 0 else 1  # value heads of a CTA
    # The inverse in 10 bits more than its result has; keys that are not normalised may need the range instead.
    fine = jnp.float16 if use_qk_l2norm or dtype == jnp.float16 else jnp.bfloat16
    blocks = group * C // BLOCK
    layout = block_layout(blocks, BLOCK)

    def body(*refs: Any) -> None:
        q_ref, k_ref, g_ref, beta_ref, start_ref, tokens_ref, scale_ref, t_ref, p_ref, vectors_ref = refs[:10]
        q_sm, k_sm, g_sm, beta_sm, gates_sm, keys_sm, m_sm, d_sm, t_sm, p_sm, vectors_sm, a_sm, b_sm = refs[10:23]
        k_here, q_here, gates_here = refs[23:]
        (k_tile, k_tma, _), (q_tile, q_tma, _) = views(k_sm), views(q_sm)
        cta = lax.axis_index("cta")
        chunk, part = lax.div(cta, i32(num_v_heads // group)), lax.rem(cta, i32(num_v_heads // group))
        head = lax.div(part, i32(per_k_head // group))
        count = tokens_ref[chunk]

        def put(ref: Any, x: Array) -> None:
            ref[...] = x.astype(ref.dtype)
            plgpu.commit_smem()

        @pl.when(count > 0)
        def _() -> None:
            here = pl.ds(start_ref[chunk], C)
            for ref, tma, barrier, column in ((k_ref, k_tma, k_here, first[1]), (q_ref, q_tma, q_here, first[0])):
                for half in range(halves):
                    columns = pl.ds(column + head * k_dim + half * C, C)
                    plgpu.copy_gmem_to_smem(ref.at[here, columns], tma.at[half], barrier)
            four = pl.multiple_of(lax.div(part * group, i32(4)) * 4, 4)  # TMA moves multiples of 16 bytes
            plgpu.copy_gmem_to_smem(g_ref.at[here, pl.ds(four, 4)], g_sm, gates_here)
            plgpu.copy_gmem_to_smem(beta_ref.at[here, pl.ds(four, 4)], beta_sm, gates_here)

            i, j = (plgpu.broadcasted_iota(i32, (C, C), axis, layout=WGMMA) for axis in (0, 1))
            in_block = (i ^ j) < BLOCK
            real = plgpu.broadcasted_iota(i32, (C,), 0, layout=ROW) < count
            i_real = jnp.where(i < count, i, -1)  # rows behind the sequence's end belong to others, who may be NaN
            zero, none = jnp.zeros((C, C), f32), plgpu.layout_cast(jnp.zeros((C,), f32), ROW)
            below, on_or_below = i_real > j, i_real >= j

            plgpu.barrier_wait(gates_here)
            gates = []
            for r in range(group):
                of = part * group + r - four
                raw = [plgpu.load(sm.at[:, of], layout=ROW, optimized=False) for sm in (g_sm, beta_sm)]
                decay, write = (jnp.where(real, x, none) for x in (jnp.maximum(raw[0], LEAST_G), raw[1]))
                gates_sm[r, 0], gates_sm[r, 1] = decay, write
                gates.append(write)
            plgpu.commit_smem()
            for r in range(group):  # running sums of g: exact, no scan
                along = plgpu.load(gates_sm.at[r, 0], layout=COL)
                gates_sm[r, 2] = plgpu.layout_cast(jnp.sum(jnp.where(i >= j, _columns(along), zero), axis=1), ROW)

            plgpu.barrier_wait(k_here)
            keys = [plgpu.load(k_tile.at[half], layout=WGMMA) for half in range(halves)]
            plgpu.barrier_wait(q_here)
            queries = [plgpu.load(q_tile.at[half], layout=WGMMA) for half in range(halves)]

            def grams(kk: Accumulator, qk: Accumulator) -> tuple[Array, Array]:
                for half in range(halves):
                    kk.add(keys[half], k_tile.at[half].transpose((1, 0)))
                for half in range(halves):
                    qk.add(queries[half], k_tile.at[half].transpose((1, 0)))
                return kk.read(halves), qk.read()

            kk, qk = accumulate(grams, (C, C), (C, C))
            factor = plgpu.layout_cast(lax.broadcast_in_dim(scale_ref[0], (C,), ()), ROW)

            def over_norm(x: list[Array]) -> Array:
                if not use_qk_l2norm:
                    return jnp.where(real, plgpu.layout_cast(jnp.ones((C,), f32), ROW), none)
                squares = [plgpu.layout_cast(jnp.sum(jnp.square(y.astype(f32)), axis=1), ROW) for y in x]
                return jnp.where(real, lax.rsqrt(sum(squares[1:], squares[0]) + 1e-6), none)

            of_k, of_q = over_norm(keys), over_norm(queries) * factor
            keys_sm[...] = of_k
            plgpu.commit_smem()
            along_k = _columns(plgpu.load(keys_sm, layout=COL))
            kk, qk = kk * along_k * _rows(of_k), qk * along_k * _rows(of_q)

            lower = []
            for r in range(group):
                hv = part * group + r
                down, along = plgpu.load(gates_sm.at[r, 2], layout=ROW), plgpu.load(gates_sm.at[r, 2], layout=COL)
                end = plgpu.load(gates_sm.at[r, 2, C - 1])
                decay = jnp.exp(_rows(down) - _columns(along))
                if r > 0:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                p_sm[...] = jnp.where(on_or_below, qk * decay, zero).astype(dtype)
                since = jnp.exp(down)
                vectors_sm[E1], vectors_sm[EQ] = of_k * since, of_q * since
                vectors_sm[W] = of_k * jnp.exp(end - down)
                vectors_sm[DECAY] = jnp.exp(plgpu.layout_cast(lax.broadcast_in_dim(end, (C,), ()), ROW))
                a = jnp.where(below, kk * decay * _rows(gates[r]), zero)
                diagonal = jnp.where(in_block, a, zero)
                a_sm[pl.ds(r * C, C)] = sum(
                    (diagonal[:, at : at + BLOCK] for at in range(BLOCK, C, BLOCK)), diagonal[:, :BLOCK]
                )
                lower.append(jnp.where(in_block, zero, a))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(p_sm, p_ref.at[chunk, hv])
                plgpu.copy_smem_to_gmem(vectors_sm, vectors_ref.at[chunk, hv])

            if interpreted():
                small = a_sm[...].reshape(blocks, BLOCK, BLOCK)
                rows = substitute(lambda row, column: small[:, row, column], blocks, lambda x: x)
                b_sm[...] = jnp.stack(rows, axis=1).reshape(group * C, BLOCK)
            else:
                small, inverse = (sm.reshape(blocks, BLOCK, BLOCK) for sm in (a_sm, b_sm))

                def entry(row: int, column: int) -> Array:
                    return plgpu.load(small.at[:, row, column], layout=layout.reduce(1), optimized=False)

                for row, x in enumerate(substitute(entry, blocks, lambda x: plgpu.layout_cast(x, layout))):
                    inverse[:, row, :] = x
            plgpu.commit_smem()

            for r in range(group):
                # With D the inverse of the blocks and L what is left below them: T = (I - D L)(I + (D L)^2) D, as (D L)^4 = 0.
                narrow = plgpu.load(b_sm.at[pl.ds(r * C, C)], layout=WGMMA, optimized=False)
                d = jnp.where(in_block, lax.concatenate([narrow] * (C // BLOCK), 1), zero)
                put(m_sm, lower[r])
                m = product(d.astype(fine), m_sm)
                d_sm[...] = d.astype(fine)
                put(m_sm, m)
                square = product(m.astype(fine), m_sm)
                y = product(square.astype(fine), d_sm, d)
                put(d_sm, y)
                t = product((-m).astype(fine), d_sm, y)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                put(t_sm, t * _columns(plgpu.load(gates_sm.at[r, 1], layout=COL)))
                plgpu.copy_smem_to_gmem(t_sm, t_ref.at[chunk, part * group + r])
            plgpu.wait_smem_to_gmem(0)

    chunks, tiled = starts.shape[0], tile_transforms
    matrix = jax.ShapeDtypeStruct((chunks, num_v_heads, C, C), dtype)
    return launch(
        body,
        "gdn_chunk_prepare",
        dict(cta=chunks * num_v_heads // group),
        (q, k, g, beta, starts, tokens, scale),
        (),
        (matrix, matrix, jax.ShapeDtypeStruct((chunks, num_v_heads, 4, C), f32)),
        (
            *(two_views((halves, C, C), dtype) for _ in range(2)),
            *(plgpu.SMEM((C, 4), f32) for _ in range(2)),
            plgpu.SMEM((group, 3, C), f32),
            plgpu.SMEM((C,), f32),
            *(plgpu.SMEM((C, C), fine, transforms=tiled(fine)) for _ in range(2)),
            *(plgpu.SMEM((C, C), dtype, transforms=tiled(dtype)) for _ in range(2)),
            plgpu.SMEM((4, C), f32),
            *(plgpu.SMEM((group * C, BLOCK), f32) for _ in range(2)),
            *(plgpu.Barrier(num_arrivals=halves) for _ in range(2)),
            plgpu.Barrier(num_arrivals=2),
        ),
        lane=True,
    )


def follow(
    q: Array,
    k: Array,
    v: Array,
    t: Array,
    p: Array,
    vectors: Array,
    pool: Array,
    batch: Batch,
    ends: Array,
    *,
    first: tuple[int, int, int],
    k_dim: int,
    v_dim: int,
    num_k_heads: int,
    num_v_heads: int,
) -> tuple[Array, Array]:
    """`q`, `k`, `v` `[T, …]`, their heads from the columns `first` on, what `prepare` made of them, `pool` `[L, num_slots, HV,
    K, V]`, the sequences and where their tokens end, padding included.

    Returns `o` `[T, HV V]` in `v.dtype` and the updated pool.
    """
    num_tokens, dtype, num_slots, n = v.shape[0], v.dtype, pool.shape[1], batch.starts.shape[0]
    halves, per_k_head = k_dim // C, num_v_heads // num_k_heads
    chains = chains_of_cta(n * num_v_heads * v_dim // C, v_dim)
    parts, ring = v_dim // C // chains, stages(k_dim, chains)
    copies = 2 * halves + chains + 3  # TMA copies of a chunk

    def body(*refs: Any) -> None:
        q_ref, k_ref, v_ref, t_ref, p_ref, vectors_ref = refs[:6]
        start_ref, length_ref, end_ref, read_ref, write_ref, layer_ref, pool_ref, o_ref = refs[6:14]
        q_sm, k_sm, v_sm, t_sm, p_sm, vectors_sm, o_sm, arrived, alone, free = refs[14:]
        (k_tile, k_tma, _), (q_tile, q_tma, _), (v_tile, v_tma, _) = views(k_sm), views(q_sm), views(v_sm)
        o_tile, o_tma, o_plain = views(o_sm)
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        part, of = lax.rem(cta, i32(parts)), lax.div(cta, i32(parts))
        hv, i = lax.rem(of, i32(num_v_heads)), lax.div(of, i32(num_v_heads))
        h, start, length = lax.div(hv, i32(per_k_head)), start_ref[i], length_ref[i]
        chunks, base = lax.div(length + (C - 1), i32(C)), tile_base(start, i, C)

        @pl.when(wg == chains)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def fetch(c: Array, slot: Array, barrier: Any) -> None:
                here, entry = pl.ds(start + c * C, C), base + c
                for half in range(halves):
                    columns = pl.ds(first[1] + h * k_dim + half * C, C)
                    plgpu.copy_gmem_to_smem(k_ref.at[here, columns], k_tma.at[slot, half], barrier)
                for chain in range(chains):
                    columns = pl.ds(first[2] + hv * v_dim + (part * chains + chain) * C, C)
                    plgpu.copy_gmem_to_smem(v_ref.at[here, columns], v_tma.at[slot, chain], barrier)
                plgpu.copy_gmem_to_smem(t_ref.at[entry, hv], t_sm.at[slot], barrier)
                plgpu.copy_gmem_to_smem(vectors_ref.at[entry, hv], vectors_sm.at[slot], barrier)
                for half in range(halves):
                    columns = pl.ds(first[0] + h * k_dim + half * C, C)
                    plgpu.copy_gmem_to_smem(q_ref.at[here, columns], q_tma.at[slot, half], barrier)
                plgpu.copy_gmem_to_smem(p_ref.at[entry, hv], p_sm.at[slot], barrier)

            @pl.loop(0, chunks)
            def _(c: Array) -> None:
                slot, count = lax.rem(c, i32(ring)), length - c * C

                @pl.when(c >= ring)
                def _() -> None:
                    plgpu.barrier_wait(free.at[slot])

                @pl.when(count >= C)
                def _() -> None:
                    fetch(c, slot, arrived.at[slot])

                @pl.when(count < C)
                def _() -> None:  # rows of others, who may be NaN: zero times them is not zero
                    fetch(c, slot, alone)
                    plgpu.barrier_wait(alone)
                    row = plgpu.broadcasted_iota(i32, (C, C), 0, layout=WGMMA)
                    for tile, many in ((k_tile, halves), (v_tile, chains)):
                        for at in range(many):
                            x = plgpu.load(tile.at[slot, at], layout=WGMMA)
                            tile[slot, at] = jnp.where(row < count, x, jnp.zeros_like(x))
                    plgpu.commit_smem()
                    for _ in range(copies):
                        plgpu.barrier_arrive(arrived.at[slot])

            @pl.loop(jnp.maximum(chunks - ring, 0), chunks)
            def _(c: Array) -> None:
                plgpu.barrier_wait(free.at[lax.rem(c, i32(ring))])

        @pl.when(wg < chains)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            column = (part * chains + wg) * C
            out = hv * v_dim + column
            read, write = read_ref[i], write_ref[i]

            def state_at(slot: Array, half: int) -> Any:
                row = layer_ref[0] * num_slots + slot
                return pool_ref.at[row, hv, pl.ds(half * C, C), pl.ds(column, C)].transpose((1, 0))

            def initial(half: int) -> Array:
                def given() -> Array:
                    x = plgpu.load(state_at(read, half), layout=TRANSPOSED, optimized=False)
                    return plgpu.layout_cast(x, WGMMA).astype(f32)

                return lax.cond(read >= 0, given, lambda: plgpu.layout_cast(jnp.zeros((C, C), f32), WGMMA))

            def step(c: Array, carry: Any) -> Any:
                states, sides, o_before = carry
                slot = lax.rem(c, i32(ring))
                plgpu.barrier_wait(arrived.at[slot])
                keys = [k_tile.at[slot, half] for half in range(halves)]
                values, t_here = v_tile.at[slot, wg].transpose((1, 0)), t_sm.at[slot].transpose((1, 0))

                def vector(which: int) -> Array:
                    return _columns(plgpu.load(vectors_sm.at[slot, which], layout=COL))

                def chunk(x: Accumulator, u: Accumulator, o: Accumulator, *after: Accumulator) -> Any:
                    for side, key in zip(sides, keys):
                        x.add(side, key.transpose((1, 0)))
                    u.add(values, t_here)

                    @pl.when(c > 0)
                    def _() -> None:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        o_tile.at[wg].transpose((1, 0))[...] = plgpu.layout_cast(o_before, TRANSPOSED)
                        plgpu.commit_smem()
                        there = o_ref.at[pl.ds(start + (c - 1) * C, C), pl.ds(out, C)]
                        plgpu.copy_smem_to_gmem(o_tma.at[wg], there)

                    u.add((x.read(1) * -vector(E1)).astype(dtype), t_here)
                    for half, side in enumerate(sides):
                        o.add(side, q_tile.at[slot, half].transpose((1, 0)))
                    decay = plgpu.load(vectors_sm.at[slot, DECAY, 0])
                    decayed = [m * decay for m in states]
                    new = u.read(halves)
                    weighted, plain = (new * vector(W)).astype(dtype), new.astype(dtype)
                    for total, m, key in zip(after, decayed, keys):
                        total.set(m)
                        total.add(weighted, key)
                    o.set(o.read(halves) * vector(EQ))
                    o.add(plain, p_sm.at[slot].transpose((1, 0)))
                    states_after = [total.read(1) for total in after]
                    sides_after = [m.astype(dtype) for m in states_after]
                    return states_after, sides_after, o.read().astype(dtype)

                carry = accumulate(chunk, *[(C, C)] * (3 + halves))
                if interpreted():
                    plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])
                return carry

            states = [initial(half) for half in range(halves)]
            nothing = plgpu.layout_cast(jnp.zeros((C, C), dtype), WGMMA)
            carry = states, [m.astype(dtype) for m in states], nothing
            states, _, o_last = lax.fori_loop(0, chunks, step, carry)

            @pl.when(write >= 0)
            def _() -> None:
                for half, m in enumerate(states):
                    state_at(write, half)[...] = plgpu.layout_cast(m.astype(pool.dtype), TRANSPOSED)

            def put(x: Array, begin: Array, end: Array) -> None:
                """Some rows of `o`, of x or x again and again."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_plain.at[wg].transpose((1, 0))[...] = plgpu.layout_cast(x, TRANSPOSED)
                plgpu.commit_smem()

                @pl.loop(0, lax.div(end - begin + (C - 1), i32(C)))
                def _(at: Array) -> None:
                    row = begin + at * C
                    store_rows(o_plain.at[wg], lambda rows: o_ref.at[rows, pl.ds(out, C)], row, end - row)

            @pl.when(chunks > 0)
            def _() -> None:
                put(o_last, start + (chunks - 1) * C, start + length)

            end = jnp.where(i == n - 1, num_tokens, end_ref[i])

            @pl.when(start + length < end)
            def _() -> None:
                put(nothing, start + length, end)

            plgpu.wait_smem_to_gmem(0)

    matrix = (ring, C, C)
    o, pool = launch(
        body,
        "gdn_chunk",
        dict(cta=n * num_v_heads * parts),
        (q, k, v, t, p, vectors, batch.starts, batch.lengths, ends, batch.read, batch.write, batch.layer[None]),
        (pool,),
        jax.ShapeDtypeStruct((num_tokens, num_v_heads * v_dim), dtype),
        (
            *(two_views((ring, halves, C, C), dtype) for _ in range(2)),
            two_views((ring, chains, C, C), dtype),
            *(plgpu.SMEM(matrix, dtype, transforms=tile_transforms(dtype)) for _ in range(2)),
            plgpu.SMEM((ring, 4, C), f32),
            two_views((chains, C, C), dtype, plain=True),
            plgpu.Barrier(num_arrivals=copies, num_barriers=ring),
            plgpu.Barrier(num_arrivals=copies),
            plgpu.Barrier(num_arrivals=chains, num_barriers=ring),
        ),
        warpgroups=chains + 1,
    )
    return o, pool


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
    first: tuple[int, int, int],
    k_dim: int,
    v_dim: int,
    num_k_heads: int,
    num_v_heads: int,
    use_qk_l2norm: bool,
) -> tuple[Array, Array]:
    """The rule on heads that begin at the columns `first` of `q`, `k`, `v` `[T, …]`, which may be one array; `g`, `beta`
    `[T, HV]` float32, `pool` `[L, num_slots, HV, K, V]`. `ends` int32 `[N]`: where the tokens of a sequence end, padding too.

    Returns `o` `[T, HV V]` in `v.dtype` and the updated pool.
    """
    num_tokens = v.shape[0]
    heads: dict[str, Any] = dict(num_k_heads=num_k_heads, num_v_heads=num_v_heads)
    rows, more_heads = max(0, C - num_tokens), -num_v_heads % 4
    if rows:
        q, k, v = (jnp.pad(x, ((0, rows), (0, 0))) for x in (q, k, v))
    if rows or more_heads:
        g, beta = (jnp.pad(x, ((0, rows), (0, more_heads))) for x in (g, beta))
    _, starts, tokens = tile_table(batch.starts, batch.lengths, num_tokens, C)
    options: dict[str, Any] = dict(first=first[:2], k_dim=k_dim, use_qk_l2norm=use_qk_l2norm, **heads)
    t, p, vectors = prepare(q, k, g, beta, starts, tokens, scale[None], **options)
    o, pool = follow(q, k, v, t, p, vectors, pool, batch, ends, first=first, k_dim=k_dim, v_dim=v_dim, **heads)
    return o[:num_tokens], pool


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
    o, pool = rule(
        q2,
        k2,
        v2,
        g.astype(f32),
        beta.astype(f32),
        pool,
        batch,
        ends,
        scale,
        first=(0, 0, 0),
        k_dim=k_dim,
        v_dim=v_dim,
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        use_qk_l2norm=use_qk_l2norm,
    )
    return o.reshape(v.shape), pool
