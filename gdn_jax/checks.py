"""The helpers that check arguments and word the errors, and `check_batch` for values.

Every message has the form "function: `argument` is or has X, expected Y."
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import checkify

from gdn_jax.types import ACTIVATIONS, GDNConfig, GDNState, GDNWeights
from gdn_jax.varlen import accepted_slots, inside, narrow, slots_of, where_inside

type ArrayLike = Array | np.ndarray

FLOATS = ("float32", "bfloat16", "float16")
Dims = dict[str, int | None]


def describe(shape: Sequence[int | str]) -> str:
    """A shape as Python writes a tuple."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def check_array(function: str, name: str, x: Any, dtypes: str = "floats") -> None:
    """Refuses what is no JAX or numpy array of the kind: "floats", "integers" or "bool"."""
    if not isinstance(x, Array | np.ndarray | np.generic):
        raise TypeError(f"{function}: `{name}` is of type {type(x).__name__}, expected a JAX or numpy array.")
    dtype = x.dtype
    if dtypes == "floats" and dtype.name not in FLOATS:
        raise TypeError(f"{function}: `{name}` has dtype {dtype}, expected one of {', '.join(FLOATS)}.")
    if dtypes == "integers" and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"{function}: `{name}` has dtype {dtype}, expected an integer dtype.")
    if dtypes == "bool" and dtype != np.bool_:
        raise TypeError(f"{function}: `{name}` has dtype {dtype}, expected bool.")


def check_shape(function: str, name: str, x: ArrayLike, **dims: int | None) -> tuple[int, ...]:
    """The shape of `x`, refused where it is not that of `dims` (None: any size)."""
    fits = len(x.shape) == len(dims) and all(
        want in (None, got) for want, got in zip(dims.values(), x.shape, strict=True)
    )
    if not fits:
        wanted = [dim if size is None else f"{dim}={size}" for dim, size in dims.items()]
        raise ValueError(f"{function}: `{name}` has shape {describe(x.shape)}, expected {describe(wanted)}.")
    return x.shape


def floats(function: str, name: str, x: Any, **dims: int | None) -> tuple[int, ...]:
    """Checks a floating point array; returns its shape."""
    check_array(function, name, x)
    return check_shape(function, name, x, **dims)


def same_dtype(function: str, **arrays: ArrayLike) -> None:
    """Refuses arrays of different dtypes."""
    (first, x), *others = arrays.items()
    for name, other in others:
        if other.dtype != x.dtype:
            raise TypeError(
                f"{function}: `{name}` has dtype {other.dtype}, expected {x.dtype}, the dtype of `{first}`."
            )


def index(function: str, name: str, x: Any, **dims: int | None) -> Array | None:
    """Checks an integer array, or None; returns it as int32, saturated."""
    return None if x is None else needed_index(function, name, x, **dims)


def needed_index(function: str, name: str, x: Any, **dims: int | None) -> Array:
    """The same for an array that must be given."""
    check_array(function, name, x, "integers")
    check_shape(function, name, x, **dims)
    return narrow(x)


def flags(function: str, name: str, x: Any, n: int) -> Array | None:
    """Checks a bool array `[N]`, or None."""
    if x is None:
        return None
    check_array(function, name, x, "bool")
    check_shape(function, name, x, num_sequences=n)
    return jnp.asarray(x)


def starts(function: str, query_start_loc: Any) -> tuple[Array, int]:
    """Checks `query_start_loc` `[N + 1]`; returns it as int32, and N."""
    check_array(function, "query_start_loc", query_start_loc, "integers")
    if query_start_loc.ndim != 1 or query_start_loc.shape[0] == 0:
        raise ValueError(
            f"{function}: `query_start_loc` has shape {describe(query_start_loc.shape)}, expected (num_sequences + 1,)."
        )
    return narrow(query_start_loc), query_start_loc.shape[0] - 1


