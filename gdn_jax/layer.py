"""The layer between its projections: conv, gating, gated delta rule and gated norm, on a `GDNState`.

The projections of one tensor-parallel rank stand side by side in `mixed_qkvzba`: q | k | v | z | b | a.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gdn_jax import checks
from gdn_jax.checks import ArrayLike
from gdn_jax.dispatch import choose, run
from gdn_jax.ops.chunk import chunk_gated_delta_rule
from gdn_jax.ops.conv import causal_conv1d, causal_conv1d_update
from gdn_jax.ops.gating import gdn_gating
from gdn_jax.ops.mtp import mtp_gated_delta_rule
from gdn_jax.ops.norm import gated_rms_norm
from gdn_jax.ops.recurrent import recurrent_gated_delta_rule
from gdn_jax.types import GDNConfig, GDNOutput, GDNState, GDNWeights
from gdn_jax.varlen import (
    Batch,
    equal_starts,
    resolve,
    sequences,
    slots_of,
    stacked,
    state_rows,
    token_table,
    unstacked,
    valid_tokens,
    where_inside,
)


def split_qkvzba(mixed_qkvzba: ArrayLike, config: GDNConfig) -> tuple[Array, Array, Array, Array]:
    """Splits the projections of one rank.

    Args:
        mixed_qkvzba: `[T, qkvz_dim + ba_dim]`, q | k | v | z | b | a.
        config: the layer's sizes.

    Returns:
        `(mixed_qkv [T, D], z [T, HV, V], b [T, HV], a [T, HV])`.

    Raises:
        ValueError, TypeError: another shape or dtype.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
        >>> [x.shape for x in split_qkvzba(jnp.zeros((3, 28)), config)]
        [(3, 16), (3, 2, 4), (3, 2), (3, 2)]
    """
    checks.is_type("split_qkvzba", "config", config, GDNConfig)
    width = config.qkvz_dim + config.ba_dim
    checks.floats("split_qkvzba", "mixed_qkvzba", mixed_qkvzba, num_tokens=None, channels=width)
    heads = config.tp_num_v_heads
    borders = [config.conv_dim, config.qkvz_dim, config.qkvz_dim + heads]
    mixed_qkv, z, b, a = jnp.split(jnp.asarray(mixed_qkvzba), borders, axis=1)
    return mixed_qkv, z.reshape(-1, heads, config.head_v_dim), b, a


def split_qkv(mixed_qkv: ArrayLike, config: GDNConfig) -> tuple[Array, Array, Array]:
    """Splits the conv's output into heads.

    Args:
        mixed_qkv: `[T, D]`, q | k | v.
        config: the layer's sizes.

    Returns:
        `(q [T, H, K], k [T, H, K], v [T, HV, V])`.

    Raises:
        ValueError, TypeError: another shape or dtype.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
        >>> [x.shape for x in split_qkv(jnp.zeros((3, 16)), config)]
        [(3, 1, 4), (3, 1, 4), (3, 2, 4)]
    """
    checks.is_type("split_qkv", "config", config, GDNConfig)
    checks.floats("split_qkv", "mixed_qkv", mixed_qkv, num_tokens=None, conv_dim=config.conv_dim)
    q, k, v = jnp.split(jnp.asarray(mixed_qkv), [config.key_dim, 2 * config.key_dim], axis=1)
    q, k = (x.reshape(-1, config.tp_num_k_heads, config.head_k_dim) for x in (q, k))
    return q, k, v.reshape(-1, config.tp_num_v_heads, config.head_v_dim)


def init_state(config: GDNConfig, num_slots: int, num_layers: int | None = None) -> GDNState:
    """Pools of zeros, with a leading layer axis where `num_layers` is given.

    Args:
        config: the layer's sizes and the pools' dtypes.
        num_slots: request slots.
        num_layers: layers that share the pair of arrays.

    Returns:
        `GDNState(conv [num_slots, D, W - 1 + S], ssm [num_slots * (S + 1), HV, K, V])`.

    Raises:
        ValueError, TypeError: a size that is negative or no int.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4, mtp_step=1)
        >>> [x.shape for x in init_state(config, num_slots=5, num_layers=3)]
        [(3, 5, 16, 4), (3, 10, 2, 4, 4)]
    """
    checks.is_type("init_state", "config", config, GDNConfig)
    slots = checks.size("init_state", "num_slots", num_slots, 0)
    lead = () if num_layers is None else (checks.size("init_state", "num_layers", num_layers, 0),)
    rows = slots * (config.mtp_step + 1)
    return GDNState(
        jnp.zeros((*lead, slots, config.conv_dim, config.conv_state_len), config.conv_dtype),
        jnp.zeros((*lead, rows, config.tp_num_v_heads, config.head_k_dim, config.head_v_dim), config.ssm_dtype),
    )


def _stacked(this: str, state: GDNState, config: GDNConfig) -> bool:
    """Checks a state; returns whether it has a layer axis."""
    checks.is_type(this, "config", config, GDNConfig)
    checks.is_type(this, "state", state, GDNState)
    stacked = getattr(state.conv, "ndim", 3) == 4
    checks.state(this, state, config, stacked)
    return stacked


@functools.partial(jax.jit, static_argnames=("config", "stacked"))
def _copy(state: GDNState, src: Array | None, dst: Array, config: GDNConfig, stacked: bool) -> GDNState:
    """Rows of `src` (None: zeros) to `dst`; a pair with either outside the pool is skipped."""

    def rows(pool: Array, per_slot: int) -> Array:
        if 0 in pool.shape:
            return pool
        slots = pool.shape[stacked] // per_slot
        ok = where_inside(dst, slots) >= 0
        if src is not None:
            ok &= where_inside(src, slots) >= 0
        span = jnp.arange(per_slot, dtype=jnp.int32)
        target = jnp.where(ok[:, None], dst[:, None] * per_slot + span, slots * per_slot).reshape(-1)
        pool = pool if stacked else pool[None]
        if src is None:
            new = jnp.zeros((), pool.dtype)
        else:
            new = pool.at[:, (jnp.where(ok, src, 0)[:, None] * per_slot + span).reshape(-1)].get(mode="clip")
        pool = pool.at[:, target].set(new, mode="drop")
        return pool if stacked else pool[0]

    return GDNState(rows(state.conv, 1), rows(state.ssm, config.mtp_step + 1))


def reset_slots(state: GDNState, slots: ArrayLike, config: GDNConfig) -> GDNState:
    """Zeroes all rows of the named request slots, of every layer.

    Args:
        state: the pools, with or without a layer axis.
        slots: integer `[M]`; one outside the pool is skipped.
        config: the layer's sizes.

    Returns:
        The updated state.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
        >>> ones = jax.tree.map(jnp.ones_like, init_state(config, num_slots=3))
        >>> reset_slots(ones, jnp.array([2, -1]), config).conv[:, 0, 0].tolist()
        [1.0, 1.0, 0.0]
    """
    stacked = _stacked("reset_slots", state, config)
    index = checks.needed_index("reset_slots", "slots", slots, num_slots_named=None)
    return _copy(state, None, index, config, stacked)


def copy_slots(state: GDNState, src: ArrayLike, dst: ArrayLike, config: GDNConfig) -> GDNState:
    """Copies all rows of request slots `src` to `dst`, of every layer: a prefix that several requests share.

    Every source is read before any slot is written.

    Args:
        state: the pools, with or without a layer axis.
        src: integer `[M]`.
        dst: integer `[M]`, no slot twice; a pair with either slot outside the pool is skipped.
        config: the layer's sizes.

    Returns:
        The updated state.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
        >>> state = init_state(config, num_slots=3)
        >>> state = state._replace(conv=state.conv.at[0].set(1))
        >>> copy_slots(state, jnp.array([0]), jnp.array([2]), config).conv[:, 0, 0].tolist()
        [1.0, 0.0, 1.0]
    """
    stacked = _stacked("copy_slots", state, config)
    source = checks.needed_index("copy_slots", "src", src, num_pairs=None)
    target = checks.needed_index("copy_slots", "dst", dst, num_pairs=source.shape[0])
    return _copy(state, source, target, config, stacked)


def _split(mixed_qkvzba: Array, valid: Array, config: GDNConfig) -> tuple[Array, Array, Array, Array]:
    """`split_qkvzba` with padding zeroed before anything is computed from it; z is handed back as it came."""
    mixed_qkv, _, b, a = split_qkvzba(jnp.where(valid[:, None], mixed_qkvzba, 0), config)
    return mixed_qkv, split_qkvzba(mixed_qkvzba, config)[1], b, a


def _output(
    o: Array,
    z: Array,
    valid: Array,
    state: GDNState,
    norm_weight: Array | None,
    norm_eps: Array,
) -> GDNOutput:
    if norm_weight is not None:
        valid = valid[:, None, None]
        given, shown = jnp.where(valid, o, 1), jnp.where(valid, z, 0)  # harmless at padding, also with norm_eps=0
        # As the gating above: XLA makes one pass of it and the masks, and a kernel would stand between them.
        normed = gated_rms_norm(given, shown, norm_weight, eps=norm_eps, implementation="xla")
        o = jnp.where(valid, normed, 0)
    return GDNOutput(o, z, state)


def _resolved(
    pool_and_layer: tuple[Array, Array],
    num_tokens: int,
    query_start_loc: Array,
    indices: dict[str, Array | None],
    longest: int,
    verify: bool = False,
) -> tuple[Batch, Array]:
    """The batch on the stacked conv pool, and where the tokens of each sequence end, padding too."""
    (pool, at), (starts, lengths) = pool_and_layer, sequences(query_start_loc, num_tokens)
    batch = resolve(
        starts=starts,
        lengths=lengths,
        num_slots=pool.shape[1],
        num_layers=pool.shape[0],
        layer=at,
        max_accepted=longest,
        max_length=longest if verify else None,
        **indices,
    )
    return batch, starts + lengths


@functools.partial(jax.jit, static_argnames=("config", "verify", "implementation"))
def _packed(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: Array,
    query_start_loc: Array,
    indices: dict[str, Array | None],
    norm_weight: Array | None,
    norm_eps: Array,
    layer: Array | None,
    *,
    config: GDNConfig,
    verify: bool,
    implementation: str | None,
) -> GDNOutput:
    """The layer on packed sequences: prefill, or the verify step."""
    num_tokens, longest = mixed_qkvzba.shape[0], config.mtp_step + 1
    batch, _ = _resolved(stacked(state.conv, layer), num_tokens, query_start_loc, indices, longest, verify)
    valid = token_table(batch, num_tokens)[0]
    mixed_qkv, z, b, a = _split(mixed_qkvzba, valid, config)
    common: dict[str, Any] = dict(query_start_loc=query_start_loc, layer=layer, implementation=implementation)
    convolve = causal_conv1d_update if verify else causal_conv1d
    y, conv = convolve(
        mixed_qkv,
        weights.conv_weight,
        weights.conv_bias,
        conv_state=state.conv,
        activation=config.activation,
        **indices,
        **common,
    )
    g, beta = gdn_gating(weights.A_log, a, b, weights.dt_bias, implementation="xla")
    if verify:
        rows = jnp.arange(longest, dtype=jnp.int32) + batch.write[:, None] * longest
        rows = jnp.where(batch.write[:, None] < 0, -1, rows)
        accepted = batch.offset + 1
        rule = functools.partial(
            mtp_gated_delta_rule, read_indices=rows, write_indices=rows, num_accepted_tokens=accepted
        )
    else:
        rows = state_rows(batch, longest)
        rule = functools.partial(chunk_gated_delta_rule, state_indices=rows.write, initial_state_indices=rows.read)
    o, ssm = rule(*split_qkv(y, config), g, beta, ssm_state=state.ssm, **common)
    return _output(o, z, valid, GDNState(conv, ssm), norm_weight, norm_eps)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _decode(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: Array,
    indices: dict[str, Array | None],
    norm_weight: Array | None,
    norm_eps: Array,
    layer: Array | None,
    *,
    config: GDNConfig,
    implementation: str | None,
) -> GDNOutput:
    """The layer on one token a sequence."""
    n, num_slots = mixed_qkvzba.shape[0], state.conv.shape[-3]
    valid = where_inside(slots_of(indices["state_indices"], n), num_slots) >= 0
    if layer is not None:
        valid &= where_inside(layer, state.conv.shape[0]) >= 0
    mixed_qkv, z, b, a = _split(mixed_qkvzba, valid, config)
    common: dict[str, Any] = dict(layer=layer, implementation=implementation, **indices)
    w = weights
    y, conv = causal_conv1d_update(
        mixed_qkv, w.conv_weight, w.conv_bias, conv_state=state.conv, activation=config.activation, **common
    )
    g, beta = gdn_gating(w.A_log, a, b, w.dt_bias, implementation="xla")
    o, ssm = recurrent_gated_delta_rule(*split_qkv(y, config), g, beta, ssm_state=state.ssm, **common)
    return _output(o, z, valid, GDNState(conv, ssm), norm_weight, norm_eps)


@functools.partial(jax.jit, static_argnames=("this", "config"))
def _one_launch(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: Array,
    query_start_loc: Array | None,
    indices: dict[str, Array | None],
    norm_weight: Array | None,
    norm_eps: Array,
    layer: Array | None,
    *,
    this: str,
    config: GDNConfig,
) -> GDNOutput:
    """`_decode`, or with starts the verify form of `_packed`, as one kernel."""
    (conv, at), ssm = stacked(state.conv, layer), stacked(state.ssm, layer)[0]
    num_tokens, num_slots, longest = mixed_qkvzba.shape[0], conv.shape[1], config.mtp_step + 1
    limits: dict[str, Any] = dict(num_tokens=num_tokens, max_accepted=longest, max_length=longest)
    checks.debug_check(this, num_slots=num_slots, query_start_loc=query_start_loc, **indices, **limits)

    def by_operators(mixed, weights, norm_weight, norm_eps, conv, ssm, slots, has, accepted, starts, at):
        arguments = (norm_weight, norm_eps, at)
        state, options = GDNState(conv, ssm), dict(config=config, implementation="xla")
        if starts is None:
            indices = dict(state_indices=slots, has_initial_state=has)
            out = _decode(weights, state, mixed, indices, *arguments, **options)
        else:
            indices = dict(state_indices=slots, num_accepted_tokens=accepted)
            out = _packed(weights, state, mixed, starts, indices, *arguments, verify=True, **options)
        return out.o, *out.state

    slots, has, accepted = map(indices.get, ("state_indices", "has_initial_state", "num_accepted_tokens"))
    slots = slots_of(slots, num_tokens if accepted is None else accepted.shape[0])
    arguments = (mixed_qkvzba, weights, norm_weight, norm_eps, conv, ssm, slots, has, accepted, query_start_loc, at)
    o, conv, ssm = run("mosaic", "decode", by_operators, *arguments, config=config)
    state = GDNState(unstacked(conv, layer), unstacked(ssm, layer))
    return GDNOutput(o, split_qkvzba(mixed_qkvzba, config)[1], state)


@functools.partial(jax.jit, static_argnames="config")
def _prefill(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: Array,
    query_start_loc: Array,
    indices: dict[str, Array | None],
    norm_weight: Array | None,
    norm_eps: Array,
    layer: Array | None,
    *,
    config: GDNConfig,
) -> GDNOutput:
    """The prefill form of `_packed` as kernels; the norm with its masks stays one pass of XLA's."""
    (conv, at), ssm = stacked(state.conv, layer), stacked(state.ssm, layer)[0]
    num_tokens, longest = mixed_qkvzba.shape[0], config.mtp_step + 1
    sizes: dict[str, Any] = dict(num_slots=conv.shape[1], num_tokens=num_tokens, max_accepted=longest)
    checks.debug_check("gdn_prefill", query_start_loc=query_start_loc, **indices, **sizes)
    batch, ends = _resolved((conv, at), num_tokens, query_start_loc, indices, longest)

    def by_operators(mixed, weights, conv, ssm, batch, ends):
        starts = jnp.append(batch.starts, ends[-1:])
        names = dict(state_indices=batch.write, initial_state_indices=batch.read, num_accepted_tokens=batch.offset + 1)
        arguments = (weights, GDNState(conv, ssm), mixed, starts, names, None, jnp.float32(0), batch.layer)
        out = _packed(*arguments, config=config, verify=False, implementation="xla")
        return out.o, *out.state

    arguments = (mixed_qkvzba, weights, conv, ssm, batch, ends)
    o, conv, ssm = run("mosaic", "prefill", by_operators, *arguments, config=config)
    state = GDNState(unstacked(conv, layer), unstacked(ssm, layer))
    z, valid = split_qkvzba(mixed_qkvzba, config)[1], valid_tokens(batch, num_tokens)
    return _output(o, z, valid, state, norm_weight, norm_eps)


