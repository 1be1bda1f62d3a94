"""Every operator of gdn_jax in numpy, token by token: the truth that the fast versions are measured against.

Same names, arguments and rules as the public functions (there stand the full docstrings), less `implementation`, plus
`dtype`: the type of all arithmetic and of all results. Nothing is rounded to a storage dtype on the way, pools come
back whole and unrounded in `dtype`, and no argument is ever changed. The symbols (T, N, H, HV, K, V, D, W, S) are those
of the operators page. Little is checked here; only calls that would otherwise be misread are refused.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from gdn_jax.types import PAD_SLOT, GDNConfig, GDNOutput, GDNState, GDNWeights

Array = np.ndarray[Any, Any]
_Job = tuple[range, int | None, list[int]]  # of a sequence: tokens, the row it starts from, rows to store into
Result = Any  # an Array; Any, so that it also fits the jax.Array fields of GDNState and GDNOutput


# ---- arrays, indices, sequences -------------------------------------------------------------------------------------


def _array(values: ArrayLike, dtype: DTypeLike) -> Array:
    """A fresh array of the exact values (bfloat16 of ml_dtypes and of JAX included) in `dtype`."""
    return np.array(np.asarray(values).astype(dtype))


def _ints(values: ArrayLike) -> list[Any]:
    """Indices as (nested) lists of Python ints, which neither wrap nor narrow."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise TypeError(f"reference: an index array has dtype {array.dtype}, expected an integer dtype.")
    return array.tolist()


def _pool(state: ArrayLike, layer: Any, dtype: DTypeLike) -> tuple[Array, Array]:
    """A copy of the pool, and the view of it that holds this layer's slots (no slot at all for a traced bad layer)."""
    pool = _array(state, dtype)
    if layer is None:
        return pool, pool
    if 0 <= int(layer) < pool.shape[0]:
        return pool, pool[int(layer)]
    if isinstance(layer, int | np.integer | np.ndarray):
        raise ValueError(f"reference: `layer` is {layer}, expected at least 0 and less than {pool.shape[0]}.")
    return pool, np.empty((0, *pool.shape[2:]), dtype)


def _slots(state_indices: ArrayLike | None, num_sequences: int, state: ArrayLike, layer: Any) -> list[int]:
    """The slot of each sequence; without `state_indices` sequence n has slot n."""
    if state_indices is not None:
        return _ints(state_indices)
    num_slots = np.shape(state)[0 if layer is None else 1]
    if num_sequences > num_slots:
        raise ValueError(f"reference: {num_sequences} sequences without `state_indices`, expected <= {num_slots}.")
    return list(range(num_sequences))


def _equal_starts(num_sequences: int, length: int) -> list[int]:
    """The `query_start_loc` of sequences of equal length."""
    return [n * length for n in range(num_sequences + 1)]


def _starts(query_start_loc: ArrayLike, num_tokens: int) -> list[int]:
    """`query_start_loc` as ints inside the batch, so that a malformed one cannot lead outside."""
    return [min(max(start, 0), num_tokens) for start in _ints(query_start_loc)]


class _Run(NamedTuple):
    """A sequence that is neither empty nor padding: its tokens, and where it reads and writes the pool."""

    tokens: range
    read: int | None  # slot of the initial state; None: zeros
    offset: int  # accepted tokens - 1
    write: int


