"""The law of what is drawn, against p computed anew from the definitions, and the noise it is drawn with."""

from __future__ import annotations

import math
import pickle
from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernels import OPS, STOCK_OPS
from scipy import stats
from torch import Tensor

from soothsay import RequestError, SamplingParams
from soothsay.core.bad_sequences import BadSequences
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes, derive_seed, perturb
from soothsay.core.sampling_ops import NUCLEUS_WIDTH, SamplingOps
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import NoDrafter, Target

Floats = npt.NDArray[np.float64]

CHANCE = 1e-5  # a correct law fails one test in so many
NO_DRAFTER = NoDrafter(Target(None, None, None, 0))  # type: ignore[arg-type]
PROMPT, OUTPUT, ENDS = [1, 2, 2, 3], [3, 4, 4, 4, 5, 7], [0, 6]
BAD = [(9,), (7, 8), (4, 5, 7, 2), (5, 3), (3, 3, 4, 4, 4, 5, 7, 1)]
"""Bad sequences of requests with `bad_words`. After OUTPUT: 9, 8 and 2. The last begins in the prompt."""


@dataclass(frozen=True)
class Case:
    """Parameters, and the model's logits that they act on."""

    params: SamplingParams
    logits: Floats


def normal(vocab: int, scale: float) -> Floats:
    return (np.random.default_rng(vocab).normal(size=vocab) * scale).astype(np.float32).astype(np.float64)


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**given, stop_token_ids=ENDS)


SMALL, FLAT, STEEP = normal(12, 2.0), normal(600, 0.5), normal(601, 6.0)
TIES = np.round(normal(400, 1.0) * 2) / 2  # about a dozen different values
CASES = {
    "as it is": Case(params(), SMALL),
    "temperature below 1": Case(params(temperature=0.6), SMALL),
    "temperature above 1": Case(params(temperature=2.5), SMALL),
    "top_k": Case(params(top_k=5), SMALL),
    "top_k 1": Case(params(top_k=1), SMALL),
    "top_k beyond the vocabulary": Case(params(top_k=50), SMALL),
    "top_k -1": Case(params(top_k=-1), SMALL),
    "top_p": Case(params(top_p=0.7), SMALL),
    "tiny top_p": Case(params(top_p=1e-6), SMALL),
    "top_p that is just reached": Case(params(top_p=0.5), np.where(np.isin(range(12), (1, 8)), 3.0, -200.0)),
    "top_p of what top_k keeps": Case(params(temperature=2.0, top_k=6, top_p=0.8), SMALL),
    "min_p": Case(params(temperature=1.5, min_p=0.1), SMALL),
    "min_p 1": Case(params(min_p=1.0), SMALL),
    "top_p of what min_p keeps": Case(params(temperature=2.0, min_p=0.1, top_p=0.8), SMALL),
    "logit_bias": Case(params(logit_bias={1: 2.0, 8: -1.5, 3: -math.inf}), SMALL),
    "repetition_penalty": Case(params(repetition_penalty=1.7), SMALL),
    "repetition_penalty below 1": Case(params(repetition_penalty=0.8), SMALL),
    "presence_penalty": Case(params(presence_penalty=1.2), SMALL),
    "frequency_penalty": Case(params(frequency_penalty=0.6), SMALL),
    "negative penalties": Case(params(presence_penalty=-0.5, frequency_penalty=-0.3), SMALL),
    "min_tokens not yet reached": Case(params(min_tokens=len(OUTPUT) + 1), SMALL),
    "min_tokens reached": Case(params(min_tokens=len(OUTPUT)), SMALL),
    "allowed_token_ids": Case(params(allowed_token_ids=[0, 3, 8, 9]), SMALL),
    "bad_words": Case(params(bad_words=["x"]), SMALL),  # BAD has their tokens
    "bad_words among few allowed tokens": Case(params(allowed_token_ids=[1, 8, 9], bad_words=["x"]), SMALL),
    "a ban of all that is allowed has no effect": Case(
        params(allowed_token_ids=[9], bad_words=["x"], logit_bias={9: -3.0}), SMALL
    ),
    "min_tokens without anything else allowed": Case(params(allowed_token_ids=ENDS, min_tokens=20), SMALL),
    "all of it": Case(
        params(
            allowed_token_ids=[0, 1, 2, 3, 4, 6, 8, 9],
            bad_words=["x"],
            temperature=1.4,
            top_k=8,
            top_p=0.9,
            min_p=0.01,
            logit_bias={0: 9.0, 9: 1.0, 4: 2.0},
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            min_tokens=20,
        ),
        SMALL,
    ),
    "nucleus larger than the first look": Case(params(top_p=0.9), FLAT),
    "nucleus within the first look": Case(params(top_p=0.3), FLAT),
    "nucleus of a few": Case(params(top_p=0.9), STEEP),
    "top_k larger than the first look": Case(params(top_k=300), FLAT),
    "both larger than the first look": Case(params(top_k=400, top_p=0.95), FLAT),
    "top_p within the first look, of a larger top_k": Case(params(top_k=300, top_p=0.5), FLAT),
    "min_p and a large nucleus": Case(params(min_p=0.25, top_p=0.97), FLAT),
    "ties cut by top_k": Case(params(top_k=30), TIES),
    "ties cut by top_p": Case(params(top_p=0.5), TIES),
    "ties cut beyond the first look": Case(params(temperature=3.0, top_p=0.9), TIES),
}


