"""Log-probabilities of a prompt's tokens, as arrays. Without torch: the server's process holds them too."""

from collections.abc import Iterator, Sequence

import numpy as np

from soothsay.core.answer import TokenLogprobs
from soothsay.core.arrays import IdArray, IntArray, ScoreArray

PART = 64
"""Tokens whose `TokenLogprobs` are in memory at once while a reader iterates."""


class PromptScores:
    """The log-probabilities of a prompt's tokens from the second one on, and of the likeliest beside each.

    All answers to a prompt have the same ones, so they share this object: what one answer's request computes,
    the others need not compute. A number takes 4 bytes, a thirtieth of what it takes in a `TokenLogprobs`.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[IdArray, ScoreArray, IdArray, ScoreArray]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for part in self._parts:
            for begin in range(0, len(part[0]), PART):
                tokens, logprobs, top_ids, top = (one[begin : begin + PART].tolist() for one in part)
                for token, logprob, ids, values in zip(tokens, logprobs, top_ids, top, strict=True):
                    yield TokenLogprobs(token, logprob, dict(zip(ids, values, strict=True)))

    def append(
        self, tokens: Sequence[int], logprobs: ScoreArray, top_ids: IntArray, top_logprobs: ScoreArray
    ) -> None:
        """Add the next tokens.

        Args:
            tokens: n token ids.
            logprobs: `[n]`, theirs.
            top_ids: `[n, count]`, the likeliest tokens, likeliest first.
            top_logprobs: `[n, count]`, theirs.
        """
        ids = np.array(tokens, dtype=np.int32)
        self._parts.append((ids, logprobs, top_ids.astype(np.int32), top_logprobs))
        self._length += len(tokens)
