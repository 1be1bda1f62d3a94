"""The command `gdn-jax`: info, demo, parity, bench. Argument parsing only."""

import argparse
import importlib
import importlib.metadata
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import gdn_jax
from gdn_jax.dispatch import OPERATORS, chip

# The sub-commands that live above gdn_jax: their module, the extra that brings what it needs, and what they do.
ELSEWHERE = {
    "demo": (
        "interop.demo",
        "hf",
        "serve texts with a Qwen3-Next model and compare with plain Hugging Face generation",
    ),
    "parity": (
        "interop.parity",
        "hf",
        "print the errors of every operator against float64, Hugging Face and the golden cases",
    ),
    "bench": ("bench.__main__", "bench", "time the operators beside their peers"),
}


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


LAYERS = 8  # of the program that `launches` looks at; XLA makes no CUDA graph of fewer than five launches


def launches(scan: bool) -> list[str]:
    """What XLA launches for decode layers in a row on one donated pool, unrolled or in a `lax.scan`: from its own dump.

    `["kCommandBuffer"]` is one CUDA graph.
    """
    one = jnp.ones((1, 1, 128), jnp.bfloat16)

    def step(pool: Any, layer: Any) -> Any:
        gate = jnp.zeros((1, 1))
        return gdn_jax.recurrent_gated_delta_rule(one, one, one, gate, gate, ssm_state=pool, layer=layer)[1], None

    def layers(pool: Any) -> Any:
        if scan:
            return jax.lax.scan(step, pool, jnp.arange(LAYERS))[0]
        for layer in range(LAYERS):
            pool, _ = step(pool, layer)
        return pool

    pool = jax.ShapeDtypeStruct((LAYERS, 1, 1, 128, 128), jnp.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        dump: Any = dict(xla_dump_to=folder, xla_dump_hlo_as_text=True)
        jax.jit(layers, donate_argnums=0).lower(pool).compile(dump)
        return top_level(
            "".join(path.read_text() for path in Path(folder).glob("*thunk_sequence_after_thunk_passes.txt"))
        )


def top_level(thunks: str) -> list[str]:
    """The kinds of the launches in a dump of XLA's, without those inside others, which are indented."""
    return re.findall(r"^\d+: (\w+)", thunks, re.MULTILINE)


def info() -> int:
    """Prints versions, devices, which implementation each operator would use and why, and what launches a layer costs."""
    print(f"python {platform.python_version()}, gdn_jax {gdn_jax.__version__}")
    print(", ".join(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "numpy", "torch", "transformers")))
    print("devices: " + ", ".join(f"{device} ({device.device_kind})" for device in jax.devices()))
    width = max(map(len, OPERATORS))
    for operator in OPERATORS:
        print(f"{operator:{width}}  {gdn_jax.explain(operator)}")
    if chip() is not None:
        for form, scan in (("unrolled", False), ("in a lax.scan", True)):
            found = launches(scan)
            told = "one CUDA graph" if found == ["kCommandBuffer"] else f"no single CUDA graph, but {', '.join(found)}"
            print(f"{LAYERS} decode layers {form}: {told}")
    return 0


def _elsewhere(command: str) -> Callable[[Sequence[str]], int]:
    """Runs a sub-command of another package; a package that is missing is an error that names the extra to install."""
    module, extra, purpose = ELSEWHERE[command]

    def run(arguments: Sequence[str]) -> int:
        try:
            found = importlib.import_module(module)
            parser = argparse.ArgumentParser(prog=f"gdn-jax {command}", description=purpose)
            found.add_arguments(parser)
            return found.run(parser.parse_args(arguments))
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing in ("", "gdn_jax", "interop", "bench"):  # a fault of ours, not a package to install
                raise
            print(f"gdn-jax {command} needs {missing}: pip install 'gdn_jax[{extra}]'", file=sys.stderr)
            return 2

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="gdn-jax", description="Gated DeltaNet for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="versions, devices, and which implementation runs here")
    for command, (_, _, purpose) in ELSEWHERE.items():
        commands.add_parser(command, help=purpose, add_help=False)
    given, rest = parser.parse_known_args(arguments)
    if given.command == "info":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return info()
    return _elsewhere(given.command)(rest)
