"""Draws on a GPU, by Triton's interpreter and by twins of its kernels, against stock operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from interpreter import dots  # noqa: F401  (mends Triton's interpreter before a kernel is imported)
from kernels import STOCK_OPS
from tiny import TINY
from torch import Tensor

from soothsay import DraftTree, SamplingParams
from soothsay.config import EngineConfig
from soothsay.core import noise
from soothsay.core.noise import noise_key
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes, draw
from soothsay.core.sampling_ops import SampledRows
from soothsay.drafters.base import NoDrafter
from soothsay.drafters.registry import build_drafter
from soothsay.engine.engine import Engine
from soothsay.model.gpu import gpu_sampling
from soothsay.model.gpu.gpu_sampling import BLOCK, GpuSampling
from soothsay.model.gpu.launching import launch
from soothsay.model.gpu.source import draws
from soothsay.model.ops.kernels import Kernels, StockKernels
from soothsay.model.transformer import Transformer

OPS = GpuSampling()
WIDTHS = (1, 7, BLOCK, 2 * BLOCK + 3)
PARAMS = [
    SamplingParams(temperature=t, top_p=p, top_k=k, min_p=m)
    for t, p, k, m in product((0.05, 1.0, 3.0), (1.0, 0.9, 0.2), (0, 1, 20, 300), (0.0, 0.05))
]


def ranks(x: Tensor) -> Tensor:
    """The ranks of all numbers, in PyTorch."""
    bits = torch.where(x.isnan(), 0x7FC00000, (x + 0.0).view(torch.int32))
    tokens = torch.arange(x.shape[1])
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (0xFFFFFFFF - tokens)


def in_parts(x: Tensor, block: int, fill: int) -> Tensor:
    """`[M, V]` -> `[M, parts, block]`."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=fill)
    return padded.view(len(x), -1, block)


