"""The HTTP routes. A route checks a request, submits a job, and formats its answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from soothsay.core.params import SamplingParams
from soothsay.server.accounts import Account, Charge
from soothsay.server.api_errors import ApiError
from soothsay.server.api_keys import KeyFileError, KeyRing
from soothsay.server.bodies import BodyReader
from soothsay.server.engine_loop import EngineLoop, EngineState
from soothsay.server.events import EventStream, while_connected
from soothsay.server.gate import Gate
from soothsay.server.jobs import Job
from soothsay.server.messages import AnswerUpdate
from soothsay.server.metrics import CONTENT_TYPE, Metrics
from soothsay.server.openapi import describe
from soothsay.server.parameters import RequestOptions, request_options, sampling_params
from soothsay.server.process import EngineProcess
from soothsay.server.prompts import PromptReader
from soothsay.server.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NamedTool,
    TokenizeRequest,
)
from soothsay.server.replies import ChatFormat, CompletionFormat, ReplyFormat, TokenTexts, usage
from soothsay.server.server_config import ServerConfig
from soothsay.server.tools import PlainParser, ToolFormat
from soothsay.server.web_page import page_routes

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""The class of the body of each path."""

RESERVED = ("messages", "self", "tools")
"""Variables of chat templates that `chat_template_kwargs` must not set."""


