"""Prompts that let a model fill a gap in a text (fill in the middle, Bavarian et al. 2022, arXiv 2207.14255).

A model can do so if it was trained with tokens that mark what stands before the gap, after it, and the gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from soothsay.server.apis.llamacpp.llama_bodies import InfillRequest, Parts

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
        for names in FAMILIES:
            if all(name in vocabulary for name in names):
                prefix, suffix, middle = (vocabulary[name] for name in names)
                repository, file = (
                    next((vocabulary[name] for name in choices if name in vocabulary), None)
                    for choices in (REPOSITORY, FILE_MARK)
                )
                return cls(prefix, suffix, middle, repository, file)
        return None

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
