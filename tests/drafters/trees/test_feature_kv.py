"""What drafters keep of features: which rows are computed, what is found again, what is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from soothsay import DraftTree, Observation, SamplingParams, Target
from soothsay.config import EngineConfig
from soothsay.core.request import Request
from soothsay.core.verify import Verdict
from soothsay.drafters.base import NoDrafter
from soothsay.drafters.heads.feature_drafter import LastFeatureDrafter
from soothsay.drafters.trees.own_kv import READ, DraftPass, FeatureKV
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]
BLOCK = 4


class Notebook:
    """A feature drafter's pool, in which a slot holds the tokens that its row depends on.

    The feature of a token is a number that stands for all tokens up to it.
    """

    def __init__(self, tiny: Make, max_rows: int = 16):
        model = tiny(0)
        config = EngineConfig(max_context=200, block_size=BLOCK, max_rows=max_rows)
        self.target = Target(model, None, config, 40)
        self.kv = FeatureKV(self.target, model.new_cache(40, BLOCK))
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
        for batch in self.kv.observe([seen], lambda taps: taps[0]):
            self.run(batch)

    def run(self, batch: DraftPass) -> None:
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
        assert self.kv.ready(request)
        for batch in self.kv.catch_up({request: DraftTree(int(request.tokens[-1]))}):
            self.run(batch)
        first = self.kv.states[request].first_key
        for offset in range(first, len(request.tokens)):
            slot = request.blocks[offset // BLOCK] * BLOCK + offset % BLOCK
            assert self.slots[slot] == tuple(request.tokens[: offset + 1].tolist())
        return first

    def close(self, request: Request) -> None:
        for batch in self.kv.close(request):
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
        assert not book.kv.ready(request)
        book.show(request, 0, 6)
        assert not book.kv.ready(request)
        book.show(request, 6, 4)
        assert not book.kv.ready(request), "the last token's own feature is there, but no token after it"
        request.emit([99])
        assert book.kv.ready(request)

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
        sizes = [[rows.num_rows for rows in batch.rows] for batch in book.kv.catch_up({request: tree})]
        assert sizes == [[6], [2], [5]]

    def test_a_tree_larger_than_a_pass_is_refused(self, tiny: Make) -> None:
        book = Notebook(tiny, max_rows=4)
        request = self.said(book, TEXT[:2], [5, 6])
        tree = DraftTree(99)
        tree.extend([1, 2, 3, 4])
        with pytest.raises(ValueError, match="a tree is larger than a pass, which has 4 rows"):
            list(book.kv.catch_up({request: tree}))


class LastFeatures(LastFeatureDrafter[Any]):
    """Its head's features are differences of two layers."""

    def __init__(self) -> None:
        head = SimpleNamespace(taps=(0, 1))
        served = SimpleNamespace(head=head, shared=None, fuse=lambda taps: taps[0] - taps[1])
        super().__init__(None, served)  # type: ignore[arg-type]

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [DraftTree(int(request.tokens[-1])) for request in requests]


class TestLastFeatures:
    """Features are the numbers of their tokens."""

    def show(self, memory: LastFeatures, request: Request, start: int, count: int, accepted: int = 0) -> None:
        """The target runs `count` tokens and a tree of three nodes; nodes 1 and 3 are right."""
        rows = torch.arange(start, start + count + 3.0)[:, None]
        verdict = Verdict([1, 3][:accepted], [7] * (accepted + 1))
        seen = Observation(request, start, count, (rows, -rows), verdict=verdict)
        memory.observe([seen])

    def test_the_last_committed_token_s_is_kept(self, tiny: Make) -> None:
        book, memory = Notebook(tiny), LastFeatures()
        request = book.request(TEXT[:10], [5, 6, 7])
        assert not memory.ready(request)
        self.show(memory, request, 0, 6)
        assert not memory.ready(request), "four tokens of the prompt are missing"
        self.show(memory, request, 6, 4)
        assert not memory.ready(request), "there is no token after the last feature"
        request.emit([99])
        assert memory.ready(request)
        assert memory.features([request]).tolist() == [[2 * 9.0]]
        self.show(memory, request, 10, 1, accepted=2)
        request.emit([7, 7, 7])
        assert memory.ready(request)
        assert memory.features([request, request]).tolist() == [[2 * 13.0]] * 2, "that of the third node"
        request.emit([8])
        assert not memory.ready(request)

    def test_what_ends_is_forgotten(self, tiny: Make) -> None:
        book, memory = Notebook(tiny), LastFeatures()
        first, second = (book.request(TEXT[:n], [5, 6, 7]) for n in (4, 6))
        for request in (first, second):
            self.show(memory, request, 0, len(request.tokens))
            request.emit([99])
        memory.release(first)
        memory.release(first)
        assert len(memory.kept) == 1
        assert not memory.ready(first)
        assert memory.ready(second)

    def test_a_long_piece_of_a_prompt_leaves_one_feature_in_memory(self, tiny: Make) -> None:
        memory, request = LastFeatures(), Notebook(tiny).request([*range(100)], [*range(25)])
        self.show(memory, request, 0, 100)
        request.emit([99])
        ((_, kept),) = memory.kept.values()
        assert kept.untyped_storage().nbytes() == memory.features([request]).nbytes
