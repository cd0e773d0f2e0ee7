"""Recipes that train a head on the features and the distributions of a frozen target.

One pass of the target gives the features that the head reads, and the target's distribution at every token of
an answer. The head learns the whole distribution, not only the token of the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.drafters.heads.block import BlockHead
from soothsay.drafters.heads.eagle3 import Eagle3Head
from soothsay.drafters.heads.hydra import HydraHead
from soothsay.drafters.heads.medusa import MedusaHead
from soothsay.drafters.heads.redrafter import RedrafterHead
from soothsay.drafters.heads.trained_head import Head, RecurrentHead, ShortlistHead, TargetEnds
from soothsay.model.specs.model_spec import ModelSpec
from soothsay.model.transformer import Transformer
from soothsay.train.examples import Example
from soothsay.train.features import FeatureStore
from soothsay.train.losses import Divergence, distillation, product_dtype
from soothsay.train.sequences import Seen, Sequences, at, weight_of

DECAY = 0.8
"""Weight of a draft token's loss relative to the one before, as in EAGLE-3 (Li et al. 2025, 2503.01840)."""

Evaluate = Callable[[Path], dict[str, float]]
"""Measures a drafter that is saved in a directory. `score` is highest for the best one."""


class HeadRecipe(ABC):
    """Trains a head of a frozen target. A subclass says what the head proposes.

    Args:
        target: on `TrainingKernels`, in any dtype.
        head: is trained.
        evaluate: measures what `save` has written.
        save: writes the head as a checkpoint.
        anchors: share of the tokens after which drafts are learned. Neighbours teach nearly the same.
        divergence: is minimized.
        kept_bytes: of memory for what the target computes; see `FeatureStore`.
    """

    def __init__(
        self,
        target: Transformer,
        head: Head,
        evaluate: Evaluate,
        save: Callable[[Head, Path], None],
        *,
        anchors: float = 0.5,
        divergence: Divergence = "forward-kl",
        kept_bytes: int = 0,
    ):
        self.name = head.method
        self.target = target.eval().requires_grad_(False)
        self.head = head.to(target.device)
        self.trained: nn.Module = self.head
        self.shared = TargetEnds.of(target)
        self.evaluate, self._save = evaluate, save
        self.anchors, self.divergence = anchors, divergence
        self.store = FeatureStore(self.target, head.taps, kept_bytes)

    def modules(self) -> Sequence[nn.Module]:
        """See `Recipe`."""
        return [self.target, self.head]

    def losses(self, examples: Sequence[Example], generator: torch.Generator) -> dict[str, Tensor]:
        """See `Recipe`."""
        batch = Sequences.of(examples, self.target.device)
        computed = self.store.read(examples, batch)
        features = self.head.fuse(computed.states[1:].float().unbind(), self.shared).view(*batch.shape, -1)
        teacher = computed.teacher if self.places is None else computed.teacher.listed(self.places)
        teacher_rows = (batch.before_answers.cumsum(0) - 1).view(batch.shape).roll(1, dims=1)
        return _total(self.guesses(Seen(batch, features, teacher, teacher_rows, generator)))

    @cached_property
    def places(self) -> Tensor | None:
        """`[V]` the place of each token in the list of those that the head can propose, or -1; None: all."""
        ids = self.head.listed
        if ids is None:
            return None
        places = torch.full((self.target.spec.vocab_size,), -1, device=ids.device)
        places[ids] = torch.arange(len(ids), device=ids.device)
        return places

    @abstractmethod
    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """Return what `teach` returns, for each draft token of a draft in order."""

    def teach(self, seen: Seen, out: Tensor, columns: Tensor, own: Tensor | None = None) -> dict[str, Tensor]:
        """Compare the head's distributions with the target's, at the tokens of answers.

        Args:
            seen: the batch.
            out: `[B, n, H]`; the distribution of token `columns[b, j]` is computed from `out[b, j]`.
            columns: `[B, n]` int64. Columns after the end do not count.
            own: `[V, H]` an output matrix whose products are logits; None: `output_weight`, whose products
                are scaled as the target's.

        Returns:
            `loss`, and `agreement`: the share of tokens whose likeliest value is the target's, of its whole
            vocabulary.
        """
        columns, learned = seen.learned(columns)
        teacher_rows = at(seen.teacher_rows, columns)[learned]
        if own is None:
            out, own = out * self.shared.output.scale, self.output_weight
        loss, agreement = distillation(out[learned], own, seen.teacher, teacher_rows, self.divergence)
        return {"loss": loss, "agreement": agreement}

    @property
    def output_weight(self) -> Tensor:
        """`[V, H]`: the target's output matrix, or its rows for the tokens that the head can propose."""
        short = self.head.head if isinstance(self.head, ShortlistHead) else None
        return weight_of(self.shared.head if short is None else short)

    def save(self, directory: Path) -> None:
        """See `Recipe`."""
        self._save(self.head, directory)

    def identity(self) -> Mapping[str, Any]:
        """See `Recipe`."""
        return {"recipe": self.name, **{name: list(p.shape) for name, p in self.head.named_parameters()}}


