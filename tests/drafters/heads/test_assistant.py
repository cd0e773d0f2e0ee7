"""Gemma 4's assistants, against transformers' own, and on the target's keys and values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import load, random_oracle
from heads import write_assistant
from torch import Tensor

from soothsay import LLM, SamplingParams
from soothsay.drafters.control.controller import Controller
from soothsay.drafters.heads.assistant import Assistant
from soothsay.drafters.registry import build_drafter
from soothsay.drafters.trees.growth import GrowingTree
from soothsay.errors import DrafterError
from soothsay.model.transformer import Transformer

PROMPTS = [[*range(3, 50)], [5, 6, 7], [*range(20, 32)] * 2]  # beyond the windows of nine tokens, and within


@dataclass
class Pass:
    """What a drafter computed for one request: the committed tokens, the paths to its rows, their logits."""

    tokens: list[int]
    paths: list[list[int]]
    logits: Tensor


class Recorder(Assistant):
    """An assistant that records its passes."""

    passes: list[Pass]

    def expand(self, growing: Sequence[GrowingTree], above: Tensor) -> tuple[Tensor, Tensor]:
        logits, out = super().expand(growing, above)
        begin = 0
        for g in growing:
            end = begin + len(g.frontier)
            paths = [[g.expanded.tokens[n] for n in g.expanded.path(node)] for node in g.frontier]
            self.passes.append(Pass(g.request.tokens.tolist(), paths, logits[begin:end].clone()))
            begin = end
        return logits, out


def record(model: Transformer, assistant: Path) -> list[Pass]:
    """The passes of an assistant while three requests are answered together."""
    Recorder.passes = []
    llm = LLM(model, drafter=lambda target: Recorder(target, assistant, depth=3, width=2), kv_tokens=1024)
    modes = [SamplingParams(temperature=t, max_tokens=12, ignore_eos=True) for t in (0, 1, 0)]
    llm.generate(PROMPTS, modes)
    return Recorder.passes


@torch.no_grad()
def expected(target: Any, assistant: Any, tokens: list[int], path: list[int]) -> Tensor:
    """transformers' logits after a path: the target reads all tokens but the last, the assistant goes on."""
    inner = target.get_decoder()
    read = inner(torch.tensor([tokens[:-1]]), return_shared_kv_states=True)
    state, position = read.last_hidden_state[:, -1:], torch.tensor([[len(tokens) - 1]])
    for token in path:
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        out = assistant(
            inputs_embeds=torch.cat([embedded, state], dim=-1),
            position_ids=position,
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            shared_kv_states=dict(read.shared_kv_states),
        )
        state = out.last_hidden_state
    return out.logits[0, 0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("name", ["gemma4", "gemma4_experts"])
def test_trees_against_transformers(name: str, clustered: bool, tmp_path: Path) -> None:
    target = random_oracle(name, vocab_size=96, vocab_size_per_layer_input=96)
    target.save_pretrained(tmp_path)
    model = load(tmp_path)
    own = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
    assistant = write_assistant(model.spec, tmp_path / "assistant", **(own if clustered else {}))
    passes = record(model, tmp_path / "assistant")
    assert max(len(path) for p in passes for path in p.paths) == 3
    assert {len(p.paths) for p in passes} >= {1, 2}
    for p in passes[::4]:
        for path, logits in zip(p.paths, p.logits, strict=True):
            wanted = expected(target, assistant, p.tokens, path)
            known = logits > -torch.inf
            assert int(known.sum()) == (24 if clustered else 96)
            assert (logits - wanted)[known].abs().max() < 1e-4
            if clustered:  # others have one number below all of these there
                assert wanted[~known].max() < wanted[known].min()


def test_it_is_found_beside_the_target(tmp_path: Path) -> None:
    random_oracle("gemma4").save_pretrained(tmp_path)
    write_assistant(load(tmp_path).spec, tmp_path / "drafters" / "assistant")
    llm = LLM(tmp_path, dtype="float32", kv_tokens=1024)
    plain, params = LLM(load(tmp_path), drafter="none", kv_tokens=1024), SamplingParams(max_tokens=40, seed=1)
    for spec in ("assistant", "auto", "suffix + assistant"):
        result = llm.generate([5, 6, 7], params, drafter=spec)
        assert result.token_ids == plain.generate([5, 6, 7], params).token_ids
        assert result.stats.drafted > 0 or spec == "auto"  # it goes by the clock
    auto = build_drafter("auto", llm.engine.target)
    assert isinstance(auto, Controller)
    assert [part.name for part in auto.parts] == ["suffix", "assistant"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"backbone_hidden_size": 48}, "hidden size 48"),
        ({"text_config": {"num_key_value_heads": 4}}, "key-value heads"),
        ({"text_config": {"global_head_dim": 32, "per_layer_config": None}}, "key-value heads"),
        ({"text_config": {"enable_moe_block": True}}, "num_experts"),
        ({"text_config": {"vocab_size": 95}}, "95"),
        ({"text_config": None}, "text_config"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, "num_centroids"),
    ],
)
def test_assistants_that_do_not_fit(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    random_oracle("gemma4").save_pretrained(tmp_path)
    model = load(tmp_path)
    write_assistant(model.spec, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=named):
        LLM(model, drafter=f"assistant(model={tmp_path / 'a'})", kv_tokens=256)


def test_a_target_without_windows_takes_no_assistant_with_windows(tmp_path: Path) -> None:
    random_oracle("gemma4").save_pretrained(tmp_path)
    write_assistant(load(tmp_path).spec, tmp_path / "a")
    random_oracle("llama1").save_pretrained(tmp_path / "llama")
    with pytest.raises(DrafterError, match="target has none"):
        LLM(load(tmp_path / "llama"), drafter=f"assistant(model={tmp_path / 'a'})", kv_tokens=256)
