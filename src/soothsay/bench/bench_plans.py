"""What benchmarks are asked to measure. The fields are options of their commands, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from soothsay.bench.prompts import SPEC_BENCH
from soothsay.config import EngineConfig, KVDType
from soothsay.errors import SoothsayError
from soothsay.options import BUNDLED, PROMPTS, ModelOptions, common, flag, option, optional, shared
from soothsay.plotting import require_matplotlib


def _in_a_folder(file: Path | None) -> Path | None:
    """Check early that the folder of a file exists. Raises `SoothsayError`."""
    if file is not None and not file.parent.is_dir():
        raise SoothsayError(f"there is no folder {file.parent} for {file.name}; make it first")
    return file


def _with_matplotlib(file: Path | None) -> Path | None:
    """Check early that matplotlib, which draws the file, is installed. Raises `SoothsayError`."""
    if file is not None:
        require_matplotlib()
    return _in_a_folder(file)


WRITTEN: Mapping[str, Any] = {"dir_okay": False, "callback": _in_a_folder}
"""Settings of a path: a file that is written in the end."""

DRAWN: Mapping[str, Any] = {"dir_okay": False, "callback": _with_matplotlib}
"""Settings of a path: a file that matplotlib draws."""


@dataclass(frozen=True)
class BenchOptions:
    """The options of benchmarks. Each benchmark has some of them."""

    prompts: Path = option(
        SPEC_BENCH, "--prompts", "-p", "--spec-bench", help=PROMPTS, exists=True, show_default="Spec-Bench's"
    )
    max_tokens: int = common("max_tokens", default=128, min=1)
    temperature: float = common("temperature", default=0.0, min=0)
    nodes: int = option(EngineConfig.max_tree, min=1)
    """Largest number of nodes of a draft tree, with the root."""

    dtype: list[str] | None = option(None)
    """Element type of linear layers' weights; may be repeated."""

    rows: str = option("1")
    """Numbers of rows of a pass."""

    rounds: int = option(15, min=1)
    """Number of passes of each kind; times are medians."""

    to_json: Path | None = option(None, "--json", **WRITTEN)
    """Write all numbers to this file."""

    journal: Path | None = option(None, "--json", **WRITTEN)
    """Append each measurement to this file; an existing file is continued."""

    png: Path | None = option(None, **DRAWN)
    """Draw a chart to this file (needs matplotlib)."""

    markdown: Path | None = option(None, **WRITTEN, allow_dash=True)
    """Write the table as Markdown to this file; '-': print it."""

    html: Path | None = option(None, **DRAWN)
    """Write one self-contained page with tables and charts (needs matplotlib)."""


PEERS = ("transformers", "openvino", "llama.cpp", "llama-server")


@dataclass(frozen=True, kw_only=True)
class StackPlan:
    """What `bench stack` measures. End tokens do not end answers."""

    model: str = common("model", default=BUNDLED)
    prompts: Path | None = shared(BenchOptions, "prompts", default=None, show_default="requests for stories")
    requests: int = option(16, min=1)
    """Number of prompts."""

    tokens: int = option(64, min=1)
    """Tokens of each answer."""

    rounds: int = option(5, min=1)
    """Number of rounds; factors are medians."""

    prefix: int = option(1000, min=1)
    """Tokens that the prompts of the last rung share."""

    integers: Literal["int8", "int4"] = option("int8")
    """What weights are rounded to, if the model's files have no integers."""

    drafter: str = shared(ModelOptions, "drafter")
    kernels: str = shared(ModelOptions, "kernels")
    peer: bool = option(True, "--transformers/--no-transformers")
    """Whether transformers is the first rung."""


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Which engines answer which prompts, and how they are run."""

    model: str = common("model")
    dtypes: list[str] | None = optional("bfloat16; auto for a .gguf file", "--dtype")
    """Element type of linear layers' weights; may be repeated."""

    peers: list[str] | None = optional(
        "all that are there", "--peer", help=f"{', '.join(PEERS)}; may be repeated."
    )
    pythons: list[str] | None = optional("this one", "--peer-python", metavar="[PEER=]PATH")
    """Python interpreter with the packages of all peers, or of one; may be repeated."""

    threads: int | None = optional("torch's", min=1)
    """Threads of each engine."""

    device: str = shared(ModelOptions, "device")
    kernels: str = shared(ModelOptions, "kernels")
    prompts: Path | None = shared(BenchOptions, "prompts", default=None, show_default="no whole answers")
    per_task: int = option(20, min=1)
    """Number of prompts of each task."""

    max_tokens: int = option(128, min=1)
    """Tokens of an answer."""

    drafters: list[str] = option(("auto",), "--drafter", "-d", show_default="auto")
    """Our drafter; may be repeated."""

    draft_model: str = option("", metavar="FILE", show_default="none")
    """A draft model for the peers, if MODEL is a GGUF file: another GGUF file."""

    work: Path = option(Path("peers"), file_okay=False)
    """Directory for exported models, which are used again, and logs."""

    @property
    def interpreters(self) -> dict[str, str]:
        """The Python interpreters by peer. The one under "" is for all peers that have none of their own."""
        parts = (one.partition("=") for one in self.pythons or ())
        return {peer if equals else "": path if equals else peer for peer, equals, path in parts}


@dataclass(frozen=True, kw_only=True)
class PeerPlan(PeerOptions):
    """What `bench peers` compares. For a GGUF file the type is "auto": all engines run the file as it is."""

    tokens: int = option(64, min=1)
    """Tokens decoded in a round."""

    rounds: int = option(5, min=1)
    """Number of rounds; times are medians."""


