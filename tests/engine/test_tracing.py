"""Who guessed what: every token, every count and every node of a trace, against drafters that know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

import soothsay.core.answer as answer_module
import soothsay.engine.engine as engine_module
from soothsay import LLM, Drafter, DraftTree, Request, RequestError, SamplingParams
from soothsay.drafters.base import Target
from soothsay.drafters.control.compose import Cascade, Composite, Merged
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.registry import build_drafter
from soothsay.model.transformer import Transformer

PROMPT = [3, 1, 4, 1, 5]
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def wrong(answer: Sequence[int], number: int) -> int:
    """A token that does not come."""
    return sorted({*range(97)} - {*answer})[number]


class Knowing(Drafter):
    """Guesses the first `right` tokens of what is to come, and below the root one that does not come."""

    max_nodes = 16

    def __init__(self, name: str, answer: Sequence[int], right: int, log_prob: float = -0.1):
        self.name, self.answer, self.right, self.log_prob = name, answer, right, log_prob
        self.wrong = wrong(answer, len(name))

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = []
        for request in requests:
            tree, said = DraftTree(int(request.tokens[-1])), request.num_output
            tree.extend(self.answer[said : said + self.right], self.log_prob)
            tree.add(0, self.wrong, self.log_prob)
            trees.append(tree)
        return trees


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Transformer]) -> LLM:
    return LLM(tiny(3), drafter="none", prefix_caching=False)


@pytest.fixture(scope="module")
def answer(llm: LLM) -> list[int]:
    """Return the tokens of the model's answer."""
    return llm.generate(PROMPT, PARAMS).token_ids


def run(llm: LLM, drafter: Drafter, params: SamplingParams = PARAMS, **options: object) -> Request:
    (request,) = llm.requests(PROMPT, params, drafter=drafter, **options)  # type: ignore[arg-type]
    llm.engine.add(request)
    while request.finish_reason is None:
        llm.engine.step()
    return request


def by_depth(request: Request) -> dict[str, list[int]]:
    """Count from the traces what `accepted_by` must be. No draft token goes beyond the answer."""
    counts: dict[str, Counter[int]] = {}
    for trace in request.traces or ():
        for depth, node in enumerate(trace.path):
            counts.setdefault(str(trace.authors[node]), Counter())[depth] += 1
    return {name: [own[depth] for depth in range(max(own) + 1)] for name, own in counts.items()}


def check(request: Request, answer: Sequence[int]) -> None:
    """Assert what must hold for every trace."""
    said, stats = [], request.stats
    tokens = [*PROMPT, *answer]
    assert request.traces is not None
    assert len(request.traces) == stats.steps
    for trace in request.traces:
        assert trace.tokens[0] == tokens[len(PROMPT) + len(said) - 1], "the root is the last token"
        assert len(trace.tokens) == len(trace.parents) == len(trace.authors)
        assert [node for node, author in enumerate(trace.authors) if author is None] == [0]
        assert trace.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(trace.parents[1:], start=1))
        assert [trace.parents[node] for node in trace.path] == [0, *trace.path][: len(trace.path)]
        said += [trace.tokens[node] for node in trace.path] + [trace.bonus]
    assert said == list(answer) == [piece.token for piece in request.pieces]
    assert sum(len(trace.tokens) - 1 for trace in request.traces) == stats.drafted
    authors = [trace.authors[node] if node else None for trace in request.traces for node in (*trace.path, 0)]
    assert [piece.drafter for piece in request.pieces] == authors
    assert stats.accepted_by == by_depth(request)
    assert sum(map(sum, stats.accepted_by.values())) == stats.accepted
    assert (
        stats.accepted_at == [sum(column) for column in columns(stats.accepted_by)][: len(stats.accepted_at)]
    )


def columns(rows: dict[str, list[int]]) -> list[list[int]]:
    return [[row[i] if i < len(row) else 0 for row in rows.values()] for i in range(16)]


