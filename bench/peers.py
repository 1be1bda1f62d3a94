"""The peers: Hugging Face's torch code and a plain copy on a CPU; on a GPU flash-linear-attention and FlashInfer."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as hf

type Peer = Callable[[torch.Tensor], torch.Tensor]  # outputs of a step from given states


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


def _shared(*arrays: Any) -> list[torch.Tensor]:
    return [torch.from_dlpack(x) for x in arrays]


def fla(step: Any) -> Peer:
    """flash-linear-attention's recurrent rule on a `bench.decode.Step`, from given states `[N, HV, K, V]`.

    It updates nothing in place: it writes new float32 states, and only those after the last token.
    """
    rule = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    along = 0 if step.drafts else 1  # sequences packed in one row, or a row of one token each
    q, k, v, g, beta = (x.unsqueeze(along) for x in _shared(step.q, step.k, step.v, step.g, step.beta))
    starts = _shared(step.starts)[0].long() if step.drafts else None
    options: dict[str, Any] = dict(output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=starts)
    return lambda state: rule(q, k, v, g=g, beta=beta, initial_state=state, **options)[0].squeeze(along)


def flashinfer(step: Any) -> Peer | None:
    """FlashInfer's decode kernel, which computes the gates too and keeps its states transposed; None for a verify step."""
    if step.drafts:
        return None
    decode = importlib.import_module("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
    q, k, v, a, b = (x.unsqueeze(1).contiguous() for x in _shared(step.q, step.k, step.v, step.a, step.b))
    A_log, dt_bias = _shared(step.weights.A_log, step.weights.dt_bias)
    return lambda state: decode(q, k, v, state.mT.contiguous(), A_log, a, dt_bias, b)[0].squeeze(1)


def of_decode() -> dict[str, Callable[[Any], Peer | None]]:
    """The peers of a decode step that this machine has, by name and version."""
    known = {"flash-linear-attention": ("fla", fla), "flashinfer-python": ("flashinfer", flashinfer)}
    return {
        f"{package} {importlib.metadata.version(distribution)}": peer
        for distribution, (package, peer) in known.items()
        if importlib.util.find_spec(package) is not None
    }
