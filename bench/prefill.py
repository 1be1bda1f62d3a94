"""Suite `prefill`: the chunked rule and the whole layer over packed sequences on a GPU, beside floors, float64 and peers.

Tokens in bfloat16, states in float32, in permuted slots; q and k are normalised inside. The sets of inputs that the calls take
in turn are more than a cache holds. What a call needs: 180 kFLOP a token and value head, and these bytes once:

- the rule: q, k, v, g, beta, o, and the states in and out;
- the layer, without its norm: q, k, v, b, a of `mixed_qkvzba` (z goes through unread), o, and states and conv rows in and out.

Kernel times are sums over the kernels of a call, by CUPTI; wall times are of a `fori_loop` over all sets, in which every turn
waits for the states of the one before, and of a peer's CUDA graph over all sets, where it can be captured. The ratio to a peer is
the smaller of both.
"""

import dataclasses
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

import gdn_jax
from bench import gpu, peers
from bench.report import Table, seconds
from gdn_jax import GDNConfig, GDNState, GDNWeights, reference

HEADS = ((16, 32), (8, 16), (4, 8), (16, 64))
K, V, W = 128, 128, 4
EQUAL = ((1, 2048), (1, 8192), (1, 32768), (8, 1024), (4, 8192), (64, 128), (256, 17))
RAGGED = np.random.default_rng(0).permutation(np.geomspace(1, 6000, 48).round().astype(int)).tolist()
SHAPES = {f"{n}x{length}": [length] * n for n, length in EQUAL} | {"ragged 48 of 1 to 6000": RAGGED}
TARGETS = {  # ms of the rule and of the layer with the first heads
    "1x2048": (0.055, 0.073),
    "1x8192": (0.18, 0.25),
    "1x32768": (0.58, 0.86),
    "8x1024": (0.115, 0.19),
    "4x8192": (0.42, 0.70),
    "64x128": (0.18, 0.25),
}
FLOP, PEAK = 180e3, 790e12  # needed a token and value head; of bfloat16 products a second
TURN_BYTES = 2**27  # of inputs in turn, at least two sets
TURN_SECONDS = 5e-3  # that the clock takes at least, were the call at its floor
ROUNDS = 3  # in which the calls take turns before CUPTI
SAMPLE, PAIRS = 4096, 16  # tokens, and value heads of a sequence, that float64 goes through
WRONG = 2e-2  # of the largest value


class Own:
    """One of our operators, `step(state, inputs)` to `(o, state)`, on a donated state that goes from set to set."""

    def __init__(self, step: Callable[..., Any], state: Any, sets: Sequence[Any]) -> None:
        self.step, self.sets = step, sets
        self.state, self.first = (jax.tree.map(jnp.copy, state) for _ in range(2))
        self.compiled = jax.jit(step, donate_argnums=0).lower(state, sets[0]).compile()
        self.calls = [partial(self, inputs) for inputs in sets]

    def __call__(self, inputs: Any) -> Any:
        o, self.state = self.compiled(self.state, inputs)
        return o

    @property
    def temporary_bytes(self) -> int:
        return getattr(self.compiled.memory_analysis(), "temp_size_in_bytes", 0)

    def chain(self, turns: int) -> gpu.Chain:
        """All sets, `turns` times in one program; nothing of a step may leave the loop or be shared with the next."""

        def step(state: Any, _: Any, sets: Any) -> Any:
            o = None
            for inputs in sets:
                o, state = self.step(*lax.optimization_barrier((state, inputs)))
            return o, state

        return gpu.Chain(step, self.first, (self.sets,), 1, turns=turns)


