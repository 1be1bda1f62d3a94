"""Hugging Face weights in our order, and whole layers against transformers' own modules."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
import golden
from gdn_jax import GDNConfig, GDNState, GDNWeights

pytestmark = pytest.mark.usefixtures("quick_compiles")

INT = np.int32
FLOAT32: dict[str, Any] = dict(ssm_dtype="float32", conv_dtype="float32")


def same(x: Any, y: Any) -> None:
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def numbered(rows: int, hidden: int = 1) -> np.ndarray:
    return np.repeat(np.arange(rows, dtype=np.float32)[:, None], hidden, axis=1)


# ---- the order of rows ----------------------------------------------------------------------------------------------


def test_golden_order_of_the_projections() -> None:
    given, _ = golden.load("hf_layer")
    h, hv, k, v, w, _ = given["dims"].tolist()
    config = GDNConfig(hv, h, k, v, w)
    qkvz, ba = given["in_proj_qkvz__weight"], given["in_proj_ba__weight"]
    packed = gdn_jax.pack_hf_projections(qkvz, ba, config)
    same(packed, np.concatenate([qkvz, ba])[given["proj_order"]])
    assert packed.dtype == np.float32


def grouped(config: GDNConfig) -> list[list[str]]:
    """Names of the rows of in_proj_qkvz and in_proj_ba, written down from what transformers does with them."""
    each = config.num_v_heads // config.num_k_heads
    qkvz, ba = [], []
    for h in range(config.num_k_heads):
        qkvz += [f"q{h}.{i}" for i in range(config.head_k_dim)] + [f"k{h}.{i}" for i in range(config.head_k_dim)]
        heads = range(h * each, (h + 1) * each)
        qkvz += [f"v{hv}.{i}" for hv in heads for i in range(config.head_v_dim)]
        qkvz += [f"z{hv}.{i}" for hv in heads for i in range(config.head_v_dim)]
        ba += [f"b{hv}" for hv in heads] + [f"a{hv}" for hv in heads]
    return [qkvz, ba]


def wanted(config: GDNConfig, rank: int) -> list[str]:
    """The same names in our order, of one rank."""
    each = config.num_k_heads // config.tp_size
    heads = range(rank * each, (rank + 1) * each)
    each = config.num_v_heads // config.tp_size
    v_heads = range(rank * each, (rank + 1) * each)
    names = [f"{x}{h}.{i}" for x in "qk" for h in heads for i in range(config.head_k_dim)]
    names += [f"{x}{h}.{i}" for x in "vz" for h in v_heads for i in range(config.head_v_dim)]
    return names + [f"{x}{h}" for x in "ba" for h in v_heads]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("v_heads", [4, 8, 12])
def test_every_row_finds_its_place(tp: int, v_heads: int) -> None:
    config = GDNConfig(num_v_heads=v_heads, num_k_heads=4, head_k_dim=3, head_v_dim=2, conv_kernel_dim=4, tp_size=tp)
    qkvz, ba = grouped(config)
    names = qkvz + ba
    rows = numbered(len(names), 2)
    for rank in range(tp):
        packed = gdn_jax.pack_hf_projections(rows[: len(qkvz)], rows[len(qkvz) :], config, rank)
        assert packed.shape == (config.qkvz_dim + config.ba_dim, 2)
        assert [names[int(row[0])] for row in packed] == wanted(config, rank)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_row_of_the_four_projections_finds_its_place(tp: int) -> None:
    config = GDNConfig(num_v_heads=8, num_k_heads=4, head_k_dim=3, head_v_dim=2, conv_kernel_dim=4, tp_size=tp)
    whole = wanted(dataclasses.replace(config, tp_size=1), 0)
    rows, borders = numbered(len(whole)), np.cumsum([2 * 4 * 3 + 8 * 2, 8 * 2, 8])
    qkv, z, b, a = np.split(rows, borders)
    for rank in range(tp):
        packed = gdn_jax.pack_hf_projections_split(qkv, z, b, a, config, rank)
        assert [whole[int(row[0])] for row in packed] == wanted(config, rank)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_a_rank(tp: int, bias: bool) -> None:
    config = GDNConfig(num_v_heads=4, num_k_heads=2, head_k_dim=3, head_v_dim=2, conv_kernel_dim=4, tp_size=tp)
    whole = dataclasses.replace(config, tp_size=1)
    names, channels = wanted(whole, 0), whole.conv_dim
    conv = np.arange(channels * 4, dtype=np.float32).reshape(channels, 1, 4)
    A_log, dt_bias = np.arange(4, dtype=np.float32), np.arange(4, 8, dtype=np.float32)
    for rank in range(tp):
        got = gdn_jax.gdn_weights_from_hf(conv, conv[:, 0, 0] if bias else None, A_log, dt_bias, config, rank)
        assert isinstance(got, GDNWeights)
        assert got.conv_weight.shape == (config.conv_dim, 4)
        order = [names[int(row[0]) // 4] for row in got.conv_weight]
        assert order == wanted(config, rank)[: config.conv_dim]
        same(got.conv_weight, conv[[int(row[0]) // 4 for row in got.conv_weight], 0])
        if bias:
            same(got.conv_bias, got.conv_weight[:, 0])
        else:
            assert got.conv_bias is None
        half = 4 // tp
        same(got.A_log, A_log[rank * half : (rank + 1) * half])
        same(got.dt_bias, dt_bias[rank * half : (rank + 1) * half])


def test_dtypes_are_kept_and_must_agree() -> None:
    config = GDNConfig(num_v_heads=2, num_k_heads=1, head_k_dim=2, head_v_dim=2, conv_kernel_dim=4)
    qkvz, ba = jnp.ones((12, 3), "bfloat16"), jnp.ones((4, 3), "bfloat16")
    assert gdn_jax.pack_hf_projections(qkvz, ba, config).dtype == "bfloat16"
    with pytest.raises(TypeError, match=r"^pack_hf_projections: `in_proj_ba` has dtype float32, expected bfloat16"):
        gdn_jax.pack_hf_projections(qkvz, ba.astype("float32"), config)
    with pytest.raises(TypeError, match=r"^pack_hf_projections_split: `z` has dtype float16, expected bfloat16"):
        gdn_jax.pack_hf_projections_split(qkvz[:8], jnp.ones((4, 3), "float16"), ba[:2], ba[:2], config)


# ---- whole layers ---------------------------------------------------------------------------------------------------


class Layer:
    """A layer with its projections around gdn_jax: `[B, T, hidden]` in and out, on a pool of B slots."""

    def __init__(self, config: GDNConfig, packed: Any, weights: GDNWeights, norm: Any, out: Any, eps: float) -> None:
        self.config, self.packed, self.weights = config, jnp.asarray(packed), weights
        self.norm, self.out, self.eps = jnp.asarray(norm), jnp.asarray(out), eps

    def project(self, hidden: np.ndarray) -> jax.Array:
        flat = hidden.reshape(-1, hidden.shape[-1])
        return jnp.dot(flat, self.packed.T, precision="highest")

    def back(self, o: jax.Array) -> jax.Array:
        return jnp.dot(o.reshape(o.shape[0], -1), self.out.T, precision="highest")

    def prefill(self, hidden: np.ndarray, lengths: list[int]) -> tuple[jax.Array, GDNState]:
        """`hidden` `[sum(lengths), hidden]`, packed."""
        out = gdn_jax.gdn_prefill(
            self.weights,
            gdn_jax.init_state(self.config, len(lengths)),
            self.project(hidden),
            config=self.config,
            query_start_loc=np.cumsum([0, *lengths]).astype(INT),
            state_indices=np.arange(len(lengths), dtype=INT),
            norm_weight=self.norm,
            norm_eps=self.eps,
        )
        return self.back(out.o), out.state

    def decode(self, state: GDNState, hidden: np.ndarray) -> tuple[jax.Array, GDNState]:
        out = gdn_jax.gdn_decode(
            self.weights,
            state,
            self.project(hidden),
            config=self.config,
            state_indices=np.arange(hidden.shape[0], dtype=INT),
            norm_weight=self.norm,
            norm_eps=self.eps,
        )
        return self.back(out.o), out.state


def test_golden_hf_layer() -> None:
    given, wants = golden.load("hf_layer")
    h, hv, k, v, w, _ = given["dims"].tolist()
    config = GDNConfig(hv, h, k, v, w, **FLOAT32)
    weights = gdn_jax.gdn_weights_from_hf(given["conv1d__weight"], None, given["A_log"], given["dt_bias"], config)
    packed = gdn_jax.pack_hf_projections(given["in_proj_qkvz__weight"], given["in_proj_ba__weight"], config)
    layer = Layer(config, packed, weights, given["norm__weight"], given["out_proj__weight"], given["norm_eps"])
    hidden = given["hidden_states"]
    batch, steps = hidden.shape[0], wants["decode"].shape[1]
    prompt = hidden.shape[1] - steps
    y, state = layer.prefill(hidden[:, :prompt].reshape(batch * prompt, -1), [prompt] * batch)
    assert golden.rel(y.reshape(batch, prompt, -1), wants["prefill"]) <= 1e-5
    for t in range(steps):
        y, state = layer.decode(state, hidden[:, prompt + t])
        assert golden.rel(y, wants["decode"][:, t]) <= 1e-5
    assert golden.rel(state.ssm, wants["ssm"]) <= 1e-5
    assert golden.rel(state.conv, wants["conv"]) <= 1e-5


def module(family: str, seed: int = 0) -> tuple[Any, Any]:
    """transformers' layer with seeded weights, float32, on the CPU, and its configuration."""
    torch = pytest.importorskip("torch")
    name = dict(next="qwen3_next", five="qwen3_5")[family]
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    configuration = pytest.importorskip(f"transformers.models.{name}.configuration_{name}")
    kind = configuration.Qwen3NextConfig if family == "next" else configuration.Qwen3_5TextConfig
    layer_kind = modeling.Qwen3NextGatedDeltaNet if family == "next" else modeling.Qwen3_5GatedDeltaNet
    hf = kind(
        hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"],
        dtype="float32",
    )  # fmt: skip
    torch.manual_seed(seed)
    layer = layer_kind(hf, 0).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() > 1 else 0.3))
    layer.norm.weight += 1
    return layer, hf