def _runs(
    starts: list[int],
    slots: list[int],
    num_slots: int,
    *,
    has_initial_state: ArrayLike | None = None,
    initial_state_indices: ArrayLike | None = None,
    num_accepted_tokens: ArrayLike | None = None,
    mtp_step: int = 0,
    max_tokens: int | None = None,
) -> list[_Run]:
    """The rules of padding: every sequence that has tokens and computes something, in order."""
    with_state = [True] * len(slots) if has_initial_state is None else np.asarray(has_initial_state, bool).tolist()
    sources = slots if initial_state_indices is None else _ints(initial_state_indices)
    accepted = [1] * len(slots) if num_accepted_tokens is None else _ints(num_accepted_tokens)
    runs = []
    for n, slot in enumerate(slots):
        tokens = range(starts[n], starts[n + 1])
        if len(tokens) == 0 or not 0 <= slot < num_slots or (max_tokens is not None and len(tokens) > max_tokens):
            continue
        if not with_state[n]:  # zeros, and neither the source nor the accepted count is looked at
            runs.append(_Run(tokens, None, 0, slot))
        elif 1 <= accepted[n] <= mtp_step + 1:
            runs.append(_Run(tokens, sources[n] if 0 <= sources[n] < num_slots else None, accepted[n] - 1, slot))
    return runs


# ---- gating, norm ---------------------------------------------------------------------------------------------------


def _sigmoid(x: Array) -> Array:
    with np.errstate(invalid="ignore"):  # NaN in padding
        return np.exp(-np.logaddexp(0, -x))


def gdn_gating(
    A_log: ArrayLike, a: ArrayLike, b: ArrayLike, dt_bias: ArrayLike, *, dtype: DTypeLike = np.float64
) -> tuple[Result, Result]:
    """g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b).

    `A_log`, `dt_bias` `[HV]`; `a`, `b` `[..., HV]`; returns `g`, `beta` `[..., HV]`. The product is formed as
    exp(A_log + log(softplus)), so that exp(A_log) = inf never meets a softplus of 0.
    """
    x = _array(a, dtype) + _array(dt_bias, dtype)
    softplus = np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))
    log_softplus = np.where(x < -40, x, np.log(np.where(x < -40, 1, softplus)))  # log1p(e^x) = e^x there
    with np.errstate(over="ignore"):  # -inf, a hard reset, is the nearest value where g does not fit
        g = -np.exp(_array(A_log, dtype) + log_softplus)
    return g, _sigmoid(_array(b, dtype))


def gated_rms_norm(
    o: ArrayLike, z: ArrayLike, weight: ArrayLike, *, eps: float = 1e-6, dtype: DTypeLike = np.float64
) -> Result:
    """o / sqrt(mean(o²) + eps) * weight * silu(z); `o`, `z` and the result `[..., V]`, `weight` `[V]`.

    The exact mathematics: the roundings to `o.dtype` between the three factors and at the end are left out.
    """
    o, z, weight = (_array(array, dtype) for array in (o, z, weight))
    normed = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + float(eps))
    return normed * weight * (z * _sigmoid(z))


# ---- convolution ----------------------------------------------------------------------------------------------------


def _conv(
    x: Array,
    weight: ArrayLike,
    bias: ArrayLike | None,
    rows: Array,
    runs: list[_Run],
    activation: str | None,
    verify: bool,
) -> Array:
    """y `[T, D]` of x `[T, D]`; the rows `[num_slots, D, W - 1 + S]` of the runs' slots are replaced in place."""
    if activation not in ("silu", "swish", None):
        raise ValueError(f"reference: `activation` is {activation!r}, expected 'silu', 'swish' or None.")
    weight = _array(weight, x.dtype)
    bias = np.zeros(x.shape[1], x.dtype) if bias is None else _array(bias, x.dtype)
    W = weight.shape[1]
    old, y = rows.copy(), np.zeros_like(x)
    for tokens, read, offset, write in runs:
        history = np.zeros((x.shape[1], W - 1), x.dtype) if read is None else old[read, :, offset : offset + W - 1]
        inputs = np.concatenate([history, x[tokens.start : tokens.stop].T], axis=1)  # [D, W - 1 + L]
        for i, t in enumerate(tokens):
            y[t] = bias + np.einsum("dw,dw->d", weight, inputs[:, i : i + W])
            if activation is not None:
                y[t] *= _sigmoid(y[t])
        if verify:  # W - 2 columns of history, the L new inputs, zeros
            rows[write] = 0
            rows[write, :, : W - 2 + len(tokens)] = inputs[:, 1:]
        else:  # the last W - 1 inputs; further columns stay
            rows[write, :, : W - 1] = inputs[:, len(tokens) :]
    return y


