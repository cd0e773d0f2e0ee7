"""Published layouts, written here by hand as the notes describe them: read, recomputed, written, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from speculators_oracle import BLOCK, HEADS, INNER, KV, D, H, V
from tiny import adapted
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.batch import Batch, Rows
from soothsay.drafters.base import Target
from soothsay.drafters.heads.block import BlockConfig, BlockHead
from soothsay.drafters.heads.checkpoints.block_configs import hf_config
from soothsay.drafters.heads.checkpoints.fit import FeatureView
from soothsay.drafters.heads.checkpoints.head_directory import read_head, write_head
from soothsay.drafters.heads.eagle import EagleConfig, EagleHead
from soothsay.drafters.heads.eagle3 import Eagle3Config, Eagle3Head
from soothsay.drafters.heads.feature_drafter import find_head, load_head, serve
from soothsay.drafters.heads.hydra import HydraConfig, HydraHead
from soothsay.drafters.heads.medusa import MedusaConfig, MedusaHead
from soothsay.drafters.heads.mtp import MTPConfig, MTPHead
from soothsay.drafters.heads.trained_head import Head, TargetEnds
from soothsay.errors import DrafterError, ModelError
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.specs.attention_spec import RopeSpec
from soothsay.model.transformer import Transformer

LAYERS = 6  # of the target
T = 7
Raw = dict[str, Tensor]
CONFIG = {"architectures": ["LlamaForCausalLM"], **BLOCK}


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Transformer]) -> Target:
    model = tiny(num_layers=LAYERS, windows=(None,) * LAYERS)
    return Target(model, None, EngineConfig(max_context=256), num_blocks=4)


# what others write


def random(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Raw:
    made = torch.Generator().manual_seed(seed)
    raw = {name: torch.randn(shape, generator=made) * 0.3 for name, shape in shapes.items()}
    return {name: (t + 1 if t.dim() == 1 else t).bfloat16() for name, t in raw.items()}


def block(prefix: str, inputs: int = H, first_norm: bool = True, **parts: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HEADS * D, inputs),
        "self_attn.k_proj.weight": (KV * D, inputs),
        "self_attn.v_proj.weight": (KV * D, inputs),
        "self_attn.o_proj.weight": (H, HEADS * D),
        "mlp.gate_proj.weight": (INNER, H),
        "mlp.up_proj.weight": (INNER, H),
        "mlp.down_proj.weight": (H, INNER),
        "post_attention_layernorm.weight": (H,),
    }
    if first_norm:
        shapes["input_layernorm.weight"] = (H,)
    if parts.get("bias"):
        sizes = {"q": HEADS * D, "k": KV * D, "v": KV * D}
        shapes |= {f"self_attn.{x}_proj.bias": (size,) for x, size in sizes.items()}
    if parts.get("qk_norm"):
        shapes |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def save(path: Path, raw: Raw, config: dict[str, Any], file: str = "model.safetensors") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(raw, path / file)
    else:
        torch.save(raw, path / file)
    (path / "config.json").write_text(json.dumps(config))
    return path


def eagle_raw(fc_bias: bool = True, **parts: bool) -> Raw:
    shapes = {"fc.weight": (H, 2 * H), **block("layers.0.", first_norm=False, **parts)}
    return random({**shapes, "fc.bias": (H,)} if fc_bias else shapes)


def eagle3_raw(
    layer: str = "midlayer.", draft: int = 31, embedding: bool = True, tap_norms: str = "", **parts: bool
) -> Raw:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H),
        **block(layer, 2 * H, **parts),
        f"{layer}hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (draft, H),
    }
    if embedding:
        shapes["embed_tokens.weight"] = (V, H)
    if tap_norms == "each":
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(3)}
    if tap_norms == "whole":
        shapes["input_norm.weight"] = (3 * H,)
    raw = random(shapes)
    if draft != V:
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:draft].sort().values
        raw["d2t"] = ids - torch.arange(draft)
        raw["t2d"] = torch.zeros(V, dtype=torch.bool)
        raw["t2d"][ids] = True
    return raw


EAGLE3 = {**CONFIG, "draft_vocab_size": 31}
SPECULATORS3 = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x", "architectures": []}},
    "transformer_layer_config": CONFIG,
    "draft_vocab_size": 31,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
}


def medusa_raw(heads: int = 3, layers: int = 1, own: bool = True) -> Raw:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(layers):
            shapes |= {f"{i}.{j}.linear.weight": (H, H), f"{i}.{j}.linear.bias": (H,)}
        if own:
            shapes[f"{i}.{layers}.weight"] = (V, H)
    return random(shapes)


def vllm_medusa_raw(prefix: str = "", bias: bool = True) -> Raw:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        for j in range(2):
            shapes[f"{prefix}blocks.{i}.layers.{j}.weight"] = (H, H)
            if bias:
                shapes[f"{prefix}blocks.{i}.layers.{j}.bias"] = (H,)
        shapes[f"{prefix}lm_heads.{i}.weight"] = (V, H)
    return random(shapes)


def mtp_raw(kind: str, modules: int = 1, **parts: bool) -> Raw:
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(modules):
        step = {"deepseek": f"model.layers.{LAYERS + k}.", "mimo": f"model.mtp_layers.{k}."}.get(kind, "mtp.")
        step = "mtp_layers.0." if kind == "speculators" else step
        projection, embedding, hidden, last = MTP_PARTS[kind]
        shapes |= {step + projection + ".weight": (H, 2 * H)}
        shapes |= {f"{step}{norm}.weight": (H,) for norm in (embedding, hidden, last)}
        shapes |= block("mtp.layers.0." if kind == "qwen" else step, **parts)
    return random(shapes)


FULL = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
MTP_PARTS = {
    "deepseek": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "qwen": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "mimo": FULL,
    "speculators": FULL,
}
MTP = {**CONFIG, "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
SPECULATORS_MTP = {
    "speculators_model_type": "mtp",
    "transformer_layer_config": {**CONFIG, "model_type": "qwen3"},
    "num_nextn_predict_layers": 1,
}
MEDUSA = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
VLLM_MEDUSA = {
    "model_type": "medusa",
    "num_heads": 5,
    "num_hidden_layers": 2,
    "hidden_size": H,
    "vocab_size": V,
}

LAYOUTS: dict[str, tuple[Raw, dict[str, Any], str]] = {
    "eagle": (eagle_raw(), CONFIG, "model.safetensors"),
    "eagle, pickled": (eagle_raw(fc_bias=False), CONFIG, "pytorch_model.bin"),
    "eagle, Qwen2": (eagle_raw(bias=True), {**CONFIG, "model_type": "qwen2"}, "model.safetensors"),
    "eagle in vLLM's wrapper": (eagle_raw(), {"model_type": "eagle", "model": CONFIG}, "model.safetensors"),
    "eagle3": (eagle3_raw(), {**EAGLE3, "num_hidden_layers": 40}, "model.safetensors"),
    "eagle3, pickled": (eagle3_raw(), EAGLE3, "pytorch_model.bin"),
    "eagle3, vLLM": (eagle3_raw("layers.0.", bias=True, qk_norm=True), EAGLE3, "model.safetensors"),
    "eagle3, whole vocabulary": (eagle3_raw(draft=V, embedding=False), CONFIG, "model.safetensors"),
    "eagle3, speculators": (eagle3_raw("layers.0.", embedding=False), SPECULATORS3, "model.safetensors"),
    "eagle3, 3.1": (
        eagle3_raw(tap_norms="each"),
        {**EAGLE3, "fc_norm": True, "norm_output": True},
        "model.safetensors",
    ),
    "eagle3, 3.1 of speculators": (
        eagle3_raw("layers.0.", tap_norms="each"),
        {**SPECULATORS3, "fc_norm": True, "norm_output": True},
        "model.safetensors",
    ),
    "eagle3, one norm before fc": (
        eagle3_raw("layers.0.", tap_norms="whole"),
        {**SPECULATORS3, "norm_before_fc": True, "norm_output": False},
        "model.safetensors",
    ),
    "medusa": (medusa_raw(5), MEDUSA, "medusa_lm_head.safetensors"),
    "medusa, two layers": (medusa_raw(2, layers=2), MEDUSA, "medusa_lm_head.pt"),
    "medusa, shared head": (medusa_raw(own=False), MEDUSA, "medusa_lm_head.safetensors"),
    "medusa, vLLM": (vllm_medusa_raw(), VLLM_MEDUSA, "model.safetensors"),
    "mtp, DeepSeek": (mtp_raw("deepseek", 2), MTP, "model.safetensors"),
    "mtp, Qwen3": (mtp_raw("deepseek", qk_norm=True), {**MTP, "model_type": "qwen3"}, "model.safetensors"),
    "mtp, MiMo": (mtp_raw("mimo", bias=True), {**MTP, "model_type": "mimo"}, "model.safetensors"),
    "mtp, Qwen3-Next": (
        mtp_raw("qwen", qk_norm=True),
        {**MTP, "model_type": "qwen3_next"},
        "model.safetensors",
    ),
    "mtp, speculators": (mtp_raw("speculators", qk_norm=True), SPECULATORS_MTP, "model.safetensors"),
}


def put(path: Path, layout: str) -> Path:
    raw, config, file = LAYOUTS[layout]
    return save(path / "given", raw, config, file)


def unnamed(head: Head) -> Any:
    """Return a head's configuration without the family of its block."""
    config: Any = head.config
    return replace(config, block=replace(config.block, family="")) if hasattr(config, "block") else config


