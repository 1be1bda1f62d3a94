"""One array between PyTorch and JAX: `to_jax`, `to_torch`, and the table of what each kind of torch tensor does.

`TABLE` has one row a kind, with the action for an argument and for a cache; `examine` applies it. `InPlace` uses the
same two. JAX's own import is looked at only after that: it narrows int64 silently, also with `copy=False`.
"""

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue] (what `jax.dlpack` calls: no public name)
from torch import Tensor, to_dlpack
from torch.nn.parameter import is_lazy

_CPU, _CUDA = 1, 2  # DLPack's names for devices
_LEGACY_STREAM = 1  # how DLPack calls CUDA's default stream, whose handle is 0

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep

DTYPES: dict[torch.dtype, np.dtype] = {
    getattr(torch, name): jax.numpy.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
"""Every dtype that both libraries have."""

TORCH_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}
_NARROW = {torch.int64: torch.int32, torch.uint64: torch.uint32}
_WIDE_FLOATS = (torch.float64, torch.complex128)
_ORDINARY = frozenset(DTYPES) - {*_NARROW, *_WIDE_FLOATS}
# numpy's DLPack import knows no bfloat16 and no float8: those travel as bits.
_BITS = {dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8 for dtype in DTYPES if DTYPES[dtype].kind == "V"}


class Layout(NamedTuple):
    """How a tensor lies in memory. Of a compact one `permute(axes)` is row-major, of this shape and these strides."""

    compact: bool
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    plain: bool  # the tensor itself is row-major, with just these strides
    overlaps: bool  # two elements may share memory: a stride is smaller than what lies inside it
    reach: int  # elements from the first to behind the last
    gap: str  # the innermost dimension with a wrong stride


@functools.lru_cache(4096)
def layout_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """The layout of a tensor. The strides of dimensions of size 1 do not count, and nothing does in an empty tensor.

    >>> layout_of((4, 6), (1, 4)).axes
    (1, 0)
    """
    wide = [d for d, size in enumerate(shape) if size > 1]
    order = wide if 0 in shape else sorted(wide, key=lambda d: -strides[d])
    axes = range(len(shape)) if order == wide else [d for d in range(len(shape)) if d not in wide] + order
    rows = tuple(shape[d] for d in axes)
    expected = tuple(math.prod(max(size, 1) for size in rows[i + 1 :]) for i in range(len(rows)))
    reach, overlaps, gap = 1, False, ""
    for d, want in () if 0 in shape else reversed([*zip(axes, expected)]):
        if shape[d] > 1:
            overlaps |= strides[d] < reach
            reach += (shape[d] - 1) * strides[d]
            if strides[d] != want and not gap:
                gap = f"dimension {d} has stride {strides[d]}, expected {want}"
    plain = strides == expected and order == wide
    return Layout(not gap, tuple(axes), rows, expected, plain, overlaps, 0 if 0 in shape else reach, gap)


NO_LAYOUT = Layout(False, (), (), (), False, False, 0, "")  # of a tensor without strides, which the table refuses


def _layout(t: Tensor) -> Layout:
    if type(t) is not Tensor and is_lazy(t):
        return NO_LAYOUT
    return layout_of(t.shape, t.stride()) if t.layout is torch.strided and not t.is_nested else NO_LAYOUT


def _needed_bytes(t: Tensor, at: Layout) -> int:
    """What the storage has to hold."""
    return int(t.storage_offset() + at.reach) * t.element_size()


def _dispatches(t: Tensor) -> bool:
    """Whether a subclass takes over torch's operators, as one that stands for other tensors does."""
    own, plain = (getattr(cls, "__torch_dispatch__", None) for cls in (type(t), Tensor))
    return own is not plain


def _is_wrapped(t: Tensor) -> bool:
    """Whether a transform stands between the tensor and its memory: functorch raises, functionalize answers 0."""
    try:
        return t.data_ptr() == 0 and t.numel() > 0 and t.untyped_storage().nbytes() > 0 and t.device.type != "meta"
    except RuntimeError:
        return True


