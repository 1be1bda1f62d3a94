"""`InPlace`: the caches keep their memory, whatever else happens; and what is refused leaves everything as it was."""

import gc
import threading
import time
import warnings
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from interop import InPlace, inplace, to_jax
from interop.inplace import read_aliases


class Pools(NamedTuple):
    """A pair, as `GDNState` is one."""

    conv: Tensor
    ssm: Tensor


def pools() -> Pools:
    return Pools(torch.zeros(2, 4, 16, dtype=torch.bfloat16), torch.zeros(2, 8, 32))


def add(state, x, *, layer=0):
    """Adds x to one layer of both pools; returns the sum before."""
    conv, ssm = state
    new = conv.at[layer].add(x.astype(conv.dtype)), ssm.at[layer].add(x)
    return Pools(*new) if isinstance(state, Pools) else new, ssm.sum()


# --------------------------------------------------------------------------------------------------- caches and outputs


def test_the_result_is_in_the_callers_memory() -> None:
    state, step = pools(), InPlace(add)
    facts = [(pool.data_ptr(), pool.stride()) for pool in state]
    for i in range(4):
        total = step(state, torch.ones(()), layer=1)
        assert isinstance(total, Tensor) and total.shape == () and float(total) == i * 256
    assert facts == [(pool.data_ptr(), pool.stride()) for pool in state]
    for pool in state:
        assert (pool[1] == 4).all() and not pool[0].any()


@pytest.mark.parametrize("tree", ["one", "dict", "nested", "with None", "none"])
def test_trees_of_caches(tree: str) -> None:
    a, b = torch.zeros(16), torch.zeros(3, 16)
    caches = {"one": a, "dict": {"a": a, "b": [b]}, "nested": ((a,), {"x": Pools(b, torch.zeros(1))})}
    caches |= {"with None": [a, None, b], "none": ()}
    x = torch.ones(())
    InPlace(lambda caches, x: (jax.tree.map(lambda c: c + x, caches),))(caches[tree], x)
    for cache in jax.tree.leaves(caches[tree]):
        assert (cache == 1).all()


def test_outputs() -> None:
    cache, x = torch.zeros(4), torch.ones(4)
    assert InPlace(lambda c: ((c),))(cache) is None
    assert torch.equal(InPlace(lambda c, x: (c, x * 2))(cache, x), x * 2)
    both = InPlace(lambda c, x: (c, x * 2, x > 0))(cache, x)
    assert isinstance(both, tuple) and torch.equal(both[1], x > 0)
    nested = InPlace(lambda c, x: (c, {"y": [x + 1, None], "n": 3}))(cache, x)
    assert torch.equal(nested["y"][0], x + 1) and nested["y"][1] is None and int(nested["n"]) == 3


def test_outputs_alias_nothing() -> None:
    cache, x = torch.zeros(64), torch.ones(64)

    def step(cache, x, array):
        new = cache + 1
        return new, new, cache, new, x, array

    array = jnp.zeros(64)
    outputs = InPlace(step)(cache, x, array)
    pointers = {t.data_ptr() for t in (cache, x, *outputs)}
    assert len(pointers) == 7 and array.unsafe_buffer_pointer() not in pointers
    for output in outputs:
        output.fill_(9)
    assert (cache == 1).all() and (x == 1).all() and not array.any()


@pytest.mark.parametrize("order", ["caches first", "outputs first"])
def test_equal_shapes_are_not_mixed_up(order: str) -> None:
    """JAX-01: donated buffers go to outputs of the same type, which must be their own caches."""
    caches = [torch.full((8, 16, 3), float(i)) for i in range(3)]

    def step(caches, x):
        outputs = [x + i for i in range(3)]
        new = [c * 10 + x for c in caches] if order == "caches first" else [x + c * 10 for c in caches]
        return new, *outputs

    outputs = InPlace(step)(caches, torch.ones(8, 16, 3))
    assert [c.unique().tolist() for c in caches] == [[1], [11], [21]]
    assert [o.unique().tolist() for o in outputs] == [[1], [2], [3]]


