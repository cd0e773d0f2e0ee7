"""`LLM`: what a user imports. Generate, chat, stream."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, overload

from soothsay.config import DType, EngineConfig
from soothsay.drafters import Drafter, DrafterSpec, build_drafter
from soothsay.engine.answer import FinishReason, SpeculationStats
from soothsay.engine.engine import Engine
from soothsay.engine.grammar import Constraint, Grammars
from soothsay.engine.params import SamplingParams
from soothsay.engine.request import Request
from soothsay.engine.sampling import derive_seed
from soothsay.errors import ModelError, RequestError
from soothsay.machine import available_memory
from soothsay.model.checkpoint import open_checkpoint
from soothsay.model.load import load_model
from soothsay.model.transformer import Transformer
from soothsay.result import Choice, Result, Stream
from soothsay.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """A model, ready to answer.

    Args:
        model: a Hugging Face directory, a `.gguf` file, a bundled model's name, a hub name, or a
            `Transformer`.
        drafter: who guesses, unless a request says otherwise: a name of the registry with options, such as
            `"suffix"` or `"draft-model(model=path)"`, several of them composed, or a drafter's class; "auto"
            takes whatever pays at each step, or nothing. Never changes what is said.
        dtype: of linear layers: `"auto"`, `"float32"`, `"bfloat16"`, `"int8"` or `"int4"`; see
            `soothsay.model.load.load_model`.
        tokenizer: in place of the one that comes with the model.
        device: where to run.
        config: the engine's numbers; single ones can be given as keywords, such as `max_context=4096`.

    Raises:
        ModelError: the model cannot be loaded.
        DrafterError: the drafter is unknown or does not fit.

    Example:
        >>> from soothsay import LLM, SamplingParams
        >>> llm = LLM("sibyl")
        >>> llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=5)).token_ids
        [17, 266, 5524, 17, 266]
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Transformer,
        *,
        drafter: DrafterSpec = "auto",
        dtype: DType = "auto",
        tokenizer: Tokenizer | None = None,
        device: str = "cpu",
        config: EngineConfig | None = None,
        **engine_options: Any,
    ):
        try:
            config = replace(config or EngineConfig(), **engine_options)
        except TypeError:
            known = EngineConfig.__dataclass_fields__
            unknown = next(name for name in engine_options if name not in known)
            raise TypeError(f"LLM has no option {unknown!r}; the engine's are {', '.join(known)}") from None
        self.eos_ids: tuple[int, ...] = ()
        path = None
        if isinstance(model, Transformer):
            self.model = model
        else:
            checkpoint = open_checkpoint(model)
            path = checkpoint.path
            tokenizer = tokenizer or checkpoint.tokenizer()
            self.eos_ids = checkpoint.eos_ids
            self.model = load_model(checkpoint, dtype, device)
        self.tokenizer = tokenizer
        self.config = _complete(config, self.model)
        self.engine = Engine(self.model, tokenizer, self.config, path)
        self._grammars = None if tokenizer is None else Grammars(tokenizer, self.model.config.vocab_size)
        self._drafters: dict[DrafterSpec, Drafter] = {}
        self.drafter = drafter
        self._drafter(drafter)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too; it means one prompt
        self,
        prompts: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        drafter: DrafterSpec | None = None,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: DrafterSpec | Sequence[DrafterSpec] | None = None,
    ) -> list[Result]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: DrafterSpec | Sequence[DrafterSpec] | None = None,
    ) -> Result | list[Result]:
        """Answer one prompt, or many together.

        Args:
            prompts: text or token ids, or a list of such.
            params: for all prompts, or one for each. Default: `SamplingParams()`.
            drafter: in place of the model's own, for all or for each.

        Returns:
            A `Result` for one prompt, a list of them for a list. In a list, a request that cannot be served
            has the finish reason "error" and says why; the others are not disturbed.

        Raises:
            RequestError: the one prompt cannot be served.
        """
        if _is_prompt(prompts):
            return self._collect(self._submit(prompts, params or SamplingParams(), drafter))  # type: ignore[arg-type]
        groups: list[tuple[list[int], list[Stream]] | RequestError] = []
        many = list(prompts)
        for i, prompt in enumerate(many):
            own_params = _pick(params, i, len(many), "params") or SamplingParams()
            try:
                groups.append(self._submit(prompt, own_params, _pick(drafter, i, len(many), "drafter")))  # type: ignore[arg-type]
            except RequestError as error:
                groups.append(error)
        return [
            _refusal(group) if isinstance(group, RequestError) else self._collect(group) for group in groups
        ]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        drafter: DrafterSpec | None = None,
    ) -> Result:
        """Answer a conversation: messages with `role` and `content`, laid out by the chat template."""
        return self.generate(self.chat_prompt(messages), params, drafter=drafter)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, drafter: DrafterSpec | None = None
    ) -> Stream:
        """Answer one prompt piece by piece. The same object serves `for` and `async for`."""
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(
                f"a stream has one answer; call stream {params.n} times, or generate with n={params.n}"
            )
        return self._submit(prompt, params, drafter)[1][0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give token ids to generate instead")
        return self.tokenizer.encode_chat(messages)

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        drafter: DrafterSpec | None = None,
        max_nodes: int | None = None,
        priority: int = 0,
        traced: bool = False,
    ) -> list[Request]:
        """Check a prompt and make its `n` requests, not yet in the line: for whoever runs `engine` himself.

        Args:
            prompt: text or token ids.
            params: how to sample.
            drafter: in place of the model's own.
            max_nodes: guesses that are verified in a step at most, the root not counted; 0 is plain decoding,
                None as many as drafter and engine allow.
            priority: requests with a lower one go first, as in vLLM; among equals, whoever came first.
            traced: whether the requests keep a `StepTrace` of each step in their `traces`.

        Raises:
            RequestError: it cannot be served.
            DrafterError: the drafter is unknown or does not fit.
        """
        ids = self._encode(prompt)
        limit = self._limit(ids, params)
        params.check_tokens(self.model.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this model has not; use stop_token_ids")
        if params.logprobs is not None and params.logprobs > self.model.config.vocab_size:
            raise RequestError(
                f"logprobs={params.logprobs} is more than the {self.model.config.vocab_size} tokens there are"
            )
        seed = secrets.randbits(48) if params.seed is None else params.seed
        if max_nodes is not None and max_nodes < 0:
            raise RequestError(f"max_nodes={max_nodes} is not possible: it must be at least 0, or None")
        own_drafter = self._drafter(self.drafter if drafter is None else drafter)
        if max_nodes == 0:  # nobody need guess
            own_drafter = self._drafter("none")
        return [
            Request(
                ids,
                params,
                seed=derive_seed(seed, index),
                limit=limit,
                drafter=own_drafter,
                eos_ids=self.eos_ids,
                tokenizer=self.tokenizer,
                block_size=self.config.block_size,
                constraint=self.constraint(params),
                max_guesses=max_nodes,
                priority=priority,
                traced=traced,
            )
            for index in range(params.n)
        ]

    def _submit(
        self, prompt: Prompt, params: SamplingParams, drafter: DrafterSpec | None
    ) -> tuple[list[int], list[Stream]]:
        """Check a prompt and put its `n` requests in the line."""
        requests = self.requests(prompt, params, drafter=drafter)
        for request in requests:
            self.engine.add(request)
        ids = requests[0].tokens[: requests[0].num_prompt].tolist()
        return ids, [Stream(self.engine, request) for request in requests]

    def _collect(self, submitted: tuple[list[int], list[Stream]]) -> Result:
        ids, streams = submitted
        try:
            return Result(ids, [stream.choice for stream in streams])
        except BaseException:  # an interrupt leaves no request behind
            for stream in streams:
                stream.cancel()
            raise

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer; give token ids instead of text")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = [int(token) for token in prompt]
        vocab_size = self.model.config.vocab_size
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise RequestError(f"the prompt has token {bad}; this model has tokens 0 to {vocab_size - 1}")
        return ids

    def _limit(self, ids: Sequence[int], params: SamplingParams) -> int:
        """Tokens of prompt and answer together, at most."""
        context, capacity = self.config.max_context or 0, self.config.kv_tokens or 0
        if len(ids) >= context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, and the context of {context} must hold the answer too; "
                f"shorten it to {context - 1} tokens or fewer, or raise max_context (the model was made for "
                f"{self.model.config.max_positions})"
            )
        limit = context if params.max_tokens is None else min(len(ids) + params.max_tokens, context)
        if limit > capacity:
            if params.max_tokens is None and len(ids) < capacity:
                return capacity
            raise RequestError(
                f"the prompt's {len(ids)} tokens and max_tokens={params.max_tokens} need room for {limit} "
                f"tokens; the KV pool has {capacity}. Lower max_tokens, or build the LLM with "
                f"kv_tokens={limit} or more"
            )
        return limit

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """What holds one answer to the grammar that `params` ask for, compiled if it is new.

        Raises `RequestError` if it cannot be compiled, or an answer could not end.
        """
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("a grammar needs a tokenizer, which this model has not")
        if not params.stop_token_ids and (params.ignore_eos or not self.eos_ids):
            raise RequestError(
                "an answer under a grammar ends with an end token, and there is none: leave out ignore_eos, "
                "or give stop_token_ids"
            )
        return self._grammars.constraint(params.grammar)

    def _drafter(self, spec: DrafterSpec) -> Drafter:
        if isinstance(spec, Drafter):
            return spec
        if spec not in self._drafters:
            self._drafters[spec] = build_drafter(spec, self.engine.target)
        return self._drafters[spec]


