"""OpenAI's formats of replies to chats and completions, whole and in chunks of a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from soothsay.core.answer import FinishReason, TokenLogprobs
from soothsay.core.scores import PromptScores
from soothsay.server.apis.openai.choice_format import ChoiceFormat
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.generation.message_bodies import call_of
from soothsay.server.generation.reply_format import (
    MakeParser,
    TokenTexts,
    list_logprobs,
    logprobs_of,
    text_of,
)
from soothsay.server.generation.request_prompts import Echo
from soothsay.server.http.body_types import Json
from soothsay.server.tools.tool_calls import ToolCall, ToolCallParser


class ChatFormat(ChoiceFormat):
    """Formats answers to a chat.

    Args:
        model, texts: see `ReplyFormat`.
        parser: makes the parser of thoughts and tool calls for one answer.
        echoed: text that each answer begins with, from the request.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    one_prompt = True

    def __init__(self, model: str, texts: TokenTexts, parser: MakeParser, echoed: str = ""):
        super().__init__(model, texts)
        self._make_parser, self._echoed = parser, echoed
        self._parsers: dict[int, ToolCallParser] = {}  # by answer
        self._num_calls = Counter[int]()  # by answer, so far

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
            choices.append(self._traced(_choice(index, {"delta": delta}, logprobs, None), update.traces))
        if update.finish_reason is not None:
            reason = _reason(update.finish_reason, called=bool(self._num_calls[index]))
            choices.append(_choice(index, {"delta": {}}, None, reason))
        return choices

    def choice(self, index: int, seed: int, updates: Sequence[AnswerUpdate]) -> Json:
        """The message of a whole answer."""
        part = self._make_parser().parse(text_of(updates), final=True)
        content = self._echoed + part.content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if part.calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in part.calls]}
        reason = _reason(updates[-1].finish_reason, called=bool(part.calls))
        choice = _choice(index, {"message": message}, self._logprobs(logprobs_of(updates)), reason)
        return {**choice, "seed": seed}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> Json | None:
        if logprobs is None:
            return None
        return {"content": list_logprobs(self.texts, logprobs), "refusal": None}


class CompletionFormat(ChoiceFormat):
    """Formats completions.

    Args:
        model, texts: see `ReplyFormat`.
        echoed: the prompt of each answer if replies begin with it, else nothing.
        scored: whether the prompts have log-probabilities. Then a stream begins with the first update, and
            lists contain the token that ended an answer: readers count tokens from both ends.
    """

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    one_prompt = False

    def __init__(self, model: str, texts: TokenTexts, echoed: Sequence[Echo] = (), *, scored: bool = False):
        super().__init__(model, texts)
        self._echoed, self._scored = echoed, scored
        self._offsets = Counter[int]()  # characters with log-probabilities so far, by answer

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
        text = (self._echoed[index].text if self._echoed else "") + text_of(updates)
        logprobs = self._logprobs(index, updates)
        choice = _choice(index, {"text": text}, logprobs, _reason(updates[-1].finish_reason))
        return {**choice, "seed": seed}

    def _logprobs(self, index: int, updates: Sequence[AnswerUpdate]) -> Json | None:
        """The log-probabilities of updates in order; None: not requested."""
        found = logprobs_of(updates)
        if found is None:
            return None
        prompt, unknown, scores = list[int](), list[None](), PromptScores()
        if self._scored:
            found += [update.end_logprobs for update in updates if update.end_logprobs is not None]
            if updates[0].prompt_logprobs is not None:
                prompt, scores = self._echoed[index].ids, updates[0].prompt_logprobs
                unknown = [None]  # nothing says how likely the first one was
        tokens = [*prompt, *(one.token for one in found)]
        return {
            "tokens": map(self.texts, tokens),
            "token_logprobs": chain(unknown, (one.logprob for one in chain(scores, found))),
            "top_logprobs": chain(unknown, map(self._top, chain(scores, found))),
            "text_offset": self._next_offsets(index, tokens),
        }

    def _top(self, one: TokenLogprobs) -> Json:
        return {self.texts(token): logprob for token, logprob in one.top.items()}

    def _next_offsets(self, index: int, tokens: Sequence[int]) -> Iterator[int]:
        """Where the texts of an answer's next tokens begin. Each chunk is written before the next is made."""
        for token in tokens:
            yield self._offsets[index]
            self._offsets[index] += len(self.texts(token))


def _choice(index: int, content: Json, logprobs: Json | None, reason: str | None) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _reason(reason: FinishReason | None, *, called: bool = False) -> str | None:
    if reason is FinishReason.STOP and called:
        return "tool_calls"
    return None if reason is None else str(reason)


def _call(call: ToolCall) -> Json:
    return call_of(call.id, call.name, call.arguments)
