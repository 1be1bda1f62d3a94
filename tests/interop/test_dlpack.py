"""`to_jax`, `to_torch` and the guard table: one case a row, as an argument and as a cache, and what must not happen."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportIncompatibleMethodOverride=false

import os
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from interop import InPlace, dlpack, to_jax, to_torch
from interop.dlpack import DTYPES, TORCH_DTYPES, jax_device, layout_of

ROOT = Path(__file__).parents[2]


def twice(cache, x=0):
    """Doubles a cache of any dtype."""
    return (cache | cache if cache.dtype == bool else (cache + cache).astype(cache.dtype),)


def same_values(array: jax.Array, tensor: Tensor) -> bool:
    """Bit for bit, looked at from inside a jit: JAX's own printing does not go through the compiler."""
    flat = np.asarray(jax.jit(lambda x: x.reshape(-1))(array))
    return flat.tobytes() == tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def misaligned(*shape: int) -> Tensor:
    return torch.zeros(int(np.prod(shape)) + 1)[1:].reshape(shape)


# ------------------------------------------------------------------------------------------------- zero-copy, in place

COMPACT: dict[str, Callable[[], Tensor]] = {
    "compact": lambda: random(4, 6),
    "transposed": lambda: random(4, 6).t(),
    "permuted": lambda: random(2, 3, 4).permute(2, 0, 1),
    "permuted with size 1": lambda: random(2, 1, 4, 1, 3).permute(4, 1, 0, 3, 2),
    "offset": lambda: random(3, 4, 16)[1],
    "odd strides of size 1": lambda: torch.zeros(120).as_strided((1, 5, 8), (0, 8, 1)),
    "more odd strides of size 1": lambda: torch.zeros(16).as_strided((2, 1, 4), (4, 999, 1)),
    "0-d": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(0, 3),
    "empty with odd strides": lambda: torch.empty_strided((2, 0, 3), (7, 1, 5)),
    "parameter without gradient": lambda: torch.nn.Parameter(random(4), requires_grad=False),
    "made in inference mode": lambda: torch.inference_mode()(random)(4, 6),
    "conjugate twice": lambda: random(4, dtype=torch.complex64).conj().conj(),
}


@pytest.mark.parametrize("kind", COMPACT)
def test_compact_tensors_are_shared(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    tensor = COMPACT[kind]()
    for copy in (None, False):
        array = to_jax(tensor, copy=copy)
        assert array.shape == tuple(tensor.shape)
        assert tensor.numel() == 0 or array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert same_values(array, tensor)
    back = to_torch(array)
    assert tensor.numel() == 0 or back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)
    copied = to_jax(tensor, copy=True)
    assert tensor.numel() == 0 or copied.unsafe_buffer_pointer() != tensor.data_ptr()
    assert same_values(copied, tensor)
    assert not recwarn.list