def _is_prompt(prompts: object) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    return all(isinstance(item, Integral) for item in prompts)


def _pick(values: Any, index: int, count: int, name: str) -> Any:
    """The value for one of many prompts: values may be one for all, or one for each."""
    if values is None or isinstance(values, (str, SamplingParams, Drafter)) or callable(values):
        return values
    if len(values) != count:
        raise RequestError(f"{len(values)} {name} for {count} prompts: give one for all, or one for each")
    return values[index]


def _refusal(error: RequestError) -> Result:
    return Result([], [Choice("", [], FinishReason.ERROR, SpeculationStats(), 0, error=str(error))])


def _complete(config: EngineConfig, model: Transformer) -> EngineConfig:
    """Fill in what derives from model and machine. Raises `ModelError` for numbers that cannot work."""
    for name in ("block_size", "max_requests", "max_rows", "max_tree"):
        if getattr(config, name) < 1:
            raise ModelError(f"{name}={getattr(config, name)} is not possible: it must be at least 1")
    if config.max_stall is not None and not config.max_stall > 0:
        raise ModelError(f"max_stall={config.max_stall} is not possible: it must be above 0 seconds, or None")
    context = config.max_context or model.config.max_positions
    if context < 2:
        raise ModelError(
            f"max_context={context} is not possible: a prompt and an answer need at least 2 tokens"
        )
    size = config.block_size
    wanted = config.kv_tokens
    if wanted is None:
        per_token = model.config.kv_bytes_per_token(model.dtype.itemsize)
        affordable = available_memory() // 4 // per_token
        if affordable < size:
            raise ModelError(
                f"no memory is left for the KV pool ({per_token} bytes a token); use a smaller model"
            )
        wanted = min(context * config.max_requests, affordable)
    blocks = -(-wanted // size) if config.kv_tokens is not None else max(wanted // size, 1)
    return replace(config, max_context=context, kv_tokens=blocks * size)
