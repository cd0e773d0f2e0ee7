"""Our decoder against `transformers`, the outside oracle, on tiny random models of every family."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from families import (
    BLOCK,
    CASES,
    MULTIMODAL,
    MULTIMODALS,
    VOCAB,
    array,
    load,
    make_multimodal,
    older_spelling,
    pack,
    random_oracle,
    random_tokens,
    read_config,
    run,
    write_config,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from soothsay.core import functions
from soothsay.core.batch import Rows
from soothsay.core.cache import KVPool
from soothsay.core.paths import KEY_BLOCK
from soothsay.core.tree import DraftTree
from soothsay.errors import ModelError
from soothsay.model.decoder.feed_forward import Experts, UngatedFeedForward
from soothsay.model.decoder.norm import Multipliers, RMSNorm
from soothsay.model.families.parsing import TEXT_DEFAULTS, parse_model_config
from soothsay.model.formats.stacked_experts import STACKINGS, Stacking
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.ops.linear import InBlocks, Packed
from soothsay.model.ops.state_ops import StateSpace
from soothsay.model.specs.attention_spec import AttentionSpec, LatentSpec
from soothsay.model.specs.feed_forward_spec import UNGATED, DenseSpec, ExpertsSpec
from soothsay.model.specs.model_spec import LayerSpec
from soothsay.model.specs.state_specs import StateSpaceSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.train.sequences import TrainingKernels
from soothsay.train.whole_models import named_tensors

TOLERANCE = 1e-4  # of logits and states of order 1 to 10, float32
NAMES = [*CASES, MULTIMODAL, *MULTIMODALS]
FURTHER = [
    "phi4_mini",
    "smollm3_windows",
    "granite",
    "olmo2_groups",
    "olmo3",
    "ministral3",
    "glm",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "cohere2",
    "gpt_oss",
    "qwen3_5",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "llama4",
    "granite4_hybrid",
    "granite4_experts",
    "gemma3n",
    "falcon_h1",
    "nemotron_h",
    "nemotron_h_experts",
    "kimi_linear",
    "jamba",
    "falcon_mamba",
    "mamba2",
    "apertus",
    "phimoe",
    "mistral4",
    "ernie",
    "exaone4",
    "hunyuan",
    "olmo1",
    "gpt2",
    "gpt_neox",
]
"""One of each kind of computation that Llama, Qwen and Gemma do not have."""
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
        last: list[Tensor] = []
        decoder = self.oracle.get_decoder()
        inner = getattr(decoder, "model", decoder)  # Llama 4's whole model is its own decoder
        names = ("norm", "embedding_norm", "final_layernorm", "norm_f", "final_layer_norm", "ln_f")
        norm = next(found for name in names if (found := getattr(inner, name, None)) is not None)
        hooks = [norm.register_forward_hook(lambda _, args, out: last.extend((args[0], out)))]
        embedded: list[Tensor] = []
        if self.oracle.config.model_type in (
            "mamba2",
            "mamba",
            "falcon_mamba",
        ):  # whose states begin after the first layer
            table = self.oracle.get_input_embeddings()
            hooks.append(table.register_forward_hook(lambda _, args, out: embedded.append(out)))
        states = self._oracle(sequences).hidden_states
        for hook in hooks:
            hook.remove()
        states = (*embedded, *states)
        inputs = [states[layer] for layer in layers]  # Gemma 3n's have several parts
        wanted = [*(x[0] if x.ndim == 4 else x for x in inputs), *last]
        return [torch.cat([x[i, : len(s)] for i, s in enumerate(sequences)]) for x in wanted]

    def _oracle(self, sequences: Sequence[Sequence[int]]) -> Any:
        length = max(len(sequence) for sequence in sequences)
        rope = getattr(self.oracle.config.get_text_config(), "rope_parameters", {})
        if (
            rope.get("rope_type") == "longrope"
        ):  # its factors depend on the length there; make them the long ones
            length = max(length, rope["original_max_position_embeddings"] + 1)
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
            if name == "llama4_multimodal":  # transformers' whole model fails without an image
                oracle = oracle.language_model
            made[name] = Pair(directory, oracle, load(directory))
        return made[name]

    return pair


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


class Runner:
    """Passes of one model over a pool whose blocks are dealt out in random order."""

    def __init__(self, model: Transformer, rng: np.random.Generator, requests: int, blocks_each: int = 40):
        self.model, count = model, requests * blocks_each
        self.cache: KVPool = model.new_cache(count, BLOCK, requests=requests, snapshots=1, nodes=20)
        self.tables = rng.permutation(count).reshape(requests, blocks_each)
        self.slots = {int(table[0]): slot for slot, table in enumerate(self.tables)}  # of states

    def run(self, *requests: Rows) -> tuple[list[Tensor], list[Tensor]]:
        """Each request's logits: of all its rows, and of those that its tree asks for."""
        placed = [rows._replace(state=self.slots[int(rows.table[0])]) for rows in requests]
        return run(self.model, placed, self.cache)

    def save(self) -> None:
        """Keep the state of the first request, if there are states."""
        if self.cache.states is not None:
            self.cache.states.copy(0, len(self.tables))

    def restore(self) -> None:
        """Go back to the kept state."""
        if self.cache.states is not None:
            self.cache.states.copy(len(self.tables), 0)

    def prefill(self, request: int, tokens: Sequence[int]) -> None:
        """Put the KV of a context into the pool."""
        self.run(Rows(array(tokens), 0, self.tables[request]))


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
    chunks = [[13, 1, 30, 23], [5, 7], [40]]  # then 8 single tokens
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
    neighbour = neighbour._replace(table=runner.tables[1])
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
            taps=(0, 1, pair.model.spec.num_layers),
        )
    assert_close([*taps, hidden], pair.expected_states(sequences, (0, 1)))


