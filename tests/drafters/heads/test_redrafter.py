"""The redrafter: that its trees are the best ones by the formula, whatever happens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from one_shot import STRESSES, check_refined_tree, made, most_features_kept, prompts, serve
from oracles import (
    cell_path,
    listed_logits,
    make_redrafter_head,
    randomize,
    redrafter_outputs,
    taps_of,
)
from safetensors.torch import load_file, save_file

from soothsay import LLM, DrafterError, SamplingParams
from soothsay.drafters.heads import feature_drafter
from soothsay.drafters.heads.checkpoints.head_directory import read_head, write_head
from soothsay.drafters.heads.redrafter import Redrafter, RedrafterConfig, RedrafterHead
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.drafters.ops.native_draft_ops import draft_ops
from soothsay.model.native.native_kernels import load_native
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]

HEAD = randomize(make_redrafter_head(shortlist=range(5, 97, 2)))
HEAD.refiner.out.weight.mul_(0.1)  # tables are in bfloat16: large corrections have large errors
LIMIT = 14


@pytest.mark.parametrize("stress", STRESSES)
def test_trees_are_the_best_by_the_formula(stress: str, tiny: Make) -> None:
    """Each node scores what the cell says of its path, and no path that is left out scores higher."""
    target = tiny(0)
    drafter, _ = serve(target, lambda t: Redrafter(t, copy.deepcopy(HEAD), nodes=LIMIT), stress)  # type: ignore[arg-type, return-value]
    guesses = made(drafter)
    for guess in guesses[:: len(guesses) // 15 or 1]:
        features = torch.cat(taps_of(target, guess.tokens[:-1], HEAD.taps), -1)[-1]
        outputs = redrafter_outputs(HEAD, target, features, guess.tokens[-1])
        before = listed_logits(HEAD, target, outputs)
        before[0] = cell_path(HEAD, target, outputs, guess.tokens[-1:])
        check_refined_tree(guess, before, partial(cell_path, HEAD, target, outputs), LIMIT)


@pytest.mark.parametrize("rows", [1, 5])
def test_one_call_computes_what_the_layers_do(rows: int, tiny: Make) -> None:
    kernels = load_native()
    if kernels is None:
        pytest.skip("no native kernels run here")
    shared = TargetEnds.of(tiny(0))
    head = copy.deepcopy(HEAD)
    head.borrow(shared)
    head = feature_drafter.serve(head, kernels, torch.float32, 8)
    fused = head.outputs_at_once(draft_ops(kernels))
    assert fused is not None
    features, embedded = torch.randn(rows, 96), torch.randn(rows, 48)
    expected = head.outputs(features, embedded, shared)
    for part, wanted in zip(fused(features, embedded), expected, strict=True):
        assert part.shape == wanted.shape
        assert (part - wanted).norm() < 0.01 * wanted.norm()  # inputs of products are rounded to 8 bits


def test_layers_of_another_kind_are_not_one_call(tiny: Make) -> None:
    """A head without a list guesses with the target's output head, and stock layers have no addresses."""
    kernels = load_native()
    if kernels is None:
        pytest.skip("no native kernels run here")
    shared = TargetEnds.of(tiny(0))
    for shortlist, native in ((), kernels), (range(5, 97, 2), StockKernels()):
        head = make_redrafter_head(shortlist=shortlist)
        head.borrow(shared)
        head = feature_drafter.serve(head, native, torch.float32, 8 if native is kernels else None)
        assert head.outputs_at_once(draft_ops(kernels)) is None


@pytest.mark.parametrize("verifier", ["rejection", "rsd", "specinfer"])
def test_draws_for_other_verifiers(verifier: str, tiny: Make) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=4, verifier=verifier)
    llm = LLM(tiny(0), drafter="none", kv_tokens=2048)
    result = llm.generate(prompts()[0], params, drafter=Redrafter(llm.engine.target, copy.deepcopy(HEAD)))
    assert result.stats.drafted > 20
    assert len(result.token_ids) == 30


def test_features_do_not_pile_up_where_nothing_is_guessed(tiny: Make) -> None:
    assert most_features_kept(tiny(0), lambda t: Redrafter(t, make_redrafter_head())) <= 1  # type: ignore[arg-type, return-value]


def test_a_checkpoint_comes_back_as_it_was(tiny: Make, tmp_path: Path) -> None:
    write_head(copy.deepcopy(HEAD), tmp_path / "head", "tiny")
    llm = LLM(tiny(0), drafter="none")
    drafter = Redrafter(llm.engine.target, tmp_path / "head")
    assert drafter.head.config == HEAD.config
    assert torch.equal(drafter.head.tap_scale, HEAD.tap_scale.bfloat16().float())
    assert drafter.refined.ids == HEAD.shortlist.tolist()


def test_a_checkpoint_of_integers(tiny: Make, tmp_path: Path) -> None:
    head = randomize(RedrafterHead(RedrafterConfig(48, 97, (0,), 3, 32, 16)))  # 48 is not whole groups
    target = LLM(tiny(0), drafter="none").engine.target
    for layout in "", "int8":
        write_head(copy.deepcopy(head), tmp_path / f"head{layout}", "tiny", layout)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("head", "headint8")]
    assert sizes[1] < 0.7 * sizes[0]
    whole, rounded = (read_head(tmp_path / name, target).state_dict() for name in ("head", "headint8"))
    for name, value in whole.items():
        assert (rounded[name] - value).norm() <= 0.01 * value.norm()
    assert not torch.equal(rounded["look.weight"], whole["look.weight"])
    assert torch.equal(rounded["refiner.read.weight"], whole["refiner.read.weight"])


def test_integers_with_scales_that_do_not_fit(tiny: Make, tmp_path: Path) -> None:
    head = RedrafterHead(RedrafterConfig(48, 97, (0,), 3, 32, 16))
    write_head(head, tmp_path / "head", "tiny", "int8")
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    tensors["look.scales"] = tensors["look.scales"][:, 1:].contiguous()
    save_file(tensors, file)
    with pytest.raises(DrafterError, match=r"look.weight is \[112, 96\] with scales \[112, 2\]"):
        read_head(tmp_path / "head", LLM(tiny(0), drafter="none").engine.target)


def test_scales_beside_weights_that_need_none(tiny: Make, tmp_path: Path) -> None:
    """They belong to another way of writing integers, and would be left out."""
    write_head(make_redrafter_head(), tmp_path / "head", "tiny")
    file = tmp_path / "head" / "model.safetensors"
    save_file({**load_file(file), "look.scales": torch.ones(112, 3)}, file)
    with pytest.raises(DrafterError, match=r"has a tensor 'look.scales', which soothsay would leave out"):
        read_head(tmp_path / "head", LLM(tiny(0), drafter="none").engine.target)


@pytest.mark.parametrize(
    "changes", [{"size": 0}, {"taps": ()}, {"cell_size": 24}, {"hidden_size": 0}, {"shortlist_size": 98}]
)
def test_impossible_numbers(changes: dict[str, object]) -> None:
    numbers = {"size": 3, "taps": (0, 2), "hidden_size": 32, "cell_size": 16, **changes}
    with pytest.raises(DrafterError, match="redrafter with"):
        RedrafterConfig(target_hidden_size=48, vocab_size=97, **numbers)  # type: ignore[arg-type]
    assert RedrafterHead.method == "redrafter"
