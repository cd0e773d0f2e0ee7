"""GGUF against the Hugging Face models that the files are made from, as llama.cpp's converter does."""

from __future__ import annotations

import gc
import json
import math
import re
import struct
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
import transformers
from families import run
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from soothsay.core.batch import Rows
from soothsay.errors import ModelError
from soothsay.model.decoder.blocks import Block
from soothsay.model.decoder.rope import Rope, attention_scale, inverse_frequencies
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.formats.gguf_file import GGUFCheckpoint
from soothsay.model.formats.gguf_tokenizer import build_tokenizer, stop_ids
from soothsay.model.specs.attention_spec import AttentionSpec, RopeSpec
from soothsay.model.specs.feed_forward_spec import DenseSpec
from soothsay.model.weights.checkpoint import SafetensorsCheckpoint, open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.tokenizer import Tokenizer

TEXTS = [
    "Once upon a time",
    "  two leading spaces, a tab\tand\n\nnew lines ",
    "Lily's mom said: 'Let's go!' 12345 times, déjà vu",
    "漢字 and 🚀 and \u00a0 and e\u0301",
    "aaaaaaaaaaaaaaa      b",
    "<s> is a token, </s> too",
]

LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-20,  # exact in the float32 of a header
}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # family -> transformers' class, its own settings
    "llama": ("Llama", {"rope_theta": 50_000.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3_text": ("Gemma3", GEMMA | {"num_hidden_layers": 7}),
    "phi3": (
        "Phi3",
        {
            "pad_token_id": None,
            "sliding_window": 16,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.25],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            },
        },
    ),
    "smollm3": ("SmolLM3", {"pad_token_id": None, "tie_word_embeddings": False, "num_hidden_layers": 4}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "logits_scaling": 8.0,
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": None}),
    "olmo3": ("Olmo3", {"pad_token_id": None, "num_hidden_layers": 4, "sliding_window": 16}),
    "ministral3": (
        "Ministral3",
        {
            "pad_token_id": None,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.125,
            },
        },
    ),
    "glm4": ("Glm4", {"pad_token_id": None, "head_dim": 32, "attention_bias": True}),
    "cohere": ("Cohere", {"layer_norm_eps": 2.0**-20, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"layer_norm_eps": 2.0**-20, "logit_scale": 0.25, "num_hidden_layers": 4}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1.5e5,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
}
ARCHITECTURES = {
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


INTERLEAVED = tuple(gguf.MODEL_ARCH[name] for name in ("LLAMA", "SMOLLM3", "GRANITE", "MISTRAL3"))
"""llama.cpp's converter interleaves q and k of subclasses of its LlamaModel."""


def architecture(family: str) -> gguf.MODEL_ARCH:
    return ARCHITECTURES.get(family) or gguf.MODEL_ARCH[family.upper()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory with a random model of a family, as transformers saves it."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            name, own = MODELS[family]
            config_class = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
            torch.manual_seed(len(family))
            model = getattr(transformers, f"{name}ForCausalLM")(
                getattr(transformers, config_class)(**SIZES | own)
            )
            for parameter in model.parameters():  # norms and biases are ones and zeros otherwise
                parameter.data = 0.1 * torch.randn_like(parameter)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return make


def encode(tensor: torch.Tensor, kind: str) -> tuple[torch.Tensor, np.ndarray]:
    """A matrix as `kind` stores it: the values that can be expected back, and the bytes."""
    if kind == "F16":
        return tensor.half(), tensor.half().numpy()
    if kind == "BF16":
        return tensor.bfloat16(), quantize(tensor.bfloat16().float().numpy(), GGMLQuantizationType.BF16)
    if kind == "Q8_0":
        return tensor, quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
    return tensor, tensor.numpy()


def add(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: str = "F32") -> None:
    writer.add_tensor(name, encode(tensor, kind)[1], raw_dtype=GGMLQuantizationType[kind])


def add_header(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """The keys that llama.cpp's converter writes."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    ropes = config["rope_parameters"]
    if "full_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        ropes = ropes["full_attention"]
    writer.add_rope_freq_base(ropes["rope_theta"])
    add_own_keys(writer, config)
    if config["model_type"] in ("mixtral", "qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "sliding_window" in config and config["model_type"].startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def add_own_keys(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """The keys that single families have."""
    family, ropes = config["model_type"], config["rope_parameters"]
    if family in ("phi3", "olmo3", "cohere2", "gpt_oss"):
        writer.add_sliding_window(config["sliding_window"])
    if family == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if family in ("phi3", "glm4"):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(int(ropes["partial_rotary_factor"] * head_dim))
    if family == "phi3":
        writer.add_rope_scaling_orig_ctx_len(ropes["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(1.5)  # which follows from the contexts, too
        for name, key in (("long", "long_factor"), ("short", "short_factor")):
            add(writer, f"rope_factors_{name}.weight", torch.tensor(ropes[key]))
    if family == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if family in ("ministral3", "gpt_oss"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(ropes["factor"])
        writer.add_rope_scaling_orig_ctx_len(ropes["original_max_position_embeddings"])
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if family == "ministral3":
        writer.add_rope_scaling_yarn_beta_fast(ropes["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(ropes["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(ropes["mscale_all_dim"])
        writer.add_attn_temperature_scale(ropes["llama_4_scaling_beta"])
    if family in ("cohere", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def experts_of_gpt_oss(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One matrix `[out, in]` and one bias for each expert and part, under the usual names."""
    apart = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition("mlp.experts.")
        if not stem:
            apart[name] = tensor
            continue
        suffix = "bias" if part.endswith("bias") else "weight"
        for e, stored in enumerate(tensor):
            expert = stored if suffix == "bias" else stored.t()
            parts = {"down_proj": expert}
            if part.startswith("gate_up"):
                parts = {"gate_proj": expert[::2], "up_proj": expert[1::2]}
            apart |= {f"{stem}mlp.experts.{e}.{own}.{suffix}": x.clone() for own, x in parts.items()}
    return apart


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts' matrices stacked, under the names that gguf's table knows."""
    stacks: dict[str, list[torch.Tensor]] = {}
    rest = {}
    for name in sorted(tensors):
        match = re.fullmatch(
            r"model\.(layers\.\d+)\.(?:block_sparse_moe|mlp)\.experts\.\d\.(\w+)\.(weight|bias)", name
        )
        if match is None:
            rest[name] = tensors[name]
            continue
        layer, part, suffix = match.groups()
        where = "feed_forward.experts" if part.startswith("w") else "mlp.experts"
        prefix = "" if part.startswith("w") else "model."
        stacks.setdefault(f"{prefix}{layer}.{where}.{part}.{suffix}", []).append(tensors[name])
    return rest | {name: torch.stack(stack) for name, stack in stacks.items()}


def convert(source: Path, target: Path, kind: str, tensors_in_part: int = 0) -> dict[str, torch.Tensor]:
    """What llama.cpp's converter does; returns the values to expect, under Hugging Face's names."""
    config = SafetensorsCheckpoint(source).config
    tensors = load_file(source / "model.safetensors")
    family = config["model_type"]
    tensors = experts_of_gpt_oss(tensors) if family == "gpt_oss" else tensors
    arch = architecture(family)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=tensors_in_part)
    add_header(writer, config)
    for name, tensor in stack_experts(tensors).items():
        suffixed = f"{name}.weight" if name.endswith("sinks") else name
        stored = names.get_name(suffixed, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if arch in INTERLEAVED and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        add(writer, stored, tensor, kind if tensor.ndim > 1 and not name.endswith("bias") else "F32")
    finish(writer)
    return {name: encode(tensor, kind)[0] if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny(path: Path, arch: str = "llama", more: Callable[[GGUFWriter], object] = lambda writer: None) -> Path:
    """A file with a header, an embedding and what `more` adds."""
    writer = GGUFWriter(path, arch)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    add_header(writer, SIZES | caps | {"model_type": arch, "rope_parameters": {"rope_theta": 10_000.0}})
    add(writer, "token_embd.weight", torch.randn(SIZES["vocab_size"], SIZES["hidden_size"]))
    more(writer)
    finish(writer)
    return path


class TestStories:
    """A real model, trained and converted by others."""

    @pytest.fixture
    def stories(self, shared: Path) -> Path:
        return shared / "data" / "stories260K.gguf"

    @pytest.fixture
    def checkpoint(self, stories: Path) -> GGUFCheckpoint:
        return GGUFCheckpoint(stories)

    def test_config(self, checkpoint: GGUFCheckpoint) -> None:
        config = parse_model_config(checkpoint.config)
        assert (config.family, config.vocab_size, config.hidden_size) == ("llama", 512, 64)
        own = config.first(AttentionSpec)
        assert (config.num_layers, own.heads, own.kv_heads, own.size) == (5, 8, 4, 8)
        assert (config.first(DenseSpec).size, config.max_positions, config.head.tied) == (172, 128, False)
        assert config.norm.eps == pytest.approx(1e-5)
        assert checkpoint.eos_ids == (2,)

    def test_tensors(self, checkpoint: GGUFCheckpoint) -> None:
        assert len(checkpoint.names()) == 48
        with checkpoint.open() as read:
            assert read("model.embed_tokens.weight").shape == (512, 64)
            assert read("lm_head.weight").shape == (512, 64)
            assert read("model.layers.4.self_attn.k_proj.weight").shape == (32, 64)
            assert read("model.layers.0.mlp.down_proj.weight").shape == (64, 172)
            assert read("model.norm.weight").shape == (64,)

    def test_prompt(self, checkpoint: GGUFCheckpoint) -> None:
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None
        assert tokenizer.encode("Once upon a time") == [1, 403, 407, 261, 378]
        assert tokenizer.encode("Once upon a time", special=False) == [403, 407, 261, 378]
        assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        assert not tokenizer.has_chat_template

    @pytest.mark.parametrize("text", TEXTS[:-1])
    def test_round_trip(self, checkpoint: GGUFCheckpoint, text: str) -> None:
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None
        assert tokenizer.decode(tokenizer.encode(text)) == text

    @pytest.mark.parametrize("text", TEXTS[:-1])
    def test_merges_as_sentencepiece(self, checkpoint: GGUFCheckpoint, stories: Path, text: str) -> None:
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None
        fields = gguf.GGUFReader(stories).fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        scores = fields["tokenizer.ggml.scores"].contents()
        assert tokenizer.encode(text, special=False) == sentencepiece(text, tokens, scores)

    def test_special_tokens_in_text(self, checkpoint: GGUFCheckpoint) -> None:
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None
        ids = tokenizer.encode("<s>Once</s>upon", special=False)  # as if a space stood after each
        assert ids == [1, 403, 2, 407]
        assert tokenizer.decode(ids) == "Once upon"
        assert tokenizer.decode(ids, skip_special=False) == "<s> Once</s> upon"


def sentencepiece(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """The definition: while two neighbours form a token, merge those whose token scores best, leftmost."""
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [
            (-scores[ids[left + right]], i)
            for i, (left, right) in enumerate(pairwise(parts))
            if left + right in ids
        ]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    pieces = [[p] if p in ids else [f"<0x{byte:02X}>" for byte in p.encode()] for p in parts]
    return [ids[piece] for group in pieces for piece in group]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("family", list(MODELS))
def test_tensors_equal_the_original(
    family: str, kind: str, directory: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = convert(directory(family), tmp_path / "model.gguf", kind)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.names() == expected.keys()
    with checkpoint.open() as read:
        for name, value in expected.items():
            tensor = read(name)
            assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape), name
            if kind == "Q8_0" and value.ndim > 1:  # half of 1/127 of the largest, and a scale in 16 bits
                assert (tensor - value).abs().max() <= value.abs().max() * (0.5 / 127 + 2**-11), name
            else:
                torch.testing.assert_close(
                    tensor,
                    value,
                    rtol=0,
                    atol=1e-7 if "norm" in name else 0,
                    msg=lambda m, n=name: f"{n}: {m}",
                )


@pytest.mark.parametrize("family", list(MODELS))
def test_config_equals_the_original(family: str, directory: Callable[[str], Path], tmp_path: Path) -> None:
    source = directory(family)
    convert(source, tmp_path / "model.gguf", "F32")
    checkpoint = GGUFCheckpoint(tmp_path / "model.gguf")
    ours, theirs = (parse_model_config(c.config) for c in (checkpoint, SafetensorsCheckpoint(source)))
    assert ours == theirs
    assert checkpoint.eos_ids == ()
    assert checkpoint.tokenizer() is None


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("family", ["phi3", "glm4", "cohere2"])
def test_rows_of_integers_are_reordered_too(
    family: str, dtype: Any, directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """Queries and keys of these families rotate in part, or by neighbours: see `head_order`."""
    convert(directory(family), tmp_path / "model.gguf", "Q8_0")
    x, products = torch.randn(5, SIZES["hidden_size"]), []
    for path, its_dtype in ((tmp_path / "model.gguf", dtype), (directory(family), "float32")):
        model = load_model(open_checkpoint(path), its_dtype)
        attention = cast(Block, model.blocks[1]).attention
        products.append(attention.qkv(x).float())
    assert (products[0] - products[1]).abs().max() < 0.03 * products[1].abs().max()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_tensors_are_views_of_the_file(kind: str, tmp_path: Path) -> None:
    path = tiny(
        tmp_path / "model.gguf", more=lambda writer: add(writer, "output.weight", torch.randn(64, 64), kind)
    )
    with GGUFCheckpoint(path).open() as read:
        first, second = read("lm_head.weight"), read("lm_head.weight")
        assert first.data_ptr() == second.data_ptr()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/maps")
def test_file_is_unmapped_when_nothing_refers_to_it(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf")

    def mapped() -> bool:
        gc.collect()
        return str(path) in Path("/proc/self/maps").read_text()

    checkpoint = GGUFCheckpoint(path)
    assert not mapped()
    with checkpoint.open() as read:
        kept = read("model.embed_tokens.weight")
        assert mapped()
    assert mapped()
    assert kept.isfinite().all()
    del kept
    assert not mapped()


class TestRope:
    @pytest.mark.parametrize(
        "rope",
        [
            RopeSpec(500_000.0, "llama3", 8.0, 8192, 1.0, 4.0),
            RopeSpec(500_000.0, "llama3", 32.0, 8192, 1.0, 4.0),
            RopeSpec(10_000.0, "llama3", 4.0, 1024, 2.0, 16.0),
            RopeSpec(10_000.0, "default"),
        ],
    )
    def test_llama3_divisors(self, rope: RopeSpec, tmp_path: Path) -> None:
        wanted = inverse_frequencies(rope, 128)
        divisors = inverse_frequencies(RopeSpec(rope.theta), 128) / wanted

        def more(writer: GGUFWriter) -> None:
            writer.add_key_length(128)
            writer.add_value_length(128)
            writer.add_rope_dimension_count(128)
            writer.kv_data[0]["llama.rope.freq_base"].value = rope.theta
            add(writer, "rope_freqs.weight", divisors)

        checkpoint = GGUFCheckpoint(tiny(tmp_path / "model.gguf", more=more))
        config = parse_model_config(checkpoint.config)
        assert config.rotation.rope.kind == rope.kind
        assert config.max_positions == SIZES["max_position_embeddings"]
        torch.testing.assert_close(inverse_frequencies(config.rotation.rope, 128), wanted, rtol=1e-4, atol=0)
        assert checkpoint.names() == {"model.embed_tokens.weight"}

    def test_divisors_of_another_kind(self, tmp_path: Path) -> None:
        path = tiny(
            tmp_path / "model.gguf",
            more=lambda writer: add(
                writer, "rope_freqs.weight", torch.tensor([1.0, 3.0, 2.0, 8.0, 1, 1, 1, 1])
            ),
        )
        with pytest.raises(ModelError, match=r"model\.gguf.*rope_freqs\.weight.*Hugging Face directory"):
            GGUFCheckpoint(path)

    def test_linear(self, tmp_path: Path) -> None:
        def more(writer: GGUFWriter) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(4.0)

        config = parse_model_config(GGUFCheckpoint(tiny(tmp_path / "model.gguf", more=more)).config)
        rope = config.rotation.rope
        assert (rope.kind, rope.factor) == ("linear", 4.0)

    def test_none(self, tmp_path: Path) -> None:
        path = tiny(
            tmp_path / "model.gguf",
            more=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.NONE),
        )
        assert parse_model_config(GGUFCheckpoint(path).config).rotation.rope == RopeSpec(
            original_max_positions=128
        )

    def test_yarn(self, tmp_path: Path) -> None:
        def more(writer: GGUFWriter) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(64)
            writer.add_rope_scaling_yarn_beta_fast(16.0)

        config = parse_model_config(GGUFCheckpoint(tiny(tmp_path / "model.gguf", "qwen2", more)).config)
        assert config.rotation.rope == RopeSpec(
            10_000.0, "yarn", 4.0, original_max_positions=64, beta_fast=16.0, beta_slow=1.0
        )
        assert config.max_positions == 256

    @pytest.mark.parametrize("multiplier", [0.5, 1.0, 1.75])
    def test_yarn_with_a_multiplier_of_attention(self, multiplier: float, tmp_path: Path) -> None:
        """llama.cpp's runtime multiplies cosines and sines by `attn_factor`, and by what yarn itself asks."""

        def more(writer: GGUFWriter) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(8.0)
            writer.add_rope_scaling_orig_ctx_len(64)
            writer.add_float32("qwen3.rope.scaling.attn_factor", multiplier)

        config = parse_model_config(GGUFCheckpoint(tiny(tmp_path / "model.gguf", "qwen3", more)).config)
        usual = 0.1 * math.log(8) + 1
        assert attention_scale(config.rotation.rope) == pytest.approx(multiplier * usual)
        positions = torch.arange(100)
        cos, sin = Rope(config.rotation)(positions)
        torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, (multiplier * usual) ** 2))

    @pytest.mark.parametrize(
        ("family", "theta"),
        [(family, 1e6 if family == "gemma3_text" else 1e4) for family in list(MODELS)[:7]],
    )
    def test_a_file_without_a_base(self, family: str, theta: float, tmp_path: Path) -> None:
        """llama.cpp takes 10,000, for a Mixtral too. Gemma 3 has a million, and 10,000 in local layers."""
        arch = gguf.MODEL_ARCH_NAMES[architecture(family)]

        def more(writer: GGUFWriter) -> None:
            del writer.kv_data[0][f"{arch}.rope.freq_base"]
            if family in ("mixtral", "qwen3_moe"):
                writer.add_expert_count(4)
                writer.add_expert_used_count(2)
            if family == "gemma3_text":
                writer.add_sliding_window(16)
                writer.add_sliding_window_pattern([True, *[False] * (LAYERS - 1)])

        config = parse_model_config(GGUFCheckpoint(tiny(tmp_path / "model.gguf", arch, more)).config)
        assert (config.family, config.rotation.rope.theta) == (family, theta)
        thetas = {rotation.rope.theta for rotation in config.rotations} - {theta}
        assert thetas == ({1e4} if arch == "gemma3" else set())

    def test_longrope(self, tmp_path: Path) -> None:
        path = tiny(
            tmp_path / "model.gguf",
            more=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        )
        with pytest.raises(ModelError, match=r"'longrope' is not supported, only linear and yarn"):
            GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("pattern", "windows"), [(2, (16, None)), ([False, True], (None, 16)), (1, (None, None)), (0, (16, 16))]
)
def test_sliding_window_pattern(
    pattern: int | list[bool], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    def more(writer: GGUFWriter) -> None:
        writer.add_sliding_window(16)
        writer.add_sliding_window_pattern(pattern)

    config = parse_model_config(GGUFCheckpoint(tiny(tmp_path / "model.gguf", "gemma3", more)).config)
    assert config.windows == windows


class TestErrors:
    def fails(self, path: Path, message: str) -> None:
        with pytest.raises(ModelError, match=message) as caught:
            GGUFCheckpoint(path)
        assert str(path) in str(caught.value)

    def test_missing(self, tmp_path: Path) -> None:
        self.fails(tmp_path / "model.gguf", "is missing; check the path")

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 something else"])
    def test_not_gguf(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        self.fails(path, "is not a GGUF file")

    @pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 0.999])
    def test_truncated(self, tmp_path: Path, share: float) -> None:
        path = tiny(tmp_path / "model.gguf")
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])
        self.fails(path, "damaged or cut short .* download it again")

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        self.fails(
            tiny(tmp_path / "model.gguf", "bert"),
            "architecture 'bert'; the known ones are llama, qwen2, qwen3, qwen3moe, qwen2vl, qwen3vl, ",
        )

    def test_unsupported_type(self, tmp_path: Path) -> None:
        def more(writer: GGUFWriter) -> None:
            data = np.zeros((64, 18), np.uint8)
            writer.add_tensor("output.weight", data, raw_dtype=GGMLQuantizationType.Q1_0)

        self.fails(
            tiny(tmp_path / "model.gguf", more=more),
            r"'output.weight' is of type Q1_0, which soothsay does not compute; take this model's file in",
        )

    def test_unknown_tensor(self, tmp_path: Path) -> None:
        path = tiny(
            tmp_path / "model.gguf", more=lambda w: add(w, "blk.0.attn_q_norm_2.weight", torch.ones(8))
        )
        self.fails(path, r"llama as soothsay knows it has no tensor 'blk\.0\.attn_q_norm_2\.weight'")

    def test_partial_rotation(self, tmp_path: Path) -> None:
        self.fails(
            tiny(tmp_path / "model.gguf", more=lambda writer: writer.add_rope_dimension_count(8)),
            r"rope\.dimension_count 8 is not the size of a head, 16",
        )

    def test_layers_that_differ(self, tmp_path: Path) -> None:
        def more(writer: GGUFWriter) -> None:
            writer.kv_data[0]["llama.attention.head_count_kv"] = gguf.GGUFValue(
                [2, 4], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32
            )

        self.fails(tiny(tmp_path / "model.gguf", more=more), "head_count_kv differs from layer to layer")

    def test_missing_key(self, tmp_path: Path) -> None:
        path = tiny(
            tmp_path / "model.gguf", more=lambda writer: writer.kv_data[0].pop("llama.block_count") and None
        )
        self.fails(path, r"no metadata llama\.block_count")

    def test_no_model(self, tmp_path: Path) -> None:
        writer = GGUFWriter(tmp_path / "model.gguf", "llama")
        add(writer, "output.weight", torch.ones(4, 4))
        finish(writer)
        self.fails(tmp_path / "model.gguf", r"no tensor 'token_embd\.weight'")


