"""`soothsay bench equality`: does speculation, or a batch, change the words of greedy answers?

Each engine answers every prompt by its own plain decoding, with each of its kinds of speculation, and in
batches. Its answers are compared with those of its own plain decoding, one prompt at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from soothsay.bench.bench_plans import EqualityPlan
from soothsay.bench.peers.engine_bench import EngineBench
from soothsay.bench.peers.engines.peer import UnavailableError
from soothsay.bench.peers.equality_results import AGAIN, AnswerRecord, EqualityResults
from soothsay.bench.peers.peer_process import PeerProcess
from soothsay.bench.peers.peer_results import OURS, PLAIN
from soothsay.core.batch import Rows
from soothsay.corpus import PromptEntry
from soothsay.model.transformer import Transformer
from soothsay.model.weights.load import load_model
from soothsay.progress import tell_progress

BATCHES = (4, 16)
"""Numbers of prompts in a batch."""

TYPES = ("bfloat16", "float16", "float32")

Asked = tuple[PromptEntry, list[int]]
"""A prompt, and its token ids."""


class EqualityBench(EngineBench):
    """Collects the answers that a plan asks for, engine by engine. Arguments and errors are `PeerBench`'s."""

    def __init__(self, plan: EqualityPlan, path: Path | None = None):
        super().__init__(plan)
        known = self.checkpoint.eos_ids
        self.ends = {*(self.tokenizer.end_ids(known) if self.tokenizer else known)}
        self.results = EqualityResults(self.conditions, path)
        self._exact: Transformer | None = None

    def run(self) -> EqualityResults:
        """Collect the answers that are not in the file yet."""
        types = self.options.dtypes or TYPES
        for name in (OURS, *self.peers):
            for dtype in types if name == "transformers" or not self.is_file else ("auto",):
                try:
                    with self.client(name, dtype) as engine:
                        self._collect(engine, dtype)
                except UnavailableError as reason:
                    self.notes.append(f"{name}, {dtype}: {reason}")
        return self.results

    def _collect(self, engine: PeerProcess, dtype: str) -> None:
        """Let an engine answer in each of its ways."""
        missing = [
            (mode, batch, group)
            for mode, batch in _ways(engine)
            for group in _groups(self.questions, batch)
            if any(((engine.name, dtype, mode, batch), one.id) not in self.results for one, _ in group)
        ]
        if missing:
            engine.call("load")
        impossible = set[str]()
        for done, (mode, batch, group) in enumerate(missing):
            tell_progress(f"{engine.name}, {dtype}: {mode}, batch of {batch}", done, len(missing))
            prompts = [ids for _, ids in group]
            if mode in impossible:
                continue
            try:
                asked = PLAIN if mode == AGAIN else mode
                answers = engine.call("answers", prompts, self.options.max_tokens, asked)
            except UnavailableError as reason:
                impossible.add(mode)
                self.notes.append(f"{engine.name}, {dtype}, {mode}: {reason}")
                continue
            way = engine.name, dtype, mode, batch
            for (entry, ids), answer in zip(group, answers, strict=True):
                tokens = self._until_end(answer)
                margins = self._margins(ids, tokens) if (mode, batch) == (PLAIN, 1) else []
                self.results.add(AnswerRecord(*way, entry.id, entry.task, tokens, margins, engine.version))

    def _until_end(self, answer: list[int]) -> list[int]:
        """Cut an answer after its first end token. Most engines do not stop there."""
        end = next((i for i, token in enumerate(answer) if token in self.ends), len(answer))
        return answer[: end + 1]

    @torch.no_grad()
    def _margins(self, prompt: list[int], answer: list[int]) -> list[float]:
        """How much likelier the likeliest token is than the second, at each token, in float32."""
        if self._exact is None:
            self._exact = load_model(self.checkpoint, "float32")
        rows = Rows(torch.tensor([*prompt, *answer]).numpy(), 0)
        hidden, _ = self._exact(self._exact.pack([rows]))
        best = self._exact.logits(hidden[len(prompt) - 1 : -1]).float().topk(2).values
        return [round(margin, 5) for margin in (best[:, 0] - best[:, 1]).tolist()]


def _ways(engine: PeerProcess) -> Iterator[tuple[str, int]]:
    """The modes of an engine and the batches, plain decoding first. Only ours speculates in batches."""
    yield from ((mode, 1) for mode in (PLAIN, AGAIN, *engine.modes[1:]) if engine.modes)
    for batch in BATCHES:
        yield from ((mode, batch) for mode in (engine.modes if engine.name == OURS else engine.modes[:1]))


def _groups(questions: Sequence[Asked], size: int) -> Iterator[Sequence[Asked]]:
    yield from (questions[i : i + size] for i in range(0, len(questions), size))
