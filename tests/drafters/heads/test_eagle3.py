"""EAGLE-3 against its formula."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import (
    SAYS,
    TAPS,
    VOCAB,
    Eagle3Oracle,
    Eagle31Oracle,
    NormedResidual,
    make_eagle3_head,
    make_eagle_head,
    make_mtp_head,
)
from recurrent import (
    MIXED,
    STRESSES,
    Make,
    check_all,
    prompts,
    serve,
)
from safetensors import safe_open
from slow import mostly_slow

from soothsay import LLM, DrafterError, Target
from soothsay.config import EngineConfig
from soothsay.drafters.heads.checkpoints.head_directory import write_head
from soothsay.drafters.heads.eagle import Eagle, Eagle2
from soothsay.drafters.heads.eagle3 import Eagle3, Eagle3Head
from soothsay.drafters.heads.feature_drafter import find_head
from soothsay.drafters.heads.mtp import MTP
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.drafters.models.draft_model import DraftModel
from soothsay.drafters.registry import DrafterSpec
from soothsay.model.transformer import Transformer


@pytest.mark.parametrize("stress", mostly_slow(STRESSES))
def test_guesses_are_the_formula_s(stress: str, tiny: Make) -> None:
    target = tiny(0)
    head = make_eagle3_head(target)
    check_all(stress, target, head, Eagle3Oracle, lambda t: Eagle3(t, head), branch=3)


def test_the_target_s_embedding_and_the_other_residual(tiny: Make) -> None:
    target = tiny(0)
    head = make_eagle3_head(target, 48, range(VOCAB), own_embedding=False, norm_before_residual=True)
    assert not any("embedding.weight" in name for name in head.state_dict())
    check_all("at ease", target, head, NormedResidual, lambda t: Eagle3(t, head, 3, 4, 4), branch=4)


@pytest.mark.parametrize("stress", mostly_slow(STRESSES))
def test_normed_taps_and_outputs(stress: str, tiny: Make) -> None:
    """EAGLE-3.1."""
    target = tiny(0)
    head = make_eagle3_head(target, norm_taps="each", norm_output=True)
    check_all(stress, target, head, Eagle31Oracle, lambda t: Eagle3(t, head), branch=3)


def test_it_says_only_what_its_vocabulary_has(tiny: Make) -> None:
    target = tiny(0)
    drafter, _, _ = serve(target, lambda t: Eagle3(t, make_eagle3_head(target)))
    said = {token for seen in drafter.seen for token in seen.tree.tokens[1:]}
    assert said <= set(SAYS)
    assert len(said) > 20


def test_logits_stand_at_the_target_s_tokens(tiny: Make) -> None:
    target = tiny(0)
    head = make_eagle3_head(target)
    with torch.no_grad():
        logits = head.logits(torch.randn(3, 64), TargetEnds.of(target))
    assert logits.shape == (3, VOCAB)
    assert (logits[0] > -math.inf).nonzero()[:, 0].tolist() == head.listed.tolist() == SAYS


def every(t: Target) -> list[DrafterSpec]:
    model = t.model
    return [
        Eagle3(t, make_eagle3_head(model)),
        "prompt-lookup",
        Eagle(t, make_eagle_head(model)),
        Eagle2(t, make_eagle_head(model)),
        MTP(t, make_mtp_head(model)),
        MTP(t, make_mtp_head(model, modules=2)),
        DraftModel(t, model, 3, 2, 2),
        "none",
    ]


SHORT = [replace(params, max_tokens=16) for params in MIXED]


@pytest.fixture(scope="module")
def plain(tiny: Make) -> list[list[int]]:
    llm = LLM(tiny(0), drafter="none", kv_tokens=4096)
    return [llm.generate(prompt, p).token_ids for prompt, p in zip(prompts(), SHORT, strict=True)]


def test_all_drafters_in_one_batch(plain: list[list[int]], tiny: Make) -> None:
    """With little memory, beside prefixes that some have seen and some have not: tokens are as they were."""
    llm = LLM(tiny(0), drafter="none", kv_tokens=120, block_size=8, max_rows=40)
    drafters = every(llm.engine.target)
    for shift in range(0, 8, 3):
        chosen = [drafters[(i + shift) % 8] for i in range(8)]
        results = llm.generate(prompts(), SHORT, drafter=chosen)
        assert [result.token_ids for result in results] == plain


def test_every_drafter_alone(plain: list[list[int]], tiny: Make) -> None:
    llm = LLM(tiny(0), drafter="none", kv_tokens=1024)
    for drafter in every(llm.engine.target):
        for prompt, params, expected in list(zip(prompts(), SHORT, plain, strict=True))[::2]:
            assert llm.generate(prompt, params, drafter=drafter).token_ids == expected


@pytest.mark.parametrize(("layout", "error"), [("int8", 0.01), ("int4", 0.12)])
def test_a_checkpoint_of_integers(tiny: Make, tmp_path: Path, layout: str, error: float) -> None:
    target = LLM(tiny(0), drafter="none").engine.target
    for name in "", layout:
        write_head(make_eagle3_head(target.model), tmp_path / f"head{name}", "tiny", name)
    whole, rounded = (find_head(Eagle3Head, tmp_path / f"head{x}", target)[0] for x in ("", layout))
    assert rounded.config == whole.config
    assert (whole.bits, rounded.bits) == (None, int(layout[-1]))
    for name, value in whole.state_dict().items():
        assert (rounded.state_dict()[name].float() - value).norm() <= error * value.float().norm()
    assert not torch.equal(rounded.state_dict()["head.weight"], whole.state_dict()["head.weight"])
    assert torch.equal(rounded.listed, whole.listed)
    sizes = [(tmp_path / f"head{x}" / "model.safetensors").stat().st_size for x in ("", layout)]
    assert sizes[1] < sizes[0] * {"int8": 0.75, "int4": 0.5}[layout]


@pytest.mark.parametrize("layout", ["", "speculators", "int8", "int4"])
def test_an_output_matrix_of_the_targets_rows_is_the_targets(tiny: Make, tmp_path: Path, layout: str) -> None:
    """Other engines find it in the files, and it is taken from the target all the same."""
    target = LLM(tiny(0), drafter="none").engine.target
    ends = TargetEnds.of(target.model)
    head = make_eagle3_head(target.model, ends.hidden_size, own_head=False, own_embedding=False)
    head.borrow(ends)
    write_head(head, tmp_path / "head", "tiny", layout)
    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not layout.startswith("int"))  # noqa: SIM118
    again, _ = find_head(Eagle3Head, tmp_path / "head", target)
    again.borrow(ends)
    expected = target.model.head(torch.eye(ends.hidden_size))[:, head.listed].t()
    torch.testing.assert_close(again.state_dict()["head.weight"], expected, rtol=1e-2, atol=1e-3)
    assert not again.head.weight.requires_grad
    plain = LLM(tiny(0), drafter="none").generate(prompts()[0], SHORT[0]).token_ids
    drafter = Eagle3(target, str(tmp_path / "head"))
    assert LLM(tiny(0), drafter="none").generate(prompts()[0], SHORT[0], drafter=drafter).token_ids == plain


class TestWhichHead:
    def target(self, model: Transformer, path: Path | None = None) -> Target:
        return Target(model, None, EngineConfig(max_context=64), 4, path)

    def test_another_method_s_is_refused_by_name(self, tiny: Make) -> None:
        model = tiny(0)
        with pytest.raises(DrafterError, match="head of eagle3, not of eagle: choose drafter eagle3"):
            Eagle2(self.target(model), make_eagle3_head(model))

    def test_where_none_is_given_it_says_where_it_looked(self, tiny: Make, tmp_path: Path) -> None:
        with pytest.raises(DrafterError, match=r"no model is named for eagle3.* eagle3\(model=\.\.\.\)"):
            Eagle3(self.target(tiny(0)))
        where = re.escape(str(tmp_path / "drafters" / "eagle"))
        with pytest.raises(DrafterError, match=rf"no drafter at {where}: train one"):
            Eagle2(self.target(tiny(0), tmp_path))

    def test_the_directory_beside_the_target_is_read(self, tiny: Make, tmp_path: Path) -> None:
        """Unless another directory is named. The two hold different weights, which tell them apart."""
        model, written = tiny(0), []
        taps = [torch.randn(5, 48) for _ in TAPS]
        for factor, directory in ((1.0, tmp_path / "drafters" / "eagle3"), (2.0, tmp_path / "other")):
            head = make_eagle3_head(model)
            for parameter in head.parameters():
                parameter.data = (factor * parameter.data).bfloat16().float()  # as checkpoints store it
            write_head(head, directory, "tiny")
            written.append(head.fuse(taps, TargetEnds.of(model)))
        target = self.target(model, tmp_path)
        for drafter, expected in zip(
            (Eagle3(target), Eagle3(target, tmp_path / "other")), written, strict=True
        ):
            torch.testing.assert_close(drafter.served.fuse(taps), expected)
        assert not torch.allclose(*written)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
    def test_any_dtype(self, dtype: Any, tiny: Make) -> None:
        target = tiny(0)
        drafter, results, _ = serve(target, lambda t: Eagle3(t, make_eagle3_head(target), dtype=dtype))
        assert sum(result.stats.drafted for result in results) > 100
        assert drafter.inner.kv.pool.layers[0].dtype is (
            torch.float32 if dtype == "float32" else drafter.inner.served.head.dtype
        )

    def test_an_unknown_dtype(self, tiny: Make) -> None:
        with pytest.raises(DrafterError, match=r"eagle3\(dtype=half\) is unknown; choose auto, float32"):
            Eagle3(self.target(tiny(0)), make_eagle3_head(tiny(0)), dtype="half")  # type: ignore[arg-type]

    def test_numbers_below_1(self, tiny: Make) -> None:
        with pytest.raises(DrafterError, match=r"^eagle3\(depth=0, .*at least 1$"):
            Eagle3(self.target(tiny(0)), make_eagle3_head(tiny(0)), depth=0)
