"""Faults met in the field where torch and JAX meet, clean exits, and runs long enough to show a leak or a race.

    DLP-01 02 03 05 07 09 11, LAY-01 03, CONV-04, SLOT-10, JAX-13      here, on torch tensors
    DLP-09 (in place), DLP-13, JAX-01 07                              test_inplace.py

10,000 failing exports with flat memory are in test_dlpack.py.
"""

# pyright: reportAttributeAccessIssue=false
# (`GDNState` is annotated with JAX arrays; here it holds tensors)

import contextlib
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from batches import close
from torch import Tensor

from gdn_jax import (
    GDNConfig,
    GDNState,
    GDNWeights,
    causal_conv1d,
    causal_conv1d_update,
    gdn_decode,
    gdn_mtp_decode,
    recurrent_gated_delta_rule,
    reference,
)
from interop import GDNCache, InPlace, to_jax, to_torch

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each = pytest.mark.parametrize("device", DEVICES)

COMPILES: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: COMPILES.append(event) if event.endswith("backend_compile_duration") else None
)


def normal(seed: int, *shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact(tensor: Tensor) -> np.ndarray:
    """What the references are given: the same values in float64, integers as they are."""
    tensor = tensor.cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Where nothing may be copied: each copy warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def jax_on(device: str) -> Iterator[None]:
    with jax.default_device(jax.local_devices(backend=device)[0]):
        yield


# ---------------------------------------------------------------------------------------------------- faults of the field


@on_each
def test_dlp_01_every_element_of_a_view(device: str) -> None:
    base = torch.arange(24.0, device=device).reshape(2, 3, 4).permute(2, 0, 1)
    views = {None: base, "slice with gaps": base[:, :, ::2], "expanded": base[:, :1].expand(4, 5, 3)}
    element = jax.jit(lambda x, i: x[tuple(i)])
    call = InPlace(lambda cache, x, i, j, k: (cache + x[i, j, k], x[i, j, k]))
    for label, view in views.items():
        cache, expected = torch.zeros(1, device=device), view.cpu().numpy()
        with silent() if label is None else pytest.warns(UserWarning, match=f"`tensor` is .*{label}"):
            array = to_jax(view)
        with silent() if label is None else pytest.warns(UserWarning, match=f"`x` is .*{label}"):
            for index in np.ndindex(expected.shape):
                assert float(element(array, np.array(index, np.int32))) == expected[index]
                assert call(cache, view, *index).item() == expected[index]
        assert cache.item() == expected.sum(dtype=np.float64)


@on_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("strides", [((1, 3, 5, 8), (1, 40, 8, 1)), ((2, 1, 4), (4, 999, 1))], ids=str)
def test_dlp_02_strides_of_size_1(strides: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any, device: str) -> None:
    values = normal(2, *strides[0], device=device, dtype=dtype)
    odd = torch.empty_strided(*strides, device=device, dtype=dtype).copy_(values)
    assert odd.stride() == strides[1] != values.stride()
    traces: list[int] = []
    add, call = jax.jit(lambda x: x + 1), InPlace(lambda c: (traces.append(0), (c + 1, c))[1])
    with silent():
        array, twin = to_jax(odd, copy=False), to_jax(values, copy=False)
        assert array.unsafe_buffer_pointer() == odd.data_ptr() and array.format == twin.format
        before = len(COMPILES)
        assert torch.equal(to_torch(add(array)), odd + 1)
        once = len(COMPILES)
        add(twin)
        assert len(COMPILES) == once > before
        del array, twin
        old = values.clone()
        assert torch.equal(call(values), old) and torch.equal(call(odd), old)
    assert torch.equal(odd, old + 1) and torch.equal(values, old + 1) and odd.stride() == strides[1]
    assert len(traces) == 1


def conv(pool, x, weight, slots, starts):
    y, new = causal_conv1d(x, weight, conv_state=pool, state_indices=slots, query_start_loc=starts)
    return new, y


@on_each
def test_dlp_03_int64_slots_and_starts(device: str) -> None:
    x, weight, pool = (normal(i, *shape, device=device) for i, shape in enumerate([(7, 5), (5, 4), (3, 5, 3)]))
    starts, before, call = torch.tensor([0, 2, 5, 7], device=device), pool.clone(), InPlace(conv)
    far = torch.tensor([0, 2, 2**31 + 5], device=device)
    with pytest.raises(ValueError, match=r"`slots` holds 2147483653, expected values in \[-2147483648, 2147483647\]"):
        call(pool, x, weight, far, starts)
    with pytest.raises(ValueError, match=r"`starts` holds 2147483653"):
        call(pool, x, weight, torch.tensor([0, 2, -1], device=device), torch.cat([starts[:3], far[2:]]))
    assert torch.equal(pool, before)
    for slots, x64 in ((torch.tensor([0, 2, -1], device=device), False), (far, True)):
        pool.copy_(before)
        quiet = silent() if x64 else pytest.warns(UserWarning, match=r"`slots` is of dtype torch.int64.*`starts` is of")
        with jax.enable_x64(x64), quiet:
            y = call(pool, x, weight, slots, starts)
        want, state = reference.causal_conv1d(
            exact(x), exact(weight), conv_state=exact(before), state_indices=exact(slots), query_start_loc=exact(starts)
        )
        close(exact(y), want, 1e-5)
        assert np.array_equal(exact(pool), state) and torch.equal(pool[1], before[1]) and not y[5:].any()


@on_each
def test_dlp_05_who_may_write(device: str) -> None:
    """A shared export is flagged as one, a copy is nobody else's, and state is refused while a second handle is given."""
    with jax_on(device):
        array = jnp.arange(6)
    printed = str(array)
    tensor = to_torch(array, copy=True)
    tensor[0] = 99
    assert str(array) == printed and array[0] == 0 and jax.jit(lambda j: j + 0)(array)[0] == 0
    assert to_torch(array).data_ptr() == array.unsafe_buffer_pointer() != tensor.data_ptr()
    assert "must not be written to" in (to_torch.__doc__ or "") and "later writes" in (to_jax.__doc__ or "")
    stale, call = to_jax(tensor), InPlace(lambda cache, x: (cache + x,))
    with pytest.raises(ValueError, match=r"`(caches|x)` and `(caches|x)` share memory"):
        call(tensor, stale)
    assert tensor.tolist() == [99, 1, 2, 3, 4, 5]
    call(tensor, array)
    assert tensor.tolist() == [99, 2, 4, 6, 8, 10] and array.tolist() == [0, 1, 2, 3, 4, 5]


@on_each
def test_dlp_07_twice(device: str) -> None:
    with jax_on(device):
        array, tensor = jnp.arange(6.0), torch.arange(6.0, device=device)
    first, second = to_torch(array), to_torch(array)
    assert first.data_ptr() == second.data_ptr() == array.unsafe_buffer_pointer()
    arrays = [to_jax(tensor) for _ in range(2)]
    assert {a.unsafe_buffer_pointer() for a in arrays} == {tensor.data_ptr()}
    capsule = array.__dlpack__()
    for _ in range(2):
        for use in (to_jax, to_torch):
            with pytest.raises(TypeError, match="of type PyCapsule, expected"):
                use(capsule)
    third = torch.from_dlpack(capsule)
    with pytest.raises(RuntimeError, match="only once"):
        torch.from_dlpack(capsule)
    with pytest.raises(TypeError, match="of type PyCapsule, expected"):
        to_torch(capsule)
    del array, arrays
    assert third.data_ptr() == first.data_ptr() and third.tolist() == second.tolist() == tensor.tolist()


@on_each
def test_dlp_09_nobody_synchronises(device: str) -> None:
    repeats, n, size = (200, 1 << 26, 4096) if device == "cuda" else (20, 1 << 16, 256)

    def late(a):
        busy = jax.lax.fori_loop(0, 8, lambda _, b: jnp.tanh(b @ a), a)
        return jnp.full(n, 7, jnp.int32) + (busy.sum() * 0).astype(jnp.int32)

    side = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
    with side, jax_on(device):
        a, slow, total = torch.ones(size, size, device=device), jax.jit(late), jax.jit(jnp.sum)
        ours = jnp.ones((size, size))
        for _ in range(repeats):
            tensor = torch.zeros(n, dtype=torch.int32, device=device)
            _ = a @ a
            tensor.fill_(7)
            assert int(total(to_jax(tensor))) == 7 * n
            assert int(to_torch(slow(ours)).sum()) == 7 * n


@on_each
def test_dlp_11_the_same_pointer_or_an_error(device: str) -> None:
    buffer = normal(11, 65, device=device)
    with silent():
        array = to_jax(buffer, copy=False)
        assert array.unsafe_buffer_pointer() == buffer.data_ptr()
    for view, label in ((buffer[::2], "a slice with gaps"), (buffer[1:], "not aligned as JAX needs")):
        with pytest.raises(ValueError, match=f"to_jax: `tensor` is {label}, expected"):
            to_jax(view, copy=False)
        with pytest.warns(UserWarning, match=f"to_jax: `tensor` is {label}: copied"):
            array = to_jax(view)
        assert not buffer.data_ptr() <= array.unsafe_buffer_pointer() < buffer.data_ptr() + buffer.nbytes
        assert torch.equal(to_torch(array), view)
    assert "None shares memory or else copies" in (to_jax.__doc__ or "")


def rule(pool, q, k, v, g, beta, slots):
    o, new = recurrent_gated_delta_rule(q, k, v, g, beta, ssm_state=pool, state_indices=slots)
    return new, o


def rule_inputs(B: int, H: int, HV: int, K: int, V: int, device: str) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """`mixed` `[B, 2 H K + HV V]`, its slices q, k and v (of `mixed`'s strides), g and beta."""
    mixed = normal(B, B, 2 * H * K + HV * V, device=device)
    parts = [part.unflatten(1, (-1, d)) for part, d in zip(mixed.split([H * K, H * K, HV * V], 1), (K, K, V))]
    return mixed, parts, -normal(1, B, HV, device=device).exp(), normal(2, B, HV, device=device).sigmoid()


@on_each
def test_lay_01_transposed_pool(device: str) -> None:
    storage = normal(1, 5, 2, 3, 4, device=device)
    pool, before, pointer = storage.transpose(-1, -2), storage.clone(), storage.data_ptr()
    _, (q, k, v), g, beta = rule_inputs(3, 1, 2, 4, 3, device)
    q, k, v = (x.contiguous() for x in (q, k, v))
    slots = torch.tensor([4, -1, 1], dtype=torch.int32, device=device)
    with silent():
        o = InPlace(rule)(pool, q, k, v, g, beta, slots)
    want_o, want = reference.recurrent_gated_delta_rule(
        *map(exact, (q, k, v, g, beta)), ssm_state=exact(before.transpose(-1, -2)), state_indices=exact(slots)
    )
    close(exact(o), want_o, 1e-5)
    close(exact(storage), want.swapaxes(-1, -2), 1e-5)
    assert torch.equal(storage[[0, 2, 3]], before[[0, 2, 3]]) and not torch.equal(storage[4], before[4])
    assert (pool.data_ptr(), pool.stride()) == (pointer, (24, 12, 1, 4))
    with pytest.raises(ValueError, match=r"`caches` is a slice with gaps.*dimension 3 has stride 2, expected 1"):
        InPlace(rule)(normal(1, 5, 2, 4, 6, device=device)[..., ::2], q, k, v, g, beta, slots)


@on_each
def test_lay_03_slices_of_the_projections(device: str) -> None:
    B, H, HV, K, V = 8, 2, 4, 8, 6
    mixed, parts, g, beta = rule_inputs(B, H, HV, K, V, device)
    assert all(part.stride(0) == 2 * H * K + HV * V and not part.is_contiguous() for part in parts)
    slots = torch.arange(B, dtype=torch.int32, device=device).flip(0)
    pools = [normal(3, B, HV, K, V, device=device) for _ in range(3)]
    want_o, want = reference.recurrent_gated_delta_rule(
        *map(exact, (*parts, g, beta)), ssm_state=exact(pools[0]), state_indices=exact(slots)
    )
    call = InPlace(rule)
    with pytest.warns(UserWarning, match="`q` is a slice with gaps: copied; `k` is a slice .*; `v` is a slice") as seen:
        strided = call(pools[0], *parts, g, beta, slots)
    assert len(seen) == 1 and len(call._executables) == 1

    def packed_rule(pool, mixed, g, beta, slots):
        q, k, v = jnp.split(mixed, [H * K, 2 * H * K], axis=1)
        return rule(pool, q.reshape(B, H, K), k.reshape(B, H, K), v.reshape(B, HV, V), g, beta, slots)

    with silent():
        plain = call(pools[1], *(part.contiguous() for part in parts), g, beta, slots)
        packed = InPlace(packed_rule)(pools[2], mixed, g, beta, slots)
        assert to_jax(mixed, copy=False).unsafe_buffer_pointer() == mixed.data_ptr()
    assert torch.equal(strided, plain) and torch.equal(pools[0], pools[1]) and len(call._executables) == 1
    for o, pool in ((plain, pools[1]), (packed, pools[2])):
        close(exact(o), want_o, 1e-5)
        close(exact(pool), want, 1e-5)


@on_each
def test_conv_04_an_odd_offset_and_row_stride(device: str) -> None:
    T, D, W = 10, 36, 4
    buffer = normal(4, T, 77, device=device, dtype=torch.bfloat16)
    x, weight = buffer[:, 3 : 3 + D], normal(5, D, W, device=device, dtype=torch.bfloat16)
    assert x.stride() == (77, 1) and x.data_ptr() == buffer.data_ptr() + 6
    pools = [normal(6, 4, D, W - 1, device=device, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 7, T], dtype=torch.int32, device=device)
    arrays: dict[str, Any] = dict(conv_state=pools[0], state_indices=slots, query_start_loc=starts)
    want, state = reference.causal_conv1d(exact(x), exact(weight), **{name: exact(t) for name, t in arrays.items()})
    call = InPlace(conv)
    with pytest.warns(UserWarning, match=r"`x` is a slice with gaps: copied\.$"):
        strided = call(pools[0], x, weight, slots, starts)
    with silent():
        plain = call(pools[1], x.contiguous(), weight, slots, starts)
    assert torch.equal(strided, plain) and torch.equal(pools[0], pools[1])
    close(exact(strided), want, 4e-3)
    assert np.array_equal(exact(pools[0]), state)


@on_each
def test_slot_10_slots_of_any_integer_type(device: str) -> None:
    x, weight, pool = (normal(i, *shape, device=device) for i, shape in enumerate([(3, 5), (5, 4), (8, 5, 3)]))

    def update(pool, x, weight, slots):
        y, new = causal_conv1d_update(x, weight, conv_state=pool, state_indices=slots)
        return new, y

    before, call = pool.clone(), InPlace(update)
    for slots, error, words in (
        (torch.tensor([6.0, 1.0, 3.0]), TypeError, "`state_indices` has dtype float32"),
        (torch.tensor([[6], [1], [3]], dtype=torch.int32), ValueError, r"`state_indices` has shape \(3, 1\)"),
        (torch.tensor([6, 1, 3, 0], dtype=torch.int32), ValueError, r"`state_indices` has shape \(4,\)"),
        (torch.tensor([6, 1, 2**33 + 3]), ValueError, f"`slots` holds {2**33 + 3}"),
    ):
        with pytest.raises(error, match=words):
            call(pool, x, weight, slots.to(device))
        assert torch.equal(pool, before)
    want, state = reference.causal_conv1d_update(
        exact(x), exact(weight), conv_state=exact(before), state_indices=[6, 1, 3]
    )
    named = torch.tensor([6, 0, 1, 0, 3, 0], dtype=torch.int32, device=device)
    for slots, note in (
        (named[::2].contiguous(), ""),
        (named[::2].to(torch.uint8), ""),
        (named[::2], "`slots` is a slice with gaps"),
        (named[::2].long(), "`slots` is of dtype torch.int64"),
        (named.long()[::2], "`slots` is of dtype torch.int64"),
    ):
        pool.copy_(before)
        with pytest.warns(UserWarning, match=note) if note else silent():
            y = call(pool, x, weight, slots)
        close(exact(y), want, 1e-5)
        assert np.array_equal(exact(pool), state)


def run_threads(*works: Callable[[], None]) -> None:
    """All at once; the first error is raised here."""
    start, errors = threading.Barrier(len(works)), []

    def guarded(work: Callable[[], None]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@on_each
def test_jax_13_threads_with_a_setting_of_their_own(device: str) -> None:
    """A cold cache, mixed shapes, own pools: the bits of torch alone; x64 in one thread is that thread's own business."""
    shapes = [(4, 16), (2, 8), (3, 5, 4)]
    traces: list[Any] = []

    def step(pool, x, wide, *, layer):
        count = jnp.arange(2)  # as wide as the setting says
        traces.append((pool.shape, wide.dtype.name, count.dtype.name))
        return pool.at[layer].add(x), wide + 1, pool[layer], count

    call, wide = InPlace(step), torch.tensor([2**40], device=device)

    def work(i: int) -> None:
        shape = shapes[i % 3]
        pool = torch.zeros(shape, device=device)
        want, x64 = pool.clone(), i == 0
        with jax.enable_x64(True) if x64 else contextlib.nullcontext():
            for j in range(50):
                layer, x = j % shape[0], torch.full(shape[1:], float(i + j), device=device)
                if x64 and j % 2:
                    seen, row, count = call(pool, x, wide, layer=layer)
                    assert seen.item() == 2**40 + 1 and seen.dtype is torch.int64
                else:
                    with contextlib.nullcontext() if x64 else pytest.raises(ValueError, match=f"`wide` holds {2**40}"):
                        call(pool.clone(), x, wide, layer=layer)
                    seen, row, count = call(pool, x, wide.to(torch.int16), layer=layer)
                    assert seen.item() == 1 and seen.dtype is torch.int16
                assert torch.equal(row, want[layer]) and count.dtype is (torch.int64 if x64 else torch.int32)
                want[layer] += x
                assert torch.equal(pool, want)

    run_threads(*(lambda i=i: work(i) for i in range(8)))
    narrow, wide_too = ("int16", "int32"), [(shapes[0], "int16", "int64"), (shapes[0], "int64", "int64")]
    assert sorted(traces) == sorted([*((shape, *narrow) for shape in shapes), *wide_too])


# ------------------------------------------------------------------------------------------------------------ clean exits

ORDERS = ["torch, jax", "jax, torch"]


def exits(order: str, device: str, children: int) -> None:
    """A fresh interpreter, and `children` forked before the first use: a call (in every second one on a thread), then out."""
    code = f"""
import gc, os, sys, threading
import {order}, interop
def step(cache, x): return cache + x, cache.sum()
def use(i):
    call, pool = interop.InPlace(step), torch.zeros(64, device="{device}")
    def work():
        assert float(call(pool, torch.ones(64, device="{device}"))) == 0
    if i % 2:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
    assert pool.tolist() == [1] * 64
gc.freeze()  # or each child would walk through all that the imports have made
codes = []
for i in range({children}):
    child = os.fork()
    if child == 0:
        use(i)
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
use(0)
use(1)
print(codes)
"""
    # One thread before the fork. XLA may warn about the machine; its errors are shown.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "2"} | ({"JAX_PLATFORMS": "cpu"} if device == "cpu" else {})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", str([0] * children))


@pytest.mark.parametrize(("order", "children"), [(ORDERS[0], 12), (ORDERS[1], 11)])
def test_25_clean_exits(order: str, children: int) -> None:
    exits(order, "cpu", children)


@pytest.mark.gpu
def test_gpu_clean_exits() -> None:
    for i in range(5):
        exits(ORDERS[i % 2], "cuda", children=0)


# ------------------------------------------------------------------------------------------------------------------- soak


MODES = ["none", "one", "tree"]  # what a step returns


def soak_caches(device: str, ints: Callable[..., Tensor]) -> list[Any]:
    """Pytrees of whole numbers; `layer` is the first dimension."""
    config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=2, conv_kernel_dim=4, mtp_step=1)
    pools = GDNCache(config, num_layers=3, num_slots=4, device=device).state
    caches = [
        ints(3, 16, 8),
        (ints(2, 8, 4, dtype=torch.bfloat16), {"more": ints(2, 8)}),
        {"turned": ints(5, 4, dtype=torch.int32).t(), "flat": ints(4, 6, dtype=torch.int32), "none": None},
        [ints(3, 4, 5, dtype=torch.bfloat16).permute(2, 0, 1)],
        {"part": ints(4, 16, 16)[1], "odd": ints(16).as_strided((2, 1, 4), (4, 999, 1))},
        GDNState(*(pool.copy_(ints(*pool.shape)) for pool in pools)),
    ]
    return caches + ([ints(65)[1:].view(8, 8)] if device == "cpu" else [])  # not aligned: an error on a GPU


def soak_step(caches, x, *, layer, gain, mode):
    """Whole numbers that stay below 51, so that every dtype is exact; the place of every element matters."""
    amount = (x * jnp.arange(6, dtype=x.dtype).reshape(2, 3)).sum() % 5 * gain
    rows = [c[layer] for c in jax.tree.leaves(caches)]

    def push(c):
        return c.at[layer].set(jnp.clip(jnp.roll(c[layer], 1, -1) + amount.astype(c.dtype), -50, 50))

    new = jax.tree.map(push, caches)
    if mode == "none":
        return (new,)
    if mode == "one":
        return new, sum(row.astype(jnp.float32).sum() for row in rows)
    return new, {"x": x, "rows": rows, "none": None}, jax.tree.leaves(new)[0]


def soak_twin(caches: list[Tensor], x: Tensor, layer: int, gain: float, mode: str) -> Any:
    """`soak_step` in torch alone, in place."""
    amount = (x * torch.arange(6, dtype=x.dtype, device=x.device).view(2, 3)).sum() % 5 * gain
    rows = [c[layer].clone() for c in caches]
    for c, row in zip(caches, rows):
        c[layer] = (row.roll(1, -1) + amount.to(c.dtype)).clamp(-50, 50)
    if mode == "none":
        return None
    if mode == "one":
        return torch.stack([row.float().sum() for row in rows]).sum()
    return {"x": x, "rows": rows, "none": None}, caches[0]


def soak_failures(call: InPlace, x: Tensor, broken: list[InPlace]) -> list[tuple[type, str, Callable[[Any], Any]]]:
    """Calls on good caches that fail: an error, its words, and the call."""
    numbers: dict[str, Any] = dict(layer=0, gain=1.0, mode="none")
    more, device = torch.zeros(4, 8, device=x.device), x.device.type
    failures: list[tuple[type, str, Callable[[Any], Any]]] = [
        (ValueError, "`x` is of dtype torch.float64", lambda c: call(c, x.double(), **numbers)),
        (ValueError, f"`x` holds {2**40 + 7}, expected", lambda c: call(c, x.long() * 0 + 2**40 + 7, **numbers)),
        (ValueError, f"`layer` is {2**40}, expected an int of 32", lambda c: call(c, x, **numbers | {"layer": 2**40})),
        (ValueError, "share memory, expected", lambda c: call([c, jax.tree.leaves(c)[-1]], x, **numbers)),
        (ValueError, "share memory, expected", lambda c: call(c, jax.tree.leaves(c)[0], **numbers)),
        (ValueError, r"`caches\[1\]` is a slice with gaps", lambda c: call([c, more[:, ::2]], x, **numbers)),
        (ValueError, r"`caches\[1\]` is expanded", lambda c: call([c, more[:1].expand(4, 8)], x, **numbers)),
        (ValueError, "is part of an autograd graph", lambda c: call([c, more.clone().requires_grad_()], x, **numbers)),
        (TypeError, "`x` is of type ndarray", lambda c: call(c, x.cpu().numpy(), **numbers)),
        (TypeError, "static `mode` is unhashable", lambda c: call(c, x, **numbers | {"mode": []})),
        (KeyError, "inside", lambda c: broken[0](c)),
        (ValueError, "the new `caches.*expected", lambda c: broken[1](c)),
        (TypeError, "expected a tuple", lambda c: broken[2](c)),
    ]
    if device == "cuda":
        odd = torch.zeros(65, device=device)[1:].view(8, 8)
        return failures + [
            (ValueError, "a multiple of 16", lambda c: call([c, odd], x, **numbers)),
            (ValueError, "is on cpu, expected cuda:0", lambda c: call(c, x.cpu(), **numbers)),
        ]
    return failures + [
        (ValueError, "is True with caches on the CPU", lambda c: InPlace(soak_step, strict=True)(c, x, **numbers)),
        (jax.errors.JaxRuntimeError, "division by zero", lambda c: broken[3](c)),
    ]


@on_each
def test_soak(device: str) -> None:
    """2,000 calls of all kinds, every eighth of which fails: after each all caches are those of torch alone, in place."""
    generator, dice, traces = torch.Generator().manual_seed(0), random.Random(0), []

    def ints(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randint(-20, 20, shape, generator=generator).to(device, dtype)

    def step(caches, x, *, layer, gain, mode):
        traces.append(mode)
        return soak_step(caches, x, layer=layer, gain=gain, mode=mode)

    def fail(*_: Any) -> Any:
        raise KeyError("inside")

    def fail_late(caches):
        late = jax.pure_callback(lambda: 1 / 0, jax.ShapeDtypeStruct((), jnp.float32))
        return jax.tree.map(lambda c: c + late.astype(c.dtype), caches), late

    layouts: dict[str, tuple[Callable[[], Tensor], int]] = {  # an argument, and which of three programs takes it
        "plain": (lambda: ints(2, 3), 0),
        "turned": (lambda: ints(3, 2).t(), 1),
        "with gaps": (lambda: ints(2, 6)[:, ::2], 0),
        "expanded": (lambda: ints(1, 3).expand(2, 3), 0),
        "int32": (lambda: ints(2, 3, dtype=torch.int32), 2),
        "int64": (lambda: ints(2, 3, dtype=torch.int64), 2),
    }
    caches = soak_caches(device, ints)
    leaves = [jax.tree.leaves(tree) for tree in caches]
    every = [leaf for tree in leaves for leaf in tree]
    wants = [[leaf.clone(memory_format=torch.contiguous_format) for leaf in tree] for tree in leaves]
    every_want = [want for tree in wants for want in tree]
    facts = [(leaf.data_ptr(), leaf.stride()) for leaf in every]
    call = InPlace(step, static_argnames="mode")
    broken = [InPlace(fail), InPlace(lambda c: (jax.tree.map(lambda x: x[None], c),)), InPlace(lambda c: [c])]
    failures = soak_failures(call, ints(2, 3), [*broken, InPlace(fail_late)])
    programs, copies, failed = set(), 0, []
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        for i in range(2000):
            at = dice.randrange(len(caches))
            if i % 8 == 7:
                failed.append(dice.randrange(len(failures)))
                error, words, use = failures[failed[-1]]
                with pytest.raises(error, match=words):
                    use(caches[at])
            else:
                kind, gain = dice.choice(list(layouts)), dice.choice([1.0, -1.0, 2.0])
                make, taken_as = layouts[kind]
                x, mode = make(), MODES[(at + taken_as) % 3]
                layer = dice.randrange(min(len(leaf) for leaf in leaves[at]))
                programs.add((at, taken_as))
                copies += kind in ("with gaps", "expanded", "int64")
                got = call(caches[at], x, layer=layer, gain=gain, mode=mode)
                taken = x.int() if kind == "int64" else x
                want = soak_twin(wants[at], taken, layer, gain, mode)
                assert jax.tree.structure(got) == jax.tree.structure(want)
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
                    assert a.dtype is b.dtype and torch.equal(a, b)
                    assert a.data_ptr() not in [x.data_ptr(), *(fact[0] for fact in facts)]
            assert all(torch.equal(leaf, want) for leaf, want in zip(every, every_want)), i
            assert facts == [(leaf.data_ptr(), leaf.stride()) for leaf in every]
    assert len(notes) == copies > 500 and all("InPlace(step): `x` is" in str(note.message) for note in notes)
    assert set(failed) == set(range(len(failures)))
    assert len(traces) == len(programs) == len(caches) * 3, "one program for each caches, dtype and layout"


# ------------------------------------------------------------------------------------------- many steps of a whole model


def held(device: str) -> list[int]:
    """Bytes that torch, JAX's allocator and JAX's live arrays hold once all work is done."""
    live = sum(array.nbytes for array in jax.live_arrays())
    if device == "cpu":
        return [live]
    torch.cuda.synchronize()
    stats = jax.local_devices(backend="cuda")[0].memory_stats()
    return [torch.cuda.memory_allocated(), stats["bytes_in_use"], live]


@pytest.mark.parametrize("mtp_step", [0, 3])
@pytest.mark.parametrize(
    ("device", "layers", "heads", "dim", "steps"),
    [("cpu", 3, 2, 8, 40), pytest.param("cuda", 36, 16, 128, 1000, marks=pytest.mark.gpu)],
)
def test_many_steps_of_a_model(device: str, layers: int, heads: int, dim: int, steps: int, mtp_step: int) -> None:
    """Every layer gets the same inputs, so that all have to end alike: one program, flat memory, pools that never move."""
    config = GDNConfig(2 * heads, heads, dim, dim, conv_kernel_dim=4, mtp_step=mtp_step)
    cache, N, slots = GDNCache(config, layers, 32, device=device), 8, [30, 1, 4, 9, 16, 25, 0, 13]
    pools, traces, width = list(cache.state), [], config.qkvz_dim + config.ba_dim
    pointers = [pool.data_ptr() for pool in pools]
    weights = GDNWeights(
        normal(0, config.conv_dim, 4, device=device, dtype=torch.bfloat16), None,
        *(normal(i, 2 * heads, device=device) for i in (1, 2)),
    )  # fmt: skip
    index = torch.tensor(slots, dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(0)

    def decode(state, weights, mixed, slots, accepted, *, layer):
        traces.append(layer)
        if mtp_step:
            out = gdn_mtp_decode(
                weights, state, mixed, config=config, state_indices=slots, num_accepted_tokens=accepted, layer=layer
            )
        else:
            out = gdn_decode(weights, state, mixed, config=config, state_indices=slots, layer=layer)
        return out.state, out.o

    call, size, cold = InPlace(decode), 0, len(COMPILES)

    def step() -> int:
        mixed = torch.randn(N * (mtp_step + 1), width, generator=generator, device=device).bfloat16()
        accepted = torch.randint(1, mtp_step + 2, (N,), generator=generator, device=device, dtype=torch.int32)
        outputs = [call(cache.state, weights, mixed, index, accepted, layer=layer) for layer in range(layers)]
        return outputs[0].nbytes

    for _ in range(3):
        size = step()
    warm, compiles, slack = held(device), len(COMPILES), 4 * layers * size  # what four steps return
    for i in range(steps // (5 if mtp_step else 1)):
        step()
        if i % 100 == 0:
            assert all(now <= then + slack for now, then in zip(held(device), warm)), i
    assert all(now <= then + slack for now, then in zip(held(device), warm))
    assert len(traces) == 1 and len(COMPILES) == compiles > cold
    assert pointers == [pool.data_ptr() for pool in pools]
    rows = [slot * (mtp_step + 1) + j for slot in slots for j in range(mtp_step + 1)]
    for pool, named in zip(pools, (slots, rows)):
        others = sorted({*range(pool.shape[1])} - {*named})
        for layer in range(layers):
            assert torch.isfinite(pool[layer]).all() and torch.equal(pool[layer], pool[0])
        assert pool[0, named].flatten(1).any(1).all() and not pool[:, others].any()


@pytest.mark.gpu
def test_gpu_two_threads_on_two_streams() -> None:
    call = InPlace(lambda pool, x, *, layer: ((new := pool.at[layer].add(x)), new[layer]))

    def work(k: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            pool = torch.zeros(8, 1 << 20, device="cuda")
            want, wrong, pointer = pool.clone(), torch.zeros((), dtype=torch.int64, device="cuda"), pool.data_ptr()
            for i in range(200):
                x = torch.full((1 << 20,), float(100 * k + i), device="cuda")
                row = call(pool, x, layer=i % 8)
                want[i % 8] += x
                wrong += (row != want[i % 8]).sum()
                del x, row
            assert wrong.item() == 0 and torch.equal(pool, want) and pool.data_ptr() == pointer

    run_threads(lambda: work(1), lambda: work(2))
    assert len(call._executables) == 1