class Batch:
    """Seeded inputs of sequences of these lengths, in several sets with slots of their own, and our operators on them."""

    def __init__(self, heads: tuple[int, int], lengths: Sequence[int]) -> None:
        (h, hv), self.lengths, n, tokens = heads, lengths, len(lengths), sum(lengths)
        self.config = config = GDNConfig(
            num_v_heads=hv,
            num_k_heads=h,
            head_k_dim=K,
            head_v_dim=V,
            conv_kernel_dim=W,
            ssm_dtype="float32",
        )
        states, moved = 2 * n * hv * K * V * 4, tokens * (config.conv_dim + config.value_dim) * 2
        self.moved = moved  # q, k, v, o
        self.rule_bytes = moved + tokens * 2 * hv * 4 + states
        self.layer_bytes = moved + tokens * 2 * hv * 2 + states + 2 * n * config.conv_dim * (W - 1) * 2
        self.flop = FLOP * hv * tokens
        count = max(2, math.ceil(TURN_BYTES / self.rule_bytes))
        rng, keys = np.random.default_rng(0), iter(jax.random.split(jax.random.key(0), count + 4))

        def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
            return jax.random.normal(next(keys), shape, dtype)

        gates = (jnp.asarray(rng.standard_normal(hv) + shift, jnp.float32) for shift in (-2, 0))
        self.weights = GDNWeights(normal(config.conv_dim, W) / 2, None, *gates)
        empty = gdn_jax.init_state(config, count * n)
        self.state = GDNState(normal(*empty.conv.shape), 0.1 * normal(*empty.ssm.shape, dtype=jnp.float32))
        self.starts = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
        self.slots = jnp.asarray(rng.permutation(count * n).reshape(count, n), jnp.int32)
        self.mixed = [normal(tokens, config.qkvz_dim + config.ba_dim) for _ in range(count)]
        self.tokens = [self._tokens(mixed) for mixed in self.mixed]
        self.indices = [dict(query_start_loc=self.starts, state_indices=slots) for slots in self.slots]

    def _tokens(self, mixed: jax.Array) -> tuple[jax.Array, ...]:
        """q, k, v, g, beta."""
        qkv, _, b, a = gdn_jax.split_qkvzba(mixed, self.config)
        gates = gdn_jax.gdn_gating(self.weights.A_log, a, b, self.weights.dt_bias, implementation="xla")
        return *gdn_jax.split_qkv(qkv, self.config), *gates

    @property
    def given(self) -> list[tuple[Any, jax.Array]]:
        """Tokens and initial states of each set, for the peers."""
        return [(tokens, self.state.ssm[slots]) for tokens, slots in zip(self.tokens, self.slots)]

    def rule(self) -> Own:
        def step(pool: jax.Array, inputs: Any) -> Any:
            tokens, indices = inputs
            return gdn_jax.chunk_gated_delta_rule(*tokens, ssm_state=pool, **indices)

        return Own(step, self.state.ssm, list(zip(self.tokens, self.indices)))

    def layer(self) -> Own:
        def step(state: GDNState, inputs: Any) -> Any:
            weights, mixed, indices = inputs
            out = gdn_jax.gdn_prefill(weights, state, mixed, config=self.config, **indices)
            return out.o, out.state

        return Own(step, self.state, [(self.weights, *inputs) for inputs in zip(self.mixed, self.indices)])

    def results(self, own: Own) -> tuple[jax.Array, jax.Array]:
        """o and the final states of the first set."""
        o = own.calls[0]()
        return o, jax.tree.leaves(own.state)[-1][self.slots[0]]

    def _one(self, n: int, head: int) -> tuple[slice, slice, slice, int, dict[str, Any]]:
        """Tokens, key head, value head and slot of a value head of a sequence, and the indices of it alone."""
        start, length = int(self.starts[n]), self.lengths[n]
        key = head // self.config.v_heads_per_k_head
        alone = dict(query_start_loc=np.array([0, length]), state_indices=np.array([0]))
        heads = slice(key, key + 1), slice(head, head + 1)
        return slice(start, start + length), *heads, int(self.slots[0, n]), alone

    def true_rule(self, n: int, head: int) -> Any:
        """o `[length, 1, V]` and the final state `[1, 1, K, V]` of a value head of a sequence, in float64."""
        span, key, value, slot, alone = self._one(n, head)
        q, k, v, g, beta = map(_torch, self.tokens[0])
        tokens = (q[span, key], k[span, key], v[span, value], g[span, value], beta[span, value])
        pool = _double(_torch(self.state.ssm)[slot : slot + 1, value])
        return reference.chunk_gated_delta_rule(*map(_double, tokens), ssm_state=pool, **alone)

    def true_layer(self, n: int, head: int) -> Any:
        """The same of the layer."""
        span, key, value, slot, alone = self._one(n, head)
        config, weights = self.config, self.weights
        keys, values = np.arange(K) + key.start * K, np.arange(V) + head * V
        channels = np.concatenate([keys, config.key_dim + keys, 2 * config.key_dim + values])
        gates = config.qkvz_dim + head + np.array([0, config.tp_num_v_heads])
        columns = torch.from_numpy(np.concatenate([channels, config.conv_dim + values, gates]))
        conv, ssm = (_torch(pool)[slot : slot + 1] for pool in self.state)
        out = reference.gdn_prefill(
            GDNWeights(weights.conv_weight[channels], None, weights.A_log[value], weights.dt_bias[value]),
            GDNState(*map(_double, (conv[:, torch.from_numpy(channels).to(conv.device)], ssm[:, value]))),
            _double(_torch(self.mixed[0])[span][:, columns.to(conv.device)]),
            config=dataclasses.replace(config, num_v_heads=1, num_k_heads=1),
            **alone,
        )
        return out.o, out.state.ssm


