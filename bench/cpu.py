"""Suite `cpu`: the rule in float32 beside Hugging Face's torch code, the needed arithmetic and a plain copy."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import gdn_jax
from bench import peers
from bench.report import Table, seconds

H, HV, K, V = 16, 32, 128, 128
FLOP_PER_TOKEN = 180e3 * HV  # what the chunked rule needs at 64 tokens a chunk
RAGGED = tuple(int(n) for n in np.random.default_rng(0).integers(1, 1001, 16))
PREFILL = {"1x1024": (1024,), "1x2048": (2048,), "1x8192": (8192,), "ragged 16 of 1 to 1000": RAGGED}
TARGETS = {"1x1024": 1.5, "1x2048": 1.5, "1x8192": 1.5, "ragged 16 of 1 to 1000": 3.0, 1: 1.25, 8: 1.25, 64: 3.0}


def inputs(tokens: int) -> list[jax.Array]:
    """q, k, v, g, beta for `tokens` tokens, seeded."""
    rng = np.random.default_rng(0)
    shapes = ((tokens, H, K), (tokens, H, K), (tokens, HV, V), (tokens, HV), (tokens, HV))
    q, k, v, g, beta = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    return [q, k, v, -jnp.exp(g - 2), jax.nn.sigmoid(beta)]


class InPlaceCall:
    """A jitted rule on a donated pool that is handed from call to call."""

    def __init__(
        self, rule: Callable[..., Any], pool: jax.Array, arguments: Sequence[jax.Array], **indices: Any
    ) -> None:
        function = jax.jit(lambda pool, *arguments: rule(*arguments, ssm_state=pool, **indices), donate_argnums=0)
        self.compiled = function.lower(pool, *arguments).compile()
        self.pool, self.arguments = pool, arguments

    def __call__(self) -> jax.Array:
        o, self.pool = self.compiled(self.pool, *self.arguments)
        return jax.block_until_ready((o, self.pool))[0]

    @property
    def temporary_bytes(self) -> int:
        return getattr(self.compiled.memory_analysis(), "temp_size_in_bytes", 0)


def prefill_call(lengths: Sequence[int]) -> InPlaceCall:
    """The chunked rule on packed sequences of these lengths."""
    starts = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    pool = jnp.zeros((len(lengths), HV, K, V), jnp.float32)
    return InPlaceCall(gdn_jax.chunk_gated_delta_rule, pool, inputs(sum(lengths)), query_start_loc=starts)


def product_rate(repeat: int) -> float:
    """FLOP/s of 64x128x128 float32 products, batched over the value heads."""
    a, b = jnp.ones((HV, 64, K), jnp.float32), jnp.ones((HV, K, V), jnp.float32)
    many = 32

    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        def one(_: int, total: jax.Array) -> jax.Array:
            return jnp.matmul(a + 0 * total[:, :, :1], b, precision="highest")

        return jax.lax.fori_loop(0, many, one, jnp.zeros((HV, 64, V), jnp.float32))

    compiled = jax.jit(products).lower(a, b).compile()
    (time,) = seconds(repeat, lambda: compiled(a, b))
    return many * 2 * HV * 64 * K * V / time


def _close(ours: jax.Array, theirs: torch.Tensor, lengths: Sequence[int]) -> None:
    """Refuses to time two things that are not the same."""
    want = np.concatenate([theirs[n, :length].numpy() for n, length in enumerate(lengths)])
    error = float(np.linalg.norm(np.asarray(ours) - want) / np.linalg.norm(want))
    if not error < 1e-4:
        raise RuntimeError(f"bench cpu: the outputs differ from Hugging Face's by {error:.1e}.")


def suite(repeat: int) -> list[Table]:
    """The tables of the suite, each call timed `repeat` times."""
    torch.set_num_threads(os.cpu_count() or 1)
    rate = product_rate(repeat)
    head = ["shape", "gdn_jax ms", "Hugging Face ms", "faster", "target"]
    prefill = Table(
        f"prefill, chunk_gated_delta_rule, float32, H={H} HV={HV} K=V={K}; products run at {rate / 1e9:.0f} GFLOP/s",
        [*head, "needed products ms", "ours over them", "temporary / (q, k, v, o)"],
        [],
    )
    for shape, lengths in PREFILL.items():
        ours = prefill_call(lengths)
        state = np.zeros((len(lengths), HV, K, V), np.float32)
        theirs = peers.huggingface_rule(ours.arguments, lengths, state, decode=False)
        _close(ours(), theirs(), lengths)
        mine, other = seconds(min(repeat, 3) if sum(lengths) > 4096 else repeat, ours, theirs)
        floor = FLOP_PER_TOKEN * sum(lengths) / rate
        moved = sum(x.nbytes for x in ours.arguments[:3]) + ours.arguments[2].nbytes
        speed = [shape, mine * 1e3, other * 1e3, other / mine, f">= {TARGETS[shape]}"]
        prefill.rows.append([*speed, floor * 1e3, mine / floor, ours.temporary_bytes / moved])

    decode = Table(
        f"decode, recurrent_gated_delta_rule, float32, H={H} HV={HV} K=V={K}, pool of 80 slots in place",
        [*head, "copy of the states ms", "ours over it"],
        [],
    )
    pool = jnp.zeros((80, HV, K, V), jnp.float32)
    for n in (1, 8, 64):
        slots = jnp.asarray(np.random.default_rng(1).permutation(80)[:n], jnp.int32)
        ours = InPlaceCall(gdn_jax.recurrent_gated_delta_rule, pool.copy(), inputs(n), state_indices=slots)
        theirs = peers.huggingface_rule(ours.arguments, (1,) * n, np.zeros((n, HV, K, V), np.float32), decode=True)
        _close(ours(), theirs(), (1,) * n)
        mine, other, copied = seconds(3 * repeat, ours, theirs, peers.copy((n, HV, K, V)))
        decode.rows.append([n, mine * 1e3, other * 1e3, other / mine, f">= {TARGETS[n]}", copied * 1e3, mine / copied])

    mixed = Table("one-token sequences beside a long one", ["batch", "ms", "over 1x1024", "target"], [])
    long, both = prefill_call((1024,)), prefill_call((1024,) + (1,) * 512)
    alone, together = seconds(repeat, long, both)
    mixed.rows.append(["1x1024", alone * 1e3, 1.0, ""])
    mixed.rows.append(["1x1024 + 512x1", together * 1e3, together / alone, "<= 3"])
    return [prefill, decode, mixed]
