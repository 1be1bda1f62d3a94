"""The verify kernel: in the interpreter against the reference, lowered for an H200, and on a GPU."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import INT, close, close_rows, exact, normal, rule_inputs, same, starts, zero
from kernels import BF16, DTYPES, F32, POOL_TOL, SIZES, TOL, h200, lowered, on_gpu, run_kernel

import gdn_jax
from gdn_jax import mtp_gated_delta_rule, reference
from gdn_jax.mosaic import mtp

LAYERS, TAIL = 2, 2  # tokens behind the last sequence
NAMES = ("q", "k", "v", "g", "beta", "ssm_state")
NAMES += ("read_indices", "write_indices", "num_accepted_tokens", "query_start_loc")


def make(seed: int, lengths: Any, longest: int, dtypes: Any, K: int, V: int, H: int = 1, HV: int = 2) -> dict[str, Any]:
    """A stacked call with a row for every sequence and token, and three that nobody names; random accepted counts."""
    rng, (dtype, state_dtype), n = np.random.default_rng(seed), dtypes, len(lengths)
    slots = n * longest + 3
    rows = rng.permutation(slots)[: n * longest].reshape(n, longest).astype(INT)
    return {
        **rule_inputs(rng, sum(lengths) + TAIL, H=H, HV=HV, K=K, V=V, dtype=dtype),
        "ssm_state": normal(rng, LAYERS, slots, HV, K, V).astype(state_dtype),
        "read_indices": rows,
        "write_indices": rows.copy(),
        "num_accepted_tokens": rng.integers(1, longest + 1, n).astype(INT),
        "query_start_loc": starts(*lengths),
    }


def with_padding(call: dict[str, Any]) -> dict[str, Any]:
    """Sequence 1 reads outside the pool, 2 has a count of 0, writes of sequence 0 are skipped."""
    call["read_indices"][1, call["num_accepted_tokens"][1] - 1] = 2**31 - 1
    call["num_accepted_tokens"][2] = 0
    call["write_indices"][0, 1:] = [-7, *call["write_indices"][0, 2:]]
    return call


def live(call: dict[str, Any]) -> list[bool]:
    """Which sequences have tokens and are no padding."""
    longest, slots = call["read_indices"].shape[1], call["ssm_state"].shape[1]
    alive = []
    for row, count, length in zip(call["read_indices"], call["num_accepted_tokens"], np.diff(call["query_start_loc"])):
        alive.append(bool(1 <= count <= longest and 0 < length <= longest and 0 <= row[count - 1] < slots))
    return alive


def poisoned(call: dict[str, Any]) -> dict[str, Any]:
    """NaN in every token of padding and in every state that nobody starts from."""
    call = {name: np.array(x) for name, x in call.items()}
    loc, reads = call["query_start_loc"], []
    dead = [np.arange(loc[-1], len(call["v"]))]
    for n, alive in enumerate(live(call)):
        if alive:
            reads.append(call["read_indices"][n, call["num_accepted_tokens"][n] - 1])
        else:
            dead.append(np.arange(loc[n], loc[n + 1]))
    for name in ("q", "k", "v", "g", "beta"):
        call[name][np.concatenate(dead)] = np.nan
    call["ssm_state"][1, np.setdiff1d(np.arange(call["ssm_state"].shape[1]), reads)] = np.nan
    call["ssm_state"][0] = np.nan
    return call


run = partial(run_kernel, mtp.mtp, NAMES)


def check(call: dict[str, Any], o: Any, pool: Any, norm: bool = True) -> None:
    """Against the reference in float64; padding zero; every row that nobody writes bit for bit."""
    one = exact(call | {"ssm_state": call["ssm_state"][1]})
    want_o, want = reference.mtp_gated_delta_rule(**one, use_qk_l2norm=norm)
    loc, slots = call["query_start_loc"], call["ssm_state"].shape[1]
    valid, written = np.zeros(len(want_o), bool), []
    for n, alive in enumerate(live(call)):
        if alive:
            valid[loc[n] : loc[n + 1]] = True
            written += [row for row in call["write_indices"][n, : loc[n + 1] - loc[n]] if 0 <= row < slots]
    close(np.asarray(o)[valid], want_o[valid], TOL[call["v"].dtype.type])
    zero(np.asarray(o)[~valid])
    close_rows(pool[1], want, call["ssm_state"][1], written, POOL_TOL[call["ssm_state"].dtype.type])
    same(pool[0], call["ssm_state"][0])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("vb", "K", "V"), [(32, 64, 64), (64, 128, 64), (128, 64, 128)])
def test_against_the_reference(monkeypatch: pytest.MonkeyPatch, dtypes: Any, vb: int, K: int, V: int) -> None:
    monkeypatch.setattr(mtp, "columns_of_tile", lambda *sizes: vb)
    call = poisoned(with_padding(make(vb + K, (3, 2, 2, 0, 1, 4), 3, dtypes, K, V)))  # the last one is too long
    check(call, *run(call))


@pytest.mark.parametrize("longest", [1, 2, 8])
def test_lengths_up_to_eight(longest: int) -> None:
    call = poisoned(make(longest, (longest, 1, 0), longest, (BF16, BF16), 64, 64))
    check(call, *run(call))


def test_without_norm() -> None:
    call = make(1, (2, 1), 2, (F32, F32), 64, 64)
    check(call, *run(call, norm=False), norm=False)


@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1])
def test_another_layer_is_padding(layer: int) -> None:
    call = make(2, (2, 1), 2, (BF16, F32), 64, 64)
    o, pool = run(call, layer)
    zero(o)
    same(pool, call["ssm_state"])


def test_a_malformed_start_stays_inside_the_arrays() -> None:
    call = make(3, (2, 2, 1), 2, (BF16, BF16), 64, 64)
    call["query_start_loc"][:] = [0, 2**31 - 1, -5, 10**6]
    run(call, races=None)  # two sequences may own a token; the interpreter checks every index


def test_the_detector_sees_one_slot_for_two_sequences() -> None:
    call = make(4, (2, 2), 2, (BF16, BF16), 64, 64)
    call["write_indices"][1] = call["write_indices"][0]
    run(call, races=True)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_every_tile_lowers_in_place(dtypes: Any) -> None:
    for n, (K, V) in itertools.product((1, 8), SIZES if dtypes == (BF16, BF16) else SIZES[1:3]):
        call = make(0, [2] * n, 2, dtypes, K, V, H=2, HV=16)
        arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.items() if name != "ssm_state"}
        pool = jax.ShapeDtypeStruct(call["ssm_state"].shape, call["ssm_state"].dtype)

        def step(pool: Any, arrays: Any, layer: Any) -> Any:
            return mtp_gated_delta_rule(**arrays, ssm_state=pool, layer=layer, implementation="mosaic")

        with jax.enable_x64(n == 1):
            text = lowered(step, pool, arrays, jax.ShapeDtypeStruct((), jnp.int32), donate_argnums=0)
        assert text.count("mosaic_gpu_v2") == 1 and "tf.aliasing_output" in text, (n, K, V)


def test_explain() -> None:
    with h200():
        call = make(0, (2, 1), 2, (BF16, BF16), 64, 64) | {"layer": 0}
        assert gdn_jax.explain(mtp_gated_delta_rule, **call).implementation == "mosaic"
        call = make(0, (2, 1), 2, (BF16, BF16), 64, 32) | {"layer": 0}
        told = gdn_jax.explain(mtp_gated_delta_rule, **call)
        assert told.implementation == "xla" and "`v` has 32" in str(told)


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("H", "HV"), [(16, 32), (2, 16), (1, 1), (3, 9)])
def test_gpu_against_the_reference(dtypes: Any, H: int, HV: int) -> None:
    rng = np.random.default_rng(0)
    more = [(40, 2, (128, 128)), (5, 4, (256, 256))] if HV == 32 else []
    for n, longest, (K, V) in ((3, 4, (128, 128)), (5, 8, (64, 64)), *more):
        lengths = rng.integers(0, longest + 1, n)
        lengths[-1] = longest + 1
        call = poisoned(with_padding(make(n, lengths.tolist(), longest, dtypes, K, V, H, HV)))
        check(call, *on_gpu(mtp_gated_delta_rule, call))


@pytest.mark.gpu
def test_gpu_random_batches() -> None:
    """500 batches in one static shape: other rows, lengths (some too long), accepted counts and padding each time."""
    step = jax.jit(partial(mtp_gated_delta_rule, layer=1, implementation="mosaic"))
    n, longest = 5, 3
    for seed in range(500):
        call, rng = make(seed, [longest + 1] * n, longest, (BF16, F32), 64, 64, H=2, HV=4), np.random.default_rng(seed)
        call["query_start_loc"] = starts(*rng.integers(0, longest + 2, n))
        for name, least in (("read_indices", 0.1), ("write_indices", 0.2)):
            bad = rng.choice([-1, -7, call["ssm_state"].shape[1], 2**31 - 1], (n, longest))
            call[name] = np.where(rng.random((n, longest)) < least, bad, call[name]).astype(INT)
        counts = rng.choice([0, longest + 1, 2**31 - 1, -(2**31)], n)
        call["num_accepted_tokens"] = np.where(rng.random(n) < 0.15, counts, call["num_accepted_tokens"]).astype(INT)
        call = poisoned(call)
        check(call, *jax.tree.map(np.asarray, step(**call)))
