"""`LinearAttBackend` against `gdn_jax.reference`, driven by stand-ins for the objects that LightLLM hands it."""

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from batches import close, close_rows, same, zero
from torch import Tensor

from gdn_jax import GDNConfig, GDNState, GDNWeights, reference
from interop import LinearAttBackend, lightllm, to_jax

pytestmark = pytest.mark.usefixtures("quick_compiles")

LAYERS, REQUESTS, DUMMY = 3, 6, 5  # the last request slot is the one that LightLLM pads with
HF: dict[str, Any] = dict(
    linear_num_value_heads=8,
    linear_num_key_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=4,
    hidden_act="silu",
)
# Of outputs and states: float32 activations; bfloat16 ones, where a state of one token shows the rounding of its k and v
# by the convolution; what a bfloat16 state pool adds.
F32_TOL, BF16_TOL, POOL_TOL = (1e-5, 1e-5), (6e-3, 6e-3), 3e-3


def namespace(**attributes: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**attributes)


class ReqManager:
    """Per-layer views of one buffer that holds both caches of all layers, filled with noise."""

    def __init__(self, config: GDNConfig, device: str = "cpu") -> None:
        shapes = (
            (getattr(torch, config.conv_dtype), (REQUESTS, config.conv_dim, config.conv_state_len)),
            (
                getattr(torch, config.ssm_dtype),
                (REQUESTS * (config.mtp_step + 1), config.tp_num_v_heads, config.head_k_dim, config.head_v_dim),
            ),
        )
        sizes = [-(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64 for dtype, shape in shapes]
        self.buffer = torch.zeros(LAYERS * sum(sizes) + 64, dtype=torch.uint8, device=device)
        at = -self.buffer.data_ptr() % 64
        self.caches: list[tuple[Tensor, ...]] = []
        for layer in range(LAYERS):
            views = []
            for size, (dtype, shape) in zip(sizes, shapes):
                view = self.buffer[at : at + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
                view.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(layer + size)))
                views.append(view)
                at += size
            self.caches.append(tuple(views))
        self.req_to_mtp_state_index = torch.zeros(REQUESTS, dtype=torch.int32, device=device)

    def get_mamba_cache(self, layer: int) -> tuple[Tensor, ...]:
        return self.caches[layer]


