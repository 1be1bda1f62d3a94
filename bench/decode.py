"""Suites `decode` and `mtp`: one step of the rule and of the whole layer on a GPU, as kernels and in a chain of layers.

Beside them the card's own copy of the same bytes, and the peers that can be imported.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import gdn_jax
from bench import gpu, peers
from bench.report import Table
from gdn_jax import GDNConfig, GDNWeights

H, HV, K, V, W = 16, 32, 128, 128, 4
LAYERS, POOL_BYTES = 36, 5 * 2**33  # fewer layers where their states would be more than that
PEER_BYTES = 2**31  # of states that a peer gets in turn
REQUESTS = (1, 8, 32, 64, 128, 256, 1024)
DRAFTS = (1, 3, 7)
STATES = ("bfloat16", "float32")
FORMS: dict[str, Any] = {"unrolled": {}, "unrolled, 20 steps a call": dict(turns=20), "lax.scan": dict(scan=True)}
RULES = {False: "gdn_recurrent", True: "gdn_mtp"}  # the kernels' names, by whether it is a verify step
SHARE = "% of a copy"
SIZES = f"H={H} HV={HV} K=V={K}, tokens bfloat16"


class Step:
    """Seeded inputs of one step of N requests, and the calls on them; with drafts S a verify step of S + 1 tokens each."""

    def __init__(self, n: int, states: str, drafts: int = 0) -> None:
        self.n, self.drafts, self.tokens = n, drafts, n * (drafts + 1)
        self.config = GDNConfig(
            num_v_heads=HV,
            num_k_heads=H,
            head_k_dim=K,
            head_v_dim=V,
            conv_kernel_dim=W,
            mtp_step=drafts,
            ssm_dtype=states,
        )
        rng, config = np.random.default_rng(0), self.config

        def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

        self.weights = GDNWeights(
            normal(config.conv_dim, W), None, normal(HV, dtype=jnp.float32), normal(HV, dtype=jnp.float32)
        )
        self.norm_weight = normal(V)
        self.mixed = normal(self.tokens, config.qkvz_dim + config.ba_dim)
        qkv, _, b, a = gdn_jax.split_qkvzba(self.mixed, config)
        self.a, self.b = a, b
        self.q, self.k, self.v = gdn_jax.split_qkv(qkv, config)
        self.g, self.beta = gdn_jax.gdn_gating(self.weights.A_log, a, b, self.weights.dt_bias, implementation="xla")
        self.slots = jnp.asarray(rng.permutation(n), jnp.int32)
        self.accepted = jnp.asarray(rng.integers(1, drafts + 2, n), jnp.int32)
        self.starts = jnp.arange(0, self.tokens + 1, drafts + 1, dtype=jnp.int32)
        self.rows = self.slots[:, None] * (drafts + 1) + jnp.arange(drafts + 1, dtype=jnp.int32)
        one = HV * K * V * jnp.dtype(states).itemsize
        self.bytes = n * one * (drafts + 2)  # read once; written once a token
        self.layers = min(LAYERS, max(2, POOL_BYTES // (n * one * (drafts + 1))))

    @property
    def own(self) -> Callable[..., Any]:
        """The rule."""
        return gdn_jax.mtp_gated_delta_rule if self.drafts else gdn_jax.recurrent_gated_delta_rule

    @property
    def arguments(self) -> tuple[Any, Any]:
        """Its tokens, and its indices by name."""
        tokens = (self.q, self.k, self.v, self.g, self.beta)
        if not self.drafts:
            return tokens, dict(state_indices=self.slots)
        indices = dict(read_indices=self.rows, write_indices=self.rows, num_accepted_tokens=self.accepted)
        return tokens, indices | dict(query_start_loc=self.starts)

    def rule(self, **form: Any) -> gpu.Chain:
        """The rule alone, on all layers."""

        def step(pool: jax.Array, layer: Any, tokens: Any, indices: Any) -> Any:
            return self.own(*tokens, ssm_state=pool, layer=layer, **indices)

        pool = gdn_jax.init_state(self.config, self.n, self.layers).ssm
        return gpu.Chain(step, pool, self.arguments, self.layers, **form)

    def layer(self, **form: Any) -> gpu.Chain:
        """Everything between the projections, on all layers."""
        indices = dict(state_indices=self.slots)
        own: Callable[..., Any] = gdn_jax.gdn_decode
        if self.drafts:
            own, indices = gdn_jax.gdn_mtp_decode, indices | dict(num_accepted_tokens=self.accepted)

        def step(state: Any, layer: Any, weights: Any, mixed: Any, norm_weight: Any, indices: Any) -> Any:
            out = own(weights, state, mixed, config=self.config, norm_weight=norm_weight, layer=layer, **indices)
            return out.o, out.state

        state = gdn_jax.init_state(self.config, self.n, self.layers)
        return gpu.Chain(step, state, (self.weights, self.mixed, self.norm_weight, indices), self.layers, **form)


def target(operator: str, states: str, n: int, drafts: int) -> str:
    """What the project asks for on an H200."""
    if operator == "layer":
        if not drafts and states == "bfloat16" and n in (1, 8):
            return f"<= {4.0 if n == 1 else 7.5} us"
        return "<= 1.1x" if n >= (8 if drafts else 32) and drafts in (0, 3) else ""
    if drafts:
        return ">= 85 %" if drafts == 3 and n >= 64 else ""
    if n == 1:
        return "<= 2.6 us"
    if states == "float32":
        return ">= 90 %" if n >= 64 else ""
    return ">= 82 %" if n == 64 else ">= 88 %" if n >= 256 else ""


def suite(repeat: int, *, verify: bool) -> list[Table]:
    """The tables of `decode`, or with `verify` of `mtp`."""
    if jax.default_backend() != "gpu":
        raise SystemExit("bench: the suites decode and mtp time kernels on a GPU, and JAX's default device is none.")
    rate, found = gpu.copy_rate(repeat), peers.of_decode()
    copy = f"{SIZES}; a copy moves {rate / 1e12:.2f} TB/s"
    keys = ["states", "S", "N", "layers"] if verify else ["states", "N", "layers"]
    times = ["µs", "GB/s of states", SHARE]
    chain = ["wall µs a layer", "over the kernel µs", "other kernels a layer"]
    compared = [f"{name} {what}" for name in found for what in ("µs", "over ours")]
    operators = ("mtp_gated_delta_rule", "gdn_mtp_decode") if verify else ("recurrent_gated_delta_rule", "gdn_decode")
    rules = Table(f"{operators[0]}, {copy}", [*keys, *times, "target", *chain, *compared], [])
    layers = Table(
        f"{operators[1]}, one launch with norm_weight, {copy}", [*keys, *times, "over the rule", "target", *chain], []
    )
    forms = Table("ways to run the layers, N = 1", ["operator", *keys, "form", "µs", *chain], [])
    for states in STATES:
        for drafts in DRAFTS if verify else (0,):
            check(Step(8, states, drafts), found)
            for n in REQUESTS:
                step = Step(n, states, drafts)
                key = [states, *([drafts] if verify else []), n, step.layers]
                rule = _times(step.rule(), RULES[verify], repeat)
                whole = _times(step.layer(), "gdn_decode", repeat)
                theirs = [peer_us(peer(step), step, repeat) for peer in found.values()]
                of_peers = [x for us in theirs for x in (us if us is not None else "-", us / rule[0] if us else "-")]
                rules.rows.append(
                    [*key, *_bytes(rule[0], step, rate), target("rule", states, n, drafts), *rule[1:], *of_peers]
                )
                over = whole[0] / rule[0]
                layers.rows.append(
                    [*key, *_bytes(whole[0], step, rate), over, target("layer", states, n, drafts), *whole[1:]]
                )
                print(f"{key}: rule {rule[0]:.2f} µs, layer {whole[0]:.2f} µs", file=sys.stderr, flush=True)
                if n == 1:
                    for operator, name, make in zip(operators, (RULES[verify], "gdn_decode"), (step.rule, step.layer)):
                        for form, how in FORMS.items():
                            forms.rows.append([operator, *key, form, *_times(make(**how), name, repeat)])
    return [rules, layers, forms]


def _times(chain: gpu.Chain, name: str, repeat: int) -> list[float]:
    """Kernel µs, wall µs a layer, their difference, and other kernels a layer."""
    us, others = gpu.kernel_us(chain, name, repeat)
    wall = gpu.wall_us(chain, chain.wait, 3 * repeat) / chain.layers
    return [us, wall, wall - us, others]


def _bytes(us: float, step: Step, rate: float) -> list[float]:
    per_second = step.bytes / us * 1e6
    return [us, per_second / 1e9, 100 * per_second / rate]


def peer_us(call: peers.Peer | None, step: Step, repeat: int) -> float | None:
    """µs of all kernels of one call of a peer, on states in turn that no cache holds."""
    if call is None:
        return None
    shape = (step.n, HV, K, V)
    one = step.bytes // (step.drafts + 2)
    states = torch.zeros(
        max(2, PEER_BYTES // one),
        *shape,
        dtype=getattr(torch, step.config.ssm_dtype),
        device=torch.from_dlpack(step.q).device,
    )
    times = gpu.kernels(lambda: [call(state) for state in states], torch.cuda.synchronize, repeat)
    return sum(us for _, us in times) / (repeat * len(states))


def check(step: Step, found: dict[str, Callable[[Step], peers.Peer | None]]) -> None:
    """Refuses to time what does not compute the same as the XLA form (which the tests compare with float64)."""
    shape = (1, step.n * (step.drafts + 1), HV, K, V)
    pool = jax.random.normal(jax.random.key(0), shape, step.config.ssm_dtype)

    def ours(implementation: str | None) -> Any:
        tokens, indices = step.arguments
        return step.own(*tokens, ssm_state=pool, layer=0, implementation=implementation, **indices)

    want, results = ours("xla"), {"the kernel": ours(None)}
    first = pool[0, step.rows[jnp.arange(step.n), step.accepted - 1]]
    for name, peer in found.items():
        if (call := peer(step)) is not None:
            results[name] = (jnp.from_dlpack(call(torch.from_dlpack(first).clone()).contiguous()),)
    for name, result in results.items():
        for x, y in zip(result, want):
            x, y = (np.asarray(z.astype(jnp.float32)) for z in (x, y))
            if not np.abs(x - y).max() <= 2e-2 * np.abs(y).max():
                what = f"{step.config.ssm_dtype} states, S={step.drafts}"
                raise RuntimeError(f"bench decode, mtp: {name} differs from the XLA form ({what}).")


SUITES = {"decode": partial(suite, verify=False), "mtp": partial(suite, verify=True)}
