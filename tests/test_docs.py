"""The documentation runs: every ```python block, every example, every doctest; and it speaks of every public name."""

import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import gdn_jax

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OPTIONAL = {"torch", "transformers", "safetensors", "rich"}  # the GPU machines may lack some of them
# Data without behaviour: its docstring lists the fields instead of an example.
TUPLES = {"Explanation", "GDNOutput", "GDNState", "GDNWeights"}


def modules() -> list[str]:
    names = []
    for package in ("gdn_jax", "interop"):
        folder = str(ROOT / package)
        names += [
            package,
            *(m.name for m in pkgutil.iter_modules([folder], f"{package}.") if m.name[-8:] != "__main__"),
        ]
    return [*names, *(m.name for m in pkgutil.iter_modules([str(ROOT / "gdn_jax" / "ops")], "gdn_jax.ops."))]


def need(error: ModuleNotFoundError) -> None:
    """Skips where an optional package is missing; anything else is a fault of the page."""
    if (error.name or "").partition(".")[0] in OPTIONAL:
        pytest.skip(f"needs {error.name}")
    raise error


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line before each python block, and its text."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(1)), m.group(1)) for m in found]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for line, code in blocks(page):
        try:
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        except ModuleNotFoundError as error:
            need(error)


def test_there_are_pages_and_they_have_examples() -> None:
    assert {page.name for page in PAGES} == {
        *("README.md", "benchmarks.md", "interop.md", "kernels.md", "operators.md", "quickstart.md")
    }
    assert {page.name for page in PAGES if blocks(page)} >= {"README.md", "interop.md", "operators.md", "quickstart.md"}
    for page in PAGES:  # a block with another spelling would be skipped in silence
        fences = re.findall(r"^\s*```(\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(fences) <= {"python", "sh"}, page.name
        assert fences.count("python") == len(blocks(page)), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints(example: Path) -> None:
    if "torch" in example.name:
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, str(example)], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d", done.stdout)


@pytest.mark.parametrize("module", modules())
def test_the_doctests_of_a_module(module: str) -> None:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        need(error)
        raise
    result = doctest.testmod(found, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def public() -> list[tuple[str, str]]:
    interop = "GDNCache InPlace LinearAttBackend replace_gated_delta_net restore to_jax to_torch"
    return [("gdn_jax", name) for name in gdn_jax.__all__] + [("interop", name) for name in interop.split()]


def test_the_list_of_public_names_is_that_of_the_packages() -> None:
    pytest.importorskip("torch")
    interop = importlib.import_module("interop")
    assert sorted(interop.__all__) == [name for package, name in public() if package == "interop"]
    for package in (gdn_jax, interop):
        assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("name", [name for _, name in public()])
def test_a_public_name_is_in_the_docs(name: str) -> None:
    assert any(
        re.search(rf"\b{name}\b", page.read_text(encoding="utf-8")) for page in PAGES if page.parent.name == "docs"
    )


@pytest.mark.parametrize(("package", "name"), public())
def test_a_public_name_has_a_docstring_with_an_example(package: str, name: str) -> None:
    if package == "interop":
        pytest.importorskip("torch")
    thing = getattr(importlib.import_module(package), name)
    if not callable(thing):  # PAD_SLOT: its docstring stands below it in the source
        return
    text = inspect.getdoc(thing) or ""
    assert len(text) > 80 and text.splitlines()[0].endswith("."), name
    if name in TUPLES:
        assert "Attributes:" in text
        return
    assert "Example:" in text and ">>>" in text, name
    if isinstance(thing, types.FunctionType):
        for parameter in inspect.signature(thing).parameters:
            assert re.search(rf"^\s+\*{{0,2}}{parameter}:|`{parameter}`", text, re.MULTILINE), f"{name}: {parameter}"


def environment(**more: str) -> dict[str, str]:
    """A subprocess that sees this checkout first."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def test_gdn_jax_does_not_import_torch() -> None:
    code = (
        "import sys, gdn_jax, gdn_jax.reference, gdn_jax.cli; "
        "bad = {'torch', 'transformers', 'interop', 'bench', 'rich', 'matplotlib'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