@pytest.mark.parametrize("kind", COMPACT)
def test_compact_caches_keep_their_memory(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    cache = COMPACT[kind]()
    before, pointer, strides = cache.clone(), cache.data_ptr(), cache.stride()
    assert InPlace(twice)(cache) is None
    assert torch.equal(cache, before * 2)
    assert (cache.data_ptr(), cache.stride()) == (pointer, strides)
    assert not recwarn.list


@pytest.mark.parametrize("kind", COMPACT)
def test_compact_arguments_are_taken_as_they_are(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    tensor = COMPACT[kind]()
    before = tensor.clone()
    output = InPlace(lambda cache, x: (cache, x))(torch.zeros(1), tensor)
    assert torch.equal(output, before)
    assert output.numel() == 0 or output.data_ptr() != tensor.data_ptr(), "an output is nobody else's memory"
    assert not recwarn.list


NARROW_DTYPES = [d for d in DTYPES if d not in (torch.int64, torch.uint64, torch.float64, torch.complex128)]


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, recwarn: pytest.WarningsRecorder) -> None:
    tensor = random(4, 16).to(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else random(4, 16, dtype=dtype)
    array = to_jax(tensor, copy=False)
    assert array.dtype == DTYPES[dtype] and array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert same_values(array, tensor)
    back = to_torch(array)
    assert back.dtype is dtype and back.data_ptr() == tensor.data_ptr()
    cache, pointer = tensor.clone(), tensor.data_ptr()
    output = InPlace(lambda cache, x: (x, cache))(cache, tensor)
    assert output.dtype is dtype and tensor.data_ptr() == pointer
    assert torch.equal(output.view(torch.uint8), tensor.view(torch.uint8))
    assert not recwarn.list


def test_every_common_dtype_is_in_the_table() -> None:
    assert len(DTYPES) == len(TORCH_DTYPES) == 20
    assert {torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64} <= set(DTYPES)


def test_transposed_then_indexed_in_jit() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    array = to_jax(tensor.t())
    assert np.array_equal(jax.jit(lambda x: x[1])(array), tensor.t()[1])
    assert np.array_equal(jax.jit(lambda x, i: x[i])(array, 4), tensor.t()[4])
    assert np.array_equal(jnp.take(array, jnp.array([5, 0]), axis=0), tensor.t()[[5, 0]])
    assert np.array_equal(jax.jit(jnp.sort)(array), tensor.t().sort()[0])
    assert np.array_equal(jax.lax.scan(lambda c, row: (c, row), 0, array)[1], tensor.t())


def test_odd_strides_of_size_1_compile_nothing_new() -> None:
    odd, plain = torch.zeros(120).as_strided((1, 3, 5, 8), (1, 40, 8, 1)), torch.zeros(1, 3, 5, 8)
    assert to_jax(odd).format == to_jax(plain).format
    traces = []
    step = InPlace(lambda cache: (traces.append(0), (cache + 1,))[1])
    step(odd)
    step(plain)
    assert len(traces) == 1


# ------------------------------------------------------------------------------------- copied, with exactly one warning

COPIED: dict[str, tuple[Callable[[], Tensor], str, str]] = {
    "strided slice": (lambda: random(4, 6)[:, ::2], "slice with gaps", "dimension 1 has stride 2, expected 1"),
    "row of a pair": (lambda: random(4, 2, 8)[:, 0], "slice with gaps", "dimension 0 has stride 16, expected 8"),
    "strided transposed": (lambda: random(4, 6)[:, ::2].t(), "slice with gaps", "dimension 0 has stride 2, expected 1"),
    "expanded": (lambda: random(6).expand(4, 6), "expanded", "dimension 0 has stride 0, expected 1"),
    "expanded inside": (lambda: random(6, 1).expand(6, 4), "expanded", "dimension 1 has stride 0, expected 1"),
    "overlapping windows": (
        lambda: torch.arange(8.0).as_strided((3, 4), (2, 1)),
        "expanded",
        "dimension 0 has stride 2",
    ),
    "expanded 5-d": (lambda: random(1, 40).as_strided((2, 5, 8), (0, 8, 1)), "expanded", "dimension 0 has stride 0"),
}


@pytest.mark.parametrize("kind", COPIED)
def test_what_is_not_compact_is_copied_as_an_argument(kind: str) -> None:
    make, label, gap = COPIED[kind]
    tensor = make()
    with pytest.warns(UserWarning, match=label) as seen:
        array = to_jax(tensor)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert same_values(array, tensor)
    with pytest.raises(ValueError, match=f"to_jax: `tensor` is .*{label}.*{gap}"):
        to_jax(tensor, copy=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_values(to_jax(tensor, copy=True), tensor)
    with pytest.warns(UserWarning, match=rf"InPlace\(<lambda>\): `x` is .*{label}.*copied") as seen:
        output = InPlace(lambda cache, x: (cache, x))(torch.zeros(2), tensor)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert torch.equal(output, tensor)


@pytest.mark.parametrize("kind", COPIED)
def test_what_is_not_compact_is_refused_as_a_cache(kind: str) -> None:
    make, label, gap = COPIED[kind]
    cache, other = make(), torch.ones(3)
    before = cache.clone()
    with pytest.raises(ValueError, match=rf"InPlace\(.*\): `caches\['a'\]\[1\]` is .*{label}.*{gap}.*contiguous"):
        InPlace(lambda caches: (jax.tree.map(lambda x: x + 1, caches),))({"a": [other, cache]})
    assert torch.equal(cache, before) and torch.equal(other, torch.ones(3))


def test_misaligned_cpu_memory() -> None:
    tensor = misaligned(64)
    assert tensor.data_ptr() % 64
    with pytest.warns(UserWarning, match="not aligned") as seen:
        array = to_jax(tensor)
    assert len(seen) == 1 and same_values(array, tensor)
    with pytest.raises(ValueError, match="not aligned as JAX needs, expected an address that is a multiple of 64"):
        to_jax(tensor, copy=False)
    with pytest.warns(UserWarning, match="`x` is not aligned") as seen:
        assert torch.equal(InPlace(lambda cache, x: (cache, x))(torch.zeros(2), tensor), tensor)
    assert len(seen) == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_misaligned_cache_is_copied_back(transposed: bool, recwarn: pytest.WarningsRecorder) -> None:
    buffer = torch.arange(25.0)
    cache = buffer[1:].reshape(4, 6).t() if transposed else buffer[1:].reshape(4, 6)
    pointer, strides = cache.data_ptr(), cache.stride()
    InPlace(lambda cache: (cache.at[1].multiply(2),))(cache)
    expected = torch.arange(25.0)
    (expected[1:].reshape(4, 6).t() if transposed else expected[1:].reshape(4, 6))[1] *= 2
    assert torch.equal(buffer, expected)
    assert (cache.data_ptr(), cache.stride()) == (pointer, strides)
    assert not recwarn.list


def test_one_warning_a_call_site() -> None:
    tensor = random(4, 6)[:, ::2]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            to_jax(tensor)
        assert len(seen) == 1
        to_jax(tensor)
        assert len(seen) == 2


def test_one_warning_a_call() -> None:
    with pytest.warns(
        UserWarning, match=r"`x\['b'\]` is a slice.*`args\[1\]` is not aligned.*`x\['a'\]` is part of an"
    ) as seen:
        InPlace(lambda cache, x, *more: (cache,))(
            torch.zeros(2), {"a": torch.zeros(3, requires_grad=True), "b": random(4, 6)[:, ::2]}, misaligned(3)
        )
    assert len(seen) == 1


# -------------------------------------------------------------------------------------------------------- 64-bit dtypes


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64], ids=str)
def test_wide_integers_are_narrowed_after_a_look(dtype: torch.dtype) -> None:
    slots = torch.tensor([0, 2, 5]).to(dtype)
    with pytest.warns(UserWarning, match=f"`tensor` is of dtype {dtype} while jax_enable_x64 is off") as seen:
        array = to_jax(slots)
    assert len(seen) == 1 and array.dtype == (jnp.int32 if dtype is torch.int64 else jnp.uint32)
    assert array.tolist() == [0, 2, 5]
    with pytest.raises(ValueError, match="x64 is off"):
        to_jax(slots, copy=False)
    with pytest.warns(UserWarning, match="`slots` is of dtype"):
        cache = torch.zeros(8)
        InPlace(lambda cache, slots: (cache.at[slots].add(1),))(cache, slots)
    assert cache.tolist() == [1, 0, 1, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match=rf"`caches` is of dtype {dtype} while jax_enable_x64 is off"):
        InPlace(twice)(slots)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(2**40 + 7, torch.int64), (2**31 + 5, torch.int64), (2**31, torch.int64), (-(2**31) - 1, torch.int64)]
    + [(2**32, torch.uint64), (2**63 + 1, torch.uint64)],
)
def test_no_silent_wrap(value: int, dtype: torch.dtype) -> None:
    slots = torch.tensor([[0, 1], [value, 2]], dtype=dtype)
    for tensor in (slots, slots.t(), slots[:, :1], slots[1:, :1].expand(4, 3)):
        for copy in (None, True):
            with pytest.raises(ValueError, match=rf"to_jax: `tensor` holds {value}, expected values in"):
                to_jax(tensor, copy=copy)
        with pytest.raises(ValueError, match="x64"):
            to_jax(tensor, copy=False)
        cache = torch.zeros(8)
        with pytest.raises(ValueError, match=rf"`slots` holds {value}, expected values in"):
            InPlace(lambda cache, slots: (cache.at[slots].add(1),))(cache, slots)
        assert not cache.any()


