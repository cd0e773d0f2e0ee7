"""Trains whole models: a language model, with MTP modules beside it (DeepSeek-V3, 2024, arXiv 2412.19437),
and a small draft model by distillation from a large target.

The data of a draft model are the target's own answers (sequence-level distillation, Kim and Rush 2016, arXiv
1606.07947). It learns the target's distributions. A part of the answers can be written by the draft model
itself (DistillSpec, Zhou et al. 2023, arXiv 2310.08461).
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
from soothsay.drafters.heads.checkpoints.head_directory import write_head
from soothsay.drafters.heads.feature_drafter import serve
from soothsay.drafters.heads.mtp import MTPConfig, MTPHead
from soothsay.drafters.heads.trained_head import TargetEnds
from soothsay.errors import TrainingError
from soothsay.llm import LLM
from soothsay.model.families.classic import KEYS
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.formats.declared import DECLARED
from soothsay.model.kernel_sets import best_kernels, usable_device
from soothsay.model.specs.attention_spec import AttentionSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import Checkpoint
from soothsay.model.weights.load import load_model
from soothsay.model.weights.tensor_names import TensorNames
from soothsay.model.weights.writing import writing
from soothsay.train.examples import Example
from soothsay.train.heads import Evaluate
from soothsay.train.losses import Divergence, cross_entropy, distillation, likely
from soothsay.train.sequences import Sequences, TrainingKernels, head_weight

MTP_WEIGHT = 0.3
"""Weight of the MTP modules' loss; that of the model is 1. DeepSeek-V3 has it for most of its training."""


