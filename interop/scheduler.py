"""Continuous batching for the demo: which request holds which slot, and which tokens each step computes.

Plain Python, no arrays. A slot is an int, the row of the state pools that one request owns from the moment it is
admitted until it has finished. Every step packs, in this order, pieces of prompts (at most `prefill_chunk` tokens of
all requests together) and one row per request that is already decoding: its last token and up to `mtp_step` drafts.

    scheduler = Scheduler(prompts, num_slots=4, max_new_tokens=32, prefill_chunk=256, mtp_step=2)
    while step := scheduler.plan():
        ...                                  # the model: one greedy token for every row in step.rows
        scheduler.commit(step, greedy)
"""

import dataclasses
from collections import deque
from collections.abc import Collection, Sequence

NO_SLOT = -1


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt on its way through the server.

    Attributes:
        index: its place among the prompts.
        prompt: token ids, at least one.
        max_new_tokens: the most tokens to generate.
        slot: the pool row that it owns; `NO_SLOT` before it is admitted and after it has finished.
        num_cached: tokens of `prompt + generated` whose states and keys are in the caches, all of them committed.
        num_accepted: the accepted count that the next verify step starts from: 1 after a prefill, else 1 + accepted
            drafts.
        generated: the tokens so far.
        pieces: the lengths of the pieces that the prompt was prefilled in.
        finished: True after the last token.
    """

    index: int
    prompt: list[int]
    max_new_tokens: int
    slot: int = NO_SLOT
    num_cached: int = 0
    num_accepted: int = 1
    generated: list[int] = dataclasses.field(default_factory=list)
    pieces: list[int] = dataclasses.field(default_factory=list)
    finished: bool = False

    @property
    def is_prefilling(self) -> bool:
        """True while some of the prompt is not in the caches."""
        return self.num_cached < len(self.prompt)


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
    """The consecutive tokens of one request in one step; the first one stands at position `start` of its text."""

    request: Request
    tokens: list[int]
    start: int

    @property
    def num_rows(self) -> int:
        """How many of its last tokens ask for a next token: those from the prompt's last token on."""
        past_prompt = self.start + len(self.tokens) - len(self.request.prompt) + 1
        return min(len(self.tokens), max(0, past_prompt))


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What the model computes at once: prompt pieces, then the rows of the decoding requests."""

    prefill: list[Span]
    decode: list[Span]

    @property
    def spans(self) -> list[Span]:
        """All spans in packed order."""
        return self.prefill + self.decode

    @property
    def rows(self) -> list[int]:
        """The packed token rows that ask for a next token: the end of each finished prompt, and all decode tokens."""
        rows: list[int] = []
        end = 0
        for span in self.spans:
            end += len(span.tokens)
            rows.extend(range(end - span.num_rows, end))
        return rows


@dataclasses.dataclass
class Counts:
    """What a run has done so far."""

    steps: int = 0
    prefill_tokens: int = 0
    new_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


def look_up_draft(text: Sequence[int], length: int, max_ngram: int = 3) -> list[int]:
    """Drafts by prompt look-up: what followed the last earlier place where the end of the text already stood.

    Args:
        text: prompt and generated tokens.
        length: the most tokens to return.
        max_ngram: the longest ending to look for; shorter ones are tried after it, down to one token.

    Returns:
        0 to `length` tokens.

    Example:
        >>> look_up_draft([7, 8, 9, 5, 7, 8], 2)
        [9, 5]
    """
    for size in range(min(max_ngram, len(text) - 1), 0, -1):
        ending = list(text[-size:])
        for at in range(len(text) - size - 1, -1, -1):
            if text[at] == ending[0] and list(text[at : at + size]) == ending:
                return list(text[at + size : at + size + length]) if length > 0 else []
    return []


def count_accepted(drafts: Sequence[int], greedy: Sequence[int]) -> int:
    """How many drafts equal the model's own choice: `greedy[i]` is its token where `drafts[i]` was guessed."""
    count = 0
    while count < len(drafts) and drafts[count] == greedy[count]:
        count += 1
    return count