def test_what_fn_does_not_use_or_change() -> None:
    unused, kept, overwritten = torch.full((3,), 7.0), torch.ones(3), torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no "donated buffers were not usable" either
        InPlace(lambda c, x: ((c[0], c[1], jnp.zeros(3)),))((unused, kept, overwritten), 1)
    assert (unused == 7).all() and (kept == 1).all() and not overwritten.any()


@pytest.mark.parametrize("inner", [False, True])
def test_swapped_caches_are_copied(inner: bool) -> None:
    a, b = torch.ones(64), torch.full((64,), 2.0)

    def swap(caches):
        return ((caches[1], caches[0]),)

    step = InPlace(jax.jit(swap) if inner else swap)
    step((a, b))
    assert (a == 2).all() and (b == 1).all()
    # Where every copy is an error it is refused before anything is compiled.
    key = next(iter(step._executables))
    with pytest.raises(ValueError, match=r"the new `x\[0\]` is the old `x\[1\]`, expected a value in its own memory"):
        step._compile(key, True, "x[{}]".format)


def test_one_cache_returned_twice() -> None:
    a, b = torch.ones(64), torch.full((64,), 2.0)
    InPlace(lambda caches: ((caches[0], caches[0]),))((a, b))
    assert (a == 1).all() and (b == 1).all()


def test_new_caches_from_each_other_stay_in_their_places() -> None:
    caches = [torch.full((64,), float(i)) for i in range(3)]
    step = InPlace(lambda c: ([c[1] + 10, c[2] + 10, c[0] + 10],))
    step(caches)
    assert [c.unique().tolist() for c in caches] == [[11], [12], [10]]
    step._compile(next(iter(step._executables)), True, str)


def test_permuted_caches_and_arguments() -> None:
    cache, x = torch.zeros(6, 4).t(), torch.arange(24.0).reshape(6, 4).t()
    InPlace(lambda c, x: (c.at[1].set(x[2]),))(cache, x)
    expected = torch.zeros(4, 6)
    expected[1] = x[2]
    assert torch.equal(cache, expected) and cache.stride() == (1, 4)


def test_jax_arrays_pass_through() -> None:
    cache, weight = torch.zeros(4, 6), jnp.arange(24.0).reshape(4, 6)
    permuted, traces = to_jax(torch.arange(24.0).reshape(6, 4).t()), []

    def step(cache, *, weights):
        traces.append(0)
        return cache + weights[0], weights[0][1]

    call = InPlace(step)
    row = call(cache, weights=[weight])
    assert np.array_equal(cache, weight) and np.array_equal(row, weight[1])
    row = call(cache, weights=[permuted])
    assert np.array_equal(cache, weight + permuted) and np.array_equal(row, permuted[1])
    call(cache, weights=[weight + 1])
    assert len(traces) == 2 and not weight.is_deleted()
    for key in call._executables:  # whatever the layouts of the arguments, the cache is aliased
        call._compile(key, True, str)


def test_closed_over_constants() -> None:
    cache, weight = torch.zeros(64), jnp.arange(64.0)
    InPlace(lambda c: (c + weight + np.ones(64, np.float32),))(cache)
    assert np.array_equal(cache, weight + 1)


# ------------------------------------------------------------------------------------------------- numbers and statics


