"""What is refused and in which words: every operator's arguments, `check_batch`, and the checkify debug checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import checkify

import gdn_jax
from gdn_jax import GDNConfig, GDNState, GDNWeights, check_batch

pytestmark = pytest.mark.usefixtures("quick_compiles")

INT = np.int32
F32 = np.float32
H, HV, K, V, W, D, S = 1, 2, 4, 3, 4, 14, 2  # D = 2 * H * K + HV * V
PLAIN = GDNConfig(HV, H, K, V, W, ssm_dtype="float32", conv_dtype="float32")
MTP = GDNConfig(HV, H, K, V, W, mtp_step=S, ssm_dtype="float32", conv_dtype="float32")


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def rule(*lead: int) -> dict[str, Any]:
    return dict(
        q=ones(*lead, H, K), k=ones(*lead, H, K), v=ones(*lead, HV, V), g=-ones(*lead, HV), beta=ones(*lead, HV)
    )


def layer(config: GDNConfig, tokens: int) -> dict[str, Any]:
    rows = 5 * (config.mtp_step + 1)
    return dict(
        weights=GDNWeights(ones(D, W), ones(D), ones(HV), ones(HV)),
        state=GDNState(ones(5, D, config.conv_state_len), ones(rows, HV, K, V)),
        mixed_qkvzba=ones(tokens, config.qkvz_dim + config.ba_dim),
        config=config,
        norm_weight=ones(V),
    )


# A call of each function that is fine: three sequences in slots 4, 0, 2 of five; packed ones have 2, 0 and 3 tokens.
N, T = 3, 6
SLOTS, STARTS, HAS = np.array([4, 0, 2], INT), np.array([0, 2, 2, 5], INT), np.array([True, False, True])
COUNTS = np.array([1, 3, 2], INT)
ROWS = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8]], INT)
CALLS: dict[str, dict[str, Any]] = {
    "gdn_gating": dict(A_log=ones(HV), a=ones(T, HV), b=ones(T, HV), dt_bias=ones(HV)),
    "causal_conv1d": dict(
        x=ones(T, D), weight=ones(D, W), bias=ones(D), conv_state=ones(5, D, W - 1 + S), state_indices=SLOTS,
        query_start_loc=STARTS, has_initial_state=HAS, initial_state_indices=SLOTS, num_accepted_tokens=COUNTS,
    ),
    "causal_conv1d_update": dict(
        x=ones(T, D), weight=ones(D, W), bias=ones(D), conv_state=ones(5, D, W - 1 + S), state_indices=SLOTS,
        query_start_loc=STARTS, has_initial_state=HAS, num_accepted_tokens=COUNTS,
    ),
    "chunk_gated_delta_rule": dict(
        **rule(T), ssm_state=ones(5, HV, K, V), state_indices=SLOTS, query_start_loc=STARTS, has_initial_state=HAS,
        initial_state_indices=SLOTS, scale=0.5,
    ),
    "recurrent_gated_delta_rule": dict(
        **rule(N), ssm_state=ones(5, HV, K, V), state_indices=SLOTS, has_initial_state=HAS, scale=0.5
    ),
    "mtp_gated_delta_rule": dict(
        **rule(T), ssm_state=ones(9, HV, K, V), read_indices=ROWS, write_indices=ROWS, num_accepted_tokens=COUNTS,
        query_start_loc=STARTS, scale=0.5,
    ),
    "gated_rms_norm": dict(o=ones(T, HV, V), z=ones(T, HV, V), weight=ones(V)),
    "gdn_prefill": dict(
        **layer(MTP, T), query_start_loc=STARTS, state_indices=SLOTS, has_initial_state=HAS, initial_state_indices=SLOTS,
        num_accepted_tokens=COUNTS,
    ),
    "gdn_decode": dict(**layer(PLAIN, N), state_indices=SLOTS, has_initial_state=HAS),
    "gdn_mtp_decode": dict(**layer(MTP, T), query_start_loc=STARTS, state_indices=SLOTS, num_accepted_tokens=COUNTS),
    "split_qkvzba": dict(mixed_qkvzba=ones(T, PLAIN.qkvz_dim + PLAIN.ba_dim), config=PLAIN),
    "split_qkv": dict(mixed_qkv=ones(T, D), config=PLAIN),
    "init_state": dict(config=PLAIN, num_slots=5, num_layers=2),
    "reset_slots": dict(state=layer(MTP, T)["state"], slots=SLOTS, config=MTP),
    "copy_slots": dict(state=layer(MTP, T)["state"], src=SLOTS, dst=np.array([1, 3, -1], INT), config=MTP),
    "pack_hf_projections": dict(in_proj_qkvz=ones(20, 7), in_proj_ba=ones(4, 7), config=PLAIN, rank=0),
    "pack_hf_projections_split": dict(qkv=ones(D, 7), z=ones(6, 7), b=ones(HV, 7), a=ones(HV, 7), config=PLAIN, rank=0),
    "gdn_weights_from_hf": dict(
        conv1d_weight=ones(D, 1, W), conv1d_bias=ones(D), A_log=ones(HV), dt_bias=ones(HV), config=PLAIN, rank=0
    ),
}  # fmt: skip
STATEFUL = [
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "recurrent_gated_delta_rule",
    "mtp_gated_delta_rule",
    "gdn_prefill",
    "gdn_decode",
    "gdn_mtp_decode",
]


def call(function: str, **changes: Any) -> Any:
    return getattr(gdn_jax, function)(**{**CALLS[function], **changes})


def refused(error: type[Exception], words: list[str], function: str, **changes: Any) -> str:
    """Calls, and checks that it is refused by a message that names the function first and holds all `words`."""
    with pytest.raises(error) as caught:
        call(function, **changes)
    message = str(caught.value)
    assert message.startswith(f"{function}: "), message
    for word in words:  # the comma of a tuple of one is a matter of taste
        assert word.replace(",)", ")") in message.replace(",)", ")"), f"{word!r} is not in {message!r}"
    return message


def float_arguments() -> list[tuple[str, str]]:
    return [(f, n) for f, c in CALLS.items() for n, x in c.items() if isinstance(x, np.ndarray) and x.dtype == F32]


def index_arguments() -> list[tuple[str, str]]:
    return [(f, n) for f, c in CALLS.items() for n, x in c.items() if isinstance(x, np.ndarray) and x.dtype == INT]


def test_the_base_calls_are_fine() -> None:
    for function in CALLS:
        leaves = jax.tree.leaves(call(function))
        assert leaves, function
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in leaves), function


# ---- dtypes and types -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "name"), float_arguments())
def test_float_arguments(function: str, name: str) -> None:
    good = CALLS[function][name]
    for bad in (
        good.astype(np.float64),
        good.astype(np.int32),
        good.astype(bool),
        good.astype(ml_dtypes.float8_e4m3fn),
    ):
        words = [f"`{name}` has dtype {bad.dtype}", "expected one of float32, bfloat16, float16"]
        refused(TypeError, words, function, **{name: bad})
    words = [f"`{name}` is of type list", "expected a JAX or numpy array"]
    refused(TypeError, words, function, **{name: good.tolist()})
    # One axis more: for `a`, `b`, `o` and `z`, which may have any number of axes, it is the last that doesn't fit.
    message = refused(ValueError, [" has shape (", ", expected ("], function, **{name: good[..., None]})
    if name not in ("a", "o") or len(CALLS[function]) > 4:
        assert f"`{name}` has shape {(*good.shape, 1)}" in message


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(("function", "name"), [("gdn_gating", "a"), ("causal_conv1d", "x"), ("gated_rms_norm", "o")])
def test_float64_whether_x64_is_on_or_off(function: str, name: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        given: list[Any] = [CALLS[function][name].astype(np.float64)]
        if x64:
            given.append(jnp.asarray(given[0]))
            assert given[1].dtype == jnp.float64
        for array in given:
            refused(TypeError, [f"`{name}` has dtype float64", "float32, bfloat16, float16"], function, **{name: array})


@pytest.mark.parametrize("function", ["gdn_prefill", "gdn_decode", "gdn_mtp_decode"])
def test_float64_inside_weights_and_state(function: str) -> None:
    weights, state = CALLS[function]["weights"], CALLS[function]["state"]
    for field in weights._fields:
        bad = weights._replace(**{field: getattr(weights, field).astype(np.float64)})
        refused(TypeError, [f"`weights.{field}` has dtype float64"], function, weights=bad)
    for field in state._fields:
        bad = state._replace(**{field: getattr(state, field).astype(np.float64)})
        refused(TypeError, [f"`state.{field}` has dtype float64"], function, state=bad)


@pytest.mark.parametrize(("function", "name"), index_arguments())
def test_index_arguments(function: str, name: str) -> None:
    good = CALLS[function][name]
    for dtype in (np.float32, np.bool_, np.float64, ml_dtypes.bfloat16):
        bad = good.astype(dtype)
        refused(TypeError, [f"`{name}` has dtype {bad.dtype}", "expected an integer dtype"], function, **{name: bad})
    refused(TypeError, [f"`{name}` is of type list"], function, **{name: good.tolist()})
    for bad in (good[None], good[:-1] if name != "query_start_loc" else good[:0], np.concatenate([good, good])):
        if name in ("src", "slots") and bad.ndim == 1:
            continue  # any length is one
        if name == "query_start_loc" and bad.ndim == 1 and bad.size:
            continue  # another number of sequences: the others are then named, below
        message = refused(ValueError, ["expected ("], function, **{name: bad})
        if (function, name) not in (
            ("gdn_mtp_decode", "num_accepted_tokens"),
            ("mtp_gated_delta_rule", "read_indices"),
        ):
            assert f"`{name}` has shape {bad.shape}" in message or (name == "src" and "`dst` has shape" in message), (
                message
            )


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_any_integer_dtype_is_an_index(dtype: Any) -> None:
    """SLOT-10: and a strided view of one too."""
    for function in ("causal_conv1d_update", "recurrent_gated_delta_rule", "gdn_decode"):
        want = jax.tree.leaves(call(function))
        changes = {n: CALLS[function][n].astype(dtype) for f, n in index_arguments() if f == function}
        for x, y in zip(jax.tree.leaves(call(function, **changes)), want, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        view = np.repeat(SLOTS.astype(dtype), 2)[::2]
        for x, y in zip(jax.tree.leaves(call(function, state_indices=view)), want, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("function", [f for f, c in CALLS.items() if "has_initial_state" in c])
def test_has_initial_state_is_bool(function: str) -> None:
    for dtype in (np.int32, np.float32, np.uint8):
        words = [f"`has_initial_state` has dtype {np.dtype(dtype)}", "expected bool"]
        refused(TypeError, words, function, has_initial_state=HAS.astype(dtype))
    words = ["`has_initial_state` has shape (2,)", "expected (num_sequences=3)"]
    refused(ValueError, words, function, has_initial_state=HAS[:2])
    refused(TypeError, ["`has_initial_state` is of type bool"], function, has_initial_state=True)


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "recurrent_gated_delta_rule", "mtp_gated_delta_rule"])
def test_q_k_v_of_different_dtypes(function: str) -> None:
    for name in ("k", "v"):
        bad = CALLS[function][name].astype(ml_dtypes.bfloat16)
        words = [f"`{name}` has dtype bfloat16", "expected float32", "`q`"]
        refused(TypeError, words, function, **{name: bad})
    bad = CALLS[function]["q"].astype(np.float16)
    refused(TypeError, ["`k` has dtype float32", "expected float16", "`q`"], function, q=bad)


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "recurrent_gated_delta_rule", "mtp_gated_delta_rule"])
@pytest.mark.parametrize(("heads", "value_heads"), [(4, 2), (3, 4)])
def test_dec_08_heads_that_do_not_divide(function: str, heads: int, value_heads: int) -> None:
    lead = len(CALLS[function]["q"])
    q, v, g = ones(lead, heads, K), ones(lead, value_heads, V), ones(lead, value_heads)
    pool = ones(9, value_heads, K, V)
    words = [f"num_v_heads={value_heads}", f"num_k_heads={heads}", "multiple"]
    refused(ValueError, words, function, q=q, k=q, v=v, g=g, beta=g, ssm_state=pool)


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "recurrent_gated_delta_rule", "mtp_gated_delta_rule"])
def test_heads_of_no_size(function: str) -> None:
    lead, pool = len(CALLS[function]["q"]), ones(9, HV, 0, V)
    none = ones(lead, H, 0)
    refused(ValueError, ["head_k_dim=0", "at least 1"], function, q=none, k=none, ssm_state=pool)
    refused(ValueError, ["head_v_dim=0", "at least 1"], function, v=ones(lead, HV, 0), ssm_state=ones(9, HV, K, 0))


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "recurrent_gated_delta_rule", "mtp_gated_delta_rule"])
def test_static_options_of_the_rule(function: str) -> None:
    refused(TypeError, ["`use_qk_l2norm` is 1", "int", "bool"], function, use_qk_l2norm=1)
    refused(TypeError, ["`scale` is '1'", "str", "number"], function, scale="1")
    refused(TypeError, ["`scale` is True", "bool", "number"], function, scale=True)
    refused(ValueError, ["`scale` has shape (1,)", "expected ()"], function, scale=np.ones(1, F32))
    refused(TypeError, ["`scale` has dtype float64"], function, scale=np.ones((), np.float64))
    arrays = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in CALLS[function].items()}
    want = getattr(gdn_jax, function)(**arrays | {"scale": 0.5})
    with jax.enable_x64(True):  # a number that `jit` traces is a weak float64 there, and a number all the same
        got = jax.jit(lambda scale: getattr(gdn_jax, function)(**arrays | {"scale": scale}))(0.5)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)


def test_chunk_size() -> None:
    refused(ValueError, ["`chunk_size` is 0", "at least 1"], "chunk_gated_delta_rule", chunk_size=0)
    refused(TypeError, ["`chunk_size` is 64.0", "float", "int"], "chunk_gated_delta_rule", chunk_size=64.0)


# ---- shapes ---------------------------------------------------------------------------------------------------------

# (function, changes, what the message says came, what it says was expected)
MISFITS: list[tuple[str, dict[str, Any], str, str]] = [
    ("gdn_gating", dict(a=ones(T, 3)), "`a` has shape (6, 3)", "expected (..., num_v_heads=2)"),
    ("gdn_gating", dict(b=ones(5, HV)), "`b` has shape (5, 2)", "expected (6, 2), the shape of `a`"),
    ("gdn_gating", dict(dt_bias=ones(3)), "`dt_bias` has shape (3,)", "expected (num_v_heads=2)"),
    ("gdn_gating", dict(A_log=ones(2, 2)), "`A_log` has shape (2, 2)", "expected (num_v_heads)"),
    ("gdn_gating", dict(a=ones()), "`a` has shape ()", "expected (..., num_v_heads=2)"),
    ("gated_rms_norm", dict(z=ones(T, HV, 4)), "`z` has shape (6, 2, 4)", "expected (6, 2, 3), the shape of `o`"),
    ("gated_rms_norm", dict(weight=ones(4)), "`weight` has shape (4,)", "expected (head_v_dim=3)"),
    ("gated_rms_norm", dict(o=ones(), z=ones()), "`o` has shape ()", "expected (..., head_v_dim)"),
    (
        "causal_conv1d",
        dict(weight=ones(13, W)),
        "`weight` has shape (13, 4)",
        "expected (conv_dim=14, conv_kernel_dim)",
    ),
    ("causal_conv1d", dict(weight=ones(D, 1)), "conv_kernel_dim=1", "expected at least 2"),
    ("causal_conv1d", dict(bias=ones(3)), "`bias` has shape (3,)", "expected (conv_dim=14)"),
    ("causal_conv1d", dict(conv_state=ones(5, 13, 5)), "`conv_state` has shape (5, 13, 5)", "conv_dim=14"),
    ("causal_conv1d", dict(conv_state=ones(5, D, 2)), "conv_state_len=2", "expected at least conv_kernel_dim - 1 = 3"),
    ("causal_conv1d", dict(state_indices=SLOTS[:2]), "`state_indices` has shape (2,)", "expected (num_sequences=3)"),
    ("causal_conv1d", dict(query_start_loc=STARTS[None]), "`query_start_loc` has shape (1, 4)", "(num_sequences + 1,)"),
    ("causal_conv1d", dict(query_start_loc=STARTS[:0]), "`query_start_loc` has shape (0,)", "(num_sequences + 1,)"),
    ("causal_conv1d", dict(x=ones(2, 3, D)), "`x` has shape (2, 3, 14)", "expected (num_tokens, conv_dim)"),
    ("causal_conv1d", dict(query_start_loc=None), "`x` has shape (6, 14)", "(num_sequences, num_tokens, conv_dim)"),
    ("causal_conv1d", dict(activation="relu"), "`activation` is 'relu'", "expected one of ('silu', 'swish', None)"),
    ("causal_conv1d_update", dict(activation="gelu"), "`activation` is 'gelu'", "expected one of"),
    ("causal_conv1d_update", dict(x=ones(T, D, 1)), "`x` has shape (6, 14, 1)", "expected (num_tokens, conv_dim)"),
    ("causal_conv1d_update", dict(conv_state=ones(5, D, 2)), "conv_state_len=2", "at least conv_kernel_dim - 1 = 3"),
    ("chunk_gated_delta_rule", dict(k=ones(T, H, 5)), "`k` has shape (6, 1, 5)", "head_k_dim=4"),
    ("chunk_gated_delta_rule", dict(v=ones(5, HV, V)), "`v` has shape (5, 2, 3)", "num_tokens=6"),
    ("chunk_gated_delta_rule", dict(g=ones(T, 1)), "`g` has shape (6, 1)", "expected (num_tokens=6, num_v_heads=2)"),
    ("chunk_gated_delta_rule", dict(beta=ones(T)), "`beta` has shape (6,)", "expected (num_tokens=6, num_v_heads=2)"),
    (
        "chunk_gated_delta_rule",
        dict(query_start_loc=None),
        "`q` has shape (6, 1, 4)",
        "(num_sequences, num_tokens, num",
    ),
    (
        "chunk_gated_delta_rule",
        rule(2, 3),
        "`q` has shape (2, 3, 1, 4)",
        "expected (num_tokens, num_k_heads, head_k_dim)",
    ),
    ("chunk_gated_delta_rule", dict(ssm_state=ones(5, HV, V, K)), "`ssm_state` has shape (5, 2, 3, 4)", "head_k_dim=4"),
    (
        "recurrent_gated_delta_rule",
        dict(ssm_state=ones(5, 3, K, V)),
        "`ssm_state` has shape (5, 3, 4, 3)",
        "expected (num_slots, num_v_heads=2, head_k_dim=4, head_v_dim=3)",
    ),
    ("recurrent_gated_delta_rule", dict(state_indices=SLOTS[:2]), "`state_indices` has shape (2,)", "num_sequences=3"),
    (
        "recurrent_gated_delta_rule",
        dict(q=ones(N, 1, H, K)),
        "`q` has shape (3, 1, 1, 4)",
        "(num_sequences, num_k_heads",
    ),
    ("mtp_gated_delta_rule", dict(read_indices=ROWS[:2]), "`read_indices` has shape (2, 3)", "num_sequences=3"),
    ("mtp_gated_delta_rule", dict(write_indices=ROWS[:, :2]), "`write_indices` has shape (3, 2)", "mtp_step + 1=3"),
    ("mtp_gated_delta_rule", dict(read_indices=ROWS[:, :0]), "mtp_step + 1 = 0", "expected at least 1"),
    (
        "mtp_gated_delta_rule",
        dict(num_accepted_tokens=COUNTS[:1]),
        "`num_accepted_tokens` has shape (1,)",
        "sequences=3",
    ),
    ("gdn_prefill", dict(mixed_qkvzba=ones(T, 23)), "`mixed_qkvzba` has shape (6, 23)", "(num_tokens, channels=24)"),
    ("gdn_prefill", dict(norm_weight=ones(K)), "`norm_weight` has shape (4,)", "expected (head_v_dim=3)"),
    ("gdn_mtp_decode", dict(query_start_loc=STARTS[:3]), "`query_start_loc` has shape (3,)", "num_sequences + 1=4"),
    (
        "gdn_mtp_decode",
        dict(query_start_loc=None),
        "num_tokens=6",
        "expected 9, mtp_step + 1 = 3 for each of 3 sequences",
    ),
    ("split_qkvzba", dict(mixed_qkvzba=ones(T, 25)), "`mixed_qkvzba` has shape (6, 25)", "channels=24"),
    ("split_qkv", dict(mixed_qkv=ones(T, 13)), "`mixed_qkv` has shape (6, 13)", "conv_dim=14"),
    ("init_state", dict(num_slots=-1), "`num_slots` is -1", "expected at least 0"),
    ("init_state", dict(num_layers=-2), "`num_layers` is -2", "expected at least 0"),
    ("copy_slots", dict(dst=SLOTS[:2]), "`dst` has shape (2,)", "expected (num_pairs=3)"),
    ("reset_slots", dict(slots=SLOTS[None]), "`slots` has shape (1, 3)", "expected ("),
    ("pack_hf_projections", dict(in_proj_qkvz=ones(19, 7)), "`in_proj_qkvz` has shape (19, 7)", "=20"),
    ("pack_hf_projections", dict(in_proj_ba=ones(4, 6)), "`in_proj_ba` has shape (4, 6)", "hidden=7"),
    ("pack_hf_projections", dict(rank=1), "`rank` is 1", "expected less than tp_size=1"),
    ("pack_hf_projections", dict(rank=-1), "`rank` is -1", "expected at least 0"),
    ("pack_hf_projections_split", dict(qkv=ones(13, 7)), "`qkv` has shape (13, 7)", "=14"),
    ("pack_hf_projections_split", dict(z=ones(6, 8)), "`z` has shape (6, 8)", "hidden=7"),
    ("pack_hf_projections_split", dict(b=ones(3, 7)), "`b` has shape (3, 7)", "num_v_heads=2"),
    ("pack_hf_projections_split", dict(a=ones(3, 7)), "`a` has shape (3, 7)", "num_v_heads=2"),
    ("pack_hf_projections_split", dict(rank=2), "`rank` is 2", "expected less than tp_size=1"),
    ("gdn_weights_from_hf", dict(conv1d_weight=ones(D, W)), "`conv1d_weight` has shape (14, 4)", "expected ("),
    ("gdn_weights_from_hf", dict(conv1d_weight=ones(D, 2, W)), "`conv1d_weight` has shape (14, 2, 4)", "=1"),
    ("gdn_weights_from_hf", dict(conv1d_weight=ones(D, 1, 3)), "`conv1d_weight` has shape (14, 1, 3)", "=4"),
    ("gdn_weights_from_hf", dict(conv1d_bias=ones(13)), "`conv1d_bias` has shape (13,)", "=14"),
    ("gdn_weights_from_hf", dict(A_log=ones(3)), "`A_log` has shape (3,)", "num_v_heads=2"),
    ("gdn_weights_from_hf", dict(rank=1), "`rank` is 1", "expected less than tp_size=1"),
]


@pytest.mark.parametrize(("function", "changes", "came", "expected"), MISFITS)
def test_shapes(function: str, changes: dict[str, Any], came: str, expected: str) -> None:
    refused(ValueError, [came, expected], function, **changes)


def test_the_message_of_the_specification() -> None:
    one = ones(N, 2, 128)
    with pytest.raises(ValueError) as caught:
        gdn_jax.recurrent_gated_delta_rule(
            one, one, one, ones(N, 2), ones(N, 2), ssm_state=ones(4, 3, 128, 128), state_indices=SLOTS
        )
    assert str(caught.value) == (
        "recurrent_gated_delta_rule: `ssm_state` has shape (4, 3, 128, 128), "
        "expected (num_slots, num_v_heads=2, head_k_dim=128, head_v_dim=128)."
    )


@pytest.mark.parametrize("function", ["gdn_prefill", "gdn_decode", "gdn_mtp_decode"])
def test_weights_and_state_of_the_layer(function: str) -> None:
    weights, state = CALLS[function]["weights"], CALLS[function]["state"]
    for field in weights._fields:
        bad = weights._replace(**{field: ones(*getattr(weights, field).shape, 1)})
        refused(ValueError, [f"`weights.{field}` has shape", "expected ("], function, weights=bad)
    refused(TypeError, ["`weights` is of type tuple", "GDNWeights"], function, weights=tuple(weights))
    refused(TypeError, ["`state` is of type tuple", "GDNState"], function, state=tuple(state))
    refused(TypeError, ["`config` is of type dict", "GDNConfig"], function, config={})
    refused(TypeError, ["`norm_eps` is '1'", "number"], function, norm_eps="1")
    columns = state.conv.shape[2]
    bad = state._replace(conv=ones(5, D, columns + 1))
    words = [f"`state.conv` has shape (5, 14, {columns + 1})", f"conv_state_len={columns}"]
    refused(ValueError, words, function, state=bad)
    bad = state._replace(conv=ones(5, D - 1, columns))
    refused(ValueError, [f"`state.conv` has shape (5, 13, {columns})", "conv_dim=14"], function, state=bad)
    bad = state._replace(ssm=ones(state.ssm.shape[0], HV, V, K))
    refused(ValueError, [f"`state.ssm` has shape {bad.ssm.shape}", "head_k_dim=4", "head_v_dim=3"], function, state=bad)


@pytest.mark.parametrize("function", ["gdn_prefill", "gdn_decode", "gdn_mtp_decode", "reset_slots", "copy_slots"])
def test_pools_that_do_not_fit_each_other(function: str) -> None:
    state, config = CALLS[function]["state"], CALLS[function]["config"]
    each = config.mtp_step + 1
    for rows in (5 * each + 1, 5 * each - 1, 5 if each > 1 else 10):
        bad = state._replace(ssm=ones(rows, HV, K, V))
        refused(
            ValueError,
            [f"`state.ssm` has shape ({rows}, 2, 4, 3)", f"num_slots * {each}={5 * each}"],
            function,
            state=bad,
        )
    if function == "gdn_prefill":
        stacked = GDNState(state.conv[None].repeat(2, 0), state.ssm[None].repeat(3, 0))
        words = ["`state.ssm` has shape (3, 15, 2, 4, 3)", "num_layers=2"]
        refused(ValueError, words, function, state=stacked, layer=0)


# ---- combinations ---------------------------------------------------------------------------------------------------


def test_without_a_conv_state() -> None:
    base = {name: None for name in ("conv_state", "state_indices", "has_initial_state", "initial_state_indices")}
    base["num_accepted_tokens"] = None
    call("causal_conv1d", **base)
    for name in ("state_indices", "has_initial_state", "initial_state_indices", "num_accepted_tokens"):
        changes = {**base, name: CALLS["causal_conv1d"][name]}
        words = [f"`{name}` is given", "expected None without `conv_state`"]
        refused(ValueError, words, "causal_conv1d", **changes)
    refused(ValueError, ["`layer` is given", "None without `conv_state`"], "causal_conv1d", **base, layer=0)


def test_without_an_ssm_state() -> None:
    base = {name: None for name in ("ssm_state", "state_indices", "has_initial_state", "initial_state_indices")}
    call("chunk_gated_delta_rule", **base)
    for name in ("state_indices", "has_initial_state", "initial_state_indices"):
        changes = {**base, name: CALLS["chunk_gated_delta_rule"][name]}
        words = [f"`{name}` is given", "expected None without `ssm_state`"]
        refused(ValueError, words, "chunk_gated_delta_rule", **changes)
    refused(ValueError, ["`layer` is given", "None without `ssm_state`"], "chunk_gated_delta_rule", **base, layer=0)


def test_states_that_must_be_given() -> None:
    refused(TypeError, ["`conv_state` is of type NoneType", "array"], "causal_conv1d_update", conv_state=None)
    refused(TypeError, ["`ssm_state` is of type NoneType", "array"], "recurrent_gated_delta_rule", ssm_state=None)
    refused(TypeError, ["`ssm_state` is of type NoneType", "array"], "mtp_gated_delta_rule", ssm_state=None)
    for name in ("read_indices", "write_indices", "num_accepted_tokens", "query_start_loc"):
        refused(TypeError, [f"`{name}` is of type NoneType", "array"], "mtp_gated_delta_rule", **{name: None})
    refused(TypeError, ["`query_start_loc` is of type NoneType"], "gdn_prefill", query_start_loc=None)
    refused(TypeError, ["`num_accepted_tokens` is of type NoneType"], "gdn_mtp_decode", num_accepted_tokens=None)


def test_accepted_counts_where_there_can_be_none() -> None:
    words = ["`num_accepted_tokens` is given", "expected None without `query_start_loc`"]
    changes = dict(x=ones(N, D), query_start_loc=None)
    refused(ValueError, words, "causal_conv1d_update", **changes)
    words = ["`num_accepted_tokens` is given", "expected None with mtp_step=0"]
    refused(ValueError, words, "gdn_prefill", **layer(PLAIN, T))


def test_decode_of_a_speculative_model_names_the_other_function() -> None:
    refused(ValueError, ["`config` has mtp_step=2", "expected 0", "gdn_mtp_decode"], "gdn_decode", **layer(MTP, N))


@pytest.mark.parametrize("function", [f for f in STATEFUL if f != "mtp_gated_delta_rule"])  # its slots must be given
def test_more_sequences_than_rows_without_slots(function: str) -> None:
    changes: dict[str, Any] = dict(state_indices=None)
    given = CALLS[function]
    if "state" in given:
        each = given["config"].mtp_step + 1
        changes["state"] = GDNState(given["state"].conv[:2], given["state"].ssm[: 2 * each])
    else:
        name = "conv_state" if "conv_state" in given else "ssm_state"
        changes[name] = given[name][:2]
    refused(
        ValueError, ["`state_indices` is None with 3 sequences", "expected at most num_slots=2"], function, **changes
    )


# ---- layers ---------------------------------------------------------------------------------------------------------


def stacked(function: str, layers: int = 2) -> dict[str, Any]:
    given = CALLS[function]
    name = next(name for name in ("state", "conv_state", "ssm_state") if name in given)
    return {name: jax.tree.map(lambda x: x[None].repeat(layers, 0), given[name])}


@pytest.mark.parametrize("function", STATEFUL)
def test_layer(function: str) -> None:
    for bad in (2, -1, 7, np.int64(2), np.int32(-1), np.array(5), 2**40):
        words = [f"`layer` is {bad}", "0 <= layer < num_layers=2"]
        refused(ValueError, words, function, **stacked(function), layer=bad)
    for bad in (True, 1.0, "0", np.float32(0), np.bool_(False), [0]):
        words = [f"`layer` is {bad!r} of type {type(bad).__name__}", "expected an int or an int32 scalar"]
        refused(TypeError, words, function, **stacked(function), layer=bad)
    refused(TypeError, ["`layer` has dtype float32"], function, **stacked(function), layer=jnp.float32(0))
    refused(
        ValueError, ["`layer` has shape (1,)", "expected ()"], function, **stacked(function), layer=jnp.zeros(1, INT)
    )
    # A stacked state without `layer`, and the reverse.
    message = refused(ValueError, ["has shape (2, "], function, **stacked(function))
    assert "expected (num_slots" in message
    message = refused(ValueError, ["expected (num_layers, num_slots"], function, layer=0)
    assert "has shape (" in message


# ---- nothing happens when refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", STATEFUL)
def test_nothing_is_written_when_refused(function: str) -> None:
    """The numpy arrays of the caller stay as they are, and JAX's stay alive."""
    given = CALLS[function]
    before = jax.tree.map(np.copy, {n: x for n, x in given.items() if n != "config"})
    name = "query_start_loc" if "query_start_loc" in given else "state_indices"
    refused(TypeError, [f"`{name}` has dtype float32"], function, **{name: given[name].astype(F32)})
    on_device = {n: jax.tree.map(jnp.asarray, x) for n, x in given.items() if n not in ("config", "scale", name)}
    refused(TypeError, [f"`{name}` has dtype float32"], function, **on_device, **{name: jnp.ones(3, F32)})
    after = {n: x for n, x in given.items() if n != "config"}
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)
    for x in jax.tree.leaves(on_device):
        assert not x.is_deleted()


