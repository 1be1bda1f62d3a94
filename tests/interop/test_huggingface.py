"""`replace_gated_delta_net`: the same logits, tokens and caches as the model's own code, and nothing else changed."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import Tensor, nn

from interop import huggingface, replace_gated_delta_net, restore

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quick_compiles")

SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
MOE: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
)
FAMILIES = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", SIZES | MOE),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", SIZES),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", SIZES | MOE),
}


def build(family: str = "qwen3_next", dtype: str = "float32", device: str = "cpu", **changes: Any) -> Any:
    config_name, model_name, sizes = FAMILIES[family]
    if not hasattr(transformers, config_name) or not hasattr(transformers, model_name):
        pytest.skip(f"transformers {transformers.__version__} has no {model_name}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, config_name)(**{**sizes, **changes})
        model = getattr(transformers, model_name)(config).eval().to(getattr(torch, dtype))
    for _, module in gdn_modules(model):
        nn.init.normal_(module.conv1d.weight, std=0.5)
        nn.init.uniform_(module.A_log, -3, 1)
        nn.init.normal_(module.dt_bias)
    return model.to(device)


def gdn_modules(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "A_log")]


def ids(*shape: int, seed: int = 1, device: str = "cpu") -> Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def close(got: Tensor, want: Tensor, tol: float = 1e-5) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= tol, f"relative error {error:.1e}"


def states(cache: Any) -> list[Tensor]:
    """Conv and recurrent states of the linear layers."""
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return [x for layer in layers for x in (layer.conv_states[0], layer.recurrent_states[0])]


def both(model: Any, run: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What `run` returns with the model's own code, and on JAX."""
    with torch.no_grad():
        want = run(model)
        got = run(replace_gated_delta_net(model))
    restore(model)
    return got, want


