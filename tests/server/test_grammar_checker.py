"""Whose grammars are tried when, and which results are kept. Most tests replace the trial itself."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Iterator

import pytest

from soothsay import LLM, Grammar
from soothsay.core import constraint as limits
from soothsay.core.constraint import Grammars
from soothsay.core.tenant import Tenant
from soothsay.server.engines import grammar_checker as module
from soothsay.server.engines import grammar_process
from soothsay.server.engines.grammar_checker import GrammarChecker
from soothsay.server.http.api_errors import ApiError

A, B = Tenant("a"), Tenant("b")


class Checker(GrammarChecker):
    """Trials that end when told to. `problems` has the results by source; None: the grammar is good."""

    def __init__(self) -> None:
        super().__init__(None, 0)  # type: ignore[arg-type]
        self.in_trial: dict[str, asyncio.Event] = {}
        self.tried: list[str] = []
        self.problems: dict[str, str | None] = {}

    async def _try(self, grammar: Grammar) -> str | None:
        event = self.in_trial[grammar.source] = asyncio.Event()
        self.tried.append(grammar.source)
        try:
            await event.wait()
        finally:
            del self.in_trial[grammar.source]
        return self.problems.get(grammar.source)

    async def finish(self, source: str) -> None:
        self.in_trial[source].set()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_key_has_one_grammar_in_trial_whatever_its_salts_are() -> None:
    async def run() -> None:
        checker = Checker()
        greedy = [
            asyncio.create_task(checker.check(Grammar(f"a{i}"), Tenant("a", f"salt{i}"))) for i in range(60)
        ]
        await settle()
        assert checker.tried == ["a0"]
        honest = asyncio.create_task(checker.check(Grammar("b0"), B))
        await settle()
        assert checker.tried == ["a0", "b0"]
        third = asyncio.create_task(checker.check(Grammar("c0"), Tenant("c")))
        await settle()
        await checker.finish("a0")
        assert checker.tried == ["a0", "b0", "c0"], "before the next one of a"
        for source in ("b0", "c0"):
            await checker.finish(source)
        await asyncio.gather(honest, third)
        for i in range(1, 60):
            await checker.finish(f"a{i}")
        await asyncio.gather(*greedy)
        assert not checker._turns
        assert not checker._waiting

    asyncio.run(asyncio.wait_for(run(), 10))


def test_the_line_of_a_key_is_bounded() -> None:
    async def run() -> None:
        checker = Checker()
        waiting = [
            asyncio.create_task(checker.check(Grammar(f"a{i}"), Tenant("a", str(i))))
            for i in range(module.MAX_WAITING)
        ]
        await settle()
        with pytest.raises(ApiError, match="try again later") as refused:
            await asyncio.wait_for(checker.check(Grammar("one more"), A), 1)
        assert refused.value.status == 429
        honest = asyncio.create_task(checker.check(Grammar("b"), B))
        await settle()
        await checker.finish("b")
        await honest
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not checker._waiting

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_result_is_of_one_tenant_and_small() -> None:
    async def run() -> None:
        checker, grammar = Checker(), Grammar("x" * 200_000)
        checker.problems[grammar.source] = "a problem " * 1000
        for tenant in (A, A, B, Tenant("a", "salt"), B):
            task = asyncio.create_task(checker.check(grammar, tenant))
            await settle()
            if grammar.source in checker.in_trial:
                await checker.finish(grammar.source)
            with pytest.raises(ApiError, match="a problem"):
                await task
        assert len(checker.tried) == 3
        assert len(str(checker._known)) < 3 * 1200

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_grammar_that_many_wait_for_is_tried_once() -> None:
    async def run() -> None:
        checker = Checker()
        tasks = [asyncio.create_task(checker.check(Grammar("same"), A)) for _ in range(3)]
        await settle()
        await checker.finish("same")
        assert checker.tried == ["same"]
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_salts_cannot_drop_the_results_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 8)

    async def run() -> None:
        checker = Checker()
        for number, tenant in enumerate([B, B, *(Tenant("a", str(i)) for i in range(20))]):
            task = asyncio.create_task(checker.check(Grammar(str(number)), tenant))
            await settle()
            await checker.finish(str(number))
            await task
        assert len(checker._known) == 8
        await asyncio.gather(checker.check(Grammar("0"), B), checker.check(Grammar("1"), B))
        await checker.check(Grammar("21"), Tenant("a", "19"))
        assert len(checker.tried) == 22

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes | BaseException]]:
    """The replies of the process, in order. An exception is raised instead, and must end the process."""
    replies: list[bytes | BaseException] = []
    failed, killed = list[object](), list[object]()

    class Process:
        returncode = -24

    async def ask(process: Process, message: bytes) -> bytes:
        reply = replies.pop(0)
        if isinstance(reply, BaseException):
            failed.append(process)
            raise reply
        return reply

    async def start(self: GrammarChecker) -> Process:
        return Process()

    async def kill(process: Process) -> None:
        killed.append(process)

    monkeypatch.setattr(module, "_ask", ask)
    monkeypatch.setattr(module, "_kill", kill)
    monkeypatch.setattr(GrammarChecker, "_start", start)
    yield replies
    assert killed == failed


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (TimeoutError(), 503),
        (asyncio.IncompleteReadError(b"", 4), 400),
        (json.dumps({"problem": "took too long", "lasts": False}).encode(), 400),
    ],
)
def test_what_a_busy_machine_may_be_to_blame_for_is_not_kept(
    reply: bytes | BaseException, status: int, busy: list[bytes | BaseException]
) -> None:
    async def run() -> None:
        checker = GrammarChecker(None, 0)  # type: ignore[arg-type]
        busy.extend([reply, json.dumps({"problem": None, "lasts": True}).encode()])
        with pytest.raises(ApiError) as refused:
            await checker.check(Grammar("good"), A)
        assert refused.value.status == status
        for _ in range(2):
            await checker.check(Grammar("good"), A)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_trial_that_is_given_up_ends_its_process(busy: list[bytes | BaseException]) -> None:
    async def run() -> None:
        busy.append(asyncio.CancelledError())
        with pytest.raises(asyncio.CancelledError):
            await GrammarChecker(None, 0).check(Grammar("slow"), A)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_problem_of_the_grammar_is_kept(busy: list[bytes | BaseException]) -> None:
    async def run() -> None:
        checker = GrammarChecker(None, 0)  # type: ignore[arg-type]
        busy.append(json.dumps({"problem": "unclosed group", "lasts": True}).encode())
        for _ in range(2):
            with pytest.raises(ApiError, match="unclosed group"):
                await checker.check(Grammar("bad"), A)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_each_grammar_has_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts the time of a whole process."""
    given: list[int] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits[0]))
    for spent in (0.5, 100.5):
        monkeypatch.setattr(time, "process_time", lambda spent=spent: spent)
        grammar_process._limit_time()
    assert given == [4, 104]


