"""A model that drafts with a part of its own layers: which ones, and that its KV is none the worse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from soothsay import LLM, DrafterError, SamplingParams
from soothsay.bench.grow import grow
from soothsay.bench.grown_tensors import GrownShape
from soothsay.cli.app import app
from soothsay.config import EngineConfig
from soothsay.core.batch import Batch, Rows
from soothsay.core.request import Request
from soothsay.drafters.base import Target
from soothsay.drafters.models.layer_skipping import LayerSkip, SkipSet
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.train.skip_search import search

Make = Callable[..., Transformer]

VOCAB = 97
FOUR = {"num_layers": 4, "windows": (None,) * 4}
GREEDY = SamplingParams(max_tokens=30, temperature=0)
SAMPLED = SamplingParams(max_tokens=30, temperature=0.9, seed=11)
PENALIZED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2, top_p=0.95)
MANY = [replace(p, seed=i) for i, p in enumerate([SAMPLED, GREEDY, PENALIZED] * 2)]
STRESSES: dict[str, dict[str, Any]] = {
    "at ease": {},
    "preempted": {"kv_tokens": 120, "block_size": 8},
    "in small chunks": {"max_rows": 11, "block_size": 4},
    "with a tree cut short": {"max_tree": 3},
}


def prompts() -> list[list[int]]:
    """The longer ones begin alike."""
    common = np.random.default_rng(9).integers(0, VOCAB, 24).tolist()
    return [[*common[:length], length] for length in (24, 3, 17, 24, 20, 8)]


def without(model: Transformer, skip: Sequence[int]) -> Transformer:
    """A model that has not got these layers; the rest are the same."""
    kept = [layer for layer in range(model.spec.num_layers) if layer not in skip]
    config = replace(model.spec, layers=tuple(model.spec.layers[layer] for layer in kept))
    smaller = Transformer(config).eval().requires_grad_(False)
    for mine, theirs in zip(smaller.blocks, kept, strict=True):
        mine.load_state_dict(model.blocks[theirs].state_dict())
    for name in ("embedding", "norm", "head"):
        getattr(smaller, name).load_state_dict(getattr(model, name).state_dict())
    return smaller


def target_of(model: Transformer, path: Path | None = None) -> Target:
    return Target(model, None, EngineConfig(block_size=16), 4, path)


# layers of a pass


@pytest.mark.parametrize("skip", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_a_pass_through_some_layers_is_that_of_a_model_that_has_no_others(
    skip: tuple[int, ...], tiny: Make
) -> None:
    model = tiny(0, **FOUR)
    layers = [layer for layer in range(4) if layer not in skip]
    batch = Batch.pack([Rows(np.arange(20), 0)], group=model.spec.group, windows=model.spec.windows)
    if skip != (0, 1, 2, 3):
        assert torch.equal(model(batch, layers=layers)[0], without(model, skip)(batch)[0])
    cache = model.new_cache(2, 16)
    hidden, taps = model(batch, cache, layers=layers, taps=(*layers, 4))
    assert torch.equal(model.kernels.norm(taps[-1], model.norm, torch.float32), hidden)
    written = [bool(layer.any()) for layer in cache.layers]
    assert written == [layer not in skip for layer in range(4)]


# guesses


@pytest.mark.parametrize("stress", STRESSES)
@pytest.mark.parametrize("shape", [{"depth": 4}, {"depth": 3, "width": 2, "branch": 2}])
def test_with_all_layers_the_first_guess_is_always_right(
    shape: dict[str, int], stress: str, tiny: Make
) -> None:
    """Same bits, same noise; wrong keys would show."""
    target = tiny(0)
    llm = LLM(target, drafter="none", **{"kv_tokens": 4096, **STRESSES[stress]})
    plain = LLM(target, drafter="none", kv_tokens=4096).generate(prompts(), MANY)
    results = llm.generate(prompts(), MANY, drafter=lambda t: LayerSkip(t, skip=(), **shape))
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    reached = [result.stats.acceptance for result in results]
    assert max(map(len, reached)) == (2 if "cut" in stress else shape["depth"])
    for shares in reached:
        assert set(shares[: 1 if "cut" in stress and "width" in shape else 2]) == {1.0}


@pytest.mark.parametrize("skip", [(1,), (0, 2), (2, 3)])
def test_a_first_guess_is_what_the_other_layers_say_with_the_targets_keys(
    skip: tuple[int, ...], tiny: Make
) -> None:
    """Against a pass of its own: committed tokens through all layers, the root through some."""
    model = tiny(0, **FOUR)
    guesses: list[tuple[list[int], int]] = []

    class Watched(LayerSkip):
        def propose(self, requests: Sequence[Request]) -> list[Any]:
            trees = super().propose(requests)
            guesses.extend(
                (request.tokens.tolist(), tree.tokens[1])
                for request, tree in zip(requests, trees, strict=True)
                if len(tree) > 1
            )
            return trees

    llm = LLM(model, drafter=lambda t: Watched(t, skip=skip), kv_tokens=512)
    llm.generate(prompts(), GREEDY)
    assert len({guess for _, guess in guesses}) > 10
    layers = [layer for layer in range(4) if layer not in skip]
    for tokens, guess in guesses[::7]:
        cache, table = model.new_cache(1, 128), np.array([0])
        shape = {"block_size": 128, "group": model.spec.group, "windows": model.spec.windows}
        model(Batch.pack([Rows(np.array(tokens[:-1]), 0, table)], **shape), cache)
        root = Batch.pack([Rows(np.array(tokens[-1:]), len(tokens) - 1, table)], **shape)
        assert model.logits(model(root, cache, layers=layers)[0]).argmax().item() == guess


def test_early_exit_is_leaving_out_the_last(tiny: Make) -> None:
    model = tiny(0, **FOUR)
    assert LayerSkip(target_of(model), exit=3).layers == (0, 1, 2)
    assert LayerSkip(target_of(model), skip="3, 0").layers == (1, 2)
    assert LayerSkip(target_of(model), skip=2).layers == (0, 1, 3)
    assert LayerSkip(target_of(model), skip=()).layers == (0, 1, 2, 3)


def test_where_more_than_the_last_token_waits_nothing_is_guessed(tiny: Make) -> None:
    drafter = LayerSkip(target_of(tiny(0)))
    request = Request(range(20), GREEDY, seed=0, limit=60, drafter=drafter)
    request.max_nodes = 8
    for cached in (0, 18):
        request.cached = cached
        (tree,) = drafter.propose([request])
        assert len(tree) == 1


# the target's KV


@pytest.mark.parametrize("shape", [{"depth": 5}, {"depth": 3, "width": 3, "branch": 3}])
def test_the_targets_keys_and_values_are_those_of_plain_decoding(shape: dict[str, int]) -> None:
    """Bit by bit, of every committed token, after every step; prefixes are shared, guesses often wrong."""
    engine = {"dtype": "float32", "kv_tokens": 1024, "block_size": 4}
    plain, drafted = (LLM("sibyl", drafter="none", **engine) for _ in range(2))
    drafter = LayerSkip(drafted.engine.target, skip=(2, 5), **shape)

    def kv(llm: LLM, blocks: Sequence[int], count: int) -> torch.Tensor:
        slots = [block * 4 + i for block in blocks for i in range(4)][:count]
        return torch.stack([layer[:, slots] for layer in llm.engine.cache.layers])

    hits = 0
    for prompt in ("Once upon a time there was a bear.", "Once upon a time there was a fox."):
        stream = plain.stream(prompt, SAMPLED)
        next(iter(stream))
        blocks = plain.engine.scheduler.running[0].blocks  # grows, and stays when the request loses it
        expected = stream.result
        count = len(expected.prompt_token_ids + expected.token_ids) - 1
        want = kv(plain, blocks, count)
        stream = drafted.stream(prompt, SAMPLED, drafter=drafter)
        next(iter(stream))
        (request,) = drafted.engine.scheduler.running
        steps, blocks = 0, request.blocks
        while request.finish_reason is None:
            assert torch.equal(kv(drafted, blocks, request.cached), want[:, :, : request.cached])
            drafted.engine.step()
            steps += 1
        assert torch.equal(kv(drafted, blocks, request.cached), want[:, :, : request.cached])
        assert steps > 5
        assert stream.result.token_ids == expected.token_ids
        assert 0 < stream.result.stats.accepted < stream.result.stats.drafted
        hits += request.num_prefix_hits
    assert hits > 0


# what can be asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit": 5}, r"^layer-skip\(exit=5, depth=0\): .* 4 layers$"),
        ({"exit": -1}, r"exit=-1"),
        ({"depth": -1}, r"depth=-1"),
        ({"width": 0}, r"^layer-skip\(width=0, branch=1\): each must be at least 1"),
        ({"skip": "4"}, r"skip='4'\): the target has layers 0 to 3$"),
        ({"skip": (0, -1)}, r"the target has layers 0 to 3"),
        ({"skip": "a few"}, r"skip='a few'\) is not understood: write"),
        ({"skip": 2.5}, r"skip=2.5\) is not understood"),
        ({"skip": "1", "exit": 2}, r"give only one of them"),
        ({"skip": "1", "model": "x"}, r"give only one of them"),
        ({"model": "nowhere"}, r"^there is no layer set at nowhere: 'soothsay train layer-skip' writes one"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], message: str, tiny: Make) -> None:
    with pytest.raises(DrafterError, match=message):
        LayerSkip(target_of(tiny(0, **FOUR)), **options)


def test_a_set_that_was_searched_for_is_found_beside_the_target(tiny: Make, tmp_path: Path) -> None:
    model = tiny(0, **FOUR)
    found = SkipSet((1, 3), agreement=0.9, cost=0.3)
    assert LayerSkip(target_of(model, tmp_path)).layers == (0, 1, 3), "every other layer of the middle half"
    found.save(tmp_path / "drafters" / "layer-skip", 4)
    beside = LayerSkip(target_of(model, tmp_path))
    assert (beside.layers, beside.grower.shape.depth) == ((0, 2), found.depth)
    assert found.depth == 5
    named = LayerSkip(target_of(model), model=tmp_path / "drafters" / "layer-skip", depth=2)
    assert (named.layers, named.grower.shape.depth) == ((0, 2), 2)
    with pytest.raises(DrafterError, match=r"is of a model with 4 layers, not of one with 2$"):
        LayerSkip(target_of(tiny(0), tmp_path))
    config = tmp_path / "drafters" / "layer-skip" / "config.json"
    for damage in ({"skip": "all"}, {"skip": [7]}, {"agreement": None}):
        config.write_text(json.dumps({**json.loads(config.read_text()), **damage}))
        with pytest.raises(DrafterError):
            LayerSkip(target_of(model, tmp_path))
    config.write_text("{")
    with pytest.raises(DrafterError, match="is not what 'soothsay train layer-skip' writes"):
        LayerSkip(target_of(model, tmp_path))


# the search


def test_speed_up_is_that_of_the_law_of_guesses_in_a_row() -> None:
    """Compare with a simulation: draft tokens are right independently, up to the first wrong one."""
    rng, one = np.random.default_rng(0), SkipSet((0,), agreement=0.8, cost=0.25)
    for depth in (1, 3, 8):
        right = (rng.random((200_000, depth)) < 0.8).cumprod(1).sum(1).mean()
        assert one.speedup_at(depth) == pytest.approx((right + 1) / (1 + depth * 0.25), rel=0.01)
    assert one.speedup == max(one.speedup_at(depth) for depth in range(1, 9))
    assert SkipSet((0,), 1.0, 0.1).depth == 8
    assert SkipSet((0,), 0.0, 0.5).speedup < 1


def agreements(
    model: Transformer, samples: Tensor, skips: Iterable[tuple[int, ...]]
) -> dict[tuple[int, ...], float]:
    """The share of tokens after which the model without these layers says what the whole model says.

    One pass for each token and each set of layers. The tokens before have the whole model's keys and values.
    """
    c, skips = model.spec, list(skips)
    shape = {"block_size": 16, "group": c.group, "windows": c.windows}
    same: dict[tuple[int, ...], list[bool]] = {skip: [] for skip in skips}
    for tokens in samples.numpy():
        for t in range(len(tokens)):
            cache, table = model.new_cache(1, 16), np.array([0])
            if t:
                model(Batch.pack([Rows(tokens[:t], 0, table)], **shape), cache)
            root = Batch.pack([Rows(tokens[t : t + 1], t, table)], **shape)
            said = model.logits(model(root, cache)[0]).argmax()
            for skip in skips:
                layers = [layer for layer in range(c.num_layers) if layer not in skip]
                same[skip].append(bool(model.logits(model(root, cache, layers=layers)[0]).argmax() == said))
    return {skip: float(np.mean(those)) for skip, those in same.items()}


def test_agreement_is_counted_with_the_whole_models_keys_before_each_token(tiny: Make) -> None:
    """Against one pass for each token."""
    model = tiny(0, **FOUR)
    samples = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, (3, 12)))
    found = search(model, samples)
    share = agreements(model, samples, [(layer,) for layer in range(4)])
    assert share[found[0].skip] == max(share.values())
    assert len(set(share.values())) > 1
    every = agreements(model, samples, [one.skip for one in found])
    assert [one.agreement for one in found] == pytest.approx(list(every.values()))


def test_layers_that_do_nothing_are_found(tiny: Make) -> None:
    model = tiny(0, num_layers=6, windows=(None,) * 6)
    idle = (1, 2, 4)
    for layer in idle:
        model.blocks[layer].attention.o.weight.zero_()
        model.blocks[layer].mlp.down.weight.zero_()
    samples = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, (4, 16)))
    calls: list[tuple[int, int, int]] = []
    found = search(model, samples, lambda *call: calls.append(call))
    best = max(found, key=lambda one: one.speedup)
    assert best.skip == idle
    assert best.agreement == 1.0
    assert best.depth == 8
    assert [len(one.skip) for one in found] == list(range(1, len(found) + 1))
    assert all(set(a.skip) < set(b.skip) for a, b in pairwise(found))
    assert calls[0] == (0, 6, 0)
    assert calls[-1][2] < 6 * 6 / 2 * 64, "most layers are not tried again"
    weights = {n: p.numel() for n, p in model.named_parameters() if "norm" not in n and "embedding" not in n}
    whole, kept = (
        sum(weights.values()),
        sum(
            count
            for n, count in weights.items()
            if not n.startswith(tuple(f"blocks.{layer}." for layer in idle))
        ),
    )
    assert best.cost == pytest.approx(kept / whole)


def test_greedy_sets_are_about_as_good_as_the_best_of_all(tiny: Make) -> None:
    model = tiny(2, num_layers=5, windows=(None,) * 5)
    for layer in range(5):  # of different weight
        model.blocks[layer].attention.o.weight.mul_(0.002 * (layer + 1))
        model.blocks[layer].mlp.down.weight.mul_(0.002 * (layer + 1))
    samples = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, (3, 16)))
    found = {len(one.skip): one for one in search(model, samples)}
    pairs = agreements(model, samples, combinations(range(5), 2))
    assert found[2].agreement == pytest.approx(pairs[found[2].skip])
    assert found[2].agreement >= max(pairs.values()) - 0.05
    assert found[2].agreement > min(pairs.values()) + 0.1


def test_a_grown_models_new_blocks_can_be_left_out(tmp_path: Path) -> None:
    """They compute nothing, so that the model drafts for itself without a mistake."""
    checkpoint, new = open_checkpoint("sibyl"), 11
    grow(
        checkpoint,
        GrownShape.parse(f"layers={new}", parse_model_config(checkpoint.config)),
        tmp_path / "grown",
    )
    out = tmp_path / "grown" / "drafters" / "layer-skip"
    args = ["train", "layer-skip", str(tmp_path / "grown"), "--samples", "2", "--tokens", "16"]
    result = CliRunner().invoke(app, [*args, "--dtype", "float32"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    stored = json.loads((out / "config.json").read_text())
    assert stored["agreement"] == 1.0
    assert len(stored["skip"]) == new - 8
    assert f"{out} has the best of them." in result.stdout
    llm = LLM(tmp_path / "grown", drafter="layer-skip", dtype="float32", kv_tokens=512)
    answer = llm.generate([1, 2, 3], replace(SAMPLED, ignore_eos=True))
    assert set(answer.stats.acceptance) == {1.0}
    assert answer.stats.mean_accepted > 4


def test_the_search_says_what_it_lacks(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    args = ["train", "layer-skip", "sibyl", str(short), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "less than one sample of 128" in result.stderr
    assert not (tmp_path / "out").exists()