@pytest.mark.parametrize("function", STATEFUL)
def test_numpy_arguments_are_not_changed_by_a_call(function: str) -> None:
    given = CALLS[function]
    before = jax.tree.map(np.copy, {n: x for n, x in given.items() if n != "config"})
    jax.block_until_ready(call(function))
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves({n: given[n] for n in before}), strict=True):
        np.testing.assert_array_equal(x, y)


# ---- check_batch ----------------------------------------------------------------------------------------------------

BATCH: dict[str, Any] = dict(
    num_slots=5, num_tokens=6, state_indices=SLOTS, query_start_loc=np.array([0, 2, 3, 6], INT), mtp_step=2
)


def batch_error(**changes: Any) -> str:
    """The message, the same for numpy and for JAX arrays."""
    arguments = {**BATCH, **changes}
    with pytest.raises(ValueError) as caught:
        check_batch(**arguments)
    with pytest.raises(ValueError) as on_device:
        check_batch(**{n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()})
    assert str(caught.value) == str(on_device.value)
    assert str(caught.value).startswith("check_batch: ")
    return str(caught.value)


def batch_fine(**changes: Any) -> None:
    arguments = {**BATCH, **changes}
    assert check_batch(**arguments) is None
    assert check_batch(**{n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}) is None


def ints(*values: int) -> np.ndarray:
    return np.array(values, INT)


