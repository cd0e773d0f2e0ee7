"""OpenAI's formats of replies to chats and completions, whole and in chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
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
    ReplyOptions,
    TokenTexts,
    gathered,
    list_logprobs,
    logprobs_of,
    reports,
    text_of,
    usage,
)
from soothsay.server.generation.request_prompts import Echo
from soothsay.server.http.bodies import Json
from soothsay.server.tools.tool_calls import ToolCall, ToolCallParser


class Details:
    """Adds to replies what they have beyond OpenAI's: token ids, and log-probabilities of prompts.

    The fields are vLLM's. A chat has one prompt, so its fields are at the root of the reply. Those of
    completions are in each choice.

    Args:
        options: what the request wants.
        prompts: token ids of the prompt of each answer.
        texts: texts of tokens.
        at_root: whether there is one prompt, so that its fields are at the root of the reply.
    """

    def __init__(
        self, options: ReplyOptions, prompts: Sequence[list[int]], texts: TokenTexts, *, at_root: bool
    ):
        self._prompts, self._texts, self._at_root = prompts, texts, at_root
        self._ids, self._logprobs = options.token_ids, options.prompt_logprobs
        self._begun: set[int] = set()  # answers that have had a chunk
        self._held: defaultdict[int, list[int]] = defaultdict(list)  # by answer: ids for its next chunk

    def add(self, reply: Json, answers: Sequence[Sequence[AnswerUpdate]]) -> None:
        """Add the fields to a whole reply with these answers."""
        for choice, prompt, updates in zip(reply["choices"], self._prompts, answers, strict=True):
            root = reply if self._at_root else choice
            if self._ids:
                root["prompt_token_ids"] = prompt
                choice["token_ids"] = [token for update in updates for token in update.token_ids]
            if self._logprobs:
                scores = next((one.prompt_logprobs for one in updates if one.prompt_logprobs is not None), ())
                root["prompt_logprobs"] = chain([None], map(self._entry, scores))

    def hold(self, update: AnswerUpdate) -> None:
        """Keep the ids of an update for the next chunk of its answer. Tokens without text make no chunk."""
        if self._ids:
            self._held[update.index] += update.token_ids

    def add_to_chunk(self, chunk: Json) -> None:
        """Add the fields to a chunk of a stream. The first chunk of an answer has its prompt."""
        for choice in chunk["choices"] if self._ids else ():
            index = choice["index"]
            if index not in self._begun:
                self._begun.add(index)
                (chunk if self._at_root else choice)["prompt_token_ids"] = self._prompts[index]
            choice["token_ids"] = self._held.pop(index, [])

    def _entry(self, one: TokenLogprobs) -> Json:
        """The log-probabilities of a token of a prompt and of the likeliest ones, by token id."""
        ranks = {token: rank for rank, token in enumerate(one.top, start=1)}
        return {
            str(token): {"logprob": logprob, "rank": ranks.get(token), "decoded_token": self._texts(token)}
            for token, logprob in {one.token: one.logprob, **one.top}.items()
        }


class ChoiceFormat(ReplyFormat):
    """Formats replies that have one choice for each answer."""

    kind: str  # the field `object` of a whole reply
    chunk_kind: str  # the field `object` of a chunk
    prefix: str  # of the reply's id
    one_prompt: bool  # whether fields about the prompt are at the root of the reply

    def __init__(self, model: str, texts: TokenTexts):
        super().__init__(model, texts)
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    async def stream(self, job: Job, options: ReplyOptions) -> AsyncIterator[Json]:
        """The chunks of a stream. The last one has the usage, if that is wanted, and the reports."""
        details = self._details(job, options)

        def chunk(choice: Json) -> Json:
            so_far = usage(job) if options.usage_always else None
            made = self.chunk([choice], so_far, with_usage=options.usage)
            details.add_to_chunk(made)
            return made

        for choice in self.opening(job.size):
            yield chunk(choice)
        num_open = job.size
        async for update in job:
            details.hold(update)
            num_open -= update.finish_reason is not None
            choices = self.update(update)
            for place, choice in enumerate(choices, start=1):
                is_last = num_open == 0 and place == len(choices) and not options.usage
                yield {**chunk(choice), **(reports(job) if is_last else {})}
        if options.usage:
            yield {**self.chunk([], usage(job), with_usage=True), **reports(job)}

    async def collect(self, job: Job, options: ReplyOptions) -> Json:
        """Wait for all answers, and return the reply with the `n` best to each prompt."""
        updates = await gathered(job)
        chosen = _best(updates, job.params.n, options.n)
        choices = [
            self.choice(index, job.answers[number].seed, updates[number])
            for index, number in enumerate(chosen)
        ]
        if not options.logprobs:
            choices = [{**choice, "logprobs": None} for choice in choices]  # they were for choosing the best
        made = {**self._frame(self.kind, choices), "usage": usage(job), **reports(job)}
        self._details(job, options).add(made, [updates[number] for number in chosen])
        return made

    def _details(self, job: Job, options: ReplyOptions) -> Details:
        prompts = [prompt for prompt in job.prompts for _ in range(options.n)]
        return Details(options, prompts, self.texts, at_root=self.one_prompt)

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


def _best(answers: Sequence[Sequence[AnswerUpdate]], num_answers: int, n: int) -> list[int]:
    """The numbers of the `n` answers to each prompt with the largest mean log-probability, best first.

    Args:
        answers: the updates of all answers, `num_answers` to each prompt. With log-probabilities, if `n` is
            smaller.
        num_answers: at least `n`.
        n: how many to choose. If that is all of them, they keep their order.
    """
    if n == num_answers:
        return [*range(len(answers))]

    def score(number: int) -> float:
        found = [one.logprob for one in logprobs_of(answers[number]) or ()]
        found += [one.end_logprobs.logprob for one in answers[number] if one.end_logprobs is not None]
        return sum(found) / len(found) if found else float("-inf")

    groups = (range(first, first + num_answers) for first in range(0, len(answers), num_answers))
    return [number for group in groups for number in sorted(group, key=score, reverse=True)[:n]]


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