SPM_TOKENS = [
    ("<unk>", 0.0, TokenType.UNKNOWN),
    ("<s>", 0.0, TokenType.CONTROL),
    ("</s>", 0.0, TokenType.CONTROL),
    *((f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)),
    *((piece, -float(i), TokenType.NORMAL) for i, piece in enumerate(["ab", "\u2581ab", "bc", "abc"])),
    *((piece, -100.0, TokenType.NORMAL) for piece in "\u2581abcd"),
    ("  ", -1000.0, TokenType.USER_DEFINED),
    ("<end_of_turn>", -1000.0, TokenType.CONTROL),
]


def add_vocabulary(writer: GGUFWriter, kind: str, tokens: list[str], types: list[int]) -> None:
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)


def spm(path: Path, more: Callable[[GGUFWriter], object] = lambda writer: None) -> GGUFCheckpoint:
    def all_of_it(writer: GGUFWriter) -> None:
        add_vocabulary(
            writer, "llama", [t for t, _, _ in SPM_TOKENS], [int(kind) for _, _, kind in SPM_TOKENS]
        )
        writer.add_token_scores([score for _, score, _ in SPM_TOKENS])
        more(writer)

    return GGUFCheckpoint(tiny(path / "model.gguf", more=all_of_it))


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    names = {i: token for token, i in tokenizer.vocabulary().items()}
    return [names[i] for i in tokenizer.encode(text)]


