"""`soothsay bench peers`: engines that run the same weights take turns.

Every engine, also ours, runs in a process of its own with the same number of threads. In each round each
engine decodes token by token, reads a prompt, and runs passes of several tokens as speculation needs them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path

import torch

from soothsay import ModelError, SoothsayError, Tokenizer
from soothsay.bench.bench_plans import PEERS, PeerPlan
from soothsay.bench.journal import Journal, short_hash
from soothsay.bench.measure import turns
from soothsay.bench.peers.engines.peer import Setup, UnavailableError
from soothsay.bench.peers.peer_process import PeerProcess
from soothsay.bench.peers.peer_results import (
    AGREEMENT,
    ANSWER,
    CONTEXT,
    OURS,
    PLAIN,
    PROMPT,
    VERIFIED,
    PeerRecord,
    PeerResults,
)
from soothsay.bench.peers.to_gguf import write_gguf
from soothsay.bench.prompts import PASSAGE, QUESTION, PromptEntry, encode_with, read_prompts, spread
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.weights.checkpoint import Checkpoint, open_checkpoint

GGUF_KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}

VERIFICATIONS = 5
"""Number of passes of one size in a round; the median counts."""

Progress = Callable[[str, int, int], None]
"""Called with the name of the current part, the steps of it that are done, and its number of steps."""


class PeerBench:
    """Measures what a plan says.

    Args:
        plan: what to measure.
        path: the file for results; an existing file is continued.
        progress: see `Progress`.

    Raises:
        SoothsayError: a peer is unknown, the plan does not fit the kind of model, the file is of another run,
            or an engine fails.
    """

    def __init__(self, plan: PeerPlan, path: Path | None = None, progress: Progress = lambda *_: None):
        self.plan, self.progress = plan, progress
        self.dtypes, self.peers = plan.dtypes or ["bfloat16"], plan.peers or PEERS
        self.threads = plan.threads or torch.get_num_threads()
        if unknown := {*self.peers, *filter(None, plan.interpreters)} - {*PEERS}:
            raise SoothsayError(
                f"no peer is named {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}"
            )
        self.checkpoint = open_checkpoint(plan.model)
        self.is_file = self.checkpoint.path.is_file()
        self._check_kind()
        config, tokenizer = parse_model_config(self.checkpoint.config), self.checkpoint.tokenizer()
        text = tokenizer.encode(f"{QUESTION} {PASSAGE}") if tokenizer else range(1, config.vocab_size)
        self.ids = list(islice(cycle(text), PROMPT))
        self.notes: list[str] = []
        """What could not be measured, and why."""

        every = [] if plan.questions is None else list(_questions(plan, tokenizer))
        self.questions = [one for one in every if len(one[1]) + plan.max_tokens <= config.max_positions]
        """Prompts to which engines give whole answers, and their token ids."""

        if left := len(every) - len(self.questions):
            self.notes.append(
                f"{left} of {len(every)} prompts left out: with {plan.max_tokens} tokens to answer they are "
                f"longer than the model's context of {config.max_positions}"
            )
        longest = max((len(ids) for _, ids in self.questions), default=0) + plan.max_tokens
        needed = max(CONTEXT + plan.tokens + 1, PROMPT + 1, CONTEXT + max(VERIFIED), longest)
        self.context = -(-needed // 64) * 64  # a multiple of every engine's block size
        self.folder = plan.work / f"{self.checkpoint.path.resolve().name}-{_digest(self.checkpoint)}"
        names = "tokens", "max_tokens", "lookup_tokens", *(["draft_model"] if plan.draft_model else [])
        conditions = {"model": str(self.checkpoint.path.resolve()), "threads": self.threads}
        conditions |= {name: getattr(plan, name) for name in names}
        self.results = PeerResults(Journal(conditions, path))

    def _check_kind(self) -> None:
        """Raise `SoothsayError` if the plan asks for what there is only for the other kind of model."""
        path, plan = self.checkpoint.path, self.plan
        if self.is_file:
            if other := [dtype for dtype in self.dtypes if dtype != "auto"]:
                raise SoothsayError(
                    f"{path}: engines run a GGUF file as it is, and not in {', '.join(other)}"
                )
        elif not path.is_dir():
            raise ModelError(f"{path} is no Hugging Face directory and no GGUF file, which the peers need")
        elif "auto" in self.dtypes:
            raise SoothsayError("engines are compared at equal weights; name their element type")
        if plan.draft_model and not (self.is_file and Path(plan.draft_model).is_file()):
            raise SoothsayError(f"a draft model is a GGUF file beside another one; {plan.draft_model} is not")

    def run(self) -> PeerResults:
        """Measure what is not in the file yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for dtype in self.dtypes:
            with ExitStack() as stack:
                engines = []
                for name in (OURS, *self.peers):
                    self.progress(f"{dtype}: loading {name}", 0, 0)
                    try:
                        engine = stack.enter_context(self._client(name, dtype))
                        self._load(engine, dtype)
                    except UnavailableError as reason:
                        self.notes.append(f"{name}, {dtype}: {reason}")
                    else:
                        engines.append(engine)
                self._rounds(engines, dtype)
                self._answers(engines, dtype)
        return self.results

    def _client(self, name: str, dtype: str) -> PeerProcess:
        plan, pythons = self.plan, self.plan.interpreters
        python = sys.executable if name == OURS else pythons.get(name, pythons.get("", sys.executable))
        model, export = str(self.checkpoint.path.resolve()), str(self._export(name, dtype))
        draft_model = plan.draft_model and str(Path(plan.draft_model).resolve())
        speculation = plan.lookup_tokens, plan.drafter, draft_model
        setup = Setup(model, dtype, self.threads, self.context, export, *speculation)
        return PeerProcess(name, setup, python, self.folder / f"{name}-{dtype}.log")

    def _export(self, name: str, dtype: str) -> Path:
        if self.is_file and name == "llama.cpp":
            return self.checkpoint.path.resolve()
        suffix = ".gguf" if name == "llama.cpp" else ""
        return self.folder.resolve() / f"{name}-{dtype}{suffix}"

    def _load(self, engine: PeerProcess, dtype: str) -> None:
        if engine.name == "llama.cpp" and not self.is_file:
            if dtype not in GGUF_KINDS:
                raise UnavailableError(f"llama.cpp has no {dtype}; it has {', '.join(GGUF_KINDS)}")
            path = self._export(engine.name, dtype)
            if not path.is_file():
                write_gguf(self.checkpoint, path, GGUF_KINDS[dtype])
        engine.load()

    def _rounds(self, engines: Sequence[PeerProcess], dtype: str) -> None:
        """Measure steps, prompts and passes. The first round warms up and is not counted."""
        steps = len(engines) * (self.plan.rounds + 1)
        for done, (number, engine) in enumerate(turns(engines, self.plan.rounds + 1)):
            self.progress(f"{dtype}: rounds", done, steps)
            for measure in ("decode", "prompt", *(f"verify {rows}" for rows in VERIFIED)):
                missing = any(
                    (measure, dtype, engine.name, PLAIN, str(item)) not in self.results
                    for item in ([number] if number else range(1, self.plan.rounds + 1))
                )
                if missing and (record := self._measure(engine, dtype, measure, number)) and number:
                    self.results.add(record)
        self.progress(f"{dtype}: rounds", steps, steps)

    def _measure(self, engine: PeerProcess, dtype: str, measure: str, number: int) -> PeerRecord | None:
        output, start = list[int](), 16 * number % (PROMPT - CONTEXT)  # another context each round
        context = self.ids[start : start + CONTEXT]
        if measure == "decode":
            tokens = self.plan.tokens
            seconds, output = engine.decode(context, tokens)
        elif measure == "prompt":
            tokens, seconds = len(self.ids), engine.prompt(self.ids)
        else:
            tokens = int(measure.split()[1])
            passes = engine.verify(context, tokens, VERIFICATIONS)
            if passes is None:
                return None
            seconds = statistics.median(passes)
        kind = measure, dtype, engine.name, PLAIN, str(number)
        return PeerRecord(*kind, seconds, tokens, engine.version, output=output[:AGREEMENT])

    def _answers(self, engines: Sequence[PeerProcess], dtype: str) -> None:
        """Measure whole answers to every question, by every engine in each of its modes."""
        contestants = [(engine, mode) for engine in engines for mode in engine.modes]
        warm, impossible = set[tuple[str, str]](), set[tuple[str, str]]()
        steps = len(self.questions) * len(contestants)
        for done, (number, (engine, mode)) in enumerate(turns(contestants, len(self.questions))):
            self.progress(f"{dtype}: answers", done, steps)
            question, ids = self.questions[number]
            own = engine.name, mode
            kind = ANSWER, dtype, *own, question.id
            if own in impossible or kind in self.results:
                continue
            if own not in warm:
                try:
                    engine.generate(self.ids, 16, mode)
                except UnavailableError as reason:
                    impossible.add(own)
                    self.notes.append(f"{engine.name}, {dtype}, {mode}: {reason}")
                    continue
                warm.add(own)
            seconds, output = engine.generate(ids, self.plan.max_tokens, mode)
            what, made = (*kind, seconds, len(output), engine.version), output[:AGREEMENT]
            self.results.add(PeerRecord(*what, question.task, made))
        if steps:
            self.progress(f"{dtype}: answers", steps, steps)


def _questions(plan: PeerPlan, tokenizer: Tokenizer | None) -> Iterator[tuple[PromptEntry, list[int]]]:
    """Yield `per_task` prompts of each task, evenly spread over the file.

    The tasks take turns, so that an interrupted run has prompts of all tasks.
    """
    if tokenizer is None or plan.questions is None:
        raise ModelError(f"{plan.model} has no tokenizer, and the prompts are text")
    tasks: dict[str, list[PromptEntry]] = {}
    for entry in read_prompts(plan.questions):
        tasks.setdefault(entry.task, []).append(entry)
    chosen = [spread(entries, plan.per_task) for entries in tasks.values()]
    for entry in filter(None, chain.from_iterable(zip_longest(*chosen))):
        yield entry, encode_with(tokenizer, entry)


def _digest(checkpoint: Checkpoint) -> str:
    """Return a hash of a checkpoint's path and files, so that a changed model gets another export."""
    every = checkpoint.path.iterdir() if checkpoint.path.is_dir() else [checkpoint.path]
    files = sorted(file for file in every if file.suffix in (".json", ".safetensors", ".gguf"))
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return short_hash(repr((str(checkpoint.path.resolve()), facts)))
