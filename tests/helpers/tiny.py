"""The configuration of a model so small that every test can run it."""

from __future__ import annotations

from soothsay.config import ModelConfig, RopeConfig

TINY = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
    rope=RopeConfig(),
    windows=(None, None),
    attention_scale=16**-0.5,
)