def test_numbers_are_traced() -> None:
    traces, seen = [], []

    def step(cache, i, f, flag, *, layer):
        traces.append(0)
        seen.append([jnp.result_type(v).name for v in (i, f, flag)])
        return cache.at[layer].add(i * f * flag), cache.astype(jnp.bfloat16) * f

    call, cache = InPlace(step), torch.zeros(4)
    for layer in range(4):
        out = call(cache, layer + 1, 0.5, True, layer=layer)
        assert out.dtype is torch.bfloat16, "a Python number is weakly typed"
    assert cache.tolist() == [0.5, 1, 1.5, 2] and len(traces) == 1
    call(cache, np.int64(3), np.float64(1.0), np.bool_(False), layer=np.int32(0))
    assert cache[0] == 0.5 and len(traces) == 1
    call(cache, 1.0, 1.0, True, layer=0)
    assert len(traces) == 2, "a float where an int was is another program"


def test_a_number_beyond_int32_is_refused() -> None:
    cache = torch.zeros(4)
    with pytest.raises(ValueError, match=rf"`i` is {2**40}, expected an int of 32 bits"):
        InPlace(lambda c, i: (c + i,))(cache, 2**40)
    assert not cache.any()
    with jax.enable_x64(True):
        InPlace(lambda c, i: (c.at[0].set(i),))(cache, 2**40)
    assert cache[0] == 2**40


def test_static_arguments() -> None:
    traces = []

    def step(cache, mode, x, *, scale=1):
        traces.append((mode, scale))
        return (cache + x if mode == "add" else cache * x) * scale, cache[0]

    for names in (("mode", "scale"), ["scale", "mode"]):
        traces.clear()
        call, cache, x = InPlace(step, static_argnames=names), torch.ones(3), torch.full((3,), 3.0)
        call(cache, "add", x)
        call(cache, x=x, mode="mul")
        call(cache, "mul", x, scale=2)
        call(cache, "mul", x, scale=2)
        assert cache.tolist() == [432, 432, 432]
        assert traces == [("add", 1), ("mul", 1), ("mul", 2)]
    call(cache, "mul", x, scale=True)
    assert traces[-1] == ("mul", True) and len(traces) == 4, "True is not 1"