def test_check_batch_fine() -> None:
    batch_fine()
    batch_fine(verify=True, num_accepted_tokens=ints(1, 2, 3))
    batch_fine(query_start_loc=None, num_tokens=3)
    batch_fine(query_start_loc=None, num_tokens=9, verify=True)
    batch_fine(query_start_loc=ints(0, 2, 3, 5), num_tokens=6)  # trailing padding
    batch_fine(state_indices=ints(), query_start_loc=ints(0), num_tokens=0)
    batch_fine(initial_state_indices=ints(1, 1, 3), has_initial_state=HAS)  # two may start from one prefix


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        (ints(0, 2, 1, 6), ["`query_start_loc[2]` is 1", "at least 2"]),
        (ints(1, 2, 3, 6), ["`query_start_loc[0]` is 1", "0"]),
        (ints(-1, 2, 3, 6), ["`query_start_loc[0]` is -1"]),
        (ints(0, 2, 3, 7), ["`query_start_loc[3]` is 7", "num_tokens=6"]),
        (ints(0, 9, 3, 6), ["`query_start_loc[1]` is 9", "num_tokens=6"]),
        (ints(0, -2, 3, 6), ["`query_start_loc[1]` is -2", "at least 0"]),
    ],
)
def test_check_batch_starts(starts: np.ndarray, words: list[str]) -> None:
    message = batch_error(query_start_loc=starts)
    assert all(word in message for word in words), message
    message = batch_error(query_start_loc=starts, state_indices=ints(-1, -1, -1))  # padding too has starts
    assert all(word in message for word in words), message


