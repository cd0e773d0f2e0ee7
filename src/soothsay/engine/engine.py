"""The engine: one step at a time, every running request in it."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from soothsay.config import EngineConfig
from soothsay.core.answer import FinishReason, StepClock
from soothsay.core.batch import Rows
from soothsay.core.cache import BlockAllocator
from soothsay.core.engine_load import EngineLoad
from soothsay.core.request import Observation, Request, RequestDrafter
from soothsay.core.tree import DraftTree
from soothsay.core.turn import Turn
from soothsay.drafters.base import MisfitWatch, Target
from soothsay.drafters.learned_files import LearnedFiles
from soothsay.drafters.ops.native_draft_ops import draft_ops
from soothsay.engine.drafts import blaming, check_drafts
from soothsay.engine.guard import Guard
from soothsay.engine.pace import SLOW_MASK
from soothsay.engine.recovery import Recovery
from soothsay.engine.scheduler import Scheduler
from soothsay.engine.scoring import score
from soothsay.engine.sizing import num_snapshots
from soothsay.engine.snapshots import Snapshots
from soothsay.engine.verification import verify
from soothsay.errors import RequestError, StageError
from soothsay.model.timing.known_times import KnownTimes
from soothsay.model.timing.pass_times import PassTimes
from soothsay.model.transformer import Transformer
from soothsay.tokenizer import Tokenizer


class Output(NamedTuple):
    """What a forward pass of the target gives."""

    logits: Tensor  # [M, V] float32, of the trees' nodes
    taps: dict[int, Tensor]  # layer -> [N, hidden] float32: its input at all rows


class Engine:
    """Runs requests on a target model.

    Any thread may add, cancel and step. `lock` makes these calls exclude each other. In a forked process they
    raise `RuntimeError`, and so they do after `close`.

    Args:
        model: the target.
        tokenizer: for drafters that read text; None: there is none.
        config: with `kv_tokens` and `max_context` filled in.
        path: the directory that the model was loaded from, where its drafters are looked for.
        kept: files of what drafters have learned; None: it is not kept across restarts.

    Raises:
        ValueError: `config` has no `kv_tokens` or `max_context`.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        path: Path | None = None,
        kept: LearnedFiles | None = None,
    ):
        if config.kv_tokens is None or config.max_context is None:
            raise ValueError("an engine needs a configuration with kv_tokens and max_context filled in")
        self.model = model
        self.config, self.kept = config, kept
        num_blocks = config.kv_tokens // config.block_size
        self.allocator = BlockAllocator(num_blocks, config.block_size, share=config.prefix_caching)
        self.cache = model.new_cache(
            num_blocks,
            config.block_size,
            requests=config.max_requests,
            snapshots=num_snapshots(config, model),
            nodes=config.max_tree,
        )
        self._known_times, ops = KnownTimes(model, config.max_context), draft_ops(model.kernels, model.device)
        self.target = Target(model, tokenizer, config, num_blocks, path, self.cache, self._pass_times, ops)
        snapshots = Snapshots(self.cache.states, config.block_size, partial(model.copy_state, self.cache))
        self.scheduler = Scheduler(config, self.allocator, snapshots)
        self.recovery = Recovery(self.scheduler)
        self._used: WeakKeyDictionary[RequestDrafter, None] = WeakKeyDictionary()
        self._watches: WeakKeyDictionary[RequestDrafter, MisfitWatch] = WeakKeyDictionary()
        self._abandoned = deque[Request]()
        self._inference = torch.inference_mode()
        self.lock = Guard()

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        self.lock.check()
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def load(self) -> EngineLoad:
        """How many requests there are, and how much of the KV pool they hold."""
        with self.lock:
            usage = 1 - self.allocator.num_free / self.allocator.num_blocks
            return EngineLoad(len(self.scheduler.running), len(self.scheduler.waiting), usage)

    @property
    def decisions(self) -> Counter[str]:
        """How often each drafter was asked, where a controller chooses; see `Drafter.decisions`."""
        with self.lock:
            return sum((Counter(drafter.decisions) for drafter in list(self._used)), Counter[str]())

    def add(self, request: Request) -> None:
        """Put a request into the waiting line."""
        with self.lock:
            self._used[request.drafter] = None
            if self.kept is not None:
                self.kept.recall(request.drafter, request.tenant)
            self.scheduler.add(request)

    def save_learned(self) -> int:
        """Write what drafters have learned, and return the number of files; 0 if nothing is kept.

        Raises `DrafterError` if something cannot be written.
        """
        with self.lock:
            return 0 if self.kept is None else self.kept.save(list(self._used))

    def study(self) -> bool:
        """Let drafters learn from what waits, and measure a pass. Call it while there is nothing else to do.

        Returns whether more waits, which may be done some milliseconds later.
        """
        with self.lock:
            return sum([self._known_times.study(), *(drafter.study() for drafter in list(self._used))]) > 0

    def forget_learned(self) -> None:
        """Let the drafters forget what they have learned, and remove the files of it.

        Raises `RequestError` while there are requests.
        """
        with self.lock:
            if self.has_work:
                raise RequestError("drafters cannot forget while requests run; wait for them, or cancel them")
            for drafter in list(self._used):
                drafter.reset()
            if self.kept is not None:
                self.kept.clear()

    def cancel(self, request: Request, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request with its current text, and free its blocks. Does nothing if it has ended."""
        if request.finish_reason is not None:  # nothing to do, also after `close`
            return
        with self._unless_closed(request), self.lock:
            if request.finish_reason is None:
                request.finish_reason = reason
                self.scheduler.remove(request)

    def catch_up(self, request: Request, tokens: Sequence[int], *, ended: bool) -> None:
        """Add tokens that another engine has emitted to a request that waits or runs, see `Request.resume`.

        The next steps read them, and the request keeps its KV. Does nothing if it has ended.
        """
        with self.lock:
            if request.finish_reason is None:
                request.resume(tokens, ended=ended)
                if request.finish_reason is not None:
                    self.scheduler.remove(request)

    def abandon(self, request: Request) -> None:
        """Let the next step cancel a request. Never waits, so a garbage collector may call it at any time."""
        self._abandoned.append(request)

    def close(self) -> None:
        """End all requests, and let go of the model and the KV pool. Idempotent."""
        if self.lock.closed:
            return
        with self.lock:
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self.cancel(request)
            self.lock.closed = True
            del self.model, self.cache, self.target, self.scheduler, self.recovery, self._known_times

    def advance(self, request: Request) -> None:
        """Step until `request` has new tokens or has ended. One waiting thread steps for all of them."""
        while not request.pieces and request.finish_reason is None:
            with self._unless_closed(request), self.lock:
                if not request.pieces and request.finish_reason is None:
                    self.step()

    @contextmanager
    def _unless_closed(self, request: Request) -> Iterator[None]:
        """Leave the block without an error if `close` ended `request` while this thread waited."""
        try:
            yield
        except RuntimeError:
            if not self.lock.closed or request.finish_reason is None:
                raise

    def step(self) -> bool:
        """Run one pass over the weights for every request that has a turn in it.

        Returns whether that went well. If it raises an `Exception`, the next steps repeat it with one request
        at a time, see `Recovery`. A
        request that fails alone ends with the finish reason "error", and its `failure` has the exception.

        Raises `StageError` if a process with layers of the model has ended.
        """
        with self.lock, self._inference:
            while self._abandoned:
                self.cancel(self._abandoned.popleft())
            alone, turns, clock = self.recovery.alone, None, StepClock()
            try:
                turns = self.scheduler.schedule(alone)
                if turns:
                    self._run(turns, clock)
            except StageError:  # no request is to blame, and none can go on
                raise
            except Exception as error:
                self.recovery.failed(error, alone, turns)
                return False
            self.recovery.passed(alone, turns)
            return True

    def _pass_times(self) -> PassTimes:
        """The times of passes. They are measured briefly if nothing is known, and no request waits for it."""
        with self.lock:
            return self._known_times(may_measure=not self.has_work)

    def _run(self, turns: Sequence[Turn], clock: StepClock) -> None:
        """Run the stages of a step after `schedule`."""
        clock.end("host")
        groups: dict[RequestDrafter, list[Turn]] = {}
        for turn in turns:
            groups.setdefault(turn.request.drafter, []).append(turn)
        self._propose(groups)
        clock.end("draft")
        output = self._forward(turns, groups)
        clock.end("pass")
        self._verify(turns, output)
        clock.end("verify")
        self._commit(turns)
        clock.end("host")
        self._observe(groups, output)
        clock.end("draft")
        for turn in turns:
            if turn.request.traces is not None:
                turn.times = clock.times
        self.scheduler.update(turns)
        clock.end("host")

    def _propose(self, groups: Mapping[RequestDrafter, Sequence[Turn]]) -> None:
        """Set the draft trees of the turns that reach their request's end. Each drafter is asked once."""
        for drafter, turns in groups.items():
            if asked := [turn for turn in turns if turn.reaches_end]:
                requests = [turn.request for turn in asked]
                proposed = blaming(drafter, drafter.propose, requests)
                trees = check_drafts(drafter, proposed, requests, self.model.spec.vocab_size)
                for turn, tree in zip(asked, trees, strict=True):
                    turn.tree = _fitted(turn.request, tree)

    def _forward(self, turns: Sequence[Turn], drafters: Iterable[RequestDrafter]) -> Output:
        """Run the target over the rows of all turns."""
        row = node = 0
        rows: list[Rows] = []
        for turn in turns:
            request, tree, count = turn.request, turn.tree, turn.num_tokens
            size = 0 if tree is None else len(tree.tokens)
            turn.rows = slice(row, row := row + count + max(size - 1, 0))
            turn.nodes = slice(node, node := node + size)
            own = request.pending(count), request.cached, request.table, tree
            marks = tuple(request.marks)
            rows.append(Rows(*own, 1, 0, request.state, marks, request.adapter, request.num_source))
        layers = sorted({tap for drafter in drafters for tap in drafter.taps})
        batch = self.model.pack(rows, self.config.block_size)
        hidden, tapped, logits = self.model.run(batch, self.cache, taps=layers)
        score(turns, hidden, self.model)
        return Output(logits, dict(zip(layers, tapped, strict=True)))

    def _verify(self, turns: Sequence[Turn], output: Output) -> None:
        """Set the verdicts of the turns that have a tree."""
        verify(turns, output.logits, self.model.kernels.sampling)

    def _commit(self, turns: Sequence[Turn]) -> None:
        """Move the KV of accepted nodes next to the context, and advance states along them."""
        self.scheduler.mark_accepted(turns)
        decided = [turn for turn in turns if turn.verdict is not None]
        if moves := [turn.move for turn in decided if turn.accepted or turn.request.state is not None]:
            self.model.commit(self.cache, moves)

    def _observe(self, groups: Mapping[RequestDrafter, Sequence[Turn]], output: Output) -> None:
        """Show each drafter what its requests' turns brought, prefill chunks included."""
        for drafter, own in groups.items():
            seen: list[Observation] = []
            taps = tuple(map(output.taps.__getitem__, drafter.taps))
            are_whole = not taps or len(groups) == len(own) == 1
            for turn in own:
                features = taps if are_whole else tuple([tap[turn.rows] for tap in taps])
                read = turn.request, turn.request.cached, turn.num_tokens, features, turn.tree
                logits = None if turn.tree is None else output.logits
                seen.append(Observation(*read, logits, turn.verdict, turn.nodes))
            blaming(drafter, drafter.observe, seen)
            if drafter.trained:
                watch = self._watches.setdefault(drafter, MisfitWatch(drafter.name))
                for turn in own:
                    if turn.tree is not None and len(turn.tree) > 1:
                        watch.record(len(turn.accepted))


def _fitted(request: Request, tree: DraftTree) -> DraftTree:
    """Cut a tree to the nodes that the request's grammar, rows and length allow."""
    if request.constraint is not None and request.constraint.seconds > SLOW_MASK:
        return tree.prune(1, 0)  # one mask takes long enough
    if request.constraint is not None and not tree.draws:  # to cut drawn tokens would bias a verifier
        output = request.tokens[request.num_prompt :]
        tree = request.constraint.cut(output, tree, request.end_tokens)
    return tree if len(tree.tokens) == 1 else tree.prune(request.max_nodes, request.max_depth)
