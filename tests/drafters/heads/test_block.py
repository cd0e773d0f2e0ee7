"""The block drafter: that its guesses are what plain attention over its rows says, whatever happens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from families import random_oracle
from one_shot import (
    GREEDY,
    MANY,
    STRESSES,
    Watched,
    check_best_tree,
    check_grown_tree,
    check_refined_tree,
    counting_model,
    log_probs,
    made,
    most_features_kept,
    prompts,
    serve,
)
from oracles import block_correction, block_logits, block_outputs, cell_path, make_block_head, randomize
from slow import mostly_slow
from tiny import TINY, adapted
from torch import Tensor

from soothsay import LLM, DrafterError, SamplingParams
from soothsay.config import DType
from soothsay.core.batch import Batch, Rows
from soothsay.core.tree import DraftTree
from soothsay.drafters.heads.block import BlockConfig, BlockDrafter, BlockHead
from soothsay.drafters.heads.hydra import Hydra, HydraConfig, HydraHead
from soothsay.drafters.heads.medusa import Medusa, MedusaConfig, MedusaHead
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

Make = Callable[..., Transformer]


HEADS = {
    "independent": randomize(make_block_head()),
    "one layer, qwen3": randomize(make_block_head(size=2, layers=1, qk_norm=True, num_kv_heads=4)),
    "markov": randomize(make_block_head(rank=5)),
    "shortlist": randomize(make_block_head(shortlist=range(0, 97, 2))),
    "shortlist, markov": randomize(make_block_head(rank=5, shortlist=range(5, 97, 2))),
    "cell": randomize(make_block_head(layers=1, cell=16)),
    "shortlist, cell": randomize(make_block_head(cell=32, shortlist=range(5, 97, 2))),
}
for _head in HEADS.values():
    if _head.refiner is not None:
        _head.refiner.out.weight.mul_(0.05)  # tables are in bfloat16: large corrections have large errors


@pytest.mark.parametrize("variant", HEADS)
@pytest.mark.parametrize("stress", mostly_slow(STRESSES))
def test_guesses_are_the_likeliest_by_plain_attention(stress: str, variant: str, tiny: Make) -> None:
    target, head = tiny(0), HEADS[variant]
    config = head.config

    def make(t: object) -> BlockDrafter:
        return BlockDrafter(t, copy.deepcopy(head), nodes=20, branch=3, width=2)  # type: ignore[arg-type]

    drafter, _ = serve(target, make, stress)
    guesses = made(drafter)
    if stress == "at ease":
        assert {guess.first_key for guess in guesses} <= {1, 17}, (
            "a request that came later may share a block"
        )
    for guess in guesses[:: len(guesses) // 25 or 1]:
        depth = min(config.size, guess.max_nodes)
        known = block_logits(head, target, guess.tokens, depth, guess.first_key)
        if config.cell_size:
            outputs = block_outputs(head, target, guess.tokens, depth, guess.first_key)
            known[0] = cell_path(head, target, outputs, guess.tokens[-1:])
            check_refined_tree(guess, known, partial(cell_path, head, target, outputs), largest=20)
            continue
        if not config.markov_rank:
            check_best_tree(guess, log_probs(guess, known), branch=3, size=20)
            continue

        def below(path: list[int], known: Tensor = known) -> Tensor:
            return known[len(path) - 1] + block_correction(head, path[-1])

        check_grown_tree(guess, below, width=2, branch=3, depth=config.size)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_shortlist_borrows_rows_of_the_output_head(tiny: Make, rank: int) -> None:
    """Its logits are the target's for these tokens, and the rest of the output head is not read."""
    target, head = tiny(0), randomize(make_block_head(rank=rank, shortlist=[3, 4, 50, 96]))
    shared, hidden = TargetEnds.of(target), torch.randn(5, 48)
    head.borrow(shared)
    logits = head.logits(hidden, shared)
    torch.testing.assert_close(logits, shared.logits(hidden)[:, [3, 4, 50, 96]])
    whole = head.whole(logits, shared.vocab_size)
    assert torch.equal(whole.isfinite().nonzero()[:, 1].view(5, -1), torch.tensor([[3, 4, 50, 96]] * 5))
    if rank:
        corrected = head.correct(logits, torch.tensor([3, 5, 96, 0, 50]))
        changed = (corrected != logits).any(1)
        assert changed.tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_rows_of_any_kind_of_output_head(kind: DType) -> None:
    model = load_model(open_checkpoint("sibyl"), kind)
    exact = load_model(open_checkpoint("sibyl"), "float32", kernels=StockKernels())
    plain = cast(Tensor, exact.head.weight).to_dense()
    tokens = torch.tensor([0, 5, 8191])
    rows = TargetEnds.of(model).head_rows(tokens)
    assert (rows - plain[tokens]).abs().max() < 0.02 * plain[tokens].abs().max()


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_rows_of_an_output_head_with_a_bias(kind: DType, tmp_path: Path) -> None:
    oracle = random_oracle("phi")
    oracle.save_pretrained(tmp_path)
    plain = oracle.lm_head.weight.detach()[[0, 5, 96]]
    rows = TargetEnds.of(load_model(open_checkpoint(tmp_path), kind)).head_rows(torch.tensor([0, 5, 96]))
    assert (rows - plain).abs().max() < 0.02 * plain.abs().max()