def test_limits_of_work_last_and_limits_of_time_do_not(sibyl: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sibyl.tokenizer is not None
    grammars = Grammars(sibyl.tokenizer, 8192)
    deep = Grammar.lark("start: s\ns: s s s | s s | /[a-z]/")
    assert grammar_process.try_grammar(grammars, deep) == {"problem": None, "lasts": True}
    monkeypatch.setattr(grammar_process, "COMPILE_SECONDS", -1.0)
    slow = grammar_process.try_grammar(grammars, deep)
    assert "to compile" in (slow["problem"] or "")
    assert not slow["lasts"]
    monkeypatch.undo()
    monkeypatch.setattr(limits, "MAX_ITEMS", 200)
    limited = grammar_process.try_grammar(grammars, deep)
    assert "too much work" in (limited["problem"] or "")
    assert limited["lasts"]


def test_each_part_of_a_joined_grammar_is_tried(sibyl: LLM) -> None:
    """A walk at random would not leave the text before a part."""
    assert sibyl.tokenizer is not None
    grammars = Grammars(sibyl.tokenizer, 8192)
    before = r"start: /[a-z]*/ @part"
    for part, problem in (
        (Grammar.choice(["yes"]), None),
        (Grammar.regex(r"[^\x00-\x{10FFFF}]"), "no answer can begin"),
        (Grammar.lark("start: nobody"), "cannot be compiled"),
    ):
        found = grammar_process.try_grammar(grammars, Grammar.joined(before, part=part))
        assert (found["problem"] is None) == (problem is None)
        assert (problem or "") in (found["problem"] or "")
