"""Turns prompts into token ids, and refuses those that the context cannot hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from soothsay.core.params import SamplingParams
from soothsay.server.engines.engine_messages import LoadedModel
from soothsay.server.generation.request_bodies import ChatRequest, CompletionRequest
from soothsay.server.generation.request_parameters import truncated
from soothsay.server.http.api_errors import ApiError, invalid, unsupported
from soothsay.server.http.bodies import Json
from soothsay.tokenizer import NO_TOKENIZER, Message, Tokenizer

RESERVED = ("messages", "self", "tools")
"""Variables of chat templates that `chat_template_kwargs` must not set."""

CUT = 4
"""How many times as long as the context a text may be of which a request wants only the end."""

PIECE = 1 << 13
"""Characters of a long text that are tokenized together to find out whether it has too many tokens."""

SHORT = 2
"""Characters for each token of a limit up to which a text is short: it is tokenized as a whole at once."""

MARGIN = 64
"""Tokens of a piece that do not count: its ends may be cut into other tokens than in the whole text."""

MAX_READ = 1 << 20
"""Limit of tokens of the prompts in one request, each counted for each of its answers, which hold a copy. A
single answer may have a longer one."""

MAX_SCORES = 1 << 20
"""Limit of log-probabilities of prompts in one reply, which repeats them for each answer. So many take up to
100 MB of text, and some seconds to write. It is enough for 20 alternatives to each of 49,000 tokens."""

BILLING = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)
"""A line in the system message of Claude Code. It has a hash of the request, so no two requests would share a
prefix that begins with it, and it tells the model nothing."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that a reply begins with. With log-probabilities, these list all of its tokens too."""

    text: str
    ids: list[int]


class PromptReader:
    """Turns prompts into token ids for one model.

    Its methods may take long, so they run in a thread of `BodyReader`. They raise `ApiError`, which names the
    field.
    """

    def __init__(self, model: LoadedModel):
        self._model, self.room = model, model.max_context

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._model.tokenizer is None:
            raise unsupported("prompt", f"{NO_TOKENIZER}. Give token ids")
        return self._model.tokenizer

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
        limit = self.room * (CUT if cut else 1)
        try:
            if not exceeds(tokenizer, text, limit):
                return tokenizer.encode(text, special=special)
        except Exception as error:  # the library raises plain Exception
            raise invalid(field, f"the tokenizer refused the text: {error}") from None
        raise self.over_long(f"{len(text)} characters", field, limit)

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
        if len(ids) >= self.room:
            raise self.over_long(f"{len(ids)} tokens", "prompt")
        self.check(ids, "prompt")
        return ids

    def over_long(self, size: str, field: str, limit: int | None = None) -> ApiError:
        """The error for a prompt of this size. `limit`: of tokens, if it is not that of the context."""
        message = f"{field} has {size}, more than the context of {self.room} tokens can hold"
        if limit not in (None, self.room):
            message = f"{field} has {size}, more than {limit} tokens; cut it before you send it"
        return ApiError(400, message, "context_length_exceeded", param=field)

    def read_chat(self, body: ChatRequest, tools: Sequence[Json]) -> tuple[list[int], str]:
        """Token ids of a conversation, and its text.

        Args:
            body: the conversation, and how to lay it out.
            tools: that the model may call.

        Raises `ApiError` if the model has no template, or the template refuses the messages.
        """
        given: Json = dict(body.chat_template_kwargs or {})
        if taken := next((name for name in RESERVED if name in given), None):
            raise invalid("chat_template_kwargs", f"{taken} cannot be set here")
        for name in ("reasoning_effort", "add_generation_prompt"):
            if getattr(body, name) is not None:
                given.setdefault(name, getattr(body, name))
        given |= {"tools": list(tools)} if tools else {}
        given["continue_final_message"] = body.continue_final_message
        messages = list(without_billing(message.for_template() for message in body.messages))
        try:
            text = self.render(messages, given)
        except ApiError:
            if (others := with_one_system(messages)) == messages:
                raise
            text = self.render(others, given)
        cut = body.truncate_prompt_tokens is not None
        ids = self.encode(text, special=bool(body.add_special_tokens), field="messages", cut=cut)
        return truncated(ids, body, self.room), text

    def read_completion(
        self, body: CompletionRequest, prompts: Sequence[str | list[int]]
    ) -> tuple[list[list[int]], list[Echo]]:
        """Token ids of prompts, and what each answer begins with: nothing, or its prompt."""
        special, cut = body.add_special_tokens is not False, body.truncate_prompt_tokens is not None
        ids, echoed = list[list[int]](), list[Echo]()
        for prompt in prompts:
            known = self.encode(prompt, special=special, cut=cut) if isinstance(prompt, str) else prompt
            ids.append(self.check_prompt(truncated(known, body, self.room)))
            if body.echo:
                whole = isinstance(prompt, str) and len(known) == len(ids[-1])
                text = str(prompt) if whole else self.decode(ids[-1])
                echoed += [Echo(text, ids[-1])] * (body.n or 1)
        return ids, echoed


