"""Suffix matching: what is proposed, what is kept of ended requests, and what a file brings back."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kernels import FASTEST

from soothsay import LLM, DrafterError, SamplingParams
from soothsay.config import EngineConfig
from soothsay.core.answer import FinishReason
from soothsay.core.request import Request
from soothsay.core.tenant import EVERYBODY
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.learned_files import read_learned
from soothsay.drafters.lookup.suffix_matching import PIECE, Suffix, write_texts
from soothsay.drafters.ops.native_draft_ops import draft_ops
from soothsay.drafters.registry import build_drafter

VOCABULARY = 1000
MODEL = SimpleNamespace(spec=SimpleNamespace(vocab_size=VOCABULARY), kernels=FASTEST)
TARGET = Target(MODEL, None, EngineConfig(), 0, ops=draft_ops(FASTEST))  # type: ignore[arg-type]


def ask(drafter: Suffix, prompt: Sequence[int], room: int = 100, nodes: int = 64) -> Request:
    request = Request(
        prompt, SamplingParams(temperature=0), seed=0, limit=len(prompt) + room, drafter=drafter
    )
    request.max_nodes = nodes
    return request


def end(request: Request) -> None:
    request.finish_reason = FinishReason.STOP
    request.drafter.release(request)


def hear(drafter: Suffix, *texts: Sequence[int]) -> None:
    """Requests with these texts come and end."""
    for text in texts:
        end(ask(drafter, text))


def propose(drafter: Suffix, *prompt: int) -> DraftTree:
    return drafter.propose([ask(drafter, prompt)])[0]


def says(tree: DraftTree) -> list[list[int]]:
    return [[tree.tokens[node] for node in path[1:]] for path in tree.paths()]


def best(tree: DraftTree) -> list[int]:
    """The path that goes on with the likeliest guess."""
    node, path = 0, []
    while tree.children[node]:
        node = max(tree.children[node].values(), key=lambda n: tree.scores[n])
        path.append(tree.tokens[node])
    return path


def test_it_proposes_what_came_after_in_the_request_itself() -> None:
    (said,) = says(propose(Suffix(TARGET), 9, 1, 2, 3, 4, 5, 8, 9, 1, 2))
    assert said[:7] == [3, 4, 5, 8, 9, 1, 2], "and then round again"
    assert says(propose(Suffix(TARGET), 1, 2, 3)) == [[]], "nothing was said twice"


def test_it_proposes_what_came_after_in_requests_that_have_ended() -> None:
    drafter = Suffix(TARGET)
    hear(drafter, [5, 6, 7, 8])
    assert says(propose(drafter, 1, 5, 6)) == [[7, 8]]
    assert says(propose(drafter, 6, 5)) == [[6, 7]], "whatever stood before; less far, for the match is short"
    assert says(propose(drafter, 5, 8)) == [[]], "nothing came after it"


def test_a_longer_match_is_expected_to_gain_more_and_less_if_the_request_samples() -> None:
    gains = [
        [Suffix(TARGET).first_gain(signal, sampled) for signal in (1, 2, 5)] for sampled in (False, True)
    ]
    assert gains[0] == [1, 2, 16]
    assert gains[1] == pytest.approx([0.4, 0.8, 6.4])


def test_both_sources_are_one_tree_and_a_requests_own_words_weigh_more() -> None:
    drafter = Suffix(TARGET)
    hear(drafter, [5, 6, 7, 7])
    tree = propose(drafter, 5, 6, 8, 1, 5, 6)
    assert {tuple(path) for path in says(tree)} >= {(7, 7)}
    assert tree.children[0].keys() == {7, 8}
    assert tree.scores[tree.children[0][8]] > tree.scores[tree.children[0][7]]


def test_the_likeliest_comes_first_and_its_log_prob_is_the_frequency_less_a_doubt() -> None:
    drafter = Suffix(TARGET, longest=8)
    hear(drafter, [5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 8])
    tree = propose(drafter, 1, 5, 6)
    doubt = 8 / (8 + 2)  # of a match of two
    assert tree.tokens[:3] == [6, 7, 8]
    assert tree.scores[1:3] == pytest.approx([math.log((3 - doubt) / 4), math.log((1 - doubt) / 4)])


def test_longer_matches_are_trusted_more() -> None:
    scores = []
    for length in (1, 2, 4, 8):
        text = list(range(1, length + 1))
        tree = propose(Suffix(TARGET, factor=100), *text, 50, 60, 99, *text)
        assert best(tree)[:2] == [50, 60]
        scores.append(tree.scores[1])
    assert scores == sorted(scores)
    assert -0.3 < scores[-1] < 0
    assert scores[0] < math.log(0.5)


@pytest.mark.parametrize("seed", range(10))
def test_it_signals_how_long_the_longest_match_is(seed: int) -> None:
    """In the request itself and in others; read on, token by token."""
    rng = np.random.default_rng(seed)
    other, text = (rng.integers(0, 3, 80).tolist() for _ in range(2))
    drafter = Suffix(TARGET, longest=6)
    hear(drafter, other)
    propose(drafter, 1, 2)  # what has ended is read when guesses are asked for
    request = ask(drafter, text[:5])
    for size in range(5, 80):
        before = [text[:size][i : i + n] for n in range(1, 7) for i in range(size - n)]
        before += [other[i : i + n] for n in range(1, 7) for i in range(80 - n + 1)]
        length = max((n for n in range(1, min(size, 6) + 1) if text[size - n : size] in before), default=0)
        assert drafter.signal(request) == len(f"{length:b}") * (length > 0)
        request.emit([text[size]])


@pytest.mark.parametrize("seed", range(10))
def test_the_first_guess_is_the_commonest_behind_the_longest_match(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        text = rng.integers(0, 4, int(rng.integers(2, 40))).tolist()
        tree = propose(Suffix(TARGET, memory=0), *text)
        size = len(text)
        length = max(
            (n for n in range(1, size) if text[-n:] in [text[i : i + n] for i in range(size - n)]), default=0
        )
        if length == 0:
            assert len(tree) == 1
            continue
        after = [text[i + length] for i in range(size - length) if text[i : i + length] == text[-length:]]
        if len({*after}) == 1 and length >= 3:
            assert tree.tokens[1] == after[0]
        assert {*after} <= tree.children[0].keys() or len(after) > 10


@pytest.mark.parametrize(("left", "depth"), [(1, 0), (2, 1), (4, 3), (50, 40)])
def test_it_guesses_no_deeper_than_is_of_use(left: int, depth: int) -> None:
    drafter = Suffix(TARGET, nodes=100, factor=100)
    (tree,) = drafter.propose([ask(drafter, [*range(60)] * 2, room=left, nodes=41)])
    assert max(tree.depths) == depth


def test_trees_keep_to_nodes_and_to_a_multiple_of_the_match() -> None:
    text = [*range(40)] * 2
    assert len(propose(Suffix(TARGET, nodes=7), *text)) == 7
    assert len(propose(Suffix(TARGET, nodes=100, factor=2), *text[:43])) == 1 + 2 * 3
    drafter = Suffix(TARGET)
    assert len(drafter.propose([ask(drafter, text, nodes=3)])[0]) == 3
    assert len(drafter.propose([ask(drafter, text, nodes=1)])[0]) == 1


def test_a_tree_goes_deeper_than_the_longest_match_that_is_looked_at() -> None:
    tree = propose(Suffix(TARGET, longest=3), *range(30), *range(5))
    assert best(tree) == list(range(5, 12))
    doubt = 2 / (2 + 3)  # throughout, for no match is longer
    assert tree.scores == pytest.approx([n * math.log(1 - doubt) for n in range(8)])


def test_reading_in_pieces_is_reading_at_once() -> None:
    rng = np.random.default_rng(3)
    other, text = rng.integers(0, 5, 300).tolist(), rng.integers(0, 5, 200).tolist()
    drafter = Suffix(TARGET)
    hear(drafter, other)
    request = ask(drafter, text[:1], room=300)
    at = 1
    while at < len(text):
        size = int(rng.integers(1, 9))  # a drafter may be passed over for some steps
        request.emit(text[at : at + size])
        at += size
        if rng.random() < 0.3:
            drafter.release(request)  # preempted
        (tree,) = drafter.propose([request])
        fresh = Suffix(TARGET)
        hear(fresh, other)
        expected = propose(fresh, *request.tokens.tolist())
        assert (tree.tokens, tree.parents, tree.scores) == (
            expected.tokens,
            expected.parents,
            pytest.approx(expected.scores),
        )


def test_the_oldest_requests_are_forgotten_first() -> None:
    drafter = Suffix(TARGET, memory=20)
    texts = [[n * 10 + i for i in range(5)] for n in range(1, 8)]
    running = ask(drafter, [1, 10])
    for n, text in enumerate(texts):
        hear(drafter, text)
        assert best(propose(drafter, *text[:3])) == text[3:]
        known = [m for m in range(n + 1) if len(propose(drafter, 1, texts[m][0])) > 1]
        assert known == list(range(known[0], n + 1)), "no gaps"
        assert 5 * len(known) <= 20
        assert n < 2 or len(known) >= 2
        drafter.propose([running])  # goes on, whatever has been forgotten


def test_a_text_longer_than_the_memory_is_cut() -> None:
    drafter = Suffix(TARGET, memory=20)
    hear(drafter, range(50))
    assert [len(propose(drafter, token)) > 1 for token in range(50)] == [
        40 <= token < 49 for token in range(50)
    ]


def test_ended_requests_are_read_bit_by_bit_and_only_where_somebody_asks() -> None:
    drafter = Suffix(TARGET)
    hear(drafter, range(PIECE), range(PIECE, 2 * PIECE + 10))
    (generation,) = drafter.memories[EVERYBODY].generations
    assert generation.automaton.size == 0
    for read in (PIECE, 2 * PIECE, 2 * PIECE + 10, 2 * PIECE + 10):
        propose(drafter, 3 * PIECE)
        assert generation.automaton.size == read
        for token in (5, PIECE + 5, 2 * PIECE + 5):
            matcher = draft_ops(FASTEST).automaton(5).matcher(1.0)
            matcher.watch([(generation.automaton, 1.0)], np.array([token]))
            assert matcher.longest == (token < read)


def test_no_memory_is_no_store() -> None:
    drafter = Suffix(TARGET, memory=0)
    hear(drafter, [1, 2, 3])
    assert says(propose(drafter, 1, 2)) == [[]]


def test_reset_is_as_if_just_built(tmp_path: Path) -> None:
    drafter = Suffix(TARGET)
    hear(drafter, [1, 2, 3])
    drafter.save(tmp_path / "store")
    drafter = Suffix(TARGET, store=tmp_path / "store")
    hear(drafter, [5, 6, 7])
    drafter.reset()
    assert says(propose(drafter, 1, 2)) == [[3]]
    assert says(propose(drafter, 5, 6)) == [[]]


def test_requests_that_are_gone_leave_nothing_behind() -> None:
    drafter = Suffix(TARGET)
    request = ask(drafter, [1, 2, 1, 2])
    drafter.release(request)  # never seen
    drafter.propose([request])
    assert len(drafter._texts) == 1
    del request  # cancelled while it waited
    gc.collect()
    assert len(drafter._texts) == 0


class TestStore:
    def test_it_comes_back_as_it_was(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        texts = rng.integers(0, 9, (40, 12)).tolist()
        drafter = Suffix(TARGET, memory=400)
        hear(drafter, *texts)
        drafter.save(tmp_path / "store")
        once = Suffix(TARGET, memory=400, store=tmp_path / "store")
        once.save(tmp_path / "again")
        kept, again = (
            read_learned(tmp_path / name, "suffix", TARGET.vocabulary) for name in ("store", "again")
        )
        assert {name: array.tolist() for name, array in kept.items()} == {
            name: array.tolist() for name, array in again.items()
        }
        twice = Suffix(TARGET, memory=400, store=tmp_path / "again")
        restored = Suffix(TARGET, memory=400)
        restored.restore(EVERYBODY, drafter.memories[EVERYBODY].state())
        for text in texts:
            for one, other in ((drafter, restored), (once, twice)):
                tree, same = propose(one, *text[:7]), propose(other, *text[:7])
                assert (tree.tokens, tree.parents, tree.scores) == (same.tokens, same.parents, same.scores)

    def test_it_is_kept_whole_whatever_the_memory(self, tmp_path: Path) -> None:
        texts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
        write_texts(tmp_path / "store", [np.array(text) for text in texts], TARGET.vocabulary)
        small = Suffix(TARGET, memory=6, store=tmp_path / "store")
        assert [says(propose(small, first)) for first in (1, 4, 7)] == [[[2]], [[5]], [[8]]]
        hear(small, [3, 3, 3, 9, 9])  # ended requests are kept within the memory, apart
        assert [says(propose(small, first)) for first in (1, 4, 7)] == [[[2]], [[5]], [[8]]]

    def test_a_smaller_memory_restores_the_last_texts(self) -> None:
        drafter = Suffix(TARGET)
        hear(drafter, [1, 2, 3], [4, 5, 6], [7, 8, 9])
        small = Suffix(TARGET, memory=6)
        small.restore(EVERYBODY, drafter.memories[EVERYBODY].state())
        assert [len(says(propose(small, first))[0]) for first in (1, 4, 7)] == [0, 2, 2]

    def test_an_empty_one_is_possible(self, tmp_path: Path) -> None:
        Suffix(TARGET).save(tmp_path / "store")
        assert says(propose(Suffix(TARGET, store=tmp_path / "store"), 1, 2)) == [[]]

    def test_it_is_named_in_a_specification(self, tmp_path: Path) -> None:
        drafter = Suffix(TARGET)
        hear(drafter, [1, 2, 3])
        drafter.save(tmp_path / "store")
        built = build_drafter(f"suffix(store={tmp_path / 'store'})", TARGET)
        assert isinstance(built, Suffix)
        assert says(propose(built, 1, 2)) == [[3]]

    def test_a_file_that_is_not_there_or_cut_short_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "store"
        with pytest.raises(DrafterError, match="cannot be read: it is missing"):
            Suffix(TARGET, store=path)
        drafter = Suffix(TARGET)
        hear(drafter, range(100))
        drafter.save(path)
        whole = path.read_bytes()
        for size in (0, 7, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(DrafterError, match="cannot be read"):
                Suffix(TARGET, store=path)
        path.write_bytes(b"\xff" * 400)
        with pytest.raises(DrafterError, match="cannot be read"):
            Suffix(TARGET, store=path)

    def test_another_tokenizer_is_another_vocabulary(self, tmp_path: Path, sibyl: LLM) -> None:
        target = sibyl.engine.target
        Suffix(target).save(tmp_path / "store")
        Suffix(target, store=tmp_path / "store")
        for other in (replace(target, tokenizer=None), TARGET):
            with pytest.raises(DrafterError, match="another vocabulary"):
                Suffix(other, store=tmp_path / "store")


PROMPTS = [
    "The river rises in the hills. The river rises in the hills. The river",
    "Summarize: the river rises in the hills north of the town.",
    "one two three one two three one two",
]


def test_tokens_are_the_same_through_saving_loading_and_forgetting(sibyl: LLM, tmp_path: Path) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=5),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    ]
    plain = [result.token_ids for result in sibyl.generate(PROMPTS, params)]
    target = sibyl.engine.target
    forgetful = build_drafter("suffix(memory=90, longest=4)", target)
    for _ in range(3):
        assert [r.token_ids for r in sibyl.generate(PROMPTS, params, drafter=forgetful)] == plain
    drafter = build_drafter("suffix", target)
    assert isinstance(drafter, Suffix)
    assert [r.token_ids for r in sibyl.generate(PROMPTS, params, drafter=drafter)] == plain
    drafter.save(tmp_path / "store")
    loaded = sibyl.generate(PROMPTS, params, drafter=f"suffix(store={tmp_path / 'store'})")
    assert [result.token_ids for result in loaded] == plain
    assert loaded[0].stats.steps < 8, "40 tokens that were said before"
    drafter.load(tmp_path / "store")
    assert [r.token_ids for r in sibyl.generate(PROMPTS, params, drafter=drafter)] == plain
    drafter.reset()
    assert [r.token_ids for r in sibyl.generate(PROMPTS, params, drafter=drafter)] == plain


@pytest.mark.parametrize("options", [{"nodes": 0}, {"factor": 0}, {"longest": 0}, {"memory": -1}])
def test_options_that_cannot_be_meant_are_refused_by_name(options: dict[str, int]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(DrafterError, match=rf"^suffix\(.*{name}={value}"):
        Suffix(TARGET, **options)  # type: ignore[arg-type]