def same(one: Head, other: Head) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if name not in ("mtp, MiMo", "mtp, Qwen3-Next")]
)  # these two are written in another order, and their norms in fewer bits: see below what they compute
def test_what_is_read_is_written_and_read_again(layout: str, target: Target, tmp_path: Path) -> None:
    head = read_head(put(tmp_path, layout), target)
    assert head.method == layout[: len(head.method)]
    assert all(p.dtype == torch.float32 and not p.is_meta for p in head.parameters())
    write_head(head, tmp_path / "written", "a/target")
    again = read_head(tmp_path / "written", target)
    assert same(head, again)
    assert again.taps == head.taps
    assert unnamed(again) == unnamed(head)


@pytest.mark.parametrize(
    ("given", "layout", "written"),
    [
        ("eagle", "", "model.safetensors"),
        ("eagle3", "", "model.safetensors"),
        ("eagle3, whole vocabulary", "", "model.safetensors"),
        ("eagle3, speculators", "speculators", "model.safetensors"),
        ("eagle3, 3.1", "", "model.safetensors"),
        ("eagle3, 3.1 of speculators", "speculators", "model.safetensors"),
        ("medusa", "", "medusa_lm_head.safetensors"),
        ("medusa, shared head", "", "medusa_lm_head.safetensors"),
        ("medusa, vLLM", "vllm", "model.safetensors"),
        ("mtp, DeepSeek", "", "model.safetensors"),
        ("mtp, speculators", "speculators", "model.safetensors"),
    ],
)
def test_what_is_written_is_what_others_write(
    given: str, layout: str, written: str, target: Target, tmp_path: Path
) -> None:
    head = read_head(put(tmp_path, given), target)
    write_head(head, tmp_path / "written", "a/target", layout)
    raw, expected = load_file(tmp_path / "written" / written), LAYOUTS[given][0]
    assert raw.keys() == expected.keys()
    assert all(torch.equal(raw[name], expected[name]) for name in raw)
    assert sorted(p.name for p in (tmp_path / "written").iterdir()) == ["config.json", written]
    assert same(head, read_head(tmp_path / "written", target))


