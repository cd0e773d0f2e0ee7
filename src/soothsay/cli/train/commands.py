"""`soothsay train lm`, `mtp`, `medusa`, `hydra`, `eagle`, `eagle3`, `block`, `redrafter` and `draft`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from soothsay.cli.option_groups import grouped
from soothsay.cli.terminal import notice
from soothsay.cli.train.training_run import TrainingRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from soothsay.drafters.heads.trained_head import Head
    from soothsay.model.transformer import Transformer
    from soothsay.train.examples import Example

Guesses = Annotated[int, typer.Option(min=1, help="Draft tokens in a row.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers.")]
Shortlist = Annotated[
    int, typer.Option(min=0, help="Number of tokens that can be drafted: the most frequent. 0: all.")
]
Depth = Annotated[int, typer.Option(min=1, help="Draft tokens in a row that training unrolls.")]


@grouped
def lm(
    run: TrainingRun,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin with random weights, not with the model's.")
    ] = False,
    mtp_modules: Annotated[
        int, typer.Option("--mtp", min=0, help="MTP modules that are trained beside the model.")
    ] = 1,
) -> None:
    """Train a language model on all tokens of the data, further or from random weights.

    Modules for multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437) are trained beside it.
    """
    from soothsay.train.lm import LanguageModel

    examples, held_out = run.examples()
    recipe = LanguageModel(
        run.checkpoint(), held_out, fresh=fresh, mtp_modules=mtp_modules, seed=run.seed, device=run.device
    )
    run.train(recipe, examples)


@grouped
def medusa(
    run: TrainingRun,
    heads: Guesses = 4,
    layers: Layers = 1,
    own_heads: Annotated[
        bool,
        typer.Option(
            "--own-heads", help="Give each head an output matrix of its own. Default: all use the target's."
        ),
    ] = False,
) -> None:
    """Train Medusa's heads (arXiv 2401.10774)."""
    from soothsay.train import new_heads
    from soothsay.train.heads import MedusaRecipe

    _head(run, MedusaRecipe, lambda target, examples: new_heads.medusa(target, heads, layers, own_heads))


@grouped
def hydra(run: TrainingRun, heads: Guesses = 4, layers: Layers = 1) -> None:
    """Train Hydra's heads (arXiv 2402.05109), which read the draft tokens before their own."""
    from soothsay.train import new_heads
    from soothsay.train.heads import HydraRecipe

    _head(run, HydraRecipe, lambda target, examples: new_heads.hydra(target, heads, layers))


@grouped
def eagle(
    run: TrainingRun,
    depth: Depth = 4,
    regression: Annotated[
        float,
        typer.Option(min=0, help="Weight of the loss on the target's next feature."),
    ] = 0.5,
) -> None:
    """Train EAGLE-1's block (arXiv 2401.15077), which EAGLE-2 uses too."""
    from soothsay.train import new_heads
    from soothsay.train.heads import RecurrentRecipe

    _head(
        run,
        RecurrentRecipe,
        lambda target, examples: new_heads.eagle(target),
        depth=depth,
        regression=regression,
    )


@grouped
def eagle3(
    run: TrainingRun,
    depth: Depth = 5,
    vocabulary: Annotated[
        int,
        typer.Option(min=1, help="Number of tokens that can be drafted: the most frequent."),
    ] = 4096,
) -> None:
    """Train EAGLE-3's block (arXiv 2503.01840), which reads three layers of the target."""
    from soothsay.train import new_heads
    from soothsay.train.heads import RecurrentRecipe

    def make(target: Transformer, examples: list[Example]) -> Head:
        return new_heads.eagle3(target, examples, _shortlist(target, examples, vocabulary))

    _head(run, RecurrentRecipe, make, depth=depth)


@grouped
def mtp(
    run: TrainingRun, modules: Annotated[int, typer.Option(min=1, help="Modules.")] = 1, depth: Depth = 4
) -> None:
    """Train MTP modules (arXiv 2412.19437) for a target that does not change.

    Modules that were trained with the target can be improved: give them with --init. Here they learn the
    target's distributions, and to read their own draft tokens.
    """
    from soothsay.train import new_heads
    from soothsay.train.heads import RecurrentRecipe

    _head(run, RecurrentRecipe, lambda target, examples: new_heads.mtp(target, modules), depth=depth)