class Server:
    """Serves one model over HTTP. `app` is the ASGI application.

    Args:
        engine: the engine's process, with the model loaded. Nothing else may use it from now on. It ends
            with the lifespan of `app`.
        config: limits and names.
        keys: the valid API keys; None: no key is needed.
    """

    def __init__(self, engine: EngineProcess, config: ServerConfig, keys: KeyRing | None = None):
        self.model, self.config = engine.model, config
        self.metrics, self._keys = Metrics(config.name), keys
        max_in_flight = self.model.max_requests + config.max_queue
        self.loop = EngineLoop(engine, self.metrics, max_in_flight, config.settling)
        self._drafters = tuple(dict.fromkeys((self.model.drafter, "none", *config.drafters)))
        self._tools = ToolFormat.of(self.model.tokenizer)
        self._texts = TokenTexts(self.model.tokenizer)
        self.read = BodyReader(config.max_bodies).read
        self._prompts = PromptReader(self.model)
        self._started = int(time.time())
        pages = page_routes()
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
            *pages,
        ]
        router = Router(routes, redirect_slashes=False, default=_not_found, lifespan=self._lifespan)
        paths = frozenset(route.path for route in routes)
        keyless = frozenset({"/health", "/ready", *(page.path for page in pages)})
        self.app: ASGIApp = Gate(router, config, self.metrics, keys, paths, keyless, frozenset({"/metrics"}))

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        self.loop.start()
        yield
        await self.loop.stop()

    async def _chat(self, http: Request) -> Response:
        body = await self.read(http, ChatRequest)
        self._check_model(body.model)
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        if body.tool_choice == "none":
            tools = []
        if tools and not self._tools.supported:
            raise ApiError(400, "this model's chat template has no tools", "unsupported", param="tools")
        grammar = None
        if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
            grammar = self._tool_grammar(body.tool_choice, tools)
        params = sampling_params(body, self.config, grammar)
        kwargs = body.chat_template_kwargs
        prompt = await self._read_chat(body.messages, dict(kwargs or {}), tools)
        reply = ChatFormat(self.config.name, self._texts, self._tools.parser if tools else PlainParser)
        return await self._answer(http, body, [prompt], params, reply)

    def _tool_grammar(self, choice: str | NamedTool, tools: Sequence[dict[str, Any]]) -> str:
        """The grammar that forces a call of the chosen tool, or of any. Raises `ApiError`."""
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
        grammar = self._tools.call_grammar(tools)
        if not tools or grammar is None:
            problem = "this model's format of tool calls is unknown" if tools else "no such tool in tools"
            raise ApiError(400, problem, "unsupported", param="tool_choice")
        return grammar

    async def _read_chat(
        self, messages: Sequence[ChatMessage], variables: dict[str, Any], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation in the chat template. Raises `ApiError`."""
        if taken := next((name for name in RESERVED if name in variables), None):
            raise ApiError(400, f"{taken} cannot be set here", "invalid_value", param="chat_template_kwargs")
        if tools:
            variables["tools"] = list(tools)

        def work() -> list[int]:
            return self._prompts.encode_chat([message.for_template() for message in messages], variables)

        return await self._prompts.run(sum(message.size for message in messages), work)

    async def _complete(self, http: Request) -> Response:
        body = await self.read(http, CompletionRequest)
        self._check_model(body.model)
        params = sampling_params(body, self.config)
        prompts = _prompts(body.prompt)
        if not 0 < len(prompts) <= self.config.max_prompts:
            message = f"give between 1 and {self.config.max_prompts} prompts"
            raise ApiError(400, message, "invalid_value", param="prompt")

        def work() -> tuple[list[list[int]], list[str]]:
            reader = self._prompts
            ids = [
                reader.encode(one) if isinstance(one, str) else reader.check_prompt(one) for one in prompts
            ]
            told = [one if isinstance(one, str) else reader.decode(one) for one in prompts if body.echo]
            return ids, told

        ids, told = await self._prompts.run(sum(map(len, prompts)), work)
        echoed = [text for text in told for _ in range(params.n)]
        reply = CompletionFormat(self.config.name, self._texts, echoed)
        return await self._answer(http, body, ids, params, reply)

    def _options(self, body: ChatRequest | CompletionRequest, account: Account | None) -> RequestOptions:
        """The request's options. Raises `ApiError` for what the server or the key does not allow."""
        apart = None if self.config.share_between_keys else account
        options = request_options(body, "" if apart is None else apart.key.name)
        if options.drafter not in (None, *self._drafters):
            choices = ", ".join(self._drafters)
            message = f"drafter {options.drafter!r} is not offered here; choose from {choices}"
            raise ApiError(400, message, "invalid_value", param="speculation.drafter")
        least = self.config.min_priority if account is None else account.key.priority
        if body.priority is None:
            options = replace(options, priority=max(least, 0))
        _check_permissions(options, least, traces=account is None or account.key.trace)
        return replace(options, drafter=None) if options.drafter == self.model.drafter else options

    async def _answer(
        self,
        http: Request,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        reply: ReplyFormat,
    ) -> Response:
        """Submit a job, and reply with a stream of its updates or with the whole answers."""
        account: Account | None = http.state.account
        options = self._options(body, account)
        size = len(prompts) * params.n, sum(map(len, prompts))
        charge = Charge(None, *size) if account is None else account.admit(*size)
        drafter = options.drafter or self.model.drafter
        job = Job(prompts, params, options, drafter, self.config.timeout, charge)
        try:
            await while_connected(http.receive, self.loop.submit(job))
        except BaseException:
            charge.end(refund=True)  # unless the job has ended it
            raise
        if body.stream:
            chunks = self._chunks(job, reply, with_usage=body.wants_usage)
            return EventStream(chunks, lambda: self._settle(http, job))
        try:
            return JSONResponse(await while_connected(http.receive, _whole(job, reply)))
        finally:
            self._settle(http, job)

    def _settle(self, http: Request, job: Job) -> None:
        """End a job that has succeeded, failed or lost its client, and record its usage."""
        self.loop.cancel(job)
        counts = usage(job)
        names = ("prompt_tokens", "completion_tokens", "speculation")
        record: dict[str, Any] = http.state.record
        record |= {name: counts[name] for name in names}
        record["drafter"] = job.drafter

    async def _chunks(
        self, job: Job, reply: ReplyFormat, *, with_usage: bool
    ) -> AsyncIterator[dict[str, Any]]:
        for choice in reply.opening(job.size):
            yield reply.chunk([choice], None, with_usage=with_usage)
        async for update in job:
            for choice in reply.update(update):
                yield reply.chunk([choice], None, with_usage=with_usage)
        if with_usage:
            yield reply.chunk([], usage(job), with_usage=True)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, http: Request) -> Response:
        self._check_model(http.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.config.name,
            "object": "model",
            "created": self._started,
            "owned_by": "soothsay",
            "max_model_len": self.model.max_context,
            "drafters": list(self._drafters),
        }

    async def _tokenize(self, http: Request) -> Response:
        body = await self.read(http, TokenizeRequest)
        if body.model is not None:
            self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "invalid_value", param="prompt")
        if body.messages is not None:
            ids = await self._read_chat(body.messages, {})
        else:
            text = body.prompt or ""
            encode = partial(self._prompts.encode, text, special=body.add_special_tokens)
            ids = await self._prompts.run(len(text), encode)
        return JSONResponse({"count": len(ids), "max_model_len": self.model.max_context, "tokens": ids})

    async def _detokenize(self, http: Request) -> Response:
        body = await self.read(http, DetokenizeRequest)
        if body.model is not None:
            self._check_model(body.model)

        def work() -> str:
            self._prompts.check(body.tokens, "tokens")
            return self._prompts.decode(body.tokens, skip_special=False)

        text = await self._prompts.run(len(body.tokens), work)
        return JSONResponse({"prompt": text})

    async def _health(self, _: Request) -> Response:
        """The engine's state. A supervisor should restart a server whose engine has stopped."""
        loop = self.loop
        body = {"status": loop.state, "engine_pid": loop.engine_pid, "engine_restarts": loop.restarts}
        return JSONResponse(body, 200 if loop.state is EngineState.OK else 503)

    async def _ready(self, _: Request) -> Response:
        """Whether the server would take another request. A load balancer should use another one if not."""
        try:
            if self._keys is not None:
                self._keys.check()
        except KeyFileError:
            return JSONResponse({"status": "the server cannot read its API keys"}, 503)
        ready = self.loop.state is EngineState.OK and self.loop.in_flight < self.loop.max_in_flight
        return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse(describe(BODIES, ("/v1/models", "/health", "/ready", "/metrics")))

    def _check_model(self, name: str) -> None:
        if name != self.config.name:
            message = f"there is no model {name!r} here; the model is {self.config.name!r}"
            raise ApiError(404, message, "model_not_found", param="model")


async def _whole(job: Job, reply: ReplyFormat) -> dict[str, Any]:
    """Wait for all answers, and format them."""
    updates: list[list[AnswerUpdate]] = [[] for _ in job.answers]
    async for update in job:
        updates[update.index].append(update)
    choices = [reply.choice(index, answer.seed, updates[index]) for index, answer in enumerate(job.answers)]
    return reply.whole(choices, usage(job))


def _check_permissions(options: RequestOptions, least: int, *, traces: bool) -> None:
    """Raise `ApiError` if a priority is below the least, or a trace is asked for and not allowed."""
    if options.priority < least:
        message = f"priority must be at least {least} here; lower numbers are more urgent"
        raise ApiError(403, message, "not_allowed", param="priority")
    if options.traced and not traces:
        message = "this key may not ask for traces (soothsay keys add --trace)"
        raise ApiError(403, message, "not_allowed", param="speculation.trace")


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The list of prompts. A single prompt becomes a list of one."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(part, int) for part in prompt):
        return [[part for part in prompt if isinstance(part, int)]]
    return [part for part in prompt if not isinstance(part, int)]


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        raise ApiError(404, "this path does not exist", "not_found")
