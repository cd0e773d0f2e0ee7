"""Turns text and chats into token ids, and token ids back into text, whole or piece by piece."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from soothsay.chat_layout import ChatLayout, templates_in
from soothsay.chat_layout import Message as Message
from soothsay.errors import ModelError, RequestError, SoothsayError
from soothsay.files import read_json_object, user_path
from soothsay.vocabulary.directory import LOOKED_FOR, form_in, named_special, tokenizer_files

NO_TOKENIZER = f"this model has no tokenizer; files with one are {LOOKED_FOR}, or a GGUF file itself"
"""What is wrong where a model without a tokenizer is given text."""

MAX_TOKEN_ID = 2**24 - 1
"""Limit of token ids: tables have a row for each id."""

MAX_GROWTH = 64
"""How many times a normalizer or a decoder may make a text longer by replacing."""


class Tokenizer:
    """A model's tokenizer, with its chat template and its special tokens.

    Args:
        backend: encodes and decodes.
        chat_template: a Jinja template, or several by name (`TEMPLATE_NAMES`), which run in a sandbox; None:
            the model has none. One that cannot be compiled is left out, see `ChatLayout`.
        special: the text of special tokens by name, such as `eos_token`; variables of the template.

    Example:
        >>> ids = llm.tokenizer.encode("Once upon a time")
        >>> llm.tokenizer.decode(ids)
        'Once upon a time'
    """

    def __init__(
        self,
        backend: Backend,
        chat_template: str | Mapping[str, Any] | None = None,
        special: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        self.special = dict(special or {})
        named = {"default": chat_template} if isinstance(chat_template, str) else chat_template
        self.layout = ChatLayout(named or {}, self.special)
        self.lone_texts = {skip: cache(partial(self._lone_text, skip)) for skip in (False, True)}
        """The text of a token after any whole character, or None; by whether special tokens have no text."""
        self.templates = self.layout.sources
        """The sources of the chat templates by name."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the compiled templates; unpickling compiles them again."""
        return Tokenizer, (self.backend, self.templates, self.special)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of a model's directory.

        The tokenizer is a `tokenizer.json`, or one of the other forms in `vocabulary.directory.FORMS`. Its
        settings are in `tokenizer_config.json` and `special_tokens_map.json`. Chat templates are there too,
        or in `chat_template.jinja` and `additional_chat_templates/tool_use.jinja`, or in
        `chat_template.json`.

        Raises `ModelError` if there is no tokenizer, or a file cannot be read.
        """
        form = form_in(path)
        if form is None:
            there = ", ".join(tokenizer_files(path)) or "none of them"
            raise ModelError(
                f"{path} has no tokenizer that can be read: it needs {LOOKED_FOR}, and has {there}. Convert "
                "it once: transformers.AutoTokenizer.from_pretrained(path).save_pretrained(path). Or take "
                "these files away, and give token ids"
            )
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            settings |= read_json_object(path / name) if (path / name).is_file() else {}
        with backend_errors(
            lambda why: ModelError(
                f"{path / form.files[0]} cannot be read as a tokenizer ({why}); download it again"
            )
        ):
            backend, special = form.read(path, settings)
            _check(backend)
        return cls(backend, templates_in(path, settings), {**special, **named_special(settings)})

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def vocabulary(self) -> dict[str, int]:
        """The id of every token by its text, added tokens included."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens by their texts."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def fingerprint(self) -> bytes:
        """A hash of the vocabulary, tokens and ids, in 16 bytes.

        Without the names that GGUF files give to ids without a token, so that it is the same for all files of
        a model.
        """
        tokens = sorted(self.vocabulary().items(), key=lambda item: item[1])
        named = [(token, number) for token, number in tokens if token != f"[PAD{number}]"]
        text = "".join([f"{number} {len(token)} {token}\n" for token, number in named])
        return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template that can be used, so that `render` works."""
        return "default" in self.layout.compiled

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`. `special` adds the tokens that surround a text, such as a first one."""

        def refusal(why: str) -> RequestError:
            lone = any("\ud800" <= character <= "\udfff" for character in text)
            why = "it has half of a character, a lone surrogate" if lone else why
            return RequestError(f"the tokenizer cannot cut this text into tokens ({why})")

        with backend_errors(refusal):
            # unlike `encode`, it lets other threads run meanwhile
            (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=special)
            return list(encoded.ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def _lone_text(self, skip_special: bool, token: int) -> str | None:
        """The text that a token has after any whole character; None: it depends on its neighbours."""
        text = self.decode([token], skip_special=skip_special)
        return text if self._is_byte_level and "\ufffd" not in text else None

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether a text is that of the bytes of its tokens, one after the other."""
        decoder = self.backend.decoder
        return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"

    def hides(self, token: str) -> bool:
        """Whether this is a special token: a text has it only if it is decoded with `skip_special=False`."""
        number = self.backend.token_to_id(token)
        return number is not None and token not in self.decode([number])

    def end_ids(self, known: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end an answer: `known`, and the one that the chat template writes after an answer.

        Files of chat models often name the end of a text only, as the base model has it. Where the template
        writes a known end before the next message, it is the end of a turn, and nothing is missing.
        """
        last, between = (self.encode(text.strip(), special=False) for text in self.layout.after_answer())
        added = self.backend.get_added_tokens_decoder()
        if not last or last[:1] != between[:1] or last[0] not in added or {*known}.intersection(between):
            return known
        return *known, last[0]

    def render(
        self, messages: Sequence[Message], *, continue_final_message: bool = False, **variables: object
    ) -> str:
        """Lay `messages` out by the chat template, up to where the assistant's answer begins.

        As in transformers, a model's template `tool_use` lays out conversations with tools, `tools` and
        `documents` are None unless they are given, and thoughts of earlier answers have all their names.

        Args:
            messages: with `role` and `content`.
            continue_final_message: whether the text ends within the last message, which the answer continues.
            variables: of the template, such as `tools`, `enable_thinking=False` or
                `add_generation_prompt=False`.

        Raises `RequestError` if the model has no template, or the template refuses the messages, fails, or
        exceeds its limits with them; and if the last message cannot be continued.
        """
        return self.layout.render(messages, continue_final_message=continue_final_message, **variables)

    def encode_chat(
        self, messages: Sequence[Message], *, continue_final_message: bool = False, **variables: object
    ) -> list[int]:
        """Token ids of `render(messages)`. The template writes the special tokens, so none are added.

        Raises what `render` raises, and `RequestError` if the template writes nothing.
        """
        text = self.render(messages, continue_final_message=continue_final_message, **variables)
        if not (ids := self.encode(text, special=False)):
            raise RequestError("the chat template makes an empty prompt of these messages")
        return ids


def with_layout(
    tokenizer: Tokenizer | None, chat_template: str | os.PathLike[str] | None
) -> Tokenizer | None:
    """A model's tokenizer with the Jinja template of a file in place of its own ones. None: it has its own.

    Raises `ModelError` if there is no tokenizer, or the file is no template.
    """
    if chat_template is None:
        return tokenizer
    if tokenizer is None:
        raise ModelError(f"{NO_TOKENIZER}; so it cannot use a chat template")
    changed = Tokenizer(tokenizer.backend, {"default": user_path(chat_template)}, tokenizer.special)
    if not changed.has_chat_template:
        raise ModelError(f"{os.fspath(chat_template)}: {changed.layout.problem}")
    return changed


class Detokenizer:
    """Turns a growing list of tokens into text, piece by piece. A piece never changes later.

    A token may be a part of a character, and a decoder may treat the first word of a text differently. So a
    window is decoded that begins a few tokens before the new ones. Text is returned only if its last
    character is complete. After a complete character, a byte-level token of whole characters has the same
    text anywhere, which is remembered.

    Args:
        tokenizer: decodes.
        context: the tokens before the text, such as the prompt.
        skip_special: whether special tokens have no text.
    """

    REPLACEMENT = "\ufffd"
    CONTEXT, WINDOW = 8, 16  # tokens with which a window begins, and after which it moves

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special: bool = True):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self.ids = list(context)[-self.CONTEXT :]
        self.start = 0  # the window's first token
        self.read = len(self.ids)  # the text of tokens before this one has been returned
        self._before: str | None = None  # text of the window up to `read`; None: it has moved
        self._is_whole = False  # whether the last character before new tokens is known to be complete

    def push_each(self, ids: Sequence[int], *, final: bool = False) -> list[str]:
        """What `push` returns for each of `ids`, one after the other. `final` is about the last one."""
        if self._is_whole:
            texts = [*map(self.tokenizer.lone_texts[self.skip_special], ids)]
            if None not in texts:
                self.ids += ids
                self.read, self._before = len(self.ids), None
                self.start = max(self.start, self.read - self.CONTEXT)
                return texts  # type: ignore[return-value]
        if len(ids) == 1:
            return [self.push(ids, final=final)]
        last = len(ids) - 1
        return [self.push_each((token,), final=final and i == last)[0] for i, token in enumerate(ids)]

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Append `ids` and return the text that is now complete; with `final`, all that is left."""
        self.ids.extend(ids)
        if self._before is None:
            self._before = self._decode(self.read)
        before, after = self._before, self._decode(len(self.ids))
        self._is_whole = not after.endswith(self.REPLACEMENT) and len(after) >= len(before)
        if len(after) < len(before) or not (self._is_whole or final):
            return ""
        last, self.read, self._before = self.read, len(self.ids), after
        if self.read - self.start > self.WINDOW:
            self.start, self._before = max(self.start, last - self.CONTEXT), None
        return after[len(before) :]

    def _decode(self, end: int) -> str:
        """The text of the window's tokens before `end`."""
        return self.tokenizer.decode(self.ids[self.start : end], skip_special=self.skip_special)