def test_static_errors() -> None:
    with pytest.raises(TypeError, match="`static_argnames` has 'modes', expected a parameter"):
        InPlace(lambda cache, mode: (cache,), static_argnames="modes")
    with pytest.raises(TypeError, match="static `mode` is unhashable"):
        InPlace(lambda cache, mode: (cache,), static_argnames="mode")(torch.zeros(1), [1])
    with pytest.raises(TypeError, match=r"`mode` is of type str, expected .* `static_argnames`"):
        InPlace(lambda cache, mode: (cache,))(torch.zeros(1), "add")
    with pytest.raises(TypeError, match="`static_argnames` has 3, expected a parameter"):
        InPlace(lambda cache, **kwargs: (cache,), static_argnames=[3])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fn": 3}, TypeError, r"InPlace\(int\): `fn` is 3, expected a function with a signature"),
        ({"static_argnames": 3}, TypeError, "`static_argnames` is 3, expected names of parameters"),
        ({"max_executables": "x"}, TypeError, "`max_executables` is 'x', expected an int"),
        ({"max_executables": True}, TypeError, "`max_executables` is True, expected an int"),
        ({"max_executables": 0}, ValueError, "`max_executables` is 0, expected at least 1"),
        ({"strict": "no"}, TypeError, "`strict` is 'no' of type str, expected True, False or None"),
        ({"strict": 0}, TypeError, "`strict` is 0 of type int, expected True, False or None"),
    ],
)
def test_wrong_options(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        InPlace(**{"fn": lambda cache: (cache,)} | options)


# -------------------------------------------------------------------------------------------------------------- refused


def test_numpy_options() -> None:
    cache = torch.zeros(3)
    InPlace(lambda c: (c + 1,), strict=np.bool_(False), max_executables=np.int64(2))(cache)
    assert (cache == 1).all()


def test_wrong_types() -> None:
    step = InPlace(lambda caches, *args, **kwargs: (caches,))
    with pytest.raises(TypeError, match=r"`caches\.ssm` is of type ndarray, expected a torch.Tensor"):
        step(Pools(torch.zeros(1), np.zeros(1)))
    with pytest.raises(TypeError, match=r"`caches` is of type ArrayImpl.*memory that torch owns"):
        step(jnp.zeros(1))
    with pytest.raises(TypeError, match=r"`args\[1\]\['k'\]` is of type ndarray"):
        step(torch.zeros(1), None, {"k": np.zeros(1)})
    with pytest.raises(TypeError, match=r"`more\[0\]` is of type object"):
        step(torch.zeros(1), more=[object()])
    with pytest.raises(ValueError, match="no argument is a torch tensor"):
        step((), 1)


def overlap_cases() -> dict:
    buffer = torch.zeros(8, 64)
    x = torch.zeros(64)
    return {
        "the same twice": ([x, x], (), r"`caches\[[01]\]` and `caches\[[01]\]` share memory"),
        "a view of it": ([x, x.view(8, 8).t()], (), r"`caches\[[01]\]` and `caches\[[01]\]` share memory"),
        "by one element": ([buffer[0:2], buffer.view(-1)[127:200]], (), "share memory"),
        "inside": ([buffer[3], buffer], (), "share memory"),
        "far apart in the order": ([buffer, buffer[0], buffer[7]], (), "share memory"),
        "an argument": ([x], (x[3:5],), r"`a` and `caches\[0\]` share memory"),
        "a strided argument": ([buffer], (buffer[:, ::2],), "share memory"),
        "an expanded argument": ([x], (x[:1].expand(5),), "share memory"),
        "a parameter over it": ([x], (torch.nn.Parameter(x),), "share memory"),
        "a JAX array over it": ([x], (to_jax(x),), r"share memory"),
        "a late argument": (
            [x],
            (torch.zeros(3), 2, torch.zeros(2), x),
            r"`args\[3\]` and `caches\[0\]`|`caches\[0\]`",
        ),
    }


@pytest.mark.parametrize("case", overlap_cases())
def test_overlaps_are_refused(case: str) -> None:
    caches, args, words = overlap_cases()[case]
    traces = []

    def step(caches, a=0, *args):
        traces.append(0)
        return ([c + 1 for c in caches],)

    with pytest.raises(ValueError, match=words):
        InPlace(step)(caches, *args)
    assert not any(c.any() for c in caches) and not traces


def test_views_of_one_buffer_are_no_overlap() -> None:
    """LightLLM's caches are layers of one buffer: byte ranges count, not storages."""
    buffer = torch.zeros(4, 2, 64)
    x = buffer[3, 0]
    InPlace(lambda caches, x: ([c + 1 for c in caches],))([buffer[1], buffer[0, 0], buffer[0, 1]], x)
    assert buffer.sum((1, 2)).tolist() == [128, 128, 0, 0]
    InPlace(lambda cache, a, b: (cache + 1,))(buffer[2], x, x)  # arguments may share
    InPlace(lambda caches: ([c + 1 for c in caches],))([buffer[3], torch.zeros(0), buffer[3][:0]])
    assert buffer.sum((1, 2)).tolist() == [128, 128, 128, 128]


BAD_RESULTS = {
    "no tuple": (lambda c, d: c[0], TypeError, r"returned .*Tracer, expected a tuple \(new_caches, \*outputs\)"),
    "empty": (lambda c, d: (), TypeError, r"returned tuple, expected a tuple \(new_caches, \*outputs\)"),
    "another tree": (lambda c, d: (c[0], d), ValueError, "the new caches are a"),
    "a list for a tuple": (lambda c, d: ([c.conv, c.ssm],), ValueError, "the new caches are a"),
    "bare caches": (lambda c, d: c, ValueError, r"the new caches are a .*is it \(new_caches, \*outputs\)"),
    "shape": (
        lambda c, d: (c._replace(ssm=c.ssm[:1]),),
        ValueError,
        r"new `caches\.ssm` is float32\[1, 8, 32\], expected",
    ),
    "dtype": (lambda c, d: (c._replace(conv=c.ssm + c.conv.sum()),), ValueError, r"new `caches\.conv` is float32"),
    "promoted": (lambda c, d: (c._replace(conv=c.conv + d),), ValueError, r"new `caches\.conv` .* expected bfloat16"),
    "output dtype": (
        lambda c, d: (c, d.astype(jnp.int4)),
        ValueError,
        r"`outputs\[0\]` has dtype int4, which torch lacks",
    ),
    "output key": (lambda c, d: (c, [d, jax.random.key(0)]), ValueError, r"`outputs\[0\]\[1\]` has dtype key"),
}


@pytest.mark.parametrize("case", BAD_RESULTS)
def test_results_that_do_not_fit(case: str) -> None:
    fn, error, words = BAD_RESULTS[case]
    state = pools()
    for _ in range(2):  # the failure is not remembered as a program
        with pytest.raises(error, match=r"InPlace\(<lambda>\): .*" + words):
            InPlace(fn)(state, torch.ones(2, 4, 16))
    assert not any(pool.any() for pool in state)


def test_an_error_inside_fn_leaves_the_caches() -> None:
    calls = []

    def fn(cache):
        calls.append(0)
        if len(calls) == 1:
            raise KeyError("inside")
        return (cache + 1,)

    step, cache = InPlace(fn), torch.zeros(3)
    with pytest.raises(KeyError, match="inside"):
        step(cache)
    assert not cache.any()
    step(cache)
    assert (cache == 1).all()


def test_an_error_at_run_time_leaves_the_caches() -> None:
    def fail(x):
        raise RuntimeError("at run time")

    def step(cache, x):
        y = jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x)
        return cache + y, y

    cache = torch.zeros(3)
    with pytest.raises(jax.errors.JaxRuntimeError, match="at run time"):
        InPlace(step)(cache, torch.ones(()))
    assert not cache.any()


