"""A small model drafts for a large one (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318).

The draft model samples with the target's own noise: at temperature above 0 it proposes what the target would
draw if both agreed (Daliri et al. 2024, arXiv 2408.07978). With `width` above 1 it grows a tree by
confidence, as EAGLE-2 does (Li et al. 2024, arXiv 2406.16858), and the best nodes are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from soothsay.config import DType
from soothsay.drafters.base import Drafter, Observation, Target, check_at_least_one
from soothsay.drafters.context import Context, Pass, State, pack
from soothsay.drafters.grown import Confident, GrownDrafter
from soothsay.drafters.head import drafter_directory
from soothsay.drafters.vocabulary import Translation, UniversalDraftModel
from soothsay.engine.batch import Rows
from soothsay.engine.request import Request
from soothsay.errors import DrafterError
from soothsay.model.checkpoint import open_checkpoint
from soothsay.model.load import load_model
from soothsay.model.transformer import Transformer
from soothsay.tokenizer import Tokenizer


def draft_model(
    target: Target,
    model: str | Path | Transformer = "",
    depth: int = 4,
    width: int | None = None,
    branch: int | None = None,
    dtype: DType = "auto",
) -> Drafter:
    """A `DraftModel`, or if its tokenizer is not the target's a `UniversalDraftModel`.

    Args:
        target: the model to draft for.
        model: a path or name that `LLM` would take, or a `Transformer` with the target's vocabulary; empty:
            `drafters/draft-model` beside the target's weights.
        depth: tokens that are guessed in a row.
        width: nodes of each level that are explored further, which read its weights together; None: as many
            as the largest tree has room for. 1 gives a chain.
        branch: likeliest tokens proposed below each of them; None: one more than `width`.
        dtype: the draft model's, as in `LLM`.

    Raises `DrafterError` for numbers below 1, for a context that is smaller than the target's, for trees
    with another vocabulary, and for tokenizers that cannot be translated into each other.
    """
    shape = Confident.within("draft-model", target, depth, width, branch)
    if isinstance(model, Transformer):
        return DraftModel(target, model, depth, shape.width, shape.branch)
    checkpoint = open_checkpoint(str(model) or drafter_directory("draft-model", "", target))
    translation = _translation(checkpoint.tokenizer(), target, str(model))
    if translation is not None and max(width or 1, branch or 1) > 1:
        raise DrafterError(
            f"the draft model {model} has another vocabulary than the target, so it can only guess a chain: "
            f"leave out width={width} and branch={branch}"
        )
    loaded = load_model(checkpoint, dtype, target.model.device)
    if translation is None:
        return DraftModel(target, loaded, depth, shape.width, shape.branch)
    _check_context(loaded, target)
    return UniversalDraftModel(target, loaded, translation, depth)


class DraftModel(GrownDrafter[Context]):
    """Another model with the same vocabulary proposes a chain or a tree.

    Its KV lives in a pool of its own, addressed by the target's blocks. A block that the target found in its
    prefix cache may never have been seen by this model; so it notes what it has computed by content, and
    fills the rest in.

    Args:
        target: the model to draft for.
        model: the draft model.
        depth: tokens that are guessed in a row.
        width: nodes of each level that are explored further; 1 gives a chain.
        branch: likeliest tokens proposed below each of them.
    """

    trained = True

    def __init__(self, target: Target, model: Transformer, depth: int = 4, width: int = 1, branch: int = 1):
        check_at_least_one("draft-model", depth=depth, width=width, branch=branch)
        _check_context(model, target)
        context = Context(target, model.new_cache(target.num_blocks, target.config.block_size))
        super().__init__(target, context, Confident(depth, width, branch))
        self.model = model

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the KV of the nodes that were accepted."""
        self.context.commit(observations)

    def release(self, request: Request) -> None:
        """Forget a request."""
        self.context.release(request)

    def _open(self, request: Request) -> State:
        return self.context.open(request)

    def _outputs(self, batch: Pass) -> Tensor:
        return self._run(batch.rows)

    def _run(self, rows: Sequence[Rows]) -> Tensor:
        """`[M, hidden]` final states of the draft model."""
        c = self.model.config
        known = [  # the target may have more tokens
            replace(r, tokens=r.tokens.clip(max=c.vocab_size - 1)) for r in rows
        ]
        batch = pack(known, self.target, c.group, c.windows)
        hidden: Tensor = self.model(batch, self.context.pool)[0]
        return hidden.index_select(0, batch.logit_rows)

    def _logits(self, outputs: Tensor) -> Tensor:
        logits = self.model.logits(outputs)
        return F.pad(logits, (0, self.target.model.config.vocab_size - logits.shape[1]), value=-math.inf)


def _check_context(model: Transformer, target: Target) -> None:
    """Raise `DrafterError` if the draft model's context is smaller than the target's."""
    if model.config.max_positions < (target.config.max_context or 0):
        raise DrafterError(
            f"the draft model has a context of {model.config.max_positions} tokens, the target's is "
            f"{target.config.max_context}: set max_context to at most the former"
        )


def _translation(own: Tokenizer | None, target: Target, name: str) -> Translation | None:
    """None if the two tokenizers agree about every token, as far as there are two.

    Raises `DrafterError` if they do not, and cannot be translated into each other.
    """
    if own is None or target.tokenizer is None:
        return None
    draft, other = own.vocabulary(), target.tokenizer.vocabulary()
    differing = sorted(token for token in draft.keys() | other.keys() if draft.get(token) != other.get(token))
    if not differing:
        return None
    try:
        return Translation(own, target.tokenizer)
    except DrafterError as error:
        ids = f"{draft.get(differing[0])} against {other.get(differing[0])}"
        raise DrafterError(
            f"the draft model {name} has another vocabulary than the target: {len(differing)} tokens differ, "
            f"for example {differing[0]!r} ({ids}); and one of the tokenizers cannot be translated: {error}. "
            "Choose a draft model of the same family, or a drafter that needs none, such as prompt-lookup"
        ) from None