class TestSentencePiece:
    def test_defaults(self, tmp_path: Path) -> None:
        checkpoint = spm(tmp_path)
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None
        assert len(tokenizer) == len(SPM_TOKENS)
        assert tokens_of(tokenizer, "abc é") == ["<s>", "\u2581ab", "c", "\u2581", "<0xC3>", "<0xA9>"]
        assert tokens_of(tokenizer, "a  b") == ["<s>", "\u2581", "a", "  ", "\u2581", "b"]
        assert tokenizer.decode(tokenizer.encode("abc é")) == "abc é"
        assert checkpoint.eos_ids == (2, len(SPM_TOKENS) - 1)  # the second by its text

    def test_settings(self, tmp_path: Path) -> None:
        def more(writer: GGUFWriter) -> None:
            writer.add_add_bos_token(False)
            writer.add_add_eos_token(True)
            writer.add_add_space_prefix(False)
            writer.add_eot_token_id(7)
            writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")

        checkpoint = spm(tmp_path, more)
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None
        assert tokens_of(tokenizer, "abc") == ["abc", "</s>"]
        assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"
        assert tokenizer.decode(tokenizer.encode("a  b")) == "a  b"
        assert tokenizer.render([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
        assert checkpoint.eos_ids[:2] == (2, 7)

    def test_a_chat_template_for_tools(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "for tools"}]
        tokenizer = spm(tmp_path, lambda writer: writer.add_chat_template(named)).tokenizer()
        assert tokenizer is not None
        assert (tokenizer.render([]), tokenizer.render([], tools=[{}])) == ("plain", "for tools")

    def test_only_normal_tokens_merge(self, tmp_path: Path) -> None:
        """An unused token, or one that a user defined, is no part and no result of a merge."""
        kinds = {"cd": TokenType.UNUSED, "bcd": TokenType.NORMAL, "ac": TokenType.NORMAL}

        def more(writer: GGUFWriter) -> None:
            add_vocabulary(
                writer,
                "llama",
                [t for t, _, _ in SPM_TOKENS] + list(kinds),
                [int(kind) for _, _, kind in SPM_TOKENS] + [int(kind) for kind in kinds.values()],
            )
            writer.add_token_scores([score for _, score, _ in SPM_TOKENS] + [1.0, 1.0, 1.0])

        tokenizer = GGUFCheckpoint(tiny(tmp_path / "model.gguf", more=more)).tokenizer()
        assert tokenizer is not None
        assert tokens_of(tokenizer, "cd")[1:] == ["\u2581", "c", "d"]
        assert tokens_of(tokenizer, "ac")[1:] == ["\u2581", "ac"]
        merges = json.loads(tokenizer.backend.to_str())["model"]["merges"]
        assert merges[0] == ["bc", "d"]  # not b and cd
        assert not any("cd" in merge for merge in merges)

    def test_of_equal_scores_the_first_token_merges_first(self, tmp_path: Path) -> None:
        letters = "abcdefghijklmnopqrst"
        pairs = [left + right for left in letters for right in letters]
        np.random.default_rng(0).shuffle(pairs)
        scores = [float(i % 3) for i in range(len(pairs))]
        tokens = ["<unk>", "<s>", "</s>", *letters, *pairs]

        def more(writer: GGUFWriter) -> None:
            kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.NORMAL] * (len(tokens) - 3)]
            add_vocabulary(writer, "llama", tokens, [int(kind) for kind in kinds])
            writer.add_token_scores([0.0] * (3 + len(letters)) + scores)

        tokenizer = GGUFCheckpoint(tiny(tmp_path / "model.gguf", more=more)).tokenizer()
        assert tokenizer is not None
        merges = json.loads(tokenizer.backend.to_str())["model"]["merges"]
        assert ["".join(merge) for merge in merges] == pairs[2::3] + pairs[1::3] + pairs[::3]

    def test_a_large_vocabulary_opens_at_once(self, tmp_path: Path) -> None:
        """As fast as a loop that only reads the tokens, but for a factor of 2.5."""
        tokens = ["<unk>", "<s>", "</s>", *(f"token {i}" for i in range(262_141))]

        def more(writer: GGUFWriter) -> None:
            add_vocabulary(writer, "llama", tokens, [int(TokenType.NORMAL)] * len(tokens))
            writer.add_token_scores([0.0] * len(tokens))

        path = tiny(tmp_path / "model.gguf", more=more)
        content = b"".join(struct.pack("=Q", len(token)) + token.encode() for token in tokens)

        def loop() -> None:
            at, found = 0, []
            for _ in range(len(tokens)):
                length = struct.unpack_from("=Q", content, at)[0]
                found.append(content[at + 8 : at + 8 + length].decode())
                at += 8 + length

        def fastest(work: Callable[[], object]) -> float:
            times = []
            for _ in range(4):
                begin = time.process_time()
                work()
                times.append(time.process_time() - begin)
            return min(times)

        assert fastest(lambda: GGUFCheckpoint(path)) < 2.5 * fastest(loop)
        assert GGUFCheckpoint(path).eos_ids == (2,)

    def test_no_scores(self, tmp_path: Path) -> None:
        checkpoint = GGUFCheckpoint(
            tiny(tmp_path / "model.gguf", more=lambda writer: add_vocabulary(writer, "llama", ["a"], [1]))
        )
        with pytest.raises(ModelError, match=r"model\.gguf has no metadata 'tokenizer\.ggml\.scores'"):
            checkpoint.tokenizer()

    def test_unknown_kind(self, tmp_path: Path) -> None:
        checkpoint = GGUFCheckpoint(
            tiny(tmp_path / "model.gguf", more=lambda writer: add_vocabulary(writer, "bert", ["a"], [1]))
        )
        with pytest.raises(ModelError, match="kind 'bert'; the known ones are llama, gpt2"):
            checkpoint.tokenizer()