@contextmanager
def backend_errors(say: Callable[[str], SoothsayError]) -> Iterator[None]:
    """Turn errors of the tokenizers library into what `say` makes of their text.

    The library raises plain `Exception`. Where its own code fails on damaged files, it raises a panic, which
    is a `BaseException` and would end a server.
    """
    try:
        yield
    except SoothsayError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise say(str(error).strip()[:300]) from error


def _check(backend: Backend) -> None:
    """Raise `ValueError` for a tokenizer that would take too much memory."""
    backend.no_truncation()
    backend.no_padding()  # settings of whoever trained the tokenizer: they cut or lengthen prompts
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > MAX_TOKEN_ID:
        raise ValueError(f"token id {largest:,} is above {MAX_TOKEN_ID:,}")
    for part in (backend.normalizer, backend.decoder):
        growth = 1 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > MAX_GROWTH:
            raise ValueError(f"its rules make a text more than {MAX_GROWTH} times as long")
    backend.decode(backend.encode("a b").ids)  # some damage shows only here


def _growth(rules: Any) -> int:
    """How many times longer a text gets by rules that replace parts of it, applied one after the other."""
    inside = rules.values() if isinstance(rules, dict) else rules if isinstance(rules, list) else ()
    growth = 1
    for rule in inside:
        growth = min(growth * _growth(rule), 2**62)
    content = rules.get("content") if isinstance(rules, dict) else None
    return growth * max(len(content), 1) if isinstance(content, str) else growth