def test_limits_of_int32_pass() -> None:
    limits = torch.tensor([-(2**31), -1, 2**31 - 1])
    with pytest.warns(UserWarning, match="int64"):
        assert to_jax(limits).tolist() == limits.tolist()
    with pytest.warns(UserWarning, match="int64"):
        assert to_jax(torch.zeros(0, dtype=torch.int64)).dtype == jnp.int32


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_wide_floats_are_refused(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    for copy in (None, False, True):
        with pytest.raises(ValueError, match=f"`tensor` is of dtype {dtype} while jax_enable_x64 is off, expected"):
            to_jax(tensor, copy=copy)
    with pytest.raises(ValueError, match=f"`x` is of dtype {dtype}"):
        InPlace(twice)(torch.zeros(2), tensor)
    with pytest.raises(ValueError, match=f"`caches` is of dtype {dtype}"):
        InPlace(twice)(tensor)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.float64, torch.complex128], ids=str)
def test_with_x64_wide_dtypes_are_shared(dtype: torch.dtype, recwarn: pytest.WarningsRecorder) -> None:
    value = 2**40 + 7 if dtype in (torch.int64, torch.uint64) else 1e300
    tensor = torch.tensor([1, value]).to(dtype)
    before, traces = tensor.clone(), []
    step = InPlace(lambda cache, x: (traces.append(0), (cache, x))[1])
    with jax.enable_x64(True):
        array = to_jax(tensor, copy=False)
        assert array.dtype == DTYPES[dtype] and array.unsafe_buffer_pointer() == tensor.data_ptr()
        output = step(tensor, before)
    assert output.dtype is dtype and torch.equal(output, before) and torch.equal(tensor, before)
    with pytest.raises(ValueError, match="x64"):
        step(tensor, before)
    assert len(traces) == 1 and not recwarn.list


