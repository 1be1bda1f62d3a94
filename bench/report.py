"""Timing in turns, and tables as Markdown and CSV."""

import csv
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Table(NamedTuple):
    """A title, the names of the columns, and the rows: numbers or text."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


def machine(command: str) -> str:
    """One line on what was run where."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "torch", "transformers"))
    device = jax.devices()[0]
    processor = device.device_kind
    if device.platform == "cpu":
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        processor = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"
    return f"`{command}`: {processor}; python {platform.python_version()}, {versions}"


def seconds(repeat: int, *calls: Callable[[], Any]) -> list[float]:
    """The median time of each call, the calls taken in turns after one round that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        jax.block_until_ready(call())
    for _ in range(repeat):
        for call, own in zip(calls, times):
            start = time.perf_counter()
            jax.block_until_ready(call())
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def markdown(table: Table) -> str:
    """The table as Markdown."""
    lines = [f"**{table.title}**", "", "| " + " | ".join(table.columns) + " |", "|---" * len(table.columns) + "|"]
    lines += ["| " + " | ".join(map(_text, row)) + " |" for row in table.rows]
    return "\n".join(lines)


def write(folder: Path, suite: str, header: str, tables: list[Table]) -> None:
    """Writes `SUITE.md`, and `SUITE-1.csv` and on."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join([f"# bench: {suite}", header, *map(markdown, tables)])
    (folder / f"{suite}.md").write_text(text + "\n", encoding="utf-8")
    for number, table in enumerate(tables, 1):
        with open(folder / f"{suite}-{number}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(table.columns)
            writer.writerows([[_text(value) for value in row] for row in table.rows])
