"""OpenAI's formats of replies to chats and completions, whole and in chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from soothsay import __version__
from soothsay.core.answer import FinishReason, StepTrace, TokenLogprobs
from soothsay.server.jobs import Job
from soothsay.server.messages import AnswerUpdate
from soothsay.server.protocol import GenerationRequest
from soothsay.server.reply_format import Json, MakeParser, ReplyFormat, TokenTexts, join, list_logprobs
from soothsay.server.tools import ToolCall, ToolCallParser


class ChoiceFormat(ReplyFormat):
    """Formats replies that have one choice for each answer."""

    kind: str  # the field `object` of a whole reply
    chunk_kind: str  # the field `object` of a chunk
    prefix: str  # of the reply's id

    def __init__(self, model: str, texts: TokenTexts):
        super().__init__(model, texts)
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    async def stream(self, job: Job, body: GenerationRequest) -> AsyncIterator[Json]:
        """The chunks of a stream. The last one has the usage, if the body wants it."""
        with_usage = body.wants_usage
        for choice in self.opening(job.size):
            yield self.chunk([choice], None, with_usage=with_usage)
        async for update in job:
            for choice in self.update(update):
                yield self.chunk([choice], None, with_usage=with_usage)
        if with_usage:
            yield self.chunk([], usage(job), with_usage=True)

    async def collect(self, job: Job, body: GenerationRequest) -> Json:
        """Wait for all answers, and return the whole reply."""
        updates: list[list[AnswerUpdate]] = [[] for _ in job.answers]
        async for update in job:
            updates[update.index].append(update)
        choices = [
            self.choice(index, answer.seed, updates[index]) for index, answer in enumerate(job.answers)
        ]
        return self.whole(choices, usage(job))

    @abstractmethod
    def opening(self, count: int) -> list[Json]:
        """Choices of the chunks at the start of a stream with `count` answers."""

    @abstractmethod
    def update(self, update: AnswerUpdate) -> list[Json]:
        """Choices of the chunks for one update of an answer."""

    @abstractmethod
    def choice(self, index: int, seed: int, updates: Sequence[AnswerUpdate]) -> Json:
        """The choice for a whole answer, from all of its updates."""

    def chunk(self, choices: Sequence[Json], usage: Json | None, *, with_usage: bool) -> Json:
        """One chunk of a stream."""
        chunk = self._frame(self.chunk_kind, choices)
        return {**chunk, "usage": usage} if with_usage else chunk

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """The whole reply."""
        return {**self._frame(self.kind, choices), "usage": usage}

    def _traced(self, part: Json, traces: Sequence[StepTrace]) -> Json:
        """Add the traces of steps to a choice of a chunk, if there are any."""
        if not traces:
            return part
        return {**part, "speculation": {"steps": [self._step(trace) for trace in traces]}}

    def _step(self, trace: StepTrace) -> Json:
        return {
            "tokens": [self.texts(token) for token in trace.tokens],
            "parents": trace.parents,
            "drafters": trace.authors,
            "accepted": trace.path,
            "bonus": self.texts(trace.bonus),
        }

    def _frame(self, kind: str, choices: Sequence[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"soothsay-{__version__}",
            "choices": list(choices),
        }


class ChatFormat(ChoiceFormat):
    """Formats answers to a chat. `parser` makes the parser of tool calls for one answer."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, texts: TokenTexts, parser: MakeParser):
        super().__init__(model, texts)
        self._make_parser = parser
        self._parsers: dict[int, ToolCallParser] = {}  # by answer
        self._num_calls: dict[int, int] = {}  # by answer, so far

    def opening(self, count: int) -> list[Json]:
        """The role of each answer's message."""
        return [
            _choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None)
            for index in range(count)
        ]

    def update(self, update: AnswerUpdate) -> list[Json]:
        """The new text and calls; after the end also a choice with the reason."""
        index = update.index
        parser = self._parsers.setdefault(index, self._make_parser())
        parsed = [parser.push(update.text)]
        if update.finish_reason is not None:
            parsed.append(parser.end())
        content, calls = join(parsed)
        logprobs = self._logprobs(update.logprobs)
        delta: Json = {"content": content} if content else {}
        num_calls = self._num_calls.get(index, 0)
        if calls:
            delta["tool_calls"] = [
                {"index": number, **_call(call)} for number, call in enumerate(calls, start=num_calls)
            ]
            self._num_calls[index] = num_calls + len(calls)
        choices = []
        if delta or logprobs or update.traces:
            choices.append(self._traced(_choice(index, {"delta": delta}, logprobs, None), update.traces))
        if update.finish_reason is not None:
            reason = _reason(update.finish_reason, called=bool(self._num_calls.get(index)))
            choices.append(_choice(index, {"delta": {}}, None, reason))
        return choices

    def choice(self, index: int, seed: int, updates: Sequence[AnswerUpdate]) -> Json:
        """The message of a whole answer."""
        parser = self._make_parser()
        content, calls = join([parser.push(_text(updates)), parser.end()])
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        reason = _reason(updates[-1].finish_reason, called=bool(calls))
        choice = _choice(index, {"message": message}, self._logprobs(_logprobs(updates)), reason)
        return {**choice, "seed": seed}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {"content": list_logprobs(self.texts, logprobs), "refusal": None}


