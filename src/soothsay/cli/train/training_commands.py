"""`soothsay train lm`, `mtp`, `medusa`, `hydra`, `eagle`, `eagle3`, `block`, `redrafter` and `draft`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from soothsay.cli.terminal import load_bar
from soothsay.cli.train.training_run import TrainingRun
from soothsay.options import flag, option

if TYPE_CHECKING:
    from soothsay.drafters.heads.trained_head import Head
    from soothsay.model.transformer import Transformer
    from soothsay.train.examples import Example

GUESSES, LAYERS = "Draft tokens in a row.", "Layers."
SHORTLISTS = {"shortlist", "vocabulary"}
"""Options that are numbers of tokens, where a head wants the tokens."""

FEW = 16
"""Examples in which the target is measured for a head whose weights are replaced."""

SHORTLIST = "Number of tokens that can be drafted: the most frequent. 0: all."
DEPTH = "Draft tokens in a row that training unrolls."


@dataclass(frozen=True, kw_only=True)
class LanguageModelTraining(TrainingRun):
    """Train a language model on all tokens of the data, further or from random weights.

    Modules for multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437) are trained beside it.
    """

    fresh: bool = flag()
    """Begin with random weights, not with the model's."""

    mtp_modules: int = option(1, "--mtp", min=0)
    """MTP modules that are trained beside the model."""

    def run(self) -> None:
        """Train the model."""
        from soothsay.train.whole_models import LanguageModel

        examples, held_out = self.examples()
        own = {name: getattr(self, name) for name in ("fresh", "mtp_modules", "device")}
        model = LanguageModel(self.checkpoint(), held_out, seed=self.config.seed, **own)
        self.train(model, examples)


@dataclass(frozen=True, kw_only=True)
class HeadTraining(TrainingRun):
    """Trains a head: a new one, or the one of --init.

    The options of a subclass are arguments of the function that makes the head, or else of its recipe.
    """

    divergence: Literal["forward-kl", "lk"] = option("forward-kl")
    """What is minimized: KL, or, after some training, lk: acceptance (arXiv 2602.23881)."""

    recipe: ClassVar[str]
    """The name of its recipe in `soothsay.train.heads`."""

    head: ClassVar[str]
    """The name of the function in `soothsay.train.new_heads` that makes a new one."""

    def run(self) -> None:
        """Train the head."""
        import torch

        from soothsay.drafters.heads.checkpoints.head_directory import write_head
        from soothsay.train import heads, new_heads
        from soothsay.train.trainer import resumes

        examples, held_out = self.examples()
        torch.manual_seed(self.config.seed)
        make = getattr(new_heads, self.head)
        taken = signature(make).parameters
        with load_bar("making a new head ..."):
            target = self.target()
            own = self.choices(target, examples)
            measured = examples[:FEW] if self.init is not None or resumes(self.out) else examples
            given = {"target": target, "examples": measured, **own}
            head = make(**{name: given[name] for name in taken})
        if self.init is not None:
            self._begin_with(self.init, head, target)
        judge, name = self.judge(head.method, held_out), Path(self.model).name
        recipe = getattr(heads, self.recipe)(
            *(target, head, judge, lambda made, directory: write_head(made, directory, name)),
            kept_bytes=int(self.keep_features * 2**30),
            **{name: value for name, value in own.items() if name not in taken},
        )
        self.train(recipe, examples)

    def choices(self, target: Transformer, examples: list[Example]) -> dict[str, Any]:
        """The options that only heads have, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)[len(fields(TrainingRun)) :]}

    def _begin_with(self, init: Path, head: Head, target: Transformer) -> None:
        """Load the weights of a drafter. Raises `TrainingError` if it has another shape."""
        from soothsay.config import EngineConfig
        from soothsay.drafters.base import Target
        from soothsay.drafters.heads.checkpoints.head_directory import read_head
        from soothsay.drafters.heads.trained_head import TargetEnds
        from soothsay.errors import TrainingError

        there = read_head(init, Target(target, None, EngineConfig(), 0, self.checkpoint().path))
        there.borrow(TargetEnds.of(target))
        try:
            head.load_state_dict(there.state_dict())
        except RuntimeError as error:
            raise TrainingError(
                f"{init} has a drafter of another shape than these options: {error}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class ListedTraining(HeadTraining):
    """Trains a head that can draft the most frequent tokens only."""

    count: list[Path] | None = option(None, exists=True)
    """More answers whose tokens are counted to find these. They are not trained on."""

    def choices(self, target: Transformer, examples: list[Example]) -> dict[str, Any]:
        """See `HeadTraining`. Numbers of tokens become the tokens."""
        own = super().choices(target, examples)
        counted = [*examples, *(self.read(self.count) if self.count else ())]
        del own["count"]
        return own | {name: _shortlist(target, counted, own[name]) for name in SHORTLISTS & own.keys()}


@dataclass(frozen=True, kw_only=True)
class MedusaTraining(HeadTraining):
    """Train Medusa's heads (arXiv 2401.10774)."""

    recipe, head = "MedusaRecipe", "medusa"
    heads: int = option(4, help=GUESSES, min=1)
    layers: int = option(1, help=LAYERS, min=1)
    own_heads: bool = flag()
    """Give each head an output matrix of its own. Default: all use the target's."""


