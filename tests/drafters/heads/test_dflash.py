"""DFlash and its kin: published layouts compute what their own packages do; trees under stress."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_oracle import (
    CASES,
    CONTEXT,
    KEPT,
    MASK,
    PATHS,
    TAPS,
    block,
    compute,
    config,
    features,
    target_ends,
    weights,
)
from heads import random_dflash, random_peagle
from hostile_heads import HOSTILE, changed, places, read
from one_shot import (
    GREEDY,
    MANY,
    STRESSES,
    Watched,
    check_best_tree,
    check_grown_tree,
    log_probs,
    made,
    most_features_kept,
    prompts,
    serve,
)
from oracles import randomize, rms_norm, rotated, taps_of
from safetensors.torch import load_file, save_file
from tiny import TINY, adapted
from torch import Tensor
from torch.nn.functional import silu

from soothsay import LLM
from soothsay.config import EngineConfig
from soothsay.core.batch import Rows
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import Target
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.heads.checkpoints.head_directory import open_head, read_head
from soothsay.drafters.heads.dflash import DFlash
from soothsay.drafters.heads.dflash_head import DFlashConfig, DFlashHead
from soothsay.drafters.heads.draft_blocks import BlockPacker, RowVisibility
from soothsay.drafters.heads.path_heads import CandidateSelector, CausalRefiner, MarkovHead, PathHead
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.drafters.registry import build_drafter
from soothsay.drafters.trees.own_kv import own_pool
from soothsay.errors import DrafterError
from soothsay.model.ops.kernels import StockKernels
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint

Make = Callable[..., Transformer]
Raw = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tiny: Make) -> Target:
    model = tiny(num_layers=6, windows=(None,) * 6)
    with torch.no_grad():
        model.embedding.weight.copy_(target_ends()[0])
        model.head.weight.copy_(target_ends()[1])
    return Target(model, None, EngineConfig(max_context=256), num_blocks=4)


def save(path: Path, raw: Raw, options: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(options))
    save_file(raw, path / "model.safetensors")
    return path


def guesses(head: DFlashHead, target: Target, chunks: tuple[int, ...] = (3,)) -> Tensor:
    """The same logits as `compute`. The context comes in chunks that begin at these tokens.

    The request's blocks are the second and the fourth of the pool. Another request's rows stand before it.
    """
    shared, c, root = TargetEnds.of(target.model), head.config, len(CONTEXT) - 1
    packer = BlockPacker(target, c.size, c.mask, c.sights, c.block.group)
    pool = own_pool(target, c.block, torch.float32, 2 * (c.size + root))
    read = head.fuse(list(features()), shared)
    table, others = np.array([1, 3]), np.array([0, 2])
    block = DraftTree(CONTEXT[-1])
    block.extend([0] * c.size)
    borders = [1, *chunks, root + 1]
    out = torch.empty(0)
    for begin, end in pairwise(borders):
        own = Rows(np.array(CONTEXT[begin:end]), begin, table, block if end > root else None, first_key=1)
        other = Rows(np.array([8, 9]), 1, others, block, first_key=1)
        place = packer.pack([other, own])
        with torch.no_grad():
            rows = torch.cat([torch.randn(2, read.shape[1]), read[begin - 1 : end - 1]])
            out = head(rows, head.embed(place.tokens, shared), place, pool.layers)
    out = out[1:]  # [1, B, H]
    first = c.size - c.num_guesses
    with torch.no_grad():
        logits = head.logits(out[0, first:], shared)
        if head.path_head is None:
            return torch.stack([logits, logits])
        known = head.path_head.read(out)
        found = []
        for path in PATHS:
            before = torch.tensor(CONTEXT[-2:-1])
            states, steps = head.path_head.begin(known, torch.tensor(CONTEXT[-1:]), before), []
            for depth, token in enumerate([CONTEXT[-1], *path][: len(logits)]):
                here = slice(depth, depth + 1)
                corrected, states = head.path_head.step(
                    logits[here], known[0, first:][here], torch.tensor([token]), states
                )
                steps.append(corrected)
            found.append(torch.cat(steps))
        return torch.stack(found)


def opened(path: Path, target: Target) -> DFlashHead:
    head = read_head(path, target)
    assert isinstance(head, DFlashHead)
    return head


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_that_the_packages_computed(name: str, target: Target, tmp_path: Path) -> None:
    head = opened(save(tmp_path, weights(name), config(name)), target)
    found = guesses(head, target)
    torch.testing.assert_close(found, load_file(KEPT)[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_file_holds_what_the_packages_compute(name: str) -> None:
    pytest.importorskip("speculators", reason="no speculators: the package is not installed")
    pytest.importorskip("dflash", reason="no speculators: nor dflash")
    torch.testing.assert_close(compute(name), load_file(KEPT)[name], rtol=1e-5, atol=1e-5)


# drafts


def make_head(
    size: int = 5,
    sights: Sequence[RowVisibility] = (RowVisibility(), RowVisibility()),
    path_head: PathHead | None = None,
    guessed: Sequence[int] = (),
    **changes: Any,
) -> DFlashHead:
    layers = len(sights)
    block = adapted(TINY, num_layers=layers, windows=(None,) * layers, qk_norm=True)
    c = DFlashConfig(block, (0, 2), size, 96, tuple(sights), guessed=len(guessed), **changes)
    head = DFlashHead(c, StockKernels(), path_head)
    if guessed:
        head.d2t = torch.tensor(guessed) - torch.arange(len(guessed))
    return randomize(head)


SIZES = 48, 97, 97  # hidden size, vocabulary, tokens that can be guessed
HEADS = {
    "plain": make_head(),
    "windows": make_head(
        sights=[
            RowVisibility(True, 6),
            RowVisibility(),
            RowVisibility(False, 9, True),
            RowVisibility(False, 4),
        ]
    ),
    "short, from the anchor": make_head(3, guessed=range(0, 97, 2), begins_at_root=True),
    "convolved, chosen": make_head(path_head=CandidateSelector(6, 9, 48, 97), convolution=(2, 8)),
    "markov, short": make_head(
        guessed=range(3, 97, 3), path_head=MarkovHead("vanilla", 6, 48, 97, 32, begins_at_root=False)
    ),
    "recurrent": make_head(begins_at_root=True, path_head=MarkovHead("rnn", 6, *SIZES, begins_at_root=True)),
    "refined": make_head(path_head=CausalRefiner(6, 12, 5, *SIZES, begins_at_root=False)),
}


def plain_outputs(head: DFlashHead, target: Transformer, tokens: Sequence[int], first: int) -> Tensor:
    """`[B, H]` normed outputs after `tokens`. Features are known of the tokens from `first - 1` on."""
    w, c = head.state_dict(), head.config
    states = torch.cat(taps_of(target, tokens[:-1], head.taps), dim=-1) @ w["fc.weight"].t()
    states = rms_norm(states, head.feature_norm)[first - 1 :]
    x, root = target.embedding.weight[[tokens[-1], *[c.mask] * (c.size - 1)]], len(tokens) - 1
    places = torch.cat([first - 1 + torch.arange(len(states)), root + torch.arange(c.size)])
    for layer in range(c.block.num_layers):
        x = plain_block(w, f"blocks.{layer}.", head, layer, states, x, places)
    return rms_norm(x, head.norm)


def visible(sight: RowVisibility, query: int, key: int, root: int) -> bool:
    if key >= root and sight.causal and key > query:
        return False
    if sight.window is None:
        return True
    if sight.from_anchor:
        return key >= root - sight.window
    return abs(query - key) < sight.window


def plain_block(
    w: dict[str, Tensor], at: str, head: DFlashHead, layer: int, states: Tensor, x: Tensor, places: Tensor
) -> Tensor:
    c, size = head.config.block.first(AttentionSpec), len(x)
    block = head.blocks[layer]

    def attend(rows: Tensor) -> Tensor:
        def heads(name: str, rows: Tensor) -> Tensor:
            return (rows @ w[f"{at}attention.{name}.weight"].t()).view(len(rows), -1, c.size)

        q = rotated(rms_norm(heads("q", rows), block.attention.q_norm), places[-size:])
        k, v = heads("kv", torch.cat([states, rows])).chunk(2, dim=1)
        k = rotated(rms_norm(k, block.attention.k_norm), places)
        k, v = (part.repeat_interleave(c.group, dim=1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(c.size)
        sight, root = head.config.sights[layer], int(places[-size])
        sees = [[visible(sight, i, j, root) for j in places.tolist()] for i in places[-size:].tolist()]
        scores = scores.masked_fill(~torch.tensor(sees), -torch.inf)
        out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(size, -1)
        return out @ w[f"{at}attention.o.weight"].t()

    def mlp(rows: Tensor) -> Tensor:
        gate, up = (rows @ w[f"{at}mlp.gate_up.weight"].t()).chunk(2, dim=-1)
        return (silu(gate) * up) @ w[f"{at}mlp.down.weight"].t()

    def convolved(part: Callable[[Tensor], Tensor], name: str, rows: Tensor) -> Tensor:
        if head.config.convolution is None:
            return part(rows)
        taps, group = head.config.convolution
        made = (rows @ w[f"{at}{name}.kernel_projection.weight"].t()).view(size, 2, taps, -1)
        kernels = w[f"{at}{name}.base_kernel"] + made.repeat_interleave(group, -1)  # [B, 2, k, H]
        for side in (0, 1):
            earlier = [torch.cat([torch.zeros(t, rows.shape[1]), rows])[:size] for t in range(taps)]
            rows = sum((kernels[:, side, t] * earlier[t] for t in range(taps)), torch.zeros(()))
            rows = part(rows) if side == 0 else rows
        return rows

    x = x + convolved(attend, "attention_conv", rms_norm(x, block.attention_norm))
    return x + convolved(mlp, "mlp_conv", rms_norm(x, block.mlp_norm))


def marginals(head: DFlashHead, target: Transformer, outputs: Tensor) -> Tensor:
    """`[D, V_short]` logits by the one pass."""
    weight = target.head.weight if head.head is None else head.head.weight
    return outputs[head.config.size - head.config.num_guesses :] @ weight.t()


def below(
    head: DFlashHead, logits: Tensor, outputs: Tensor, tokens: Sequence[int], path: Sequence[int]
) -> Tensor:
    """`[V]` logits below the path of a tree, by steps along it. The path begins with the root."""
    assert head.path_head is not None
    read, first = head.path_head.read(outputs[None]), head.config.size - head.config.num_guesses
    before = torch.tensor([tokens[max(len(tokens) - 2, 0)]])
    states = head.path_head.begin(read, torch.tensor(tokens[-1:]), before)
    found = torch.empty(0)
    for depth, token in enumerate(path):
        row, known = logits[depth : depth + 1], read[0, first + depth : first + depth + 1]
        found, states = head.path_head.step(row, known, torch.tensor([token]), states)
    return head.whole(found, 97)[0]


HEADS["refined"].path_head.next.weight.mul_(1e-3)  # random ones make logits of thousands


@pytest.mark.parametrize(
    ("stress", "variant"),
    [
        *(("at ease", variant) for variant in HEADS),
        *((stress, variant) for stress in [*STRESSES][1:] for variant in ("windows", "refined")),
    ],
)
def test_guesses_are_the_likeliest_by_plain_attention(stress: str, variant: str, tiny: Make) -> None:
    target, head = tiny(0), HEADS[variant]

    def make(t: object) -> DFlash:
        return DFlash(t, copy.deepcopy(head), nodes=20, branch=3, width=2)  # type: ignore[arg-type]

    drafter, _ = serve(target, make, stress)
    drafts = made(drafter)
    if stress == "at ease":
        assert {guess.first_key for guess in drafts} <= {1, 17}, "a request that came later may share a block"
    for guess in drafts[:: len(drafts) // 20 or 1]:
        outputs = plain_outputs(head, target, guess.tokens, guess.first_key)
        logits = marginals(head, target, outputs)
        if head.path_head is None:
            known = head.whole(logits[: guess.max_nodes], 97)
            check_best_tree(guess, log_probs(guess, known), branch=3, size=20)
            continue

        logits_below = partial(below, head, logits, outputs, guess.tokens)
        check_grown_tree(guess, logits_below, width=2, branch=3, depth=head.config.num_guesses)


def test_features_do_not_pile_up_where_nothing_is_guessed(tiny: Make) -> None:
    assert most_features_kept(tiny(0), lambda t: DFlash(t, copy.deepcopy(HEADS["plain"]))) <= 10


def test_what_was_seen_of_a_prefix_is_not_run_again(tiny: Make) -> None:
    """The next turn of a conversation reuses the blocks that the turn before it filled."""
    llm = LLM(tiny(0), drafter="none", kv_tokens=512, block_size=8)
    drafter = Watched(DFlash(llm.engine.target, copy.deepcopy(HEADS["plain"])))
    first = llm.generate(prompts()[3], replace(GREEDY, max_tokens=30), drafter=drafter)
    stream = llm.stream([*first.prompt_token_ids, *first.token_ids, 1, 2, 3], GREEDY, drafter=drafter)
    keys = [state.first_key for _ in stream for state in drafter.drafter.kv.states.values()]
    assert set(keys) == {1}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_other_kinds_of_weights_guess_much_the_same(dtype: str, tiny: Make) -> None:
    trees = []
    for kind in ("auto", dtype):
        llm = LLM(tiny(0), drafter="none", kv_tokens=4096)
        head = copy.deepcopy(HEADS["plain"])
        drafter = Watched(DFlash(llm.engine.target, head, nodes=7, branch=1, dtype=kind))  # type: ignore[arg-type]
        llm.generate(prompts(), MANY, drafter=drafter)
        trees.append({(g.request.seed, *g.tokens): g.tree.tokens[1] for g in made(drafter)})
    both = trees[0].keys() & trees[1].keys()
    assert len(both) > 50
    assert sum(trees[0][state] == trees[1][state] for state in both) > 0.8 * len(both)


# other layouts of the same heads


def flat(name: str, **options: Any) -> dict[str, Any]:
    """A configuration with all keys at the top, as DeepSpec and vLLM write it."""
    c = CASES[name]
    own = {"block_size": c.size, "mask_token_id": MASK, "num_target_layers": 6}
    return {**block(c), **own, "target_layer_ids": [tap - 1 for tap in TAPS], **c.options, **options}


def copies(raw: Raw) -> Raw:
    """With an embedding and an output head, as DeepSpec writes them: copies of the target's."""
    return {**raw, "embed_tokens.weight": torch.ones(97, 48), "lm_head.weight": torch.ones(97, 48)}