def test_medusa_in_vllms_words_with_a_prefix_and_without_biases(target: Target, tmp_path: Path) -> None:
    raw = vllm_medusa_raw("medusa_heads.", bias=False)
    head = read_head(save(tmp_path, raw, VLLM_MEDUSA), target)
    assert isinstance(head, MedusaHead)
    assert not any(layer.linear.bias.any() for layers in head.blocks for layer in layers)
    assert torch.equal(head.lm_heads[2].weight, raw["medusa_heads.lm_heads.2.weight"].float())
    shared = {**VLLM_MEDUSA, "original_lm_head": True}
    kept = {name: t for name, t in raw.items() if "lm_heads" not in name or "lm_heads.0" in name}
    head = read_head(save(tmp_path / "shared", kept, shared), target)
    assert isinstance(head, MedusaHead)
    assert not head.config.own_heads


def test_own_formats(target: Target, tmp_path: Path) -> None:
    torch.manual_seed(0)
    c = parse_model_config({**CONFIG, "num_hidden_layers": 2})
    heads = {
        "hydra": HydraHead(HydraConfig(H, LAYERS, num_heads=3, num_layers=2)),
        "block": BlockHead(BlockConfig(c, H, (1, 4, 6), size=4, markov_rank=8), StockKernels()),
    }
    for name, head in heads.items():
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter).data.copy_(parameter.bfloat16())
        write_head(head, tmp_path / name, "a/target")
        again = read_head(tmp_path / name, target)
        assert same(head, again)
        assert (again.taps, unnamed(again)) == (head.taps, unnamed(head))


def test_a_whole_models_mtp_modules_are_found_among_its_tensors(target: Target, tmp_path: Path) -> None:
    raw = mtp_raw("deepseek", 2)
    other = random(
        {"model.embed_tokens.weight": (V, H), f"model.layers.{LAYERS}.embed_tokens.weight": (V, H)}
        | {f"model.layers.{LAYERS}.shared_head.head.weight": (V, H), **block("model.layers.0.")}
    )
    other["model.layers.1.self_attn.q_proj.weight_packed"] = torch.zeros(4, dtype=torch.int32)
    head = read_head(save(tmp_path, raw | other, MTP), replace(target, path=tmp_path))
    assert isinstance(head, MTPHead)
    assert head.config.zero_first
    assert len(head.steps) == 2


# the arithmetic, from the raw tensors


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.float()


def linear(x: Tensor, raw: Raw, name: str) -> Tensor:
    bias = raw.get(f"{name}.bias")
    return x @ raw[f"{name}.weight"].float().T + (0 if bias is None else bias.float())


