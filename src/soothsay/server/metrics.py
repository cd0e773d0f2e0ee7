"""What Prometheus is told. Names are vLLM's, where it has the thing, with `soothsay:` in place of `vllm:`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from soothsay.engine.answer import SpeculationStats
from soothsay.server.messages import Load, News, Step

if TYPE_CHECKING:
    from soothsay.server.loop import Answer, Job

SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds between tokens."""
LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds of a whole answer, or up to its first token."""
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Tokens."""

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """The server's numbers, in a registry of their own.

    Args:
        model: the label `model_name`.
    """

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._running = self._gauge("num_requests_running", "Answers in the engine's steps")
        self._waiting = self._gauge("num_requests_waiting", "Answers that wait for room")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1")
        self._first = self._histogram("time_to_first_token_seconds", "Arrival to first token", LONG)
        self._between = self._histogram("inter_token_latency_seconds", "Between tokens", SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token", LONG)
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", LENGTHS)
        self._answer_length = self._histogram("request_generation_tokens", "Tokens of an answer", LENGTHS)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self._generated = self._counter("generation_tokens", "Tokens of answers")
        self._queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache")
        self._preemptions = self._counter("num_preemptions", "Answers that had to start over")
        self._success = self._counters("request_success", "Answers given", "finished_reason")
        self._steps = self._counters("spec_decode_num_drafts", "Steps that emitted tokens", "drafter")
        self._drafted = self._counters("spec_decode_num_draft_tokens", "Tokens guessed", "drafter")
        self._accepted = self._counters("spec_decode_num_accepted_tokens", "Guesses that held", "drafter")
        self._accepted_at = self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Guesses that held, by depth and by whose they were",
            "position",
            "drafter",
        )
        self._drafted_at = self._counters(
            "spec_decode_num_draft_tokens_per_pos", "Steps that guessed so deep", "position", "drafter"
        )
        self._decisions = self._counters(
            "controller_decisions", "Which drafter a controller asked in a step", "choice"
        )
        self._answered = self._counters("http_requests", "Answers of HTTP", "path", "status")
        self.restarts = self._counter("engine_restarts", "Times the engine's process was restarted")
        self._failed_steps = self._counter("failed_steps", "Steps of the engine that failed")

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def step(self, step: Step) -> None:
        """Count what the engine tells of itself."""
        self._set(step.load)
        self._failed_steps.inc(step.failed)
        for choice, count in step.decisions.items():
            self._decisions(choice=choice).inc(count)

    def idle(self) -> None:
        """There is no engine."""
        self._set(Load(0, 0, 0.0))

    def see(self, job: Job, answer: Answer, news: News, at: float) -> None:
        """Count what a step brought for an answer of a job, which is still as it was before."""
        count = news.said - answer.said
        self._generated.inc(count)
        if answer.said == 0:
            self._first.observe(at - job.arrived)
        else:
            for _ in range(count):  # those of one step came together: each is taken to have had its share
                self._between.observe((at - answer.at) / count)
        self._speculated(answer.stats, news.stats, job.drafter)
        if news.finish_reason is not None:
            self._whole.observe(at - job.arrived)
            self._prompt_length.observe(answer.read)
            self._answer_length.observe(news.said)
            self._prompt.inc(answer.read)
            self._queries.inc(answer.read)
            self._hits.inc(news.found)
            self._preemptions.inc(news.preemptions)
            self._success(finished_reason=str(news.finish_reason)).inc()

    def answered(self, path: str, status: int) -> None:
        """Count an answer of HTTP. `path` is one of the server's own."""
        self._answered(path=path, status=str(status)).inc()

    def _speculated(self, before: SpeculationStats, now: SpeculationStats, drafter: str) -> None:
        self._steps(drafter=drafter).inc(now.steps - before.steps)
        self._drafted(drafter=drafter).inc(now.drafted - before.drafted)
        self._accepted(drafter=drafter).inc(now.accepted - before.accepted)
        _add(partial(self._drafted_at, drafter=drafter), before.drafted_at, now.drafted_at)
        for author, counts in now.accepted_by.items():
            _add(partial(self._accepted_at, drafter=author), before.accepted_by.get(author, ()), counts)

    def _set(self, load: Load) -> None:
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._kv_usage.set(load.kv_usage)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"soothsay:{name}", text, tuple(self._labels), registry=self.registry)
        return gauge.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        labels = tuple(self._labels)
        histogram = Histogram(f"soothsay:{name}", text, labels, registry=self.registry, buckets=buckets)
        return histogram.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text)()

    def _counters(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """Makes the counter of given values of `labels`."""
        counter = Counter(f"soothsay:{name}", text, (*self._labels, *labels), registry=self.registry)
        return cache(partial(counter.labels, **self._labels))


def _add(counter: Callable[..., Counter], before: Sequence[int], now: Sequence[int]) -> None:
    """Count what has been added at each depth."""
    for position, (old, new) in enumerate(zip_longest(before, now, fillvalue=0)):
        if new > old:
            counter(position=str(position)).inc(new - old)
