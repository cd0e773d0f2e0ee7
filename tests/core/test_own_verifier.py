"""A verifier that somebody writes in a file of their own: what works, and what they are told of mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from soothsay import (
    LLM,
    VERIFIERS,
    DraftTree,
    Guessing,
    Promise,
    RequestError,
    SamplingParams,
    StepError,
    Verdict,
    Verifier,
    VerifierError,
)
from soothsay.core.verify import named_verifier
from soothsay.model.transformer import Transformer

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
FILE = """
from soothsay import Guessing, Promise, Verdict, Verifier

def plain(tree, chance):
    return Verdict([], [chance.pick((yield [0]).p())])

drawn = Verifier(plain, Guessing.ONE_DRAW, Promise.LAW)
number = 3
"""


@pytest.fixture
def llm(tiny: Callable[..., Transformer]) -> Iterator[LLM]:
    llm = LLM(tiny(), drafter="suffix")
    yield llm
    assert not llm.engine.has_work


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = dict(VERIFIERS)
    yield
    for name in VERIFIERS.keys() - known.keys():
        del VERIFIERS[name]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def asks(verifier: str) -> SamplingParams:
    return SamplingParams(max_tokens=12, ignore_eos=True, seed=0, verifier=verifier)


def test_a_file_s_verifier_has_its_promise_and_a_function_has_none(llm: LLM, file: Path) -> None:
    drawn = named_verifier(f"{file}:drawn")
    assert (drawn.guessing, drawn.promise, drawn.lossless) == (Guessing.ONE_DRAW, Promise.LAW, True)
    plain = named_verifier(f"{file}:plain")
    assert (plain.guessing, plain.promise, plain.lossless) == (Guessing.LIKELIEST, Promise.NOTHING, False)
    assert named_verifier("match") is VERIFIERS["match"]
    for name in ("drawn", "plain"):
        result = llm.generate(PROMPT, asks(f"{file}:{name}"))
        assert len(result.token_ids) == 12
        assert (result.stats.accepted, result.stats.mean_accepted) == (0, 1.0)


def test_a_request_runs_no_file(file: Path) -> None:
    """What comes through a server makes `SamplingParams`, and nothing else."""
    with pytest.raises(RequestError, match="is not known; choose from match"):
        asks(f"{file}:drawn")
    assert not [name for name in VERIFIERS if ":" in name]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("nobody", "verifier 'nobody' is unknown; choose from match, rejection"),
        ("{file}:nobody", "mine.py has no function or Verifier 'nobody'; its verifiers are: drawn"),
        ("{file}:number", "mine.py has no function or Verifier 'number'"),
        ("no-such.py:x", "there is no file .*no-such.py, where a verifier should be"),
        ("{broken}:x", "broken.py, line 2: ZeroDivisionError: division by zero"),
    ],
)
def test_names_of_nothing(name: str, match: str, file: Path) -> None:
    broken = file.with_name("broken.py")
    broken.write_text("\n1 / 0\n")
    with pytest.raises(VerifierError, match=match):
        named_verifier(name.replace("{file}", str(file)).replace("{broken}", str(broken)))


def one(tree: DraftTree) -> Any:
    yield [0]


def no_generator(tree: DraftTree, chance: Any) -> Any:
    return Verdict([], [1])


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (one, r"verifier 'one' takes \(tree.*; it is called with a tree and a chance"),
        (no_generator, "verifier 'no_generator' is no generator: it must yield nodes, and return a Verdict"),
        (7, "a verifier is a function of a tree and a chance, not 7"),
    ],
)
def test_what_cannot_be_called_is_refused_early(function: Any, match: str) -> None:
    with pytest.raises(VerifierError, match=match):
        Verifier(function)


FOR_EVER = object()


def giving(yielded: Any, returned: Any) -> Callable[..., Any]:
    def mine(tree: DraftTree, chance: Any) -> Any:
        if yielded is not None:
            yield yielded
        while returned is FOR_EVER:
            yield [0]
        if isinstance(returned, Exception):
            raise returned
        return returned

    return mine


@pytest.mark.parametrize(
    ("yielded", "returned", "match"),
    [
        (3, None, "'mine' yielded 3; it must yield a list of nodes, 0 to"),
        ([99], None, r"'mine' yielded \[99\]; it must yield"),
        ([], None, r"'mine' yielded \[\]"),
        (None, Verdict([], [1]), "'mine' yielded None"),
        ([0], None, "'mine' returned None; it must return a Verdict"),
        ([0], ([], [1]), "'mine' returned a tuple; it must"),
        ([0], Verdict([99], [1, 1]), r"'mine' returned the path \[99\]; each node must be a child"),
        ([0], Verdict([2], [7, 1]), r"'mine' returned the path \[2\]; each node must be a child"),
        (
            [0],
            Verdict([1], [1]),
            r"'mine' returned the tokens \[1\]; they are those of its path and one more",
        ),
        ([0], Verdict([], []), r"'mine' returned the tokens \[\]"),
        ([0], Verdict([], [10**6]), "'mine' returned the token 1000000; this model has tokens 0 to 96"),
        ([0], Verdict([], [-1]), "'mine' returned the token -1"),
        ([0], Verdict([], [0.5]), "'mine' returned the token 0.5"),
        ([0], FOR_EVER, "'mine' has no verdict after [0-9]+ rounds; it must return a Verdict"),
        ([0], ZeroDivisionError("by hand"), "ZeroDivisionError: by hand"),
    ],
)
def test_what_is_no_verdict_ends_its_request_and_no_other(
    llm: LLM, yielded: Any, returned: Any, match: str
) -> None:
    VERIFIERS["mine"] = Verifier(giving(yielded, returned))
    with pytest.raises(StepError, match=match):
        llm.generate(PROMPT, asks("mine"))
    good, bad = llm.generate([PROMPT, PROMPT], [asks("match"), asks("mine")])
    assert (len(good.token_ids), bad.finish_reason) == (12, "error")
    assert good.token_ids == llm.generate(PROMPT, asks("match")).token_ids
