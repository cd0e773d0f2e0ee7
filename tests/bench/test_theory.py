"""Predicted speed-ups: against every outcome, published formulas, and a clock of ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from soothsay import DraftTree
from soothsay.bench.spec.run_times import RunTimes, TreeCounts
from soothsay.bench.spec.spec_page import COLUMNS, page, table
from soothsay.bench.spec.spec_results import Lap, SpecResults
from soothsay.bench.spec.theory import predicted_seconds, speedups_by_nodes
from soothsay.errors import SoothsayError
from soothsay.model.timing.pass_times import PassTimes

VOCABULARY = 3


def chain(p: float, length: int) -> TreeCounts:
    """Steps with a chain whose tokens are each right with probability `p`: all outcomes by their weight."""
    tree = DraftTree(0)
    tree.extend([1] * length, log_prob=-0.1)
    counts = TreeCounts()
    for right in range(length):
        counts.record(tree, list(range(1, right + 1)), p**right * (1 - p))
    counts.record(tree, list(range(1, length + 1)), p**length)
    return counts


def decoding(trees: TreeCounts, passes: float, pass_time: float, outside: float = 0.0) -> RunTimes:
    return spent(passes, passes * pass_time, outside, 100.0, trees)


def spent(passes: float, verify: float, outside: float, context: float, trees: TreeCounts) -> RunTimes:
    """What a run took after its prompts."""
    fixed = {"answers": 1, "different": 0, "tokens": 0, "prefill": 0.0, "ahead": 0}
    counts = {"context": context, "tree_sizes": trees.sizes, "accepted_ranks": trees.ranks}
    return RunTimes(**fixed, **counts, seconds=verify + outside, verify=verify, passes=passes)


def plain(steps: float, pass_time: float, outside: float = 0.0, passes: float | None = None) -> RunTimes:
    return decoding(TreeCounts([steps]), steps if passes is None else passes, pass_time, outside)


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    tree = DraftTree(0)
    while len(tree) < nodes:
        parent, token = int(rng.integers(len(tree))), int(rng.integers(VOCABULARY))
        tree.add(parent, token, -float(rng.integers(3)))  # few values, so that scores tie
    return tree


@pytest.mark.parametrize("seed", range(5))
def test_a_replay_is_what_cut_trees_would_have_brought(seed: int) -> None:
    """For every tree of some random ones and everything that the target may say."""
    rng = np.random.default_rng(seed)
    counts, seen = TreeCounts(), list[tuple[DraftTree, tuple[int, ...]]]()
    for size in (1, 2, 5, 9):
        tree = random_tree(rng, size)
        for said in product(range(VOCABULARY), repeat=max(tree.depths)):
            counts.record(tree, tree.walk(said)[1:])
            seen.append((tree, said))
    for nodes in range(1, 11):
        cut = [tree.prune(nodes, 99) for tree, _ in seen]
        walks = [len(tree.walk(said)) for tree, (_, said) in zip(cut, seen, strict=True)]
        assert counts.tokens(nodes) == pytest.approx(sum(walks) / len(walks))
        sizes = dict.fromkeys((size for size, _ in counts.cut(nodes)), 0.0)
        for size, share in counts.cut(nodes):
            sizes[size] += share
        assert sizes == pytest.approx({size: [*map(len, cut)].count(size) / len(cut) for size in sizes})


@pytest.mark.parametrize("p", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("length", [1, 4, 7])
def test_chains_bring_what_leviathan_says(p: float, length: int) -> None:
    """Leviathan et al. 2023: expected tokens (equation 1), and the speed-up (theorem 3.8)."""
    counts = chain(p, length)
    for k in range(length + 1):
        assert counts.tokens(k + 1) == pytest.approx((1 - p ** (k + 1)) / (1 - p))
    cost = 0.05  # of one draft token, in passes
    drafted = decoding(counts, 1.0, pass_time=9.0, outside=cost * length)
    found = speedups_by_nodes(plain(10.0, 1.0), drafted, lambda rows, context: 1.0)
    assert len(found) == length + 1
    expected = (1 - p ** (length + 1)) / ((1 - p) * (cost * length + 1))
    assert found[-1] == pytest.approx(expected)
    assert found[0] == 1.0


@pytest.mark.parametrize(("p", "slope"), [(0.9, 0.1), (0.7, 0.1), (0.5, 0.3), (0.2, 0.9)])
def test_the_best_number_of_nodes(p: float, slope: float) -> None:
    def seconds(rows: int, context: float) -> float:
        return 1 + slope * (rows - 1)

    found = speedups_by_nodes(plain(1.0, 1.0), decoding(chain(p, 12), 1.0, 1.0), seconds)
    by_hand = [sum(p**i for i in range(n)) / seconds(n, 0) for n in range(1, 14)]
    assert found == pytest.approx(by_hand)
    assert 1 <= int(np.argmax(found)) + 1 < 13  # the best is not the largest


def test_the_speed_of_the_machine_drops_out() -> None:
    """Passes of the run took half again as long as when they were measured."""

    def seconds(rows: int, context: float) -> float:
        return 0.5 + rows / 100 + context / 1000

    slow = 1.5
    one, four = slow * seconds(1, 100.0), slow * seconds(4, 100.0)
    drafted = decoding(chain(0.5, 3), 1.0, pass_time=four, outside=0.25)
    expected = predicted_seconds(plain(8.0, one, outside=2.0), drafted, seconds)
    assert expected == pytest.approx(four + 0.25)


def test_requests_at_once_share_a_pass() -> None:
    """Four requests: a pass has four times the rows of one."""
    trees = TreeCounts(sizes=[0, 0, 40], ranks=[20, 10])
    drafted = spent(10, 99.0, 0.0, 0.0, trees)
    base = plain(70.0, pass_time=4.0, passes=70 / 4)
    assert predicted_seconds(base, drafted, lambda rows, context: float(rows)) == pytest.approx(10 * 12)
    by_nodes = speedups_by_nodes(base, drafted, lambda rows, context: float(rows))
    assert by_nodes[1:] == pytest.approx([1.5 / 2, 1.75 / 3])


def test_what_is_known_of_several_is_added() -> None:
    parts = [
        spent(2, 1.0, 0.5, 10.0, TreeCounts([2], [])),
        spent(6, 3.0, 0.25, 30.0, TreeCounts([2, 4], [3])),
    ]
    whole = RunTimes.total(parts)
    assert whole == replace(spent(8, 4.0, 0.75, 25.0, TreeCounts([4, 4], [3])), answers=2)
    assert whole.at_once == 1.0


# in results


TIMES = PassTimes([1, 2, 4], [64], [[1.0, 1.25, 2.0]])


def results(path: Path | None = None, rounds: Sequence[int] = (1, 2, 3)) -> SpecResults:
    """Two questions of 13 tokens. With the drafter, six steps of four nodes bring all but the first."""
    conditions = {"model": "m", "dtype": "d", "left_out": {}, "questions": 2, "max_tokens": 13, "nodes": 4,
                  "threads": 1, "processor": "p", "soothsay": "0"}  # fmt: skip
    found = SpecResults(conditions, path)
    for number in rounds:
        found.add_times((0.0, 1, number), TIMES)
        for question, slow in ((1, 1.0), (2, 2.0)):
            noise = 100.0 * (number == 2)  # the median knows nothing of it
            times = {"answers": 1, "different": 0, "tokens": 13, "prefill": slow, "ahead": 1}
            runs = {
                "none": RunTimes(**times, seconds=slow * (1 + 12 + 3), draft=0.0, verify=slow * 12, steps=13,
                                 first=1, passes=12, context=50.0, tree_sizes=[12]),
                "x": RunTimes(**times, seconds=slow * (1 + 11 + 5) + noise, draft=slow * 2 + noise,
                              verify=slow * 11, steps=7, first=1, drafted=18, passes=6,
                              context=60.0, tree_sizes=[0, 0, 0, 6], accepted_ranks=[3, 3, 0]),
            }  # fmt: skip
            found.add(Lap(0.0, 1, number, "qa", [question], 0, [question], 0, runs))
    return found


def test_scores_have_predictions() -> None:
    base, x = (row.overall for row in results().rows())
    assert base.speedup == base.predicted == 1.0
    assert base.best_nodes == 1
    # six passes of T(4) = 2 at the scale of plain decoding, 1 or 2; five seconds, or ten, outside of passes
    assert x.predicted == pytest.approx(16 / (1 + 6 * 2.0 + 5))
    assert x.speedup == pytest.approx(16 / (1 + 11 + 5))
    # the same passes; the scale is 36 / 24 over both questions
    seconds = [6 * T * 3 + 15 for T in (1.25, (1.25 + 2.0) / 2, 2.0)]
    rates = [12 * tokens / s for tokens, s in zip((1.5, 2.0, 2.0), seconds, strict=True)]
    assert x.by_nodes == pytest.approx([1.0, *(rate / (24 / 45) for rate in rates)])
    assert x.best_nodes == 3


def test_predictions_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    content = table(results(path))
    cells = dict(zip(content.headings, content.rows[1], strict=True))
    assert cells["predicted"] == f"{16 / 18:.2f} (-6%)"
    assert cells["best nodes"] == "3"
    assert "best nodes: the largest tree that theory expects" in content.caption
    close = replace(results().rows()[1].overall, speedup=1.0, predicted=0.999)
    assert COLUMNS["predicted"](close) == "1.00 (+0%)"
    assert "that theory expects, by the most nodes of a tree" in page([results()])
    assert SpecResults.read(path).rows() == results().rows()


def test_without_times_nothing_is_predicted() -> None:
    found = SpecResults({"left_out": {}})
    run = RunTimes(answers=1, different=None, tokens=9, seconds=1.0, prefill=0.1, ahead=1)
    found.add(Lap(0.0, 1, 1, "qa", [1], 0, [1], 0, {"none": run}))
    for times in (False, True):  # a run without steps has none either
        if times:
            found.add_times((0.0, 1, 1), TIMES)
        (row,) = found.rows()
        assert (row.overall.predicted, row.overall.best_nodes) == (0.0, 0)
        assert not {"predicted", "best nodes"} & {*table(found).headings}


@pytest.mark.parametrize(
    "entry",
    [
        {"passes": {}},
        {"setting": [0.0, 1, 1], "passes": {"rows": [1], "contexts": [], "measured": [[[1.0]]]}},
        {"setting": [0.0, 1, 1], "passes": {"rows": [1], "contexts": [1], "measured": [[["x"]]]}},
        {"setting": [0.0, 1], "passes": {"rows": [1], "contexts": [1], "measured": [[[1.0]]]}},
        {"setting": [0.0, 1, []], "passes": {"rows": [1], "contexts": [1], "measured": [[[1.0]]]}},
    ],
)
def test_damaged_times_are_refused(entry: dict, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(f"{{}}\n{json.dumps(entry)}\n")
    with pytest.raises(SoothsayError, match="measurements of 'bench spec' are expected"):
        SpecResults.read(file)
