"""What the package `speculators` (0.9.0) computes with small random EAGLE-3 heads, and where it is kept.

`python tests/helpers/speculators_oracle.py` writes the file anew, and needs `speculators`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KEPT = Path(__file__).with_name("speculators_eagle3.safetensors")
H, V, DRAFT, HEADS, KV, D, INNER = 48, 97, 31, 4, 2, 16, 96
TAPS = [1, 3, 6]
CONTEXT = [5, 90, 13, 44, 2]  # committed tokens; the last is the root
PATHS = [[60, 8], [61, 9]]  # tokens of the tree's two paths
BLOCK = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "num_hidden_layers": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": V,
}
FLAGS: dict[str, dict[str, bool]] = {
    "EAGLE-3": {"norm_before_residual": True},
    "EAGLE-3.1": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "EAGLE-3.1, other residual": {"norm_before_residual": False, "fc_norm": True, "norm_output": True},
    "one norm before fc": {"norm_before_residual": False, "norm_before_fc": True},
}
"""Kinds of heads, by the flags of their configurations."""


def config(kind: str) -> dict[str, Any]:
    """The config.json of a head."""
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": BLOCK,
        "draft_vocab_size": DRAFT,
        "eagle_aux_hidden_state_layer_ids": TAPS,
        **FLAGS[kind],
    }


def weights(kind: str) -> dict[str, Tensor]:
    """The tensors of a head, from a fixed seed."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (V, H),
        "lm_head.weight": (DRAFT, H),
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "layers.0.self_attn.q_proj.weight": (HEADS * D, 2 * H),
        "layers.0.self_attn.k_proj.weight": (KV * D, 2 * H),
        "layers.0.self_attn.v_proj.weight": (KV * D, 2 * H),
        "layers.0.self_attn.o_proj.weight": (H, HEADS * D),
        "layers.0.mlp.gate_proj.weight": (INNER, H),
        "layers.0.mlp.up_proj.weight": (INNER, H),
        "layers.0.mlp.down_proj.weight": (H, INNER),
        "layers.0.input_layernorm.weight": (H,),
        "layers.0.post_attention_layernorm.weight": (H,),
        "layers.0.hidden_norm.weight": (H,),
    }
    if FLAGS[kind].get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(3)}
    if FLAGS[kind].get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * H,)
    made = torch.Generator().manual_seed(3)
    raw = {name: torch.randn(shape, generator=made) * 0.15 for name, shape in shapes.items()}
    raw = {name: tensor + 1 if tensor.dim() == 1 else tensor for name, tensor in raw.items()}
    ids = torch.randperm(V, generator=made)[:DRAFT].sort().values
    says = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return {**raw, "d2t": ids - torch.arange(DRAFT), "t2d": says}


def features() -> Tensor:
    """`[3, T, H]`: what each tap gives for the rows of the context and of a path."""
    made = torch.Generator().manual_seed(4)
    return torch.randn(3, len(CONTEXT) + 2, H, generator=made) * torch.tensor([1.0, 3.0, 9.0])[:, None, None]


def compute(kind: str) -> Tensor:
    """`[9, V_draft]`: logits of the 5 rows of the context, and of the nodes of both paths in turn."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    block = LlamaConfig(**{key: value for key, value in BLOCK.items() if key != "model_type"})
    block._attn_implementation = "eager"
    made = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    theirs = Eagle3SpeculatorConfig(
        transformer_layer_config=block,
        draft_vocab_size=DRAFT,
        eagle_aux_hidden_state_layer_ids=TAPS,
        speculators_config=made,
        **FLAGS[kind],
    )
    model = Eagle3DraftModel(theirs).float().eval()
    missing, unexpected = model.load_state_dict(weights(kind), strict=False)
    assert not unexpected
    assert set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}, missing
    steps: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, given, out: steps.append(out.detach()[0]))
    root, found = len(CONTEXT) - 1, []
    read = torch.cat([*features()], dim=-1)[None]
    for path in PATHS:
        ids = torch.tensor([CONTEXT + path])
        steps.clear()
        with torch.no_grad():
            model(read, ids, torch.zeros_like(ids), ttt_steps=3)
        context = steps[0][: root + 1]
        found += [steps[1][root], steps[2][root]]
    return torch.cat([context, torch.stack(found)])


if __name__ == "__main__":
    from safetensors.torch import save_file

    save_file({kind: compute(kind) for kind in FLAGS}, KEPT)