def _torch(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)


def _double(x: torch.Tensor) -> Any:
    return x.double().cpu().numpy()


class Sample:
    """Some value heads of sequences, the longest first, and what float64 makes of them."""

    def __init__(self, batch: Batch, truth: Callable[[int, int], Any]) -> None:
        rng, lengths = np.random.default_rng(1), batch.lengths
        sequences = [int(np.argmax(lengths)), *rng.integers(0, len(lengths), PAIRS - 1).tolist()]
        until = np.cumsum([lengths[n] for n in sequences])
        taken = max(1, int((until <= SAMPLE).sum()))
        heads = rng.integers(0, batch.config.tp_num_v_heads, taken).tolist()
        self.pairs, self.starts = list(zip(sequences[:taken], heads)), np.cumsum([0, *lengths])
        self.truths = [truth(*pair) for pair in self.pairs]

    def errors(self, o: Any, states: Any) -> list[tuple[float, float]]:
        """Of o and of the final states: the error by the norms, and the largest one over the largest value."""
        o, states = _torch(o), _torch(states)
        found = [(_double(o[self.starts[n] : self.starts[n + 1], h]), _double(states[n, h])) for n, h in self.pairs]
        results = []
        for have, want in zip(zip(*found), zip(*self.truths)):
            have, want = (np.concatenate([np.ravel(x) for x in part]) for part in (have, want))
            wrong = have - want
            relative = float(np.linalg.norm(wrong) / np.linalg.norm(want))
            results.append((relative, float(np.abs(wrong).max() / np.abs(want).max())))
        return results


def checked(name: str, sample: Sample, o: Any, states: Any) -> list[float]:
    """The errors of ours; refuses to time what is wrong."""
    errors = sample.errors(o, states)
    if not all(worst <= WRONG for _, worst in errors):
        raise RuntimeError(f"bench prefill: the {name} differs from float64: {errors} (norms, largest values).")
    return [relative for relative, _ in errors]


def kernel_ms(calls: Sequence[Callable[[], Any]], repeat: int) -> float:
    """The sum of all kernels of one call."""
    done: list[Any] = []

    def turn() -> None:
        done[:] = [call() for call in calls]

    def wait() -> None:
        jax.block_until_ready(done)
        torch.cuda.synchronize()

    return sum(us for _, us in gpu.kernels(turn, wait, repeat)) / (repeat * len(calls)) / 1e3


def graph(calls: Sequence[Callable[[], Any]], turns: int) -> Callable[[], None]:
    """All calls as a CUDA graph, replayed `turns` times and waited for."""
    for call in calls:  # what they cache must be there before the capture
        call()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        for call in calls:
            call()

    def replay() -> None:
        for _ in range(turns):
            captured.replay()
        torch.cuda.synchronize()

    replay()
    return replay


