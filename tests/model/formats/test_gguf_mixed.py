"""Files whose tensors are of all types of blocks: their logits, their guarantee, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from blocks import HALVES, random_blocks
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from torch import Tensor

from soothsay import LLM, ModelError, SamplingParams
from soothsay.model.decoder.embedding import IntegerEmbedding
from soothsay.model.formats.gguf_blocks import BlockRows
from soothsay.model.native.native_linear import NativeLinear, PackedTable
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model, weight_bytes
from soothsay.model.weights.numeric_mode import NumericMode, numeric_mode
from soothsay.model.weights.tensor_names import TensorNames

HIDDEN, INNER, VOCAB, LAYERS, HEADS, KV_HEADS = 256, 512, 320, 4, 4, 2
MATRICES = {
    "attn_q": ("self_attn.q_proj", HIDDEN, HIDDEN),
    "attn_k": ("self_attn.k_proj", HIDDEN // 2, HIDDEN),
    "attn_v": ("self_attn.v_proj", HIDDEN // 2, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HIDDEN),
    "ffn_gate": ("mlp.gate_proj", INNER, HIDDEN),
    "ffn_up": ("mlp.up_proj", INNER, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, INNER),
}


FLOATS = ("F16", "BF16", "F32")


def write_mixed(
    path: Path,
    arch: str,
    *,
    tied: bool = False,
    kinds: Sequence[str] = (*HALVES,),
    inner: int = INNER,
    layers: int = LAYERS,
) -> transformers.PreTrainedModel:
    """Write a random model, each matrix of another type. Returns transformers' model of the same weights.

    If it is `tied`, the file has no output head. `inner` is what its metadata say of feed-forward parts.
    """
    settings = dict(
        **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "rms_norm_eps": 1e-5},
        **{"num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
        **{"max_position_embeddings": 128, "tie_word_embeddings": tied},
    )
    config = transformers.AutoConfig.for_model(arch, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    writer = GGUFWriter(path, arch)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    kind_of_next, seeds = cycle(kinds), iter(range(1000))
    torch.manual_seed(0)

    def add(stored: str, name: str, out: int, size: int, heads: int = 0) -> None:
        kind, seed = next(kind_of_next), next(seeds)
        if kind in FLOATS:
            floats = np.random.default_rng(seed).normal(0, size**-0.5, (out, size)).astype(np.float32)
            data = quantize(floats, GGMLQuantizationType[kind])
        else:
            data = random_blocks(kind, out, size, seed, size**-0.5).numpy()
        writer.add_tensor(f"{stored}.weight", data, raw_dtype=GGMLQuantizationType[kind])
        weight = torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]))
        if heads:  # the file has the halves of a head interleaved
            weight = weight.view(heads, -1, 2, size).transpose(1, 2).reshape(out, size)
        model.get_parameter(f"{name}.weight").data = weight

    def add_plain(stored: str, name: str, tensor: Tensor) -> None:
        writer.add_tensor(stored, tensor.numpy())
        model.get_parameter(name).data = tensor

    add("token_embd", "model.embed_tokens", VOCAB, HIDDEN)
    if not tied:
        add("output", "lm_head", VOCAB, HIDDEN)
    add_plain("output_norm.weight", "model.norm.weight", 1 + 0.1 * torch.randn(HIDDEN))
    for layer in range(layers):
        for part, (name, out, size) in MATRICES.items():
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part, 0) if arch == "llama" else 0
            add(f"blk.{layer}.{part}", f"model.layers.{layer}.{name}", out, size, heads)
            bias = f"model.layers.{layer}.{name}.bias"
            if arch == "qwen2" and part in ("attn_q", "attn_k", "attn_v"):
                add_plain(f"blk.{layer}.{part}.bias", bias, 0.3 * torch.randn(out))
        for stored, name in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            weight = 1 + 0.1 * torch.randn(HIDDEN)
            add_plain(f"blk.{layer}.{stored}.weight", f"model.layers.{layer}.{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


WITH_FLOATS = ("Q4_K", "Q8_0", "F16", "Q6_K", "BF16", "F32", "Q4_K", "F16", "Q5_K", "Q4_0", "F16")
"""Types in turn, so that queries, keys and values, and gates and up, mix floats and blocks in all orders."""


@pytest.fixture(scope="module", params=["llama", "qwen2", "llama with floats", "qwen2 with floats"])
def mixed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, transformers.PreTrainedModel]:
    arch, _, more = request.param.partition(" ")
    path = tmp_path_factory.mktemp(arch) / "mixed.gguf"
    return path, write_mixed(path, arch, kinds=WITH_FLOATS if more else (*HALVES,))


PROMPT = [int(token) for token in np.random.default_rng(5).integers(VOCAB, size=60)]


def log_probs(llm: LLM) -> Tensor:
    """Of each token of the prompt but the first."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    given = llm.generate(PROMPT, params).prompt_logprobs
    return torch.tensor([one.logprob for one in given])