def layer_index(function: str, layer: Any, num_layers: int) -> Array | None:
    """Checks `layer` against the leading axis of a stacked state; returns it as an int32 scalar, or None."""
    if layer is None:
        return None
    if isinstance(layer, bool | np.bool_) or not isinstance(layer, int | np.integer | np.ndarray | Array):
        raise TypeError(
            f"{function}: `layer` is {layer!r} of type {type(layer).__name__}, expected an int or an int32 scalar."
        )
    if isinstance(layer, np.ndarray | Array):
        check_array(function, "layer", layer, "integers")
        check_shape(function, "layer", layer)
    if isinstance(layer, Array):
        return narrow(layer)
    if not 0 <= layer < num_layers:
        raise ValueError(f"{function}: `layer` is {layer}, expected 0 <= layer < num_layers={num_layers}.")
    return jnp.int32(layer)


def pool(function: str, name: str, x: Any, layer: Any, **dims: int | None) -> Array | None:
    """Checks a pool, with a leading axis `L` where `layer` is given; returns the checked `layer`."""
    if layer is None:
        floats(function, name, x, **dims)
        return None
    return layer_index(function, layer, floats(function, name, x, num_layers=None, **dims)[0])


def own_rows(function: str, state_indices: Any, n: int, num_slots: int, pool: str) -> None:
    """`state_indices=None` gives sequence n row n: refuses more sequences than rows."""
    if state_indices is None and n > num_slots:
        raise ValueError(
            f"{function}: `state_indices` is None with {n} sequences, expected at most num_slots={num_slots} of `{pool}`."
        )


def refuse(function: str, why: str, **arguments: Any) -> None:
    """Refuses arguments that are given although `why` says that they can't be."""
    for name, x in arguments.items():
        if x is not None:
            raise ValueError(f"{function}: `{name}` is given, expected None {why}.")


def activation(function: str, value: Any) -> None:
    if value not in ACTIVATIONS:
        raise ValueError(f"{function}: `activation` is {value!r}, expected one of {ACTIVATIONS}.")


