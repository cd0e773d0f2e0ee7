"""The server's metrics under the names that vLLM gives them, for tools that look for these names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

PREFIX, VLLM_PREFIX = "soothsay:", "vllm:"

TWINS = frozenset(
    {
        "cache_config_info",
        "e2e_request_latency_seconds",
        "generation_tokens",
        "inter_token_latency_seconds",
        "kv_cache_usage_perc",
        "lora_requests_info",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "request_generation_tokens",
        "request_prompt_tokens",
        "request_success",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_drafts",
        "time_to_first_token_seconds",
    }
)
"""Names of the metrics that vLLM has with the same meaning, without prefix and without `_total`."""

OWN_LABELS = frozenset({"drafter"})
"""Labels that vLLM's metrics lack. A twin has the sum over them: its readers expect one value."""


FROM_ZERO = frozenset(
    {"spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_drafts"}
)
"""Twins that are 0, and not absent, before the first draft. `vllm bench serve` takes the difference of two
readings, and says nothing of speculation where the first one lacks them."""


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
            if metric.name.removeprefix(PREFIX) in TWINS:
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
