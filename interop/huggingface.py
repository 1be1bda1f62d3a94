"""`replace_gated_delta_net`: the linear-attention layers of a Hugging Face model compute with gdn_jax.

A module keeps its parameters, its place in the model and its name in the checkpoint: only its class changes, to a subclass
with another `forward`. Projections stay torch's, so that quantised or adapted ones work; the conv states are kept by the
model's own cache; the recurrent states in that cache are updated in place.
"""

import contextlib
import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn

from gdn_jax import GDNConfig, GDNState, GDNWeights, gdn_decode, gdn_prefill
from interop.buckets import bucket, padded
from interop.inplace import InPlace

_NAMES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
_LEAST_TOKENS = 16  # of a call on more than one token a sequence: shorter ones share one program


def replace_gated_delta_net[Model: nn.Module](model: Model) -> Model:
    """Makes the gated-delta-net modules of a model compute with gdn_jax, on the same parameters and the same cache.

    For inference: the logits are the same to rounding, with and without a cache, for left-padded batches, prompts in
    pieces and `generate`; a backward pass raises. Numbers of tokens are padded to powers of two inside, so that prompts
    of all lengths share a handful of compiled programs.

    Args:
        model: in evaluation mode, with `Qwen3NextGatedDeltaNet`, `Qwen3_5GatedDeltaNet` or `Qwen3_5MoeGatedDeltaNet`
            modules, on a CPU or a CUDA device. Modules that are replaced already stay so.

    Returns:
        The same model.

    Raises:
        TypeError: no module.
        ValueError: no such layer in it, training mode, an activation, a dtype or a device that gdn_jax lacks, or a
            `forward` that a hook has replaced; the model is unchanged then.

    Example:
        >>> from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
        >>> config = Qwen3NextConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, layer_types=["linear_attention"],
        ...     linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        ...     num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8)
        >>> model = replace_gated_delta_net(Qwen3NextForCausalLM(config).eval())
        >>> with torch.no_grad():
        ...     model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.shape
        torch.Size([1, 3, 32])
        >>> model = restore(model)
    """
    modules = _modules("replace_gated_delta_net", model)
    found = [(name, module) for name, module in modules if _original(module) in _known()]
    if not found:
        raise ValueError(
            f"replace_gated_delta_net: `model` ({type(model).__name__}) has no gated-delta-net module, expected at least "
            f"one of {', '.join(_NAMES)}."
        )
    for name, module in found:
        _refuse_unsupported(name, module)
    for _, module in found:
        module.__class__ = _on_jax(_original(module))
    return model


def restore[Model: nn.Module](model: Model) -> Model:
    """Undoes `replace_gated_delta_net`: the modules compute with Hugging Face's code again.

    Args:
        model: replaced or not.

    Returns:
        The same model.

    Raises:
        TypeError: no module.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> restore(model) is model
        True
    """
    for _, module in _modules("restore", model):
        module.__class__ = _original(module)
    return model


def _modules(where: str, model: Any) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: `model` is of type {type(model).__name__}, expected a torch.nn.Module.")
    return list(model.named_modules())


def _known() -> set[type]:
    """The classes of the installed transformers that can be replaced, of those that are in use."""
    modules = [m for name, m in sys.modules.items() if name.startswith("transformers.models.qwen3_")]
    return {vars(module)[name] for module in modules for name in _NAMES if name in vars(module)}


def _original(module: nn.Module) -> type:
    """The class of a module, or the one it had before it was replaced."""
    return type(module)._original if isinstance(module, _OnJAX) else type(module)


def _refuse_unsupported(name: str, module: Any) -> None:
    where = "replace_gated_delta_net"
    if module.training:
        raise ValueError(
            f"{where}: `{name}` is in training mode, expected `model.eval()`: JAX computes no gradients here."
        )
    if module.activation not in ("silu", "swish"):
        raise ValueError(f"{where}: `{name}` has the activation {module.activation!r}, expected 'silu'.")
    if "forward" in vars(module):
        raise ValueError(
            f"{where}: `{name}.forward` was replaced by a hook, expected the class's own; remove the hook."
        )
    for key, parameter in module.named_parameters(recurse=True):
        if key.startswith(("in_proj", "out_proj")):  # torch's own business
            continue
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            wanted = "float32, bfloat16 or float16"
            raise ValueError(f"{where}: `{name}.{key}` has dtype {parameter.dtype}, expected {wanted}.")
        if parameter.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{where}: `{name}.{key}` is on {parameter.device}, expected a CPU or a CUDA device.")


