"""What the Mosaic kernels share. Every use of private or undocumented names of Pallas is in this file.

A tile is `[K, vb]` of a state, one CTA of 4 warps each. A thread holds vectors of neighbouring columns (16 bytes where it
comes from shared memory) in several rows, so that a sum over K is a sum in the thread and over some lanes of its warp.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax._src import config as jax_config
from jax._src.pallas.mosaic_gpu.core import WGMMAAccumulatorRef
from jax._src.pallas.mosaic_gpu.primitives import wgmma_accumulator_load
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.typing import DTypeLike

f32, i32 = jnp.float32, jnp.int32
SMS = 132  # of an H200
WGMMA, TRANSPOSED = (
    plgpu.Layout.WGMMA,
    plgpu.Layout.WGMMA_TRANSPOSED,
)  # of what the tensor cores take and leave in registers
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)  # a vector along the rows of such a matrix, or along its columns


def _tiled(tiling: Any, warps: Any, lanes: Any) -> Any:
    layout = fa.TiledLayout(fa.Tiling(tiling), warps, lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def direct_layout(vb: int, dtype: DTypeLike) -> Any:
    """A tile read straight from global memory.

    The 4 warps on columns, or 2 of them on rows where a warp's part of a row would be less than the 32 bytes that memory
    moves (their sums cross warps, which is made for vectors of 4).
    """
    size = jnp.dtype(dtype).itemsize
    across = 2 if vb // 4 * size < 32 else 1  # warps on rows
    vec = 4 if across == 2 else 16 // size
    cols = vb * across // 4
    rows = 32 // (cols // vec)
    if across == 1:
        return _tiled(((rows, vb), (rows, cols), (1, vec)), (-5,), (-4, -3))
    return _tiled(((across * rows, vb), (rows, cols), (1, vec)), (-6, -5), (-4, -3))


def swizzled_layout(vb: int, dtype: DTypeLike) -> Any:
    """A tile in shared memory under `swizzled`: 8 lanes that follow each other never meet in a bank."""
    vec = 16 // jnp.dtype(dtype).itemsize
    cols = vb // 4
    across = cols // vec  # lanes on columns
    rows = 32 // across
    if across < 8:
        return _tiled(((rows, vb), (8, cols), (across, vec)), (-5,), (-6, -2, -4, -3))
    return _tiled(((rows, vb), (rows, cols), (1, vec)), (-5,), (-4, -3))


def channels_layout(size: int, vec: int = 1) -> Any:
    """A vector of channels, one or more vectors of `vec` a thread; of fewer than 128, several warps hold the same."""
    warps = min(size // vec, 128) // 32
    over = (-3,) if warps == 4 else (-3, fa.Replicated(4 // warps))
    return _tiled(((32 * warps * vec,), (32 * vec,), (vec,)), over, (-2,))


def row_layout() -> Any:
    """A vector of a multiple of 32 elements that every warp holds whole, so that its sum stays in the warp."""
    return _tiled(((32,), (1,)), (fa.Replicated(4),), (-2,))


def block_layout(rows: int, cols: int, vec: int = 1) -> Any:
    """A block of a matrix, both sizes powers of two, in vectors of `vec`: a row in as few lanes of a warp as hold it, the other
    lanes and the warps on other rows. Where the block is small, several threads hold the same.
    """
    across = min(cols // vec, 32)
    down = min(rows, 32 // across)
    warps = min(rows // down, 4)
    over, lanes = (fa.Replicated(4 // warps),), (fa.Replicated(32 // (down * across)),)
    tiling = ((warps * down, across * vec), (down, across * vec), (1, vec))
    return _tiled(tiling, (-6, *(over if warps < 4 else ())), (-4, -3, *(lanes if down * across < 32 else ())))


def powers_of_two(total: int, most: int) -> Iterator[tuple[int, int]]:
    """`(first, size)` of pieces that make up `total`, each the largest power of two up to `most` that is left."""
    first = 0
    while first < total:
        size = min(most, 1 << (total - first).bit_length() - 1)
        yield first, size
        first += size


def num_blocks(total: int, rows: int) -> int:
    """The CTAs of `by_blocks`."""
    return total // rows + (total % rows).bit_count()


def by_blocks(total: int, rows: int, block: Callable[[Any, int], None]) -> None:
    """What CTA "block" does: `block(first, rows)`, of static size; the last ones take the powers of two that make up the rest."""
    i, (whole, rest) = lax.axis_index("block"), divmod(total, rows)

    @pl.when(i < whole)
    def _() -> None:
        block(i * rows, rows)

    for number, (first, size) in enumerate(powers_of_two(rest, rows)):

        @pl.when(i == whole + number)
        def _() -> None:
            block(whole * rows + first, size)


def by_tma(vb: int) -> bool:
    """Whether tiles of `vb` columns go through shared memory; narrower ones are read straight from global memory."""
    return vb > 32


def layout_of_tile(vb: int, dtype: DTypeLike) -> Any:
    """How the threads of a CTA hold a tile."""
    return (swizzled_layout if by_tma(vb) else direct_layout)(vb, dtype)


def swizzled(dtype: DTypeLike) -> tuple[Any, ...]:
    """The transforms of a tile in shared memory, in rows of 128 bytes; the tensor cores read no other."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, 128 // jnp.dtype(dtype).itemsize)), swizzle(128)


