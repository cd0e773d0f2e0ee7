"""`soothsay bench quality`: measures what integers cost in quality."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from soothsay.cli.bench.bench_options import BenchOptions, known_dtypes, save_numbers
from soothsay.cli.progress import progress_bar
from soothsay.cli.tables import records_table
from soothsay.options import FILE, REQUIRED, CommonOptions, argument, option, shared


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Compare a model's distributions with those of float32, of the same weights or of a reference.

    The model reads the texts in chunks. For each token of a chunk's second half, the distribution that
    predicts it is compared: its divergence (KL) from that of float32, in nats, and whether both have the same
    best token.
    """

    model: str = shared(CommonOptions, "model")
    texts: list[Path] = argument(REQUIRED, "Text files to read, in order.", metavar="TEXT...", **FILE)
    dtype: list[str] | None = shared(BenchOptions, "dtype", show_default="auto")
    reference: str | None = option(None, "The model whose float32 is the reference.", show_default="MODEL")
    tokens: int = option(20_000, "Tokens to read, at most.", min=1)
    chunk: int = option(512, "Tokens that are read at once.", min=4)
    to_json: Path | None = shared(BenchOptions, "to_json")

    def run(self) -> None:
        """Read the texts, and print a table."""
        dtypes = known_dtypes(self.dtype, ("auto",))
        text = "\n\n".join(file.read_text("utf-8", "replace") for file in self.texts)
        with progress_bar(f"reading with {self.model}", "chunks") as progress:
            from soothsay.bench.quality import bench_quality

            found = bench_quality(
                *(self.model, text),
                dtypes=dtypes,
                reference=self.reference,
                tokens=self.tokens,
                chunk=self.chunk,
                progress=progress,
            )
        table = records_table(
            found,
            {"dtype": "{.dtype}"},
            {
                "bits a weight": "{.bits:.2f}",
                "perplexity": "{.perplexity:.3f}",
                "KL to float32": "{.divergence:.5f}",
                "equal best": "{.equal_best:.2%}",
            },
            title=Path(self.model).name,
            caption=f"{found[0].tokens:,} distributions",
        )
        Console(highlight=False).print(table)
        save_numbers(self.to_json, [asdict(one) for one in found])