def _is_dual(t: Tensor) -> bool:
    """Whether it carries a tangent of forward-mode differentiation."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None


Action = Literal["refuse", "copy", "detach", "narrow"]


class Row(NamedTuple):
    """One kind of tensor: its name, what an argument and a cache do, how it is known, what would be right instead."""

    label: str
    argument: Action
    cache: Action
    holds: Callable[[Tensor, Layout], bool]
    expected: Callable[[Tensor, Layout], str]


# The order matters: a row may rely on what the rows before it have refused.
# fmt: off
_ABOUT_MEMORY = (  # without any that torch could read, either
    Row("uninitialized: a lazy module's, without shape", "refuse", "refuse",
        lambda t, at: is_lazy(t),
        lambda t, at: "a tensor with memory: run the module once in torch"),
    Row("a tensor subclass with a storage of its own ({t.__class__.__name__})", "refuse", "refuse",
        lambda t, at: type(t) is not Tensor and _dispatches(t),
        lambda t, at: "a plain tensor (of a fake tensor none exists; a DTensor has `to_local()`)"),
    Row("sparse, nested or quantized (layout {t.layout}, dtype {t.dtype})", "refuse", "refuse",
        lambda t, at: t.layout is not torch.strided or t.is_nested or t.is_quantized,
        lambda t, at: "a dense tensor (`to_dense()`, `to_padded_tensor()`, `dequantize()`)"),
    Row("on device {t.device}", "refuse", "refuse",
        lambda t, at: not (t.is_cpu or t.is_cuda),
        lambda t, at: "one with memory on a CPU or a CUDA device"),
    Row("wrapped by a torch.func transform, or for other reasons without memory", "refuse", "refuse",
        lambda t, at: _is_wrapped(t),
        lambda t, at: "a plain tensor: make the call outside grad, vmap, jvp and functionalize"),
    Row("freed: its storage was resized below what it needs", "refuse", "refuse",
        lambda t, at: t.untyped_storage().nbytes() < _needed_bytes(t, at),
        lambda t, at: f"{_needed_bytes(t, at)} bytes, not {t.untyped_storage().nbytes()}"),
)
TABLE = (
    *_ABOUT_MEMORY,
    Row("a conjugate or negative view", "refuse", "refuse",
        lambda t, at: t.is_conj() or t.is_neg(),
        lambda t, at: "its values (`resolve_conj()`, `resolve_neg()`)"),
    Row("of dtype {t.dtype}", "refuse", "refuse",
        lambda t, at: t.dtype not in DTYPES,
        lambda t, at: "a dtype that JAX has too: " + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)),
    Row("of dtype {t.dtype} while jax_enable_x64 is off", "narrow", "refuse",
        lambda t, at: t.dtype in _NARROW and not jax.config.jax_enable_x64,
        lambda t, at: f"{_NARROW[t.dtype]}, or x64 on"),
    Row("of dtype {t.dtype} while jax_enable_x64 is off", "refuse", "refuse",
        lambda t, at: t.dtype in _WIDE_FLOATS and not jax.config.jax_enable_x64,
        lambda t, at: "at most 32 bits (complex: 64), or x64 on"),
    Row("part of an autograd graph (it requires grad)", "detach", "refuse",
        lambda t, at: t.requires_grad,
        lambda t, at: "a tensor without gradient (`detach()`): autograd does not see what JAX does"),
    Row("part of a forward-mode differentiation (it is dual)", "detach", "refuse",
        lambda t, at: _is_dual(t),
        lambda t, at: "a tensor without tangent (`detach()`): autograd does not see what JAX does"),
    Row("expanded or overlaps itself", "copy", "refuse",
        lambda t, at: at.overlaps,
        lambda t, at: f"one element a place ({at.gap}); allocate it with `contiguous()`"),
    Row("a slice with gaps", "copy", "refuse",
        lambda t, at: not at.compact,
        lambda t, at: f"compact memory ({at.gap}); pass the whole tensor and slice in JAX, or use `contiguous()`"),
    Row("not aligned as JAX needs", "copy", "copy",
        lambda t, at: t.data_ptr() % _alignment(t) != 0 and t.numel() > 0,
        lambda t, at: f"an address that is a multiple of {_alignment(t)}, not {t.data_ptr():#x}"),
)
# fmt: on


def _alignment(t: Tensor) -> int:
    """What XLA asks of a buffer's address: its CPU code is compiled for 64 bytes, its GPU code for 16."""
    return 64 if t.is_cpu else 16


