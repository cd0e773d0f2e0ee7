"""Drafters of a small model, fitted to a model that was grown from it: they draft as they did."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from recurrent import GREEDY, VOCAB, prompts
from safetensors.torch import load_file, save_file
from tiny import adapted

from soothsay import LLM, DrafterError, Target
from soothsay.bench import grown_drafters
from soothsay.bench.grow import Grown, grow
from soothsay.bench.grown_tensors import GrownShape
from soothsay.config import EngineConfig
from soothsay.core.request import Observation, Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Drafter
from soothsay.drafters.heads.block import BlockConfig, BlockHead
from soothsay.drafters.heads.checkpoints.head_directory import open_head, read_head, write_head
from soothsay.drafters.heads.eagle import EagleConfig, EagleHead
from soothsay.drafters.heads.eagle3 import Eagle3Config, Eagle3Head
from soothsay.drafters.heads.feature_drafter import load_head
from soothsay.drafters.heads.hydra import HydraConfig, HydraHead
from soothsay.drafters.heads.medusa import MedusaConfig, MedusaHead
from soothsay.drafters.heads.mtp import MTPConfig, MTPHead, write_mtp
from soothsay.drafters.heads.redrafter import RedrafterConfig, RedrafterHead
from soothsay.drafters.heads.trained_head import Head
from soothsay.drafters.registry import build_drafter
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LARGE = "layers=5,hidden=96,heads=6,kv_heads=6,ffn=112"
PLACES = [0, 3, 5]
"""For each layer of the small model, and its output: the large model's layer with the same input."""

METHODS = {
    "eagle": "eagle",
    "eagle2": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "medusa": "medusa",
    "hydra": "hydra",
    "block": "block",
    "redrafter": "redrafter",
}
"""Drafters, and the directories of their heads."""

DRAFTING = {"llama": tuple(METHODS), "gemma2": ("eagle2", "eagle3", "medusa", "block")}
"""Drafters by family. Gemma 2 adds a scale, which heads read by the same `FeatureView`: one of each shape."""


def save_small(folder: Path, family: str) -> Path:
    torch.manual_seed(1)
    ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    kind = {"llama": transformers.LlamaConfig, "gemma2": transformers.Gemma2Config}[family]
    config = kind(**SIZES, **ends, initializer_range=0.3)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def make_heads() -> dict[str, Head]:
    """A head of each method for the small model."""
    block = adapted(parse_model_config({"model_type": "llama", **SIZES}), num_layers=1, windows=(None,))
    kernels = StockKernels()
    heads: dict[str, Head] = {
        "eagle": EagleHead(EagleConfig(block, True, 2), kernels),
        "eagle3": Eagle3Head(Eagle3Config(block, 48, VOCAB, (0, 1, 2)), kernels),
        "mtp": MTPHead(MTPConfig(block, 2), kernels),
        "medusa": MedusaHead(MedusaConfig(48, VOCAB, 2, 3)),
        "hydra": HydraHead(HydraConfig(48, 2, 3)),
        "block": BlockHead(BlockConfig(block, 48, (0, 1, 2), 4), kernels),
        "redrafter": RedrafterHead(RedrafterConfig(48, VOCAB, (0, 1, 2), 4, 32, 16)),
    }
    torch.manual_seed(2)
    for head in heads.values():
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else parameter + 0.05 * noise)
    return heads


def save_heads(small: Path, *names: str) -> None:
    for name, head in make_heads().items():
        if name in names or not names:
            write_head(head, small / "drafters" / name, "small")


def grown(small: Path, large: Path, shape: str = LARGE) -> Grown:
    checkpoint = open_checkpoint(small)
    return grow(checkpoint, GrownShape.parse(shape, parse_model_config(checkpoint.config)), large)


def target_of(path: Path, dtype: Any = "float32") -> Target:
    return Target(load_model(open_checkpoint(path), dtype), None, EngineConfig(max_context=64), 4, path)