def test_dynamic_scaling_ends_where_it_would_begin(pairs: Pairs) -> None:
    assert pairs("llama_rope_dynamic").model.spec.max_positions == 256


@pytest.mark.parametrize(
    "name",
    [
        "phi4_mini",
        "glm",
        "glm4_moe",
        "cohere2",
        "gemma3",
        "olmo3",
        "gpt2",
        "gpt_neox",
        "nemotron",
        "phi",
        "hunyuan",
    ],
)
def test_weights_go_back_under_their_names(pairs: Pairs, name: str) -> None:
    checkpoint = open_checkpoint(pairs(name).directory)
    model = load_model(checkpoint, "float32", kernels=TrainingKernels())
    named = named_tensors(model, checkpoint)
    with checkpoint.open() as read:
        assert named.keys() == checkpoint.names()
        for tensor, value in named.items():
            torch.testing.assert_close(value, read(tensor), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_the_scale_of_embeddings_has_the_precision_of_the_weights(
    name: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """sqrt(72) = 8.485 in float32 is 8.5 in bfloat16. The stored dtype decides, not the dtype of the pass."""
    oracle = random_oracle(name, hidden_size=72).to(stored)
    oracle.save_pretrained(tmp_path)
    model, (sequence,) = load(tmp_path), random_tokens(np.random.default_rng(8), 30)
    with torch.no_grad():
        expected = oracle(torch.tensor([sequence]), output_hidden_states=True).hidden_states[0][0]
        _, (embedded,) = model(pack(model, [Rows(array(sequence), 0)]), taps=(0,))
    assert expected.dtype == stored
    assert torch.equal(embedded.to(stored), expected)


def test_parts_without_a_gate_have_functions() -> None:
    assert set(UNGATED) == set(functions.UNGATED)


def test_nodes_of_a_tree_beyond_the_learned_positions(pairs: Pairs) -> None:
    """The context ends after the sixth of ten nodes."""
    pair, rng = pairs("gpt2"), np.random.default_rng(9)
    context, drafts = random_tokens(rng, 251, 9)
    tree = DraftTree(context[-1])
    tree.extend(drafts)
    runner = Runner(pair.model, rng, 1)
    runner.prefill(0, context[:-1])
    _, (asked,) = runner.run(Rows(array(context[-1:]), 250, runner.tables[0], tree))
    assert asked.shape == (10, VOCAB)
    assert_close([asked[:6]], [pair.expected([[*context, *drafts[:5]]])[0][-6:]])


def quick_in_one(names: Sequence[str]) -> list[Any]:
    """Each name with float32 and bfloat16. One of the two, in turns, is quick."""
    dtypes = ("float32", "bfloat16")
    slow = [(), (pytest.mark.slow,)]
    return [
        pytest.param(name, dtype, marks=slow[(i + j) % 2])
        for i, name in enumerate(names)
        for j, dtype in enumerate(dtypes)
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    quick_in_one(
        [
            *("llama1", "llama3", "qwen2_windows", "gemma2", "gemma3", "gemma4", "gemma4_experts"),
            *("qwen3_moe", *FURTHER),
        ]
    ),
)
def test_a_token_has_the_same_bits_in_any_company(pairs: Pairs, name: str, dtype: Any) -> None:
    model = packed(pairs(name), dtype)
    for start in (2, KEY_BLOCK - 8):  # the second tree crosses a multiple to which keys are padded
        assert_same_bits(model, np.random.default_rng(start), start)


@pytest.mark.parametrize(
    ("name", "dtype"),
    quick_in_one(
        [
            "minimax_m2",  # first, so that the others have here the dtype that they do not have above
            *(name for name in FURTHER if name != "glm4_moe"),
            *("gemma4", "gemma4_experts", "gemma4_all"),
        ]
    ),
)
def test_bits_of_further_kinds_of_blocks(pairs: Pairs, name: str, dtype: Any) -> None:
    """With the kernels that fit, native ones if possible."""
    model = load(pairs(name).directory, dtype)
    for start in (2, KEY_BLOCK - 8):
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
    model = load_model(open_checkpoint(pair.directory), dtype, kernels=StockKernels())
    assert isinstance(model.head, Packed | InBlocks)
    return model


def assert_same_bits(model: Transformer, rng: np.random.Generator, start: int) -> None:
    """Assert equal bits for tokens one by one, in a chunk, and in a tree after them in a batch.

    Another request of the batch has a longer context if this one has a short one, and a shorter one if not.
    """
    (context,) = random_tokens(rng, start + 4)
    tree = random_tree(rng, context[-1], 20)
    alone, whole, crowd = Runner(model, rng, 1), Runner(model, rng, 1), Runner(model, rng, 4)

    first = max(0, len(context) - 8)  # of the tokens that run one by one
    if first:
        alone.prefill(0, context[:first])
    one_by_one = []
    for i, token in enumerate(context[first:], first):
        alone.save()  # in the end, the state before the root
        one_by_one.append(alone.run(Rows(array([token]), i, alone.tables[0]))[0][0])
    nodes: dict[int, Tensor] = {}
    for leaf in (node for node, children in enumerate(tree.children) if not children):
        alone.restore()
        for node in tree.path(leaf):  # each path over the same slots, one after the other
            row = Rows(array([tree.tokens[node]]), start + 3 + tree.depths[node], alone.tables[0])
            nodes[node] = alone.run(row)[0][0]
    at_once = whole.run(Rows(array(context), 0, whole.tables[0]))[0][0]
    assert torch.equal(at_once[first:], torch.cat(one_by_one))

    fresh, chunk, long = random_tokens(rng, 3, 70, 40 if first else 2 * KEY_BLOCK + 10)
    crowd.prefill(0, context[:start])
    crowd.prefill(1, long[:-1])
    every, asked = crowd.run(
        Rows(array(fresh), 0, crowd.tables[2], DraftTree(fresh[-1])),
        Rows(array(long[-1:]), len(long) - 1, crowd.tables[1], random_tree(rng, long[-1], 20)),
        Rows(array(context[start:]), start, crowd.tables[0], tree),
        Rows(array(chunk), 0, crowd.tables[3]),
    )
    assert torch.equal(every[2][:4], torch.cat(one_by_one[-4:]))
    assert torch.equal(asked[2], torch.cat([nodes[node] for node in range(len(tree))]))


@pytest.mark.parametrize("name", ["llama3", "mixtral", "gemma3"])
def test_sharded_checkpoint(pairs: Pairs, name: str, tmp_path: Path) -> None:
    pair = pairs(name)
    pair.oracle.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    (sequence,) = random_tokens(np.random.default_rng(6), 30)
    rows = [Rows(array(sequence), 0)]
    assert torch.equal(run(load(tmp_path), rows)[0][0], run(pair.model, rows)[0][0])


WITHOUT_SPELLINGS = (
    "gemma4",
    "mellum",
    "kimi_linear",
    "nemotron_h",
    "mamba",
    "falcon_mamba",
    "jamba",
    "gpt2",
    "gptj",
    "opt",
)
"""The first two are newer, the others do not rotate, or have keys of their own."""


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(WITHOUT_SPELLINGS)])
def test_both_spellings_of_the_rotary_embedding(pairs: Pairs, name: str, tmp_path: Path) -> None:
    newer = read_config(pairs(name).directory)
    rope = newer["rope_parameters"]
    for kind in ("type", "rope_type"):
        write_config(tmp_path, older_spelling(newer, kind))
        assert parse_model_config(read_config(tmp_path)) == parse_model_config(newer)
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
        {
            "model_type": "falcon_h1",
            "vocab_size": 32_784,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_hidden_layers": 36,
            "max_position_embeddings": 16_384,
            "mamba_d_ssm": 1536,
        },
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"},
        {"model_type": "gemma3n_text", "altup_num_inputs": 4},
        {
            **{"model_type": "kimi_linear", "hidden_size": 64, "num_hidden_layers": 5, "vocab_size": 97},
            **{"num_attention_heads": 4, "intermediate_size": 80, "moe_intermediate_size": 32},
            **{"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16},
            "linear_attn_config": {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4]},
        },
        {"model_type": "mamba", "hidden_size": 40, "num_hidden_layers": 3, "vocab_size": 97},
        {"model_type": "falcon_mamba", "hidden_size": 40, "num_hidden_layers": 3, "vocab_size": 97},
        {
            **{"model_type": "jamba", "hidden_size": 256, "num_hidden_layers": 9, "vocab_size": 97},
            **{"num_attention_heads": 8, "intermediate_size": 80, "max_position_embeddings": 256},
        },
        {
            **{"model_type": "bitnet", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 97},
            **{
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "intermediate_size": 80,
                "max_position_embeddings": 256,
            },
        },
    ],
    ids=[
        *("llama1", "gemma3_4b", "falcon_h1", "nemotron_h", "gemma3n"),
        *("kimi_linear", "mamba", "falcon_mamba", "jamba", "bitnet"),
    ],
)
def test_what_a_published_configuration_leaves_out(published: dict[str, Any], tmp_path: Path) -> None:
    write_config(tmp_path, published)
    filled_in = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    assert parse_model_config(published) == parse_model_config(filled_in)