def _address(t: Tensor, at: Layout) -> int:
    """Where a tensor begins for which no row of the table holds: nearly every one, and a call has many. Else 0."""
    ordinary = type(t) is Tensor and at.plain and t.dtype in _ORDINARY and (t.is_cuda or t.is_cpu)
    if not ordinary or t.requires_grad or t.is_conj() or t.is_neg() or forward_ad._current_level >= 0:
        return 0
    try:
        begin = t.data_ptr()
    except RuntimeError:  # wrapped
        return 0
    held = t.untyped_storage().nbytes() >= _needed_bytes(t, at)
    return begin if held and begin % _alignment(t) == 0 else 0


class Seen(NamedTuple):
    """A tensor that passed the table."""

    given: Tensor  # as it came
    base: Tensor  # what JAX imports: row-major, without graph; the given memory unless `copied`
    axes: tuple[int, ...]  # `base` is the tensor's `permute(axes)`
    begin: int  # the byte range of `given`
    end: int
    copied: str  # the label of the row that made a copy, or ""
    detached: str  # the label of the row that took it out of autograd, or ""


def examine(where: str, name: Callable[[], str], tensor: Tensor, *, cache: bool = False, copy: bool = True) -> Seen:
    """Applies `TABLE` to one tensor, of which errors say `where` and `name()`; `copy=False` refuses what would copy."""
    given, copied, detached = tensor, "", ""
    at = given_at = _layout(tensor)
    if begin := _address(tensor, at):
        return Seen(tensor, tensor, at.axes, begin, begin + at.reach * tensor.itemsize, "", "")
    for row in TABLE:
        if not row.holds(tensor, at):
            continue
        action = row.cache if cache else row.argument
        if action == "refuse" or (action != "detach" and not copy):
            raise _refusal(where, name(), row, tensor, at)
        if action == "detach":
            tensor, detached = tensor.detach(), row.label
            continue
        copied = row.label.format(t=tensor)
        if action == "narrow":
            tensor = _narrowed(where, name, tensor)
        else:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        at = _layout(tensor)
    base = tensor if at.plain else tensor.as_strided(at.shape, at.strides)
    if type(base) is not Tensor:
        base = base.detach().as_subclass(Tensor)
    begin = given.data_ptr()
    return Seen(given, base, at.axes, begin, begin + given_at.reach * given.element_size(), copied, detached)


def check_readable(where: str, name: str, value: Any) -> None:
    """Refuses what torch itself cannot read as a plain tensor, whatever JAX would say."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: `{name}` is of type {type(value).__name__}, expected a torch.Tensor.")
    at = _layout(value)
    for row in _ABOUT_MEMORY:
        if row.holds(value, at):
            raise _refusal(where, name, row, value, at)


def _refusal(where: str, name: str, row: Row, t: Tensor, at: Layout) -> ValueError:
    return ValueError(f"{where}: `{name}` is {row.label.format(t=t)}, expected {row.expected(t, at)}.")


def _narrowed(where: str, name: Callable[[], str], t: Tensor) -> Tensor:
    """64-bit integers as 32-bit ones, after a look at their values."""
    to = _NARROW[t.dtype]
    limits = torch.iinfo(to)
    # uint64 is compared as int64: what is beyond int64 turns negative there, and is out of range all the same.
    signed = t.view(torch.int64)
    wrong = signed[(signed < limits.min) | (signed > limits.max)]
    if wrong.numel():
        value = int(wrong[0]) % 2**64 if t.dtype is torch.uint64 else int(wrong[0])
        raise ValueError(
            f"{where}: `{name()}` holds {value}, expected values in [{limits.min}, {limits.max}]: jax_enable_x64 is "
            f"off, so {t.dtype} is narrowed to {to}."
        )
    return t.to(to)


def warn(where: str, seen: Sequence[tuple[Callable[[], str], Seen]]) -> None:
    """One warning, at the caller's line, for all that was copied or detached in a call."""
    notes = [f"`{name()}` is {s.copied}: copied" for name, s in seen if s.copied]
    notes += [f"`{name()}` is {s.detached}: detached" for name, s in seen if s.detached]
    if notes:
        warnings.warn(f"{where}: {'; '.join(notes)}.", UserWarning, skip_file_prefixes=(_HERE,))


_first_user: list[int] = []


