"""Which implementation of an operator runs here, and why."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

IMPLEMENTATIONS = ("mosaic", "xla")  # in the order of preference; "xla" runs anywhere

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


def chip() -> str | None:
    """The CUDA chip to compile for: that of the abstract mesh if one is set, else the default device, else None."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device or jax.devices()[0]
    kind = getattr(device, "device_kind", "")
    return kind if "NVIDIA" in kind.upper() else None


def _obstacle(operator: str, implementation: str) -> str | None:
    """Why `implementation` cannot run `operator` here; None where it can."""
    if implementation == "xla":
        return None
    if chip() is None:
        return "it needs an NVIDIA GPU, and the default device is none"
    return f"there is no Mosaic kernel for {operator} yet"


def choose(operator: str, implementation: str | None) -> str:
    """The name of the implementation to run: the one asked for, or the first that can.

    Raises:
        ValueError: a name that does not exist, or that cannot run here.
    """
    if implementation is None:
        return next(name for name in IMPLEMENTATIONS if _obstacle(operator, name) is None)
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(f"'{name}'" for name in sorted(IMPLEMENTATIONS, reverse=True))
        raise ValueError(f"{operator}: `implementation` is {implementation!r}, expected None, {names}.")
    if (why := _obstacle(operator, implementation)) is not None:
        raise ValueError(f"{operator}: `implementation` is {implementation!r}, which cannot run here: {why}.")
    return implementation


def explain(op: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation `op(*args, **kwargs)` would run, and why not the others. Nothing is computed.

    Args:
        op: an operator or layer function of gdn_jax, or its name.
        args: the positional arguments of the call. No reason depends on them yet.
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
    chosen = choose(operator, None)
    others = {name: _obstacle(operator, name) for name in IMPLEMENTATIONS if name != chosen}
    return Explanation(chosen, {name: why or f"{chosen} comes first" for name, why in others.items()})
