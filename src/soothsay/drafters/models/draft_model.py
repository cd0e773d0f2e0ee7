"""A small model drafts for a large one (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318).

The draft model samples with the target's own noise: at temperature above 0 it proposes the token that the
target would draw if both models agreed (Daliri et al. 2024, arXiv 2408.07978). With `width` above 1 it grows
a tree as EAGLE-2 does (Li et al. 2024, arXiv 2406.16858), and the best nodes are verified.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from soothsay.config import DType
from soothsay.core.batch import Rows
from soothsay.core.request import Observation, Request
from soothsay.drafters.base import Drafter, ReadingDrafter, Target, check_at_least_one
from soothsay.drafters.models.translation import Translation
from soothsay.drafters.models.universal import UniversalDraftModel
from soothsay.drafters.places import drafter_directory
from soothsay.drafters.trees.growth import ConfidentShape, GrowingTree, GrownDrafter
from soothsay.drafters.trees.own_kv import TokenKV, pack
from soothsay.errors import DrafterError
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import Checkpoint, open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model
from soothsay.tokenizer import Tokenizer

MAX_WIDTH = 3
"""Default width of a tree. With weights in integers, three rows take as long as one, and five much longer."""

COMMON_TOKENS = 98_304
"""Tokens that a draft model guesses by default. The others of Qwen's are one in 200 (docs/log.md)."""


def draft_model(
    target: Target,
    model: str | Path | Transformer = "",
    depth: int = 4,
    width: int | None = None,
    branch: int | None = None,
    dtype: DType = "auto",
    vocabulary: int = COMMON_TOKENS,
) -> Drafter:
    """Return a `DraftModel`, or a `UniversalDraftModel` if its tokenizer is not the target's.

    Args:
        target: the model to draft for.
        model: a path or name that `LLM` would take, or a `Transformer` with the target's vocabulary; empty:
            `drafters/draft-model` beside the target's weights.
        depth: number of tokens that are drafted in a row.
        width: nodes of each level that are expanded, in one pass; None: 3, or fewer where the largest tree
            has no room for them. 1 gives a chain.
        branch: likeliest tokens that are added below each of them; None: one more than `width`.
        dtype: element type of the draft model, as in `LLM`. Weights that are stored in integers may be
            rounded to fewer bits: this costs guesses, but changes no token of an answer. "auto" chooses int4
            if the target's weights are in integers.
        vocabulary: number of tokens that are guessed: the first ones, which a tokenizer of byte pairs has
            found to be the most frequent, and control tokens. The others' rows of the output head are not
            read. 0: all.

    Raises:
        DrafterError: a number is too small; a tree is asked for with another vocabulary; with the same one,
            the draft model's context is smaller than the target's; or a tokenizer cannot be translated.
    """
    if vocabulary < 0:
        raise DrafterError(f"draft-model(vocabulary={vocabulary}) cannot be below 0; 0 stands for all tokens")
    shape = ConfidentShape.within("draft-model", target, depth, width, branch, MAX_WIDTH)
    if isinstance(model, Transformer):
        return DraftModel(target, model, depth, shape.width, shape.branch)
    checkpoint = open_checkpoint(str(model) or drafter_directory("draft-model", "", target))
    translation = _translation(checkpoint.tokenizer(), target, str(model))
    if translation is not None and max(width or 1, branch or 1) > 1:
        raise DrafterError(
            f"the draft model {model} has another vocabulary than the target, so it can only guess a chain: "
            f"leave out width={width} and branch={branch}"
        )
    if dtype == "auto" and target.model.bits is not None:
        dtype = "int4"
    tokens = common_tokens(checkpoint, vocabulary) if translation is None else None
    device, context, own = target.model.device, target.config.max_context, target.model.kernels
    kernels = own.variant if own.variant and own.fit(read_model_config(checkpoint)) else "auto"
    loaded = load_model(checkpoint, dtype, device, kernels, context, coarse=True, tokens=tokens)
    if translation is None:
        return DraftModel(target, loaded, depth, shape.width, shape.branch, tokens)
    _check_kind(loaded)
    return UniversalDraftModel(target, loaded, translation, depth)


