"""The layer in one launch: in the interpreter against the reference, lowered for an H200, and on a GPU."""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from batches import INT, close, close_rows, same, starts, zero
from jax.experimental import checkify
from kernels import BF16, DTYPES, F32, LAYERS, POOL_TOL, h200, interpret, layer_call, layer_config, lowered, twice

import gdn_jax
from gdn_jax import GDNState, reference
from gdn_jax.mosaic import decode

LAYER, TAIL = 1, 2
TOL = {BF16: 6e-3, F32: 1e-5, np.float16: 6e-3 / 4}


def decode_call(seed: int, dtypes: Any, n: int, slots: int = 6, norm: bool = True, **sizes: Any) -> dict[str, Any]:
    """One token a sequence; every second starts from zeros, every third is padding."""
    config = layer_config(dtypes, **sizes)
    call = layer_call(seed, config, dtypes[0], n, n, slots)
    index = call["state_indices"]
    index[2::3] = np.resize([-1, -7, slots, 2**31 - 1], len(index[2::3]))
    call["has_initial_state"] = np.arange(n) % 2 == 0
    return call if norm else call | {"norm_weight": None}


def verify_call(seed: int, dtypes: Any, lengths: Any, mtp_step: int, norm: bool = True, **sizes: Any) -> dict[str, Any]:
    """Ragged sequences with random accepted counts; of five or more, sequence 1 is padding and 2 has a count of 0."""
    config, n = layer_config(dtypes, mtp_step=mtp_step, **sizes), len(lengths)
    call = layer_call(seed, config, dtypes[0], n, sum(lengths) + TAIL, n + 2, bias=False)
    call["query_start_loc"] = starts(*lengths)
    call["num_accepted_tokens"] = np.random.default_rng(seed).integers(1, mtp_step + 2, n).astype(INT)
    if n >= 5:
        call["state_indices"][1], call["num_accepted_tokens"][2] = 2**31 - 1, 0
    return call if norm else call | {"norm_weight": None}