# ------------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3, requires_grad=True), lambda: torch.ones(3, requires_grad=True) * 2]
)
def test_gradient(make: Callable[[], Tensor]) -> None:
    tensor = make()
    for copy in (None, False, True):
        with pytest.warns(UserWarning, match=r"`tensor` is part of an autograd graph .*: detached") as seen:
            array = to_jax(tensor, copy=copy)
        assert len(seen) == 1
        assert (array.unsafe_buffer_pointer() == tensor.data_ptr()) == (copy is not True)
    with pytest.warns(UserWarning, match=r"`x` is part of an autograd graph \(it requires grad\): detached"):
        output = InPlace(lambda cache, x: (cache, x))(torch.zeros(2), tensor)
    assert not output.requires_grad and tensor.requires_grad
    before = tensor.detach().clone()
    with pytest.raises(ValueError, match=r"`caches\[0\]` is part of an autograd graph .*expected .*detach"):
        InPlace(lambda caches: (caches,))([tensor])
    assert torch.equal(tensor, before)


def test_forward_mode_tangents() -> None:
    cache = torch.zeros(2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(64), torch.full((64,), 3.0))
        for copy in (None, False, True):
            with pytest.warns(
                UserWarning, match=r"`tensor` is part of a forward-mode .*\(it is dual\): detached"
            ) as seen:
                to_jax(dual, copy=copy)
            assert len(seen) == 1
        with pytest.warns(UserWarning, match=r"`x` is part of a forward-mode .*: detached"):
            output = InPlace(lambda cache, x: (cache, x * x))(cache, dual)
        assert torch.equal(output, torch.ones(64)) and forward_ad.unpack_dual(output).tangent is None
        with pytest.raises(ValueError, match=r"`caches` is part of a forward-mode .*expected .*detach"):
            InPlace(twice)(dual)
        assert torch.equal(forward_ad.unpack_dual(dual).primal, torch.ones(64))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            to_jax(torch.ones(64))
            InPlace(twice)(cache, torch.ones(64))


