"""Which implementation of an operator runs here, and why."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from gdn_jax.types import GDNConfig, GDNState

IMPLEMENTATIONS = ("mosaic", "xla")  # in the order of preference; "xla" runs anywhere

KERNEL_DIMS = (64, 128, 256)  # K and V of the recurrent kernels
CHUNK_DIMS = (64, 128)  # K and V of the chunk kernels
MAX_HEAD_STATE = 128 * 256  # K * V of the decode kernel: what the registers of one CTA hold
MAX_MTP_STEP = 7  # of the decode kernel and the conv kernel
MAX_WIDTH = 8  # of the conv kernels
CHANNELS = 128  # of one CTA of the conv kernels
MAX_V_HEADS = 1024  # of the gating kernel


class Explanation(NamedTuple):
    """What `explain` answers; printed, it reads as a sentence.

    Attributes:
        implementation: the name that `implementation=None` chooses.
        passed_over: the other names, each with the reason.
    """

    implementation: str
    passed_over: dict[str, str]

    def __str__(self) -> str:
        others = "".join(f"; {name} is passed over: {why}" for name, why in self.passed_over.items())
        return f"{self.implementation} runs{others}."


def _device() -> Any:
    return jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device or jax.devices()[0]


def chip() -> str | None:
    """The CUDA chip to compile for: that of the abstract mesh if one is set, else the default device, else None."""
    kind = getattr(_device(), "device_kind", "")
    return kind if "NVIDIA" in kind.upper() else None


def _capability() -> float:
    """The chip's compute capability; of an abstract device, which does not tell, what the kernels need."""
    return float(getattr(_device(), "compute_capability", 9.0))


def _head_limits(
    dims: Mapping[str, int], num_v_heads: int = 0, num_k_heads: int = 0, known: tuple[int, ...] = KERNEL_DIMS
) -> str | None:
    """What no kernel takes; `dims` by the words that come before a size."""
    for told, size in dims.items():
        if size not in known:
            return f"its kernel takes head dimensions of {', '.join(map(str, known))}, and {told} {size}"
    if num_v_heads > 8 * num_k_heads:
        return f"its kernel takes up to 8 value heads a key head, and there are {num_v_heads // num_k_heads}"
    return None


def _config_limits(config: GDNConfig, known: tuple[int, ...]) -> str | None:
    """`_head_limits` of a layer."""
    dims = {f"{name} is": getattr(config, name) for name in ("head_k_dim", "head_v_dim")}
    return _head_limits(dims, config.num_v_heads, config.num_k_heads, known)


def _window_limits(channels: Mapping[str, int], widths: Mapping[str, int]) -> str | None:
    """What no conv kernel takes, likewise by words."""
    for told, size in channels.items():
        if size % CHANNELS:
            return f"its kernel takes a multiple of {CHANNELS} channels, and {told} {size}"
    for told, width in widths.items():
        if width > MAX_WIDTH:
            return f"its kernel takes widths up to {MAX_WIDTH}, and {told} {width}"
    return None


def _products_limits(told: str, tokens: Any) -> str | None:
    """What the products of the chunk kernels do not take."""
    if _capability() >= 10:
        return f"its kernel needs the products of compute capability 9 (Hopper), and this device has {_capability()}"
    if tokens is not None and tokens.dtype.itemsize != 2:
        return f"its kernel takes bfloat16 and float16, float32 keeps its own products, and {told} {tokens.dtype}"
    return None


def _first_empty(query_start_loc: Any = None, state: Any = None, **arrays: Any) -> str | None:
    """Which of the arrays that are given is empty; of the starts, whether they are those of no sequence."""
    if query_start_loc is not None and query_start_loc.shape[0] < 2:
        return "`query_start_loc` has no sequence"
    if isinstance(state, GDNState):
        arrays |= {"state.conv": state.conv, "state.ssm": state.ssm}
    return next((f"`{name}` is empty" for name, x in arrays.items() if x is not None and 0 in x.shape), None)


def _rule_limits(
    q: Any = None, v: Any = None, ssm_state: Any = None, num_accepted_tokens: Any = None, **_: Any
) -> str | None:
    """What keeps a call of the rule from the recurrent kernels, as far as the arguments are given."""
    dims = {f"`{name}` has": x.shape[-1] for name, x in dict(q=q, v=v).items() if x is not None}
    heads = (v.shape[-2], q.shape[-2]) if q is not None and v is not None else ()
    empty = _first_empty(v=v, ssm_state=ssm_state, num_accepted_tokens=num_accepted_tokens)
    return _head_limits(dims, *heads) or empty


