"""`InPlace`: a pure JAX function over torch tensors, whose new caches end up in the caller's cache tensors.

The contract of one call, in the order of `InPlace.__call__`:

1. look at every leaf and refuse what cannot work, before anything is touched;
2. take the memory as it is: detached, row-major, under the tensors' device and current stream;
3. import it for this call alone;
4. compile once per `_Key`, donating the caches, and read in the compiled module that each is aliased to its own output;
5. run, and take the results on the current stream: already in the caches' memory, or copied back;
6. tell autograd that the caches have changed;
7. hold on to the inputs until the work is done (CPU: wait for it; GPU: the results' import makes the stream wait).

A tensor with permuted dimensions travels as the row-major array underneath and is transposed inside the compiled
function, so that every program has plain layouts and JAX aliases each cache by its place.
"""

import concurrent.futures
import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
import torch
from jax import ShapeDtypeStruct
from jax._src.config import trace_context  # what `jax.jit` looks at; no public name
from jax.experimental.layout import Format
from jax.tree_util import keystr, tree_flatten_with_path
from torch import Tensor

from interop import dlpack
from interop.dlpack import Seen

_NUMBERS: tuple[type, ...] = (bool, int, float, complex)
_Name = Callable[[int], str]
_Arrays = tuple[list[Any], list[Any]]  # caches, other arguments
_Done = tuple[list[jax.Array], Any]  # new caches, outputs
_Run = Callable[[list[Any], list[Any]], _Done]
_Permuted = tuple[torch.Size, torch.dtype, tuple[int, ...]]  # a tensor's row-major base, and the axes that gave it


class _Array(NamedTuple):
    """What identifies a JAX array among the arguments."""

    shape: tuple[int, ...]
    dtype: np.dtype
    weak_type: bool
    format: Format  # layout and device


class _Key(NamedTuple):
    """What one executable is compiled for."""

    cache_tree: Any
    rest_tree: Any
    static: tuple[tuple[int | str, type, Any], ...]
    caches: tuple[_Permuted, ...]
    rest: tuple[_Permuted | type | _Array, ...]
    device: torch.device
    context: Any  # JAX's settings that a trace depends on: x64, the precision of products, the mesh


