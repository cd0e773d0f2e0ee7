"""Spec-Bench on a real model, and on one of 1B that says the same; beside transformers."""

from __future__ import annotations

import importlib.util
import json
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from job import Job, Numbers
from stage_baseline import Theirs

from soothsay.bench.prompts import PASSAGE, QUESTION
from soothsay.model.weights.checkpoint import open_checkpoint

DRAFTERS = "suffix", "eagle3", "auto"


def measure(job: Job) -> Numbers:
    """The project's own benchmark, and then what others do with the same weights."""
    model = "sibyl" if job.dry else job.model
    grown, questions = job.grown(model), questions_of(job)
    for name, path in {"as it is": model, "1B": grown}.items():
        if not job.dry or name == "as it is":
            yield name, partial(_spec, job, str(path), questions)
    if importlib.util.find_spec("transformers") is not None:
        yield "transformers", partial(_theirs, job, model, grown, questions)


def questions_of(job: Job) -> Path:
    """The file of questions; if there is none, one of our own."""
    if job.questions is not None:
        return job.questions
    file, tasks = job.work / "questions.jsonl", {"summarization": f"Summarize: {PASSAGE}", "qa": QUESTION}
    lines = [
        {"question_id": number, "category": task, "turns": [text]}
        for number, (task, text) in enumerate(tasks.items())
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def _spec(job: Job, model: str, questions: Path) -> dict[str, Any]:
    """Speed-up and accepted tokens by drafter and temperature. The command fails if an answer differs."""
    drafters = [word for name in (("suffix",) if job.dry else DRAFTERS) for word in ("--drafter", name)]
    sizes = ("-n", "4") if job.dry else ("--per-task", "2", "-n", "64", "-t", "0", "-t", "1")
    words = "bench", "spec", model, "--spec-bench", questions, *drafters, *sizes, "--device", job.device.type
    file = job.out / f"spec-{Path(model).stem}.json"
    file.unlink(missing_ok=True)
    return {"table": job.command(*words, "--dtype", "auto" if job.dry else "bfloat16", "--json", file)}


def _theirs(job: Job, model: str, grown: Path, questions: Path) -> dict[str, Any]:
    """How often prompt lookup and assisted generation change greedy answers, and what they gain."""
    tokenizer = open_checkpoint(model).tokenizer()
    small, large = Theirs(job, job.as_directory(model)), Theirs(job, grown)
    assert tokenizer is not None
    asked = [json.loads(line) for line in questions.read_text().splitlines()]
    asked = asked[:: max(len(asked) // 6, 1)][: 1 if job.dry else 6]
    prompts = [tokenizer.encode(question["turns"][0]) for question in asked]
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt lookup": {"prompt_lookup_num_tokens": 10},
        "assisted": {"assistant_model": small.model},
    }
    count = 4 if job.dry else 64
    large.answers([prompts[0]], 2)
    answers: dict[str, list[Any]] = {way: [] for way in ways}
    seconds = dict.fromkeys(ways, 0.0)
    for prompt, (way, options) in product(prompts, ways.items()):
        begin = time.perf_counter()
        answers[way].append(large.answers([prompt], count, **options))
        seconds[way] += time.perf_counter() - begin
    return {
        way: {
            "tokens/s": len(prompts) * count / seconds[way],
            "answers that differ": sum(a != b for a, b in zip(own, answers["plain"], strict=True)),
        }
        for way, own in answers.items()
    }