class MedusaRecipe(HeadRecipe):
    """Trains Medusa-1 (Cai et al. 2024, arXiv 2401.10774) on the target's distributions."""

    head: MedusaHead

    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """See `HeadRecipe`."""
        columns = seen.anchors(self.anchors)
        features = at(seen.features, columns)
        outs = self.head(features.flatten(0, 1)).view(-1, *features.shape)
        own = [weight_of(module) for module in self.head.lm_heads]
        return [self.teach(seen, out, columns + k + 2, own[k] if own else None) for k, out in enumerate(outs)]


class HydraRecipe(HeadRecipe):
    """Trains Hydra (Ankner et al. 2024, arXiv 2402.05109) on the target's distributions."""

    head: HydraHead

    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """See `HeadRecipe`."""
        b, t = seen.batch.shape
        embedded = self.shared.embed(seen.batch.tokens).view(b, t, -1)
        columns = seen.anchors(self.anchors)
        features, made = at(seen.features, columns).flatten(0, 1), []
        for k in range(self.head.config.num_heads):
            after = [(columns + 1 + i).clamp(max=t - 1) for i in range(k + 1)]
            tokens = torch.stack([at(embedded, one) for one in after], dim=2)  # [B, n, k + 1, H]
            out = self.head(features, tokens.flatten(0, 1)).view(*columns.shape, -1)
            made.append(self.teach(seen, out, columns + k + 2))
        return made


class RecurrentRecipe(HeadRecipe):
    """Trains EAGLE-1, EAGLE-3 and MTP modules, which read their own states for deeper draft tokens.

    Training unrolls a draft of `depth` tokens. Each reads the head's state at the one before, as it does when
    the head is served. EAGLE-3 (arXiv 2503.01840) calls this training-time test. HASS (Zhang et al. 2024,
    arXiv 2408.15766) does it for EAGLE-1's weights. The first draft token is learned after every token,
    deeper ones after a sample of them. `regression` is the weight of a second loss: the distance from the
    target's next feature (EAGLE-1, arXiv 2401.15077).
    """

    head: RecurrentHead

    def __init__(self, *args: Any, depth: int = 5, regression: float = 0.0, **options: Any):
        super().__init__(*args, **options)
        self.depth, self.regression = depth, regression

    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """See `HeadRecipe`."""
        state, kv, made = seen.features[:, :-1].flatten(0, 1), None, list[dict[str, Tensor]]()
        for level, (now, columns) in enumerate(seen.levels(self.depth, self.anchors)):
            if level == 1:
                state = at(state.view(len(columns), -1, state.shape[-1]), columns).flatten(0, 1)
            kv = _with_room(kv, self.head.config.block, len(now.tokens), state)
            state = self.head(self.head.embed(now.tokens, self.shared), state, now, kv)
            made.append(self._taught(seen, state.view(*columns.shape, -1), columns + 2 + level))
        return made

    def _taught(self, seen: Seen, out: Tensor, columns: Tensor) -> dict[str, Tensor]:
        """The losses of one level; see `teach`."""
        if isinstance(self.head, Eagle3Head):
            taught = self.teach(seen, self.head.normed(out), columns, weight_of(self.head.head))
        else:
            taught = self.teach(seen, out, columns)
        if self.regression:
            columns, learned = seen.learned(columns)
            feature = at(seen.features, columns - 1)[learned]
            error = F.smooth_l1_loss(out[learned].float(), feature, reduction="sum")
            taught["feature"] = error / max(feature.numel(), 1)  # short answers have no deep draft tokens
            taught["loss"] = taught["loss"] + self.regression * taught["feature"]
        return taught


class RefiningRecipe(HeadRecipe):
    """Trains a head whose guesses are refined by the tokens before them.

    Guesses are taught before they are refined too, since they choose the candidates. `candidates` is the
    weight of this.
    """

    def __init__(self, *args: Any, candidates: float = 0.5, **options: Any):
        super().__init__(*args, **options)
        self.candidates = candidates

    def teach_both(
        self, seen: Seen, refined: Tensor, raw: Tensor, columns: Tensor, first: bool
    ) -> dict[str, Tensor]:
        """What `teach` returns of refined guesses `[B * n, H]`; the loss is that of raw ones too.

        The first guess of a draft chooses no candidates that are refined.
        """
        shape = *columns.shape, -1
        taught = self.teach(seen, refined.view(shape), columns)
        if self.candidates and not first:
            again = self.teach(seen, raw.view(shape), columns)
            taught["loss"] = taught["loss"] + self.candidates * again["loss"]
        return taught


