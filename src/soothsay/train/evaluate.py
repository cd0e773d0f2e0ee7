"""How many tokens a step a drafter is good for, measured in the engine that it will run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from soothsay.config import EngineConfig
from soothsay.drafters import DrafterSpec, build_drafter
from soothsay.engine.params import SamplingParams
from soothsay.errors import RequestError
from soothsay.llm import LLM
from soothsay.result import Choice, Stream

UNBOUNDED = 2**20
"""Rows in a pass, for engines that measure: no tree is cut because others need the room."""


def measuring(
    at_once: int = 8, max_tree: int = EngineConfig.max_tree, max_context: int | None = None
) -> EngineConfig:
    """The configuration of an engine for `mean_accepted`: what is measured does not depend on `at_once`."""
    return EngineConfig(
        max_requests=at_once,
        max_tree=max_tree,
        max_context=max_context,
        max_rows=UNBOUNDED,
        prefix_caching=False,
    )


@dataclass(frozen=True, slots=True)
class Accepted:
    """What `mean_accepted` measured."""

    choices: tuple[Choice | None, ...]  # the answer to each prompt; None: it has no room

    @property
    def overall(self) -> float:
        """Tokens over steps, a step's bonus token counted and the pass over the prompt not: 1.0 for plain
        decoding. Long answers weigh more, as in Spec-Bench (Xia et al. 2024, arXiv 2401.07851)."""
        counts = [choice.stats.behind_prompt for choice in self.choices if choice is not None]
        tokens, steps = (sum(column) for column in zip(*counts, strict=True))
        return tokens / steps if steps else 1.0

    @property
    def by_prompt(self) -> list[float | None]:
        """The same for each prompt by itself; None where there is no answer or no second step."""
        counts = [(0, 0) if choice is None else choice.stats.behind_prompt for choice in self.choices]
        return [tokens / steps if steps else None for tokens, steps in counts]


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
    """Answer all prompts with a drafter, as many at once as the engine takes, and count tokens and steps.

    A step is a forward pass that gives tokens, the one that reads the prompt's end included. The drafter is
    built anew, and nothing that was said before helps it: the measurement can be repeated. Only drafters that
    learn from other requests see these in an order that depends on `max_requests`.

    Args:
        llm: of the target, best built with `config=measuring()`. Without prefix caching in any case: a prompt
            that the target finds in its cache is one that a new drafter never sees.
        drafter: see `LLM`.
        prompts: token ids.
        temperature: of all answers.
        max_tokens: of an answer; it may end before.
        seed: of the first prompt; each later one has the next.
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
    except BaseException:  # an interrupt leaves no request behind
        for stream in streams:
            if stream is not None:
                stream.cancel()
        raise
    return Accepted(tuple(choices))