def check_process(where: str) -> None:
    """Refuses a child that was forked after its parent had used interop: the runtimes' threads and locks are gone."""
    pid = os.getpid()
    if not _first_user:
        _first_user.append(pid)
    if _first_user[0] != pid:
        raise RuntimeError(
            f"{where}: process {pid} was forked after process {_first_user[0]} had used interop, expected a fresh "
            'process: JAX does not survive a fork. Use the start method "spawn" or "forkserver".'
        )


def check_modes(where: str) -> None:
    """Refuses a torch dispatch mode under which operators only seem to compute: fake tensors, tracing, functionalization.

    One that passes the operators on, as a profiler's does, is fine.
    """
    for i in range(torch._C._len_torch_dispatch_stack()):
        mode = torch._C._get_dispatch_stack_at(i)
        if getattr(mode, "_mode_key", None) is not None or not _computes():
            raise ValueError(
                f"{where}: the torch dispatch mode {type(mode).__name__} is active, expected none that takes torch's "
                "operators over: make the call outside it."
            )


def _computes() -> bool:
    """Whether operators write to memory, under the modes that are active."""
    probe = torch.zeros(1, device="cpu").add_(1)
    return type(probe) is Tensor and probe.is_cpu and not _is_wrapped(probe) and bool(probe.numpy()[0] == 1)


def flag(where: str, name: str, value: Any) -> bool | None:
    """An option that is True, False or None."""
    if value is not None and not isinstance(value, bool | np.bool_):
        raise TypeError(f"{where}: `{name}` is {value!r} of type {type(value).__name__}, expected True, False or None.")
    return None if value is None else bool(value)


def on_device(where: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context in which tensors of `device` are exchanged; refuses a CUDA stream that is capturing a graph."""
    check_modes(where)
    if device.type != "cuda":
        return contextlib.nullcontext()
    here = device.index == torch.cuda.current_device()
    context = contextlib.nullcontext() if here else torch.cuda.device(device)
    with context:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{where}: the current stream of {device} is capturing a CUDA graph, expected one that is not: XLA "
                "calls cannot be captured. Run this part outside the graph, or switch CUDA graphs off."
            )
    return context


@functools.lru_cache(64)
def jax_device(device: torch.device) -> Any:
    """JAX's name for a torch device; a ValueError where it has none."""
    try:
        devices = jax.local_devices(backend=device.type)
    except RuntimeError as error:
        raise ValueError(f"JAX has no {device.type} device here (pip install 'jax[cuda13]'?): {error}") from error
    for found in devices:
        if device.type == "cpu" or found.local_hardware_id == (device.index or 0):
            return found
    raise ValueError(f"JAX does not see {device}, only {devices}.")


class _HostMemory:
    """CPU memory for numpy: what `examine` has checked is not checked again, and pinned memory is CPU's."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        return to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


def host_view(base: Tensor) -> np.ndarray:
    """A numpy view of row-major CPU memory, through DLPack (`tensor.numpy()` would forbid `resize_` ever after).

    JAX takes it without a copy as an argument, for a tenth of the host time of a JAX array made from the same memory.
    """
    bits = _BITS.get(base.dtype)
    if bits is None:
        return np.from_dlpack(_HostMemory(base))
    return np.from_dlpack(_HostMemory(base.view(bits))).view(DTYPES[base.dtype])


# The exchange itself goes below `jax.dlpack.from_dlpack` and `torch.from_dlpack`: those order the two libraries' streams
# anew for every array, and take ten times as long. Here the streams are ordered once a call.


def import_tensors(tensors: Sequence[Tensor], device: torch.device) -> list[jax.Array]:
    """JAX arrays on the memory of tensors that passed `examine`, inside `on_device`, for one computation with them all.

    Only the first carries the stream that waits for torch's current one: JAX starts when all inputs are ready.
    """
    stream, kind, place = None, _CPU, jax_device(device)
    if device.type == "cuda":
        stream, kind = place.get_stream_for_external_ready_events(), _CUDA
        _external(stream, device).wait_stream(torch.cuda.current_stream(device.index))
    arrays = []
    for tensor in tensors:
        arrays.append(_jax.dlpack_managed_tensor_to_buffer(to_dlpack(tensor), place, stream, False, kind))
        stream = None
    return arrays


@functools.lru_cache(64)
def _external(stream: int, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(stream, device)


def export_stream(device: torch.device) -> int | None:
    """Torch's current stream as JAX takes it; None on a CPU."""
    return None if device.type == "cpu" else torch.cuda.current_stream(device.index).cuda_stream or _LEGACY_STREAM


def export_array(array: jax.Array, stream: int | None) -> Tensor:
    """A tensor on the memory of a JAX array, inside `on_device`; `stream`, of `export_stream`, waits for the array."""
    return torch.from_dlpack(_jax.buffer_to_dlpack_managed_tensor(array, stream=stream))


def to_jax(tensor: Tensor, *, copy: bool | None = None) -> jax.Array:
    """A JAX array of a torch tensor's values, in the same memory where that is possible.

    A shared array sees later writes to the tensor, which JAX does not expect: write only when JAX is done with it.

    Args:
        tensor: any shape; bool, integers, floats down to 8 bits, complex. Permuted, offset, 0-d and empty are fine.
        copy: None shares memory or else copies, with one `UserWarning` a call site; False shares or raises; True
            always copies.

    Returns:
        An array of the same shape and dtype (int64 without x64: int32, after a look at the values), on the tensor's
        device, ready in stream order.

    Raises:
        TypeError: no tensor, or another `copy`.
        ValueError: a tensor that cannot be exchanged (see docs/interop.md), or only by a copy that `copy` forbids; a
            torch dispatch mode that takes operators over, as of fake tensors.
        RuntimeError: the current stream is capturing a CUDA graph; the process was forked after use.

    Example:
        >>> tensor = torch.arange(6.0).reshape(2, 3).t()
        >>> array = to_jax(tensor)
        >>> array.shape, array.unsafe_buffer_pointer() == tensor.data_ptr()
        ((3, 2), True)
    """
    check_process("to_jax")
    copy = flag("to_jax", "copy", copy)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"to_jax: `tensor` is of type {type(tensor).__name__}, expected a torch.Tensor.")

    def name() -> str:
        return "tensor"

    with on_device("to_jax", tensor.device):
        seen = examine("to_jax", name, tensor, copy=copy is not False)
        base = seen.base.clone() if copy and not seen.copied else seen.base
        warn("to_jax", [(name, seen._replace(copied="") if copy else seen)])
        inverse = sorted(range(base.ndim), key=seen.axes.__getitem__)
        return import_tensors([base.permute(inverse)], base.device)[0]


