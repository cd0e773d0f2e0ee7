"""The exact output distribution of each verifier, by enumeration of all random outcomes.

The target's p and the drafter's q are random distributions over a few tokens, given the tokens so far. The
tests enumerate every random decision of drafting and of verification, each with its probability. The sums
over all outcomes are the distribution of the emitted tokens. A test calls a distribution a law.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernels import OPS
from verifying import match, run

from soothsay import LLM, DraftTree, ModelError, Observation, RequestError, SamplingParams
from soothsay.core import verify
from soothsay.core.request import Request
from soothsay.core.sampling import Keyed, Nodes, perturb
from soothsay.core.verify import VERIFIERS, Chance, Evidence, Guessing, Promise, Verdict, Verifier, Walk
from soothsay.drafters.base import Drafter, NoDrafter
from soothsay.drafters.models.draft_model import DraftModel
from soothsay.drafters.trees import guesses
from soothsay.drafters.trees.growth import ConfidentShape, GrowingTree, TreeGrower, TreeShape
from soothsay.drafters.trees.guesses import add_draws, draw_rates, draw_tokens
from soothsay.drafters.trees.templates import TreeLayout, draw_template
from soothsay.engine import verification
from soothsay.model.transformer import Transformer

Floats = npt.NDArray[np.float64]
Said = tuple[int, ...]
Law = Callable[[Said], Floats]

LAWFUL = [name for name, verifier in VERIFIERS.items() if verifier.promise is Promise.LAW]
DRAWN = [name for name in LAWFUL if VERIFIERS[name].guessing is not Guessing.ONE_DRAW]


class Script:
    """A `Chance` that takes the given decisions, then always the first option. It records all options."""

    def __init__(self, decisions: list[int]):
        self.decisions = decisions
        self.options: list[list[tuple[int, float]]] = []

    def _decide(self, options: list[tuple[int, float]]) -> int:
        at = len(self.options)
        self.options.append(options)
        if at == len(self.decisions):
            self.decisions.append(0)
        return options[self.decisions[at]][0]

    def happens(self, probability: float) -> bool:
        assert -1e-12 <= probability <= 1 + 1e-12
        both = [(1, probability), (0, 1 - probability)]
        return bool(self._decide([each for each in both if each[1] > 1e-15]))

    def pick(self, weights: Floats) -> int:
        assert weights.min() >= 0
        total = weights.sum()
        return self._decide([(i, w / total) for i, w in enumerate(weights.tolist()) if w > 0])


def outcomes(run: Callable[[Chance], object]) -> Iterator[tuple[float, object]]:
    """Yield each possible result of `run`, with its probability."""
    decisions: list[int] | None = []
    while decisions is not None:
        script = Script(decisions)
        result = run(script)
        taken = zip(script.decisions, script.options, strict=True)
        yield math.prod(options[choice][1] for choice, options in taken), result
        decisions = None
        for at in reversed(range(len(script.options))):
            if script.decisions[at] + 1 < len(script.options[at]):
                decisions = [*script.decisions[:at], script.decisions[at] + 1]
                break


def random_law(seed: int, vocab: int, zeros: float = 0.0) -> Law:
    """Make random distributions, one a sequence. Tokens but the likeliest get p = 0 at rate `zeros`."""

    @cache
    def law(said: Said) -> Floats:
        rng = np.random.default_rng([seed, *said])
        p = rng.dirichlet(np.ones(vocab) * 0.8)
        p[(rng.random(vocab) < zeros) & (p < p.max())] = 0.0
        return p / p.sum()

    return law


def says(tree: DraftTree, node: int) -> Said:
    return tuple(tree.tokens[above] for above in tree.path(node)[1:])


def verified(verify: Callable[[DraftTree, Chance], Walk], tree: DraftTree, p: Law, chance: Chance) -> Verdict:
    def evidence(nodes: Sequence[int]) -> Evidence:
        with np.errstate(divide="ignore"):
            rows = np.stack([np.log(p(says(tree, node))) for node in nodes])
        return Evidence(rows.argmax(-1).tolist(), torch.from_numpy(rows))

    return run(verify(tree, chance), evidence)


@dataclass(frozen=True)
class Plan:
    """How to draw a tree: from a template, as the drafters do, then pruned as the engine does."""

    template: tuple[Said, ...]
    keep: int = 99  # nodes that are left after pruning
    deep: int = 99  # depth that is left after pruning
    extra: tuple[Said, ...] = ()  # draft tokens that are not drawn from q
    end: int = -1  # an end token: it gets no children

    def draw(self, q: Law, replaced: bool, chance: Chance) -> DraftTree:
        tree, nodes = DraftTree(0), {(): 0}
        counts: dict[Said, int] = defaultdict(int)
        for path in self.template:
            counts[path[:-1]] += 1
        for above, count in counts.items():
            if above in nodes and tree.tokens[nodes[above]] != self.end:
                law = q(says(tree, nodes[above]))
                tokens = draw_tokens(law, count, replaced, chance)
                below = add_draws(tree, nodes[above], law, tokens, replaced)
                nodes |= {(*above, place): node for place, node in below.items()}
        for said in self.extra:
            tree.extend(said, -0.9)
        return tree.prune(self.keep, self.deep)


CHAIN = ((0,), (0, 0), (0, 0, 0))
WIDE = ((0,), (1,), (2,))
BUSHY = ((0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1))
PLANS = {
    "nothing": Plan(()),
    "chain": Plan(CHAIN),
    "chain, cut": Plan(CHAIN, keep=3),
    "chain that ends": Plan(CHAIN, end=1),
    "siblings": Plan(WIDE),
    "siblings, cut": Plan(WIDE, keep=3),
    "two levels": Plan(BUSHY),
    "two levels, cut": Plan(BUSHY, keep=5),
    "two levels, cut in depth": Plan(BUSHY, deep=1),
    "two levels, one of them cut in its siblings": Plan(BUSHY, keep=4),
    "two levels and guesses that were not drawn": Plan(BUSHY[:3], extra=((2, 0), (1,))),
    "guesses that were not drawn": Plan((), extra=((2, 0), (1, 1), (1, 2))),
}


def emitted(name: str, plan: Plan, p: Law, q: Law) -> dict[Said, float]:
    """Return the probability of each sequence that one step can emit."""
    verifier = VERIFIERS[name]

    def step(chance: Chance) -> Verdict:
        tree = plan.draw(q, verifier.guessing is Guessing.WITH_REPLACEMENT, chance)
        verdict = verified(verifier.verify, tree, p, chance)
        assert [tree.tokens[node] for node in verdict.path] == verdict.tokens[:-1]
        assert [tree.parents[node] for node in verdict.path] == [0, *verdict.path][:-1]
        return verdict

    law: dict[Said, float] = defaultdict(float)
    for chance, verdict in outcomes(step):
        assert isinstance(verdict, Verdict)
        law[tuple(verdict.tokens)] += chance
    return law


def in_full(law: dict[Said, float], p: Law, length: int) -> dict[Said, float]:
    """Return the probability of each sequence of this length.

    Steps that emit fewer tokens are completed with tokens of the target.
    """
    full: dict[Said, float] = defaultdict(float)
    vocab = len(p(()))
    for said, chance in law.items():
        for rest in product(range(vocab), repeat=max(length - len(said), 0)):
            whole = (*said, *rest)
            later = math.prod(p(whole[:i])[whole[i]] for i in range(len(said), length))
            full[whole[:length]] += chance * later
    return full


def target(p: Law, length: int) -> dict[Said, float]:
    return {
        said: math.prod(p(said[:i])[said[i]] for i in range(length))
        for said in product(range(len(p(()))), repeat=length)
    }


def same_law(found: dict[Said, float], expected: dict[Said, float]) -> bool:
    return all(abs(found.get(said, 0.0) - chance) < 1e-9 for said, chance in expected.items())


def mean_length(law: dict[Said, float]) -> float:
    return sum(chance * len(said) for said, chance in law.items())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", LAWFUL)
def test_what_is_emitted_follows_the_target_s_law(name: str, plan: str) -> None:
    for seed, zeros in ((1, 0.0), (2, 0.4)):
        p, q = random_law(seed, 3, zeros), random_law(seed + 100, 3, zeros)
        law = emitted(name, PLANS[plan], p, q)
        assert sum(law.values()) == pytest.approx(1)
        for length in (1, 2, 3):
            assert same_law(in_full(law, p, length), target(p, length)), length


def sampling(tree: DraftTree, chance: Chance) -> Walk:
    """A verifier as a user would write it: draw from p, and follow the tree while it has what was drawn."""
    path: list[int] = []
    node: int | None = 0
    while node is not None:
        evidence = yield [node]
        token = chance.pick(evidence.p())
        node = tree.children[node].get(token)
        path += [] if node is None else [node]
    return Verdict(path, [tree.tokens[n] for n in path] + [token])


def greedy_first(tree: DraftTree, chance: Chance) -> Walk:
    """One that breaks the law: it accepts the root's first child if that is likely at all."""
    p = (yield [0]).p()
    for token, child in tree.children[0].items():
        if p[token] > 0.2:
            return Verdict([child], [token, chance.pick((yield [child]).p())])
    return Verdict([], [chance.pick(p)])