def tried(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a peer's call, or None with the reason on stderr."""
    try:
        return call(*arguments)
    except Exception as error:
        print(f"{what}: {error!r}"[:500], file=sys.stderr, flush=True)
        return None


def suite(repeat: int, only: str = "") -> list[Table]:
    """The tables of `prefill`, of the rows whose heads and shape match `only`."""
    if jax.default_backend() != "gpu":
        raise SystemExit("bench: the suite prefill times kernels on a GPU, and JAX's default device is none.")
    rate, found = gpu.copy_rate(repeat), peers.of_prefill()
    known = f"K=V={K} W={W}, tokens bfloat16, states float32; a copy moves {rate / 1e12:.2f} TB/s"
    times = ["heads", "shape", "ms", "target ms", "TFLOP/s", "over the compute floor", "over the byte floor"]
    times += ["wall ms", "temporary / (q, k, v, o)", "error of o", "of states"]
    rules = Table(f"chunk_gated_delta_rule, {known}", [*times, *(f"{name} over ours" for name in found)], [])
    layers = Table(f"gdn_prefill, no norm_weight, {known}", [*times, "over the rule"], [])
    compared = ["heads", "shape", "peer", "ms", "over ours", "wall ms", "wall over ours", "error of o", "of states"]
    others = Table(f"peers of chunk_gated_delta_rule, {known}", compared, [])
    for heads in HEADS:
        for shape, lengths in SHAPES.items():
            key = ["/".join(map(str, heads)), shape]
            if re.search(only, " ".join(key)):
                rule, layer, rest = rows(key, Batch(heads, lengths), found, rate, repeat)
                rules.rows.append(rule)
                layers.rows.append(layer)
                others.rows.extend(rest)
                print(f"{key}: rule {rule[2:]}, layer {layer[2:]}", file=sys.stderr, flush=True)
    return [rules, layers, others]


def rows(key: list[str], batch: Batch, found: dict[str, Any], rate: float, repeat: int) -> tuple[Any, Any, list[Any]]:
    """The rows of the rule, of the layer and of the peers on one batch."""
    own, sample = {"rule": batch.rule(), "layer": batch.layer()}, Sample(batch, batch.true_rule)
    samples = (sample, Sample(batch, batch.true_layer))
    errors = [checked(f"{name} {key}", x, *batch.results(own[name])) for name, x in zip(own, samples)]
    turns = math.ceil(TURN_SECONDS / (len(batch.mixed) * max(batch.flop / PEAK, batch.rule_bytes / rate)))
    calls, torches, wrong = {name: x.calls for name, x in own.items()}, [], {}
    for name, peer in found.items():
        what = f"{key} {name}"
        made = tried(what, peer, batch)
        result = made and tried(what, made[0])
        if theirs := result and tried(what, sample.errors, *result):
            calls[name], wrong[name] = made, [relative for relative, _ in theirs]
            if isinstance(result[0], torch.Tensor):
                torches.append(name)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, of_sets in calls.items():
            taken[name].append(kernel_ms(of_sets, repeat))
    ms = {name: statistics.median(own) for name, own in taken.items()}
    clocked: dict[str, Callable[[], Any]] = {name: x.chain(turns) for name, x in own.items()}
    for name in torches:
        if replay := tried(f"{key} {name}, captured", graph, calls[name], turns):
            clocked[name] = replay
    each = 1e3 / (turns * len(batch.mixed))
    wall = {name: each * time for name, time in zip(clocked, seconds(repeat, *clocked.values()))}

    peers_rows, ratios = [], []
    for name in found:
        over = [x[name] / x["rule"] if name in x else "-" for x in (ms, wall)]
        ratios.append(min((x for x in over if x != "-"), default="-"))
        times = [ms.get(name, "-"), over[0], wall.get(name, "-"), over[1]]
        peers_rows.append([*key, name, *times, *wrong.get(name, ["-", "-"])])
    targets = TARGETS.get(key[1], ("", "")) if key[0] == "/".join(map(str, HEADS[0])) else ("", "")
    ours = []
    for (name, x), moved, target, error in zip(own.items(), (batch.rule_bytes, batch.layer_bytes), targets, errors):
        at, target = ms[name] / 1e3, f"<= {target}" if target else ""
        speed = [batch.flop / at / 1e12, at * PEAK / batch.flop, at * rate / moved]
        ours.append([*key, ms[name], target, *speed, wall[name], x.temporary_bytes / batch.moved, *error])
    return [*ours[0], *ratios], [*ours[1], ms["layer"] / ms["rule"]], peers_rows
