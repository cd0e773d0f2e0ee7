"""`soothsay train lm | mtp | medusa | hydra | eagle | eagle3 | block | draft`: one short function each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from soothsay.cli.train.run import Run, training

if TYPE_CHECKING:
    from collections.abc import Callable

    from soothsay.drafters.head import Head
    from soothsay.model.transformer import Transformer
    from soothsay.train.data import Example

Guesses = Annotated[int, typer.Option(min=1, help="Guesses in a row.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers.")]
Depth = Annotated[int, typer.Option(min=1, help="Guesses in a row that training unrolls.")]


@training
def lm(
    run: Run,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from random weights, not from the model's.")
    ] = False,
    mtp_modules: Annotated[
        int, typer.Option("--mtp", min=0, help="Modules trained along that predict further ahead.")
    ] = 1,
) -> None:
    """Train a language model, further or from random weights, on all that is said.

    Modules for multi-token prediction (DeepSeek-V3, arXiv 2412.19437) learn beside it.
    """
    from soothsay.train.lm import LanguageModel

    examples, held_out = run.examples()
    recipe = LanguageModel(
        run.checkpoint(), held_out, fresh=fresh, mtp_modules=mtp_modules, seed=run.seed, device=run.device
    )
    run.train(recipe, examples)


@training
def medusa(
    run: Run,
    heads: Guesses = 4,
    layers: Layers = 1,
    own_heads: Annotated[
        bool, typer.Option("--own-heads", help="An output matrix for each head, not the target's.")
    ] = False,
) -> None:
    """Train Medusa's heads (arXiv 2401.10774)."""
    from soothsay.train import new
    from soothsay.train.heads import MedusaRecipe

    _head(run, MedusaRecipe, lambda target, examples: new.medusa(target, heads, layers, own_heads))


@training
def hydra(run: Run, heads: Guesses = 4, layers: Layers = 1) -> None:
    """Train Hydra's heads (arXiv 2402.05109), which see the guesses before their own."""
    from soothsay.train import new
    from soothsay.train.heads import HydraRecipe

    _head(run, HydraRecipe, lambda target, examples: new.hydra(target, heads, layers))


@training
def eagle(
    run: Run,
    depth: Depth = 4,
    regression: Annotated[
        float, typer.Option(min=0, help="What the target's next feature weighs beside its words.")
    ] = 0.5,
) -> None:
    """Train EAGLE-1's block (arXiv 2401.15077), which EAGLE-2 uses too."""
    from soothsay.train import new
    from soothsay.train.heads import RecurrentRecipe

    _head(
        run, RecurrentRecipe, lambda target, examples: new.eagle(target), depth=depth, regression=regression
    )


@training
def eagle3(
    run: Run,
    depth: Depth = 5,
    vocabulary: Annotated[
        int, typer.Option(min=1, help="Tokens that the drafter can say: the most frequent.")
    ] = 4096,
) -> None:
    """Train EAGLE-3's block (arXiv 2503.01840), which reads three layers of the target."""
    from soothsay.train import new
    from soothsay.train.heads import RecurrentRecipe

    def make(target: Transformer, examples: list[Example]) -> Head:
        size = target.config.vocab_size
        return new.eagle3(target, new.common_tokens(examples, min(vocabulary, size), size))

    _head(run, RecurrentRecipe, make, depth=depth)


@training
def mtp(
    run: Run, modules: Annotated[int, typer.Option(min=1, help="Modules.")] = 1, depth: Depth = 4
) -> None:
    """Train modules that predict further ahead (arXiv 2412.19437) for a target that is done.

    Those that were trained with it are improved with --init: here they learn from the target's distributions
    and from their own guesses.
    """
    from soothsay.train import new
    from soothsay.train.heads import RecurrentRecipe

    _head(run, RecurrentRecipe, lambda target, examples: new.mtp(target, modules), depth=depth)


@training
def block(
    run: Run,
    size: Guesses = 6,
    layers: Layers = 1,
    markov_rank: Annotated[
        int, typer.Option(min=0, help="Rank of the product that corrects a guess by the one before it.")
    ] = 32,
) -> None:
    """Train a drafter that makes all its guesses in one pass (the line of P-EAGLE and DFlash, 2026)."""
    from soothsay.train import new
    from soothsay.train.heads import BlockRecipe

    _head(
        run,
        BlockRecipe,
        lambda target, examples: new.block(target, size, layers, markov_rank),
    )


@training
def draft(
    run: Run,
    layers: Layers = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 128,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    intermediate: Annotated[int, typer.Option(min=1, help="Units of the feed-forward part.")] = 384,
    divergence: Annotated[
        Literal["forward-kl", "reverse-kl", "total-variation"],
        typer.Option(help="Between the target and the draft model, what is made small."),
    ] = "forward-kl",
    on_policy: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the examples that the draft model goes on with by itself."),
    ] = 0.0,
) -> None:
    """Distil a small model of the target's family (DistillSpec, arXiv 2310.08461)."""
    import torch

    from soothsay.config import ModelConfig
    from soothsay.model.transformer import Transformer
    from soothsay.train import new
    from soothsay.train.draft import DraftRecipe
    from soothsay.train.lm import write_model
    from soothsay.train.sequences import TrainingKernels

    checkpoint = run.checkpoint()
    config = new.draft_config(checkpoint.config, layers, hidden, heads, intermediate)
    torch.manual_seed(run.seed)
    model = Transformer(ModelConfig.from_hf(config), TrainingKernels()).to(run.device)
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


def _head(run: Run, recipe: Any, make: Callable[[Transformer, list[Example]], Head], **options: Any) -> None:
    """Train a head, a new one unless there is one to begin with."""
    import torch

    from soothsay.drafters.checkpoints import write_head

    examples, held_out = run.examples()
    torch.manual_seed(run.seed)
    target = run.target()
    head = make(target, examples)
    if run.init is not None:
        _begin_with(run, head, target)
    judge, name = run.judge(head.method, held_out), Path(run.model).name
    run.train(
        recipe(target, head, judge, lambda made, directory: write_head(made, directory, name), **options),
        examples,
    )


def _begin_with(run: Run, head: Head, target: Transformer) -> None:
    """Take over the weights of a drafter that is there."""
    from soothsay.config import EngineConfig
    from soothsay.drafters.base import Target
    from soothsay.drafters.checkpoints import read_head
    from soothsay.errors import TrainingError

    assert run.init is not None
    there = read_head(run.init, Target(target, None, EngineConfig(), 0, run.checkpoint().path))
    try:
        head.load_state_dict(there.state_dict())
    except RuntimeError as error:
        raise TrainingError(
            f"{run.init} is a drafter of another shape than these options make: {error}"
        ) from error


COMMANDS = (lm, mtp, medusa, hydra, eagle, eagle3, block, draft)
