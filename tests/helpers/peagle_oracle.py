"""What the package `speculators` (0.9.0) computes with small random P-EAGLE heads, and where it is kept.

`python tests/helpers/peagle_oracle.py` writes the file anew, and needs `speculators`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from speculators_oracle import BLOCK, CONTEXT, DRAFT, HEADS, INNER, KV, TAPS, D, H, V
from torch import Tensor

KEPT = Path(__file__).with_name("peagle_heads.safetensors")
DEPTH, MASK = 4, 96
KINDS: dict[str, dict[str, Any]] = {
    "one layer": {"layers": 1},
    "three layers": {"layers": 3, "norm_before_residual": True},
    "norms of taps": {"layers": 2, "fc_norm": True},
    "one norm of taps, all tokens": {"layers": 2, "norm_before_fc": True, "draft": V},
    "norms of queries and keys": {"layers": 2, "qk_norm": True},
}
"""Kinds of heads: layers, draft vocabulary, and flags of their configurations."""
OURS = ("layers", "draft", "qk_norm")


def flags(kind: str) -> dict[str, bool]:
    return {key: value for key, value in KINDS[kind].items() if key not in OURS}


def block(kind: str) -> dict[str, Any]:
    """Options of the decoder blocks."""
    family = "qwen3" if KINDS[kind].get("qk_norm") else "llama"
    return {**BLOCK, "model_type": family, "num_hidden_layers": KINDS[kind]["layers"]}


def config(kind: str) -> dict[str, Any]:
    """The config.json of a head."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": DEPTH}
    return {
        "speculators_model_type": "peagle",
        "speculators_config": {"algorithm": "peagle", "proposal_methods": [proposal]},
        "transformer_layer_config": block(kind),
        "draft_vocab_size": KINDS[kind].get("draft", DRAFT),
        "eagle_aux_hidden_state_layer_ids": TAPS,
        "mask_token_id": MASK,
        **flags(kind),
    }


def weights(kind: str) -> dict[str, Tensor]:
    """The tensors of a head, from a fixed seed."""
    draft, shapes = KINDS[kind].get("draft", DRAFT), dict[str, tuple[int, ...]]()
    for layer in range(KINDS[kind]["layers"]):
        inputs = H if layer else 2 * H
        parts = {
            "self_attn.q_proj.weight": (HEADS * D, inputs),
            "self_attn.k_proj.weight": (KV * D, inputs),
            "self_attn.v_proj.weight": (KV * D, inputs),
            "self_attn.o_proj.weight": (H, HEADS * D),
            "mlp.gate_proj.weight": (INNER, H),
            "mlp.up_proj.weight": (INNER, H),
            "mlp.down_proj.weight": (H, INNER),
            "input_layernorm.weight": (H,),
            "post_attention_layernorm.weight": (H,),
            **({} if layer else {"hidden_norm.weight": (H,)}),
        }
        if KINDS[kind].get("qk_norm"):
            parts |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in parts.items()}
    shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (draft, H), "fc.weight": (H, 3 * H)}
    shapes |= {"norm.weight": (H,), "mask_hidden": (1, 1, 3 * H)}
    if KINDS[kind].get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(3)}
    if KINDS[kind].get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * H,)
    made = torch.Generator().manual_seed(3)
    raw = {name: torch.randn(shape, generator=made) * 0.15 for name, shape in shapes.items()}
    raw = {name: tensor + 1 if tensor.dim() == 1 else tensor for name, tensor in raw.items()}
    if draft < V:
        ids = torch.randperm(V, generator=made)[:draft].sort().values
        raw["d2t"] = ids - torch.arange(draft)
        raw["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return raw


def features() -> Tensor:
    """`[3, T, H]`: what each tap gives for the rows of the context."""
    made = torch.Generator().manual_seed(4)
    return torch.randn(3, len(CONTEXT), H, generator=made) * torch.tensor([1.0, 3.0, 9.0])[:, None, None]


def compute(kind: str) -> Tensor:
    """`[DEPTH, V_draft]`: logits of the root's row and of the mask rows after it."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.peagle import PEagleSpeculatorConfig, core
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    family = Qwen3Config if KINDS[kind].get("qk_norm") else LlamaConfig
    layers = family(**{key: value for key, value in block(kind).items() if key != "model_type"})
    layers._attn_implementation = "eager"
    made = SpeculatorsConfig(
        algorithm="peagle",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    theirs = {**config(kind), "transformer_layer_config": layers, "speculators_config": made}
    model = core.PEagleDraftModel(PEagleSpeculatorConfig(**theirs)).float().eval()
    missing, unexpected = model.load_state_dict(weights(kind), strict=False)
    assert not unexpected
    assert set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}, missing
    root, seen = len(CONTEXT) - 1, list[Tensor]()
    length = len(CONTEXT) + DEPTH  # the tokens after the root must not matter
    rows = [(row, 0) for row in range(length)] + [(root, depth) for depth in range(1, DEPTH)]
    was = core.generate_cod_sample_indices, core.compute_metrics

    def watch(logits: Tensor, **more: Any) -> tuple[Tensor, dict[str, Any]]:
        seen.append(logits[0])
        return torch.zeros(()), {}

    core.generate_cod_sample_indices = lambda **given: tuple(torch.tensor(rows).unbind(1))
    core.compute_metrics = watch
    try:
        ids = torch.tensor([[*CONTEXT, *[7] * DEPTH]])
        read = torch.ones(1, length, 3 * H)
        read[0, : root + 1] = torch.cat([*features()], dim=-1)
        with torch.no_grad():
            model(read, ids, torch.zeros_like(ids), verifier_last_hidden_states=torch.zeros(1, length, H))
    finally:
        core.generate_cod_sample_indices, core.compute_metrics = was
    return torch.cat([seen[0][root : root + 1], seen[0][length:]])


if __name__ == "__main__":
    from safetensors.torch import save_file

    save_file({kind: compute(kind).contiguous() for kind in KINDS}, KEPT)
