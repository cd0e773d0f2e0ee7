"""The routes and replies of llama.cpp's API, so that its clients can use this server.

Bodies are turned into completions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay import __version__
from soothsay.core.answer import FinishReason, TokenLogprobs
from soothsay.server.apis.llamacpp.llama_bodies import (
    RENAMED,
    GapTokens,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaRequest,
    Parts,
)
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.reply_format import (
    ReplyFormat,
    TokenTexts,
    as_one,
    gathered,
    list_logprobs,
    timings,
    usage,
)
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.generation.request_parameters import truncated
from soothsay.server.generation.request_prompts import CUT, PromptReader
from soothsay.server.generation.service import ReplyPlan, Service
from soothsay.server.http.api_errors import try_later, unsupported
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.bodies import Json
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

    async def stream(self, job: Job) -> AsyncIterator[Json]:
        """Chunks with new text. The last one of each answer has no text, and all other fields."""
        answers: list[list[AnswerUpdate]] = [[] for _ in job.answers]
        async for update in job:
            answers[update.index].append(update)
            if update.text or update.logprobs:
                yield self._chunk(job, update)
            if update.finish_reason is not None:
                yield self._selected(self._whole(job, as_one(answers[update.index]), last=True))

    async def collect(self, job: Job) -> Json | list[Json]:
        """Wait for all answers, and return the reply; a list of them for more than one answer."""
        made = [self._selected(self._whole(job, answer)) for answer in await gathered(job)]
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

    def _whole(self, job: Job, answer: AnswerUpdate, *, last: bool = False) -> Json:
        """A whole reply. `last`: its text was sent before."""
        progress, reason = job.answers[answer.index], answer.finish_reason
        kinds = {FinishReason.STOP: "word" if answer.stop else "eos", FinishReason.LENGTH: "limit"}
        full = progress.num_prompt + progress.num_output >= self._max_context
        made: Json = {
            "index": answer.index,
            "content": "" if last else answer.text,
            "tokens": answer.token_ids if self._with_ids and not last else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self.model,
            "tokens_predicted": progress.num_output,
            "tokens_evaluated": progress.num_prompt,
            "generation_settings": self._settings(job, progress.seed),
            "prompt": self._prompts[answer.index // job.params.n],
            "has_new_line": "\n" in answer.text,
            "truncated": reason is FinishReason.LENGTH and full,
            "stop_type": kinds.get(reason, "none") if reason else "none",
            "stopping_word": answer.stop,
            "tokens_cached": progress.num_cached,
            "timings": timings(job),
            "speculation": usage(job)["speculation"],
        }
        if answer.logprobs and not last:
            made["completion_probabilities"] = self._probabilities(answer.logprobs)
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
        found = {name: _inside(reply, steps) for name, steps in self._selected_fields}
        return {name: value for name, value in found.items() if value is not None}

    def _probabilities(self, logprobs: list[TokenLogprobs]) -> Iterator[Json]:
        return list_logprobs(self.texts, logprobs, no_bytes=[], with_ids=True)


def _inside(value: Any, steps: Sequence[str]) -> Any:
    """The value to which the names of fields lead; None if there is none."""
    for step in steps:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def llama_routes(service: Service) -> list[ApiRoute]:
    """The routes of this API."""
    tokenizer = service.model.tokenizer
    gap = None if tokenizer is None else GapTokens.of(tokenizer.vocabulary())
    if gap is not None:
        service.missing["suffix"] = "use POST /infill, whose input_suffix follows the answer"

    def complete(http: Request, body: LlamaCompletionRequest) -> ReplyPlan:
        return _plan(service, http, body, body.prompts())

    def infill(http: Request, body: InfillRequest) -> ReplyPlan:
        if gap is None:
            message = "this model cannot fill gaps: its vocabulary lacks the tokens; use /completion"
            raise unsupported("input_prefix", message)
        ends = [*(body.stop_token_ids or ()), *gap.ends]
        return _plan(service, http, body.model_copy(update={"stop_token_ids": ends}), [gap.prompt(body)])

    def apply_template(_: Request, body: ChatRequest) -> Response:
        """A conversation as the model reads it."""
        service.check_model(body.model)
        return JSONResponse({"prompt": service.read_chat(body)[1]})

    return [
        service.post("/completion", LlamaCompletionRequest, complete, names=RENAMED),
        service.post("/completions", LlamaCompletionRequest, complete, names=RENAMED),
        service.post("/infill", InfillRequest, infill, names=RENAMED),
        service.post("/apply-template", ChatRequest, apply_template, answers=False),
        *_model_routes(service),
    ]


def _model_routes(service: Service) -> list[ApiRoute]:
    """The routes that describe the model, and how busy it is."""
    model, tokenizer = service.model, service.model.tokenizer

    async def slots(http: Request) -> Response:
        """Which answers run, without their text."""
        total, busy = model.max_requests, service.loop.in_flight
        if http.query_params.get("fail_on_no_slot") and busy >= total:
            raise try_later("all slots are busy")
        slot = {"n_ctx": model.max_context, "speculative": True}
        return JSONResponse([{"id": i, **slot, "is_processing": i < busy} for i in range(total)])

    async def props(_: Request) -> Response:
        """What clients of llama.cpp's server ask for first."""
        special = {} if tokenizer is None else tokenizer.special
        settings = {"n_ctx": model.max_context, "params": dict(model.sampling_defaults)}
        return JSONResponse(
            {
                "default_generation_settings": settings,
                "total_slots": model.max_requests,
                "model_alias": service.config.name,
                "chat_template": "" if tokenizer is None else tokenizer.templates.get("default", ""),
                "bos_token": special.get("bos_token", ""),
                "eos_token": special.get("eos_token", ""),
                "modalities": {"vision": False, "audio": False},
                "build_info": f"soothsay {__version__}",
                "is_sleeping": False,
            }
        )

    return [
        ApiRoute("/slots", slots, described=True, operator=True),
        ApiRoute("/props", props, counted=True, answers=False),
    ]


def _plan(service: Service, http: Request, body: LlamaRequest, prompts: list[Parts]) -> ReplyPlan:
    """What a body with these prompts asks for. Raises `ApiError`."""
    service.check_model(body.model)
    reader, named = service.prompts, service.model.tokenizer is not None
    ids = read_prompts(reader, body, service.checked(prompts))
    texts = [reader.decode(one, skip_special=False) if named else "" for one in ids]
    reply = LlamaFormat(service.reply_name(body.model), service.texts, body, texts, reader.room)
    return service.complete(http, body.completion(ids), lambda _: reply)


def read_prompts(reader: PromptReader, body: LlamaRequest, prompts: Sequence[Parts]) -> list[list[int]]:
    """Token ids of prompts. The text at the start of a prompt gets the tokens that begin a text.

    Args:
        reader: of the model's prompts.
        body: how to cut prompts.
        prompts: in texts and token ids.

    Raises `ApiError` for unknown token ids, and for prompts that the context cannot hold.
    """
    begin, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
    all_ids = list[list[int]]()
    for parts in prompts:
        if len(parts) > 2 * reader.room:  # each takes time, also if it is empty
            raise reader.over_long(f"{len(parts)} parts", "prompt")
        ids: list[int] = []
        for place, part in enumerate(parts):
            first = begin and place == 0
            ids += [part] if isinstance(part, int) else reader.encode(part, special=first, cut=cut)
            if len(ids) > CUT * reader.room:
                raise reader.over_long(f"at least {len(ids)} tokens", "prompt")
        all_ids.append(reader.check_prompt(truncated(ids, body, reader.room)))
    return all_ids