def causal_conv1d(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    conv_state: ArrayLike | None = None,
    state_indices: ArrayLike | None = None,
    query_start_loc: ArrayLike | None = None,
    has_initial_state: ArrayLike | None = None,
    initial_state_indices: ArrayLike | None = None,
    num_accepted_tokens: ArrayLike | None = None,
    activation: str | None = "silu",
    layer: Any = None,
    dtype: DTypeLike = np.float64,
) -> tuple[Result, Result]:
    """Prefill: y[t] = act(bias + Σ_i weight[:, i] * window_t[i]).

    `x` `[T, D]` with `query_start_loc` `[N + 1]`, or `[B, T, D]` without; `weight` `[D, W]`, `bias` `[D]`, `conv_state`
    `[num_slots, D, W - 1 + S]` or None. Returns `y` of the shape of `x`, and the pool (without one `[N, D, W - 1]`).
    """
    x, W = _array(x, dtype), np.shape(weight)[1]
    if x.ndim != (3 if query_start_loc is None else 2):
        raise ValueError(f"reference: `x` has {x.ndim} axes, expected [T, D] with `query_start_loc`, else [B, T, D].")
    starts = _equal_starts(*x.shape[:2]) if query_start_loc is None else _starts(query_start_loc, len(x))
    if conv_state is None:
        _refuse_slots(state_indices, initial_state_indices, num_accepted_tokens, layer)
        conv_state = np.zeros((len(starts) - 1, x.shape[-1], W - 1))
    pool, rows = _pool(conv_state, layer, dtype)
    runs = _runs(
        starts,
        _slots(state_indices, len(starts) - 1, conv_state, layer),
        rows.shape[0],
        has_initial_state=has_initial_state,
        initial_state_indices=initial_state_indices,
        num_accepted_tokens=num_accepted_tokens,
        mtp_step=rows.shape[-1] - (W - 1),
    )
    y = _conv(x.reshape(-1, x.shape[-1]), weight, bias, rows, runs, activation, verify=False)
    return y.reshape(x.shape), pool


def causal_conv1d_update(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    conv_state: ArrayLike,
    state_indices: ArrayLike | None = None,
    has_initial_state: ArrayLike | None = None,
    num_accepted_tokens: ArrayLike | None = None,
    query_start_loc: ArrayLike | None = None,
    activation: str | None = "silu",
    layer: Any = None,
    dtype: DTypeLike = np.float64,
) -> tuple[Result, Result]:
    """Decode, `x` `[N, D]`; or, with `query_start_loc` `[N + 1]`, the verify step, `x` `[T, D]`.

    `conv_state` `[num_slots, D, W - 1 + S]`; returns `y` of the shape of `x`, and the pool.
    """
    if num_accepted_tokens is not None and query_start_loc is None:
        raise ValueError("reference: `num_accepted_tokens` without `query_start_loc`, expected both.")
    x, verify = _array(x, dtype), query_start_loc is not None
    pool, rows = _pool(conv_state, layer, dtype)
    starts = _equal_starts(len(x), 1) if query_start_loc is None else _starts(query_start_loc, len(x))
    mtp_step = rows.shape[-1] - (np.shape(weight)[1] - 1)
    runs = _runs(
        starts,
        _slots(state_indices, len(starts) - 1, conv_state, layer),
        rows.shape[0],
        has_initial_state=has_initial_state,
        num_accepted_tokens=num_accepted_tokens,
        mtp_step=mtp_step,
        max_tokens=mtp_step + 1,
    )
    return _conv(x, weight, bias, rows, runs, activation, verify), pool


# ---- the gated delta rule -------------------------------------------------------------------------------------------