def test_check_batch_slots() -> None:
    message = batch_error(state_indices=ints(4, 0, 4))
    assert "`state_indices[2]` is 4" in message, message
    assert "sequence 0" in message, message
    message = batch_error(state_indices=ints(4, 5, 9))
    assert "`state_indices[1]` is 5" in message, message
    assert "num_slots=5" in message, message
    assert "`state_indices[2]` is 2147483647" in batch_error(state_indices=ints(0, 1, 2**31 - 1))
    with pytest.raises(ValueError, match=r"`state_indices\[1\]` is 4294967297, "):  # not narrowed to 1
        check_batch(**{**BATCH, "state_indices": np.array([4, 2**32 + 1, 2])})


def test_check_batch_initial_slots() -> None:
    message = batch_error(initial_state_indices=ints(4, 2, 2))
    assert "`initial_state_indices[1]` is 2" in message, message
    assert "sequence 2" in message, message
    assert "`initial_state_indices[2]` is 4" in batch_error(initial_state_indices=ints(1, 3, 4))
    batch_fine(initial_state_indices=ints(1, 2, 2), has_initial_state=HAS)  # sequence 1 does not look
    batch_fine(initial_state_indices=ints(-1, 99, 5))  # outside the pool: no initial state
    batch_fine(initial_state_indices=ints(1, 4, 3), state_indices=ints(-4, 0, 2))  # padding writes nothing
    batch_fine(initial_state_indices=ints(1, 4, 3), query_start_loc=ints(0, 0, 3, 6))  # nor does an empty one