# -------------------------------------------------------------------------------------------------------------- refused


class OnMeta(TorchDispatchMode):
    """New tensors have no memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **{**(kwargs or {}), "device": "meta"} if func is torch.ops.aten.zeros.default else {})


class InPlaceIsLost(TorchDispatchMode):
    """Operators that write to a tensor do not."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return args[0] if func._schema.is_mutable else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FakeTensorMode, FunctionalTensorMode, OnMeta, InPlaceIsLost])
def test_no_exchange_under_a_mode_that_computes_nothing(mode: Callable[[], TorchDispatchMode]) -> None:
    cache, array = torch.zeros(64), jnp.ones(64)
    step = InPlace(lambda cache, x=0: (cache + 1,))
    step(cache)
    words = f"the torch dispatch mode {mode.__name__} is active, expected none"
    for use in (lambda: step(cache), lambda: step(cache, 1), lambda: to_jax(cache), lambda: to_torch(array)):
        with mode(), pytest.raises(ValueError, match=words):
            use()
    assert (cache == 1).all()


def test_no_exchange_while_tracing() -> None:
    with pytest.raises(ValueError, match="the torch dispatch mode ProxyTorchDispatchMode is active"):
        make_fx(lambda x: x + to_torch(to_jax(x)))(torch.ones(3))


def test_modes_that_pass_operators_on_are_fine() -> None:
    cache = torch.zeros(64)
    with FlopCounterMode(display=False):
        InPlace(twice)(cache, to_jax(torch.ones(64)))


@pytest.mark.parametrize("value", ["no", 0, 1, 1.0, torch.tensor(True)], ids=repr)
def test_copy_is_true_false_or_none(value: object) -> None:
    for use in (lambda: to_jax(torch.ones(3), copy=value), lambda: to_torch(jnp.ones(3), copy=value)):
        with pytest.raises(TypeError, match=r"to_\w+: `copy` is .*, expected True, False or None"):
            use()


def test_numpy_bools_are_bools() -> None:
    with pytest.raises(ValueError, match="a slice with gaps"):
        to_jax(random(4, 6)[:, ::2], copy=np.False_)
    array = jnp.ones(64)
    assert to_torch(array, copy=np.True_).data_ptr() != array.unsafe_buffer_pointer()


def freed(offset: int) -> Tensor:
    tensor = torch.zeros(64 + offset)[offset:]
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> Tensor:
    tensor = torch.zeros(64)
    tensor.untyped_storage().resize_(100)
    return tensor