def expected_log_probs(model: transformers.PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(PROMPT)[1:, None])[:, 0]


def test_log_probabilities_equal_those_of_transformers(
    mixed: tuple[Path, transformers.PreTrainedModel],
) -> None:
    """In float32 to rounding; in integers to that of activations in 8 bits and bfloat16."""
    path, model = mixed
    expected = expected_log_probs(model)
    assert expected.std() > 0.8  # the model does not say the same of all tokens
    assert (log_probs(LLM(path, dtype="float32", drafter="none")) - expected).abs().max() < 1e-3
    assert (log_probs(LLM(path, drafter="none")) - expected).abs().max() < 0.3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_the_drafter(
    mixed: tuple[Path, transformers.PreTrainedModel], temperature: float
) -> None:
    llm = LLM(mixed[0], drafter="none", kv_tokens=2048)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=16, logprobs=2, ignore_eos=True)
    plain = llm.generate(PROMPT * 2, params)
    for drafter in ("prompt-lookup", "suffix", "lookahead", f"draft-model(model={mixed[0]})"):
        other = llm.generate([PROMPT * 2, PROMPT], params, drafter=drafter)[0]
        assert other.token_ids == plain.token_ids
        assert other.logprobs == plain.logprobs


def test_weights_stay_the_integers_that_they_are(mixed: tuple[Path, transformers.PreTrainedModel]) -> None:
    checkpoint = open_checkpoint(mixed[0])
    model = load_model(checkpoint)
    assert isinstance(model.embedding, IntegerEmbedding)
    layers = [m for m in model.modules() if isinstance(m, NativeLinear)]
    if not layers:
        pytest.skip("no native kernels run here")
    held = sum(
        tensor.nbytes
        for layer in layers
        for part in layer.parts
        for tensor in vars(part).values()
        if isinstance(tensor, Tensor)
    )
    embedding = model.embedding.table.data.nbytes
    assert held < 1.3 * (checkpoint.num_bytes() - embedding)
    names = TensorNames(model.spec, checkpoint)
    assert weight_bytes(model, numeric_mode(names), names=names) <= checkpoint.num_bytes()


def test_what_is_dequantized_needs_memory_while_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mixed(tmp_path / "a.gguf", "llama")
    checkpoint, free = open_checkpoint(tmp_path / "a.gguf"), [2**40]
    monkeypatch.setattr("soothsay.model.weights.load.available_memory", lambda: free[0])
    model = load_model(checkpoint, "float32")
    free[0] = weight_bytes(model, NumericMode(torch.float32)) + model.embedding.weight.nbytes
    with pytest.raises(ModelError, match=r"GB are free of .* GB: free some"):
        load_model(checkpoint, "float32")