class DraftModel(GrownDrafter[None], ReadingDrafter):
    """Proposes chains or trees with another model that has the same vocabulary.

    Its KV is in a pool of its own. Blocks that the target found in its prefix cache, but that this model
    never computed, are computed when they are needed.

    Args:
        target: the model to draft for.
        model: the draft model.
        depth: number of tokens that are drafted in a row.
        width: nodes of each level that are expanded; 1 gives a chain.
        branch: likeliest tokens that are added below each of them.
        tokens: `[n]` int64, those that the model's output head has logits of, ascending; None: all.

    Raises:
        DrafterError: a number is below 1, the model's context is smaller than the target's, or it keeps
            states.
    """

    trained = True
    likely_gain = 3.0  # a model of the same family is right at seven of ten tokens or more

    def __init__(
        self,
        target: Target,
        model: Transformer,
        depth: int = 4,
        width: int = 1,
        branch: int = 1,
        tokens: Tensor | None = None,
    ):
        check_at_least_one("draft-model", depth=depth, width=width, branch=branch)
        _check_kind(model, reads_sources=target.model.spec.source is not None)
        if (longest := model.spec.max_positions) < (target.config.max_context or 0):
            raise DrafterError(
                f"the draft model has a context of {longest} tokens, the target's is "
                f"{target.config.max_context}: set max_context to {longest} or less"
            )
        super().__init__(target, ConfidentShape(depth, width, branch))
        self.model = model
        known = torch.arange(model.spec.vocab_size) if tokens is None else tokens
        known = known[known < target.model.spec.vocab_size]  # the draft model may have more tokens
        self._first = int((known == torch.arange(len(known))).sum())  # these are 0, 1, 2, ...
        self._others = known[self._first :].to(model.device)
        self.kv = TokenKV(target, model.new_cache(target.num_blocks, target.config.block_size))

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep the KV of the nodes that were accepted."""
        self.kv.commit(observations)

    def release(self, request: Request) -> None:
        """Forget a request."""
        self.kv.release(request)

    def reset(self) -> None:
        """Forget what was computed for other requests."""
        self.kv.reset()

    def unread(self, request: Request) -> int:
        """See `ReadingDrafter`."""
        return self.kv.unread(request)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `ReadingDrafter`."""
        for batch in self.kv.catch_up(dict.fromkeys(requests)):
            self.run(batch.rows)

    def ready(self, request: Request) -> bool:
        """Return True: whatever is missing can be computed. See `Expander`."""
        return True

    def expand_roots(self, growing: Sequence[GrowingTree]) -> tuple[Tensor, None]:
        """Compute committed tokens up to the roots, see `Expander`. Nodes have no state but their KV."""
        ends, passes = list[Request](), list[Tensor]()
        for batch in self.kv.catch_up({g.request: g.expanded for g in growing}):
            ends += batch.ends
            passes.append(self.run(batch.rows))
        logits = passes[-1] if len(passes[-1]) == len(ends) else torch.cat(passes)
        if ends != (wanted := [g.request for g in growing]):
            logits = logits[[ends.index(request) for request in wanted]]
        return self._whole(logits), None

    def expand_nodes(self, growing: Sequence[GrowingTree], states: None) -> tuple[Tensor, None]:
        """Compute the frontiers, see `Expander`."""
        return self._whole(self.run([g.frontier_rows() for g in growing])), None

    def run(self, rows: Sequence[Rows]) -> Tensor:
        """Compute a pass of the draft model; `[M, V]` logits of its logit rows."""
        vocab_size = self.model.spec.vocab_size
        # the target may have more tokens
        known = [r._replace(tokens=r.tokens.clip(max=vocab_size - 1)) for r in rows]
        batch = pack(known, self.target, self.model.spec)
        return self.model.run(batch, self.kv.pool)[2]

    def _whole(self, logits: Tensor) -> Tensor:
        """Return `[M, V]` logits of the target's tokens, minus infinity for those that are not guessed."""
        first, others = self._first, self._others
        whole = logits.new_full((len(logits), self.target.model.spec.vocab_size), -math.inf)
        whole[:, :first] = logits[:, :first]
        whole[:, others] = logits[:, first : first + len(others)]
        return whole


def common_tokens(checkpoint: Checkpoint, count: int) -> Tensor | None:
    """The first `count` tokens of a vocabulary and its control tokens, `[n]` int64 in order; None: all."""
    tokenizer, size = checkpoint.tokenizer(), read_model_config(checkpoint).vocab_size
    if not 0 < count < size or tokenizer is None:
        return None
    added = [token for token in tokenizer.backend.get_added_tokens_decoder() if count <= token < size]
    return torch.tensor([*range(count), *sorted(added)])


def _check_kind(model: Transformer, *, reads_sources: bool = False) -> None:
    """Raise `DrafterError` if the draft model has states, or an encoder where the target reads no sources."""
    if model.spec.source is not None and not reads_sources:
        raise DrafterError(
            f"a draft model of family {model.spec.family!r} drafts for encoder-decoders with its own "
            "vocabulary only: choose a decoder"
        )
    if model.spec.states:
        raise DrafterError(
            f"a draft model of family {model.spec.family!r} keeps states instead of keys and values, which "
            "drafters cannot take back: choose a draft model without recurrent layers, or the drafter mtp"
        )


def _translation(own: Tokenizer | None, target: Target, name: str) -> Translation | None:
    """Return how to translate between the tokenizers; None if they agree, or if there are not two.

    Args:
        own: the draft model's tokenizer.
        target: its tokenizer is the other one.
        name: the draft model's name, for the error message.

    Raises:
        DrafterError: they differ, and one of them cannot be translated.
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
