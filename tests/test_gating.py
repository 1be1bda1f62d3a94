"""gdn_gating against the golden case, the float64 reference and the faults of the field."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BF16, bits, check_golden, normal, same

from gdn_jax import gdn_gating, reference

ROWS, HEADS = 64, 4  # the one shape of most tests here


def close_everywhere(got: Any, want: Any, ulps: float = 3) -> None:
    """Every element within a few units of float32's last place (the smallest subnormal at the bottom)."""
    with np.errstate(over="ignore", under="ignore"):
        want = np.asarray(want).astype(np.float64)
        nearest = want.astype(np.float32)
    assert np.asarray(got).dtype == np.float32
    odd = np.isinf(nearest)
    np.testing.assert_array_equal(np.asarray(got)[odd], nearest[odd])
    error = np.abs(np.asarray(got).astype(np.float64) - want)[~odd]
    assert (error <= ulps * np.maximum(np.spacing(np.abs(nearest[~odd])), 1.2e-38 * 2.0**-23)).all()


def gates(rng: np.random.Generator, spread: float = 30.0) -> dict[str, np.ndarray]:
    a, b = (rng.uniform(-spread, spread, (ROWS, HEADS)).astype(np.float32) for _ in range(2))
    return dict(A_log=normal(rng, HEADS), a=a, b=b, dt_bias=normal(rng, HEADS))


def test_golden() -> None:
    check_golden("gating", 2e-6, 0)


def test_random_values_element_by_element() -> None:
    rng = np.random.default_rng(0)
    for spread in (3.0, 25.0, 60.0):
        inputs = gates(rng, spread)
        g, beta = gdn_gating(**inputs)
        want_g, want_beta = reference.gdn_gating(**inputs)
        flushed = np.abs(want_g) < 1.2e-38  # subnormals: XLA on CPU may flush them to 0
        close_everywhere(np.where(flushed, 0, g).astype(np.float32), np.where(flushed, 0, want_g))
        assert (np.abs(np.asarray(g))[flushed] < 1.2e-38).all()
        close_everywhere(beta, want_beta)


