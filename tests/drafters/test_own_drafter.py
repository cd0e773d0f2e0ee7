"""A drafter that somebody writes in a file of their own: what works, and what they are told of mistakes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from soothsay import (
    LLM,
    REGISTRY,
    Drafter,
    DrafterError,
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

    with pytest.raises(DrafterError, match=r"Nothing has no propose\(requests\), which"):
        llm.generate(PROMPT, GREEDY, drafter=Nothing)


def test_a_class_that_is_no_drafter(llm: LLM) -> None:
    class Stranger:
        pass

    with pytest.raises(DrafterError, match=r"Stranger is not a Drafter: inherit from soothsay\.Drafter$"):
        llm.generate(PROMPT, GREEDY, drafter=Stranger)  # type: ignore[arg-type]


def of(**members: Any) -> type[Drafter]:
    return type("Mine", (Repeats,), members)


def chain(*tokens: Any) -> Callable[[Drafter, Sequence[Request]], list[DraftTree]]:
    def propose(self: Drafter, requests: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for tree in trees:
            tree.add(0, *tokens)
        return trees

    return propose


def written(self: Drafter, requests: Sequence[Request]) -> list[DraftTree]:
    requests[0].tokens[0] = 9  # would change the target's prompt
    return chain(9)(self, requests)


@pytest.mark.parametrize(
    ("propose", "match"),
    [
        (lambda self, requests: None, "'Mine': propose gave None; .* a list of 1 DraftTree"),
        (lambda self, requests: [], "'Mine': propose gave 0 trees for 1 requests"),
        (lambda self, requests: [None], "'Mine': propose gave None in its list"),
        (lambda self, requests: [[5, 6]], "'Mine': propose gave a list in its list"),
        (chain(10**6), "'Mine': propose gave token 1000000; this model has tokens 0 to"),
        (chain(-1), "'Mine': propose gave token -1;"),
        (
            lambda self, requests: [DraftTree(9)],
            r"'Mine': propose gave a tree with the root 9; .* request.tokens\[-1\], which is 6 here",
        ),
        (written, "ValueError: assignment destination is read-only; drafter 'Mine' raised it"),
    ],
    ids=["None", "too few", "no tree", "a list", "too large", "negative", "another root", "tokens written"],
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


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"max_nodes": "3"}, "'Mine': max_nodes='3' must be an integer"),
        ({"max_nodes": 0}, "'Mine': max_nodes=0 must be an integer, at least 1 for the root"),
        ({"taps": 1}, "'Mine': taps=1 must be a tuple of layers of the target, 0 to 1, or 2 for the last"),
        ({"taps": (0, 3)}, r"'Mine': taps=\(0, 3\) must be a tuple of layers"),
        ({"taps": (-1,)}, r"'Mine': taps=\(-1,\) must be a tuple of layers"),
    ],
)
def test_members_that_the_engine_cannot_use(llm: LLM, members: dict[str, Any], match: str) -> None:
    with pytest.raises(DrafterError, match=match):
        llm.generate(PROMPT, GREEDY, drafter=of(**members))
    assert llm.generate(PROMPT, GREEDY, drafter=of(taps=(0, 2))).stats.drafted > 0


FILE = """
from dataclasses import dataclass

from beside import COUNT
from soothsay import Drafter, DraftTree


@dataclass
class Again(Drafter):
    target: object
    count: int = COUNT

    def __post_init__(self):
        self.max_nodes = 1 + self.count

    __hash__ = object.__hash__

    def propose(self, requests):
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for tree in trees:
            tree.extend(tree.tokens * self.count)
        return trees


def nothing(target):
    return None


class Stranger:
    pass


class Silent(Drafter):
    pass
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "beside.py").write_text("COUNT = 2\n")
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.setitem(sys.modules, "beside", sys)  # so that it is taken away afterwards
    del sys.modules["beside"]
    return tmp_path / "mine.py"


@pytest.mark.parametrize("spec", ["{}:Again", " {}:Again(count=3) > suffix", "suffix | {}:Again"])
def test_a_class_in_a_file(llm: LLM, mine: Path, spec: str) -> None:
    result = llm.generate(PROMPT, GREEDY, drafter=spec.format(mine))
    assert result.token_ids == llm.generate(PROMPT, GREEDY).token_ids
    assert result.stats.drafted > 0 or "|" in spec  # a controller goes by the clock
    drafter = llm._drafter(f"{mine}:Again")  # type: ignore[attr-defined]
    assert (drafter.name, drafter.count) == ("Again", 2)


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        ("mine.py:Agian", "mine.py has no class 'Agian'; its drafters are: Again, Silent"),
        ("mine.py:Stranger", r"mine.py:Stranger is not a Drafter: inherit from soothsay\.Drafter$"),
        ("mine.py:Silent > suffix", r"mine.py:Silent has no propose\(requests\)"),
        ("mine.py:nothing", "mine.py:nothing' gave None, which is no Drafter"),
        ("mine.py:Again(size=1)", "has no option 'size'; its options are count"),
        ("none.py:Again", "there is no file .*none.py, where a drafter should be"),
        ("broken.py:Again", "broken.py, line 2: ZeroDivisionError"),
        ("mine.py", "a class of your own is FILE.py:CLASS"),
    ],
)
def test_what_is_no_class_in_a_file(llm: LLM, mine: Path, wanted: str, match: str) -> None:
    (mine.parent / "broken.py").write_text("x = 1\nx / 0\n")
    with pytest.raises(DrafterError, match=match):
        llm.generate(PROMPT, GREEDY, drafter=f"{mine.parent}/{wanted}")
