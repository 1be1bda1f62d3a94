"""gated_rms_norm: RMS norm of o, times weight, times silu(z), with a real rounding after each."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.xla.common import f32, round_to


def rms_norm(o: Array, z: Array, weight: Array, eps: Array) -> Array:
    """`o`, `z` `[..., V]`, `weight` `[V]`; returns `[..., V]` in `o.dtype`."""
    x = o.astype(f32)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    x = round_to(x, o.dtype).astype(f32) * weight.astype(f32)
    x = round_to(x, jnp.promote_types(o.dtype, weight.dtype)).astype(f32)
    return round_to(x * jax.nn.silu(z.astype(f32)), o.dtype)
