"""Checks prompts and parameters as callers of `LLM` give them, and builds the engine's requests from them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.bad_sequences import BadSequences
from soothsay.core.constraint import Constraint, Grammars
from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.core.sampling import derive_seed
from soothsay.core.scores import PromptScores
from soothsay.core.tenant import EVERYBODY, Tenant
from soothsay.drafters.base import Drafter
from soothsay.errors import RequestError, shown, type_of
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.tokenizer import NO_TOKENIZER, Tokenizer

Prompt = str | Sequence[int] | np.ndarray[Any, np.dtype[Any]] | Tensor
"""Text, or token ids: a sequence or an array with one dimension."""

EXPECTED = "give text, or a sequence of token ids (integers)"
MESSAGES = "messages are no prompt: call llm.chat, or give llm.chat_prompt(messages)"


def listed(prompts: object) -> tuple[list[Any], bool]:
    """The prompts in a list, and whether they were one prompt.

    The prompts of a list are not checked. Raises `TypeError` for what is neither a prompt nor a collection.
    """
    if isinstance(prompts, str):
        return [prompts], True
    items = _items(prompts, f"{EXPECTED}, or a list of such prompts")
    return ([items], True) if items and all(map(_is_id, items)) else (items, False)


def token_ids(prompt: object) -> list[int]:
    """The token ids of a prompt that is not text. Raises `TypeError` if it has anything else."""
    ids = _items(prompt)
    for one in ids:
        if not _is_id(one):
            _check_is_no_message(one)
            raise TypeError(f"{shown(one, 40)} is not a token id: {EXPECTED}")
    return list(map(int, ids))


def for_each(values: Any, count: int, name: str) -> Sequence[Any]:
    """One value for each of `count` prompts. `values` is one for all prompts, or a list or tuple.

    Raises `RequestError` for a list of another length.
    """
    if not isinstance(values, list | tuple):
        return [values] * count
    if len(values) != count:
        many = "prompt" if count == 1 else "prompts"
        raise RequestError(f"{len(values)} {name} for {count} {many}: give one for all, or one for each")
    return values


def check_params(params: object) -> None:
    """Raise `TypeError` for parameters that are not `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        fields = "**params" if isinstance(params, Mapping) else "temperature=0"
        raise TypeError(f"params must not be {type_of(params)}: write SamplingParams({fields})")


def _items(given: object, expected: str = EXPECTED) -> list[Any]:
    """The items of an array or a collection that has an order. Raises `TypeError` for anything else."""
    if isinstance(given, np.ndarray | Tensor):
        given = given.tolist()
    if not isinstance(given, Iterable) or isinstance(
        given, str | bytes | bytearray | Mapping | set | frozenset
    ):
        _check_is_no_message(given)
        raise TypeError(f"a prompt must not be {type_of(given)}: {expected}")
    return list(given)


def _check_is_no_message(given: object) -> None:
    if isinstance(given, Mapping) and "role" in given:
        raise TypeError(MESSAGES)


def _is_id(item: object) -> bool:
    return type(item) is int or (isinstance(item, Integral) and not isinstance(item, bool))


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that can be answered."""

    ids: list[int]
    params: SamplingParams
    limit: int  # largest number of tokens of prompt and answer together
    num_source: int = 0  # the first tokens, which an encoder reads


class RequestBuilder:
    """Builds requests for one model and one engine.

    Args:
        model: what the model computes.
        config: the engine's numbers, with `max_context` and `kv_tokens` filled in.
        tokenizer: None: prompts must be token ids, and answers have no text.
        eos_ids: tokens that end an answer.
    """

    def __init__(
        self, model: ModelSpec, config: EngineConfig, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...]
    ):
        self.model, self.config, self.tokenizer, self.eos_ids = model, config, tokenizer, eos_ids
        self._grammars = None if tokenizer is None else Grammars(tokenizer, model.vocab_size)
        self._bad_sequences = lru_cache(1)(self._spelled)  # the prompts of a job come one after the other

    def check(self, prompt: Prompt, params: SamplingParams) -> CheckedPrompt:
        """Encode a prompt. Raises `RequestError` if it cannot be answered with these parameters.

        Raises `TypeError` if it is no prompt.
        """
        ids, num_source, begins = self._encode(prompt), 0, len(params.answer_start) > 0
        if (source := self.model.source) is not None:
            if params.prompt_logprobs is not None:
                raise RequestError("prompt_logprobs: an encoder reads the prompt, and gives no probabilities")
            begun = self._encode(params.answer_start, "answer_start") if begins else []
            ids, num_source = [*ids, *source.start, *begun], len(ids)
        elif begins:
            raise RequestError("answer_start is for encoder-decoders: end the prompt with it instead")
        limit = self._limit(ids, params, num_source)
        vocab_size = self.model.vocab_size
        params.check_tokens(vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and this model has none; use logit_bias")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise RequestError(
                    f"{name}={getattr(params, name)} is more than the {vocab_size} tokens of the vocabulary"
                )
        return CheckedPrompt(ids, params, limit, num_source)

    def build(
        self,
        checked: CheckedPrompt,
        drafter: Drafter,
        *,
        max_nodes: int | None = None,
        priority: int = 0,
        traced: bool = False,
        tenant: Tenant = EVERYBODY,
        adapter: str | None = None,
    ) -> list[Request]:
        """Build the `params.n` requests of a prompt. See `LLM.requests` for the arguments.

        Raises `RequestError` if the grammar of the parameters cannot be used.
        """
        params = checked.params
        seed = secrets.randbits(48) if params.seed is None else params.seed
        bad_sequences = self._bad_sequences(tuple(params.bad_words))
        scores = PromptScores()
        return [
            Request(
                checked.ids,
                params,
                seed=derive_seed(seed, index),
                limit=checked.limit,
                drafter=drafter,
                eos_ids=self.eos_ids,
                tokenizer=self.tokenizer,
                block_size=self.config.block_size,
                constraint=self.constraint(params, tenant),
                max_guesses=max_nodes,
                priority=priority,
                traced=traced,
                tenant=tenant,
                bad_sequences=bad_sequences,
                scores=scores,
                adapter=adapter,
                num_source=checked.num_source,
            )
            for index in range(params.n)
        ]

    def constraint(self, params: SamplingParams, tenant: Tenant = EVERYBODY) -> Constraint | None:
        """Compile the grammar of `params`, unless that was done for the tenant. None: there is no grammar.

        Each call returns a new object, to be used by one request.

        Raises `RequestError` if the grammar cannot be compiled, or an answer could not end.
        """
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("a grammar needs a tokenizer, and this model has none")
        if not params.stop_token_ids and (params.ignore_eos or not self.eos_ids):
            raise RequestError(
                "an answer under a grammar ends with an end token, and there is none: leave out ignore_eos, "
                "or give stop_token_ids"
            )
        return self._grammars.constraint(params.grammar, tenant)

    def _spelled(self, words: Sequence[str]) -> BadSequences | None:
        """How the tokenizer spells each text at the start of an answer, and after a space."""
        if self.tokenizer is None or not words:
            return None
        spellings = [f"{space}{word.lstrip()}" for word in words for space in ("", " ")]
        spelled = [tuple(self.tokenizer.encode(text, special=False)) for text in spellings]
        return BadSequences(ids for ids in spelled if ids)

    def _encode(self, prompt: Prompt, name: str = "the prompt") -> list[int]:
        """The token ids of a prompt, or of what else has this name: that gets no special tokens.

        Raises `RequestError` if it has none, or one that is unknown.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"{NO_TOKENIZER}. Give token ids instead of text")
            ids = self.tokenizer.encode(prompt, special=name == "the prompt")
        else:
            ids = token_ids(prompt)
        vocab_size = self.model.vocab_size
        if not ids:
            raise RequestError(f"{name} is empty; give at least one token")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise RequestError(f"{name} has token {bad}; this model has tokens 0 to {vocab_size - 1}")
        return ids

    def _limit(self, ids: Sequence[int], params: SamplingParams, num_source: int) -> int:
        """The largest number of tokens of prompt and answer together.

        Raises `RequestError` if the context has no room for an answer, or the KV pool none for `max_tokens`.
        """
        context, capacity = self.config.max_context or 0, self.config.kv_tokens or 0
        if num_source:
            context = self._fitting(context, num_source, len(ids) - num_source)
        if len(ids) >= context + (params.max_tokens == 0):
            raise RequestError(
                f"the prompt has {len(ids)} tokens, and the context of {context} must hold the answer too; "
                f"shorten it to {context - 1} tokens or fewer, or raise max_context (the model was made for "
                f"{self.model.max_positions})"
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

    def _fitting(self, context: int, source: int, target: int) -> int:
        """The context of a request with so many tokens of its source, and of what its target begins with.

        Raises `RequestError` if the model has no positions for them. Those of a target begin at 0.
        """
        places = self.model.embedding.positions
        if places is None:
            return context
        if source > places.count:
            raise RequestError(
                f"the prompt has {source} tokens, and the encoder has {places.count} positions; shorten it"
            )
        if target >= places.count:
            raise RequestError(
                f"the answer begins with {target} tokens, and the decoder has {places.count} positions; "
                "shorten answer_start"
            )
        return min(context, source + places.count)