def twin(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """What kernels compute, in PyTorch, for all programs at once."""
    block = constants["BLOCK"]
    if kernel is draws.noise:
        keys, tokens, out, *_ = args
        out.copy_(noise.gumbel(keys, tokens))
    elif kernel is draws.ranks:
        args[1].copy_(ranks(args[0]))
    elif kernel is draws.best:
        x, temperatures, floors, lasts, keys, out, vocab = args
        if constants["HAS_NOISE"]:
            scaled = x / temperatures[:, None]
            is_cut = (scaled < floors[:, None]) | (ranks(x) < lasts[:, None])
            noisy = scaled + noise.gumbel(keys, torch.arange(vocab)[None])
            x = noisy.masked_fill(is_cut, -math.inf)
        out.copy_(in_parts(ranks(x), block, -(2**63) + 1).topk(constants["COUNT"], dim=-1).values)
    else:
        x, temperatures, tops, floors, lasts, tokens, out, _ = args
        scaled, every = x / temperatures[:, None], ranks(x)
        below = scaled - tops[:, None]
        counts = (scaled >= floors[:, None]) & (every >= lasts[:, None]) & (below <= 0)
        mass = (below.masked_fill(~counts, 0.0).exp() * 2.0**40).long() * counts
        for place, own in enumerate(every.gather(1, tokens).T):
            out[:, :, place] = in_parts(mass * (every > own[:, None]), block, 0).sum(-1)
        out[:, :, -1] = in_parts(mass, block, 0).sum(-1)


@pytest.fixture(params=["interpreter", "twins"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """How kernels run. What they leave out is not a number, or a wrong one."""
    start = twin if request.param == "twins" else launch

    def started(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        out = next(x for x in reversed(args) if isinstance(x, Tensor))
        out.fill_(math.nan if out.is_floating_point() else 2**62 + 12345)
        start(kernel, grid, *args, **constants)

    monkeypatch.setattr(gpu_sampling, "launch", started)
    return started


def rows_of(params: list[SamplingParams], seed: int = 0) -> SampledRows:
    keys = [noise_key(seed, row) for row in range(len(params))]
    return SampledRows.of(params, keys, torch.device("cpu"))


def numbers(rows: int, width: int, sharpness: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(width + rows)
    return (sharpness * torch.randn(rows, width, generator=generator)).round(decimals=1)  # many are equal


def test_the_bits_of_noise(run: object) -> None:
    words, ends = 1 << 32, [*range(8), *range((1 << 32) - 8, 1 << 32)]
    keys = torch.tensor([[0, 0], [words - 1, 5], [123, 456]])
    unmixed = torch.tensor([[*ends, *torch.randint(0, words, (2000,)).tolist()]])
    assert torch.equal(OPS.gumbel(keys, unmixed), noise.gumbel(keys, unmixed))
    apart = torch.randint(0, words, (3, 40))
    assert torch.equal(OPS.gumbel(keys, apart), noise.gumbel(keys, apart))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_come_first_and_of_equal_ones_the_first(run: object, width: int) -> None:
    x = numbers(5, width)
    x[1, 1:] = -math.inf
    x[2] = x[2].clamp(max=-1.0)
    x[2, 3:4], x[2, 5:6] = -0.0, 0.0  # equal
    order = x.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(OPS.argmax(x), order.indices[:, 0])
    for count in (1, 3, 16, 17, 200):
        values, places = OPS.largest(x, count)
        assert torch.equal(values, order.values[:, :count])
        assert torch.equal(places, order.indices[:, :count])
    factors = torch.tensor([0.5, 1.0, 2.0, 1.0, 1.5])
    values, _ = OPS.largest(x, 3, factors)
    torch.testing.assert_close(values, STOCK_OPS.largest(x, 3, factors)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_race_has_the_scores_of_stock_operations(run: object, width: int) -> None:
    x, keys = numbers(5, width), torch.randint(0, 1 << 32, (5, 2))
    temperatures = torch.tensor([0.5, 1.0, 2.0, 1.0, 1.5])
    scores = x / temperatures[:, None] + STOCK_OPS.gumbel(keys, torch.arange(width)[None])
    order = scores.sort(dim=-1, descending=True, stable=True)
    for count in (1, 3, 16):
        values, tokens = OPS.race(x, temperatures, keys, count)
        assert torch.equal(values, order.values[:, :count])
        assert torch.equal(tokens, order.indices[:, :count])


@pytest.mark.parametrize("width", WIDTHS)
def test_masses_and_log_probabilities(run: object, width: int) -> None:
    x, factors = numbers(5, width), torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])
    places, tops = torch.randint(0, width, (5,)), x.amax(-1)
    floors = torch.tensor([-math.inf, -math.inf, *(tops[2:] - 5).tolist()])
    floors = floors.minimum(x.gather(1, places[:, None])[:, 0])
    given = factors, tops, floors, places
    expected = STOCK_OPS.mass_before(x, *given)
    torch.testing.assert_close(OPS.mass_before(x, *given), expected, rtol=0, atol=1e-6)
    count = min(4, width)
    found, known = OPS.logprobs(x, places, count), STOCK_OPS.logprobs(x, places, count)
    torch.testing.assert_close(found[0], known[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(found[2], known[2], rtol=1e-6, atol=2e-6)
    assert torch.equal(x.gather(1, found[1]), x.gather(1, known[1]))
    assert OPS.logprobs(x, places, 0)[1].shape == (5, 0)


@pytest.mark.parametrize("sharpness", [0.3, 4.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_draws_are_those_of_stock_operations(
    run: object, width: int, sharpness: float, request: pytest.FixtureRequest
) -> None:
    some = PARAMS if "twins" in request.node.name else PARAMS[(width + int(sharpness)) % 7 :: 11]
    logits = sharpness * torch.randn(len(some), width, generator=torch.Generator().manual_seed(width))
    rows = rows_of(some, width)
    expected, scores = STOCK_OPS.draw(logits, rows).wait()
    tokens, found = OPS.draw(logits, rows).wait()
    assert tokens == expected
    assert found == pytest.approx(scores, rel=1e-6)


def test_a_row_alone_has_the_bits_that_it_has_among_others(run: object) -> None:
    """Each operation, whatever the other rows are."""
    width = BLOCK + 9
    params = [PARAMS[5], PARAMS[13], SamplingParams(temperature=0.7, top_p=0.8, min_p=0.01)]
    x, rows = numbers(3, width), rows_of(params)
    factors, tops = torch.tensor([1.0, 0.7, 1.3]), x.amax(-1)
    floors, places = tops - 3, tops[:, None].eq(x).int().argmax(-1)
    temperatures, probs = factors.reciprocal(), x.softmax(-1)
    for row in range(3):
        own, one = slice(row, row + 1), rows.select([row], x)[0]
        operations: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (OPS.largest, (x, 4, factors)),
            (OPS.largest, (x, 40, factors)),
            (OPS.race, (x, temperatures, rows.keys, 16)),
            (OPS.mass_before, (x, factors, tops, floors, places)),
            (OPS.logprobs, (x, places, 3)),
            (OPS.log_total, (x,)),
            (OPS.running_total, (probs,)),
        ]
        for operation, given in operations:
            alone = operation(*(a[own] if isinstance(a, Tensor) else a for a in given))
            among = operation(*given)
            pairs = zip(alone, among, strict=True) if isinstance(alone, tuple) else [(alone, among)]
            assert all(torch.equal(one_, all_[own]) for one_, all_ in pairs)
        drawn, all_drawn = OPS.draw(x[own], one), OPS.draw(x, rows)
        assert torch.equal(drawn.tokens, all_drawn.tokens[own])
        assert torch.equal(drawn.scores, all_drawn.scores[own])
        assert torch.equal(OPS.scores(x[own], one), OPS.scores(x, rows)[own])


def test_top_p_that_cuts_all_contenders_is_drawn_again(run: object) -> None:
    """It keeps one token, which does not win the race against thousands of equal ones."""
    logits = torch.zeros(6, 1500)
    logits[:, 1234] = 4.2
    rows = rows_of([SamplingParams(temperature=1.0, top_p=0.01)] * 6)
    drawn = OPS.draw(logits, rows)
    assert (drawn.tokens < 0).any()
    assert (drawn.tokens == 1234).any()
    assert drawn.wait()[0] == [1234] * 6


def test_open_draws_beside_greedy_ones(run: object) -> None:
    """Requests of one step, in rows of one tensor."""
    logits = torch.zeros(6, 1500)
    logits[:, 1234] = 4.2
    asked = list[Nodes]()
    for seed, temperature in enumerate((1.0, 0.0, 1.0)):
        params, drafter = SamplingParams(temperature=temperature, top_p=0.01), NoDrafter(None)  # type: ignore[arg-type]
        tree = DraftTree(3)
        tree.extend([5] * seed)
        request = Request([1, 2, 3], params, seed=seed, limit=40, drafter=drafter)
        asked.append(Nodes(request, tree, range(1 + seed)))
    drawn = draw(logits, asked, OPS)
    assert (drawn.tokens < 0).any()
    assert drawn.wait()[0] == [1234] * 6


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_what_is_not_finite_has_no_finite_score(run: object, value: float) -> None:
    for params in (SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=1.0, min_p=0.1)):
        tokens, scores = OPS.draw(torch.full((2, 300), value), rows_of([params] * 2)).wait()
        assert all(0 <= token < 300 for token in tokens)
        assert all(score == value or math.isnan(score) for score in scores)


class WithDraws(StockKernels):
    """Stock operations, but for those of sampling."""

    sampling = OPS


def answers(kernels: Kernels, params: list[SamplingParams]) -> list[Request]:
    """Requests that were answered together, with drafts by suffix matching."""
    torch.manual_seed(0)
    model = Transformer(TINY, kernels).eval().requires_grad_(False)
    engine = Engine(model, None, EngineConfig(kv_tokens=2048, max_context=256))
    drafter = build_drafter("suffix", engine.target)
    requests = [
        Request([*range(5, 10)] * 3 + [5] * i, own, seed=i, limit=32, drafter=drafter)
        for i, own in enumerate(params)
    ]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return requests


def test_an_engine_answers_as_with_stock_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of a tree are drawn ahead, with their log-probabilities."""
    monkeypatch.setattr(gpu_sampling, "launch", twin)
    params = [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(logprobs=0),
        SamplingParams(top_p=0.9, repetition_penalty=1.3, logprobs=2),
        SamplingParams(top_k=5, min_p=0.02, logit_bias={7: 2.0}),
        SamplingParams(verifier="rejection", logprobs=1),
    ]
    found, expected = answers(WithDraws(), params), answers(StockKernels(), params)
    for one, other in zip(found, expected, strict=True):
        assert one.failure is None
        assert one.tokens.tolist() == other.tokens.tolist()
        for own, known in zip(one.pieces, other.pieces, strict=True):
            assert (own.logprobs is None) is (known.logprobs is None)
            if own.logprobs is not None and known.logprobs is not None:
                assert own.logprobs.token == known.logprobs.token
                assert own.logprobs.logprob == pytest.approx(known.logprobs.logprob, abs=1e-5)
                assert own.logprobs.top == pytest.approx(known.logprobs.top, abs=1e-5)


@pytest.mark.slow
def test_a_million_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the twins. Of tokens at the border of top-p, the sums of stock operations may cut another one."""
    monkeypatch.setattr(gpu_sampling, "launch", twin)
    monkeypatch.setattr(gpu_sampling, "BLOCK", 64)
    wrong = 0
    for seed in range(250):
        generator = torch.Generator().manual_seed(seed)
        logits = (1 + seed % 5) * torch.randn(4000, 150, generator=generator)
        params = [PARAMS[(seed + row) % len(PARAMS)] for row in range(4000)]
        rows = rows_of(params, seed)
        drawn, expected = OPS.draw(logits, rows).wait()[0], STOCK_OPS.draw(logits, rows).wait()[0]
        wrong += sum(a != b for a, b in zip(drawn, expected, strict=True))
    assert wrong <= 10