def rule_step(
    m: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array, scale: Array, norm: bool, layout: Any
) -> tuple[Array, Array]:
    """One token on a tile: `m` `[K, vb]`, raw `q`, `k` `[K]`, `v` `[vb]`, the rest scalars, all float32.

    Both sums over K read the tile before its decay, in one pass, and the norms of q and k are factors of the sums:
    with a = M^T k and b = M^T q,   u = beta (v - e^g a / |k|) / |k|,   M' = e^g M + k u^T,   o = (e^g b + (k . q) u) / |q|.
    """

    def rows(x: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, m.shape, (0,)), layout)

    def columns(x: Array) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, m.shape, (1,)), layout)

    def over_rows(x: Array) -> Array:
        return plgpu.layout_cast(jnp.sum(x, axis=0), layout.reduce(0))

    ks, a, b = rows(k), over_rows(m * rows(k)), over_rows(m * rows(q))
    k_factor = lax.rsqrt(jnp.sum(k * k) + 1e-6) if norm else f32(1)
    q_factor = scale * lax.rsqrt(jnp.sum(q * q) + 1e-6) if norm else scale
    u = (v - a * (decay * k_factor)) * (beta * k_factor)
    return m * decay + ks * columns(u), (b * decay + u * jnp.sum(k * q)) * q_factor


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    return 1 / (1 + jnp.exp(-x))


def softplus(x: Array) -> Array:
    """log1p(e^x), also where e^x overflows."""
    e = jnp.exp(-jnp.abs(x))
    s = e / (2 + e)  # at most 1/3
    series: Any = 2 / 15
    for power in range(13, 1, -2):
        series = series * (s * s) + 2 / power
    # log1p(e) = 2 atanh(s) = 2 s + s^3 series, where 2 s is e - s e, whose error is a third.
    return jnp.maximum(x, 0) + (e - s * (e - s * s * series))


def log_decay(A_log: Array, a: Array, dt_bias: Array) -> Array:
    """g of `gdn_gating` within its tolerance; never NaN for finite inputs."""
    x = jnp.minimum(a + dt_bias, float(jnp.finfo(f32).max))  # no inf times 0
    small = x < -17  # there the softplus is e^x
    half = jnp.exp(0.5 * jnp.where(small, A_log + x, A_log))  # e^A_log alone may overflow or underflow
    return -jnp.where(small, 1, softplus(x)) * half * half


def decay_of(A_log: Array, a: Array, dt_bias: Array) -> Array:
    """e^g of `gdn_gating`, for scalars: right for any finite input (e^g is 0 long before g overflows)."""
    return jnp.exp(log_decay(A_log, a, dt_bias))


