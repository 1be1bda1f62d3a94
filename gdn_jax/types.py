"""The four types that every part of gdn_jax shares: configuration, weights, state and output of one layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

PAD_SLOT = -1
"""The slot index that marks a padded sequence. Any other index outside the pool does the same."""

ACTIVATIONS = ("silu", "swish", None)
DTYPES = ("bfloat16", "float16", "float32")


class GDNState(NamedTuple):
    """The pools of one layer, or of a whole model with a leading layer axis `L`.

    Attributes:
        conv: `[num_slots, D, W - 1 + S]`, raw conv inputs, the oldest first; the activations' dtype by default.
        ssm: `[num_slots * (S + 1), HV, K, V]`, the recurrent states; float32, bfloat16 or float16. Request slot `r` owns
            the rows `r * (S + 1)` to `r * (S + 1) + S`: row `j` holds the state after token `j` of the last verify step.
    """

    conv: Array
    ssm: Array


class GDNWeights(NamedTuple):
    """The weights of one layer and one tensor-parallel rank; any of float32, bfloat16, float16.

    Attributes:
        conv_weight: `[D, W]`, the tap of the oldest input first.
        conv_bias: `[D]` or None.
        A_log: `[HV]`, the logarithm of the decay rate.
        dt_bias: `[HV]`, added to `a` before the softplus.
    """

    conv_weight: Array
    conv_bias: Array | None
    A_log: Array
    dt_bias: Array


class GDNOutput(NamedTuple):
    """What a layer function returns.

    Attributes:
        o: `[T, HV, V]` (decode: `[N, HV, V]`), the attention output, gated and normalised if `norm_weight` was given.
        z: the output gate's part of the input, unchanged, of the same shape.
        state: the updated `GDNState`.
    """

    o: Array
    z: Array
    state: GDNState


def _dtype_name(dtype: Any) -> Any:
    """`jnp.bfloat16`, `np.dtype("float32")`, `torch.float16` or a name: the name where it is a dtype, else as it came."""
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    try:
        return jnp.dtype(dtype).name if dtype is not None else None
    except TypeError:
        return dtype


@dataclasses.dataclass(frozen=True)
class GDNConfig:
    """The sizes of a gated-delta-net layer. Frozen and hashable, so that it can be a static argument of `jax.jit`.

    The fields are those of the whole model; the properties are those of one of its `tp_size` tensor-parallel ranks.

    Attributes:
        num_v_heads: value heads, a multiple of `num_k_heads`.
        num_k_heads: key heads.
        head_k_dim: `K`, the key dimension of a head.
        head_v_dim: `V`, the value dimension of a head.
        conv_kernel_dim: `W`, the width of the causal convolution, at least 2.
        activation: of the convolution, "silu", "swish" (the same) or None.
        mtp_step: `S`, draft tokens that one verify step checks (0: plain decoding).
        ssm_dtype: of the recurrent state, "float32", "bfloat16" or "float16" (also as a dtype).
        conv_dtype: of the conv state, likewise.
        tp_size: tensor-parallel ranks; divides both head counts.

    Raises:
        ValueError: heads that do not divide each other or `tp_size`, a size below its least, an unknown activation or dtype.
        TypeError: a size that is no integer.

    Example:
        >>> config = GDNConfig(num_v_heads=32, num_k_heads=16, head_k_dim=128, head_v_dim=128, conv_kernel_dim=4, tp_size=2)
        >>> config.tp_num_v_heads, config.conv_dim, config.qkvz_dim + config.ba_dim
        (16, 4096, 6176)
    """

    num_v_heads: int
    num_k_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_dim: int
    activation: str | None = "silu"
    mtp_step: int = 0
    ssm_dtype: Any = "bfloat16"
    conv_dtype: Any = "bfloat16"
    tp_size: int = 1

    def __post_init__(self) -> None:
        sizes = dict(num_v_heads=1, num_k_heads=1, head_k_dim=1, head_v_dim=1, conv_kernel_dim=2, mtp_step=0, tp_size=1)
        for name, least in sizes.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"GDNConfig: `{name}` is {value!r} of type {type(value).__name__}, expected an int.")
            if value < least:
                raise ValueError(f"GDNConfig: `{name}` is {value}, expected at least {least}.")
            object.__setattr__(self, name, int(value))
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"GDNConfig: `num_v_heads` is {self.num_v_heads}, expected a multiple of num_k_heads={self.num_k_heads}."
            )
        for name in ("num_v_heads", "num_k_heads"):
            if getattr(self, name) % self.tp_size:
                raise ValueError(
                    f"GDNConfig: `{name}` is {getattr(self, name)}, expected a multiple of tp_size={self.tp_size}."
                )
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"GDNConfig: `activation` is {self.activation!r}, expected one of {ACTIVATIONS}.")
        for name in ("ssm_dtype", "conv_dtype"):
            given = getattr(self, name)
            if _dtype_name(given) not in DTYPES:
                raise ValueError(f"GDNConfig: `{name}` is {given!r}, expected one of {DTYPES}, by name or as a dtype.")
            object.__setattr__(self, name, _dtype_name(given))

    @classmethod
    def from_hf(
        cls,
        config: Any,
        *,
        mtp_step: int = 0,
        tp_size: int = 1,
        ssm_dtype: Any = "bfloat16",
        conv_dtype: Any = None,
    ) -> Self:
        """The configuration of a Hugging Face Qwen3-Next or Qwen3.5 model.

        Args:
            config: the model's `config` object, or its dict; of a nested `text_config` where there is one.
            mtp_step: draft tokens of a verify step.
            tp_size: tensor-parallel ranks.
            ssm_dtype: of the recurrent state.
            conv_dtype: of the conv state; None: the model's `dtype` or `torch_dtype`, bfloat16 where there is none.

        Raises:
            ValueError: a key that is missing (named), or sizes that do not fit.

        Example:
            >>> sizes = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, hidden_act="silu",
            ...              linear_value_head_dim=8, linear_conv_kernel_dim=4, dtype="float32")
            >>> GDNConfig.from_hf(sizes).conv_dtype
            'float32'
        """

        def get(source: Any, key: str, default: Any = None) -> Any:
            return source.get(key, default) if isinstance(source, Mapping) else getattr(source, key, default)

        text = get(config, "text_config")
        source = config if text is None else text

        missing = object()

        def need(key: str) -> Any:
            value = get(source, key, missing)
            if value is missing or (value is None and key != "hidden_act"):  # None is an activation
                raise ValueError(f"GDNConfig.from_hf: `config` has no key '{key}', expected a Qwen3-Next style config.")
            return value

        if conv_dtype is None:
            given = (get(s, key) for s in (source, config) for key in ("dtype", "torch_dtype"))
            conv_dtype = next((d for d in given if d is not None), "bfloat16")
        return cls(
            num_v_heads=need("linear_num_value_heads"),
            num_k_heads=need("linear_num_key_heads"),
            head_k_dim=need("linear_key_head_dim"),
            head_v_dim=need("linear_value_head_dim"),
            conv_kernel_dim=need("linear_conv_kernel_dim"),
            activation=need("hidden_act"),
            mtp_step=mtp_step,
            ssm_dtype=ssm_dtype,
            conv_dtype=conv_dtype,
            tp_size=tp_size,
        )

    @property
    def tp_num_v_heads(self) -> int:
        """`HV`, the value heads of one rank."""
        return self.num_v_heads // self.tp_size

    @property
    def tp_num_k_heads(self) -> int:
        """`H`, the key heads of one rank."""
        return self.num_k_heads // self.tp_size

    @property
    def v_heads_per_k_head(self) -> int:
        """Value heads that share one key head."""
        return self.num_v_heads // self.num_k_heads

    @property
    def key_dim(self) -> int:
        """`H * K`, the channels of q, and of k."""
        return self.tp_num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """`HV * V`, the channels of v, and of z."""
        return self.tp_num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """`D`, the channels of the convolution: q | k | v."""
        return 2 * self.key_dim + self.value_dim

    @property
    def qkvz_dim(self) -> int:
        """The channels of q | k | v | z."""
        return self.conv_dim + self.value_dim

    @property
    def ba_dim(self) -> int:
        """The channels of b | a."""
        return 2 * self.tp_num_v_heads

    @property
    def conv_state_len(self) -> int:
        """`W - 1 + S`, the columns of a conv row."""
        return self.conv_kernel_dim - 1 + self.mtp_step
