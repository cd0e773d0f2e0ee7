"""A head of a real model, trained by the project's own commands from answers that the model gives here."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from job import Job, Numbers

from soothsay.bench.serve.server_load import default_conversations

STEPS = 150


def measure(job: Job) -> Numbers:
    """Seconds of each command; and what the head accepts after one step, and at the end."""
    model = "sibyl" if job.dry else str(job.as_directory(job.model))
    prompts, answers = job.work / "prompts.jsonl", job.work / "answers.jsonl"
    with prompts.open("w") as file:
        for conversation in default_conversations():
            message = {"role": "user", "content": str(conversation.turns[0])}
            file.write(json.dumps({"messages": [message]}) + "\n")
    answers.unlink(missing_ok=True)
    limits = ("--limit", "40", "-n", "4") if job.dry else ("--limit", "256", "-n", "256", "--batch", "64")
    data = "train", "data", model, prompts, "--out", answers, "--device", job.device.type, *limits
    yield "answers", partial(_timed, job, *data)
    for name, steps in {"one step": 1, "trained": 2 if job.dry else STEPS}.items():
        yield name, partial(_train, job, model, answers, name, steps)


def _train(job: Job, model: str, answers: Path, name: str, steps: int) -> dict[str, Any]:
    """Train a head for some steps. Its last evaluation says what it accepts, by the device's own kernels."""
    head, batch = job.work / f"eagle3-{steps}", 64 if job.dry else 8192
    shutil.rmtree(head, ignore_errors=True)
    sizes = ("--vocabulary", "256", "--depth", "2", "--held-out", "4", "--parts", "1") if job.dry else ()
    words = "train", "eagle3", model, answers, "--out", head, "--device", job.device.type, *sizes
    found = _timed(job, *words, "--steps", str(steps), "--batch-tokens", str(batch))
    lines = [json.loads(line) for line in (head / "training" / "metrics.jsonl").read_text().splitlines()]
    speed = median(line["tokens_per_second"] for line in lines)
    accepted = {name: lines[-1][name] for name in ("accepted", "accepted_sampled")}
    return found | {"tokens/s": speed, **accepted}


def _timed(job: Job, *words: str | Path) -> dict[str, Any]:
    begin = time.perf_counter()
    printed = job.command(*words)
    return {"seconds": time.perf_counter() - begin, "printed": printed[-8:]}
