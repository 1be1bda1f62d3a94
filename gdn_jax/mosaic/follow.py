"""Along the sequences: the states and the outputs of `chunk`, from what `prepare` made of every chunk.

A warpgroup has 64 columns of one head's state, transposed and in float32, in the accumulators of its products; every product
takes its left side from registers, so that nothing of the chain passes through shared memory. Another one fetches the next
chunks by TMA.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import (
    COL,
    SMS,
    TRANSPOSED,
    WGMMA,
    Accumulator,
    Memory,
    Views,
    accumulate,
    clear_behind,
    f32,
    i32,
    interpreted,
    store_rows,
)
from gdn_jax.mosaic.prepare import DECAY, E1, EQ, C, Heads, W, columns


class Places(NamedTuple):
    """For each sequence, or segment of one, int32: its first token and how many, its first chunk, where its tokens end, padding
    included, and the slots to read and to write (-1: none).
    """

    start: Any
    length: Any
    base: Any
    end: Any
    read: Any
    write: Any


class Item(NamedTuple):
    """What a CTA follows at a time: `chains` tiles of one head's state along a sequence, from tile `first` on."""

    i: Array
    hv: Array
    first: Array
    at: Places
    chunks: Array


class Walk:
    """The memory and the work of a CTA that walks along sequences, one after the other, with `chains` tiles of 64 columns of
    one head's state; `ring` chunks are in shared memory, and the next state.

    Without `outputs` only the states are computed, `[…, V + K]` of them: behind the V columns, K more see values of zero.
    """

    def __init__(
        self,
        heads: Heads,
        dtype: Any,
        pool: Array,
        n: int,
        chains: int,
        ring: int,
        outputs: bool = True,
        given: bool = False,
    ) -> None:
        self.heads, self.dtype, self.chains, self.ring, self.outputs = heads, dtype, chains, ring, outputs
        self.given = given  # states come in an array of their own, one row each
        self.num_slots, self.parts = pool.shape[1], pool.shape[-1] // C // chains
        self.items = n * heads.num_v_heads * self.parts
        self.ctas = min(self.items, SMS) if outputs else self.items
        self.streams = dict(k=heads.halves, v=chains, q=heads.halves) if outputs else dict(k=heads.halves, v=chains)
        self.matrices = ("t", "p") if outputs else ("t",)
        self.copies = sum(self.streams.values()) + len(self.matrices) + 1  # of a chunk, by TMA
        arrays: dict[str, Any] = {name: ((ring, many, C, C), dtype, "moved") for name, many in self.streams.items()}
        arrays |= {name: ((ring, C, C), dtype, "tiled") for name in self.matrices}
        if outputs:
            arrays["o"] = ((chains, C, C), dtype, "rows")
        arrays["state"] = ((chains, heads.halves, C, C), f32 if given else pool.dtype, "tiled")
        self.memory = Memory(**arrays, vectors=((ring, 4, C), f32, "plain"))
        self.barriers = dict(
            arrived=plgpu.Barrier(num_arrivals=self.copies, num_barriers=ring),
            alone=plgpu.Barrier(num_arrivals=self.copies),
            free=plgpu.Barrier(num_arrivals=chains, num_barriers=ring),
            state_here=plgpu.Barrier(num_arrivals=chains * heads.halves),
            state_free=plgpu.Barrier(num_arrivals=chains),
        )
        if outputs:
            self.barriers |= {name: plgpu.Barrier(num_barriers=max(2, chains)) for name in ("o_here", "o_free")}

    def work(self, ref: Any, sm: Any, cta: Array, wg: Array, ready: Callable[..., None] | None = None) -> None:
        """What warpgroup `wg` of CTA `cta` does; `ready(chunk, hv)` is called before what was prepared of them is fetched."""
        count = lax.div(self.items - cta + (self.ctas - 1), i32(self.ctas))

        @pl.when(wg == self.chains)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            self.fetch(ref, sm, cta, count, ready)

        @pl.when(wg < self.chains)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")

            def turn(n: Array, slot: Array) -> Array:
                return self.chain(ref, sm, self.item(ref, cta, n), slot, wg)

            lax.fori_loop(0, count, turn, count & 0)

    def item(self, ref: Any, cta: Array, n: Array) -> Item:
        """The nth of a CTA; without chunks behind its last."""
        at = cta + n * self.ctas
        here = jnp.minimum(at, self.items - 1)
        of = lax.div(here, i32(self.parts))
        hv, i = lax.rem(of, i32(self.heads.num_v_heads)), lax.div(of, i32(self.heads.num_v_heads))
        places = Places(*(ref["places"][i, column] for column in range(len(Places._fields))))
        chunks = jnp.where(at < self.items, lax.div(places.length + (C - 1), i32(C)), 0)
        return Item(i, hv, lax.rem(here, i32(self.parts)) * self.chains, places, chunks)

    def state_at(self, ref: Any, item: Item, slot: Array, tile: Array, half: int) -> Any:
        """A tile of a state in the pool."""
        return ref["pool"].at[ref["layer"][0] * self.num_slots + slot, item.hv, pl.ds(half * C, C), pl.ds(tile * C, C)]

    def fetch(self, ref: Any, sm: Any, cta: Array, count: Array, ready: Callable[..., None] | None) -> None:
        """Keeps the ring full, and takes the outputs away."""
        heads, ring = self.heads, self.ring

        def copy(item: Item, c: Array, slot: Array, barrier: Any) -> None:
            here, entry = pl.ds(item.at.start + c * C, C), item.at.base + c
            h, valued = lax.div(item.hv, i32(heads.shared)), item.first < heads.v_dim // C
            column = dict(k=h * heads.k_dim, v=item.hv * heads.v_dim + item.first * C, q=h * heads.k_dim)

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
                ready(entry, item.hv)
            for name in ("vectors", *self.matrices):
                plgpu.copy_gmem_to_smem(ref[name].at[entry, item.hv], sm[name].at[slot], barrier)
            if self.outputs:
                tiles("q")

        def arrive(barrier: Any, times: int) -> None:
            for _ in range(times):
                plgpu.barrier_arrive(barrier)

        def bring(item: Item, c: Array, slot: Array) -> None:
            """Chunk c, if there is one."""
            tokens = jnp.where(c < item.chunks, item.at.length - c * C, 0)

            @pl.when(tokens >= C)
            def _() -> None:
                copy(item, c, slot, sm["arrived"].at[slot])

            @pl.when((tokens > 0) & (tokens < C))
            def _() -> None:
                copy(item, c, slot, sm["alone"])
                plgpu.barrier_wait(sm["alone"])
                clear_behind([sm[name].tiled.at[slot, at] for name in "kv" for at in range(self.streams[name])], tokens)
                arrive(sm["arrived"].at[slot], self.copies)

        def bring_state(item: Item) -> None:
            def take() -> None:
                for at in range(self.chains):
                    for half in range(heads.halves):
                        tile = item.first + at
                        if self.given:
                            there = ref["given"].at[item.i, item.hv, pl.ds(half * C, C), pl.ds(tile * C, C)]
                        else:
                            there = self.state_at(ref, item, item.at.read, tile, half)
                        plgpu.copy_gmem_to_smem(there, sm["state"].at[at, half], sm["state_here"])

            if self.given:
                return take()
            pl.when(item.at.read >= 0)(take)
            pl.when(item.at.read < 0)(lambda: arrive(sm["state_here"], self.chains * heads.halves))

        def send(item: Item, c: Array) -> None:
            """The outputs of a whole chunk, to where they belong."""
            for at in range(self.chains):
                plgpu.barrier_wait(sm["o_here"].at[at])
                plgpu.commit_smem()
                column = pl.ds(item.hv * heads.v_dim + (item.first + at) * C, C)
                plgpu.copy_smem_to_gmem(sm["o"].moved.at[at], ref["o"].at[pl.ds(item.at.start + c * C, C), column])

        def sent() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for at in range(self.chains):
                plgpu.barrier_arrive(sm["o_free"].at[at])

        def turn(n: Array, carry: tuple[Item, Array]) -> tuple[Item, Array]:
            """What belongs to item n, and the start of the next one."""
            item, at = carry
            after = self.item(ref, cta, n + 1)
            pl.when(n >= 0)(lambda: plgpu.barrier_wait(sm["state_free"]))
            pl.when(n + 1 < count)(lambda: bring_state(after))
            if self.outputs:
                pl.when(n >= 0)(sent)

            @pl.loop(jnp.minimum(item.chunks, ring), item.chunks + ring)
            def _(c: Array) -> None:
                slot, own = lax.rem(at + c, i32(ring)), c < item.chunks

                @pl.when(c >= ring)
                def _() -> None:
                    plgpu.barrier_wait(sm["free"].at[slot])

                if self.outputs:
                    pl.when((c > ring) & (c - ring < item.chunks))(sent)
                bring(jax.tree.map(partial(jnp.where, own), item, after), jnp.where(own, c, c - item.chunks), slot)
                if self.outputs:
                    pl.when((c >= ring) & (c - ring < item.chunks - 1))(lambda: send(item, c - ring))

            return after, lax.rem(at + item.chunks, i32(ring))

        first = self.item(ref, cta, count & 0)
        if not self.outputs:

            @pl.when(first.first >= heads.v_dim // C)  # the only item of its CTA
            def _() -> None:
                for slot in range(ring):
                    for at in range(self.chains):
                        sm["v"].tiled[slot, at] = plgpu.layout_cast(jnp.zeros((C, C), self.dtype), WGMMA)
                plgpu.commit_smem()

        lax.fori_loop(-1, count, turn, (first._replace(chunks=count & 0), count & 0))

    def chain(self, ref: Any, sm: Any, item: Item, slot: Array, wg: Array) -> Array:
        """One tile of a state, and its columns of the outputs; `slot` is where the first chunk is, and the next one's comes
        back.
        """
        halves, ring, dtype = self.heads.halves, self.ring, self.dtype
        start, length, chunks, tile = item.at.start, item.at.length, item.chunks, item.first + wg
        out = pl.ds(item.hv * self.heads.v_dim + tile * C, C)
        o = Views(*(x.at[wg] for x in sm["o"])) if self.outputs else Views(None, None, None)

        def initial(half: int) -> Array:
            def given() -> Array:
                x = plgpu.load(sm["state"].at[wg, half].transpose((1, 0)), layout=TRANSPOSED)
                return plgpu.layout_cast(x, WGMMA).astype(f32)

            zeros = lambda: plgpu.layout_cast(jnp.zeros((C, C), f32), WGMMA)  # noqa: E731
            return given() if self.given else lax.cond(item.at.read >= 0, given, zeros)

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

        plgpu.barrier_wait(sm["state_here"])
        states = [initial(half) for half in range(halves)]
        if interpreted():
            plgpu.commit_smem()
        plgpu.barrier_arrive(sm["state_free"])
        nothing = plgpu.layout_cast(jnp.zeros((C, C), dtype), WGMMA)
        carry = slot, states, [m.astype(dtype) for m in states], *[nothing] * self.outputs
        slot, states, _, *o_last = lax.fori_loop(0, chunks, turn, carry)

        @pl.when(item.at.write >= 0)
        def _() -> None:
            for half, m in enumerate(states):
                there = self.state_at(ref, item, item.at.write, tile, half).transpose((1, 0))
                there[...] = plgpu.layout_cast(m.astype(ref["pool"].dtype), TRANSPOSED)

        if not self.outputs:
            return slot

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

        @pl.when(start + length < item.at.end)
        def _() -> None:
            put(nothing, start + length, item.at.end)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return slot
