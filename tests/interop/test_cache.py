"""`GDNCache`: shapes, slots, and the same semantics as `gdn_jax.reset_slots` and `copy_slots`."""

# pyright: reportAttributeAccessIssue=false
# (`GDNState` is annotated with JAX arrays; here it holds tensors)

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gdn_jax import GDNConfig, GDNState, copy_slots, reset_slots
from interop import GDNCache, InPlace, to_jax, to_torch

L, SLOTS = 3, 6


def make(mtp_step: int = 1, fill: bool = True, **fields) -> GDNCache:
    sizes = dict(num_v_heads=4, num_k_heads=2, head_k_dim=8, head_v_dim=16, conv_kernel_dim=4, mtp_step=mtp_step)
    cache = GDNCache(GDNConfig(**(sizes | fields)), L, SLOTS, device="cpu")
    if fill:
        for seed, pool in enumerate(cache.state):
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


def as_jax(cache: GDNCache) -> GDNState:
    return GDNState(*(to_jax(pool, copy=True) for pool in cache.state))


def equal(cache: GDNCache, state: GDNState) -> bool:
    return all(torch.equal(pool, to_torch(array)) for pool, array in zip(cache.state, state))


@pytest.mark.parametrize("mtp_step", [0, 3])
def test_pools(mtp_step: int) -> None:
    cache = make(mtp_step, fill=False, ssm_dtype="float32", tp_size=2)
    config = cache.config
    assert isinstance(cache.state, GDNState)
    assert cache.state.conv.shape == (L, SLOTS, config.conv_dim, 3 + mtp_step)
    assert cache.state.ssm.shape == (L, SLOTS * (mtp_step + 1), 2, 8, 16)
    assert (cache.state.conv.dtype, cache.state.ssm.dtype) == (torch.bfloat16, torch.float32)
    assert not cache.state.conv.any() and not cache.state.ssm.any()
    assert cache.nbytes == sum(pool.numel() * pool.element_size() for pool in cache.state)
    assert cache.device == torch.device("cpu")


def test_layers_are_views() -> None:
    cache = make()
    for i in range(L):
        view = cache.layer(i)
        assert isinstance(view, GDNState)
        assert all(v.data_ptr() == pool[i].data_ptr() and v.is_contiguous() for v, pool in zip(view, cache.state))
    cache.layer(np.int64(1)).conv.fill_(5)
    assert (cache.state.conv[1] == 5).all() and not (cache.state.conv[0] == 5).all()


def test_no_layer_outside() -> None:
    cache = make()
    for i in (-1, L, 2**40):
        with pytest.raises(ValueError, match=f"GDNCache.layer: `i` is {i}, expected 0 to {L - 1}"):
            cache.layer(i)
    for i in (True, 1.0, torch.tensor(1), "0"):
        with pytest.raises(TypeError, match=r"GDNCache.layer: `i` is .*, expected an int"):
            cache.layer(i)


SLOT_LISTS = [[], [0], [3, 1], [5, 5], [-1, 2, 6], [2**40, -(2**33), 4], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("mtp_step", [0, 2])
@pytest.mark.parametrize("slots", SLOT_LISTS, ids=str)
def test_reset_is_reset_slots(slots: list[int], mtp_step: int) -> None:
    cache = make(mtp_step)
    named = [slot for slot in slots if 0 <= slot < SLOTS]
    expected = reset_slots(as_jax(cache), np.array(named, np.int32), cache.config)
    pointers = [pool.data_ptr() for pool in cache.state]
    assert cache.reset(slots) is None
    assert equal(cache, expected)
    assert pointers == [pool.data_ptr() for pool in cache.state]
    for slot in range(SLOTS):
        assert bool(cache.state.conv[:, slot].any()) == (slot not in named)


@pytest.mark.parametrize("mtp_step", [0, 2])
@pytest.mark.parametrize(
    ("src", "dst"),
    [([], []), ([0], [3]), ([0, 1], [1, 0]), ([0, 1, 2], [1, 2, 3]), ([2, 2], [4, 5]), ([1], [1])]
    + [([-1, 0, 6, 1], [2, -1, 3, 4]), ([2**40, 1], [0, 2**33])],
    ids=str,
)
def test_copy_is_copy_slots(src: list[int], dst: list[int], mtp_step: int) -> None:
    cache = make(mtp_step)
    pairs = [(s, d) for s, d in zip(src, dst) if 0 <= s < SLOTS and 0 <= d < SLOTS]
    arrays = np.array(pairs, np.int32).reshape(-1, 2).T
    expected = copy_slots(as_jax(cache), arrays[0], arrays[1], cache.config)
    assert cache.copy(src, dst) is None
    assert equal(cache, expected)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint64], ids=str
)
def test_slots_of_any_integer_dtype(dtype: torch.dtype) -> None:
    expected = make()
    expected.reset([1, 4])
    for slots in (torch.tensor([1, 4]).to(dtype), torch.tensor([1, 9, 4, 9]).to(dtype)[::2]):
        for given in (slots, slots.numpy()):
            cache = make()
            cache.reset(given)
            assert all(torch.equal(a, b) for a, b in zip(cache.state, expected.state))
    cache = make()
    cache.reset(np.array([2**64 - 1, 2**63, 1, 4], np.uint64))
    assert all(torch.equal(a, b) for a, b in zip(cache.state, expected.state))