def _rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    rows: Array,
    jobs: list[_Job],
    scale: float | None,
    use_qk_l2norm: bool,
) -> Array:
    """o `[T, HV, V]` of packed q, k `[T, H, K]`, v `[T, HV, V]`, g, beta `[T, HV]`; writes to rows `[…, HV, K, V]`.

    A job is a sequence: its tokens, the row it starts from (None: zeros), and for each token the row that receives the
    state after it (outside the pool: none).
    """
    dtype = rows.dtype
    q, k, v, g, beta = (_array(array, dtype) for array in (q, k, v, g, beta))
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    heads = v.shape[1] // q.shape[1]  # value head hv uses key head hv // heads
    old, o = rows.copy(), np.zeros_like(v)
    for tokens, read, writes in jobs:
        M = np.zeros(rows.shape[1:], dtype) if read is None else old[read]
        for t, write in zip(tokens, writes, strict=True):
            q_t, k_t = np.repeat(q[t], heads, axis=0), np.repeat(k[t], heads, axis=0)  # [HV, K]
            if use_qk_l2norm:
                q_t = q_t / np.sqrt(np.sum(q_t * q_t, axis=-1, keepdims=True) + 1e-6)
                k_t = k_t / np.sqrt(np.sum(k_t * k_t, axis=-1, keepdims=True) + 1e-6)
            M = np.exp(g[t])[:, None, None] * M
            u = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", M, k_t))
            M = M + np.einsum("hk,hv->hkv", k_t, u)
            o[t] = np.einsum("hkv,hk->hv", M, q_t * factor)
            if 0 <= write < rows.shape[0]:
                rows[write] = M
    return o


def _job(run: _Run, rows_per_slot: int = 1, every_token: bool = False) -> _Job:
    """The job of a run whose slot r has the rows from r * rows_per_slot: store the final state, or every token's."""
    first, last = run.write * rows_per_slot, len(run.tokens) - 1
    read = None if run.read is None else run.read * rows_per_slot + run.offset
    return run.tokens, read, [first + j for j in range(last + 1)] if every_token else [PAD_SLOT] * last + [first]


