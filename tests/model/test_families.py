"""Our decoder against `transformers`, the outside oracle, on tiny random models of every family."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from soothsay.config import ModelConfig
from soothsay.engine.batch import Batch, Rows
from soothsay.engine.cache import KVPool
from soothsay.engine.paths import KEY_BLOCK
from soothsay.engine.tree import DraftTree
from soothsay.model.checkpoint import open_checkpoint
from soothsay.model.linear import Packed
from soothsay.model.load import load_model
from soothsay.model.transformer import Transformer

TOLERANCE = 1e-4  # of logits and states of order 1 to 10, float32
VOCAB = 97
BLOCK = 8  # tokens in a KV block
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,  # large enough to matter
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> transformers' class, its own settings
    "llama1": ("Llama", {"num_key_value_heads": 4, "num_hidden_layers": 2}),
    "llama3": (
        "Llama",
        {
            "num_attention_heads": 8,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "llama_rope_llama3": (
        "Llama",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama_rope_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_rope_yarn": ("Llama", {"head_dim": 32, "max_position_embeddings": 128, "rope_parameters": YARN}),
    "llama_rope_yarn_options": (
        "Llama",
        {
            "head_dim": 32,
            "max_position_embeddings": 128,
            "rope_parameters": {
                **YARN,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
                "truncate": False,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
        },
    ),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 10, "head_dim": 24}),
    "qwen2": ("Qwen2", {"num_attention_heads": 8}),
    "qwen2_windows": (
        "Qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "sliding_window": 11,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "sliding_window": 11,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 12}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_sparse": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "decoder_sparse_step": 2,
        },
    ),
}
MULTIMODAL = "gemma3_multimodal"  # the model of "gemma3", saved as the decoder of a bigger one
NAMES = [*CASES, MULTIMODAL]
each_family = pytest.mark.parametrize("name", NAMES)


@dataclass(frozen=True)
class Pair:
    """A model of transformers' and ours, loaded from what the other one saved."""

    directory: Path
    oracle: Any
    model: Transformer

    def expected(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """The oracle's logits of each sequence, `[n, V]`, from one padded batch."""
        out = self._oracle(sequences)
        return [out.logits[i, : len(sequence)] for i, sequence in enumerate(sequences)]

    def expected_states(self, sequences: Sequence[Sequence[int]], layers: Sequence[int]) -> list[Tensor]:
        """The rows of all sequences end to end: each layer's input, then the states before and after the
        last norm."""
        before: list[Tensor] = []
        hook = self.oracle.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        states = self._oracle(sequences).hidden_states
        hook.remove()
        wanted = [*(states[layer] for layer in layers), before[0], states[-1]]
        return [torch.cat([x[i, : len(s)] for i, s in enumerate(sequences)]) for x in wanted]

    def _oracle(self, sequences: Sequence[Sequence[int]]) -> Any:
        length = max(len(sequence) for sequence in sequences)
        tokens = torch.zeros(len(sequences), length, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, sequence in enumerate(sequences):
            tokens[i, : len(sequence)] = torch.tensor(sequence)
            mask[i, : len(sequence)] = 1
        with torch.no_grad():
            return self.oracle(tokens, attention_mask=mask, output_hidden_states=True, use_cache=False)


Pairs = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            oracle = random_oracle("gemma3" if name == MULTIMODAL else name)
            oracle.save_pretrained(directory)
            if name == MULTIMODAL:
                make_multimodal(directory)
            made[name] = Pair(directory, oracle, load(directory))
        return made[name]

    return pair


def random_oracle(name: str) -> Any:
    """A model of transformers' whose attention, norms and biases all matter to its logits."""
    family, settings = CASES[name]
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + suffix)(**{**SIZES, **settings})
    oracle = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    sharper = ("q_proj.weight", "k_proj.weight", "lm_head.weight", "gate.weight")
    for key, parameter in oracle.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if key.endswith("norm.weight"):
            centre = 0.0 if "Gemma" in family else 1.0
            value = centre + 0.3 * noise
        elif parameter.ndim == 1:  # a bias
            value = 0.5 * noise
        elif "embed_tokens" in key:
            value = 0.4 * noise
        else:
            value = noise * parameter.shape[-1] ** -0.5 * (1.7 if key.endswith(sharper) else 1.0)
        parameter.data.copy_(value)
    return oracle.eval()


def make_multimodal(directory: Path) -> None:
    """Save the decoder again as the part of a multimodal model that it is in Gemma 3's checkpoints."""
    config = read_config(directory)
    write_config(directory, {"model_type": "gemma3", "text_config": config, "vision_config": {}})
    weights = load_file(directory / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    renamed["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(2, 2)
    save_file(renamed, directory / "model.safetensors")


def load(directory: Path, dtype: Any = "float32") -> Transformer:
    return load_model(open_checkpoint(directory), dtype=dtype)


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def write_config(directory: Path, config: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(config))


def random_tokens(rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    return [rng.integers(VOCAB, size=length).tolist() for length in lengths]


def random_tree(rng: np.random.Generator, root: int, size: int) -> DraftTree:
    tree = DraftTree(root)
    while len(tree) < size:
        tree.add(int(rng.integers(max(0, len(tree) - 6), len(tree))), int(rng.integers(VOCAB)))
    return tree


def level_by_level(tree: DraftTree) -> list[DraftTree]:
    """The same tree, numbered by depth, as it is after each level."""
    grown, renamed, levels = DraftTree(tree.tokens[0]), {0: 0}, []
    for depth in range(max(tree.depths) + 1):
        for node in range(1, len(tree)):
            if tree.depths[node] == depth:
                renamed[node] = grown.add(renamed[tree.parents[node]], tree.tokens[node])
        levels.append(subtree(grown, len(grown)))
    return levels


def subtree(tree: DraftTree, size: int) -> DraftTree:
    """A copy of the first `size` nodes."""
    copy = DraftTree(tree.tokens[0])
    for node in range(1, size):
        copy.add(tree.parents[node], tree.tokens[node])
    return copy


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    return [tree.tokens[i] for i in tree.path(node)]


def array(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(tokens, dtype=np.int64)


class Runner:
    """Passes of one model over a pool whose blocks are dealt out in random order."""

    def __init__(self, model: Transformer, rng: np.random.Generator, requests: int, blocks_each: int = 40):
        self.model = model
        self.cache: KVPool = model.new_cache(requests * blocks_each, BLOCK)
        self.tables = rng.permutation(requests * blocks_each).reshape(requests, blocks_each)

    def run(self, *requests: Rows) -> tuple[list[Tensor], list[Tensor]]:
        """Each request's logits: of all its rows, and of those that its tree asks for."""
        return run(self.model, requests, self.cache)

    def prefill(self, request: int, tokens: Sequence[int]) -> None:
        """Put the KV of a context into the pool."""
        self.run(Rows(array(tokens), 0, self.tables[request]))


@torch.no_grad()
def run(
    model: Transformer, requests: Sequence[Rows], cache: KVPool | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    batch = pack(model, requests)
    hidden, _ = model(batch, cache)
    every = torch.split(model.logits(hidden), [request.num_rows for request in requests])
    asked = model.logits(hidden[batch.logit_rows])
    return list(every), [asked[start:end] for start, end in batch.spans]


def pack(model: Transformer, requests: Sequence[Rows]) -> Batch:
    config = model.config
    return Batch.pack(requests, block_size=BLOCK, group=config.group, windows=config.windows)


def assert_close(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for got, want in zip(ours, expected, strict=True):
        assert got.shape == want.shape
        assert (got - want).abs().max() < TOLERANCE


@each_family
def test_whole_sequences_without_cache(pairs: Pairs, name: str) -> None:
    pair = pairs(name)
    sequences = random_tokens(np.random.default_rng(1), 41, 7, 90)
    logits, asked = run(pair.model, [Rows(array(sequence), 0) for sequence in sequences])
    expected = pair.expected(sequences)
    assert 0.5 < torch.cat(expected).std() < 10  # big enough for errors to show
    assert_close(logits, expected)
    assert [len(rows) for rows in asked] == [0, 0, 0]


@each_family
def test_chunks_then_single_tokens_through_the_cache(pairs: Pairs, name: str) -> None:
    pair, rng = pairs(name), np.random.default_rng(2)
    sequences = random_tokens(rng, 75, 20, 48)
    chunks = [[13, 1, 30, 9], [5, 7], [40]]  # then token by token
    runner = Runner(pair.model, rng, len(sequences))
    done = [0, 0, 0]
    logits: list[list[Tensor]] = [[], [], []]
    while any(done[i] < len(sequence) for i, sequence in enumerate(sequences)):
        active = [i for i, sequence in enumerate(sequences) if done[i] < len(sequence)]
        rows = []
        for i in active:
            size = chunks[i].pop(0) if chunks[i] else 1
            rows.append(Rows(array(sequences[i][done[i] : done[i] + size]), done[i], runner.tables[i]))
        for i, request, part in zip(active, rows, runner.run(*rows)[0], strict=True):
            done[i] += request.num_rows
            logits[i].append(part)
    assert_close([torch.cat(parts) for parts in logits], pair.expected(sequences))


@each_family
def test_tree_in_one_pass_and_level_by_level(pairs: Pairs, name: str) -> None:
    pair, rng = pairs(name), np.random.default_rng(3)
    committed, pending, other = random_tokens(rng, 37, 3, 19)
    tree = random_tree(rng, pending[-1], 20)
    context = committed + pending[:-1]
    expected = pair.expected([context + path_tokens(tree, node) for node in range(len(tree))])
    expected = [torch.stack([logits[-1] for logits in expected])]

    runner = Runner(pair.model, rng, 2)
    runner.prefill(0, committed)
    neighbour = Rows(array(other), 0, runner.tables[1], DraftTree(other[-1]))
    _, asked = runner.run(neighbour, Rows(array(pending), len(committed), runner.tables[0], tree))
    assert_close(asked[1:], expected)
    assert_close(asked[:1], [pair.expected([other])[0][-1:]])

    # level by level, with the KV of the nodes before in the pool
    levels = level_by_level(tree)
    runner = Runner(pair.model, rng, 2)
    runner.prefill(0, committed)
    parts = [runner.run(Rows(array(pending), len(committed), runner.tables[0], levels[0]))[1][0]]
    for before, level in pairwise(levels):
        start = len(committed) + len(pending)
        below = Rows(array([]), start, runner.tables[0], level, first=len(before))
        parts.append(runner.run(neighbour, below)[1][1])
    order = [levels[-1].walk(path_tokens(tree, node)[1:])[-1] for node in range(len(tree))]
    assert_close([torch.cat(parts)[order]], expected)


@each_family
def test_taps_are_inputs_of_layers(pairs: Pairs, name: str) -> None:
    pair = pairs(name)
    sequences = random_tokens(np.random.default_rng(4), 33, 12)
    with torch.no_grad():
        hidden, taps = pair.model(
            pack(pair.model, [Rows(array(sequence), 0) for sequence in sequences]),
            taps=(0, 1, pair.model.config.num_layers),
        )
    assert_close([*taps, hidden], pair.expected_states(sequences, (0, 1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama1", "llama3", "qwen2_windows", "gemma2", "gemma3", "qwen3_moe"])
def test_a_token_has_the_same_bits_in_any_company(pairs: Pairs, name: str, dtype: Any) -> None:
    model = packed(pairs(name), dtype)
    for start in (2, KEY_BLOCK - 8):  # the second tree crosses a multiple to which keys are padded
        assert_same_bits(model, np.random.default_rng(start), start)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_on_several_threads(pairs: Pairs, dtype: Any) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one core: threads that wait for each other on it take minutes")
    torch.set_num_threads(2)
    try:
        assert_same_bits(packed(pairs("llama1"), dtype), np.random.default_rng(7), 2)
    finally:
        torch.set_num_threads(1)


def packed(pair: Pair, dtype: Any) -> Transformer:
    if not Packed.available(getattr(torch, dtype)):
        pytest.skip(f"oneDNN has no {dtype} kernels on this machine")
    model = load(pair.directory, dtype)
    assert isinstance(model.head, Packed)
    return model


def assert_same_bits(model: Transformer, rng: np.random.Generator, start: int) -> None:
    """Tokens alone one by one, in one chunk, and as the tree behind `start + 4` tokens among others."""
    (context,) = random_tokens(rng, start + 4)
    tree = random_tree(rng, context[-1], 20)
    alone, whole, crowd = Runner(model, rng, 1), Runner(model, rng, 1), Runner(model, rng, 4)

    one_by_one = [
        alone.run(Rows(array([token]), i, alone.tables[0]))[0][0] for i, token in enumerate(context)
    ]
    nodes: dict[int, Tensor] = {}
    for leaf in (node for node, children in enumerate(tree.children) if not children):
        for node in tree.path(leaf):  # each path over the same slots, one after the other
            row = Rows(array([tree.tokens[node]]), start + 3 + tree.depths[node], alone.tables[0])
            nodes[node] = alone.run(row)[0][0]
    assert torch.equal(whole.run(Rows(array(context), 0, whole.tables[0]))[0][0], torch.cat(one_by_one))

    fresh, chunk, long = random_tokens(rng, 3, 70, 2 * KEY_BLOCK + 10)
    crowd.prefill(0, context[:start])
    crowd.prefill(1, long[:-1])
    every, asked = crowd.run(
        Rows(array(fresh), 0, crowd.tables[2], DraftTree(fresh[-1])),
        Rows(array(long[-1:]), len(long) - 1, crowd.tables[1], random_tree(rng, long[-1], 20)),
        Rows(array(context[start:]), start, crowd.tables[0], tree),
        Rows(array(chunk), 0, crowd.tables[3]),
    )
    assert torch.equal(every[2][:4], torch.cat(one_by_one[start:]))
    assert torch.equal(asked[2], torch.cat([nodes[node] for node in range(len(tree))]))


@pytest.mark.parametrize("name", ["llama3", "mixtral", "gemma3"])
def test_sharded_checkpoint(pairs: Pairs, name: str, tmp_path: Path) -> None:
    pair = pairs(name)
    pair.oracle.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    (sequence,) = random_tokens(np.random.default_rng(6), 30)
    rows = [Rows(array(sequence), 0)]
    assert torch.equal(run(load(tmp_path), rows)[0][0], run(pair.model, rows)[0][0])


def older_spelling(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """As transformers before 5 wrote it: `rope_theta` and `rope_scaling` instead of `rope_parameters`.

    `kind` is the key of the scaling's type, which was `type` first and `rope_type` later.
    """
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    rope = config["rope_parameters"]
    older.pop("layer_types", None)
    if "sliding_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        older["sliding_window_pattern"] = older.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    older["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    older["rope_scaling"] = {**scaling, kind: rope["rope_type"]} if scaling else None
    return older


@pytest.mark.parametrize("name", CASES)
def test_both_spellings_of_the_rotary_embedding(pairs: Pairs, name: str, tmp_path: Path) -> None:
    newer = read_config(pairs(name).directory)
    rope = newer["rope_parameters"]
    for kind in ("type", "rope_type"):
        write_config(tmp_path, older_spelling(newer, kind))
        assert ModelConfig.from_hf(read_config(tmp_path)) == ModelConfig.from_hf(newer)
    oracle = transformers.AutoConfig.from_pretrained(tmp_path)  # so this was indeed the older spelling
    assert {key: oracle.rope_parameters[key] for key in rope} == rope


@pytest.mark.parametrize(
    "published",
    [
        {  # Llama 1
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "vocab_size": 32000,
        },
        {  # Gemma 3 4B
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
    ],
    ids=["llama1", "gemma3_4b"],
)
def test_what_a_published_configuration_leaves_out(published: dict[str, Any], tmp_path: Path) -> None:
    write_config(tmp_path, published)
    filled_in = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert ModelConfig.from_hf(published) == ModelConfig.from_hf(filled_in)


def test_experts_are_saved_one_by_one(pairs: Pairs) -> None:
    """transformers 5 holds the experts of a layer in one tensor, and writes them as they were before."""
    expected = {
        "mixtral": "model.layers.2.block_sparse_moe.experts.4.w1.weight",
        "qwen3_moe": "model.layers.2.mlp.experts.5.gate_proj.weight",
    }
    for name, tensor in expected.items():
        with safe_open(pairs(name).directory / "model.safetensors", framework="pt") as file:
            assert tensor in file.keys()  # noqa: SIM118