class TestByteLevel:
    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls) -> Backend:
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|end_of_text|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(TEXTS * 3, trainer)
        return backend

    def load(
        self,
        path: Path,
        trained: Backend,
        pre: str,
        more: Callable[[GGUFWriter], object] = lambda writer: None,
    ) -> GGUFCheckpoint:
        vocabulary = trained.get_vocab(with_added_tokens=True)
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        merges = json.loads(trained.to_str())["model"]["merges"]

        def all_of_it(writer: GGUFWriter) -> None:
            kinds = [TokenType.CONTROL if token.startswith("<|") else TokenType.NORMAL for token in tokens]
            add_vocabulary(writer, "gpt2", tokens, [int(kind) for kind in kinds])
            writer.add_token_merges([f"{left} {right}" for left, right in merges])
            writer.add_tokenizer_pre(pre)
            writer.add_bos_token_id(0)
            writer.add_eos_token_id(0)
            more(writer)

        return GGUFCheckpoint(tiny(path / "model.gguf", "qwen2", all_of_it))

    @pytest.mark.parametrize("pre", ["gpt-2", "default"])
    def test_same_ids_as_the_original(self, tmp_path: Path, trained: Backend, pre: str) -> None:
        checkpoint = self.load(tmp_path, trained, pre)
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None
        assert len(tokenizer) == trained.get_vocab_size()
        for text in [*TEXTS, "unseen: <|im_end|> Ωmega\r\n 7"]:
            assert tokenizer.encode(text) == trained.encode(text).ids
            assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
        assert checkpoint.eos_ids == (0, 1)

    @pytest.mark.parametrize(
        ("pre", "words"),
        [
            ("llama-bpe", ["IT", "'S", " ", " ", "123", "45", ".\n", "Go"]),
            ("qwen2", ["IT", "'S", " ", " ", "1", "2", "3", "4", "5", ".\n", "Go"]),
            ("smollm", ["IT", "'", "S", "  ", "1", "2", "3", "4", "5", ".", "\n", "Go"]),
            ("tekken", ["IT", "'S", " ", " ", "1", "2", "3", "4", "5", ".\n", "Go"]),
            ("gpt-2", ["IT", "'", "S", " ", " 12345", ".", "\n", "Go"]),
        ],
    )
    def test_words(self, tmp_path: Path, trained: Backend, pre: str, words: list[str]) -> None:
        tokenizer = self.load(tmp_path, trained, pre).tokenizer()
        assert tokenizer is not None
        assert tokenizer.backend.pre_tokenizer is not None
        cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str("IT'S  12345.\nGo")
        assert [word.replace("\u0120", " ").replace("\u010a", "\n") for word, _ in cut] == words

    @pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "tekken"])
    @pytest.mark.parametrize("text", TEXTS)
    def test_round_trip(self, tmp_path: Path, trained: Backend, pre: str, text: str) -> None:
        tokenizer = self.load(tmp_path, trained, pre).tokenizer()
        assert tokenizer is not None
        expected = text.replace("e\u0301", "\u00e9") if pre == "qwen2" else text  # NFC
        assert tokenizer.decode(tokenizer.encode(text)) == expected

    def test_llama3_adds_a_first_token(self, tmp_path: Path, trained: Backend) -> None:
        tokenizer = self.load(tmp_path, trained, "llama-bpe").tokenizer()
        assert tokenizer is not None
        assert tokenizer.encode("a")[0] == 0
        assert tokenizer.encode("a", special=False)[0] != 0

    def test_llama3_keeps_whole_words(self, tmp_path: Path) -> None:
        backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, merges=[("a", "b")]))

        def without_bos(writer: GGUFWriter) -> None:
            writer.add_add_bos_token(False)

        tokenizer = self.load(tmp_path, backend, "llama-bpe", without_bos).tokenizer()
        assert tokenizer is not None
        assert tokenizer.encode("abc") == [4]

    def test_unknown_rule(self, tmp_path: Path, trained: Backend) -> None:
        checkpoint = self.load(tmp_path, trained, "my-own")
        with pytest.raises(ModelError, match=r"model\.gguf.*'my-own'.*llama-bpe.*Hugging Face directory"):
            checkpoint.tokenizer()


