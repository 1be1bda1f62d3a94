"""recurrent_gated_delta_rule, and the checks that the three forms of the rule share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gdn_jax import checks, xla
from gdn_jax.checks import ArrayLike
from gdn_jax.dispatch import choose, run
from gdn_jax.varlen import resolve, slots_of, stacked, unstacked


def rule_inputs(this: str, q: Any, k: Any, v: Any, g: Any, beta: Any, **lead: int | None) -> tuple[int, int, int]:
    """Checks q, k, v, g and beta, which share the `lead` axes; returns (HV, K, V)."""
    *sizes, num_k_heads, k_dim = checks.floats(this, "q", q, **lead, num_k_heads=None, head_k_dim=None)
    lead = dict(zip(lead, sizes, strict=True))
    checks.floats(this, "k", k, **lead, num_k_heads=num_k_heads, head_k_dim=k_dim)
    *_, num_v_heads, v_dim = checks.floats(this, "v", v, **lead, num_v_heads=None, head_v_dim=None)
    checks.same_dtype(this, q=q, k=k, v=v)
    if num_k_heads == 0 or num_v_heads % num_k_heads:
        raise ValueError(
            f"{this}: `v` has num_v_heads={num_v_heads}, expected a multiple of num_k_heads={num_k_heads} of `q`."
        )
    checks.floats(this, "g", g, **lead, num_v_heads=num_v_heads)
    checks.floats(this, "beta", beta, **lead, num_v_heads=num_v_heads)
    for name, size in dict(head_k_dim=k_dim, head_v_dim=v_dim, num_v_heads=num_v_heads).items():
        if size == 0:
            raise ValueError(f"{this}: `v` or `q` has {name}=0, expected at least 1.")
    return num_v_heads, k_dim, v_dim


def rule_scale(this: str, scale: Any, k_dim: int) -> Array:
    """The checked `scale` as a float32 scalar; None: K ** -0.5."""
    return jnp.float32(k_dim**-0.5) if scale is None else checks.number(this, "scale", scale)


@functools.partial(jax.jit, static_argnames=("implementation", "use_qk_l2norm"))
def _run(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    ssm_state: Array,
    layer: Array | None,
    *,
    scale: Array,
    implementation: str,
    use_qk_l2norm: bool,
    **indices: Any,
) -> tuple[Array, Array]:
    pool, at = stacked(ssm_state, layer)
    n, (num_layers, num_slots) = v.shape[0], pool.shape[:2]
    checks.debug_check("recurrent_gated_delta_rule", num_slots=num_slots, num_tokens=n, **indices)

    def on_xla(q, k, v, g, beta, pool, slots, has, at, scale):
        batch = resolve(
            starts=jnp.arange(n, dtype=jnp.int32),
            lengths=jnp.ones(n, jnp.int32),
            num_slots=num_slots,
            num_layers=num_layers,
            layer=at,
            state_indices=slots,
            has_initial_state=has,
        )
        return xla.recurrent.recurrent(q, k, v, g, beta, pool, batch, scale=scale, use_qk_l2norm=use_qk_l2norm)

    slots = slots_of(indices["state_indices"], n)
    arguments = (q, k, v, g, beta, pool, slots, indices["has_initial_state"], at, scale)
    o, pool = run(implementation, "recurrent", on_xla, *arguments, use_qk_l2norm=use_qk_l2norm)
    return o, unstacked(pool, layer)


def recurrent_gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    ssm_state: ArrayLike,
    state_indices: ArrayLike | None = None,
    has_initial_state: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    use_qk_l2norm: bool = True,
    layer: int | ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """The gated delta rule for one token a sequence, on a pool of states: the decode form.

        q' = q / sqrt(sum q^2 + 1e-6) * scale      k' = k / sqrt(sum k^2 + 1e-6)
        M <- exp(g) * M;   u = beta * (v - M^T k');   M <- M + k' u^T;   o = M^T q'

    per value head, which uses key head `hv // (HV // H)`; in float32, the state rounded to the pool's dtype when stored.

    Args:
        q: `[N, H, K]`; q, k and v of one dtype: float32, bfloat16 or float16.
        k: `[N, H, K]`.
        v: `[N, HV, V]`, HV a multiple of H.
        g: `[N, HV]`, log decay.
        beta: `[N, HV]`, write strength.
        ssm_state: `[num_slots, HV, K, V]` in any of these dtypes, with a leading axis `L` where `layer` is given.
        state_indices: integer `[N]`, the slots; outside the pool: padding. None: sequence n uses row n.
        has_initial_state: bool `[N]`; False: start from zeros. None: all True.
        scale: of q; None: `K ** -0.5`.
        use_qk_l2norm: False leaves q and k as they are (`scale` still applies).
        layer: which layer of a stacked `ssm_state`, an int or an int32 scalar.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `(o, ssm_state)`: `o` `[N, HV, V]` in `v.dtype`, zeros at padding, and the updated pool.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run here.
        TypeError: no array, another dtype, or q, k and v of different ones.

    Source: Gated Delta Networks, Yang et al. 2024 (arXiv 2412.06464), equation 10.

    Example:
        >>> import jax.numpy as jnp
        >>> one = jnp.ones((1, 1, 4))
        >>> o, pool = recurrent_gated_delta_rule(one, one, one, jnp.zeros((1, 1)), jnp.ones((1, 1)), scale=1.0,
        ...                                      ssm_state=jnp.zeros((2, 1, 4, 4)), state_indices=jnp.array([1]))
        >>> o.shape, float(jnp.abs(pool[0]).max())
        ((1, 1, 4), 0.0)
    """
    this = "recurrent_gated_delta_rule"
    num_v_heads, k_dim, v_dim = rule_inputs(this, q, k, v, g, beta, num_sequences=None)
    n = v.shape[0]
    heads = dict(num_v_heads=num_v_heads, head_k_dim=k_dim, head_v_dim=v_dim)
    at = checks.pool(this, "ssm_state", ssm_state, layer, num_slots=None, **heads)
    checks.own_rows(this, state_indices, n, ssm_state.shape[-4], "ssm_state")
    indices = dict(
        state_indices=checks.index(this, "state_indices", state_indices, num_sequences=n),
        has_initial_state=checks.flags(this, "has_initial_state", has_initial_state, n),
    )
    chosen = choose(this, implementation, dict(q=q, v=v, ssm_state=ssm_state))
    scale, norm = rule_scale(this, scale, k_dim), checks.flag(this, "use_qk_l2norm", use_qk_l2norm)
    return _run(q, k, v, g, beta, ssm_state, at, scale=scale, implementation=chosen, use_qk_l2norm=norm, **indices)
