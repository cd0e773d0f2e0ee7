"""Metrics for Prometheus. Those that vLLM has too are there under its names as well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from soothsay.core.answer import SpeculationStats
from soothsay.server.engines.engine_messages import AnswerUpdate, EngineUpdate
from soothsay.server.fleet.jobs import AnswerProgress, Job

M = TypeVar("M", bound=MetricWrapperBase)

PREFIX, VLLM_PREFIX = "soothsay:", "vllm:"

WITHOUT_TWINS = frozenset(
    {
        *("controller_decisions", "decode_steps", "engine_restarts", "failed_steps", "http_requests"),
        "spec_decode_num_draft_tokens_per_pos",
    }
)
"""Metrics that vLLM lacks. All others have twins under its names, for tools that look for these."""

TOKEN_GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of histogram buckets: seconds between tokens."""

LATENCIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of histogram buckets: seconds to the first token, and to the last."""

LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
"""Upper bounds of histogram buckets: numbers of tokens."""

OWN_LABELS = frozenset({"drafter"})
"""Labels that vLLM's metrics lack. A twin has the sum over them: its readers expect one value."""


FROM_ZERO = frozenset(
    {"spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_drafts"}
)
"""Twins that are 0, and not absent, before the first draft. `vllm bench serve` takes the difference of two
readings, and says nothing of speculation where the first one lacks them."""

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """The server's metrics, in a registry of their own.

    Args:
        model: value of the label `model_name`.
    """

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._twins = CollectorRegistry()
        self._labels = {"model_name": model}
        self._twins.register(VllmTwins(self.registry, self._labels))
        self._running = self._metric(Gauge, "num_requests_running", "Answers that take part in steps")()
        self._waiting = self._metric(Gauge, "num_requests_waiting", "Answers in the waiting line")()
        self._kv_usage = self._metric(Gauge, "kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1")()
        self._first = self._histogram("time_to_first_token_seconds", "Arrival to first token", LATENCIES)
        self._between = self._histogram("inter_token_latency_seconds", "Between tokens", TOKEN_GAPS)
        self._whole = self._histogram("e2e_request_latency_seconds", "Arrival to last token", LATENCIES)
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", LENGTHS)
        self._answer_length = self._histogram("request_generation_tokens", "Tokens of an answer", LENGTHS)
        self._prompt = self._counters("prompt_tokens", "Tokens of prompts")()
        self._generated = self._counters("generation_tokens", "Tokens of answers")()
        self._queries = self._counters("prefix_cache_queries", "Tokens looked up in the prefix cache")()
        self._hits = self._counters("prefix_cache_hits", "Tokens found in the prefix cache")()
        text = "Times that an answer lost KV blocks to others"
        self._preemptions = self._counters("num_preemptions", text)()
        self._success = self._counters("request_success", "Answers that ended well", "finished_reason")
        self._steps = self._counters("decode_steps", "Steps that emitted tokens", "drafter")
        self._drafts = self._counters("spec_decode_num_drafts", "Steps that verified draft tokens", "drafter")
        self._drafted = self._counters("spec_decode_num_draft_tokens", "Draft tokens verified", "drafter")
        self._accepted = self._counters("spec_decode_num_accepted_tokens", "Draft tokens accepted", "drafter")
        at = "position", "drafter"
        text = "Draft tokens accepted, by depth and by the drafter that proposed them"
        self._accepted_at = self._counters("spec_decode_num_accepted_tokens_per_pos", text, *at)
        text = "Steps with draft tokens at this depth"
        self._drafted_at = self._counters("spec_decode_num_draft_tokens_per_pos", text, *at)
        text = "Steps in which a controller chose this drafter"
        self._decisions = self._counters("controller_decisions", text, "choice")
        self._responses = self._counters("http_requests", "HTTP responses", "path", "status")
        self.restarts = self._counters("engine_restarts", "Restarts of the engine's process")()
        self._failed_steps = self._counters("failed_steps", "Steps that failed")()

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry) + generate_latest(self._twins)

    def describe(self, block_size: int, num_blocks: int, adapters: Sequence[str] = ()) -> None:
        """Record the size of the KV pool, and adapters, for schedulers that place requests on servers."""
        pool = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks)}
        self._info("cache_config_info", "The KV pool", pool)
        loaded = {"running_lora_adapters": ",".join(adapters), "waiting_lora_adapters": ""}
        self._info("lora_requests_info", "Adapters", {"max_lora": f"{len(adapters)}", **loaded})

    def observe_engine(self, update: EngineUpdate) -> None:
        """Record the engine's load, failed steps and controller decisions."""
        self._running.set(update.load.running)
        self._waiting.set(update.load.waiting)
        self._kv_usage.set(update.load.kv_usage)
        self._failed_steps.inc(update.failed)
        for choice, count in update.decisions.items():
            self._decisions(choice=choice).inc(count)

    def observe_answer(self, job: Job, answer: AnswerProgress, update: AnswerUpdate, at: float) -> None:
        """Record an update of an answer. `answer` must not have taken over the update yet."""
        count = update.num_output - answer.num_output
        self._generated.inc(count)
        if answer.num_output == 0:
            self._first.observe(at - job.arrived_at)
            self._prompt.inc(answer.num_prompt)
            self._queries.inc(answer.num_prompt)
            self._hits.inc(update.num_cached)
        else:
            for _ in range(count):  # the tokens of one step share its time equally
                self._between.observe((at - answer.updated_at) / count)
        self._observe_drafts(answer.stats, update.stats, job.drafter)
        if update.finish_reason is not None:
            self._whole.observe(at - job.arrived_at)
            self._prompt_length.observe(answer.num_prompt)
            self._answer_length.observe(update.num_output)
            self._preemptions.inc(update.num_preemptions)
            self._success(finished_reason=str(update.finish_reason)).inc()

    def observe_response(self, path: str, status: int) -> None:
        """Count an HTTP response. `path` is one of the server's own paths, so that labels stay few."""
        self._responses(path=path, status=str(status)).inc()

    def _observe_drafts(self, before: SpeculationStats, now: SpeculationStats, drafter: str) -> None:
        self._steps(drafter=drafter).inc(now.steps - before.steps)
        self._drafts(drafter=drafter).inc(now.drafts - before.drafts)
        self._drafted(drafter=drafter).inc(now.drafted - before.drafted)
        self._accepted(drafter=drafter).inc(now.accepted - before.accepted)
        _add(partial(self._drafted_at, drafter=drafter), before.drafted_at, now.drafted_at)
        for author, counts in now.accepted_by.items():
            _add(partial(self._accepted_at, drafter=author), before.accepted_by.get(author, ()), counts)

    def _info(self, name: str, text: str, facts: Mapping[str, str]) -> None:
        """A gauge of 1 whose labels tell something."""
        self._metric(Gauge, name, text, *facts)(**facts).set(1)

    def _metric(self, kind: type[M], name: str, text: str, *labels: str, **options: Any) -> Callable[..., M]:
        """A function from values of `labels` to the metric that has them."""
        made = kind(f"{PREFIX}{name}", text, (*self._labels, *labels), registry=self.registry, **options)
        return cache(partial(made.labels, **self._labels))

    def _counters(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        return self._metric(Counter, name, text, *labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._metric(Histogram, name, text, buckets=buckets)()


def _add(counter: Callable[..., Counter], before: Sequence[int], now: Sequence[int]) -> None:
    """Raise the counter of each depth by its growth from `before` to `now`."""
    for position, (old, new) in enumerate(zip_longest(before, now, fillvalue=0)):
        if new > old:
            counter(position=str(position)).inc(new - old)


class VllmTwins(Collector):
    """Makes the twins anew at each reading, from the metrics of a registry.

    Args:
        source: the registry that has the metrics under their own names.
        labels: that all of its metrics have.
    """

    def __init__(self, source: CollectorRegistry, labels: Mapping[str, str]):
        self._source, self._labels = source, labels

    def collect(self) -> Iterator[Metric]:
        """The twins of all metrics that vLLM has too. Their label `engine` is 0."""
        for metric in self._source.collect():
            if metric.name.removeprefix(PREFIX) not in WITHOUT_TWINS:
                yield self._twin(metric)

    def _twin(self, metric: Metric) -> Metric:
        twin = Metric(_renamed(metric.name), metric.documentation, metric.type)
        sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        if metric.name.removeprefix(PREFIX) in FROM_ZERO:
            sums[f"{twin.name}_total", tuple(self._labels.items())] = 0.0
        for sample in metric.samples:
            if not sample.name.endswith("_created"):
                kept = tuple(label for label in sample.labels.items() if label[0] not in OWN_LABELS)
                sums[_renamed(sample.name), kept] += sample.value
        for (name, labels), value in sums.items():
            twin.add_sample(name, {"engine": "0", **dict(labels)}, value)
        return twin


def _renamed(name: str) -> str:
    return VLLM_PREFIX + name.removeprefix(PREFIX)
