"""Torch owns the state of a two-layer model, JAX decodes on it through InPlace; the pools never move."""

import jax.numpy as jnp
import torch

from gdn_jax import GDNConfig, GDNState, GDNWeights, gdn_decode, init_state
from interop import GDNCache, InPlace, to_jax

LAYERS, SLOTS, STEPS = 2, 5, 6
torch.manual_seed(0)
config = GDNConfig(4, 2, 32, 32, conv_kernel_dim=4, ssm_dtype="float32", conv_dtype="float32")
device = "cuda" if torch.cuda.is_available() else "cpu"
cache = GDNCache(config, LAYERS, SLOTS, device=device)
weights = [
    GDNWeights(
        to_jax(torch.randn(config.conv_dim, 4, device=device), copy=True),
        None,
        to_jax(torch.randn(4, device=device), copy=True),
        to_jax(torch.randn(4, device=device), copy=True),
    )
    for _ in range(LAYERS)
]


def decode(state: GDNState, mixed, slots, layer_weights):
    out = gdn_decode(layer_weights, state, mixed, config=config, state_indices=slots)
    return out.state, out.o


call = InPlace(decode)
pointers = [pool.data_ptr() for pool in (cache.state.conv, cache.state.ssm)]
slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=device)  # the second sequence is padding
want = [init_state(config, SLOTS) for _ in range(LAYERS)]
worst = 0.0
for _ in range(STEPS):
    for i in range(LAYERS):
        mixed = torch.randn(3, config.qkvz_dim + config.ba_dim, device=device)
        o = call(cache.layer(i), mixed, slots, weights[i])
        expected = gdn_decode(weights[i], want[i], to_jax(mixed), config=config, state_indices=to_jax(slots))
        want[i] = expected.state
        worst = max(worst, float(jnp.abs(to_jax(o) - expected.o).max()))

state_gap = max(float(jnp.abs(to_jax(cache.layer(i).ssm) - want[i].ssm).max()) for i in range(LAYERS))
same_place = pointers == [pool.data_ptr() for pool in (cache.state.conv, cache.state.ssm)]
untouched = not cache.state.ssm[:, [1, 2, 4]].any()
print(f"{STEPS} steps of {LAYERS} layers on {device}: outputs differ by {worst:.1e}, states by {state_gap:.1e}")
print(f"pools in the same place: {same_place}; unnamed slots untouched: {untouched}")
raise SystemExit(not (same_place and untouched and worst < 1e-4 and state_gap < 1e-4))
