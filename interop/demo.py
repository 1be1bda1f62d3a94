"""The serving demo: Qwen3-Next in PyTorch whose linear-attention layers run in JAX, on state pools that torch owns.

`serving.py` has the server, `scheduler.py` decides what it computes in which step. Here are the options, the
checkpoint, and the comparison: afterwards Hugging Face generates from the same prompts one by one, and every token has
to be the same.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import torch

from interop.scheduler import Scheduler
from interop.serving import Generated, generate_plainly, serve

BYTE_VOCABULARY = 259  # 256 bytes, padding, beginning, end
PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = 256, 257, 258
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's options to a parser; `run` takes what it parses."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a Qwen3-Next checkpoint (default: a small random one is made)"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="UTF-8 texts separated by blank lines; without a blank line each line is one (default: 12 texts)",
    )
    parser.add_argument("--slots", type=_at_least(1), default=4, metavar="N", help="requests in flight (default: 4)")
    parser.add_argument(
        "--max-new-tokens",
        type=_at_least(1),
        default=32,
        metavar="N",
        help="tokens to generate for each text (default: 32)",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=_at_least(1),
        default=256,
        metavar="N",
        help="prompt tokens a step, all requests (default: 256)",
    )
    parser.add_argument(
        "--mtp-step",
        type=_at_least(0),
        default=2,
        metavar="N",
        help="draft tokens a step; 0: plain decoding (default: 2)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random checkpoint (default: 0)")
    parser.add_argument(
        "--threads", type=_at_least(1), metavar="N", help="torch threads (default: 1; torch's own with --model)"
    )


def _at_least(least: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `least`."""

    def convert(text: str) -> int:
        value = int(text) if text.strip("+-").isdecimal() else None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of at least {least}")
        return value

    return convert


def run(args: argparse.Namespace) -> int:
    """Serves the prompts, compares with Hugging Face and prints the table.

    Args:
        args: what a parser with `add_arguments` gave.

    Returns:
        0 where all tokens are equal; 1 where one differs; 2 for options that can't be used (the reason is on stderr).
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    begin = time.perf_counter()
    console = Console()
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet_transformers())
        # Matrices this small gain nothing from a second thread, and lose much where another process wants the core.
        stack.enter_context(_torch_threads(1 if args.threads is None and args.model is None else args.threads))
        try:
            texts = read_prompts(args.prompts)
            directory = args.model
            if directory is None:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gdn-jax-demo-")))
                build_checkpoint(directory, seed=args.seed)
            model, encode = load_model(directory)
            prompts = [encode(text) for text in texts]
            scheduler = Scheduler(
                prompts,
                num_slots=args.slots,
                max_new_tokens=args.max_new_tokens,
                prefill_chunk=args.prefill_chunk,
                mtp_step=args.mtp_step,
                stop_tokens=model.generation_config.eos_token_id or (),
            )
        except (OSError, ValueError) as error:
            print(f"gdn-jax demo: {error}", file=sys.stderr)
            return 2
        with Progress(*columns, console=console) as progress:
            total = len(prompts) * args.max_new_tokens
            ours = progress.add_task("Compiling", total=total)
            theirs = progress.add_task("Plain Hugging Face, 1 by 1", total=total, start=False)
            served = serve(
                model,
                scheduler,
                num_slots=args.slots,
                prefill_chunk=args.prefill_chunk,
                mtp_step=args.mtp_step,
                advance=lambda count: progress.update(ours, advance=count, description="Serving with gdn_jax"),
            )
            progress.start_task(theirs)
            plain = generate_plainly(
                model, prompts, args.max_new_tokens, advance=lambda count: progress.advance(theirs, count)
            )
        result = compare(served, plain)
        console.print(_table(args, scheduler, served, plain, result, time.perf_counter() - begin))
    return 0 if result.same else 1


def read_prompts(path: Path | None) -> list[str]:
    """The texts of a file, or the package's own: separated by blank lines, or one a line in a file without any."""
    if path is None:
        content = resources.files("interop").joinpath("prompts.txt").read_text(encoding="utf-8")
    else:
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"`--prompts {path}` is not UTF-8 text: {error}.") from None
    lines = [line.rstrip() for line in content.strip().splitlines()]
    texts = "\n".join(lines).split("\n\n") if "" in lines else lines
    texts = [text.strip("\n") for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"`--prompts {path}` has no text in it, expected at least one line.")
    return texts


