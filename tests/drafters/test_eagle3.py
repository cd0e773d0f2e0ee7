"""EAGLE-3 against its formula."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_eagle import make_head as make_eagle_head
from test_grown import (
    GREEDY,
    MIXED,
    STRESSES,
    VOCAB,
    Make,
    Oracle,
    Past,
    Seen,
    Watched,
    check_all,
    prompts,
    serve,
)
from test_mtp import make_head as make_mtp_head
from torch import Tensor

from soothsay import LLM, DrafterError, Target
from soothsay.config import EngineConfig, ModelConfig
from soothsay.drafters import DrafterSpec
from soothsay.drafters.draft_model import DraftModel
from soothsay.drafters.eagle import Eagle, Eagle2
from soothsay.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Head
from soothsay.drafters.grown import RecurrentDrafter
from soothsay.drafters.head import Origin, Shared, load_head
from soothsay.drafters.mtp import MTP
from soothsay.model.checkpoint import open_checkpoint
from soothsay.model.grow import grow
from soothsay.model.kernels import StockKernels
from soothsay.model.load import load_model
from soothsay.model.shape import Shape
from soothsay.model.transformer import Transformer

TAPS = (0, 1, 2)
SAYS = [t for t in range(VOCAB) if t % 3]  # the draft vocabulary


def make_head(
    target: Transformer, hidden: int = 64, says: Sequence[int] = SAYS, **changes: Any
) -> Eagle3Head:
    block = replace(target.config, num_layers=1, windows=(None,), hidden_size=hidden, intermediate_size=80)
    config = Eagle3Config(block, target.config.hidden_size, len(says), TAPS, own_embedding=True)
    torch.manual_seed(6)
    head = Eagle3Head(replace(config, **changes), StockKernels())
    head.d2t = torch.tensor(says) - torch.arange(len(says))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(1, 0.2) if "norm" in name else parameter.mul_(1.2)
    return head


class Eagle3Oracle(Oracle):
    norm_before_residual = False

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(taps), -1) @ self.weights["fc.weight"].T

    def embed(self, tokens: Sequence[int]) -> Tensor:
        own = self.weights.get("embedding.weight")
        return super().embed(tokens) if own is None else own[list(tokens)]

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, past: Past) -> Tensor:
        normed = self.norm(features, self.weights["hidden_norm.weight"])
        both = torch.cat([self.norm(embedded, self.weights["embedding_norm.weight"]), normed], -1)
        x = (normed if self.norm_before_residual else features) + self.attention(both, positions, past)
        return x + self.mlp(self.norm(x, self.weights["block.mlp_norm.weight"]))

    def logits(self, out: Tensor) -> Tensor:
        own = self.norm(out, self.weights["norm.weight"]) @ self.weights["head.weight"].T
        full = torch.full((len(out), VOCAB), -math.inf, dtype=torch.float64)
        for i, offset in enumerate(self.weights["d2t"].long().tolist()):
            full[:, i + offset] = own[:, i]
        return full


class NormedResidual(Eagle3Oracle):
    norm_before_residual = True


@pytest.mark.parametrize("stress", STRESSES)
def test_guesses_are_the_formula_s(stress: str, tiny: Make) -> None:
    target = tiny(0)
    head = make_head(target)
    check_all(stress, target, head, Eagle3Oracle, lambda t: Eagle3(t, head), branch=3)


def test_the_target_s_embedding_and_the_other_residual(tiny: Make) -> None:
    target = tiny(0)
    head = make_head(target, 48, range(VOCAB), own_embedding=False, norm_before_residual=True)
    assert not any("embedding.weight" in name for name in head.state_dict())
    check_all("at ease", target, head, NormedResidual, lambda t: Eagle3(t, head, 3, 4, 4), branch=4)


def test_it_says_only_what_its_vocabulary_has(tiny: Make) -> None:
    target = tiny(0)
    drafter, _, _ = serve(target, lambda t: Eagle3(t, make_head(target)))
    said = {token for seen in drafter.seen for token in seen.tree.tokens[1:]}
    assert said <= set(SAYS)
    assert len(said) > 20


def test_logits_stand_at_the_target_s_tokens(tiny: Make) -> None:
    target = tiny(0)
    head = make_head(target)
    with torch.no_grad():
        logits = head.logits(torch.randn(3, 64), Shared.of(target))
    assert logits.shape == (3, VOCAB)
    assert (logits[0] > -math.inf).nonzero()[:, 0].tolist() == head.token_ids.tolist() == SAYS


def every(t: Target) -> list[DrafterSpec]:
    model = t.model
    return [
        Eagle3(t, make_head(model)),
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


def save_small(folder: Path, family: str) -> Path:
    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = {"llama": transformers.LlamaConfig, "gemma2": transformers.Gemma2Config}[family](**sizes)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def drafts(model: Path, make: Callable[[Target], RecurrentDrafter]) -> list[Seen]:
    llm = LLM(model, drafter="none", dtype="float32", kv_tokens=1024)
    drafter = Watched(make(llm.engine.target))
    llm.generate(prompts(), replace(GREEDY, max_tokens=10, ignore_eos=True), drafter=drafter)
    return drafter.seen


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_small_model_s_heads_serve_what_was_grown_from_it(family: str, tmp_path: Path) -> None:
    small, large = save_small(tmp_path / "small", family), tmp_path / "large"
    checkpoint = open_checkpoint(small)
    config = ModelConfig.from_hf(checkpoint.config)
    grow(checkpoint, Shape.parse("layers=5,hidden=96,heads=6,kv_heads=6,ffn=112", config), large)
    written = json.loads((large / "config.json").read_text())
    assert written["grown_from"] == {"model": str(small), "layers": [0, 3]}

    def heads(target: Target) -> list[RecurrentDrafter]:
        like = Transformer(replace(config, post_norms=False, attention_softcap=None))
        return [
            Eagle3(target, make_head(like, 48, range(VOCAB), own_embedding=False)),
            Eagle2(target, make_eagle_head(like)),
            MTP(target, make_mtp_head(like)),
        ]

    for i in range(3):
        expected, grown = (drafts(model, lambda target, i=i: heads(target)[i]) for model in (small, large))
        assert len(expected) == len(grown) > 40
        assert sum(len(seen.tree) > 1 for seen in grown) > 30
        for own, other in zip(grown, expected, strict=True):
            assert own.tokens == other.tokens
            assert own.tree.tokens == other.tree.tokens
            assert own.tree.scores == pytest.approx(other.tree.scores, abs=1e-2)


@pytest.mark.parametrize(
    ("of_target", "of_head"), [("float32", "float32"), ("int8", "int8"), ("int4", "int8")]
)
def test_by_themselves_heads_compute_as_the_target_does(of_target: Any, of_head: Any, tmp_path: Path) -> None:
    small, large = save_small(tmp_path / "small", "llama"), tmp_path / "large"
    checkpoint = open_checkpoint(small)
    config = ModelConfig.from_hf(checkpoint.config)
    grow(checkpoint, Shape.parse("layers=5,hidden=96,heads=6,kv_heads=6,ffn=112", config), large)
    model = load_model(open_checkpoint(large), of_target)
    target = Target(model, None, EngineConfig(max_context=64), 4, large)
    taps = [torch.randn(5, 96) for _ in TAPS]

    def fused(dtype: Any) -> Tensor:
        return load_head(Eagle3Head, make_head(Transformer(config), 48), target, dtype).fuse(taps)

    assert torch.equal(fused("auto"), fused(of_head))
    assert not torch.equal(fused("auto"), fused("int8" if of_head == "float32" else "float32"))
    hidden = torch.randn(5, 48, dtype=model.dtype)
    borrowed, plain = Origin.of(target).shared, load_model(checkpoint, of_head)
    assert torch.equal(borrowed.logits(hidden), plain.logits(hidden))


def test_where_the_small_model_has_gone_it_is_named(tiny: Make, tmp_path: Path) -> None:
    gone = {"model": str(tmp_path / "gone"), "layers": [0, 1]}
    (tmp_path / "config.json").write_text(json.dumps({"grown_from": gone}))
    model = tiny(0)
    target = Target(model, None, EngineConfig(max_context=64), 4, tmp_path)
    with pytest.raises(DrafterError, match=r"was grown from .*gone, whose drafters serve it"):
        Eagle3(target, make_head(model))


class TestWhichHead:
    def target(self, model: Transformer, path: Path | None = None) -> Target:
        return Target(model, None, EngineConfig(max_context=64), 4, path)

    def test_another_method_s_is_refused_by_name(self, tiny: Make) -> None:
        model = tiny(0)
        with pytest.raises(DrafterError, match="head of eagle3, not of eagle: choose drafter eagle3"):
            Eagle2(self.target(model), make_head(model))

    def test_where_none_is_given_it_says_where_it_looked(self, tiny: Make, tmp_path: Path) -> None:
        with pytest.raises(DrafterError, match=r"no model is named for eagle3.* eagle3\(model=\.\.\.\)"):
            Eagle3(self.target(tiny(0)))
        where = re.escape(str(tmp_path / "drafters" / "eagle"))
        with pytest.raises(DrafterError, match=rf"no drafter at {where}: train one"):
            Eagle2(self.target(tiny(0), tmp_path))

    def test_the_directory_beside_the_target_is_read(
        self, tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, asked = tiny(0), []
        (tmp_path / "drafters" / "eagle3").mkdir(parents=True)
        head = make_head(model)
        read = lambda path, target: asked.append(path) or head  # noqa: E731
        monkeypatch.setattr("soothsay.drafters.checkpoints.read_head", read, raising=False)
        assert Eagle3(self.target(model, tmp_path)).served.head is head
        Eagle3(self.target(model, tmp_path), str(tmp_path / "other"))
        assert asked == [tmp_path / "drafters" / "eagle3", tmp_path / "other"]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
    def test_any_dtype(self, dtype: Any, tiny: Make) -> None:
        target = tiny(0)
        drafter, results, _ = serve(target, lambda t: Eagle3(t, make_head(target), dtype=dtype))
        assert sum(result.stats.drafted for result in results) > 100
        assert drafter.inner.context.pool.data.dtype is (
            torch.float32 if dtype == "float32" else drafter.inner.served.head.dtype
        )

    def test_an_unknown_dtype(self, tiny: Make) -> None:
        with pytest.raises(DrafterError, match=r"eagle3\(dtype=half\) is unknown; choose auto, float32"):
            Eagle3(self.target(tiny(0)), make_head(tiny(0)), dtype="half")  # type: ignore[arg-type]

    def test_numbers_below_1(self, tiny: Make) -> None:
        with pytest.raises(DrafterError, match=r"^eagle3\(depth=0, .*at least 1$"):
            Eagle3(self.target(tiny(0)), make_head(tiny(0)), depth=0)