class InPlace:
    """A pure `fn(caches, *args, **kwargs) -> (new_caches, *outputs)` as a function over torch tensors.

    The call takes torch tensors, numbers (traced: a new `layer=3` compiles nothing), None and JAX arrays in any pytree.
    It returns the outputs as torch tensors that never alias a cache: one, a tuple of several, None for none. When it
    returns, `caches` hold the new values, on a GPU in the order of the current stream. Calls from several threads are
    safe where they share no cache.

    Args:
        fn: returns a tuple; the new caches are a, shapes and dtypes of the old ones.
        strict: True makes an error of anything that would copy a cache, so on CPU of every call, since JAX copies a
            donated import there; False copies back. None: True on GPUs, False on CPUs.
        static_argnames: parameters of `fn` that are compiled in; hashable. Strings, configurations and flags go here.
        max_executables: compiled programs that are kept, the least recently used is dropped first.

    Raises:
        TypeError: (construction) `fn` cannot be called, a name is no parameter of it, or an option of another type;
            (call) a leaf of another type.
        ValueError: (construction) `max_executables` below 1; (call) tensors that cannot be exchanged, caches that overlap
            each other or an argument, new caches that differ from the old ones, tensors on different devices, a strict
            call that would copy, a torch dispatch mode that takes operators over: all before any cache is touched.
        RuntimeError: (call) a CUDA stream that is capturing; a process forked after use.

    Example:
        >>> def push(cache, x, *, slot):
        ...     return cache.at[slot].add(x), cache.sum()
        >>> pool = torch.zeros(4, 2)
        >>> InPlace(push)(pool, torch.ones(2), slot=1)
        tensor(0.)
        >>> pool[1]
        tensor([1., 1.])
    """

    def __init__(
        self,
        fn: Callable[..., tuple[Any, ...]],
        *,
        strict: bool | None = None,
        static_argnames: str | Sequence[str] = (),
        max_executables: int = 64,
    ) -> None:
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._where = f"InPlace({self._name})"
        self._fn, self._strict = fn, dlpack.flag(self._where, "strict", strict)
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError) as error:
            raise TypeError(f"{self._where}: `fn` is {fn!r}, expected a function with a signature.") from error
        if isinstance(max_executables, bool) or not isinstance(max_executables, int | np.integer):
            raise TypeError(f"{self._where}: `max_executables` is {max_executables!r}, expected an int.")
        if max_executables < 1:
            raise ValueError(f"{self._where}: `max_executables` is {max_executables}, expected at least 1.")
        self._max_executables = int(max_executables)
        if not isinstance(static_argnames, Iterable):
            raise TypeError(f"{self._where}: `static_argnames` is {static_argnames!r}, expected names of parameters.")
        self._static = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        self._positions = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in self._static:
            if not isinstance(name, str) or not (takes_any or name in [p.name for p in parameters]):
                raise TypeError(f"{self._where}: `static_argnames` has {name!r}, expected a parameter of the function.")
        self._executables: dict[_Key, concurrent.futures.Future[_Run]] = {}
        self._lock = threading.Lock()

    def __call__(self, caches: Any, /, *args: Any, **kwargs: Any) -> Any:
        where = self._where
        dlpack.check_process(where)
        static, args, kwargs = self._split_static(args, kwargs)
        old, cache_tree = jax.tree.flatten(caches)
        rest, rest_tree = jax.tree.flatten((args, kwargs))
        count = len(old)

        def name(i: int) -> str:
            return self._path(tree_flatten_with_path((caches, args, kwargs))[0][i][0])

        device = self._device([*old, *rest], count, name)
        strict = device.type == "cuda" if self._strict is None else self._strict
        if strict and device.type == "cpu" and old:
            why = "JAX copies a donated import on CPU, so that no cache can be updated in place there"
            raise ValueError(f"{where}: `strict` is True with caches on the CPU, expected False or None: {why}.")
        with dlpack.on_device(where, device):
            seen = [dlpack.examine(where, partial(name, i), t, cache=True, copy=not strict) for i, t in enumerate(old)]
            leaves = [self._leaf(leaf, partial(name, i), device) for i, leaf in enumerate(rest, count)]
            self._refuse_overlaps([*seen, *leaves], count, name)
            specs = tuple([_signature(s) for s in seen]), tuple([_signature(leaf) for leaf in leaves])
            key = _Key(cache_tree, rest_tree, static, *specs, device, trace_context())
            run = self._executable(key, strict, name)
            dlpack.warn(where, [(partial(name, i), s) for i, s in enumerate(leaves, count) if _is_noted(s)])
            done = self._run(run, self._import(seen, leaves, device), device)
            outputs = self._export(seen, done, device, strict, name)
        return None if not outputs else outputs[0] if len(outputs) == 1 else outputs

    # Step 1: what the caller gave.

    def _split_static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Takes the static arguments out; None keeps the place of a positional one."""
        if not self._static:
            return (), args, kwargs
        static: dict[Any, Any] = {i: args[i] for i, n in enumerate(self._positions[: len(args)]) if n in self._static}
        static |= {name: kwargs[name] for name in self._static if name in kwargs}
        for place, value in static.items():
            try:
                hash(value)
            except TypeError as error:
                name = place if isinstance(place, str) else self._positions[place]
                raise TypeError(f"{self._where}: static `{name}` is unhashable, expected a hashable value.") from error
        args = tuple(None if i in static else arg for i, arg in enumerate(args))
        kwargs = {name: value for name, value in kwargs.items() if name not in static}
        return tuple((place, type(value), value) for place, value in static.items()), args, kwargs

    def _path(self, path: tuple[Any, ...]) -> str:
        """`caches.conv`, `x`, `x['a']`, `args[3]`: the place of a leaf of `(caches, args, kwargs)`."""
        if path[0].idx == 0:
            return "caches" + keystr(path[1:])
        if path[0].idx == 2:
            return path[1].key + keystr(path[2:])
        i = path[1].idx
        return (self._positions[i] if i < len(self._positions) else f"args[{i}]") + keystr(path[2:])

    def _device(self, leaves: list[Any], count: int, name: _Name) -> torch.device:
        """The one device of all tensors; the first `count` leaves are caches and have to be tensors."""
        device, first = None, 0
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                if device is None:
                    device, first = leaf.device, i
                elif leaf.device != device:
                    raise ValueError(
                        f"{self._where}: `{name(i)}` is on {leaf.device}, expected {device} as `{name(first)}` is."
                    )
            elif i < count:
                raise TypeError(
                    f"{self._where}: `{name(i)}` is of type {type(leaf).__name__}, expected a torch.Tensor: a cache "
                    "lives in memory that torch owns."
                )
        if device is None:
            raise ValueError(f"{self._where}: no argument is a torch tensor, expected at least one.")
        return device

    def _leaf(self, leaf: Any, name: Callable[[], str], device: torch.device) -> Any:
        """A leaf of the arguments, ready to be imported: a `Seen`, a Python number or a JAX array on `device`."""
        if isinstance(leaf, Tensor):
            return dlpack.examine(self._where, name, leaf)
        if isinstance(leaf, np.generic):
            leaf = leaf.item()
        for kind in _NUMBERS:
            if isinstance(leaf, kind):
                bits = 63 if jax.config.jax_enable_x64 else 31
                if kind is int and not -(2**bits) <= leaf < 2**bits:
                    raise ValueError(f"{self._where}: `{name()}` is {leaf}, expected an int of {bits + 1} bits.")
                return kind(leaf)
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{self._where}: `{name()}` is of type {type(leaf).__name__}, expected a torch.Tensor, a number, None "
                "or a JAX array, or its name in `static_argnames`."
            )
        if leaf.is_deleted() or leaf.devices() != {dlpack.jax_device(device)}:
            what = "was deleted or donated" if leaf.is_deleted() else f"is on {leaf.devices()}"
            raise ValueError(f"{self._where}: `{name()}` {what}, expected a live array on {device}.")
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{self._where}: `{name()}` has dtype {leaf.dtype}, expected one with memory of its own; of a random key "
                "that is `jax.random.key_data`."
            )
        if leaf.dtype != jax.dtypes.canonicalize_dtype(leaf.dtype):
            raise ValueError(
                f"{self._where}: `{name()}` is a JAX array of dtype {leaf.dtype} while jax_enable_x64 is off, expected at "
                "most 32 bits (complex: 64), or x64 on."
            )
        return leaf

    def _refuse_overlaps(self, leaves: list[Any], count: int, name: _Name) -> None:
        """Refuses byte ranges that meet, where one of the two is a cache: one of the first `count` leaves."""
        ranges = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Seen):
                ranges.append((leaf.begin, leaf.end, i))
            elif isinstance(leaf, jax.Array) and leaf.size:
                begin = leaf.unsafe_buffer_pointer()
                ranges.append((begin, begin + leaf.nbytes, i))
        ranges.sort()
        last = last_cache = (0, 0, 0)  # of those that begin before, the one that ends last
        for this in ranges:
            begin, end, i = this
            other = last if i < count else last_cache
            if begin < min(end, other[1]):
                raise ValueError(
                    f"{self._where}: `{name(i)}` and `{name(other[2])}` share memory, expected a cache that shares "
                    "none: clone one of the two."
                )
            if end > last[1]:
                last = this
            if i < count and end > last_cache[1]:
                last_cache = this

    # Step 4: the executables.

    def _executable(self, key: _Key, strict: bool, name: _Name) -> _Run:
        """The executable for `key`: compiled by the first caller, awaited by those who come meanwhile."""
        with self._lock:
            future = self._executables.pop(key, None)
            mine = future is None
            future = self._executables[key] = future or concurrent.futures.Future()  # the latest used is the last
            if len(self._executables) > self._max_executables:
                del self._executables[next(iter(self._executables))]
        if mine:
            try:
                future.set_result(self._compile(key, strict, name))
            except BaseException as error:
                with self._lock:
                    self._executables.pop(key, None)
                future.set_exception(error)
        return future.result()

    def _compile(self, key: _Key, strict: bool, name: _Name) -> _Run:
        """Traces, checks the new caches, compiles, and reads the aliasing."""
        caches = range(len(key.caches))
        names = [name(i) for i in caches]  # now: what is compiled must not hold on to the caller's tensors
        sharding = jax.sharding.SingleDeviceSharding(dlpack.jax_device(key.device))

        def abstract(leaf: Any) -> Any:
            if isinstance(leaf, type):
                return leaf()
            if isinstance(leaf, _Array):
                return ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.format, weak_type=leaf.weak_type)
            return ShapeDtypeStruct(leaf[0], dlpack.DTYPES[leaf[1]], sharding=sharding)

        def body(rows: list[Any], rest: list[Any]) -> Any:
            old = [_as_given(x, spec) for x, spec in zip(rows, key.caches)]
            args, kwargs = jax.tree.unflatten(key.rest_tree, [_as_given(x, spec) for x, spec in zip(rest, key.rest)])
            places: Any = dict(enumerate(args)) | kwargs
            places |= {place: value for place, _, value in key.static}
            args = [places.pop(i) for i in range(len(args))]
            result = self._fn(jax.tree.unflatten(key.cache_tree, old), *args, **places)
            new = self._new_caches(result, key.cache_tree, old, names)
            return [x.transpose(spec[2]) for x, spec in zip(new, key.caches)], result[1:]

        body.__name__ = body.__qualname__ = self._name
        arguments = [abstract(leaf) for leaf in key.caches], [abstract(leaf) for leaf in key.rest]
        traced = jax.jit(body, donate_argnums=0, keep_unused=True).trace(*arguments)
        for path, x in tree_flatten_with_path(traced.out_info[1])[0]:
            if x.dtype not in dlpack.TORCH_DTYPES:
                raise ValueError(f"{self._where}: `outputs{keystr(path)}` has dtype {x.dtype}, which torch lacks.")
        for i in caches if strict else ():
            source = _origin(traced.jaxpr, traced.jaxpr.outvars[i])
            other = next((j for j in caches if traced.jaxpr.invars[j] is source), i)
            if other != i:
                raise ValueError(
                    f"{self._where}: the new `{names[i]}` is the old `{names[other]}`, expected a value in "
                    "its own memory; strict=False copies."
                )
        compiled = traced.lower().compile()
        aliases = read_aliases(compiled.as_text() or "")
        for parameter, output in aliases.items():
            if parameter in caches and parameter != output:
                raise ValueError(
                    f"{self._where}: XLA writes output {output} into the memory of `{names[parameter]}`, "
                    "expected that cache's new value: return the new caches in their places."
                )
        if all(i in aliases for i in caches):
            return compiled
        if strict:
            missing = next(names[i] for i in caches if i not in aliases)
            raise ValueError(f"{self._where}: XLA does not update `{missing}` in place, expected it; or strict=False.")
        # To run a donated import that is not aliased can abort a CUDA process: donate nothing.
        return jax.jit(body, keep_unused=True).lower(*arguments).compile()

    def _new_caches(self, result: Any, tree: Any, old: list[Any], names: list[str]) -> list[jax.Array]:
        """The leaves of the new caches, which have to look like the old ones."""
        if not isinstance(result, tuple) or not result:
            what = type(result).__name__
            raise TypeError(f"{self._where}: the function returned {what}, expected a tuple (new_caches, *outputs).")
        leaves, new_tree = jax.tree.flatten(result[0])
        if new_tree != tree:
            raise ValueError(
                f"{self._where}: the new caches are a {new_tree}, expected {tree}: is it (new_caches, *outputs)?"
            )
        new = [jax.numpy.asarray(x) for x in leaves]
        for name, x, was in zip(names, new, old):
            if (x.shape, x.dtype) != (was.shape, was.dtype):
                raise ValueError(
                    f"{self._where}: the new `{name}` is {x.dtype}{list(x.shape)}, expected {was.dtype}"
                    f"{list(was.shape)} as the old one is."
                )
        return new

    # Steps 3, 5 and 6: in, through and out.

    def _import(self, seen: list[Seen], leaves: list[Any], device: torch.device) -> _Arrays:
        """What the executable is called with: views of the tensors' memory, made for this call alone."""
        tensors = [s.base for s in (*seen, *leaves) if isinstance(s, Seen)]
        on_cpu = device.type == "cpu"
        views = iter(map(dlpack.host_view, tensors) if on_cpu else dlpack.import_tensors(tensors, device))
        return [next(views) for _ in seen], [next(views) if isinstance(leaf, Seen) else leaf for leaf in leaves]

    def _run(self, run: _Run, arrays: _Arrays, device: torch.device) -> _Done:
        """The new caches and the outputs; on a CPU computed, on a GPU under way."""
        done = run(*arrays)
        if device.type == "cpu":
            jax.block_until_ready(done)
        return done

    def _export(self, seen: list[Seen], done: _Done, device: torch.device, strict: bool, name: _Name) -> Any:
        """Each new cache in its place, and the outputs as torch tensors."""
        stream = dlpack.export_stream(device)
        for i, (cache, result) in enumerate(zip(seen, done[0])):
            self._land(cache, dlpack.export_array(result, stream), strict, partial(name, i))
        arrays, tree = jax.tree.flatten(done[1])
        return jax.tree.unflatten(tree, [dlpack.export_array(array, stream) for array in arrays])

    def _land(self, cache: Seen, result: Tensor, strict: bool, name: Callable[[], str]) -> None:
        """Puts a new cache where the old one is, unless it is there already, and tells autograd."""
        same = cache.begin == result.data_ptr() and result.stride() == cache.base.stride()
        if same or result.numel() == 0:
            if not cache.given.is_inference():
                torch.autograd.graph.increment_version(cache.given)
            return
        if strict:
            raise ValueError(
                f"{self._where}: `{name()}` was computed at {result.data_ptr():#x}, expected {cache.begin:#x}: JAX "
                "copied the donated import; strict=False copies back."
            )
        target = cache.given if cache.given.is_contiguous() else cache.given.permute(cache.axes)
        with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
            target.copy_(result)


