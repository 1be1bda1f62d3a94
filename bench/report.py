"""Timing in turns, and tables as Markdown, CSV and a plot."""

import csv
import datetime
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
    today = datetime.date.today().isoformat()
    return f"`{command}`, {today}: {processor}; python {platform.python_version()}, {versions}"


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


def plot(path: Path, tables: list[Table], x: str, y: str) -> None:
    """Draws column `y` over column `x`, one panel a table that has both, one line for each value of the columns before `x`."""
    from matplotlib.figure import Figure

    shown = [table for table in tables if {x, y} <= set(table.columns)]
    figure = Figure(figsize=(6 * len(shown), 4.5), layout="constrained")
    for table, axes in zip(shown, figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]):
        lines: dict[str, list[tuple[float, float]]] = {}
        at, height = table.columns.index(x), table.columns.index(y)
        for row in table.rows:
            lines.setdefault(", ".join(map(str, row[:at])), []).append((row[at], row[height]))
        for label, points in lines.items():
            axes.plot(*zip(*points), marker="o", label=label)
        axes.set(title=table.title.split(",")[0], xlabel=x, ylabel=y, xscale="log", ylim=(0, None))
        axes.legend()
    figure.savefig(path)