@dataclass(frozen=True, kw_only=True)
class EqualityPlan(PeerOptions):
    """What `bench equality` compares. For a GGUF file the types are those of transformers."""

    dtypes: list[str] | None = optional("bfloat16, float16, float32", "--dtype")
    """Element type of linear layers' weights; may be repeated. For a .gguf file it is transformers'
    alone: other engines run the file as it is."""

    prompts: Path = shared(BenchOptions, "prompts")
    per_task: int = option(10, min=1)
    """Number of prompts of each task."""


GIVEN = "given"
"""The name of the drafter of `bench host` that hands over a given tree."""


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """What `bench host` measures: each drafter in each situation."""

    model: str = common("model", default=BUNDLED)
    drafters: list[str] = option(
        ("none", "suffix", "auto", GIVEN), "--drafter", "-d", show_default=f"none, suffix, auto, {GIVEN}"
    )
    """May be repeated."""

    batches: list[int] = option((1, 32), "--batch", min=1, show_default="1, 32")
    """Requests at a time; may be repeated."""

    temperatures: list[float] = option((0.0, 1.0), "--temperature", "-t", min=0, show_default="0, 1")
    """Sampling temperature; may be repeated."""

    tokens: int = option(128, min=8)
    """Tokens of an answer."""

    rounds: int = shared(BenchOptions, "rounds", default=5)
    kernels: str = shared(ModelOptions, "kernels")


@dataclass(frozen=True, kw_only=True)
class QualityPlan:
    """What `bench quality` compares."""

    model: str = common("model")
    dtype: list[str] | None = shared(BenchOptions, "dtype", show_default="auto")
    kv_dtype: KVDType = shared(ModelOptions, "kv_dtype")
    reference: str | None = optional("MODEL")
    """The model whose float32 is the reference."""

    tokens: int = option(20_000, min=1)
    """Tokens to read, at most."""

    chunk: int = option(512, min=4)
    """Tokens that are read at once."""

    kernels: str = shared(ModelOptions, "kernels")


MINUTES = 10
"""Time for the answers of `bench spec`, if nothing else limits them."""


@dataclass(frozen=True, kw_only=True)
class SpecOptions:
    """How `bench spec` asks its questions. Temperatures, batches and verifiers are measured one by one."""

    per_task: int | None = optional("all", min=1)
    """Number of questions of each task, evenly spread."""

    minutes: float | None = optional(f"{MINUTES}; no limit with --per-task", min=0.01)
    """Time for answers, which counts what was answered by then."""

    temperatures: list[float] = option((0.0,), "--temperature", "-t", min=0, show_default="0")
    """Sampling temperature; may be repeated."""

    batches: list[int] = option((1,), "--batch", min=1, show_default="1")
    """Questions answered in one batch; may be repeated."""

    rounds: int = option(1, min=1)
    """Number of times that each question is asked; the median run counts."""

    nodes: int = shared(BenchOptions, "nodes")
    max_tokens: int = shared(BenchOptions, "max_tokens")
    seed: int = option(0, min=0)
    """Seed of all answers."""

    verifiers: list[str] | None = optional("match", "--verifier")
    """How draft tokens are accepted at temperatures above 0: match, rejection, specinfer, rsd, block,
    traversal, typical, or FILE.py:NAME; may be repeated, for a comparison."""

    trees: bool = flag()
    """Write the draft tree of each step to the file of --json too."""

    @property
    def limit(self) -> float:
        """Seconds for answers."""
        return 60 * (self.minutes or (math.inf if self.per_task else MINUTES))


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How `bench serve` asks servers, whatever the load is."""

    rounds: int = option(1, min=1)
    """Number of rounds. The server that starts rotates."""

    warm_up: int = option(2, min=1)
    """Requests sent to each server before its first trial; not counted."""

    max_tokens: int = shared(BenchOptions, "max_tokens")
    temperature: float = shared(BenchOptions, "temperature")
    seed: int = option(0, min=0)
    """Seed of the order, the arrivals and the answers."""


@dataclass(frozen=True, kw_only=True)
class LearnPlan:
    """How `bench learn` answers a stream."""

    drafter: str = option("auto", "-d")
    """A trained drafter, or a composition with one."""

    share: float = option(0.1, min=0.001, max=1)
    """Share of a core's time for learning."""

    requests: int = option(2000, min=1)
    """Requests, at most."""

    held_out: int = option(200, min=0)
    """Requests at the end that are reported apart."""

    window: int = option(20, min=1)
    """Requests between two measurements."""

    every: int = option(1, min=1)
    """Compare in one of so many windows, and in all held-out ones."""

    max_tokens: int = common("max_tokens", default=64, min=1)
    temperature: float = common("temperature", default=0.0, min=0)
    batch: int = option(1, min=1)
    """Requests at a time."""

    kernels: str = shared(ModelOptions, "kernels")


@dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """What `bench length` measures."""

    model: str = common("model")
    prompts: Path = shared(BenchOptions, "prompts")
    drafters: list[str] = option(("auto", "suffix"), "--drafter", "-d", show_default="auto, suffix")
    """Drafter; may be repeated."""

    prompt_tokens: list[int] = option((0,), min=0, show_default="0")
    """Lengthen prompts to so many tokens, with other prompts before them; 0: leave them; may be repeated."""

    requests: int = option(24, min=1)
    """Number of prompts, evenly spread over their categories."""

    max_tokens: int = shared(BenchOptions, "max_tokens", default=1024)
    temperature: float = shared(BenchOptions, "temperature")
    nodes: int = shared(BenchOptions, "nodes")
    kernels: str = shared(ModelOptions, "kernels")