def interpreted() -> bool:
    """Whether what is traced now runs in Pallas' interpreter: it has no accumulators, and no second view of a buffer."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


class Accumulator:
    """A sum of matrix products in registers, float32. Products run in the order of all `add`s, and nobody waits before `read`."""

    def __init__(self, ref: Any, shape: tuple[int, int]) -> None:
        self.ref, self.value = ref, jnp.zeros(shape if ref is None else (), f32)

    def set(self, x: Array) -> None:
        """The sum starts from `x`."""
        if self.ref is None:
            self.value = x
        else:
            self.ref[...] = x

    def add(self, a: Any, b: Any) -> None:
        """`a @ b`: `a` in registers (layout WGMMA) or shared memory, `b` in shared memory; both of one 16-bit dtype."""
        if self.ref is None:
            left, right = (x if isinstance(x, Array) else x[...] for x in (a, b))
            self.value += jnp.dot(left, right, preferred_element_type=f32)
        else:
            plgpu.wgmma(self.ref, a, b)

    def read(self, pending: int = 0) -> Array:
        """The sum, as soon as all but the last `pending` products of this thread, on whatever sum, are done."""
        return self.value if self.ref is None else wgmma_accumulator_load(self.ref, wait_n=pending)


def accumulate(f: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
    """`f(*sums)`, an `Accumulator` of zeros for each shape."""
    if interpreted():
        return f(*(Accumulator(None, shape) for shape in shapes))

    def scope(*refs: Any) -> Any:
        return f(*(Accumulator(ref, shape) for ref, shape in zip(refs, shapes)))

    return pl.run_scoped(scope, *(WGMMAAccumulatorRef(shape, f32) for shape in shapes))


class Views(NamedTuple):
    """The same bytes of 64 x 64 matrices of 16 bits: as products take them, as TMA moves them to or from any row of an array,
    and in no order, for copies of a few rows.

    A copy between the tiled form, which products need, and global memory has to begin at a multiple of 8 rows. The bytes of
    64 swizzled rows of 128 bytes are the same without the tiling: TMA gets this view.
    """

    tiled: Any
    moved: Any
    plain: Any


class Memory:
    """Shared memory by name: shape, dtype, and its use, "rows" and "moved" for `Views` with and without the last, "tiled" for
    what only products take, "plain" for the rest.
    """

    USES = "rows", "moved", "tiled", "plain"

    def __init__(self, **arrays: tuple[tuple[int, ...], DTypeLike, str]) -> None:
        self.arrays = dict(sorted(arrays.items(), key=lambda item: self.USES.index(item[1][2])))

    def views(self) -> list[list[Any]]:
        """Groups of refs that alias: in each, what comes first in all of them stands at the same place."""

        def group(uses: Sequence[str], transforms: Callable[[Any, str], tuple[Any, ...]]) -> list[Any]:
            some = (x for x in self.arrays.values() if x[2] in uses)
            return [plgpu.SMEM(shape, dtype, transforms=transforms(dtype, use)) for shape, dtype, use in some]

        groups = (
            group(self.USES, lambda dtype, use: () if use == "plain" else swizzled(dtype)),
            group(self.USES[:2], lambda dtype, use: swizzled(dtype)[1:]),
            group(self.USES[:1], lambda dtype, use: ()),
        )
        return [refs for refs in groups if refs]

    def named(self, refs: Sequence[Any]) -> dict[str, Any]:
        """The refs that a kernel got for `views()`."""
        out: dict[str, Any] = {}
        for i, (name, (_, _, use)) in enumerate(self.arrays.items()):
            seen = [group[i] for group in refs if i < len(group)]
            out[name] = Views(seen[0], seen[1], seen[-1]) if use in self.USES[:2] else seen[0]
        return out


def overlay(*memories: Memory) -> Any:
    """Scratch memory that serves any one of these; `parts_of` tells them apart."""
    if interpreted():
        return [plgpu.SMEM(shape, dtype) for shape, dtype, _ in memories[0].arrays.values()]
    return plgpu.RefUnion(*(group for memory in memories for group in memory.views()))


def parts_of(scratch: Any, *memories: Memory) -> list[dict[str, Any]]:
    """What `overlay` of the same memories made, by name."""
    if interpreted():
        return [memories[0].named([scratch] * 3)]
    rest = iter(scratch)
    return [memory.named([next(rest) for _ in memory.views()]) for memory in memories]


def clear_behind(tiles: Sequence[Any], count: Array) -> None:
    """Zeroes rows `count` and on of 64 x 64 tiles in shared memory: they belong to others, who may be NaN, and so would zero
    times them be.
    """
    real = lax.broadcast_in_dim(plgpu.broadcasted_iota(i32, (64,), 0, layout=ROW) < count, (64, 64), [0])
    for tile in tiles:
        x = plgpu.load(tile, layout=WGMMA)
        tile[...] = jnp.where(real, x, jnp.zeros_like(x))
    plgpu.commit_smem()


def flags(shape: tuple[int, ...]) -> Any:
    """Flags of zeros in global memory, for all CTAs of a launch."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR(shape))


def raise_flag(flag: Any) -> None:
    """Tells other CTAs that what this warpgroup has stored by TMA, and waited for, is there."""
    plgpu.semaphore_signal(flag, 1, memory_scope="gpu")


def await_flag(flag: Any) -> None:
    """Waits for `raise_flag`."""
    plgpu.semaphore_wait(flag, 1, decrement=False, memory_scope="gpu")