class CompletionFormat(ChoiceFormat):
    """Formats completions. `echoed` has the prompt of each answer if replies begin with it, else nothing."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, texts: TokenTexts, echoed: Sequence[str] = ()):
        super().__init__(model, texts)
        self._echoed = echoed
        self._offsets: dict[int, int] = {}  # characters with log-probabilities so far, by answer

    def opening(self, count: int) -> list[Json]:
        """The prompts, if replies begin with them."""
        return [_choice(index, {"text": text}, None, None) for index, text in enumerate(self._echoed)]

    def update(self, update: AnswerUpdate) -> list[Json]:
        """The new text, and at the end the reason."""
        logprobs = self._logprobs(update.index, update.logprobs)
        if not update.text and update.finish_reason is None and logprobs is None and not update.traces:
            return []
        choice = _choice(update.index, {"text": update.text}, logprobs, _reason(update.finish_reason))
        return [self._traced(choice, update.traces)]

    def choice(self, index: int, seed: int, updates: Sequence[AnswerUpdate]) -> Json:
        """The text of a whole answer."""
        text = (self._echoed[index] if self._echoed else "") + _text(updates)
        logprobs = self._logprobs(index, _logprobs(updates))
        choice = _choice(index, {"text": text}, logprobs, _reason(updates[-1].finish_reason))
        return {**choice, "seed": seed}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        tokens = [self.texts(one.token) for one in logprobs]
        offset, offsets = self._offsets.get(index, 0), []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [
                {self.texts(token): logprob for token, logprob in one.top.items()} for one in logprobs
            ],
            "text_offset": offsets,
        }


def usage(job: Job) -> Json:
    """The tokens of a job so far: of prompts and answers, drafted and accepted."""
    answers = job.answers
    stats = [answer.stats for answer in answers]
    steps, emitted = sum(s.steps for s in stats), sum(s.emitted for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    first = answers[:: job.params.n]  # one answer of each prompt, so that a prompt counts once
    num_prompt = sum(answer.num_prompt for answer in first)
    num_cached = sum(answer.num_cached for answer in first)
    num_output = sum(answer.num_output for answer in answers)
    accepted_by: Counter[str] = Counter()
    for one in stats:
        accepted_by.update({author: sum(counts) for author, counts in one.accepted_by.items()})
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculation": {
            "drafted": drafted,
            "accepted": accepted,
            "accepted_by": dict(accepted_by),
            "mean_accepted": round(emitted / steps, 3) if steps else 0.0,
            "lossless": job.params.rule.lossless,
        },
    }


def _text(updates: Sequence[AnswerUpdate]) -> str:
    return "".join(update.text for update in updates)


def _logprobs(updates: Sequence[AnswerUpdate]) -> list[TokenLogprobs] | None:
    """The log-probabilities of all updates; None: not requested."""
    parts = [update.logprobs for update in updates if update.logprobs is not None]
    return [one for part in parts for one in part] if parts else None


def _choice(index: int, content: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _call(call: ToolCall) -> Json:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _reason(reason: FinishReason | None, *, called: bool = False) -> str | None:
    if reason is FinishReason.STOP and called:
        return "tool_calls"
    return None if reason is None else str(reason)
