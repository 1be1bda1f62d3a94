"""What a chunk of 64 tokens needs before its sequence's state is known: T, P and the vectors of `chunk`.

A warpgroup takes one chunk and one or two value heads, which share k.k and q.k, after the other. What it reads comes by TMA
while the item before is worked on. The inverse is substitution in the 16 x 16 blocks on the diagonal, all of them at once, then
products.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import (
    COL,
    ROW,
    WGMMA,
    Accumulator,
    Memory,
    accumulate,
    block_layout,
    clear_behind,
    f32,
    i32,
    interpreted,
)

C = 64  # tokens of a chunk, and columns of a tile of the state
BLOCK = 16  # rows of the diagonal blocks that are inverted by substitution
LOG2_E = 1.4426950408889634
LEAST_G = -104.0  # e^g is 0 in float32 from here on; running sums of larger g's would lose digits
E1, W, EQ, DECAY = range(4)  # the vectors of a chunk; the last is e^{b_C} in every element


class Heads(NamedTuple):
    """The sizes of the rule, and the columns of q, k and v where the first head of each begins."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    first: tuple[int, int, int] = (0, 0, 0)

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def group(self) -> int:
        """Value heads that are prepared together."""
        return 2 if self.shared % 2 == 0 else 1

    @property
    def halves(self) -> int:
        """Tiles of 64 rows of a state."""
        return self.k_dim // C


def rows(x: Array, size: int = C) -> Array:
    """A vector (ROW) beside itself, `size` times."""
    return lax.broadcast_in_dim(x, (C, size), [0])


def columns(x: Array) -> Array:
    """A vector (COL) below itself."""
    return lax.broadcast_in_dim(x, (C, C), [1])


def substitute(entry: Callable[[int, int], Array], blocks: int, like: Callable[[Array], Array]) -> list[Array]:
    """Row by row `(I - a)^-1` of `blocks` strictly lower triangular blocks `[BLOCK, BLOCK]`; `entry(i, j)` `[blocks]` is a_ij
    of each, and every row comes as `[blocks, BLOCK]`.
    """
    column = like(lax.broadcasted_iota(i32, (blocks, BLOCK), 1))
    one, zero = (like(jnp.full((blocks, BLOCK), x, f32)) for x in (1, 0))
    done: list[Array] = []
    for i in range(BLOCK):
        row = jnp.where(column == i, one, zero)
        for j in range(i):
            row = row + like(lax.broadcast_in_dim(entry(i, j), (blocks, BLOCK), [0])) * done[j]
        done.append(row)
    return done