@pytest.mark.parametrize(
    "slots",
    [[1.0], torch.tensor([True]), np.ones(1, np.float32), torch.ones(1).double(), "ab", b"ab", ["a"], [None], [2**70]],
    ids=repr,
)
def test_slots_that_are_no_integers(slots) -> None:
    cache, before = make(), make()
    with pytest.raises(TypeError, match=r"GDNCache.reset: `slots` has dtype .*, expected integers"):
        cache.reset(slots)
    with pytest.raises(TypeError, match=r"GDNCache.copy: `dst_slots` has dtype"):
        cache.copy([0], slots)
    assert all(torch.equal(a, b) for a, b in zip(cache.state, before.state))


def test_slots_of_wrong_shape() -> None:
    cache, before = make(), make()
    with pytest.raises(ValueError, match=r"`slots` has shape \(1, 1\), expected \(M,\)"):
        cache.reset(torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"`slots` has shape \(\), expected \(M,\)"):
        cache.reset(torch.tensor(1))
    with pytest.raises(ValueError, match="`dst_slots` has 1 slots, expected 2"):
        cache.copy([0, 1], [2])
    with pytest.raises(ValueError, match=r"`slots` is ragged, expected shape \(M,\)"):
        cache.reset([[1], [1, 2]])
    with pytest.raises(ValueError, match=r"GDNCache.reset: `slots` is on device meta"):
        cache.reset(torch.zeros(1, dtype=torch.int32, device="meta"))
    with pytest.raises(TypeError, match="`slots` is of type int, expected"):
        cache.reset(1)
    assert all(torch.equal(a, b) for a, b in zip(cache.state, before.state))


def test_errors_of_the_constructor() -> None:
    config = make().config
    for name, bad in (("num_layers", 0), ("num_slots", -1)):
        with pytest.raises(ValueError, match=f"GDNCache: `{name}` is {bad}, expected at least 1"):
            GDNCache(config, **{"num_layers": 1, "num_slots": 1, name: bad}, device="cpu")
    with pytest.raises(TypeError, match=r"`num_slots` is 1.5"):
        GDNCache(config, 1, 1.5, device="cpu")
    with pytest.raises(TypeError, match="`config` is of type dict, expected a GDNConfig"):
        GDNCache({}, 1, 1, device="cpu")
    with pytest.raises(ValueError, match="GDNCache: `device` is 'foo', expected a torch device"):
        GDNCache(config, 1, 1, device="foo")
    with pytest.raises(TypeError, match=r"GDNCache: `device` is 1.5, expected a torch device"):
        GDNCache(config, 1, 1, device=1.5)
    assert GDNCache(config, 1, 1, device=torch.device("cpu")).device.type == "cpu"


def test_made_in_inference_mode_used_outside() -> None:
    with torch.inference_mode():
        cache = make()
    assert not cache.state.conv.is_inference()
    cache.reset([0])
    assert not cache.state.conv[:, 0].any()


def test_checkpoint() -> None:
    cache, other = make(), make(fill=False)
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    pointers = [pool.data_ptr() for pool in other.state]
    other.load_state_dict(torch.load(file))
    assert all(torch.equal(a, b) for a, b in zip(cache.state, other.state))
    assert pointers == [pool.data_ptr() for pool in other.state]
    moved = cache.to("cpu")
    moved.reset(range(SLOTS))
    assert cache.state.ssm.any() and not moved.state.ssm.any()


