"""What a stage of the device script works with: where it runs, how long it may, models, and clocks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from soothsay import LLM
from soothsay.bench.grow import grow
from soothsay.bench.grown_tensors import GrownShape
from soothsay.bench.measure import turns
from soothsay.bench.random_models import LlamaShape, RandomCheckpoint
from soothsay.config import DType
from soothsay.model.gpu.gpu_kernels import GpuKernels
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint, read_model_config
from soothsay.model.weights.load import load_model

Numbers = Iterator[tuple[str, Any]]
"""What a stage yields: names, each with a number, or a mapping, or a function that measures it. A function
that raises costs its own number only. False means that something is not as it must be."""

TINY = LlamaShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=128)
LLAMAS = {
    "1B": LlamaShape(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128_256),
    "8B": LlamaShape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=128_256),
}
"""The sizes of Llama 3.2 1B and Llama 3.1 8B; both with a head of their own here."""

GROWN_TINY = "layers=9"
"""The shape to which models grow in a dry run."""


@dataclass(frozen=True)
class Job:
    """What one stage may use."""

    out: Path  # a folder for results
    work: Path  # a folder for large files, which stages share
    seconds: float  # limit of its time
    dry: bool  # whether it runs on a CPU, in sizes that only show that it runs
    model: str  # a real model with a trained head: a path, or a name that `LLM` takes
    questions: Path | None = None  # those of Spec-Bench; None: questions of our own
    begin: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.begin + self.seconds - time.monotonic()

    @property
    def device(self) -> torch.device:
        """Where models run."""
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Element types of weights."""
        return ("bfloat16", "int4") if self.dry else ("bfloat16", "int8", "int4")

    def random_model(self, shape: LlamaShape, dtype: DType = "bfloat16") -> Transformer:
        """A model with random weights, which are made on the device."""
        kernels = GpuKernels(self.device)
        return load_model(RandomCheckpoint(shape, device=self.device), dtype, self.device, kernels)

    def llm(self, model: str | Path | Transformer, **options: Any) -> LLM:
        """An engine without a drafter, for at most 32 requests at a time."""
        options = {"max_requests": 32, "kv_tokens": 2048 if self.dry else 16_384} | options
        return LLM(model, dtype="bfloat16", device=self.device.type, drafter="none", **options)

    def grown(self, model: str, shape: str = "1B") -> Path:
        """A model that says the same as `model` and is as large as `shape`. It is made once."""
        shape = GROWN_TINY if self.dry else shape
        checkpoint = open_checkpoint(model)
        path = self.work / f"{checkpoint.path.stem}-{shape.replace(',', '-')}"
        if not path.exists():
            grow(checkpoint, GrownShape.parse(shape, read_model_config(checkpoint)), path)
        return path

    def as_directory(self, model: str) -> Path:
        """A model as a Hugging Face directory, which other software reads."""
        checkpoint = open_checkpoint(model)
        if checkpoint.path.is_dir():
            return checkpoint.path
        return self.grown(model, f"layers={read_model_config(checkpoint).num_layers}")

    def command(self, *words: str | Path) -> list[str]:
        """The last lines that one of soothsay's own commands prints. Raises `RuntimeError` if it fails."""
        command = [sys.executable, "-m", "soothsay", *map(str, words)]
        both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ended = subprocess.run(command, text=True, timeout=self.left, **both)
        if ended.returncode:
            raise RuntimeError(f"soothsay {words[0]} {words[1]}: {ended.stdout[-1500:]}")
        return [line.rstrip() for line in ended.stdout.splitlines() if line.strip()][-40:]

    def wall(self, run: Callable[[], object]) -> float:
        """Seconds of a call, until the device has done all of it."""
        wait = (lambda: None) if self.dry else torch.cuda.synchronize
        wait()
        begin = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - begin

    def device_seconds(self, run: Callable[[], object], repeats: int = 9) -> float:
        """Median seconds of the device for a call, while the host runs ahead of it."""
        if self.dry:
            return self.wall(run)
        clocks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda.synchronize()
        for begin, end in clocks:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return median(begin.elapsed_time(end) for begin, end in clocks) / 1e3

    def in_turns(
        self, contenders: Mapping[str, Callable[[], object]], rounds: int = 3, warm: int = 4
    ) -> dict[str, float]:
        """Median seconds of the device for each call, taken in turns after some that do not count."""
        if self.dry:
            rounds = warm = 1
        for run in contenders.values():
            for _ in range(warm):
                run()
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _, name in turns(list(contenders), rounds):
            found[name].append(self.device_seconds(contenders[name]))
        return {name: median(seconds) for name, seconds in found.items()}

    def recorded(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        """What repeats these calls as one CUDA graph, so that the time of launches does not count."""

        def run() -> list[object]:
            return [call() for call in calls]

        run()
        if self.dry:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()
        return lambda: (graph.replay(), kept)  # the graph's outputs live as long as it