def turned(x: Tensor) -> Tensor:
    """`[T, heads, d]` rotated by the positions 0 to T - 1."""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)  # [T, d / 2]
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def decoder(raw: Raw, prefix: str, read: Tensor, residual: Tensor, centre: float = 0.0) -> Tensor:
    """A block whose attention reads `read`."""

    def heads(x: str, count: int) -> Tensor:
        out = linear(read, raw, f"{prefix}self_attn.{x}_proj").view(-1, count, D)
        weight = raw.get(f"{prefix}self_attn.{x}_norm.weight")
        return out if weight is None else normed(out, weight.float() + centre)

    q, k, v = turned(heads("q", HEADS)), turned(heads("k", KV)), heads("v", KV)
    k, v = (x.repeat_interleave(HEADS // KV, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / D**0.5
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = residual + linear(mixed, raw, f"{prefix}self_attn.o_proj")
    inner = normed(x, raw[f"{prefix}post_attention_layernorm.weight"].float() + centre)
    gated = F.silu(linear(inner, raw, f"{prefix}mlp.gate_proj")) * linear(inner, raw, f"{prefix}mlp.up_proj")
    return x + linear(gated, raw, f"{prefix}mlp.down_proj")


def rows(*widths: int) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(7)
    return tuple(torch.randn(T, width, generator=made) for width in widths)


def batch() -> Batch:
    return Batch.pack([Rows(np.zeros(T, dtype=np.int64), 0)], group=HEADS // KV)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["eagle", "eagle, pickled", "eagle, Qwen2"])
def test_eagle_computes_what_the_paper_says(layout: str, target: Target, tmp_path: Path) -> None:
    raw, head = LAYOUTS[layout][0], read_head(put(tmp_path, layout), target)
    assert isinstance(head, EagleHead)
    embedded, feature = rows(H, H)
    x = linear(torch.cat([embedded, feature], dim=-1), raw, "fc")
    close(head(embedded, feature, batch(), None), decoder(raw, "layers.0.", x, x))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("eagle3")])
def test_eagle3_computes_what_the_paper_says(layout: str, target: Target, tmp_path: Path) -> None:
    raw, config, _ = LAYOUTS[layout]
    head, shared = read_head(put(tmp_path, layout), target), TargetEnds.of(target.model)
    assert isinstance(head, Eagle3Head)
    embedded, *taps = rows(H, H, H, H)
    layer = "midlayer." if "midlayer.hidden_norm.weight" in raw else "layers.0."
    each = (f"fc_norm.{i}.weight" for i in range(3))
    read = torch.cat([normed(x, raw[n]) if n in raw else x for x, n in zip(taps, each, strict=True)], dim=-1)
    if "input_norm.weight" in raw:
        read = normed(read, raw["input_norm.weight"])
    feature = linear(read, raw, "fc")
    hidden = normed(feature, raw[f"{layer}hidden_norm.weight"])
    read = torch.cat([normed(embedded, raw[f"{layer}input_layernorm.weight"]), hidden], dim=-1)
    residual = hidden if config.get("norm_before_residual") else feature
    expected = decoder(raw, layer, read, residual)
    fused = head.fuse(taps, shared)
    close(fused, feature)
    out, last = head(embedded, fused, batch(), None), normed(expected, raw["norm.weight"])
    close(out, last if config.get("norm_output") else expected)
    said = linear(last, raw, "lm_head")
    logits = torch.full((T, V), -torch.inf)
    for i in range(said.shape[1]):
        logits[:, i + int(raw["d2t"][i]) if "d2t" in raw else i] = said[:, i]
    close(head.logits(out, shared), logits)
    tokens = torch.arange(V)
    table = raw.get("embed_tokens.weight", target.model.embedding.weight).float()
    assert torch.equal(head.embed(tokens, shared), table)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("medusa")])
def test_medusa_computes_what_the_paper_says(layout: str, target: Target, tmp_path: Path) -> None:
    raw, head = LAYOUTS[layout][0], read_head(put(tmp_path, layout), target)
    assert isinstance(head, MedusaHead)
    (feature,) = rows(H)
    outs = head(feature)
    assert len(outs) == {"medusa": 5, "medusa, two layers": 2}.get(layout, 3)
    for i, out in enumerate(outs):
        x, j = feature, 0
        while (name := f"blocks.{i}.layers.{j}" if "vLLM" in layout else f"{i}.{j}.linear") + ".bias" in raw:
            x, j = x + F.silu(linear(x, raw, name)), j + 1
        own = raw.get(f"lm_heads.{i}.weight" if "vLLM" in layout else f"{i}.{j}.weight")
        weight = target.model.head.weight if own is None else own.float()
        assert isinstance(weight, Tensor)
        close(head.logits(out, i, TargetEnds.of(target.model)), x @ weight.T)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("mtp")])
def test_mtp_computes_what_the_papers_say(layout: str, target: Target, tmp_path: Path) -> None:
    raw, head = LAYOUTS[layout][0], read_head(put(tmp_path, layout), target)
    assert isinstance(head, MTPHead)
    kind = next(k for k, parts in MTP_PARTS.items() if any(f".{parts[0]}." in name for name in raw))
    kind = "speculators" if "speculators" in layout else kind
    centre = 1.0 if kind == "qwen" else 0.0
    embedded, hidden = rows(H, H)
    for k in range(len(head.steps)):
        step = {
            "deepseek": f"model.layers.{LAYERS + k}.",
            "mimo": f"model.mtp_layers.{k}.",
            "qwen": "mtp.",
            "speculators": "mtp_layers.0.",
        }[kind]
        projection, first, second, last = (step + part for part in MTP_PARTS[kind])
        read = embedded.clone()
        if kind in ("deepseek", "mimo"):
            read[1] = 0  # of row 1: the first that such a module ever sees
        parts = [
            normed(read, raw[f"{first}.weight"].float() + centre),
            normed(hidden, raw[f"{second}.weight"].float() + centre),
        ]
        x = linear(torch.cat(parts[::-1] if kind == "mimo" else parts, dim=-1), raw, projection)
        prefix = "mtp.layers.0." if kind == "qwen" else step
        read = normed(x, raw[f"{prefix}input_layernorm.weight"].float() + centre)
        expected = normed(decoder(raw, prefix, read, x, centre), raw[f"{last}.weight"].float() + centre)
        close(head(embedded, hidden, batch(), None, k), expected)
    write_head(head, tmp_path / "written", "a/target")
    again = read_head(tmp_path / "written", target)
    assert isinstance(again, MTPHead)
    assert again.config.zero_first == (kind in ("deepseek", "mimo"))
    outs = (one(embedded, hidden, batch(), None) for one in (again, head))
    torch.testing.assert_close(*outs, rtol=0.1, atol=0.1)  # written in bfloat16


# what a configuration says


