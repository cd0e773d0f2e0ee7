"""longrope's two lists of factors, against `transformers`. Ours are chosen by the longest context served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import random_oracle, random_tokens
from torch import Tensor

from soothsay import LLM, SamplingParams

ORIGINAL = 32  # tokens of the context before scaling


def longrope(pairs: int) -> dict[str, Any]:
    """Scaling of heads in which `pairs` pairs of dimensions rotate. The lists differ much."""
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.7 * i for i in range(pairs)],
    }


WINDOWED = {"rope_type": "default", "rope_theta": 1e3}
CASES = [
    ("phi4_mini", longrope(12)),
    ("minicpm3", longrope(16)),  # latent attention
    ("falcon_h1", longrope(16)),  # attention beside states
    ("smollm3", longrope(8)),  # some layers do not rotate
    ("gemma3", {"full_attention": longrope(12), "sliding_attention": WINDOWED}),
]


@pytest.mark.parametrize(("name", "scaling"), CASES, ids=[name for name, _ in CASES])
def test_the_longest_context_served_chooses_the_factors(
    tmp_path: Path, name: str, scaling: dict[str, Any]
) -> None:
    """A request's length does not: its first keys would depend on later tokens."""
    oracle = random_oracle(name, rope_parameters=scaling)
    oracle.save_pretrained(tmp_path)
    (tokens,) = random_tokens(np.random.default_rng(5), ORIGINAL + 1)
    prompt, after = tokens[: ORIGINAL - 1], torch.tensor(tokens[1 : ORIGINAL - 1])

    def expected(length: int) -> Tensor:
        """transformers chooses by the length of what it reads."""
        with torch.no_grad():
            logits = oracle(torch.tensor([tokens[:length]])).logits[0, : len(after)]
        return logits.log_softmax(-1).gather(1, after[:, None])[:, 0]

    short, long = expected(ORIGINAL), expected(ORIGINAL + 1)
    assert (short - long).abs().max() > 0.1
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for context, wanted in ((ORIGINAL, short), (ORIGINAL + 1, long), (None, long)):
        llm = LLM(tmp_path, dtype="float32", drafter="none", max_context=context)
        scores = llm.generate([prompt], params)[0].prompt_logprobs
        assert scores is not None
        assert (torch.tensor([one.logprob for one in scores]) - wanted).abs().max() < 1e-4
