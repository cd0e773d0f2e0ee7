"""`soothsay bench decode`: plain against transformers, speculation against plain, a batch against one."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

from soothsay.bench.measure import Contender, Rates, interleave
from soothsay.config import DType
from soothsay.engine.params import SamplingParams
from soothsay.llm import LLM

QUESTION = "Tell me a story about a river, a bridge and a town."
PASSAGE = (
    "The river Alder rises in the hills north of Marden and flows for forty miles through farmland before "
    "it meets the sea at Kelby. In spring the river floods the low meadows, and farmers move their cattle "
    "to higher ground. The bridge at Marden was built in 1887 by the county to replace a wooden bridge "
    "that had been washed away twice. Today the bridge carries more traffic than the county ever planned "
    "for, and the council wants to build a second bridge two miles downstream. Farmers say that a second "
    "bridge would cut through the low meadows, and that the river would flood the road in spring."
)
TOPICS = (
    "cats dogs fish birds cows pigs rats bats trees rain snow wind fire iron gold salt sand wool silk "
    "corn rice milk bread soup tea cups maps ships roads bells clocks stars"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question asked of the machine, and its answer."""

    title: str
    rates: Rates
    base: str  # the contender that the others are measured against


def bench_decode(
    model: str,
    *,
    dtype: DType = "auto",
    tokens: int = 128,
    rounds: int = 7,
    batch: int = 16,
) -> list[Comparison]:
    """Measure greedy decoding of a model with a chat template, side by side.

    Args:
        model: what `LLM` takes.
        dtype: for every contender alike.
        tokens: made in each run; end tokens are ignored so that all make as many.
        rounds: how often each contender is timed.
        batch: requests in the batch comparison.
    """
    llm = LLM(model, dtype=dtype, drafter="none", prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def chat(*texts: str) -> list[list[int]]:
        return [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts]

    def ours(prompts: list[list[int]], drafter: str = "none") -> Contender:
        return lambda: sum(len(r.token_ids) for r in llm.generate(prompts, params, drafter=drafter))

    question, passage = chat(QUESTION), chat(f"Summarize the following passage.\n\n{PASSAGE}")
    many = chat(*(f"Tell me a story about {topic}." for topic in TOPICS.split()[:batch]))
    plain: dict[str, Contender] = {"soothsay": ours(question)}
    if importlib.util.find_spec("transformers") and os.path.isdir(_directory(model)):
        plain = {"transformers": _transformers(model, llm, question[0], tokens), **plain}
    drafted = {"plain": ours(passage), "prompt lookup": ours(passage, "prompt-lookup")}
    batched = {"batch of 1": ours(many[:1]), f"batch of {batch}": ours(many)}
    return [
        Comparison("plain decoding, batch 1", interleave(plain, rounds), next(iter(plain))),
        Comparison("a passage to summarize, batch 1", interleave(drafted, rounds), "plain"),
        Comparison("plain decoding, throughput", interleave(batched, rounds), "batch of 1"),
    ]


def _directory(model: str) -> str:
    from soothsay.model.checkpoint import open_checkpoint

    return str(open_checkpoint(model).path)


def _transformers(model: str, llm: LLM, prompt: list[int], tokens: int) -> Contender:
    """The same weights, threads and dtype in transformers' `generate`."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(_directory(model), dtype=llm.model.dtype).eval()
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
