"""OpenAI's formats of replies to chats and completions, whole and in chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from soothsay import __version__
from soothsay.core.answer import FinishReason, StepTrace, TokenLogprobs
from soothsay.core.scores import PromptScores
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.message_bodies import call_of
from soothsay.server.generation.reply_format import (
    MakeParser,
    ReplyFormat,
    TokenTexts,
    gathered,
    list_logprobs,
    reports,
    usage,
)
from soothsay.server.generation.request_bodies import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)
from soothsay.server.generation.request_prompts import Echo, continued_text
from soothsay.server.http.bodies import Json
from soothsay.server.tools.tool_calls import ToolCall, ToolCallParser


class ChoiceFormat(ReplyFormat):
    """Formats replies that have one choice for each answer.

    Replies may have what OpenAI's lack: token ids, and log-probabilities of prompts. The fields are vLLM's. A
    chat has one prompt, so its fields are at the root of the reply. Those of completions are in each choice.

    Args:
        model, texts: see `ReplyFormat`.
        body: says what the reply has besides the answers. It is not kept.
    """

    kind: str  # the field `object` of a whole reply
    chunk_kind: str  # the field `object` of a chunk
    prefix: str  # of the reply's id
    one_prompt: bool  # whether fields about the prompt are at the root of the reply

    def __init__(self, model: str, texts: TokenTexts, body: AnyRequest):
        super().__init__(model, TokenTexts(None) if body.return_tokens_as_token_ids else texts)
        stream = body.stream_options or StreamOptions()
        self._n = body.n or 1  # answers to each prompt in the reply
        self._usage = bool(stream.include_usage)  # whether the last chunk of a stream has the usage
        self._usage_always = bool(stream.continuous_usage_stats)  # whether every chunk has the usage so far
        self._has_logprobs = body.num_logprobs is not None
        self._has_prompt_logprobs = body.prompt_logprobs is not None
        self._has_ids = bool(body.return_token_ids)
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._begun: set[int] = set()  # answers that have had a chunk
        self._held: defaultdict[int, list[int]] = defaultdict(list)  # by answer: ids for its next chunk

    async def stream(self, job: Job) -> AsyncIterator[Json]:
        """The chunks of a stream. The last one has the usage, if that is wanted, and the reports."""

        def chunk(choice: Json) -> Json:
            made = self._frame(self.chunk_kind, [choice])
            if self._usage:
                made["usage"] = usage(job) if self._usage_always else None
            if self._has_ids:
                self._add_ids(made, choice, job.prompts[choice["index"] // self._n])
            return made

        for choice in self.opening(job.size):
            yield chunk(choice)
        num_open = job.size
        async for update in job:
            self._held[update.index] += update.token_ids if self._has_ids else ()
            num_open -= update.finish_reason is not None
            choices = self.update(update)
            for place, choice in enumerate(choices, start=1):
                is_last = num_open == 0 and place == len(choices) and not self._usage
                yield {**chunk(choice), **(reports(job) if is_last else {})}
        if self._usage:
            yield {**self._frame(self.chunk_kind, []), "usage": usage(job), **reports(job)}

    async def collect(self, job: Job) -> Json:
        """Wait for all answers, and return the reply with the `n` best to each prompt."""
        answers = await gathered(job)
        made = {**self._frame(self.kind, []), "usage": usage(job), **reports(job)}
        for index, number in enumerate(_best(answers, job.params.n, self._n)):
            whole = replace(answers[number], index=index)
            choice = {**self.choice(whole), "seed": job.answers[number].seed}
            if not self._has_logprobs:
                choice["logprobs"] = None  # they were for choosing the best
            made["choices"].append(choice)
            root = made if self.one_prompt else choice
            if self._has_ids:
                root["prompt_token_ids"] = job.prompts[index // self._n]
                choice["token_ids"] = whole.token_ids
            if self._has_prompt_logprobs:
                root["prompt_logprobs"] = chain([None], map(self._ranked, whole.prompt_logprobs or ()))
        return made

    def _add_ids(self, chunk: Json, choice: Json, prompt: list[int]) -> None:
        """Add token ids to a chunk. The first one of an answer has the ids of its prompt."""
        index = choice["index"]
        if index not in self._begun:
            self._begun.add(index)
            (chunk if self.one_prompt else choice)["prompt_token_ids"] = prompt
        choice["token_ids"] = self._held.pop(index, [])

    def _ranked(self, one: TokenLogprobs) -> Json:
        """The log-probabilities of a token of a prompt and of the likeliest ones, by token id."""
        ranks = {token: rank for rank, token in enumerate(one.top, start=1)}
        return {
            str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": self.texts(token)}
            for token, logprob in {one.token: one.logprob, **one.top}.items()
        }

    @abstractmethod
    def opening(self, count: int) -> list[Json]:
        """Choices of the chunks at the start of a stream with `count` answers."""

    @abstractmethod
    def update(self, update: AnswerUpdate) -> list[Json]:
        """Choices of the chunks for one update of an answer."""

    @abstractmethod
    def choice(self, whole: AnswerUpdate) -> Json:
        """The choice for a whole answer."""

    def _traced(self, part: Json, traces: Sequence[StepTrace]) -> Json:
        """Add the traces of steps to a choice of a chunk, if there are any."""
        if not traces:
            return part
        steps = [
            {
                "tokens": [self.texts(token) for token in trace.tokens],
                "parents": trace.parents,
                "drafters": trace.authors,
                "accepted": trace.path,
                "bonus": self.texts(trace.bonus),
            }
            for trace in traces
        ]
        return {**part, "speculation": {"steps": steps}}

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"soothsay-{__version__}",
            "choices": choices,
        }


def _best(answers: Sequence[AnswerUpdate], num_answers: int, n: int) -> list[int]:
    """The numbers of the `n` answers to each prompt with the largest mean log-probability, best first.

    Args:
        answers: whole ones, `num_answers` to each prompt. With log-probabilities, if `n` is smaller.
        num_answers: at least `n`.
        n: how many to choose. If that is all of them, they keep their order.
    """
    if n == num_answers:
        return [*range(len(answers))]

    def score(number: int) -> float:
        found = [*(answers[number].logprobs or ()), *filter(None, [answers[number].end_logprobs])]
        return sum(one.logprob for one in found) / len(found) if found else float("-inf")

    groups = (range(first, first + num_answers) for first in range(0, len(answers), num_answers))
    return [number for group in groups for number in sorted(group, key=score, reverse=True)[:n]]


class ChatFormat(ChoiceFormat):
    """Formats answers to a chat.

    Args:
        model, texts, body: see `ChoiceFormat`.
        parser: makes the parser of thoughts and tool calls for one answer.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    one_prompt = True

    def __init__(self, model: str, texts: TokenTexts, body: ChatRequest, parser: MakeParser):
        super().__init__(model, texts, body)
        self._make_parser = parser
        self._echoed = continued_text(body) if body.echo else ""  # each answer begins with it
        self._parsers: dict[int, ToolCallParser] = {}  # by answer
        self._num_calls = Counter[int]()  # by answer, so far

    def opening(self, count: int) -> list[Json]:
        """The role of each answer's message, and the text that it begins with."""
        delta = {"role": "assistant", "content": self._echoed}
        return [_choice(index, {"delta": delta}) for index in range(count)]

    def update(self, update: AnswerUpdate) -> list[Json]:
        """The new text and calls; after the end also a choice with the reason."""
        index = update.index
        parser = self._parsers.setdefault(index, self._make_parser())
        part = parser.parse(update.text, final=update.finish_reason is not None)
        logprobs = self._logprobs(update.logprobs)
        delta: Json = {"content": part.content} if part.content else {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.calls:
            first = self._num_calls[index]
            self._num_calls[index] += len(part.calls)
            delta["tool_calls"] = [{"index": n, **_call(call)} for n, call in enumerate(part.calls, first)]
        choices = []
        if delta or logprobs or update.traces:
            choices.append(self._traced(_choice(index, {"delta": delta}, logprobs), update.traces))
        if update.finish_reason is not None:
            reason = _reason(update.finish_reason, called=bool(self._num_calls[index]))
            choices.append(_choice(index, {"delta": {}}, None, reason))
        return choices

    def choice(self, whole: AnswerUpdate) -> Json:
        """The message of a whole answer."""
        part = self._make_parser().parse(whole.text, final=True)
        content = self._echoed + part.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if part.calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in part.calls]}
        reason = _reason(whole.finish_reason, called=bool(part.calls))
        return _choice(whole.index, {"message": message}, self._logprobs(whole.logprobs), reason)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {"content": list_logprobs(self.texts, logprobs), "refusal": None}