def test_tokens_of_all_families_end_answers() -> None:
    """In gpt-oss, `<|end|>` ends a message, and two other tokens end the answer."""
    tokens = ["a", "<|end|>", "<|call|>", "<|return|>", "<turn|>", "b"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 3}
    assert stop_ids(metadata) == (3, 2, 4)
    for text in ("<|end|>", "<end_of_utterance>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>"):
        phi = {"tokenizer.ggml.tokens": ["a", "<|endoftext|>", text], "tokenizer.ggml.eos_token_id": 1}
        assert stop_ids(phi) == (1, 2)


MARKS = {
    **dict.fromkeys(("<|im_start|>", "<|im_end|>", "<|my_own|>", "<\uff5cUser\uff5c>"), TokenType.CONTROL),
    **dict.fromkeys(("<end_of_turn>", "<|end|>", "[EOT]", "</s>"), TokenType.CONTROL),  # they end answers
    **dict.fromkeys(
        ("<start_of_turn>", "[INST]", "<think>"), TokenType.USER_DEFINED
    ),  # the template has them
    **dict.fromkeys(("<unheard>", "<b>", "[0]", "<|>", "in", "<|ab|>"), TokenType.NORMAL),
}
PARTS = ["<", ">", "<b", "b>", "0]", "[", "<|", "|>", "<|a", "b|>", "i", "n"]
WRITES = "{{ messages[0] }}<b>in<start_of_turn>[INST]<think>"


