"""Measures how many tokens a step a drafter brings, in the engine that serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from soothsay.config import EngineConfig
from soothsay.core.params import SamplingParams
from soothsay.drafters.registry import DrafterSpec, build_drafter
from soothsay.errors import RequestError
from soothsay.llm import LLM
from soothsay.result import Choice, Stream

UNBOUNDED = 2**20
"""Rows in a pass of an engine that measures. No tree is cut to make room for other requests."""


def measuring(at_once: int = 8, max_tree: int = EngineConfig.max_tree) -> EngineConfig:
    """Return an engine's configuration for `mean_accepted`. The result does not depend on `at_once`."""
    return EngineConfig(max_requests=at_once, max_tree=max_tree, max_rows=UNBOUNDED, prefix_caching=False)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of `mean_accepted`."""

    choices: tuple[Choice | None, ...]  # the answer to each prompt; None: the prompt is too long

    @property
    def overall(self) -> float:
        """Mean number of tokens a step, the bonus token included: 1.0 for plain decoding.

        The step that reads the prompt's end is not counted. Long answers weigh more, as in Spec-Bench (Xia et
        al. 2024, arXiv 2401.07851).
        """
        counts = [choice.stats.after_first_step for choice in self.choices if choice is not None]
        tokens, steps = (sum(column) for column in zip(*counts, strict=True))
        return tokens / steps if steps else 1.0


def mean_accepted(
    llm: LLM,
    drafter: DrafterSpec,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float = 0.0,
    max_tokens: int = 128,
    seed: int = 0,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Accepted:
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
        advance: called after each answer with its number of tokens.

    Raises:
        RequestError: prefix caching is on, or no prompt fits into the context with its answer.
        DrafterError: the drafter is unknown or does not fit.
    """
    if llm.config.prefix_caching:
        raise RequestError(
            "accepted tokens are measured without prefix caching: build the LLM with config=measuring(), or "
            "with prefix_caching=False"
        )
    built = build_drafter(drafter, llm.engine.target)
    streams: list[Stream | None] = []
    refusal: RequestError | str = "there are none"
    try:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + i)
            try:
                streams.append(llm.stream(prompt, params, drafter=built))
            except RequestError as error:
                streams.append(None)
                refusal = error
        if not any(streams):
            raise RequestError(f"none of {len(prompts)} prompts can be answered: {refusal}")
        choices = []
        for stream in streams:
            choices.append(None if stream is None else stream.choice)
            if choices[-1] is not None:
                advance(choices[-1].stats.emitted)
    except BaseException:  # an interrupt leaves no request in the engine
        for stream in streams:
            if stream is not None:
                stream.cancel()
        raise
    return Accepted(tuple(choices))