def law(case: Case) -> Floats:
    """p by the definitions, in float64. Where some of equal logits are cut, the first stay."""
    asked, logits = case.params, case.logits.copy()
    for token, bias in (asked.logit_bias or {}).items():
        logits[token] += bias
    banned = {token for token in range(len(logits)) if token not in (asked.allowed_token_ids or [token])}
    bans = ({9, 8, 2} if asked.bad_words else set(), set(ENDS) if len(OUTPUT) < asked.min_tokens else set())
    for ban in bans:
        banned = banned if len(banned | ban) == len(logits) else banned | ban
    for token in set(PROMPT + OUTPUT):
        penalty = asked.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(OUTPUT):
        logits[token] -= asked.presence_penalty + asked.frequency_penalty * OUTPUT.count(token)
    logits[list(banned)] = -np.inf
    p = np.exp((logits - logits.max()) / asked.temperature)
    p[p < asked.min_p * p.max()] = 0
    ranked = np.argsort(-p, kind="stable")
    if asked.top_k > 0:
        p[ranked[asked.top_k :]] = 0
    p /= p.sum()
    if asked.top_p < 1:
        before = np.concatenate([[0], np.cumsum(p[ranked])[:-1]])  # probability of all that are likelier
        p[ranked[before >= asked.top_p]] = 0
    return p / p.sum()


def request_of(asked: SamplingParams, seed: int, output: Sequence[int] = OUTPUT) -> Request:
    bad = BadSequences(BAD) if asked.bad_words else None
    request = Request(PROMPT, asked, seed=seed, limit=64, drafter=NO_DRAFTER, bad_sequences=bad)
    request.emit(output)
    return request


def at_root(request: Request) -> Nodes:
    return Nodes(request, DraftTree(int(request.tokens[-1])), [0])


def rows_of(logits: Floats, count: int) -> Tensor:
    return torch.from_numpy(logits.astype(np.float32)).expand(count, -1)


def draw(case: Case, seeds: Sequence[int]) -> Tensor:
    request = request_of(case.params, 0)
    requests = [copy(request) for _ in seeds]  # made once: they differ in nothing but their seeds
    for request, seed in zip(requests, seeds, strict=True):
        request.seed = seed
    return perturb(
        rows_of(case.logits, len(seeds)).contiguous(), [at_root(request) for request in requests], OPS
    )


def noise(seeds: Sequence[int], depth: int, vocab: int) -> Floats:
    """`[seeds, positions, V]`: what stays when p is uniform."""
    tree = DraftTree(5)
    tree.extend([1] * (depth - 1))
    asked = [Nodes(request_of(params(), seed), tree, range(depth)) for seed in seeds]
    scores = perturb(torch.zeros(len(seeds) * depth, vocab), asked, OPS)
    return scores.view(len(seeds), depth, vocab).double().numpy()


