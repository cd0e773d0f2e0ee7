from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest

from soothsay import LLM, SamplingParams
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter, Target


class Wrong(Drafter):
    """Drafts a token that the target hardly ever samples."""

    trained = True
    max_nodes = 2

    def __init__(self, target: Target):
        pass

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for tree in trees:
            tree.add(0, 3)
        return trees


class Untrained(Wrong):
    trained = False


def run(drafter: type[Drafter], tokens: int) -> None:
    llm = LLM("sibyl", drafter=drafter, max_context=256)
    llm.generate("Hello", SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))


def test_a_trained_drafter_that_is_never_right_is_named_once() -> None:
    with pytest.warns(UserWarning, match="Wrong guessed right in 0 of its first 100 steps") as caught:
        run(Wrong, 240)
    assert len(caught) == 1


@pytest.mark.parametrize(("drafter", "tokens"), [(Wrong, 90), (Untrained, 240)])
def test_no_warning_before_or_for_drafters_that_may_find_nothing(drafter: type[Drafter], tokens: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(drafter, tokens)