def test_check_batch_counts() -> None:
    assert "`num_accepted_tokens[1]` is 0" in batch_error(num_accepted_tokens=ints(3, 0, 9))
    message = batch_error(num_accepted_tokens=ints(1, 2, 4))
    assert "`num_accepted_tokens[2]` is 4" in message, message
    assert "3" in message.split("expected")[1], message
    assert "`num_accepted_tokens[0]` is -1" in batch_error(num_accepted_tokens=ints(-1, 1, 1))
    assert "`num_accepted_tokens[0]` is 2" in batch_error(num_accepted_tokens=ints(2, 1, 1), mtp_step=0)
    batch_fine(num_accepted_tokens=ints(1, 77, 1), has_initial_state=HAS)  # not looked at there


def test_check_batch_lengths_of_a_verify_step() -> None:
    message = batch_error(verify=True, query_start_loc=ints(0, 1, 5, 6))
    assert "`query_start_loc[2]` is 5" in message, message
    assert "sequence 1 has 4 tokens" in message and "mtp_step + 1 = 3" in message, message
    batch_fine(query_start_loc=ints(0, 1, 5, 6))  # no verify step
    message = batch_error(verify=True, query_start_loc=None)
    assert "`num_tokens` is 6, expected 9" in message, message
    batch_fine(query_start_loc=None)  # three sequences of two tokens each