def fits(counts: Floats, probabilities: Floats) -> None:
    """Pearson's chi-square, rare outcomes together, and nothing impossible among them."""
    assert counts[probabilities == 0].sum() == 0
    order = np.argsort(-probabilities)
    counts, expected = counts[order], probabilities[order] * counts.sum()
    common = int((expected >= 8).sum())
    if common < (probabilities > 0).sum():
        counts = np.append(counts[:common], counts[common:].sum())
        expected = np.append(expected[:common], expected[common:].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert len(counts) == 1 or stats.chisquare(counts, expected).pvalue > CHANCE


@pytest.mark.parametrize("name", CASES)
def test_scores_less_their_noise_are_log_p(name: str) -> None:
    case = CASES[name]
    scores = draw(case, [7])[0].double().numpy()
    p, support = law(case), np.isfinite(scores)
    found = np.where(support, scores - noise([7], 1, len(p))[0, 0], -np.inf)
    kept = np.sort(np.exp(found - np.logaddexp.reduce(found)))  # sorted: which of equals stay is free
    assert support.sum() == (p > 0).sum()
    assert kept == pytest.approx(np.sort(p), rel=1e-4, abs=1e-9)
    if name not in ("ties cut by top_k", "ties cut by top_p", "ties cut beyond the first look"):
        assert (support == (p > 0)).all()


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_p(name: str) -> None:
    case = CASES[name]
    p = law(case)
    tokens = draw(case, range(3000)).argmax(-1).numpy()
    _, value = np.unique(case.logits, return_inverse=True)  # equals count together
    by_value = value if name.startswith("ties") else np.arange(len(p))
    fits(np.bincount(by_value[tokens], minlength=len(p)), np.bincount(by_value, weights=p, minlength=len(p)))


def test_the_large_cases_are_what_their_names_say() -> None:
    kept = {name: int((law(case) > 0).sum()) for name, case in CASES.items()}
    for name in ("nucleus larger than the first look", "both larger than the first look"):
        assert kept[name] > NUCLEUS_WIDTH
    for name in ("nucleus within the first look", "top_p within the first look, of a larger top_k"):
        assert 1 < kept[name] < NUCLEUS_WIDTH
    assert len(np.unique(TIES)) < 20
    for name in ("ties cut by top_k", "ties cut by top_p", "ties cut beyond the first look"):
        last = law(CASES[name])[law(CASES[name]) > 0].min()
        assert (TIES[law(CASES[name]) == last][:, None] == TIES[law(CASES[name]) == 0]).any()


@pytest.mark.parametrize("asked", [params(), params(top_p=0.7), params(top_k=9, min_p=0.01)])
def test_columns_may_stand_for_some_tokens(asked: SamplingParams) -> None:
    """A drafter with few outputs has the noise of their tokens, as if the others were impossible."""
    ids = torch.tensor([2, 3, 5, 40, 41, 99, 150, 151, 152, 153, 154, 199])
    nodes = [at_root(request_of(asked, seed)) for seed in range(8)]
    logits = rows_of(SMALL, 8).contiguous()
    all_of_them = torch.full((8, 200), -math.inf).index_copy(1, ids, logits)
    expected = perturb(all_of_them, nodes, OPS)[:, ids]
    torch.testing.assert_close(perturb(logits, nodes, OPS, ids), expected)


def test_at_temperature_0_the_scores_are_the_adjusted_logits() -> None:
    logits = torch.from_numpy(SMALL).float()[None]
    for asked in (params(temperature=0), params(temperature=0, top_p=0.1, top_k=2, min_p=0.5)):
        assert perturb(logits, [at_root(request_of(asked, 3))], OPS) is logits, (
            "nothing to do, nothing is copied"
        )
    asked = params(temperature=0, logit_bias={8: 50.0})
    scores = perturb(logits, [at_root(request_of(asked, 3))], OPS)
    assert scores.argmax().item() == 8
    assert torch.equal(scores[0, :8], logits[0, :8])


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-300])
def test_a_temperature_near_0_is_as_good_as_0(temperature: float) -> None:
    asked = [at_root(request_of(params(temperature=temperature, top_p=p), 3)) for p in (1.0, 0.5)]
    assert perturb(rows_of(SMALL, 2), asked, OPS).argmax(-1).tolist() == [int(SMALL.argmax())] * 2


def test_the_model_s_logits_are_not_changed() -> None:
    for case in CASES.values():
        logits = rows_of(case.logits, 2).contiguous()
        before = logits.clone()
        perturb(
            logits, [at_root(request_of(replace(case.params, temperature=t), 3)) for t in (0.0, 0.9)], OPS
        )
        assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [12, 600])
def test_a_row_has_the_same_bits_in_any_batch(vocab: int) -> None:
    rng = np.random.default_rng(0)
    pool = [case.params for case in CASES.values()]
    pool += [replace(asked, temperature=0.0) for asked in pool[::3]]
    pool += [replace(asked, verifier="rejection") for asked in pool[::2] if asked.temperature > 0]
    pool += [params(temperature=4.0, top_p=0.99, verifier="rejection")]  # more than the first look finds
    logits = torch.from_numpy(rng.normal(size=(len(pool), vocab)).astype(np.float32)) * 2
    asked = [at_root(request_of(p, seed)) for seed, p in enumerate(pool)]
    alone = [perturb(logits[i : i + 1], [asked[i]], OPS)[0] for i in range(len(pool))]
    for size in (2, 3, 17, len(pool)):
        chosen = rng.permutation(len(pool))[:size].tolist()
        together = perturb(logits[chosen], [asked[i] for i in chosen], OPS)
        assert all(torch.equal(row, alone[i]) for row, i in zip(together, chosen, strict=True))