def gdn_prefill(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: ArrayLike,
    *,
    config: GDNConfig,
    query_start_loc: ArrayLike,
    state_indices: ArrayLike | None,
    has_initial_state: ArrayLike | None = None,
    initial_state_indices: ArrayLike | None = None,
    num_accepted_tokens: ArrayLike | None = None,
    norm_weight: ArrayLike | None = None,
    norm_eps: float | ArrayLike = 1e-6,
    layer: int | ArrayLike | None = None,
    implementation: str | None = None,
) -> GDNOutput:
    """A gated-delta-net layer over packed prompts, or pieces of them: conv, gating, the chunked rule, the gated norm.

    Request slot `r` has conv row `r` and ssm rows `r * (S + 1)` to `r * (S + 1) + S`. The state after the last token goes to
    conv row `r` and ssm row `r * (S + 1)`; the accepted count of the slot is 1 afterwards.

    Args:
        weights: `GDNWeights` of this rank.
        state: `GDNState`, with a leading axis `L` in both arrays where `layer` is given.
        mixed_qkvzba: `[T, qkvz_dim + ba_dim]`, packed tokens, q | k | v | z | b | a; float32, bfloat16 or float16.
        config: the layer's sizes.
        query_start_loc: integer `[N + 1]`, where the sequences start, and the end of the last. A sequence may be empty, and one
            of a single token is a decode step.
        state_indices: integer `[N]`, request slots; outside the pool: padding. None: sequence n uses slot n.
        has_initial_state: bool `[N]`; False: start from zeros. None: all True.
        initial_state_indices: integer `[N]`, request slots to start from; outside the pool: zeros. None: `state_indices`.
        num_accepted_tokens: integer `[N]`, 1 to `S + 1`: continue after a verify step. Only with `mtp_step > 0`.
        norm_weight: `[V]`; given, `o` is `gated_rms_norm(o, z, norm_weight)`.
        norm_eps: of that norm.
        layer: which layer of a stacked state, an int or an int32 scalar.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `GDNOutput(o [T, HV, V], z [T, HV, V], state)`; `o` is zero at padding, `z` the input's part unchanged.

    Raises:
        ValueError: shapes or arguments that do not fit together, or an implementation that cannot run here.
        TypeError: no array, or another dtype.

    Source: the linear attention of Qwen3-Next; LightLLM's `LinearAttBackend.prefill_att`.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
        >>> weights = GDNWeights(jnp.ones((16, 4)), None, jnp.zeros(2), jnp.zeros(2))
        >>> out = gdn_prefill(weights, init_state(config, num_slots=4), jnp.ones((5, 28)), config=config,
        ...                   query_start_loc=jnp.array([0, 3, 5]), state_indices=jnp.array([2, 0]))
        >>> out.o.shape, out.state.ssm.shape
        ((5, 2, 4), (4, 2, 4, 4))
    """
    this = "gdn_prefill"
    weights, state = checks.layer_arguments(this, weights, state, mixed_qkvzba, config, layer, norm_weight)
    if config.mtp_step == 0:
        checks.refuse(this, "with mtp_step=0", num_accepted_tokens=num_accepted_tokens)
    starts, n = checks.starts(this, query_start_loc)
    num_slots = state.conv.shape[-3]
    checks.own_rows(this, state_indices, n, num_slots, "state.conv")
    indices = dict(
        state_indices=checks.index(this, "state_indices", state_indices, num_sequences=n),
        has_initial_state=checks.flags(this, "has_initial_state", has_initial_state, n),
        initial_state_indices=checks.index(this, "initial_state_indices", initial_state_indices, num_sequences=n),
        num_accepted_tokens=checks.index(this, "num_accepted_tokens", num_accepted_tokens, num_sequences=n),
    )
    at = checks.layer_index(this, layer, state.conv.shape[0])
    sizes = dict(config=config, state=state, mixed_qkvzba=mixed_qkvzba, query_start_loc=starts)
    chosen = choose(this, implementation, sizes)
    eps = checks.number(this, "norm_eps", norm_eps)
    arguments = (weights, state, mixed_qkvzba, starts, indices, norm_weight, eps, at)
    if chosen == "mosaic":
        return _prefill(*arguments, config=config)
    return _packed(*arguments, config=config, verify=False, implementation=implementation)