class Scheduler:
    """First come, first served over a fixed number of slots.

    Args:
        prompts: token ids of each request, none empty.
        num_slots: requests in flight.
        max_new_tokens: the most tokens that a request generates, at least 1.
        prefill_chunk: the most prompt tokens in a step, of all requests together.
        mtp_step: the most draft tokens of a request in a step; 0: plain decoding.
        stop_tokens: a request ends after one of these.

    Raises:
        ValueError: a number below its least, or an empty prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_slots: int,
        max_new_tokens: int,
        prefill_chunk: int,
        mtp_step: int = 0,
        stop_tokens: Collection[int] = (),
    ) -> None:
        least = dict(num_slots=1, max_new_tokens=1, prefill_chunk=1, mtp_step=0)
        given = dict(num_slots=num_slots, max_new_tokens=max_new_tokens, prefill_chunk=prefill_chunk, mtp_step=mtp_step)
        for name, value in given.items():
            if value < least[name]:
                raise ValueError(f"Scheduler: `{name}` is {value}, expected at least {least[name]}.")
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"Scheduler: `prompts[{index}]` is empty, expected at least one token.")
        self.requests = [Request(i, list(prompt), max_new_tokens) for i, prompt in enumerate(prompts)]
        self.counts = Counts()
        self._prefill_chunk = prefill_chunk
        self._mtp_step = mtp_step
        self._stop_tokens = frozenset(stop_tokens)
        self._waiting = deque(self.requests)
        self._running: list[Request] = []
        self._free = list(range(num_slots - 1, -1, -1))

    def plan(self) -> Step | None:
        """Admits requests to free slots and says what to compute next; None when every request has finished."""
        while self._waiting and self._free:
            request = self._waiting.popleft()
            request.slot = self._free.pop()
            self._running.append(request)
        prefill: list[Span] = []
        decode: list[Span] = []
        budget = self._prefill_chunk
        for request in self._running:
            if not request.is_prefilling:
                decode.append(self._decode_span(request))
            elif budget:
                tokens = request.prompt[request.num_cached : request.num_cached + budget]
                budget -= len(tokens)
                prefill.append(Span(request, tokens, request.num_cached))
        return Step(prefill, decode) if self._running else None

    def _decode_span(self, request: Request) -> Span:
        last = request.generated[-1]
        room = request.max_new_tokens - len(request.generated) - 1
        drafts = look_up_draft(request.prompt + request.generated, min(self._mtp_step, room))
        return Span(request, [last, *drafts], request.num_cached)

    def commit(self, step: Step, greedy: Sequence[int]) -> list[list[int]]:
        """Takes the model's greedy token of every row of `step.rows`; rolls back to the accepted drafts; frees slots.

        Args:
            step: what `plan` returned.
            greedy: one token for each of `step.rows`.

        Returns:
            For each span of `step.spans` the tokens that its request gained: none for a piece in the middle of a
            prompt.
        """
        if len(greedy) != len(step.rows):
            raise ValueError(f"Scheduler.commit: `greedy` has {len(greedy)} tokens, expected {len(step.rows)}.")
        gained: list[list[int]] = []
        at = 0
        for span in step.prefill:
            request = span.request
            request.pieces.append(len(span.tokens))
            request.num_cached += len(span.tokens)
            request.num_accepted = 1
            self.counts.prefill_tokens += len(span.tokens)
            gained.append(self._extend(request, greedy[at : at + span.num_rows]))
            at += span.num_rows
        for span in step.decode:
            request = span.request
            own = greedy[at : at + span.num_rows]
            accepted = count_accepted(span.tokens[1:], own)
            request.num_cached += 1 + accepted
            request.num_accepted = 1 + accepted
            self.counts.drafted += len(span.tokens) - 1
            self.counts.accepted += accepted
            gained.append(self._extend(request, own[: 1 + accepted]))
            at += span.num_rows
        self.counts.steps += 1
        return gained

    def _extend(self, request: Request, tokens: Sequence[int]) -> list[int]:
        """Appends tokens up to the request's end; returns those that were appended."""
        before = len(request.generated)
        for token in tokens:
            request.generated.append(int(token))
            request.finished = token in self._stop_tokens or len(request.generated) == request.max_new_tokens
            if request.finished:
                self._running.remove(request)
                self._free.append(request.slot)
                request.slot = NO_SLOT
                break
        self.counts.new_tokens += len(request.generated) - before
        return request.generated[before:]
