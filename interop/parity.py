"""The parity table: the error of every operator by dtype and backend, against float64, Hugging Face and golden arrays."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers.models.qwen3_next import modeling_qwen3_next as hf

import gdn_jax
from gdn_jax import GDNConfig, GDNState, GDNWeights, reference

LENGTHS = (1, 70, 0, 33, 2)  # of the sequences of the packed batches: a tail, an empty one, a single token
SLOTS = 7
CONFIG = GDNConfig(4, 2, 128, 128, 4, mtp_step=2, ssm_dtype="float32", conv_dtype="float32")
# The table of operators.md: the largest error of the outputs, and of a float32 state.
LIMITS = {
    "float32": {"chunk": 1e-5, "layer": 1e-5, "other": 2e-6, "gating": 2e-6},
    "bfloat16": {"chunk": 3e-3, "layer": 6e-3, "other": 3e-3, "gating": 2e-6},
    "float16": {"chunk": 7.5e-4, "layer": 1.5e-3, "other": 7.5e-4, "gating": 2e-6},
}
KINDS = {"chunk_gated_delta_rule": "chunk", "gdn_gating": "gating"}


class Row(NamedTuple):
    """One line of the table: `error` is ‖x − want‖ / ‖want‖ of the outputs (the larger, where there are several)."""

    operator: str
    dtype: str
    backend: str
    against: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run` to a parser."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON too")
    parser.add_argument(
        "--cases", type=Path, metavar="DIR", help="a folder of golden .npz cases (default: tests/cases of a checkout)"
    )


def relative_error(x: Any, want: Any) -> float:
    """‖x − want‖₂ / ‖want‖₂ in float64; infinite where `x` is not finite."""
    x, want = (np.asarray(a).astype(np.float64).ravel() for a in (x, want))
    error = float(np.linalg.norm(x - want) / (np.linalg.norm(want) or 1.0))
    return error if math.isfinite(error) else math.inf


def _inputs(dtype: str) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of every operator, seeded; floating point arrays in `dtype`, gates and states float32."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def low(x: Any) -> Any:
        return x.astype(dtype if dtype != "bfloat16" else ml_dtypes.bfloat16)

    c, total, n = CONFIG, sum(LENGTHS), len(LENGTHS)
    heads, v_heads, k_dim, v_dim = c.tp_num_k_heads, c.tp_num_v_heads, c.head_k_dim, c.head_v_dim
    starts = np.cumsum([0, *LENGTHS]).astype(np.int32)
    slots = np.array([4, 0, 2, 6, -1], np.int32)
    rows = (slots[:, None] * 3 + np.arange(3)).astype(np.int32)
    short = np.array([0, 3, 4, 4, 6, 7], np.int32)
    accepted = np.array([1, 3, 2, 2, 1], np.int32)
    weights = GDNWeights(low(normal(c.conv_dim, 4)), low(normal(c.conv_dim)), normal(v_heads) - 2, normal(v_heads))
    state = GDNState(normal(SLOTS, c.conv_dim, c.conv_state_len), normal(SLOTS * 3, v_heads, k_dim, v_dim, scale=0.1))
    plain = GDNState(state.conv[..., :3], state.ssm[:SLOTS])
    norm_weight = low(1 + normal(v_dim, scale=0.1))

    def rule(tokens: int) -> tuple[Any, ...]:
        q, k, v = (low(normal(tokens, h, d)) for h, d in ((heads, k_dim), (heads, k_dim), (v_heads, v_dim)))
        return q, k, v, -np.abs(normal(tokens, v_heads, scale=0.3)), 1 / (1 + np.exp(-normal(tokens, v_heads)))

    def mixed(tokens: int) -> Any:
        return low(normal(tokens, c.qkvz_dim + c.ba_dim))

    x = low(normal(total, c.conv_dim))
    packed: dict[str, Any] = dict(query_start_loc=starts, state_indices=slots)
    verify: dict[str, Any] = dict(query_start_loc=short, num_accepted_tokens=accepted)
    tables = dict(read_indices=rows, write_indices=rows)
    decode = GDNConfig(4, 2, 128, 128, 4, ssm_dtype="float32", conv_dtype="float32")
    return {
        "gdn_gating": ((weights.A_log, low(normal(total, v_heads)), low(normal(total, v_heads)), weights.dt_bias), {}),
        "causal_conv1d": ((x, weights.conv_weight, weights.conv_bias), dict(conv_state=state.conv, **packed)),
        "causal_conv1d_update": (
            (x[: short[-1]], weights.conv_weight, weights.conv_bias),
            dict(conv_state=state.conv, state_indices=slots, **verify),
        ),
        "chunk_gated_delta_rule": (rule(total), dict(ssm_state=plain.ssm, **packed)),
        "recurrent_gated_delta_rule": (rule(n), dict(ssm_state=plain.ssm, state_indices=slots)),
        "mtp_gated_delta_rule": (rule(int(short[-1])), dict(ssm_state=state.ssm, **tables, **verify)),
        "gated_rms_norm": ((low(normal(total, v_heads, v_dim)), low(normal(total, v_heads, v_dim)), norm_weight), {}),
        "gdn_prefill": ((weights, state, mixed(total)), dict(config=c, norm_weight=norm_weight, **packed)),
        "gdn_decode": (
            (weights, plain, mixed(n)),
            dict(config=decode, state_indices=slots, norm_weight=norm_weight),
        ),
        "gdn_mtp_decode": (
            (weights, state, mixed(int(short[-1]))),
            dict(config=c, state_indices=slots, norm_weight=norm_weight, **verify),
        ),
    }  # fmt: skip


def _outputs(results: Any) -> list[Any]:
    """The outputs among what an operator returned: all of gating's, else the first."""
    if hasattr(results, "o"):
        return [results.o]
    if isinstance(results, tuple):
        return list(results[:1])
    return [results]


