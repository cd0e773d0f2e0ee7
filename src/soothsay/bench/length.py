"""`soothsay bench length`: what drafters gain by position in long answers, and after long prompts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from soothsay import LLM, RequestError, SamplingParams
from soothsay.bench.bench_plans import LengthPlan
from soothsay.bench.journal import Journal, conditions, short_hash
from soothsay.bench.measure import Meter, Progress, turns
from soothsay.bench.prompts import encode, read_prompts, spread
from soothsay.bench.running import answer_of, running
from soothsay.bench.spec.spec_results import PLAIN
from soothsay.bench.tables import ResultTable
from soothsay.corpus import PromptEntry
from soothsay.drafters.registry import build_drafter
from soothsay.plotting import new_figure, series_style, tidy

BORDERS = (0, 256, 1024, 4096, 1 << 30)
"""Positions in an answer at which its stretches begin and end."""

GRAM = 4

LOOP = 0.8
"""An answer loops from the stretch on in which at least this share of the 4-grams stood earlier in it."""


@dataclass(frozen=True, slots=True)
class LengthRecord:
    """A contender's answer to a prompt."""

    drafter: str
    wanted: int  # tokens that the prompt was lengthened to; 0: it is as it stands in the file
    item: str
    prompt: int  # tokens of the prompt
    digest: str  # of the answer
    tokens: list[int]  # in each stretch, without those of the pass over the prompt
    steps: list[int]
    seconds: list[float]
    repeated: list[float]  # the share of 4-grams that stood earlier in the answer

    def stretches(self) -> Iterator[int]:
        """Yield the stretches that the answer reaches before it loops."""
        for number, (steps, share) in enumerate(zip(self.steps, self.repeated, strict=True)):
            if share >= LOOP:
                return
            if steps:
                yield number


@dataclass(frozen=True, slots=True)
class LengthRow:
    """What a drafter gains in one stretch of answers to prompts of one length."""

    drafter: str
    wanted: int
    stretch: int
    answers: int
    accepted: float  # tokens a step
    speedup: float  # tokens a second, over those of plain decoding in the same stretch of the same answers
    repeated: float  # mean share of 4-grams that stood earlier in the answer

    @property
    def positions(self) -> str:
        """The tokens of the stretch: "256 to 1024"."""
        begin, end = BORDERS[self.stretch : self.stretch + 2]
        return f"{begin} to {end}" if end < BORDERS[-1] else f"from {begin}"


class LengthResults(Journal[LengthRecord]):
    """The answers in a journal."""

    WHAT, ENTRY, KEY = "answers of 'bench length'", LengthRecord, ("drafter", "wanted", "item")

    def pairs(self) -> Iterator[tuple[LengthRecord, LengthRecord]]:
        """Yield each drafter's answers with plain decoding's."""
        for record in self.by_key.values():
            plain = self.by_key.get((PLAIN, record.wanted, record.item))
            if record.drafter != PLAIN and plain is not None:
                yield record, plain

    @property
    def different(self) -> int:
        """Number of answers that are not plain decoding's. It must be 0."""
        return sum(own.digest != plain.digest for own, plain in self.pairs())

    def rows(self) -> list[LengthRow]:
        """Return a row for each drafter, length of prompts, and stretch that answers reach."""
        kept: dict[tuple[str, int, int], list[tuple[LengthRecord, LengthRecord]]] = {}
        for own, plain in self.pairs():
            for stretch in {*own.stretches()} & {*plain.stretches()}:
                kept.setdefault((own.drafter, own.wanted, stretch), []).append((own, plain))
        return [_row(*key, pairs) for key, pairs in sorted(kept.items())]


def _row(
    drafter: str, wanted: int, stretch: int, pairs: Sequence[tuple[LengthRecord, LengthRecord]]
) -> LengthRow:
    def total(records: Iterable[LengthRecord], name: str) -> float:
        return float(sum(getattr(record, name)[stretch] for record in records))

    own, plain = zip(*pairs, strict=True)
    tokens, repeated = total(own, "tokens"), total(own, "repeated") / len(pairs)
    speedup = total(plain, "seconds") / total(plain, "tokens") / (total(own, "seconds") / tokens)
    return LengthRow(drafter, wanted, stretch, len(pairs), tokens / total(own, "steps"), speedup, repeated)


