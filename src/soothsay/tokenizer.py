"""Turns text and chats into token ids, and token ids back into text, whole or piece by piece."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from soothsay.errors import ModelError, RequestError

Message = Mapping[str, Any]


class Tokenizer:
    """A model's tokenizer, with its chat template and its special tokens.

    Args:
        backend: encodes and decodes.
        chat_template: a Jinja template; it runs in a sandbox. None: the model has none.
        special: the text of special tokens by name, such as `eos_token`; variables of the template.

    Raises `ModelError` if the template is not valid Jinja.
    """

    def __init__(
        self, backend: Backend, chat_template: str | None = None, special: Mapping[str, str] | None = None
    ):
        self.backend = backend
        self.chat_template = chat_template
        self.special = dict(special or {})
        self._template: jinja2.Template | None = None
        if chat_template is not None:
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
            )
            environment.filters["tojson"] = _to_json
            environment.globals["raise_exception"] = _raise_template_error
            try:
                self._template = environment.from_string(chat_template)
            except jinja2.TemplateError as error:
                raise ModelError(f"the chat template is not valid Jinja: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the compiled template; unpickling compiles it again."""
        return Tokenizer, (self.backend, self.chat_template, self.special)

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face directory.

        The files are `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`. Only the first is
        required.

        Raises `ModelError` if a file cannot be read, or `tokenizer.json` is missing.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{path} has no tokenizer.json. If it has a tokenizer.model only, convert it once: "
                "transformers.AutoTokenizer.from_pretrained(path).save_pretrained(path)"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file} cannot be read as a tokenizer ({error}); download it again") from error
        settings_file = path / "tokenizer_config.json"
        try:
            settings = json.loads(settings_file.read_text()) if settings_file.is_file() else {}
        except json.JSONDecodeError as error:
            raise ModelError(f"{settings_file} is not valid JSON ({error}); download it again") from error
        special = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in settings.items()
            if key.endswith("_token") and value is not None and not isinstance(value, bool)
        }
        template_file = path / "chat_template.jinja"
        template = template_file.read_text() if template_file.is_file() else settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return cls(backend, template, special)

    def __len__(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def vocabulary(self) -> dict[str, int]:
        """The id of every token by its text, added tokens included."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    @property
    def fingerprint(self) -> bytes:
        """A hash of the vocabulary, tokens and ids, in 16 bytes."""
        digest = blake2b(digest_size=16)
        for token, number in sorted(self.vocabulary().items(), key=lambda item: item[1]):
            digest.update(f"{number} {len(token)} {token}\n".encode(errors="surrogatepass"))
        return digest.digest()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, so that `render` works."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`. `special` adds the tokens that surround a text, such as a first one."""
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """Lay `messages` out by the chat template, up to where the assistant's answer begins.

        Args:
            messages: with `role` and `content`.
            variables: of the template, such as `add_generation_prompt=False`.

        Raises `RequestError` if the model has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template; give a plain text prompt instead of messages"
            )
        try:
            return self._template.render(
                messages=list(messages), **{"add_generation_prompt": True, **self.special, **variables}
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of `render(messages)`. The template writes the special tokens, so none are added."""
        return self.encode(self.render(messages, **variables), special=False)


class Detokenizer:
    """Turns a growing list of tokens into text, piece by piece. A piece never changes later.

    A token may be a part of a character, and a decoder may treat the first word of a text differently. So a
    window is decoded that begins a few tokens before the new ones. Text is returned only if its last
    character is complete.

    Args:
        tokenizer: decodes.
        context: the tokens before the text, such as the prompt.
        skip_special: whether special tokens have no text.
    """

    REPLACEMENT = "\ufffd"

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special: bool = True):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self.ids = list(context)[-8:]
        self.start = 0  # the window's first token
        self.read = len(self.ids)  # the text of tokens before this one has been returned

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """Append `ids` and return the text that is now complete; with `final`, all that is left."""
        self.ids.extend(ids)
        before = self.tokenizer.decode(self.ids[self.start : self.read], skip_special=self.skip_special)
        after = self.tokenizer.decode(self.ids[self.start :], skip_special=self.skip_special)
        if (after.endswith(self.REPLACEMENT) and not final) or len(after) < len(before):
            return ""
        self.start, self.read = max(self.start, self.read - 8), len(self.ids)
        return after[len(before) :]


def _to_json(value: Any, indent: int | None = None) -> str:
    """Replaces Jinja's `tojson`, which escapes characters for HTML. A prompt is not HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
