"""What the packages `speculators` (0.9.0) and `dflash` (0.1.0) compute with small random mask-filling heads.

`python tests/helpers/dflash_oracle.py` writes the kept results anew, and needs both packages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KEPT = Path(__file__).with_name("dflash_heads.safetensors")
H, V, DRAFT, HEADS, KV, D, INNER = 48, 97, 31, 4, 2, 16, 96
RANK, LAYERS, MASK = 8, 6, 96
TAPS = [1, 3, 6]  # layers whose inputs are read
CONTEXT = [5, 90, 13, 44, 2, 7, 31]  # committed tokens; the last is the root
PATHS = [[60, 8, 3, 77, 1], [61, 9, 5, 12, 2]]  # tokens of two paths below the root, longer than any block


@dataclass(frozen=True)
class Case:
    """A kind of head."""

    method: str  # as speculators names it
    size: int = 4  # rows of a block
    layers: int = 1
    short: bool = False  # whether it guesses a part of the vocabulary only
    from_anchor: bool = False
    package: str = "speculators"
    options: dict[str, Any] = field(default_factory=dict)  # of the method
    block: dict[str, Any] = field(default_factory=dict)  # of the decoder blocks


def sliding(window: int, *slides: bool) -> dict[str, Any]:
    """Options of decoder blocks some of which have a sliding window."""
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 5}
CASES = {
    "DFlash": Case("dflash", short=True),
    "DFlash, larger block": Case("dflash", size=6, layers=2),
    "DFlash, windows": Case("dflash", layers=3, block=sliding(3, True, False, True)),
    "DFlash, windows to both sides": Case(
        "dflash", layers=2, options={"sliding_window_non_causal": True}, block=sliding(3, False, True)
    ),
    "DFlash2": Case("dflash2", size=5, layers=2, options=CONVOLUTION, block=sliding(4, True, True)),
    "DFlash2, one row": Case("dflash2", options={**CONVOLUTION, "conv_kernel_size": 1}),
    "DSpark": Case("dspark", layers=2, from_anchor=True, options={"markov_rank": RANK}),
    "DSpark, short": Case("dspark", short=True, from_anchor=True, options={"markov_rank": RANK}),
    "DSpark, gated": Case("dspark", options={"markov_rank": RANK, "markov_head_type": "gated"}),
    "DSpark, recurrent": Case("dspark", short=True, options={"markov_rank": RANK, "markov_head_type": "rnn"}),
    "DSpark, recurrent from the anchor": Case(
        "dspark", from_anchor=True, options={"markov_rank": RANK, "markov_head_type": "rnn"}
    ),
    "xPress": Case("xpress", size=5, layers=2, options={"xpress_rank": RANK}),
    "xPress, short, from the anchor": Case(
        "xpress", short=True, from_anchor=True, options={"xpress_rank": RANK}
    ),
    "z-lab's DFlash": Case("dflash", size=5, layers=2, package="dflash"),
    "z-lab's DFlash, windows": Case(
        "dflash",
        size=5,
        layers=3,
        package="dflash",
        options={"output_multiplier": 0.7, "final_logit_softcapping": 4.0, "input_embedding_scale": 1.5},
        block=sliding(4, True, False, True),
    ),
    "z-lab's DFlash2": Case(
        "dflash2",
        layers=2,
        package="dflash",
        options=CONVOLUTION,
        block={**sliding(3, True, False), "is_causal": False},
    ),
    "JetSpec": Case("dflash", size=6, package="dflash", block={"is_causal": True}),
}
"""Kinds of heads."""


def block(case: Case) -> dict[str, Any]:
    """Options of the decoder blocks, as Qwen3's."""
    return {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "num_hidden_layers": case.layers,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": V,
        **case.block,
    }


def config(name: str) -> dict[str, Any]:
    """The config.json of a head."""
    case = CASES[name]
    if case.package == "dflash":
        own = {"target_layer_ids": [tap - 1 for tap in TAPS], "mask_token_id": MASK, "block_size": case.size}
        return {
            **block(case),
            "architectures": ["DFlashDraftModel"],
            "num_target_layers": LAYERS,
            "dflash_config": {**own, **case.options},
        }
    return {
        "speculators_model_type": case.method,
        "transformer_layer_config": block(case),
        "draft_vocab_size": DRAFT if case.short else V,
        "aux_hidden_state_layer_ids": TAPS,
        "block_size": case.size,
        "mask_token_id": MASK,
        "sample_from_anchor": case.from_anchor,
        **case.options,
    }