class LengthBench:
    """Measures what a plan says: contenders take turns at each prompt, one request at a time.

    Args:
        llm: the target's engine, without prefix caching and other requests.
        plan: what to measure.
        path: the file for results; an existing file is continued.
        progress: see `Progress`.

    Raises:
        DrafterError: a drafter is unknown, or does not fit the model.
        RequestError: the model has no tokenizer.
        SoothsayError: the file is of another run.
    """

    def __init__(
        self, llm: LLM, plan: LengthPlan, path: Path | None = None, progress: Progress = lambda *_: None
    ):
        self.llm, self.plan = llm, plan
        self.drafters = {name: build_drafter(name, llm.engine.target) for name in (PLAIN, *plan.drafters)}
        self.entries = read_prompts(plan.prompts)
        own = conditions(plan, "model", "max_tokens", "temperature", "kernels", nodes=llm.config.max_tree)
        self.results = LengthResults(own, path)
        self.left_out = 0
        """Prompts that do not fit into the model's context with their answers."""

        self._meter = Meter(progress)

    def run(self) -> LengthResults:
        """Measure what is not in the file yet."""
        chosen = spread(self.entries, self.plan.requests)
        asked = [(wanted, entry) for wanted in self.plan.prompt_tokens for entry in chosen]
        self._meter.total = len(asked) * len(self.drafters)
        self._meter.advance()
        for number, name in turns([*self.drafters], len(asked)):
            wanted, entry = asked[number]
            tokens = 0
            if (name, wanted, entry.id) not in self.results:
                tokens = self._measure(name, wanted, entry)
            self._meter.advance(1, tokens)
        return self.results

    def _measure(self, name: str, wanted: int, entry: PromptEntry) -> int:
        """Answer a prompt, and note the stretches of the answer. Returns the number of tokens."""
        plan, engine, drafter = self.plan, self.llm.engine, self.drafters[name]
        prompt = encode(self._lengthened(entry, wanted), self.llm.tokenizer)
        params = SamplingParams(temperature=plan.temperature, max_tokens=plan.max_tokens, seed=0)
        drafter.reset()
        ends, moments = [0], [time.perf_counter()]
        try:
            with running(self.llm, [(prompt, params)], drafter=drafter) as (request,):
                while engine.has_work:
                    engine.step()
                    if request.num_output > ends[-1]:  # not a chunk of the prompt
                        ends.append(request.num_output)
                        moments.append(time.perf_counter())
        except RequestError:
            self.left_out += 1
            return 0
        answer = answer_of(request)
        tokens, steps = ([0] * (len(BORDERS) - 1) for _ in range(2))
        seconds = [0.0] * (len(BORDERS) - 1)
        for (begin, end), (earlier, later) in zip(pairwise(ends[1:]), pairwise(moments[1:]), strict=True):
            stretch = _stretch(begin)
            tokens[stretch] += end - begin
            steps[stretch] += 1
            seconds[stretch] += later - earlier
        what = name, wanted, entry.id, len(prompt), short_hash(repr(answer))
        self.results.add(LengthRecord(*what, tokens, steps, seconds, repeated_shares(answer)))
        return len(answer)

    def _lengthened(self, entry: PromptEntry, wanted: int) -> PromptEntry:
        """Put other prompts of the file before one, so that both have about `wanted` tokens."""
        tokenizer = self.llm.tokenizer
        if tokenizer is None or not wanted:
            return entry
        place = self.entries.index(entry)
        others = [*self.entries[place + 1 :], *self.entries[:place]]
        question, before = tokenizer.encode(_text(entry)), list[int]()
        while others and len(before) < wanted - len(question):
            before = [*tokenizer.encode(_text(others.pop(0)) + "\n\n"), *before]
        kept = before[max(0, len(before) + len(question) - wanted) :]
        return PromptEntry(({"role": "user", "content": tokenizer.decode(kept) + _text(entry)},), id=entry.id)


def _text(entry: PromptEntry) -> str:
    return entry.prompt if isinstance(entry.prompt, str) else str(entry.prompt[-1]["content"])


def _stretch(position: int) -> int:
    return next(i for i, end in enumerate(BORDERS[1:]) if position < end)


def repeated_shares(answer: Sequence[int]) -> list[float]:
    """The share of 4-grams in each stretch of an answer that stood earlier in it.

    Example:
        >>> repeated_shares([1, 2, 3, 4, 5, 1, 2, 3, 4])
        [0.16666666666666666, 0.0, 0.0, 0.0]
    """
    seen, counts, repeats = set[tuple[int, ...]](), [0] * (len(BORDERS) - 1), [0] * (len(BORDERS) - 1)
    for end in range(GRAM, len(answer) + 1):
        gram, stretch = tuple(answer[end - GRAM : end]), _stretch(end - 1)
        counts[stretch] += 1
        repeats[stretch] += gram in seen
        seen.add(gram)
    return [repeat / count if count else 0.0 for repeat, count in zip(repeats, counts, strict=True)]


def length_table(results: LengthResults) -> ResultTable:
    """A row for each drafter, length of prompts, and stretch of answers."""
    headings = "drafter", "prompt", "position", "answers", "tokens a step", "speed-up", "repeated 4-grams"
    rows = [
        [
            *(row.drafter, str(row.wanted or "as it is"), row.positions, str(row.answers)),
            *(f"{row.accepted:.2f}", f"{row.speedup:.2f}", f"{row.repeated:.0%}"),
        ]
        for row in results.rows()
    ]
    return ResultTable(headings, rows, names=3)


def length_chart(results: LengthResults) -> Any:
    """Draw tokens a step and speed-ups, by position and by length of the prompt. A matplotlib figure."""
    rows = results.rows()
    figure = new_figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    by_position = [row for row in rows if row.wanted == min(one.wanted for one in rows)]
    by_prompt = [row for row in rows if row.stretch == 0]
    for column, (shown, place) in enumerate(((by_position, "stretch"), (by_prompt, "wanted"))):
        places = sorted({getattr(row, place) for row in shown})
        for number, drafter in enumerate(dict.fromkeys(row.drafter for row in rows)):
            own = [row for row in shown if row.drafter == drafter]
            across, (colour, line) = (
                [places.index(getattr(row, place)) for row in own],
                series_style(number + 1),
            )
            for panel, what in zip(panels[:, column], ("accepted", "speedup"), strict=True):
                heights = [getattr(row, what) for row in own]
                panel.plot(across, heights, linestyle=line, marker="o", color=colour, label=drafter)
        names = {row.stretch: row.positions for row in shown}
        labels = [names[one] if place == "stretch" else str(one or "as it is") for one in places]
        panels[1, column].set_xticks(range(len(places)), labels)
        panels[1, column].set_xlabel(
            "position in the answer" if place == "stretch" else "tokens of the prompt"
        )
    for panel, label in zip(panels[:, 0], ("tokens a step", "speed-up in decoding"), strict=True):
        panel.set_ylabel(label)
    for panel in panels.flat:
        tidy(panel)
        panel.set_ylim(bottom=0)
    panels[0, 0].legend(frameon=False)
    return figure