def test_a_guess_is_its_drafter_s_and_the_bonus_nobody_s(llm: LLM, answer: list[int]) -> None:
    request = run(llm, Knowing("a", answer, 2), traced=True)
    check(request, answer)
    assert [piece.drafter for piece in request.pieces][:6] == ["a", "a", None] * 2
    assert [piece.drafted for piece in request.pieces][:3] == [True, True, False]
    assert request.stats.accepted_by == {"a": [10, 10]}
    first = (request.traces or [])[0]
    assert (first.tokens, first.parents) == ([5, *answer[:2], wrong(answer, 1)], [-1, 0, 1, 0])
    assert (first.authors, first.path, first.bonus) == ([None, "a", "a", "a"], [1, 2], answer[2])
    assert first.scores == pytest.approx([0, -0.1, -0.2, -0.1])


def test_answers_have_their_traces(llm: LLM, answer: list[int]) -> None:
    drafter = Knowing("a", answer, 2)
    expected = list(run(llm, drafter, traced=True).traces or ())
    result = llm.generate(PROMPT, PARAMS, drafter=drafter, traced=True)
    assert result.traces == expected
    assert llm.stream(PROMPT, PARAMS, drafter=drafter, traced=True).result.traces == expected
    both = llm.generate([PROMPT, PROMPT], PARAMS, drafter=[drafter, "none"], traced=True)
    assert both[0].traces == expected
    assert [len(trace.tokens) for trace in both[1].traces or ()] == [1] * 30
    assert llm.generate(PROMPT, PARAMS, drafter=drafter).traces is None
    assert "StepTrace" not in repr(result)


def test_a_chat_has_its_traces(sibyl: LLM) -> None:
    result = sibyl.chat("Hello!", SamplingParams(temperature=0, max_tokens=4), traced=True)
    assert len(result.traces or ()) == result.stats.steps > 0


def test_nothing_is_traced_unless_it_is_asked_for(llm: LLM, answer: list[int]) -> None:
    request = run(llm, Knowing("a", answer, 2))
    assert request.traces is None
    assert request.stats.accepted_by == {"a": [10, 10]}
    assert [piece.drafter for piece in request.pieces][:3] == ["a", "a", None]


def test_an_answer_that_ends_within_a_step_counts_what_was_emitted(llm: LLM, answer: list[int]) -> None:
    end = next(i for i in range(4, 30) if answer[i] not in answer[:i] and i % 4 == 1)
    params = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[answer[end]])
    request = run(llm, Knowing("a", answer, 3), params, traced=True)
    assert [piece.token for piece in request.pieces] == answer[: end + 1]
    assert sum(piece.drafted for piece in request.pieces) == request.stats.accepted
    assert sum(request.stats.accepted_by["a"]) == request.stats.accepted
    assert len((request.traces or [])[-1].path) == 3, "the trace tells what was verified"


def test_parts_of_a_merger_have_what_they_guessed_first(llm: LLM, answer: list[int]) -> None:
    parts = [Knowing("a", answer, 1), Knowing("bb", answer, 3), Knowing("ccc", answer, 4)]
    request = run(llm, Merged(llm.engine.target, parts), traced=True)
    check(request, answer)
    assert [piece.drafter for piece in request.pieces][:5] == ["a", "bb", "bb", "ccc", None]
    assert request.stats.accepted_by == {"a": [6], "bb": [0, 6, 6], "ccc": [0, 0, 0, 6]}
    first = (request.traces or [])[0]
    authors = dict(zip(first.tokens, first.authors, strict=True))
    assert [authors[wrong(answer, number)] for number in (1, 2, 3)] == ["a", "bb", "ccc"]


def test_in_a_cascade_it_is_the_one_whose_tree_was_verified(llm: LLM, answer: list[int]) -> None:
    parts = [Knowing("a", answer, 1, -3.0), Knowing("bb", answer, 3)]
    request = run(llm, Cascade(llm.engine.target, parts), traced=True)
    check(request, answer)
    assert request.stats.accepted_by.keys() >= {"bb"}
    for trace in request.traces or ():
        assert len({*trace.authors[1:]}) == 1


