"""REST: what is proposed from a store, against brute force; and which stores are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from stores import TEXTS, tiny_store
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from soothsay import LLM, DrafterError, SamplingParams, Tokenizer
from soothsay.config import EngineConfig
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.lookup.exact_matches import DOUBT, LEAST, WEIGHTS, Rest, grow_likeliest
from soothsay.drafters.lookup.text_store import write_datastore
from soothsay.drafters.registry import build_drafter
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]


def words(size: int, first: int = 0) -> Tokenizer:
    return Tokenizer(Backend(WordLevel({str(first + i): i for i in range(size)}, unk_token=str(first))))


@pytest.fixture
def target(tiny: Make, tmp_path: Path) -> Target:
    return Target(tiny(0), words(97), EngineConfig(), 0, tmp_path)


def build(target: Target, documents: Sequence[Sequence[int]], name: str = "store", size: int = 97) -> Path:
    assert target.path is not None
    path = target.path / name
    write_datastore(path, [np.array(document) for document in documents], words(size))
    return path


def propose(drafter: Rest, tokens: Sequence[int], max_nodes: int = 100, max_tokens: int = 50) -> DraftTree:
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(tokens, params, seed=0, limit=len(tokens) + max_tokens, drafter=drafter)
    request.max_nodes = max_nodes
    (tree,) = drafter.propose([request])
    return tree


def says(tree: DraftTree) -> list[list[int]]:
    return [[tree.tokens[node] for node in path[1:]] for path in tree.paths()]


def likeliest(
    said: Sequence[Sequence[int]], lengths: Sequence[int], size: int
) -> dict[tuple[int, ...], float]:
    """Every path of the trie with its probability, the best `size` of them."""
    paths = {tuple(tokens[:n]) for tokens in said for n in range(1, len(tokens) + 1)}
    probs = {}
    for path in paths:
        prob = 1.0
        for depth in range(len(path)):
            weights = [
                (2.0 ** min(length, 8), tuple(tokens[: depth + 1]) == path[: depth + 1])
                for tokens, length in zip(said, lengths, strict=True)
                if tuple(tokens[:depth]) == path[:depth]
            ]
            prob *= sum(w for w, right in weights if right) / (16.0 + sum(w for w, _ in weights))
        probs[path] = prob
    best = sorted(probs, key=lambda path: -probs[path])
    return {path: probs[path] for path in best[: size - 1] if probs[path] >= 0.02}


@pytest.mark.parametrize("seed", range(15))
def test_the_likeliest_nodes_are_those_that_brute_force_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert (WEIGHTS[3], WEIGHTS[-1], DOUBT, LEAST) == (8, 256, 16, pytest.approx(0.02))
    for _ in range(20):
        count, size = int(rng.integers(1, 12)), int(rng.integers(2, 20))
        said = [rng.integers(0, 3, int(rng.integers(0, 6))).tolist() for _ in range(count)]
        lengths = sorted(rng.integers(1, 17, count).tolist(), reverse=True)
        tree = DraftTree(7)
        grow_likeliest(tree, said, lengths, size)
        expected = likeliest(said, lengths, size)
        probs = [math.exp(tree.scores[node]) for node in range(1, len(tree))]
        assert sorted(probs) == pytest.approx(sorted(expected.values()))
        for node in range(1, len(tree)):
            path = tuple(tree.tokens[n] for n in tree.path(node)[1:])
            everything = likeliest(said, lengths, 10_000)
            assert everything[path] == pytest.approx(math.exp(tree.scores[node]))


def test_it_proposes_what_came_after(target: Target) -> None:
    drafter = Rest(target, build(target, [[1, 2, 3, 4, 5, 6], [9, 2, 3, 7, 8]]))
    assert says(propose(drafter, [5, 1, 2, 3])) == [[4, 5, 6], [7, 8]], "the longer match first"
    assert says(propose(drafter, [9, 2, 3])) == [[7, 8], [4, 5]], "the rest is not worth a row"
    assert says(propose(drafter, [3, 3])) == [[4], [7]]
    assert says(propose(drafter, [50])) == [[]]
    assert says(propose(drafter, [6])) == [[]], "the document ended"


def test_a_longer_match_is_trusted_more(target: Target) -> None:
    drafter = Rest(target, build(target, [[1, 2, 3, 4, 5]]))
    first = [math.exp(propose(drafter, context).scores[1]) for context in ([4], [3, 4], [1, 2, 3, 4])]
    assert first == pytest.approx([2 / 18, 4 / 20, 16 / 32])


def test_options(target: Target) -> None:
    path = build(target, [[1, 2, 3, 4, 5, 6], [9, 2, 3, 7, 8], [2, 3, 8]])
    context = [1, 2, 3]
    assert says(propose(Rest(target, path, num_tokens=1), context)) == [[4], [7], [8]]
    assert says(propose(Rest(target, path, num_matches=1), context)) == [[4, 5, 6]]
    assert len(propose(Rest(target, path, nodes=2), context)) == Rest(target, path, nodes=2).max_nodes == 3
    assert says(propose(Rest(target, path, min_ngram=4), context)) == [[]]
    assert says(propose(Rest(target, path, min_ngram=3), context)) != [[]]
    scores = propose(Rest(target, path, max_ngram=2), context).scores[1:4]
    assert len({round(score, 6) for score in scores if score > math.log(0.11)}) == 1, "all match as much"


@pytest.mark.parametrize(("left", "depth"), [(1, 0), (2, 1), (4, 3), (50, 10)])
def test_it_guesses_no_deeper_than_is_of_use(left: int, depth: int, target: Target) -> None:
    drafter = Rest(target, build(target, [list(range(90))]))
    assert max(propose(drafter, list(range(20)), max_tokens=left).depths) == depth


@pytest.mark.parametrize("max_nodes", [1, 2, 9])
def test_it_guesses_no_more_than_is_of_use(max_nodes: int, target: Target) -> None:
    drafter = Rest(target, build(target, [list(range(90))]))
    assert len(propose(drafter, list(range(20)), max_nodes)) == max_nodes


@pytest.mark.parametrize(
    "options",
    [
        {"min_ngram": 0},
        {"max_ngram": 3, "min_ngram": 4},
        {"max_ngram": 17},
        {"num_tokens": 0},
        {"num_matches": 0},
        {"nodes": 0},
    ],
)
def test_options_that_cannot_be_meant_are_refused_by_name(options: dict[str, int], target: Target) -> None:
    given = ".*".join(f"{name}={value}" for name, value in options.items())
    with pytest.raises(DrafterError, match=rf"^rest\(.*{given}"):
        Rest(target, **options)


class TestWhichStore:
    def test_the_one_beside_the_weights_needs_no_name(self, target: Target) -> None:
        build(target, [[1, 2, 3]], "drafters/rest.store")
        drafter = build_drafter("rest", target)
        assert isinstance(drafter, Rest)
        assert says(propose(drafter, [1, 2])) == [[3]]

    def test_a_named_one_comes_first(self, target: Target, tmp_path: Path) -> None:
        build(target, [[1, 2, 3]], "drafters/rest.store")
        other = build(target, [[1, 2, 4]], "other.store")
        assert says(propose(Rest(target, other), [1, 2])) == [[4]]

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (
                "rest",
                r"no datastore at .*drafters/rest\.store: build one with 'soothsay datastore build .* FILES",
            ),
            (
                "rest(store=nowhere/x)",
                r"no datastore at nowhere/x: build one with .* or name one, rest\(store=",
            ),
        ],
    )
    def test_none(self, spec: str, message: str, target: Target) -> None:
        with pytest.raises(DrafterError, match=message):
            build_drafter(spec, target)

    def test_nowhere_to_look(self, tiny: Make) -> None:
        with pytest.raises(DrafterError, match=r"no store is named for rest.*soothsay datastore build"):
            Rest(Target(tiny(0), None, EngineConfig(), 0))

    def test_another_tokenizers(self, target: Target) -> None:
        path = build(target, [[1, 2]], size=96)
        with pytest.raises(DrafterError, match=r"built with another tokenizer .*soothsay datastore build"):
            Rest(target, path)

    def test_tokens_that_the_target_has_not(self, tiny: Make, tmp_path: Path) -> None:
        """A tokenizer may have more tokens than its model, and a store some of them."""
        small = Target(tiny(0, vocab_size=90), words(97), EngineConfig(), 0, tmp_path)
        with pytest.raises(DrafterError, match="has token 90, and the target only tokens below 90"):
            Rest(small, build(small, [[1, 90], [2]]))
        assert says(propose(Rest(small, build(small, [[1, 89]])), [1])) == [[89]]


def test_a_store_of_what_the_target_says_is_right(sibyl: LLM, tmp_path: Path) -> None:
    """The target's own answer in the store: after the first words, all guesses are right."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain = sibyl.generate(TEXTS[0], params)
    assert sibyl.tokenizer is not None
    said = np.array(plain.prompt_token_ids + plain.token_ids)
    write_datastore(tmp_path / "own", [said], sibyl.tokenizer)
    drafted = sibyl.generate(TEXTS[0], params, drafter=f"rest(store={tmp_path / 'own'}, num_matches=1)")
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.mean_accepted > 8
    other = sibyl.generate(TEXTS[0], params, drafter=f"rest(store={tiny_store()})")
    assert other.token_ids == plain.token_ids
