"""mtp_gated_delta_rule."""

import functools

import jax
from jax import Array

from gdn_jax import checks, xla
from gdn_jax.checks import ArrayLike
from gdn_jax.dispatch import choose, run
from gdn_jax.ops.recurrent import rule_inputs, rule_scale
from gdn_jax.varlen import resolve_verify, sequences, stacked, unstacked


@functools.partial(jax.jit, static_argnames=("implementation", "use_qk_l2norm"))
def _run(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    ssm_state: Array,
    layer: Array | None,
    read_indices: Array,
    write_indices: Array,
    num_accepted_tokens: Array,
    query_start_loc: Array,
    *,
    scale: Array,
    implementation: str,
    use_qk_l2norm: bool,
) -> tuple[Array, Array]:
    pool, at = stacked(ssm_state, layer)
    num_tokens, (num_layers, num_slots) = v.shape[0], pool.shape[:2]
    checks.debug_check_verify(
        "mtp_gated_delta_rule",
        num_slots=num_slots,
        num_tokens=num_tokens,
        read_indices=read_indices,
        write_indices=write_indices,
        num_accepted_tokens=num_accepted_tokens,
        query_start_loc=query_start_loc,
    )

    def on_xla(q, k, v, g, beta, pool, read, write, accepted, loc, at, scale):
        starts, lengths = sequences(loc, num_tokens)
        batch = resolve_verify(
            starts=starts,
            lengths=lengths,
            num_slots=num_slots,
            num_layers=num_layers,
            layer=at,
            read_indices=read,
            num_accepted_tokens=accepted,
        )
        return xla.mtp.mtp(q, k, v, g, beta, pool, write, batch, scale=scale, use_qk_l2norm=use_qk_l2norm)

    arguments = (q, k, v, g, beta, pool, read_indices, write_indices, num_accepted_tokens, query_start_loc, at, scale)
    o, pool = run(implementation, "mtp", on_xla, *arguments, use_qk_l2norm=use_qk_l2norm)
    return o, unstacked(pool, layer)


def mtp_gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    ssm_state: ArrayLike,
    read_indices: ArrayLike,
    write_indices: ArrayLike,
    num_accepted_tokens: ArrayLike,
    query_start_loc: ArrayLike,
    scale: float | ArrayLike | None = None,
    use_qk_l2norm: bool = True,
    layer: int | ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """The gated delta rule for a few tokens a sequence that keeps the state after each: the verify form.

    Sequence `n` starts from the state in slot `read_indices[n, num_accepted_tokens[n] - 1]`, goes token by token as
    `recurrent_gated_delta_rule` does, the state float32 throughout, and stores the state after token `t` in slot
    `write_indices[n, t]`. Its reads come before its first write.

    Args:
        q: `[T, H, K]`, packed sequences of 0 to `S + 1` tokens; q, k and v of one dtype: float32, bfloat16 or float16.
        k: `[T, H, K]`.
        v: `[T, HV, V]`, HV a multiple of H.
        g: `[T, HV]`, log decay.
        beta: `[T, HV]`, write strength.
        ssm_state: `[num_slots, HV, K, V]` in any of these dtypes, with a leading axis `L` where `layer` is given.
        read_indices: integer `[N, S + 1]`; the one used being outside the pool makes the sequence padding.
        write_indices: integer `[N, S + 1]`; one outside the pool skips that write.
        num_accepted_tokens: integer `[N]`; outside 1 to `S + 1`: padding.
        query_start_loc: integer `[N + 1]`; a sequence of more than `S + 1` tokens is padding.
        scale: of q; None: `K ** -0.5`.
        use_qk_l2norm: False leaves q and k as they are (`scale` still applies).
        layer: which layer of a stacked `ssm_state`, an int or an int32 scalar.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `(o, ssm_state)`: `o` `[T, HV, V]` in `v.dtype`, zeros at padding, and the updated pool.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run here.
        TypeError: no array, another dtype, or q, k and v of different ones.

    Source: the multi-token verify step of vLLM and LightLLM for Qwen3-Next.

    Example:
        >>> import jax.numpy as jnp
        >>> one, gate, rows = jnp.ones((2, 1, 4)), jnp.zeros((2, 1)), jnp.array([[0, 1, 2]])
        >>> o, pool = mtp_gated_delta_rule(one, one, one, gate, gate + 1, ssm_state=jnp.zeros((3, 1, 4, 4)), read_indices=rows,
        ...     write_indices=rows, num_accepted_tokens=jnp.array([3]), query_start_loc=jnp.array([0, 2]))
        >>> o.shape, [bool(row.any()) for row in pool]
        ((2, 1, 4), [True, True, False])
    """
    this = "mtp_gated_delta_rule"
    num_v_heads, k_dim, v_dim = rule_inputs(this, q, k, v, g, beta, num_tokens=None)
    heads = dict(num_v_heads=num_v_heads, head_k_dim=k_dim, head_v_dim=v_dim)
    at = checks.pool(this, "ssm_state", ssm_state, layer, num_slots=None, **heads)
    starts, n = checks.starts(this, query_start_loc)
    read = checks.needed_index(this, "read_indices", read_indices, num_sequences=n, **{"mtp_step + 1": None})
    longest = read.shape[1]
    if longest == 0:
        raise ValueError(f"{this}: `read_indices` has mtp_step + 1 = 0, expected at least 1.")
    write = checks.needed_index(this, "write_indices", write_indices, num_sequences=n, **{"mtp_step + 1": longest})
    accepted = checks.needed_index(this, "num_accepted_tokens", num_accepted_tokens, num_sequences=n)
    chosen = choose(this, implementation, dict(q=q, v=v, ssm_state=ssm_state, num_accepted_tokens=accepted))
    scale, norm = rule_scale(this, scale, k_dim), checks.flag(this, "use_qk_l2norm", use_qk_l2norm)
    options = dict(scale=scale, implementation=chosen, use_qk_l2norm=norm)
    return _run(q, k, v, g, beta, ssm_state, at, read, write, accepted, starts, **options)
