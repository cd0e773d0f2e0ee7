"""What benchmarks are asked to measure. The fields are options of their commands, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from soothsay.bench.prompts import SPEC_BENCH
from soothsay.config import EngineConfig
from soothsay.options import PROMPTS, ModelOptions, common, flag, option, optional, shared
from soothsay.plotting import require_matplotlib


def _with_matplotlib(file: Path | None) -> Path | None:
    """Check early that matplotlib, which draws the file, is installed. Raises `SoothsayError`."""
    if file is not None:
        require_matplotlib()
    return file


DRAWN: Mapping[str, Any] = {"dir_okay": False, "callback": _with_matplotlib}
"""Settings of a path: a file that matplotlib draws."""


@dataclass(frozen=True)
class BenchOptions:
    """The options of benchmarks. Each benchmark has some of them."""

    prompts: Path = option(
        SPEC_BENCH, PROMPTS, "--prompts", "-p", "--spec-bench", exists=True, show_default="Spec-Bench's"
    )
    max_tokens: int = common("max_tokens", default=128, min=1)
    temperature: float = common("temperature", default=0.0, min=0)
    nodes: int = option(
        EngineConfig.max_tree, "Largest number of nodes of a draft tree, with the root.", min=1
    )
    dtype: list[str] | None = option(None, "Element type of linear layers' weights; may be repeated.")
    rows: str = option("1", "Numbers of rows of a pass.")
    rounds: int = option(15, "Number of passes of each kind; times are medians.", min=1)
    to_json: Path | None = option(None, "Write all numbers to this file.", "--json", dir_okay=False)
    journal: Path | None = option(
        None, "Append each measurement to this file; an existing file is continued.", "--json", dir_okay=False
    )
    png: Path | None = option(None, "Draw a chart to this file (needs matplotlib).", **DRAWN)
    markdown: Path | None = option(
        None, "Write the table as Markdown to this file; '-': print it.", dir_okay=False, allow_dash=True
    )
    html: Path | None = option(
        None, "Write one self-contained page with tables and charts (needs matplotlib).", **DRAWN
    )


PEERS = ("transformers", "openvino", "llama.cpp", "llama-server")


@dataclass(frozen=True, kw_only=True)
class StackPlan:
    """What `bench stack` measures. End tokens do not end answers."""

    model: str = common("model", default="sibyl")
    prompts: Path | None = shared(BenchOptions, "prompts", default=None, show_default="requests for stories")
    requests: int = option(16, "Number of prompts.", min=1)
    tokens: int = option(64, "Tokens of each answer.", min=1)
    rounds: int = option(5, "Number of rounds; factors are medians.", min=1)
    prefix: int = option(1000, "Tokens that the prompts of the last rung share.", min=1)
    integers: Literal["int8", "int4"] = option(
        "int8", "What weights are rounded to, if the model's files have no integers."
    )
    drafter: str = shared(ModelOptions, "drafter")
    kernels: str = shared(ModelOptions, "kernels")
    peer: bool = option(True, "Whether transformers is the first rung.", "--transformers/--no-transformers")


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Which engines answer which prompts, and how they are run."""

    model: str = common("model")
    dtypes: list[str] | None = optional(
        "bfloat16; auto for a .gguf file",
        "Element type of linear layers' weights; may be repeated.",
        "--dtype",
    )
    peers: list[str] | None = optional(
        "all that are there", f"{', '.join(PEERS)}; may be repeated.", "--peer"
    )
    pythons: list[str] | None = optional(
        "this one",
        "Python interpreter with the packages of all peers, or of one; may be repeated.",
        "--peer-python",
        metavar="[PEER=]PATH",
    )
    threads: int | None = optional("torch's", "Threads of each engine.", min=1)
    device: str = shared(ModelOptions, "device")
    kernels: str = shared(ModelOptions, "kernels")
    prompts: Path | None = shared(BenchOptions, "prompts", default=None, show_default="no whole answers")
    per_task: int = option(20, "Number of prompts of each task.", min=1)
    max_tokens: int = option(128, "Tokens of an answer.", min=1)
    drafters: list[str] = option(
        ("auto",), "Our drafter; may be repeated.", "--drafter", "-d", show_default="auto"
    )
    draft_model: str = option(
        "",
        "A draft model for the peers, if MODEL is a GGUF file: another GGUF file.",
        metavar="FILE",
        show_default="none",
    )
    work: Path = option(
        Path("peers"), "Directory for exported models, which are used again, and logs.", file_okay=False
    )

    @property
    def interpreters(self) -> dict[str, str]:
        """The Python interpreters by peer. The one under "" is for all peers that have none of their own."""
        parts = (one.partition("=") for one in self.pythons or ())
        return {peer if equals else "": path if equals else peer for peer, equals, path in parts}


