"""The target drafts for itself, with some of its layers left out: no second model, and no second KV.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) leaves out a set of layers that was searched for, which
any model can do; LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) leaves early, which a model has to be
trained for. `search` finds the set: it grows by the layer whose loss changes the fewest words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soothsay.config import ModelConfig
from soothsay.drafters.base import Target, check_at_least_one
from soothsay.drafters.context import Context, Pass, State, pack
from soothsay.drafters.grown import Confident, GrownDrafter
from soothsay.engine.batch import Batch, Rows
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError
from soothsay.model.transformer import Transformer

METHOD = "layer-skip"

DEEPEST = 8
"""Guesses in a row that are thought of when the best number is chosen."""


class TargetContext(Context):
    """The target's own keys and values: all committed tokens but the last have them.

    A drafter may write to the slots of the last token and of those behind it. Nobody else reads them before
    the target's next pass, and that writes each of its rows' slots anew, layer by layer, before it reads
    any: root and nodes stand at the same slots in both. Drafted nodes that are not verified leave something
    behind the end, where everything is garbage. Shared blocks are safe, since only blocks that are full of
    tokens with KV are shared, and the last token has none yet.
    """

    def open(self, request: Request) -> State:
        """The request's state, with nothing to run but the root."""
        root = DraftTree(int(request.tokens[-1]))
        # no blocks of ours are to be noted by content: hence as if all were
        state = State(request.blocks, len(request.tokens) - 1, len(request.blocks), root)
        self.states[request] = state
        return state


