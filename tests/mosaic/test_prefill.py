"""The layer on packed prompts, its kernels in the interpreter against the reference, lowered for an H200, and on a GPU."""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import INT, close, close_rows, same, zero
from jax.experimental import checkify
from kernels import (
    BF16,
    F16,
    F32,
    LAYERS,
    h200,
    interpret,
    layer_call,
    layer_config,
    live_prefill,
    lowered,
    prefill_places,
    twice,
)

import gdn_jax
from gdn_jax import GDNState, GDNWeights, dispatch, gdn_prefill, reference
from gdn_jax import layer as layers
from gdn_jax.mosaic import prefill

pytestmark = pytest.mark.usefixtures("quick_compiles")

LAYER, TAIL = 1, 3
LENGTHS = (5, 0, 3, 9, 1, 66, 2, 3, 3, 6, 1, 2)
DTYPES = {"bf16": (BF16, BF16), "bf16-f32": (BF16, F32), "f16": (F16, F16)}  # of tokens, of states
TOL = {BF16: 6e-3, F16: 6e-3 / 4}  # of outputs and of float32 states
STATE_TOL = {BF16: 3e-3, F16: 4e-4, F32: 0}  # what rounding the state adds
KERNELS = 2  # the conv with the gates, then the chunks; of many states these take two


def make(
    seed: int,
    dtypes: Any = (BF16, BF16),
    lengths: Any = LENGTHS,
    S: int = 0,
    norm: bool = True,
    bias: bool = True,
    **sizes: Any,
) -> dict[str, Any]:
    """A stacked call on `prefill_places`."""
    config, n = layer_config(dtypes, mtp_step=S, **sizes), len(lengths)
    slots = 2 * n + 2
    call = layer_call(seed, config, dtypes[0], n, int(sum(lengths)) + TAIL, slots, bias=bias)
    call |= prefill_places(np.random.default_rng(seed), lengths, slots, S)
    return call if norm else call | {"norm_weight": None}


def live(call: dict[str, Any]) -> Any:
    return live_prefill(call, len(call["mixed_qkvzba"]), call["state"].conv.shape[1], call["config"].mtp_step + 1)


def poisoned(call: dict[str, Any]) -> dict[str, Any]:
    """NaN in every token of padding, and wherever in the pools nothing stands that is read."""
    (valid, found), config = live(call), call["config"]
    conv, ssm, mixed = (np.array(x) for x in (*call["state"], call["mixed_qkvzba"]))
    mixed[~valid] = np.nan
    histories, states = np.ones(conv.shape, bool), np.ones(ssm.shape[:2], bool)
    for _, source, column in found:
        if source is not None:
            histories[LAYER, source, :, column : column + config.conv_kernel_dim - 1] = False
            states[LAYER, source * (config.mtp_step + 1) + column] = False
    conv[histories] = ssm[states] = np.nan
    return call | {"state": GDNState(conv, ssm), "mixed_qkvzba": mixed}


def arrays(call: dict[str, Any]) -> dict[str, Any]:
    """What is no state and no size, on the device."""
    return jax.tree.map(jnp.asarray, {name: x for name, x in call.items() if name not in ("state", "config")})


def step(state: Any, rest: Any, config: Any, layer: Any = LAYER, implementation: Any = "mosaic") -> tuple[Any, Any]:
    """`((o, z), state)`."""
    out = gdn_prefill(**rest, state=state, config=config, layer=layer, implementation=implementation)
    return (out.o, out.z), out.state


def run(call: dict[str, Any], layer: int = LAYER, races: bool | None = False) -> Any:
    """The layer as it runs on a GPU, its kernels in the interpreter."""

    def kernels(implementation: str, name: str, plain: Any, *args: Any, config: Any) -> Any:
        return prefill.prefill(*args, config=config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "run", kernels)
        patch.setattr(layers, "_prefill", inspect.unwrap(layers._prefill))  # not to be found in jit's cache later
        state = jax.tree.map(jnp.asarray, call["state"])
        one_layer = lambda state, rest, at: step(state, rest, call["config"], at)  # noqa: E731
        out = interpret(one_layer, state, arrays(call), jnp.int32(layer), races=races)
    return jax.tree.map(np.asarray, out)