class LanguageModel:
    """Trains the model of `checkpoint` on all tokens of the examples.

    Args:
        checkpoint: the model, its tokenizer and its configuration.
        held_out: examples to evaluate on.
        fresh: whether to begin with random weights, not with the checkpoint's.
        mtp_modules: number of MTP modules that are trained beside the model.
        seed: of new weights.
        device: where training runs.
    """

    name = "lm"

    def __init__(
        self,
        checkpoint: Checkpoint,
        held_out: Sequence[Example],
        *,
        fresh: bool = False,
        mtp_modules: int = 1,
        seed: int = 0,
        device: str = "cpu",
    ):
        torch.manual_seed(seed)
        self.checkpoint, self.held_out, self.device = checkpoint, held_out, usable_device(device)
        kernels = TrainingKernels()
        self.model = (
            Transformer(parse_model_config(checkpoint.config), kernels)
            if fresh
            else trainable(load_model(checkpoint, "float32", self.device, kernels))
        ).to(self.device)
        c = self.model.spec
        self.mtp = None
        if mtp_modules:
            layer = replace(c.layers[0], mixer=replace(c.first(AttentionSpec), window=None))
            block = replace(c, layers=(layer,) * mtp_modules)
            self.mtp = MTPHead(MTPConfig(block, c.num_layers), kernels).to(self.device)
        parts: dict[str, nn.Module] = {"model": self.model}
        self.trained: nn.Module = nn.ModuleDict(parts if self.mtp is None else {**parts, "mtp": self.mtp})

    def modules(self) -> Sequence[nn.Module]:
        """See `Recipe`."""
        return [self.trained]

    def losses(self, examples: Sequence[Example], generator: torch.Generator) -> dict[str, Tensor]:
        """See `Recipe`."""
        batch = Sequences.of(examples, self.device)
        hidden, _ = self.model(batch)
        losses = {"lm": self._next_token(hidden, batch)}
        losses["loss"] = losses["lm"]
        if self.mtp is not None:
            shared = TargetEnds.of(self.model)
            rows, feature = batch, hidden
            for step in range(len(self.mtp.steps)):
                feature = feature.view(*rows.shape, -1)[:, :-1]
                rows = rows.rows(slice(1, None))
                embedded = shared.embed(rows.tokens)
                feature = self.mtp(embedded, feature.reshape(len(rows.tokens), -1), rows, None, step)
                losses[f"mtp_{step + 1}"] = self._next_token(feature, rows)
                losses["loss"] = losses["loss"] + MTP_WEIGHT / len(self.mtp.steps) * losses[f"mtp_{step + 1}"]
        return losses

    def _next_token(self, hidden: Tensor, batch: Sequences) -> Tensor:
        """Cross entropy of the token after each row."""
        real = batch.real[:, 1:]
        labels = batch.tokens.view(batch.shape)[:, 1:][real]
        return cross_entropy(hidden.view(*batch.shape, -1)[:, :-1][real], head_weight(self.model), labels)

    def evaluate(self, directory: Path) -> dict[str, float]:
        """Return the losses on held-out examples, in nats a token. The score is minus the model's loss."""
        sums: dict[str, float] = {}
        count = 0
        for first in range(0, len(self.held_out), 16):
            examples = self.held_out[first : first + 16]
            tokens = sum(len(example.tokens) - 1 for example in examples)
            with torch.autocast(self.device.type, torch.bfloat16), torch.no_grad():
                losses = self.losses(examples, torch.Generator())
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + float(value) * tokens
            count += tokens
        means = {f"held_out_{name}": value / count for name, value in sums.items()}
        return {**means, "score": -means["held_out_lm"]}

    def save(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory, and its MTP modules to `drafters/mtp` in it."""
        write_model(self.model, self.checkpoint, self.checkpoint.config, directory)
        if self.mtp is not None:
            write_head(self.mtp, directory / "drafters" / "mtp", self.checkpoint.path.name)

    def identity(self) -> Mapping[str, Any]:
        """See `Recipe`."""
        return _identity(self) | {"mtp_modules": 0 if self.mtp is None else len(self.mtp.steps)}


def trainable(model: Transformer) -> Transformer:
    """Make the weights of a loaded model trainable, in float32. A tied head shares the embedding's table."""
    model.embedding.weight = nn.Parameter(model.embedding.weight.detach().float().clone())
    if model.spec.head.tied:
        model.head.weight = model.embedding.weight
    return model.requires_grad_(True)


def write_model(model: Transformer, like: Checkpoint, config: Mapping[str, Any], directory: Path) -> None:
    """Write a model in bfloat16 as a Hugging Face directory, with the tokenizer of `like`."""
    with writing(directory) as writer:
        tensors = named_tensors(model, like)
        writer.add({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
        plain = {key: value for key, value in config.items() if key not in DECLARED}
        writer.finish(like, {**plain, "dtype": "bfloat16"})


def named_tensors(model: Transformer, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights of `model` under their names in `checkpoint`, from which the model was loaded."""
    names = TensorNames(model.spec, checkpoint)
    out: dict[str, Tensor] = {}
    for full, tensor in model.state_dict().items():
        module, _, suffix = full.rpartition(".")
        if module == "head" and model.spec.head.tied:
            continue
        if (order := names.row_order(module)) is not None:
            tensor = tensor[order.argsort()]
        values = tensor - 1 if model.spec.zero_centred_norms and full.endswith("norm.weight") else tensor
        parts = values.split(names.rows(module, len(tensor)))
        for part, value in zip(names.of(module), parts, strict=True):
            out[f"{part}.{suffix}"] = value.detach().clone()
    return out


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
        said = likely(rows[1], head_weight(self.target))
        every = torch.arange(len(rows[1]), device=batch.tokens.device)
        loss, agreement = distillation(rows[0], head_weight(self.model), said, every, self.divergence)
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
        streams = [
            llm.stream(example.tokens[:cut].tolist(), SamplingParams(seed=seed, max_tokens=ON_POLICY_TOKENS))
            for example, cut, seed in zip(examples, cuts, seeds, strict=True)
        ]
        continued = []
        for cut, example, stream in zip(cuts, examples, streams, strict=True):
            written = np.array(stream.choice.token_ids, dtype=np.int64)
            tokens = np.concatenate([example.tokens[:cut], written])
            answer = np.arange(len(tokens)) >= cut
            continued.append(replace(example, tokens=tokens, answer=answer))
        return continued

    def save(self, directory: Path) -> None:
        """See `Recipe`."""
        self._save(self.model, directory)

    def identity(self) -> Mapping[str, Any]:
        """See `Recipe`."""
        return _identity(self) | {"divergence": self.divergence, "on_policy": self.on_policy}


def draft_config(
    target: dict[str, Any], layers: int, hidden: int, heads: int, intermediate: int
) -> dict[str, Any]:
    """The `config.json` of a smaller model of the target's family. It has one key head for two query heads.

    Its layers have the kinds of the target's last ones. It reads texts alone.

    Raises `TrainingError` if `hidden` is no multiple of `heads`, or if the family's sizes are elsewhere.
    """
    if hidden % heads:
        raise TrainingError(f"a hidden size of {hidden} does not divide into {heads} heads")
    if isinstance(text := target.get("text_config"), Mapping):
        target = {**text, "tie_word_embeddings": parse_model_config(target).head.tied}
    count = parse_model_config(target).num_layers
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": hidden // heads,
    }
    own = {key: sizes[KEYS[key]] for key in target if KEYS.get(key) in sizes}
    kinds = {
        key: value[-layers:]
        for key, value in target.items()
        if isinstance(value, list) and len(value) == count
    }
    made = {**target, **kinds, **sizes, **own}
    spec = parse_model_config(made)
    if (spec.num_layers, spec.hidden_size) != (layers, hidden):
        raise TrainingError(f"draft models of family {spec.family} cannot be made in other sizes")
    return made


def served(model: Transformer) -> Transformer:
    """Copy a model in training to fast kernels, in float32 on the same device, to generate with it."""
    made = Transformer(model.spec, best_kernels(model.spec, model.device)).to(model.device)
    made.load_state_dict(model.state_dict())
    return serve(made, made.kernels, torch.float32)


def _identity(recipe: LanguageModel | DraftRecipe) -> dict[str, Any]:
    """What must be equal in a saved state, whatever the recipe."""
    c = recipe.model.spec
    sizes = {"layers": c.num_layers, "hidden_size": c.hidden_size, "vocabulary": c.vocab_size}
    return {"recipe": recipe.name, **sizes}
