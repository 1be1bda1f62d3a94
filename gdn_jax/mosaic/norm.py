"""gated_rms_norm: a sum over each row, then elementwise.

    y = round(round(round(o / sqrt(mean(o^2) + eps)) weight) silu(z))

A row moves its V elements of o and z and V of y: 768 bytes of bfloat16 at V = 128. It lies in the lanes of a part of one warp,
16 bytes of its wider input a lane, so that its sum stays there and has the same order whatever the number of rows.

| rows a CTA, of 16-bit inputs at V = 128 | when | why |
|---|---|---|
| 32 | 2^14 rows or more | they fill the card: four loads of a thread under way for each input |
| 8 | else | a thread has one: more CTAs, the shortest way |

The rows that are left at the end are cut into powers of two, each in a CTA of its own: nothing reaches beyond an array.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import block_layout, by_blocks, f32, launch, load, num_blocks, sigmoid

MANY = 2**14  # rows of a batch


def rows_of_block(num_rows: int, v_dim: int, vec: int) -> int:
    """How many rows one CTA takes: a power of two."""
    least = max(128 * vec // v_dim, 4)  # a vector for each thread
    most = min(least * (4 if num_rows >= MANY else 1), num_rows)
    return 1 << most.bit_length() - 1


def gated(x: Array, w: Array, z: Array, dtype: Any, weight_dtype: Any) -> Array:
    """A row that has been normalised, times its weight, times silu(z), with the roundings between."""
    x = x.astype(dtype).astype(f32) * w
    x = x.astype(jnp.promote_types(dtype, weight_dtype)).astype(f32) * (z * sigmoid(z))
    return x.astype(dtype)


def norm(o: Array, z: Array, weight: Array, eps: Array) -> Array:
    """`o`, `z` `[..., V]`, not empty, `weight` `[V]`, `eps` float32 scalar; returns `[..., V]` in `o.dtype`."""
    v_dim, dtype = weight.shape[0], o.dtype
    o, z, shape = o.reshape(-1, v_dim), z.reshape(-1, v_dim), o.shape
    vec = 16 // max(o.dtype.itemsize, z.dtype.itemsize)
    num_rows = o.shape[0]
    rows = rows_of_block(num_rows, v_dim, vec)

    def body(o_ref: Any, z_ref: Any, weight_ref: Any, eps_ref: Any, y_ref: Any) -> None:
        def block(first: Any, size: int) -> None:
            layout, here = block_layout(size, v_dim, vec), pl.ds(first, size)

            def over(x: Array, axis: int) -> Array:
                return plgpu.layout_cast(lax.broadcast_in_dim(x, (size, v_dim), (axis,)), layout)

            x, gate = load(o_ref.at[here], layout), load(z_ref.at[here], layout)
            w, eps = over(load(weight_ref, layout.reduce(0)), 1), eps_ref[0]
            x *= over(lax.rsqrt(jnp.sum(x * x, axis=1) * (1 / v_dim) + eps), 0)
            y_ref[here] = gated(x, w, gate, dtype, weight.dtype)

        by_blocks(num_rows, rows, block)

    grid, out = dict(block=num_blocks(num_rows, rows)), jax.ShapeDtypeStruct(o.shape, dtype)
    (y,) = launch(body, "gdn_norm", grid, (o, z, weight, eps[None]), (), out)
    return y.reshape(shape)
