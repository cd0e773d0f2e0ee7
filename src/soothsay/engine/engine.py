"""The engine: one step at a time, every running request in it."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.drafters.base import Drafter, Observation, Target
from soothsay.engine.answer import FinishReason, StepTrace, TokenLogprobs
from soothsay.engine.batch import Batch, Rows
from soothsay.engine.cache import BlockAllocator, Move
from soothsay.engine.request import Request
from soothsay.engine.sampling import VERIFYING, Keyed, Nodes, best_tokens, perturb
from soothsay.engine.scheduler import Scheduler, Share
from soothsay.engine.timing import StepTimes
from soothsay.engine.tree import DraftTree
from soothsay.engine.verify import Evidence, Verdict, Walk
from soothsay.engine.watch import Watch
from soothsay.model.transformer import Transformer
from soothsay.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one forward pass gave."""

    batch: Batch
    logits: Tensor  # [M, V]
    verdicts: list[Verdict | None]  # of each share
    authors: list[dict[int, str]]  # of each share: node -> who guessed it, of those that anyone asks for
    taps: dict[int, Tensor]  # layer -> [N, hidden]


class Engine:
    """Runs requests on a target model. Any thread may add, cancel and step; steps exclude each other."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        path: Path | None = None,
    ):
        if config.kv_tokens is None or config.max_context is None:
            raise ValueError("an engine needs a configuration with kv_tokens and max_context filled in")
        self.model = model
        self.config = config
        num_blocks = config.kv_tokens // config.block_size
        self.allocator = BlockAllocator(num_blocks, config.block_size, share=config.prefix_caching)
        self.cache = model.new_cache(num_blocks, config.block_size)
        times = cache(partial(StepTimes.of, model, config.max_context))
        self.target = Target(model, tokenizer, config, num_blocks, path, self.cache, times)
        self.scheduler = Scheduler(
            config, self.allocator, on_evict=lambda request: request.drafter.release(request)
        )
        self._watched: WeakKeyDictionary[Drafter, Watch] = WeakKeyDictionary()
        self._lock = threading.RLock()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def add(self, request: Request) -> None:
        """Put a request in the line."""
        with self._lock:
            self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request where it is; its blocks are free at once."""
        with self._lock:
            if request.finish_reason is None:
                request.finish_reason = FinishReason.CANCELLED
                self.scheduler.remove(request)

    def advance(self, request: Request) -> None:
        """Step until `request` has news. Whoever waits steps for all; the others find theirs done."""
        while not request.pieces and request.finish_reason is None:
            with self._lock:
                if not request.pieces and request.finish_reason is None:
                    self.step()

    @torch.inference_mode()
    def step(self) -> None:
        """One pass over the weights for every request that has a share in it."""
        with self._lock:
            shares = self.scheduler.next()
            if not shares:
                return
            begin = time.perf_counter()
            trees = self._propose(shares)
            done = self._forward(shares, trees)
            self._commit(shares, done.verdicts)
            self._observe(shares, trees, done)
            self._update(shares, trees, done)
            self.scheduler.pace.follow(len(done.batch.tokens), time.perf_counter() - begin)

    def _propose(self, shares: Sequence[Share]) -> list[DraftTree | None]:
        """Trees for the shares that reach their request's end, each drafter asked once."""
        groups: dict[Drafter, list[Request]] = defaultdict(list)
        for share in shares:
            if share.reaches_end:
                groups[share.request.drafter].append(share.request)
        trees: dict[Request, DraftTree] = {}
        for drafter, requests in groups.items():
            for request, tree in zip(requests, drafter.propose(requests), strict=True):
                if request.constraint is not None and not tree.draws:  # cutting draws would bias a verifier
                    output = request.tokens[request.num_prompt :]
                    tree = request.constraint.cut(output, tree, request.end_tokens)
                trees[request] = tree.prune(request.max_nodes, max(request.max_depth, 0))
        return [trees.get(share.request) for share in shares]

    def _forward(self, shares: Sequence[Share], trees: Sequence[DraftTree | None]) -> _Pass:
        rows = [
            Rows(
                tokens=share.request.tokens[share.request.cached :][: share.num_tokens],
                start=share.request.cached,
                table=share.request.table,
                tree=tree,
            )
            for share, tree in zip(shares, trees, strict=True)
        ]
        batch = self.pack(rows)
        taps = sorted({tap for share in shares for tap in share.request.drafter.taps})
        hidden, tapped = self.model(batch, self.cache, taps=taps)
        logits = self.model.logits(hidden.index_select(0, batch.logit_rows))
        verdicts = _verify(shares, trees, batch.spans, logits)
        authors = [_authors(*each) for each in zip(shares, trees, verdicts, strict=True)]
        return _Pass(batch, logits, verdicts, authors, dict(zip(taps, tapped, strict=True)))

    def pack(self, rows: Sequence[Rows]) -> Batch:
        """Lay out a pass of the target."""
        c = self.model.config
        return Batch.pack(
            rows,
            block_size=self.config.block_size,
            group=c.group,
            windows=c.windows,
            device=self.model.device,
        )

    def _commit(self, shares: Sequence[Share], verdicts: Sequence[Verdict | None]) -> None:
        """Move accepted nodes' KV next to the context."""
        moves = []
        for share, verdict in zip(shares, verdicts, strict=True):
            if verdict is not None and verdict.path:
                root = share.request.cached + share.num_tokens - 1
                moves.append(Move(share.request.table, [root + node for node in verdict.path], root + 1))
        self.cache.commit(moves)

    def _observe(self, shares: Sequence[Share], trees: Sequence[DraftTree | None], done: _Pass) -> None:
        groups: dict[Drafter, list[Observation]] = defaultdict(list)
        first = 0
        for share, tree, verdict, (begin, end) in zip(
            shares, trees, done.verdicts, done.batch.spans, strict=True
        ):
            request = share.request
            count = share.num_tokens + (0 if tree is None else len(tree) - 1)
            groups[request.drafter].append(
                Observation(
                    request,
                    start=request.cached,
                    num_pending=share.num_tokens,
                    taps=tuple(done.taps[tap][first : first + count] for tap in request.drafter.taps),
                    tree=tree,
                    logits=None if tree is None else done.logits[begin:end],
                    verdict=verdict,
                )
            )
            first += count
        for drafter, observations in groups.items():
            drafter.observe(observations)

    def _update(self, shares: Sequence[Share], trees: Sequence[DraftTree | None], done: _Pass) -> None:
        """Append what was emitted, register full blocks, and let go of those that have ended."""
        for share, tree, verdict, authors, (begin, end) in zip(
            shares, trees, done.verdicts, done.authors, done.batch.spans, strict=True
        ):
            request, size = share.request, self.config.block_size
            known = request.cached // size
            request.cached += share.num_tokens
            if tree is not None and verdict is not None:
                guessed_by = [authors[node] for node in verdict.path]
                logprobs = _logprobs(request, done.logits[begin:end], [0, *verdict.path], verdict.tokens)
                emitted = request.emit(verdict.tokens, guessed_by, logprobs)
                request.cached += len(verdict.path)
                request.stats.record(len(tree) - 1, max(tree.depths), guessed_by[:emitted], emitted)
                if request.traces is not None:
                    request.traces.append(_trace(tree, verdict, authors))
                if len(tree) > 1 and request.drafter.trained:
                    self._watched.setdefault(request.drafter, Watch()).see(request.drafter, len(verdict.path))
            if request.finish_reason is not None:
                request.cached = min(request.cached, len(request.tokens))
            for block in range(known, request.cached // size):
                self.allocator.register(request.blocks[block], request.digest(block))
            if request.finish_reason is not None:
                self.scheduler.remove(request)


def _verify(
    shares: Sequence[Share],
    trees: Sequence[DraftTree | None],
    spans: Sequence[tuple[int, int]],
    logits: Tensor,
) -> list[Verdict | None]:
    """What the target makes of each tree: all verifiers go on together, each with the nodes it asks for."""
    verdicts: list[Verdict | None] = [None] * len(shares)
    open_: list[tuple[int, Walk, Nodes]] = []
    for index, (share, tree) in enumerate(zip(shares, trees, strict=True)):
        if tree is not None:
            request = share.request
            walk = request.params.rule.verify(tree, Keyed(request.seed, VERIFYING, len(request.tokens)))
            open_.append((index, walk, Nodes(request, tree, next(walk))))
    while open_:
        rows = [spans[index][0] + node for index, _, nodes in open_ for node in nodes.indices]
        scores = perturb(_rows(logits, rows), [nodes for *_, nodes in open_])
        draws = best_tokens(scores)
        still, begin = [], 0
        for index, walk, nodes in open_:
            end = begin + len(nodes.indices)
            try:
                wanted = walk.send(Evidence(draws[begin:end], scores[begin:end]))
                still.append((index, walk, replace(nodes, indices=wanted)))
            except StopIteration as ended:
                verdicts[index] = ended.value
            begin = end
        open_ = still
    return verdicts


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Some rows; a view where they follow each other."""
    if rows == [*range(rows[0], rows[0] + len(rows))]:
        return logits[rows[0] : rows[-1] + 1]
    return logits[torch.tensor(rows, device=logits.device)]


def _authors(share: Share, tree: DraftTree | None, verdict: Verdict | None) -> dict[int, str]:
    """Who guessed the accepted nodes of a tree; if the request is traced, of all its nodes.

    It has to be asked before the step is observed, for then drafters forget what they have proposed.
    """
    if tree is None or verdict is None:
        return {}
    nodes = verdict.path if share.request.traces is None else range(1, len(tree))
    if not nodes:
        return {}
    return dict(zip(nodes, share.request.drafter.authors(share.request, tree, nodes), strict=True))


def _trace(tree: DraftTree, verdict: Verdict, authors: Mapping[int, str]) -> StepTrace:
    return StepTrace(
        tokens=[*tree.tokens],
        parents=[*tree.parents],
        authors=[authors.get(node) for node in range(len(tree))],
        path=[*verdict.path],
        bonus=verdict.tokens[-1],
    )


def _logprobs(
    request: Request, logits: Tensor, nodes: Sequence[int], tokens: Sequence[int]
) -> list[TokenLogprobs] | None:
    """The model's own log-probabilities of the emitted tokens, each at the node before it."""
    count = request.params.logprobs
    if count is None:
        return None
    logprobs = logits[list(nodes)].log_softmax(-1)  # [emitted, V]
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(count, dim=-1)
    return [
        TokenLogprobs(token, logprob, dict(zip(top_ids, top_values, strict=True)))
        for token, logprob, top_ids, top_values in zip(
            tokens, chosen, ids.tolist(), values.tolist(), strict=True
        )
    ]
