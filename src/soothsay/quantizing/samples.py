"""Samples of text: read from a file, or written by the model itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.params import SamplingParams
from soothsay.corpus import as_entry, has_lines, plain, read_items, read_text
from soothsay.errors import RequestError
from soothsay.llm import LLM
from soothsay.model.transformer import Transformer
from soothsay.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with the name of the current work, how much of it is done, and how much there is."""

AT_ONCE = 32
"""Samples that the model writes together."""


def read_samples(file: Path, tokenizer: Tokenizer | None, count: int, tokens: int) -> Tensor:
    """Read up to `count` samples of `tokens` tokens from a file.

    A file named `.jsonl` or `.json` has entries as `soothsay.corpus.as_entry` reads them. Any other file is
    one plain text. A name that ends in `.gz` says that the file is compressed. The texts are shuffled, joined
    and cut into samples.

    Returns:
        `[n, tokens]` int64.

    Raises:
        RequestError: a line cannot be used (the message has its number), the file has less than one sample,
            or there is no tokenizer.
    """
    if tokenizer is None:
        raise RequestError(f"{file} cannot be used: the model has no tokenizer")
    ids: list[int] = []
    for text in _texts(file, tokenizer):
        ids += text
        if len(ids) >= count * tokens:
            break
    whole = min(len(ids) // tokens, count)
    if not whole:
        raise RequestError(f"{file} has {len(ids)} tokens, less than one sample of {tokens}")
    return torch.tensor(ids[: whole * tokens]).view(whole, tokens)


def write_samples(
    model: Transformer, tokenizer: Tokenizer | None, count: int, tokens: int, progress: Progress
) -> Tensor:
    """Let the model write `count` samples of `tokens` tokens. Each call writes the same samples.

    A sample begins with a random token, in a user's message if there is a chat template. The model goes on at
    temperature 1. The text has the distribution that the model has learned, and no data is needed (LLM-QAT,
    Liu et al. 2023, arXiv 2305.17888).

    Returns:
        `[count, tokens]` int64.
    """
    config = EngineConfig(
        max_context=tokens, max_requests=AT_ONCE, kv_tokens=AT_ONCE * (tokens + 16), prefix_caching=False
    )
    llm = LLM(model, tokenizer=tokenizer, drafter="none", config=config)
    samples: list[list[int]] = []
    for first in range(0, count, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, count))
        prompts = [_opening(llm, seed)[: tokens - 1] for seed in seeds]
        streams = [
            llm.stream(prompt, SamplingParams(seed=seed, max_tokens=tokens - len(prompt)))
            for seed, prompt in zip(seeds, prompts, strict=True)
        ]
        for written, _ in enumerate(streams[0], 1):  # each step adds a token to every stream
            done = first * tokens + (len(prompts[0]) + written) * len(streams)
            progress("writing calibration text", done, count * tokens)
        samples += [
            [*prompt, *stream.choice.token_ids] for prompt, stream in zip(prompts, streams, strict=True)
        ]
    return torch.tensor(samples)


def _opening(llm: LLM, seed: int) -> list[int]:
    """The tokens that a sample begins with."""
    token = random.Random(seed).randrange(llm.model.config.vocab_size)
    if llm.tokenizer is None:
        return [token]
    word = llm.tokenizer.decode([token])
    if llm.tokenizer.has_chat_template:
        return llm.chat_prompt([{"role": "user", "content": word}])
    return llm.tokenizer.encode(word) or [token]


def _texts(file: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The token ids of each text."""
    if not has_lines(file):
        yield tokenizer.encode(read_text(file))
        return
    items = list(read_items(file))
    random.Random(0).shuffle(items)  # files are often sorted by source
    for where, item in items:
        try:
            yield _encode(item, tokenizer)
        except ValueError as error:
            raise RequestError(f"{where}: {error}") from None


def _encode(item: object, tokenizer: Tokenizer) -> list[int]:
    """The token ids of an entry. Raises `ValueError` if it is neither a conversation nor a text."""
    entry = as_entry(item)
    if isinstance(entry, str):
        return tokenizer.encode(entry)
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat(entry, add_generation_prompt=False)
    return tokenizer.encode(plain(entry))
