"""The engine llama.cpp, through the bindings of llama-cpp-python."""

from __future__ import annotations

import ctypes
import sys

from .peer import Setup, SteppingPeer, need


class LlamaCpp(SteppingPeer):
    """Passes of llama.cpp through its C interface. Its server gives whole answers: `LlamaServer`."""

    modes = ()

    def __init__(self, setup: Setup):
        self.np = need("numpy")
        self.c = need("llama_cpp", "llama-cpp-python")
        self.version = self.c.__version__
        self.setup = setup

    def load(self) -> None:
        """See `Peer`."""
        c, setup = self.c, self.setup
        c.llama_backend_init()
        self.logged = c.llama_log_callback(_ignore_log)  # kept alive: the library keeps calling it
        c.llama_log_set(self.logged, None)
        of_model, of_context = c.llama_model_default_params(), c.llama_context_default_params()
        of_model.use_mmap = False
        self.model = c.llama_model_load_from_file(setup.export.encode(), of_model)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {setup.export}")
        of_context.n_ctx = of_context.n_batch = setup.context + 64
        of_context.n_threads = of_context.n_threads_batch = setup.threads
        of_context.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED
        of_context.no_perf = True
        self.context = c.llama_init_from_model(self.model, of_context)
        self.memory = c.llama_get_memory(self.context)
        self.vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.batch = c.llama_batch_init(of_context.n_batch, 0, 1)

    def start(self, ids: list[int]) -> int:
        """See `SteppingPeer`."""
        self.c.llama_memory_clear(self.memory, True)
        self.past = 0  # tokens with keys and values
        return self.forward(ids)

    def forget(self, count: int) -> None:
        """See `SteppingPeer`."""
        self.past -= count
        self.c.llama_memory_seq_rm(self.memory, 0, self.past, -1)

    def forward(self, ids: list[int], keep: int = 1) -> int:
        """See `SteppingPeer`."""
        batch, count = self.batch, len(ids)
        batch.n_tokens = count
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.past + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i >= count - keep
        if self.c.llama_decode(self.context, batch):
            raise RuntimeError(f"llama.cpp does not decode {count} tokens after {self.past}")
        self.past += count
        last = self.c.llama_get_logits_ith(self.context, count - 1)
        return int(self.np.ctypeslib.as_array(last, (self.vocab_size,)).argmax())


def _ignore_log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """Write errors to stderr and drop all other messages."""
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode(errors="replace"))
