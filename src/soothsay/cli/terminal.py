"""Output that several commands share: errors, notices and statistics. Also loads models for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

if TYPE_CHECKING:
    from soothsay.core.answer import SpeculationStats
    from soothsay.llm import LLM

ACCEPTED = "green"
"""The style of accepted draft tokens."""

PLAIN = "none"
"""The drafter that proposes nothing."""


CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    ord("\n"): "\n",
    ord("\t"): "\t",
    ord("\r"): "",
}
"""Control characters, and what a terminal shows in their place. Line ends and tabs stay."""


def harmless(text: str) -> str:
    """A text from an untrusted source, such as a model, without characters that control a terminal."""
    return text.translate(CONTROLS)


def report(error: Exception) -> None:
    """Print an error as one line on stderr."""
    line = Text.assemble(("error: ", "bold red"), harmless(" ".join(str(error).split())))
    Console(stderr=True).print(line, soft_wrap=True)


@contextmanager
def notice(text: str) -> Iterator[None]:
    """Show a dim line on stderr while the body runs. Does nothing if stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    console.print(Text(text, "dim"), end="\r", soft_wrap=True)
    try:
        yield
    finally:
        console.control(Control((ControlType.ERASE_IN_LINE, 2)))


def load_llm(model: str, *, drafter: str = PLAIN, **options: Any) -> LLM:
    """Load a model that serves one request at a time. `options`: of `LLM`."""
    with notice(f"loading {model} ..."):
        from soothsay import LLM

        return LLM(model, drafter=drafter, max_requests=1, **options)


def sampling_summary(sampling: Mapping[str, float]) -> str:
    """Sampling parameters in one line, such as "temperature 0.6, top_k 20"."""
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())


def summary(stats: SpeculationStats, seconds: float) -> str:
    """The speed of an answer in one line. Tokens a step include the bonus token."""
    rate = stats.emitted / seconds if seconds else 0.0
    return (
        f"{stats.emitted} tokens in {seconds:.2f} s, {rate:.0f} tokens/s; "
        f"{stats.steps} steps, {stats.mean_accepted:.2f} tokens a step"
    )


def acceptance_summary(stats: SpeculationStats) -> str:
    """The share of accepted draft tokens by depth, and their number by drafter."""
    if not stats.drafted:
        return "nothing was drafted"
    shares = " ".join(f"{share:.0%}" for share in stats.acceptance)
    own = ", ".join(f"{name} {sum(counts)}" for name, counts in stats.accepted_by.items())
    return f"accepted by depth: {shares}" + (f"; by drafter: {own}" if own else "")
