"""Hugging Face weights in our order: q | k | v | z | b | a of one tensor-parallel rank."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from gdn_jax import checks
from gdn_jax.checks import ArrayLike
from gdn_jax.types import GDNConfig, GDNWeights


def _rank(this: str, config: GDNConfig, rank: int) -> int:
    checks.is_type(this, "config", config, GDNConfig)
    checks.size(this, "rank", rank, 0)
    if rank >= config.tp_size:
        raise ValueError(f"{this}: `rank` is {rank}, expected less than tp_size={config.tp_size}.")
    return rank


def _of_rank(size: int, config: GDNConfig, rank: int) -> slice:
    """The part of `size` rows, ordered by head, that belongs to `rank`."""
    each = size // config.tp_size
    return slice(rank * each, (rank + 1) * each)


def pack_hf_projections(in_proj_qkvz: ArrayLike, in_proj_ba: ArrayLike, config: GDNConfig, rank: int = 0) -> Array:
    """Qwen3-Next's two projections as one matrix, so that `mixed_qkvzba = hidden_states @ packed.T`.

    Its rows are grouped by key head: q, k, the v and then the z of its value heads; and b, then a.

    Args:
        in_proj_qkvz: `[2 * num_k_heads * K + 2 * num_v_heads * V, hidden]`, the whole model's.
        in_proj_ba: `[2 * num_v_heads, hidden]`, the whole model's.
        config: the layer's sizes.
        rank: which tensor-parallel rank.

    Returns:
        `[qkvz_dim + ba_dim, hidden]`, the rank's rows in the order q | k | v | z | b | a.

    Raises:
        ValueError: shapes that do not fit `config`, or a rank that is not below `tp_size`.
        TypeError: no array, or another dtype.

    Source: `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering` in transformers.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
        >>> pack_hf_projections(jnp.zeros((24, 8)), jnp.zeros((4, 8)), config).shape
        (28, 8)
    """
    this, c = "pack_hf_projections", config
    rank = _rank(this, c, rank)
    rows = c.tp_size * c.qkvz_dim
    _, hidden = checks.floats(this, "in_proj_qkvz", in_proj_qkvz, qkvz_dim=rows, hidden=None)
    checks.floats(this, "in_proj_ba", in_proj_ba, ba_dim=2 * c.num_v_heads, hidden=hidden)
    checks.same_dtype(this, in_proj_qkvz=in_proj_qkvz, in_proj_ba=in_proj_ba)
    rep, heads = c.v_heads_per_k_head, _of_rank(c.num_k_heads, c, rank)
    qkvz = jnp.asarray(in_proj_qkvz).reshape(c.num_k_heads, -1, hidden)[heads]
    ba = jnp.asarray(in_proj_ba).reshape(c.num_k_heads, -1, hidden)[heads]
    sizes = [c.head_k_dim, c.head_k_dim, rep * c.head_v_dim]
    parts = [*jnp.split(qkvz, np.cumsum(sizes), axis=1), *jnp.split(ba, 2, axis=1)]
    return jnp.concatenate([part.reshape(-1, hidden) for part in parts])


def pack_hf_projections_split(
    qkv: ArrayLike, z: ArrayLike, b: ArrayLike, a: ArrayLike, config: GDNConfig, rank: int = 0
) -> Array:
    """Qwen3.5's four projections as one matrix, so that `mixed_qkvzba = hidden_states @ packed.T`.

    Args:
        qkv: `[2 * num_k_heads * K + num_v_heads * V, hidden]`, q | k | v, the whole model's like the others.
        z: `[num_v_heads * V, hidden]`.
        b: `[num_v_heads, hidden]`.
        a: `[num_v_heads, hidden]`.
        config: the layer's sizes.
        rank: which tensor-parallel rank.

    Returns:
        `[qkvz_dim + ba_dim, hidden]`, the rank's rows in the order q | k | v | z | b | a.

    Raises:
        ValueError: shapes that do not fit `config`, or a rank that is not below `tp_size`.
        TypeError: no array, or another dtype.

    Source: `Qwen3_5GatedDeltaNet` in transformers.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
        >>> one = jnp.zeros((2, 8))
        >>> pack_hf_projections_split(jnp.zeros((16, 8)), jnp.zeros((8, 8)), one, one, config).shape
        (28, 8)
    """
    this, c = "pack_hf_projections_split", config
    rank = _rank(this, c, rank)
    _, hidden = checks.floats(this, "qkv", qkv, conv_dim=c.tp_size * c.conv_dim, hidden=None)
    checks.floats(this, "z", z, value_dim=c.tp_size * c.value_dim, hidden=hidden)
    checks.floats(this, "b", b, num_v_heads=c.num_v_heads, hidden=hidden)
    checks.floats(this, "a", a, num_v_heads=c.num_v_heads, hidden=hidden)
    checks.same_dtype(this, qkv=qkv, z=z, b=b, a=a)
    return jnp.concatenate(
        [_conv_rows(qkv, c, rank), *(jnp.asarray(x)[_of_rank(x.shape[0], c, rank)] for x in (z, b, a))]
    )


def _conv_rows(x: ArrayLike, config: GDNConfig, rank: int) -> Array:
    """The rank's rows of q | k | v of the whole model."""
    key_dim = config.tp_size * config.key_dim
    parts = jnp.split(jnp.asarray(x), [key_dim, 2 * key_dim])
    return jnp.concatenate([part[_of_rank(part.shape[0], config, rank)] for part in parts])