def flag(function: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{function}: `{name}` is {value!r} of type {type(value).__name__}, expected a bool.")
    return bool(value)


def number(function: str, name: str, value: Any) -> Array:
    """Checks a real number, or a scalar array; returns it as a float32 scalar.

    A Python number that was traced is a number still: with x64 on it is a weak float64 inside `jit`.
    """
    if getattr(value, "weak_type", False) and value.ndim == 0 and value.dtype.kind in "if":
        pass
    elif isinstance(value, Array | np.ndarray):
        check_array(function, name, value)
        check_shape(function, name, value)
    elif isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{function}: `{name}` is {value!r} of type {type(value).__name__}, expected a number.")
    return jnp.asarray(value, jnp.float32)


def size(function: str, name: str, value: Any, least: int) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{function}: `{name}` is {value!r} of type {type(value).__name__}, expected an int.")
    if value < least:
        raise ValueError(f"{function}: `{name}` is {value}, expected at least {least}.")
    return int(value)


def is_type(function: str, name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{function}: `{name}` is of type {type(value).__name__}, expected {kind.__name__}.")


def state(function: str, state: GDNState, config: GDNConfig, stacked: bool) -> None:
    """Checks both pools against `config` and each other."""
    stack: Dims = {"num_layers": None} if stacked else {}
    conv = floats(
        function,
        "state.conv",
        state.conv,
        **stack,
        num_slots=None,
        conv_dim=config.conv_dim,
        conv_state_len=config.conv_state_len,
    )
    if stacked:
        stack = {"num_layers": conv[0]}
    rows = {f"num_slots * {config.mtp_step + 1}": conv[-3] * (config.mtp_step + 1)}
    heads = {"num_v_heads": config.tp_num_v_heads, "head_k_dim": config.head_k_dim, "head_v_dim": config.head_v_dim}
    floats(function, "state.ssm", state.ssm, **stack, **rows, **heads)


def layer_arguments(
    function: str, weights: Any, given_state: Any, mixed_qkvzba: Any, config: Any, layer: Any, norm_weight: Any
) -> tuple[GDNWeights, GDNState]:
    """Checks what the layer functions share against `config`; returns weights and state as JAX arrays."""
    is_type(function, "config", config, GDNConfig)
    is_type(function, "weights", weights, GDNWeights)
    is_type(function, "state", given_state, GDNState)
    c: GDNConfig = config
    floats(function, "mixed_qkvzba", mixed_qkvzba, num_tokens=None, channels=c.qkvz_dim + c.ba_dim)
    floats(function, "weights.conv_weight", weights.conv_weight, conv_dim=c.conv_dim, conv_kernel_dim=c.conv_kernel_dim)
    if weights.conv_bias is not None:
        floats(function, "weights.conv_bias", weights.conv_bias, conv_dim=c.conv_dim)
    floats(function, "weights.A_log", weights.A_log, num_v_heads=c.tp_num_v_heads)
    floats(function, "weights.dt_bias", weights.dt_bias, num_v_heads=c.tp_num_v_heads)
    state(function, given_state, c, layer is not None)
    if norm_weight is not None:
        floats(function, "norm_weight", norm_weight, head_v_dim=c.head_v_dim)
    return jax.tree.map(jnp.asarray, weights), jax.tree.map(jnp.asarray, given_state)


def check_batch(
    *,
    num_slots: int,
    num_tokens: int,
    state_indices: ArrayLike,
    query_start_loc: ArrayLike | None = None,
    initial_state_indices: ArrayLike | None = None,
    has_initial_state: ArrayLike | None = None,
    num_accepted_tokens: ArrayLike | None = None,
    mtp_step: int = 0,
    verify: bool = False,
) -> None:
    """Checks the values of a batch on the host: starts, slots, lengths and accepted counts. It reads device arrays back.

    Padding (a negative slot) and empty sequences are checked for nothing but their starts.

    Args:
        num_slots: request slots of the pool (rows of the conv pool).
        num_tokens: `T`, the tokens of the packed batch.
        state_indices: integer `[N]`, the slots; negative: padding.
        query_start_loc: integer `[N + 1]`; None: sequences of equal length (`verify`: `mtp_step + 1` each).
        initial_state_indices: integer `[N]`, the slots to start from; outside the pool: no initial state.
        has_initial_state: bool `[N]`.
        num_accepted_tokens: integer `[N]`, each in `[1, mtp_step + 1]` where it is looked at.
        mtp_step: `S`.
        verify: whether the batch is a verify step, whose sequences have at most `mtp_step + 1` tokens.

    Raises:
        ValueError: names the first offending index and its value.
        TypeError: an array of the wrong dtype.

    Example:
        >>> check_batch(num_slots=4, num_tokens=5, state_indices=np.array([2, -1, 0]), query_start_loc=np.array([0, 2, 2, 5]))
    """
    this = "check_batch"
    num_slots, num_tokens = size(this, "num_slots", num_slots, 0), size(this, "num_tokens", num_tokens, 0)
    longest = size(this, "mtp_step", mtp_step, 0) + 1
    check_array(this, "state_indices", state_indices, "integers")
    (n,) = check_shape(this, "state_indices", state_indices, num_sequences=None)
    for name, x in dict(initial_state_indices=initial_state_indices, num_accepted_tokens=num_accepted_tokens).items():
        if x is not None:
            check_array(this, name, x, "integers")
            check_shape(this, name, x, num_sequences=n)
    flags(this, "has_initial_state", has_initial_state, n)

    def fail(name: str, i: int | None, value: Any, expected: str) -> ValueError:
        place = name if i is None else f"{name}[{i}]"
        return ValueError(f"{this}: `{place}` is {value}, expected {expected}.")

    if query_start_loc is not None:
        check_array(this, "query_start_loc", query_start_loc, "integers")
        check_shape(this, "query_start_loc", query_start_loc, **{"num_sequences + 1": n + 1})
        bounds = [int(x) for x in np.asarray(query_start_loc)]
        previous = 0
        for i, x in enumerate(bounds):
            if i == 0 and x != 0:
                raise fail("query_start_loc", i, x, "0, the first start")
            if x < previous:
                raise fail("query_start_loc", i, x, f"at least {previous}, the start before it")
            if x > num_tokens:
                raise fail("query_start_loc", i, x, f"at most num_tokens={num_tokens}")
            previous = x
    else:
        each = longest if verify else num_tokens // max(n, 1)
        if verify and num_tokens != n * each:
            raise fail(
                "num_tokens", None, num_tokens, f"{n * each}, {each} for each of {n} sequences without query_start_loc"
            )
        bounds = [i * each for i in range(n + 1)]
    lengths = np.diff(bounds)

    slots = [int(x) for x in np.asarray(state_indices)]
    sources = slots if initial_state_indices is None else [int(x) for x in np.asarray(initial_state_indices)]
    has = [True] * n if has_initial_state is None else [bool(x) for x in np.asarray(has_initial_state)]
    counts = None if num_accepted_tokens is None else [int(x) for x in np.asarray(num_accepted_tokens)]
    live = [i for i in range(n) if slots[i] >= 0 and lengths[i] > 0]
    writers: dict[int, int] = {}
    for i in live:
        if slots[i] >= num_slots:
            raise fail("state_indices", i, slots[i], f"less than num_slots={num_slots}")
        if slots[i] in writers:
            raise fail("state_indices", i, slots[i], f"a slot of its own; sequence {writers[slots[i]]} has it too")
        writers[slots[i]] = i
        if verify and lengths[i] > longest:
            raise ValueError(
                f"{this}: sequence {i} has {lengths[i]} tokens (`query_start_loc[{i + 1}]` is {bounds[i + 1]}), "
                f"expected at most mtp_step + 1 = {longest}."
            )
        if counts is not None and has[i] and not 1 <= counts[i] <= longest:
            raise fail("num_accepted_tokens", i, counts[i], f"1 to mtp_step + 1 = {longest}")
    for i in live:
        other = writers.get(sources[i], i) if has[i] else i
        if other != i:
            raise fail(
                "initial_state_indices", i, sources[i], f"a slot that no other sequence writes; sequence {other} does"
            )


class _Writers(NamedTuple):
    """What the sequences of a batch write: the slots in order, who writes each, and whether one has two writers."""

    slots: Array
    sequence: Array
    clash: Array


def _writers(written: Array) -> _Writers:
    """Of `[N]` or `[N, S + 1]` slots, negative ones for none. A sequence may write a slot more than once."""
    n = written.shape[0]
    sequence = jnp.repeat(jnp.arange(n, dtype=jnp.int32), written.size // n)
    slots, sequence = jax.lax.sort((written.ravel(), sequence), num_keys=1)  # stable: those of one slot stay in order
    twice = (slots[1:] == slots[:-1]) & (sequence[1:] != sequence[:-1]) & (slots[1:] >= 0)
    return _Writers(slots, sequence, jnp.any(twice))


def _written_by_another(writers: _Writers, read: Array) -> Array:
    """Bool `[N]`: whether another sequence writes the slot that a sequence reads (`read` `[N]`, negative for none)."""
    slots, sequence, _ = writers
    first = jnp.minimum(jnp.searchsorted(slots, read), slots.size - 1)
    last = jnp.searchsorted(slots, read, side="right") - 1
    reader = jnp.arange(read.size, dtype=jnp.int32)
    return (read >= 0) & (slots[first] == read) & ((sequence[first] != reader) | (sequence[last] != reader))


def debug_check(
    function: str,
    *,
    num_slots: int,
    num_tokens: int,
    state_indices: Array | None = None,
    query_start_loc: Array | None = None,
    initial_state_indices: Array | None = None,
    has_initial_state: Array | None = None,
    num_accepted_tokens: Array | None = None,
    max_accepted: int = 1,
    max_length: int | None = None,
    writes: bool = True,
    slots_name: str = "state_indices",
) -> None:
    """The rules of `check_batch` on traced values, as `checkify` debug checks: they cost nothing unless checkified."""
    n = query_start_loc.shape[0] - 1 if query_start_loc is not None else num_tokens
    if state_indices is not None:
        n = state_indices.shape[0]
    if query_start_loc is not None:
        lengths = jnp.diff(query_start_loc)
        fits = (query_start_loc[0] == 0) & jnp.all(lengths >= 0) & (query_start_loc[-1] <= num_tokens)
        message = (
            function + ": `query_start_loc` is {x}, expected starts from 0 that never decrease, at most num_tokens={t}."
        )
        checkify.debug_check(fits, message, x=query_start_loc, t=jnp.int32(num_tokens))
    else:
        lengths = jnp.full(n, max_length or 1, jnp.int32)
    slots = slots_of(state_indices, n)
    has = jnp.ones(n, bool) if has_initial_state is None else has_initial_state
    live = (slots >= 0) & (lengths > 0)

    def each(ok: Array, name: str, values: Array, expected: str) -> None:
        message = f"{function}: `{name}` is {{x}}, expected {expected}."
        checkify.debug_check(jnp.all(ok | ~live), message, x=values)

    each(slots < num_slots, slots_name, slots, f"less than num_slots={num_slots}")
    if state_indices is not None and n and writes:
        writers = _writers(where_inside(slots, num_slots, live))
        message = f"{function}: `state_indices` is {{x}}, expected no slot twice."
        checkify.debug_check(~writers.clash, message, x=slots)
        if initial_state_indices is not None:
            foreign = _written_by_another(writers, where_inside(initial_state_indices, num_slots, has))
            each(~foreign, "initial_state_indices", initial_state_indices, "no slot that another sequence writes")
    if max_length is not None:
        each(lengths <= max_length, "query_start_loc", lengths, f"at most {max_length} tokens a sequence")
    if num_accepted_tokens is not None:
        fine = ~has | ((num_accepted_tokens >= 1) & (num_accepted_tokens <= max_accepted))
        each(fine, "num_accepted_tokens", num_accepted_tokens, f"1 to {max_accepted}")


def debug_check_verify(
    function: str,
    *,
    num_slots: int,
    num_tokens: int,
    read_indices: Array,
    write_indices: Array,
    num_accepted_tokens: Array,
    query_start_loc: Array,
) -> None:
    """The same for `mtp_gated_delta_rule`, whose slots stand in two tables `[N, S + 1]`."""
    n, longest = read_indices.shape
    if n == 0:
        return
    read = accepted_slots(read_indices, num_accepted_tokens)
    debug_check(
        function,
        num_slots=num_slots,
        num_tokens=num_tokens,
        state_indices=read,
        query_start_loc=query_start_loc,
        num_accepted_tokens=num_accepted_tokens,
        max_accepted=longest,
        max_length=longest,
        writes=False,
        slots_name="read_indices",
    )
    lengths = jnp.diff(query_start_loc)
    live = (lengths > 0) & (lengths <= longest) & inside(num_accepted_tokens - 1, longest)
    used = (jnp.arange(longest) < lengths[:, None]) & (live & inside(read, num_slots))[:, None]
    writers = _writers(where_inside(write_indices, num_slots, used))
    message = f"{function}: `write_indices` is {{x}}, expected no slot that two sequences write."
    checkify.debug_check(~writers.clash, message, x=write_indices)
    foreign = _written_by_another(writers, where_inside(read, num_slots, live))
    message = f"{function}: `read_indices` is {{x}}, expected no slot that another sequence writes."
    checkify.debug_check(~jnp.any(foreign), message, x=read)
