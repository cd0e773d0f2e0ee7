"""A small model that drafts for a large one, distilled from it.

Trained on the target's own answers (sequence-level distillation, Kim and Rush 2016, arXiv 1606.07947) towards
its distributions, partly behind what the draft model itself says (DistillSpec, Zhou et al. 2023, arXiv
2310.08461).
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
from soothsay.engine.params import SamplingParams
from soothsay.llm import LLM
from soothsay.model.linear import Dense
from soothsay.model.load import best_kernels
from soothsay.model.transformer import Transformer, fuse
from soothsay.train.data import Example
from soothsay.train.heads import Evaluate
from soothsay.train.losses import Divergence, distillation, log_probs
from soothsay.train.sequences import Sequences, weight_of

ON_POLICY_TOKENS = 48
"""What the draft model says in an example, at most: a draft is a few tokens, so that more would teach it to
recover where it never will be asked to."""


class DraftRecipe:
    """Distils `target` into `model`, which has the same vocabulary.

    Args:
        target: on `TrainingKernels`, frozen.
        model: on `TrainingKernels`, trainable.
        evaluate: measures what `save` has written.
        save: writes the model.
        divergence: what is descended.
        on_policy: share of the examples whose answers the draft model goes on with by itself.
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
        self._evaluate, self._save = evaluate, save

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
        asked = batch.answer[:, 1:]
        rows = [x.view(*batch.shape, -1)[:, :-1][asked] for x in (hidden, teacher)]
        said = log_probs(rows[1], weight_of(self.target.head))
        every = torch.arange(len(said), device=said.device)
        loss, agreement = distillation(rows[0], weight_of(self.model.head), said, every, self.divergence)
        return {"loss": loss, "agreement": agreement}

    def _continued(self, examples: Sequence[Example], generator: torch.Generator) -> list[Example]:
        """The examples up to a place in an answer, and from there on what the draft model says."""
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

    def evaluate(self, directory: Path) -> dict[str, float]:
        """See `Recipe`."""
        return self._evaluate(directory)

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


def served(model: Transformer) -> Transformer:
    """A copy of a model in training that answers fast, in float32 on the device it is on."""
    made = Transformer(model.config, best_kernels(model.config, model.device)).to(model.device)
    made.load_state_dict(model.state_dict())
    for name, module in list(made.named_modules()):
        if isinstance(module, Dense):
            bias = None if module.bias is None else module.bias.detach()
            made.set_submodule(name, made.kernels.linear(module.weight.detach(), bias, torch.float32))
    fuse(made)
    return made.eval().requires_grad_(False)
