"""The engine transformers, by Hugging Face."""

from __future__ import annotations

import os
from typing import Any

from .peer import Peer, Setup, UnavailableError, need, timed


class Transformers(Peer):
    """The reference implementation: transformers in eager PyTorch."""

    def __init__(self, setup: Setup):
        if setup.dtype not in ("float32", "bfloat16"):
            reason = f"transformers runs no {setup.dtype} on a CPU; ask for bfloat16 to compare"
            raise UnavailableError(reason)
        self.transformers, self.torch = need("transformers"), need("torch")
        self.torch.set_num_threads(setup.threads)
        self.setup = setup
        self.version = f"{self.transformers.__version__}, torch {self.torch.__version__}"
        self.modes = ("plain", "prompt lookup")
        self.lookup = setup.lookup_tokens or 10  # as in transformers' documentation

    def load(self) -> None:
        """See `Peer`."""
        dtype, load = self.setup.dtype, self.transformers.AutoModelForCausalLM.from_pretrained
        model, options = self.setup.model, {}
        if model.endswith(".gguf"):  # it dequantizes the file's weights
            need("gguf")
            model, name = os.path.split(model)
            options["gguf_file"] = name
        kept = load(model, dtype=getattr(self.torch, dtype), trust_remote_code=False, **options)
        self.model = kept.eval()
        # An id outside the vocabulary, so that no token ends an answer: prompt lookup does not accept None.
        self.model.generation_config.eos_token_id = self.model.config.vocab_size

    def decode(self, ids: list[int], count: int) -> tuple[float, list[int]]:
        """See `Peer`."""
        cache = self.transformers.DynamicCache()
        tokens = [self._forward(ids, cache, 1)]

        def run() -> None:
            for _ in range(count):
                tokens.append(self._forward(tokens[-1:], cache, 1))

        return timed(run)[0], tokens

    def prompt(self, ids: list[int]) -> float:
        """See `Peer`."""
        return timed(lambda: self._forward(ids, self.transformers.DynamicCache(), 1))[0]

    def verify(self, ids: list[int], rows: int, times: int) -> list[float] | None:
        """See `Peer`."""
        cache = self.transformers.DynamicCache()
        self._forward(ids, cache, 1)

        def once() -> float:
            seconds, _ = timed(lambda: self._forward(ids[:rows], cache, rows))
            cache.crop(-rows)
            return seconds

        return [once() for _ in range(1 + times)][1:]

    def generate(self, ids: list[int], count: int, mode: str) -> tuple[float, list[int]]:
        """See `Peer`."""
        inputs = self.torch.tensor([ids])
        options = {"prompt_lookup_num_tokens": self.lookup} if mode != "plain" else {}
        options |= {"attention_mask": self.torch.ones_like(inputs), "max_new_tokens": count}
        seconds, out = timed(lambda: self.model.generate(inputs, do_sample=False, **options))
        return seconds, out[0, len(ids) :].tolist()

    def _forward(self, ids: list[int], cache: Any, keep: int) -> int:
        """Run a pass, with logits of the last `keep` rows. Returns the likeliest token after the last."""
        inputs = self.torch.tensor([ids])
        with self.torch.no_grad():
            out = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        return int(out.logits[0, -1].argmax())
