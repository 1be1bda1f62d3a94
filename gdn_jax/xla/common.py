"""What the XLA operators share: true float32 products, real roundings, one token of the rule, rows of a pool."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

f32 = jnp.float32


def dot(a: Array, b: Array, contract: tuple[int, int] = (2, 1)) -> Array:
    """Batched product over the first axis in true float32, whatever the default precision: `[B, m, k] x [B, k, n]`."""
    dimensions = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=f32)


def round_to(x: Array, dtype: DTypeLike) -> Array:
    """`x` (float32) in `dtype`, with a rounding that stays: XLA may drop a pair of converts, never a reduce_precision."""
    info = jnp.finfo(dtype)
    if info.bits == 32:
        return x
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp < 8:  # reduce_precision flushes the subnormal numbers of float16, which are multiples of one step
        step = float(info.smallest_subnormal)
        subnormal = x + lax.stop_gradient(jnp.round(x / step) * step - x)
        rounded = jnp.where(jnp.abs(x) < float(info.smallest_normal), subnormal, rounded)
    return rounded.astype(dtype)


def vary_like(x: Array, *others: Array) -> Array:
    """`x` marked as varying over every manual mesh axis that one of `others` varies over (as a loop's carry needs it)."""
    axes = set[str]().union(*(jax.typeof(other).manual_axis_type.varying for other in others))
    axes -= jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def masked(x: Array, valid: Array) -> Array:
    """`x` with zeros in the rows of padding: `valid` is bool over the first axis.

    It comes before anything is computed from `x`, so that neither a value nor a gradient sees what stands in padding.
    """
    return jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def l2norm(x: Array) -> Array:
    """`x / sqrt(sum(x ** 2) + 1e-6)` over the last axis, float32."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def per_v_head(x: Array, num_v_heads: int, axis: int = 0) -> Array:
    """Repeats the key heads on `axis`: value head `hv` uses key head `hv // (HV // H)`."""
    return jnp.repeat(x, num_v_heads // x.shape[axis], axis=axis)


def rule_step(m: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """One token of the gated delta rule, all float32.

    `m` `[HV, K, V]`; `q` (scaled), `k` `[HV, K]`; `v` `[HV, V]`; `g`, `beta` `[HV]`. Returns the new `m` and `o` `[HV, V]`.
    One pass reads the old state for both products: with M' = e^g M + k u^T, M'^T q = e^g M^T q + (k . q) u.
    """
    decay = jnp.exp(g)[:, None]
    products = dot(jnp.stack([k, q], axis=1), m) * decay[..., None]
    u = beta[:, None] * (v - products[:, 0])
    o = products[:, 1] + jnp.sum(k * q, axis=-1, keepdims=True) * u
    decay, k, u = lax.optimization_barrier((decay, k, u))  # else XLA computes them anew for every element of the state
    return decay[..., None] * m + k[:, :, None] * u[:, None, :], o


def _corner(pool: Array, layer: Array, slot: Array) -> list[Array]:
    """Where a row begins, in int32 throughout: with x64 on a plain 0 would be an int64 beside them."""
    return [layer, slot, *[jnp.int32(0)] * (pool.ndim - 2)]


def read_row(pool: Array, layer: Array, slot: Array, zero: Array | bool = False) -> Array:
    """Row `slot` (clamped into the pool) of `layer`, or zeros. The barrier keeps it one pass, however many use the row."""
    row = lax.dynamic_slice(pool, _corner(pool, layer, slot), (1, 1, *pool.shape[2:]))
    return lax.optimization_barrier(jnp.where(zero, 0, row[0, 0]))


def write_row(pool: Array, layer: Array, slot: Array, row: Array) -> Array:
    """`pool` with row `slot` (clamped into the pool) of `layer` replaced, in place where XLA may."""
    return lax.dynamic_update_slice(pool, row[None, None], _corner(pool, layer, slot))