def _chunk_limits(
    q: Any = None, v: Any = None, ssm_state: Any = None, query_start_loc: Any = None, **_: Any
) -> str | None:
    """The same for `chunk_gated_delta_rule`."""
    dims = {f"`{name}` has": x.shape[-1] for name, x in dict(q=q, v=v).items() if x is not None}
    heads = (v.shape[-2], q.shape[-2]) if q is not None and v is not None else (0, 0)
    why = _products_limits("`v` has", v) or _head_limits(dims, *heads, known=CHUNK_DIMS)
    return why or _first_empty(query_start_loc, v=v, ssm_state=ssm_state)


def _prefill_limits(
    config: Any = None, state: Any = None, mixed_qkvzba: Any = None, query_start_loc: Any = None, **_: Any
) -> str | None:
    """The same for `gdn_prefill`: the limits of its conv, and of the chunk kernels on that."""
    why = _products_limits("`mixed_qkvzba` has", mixed_qkvzba)
    if isinstance(config, GDNConfig):
        channels, widths = {"conv_dim is": config.conv_dim}, {"conv_kernel_dim is": config.conv_kernel_dim}
        why = why or _config_limits(config, CHUNK_DIMS) or _window_limits(channels, widths)
    return why or _first_empty(query_start_loc, state, mixed_qkvzba=mixed_qkvzba)


def _layer_limits(
    config: Any = None, state: Any = None, mixed_qkvzba: Any = None, num_accepted_tokens: Any = None, **_: Any
) -> str | None:
    """The same for `gdn_decode` and `gdn_mtp_decode`, and the kernel of one launch."""
    if isinstance(config, GDNConfig):
        if (why := _config_limits(config, KERNEL_DIMS)) is not None:
            return why
        if config.head_k_dim * config.head_v_dim > MAX_HEAD_STATE:
            return f"its kernel takes states of up to {MAX_HEAD_STATE} elements a head"
        if config.mtp_step > MAX_MTP_STEP:
            return f"its kernel takes mtp_step up to {MAX_MTP_STEP}, and it is {config.mtp_step}"
    return _first_empty(state=state, mixed_qkvzba=mixed_qkvzba, num_accepted_tokens=num_accepted_tokens)


def _conv_limits(
    x: Any = None, weight: Any = None, conv_state: Any = None, query_start_loc: Any = None, **_: Any
) -> str | None:
    """The same for `causal_conv1d`."""
    channels, widths = (
        {f"`{name}` has": array.shape[-1]} if array is not None else {}
        for name, array in dict(x=x, weight=weight).items()
    )
    return _window_limits(channels, widths) or _first_empty(query_start_loc, x=x, conv_state=conv_state)


def _conv_update_limits(
    weight: Any = None, conv_state: Any = None, query_start_loc: Any = None, **others: Any
) -> str | None:
    """The same for `causal_conv1d_update`."""
    why = _conv_limits(weight=weight, conv_state=conv_state, query_start_loc=query_start_loc, **others)
    if why is None and query_start_loc is not None and weight is not None and conv_state is not None:
        mtp_step = conv_state.shape[-1] - weight.shape[-1] + 1
        if mtp_step > MAX_MTP_STEP:
            return f"its kernel verifies up to {MAX_MTP_STEP} draft tokens, and `conv_state` has room for {mtp_step}"
    return why


def _gating_limits(a: Any = None, **_: Any) -> str | None:
    """The same for `gdn_gating`."""
    if a is not None and a.ndim and a.shape[-1] > MAX_V_HEADS:
        return f"its kernel takes up to {MAX_V_HEADS} heads, and `a` has {a.shape[-1]}"
    return _first_empty(a=a)


def _norm_limits(o: Any = None, **_: Any) -> str | None:
    """The same for `gated_rms_norm`."""
    return _head_limits({} if o is None else {"`o` has": o.shape[-1]}) or _first_empty(o=o)