@pytest.mark.parametrize("typed", [TokenType.NORMAL, None])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_marks_of_chats_are_whole_whatever_their_type(kind: str, typed: TokenType | None) -> None:
    """Some converters write them as normal text. What looks the same, and is made of tokens, stays text."""
    tokens = [*MARKS, *PARTS]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.ggml.bos_token_id": tokens.index("i"),  # some files name any token
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.chat_template": WRITES,
    }
    if typed is not None:
        metadata["tokenizer.ggml.token_type"] = np.full(len(tokens), typed)
    tokenizer = build_tokenizer(metadata, Path("model.gguf"))
    assert tokenizer is not None
    added = tokenizer.backend.get_added_tokens_decoder()
    found = {
        token: TokenType.NORMAL
        if i not in added
        else TokenType.CONTROL
        if added[i].special
        else TokenType.USER_DEFINED
        for i, token in enumerate(tokens)
    }
    assert found == {**MARKS, **dict.fromkeys(PARTS, TokenType.NORMAL)}
    ends = {tokens[i] for i in stop_ids(metadata)}
    assert ends == {"<|im_end|>", "<end_of_turn>", "<|end|>", "[EOT]", "</s>"}


def test_an_end_is_hidden_whatever_its_type() -> None:
    """A mark that a file takes for the user's own would be shown at the end of an answer."""
    types = np.array([TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.USER_DEFINED])
    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<think>"],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.token_type": types,
        },
        Path("model.gguf"),
    )
    assert tokenizer is not None
    assert tokenizer.decode([0, 2, 1]) == "a<think>"


