"""Parts of one-pass heads that correct the guesses of a depth by the tokens above it, and how they are
stored.

One pass predicts all depths at once, so its guesses do not depend on each other. A path head corrects the
logits below a node by the node's token, and some also by the tokens above the node.

M are nodes, R blocks of B rows, r is the rank, V_short the number of tokens that can be guessed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soothsay.drafters.heads.checkpoints.drafter_files import DrafterFiles
from soothsay.drafters.heads.checkpoints.stored_head import Names
from soothsay.errors import DrafterError
from soothsay.model.decoder.embedding import Embedding
from soothsay.model.ops.linear import Dense, normal
from soothsay.model.specs.model_spec import ModelSpec

MarkovKind = Literal["vanilla", "gated", "rnn"]


class PathHead(nn.Module):
    """Corrects logits along the paths of a tree. Each node has a state, which its children read.

    This one corrects nothing.
    """

    def read(self, outputs: Tensor) -> Tensor:
        """What `step` reads of a block's outputs: `[R, B, H] -> [R, B, n]`. Here the outputs themselves."""
        return outputs

    def begin(self, read: Tensor, roots: Tensor, before: Tensor) -> Tensor:
        """The states of the roots' parents, `[R, ...]`. Here they are empty.

        Args:
            read: what `read` returned.
            roots: `[R]` tokens of the roots.
            before: `[R]` tokens before the roots; the root itself where there is none.
        """
        return read.new_empty(len(read), 0)

    def step(self, logits: Tensor, read: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Correct the logits below nodes of one depth.

        Args:
            logits: `[M, V_short]` float32, those of the one pass.
            read: `[M, n]`, what `read` returned for the rows of these logits.
            tokens: `[M]` the nodes' tokens.
            states: `[M, ...]` of the nodes' parents.

        Returns:
            `[M, V_short]` float32, minus infinity for tokens that are ruled out; and the nodes' states.
        """
        return logits, states


class MarkovHead(PathHead):
    """A low-rank product of each token with the next (DSpark, 2026).

    "gated": outputs weigh the dimensions of the token before. "rnn": a recurrent state sees the whole path.
    """

    def __init__(
        self,
        kind: MarkovKind,
        rank: int,
        hidden_size: int,
        vocab_size: int,
        guessed: int,
        begins_at_root: bool,
    ):
        super().__init__()
        self.kind, self.begins_at_root = kind, begins_at_root
        self.tokens = Embedding(normal(vocab_size, rank, std=0.01), 1.0)
        self.next: nn.Module = Dense.random(rank, guessed)
        self.gate: nn.Module | None = None
        self.joint: nn.Module | None = None
        if kind == "gated":
            self.gate = Dense.random(hidden_size + rank, rank, bias=True)
        elif kind == "rnn":
            self.joint = Dense.random(2 * rank + hidden_size, 3 * rank, bias=True)

    def begin(self, read: Tensor, roots: Tensor, before: Tensor) -> Tensor:
        """See `PathHead`. Where the first row of a block guesses nothing, the recurrent state has seen it."""
        if self.joint is None:
            return super().begin(read, roots, before)
        states = read.new_zeros(len(read), self.tokens.weight.shape[1])
        return states if self.begins_at_root else self._recur(read[:, 0], self.embed(roots), states)[1]

    def step(self, logits: Tensor, read: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `PathHead`."""
        known = self.embed(tokens)
        if self.gate is not None:
            known = known * cast(Tensor, self.gate(torch.cat([read, known], dim=-1))).float().sigmoid()
        elif self.joint is not None:
            known, states = self._recur(read, known, states)
        return logits + cast(Tensor, self.next(known)).float(), states

    def embed(self, tokens: Tensor) -> Tensor:
        """`[M] -> [M, r]`."""
        return known_rows(self.tokens, tokens)

    def _recur(self, read: Tensor, known: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the recurrent state: what `next` reads, and the new state; `[M, r]` each."""
        assert self.joint is not None
        joint = cast(Tensor, self.joint(torch.cat([states, known, read], dim=-1))).float()
        gate, candidate, out = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * states + (1 - gate) * candidate.tanh()


class CandidateSelector(PathHead):
    """Chooses among the likeliest tokens of a depth by a product of three factors (DFlash2, 2026).

    The factors belong to the token before, the block's output and the candidate. All other tokens are ruled
    out.
    """

    def __init__(self, rank: int, count: int, hidden_size: int, vocab_size: int):
        super().__init__()
        self.count = count
        self.before = Embedding(normal(vocab_size, rank, std=0.02), 1.0)
        self.after = Embedding(normal(vocab_size, rank, std=0.02), 1.0)
        self.projection: nn.Module = Dense.random(hidden_size, rank)

    def read(self, outputs: Tensor) -> Tensor:
        """See `PathHead`: `[R, B, H] -> [R, B, r]`."""
        return cast(Tensor, self.projection(outputs.flatten(0, 1))).float().view(*outputs.shape[:2], -1)

    def step(self, logits: Tensor, read: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `PathHead`."""
        values, candidates = logits.topk(min(self.count, logits.shape[1]), dim=-1)  # [M, k]
        wanted = known_rows(self.before, tokens) * read  # [M, r]
        offered = self.after(candidates.flatten()).view(*candidates.shape, -1)  # [M, k, r]
        values = values + (wanted[:, None] * offered).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(1, candidates, values), states


class CausalRefiner(PathHead):
    """Mixes latent states along a path, and makes logits of them (xPress, 2026).

    A node's latent state is made of its parent row's output, the mean output of the block, and the node's
    token. Learned weights mix the states of the path. The state of a node is the list of latent states up to
    it.
    """

    def __init__(
        self,
        rank: int,
        inner: int,
        size: int,
        hidden_size: int,
        vocab_size: int,
        guessed: int,
        begins_at_root: bool,
    ):
        super().__init__()
        self.begins_at_root = begins_at_root
        self.tokens = Embedding(normal(vocab_size, rank, std=0.02), 1.0)
        self.own: nn.Module = Dense.random(hidden_size, rank)
        self.mean: nn.Module = Dense.random(hidden_size, rank)
        self.fuse: nn.Module = Dense.random(3 * rank, rank)
        self.mix = nn.Parameter(torch.zeros(rank, size, size))  # [r, row, row before it or itself]
        self.gate_up: nn.Module = Dense.random(rank, 2 * inner)
        self.down: nn.Module = Dense.random(inner, rank)
        self.next: nn.Module = Dense.random(rank, guessed)

    def read(self, outputs: Tensor) -> Tensor:
        """See `PathHead`: `[R, B, H] -> [R, B, 2 r]`."""
        own = cast(Tensor, self.own(outputs.flatten(0, 1))).float().view(*outputs.shape[:2], -1)
        mean = cast(Tensor, self.mean(outputs.mean(dim=1))).float()
        return torch.cat([own, mean[:, None].expand_as(own)], dim=-1)

    def begin(self, read: Tensor, roots: Tensor, before: Tensor) -> Tensor:
        """See `PathHead`: `[R, k, r]`, where k is 1 if the first row of a block guesses nothing."""
        if self.begins_at_root:
            return read.new_empty(len(read), 0, self.mix.shape[0])
        return self._latent(read[:, 0], before)[:, None]

    def step(self, logits: Tensor, read: Tensor, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `PathHead`: the states grow from `[M, k, r]` to `[M, k + 1, r]`."""
        latent = self._latent(read, tokens)
        row, states = states.shape[1], torch.cat([states, latent[:, None]], dim=1)
        mixed = latent + (states * self.mix[:, row, : row + 1].t()).sum(dim=1)
        gate, up = cast(Tensor, self.gate_up(mixed)).float().chunk(2, dim=-1)
        mixed = mixed + cast(Tensor, self.down(F.silu(gate) * up)).float()
        return logits + cast(Tensor, self.next(mixed)).float(), states

    def _latent(self, read: Tensor, tokens: Tensor) -> Tensor:
        both = torch.cat([read, known_rows(self.tokens, tokens)], dim=-1)
        return cast(Tensor, self.fuse(both)).float()


def known_rows(table: Embedding, tokens: Tensor) -> Tensor:
    """Rows of a table `[V, r]` for tokens `[M]`. The target's padding beyond V reads the last row."""
    return cast(Tensor, table(tokens.clamp(max=len(table.weight) - 1)))


Options = Mapping[str, Any]

REFINERS: Mapping[str, Names] = {
    "refiner_head.": {
        "tokens": ("token_embed",),
        "gate_up": ("mlp_gate", "mlp_up"),
        "down": ("mlp_down",),
        "next": ("readout",),
        "mix": ("mix_l",),
    },
    "xpress_head.": {
        "tokens": ("w1",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "next": ("w2",),
        "mix": ("mix.L",),
    },
}
"""xPress's names by their prefix: in speculators, and in its authors' checkpoints."""


@dataclass(frozen=True)
class StoredPathHead:
    """A path head in a checkpoint, or none."""

    method: str = ""
    """The method that it belongs to; empty: none."""

    begins_at_root: bool = False
    """Whether the first row of a block guesses."""

    make: Callable[[int], PathHead | None] = lambda size: None
    """Makes a path head for blocks of this size, with any weights."""

    names: Names = field(default_factory=dict)
    given: Mapping[str, Tensor] = field(default_factory=dict)
    """Values of parameters that are not in the files as we need them."""


def path_head_of(files: DrafterFiles, options: Options, block: ModelSpec, guessed: int) -> StoredPathHead:
    """The path head that a checkpoint's tensors are for.

    Args:
        files: the checkpoint.
        options: its configuration.
        block: that of the decoder blocks.
        guessed: number of tokens that can be guessed.

    Raises:
        DrafterError: it does not fit the vocabulary.
    """
    begins = bool(options.get("sample_from_anchor", False))
    if "markov_head.markov_w1.weight" in files.names:
        return _markov(files, options, block, guessed)
    if "candidate_selector.hidden_projection.weight" in files.names:
        return _selector(files, options, block, begins)
    for prefix, theirs in REFINERS.items():
        if f"{prefix}in_proj.weight" in files.names:
            return _refiner(files, prefix, theirs, block, guessed, begins)
    return StoredPathHead(begins_at_root=begins)


def _markov(files: DrafterFiles, options: Options, block: ModelSpec, guessed: int) -> StoredPathHead:
    prefix = "markov_head."
    kind = "gated" if f"{prefix}gate_proj.weight" in files.names else "vanilla"
    kind = "rnn" if f"{prefix}joint_proj.weight" in files.names else kind
    begins = bool(options.get("sample_from_anchor", not options.get("dspark_bonus_anchor", False)))
    rank = _columns(files, f"{prefix}markov_w1.weight")
    sizes = rank, block.hidden_size, block.vocab_size, guessed
    return StoredPathHead(
        "DSpark",
        begins,
        lambda size: MarkovHead(cast(MarkovKind, kind), *sizes, begins),
        {
            "path_head.tokens": (f"{prefix}markov_w1",),
            "path_head.next": (f"{prefix}markov_w2",),
            "path_head.gate": (f"{prefix}gate_proj",),
            "path_head.joint": (f"{prefix}joint_proj",),
        },
        _cut(files, f"{prefix}markov_w2.weight", guessed),
    )


def _selector(files: DrafterFiles, options: Options, block: ModelSpec, begins: bool) -> StoredPathHead:
    prefix = "candidate_selector."
    if "d2t" in files.names:
        raise DrafterError(f"{files.path} is DFlash2 for a part of the vocabulary, which is not supported")
    tables = [f"{prefix}{name}_codebook" for name in ("predecessor", "successor")]
    tables = [table if table in files.names else f"{table}.weight" for table in tables]
    rank = _columns(files, f"{prefix}hidden_projection.weight", 0)
    count = int(options.get("selector_top_k", 16))
    return StoredPathHead(
        "DFlash2",
        begins,
        lambda size: CandidateSelector(rank, count, block.hidden_size, block.vocab_size),
        {
            "path_head.before.weight": (tables[0],),
            "path_head.after.weight": (tables[1],),
            "path_head.projection": (f"{prefix}hidden_projection",),
        },
    )


def _refiner(
    files: DrafterFiles, prefix: str, theirs: Names, block: ModelSpec, guessed: int, begins: bool
) -> StoredPathHead:
    rank = _columns(files, f"{prefix}in_proj.weight", 0)
    inner = _columns(files, f"{prefix}{theirs['down'][0]}.weight")
    own = {"own": ("down_h",), "mean": ("down_g",), "fuse": ("in_proj",), **theirs}
    names = {f"path_head.{ours}": tuple(prefix + name for name in names) for ours, names in own.items()}
    sizes = block.hidden_size, block.vocab_size, guessed
    return StoredPathHead(
        "xPress",
        begins,
        lambda size: CausalRefiner(rank, inner, size, *sizes, begins),
        names,
        _cut(files, f"{prefix}{theirs['next'][0]}.weight", guessed),
    )


def _cut(files: DrafterFiles, name: str, guessed: int) -> dict[str, Tensor]:
    """Without rows for padding of the vocabulary that the target does not have."""
    if "d2t" in files.names or name not in files.names or files.rows(name) <= guessed:
        return {}
    return {"path_head.next.weight": files.read(name)[:guessed]}


def _columns(files: DrafterFiles, name: str, axis: int = 1) -> int:
    """A size of a matrix. Raises `DrafterError` for other tensors."""
    shape = files.shape(name) if name in files.names else ()
    if len(shape) != 2:
        raise DrafterError(f"{files.path}: {name} is not a matrix; the file is damaged")
    return shape[axis]
