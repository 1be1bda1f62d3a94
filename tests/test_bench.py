"""The benchmarks: the timer's order, the reports, and the CPU suite on tiny sizes. No test looks at how long anything takes."""

import argparse
import csv
import math
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
from bench import cpu, interop, peers, report
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
    assert line.startswith("`python -m bench`: ") and f"jax {jax.__version__}" in line and "torch" in line
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
    assert text.startswith("`python -m bench --suite cpu --repeat 2`: ") and report.markdown(TABLE) in text
    assert report.markdown(TABLE) in (tmp_path / "cpu.md").read_text(encoding="utf-8")
    assert (tmp_path / "cpu-1.csv").exists()


def test_the_command_writes_nothing_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(command.SUITES, "cpu", lambda repeat: [TABLE])
    assert command.run(options()) == 0
    assert not list(tmp_path.iterdir())


def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--suite", "tpu")
    assert "tpu" in capsys.readouterr().err
