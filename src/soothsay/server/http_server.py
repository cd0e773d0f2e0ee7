"""The HTTP routes. A route checks a request, submits a job, and formats its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from soothsay import __version__
from soothsay.core.params import SamplingParams
from soothsay.heap import TIDY_INTERVAL, return_freed_memory
from soothsay.server.access.accounts import Account, Charge
from soothsay.server.access.api_keys import KeyRing
from soothsay.server.access.gate import Gate
from soothsay.server.apis.anthropic.anthropic_routes import ANTHROPIC_BODIES, anthropic_routes
from soothsay.server.apis.llamacpp.llama_routes import LLAMA_BODIES, SLOTS, llama_routes
from soothsay.server.apis.llamacpp.token_routes import token_routes
from soothsay.server.apis.ollama.ollama_routes import OLLAMA_BODIES, ollama_routes
from soothsay.server.apis.openai.model_routes import model_routes
from soothsay.server.apis.openai.openai_replies import ChatFormat, CompletionFormat
from soothsay.server.apis.openai.responses_routes import RESPONSES_BODIES, responses_routes
from soothsay.server.engines.grammar_checker import GrammarChecker
from soothsay.server.fleet.canary import Watch
from soothsay.server.fleet.engine_fleet import Fleet
from soothsay.server.fleet.engine_loop import EngineLoop
from soothsay.server.fleet.health_routes import health_routes
from soothsay.server.fleet.jobs import Job
from soothsay.server.fleet.replica_routes import REPLICAS, REPLICAS_BODIES, replica_routes
from soothsay.server.fleet.server_metrics import CONTENT_TYPE, Metrics
from soothsay.server.generation.prompt_ids import chat_ids, check_totals, completion_ids, continued_text
from soothsay.server.generation.prompt_reader import PromptReader
from soothsay.server.generation.reply_format import MakeParser, ReplyFormat, ReplyOptions, TokenTexts
from soothsay.server.generation.reply_reports import usage
from soothsay.server.generation.request_bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from soothsay.server.generation.request_parameters import (
    RequestOptions,
    chosen_tools,
    request_options,
    sampling_params,
)
from soothsay.server.generation.service import Asked, ChatReply, CompletionReply
from soothsay.server.generation.unknown_fields import HEADER, ignored_fields
from soothsay.server.http.api_errors import ApiError, invalid, unsupported
from soothsay.server.http.body_reader import BodyReader
from soothsay.server.http.json_streams import EventStream, JsonReply, while_connected
from soothsay.server.http.missing_routes import missing_routes, no_such_path
from soothsay.server.http.openapi import describe
from soothsay.server.server_config import ServerConfig
from soothsay.server.site.page_routes import page_routes
from soothsay.server.tools.chat_grammar import ChatGrammars
from soothsay.server.tools.reasoning import ReasoningFormat, Thoughts
from soothsay.server.tools.tool_calls import OneCall, PlainParser, ToolCallParser
from soothsay.server.tools.tool_format import ToolFormat

CHATS = ("/v1/chat/completions", "/chat/completions")
"""Paths of chats: OpenAI's, and the one that llama.cpp's server has too."""

BODIES: dict[str, type[BaseModel]] = {
    **dict.fromkeys(CHATS, ChatRequest),
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    **REPLICAS_BODIES,
    **RESPONSES_BODIES,
    **ANTHROPIC_BODIES,
    **OLLAMA_BODIES,
    **LLAMA_BODIES,
}
"""The class of the body of each path."""

GETS = ("/v1/models", "/api/tags", "/api/ps", "/health", "/ready", "/version", "/metrics", REPLICAS, SLOTS)
"""Paths without a body that `/openapi.json` describes."""

RESERVED = ("messages", "self", "tools")
"""Variables of chat templates that `chat_template_kwargs` must not set."""


class Server:
    """Serves one model over HTTP. `app` is the ASGI application.

    Args:
        fleet: the engines, with the model loaded. Nothing else may use them from now on. They end with the
            lifespan of `app`.
        config: limits and names.
        keys: the valid API keys; None: no key is needed.
    """

    def __init__(self, fleet: Fleet, config: ServerConfig, keys: KeyRing | None = None):
        self.fleet, self.model, self.config = fleet, fleet.model, config
        self.metrics = Metrics(config.name)
        self.metrics.describe(self.model.block_size, self.model.num_blocks)
        self.loop = EngineLoop(fleet, self.metrics, config)
        self.watch = Watch(self.loop, fleet, config)
        self._drafters = tuple(dict.fromkeys((self.model.drafter, "none", *config.drafters)))
        self.tools = ToolFormat.of(self.model.tokenizer)
        self.reasoning = ReasoningFormat.of(self.model.tokenizer)
        self.texts = TokenTexts(self.model.tokenizer)
        bodies = BodyReader(config.max_bodies)
        self.read = bodies.read
        self.prompts = PromptReader(self.model)
        tokenizer, vocab_size = self.model.tokenizer, self.model.vocab_size
        self._grammars = None if tokenizer is None else GrammarChecker(tokenizer, vocab_size)
        pages = page_routes()
        routes = [
            *(Route(path, self._chat, methods=["POST"]) for path in CHATS),
            Route("/v1/completions", self._complete, methods=["POST"]),
            *replica_routes(fleet, bodies),
            *responses_routes(self),
            *anthropic_routes(self),
            *ollama_routes(self),
            *llama_routes(self, lambda: self.loop.in_flight),
            *missing_routes(),
            *model_routes(self, self._drafters),
            *token_routes(self),
            *(health := health_routes(fleet, self.watch, keys)),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
            *pages,
        ]
        router = Router(routes, redirect_slashes=False, default=no_such_path, lifespan=self.lifespan)
        paths = frozenset(route.path for route in routes)
        keyless = frozenset(route.path for route in (*health, *pages))
        self.app: ASGIApp = Gate(
            router, config, self.metrics, keys, paths, keyless, frozenset({"/metrics", REPLICAS, SLOTS})
        )

    @asynccontextmanager
    async def lifespan(self, _: object = None) -> AsyncIterator[None]:
        """Serve while the block runs. The engines end with it."""
        self.loop.start()
        tasks = asyncio.create_task(self.watch.run()), asyncio.create_task(_tidy())
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.loop.stop()
        if self._grammars is not None:
            await self._grammars.stop()

    async def _chat(self, http: Request) -> Response:
        def ask(body: ChatRequest) -> Asked:
            echoed = continued_text(body) if body.echo else ""
            texts = self._reply_texts(body)
            return self.chat(http, body, partial(ChatFormat, self.config.name, texts, echoed=echoed))

        return await self.answer(http, await self.read(http, ChatRequest, ask))

    def chat(self, http: Request, body: ChatRequest, reply: ChatReply) -> Asked:
        """What a conversation asks for. Raises `ApiError`."""
        self.check_model(body.model)
        tools, forced = chosen_tools(body)
        if tools and not self.tools.supported:
            raise unsupported("tools", "this model's chat template has no tools")
        params = sampling_params(body, self.config, self.model.sampling_defaults)
        ids, text = self.read_chat(body, tools)
        form, continued = self.reasoning, continued_text(body)
        grammars = ChatGrammars(self.tools, form, self.prompts.tokenizer.special_ids, text, continued)
        if forced:
            params = replace(params, grammar=grammars.forced_call(tools))
        elif params.grammar is not None:
            params = replace(params, grammar=grammars.answer(params.grammar, tools))
        parser: MakeParser = partial(self.tools.parser, tools) if tools else PlainParser
        if body.parallel_tool_calls is False:
            parser = partial(_one_call, parser)
        is_split = self.config.split_reasoning and body.separate_reasoning is not False
        if form is not None and is_split:
            parser = partial(_after_thoughts, parser, form, form.is_open(text, continued))
        if (tools and self.tools.hidden) or (form is not None and is_split and form.hidden):
            params = replace(params, skip_special_tokens=False)
        return self._asked(http, body, [ids], params, reply(parser))

    def read_chat(self, body: ChatRequest, tools: Sequence[dict[str, Any]]) -> tuple[list[int], str]:
        """Token ids of a conversation in the chat template, and its text. Raises `ApiError`."""
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if taken := next((name for name in RESERVED if name in variables), None):
            raise invalid("chat_template_kwargs", f"{taken} cannot be set here")
        if tools:
            variables["tools"] = list(tools)
        return chat_ids(self.prompts, body, variables, self.model.max_context)

    async def _complete(self, http: Request) -> Response:
        def ask(body: CompletionRequest) -> Asked:
            params = sampling_params(body, self.config, self.model.sampling_defaults)
            scored = body.echo is True and body.logprobs is not None
            reply = partial(CompletionFormat, self.config.name, self._reply_texts(body), scored=scored)
            return self.complete(http, body, params, reply)

        return await self.answer(http, await self.read(http, CompletionRequest, ask))

    def complete(
        self, http: Request, body: CompletionRequest, params: SamplingParams, reply: CompletionReply
    ) -> Asked:
        """What a body with prompts asks for, by parameters made of it. Raises `ApiError`."""
        self.check_model(body.model)
        prompts = _prompts(body.prompt)
        if not 0 < len(prompts) <= self.config.max_prompts:
            raise invalid("prompt", f"give between 1 and {self.config.max_prompts} prompts")
        ids, echoed = completion_ids(self.prompts, body, prompts, self.model.max_context)
        return self._asked(http, body, ids, params, reply(echoed))

    def _reply_texts(self, body: ChatRequest | CompletionRequest) -> TokenTexts:
        """The texts of tokens in a reply, or their ids if the request prefers these."""
        return TokenTexts(None) if body.return_tokens_as_token_ids else self.texts

    def _options(self, body: ChatRequest | CompletionRequest, account: Account | None) -> RequestOptions:
        """The request's options. Raises `ApiError` for what the server or the key does not allow."""
        apart = None if self.config.share_between_keys else account
        options = request_options(body, "" if apart is None else apart.key.sha256)
        if options.drafter not in (None, *self._drafters):
            choices = ", ".join(self._drafters)
            message = f"drafter {options.drafter!r} is not offered here; choose from {choices}"
            raise invalid("speculation.drafter", message)
        least = self.config.min_priority if account is None else account.key.priority
        if body.priority is None:
            options = replace(options, priority=max(least, 0))
        _check_permissions(options, least, traces=account is None or account.key.trace)
        return replace(options, drafter=None) if options.drafter == self.model.drafter else options

    def _asked(
        self,
        http: Request,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        reply: ReplyFormat,
    ) -> Asked:
        """What is kept of a body. Raises `ApiError` for fields and options that it must not have."""
        check_totals(prompts, params)
        options = self._options(body, http.state.account)
        return Asked(prompts, params, options, reply, ReplyOptions.of(body), ignored_fields(body))

    async def answer(self, http: Request, asked: Asked) -> Response:
        """Submit a job, and reply with a stream of its updates or with the whole answers."""
        prompts, params, options = asked.prompts, asked.params, asked.options
        headers = {HEADER: ", ".join(asked.ignored)} if asked.ignored else {}
        http.state.record |= {"ignored_fields": asked.ignored} if asked.ignored else {}
        account: Account | None = http.state.account
        size = len(prompts) * params.n, sum(map(len, prompts))
        charge = Charge(None, *size) if account is None else account.admit(*size)
        drafter = options.drafter or self.model.drafter
        job = Job(prompts, params, options, drafter, self.config.timeout, charge)
        try:
            await while_connected(http.receive, self._submit(job))
        except BaseException:
            charge.end(refund=True)  # unless the job has ended it
            raise
        reply = asked.reply
        if asked.reply_options.stream:
            chunks = reply.stream(job, asked.reply_options)
            stream = EventStream(chunks, lambda: self._settle(http, job), reply.framing, reply.failure)
            stream.headers.update(headers)
            return stream
        try:
            whole = await while_connected(http.receive, reply.collect(job, asked.reply_options))
            return JsonReply(whole, headers)
        finally:
            self._settle(http, job)

    async def _submit(self, job: Job) -> None:
        """Try the job's grammar, and send it to the engine. Raises `ApiError`."""
        if job.params.grammar is not None and self._grammars is not None:
            await job.in_time(self._grammars.check(job.params.grammar, job.options.tenant))
        await self.loop.submit(job)

    def _settle(self, http: Request, job: Job) -> None:
        """End a job that has succeeded, failed or lost its client, and record its usage."""
        self.loop.cancel(job)
        counts = usage(job)
        names = ("prompt_tokens", "completion_tokens", "speculation")
        record: dict[str, Any] = http.state.record
        record |= {name: counts[name] for name in names}
        record["drafter"] = job.drafter

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _openapi(self, _: Request) -> Response:
        return Response(self._description, media_type="application/json")

    @cached_property
    def _description(self) -> bytes:
        return bytes(JSONResponse(describe(BODIES, GETS)).body)

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` for another model than the server's. See `ServerConfig.serves`."""
        if not self.config.serves(name):
            message = f"there is no model {name!r} here; the model is {self.config.name!r}"
            raise ApiError(404, message, "model_not_found", param="model")


def _check_permissions(options: RequestOptions, least: int, *, traces: bool) -> None:
    """Raise `ApiError` if a priority is below the least, or a trace is asked for and not allowed."""
    if options.priority < least:
        message = f"priority must be at least {least} here; lower numbers are more urgent"
        raise ApiError(403, message, "not_allowed", param="priority")
    if options.traced and not traces:
        message = "this key may not ask for traces (soothsay keys add --trace)"
        raise ApiError(403, message, "not_allowed", param="speculation.trace")


def _after_thoughts(parser: MakeParser, form: Thoughts, opened: bool) -> ToolCallParser:
    return form.wrapped(parser(), opened=opened)


def _one_call(parser: Callable[[], ToolCallParser]) -> ToolCallParser:
    return OneCall(parser())


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The list of prompts. A single prompt becomes a list of one."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(part, int) for part in prompt):
        return [[part for part in prompt if isinstance(part, int)]]
    return [part for part in prompt if not isinstance(part, int)]


async def _tidy() -> None:
    """Return freed memory to the system, now and then, until cancelled."""
    while True:
        await asyncio.sleep(TIDY_INTERVAL)
        await asyncio.to_thread(return_freed_memory)
