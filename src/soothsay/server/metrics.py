"""What Prometheus is told. Names are vLLM's, where it has the thing, with `soothsay:` in place of `vllm:`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from soothsay.drafters import Drafter
from soothsay.engine.engine import Engine
from soothsay.engine.request import Request

if TYPE_CHECKING:
    from soothsay.server.loop import News

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
        engine: its state is read when the numbers are asked for.
        model: the label `model_name`.
        name_of: what a drafter is called, for the label `drafter`.
    """

    def __init__(self, engine: Engine, model: str, name_of: Callable[[Drafter], str]):
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._name_of = name_of
        scheduler, allocator = engine.scheduler, engine.allocator
        for name, text, value in (
            ("num_requests_running", "Answers in the engine's steps", lambda: len(scheduler.running)),
            ("num_requests_waiting", "Answers that wait for room", lambda: len(scheduler.waiting)),
            (
                "kv_cache_usage_perc",
                "Share of the KV pool in use, 0 to 1",
                lambda: 1 - allocator.num_free / allocator.num_blocks,
            ),
        ):
            gauge = Gauge(f"soothsay:{name}", text, list(self._labels), registry=self.registry)
            gauge.labels(**self._labels).set_function(value)
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
            "spec_decode_num_accepted_tokens_per_pos", "Guesses that held, by depth", "position", "drafter"
        )
        self._drafted_at = self._counters(
            "spec_decode_num_draft_tokens_per_pos", "Steps that guessed so deep", "position", "drafter"
        )
        self._answered = self._counters("http_requests", "Answers of HTTP", "path", "status")
        self.restarts = self._counter("engine_restarts", "Times the engine's thread was restarted")
        self.failed_steps = self._counter("failed_steps", "Steps of the engine that failed")

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def see(self, request: Request, news: News, arrived: float, last: float) -> None:
        """Count what a step brought for an answer. Times are of `time.perf_counter`."""
        count = len(news.pieces)
        self._generated.inc(count)
        if last == arrived:
            self._first.observe(news.at - arrived)
        else:
            for _ in range(count):  # those of one step came together: each is taken to have had its share
                self._between.observe((news.at - last) / count)
        if news.finish_reason is not None:
            self._end(request, news.at - arrived)

    def answered(self, path: str, status: int) -> None:
        """Count an answer of HTTP. `path` is one of the server's own."""
        self._answered(path=path, status=str(status)).inc()

    def _end(self, request: Request, seconds: float) -> None:
        self._whole.observe(seconds)
        self._prompt_length.observe(request.num_prompt)
        self._answer_length.observe(request.num_output)
        self._prompt.inc(request.num_prompt)
        self._queries.inc(request.num_prompt)
        self._hits.inc(request.num_prefix_hits)
        self._preemptions.inc(request.num_preemptions)
        self._success(finished_reason=str(request.finish_reason)).inc()
        stats, drafter = request.stats, self._name_of(request.drafter)
        self._steps(drafter=drafter).inc(stats.steps)
        self._drafted(drafter=drafter).inc(stats.drafted)
        self._accepted(drafter=drafter).inc(stats.accepted)
        for counter, counts in ((self._drafted_at, stats.drafted_at), (self._accepted_at, stats.accepted_at)):
            for position, value in enumerate(counts):
                counter(position=str(position), drafter=drafter).inc(value)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        labels = tuple(self._labels)
        histogram = Histogram(f"soothsay:{name}", text, labels, registry=self.registry, buckets=buckets)
        return histogram.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text)()

    def _counters(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """Makes the counter of given values of `labels`."""
        counter = Counter(f"soothsay:{name}", text, (*self._labels, *labels), registry=self.registry)
        return partial(counter.labels, **self._labels)
