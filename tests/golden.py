"""The golden cases of tests/cases: small inputs with float64 results of a reference that is not this project's."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FOLDER = Path(__file__).parent / "cases"

# The case (a file without its ending) and the operator that it calls. `mtp_trace` and `hf_layer` are whole stories, not
# single calls: their tests read them with `load` too, and know what the arrays mean.
CASES: dict[str, str] = {
    "gating": "gdn_gating",
    "conv_varlen": "causal_conv1d",
    "conv_padding_slots": "causal_conv1d",
    "conv_other_source": "causal_conv1d",
    "conv_after_verify": "causal_conv1d",
    "conv_bf16": "causal_conv1d",
    "conv_update": "causal_conv1d_update",
    "conv_update_w2": "causal_conv1d_update",
    "conv_verify": "causal_conv1d_update",
    "chunk_varlen": "chunk_gated_delta_rule",
    "chunk_three_v_heads": "chunk_gated_delta_rule",
    "chunk_padding_slots": "chunk_gated_delta_rule",
    "chunk_other_source": "chunk_gated_delta_rule",
    "chunk_resets": "chunk_gated_delta_rule",
    "chunk_same_key": "chunk_gated_delta_rule",
    "chunk_small_keys": "chunk_gated_delta_rule",
    "chunk_bf16": "chunk_gated_delta_rule",
    "chunk_no_norm": "chunk_gated_delta_rule",
    "recurrent": "recurrent_gated_delta_rule",
    "recurrent_bf16": "recurrent_gated_delta_rule",
    "mtp_rule": "mtp_gated_delta_rule",
    "mtp_rule_skips": "mtp_gated_delta_rule",
    "rms_norm": "gated_rms_norm",
}

_RESULTS = {
    "gdn_gating": ("g", "beta"),
    "causal_conv1d": ("y", "conv_state"),
    "causal_conv1d_update": ("y", "conv_state"),
    "chunk_gated_delta_rule": ("o", "ssm_state"),
    "recurrent_gated_delta_rule": ("o", "ssm_state"),
    "mtp_gated_delta_rule": ("o", "ssm_state"),
    "gated_rms_norm": ("y",),
}


def load(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The keyword arguments of a case, and its wanted results by name (without `want_`), in the operator's order.

    `NAME__bf16` becomes `NAME`, a bfloat16 array; arrays without axes become Python values, the text "None" None.
    """
    kwargs: dict[str, Any] = {}
    wants: dict[str, np.ndarray] = {}
    with np.load(FOLDER / f"{name}.npz") as file:
        for key in file.files:
            array = file[key]
            if key.startswith("want_"):
                wants[key.removeprefix("want_")] = array
            elif key.endswith("__bf16"):
                kwargs[key.removesuffix("__bf16")] = array.view(ml_dtypes.bfloat16)
            elif array.ndim == 0:
                kwargs[key] = None if array.item() == "None" else array.item()
            else:
                kwargs[key] = array
    if name in CASES:
        wants = {key: wants[key] for key in _RESULTS[CASES[name]]}
    return kwargs, wants


def named(name: str, results: Any) -> dict[str, Any]:
    """What the operator of a case returned (a tuple, or the one array) by the names of `load`'s wanted results."""
    keys = _RESULTS[CASES[name]]
    return dict(zip(keys, results if isinstance(results, tuple) else (results,), strict=True))


def rel(x: Any, ref: Any) -> float:
    """‖x − ref‖₂ / ‖ref‖₂ in float64 (‖x‖₂ where the reference is zero or empty)."""
    x, ref = np.asarray(x).astype(np.float64), np.asarray(ref).astype(np.float64)
    if x.shape != ref.shape:
        raise ValueError(f"rel: the shapes are {x.shape} and {ref.shape}.")
    return float(np.linalg.norm((x - ref).ravel()) / (np.linalg.norm(ref.ravel()) or 1.0))


def unchanged(kwargs: dict[str, Any], wants: dict[str, np.ndarray], pool: str) -> np.ndarray:
    """bool `[num_slots]`: rows of `pool` ("conv_state", "ssm_state") that the case wants as they came, bit for bit."""
    same = wants[pool] == kwargs[pool].astype(wants[pool].dtype)
    return same.reshape(len(same), -1).all(axis=1)


def padding(wants: dict[str, np.ndarray], output: str) -> np.ndarray:
    """bool `[T]`: the tokens whose output the case wants to be zero: padding."""
    return (wants[output].reshape(len(wants[output]), -1) == 0).all(axis=1)