def live(call: dict[str, Any]) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Which tokens are valid, and `(slot, accepted column, length)` of each sequence that is."""
    slots, num_slots, longest = call["state_indices"], call["state"].conv.shape[1], call["config"].mtp_step + 1
    loc = call.get("query_start_loc", np.arange(len(slots) + 1))
    counts = call.get("num_accepted_tokens", np.ones_like(slots))
    valid, sequences = np.zeros(len(call["mixed_qkvzba"]), bool), []
    for slot, count, begin, end in zip(slots, counts, loc[:-1], loc[1:]):
        if 0 <= slot < num_slots and 1 <= count <= longest and 0 < end - begin <= longest:
            valid[begin:end] = True
            sequences.append((int(slot), int(count) - 1, int(end - begin)))
    return valid, sequences


def poisoned(call: dict[str, Any]) -> dict[str, Any]:
    """NaN in every token of padding and in every state that nobody starts from."""
    valid, sequences = live(call)
    has = call.get("has_initial_state")
    longest = call["config"].mtp_step + 1
    fresh = set() if has is None else set(call["state_indices"][~has].tolist())
    conv, ssm, mixed = (np.array(x) for x in (*call["state"], call["mixed_qkvzba"]))
    mixed[~valid] = np.nan
    reads = [(slot, column) for slot, column, _ in sequences if slot not in fresh]
    conv[LAYER, np.setdiff1d(np.arange(conv.shape[1]), [slot for slot, _ in reads])] = np.nan
    rows = [slot * longest + column for slot, column in reads]
    ssm[LAYER, np.setdiff1d(np.arange(ssm.shape[1]), rows)] = np.nan
    conv[0] = ssm[0] = np.nan
    return call | {"state": GDNState(conv, ssm), "mixed_qkvzba": mixed}


def run(call: dict[str, Any], layer: int = LAYER, races: bool | None = False) -> tuple[np.ndarray, GDNState]:
    """The kernel itself, in the interpreter."""
    names = ("state_indices", "has_initial_state", "num_accepted_tokens", "query_start_loc")
    indices = (None if call.get(name) is None else jnp.asarray(call[name]) for name in names)
    weights, norm, pools, mixed = jax.tree.map(
        jnp.asarray, (call["weights"], call["norm_weight"], tuple(call["state"]), call["mixed_qkvzba"])
    )
    arguments = (mixed, weights, norm, jnp.float32(1e-6), *pools, *indices, jnp.int32(layer))
    o, conv, ssm = interpret(partial(decode.decode, config=call["config"]), *arguments, races=races)
    return np.asarray(o), GDNState(np.asarray(conv), np.asarray(ssm))


def check(call: dict[str, Any], o: np.ndarray, state: GDNState, tol: float = 0) -> None:
    """Against the reference in float64; padding zero; every row that nobody writes bit for bit."""
    op = reference.gdn_decode if "query_start_loc" not in call else reference.gdn_mtp_decode
    before = call["state"]
    want = op(**(call | {"state": GDNState(*(x[LAYER].astype(np.float64) for x in before))}))
    valid, sequences = live(call)
    longest, dtype = call["config"].mtp_step + 1, call["mixed_qkvzba"].dtype.type
    close(o[valid], want.o[valid], tol or TOL[dtype])
    zero(o[~valid])
    used = [slot for slot, _, _ in sequences]
    same(state.conv[0], before.conv[0])
    same(state.ssm[0], before.ssm[0])
    close_rows(state.conv[LAYER], want.state.conv, before.conv[LAYER], used, 0)
    rows = [slot * longest + t for slot, _, length in sequences for t in range(length)]
    tol = max(POOL_TOL[before.ssm.dtype.type], 1e-5 if dtype == F32 else 4e-3 if dtype == BF16 else 1e-3)
    close_rows(state.ssm[LAYER], want.state.ssm, before.ssm[LAYER], rows, tol)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("sizes", [dict(K=64, V=64), dict(K=128, V=128), dict(HV=1, K=64, V=128)], ids=str)
@pytest.mark.parametrize("many", [0, 512])
def test_decode_against_the_reference(monkeypatch: pytest.MonkeyPatch, dtypes: Any, sizes: Any, many: int) -> None:
    monkeypatch.setattr(decode, "MANY", many)
    call = poisoned(decode_call(1, dtypes, 5, **sizes))
    check(call, *run(call))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("sizes", [dict(K=64, V=64), dict(K=64, V=128)], ids=str)
@pytest.mark.parametrize("many", [0, 512])
def test_verify_against_the_reference(monkeypatch: pytest.MonkeyPatch, dtypes: Any, sizes: Any, many: int) -> None:
    monkeypatch.setattr(decode, "MANY", many)
    call = poisoned(verify_call(2, dtypes, (3, 2, 2, 0, 1, 4), 2, **sizes))  # the last one is too long
    check(call, *run(call))


@pytest.mark.parametrize("sizes", [dict(conv_kernel_dim=2), dict(conv_kernel_dim=8, activation=None)], ids=str)
def test_other_convs_without_a_norm(sizes: Any) -> None:
    for call in (
        decode_call(3, (F32, F32), 3, norm=False, **sizes),
        verify_call(4, (BF16, BF16), (2, 1), 1, norm=False, **sizes),
    ):
        check(call, *run(call))


@pytest.mark.parametrize("mtp_step", [0, 7])
def test_verify_of_one_and_of_eight_tokens(mtp_step: int) -> None:
    call = poisoned(verify_call(5, (F32, F32), (mtp_step + 1, 1, 0), mtp_step))
    check(call, *run(call))


@pytest.mark.parametrize("layer", [-1, LAYERS, 2**31 - 1])
def test_another_layer_is_padding(layer: int) -> None:
    call = decode_call(6, (BF16, F32), 3)
    o, state = run(call, layer)
    zero(o)
    jax.tree.map(same, state, call["state"])


def test_gates_that_overflow_on_the_way() -> None:
    """GATE-01: the gate is e^(A_log + a) there, and no NaN comes of an overflow times an underflow."""
    call = decode_call(7, (F32, F32), 2, HV=4)
    call["weights"] = call["weights"]._replace(
        A_log=np.array([100, 88.8, 3, -90], F32), dt_bias=np.array([0, 0, 30, 1e30], F32)
    )
    call["mixed_qkvzba"][:, -4:] = [-200, -30, 50, 1e38]
    check(call, *run(call))


def test_a_sequence_has_the_same_bits_elsewhere_beside_others() -> None:
    call, other = (verify_call(seed, (BF16, BF16), (2, 3, 1, 2), 2) for seed in (8, 9))
    call["state_indices"][:], other["state_indices"][:] = [0, 4, -1, 2], [1, -7, 3, 5]
    moved = other | {"state": GDNState(*(np.array(x) for x in other["state"])), "weights": call["weights"]}
    moved["query_start_loc"] = starts(1, 2, 2, 3)
    moved["num_accepted_tokens"][3], moved["norm_weight"] = call["num_accepted_tokens"][1], call["norm_weight"]
    moved["mixed_qkvzba"][5:8] = call["mixed_qkvzba"][2:5]
    moved["state"].conv[LAYER, 5] = call["state"].conv[LAYER, 4]
    moved["state"].ssm[LAYER, 15:18] = call["state"].ssm[LAYER, 12:15]
    (o, state), (moved_o, moved_state) = run(call), run(moved)
    same(moved_o[5:8], o[2:5])
    same(moved_state.conv[LAYER, 5], state.conv[LAYER, 4])
    same(moved_state.ssm[LAYER, 15:18], state.ssm[LAYER, 12:15])


def verify_and_steps(**sizes: Any) -> Any:
    """A verify step of three tokens on float32 states that others accepted one of, and the same tokens one by one.

    `(function, arrays)` of the first, and a function of an earlier result that gives those of the next.
    """
    verify = verify_call(13, (BF16, F32), (3, 3), 2, norm=False, **sizes)
    verify["num_accepted_tokens"][:] = 1
    one = decode_call(13, (BF16, F32), 2, slots=4, norm=False, **sizes)
    one |= {"weights": verify["weights"], "state_indices": verify["state_indices"], "has_initial_state": None}
    conv, ssm = verify["state"]
    first = GDNState(np.array(conv[:, :, :, :3]), np.array(ssm[:, ::3]))
    return verify, one, first, lambda t: verify["mixed_qkvzba"][[t, 3 + t]]


def test_mtp_04_a_verify_step_has_the_bits_of_decode_steps() -> None:
    verify, one, state, token = verify_and_steps()
    o, after = run(verify)
    for t in range(3):
        step_o, state = run(one | {"state": state, "mixed_qkvzba": token(t)})
        same(o[[t, 3 + t]], step_o)
        same(after.ssm[LAYER, verify["state_indices"] * 3 + t], state.ssm[LAYER, verify["state_indices"]])


def test_jax_02_other_slots_in_every_mode() -> None:
    """Slot 2 of 6 is stepped; the kernel in the interpreter, and the program a CPU gets, leave the others bit for bit."""
    call = decode_call(14, (BF16, BF16), 1) | {"state_indices": np.array([2], INT)}
    rest = {name: x for name, x in call.items() if name != "config"}
    plain = jax.jit(partial(gdn_jax.gdn_decode, config=call["config"], layer=LAYER))(**rest)
    for conv, ssm in (run(call)[1], plain.state):
        for got, before in zip((conv, ssm), call["state"]):
            same(np.delete(got[LAYER], 2, 0), np.delete(before[LAYER], 2, 0))
            same(got[0], before[0])
            assert (np.asarray(got[LAYER, 2]) != before[LAYER, 2]).any()


def test_a_malformed_start_stays_inside_the_arrays() -> None:
    call = verify_call(10, (BF16, BF16), (2, 2, 1), 1)
    call["query_start_loc"][:] = [0, 2**31 - 1, -5, 10**6]
    run(call, races=None)  # two sequences may own a token; the interpreter checks every index


def test_the_detector_sees_rows_that_are_shifted_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the barrier of a cluster the first value head rewrites conv rows that the second still reads."""
    call = decode_call(11, (BF16, BF16), 2)
    run(call)
    monkeypatch.setattr(decode.plgpu, "ClusterBarrier", lambda **_: plgpu.Barrier(num_arrivals=1))
    run(call, races=True)