def check(call: dict[str, Any], out: Any, state: GDNState) -> None:
    """Against the reference in float64; padding zero; every row and column that nobody writes bit for bit."""
    (o, z), before, config = out, call["state"], call["config"]
    want = reference.gdn_prefill(**(call | {"state": GDNState(*(x[LAYER].astype(np.float64) for x in before))}))
    (valid, found), mixed = live(call), call["mixed_qkvzba"]
    tol, each, old = TOL[mixed.dtype.type], config.mtp_step + 1, config.conv_kernel_dim - 1
    assert o.dtype == mixed.dtype
    close(o[valid], want.o[valid], tol)
    zero(o[~valid])
    same(z, mixed[:, config.conv_dim : config.qkvz_dim].reshape(z.shape))
    used = [slot for slot, *_ in found]
    histories = want.state.conv.astype(before.conv.dtype)
    close_rows(state.conv[LAYER, ..., :old], histories[..., :old], before.conv[LAYER, ..., :old], used, 0)
    same(state.conv[LAYER, ..., old:], before.conv[LAYER, ..., old:])
    rows = [slot * each for slot in used]
    close_rows(state.ssm[LAYER], want.state.ssm, before.ssm[LAYER], rows, tol + STATE_TOL[before.ssm.dtype.type])
    for after, given in zip(state, before, strict=True):
        same(after[0], given[0])


@pytest.mark.parametrize(("dtypes", "S"), [("bf16", 0), ("bf16-f32", 2), ("f16", 0)])
def test_against_the_reference(dtypes: str, S: int) -> None:
    call = poisoned(make(1, DTYPES[dtypes], S=S))
    check(call, *run(call))


@pytest.mark.parametrize(
    "sizes",
    [dict(H=2, HV=6, norm=False, conv_kernel_dim=8), dict(K=128, HV=3, V=128, conv_kernel_dim=2, activation=None)],
    ids=str,
)
def test_other_sizes_without_bias_and_indices(sizes: Any) -> None:
    call = make(2, (BF16, F32), (3, 0, 66), bias=False, **sizes)
    call |= dict(state_indices=None, has_initial_state=None, initial_state_indices=None)
    check(call | {"state_indices": np.arange(3, dtype=INT)}, *run(call))


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_another_layer_is_padding(layer: int) -> None:
    call = make(3, lengths=(9, 2))
    call["mixed_qkvzba"][:] = np.nan
    (o, _), state = run(call, layer)
    zero(o)
    jax.tree.map(same, state, call["state"])


def test_nothing_but_padding() -> None:
    """With a norm that would be zero over zero there."""
    call = make(4, lengths=(7, 20, 1), S=2)
    call["state_indices"][:2], call["has_initial_state"][2] = (-1, 99), True
    call["num_accepted_tokens"][2] = 4
    call = poisoned(call) | {"norm_eps": 0.0}
    assert not live(call)[1]
    check(call, *run(call))