def test_refused_tensors_leave_the_others_alone() -> None:
    state, traces = pools(), []

    def step(state, x):
        traces.append(0)
        return (jax.tree.map(lambda c: c + 1, state),)

    for bad in (torch.zeros(3, dtype=torch.float64), torch.eye(3).to_sparse(), torch.tensor([2**40])):
        with pytest.raises(ValueError):
            InPlace(step)(state, bad)
    for bad in (torch.zeros(3, requires_grad=True), torch.zeros(3).expand(2, 3), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match=r"`caches\['bad'\]`"):
            InPlace(step)({"good": state.ssm, "bad": bad}, torch.zeros(1))
    assert not traces and not any(pool.any() for pool in state)


def test_devices_must_agree() -> None:
    with pytest.raises(ValueError, match=r"`x` is on meta, expected cpu as `caches` is"):
        InPlace(lambda c, x: (c,))(torch.zeros(1), torch.zeros(1, device="meta"))
    if len(jax.devices("cpu")) > 1:
        other = jax.device_put(jnp.zeros(1), jax.devices("cpu")[1])
        with pytest.raises(ValueError, match=r"`x` is on .*, expected a live array on cpu"):
            InPlace(lambda c, x: (c,))(torch.zeros(1), other)
    gone = jnp.zeros(1)
    gone.delete()
    with pytest.raises(ValueError, match="`x` was deleted or donated"):
        InPlace(lambda c, x: (c,))(torch.zeros(1), gone)


def test_jax_arrays_that_cannot_pass() -> None:
    cache, call = torch.zeros(4), InPlace(lambda c, x: (c + 1,))
    with pytest.raises(TypeError, match=r"`x` has dtype key<fry>, expected .*key_data"):
        call(cache, jax.random.key(0))
    with jax.enable_x64(True):
        wide = jnp.arange(4)
    with pytest.raises(ValueError, match="`x` is a JAX array of dtype int64 while jax_enable_x64 is off"):
        call(cache, wide)
    assert not cache.any() and not call._executables
    with jax.enable_x64(True):
        call(cache, wide)
    call(cache, jax.random.key_data(jax.random.key(0)))
    assert (cache == 2).all()