class OwnStorage(torch.Tensor):
    """A subclass that stands for another tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OwnStorage":
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")

    def __repr__(self) -> str:
        return "OwnStorage"


class PlainSubclass(torch.Tensor):
    """A subclass whose memory is its own."""


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    QUANTIZED = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    CSR = torch.eye(3).to_sparse_csr()
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    COMPLEX32 = torch.zeros(3, dtype=torch.complex32)

REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "conjugate": (lambda: random(3, dtype=torch.complex64).conj(), "a conjugate or negative view"),
    "negative": (lambda: random(3, dtype=torch.complex64).conj().imag, "a conjugate or negative view"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse, nested or quantized"),
    "csr": (lambda: CSR, "sparse, nested or quantized"),
    "nested": (lambda: NESTED, "sparse, nested or quantized"),
    "jagged": (lambda: JAGGED, "a tensor subclass with a storage of its own"),
    "quantized": (lambda: QUANTIZED, "sparse, nested or quantized"),
    "meta": (lambda: torch.zeros(3, device="meta"), "on device meta"),
    "fake": (lambda: FakeTensorMode().from_tensor(torch.zeros(3)), r"a tensor subclass .*\(FakeTensor\)"),
    "own storage": (lambda: OwnStorage(torch.zeros(3)), r"a tensor subclass .*\(OwnStorage\)"),
    "lazy parameter": (lambda: torch.nn.UninitializedParameter(), "uninitialized: a lazy module's"),
    "lazy buffer": (lambda: torch.nn.UninitializedBuffer(), "uninitialized: a lazy module's"),
    "zero tensor": (lambda: torch._efficientzerotensor((3,)), "wrapped .* without memory"),
    "freed": (lambda: freed(0), "freed: .* expected 256 bytes, not 0"),
    "freed with offset": (lambda: freed(16), "freed: .* expected 320 bytes, not 0"),
    "shrunk": (shrunk, "freed: .* expected 256 bytes, not 100"),
    "complex32": (lambda: COMPLEX32, "of dtype torch.complex32, expected a dtype that JAX has too"),
    "bits": (lambda: torch.empty(3, dtype=torch.bits8), "of dtype torch.bits8"),
    "sub-byte": (lambda: torch.empty(3, dtype=torch.uint4), "of dtype torch.uint4"),
    "float4": (lambda: torch.empty(3, dtype=torch.float4_e2m1fn_x2), "of dtype torch.float4"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_everywhere(kind: str) -> None:
    make, words = REFUSED[kind]
    tensor, cache = make(), torch.zeros(3)
    for copy in (None, False, True):
        with pytest.raises(ValueError, match=f"to_jax: `tensor` is {words}"):
            to_jax(tensor, copy=copy)
    with pytest.raises(ValueError, match=rf"InPlace\(.*\): `x\[0\]` is {words}|expected cpu"):
        InPlace(lambda cache, x: (cache + 1,))(cache, [tensor])
    with pytest.raises(ValueError, match=rf"InPlace\(.*\): `caches\[1\]` is {words}|expected cpu"):
        InPlace(lambda caches: (caches,))([cache, tensor])
    assert not cache.any()


def test_rows_about_memory() -> None:
    assert [row.label.split()[0] for row in dlpack._ABOUT_MEMORY][::5] == ["uninitialized:", "freed:"]


def test_plain_subclasses_are_fine() -> None:
    tensor = random(4, 16).as_subclass(PlainSubclass)
    assert to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()
    InPlace(twice)(tensor)
    assert torch.equal(tensor.as_subclass(Tensor), random(4, 16) * 2)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "functionalize"])
def test_functorch_is_refused(transform: str) -> None:
    words = "wrapped by a torch.func transform.*expected a plain tensor: make the call outside"

    cache = torch.zeros(2)

    def f(x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match=f"to_jax: `tensor` is {words}"):
            to_jax(x)
        with pytest.raises(ValueError, match=f"`x` is {words}"):
            InPlace(twice)(cache, x)
        with pytest.raises(ValueError, match=f"`caches` is {words}"):
            InPlace(twice)(x)
        return (x * 1.0).sum()

    x = torch.ones(4, 3)
    if transform == "jvp":
        torch.func.jvp(f, (x,), (x,))
    elif transform == "functionalize":
        with pytest.raises(ValueError, match=words):  # inside, new tensors are wrapped too
            torch.func.functionalize(to_jax)(x)
    else:
        getattr(torch.func, transform)(f)(x)


@pytest.mark.parametrize("value", [np.ones(3), [1.0], 1.0, None, "x", jnp.ones(3)], ids=repr)
def test_to_jax_takes_tensors_only(value: object) -> None:
    with pytest.raises(TypeError, match=r"to_jax: `tensor` is of type .*, expected a torch.Tensor"):
        to_jax(value)


def test_the_shortcut_agrees_with_the_table() -> None:
    every = [*COMPACT.values(), *(case[0] for case in (*COPIED.values(), *REFUSED.values()))]
    every += [
        lambda: misaligned(64),
        lambda: torch.ones(3, requires_grad=True),
        lambda: torch.zeros(3, dtype=torch.int64),
    ]
    ordinary = 0
    for make in every:
        tensor = make()
        at = dlpack._layout(tensor)
        if dlpack._address(tensor, at):
            ordinary += 1
            assert not any(row.holds(tensor, at) for row in dlpack.TABLE)
    assert 4 < ordinary < len(every) // 2, "some take it, and some cannot"


# ------------------------------------------------------------------------------------------------------------- to_torch


def test_to_torch_shares_or_copies() -> None:
    array = jnp.arange(6, dtype=jnp.int32)
    for copy in (None, False):
        shared = [to_torch(array, copy=copy) for _ in range(2)]
        assert all(t.data_ptr() == array.unsafe_buffer_pointer() for t in shared)
    copied = to_torch(array, copy=True)
    copied[0] = 99
    assert array[0] == 0 and jax.jit(lambda x: x + 0)(array)[0] == 0
    assert copied.data_ptr() != array.unsafe_buffer_pointer()


def test_memory_outlives_its_maker() -> None:
    tensor = to_torch(jnp.arange(1000.0) + 1)
    array = to_jax(torch.arange(1000.0) + 1)
    for _ in range(10):  # overwrite what would have been freed
        _ = torch.zeros(1000), jnp.zeros(1000).block_until_ready()
    assert torch.equal(tensor, torch.arange(1000.0) + 1) and np.array_equal(array, np.arange(1000.0) + 1)


@pytest.mark.parametrize("value", [np.ones(3), torch.ones(3), 1.0, None], ids=lambda v: type(v).__name__)
def test_to_torch_takes_jax_arrays_only(value: object) -> None:
    with pytest.raises(TypeError, match=r"to_torch: `array` is of type .*, expected a JAX array"):
        to_torch(value)


def test_to_torch_refuses() -> None:
    with pytest.raises(TypeError, match=r"`array` is of type .*Tracer"):
        jax.jit(lambda x: to_torch(x))(jnp.ones(3))
    for array in (jnp.ones(3, jnp.int4), jnp.ones(3, jnp.float8_e3m4), jax.random.key(0)):
        with pytest.raises(ValueError, match=r"to_torch: `array` has dtype .*, expected one that torch has too"):
            to_torch(array)
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(ValueError, match="deleted or donated"):
        to_torch(deleted)
    if len(jax.devices("cpu")) > 1:
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
        spread = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("x")))
        with pytest.raises(ValueError, match="expected one CPU or CUDA device"):
            to_torch(spread)


def test_a_device_that_jax_lacks() -> None:
    with pytest.raises(ValueError, match=r"JAX does not see cuda:77|JAX has no cuda device here"):
        jax_device(torch.device("cuda:77"))


# ----------------------------------------------------------------------------------------------------------- the layout


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4), (1, 5, 1, 3), (), (1, 1), (2, 0, 3)])
def test_layout_of_permutations(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    for _ in range(6):
        axes = generator.permutation(len(shape)).tolist()
        tensor = torch.arange(float(np.prod(shape))).reshape(shape).permute(axes)
        layout = layout_of(tensor.shape, tensor.stride())
        base = tensor.as_strided(layout.shape, layout.strides)
        assert layout.compact and not layout.overlaps and layout.reach == tensor.numel()
        assert base.is_contiguous() and torch.equal(tensor.permute(layout.axes), base)


# ---------------------------------------------------------------------------------------------------------- around it


def run_python(code: str, **env: str) -> str:
    """Runs code in a fresh interpreter, which has to end clean."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    environment |= {"PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ROUND_TRIP = "assert interop.to_torch(interop.to_jax(torch.ones(3)) + 1).tolist() == [2, 2, 2]; "
