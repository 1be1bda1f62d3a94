"""The benchmarks: the timer's order, the reports, and the CPU suite on tiny sizes. No test looks at how long anything takes."""

import argparse
import csv
import itertools
import math
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import jax
import torch

from bench import __main__ as command
from bench import cpu, decode, gpu, interop, peers, prefill, report
from bench.report import Table

pytestmark = pytest.mark.usefixtures("quick_compiles")

TABLE = Table("times", ["shape", "ms", "target"], [["1x8", 1.23456, ">= 2"], [64, float("inf"), ""]])


def test_seconds_takes_turns_after_a_round_that_does_not_count() -> None:
    order: list[str] = []
    times = report.seconds(3, lambda: order.append("a"), lambda: order.append("b"))
    assert order == ["a", "b"] * 4
    assert len(times) == 2 and all(time >= 0 for time in times)


def test_seconds_is_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 1, 10, 13, 20, 22])  # three calls: 1, 3 and 2 seconds
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(clock))
    assert report.seconds(3, lambda: None) == [2]


def test_seconds_waits_for_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(report.jax, "block_until_ready", waited.append)
    report.seconds(2, lambda: 7)
    assert waited == [7, 7, 7]


def test_markdown() -> None:
    assert report.markdown(TABLE).splitlines() == [
        *("**times**", "", "| shape | ms | target |", "|---|---|---|", "| 1x8 | 1.23 | >= 2 |", "| 64 | inf |  |")
    ]


def test_write_makes_a_page_and_a_file_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    report.write(folder, "cpu", "the machine", [TABLE, TABLE._replace(title="again")])
    assert sorted(path.name for path in folder.iterdir()) == ["cpu-1.csv", "cpu-2.csv", "cpu.md"]
    text = (folder / "cpu.md").read_text(encoding="utf-8")
    assert text.startswith("# bench: cpu\n\nthe machine\n\n**times**") and "**again**" in text and text.endswith("|\n")
    with open(folder / "cpu-1.csv", newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["shape", "ms", "target"], ["1x8", "1.23", ">= 2"], ["64", "inf", ""]]


def test_machine_says_what_was_run_where() -> None:
    line = report.machine("python -m bench")
    assert line.startswith("`python -m bench`, 2") and f"jax {jax.__version__}" in line and "torch" in line
    assert "\n" not in line


# ---------------------------------------------------------------------------------------------------------- the suite


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A layer so small that its programs take no time; puts torch's threads back afterwards."""
    threads = torch.get_num_threads()
    for name, value in dict(H=1, HV=2, K=8, V=8, FLOP_PER_TOKEN=1e3).items():
        monkeypatch.setattr(cpu, name, value)
    monkeypatch.setattr(cpu, "PREFILL", {"1x20": (20,), "ragged": (3, 1, 9)})
    monkeypatch.setattr(cpu, "TARGETS", {"1x20": 1.5, "ragged": 3.0, 1: 1.25, 8: 1.25, 64: 3.0})
    yield
    torch.set_num_threads(threads)


def test_the_suite_fills_its_tables(tiny: None) -> None:
    tables = cpu.suite(1)
    assert [len(table.rows) for table in tables] == [2, 3, 2]
    for table in tables:
        for row in table.rows:
            assert len(row) == len(table.columns), table.title
            numbers = [value for value in row if not isinstance(value, str)]
            assert numbers and all(math.isfinite(value) and value > 0 for value in numbers), row
        assert report.markdown(table).count("\n") == 3 + len(table.rows)
    prefill, decode, mixed = tables
    assert [row[0] for row in prefill.rows] == ["1x20", "ragged"] and [row[0] for row in decode.rows] == [1, 8, 64]
    for row in [*prefill.rows, *decode.rows]:
        assert math.isclose(row[3], row[2] / row[1]) and row[4].startswith(">= ")
    assert mixed.rows[0][2] == 1.0 and math.isclose(mixed.rows[1][2], mixed.rows[1][1] / mixed.rows[0][1])


