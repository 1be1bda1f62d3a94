"""`python -m bench --suite cpu`: runs a suite, prints its tables; `--out DIR` writes them as Markdown, CSV and a plot."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from bench import cpu, decode, interop, report

SUITES: dict[str, Callable[[int], list[report.Table]]] = {"cpu": cpu.suite, "interop": interop.suite, **decode.SUITES}

PLOTS = {suite: ("N", decode.SHARE) for suite in decode.SUITES}  # what to draw over what


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run` to a parser."""
    parser.add_argument("--suite", choices=sorted(SUITES), default="cpu", help="what to time (default: cpu)")
    parser.add_argument(
        "--repeat", type=int, default=7, metavar="N", help="runs of each call; their median counts (default: 7)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write SUITE.md, a CSV file a table and SUITE.svg there"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the suite; returns the exit code."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's peers need memory of the card too
    header = report.machine(f"python -m bench --suite {options.suite} --repeat {options.repeat}")
    print(header)
    tables = SUITES[options.suite](options.repeat)
    for table in tables:
        print("\n" + report.markdown(table))
    if options.out:
        report.write(options.out, options.suite, header, tables)
        if options.suite in PLOTS:
            report.plot(options.out / f"{options.suite}.svg", tables, *PLOTS[options.suite])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