def test_check_batch_asks_nothing_of_padding_and_empty_sequences() -> None:
    bad: dict[str, Any] = dict(num_accepted_tokens=ints(1, 0, 1), initial_state_indices=ints(1, 4, 3), verify=True)
    batch_fine(**bad, state_indices=ints(4, -1, 2), query_start_loc=ints(0, 1, 5, 6))  # a long one of padding
    batch_fine(**bad, state_indices=ints(4, -7, 2), query_start_loc=ints(0, 3, 3, 6))
    for slot in (4, 2, 5, 2**31 - 1):
        batch_fine(**bad, state_indices=ints(4, slot, 2), query_start_loc=ints(0, 3, 3, 6))  # empty: not even its slot
    batch_fine(state_indices=ints(-1, -1, 2))


def test_check_batch_types_and_shapes() -> None:
    for name in ("state_indices", "query_start_loc"):
        for dtype in (np.float32, np.bool_):
            with pytest.raises(TypeError, match=f"^check_batch: `{name}` has dtype {np.dtype(dtype)}, "):
                check_batch(**{**BATCH, name: BATCH[name].astype(dtype)})
    with pytest.raises(TypeError, match=r"^check_batch: `num_accepted_tokens` has dtype float32"):
        check_batch(**BATCH, num_accepted_tokens=ones(3))
    with pytest.raises(TypeError, match=r"^check_batch: `has_initial_state` has dtype int32, expected bool"):
        check_batch(**BATCH, has_initial_state=SLOTS)
    with pytest.raises(ValueError, match=r"^check_batch: `query_start_loc` has shape \(3,\)"):
        check_batch(**{**BATCH, "query_start_loc": ints(0, 1, 2)})
    with pytest.raises(ValueError, match=r"^check_batch: `initial_state_indices` has shape \(2,\)"):
        check_batch(**BATCH, initial_state_indices=ints(0, 1))
    with pytest.raises(TypeError, match=r"^check_batch: `num_slots` is 5\.0"):
        check_batch(**{**BATCH, "num_slots": 5.0})
    with pytest.raises(ValueError, match=r"^check_batch: `mtp_step` is -1"):
        check_batch(**{**BATCH, "mtp_step": -1})


