"""The API of llama.cpp's server, so that its clients can use this one. Bodies are turned into completions."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from soothsay import __version__
from soothsay.server.apis.llamacpp.infill import GapTokens
from soothsay.server.apis.llamacpp.llama_bodies import (
    RENAMED,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaRequest,
    Parts,
)
from soothsay.server.apis.llamacpp.llama_replies import LlamaFormat
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.generation.request_parameters import truncated
from soothsay.server.generation.request_prompts import CUT, PromptReader
from soothsay.server.generation.service import ReplyPlan, Service
from soothsay.server.http.api_errors import try_later, unsupported
from soothsay.server.http.api_route import ApiRoute


def llama_routes(service: Service) -> list[ApiRoute]:
    """The routes of this API."""
    tokenizer = service.model.tokenizer
    gap = None if tokenizer is None else GapTokens.of(tokenizer.vocabulary())

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
    room = service.model.max_context
    reader = service.prompts
    ids = read_prompts(reader, body, service.checked(prompts), room)
    named = service.model.tokenizer is not None
    texts = [reader.decode(one, skip_special=False) if named else "" for one in ids]
    reply = LlamaFormat(service.config.name, service.texts, body, texts, room)
    return service.complete(http, body.completion(ids), lambda _: reply)


def read_prompts(
    reader: PromptReader, body: LlamaRequest, prompts: Sequence[Parts], room: int
) -> list[list[int]]:
    """Token ids of prompts. The text at the start of a prompt gets the tokens that begin a text.

    Args:
        reader: of the model's prompts.
        body: how to cut prompts.
        prompts: in texts and token ids.
        room: tokens of the context.

    Raises `ApiError` for unknown token ids, and for prompts that the context cannot hold.
    """
    begin, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
    all_ids = list[list[int]]()
    for parts in prompts:
        if len(parts) > 2 * room:  # each takes time, also if it is empty
            raise reader.over_long(f"{len(parts)} parts", "prompt")
        ids: list[int] = []
        for place, part in enumerate(parts):
            first = begin and place == 0
            ids += [part] if isinstance(part, int) else reader.encode(part, special=first, cut=cut)
            if len(ids) > CUT * room:
                raise reader.over_long(f"at least {len(ids)} tokens", "prompt")
        all_ids.append(reader.check_prompt(truncated(ids, body, room)))
    return all_ids