@pytest.mark.parametrize(
    ("extra", "taps"),
    [
        ({}, (2, 3, 3)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 6]}, (0, 4, 6)),  # vLLM: inputs
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)),  # SGLang: outputs
    ],
)
def test_which_layers_eagle3_reads(
    extra: dict[str, Any], taps: tuple[int, ...], target: Target, tmp_path: Path
) -> None:
    assert read_head(save(tmp_path, eagle3_raw(), EAGLE3 | extra), target).taps == taps


def test_speculators_norm_before_the_residual_unless_they_say_no(target: Target, tmp_path: Path) -> None:
    silent = {key: value for key, value in SPECULATORS3.items() if key != "norm_before_residual"}
    for config, expected in (
        (silent, True),
        ({**silent, "norm_before_residual": False}, False),
        (EAGLE3, False),
    ):
        head = read_head(save(tmp_path, eagle3_raw("layers.0."), config), target)
        assert isinstance(head, Eagle3Head)
        assert head.config.norm_before_residual is expected


def test_written_layers_are_told_in_both_ways_of_counting(target: Target, tmp_path: Path) -> None:
    given = {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
    write_head(read_head(save(tmp_path / "a", eagle3_raw(), given), target), tmp_path / "b", "x")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5]


def test_a_copy_of_the_targets_embedding_is_left_out(target: Target, tmp_path: Path) -> None:
    raw = eagle3_raw() | {"embed_tokens.weight": target.model.embedding.weight.clone()}
    head = read_head(save(tmp_path, raw, EAGLE3), target)
    assert isinstance(head, Eagle3Head)
    assert head.embedding is None


def test_rows_beyond_the_targets_vocabulary_are_padding(target: Target, tmp_path: Path) -> None:
    raw = eagle3_raw(draft=V, embedding=False)
    raw["lm_head.weight"] = torch.cat([raw["lm_head.weight"], torch.zeros(31, H).bfloat16()])
    head = read_head(save(tmp_path / "e", raw, {**CONFIG, "vocab_size": V + 31}), target)
    assert isinstance(head, Eagle3Head)
    assert torch.equal(head.head.weight, raw["lm_head.weight"][:V].float())
    raw = medusa_raw()
    own = raw["2.1.weight"]
    raw |= {
        f"{i}.1.weight": torch.cat([raw[f"{i}.1.weight"], torch.zeros(9, H).bfloat16()]) for i in range(3)
    }
    head = read_head(save(tmp_path / "m", raw, MEDUSA, "medusa_lm_head.safetensors"), target)
    assert isinstance(head, MedusaHead)
    assert torch.equal(head.lm_heads[2].weight, own.float())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True, "rope": RopeSpec(5e5)},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "activation": "gelu_tanh"},
        {"qk_norm": True, "rope": RopeSpec(kind="linear", factor=4.0), "max_positions": 2048},
        {"rope": RopeSpec(kind="llama3", factor=8.0, original_max_positions=512, high_freq_factor=3.0)},
        {"rope": RopeSpec(kind="yarn", factor=2.0, original_max_positions=256, attention_factor=0.9)},
        {"rope": RopeSpec(kind="yarn", factor=2.0, original_max_positions=256, mscale=0.7, truncate=False)},
        {"windows": (64,)},
    ],
)
def test_a_blocks_configuration_survives(changes: dict[str, Any], target: Target, tmp_path: Path) -> None:
    torch.manual_seed(0)
    c = adapted(parse_model_config(CONFIG), **changes)
    rope = c.rotation.rope
    c = c if rope.original_max_positions else adapted(c, rope=replace(rope, original_max_positions=512))
    head = Eagle3Head(Eagle3Config(c, H, 31, (1, 2, 3)), StockKernels())
    write_head(head, tmp_path / "written", "x")
    again = read_head(tmp_path / "written", target)
    assert isinstance(again, Eagle3Head)
    assert replace(again.config.block, family=c.family) == c


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qkv_bias": True, "o_bias": True}, "llama"),
        ({"qk_norm": True}, "qwen3"),
        ({"windows": (64,)}, "mistral"),
    ],
)
def test_a_written_block_is_of_a_family_that_has_its_parts(changes: dict[str, Any], family: str) -> None:
    c = adapted(parse_model_config(CONFIG), **changes)
    written = hf_config(c)
    assert written["model_type"] == family
    assert replace(parse_model_config(written), family=c.family) == c


def test_a_short_context_is_a_warning(target: Target, tmp_path: Path) -> None:
    path = save(tmp_path, eagle_raw(), {**CONFIG, "max_position_embeddings": 128})
    with pytest.warns(UserWarning, match="made for contexts of 128 tokens, requests may have 256"):
        read_head(path, target)


# refusals


def changed(raw: Raw, **shapes: tuple[int, ...] | None) -> Raw:
    raw = dict(raw)
    for name, shape in shapes.items():
        raw.pop(name, None)
        if shape is not None:
            raw[name] = torch.zeros(shape, dtype=torch.bfloat16)
    return raw


EXPERTS = {f"model.layers.{LAYERS}.mlp.experts.0.up_proj.weight": (4, H)}
GATED = {f"model.layers.{LAYERS}.self_attn.q_proj.weight": (2 * HEADS * D, H)}
LATENT = {f"model.layers.{LAYERS}.self_attn.kv_b_proj.weight": (4, H)}
QWEN = {**MTP, "model_type": "qwen3_next"}