def test_malformed_starts_stay_inside_the_arrays() -> None:
    call = make(6, lengths=(20, 17, 6), S=1)
    call["query_start_loc"][:] = [0, 2**31 - 1, -5, 10**6]
    run(call, races=None)  # two sequences may own a token


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    call: dict[str, Any] = make(0, lengths=(2, 1)) | {"layer": 0}

    def told(**changes: Any) -> str:
        return str(gdn_jax.explain(gdn_prefill, **(call | changes)))

    def other(dtypes: Any = (BF16, BF16), **sizes: Any) -> str:
        return str(gdn_jax.explain("gdn_prefill", config=layer_config(dtypes, **sizes)))

    with h200():
        assert told().startswith("mosaic runs; xla is passed over") and other().startswith("mosaic runs")
        positional = [call[name] for name in ("weights", "state", "mixed_qkvzba")]
        assert gdn_jax.explain("gdn_prefill", *positional, config=call["config"]).implementation == "mosaic"
        for text, why in (
            (other(K=256), "head dimensions of 64, 128, and head_k_dim is 256"),
            (other(V=96), "head_v_dim is 96"),
            (other(HV=16), "up to 8 value heads a key head, and there are 16"),
            (other(HV=1), "a multiple of 128 channels, and conv_dim is 192"),
            (other(conv_kernel_dim=9), "widths up to 8, and conv_kernel_dim is 9"),
            (
                told(mixed_qkvzba=np.zeros((3, 4), F32)),
                "float32 keeps its own products, and `mixed_qkvzba` has float32",
            ),
            (told(query_start_loc=np.zeros(1, INT)), "`query_start_loc` has no sequence"),
            (told(mixed_qkvzba=call["mixed_qkvzba"][:0]), "`mixed_qkvzba` is empty"),
            (told(state=jax.tree.map(lambda x: x[:, :0], call["state"])), "`state.conv` is empty"),
        ):
            assert text.startswith("xla runs") and why in text, text
        with pytest.raises(ValueError, match=r"gdn_prefill: `implementation` is 'mosaic', which cannot run here: its"):
            gdn_prefill(**make(0, lengths=(2, 1), HV=1), layer=0, implementation="mosaic")
        monkeypatch.setattr(dispatch, "_capability", lambda: 10.0)
        assert "products of compute capability 9 (Hopper), and this device has 10.0" in told()


def small_call() -> tuple[Any, Any, Any]:
    """A step of any implementation, and its arrays."""
    call = make(8, lengths=(5, 0, 3, 9), S=2)

    def one(state: Any, rest: Any, layer: Any = LAYER, implementation: Any = None) -> Any:
        return step(state, rest, call["config"], layer, implementation)

    return one, jax.tree.map(jnp.asarray, call["state"]), arrays(call)


def test_scan_and_checkify_beside_the_kernels() -> None:
    """Kernels for CUDA, none for a CPU; vmap takes the XLA form."""
    one, state, rest = small_call()
    checked = checkify.checkify(one, errors=checkify.all_checks)

    def in_turn(state: Any, rest: Any) -> Any:
        return jax.lax.scan(lambda state, at: checked(state, rest, at)[1][::-1], state, jnp.arange(LAYERS))

    with h200():
        traced = jax.jit(in_turn).trace(state, rest)
        batched = jax.jit(jax.vmap(one)).trace(*jax.tree.map(lambda x: jnp.stack([x, x]), (state, rest)))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == KERNELS
    assert "mosaic" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "mosaic" not in batched.lower(lowering_platforms=("cuda",)).as_text()


def test_the_gradient_beside_the_kernels() -> None:
    """That of the XLA form; and so is the value, on a CPU."""
    one, state, rest = small_call()

    def loss(mixed: Any, state: Any, implementation: Any = None) -> Any:
        (o, _), state = one(state, rest | {"mixed_qkvzba": mixed}, implementation=implementation)
        return sum((jnp.sum(x.astype(jnp.float32) ** 2) for x in (o, *state)), jnp.float32(0))

    mixed, gradient = rest["mixed_qkvzba"], jax.value_and_grad(loss, argnums=(0, 1))
    with h200():
        traced = jax.jit(gradient).trace(mixed, state)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == KERNELS
    value, grads = traced.lower(lowering_platforms=("cpu",)).compile()(mixed, state)
    by_name = jax.jit(jax.value_and_grad(partial(loss, implementation="xla"), argnums=(0, 1)))
    want, want_grads = by_name(mixed, state)
    close(value, want, 1e-6)
    jax.tree.map(partial(close, tol=1e-2), grads, want_grads)


