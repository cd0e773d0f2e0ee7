"""The bodies of llama.cpp's API, the completions that they ask for, and the prompts of gaps in a text.

A model can fill a gap (fill in the middle, Bavarian et al. 2022, arXiv 2207.14255) if it was trained with
tokens that mark what stands before the gap, after it, and the gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator

from soothsay.server.generation.request_bodies import (
    OUR_NAMES,
    UNLIMITED,
    CompletionRequest,
    GenerationRequest,
)
from soothsay.server.generation.request_parameters import nearest
from soothsay.server.http.api_errors import invalid, unsupported
from soothsay.server.http.bodies import Body, Items, Whole, make_body

Parts = list[int | str]
"""A prompt as token ids and texts, in order."""

RANDOM_SEED = 2**32 - 1
"""llama.cpp's number for a random seed."""

MAX_FIELDS_WANTED = 64
"""Limit of names in `response_fields`."""

FieldPath = Annotated[str, Field(max_length=256)]
"""A name in `response_fields`. A slash leads into a field."""

RENAMED = {ours: theirs for theirs, ours in OUR_NAMES.items()} | {"logprobs": "n_probs", "n": "n_cmpl"}
"""Fields of a completion, and what this API calls them."""


class LlamaPrompt(Body):
    """A prompt as an object. Images and sound are not supported."""

    prompt_string: str
    multimodal_data: list[Any] | None = None


class LlamaRequest(GenerationRequest):
    """The fields that completions and infills share. Other names and unknown fields are as in completions."""

    n_probs: Whole | None = None
    n_cmpl: Whole | None = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[Items[FieldPath], Field(max_length=MAX_FIELDS_WANTED)] | None = None
    cache_prompt: bool | None = None  # no effect: what is cached never changes an answer
    id_slot: Whole | None = None  # no effect: requests are not bound to slots

    @model_validator(mode="before")
    @classmethod
    def _count(cls, data: Any) -> Any:
        """`n` means the same as `n_cmpl`. If both are given, `n_cmpl` counts."""
        if isinstance(data, Mapping) and data.get("n_cmpl") is not None:
            return {**data, "n": data["n_cmpl"]}
        return data

    def completion(self, prompts: Sequence[list[int]]) -> CompletionRequest:
        """The completion that this request asks for, of prompts that were read. Raises `ApiError`."""
        if self.n_probs and self.post_sampling_probs:
            message = "post_sampling_probs is not supported: probabilities are those of the model itself"
            raise unsupported("post_sampling_probs", message)
        names = type(self).model_fields.keys() | CompletionRequest.model_fields.keys()
        theirs = names - GenerationRequest.model_fields.keys()
        given = self.model_dump(by_alias=True, exclude_unset=True, exclude=theirs)
        fields = {name: value for name, value in given.items() if name not in theirs}
        return make_body(
            CompletionRequest,
            {
                **nearest(fields),
                "prompt": list(prompts),
                "max_tokens": UNLIMITED if self.max_tokens is None else self.max_tokens,
                "seed": -1 if self.seed == RANDOM_SEED else self.seed,
                "logprobs": self.n_probs or None,
            },
        )


class LlamaCompletionRequest(LlamaRequest):
    """The body of llama.cpp's `POST /completion`: texts and token ids, mixed, one prompt or many."""

    prompt: str | LlamaPrompt | Items[int | str | LlamaPrompt | Items[int | str]]

    def prompts(self) -> list[Parts]:
        """The prompts. Raises `ApiError` for images and sound.

        A list with a token id in it is one prompt. Other lists have a prompt in each place.
        """
        given = self.prompt
        if not isinstance(given, list):
            return [_parts(given)]
        if any(isinstance(part, int) for part in given):
            single = [part for part in given if isinstance(part, int | str)]
            if len(single) < len(given):
                message = "prompt has token ids beside lists or objects; put the token ids into a list"
                raise invalid("prompt", message)
            return [single]
        return [_parts(one) for one in given if not isinstance(one, int)]


class ExtraFile(Body):
    """A file that stands before the gap."""

    filename: str = ""
    text: str


class InfillRequest(LlamaRequest):
    """The body of `POST /infill`: what stands before and after a gap in a text."""

    input_prefix: str
    input_suffix: str
    input_extra: Items[ExtraFile] | None = None
    prompt: str = ""


def _parts(prompt: str | LlamaPrompt | list[int | str]) -> Parts:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        return prompt
    if prompt.multimodal_data:
        raise unsupported("prompt.multimodal_data", "multimodal_data is not supported: this model reads text")
    return [prompt.prompt_string]


PROJECT = "project\n"
"""The name of the repository in prompts with further files. Requests do not have one."""

FILE = "file\n"
"""The name of the file with the gap in these prompts."""


@dataclass(frozen=True, slots=True)
class GapTokens:
    """Ids of the tokens that mark the parts of a text with a gap."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None  # before the name of a repository
    file: int | None = None  # before the name of a file

    @classmethod
    def of(cls, vocabulary: Mapping[str, int]) -> GapTokens | None:
        """The tokens of a vocabulary; None: it has none."""
        marks = next((names for names in FAMILIES if all(name in vocabulary for name in names)), None)
        if marks is None:
            return None
        known = [
            [vocabulary[name] for name in names if name in vocabulary] for names in (REPOSITORY, FILE_MARK)
        ]
        return cls(*(vocabulary[name] for name in marks), *(next(iter(ids), None) for ids in known))

    @property
    def ends(self) -> list[int]:
        """The tokens that end an answer: with them, the model begins another gap or file."""
        marks = (self.prefix, self.suffix, self.middle, self.repository, self.file)
        return [mark for mark in marks if mark is not None]

    def prompt(self, body: InfillRequest) -> Parts:
        """The prompt for a gap: the prefix comes before the suffix, and the answer after both.

        Further files come first. With tokens for repositories and files, they are laid out as Qwen2.5-Coder
        was trained on them (Hui et al. 2024, arXiv 2409.12186).
        """
        extra = body.input_extra or []
        before: Parts = [""]  # an empty text first adds the tokens that begin a text
        if extra and self.repository is not None and self.file is not None:
            before += [self.repository, PROJECT]
            for one in extra:
                before += [self.file, f"{one.filename}\n{one.text}\n"]
            before += [self.file, FILE]
        else:
            before += [f"{one.text}\n" for one in extra]
        gap: Parts = [self.prefix, body.input_prefix, self.suffix, body.input_suffix, self.middle]
        return [*before, *gap, body.prompt]


FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4
)
"""Tokens before the prefix, before the suffix, and before the text for the gap."""

REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
FILE_MARK = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
