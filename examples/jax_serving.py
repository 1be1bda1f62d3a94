"""Continuous batching in JAX alone: five requests on two slots, packed prefill pieces beside decode steps.

Every request's outputs are then compared with one prefill of all its tokens (random projections) alone.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gdn_jax import PAD_SLOT, GDNConfig, GDNWeights, check_batch, gdn_prefill, init_state

SLOTS, PIECE, DECODE = 2, 12, 4  # request slots; prompt tokens a step and request; decode steps a request
T = SLOTS * PIECE  # static shapes: every call has T packed tokens and SLOTS sequences
config = GDNConfig(4, 2, 32, 32, conv_kernel_dim=4, ssm_dtype="float32", conv_dtype="float32")
rng, width = np.random.default_rng(0), config.qkvz_dim + config.ba_dim
weights = GDNWeights(0.5 * jnp.asarray(rng.standard_normal((config.conv_dim, 4), np.float32)), None, *jnp.ones((2, 4)))
requests = [rng.standard_normal((prompt + DECODE, width), np.float32) for prompt in (13, 3, 20, 8, 1)]


@jax.jit(donate_argnums=0)  # the pools are updated in their own memory
def step(state, mixed, starts, slots, fresh):
    batch = dict(query_start_loc=starts, state_indices=slots, has_initial_state=~fresh)
    out = gdn_prefill(weights, state, mixed, config=config, **batch)
    return out.state, out.o


def call(state, pieces):
    """One step over at most SLOTS pieces `(slot, first, tokens)`: pads them, checks the batch, runs it."""
    pieces = [*pieces, *[(PAD_SLOT, True, requests[0][:0])] * (SLOTS - len(pieces))]
    slots, fresh, tokens = zip(*pieces)
    starts = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
    slots, fresh, tokens = np.array(slots, np.int32), np.array(fresh), np.concatenate(tokens)
    check_batch(num_slots=SLOTS, num_tokens=T, state_indices=slots, query_start_loc=starts, has_initial_state=~fresh)
    state, o = step(state, np.pad(tokens, ((0, T - len(tokens)), (0, 0))), starts, slots, fresh)
    return state, [np.asarray(o[starts[n] : starts[n + 1]]) for n in range(SLOTS)]


state, waiting, running, steps = init_state(config, SLOTS), list(range(len(requests))), {}, 0
done = [np.zeros((0, 4, 32), np.float32) for _ in requests]  # the outputs so far of each request
while waiting or running:
    for slot in range(SLOTS):
        if slot not in running and waiting:
            running[slot] = waiting.pop(0)
    pieces = []
    for slot, r in running.items():  # up to PIECE tokens of the prompt, or one token
        count = max(1, min(PIECE, len(requests[r]) - DECODE - len(done[r])))
        pieces.append((slot, not len(done[r]), requests[r][len(done[r]) :][:count]))
    state, outputs = call(state, pieces)
    for (slot, r), o in zip(list(running.items()), outputs):
        done[r] = np.concatenate([done[r], o])
        if len(done[r]) == len(requests[r]):
            del running[slot]
    steps += 1

alone = [call(init_state(config, SLOTS), [(0, True, tokens)])[1][0] for tokens in requests]
worst = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(done, alone))
print(f"{len(requests)} requests on {SLOTS} slots in {steps} steps, {step._cache_size()} program compiled")
print(f"largest relative difference from each request alone: {worst:.1e}")
raise SystemExit(worst > 1e-5)
