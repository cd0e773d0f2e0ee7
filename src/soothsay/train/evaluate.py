"""Measures how many tokens a step a drafter brings, in the engine that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from soothsay.config import EngineConfig
from soothsay.core.params import SamplingParams
from soothsay.drafters.registry import DrafterSpec, build_drafter
from soothsay.errors import RequestError, StepError
from soothsay.llm import LLM

UNBOUNDED = 2**20
"""Rows in a pass of an engine that measures. No tree is cut to make room for other requests."""


def measuring(at_once: int = 8, max_tree: int = EngineConfig.max_tree) -> EngineConfig:
    """Return an engine's configuration for `mean_accepted`. The result does not depend on `at_once`."""
    return EngineConfig(max_requests=at_once, max_tree=max_tree, max_rows=UNBOUNDED, prefix_caching=False)


def mean_accepted(
    llm: LLM,
    drafter: DrafterSpec,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float = 0.0,
    max_tokens: int = 128,
    seed: int = 0,
) -> float:
    """Answer all prompts with a drafter, as many at a time as the engine takes, and count tokens and steps.

    The drafter is new and has learned nothing from earlier requests, so the measurement can be repeated. The
    result depends on `max_requests` only if the drafter learns from other requests.

    Args:
        llm: the target, best built with `config=measuring()`. It must have no prefix caching: a new drafter
            never sees a prompt that the target finds in its cache.
        drafter: see `LLM`.
        prompts: token ids.
        temperature: of all answers.
        max_tokens: largest length of an answer.
        seed: of the first prompt. The next prompt has the next number.

    Returns:
        Mean number of tokens a step, the bonus token included: 1.0 for plain decoding. The step that reads
        the prompt's end is not counted. Long answers weigh more, as in Spec-Bench (Xia et al. 2024, arXiv
        2401.07851). Prompts that are too long count for nothing.

    Raises:
        RequestError: no prompt fits into the context with its answer.
        DrafterError: the drafter is unknown or does not fit.
        StepError: the engine failed at a prompt.
    """
    built = build_drafter(drafter, llm.engine.target)
    own = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    params = [replace(own, seed=seed + i) for i in range(len(prompts))]
    results = llm.generate(list(prompts), params, drafter=built)
    for result in results:
        if result.error is not None and result.prompt_token_ids:
            raise StepError(result.error)
    counts = [result.stats.after_first_step for result in results if result.error is None]
    if not counts:
        refusal = results[0].error if results else "there are none"
        raise RequestError(f"none of {len(prompts)} prompts can be answered: {refusal}")
    tokens, steps = (sum(column) for column in zip(*counts, strict=True))
    return tokens / steps if steps else 1.0