def test_a_call_goes_on_in_the_same_memory(tiny: None) -> None:
    call = cpu.prefill_call((5, 2))
    pointer = call.pool.unsafe_buffer_pointer()
    first = np.asarray(call())
    assert not np.array_equal(first, np.asarray(call()))  # the state goes from call to call
    assert call.pool.unsafe_buffer_pointer() == pointer
    assert call.temporary_bytes > 0


@pytest.mark.parametrize("decode", [False, True])
def test_the_peer_computes_the_same(tiny: None, decode: bool) -> None:
    lengths = (1, 1, 1) if decode else (4, 1, 7)
    arrays = cpu.inputs(sum(lengths))
    state = np.zeros((3, 2, 8, 8), np.float32)
    theirs = peers.huggingface_rule(arrays, lengths, state, decode=decode)
    assert theirs().shape[:2] == (3, max(lengths))
    rule = cpu.gdn_jax.recurrent_gated_delta_rule if decode else cpu.gdn_jax.chunk_gated_delta_rule
    starts = {} if decode else {"query_start_loc": np.cumsum([0, *lengths]).astype(np.int32)}
    ours = rule(*arrays, ssm_state=state, **starts)[0]
    cpu._close(ours, theirs(), lengths)
    with pytest.raises(RuntimeError, match="differ from Hugging Face's by"):
        cpu._close(1.01 * ours, theirs(), lengths)
    with pytest.raises(RuntimeError, match="nan"):
        cpu._close(np.nan * ours, theirs(), lengths)


def test_the_copy_copies() -> None:
    assert peers.copy((2, 3))() is None


def test_the_interop_suite_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(H=1, HV=2, K=8, V=8, LAYERS=3, SLOTS=4, REQUESTS=2, STEPS=4).items():
        monkeypatch.setattr(interop, name, value)
    time, copies = interop.suite(1)
    for table in (time, copies):
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert [row[0] for row in time.rows] == ["1 cache, 1 argument, a number", "2 caches, 6 arguments, a number"]
    for _, alone, guard, imported, ran, exported, everything, over, target in time.rows:
        assert target in ("<= 100", "<= 150") and all(value > 0 for value in (alone, guard, imported, ran, exported))
        assert everything >= max(guard, imported, ran, exported) and over == everything - alone
    on_gpu = torch.cuda.is_available()
    assert [row[:2] for row in copies.rows] == [
        [f"{steps} x {step}", 3 * steps] for step, steps in (("decode", 4 if on_gpu else 3), ("verify S=3", 2))
    ]
    for row in copies.rows:
        # No pool moves and nothing is traced again; on a CPU both caches of every call are copied back.
        assert row[2:6] == [0, 0 if on_gpu else 2, 0, 0]


def test_a_call_that_is_timed_does_the_same_and_counts() -> None:
    call = interop.Timed(lambda cache, x: (cache + x, x * 2))
    cache = torch.zeros(4)
    for x in (torch.ones(4), torch.ones(4), torch.ones(1)):
        assert torch.equal(call(cache, x), x * 2)
    assert torch.equal(cache, torch.full((4,), 3.0)) and (call.traces, call.programs) == (2, 2)
    assert set(call.times) == {"all", "guard", *interop.PHASES}


# ---------------------------------------------------------------------------------------------------- decode and mtp


@pytest.fixture
def tiny_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step so small that its programs take no time, and CUPTI's part played by a list: 3 µs a kernel of ours, 12 another."""
    sizes = dict(H=1, HV=2, K=16, V=16, LAYERS=3, REQUESTS=(1, 4), DRAFTS=(3,), PEER_BYTES=2**13)
    for name, value in sizes.items():
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(gpu, "COPIED", 2**12)
    monkeypatch.setattr(gpu, "ROWS", 1)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def kernels(call: Any, wait: Any, repeat: int) -> list[tuple[str, float]]:
        call()
        layers = getattr(call, "layers", 0)
        names = ("gdn_recurrent", "gdn_mtp", "gdn_decode") if layers else ()
        return [(name, 3.0) for name in names for _ in range(layers * repeat)] + [("other", 12.0)]

    monkeypatch.setattr(gpu, "kernels", kernels)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """A stand-in for flash-linear-attention, by Hugging Face's torch code; notes the shapes of the states it is given."""
    given: list[tuple[int, ...]] = []

    def rule(q: Any, k: Any, v: Any, *, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, **options: Any) -> Any:
        assert options == dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
        given.append(tuple(initial_state.shape))
        starts = range(q.shape[0] + 1) if cu_seqlens is None else cu_seqlens.tolist()
        tokens = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, g, beta)]
        outputs = []
        for n, (start, end) in enumerate(itertools.pairwise(starts)):
            one = [x[None, start:end].float() for x in tokens]
            one[:2] = [x.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for x in one[:2]]
            state = initial_state[n : n + 1].float()
            outputs.append(peers.hf.torch_recurrent_gated_delta_rule(*one, state, True, True)[0][0])
        o = torch.cat(outputs).to(v.dtype)
        return (o[None] if cu_seqlens is not None else o[:, None]), None

    module = types.ModuleType("fla.ops.gated_delta_rule")
    vars(module)["fused_recurrent_gated_delta_rule"] = rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name == "fla" or None)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: "0.0")
    return given