class Driver:
    """A model with random weights, its caches, and batches as LightLLM makes them; each call is checked."""

    def __init__(
        self,
        *,
        mtp_step: int = 0,
        tp: int = 1,
        ssm: str = "float32",
        data: str = "float32",
        older: bool = False,
        device: str = "cpu",
    ) -> None:
        self.device, self.older = device, older
        model = namespace(config=HF, tp_world_size_=tp)
        self.backend = LinearAttBackend(model, mtp_step=mtp_step, linear_att_ssm_data_type=ssm, data_type=data)
        self.config = self.backend.config
        self.manager = ReqManager(self.config, device)
        self.generator = torch.Generator().manual_seed(7)
        self.dtype = getattr(torch, data)
        D, HV = self.config.conv_dim, self.config.tp_num_v_heads
        self.weights = [self.noise(D, 4) / 2, self.noise(D) / 8, self.noise(HV).float(), self.noise(HV).float()]
        tol = F32_TOL if data == "float32" else BF16_TOL
        self.tolerances = [t + (POOL_TOL if ssm == "bfloat16" else 0) for t in tol]

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def mixed(self, tokens: int) -> Tensor:
        return self.noise(tokens, self.backend.tp_qkvz_dim + self.backend.tp_ba_dim)

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def entries(self, mixed: Tensor, layer: int = 1, **more: Any) -> dict[str, Any]:
        """The dict of `att_control`; weights are parameters, as those of a loaded model may be."""
        conv, bias, a_log, dt_bias = self.weights
        weight = namespace(
            linear_conv1d=namespace(mm_param=namespace(weight=torch.nn.Parameter(conv)), bias=bias),
            linear_A_log=namespace(weight=torch.nn.Parameter(a_log)),
            linear_dt_bias=namespace(weight=dt_bias),
        )
        return dict(mixed_qkvzba=mixed, layer_weight=weight, layer_num=layer, **more)

    def arrays(self, tensors: Sequence[Tensor]) -> list[np.ndarray]:
        """Copies as numpy arrays, bfloat16 too."""
        return [np.array(to_jax(tensor, copy=True)) for tensor in tensors]

    def check(
        self, function: Any, call: Any, mixed: Tensor, slots: Sequence[int], unchecked: Sequence[int] = (), **batch: Any
    ) -> Tensor:
        """Runs `call(entries)` on layer 1 and compares everything with `function`, but the rows of `unchecked` slots."""
        before = [self.arrays(caches) for caches in self.manager.caches]
        pointers = [cache.data_ptr() for cache in self.manager.caches[1]]
        weights: Any = GDNWeights(*self.arrays(self.weights))
        state: Any = GDNState(*before[1])
        want = function(
            weights, state, *self.arrays([mixed]), config=self.config, state_indices=np.array(slots), **batch
        )
        z_out: dict[str, Tensor] = {}
        if self.older:
            o = call(self.entries(mixed, z_out=z_out))
            z = z_out["z"]
        else:
            o, z = call(self.entries(mixed, z_out=None))
        after = [self.arrays(caches) for caches in self.manager.caches]
        assert [cache.data_ptr() for cache in self.manager.caches[1]] == pointers

        # Of the other layers every bit is as before, of this layer every row that no sequence names.
        for layer in (0, 2):
            for cache, was in zip(after[layer], before[layer]):
                same(cache, was)
        length = self.config.mtp_step + 1
        rows = list(slots), [slot * length + j for slot in slots for j in range(length)]
        dummy = list(unchecked), [slot * length + j for slot in unchecked for j in range(length)]
        for cache, now, was, touched, free in zip(after[1], want.state, before[1], rows, dummy):
            others = np.setdiff1d(np.arange(len(was)), free)
            touched = [row for row, slot in enumerate(others) if slot in touched]
            close_rows(cache[others], np.asarray(now)[others], was[others], touched, self.tolerances[1])
        valid = np.repeat(~np.isin(slots, unchecked), np.diff(batch.get("query_start_loc", np.arange(len(slots) + 1))))
        assert o.dtype == z.dtype == mixed.dtype and tuple(z.shape) == want.z.shape
        assert o.is_contiguous() and z.is_contiguous()
        (got_o, got_z) = self.arrays([o.reshape(z.shape), z])
        same(got_z, self.arrays([gdn_z(self.config, mixed)])[0])
        close(got_o[: len(valid)][valid], np.asarray(want.o)[: len(valid)][valid], self.tolerances[0])
        zero(got_o[len(valid) :])
        return o

    def prefill(self, slots: Sequence[int], lengths: Sequence[int], ready: Sequence[int], padding: int = 0) -> None:
        starts = np.cumsum([0, *lengths])
        state = self.backend.create_att_prefill_state(
            namespace(
                b_req_idx=self.ints(*slots),
                b1_cu_q_seq_len=self.ints(*starts),
                b_ready_cache_len=self.ints(*ready),
                req_manager=self.manager,
                batch_size=len(slots),
            )
        )
        state.init_state()

        def call(entries: dict[str, Any]) -> Any:
            control = namespace(linear_att_prefill=True, linear_att_prefill_dict=entries)
            return state.prefill_att(None, None, None, control, alloc_func=torch.empty)

        has_state = np.array(ready) > 0
        mixed = self.mixed(int(starts[-1]) + padding)
        o = self.check(reference.gdn_prefill, call, mixed, slots, query_start_loc=starts, has_initial_state=has_state)
        assert o.shape == (1, len(mixed), self.backend.tp_num_v_heads, self.backend.head_v_dim)

    def decode_state(self, slots: Sequence[int], repeat: int = 1) -> Any:
        rows = np.repeat(np.array(slots), repeat)
        batch = namespace(b_req_idx=self.ints(*rows), req_manager=self.manager, batch_size=len(rows))
        state = self.backend.create_att_decode_state(batch)
        state.init_state()
        return state

    def decode(self, slots: Sequence[int], padding: int = 0) -> None:
        """One step of `slots` and of `padding` sequences on the dummy slot."""
        given = [*slots, *[DUMMY] * padding]
        state = self.decode_state(given)
        assert torch.equal(state.b_conv_buffer_idx, self.ints(*given))
        assert torch.equal(state.b_ssm_buffer_idx, self.ints(*given))

        def call(entries: dict[str, Any]) -> Any:
            return state.decode_att(None, None, None, namespace(linear_att_decode=True, linear_att_decode_dict=entries))

        o = self.check(reference.gdn_decode, call, self.mixed(len(given)), given, [DUMMY] if padding > 1 else [])
        assert o.shape == (len(given), 1, self.backend.tp_num_v_heads, self.backend.head_v_dim)

    def verify(self, slots: Sequence[int], accepted: Sequence[int], padding: int = 0) -> None:
        """One verify step; LightLLM keeps the index of the accepted state, which is one less than the count."""
        given, length = [*slots, *[DUMMY] * padding], self.config.mtp_step + 1
        for slot, count in zip(slots, accepted):
            self.manager.req_to_mtp_state_index[slot] = count - 1
        state = self.decode_state(given, length)
        counts = np.array([*accepted, *[int(self.manager.req_to_mtp_state_index[DUMMY]) + 1] * padding])
        assert torch.equal(state.b1_mtp_cu_q_seq_len, self.ints(*range(0, len(given) * length + 1, length)))
        assert state.b1_mtp_cu_q_seq_len.dtype == torch.int32
        assert torch.equal(state.b_conv_buffer_idx, self.ints(*given))
        rows = np.array(given)[:, None] * length + np.arange(length)
        np.testing.assert_array_equal(state.b_ssm_buffer_idx.cpu().numpy(), rows)
        np.testing.assert_array_equal(state.b_num_accepted_tokens.cpu().numpy(), counts)

        def call(entries: dict[str, Any]) -> Any:
            return state.decode_att(None, None, None, namespace(linear_att_decode=True, linear_att_decode_dict=entries))

        mixed = self.mixed(len(given) * length)
        o = self.check(
            reference.gdn_mtp_decode,
            call,
            mixed,
            given,
            [DUMMY] if padding > 1 else [],
            num_accepted_tokens=counts,
            query_start_loc=np.arange(len(given) + 1) * length,
        )
        assert o.shape == (1, len(mixed), self.backend.tp_num_v_heads, self.backend.head_v_dim)