def gdn_decode(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: ArrayLike,
    *,
    config: GDNConfig,
    state_indices: ArrayLike | None,
    has_initial_state: ArrayLike | None = None,
    norm_weight: ArrayLike | None = None,
    norm_eps: float | ArrayLike = 1e-6,
    layer: int | ArrayLike | None = None,
    implementation: str | None = None,
) -> GDNOutput:
    """A gated-delta-net layer on one token a sequence: the decode step. For `mtp_step == 0` only.

    Args:
        weights: `GDNWeights` of this rank.
        state: `GDNState`, with a leading axis `L` in both arrays where `layer` is given.
        mixed_qkvzba: `[N, qkvz_dim + ba_dim]`, q | k | v | z | b | a; float32, bfloat16 or float16.
        config: the layer's sizes.
        state_indices: integer `[N]`, slots; outside the pool: padding. None: sequence n uses slot n.
        has_initial_state: bool `[N]`; False: start from zeros. None: all True.
        norm_weight: `[V]`; given, `o` is `gated_rms_norm(o, z, norm_weight)`.
        norm_eps: of that norm.
        layer: which layer of a stacked state, an int or an int32 scalar.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `GDNOutput(o [N, HV, V], z [N, HV, V], state)`; `o` is zero at padding, `z` the input's part unchanged.

    Raises:
        ValueError: shapes that do not fit, `mtp_step > 0` (use `gdn_mtp_decode`), or an implementation that cannot run here.
        TypeError: no array, or another dtype.

    Source: the linear attention of Qwen3-Next; LightLLM's `LinearAttBackend.decode_att`.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
        >>> weights = GDNWeights(jnp.ones((16, 4)), None, jnp.zeros(2), jnp.zeros(2))
        >>> out = gdn_decode(weights, init_state(config, num_slots=4), jnp.ones((2, 28)), config=config,
        ...                  state_indices=jnp.array([3, -1]))
        >>> out.o.shape, bool(out.o[1].any())
        ((2, 2, 4), False)
    """
    this = "gdn_decode"
    weights, state = checks.layer_arguments(this, weights, state, mixed_qkvzba, config, layer, norm_weight)
    if config.mtp_step:
        raise ValueError(f"{this}: `config` has mtp_step={config.mtp_step}, expected 0; use gdn_mtp_decode.")
    n, num_slots = mixed_qkvzba.shape[0], state.conv.shape[-3]
    checks.own_rows(this, state_indices, n, num_slots, "state.conv")
    indices = dict(
        state_indices=checks.index(this, "state_indices", state_indices, num_sequences=n),
        has_initial_state=checks.flags(this, "has_initial_state", has_initial_state, n),
    )
    at = checks.layer_index(this, layer, state.conv.shape[0])
    chosen = choose(this, implementation, dict(config=config, state=state, mixed_qkvzba=mixed_qkvzba))
    eps = checks.number(this, "norm_eps", norm_eps)
    if chosen == "mosaic":
        arguments = (weights, state, mixed_qkvzba, None, indices, norm_weight, eps, at)
        return _one_launch(*arguments, this=this, config=config)
    return _decode(
        weights, state, mixed_qkvzba, indices, norm_weight, eps, at, config=config, implementation=implementation
    )


