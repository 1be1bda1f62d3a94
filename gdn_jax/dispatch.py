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
MAX_WIDTH = 8  # of the conv kernel
CHANNELS = 128  # of one CTA of the conv kernel
MAX_V_HEADS = 1024  # of the gating kernel

OPERATORS = (
    "gdn_gating",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "recurrent_gated_delta_rule",
    "mtp_gated_delta_rule",
    "gated_rms_norm",
    "gdn_prefill",
    "gdn_decode",
    "gdn_mtp_decode",
)


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


def _first_empty(**arrays: Any) -> str | None:
    """Which of the arrays that are given is empty."""
    return next((f"`{name}` is empty" for name, x in arrays.items() if x is not None and 0 in x.shape), None)


def _rule_limits(
    q: Any = None, v: Any = None, ssm_state: Any = None, num_accepted_tokens: Any = None, **_: Any
) -> str | None:
    """What keeps a call of the rule from the recurrent kernels, as far as the arguments are given."""
    dims = {f"`{name}` has": x.shape[-1] for name, x in dict(q=q, v=v).items() if x is not None}
    heads = (v.shape[-2], q.shape[-2]) if q is not None and v is not None else ()
    empty = _first_empty(v=v, ssm_state=ssm_state, num_accepted_tokens=num_accepted_tokens)
    return _head_limits(dims, *heads) or empty


def _chunk_limits(q: Any = None, v: Any = None, ssm_state: Any = None, query_start_loc: Any = None, **_: Any) -> str | None:
    """The same for `chunk_gated_delta_rule`."""
    if _capability() >= 10:
        return f"its kernel needs the products of compute capability 9 (Hopper), and this device has {_capability()}"
    if v is not None and v.dtype.itemsize != 2:
        return f"its kernel takes bfloat16 and float16, float32 keeps its own products, and `v` has {v.dtype}"
    dims = {f"`{name}` has": x.shape[-1] for name, x in dict(q=q, v=v).items() if x is not None}
    heads = (v.shape[-2], q.shape[-2]) if q is not None and v is not None else ()
    if query_start_loc is not None and query_start_loc.shape[0] < 2:
        return "`query_start_loc` has no sequence"
    return _head_limits(dims, *(heads or (0, 0)), known=CHUNK_DIMS) or _first_empty(v=v, ssm_state=ssm_state)


def _layer_limits(
    config: Any = None, state: Any = None, mixed_qkvzba: Any = None, num_accepted_tokens: Any = None, **_: Any
) -> str | None:
    """The same for `gdn_decode` and `gdn_mtp_decode`, and the kernel of one launch."""
    if isinstance(config, GDNConfig):
        dims = {f"{name} is": getattr(config, name) for name in ("head_k_dim", "head_v_dim")}
        if (why := _head_limits(dims, config.num_v_heads, config.num_k_heads)) is not None:
            return why
        if config.head_k_dim * config.head_v_dim > MAX_HEAD_STATE:
            return f"its kernel takes states of up to {MAX_HEAD_STATE} elements a head"
        if config.mtp_step > MAX_MTP_STEP:
            return f"its kernel takes mtp_step up to {MAX_MTP_STEP}, and it is {config.mtp_step}"
    pools = dict(zip(("state.conv", "state.ssm"), state)) if isinstance(state, GDNState) else {}
    return _first_empty(mixed_qkvzba=mixed_qkvzba, num_accepted_tokens=num_accepted_tokens, **pools)


def _conv_limits(
    x: Any = None, weight: Any = None, conv_state: Any = None, query_start_loc: Any = None, **_: Any
) -> str | None:
    """The same for `causal_conv1d_update`."""
    if x is not None and x.shape[-1] % CHANNELS:
        return f"its kernel takes a multiple of {CHANNELS} channels, and `x` has {x.shape[-1]}"
    if weight is not None and (width := weight.shape[-1]) > MAX_WIDTH:
        return f"its kernel takes widths up to {MAX_WIDTH}, and `weight` has {width}"
    if query_start_loc is not None and query_start_loc.shape[0] < 2:
        return "`query_start_loc` has no sequence"
    if query_start_loc is not None and weight is not None and conv_state is not None:
        mtp_step = conv_state.shape[-1] - weight.shape[-1] + 1
        if mtp_step > MAX_MTP_STEP:
            return f"its kernel verifies up to {MAX_MTP_STEP} draft tokens, and `conv_state` has room for {mtp_step}"
    return _first_empty(x=x, conv_state=conv_state)


def _gating_limits(a: Any = None, **_: Any) -> str | None:
    """The same for `gdn_gating`."""
    if a is not None and a.ndim and a.shape[-1] > MAX_V_HEADS:
        return f"its kernel takes up to {MAX_V_HEADS} heads, and `a` has {a.shape[-1]}"
    return _first_empty(a=a)


def _norm_limits(o: Any = None, **_: Any) -> str | None:
    """The same for `gated_rms_norm`."""
    return _head_limits({} if o is None else {"`o` has": o.shape[-1]}) or _first_empty(o=o)


# What has a kernel, and what keeps a call from it: of the operator's own arguments, by name.
_LIMITS: dict[str, Callable[..., str | None]] = {
    "chunk_gated_delta_rule": _chunk_limits,
    "recurrent_gated_delta_rule": _rule_limits,
    "mtp_gated_delta_rule": _rule_limits,
    "gdn_decode": _layer_limits,
    "gdn_mtp_decode": _layer_limits,
    "causal_conv1d_update": _conv_limits,
    "gdn_gating": _gating_limits,
    "gated_rms_norm": _norm_limits,
}
_RULE, _LAYER = ("q", "k", "v", "g", "beta"), ("weights", "state", "mixed_qkvzba")
_POSITIONAL = dict(
    chunk_gated_delta_rule=_RULE,
    recurrent_gated_delta_rule=_RULE,
    mtp_gated_delta_rule=_RULE,
    gdn_decode=_LAYER,
    gdn_mtp_decode=_LAYER,
    causal_conv1d_update=("x", "weight", "bias"),
    gdn_gating=("A_log", "a", "b", "dt_bias"),
    gated_rms_norm=("o", "z", "weight"),
)


def _obstacle(operator: str, implementation: str, arguments: Mapping[str, Any]) -> str | None:
    """Why `implementation` cannot run `operator` on these arguments here; None where it can."""
    if implementation == "xla":
        return None
    if chip() is None:
        return "it needs an NVIDIA GPU, and the default device is none"
    if operator not in _LIMITS:
        return f"there is no Mosaic kernel for {operator} yet"
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
    named = dict(zip(_POSITIONAL.get(operator, ()), args)) | kwargs
    chosen = choose(operator, None, named)
    others = {name: _obstacle(operator, name, named) for name in IMPLEMENTATIONS if name != chosen}
    return Explanation(chosen, {name: why or f"{chosen} comes first" for name, why in others.items()})
