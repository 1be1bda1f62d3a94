"""The gating kernel: in the interpreter against the reference, lowered for an H200, and on a GPU."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import close, normal, same
from jax.experimental import checkify
from kernels import BF16, F16, F32, h200, interpret, lowered

import gdn_jax
from gdn_jax import gdn_gating, reference, xla
from gdn_jax.mosaic import gating

NAMES = ("A_log", "a", "b", "dt_bias")
SIZES = [(1, 32), (7, 32), (5, 9), (3, 1), (1, 200), (6, 4)]  # tokens, heads
DTYPES = list(itertools.product((BF16, F32, F16), repeat=2))  # of the activations, of the parameters
ids = lambda dtypes: "-".join(dtype.__name__ for dtype in dtypes)  # noqa: E731
TINY = 1.2e-38  # float32 is subnormal below it


def make(
    seed: int, num_tokens: int, num_v_heads: int, dtypes: Any = (F32, F32), spread: float = 30.0
) -> dict[str, Any]:
    """`dtypes`: of the activations, of the parameters."""
    rng, (dtype, weight_dtype) = np.random.default_rng(seed), dtypes
    a, b = (rng.uniform(-spread, spread, (num_tokens, num_v_heads)).astype(dtype) for _ in range(2))
    A_log, dt_bias = (normal(rng, num_v_heads).astype(weight_dtype) for _ in range(2))
    return dict(A_log=A_log, a=a, b=b, dt_bias=dt_bias)


def run(call: dict[str, Any]) -> Any:
    """The kernel itself, in the interpreter."""
    kernel = partial(gating.gating, exp_times=partial(xla.gating.exp_times, slope=False))
    return interpret(kernel, *(jnp.asarray(call[name]) for name in NAMES))


def check(call: dict[str, Any], got: Any) -> None:
    """Within the table, and every element within a few units in the last place."""
    for x, want in zip(got, reference.gdn_gating(**call), strict=True):
        assert x.dtype == np.float32
        close(x, want, 2e-6)
        normal_ones = np.abs(want) > TINY
        np.testing.assert_allclose(np.asarray(x)[normal_ones], want[normal_ones], rtol=1e-6)
        assert (np.abs(np.asarray(x))[~normal_ones] <= TINY).all()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_against_the_reference(size: Any) -> None:
    call = make(1, *size)
    check(call, run(call))


@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_dtypes(dtypes: Any) -> None:
    call = make(2, 3, 32, dtypes, 8.0)
    check(call, run(call))


def test_many_elements_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gating, "MANY", 0)
    assert gating.rows_of_block(40, 32) == 16
    call = make(3, 40, 32)  # two blocks of 16 rows, and 8 rows
    check(call, run(call))


def test_at_the_borders_of_the_three_ranges() -> None:
    """Both sides of -17 and 20, where the formula changes, with A_log from tiny to huge."""
    x = np.array([-17.0, -16.999998, -17.000002, 20.0, 20.000002, 19.999998, 0.0, -0.0], F32)[:, None]
    A_log = np.array([-40, 0, 60, 70], F32)
    call = dict(A_log=A_log, a=np.tile(x, 4), b=np.tile(x, 4), dt_bias=np.zeros(4, F32))
    check(call, run(call))


def test_gate_01_the_nearest_float32_and_never_nan() -> None:
    x = np.array([-3e38, -1e4, -200, -88, -17, 0, 20, 88, 200, 1e4, 3e38], F32)
    A_log, a, dt_bias = (axis.ravel() for axis in np.meshgrid(x, x, x))
    call = dict(A_log=A_log[:1024], a=a[None, :1024], b=a[None, :1024], dt_bias=dt_bias[:1024])
    got, want = run(call), gdn_gating(**call, implementation="xla")
    for y, other in zip(got, want):
        y, other = np.asarray(y), np.asarray(other)
        assert not np.isnan(y).any()
        same(np.isinf(y), np.isinf(other))
        np.testing.assert_allclose(y, other, rtol=1e-6, atol=TINY)


def test_a_row_has_the_same_bits_beside_others() -> None:
    """Whatever stands there: NaN in one row does not change another."""
    call = make(4, 7, 32)
    odd = {name: np.array(x) for name, x in call.items()}
    odd["a"][2], odd["b"][5] = np.nan, np.inf
    for x, y in zip(run(call), run(odd)):
        same(np.delete(x, [2, 5], axis=0), np.delete(y, [2, 5], axis=0))
    alone = run(call | {name: call[name][3:4] for name in ("a", "b")})
    for x, y in zip(run(call), alone):
        np.testing.assert_array_max_ulp(np.asarray(x)[3:4], np.asarray(y), 2)  # another program


def test_what_a_block_takes() -> None:
    sizes = {(1, 32): 1, (2, 32): 2, (3, 32): 2, (8, 32): 4, (8192, 32): 16, (5, 9): 4, (9, 1024): 1, (10**6, 1): 512}
    for (num_tokens, num_v_heads), rows in sizes.items():
        assert gating.rows_of_block(num_tokens, num_v_heads) == rows


@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_every_dtype_lowers(dtypes: Any) -> None:
    for lead in ((1,), (8,), (3, 5), ()):
        call = make(0, 1, 32, dtypes)
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.items()}
        shapes |= {name: jax.ShapeDtypeStruct((*lead, 32), shapes[name].dtype) for name in ("a", "b")}
        text = lowered(partial(gdn_gating, implementation="mosaic"), *(shapes[name] for name in NAMES))
        assert text.count("mosaic_gpu_v2") == 1 and "stablehlo.exp" not in text


def test_every_size_lowers() -> None:
    for num_tokens, num_v_heads in ((8191, 48), (3, 1023)):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((num_v_heads,), (num_tokens, num_v_heads))]
        text = lowered(partial(gdn_gating, implementation="mosaic"), shapes[0], shapes[1], shapes[1], shapes[0])
        assert text.count("mosaic_gpu_v2") == 1


def test_explain() -> None:
    with h200():
        assert gdn_jax.explain(gdn_gating, **make(0, 1, 32)).implementation == "mosaic"
        assert gdn_jax.explain("gdn_gating").implementation == "mosaic"
        for call, why in ((make(0, 0, 4), "`a` is empty"), (make(0, 1, 1025), "up to 1024 heads, and `a` has 1025")):
            told = gdn_jax.explain(gdn_gating, *call.values())
            assert told.implementation == "xla" and why in str(told), told
            with pytest.raises(ValueError, match=f"'mosaic', which cannot run here: .*{why}"):
                gdn_gating(**call, implementation="mosaic")


def transformed(implementation: str | None, call: dict[str, Any]) -> dict[str, Any]:
    """Functions of the call's arrays: forward, derivatives of both modes, vmap, scan."""
    op = partial(gdn_gating, implementation=implementation)
    weights = [jnp.asarray(normal(np.random.default_rng(5), *call["a"].shape)) for _ in range(2)]

    def loss(arrays: Any) -> Any:
        return sum(jnp.sum(x * w) for x, w in zip(op(**arrays), weights))

    def each(arrays: Any) -> Any:
        rest = {name: arrays[name] for name in ("A_log", "dt_bias")}
        return rest, {name: arrays[name] for name in ("a", "b")}

    return dict(
        forward=lambda arrays: op(**arrays),
        grad=jax.value_and_grad(loss),
        jvp=lambda arrays: jax.jvp(loss, (arrays,), (arrays,)),
        vmap=lambda arrays: jax.vmap(lambda row: op(**each(arrays)[0], **row))(each(arrays)[1]),
        scan=lambda arrays: jax.lax.scan(lambda _, row: (None, op(**each(arrays)[0], **row)), None, each(arrays)[1]),
        checked=checkify.checkify(lambda arrays: op(**arrays), errors=checkify.all_checks),
    )