@dataclass(eq=False)
class Noting(Drafter):
    """Notes the proposals of a drafter."""

    inner: Drafter
    trees: list[DraftTree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.taps, self.max_nodes = self.inner.taps, self.inner.max_nodes

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = self.inner.propose(requests)
        self.trees += trees
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        self.inner.observe(observations)

    def release(self, request: Request) -> None:
        self.inner.release(request)


def drafts(model: Path, name: str) -> list[DraftTree]:
    llm = LLM(model, drafter="none", dtype="float32", kv_tokens=1024)
    drafter = Noting(build_drafter(name, llm.engine.target))
    llm.generate(prompts(), replace(GREEDY, max_tokens=8, ignore_eos=True), drafter=drafter)
    return drafter.trees


def check_alike(trees: Sequence[DraftTree], expected: Sequence[DraftTree]) -> None:
    assert len(trees) == len(expected) >= 16
    assert sum(len(tree) > 1 for tree in trees) > 12
    for own, other in zip(trees, expected, strict=True):
        assert (own.tokens, own.parents) == (other.tokens, other.parents)
        assert own.scores == pytest.approx(other.scores, abs=1e-2)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_heads_draft_as_for_the_small_model(family: str, tmp_path: Path) -> None:
    small = save_small(tmp_path / "small", family)
    save_heads(small)
    made = grown(small, tmp_path / "large")
    assert made.drafters.written == ("block", "eagle", "eagle3", "hydra", "medusa", "mtp", "redrafter")
    assert made.drafters.refused == ()
    expected = {name: drafts(small, name) for name in DRAFTING[family]}
    shutil.rmtree(small)  # what the drafters need is beside the large model
    for name in expected:
        check_alike(drafts(tmp_path / "large", name), expected[name])


def test_what_the_checkpoints_say(tmp_path: Path) -> None:
    small = save_small(tmp_path / "small", "gemma2")
    save_heads(small, "eagle3", "mtp")
    grown(small, tmp_path / "large")
    target = target_of(tmp_path / "large")
    for name, taps in (("eagle3", tuple(PLACES)), ("mtp", (5,))):
        place = tmp_path / "large" / "drafters" / name
        with open_head(place, target) as stored:
            assert stored.head.taps == taps
            view = stored.fit.view
            assert view is not None
            assert (view.size, view.target_hidden_size) == (48, 96)
            assert view.scale == pytest.approx(2**0.5)  # Gemma scales its embeddings by sqrt(hidden)
            assert view.head is view.embedding
        with pytest.raises(DrafterError, match="reads features of 96 dimensions; the target's have 48"):
            read_head(place, target_of(small))
        with pytest.raises(DrafterError, match="for a model of hidden size 48; the target's is 96"):
            read_head(small / "drafters" / name, target)


@pytest.mark.parametrize(
    ("of_target", "of_head"), [("float32", "float32"), ("int8", "int8"), ("int4", "int8")]
)
def test_by_themselves_heads_compute_as_the_target_does(of_target: Any, of_head: Any, tmp_path: Path) -> None:
    small, large = save_small(tmp_path / "small", "llama"), tmp_path / "large"
    save_heads(small, "eagle3")
    grown(small, large)
    target = target_of(large, of_target)
    taps = [torch.randn(5, 96) for _ in range(3)]

    def fused(dtype: Any) -> torch.Tensor:
        return load_head(Eagle3Head, "", target, dtype).fuse(taps)

    assert torch.equal(fused("auto"), fused(of_head))
    assert not torch.equal(fused("auto"), fused("int8" if of_head == "float32" else "float32"))
    hidden = torch.randn(5, 48, dtype=target.model.dtype)
    shared, plain = load_head(Eagle3Head, "", target).shared, load_model(open_checkpoint(small), of_head)
    assert torch.equal(shared.logits(hidden), plain.logits(hidden))
    tokens = torch.arange(VOCAB)
    assert torch.equal(shared.embed(tokens), plain.embedding(tokens))


def test_a_grown_model_grows_again(tmp_path: Path) -> None:
    small = save_small(tmp_path / "small", "gemma2")
    save_heads(small, "eagle", "eagle3")
    grown(small, tmp_path / "large")
    grown(tmp_path / "large", tmp_path / "larger", "layers=7,hidden=144,heads=9,kv_heads=9")
    for name in ("eagle2", "eagle3"):
        check_alike(drafts(tmp_path / "larger", name), drafts(small, name))


def test_mtp_modules_in_the_small_model_s_own_checkpoint(tmp_path: Path) -> None:
    small = save_small(tmp_path / "small", "llama")
    head = make_heads()["mtp"]
    assert isinstance(head, MTPHead)
    modules = dict(write_mtp(head, "small")[1])
    assert all(name.startswith("model.layers.2.") for name in modules)
    save_file(load_file(small / "model.safetensors") | modules, small / "model.safetensors")
    assert grown(small, tmp_path / "large").drafters.written == ("mtp",)
    check_alike(drafts(tmp_path / "large", "mtp"), drafts(small, "mtp"))


def test_other_drafters_come_along_as_they_are(tmp_path: Path) -> None:
    small = save_small(tmp_path / "small", "llama")
    drafters = small / "drafters"
    shutil.copytree(small, tmp_path / "copy")
    shutil.copytree(tmp_path / "copy", drafters / "draft-model")
    (drafters / "rest.store").write_bytes(b"texts")
    (drafters / "layer-skip").mkdir()
    (drafters / "layer-skip" / "config.json").write_text("{}")
    made = grown(small, tmp_path / "large").drafters
    assert (made.written, made.refused) == (("draft-model", "rest.store"), ())
    for name in ("draft-model/model.safetensors", "draft-model/config.json", "rest.store"):
        assert (tmp_path / "large" / "drafters" / name).read_bytes() == (drafters / name).read_bytes()
    check_alike(drafts(tmp_path / "large", "draft-model"), drafts(small, "draft-model"))


def test_heads_of_the_package_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One beside the small model comes before one of the same name in the package."""
    small, package = save_small(tmp_path / "small", "llama"), tmp_path / "package"
    save_heads(small, "eagle3", "medusa")
    (small / "drafters").rename(package)
    save_heads(small, "mtp")
    (small / "drafters" / "medusa").mkdir()  # it is empty, and so cannot be read
    monkeypatch.setattr(grown_drafters, "shipped_heads", lambda target: package)
    made = grown(small, tmp_path / "large").drafters
    assert sorted(made.written) == ["eagle3", "mtp"]
    (refused,) = made.refused
    assert "medusa" in refused
    assert drafts(tmp_path / "large", "eagle3")


def test_a_head_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    small = save_small(tmp_path / "small", "llama")
    save_heads(small, "eagle", "medusa")
    file = small / "drafters" / "eagle" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hidden_size": 64}))
    made = grown(small, tmp_path / "large").drafters
    assert made.written == ("medusa",)
    assert len(made.refused) == 1
    assert str(file.parent) in made.refused[0]
    assert [place.name for place in (tmp_path / "large" / "drafters").iterdir()] == ["medusa"]
