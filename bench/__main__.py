"""`python -m bench --suite cpu`: runs a suite, prints its tables; `--out DIR` writes them as Markdown, CSV and a plot."""

import argparse
import os
import shlex
from collections.abc import Callable
from pathlib import Path

from bench import cpu, decode, interop, prefill, report

SUITES: dict[str, Callable[..., list[report.Table]]] = {
    "cpu": cpu.suite,
    "interop": interop.suite,
    "prefill": prefill.suite,
    **decode.SUITES,
}
CHOOSY = ("prefill",)  # suites that can leave rows out

PLOTS = {suite: ("N", decode.SHARE) for suite in decode.SUITES}  # what to draw over what


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run` to a parser."""
    parser.add_argument("--suite", choices=sorted(SUITES), default="cpu", help="what to time (default: cpu)")
    parser.add_argument(
        "--repeat", type=int, default=7, metavar="N", help="runs of each call; their median counts (default: 7)"
    )
    parser.add_argument(
        "--only", metavar="REGEX", help=f"the rows whose first columns match ({', '.join(CHOOSY)}; default: all)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write SUITE.md, a CSV file a table and SUITE.svg there"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the suite; returns the exit code."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's peers need memory of the card too
    command, chosen = f"python -m bench --suite {options.suite} --repeat {options.repeat}", {}
    if options.only is not None:
        if options.suite not in CHOOSY:
            raise SystemExit(f"bench: the suite {options.suite} runs whole, without --only.")
        command, chosen = f"{command} --only {shlex.quote(options.only)}", {"only": options.only}
    header = report.machine(command)
    print(header)
    tables = SUITES[options.suite](options.repeat, **chosen)
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
