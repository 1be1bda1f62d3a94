"""`LinearAttBackend`: LightLLM's linear-attention backend on gdn_jax, so that a LightLLM fork can select it.

LightLLM is not imported: the backend reads the attributes named below from the objects that LightLLM hands it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gdn_jax import PAD_SLOT, GDNConfig, GDNState, GDNWeights, gdn_decode, gdn_mtp_decode, gdn_prefill
from interop.buckets import bucket, padded
from interop.inplace import InPlace

_SSM_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as LightLLM's start arguments write them
_LEAST_TOKENS = 16  # of a prefill: shorter ones share one program


@functools.cache
def _calls(config: GDNConfig) -> dict[str, InPlace]:
    """The two calls over torch tensors; kept, so that backends of one configuration share their programs."""

    def prefill(state: GDNState, weights, mixed, slots, starts, ready):
        out = gdn_prefill(
            GDNWeights(*weights),
            state,
            mixed,
            config=config,
            query_start_loc=starts,
            state_indices=slots,
            has_initial_state=ready > 0,
        )
        return out.state, out.o, out.z

    def decode(state: GDNState, weights, mixed, slots, accepted):
        common: dict[str, Any] = dict(config=config, state_indices=slots)
        if config.mtp_step == 0:
            out = gdn_decode(GDNWeights(*weights), state, mixed, **common)
        else:
            out = gdn_mtp_decode(GDNWeights(*weights), state, mixed, num_accepted_tokens=accepted, **common)
        return out.state, out.o, out.z

    return dict(prefill=InPlace(prefill, max_executables=256), decode=InPlace(decode, max_executables=256))


class LinearAttBackend:
    """Prefill, decode and verify steps of the gated-delta-net layers of a LightLLM model, on LightLLM's own caches.

    The caches are updated in place (on a CPU by a copy back, see `InPlace`). The numbers of tokens and sequences are padded
    to powers of two inside, so that a server compiles a handful of programs. XLA calls cannot be captured into CUDA
    graphs: start LightLLM with `--disable_cudagraph`.

    Attributes:
        model, mtp_step: as given.
        config: our `GDNConfig`, of one tensor-parallel rank.
        num_v_heads, num_k_heads, head_k_dim, head_v_dim, key_dim, value_dim: of the whole model.
        conv_kernel_dim, activation, num_v_heads_per_k_head: of the layer.
        tp_qkvz_dim, tp_ba_dim, tp_num_k_heads, tp_num_v_heads, tp_key_dim, tp_value_dim: of one rank.
        ssm_state_dtype: torch dtype of the recurrent states.
        needs_ssm_dtype_conversion: whether it differs from the activations' dtype.

    Args:
        model: has `config` (the Hugging Face dict), `tp_world_size_`, and perhaps `is_mtp_draft_model`.
        mtp_step: `S`, draft tokens of a verify step.
        linear_att_ssm_data_type: "bfloat16" or "float32", or the torch dtype.
        data_type: of the activations and the conv states, by name ("bf16" and the like too) or as a dtype; None:
            bfloat16.

    Raises:
        ValueError: another ssm type; sizes or heads that do not fit; a key that the configuration lacks.

    Source: LightLLM's `LinearAttBackend`.

    Example:
        >>> import types
        >>> sizes = dict(linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, hidden_act="silu",
        ...              linear_value_head_dim=128, linear_conv_kernel_dim=4)
        >>> backend = LinearAttBackend(types.SimpleNamespace(config=sizes, tp_world_size_=2), mtp_step=1)
        >>> backend.num_v_heads, backend.tp_num_v_heads, backend.ssm_state_dtype, backend.needs_ssm_dtype_conversion
        (32, 16, torch.bfloat16, False)
    """

    def __init__(
        self, model: Any, *, mtp_step: int = 0, linear_att_ssm_data_type: Any = "bfloat16", data_type: Any = None
    ) -> None:
        name = str(linear_att_ssm_data_type).removeprefix("torch.")
        if name not in _SSM_DTYPES:
            raise ValueError(
                f"LinearAttBackend: `linear_att_ssm_data_type` is {linear_att_ssm_data_type!r}, expected one of "
                f"{sorted(_SSM_DTYPES)}."
            )
        self.model, self.mtp_step, self.ssm_state_dtype = model, mtp_step, _SSM_DTYPES[name]
        self.config = config = GDNConfig.from_hf(
            model.config,
            mtp_step=mtp_step,
            tp_size=model.tp_world_size_,
            ssm_dtype=name,
            conv_dtype="bfloat16" if data_type is None else _SHORT.get(data_type, data_type),
        )
        self.num_v_heads, self.num_k_heads = config.num_v_heads, config.num_k_heads
        self.head_k_dim, self.head_v_dim = config.head_k_dim, config.head_v_dim
        self.key_dim = config.num_k_heads * config.head_k_dim
        self.value_dim = config.num_v_heads * config.head_v_dim
        self.conv_kernel_dim, self.activation = config.conv_kernel_dim, config.activation
        self.tp_qkvz_dim, self.tp_ba_dim = config.qkvz_dim, config.ba_dim
        self.tp_num_k_heads, self.tp_num_v_heads = config.tp_num_k_heads, config.tp_num_v_heads
        self.tp_key_dim, self.tp_value_dim = config.key_dim, config.value_dim
        self.num_v_heads_per_k_head = config.v_heads_per_k_head
        self.needs_ssm_dtype_conversion = config.conv_dtype != config.ssm_dtype

    def create_att_prefill_state(self, infer_state: Any) -> "LinearAttPrefillState":
        """The state of a prefill batch; `init_state()` fills it."""
        return LinearAttPrefillState(self, infer_state)

    def create_att_decode_state(self, infer_state: Any) -> "LinearAttDecodeState":
        """The state of a decode or verify batch; `init_state()` fills it."""
        return LinearAttDecodeState(self, infer_state)


class _AttState:
    """What the two state objects share: the batch's index tensors, and the way from LightLLM's objects to a call.

    Attributes:
        backend, infer_state: as given.
        b_conv_buffer_idx: `[N]`, the conv row of each sequence; None before `init_state()`.
        b_ssm_buffer_idx: `[N]`, its ssm row, or in a verify step `[N, S + 1]`, its rows; None before `init_state()`.
    """

    def __init__(self, backend: LinearAttBackend, infer_state: Any) -> None:
        self.backend, self.infer_state = backend, infer_state
        self.b_conv_buffer_idx: Tensor | None = None
        self.b_ssm_buffer_idx: Tensor | None = None

    def init_state(self) -> None:
        """Reads the batch: anew for each one, which may have been padded since. Nothing for a draft model.

        Raises:
            ValueError: a verify batch that is no multiple of `mtp_step + 1`.
        """
        if not getattr(self.backend.model, "is_mtp_draft_model", False):
            self._read_batch()

    def _read_batch(self) -> None:
        raise NotImplementedError

    def _slots(self, where: str) -> Tensor:
        if self.b_conv_buffer_idx is None:
            raise ValueError(
                f"{where}: the state is empty, expected a call of `init_state()` for this batch before it."
            )
        return self.b_conv_buffer_idx

    def _entries(self, att_control: Any, phase: str) -> Mapping[str, Any]:
        """The dict of `att_control`, checked."""
        where, switch = f"{phase}_att", f"linear_att_{phase}"
        if getattr(att_control, switch, None) is not True:
            given = getattr(att_control, switch, None)
            raise ValueError(f"{where}: `att_control.{switch}` is {given!r}, expected True.")
        entries = getattr(att_control, f"{switch}_dict", None)
        if not isinstance(entries, Mapping):
            what = type(entries).__name__
            raise TypeError(f"{where}: `att_control.{switch}_dict` is of type {what}, expected a dict.")
        for key in ("mixed_qkvzba", "layer_weight", "layer_num"):
            if key not in entries:
                raise ValueError(f"{where}: `att_control.{switch}_dict` has no {key!r}, only {sorted(entries)}.")
        mixed, width = entries["mixed_qkvzba"], self.backend.tp_qkvz_dim + self.backend.tp_ba_dim
        if not isinstance(mixed, Tensor):
            raise TypeError(f"{where}: `mixed_qkvzba` is of type {type(mixed).__name__}, expected a torch.Tensor.")
        if mixed.ndim != 2 or mixed.shape[1] != width:
            raise ValueError(
                f"{where}: `mixed_qkvzba` has shape {tuple(mixed.shape)}, expected (num_tokens, tp_qkvz_dim + tp_ba_dim "
                f"= {width})."
            )
        return entries

    def _run(self, phase: str, entries: Mapping[str, Any], size: int, *indices: Tensor) -> tuple[Tensor, Tensor]:
        """One call of `size` tokens on the caches of the layer: `o` and `z` `[T, HV, V]`."""
        weight, mixed = entries["layer_weight"], entries["mixed_qkvzba"]
        conv = weight.linear_conv1d
        tensors = conv.mm_param.weight, conv.bias, weight.linear_A_log.weight, weight.linear_dt_bias.weight
        weights = [None if tensor is None else tensor.detach() for tensor in tensors]
        states: Any = self.infer_state.req_manager.get_mamba_cache(entries["layer_num"])
        call = _calls(self.backend.config)[phase]
        o, z = call(GDNState(*states), weights, padded(mixed.detach(), size), *indices)
        return o[: len(mixed)], z[: len(mixed)]


class LinearAttPrefillState(_AttState):
    """A prefill batch: packed prompts, or pieces of them."""

    def _read_batch(self) -> None:
        self.b_conv_buffer_idx = self.infer_state.b_req_idx
        self.b_ssm_buffer_idx = self.infer_state.b_req_idx * (self.backend.mtp_step + 1)

    def prefill_att(
        self, q: Any, k: Any, v: Any, att_control: Any, alloc_func: Callable[..., Tensor] = torch.empty
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The layer on the batch; the layer's caches hold the new states afterwards.

        Args:
            q, k, v: ignored.
            att_control: its `linear_att_prefill` is True, its `linear_att_prefill_dict` has `mixed_qkvzba`
                `[T, tp_qkvz_dim + tp_ba_dim]`, `layer_weight`, `layer_num`, and perhaps `z_out`, a dict to put `z` in.
            alloc_func: ignored, the results lie in JAX's memory.

        Returns:
            `core_attn_out` `[1, T, HV, V]` where there is a `z_out`, else `(core_attn_out, z [T, HV, V])`.

        Raises:
            ValueError, TypeError: no `init_state()` before, another `att_control`, tensors that do not fit.
            RuntimeError: a CUDA stream that is capturing.
        """
        entries, slots = self._entries(att_control, "prefill"), self._slots("prefill_att")
        starts, ready = self.infer_state.b1_cu_q_seq_len, self.infer_state.b_ready_cache_len
        size, n = bucket(len(entries["mixed_qkvzba"]), _LEAST_TOKENS), bucket(len(slots))
        if n > len(slots):  # empty sequences behind the last
            starts = torch.cat([starts, starts[-1:].expand(n - len(slots))])
        o, z = self._run("prefill", entries, size, padded(slots, n, PAD_SLOT), starts, padded(ready, n))
        return _result(entries, o[None], z)


