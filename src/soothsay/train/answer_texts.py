"""The answers in training examples, as texts from which suffix matching drafts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from soothsay.core.arrays import IntArray
from soothsay.train.examples import Example

LEAD = 3
"""Tokens of the prompt that are kept before an answer, so that its first tokens can be drafted too."""


def answer_texts(examples: Iterable[Example], most: int) -> list[IntArray]:
    """The answers of some examples, each with the `LEAD` tokens before it.

    Args:
        examples: conversations with one or more answers, or plain texts.
        most: limit of tokens in all. Further examples are not read.

    Returns:
        `[n]` token ids of each answer, in order.
    """
    texts: list[IntArray] = []
    left = most
    for example in examples:
        edges = np.flatnonzero(np.diff(example.answer.astype(np.int8), prepend=0, append=0))  # [2 * answers]
        for begin, end in edges.reshape(-1, 2).tolist():
            text = example.tokens[max(begin - LEAD, 0) : end][:left]
            left -= len(text)
            texts.append(text)
            if not left:
                return texts
    return texts