def to_torch(array: jax.Array, *, copy: bool | None = None) -> Tensor:
    """A torch tensor of a JAX array's values, in the same memory unless `copy=True`.

    A shared tensor must not be written to: JAX takes its arrays for constant. While it lives the array cannot be
    donated; state that is updated belongs to torch, see `InPlace`.

    Args:
        array: on one CPU or CUDA device, of a dtype that torch has too.
        copy: True always copies; None and False share memory, which is possible for every such array.

    Returns:
        A tensor of the same shape and dtype on the array's device, ready on the current stream.

    Raises:
        TypeError: no concrete JAX array, or another `copy`.
        ValueError: an array that was deleted or donated, is spread over devices, or has a dtype that torch lacks; a
            torch dispatch mode that takes operators over, as of fake tensors.
        RuntimeError: the current stream is capturing a CUDA graph; the process was forked after use.

    Example:
        >>> to_torch(jax.numpy.arange(3), copy=True)
        tensor([0, 1, 2], dtype=torch.int32)
    """
    check_process("to_torch")
    copy = flag("to_torch", "copy", copy)
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise TypeError(f"to_torch: `array` is of type {type(array).__name__}, expected a JAX array, outside jit.")
    if array.is_deleted():
        raise ValueError("to_torch: `array` was deleted or donated, expected a live array.")
    if array.dtype not in TORCH_DTYPES:
        known = ", ".join(dtype.name for dtype in TORCH_DTYPES)
        raise ValueError(f"to_torch: `array` has dtype {array.dtype}, expected one that torch has too: {known}.")
    devices = list(array.devices())
    if len(devices) != 1 or devices[0].platform not in ("cpu", "gpu"):
        raise ValueError(f"to_torch: `array` lies on {devices}, expected one CPU or CUDA device.")
    kind = "cpu" if devices[0].platform == "cpu" else f"cuda:{devices[0].local_hardware_id}"
    device = torch.device(kind)
    with on_device("to_torch", device):
        tensor = export_array(array, export_stream(device))
        return tensor.clone() if copy else tensor
