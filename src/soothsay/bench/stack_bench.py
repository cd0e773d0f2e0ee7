"""`soothsay bench stack`: each rung adds one thing to the rung before, and all rungs take turns."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from soothsay import LLM, Drafter, EngineConfig, SamplingParams, Tokenizer
from soothsay.bench.bench_plans import StackPlan
from soothsay.bench.journal import conditions, short_hash
from soothsay.bench.measure import Meter, Progress, turns
from soothsay.bench.peers.engines.peer import Setup, UnavailableError
from soothsay.bench.peers.peer_process import PeerProcess
from soothsay.bench.prompts import PASSAGE, TOPICS, encode, read_prompts, spread
from soothsay.bench.running import answer_of, running
from soothsay.bench.stack_results import PEER, PLAIN, Rung, StackResults, StackRun
from soothsay.config import DType
from soothsay.core.tenant import Tenant
from soothsay.corpus import PromptEntry
from soothsay.drafters.registry import build_drafter
from soothsay.errors import ModelError, RequestError, SoothsayError
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config

Ids = list[int]


@dataclass(frozen=True)
class Theirs:
    """transformers, one prompt at a time, in a process that measures the time. See `Ours`."""

    process: PeerProcess
    at_once: int = 1

    def answer(self, prompts: Sequence[Ids], tokens: int, run: int) -> tuple[float, list[Ids]]:
        """See `Ours`. It remembers nothing."""
        seconds, answer = self.process.call("generate", prompts[0], tokens, "plain")
        return seconds, [answer]


@dataclass(frozen=True)
class Ours:
    """Our engine. It answers prompts greedily, with a fixed number of tokens.

    The drafter forgets earlier prompts before each group. Each run has a tenant of its own, so that the
    prefix cache, if the engine has one, is empty when the run begins.
    """

    llm: LLM  # without other requests
    drafter: Drafter
    at_once: int = 1  # requests in a group

    def answer(self, prompts: Sequence[Ids], tokens: int, run: int) -> tuple[float, list[Ids]]:
        """Answer at most `at_once` prompts together, in run number `run`.

        Returns the seconds, and the tokens of each answer. Raises `SoothsayError` if the engine fails.
        """
        engine, params = self.llm.engine, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        asked, tenant = [(prompt, params) for prompt in prompts], Tenant("stack", str(run))
        self.drafter.reset()
        begin = time.perf_counter()
        with running(self.llm, asked, drafter=self.drafter, tenant=tenant) as requests:
            while engine.has_work:
                engine.step()
        return time.perf_counter() - begin, [answer_of(request) for request in requests]


INTEGERS, SPECULATION = "integers", "speculation"
UNCACHED, CACHED = "prefix without cache", "prefix cache"
"""Names of rungs, besides those in `stack_results`."""

AT_ONCE = (4, 16)
"""Numbers of requests at once, one rung each."""

WARM_UP_TOKENS = 16
"""Tokens of the answers before the first round. They allocate memory, and teach `auto` what things cost."""


class StackBench:
    """Measures what a plan says. Use it as a context: transformers runs in a process, which must end.

    Args:
        plan: what to measure.
        path: the file for results; an existing file with the same conditions is continued.
        progress: see `Progress`.

    Attributes:
        notes: what a reader of the results must know.

    Raises:
        ModelError: the model cannot be loaded, or has no tokenizer.
        RequestError: too few prompts fit into the model's context.
        SoothsayError: the file is of another run.
    """

    def __init__(self, plan: StackPlan, path: Path | None = None, progress: Progress = lambda *_: None):
        self.plan, self.notes = plan, list[str]()
        self._meter = Meter(progress)
        self._checkpoint = open_checkpoint(plan.model)
        tokenizer = self._checkpoint.tokenizer()
        if tokenizer is None:
            raise ModelError(f"{plan.model} has no tokenizer, and the prompts are text")
        most = read_model_config(self._checkpoint).max_positions - EngineConfig.max_tree
        room = most - plan.prefix - plan.tokens
        self.prompts = choose_prompts(plan, tokenizer, room)
        shared = list(islice(cycle(tokenizer.encode(PASSAGE)), plan.prefix))
        self.long_prompts = [shared + prompt for prompt in self.prompts]
        longest = max(map(len, self.long_prompts)) + plan.tokens
        size = EngineConfig.block_size  # the KV pool has whole blocks, and room for a tree after the answer
        self.context = -(-(longest + EngineConfig.max_tree) // size) * size
        with ExitStack() as stack:
            self._contenders = dict(self._build(stack))
            self.results = StackResults([*self._contenders], self._conditions(), path)
            self._stack = stack.pop_all()

    def __enter__(self) -> StackBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> StackResults:
        """Measure what is not in the file yet.

        Raises `SoothsayError` if our engine gives other answers with speculation, in a batch, or with the
        prefix cache.
        """
        plan, rungs = self.plan, [*self._contenders]
        self._meter.total = len(rungs) * plan.rounds * plan.requests
        self._meter.advance()
        for rung, contender in self._contenders.items():
            contender.answer(self._prompts(rung)[: contender.at_once], min(plan.tokens, WARM_UP_TOKENS), 0)
        for number, rung in turns(rungs, plan.rounds):
            if (rung.name, number + 1) in self.results:
                self._meter.advance(plan.requests)
            else:
                self.results.add(self._run(rung, number + 1))
        return self.results

    def _run(self, rung: Rung, number: int) -> StackRun:
        contender, prompts = self._contenders[rung], self._prompts(rung)
        seconds, answers = 0.0, list[Ids]()
        for first in range(0, len(prompts), contender.at_once):
            group = prompts[first : first + contender.at_once]
            taken, found = contender.answer(group, self.plan.tokens, number)
            seconds += taken
            answers += found
            self._meter.advance(len(found), sum(map(len, found)))
        return StackRun(rung.name, number, seconds, answers)

    def _prompts(self, rung: Rung) -> list[Ids]:
        return self.long_prompts if rung.name in (UNCACHED, CACHED) else self.prompts

    def _build(self, stack: ExitStack) -> Iterator[tuple[Rung, Theirs | Ours]]:
        """Load the models, and yield the rungs from the lowest on."""
        plan, stored = self.plan, self._checkpoint.weight_format()
        config = EngineConfig(max_requests=1, max_context=self.context, prefix_caching=False)
        floats = LLM(plan.model, drafter="none", dtype="bfloat16", kernels=plan.kernels, config=config)
        dtype = str(floats.model.dtype).removeprefix("torch.")
        peer = self._peer(stack, dtype) if plan.peer else None
        if peer is not None:
            yield Rung(PEER, f"{PEER} {peer.version.split(',')[0]}, {dtype}"), Theirs(peer)
        none = build_drafter("none", floats.engine.target)
        yield Rung(PLAIN, f"soothsay, {dtype}", PEER if peer else ""), Ours(floats, none)

        batches = [number for number in AT_ONCE if number <= plan.requests]
        for number in AT_ONCE[len(batches) :]:
            self.notes.append(f"{number} requests at once were left out: there are {plan.requests}.")
        most = max(batches, default=1)
        config = replace(config, max_requests=most)
        own: DType = "auto" if stored else plan.integers
        llm = LLM(plan.model, drafter="none", dtype=own, kernels=plan.kernels, config=config)
        rung = Rung(INTEGERS, f"integers: {stored.name if stored else plan.integers}", PLAIN)
        yield rung, Ours(llm, build_drafter("none", llm.engine.target))
        drafter = build_drafter(plan.drafter, llm.engine.target)
        yield Rung(SPECULATION, f"speculation: {plan.drafter}", INTEGERS, INTEGERS), Ours(llm, drafter)
        below = SPECULATION
        for number in batches:
            rung = Rung(f"{number} at once", f"{number} requests at once", below, INTEGERS)
            yield rung, Ours(llm, drafter, number)
            below = rung.name
        title = f"without the cache, {plan.prefix:,} shared tokens"
        yield Rung(UNCACHED, title), Ours(llm, drafter, most)
        cached = LLM(llm.model, drafter="none", config=replace(config, prefix_caching=True))
        target = replace(cached.engine.target, tokenizer=llm.tokenizer, path=self._checkpoint.path)
        rung = Rung(CACHED, f"prefix cache, {plan.prefix:,} shared tokens", UNCACHED, UNCACHED)
        yield rung, Ours(cached, build_drafter(plan.drafter, target), most)

    def _peer(self, stack: ExitStack, dtype: str) -> PeerProcess | None:
        """Start transformers, or note why it does not take part."""
        model = str(self._checkpoint.path.resolve())
        setup = Setup(model, dtype, threads=torch.get_num_threads(), context=self.context)
        with tempfile.NamedTemporaryFile(prefix="soothsay-stack-", suffix=".log", delete=False) as file:
            log = Path(file.name)
        with ExitStack() as own:
            try:
                peer = own.enter_context(PeerProcess(PEER, setup, sys.executable, log))
                peer.call("load")
            except (UnavailableError, SoothsayError) as reason:
                self.notes.append(f"transformers was left out: {reason}")
                if isinstance(reason, UnavailableError):
                    log.unlink()  # other reasons name it
                return None
            stack.callback(log.unlink)
            stack.enter_context(own.pop_all())
        return peer

    def _conditions(self) -> dict[str, Any]:
        return conditions(
            *(self.plan, "model", "requests", "tokens", "prefix", "kernels"),
            rungs={rung.name: rung.title for rung in self._contenders},
            prompts_digest=short_hash(repr(self.long_prompts)),
            threads=torch.get_num_threads(),
        )


def choose_prompts(plan: StackPlan, tokenizer: Tokenizer, room: int) -> list[Ids]:
    """The prompts of a plan with at most `room` tokens, evenly spread over the file's categories.

    Raises `RequestError` if there are fewer than `plan.requests`.
    """
    entries: Sequence[PromptEntry]
    if plan.prompts is not None:
        entries = read_prompts(plan.prompts)
    else:
        asked = (f"Tell me a story about {topic}." for topic in TOPICS.split())
        entries = [PromptEntry(({"role": "user", "content": text},)) for text in asked]
    fitting = [entry for entry in entries if len(encode(entry, tokenizer)) <= room]
    if len(fitting) < plan.requests:
        raise RequestError(
            f"{len(fitting)} of {len(entries)} prompts fit into the model's context beside {plan.prefix} "
            f"shared tokens and an answer of {plan.tokens}; {plan.requests} are needed. Ask for fewer "
            "requests or a shorter prefix, or give a file with more prompts"
        )
    return [encode(entry, tokenizer) for entry in spread(fitting, plan.requests)]