def test_a_chat_template_of_a_wrong_type_stops_nothing() -> None:
    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": ["a"],
            "tokenizer.ggml.merges": [],
            "tokenizer.chat_template": 5,
        },
        Path("model.gguf"),
    )
    assert tokenizer is not None
    assert (tokenizer.has_chat_template, tokenizer.encode("a")) == (False, [0])


@pytest.mark.parametrize(
    ("family", "arch"), [("qwen2", "QWEN2VL"), ("qwen3", "QWEN3VL"), ("qwen3_moe", "QWEN3VLMOE")]
)
def test_the_text_part_of_models_of_images(
    family: str,
    arch: str,
    directory: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text has one position in all axes, so the text part is the model without images."""
    source, tokens = directory(family), torch.arange(20)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0].log_softmax(-1)
    monkeypatch.setitem(ARCHITECTURES, family, gguf.MODEL_ARCH[arch])
    rest = add_own_keys

    def add_keys(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
        rest(writer, config)
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        if arch != "QWEN2VL":
            writer.add_num_deepstack_layers(2)

    monkeypatch.setattr(sys.modules[__name__], "add_own_keys", add_keys)
    convert(source, tmp_path / "model.gguf", "F32")
    found = load_model(open_checkpoint(tmp_path / "model.gguf"), "float32")
    (logits, *_) = run(found, [Rows(tokens.numpy(), 0)])[0]
    assert (logits.log_softmax(-1) - expected).abs().max() < 1e-3