@pytest.mark.parametrize("plan", PLANS)
def test_a_verifier_of_ones_own_follows_the_law_or_is_found_out(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is registered as users do, and goes through the checks of `Verifier.walk`."""
    for name, own in (("sampling", sampling), ("greedy", greedy_first)):
        rule = Verifier(own, Guessing.ONE_DRAW, Promise.LAW)
        walk = partial(rule.walk, vocab_size=3)
        monkeypatch.setitem(VERIFIERS, name, replace(rule, verify=walk))
    p, q = random_law(1, 3), random_law(101, 3)
    laws = [in_full(emitted(name, PLANS[plan], p, q), p, 2) for name in ("sampling", "greedy")]
    assert [same_law(law, target(p, 2)) for law in laws] == [True, plan == "nothing"]


@pytest.mark.parametrize("name", LAWFUL)
def test_a_drafter_that_is_the_target_is_always_right(name: str) -> None:
    p = random_law(5, 4)
    law = emitted(name, Plan(CHAIN), p, p)
    assert {len(said) for said, chance in law.items() if chance > 1e-9} == {4}


def test_a_chain_is_accepted_as_often_as_the_laws_agree() -> None:
    """The first draft token is accepted with probability sum min(p, q) (Leviathan et al.)."""
    p, q = random_law(1, 4), random_law(2, 4)
    for name in LAWFUL:
        law = emitted(name, Plan(((0,),)), p, q)
        right = sum(chance for said, chance in law.items() if len(said) == 2)
        assert right == pytest.approx(np.minimum(p(()), q(())).sum())


def test_block_verification_accepts_no_less_than_rejection() -> None:
    gains = []
    for seed in range(12):
        p, q = random_law(seed, 3), random_law(seed + 50, 3)
        rejection, block = (mean_length(emitted(name, Plan(CHAIN), p, q)) for name in ("rejection", "block"))
        gains.append(block - rejection)
    assert min(gains) > -1e-9
    assert max(gains) > 0.02


def test_block_verification_accepts_what_its_paper_says() -> None:
    """The acceptance length is the one of Sun et al.: it is computed by their recursion over all chains."""
    p, q = random_law(3, 3), random_law(53, 3)

    def expected(said: Said, weight: float) -> float:  # number of tokens accepted after `said`
        if len(said) == 3:
            return 0.0
        total = 0.0
        for token, chance in enumerate(q(said)):
            own = min(1.0, weight * p(said)[token] / chance)
            total += chance * (own + expected((*said, token), own))
        return total

    assert mean_length(emitted("block", Plan(CHAIN), p, q)) - 1 == pytest.approx(expected((), 1.0))


def test_traversal_accepts_no_less_than_recursive_rejection_of_the_same_draws() -> None:
    gains = []
    for seed in range(4):
        p, q = random_law(seed, 3), random_law(seed + 50, 3)
        rsd, traversal = (mean_length(emitted(name, Plan(BUSHY), p, q)) for name in ("rsd", "traversal"))
        gains.append(traversal - rsd)
    assert np.mean(gains) > 0.005
    assert min(gains) > -1e-9


def test_draws_without_replacement_accept_no_less_than_with() -> None:
    for seed in range(8):
        p, q = random_law(seed, 4), random_law(seed + 50, 4)
        specinfer, rsd = (mean_length(emitted(name, Plan(WIDE), p, q)) for name in ("specinfer", "rsd"))
        assert rsd > specinfer - 1e-9


def test_all_tokens_drawn_without_replacement_are_always_right() -> None:
    p, q = random_law(1, 3), random_law(2, 3)
    for name in ("rsd", "traversal"):
        law = emitted(name, Plan(WIDE), p, q)
        assert {len(said) for said, chance in law.items() if chance > 1e-12} == {2}


def test_guesses_that_were_not_drawn_are_accepted_as_often_as_the_target_says_them() -> None:
    p = random_law(4, 4)
    for name in ("rejection", "specinfer", "rsd"):
        law = emitted(name, Plan((), extra=((1,), (3, 2))), p, p)
        right = {said: chance for said, chance in law.items() if len(said) > 1}
        assert sum(right[said] for said in right if said[0] == 1) == pytest.approx(p(())[1])
        assert sum(right[said] for said in right if said[0] == 3) == pytest.approx(p(())[3])
        both = sum(right[said] for said in right if said[:2] == (3, 2) and len(said) == 3)
        assert both == pytest.approx(p(())[3] * p((3,))[2])


@pytest.mark.parametrize("name", LAWFUL)
def test_guesses_that_were_not_drawn_stand_beside_those_that_were(name: str) -> None:
    """With a child for each token, one of them is accepted."""
    p, q = random_law(6, 4), random_law(7, 4)
    law = emitted(name, Plan(((0,),), extra=((0,), (1,), (2,), (3,))), p, q)
    assert {len(said) for said, chance in law.items() if chance > 1e-9} == {2}


@pytest.mark.parametrize("name", LAWFUL)
def test_a_guess_that_neither_law_allows_is_never_accepted(name: str) -> None:
    p, tree = np.array([0.5, 0.0, 0.3, 0.2]), DraftTree(0)
    add_draws(tree, 0, np.array([1.0, 0.0, 0.0, 0.0]), [1], replaced=False)
    verify = VERIFIERS[name].verify
    for chance, verdict in outcomes(lambda chance: verified(verify, tree, lambda said: p, chance)):
        assert isinstance(verdict, Verdict)
        assert not (verdict.path and chance > 0)


@pytest.mark.parametrize("name", [name for name in VERIFIERS if name != "match"])
def test_scores_that_are_no_numbers_are_an_error(name: str) -> None:
    tree = DraftTree(0)
    tree.extend([1, 2])
    with pytest.raises(ModelError, match="not finite"):
        run(
            VERIFIERS[name].verify(tree, Keyed(0)),
            lambda nodes: Evidence([0] * len(nodes), torch.full((len(nodes), 4), math.nan)),
        )


class TestTheLawIsLostIf:
    """Mistakes that the tests above detect: each test makes one, and the distribution must change."""

    def lost(self, name: str, plan: Plan) -> bool:
        p, q = random_law(1, 3), random_law(101, 3)
        law = emitted(name, plan, p, q)
        return not all(same_law(in_full(law, p, length), target(p, length)) for length in (1, 2, 3))

    @pytest.mark.parametrize("name", LAWFUL)
    def test_p_and_q_are_swapped(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            verify._Guess, "ratio", lambda g, p: 1.0 if p == 0 else min(1.0, float(g.q[g.token]) / p)
        )
        assert self.lost(name, Plan(CHAIN))

    @pytest.mark.parametrize("name", LAWFUL)
    def test_the_bonus_is_drawn_from_p(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify._Guess, "rest", lambda g, p: p)
        assert self.lost(name, Plan(CHAIN))

    @pytest.mark.parametrize("name", DRAWN)
    def test_what_is_left_is_not_made_to_sum_to_1(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify, "_normalized", lambda rest, p: rest if rest.any() else p)
        assert self.lost(name, Plan(WIDE))

    @pytest.mark.parametrize("name", DRAWN)
    def test_it_is_forgotten_how_guesses_were_drawn(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = Plan.draw

        def mistaken(plan: Plan, q: Law, replaced: bool, chance: Chance) -> DraftTree:
            tree = draw(plan, q, replaced, chance)
            tree.draws = {node: replace(drawn, replaced=not replaced) for node, drawn in tree.draws.items()}
            return tree

        monkeypatch.setattr(Plan, "draw", mistaken)
        assert self.lost(name, Plan(WIDE))

    def test_a_guess_drawn_twice_counts_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = Plan.draw

        def once(plan: Plan, q: Law, replaced: bool, chance: Chance) -> DraftTree:
            tree = draw(plan, q, replaced, chance)
            for node, drawn in tree.draws.items():
                tokens = tuple(dict.fromkeys(drawn.tokens))
                tree.draws[node] = replace(drawn, tokens=tokens)
            return tree

        monkeypatch.setattr(Plan, "draw", once)
        assert self.lost("specinfer", Plan(WIDE))

    @pytest.mark.parametrize("name", DRAWN)
    def test_the_tree_is_cut_by_what_was_drawn(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The cut keeps the likelier of two siblings, so it depends on the drawn tokens."""
        draw = Plan.draw

        def cut(plan: Plan, q: Law, replaced: bool, chance: Chance) -> DraftTree:
            tree = draw(plan, q, replaced, chance)
            drawn = tree.draws[0]
            best = max(drawn.tokens, key=lambda token: drawn.q[token])
            pruned = DraftTree(0)
            add_draws(pruned, 0, drawn.q, [best], replaced)
            return pruned

        monkeypatch.setattr(Plan, "draw", cut)
        assert self.lost(name, Plan(WIDE[:2]))


def test_a_tree_keeps_the_law_without_its_draws() -> None:
    """A tree merged from other trees has no `draws`, and must keep the distribution all the same."""
    p, q = random_law(1, 3), random_law(101, 3)
    for name in LAWFUL:
        verify_ = VERIFIERS[name].verify

        def step(chance: Chance, verify_: Callable[[DraftTree, Chance], Walk] = verify_) -> Verdict:
            tree = Plan(BUSHY).draw(q, False, chance)
            tree.draws.clear()
            return verified(verify_, tree, p, chance)

        law: dict[Said, float] = defaultdict(float)
        for chance, verdict in outcomes(step):
            assert isinstance(verdict, Verdict)
            law[tuple(verdict.tokens)] += chance
        assert same_law(in_full(law, p, 2), target(p, 2))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_tree_that_is_cut_keeps_the_first_draws_and_says_so(replaced: bool) -> None:
    tree, q = DraftTree(0), np.array([0.1, 0.2, 0.3, 0.4])
    tokens = [3, 2, 3, 1] if replaced else [3, 2, 0, 1]
    add_draws(tree, 0, q, tokens, replaced)
    below = tree.children[0][2]
    add_draws(tree, below, q, [1], replaced)
    for at_root in range(1, 5):
        cut = tree.prune(1 + at_root, 9)
        assert list(cut.draws[0].tokens) == tokens[:at_root]
        assert cut.draws[0].log_probs == tree.draws[0].log_probs[:at_root]
        assert (cut.draws[0].q is q, cut.draws[0].replaced) == (True, replaced)
        assert set(cut.children[0]) == set(tokens[:at_root])
        assert len(cut.draws) == 1
        assert all(cut.scores[node] <= cut.scores[cut.parents[node]] for node in range(1, len(cut)))
    flat = tree.prune(99, 1)
    assert [*flat.draws] == [0]
    assert max(flat.depths) == 1


class TestTypicalAcceptance:
    def verdicts(self, p: Law, *chains: Said) -> list[tuple[float, Verdict]]:
        tree = DraftTree(0)
        for chain in chains:
            tree.extend(chain)
        found = []
        for chance, verdict in outcomes(
            lambda chance: verified(VERIFIERS["typical"].verify, tree, p, chance)
        ):
            assert isinstance(verdict, Verdict)
            found.append((chance, verdict))
        return found

    def test_what_is_likely_enough_is_accepted_and_the_bonus_follows_p(self) -> None:
        p = random_law(7, 4)
        entropy = -(p(()) * np.log(p(()))).sum()
        floor = min(0.3, 0.09 * math.exp(-entropy))
        for token in range(4):
            verdicts = self.verdicts(p, (token,))
            accepted = int(p(())[token] > floor)
            assert all(len(verdict.path) == accepted for _, verdict in verdicts)
            for chance, verdict in verdicts:
                assert chance == pytest.approx(p((token,) * accepted)[verdict.tokens[-1]])

    def test_of_several_paths_it_is_the_deepest_and_of_those_the_likeliest(self) -> None:
        def p(said: Said) -> Floats:
            return np.array([0.5, 0.3, 0.15, 0.05])

        paths = {tuple(v.tokens[:-1]) for _, v in self.verdicts(p, (0,), (1, 2), (2, 1, 3), (1, 1))}
        assert paths == {(2, 1, 3)}
        paths = {tuple(v.tokens[:-1]) for _, v in self.verdicts(p, (1, 2), (1, 1), (0,))}
        assert paths == {(1, 1)}
        paths = {tuple(v.tokens[:-1]) for _, v in self.verdicts(p, (2, 0), (0, 1))}
        assert paths == {(0, 1)}, "the likeliest as a whole"

    def test_an_unlikely_guess_is_refused_where_the_target_is_sure(self) -> None:
        def p(said: Said) -> Floats:
            return np.array([0.9, 0.04, 0.03, 0.03])

        assert {tuple(v.path) for _, v in self.verdicts(p, (1,), (2,))} == {()}
        assert {tuple(v.path) for _, v in self.verdicts(p, (1,), (0,))} == {(2,)}

    def test_it_says_that_it_is_lossy(self) -> None:
        assert [name for name, verifier in VERIFIERS.items() if not verifier.lossless] == ["typical"]


class TestDrawing:
    def test_with_replacement_each_is_drawn_from_q(self) -> None:
        q = random_law(1, 3)(())
        for chance, tokens in outcomes(lambda chance: draw_tokens(q, 3, True, chance)):
            assert chance == pytest.approx(math.prod(q[token] for token in tokens))  # type: ignore[attr-defined]

    def test_without_replacement_each_is_drawn_from_what_is_left(self) -> None:
        q = random_law(1, 4)(())
        seen = set()
        for chance, tokens in outcomes(lambda chance: draw_tokens(q, 3, False, chance)):
            a, b, c = tokens  # type: ignore[misc]
            assert chance == pytest.approx(q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b]))
            seen.add((a, b, c))
        assert len(seen) == 24

    def test_no_more_than_there_are(self) -> None:
        q = np.array([0.0, 0.4, 0.0, 0.6])
        for _, tokens in outcomes(lambda chance: draw_tokens(q, 4, False, chance)):
            assert sorted(tokens) == [1, 3]  # type: ignore[call-overload]

    def test_rates_never_rise_and_leave_some_to_chance(self) -> None:
        rates = draw_rates(20)
        assert rates == sorted(rates, reverse=True)
        assert 0 < rates[-1] < sum(rates) < 1

    def test_templates_are_of_their_kind(self) -> None:
        assert draw_template(Guessing.ONE_DRAW, 3, 4, 9) == [(0,), (0, 0), (0, 0, 0)]
        tree = draw_template(Guessing.WITHOUT_REPLACEMENT, 3, 4, 9)
        assert len(tree) == 9
        assert all(path[:-1] == () or path[:-1] in tree for path in tree)
        assert all((*path[:-1], path[-1] - 1) in tree for path in tree if path[-1])