def test_at_the_borders_of_the_three_ranges() -> None:
    """Both sides of -17 and 20, where the formula changes, with A_log from tiny to huge."""
    x = np.array([-17.0, -16.999998, -17.000002, 20.0, 20.000002, 19.999998, 0.0, -0.0], np.float32)
    for A_log in (-40.0, 0.0, 60.0, 70.0):
        a = np.tile(x[:, None], (ROWS // 8, HEADS))
        inputs: dict[str, Any] = dict(
            A_log=np.full(HEADS, A_log, np.float32), a=a, b=a, dt_bias=np.zeros(HEADS, np.float32)
        )
        close_everywhere(gdn_gating(**inputs)[0], reference.gdn_gating(**inputs)[0])


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_dtypes_mean_float32_arithmetic(dtype: Any) -> None:
    inputs = {name: x.astype(dtype) for name, x in gates(np.random.default_rng(1), 8.0).items()}
    got = gdn_gating(**inputs)
    for x, want in zip(got, reference.gdn_gating(**inputs)):
        close_everywhere(x, want)
    for x, y in zip(got, gdn_gating(**{name: x.astype(np.float32) for name, x in inputs.items()})):
        assert x.dtype == y.dtype
        np.testing.assert_array_max_ulp(np.asarray(x), np.asarray(y), maxulp=2)  # two programs


def test_leading_axes_and_empty_ones() -> None:
    inputs = gates(np.random.default_rng(2))
    flat = gdn_gating(**inputs)
    shaped = gdn_gating(**{**inputs, "a": inputs["a"].reshape(2, 32, 4), "b": inputs["b"].reshape(2, 32, 4)})
    one = gdn_gating(**{**inputs, "a": inputs["a"][0], "b": inputs["b"][0]})
    for x, y, z in zip(flat, shaped, one):
        same(np.asarray(y).reshape(ROWS, HEADS), x)
        same(z, np.asarray(x)[0])
    for x in gdn_gating(**{**inputs, "a": inputs["a"][:0], "b": inputs["b"][:0]}):
        assert x.shape == (0, HEADS) and x.dtype == jnp.float32


def test_gradients() -> None:
    """Against the derivatives written out: g' = -e^A_log sigmoid(x) and 1 behind the threshold, beta' = beta (1 - beta)."""
    inputs = gates(np.random.default_rng(3))

    def total(inputs: Any) -> Any:
        g, beta = gdn_gating(**inputs)
        return jnp.sum(g) + jnp.sum(beta)

    got = jax.grad(total)(inputs)
    A_log, a, b, dt_bias = (inputs[name].astype(np.float64) for name in ("A_log", "a", "b", "dt_bias"))
    x, s = a + dt_bias, 1 / (1 + np.exp(-b))
    slope = np.where(x > 20, 1, 1 / (1 + np.exp(-x))) * -np.exp(A_log)
    np.testing.assert_allclose(got["a"], slope, rtol=1e-5)
    np.testing.assert_allclose(got["b"], s * (1 - s), rtol=1e-5, atol=2e-7)
    np.testing.assert_allclose(got["dt_bias"], slope.sum(0), rtol=1e-5)
    np.testing.assert_allclose(got["A_log"], reference.gdn_gating(**inputs)[0].sum(0), rtol=1e-5)


def test_gradients_are_finite_where_the_true_ones_are() -> None:
    a = np.array([[-200.0], [-90.0], [100.0], [3e4], [20.0], [-3e38]], np.float32)
    for A_log in (-80.0, 0.0, 60.0):
        arguments = (jnp.array([A_log], jnp.float32), jnp.asarray(a), jnp.zeros_like(a), jnp.zeros(1))
        got = jax.grad(lambda *x: jnp.sum(gdn_gating(*x)[0]), argnums=(0, 1, 3))(*arguments)
        assert all(np.isfinite(np.asarray(x)).all() for x in got), A_log
        np.testing.assert_allclose(got[1][2], -np.exp(A_log), rtol=1e-5)


# ---- faults met in the field ----------------------------------------------------------------------------------------


def test_gate_01_overflow_times_underflow() -> None:
    A_log, a = (np.array(x, np.float32) for x in ([100.0, 88.8, 0.0, 100.0], [-200.0, -30.0, -200.0, -100.0]))
    g = np.asarray(
        gdn_gating(A_log, np.tile(a, (ROWS, 1)), np.zeros((ROWS, 4), np.float32), np.zeros(4, np.float32))[0][0]
    )
    want = -np.exp(A_log.astype(np.float64)) * np.log1p(np.exp(a.astype(np.float64)))
    assert np.isfinite(g).all() and (g <= 0).all()
    np.testing.assert_allclose(g, want, rtol=1e-6, atol=1e-37)  # -3.7e-44 is subnormal: 0 will do


def test_gate_01_never_nan_for_finite_inputs() -> None:
    x = np.array([-3e38, -1e4, -200, -88, -17, 0, 20, 88, 200, 1e4, 3e38], np.float32)
    A_log, a, dt_bias = (axis.ravel() for axis in np.meshgrid(x, x, x))
    g, beta = gdn_gating(A_log, a, a, dt_bias)
    assert not np.isnan(g).any() and not np.isnan(beta).any()
    with np.errstate(over="ignore"):  # a + dt_bias itself overflows float32 in some
        want = reference.gdn_gating(A_log, a, a, dt_bias)[0].astype(np.float32)
        fits = np.isfinite(a + dt_bias) & ((want == 0) | (np.abs(want) > 1.2e-38))
    # Where 3e38 cancels, float64 loses the rest of the sum and is no oracle.
    total = np.abs(A_log.astype(np.float64) + a + dt_bias)
    fits &= (total > 1e30) | (np.maximum(np.abs(A_log), np.maximum(np.abs(a), np.abs(dt_bias))) < 1e30)
    close_everywhere(np.asarray(g)[fits], want[fits], ulps=20)


def test_gate_03_float32_parameters_stay_float32() -> None:
    """A_log = ln 0.0117 is not a bfloat16; the gates of bfloat16 activations keep it, and 4,096 of them multiply up right."""
    A_log = np.log(np.full(HEADS, 0.0117)).astype(np.float32)
    a = np.full((ROWS, HEADS), 0.5).astype(BF16)
    g = np.asarray(gdn_gating(A_log, a, a, np.zeros(HEADS, np.float32))[0]).astype(np.float64)
    want = -np.exp(A_log.astype(np.float64)) * np.log1p(np.exp(0.5))
    np.testing.assert_allclose(g, np.tile(want, (ROWS, 1)), rtol=1e-6)
    np.testing.assert_allclose(np.exp(4096 * g[0]), np.exp(4096 * want), rtol=1e-4)


def test_scale_02_last_row_of_many() -> None:
    a = np.ones((65537, 2), np.float32)
    a[-1] = 3.0
    g, beta = gdn_gating(np.zeros(2, np.float32), a, a, np.zeros(2, np.float32))
    for x in (-np.log1p(np.exp(a.astype(np.float64))),):
        np.testing.assert_allclose(g, x, rtol=1e-6)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-a.astype(np.float64))), rtol=1e-6)


def test_num_06_a_row_does_not_depend_on_its_place() -> None:
    inputs = gates(np.random.default_rng(4))
    order = np.random.default_rng(5).permutation(ROWS)
    for x, y in zip(gdn_gating(**inputs), gdn_gating(**{**inputs, "a": inputs["a"][order], "b": inputs["b"][order]})):
        np.testing.assert_array_equal(bits(x)[order], bits(y))