def test_explain() -> None:
    with h200():
        call = decode_call(0, (BF16, BF16), 2)
        assert gdn_jax.explain(gdn_jax.gdn_decode, **call, layer=0).implementation == "mosaic"
        positional = [call[name] for name in ("weights", "state", "mixed_qkvzba")]
        assert gdn_jax.explain("gdn_decode", *positional, config=call["config"]).implementation == "mosaic"
        for sizes, why in (
            (dict(K=48), "head dimensions of 64, 128, 256, and head_k_dim is 48"),
            (dict(V=96), "head_v_dim is 96"),
            (dict(K=256, V=256), "up to 32768 elements a head"),
            (dict(HV=16), "up to 8 value heads a key head, and there are 16"),
        ):
            told = gdn_jax.explain("gdn_decode", config=layer_config((BF16, BF16), **sizes))
            assert told.implementation == "xla" and why in str(told), told
        told = gdn_jax.explain("gdn_mtp_decode", config=layer_config((BF16, BF16), mtp_step=8))
        assert "mtp_step up to 7" in str(told)
        none = call | {"mixed_qkvzba": call["mixed_qkvzba"][:0]}
        assert "`mixed_qkvzba` is empty" in str(gdn_jax.explain("gdn_decode", **none))
        with pytest.raises(
            ValueError, match=r"gdn_decode: `implementation` is 'mosaic', which cannot run here: `state\.conv`"
        ):
            empty = call | {"state": jax.tree.map(lambda x: x[:, :0], call["state"])}
            gdn_jax.gdn_decode(**empty, layer=0, implementation="mosaic")