@pytest.mark.parametrize(
    ("raw", "config", "message"),
    [
        (eagle_raw(), {**CONFIG, "hidden_size": 64}, "hidden size 64; the target's is 48: take the drafter"),
        (eagle_raw(), {**CONFIG, "vocab_size": 9000}, "vocabulary of 9,000 tokens; the target's has 97"),
        (eagle_raw(), {**CONFIG, "soothsay": {"target_layers": 8}}, "a model of 8 layers; the target has 6"),
        (eagle_raw(), {**CONFIG, "intermediate_size": 80}, r"\[96, 48\], .* should be \[160, 48\] together"),
        (changed(eagle_raw(), **{"fc.weight": (H, H)}), CONFIG, r"fc.weight \[48, 48\]: .* \[48, 96\]"),
        (changed(eagle_raw(), **{"layers.0.mlp.up_proj.weight": None}), CONFIG, "no tensor 'layers.0.mlp.up"),
        (
            changed(eagle_raw(), **{"layers.1.mlp.x.weight": (1,)}),
            CONFIG,
            "2 decoder blocks, where EAGLE has one",
        ),
        (changed(eagle_raw(), **{"enorm.weight": (H,)}), CONFIG, "a tensor 'enorm.weight', .* leave out"),
        (eagle_raw(), {k: v for k, v in CONFIG.items() if k != "vocab_size"}, "has no 'vocab_size'"),
        (eagle_raw(), {**CONFIG, "rope_scaling": {"type": "x"}}, "rope_scaling type 'x' is not supported"),
        (eagle3_raw(), {**EAGLE3, "vocab_size": 9000}, "vocabulary of 9,000 tokens"),
        (eagle3_raw(), {**EAGLE3, "target_hidden_size": 40}, "hidden size 40; the target's is 48"),
        (eagle3_raw(embedding=False), {**EAGLE3, "target_hidden_size": 40}, "hidden size 40"),
        (
            eagle3_raw(embedding=False),
            {**EAGLE3, "target_hidden_size": H, "hidden_size": 64},
            "hidden size 64; the target's is 48",
        ),
        (eagle3_raw(), {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, r"layers \[2, 5, 9\]"),
        (eagle3_raw(), {**EAGLE3, "eagle_aux_hidden_state_layer_ids": [2, 5]}, r"fc.weight \[48, 144\]"),
        (eagle3_raw(), {**EAGLE3, "eagle_config": {"use_aux_hidden_state": False}}, "last layer only"),
        (changed(eagle3_raw(), d2t=None), EAGLE3, "an output head of 31 tokens of 97, and no d2t"),
        (eagle3_raw() | {"d2t": torch.full((31,), 80)}, EAGLE3, "ids up to 110"),
        (changed(eagle3_raw(), **{"lm_head.weight": None}), EAGLE3, "no lm_head.weight"),
        (changed(eagle3_raw(), **{"input_norm.weight": (3 * H,)}), EAGLE3, "a tensor 'input_norm.weight'"),
        (eagle3_raw(), {**EAGLE3, "fc_norm": True}, r"no tensor 'fc_norm.0.weight'"),
        (eagle3_raw(tap_norms="each"), EAGLE3, r"a tensor 'fc_norm.0.weight'"),
        (eagle3_raw(), {**EAGLE3, "fc_norm": True, "norm_before_fc": True}, "and a head has one"),
        (eagle3_raw("layers.0."), {"speculators_model_type": "eagle3"}, "has no 'num_attention_heads'"),
        (
            eagle3_raw("layers.0."),
            {
                **SPECULATORS3,
                "speculators_model_type": "dflash",
                "mask_token_id": 3,
                "aux_hidden_state_layer_ids": [1, 3, 6],
                "draft_vocab_size": V,
            },
            "looks like DFlash .* no tensor 'hidden_norm.weight'",
        ),
        (eagle3_raw("layers.0."), {**SPECULATORS3, "speculators_model_type": "oracle"}, "kind 'oracle'"),
        (eagle_raw(), {**CONFIG, "mask_token_id": 3}, "fills masks"),
        (eagle_raw(), {**CONFIG, "soothsay_method": "oracle"}, "kind 'oracle'"),
        (medusa_raw(own=False), {**MEDUSA, "vocab_size": 32000}, "vocabulary of 32,000 tokens"),
        (medusa_raw(), {**MEDUSA, "soothsay": {"target_layers": 9}}, "a model of 9 layers"),
        (changed(medusa_raw(), **{"1.0.linear.weight": None}), MEDUSA, "no tensor '1.0.linear.weight'"),
        (changed(medusa_raw(), **{"1.0.linear.bias": None}), MEDUSA, "no tensor '1.0.linear.bias'"),
        (
            changed(vllm_medusa_raw(), **{"blocks.2.layers.1.bias": None}),
            VLLM_MEDUSA,
            "no tensor 'blocks.2.layers.1.bias'",
        ),
        (
            changed(medusa_raw(), **{"0.1.weight": (99, H), "1.1.weight": None, "2.1.weight": (99, H)}),
            MEDUSA,
            "no tensor '1.1.weight'",
        ),
        (changed(medusa_raw(), **{"1.1.weight": None}), MEDUSA, "no tensor '1.1.weight'"),
        (changed(medusa_raw(), **{f"{i}.1.weight": (90, H) for i in range(3)}), MEDUSA, "can say 90 tokens"),
        (changed(vllm_medusa_raw(), token_map=(9,)), VLLM_MEDUSA, "token_map"),
        (mtp_raw("deepseek"), {**MTP, "num_hidden_layers": 8}, "a model of 8 layers"),
        (changed(mtp_raw("deepseek"), **EXPERTS), MTP, "a mixture of experts; soothsay drafts with dense"),
        (changed(mtp_raw("deepseek"), **LATENT), MTP, r"multi-head latent attention \(DeepSeek\)"),
        (mtp_raw("deepseek"), {**MTP, "partial_rotary_factor": 0.5}, "rotates 50% of each head"),
        (changed(mtp_raw("deepseek"), **GATED), MTP, "an output gate"),
        (changed(mtp_raw("qwen"), **{"mtp.layers.1.mlp.x.weight": (1,)}), QWEN, "several MTP layers"),
        (random(block("model.layers.0.")), CONFIG, r"a whole model .* give it as draft-model\(model="),
        (random({"x.weight": (4, 4)}), CONFIG, "no drafter that soothsay knows"),
        ({}, CONFIG, "no weights"),
    ],
)
def test_refusals(raw: Raw, config: dict[str, Any], message: str, target: Target, tmp_path: Path) -> None:
    if not raw:
        save(tmp_path, {"x": torch.zeros(1)}, config)
        (tmp_path / "model.safetensors").unlink()
    else:
        save(tmp_path, raw, config)
    with pytest.raises(DrafterError, match=message) as refused:
        read_head(tmp_path, target)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "kind", "chosen"),
    [("eagle3", EagleHead, "eagle3"), ("eagle", Eagle3Head, "eagle"), ("medusa", MTPHead, "medusa")],
)
def test_one_methods_head_is_not_taken_for_anothers(
    layout: str, kind: type[Head], chosen: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(
        DrafterError, match=f"head of {chosen}, not of {kind.method}: choose drafter {chosen}"
    ):
        find_head(kind, put(tmp_path, layout), target)


SIZE = 32
"""Dimensions of the target's features that a head with a view reads."""


def view_of(scale: float = 1.5, own_head: bool = True) -> FeatureView:
    raw = random({"embedding": (V, SIZE), "norm": (SIZE,), "head": (V, SIZE)}, seed=3)
    head = raw["head"] if own_head else raw["embedding"]
    return FeatureView(H, scale, raw["embedding"], 2.0, raw["norm"].float(), 1e-5, head)


def narrow_head() -> MedusaHead:
    torch.manual_seed(4)
    return MedusaHead(MedusaConfig(SIZE, V, LAYERS, 2))


@pytest.mark.parametrize("own_head", [True, False])
def test_a_view_comes_back_as_it_was_written(own_head: bool, target: Target, tmp_path: Path) -> None:
    head, view = narrow_head(), view_of(own_head=own_head)
    write_head(head, tmp_path / "head", "target", view=view)
    found, again = find_head(MedusaHead, tmp_path / "head", target)
    assert same(found, narrow_head().bfloat16().float())
    assert again is not None
    for field in ("target_hidden_size", "scale", "embedding_scale", "norm_eps"):
        assert getattr(again, field) == getattr(view, field)
    for field in ("embedding", "norm", "head"):
        assert torch.equal(getattr(again, field), getattr(view, field))
    size = (tmp_path / "head" / "medusa_lm_head.safetensors").stat().st_size
    assert (size > 2 * 2 * V * SIZE) or not own_head  # a table that is both is stored once


def test_a_view_is_the_first_dimensions_and_its_own_ends(target: Target, tmp_path: Path) -> None:
    view = view_of()
    write_head(narrow_head(), tmp_path / "head", "target", view=view)
    served = load_head(MedusaHead, tmp_path / "head", target)
    (tap,) = rows(H)
    fused = served.fuse([tap])
    x = tap[:, :SIZE] / 1.5
    close(fused, x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * view.norm)
    close(served.shared.logits(fused), fused @ view.head.float().T)
    tokens = torch.arange(5)
    assert torch.equal(served.shared.embed(tokens), view.embedding[:5].float() * 2)
    assert served.shared.vocab_size == V


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_size": None}, "should have target_hidden_size, feature_size, feature_scale"),
        ({"more": 1}, "should have target_hidden_size, feature_size, feature_scale"),
        ({"feature_scale": 0}, "has feature_scale=0, which should be a number above 0"),
        ({"norm_eps": "small"}, "has norm_eps='small', which should be a number"),
        ({"target_hidden_size": 64}, "reads features of 64 dimensions; the target's have 48"),
        ({"feature_size": 49}, "reads 49 of 48 dimensions"),
        ({"feature_size": 24}, r"needs verifier_embed_tokens.weight to be \[97, 24\]"),
        ({"verifier_norm.weight": None}, "has no tensor 'verifier_norm.weight'"),
        ({"verifier_norm.weight": torch.ones(31)}, r"needs verifier_norm.weight to be \[32\].* \[31\]"),
        (
            {"verifier_embed_tokens.weight": torch.zeros(98, SIZE)},
            "for a vocabulary of 98 tokens; the target's has 97",
        ),
        (
            {"verifier_lm_head.weight": torch.zeros(V, SIZE, dtype=torch.int8)},
            r"needs verifier_lm_head.weight to be .* it is torch.int8",
        ),
        ({"verifier_lm_head.bias": torch.zeros(V)}, "has a tensor 'verifier_lm_head.bias'"),
    ],
)
def test_views_that_are_damaged_or_another_target_s(
    change: dict[str, Any], message: str, target: Target, tmp_path: Path
) -> None:
    write_head(narrow_head(), tmp_path / "head", "target", view=view_of())
    config, file = tmp_path / "head" / "config.json", tmp_path / "head" / "medusa_lm_head.safetensors"
    content, tensors = json.loads(config.read_text()), load_file(file)
    for key, value in change.items():
        parts = tensors if "." in key else content["soothsay"]["view"]
        parts[key] = value
        if value is None:
            del parts[key]
    config.write_text(json.dumps(content))
    save_file(tensors, file)
    with pytest.raises(DrafterError, match=message) as refused:
        read_head(tmp_path / "head", target)
    assert str(tmp_path / "head") in str(refused.value)