class TestChances:
    def test_picks_follow_their_weights(self) -> None:
        """The weights span several blocks, and some are 0. Counts are within five standard deviations."""
        rng = np.random.default_rng(0)
        weights = rng.random(400) * (rng.random(400) < 0.3)
        weights[100:240] *= 40
        chance, draws = Keyed(3, 1), 20_000
        counts = np.bincount([chance.pick(weights) for _ in range(draws)], minlength=400)
        expected = draws * weights / weights.sum()
        assert (counts[weights == 0] == 0).all()
        assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1).all()
        large = expected > 5
        z = (((counts - expected) ** 2)[large] / expected[large]).sum() - large.sum()
        assert abs(z) < 5 * math.sqrt(2 * large.sum())

    def test_certain_things_are_certain(self) -> None:
        chance = Keyed(1)
        assert all(chance.happens(1.0) and not chance.happens(0.0) for _ in range(500))
        one = np.zeros(300)
        one[299] = 1e-30
        assert {chance.pick(one) for _ in range(50)} == {299}

    def test_the_largest_chance_picks_no_weight_of_0(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In some of these, the sum of the last block rounds to more than its weights one by one."""
        monkeypatch.setattr(Keyed, "_uniform", lambda self: 1 - 2.0**-52)
        for seed in range(200):
            weights = np.zeros(300)
            weights[:200] = np.random.default_rng(seed).random(200)
            assert weights[Keyed(1).pick(weights)] > 0

    @pytest.mark.parametrize("probability", [0.02, 0.5, 0.9])
    def test_chances_happen_as_often_as_they_should(self, probability: float) -> None:
        count = sum(Keyed(seed, 2).happens(probability) for seed in range(20_000))
        assert abs(count - 20_000 * probability) < 5 * math.sqrt(20_000 * probability * (1 - probability))

    def test_one_key_one_sequence(self) -> None:
        keys = [(1, 2, 3), (1, 2, 4), (2, 2, 3), (1, 2), (1, 1, 3)]
        sequences = [tuple(c.pick(np.ones(1000)) for c in [Keyed(*key)] * 6) for key in keys]
        assert len(set(sequences)) == len(keys)
        assert sequences[0] == tuple(c.pick(np.ones(1000)) for c in [Keyed(*keys[0])] * 6)


def test_an_unknown_verifier_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"verifier='fast' is not known; choose from match, rejection, "):
        SamplingParams(verifier="fast")


def test_at_temperature_0_every_verifier_is_match() -> None:
    for name in VERIFIERS:
        assert SamplingParams(temperature=0, verifier=name).rule is VERIFIERS["match"]
        assert SamplingParams(temperature=0.5, verifier=name).rule is VERIFIERS[name]


class Table(Drafter):
    """A drafter that grows trees from a given distribution."""

    def __init__(self, q: Law, shape: TreeShape):
        self.q, self.grower, self.max_nodes = q, TreeGrower(shape, OPS), shape.max_nodes

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return self.grower.grow(self, requests)

    def ready(self, request: Request) -> bool:
        return True

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[torch.Tensor, None]:
        return self.expand_nodes(growing, None)

    def expand_nodes(self, growing: Sequence[GrowingTree], states: None) -> tuple[torch.Tensor, None]:
        said = [says(g.expanded, node) for g in growing for node in g.frontier]
        return torch.from_numpy(np.log([self.q(each) for each in said])).float(), None


def request_for(name: str, nodes: int, depth: int, ends: Sequence[int] = ()) -> Request:
    params = SamplingParams(verifier=name, max_tokens=depth + 1, stop_token_ids=ends)
    request = Request([1, 0], params, seed=1, limit=depth + 3, drafter=Table(random_law(0, 3), FLAT))
    request.max_nodes = nodes
    return request


FLAT = ConfidentShape(depth=1, width=1, branch=1)


class TestTheLawOfTreesThatDraftersMake:
    """The same enumeration, with trees that the drafters' own code draws."""

    def law(
        self, request: Request, trees: Callable[[], list[DraftTree]], cut: int, patch: pytest.MonkeyPatch
    ) -> dict[Said, float]:
        p, sizes = random_law(1, 3), set()

        def step(chance: Chance) -> Verdict:
            patch.setattr(guesses, "Keyed", lambda *key: chance)
            (tree,) = trees()
            sizes.add(len(tree))
            assert len(tree) <= request.max_nodes
            assert len(tree) == 1 + sum(len({*drawn.tokens}) for drawn in tree.draws.values())
            tree = tree.prune(cut, request.max_depth)
            return verified(request.params.rule.verify, tree, p, chance)

        law: dict[Said, float] = defaultdict(float)
        for chance, verdict in outcomes(step):
            assert isinstance(verdict, Verdict)
            law[tuple(verdict.tokens)] += chance
        assert max(sizes) > 2
        for length in (1, 2, 3):
            assert same_law(in_full(law, p, length), target(p, length))
        return law

    @pytest.mark.parametrize("ends", [(), (1,)])
    @pytest.mark.parametrize("cut", [3, 4, 99])
    @pytest.mark.parametrize("name", LAWFUL)
    def test_grown(self, name: str, cut: int, ends: Said, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter, request = Table(random_law(101, 3), ConfidentShape(3, 2, 2)), request_for(name, 6, 2, ends)
        law = self.law(request, lambda: drafter.propose([request]), cut, monkeypatch)
        if cut == 99:
            assert max(map(len, law)) == 3

    @pytest.mark.parametrize("cut", [3, 4, 99])
    @pytest.mark.parametrize("kind", ["best-first", "static"])
    @pytest.mark.parametrize("name", LAWFUL)
    def test_laid_out(self, name: str, kind: str, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
        logits = torch.from_numpy(np.log([random_law(101, 3)((depth,)) for depth in range(2)])).float()
        layout, request = TreeLayout(kind, 2, 3, 20, OPS), request_for(name, 6, 2)
        law = self.law(request, lambda: layout.trees([request], logits, [2]), cut, monkeypatch)
        if cut == 99:
            assert max(map(len, law)) == 3


@pytest.mark.parametrize("drafter", ["prompt-lookup(min_ngram=1)", "eagle3"])
def test_answers_come_again_alone_or_in_a_batch(sibyl: LLM, drafter: str) -> None:
    """With the same drafter, tokens depend on the seed and the tree only, not on other requests."""
    prompt = sibyl.chat_prompt([{"role": "user", "content": "one two three one two three one"}])
    params = [SamplingParams(verifier=name, seed=5, max_tokens=12) for name in VERIFIERS]
    together = sibyl.generate([prompt] * len(params), params, drafter=drafter)
    for own, result in zip(params, together, strict=True):
        assert sibyl.generate(prompt, own, drafter=drafter).token_ids == result.token_ids
        assert result.stats.drafted > 0
        greedy = replace(own, temperature=0)
        expected = sibyl.generate(prompt, replace(greedy, verifier="match"), drafter="none").token_ids
        assert sibyl.generate(prompt, greedy, drafter=drafter).token_ids == expected


def test_mixed_verifiers_with_little_memory_and_few_rows() -> None:
    llm = LLM("sibyl", dtype="float32", drafter="none", kv_tokens=144, block_size=8, max_rows=24)
    names = [*VERIFIERS] * 2
    prompts = [list(range(20 + i, 50 + i)) for i in range(len(names))]
    params = [
        SamplingParams(verifier=name, seed=i, max_tokens=1 + 3 * (i % 5), ignore_eos=True, top_p=0.95)
        for i, name in enumerate(names)
    ]
    drafters = [["eagle3", "medusa", "prompt-lookup(min_ngram=1)", "none"][i % 4] for i in range(len(names))]
    results = llm.generate(prompts, params, drafter=drafters)
    assert [len(result.token_ids) for result in results] == [own.max_tokens for own in params]
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks


class Seer(NoDrafter):
    """A drafter that drafts half of the vocabulary, and checks each observation."""

    max_nodes = 40

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for tree, token, below in product(trees, range(0, 12, 2), range(4)):
            tree.add(tree.add(0, token, -0.1), below, -0.1)
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            assert seen.tree is not None or seen.verdict is None
            if seen.tree is not None and seen.verdict is not None:
                assert seen.logits is not None
                if seen.request.params.rule is VERIFIERS["match"]:  # the verdict of all nodes' draws
                    nodes = Nodes(seen.request, seen.tree, range(len(seen.tree)))
                    draws = perturb(seen.logits, [nodes], OPS).argmax(-1).tolist()
                    assert match(seen.tree, draws) == seen.verdict


def test_a_drafter_is_shown_what_was_said(tiny: Callable[..., Transformer]) -> None:
    model = tiny(1, vocab_size=12)
    model.head.weight.mul_(0.3)
    names = ["match", *LAWFUL]
    params = [SamplingParams(verifier=name, seed=3, max_tokens=20, temperature=0.8) for name in names]
    results = LLM(model, drafter=Seer, kv_tokens=1024).generate([[1, 2, 3]] * len(names), params)
    assert min(result.stats.accepted for result in results) > 3


def test_no_chance_is_used_twice(tiny: Callable[..., Transformer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node of each step has a key of its own, in drafting and in verification."""
    keys: list[tuple[int, ...]] = []

    def noting(*key: int) -> Keyed:
        keys.append(key)
        return Keyed(*key)

    monkeypatch.setattr(guesses, "Keyed", noting)
    monkeypatch.setattr(verification, "Keyed", noting)
    model = tiny(1, vocab_size=12)
    llm = LLM(
        model, drafter=lambda target: DraftModel(target, model, depth=3, width=2, branch=3), kv_tokens=1024
    )
    params = [SamplingParams(verifier="traversal", seed=seed, max_tokens=20) for seed in (3, 4)]
    llm.generate([[1, 2, 3], [1, 2, 3]], params)
    assert len({*keys}) == len(keys) > 40