def test_checkify_and_gradients_beside_the_kernel() -> None:
    """Both take the XLA form of the same call; on a CPU no kernel is in the program."""
    call = decode_call(12, (F32, F32), 3)
    config = call.pop("config")
    arrays = jax.tree.map(jnp.asarray, call)

    def step(arrays: Any) -> Any:
        out = gdn_jax.gdn_decode(**arrays, config=config, layer=LAYER)
        return out.o, out.state

    def loss(mixed: Any) -> Any:
        return jnp.sum(step(arrays | {"mixed_qkvzba": mixed})[0] ** 2)

    with h200():
        traced = jax.jit(step).trace(arrays)
        checked = jax.jit(checkify.checkify(step, errors=checkify.all_checks)).trace(arrays)
        grad = jax.jit(jax.grad(loss)).trace(arrays["mixed_qkvzba"])
        batched = jax.jit(jax.vmap(step)).trace(jax.tree.map(lambda x: jnp.stack([x, x]), arrays))
    assert "mosaic" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    for of in (traced, checked, grad):
        assert of.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == 1
    assert "mosaic" not in batched.lower(lowering_platforms=("cuda",)).as_text()
    want = jax.grad(loss)(arrays["mixed_qkvzba"])
    same(grad.lower(lowering_platforms=("cpu",)).compile()(arrays["mixed_qkvzba"]), want)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("function", ["gdn_decode", "gdn_mtp_decode"])
def test_every_tile_lowers_in_place(function: str, dtypes: Any) -> None:
    sizes = [(1, 64, 64), (1, 128, 128), (128, 128, 128), (1, 256, 128), (128, 64, 256)]
    for n, K, V in sizes if dtypes == (BF16, BF16) else sizes[1:2]:
        if function == "gdn_decode":
            call = decode_call(0, dtypes, n, slots=n, K=K, V=V, H=2, HV=4)
        else:
            call = verify_call(0, dtypes, [2] * n, 1, K=K, V=V, H=2, HV=4)
        config = call.pop("config")
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call)

        def step(state: Any, rest: Any, layer: Any, config: Any = config) -> Any:
            operator = getattr(gdn_jax, function)
            return operator(**rest, state=state, config=config, layer=layer, implementation="mosaic")

        state = shapes.pop("state")
        with jax.enable_x64(n == 1):
            text = lowered(step, state, shapes, jax.ShapeDtypeStruct((), jnp.int32), donate_argnums=0)
        assert text.count("mosaic_gpu_v2") == 1 and text.count("tf.aliasing_output") == 2, (n, K, V)