def test_a_head_must_have_the_size_of_its_view(target: Target, tmp_path: Path) -> None:
    head = MedusaHead(MedusaConfig(H, V, LAYERS, 2))
    write_head(head, tmp_path / "head", "target", view=view_of())
    with pytest.raises(DrafterError, match="for a model of hidden size 48; its view of the target's has 32"):
        read_head(tmp_path / "head", target)


def test_without_a_view_copies_of_the_target_s_ends_are_refused_or_ignored_as_before(
    target: Target, tmp_path: Path
) -> None:
    raw = eagle_raw() | {"verifier_norm.weight": torch.ones(H)}
    with pytest.raises(DrafterError, match=r"has a tensor 'verifier_norm\.weight'"):
        read_head(save(tmp_path / "eagle", raw, CONFIG), target)
    raw = eagle3_raw("layers.0.") | {"verifier_norm.weight": torch.ones(H)}
    _, view = find_head(Eagle3Head, save(tmp_path / "eagle3", raw, SPECULATORS3), target)
    assert view is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_heads_are_refused(dtype: torch.dtype, target: Target, tmp_path: Path) -> None:
    raw = eagle_raw() | {"layers.0.mlp.down_proj.weight": torch.zeros(H, INNER).to(dtype)}
    with pytest.raises(DrafterError, match=f"stored as {dtype}: quantized drafters are not read"):
        read_head(save(tmp_path, raw, CONFIG), target)