def gdn_z(config: GDNConfig, mixed: Tensor) -> Tensor:
    """The gate's part of the projections."""
    z = mixed[:, config.conv_dim : config.qkvz_dim]
    return z.reshape(len(mixed), config.tp_num_v_heads, config.head_v_dim)


DTYPES = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]  # of the ssm states, of all else


@pytest.mark.parametrize("older", [True, False], ids=["z_out", "tuple"])
@pytest.mark.parametrize(("ssm", "data"), DTYPES)
def test_plain_serving(ssm: str, data: str, older: bool, device: str = "cpu") -> None:
    """Prompts, one of them in two pieces, then decode steps whose batch grows, shrinks and is padded."""
    driver = Driver(ssm=ssm, data=data, older=older, device=device)
    driver.prefill([3, 0, 4], [5, 1, 70], [0, 0, 0])
    driver.prefill([4, 1], [9, 2], [70, 0], padding=3)
    driver.decode([3, 0, 4, 1])
    driver.decode([1, 4, 3])
    driver.decode([0, 4], padding=2)
    driver.decode([0, 4], padding=1)
    driver.prefill([0, 2], [1, 3], [3, 0])
    driver.decode([2])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("ssm", "data"), [DTYPES[0], DTYPES[2]])
def test_speculative_serving(ssm: str, data: str, tp: int, device: str = "cpu") -> None:
    """Prefill, verify steps with every accepted count, in one batch and after each other, dummies between."""
    driver = Driver(mtp_step=3, tp=tp, ssm=ssm, data=data, older=tp == 2, device=device)
    driver.prefill([2, 0, 4, 3], [6, 3, 1, 20], [0, 0, 0, 0])
    driver.verify([2, 0, 4, 3], [1, 1, 1, 1])
    driver.verify([2, 0, 4, 3], [1, 2, 3, 4])
    driver.verify([3, 4, 0], [3, 4, 1], padding=1)
    driver.verify([0, 2], [2, 4], padding=3)
    driver.manager.req_to_mtp_state_index[DUMMY] = -1  # a count of 0: padding
    driver.verify([0, 2], [4, 1], padding=3)
    driver.verify([4], [0])
    driver.verify([4], [5])


@pytest.mark.gpu
@pytest.mark.parametrize(("ssm", "data"), DTYPES)
def test_serving_on_a_gpu(ssm: str, data: str) -> None:
    test_plain_serving(ssm, data, older=False, device="cuda")
    test_speculative_serving(ssm, data, tp=2, device="cuda")


