"""The demo: the scheduler alone, then small runs of the whole thing, with and without planted faults."""

import argparse
import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from interop import demo, serving
from interop.scheduler import NO_SLOT, Request, Scheduler, Span, Step, count_accepted, look_up_draft

TEXTS = [
    "one",
    "two two two two two two two",
    "a longer text, which is cut into pieces when it is prefilled",
    "ü",
    "five",
]


# ------------------------------------------------------------------------------------------------------------ scheduler


def next_token(text: list[int]) -> int:
    """Stands in for a model: repeats itself often, so that drafts are accepted, but not always."""
    return (text[-1] + (3 if len(text) % 7 else 5)) % 11


def model_tokens(step: Step) -> list[int]:
    greedy: list[int] = []
    for span in step.spans:
        before = (span.request.prompt + span.request.generated)[: span.start]
        for row in range(len(span.tokens) - span.num_rows, len(span.tokens)):
            greedy.append(next_token(before + span.tokens[: row + 1]))
    return greedy


def plain_tokens(prompt: list[int], count: int, stop: int | None = None) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + count:
        text.append(next_token(text))
        if text[-1] == stop:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("mtp_step", [0, 1, 3])
@pytest.mark.parametrize(("num_slots", "prefill_chunk"), [(1, 4), (3, 5), (3, 100), (20, 1)])
def test_every_request_finishes_with_the_models_own_tokens(num_slots: int, prefill_chunk: int, mtp_step: int) -> None:
    prompts = [[(i * k) % 11 for k in range(1, 2 + 3 * i)] for i in range(9)]
    scheduler = Scheduler(
        prompts, num_slots=num_slots, max_new_tokens=13, prefill_chunk=prefill_chunk, mtp_step=mtp_step, stop_tokens=[7]
    )
    used: list[int] = []
    while step := scheduler.plan():
        slots = [span.request.slot for span in step.spans]
        assert len(set(slots)) == len(slots), "two requests in one slot"
        assert all(0 <= slot < num_slots for slot in slots)
        assert step.spans, "a step without work"
        assert sum(len(span.tokens) for span in step.prefill) <= prefill_chunk
        assert all(1 <= len(span.tokens) <= mtp_step + 1 for span in step.decode)
        assert all(1 <= span.request.num_accepted <= mtp_step + 1 for span in step.decode)
        for span in step.spans:
            text = span.request.prompt + span.request.generated
            assert text[span.start : span.start + len(span.tokens)][:1] == span.tokens[:1]
            assert span.start == span.request.num_cached
            assert span.start + len(span.tokens) <= len(span.request.prompt) + 13
        used += [span.request.slot for span in step.prefill if span.start == 0]
        scheduler.commit(step, model_tokens(step))
    assert len(used) == len(prompts)
    assert set(used) == set(range(min(num_slots, len(prompts)))), "slots are used again"
    for request, prompt in zip(scheduler.requests, prompts, strict=True):
        assert request.finished
        assert request.slot == NO_SLOT
        assert sum(request.pieces) == len(prompt)
        assert request.generated == plain_tokens(prompt, 13, stop=7)
    assert scheduler.counts.prefill_tokens == sum(map(len, prompts))
    assert scheduler.counts.new_tokens == sum(len(request.generated) for request in scheduler.requests)
    assert (scheduler.counts.drafted > scheduler.counts.accepted > 0) == (mtp_step > 0)


def test_prompts_are_prefilled_beside_decoding_requests() -> None:
    scheduler = Scheduler([[1], [2] * 9], num_slots=2, max_new_tokens=8, prefill_chunk=4)
    mixed = 0
    while step := scheduler.plan():
        mixed += bool(step.prefill and step.decode)
        scheduler.commit(step, model_tokens(step))
    assert mixed
    assert scheduler.requests[1].pieces == [3, 4, 2]


def test_rejected_drafts_are_rolled_back() -> None:
    scheduler = Scheduler([[1, 2, 3, 4, 1, 2]], num_slots=1, max_new_tokens=9, prefill_chunk=99, mtp_step=3)
    step = scheduler.plan()
    assert step is not None
    scheduler.commit(step, [3])
    request = scheduler.requests[0]
    step = scheduler.plan()
    assert step is not None
    assert step.decode[0].tokens == [3, 4, 1, 2]
    assert scheduler.commit(step, [4, 1, 9, 9]) == [[4, 1, 9]]
    assert request.num_accepted == 3
    assert request.num_cached == 6 + 3
    assert request.generated == [3, 4, 1, 9]
    step = scheduler.plan()
    assert step is not None
    assert (step.decode[0].start, step.decode[0].tokens[0]) == (9, 9)