# ---- checkify -------------------------------------------------------------------------------------------------------

Checked = Callable[[dict[str, Any]], str | None]


def checked(function: str, **static: Any) -> Checked:
    """The operator under jit and checkify; returns what it reports of a batch. One compilation for all batches."""
    arrays = {name: x for name, x in CALLS[function].items() if name not in ("config", "scale")}
    config = {"config": CALLS[function]["config"]} if "config" in CALLS[function] else {}
    op = checkify.checkify(
        jax.jit(lambda arrays: getattr(gdn_jax, function)(**arrays, **config)), errors=checkify.user_checks
    )
    run = jax.jit(op)

    def report(changes: dict[str, Any]) -> str | None:
        error, _ = run({**arrays, **static, **changes})
        return error.get()

    return report


PACKED_ERRORS: dict[str, dict[str, Any]] = {
    "query_start_loc": dict(query_start_loc=ints(0, 3, 2, 5)),
    "state_indices": dict(state_indices=ints(4, 0, 4)),
    "slot": dict(state_indices=ints(4, 1, 5)),
}


@pytest.mark.parametrize(
    ("function", "bad"),
    [
        ("causal_conv1d", dict(num_accepted_tokens=ints(1, 1, 4))),
        ("causal_conv1d_update", dict(num_accepted_tokens=ints(0, 1, 1))),
        ("chunk_gated_delta_rule", None),
        ("gdn_prefill", dict(num_accepted_tokens=ints(1, 1, 4))),
        ("gdn_mtp_decode", dict(num_accepted_tokens=ints(9, 1, 1))),
    ],
)
def test_checkify_packed(function: str, bad: dict[str, Any] | None) -> None:
    report = checked(function)
    assert report({}) is None, "a clean batch"
    assert report(dict(state_indices=ints(-1, -1, 2))) is None, "padding may repeat"
    # The empty sequence 1 is asked for nothing but its start.
    assert report(dict(state_indices=ints(4, 4, 2))) is None
    assert report(dict(state_indices=ints(4, 77, 2))) is None
    if bad is not None:
        assert report(dict(num_accepted_tokens=ints(1, 0, 1))) is None
    for name, changes in {**PACKED_ERRORS, **({"num_accepted_tokens": bad} if bad else {})}.items():
        message = report(changes)
        assert message is not None, (name, changes)
        assert f"`{next(iter(changes))}` is" in message, message
        assert "expected" in message, message
        if not function.startswith("gdn"):
            assert function in message, message
    if function in ("causal_conv1d", "chunk_gated_delta_rule", "gdn_prefill"):
        message = report(dict(initial_state_indices=ints(2, 0, 2)))
        assert message is not None
        assert "`initial_state_indices` is" in message, message
        assert report(dict(initial_state_indices=ints(1, 0, -9))) is None
    if function in ("causal_conv1d_update", "gdn_mtp_decode"):
        message = report(dict(query_start_loc=ints(0, 4, 4, 5)))
        assert message is not None
        assert "at most 3 tokens" in message, message


