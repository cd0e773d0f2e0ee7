"""Replies of llama.cpp's API to completions and infills."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from soothsay.core.answer import FinishReason, TokenLogprobs
from soothsay.server.apis.llamacpp.llama_bodies import LlamaRequest
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.reply_format import (
    ReplyFormat,
    ReplyOptions,
    TokenTexts,
    gathered,
    list_logprobs,
    logprobs_of,
    text_of,
)
from soothsay.server.generation.reply_reports import timings, usage
from soothsay.server.http.body_types import Json
from soothsay.server.http.json_streams import EVENTS

NO_SLOT = -1
"""The slot of all answers: requests are not bound to slots."""


class LlamaFormat(ReplyFormat):
    """Formats answers as llama.cpp's server does.

    Args:
        model, texts: see `ReplyFormat`.
        asked: the request.
        prompts: the text of each prompt, special tokens included.
        max_context: tokens of prompt and answer.
    """

    framing = replace(EVENTS, end="")

    def __init__(
        self, model: str, texts: TokenTexts, asked: LlamaRequest, prompts: Sequence[str], max_context: int
    ):
        super().__init__(model, texts)
        self._prompts, self._max_context = prompts, max_context
        self._num_probs, self._streams = asked.n_probs or 0, bool(asked.stream)
        self._with_ids, self._with_timings = bool(asked.return_tokens), bool(asked.timings_per_token)
        self._selected_fields = [(name, name.split("/")) for name in asked.response_fields or ()]

    async def stream(self, job: Job, options: ReplyOptions) -> AsyncIterator[Json]:
        """Chunks with new text. The last one of each answer has no text, and all other fields."""
        answers: list[list[AnswerUpdate]] = [[] for _ in job.answers]
        async for update in job:
            answers[update.index].append(update)
            if update.text or update.logprobs:
                yield self._chunk(job, update)
            if update.finish_reason is not None:
                yield self._selected(self._whole(job, update.index, answers[update.index], last=True))

    async def collect(self, job: Job, options: ReplyOptions) -> Json | list[Json]:
        """Wait for all answers, and return the reply; a list of them for more than one answer."""
        answers = await gathered(job)
        made = [self._selected(self._whole(job, index, updates)) for index, updates in enumerate(answers)]
        return made[0] if len(made) == 1 else made

    def _chunk(self, job: Job, update: AnswerUpdate) -> Json:
        progress = job.answers[update.index]
        chunk: Json = {
            "index": update.index,
            "content": update.text,
            "tokens": list(update.token_ids),
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": update.num_output,
            "tokens_evaluated": progress.num_prompt,
        }
        if self._with_timings:
            chunk["timings"] = timings(job)
        if update.logprobs:
            chunk["completion_probabilities"] = self._probabilities(update.logprobs)
        return chunk

    def _whole(self, job: Job, index: int, updates: list[AnswerUpdate], *, last: bool = False) -> Json:
        """A whole reply. `last`: its text was sent before."""
        progress, content, end = job.answers[index], text_of(updates), updates[-1]
        kinds = {FinishReason.STOP: "word" if end.stop else "eos", FinishReason.LENGTH: "limit"}
        limited = end.finish_reason is FinishReason.LENGTH
        ids = [token for update in updates for token in update.token_ids]
        made: Json = {
            "index": index,
            "content": "" if last else content,
            "tokens": ids if self._with_ids and not last else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self.model,
            "tokens_predicted": progress.num_output,
            "tokens_evaluated": progress.num_prompt,
            "generation_settings": self._settings(job, progress.seed),
            "prompt": self._prompts[index // job.params.n],
            "has_new_line": "\n" in content,
            "truncated": limited and progress.num_prompt + progress.num_output >= self._max_context,
            "stop_type": kinds.get(end.finish_reason, "none") if end.finish_reason else "none",
            "stopping_word": end.stop,
            "tokens_cached": progress.num_cached,
            "timings": timings(job),
            "speculation": usage(job)["speculation"],
        }
        if (logprobs := logprobs_of(updates)) and not last:
            made["completion_probabilities"] = self._probabilities(logprobs)
        return made

    def _settings(self, job: Job, seed: int) -> Json:
        """The parameters of the answer, by llama.cpp's names."""
        params = job.params
        names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        limit = -1 if params.max_tokens is None else params.max_tokens
        return {
            "seed": seed,
            "n_ctx": self._max_context,
            "n_predict": limit,
            "max_tokens": limit,
            "n_probs": self._num_probs,
            "stream": self._streams,
            "stop": list(params.stop),
            "ignore_eos": params.ignore_eos,
            "repeat_penalty": params.repetition_penalty,
            **{name: getattr(params, name) for name in names},
        }

    def _selected(self, reply: Json) -> Json:
        """The fields of a reply that the request names; a slash leads into a field. If it names none: all."""
        if not self._selected_fields:
            return reply
        found: Json = {}
        for name, steps in self._selected_fields:
            value: Any = reply
            for step in steps:
                if not isinstance(value, dict):
                    value = None
                    break
                value = value.get(step)
            if value is not None:
                found[name] = value
        return found

    def _probabilities(self, logprobs: list[TokenLogprobs]) -> Iterator[Json]:
        return list_logprobs(self.texts, logprobs, no_bytes=[], with_ids=True)
