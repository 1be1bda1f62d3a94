"""GDNConfig and the NamedTuples: sizes of a rank, what is refused and how, dtypes, hashing, Hugging Face configurations."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gdn_jax import PAD_SLOT, GDNConfig, GDNState, GDNWeights

SIZES: dict[str, Any] = dict(num_v_heads=32, num_k_heads=16, head_k_dim=128, head_v_dim=64, conv_kernel_dim=4)
HF: dict[str, Any] = dict(
    linear_num_value_heads=8,
    linear_num_key_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=3,
    hidden_act="silu",
)


def make(**changes: Any) -> GDNConfig:
    return GDNConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("tp", [1, 2, 4, 16])
def test_sizes_are_those_of_one_rank(tp: int) -> None:
    config = make(tp_size=tp, mtp_step=2)
    assert (config.num_v_heads, config.num_k_heads) == (32, 16), "the fields stay those of the whole model"
    assert config.tp_num_v_heads == 32 // tp
    assert config.tp_num_k_heads == 16 // tp
    assert config.key_dim == 16 * 128 // tp
    assert config.value_dim == 32 * 64 // tp
    assert config.conv_dim == (2 * 16 * 128 + 32 * 64) // tp
    assert config.qkvz_dim == (2 * 16 * 128 + 2 * 32 * 64) // tp
    assert config.ba_dim == 2 * 32 // tp
    assert config.v_heads_per_k_head == 2
    assert config.conv_state_len == 4 - 1 + 2, "W - 1 + S, whatever tp_size"


def test_defaults() -> None:
    config = make()
    assert (config.activation, config.mtp_step, config.tp_size) == ("silu", 0, 1)
    assert (config.ssm_dtype, config.conv_dtype) == ("bfloat16", "bfloat16")
    assert config.conv_state_len == 3
    assert PAD_SLOT == -1


REFUSED = [
    (dict(num_v_heads=30), ValueError, ["`num_v_heads` is 30", "multiple of num_k_heads=16"]),
    (dict(num_v_heads=8), ValueError, ["`num_v_heads` is 8", "multiple of num_k_heads=16"]),
    (dict(tp_size=32), ValueError, ["`num_k_heads` is 16", "multiple of tp_size=32"]),
    (dict(tp_size=3), ValueError, ["`num_v_heads` is 32", "multiple of tp_size=3"]),
    (dict(activation="relu"), ValueError, ["`activation` is 'relu'", "'silu'", "'swish'", "None"]),
    (dict(ssm_dtype="float64"), ValueError, ["`ssm_dtype` is 'float64'", "float32", "bfloat16", "float16"]),
    (dict(conv_dtype=np.float64), ValueError, ["`conv_dtype` is", "float32", "bfloat16", "float16"]),
    (dict(conv_dtype=jnp.int32), ValueError, ["`conv_dtype` is", "expected one of"]),
    (dict(ssm_dtype=None), ValueError, ["`ssm_dtype` is None"]),
    (dict(ssm_dtype="fp8"), ValueError, ["`ssm_dtype` is 'fp8'"]),
    (dict(ssm_dtype=7), ValueError, ["`ssm_dtype` is 7"]),
    (dict(mtp_step=-1), ValueError, ["`mtp_step` is -1", "at least 0"]),
    (dict(conv_kernel_dim=1), ValueError, ["`conv_kernel_dim` is 1", "at least 2"]),
    (dict(head_k_dim=0), ValueError, ["`head_k_dim` is 0", "at least 1"]),
    (dict(head_v_dim=-3), ValueError, ["`head_v_dim` is -3", "at least 1"]),
    (dict(num_k_heads=0), ValueError, ["`num_k_heads` is 0", "at least 1"]),
    (dict(tp_size=0), ValueError, ["`tp_size` is 0", "at least 1"]),
    (dict(num_v_heads=32.0), TypeError, ["`num_v_heads` is 32.0", "float", "int"]),
    (dict(tp_size=True), TypeError, ["`tp_size` is True", "bool", "int"]),
    (dict(head_k_dim="128"), TypeError, ["`head_k_dim` is '128'", "str", "int"]),
]


@pytest.mark.parametrize(("changes", "error", "words"), REFUSED, ids=[str(changes) for changes, _, _ in REFUSED])
def test_refused(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        make(**changes)
    message = str(caught.value)
    assert message.startswith("GDNConfig: "), message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("activation", ["silu", "swish", None])
def test_activations(activation: str | None) -> None:
    assert make(activation=activation).activation == activation


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_dtypes_by_name_or_as_dtypes(name: str) -> None:
    forms = [
        name,
        getattr(jnp, name),
        jnp.dtype(name),
        np.dtype(getattr(ml_dtypes, name, name)),
        jnp.zeros(1, name).dtype,
    ]
    for form in forms:
        config = make(ssm_dtype=form, conv_dtype=form)
        assert (config.ssm_dtype, config.conv_dtype) == (name, name), form
        assert config == make(ssm_dtype=name, conv_dtype=name)
        assert hash(config) == hash(make(ssm_dtype=name, conv_dtype=name))


def test_torch_dtypes() -> None:
    torch = pytest.importorskip("torch")
    config = make(ssm_dtype=torch.float32, conv_dtype=torch.float16)
    assert config == make(ssm_dtype="float32", conv_dtype="float16")
    assert make(conv_dtype="torch.bfloat16").conv_dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"`conv_dtype` is torch\.float64"):
        make(conv_dtype=torch.float64)


def test_hashable_frozen_and_static() -> None:
    config = make(mtp_step=np.int64(1))
    assert config == make(mtp_step=1)
    assert hash(config) == hash(make(mtp_step=1))
    assert config != make(mtp_step=2)
    assert type(config.mtp_step) is int, "numpy sizes become ints, so that they print and hash as such"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mtp_step = 3  # pyright: ignore[reportAttributeAccessIssue]
    traced = []

    def sizes(x: jax.Array, config: GDNConfig) -> jax.Array:
        traced.append(config)
        return x * config.conv_dim

    jitted = jax.jit(sizes, static_argnames="config")
    assert float(jitted(jnp.float32(2), config=config)) == 2.0 * config.conv_dim
    jitted(jnp.float32(2), config=make(mtp_step=1))
    assert len(traced) == 1, "equal configurations share one trace"
    assert dataclasses.replace(config, tp_size=2).tp_num_v_heads == 16
    with pytest.raises(ValueError, match="tp_size=5"):
        dataclasses.replace(config, tp_size=5)


def test_state_and_weights_are_pytrees() -> None:
    state = GDNState(jnp.zeros(2), jnp.ones(3))
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(2,), (3,)]
    assert isinstance(jax.tree.map(lambda x: x + 1, state), GDNState)
    weights = GDNWeights(jnp.zeros(2), None, jnp.zeros(3), jnp.zeros(4))
    assert len(jax.tree.leaves(weights)) == 3, "a missing bias is no leaf"
    assert state._fields == ("conv", "ssm")
    assert weights._fields == ("conv_weight", "conv_bias", "A_log", "dt_bias")


# ---- from_hf --------------------------------------------------------------------------------------------------------


def expected(**changes: Any) -> GDNConfig:
    sizes: dict[str, Any] = dict(num_v_heads=8, num_k_heads=4, head_k_dim=16, head_v_dim=12, conv_kernel_dim=3)
    return GDNConfig(**{**sizes, **changes})


@pytest.mark.parametrize("kind", ["dict", "object"])
def test_from_hf(kind: str) -> None:
    source: Any = HF if kind == "dict" else types.SimpleNamespace(**HF)
    assert GDNConfig.from_hf(source) == expected(), "bfloat16 where the model names no dtype"
    config = GDNConfig.from_hf(source, mtp_step=2, tp_size=4, ssm_dtype="float32", conv_dtype="float16")
    assert config == expected(mtp_step=2, tp_size=4, ssm_dtype="float32", conv_dtype="float16")


@pytest.mark.parametrize("kind", ["dict", "object"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_from_hf_takes_the_dtype_of_the_model(kind: str, key: str) -> None:
    given = {**HF, key: "float16"}
    source: Any = given if kind == "dict" else types.SimpleNamespace(**given)
    config = GDNConfig.from_hf(source)
    assert (config.conv_dtype, config.ssm_dtype) == ("float16", "bfloat16"), "the ssm dtype is the caller's alone"
    assert GDNConfig.from_hf(source, conv_dtype="float32").conv_dtype == "float32", "an explicit one wins"


def test_from_hf_with_torch_dtype() -> None:
    torch = pytest.importorskip("torch")
    assert GDNConfig.from_hf({**HF, "dtype": torch.float32}).conv_dtype == "float32"
    assert GDNConfig.from_hf({**HF, "dtype": None, "torch_dtype": torch.float16}).conv_dtype == "float16"
    assert GDNConfig.from_hf({**HF, "dtype": "float32", "torch_dtype": "float16"}).conv_dtype == "float32"


@pytest.mark.parametrize("kind", ["dict", "object", "object in dict"])
def test_from_hf_reads_a_nested_text_config(kind: str) -> None:
    inner = {**HF, "dtype": "float32"}
    outer = dict(HF, linear_num_value_heads=4, text_config=inner)  # the outer sizes are not those of the text model
    sources: dict[str, Any] = {
        "dict": outer,
        "object": types.SimpleNamespace(text_config=types.SimpleNamespace(**inner)),
        "object in dict": {"text_config": types.SimpleNamespace(**inner)},
    }
    assert GDNConfig.from_hf(sources[kind]) == expected(conv_dtype="float32")


def test_from_hf_ignores_an_empty_text_config() -> None:
    assert GDNConfig.from_hf({**HF, "text_config": None}) == expected()


@pytest.mark.parametrize("key", sorted(HF))
@pytest.mark.parametrize("kind", ["dict", "object"])
def test_from_hf_names_the_missing_key(kind: str, key: str) -> None:
    given = {name: value for name, value in HF.items() if name != key}
    source: Any = given if kind == "dict" else types.SimpleNamespace(**given)
    with pytest.raises(ValueError, match=f"^GDNConfig.from_hf: .*'{key}'"):
        GDNConfig.from_hf(source)


def test_from_hf_refuses_what_the_constructor_refuses() -> None:
    with pytest.raises(ValueError, match="`activation` is 'gelu'"):
        GDNConfig.from_hf({**HF, "hidden_act": "gelu"})
    with pytest.raises(ValueError, match="`conv_dtype` is 'float64'"):
        GDNConfig.from_hf({**HF, "dtype": "float64"})
    with pytest.raises(ValueError, match="tp_size=3"):
        GDNConfig.from_hf(HF, tp_size=3)


def test_from_hf_on_the_real_configuration() -> None:
    transformers = pytest.importorskip("transformers")
    config = GDNConfig.from_hf(transformers.Qwen3NextConfig(), mtp_step=1)
    assert config == GDNConfig(
        num_v_heads=32, num_k_heads=16, head_k_dim=128, head_v_dim=128, conv_kernel_dim=4, mtp_step=1
    )


def test_from_hf_takes_an_activation_of_none() -> None:
    sizes = dict(
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
    )
    assert GDNConfig.from_hf(sizes | {"hidden_act": None}).activation is None
    with pytest.raises(ValueError, match="hidden_act"):
        GDNConfig.from_hf(sizes)