def weights(name: str) -> dict[str, Tensor]:
    """The tensors of a head, from a fixed seed."""
    case = CASES[name]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 3 * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for layer in range(case.layers):
        shapes |= {
            f"layers.{layer}.{part}": shape
            for part, shape in {
                "self_attn.q_proj.weight": (HEADS * D, H),
                "self_attn.k_proj.weight": (KV * D, H),
                "self_attn.v_proj.weight": (KV * D, H),
                "self_attn.o_proj.weight": (H, HEADS * D),
                "self_attn.q_norm.weight": (D,),
                "self_attn.k_norm.weight": (D,),
                "mlp.gate_proj.weight": (INNER, H),
                "mlp.up_proj.weight": (INNER, H),
                "mlp.down_proj.weight": (H, INNER),
                "input_layernorm.weight": (H,),
                "post_attention_layernorm.weight": (H,),
            }.items()
        }
    shapes |= path_shapes(case)
    made = torch.Generator().manual_seed(3)
    raw = {name: torch.randn(shape, generator=made) * 0.15 for name, shape in shapes.items()}
    raw = {name: tensor + 1 if tensor.dim() == 1 else tensor for name, tensor in raw.items()}
    if case.short:
        ids = torch.randperm(V, generator=made)[:DRAFT].sort().values
        raw["d2t"] = ids - torch.arange(DRAFT)
        raw["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return raw


def path_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of what a method has beside DFlash's tensors."""
    guessed = DRAFT if case.short else V
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (DRAFT, H)} if case.short else {}
    if case.method == "dflash2":
        rows, group = case.options["conv_kernel_size"], case.options["conv_group_size"]
        for layer in range(case.layers):
            for part in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{layer}.{part}.base_kernel"] = (2, rows, H)
                shapes[f"layers.{layer}.{part}.kernel_projection.weight"] = (2 * rows * (H // group), H)
        for table in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{table}"] = (V, RANK)
        shapes["candidate_selector.hidden_projection.weight"] = (RANK, H)
    if case.method == "dspark":
        shapes |= {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (guessed, RANK)}
        kind = case.options.get("markov_head_type")
        if kind == "gated":
            shapes |= {
                "markov_head.gate_proj.weight": (RANK, H + RANK),
                "markov_head.gate_proj.bias": (RANK,),
            }
        if kind == "rnn":
            wide = 3 * RANK
            shapes |= {
                "markov_head.joint_proj.weight": (wide, 2 * RANK + H),
                "markov_head.joint_proj.bias": (wide,),
            }
        shapes |= {"confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)}
    if case.method == "xpress":
        own = {
            "token_embed.weight": (V, RANK),
            "down_h.weight": (RANK, H),
            "down_g.weight": (RANK, H),
            "in_proj.weight": (RANK, 3 * RANK),
            "mix_l": (RANK, case.size, case.size),
            "mlp_gate.weight": (2 * RANK, RANK),
            "mlp_up.weight": (2 * RANK, RANK),
            "mlp_down.weight": (RANK, 2 * RANK),
            "readout.weight": (guessed, RANK),
        }
        shapes |= {f"refiner_head.{part}": shape for part, shape in own.items()}
    return shapes


def target_ends() -> tuple[Tensor, Tensor]:
    """The target's embedding and output head, `[V, H]` each."""
    made = torch.Generator().manual_seed(5)
    return torch.randn(V, H, generator=made), torch.randn(V, H, generator=made) * 0.3


def features() -> Tensor:
    """`[3, n, H]`: what each tap gives for the tokens before the root."""
    made = torch.Generator().manual_seed(4)
    return torch.randn(3, len(CONTEXT) - 1, H, generator=made) * torch.tensor([1.0, 3.0, 9.0])[:, None, None]


def compute(name: str) -> Tensor:
    """`[2, D, V_short]`: for each path, the logits below its root and its first D - 1 tokens."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    case = CASES[name]
    with torch.no_grad():
        return by_dflash(name) if case.package == "dflash" else by_speculators(name)


def by_speculators(name: str) -> Tensor:
    """See `compute`."""
    import importlib

    from speculators import SpeculatorModel, SpeculatorsConfig, VerifierConfig
    from speculators.config import SpeculatorModelConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    case, embedding_and_head = CASES[name], target_ends()
    core = importlib.import_module(f"speculators.models.{case.method}.core")
    raw = config(name)
    layer_config = Qwen3Config(**{k: v for k, v in block(case).items() if k != "model_type"})
    layer_config._attn_implementation = "eager"
    made = SpeculatorsConfig(
        algorithm=case.method,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    kind = SpeculatorModelConfig.registry[case.method]
    theirs = kind(**{**raw, "transformer_layer_config": layer_config, "speculators_config": made})
    model = SpeculatorModel.registry[case.method](theirs).float().eval()
    state = dict(weights(name))
    state["embed_tokens.weight"] = embedding_and_head[0]
    if not case.short:
        state["lm_head.weight"] = embedding_and_head[1]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}, missing
    root, first = len(CONTEXT) - 1, 0 if case.from_anchor else 1
    found = []
    for path in PATHS:
        ids = torch.tensor([[*CONTEXT, *path, 0, 0]])
        read = torch.zeros(1, ids.shape[1], 3 * H)
        read[0, :root] = torch.cat([*features()], dim=-1)
        read[0, root:] = 7.0  # must not matter
        where = torch.zeros(ids.shape)
        where[0, root] = 1
        given = read, ids, where, torch.zeros(1, ids.shape[1], H), torch.zeros_like(ids)
        found.append(_corrected(core, model, case, given)[first:])
    return torch.stack(found)


def _corrected(core: Any, model: Any, case: Case, given: tuple[Tensor, ...]) -> Tensor:
    """`[B, V_short]` logits of the one block, as `forward` of the package computes them."""
    if case.method == "dflash2":
        hidden, unary, _, _, indices = model._backbone_forward(*given, max_anchors=1)
        before = model._predecessor_ids(given[1], indices).reshape(1, -1)
        candidates, scores = model.candidate_selector.select(unary, hidden, before)
        return torch.full_like(unary, -torch.inf).scatter(-1, candidates, scores)[0]
    seen: list[Tensor] = []

    def watch(logits: Tensor, *others: Any, **more: Any) -> tuple[Tensor, dict[str, Any]]:
        seen.append(logits)
        return torch.zeros(()), {}

    was, core.compute_metrics = core.compute_metrics, watch
    try:
        model(*given, max_anchors=1)
    finally:
        core.compute_metrics = was
    return seen[0][0]


def by_dflash(name: str) -> Tensor:
    """See `compute`."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel
    from transformers import Qwen3Config

    case, (embedding, head) = CASES[name], target_ends()
    raw = {k: v for k, v in config(name).items() if k != "model_type"}
    model = (DFlash2DraftModel if case.method == "dflash2" else DFlashDraftModel)(Qwen3Config(**raw)).eval()
    tables = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
    state = {f"{k}.weight" if k in tables else k: v for k, v in weights(name).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing
    assert not unexpected
    root = len(CONTEXT) - 1
    tokens = torch.tensor([CONTEXT[-1], *[MASK] * (case.size - 1)])
    out = model(
        position_ids=torch.arange(root + case.size)[None],
        noise_embedding=embedding[tokens][None] * case.options.get("input_embedding_scale", 1.0),
        target_hidden=torch.cat([*features()], dim=-1)[None],
    )[0, 1:]
    logits = model.compute_logits(out, lambda hidden: hidden @ head.t())
    if case.method == "dflash":
        return torch.stack([logits, logits])
    selector, found = model.candidate_selector, []
    for path in PATHS:
        before = torch.tensor([CONTEXT[-1], *path])[: len(out)]
        values, candidates = logits.topk(selector.top_k)
        wanted = selector.predecessor_codebook(before) * selector.hidden_projection(out)
        values = values + torch.einsum("kr,kcr->kc", wanted, selector.successor_codebook(candidates))
        found.append(torch.full_like(logits, -torch.inf).scatter(1, candidates, values))
    return torch.stack(found)


if __name__ == "__main__":
    from safetensors.torch import save_file

    save_file({name: compute(name) for name in CASES}, KEPT)
