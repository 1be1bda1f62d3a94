"""Gated DeltaNet for JAX: pure functions from state to state, for prefill, decode and speculative verify steps."""

from gdn_jax.checks import check_batch
from gdn_jax.dispatch import Explanation, explain
from gdn_jax.hf import gdn_weights_from_hf, pack_hf_projections, pack_hf_projections_split
from gdn_jax.layer import (
    copy_slots,
    gdn_decode,
    gdn_mtp_decode,
    gdn_prefill,
    init_state,
    reset_slots,
    split_qkv,
    split_qkvzba,
)
from gdn_jax.ops.chunk import chunk_gated_delta_rule
from gdn_jax.ops.conv import causal_conv1d, causal_conv1d_update
from gdn_jax.ops.gating import gdn_gating
from gdn_jax.ops.mtp import mtp_gated_delta_rule
from gdn_jax.ops.norm import gated_rms_norm
from gdn_jax.ops.recurrent import recurrent_gated_delta_rule
from gdn_jax.types import PAD_SLOT, GDNConfig, GDNOutput, GDNState, GDNWeights

__version__ = "0.1.0"

__all__ = [
    "PAD_SLOT",
    "Explanation",
    "GDNConfig",
    "GDNOutput",
    "GDNState",
    "GDNWeights",
    "causal_conv1d",
    "causal_conv1d_update",
    "check_batch",
    "chunk_gated_delta_rule",
    "copy_slots",
    "explain",
    "gated_rms_norm",
    "gdn_decode",
    "gdn_gating",
    "gdn_mtp_decode",
    "gdn_prefill",
    "gdn_weights_from_hf",
    "init_state",
    "mtp_gated_delta_rule",
    "pack_hf_projections",
    "pack_hf_projections_split",
    "recurrent_gated_delta_rule",
    "reset_slots",
    "split_qkv",
    "split_qkvzba",
]
