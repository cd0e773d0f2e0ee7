"""One random model of each kind of architecture, with every drafter of the registry for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from encoder_decoders import random_sequence_oracle
from families import VOCAB, load, random_oracle
from heads import makers, random_dflash, random_peagle, write_assistant
from mxfp4_models import quantized_oracle

from soothsay import REGISTRY
from soothsay.drafters.heads.checkpoints.head_directory import write_head
from soothsay.drafters.lookup.text_store import write_datastore
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.train.sequences import TrainingKernels

POSITIONS = 256
KINDS = {  # kind -> a case of `families`, and the dtype of the quick tests
    "hybrid": ("qwen3_5", "bfloat16"),
    "convolutions": ("lfm2", "int8"),
    "state spaces": ("granite4_hybrid", "bfloat16"),
    "states beside attention": ("falcon_h1", "int8"),
    "single parts": ("nemotron_h_experts", "bfloat16"),
    "decays by dimension": ("kimi_linear", "int8"),
    "selective scans": ("jamba", "int8"),
    "no attention": ("mamba2", "bfloat16"),
    "several streams": ("gemma3n", "bfloat16"),
    "shared KV": ("gemma4", "int8"),
    "sinks": ("gpt_oss", "auto"),
    "latent": ("deepseek_v3", "bfloat16"),
    "experts": ("qwen3_moe", "int8"),
    "learned positions": ("gpt2", "int8"),
    "encoder and decoder": ("t5", "int8"),
    "normed sums": ("bart", "int4"),
}

WITH_SOURCE = ("encoder and decoder", "normed sums")
"""Those that read their prompts as sources."""

SIZES = {
    "hybrid": {"num_hidden_layers": 8},  # two of them have attention
    "state spaces": {
        "num_hidden_layers": 8,
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"] * 3,
    },
    "states beside attention": {"num_hidden_layers": 8, "mamba_d_ssm": 128, "mamba_d_head": 32},
    "single parts": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
        "mamba_head_dim": 32,
    },
    "convolutions": {"num_hidden_layers": 6, "layer_types": ["conv", "full_attention", "conv"] * 2},
    "experts": {"moe_intermediate_size": 64},  # which native kernels multiply
}


def make_kind(kind: str, directory: Path) -> dict[str, str]:
    """Save a random model to `directory`, and heads, a draft model and a datastore below it.

    Returns:
        The specification of each drafter of the registry.
    """
    case, _ = KINDS[kind]
    if kind == "sinks":
        quantized_oracle(directory, intermediate_size=96, max_position_embeddings=POSITIONS)
    elif kind in WITH_SOURCE:
        random_sequence_oracle(case).save_pretrained(directory)
    else:
        random_oracle(case, max_position_embeddings=POSITIONS, **SIZES.get(kind, {})).save_pretrained(
            directory
        )
    config, own = load(directory).spec, directory / "drafters"
    plain = directory / "plain"  # a Llama of the same sizes, which heads are made from
    layers = {"num_hidden_layers": config.num_layers}
    random_oracle("llama1", max_position_embeddings=POSITIONS, **layers).save_pretrained(plain)
    torch.manual_seed(0)
    twin = load_model(open_checkpoint(plain), "float32", kernels=TrainingKernels())
    for name, make_head in makers(range(0, VOCAB, 3)).items():
        write_head(make_head(twin), own / name, str(directory))
    if config.parts(AttentionSpec):  # an assistant reads keys and values, and no latent ones
        write_assistant(config, own / "assistant")
    texts = [np.array([*range(first, first + 20)] * 2) for first in (0, 20, 40)]
    tokenizer = open_checkpoint("sibyl").tokenizer()
    assert tokenizer is not None
    write_datastore(own / "rest.store", texts, tokenizer)
    models = {name: own / name for name in (*makers(range(1)), "assistant")}
    models |= {"dflash": random_dflash(target=str(plain)), "peagle": random_peagle(target=str(plain))}
    models["draft-model"] = plain if config.states else directory  # a model with states cannot draft
    options = {name: f"model={path}" for name, path in models.items()} | {
        "rest": f"store={own / 'rest.store'}"
    }
    return {name: f"{name}({options[name]})" if name in options else name for name in REGISTRY}
