"""The norm kernel: in the interpreter against the reference, lowered for an H200, and on a GPU."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import bits, close, normal, same
from kernels import BF16, F16, F32, h200, interpret, lowered

import gdn_jax
from gdn_jax import gated_rms_norm, reference
from gdn_jax.mosaic import norm

NAMES = ("o", "z", "weight")
DIMS = (64, 128, 256)
DTYPES = list(itertools.product((BF16, F32, F16), repeat=3))  # of o, z and the weight
TOL = {BF16: 5e-3, F32: 2e-6, F16: 1.25e-3}  # three roundings, as in tests/test_norm.py
ids = lambda dtypes: "-".join(dtype.__name__ for dtype in dtypes)  # noqa: E731


def make(seed: int, dtypes: Any, *shape: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = (shape, shape, shape[-1:])
    return {name: normal(rng, *sizes).astype(dtype) for name, sizes, dtype in zip(NAMES, shapes, dtypes)}


def run(call: dict[str, Any], eps: float = 1e-6) -> np.ndarray:
    """The kernel itself, in the interpreter."""
    return np.asarray(interpret(norm.norm, *(jnp.asarray(call[name]) for name in NAMES), jnp.float32(eps)))


def rounded(call: dict[str, Any], eps: float = 1e-6) -> np.ndarray:
    """The specification in numpy, rounding by rounding."""
    o, z, weight = (call[name].astype(F32) for name in NAMES)
    dtype = call["o"].dtype
    x = (o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + F32(eps))).astype(dtype).astype(F32)
    x = (x * weight).astype(jnp.promote_types(dtype, call["weight"].dtype)).astype(F32)
    return (x * (z / (1 + np.exp(-z)))).astype(dtype)


def check(call: dict[str, Any], y: Any, eps: float = 1e-6) -> None:
    """Against the reference; and all but a few elements have the bits of the roundings taken one by one."""
    dtype = call["o"].dtype
    assert y.dtype == dtype
    close(y, reference.gated_rms_norm(**call, eps=eps), TOL[dtype.type])
    want = rounded(call, eps)
    if dtype != F32:
        assert np.mean(bits(y) != bits(want)) < 0.02
    close(y, want.astype(np.float64), 1e-3 if dtype != F32 else 2e-6)


@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_dtypes(dtypes: Any) -> None:
    call = make(1, dtypes, 12, 128)
    check(call, run(call))


@pytest.mark.parametrize("v_dim", DIMS)
@pytest.mark.parametrize("many", [0, 2**14])
def test_any_number_of_rows(monkeypatch: pytest.MonkeyPatch, v_dim: int, many: int) -> None:
    """Whole blocks, and one, two and four rows left at the end; NaN in one row does not reach another."""
    monkeypatch.setattr(norm, "MANY", many)
    for seed, (rows, dtypes) in enumerate(((1, (F32,) * 3), (7, (BF16,) * 3), (71, (BF16, BF16, F32)))):
        call = make(seed, dtypes, rows, v_dim)
        y = run(call)
        check(call, y)
        if rows > 1:
            call["o"][3], call["z"][5] = np.nan, np.inf
            same(np.delete(run(call), [3, 5], axis=0), np.delete(y, [3, 5], axis=0))


def test_leading_axes_and_eps() -> None:
    for shape in ((128,), (3, 2, 64)):
        call = make(2, (F32,) * 3, *shape)
        call["o"] *= np.float32(1e-3)
        for eps in (1e-6, 1e-2):
            check(call, run(call, eps), eps)


def test_what_a_block_takes() -> None:
    sizes = {(1, 128, 8): 1, (32, 128, 8): 8, (5, 128, 8): 4, (2**14, 128, 8): 32, (64, 256, 4): 4, (64, 64, 8): 16}
    for arguments, rows in sizes.items():
        assert norm.rows_of_block(*arguments) == rows


@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_every_size_lowers(dtypes: Any) -> None:
    for v_dim, lead in ((64, (3, 5)), (128, (32,)), (128, (65537,)), (256, ())):
        shapes = ((*lead, v_dim), (*lead, v_dim), (v_dim,))
        arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
        text = lowered(partial(gated_rms_norm, implementation="mosaic"), *arguments)
        assert text.count("mosaic_gpu_v2") == 1 and "stablehlo.reduce" not in text


def test_explain() -> None:
    with h200():
        assert gdn_jax.explain(gated_rms_norm, **make(0, (BF16,) * 3, 32, 128)).implementation == "mosaic"
        assert gdn_jax.explain("gated_rms_norm").implementation == "mosaic"
        for shape, why in (((2, 96), "head dimensions of 64, 128, 256, and `o` has 96"), ((0, 64), "`o` is empty")):
            call = make(0, (F32,) * 3, *shape)
            told = gdn_jax.explain(gated_rms_norm, *call.values())
            assert told.implementation == "xla" and why in str(told), told
            with pytest.raises(ValueError, match=f"'mosaic', which cannot run here: .*{why}"):
                gated_rms_norm(**call, implementation="mosaic")


def transformed(implementation: str | None, factor: Any) -> dict[str, Any]:
    """Functions of `(o, z, weight)`: forward, derivatives of both modes, vmap, scan."""
    op = partial(gated_rms_norm, implementation=implementation)

    def loss(*arrays: Any) -> Any:
        return jnp.sum(op(*arrays) * factor)

    return dict(
        forward=op,
        grad=jax.value_and_grad(loss, argnums=(0, 1, 2)),
        jvp=lambda *arrays: jax.jvp(loss, arrays, arrays),
        vmap=jax.vmap(op, in_axes=(0, 0, None)),
        scan=lambda o, z, weight: jax.lax.scan(lambda _, row: (None, op(*row, weight)), None, (o, z)),
    )


def test_beside_the_kernel() -> None:
    """One kernel for CUDA and none for a CPU; vmap takes the XLA form; derivatives have its values."""
    arrays = [jnp.asarray(x) for x in make(3, (F32,) * 3, 3, 64).values()]
    factor = jnp.asarray(normal(np.random.default_rng(4), 3, 64))
    with h200():
        traces = {name: jax.jit(f).trace(*arrays) for name, f in transformed(None, factor).items()}
    for name, traced in traces.items():
        kernels = traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2")
        assert kernels == (name != "vmap"), name
        assert "mosaic" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    for name in ("grad", "jvp"):
        got = traces[name].lower(lowering_platforms=("cpu",)).compile()(*arrays)
        jax.tree.map(partial(close, tol=1e-6), got, transformed("xla", factor)[name](*arrays))


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("v_dim", DIMS)
def test_gpu_against_the_reference(v_dim: int) -> None:
    step = jax.jit(partial(gated_rms_norm, implementation="mosaic"))
    calls = [
        make(5, dtypes, n, 32, v_dim) for n in (1, 8, 64) for dtypes in ((BF16,) * 3, (F32,) * 3, (BF16, BF16, F32))
    ]
    calls += [
        make(6, dtypes, rows, v_dim) for rows, dtypes in ((4, (BF16,) * 3), (7, (F16, F32, BF16)), (65537, (BF16,) * 3))
    ]
    for call in calls:
        arrays = [call[name] for name in NAMES]
        y = step(*arrays)
        check(call, y)
        same(y, step(*arrays))
        same(np.asarray(y).reshape(-1, v_dim)[:1], step(*(x.reshape(-1, v_dim)[:1] for x in arrays[:2]), arrays[2]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_gpu_dtypes(dtypes: Any) -> None:
    call = make(7, dtypes, 45, 128)
    check(call, gated_rms_norm(**call, implementation="mosaic"))


@pytest.mark.gpu
def test_gpu_transformed() -> None:
    arrays = [jnp.asarray(x) for x in make(8, (F32,) * 3, 6, 128).values()]
    factor = jnp.asarray(normal(np.random.default_rng(9), 6, 128))
    kernels, plain = (transformed(name, factor) for name in ("mosaic", "xla"))
    for name in kernels:
        jax.tree.map(partial(close, tol=2e-6), jax.jit(kernels[name])(*arrays), jax.jit(plain[name])(*arrays))
