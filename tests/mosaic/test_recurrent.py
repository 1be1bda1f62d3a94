"""The decode kernel: in the interpreter against the reference, lowered for an H200, and on a GPU."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import INT, close, close_rows, exact, normal, rule_inputs, same, zero
from kernels import BF16, DTYPES, F32, POOL_TOL, SIZES, TOL, h200, lowered, on_gpu, run_kernel

import gdn_jax
from gdn_jax import recurrent_gated_delta_rule, reference
from gdn_jax.mosaic import recurrent

H, HV, SLOTS, LAYERS = 1, 2, 6, 2


def make(
    seed: int, n: int, dtypes: Any, K: int, V: int, H: int = H, HV: int = HV, slots: int = SLOTS
) -> dict[str, Any]:
    """A stacked call; every second sequence starts from zeros, every third is padding."""
    rng, (dtype, state_dtype) = np.random.default_rng(seed), dtypes
    index = rng.permutation(slots)[:n].astype(INT)
    index[2::3] = np.resize([-1, -7, slots, 2**31 - 1], len(index[2::3]))  # padding
    return {
        **rule_inputs(rng, n, H=H, HV=HV, K=K, V=V, dtype=dtype),
        "ssm_state": normal(rng, LAYERS, slots, HV, K, V).astype(state_dtype),
        "state_indices": index,
        "has_initial_state": np.arange(n) % 2 == 0,
    }


def poisoned(call: dict[str, Any]) -> dict[str, Any]:
    """NaN wherever nothing may look: padding, slots that nobody names, other layers, states that are not started from."""
    call = {name: np.array(x) for name, x in call.items()}
    slots, pool = call["state_indices"], call["ssm_state"]
    valid = (slots >= 0) & (slots < pool.shape[1])
    for name in ("q", "k", "v", "g", "beta"):
        call[name][~valid] = np.nan
    reads = slots[valid & call["has_initial_state"]]
    others = np.setdiff1d(np.arange(pool.shape[1]), reads)
    pool[1, others] = np.nan
    pool[0] = np.nan
    return call


NAMES = ("q", "k", "v", "g", "beta", "ssm_state", "state_indices", "has_initial_state")
run = partial(run_kernel, recurrent.recurrent, NAMES)


def check(call: dict[str, Any], o: Any, pool: Any, norm: bool = True) -> None:
    """Against the reference in float64; padding zero; every row that nobody names bit for bit."""
    one = exact(call | {"ssm_state": call["ssm_state"][1]})
    want_o, want = reference.recurrent_gated_delta_rule(**one, use_qk_l2norm=norm)
    slots = call["state_indices"]
    valid = (slots >= 0) & (slots < call["ssm_state"].shape[1])
    tol = TOL[call["v"].dtype.type]
    close(np.asarray(o)[valid], want_o[valid], tol)
    zero(np.asarray(o)[~valid])
    state_tol = POOL_TOL[call["ssm_state"].dtype.type]
    close_rows(pool[1], want, call["ssm_state"][1], slots[valid], state_tol)
    same(pool[0], call["ssm_state"][0])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("vb", "K", "V"), [(32, 64, 64), (64, 128, 64), (128, 64, 128), (64, 256, 128)])
def test_against_the_reference(monkeypatch: pytest.MonkeyPatch, dtypes: Any, vb: int, K: int, V: int) -> None:
    monkeypatch.setattr(recurrent, "columns_of_tile", lambda *sizes: vb)
    call = poisoned(make(vb + K, 5, dtypes, K, V))
    check(call, *run(call))


@pytest.mark.parametrize("norm", [True, False])
def test_without_flags_and_norm(norm: bool) -> None:
    call = make(1, 3, (F32, F32), 64, 64)
    o, pool = run(call | {"has_initial_state": None}, norm=norm)
    check(call | {"has_initial_state": np.ones(3, bool)}, o, pool, norm)


@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1])
def test_another_layer_is_padding(layer: int) -> None:
    call = make(2, 3, (BF16, F32), 64, 64)
    o, pool = run(call, layer)
    zero(o)
    same(pool, call["ssm_state"])


def test_strong_decay() -> None:
    call = make(3, 2, (F32, F32), 64, 64)
    call["g"][:] = [[-np.inf, -1e4], [0, -50]]
    check(call, *run(call))


def test_a_sequence_has_the_same_bits_elsewhere_beside_others() -> None:
    call, other = (make(seed, 4, (BF16, BF16), 64, 64) for seed in (4, 5))
    call["state_indices"][:], other["state_indices"][:] = [0, 4, -1, 2], [-7, 4, 3, 5]
    moved = {name: np.array(x) for name, x in other.items()}
    for name in ("q", "k", "v", "g", "beta", "has_initial_state"):
        moved[name][3] = call[name][1]
    moved["state_indices"][:] = [-7, 1, 3, 4]
    moved["ssm_state"][1, 4] = call["ssm_state"][1, 4]
    (o, pool), (moved_o, moved_pool) = run(call), run(moved)
    same(moved_o[3], o[1])
    same(moved_pool[1, 4], pool[1, 4])


def test_the_detector_sees_a_slot_named_twice() -> None:
    call = make(6, 2, (BF16, BF16), 64, 64)
    call["state_indices"][:] = 3
    run(call, races=True)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_every_tile_lowers_in_place(dtypes: Any) -> None:
    for n, (K, V) in itertools.product((1, 8, 64), SIZES):
        call = make(0, 3, dtypes, K, V, H=2, HV=16)
        tokens = {name: jax.ShapeDtypeStruct((n, *call[name].shape[1:]), call[name].dtype) for name in "qkv"}
        gates = jax.ShapeDtypeStruct((n, 16), jnp.float32)
        index = jax.ShapeDtypeStruct((n,), jnp.int32)
        has = jax.ShapeDtypeStruct((n,), bool) if n == 8 else None
        pool = jax.ShapeDtypeStruct(call["ssm_state"].shape, call["ssm_state"].dtype)

        def step(pool: Any, q: Any, k: Any, v: Any, g: Any, index: Any, has: Any, layer: Any) -> Any:
            flags = dict(state_indices=index, has_initial_state=has, layer=layer, implementation="mosaic")
            return recurrent_gated_delta_rule(q, k, v, g, g, ssm_state=pool, **flags)

        layer = jax.ShapeDtypeStruct((), jnp.int32)
        with jax.enable_x64(n == 1):
            text = lowered(step, pool, *tokens.values(), gates, index, has, layer, donate_argnums=0)
        assert text.count("mosaic_gpu_v2") == 1 and "tf.aliasing_output" in text, (n, K, V)
        assert "stablehlo.while" not in text and "stablehlo.gather" not in text, (n, K, V)


def test_explain_and_what_is_refused() -> None:
    call = make(0, 3, (BF16, BF16), 64, 48)
    call["layer"] = 0
    with h200():
        told = gdn_jax.explain(recurrent_gated_delta_rule, **call)
        assert told.implementation == "xla" and "head dimensions of 64, 128, 256, and `v` has 48" in str(told)
        with pytest.raises(
            ValueError, match=r"'mosaic', which cannot run here: its kernel takes head dimensions of 64"
        ):
            recurrent_gated_delta_rule(**call, implementation="mosaic")
        wide = make(0, 3, (BF16, BF16), 64, 64, HV=16) | {"layer": 0}
        assert "up to 8 value heads" in str(gdn_jax.explain(recurrent_gated_delta_rule, **wide))
        good = make(0, 3, (BF16, BF16), 64, 64)
        assert gdn_jax.explain(recurrent_gated_delta_rule, **good).implementation == "mosaic"
        none = {name: x[:0] if name in ("q", "k", "v", "g", "beta") else x for name, x in good.items()}
        assert "`v` is empty" in str(gdn_jax.explain(recurrent_gated_delta_rule, **none))
    assert (
        gdn_jax.explain(recurrent_gated_delta_rule, **good).implementation == "xla"
        or jax.devices()[0].platform == "gpu"
    )


def test_on_a_cpu_no_kernel_is_in_the_program() -> None:
    call = make(7, 5, (F32, F32), 64, 64)
    arrays = {name: jnp.asarray(x) for name, x in call.items()}

    def step(arrays: Any) -> Any:
        return recurrent_gated_delta_rule(**arrays, layer=1)

    with h200():
        traced = jax.jit(step).trace(arrays)
    assert "mosaic" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "mosaic" in traced.lower(lowering_platforms=("cuda",)).as_text()


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("H", "HV"), [(16, 32), (2, 16), (1, 1), (3, 9)])
def test_gpu_against_the_reference(dtypes: Any, H: int, HV: int) -> None:
    sizes = SIZES if HV == 32 else [(128, 128), (64, 256)]
    cases = [*itertools.product((1, 9), sizes), *([(70, (128, 128)), (70, (64, 256))] if HV == 32 else [])]
    for seed, (n, (K, V)) in enumerate(cases):
        call = poisoned(make(seed, n, dtypes, K, V, H=H, HV=HV, slots=max(n, 12)))
        check(call, *on_gpu(recurrent_gated_delta_rule, call))


@pytest.mark.gpu
def test_gpu_random_batches() -> None:
    """500 batches in one static shape: other slots, flags and padding each time, now and then a state that is forgotten."""
    step = jax.jit(partial(recurrent_gated_delta_rule, layer=1, implementation="mosaic"))
    for seed in range(500):
        call, rng = make(seed, 7, (BF16, F32), 64, 64, H=2, HV=4, slots=9), np.random.default_rng(seed)
        slots = rng.permutation(9)[:7]
        call["state_indices"] = np.where(rng.random(7) < 0.25, rng.choice([-1, -7, 9, 2**31 - 1], 7), slots).astype(INT)
        call["has_initial_state"] = rng.random(7) < 0.5
        call["g"][rng.random((7, 4)) < 0.1] = -np.inf
        call = poisoned(call)
        check(call, *jax.tree.map(np.asarray, step(**call)))


@pytest.mark.gpu
def test_gpu_vmap_scan_and_grad() -> None:
    call = make(8, 5, (F32, F32), 64, 64)
    slots, has = jnp.asarray(call["state_indices"]), jnp.asarray(call["has_initial_state"])
    pool, *tokens = (jnp.asarray(call[name]) for name in ("ssm_state", "q", "k", "v", "g", "beta"))

    def step(pool: Any, *tokens: Any, layer: Any = 1, implementation: str = "mosaic") -> Any:
        flags = dict(state_indices=slots, has_initial_state=has, layer=layer, implementation=implementation)
        return recurrent_gated_delta_rule(*tokens, ssm_state=pool, **flags)

    def scanned(implementation: str) -> Any:
        def layers(pool: Any, layer: Any) -> Any:
            return step(pool, *tokens, layer=layer, implementation=implementation)[::-1]

        return jax.jit(lambda pool: jax.lax.scan(layers, pool, jnp.arange(LAYERS)))(pool)

    def grads(implementation: str) -> Any:
        def loss(*args: Any) -> Any:
            o, pool = step(*args, implementation=implementation)
            return jnp.sum(o**2) + jnp.sum(jnp.sin(pool))

        return jax.jit(jax.grad(loss, argnums=tuple(range(6))))(pool, *tokens)

    twice = [jnp.stack([x, x[::-1]]) for x in (pool, *tokens)]
    for got, want in (
        (scanned("mosaic"), scanned("xla")),
        (grads("mosaic"), grads("xla")),
        (jax.jit(jax.vmap(step))(*twice), jax.jit(jax.vmap(partial(step, implementation="xla")))(*twice)),
    ):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            close(a, b, 1e-5)


@pytest.mark.gpu
def test_gpu_a_pool_beyond_2_31_elements() -> None:
    slots, shape = 40960, (HV, 256, 128)  # 5.0 GiB of bfloat16
    pool = jnp.zeros((1, slots, *shape), jnp.bfloat16)
    call = make(9, 4, (BF16, BF16), 256, 128) | {"has_initial_state": np.ones(4, bool)}
    index = np.array([slots - 1, 0, 32768, 16384], INT)
    rows = normal(np.random.default_rng(9), 4, *shape).astype(BF16)
    pool = jax.jit(lambda pool: pool.at[0, index].set(rows), donate_argnums=0)(pool)
    tokens = {name: jnp.asarray(call[name]) for name in ("q", "k", "v", "g", "beta")}

    def step(pool: Any) -> Any:
        o, pool = recurrent_gated_delta_rule(
            **tokens, ssm_state=pool, state_indices=index, layer=0, implementation="mosaic"
        )
        return o, pool, pool[0, index], jnp.sum(jnp.any(pool != 0, axis=(2, 3, 4)))

    o, pool, new, used = jax.jit(step, donate_argnums=0)(pool)
    arrays = exact({name: call[name] for name in tokens} | {"ssm_state": rows})
    want_o, want = reference.recurrent_gated_delta_rule(**arrays)
    close(o, want_o, TOL[BF16])
    close(new, want, POOL_TOL[BF16])
    assert int(used) == 4