def test_drafts_leave_room_for_the_models_own_token() -> None:
    scheduler = Scheduler([[1, 1, 1, 1]], num_slots=1, max_new_tokens=2, prefill_chunk=9, mtp_step=3)
    step = scheduler.plan()
    assert step is not None
    scheduler.commit(step, [1])
    step = scheduler.plan()
    assert step is not None
    assert step.decode[0].tokens == [1]


def test_rows_of_a_span() -> None:
    request = Request(0, [5] * 10, 4)
    assert Span(request, [5] * 4, 0).num_rows == 0
    assert Span(request, [5] * 4, 6).num_rows == 1
    assert Span(request, [5] * 3, 12).num_rows == 3
    assert Step([Span(request, [5] * 4, 6)], [Span(request, [5] * 3, 12)]).rows == [3, 4, 5, 6]


def test_look_up_draft() -> None:
    assert look_up_draft([7, 8, 9, 5, 7, 8], 2) == [9, 5]
    assert look_up_draft([1, 2, 1, 3, 1], 1) == [3], "the last place counts"
    assert look_up_draft([8, 1, 2, 5, 9, 2, 6, 1, 2], 1) == [5], "a longer ending comes first"
    assert look_up_draft([1, 2, 3], 2) == []
    assert look_up_draft([1, 1], 5) == [1]
    assert look_up_draft([1, 1], 0) == []
    assert look_up_draft([1], 3) == []


def test_count_accepted() -> None:
    assert count_accepted([1, 2, 3], [1, 2, 4, 9]) == 2
    assert count_accepted([1, 2], [1, 2, 3]) == 2
    assert count_accepted([5], [1, 5]) == 0
    assert count_accepted([], [1]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_slots=0), "`num_slots` is 0, expected at least 1"),
        (dict(max_new_tokens=0), "`max_new_tokens` is 0, expected at least 1"),
        (dict(prefill_chunk=0), "`prefill_chunk` is 0, expected at least 1"),
        (dict(mtp_step=-1), "`mtp_step` is -1, expected at least 0"),
        (dict(prompts=[[1], []]), r"`prompts\[1\]` is empty"),
    ],
)
def test_scheduler_refuses(options: dict, message: str) -> None:
    options = dict(prompts=[[1]], num_slots=1, max_new_tokens=1, prefill_chunk=1) | options
    with pytest.raises(ValueError, match=message):
        Scheduler(options.pop("prompts"), **options)


def test_commit_refuses_a_wrong_number_of_tokens() -> None:
    scheduler = Scheduler([[1, 2]], num_slots=1, max_new_tokens=1, prefill_chunk=9)
    step = scheduler.plan()
    assert step is not None
    with pytest.raises(ValueError, match="`greedy` has 2 tokens, expected 1"):
        scheduler.commit(step, [3, 4])


# ----------------------------------------------------------------------------------------------------------------- demo


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    demo.build_checkpoint(directory, seed=10, num_layers=4, hidden_size=64)
    return directory


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    return path


def run(*options: object) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args([str(option) for option in options]))


def small(checkpoint: Path, prompts: Path, mtp_step: int) -> list[object]:
    # fmt: off
    return ["--model", checkpoint, "--prompts", prompts, "--slots", 2, "--prefill-chunk", 16, "--max-new-tokens", 24,
            "--threads", 1, "--mtp-step", mtp_step]
    # fmt: on


@pytest.mark.parametrize("mtp_step", [0, 2])
def test_same_tokens_as_hugging_face(
    checkpoint: Path, prompts: Path, mtp_step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*small(checkpoint, prompts, mtp_step)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"Different greedy tokens\W+0 of \d+", printed)
    assert re.search(r"Requests / slots\W+5 / 2", printed)
    assert "Tokens per second" in printed
    assert "Time share of GDN layers" in printed
    difference = re.search(r"Largest logit difference\W+([\d.e+-]+)", printed)
    assert difference is not None
    assert float(difference[1]) < 1e-4
    if mtp_step:
        drafts = re.search(r"Accepted drafts\W+(\d+) of (\d+)", printed)
        assert drafts is not None
        assert 0 < int(drafts[1]) < int(drafts[2])
    else:
        assert "none drafted" in printed


