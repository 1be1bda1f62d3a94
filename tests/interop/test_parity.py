"""The parity table: that it passes, that it bites, and what it writes."""

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")

import gdn_jax
from interop import parity

CASES = Path(__file__).parent.parent / "cases"
CHEAP = ("gdn_gating", "recurrent_gated_delta_rule", "gated_rms_norm")  # quick to compile


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parity.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The table of the cheap operators, float32 and bfloat16, with two golden cases; returns the options for it."""
    inputs = parity._inputs

    def reduced(dtype: str) -> dict[str, Any]:
        return {name: call for name, call in inputs(dtype).items() if name in CHEAP}

    monkeypatch.setattr(parity, "_inputs", reduced)
    monkeypatch.setattr(parity, "LIMITS", {name: parity.LIMITS[name] for name in ("float32", "bfloat16")})
    monkeypatch.setattr(parity, "_hf_rows", lambda backend: iter(()))
    for case in ("gating", "rms_norm"):
        shutil.copy(CASES / f"{case}.npz", tmp_path)
    return ["--cases", str(tmp_path)]


def test_the_errors_are_within_the_limits(few: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.run(options(*few)) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in CHEAP) and "FAILED" not in text
    assert text.count(" ok ") == 2 * len(CHEAP) + 2
    assert "float64" in text and "rms_norm" in text


@pytest.mark.parametrize("name", CHEAP)
def test_a_wrong_operator_fails(
    name: str, few: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    true = getattr(gdn_jax, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = true(*args, **kwargs)
        if isinstance(result, tuple):
            return (1.01 * result[0], *result[1:])
        return (1.01 * result).astype(result.dtype)

    monkeypatch.setattr(gdn_jax, name, wrong)
    assert parity.run(options(*few)) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert failed and all(name in line for line in failed)


def test_nan_fails(few: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gdn_jax, "gated_rms_norm", lambda o, *_, **__: np.full(o.shape, np.nan, np.float32))
    assert parity.run(options(*few)) == 1
    assert "inf" in capsys.readouterr().out


def test_the_json_file_has_the_rows(few: list[str], tmp_path: Path) -> None:
    file = tmp_path / "parity.json"
    assert parity.run(options(*few, "--json", str(file))) == 0
    rows = json.loads(file.read_text())
    assert len(rows) == 2 * len(CHEAP) + 2
    assert set(rows[0]) == {"operator", "dtype", "backend", "against", "error", "limit", "passed"}
    for row in rows:
        assert row["passed"] is True and 0 <= row["error"] <= row["limit"], row
    assert {row["against"] for row in rows} == {"float64", "gating", "rms_norm"}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}


def test_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.run(options("--cases", str(tmp_path / "none"))) == 2
    assert "is no folder" in capsys.readouterr().err


def test_hugging_face_rows_pass() -> None:
    rows = list(parity._hf_rows("cpu"))
    assert {row.operator for row in rows} == {"chunk_gated_delta_rule", "recurrent_gated_delta_rule"}
    for row in rows:
        assert row.passed and row.error > 0, row


def test_every_operator_has_a_row_and_every_limit_is_known() -> None:
    from gdn_jax.dispatch import OPERATORS

    for dtype in parity.LIMITS:
        assert set(parity._inputs(dtype)) == set(OPERATORS)
    low = parity._inputs("bfloat16")["chunk_gated_delta_rule"][0]
    assert low[0].dtype == ml_dtypes.bfloat16 and low[3].dtype == np.float32


def test_golden_cases_of_one_operator_are_taken_and_stories_are_not() -> None:
    import golden

    for path in sorted(CASES.glob("*.npz")):
        assert parity._operator_of(path.stem) == golden.CASES.get(path.stem), path.stem


def test_relative_error() -> None:
    assert parity.relative_error([3.0, 4.0], [3.0, 4.0]) == 0
    assert math.isclose(parity.relative_error([3.0, 4.5], [3.0, 4.0]), 0.1)
    assert parity.relative_error([1.0, math.nan], [1.0, 1.0]) == math.inf
    assert parity.relative_error([0.5], [0.0]) == 0.5


def test_the_cases_of_the_checkout_are_found_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def golden_rows(backend: str, folder: Path) -> Iterator[parity.Row]:
        seen.append(folder)
        yield from ()

    monkeypatch.setattr(parity, "_float64_rows", lambda backend: iter(()))
    monkeypatch.setattr(parity, "_hf_rows", lambda backend: iter(()))
    monkeypatch.setattr(parity, "_golden_rows", golden_rows)
    assert list(parity.rows()) == []
    assert [folder.resolve() for folder in seen] == [CASES.resolve()]
