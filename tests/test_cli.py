"""The command line: what it prints, what it refuses, and its exit codes."""

import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

import gdn_jax
from gdn_jax import cli
from gdn_jax.dispatch import OPERATORS

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROOT = Path(__file__).parent.parent


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_info_prints_versions_devices_and_implementations(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"gdn_jax {gdn_jax.__version__}" in text and f"jax {jax.__version__}" in text
    assert jax.devices()[0].device_kind in text
    lines = text.splitlines()
    for operator in OPERATORS:
        (line,) = [line for line in lines if line.split()[0] == operator]
        assert "xla runs" in line and "mosaic is passed over" in line
    assert len(lines) == 3 + len(OPERATORS)


DUMP = """\
000: kCommandBuffer [source | sink]
    001: kCustomCall [source       | next=002 (1)] kCustomCall
    002: kCustomCall [prev=001 (1) | sink        ] kCustomCall
"""
APART = "001: kCopy [source] kCopy\n002: kWhile [sink] kWhile\n    003: kKernel x\n"


def test_top_level_launches_of_a_dump() -> None:
    assert cli.top_level(DUMP) == ["kCommandBuffer"]
    assert cli.top_level(APART) == ["kCopy", "kWhile"]
    assert cli.top_level("") == []


def test_info_says_whether_layers_are_one_graph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "chip", lambda: "NVIDIA")
    monkeypatch.setattr(cli, "launches", lambda scan: cli.top_level(APART if scan else DUMP))
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "8 decode layers unrolled: one CUDA graph" in lines
    assert "8 decode layers in a lax.scan: no single CUDA graph, but kCopy, kWhile" in lines


def test_the_program_that_is_looked_at_compiles() -> None:
    assert cli.launches(False) == cli.launches(True) == [] or jax.default_backend() == "gpu"


@pytest.mark.gpu
def test_gpu_unrolled_layers_are_one_graph() -> None:
    assert cli.launches(False) == ["kCommandBuffer"]
    assert "kWhile" in cli.launches(True)


def test_info_names_what_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise cli.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cli.importlib.metadata, "version", missing)
    assert cli.main(["info"]) == 0
    assert "torch not installed, transformers not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["serve"], "invalid choice: 'serve'"),
        (["info", "--deep"], "unrecognized arguments: --deep"),
        (["info", "deep"], "unrecognized arguments: deep"),
        (["--deep", "info"], "unrecognized arguments: --deep"),
    ],
)
def test_what_is_no_command_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert words in error and "usage: gdn-jax" in error and not out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("info", "demo", "parity", "bench"))


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("demo", ["--model", "--prompts", "--slots", "--max-new-tokens", "--prefill-chunk", "--mtp-step", "--seed"]),
        ("parity", ["--json", "--cases"]),
        ("bench", ["--suite", "--repeat", "--out"]),
    ],
)
def test_help_of_a_command(command: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: gdn-jax {command}" in text
    assert all(option in text for option in options)


@pytest.mark.parametrize("command", ["demo", "parity", "bench"])
def test_a_command_refuses_an_unknown_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--no-such-option"])
    assert stop.value.code == 2
    assert "--no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, 2])
@pytest.mark.parametrize("command", ["demo", "parity", "bench"])
def test_options_go_in_and_the_exit_code_comes_out(command: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = types.ModuleType("stand_in")
    setattr(module, "add_arguments", lambda parser: parser.add_argument("--slots", type=int))  # noqa: B010
    setattr(module, "run", lambda options: seen.append(options.slots) or code)  # noqa: B010
    monkeypatch.setitem(sys.modules, cli.ELSEWHERE[command][0], module)
    assert cli.main([command, "--slots", "3"]) == code
    assert seen == [3]


# The package that is missing, and the command that needs it while it is imported.
MISSING = [
    ("demo", "torch", "hf"),
    ("parity", "torch", "hf"),
    ("bench", "torch", "bench"),
    ("bench", "transformers", "bench"),
]
# These are imported later, inside `run`.
LATER = [("demo", "transformers", "hf"), ("demo", "rich", "hf"), ("parity", "rich", "hf")]


def without(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`gdn-jax` in a process in which a package cannot be imported."""
    if package != "torch":
        pytest.importorskip("torch")
    code = f"import sys; sys.modules[{package!r}] = None; from gdn_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    return python("-c", code, *arguments)


@pytest.mark.parametrize(("command", "package", "extra"), MISSING)
def test_a_missing_package_names_the_extra(command: str, package: str, extra: str) -> None:
    done = without(package, command)
    assert done.returncode == 2, done.stdout + done.stderr
    # A None in sys.modules gives the submodule's name, a package that is truly missing its own.
    message = done.stderr.strip().replace("transformers.models", "transformers")
    assert message == f"gdn-jax {command} needs {package}: pip install 'gdn_jax[{extra}]'"
    assert not done.stdout


@pytest.mark.parametrize(("command", "package", "extra"), LATER)
def test_a_package_that_is_missed_later_names_the_extra(command: str, package: str, extra: str) -> None:
    done = without(package, command)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"gdn-jax {command} needs {package}" in done.stderr and f"'gdn_jax[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_info_needs_no_torch() -> None:
    done = without("torch", "info")
    assert done.returncode == 0, done.stderr
    assert "gdn_prefill" in done.stdout


def test_the_module_is_the_command() -> None:
    done = python("-m", "gdn_jax", "nothing")
    assert done.returncode == 2 and "invalid choice: 'nothing'" in done.stderr