def test_sizes() -> None:
    backend = Driver(mtp_step=2, tp=2).backend
    assert (backend.num_v_heads, backend.num_k_heads, backend.head_k_dim, backend.head_v_dim) == (8, 4, 8, 6)
    assert (backend.key_dim, backend.value_dim) == (32, 48)
    assert (backend.tp_num_v_heads, backend.tp_num_k_heads, backend.num_v_heads_per_k_head) == (4, 2, 2)
    assert (backend.tp_key_dim, backend.tp_value_dim) == (16, 24)
    assert (backend.tp_qkvz_dim, backend.tp_ba_dim) == (2 * 16 + 2 * 24, 8)
    assert (backend.conv_kernel_dim, backend.activation, backend.mtp_step) == (4, "silu", 2)
    assert isinstance(backend.config, GDNConfig) and backend.config.tp_size == 2
    assert backend.model.tp_world_size_ == 2


@pytest.mark.parametrize(
    ("ssm", "data", "ssm_dtype", "conv_dtype", "converts"),
    [
        ("bfloat16", None, torch.bfloat16, "bfloat16", False),
        (torch.float32, None, torch.float32, "bfloat16", True),
        ("float32", torch.float32, torch.float32, "float32", False),
        (torch.bfloat16, "float16", torch.bfloat16, "float16", True),
        ("bfloat16", "fp16", torch.bfloat16, "float16", True),
        ("float32", "bf16", torch.float32, "bfloat16", True),
    ],
)
def test_dtypes(ssm: Any, data: Any, ssm_dtype: torch.dtype, conv_dtype: str, converts: bool) -> None:
    # `dtype` in the model's configuration does not decide: LightLLM's start arguments do.
    model = namespace(config=HF | {"dtype": "float32"}, tp_world_size_=1)
    backend = LinearAttBackend(model, linear_att_ssm_data_type=ssm, data_type=data)
    assert (backend.ssm_state_dtype, backend.config.conv_dtype) == (ssm_dtype, conv_dtype)
    assert backend.needs_ssm_dtype_conversion is converts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(linear_att_ssm_data_type="float16"), "`linear_att_ssm_data_type` is 'float16', expected one of"),
        (dict(linear_att_ssm_data_type=None), "`linear_att_ssm_data_type` is None"),
        (dict(data_type="int8"), "`conv_dtype` is 'int8'"),
        (dict(mtp_step=-1), "`mtp_step` is -1, expected at least 0"),
        (dict(config=HF | {"linear_num_value_heads": 6}), "`num_v_heads` is 6, expected a multiple of num_k_heads=4"),
        (dict(config={k: v for k, v in HF.items() if k != "hidden_act"}), "no key 'hidden_act'"),
        (dict(tp_world_size_=3), "expected a multiple of tp_size=3"),
    ],
)
def test_refused_backends(changes: dict[str, Any], message: str) -> None:
    model = namespace(config=changes.pop("config", HF), tp_world_size_=changes.pop("tp_world_size_", 1))
    with pytest.raises(ValueError, match=message):
        LinearAttBackend(model, **changes)


def test_a_nested_configuration() -> None:
    backend = LinearAttBackend(namespace(config={"text_config": HF, "model_type": "qwen3_5"}, tp_world_size_=4))
    assert backend.tp_num_v_heads == 2


@pytest.mark.parametrize("mtp_step", [0, 2])
def test_a_draft_model_reads_no_batch(mtp_step: int) -> None:
    model = namespace(config=HF, tp_world_size_=1, is_mtp_draft_model=True)
    backend = LinearAttBackend(model, mtp_step=mtp_step)
    for state in (backend.create_att_prefill_state(None), backend.create_att_decode_state(None)):
        state.init_state()
        assert state.backend is backend and state.infer_state is None
        assert state.b_conv_buffer_idx is None and state.b_ssm_buffer_idx is None
    assert backend.create_att_decode_state(None).b_num_accepted_tokens is None


def test_the_batch_is_read_anew() -> None:
    driver = Driver(mtp_step=1)
    batch = namespace(b_req_idx=driver.ints(2, 2), req_manager=driver.manager, batch_size=2)
    state = driver.backend.create_att_decode_state(batch)
    state.init_state()
    assert state.b_conv_buffer_idx.tolist() == [2]
    batch.b_req_idx, batch.batch_size = driver.ints(2, 2, DUMMY, DUMMY), 4
    state.init_state()
    assert state.b_conv_buffer_idx.tolist() == [2, DUMMY] and state.b1_mtp_cu_q_seq_len.tolist() == [0, 2, 4]
    prefill = driver.backend.create_att_prefill_state(namespace(b_req_idx=driver.ints(3, 1)))
    prefill.init_state()
    assert prefill.b_conv_buffer_idx.tolist() == [3, 1] and prefill.b_ssm_buffer_idx.tolist() == [6, 2]


