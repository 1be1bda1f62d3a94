"""The layer on packed prompts in three launches: the conv and the gates, then the chunk kernels on what they leave behind.

The heads of q, k and v stay columns of the conv's output, `[T, q | k | v]`, where TMA finds them: nothing is split or copied.
float16 is the exception, whose q and k are normalised before the products.
"""

import jax.numpy as jnp
from jax import Array

from gdn_jax.mosaic.chunk import chunk, rule
from gdn_jax.mosaic.prepare import Heads
from gdn_jax.mosaic.prologue import prologue
from gdn_jax.types import GDNConfig, GDNWeights
from gdn_jax.varlen import Batch, state_rows


def prefill(
    mixed: Array, weights: GDNWeights, conv: Array, ssm: Array, batch: Batch, ends: Array, *, config: GDNConfig
) -> tuple[Array, Array, Array]:
    """`mixed` `[T, qkvz_dim + ba_dim]` bfloat16 or float16, `conv` `[L, num_slots, D, W - 1 + S]`, `ssm` `[L, num_slots (S + 1),
    HV, K, V]`, `batch` with every rule on padding applied and request slots, `ends` int32 `[N]`: where the tokens of a sequence
    end, padding too. K and V are 64 or 128, D a multiple of 128, W up to 8; T, N, L and num_slots at least 1.

    Returns `o` `[T, HV, V]` in `mixed.dtype`, zeros at padding, before the norm, and the updated pools.
    """
    h, hv, k_dim, v_dim = config.tp_num_k_heads, config.tp_num_v_heads, config.head_k_dim, config.head_v_dim
    gates = (weights.A_log, weights.dt_bias, config.qkvz_dim, config.qkvz_dim + hv)
    qkv, (g, beta), conv = prologue(
        mixed, weights.conv_weight, weights.conv_bias, conv, *batch, gates, activation=config.activation
    )
    first = (0, config.key_dim, 2 * config.key_dim)
    of_rule = (g, beta, ssm, state_rows(batch, config.mtp_step + 1), ends, jnp.float32(k_dim**-0.5))
    if mixed.dtype == jnp.float16:
        q, k, v = jnp.split(qkv, first[1:], axis=1)
        q, k = (x.reshape(-1, h, k_dim) for x in (q, k))
        o, ssm = chunk(q, k, v.reshape(-1, hv, v_dim), *of_rule, use_qk_l2norm=True)
    else:
        o, ssm = rule(qkv, qkv, qkv, *of_rule, heads=Heads(h, hv, k_dim, v_dim, first), use_qk_l2norm=True)
    return o.reshape(-1, hv, v_dim), conv, ssm