class _OnJAX:
    """What `_on_jax` puts before a module's class: another `forward`, of the same signature."""

    _original: type

    @torch.compiler.disable
    def forward(
        self: Any,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        cache_params: Any = None,  # the name of `cache` in older versions
        **kwargs: Any,
    ) -> Tensor:
        where = f"{self._original.__name__} on gdn_jax"
        if self.training:
            raise RuntimeError(
                f"{where}: the module is in training mode, expected `model.eval()`, or `restore(model)`."
            )
        for name in ("cu_seq_lens_q", "seq_idx"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{where}: `{name}` is given, expected None: pad the sequences instead of packing them."
                )
        with torch.no_grad():
            o = _compute(self, hidden_states, cache_params if cache is None else cache, attention_mask)
        if torch.is_grad_enabled():
            # All that `_compute` has used, unseen by autograd.
            swallowed = [x for name, x in self.named_parameters() if not name.startswith("out_proj.")]
            o = _NoBackward.apply(o, where, hidden_states, *swallowed)
        return self.out_proj(o)


@functools.cache
def _on_jax(original: type) -> type:
    """The subclass that computes on JAX."""
    return type(original.__name__, (_OnJAX, original), {"_original": original, "__module__": __name__})


class _NoBackward(torch.autograd.Function):
    """The identity, through which no gradient comes: an error is better than a gradient that misses this layer."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, where: str, *sources: Tensor) -> Tensor:
        ctx.where = where
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"{ctx.where}: backward through the layer, expected inference; `restore(model)` for gradients."
        )


@functools.cache
def _call(config: GDNConfig) -> InPlace:
    """The layer between its projections, in place on the recurrent states `[B, HV, K, V]`; kept for all layers alike."""

    def gated_delta_net(ssm, weights, norm_weight, norm_eps, history, mixed, starts):
        args = GDNWeights(*weights), GDNState(history, ssm), mixed
        common: dict[str, Any] = dict(config=config, state_indices=None, norm_weight=norm_weight, norm_eps=norm_eps)
        out = gdn_decode(*args, **common) if starts is None else gdn_prefill(*args, query_start_loc=starts, **common)
        return out.state.ssm, out.o

    return InPlace(gated_delta_net)


def _compute(module: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None) -> Tensor:
    """`[B, T, hidden]` to `[B, T, HV * V]`; `cache` holds the new states, or the old ones where the call is refused."""
    mask = sys.modules[module._original.__module__].apply_mask_to_padding_states
    qkv, *others = _projections(module, mask(hidden_states, attention_mask))
    batch, length, _ = qkv.shape
    width, layer_idx = module.conv_kernel_size - 1, module.layer_idx

    conv = ssm = None
    if cache is not None:
        layer = cache.layers[layer_idx]
        conv = layer.conv_states[0] if layer.is_conv_states_initialized[0] else None
        ssm = layer.recurrent_states[0] if layer.is_recurrent_states_initialized[0] else None
    history = qkv.new_zeros(batch, qkv.shape[2], width)
    if conv is not None and width:
        before = conv[..., -width:]
        history[..., width - before.shape[-1] :] = before
    shape = batch, module.num_v_heads, module.head_k_dim, module.head_v_dim
    state = qkv.new_zeros(shape, dtype=torch.float32) if ssm is None else ssm

    mixed = torch.cat([qkv, *others], dim=-1).flatten(0, 1)
    starts = None
    if length > 1:
        mixed = padded(mixed, bucket(len(mixed), _LEAST_TOKENS))
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=mixed.device)
    weights = [module.conv1d.weight.squeeze(1), module.conv1d.bias, module.A_log, module.dt_bias]
    norm = module.norm.weight.detach(), float(module.layer_norm_epsilon)
    weights = [None if w is None else w.detach() for w in weights]
    o = _call(_config(module))(state, weights, *norm, history, mixed, starts)
    if cache is not None:
        # As `InPlace` does with the recurrent state: one that was made in inference mode is updated outside it, too.
        inference = conv is not None and conv.is_inference()
        with torch.inference_mode() if inference else contextlib.nullcontext():
            cache.update_conv_state(qkv.transpose(1, 2), layer_idx, conv_kernel_size=width + 1)
        if ssm is None:
            cache.update_recurrent_state(state, layer_idx)
    return o[: batch * length].reshape(batch, length, -1)


def _config(module: Any) -> GDNConfig:
    return GDNConfig(
        num_v_heads=module.num_v_heads,
        num_k_heads=module.num_k_heads,
        head_k_dim=module.head_k_dim,
        head_v_dim=module.head_v_dim,
        conv_kernel_dim=module.conv_kernel_size,
        activation=module.activation,
    )


def _projections(module: Any, hidden_states: Tensor) -> list[Tensor]:
    """q | k | v, z, b and a `[B, T, …]`, heads in their order."""
    if hasattr(module, "in_proj_qkv"):
        return [module.get_submodule(f"in_proj_{name}")(hidden_states) for name in ("qkv", "z", "b", "a")]
    qkvz, ba = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
    q, k, v, z, b, a = (x.flatten(2) for x in module.fix_query_key_value_ordering(qkvz, ba))
    return [torch.cat([q, k, v], dim=-1), z, b, a]