@pytest.mark.parametrize("fault", ["accepted drafts forgotten", "rejected drafts kept"])
def test_a_wrong_roll_back_is_found(
    checkpoint: Path,
    prompts: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commit = Scheduler.commit

    def wrong_commit(self: Scheduler, step: Step, greedy: list[int]) -> list[list[int]]:
        gained = commit(self, step, greedy)
        for span in step.decode:
            span.request.num_accepted = 1 if fault == "accepted drafts forgotten" else len(span.tokens)
        return gained

    monkeypatch.setattr(Scheduler, "commit", wrong_commit)
    assert run(*small(checkpoint, prompts, 2)) == 1
    assert not re.search(r"Different greedy tokens\W+0 of", capsys.readouterr().out)


def test_a_slot_that_is_not_reset_is_found(checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = serving.Server._prefill_batch

    def stale(self: serving.Server, spans: list[Span]) -> serving.GDNBatch:
        result = batch(self, spans)
        result.extra.fill_(True)
        return result

    monkeypatch.setattr(serving.Server, "_prefill_batch", stale)
    assert run(*small(checkpoint, prompts, 2)) == 1


def test_logits_that_are_not_numbers_are_found() -> None:
    good = serving.Generated([[1]], [torch.zeros(1, 3)], 1.0)
    assert demo.compare(good, good).same
    bad = serving.Generated([[1]], [torch.tensor([[0.0, float("nan"), 0.0]])], 1.0)
    assert not demo.compare(bad, good).same
    assert not demo.compare(good, bad).same


def test_compare_counts_places() -> None:
    logits = torch.arange(12.0).reshape(4, 3)
    reference = serving.Generated([[1, 2, 3, 4]], [logits], 1.0)
    changed = logits.clone()
    changed[1] += 0.5
    changed[2] += 9.0  # after the first different token: another text
    ours = serving.Generated([[1, 5, 3]], [changed[:3]], 1.0)
    result = demo.compare(ours, reference)
    assert (result.num_tokens, result.different_tokens, result.largest_difference) == (4, 2, 0.5)


def test_checkpoint_depends_on_the_seed_only(checkpoint: Path, tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    for seed in (10, 4):
        demo.build_checkpoint(tmp_path / str(seed), seed=seed, num_layers=4, hidden_size=64)
    assert torch.equal(torch.random.get_rng_state(), before)
    files = [path / "model.safetensors" for path in (checkpoint, tmp_path / "10", tmp_path / "4")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != files[2].read_bytes()


def test_tokenizer_of_the_checkpoint_is_used(checkpoint: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    directory = shutil.copytree(checkpoint, tmp_path / "with-tokenizer")
    words = Tokenizer(WordLevel({"<unk>": 0, "two": 1, "one": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(directory)
    _, encode = demo.load_model(directory)
    assert encode("one two three") == [2, 1, 0]
    _, encode = demo.load_model(checkpoint)
    assert encode("ü") == [0xC3, 0xBC]


def test_prompts(tmp_path: Path) -> None:
    shipped = demo.read_prompts(None)
    assert len(shipped) == 12
    assert 1000 <= max(len(text.encode()) for text in shipped) <= 1100
    path = tmp_path / "texts"
    path.write_text("one\ntwo\n", encoding="utf-8")
    assert demo.read_prompts(path) == ["one", "two"]
    path.write_text("one\nstill one\n\n \ntwo\n", encoding="utf-8")
    assert demo.read_prompts(path) == ["one\nstill one", "two"]


def test_options_that_cannot_work(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(message: str, *options: object) -> None:
        assert run(*options) == 2
        assert re.search(message, capsys.readouterr().err)

    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes(b"\xfc")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    refuse("has no file config.json, expected a Qwen3-Next", "--model", tmp_path / "nothing")
    refuse("model_type 'llama', expected 'qwen3_next'", "--model", tmp_path)
    refuse("is not a JSON object", "--model", tmp_path / "list")
    refuse("has no text in it", "--model", checkpoint, "--prompts", tmp_path / "empty.txt")
    refuse("is not UTF-8", "--model", checkpoint, "--prompts", tmp_path / "latin.txt")
    refuse("no.txt", "--model", checkpoint, "--prompts", tmp_path / "no.txt")
    wrong = {"--slots": "0", "--mtp-step": "-1", "--threads": "0", "--prefill-chunk": "2.5", "--max-new-tokens": "x"}
    for option, value in wrong.items():
        with pytest.raises(SystemExit):
            run(f"{option}={value}")
        assert f"argument {option}: '{value}', expected an integer of at least" in capsys.readouterr().err