class LinearAttDecodeState(_AttState):
    """A decode batch, one token a sequence, or with `mtp_step > 0` a verify batch, `mtp_step + 1` tokens a sequence.

    Attributes:
        b1_mtp_cu_q_seq_len: int32 `[N + 1]`, where the sequences of a verify batch start; else None.
        b_num_accepted_tokens: `[N]`, how many tokens of the verify step before were accepted; else None.
    """

    def __init__(self, backend: LinearAttBackend, infer_state: Any) -> None:
        super().__init__(backend, infer_state)
        self.b1_mtp_cu_q_seq_len: Tensor | None = None
        self.b_num_accepted_tokens: Tensor | None = None

    def _read_batch(self) -> None:
        slots, longest = self.infer_state.b_req_idx, self.backend.mtp_step + 1
        if longest == 1:
            self.b_conv_buffer_idx = self.b_ssm_buffer_idx = slots
            return
        size = self.infer_state.batch_size
        if size % longest:
            raise ValueError(
                f"init_state: `infer_state.batch_size` is {size}, expected a multiple of mtp_step + 1 = {longest}."
            )
        self.b1_mtp_cu_q_seq_len = torch.arange(0, size + 1, longest, dtype=torch.int32, device=slots.device)
        self.b_conv_buffer_idx = conv = slots[::longest].contiguous()
        self.b_ssm_buffer_idx = conv[:, None] * longest + torch.arange(longest, dtype=conv.dtype, device=conv.device)
        self.b_num_accepted_tokens = self.infer_state.req_manager.req_to_mtp_state_index[conv.long()] + 1

    def decode_att(
        self, q: Any, k: Any, v: Any, att_control: Any, alloc_func: Callable[..., Tensor] = torch.empty
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The layer on the batch; the layer's caches hold the new states afterwards.

        A sequence whose accepted count is outside `[1, mtp_step + 1]` is padding: zeros, and its rows stay.

        Args:
            q, k, v: ignored.
            att_control: its `linear_att_decode` is True, its `linear_att_decode_dict` has `mixed_qkvzba`
                `[T, tp_qkvz_dim + tp_ba_dim]`, `layer_weight`, `layer_num`, and perhaps `z_out`, a dict to put `z` in.
            alloc_func: ignored, the results lie in JAX's memory.

        Returns:
            `core_attn_out`, `[N, 1, HV, V]` or in a verify step `[1, T, HV, V]`, where there is a `z_out`; else
            `(core_attn_out, z [T, HV, V])`.

        Raises:
            ValueError, TypeError: no `init_state()` before, another `att_control`, tensors that do not fit.
            RuntimeError: a CUDA stream that is capturing.
        """
        entries, slots = self._entries(att_control, "decode"), self._slots("decode_att")
        accepted, longest = self.b_num_accepted_tokens, self.backend.mtp_step + 1
        tokens, n = len(entries["mixed_qkvzba"]), bucket(len(slots))
        if tokens != len(slots) * longest:
            wanted = f"{longest} for each of {len(slots)} sequences"
            raise ValueError(f"decode_att: `mixed_qkvzba` has {tokens} tokens, expected {wanted}.")
        indices = [padded(slots, n, PAD_SLOT), None if accepted is None else padded(accepted, n)]
        o, z = self._run("decode", entries, n * longest, *indices)
        return _result(entries, o[:, None] if longest == 1 else o[None], z)


def _result(entries: Mapping[str, Any], core_attn_out: Tensor, z: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """What LightLLM's older generation expects where it gives a `z_out`, else what the newer one does."""
    z_out = entries.get("z_out")
    if z_out is None:
        return core_attn_out, z
    z_out["z"] = z
    return core_attn_out
