"""`soothsay grow`: make a larger model with the same outputs, for speed benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import DownloadColumn

from soothsay.cli.progress import work_bar
from soothsay.cli.terminal import notice
from soothsay.options import REQUIRED, argument, option


@dataclass(frozen=True, kw_only=True)
class Grow:
    """Make a larger model that says the same, for speed benchmarks.

    It makes real predictions, so drafters have their real acceptance, at a large model's cost. Drafters
    beside the model, and heads for it that come with the package, come along, fitted to the larger one.
    """

    model: str = argument(REQUIRED, "A Hugging Face directory, a GGUF file, a hub name or a known name.")
    out: Path = argument(REQUIRED, "A directory that is not there yet, or empty.")
    shape: str = option(
        "1B",
        "0.5B, 1B or 3B, or sizes: layers=22,hidden=2048,heads=32,kv_heads=4,ffn=5632. Those left "
        "out stay as they are, and so do the vocabulary and the size of a head. With experts=8,chosen=2, "
        "ffn is that of one expert.",
        "-s",
    )

    def run(self) -> None:
        """Write the larger model."""
        model = self.model
        with notice(f"opening {model} ..."):
            from soothsay.bench.grow import grow
            from soothsay.bench.grown_shape import GrownShape
            from soothsay.model.checkpoint import open_checkpoint, read_model_config

            checkpoint = open_checkpoint(model)
            wanted = GrownShape.parse(self.shape, read_model_config(checkpoint))
        with work_bar("growing", DownloadColumn()) as progress:
            grown = grow(checkpoint, wanted, self.out, source=model, progress=progress)
        s, target = grown.shape, grown.path
        mixed = (
            f" in each of {s.experts} experts, {s.chosen} of which a token runs through" if s.experts else ""
        )
        lines = (
            f"{target}: {grown.parameters:,} parameters, {decimal(grown.bytes)}",
            f"{s.layers} layers of {s.hidden:,} hidden, {s.intermediate:,} feed-forward{mixed}, "
            f"{s.heads} heads, {s.kv_heads} for keys and values",
            *([f"drafters: {', '.join(grown.drafters.written)}"] if grown.drafters.written else []),
            *(f"left out: {reason}" for reason in grown.drafters.refused),
            f"It computes what {model} computes. Try:",
            f"  soothsay bench step {target}",
            f'  soothsay generate "Once upon a time" --model {target} --drafter "draft-model(model={model})"',
        )
        Console(highlight=False, markup=False).print(*lines, sep="\n", soft_wrap=True)