def test_what_is_no_drafters_directory(target: Target, tmp_path: Path) -> None:
    for message, prepare in {
        "no drafter at .*hf download": lambda path: None,
        "has no config.json": lambda path: path.mkdir(),
        "LoRA adapter": lambda path: (path / "adapter_config.json").write_text("{}"),
        "not valid JSON": lambda path: (path / "config.json").write_text("{"),
        "should hold a JSON object": lambda path: (path / "config.json").write_text("[]"),
        "no weights": lambda path: (path / "config.json").write_text("{}"),
        "pytorch_model.bin is damaged": lambda path: (path / "pytorch_model.bin").write_bytes(b"PK\x03\x04x"),
        "model.safetensors is damaged": lambda path: (path / "model.safetensors").write_bytes(b"x"),
    }.items():
        prepare(tmp_path / "x")
        with pytest.raises(DrafterError, match=message):
            read_head(tmp_path / "x", target)
    save(tmp_path / "own", random(block("model.layers.0.")), CONFIG)
    with pytest.raises(DrafterError, match="has no MTP modules in its checkpoint"):
        read_head(tmp_path / "own", replace(target, path=tmp_path / "own"))


def test_pickles_that_would_run_something_are_refused(target: Target, tmp_path: Path) -> None:
    save(tmp_path, {"fc.weight": Path("x")}, CONFIG, "pytorch_model.bin")  # type: ignore[dict-item]
    with pytest.raises(DrafterError, match="more than tensors, and loading it could run anything"):
        read_head(tmp_path, target)
    (tmp_path / "pytorch_model.bin").unlink()
    torch.save(eagle_raw(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert read_head(tmp_path, target).method == "eagle"


def test_what_cannot_be_written(target: Target, tmp_path: Path) -> None:
    c, kernels = parse_model_config(CONFIG), StockKernels()
    served = serve(EagleHead(EagleConfig(c, False, LAYERS), kernels), kernels, torch.float32)
    shared = HydraHead(HydraConfig(H, LAYERS, 2))
    medusa = read_head(put(tmp_path, "medusa, shared head"), target)
    zeroed = MTPHead(MTPConfig(c, LAYERS, zero_first=True), kernels)
    for head, layout, message in (
        (served, "", "made ready to serve"),
        (shared, "speculators", "hydra has no layout 'speculators'"),
        (medusa, "vllm", "share the target's"),
        (zeroed, "speculators", "zero_first=True"),
    ):
        with pytest.raises(DrafterError, match=message):
            write_head(head, tmp_path / "x", "a/target", layout)
        assert not (tmp_path / "x").exists()
    with pytest.raises(DrafterError, match="no place in a drafter's checkpoint"):
        hf_config(adapted(c, attention_scale=1.0))
    with pytest.raises(ModelError, match="not an empty directory"):
        write_head(shared, tmp_path / "given", "a/target")
