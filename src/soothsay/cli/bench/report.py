"""`soothsay bench report`: shows results of `bench spec` as tables and as a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from soothsay.cli.bench.bench_options import BenchOptions, check_charts
from soothsay.cli.bench.spec import finish
from soothsay.options import FILE, REQUIRED, argument, shared


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show results of 'bench spec' again, several runs together. Nothing is measured.

    The exit code is 1 if an answer differed from plain decoding's.
    """

    files: list[Path] = argument(REQUIRED, "What 'bench spec --json' wrote.", **FILE)
    markdown: Path | None = shared(BenchOptions, "markdown")
    html: Path | None = shared(BenchOptions, "html")

    def run(self) -> None:
        """Read the files, and show them."""
        from soothsay.bench.spec.spec_results import SpecResults

        check_charts(self.html)
        finish([SpecResults.read(file) for file in self.files], self.markdown, self.html)