@pytest.mark.parametrize(
    "asked",
    [
        params(),
        params(repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.3),
        params(temperature=0.8, min_tokens=len(OUTPUT) + 2, logit_bias={2: 1.0}, top_p=0.9),
        params(bad_words=["x"], allowed_token_ids=[0, 2, 3, 4, 8, 9, 10], min_tokens=len(OUTPUT) + 2),
    ],
)
def test_a_node_is_treated_as_if_its_path_had_been_said(asked: SamplingParams) -> None:
    """Same position of the noise, same counts for penalties, same number of tokens so far."""
    tree = DraftTree(OUTPUT[-1])
    for chain in ([8, 8, 9], [8, 10], [3, 1], [11], [4, 5, 7]):
        tree.extend(chain)
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(len(tree), 12)).astype(np.float32)) * 2
    scores = perturb(logits, [Nodes(request_of(asked, 5), tree, range(len(tree)))], OPS)
    for node in range(len(tree)):
        said = [*OUTPUT, *(tree.tokens[n] for n in tree.path(node)[1:])]
        expected = perturb(logits[node : node + 1], [at_root(request_of(asked, 5, said))], OPS)
        assert torch.equal(scores[node], expected[0])
    some = [4, 2, 6]
    part = perturb(logits[some], [Nodes(request_of(asked, 5), tree, some)], OPS)
    assert torch.equal(part, scores[some]), "a part of the tree, in another order"


@pytest.mark.parametrize("asked", [params(), params(temperature=0.7, top_k=6, top_p=0.9, min_p=0.01)])
def test_noise_goes_by_the_place_in_the_whole_text(asked: SamplingParams) -> None:
    """It does not matter where the prompt ends: the text before a token is the same."""
    text, tree = PROMPT + OUTPUT, DraftTree(OUTPUT[-1])
    tree.extend([8, 8, 9])
    logits = rows_of(SMALL, len(tree)).contiguous()
    expected = perturb(logits, [Nodes(request_of(asked, 5), tree, range(len(tree)))], OPS)
    assert len(expected.unique(dim=0)) == len(tree), "each position has noise of its own"
    for prompt in range(1, len(text) + 1):
        request = Request(text[:prompt], asked, seed=5, limit=64, drafter=NO_DRAFTER)
        request.emit(text[prompt:])
        assert request.num_prompt == prompt
        assert torch.equal(perturb(logits, [Nodes(request, tree, range(len(tree)))], OPS), expected)


def test_noise_is_standard_gumbel_along_every_axis() -> None:
    values = noise(range(40), 50, 60)
    along = [values.reshape(-1), values[3].reshape(-1), values[:, 7].reshape(-1), values[:, :, 5].reshape(-1)]
    for some in along:
        assert stats.kstest(some, "gumbel_r").pvalue > CHANCE


def test_noise_reaches_far_into_its_tail() -> None:
    """The largest of many decides, so the upper tail must be right far beyond what a KS test sees."""
    values = noise(range(40), 50, 2000).reshape(-1)
    for level in (8.0, 10.0, 12.0):
        expected = len(values) * stats.gumbel_r.sf(level)
        assert abs((values > level).sum() - expected) < 5 * math.sqrt(expected)


def test_noise_of_tokens_positions_and_seeds_is_uncorrelated() -> None:
    uniform = stats.gumbel_r.cdf(noise(range(60), 40, 50)) - 0.5
    for axis in range(3):
        for lag in (1, 2, 3, 4, 8, 16, 32):
            moved = np.moveaxis(uniform, axis, 0)
            product = moved[lag:] * moved[:-lag] * 12
            assert abs(product.mean()) < 5 / math.sqrt(product.size)
    diagonal = uniform[:, 1:, :-1] * uniform[:, :-1, 1:] * 12
    assert abs(diagonal.mean()) < 5 / math.sqrt(diagonal.size)


def test_consecutive_draws_are_independent() -> None:
    draws = (noise(range(3000), 2, 4) + np.log([0.4, 0.3, 0.2, 0.1])).argmax(-1)
    table = np.bincount(draws[:, 0] * 4 + draws[:, 1], minlength=16).reshape(4, 4)
    assert stats.chi2_contingency(table).pvalue > CHANCE


def test_every_bit_of_a_seed_counts() -> None:
    seeds = [0, *(1 << bit for bit in range(64))]
    values = noise(seeds, 2, 3).reshape(len(seeds), -1)
    assert len(np.unique(values)) == values.size


