"""Answers chats and completions. The routes of all APIs turn their bodies into these."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from soothsay.core.params import SamplingParams
from soothsay.errors import SoothsayError, did_you_mean
from soothsay.server.access.accounts import Account, Charge
from soothsay.server.engines.engine_messages import LoadedModel, RequestOptions
from soothsay.server.engines.grammar_checker import GrammarChecker
from soothsay.server.fleet.engine_loop import EngineLoop
from soothsay.server.fleet.jobs import Job
from soothsay.server.generation.reply_format import MakeParser, ReplyFormat, TokenTexts, usage
from soothsay.server.generation.request_bodies import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Speculation,
)
from soothsay.server.generation.request_parameters import (
    HEADER,
    MISSING,
    chosen_tools,
    ignored_fields,
    request_options,
    sampling_params,
)
from soothsay.server.generation.request_prompts import (
    Echo,
    PromptReader,
    check_totals,
    continued_text,
)
from soothsay.server.http.api_errors import ApiError, invalid, renamed, unsupported
from soothsay.server.http.api_route import ApiRoute
from soothsay.server.http.bodies import BodyReader
from soothsay.server.http.json_streams import EventStream, JsonReply, while_connected
from soothsay.server.server_config import ServerConfig
from soothsay.server.tools.reasoning import ReasoningFormat
from soothsay.server.tools.tool_calls import OneCall, PlainParser, ToolCallParser
from soothsay.server.tools.tool_format import ChatGrammars, ToolFormat

Body = TypeVar("Body", bound=BaseModel)

ChatReply = Callable[[MakeParser], ReplyFormat]
"""Makes the format of the reply to a chat, from what makes the parsers of its answers."""

CompletionReply = Callable[[Sequence[Echo]], ReplyFormat]
"""Makes the format of the reply to a completion, from the prompts that the answers begin with (`echo`)."""


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """What the body of a request asks for. It is small; the body is dropped before the answers are made."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    options: RequestOptions
    reply: ReplyFormat
    stream: bool
    ignored: list[str]  # unknown fields


def without_folders(spec: str) -> str:
    """A drafter as clients may see it: the names of its files without their folders.

    Example:
        >>> without_folders("suffix | eagle3(model=/home/me/head)")
        'suffix | eagle3(model=head)'
    """
    return re.sub(r"[^\s=(,|>+]*[\\/]", "", spec)