def test_features_do_not_pile_up_where_nothing_is_guessed(tiny: Make) -> None:
    assert most_features_kept(tiny(0), lambda t: BlockDrafter(t, make_block_head())) <= 10


@pytest.mark.parametrize("stress", ["preempted", "in chunks"])
def test_drafters_of_all_kinds_share_a_batch(stress: str, tiny: Make) -> None:
    """Each finds blocks in the prefix cache that others have drafted for."""
    target = tiny(0)
    plain = LLM(target, drafter="none", kv_tokens=4096).generate(prompts(), MANY)
    llm = LLM(target, drafter="none", **{"kv_tokens": 4096, **STRESSES[stress]})
    t = llm.engine.target
    kinds = [
        BlockDrafter(t, copy.deepcopy(HEADS["shortlist, cell"])),
        BlockDrafter(t, copy.deepcopy(HEADS["shortlist, markov"])),
        Medusa(t, randomize(MedusaHead(MedusaConfig(48, 97, 2, num_heads=3))), tree="measured"),
        Hydra(t, randomize(HydraHead(HydraConfig(48, 2, num_heads=3)))),
        "none",
    ]
    for shift in range(2):
        chosen = [kinds[(i + shift) % len(kinds)] for i in range(len(MANY))]
        results = llm.generate(prompts(), MANY, drafter=chosen)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
        drafted = {kinds.index(d) for d, result in zip(chosen, results, strict=True) if result.stats.drafted}
        assert drafted == {0, 1, 2, 3}


def test_requests_that_are_cancelled_leave_nothing_behind(tiny: Make) -> None:
    target = tiny(0)
    plain = LLM(target, drafter="none", kv_tokens=4096).generate(prompts(), MANY)
    llm = LLM(target, drafter="none", kv_tokens=2048, block_size=8)
    drafter = BlockDrafter(llm.engine.target, copy.deepcopy(HEADS["markov"]))
    streams = []
    for prompt, params in zip(prompts(), MANY, strict=True):
        streams.append(llm.stream(prompt, params, drafter=drafter))
        for stream in streams:
            next(iter(stream))
    for stream in streams[::2]:
        stream.cancel()
    for stream, expected in list(zip(streams, plain, strict=True))[1::2]:
        assert stream.result.token_ids == expected.token_ids
    again = llm.generate(prompts(), MANY, drafter=drafter)
    assert [result.token_ids for result in again] == [result.token_ids for result in plain]
    assert not drafter.kv.states


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_kinds_of_weights_guess_much_the_same(dtype: str, tiny: Make) -> None:
    trees = []
    for kind in ("auto", dtype):
        llm = LLM(tiny(0), drafter="none", kv_tokens=4096)
        head = copy.deepcopy(HEADS["markov"])
        drafter = Watched(BlockDrafter(llm.engine.target, head, nodes=7, width=1, branch=1, dtype=kind))  # type: ignore[arg-type]
        llm.generate(prompts(), MANY, drafter=drafter)
        trees.append({(g.request.seed, *g.tokens): g.tree.tokens[1] for g in made(drafter)})
    both = trees[0].keys() & trees[1].keys()
    assert len(both) > 50
    assert sum(trees[0][state] == trees[1][state] for state in both) > 0.8 * len(both)


