"""The peers: Hugging Face's torch code and a plain copy on a CPU; on a GPU flash-linear-attention, FlashQLA, others."""

import importlib
import importlib.metadata
import importlib.util
import os
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as hf

type Peer = Callable[[torch.Tensor], torch.Tensor]  # outputs of a step from given states
type Rule = Callable[[], tuple[Any, Any]]  # o [T, HV, V] and the final states [N, HV, K, V] of a prefill


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


def _rules(rule: Callable[..., Any], batch: Any, *, normalised: bool, rows: bool = False, **options: Any) -> list[Rule]:
    """Calls of a rule with flash-linear-attention's arguments, one for each set of inputs of a `bench.prefill.Batch`.

    With `normalised` q and k are normalised before, and rounded again; with `rows` each sequence is a row of its own.
    """
    if rows and (len(batch.lengths) == 1 or len(set(batch.lengths)) > 1):
        raise ValueError("no sequences of equal length to put in rows")
    lead = len(batch.lengths) if rows else 1
    starts = None if rows else _shared(batch.starts)[0].long()  # one tensor for all calls: the peers cache by identity

    def call(q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any) -> tuple[Any, Any]:
        given: dict[str, Any] = dict(g=g, beta=beta, initial_state=states, output_final_state=True, cu_seqlens=starts)
        o, final = rule(q, k, v, **given, **options)
        return o.flatten(0, 1), final

    calls = []
    for tokens, states in batch.given:
        q, k, v, g, beta = (x.reshape(lead, -1, *x.shape[1:]) for x in _shared(*tokens))
        if normalised:
            q, k = _normalised(q), _normalised(k)
        calls.append(partial(call, q, k, v, g, beta, *_shared(states)))
    return calls


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def fla_prefill(batch: Any, *, flash_qla: bool) -> list[Rule]:
    """flash-linear-attention's chunked rule: its Triton kernels, or FlashQLA's, to which it hands over by itself."""
    if flash_qla:
        importlib.import_module("flash_qla")
    own = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def rule(*tokens: Any, **options: Any) -> Any:
        for switch in ("FLA_FLASH_QLA", "FLA_TILELANG"):  # looked at in each call
            os.environ[switch] = str(int(flash_qla))
        return own(*tokens, use_qk_l2norm_in_kernel=True, **options)

    return _rules(rule, batch, normalised=False)


def flash_qla(batch: Any, *, rows: bool) -> list[Rule]:
    """FlashQLA's chunked rule, without a norm."""
    return _rules(importlib.import_module("flash_qla").chunk_gated_delta_rule, batch, normalised=True, rows=rows)


def jla(batch: Any) -> list[Rule]:
    """jax-linear-attention's chunked rule: sequences of equal length, since those of a packed row share one state."""
    if len(set(batch.lengths)) > 1:
        raise ValueError("packed sequences have no states of their own")
    rule = importlib.import_module("jla.ops").linear_attention

    @jax.jit
    def call(tokens: Any, states: Any) -> Any:
        q, k, v, g, beta = (x.reshape(len(batch.lengths), -1, *x.shape[1:]) for x in tokens)
        options: dict[str, Any] = dict(output_final_state=True, use_qk_l2norm=True, impl="mosaic_gpu")
        o, final = rule("gated_deltanet", q, k, v, g=g, beta=beta, initial_state=states, **options)
        return o.reshape(tokens[2].shape), final

    return [partial(call, tokens, states) for tokens, states in batch.given]


def flashinfer_prefill(batch: Any) -> list[Rule]:
    """FlashInfer's prefill kernel: no norm, decays instead of their logarithms, states transposed."""
    given = [((q, k, v, jax.numpy.exp(g), beta), states.mT) for (q, k, v, g, beta), states in batch.given]
    own = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule

    def rule(*tokens: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, **options: Any) -> Any:
        arguments = (*(x.squeeze(0) for x in (*tokens, g, beta)), None, initial_state)
        o, final = own(*arguments, cu_seqlens=cu_seqlens, output_state=torch.empty_like(initial_state), **options)
        return o.unsqueeze(0), final.mT

    batch = types.SimpleNamespace(lengths=batch.lengths, starts=batch.starts, given=given)
    return _rules(rule, batch, normalised=True)


DISTRIBUTIONS = {
    "fla": "flash-linear-attention",
    "flash_qla": "flash-qla",
    "flashinfer": "flashinfer-python",
    "jla": "jax-linear-attention",
}


def _found[P](known: Sequence[tuple[str, str, P]]) -> dict[str, P]:
    """The peers whose package this machine has, by package, version and remark."""
    return {
        f"{package} {importlib.metadata.version(DISTRIBUTIONS[package])}{remark}": peer
        for package, remark, peer in known
        if importlib.util.find_spec(package) is not None
    }


def of_decode() -> dict[str, Callable[[Any], Peer | None]]:
    """The peers of a decode step that this machine has, by name and version."""
    return _found([("fla", "", fla), ("flashinfer", "", flashinfer)])


def of_prefill() -> dict[str, Callable[[Any], list[Rule]]]:
    """The peers of a prefill that this machine has, by name and version."""
    return _found(
        [
            ("fla", ", Triton", partial(fla_prefill, flash_qla=False)),
            ("fla", ", FlashQLA", partial(fla_prefill, flash_qla=True)),
            ("flash_qla", ", q and k normalised before", partial(flash_qla, rows=False)),
            ("flash_qla", ", in rows, q and k normalised before", partial(flash_qla, rows=True)),
            ("jla", "", jla),
            ("flashinfer", ", q and k normalised before", flashinfer_prefill),
        ]
    )