def test_a_shared_table_is_read_from_the_packed_head(tmp_path: Path) -> None:
    """With the bits that the file's own blocks have."""
    whole = tmp_path / "tied.gguf"
    write_mixed(whole, "llama", tied=True)
    model = load_model(open_checkpoint(whole))
    if not isinstance(model.head, NativeLinear):
        pytest.skip("no native kernels run here")
    assert isinstance(model.embedding, IntegerEmbedding)
    assert isinstance(model.embedding.table, PackedTable)
    stock = load_model(open_checkpoint(whole), kernels=StockKernels())
    assert isinstance(stock.embedding, IntegerEmbedding)
    assert isinstance(stock.embedding.table, BlockRows)
    tokens = torch.arange(VOCAB)
    assert torch.equal(model.embedding(tokens), stock.embedding(tokens))


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_model_is_rounded_to_fewer_bits_and_keeps_its_words(tmp_path: Path, tied: bool) -> None:
    """Integers of up to 4 bits stay, the others are rounded, and the head has the chosen tokens only."""
    path, chosen = tmp_path / "mixed.gguf", torch.tensor([*range(64), 100, 319])
    exact = write_mixed(path, "llama", tied=tied)
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, "int4", coarse=True, tokens=chosen)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, NativeLinear)}
    if not layers:
        pytest.skip("no native kernels run here")
    assert all(part.struct.bits <= 4 for layer in layers.values() for part in layer.parts)
    assert layers["head"].out_features == len(chosen)
    fine = load_model(checkpoint)
    for name, layer in layers.items():
        rows, theirs = torch.arange(layer.out_features), fine.get_submodule(name)
        assert isinstance(theirs, NativeLinear)
        if len(layer.parts) > 1 or len(theirs.parts) > 1:
            continue
        read = PackedTable(layer).floats(rows)
        stored = PackedTable(theirs).floats(chosen if name == "head" else rows)
        error = (read - stored).norm() / stored.norm()
        assert (error == 0) if theirs.parts[0].struct.bits <= 4 else (0 < error < 0.15), name
    assert isinstance(model.embedding, IntegerEmbedding)  # of the file: not coarse
    tokens = torch.arange(VOCAB)
    expected = exact.get_input_embeddings().weight.detach()
    torch.testing.assert_close(model.embedding(tokens), expected, atol=1e-6, rtol=1e-3)


def test_a_model_that_is_served_is_not_rounded_again(
    mixed: tuple[Path, transformers.PreTrainedModel],
) -> None:
    with pytest.raises(ModelError, match="cannot become int4 without further loss"):
        load_model(open_checkpoint(mixed[0]), "int4")


@pytest.mark.parametrize("kind", [*HALVES, *FLOATS])
def test_a_file_of_one_type_holds_what_it_promises_and_no_more(kind: str, tmp_path: Path) -> None:
    """Also one of two bits a weight, as most of a Q2_K file is."""
    write_mixed(tmp_path / "whole.gguf", "llama", kinds=[kind], layers=1)
    checkpoint = open_checkpoint(tmp_path / "whole.gguf")
    norms = 3 * HIDDEN
    assert read_model_config(checkpoint).num_parameters == checkpoint.most_weights() - norms
    write_mixed(tmp_path / "less.gguf", "llama", kinds=[kind], inner=INNER + 16, layers=1)
    with pytest.raises(ModelError, match=r"promises .* weights, and files of .* bytes hold at most"):
        read_model_config(open_checkpoint(tmp_path / "less.gguf"))


def test_a_file_of_two_bits_answers(tmp_path: Path) -> None:
    expected = expected_log_probs(write_mixed(tmp_path / "q2.gguf", "llama", kinds=["Q2_K", "Q3_K"]))
    assert (log_probs(LLM(tmp_path / "q2.gguf", drafter="none")) - expected).abs().max() < 0.3


@pytest.mark.parametrize("wrong", [False, True])
def test_factors_beside_nvfp4(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp's converter writes them: one for the weight, and one for its input, which is not used."""
    add_tensor, factors = GGUFWriter.add_tensor, dict[str, float]()

    def add(writer: GGUFWriter, name: str, data: Any, **more: Any) -> None:
        add_tensor(writer, name, data, **more)
        if name.startswith("blk.") and data.dtype == np.uint8:
            stem, factors[name] = name.removesuffix(".weight"), 0.5 + len(factors) / 32
            add_tensor(writer, f"{stem}.scale", np.full(2 if wrong else 1, factors[name], np.float32))
            add_tensor(writer, f"{stem}.input_scale", np.float32([3]))

    monkeypatch.setattr(GGUFWriter, "add_tensor", add)
    model = write_mixed(tmp_path / "a.gguf", "llama", kinds=["NVFP4"])
    if wrong:
        with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.scale \[2\] of type F32 should be a number"):
            open_checkpoint(tmp_path / "a.gguf")
        return
    for layer in range(LAYERS):
        for part, (name, *_) in MATRICES.items():
            model.get_parameter(f"model.layers.{layer}.{name}.weight").data *= factors[
                f"blk.{layer}.{part}.weight"
            ]
    expected = expected_log_probs(model)
    assert (
        log_probs(LLM(tmp_path / "a.gguf", drafter="none", dtype="float32")) - expected
    ).abs().max() < 1e-3
    assert (log_probs(LLM(tmp_path / "a.gguf", drafter="none")) - expected).abs().max() < 0.3