@dataclass(frozen=True, kw_only=True)
class PeerPlan(PeerOptions):
    """What `bench peers` compares. For a GGUF file the type is "auto": all engines run the file as it is."""

    tokens: int = option(64, "Tokens decoded in a round.", min=1)
    rounds: int = option(5, "Number of rounds; times are medians.", min=1)


@dataclass(frozen=True, kw_only=True)
class EqualityPlan(PeerOptions):
    """What `bench equality` compares. For a GGUF file the types are those of transformers."""

    dtypes: list[str] | None = optional(
        "bfloat16, float16, float32",
        "Element type of linear layers' weights; may be repeated. For a .gguf file it is transformers' "
        "alone: other engines run the file as it is.",
        "--dtype",
    )
    prompts: Path = shared(BenchOptions, "prompts")
    per_task: int = option(10, "Number of prompts of each task.", min=1)


MINUTES = 10
"""Time for the answers of `bench spec`, if nothing else limits them."""


@dataclass(frozen=True, kw_only=True)
class SpecOptions:
    """How `bench spec` asks its questions. Temperatures, batches and verifiers are measured one by one."""

    per_task: int | None = optional("all", "Number of questions of each task, evenly spread.", min=1)
    minutes: float | None = optional(
        f"{MINUTES}; no limit with --per-task",
        "Time for answers, which counts what was answered by then.",
        min=0.01,
    )
    temperatures: list[float] = option(
        (0.0,), "Sampling temperature; may be repeated.", "--temperature", "-t", min=0, show_default="0"
    )
    batches: list[int] = option(
        (1,), "Questions answered in one batch; may be repeated.", "--batch", min=1, show_default="1"
    )
    rounds: int = option(1, "Number of times that each question is asked; the median run counts.", min=1)
    nodes: int = shared(BenchOptions, "nodes")
    max_tokens: int = shared(BenchOptions, "max_tokens")
    seed: int = option(0, "Seed of all answers.", min=0)
    verifiers: list[str] | None = optional(
        "match",
        "How draft tokens are accepted at temperatures above 0: match, rejection, specinfer, rsd, "
        "block, traversal, typical, or FILE.py:NAME; may be repeated, for a comparison.",
        "--verifier",
    )
    trees: bool = flag("Write the draft tree of each step to the file of --json too.")

    @property
    def limit(self) -> float:
        """Seconds for answers."""
        return 60 * (self.minutes or (math.inf if self.per_task else MINUTES))


@dataclass(frozen=True, kw_only=True)
class LearnPlan:
    """How `bench learn` answers a stream."""

    drafter: str = option("auto", "A trained drafter, or a composition with one.", "-d")
    share: float = option(0.1, "Share of a core's time for learning.", min=0.001, max=1)
    requests: int = option(2000, "Requests, at most.", min=1)
    held_out: int = option(200, "Requests at the end that are reported apart.", min=0)
    window: int = option(20, "Requests between two measurements.", min=1)
    every: int = option(1, "Compare in one of so many windows, and in all held-out ones.", min=1)
    max_tokens: int = common("max_tokens", default=64, min=1)
    temperature: float = common("temperature", default=0.0, min=0)
    batch: int = option(1, "Requests at a time.", min=1)
    kernels: str = shared(ModelOptions, "kernels")


@dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """What `bench length` measures."""

    model: str = common("model")
    prompts: Path = shared(BenchOptions, "prompts")
    drafters: list[str] = option(
        ("auto", "suffix"), "Drafter; may be repeated.", "--drafter", "-d", show_default="auto, suffix"
    )
    prompt_tokens: list[int] = option(
        (0,),
        "Lengthen prompts to so many tokens, with other prompts before them; 0: leave them; may be repeated.",
        min=0,
        show_default="0",
    )
    requests: int = option(24, "Number of prompts, evenly spread over their categories.", min=1)
    max_tokens: int = shared(BenchOptions, "max_tokens", default=1024)
    temperature: float = shared(BenchOptions, "temperature")
    nodes: int = shared(BenchOptions, "nodes")
    kernels: str = shared(ModelOptions, "kernels")