def _refuse_slots(*arguments: Any) -> None:
    if any(argument is not None for argument in arguments):
        raise ValueError("reference: slots, initial slots, accepted counts and `layer` need a state, expected None.")


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
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    chunk_size: int = 64,
    layer: Any = None,
    dtype: DTypeLike = np.float64,
) -> tuple[Result, Result]:
    """Prefill: M ← exp(g) M, u = beta (v − Mᵀ k̂), M ← M + k̂ uᵀ, o = Mᵀ q̂ (`chunk_size` changes nothing here).

    `q`, `k` `[T, H, K]`, `v` `[T, HV, V]`, `g`, `beta` `[T, HV]` with `query_start_loc` `[N + 1]`, or a leading `B` and
    no `query_start_loc`; `ssm_state` `[num_slots, HV, K, V]` or None. Returns `o` of the shape of `v`, and the pool
    (without one `[N, HV, K, V]`).
    """
    del chunk_size
    shape = np.shape(v)
    if len(shape) != (4 if query_start_loc is None else 3):
        raise ValueError(f"reference: `v` has {len(shape)} axes, expected 3 with `query_start_loc`, else 4.")
    if query_start_loc is None:
        starts = _equal_starts(*shape[:2])
        q, k, v, g, beta = (_array(array, dtype) for array in (q, k, v, g, beta))
        q, k, v, g, beta = (array.reshape(starts[-1], *array.shape[2:]) for array in (q, k, v, g, beta))
    else:
        starts = _starts(query_start_loc, shape[0])
    if ssm_state is None:
        _refuse_slots(state_indices, initial_state_indices, layer)
        ssm_state = np.zeros((len(starts) - 1, shape[-2], np.shape(k)[-1], shape[-1]))
    pool, rows = _pool(ssm_state, layer, dtype)
    runs = _runs(
        starts,
        _slots(state_indices, len(starts) - 1, ssm_state, layer),
        rows.shape[0],
        has_initial_state=has_initial_state,
        initial_state_indices=initial_state_indices,
    )
    o = _rule(q, k, v, g, beta, rows, [_job(run) for run in runs], scale, use_qk_l2norm)
    return o.reshape(shape), pool


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
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    layer: Any = None,
    dtype: DTypeLike = np.float64,
) -> tuple[Result, Result]:
    """Decode: one token a sequence, `q`, `k` `[N, H, K]`, `v` `[N, HV, V]`, …; returns `o` `[N, HV, V]`, the pool."""
    pool, rows = _pool(ssm_state, layer, dtype)
    N = np.shape(q)[0]
    slots = _slots(state_indices, N, ssm_state, layer)
    runs = _runs(_equal_starts(N, 1), slots, rows.shape[0], has_initial_state=has_initial_state)
    return _rule(q, k, v, g, beta, rows, [_job(run) for run in runs], scale, use_qk_l2norm), pool


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
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    layer: Any = None,
    dtype: DTypeLike = np.float64,
) -> tuple[Result, Result]:
    """Verify step: start from `read_indices[n, accepted - 1]`, store after each token t into `write_indices[n, t]`.

    `q`, `k` `[T, H, K]`, `v` `[T, HV, V]`, `g`, `beta` `[T, HV]`, index arrays `[N, S + 1]`, counts `[N]`,
    `query_start_loc` `[N + 1]`; returns `o` `[T, HV, V]`, and the pool.
    """
    pool, rows = _pool(ssm_state, layer, dtype)
    starts = _starts(query_start_loc, np.shape(q)[0])
    reads, writes = _ints(read_indices), _ints(write_indices)
    width = np.shape(read_indices)[1]  # S + 1
    jobs = []
    for n, accepted in enumerate(_ints(num_accepted_tokens)):
        tokens = range(starts[n], starts[n + 1])
        if len(tokens) <= width and 1 <= accepted <= width and 0 <= reads[n][accepted - 1] < rows.shape[0]:
            jobs.append((tokens, reads[n][accepted - 1], writes[n][: len(tokens)]))
    return _rule(q, k, v, g, beta, rows, jobs, scale, use_qk_l2norm), pool


# ---- the layer ------------------------------------------------------------------------------------------------------


def split_qkvzba(
    mixed: ArrayLike, config: GDNConfig, *, dtype: DTypeLike = np.float64
) -> tuple[Result, Result, Result, Result]:
    """`mixed` `[T, qkvz_dim + ba_dim]` → `mixed_qkv` `[T, D]`, `z` `[T, HV, V]`, `b` `[T, HV]`, `a` `[T, HV]`."""
    HV = config.tp_num_v_heads
    qkv, z, b, a = np.split(_array(mixed, dtype), np.cumsum([config.conv_dim, config.value_dim, HV]), axis=-1)
    return qkv, z.reshape(*z.shape[:-1], HV, config.head_v_dim), b, a


def split_qkv(
    mixed_qkv: ArrayLike, config: GDNConfig, *, dtype: DTypeLike = np.float64
) -> tuple[Result, Result, Result]:
    """`mixed_qkv` `[T, D]` → `q`, `k` `[T, H, K]`, `v` `[T, HV, V]`."""
    q, k, v = np.split(_array(mixed_qkv, dtype), [config.key_dim, 2 * config.key_dim], axis=-1)
    key_heads = (*q.shape[:-1], config.tp_num_k_heads, config.head_k_dim)
    value_heads = (*v.shape[:-1], config.tp_num_v_heads, config.head_v_dim)
    return q.reshape(key_heads), k.reshape(key_heads), v.reshape(value_heads)


def _state(conv: Result, ssm: Result) -> GDNState:
    return GDNState(conv, ssm)


