"""Do the tests notice a wrong line? `python tests/mutate.py` breaks a copy of the package, one line at a time, and runs them.

Each mutant is a search and a replacement in one file, which must match exactly once, and the tests that should fail. They run
in a temporary copy of the repository; nothing here is changed. Prints a table; exit code 1 if a mutant survives, does not match
any more, or if the tests fail on the copy without any mutant. Options: `-k WORD` (only mutants whose name or file has it),
`--jobs N`. Uses no hypothesis, and one compilation cache for all, so that only what a mutant changes is compiled anew.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # seconds for the tests of one mutant


class Mutant(NamedTuple):
    name: str
    file: str  # in gdn_jax
    search: str
    replace: str
    tests: tuple[str, ...]  # pytest's node ids, the fastest first


CONV = ("tests/test_conv.py::test_golden",)
CHUNK = ("tests/test_chunk.py::test_golden[chunk_varlen]", "tests/test_chunk.py::test_golden[chunk_padding_slots]")
RECURRENT = ("tests/test_recurrent.py::test_golden",)
MTP = ("tests/test_mtp.py::test_golden",)
TRACE = ("tests/test_layer.py::test_golden_mtp_trace",)
VARLEN = ("tests/test_varlen.py",)


def layer(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_layer.py::{name}" for name in names)


MUTANTS = [
    # the rules of padding
    Mutant("accepted offset off by one", "varlen.py", "has & ok, num_accepted_tokens - 1, 0)",
           "has & ok, num_accepted_tokens, 0)", ("tests/test_conv.py::test_golden[conv_after_verify]",)),
    Mutant("index -1 is taken for a row", "varlen.py", "return (index >= 0) & (index < size)",
           "return (index >= -1) & (index < size)", ("tests/test_conv.py::test_golden[conv_padding_slots]",)),
    Mutant("index num_slots is taken for a row", "varlen.py", "return (index >= 0) & (index < size)",
           "return (index >= 0) & (index <= size)", (*VARLEN, "tests/test_conv.py::test_golden[conv_padding_slots]")),
    Mutant("missing has_initial_state mask", "varlen.py", "where_inside(source, num_slots, has & (lengths > 0))",
           "where_inside(source, num_slots, lengths > 0)", ("tests/test_conv.py::test_golden[conv_varlen]",)),
    Mutant("initial slots ignored", "varlen.py", "source = slot if initial_state_indices is None else initial_state_indices",
           "source = slot", ("tests/test_conv.py::test_golden[conv_other_source]",)),
    Mutant("empty sequences write", "varlen.py", "write = jnp.where(lengths > 0, slot, -1)",
           "write = jnp.where(ok, slot, -1)", ("tests/test_conv.py::test_pre_08_empty_sequences",)),
    Mutant("a layer outside the stack is clamped", "varlen.py", "ok = inside(slot, num_slots) & inside(layer, num_layers)",
           "ok = inside(slot, num_slots)", ("tests/test_recurrent.py::test_layers",)),
    Mutant("too long verify sequences run", "varlen.py", "ok &= lengths <= max_length", "ok &= lengths <= max_length + 1",
           ("tests/test_mtp.py::test_mtp_16_too_many_tokens_are_padding",)),
    Mutant("int64 narrowed before it is judged", "varlen.py", "index = xp.clip(index, max(least, -1), INT32_MAX)",
           "index = index", ("tests/test_varlen.py::test_narrow_judges_before_it_narrows",)),
    Mutant("accepted count of the read table clamped", "varlen.py", "jnp.clip(num_accepted_tokens - 1, 0, read_indices",
           "jnp.clip(num_accepted_tokens, 0, read_indices", MTP),
    Mutant("wrong chunk last flag", "varlen.py", "last=used & (left <= chunk_size)", "last=used & (left < chunk_size)",
           ("tests/test_chunk.py::test_golden[chunk_varlen]", "tests/test_chunk.py::test_pre_06_tails")),
    Mutant("first token of every sequence left out", "varlen.py", "return (position >= 0) & (position",
           "return (position > 0) & (position", CONV),
    # convolution
    Mutant("taps in reverse order", "xla/conv.py", "* weight[columns - back]", "* weight[back]", CONV),
    Mutant("short sequences forget their history", "xla/conv.py", "return jnp.where((token < 0)[..., None], kept,",
           "return jnp.where((token < 0)[..., None], 0 * kept,", ("tests/test_conv.py::test_golden[conv_varlen]",)),
    Mutant("dropped silu", "xla/conv.py", "y = y if activation is None else jax.nn.silu(y)", "y = y", CONV),
    Mutant("verify row starts at the history", "xla/conv.py", "window(jnp.ones_like(batch.lengths), pool.shape[3])",
           "window(jnp.zeros_like(batch.lengths), pool.shape[3])", ("tests/test_conv.py::test_golden[conv_verify]",)),
    Mutant("history read at column 0", "xla/conv.py", "column = batch.offset[:, None, None] + jnp.arange(columns)",
           "column = 0 * batch.offset[:, None, None] + jnp.arange(columns)",
           ("tests/test_conv.py::test_golden[conv_after_verify]",)),
    Mutant("conv leaks over the start of a sequence", "xla/conv.py", "jnp.where((position >= back)[:, None], shifted, 0)",
           "shifted", CONV),
    Mutant("conv layer ignored", "xla/conv.py", "rows = pool.at[batch.layer, source]", "rows = pool.at[0, source]",
           ("tests/test_conv.py::test_layers",)),
    # the rule
    Mutant("epsilon outside the root", "xla/common.py", "lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)",
           "(1 / (jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)) + 1e-6))",
           ("tests/test_chunk.py::test_golden[chunk_small_keys]",)),
    Mutant("hv % H instead of hv // rep", "xla/common.py", "return jnp.repeat(x, num_v_heads // x.shape[axis], axis=axis)",
           "return jnp.concatenate([x] * (num_v_heads // x.shape[axis]), axis=axis)", RECURRENT),
    Mutant("no true float32 products", "xla/common.py", "precision=lax.Precision.HIGHEST", "precision=lax.Precision.DEFAULT",
           ("tests/test_field_faults.py::test_num_02_every_product_is_true_float32",)),
    Mutant("the store rounds nothing away", "xla/common.py", "rounded = lax.reduce_precision(x, info.nexp, info.nmant)",
           "rounded = x",
           ("tests/test_norm.py::test_roundings_survive_the_compiler",)),
    Mutant("no scale (one token)", "xla/recurrent.py", "per_v_head(q * scale, v.shape[1], 1)", "per_v_head(q, v.shape[1], 1)",
           RECURRENT),
    Mutant("missing beta (one token)", "xla/common.py", "u = beta[:, None] * (v - products[:, 0])", "u = v - products[:, 0]",
           RECURRENT),
    Mutant("output before the update", "xla/common.py", "o = products[:, 1] + jnp.sum(k * q, axis=-1, keepdims=True) * u",
           "o = products[:, 1]", RECURRENT),
    Mutant("state decays twice", "xla/common.py", "return decay[..., None] * m + k", "return decay[..., None] ** 2 * m + k",
           RECURRENT),
    Mutant("no scale (chunk)", "xla/chunk.py", "q, g, beta = q * scale,", "q, g, beta = q,", CHUNK),
    Mutant("missing beta (chunk)", "xla/chunk.py", "jnp.where(below, beta * decay * kk, 0)", "jnp.where(below, decay * kk, 0)",
           CHUNK),
    Mutant("decay as a difference of running sums", "xla/chunk.py", "sums = dot(ones, jnp.where(below, g[..., None], 0))",
           "sums = jnp.cumsum(g, 1)[..., None] - jnp.cumsum(g, 1)[:, None]", ("tests/test_chunk.py::test_golden[chunk_resets]",)),
    Mutant("-inf reaches the sums", "xla/chunk.py", "jnp.maximum(g, LEAST_G)", "g",
           ("tests/test_chunk.py::test_golden[chunk_resets]",)),
    Mutant("inverse of the triangle without its corners", "xla/chunk.py", "corner = -dot(lower,", "corner = -0 * dot(lower,",
           ("tests/test_chunk.py::test_golden[chunk_same_key]",)),
    Mutant("a token does not see itself", "xla/chunk.py", "dot(decay * qk, u)", "dot(jnp.where(below, decay, 0) * qk, u)", CHUNK),
    Mutant("verify writes the row of the last token only", "xla/mtp.py", "valid & (targets[t] >= 0)",
           "(t == length - 1) & (targets[t] >= 0)", MTP),
    # gating, norm
    Mutant("softplus threshold", "xla/gating.py", "SMALL, LARGE = -17.0, 20.0", "SMALL, LARGE = -17.0, 2.0",
           ("tests/test_gating.py::test_golden",)),
    Mutant("gate without its bias", "xla/gating.py", "x, x_error = _sum_and_error(a, dt_bias)",
           "x, x_error = _sum_and_error(a, 0 * dt_bias)", ("tests/test_gating.py::test_golden",)),
    Mutant("norm's epsilon outside the mean's root", "xla/norm.py",
           "lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)",
           "(1 / (jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True)) + eps))", ("tests/test_norm.py::test_golden",)),
    Mutant("norm without gate", "xla/norm.py", "x * jax.nn.silu(z.astype(f32))", "x * z.astype(f32)",
           ("tests/test_norm.py::test_golden",)),
    # the layer
    Mutant("swapped a and b", "layer.py", "mixed_qkv, z, b, a = jnp.split(", "mixed_qkv, z, a, b = jnp.split(",
           layer("test_splits", "test_golden_mtp_trace")),
    Mutant("split order of q and k", "layer.py", "q, k, v = jnp.split(", "k, q, v = jnp.split(",
           layer("test_splits", "test_golden_mtp_trace")),
    Mutant("ssm row of a slot without the step", "varlen.py", "batch.write * per_slot", "batch.write", TRACE),
    Mutant("prefill reads its ssm state at row 0", "varlen.py", "batch.read * per_slot + batch.offset",
           "batch.read * per_slot", TRACE),
    Mutant("verify accepts one more", "layer.py", "accepted = batch.offset + 1", "accepted = batch.offset + 2", TRACE),
    Mutant("copy_slots writes its sources", "layer.py", "ok = where_inside(dst, slots) >= 0",
           "ok = where_inside(dst if src is None else src, slots) >= 0", layer("test_copy_slots")),
    Mutant("copy_slots copies the first row of each slot only", "layer.py",
           "jnp.where(ok, src, 0)[:, None] * per_slot + span", "jnp.where(ok, src, 0)[:, None] * per_slot + 0 * span",
           layer("test_copy_slots")),
    Mutant("HF rows grouped by rank, not by head", "hf.py", ".reshape(c.num_k_heads, -1, hidden)[heads]\n    ba",
           ".reshape(-1, c.num_k_heads, hidden).swapaxes(0, 1)[heads]\n    ba",
           ("tests/test_field_faults.py::test_lay_07_rows_of_the_grouped_projections",)),
]  # fmt: skip


def run_tests(tree: Path, tests: tuple[str, ...], cache: Path) -> tuple[int, str]:
    """pytest's exit code (-1: too long), and the first failing test or its last line."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CI": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=line",
        "--rootdir",
        str(tree),
    ]
    command += ["-k", "not random_batches and not random_prefill and not random_verify_step and not malformed", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            timeout=TIMEOUT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {TIMEOUT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, failed[1] if failed else (lines[-1] if lines else "no output")


def make_tree(source: Path, folder: Path) -> Path:
    """A copy of what the tests need, in a new folder inside `folder`: the package, the tests, pyproject.toml."""
    tree = Path(tempfile.mkdtemp(dir=folder))
    ignore = shutil.ignore_patterns("__pycache__")
    for part in ("gdn_jax", "tests"):
        shutil.copytree(source / part, tree / part, ignore=ignore)
    shutil.copy(source / "pyproject.toml", tree)
    return tree


def existing(tests: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(test for test in tests if (ROOT / test.partition("::")[0]).exists())


def try_mutant(mutant: Mutant, source: Path, folder: Path, cache: Path) -> tuple[bool, str]:
    """Whether the tests noticed, and which did (or why not)."""
    tests = existing(mutant.tests)
    if not tests:
        return False, f"its tests are missing: {', '.join(mutant.tests)}"
    tree = make_tree(source, folder)
    path = tree / "gdn_jax" / mutant.file
    text = path.read_text()
    if (found := text.count(mutant.search)) != 1:
        return False, f"the search matches {found} times, expected once"
    path.write_text(text.replace(mutant.search, mutant.replace))
    code, what = run_tests(tree, tests, cache)
    shutil.rmtree(tree, ignore_errors=True)
    if code == 1:
        return True, what
    return False, "SURVIVED" if code == 0 else f"pytest's exit code is {code}: {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-k", default="", metavar="WORD", help="only mutants whose name or file contains it")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time (default 1)")
    parser.add_argument("--list", action="store_true", help="list the mutants and whether they match, run nothing")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.k in mutant.name or arguments.k in mutant.file]
    if arguments.list or not chosen:
        counts = [(ROOT / "gdn_jax" / mutant.file).read_text().count(mutant.search) for mutant in chosen]
        for mutant, count in zip(chosen, counts):
            print(f"{mutant.file:18} {mutant.name:55} {'ok' if count == 1 else f'matches {count} times'}")
        return int(not chosen or any(count != 1 for count in counts))

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gdn_jax_mutants_") as name:
        folder, cache = Path(name), Path(name) / "cache"
        cache.mkdir()
        every = tuple(dict.fromkeys(test for mutant in chosen for test in existing(mutant.tests)))
        source = make_tree(ROOT, folder)  # a snapshot, so that edits during the run do no harm
        code, what = run_tests(source, every, cache)
        if code != 0:
            print(f"The tests fail without any mutant: {what}")
            return 1
        print(f"no mutant: all pass ({time.monotonic() - began:.0f} s)", flush=True)
        survivors = 0
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            outcomes = pool.map(lambda mutant: try_mutant(mutant, source, folder, cache), chosen)
            for mutant, (caught, what) in zip(chosen, outcomes):
                survivors += not caught
                print(f"{'caught' if caught else 'MISSED':6}  {mutant.file:18} {mutant.name:52} {what}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught, {time.monotonic() - began:.0f} s")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
