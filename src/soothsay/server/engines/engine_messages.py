"""What an engine is to the server: messages in, messages out, in a process of this machine or another one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from soothsay.core.answer import FinishReason, SpeculationStats, StepTrace, TokenLogprobs
from soothsay.core.engine_load import EngineLoad
from soothsay.core.numerics import Numerics
from soothsay.core.params import SamplingParams
from soothsay.core.scores import PromptScores
from soothsay.core.tenant import EVERYBODY, Tenant
from soothsay.errors import SoothsayError
from soothsay.server.http.api_errors import ApiError
from soothsay.tokenizer import Tokenizer

if TYPE_CHECKING:
    from soothsay.core.request import Request

# to the engine


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How the engine shall serve a request. Only the adapter changes the answer."""

    drafter: str | None = None  # by name; None: the model's own
    max_nodes: int | None = None  # limit of draft tokens in a step; None: the engine decides
    traced: bool = False  # whether to report the tree of every step
    priority: int = 0  # lower numbers are served first
    tenant: Tenant = EVERYBODY  # whose request it is
    adapter: str | None = None  # by name; None: the model alone
    session: str = ""  # requests of a session prefer the same engine; empty: it has none


@dataclass(frozen=True, slots=True)
class EmittedTokens:
    """What another engine has emitted of an answer."""

    tokens: list[int]
    ended: bool


@dataclass(frozen=True, slots=True)
class Submit:
    """Asks for answers to some prompts, `params.n` to each."""

    job: int
    prompts: list[list[int]]
    params: SamplingParams
    options: RequestOptions
    emitted: Sequence[EmittedTokens] = ()  # by answer, where another engine has begun; empty: none has


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Tells an engine all that clients have got of answers which it continues. It emits what comes after."""

    job: int
    emitted: Sequence[EmittedTokens]  # by answer


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a job whose answers nobody waits for any more."""

    job: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for a `Pong`, which comes between two steps."""


# from the engine


@dataclass(frozen=True, slots=True)
class Pong:
    """Says that the engine reads its messages."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the server must know about the model."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_context: int  # tokens of prompt and answer
    max_requests: int  # answers in one step
    block_size: int  # tokens in a block of the KV pool
    num_blocks: int
    drafter: str  # for requests that name none
    drafters: tuple[str, ...]  # names, see `drafters_with_files`
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # see `LLM.sampling_defaults`
    adapters: tuple[str, ...] = ()  # names of them
    about: Mapping[str, str] = field(default_factory=dict)  # how the engine runs, for people


@dataclass(frozen=True, slots=True)
class Loading:
    """Says how far the engine is with what it does before it is `Loaded`; see `ShowProgress`."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Says that the engine has loaded the model."""

    numerics: Numerics
    packed: bytes  # the `LoadedModel`, pickled

    @classmethod
    def of(cls, model: LoadedModel, numerics: Numerics) -> Self:
        """Pack the model."""
        return cls(numerics, pickle.dumps(model))

    @property
    def model(self) -> LoadedModel:
        """The model. Only the first engine's is unpacked: unpickling a tokenizer holds the interpreter's lock
        for 0.1 s or more, and no answer flows meanwhile."""
        model: LoadedModel = pickle.loads(self.packed)
        return model


@dataclass(frozen=True, slots=True)
class Admitted:
    """Says that a job is in the waiting line. `seeds` has one seed an answer, in order."""

    job: int
    seeds: list[int]


@dataclass(frozen=True, slots=True)
class AnswerUpdate:
    """New text of one answer, and the totals of this answer so far."""

    job: int
    index: int  # of the answer in its job
    text: str  # new text that will not change any more; may be empty
    logprobs: list[TokenLogprobs] | None  # of the new tokens, without an end token; None: not requested
    traces: list[StepTrace]  # of the steps since the last update; empty unless requested
    num_output: int  # tokens of the answer
    text_length: int  # characters of the answer
    num_cached: int  # tokens of the prompt that the prefix cache had
    num_preemptions: int
    stats: SpeculationStats
    finish_reason: FinishReason | None  # None: more will come
    token_ids: Sequence[int] = ()  # new tokens, an end token included
    end_logprobs: TokenLogprobs | None = None  # of the end token, if it has no text
    stop: str = ""  # the stop string that ended the answer; empty: none did
    prompt_logprobs: PromptScores | None = None  # in the first update, if requested


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """What a step changed for all jobs, or what changed between two steps."""

    at: float  # from `time.monotonic`, which both processes share
    answers: list[AnswerUpdate]
    ended: dict[int, ApiError | None]  # by job; None: it ended well
    load: EngineLoad
    decisions: dict[str, int]  # how often controllers chose each drafter since the last update
    failed: bool = False  # the step failed; the engine repeats it with one request at a time


Incoming = Submit | CatchUp | Cancel | Ping
"""Messages to the engine."""

Outgoing = Loading | Loaded | Admitted | EngineUpdate | Pong
"""Messages from the engine."""

Received = Outgoing | SoothsayError | None
"""What an engine sends. An error says why the model could not be loaded; None is the end."""


class Engine(Protocol):
    """An engine that can be started again and again. `EngineProcess` is the example.

    Only `wait` blocks, and `end` for at most some seconds.
    """

    @property
    def pid(self) -> int | None:
        """Process id; None if it is not known."""

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; None while it runs, or if it is not known."""

    def start(self) -> None:
        """Begin to load the model. Raises `OSError` if that cannot be tried now."""

    def wait(self) -> Loaded:
        """Wait until the model is loaded. Call it before `listen`, or not at all. Raises `SoothsayError`."""

    def listen(self, receive: Callable[[Received], None]) -> None:
        """Call `receive`, from a thread, with each message from now on, and with None at the end."""

    def send(self, message: Incoming) -> None:
        """Queue a message."""

    def kill(self) -> None:
        """Kill the engine. `listen` then tells its end."""

    def end(self) -> None:
        """End the engine if it has not ended. Idempotent."""


def has_news(request: Request) -> bool:
    """Whether an answer has anything that was not reported."""
    return bool(request.pieces) or request.finish_unreported


def is_beginning(request: Request) -> bool:
    """Whether an answer has its first tokens, and none of them has been reported."""
    return 0 < request.num_output == len(request.pieces)


def answer_update(job: int, index: int, request: Request) -> AnswerUpdate:
    """Take the new pieces and traces out of a request."""
    pieces = list(request.pieces)
    request.pieces.clear()
    request.finish_unreported = False
    is_first, scored = request.num_output == len(pieces), request.params.prompt_logprobs is not None
    traces = list(request.traces or ())
    if request.traces:
        request.traces.clear()
    logprobs, end = None, None
    if request.params.logprobs is not None:
        logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        silent = pieces and pieces[-1].token in request.end_tokens
        if silent and not request.params.include_stop_str_in_output:  # it is not part of the text
            end = logprobs.pop()
    return AnswerUpdate(
        job=job,
        index=index,
        text="".join(piece.text for piece in pieces),
        logprobs=logprobs,
        traces=traces,
        num_output=request.num_output,
        text_length=len(request.answer.text),
        num_cached=request.num_prefix_hits,
        num_preemptions=request.num_preemptions,
        stats=request.stats,
        finish_reason=request.finish_reason,
        token_ids=[piece.token for piece in pieces],
        end_logprobs=end,
        stop=request.answer.stop,
        prompt_logprobs=request.prompt_logprobs if is_first and scored else None,
    )