@pytest.mark.parametrize(
    ("heads", "dtypes", "S", "n", "num_tokens"),
    [
        ((16, 32), (BF16, F32), 0, 1, 8192),
        ((16, 32), (BF16, BF16), 2, 48, 8192),
        ((4, 8), (F16, F16), 0, 3, 500),
        ((1, 3), (BF16, BF16), 1, 3, 40),
    ],
)
def test_real_sizes_lower_in_place(heads: Any, dtypes: Any, S: int, n: int, num_tokens: int) -> None:
    config, shape = layer_config(dtypes, *heads, 128, 128, mtp_step=S), jax.ShapeDtypeStruct
    of_heads = shape((heads[1],), F32)
    rest: dict[str, Any] = dict(
        weights=GDNWeights(shape((config.conv_dim, 4), dtypes[0]), None, of_heads, of_heads),
        mixed_qkvzba=shape((num_tokens, config.qkvz_dim + config.ba_dim), dtypes[0]),
        query_start_loc=shape((n + 1,), INT),
        state_indices=shape((n,), INT),
        norm_weight=shape((128,), dtypes[0]) if n > 1 else None,
    )
    state, layer = jax.eval_shape(lambda: gdn_jax.init_state(config, 2 * n, LAYERS)), shape((), jnp.int32)
    text = lowered(lambda state, rest, at: step(state, rest, config, at), state, rest, layer, donate_argnums=0)
    assert text.count("mosaic_gpu_v2") == KERNELS + (n == 48) and text.count("tf.aliasing_output") == 2
    assert "stablehlo.while" not in text


# ------------------------------------------------------------------------------------------------------------- on a GPU


def on_gpu(call: dict[str, Any]) -> Any:
    return twice(partial(step, config=call["config"]), call["state"], arrays(call))


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("H", "HV", "S"), [(16, 32, 0), (4, 8, 2), (16, 64, 0), (1, 1, 3), (3, 9, 0)])
def test_gpu_against_the_reference(dtypes: Any, H: int, HV: int, S: int) -> None:
    for lengths in (LENGTHS, (300,), (63, 64, 65, 127)):
        call = poisoned(make(HV, dtypes, lengths, S, H=H, HV=HV, K=128, V=128))
        check(call, *on_gpu(call))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 48])
@pytest.mark.parametrize("heads", [(16, 32), (4, 8), (16, 64)])
def test_gpu_real_sizes_against_xla_in_float32(heads: tuple[int, int], n: int) -> None:
    rng = np.random.default_rng(n)
    lengths = np.diff([0, *np.sort(rng.integers(0, 8192, n - 1)), 8192])
    call = make(9, (BF16, F32), tuple(lengths), 0, H=heads[0], HV=heads[1], K=128, V=128)
    (o, _), after = on_gpu(call)
    valid, found = live(call)
    exact = jax.tree.map(lambda x: x.astype(F32) if x.dtype == BF16 else x, arrays(call))
    state = jax.tree.map(lambda x: jnp.asarray(x[LAYER], F32), call["state"])
    want = jax.jit(partial(gdn_prefill, config=call["config"], implementation="xla"))(**exact, state=state)
    close(o[valid], np.asarray(want.o)[valid], TOL[BF16])
    zero(o[~valid])
    used = [slot for slot, *_ in found]
    close_rows(after.ssm[LAYER], want.state.ssm, call["state"].ssm[LAYER], used, TOL[BF16])
    close_rows(after.conv[LAYER], np.asarray(want.state.conv).astype(BF16), call["state"].conv[LAYER], used, 0)


@pytest.mark.gpu
def test_gpu_random_batches() -> None:
    """200 batches in one static shape: other lengths, slots, counts, flags and padding each time."""
    config, n, slots = layer_config((BF16, F32), H=1, HV=2, mtp_step=2), 5, 12
    jitted = jax.jit(partial(step, config=config))
    for seed in range(200):
        rng = np.random.default_rng(seed)
        cuts = np.sort(rng.integers(0, 301, n + 1))
        call = layer_call(seed, config, BF16, n, 300, slots)
        call |= prefill_places(rng, np.diff(cuts), slots, 2)
        call["query_start_loc"] = np.array([0, *cuts[1:]], INT)
        call["has_initial_state"] = rng.random(n) < 0.5
        call["num_accepted_tokens"] = rng.integers(0, 5, n).astype(INT)
        bad = rng.choice([-1, -7, slots, 2**31 - 1], n)
        call["state_indices"] = np.where(rng.random(n) < 0.2, bad, call["state_indices"]).astype(INT)
        call = poisoned(call)
        check(call, *jax.tree.map(np.asarray, jitted(call["state"], arrays(call))))