def build_checkpoint(directory: Path, *, seed: int, num_layers: int = 8, hidden_size: int = 128) -> None:
    """Saves a small random Qwen3-Next as a safetensors checkpoint: bytes as tokens, linear heads of full size.

    Two things differ from Hugging Face's initial weights, so that a random model is worth serving. Its decay rates
    would make most heads forget within a few tokens; here they are spread over a memory of one to a thousand tokens.
    And its embedding is twice as large, so that the greedy text sometimes repeats itself and drafts are accepted.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=8192,
        pad_token_id=PAD_TOKEN,
        bos_token_id=BOS_TOKEN,
        eos_token_id=EOS_TOKEN,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = Qwen3NextForCausalLM(config)
        model.model.embed_tokens.weight.mul_(2.0)
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.A_log.uniform_(math.log(1e-3), 0.0)
    model.save_pretrained(directory)


def load_model(directory: Path) -> tuple[Any, Callable[[str], list[int]]]:
    """Loads a checkpoint in float32, from the disk only.

    Returns:
        The `Qwen3NextForCausalLM`, set to greedy generation, and a function from a text to its tokens: the checkpoint's
        tokenizer where there is one, else the UTF-8 bytes.

    Raises:
        ValueError: no directory, no Qwen3-Next `config.json`, or neither a tokenizer nor a vocabulary that holds the
            bytes.
    """
    from transformers import AutoTokenizer, GenerationConfig, Qwen3NextForCausalLM

    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"`--model {directory}` has no file config.json, expected a Qwen3-Next checkpoint's folder.")
    try:
        kind = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"`{path}` is not a JSON object: {error}.") from None
    if kind != "qwen3_next":
        raise ValueError(f"`{path}` has model_type {kind!r}, expected 'qwen3_next'.")
    device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    model: Any = Qwen3NextForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    model = model.to(device).eval()
    stop = model.generation_config.eos_token_id
    stop = [stop] if isinstance(stop, int) else stop
    pad = stop[0] if stop else 0  # one text at a time: never used
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=stop, pad_token_id=pad)
    if any((directory / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return model, lambda text: list(tokenizer(text)["input_ids"])
    if model.config.vocab_size < 256:
        raise ValueError(
            f"`--model {directory}` has no tokenizer, and its vocab_size is {model.config.vocab_size}, "
            "expected at least 256 to take bytes as tokens."
        )
    return model, lambda text: list(text.encode("utf-8"))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What differs from the reference.

    Attributes:
        num_tokens: tokens of the reference.
        different_tokens: places with another token, or with none on one side.
        largest_difference: of a logit, up to a request's first different token (after it the texts differ, too).
    """

    num_tokens: int
    different_tokens: int
    largest_difference: float

    @property
    def same(self) -> bool:
        """All tokens equal and all logits numbers."""
        return self.different_tokens == 0 and math.isfinite(self.largest_difference)


def compare(ours: Generated, reference: Generated) -> Comparison:
    """Counts different tokens and finds the largest logit difference."""
    different = 0
    largest = 0.0
    for tokens, logits, their_tokens, their_logits in zip(
        ours.tokens, ours.logits, reference.tokens, reference.logits, strict=True
    ):
        equal = [a == b for a, b in zip(tokens, their_tokens, strict=False)]
        different += max(len(tokens), len(their_tokens)) - sum(equal)
        rows = min((equal + [False]).index(False) + 1, len(equal))
        gap = (logits[:rows] - their_logits[:rows]).abs()
        largest = max(largest, float(gap.nan_to_num(nan=math.inf).max())) if gap.numel() else largest
    return Comparison(sum(map(len, reference.tokens)), different, largest)


def _table(
    args: argparse.Namespace,
    scheduler: Scheduler,
    served: Generated,
    plain: Generated,
    result: Comparison,
    seconds: float,
) -> Any:
    from rich.table import Table

    counts = scheduler.counts
    pieces = sum(len(request.pieces) for request in scheduler.requests)
    rate, plain_rate = counts.new_tokens / served.seconds, result.num_tokens / plain.seconds
    accepted = f"{counts.accepted} of {counts.drafted}" if args.mtp_step else "none drafted (--mtp-step 0)"
    if counts.drafted:
        accepted += f" ({counts.accepted / counts.drafted:.0%})"
    table = Table(title="gdn-jax demo: continuous batching, checked against Hugging Face", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("Model", str(args.model) if args.model else f"random Qwen3-Next, seed {args.seed}")
    table.add_row("Requests / slots", f"{len(scheduler.requests)} / {args.slots}")
    table.add_row("Prompt tokens", f"{counts.prefill_tokens} in {pieces} pieces, at most {args.prefill_chunk} a step")
    table.add_row("New tokens", f"{counts.new_tokens} in {counts.steps} steps")
    table.add_row("Time", f"{served.seconds:.1f} s, before it {served.compile_seconds:.1f} s of set-up and compilation")
    table.add_row("Tokens per second", f"{rate:.1f} (Hugging Face, one by one: {plain_rate:.1f})")
    table.add_row(
        "Time share of GDN layers", f"{served.layer_share:.0%} (in gdn_jax's operators: {served.operator_share:.0%})"
    )
    table.add_row("Accepted drafts", accepted)
    table.add_row("Largest logit difference", f"{result.largest_difference:.1e}")
    colour = "green" if result.same else "red"
    table.add_row("Different greedy tokens", f"[{colour}]{result.different_tokens} of {result.num_tokens}[/{colour}]")
    table.add_row("The whole demo", f"{seconds:.1f} s")
    return table


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hides transformers' loading bars and its notes on missing kernels while the demo runs."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """Sets the number of torch threads, and back again; None leaves it."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