def test_parts_that_are_composites_answer_with_theirs(llm: LLM, answer: list[int]) -> None:
    target = llm.engine.target
    inner = Merged(target, [Knowing("bb", answer, 2), Knowing("ccc", answer, 4)])
    request = run(llm, Merged(target, [Knowing("a", answer, 1), inner]), traced=True)
    check(request, answer)
    assert [piece.drafter for piece in request.pieces][:5] == ["a", "bb", "ccc", "ccc", None]
    first = (request.traces or [])[0]
    authors = dict(zip(first.tokens, first.authors, strict=True))
    assert [authors[wrong(answer, number)] for number in (1, 2, 3)] == ["a", "bb", "ccc"]


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_it_holds_for_a_tree_that_was_cut(nodes: int, llm: LLM, answer: list[int]) -> None:
    parts: list[Drafter] = [Knowing("a", answer, 1), Knowing("bb", answer, 3, -0.01)]
    request = run(llm, Merged(llm.engine.target, parts), max_nodes=nodes, traced=True)
    check(request, answer)
    assert max(len(trace.tokens) for trace in request.traces or ()) == 1 + nodes


@pytest.mark.parametrize("spec", ["suffix | mtp", "suffix > mtp", "mtp + suffix + recycling", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_names_are_those_of_the_specification(spec: str, temperature: float, sibyl: LLM) -> None:
    drafter = build_drafter(spec, sibyl.engine.target)
    assert isinstance(drafter, Composite)
    assert drafter.name == spec
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
    prompt = "one two three one two three one two three"
    requests = sibyl.requests(prompt, params, drafter=drafter, traced=True)
    for request in requests:
        sibyl.engine.add(request)
        while request.finish_reason is None:
            sibyl.engine.step()
        named = {author for trace in request.traces or () for author in trace.authors[1:]}
        assert named <= {part.name for part in drafter.parts} <= {"suffix", "mtp", "recycling"}
        assert request.stats.accepted_by == by_depth(request)
        assert sum(map(sum, request.stats.accepted_by.values())) == request.stats.accepted
        if not isinstance(drafter, Controller):  # it goes by the clock, and may find that nothing pays
            assert request.stats.accepted > 0


def test_nothing_is_guessed_where_no_node_is_allowed(llm: LLM, answer: list[int]) -> None:
    class Never(Drafter):
        max_nodes = 4

        def __init__(self, target: Target):
            self.target = target

        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            raise AssertionError("nobody need guess")

    request = run(llm, Never(llm.engine.target), max_nodes=0, traced=True)
    check(request, answer)
    assert request.stats.drafted == 0
    with pytest.raises(RequestError, match=r"max_nodes=-1 .* at least 0"):
        llm.requests(PROMPT, PARAMS, max_nodes=-1)


def test_steps_have_their_times_by_part(llm: LLM, answer: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only moves where the test says so."""
    clock = [0.0]
    monkeypatch.setattr(answer_module, "perf_counter", lambda: clock[0])

    def lasting(seconds: float, function: Callable[..., object]) -> Callable[..., object]:
        def slow(*given: object, **named: object) -> object:
            clock[0] += seconds
            return function(*given, **named)

        return slow

    drafter, scheduler = Knowing("a", answer, 2), llm.engine.scheduler
    places = [(drafter, "propose", 1.0), (drafter, "observe", 2.0), (llm.model, "run", 4.0)]
    places += [(engine_module, "verify", 8.0), (scheduler, "schedule", 16.0), (scheduler, "update", 32.0)]
    for owner, name, seconds in places:
        monkeypatch.setattr(owner, name, lasting(seconds, getattr(owner, name)))
    traces = run(llm, drafter, traced=True).traces or ()
    assert len(traces) == 10
    for trace in traces:
        assert trace.times == {"draft": 3.0, "pass": 4.0, "verify": 8.0, "host": 48.0}
    assert clock[0] == sum(sum(trace.times.values()) for trace in traces)