@pytest.mark.parametrize("name", ["decode", "mtp"])
def test_the_gpu_suites_fill_their_tables(
    name: str, tiny_step: None, fla: list[tuple[int, ...]], tmp_path: Path
) -> None:
    rules, layers, forms = decode.SUITES[name](1)
    for table in (rules, layers, forms):
        assert all(len(row) == len(table.columns) for row in table.rows)
    drafts = [3] if name == "mtp" else [0]
    keys = [(states, s, n) for states in decode.STATES for s in drafts for n in (1, 4)]
    for table in (rules, layers):
        at = {column: number for number, column in enumerate(table.columns)}
        assert [(row[0], row[at["S"]] if "S" in at else 0, row[at["N"]]) for row in table.rows] == keys
        for row, (states, s, n) in zip(table.rows, keys):
            moved = n * 2 * 16 * 16 * (2 if states == "bfloat16" else 4) * (s + 2)
            assert row[at["layers"]] == 3 and row[at["µs"]] == 3
            assert math.isclose(row[at["GB/s of states"]], moved / 3e-6 / 1e9)
            assert math.isclose(row[at[decode.SHARE]], 100 * moved / (2 * 2**12))
            assert row[at["other kernels a layer"]] == 2 + 1 / 3
            assert math.isclose(row[at["over the kernel µs"]], row[at["wall µs a layer"]] - 3)
    assert rules.columns[-2:] == ["fla 0.0 µs", "fla 0.0 over ours"]
    assert all(row[-1] == row[-2] / 3 and row[-2] > 0 for row in rules.rows)
    assert all(row[layers.columns.index("over the rule")] == 1 for row in layers.rows)
    assert len(forms.rows) == 3 * len(keys)  # three forms of two operators, at the first of two sizes
    assert set(fla) == {(n, 2, 16, 16) for n in (1, 4, 8)}
    report.plot(tmp_path / "plot.svg", [rules, layers, forms], "N", decode.SHARE)
    drawn = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert drawn.count('id="axes_') == 2  # one panel for each table that has both columns


