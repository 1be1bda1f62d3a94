"""Along the sequences: the states and the outputs of `chunk`, from what `prepare` made of every chunk.

A warpgroup has 64 columns of one head's state, transposed and in float32, in the accumulators of its products; every product
takes its left side from registers, so that nothing of the chain passes through shared memory. Another one fetches the next
chunks by TMA.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import (
    COL,
    TRANSPOSED,
    WGMMA,
    Accumulator,
    Memory,
    Views,
    accumulate,
    f32,
    i32,
    interpreted,
    store_rows,
)
from gdn_jax.mosaic.prepare import DECAY, E1, EQ, C, Heads, W, columns


class Walk:
    """The memory and the work of a CTA that walks along a sequence with `chains` tiles of 64 columns of one head's state;
    `ring` chunks are in shared memory.

    Without `outputs` only the states are computed, `[…, V + K]` of them: behind the V columns, K more see values of zero.
    """

    def __init__(
        self, heads: Heads, dtype: Any, pool: Array, n: int, chains: int, ring: int, outputs: bool = True
    ) -> None:
        self.heads, self.dtype, self.n, self.chains, self.ring, self.outputs = heads, dtype, n, chains, ring, outputs
        self.num_slots, self.parts = pool.shape[1], pool.shape[-1] // C // chains
        self.streams = dict(k=heads.halves, v=chains, q=heads.halves) if outputs else dict(k=heads.halves, v=chains)
        self.matrices = ("t", "p") if outputs else ("t",)
        self.copies = sum(self.streams.values()) + len(self.matrices) + 1  # of a chunk, by TMA
        arrays: dict[str, Any] = {name: ((ring, many, C, C), dtype, "moved") for name, many in self.streams.items()}
        arrays |= {name: ((ring, C, C), dtype, "tiled") for name in self.matrices}
        if outputs:
            arrays["o"] = ((chains, C, C), dtype, "rows")
        self.memory = Memory(**arrays, vectors=((ring, 4, C), f32, "plain"))
        self.barriers = dict(
            arrived=plgpu.Barrier(num_arrivals=self.copies, num_barriers=ring),
            alone=plgpu.Barrier(num_arrivals=self.copies),
            free=plgpu.Barrier(num_arrivals=chains, num_barriers=ring),
        )
        if outputs:
            self.barriers |= {name: plgpu.Barrier(num_barriers=max(2, chains)) for name in ("o_here", "o_free")}

    @property
    def ctas(self) -> int:
        return self.n * self.heads.num_v_heads * self.parts

    def work(self, ref: Any, sm: Any, cta: Array, wg: Array, ready: Callable[..., None] | None = None) -> None:
        """What warpgroup `wg` of CTA `cta` does; `ready(chunk, hv)` is called before what was prepared of them is fetched."""
        of = lax.div(cta, i32(self.parts))
        hv, i = lax.rem(of, i32(self.heads.num_v_heads)), lax.div(of, i32(self.heads.num_v_heads))
        first = lax.rem(cta, i32(self.parts)) * self.chains  # tile of the state

        @pl.when(wg == self.chains)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            self.fetch(ref, sm, i, hv, first, ready)

        @pl.when(wg < self.chains)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            self.chain(ref, sm, i, hv, first + wg, wg)

    def fetch(self, ref: Any, sm: Any, i: Array, hv: Array, first: Array, ready: Callable[..., None] | None) -> None:
        """Keeps the ring full."""
        heads, ring = self.heads, self.ring
        h, (start, length, base) = lax.div(hv, i32(heads.shared)), (ref[x][i] for x in ("start", "length", "base"))
        chunks, valued = lax.div(length + (C - 1), i32(C)), first < heads.v_dim // C
        column = dict(k=h * heads.k_dim, v=hv * heads.v_dim + first * C, q=h * heads.k_dim)

        def copy(c: Array, slot: Array, barrier: Any) -> None:
            here, entry = pl.ds(start + c * C, C), base + c

            def tiles(name: str) -> None:
                begin = heads.first["qkv".index(name)] + column[name]
                for at in range(self.streams[name]):
                    source = ref[name].at[here, pl.ds(begin + at * C, C)]
                    plgpu.copy_gmem_to_smem(source, sm[name].moved.at[slot, at], barrier)

            tiles("k")
            if self.outputs:
                tiles("v")
            else:
                pl.when(valued)(lambda: tiles("v"))
                pl.when(jnp.logical_not(valued))(lambda: arrive(barrier, self.chains))
            if ready is not None:
                ready(entry, hv)
            for name in ("vectors", *self.matrices):
                plgpu.copy_gmem_to_smem(ref[name].at[entry, hv], sm[name].at[slot], barrier)
            if self.outputs:
                tiles("q")

        def arrive(barrier: Any, times: int) -> None:
            for _ in range(times):
                plgpu.barrier_arrive(barrier)

        if not self.outputs:

            @pl.when(jnp.logical_not(valued))
            def _() -> None:
                for slot in range(ring):
                    for at in range(self.chains):
                        sm["v"].tiled[slot, at] = plgpu.layout_cast(jnp.zeros((C, C), self.dtype), WGMMA)
                plgpu.commit_smem()

        def send(c: Array) -> None:
            """The outputs of a whole chunk, to where they belong."""
            for at in range(self.chains):
                plgpu.barrier_wait(sm["o_here"].at[at])
                plgpu.commit_smem()
                there = ref["o"].at[pl.ds(start + c * C, C), pl.ds(hv * heads.v_dim + (first + at) * C, C)]
                plgpu.copy_smem_to_gmem(sm["o"].moved.at[at], there)

        def sent() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for at in range(self.chains):
                plgpu.barrier_arrive(sm["o_free"].at[at])

        if self.outputs:
            sent()

        @pl.loop(0, jnp.where(chunks > 0, chunks + ring, 0))
        def _(c: Array) -> None:
            slot, count = lax.rem(c, i32(ring)), length - c * C

            @pl.when(c >= ring)
            def _() -> None:
                plgpu.barrier_wait(sm["free"].at[slot])

            if self.outputs:
                pl.when((c > ring) & (c - ring < chunks))(sent)

            @pl.when(count >= C)
            def _() -> None:
                copy(c, slot, sm["arrived"].at[slot])

            @pl.when((count > 0) & (count < C))
            def _() -> None:  # rows of others, who may be NaN: zero times them is not zero
                copy(c, slot, sm["alone"])
                plgpu.barrier_wait(sm["alone"])
                row = plgpu.broadcasted_iota(i32, (C, C), 0, layout=WGMMA)
                for tile, many in ((sm["k"].tiled, heads.halves), (sm["v"].tiled, self.chains)):
                    for at in range(many):
                        x = plgpu.load(tile.at[slot, at], layout=WGMMA)
                        tile[slot, at] = jnp.where(row < count, x, jnp.zeros_like(x))
                plgpu.commit_smem()
                arrive(sm["arrived"].at[slot], self.copies)

            if self.outputs:

                @pl.when((c >= ring) & (c - ring < chunks - 1))
                def _() -> None:
                    send(c - ring)

    def chain(self, ref: Any, sm: Any, i: Array, hv: Array, tile: Array, wg: Array) -> None:
        """One tile of a state, and its columns of the outputs."""
        halves, ring, dtype = self.heads.halves, self.ring, self.dtype
        start, length, read, write = (ref[x][i] for x in ("start", "length", "read", "write"))
        chunks, out = lax.div(length + (C - 1), i32(C)), pl.ds(hv * self.heads.v_dim + tile * C, C)
        o = Views(*(x.at[wg] for x in sm["o"])) if self.outputs else Views(None, None, None)

        def state_at(pool: str, row: Array, half: int) -> Any:
            return ref[pool].at[row, hv, pl.ds(half * C, C), pl.ds(tile * C, C)].transpose((1, 0))

        row = ref["layer"][0] * self.num_slots  # of slot 0

        def initial(half: int) -> Array:
            def given() -> Array:
                at = ("given", i) if "given" in ref else ("pool", row + read)
                x = plgpu.load(state_at(*at, half), layout=TRANSPOSED, optimized=False)
                return plgpu.layout_cast(x, WGMMA).astype(f32)

            if "given" in ref:
                return given()
            return lax.cond(read >= 0, given, lambda: plgpu.layout_cast(jnp.zeros((C, C), f32), WGMMA))

        def step(c: Array, slot: Any, carry: Any) -> Any:
            """One chunk. What it adds to the outputs leaves when the next one has begun."""
            states, sides, *o_before = carry
            plgpu.barrier_wait(sm["arrived"].at[slot])
            keys = [sm["k"].tiled.at[slot, half] for half in range(halves)]
            values, t = (x.transpose((1, 0)) for x in (sm["v"].tiled.at[slot, wg], sm["t"].at[slot]))

            def vector(which: int) -> Array:
                return columns(plgpu.load(sm["vectors"].at[slot, which], layout=COL))

            def chunk(x: Accumulator, u: Accumulator, *sums: Accumulator) -> Any:
                after, y = sums[:halves], sums[halves:]
                for side, key in zip(sides, keys):
                    x.add(side, key.transpose((1, 0)))
                u.add(values, t)
                for outputs in o_before:

                    @pl.when(c > 0)
                    def _() -> None:
                        plgpu.barrier_wait(sm["o_free"].at[wg])
                        o.tiled.transpose((1, 0))[...] = outputs  # stmatrix turns it
                        if interpreted():
                            plgpu.commit_smem()
                        plgpu.barrier_arrive(sm["o_here"].at[wg])

                u.add((x.read(1) * -vector(E1)).astype(dtype), t)
                for total in y:
                    for half, side in enumerate(sides):
                        total.add(side, sm["q"].tiled.at[slot, half].transpose((1, 0)))
                decay = plgpu.load(sm["vectors"].at[slot, DECAY, 0])
                decayed = [m * decay for m in states]
                new = u.read(halves * len(y))
                weighted, plain = (new * vector(W)).astype(dtype), new.astype(dtype)
                for total, m, key in zip(after, decayed, keys):
                    total.set(m)
                    total.add(weighted, key)
                for total in y:
                    total.set(total.read(halves) * vector(EQ))
                    total.add(plain, sm["p"].at[slot].transpose((1, 0)))
                states_after = [total.read(len(y)) for total in after]
                sides_after = [m.astype(dtype) for m in states_after]
                return states_after, sides_after, *(total.read().astype(dtype) for total in y)

            carry = accumulate(chunk, *[(C, C)] * (2 + halves + self.outputs))
            if interpreted():
                plgpu.commit_smem()
            plgpu.barrier_arrive(sm["free"].at[slot])
            return carry

        def turn(c: Array, carry: Any) -> Any:
            slot, *carry = carry
            return jnp.where(slot == ring - 1, 0, slot + 1), *step(c, slot, carry)

        states = [initial(half) for half in range(halves)]
        nothing = plgpu.layout_cast(jnp.zeros((C, C), dtype), WGMMA)
        carry = chunks & 0, states, [m.astype(dtype) for m in states], *[nothing] * self.outputs
        _, states, _, *o_last = lax.fori_loop(0, chunks, turn, carry)

        @pl.when(write >= 0)
        def _() -> None:
            for half, m in enumerate(states):
                state_at("pool", row + write, half)[...] = plgpu.layout_cast(m.astype(ref["pool"].dtype), TRANSPOSED)

        if not self.outputs:
            return

        plgpu.barrier_wait(sm["o_free"].at[wg])

        def put(x: Array, begin: Array, end: Array) -> None:
            """Some rows of `o`, of x or x again and again."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o.plain.transpose((1, 0))[...] = plgpu.layout_cast(x, TRANSPOSED)
            plgpu.commit_smem()

            @pl.loop(0, lax.div(end - begin + (C - 1), i32(C)))
            def _(at: Array) -> None:
                row = begin + at * C
                store_rows(o.plain, lambda rows: ref["o"].at[rows, out], row, end - row)

        @pl.when(chunks > 0)
        def _() -> None:
            put(o_last[0], start + (chunks - 1) * C, start + length)

        end = jnp.where(i == self.n - 1, ref["o"].shape[0], ref["end"][i])

        @pl.when(start + length < end)
        def _() -> None:
            put(nothing, start + length, end)

        plgpu.wait_smem_to_gmem(0)
