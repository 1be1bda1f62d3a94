"""gated_rms_norm."""

import functools

import jax
from jax import Array

from gdn_jax import checks, xla
from gdn_jax.checks import ArrayLike
from gdn_jax.dispatch import choose, run


@functools.partial(jax.jit, static_argnames="implementation")
def _run(o: Array, z: Array, weight: Array, eps: Array, *, implementation: str) -> Array:
    return run(implementation, "norm", xla.norm.rms_norm, o, z, weight, eps, forward=True)


def gated_rms_norm(
    o: ArrayLike, z: ArrayLike, weight: ArrayLike, *, eps: float | ArrayLike = 1e-6, implementation: str | None = None
) -> Array:
    """RMS norm over the last axis, times `weight`, times `silu(z)`: the gate at the end of a gated-delta-net layer.

    The norm is float32 and rounded to `o.dtype`; its product with `weight` is in the promoted dtype of both; the product
    with `silu(z)` is float32 and rounded to `o.dtype`.

    Args:
        o: `[..., V]`; float32, bfloat16 or float16, like the others.
        z: `[..., V]`, of the shape of `o`.
        weight: `[V]`.
        eps: added to the mean square.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `[..., V]` in `o.dtype`.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run here.
        TypeError: no array, or another dtype.

    Source: the RMSNormGated of Qwen3-Next (norm before gate).

    Example:
        >>> import jax.numpy as jnp
        >>> gated_rms_norm(jnp.full((2, 4), 3.0), jnp.zeros((2, 4)), jnp.ones(4)).shape
        (2, 4)
    """
    this = "gated_rms_norm"
    checks.check_array(this, "o", o)
    checks.check_array(this, "z", z)
    if o.ndim < 1:
        raise ValueError(f"{this}: `o` has shape (), expected (..., head_v_dim).")
    if z.shape != o.shape:
        raise ValueError(
            f"{this}: `z` has shape {checks.describe(z.shape)}, expected {checks.describe(o.shape)}, the shape of `o`."
        )
    checks.floats(this, "weight", weight, head_v_dim=o.shape[-1])
    chosen = choose(this, implementation, dict(o=o))
    return _run(o, z, weight, checks.number(this, "eps", eps), implementation=chosen)
