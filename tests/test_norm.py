"""gated_rms_norm: golden case, the float64 reference, every rounding, gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from batches import BF16, bits, check_golden, close, grads_match, normal, same

from gdn_jax import gated_rms_norm, reference

SHAPE = (6, 2, 12)


def inputs(seed: int, dtype: Any = np.float32, weight: Any = None) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    o, z = (normal(rng, *SHAPE, dtype=dtype) for _ in range(2))
    return dict(o=o, z=z, weight=normal(rng, SHAPE[-1], dtype=weight or dtype))


def test_golden() -> None:
    check_golden("rms_norm", 2e-6, 0)


@pytest.mark.parametrize(("dtype", "tol"), [(np.float32, 2e-6), (BF16, 5e-3), (np.float16, 1.25e-3)])
def test_random_values(dtype: Any, tol: float) -> None:
    """A table of 3e-3 for one rounding of bfloat16; here are three, looked at one by one in the next test."""
    for seed in range(3):
        arguments = inputs(seed, dtype)
        y = gated_rms_norm(**arguments)
        assert y.dtype == dtype
        close(y, reference.gated_rms_norm(**arguments), tol)


@pytest.mark.parametrize(
    ("dtype", "weight"), [(BF16, BF16), (BF16, np.float32), (np.float16, BF16), (np.float16, np.float16)]
)
def test_every_rounding_is_real(dtype: Any, weight: Any) -> None:
    """The three factors rounded one by one, as the specification says, in numpy: equal but for a unit in the last place."""
    arguments = inputs(7, dtype, weight)
    o, z = (arguments[name].astype(np.float32) for name in ("o", "z"))
    promoted = jnp.promote_types(dtype, weight)
    normed = (o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + np.float32(1e-6))).astype(dtype).astype(np.float32)
    product = (normed * arguments["weight"].astype(np.float32)).astype(promoted).astype(np.float32)
    want = (product * (z / (1 + np.exp(-z)))).astype(dtype)
    for got in (gated_rms_norm(**arguments), jax.jit(gated_rms_norm)(**arguments)):
        # float32 noise crosses a rounding border in at most a few of the 144 elements; a rounding left out moves half of them.
        assert np.mean(bits(got) != bits(want)) < 0.05
        close(got, want.astype(np.float64), 1e-3)


def test_roundings_survive_the_compiler() -> None:
    """One reduce_precision for each of the three: a bare pair of converts is what XLA may drop, on some devices."""
    jaxpr = str(jax.make_jaxpr(lambda arguments: gated_rms_norm(**arguments))(inputs(7, BF16)))
    assert jaxpr.count("reduce_precision[exponent_bits=8 mantissa_bits=7]") == 3, jaxpr


def test_eps_is_inside_the_root() -> None:
    arguments = {**inputs(8), "o": np.full(SHAPE, 1e-3, np.float32)}
    for eps in (1e-6, 1e-2):
        close(gated_rms_norm(**arguments, eps=eps), reference.gated_rms_norm(**arguments, eps=eps), 2e-6)
    want = 1e-3 / np.sqrt(2e-6)
    got = gated_rms_norm(**{**arguments, "weight": np.ones(12, np.float32), "z": np.full(SHAPE, 40, np.float32)})
    np.testing.assert_allclose(got, want * 40, rtol=1e-5)


def test_zero_rows_give_zero() -> None:
    arguments = inputs(9)
    arguments["o"][2] = 0
    y = np.asarray(gated_rms_norm(**arguments))
    assert not y[2].any() and y[[0, 1, 3]].all()


def test_shapes() -> None:
    arguments = inputs(10)
    whole = np.asarray(gated_rms_norm(**arguments))
    for part in (np.s_[0], np.s_[0, 0], np.s_[:0]):
        y = gated_rms_norm(arguments["o"][part], arguments["z"][part], arguments["weight"])
        assert y.shape == whole[part].shape
        close(y, whole[part].astype(np.float64), 1e-6)


def test_gradients() -> None:
    arguments, rng = inputs(11), np.random.default_rng(12)
    factor = rng.standard_normal(SHAPE)
    grads = jax.grad(lambda a: jnp.sum(gated_rms_norm(**a) * factor.astype(np.float32)))(arguments)
    grads_match(lambda **a: np.sum(reference.gated_rms_norm(**a) * factor), arguments, grads, rng)


def test_num_06_a_row_does_not_depend_on_its_place() -> None:
    arguments = inputs(13)
    order = [3, 1, 0, 5, 4, 2]
    moved = gated_rms_norm(arguments["o"][order], arguments["z"][order], arguments["weight"])
    same(moved, np.asarray(gated_rms_norm(**arguments))[order])


def test_scale_02_last_row_of_many() -> None:
    o = np.ones((65537, 2), np.float32)
    o[-1] = [3.0, 4.0]
    y = gated_rms_norm(o, o, np.ones(2, np.float32))
    close(y, reference.gated_rms_norm(o, o, np.ones(2)), 2e-6)
    close(y[-1], reference.gated_rms_norm(o[-1], o[-1], np.ones(2)), 2e-6)


def test_real_dims() -> None:
    rng = np.random.default_rng(14)
    o, z = (normal(rng, 3, 32, 128, dtype=ml_dtypes.bfloat16) for _ in range(2))
    weight = normal(rng, 128)
    close(gated_rms_norm(o, z, weight), reference.gated_rms_norm(o, z, weight), 3e-3)