def ours(layer: Any, hf: Any, family: str, tp: int = 1, rank: int = 0) -> Layer:
    """The same layer (or one rank of it) around gdn_jax."""
    config = GDNConfig.from_hf(hf, tp_size=tp, ssm_dtype="float32")
    assert config.conv_dtype == "float32"
    assert (config.num_v_heads, config.num_k_heads, config.conv_kernel_dim) == (4, 2, 4)

    def array(x: Any) -> np.ndarray:
        return x.numpy()

    if family == "next":
        packed = gdn_jax.pack_hf_projections(
            array(layer.in_proj_qkvz.weight), array(layer.in_proj_ba.weight), config, rank
        )
    else:
        four = (getattr(layer, f"in_proj_{name}").weight for name in ("qkv", "z", "b", "a"))
        packed = gdn_jax.pack_hf_projections_split(*map(array, four), config, rank)
    weights = gdn_jax.gdn_weights_from_hf(
        array(layer.conv1d.weight), None, array(layer.A_log), array(layer.dt_bias), config, rank
    )
    width = config.value_dim
    out = array(layer.out_proj.weight)[:, rank * width : (rank + 1) * width]
    return Layer(config, packed, weights, array(layer.norm.weight), out, layer.layer_norm_epsilon)


def cache(hf: Any) -> Any:
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=hf)