class CompletionFormat(ChoiceFormat):
    """Formats completions.

    Args:
        model, texts, body: see `ChoiceFormat`.
        echoed: the prompt of each answer if replies begin with it, else nothing.
    """

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    one_prompt = False

    def __init__(self, model: str, texts: TokenTexts, body: CompletionRequest, echoed: Sequence[Echo]):
        super().__init__(model, texts, body)
        self._echoed = echoed
        # then a stream begins with the first update, and lists contain the token that ended an answer:
        # readers count tokens from both ends
        self._scored = body.echoed_logprobs is not None
        self._offsets = Counter[int]()  # characters with log-probabilities so far, by answer

    def opening(self, count: int) -> list[Json]:
        """The prompts, if replies begin with them."""
        echoed = () if self._scored else self._echoed
        return [_choice(index, {"text": echo.text}) for index, echo in enumerate(echoed)]

    def update(self, update: AnswerUpdate) -> list[Json]:
        """The new text, and at the end the reason."""
        logprobs, text = self._logprobs(update), update.text
        if update.prompt_logprobs is not None and self._scored:
            text = self._echoed[update.index].text + text
        if not text and update.finish_reason is None and logprobs is None and not update.traces:
            return []
        choice = _choice(update.index, {"text": text}, logprobs, _reason(update.finish_reason))
        return [self._traced(choice, update.traces)]

    def choice(self, whole: AnswerUpdate) -> Json:
        """The text of a whole answer."""
        text = (self._echoed[whole.index].text if self._echoed else "") + whole.text
        return _choice(whole.index, {"text": text}, self._logprobs(whole), _reason(whole.finish_reason))

    def _logprobs(self, update: AnswerUpdate) -> Json | None:
        """The log-probabilities of an update; None: not requested."""
        if update.logprobs is None:
            return None
        found, prompt, unknown, scores = [*update.logprobs], list[int](), list[None](), PromptScores()
        if self._scored:
            found += [] if update.end_logprobs is None else [update.end_logprobs]
            if update.prompt_logprobs is not None:
                prompt, scores = self._echoed[update.index].ids, update.prompt_logprobs
                unknown = [None]  # nothing says how likely the first one was
        tokens = [*prompt, *(one.token for one in found)]
        return {
            "tokens": map(self.texts, tokens),
            "token_logprobs": chain(unknown, (one.logprob for one in chain(scores, found))),
            "top_logprobs": chain(unknown, map(self._top, chain(scores, found))),
            "text_offset": self._next_offsets(update.index, tokens),
        }

    def _top(self, one: TokenLogprobs) -> Json:
        return {self.texts(token): logprob for token, logprob in one.top.items()}

    def _next_offsets(self, index: int, tokens: Sequence[int]) -> Iterator[int]:
        """Where the texts of an answer's next tokens begin. Each chunk is written before the next is made."""
        for token in tokens:
            yield self._offsets[index]
            self._offsets[index] += len(self.texts(token))


def _choice(index: int, content: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _reason(reason: FinishReason | None, *, called: bool = False) -> str | None:
    if reason is FinishReason.STOP and called:
        return "tool_calls"
    return None if reason is None else str(reason)


def _call(call: ToolCall) -> Json:
    return call_of(call.id, call.name, call.arguments)
