"""gdn_gating: g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b), right to the last bits of float32.

Three ranges of x = a + dt_bias. Below -17 the softplus is exp(x), so that g = -exp(A_log + x) needs no product of an
overflow with an underflow. Elsewhere the product is taken with a power of e moved from one factor to the other where
exp(A_log) alone would overflow or underflow, and from half the softplus, which never overflows. The rounding error of each
sum is carried along: exp turns an absolute error of its argument into a relative one of the result.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.xla.common import f32

SMALL, LARGE = -17.0, 20.0
LIMIT = float(jnp.finfo(f32).max)


def _sum_and_error(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b and its rounding error (Knuth's two-sum); 0 where the sum is not finite."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    return total, jnp.where(jnp.abs(total) <= LIMIT, error, 0)


def _softplus(x: Array) -> Array:
    return jnp.log1p(jnp.exp(x))


def exp_times(
    A_log: Array, a: Array, dt_bias: Array, *, slope: bool, softplus: Callable[[Array], Array] = _softplus
) -> Array:
    """exp(A_log) * softplus(a + dt_bias), or with `slope` its derivative, exp(A_log) * sigmoid(a + dt_bias).

    `softplus` is asked between SMALL and LARGE only. Mosaic kernels have every other function that is used here, but no `~`.
    """
    x, x_error = _sum_and_error(a, dt_bias)
    small, large = x < SMALL, x > LARGE
    middle = jnp.where(small | large, 0, x)
    sigmoid = jnp.where(large, 1, jax.nn.sigmoid(middle))
    if slope:
        half = 0.5 * sigmoid
    else:
        half_a = lax.optimization_barrier(0.5 * a)  # else XLA makes 0.5 * (a + dt_bias) of the sum, which may overflow
        half = jnp.where(large, half_a + 0.5 * dt_bias, 0.5 * (softplus(middle) + sigmoid * x_error))
    half, rate = jnp.where(small, 1, half), jnp.where(small, 0, A_log)
    down = (rate < -32) | (half > 1e30)
    up = rate > 64  # and not down
    shift = jnp.where(down, -64.0, jnp.where(up, 64.0, 0.0))
    factor = jnp.where(down, 2 * math.exp(-64), jnp.where(up, 2 * math.exp(64), 2.0))
    product = jnp.exp(rate - shift) * (half * factor)

    exponent, error = _sum_and_error(jnp.where(small, A_log, 0), jnp.where(small, x, 0))
    exponent, error = _sum_and_error(exponent, error + jnp.where(small, x_error, 0))
    power = jnp.exp(exponent) * (1 + jnp.clip(error, -0.5, 0.5))
    return jnp.where(small, power, product)


@jax.custom_jvp
def log_decay(A_log: Array, a: Array, dt_bias: Array) -> Array:
    """`g` `[..., HV]` of float32 `A_log`, `dt_bias` `[HV]` and `a` `[..., HV]`."""
    return -exp_times(A_log, a, dt_bias, slope=False)


@log_decay.defjvp
def _log_decay_jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    """The two slopes stay finite where g overflows, so that a zero cotangent there stays zero."""
    g = log_decay(*primals)
    by_rate = jnp.maximum(g, -LIMIT)
    by_x = jnp.maximum(-exp_times(*primals, slope=True), -LIMIT)
    return g, by_rate * tangents[0] + by_x * (tangents[1] + tangents[2])


def gating(A_log: Array, a: Array, b: Array, dt_bias: Array) -> tuple[Array, Array]:
    """`A_log`, `dt_bias` `[HV]`; `a`, `b` `[..., HV]`; returns float32 `g`, `beta` `[..., HV]`."""
    g = log_decay(A_log.astype(f32), a.astype(f32), dt_bias.astype(f32))
    return g, jax.nn.sigmoid(b.astype(f32))