def test_experts_are_saved_one_by_one(pairs: Pairs) -> None:
    """transformers 5 holds the experts of a layer in one tensor, and writes them as they were before."""
    expected = {
        "mixtral": "model.layers.2.block_sparse_moe.experts.4.w1.weight",
        "qwen3_moe": "model.layers.2.mlp.experts.5.gate_proj.weight",
    }
    for name, tensor in expected.items():
        with safe_open(pairs(name).directory / "model.safetensors", framework="pt") as file:
            assert tensor in file.keys()  # noqa: SIM118


def without_sinks(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.sinks = None  # type: ignore[assignment, union-attr]


def with_silu(model: Transformer) -> None:
    for block in model.blocks:
        for expert in block.mlp.experts:  # type: ignore[union-attr]
            expert.activation = "silu"


def without_router_bias(model: Transformer) -> None:
    for block in model.blocks:
        block.mlp.router.bias.data.zero_()  # type: ignore[union-attr, operator]


def without_expert_bias(model: Transformer) -> None:
    model.blocks[1].mlp.experts[2].down.bias.data.zero_()  # type: ignore[union-attr, operator, index]


def with_scaled_outputs(model: Transformer) -> None:
    for block in model.blocks:
        if isinstance(block.mlp, Experts):
            routing = replace(block.mlp.spec.routing, scales_inputs=False)
            block.mlp.spec = replace(block.mlp.spec, routing=routing)


def with_sliding_windows(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.window = None if block.attention.window is None else -block.attention.window  # type: ignore[union-attr, operator, assignment]

    def sliding(layer: LayerSpec) -> LayerSpec:
        window = None if layer.window is None else -layer.window
        return replace(layer, mixer=replace(cast(AttentionSpec, layer.mixer), window=window))

    model.spec = model.spec.with_layers(sliding)


def state_spaces(model: Transformer) -> list[StateSpace]:
    return [part for part in model.modules() if isinstance(part, StateSpace)]


def without_skips(model: Transformer) -> None:
    for rule in state_spaces(model):
        rule.skips.data.zero_()


def without_bias_of_taps(model: Transformer) -> None:
    for rule in state_spaces(model):
        rule.bias.data.zero_()


def with_equal_rates(model: Transformer) -> None:
    for rule in state_spaces(model):
        rule.log_rates.data.zero_()


def without_offsets_of_steps(model: Transformer) -> None:
    for rule in state_spaces(model):
        rule.offsets.data.zero_()


def without_scales_of_the_norm(model: Transformer) -> None:
    for rule in state_spaces(model):
        rule.scale.data.fill_(1)


def without_multipliers_of_products(model: Transformer) -> None:
    for part in model.modules():
        if isinstance(part, Multipliers):
            part.row.fill_(1)


def without_multipliers_of_outputs(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.multipliers = 1.0, 1.0  # type: ignore[union-attr, assignment]


def with_the_norm_last(model: Transformer) -> None:
    for rule in state_spaces(model):
        rule.spec = replace(rule.spec, norm_first=False)


def without_shared_part(model: Transformer) -> None:
    for mixture in mixtures(model):
        mixture.shared.down.weight.data.zero_()  # type: ignore[union-attr, operator]


def mixtures(model: Transformer) -> list[Experts]:
    return [part for part in model.modules() if isinstance(part, Experts)]


def without_latent_states(model: Transformer) -> None:
    for mixture in mixtures(model):
        mixture.latent_out.weight.data.zero_()  # type: ignore[union-attr, operator]


def with_a_plain_relu(model: Transformer) -> None:
    for part in model.modules():
        if isinstance(part, UngatedFeedForward):
            part.up.register_forward_hook(lambda _, __, out: out.relu().sqrt())


def without_sparsity(model: Transformer) -> None:
    for block in model.blocks:
        block.mlp.cutoff = None  # type: ignore[union-attr, assignment]


def without_learned_residuals(model: Transformer) -> None:
    for block in model.blocks:
        block.laurel_norm.weight.data.zero_()  # type: ignore[union-attr, operator]


def without_scales_of_corrections(model: Transformer) -> None:
    for block in model.blocks:
        block.alternate.scale = None  # type: ignore[union-attr, assignment]


def without_residual_multiplier(model: Transformer) -> None:
    model.stream.multiplier = 1.0


def without_temperature(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.growth = None  # type: ignore[union-attr, assignment]


def with_temperature_one_position_later(model: Transformer) -> None:
    for block in model.blocks:
        if block.attention.growth is not None:  # type: ignore[union-attr]
            block.attention.growth.shift = 0  # type: ignore[union-attr, operator, assignment]


def without_norms_of_heads(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.q_norm = block.attention.k_norm = None  # type: ignore[union-attr, assignment]


def without_biases_of_norms(model: Transformer) -> None:
    for part in model.modules():
        if isinstance(part, RMSNorm):
            part.bias = None


def without_bias_of_the_head(model: Transformer) -> None:
    model.head.bias = None


def without_positions(model: Transformer) -> None:
    model.positions = None


def with_positions_one_row_later(model: Transformer) -> None:
    assert model.positions is not None
    model.positions.weight.data = model.positions.weight.roll(-1, 0)


def with_one_norm_in_a_block(model: Transformer) -> None:
    for block in model.blocks:
        block.mlp_norm = block.attention_norm  # type: ignore[union-attr, assignment]


def without_clipping(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.spec = replace(block.attention.spec, clip=None)  # type: ignore[union-attr, type-var, arg-type]


def with_weights_before_the_rotation(model: Transformer) -> None:
    for block in model.blocks:
        block.attention.unit = None  # type: ignore[union-attr, assignment]


def without_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbounded(gate: Tensor, up: Tensor) -> Tensor:
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    monkeypatch.setattr("soothsay.model.ops.kernels.clipped_swiglu", unbounded)


def halves_in_place_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STACKINGS, "gpt_oss", Stacking(interleaved=False))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt_oss", without_sinks),
        ("gpt_oss", with_silu),
        ("gpt_oss", without_router_bias),
        ("gpt_oss", without_expert_bias),
        ("llama4", with_scaled_outputs),
        ("llama4", with_sliding_windows),
        ("llama4", without_temperature),
        ("llama4", with_temperature_one_position_later),
        ("llama4", without_norms_of_heads),
        ("granite4_hybrid", without_skips),
        ("granite4_hybrid", without_bias_of_taps),
        ("granite4_hybrid", with_equal_rates),
        ("granite4_hybrid", without_offsets_of_steps),
        ("granite4_hybrid", without_scales_of_the_norm),
        ("granite4_hybrid", without_residual_multiplier),
        ("granite4_experts", without_shared_part),
        ("falcon_h1", without_multipliers_of_products),
        ("falcon_h1", without_multipliers_of_outputs),
        ("falcon_h1_normed", with_the_norm_last),
        ("nemotron_h_experts", without_shared_part),
        ("nemotron_h_experts", without_latent_states),
        ("nemotron_h", with_a_plain_relu),
        ("gemma3n", without_sparsity),
        ("gemma3n", without_learned_residuals),
        ("gemma3n", without_scales_of_corrections),
        ("stablelm", without_biases_of_norms),
        ("phi", without_bias_of_the_head),
        ("gpt2", without_positions),
        ("opt", with_positions_one_row_later),
        ("gpt_neox", with_one_norm_in_a_block),
        ("olmo1", without_clipping),
        ("hunyuan", with_weights_before_the_rotation),
    ],
)
def test_each_part_counts(pairs: Pairs, name: str, change: Callable[[Transformer], None]) -> None:
    pair, (sequence,) = pairs(name), random_tokens(np.random.default_rng(5), 40)
    model = load_model(open_checkpoint(pair.directory), "float32", kernels=TrainingKernels())
    model.kernels = kernels = StockKernels()
    for part in model.modules():
        if "kernels" in vars(part):
            part.kernels = kernels  # type: ignore[assignment]
    (expected,) = pair.expected([sequence])
    assert_close(run(model, [Rows(array(sequence), 0)])[0], [expected])
    change(model)
    assert (run(model, [Rows(array(sequence), 0)])[0][0] - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mamba_n_heads": 3}, "mamba_n_heads"),
        ({"mamba_n_groups": 3}, "mamba_n_groups"),
        ({"mamba_d_head": 7}, "mamba_d_head"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"time_step_limit": [0.001, {"__float__": "Infinity"}]}, "time_step_limit"),
        ({"layer_types": ["mamba"]}, "layer_types"),
        ({"layer_types": ["mamba"] * 4 + ["conv"]}, "layer_types"),
        ({"shared_intermediate_size": 0}, "shared_intermediate_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_state_spaces_that_are_not_supported(change: dict[str, Any], named: str) -> None:
    config = random_oracle("granite4_hybrid").config.to_dict()
    assert parse_model_config(config).parts(StateSpaceSpec)
    with pytest.raises(ModelError, match=named):
        parse_model_config({**config, **change})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("phi", {"qk_layernorm": True}),
        ("stablelm", {"qk_layernorm": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"add_cross_attention": True}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"word_embed_proj_dim": 32}),
        ("falcon", {"alibi": True}),
        ("falcon", {"new_decoder_architecture": True}),
        ("olmoe", {"clip_qkv": 8.0}),
        ("gptj", {"rotary_dim": 13}),
        ("gptj", {"rotary_dim": 64}),
    ],
)
def test_older_models_that_are_not_supported(name: str, change: dict[str, Any]) -> None:
    config = random_oracle(name).config.to_dict()
    assert parse_model_config(config).attentions
    with pytest.raises(ModelError, match=r"supported|must be even"):
        parse_model_config({**config, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers"),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"projectors_bias": True}, "projectors_bias"),
        ({"mamba_d_ssm": 94}, "mamba_n_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_falcons_that_are_not_supported(change: dict[str, Any], named: str) -> None:
    config = random_oracle("falcon_h1").config.to_dict()
    assert parse_model_config(config).parts(StateSpaceSpec)
    with pytest.raises(ModelError, match=named):
        parse_model_config({**config, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers_block_type": ["linear_attention", "conv"]}, "'conv'"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M*X"}, "'X'"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M-"}, "without attention"),
        ({"layers_block_type": None}, "hybrid_override_pattern"),
        ({"mlp_hidden_act": "silu"}, "relu2"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bias": True}, "mamba_proj_bias"),
        ({"n_group": 3}, "n_group"),
    ],
)
def test_nemotrons_that_are_not_supported(change: dict[str, Any], named: str) -> None:
    config = random_oracle("nemotron_h_experts").config.to_dict()
    layers = parse_model_config(config).layers
    assert [layer.mixer is None for layer in layers] == [True, False, True, False, True]
    with pytest.raises(ModelError, match=named):
        parse_model_config({**config, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx"),
        ({"intermediate_size": [80] * 5 + [96]}, "intermediate_size"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity_pattern"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
    ],
)
def test_gemma_3n_that_is_not_supported(change: dict[str, Any], named: str) -> None:
    config = random_oracle("gemma3n").config.to_dict()
    spec = parse_model_config(config)
    assert spec.stream_size > spec.hidden_size
    with pytest.raises(ModelError, match=named):
        parse_model_config({**config, **change})


@pytest.mark.parametrize(
    ("named", "computed"),
    [
        ({}, "gelu_tanh"),
        ({"hidden_act": "gelu"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ({"hidden_act": "silu"}, "silu"),
        ({"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
    ],
)
def test_what_activations_of_gemma_mean(named: dict[str, str | None], computed: str) -> None:
    config = random_oracle("gemma1").config.to_dict()
    del config["hidden_act"]
    part = parse_model_config({**config, **named}).layers[0].mlp
    assert isinstance(part, DenseSpec)
    assert part.activation == computed


def test_nemotron_has_older_names_of_kinds_of_layers() -> None:
    config = random_oracle("nemotron_h_experts").config.to_dict()
    for older in (
        {"hybrid_override_pattern": "EME*-"},
        {"layers_block_type": ["moe", "mamba", "moe", "attention", "mlp"]},
    ):
        assert parse_model_config({**config, "layers_block_type": None, **older}) == parse_model_config(
            config
        )


def test_granite_has_older_names_of_kinds_of_layers() -> None:
    config = random_oracle("granite4_hybrid").config.to_dict()
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    older = {**config, "layer_types": [names[kind] for kind in config["layer_types"]], "mamba_d_head": "auto"}
    assert parse_model_config(older) == parse_model_config(config)


@pytest.mark.parametrize("change", [without_bounds, halves_in_place_of_turns])
def test_how_gpt_oss_is_read_and_computed_counts(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    pair, (sequence,) = pairs("gpt_oss"), random_tokens(np.random.default_rng(5), 40)
    change(monkeypatch)
    model = load_model(open_checkpoint(pair.directory), "float32", kernels=StockKernels())
    (expected,) = pair.expected([sequence])
    assert (run(model, [Rows(array(sequence), 0)])[0][0] - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("change", [{"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0}])
def test_other_constants_of_gpt_oss(change: dict[str, float]) -> None:
    config = random_oracle("gpt_oss").config.to_dict()
    assert parse_model_config(config).first(AttentionSpec).sinks
    with pytest.raises(ModelError, match=next(iter(change))):
        parse_model_config({**config, **change})


def test_matrices_of_experts_that_are_transposed_as_in_published_files(pairs: Pairs, tmp_path: Path) -> None:
    """Qwen3-VL is published with matrices `[in, out]`. transformers 5 writes `[out, in]`."""
    pair, (sequence,) = pairs("qwen3_vl_moe"), random_tokens(np.random.default_rng(6), 30)
    tensors = load_file(pair.directory / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(pair.directory / "config.json", tmp_path)
    rows = [Rows(array(sequence), 0)]
    assert torch.equal(run(load(tmp_path), rows)[0][0], run(pair.model, rows)[0][0])


def test_experts_that_are_stacked_as_in_published_files(pairs: Pairs, tmp_path: Path) -> None:
    """Qwen3.5 is published with two tensors for the experts of a layer. transformers writes one by one."""
    pair, (sequence,) = pairs("qwen3_5_moe"), random_tokens(np.random.default_rng(6), 30)
    tensors, stacks = load_file(pair.directory / "model.safetensors"), dict[str, list[Tensor]]()
    for name in sorted(name for name in tensors if ".experts." in name):
        stem, _, rest = name.partition(".experts.")
        part = rest.split(".")[1]
        stacks.setdefault(f"{stem}.experts.{part}", []).append(tensors.pop(name))
    stacked = {name: torch.stack(parts) for name, parts in stacks.items()}
    for name in [name for name in stacked if name.endswith("gate_proj")]:
        parts = [stacked.pop(name), stacked.pop(name.replace("gate_proj", "up_proj"))]
        stacked[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts, dim=1)
    assert len(stacked) == 2 * pair.model.spec.num_layers
    save_file({**tensors, **stacked}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(pair.directory / "config.json", tmp_path)
    rows = [Rows(array(sequence), 0)]
    assert torch.equal(run(load(tmp_path), rows)[0][0], run(pair.model, rows)[0][0])


@pytest.mark.parametrize("change", [{"n_group": 3}, {"topk_group": 5}, {"num_experts_per_tok": 5}])
def test_experts_that_cannot_be_chosen_from_the_groups(change: dict[str, int]) -> None:
    """Eight experts in four groups, of which two are kept."""
    config = random_oracle("glm4_moe").config.to_dict()
    assert parse_model_config(config).parts(ExpertsSpec)
    with pytest.raises(ModelError, match="n_group"):
        parse_model_config({**config, **change})


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"n_group": 3}, "n_group"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "rotated"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "thick"]}, "thick"),
    ],
)
def test_latent_attention_that_is_not_supported(name: str, change: dict[str, Any], named: str) -> None:
    config = random_oracle(name).config.to_dict()
    assert parse_model_config(config).parts(LatentSpec)
    with pytest.raises(ModelError, match=named):
        parse_model_config({**config, **change})


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("mamba", {"use_conv_bias": False}, "use_conv_bias"),
        ("falcon_mamba", {"use_bias": True}, "use_bias"),
        ("falcon_mamba", {"hidden_act": "gelu"}, "hidden_act"),
        ("jamba", {"mamba_conv_bias": False}, "mamba_conv_bias"),
        ("jamba", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound"),
    ],
)
def test_states_that_are_not_supported(name: str, change: dict[str, Any], named: str) -> None:
    config = random_oracle(name).config.to_dict()
    assert parse_model_config(config).states
    with pytest.raises(ModelError, match=named):
        parse_model_config({**config, **change})


@pytest.mark.parametrize(
    "name", ["mamba", "falcon_mamba", "mamba2", "jamba", "lfm2", "qwen3_next", "falcon_h1"]
)
def test_convolutions_as_mlx_stores_them(pairs: Pairs, name: str, tmp_path: Path) -> None:
    """MLX adds 1 to norms of Qwen3-Next, and multiplies weights of Falcon-H1: these are refused."""
    pair, (sequence,) = pairs(name), random_tokens(np.random.default_rng(6), 30)
    tensors = load_file(pair.directory / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("conv1d.weight", "conv.conv.weight"))]:
        tensors[key] = tensors[key].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(pair.directory / "config.json", tmp_path)
    if name in ("qwen3_next", "falcon_h1"):
        with pytest.raises(ModelError, match=f"MLX, which also changes other weights of {name}"):
            load(tmp_path)
    else:
        rows = [Rows(array(sequence), 0)]
        assert torch.equal(run(load(tmp_path), rows)[0][0], run(pair.model, rows)[0][0])


def test_kimi_is_read_as_deepseek() -> None:
    config = random_oracle("deepseek_v3").config.to_dict()
    expected = replace(parse_model_config(config), family="kimi_k2")
    assert parse_model_config({**config, "model_type": "kimi_k2"}) == expected


@pytest.mark.parametrize("name", ["gemma3n", "falcon_h1", "nemotron_h_experts", "granite4_experts"])
def test_weights_are_counted_from_the_configuration(pairs: Pairs, name: str) -> None:
    matrices = (weight.numel() for weight in pairs(name).oracle.parameters() if weight.ndim > 1)
    assert pairs(name).model.spec.num_parameters == sum(matrices)


@torch.no_grad()
def test_gemma_4_of_more_than_ten_layers(tmp_path: Path) -> None:
    """transformers writes the numbers of layers in `per_layer_config` with leading zeros."""
    kinds = ["sliding_attention", "full_attention"] * 6
    oracle = random_oracle("gemma4_keys_are_values", num_hidden_layers=12, layer_types=kinds)
    oracle.save_pretrained(tmp_path)
    assert "05" in read_config(tmp_path)["per_layer_config"]
    logits = run(load(tmp_path), [Rows(array(range(30)), 0)])[0][0]
    assert (logits - oracle(torch.arange(30)[None], use_cache=False).logits[0]).abs().max() < 5e-4
    config, own = read_config(tmp_path), read_config(tmp_path)["per_layer_config"]
    for odd in ({**own, "5": {}}, {**own, "x": {}}, {**own, "05": 1}, [own], {**own, "0" * 5000: {}}):
        with pytest.raises(ModelError, match="per_layer_config is not a mapping"):
            parse_model_config({**config, "per_layer_config": odd})


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            "attention True makes an encoder",
        ),
        (
            "gemma4",
            {"use_bidirectional_attention": "all"},
            "attention 'all' makes an encoder",
        ),
        ("qwen3", {"is_causal": False}, "is_causal False makes an encoder"),
        ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, "judges texts, and writes none"),
        ("llama1", {"architectures": ["LlamaForTokenClassification"]}, "judges texts"),
    ],
)
def test_models_that_write_no_text(name: str, change: dict[str, Any], named: str) -> None:
    config = random_oracle(name).config.to_dict()
    with pytest.raises(ModelError, match=named):
        parse_model_config({**config, **change})
    with pytest.raises(ModelError, match=named):
        parse_model_config({"model_type": "wrapper", "text_config": {**config, **change}})
    for usual in ({"use_bidirectional_attention": "vision"}, {"use_bidirectional_attention": False}):
        parse_model_config({**config, **usual})


@pytest.mark.parametrize("name", TEXT_DEFAULTS)
def test_a_text_config_that_names_only_what_differs(name: str) -> None:
    """As in LLaVA-1.5. transformers' class is the oracle."""
    own = {"vocab_size": 32_064, "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-3, "num_hidden_layers": 3}
    whole = transformers.AutoConfig.for_model(name, **own).to_dict()
    wrapped = {"model_type": "llava", "text_config": {"model_type": name, **own}}
    wrapped["tie_word_embeddings"] = whole["tie_word_embeddings"]
    assert parse_model_config(wrapped) == parse_model_config(whole)
    with pytest.raises(ModelError, match=f"config.json of family '{name}' has no"):
        parse_model_config({"model_type": name, **own})  # a whole model's file is complete


def test_layers_that_share_keys_may_have_matrices_for_them(
    pairs: Pairs, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Gemma 3n is published with them. Nothing reads them."""
    pair = pairs("gemma3n")
    tensors = load_file(pair.directory / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        assert f"model.layers.5.self_attn.{part}.weight" not in tensors
        tensors[f"model.layers.5.self_attn.{part}.weight"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(pair.directory / "config.json", tmp_path)
    load(tmp_path)
    assert not [warning for warning in recwarn if "does not use" in str(warning.message)]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite"])
def test_the_pool_holds_one_latent_row_for_all_heads(pairs: Pairs, name: str) -> None:
    model = pairs(name).model
    rank, rotated = 64, 32
    assert {tuple(layer.shape) for layer in model.new_cache(2, 8).layers} == {(1, 16, rank + rotated)}
    matrices = (weight.numel() for weight in pairs(name).oracle.parameters() if weight.ndim > 1)
    assert model.spec.num_parameters == sum(matrices)


@pytest.mark.parametrize(
    ("end", "sparse"), [(-1, [1, 2, 3]), (None, [1, 2, 3]), (2, [1, 2]), (50, [1, 2, 3])]
)
def test_ernie_says_where_its_experts_end(pairs: Pairs, end: int | None, sparse: list[int]) -> None:
    own = {"num_hidden_layers": 4, "moe_layer_end_index": end, "moe_layer_interval": 1}
    spec = parse_model_config({**read_config(pairs("ernie_moe").directory), **own})
    assert [i for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, ExpertsSpec)] == sparse


def test_no_shared_experts_are_none(pairs: Pairs) -> None:
    raw = read_config(pairs("exaone_moe").directory)
    spec = parse_model_config({**raw, "n_shared_experts": 0, "num_shared_experts": 1})
    assert [part.shared for part in spec.parts(ExpertsSpec).values()] == [None] * 4