def store_rows(tile: Any, out: Callable[[Any], Any], first: Any, count: Any, most: int = 64) -> None:
    """Copies the first `count` rows of `tile` `[most, …]` to global memory; `out(pl.ds(…))` is the place of some rows there."""

    @pl.when(count >= most)
    def _() -> None:
        plgpu.copy_smem_to_gmem(tile, out(pl.ds(first, most)))

    @pl.when(count < most)
    def _() -> None:
        done, size = count & 0, most // 2  # a traced zero: a constant cannot be where a slice begins
        while size:
            some = count & size

            @pl.when(some != 0)
            def _(done: Any = done, size: int = size) -> None:
                plgpu.copy_smem_to_gmem(tile.at[pl.ds(done, size)], out(pl.ds(first + done, size)))

            done, size = done + some, size // 2


def keep(flag: Array, x: Array, layout: Any) -> Array:
    """`x` where the scalar `flag` holds, else zeros."""
    return lax.cond(flag, lambda: x, lambda: plgpu.layout_cast(jnp.zeros_like(x), layout))


def load(ref: Any, layout: Any) -> Array:
    """A vector from global or shared memory in `layout`, as float32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(f32)


def tokens_of(query_start_loc: Any, n: Array, num_tokens: int) -> tuple[Array, Array]:
    """The first token of sequence n and the one behind its last, inside `[0, num_tokens]` whatever the ref holds."""
    start = jnp.clip(query_start_loc[n], 0, num_tokens)
    return start, jnp.clip(query_start_loc[n + 1], start, num_tokens)


def launch(
    body: Callable[..., None],
    name: str,
    grid: dict[str, int],
    inputs: Sequence[Array],
    pools: Sequence[Array],
    out: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
    scratch: Sequence[Any] = (),
    cluster: dict[str, int] | None = None,
    approx_math: bool = True,
    warpgroups: int | None = None,
    lane: bool = False,
) -> tuple[Array, ...]:
    """Runs `body(*inputs, *pools, *outs, *scratch)` on a grid; a pool that is donated is updated in its own memory.

    The body sees a pool `[L, num_slots, …]` as `[L * num_slots, …]`, so that a slot is one coordinate of a copy. No barriers
    between the lanes of a CTA are added: a kernel whose lanes exchange data through shared memory places them. A CTA has one
    warpgroup, or `warpgroups`, the axis "wg". `lane`: layouts are as the body says, none is inferred.
    """

    def kernel(*refs: Any) -> None:
        pl.run_scoped(partial(body, *refs), *scratch, collective_axes=() if warpgroups is None else "wg")

    cluster = cluster or {}
    call: Any = pl.kernel(
        kernel,
        out_type=out if isinstance(out, tuple) else (out,),
        mesh=plgpu.Mesh(
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            cluster=tuple(cluster.values()),
            cluster_names=tuple(cluster),
            num_threads=warpgroups,
            thread_name=None if warpgroups is None else "wg",
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=4096,
            lowering_semantics=getattr(plgpu.LoweringSemantics, "Lane" if lane else "Warpgroup"),
        ),
        name=name,
    )
    rows = [jax.new_ref(pool.reshape(-1, *pool.shape[2:]), memory_space=plgpu.GMEM) for pool in pools]
    results = call(*inputs, *rows)
    return *results, *(jax.freeze(ref).reshape(pool.shape) for ref, pool in zip(rows, pools, strict=True))


def beside_xla(fast: Callable[..., Any], plain: Callable[..., Any], *args: Any, forward: bool = False) -> Any:
    """`fast(*args)` on CUDA, and `plain(*args)`, which computes the same, wherever a kernel cannot go.

    That is another platform at lowering, `vmap` (a kernel has no batching rule), and the backward pass. With
    `forward` forward-mode derivatives too, which JAX cannot have around a pool that is updated in place.
    """

    @jax.custom_batching.custom_vmap
    def batched(*args: Any) -> Any:
        return lax.platform_dependent(*args, cuda=fast, default=plain)

    @batched.def_vmap
    def _(axis_size: int, in_batched: Sequence[Any], *args: Any) -> Any:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, list(in_batched))
        out = jax.vmap(plain, in_axes=tuple(axes), axis_size=axis_size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    if forward:
        both_modes = jax.custom_jvp(lambda *args: batched(*args))

        @both_modes.defjvp
        def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            return both_modes(*primals), jax.jvp(plain, primals, tangents)[1]

        return both_modes(*args)

    @jax.custom_vjp
    def differentiable(*args: Any) -> Any:
        return batched(*args)

    def backward(args: Any, cotangents: Any) -> Any:
        return jax.vjp(plain, *args)[1](cotangents)

    differentiable.defvjp(lambda *args: (batched(*args), args), backward)
    return differentiable(*args)