# ------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("H", "HV"), [(16, 32), (2, 16), (1, 1), (3, 9)])
def test_gpu_against_the_reference(dtypes: Any, H: int, HV: int) -> None:
    sizes, many = dict(H=H, HV=HV, K=128, V=128), 640 // HV if HV == 32 else 9
    calls = [decode_call(n, dtypes, n, slots=n + 3, **sizes) for n in (1, many)]
    calls.append(verify_call(2, dtypes, (3, 2, 2, 0, 1, 4) + (3,) * (many - 6), 2, **sizes))
    if HV == 32:
        for K, V in ((64, 64), (64, 256), (256, 128)):
            calls.append(decode_call(3, dtypes, 9, slots=12, norm=False, **(sizes | dict(K=K, V=V))))
    if (HV, dtypes) == (1, DTYPES["bf16"]):
        calls.append(verify_call(4, dtypes, (8, 1, 2, 0, 1, 4), 7, **sizes))
    for call in map(poisoned, calls):
        config = call["config"]
        rest = jax.tree.map(jnp.asarray, {name: x for name, x in call.items() if name not in ("state", "config")})

        def step(state: Any, rest: Any, config: Any = config) -> Any:
            operator = gdn_jax.gdn_mtp_decode if "query_start_loc" in rest else gdn_jax.gdn_decode
            out = operator(**rest, state=state, config=config, layer=LAYER, implementation="mosaic")
            return out.o, out.state

        check(call, *twice(step, call["state"], rest))


@pytest.mark.gpu
def test_gpu_mtp_04_a_verify_step_has_the_bits_of_decode_steps() -> None:
    verify, one, state, token = verify_and_steps(K=128, V=128, H=16, HV=32)

    def step(operator: Any, call: dict[str, Any]) -> Any:
        rest = {name: x for name, x in call.items() if name != "config"}
        out = operator(**rest, config=call["config"], layer=LAYER, implementation="mosaic")
        return jax.tree.map(np.asarray, (out.o, out.state))

    o, after = step(gdn_jax.gdn_mtp_decode, verify)
    for t in range(3):
        step_o, state = step(gdn_jax.gdn_decode, one | {"state": state, "mixed_qkvzba": token(t)})
        same(o[[t, 3 + t]], step_o)
        same(after.ssm[LAYER, verify["state_indices"] * 3 + t], state.ssm[LAYER, verify["state_indices"]])


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 2])
def test_gpu_random_batches(drafts: int) -> None:
    """500 batches in one static shape: other slots, lengths (some too long), accepted counts, flags and padding each time."""
    n, slots, longest = 5, 7, drafts + 1
    config = layer_config((F32, F32), H=2, HV=4, mtp_step=drafts)
    operator = gdn_jax.gdn_mtp_decode if drafts else gdn_jax.gdn_decode
    step = jax.jit(partial(operator, config=config, layer=LAYER, implementation="mosaic"))
    for seed in range(500):
        rng = np.random.default_rng(seed)
        call = layer_call(seed, config, F32, n, n * (longest + 1) if drafts else n, slots)
        bad = rng.choice([-1, -7, slots, 2**31 - 1], n)
        call["state_indices"] = np.where(rng.random(n) < 0.2, bad, call["state_indices"]).astype(INT)
        if drafts:
            call["query_start_loc"] = starts(*rng.integers(0, longest + 2, n))
            counts = rng.choice([0, longest + 1, 2**31 - 1, -(2**31)], n)
            counts = np.where(rng.random(n) < 0.15, counts, rng.integers(1, longest + 1, n))
            call["num_accepted_tokens"] = counts.astype(INT)
        else:
            call["has_initial_state"] = rng.random(n) < 0.5
        call = poisoned(call)
        out = step(**{name: x for name, x in call.items() if name != "config"})
        # Where k . q of a fresh sequence nearly cancels, the norm enlarges the rounding; a wrong index is a thousand times that.
        check(call, np.asarray(out.o), GDNState(*(np.asarray(x) for x in out.state)), tol=1e-3)
