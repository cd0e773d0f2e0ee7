"""The suffix automaton against brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from soothsay.drafters.ops.automaton import NOWHERE, ROOT, Reading, StockAutomaton, Tokens

MANY = 1000


def ids(text: Sequence[int]) -> Tokens:
    return np.array(text, dtype=np.int64)


def automaton(*texts: Sequence[int], counted: int = MANY) -> StockAutomaton:
    made = StockAutomaton(counted)
    for text in texts:
        made.read(Reading(), ids(text))
    return made


def reach(made: StockAutomaton, string: Sequence[int]) -> int | None:
    state = ROOT
    for token in string:
        if token not in made.next[state]:
            return None
        state = made.next[state][token]
    return state


def substrings(texts: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(t[i:j]) for t in texts for i in range(len(t)) for j in range(i + 1, len(t) + 1)}


def ends(texts: Sequence[Sequence[int]], string: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    size = len(string)
    return frozenset(
        (n, end)
        for n, t in enumerate(texts)
        for end in range(size, len(t) + 1)
        if tuple(t[end - size : end]) == string
    )


def random_texts(seed: int) -> Iterator[list[list[int]]]:
    rng = np.random.default_rng(seed)
    for _ in range(10):
        letters = int(rng.integers(1, 4))
        yield [
            rng.integers(0, letters, int(rng.integers(1, 14))).tolist()
            for _ in range(int(rng.integers(1, 4)))
        ]


def test_abcbc_worked_out_by_hand() -> None:
    """Its classes are {}, a, b, ab, {abc}, {bc, c}, {abcb, bcb, cb} and {abcbc, bcbc, cbc}: b is separate
    from ab, but c is with bc, since every c comes after a b."""
    a, b, c = 0, 1, 2
    made = automaton([a, b, c, b, c])
    of = {name: reach(made, ["abc".index(letter) for letter in name]) for name in ("", "a", "ab", "b")}
    longer = {"abc": "abc", "bc": "c", "abcb": "cb", "abcbc": "cbc"}
    for longest, shortest in longer.items():
        of[longest] = reach(made, ["abc".index(letter) for letter in longest])
        assert of[longest] == reach(made, ["abc".index(letter) for letter in shortest])
    assert len(set(of.values())) == len(of) == len(made.next) == 8
    assert {name: made.length[state] for name, state in of.items()} == {name: len(name) for name in of}
    links = {"a": "", "ab": "b", "b": "", "abc": "bc", "bc": "", "abcb": "b", "abcbc": "bc"}
    assert {name: made.link[of[name]] for name in links} == {name: of[link] for name, link in links.items()}
    assert sum(map(len, made.next)) == 9
    counts = {"a": 1, "ab": 1, "b": 2, "abc": 1, "bc": 2, "abcb": 1, "abcbc": 1}
    assert {name: made.count[of[name]] for name in counts} == counts


@pytest.mark.parametrize("seed", range(20))
def test_states_are_the_strings_that_end_at_the_same_places(seed: int) -> None:
    for texts in random_texts(seed):
        made, classes = automaton(*texts), {}
        known = substrings(texts)
        for string in known:
            classes.setdefault(ends(texts, string), []).append(string)
        assert len(made.next) == 1 + len(classes)
        for places, strings in classes.items():
            (state,) = {reach(made, string) for string in strings}
            assert state is not None
            assert made.count[state] == len(places)
            assert made.length[state] == max(map(len, strings))
            assert made.length[made.link[state]] == min(map(len, strings)) - 1
            longest = max(strings, key=len)
            assert reach(made, longest[len(longest) - made.length[made.link[state]] :]) == made.link[state]
        alien = [(*string, token) for string in known for token in range(4) if (*string, token) not in known]
        assert all(reach(made, string) is None for string in alien)
        assert len(made.next) <= max(2 * sum(map(len, texts)), 2)


@pytest.mark.parametrize("seed", range(10))
def test_texts_may_be_read_in_turns_and_only_short_strings_be_counted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for texts in random_texts(seed):
        counted = int(rng.integers(1, 5))
        made = StockAutomaton(counted)
        readings, done = [Reading() for _ in texts], [0] * len(texts)
        while left := [n for n, text in enumerate(texts) if done[n] < len(text)]:
            n = int(rng.choice(left))
            size = int(rng.integers(1, 4))
            made.read(readings[n], ids(texts[n][done[n] : done[n] + size]))
            done[n] += size
        assert made.size == sum(map(len, texts))
        for string in substrings(texts):
            state = reach(made, string)
            assert state is not None, string
            if len(string) <= counted:
                assert made.count[state] == len(ends(texts, string)), string


def test_long_runs_are_counted_in_linear_time() -> None:
    made = automaton([5] * 3000, counted=4)
    assert [made.count[reach(made, [5] * n) or 0] for n in (1, 2, 3, 4)] == [3000, 2999, 2998, 2997]
    assert made.count[reach(made, [5] * 2000) or 0] < 3, "each token counts four strings, not 3000"


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_brute_forces_while_the_automaton_grows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for texts in random_texts(seed):
        counted = int(rng.integers(2, 8))
        made, read = StockAutomaton(counted), []
        (state, length), seen = NOWHERE, list[int]()
        for text in texts:
            new = rng.integers(0, 3, int(rng.integers(0, 6))).tolist()
            seen += new
            state, length = made.follow((state, length), ids(new))
            known = substrings(read)
            # what was missed when it was said cannot be caught up with: the match of then goes on
            assert length <= counted - 1
            if length:
                string = tuple(seen[-length:])
                assert string in known
                assert made.short(state, length) == reach(made, string)
            made.read(Reading(), ids(text))
            read.append(text)
        state, length = made.follow(NOWHERE, ids(seen))
        known = substrings(read)
        fitting = [n for n in range(1, min(len(seen), counted - 1) + 1) if tuple(seen[-n:]) in known]
        assert length == max(fitting, default=0)
        assert length == 0 or state == reach(made, seen[-length:])


@pytest.mark.parametrize("counted", [2, 4, MANY])
@pytest.mark.parametrize("seed", range(10))
def test_what_a_text_repeats_is_its_longest_suffix_that_was_said_before(seed: int, counted: int) -> None:
    for text, *_ in random_texts(seed):
        made, reading = StockAutomaton(counted), Reading()
        assert made.repeated(reading) == NOWHERE
        for at, token in enumerate(text, start=1):
            made.read(reading, ids([token]))
            said = substrings([text[: at - 1]])
            twice = [n for n in range(1, min(at, counted)) if tuple(text[at - n : at]) in said]
            state, length = made.repeated(reading)
            assert length == max(twice, default=0)
            assert state == reach(made, text[at - length : at])


def test_a_match_stays_where_it_is_when_its_state_is_split() -> None:
    made = automaton([7, 1, 2, 3])
    match = made.follow(NOWHERE, ids([2]))  # in the state of 7 1 2, 1 2 and 2
    made.read(Reading(), ids([5, 1, 2, 4]))  # 1 2 and 2 move to another one
    assert made.follow(match, ids([4])) == (reach(made, [2, 4]), 2)