def renamed(raw: Raw, **names: str) -> Raw:
    for ours, theirs in names.items():
        raw = {name.replace(ours, theirs): tensor for name, tensor in raw.items()}
    return raw


XPRESS = {
    "refiner_head.": "xpress_head.",
    "token_embed": "w1",
    "readout": "w2",
    "mix_l": "mix.L",
    "mlp_gate": "mlp.gate_proj",
    "mlp_up": "mlp.up_proj",
    "mlp_down": "mlp.down_proj",
}
LAYOUTS: dict[str, tuple[str, Callable[[Raw], Raw], dict[str, Any], str]] = {
    "DeepSpec": ("DSpark", copies, flat("DSpark", architectures=["Qwen3DSparkModel"]), "DSpark (original)"),
    "SGLang, nested": (
        "DSpark, recurrent from the anchor",
        copies,
        {
            **block(CASES["DSpark, recurrent from the anchor"]),
            "dspark_config": {"markov_rank": 8, "markov_head_type": "rnn"},
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2, 5], "block_size": 4},
        },
        "DSpark (original)",
    ),
    "SGLang, of speculators": (
        "DSpark",
        copies,
        {k: v for k, v in config("DSpark").items() if k != "speculators_model_type"},
        "DSpark (speculators)",
    ),
    "vLLM, fill-in": (
        "DSpark, gated",
        lambda raw: raw,
        flat("DSpark, gated", dspark_bonus_anchor=True),
        "DSpark (original)",
    ),
    "xPress's authors": (
        "xPress",
        lambda raw: renamed(raw, **XPRESS),
        flat("xPress", xpress_rank=8),
        "xPress (original)",
    ),
    "prefix": (
        "DFlash, larger block",
        lambda raw: renamed(raw, **{"layers.": "model.layers."}),
        flat("DFlash, larger block"),
        "DFlash (original)",
    ),
    "encoder": (
        "DFlash, larger block",
        lambda raw: renamed(
            raw, **{"fc.weight": "encoder.fc.weight", "hidden_norm": "encoder.output_norm_enc"}
        ),
        flat("DFlash, larger block"),
        "DFlash (original)",
    ),
    "causal by vLLM's key": (
        "JetSpec",
        lambda raw: raw,
        {
            **{k: v for k, v in config("JetSpec").items() if k != "is_causal"},
            "dflash_config": {**config("JetSpec")["dflash_config"], "causal": True},
        },
        "DFlash (original)",
    ),
    "tables that are modules": (
        "z-lab's DFlash2",
        lambda raw: renamed(raw, codebook="codebook.weight"),
        config("z-lab's DFlash2"),
        "DFlash2 (original)",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_the_same_head(layout: str, target: Target, tmp_path: Path) -> None:
    name, rewrite, options, said = LAYOUTS[layout]
    save(tmp_path, rewrite(weights(name)), options)
    torch.testing.assert_close(guesses(opened(tmp_path, target), target), load_file(KEPT)[name])
    with open_head(tmp_path, target) as stored:
        assert (stored.method, stored.layout) == ("dflash", said)


def test_layers_are_spread_over_the_target_if_none_are_stated(target: Target, tmp_path: Path) -> None:
    options = config("z-lab's DFlash")
    del options["dflash_config"]["target_layer_ids"]
    raw = weights("z-lab's DFlash")
    save(tmp_path, {**raw, "fc.weight": raw["fc.weight"][:, :96].contiguous()}, options)
    assert opened(tmp_path, target).taps == (2, 4)  # of 2 blocks and 6 layers: the outputs of layers 1 and 3


@pytest.mark.parametrize(
    ("name", "change", "options", "message"),
    [
        ("DFlash", {}, {"block_size": 1}, "a block needs a row that guesses"),
        ("DFlash", {}, {"block_size": 5000}, "1,024 rows at most"),
        ("DFlash", {}, {"mask_token_id": 97}, "a mask of the vocabulary"),
        ("DFlash", {}, {"mask_token_id": None}, "which token is the mask"),
        ("DFlash", {}, {"aux_hidden_state_layer_ids": [1, 3, 7]}, r"reads layers \[1, 3, 7\]"),
        (
            "DFlash",
            {},
            {"aux_hidden_state_layer_ids": [1, 3]},
            r"fc.weight \[48, 144\].* be \[48, 96\]",
        ),
        ("DFlash", {"d2t": None}, {}, "guesses 31 tokens of 97, and has no d2t"),
        ("DFlash", {"lm_head.weight": None}, {}, "no lm_head.weight"),
        ("DFlash", {"layers.0.mlp.up_proj.weight": None}, {}, "no tensor 'layers.0.mlp.up_proj.weight'"),
        ("DFlash", {"prefix_gru.weight": torch.ones(3)}, {}, "a tensor 'prefix_gru.weight', which soothsay"),
        ("DFlash", {"layers.1.mlp.up_proj.weight": torch.ones(3)}, {}, "would leave out"),
        (
            "DFlash2",
            {"d2t": torch.zeros(97).long(), "lm_head.weight": torch.ones(97, 48)},
            {},
            "not supported",
        ),
        ("DFlash2", {}, {"conv_group_size": 7}, "divide 48 channels"),
        ("DFlash2", {}, {"conv_kernel_size": None}, "no conv_kernel_size"),
        ("DSpark", {"markov_head.markov_w2.weight": torch.ones(90, 8)}, {}, "should be"),
        ("DSpark", {"markov_head.markov_w1.weight": torch.ones(97)}, {}, "is not a matrix"),
        ("xPress", {}, {"block_size": 4}, "refiner_head.mix_l"),
        ("z-lab's DFlash", {}, {"num_target_layers": 5}, "a model of 5 layers"),
        ("z-lab's DFlash", {}, {"hidden_size": 64}, "hidden size 64"),
        ("z-lab's DFlash", {}, {"vocab_size": 5000}, "a vocabulary of 5,000 tokens"),
        ("z-lab's DFlash, windows", {}, {"layer_types": ["full_attention"]}, "1 entries for 3 blocks"),
        ("z-lab's DFlash", {}, {"num_hidden_layers": 99}, "promises 99 decoder blocks"),
    ],
)
def test_refusals(
    name: str,
    change: dict[str, Tensor | None],
    options: dict[str, Any],
    message: str,
    target: Target,
    tmp_path: Path,
) -> None:
    raw = {k: v for k, v in {**weights(name), **change}.items() if v is not None}
    save(tmp_path, raw, {**config(name), **options})
    with pytest.raises(DrafterError, match=message) as refused:
        read_head(tmp_path, target)
    assert str(tmp_path) in str(refused.value)


def test_masks_with_an_embedding_of_their_own_are_refused(target: Target, tmp_path: Path) -> None:
    save(tmp_path, weights("DFlash"), config("DFlash"))
    torch.save(torch.ones(48), tmp_path / "mask_embedding.pt")
    with pytest.raises(DrafterError, match=r"mask_embedding\.pt"):
        read_head(tmp_path, target)


def test_padding_of_the_vocabulary_may_differ(target: Target, tmp_path: Path) -> None:
    """Rows beyond the target's are not read, and tokens beyond the head's are not guessed."""
    name, mask = "DSpark", {"mask_token_id": 3}
    raw = weights(name)
    expected = guesses(opened(save(tmp_path / "same", raw, config(name) | mask), target), target)
    for vocab in (103, 91):
        options, changed = config(name) | mask | {"draft_vocab_size": vocab}, dict(raw)
        options["transformer_layer_config"] = {**options["transformer_layer_config"], "vocab_size": vocab}
        for table in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
            changed[table] = torch.cat([raw[table], torch.ones(9, 8)])[:vocab]
        head = opened(save(tmp_path / str(vocab), changed, options), target)
        found = guesses(head, target)
        kept = min(vocab, 97)
        assert found.shape[-1] == kept
        torch.testing.assert_close(found, expected[..., :kept])
        assert head.whole(found[0], 97).isfinite().sum(1).tolist() == [kept] * len(found[0])


@pytest.mark.filterwarnings("ignore:.*was made for contexts of")
@pytest.mark.parametrize("name", ["DFlash2", "DSpark, short", "xPress", "z-lab's DFlash, windows"])
def test_every_field_of_a_configuration_may_be_hostile(name: str, target: Target, tmp_path: Path) -> None:
    """It is refused by `DrafterError`, or the head loads."""
    save(tmp_path, weights(name), config(name))
    rng = random.Random(name)
    for place in places(config(name)):
        for value in rng.sample(HOSTILE, 6):
            (tmp_path / "config.json").write_text(json.dumps(changed(config(name), place, value)))
            read(tmp_path, target)


@pytest.mark.parametrize("name", ["dflash", "peagle"])
def test_auto_finds_a_head_beside_the_target(name: str, tmp_path: Path) -> None:
    for file in open_checkpoint("sibyl").path.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "drafters").mkdir()
    (tmp_path / "drafters" / name).symlink_to(random_dflash() if name == "dflash" else random_peagle())
    drafter = build_drafter("auto", LLM(str(tmp_path), drafter="none", kv_tokens=2048).engine.target)
    assert isinstance(drafter, Controller)
    assert [part.name for part in drafter.parts] == ["suffix", name]
