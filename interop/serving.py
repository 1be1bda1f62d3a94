"""The server of the demo: a packed forward pass of Qwen3-Next, torch and JAX side by side, and the loop around it.

It is small, but it is what stands in vLLM or LightLLM: continuous batching over a fixed number of slots, prompts
prefilled in packed pieces beside the requests that are decoding, and speculative decoding with drafts looked up in the
request's own text. The model's embedding, projections, full attention, experts and head are Hugging Face's modules.
Convolution, gating, the gated delta rule and the gated norm are `gdn_jax`, called through `InPlace` on the pools of a
`GDNCache`.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_jax import (
    PAD_SLOT,
    GDNConfig,
    GDNState,
    GDNWeights,
    check_batch,
    gdn_decode,
    gdn_mtp_decode,
    gdn_prefill,
    gdn_weights_from_hf,
    pack_hf_projections,
)
from interop.cache import GDNCache
from interop.dlpack import to_jax, to_torch
from interop.inplace import InPlace
from interop.scheduler import Scheduler, Span, Step


@dataclasses.dataclass(frozen=True)
class GDNBatch:
    """The index arrays of one gdn_jax call, padded to the call's static shapes; the same for all layers of a step.

    Attributes:
        num_tokens: real tokens; the call has `size` of them.
        size: `T`, the call's static number of tokens.
        slots: int32 `[N]`, `PAD_SLOT` for sequences that aren't there.
        starts: int32 `[N + 1]`, query_start_loc.
        extra: `[N]`, bool `has_initial_state` of a prefill, int32 `num_accepted_tokens` of a verify step.
    """

    num_tokens: int
    size: int
    slots: Tensor
    starts: Tensor
    extra: Tensor


@functools.cache
def _gdn_calls(config: GDNConfig, eps: float) -> tuple[InPlace, InPlace]:
    """The prefill and the decode call over torch tensors; kept, so that a second server compiles nothing."""

    def common(slots, norm_weight) -> dict[str, Any]:
        return dict(config=config, state_indices=slots, norm_weight=norm_weight, norm_eps=eps)

    def prefill(state: GDNState, weights, norm_weight, mixed, slots, starts, has_state):
        options = dict(query_start_loc=starts, has_initial_state=has_state, **common(slots, norm_weight))
        out = gdn_prefill(weights, state, mixed, **options)
        return out.state, out.o

    def decode(state: GDNState, weights, norm_weight, mixed, slots, starts, accepted):
        if config.mtp_step == 0:
            out = gdn_decode(weights, state, mixed, **common(slots, norm_weight))
        else:
            options = dict(num_accepted_tokens=accepted, query_start_loc=starts, **common(slots, norm_weight))
            out = gdn_mtp_decode(weights, state, mixed, **options)
        return out.state, out.o

    return InPlace(prefill), InPlace(decode)


def _copy(parameter: Tensor) -> jax.Array:
    """JAX's own copy of a parameter, on the same device."""
    return to_jax(parameter.detach(), copy=True)


