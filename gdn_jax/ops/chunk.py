"""chunk_gated_delta_rule."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gdn_jax import checks, xla
from gdn_jax.checks import ArrayLike
from gdn_jax.dispatch import choose, run
from gdn_jax.ops.recurrent import rule_inputs, rule_scale
from gdn_jax.varlen import equal_starts, resolve, sequences, stacked, unstacked


@functools.partial(jax.jit, static_argnames=("use_qk_l2norm", "chunk_size", "implementation"))
def _run(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    ssm_state: Array | None,
    layer: Array | None,
    query_start_loc: Array,
    *,
    scale: Array,
    use_qk_l2norm: bool,
    chunk_size: int,
    implementation: str,
    **indices: Any,
) -> tuple[Array, Array]:
    if ssm_state is None:  # the final states, one row a sequence
        ssm_state = jnp.zeros((query_start_loc.shape[0] - 1, v.shape[1], k.shape[2], v.shape[2]), jnp.float32)
    pool, at = stacked(ssm_state, layer)
    num_tokens, (num_layers, num_slots) = v.shape[0], pool.shape[:2]
    checks.debug_check(
        "chunk_gated_delta_rule", num_slots=num_slots, num_tokens=num_tokens, query_start_loc=query_start_loc, **indices
    )
    starts, lengths = sequences(query_start_loc, num_tokens)
    batch = resolve(starts=starts, lengths=lengths, num_slots=num_slots, num_layers=num_layers, layer=at, **indices)

    def on_xla(q, k, v, g, beta, pool, batch, ends, scale):
        options: dict[str, Any] = dict(use_qk_l2norm=use_qk_l2norm, chunk_size=chunk_size)
        return xla.chunk.chunk(q, k, v, g, beta, pool, batch, scale=scale, **options)

    arguments = (q, k, v, g, beta, pool, batch, starts + lengths, scale)
    o, pool = run(implementation, "chunk", on_xla, *arguments, use_qk_l2norm=use_qk_l2norm)
    return o, unstacked(pool, layer)


def chunk_gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    ssm_state: ArrayLike | None = None,
    state_indices: ArrayLike | None = None,
    query_start_loc: ArrayLike | None = None,
    has_initial_state: ArrayLike | None = None,
    initial_state_indices: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    use_qk_l2norm: bool = True,
    chunk_size: int = 64,
    layer: int | ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """The gated delta rule over ragged sequences, on a pool of states: the prefill form.

    The same mathematics as `recurrent_gated_delta_rule` token by token, computed in chunks; exact next to strong decays,
    `g = -inf` (a reset) included.

    Args:
        q: `[T, H, K]`, packed sequences, or `[B, T, H, K]` without `query_start_loc`, like the next four. q, k and v of one
            dtype: float32, bfloat16 or float16.
        k: `[T, H, K]`.
        v: `[T, HV, V]`, HV a multiple of H.
        g: `[T, HV]`, log decay.
        beta: `[T, HV]`, write strength.
        ssm_state: `[num_slots, HV, K, V]` in any of these dtypes, with a leading axis `L` where `layer` is given. None: every
            sequence starts from zeros, and its final state comes back.
        state_indices: integer `[N]`, the slots; outside the pool: padding. None: sequence n uses row n.
        query_start_loc: integer `[N + 1]`, where the sequences start, and the end of the last.
        has_initial_state: bool `[N]`; False: start from zeros. None: all True.
        initial_state_indices: integer `[N]`, slots to read the states from; outside the pool: zeros. None: `state_indices`.
        scale: of q; None: `K ** -0.5`.
        use_qk_l2norm: False leaves q and k as they are (`scale` still applies).
        chunk_size: tokens a chunk, a hint on speed: the tile is the next power of two, between 16 and 256, and 64 on a GPU.
        layer: which layer of a stacked `ssm_state`, an int or an int32 scalar.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `(o, ssm_state)`: `o` of the shape and dtype of `v`, zeros at padding, and the updated pool; without a pool the final
        states `[N, HV, K, V]`, float32.

    Raises:
        ValueError: shapes or arguments that do not fit together, or an implementation that cannot run here.
        TypeError: no array, another dtype, or q, k and v of different ones.

    Source: Gated Delta Networks, Yang et al. 2024 (arXiv 2412.06464), section 3.3.

    Example:
        >>> import jax.numpy as jnp
        >>> qk, v, gates = jnp.ones((5, 1, 4)), jnp.ones((5, 2, 4)), jnp.zeros((5, 2))
        >>> o, states = chunk_gated_delta_rule(qk, qk, v, gates, gates, query_start_loc=jnp.array([0, 3, 5]))
        >>> o.shape, states.shape
        ((5, 2, 4), (2, 2, 4, 4))
    """
    this = "chunk_gated_delta_rule"
    if query_start_loc is None:
        num_v_heads, k_dim, v_dim = rule_inputs(this, q, k, v, g, beta, num_sequences=None, num_tokens=None)
        n, length = v.shape[:2]
        starts = equal_starts(n, length)
    else:
        num_v_heads, k_dim, v_dim = rule_inputs(this, q, k, v, g, beta, num_tokens=None)
        starts, n = checks.starts(this, query_start_loc)
    arguments = dict(
        state_indices=state_indices, has_initial_state=has_initial_state, initial_state_indices=initial_state_indices
    )
    heads = dict(num_v_heads=num_v_heads, head_k_dim=k_dim, head_v_dim=v_dim)
    if ssm_state is None:
        checks.refuse(this, "without `ssm_state`", **arguments, layer=layer)
        at = None
    else:
        at = checks.pool(this, "ssm_state", ssm_state, layer, num_slots=None, **heads)
        checks.own_rows(this, state_indices, n, ssm_state.shape[-4], "ssm_state")
    indices = dict(
        state_indices=checks.index(this, "state_indices", state_indices, num_sequences=n),
        has_initial_state=checks.flags(this, "has_initial_state", has_initial_state, n),
        initial_state_indices=checks.index(this, "initial_state_indices", initial_state_indices, num_sequences=n),
    )
    chosen = choose(this, implementation, dict(q=q, v=v, ssm_state=ssm_state, query_start_loc=starts))
    scale, norm = rule_scale(this, scale, k_dim), checks.flag(this, "use_qk_l2norm", use_qk_l2norm)
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)] + [x.reshape(-1, num_v_heads) for x in (g, beta)]
    size = checks.size(this, "chunk_size", chunk_size, 1)
    options = dict(scale=scale, use_qk_l2norm=norm, chunk_size=size, implementation=chosen)
    o, pool = _run(*flat, ssm_state, at, starts, **options, **indices)
    return o.reshape(v.shape), pool