def test_a_wrong_peer_is_not_timed(
    tiny_step: None, fla: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["fla.ops.gated_delta_rule"]
    right = module.fused_recurrent_gated_delta_rule
    monkeypatch.setattr(
        module, "fused_recurrent_gated_delta_rule", lambda *args, **options: (1.1 * right(*args, **options)[0], None)
    )
    with pytest.raises(RuntimeError, match=r"fla 0.0 differs .* \(bfloat16 states, S=0\)"):
        decode.SUITES["decode"](1)


def test_flashinfer_is_given_what_it_documents(tiny_step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = decode.Step(4, "float32"), []

    def kernel(q: Any, k: Any, v: Any, state: Any, A_log: Any, a: Any, dt_bias: Any, b: Any) -> Any:
        seen.extend(tuple(x.shape) for x in (q, k, v, state, A_log, a, dt_bias, b))
        assert torch.equal(state[0, 0], torch.arange(256.0).reshape(16, 16).T)
        return v, state

    module = types.ModuleType("flashinfer.gdn_decode")
    vars(module)["gated_delta_rule_decode_pretranspose"] = kernel
    monkeypatch.setitem(sys.modules, module.__name__, module)
    call: Any = peers.flashinfer(step)
    assert call(torch.arange(256.0).reshape(16, 16).expand(4, 2, 16, 16)).shape == (4, 2, 16)
    assert seen == [(4, 1, 1, 16), (4, 1, 1, 16), (4, 1, 2, 16), (4, 2, 16, 16), (2,), (4, 1, 2), (2,), (4, 1, 2)]
    assert peers.flashinfer(decode.Step(4, "float32", 3)) is None


@pytest.mark.parametrize("form", [{}, {"scan": True}, {"turns": 2}], ids=str)
def test_a_chain_goes_through_its_layers(form: dict[str, Any]) -> None:
    def step(state: jax.Array, layer: Any, x: jax.Array) -> Any:
        return x + state[layer].sum(), state.at[layer].add(x)

    turns = form.get("turns", 1)
    chain = gpu.Chain(step, jax.numpy.zeros((3, 2)), (np.ones(2, np.float32),), 3, **form)
    assert chain().tolist() == [2 * turns - 1] * 2 and chain().tolist() == [4 * turns - 1] * 2
    assert chain.state.tolist() == [[2 * turns] * 2] * 3 and chain.layers == 3 * turns


@pytest.mark.parametrize("suite", ["mtp", "prefill"])
def test_the_gpu_suites_want_a_gpu(suite: str) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="kernels on a GPU"):
        command.SUITES[suite](1)


# ------------------------------------------------------------------------------------------------------------ prefill


@pytest.fixture
def tiny_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches so small that their programs take no time, two sets each; 3 ms a call by CUPTI, and no CUDA graphs."""
    sizes = dict(HEADS=((1, 2),), K=16, V=16, TURN_BYTES=1, TURN_SECONDS=1e-2, ROUNDS=1, SAMPLE=9)
    for name, value in sizes.items():
        monkeypatch.setattr(prefill, name, value)
    monkeypatch.setattr(prefill, "SHAPES", {"2x5": [5, 5], "ragged": [3, 1, 9, 2]})
    monkeypatch.setattr(prefill, "TARGETS", {"2x5": (0.25, 0.5)})
    monkeypatch.setattr(gpu, "COPIED", 2**12)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def kernels(call: Any, wait: Any, repeat: int) -> list[tuple[str, float]]:
        call()
        return [("kernel", 3000.0)] * (2 * repeat)

    monkeypatch.setattr(gpu, "kernels", kernels)
    monkeypatch.setattr(prefill, "graph", lambda calls, turns: lambda: [call() for call in calls])


@pytest.fixture
def known_peers(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """Stand-ins for the peers of a prefill, by Hugging Face's torch code, that look at what they are given."""

    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any, starts: Any, norm: bool = False) -> Any:
        if not norm:
            for x in (q, k):
                assert torch.allclose(x.float().norm(dim=-1), torch.ones(()), atol=1e-2)
        results = []
        for n, (start, end) in enumerate(itertools.pairwise(starts)):
            one = [x[None, start:end].float() for x in (q, k, v, g, beta)]
            one[:2] = [x.repeat_interleave(v.shape[1] // k.shape[1], dim=2) for x in one[:2]]
            results.append(peers.hf.torch_recurrent_gated_delta_rule(*one, states[n : n + 1].clone(), True, norm))
        outputs, final = zip(*results)
        return torch.cat(outputs, 1)[0].to(v.dtype), torch.cat(final)

    def like_fla(
        q: Any, k: Any, v: Any, *, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, **options: Any
    ) -> Any:
        assert options.pop("output_final_state") and (cu_seqlens is None or cu_seqlens.dtype == torch.int64)
        n, length = v.shape[:2]
        assert cu_seqlens is None or n == 1
        starts = [i * length for i in range(n + 1)] if cu_seqlens is None else cu_seqlens.tolist()
        tokens = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
        o, final = rule(*tokens, initial_state, starts, options.pop("use_qk_l2norm_in_kernel", False))
        assert not options
        return o.reshape(v.shape), final

    def like_jla(kind: str, q: Any, k: Any, v: Any, *, initial_state: Any, **options: Any) -> Any:
        assert kind == "gated_deltanet" and options.pop("impl") == "mosaic_gpu" and options.pop("output_final_state")
        return prefill.gdn_jax.chunk_gated_delta_rule(q, k, v, **options, ssm_state=initial_state)

    def like_flashinfer(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any, states: Any, output_final_state: bool, **options: Any
    ) -> Any:
        assert scale is None and output_final_state and options["output_state"].shape == states.shape
        o, final = rule(q, k, v, g.log(), beta, states.mT, options["cu_seqlens"].tolist())
        return o, final.mT

    functions = {
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule": like_fla,
        "flash_qla.chunk_gated_delta_rule": like_fla,
        "jla.ops.linear_attention": like_jla,
        "flashinfer.gdn_prefill.chunk_gated_delta_rule": like_flashinfer,
    }
    modules: dict[str, types.ModuleType] = {}
    for path, function in functions.items():
        parts = path.split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, name, modules.setdefault(name, types.ModuleType(name)))
        vars(modules[".".join(parts[:-1])])[parts[-1]] = function
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name in modules or None)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: "0.0")
    monkeypatch.setenv("FLA_FLASH_QLA", "")
    monkeypatch.setenv("FLA_TILELANG", "")
    return modules