@grouped
def block(
    run: TrainingRun,
    size: Guesses = 6,
    layers: Layers = 1,
    cell: Annotated[
        int, typer.Option(min=0, help="Units of the cell that corrects guesses by their path; 0: none.")
    ] = 256,
    shortlist: Shortlist = 0,
) -> None:
    """Train a drafter that drafts all tokens in one pass, like P-EAGLE and DFlash (2026).

    With a shortlist, drafting reads a few rows of the output head. A small model with a large vocabulary
    spends a quarter of its time on that head.
    """
    from soothsay.train import new_heads
    from soothsay.train.heads import BlockRecipe

    def make(target: Transformer, examples: list[Example]) -> Head:
        tokens = _shortlist(target, examples, shortlist)
        return new_heads.block(target, examples, size, layers, cell, tokens)

    _head(run, BlockRecipe, make)


@grouped
def redrafter(
    run: TrainingRun,
    size: Guesses = 5,
    hidden: Annotated[int, typer.Option(min=16, help="Units between features and guesses.")] = 512,
    cell: Annotated[int, typer.Option(min=16, help="Units of the recurrent cell.")] = 256,
    shortlist: Shortlist = 6144,
) -> None:
    """Train a drafter of one look and a recurrent cell (ReDrafter, arXiv 2403.09919).

    It has no attention, so a draft is cheap, and only the answers are computed in training.
    """
    from soothsay.train import new_heads
    from soothsay.train.heads import RedrafterRecipe

    def make(target: Transformer, examples: list[Example]) -> Head:
        tokens = _shortlist(target, examples, shortlist)
        return new_heads.redrafter(target, examples, size, hidden, cell, tokens)

    _head(run, RedrafterRecipe, make)


@grouped
def draft(
    run: TrainingRun,
    layers: Layers = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 128,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    intermediate: Annotated[int, typer.Option(min=1, help="Units of the feed-forward part.")] = 384,
    divergence: Annotated[
        Literal["forward-kl", "reverse-kl", "total-variation"],
        typer.Option(help="Divergence between the target and the draft model that is minimized."),
    ] = "forward-kl",
    on_policy: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the answers that the draft model continues itself."),
    ] = 0.0,
) -> None:
    """Distil a small model of the target's family (DistillSpec, arXiv 2310.08461)."""
    import torch

    from soothsay.model.families.parsing import parse_model_config
    from soothsay.model.transformer import Transformer
    from soothsay.train.draft import DraftRecipe, draft_config
    from soothsay.train.lm import write_model
    from soothsay.train.sequences import TrainingKernels

    checkpoint = run.checkpoint()
    config = draft_config(checkpoint.config, layers, hidden, heads, intermediate)
    torch.manual_seed(run.seed)
    model = Transformer(parse_model_config(config), TrainingKernels()).to(run.device)
    examples, held_out = run.examples()
    recipe = DraftRecipe(
        run.target(),
        model,
        run.judge("draft-model", held_out),
        lambda made, directory: write_model(made, checkpoint, config, directory),
        divergence=divergence,
        on_policy=on_policy,
    )
    run.train(recipe, examples)


def _shortlist(target: Transformer, examples: list[Example], size: int) -> list[int]:
    """The most frequent tokens, `size` of them or the whole vocabulary. None if `size` is 0."""
    if not size:
        return []
    from soothsay.train.examples import common_tokens

    total = target.config.vocab_size
    return common_tokens(examples, min(size, total), total)


def _head(
    run: TrainingRun, recipe: Any, make: Callable[[Transformer, list[Example]], Head], **options: Any
) -> None:
    """Train the head that `make` makes, or continue with the one of --init."""
    import torch

    from soothsay.drafters.heads.checkpoints.head_directory import write_head

    examples, held_out = run.examples()
    torch.manual_seed(run.seed)
    target = run.target()
    with notice("making a new head ..."):
        head = make(target, examples)
    if run.init is not None:
        _begin_with(run, head, target)
    judge, name = run.judge(head.method, held_out), Path(run.model).name
    run.train(
        recipe(
            *(target, head, judge, lambda made, directory: write_head(made, directory, name)),
            **{"kept_bytes": int(run.keep_features * 2**30), **options},
        ),
        examples,
    )


def _begin_with(run: TrainingRun, head: Head, target: Transformer) -> None:
    """Load the weights of --init into `head`. Raises `TrainingError` if it has another shape."""
    from soothsay.config import EngineConfig
    from soothsay.drafters.base import Target
    from soothsay.drafters.heads.checkpoints.head_directory import read_head
    from soothsay.drafters.heads.trained_head import TargetEnds
    from soothsay.errors import TrainingError

    assert run.init is not None
    there = read_head(run.init, Target(target, None, EngineConfig(), 0, run.checkpoint().path))
    there.borrow(TargetEnds.of(target))
    try:
        head.load_state_dict(there.state_dict())
    except RuntimeError as error:
        raise TrainingError(
            f"{run.init} has a drafter of another shape than these options: {error}"
        ) from error


COMMANDS = (lm, mtp, medusa, hydra, eagle, eagle3, block, redrafter, draft)