def gdn_weights_from_hf(
    conv1d_weight: ArrayLike,
    conv1d_bias: ArrayLike | None,
    A_log: ArrayLike,
    dt_bias: ArrayLike,
    config: GDNConfig,
    rank: int = 0,
) -> GDNWeights:
    """The other weights of a Hugging Face layer.

    Args:
        conv1d_weight: `[2 * num_k_heads * K + num_v_heads * V, 1, W]`, the whole model's like the others.
        conv1d_bias: `[2 * num_k_heads * K + num_v_heads * V]` or None.
        A_log: `[num_v_heads]`.
        dt_bias: `[num_v_heads]`.
        config: the layer's sizes.
        rank: which tensor-parallel rank.

    Returns:
        `GDNWeights` of the rank.

    Raises:
        ValueError: shapes that do not fit `config`, or a rank that is not below `tp_size`.
        TypeError: no array, or another dtype.

    Source: `Qwen3NextGatedDeltaNet` in transformers.

    Example:
        >>> config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=4, head_v_dim=4, conv_kernel_dim=4)
        >>> gdn_weights_from_hf(jnp.zeros((16, 1, 4)), None, jnp.zeros(2), jnp.zeros(2), config).conv_weight.shape
        (16, 4)
    """
    this, c = "gdn_weights_from_hf", config
    rank = _rank(this, c, rank)
    channels = c.tp_size * c.conv_dim
    checks.floats(this, "conv1d_weight", conv1d_weight, channels=channels, one=1, conv_kernel_dim=c.conv_kernel_dim)
    if conv1d_bias is not None:
        checks.floats(this, "conv1d_bias", conv1d_bias, channels=channels)
    checks.floats(this, "A_log", A_log, num_v_heads=c.num_v_heads)
    checks.floats(this, "dt_bias", dt_bias, num_v_heads=c.num_v_heads)
    heads = _of_rank(c.num_v_heads, c, rank)
    return GDNWeights(
        conv_weight=_conv_rows(conv1d_weight, c, rank)[:, 0],
        conv_bias=None if conv1d_bias is None else _conv_rows(conv1d_bias, c, rank),
        A_log=jnp.asarray(A_log)[heads],
        dt_bias=jnp.asarray(dt_bias)[heads],
    )
