"""Drafters that learn from their target: what each reads of it, and what it should have said.

The target is frozen. Its features and its whole distribution at every token of an answer are computed on the
fly, in the same pass; a head is taught the distribution, not only the token that happened to come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.config import ModelConfig
from soothsay.drafters.block import BlockHead
from soothsay.drafters.eagle3 import Eagle3Head
from soothsay.drafters.head import Head, RecurrentHead, Shared
from soothsay.drafters.hydra import HydraHead
from soothsay.drafters.medusa import MedusaHead
from soothsay.model.transformer import Transformer
from soothsay.train.data import Example
from soothsay.train.losses import distillation, log_probs
from soothsay.train.sequences import Sequences, at, weight_of

DECAY = 0.8
"""What a guess weighs against the one before it, as in EAGLE-3 (Li et al. 2025, arXiv 2503.01840)."""

Evaluate = Callable[[Path], dict[str, float]]
"""How a saved drafter does in the engine: its accepted tokens; `score` is what the best has most of."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A batch through the target."""

    batch: Sequences  # B sequences of T tokens
    features: Tensor  # [B, T, H] what this head reads
    teacher: Tensor  # [K, V] log p of the target for every token of an answer
    teacher_rows: Tensor  # [B, T] the row of each such token
    generator: torch.Generator  # of this step

    def anchors(self, share: float) -> Tensor:
        """`[B, n]` columns behind which guesses are learned: a share of those that an answer goes on behind,
        drawn for each sequence. Where another sequence has more of them, others go along."""
        answered = F.pad(self.batch.answer[:, 2:], (0, 1))  # the first guess behind a column is two further
        drawn = torch.rand(answered.shape, generator=self.generator, device=answered.device)
        count = max(1, round(share * int(answered.sum(1).max())))
        return (drawn + ~answered).argsort(1)[:, :count].sort(1).values


class HeadRecipe(ABC):
    """A head of a frozen target.

    Args:
        target: on `TrainingKernels`, in any dtype.
        head: what is trained.
        evaluate: measures what `save` has written.
        save: writes it as a checkpoint.
        anchors: share of the tokens behind which guesses are learned; neighbours teach much the same.
    """

    def __init__(
        self,
        target: Transformer,
        head: Head,
        evaluate: Evaluate,
        save: Callable[[Head, Path], None],
        *,
        anchors: float = 0.5,
    ):
        self.name = head.method
        self.target = target.eval().requires_grad_(False)
        self.head = head.to(target.device)
        self.trained: nn.Module = self.head
        self.shared = Shared.of(target)
        self._evaluate, self._save, self.anchors = evaluate, save, anchors

    def modules(self) -> Sequence[nn.Module]:
        """See `Recipe`."""
        return [self.target, self.head]

    def losses(self, examples: Sequence[Example], generator: torch.Generator) -> dict[str, Tensor]:
        """See `Recipe`."""
        batch = Sequences.of(examples, self.target.device)
        with torch.no_grad():
            hidden, taps = self.target(batch, taps=self.head.taps)
        features = self.head.fuse(taps, self.shared)
        asked = batch.answer.view(-1).roll(-1)  # rows that a token of an answer stands behind
        asked.view(batch.shape)[:, -1] = False
        seen = Seen(
            batch=batch,
            features=features.view(*batch.shape, -1),
            teacher=log_probs(hidden[asked], self.teacher_weight),
            teacher_rows=(asked.cumsum(0) - 1).view(batch.shape).roll(1, dims=1),
            generator=generator,
        )
        return _total(self.guesses(seen))

    @abstractmethod
    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """For each guess in a row, the losses (`loss` is descended) and the share that is the teacher's."""

    def teach(self, seen: Seen, out: Tensor, weight: Tensor, columns: Tensor) -> dict[str, Tensor]:
        """Compare guesses with the target, where the assistant speaks.

        `out[b, j]` `[B, n, H]` guesses token `columns[b, j]` `[B, n]`, if there is one; `weight` `[V, H]` is
        the head's output matrix.
        """
        there = columns < seen.batch.shape[1]
        columns = columns.clamp(max=seen.batch.shape[1] - 1)
        asked = at(seen.batch.answer, columns) & there
        teacher_rows = at(seen.teacher_rows, columns)[asked]
        loss, agreement = distillation(out[asked], weight, seen.teacher, teacher_rows)
        return {"loss": loss, "agreement": agreement}

    @property
    def teacher_weight(self) -> Tensor:
        """`[V, H]` of the target's output head, or its rows for the tokens that this head can say."""
        return weight_of(self.shared.head)

    def evaluate(self, directory: Path) -> dict[str, float]:
        """See `Recipe`."""
        return self._evaluate(directory)

    def save(self, directory: Path) -> None:
        """See `Recipe`."""
        self._save(self.head, directory)

    def identity(self) -> Mapping[str, Any]:
        """See `Recipe`."""
        return {"recipe": self.name, **{name: list(p.shape) for name, p in self.head.named_parameters()}}