class LayerSkip(GrownDrafter[TargetContext]):
    """Guesses with a part of the target's layers, its last norm and its output head.

    Where more than the last token waits for the target's KV (a prompt, or after a preemption), there are no
    guesses.

    Args:
        target: the model to draft for.
        model: a directory with a layer set that was searched for; empty: `drafters/layer-skip` beside the
            target's weights, and if there is none, every other layer of the middle half is left out.
        skip: the layers to leave out, as `4`, `(4, 5)` or `"4,5"`, in place of the searched ones.
        exit: run only so many layers, the first ones, in place of leaving out others.
        depth: tokens that are guessed in a row; 0: what the search found best, or 3.
        width: nodes of each level that are explored further; 1 gives a chain.
        branch: likeliest tokens proposed below each of them.

    Raises `DrafterError` for layers that the target has not, and for a set that is another model's.
    """

    def __init__(
        self,
        target: Target,
        model: str | Path = "",
        skip: str | int | Sequence[int] = "",
        exit: int = 0,
        depth: int = 0,
        width: int = 1,
        branch: int = 1,
    ):
        check_at_least_one(METHOD, width=width, branch=branch)
        num_layers = target.model.config.num_layers
        if depth < 0 or not 0 <= exit <= num_layers:
            raise DrafterError(
                f"{METHOD}(exit={exit}, depth={depth}): neither can be below 0, nor exit above the target's "
                f"{num_layers} layers"
            )
        if (skip != "") + (exit > 0) + (str(model) != "") > 1:
            raise DrafterError(
                f"{METHOD}(model={model}, skip={skip}, exit={exit}): only one of them can say which layers"
            )
        found = _searched(model, target) if skip == "" and not exit else None
        if found is not None:
            skipped, depth = found.skip, depth or found.depth
        elif exit:
            skipped = tuple(range(exit, num_layers))
        elif skip != "":
            skipped = _parse(skip, num_layers)
        else:
            skipped = tuple(range(num_layers // 4 + 1, num_layers - num_layers // 4, 2))
        self.layers = tuple(layer for layer in range(num_layers) if layer not in skipped)
        # a target that is only looked at has no KV; the guesses would be bad, if there were any
        pool = target.cache or target.model.new_cache(target.num_blocks, target.config.block_size)
        super().__init__(target, TargetContext(target, pool), Confident(depth or 3, width, branch))

    def release(self, request: Request) -> None:
        """Forget a request."""
        self.context.release(request)

    def _open(self, request: Request) -> State | None:
        return self.context.open(request) if request.num_pending == 1 else None

    def _outputs(self, batch: Pass) -> Tensor:
        """`[M, hidden]` final states."""
        c = self.target.model.config
        packed = pack(batch.rows, self.target, c.group, c.windows)
        hidden: Tensor = self.target.model(packed, self.context.pool, layers=self.layers)[0]
        return hidden.index_select(0, packed.logit_rows)

    def _logits(self, outputs: Tensor) -> Tensor:
        return self.target.model.logits(outputs)


def _parse(skip: str | int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers that `skip` names, each once."""
    try:
        parts = skip.split(",") if isinstance(skip, str) else [skip] if isinstance(skip, int) else skip
        layers = sorted({int(part) for part in parts})
    except (ValueError, TypeError):
        raise DrafterError(f"{METHOD}(skip={skip!r}) is not understood: write skip=4 or skip='4,5'") from None
    if layers and not 0 <= layers[0] <= layers[-1] < num_layers:
        raise DrafterError(f"{METHOD}(skip={skip!r}): the target has layers 0 to {num_layers - 1}")
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class SkipSet:
    """Layers to leave out, and what that is worth."""

    skip: tuple[int, ...]
    agreement: float
    """The share of tokens that are the same with and without them."""

    cost: float
    """Of a guess, in passes of the whole model, by the weights that are read."""

    def speedup_at(self, depth: int) -> float:
        """Tokens for the cost of one pass, with so many guesses in a row, each right independently; their
        verification costs what a pass of one row does (Leviathan et al. 2022, arXiv 2211.17192).
        """
        tokens = sum(self.agreement**i for i in range(depth + 1))
        return tokens / (1 + depth * self.cost)

    @property
    def depth(self) -> int:
        """The best number of guesses in a row, at least 1."""
        return max(range(1, DEEPEST + 1), key=self.speedup_at)

    @property
    def speedup(self) -> float:
        """That can be expected at best."""
        return self.speedup_at(self.depth)

    def save(self, directory: Path, num_layers: int) -> None:
        """Write `directory`/config.json, for a model of `num_layers` layers."""
        directory.mkdir(parents=True, exist_ok=True)
        content = {"method": METHOD, "num_layers": num_layers, **asdict(self)}
        (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, directory: Path, num_layers: int) -> SkipSet:
        """What `save` wrote. Raises `DrafterError` if it is not there, damaged, or another model's."""
        file = directory / "config.json"
        if not file.is_file():
            raise DrafterError(
                f"there is no layer set at {directory}: 'soothsay train layer-skip' writes one"
            )
        try:
            content = json.loads(file.read_text("utf-8"))
            known, skip = int(content["num_layers"]), [int(layer) for layer in content["skip"]]
            found = cls(tuple(skip), float(content["agreement"]), float(content["cost"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DrafterError(f"{file} is not what 'soothsay train layer-skip' writes: {error!r}") from None
        if known != num_layers:
            raise DrafterError(f"{file} is of a model with {known} layers, not of one with {num_layers}")
        _parse(skip, num_layers)
        return found


def skip_directory(model: Path) -> Path:
    """Where the layer set of the model at `model` is looked for."""
    return model / "drafters" / METHOD


def _searched(model: str | Path, target: Target) -> SkipSet | None:
    """The set at `model`, or beside the target; None where none is named and none is there."""
    named = str(model) != ""
    directory = Path(model).expanduser() if named else target.path and skip_directory(target.path)
    if directory is None or not (named or directory.is_dir()):
        return None
    return SkipSet.load(directory, target.model.config.num_layers)


def search(
    model: Transformer, samples: Tensor, progress: Callable[[int, int, int], None] = lambda *_: None
) -> list[SkipSet]:
    """Layer sets that grow by one layer each, from one layer on: each time by the layer without which the
    most tokens stay the same.

    Agreement is measured as it matters in drafting: at each token, all tokens before it have the whole
    model's KV. A layer that does harm in a smaller set is taken to do at least as much in a larger one, so
    that most need not be tried again (lazy greedy, Minoux 1978). Ends where no larger set can be faster.

    Args:
        model: the target.
        samples: `[n, tokens]` int64, such text as it will say.
        progress: called with layers left out so far, those that there are, and tokens judged.
    """
    judge, c, found, skip = _Judge(model, samples), model.config, list[SkipSet](), list[int]()
    agreement = dict.fromkeys(range(c.num_layers), 1.0)  # without this layer too, when last looked at
    while agreement:
        progress(len(skip), c.num_layers, judge.judged)
        tried: set[int] = set()
        while True:
            layer = max(agreement, key=lambda layer: (agreement[layer], layer in tried))
            if layer in tried:
                break
            agreement[layer] = judge.agreement({*skip, layer})
            tried.add(layer)
        skip.append(layer)
        found.append(SkipSet(tuple(sorted(skip)), agreement.pop(layer), _cost(c, skip)))
        least = SkipSet((), found[-1].agreement, _cost(c, range(c.num_layers)))
        if least.speedup <= max(one.speedup for one in found):
            break
    return found


class _Judge:
    """How often a model with layers left out says the same as the whole one, token by token."""

    def __init__(self, model: Transformer, samples: Tensor):
        count, size = samples.shape
        self._model, self.judged = model, 0
        self._cache = model.new_cache(count * size + size, 1)
        own = count * size + np.arange(size)  # slots where the rows of a try put their KV
        self._tries, self._said = list[Batch](), list[Tensor]()
        for first, tokens in zip(range(0, count * size, size), samples.numpy(), strict=True):
            slots = first + np.arange(size)
            whole = self._pack([Rows(tokens, 0, slots)])
            self._said.append(self._run(whole, None))
            rows = [Rows(tokens[t : t + 1], t, np.append(slots[:t], own[t])) for t in range(size)]
            self._tries.append(self._pack(rows))

    def agreement(self, skip: set[int]) -> float:
        """In 0 to 1."""
        self.judged += sum(len(said) for said in self._said)
        layers = [layer for layer in range(self._model.config.num_layers) if layer not in skip]
        same = [
            (self._run(batch, layers) == said).float().mean().item()
            for batch, said in zip(self._tries, self._said, strict=True)
        ]
        return sum(same) / len(same)

    @torch.inference_mode()
    def _run(self, batch: Batch, layers: Sequence[int] | None) -> Tensor:
        """`[N]` the likeliest token behind each row."""
        return self._model.logits(self._model(batch, self._cache, layers=layers)[0]).argmax(-1)

    def _pack(self, rows: Sequence[Rows]) -> Batch:
        c = self._model.config
        return Batch.pack(rows, group=c.group, windows=c.windows, device=self._model.device)


def _cost(c: ModelConfig, skip: Sequence[int]) -> float:
    """Weights that a row reads without these layers, as a share of those that it reads with them."""
    attention = 2 * c.hidden_size * (c.num_heads + c.num_kv_heads) * c.head_dim
    dense, sparse = c.intermediate_size, c.experts_per_token * c.expert_size
    layers = [
        attention + 3 * c.hidden_size * (sparse if layer in c.sparse_layers else dense)
        for layer in range(c.num_layers)
    ]
    head = c.hidden_size * c.vocab_size
    return (head + sum(layers) - sum(layers[layer] for layer in skip)) / (head + sum(layers))