def test_noise_of_one_token_can_be_had_without_that_of_others() -> None:
    keys = torch.tensor([[1, 2], [3, 4], [0xFFFFFFFF, 0xFFFFFFFF]])
    full = OPS.gumbel(keys, torch.arange(500)[None])
    tokens = torch.tensor([[7, 499, 0], [3, 3, 8], [250, 1, 2]])
    assert torch.equal(OPS.gumbel(keys, tokens), full.gather(1, tokens))
    assert torch.equal(OPS.gumbel(keys[1:2], torch.arange(500)[None]), full[1:2])


@pytest.mark.parametrize("word", [0, 1])
def test_both_words_of_a_key_count(word: int) -> None:
    keys = torch.zeros(33, 2, dtype=torch.int64)
    keys[1:, word] = 1 << torch.arange(32)
    values = OPS.gumbel(keys, torch.arange(4)[None])
    assert len(values.unique()) == values.numel()


def test_answers_of_one_request_have_seeds_of_their_own() -> None:
    seeds = [derive_seed(seed, index) for seed in (0, 1, 2**48 - 1) for index in range(200)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert [derive_seed(seed, 0) for seed in (0, 5)] == [0, 5]
    assert SamplingParams(seed=derive_seed(5, 1)).seed == derive_seed(5, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("frequency_penalty", None),
        ("max_tokens", -1),
        ("prompt_logprobs", -1),
        ("bad_words", [""]),
        ("bad_words", [3]),
        ("allowed_token_ids", []),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", 300),  # more than max_tokens
        ("n", 0),
        ("n", 1025),
        ("logprobs", -1),
        ("seed", -1),
        ("seed", 0.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
    ],
)
def test_a_parameter_that_cannot_be_meant_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}="):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("top_k", 2.5), ("n", 1.5), ("min_tokens", 0.5)])
def test_a_whole_number_is_asked_for_by_name(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"^{name}="):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"top_k": -1},
        {"top_p": 1},
        {"min_p": 1},
        {"max_tokens": None, "min_tokens": 10_000},
        {"max_tokens": 5, "min_tokens": 5},
        {"max_tokens": 0},
        {"prompt_logprobs": 0},
        {"n": 1024},
        {"seed": 0},
        {"logprobs": 0},
        {"stop": ["a", "b"]},
    ],
)
def test_what_is_on_the_edge_is_accepted(given: dict[str, Any]) -> None:
    SamplingParams(**given)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": {12: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"stop_token_ids": [3, 12]},
        {"allowed_token_ids": [3, 12]},
    ],
)
def test_tokens_that_the_model_lacks_are_refused_by_name(given: dict[str, Any]) -> None:
    asked = SamplingParams(**given)
    asked.check_tokens(13) if -1 not in (asked.logit_bias or {}) else None
    with pytest.raises(RequestError, match=rf"^{next(iter(given))} names token (12|-1); .* tokens 0 to 11"):
        asked.check_tokens(12)


@pytest.mark.parametrize("ops", [STOCK_OPS, OPS])
@pytest.mark.parametrize("vocab", [5, 8192, 151_937])
def test_the_best_token_of_each_row(vocab: int, ops: SamplingOps) -> None:
    scores = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    scores[1, : vocab - 1] = -math.inf
    best = ops.argmax(scores).tolist()
    assert best == scores.argmax(-1).tolist()
    assert best[1] == vocab - 1


def test_allowed_tokens_are_kept_once_and_in_four_bytes() -> None:
    asked = SamplingParams(allowed_token_ids=[7, 3, 3, np.int64(5)] * 10_000)
    assert asked.allowed_token_ids == array("i", [3, 5, 7])
    assert replace(asked, seed=1).allowed_token_ids is asked.allowed_token_ids
    assert asked.allowed_mask is asked.allowed_mask
    assert asked.allowed_mask is not None
    assert asked.allowed_mask.tolist() == [False, False, False, True, False, True, False, True]
    assert len(pickle.dumps(SamplingParams(allowed_token_ids=[*range(100_000)]))) < 500_000
    unordered = SamplingParams(allowed_token_ids=array("i", [5, 3]))
    assert unordered.allowed_token_ids == array("i", [3, 5])
    assert SamplingParams().allowed_mask is None


@pytest.mark.parametrize("token", [-1, 9, 2**40])
def test_allowed_tokens_that_the_model_lacks_are_refused(token: int) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids names"):
        SamplingParams(allowed_token_ids=[1, token, 2]).check_tokens(9)