class Server:
    """The model's forward pass over packed tokens, with the caches of all requests in flight.

    The static shapes are few: a prefill call always has `prefill_chunk` tokens and `num_slots` sequences, a decode call
    `num_slots` sequences of up to `mtp_step + 1` tokens; each layer's pools are views of the stacked ones and have the
    same shape. So two programs are compiled in all. (A call gets the view, not the stacked pools with a `layer`: on a
    CPU `InPlace` has to copy what it gets.) Full attention keeps keys and values for each slot; those of a rejected
    draft are overwritten by what comes in its place.
    """

    def __init__(self, model: Any, *, num_slots: int, max_length: int, prefill_chunk: int, mtp_step: int) -> None:
        from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

        self._model = model
        self._rotate = apply_rotary_pos_emb
        self._num_slots, self._chunk, self._mtp_step = num_slots, prefill_chunk, mtp_step
        self._device: torch.device = model.device
        self.seconds_in_gdn_layers = 0.0
        self.seconds_in_operators = 0.0
        config = GDNConfig.from_hf(model.config, mtp_step=mtp_step, ssm_dtype="float32", conv_dtype="float32")
        linear = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
        self._cache = GDNCache(config, len(linear), num_slots, device=self._device)
        self._weights: list[tuple[GDNWeights, jax.Array]] = []
        self._projections: list[Tensor] = []
        for module in linear:
            weights = gdn_weights_from_hf(
                _copy(module.conv1d.weight),
                None if module.conv1d.bias is None else _copy(module.conv1d.bias),
                _copy(module.A_log),
                _copy(module.dt_bias),
                config,
            )
            packed = pack_hf_projections(_copy(module.in_proj_qkvz.weight), _copy(module.in_proj_ba.weight), config)
            self._weights.append((weights, _copy(module.norm.weight)))
            self._projections.append(to_torch(packed))
        size = model.config.num_key_value_heads, max_length, model.config.head_dim
        self._keys_values = [
            None if hasattr(layer, "linear_attn") else torch.zeros(2, num_slots, *size, device=self._device)
            for layer in model.model.layers
        ]
        self._prefill, self._decode = _gdn_calls(config, float(model.config.rms_norm_eps))

    def warm_up(self) -> None:
        """Compiles both programs, with batches of nothing but padding: the pools stay as they are."""
        mixed = torch.zeros(0, self._projections[0].shape[0], device=self._device)
        self._call(self._prefill, mixed, self._prefill_batch([]), 0)
        self._call(self._decode, mixed, self._decode_batch([]), 0)
        self.seconds_in_gdn_layers = self.seconds_in_operators = 0.0

    @torch.no_grad()
    def forward(self, step: Step) -> Tensor:
        """The logits `[len(step.rows), vocab_size]` of a step; the caches then hold all of the step's tokens."""
        spans = step.spans
        ids = torch.tensor([token for span in spans for token in span.tokens], device=self._device)
        positions = torch.cat([torch.arange(s.start, s.start + len(s.tokens), device=self._device) for s in spans])
        batches = self._prefill_batch(step.prefill), self._decode_batch(step.decode)
        hidden = self._model.model.embed_tokens(ids)[None]
        rotary = self._model.model.rotary_emb(hidden, positions[None])
        index = 0
        for layer, keys_values in zip(self._model.model.layers, self._keys_values, strict=True):
            inputs = layer.input_layernorm(hidden)
            if keys_values is None:
                hidden = hidden + self._linear_attention(layer.linear_attn, inputs, batches, index)
                index += 1
            else:
                hidden = hidden + self._full_attention(layer.self_attn, inputs, rotary, spans, keys_values)
            outputs = layer.mlp(layer.post_attention_layernorm(hidden))
            hidden = hidden + (outputs[0] if isinstance(outputs, tuple) else outputs)
        rows = torch.tensor(step.rows, dtype=torch.int64, device=self._device)
        return self._model.lm_head(self._model.model.norm(hidden[0, rows]))

    def _linear_attention(self, module: Any, inputs: Tensor, batches: tuple[GDNBatch, GDNBatch], index: int) -> Tensor:
        begin = self._clock()
        mixed = F.linear(inputs[0], self._projections[index])
        parts = mixed.split([batch.num_tokens for batch in batches])
        calls = zip((self._prefill, self._decode), parts, batches, strict=True)
        outputs = [self._call(call, part, batch, index) for call, part, batch in calls if batch.num_tokens]
        output = module.out_proj(torch.cat(outputs).flatten(1))[None]
        self.seconds_in_gdn_layers += self._clock() - begin
        return output

    def _call(self, call: InPlace, mixed: Tensor, batch: GDNBatch, index: int) -> Tensor:
        """One gdn_jax call on the pools: `[num_tokens, qkvz_dim + ba_dim]` in, `[num_tokens, HV, V]` out."""
        padded = F.pad(mixed, (0, 0, 0, batch.size - batch.num_tokens))
        begin = self._clock()
        output = call(self._cache.layer(index), *self._weights[index], padded, batch.slots, batch.starts, batch.extra)
        self.seconds_in_operators += self._clock() - begin
        return output[: batch.num_tokens]

    def _prefill_batch(self, spans: Sequence[Span]) -> GDNBatch:
        slots, starts, missing = self._slots_and_starts(spans)
        has_state = torch.tensor([span.start > 0 for span in spans] + [False] * missing)
        check_batch(
            num_slots=self._num_slots,
            num_tokens=self._chunk,
            state_indices=slots.numpy(),
            query_start_loc=starts.numpy(),
            has_initial_state=has_state.numpy(),
            mtp_step=self._mtp_step,
        )
        return self._batch(self._chunk, slots, starts, has_state)

    def _decode_batch(self, spans: Sequence[Span]) -> GDNBatch:
        slots, starts, missing = self._slots_and_starts(spans)
        accepted = torch.tensor([span.request.num_accepted for span in spans] + [1] * missing, dtype=torch.int32)
        size = self._num_slots * (self._mtp_step + 1)
        check_batch(
            num_slots=self._num_slots,
            num_tokens=size,
            state_indices=slots.numpy(),
            query_start_loc=starts.numpy(),
            num_accepted_tokens=accepted.numpy(),
            mtp_step=self._mtp_step,
            verify=True,
        )
        return self._batch(size, slots, starts, accepted)

    def _slots_and_starts(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor, int]:
        """Padded to `num_slots` sequences, and how many of them are padding."""
        missing = self._num_slots - len(spans)
        lengths = torch.tensor([0] + [len(span.tokens) for span in spans] + [0] * missing, dtype=torch.int32)
        slots = torch.tensor([span.request.slot for span in spans] + [PAD_SLOT] * missing, dtype=torch.int32)
        return slots, lengths.cumsum(0, dtype=torch.int32), missing

    def _batch(self, size: int, slots: Tensor, starts: Tensor, extra: Tensor) -> GDNBatch:
        return GDNBatch(int(starts[-1]), size, *(tensor.to(self._device) for tensor in (slots, starts, extra)))

    def _full_attention(
        self, module: Any, inputs: Tensor, rotary: tuple[Tensor, Tensor], spans: Sequence[Span], keys_values: Tensor
    ) -> Tensor:
        """Qwen3-Next's gated attention of each span over its own request's keys and values."""
        shape = (1, inputs.shape[1], -1, module.head_dim)
        query, gate = module.q_proj(inputs).view(1, inputs.shape[1], -1, 2 * module.head_dim).chunk(2, dim=-1)
        query = module.q_norm(query).transpose(1, 2)
        key = module.k_norm(module.k_proj(inputs).view(shape)).transpose(1, 2)
        value = module.v_proj(inputs).view(shape).transpose(1, 2)
        query, key = self._rotate(query, key, *rotary)
        outputs: list[Tensor] = []
        offset = 0
        for span in spans:
            here = slice(offset, offset + len(span.tokens))
            offset, end, slot = here.stop, span.start + len(span.tokens), span.request.slot
            keys_values[0, slot, :, span.start : end] = key[0, :, here]
            keys_values[1, slot, :, span.start : end] = value[0, :, here]
            mask = torch.ones(len(span.tokens), end, dtype=torch.bool, device=self._device).tril(span.start)
            outputs.append(
                F.scaled_dot_product_attention(
                    query[:, :, here],
                    keys_values[0, slot, None, :, :end],
                    keys_values[1, slot, None, :, :end],
                    attn_mask=mask,
                    scale=module.scaling,
                    enable_gqa=True,
                )
            )
        output = torch.cat(outputs, dim=2).transpose(1, 2).flatten(2)
        return module.o_proj(output * torch.sigmoid(gate.flatten(2)))

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclasses.dataclass
class Generated:
    """Tokens and their logits `[tokens, vocab_size]` of each request, and the time they took.

    Attributes:
        tokens: of each request, those that were generated.
        logits: float32 on the host, one row a token.
        seconds: wall time, without compilation.
        compile_seconds: of the warm-up.
        layer_share: the part of the time in the linear-attention layers, projections included.
        operator_share: the part of the time inside gdn_jax, the way through `InPlace` included.
    """

    tokens: list[list[int]]
    logits: list[Tensor]
    seconds: float
    compile_seconds: float = 0.0
    layer_share: float = 0.0
    operator_share: float = 0.0