SHOW = "import os; print(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))"


@pytest.mark.parametrize("order", ["torch, jax, interop", "jax, torch, interop", "interop, torch"])
def test_import_orders_and_a_clean_exit(order: str) -> None:
    assert run_python(f"import {order}; {ROUND_TRIP}{SHOW}") == "false"


def test_preallocation_is_left_alone() -> None:
    assert run_python(f"import interop; {SHOW}", XLA_PYTHON_CLIENT_PREALLOCATE="true") == "true"
    assert run_python(f"import jax; jax.devices(); import interop; {SHOW}") == "None"


def test_fork_after_use_is_refused() -> None:
    code = """
import os, torch, interop
def step(cache): return (cache + 1,)
call, pool = interop.InPlace(step), torch.zeros(64)
call(pool)
child = os.fork()
if child == 0:
    for use in (lambda: call(pool), lambda: interop.to_jax(pool), lambda: interop.to_torch(pool)):
        try:
            use()
        except RuntimeError as error:
            if "was forked" not in str(error) or "spawn" not in str(error):
                os._exit(2)
        else:
            os._exit(3)
    os._exit(0 if pool[0] == 1 else 4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code) == "0"


def test_fork_before_use_is_fine() -> None:
    code = f"""
import os, torch, interop
child = os.fork()
if child == 0:
    {ROUND_TRIP}
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code) == "0"