class MedusaRecipe(HeadRecipe):
    """Medusa-1 (Cai et al. 2024, arXiv 2401.10774), taught the target's distributions."""

    head: MedusaHead

    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """See `HeadRecipe`."""
        columns = seen.anchors(self.anchors)
        features = at(seen.features, columns)
        outs = self.head(features.flatten(0, 1)).view(-1, *features.shape)
        own = [weight_of(module) for module in self.head.lm_heads]
        return [
            self.teach(seen, out, own[k] if own else self.teacher_weight, columns + k + 2)
            for k, out in enumerate(outs)
        ]


class HydraRecipe(HeadRecipe):
    """Hydra (Ankner et al. 2024, arXiv 2402.05109), taught the target's distributions."""

    head: HydraHead

    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """See `HeadRecipe`."""
        b, t = seen.batch.shape
        embedded = self.shared.embed(seen.batch.tokens).view(b, t, -1)
        columns = seen.anchors(self.anchors)
        features, made = at(seen.features, columns).flatten(0, 1), []
        for k in range(self.head.config.num_heads):
            behind = [(columns + 1 + i).clamp(max=t - 1) for i in range(k + 1)]
            tokens = torch.stack([at(embedded, one) for one in behind], dim=2)  # [B, n, k + 1, H]
            out = self.head(features, tokens.flatten(0, 1)).view(*columns.shape, -1)
            made.append(self.teach(seen, out, self.teacher_weight, columns + k + 2))
        return made