BOTH = pytest.mark.parametrize("family", ["next", "five"])
B, PROMPT, STEPS = 2, 9, 3


def hidden_states(seed: int, batch: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, tokens, 24)).astype(np.float32)


@BOTH
def test_prefill_and_decode_of_transformers(family: str) -> None:
    torch = pytest.importorskip("torch")
    layer, hf = module(family)
    mine, past = ours(layer, hf, family), cache(hf)
    hidden = hidden_states(1, B, PROMPT + STEPS)
    want = layer(torch.from_numpy(hidden[:, :PROMPT]), cache=past).numpy()
    got, state = mine.prefill(hidden[:, :PROMPT].reshape(B * PROMPT, -1), [PROMPT] * B)
    assert golden.rel(got.reshape(B, PROMPT, -1), want) <= 1e-5
    assert golden.rel(state.ssm, past.get_recurrent_state(0, state_idx=0).numpy()) <= 1e-5
    assert golden.rel(state.conv, past.get_conv_state(0, state_idx=0).numpy()[..., -3:]) <= 1e-5
    for t in range(PROMPT, PROMPT + STEPS):
        want = layer(torch.from_numpy(hidden[:, t : t + 1].copy()), cache=past).numpy()[:, 0]
        got, state = mine.decode(state, hidden[:, t])
        assert golden.rel(got, want) <= 1e-5
    assert golden.rel(state.ssm, past.get_recurrent_state(0, state_idx=0).numpy()) <= 1e-5


