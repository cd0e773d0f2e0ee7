"""What the server's process and the engine's tell each other, through a pipe."""

from __future__ import annotations

from dataclasses import dataclass

from soothsay.engine.answer import FinishReason, SpeculationStats, StepTrace, TokenLogprobs
from soothsay.engine.params import SamplingParams
from soothsay.server.errors import ApiError
from soothsay.server.parameters import Speculating
from soothsay.tokenizer import Tokenizer

# to the engine


@dataclass(frozen=True, slots=True)
class Ask:
    """Answer these prompts, each `params.n` times."""

    job: int
    prompts: list[list[int]]
    params: SamplingParams
    speculating: Speculating


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give a job up: nobody waits for it any more."""

    job: int


# from the engine


@dataclass(frozen=True, slots=True)
class Model:
    """The engine has been loaded; what the server has to know of it."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_context: int  # tokens of prompt and answer
    max_requests: int  # answers in one step
    drafter: str  # of requests that name none
    drafters: tuple[str, ...]  # that there are


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job is in the line. Its answers' seeds, in order."""

    job: int
    seeds: list[int]


@dataclass(frozen=True, slots=True)
class News:
    """What a step brought for one answer of a job, and how far that is now."""

    job: int
    index: int
    text: str  # what has become certain; may be empty
    logprobs: list[TokenLogprobs] | None  # of the new tokens that are text; None: not asked for
    traces: list[StepTrace]  # of the steps since the last news, if asked for
    said: int  # tokens of the answer so far
    found: int  # of the prompt's tokens, those in the prefix cache
    preemptions: int
    stats: SpeculationStats  # so far
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is."""

    running: int  # answers
    waiting: int
    kv_usage: float  # share of the KV pool, 0 to 1


@dataclass(frozen=True, slots=True)
class Step:
    """What came of a step, or of what was asked between steps."""

    at: float  # of `time.monotonic`, which processes have in common
    news: list[News]
    ended: dict[int, ApiError | None]  # jobs of which there will be no more, and why if not well
    load: Load
    decisions: dict[str, int]  # of controllers since the last one: which part was asked, how often
    failed: bool = False  # the step itself, and with it whatever ran


Incoming = Ask | Cancel
"""What the engine is told."""

Outgoing = Model | Admitted | Step
"""What the engine tells."""
