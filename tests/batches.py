"""What the operator tests share: random inputs, ragged batches for hypothesis, and the comparisons."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import gdn_jax
import golden

# Nothing but hypothesis's tests needs hypothesis: the GPU machines may not have it.
try:
    from hypothesis import given, settings
    from hypothesis import strategies as st
except ImportError:
    given: Any = None
    settings: Any = None
    st: Any = None

BF16 = ml_dtypes.bfloat16
INT = np.int32
HUGE = 2**32 + 1  # narrows to slot 1
EPS = {np.float32: 1.0, BF16: 1.0, np.float16: 0.25}  # float16 has a quarter of bfloat16's tolerances

Arrays = dict[str, Any]


# ---- comparisons ----------------------------------------------------------------------------------------------------


def bits(x: Any) -> np.ndarray:
    x = np.ascontiguousarray(np.asarray(x))
    return x.view(f"u{x.dtype.itemsize}")


def same(got: Any, want: Any) -> None:
    """Bit for bit (NaN too), the same dtype and shape."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(bits(got), bits(want))


def zero(x: Any) -> None:
    assert not np.asarray(x).astype(np.float32).any()


def close(got: Any, want: Any, tol: float) -> None:
    """‖got − want‖₂ ≤ tol ‖want‖₂, NaN and Inf exactly where `want` has them."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape
    odd = ~np.isfinite(want)
    np.testing.assert_array_equal(got[odd], want[odd])
    assert np.isfinite(got[~odd]).all(), "NaN or Inf where the reference has none"
    error = golden.rel(got[~odd], want[~odd])
    assert error <= tol, f"relative error {error:.2e} > {tol:.0e}"


def close_rows(got: Any, want: Any, before: Any, touched: Any, tol: float) -> None:
    """A pool after a call: the rows `touched` within `tol` (each), all others as they were, bit for bit."""
    got, before, touched = np.asarray(got), np.asarray(before), sorted(set(touched))
    for row in touched:
        close(got[row], want[row], tol)
    others = np.setdiff1d(np.arange(len(before)), touched)
    same(got[others], before[others])


def check_golden(name: str, tol: float, state_tol: float) -> None:
    """The case within the tolerances; rows that no sequence names bit for bit, padding exactly zero."""
    kwargs, wants = golden.load(name)
    got = golden.named(name, getattr(gdn_jax, golden.CASES[name])(**kwargs))
    for key, want in wants.items():
        if key in kwargs:
            rows = golden.unchanged(kwargs, wants, key)
            close(got[key], want, state_tol)
            same(np.asarray(got[key])[rows], kwargs[key][rows])
            assert got[key].dtype == kwargs[key].dtype
        else:
            close(got[key], want, tol)
            zero(np.asarray(got[key])[golden.padding(wants, key)])


# ---- inputs ---------------------------------------------------------------------------------------------------------


def starts(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(INT)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def rule_inputs(
    rng: np.random.Generator, *lead: int, H: int = 1, HV: int = 2, K: int = 4, V: int = 3, dtype: Any = np.float32
) -> Arrays:
    g = -np.exp(normal(rng, *lead, HV))
    beta = rng.uniform(0, 1, (*lead, HV)).astype(np.float32)
    q, k = (normal(rng, *lead, H, K, dtype=dtype) for _ in range(2))
    return dict(q=q, k=k, v=normal(rng, *lead, HV, V, dtype=dtype), g=g, beta=beta)


def conv_inputs(rng: np.random.Generator, *lead: int, D: int = 5, W: int = 4, dtype: Any = np.float32) -> Arrays:
    shapes = dict(x=(*lead, D), weight=(D, W), bias=(D,))
    return {name: normal(rng, *shape, dtype=dtype) for name, shape in shapes.items()}


def make_weights(rng: np.random.Generator, config: gdn_jax.GDNConfig, dtype: Any = np.float32) -> gdn_jax.GDNWeights:
    D, W, HV = config.conv_dim, config.conv_kernel_dim, config.tp_num_v_heads
    arrays = [
        0.5 * rng.standard_normal((D, W)),
        0.1 * rng.standard_normal(D),
        rng.uniform(-3, 1, HV),
        rng.normal(size=HV),
    ]
    return gdn_jax.GDNWeights(*(jnp.asarray(array.astype(np.float32), dtype) for array in arrays))


def make_state(
    rng: np.random.Generator, config: gdn_jax.GDNConfig, num_slots: int, layers: int | None = None
) -> gdn_jax.GDNState:
    zeros = gdn_jax.init_state(config, num_slots, layers)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape).astype(np.float32), x.dtype), zeros)


def make_mixed(
    rng: np.random.Generator, config: gdn_jax.GDNConfig, num_tokens: int, dtype: Any = np.float32
) -> jax.Array:
    return jnp.asarray(rng.standard_normal((num_tokens, config.qkvz_dim + config.ba_dim)).astype(np.float32), dtype)


def at(arrays: Arrays, part: Any) -> Arrays:
    """The part of every array's first axis."""
    return {name: array[part] for name, array in arrays.items()}