class RecurrentRecipe(HeadRecipe):
    """EAGLE-1, EAGLE-3 and MTP modules: guesses that build on the head's own states.

    A draft is unrolled for `depth` guesses, each reading the state before it, as it will be when it is served
    ("training-time test", EAGLE-3, arXiv 2503.01840; for EAGLE-1's weights HASS, Zhang et al. 2024, arXiv
    2408.15766). The first guess is learned at every token, deeper ones behind a sample of them. With
    `regression` the head learns the target's next feature, too (EAGLE-1, arXiv 2401.15077).
    """

    head: RecurrentHead

    def __init__(self, *args: Any, depth: int = 5, regression: float = 0.0, **options: Any):
        super().__init__(*args, **options)
        self.depth, self.regression = depth, regression

    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """See `HeadRecipe`."""
        rows, anchors = seen.batch.rows(slice(1, None)), seen.anchors(self.anchors)
        (b, t), now = rows.shape, rows
        state, kv = seen.features[:, :-1].flatten(0, 1), None
        columns = torch.arange(t, device=state.device).expand(b, t)
        made: list[dict[str, Tensor]] = []
        for level in range(self.depth):
            if level == 1:
                state, columns = at(state.view(b, t, -1), anchors).flatten(0, 1), anchors
            if level:
                now = rows.deeper(level, anchors)
            kv = _with_room(kv, self.head.config.block, len(now.tokens), state.device)
            state = self.head(self.head.embed(now.tokens, self.shared), state, now, kv)
            made.append(self._taught(seen, state.view(*columns.shape, -1), columns + 2 + level))
        return made

    def _taught(self, seen: Seen, out: Tensor, columns: Tensor) -> dict[str, Tensor]:
        taught = self.teach(seen, *self._output(out), columns)
        if self.regression:
            there = columns < seen.batch.shape[1]
            columns = columns.clamp(max=seen.batch.shape[1] - 1)
            asked = at(seen.batch.answer, columns) & there
            feature = at(seen.features, columns - 1)[asked]
            error = F.smooth_l1_loss(out[asked].float(), feature, reduction="sum")
            taught["feature"] = error / max(feature.numel(), 1)  # short answers have no deep guesses
            taught["loss"] = taught["loss"] + self.regression * taught["feature"]
        return taught

    def _output(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """What an output matrix reads, and the matrix."""
        if isinstance(self.head, Eagle3Head):
            normed = self.head.kernels.norm(out, self.head.norm, torch.float32)
            return normed, weight_of(self.head.head)
        return out, super().teacher_weight

    @property
    def teacher_weight(self) -> Tensor:
        """See `HeadRecipe`."""
        weight = super().teacher_weight
        return weight[self.head.token_ids] if isinstance(self.head, Eagle3Head) else weight


class BlockRecipe(HeadRecipe):
    """All guesses of a block in one pass, behind a sample of the tokens.

    A guess depends on those before it only by the correction, which is taught with the tokens that came.
    """

    head: BlockHead

    def guesses(self, seen: Seen) -> list[dict[str, Tensor]]:
        """See `HeadRecipe`."""
        config, rows, anchors = self.head.config, seen.batch.rows(slice(1, None)), seen.anchors(self.anchors)
        (b, t), now = rows.shape, rows
        embedded, features = self.shared.embed(rows.tokens), seen.features[:, :-1].flatten(0, 1)
        columns = torch.arange(t, device=features.device).expand(b, t)
        kv: list[Tensor | None] = [None] * config.block.num_layers
        made = []
        for level in range(config.size):
            if level:
                now, columns = rows.deeper(level, anchors), anchors
                query = self.head.queries[level - 1]  # [2, H]
                embedded, features = (part.expand(len(now.tokens), -1) for part in query)
            room = [_with_room(x, config.block, len(now.tokens), features.device) for x in kv]
            out = self.head(embedded, features, now, room).view(*columns.shape, -1)
            kv = list(room)
            made.append(self.teach(seen, *self._output(out, now), columns + 2 + level))
        return made

    def _output(self, out: Tensor, now: Sequences) -> tuple[Tensor, Tensor]:
        """What an output matrix reads, and the matrix: the correction is a few columns more."""
        inside, outside = self.head.markov_in, self.head.markov_out
        if inside is None or outside is None:
            return out, self.teacher_weight
        before = inside(now.tokens).view(*out.shape[:2], -1)
        return torch.cat([out, before], -1), torch.cat([self.teacher_weight, weight_of(outside)], -1)


def _with_room(kv: Tensor | None, c: ModelConfig, rows: int, device: torch.device) -> Tensor:
    """Keys and values of the levels so far, and room for one more, `[2 * H_kv, S, d]`."""
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    room = torch.empty(2 * c.num_kv_heads, rows, c.head_dim, dtype=dtype, device=device)
    return room if kv is None else torch.cat([kv, room], dim=1)


def _total(guesses: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The weighted mean of the guesses' losses, and what was measured of each."""
    weights = [DECAY**k for k in range(len(guesses))]
    loss = sum((w * taught["loss"] for w, taught in zip(weights, guesses, strict=True)), torch.zeros(()))
    measured = {
        f"{name}_{k + 1}": value for k, taught in enumerate(guesses) for name, value in taught.items()
    }
    return {"loss": loss / sum(weights), **measured}
