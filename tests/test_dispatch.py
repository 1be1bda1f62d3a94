"""Which implementation runs, what explain() says of it, and what is refused."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import gdn_jax
from gdn_jax import GDNConfig, GDNWeights, dispatch

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
CONFIG = GDNConfig(2, 1, 4, 3, 4, ssm_dtype="float32", conv_dtype="float32")
MTP = GDNConfig(2, 1, 4, 3, 4, mtp_step=1, ssm_dtype="float32", conv_dtype="float32")
INT = np.int32


def calls() -> dict[str, dict[str, Any]]:
    """One call of every operator: two sequences of one token (the verify forms have starts)."""

    def f(*shape: int) -> jax.Array:
        return jnp.ones(shape, jnp.float32)

    slots, starts = np.array([1, 0], INT), np.array([0, 1, 2], INT)
    rule = dict(q=f(2, 1, 4), k=f(2, 1, 4), v=f(2, 2, 3), g=-f(2, 2), beta=f(2, 2))
    weights = GDNWeights(f(14, 4), None, f(2), f(2))
    layer = dict(weights=weights, mixed_qkvzba=f(2, 24), state_indices=slots)
    plain, mtp = gdn_jax.init_state(CONFIG, 3), gdn_jax.init_state(MTP, 3)
    conv = dict(x=f(2, 14), weight=f(14, 4), conv_state=f(3, 14, 3), state_indices=slots)
    rows = np.array([[0, 1], [2, 3]], INT)
    accepted = np.array([1, 1], INT)
    return {
        "gdn_gating": dict(A_log=f(2), a=f(2, 2), b=f(2, 2), dt_bias=f(2)),
        "causal_conv1d": dict(**conv, query_start_loc=starts),
        "causal_conv1d_update": conv,
        "chunk_gated_delta_rule": dict(**rule, ssm_state=f(3, 2, 4, 3), state_indices=slots, query_start_loc=starts),
        "recurrent_gated_delta_rule": dict(**rule, ssm_state=f(3, 2, 4, 3), state_indices=slots),
        "mtp_gated_delta_rule": dict(
            **rule,
            ssm_state=f(4, 2, 4, 3),
            read_indices=rows,
            write_indices=rows,
            num_accepted_tokens=accepted,
            query_start_loc=starts,
        ),
        "gated_rms_norm": dict(o=f(2, 3), z=f(2, 3), weight=f(3)),
        "gdn_prefill": dict(**layer, state=plain, config=CONFIG, query_start_loc=starts),
        "gdn_decode": dict(**layer, state=plain, config=CONFIG),
        "gdn_mtp_decode": dict(**layer, state=mtp, config=MTP, query_start_loc=starts, num_accepted_tokens=accepted),
    }


CALLS = calls()
OPERATORS = sorted(CALLS)


@pytest.fixture
def h200() -> Iterator[None]:
    mesh = AbstractMesh((1,), ("x",), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def on_cpu() -> bool:
    return jax.devices()[0].platform == "cpu"


needs_cpu = pytest.mark.skipif("jax.devices()[0].platform != 'cpu'", reason="the default device is a GPU")


def test_every_operator_is_listed() -> None:
    assert sorted(dispatch.OPERATORS) == OPERATORS


@pytest.mark.parametrize("operator", OPERATORS)
def test_explain_by_function_and_by_name(operator: str) -> None:
    by_name, by_function = (
        gdn_jax.explain(operator, **CALLS[operator]),
        gdn_jax.explain(getattr(gdn_jax, operator), **CALLS[operator]),
    )
    assert by_name == by_function
    assert by_name.implementation in dispatch.IMPLEMENTATIONS
    others = set(dispatch.IMPLEMENTATIONS) - {by_name.implementation}
    assert set(by_name.passed_over) == others
    assert all(isinstance(why, str) and why for why in by_name.passed_over.values())


@needs_cpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_on_a_cpu_xla_runs_and_says_why(operator: str) -> None:
    explanation = gdn_jax.explain(operator, **CALLS[operator])
    assert explanation.implementation == "xla"
    assert "NVIDIA GPU" in explanation.passed_over["mosaic"]
    text = str(explanation)
    assert text.startswith("xla runs; mosaic is passed over: "), text
    assert text.endswith("."), text
    assert text.count("\n") == 0
    assert f"{explanation}" == text


@pytest.mark.parametrize("bad", ["gdn_everything", "", "xla", print, gdn_jax.split_qkv])
def test_explain_of_something_else(bad: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^explain: `op` is .*, expected one of gdn_gating, .*gdn_mtp_decode\.$"
    ) as caught:
        gdn_jax.explain(bad)
    assert repr(bad if isinstance(bad, str) else bad.__name__) in str(caught.value)


@needs_cpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_mosaic_on_a_cpu(operator: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{operator}: `implementation` is 'mosaic', which cannot run here: "
    ) as caught:
        getattr(gdn_jax, operator)(**CALLS[operator], implementation="mosaic")
    assert "NVIDIA GPU" in str(caught.value)
    assert gdn_jax.explain(operator, **CALLS[operator]).passed_over["mosaic"] in str(caught.value), "the same reason"


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", ["triton", "XLA", "", 1, True])
def test_unknown_implementation(operator: str, name: Any) -> None:
    with pytest.raises(ValueError, match=f"^{operator}: `implementation` is {name!r}, expected None, 'xla', 'mosaic'"):
        getattr(gdn_jax, operator)(**CALLS[operator], implementation=name)


@pytest.mark.parametrize("operator", OPERATORS)
def test_xla_by_name_is_the_choice_on_a_cpu(operator: str) -> None:
    op = getattr(gdn_jax, operator)
    named, chosen = op(**CALLS[operator], implementation="xla"), op(**CALLS[operator])
    if on_cpu():
        for x, y in zip(jax.tree.leaves(named), jax.tree.leaves(chosen), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert jax.tree.structure(named) == jax.tree.structure(chosen)


@needs_cpu
def test_chip_of_the_default_device() -> None:
    assert dispatch.chip() is None
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.chip() is None


@needs_cpu
def test_chip_of_an_abstract_mesh(h200: None) -> None:
    assert dispatch.chip() == "NVIDIA H200"


@needs_cpu
def test_the_chip_is_forgotten_with_the_mesh() -> None:
    mesh = AbstractMesh((1,), ("x",), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        assert dispatch.chip() == "NVIDIA H200"
    assert dispatch.chip() is None
    other = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5e", 1, platform="tpu"))
    with jax.sharding.use_abstract_mesh(other):
        assert dispatch.chip() is None, "a chip that is not CUDA is none"
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",))):
        assert dispatch.chip() is None, "a mesh that names no device"


@pytest.mark.parametrize("operator", OPERATORS)
def test_explain_under_an_abstract_h200(operator: str, h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = gdn_jax.explain(operator, **CALLS[operator])
    reasons = " ".join(explanation.passed_over.values())
    assert "needs an NVIDIA GPU" not in reasons, "there is one"
    assert str(explanation).startswith(f"{explanation.implementation} runs; "), explanation
    monkeypatch.setattr(dispatch, "_capability", lambda: 8.9)
    assert "needs compute capability 9.0 (Hopper), and this device has 8.9" in str(gdn_jax.explain(operator))
    monkeypatch.setattr(dispatch, "_capability", lambda: 10.0)
    hopper_only = "this device has 10.0" in str(gdn_jax.explain(operator))
    assert hopper_only is (operator in ("chunk_gated_delta_rule", "gdn_prefill"))


# ---- lowering -------------------------------------------------------------------------------------------------------

KERNELS = ("mosaic_gpu", "triton", "custom_call @__gpu", "xla.gpu")


@needs_cpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_cpu_program_holds_no_gpu_kernel(operator: str) -> None:
    given = dict(CALLS[operator])
    config = {"config": given.pop("config")} if "config" in given else {}

    def f(given: dict[str, Any]) -> Any:
        return getattr(gdn_jax, operator)(**given, **config)

    text = jax.jit(f).lower(given).as_text()
    assert "func.func public @main" in text
    assert not [kernel for kernel in KERNELS if kernel in text.lower()]
    several = jax.jit(f).trace(given).lower(lowering_platforms=("cpu",)).as_text()
    assert not [kernel for kernel in KERNELS if kernel in several.lower()]


@pytest.mark.parametrize("name", [None, "xla"])
def test_explain_takes_a_whole_call(name: str | None, h200: None) -> None:
    call = CALLS["recurrent_gated_delta_rule"] | {"implementation": name}
    assert "head dimensions" in str(gdn_jax.explain("recurrent_gated_delta_rule", **call))
    for operator in OPERATORS:
        assert gdn_jax.explain(operator, implementation=name).implementation == "mosaic"
    assert (
        gdn_jax.explain("recurrent_gated_delta_rule", 1.0, operator=2).implementation == "mosaic"
    )  # nothing to look at
