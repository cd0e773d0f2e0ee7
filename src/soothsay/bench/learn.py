"""`soothsay bench learn`: a stream of requests, with a drafter that learns and with one that does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from soothsay import LLM, Drafter, DrafterError, SamplingParams
from soothsay.bench.bench_plans import LearnPlan
from soothsay.bench.measure import rotated
from soothsay.bench.prompts import encode
from soothsay.bench.tables import ResultTable
from soothsay.corpus import PromptEntry
from soothsay.drafters.learning.learning_drafter import can_learn
from soothsay.drafters.registry import build_drafter
from soothsay.plotting import new_figure, series_style, tidy

PLAIN, STATIC, LEARNING = "plain", "static", "learning"

CONTENDERS = (PLAIN, STATIC, LEARNING)


@dataclass(slots=True)
class WindowRun:
    """What one contender did with the requests of a window."""

    tokens: int
    steps: int  # passes that emitted tokens, summed over requests
    seconds: float
    cpu: float  # processor seconds of all threads

    @property
    def accepted(self) -> float:
        """Tokens a step."""
        return self.tokens / max(self.steps, 1)


@dataclass(slots=True)
class Window:
    """Some requests of the stream, by contender."""

    first: int
    size: int
    held_out: bool
    runs: dict[str, WindowRun] = field(default_factory=dict)


@dataclass(slots=True)
class LearnReport:
    """Results of a stream."""

    model: str
    drafter: str
    share: float
    windows: list[Window] = field(default_factory=list)
    compared: int = 0  # answers that were compared with plain decoding's
    different: int = 0  # must be 0

    @property
    def answered(self) -> int:
        """Number of requests so far."""
        return sum(window.size for window in self.windows)

    @property
    def tokens(self) -> int:
        """Number of tokens so far, of all contenders."""
        return sum(run.tokens for window in self.windows for run in window.runs.values())

    def total(self, contender: str, *, held_out: bool) -> WindowRun:
        """The sum over windows in which all contenders ran."""
        chosen = [w.runs[contender] for w in self.windows if w.held_out == held_out and len(w.runs) == 3]
        return WindowRun(*(sum(getattr(run, field.name) for run in chosen) for field in fields(WindowRun)))


def bench_learn(
    model: str | Path,
    entries: Sequence[PromptEntry],
    plan: LearnPlan,
    progress: Callable[[LearnReport], None] = lambda report: None,
) -> LearnReport:
    """Answer a stream with a drafter that learns, and parts of it without learning and plainly.

    The contenders take turns in each window, and another one begins each time. Learning is in its times.

    Args:
        model: what `LLM` takes.
        entries: the stream, in order.
        plan: how it is answered. The drafter must have a trained part.
        progress: is shown the results so far, once before the first window and after each.

    Raises `DrafterError` if the drafter does not learn.
    """
    llm = LLM(model, drafter="none", kernels=plan.kernels, max_requests=plan.batch, prefix_caching=False)
    drafters, window = _contenders(llm, plan.drafter, plan.share), plan.window
    report = LearnReport(str(model), plan.drafter, plan.share)
    stream = len(entries) - plan.held_out
    progress(report)
    for begin in [*range(0, stream, window), *range(stream, len(entries), window)]:
        part = entries[begin : min(begin + window, stream if begin < stream else len(entries))]
        one = Window(begin, len(part), begin >= stream)
        prompts = [encode(entry, llm.tokenizer) for entry in part]
        own = SamplingParams(temperature=plan.temperature, max_tokens=plan.max_tokens)
        params = [replace(own, seed=begin + i) for i in range(len(part))]
        names = CONTENDERS if one.held_out or (begin // window) % plan.every == 0 else (LEARNING,)
        answers: dict[str, list[list[int]]] = {}
        for name in rotated(names, len(report.windows)):
            one.runs[name], answers[name] = _run(llm, drafters[name], prompts, params)
        for name in names if len(names) > 1 else ():
            report.different += sum(a != b for a, b in zip(answers[name], answers[PLAIN], strict=True))
            report.compared += len(part) if name != PLAIN else 0
        report.windows.append(one)
        progress(report)
    return report


def _contenders(llm: LLM, drafter: str, share: float) -> dict[str, Drafter]:
    """The drafters of the contenders. They are built for one engine, and share nothing else."""
    target = llm.engine.target
    static = replace(target, config=replace(target.config, learn=0.0))
    learning = build_drafter(drafter, replace(target, config=replace(target.config, learn=share)))
    if not can_learn(learning):
        raise DrafterError(f"drafter {drafter!r} has no trained part, so nothing learns; name another one")
    plain = build_drafter("none", target)
    return {PLAIN: plain, STATIC: build_drafter(drafter, static), LEARNING: learning}


def _run(
    llm: LLM, drafter: Drafter, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> tuple[WindowRun, list[list[int]]]:
    begin, cpu = time.perf_counter(), time.process_time()
    results = llm.generate(prompts, params, drafter=drafter)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    stats = [result.stats for result in results]
    run = WindowRun(sum(one.emitted for one in stats), sum(one.steps for one in stats), seconds, cpu)
    return run, [result.token_ids for result in results]


SMOOTH = 3
"""Number of windows that a point is the mean of."""


def learn_chart(report: LearnReport) -> Any:
    """Draw tokens a step along the stream, with and without learning.

    Returns a matplotlib figure. Raises `SoothsayError` if matplotlib is not installed.
    """
    figure = new_figure(figsize=(7.5, 4.0), layout="constrained")
    panel = figure.subplots()
    for number, name in enumerate((STATIC, LEARNING)):
        windows = [window for window in report.windows if name in window.runs]
        runs = [window.runs[name] for window in windows]
        near = [runs[max(i - SMOOTH + 1, 0) : i + 1] for i in range(len(runs))]
        means = [sum(run.tokens for run in some) / max(sum(run.steps for run in some), 1) for some in near]
        places = [window.first + window.size for window in windows]
        panel.plot(places, means, color=series_style(number)[0], label=name, linewidth=1.8)
    held_out = [window.first for window in report.windows if window.held_out]
    if held_out:
        panel.axvspan(held_out[0], report.windows[-1].first + report.windows[-1].size, alpha=0.08)
    tidy(panel)
    panel.set_ylim(bottom=1)
    panel.set(xlabel="requests answered (shaded: held out)", ylabel="tokens a step")
    panel.legend(frameon=False)
    title = f"{Path(report.model).name}, {report.drafter.partition('(')[0]}, {report.share:.0%} of a core"
    panel.set_title(title, fontsize=10)
    return figure


def learn_table(report: LearnReport) -> ResultTable:
    """What each contender did, in the stream and in the requests held out."""
    title = f"{report.drafter}, learning in {report.share:.0%} of a core's time"
    equal = f"{report.compared - report.different} of {report.compared} answers equal plain decoding's"
    headings = "requests", "", "tokens a step", "tokens/s", "over plain", "tokens per CPU second"
    caption, rows = f"{equal}; windows in which all three ran", []
    for held_out in (False, True):
        plain = report.total(PLAIN, held_out=held_out)
        for name in CONTENDERS if plain.tokens else ():
            run = report.total(name, held_out=held_out)
            where = "held out" if held_out else "stream"
            rate, base = run.tokens / run.seconds, plain.tokens / plain.seconds
            rates = f"{rate:.0f}", f"{rate / base:.2f}x", f"{run.tokens / run.cpu:.0f}"
            rows.append([where, name, f"{run.accepted:.2f}", *rates])
    return ResultTable(headings, rows, 2, title, caption)
