"""The API of llama.cpp's server, so that its clients can use this one. Bodies are turned into completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from soothsay.server.apis.llamacpp.infill import GapTokens
from soothsay.server.apis.llamacpp.llama_bodies import (
    RENAMED,
    ApplyTemplateRequest,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaRequest,
    Parts,
)
from soothsay.server.apis.llamacpp.llama_replies import LlamaFormat
from soothsay.server.generation.prompt_reader import CUT, PromptReader
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.generation.request_parameters import chosen_tools, sampling_params, truncated
from soothsay.server.generation.service import Asked, Service, make_body
from soothsay.server.http.api_errors import invalid, renamed, try_later, unsupported

SLOTS = "/slots"
"""The route that shows how many requests of all clients run."""

LLAMA_BODIES: dict[str, type[BaseModel]] = {
    "/completion": LlamaCompletionRequest,
    "/completions": LlamaCompletionRequest,
    "/infill": InfillRequest,
    "/apply-template": ApplyTemplateRequest,
}
"""The class of the body of each path."""


class LlamaApi:
    """llama.cpp's API on top of a server.

    Args:
        service: answers completions.
        num_answers: how many answers run or wait now.
    """

    def __init__(self, service: Service, num_answers: Callable[[], int]):
        self._service, self._num_answers = service, num_answers
        tokenizer = service.model.tokenizer
        self._gap = None if tokenizer is None else GapTokens.of(tokenizer.vocabulary())

    async def complete(self, http: Request) -> Response:
        """`POST /completion`."""
        return await self._answer(
            http,
            await self._service.read(
                http, LlamaCompletionRequest, lambda body: self._ask(http, body, body.prompts())
            ),
        )

    async def infill(self, http: Request) -> Response:
        """`POST /infill`."""

        def ask(body: InfillRequest) -> Asked:
            if self._gap is None:
                message = "this model cannot fill gaps: its vocabulary lacks the tokens; use /completion"
                raise unsupported("input_prefix", message)
            ends = [*(body.stop_token_ids or ()), *self._gap.ends]
            ended = body.model_copy(update={"stop_token_ids": ends})
            return self._ask(http, ended, [self._gap.prompt(body)])

        return await self._answer(http, await self._service.read(http, InfillRequest, ask))

    async def apply_template(self, http: Request) -> Response:
        """`POST /apply-template`: a conversation as the model reads it."""

        def work(body: ApplyTemplateRequest) -> Response:
            self._service.check_model(body.model)
            chat = make_body(ChatRequest, body.fields)
            _, text = self._service.read_chat(chat, chosen_tools(chat)[0])
            return JSONResponse({"prompt": text})

        return await self._service.read(http, ApplyTemplateRequest, work)

    async def slots(self, http: Request) -> Response:
        """`GET /slots`: which answers run, without their text."""
        total, busy = self._service.model.max_requests, self._num_answers()
        if http.query_params.get("fail_on_no_slot") and busy >= total:
            raise try_later("all slots are busy")
        n_ctx = self._service.model.max_context
        return JSONResponse(
            [
                {"id": number, "n_ctx": n_ctx, "speculative": True, "is_processing": number < busy}
                for number in range(total)
            ]
        )

    async def _answer(self, http: Request, asked: Asked) -> Response:
        """Answer. Raises `ApiError`, with this API's names of fields."""
        with renamed(RENAMED):
            return await self._service.answer(http, asked)

    def _ask(self, http: Request, body: LlamaRequest, prompts: list[Parts]) -> Asked:
        """What a body with these prompts asks for. Raises `ApiError`, with this API's names of fields."""
        service = self._service
        service.check_model(body.model)
        if not 0 < len(prompts) <= service.config.max_prompts:
            raise invalid("prompt", f"give between 1 and {service.config.max_prompts} prompts")
        room = service.model.max_context
        ids, texts = read_prompts(service.prompts, body, prompts, room)
        with renamed(RENAMED):
            completion = body.completion(ids)
            params = sampling_params(completion, service.config, service.model.sampling_defaults)
            reply = LlamaFormat(service.config.name, service.texts, body, texts, room)
            return service.complete(http, completion, params, lambda _: reply)


def read_prompts(
    reader: PromptReader, body: LlamaRequest, prompts: Sequence[Parts], room: int
) -> tuple[list[list[int]], list[str]]:
    """Token ids and texts of prompts. The text at the start of a prompt gets the tokens that begin a text.

    Args:
        reader: of the model's prompts.
        body: how to cut prompts.
        prompts: in texts and token ids.
        room: tokens of the context.

    Raises `ApiError` for unknown token ids, and for prompts that the context cannot hold.
    """
    begin, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
    all_ids, texts = list[list[int]](), list[str]()
    for parts in prompts:
        if len(parts) > 2 * room:  # each takes time, also if it is empty
            raise reader.over_long(f"{len(parts)} parts", "prompt")
        ids: list[int] = []
        for place, part in enumerate(parts):
            first = begin and place == 0
            ids += [part] if isinstance(part, int) else reader.encode(part, special=first, cut=cut)
            if len(ids) > CUT * room:
                raise reader.over_long(f"at least {len(ids)} tokens", "prompt")
        ids = reader.check_prompt(truncated(ids, body, room))
        all_ids.append(ids)
        texts.append("" if reader.has_no_tokenizer else reader.decode(ids, skip_special=False))
    return all_ids, texts


def llama_routes(service: Service, num_answers: Callable[[], int]) -> list[Route]:
    """The routes of this API. `num_answers` says how many answers run or wait."""
    api = LlamaApi(service, num_answers)
    return [
        Route("/completion", api.complete, methods=["POST"]),
        Route("/completions", api.complete, methods=["POST"]),
        Route("/infill", api.infill, methods=["POST"]),
        Route("/apply-template", api.apply_template, methods=["POST"]),
        Route(SLOTS, api.slots),
    ]