def _float64_rows(backend: str) -> Iterator[Row]:
    for dtype, limits in LIMITS.items():
        for name, (args, kwargs) in _inputs(dtype).items():
            got = getattr(gdn_jax, name)(*args, **kwargs)
            want = getattr(reference, name)(*args, **kwargs)
            pairs = zip(got, want) if name == "gdn_gating" else zip(_outputs(got), _outputs(want))
            kind = "layer" if name in ("gdn_prefill", "gdn_decode", "gdn_mtp_decode") else KINDS.get(name, "other")
            yield Row(name, dtype, backend, "float64", max(relative_error(x, y) for x, y in pairs), limits[kind])


def _hf_rows(backend: str) -> Iterator[Row]:
    """Against the torch code of the installed transformers, float32."""
    rules: dict[str, tuple[Callable[..., Any], int]] = {
        "chunk_gated_delta_rule": (hf.torch_chunk_gated_delta_rule, 100),
        "recurrent_gated_delta_rule": (hf.torch_recurrent_gated_delta_rule, 1),
    }
    inputs = _inputs("float32")
    for name, (function, length) in rules.items():
        arrays = [x[:length] for x in inputs["chunk_gated_delta_rule"][0]]
        state = inputs["chunk_gated_delta_rule"][1]["ssm_state"][:1]
        q, k, v, g, beta = (torch.from_numpy(x)[None] for x in arrays)
        q, k = (x.repeat_interleave(CONFIG.v_heads_per_k_head, dim=2) for x in (q, k))
        with torch.no_grad():
            options = dict(initial_state=torch.from_numpy(state), output_final_state=True, use_qk_l2norm_in_kernel=True)
            want, _ = function(q, k, v, g, beta, **options)
        starts = {} if length == 1 else {"query_start_loc": np.array([0, length], np.int32)}
        got, _ = getattr(gdn_jax, name)(*arrays, ssm_state=state, **starts)
        limit = LIMITS["float32"][KINDS.get(name, "other")]
        yield Row(name, "float32", backend, "Hugging Face", relative_error(got, want[0].numpy()), limit)


def _golden_rows(backend: str, folder: Path) -> Iterator[Row]:
    """Against every golden case of one operator."""
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        name = _operator_of(path.stem)
        if name is None:
            continue
        kwargs = {
            key.removesuffix("__bf16"): value.view(ml_dtypes.bfloat16) if key.endswith("__bf16") else value
            for key, value in arrays.items()
            if not key.startswith("want_")
        }
        kwargs = {key: value if np.ndim(value) else value.item() for key, value in kwargs.items()}
        if kwargs.get("activation") == "None":
            kwargs["activation"] = None
        got = getattr(gdn_jax, name)(**kwargs)
        wants = [arrays[f"want_{key}"] for key in ("g", "beta", "y", "o") if f"want_{key}" in arrays]
        dtype = "bfloat16" if any(key.endswith("__bf16") for key in arrays) else "float32"
        kind = KINDS.get(name, "other")
        pairs = zip(got if name == "gdn_gating" else _outputs(got), wants)
        error = max(relative_error(x, want) for x, want in pairs)
        yield Row(name, dtype, backend, path.stem, error, LIMITS[dtype][kind])


def _operator_of(case: str) -> str | None:
    """The operator of a golden case, by its file name; None for the cases that span several calls."""
    if case == "conv_verify" or case.startswith("conv_update"):
        return "causal_conv1d_update"
    prefixes = {
        "gating": "gdn_gating",
        "conv": "causal_conv1d",
        "chunk": "chunk_gated_delta_rule",
        "recurrent": "recurrent_gated_delta_rule",
        "mtp_rule": "mtp_gated_delta_rule",
        "rms_norm": "gated_rms_norm",
    }
    return next((name for prefix, name in prefixes.items() if case.startswith(prefix)), None)


def rows(cases: Path | None = None) -> Iterator[Row]:
    """Computes the table row by row.

    Args:
        cases: the folder of the golden cases; None: that of the checkout, and no such rows where there is none.
    """
    backend = jax.default_backend()
    yield from _float64_rows(backend)
    yield from _hf_rows(backend)
    folder = cases or Path(__file__).parent.parent / "tests" / "cases"
    if folder.is_dir():
        yield from _golden_rows(backend, folder)


def run(options: argparse.Namespace) -> int:
    """Prints the table; returns 0 where every error is within its limit, else 1, and 2 for an unusable option."""
    console = Console()
    if not console.is_terminal:
        console.width = 110  # a pipe has no width of its own, and names must not be cut
    if options.cases is not None and not options.cases.is_dir():
        print(f"gdn-jax parity: --cases {options.cases} is no folder.", file=sys.stderr)
        return 2
    table = Table("operator", "dtype", "backend", "against", "error", "limit", "", title="parity")
    found = []
    for row in rows(options.cases):
        found.append(row)
        mark = "ok" if row.passed else "FAILED"
        table.add_row(*row[:4], f"{row.error:.1e}", f"{row.limit:.1e}", mark)
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() | {"passed": row.passed} for row in found], indent=1) + "\n")
    return 0 if all(row.passed for row in found) else 1