@dataclass(frozen=True, kw_only=True)
class HydraTraining(HeadTraining):
    """Train Hydra's heads (arXiv 2402.05109), which read the draft tokens before their own."""

    recipe, head = "HydraRecipe", "hydra"
    heads: int = option(4, help=GUESSES, min=1)
    layers: int = option(1, help=LAYERS, min=1)


@dataclass(frozen=True, kw_only=True)
class EagleTraining(HeadTraining):
    """Train EAGLE-1's block (arXiv 2401.15077), which EAGLE-2 uses too."""

    recipe, head = "RecurrentRecipe", "eagle"
    depth: int = option(4, help=DEPTH, min=1)
    regression: float = option(0.5, min=0)
    """Weight of the loss on the target's next feature."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Training(ListedTraining):
    """Train EAGLE-3's block (arXiv 2503.01840), which reads three layers of the target."""

    recipe, head = "RecurrentRecipe", "eagle3"
    depth: int = option(5, help=DEPTH, min=1)
    vocabulary: int = option(4096, min=1)
    """Number of tokens that can be drafted: the most frequent."""

    units: int = option(0, min=0)
    """Units of the feed-forward part: the target's largest. 0: all."""

    join: bool = flag()
    """Let the block add to a projection of embedding and state. It begins with more right guesses, and
    other engines do not read it."""

    anchors: float = option(0.5, min=0.01, max=1)
    """Share of the tokens after which longer drafts are learned."""


@dataclass(frozen=True, kw_only=True)
class MTPTraining(HeadTraining):
    """Train MTP modules (arXiv 2412.19437) for a target that does not change.

    Modules that were trained with the target can be improved: give them with --init. Here they learn the
    target's distributions, and to read their own draft tokens.
    """

    recipe, head = "RecurrentRecipe", "mtp"
    modules: int = option(1, min=1)
    """Modules."""

    depth: int = option(4, help=DEPTH, min=1)


@dataclass(frozen=True, kw_only=True)
class BlockTraining(ListedTraining):
    """Train a drafter that drafts all tokens in one pass, like P-EAGLE and DFlash (2026).

    With a shortlist, drafting reads a few rows of the output head. A small model with a large vocabulary
    spends a quarter of its time on that head.
    """

    recipe, head = "BlockRecipe", "block"
    size: int = option(6, help=GUESSES, min=1)
    layers: int = option(1, help=LAYERS, min=1)
    cell: int = option(256, min=0)
    """Units of the cell that corrects guesses by their path; 0: none."""

    shortlist: int = option(0, help=SHORTLIST, min=0)


@dataclass(frozen=True, kw_only=True)
class RedrafterTraining(ListedTraining):
    """Train a drafter of one look and a recurrent cell (ReDrafter, arXiv 2403.09919).

    It has no attention, so a draft is cheap, and only the answers are computed in training.
    """

    recipe, head = "RedrafterRecipe", "redrafter"
    size: int = option(5, help=GUESSES, min=1)
    hidden: int = option(512, min=16)
    """Units between features and guesses."""

    cell: int = option(256, min=16)
    """Units of the recurrent cell."""

    shortlist: int = option(6144, help=SHORTLIST, min=0)


@dataclass(frozen=True, kw_only=True)
class DraftModelTraining(TrainingRun):
    """Distil a small model of the target's family (DistillSpec, arXiv 2310.08461)."""

    layers: int = option(2, help=LAYERS, min=1)
    hidden: int = option(128, min=1)
    """Hidden size."""

    heads: int = option(4, min=1)
    """Attention heads."""

    intermediate: int = option(384, min=1)
    """Units of the feed-forward part."""

    divergence: Literal["forward-kl", "reverse-kl", "total-variation"] = option("forward-kl")
    """Divergence between the target and the draft model that is minimized."""

    on_policy: float = option(0.0, min=0, max=1)
    """Share of the answers that the draft model continues itself."""

    def run(self) -> None:
        """Train the draft model."""
        import torch

        from soothsay.model.families.parsing import parse_model_config
        from soothsay.model.transformer import Transformer
        from soothsay.train.sequences import TrainingKernels
        from soothsay.train.whole_models import DraftRecipe, draft_config, write_model

        checkpoint = self.checkpoint()
        config = draft_config(checkpoint.config, self.layers, self.hidden, self.heads, self.intermediate)
        torch.manual_seed(self.config.seed)
        model = Transformer(parse_model_config(config), TrainingKernels()).to(self.device)
        examples, held_out = self.examples()
        recipe = DraftRecipe(
            *(self.target(), model, self.judge("draft-model", held_out)),
            lambda made, directory: write_model(made, checkpoint, config, directory),
            divergence=self.divergence,
            on_policy=self.on_policy,
        )
        self.train(recipe, examples)


def _shortlist(target: Transformer, examples: list[Example], size: int) -> list[int]:
    """The most frequent tokens, `size` of them or the whole vocabulary. None if `size` is 0."""
    if not size:
        return []
    from soothsay.train.examples import common_tokens

    total = target.spec.vocab_size
    return common_tokens(examples, min(size, total), total)


COMMANDS = {
    "lm": LanguageModelTraining,
    "mtp": MTPTraining,
    "medusa": MedusaTraining,
    "hydra": HydraTraining,
    "eagle": EagleTraining,
    "eagle3": Eagle3Training,
    "block": BlockTraining,
    "redrafter": RedrafterTraining,
    "draft": DraftModelTraining,
}
