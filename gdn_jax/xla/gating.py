"""gdn_gating: g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b), right to the last bits of float32.

Three ranges of x = a + dt_bias. Below -17 the softplus is exp(x), so that g = -exp(A_log + x) needs no product of an
overflow with an underflow. Elsewhere the product is taken with a power of e moved from one factor to the other where
exp(A_log) alone would overflow or underflow. The rounding error of each sum is carried along: exp turns an absolute error
of its argument into a relative one of the result.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.xla.common import f32

SMALL, LARGE = -17.0, 20.0


def _sum_and_error(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b and its rounding error (Knuth's two-sum), the error a constant of differentiation; 0 where a sum is not finite."""
    total = a + b
    a, b, s = lax.stop_gradient((a, b, total))
    part = s - a
    error = (a - (s - part)) + (b - part)
    return total, jnp.where(jnp.isfinite(s), error, 0)


def gating(A_log: Array, a: Array, b: Array, dt_bias: Array) -> tuple[Array, Array]:
    """`A_log`, `dt_bias` `[HV]`; `a`, `b` `[..., HV]`; returns float32 `g`, `beta` `[..., HV]`."""
    A_log, a, b, dt_bias = (x.astype(f32) for x in (A_log, a, b, dt_bias))
    x, x_error = _sum_and_error(a, dt_bias)
    A_log = jnp.broadcast_to(A_log, x.shape)
    small, large = x < SMALL, x > LARGE
    # Each branch sees a harmless argument where it is not taken, so that its gradient there is finite.
    middle = jnp.where(small | large, 0, x)
    softplus = jnp.where(large, x, jnp.log1p(jnp.exp(middle)))
    slope = jnp.where(large, 1, jax.nn.sigmoid(middle))
    softplus = jnp.where(small, 1, softplus + lax.stop_gradient(slope) * x_error)
    rate = jnp.where(small, 0, A_log)
    shift = jnp.where(rate > 64, 64.0, jnp.where(rate < -32, -64.0, 0.0))
    factor = jnp.where(rate > 64, math.exp(64), jnp.where(rate < -32, math.exp(-64), 1.0))
    product = jnp.exp(rate - shift) * (softplus * factor)

    exponent, error = _sum_and_error(jnp.where(small, A_log, 0), jnp.where(small, x, 0))
    power = jnp.exp(exponent) * (1 + (error + jnp.where(small, x_error, 0)))
    return -jnp.where(small, power, product), jax.nn.sigmoid(b)