def gdn_mtp_decode(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: ArrayLike,
    *,
    config: GDNConfig,
    state_indices: ArrayLike | None,
    num_accepted_tokens: ArrayLike,
    query_start_loc: ArrayLike | None = None,
    norm_weight: ArrayLike | None = None,
    norm_eps: float | ArrayLike = 1e-6,
    layer: int | ArrayLike | None = None,
    implementation: str | None = None,
) -> GDNOutput:
    """A gated-delta-net layer on the verify step of speculative decoding: up to `S + 1` tokens a sequence.

    A sequence starts from the state after its last accepted token, `num_accepted_tokens` counted from the first token of the
    verify step before (1 after a prefill), and keeps the state after each of its tokens, so that any number of them can be
    accepted next time.

    Args:
        weights: `GDNWeights` of this rank.
        state: `GDNState`, with a leading axis `L` in both arrays where `layer` is given.
        mixed_qkvzba: `[T, qkvz_dim + ba_dim]`, packed tokens, q | k | v | z | b | a; float32, bfloat16 or float16.
        config: the layer's sizes.
        state_indices: integer `[N]`, request slots; outside the pool: padding. None: sequence n uses slot n.
        num_accepted_tokens: integer `[N]`, 1 to `S + 1`; anything else: padding.
        query_start_loc: integer `[N + 1]`; a sequence of more than `S + 1` tokens is padding. None: `S + 1` tokens each.
        norm_weight: `[V]`; given, `o` is `gated_rms_norm(o, z, norm_weight)`.
        norm_eps: of that norm.
        layer: which layer of a stacked state, an int or an int32 scalar.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `GDNOutput(o [T, HV, V], z [T, HV, V], state)`; `o` is zero at padding, `z` the input's part unchanged.

    Raises:
        ValueError: shapes that do not fit, or an implementation that cannot run here.
        TypeError: no array, or another dtype.

    Source: the verify step of LightLLM's `LinearAttBackend.decode_att`.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4, mtp_step=1)
        >>> weights = GDNWeights(jnp.ones((16, 4)), None, jnp.zeros(2), jnp.zeros(2))
        >>> out = gdn_mtp_decode(weights, init_state(config, num_slots=4), jnp.ones((4, 28)), config=config,
        ...                      state_indices=jnp.array([3, 0]), num_accepted_tokens=jnp.array([1, 1]))
        >>> out.o.shape
        (4, 2, 4)
    """
    this = "gdn_mtp_decode"
    weights, state = checks.layer_arguments(this, weights, state, mixed_qkvzba, config, layer, norm_weight)
    accepted = checks.needed_index(this, "num_accepted_tokens", num_accepted_tokens, num_sequences=None)
    n, longest, tokens = accepted.shape[0], config.mtp_step + 1, mixed_qkvzba.shape[0]
    if query_start_loc is None:
        starts = equal_starts(n, longest)
        if tokens != n * longest:
            raise ValueError(
                f"{this}: `mixed_qkvzba` has num_tokens={tokens}, expected {n * longest}, mtp_step + 1 = {longest} for each "
                f"of {n} sequences without `query_start_loc`."
            )
    else:
        checks.index(this, "query_start_loc", query_start_loc, **{"num_sequences + 1": n + 1})
        starts, _ = checks.starts(this, query_start_loc)
    checks.own_rows(this, state_indices, n, state.conv.shape[-3], "state.conv")
    slots = checks.index(this, "state_indices", state_indices, num_sequences=n)
    at = checks.layer_index(this, layer, state.conv.shape[0])
    sizes = dict(config=config, state=state, mixed_qkvzba=mixed_qkvzba, num_accepted_tokens=accepted)
    chosen = choose(this, implementation, sizes)
    eps = checks.number(this, "norm_eps", norm_eps)
    indices = dict(state_indices=slots, num_accepted_tokens=accepted)
    arguments = (weights, state, mixed_qkvzba, starts, indices, norm_weight, eps, at)
    if chosen == "mosaic":
        return _one_launch(*arguments, this=this, config=config)
    return _packed(*arguments, config=config, verify=True, implementation=implementation)