def serve(
    model: Any,
    scheduler: Scheduler,
    *,
    num_slots: int,
    prefill_chunk: int,
    mtp_step: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Generated:
    """Runs all requests to their end; `advance` hears of new tokens, of those that an early stop saves, first of 0."""
    begin = time.perf_counter()
    requests = scheduler.requests
    max_length = max(len(request.prompt) + request.max_new_tokens for request in requests)
    server = Server(model, num_slots=num_slots, max_length=max_length, prefill_chunk=prefill_chunk, mtp_step=mtp_step)
    server.warm_up()
    advance(0)
    warm = time.perf_counter()
    rows: list[list[Tensor]] = [[] for _ in requests]
    while step := scheduler.plan():
        logits = server.forward(step).float().cpu()
        at = 0
        for span, gained in zip(step.spans, scheduler.commit(step, logits.argmax(-1).tolist()), strict=True):
            request = span.request
            rows[request.index].append(logits[at : at + len(gained)])
            at += span.num_rows
            advance(len(gained) + request.finished * (request.max_new_tokens - len(request.generated)))
    seconds = time.perf_counter() - warm
    return Generated(
        [request.generated for request in requests],
        [torch.cat(parts) for parts in rows],
        seconds,
        compile_seconds=warm - begin,
        layer_share=server.seconds_in_gdn_layers / seconds,
        operator_share=server.seconds_in_operators / seconds,
    )


def generate_plainly(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Generated:
    """The reference: Hugging Face's own `generate`, greedy, with its own cache, one prompt after the other."""
    begin = time.perf_counter()
    result = Generated([], [], 0.0)
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        result.tokens.append(output.sequences[0, len(prompt) :].tolist())
        result.logits.append(torch.cat(output.logits).float().cpu())
        advance(max_new_tokens)
    result.seconds = time.perf_counter() - begin
    return result
