"""What benchmarks of several engines share: the model, the prompts, and each engine in its process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from soothsay import ModelError, SoothsayError
from soothsay.bench.bench_plans import PEERS, PeerOptions
from soothsay.bench.journal import short_hash
from soothsay.bench.peers.engines.peer import Setup, UnavailableError
from soothsay.bench.peers.peer_process import PeerProcess
from soothsay.bench.peers.peer_results import OURS
from soothsay.bench.prompts import by_task, encode, in_turns, read_prompts
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.kernel_sets import usable_device
from soothsay.model.weights.checkpoint import Checkpoint, open_checkpoint
from soothsay.progress import tell_progress


class EngineBench:
    """The model of a plan, the prompts that fit, and the engines that answer them.

    Args:
        plan: which engines answer what.
        room: tokens that a context must hold in any case.

    Raises `SoothsayError` if a peer is unknown, or the plan does not fit the kind of model.
    """

    def __init__(self, plan: PeerOptions, room: int = 0):
        self.options = plan
        self.peers = plan.peers or PEERS
        self.threads, self.device = plan.threads or torch.get_num_threads(), str(usable_device(plan.device))
        if unknown := {*self.peers, *filter(None, plan.interpreters)} - {*PEERS}:
            raise SoothsayError(
                f"no peer is named {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}"
            )
        self.checkpoint = open_checkpoint(plan.model)
        self.is_file = self.checkpoint.path.is_file()
        if not self.is_file and not self.checkpoint.path.is_dir():
            path = self.checkpoint.path
            raise ModelError(f"{path} is no Hugging Face directory and no GGUF file, which the peers need")
        if plan.draft_model and not (self.is_file and Path(plan.draft_model).is_file()):
            raise SoothsayError(f"a draft model is a GGUF file beside another one; {plan.draft_model} is not")
        config, self.tokenizer = parse_model_config(self.checkpoint.config), self.checkpoint.tokenizer()
        self.vocab_size = config.vocab_size
        self.notes: list[str] = []
        """What could not be measured, and why."""

        chosen = {} if plan.prompts is None else by_task(read_prompts(plan.prompts), plan.per_task)
        every = [(entry, encode(entry, self.tokenizer)) for entry in in_turns(chosen.values())]
        self.questions = [one for one in every if len(one[1]) + plan.max_tokens <= config.max_positions]
        """Prompts to which engines give whole answers, and their token ids."""

        if left := len(every) - len(self.questions):
            self.notes.append(
                f"{left} of {len(every)} prompts left out: with {plan.max_tokens} tokens to answer they are "
                f"longer than the model's context of {config.max_positions}"
            )
        longest = max((len(ids) for _, ids in self.questions), default=0) + plan.max_tokens
        self.context = -(-max(room, longest) // 64) * 64  # a multiple of every engine's block size
        self.folder = plan.work / f"{self.checkpoint.path.resolve().name}-{_digest(self.checkpoint)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.conditions = {"model": str(self.checkpoint.path.resolve()), "threads": self.threads}
        if self.device != "cpu":
            self.conditions["device"] = self.device
        names = "max_tokens", "kernels", *(["draft_model"] if plan.draft_model else [])
        self.conditions |= {name: getattr(plan, name) for name in names}

    def client(self, name: str, dtype: str) -> PeerProcess:
        """Start the process of an engine. Raises `UnavailableError` if the engine cannot run."""
        plan, pythons = self.options, self.options.interpreters
        model = str(self.checkpoint.path.resolve())
        own_format = str(self.folder.resolve() / f"{name}-{dtype}")
        if name.startswith("llama"):
            if not self.is_file:
                convert = "convert this model with its convert_hf_to_gguf.py, and measure that file"
                raise UnavailableError(f"llama.cpp runs GGUF files: {convert}")
            own_format = model
        tell_progress(f"{dtype}: loading {name}")
        python = sys.executable if name == OURS else pythons.get(name, pythons.get("", sys.executable))
        draft_model = plan.draft_model and str(Path(plan.draft_model).resolve())
        own = list(plan.drafters), draft_model, self.device, plan.kernels
        setup = Setup(model, dtype, self.threads, self.context, own_format, *own)
        return PeerProcess(name, setup, python, self.folder / f"{name}-{dtype}.log")


def _digest(checkpoint: Checkpoint) -> str:
    """Return a hash of a checkpoint's path and files, so that a changed model gets another export."""
    every = checkpoint.path.iterdir() if checkpoint.path.is_dir() else [checkpoint.path]
    files = sorted(file for file in every if file.suffix in (".json", ".safetensors", ".gguf"))
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return short_hash(repr((str(checkpoint.path.resolve()), facts)))
