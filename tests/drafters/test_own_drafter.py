"""A drafter that somebody writes in a file of their own: what works, and what they are told of mistakes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from soothsay import (
    LLM,
    REGISTRY,
    Drafter,
    DraftTree,
    Request,
    SamplingParams,
    StepError,
    Target,
)
from soothsay.model.transformer import Transformer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0)
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]


class Repeats(Drafter):
    """Drafts the last token again."""

    max_nodes = 3

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for tree in trees:
            tree.extend([tree.tokens[0]] * 2)
        return trees


class Sized(Repeats):
    def __init__(self, target: Target, size: int = 2):
        super().__init__(target)
        self.max_nodes = size


@pytest.fixture
def llm(tiny: Callable[..., Transformer]) -> Iterator[LLM]:
    llm = LLM(tiny(), drafter="none")
    yield llm
    assert not llm.engine.has_work


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, drafter in (("repeats", Repeats), ("sized", Sized)):
        monkeypatch.setitem(REGISTRY, name, drafter)


def test_it_needs_no_constructor(llm: LLM) -> None:
    result = llm.generate(PROMPT, GREEDY, drafter=Repeats)
    assert result.token_ids == llm.generate(PROMPT, GREEDY).token_ids
    assert result.stats.drafted > 0
    assert llm._drafter(Repeats).target is llm.engine.target  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "spec", ["repeats", "sized(size=3)", "repeats > suffix", "sized + suffix", "repeats | ngram"]
)
def test_a_name_in_the_registry_composes(llm: LLM, spec: str) -> None:
    assert llm.generate(PROMPT, GREEDY, drafter=spec).token_ids == llm.generate(PROMPT, GREEDY).token_ids


def test_a_class_without_propose(llm: LLM) -> None:
    class Nothing(Drafter):
        pass

    with pytest.raises(TypeError, match=r"abstract method '?propose"):
        llm.generate(PROMPT, GREEDY, drafter=Nothing)


def of(**members: Any) -> type[Drafter]:
    return type("Mine", (Repeats,), members)


def chain(*tokens: Any) -> Callable[[Drafter, Sequence[Request]], list[DraftTree]]:
    def propose(self: Drafter, requests: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for tree in trees:
            tree.add(0, *tokens)
        return trees

    return propose


@pytest.mark.parametrize(
    ("propose", "match"),
    [
        (lambda self, requests: None, "'Mine': propose gave a NoneType; .* a list of 1 DraftTree"),
        (lambda self, requests: [], "'Mine': propose gave 0 trees for 1 requests"),
        (lambda self, requests: [None], "'Mine': propose gave a NoneType in its list"),
        (lambda self, requests: [[5, 6]], "'Mine': propose gave a list in its list"),
        (chain(10**6), "'Mine': propose gave token 1000000; this model has tokens 0 to"),
        (chain(-1), "'Mine': propose gave token -1;"),
    ],
    ids=["None", "too few", "no tree", "a list", "too large", "negative"],
)
def test_what_is_no_draft(llm: LLM, propose: Any, match: str) -> None:
    with pytest.raises(StepError, match=match):
        llm.generate(PROMPT, GREEDY, drafter=of(propose=propose))
    assert len(llm.generate(PROMPT, GREEDY).token_ids) == 12


def test_drafts_that_max_nodes_forbids(llm: LLM) -> None:
    with pytest.warns(
        UserWarning, match=r"'Mine' proposes 3 nodes, and its max_nodes=1 .* nothing is drafted"
    ):
        result = llm.generate(PROMPT, GREEDY, drafter=of(max_nodes=1))
    assert result.stats.drafted == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate(PROMPT, GREEDY, drafter=of(max_nodes=2))  # cut trees are no mistake
