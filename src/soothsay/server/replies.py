"""OpenAI's formats of replies to chats and completions, whole and in chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from soothsay import __version__
from soothsay.core.answer import FinishReason, StepTrace, TokenLogprobs
from soothsay.server.jobs import Job
from soothsay.server.messages import AnswerUpdate
from soothsay.server.tools import ParsedPart, ToolCall, ToolCallParser
from soothsay.tokenizer import Tokenizer

Json = dict[str, Any]


class TokenTexts:
    """The texts of single tokens, with the space that a token may begin with. Caches them."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """The text of a token. A part of a character becomes U+FFFD."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        if token not in self._texts:
            # decoders drop the space of the first token, so decode the token after itself
            first = self._tokenizer.decode([token], skip_special=False)
            both = self._tokenizer.decode([token, token], skip_special=False)
            self._texts[token] = both[len(first) :]
        return self._texts[token]


class ReplyFormat(ABC):
    """Formats the answers to one HTTP request as JSON.

    Args:
        model: the model's name in requests.
        texts: texts of tokens, for log-probabilities and traces.
    """

    kind: str  # the field `object` of a whole reply
    chunk_kind: str  # the field `object` of a chunk
    prefix: str  # of the reply's id

    def __init__(self, model: str, texts: TokenTexts):
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model, self.texts = model, texts

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


class ChatFormat(ReplyFormat):
    """Formats answers to a chat.

    Args:
        model, texts: see `ReplyFormat`.
        parser: makes the parser of tool calls for one answer.
        echoed: text that each answer begins with, from the request.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, texts: TokenTexts, parser: Callable[[], ToolCallParser], echoed: str = ""):
        super().__init__(model, texts)
        self._make_parser, self._echoed = parser, echoed
        self._parsers: dict[int, ToolCallParser] = {}  # by answer
        self._num_calls: dict[int, int] = {}  # by answer, so far

    def opening(self, count: int) -> list[Json]:
        """The role of each answer's message, and the text that it begins with."""
        return [
            _choice(index, {"delta": {"role": "assistant", "content": self._echoed}}, None, None)
            for index in range(count)
        ]

    def update(self, update: AnswerUpdate) -> list[Json]:
        """The new text and calls; after the end also a choice with the reason."""
        index = update.index
        parser = self._parsers.setdefault(index, self._make_parser())
        parsed = [parser.push(update.text)]
        if update.finish_reason is not None:
            parsed.append(parser.end())
        content, calls = _join(parsed)
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
        content, calls = _join([parser.push(_text(updates)), parser.end()])
        content = self._echoed + content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
        reason = _reason(updates[-1].finish_reason, called=bool(calls))
        choice = _choice(index, {"message": message}, self._logprobs(logprobs_of(updates)), reason)
        return {**choice, "seed": seed}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._token(one.token, one.logprob),
                    "top_logprobs": [self._token(*pair) for pair in one.top.items()],
                }
                for one in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Json:
        text = self.texts(token)
        spelling = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": spelling}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that a reply begins with. With log-probabilities, these list all of its tokens too."""

    text: str
    ids: list[int]


class CompletionFormat(ReplyFormat):
    """Formats completions.

    Args:
        model, texts: see `ReplyFormat`.
        echoed: the prompt of each answer if replies begin with it, else nothing.
        scored: whether the prompts have log-probabilities. Then a stream begins with the first update, and
            lists contain the token that ended an answer: readers count tokens from both ends.
    """

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, texts: TokenTexts, echoed: Sequence[Echo] = (), *, scored: bool = False):
        super().__init__(model, texts)
        self._echoed, self._scored = echoed, scored
        self._offsets: dict[int, int] = {}  # characters with log-probabilities so far, by answer

    def opening(self, count: int) -> list[Json]:
        """The prompts, if replies begin with them."""
        echoed = () if self._scored else self._echoed
        return [_choice(index, {"text": echo.text}, None, None) for index, echo in enumerate(echoed)]

    def update(self, update: AnswerUpdate) -> list[Json]:
        """The new text, and at the end the reason."""
        logprobs = self._logprobs(update.index, [update])
        text = update.text
        if update.prompt_logprobs is not None and self._scored:
            text = self._echoed[update.index].text + text
        if not text and update.finish_reason is None and logprobs is None and not update.traces:
            return []
        choice = _choice(update.index, {"text": text}, logprobs, _reason(update.finish_reason))
        return [self._traced(choice, update.traces)]

    def choice(self, index: int, seed: int, updates: Sequence[AnswerUpdate]) -> Json:
        """The text of a whole answer."""
        text = (self._echoed[index].text if self._echoed else "") + _text(updates)
        logprobs = self._logprobs(index, updates)
        choice = _choice(index, {"text": text}, logprobs, _reason(updates[-1].finish_reason))
        return {**choice, "seed": seed}

    def _logprobs(self, index: int, updates: Sequence[AnswerUpdate]) -> Json | None:
        """The log-probabilities of updates in order; None: not requested."""
        found = logprobs_of(updates)
        if found is None:
            return None
        unknown, listed = list[int](), list[TokenLogprobs]()
        if self._scored:
            ended = [update.end_logprobs for update in updates if update.end_logprobs is not None]
            of_prompt = [update.prompt_logprobs for update in updates if update.prompt_logprobs is not None]
            unknown = self._echoed[index].ids[: len(of_prompt)]  # nothing says how likely the first one was
            listed = [one for part in of_prompt for one in part]
            found = [*found, *ended]
        listed += found
        tokens = [self.texts(token) for token in (*unknown, *(one.token for one in listed))]
        offset, offsets = self._offsets.get(index, 0), []
        for text in tokens:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [*(None for _ in unknown), *(one.logprob for one in listed)],
            "top_logprobs": [*(None for _ in unknown), *(self._top(one) for one in listed)],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> Json:
        return {self.texts(token): logprob for token, logprob in one.top.items()}


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


def _join(parts: Sequence[ParsedPart]) -> tuple[str, list[ToolCall]]:
    """The text and the calls of all parts."""
    return "".join(part.content for part in parts), [call for part in parts for call in part.calls]


def _text(updates: Sequence[AnswerUpdate]) -> str:
    return "".join(update.text for update in updates)


def logprobs_of(updates: Sequence[AnswerUpdate]) -> list[TokenLogprobs] | None:
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
