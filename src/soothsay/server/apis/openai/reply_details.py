"""What replies have beyond OpenAI's if a request asks for it: token ids, and log-probabilities of prompts.

The fields are vLLM's. A chat has one prompt, so its fields are at the root of the reply. Those of completions
are in each choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from soothsay.core.answer import TokenLogprobs
from soothsay.server.engines.engine_messages import AnswerUpdate
from soothsay.server.generation.reply_format import ReplyOptions, TokenTexts
from soothsay.server.http.body_types import Json


class Details:
    """Adds these fields to the replies to one request.

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
            str(token): {
                "logprob": logprob,
                "rank": ranks.get(token),
                "decoded_token": self._texts(token),
            }
            for token, logprob in {one.token: one.logprob, **one.top}.items()
        }
