"""Trains a small draft model by distillation from a large target.

The data are the target's own answers (sequence-level distillation, Kim and Rush 2016, arXiv 1606.07947). The
draft model learns the target's distributions. A part of the answers can be written by the draft model itself
(DistillSpec, Zhou et al. 2023, arXiv 2310.08461).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soothsay.config import EngineConfig
from soothsay.core.params import SamplingParams
from soothsay.errors import TrainingError
from soothsay.llm import LLM
from soothsay.model.blocks import record
from soothsay.model.linear import Dense
from soothsay.model.load import best_kernels
from soothsay.model.transformer import Transformer
from soothsay.train.examples import Example
from soothsay.train.heads import Evaluate
from soothsay.train.losses import Divergence, distillation, log_probs
from soothsay.train.sequences import Sequences, weight_of

ON_POLICY_TOKENS = 48
"""Largest number of tokens that the draft model writes in an example. Drafts have few tokens, so
it never has to continue a longer text of its own."""


class DraftRecipe:
    """Distils `target` into `model`, which has the same vocabulary.

    Args:
        target: on `TrainingKernels`, frozen.
        model: on `TrainingKernels`, trainable.
        evaluate: measures what `save` has written.
        save: writes the model.
        divergence: is minimized.
        on_policy: share of each batch's examples in which the draft model writes the end of the answer.
    """

    name = "draft"

    def __init__(
        self,
        target: Transformer,
        model: Transformer,
        evaluate: Evaluate,
        save: Callable[[Transformer, Path], None],
        *,
        divergence: Divergence = "forward-kl",
        on_policy: float = 0.0,
    ):
        self.target = target.eval().requires_grad_(False)
        self.model = model
        self.trained: nn.Module = model
        self.divergence, self.on_policy = divergence, on_policy
        self.evaluate, self._save = evaluate, save

    def modules(self) -> Sequence[nn.Module]:
        """See `Recipe`."""
        return [self.target, self.model]

    def losses(self, examples: Sequence[Example], generator: torch.Generator) -> dict[str, Tensor]:
        """See `Recipe`."""
        own = round(self.on_policy * len(examples))
        continued = self._continued(examples[:own], generator) if own else []
        batch = Sequences.of([*continued, *examples[own:]], self.target.device)
        with torch.no_grad():
            teacher, _ = self.target(batch)
        hidden, _ = self.model(batch)
        learned = batch.answer[:, 1:]
        rows = [x.view(*batch.shape, -1)[:, :-1][learned] for x in (hidden, teacher)]
        said = log_probs(rows[1], weight_of(self.target.head))
        every = torch.arange(len(said), device=said.device)
        loss, agreement = distillation(rows[0], weight_of(self.model.head), said, every, self.divergence)
        return {"loss": loss, "agreement": agreement}

    def _continued(self, examples: Sequence[Example], generator: torch.Generator) -> list[Example]:
        """Cut each example at a random token of an answer, and let the draft model continue from there.

        Only the tokens that the draft model writes are learned.
        """
        cuts = []
        for example in examples:
            spoken = np.flatnonzero(example.answer[1:]) + 1
            drawn = torch.randint(len(spoken), (1,), generator=generator, device=generator.device)
            cuts.append(int(spoken[int(drawn)]))
        longest = max(cuts) + ON_POLICY_TOKENS
        config = EngineConfig(max_context=longest, kv_tokens=len(cuts) * (longest + 16), prefix_caching=False)
        llm = LLM(served(self.model), drafter="none", config=config)
        seeds = torch.randint(2**31, (len(cuts),), generator=generator, device=generator.device).tolist()
        params = [SamplingParams(seed=seed, max_tokens=ON_POLICY_TOKENS) for seed in seeds]
        prompts = [example.tokens[:cut].tolist() for example, cut in zip(examples, cuts, strict=True)]
        continued = []
        for cut, example, result in zip(cuts, examples, llm.generate(prompts, params), strict=True):
            tokens = np.concatenate([example.tokens[:cut], np.array(result.token_ids, dtype=np.int64)])
            answer = np.arange(len(tokens)) >= cut
            continued.append(replace(example, tokens=tokens, answer=answer))
        return continued

    def save(self, directory: Path) -> None:
        """See `Recipe`."""
        self._save(self.model, directory)

    def identity(self) -> Mapping[str, Any]:
        """See `Recipe`."""
        c = self.model.config
        return {
            "recipe": self.name,
            "layers": c.num_layers,
            "hidden_size": c.hidden_size,
            "vocabulary": c.vocab_size,
            "divergence": self.divergence,
            "on_policy": self.on_policy,
        }


def draft_config(
    target: dict[str, Any], layers: int, hidden: int, heads: int, intermediate: int
) -> dict[str, Any]:
    """The `config.json` of a smaller model of the target's family. It has one key head for two query heads.

    Raises `TrainingError` if `hidden` is no multiple of `heads`.
    """
    if hidden % heads:
        raise TrainingError(f"a hidden size of {hidden} does not divide into {heads} heads")
    return {
        **target,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": hidden // heads,
    }


def served(model: Transformer) -> Transformer:
    """Copy a model in training to fast kernels, in float32 on the same device, to generate with it."""
    made = Transformer(model.config, best_kernels(model.config, model.device)).to(model.device)
    made.load_state_dict(model.state_dict())
    for name, module in list(made.named_modules()):
        if isinstance(module, Dense):
            bias = None if module.bias is None else module.bias.detach()
            made.set_submodule(name, made.kernels.linear(module.weight.detach(), bias, torch.float32))
    record(made)
    return made.eval().requires_grad_(False)