def test_checkify_one_token_each() -> None:
    report = checked("recurrent_gated_delta_rule")
    assert report({}) is None
    assert report(dict(state_indices=ints(-1, 3, -1))) is None
    for changes in (dict(state_indices=ints(3, 0, 3)), dict(state_indices=ints(3, 5, 0))):
        message = report(changes)
        assert message is not None, changes
        assert "recurrent_gated_delta_rule: `state_indices` is" in message, message


def test_checkify_decode() -> None:
    report = checked("gdn_decode")
    assert report({}) is None
    for changes in (dict(state_indices=ints(3, 0, 3)), dict(state_indices=ints(3, 5, 0))):
        message = report(changes)
        assert message is not None, changes
        assert "`state_indices` is" in message, message


def test_checkify_mtp_rule() -> None:
    report = checked("mtp_gated_delta_rule")
    assert report({}) is None
    skips = ROWS.copy()
    skips[0, 1], skips[2, 0] = -1, 77
    assert report(dict(write_indices=skips)) is None, "an index outside skips a write, twice or not"
    beyond, twice = ROWS.copy(), ROWS.copy()
    beyond[2, 1], twice[2, 1] = 9, 0
    unused = ROWS.copy()
    unused[0, 2] = 6  # sequence 0 has two tokens: its third column is not written
    assert report(dict(write_indices=unused)) is None
    again, padding, foreign = ROWS.copy(), ROWS.copy(), ROWS.copy()
    again[0, 1] = 0
    assert report(dict(write_indices=again)) is None, "one sequence may write a slot after both of its tokens"
    padding[2] = -1
    assert report(dict(write_indices=twice, read_indices=padding)) is None, "padding writes nothing"
    foreign[0, CALLS["mtp_gated_delta_rule"]["num_accepted_tokens"][0] - 1] = 6  # which sequence 2 writes
    for name, changes in {
        "`read_indices` is": dict(read_indices=foreign),
        "query_start_loc": dict(query_start_loc=ints(0, 3, 2, 5)),
        "at most 3 tokens": dict(query_start_loc=ints(0, 4, 4, 6)),
        "num_accepted_tokens": dict(num_accepted_tokens=ints(1, 1, 4)),
        "num_slots=9": dict(read_indices=beyond),
        "write_indices": dict(write_indices=twice),
    }.items():
        message = report(changes)
        assert message is not None, (name, changes)
        assert name in message, message
        assert "mtp_gated_delta_rule" in message, message


def test_without_checkify_a_bad_batch_raises_nothing() -> None:
    """The checks cost nothing and say nothing unless asked: the other sequence is right."""
    o, _ = call("recurrent_gated_delta_rule")
    bad, _ = call("recurrent_gated_delta_rule", state_indices=ints(4, 7, 7))
    np.testing.assert_array_equal(np.asarray(bad[0]), np.asarray(o[0]))
    assert not np.asarray(bad[1:]).any()