@BOTH
def test_left_padding_of_transformers_is_no_tokens_here(family: str) -> None:
    """transformers zeroes the hidden states of the mask; zero inputs leave zero state, so packing without them is the same."""
    torch = pytest.importorskip("torch")
    layer, hf = module(family, seed=2)
    mine, past = ours(layer, hf, family), cache(hf)
    hidden, lengths = hidden_states(3, B, PROMPT + 1), [5, PROMPT]
    mask = np.stack([np.arange(PROMPT) >= PROMPT - length for length in lengths])
    prompt = np.where(mask[..., None], hidden[:, :PROMPT], 7.0).astype(np.float32)
    want = layer(torch.from_numpy(prompt), cache=past, attention_mask=torch.from_numpy(mask)).numpy()
    padded = np.concatenate([prompt[mask], np.full((B * PROMPT - sum(lengths), 24), 1e4, np.float32)])
    got, state = mine.prefill(padded, lengths)
    assert golden.rel(got[: sum(lengths)], want[mask]) <= 1e-5
    assert not np.asarray(got[sum(lengths) :]).any()
    want = layer(torch.from_numpy(hidden[:, PROMPT:].copy()), cache=past).numpy()[:, 0]
    got, _ = mine.decode(state, hidden[:, PROMPT])
    assert golden.rel(got, want) <= 1e-5


@BOTH
def test_two_ranks_add_up_to_the_layer(family: str) -> None:
    torch = pytest.importorskip("torch")
    layer, hf = module(family, seed=4)
    hidden = hidden_states(5, B, PROMPT)
    want = layer(torch.from_numpy(hidden)).numpy()
    ranks = [ours(layer, hf, family, tp=2, rank=rank) for rank in (0, 1)]
    parts = [rank.prefill(hidden.reshape(B * PROMPT, -1), [PROMPT] * B) for rank in ranks]
    got = sum(np.asarray(y) for y, _ in parts)
    assert golden.rel(np.asarray(got).reshape(B, PROMPT, -1), want) <= 1e-5
    whole = ours(layer, hf, family)
    _, state = whole.prefill(hidden.reshape(B * PROMPT, -1), [PROMPT] * B)
    assert golden.rel(np.concatenate([s.ssm for _, s in parts], axis=1), state.ssm) <= 1e-5
    # Rank after rank the parts q, k, v of the channels stand behind each other.
    sizes = [ranks[0].config.key_dim] * 2 + [ranks[0].config.value_dim]
    split = [np.split(np.asarray(s.conv), np.cumsum(sizes)[:-1], axis=1) for _, s in parts]
    assert (
        golden.rel(np.concatenate([x for pair in zip(*split, strict=True) for x in pair], axis=1), state.conv) <= 1e-5
    )
    for name in ("A_log", "dt_bias"):
        same(np.concatenate([getattr(rank.weights, name) for rank in ranks]), getattr(whole.weights, name))