def init_state(
    config: GDNConfig, num_slots: int, num_layers: int | None = None, *, dtype: DTypeLike = np.float64
) -> GDNState:
    """Zeros: `conv` `[num_slots, D, W - 1 + S]`, `ssm` `[num_slots * (S + 1), HV, K, V]`; `num_layers` in front."""
    layers = () if num_layers is None else (num_layers,)
    row = (config.tp_num_v_heads, config.head_k_dim, config.head_v_dim)
    conv = np.zeros((*layers, num_slots, config.conv_dim, config.conv_state_len), dtype)
    return _state(conv, np.zeros((*layers, num_slots * (config.mtp_step + 1), *row), dtype))


def _copy(state: GDNState, dtype: DTypeLike) -> GDNState:
    return _state(_array(state.conv, dtype), _array(state.ssm, dtype))


def copy_slots(
    state: GDNState, src: ArrayLike, dst: ArrayLike, config: GDNConfig, *, dtype: DTypeLike = np.float64
) -> GDNState:
    """All rows of requests `src` `[M]` to those of `dst` `[M]`, in every layer; all reads happen before the writes."""
    old, new, count = _copy(state, dtype), _copy(state, dtype), config.mtp_step + 1
    num_slots = old.conv.shape[-3]
    for source, target in zip(_ints(src), _ints(dst), strict=True):
        if 0 <= source < num_slots and 0 <= target < num_slots:
            new.conv[..., target, :, :] = old.conv[..., source, :, :]
            for j in range(count):
                new.ssm[..., target * count + j, :, :, :] = old.ssm[..., source * count + j, :, :, :]
    return new


def reset_slots(state: GDNState, slots: ArrayLike, config: GDNConfig, *, dtype: DTypeLike = np.float64) -> GDNState:
    """Zeros in all rows of the requests `slots` `[M]`, in every layer; a slot outside the pool is skipped."""
    new, count = _copy(state, dtype), config.mtp_step + 1
    for slot in _ints(slots):
        if 0 <= slot < new.conv.shape[-3]:
            new.conv[..., slot, :, :] = 0
            new.ssm[..., slot * count : (slot + 1) * count, :, :, :] = 0
    return new


def _layer(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: ArrayLike,
    config: GDNConfig,
    starts: list[int],
    state_indices: ArrayLike,
    layer: Any,
    norm_weight: ArrayLike | None,
    norm_eps: float,
    dtype: DTypeLike,
    *,
    verify: bool = False,
    has_initial_state: ArrayLike | None = None,
    initial_state_indices: ArrayLike | None = None,
    num_accepted_tokens: ArrayLike | None = None,
) -> GDNOutput:
    """Splits, gating, convolution, rule and norm; the arguments are those of the layer functions."""
    count = config.mtp_step + 1
    (conv_pool, conv_rows), (ssm_pool, ssm_rows) = _pool(state.conv, layer, dtype), _pool(state.ssm, layer, dtype)
    if len(ssm_rows) != len(conv_rows) * count:
        raise ValueError(f"reference: {len(ssm_rows)} ssm rows for {len(conv_rows)} conv rows, expected {count} each.")
    runs = _runs(
        starts,
        _ints(state_indices),
        len(conv_rows),
        has_initial_state=has_initial_state,
        initial_state_indices=initial_state_indices,
        num_accepted_tokens=num_accepted_tokens,
        mtp_step=config.mtp_step,
        max_tokens=count if verify else None,
    )
    mixed_qkv, z, b, a = split_qkvzba(mixed_qkvzba, config, dtype=dtype)
    g, beta = gdn_gating(weights.A_log, a, b, weights.dt_bias, dtype=dtype)
    qkv = _conv(mixed_qkv, weights.conv_weight, weights.conv_bias, conv_rows, runs, config.activation, verify)
    jobs = [_job(run, count, every_token=verify) for run in runs]
    o: Result = _rule(*split_qkv(qkv, config, dtype=dtype), g, beta, ssm_rows, jobs, None, True)
    if norm_weight is not None:
        for run in runs:  # token by token too, so that padding stays zero, whatever stands in z
            for t in run.tokens:
                o[t] = gated_rms_norm(o[t], z[t], norm_weight, eps=norm_eps, dtype=dtype)
    return GDNOutput(o, z, _state(conv_pool, ssm_pool))


