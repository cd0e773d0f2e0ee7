"""`soothsay bench step`, `host`, `experts` and `quality`: what steps and passes cost and say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from soothsay.bench.bench_plans import BenchOptions, HostPlan, QualityPlan
from soothsay.bench.tables import records_table
from soothsay.cli.bench.bench_options import known_dtypes, row_counts, save_numbers, show
from soothsay.cli.terminal import notice, progress_bar
from soothsay.config import DType
from soothsay.options import FILE, ModelOptions, argument, option, optional, shared


@dataclass(frozen=True, kw_only=True)
class Step:
    """Measure a forward pass that verifies M rows, and the least time that it can take (the floor).

    A pass packs the rows and runs all blocks, and the head for every row. The floor is the longer of two
    times, at the rates measured in this run: reading all weights and the context's keys and values once, and
    the arithmetic.
    """

    model: str | None = argument(default=None, show_default="a shape with random weights")
    """A model; see 'generate'."""

    shape: str | None = optional("1.1B")
    """A Llama with random weights: 0.5B, 1.1B, 3B, hybrid (a Qwen3.5), or
    layers=22,hidden=2048,heads=32,kv_heads=4,ffn=5632,vocab=32000, of which what is left out is as in
    1.1B. With experts=32,chosen=4, ffn is that of one expert."""

    dtype: list[str] | None = shared(
        BenchOptions, "dtype", show_default="the model's own; bfloat16 for a shape"
    )
    rows: str = shared(BenchOptions, "rows", default="1,2,4,8,16,32,64")
    contexts: list[int] | None = optional("128", "--context", min=1)
    """Number of tokens before the rows; may be repeated."""

    tree: Literal["chain", "binary"] = option("chain")
    """Shape of the rows' tree: a path, or two children a node."""

    rounds: int = shared(BenchOptions, "rounds")
    kernels: str = shared(ModelOptions, "kernels")
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Measure, and print a table."""
        if self.model is not None and self.shape is not None:
            raise typer.BadParameter("give a model or --shape, not both")
        own: DType = "bfloat16" if self.model is None else "auto"
        counts, dtypes = row_counts(self.rows), known_dtypes(self.dtype, (own,))
        with notice("measuring ..."):
            from soothsay.bench.random_models import LlamaShape
            from soothsay.bench.step import bench_step, step_table

            model = LlamaShape.parse(self.shape or "1.1B") if self.model is None else self.model
            asked = counts, self.contexts or [128], self.rounds, self.tree
            report = bench_step(model, dtypes, *asked, kernels=self.kernels)
        show(step_table(report))
        save_numbers(self.to_json, asdict(report))


@dataclass(frozen=True, kw_only=True)
class Host:
    """Measure what a step costs beside the model's pass, by part.

    The pass is replaced by one that knows the answer, which is the model's own. With "warm" caches it lasts
    as long as SmolLM2's. With "cold" ones it also reads so much memory that the caches keep nothing of the
    step. The drafter "given" hands over a tree of 16 nodes for one request, and of 4 for each of several.
    """

    plan: HostPlan
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Measure, and print a table."""
        with notice(f"measuring {self.plan.model} ..."):
            from soothsay.bench.host import bench_host, host_table

            times = bench_host(self.plan)
        show(host_table(times, self.plan.rounds))
        save_numbers(self.to_json, [asdict(time) for time in times])


SHAPE = "layers=8,hidden=1024,heads=16,kv_heads=4,ffn=768,vocab=1024,experts=32,chosen=4"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Measure the cost of a mixture of experts beside a dense model with the weights of one row's experts.

    It is 'bench step' for both models, with random weights. Of experts, the floor counts those that the rows
    choose.
    """

    shape: str = option(SHAPE)
    """Its ffn is that of one expert; see 'bench step'."""

    dtype: list[str] | None = shared(BenchOptions, "dtype", show_default="int8, bfloat16")
    rows: str = shared(BenchOptions, "rows", default="1,4,8,16")
    rounds: int = shared(BenchOptions, "rounds", default=25)
    kernels: str = shared(ModelOptions, "kernels")
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Measure, and print a table."""
        counts, dtypes = row_counts(self.rows), known_dtypes(self.dtype, ("int8", "bfloat16"))
        with notice("measuring ..."):
            from soothsay.bench.random_models import LlamaShape
            from soothsay.bench.step import bench_step, step_table

            sizes = LlamaShape.parse(self.shape)
            if not sizes.experts:
                raise typer.BadParameter(f"--shape {self.shape}: it has no experts; write {SHAPE}")
            own = {name: getattr(self, name) for name in ("rounds", "kernels")}
            report = bench_step(sizes, dtypes, counts, dense=sizes.dense, **own)
        show(step_table(report))
        save_numbers(self.to_json, asdict(report))


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Compare a model's distributions with those of float32, of the same weights or of a reference.

    The model reads the texts in chunks. For each token of a chunk's second half, the distribution that
    predicts it is compared: its divergence (KL) from that of float32, in nats, and whether both have the same
    best token.
    """

    plan: QualityPlan
    texts: list[Path] = argument(metavar="TEXT...", **FILE)
    """Text files to read, in order."""

    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Read the texts, and print a table."""
        dtypes = known_dtypes(self.plan.dtype, ("auto",))
        text = "\n\n".join(file.read_text("utf-8", "replace") for file in self.texts)
        with progress_bar(f"reading with {self.plan.model}", "chunks") as progress:
            from soothsay.bench.quality import bench_quality

            found = bench_quality(self.plan, text, dtypes, progress)
        table = records_table(
            found,
            {"dtype": "{.dtype}"},
            {
                "bits a weight": "{.bits:.2f}",
                "perplexity": "{.perplexity:.3f}",
                "KL to float32": "{.divergence:.5f}",
                "equal best": "{.equal_best:.2%}",
            },
            title=Path(self.plan.model).name,
            caption=f"{found[0].tokens:,} distributions",
        )
        show(table)
        save_numbers(self.to_json, [asdict(one) for one in found])
