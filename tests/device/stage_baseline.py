"""Others on the same weights: transformers, and cuBLAS in the place of our linear layers."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from job import LLAMAS, TINY, Job, Numbers
from stage_bandwidth import pass_calls
from torch import Tensor, nn

from soothsay import SamplingParams
from soothsay.model.gpu.gpu_linear import FloatWeight, GpuLinear

ROWS = 1, 8, 32, 128
CONTEXT = 128


def measure(job: Job) -> Numbers:
    """The cost of the guarantee, and plain decoding beside transformers."""
    for size, shape in ({"tiny": TINY} if job.dry else LLAMAS).items():
        yield f"our linear layers over cuBLAS, {size}", partial(_cost, job, shape)
    if importlib.util.find_spec("transformers") is None:
        yield "transformers", "not installed"
        return
    path = job.grown("sibyl")
    for batch in (1,) if job.dry else (1, 8):
        yield f"transformers, batch {batch}", partial(_transformers, job, path, batch)


class Cublas(nn.Module):
    """A linear layer by the vendor's library, which chooses a kernel by the number of rows."""

    def __init__(self, layer: GpuLinear, weight: FloatWeight):
        super().__init__()
        self.dtype, self.weight = layer.dtype, weight.values
        self.bias = None if layer.bias is None else layer.bias.to(self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`[M, in] -> [M, out]`."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(self.dtype)


def _cost(job: Job, shape: Any) -> dict[str, float]:
    """Times of recorded passes with our layers over those with cuBLAS, by rows."""
    models = {"ours": job.random_model(shape), "cuBLAS": job.random_model(shape)}
    for name, part in list(models["cuBLAS"].named_modules()):
        if isinstance(part, GpuLinear) and isinstance(part.weight, FloatWeight):
            models["cuBLAS"].set_submodule(name, Cublas(part, part.weight))
    some = (1,) if job.dry else ROWS
    calls = {
        f"{name} {rows}": call
        for name, model in models.items()
        for rows, call in pass_calls(model, CONTEXT, some).items()
    }
    seconds = job.in_turns(calls)
    found = {f"{rows} rows": seconds[f"ours {rows}"] / seconds[f"cuBLAS {rows}"] for rows in some}
    return found | {"cuBLAS, ms of one row": 1e3 * seconds["cuBLAS 1"]}


def _transformers(job: Job, path: Path, batch: int) -> dict[str, float]:
    """Tokens a second of greedy decoding, theirs and ours in turns."""
    count = 4 if job.dry else 64
    prompts = [[*range(20 + number, 60 + number)] for number in range(batch)]
    theirs, llm = Theirs(job, path), job.llm(path, prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    calls = {
        "transformers": partial(theirs.answers, prompts, count),
        "soothsay": partial(llm.generate, prompts, params),
    }
    if job.dry:  # the interpreter needs minutes for the bundled model
        del calls["soothsay"]
    for call in calls.values():
        call()
    rounds = [{name: job.wall(call) for name, call in calls.items()} for _ in range(1 if job.dry else 2)]
    return {f"{name}, tokens/s": batch * count / min(one[name] for one in rounds) for name in calls}


class Theirs:
    """A model in transformers, in bfloat16, without compiling."""

    def __init__(self, job: Job, path: Path):
        import transformers

        transformers.utils.logging.disable_progress_bar()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(path, dtype=torch.bfloat16).eval().to(job.device)
        self.model.generation_config.eos_token_id = self.model.config.vocab_size  # no token ends an answer

    def answers(self, prompts: list[list[int]], count: int, **options: Any) -> list[list[int]]:
        """The tokens after prompts of one length. `options` are those of `generate`."""
        inputs = torch.tensor(prompts, device=self.model.device)
        options |= {"attention_mask": torch.ones_like(inputs), "max_new_tokens": count, "do_sample": False}
        out: list[list[int]] = self.model.generate(inputs, **options)[:, inputs.shape[1] :].tolist()
        return out
