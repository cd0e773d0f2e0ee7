"""`soothsay bench decode`: us and transformers, speculation and plain decoding, a batch and one request."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from soothsay.bench.measure import Rates, Workload, interleave
from soothsay.bench.texts import PASSAGE, QUESTION, TOPICS
from soothsay.config import DType
from soothsay.core.params import SamplingParams
from soothsay.llm import LLM


@dataclass(frozen=True, slots=True)
class RateComparison:
    """Rates of contenders that do the same work."""

    title: str
    rates: Rates
    base: str  # the contender that the others are compared with


def bench_decode(
    model: str,
    *,
    dtype: DType = "auto",
    tokens: int = 128,
    rounds: int = 7,
    batch: int = 16,
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
    if importlib.util.find_spec("transformers") and os.path.isdir(_directory(model)):
        plain = {"transformers": _transformers(model, llm, question[0], tokens), **plain}
    drafted = {"plain": ours(passage), "prompt lookup": ours(passage, "prompt-lookup")}
    batched = {"batch of 1": ours(many[:1]), f"batch of {batch}": ours(many)}
    return [
        RateComparison("plain decoding, batch 1", interleave(plain, rounds), next(iter(plain))),
        RateComparison("a passage to summarize, batch 1", interleave(drafted, rounds), "plain"),
        RateComparison("plain decoding, throughput", interleave(batched, rounds), "batch of 1"),
    ]


def _directory(model: str) -> str:
    from soothsay.model.checkpoint import open_checkpoint

    return str(open_checkpoint(model).path)


def _transformers(model: str, llm: LLM, prompt: list[int], tokens: int) -> Workload:
    """Return transformers' `generate` with the same weights, threads and dtype as a workload."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    load, place = AutoModelForCausalLM.from_pretrained, _directory(model)
    theirs = load(place, dtype=llm.model.dtype, trust_remote_code=False).eval()
    ids = torch.tensor([prompt])

    def run() -> int:
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
        return int(out.shape[1]) - len(prompt)

    return run