def gdn_prefill(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: ArrayLike,
    *,
    config: GDNConfig,
    query_start_loc: ArrayLike,
    state_indices: ArrayLike,
    has_initial_state: ArrayLike | None = None,
    initial_state_indices: ArrayLike | None = None,
    num_accepted_tokens: ArrayLike | None = None,
    norm_weight: ArrayLike | None = None,
    norm_eps: float = 1e-6,
    layer: Any = None,
    dtype: DTypeLike = np.float64,
) -> GDNOutput:
    """`mixed_qkvzba` `[T, qkvz_dim + ba_dim]` → `o`, `z` `[T, HV, V]`, state; writes conv row r, ssm row r * (S + 1).

    The exact mathematics: conv outputs and the norm's factors are not rounded to a storage dtype on the way.
    """
    if num_accepted_tokens is not None and config.mtp_step == 0:
        raise ValueError("reference: `num_accepted_tokens` with mtp_step=0, expected None.")
    return _layer(
        weights,
        state,
        mixed_qkvzba,
        config,
        _starts(query_start_loc, np.shape(mixed_qkvzba)[0]),
        state_indices,
        layer,
        norm_weight,
        norm_eps,
        dtype,
        has_initial_state=has_initial_state,
        initial_state_indices=initial_state_indices,
        num_accepted_tokens=num_accepted_tokens,
    )


def gdn_decode(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: ArrayLike,
    *,
    config: GDNConfig,
    state_indices: ArrayLike,
    has_initial_state: ArrayLike | None = None,
    norm_weight: ArrayLike | None = None,
    norm_eps: float = 1e-6,
    layer: Any = None,
    dtype: DTypeLike = np.float64,
) -> GDNOutput:
    """One token a sequence, `mtp_step == 0`: `mixed_qkvzba` `[N, qkvz_dim + ba_dim]` → `o`, `z` `[N, HV, V]`, state.

    The exact mathematics, as in `gdn_prefill`, of which this is the case of one-token sequences.
    """
    if config.mtp_step != 0:
        raise ValueError(f"reference: gdn_decode with mtp_step={config.mtp_step}, expected 0; use gdn_mtp_decode.")
    return gdn_prefill(
        weights,
        state,
        mixed_qkvzba,
        config=config,
        query_start_loc=_equal_starts(np.shape(mixed_qkvzba)[0], 1),
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        layer=layer,
        dtype=dtype,
    )


def gdn_mtp_decode(
    weights: GDNWeights,
    state: GDNState,
    mixed_qkvzba: ArrayLike,
    *,
    config: GDNConfig,
    state_indices: ArrayLike,
    num_accepted_tokens: ArrayLike,
    query_start_loc: ArrayLike | None = None,
    norm_weight: ArrayLike | None = None,
    norm_eps: float = 1e-6,
    layer: Any = None,
    dtype: DTypeLike = np.float64,
) -> GDNOutput:
    """The verify step: up to S + 1 tokens a sequence, S + 1 each without `query_start_loc`; shapes as in `gdn_prefill`.

    The exact mathematics, as in `gdn_prefill`.
    """
    num_tokens, num_sequences, count = np.shape(mixed_qkvzba)[0], np.shape(state_indices)[0], config.mtp_step + 1
    if query_start_loc is None and num_tokens != num_sequences * count:
        raise ValueError(f"reference: {num_tokens} tokens, expected {count} for each of {num_sequences} sequences.")
    return _layer(
        weights,
        state,
        mixed_qkvzba,
        config,
        _equal_starts(num_sequences, count) if query_start_loc is None else _starts(query_start_loc, num_tokens),
        state_indices,
        layer,
        norm_weight,
        norm_eps,
        dtype,
        verify=True,
        num_accepted_tokens=num_accepted_tokens,
    )