def exceeds(tokenizer: Tokenizer, text: str, max_tokens: int) -> bool:
    """Whether a long text certainly has more tokens than a limit. It is tokenized only until it has.

    To tokenize a whole text takes up to 250 times its size in memory.
    """
    backend = tokenizer.backend
    if len(text) <= SHORT * max_tokens or backend.truncation is not None:
        return False
    added = backend.get_added_tokens_decoder().values()
    # such a token takes all white space beside it, also that of other pieces
    strips = any(token.lstrip or token.rstrip for token in added)
    count = 0
    for begin in range(0, len(text), PIECE):
        piece = text[begin : begin + PIECE]
        piece = piece.strip() if strips else piece
        count += max(len(tokenizer.encode(piece, special=False)) - MARGIN, 0)
        if count > max_tokens:
            return True
    return False


def continued_text(body: ChatRequest) -> str:
    """The text of the last message, if the answer continues it. Otherwise nothing."""
    return str(body.messages[-1].for_template()["content"]) if body.continue_final_message else ""


def check_totals(prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """Refuse prompts that cost too much together with the number of their answers. Raises `ApiError`."""
    num_tokens = params.n * sum(map(len, prompts))
    answers = f"n={params.n} answers to each of {len(prompts)} prompts"
    if num_tokens > MAX_READ and params.n * len(prompts) > 1:
        message = f"{answers} read {num_tokens} tokens together, and {MAX_READ} is the limit; ask for fewer"
        raise invalid("prompt", message)
    for_each = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
    if num_tokens * for_each > MAX_SCORES:
        message = (
            f"{answers} list {num_tokens * for_each} log-probabilities of prompts, {for_each} a token, and "
            f"{MAX_SCORES} is the limit of a reply; ask for fewer prompts, answers or alternatives"
        )
        raise invalid("prompt_logprobs", message)


def with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of which only the first may be of the system, as many templates ask.

    A later one continues the message of the system or of the user before it, or becomes one of the user,
    which the user's next message continues. Claude Code writes one after the user's first message.
    """
    kept = list[tuple[dict[str, Any], list[str]]]()
    follows = False  # whether the last message was of the system, and not the first
    for message in messages:
        is_late = message["role"] == "system" and bool(kept)
        into = {"system", "user"} if is_late else {"user"} if follows and message["role"] == "user" else ()
        if kept and kept[-1][0]["role"] in into:
            kept[-1][1].append(message["content"])
        else:
            kept.append(({**message, "role": "user"} if is_late else message, [message["content"]]))
        follows = is_late
    return [{**message, "content": "\n\n".join(texts)} for message, texts in kept]


def without_billing(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages without the lines that clients write for Anthropic's accounting. See `BILLING`."""
    for message in messages:
        content = BILLING.sub("", message["content"]) if message["role"] == "system" else message["content"]
        if content.strip() or content == message["content"]:
            yield {**message, "content": content}