def test_strict_on_cpu_says_why() -> None:
    cache = torch.zeros(3)
    with pytest.raises(ValueError, match=r"`strict` is True with caches on the CPU.*JAX copies a donated import"):
        InPlace(lambda c: (c + 1,), strict=True)(cache)
    assert not cache.any()
    for strict in (False, None):
        InPlace(lambda c: (c + 1,), strict=strict)(cache)
    assert (cache == 2).all()


# ------------------------------------------------------------------------------------------------- the compiled module


def module(fn, *arguments) -> str:
    return jax.jit(fn, donate_argnums=0, keep_unused=True).lower(*arguments).compile().as_text() or ""


def test_aliases_are_read() -> None:
    a, b = jnp.zeros(64), jnp.zeros((2, 64))
    assert read_aliases(module(lambda c: c + 1, a)) == {0: 0}
    assert read_aliases(module(lambda c: ([c[0] + 1, c[1] * 2], c[0]), [a, b])) == {0: 0, 1: 1}
    assert read_aliases(jax.jit(lambda c, x: (c[:3], x)).lower(a, b).compile().as_text() or "") == {}
    assert read_aliases(module(lambda c: (c[1] + 1, c[0] + 1), [a, b])) == {0: 1, 1: 0}, "shapes decide"
    assert read_aliases("") == {}


