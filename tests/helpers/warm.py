"""What the process has done from which engines and commands are forked: most of the work of their start."""

from __future__ import annotations

import packed_once
import torch

import soothsay.cli.app
import soothsay.server.engines.worker  # noqa: F401
from soothsay import LLM

threads = torch.get_num_threads()
torch.set_num_threads(1)  # a process that has more threads cannot be forked
packed_once.share()
LLM("sibyl", dtype="int8", drafter="none", kv_tokens=256)
torch.set_num_threads(threads)