def test_failing_exports_leave_memory_flat() -> None:
    strided, wide, array = torch.zeros(1 << 16)[::2], torch.full((1 << 12,), 2**40), jnp.ones(1 << 12, jnp.int4)
    step, cache = InPlace(lambda caches: (caches,)), torch.zeros(1 << 16)

    def fail() -> None:
        for call in (
            lambda: to_jax(strided, copy=False),
            lambda: to_jax(wide),
            lambda: to_torch(array),
            lambda: step([cache, cache[8:]]),
        ):
            try:
                call()
            except ValueError:
                continue
            raise AssertionError("was not refused")

    for _ in range(200):
        fail()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2500):
        fail()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "KiB"


def test_exchange_in_many_threads() -> None:
    failures = []

    def work(k: int) -> None:
        for i in range(50):
            back = to_torch(to_jax(torch.full((128,), float(k * 100 + i))) + 1)
            if not torch.equal(back, torch.full((128,), float(k * 100 + i + 1))):
                failures.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", COMPACT)
def test_gpu_compact_tensors_are_shared(kind: str) -> None:
    source = COMPACT[kind]()
    tensor = torch.empty_strided(source.shape, source.stride(), device="cuda").copy_(source)
    array = to_jax(tensor, copy=False)
    assert tensor.numel() == 0 or array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert torch.equal(to_torch(jax.jit(lambda x: x + 0)(array)), tensor)


@pytest.mark.gpu
def test_gpu_misaligned() -> None:
    tensor = torch.arange(65.0, device="cuda")[1:]
    with pytest.raises(ValueError, match="a multiple of 16"):
        to_jax(tensor, copy=False)
    with pytest.warns(UserWarning, match="not aligned"):
        array = to_jax(tensor)
    assert float(jax.jit(lambda x: x.sum())(array)) == float(tensor.sum())


@pytest.mark.gpu
def test_gpu_capturing_stream_is_refused() -> None:
    tensor, x = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    step, array = InPlace(twice), to_jax(x)
    step(tensor)
    step(tensor, x)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        for use in (lambda: to_jax(tensor), lambda: to_torch(array), lambda: step(tensor), lambda: step(tensor, x)):
            with pytest.raises(RuntimeError, match=r"capturing a CUDA graph.*cannot be captured"):
                use()
        tensor.add_(1)


@pytest.mark.gpu
def test_gpu_streams_are_in_order() -> None:
    n = 1 << 24
    stream = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(n, device="cuda")
            a = torch.randn(2048, 2048, device="cuda")
            for _ in range(4):
                a = a @ a
            tensor.fill_(7)
            total = to_torch(jnp.sum(to_jax(tensor)) + 0)
            assert float(total / 7) == n


@pytest.mark.gpu
def test_gpu_pinned_memory_is_cpu_memory() -> None:
    tensor = torch.arange(64.0).pin_memory()
    array = to_jax(tensor, copy=False)
    assert {d.platform for d in array.devices()} == {"cpu"} and np.array_equal(array, tensor)
