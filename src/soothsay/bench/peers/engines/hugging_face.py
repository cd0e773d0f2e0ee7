"""The engine transformers, by Hugging Face."""

from __future__ import annotations

import os
from typing import Any

from .peer import Peer, Setup, UnavailableError, need, timed


class Transformers(Peer):
    """The reference implementation: transformers in eager PyTorch."""

    def __init__(self, setup: Setup):
        if setup.dtype not in ("float32", "bfloat16", "float16"):
            reason = f"transformers runs no {setup.dtype} on a CPU; ask for bfloat16 to compare"
            raise UnavailableError(reason)
        self.transformers, self.torch = need("transformers"), need("torch")
        self.torch.set_num_threads(setup.threads)
        self.setup = setup
        self.version = f"{self.transformers.__version__}, torch {self.torch.__version__}"
        self.modes = ("plain", "prompt lookup", *(("draft model",) if setup.draft_model else ()))
        self.lookup = setup.lookup_tokens or 10  # as in transformers' documentation

    def load(self) -> None:
        """See `Peer`."""
        self.model = self._loaded(self.setup.model)
        self.drafts = self._loaded(self.setup.draft_model) if self.setup.draft_model else None

    def _loaded(self, model: str) -> Any:
        load, options = self.transformers.AutoModelForCausalLM.from_pretrained, dict[str, Any]()
        if model.endswith(".gguf"):  # packed weights would be multiplied in float32, whatever the type
            need("gguf")
            model, options["gguf_file"] = os.path.split(model)
            options["quantization_config"] = self.transformers.GgufConfig(dequantize=True)
        dtype = getattr(self.torch, self.setup.dtype)
        loaded = load(model, dtype=dtype, trust_remote_code=False, **options).eval()
        loaded = loaded.to(self.setup.device)
        # An id outside the vocabulary, so that no token ends an answer: prompt lookup does not accept None.
        loaded.generation_config.eos_token_id = loaded.config.vocab_size
        return loaded

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

    def answers(self, prompts: list[list[int]], count: int, mode: str) -> list[list[int]]:
        """See `Peer`. Shorter prompts of a batch are padded on their left."""
        longest = max(map(len, prompts))
        inputs = self._tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
        mask = self._tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": count, "do_sample": False}
        if mode == "prompt lookup":
            options["prompt_lookup_num_tokens"] = self.lookup
        elif mode == "draft model":
            options["assistant_model"] = self.drafts
        answers: list[list[int]] = self.model.generate(inputs, **options)[:, longest:].tolist()
        return answers

    def _forward(self, ids: list[int], cache: Any, keep: int) -> int:
        """Run a pass, with logits of the last `keep` rows. Returns the likeliest token after the last."""
        inputs = self._tensor([ids])
        with self.torch.no_grad():
            out = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        return int(out.logits[0, -1].argmax())

    def _tensor(self, rows: list[list[int]]) -> Any:
        return self.torch.tensor(rows, device=self.setup.device)
