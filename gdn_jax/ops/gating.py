"""gdn_gating."""

import functools

import jax
from jax import Array

from gdn_jax import checks, xla
from gdn_jax.checks import ArrayLike
from gdn_jax.dispatch import choose, run


@functools.partial(jax.jit, static_argnames="implementation")
def _run(A_log: Array, a: Array, b: Array, dt_bias: Array, *, implementation: str) -> tuple[Array, Array]:
    exp_times = functools.partial(xla.gating.exp_times, slope=False)
    return run(implementation, "gating", xla.gating.gating, A_log, a, b, dt_bias, forward=True, exp_times=exp_times)


def gdn_gating(
    A_log: ArrayLike, a: ArrayLike, b: ArrayLike, dt_bias: ArrayLike, *, implementation: str | None = None
) -> tuple[Array, Array]:
    """The log decay and the write strength of the gated delta rule.

        g = -exp(A_log) * softplus(a + dt_bias)      softplus(x) = x where x > 20, else log1p(exp(x))
        beta = sigmoid(b)

    Computed in float32 whatever the inputs; never NaN for finite inputs, and with finite gradients wherever the true ones
    fit float32.

    Args:
        A_log: `[HV]`; float32, bfloat16 or float16, like the others.
        a: `[..., HV]`.
        b: `[..., HV]`, of the shape of `a`.
        dt_bias: `[HV]`.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `(g, beta)`, float32 `[..., HV]`: the natural logarithm of the decay, at most 0, and a number from 0 to 1.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run here.
        TypeError: no array, or another dtype.

    Source: Gated Delta Networks, Yang et al. 2024 (arXiv 2412.06464), with Mamba-2's decay.

    Example:
        >>> import jax.numpy as jnp
        >>> g, beta = gdn_gating(jnp.zeros(2), jnp.ones((3, 2)), jnp.zeros((3, 2)), jnp.ones(2))
        >>> g.shape, float(beta[0, 0])
        ((3, 2), 0.5)
    """
    this = "gdn_gating"
    (num_v_heads,) = checks.floats(this, "A_log", A_log, num_v_heads=None)
    checks.floats(this, "dt_bias", dt_bias, num_v_heads=num_v_heads)
    checks.check_array(this, "a", a)
    checks.check_array(this, "b", b)
    if a.ndim < 1 or a.shape[-1] != num_v_heads:
        raise ValueError(
            f"{this}: `a` has shape {checks.describe(a.shape)}, expected (..., num_v_heads={num_v_heads})."
        )
    if b.shape != a.shape:
        raise ValueError(
            f"{this}: `b` has shape {checks.describe(b.shape)}, expected {checks.describe(a.shape)}, the shape of `a`."
        )
    return _run(A_log, a, b, dt_bias, implementation=choose(this, implementation, dict(a=a)))