def same_run(model: Any, run: Callable[[Any], tuple[Tensor, Any]], tol: float = 1e-5) -> None:
    """Logits and caches are the same."""
    (logits, cache), (want, want_cache) = both(model, run)
    close(logits, want, tol)
    for got, expected in zip(states(cache), states(want_cache), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        close(got, expected, tol)


def pieces(*lengths: int, batch: int = 2) -> Callable[[Any], tuple[Tensor, Any]]:
    """The prompt in pieces of these lengths, with one cache."""

    def run(model: Any) -> tuple[Tensor, Any]:
        tokens, cache, logits = ids(batch, sum(lengths), device=str(model.device)), None, []
        for part in tokens.split(lengths, dim=1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        return torch.cat(logits, dim=1), cache

    return run


def generate(model: Any, tokens: Tensor, **options: Any) -> Any:
    return model.generate(
        tokens, max_new_tokens=12, return_dict_in_generate=True, output_logits=True, do_sample=False, **options
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_in_pieces_and_steps(family: str) -> None:
    """A prompt, a longer piece, single tokens, a piece shorter than the convolution, and a whole prompt of one token."""
    model = build(family)
    same_run(model, pieces(21, 70, 1, 1, 2, 1))
    same_run(model, pieces(1, 1, 3, batch=3))
    same_run(model, pieces(2, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_cache(family: str) -> None:
    got, want = both(build(family), lambda model: model(ids(2, 33), use_cache=False).logits)
    close(got, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_with_left_padding(family: str) -> None:
    """A batch of prompts of 5, 11 and 1 tokens: the same tokens, logits to rounding, and each as if it were alone."""
    model = build(family)
    tokens, mask = ids(3, 11), torch.ones(3, 11, dtype=torch.long)
    for row, length in enumerate((5, 11, 1)):
        tokens[row, : 11 - length] = 0
        mask[row, : 11 - length] = 0
    got, want = both(model, lambda model: generate(model, tokens, attention_mask=mask))
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        close(ours, theirs)
    alone, _ = both(model, lambda model: generate(model, tokens[:1, 6:]))
    close(torch.stack([x[0] for x in got.logits]), torch.stack([x[0] for x in alone.logits]))


def test_inference_mode() -> None:
    model, tokens = build(), ids(2, 9)
    with torch.inference_mode():
        want = generate(model, tokens)
        got = generate(replace_gated_delta_net(model), tokens)
    assert torch.equal(got.sequences, want.sequences)


def test_a_cache_of_inference_mode_outside_it() -> None:
    model, tokens = replace_gated_delta_net(build()), ids(2, 9)
    with torch.inference_mode():
        cache = model(tokens[:, :8], use_cache=True).past_key_values
    with torch.no_grad():
        close(model(tokens[:, 8:], past_key_values=cache).logits[:, -1], model(tokens).logits[:, -1])


def test_with_x64_on() -> None:
    with jax.enable_x64(True):
        same_run(build(), pieces(5, 1))


def test_beam_search_and_a_static_cache() -> None:
    model, tokens = build(), ids(1, 9)
    got, want = both(model, lambda model: generate(model, tokens, num_beams=3))
    assert torch.equal(got.sequences, want.sequences)
    got, want = both(model, lambda model: generate(model, tokens, cache_implementation="static"))
    assert torch.equal(got.sequences, want.sequences)


def test_bfloat16() -> None:
    """The two round at other places; the truth is the same weights in float32."""
    model = build(dtype="bfloat16")
    run = pieces(40, 1, 1)
    got, want = both(model, run)
    with torch.no_grad():
        truth = run(copy.deepcopy(model).float())[0]
    error, theirs = ((x[0].double() - truth).norm() / truth.norm() for x in (got, want))
    assert error < 1.2 * theirs and error < 0.05


def test_real_sizes() -> None:
    """A layer of Qwen3-Next's own linear-attention sizes."""
    sizes = dict(linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128)
    same_run(build(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **sizes), pieces(100, 1))


def test_a_cache_changes_hands() -> None:
    """Half a sequence with the model's own code, half on JAX, and back: it is one cache, updated in its own memory."""
    model, tokens = build(), ids(2, 30)
    with torch.no_grad():
        whole = model(tokens, use_cache=True).logits
        cache, logits, pointers = None, [], set()
        for i, part in enumerate(tokens.split(6, dim=1)):
            (restore if i % 2 else replace_gated_delta_net)(model)
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
            pointers.add(tuple(x.data_ptr() for x in states(cache)))
    close(torch.cat(logits, dim=1), whole)
    assert len(pointers) == 1
    assert cache.get_seq_length() == 30


def test_a_cache_that_is_reset() -> None:
    model = replace_gated_delta_net(build())
    with torch.no_grad():
        first = model(ids(2, 8), use_cache=True)
        cache = first.past_key_values
        for layer in cache.layers:
            if hasattr(layer, "recurrent_states"):
                layer.reset()
        module = model.model.layers[0].linear_attn
        hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
        close(module(hidden, cache), module(hidden))


def test_nothing_else_changes() -> None:
    model = build()
    modules = dict(model.named_modules())
    parameters = {name: (x, x.data_ptr(), x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    classes = {name: type(module) for name, module in modules.items()}
    hooked: list[nn.Module] = []
    name, gdn = gdn_modules(model)[0]
    gdn.register_forward_hook(lambda module, args, output: hooked.append(module))

    assert replace_gated_delta_net(model) is model
    assert replace_gated_delta_net(model) is model  # again: nothing more to do
    changed = {name for name, module in model.named_modules() if type(module) is not classes[name]}
    assert changed == {name for name, _ in gdn_modules(model)} and len(changed) == 3
    assert all(isinstance(module, classes[name]) for name, module in model.named_modules())
    with torch.no_grad():
        model(ids(1, 4))
    assert hooked == [gdn]
    for name, x in model.state_dict(keep_vars=True).items():
        same, pointer, values = parameters.pop(name)
        assert x is same and x.data_ptr() == pointer and torch.equal(x, values)
    assert not parameters

    assert restore(model) is model
    assert restore(model) is model
    assert all(module is modules[name] and type(module) is classes[name] for name, module in model.named_modules())


def test_prompts_share_programs() -> None:
    model = replace_gated_delta_net(build())
    (call,) = [huggingface._call(config) for config in {module_config(m) for _, m in gdn_modules(model)}]
    with torch.no_grad():
        model(ids(1, 20))
        known = len(call._executables)
        for length in (17, 25, 32):
            model(ids(1, length))
    assert len(call._executables) == known


def module_config(module: Any) -> Any:
    return huggingface._config(module)


def test_a_backward_pass_raises() -> None:
    model = replace_gated_delta_net(build())
    logits = model(ids(1, 5)).logits
    want = restore(model)(ids(1, 5)).logits
    close(logits.detach(), want.detach())
    with pytest.raises(RuntimeError, match=r"Qwen3NextGatedDeltaNet on gdn_jax: backward .* expected inference"):
        logits.sum().backward()
    want.sum().backward()


@pytest.mark.parametrize(
    "name", ["in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "norm.weight", "dt_bias"]
)
def test_a_backward_pass_raises_whatever_is_trained(name: str) -> None:
    model = replace_gated_delta_net(build()).requires_grad_(False)
    module = model.model.layers[0].linear_attn
    module.get_parameter(name).requires_grad_()
    with pytest.raises(RuntimeError, match="expected inference"):
        module(torch.ones(1, 3, 32)).sum().backward()


def test_what_comes_after_the_layers_can_be_trained() -> None:
    model = replace_gated_delta_net(build()).requires_grad_(False)
    module = model.model.layers[0].linear_attn
    module.out_proj.requires_grad_()
    module(torch.ones(1, 3, 32)).sum().backward()
    assert module.out_proj.weight.grad.any()


@pytest.mark.parametrize("first", [False, True])
def test_a_refused_call_leaves_the_cache(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = replace_gated_delta_net(build()), ids(2, 6)
    module, hidden = model.model.layers[0].linear_attn, torch.randn(2, 2, 32)

    def refuse(*args: Any) -> Any:
        raise ValueError("refused")

    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
        if first:
            cache = type(cache)(config=model.config)
        layer, untouched = cache.layers[0], copy.deepcopy(cache)
        with monkeypatch.context() as patch:
            patch.setattr(huggingface, "_call", lambda config: refuse)
            with pytest.raises(ValueError, match="refused"):
                module(hidden, cache)
        for field in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
            assert getattr(layer, field) == getattr(untouched.layers[0], field)
        if not first:
            assert all(torch.equal(a, b) for a, b in zip(states(cache), states(untouched), strict=True))
        close(module(hidden, cache), module(hidden, untouched))


def test_a_state_of_another_dtype_is_refused_before_the_cache_changes() -> None:
    model = replace_gated_delta_net(build())
    with torch.no_grad():
        cache = model(ids(2, 6), use_cache=True).past_key_values
        layer = cache.layers[0]
        layer.recurrent_states[0] = layer.recurrent_states[0].double()
        before = [x.clone() for x in states(cache)]
        with pytest.raises(ValueError, match=r"`caches` is of dtype torch\.float64"):
            model(ids(2, 1), past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(states(cache), before, strict=True))


def test_training_mode_after_the_swap() -> None:
    model = replace_gated_delta_net(build()).train()
    with pytest.raises(RuntimeError, match=r"in training mode, expected `model.eval\(\)`"):
        model(ids(1, 5))
    restore(model)(ids(1, 5))


def test_packed_sequences_are_refused() -> None:
    module = replace_gated_delta_net(build()).model.layers[0].linear_attn
    with pytest.raises(ValueError, match="`cu_seq_lens_q` is given, expected None"):
        module(torch.zeros(1, 4, 32), cu_seq_lens_q=torch.tensor([0, 2, 4], dtype=torch.int32))


def _training(model: Any) -> None:
    model.model.layers[2].train()


def _activation(model: Any) -> None:
    model.model.layers[2].linear_attn.activation = "gelu"


def _hook(model: Any) -> None:
    module = model.model.layers[2].linear_attn
    module.forward = module.forward


def _dtype(model: Any) -> None:
    model.model.layers[2].linear_attn.double()


def _device(model: Any) -> None:
    model.model.layers[2].linear_attn.to("meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_training, "`model.layers.2.linear_attn` is in training mode, expected `model.eval"),
        (_activation, "`model.layers.2.linear_attn` has the activation 'gelu', expected 'silu'"),
        (_hook, "`model.layers.2.linear_attn.forward` was replaced by a hook"),
        (_dtype, r"`model.layers.2.linear_attn.\w+` has dtype torch.float64, expected float32, bfloat16 or float16"),
        (_device, r"`model.layers.2.linear_attn.\w+` is on meta, expected a CPU or a CUDA device"),
    ],
)
def test_refused_models_stay_as_they_are(change: Callable[[Any], None], message: str) -> None:
    model = build()
    classes = [type(module) for module in model.modules()]
    change(model)
    with pytest.raises(ValueError, match=f"replace_gated_delta_net: {message}"):
        replace_gated_delta_net(model)
    assert [type(module) for module in model.modules()] == classes


def test_models_without_such_layers() -> None:
    with pytest.raises(ValueError, match=r"`model` \(Linear\) has no gated-delta-net module"):
        replace_gated_delta_net(nn.Linear(2, 2))
    for function in (replace_gated_delta_net, restore):
        with pytest.raises(
            TypeError, match=f"{function.__name__}: `model` is of type dict, expected a torch.nn.Module"
        ):
            function({})  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family: str) -> None:
    model = build(family, device="cuda")
    previous = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        same_run(model, pieces(21, 70, 1, 1, 2, 1))
        tokens = ids(2, 9, device="cuda")
        got, want = both(model, lambda model: generate(model, tokens))
        assert torch.equal(got.sequences, want.sequences)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = previous