def test_beside_the_kernel() -> None:
    """One kernel for CUDA and none for a CPU; vmap takes the XLA form; derivatives have its values."""
    call = {name: jnp.asarray(x) for name, x in make(6, 3, 4, spread=3.0).items()}
    with h200():
        traces = {name: jax.jit(f).trace(call) for name, f in transformed(None, call).items()}
    for name, traced in traces.items():
        kernels = traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2")
        assert kernels == (name != "vmap"), name
        assert "mosaic" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    for name in ("grad", "jvp"):
        got = traces[name].lower(lowering_platforms=("cpu",)).compile()(call)
        jax.tree.map(partial(close, tol=1e-6), got, transformed("xla", call)[name](call))


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES, ids=ids)
def test_gpu_against_the_reference(dtypes: Any) -> None:
    for size in ((1, 32), (8, 32), (64, 32), (8192, 32), (8191, 48), (37, 9), (5, 1), (65537, 2), (3, 1023)):
        call = make(7, *size, dtypes, 60.0)
        step = jax.jit(lambda call: gdn_gating(**call, implementation="mosaic"))
        got = step(call)
        check(call, got)
        jax.tree.map(same, got, step(call))


@pytest.mark.gpu
def test_gpu_transformed() -> None:
    call = {name: jnp.asarray(x) for name, x in make(8, 6, 32, spread=3.0).items()}
    kernels, plain = (transformed(name, call) for name in ("mosaic", "xla"))
    for name in kernels:
        got, want = (jax.jit(f[name])(call) for f in (kernels, plain))
        jax.tree.map(partial(close, tol=2e-6), *(jax.tree.leaves(x)[-2:] for x in (got, want)))
