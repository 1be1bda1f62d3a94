"""causal_conv1d and causal_conv1d_update."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gdn_jax import checks, xla
from gdn_jax.checks import ArrayLike
from gdn_jax.dispatch import choose, run
from gdn_jax.varlen import Batch, equal_starts, resolve, sequences, slots_of, stacked, unstacked


@functools.partial(jax.jit, static_argnames=("this", "activation", "verify", "implementation"))
def _run(
    x: Array,
    weight: Array,
    bias: Array | None,
    conv_state: Array | None,
    layer: Array | None,
    query_start_loc: Array | None,
    *,
    this: str,
    activation: str | None,
    implementation: str,
    verify: bool = False,
    **indices: Any,
) -> tuple[Array, Array]:
    """All forms; `query_start_loc=None`: one token a sequence."""
    n = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    if conv_state is None:  # the final states, one row a sequence
        conv_state = jnp.zeros((n, x.shape[1], weight.shape[1] - 1), x.dtype)
    pool, at = stacked(conv_state, layer)
    num_layers, num_slots, _, columns = pool.shape
    longest = columns - weight.shape[1] + 2
    limits: dict[str, Any] = dict(max_accepted=longest, max_length=longest if verify else None)
    checks.debug_check(
        this, num_slots=num_slots, num_tokens=x.shape[0], query_start_loc=query_start_loc, **indices, **limits
    )

    def batch_of(query_start_loc: Array | None, at: Array, **indices: Any) -> Batch:
        loc = equal_starts(n, 1) if query_start_loc is None else query_start_loc
        starts, lengths = sequences(loc, x.shape[0])
        sizes: dict[str, Any] = dict(num_slots=num_slots, num_layers=num_layers, **limits)
        return resolve(starts=starts, lengths=lengths, layer=at, **indices, **sizes)

    def on_xla(x: Array, weight: Array, bias: Array | None, pool: Array, batch: Batch) -> tuple[Array, Array]:
        return xla.conv.conv(x, weight, bias, pool, batch, activation=activation, verify=verify)

    if query_start_loc is not None and not verify:

        def prefill(x, weight, bias, pool, *batch):
            y, pool = on_xla(x, weight, bias, pool, Batch(*batch))
            return y, (), pool

        arguments = (x, weight, bias, pool, *batch_of(query_start_loc, at, **indices))
        y, _, pool = run(implementation, "prologue", prefill, *arguments, activation=activation)
    else:

        def step(x, weight, bias, pool, slots, has, accepted, query_start_loc, at):
            names = dict(state_indices=slots, has_initial_state=has, num_accepted_tokens=accepted)
            return on_xla(x, weight, bias, pool, batch_of(query_start_loc, at, **names))

        slots, has, accepted = map(indices.get, ("state_indices", "has_initial_state", "num_accepted_tokens"))
        arguments = (x, weight, bias, pool, slots_of(slots, n), has, accepted, query_start_loc, at)
        y, pool = run(implementation, "conv", step, *arguments, activation=activation)
    return y, unstacked(pool, layer)


def _weights(this: str, x: ArrayLike, weight: Any, bias: Any, activation: Any) -> int:
    """Checks the weights against `x`; returns W."""
    _, width = checks.floats(this, "weight", weight, conv_dim=x.shape[-1], conv_kernel_dim=None)
    if width < 2:
        raise ValueError(f"{this}: `weight` has conv_kernel_dim={width}, expected at least 2.")
    if bias is not None:
        checks.floats(this, "bias", bias, conv_dim=x.shape[-1])
    checks.activation(this, activation)
    return width


def _pool(
    this: str, conv_state: Any, layer: Any, channels: int, width: int, state_indices: Any, n: int
) -> Array | None:
    """Checks the pool; returns the checked layer."""
    at = checks.pool(this, "conv_state", conv_state, layer, num_slots=None, conv_dim=channels, conv_state_len=None)
    num_slots, _, columns = conv_state.shape[-3:]
    if columns < width - 1:
        raise ValueError(
            f"{this}: `conv_state` has conv_state_len={columns}, expected at least conv_kernel_dim - 1 = {width - 1}."
        )
    checks.own_rows(this, state_indices, n, num_slots, "conv_state")
    return at


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
    layer: int | ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Causal depthwise convolution over ragged sequences, with its history in slots: the prefill form.

        y[t] = act(bias + sum over i < W of weight[:, i] * window_t[i])

    where `window_t` holds the last `W` inputs of the sequence up to `x[t]`, the oldest first, the history before them.

    Args:
        x: `[T, D]`, packed sequences; `[B, T, D]` without `query_start_loc`. float32, bfloat16 or float16.
        weight: `[D, W]`, W at least 2.
        bias: `[D]` or None.
        conv_state: `[num_slots, D, W - 1 + S]` in any of these dtypes, with a leading axis `L` where `layer` is given.
            None: every sequence starts from zeros, and its final state comes back.
        state_indices: integer `[N]`, the slots; outside the pool: padding. None: sequence n uses row n.
        query_start_loc: integer `[N + 1]`, where the sequences start, and the end of the last.
        has_initial_state: bool `[N]`; False: start from zeros. None: all True.
        initial_state_indices: integer `[N]`, slots to read the history from; outside the pool: zeros. None: `state_indices`.
        num_accepted_tokens: integer `[N]`, each from 1 to `S + 1`: the history begins at this column - 1, after a verify step.
        activation: "silu", "swish" (the same) or None.
        layer: which layer of a stacked `conv_state`, an int or an int32 scalar.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `(y, conv_state)`: `y` of the shape and dtype of `x`, zeros at padding; the updated pool, in which the first `W - 1`
        columns of each named slot hold its last inputs. Without a pool: `[N, D, W - 1]` in `x.dtype`.

    Raises:
        ValueError: shapes or arguments that do not fit together, or an implementation that cannot run here.
        TypeError: no array, or another dtype.

    Source: the short convolution of Qwen3-Next; the update rule of Dao-AILab's causal_conv1d.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((5, 2))
        >>> y, state = causal_conv1d(x, jnp.ones((2, 4)), query_start_loc=jnp.array([0, 3, 5]), activation=None)
        >>> y[:, 0].tolist(), state.shape
        ([1.0, 2.0, 3.0, 1.0, 2.0], (2, 2, 3))
    """
    this = "causal_conv1d"
    checks.check_array(this, "x", x)
    if query_start_loc is None:
        n, length, channels = checks.check_shape(this, "x", x, num_sequences=None, num_tokens=None, conv_dim=None)
        starts, flat = equal_starts(n, length), x.reshape(n * length, channels)
    else:
        _, channels = checks.check_shape(this, "x", x, num_tokens=None, conv_dim=None)
        (starts, n), flat = checks.starts(this, query_start_loc), x
    width = _weights(this, x, weight, bias, activation)
    arguments = dict(
        state_indices=state_indices, has_initial_state=has_initial_state, initial_state_indices=initial_state_indices
    )
    if conv_state is None:
        why = "without `conv_state`"
        checks.refuse(this, why, **arguments, num_accepted_tokens=num_accepted_tokens, layer=layer)
        at = None
    else:
        at = _pool(this, conv_state, layer, channels, width, state_indices, n)
    indices = dict(
        state_indices=checks.index(this, "state_indices", state_indices, num_sequences=n),
        has_initial_state=checks.flags(this, "has_initial_state", has_initial_state, n),
        initial_state_indices=checks.index(this, "initial_state_indices", initial_state_indices, num_sequences=n),
        num_accepted_tokens=checks.index(this, "num_accepted_tokens", num_accepted_tokens, num_sequences=n),
    )
    chosen = choose(this, implementation, dict(x=x, weight=weight, conv_state=conv_state, query_start_loc=starts))
    options = dict(this=this, activation=activation, implementation=chosen)
    y, pool = _run(flat, weight, bias, conv_state, at, starts, **options, **indices)
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
    layer: int | ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """The causal convolution of one decode step, or of one verify step of speculative decoding.

    Without `query_start_loc`, one token a sequence: the window is the row's first `W - 1` columns and `x`, then these columns
    shift by one and the others stay. With it, the verify step: the history begins at column
    `p = num_accepted_tokens - 1`, and afterwards the row holds columns `p + 1` to `p + W - 2` of the old row, the new inputs,
    and zeros.

    Args:
        x: `[N, D]`, or `[T, D]` with `query_start_loc`; float32, bfloat16 or float16.
        weight: `[D, W]`, W at least 2.
        bias: `[D]` or None.
        conv_state: `[num_slots, D, W - 1 + S]` in any of these dtypes, with a leading axis `L` where `layer` is given.
        state_indices: integer `[N]`, the slots; outside the pool: padding. None: sequence n uses row n.
        has_initial_state: bool `[N]`; False: start from zeros. None: all True.
        num_accepted_tokens: integer `[N]`, each from 1 to `S + 1`; None: 1 for all. Only with `query_start_loc`.
        query_start_loc: integer `[N + 1]`; a sequence has 0 to `S + 1` tokens, with more it is padding.
        activation: "silu", "swish" (the same) or None.
        layer: which layer of a stacked `conv_state`, an int or an int32 scalar.
        implementation: "xla", "mosaic", or None to choose.

    Returns:
        `(y, conv_state)`: `y` of the shape and dtype of `x`, zeros at padding, and the updated pool.

    Raises:
        ValueError: shapes or arguments that do not fit together, or an implementation that cannot run here.
        TypeError: no array, or another dtype.

    Source: the short convolution of Qwen3-Next; the verify form of LightLLM and vLLM.

    Example:
        >>> import jax.numpy as jnp
        >>> pool = jnp.zeros((3, 2, 3))
        >>> y, pool = causal_conv1d_update(jnp.ones((1, 2)), jnp.ones((2, 4)), conv_state=pool, state_indices=jnp.array([1]))
        >>> pool[:, 0].tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """
    this = "causal_conv1d_update"
    tokens, channels = checks.floats(this, "x", x, num_tokens=None, conv_dim=None)
    width = _weights(this, x, weight, bias, activation)
    if query_start_loc is None:
        checks.refuse(this, "without `query_start_loc`", num_accepted_tokens=num_accepted_tokens)
        starts, n = None, tokens
    else:
        starts, n = checks.starts(this, query_start_loc)
    at = _pool(this, conv_state, layer, channels, width, state_indices, n)
    indices = dict(
        state_indices=checks.index(this, "state_indices", state_indices, num_sequences=n),
        has_initial_state=checks.flags(this, "has_initial_state", has_initial_state, n),
        num_accepted_tokens=checks.index(this, "num_accepted_tokens", num_accepted_tokens, num_sequences=n),
    )
    chosen = choose(this, implementation, dict(x=x, weight=weight, conv_state=conv_state, query_start_loc=starts))
    options = dict(this=this, activation=activation, implementation=chosen, verify=starts is not None)
    return _run(x, weight, bias, conv_state, at, starts, **options, **indices)
