"""A job's way through engines: what the client hears, and the totals over all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from soothsay.core.answer import FinishReason, SpeculationStats, TokenLogprobs
from soothsay.core.params import SamplingParams
from soothsay.server.engines.engine_messages import AnswerUpdate, RequestOptions, Submit
from soothsay.server.fleet.jobs import Flight


def flight(n: int = 1, **params: Any) -> Flight:
    return Flight(Submit(7, [[1, 2]], SamplingParams(n=n, **{"seed": 0, **params}), RequestOptions()))


def said(
    tokens: list[int], before: int = 0, *, call: int = 7, end: bool = False, **more: Any
) -> AnswerUpdate:
    """What an engine says after `before` tokens. Each token is a character, and took a step."""
    stats = SpeculationStats()
    for _ in range(before + len(tokens)):
        stats.record(1, 0, [], 1)
    return replace(
        AnswerUpdate(
            job=call,
            index=0,
            text="".join(map(chr, tokens)),
            logprobs=None,
            traces=[],
            num_output=before + len(tokens),
            text_length=before + len(tokens),
            num_cached=0,
            num_preemptions=0,
            stats=stats,
            finish_reason=FinishReason.LENGTH if end else None,
            token_ids=tokens,
        ),
        **more,
    )


def test_the_client_hears_each_token_and_each_end_once() -> None:
    one = flight()
    one.board("a", 7)
    assert one.take("a", said([65, 66])) is not None
    one.board("b", -1)
    first = one.take("b", said([66, 67], 1, call=-1))
    assert first is not None
    assert (first.token_ids, first.text, first.num_output, first.job) == ([67], "C", 3, 7)
    assert one.take("b", said([65], call=-1)) is None, "it is behind"
    ended = one.take("a", said([67, 68], 2, end=True))
    assert ended is not None
    assert (ended.token_ids, ended.text) == ([68], "D")
    assert one.has_ended
    assert one.take("b", said([68], 3, call=-1, end=True)) is None


def test_an_end_without_a_new_token_is_told() -> None:
    one = flight()
    one.board("a", 7)
    one.take("a", said([65, 66]))
    one.board("b", -1)
    ended = one.take("b", said([], 2, call=-1, end=True))
    assert ended is not None
    assert ended.finish_reason is FinishReason.LENGTH
    assert one.has_ended


def test_totals_are_of_all_engines_and_the_prompt_is_told_once() -> None:
    """Three tokens, of which the second engine computed one, and had to read the others."""
    prompt = [TokenLogprobs(2, -1.0, {})]
    one = flight(prompt_logprobs=0)
    one.board("a", 7)
    one.take("a", said([65, 66], num_cached=1, num_preemptions=2, prompt_logprobs=prompt))
    one.lose("a")
    submit = one.board("b", -1)
    first = submit.emitted[0]
    assert ([*first.tokens], first.ended) == ([65, 66], False)
    told = one.take("b", said([67], 2, call=-1, num_cached=0, num_preemptions=1, prompt_logprobs=prompt))
    assert told is not None
    assert (told.num_cached, told.num_preemptions, told.prompt_logprobs) == (1, 3, None)
    assert told.stats.steps == 5, "an engine counts from its own begin"
    told = one.take("b", said([68], 3, call=-1, num_preemptions=1))
    assert told is not None
    assert (told.num_preemptions, told.stats.steps) == (3, 6)


def test_a_successor_takes_over_with_the_first_token_after_what_was_known_at_its_own_first() -> None:
    one = flight()
    one.board("a", 7)
    one.take("a", said([65, 66, 67]))
    one.board("b", -1)
    assert not one.may_take_over(said([66], 1, call=-1)), "from now on it must pass three"
    one.take("a", said([68, 69], 3))
    assert not one.may_take_over(said([67], 2, call=-1)), "the client has this one"
    assert one.may_take_over(said([68], 3, call=-1))
    one.leave("b")
    one.board("c", -2)
    assert not one.may_take_over(said([69], 4, call=-2)), "another successor has a goal of its own"
    assert one.may_take_over(said([70], 5, call=-2))


def test_an_engine_that_is_lost_counts_until_the_next_token() -> None:
    one = flight()
    for losses in (1, 2):
        one.board("a", 7)
        one.lose("a")
        assert (one.losses, one.idle_losses, one.runner) == (losses, losses, None)
    one.board("a", 7)
    one.take("a", said([65]))
    assert (one.losses, one.idle_losses) == (2, 0)
    one.board("b", -1)
    one.lose("a")
    assert (one.losses, one.idle_losses, one.runner, one.successor) == (3, 1, "b", None)


def test_a_job_without_a_seed_gets_one_that_stays() -> None:
    one = flight(seed=None)
    seed = one.submit.params.seed
    assert seed is not None
    assert seed != flight(seed=None).submit.params.seed
    assert [one.board(engine, call).params.seed for engine, call in (("a", 7), ("b", -1))] == [seed] * 2


def test_an_answer_that_has_ended_without_a_token_does_not_begin_again() -> None:
    one = flight(n=2, max_tokens=0)
    one.board("a", 7)
    assert not one.has_begun
    one.take("a", said([], end=True))
    assert one.has_begun
    one.lose("a")
    assert [answer.ended for answer in one.board("b", -1).emitted] == [True, False]


def test_each_prompt_goes_on_with_its_own_answers() -> None:
    one = Flight(Submit(7, [[1], [2, 3]], SamplingParams(n=2, seed=0), RequestOptions()))
    one.board("a", 7)
    for index in range(4):
        one.take("a", said([65 + index], index=index))
    assert one.texts == [[1, 65], [1, 66], [2, 3, 67], [2, 3, 68]]