def test_a_checkpoint_that_does_not_fit() -> None:
    cache, before = make(), make()
    good = make(fill=False).state_dict()
    with pytest.raises(ValueError, match=r"names are \['conv'\], expected \['conv', 'ssm'\]"):
        cache.load_state_dict({"conv": good["conv"]})
    with pytest.raises(ValueError, match=r"names are \['1', 'conv', 'ssm'\], expected"):
        cache.load_state_dict(good | {1: good["ssm"]})
    with pytest.raises(ValueError, match=r"`state_dict\['ssm'\]` is torch.float32.*expected torch.bfloat16"):
        cache.load_state_dict(good | {"ssm": good["ssm"].float()})
    with pytest.raises(ValueError, match=r"`state_dict\['ssm'\]` is torch.float64.*expected torch.bfloat16"):
        cache.load_state_dict(good | {"ssm": good["ssm"].double()})
    with pytest.raises(ValueError, match=r"`state_dict\['ssm'\]` is torch.bfloat16\[1\]"):
        cache.load_state_dict(good | {"ssm": good["ssm"].new_zeros(1)})
    with pytest.raises(TypeError, match="`state_dict` is of type NoneType, expected a mapping"):
        cache.load_state_dict(None)
    assert all(torch.equal(a, b) for a, b in zip(cache.state, before.state))


def freed(pool: torch.Tensor) -> torch.Tensor:
    pool.untyped_storage().resize_(0)
    return pool


UNREADABLE = {
    "None": (lambda pool: None, TypeError, "is of type NoneType, expected a torch.Tensor"),
    "numpy": (lambda pool: pool.float().numpy(), TypeError, "is of type ndarray, expected a torch.Tensor"),
    "sparse": (lambda pool: pool.to_sparse(), ValueError, "is sparse, nested or quantized"),
    "meta": (lambda pool: pool.to("meta"), ValueError, "is on device meta"),
    "freed": (freed, ValueError, "is freed"),
    "fake": (lambda pool: FakeTensorMode().from_tensor(pool), ValueError, r"is a tensor subclass .*\(FakeTensor\)"),
    "lazy": (lambda pool: torch.nn.UninitializedBuffer(), ValueError, "is uninitialized"),
}


@pytest.mark.parametrize("name", ["conv", "ssm"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_checkpoint_that_cannot_be_read_changes_nothing(kind: str, name: str) -> None:
    make_bad, error, words = UNREADABLE[kind]
    cache, before, good = make(), make(), make(fill=False).state_dict()
    with pytest.raises(error, match=rf"GDNCache.load_state_dict: `state_dict\['{name}'\]` {words}"):
        cache.load_state_dict(good | {name: make_bad(good[name].clone())})
    assert all(torch.equal(a, b) for a, b in zip(cache.state, before.state))


def test_a_checkpoint_with_gradient_or_gaps() -> None:
    cache, other = make(fill=False), make()
    given = {name: pool.mT.contiguous().mT.requires_grad_() for name, pool in other.state_dict().items()}
    cache.load_state_dict(given)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(cache.state, other.state))
    with torch.inference_mode():
        cache.load_state_dict({name: pool * 2 for name, pool in other.state_dict().items()})
    assert torch.equal(cache.state.conv, other.state.conv * 2) and not cache.state.conv.is_inference()


def test_nothing_is_done_under_fake_tensors() -> None:
    cache, before, good = make(), make(), make(fill=False).state_dict()
    for use in (lambda: cache.load_state_dict(good), lambda: cache.reset([0]), lambda: cache.copy([0], [1])):
        with FakeTensorMode(), pytest.raises(ValueError, match=r"GDNCache.\w+: the torch dispatch mode FakeTensorMode"):
            use()
    assert all(torch.equal(a, b) for a, b in zip(cache.state, before.state))


def test_in_place_on_the_whole_and_on_a_layer() -> None:
    cache = make(ssm_dtype="float32", conv_dtype="float32")
    expected = [pool.clone() for pool in cache.state]

    def add(state, x, *, layer):
        return (GDNState(state.conv.at[layer].add(x), state.ssm.at[layer].add(2 * x)),)

    InPlace(add)(cache.state, torch.ones(()), layer=2)
    expected[0][2] += 1
    expected[1][2] += 2
    assert all(torch.equal(a, b) for a, b in zip(cache.state, expected))
    InPlace(lambda state: (jax.tree.map(jnp.zeros_like, state),))(cache.layer(1))
    expected[0][1], expected[1][1] = 0, 0
    assert all(torch.equal(a, b) for a, b in zip(cache.state, expected))