def exact(arrays: Arrays) -> Arrays:
    """The same values in float64: what the reference is given where it is to see the rounded inputs."""
    return {k: x.astype(np.float64) if getattr(x, "dtype", None) in EPS else x for k, x in arrays.items()}


def device(x: Any) -> Any:
    """A JAX array that owns its memory, so that it can be donated."""
    return jnp.array(x, copy=True) + 0


# ---- random batches -------------------------------------------------------------------------------------------------


class Ragged(NamedTuple):
    """A drawn batch. `live[n]`: sequence n has tokens and is no padding; `reads[n]`: the slot it starts from, or None."""

    starts: np.ndarray
    slots: np.ndarray
    sources: np.ndarray
    has: np.ndarray
    accepted: np.ndarray
    live: list[bool]
    reads: list[int | None]
    order: list[int]
    seed: int

    def tokens(self) -> np.ndarray:
        """The valid tokens."""
        parts = [np.arange(self.starts[n], self.starts[n + 1]) for n in range(len(self.live)) if self.live[n]]
        return np.concatenate([np.zeros(0, int), *parts])

    def touched(self) -> list[int]:
        return [int(slot) for slot, live in zip(self.slots, self.live) if live]

    def read_slots(self) -> list[int]:
        return [slot for slot in self.reads if slot is not None]

    def poison(self, tokens: Arrays, pool: np.ndarray) -> None:
        """NaN and Inf, in place, in padding tokens and in every slot that nobody reads."""
        for array in tokens.values():
            dead = np.setdiff1d(np.arange(len(array)), self.tokens())
            array[dead] = np.nan
            array[dead[::2]] = np.inf
        pool[np.setdiff1d(np.arange(len(pool)), self.read_slots())] = np.nan

    def permuted(self) -> tuple[np.ndarray, np.ndarray]:
        """`query_start_loc` of the sequences in another order, and for each of its tokens the token here."""
        lengths = np.diff(self.starts)
        parts = [np.arange(self.starts[n], self.starts[n + 1]) for n in self.order]
        return starts(*lengths[self.order]), np.concatenate([*parts, np.arange(self.starts[-1], self.starts[-1] + 999)])


def ragged(num_tokens: int, num_sequences: int, num_slots: int, mtp_step: int = 0, longest: int | None = None) -> Any:
    """A strategy for `Ragged`: empty and padded sequences, other sources, flags, counts good and bad."""
    bad = st.sampled_from([-1, -7, num_slots, 2**31 - 1])
    good = st.integers(1, mtp_step + 1)

    @st.composite
    def draw_batch(draw: Any) -> Ragged:
        n = num_sequences
        if longest is None:
            cuts = sorted(draw(st.lists(st.integers(0, num_tokens), min_size=n, max_size=n)))
            bounds = np.array([0, *cuts], INT)
        else:  # now and then one token too many
            bounds = np.minimum(
                starts(*draw(st.lists(st.integers(0, longest + 1), min_size=n, max_size=n))), num_tokens
            )
        lengths = np.diff(bounds)
        rows = draw(st.permutations(range(num_slots)))
        slots = [draw(bad) if draw(st.integers(0, 4)) == 0 else rows[i] for i in range(n)]
        has = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        counts, sources, live, reads = [], [], [], []
        for i in range(n):
            kind = draw(st.integers(0, 5))
            sources.append(slots[i] if kind < 3 else draw(st.sampled_from(rows[n:])) if kind < 5 else draw(bad))
            reading = has[i] and 0 <= sources[i] < num_slots
            wrong = draw(st.integers(0, 5)) == 0
            counts.append(draw(st.sampled_from([0, -1, mtp_step + 2, 2**31 - 1, -(2**31)]) if wrong else good))
            counted = not has[i] or not wrong  # looked at wherever there may be an initial state
            fits = longest is None or lengths[i] <= longest
            live.append(bool(lengths[i] > 0 and 0 <= slots[i] < num_slots and counted and fits))
            reads.append(sources[i] if live[i] and reading else None)
        order = draw(st.permutations(range(n)))
        seed = draw(st.integers(0, 2**16))
        arrays = (np.array(x, INT) for x in (slots, sources))
        return Ragged(bounds, *arrays, np.array(has), np.array(counts, INT), live, reads, list(order), seed)

    return draw_batch()


def grads_match(reference: Any, arrays: Arrays, grads: Arrays, rng: np.random.Generator) -> None:
    """The gradients against central differences of the float64 `reference`, along one random direction for each array."""
    for name, grad in grads.items():
        x = np.asarray(arrays[name]).astype(np.float64)
        direction, step = rng.standard_normal(x.shape), 1e-6
        up, down = (reference(**{**exact(arrays), name: x + sign * step * direction}) for sign in (1, -1))
        want = (up - down) / (2 * step)
        got = float(np.sum(np.asarray(grad).astype(np.float64) * direction))
        scale = float(np.linalg.norm(np.asarray(grad).astype(np.float64)))
        assert scale > 0, name
        assert abs(got - want) <= 1e-4 * max(abs(want), scale), (name, got, want)