@pytest.mark.parametrize("strict", [False, True])
def test_what_the_module_does_not_alias(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, step = [torch.zeros(3), torch.zeros(3)], InPlace(lambda c, x: ([c[0] + x, c[1] + 2],))
    step(cache, 1)
    key = next(iter(step._executables))
    monkeypatch.setattr(inplace, "read_aliases", lambda text: {0: 0})
    if strict:
        with pytest.raises(ValueError, match=r"XLA does not update `c1` in place, expected it; or strict=False"):
            step._compile(key, True, "c{}".format)
    else:
        step._executables.clear()
        step(cache, 1)
        assert [c.tolist() for c in cache] == [[2, 2, 2], [4, 4, 4]]


@pytest.mark.parametrize("aliases", [{0: 1, 1: 0}, {0: 2, 1: 1}])
def test_a_cache_written_by_another_output_is_refused(aliases: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = [torch.zeros(3), torch.zeros(3)]
    monkeypatch.setattr(inplace, "read_aliases", lambda text: aliases)
    with pytest.raises(ValueError, match=rf"XLA writes output {aliases[0]} into the memory of `caches\[0\]`"):
        InPlace(lambda c: ([x + 1 for x in c], c[0]))(cache)
    assert not any(c.any() for c in cache)


# ------------------------------------------------------------------------------------------------------------- autograd


def test_a_changed_cache_is_seen_by_autograd() -> None:
    cache, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    loss = (weight * cache).sum()
    version = cache._version
    InPlace(lambda c: (c + 1,))(cache)
    assert cache._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (weight * cache).sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("cache", [torch.zeros(0), torch.zeros(3)])
def test_landing_in_the_same_memory_bumps_the_version(cache: Tensor) -> None:
    step = InPlace(lambda c: (c,))
    seen = inplace.dlpack.examine("f", lambda: "c", cache, cache=True)
    version = cache._version
    step._land(seen, cache.detach(), True, lambda: "c")  # as on a GPU
    assert cache._version == version + 1
    if cache.numel():
        with pytest.raises(ValueError, match=r"`c` was computed at 0x.*, expected 0x.*: JAX copied the donated import"):
            step._land(seen, cache.clone(), True, lambda: "c")


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("used", ["grad", "no_grad", "inference_mode"])
def test_grad_modes(made: bool, used: str) -> None:
    with torch.inference_mode(made):
        cache = torch.zeros(4, 8)
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[used]
    step = InPlace(lambda c: (c + 1, c))
    with mode():
        step(cache)
        step(cache[1:3])
    assert cache[:, 0].tolist() == [1, 2, 2, 1]


def test_a_view_of_a_leaf_is_refused_also_without_grad() -> None:
    weight = torch.zeros(4, requires_grad=True)
    with torch.no_grad():
        view = weight[:2]
        with pytest.raises(ValueError, match="`caches` is part of an autograd graph"):
            InPlace(lambda c: (c + 1,))(view)
    assert not weight.any()


# ---------------------------------------------------------------------------------------------- programs and lifetimes


def test_a_warm_call_traces_nothing() -> None:
    traces = []

    def step(state, x, *, layer):
        traces.append(0)
        return add(state, x, layer=layer)

    call = InPlace(step)
    for i in range(3):
        call(pools(), torch.ones(()), layer=i % 2)  # other tensors, other numbers, the same program
    assert len(traces) == 1
    call(tuple(pools()), torch.ones(()), layer=0)
    call(pools(), torch.ones(1), layer=0)
    call(pools(), torch.ones((), dtype=torch.bfloat16), layer=0)
    assert len(traces) == 4
    transposed = Pools(torch.zeros(2, 16, 4, dtype=torch.bfloat16).transpose(1, 2), torch.zeros(2, 8, 32))
    call(transposed, torch.ones(()), layer=0)
    assert len(traces) == 5
    with jax.enable_x64(True):
        call(pools(), torch.ones(()), layer=0)
    call(pools(), torch.ones(()), layer=0)
    assert len(traces) == 6
    for _ in range(2):
        with jax.default_matmul_precision("bfloat16"):  # a setting that a product's trace depends on, as for jax.jit
            call(pools(), torch.ones(()), layer=0)
    call(pools(), torch.ones(()), layer=0)
    assert len(traces) == 7


def test_the_least_recently_used_program_goes() -> None:
    traces = []
    call = InPlace(lambda c: (traces.append(c.shape[0]), (c + 1,))[1], max_executables=2)
    for n in (1, 2, 1, 3, 1, 2):
        call(torch.zeros(n))
    assert traces == [1, 2, 3, 2] and len(call._executables) == 2
    assert InPlace(add)._max_executables == 64


def test_nothing_holds_on_to_tensors() -> None:
    def step(state, x, *, layer):
        return add(state, x, layer=layer)

    call = InPlace(step)
    state, x = pools(), torch.ones(1, 1)
    call(state, x, layer=0)
    alive = [weakref.ref(t) for t in (*state, x)]
    del state, x
    gc.collect()
    call(pools(), torch.ones(1, 1), layer=0)
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


def test_storage_can_be_resized_afterwards() -> None:
    x = torch.ones(8)
    InPlace(lambda c, x: (c + x,))(torch.zeros(8), x)
    assert x.resize_(100).shape == (100,)


def test_many_steps_leave_memory_flat() -> None:
    """DLP-13 and JAX-07: a thousand donated steps, without a warning, beside views of the pool."""
    call, state = InPlace(add), pools()
    view = to_jax(state.ssm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(1000):
            call(state, torch.ones(()), layer=i % 2)
    assert (state.ssm == 500).all() and np.array_equal(view, state.ssm)
    gc.collect()
    assert sum(a.nbytes for a in jax.live_arrays() if a.shape == (2, 8, 32)) <= 2 * view.nbytes


def test_threads_share_the_programs() -> None:
    traces, start = [], threading.Barrier(8)

    def step(cache, x, *, layer):
        traces.append(0)
        time.sleep(0.05)
        return cache.at[layer].add(x), cache.sum()

    call, caches, errors = InPlace(step), [torch.zeros(2, 64) for _ in range(8)], []

    def work(cache: Tensor, x: float) -> None:
        start.wait()
        try:
            for i in range(50):
                assert float(call(cache, torch.full((), x), layer=i % 2)) == 64 * i * x
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(cache, float(i))) for i, cache in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(traces) == 1
    assert [cache.unique().tolist() for cache in caches] == [[25.0 * i] for i in range(8)]


def test_a_failure_reaches_every_waiting_thread() -> None:
    start, errors = threading.Barrier(4), []

    def step(cache):
        time.sleep(0.1)
        raise KeyError("broken")

    call = InPlace(step)

    def work() -> None:
        start.wait()
        try:
            call(torch.zeros(3))
        except KeyError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4 and not call._executables


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_gpu_in_place() -> None:
    state = Pools(*(pool.cuda() for pool in pools()))
    facts = [(pool.data_ptr(), pool.stride()) for pool in state]
    call, versions = InPlace(add), [pool._version for pool in state]
    for i in range(10):
        total = call(state, torch.ones((), device="cuda"), layer=1)
        assert float(total) == i * 256 and total.data_ptr() not in [f[0] for f in facts]
    assert facts == [(pool.data_ptr(), pool.stride()) for pool in state]
    assert all((pool[1] == 10).all() and not pool[0].any() for pool in state)
    assert all(pool._version > version for pool, version in zip(state, versions))


@pytest.mark.gpu
def test_gpu_copies_no_byte_of_a_cache() -> None:
    cache, x = torch.zeros(4, 1 << 26, device="cuda"), torch.ones(1, device="cuda")  # 1 GiB
    call = InPlace(lambda c, x: (c.at[1, :8].add(x),))
    call(cache, x)
    stats = jax.local_devices(backend="cuda")[0].memory_stats() or {}
    assert stats.get("peak_bytes_in_use", 0) < cache.nbytes // 2
    assert cache.sum() == 8


@pytest.mark.gpu
def test_gpu_permuted_and_misaligned() -> None:
    cache = torch.zeros(6, 4, device="cuda").t()
    InPlace(lambda c: (c.at[1].add(1),))(cache)
    assert cache.sum() == 6 and cache[1].sum() == 6
    odd = torch.zeros(65, device="cuda")[1:]
    with pytest.raises(ValueError, match="a multiple of 16"):
        InPlace(lambda c: (c + 1,))(odd)
    assert not odd.any()
    InPlace(lambda c: (c + 1,), strict=False)(odd)
    assert (odd == 1).all()


@pytest.mark.gpu
def test_gpu_swapped() -> None:
    a, b = torch.ones(64, device="cuda"), torch.full((64,), 2.0, device="cuda")
    with pytest.raises(ValueError, match=r"the new `caches\[0\]` is the old `caches\[1\]`"):
        InPlace(lambda c: ((c[1], c[0]),))((a, b))
    InPlace(lambda c: ((c[1], c[0]),), strict=False)((a, b))
    assert (a == 2).all() and (b == 1).all()


@pytest.mark.gpu
def test_gpu_side_stream_and_lifetimes() -> None:
    """DLP-09: no synchronisation by the caller, inputs dropped at once."""
    cache = torch.zeros(1 << 24, device="cuda")
    call, stream = InPlace(lambda c, x: (c + x, x.sum())), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for i in range(100):
            x = torch.zeros(1 << 24, device="cuda")
            x.add_(1)
            total = call(cache, x)
            del x
            torch.full((1 << 24,), -1.0, device="cuda")  # takes the memory that x has left
            if i % 10 == 0:
                assert float(total) == 1 << 24
        assert (cache == 100).all()


@pytest.mark.gpu
def test_gpu_and_cpu_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"`x` is on cpu, expected cuda:0 as `caches` is"):
        InPlace(lambda c, x: (c + x,))(torch.zeros(3, device="cuda"), torch.zeros(3))