def test_the_prefill_suite_fills_its_tables(
    tiny_batches: None, known_peers: dict[str, types.ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    rules, layers, others = command.SUITES["prefill"](1)
    keys, found = [["1/2", "2x5"], ["1/2", "ragged"]], list(peers.of_prefill())
    assert found[:2] == ["fla 0.0, Triton", "fla 0.0, FlashQLA"] and len(found) == 6
    assert [row[:2] for row in rules.rows] == [row[:2] for row in layers.rows] == keys
    assert [row[:3] for row in others.rows] == [[*key, name] for key in keys for name in found]
    for table in (rules, layers, others):
        assert all(len(row) == len(table.columns) for row in table.rows), table.title
    rate = 2 * 2**12 / 3e-3
    for table, error in ((rules, 5e-3), (layers, 1e-2)):
        at = {column: number for number, column in enumerate(table.columns)}
        for row, tokens, n in zip(table.rows, (10, 15), (2, 4)):
            qkvo, states = tokens * (2 * 16 + 2 * 2 * 16) * 2, 2 * n * 2 * 16 * 16 * 4
            moved = qkvo + states
            moved += tokens * 2 * 2 * 4 if table is rules else tokens * 2 * 2 * 2 + 2 * n * (2 * 16 + 2 * 16) * 3 * 2
            flop = prefill.FLOP * 2 * tokens
            assert row[at["ms"]] == 3 and math.isclose(row[at["TFLOP/s"]], flop / 3e-3 / 1e12)
            assert math.isclose(row[at["over the compute floor"]], 3e-3 / (flop / prefill.PEAK))
            assert math.isclose(row[at["over the byte floor"]], 3e-3 / (moved / rate))
            assert 0 < row[at["error of o"]] < error and 0 < row[at["of states"]] < error
            assert row[at["wall ms"]] > 0 and row[at["temporary / (q, k, v, o)"]] > 0
    assert [row[3] for row in rules.rows] == ["<= 0.25", ""] and [row[3] for row in layers.rows] == ["<= 0.5", ""]
    assert all(row[-1] == 1 for row in layers.rows)
    said = capsys.readouterr().err
    ratios = iter(ratio for row in rules.rows for ratio in row[-len(found) :])
    for heads, shape, name, ms, over, wall, over_wall, *errors in others.rows:
        if shape == "ragged" and ("in rows" in name or "jla" in name):
            assert [ms, over, wall, over_wall, *errors] == ["-"] * 6
            assert f"['{heads}', '{shape}'] {name}: ValueError(" in said
            assert next(ratios) == "-"
        else:
            assert (ms, over) == (3, 1) and all(0 <= error < 1e-2 for error in errors)
            assert (wall == "-") == ("jla" in name)
            assert next(ratios) == (1 if wall == "-" else min(1, over_wall))


def test_fla_is_told_which_kernels(known_peers: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def rule(*_: Any, **options: Any) -> Any:
        seen.append(os.environ["FLA_FLASH_QLA"] + os.environ["FLA_TILELANG"])
        return options["g"], None

    vars(known_peers["fla.ops.gated_delta_rule"])["chunk_gated_delta_rule"] = rule
    batch = types.SimpleNamespace(lengths=[2], starts=np.array([0, 2]), given=[([np.ones((2, 1, 4))] * 5, np.ones(1))])
    for flash_qla in (False, True, False):
        peers.fla_prefill(batch, flash_qla=flash_qla)[0]()
    assert seen == ["00", "11", "00"]
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    with pytest.raises(ImportError):
        peers.fla_prefill(batch, flash_qla=True)


def test_a_wrong_rule_is_not_timed_and_a_broken_peer_is_passed_over(
    tiny_batches: None,
    known_peers: dict[str, types.ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any, **options: Any) -> Any:
        raise RuntimeError("no such shape")

    vars(known_peers["flash_qla"])["chunk_gated_delta_rule"] = refuse
    monkeypatch.setattr(prefill, "graph", refuse)
    rules, _, others = prefill.suite(1, "^1/2 rag")
    assert [row[:2] for row in rules.rows] == [["1/2", "ragged"]] and len(others.rows) == 6
    said = capsys.readouterr().err
    assert "flash_qla 0.0, q and k normalised before: RuntimeError('no such shape')" in said
    assert "fla 0.0, Triton, captured: RuntimeError('no such shape')" in said
    assert [row[5] for row in others.rows] == ["-"] * 6 and [row[3] for row in others.rows] == [3, 3, "-", "-", "-", 3]
    right = prefill.gdn_jax.chunk_gated_delta_rule

    def wrong(*tokens: Any, **options: Any) -> Any:
        o, pool = right(*tokens, **options)
        return 1.1 * o, pool

    monkeypatch.setattr(prefill.gdn_jax, "chunk_gated_delta_rule", wrong)
    with pytest.raises(RuntimeError, match=r"the rule \['1/2', 'ragged'\] differs from float64"):
        prefill.suite(1, "ragged")


def test_a_chain_of_sets_does_what_the_calls_do(tiny_batches: None) -> None:
    own = prefill.Batch((1, 2), [3, 4]).rule()
    chain = own.chain(2)
    o, last = chain(), [call() for call in own.calls * 2][-1]
    np.testing.assert_allclose(np.asarray(o, np.float32), np.asarray(last, np.float32), rtol=2e-2, atol=1e-4)
    np.testing.assert_allclose(chain.state, own.state, rtol=1e-4, atol=1e-5)
    assert chain.layers == 2 and own.temporary_bytes > 0


# -------------------------------------------------------------------------------------------------------- the command


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_command_prints_and_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    monkeypatch.setitem(command.SUITES, "cpu", lambda repeat: asked.append(repeat) or [TABLE])
    assert command.run(options("--repeat", "2", "--out", str(tmp_path))) == 0
    assert asked == [2]
    text = capsys.readouterr().out
    assert text.startswith("`python -m bench --suite cpu --repeat 2`, 2") and report.markdown(TABLE) in text
    assert report.markdown(TABLE) in (tmp_path / "cpu.md").read_text(encoding="utf-8")
    assert (tmp_path / "cpu-1.csv").exists()


def test_the_command_writes_nothing_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(command.SUITES, "cpu", lambda repeat: [TABLE])
    assert command.run(options()) == 0
    assert not list(tmp_path.iterdir())


def test_the_command_leaves_rows_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    monkeypatch.setitem(command.SUITES, "prefill", lambda repeat, only: asked.append((repeat, only)) or [TABLE])
    assert command.run(options("--suite", "prefill", "--only", "16/32 1x2048$")) == 0
    assert asked == [(7, "16/32 1x2048$")]
    assert capsys.readouterr().out.startswith("`python -m bench --suite prefill --repeat 7 --only '16/32 1x2048$'`, 2")
    with pytest.raises(SystemExit, match="the suite cpu runs whole"):
        command.run(options("--only", "x"))


def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--suite", "tpu")
    assert "tpu" in capsys.readouterr().err