@pytest.mark.parametrize("count", [30, 33])
@pytest.mark.parametrize("max_tree", [1, 16])
def test_what_was_seen_of_a_prefix_is_not_run_again(count: int, max_tree: int, tiny: Make) -> None:
    """The next turn of a conversation reuses all KV blocks that the turn before it filled.

    That includes blocks filled in the last step, and blocks filled in steps without a draft.
    """
    llm = LLM(tiny(0), drafter="none", kv_tokens=512, block_size=8, max_tree=max_tree)
    drafter = Watched(BlockDrafter(llm.engine.target, copy.deepcopy(HEADS["independent"])))
    first = llm.generate(prompts()[3], replace(GREEDY, max_tokens=count), drafter=drafter)
    drafted = sum(first.stats.drafted_at[:1])  # in all steps but the first, and the last if nothing is left
    assert drafted == 0 if max_tree == 1 else drafted >= first.stats.steps - 2
    stream = llm.stream([*first.prompt_token_ids, *first.token_ids, 1, 2, 3], GREEDY, drafter=drafter)
    keys = [state.first_key for _ in stream for state in drafter.drafter.kv.states.values()]
    assert set(keys) == {1}


def test_markov_heads_that_know_what_comes_are_right() -> None:
    vocab = 12
    target = counting_model(vocab)
    c = adapted(TINY, vocab_size=vocab, hidden_size=vocab, num_layers=1, windows=(None,))
    head = BlockHead(BlockConfig(c, vocab, (1,), size=3, markov_rank=vocab), StockKernels())
    head.requires_grad_(False)
    head.markov_in.weight.copy_(torch.eye(vocab))
    head.markov_out.weight.copy_(100 * torch.eye(vocab).roll(1, 0))
    llm = LLM(target, drafter="none", kv_tokens=512)
    drafter = BlockDrafter(llm.engine.target, head)
    result = llm.generate([3], SamplingParams(temperature=0, max_tokens=41), drafter=drafter)
    assert result.token_ids == [(4 + i) % vocab for i in range(41)]
    assert set(result.stats.acceptance) == {1.0}
    assert result.stats.steps == 1 + 10


def test_one_pass_is_what_many_passes_are() -> None:
    """Over a whole sequence within a pass, as in training, and over a pool a few tokens at a time."""
    torch.manual_seed(0)
    head = HEADS["independent"]
    c, count = head.config.block, 20
    embedded, fused = torch.randn(2, count, c.hidden_size)
    tokens = torch.arange(count).numpy()
    at_once = head(embedded, fused, Batch.pack([Rows(tokens, 0, None, DraftTree(0))], group=c.group))
    kv = [torch.zeros(heads, 32, size) for heads, size in c.kv_shapes]
    table = torch.arange(8).flip(0).numpy()
    parts = []
    for begin in range(0, count, 6):
        rows = Rows(tokens[begin : begin + 6], begin, table)
        batch = Batch.pack([rows], block_size=4, group=c.group)
        parts.append(head(embedded[begin : begin + 6], fused[begin : begin + 6], batch, kv))
    assert torch.allclose(torch.cat(parts), at_once, atol=1e-5)


def test_all_of_it_learns(tiny: Make) -> None:
    target, head = tiny(0), make_block_head(rank=3)
    tokens = torch.arange(8)
    c, shared = head.config.block, TargetEnds.of(target)
    fused = head.fuse([torch.randn(8, 48), torch.randn(8, 48)], shared)
    embedded = torch.cat([shared.embed(tokens[:5]), head.queries[:, 0]])
    rows = torch.cat([fused[:5], head.queries[:, 1]])
    hidden = head(embedded, rows, Batch.pack([Rows(tokens.numpy(), 0, None)], group=c.group))
    assert torch.equal(head.correct(head.logits(hidden, shared), tokens), head.logits(hidden, shared)), (
        "at first"
    )
    with torch.no_grad():
        head.markov_out.weight.normal_()
    head.correct(head.logits(hidden, shared), tokens).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


def test_numbers_that_make_no_drafter_are_refused(tiny: Make) -> None:
    good = BlockConfig(TINY, 48, (1,), 3)
    for name, value in (
        ("size", 0),
        ("markov_rank", -1),
        ("taps", ()),
        ("block", replace(TINY, layers=())),
    ):
        with pytest.raises(
            DrafterError, match=r"^block with size=.*it needs at least one guess, layer and tap"
        ):
            replace(good, **{name: value})
    for changes in ({"cell_size": 24}, {"cell_size": -16}, {"cell_size": 32, "markov_rank": 4}):
        with pytest.raises(DrafterError, match="a cell has a multiple of 16 units, and takes the place of"):
            replace(good, **changes)  # type: ignore[arg-type]
    llm = LLM(tiny(0), drafter="none", kv_tokens=64)
    for option in ("nodes", "branch", "width"):
        with pytest.raises(DrafterError, match=rf"^block\(.*{option}=0.*at least 1"):
            BlockDrafter(llm.engine.target, make_block_head(), **{option: 0})
