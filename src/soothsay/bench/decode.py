"""`soothsay bench decode`: us and transformers, speculation and plain decoding, a batch and one request."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from soothsay import LLM, SamplingParams
from soothsay.bench.measure import Rates, Workload, interleave
from soothsay.bench.peers.engines.hugging_face import Transformers
from soothsay.bench.peers.engines.peer import Setup
from soothsay.bench.prompts import PASSAGE, QUESTION, TOPICS
from soothsay.config import DType
from soothsay.model.weights.checkpoint import open_checkpoint


@dataclass(frozen=True, slots=True)
class RateComparison:
    """Rates of contenders that do the same work."""

    title: str
    rates: Rates
    base: str  # the contender that the others are compared with


def bench_decode(
    model: str, *, dtype: DType = "auto", tokens: int = 128, rounds: int = 7, batch: int = 16
) -> list[RateComparison]:
    """Measure greedy decoding of a model with a chat template, side by side.

    Args:
        model: what `LLM` takes.
        dtype: element type, equal for all contenders.
        tokens: tokens of each run; end tokens are ignored, so that all runs are equally long.
        rounds: number of times that each contender is timed.
        batch: requests in the batch comparison.
    """
    llm = LLM(model, dtype=dtype, drafter="none", prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def chat(*texts: str) -> list[list[int]]:
        return [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts]

    def ours(prompts: list[list[int]], drafter: str = "none") -> Workload:
        return lambda: sum(len(r.token_ids) for r in llm.generate(prompts, params, drafter=drafter))

    question, passage = chat(QUESTION), chat(f"Summarize the following passage.\n\n{PASSAGE}")
    many = chat(*(f"Tell me a story about {topic}." for topic in TOPICS.split()[:batch]))
    plain: dict[str, Workload] = {"soothsay": ours(question)}
    directory = open_checkpoint(model).path
    if importlib.util.find_spec("transformers") and directory.is_dir():
        plain = {"transformers": _transformers(directory, llm, question[0], tokens), **plain}
    drafted = {"plain": ours(passage), "prompt lookup": ours(passage, "prompt-lookup")}
    batched = {"batch of 1": ours(many[:1]), f"batch of {batch}": ours(many)}
    return [
        RateComparison("plain decoding, batch 1", interleave(plain, rounds), next(iter(plain))),
        RateComparison("a passage to summarize, batch 1", interleave(drafted, rounds), "plain"),
        RateComparison("plain decoding, throughput", interleave(batched, rounds), "batch of 1"),
    ]


def _transformers(directory: Path, llm: LLM, prompt: list[int], tokens: int) -> Workload:
    """Return transformers' `generate` with the same weights, threads and dtype as a workload."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype, threads = str(llm.model.dtype).removeprefix("torch."), torch.get_num_threads()
    theirs = Transformers(Setup(str(directory), dtype, threads, len(prompt) + tokens))
    theirs.load()
    return lambda: len(theirs.generate(prompt, tokens, "plain")[1])
