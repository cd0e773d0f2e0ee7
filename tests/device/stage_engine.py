"""The engine with drafters: speed, equal answers, and what a step costs the host."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from job import TINY, Job, Numbers

from soothsay import LLM, Result, SamplingParams
from soothsay.bench.measure import turns
from soothsay.bench.prompts import PASSAGE, TOPICS

DRAFTERS = "none", "suffix", "mtp", "eagle3", "auto"
DRY_DRAFTERS = "none", "suffix", "auto"
"""Drafters of a random model, which has no heads."""

BATCHES = 1, 8, 32
ROUNDS = 2


def measure(job: Job) -> Numbers:
    """Each drafter in each situation: the bundled model, and one of 1B that says the same."""
    kinds = {"tiny": job.random_model(TINY)} if job.dry else {"sibyl": "sibyl", "1B": job.grown("sibyl")}
    models = {name: job.llm(model) for name, model in kinds.items()}
    for batch, (name, llm), temperature in product((2,) if job.dry else BATCHES, models.items(), (0.0, 1.0)):
        name = f"{name}, batch {batch}, T = {temperature:g}"
        yield name, partial(compare, job, llm, batch, temperature, DRY_DRAFTERS if job.dry else DRAFTERS)


def compare(
    job: Job, llm: LLM, batch: int, temperature: float, drafters: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Answer the same prompts with each drafter in turn."""
    prompts = _prompts(llm, batch)
    params = SamplingParams(temperature=temperature, max_tokens=4 if job.dry else 64, ignore_eos=True, seed=5)
    answers, steps = dict[str, Sequence[Result]](), dict[str, int]()
    seconds, device = ({drafter: list[float]() for drafter in drafters} for _ in range(2))

    def answer(drafter: str) -> None:
        llm.engine.forget_learned()
        answers[drafter] = llm.generate(prompts, params, drafter=drafter)

    for drafter in drafters:  # kernels, times of passes, and keys of the prompts
        answer(drafter)
    for _, drafter in turns([*drafters], 1 if job.dry else ROUNDS):
        clock = PassClock(llm, job)
        seconds[drafter].append(job.wall(partial(answer, drafter)))
        steps[drafter], own = clock.stop()
        device[drafter].append(own)
    plain, found = [result.token_ids for result in answers["none"]], dict[str, dict[str, Any]]()
    for drafter in drafters:
        tokens, taken = sum(map(len, plain)), median(seconds[drafter])
        found[drafter] = {
            "tokens/s": tokens / taken,
            "of plain": median(seconds["none"]) / taken,
            "tokens a step": tokens / batch / steps[drafter],
            "ms a step": 1e3 * taken / steps[drafter],
            "ms of passes": 1e3 * median(device[drafter]) / steps[drafter],
            "equal": [result.token_ids for result in answers[drafter]] == plain,
        }
        if not job.dry:
            found[drafter]["waits a step"] = _waits(partial(answer, drafter)) / steps[drafter]
    alone = llm.generate(prompts[0], params).token_ids
    return found | {"alone": {"equal": alone == plain[0]}}


class PassClock:
    """Counts the passes of a model, and adds up their time on the device."""

    def __init__(self, llm: LLM, job: Job):
        self._model, self._run = llm.model, llm.model.run
        self._mark = time.perf_counter if job.dry else _event
        self._marks: list[tuple[Any, Any]] = []
        llm.model.run = self._timed  # type: ignore[method-assign]

    def _timed(self, *args: Any, **options: Any) -> Any:
        begin = self._mark()
        outputs = self._run(*args, **options)
        self._marks.append((begin, self._mark()))
        return outputs

    def stop(self) -> tuple[int, float]:
        """Let the model run as before. Returns the number of passes, and their seconds on the device."""
        del self._model.run
        spans = [b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in self._marks]
        return len(spans), sum(spans)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _waits(run: Any) -> int:
    """How often the host waits for the device in a call."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in seen)


def _prompts(llm: LLM, batch: int) -> list[list[int]]:
    """Prompts of which some repeat themselves."""
    if llm.tokenizer is None:
        return [[*range(1 + number, 7)] * 2 for number in range(batch)]
    topics = TOPICS.split()
    texts = [f"Tell me a story about {topics[n % len(topics)]}." for n in range(batch)]
    texts[::4] = [f"Summarize: {PASSAGE}"] * len(texts[::4])
    return [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts]
