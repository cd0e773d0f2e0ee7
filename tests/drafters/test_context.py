"""A drafter's own keys: who sees which of them, and what is found again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from soothsay import DraftTree, Observation, SamplingParams, Target
from soothsay.config import EngineConfig
from soothsay.drafters.base import NoDrafter
from soothsay.drafters.context import READ, FeatureContext, Pass
from soothsay.engine.batch import Batch, Rows
from soothsay.engine.request import Request
from soothsay.model.load import best_kernels
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]
BLOCK = 4


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    tree = DraftTree(3)
    while len(tree) < nodes:
        tree.add(int(rng.integers(len(tree))), int(rng.integers(90)))
    return tree


@pytest.mark.parametrize("kind", ["stock", "best"])
@pytest.mark.parametrize("first_key", [1, 3, 130])
@pytest.mark.parametrize("window", [None, 6])
def test_rows_see_nothing_below_their_first_key(
    first_key: int, window: int | None, kind: str, tiny: Make
) -> None:
    """As if the context began there, at the same positions: attention is relative."""
    model = tiny(4, windows=(None, window), head_dim=32, hidden_size=64)
    if kind == "best":
        other = Transformer(model.config, best_kernels(model.config)).eval().requires_grad_(False)
        other.load_state_dict(model.state_dict())
        model = other
    rng = np.random.default_rng(first_key)
    tree = random_tree(rng, 9)
    tokens = rng.integers(0, 97, 7)
    pool = model.new_cache(100, BLOCK)
    pool.data.normal_(std=50)  # whatever lies below is not to be seen
    table = rng.permutation(100)[: -(-(first_key + 20) // BLOCK)]

    def run(rows: list[Rows], cache: object) -> torch.Tensor:
        batch = Batch.pack(
            rows, block_size=BLOCK if cache else 1, group=model.config.group, windows=model.config.windows
        )
        return model(batch, cache)[0]

    chunk = Rows(tokens[:3], first_key, table, first_key=first_key)
    rest = Rows(tokens[3:], first_key + 3, table, tree, first_key=first_key)
    got = torch.cat([run([chunk], pool), run([rest], pool)])
    expected = run([Rows(tokens, 0, None, tree)], None)
    assert torch.allclose(got, expected, atol=2e-3)


def test_a_row_that_could_not_see_itself_is_refused() -> None:
    rows = Rows(np.array([1, 2]), 3, np.arange(4), DraftTree(2), first_key=4)
    with pytest.raises(ValueError, match="a row at offset 3 sees no keys below 4"):
        Batch.pack([rows], block_size=BLOCK)
    Batch.pack([replace(rows, first_key=3)], block_size=BLOCK)


@pytest.mark.parametrize("seed", range(10))
def test_both_layouts_of_paths_agree_on_what_is_seen(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = int(rng.integers(1, 200))
    hidden = int(rng.integers(0, start + 1))
    table = rng.permutation(100)
    tree = random_tree(rng, int(rng.integers(1, 12)))
    rows = Rows(np.array([5, 3]), start, table, tree, first_key=hidden)
    batch = Batch.pack([rows], block_size=BLOCK, group=4)

    def slot(offset: int) -> int:
        return int(table[offset // BLOCK]) * BLOCK + offset % BLOCK

    root = start + 1
    expected = {0: range(hidden, start + 1), 1: range(hidden, root + 1)}
    for node in range(1, len(tree)):
        expected[node + 1] = [*range(hidden, root + 1), *(root + n for n in tree.path(node)[1:])]
    flat = batch.flat
    for i in range(len(flat.row_begin) - 1):
        keys = flat.keys[flat.key_begin[i] : flat.key_begin[i + 1]].tolist()
        for at in range(int(flat.row_begin[i]), int(flat.row_begin[i + 1])):
            seen = keys[: int(flat.positions[at]) + 1]
            assert seen == [slot(offset) for offset in expected.pop(int(flat.rows[at]))]
    assert not expected
    assert batch.positions.tolist() == [start, root, *(root + d for d in tree.depths[1:])]


class Notebook:
    """A feature drafter's pool, in which a slot holds the tokens that its row depends on.

    The feature of a token is a number that stands for all tokens up to it.
    """

    def __init__(self, tiny: Make, max_rows: int = 16):
        model = tiny(0)
        config = EngineConfig(max_context=200, block_size=BLOCK, max_rows=max_rows)
        self.target = Target(model, None, config, 40)
        self.context = FeatureContext(self.target, model.new_cache(40, BLOCK))
        self.slots: dict[int, tuple[int, ...]] = {}

    def request(self, tokens: list[int], blocks: list[int]) -> Request:
        params = SamplingParams(max_tokens=20)
        drafter = NoDrafter(self.target)
        request = Request(tokens, params, seed=0, limit=200, drafter=drafter, block_size=BLOCK)
        request.blocks, request.max_nodes = blocks, 4
        return request

    def show(self, request: Request, start: int, count: int) -> None:
        """The target runs `count` tokens from `start` on."""
        features = [feature(request.tokens[: i + 1]) for i in range(start, start + count)]
        seen = Observation(request, start, count, (torch.tensor(features)[:, None],))
        for batch in self.context.observe([seen], lambda taps: taps[0]):
            self.run(batch)

    def run(self, batch: Pass) -> None:
        assert sum(rows.num_rows for rows in batch.rows) <= self.target.config.max_rows
        for request, rows, features in zip(batch.requests, batch.rows, batch.features, strict=True):
            assert rows.tokens.tolist() == request.tokens[rows.start :][: len(rows.tokens)].tolist()
            for row, offset in enumerate(range(rows.start, rows.start + len(rows.tokens))):
                before = request.tokens[:offset]
                assert features[row].item() == pytest.approx(feature(before)), "that of the token before"
                slot = int(rows.table[offset // BLOCK]) * BLOCK + offset % BLOCK
                self.slots[slot] = tuple(request.tokens[: offset + 1].tolist())

    def draft(self, request: Request) -> int:
        """Run all; what is visible must be there. Returns where it begins."""
        assert self.context.ready(request)
        for batch in self.context.catch_up({request: DraftTree(int(request.tokens[-1]))}):
            self.run(batch)
        first = self.context.states[request].first_key
        for offset in range(first, len(request.tokens)):
            slot = request.blocks[offset // BLOCK] * BLOCK + offset % BLOCK
            assert self.slots[slot] == tuple(request.tokens[: offset + 1].tolist())
        return first

    def close(self, request: Request) -> None:
        for batch in self.context.close(request):
            self.run(batch)


def feature(tokens: Sequence[int]) -> float:
    return sum((i + 1) * (int(token) + 1) for i, token in enumerate(tokens)) / 7


TEXT = [*range(20, 60)]


class TestFeatures:
    def said(self, book: Notebook, tokens: list[int], blocks: list[int], start: int = 0) -> Request:
        """A request whose prompt has been run from `start` on, and one token emitted."""
        request = book.request(tokens, blocks)
        book.show(request, start, len(tokens) - start)
        request.emit([99])
        return request

    def test_there_is_no_row_for_the_first_token(self, tiny: Make) -> None:
        book = Notebook(tiny)
        request = self.said(book, TEXT[:10], [5, 6, 7])
        assert book.draft(request) == 1
        assert sorted(book.slots) == [*range(21, 28), *range(28, 31)]

    def test_nothing_is_ready_before_its_features_are(self, tiny: Make) -> None:
        book = Notebook(tiny)
        request = book.request(TEXT[:10], [5, 6, 7])
        assert not book.context.ready(request)
        book.show(request, 0, 6)
        assert not book.context.ready(request)
        book.show(request, 6, 4)
        assert not book.context.ready(request), (
            "the last token's own feature is there, but no token behind it"
        )
        request.emit([99])
        assert book.context.ready(request)

    @pytest.mark.parametrize("count", [READ - 1, READ, READ + 9])
    def test_long_pieces_of_prompts_are_read_at_once(self, tiny: Make, count: int) -> None:
        book = Notebook(tiny)
        request = book.request([*range(count)], [*range(1, 30)])
        book.show(request, 0, count)
        whole = (count - 1) // BLOCK * BLOCK
        assert sorted(book.slots) == ([*range(BLOCK + 1, BLOCK + whole)] if count >= READ else [])
        request.emit([99])
        assert book.draft(request) == 1

    def test_another_request_goes_on_from_noted_blocks(self, tiny: Make) -> None:
        book = Notebook(tiny)
        book.close(self.said(book, TEXT[:10], [5, 6, 7]))
        assert sorted(book.slots) == [*range(21, 28)], "full blocks are filled at the end"
        assert book.draft(self.said(book, [*TEXT[:8], 3, 4], [5, 6, 8], start=8)) == 1
        assert book.draft(self.said(book, [*TEXT[:4], 3, 4, 5], [5, 9], start=4)) == 1

    def test_a_block_whose_last_feature_comes_late_is_noted_then(self, tiny: Make) -> None:
        book = Notebook(tiny)
        request = self.said(book, TEXT[:7], [5, 6, 7])
        book.draft(request)  # two full blocks, and the last token's feature is not known
        book.show(request, 7, 1)
        request.emit([98])
        book.close(request)
        assert book.draft(self.said(book, [*TEXT[:7], 99, 3], [5, 6, 8], start=8)) == 1

    def test_what_was_never_seen_stays_invisible(self, tiny: Make) -> None:
        book = Notebook(tiny)
        first = self.said(book, TEXT[:14], [5, 6, 7, 8], start=4)
        assert book.draft(first) == 5
        book.close(first)
        second = self.said(book, [*TEXT[:12], 3, 4], [5, 6, 7, 9], start=12)
        assert book.draft(second) == 5, "the block before it is another's"
        third = self.said(book, [*TEXT[:4], 3, 4], [5, 6], start=4)
        assert book.draft(third) == 5

    def test_a_hole_among_noted_blocks_ends_what_is_visible(self, tiny: Make) -> None:
        book = Notebook(tiny)
        book.close(self.said(book, TEXT[:14], [5, 6, 7, 8], start=4))  # block 6 lacks its first row
        book.close(self.said(book, TEXT[:6], [10, 11]))  # the block before it, anew
        assert book.draft(self.said(book, [*TEXT[:12], 3], [10, 6, 7, 12], start=12)) == 5

    def test_a_block_that_was_written_over_is_not_taken_for_what_it_held(self, tiny: Make) -> None:
        book = Notebook(tiny)
        book.close(self.said(book, TEXT[:10], [5, 6, 7]))
        book.draft(self.said(book, [1, 2, 3], [6]))
        assert book.draft(self.said(book, [*TEXT[:8], 3], [5, 6, 8], start=8)) == 9
        assert book.draft(self.said(book, [*TEXT[:4], 3], [5, 9], start=4)) == 1

    def test_a_request_that_is_not_drafted_for_lags_by_less_than_a_block(self, tiny: Make) -> None:
        book = Notebook(tiny, max_rows=5)
        waiting = book.request(TEXT, [*range(10)])
        for start in range(0, 30, 3):
            book.show(waiting, start, 3)
            assert len(book.slots) >= (start - 1) // BLOCK * BLOCK - 1
        other = self.said(book, [*TEXT[:24], *range(9)], [*range(6), 20, 21, 22], start=24)
        assert book.draft(other) == 1

    def test_a_tree_that_does_not_fit_beside_the_rest_comes_in_the_next_pass(self, tiny: Make) -> None:
        book = Notebook(tiny, max_rows=6)
        request = self.said(book, TEXT[:9], [5, 6, 7, 8])  # nine rows, and four of the tree
        tree = DraftTree(99)
        tree.extend([1, 2, 3, 4])
        sizes = [[rows.num_rows for rows in batch.rows] for batch in book.context.catch_up({request: tree})]
        assert sizes == [[6], [2], [5]]

    def test_a_tree_larger_than_a_pass_is_refused(self, tiny: Make) -> None:
        book = Notebook(tiny, max_rows=4)
        request = self.said(book, TEXT[:2], [5, 6])
        tree = DraftTree(99)
        tree.extend([1, 2, 3, 4])
        with pytest.raises(ValueError, match="a tree is larger than a pass, which has 4 rows"):
            list(book.context.catch_up({request: tree}))
