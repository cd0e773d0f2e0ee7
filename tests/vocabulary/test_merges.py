"""Merges of SentencePiece tokenizers, against all ways to cut each token."""

from __future__ import annotations

import random

import pytest

from soothsay.vocabulary.merges import Merges


def by_definition(tokens: list[str]) -> list[tuple[str, str]]:
    known = set(tokens)
    cuts = [(token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token))]
    return [(left, right) for left, right in cuts if left in known and right in known]


@pytest.mark.parametrize("alphabet", ["ab", "abcdefgh", "\u2581e\u0301漢🚀\0"])
@pytest.mark.parametrize("count", [1, 2, 30, 2000])
def test_all_cuts_into_tokens(alphabet: str, count: int) -> None:
    rng = random.Random(count)
    drawn = ("".join(rng.choices(alphabet, k=rng.randint(1, 12))) for _ in range(count))
    tokens = list(dict.fromkeys(drawn))
    rng.shuffle(tokens)
    expected = by_definition(tokens)
    assert count < 2000 or len(expected) > 100
    found = Merges(tokens)
    assert list(found) == expected
    assert [found[i] for i in range(len(found))] == expected


def test_no_tokens_and_no_merges() -> None:
    assert list(Merges([])) == []
    assert list(Merges(["a"])) == []
    assert list(Merges(["ab", "abc"])) == []


def test_long_tokens() -> None:
    tokens = ["a" * length for length in range(1, 1025)]
    found = Merges(tokens)
    assert len(found) == 1024 * 1023 // 2
    assert {(len(left) + len(right)) for left, right in found} == set(range(2, 1025))
    assert all(len(left) + len(right) <= 1024 for left, right in found)
