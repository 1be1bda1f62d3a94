"""Gradients through long packed documents: the stateless form of the chunked rule, without a pool.

Checks a directional derivative against float64, the growth of memory with T, and a few steps of gradient descent.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import chunk_gated_delta_rule, reference

H, HV, K, V = 1, 2, 16, 16


def batch(tokens: int) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = dict(q=(H, K), k=(H, K), v=(HV, V), g=(HV,), beta=(HV,))
    x = {name: rng.standard_normal((tokens, *shape)) for name, shape in shapes.items()}
    x |= dict(g=-np.exp(x["g"] - 2), beta=1 / (1 + np.exp(-x["beta"])))
    starts = jnp.array([0, tokens // 3, tokens // 3, tokens], jnp.int32)  # three documents, one of them empty
    target = jnp.asarray(rng.standard_normal(V), jnp.float32)
    return {name: jnp.asarray(a, jnp.float32) for name, a in x.items()}, starts, target


def loss(v: jax.Array, x: dict[str, jax.Array], starts: jax.Array, target: jax.Array) -> jax.Array:
    o, _ = chunk_gated_delta_rule(**(x | dict(v=v)), query_start_loc=starts)
    return jnp.mean((o - target) ** 2)


gradient = jax.jit(jax.value_and_grad(loss))
batches = [batch(tokens) for tokens in (512, 1024)]
programs = [gradient.lower(a["v"], a, s, t).compile() for a, s, t in batches]
(x, starts, target), run = batches[0], programs[0]
direction = np.random.default_rng(1).standard_normal(x["v"].shape)


def exact(scale: float) -> float:
    """The loss in float64, token by token, at `v + scale * direction`."""
    arrays = {name: np.asarray(a, np.float64) for name, a in x.items()}
    arrays["v"] = arrays["v"] + scale * direction
    o, _ = reference.chunk_gated_delta_rule(**arrays, query_start_loc=np.asarray(starts), dtype=np.float64)
    return float(np.mean((o - np.asarray(target, np.float64)) ** 2))


got = float(jnp.vdot(run(x["v"], x, starts, target)[1], direction))
want = (exact(1e-4) - exact(-1e-4)) / 2e-4
error = abs(got - want) / abs(want)
print(f"directional derivative: {got:.6f}, float64 {want:.6f}, relative difference {error:.1e}")

short, long = (program.memory_analysis().temp_size_in_bytes for program in programs)
print(f"temporary memory of a gradient, 1,024 against 512 tokens: {long / short:.1f}x")

losses, v = [], x["v"]
for _ in range(5):
    value, slope = run(v, x, starts, target)
    losses.append(float(value))
    v = v - 3000.0 * slope
print("loss: " + ", ".join(f"{value:.4f}" for value in losses))
raise SystemExit(not (error < 1e-4 and long / short < 2.5 and losses[-1] < losses[0]))
