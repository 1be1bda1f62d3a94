"""The peers: Hugging Face's torch code, and a plain copy."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as hf


def huggingface_rule(
    inputs: Sequence[Any], lengths: Sequence[int], state: np.ndarray, *, decode: bool
) -> Callable[[], torch.Tensor]:
    """A call of Hugging Face's chunked (or recurrent) rule on packed q, k, v, g, beta `[T, …]`: it wants them padded.

    What happens once a model and not once a call (padding, key heads repeated) is left out of the call.
    """
    longest, starts = max(lengths), np.cumsum([0, *lengths])
    padded = []
    for x in inputs:
        packed = np.asarray(x)
        batch = np.zeros((len(lengths), longest, *packed.shape[1:]), np.float32)
        for n, length in enumerate(lengths):
            batch[n, :length] = packed[starts[n] : starts[n] + length]
        padded.append(torch.from_numpy(batch))
    q, k, v, g, beta = padded
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    initial = torch.from_numpy(np.array(state))
    rule = hf.torch_recurrent_gated_delta_rule if decode else hf.torch_chunk_gated_delta_rule

    def call() -> torch.Tensor:
        options: dict[str, Any] = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
        with torch.no_grad():
            return rule(q, k, v, g, beta, initial_state=initial, **options)[0]

    return call


def copy(shape: Sequence[int]) -> Callable[[], None]:
    """A plain copy of a float32 array of `shape` into another that exists already."""
    source, target = np.ones(shape, np.float32), np.ones(shape, np.float32)
    return lambda: np.copyto(target, source)