# What keeps a call from the kernel: of the operator's own arguments, by name.
_LIMITS: dict[str, Callable[..., str | None]] = {
    "gdn_gating": _gating_limits,
    "causal_conv1d": _conv_limits,
    "causal_conv1d_update": _conv_update_limits,
    "chunk_gated_delta_rule": _chunk_limits,
    "recurrent_gated_delta_rule": _rule_limits,
    "mtp_gated_delta_rule": _rule_limits,
    "gated_rms_norm": _norm_limits,
    "gdn_prefill": _prefill_limits,
    "gdn_decode": _layer_limits,
    "gdn_mtp_decode": _layer_limits,
}
OPERATORS = tuple(_LIMITS)
_RULE, _CONV, _LAYER = ("q", "k", "v", "g", "beta"), ("x", "weight", "bias"), ("weights", "state", "mixed_qkvzba")
_POSITIONAL = dict(
    chunk_gated_delta_rule=_RULE,
    recurrent_gated_delta_rule=_RULE,
    mtp_gated_delta_rule=_RULE,
    gdn_prefill=_LAYER,
    gdn_decode=_LAYER,
    gdn_mtp_decode=_LAYER,
    causal_conv1d=_CONV,
    causal_conv1d_update=_CONV,
    gdn_gating=("A_log", "a", "b", "dt_bias"),
    gated_rms_norm=("o", "z", "weight"),
)


def _obstacle(operator: str, implementation: str, arguments: Mapping[str, Any]) -> str | None:
    """Why `implementation` cannot run `operator` on these arguments here; None where it can."""
    if implementation == "xla":
        return None
    if chip() is None:
        return "it needs an NVIDIA GPU, and the default device is none"
    if (capability := _capability()) < 9:
        return f"its kernel needs compute capability 9.0 (Hopper), and this device has {capability}"
    known = {name: x for name, x in arguments.items() if isinstance(x, GDNConfig | GDNState) or hasattr(x, "shape")}
    return _LIMITS[operator](**known)


def choose(operator: str, implementation: str | None, arguments: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The name of the implementation to run on `arguments` (by name): the one asked for, or the first that can.

    Raises:
        ValueError: a name that does not exist, or that cannot run here.
    """
    if implementation is None:
        return next(name for name in IMPLEMENTATIONS if _obstacle(operator, name, arguments) is None)
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(f"'{name}'" for name in sorted(IMPLEMENTATIONS, reverse=True))
        raise ValueError(f"{operator}: `implementation` is {implementation!r}, expected None, {names}.")
    if (why := _obstacle(operator, implementation, arguments)) is not None:
        raise ValueError(f"{operator}: `implementation` is {implementation!r}, which cannot run here: {why}.")
    return implementation


def run(
    implementation: str, name: str, plain: Callable[..., Any], *args: Any, forward: bool = False, **static: Any
) -> Any:
    """`plain(*args)`, the XLA form, or the kernel `gdn_jax.mosaic.<name>.<name>(*args, **static)`, as `choose` has chosen.

    `forward`, which a kernel without a pool can have: forward-mode derivatives too.
    """
    if implementation == "xla":
        return plain(*args)
    from gdn_jax import mosaic  # only where it is needed: Pallas takes a second to import

    kernel = getattr(getattr(mosaic, name), name)
    return mosaic.common.beside_xla(functools.partial(kernel, **static), plain, *args, forward=forward)


def explain(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation `op(*args, **kwargs)` would run, and why not the others. Nothing is computed.

    Args:
        op: an operator or layer function of gdn_jax, or its name.
        args: the positional arguments of the call; sizes and dtypes are looked at, as far as they are given.
        kwargs: its keyword arguments, likewise.

    Returns:
        `Explanation(implementation, passed_over)`.

    Raises:
        ValueError: an `op` that is not one of gdn_jax.

    Example:
        >>> import gdn_jax
        >>> gdn_jax.explain("gdn_decode").implementation
        'xla'
    """
    operator = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if operator not in OPERATORS:
        raise ValueError(f"explain: `op` is {operator!r}, expected one of {', '.join(OPERATORS)}.")
    named = dict(zip(_POSITIONAL[operator], args)) | kwargs
    chosen = choose(operator, None, named)
    others = {name: _obstacle(operator, name, named) for name in IMPLEMENTATIONS if name != chosen}
    return Explanation(chosen, {name: why or f"{chosen} comes first" for name, why in others.items()})