def test_a_verify_batch_of_odd_size() -> None:
    driver = Driver(mtp_step=2)
    with pytest.raises(ValueError, match=r"`infer_state.batch_size` is 4, expected a multiple of mtp_step \+ 1 = 3"):
        driver.decode_state([1, 1, 1, 2])


def control(phase: str, entries: Any, on: Any = True) -> types.SimpleNamespace:
    return namespace(**{f"linear_att_{phase}": on, f"linear_att_{phase}_dict": entries})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda d, e: control("decode", e, on=False),
            ValueError,
            "`att_control.linear_att_decode` is False, expected True",
        ),
        (lambda d, e: control("prefill", e), ValueError, "`att_control.linear_att_decode` is None"),
        (lambda d, e: control("decode", None), TypeError, "`att_control.linear_att_decode_dict` is of type NoneType"),
        (lambda d, e: control("decode", {"layer_num": 1}), ValueError, "has no 'mixed_qkvzba', only"),
        (lambda d, e: control("decode", e | {"mixed_qkvzba": [1]}), TypeError, "`mixed_qkvzba` is of type list"),
        (
            lambda d, e: control("decode", e | {"mixed_qkvzba": d.mixed(3)}),
            ValueError,
            "has 3 tokens, expected 1 for each",
        ),
        (
            lambda d, e: control("decode", e | {"mixed_qkvzba": d.mixed(2)[:, 1:]}),
            ValueError,
            r"`mixed_qkvzba` has shape \(2, \d+\), expected \(num_tokens, tp_qkvz_dim",
        ),
    ],
)
def test_refused_calls_touch_nothing(change: Any, error: type[Exception], message: str) -> None:
    driver = Driver()
    before = driver.manager.buffer.clone()
    state = driver.decode_state([1, 2])
    with pytest.raises(error, match=f"decode_att: .*{message}"):
        state.decode_att(None, None, None, change(driver, driver.entries(driver.mixed(2))))
    assert torch.equal(driver.manager.buffer, before)


def test_a_state_without_a_batch() -> None:
    driver = Driver()
    for phase, state in (
        ("prefill", driver.backend.create_att_prefill_state(namespace())),
        ("decode", driver.backend.create_att_decode_state(namespace())),
    ):
        with pytest.raises(ValueError, match=f"{phase}_att: .*`init_state\\(\\)`"):
            getattr(state, f"{phase}_att")(None, None, None, control(phase, driver.entries(driver.mixed(1))))


def test_caches_that_overlap_are_refused() -> None:
    """Two views of one buffer are judged by their bytes: side by side they are fine (every other test), not on top."""
    driver = Driver()
    conv, _ = driver.manager.caches[1]
    shape = (REQUESTS, 8, 8, 6)
    start = (conv.data_ptr() - driver.manager.buffer.data_ptr()) // 4
    ssm = driver.manager.buffer.view(torch.float32)[start : start + torch.Size(shape).numel()].view(shape)
    driver.manager.caches[1] = (conv, ssm)
    before = driver.manager.buffer.clone()
    state = driver.decode_state([1])
    with pytest.raises(ValueError, match=r"caches.* share memory"):
        state.decode_att(None, None, None, control("decode", driver.entries(driver.mixed(1))))
    assert torch.equal(driver.manager.buffer, before)


def test_batches_share_programs() -> None:
    """Padded to powers of two inside: lengths of a prompt and sizes of a batch do not each compile a program."""
    driver = Driver(ssm="float32", data="float32")
    calls = lightllm._calls(driver.config)
    driver.prefill([1, 2], [30, 20], [0, 0])
    driver.decode([0, 1, 2])
    known = {phase: len(call._executables) for phase, call in calls.items()}
    driver.prefill([3, 0], [1, 40], [0, 4])
    driver.prefill([3, 0], [9, 50], [0, 4])
    driver.decode([0, 1, 2, 3])
    assert {phase: len(call._executables) for phase, call in calls.items()} == known


@pytest.mark.gpu
def test_a_capturing_stream_is_refused() -> None:
    driver = Driver(device="cuda")
    driver.decode([1, 2])
    state, entries = driver.decode_state([1, 2]), driver.entries(driver.mixed(2))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"capturing a CUDA graph.*CUDA graphs off"), torch.cuda.graph(graph):
        state.decode_att(None, None, None, control("decode", entries))