class Preparation:
    """The memory and the work of a CTA of `warpgroups` that prepares chunks."""

    def __init__(self, heads: Heads, dtype: Any, use_qk_l2norm: bool, warpgroups: int) -> None:
        self.heads, self.dtype, self.use_qk_l2norm, self.warpgroups = heads, dtype, use_qk_l2norm, warpgroups
        # The inverse in 10 bits more than its result has; keys that are not normalised may need the range instead.
        self.fine = jnp.float16 if use_qk_l2norm or dtype == jnp.float16 else jnp.bfloat16
        self.parts = heads.num_v_heads // heads.group
        each = (warpgroups, heads.group)
        self.memory = Memory(
            k=((warpgroups, heads.halves, C, C), dtype, "moved"),
            q=((warpgroups, heads.halves, C, C), dtype, "moved"),
            m=((*each, C, C), self.fine, "tiled"),
            d=((*each, C, C), self.fine, "tiled"),
            out=((*each, C, C), dtype, "tiled"),
            small=((warpgroups, heads.group * C, BLOCK), f32, "plain"),
            g=((warpgroups, C, 4), f32, "plain"),
            beta=((warpgroups, C, 4), f32, "plain"),
            vectors=((*each, 4, C), f32, "plain"),
            gates=((*each, 4, C), f32, "plain"),
        )
        several = max(2, warpgroups)  # one barrier has no index
        self.barriers = dict(
            tiles_here=plgpu.Barrier(num_arrivals=2 * heads.halves, num_barriers=several),
            gates_here=plgpu.Barrier(num_arrivals=2, num_barriers=several),
        )

    def ctas(self, chunks: int, most: int) -> int:
        """CTAs that so many chunks keep busy."""
        return min(most, -(-chunks * self.parts // self.warpgroups))

    def work(self, ref: Any, sm: Any, cta: Array, ctas: int, wg: Any, done: Callable[..., None] | None = None) -> None:
        """What warpgroup `wg` of CTA `cta` of `ctas` does; `done(chunk, part)` is called when what belongs to them is in global
        memory.
        """
        parts, chunks = self.parts, ref["starts"].shape[0]
        first, stride = cta * self.warpgroups + wg, ctas * self.warpgroups

        def entry(item: Array) -> tuple[Array, Array]:
            """The first token of an item's chunk and how many it has."""
            chunk = jnp.minimum(lax.div(item, i32(parts)), chunks - 1)
            return ref["starts"][chunk], jnp.where(item < chunks * parts, ref["tokens"][chunk], 0)

        def fetch(item: Array, start: Array, count: Array) -> None:
            @pl.when(count > 0)
            def _() -> None:
                self.fetch(ref, sm, wg, lax.rem(item, i32(parts)), pl.ds(start, C))

        def turn(n: Array, count: Array) -> Array:
            item = first + n * stride
            after, (start, count_after) = item + stride, entry(item + stride)
            chunk, part = lax.div(item, i32(parts)), lax.rem(item, i32(parts))

            @pl.when(count > 0)
            def _() -> None:
                self.item(ref, sm, wg, chunk, part, count, lambda: fetch(after, start, count_after))

            @pl.when(count == 0)
            def _() -> None:
                fetch(after, start, count_after)

            if done is not None:  # where there is nothing too: nobody may wait for ever, whatever the starts
                plgpu.wait_smem_to_gmem(0)
                done(chunk, part)
            return count_after

        start, count = entry(first)
        fetch(first, start, count)
        lax.fori_loop(0, lax.div(chunks * parts - first + (stride - 1), i32(stride)), turn, count)
        plgpu.wait_smem_to_gmem(0)

    def fetch(self, ref: Any, sm: Any, wg: Any, part: Array, here: Any) -> None:
        """Starts the copies of what an item reads."""
        heads = self.heads
        four = pl.multiple_of(lax.div(part * heads.group, i32(4)) * 4, 4)  # TMA moves multiples of 16 bytes
        for name in ("g", "beta"):
            plgpu.copy_gmem_to_smem(ref[name].at[here, pl.ds(four, 4)], sm[name].at[wg], sm["gates_here"].at[wg])
        head = lax.div(part, i32(heads.shared // heads.group))
        for name, begin in (("k", heads.first[1]), ("q", heads.first[0])):
            for half in range(heads.halves):
                source = ref[name].at[here, pl.ds(begin + head * heads.k_dim + half * C, C)]
                plgpu.copy_gmem_to_smem(source, sm[name].moved.at[wg, half], sm["tiles_here"].at[wg])

    def item(
        self, ref: Any, sm: Any, wg: Any, chunk: Array, part: Array, count: Array, next_ones: Callable[[], None]
    ) -> None:
        """One chunk, of `count` tokens, and the value heads of one part; `next_ones` is called when what was fetched is read."""
        halves, group, fine = self.heads.halves, self.heads.group, self.fine
        gates_sm, vectors_sm, out_sm, m_sm, d_sm = (sm[x].at[wg] for x in ("gates", "vectors", "out", "m", "d"))
        k_tile, q_tile = (sm[x].tiled.at[wg] for x in "kq")
        of_group, here = range(group), pl.ds(part * group, group)
        row, zero = plgpu.broadcasted_iota(i32, (C,), 0, layout=ROW), jnp.zeros((C, C), f32)
        on_or_below = rows(row) >= plgpu.broadcasted_iota(i32, (C, C), 1, layout=WGMMA)
        blocks = range(C // BLOCK)
        in_block = [rows(lax.shift_right_logical(row, i32(4)) == block, BLOCK) for block in blocks]
        on_diagonal = rows(row & (BLOCK - 1), BLOCK) == plgpu.broadcasted_iota(i32, (C, BLOCK), 1, layout=WGMMA)

        def block_of(x: Array, block: int) -> Array:
            return x[:, block * BLOCK : (block + 1) * BLOCK]

        def narrow(x: Array) -> Array:
            """The blocks on the diagonal, below each other."""
            y = block_of(x, blocks[-1])
            for block in blocks[:-1]:
                y = jnp.where(in_block[block], block_of(x, block), y)
            return y

        def factor(square: Array) -> Array:
            """1 / norm of every row of x, from `x x^T`."""
            if not self.use_qk_l2norm:
                return plgpu.layout_cast(jnp.ones((C,), f32), ROW)
            diagonal = jnp.where(on_diagonal, narrow(square), jnp.zeros((C, BLOCK), f32))
            return lax.rsqrt(plgpu.layout_cast(jnp.sum(diagonal, axis=1), ROW) + 1e-6)

        plgpu.barrier_wait(sm["tiles_here"].at[wg])

        @pl.when(count < C)
        def _() -> None:
            clear_behind([tile.at[half] for tile in (k_tile, q_tile) for half in range(halves)], count)

        def grams(*sums: Accumulator) -> Any:
            for total, (a, b) in zip(sums, ((k_tile, k_tile), (q_tile, k_tile), (q_tile, q_tile))):
                for half in range(halves):
                    total.add(a.at[half], b.at[half].transpose((1, 0)))
            plgpu.barrier_wait(sm["gates_here"].at[wg])
            real, none = row < count, plgpu.layout_cast(jnp.zeros((C,), f32), ROW)
            writes, downs = [], []
            for r in of_group:
                of = lax.rem(part * group + r, i32(4))
                raw = [plgpu.load(sm[x].at[wg, :, of], layout=ROW, optimized=False) for x in ("g", "beta")]
                decay, write = (jnp.where(real, x, none) for x in (jnp.maximum(raw[0], LEAST_G) * LOG2_E, raw[1]))
                gates_sm[r, 0], gates_sm[r, 1] = decay, write
                writes.append(write)
            plgpu.commit_smem()
            for r in of_group:  # running sums of g, in powers of two: exact, no scan
                along = columns(plgpu.load(gates_sm.at[r, 0], layout=COL))
                downs.append(plgpu.layout_cast(jnp.sum(jnp.where(on_or_below, along, zero), axis=1), ROW))
            kk, qk, *qq = (total.read((len(sums) - 1 - n) * halves) for n, total in enumerate(sums))
            return kk, qk, factor(kk), factor(qq[0] if qq else qk), writes, downs

        sums = 3 if self.use_qk_l2norm else 2
        kk, qk, of_k, of_q, writes, downs = accumulate(grams, *[(C, C)] * sums)
        of_q = of_q * plgpu.layout_cast(lax.broadcast_in_dim(ref["scale"][0], (C,), ()), ROW)
        for r, down in enumerate(downs):
            gates_sm[r, 2], gates_sm[r, 3] = down, down - jnp.log2(of_k)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        next_ones()
        for r, down in enumerate(downs):
            # e^{b_i - b_j} / |k_j|, zero above the diagonal; what of A stands on it is not read.
            decay = jnp.exp2(rows(down) - columns(plgpu.load(gates_sm.at[r, 3], layout=COL)))
            decay = jnp.where(on_or_below, decay, zero)
            out_sm[r] = (qk * decay * rows(of_q)).astype(self.dtype)
            minus_a = kk * decay * rows(-of_k * writes[r])
            sm["small"][wg, pl.ds(r * C, C)] = narrow(minus_a)
            none = jnp.zeros((C, BLOCK), f32)
            below = [jnp.where(in_block[block], none, block_of(minus_a, block)) for block in blocks]
            m_sm[r] = lax.concatenate(below, 1).astype(fine)
            since, end = jnp.exp2(down), plgpu.load(gates_sm.at[r, 2, C - 1])
            vectors_sm[r, E1], vectors_sm[r, EQ] = of_k * since, of_q * since
            vectors_sm[r, W] = of_k * jnp.exp2(end - down)
            vectors_sm[r, DECAY] = jnp.exp2(plgpu.layout_cast(lax.broadcast_in_dim(end, (C,), ()), ROW))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_sm, ref["p"].at[chunk, here])
        plgpu.copy_smem_to_gmem(vectors_sm, ref["vectors"].at[chunk, here])

        self.invert(sm["small"].at[wg])
        # With D the inverse of the blocks and L what is left of A: T = (I + M)(I + M^2) D, M = -D L, as M^4 = 0.
        d = []
        for r in of_group:
            inverse = plgpu.load(sm["small"].at[wg, pl.ds(r * C, C)], layout=WGMMA, optimized=False)
            none = jnp.zeros((C, BLOCK), f32)
            d.append(lax.concatenate([jnp.where(in_block[block], inverse, none) for block in blocks], 1))
            d_sm[r] = d[r].astype(fine)

        def products(left: list[Array], right: Any, starts: list[Array] | None = None) -> list[Array]:
            """`starts + left @ right` of each value head, all under way at once."""

            def f(*sums: Accumulator) -> list[Array]:
                for r, total in enumerate(sums):
                    if starts is not None:
                        total.set(starts[r])
                    total.add(left[r].astype(fine), right.at[r])
                return [total.read(group - 1 - r) for r, total in enumerate(sums)]

            return accumulate(f, *[(C, C)] * group)

        def put(sm: Any, x: list[Array]) -> None:
            plgpu.commit_smem()  # every warp has read what is there
            for r in of_group:
                sm[r] = x[r].astype(sm.dtype)
            plgpu.commit_smem()

        m = [x.astype(fine) for x in products(d, m_sm)]
        put(m_sm, m)
        y = products(products(m, m_sm), d_sm, d)
        put(d_sm, y)
        t = products(m, d_sm, y)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        put(out_sm, [x * columns(plgpu.load(gates_sm.at[r, 1], layout=COL)) for r, x in enumerate(t)])
        plgpu.copy_smem_to_gmem(out_sm, ref["t"].at[chunk, here])

    def invert(self, small: Any) -> None:
        """`(I - a)^-1` of the strictly lower triangular blocks a `[group C / BLOCK, BLOCK, BLOCK]` in shared memory, in place."""
        blocks = self.heads.group * C // BLOCK
        if interpreted():
            a = small[...].reshape(blocks, BLOCK, BLOCK)
            inverse = substitute(lambda row, column: a[:, row, column], blocks, lambda x: x)
            small[...] = jnp.stack(inverse, axis=1).reshape(small.shape)
        else:
            cut, layout = small.reshape(blocks, BLOCK, BLOCK), block_layout(blocks, BLOCK)

            def entry(row: int, column: int) -> Array:
                return plgpu.load(cut.at[:, row, column], layout=layout.reduce(1), optimized=False)

            inverse = substitute(entry, blocks, lambda x: plgpu.layout_cast(x, layout))
            plgpu.commit_smem()  # everybody has read
            for row, x in enumerate(inverse):
                cut[:, row, :] = x
        plgpu.commit_smem()
