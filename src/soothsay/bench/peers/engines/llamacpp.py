"""The engine llama.cpp, through the bindings of llama-cpp-python."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from .peer import Peer, Setup, need, timed


class LlamaCpp(Peer):
    """Passes of llama.cpp through its C interface. Its server gives whole answers: `LlamaServer`."""

    modes = ()

    def __init__(self, setup: Setup):
        self.np = need("numpy")
        self.c = need("llama_cpp", "llama-cpp-python")
        self.version = self.c.__version__
        self.setup = setup

    def load(self) -> None:
        """See `Peer`."""
        self.c.llama_backend_init()
        self.logged = self.c.llama_log_callback(_ignore_log)  # kept alive: the library keeps calling it
        self.c.llama_log_set(self.logged, None)
        self.target = _Model(self.c, self.np, self.setup.export, self.setup)

    def decode(self, ids: list[int], count: int) -> tuple[float, list[int]]:
        """See `Peer`."""
        tokens = self.target.start(ids)

        def run() -> None:
            for _ in range(count):
                tokens.extend(self.target.forward(tokens[-1:]))

        return timed(run)[0], tokens

    def prompt(self, ids: list[int]) -> float:
        """See `Peer`."""
        return timed(lambda: self.target.start(ids))[0]

    def verify(self, ids: list[int], rows: int, times: int) -> list[float] | None:
        """See `Peer`."""
        self.target.start(ids)

        def once() -> float:
            self.target.forget(len(ids))
            return timed(lambda: self.target.forward(ids[:rows], rows))[0]

        return [once() for _ in range(1 + times)][1:]


class _Model:
    """A model with a context of its own. `past` is the number of tokens in it."""

    def __init__(self, c: Any, np: Any, path: str, setup: Setup):
        self.c, self.np, self.past = c, np, 0
        of_model, of_context = c.llama_model_default_params(), c.llama_context_default_params()
        of_model.use_mmap = False
        self.model = c.llama_model_load_from_file(path.encode(), of_model)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        of_context.n_ctx = of_context.n_batch = setup.context + 64
        of_context.n_threads = of_context.n_threads_batch = setup.threads
        of_context.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED
        of_context.no_perf = True
        self.context = c.llama_init_from_model(self.model, of_context)
        self.memory = c.llama_get_memory(self.context)
        self.vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.batch = c.llama_batch_init(of_context.n_batch, 0, 1)

    def start(self, ids: list[int]) -> list[int]:
        """Clear the KV cache and read a prompt. Returns the likeliest token after it, as a list."""
        self.c.llama_memory_clear(self.memory, True)
        self.past = 0
        return self.forward(ids) if ids else []

    def forget(self, past: int) -> None:
        """Drop the keys and values at position `past` and after it."""
        if past < self.past:
            self.c.llama_memory_seq_rm(self.memory, 0, past, -1)
            self.past = past

    def forward(self, ids: Sequence[int], keep: int = 1) -> list[int]:
        """Run one pass. Returns the likeliest next token after each of the last `keep` tokens."""
        batch, count = self.batch, len(ids)
        batch.n_tokens = count
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.past + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i >= count - keep
        if self.c.llama_decode(self.context, batch):
            raise RuntimeError(f"llama.cpp does not decode {count} tokens after {self.past}")
        self.past += count
        rows = (self.c.llama_get_logits_ith(self.context, i) for i in range(count - keep, count))
        return [int(self.np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in rows]


def _ignore_log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """Write errors to stderr and drop all other messages."""
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode(errors="replace"))