class Service:
    """Answers chats and completions over HTTP. All methods raise `ApiError`.

    Args:
        loop: passes jobs to the engines.
        model: what the engines have loaded.
        config: limits and names.
    """

    def __init__(self, loop: EngineLoop, model: LoadedModel, config: ServerConfig):
        self.loop, self.model, self.config = loop, model, config
        specs = model.drafter, "none", *config.drafters
        self.drafters = {without_folders(spec): spec for spec in specs}  # by the names that clients know
        self.tools = ToolFormat.of(model.tokenizer)
        self.reasoning = ReasoningFormat.of(model.tokenizer)
        self.texts = TokenTexts(model.tokenizer)
        self.prompts = PromptReader(model)
        self.bodies = BodyReader(config.max_bodies)
        self.missing = dict(MISSING)
        """Fields that are refused, and what to do instead. Another API may know more."""
        tokenizer, vocab_size = model.tokenizer, model.vocab_size
        if taken := {*model.adapters} & {*config.names}:
            raise SoothsayError(f"{min(taken)!r} is the model's own name; give the adapter another one")
        self._grammars = None if tokenizer is None else GrammarChecker(tokenizer, vocab_size)

    def post(
        self,
        path: str,
        body: type[Body],
        ask: Callable[[Request, Body], ReplyPlan | Response],
        *,
        names: Mapping[str, str] | None = None,
        answers: bool = True,
    ) -> ApiRoute:
        """A route that reads a body, and answers what it asks for.

        Args:
            path: of the route.
            body: its class.
            ask: does what takes a time that grows with the body, in a thread. See `BodyReader.read`.
            names: the API's names of the fields of chats and completions, for errors.
            answers: see `ApiRoute`.
        """

        def work(http: Request, given: Body) -> ReplyPlan | Response:
            with renamed(names or {}):
                return ask(http, given)

        async def serve(http: Request) -> Response:
            plan = await self.bodies.read(http, body, partial(work, http))
            if isinstance(plan, Response):
                return plan
            with renamed(names or {}):
                return await self._answer(http, plan)

        return ApiRoute(path, serve, body=body, answers=answers)

    async def stop(self) -> None:
        """End the processes that try grammars."""
        if self._grammars is not None:
            await self._grammars.stop()

    def check_model(self, name: str | None) -> None:
        """Refuse another model than the server's and its adapters. See `ServerConfig.serves`."""
        if self.adapter(name) is None and not self.config.serves(name):
            message = f"there is no model {name!r} here; the model is {self.config.name!r}"
            if self.model.adapters:
                message += f", with adapters {', '.join(self.model.adapters)}"
            raise ApiError(404, message, "model_not_found", param="model")

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request names as its model, as in vLLM; None: it names none."""
        short = (name or "").removesuffix(":latest")  # Ollama's clients add it
        return short if short in self.model.adapters else None

    def reply_name(self, name: str | None) -> str:
        """The model's name in replies to a request that names this one."""
        return self.adapter(name) or self.config.name

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may name as their model: the model's names, then its adapters."""
        return *self.config.names, *self.model.adapters

    def chat(self, http: Request, body: ChatRequest, reply: ChatReply) -> ReplyPlan:
        """What a conversation asks for. May take long."""
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
        if not self.config.split_reasoning or body.separate_reasoning is False:
            form = None
        if (tools and self.tools.hidden) or (form is not None and form.hidden):
            params = replace(params, skip_special_tokens=False)
        opened, single = form is not None and form.is_open(text, continued), body.parallel_tool_calls is False

        def parser() -> ToolCallParser:
            made = self.tools.parser(tools) if tools else PlainParser()
            made = OneCall(made) if single else made
            return made if form is None else form.wrapped(made, opened=opened)

        return self._plan(http, body, [ids], params, reply(parser))

    def read_chat(
        self, body: ChatRequest, tools: Sequence[dict[str, Any]] | None = None
    ) -> tuple[list[int], str]:
        """Token ids of a conversation in the chat template, and its text. May take long.

        `tools`: those that the model may call; None: as the body says.
        """
        return self.prompts.read_chat(body, chosen_tools(body)[0] if tools is None else tools)

    def complete(self, http: Request, body: CompletionRequest, reply: CompletionReply) -> ReplyPlan:
        """What a body with prompts asks for. May take long."""
        self.check_model(body.model)
        params = sampling_params(body, self.config, self.model.sampling_defaults)
        prompts = self.checked(_prompts(body.prompt))
        ids, echoed = self.prompts.read_completion(body, prompts)
        return self._plan(http, body, ids, params, reply(echoed))

    def checked(self, prompts: list[Any]) -> list[Any]:
        """Refuse more prompts than one request may have, or none. Returns the prompts."""
        if not 0 < len(prompts) <= self.config.max_prompts:
            raise invalid("prompt", f"give between 1 and {self.config.max_prompts} prompts")
        return prompts

    def _plan(
        self,
        http: Request,
        body: AnyRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        reply: ReplyFormat,
    ) -> ReplyPlan:
        """What is kept of a body. Refuses fields and options that it must not have."""
        check_totals(prompts, params)
        options = self._options(body, http.state.account)
        return ReplyPlan(
            prompts, params, options, reply, bool(body.stream), ignored_fields(body, self.missing)
        )

    def _options(self, body: GenerationRequest, account: Account | None) -> RequestOptions:
        """The request's options. Refuses what the server or the key does not allow."""
        apart = None if self.config.share_between_keys else account
        options = request_options(body, "" if apart is None else apart.key.sha256)
        options = replace(options, adapter=self.adapter(body.model))
        if options.drafter is not None:
            if options.drafter not in self.drafters:
                choices = ", ".join(self.drafters) + did_you_mean(options.drafter, self.drafters)
                message = f"drafter {options.drafter!r} is not offered here; choose from {choices}"
                raise invalid("speculation.drafter", message)
            spec = self.drafters[options.drafter]
            options = replace(options, drafter=None if spec == self.model.drafter else spec)
        least = self.config.min_priority if account is None else account.key.priority
        if body.priority is None:
            options = replace(options, priority=max(least, 0))
        if options.priority < least:
            message = f"priority must be at least {least} here; lower numbers are more urgent"
            raise ApiError(403, message, "not_allowed", param="priority")
        if options.traced and account is not None and not account.key.trace:
            message = "this key may not ask for traces (soothsay keys add --trace)"
            raise ApiError(403, message, "not_allowed", param="speculation.trace")
        return options

    async def _answer(self, http: Request, plan: ReplyPlan) -> Response:
        """Submit a job, and reply with a stream of its updates or with the whole answers."""
        params, options, reply = plan.params, plan.options, plan.reply
        headers = {HEADER: ", ".join(plan.ignored)} if plan.ignored else {}
        http.state.record |= {"ignored_fields": plan.ignored} if plan.ignored else {}
        account: Account | None = http.state.account
        size = len(plan.prompts) * params.n, sum(map(len, plan.prompts))
        charge = Charge(None, *size) if account is None else account.admit(*size)
        drafter = options.drafter or self.model.drafter
        job = Job(plan.prompts, params, options, drafter, self.config.timeout, charge)
        try:
            await while_connected(http.receive, self._submit(job))
        except BaseException:
            charge.end(refund=True)  # unless the job has ended it
            raise
        if plan.stream:
            settle = partial(self._settle, http, job)
            return EventStream(reply.stream(job), settle, reply.framing, reply.failure, headers)
        try:
            whole = await while_connected(http.receive, reply.collect(job))
            return JsonReply(whole, headers)
        finally:
            self._settle(http, job)

    async def _submit(self, job: Job) -> None:
        """Try the job's grammar, and send it to the engine."""
        if job.params.grammar is not None and self._grammars is not None:
            await job.in_time(self._grammars.check(job.params.grammar, job.options.tenant))
        await self.loop.submit(job)

    def _settle(self, http: Request, job: Job) -> None:
        """End a job that has succeeded, failed or lost its client, and record its usage."""
        self.loop.cancel(job)
        counts = usage(job)
        names = ("prompt_tokens", "completion_tokens", "speculation")
        http.state.record |= {**{name: counts[name] for name in names}, "drafter": job.drafter}


def without_traces(chat: ChatRequest) -> ChatRequest:
    """A chat for an API whose streams have no traces. Raises `ApiError` if it asks for some."""
    if isinstance(chat.speculation, Speculation) and chat.speculation.trace:
        message = "traces are part of streams of chats only; use /v1/chat/completions"
        raise unsupported("speculation.trace", message)
    return chat


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Any]:
    """The list of prompts. A single prompt becomes a list of one."""
    is_single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    return [prompt] if is_single else [*prompt]