def read_aliases(module: str) -> dict[int, int]:
    """The parameters of a compiled module that are aliased to an output: `{parameter: output}`.

    >>> read_aliases("HloModule jit_f, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, may-alias) }, x={}")
    {0: 0, 2: 1}
    """
    header = module.partition("\n")[0].partition("input_output_alias={")[2]
    return {int(p): int(o or 0) for o, p in re.findall(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)}


def _origin(jaxpr: Any, var: Any) -> Any:
    """The variable that `var` is a renaming or a transposition of, through nested jits."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "transpose" and var in equation.outvars:
            return _origin(jaxpr, equation.invars[0])
        if equation.primitive.name == "jit" and var in equation.outvars:
            inner = equation.params["jaxpr"].jaxpr
            source = _origin(inner, inner.outvars[equation.outvars.index(var)])
            return _origin(jaxpr, equation.invars[inner.invars.index(source)]) if source in inner.invars else var
    return var


def _signature(leaf: Any) -> Any:
    """What the executable depends on: of a number its type, so that its value is traced."""
    if isinstance(leaf, Seen):
        return (leaf.base.shape, leaf.base.dtype, leaf.axes)
    if isinstance(leaf, _NUMBERS):
        return type(leaf)
    return _Array(leaf.shape, leaf.dtype, leaf.weak_type, leaf.format)


def _is_noted(leaf: Any) -> bool:
    return isinstance(leaf, Seen) and bool(leaf.copied or leaf.detached)


def _as_given(array: Any, spec: Any) -> Any:
    """Inside the program: from the row-major base to the dimensions the caller sees."""
    if isinstance(spec, type | _Array):
        return array
    axes = spec[2]
    return array.transpose(sorted(range(len(axes)), key=axes.__getitem__))