class BlockRecipe(RefiningRecipe):
    """Trains a head that drafts all tokens of a block in one pass, after a sample of the tokens.

    Only by the cell does a draft token depend on the ones before it. Tokens of the text train it.
    """

    head: BlockHead

    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """See `HeadRecipe`."""
        config, features, made, state = self.head.config, seen.features[:, :-1].flatten(0, 1), [], None
        kv: list[Tensor | None] = [None] * config.block.num_layers
        for level, (now, columns) in enumerate(seen.levels(config.size, self.anchors)):
            if level:
                query = self.head.queries[level - 1]  # [2, H]
                embedded, features = (part.expand(len(now.tokens), -1) for part in query)
            else:
                embedded = self.shared.embed(now.tokens)
            room = [_with_room(x, config.block, len(now.tokens), features) for x in kv]
            out = self.head(embedded, features, now, room).view(*columns.shape, -1)
            kv = list(room)
            if level == 1 and state is not None:
                state = at(state.view(len(columns), -1, state.shape[-1]), columns).flatten(0, 1)
            taught, state = self._taught(seen, out, now, columns + 2 + level, state)
            made.append(taught)
        return made

    def _taught(
        self, seen: Seen, out: Tensor, now: Sequences, columns: Tensor, above: Tensor | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The losses of one level, and the cell's state there."""
        if self.head.refiner is None:
            return self.teach(seen, out, columns), None
        embedded = self.head.embedded(now.tokens, self.shared)
        refined, state = self.head.refiner(out.flatten(0, 1), embedded, above)
        return self.teach_both(seen, refined, out, columns, above is None), state


class RedrafterRecipe(RefiningRecipe):
    """Trains a head of one look and a recurrent cell, which reads the tokens of the text.

    The first draft token is learned after every token, deeper ones after a sample of them.
    """

    head: RedrafterHead

    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """See `HeadRecipe`."""
        b, t = seen.batch.shape
        tokens, columns = seen.batch.tokens.view(b, t), seen.anchors(1.0)
        root = self._embedded(at(tokens, columns + 1))
        inner, passed = self.head.seen(at(seen.features, columns).flatten(0, 1), root)
        matrices = weight_of(self.head.guesses).view(self.head.config.size, -1, inner.shape[1])
        state, made = None, []
        for k, matrix in enumerate(matrices):
            if k == 1 and state is not None:
                some = self._sample(columns.shape[1], seen)
                inner, passed, state = (
                    part.view(*columns.shape, -1)[:, some].flatten(0, 1) for part in (inner, passed, state)
                )
                columns = columns[:, some]
            raw = F.linear(inner, matrix).float() + passed
            raw = self.shared.kernels.norm(raw, self.head.norm, torch.float32)
            before = self._embedded(at(tokens, (columns + 1 + k).clamp(max=t - 1)))
            out, state = self.head.refiner(raw, before, state)
            made.append(self.teach_both(seen, out, raw, columns + 2 + k, k == 0))
        return made

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.head.embedded(tokens.flatten(), self.shared)

    def _sample(self, count: int, seen: Seen) -> Tensor:
        """A share of `count` places, in order."""
        drawn = torch.randperm(count, generator=seen.generator, device=seen.features.device)
        return drawn[: max(1, round(self.anchors * count))].sort().values


def _with_room(kv: Tensor | None, c: ModelSpec, rows: int, like: Tensor) -> Tensor:
    """Append room for `rows` rows to the keys and values of the levels so far, `[2 * H_kv, S, d]`."""
    heads, size = c.kv_shapes[0]
    room = torch.empty(heads, rows, size, dtype=product_dtype(like), device=like.device)
    return room if kv is None else torch.cat([kv, room], dim=1)


def _total(guesses: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The weighted mean of the draft tokens' losses, and all values of each, numbered from 1."""
    weights = [DECAY**k for k in range(len(guesses))]
    loss = sum((w * taught["loss"] for w, taught in zip(weights, guesses, strict=True)), torch.zeros(()))
    measured = {
        f"{name}_{k + 1}": value for k, taught in enumerate(guesses) for name, value in taught.items()
    }
    return {"loss": loss / sum(weights), **measured}
