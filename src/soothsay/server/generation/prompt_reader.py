"""Turns prompts into token ids, and refuses those that the context cannot hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soothsay.server.engines.engine_messages import LoadedModel
from soothsay.server.generation.text_bounds import TextBound
from soothsay.server.http.api_errors import ApiError, invalid, unsupported
from soothsay.tokenizer import NO_TOKENIZER, Message, Tokenizer

CUT = 4
"""How many times as long as the context a text may be of which a request wants only the end."""


class PromptReader:
    """Turns prompts into token ids for one model.

    Its methods may take long, so they run in a thread of `BodyReader`. They raise `ApiError`, which names the
    field.
    """

    def __init__(self, model: LoadedModel):
        self._model = model
        self._bound = None if model.tokenizer is None else TextBound(model.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._model.tokenizer is None:
            raise unsupported("prompt", f"{NO_TOKENIZER}. Give token ids")
        return self._model.tokenizer

    @property
    def has_no_tokenizer(self) -> bool:
        """Whether prompts can be token ids only."""
        return self._model.tokenizer is None

    def encode(
        self, text: str, *, special: bool = True, field: str = "prompt", cut: bool = False
    ) -> list[int]:
        """Token ids of a text.

        Args:
            text: a longer one than the context can hold is refused, if that is certain without its ids.
            special: adds the tokens that surround a text, such as a first one.
            field: names the text in errors.
            cut: whether only its last tokens are wanted. Then it may be up to `CUT` times as long.
        """
        tokenizer = self.tokenizer
        limit = self._model.max_context * (CUT if cut else 1)
        if self._bound is not None and self._bound.exceeds(text, limit):
            raise self.over_long(f"{len(text)} characters", field, limit)
        try:
            return tokenizer.encode(text, special=special)
        except Exception as error:  # the library raises plain Exception
            raise invalid(field, f"the tokenizer refused the text: {error}") from None

    def render(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        """A conversation in the model's chat template."""
        tokenizer = self.tokenizer
        try:
            return tokenizer.render(messages, **variables)
        except Exception as error:  # a template may raise anything
            raise invalid("messages", str(error) or type(error).__name__) from None

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids that were checked."""
        return self.tokenizer.decode(ids, skip_special=skip_special)

    def check(self, ids: Sequence[int], field: str) -> None:
        """Refuse token ids that the model does not have."""
        last = self._model.vocab_size - 1
        if ids and not 0 <= min(ids) <= max(ids) <= last:
            raise invalid(field, f"token ids of this model are 0 to {last}")

    def check_prompt(self, ids: list[int]) -> list[int]:
        """Refuse a prompt that has unknown token ids or more than the context holds. Returns the prompt."""
        if len(ids) >= self._model.max_context:
            raise self.over_long(f"{len(ids)} tokens", "prompt")
        self.check(ids, "prompt")
        return ids

    def over_long(self, size: str, field: str, limit: int | None = None) -> ApiError:
        """The error for a prompt of this size. `limit`: of tokens, if it is not that of the context."""
        context = self._model.max_context
        message = f"{field} has {size}, more than the context of {context} tokens can hold"
        if limit not in (None, context):
            message = f"{field} has {size}, more than {limit} tokens; cut it before you send it"
        return ApiError(400, message, "context_length_exceeded", param=field)
