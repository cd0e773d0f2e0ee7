"""The engine transformers, by Hugging Face."""

from __future__ import annotations

import os
from typing import Any

from .peer import Setup, SteppingPeer, UnavailableError, need, padded


class Transformers(SteppingPeer):
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

    def load(self) -> None:
        """See `Peer`."""
        self.model = self._loaded(self.setup.model)
        self.drafts = self._loaded(self.setup.draft_model) if self.setup.draft_model else None

    def _loaded(self, model: str) -> Any:
        load, options = self.transformers.AutoModelForCausalLM.from_pretrained, dict[str, Any]()
        if model.endswith(".gguf"):  # packed weights would be multiplied in float32, whatever the type
            need("gguf")
            model, options["gguf_file"] = os.path.split(model)
            if config := getattr(self.transformers, "GgufConfig", None):  # versions without it do so always
                options["quantization_config"] = config(dequantize=True)
        dtype = getattr(self.torch, self.setup.dtype)
        loaded = load(model, dtype=dtype, trust_remote_code=False, **options).eval()
        loaded = loaded.to(self.setup.device)
        # An id outside the vocabulary, so that no token ends an answer: prompt lookup does not accept None.
        loaded.generation_config.eos_token_id = loaded.config.vocab_size
        return loaded

    def start(self, ids: list[int]) -> int:
        """See `SteppingPeer`."""
        self.cache = self.transformers.DynamicCache()
        return self.forward(ids)

    def forward(self, ids: list[int], keep: int = 1) -> int:
        """See `SteppingPeer`."""
        options = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": keep}
        with self.torch.no_grad():
            out = self.model(input_ids=self._tensor([ids]), **options)
        return int(out.logits[0, -1].argmax())

    def forget(self, count: int) -> None:
        """See `SteppingPeer`."""
        self.cache.crop(-count)

    def answers(self, prompts: list[list[int]], count: int, mode: str) -> list[list[int]]:
        """See `Peer`. Shorter prompts of a batch are padded on their left."""
        inputs, mask = map(self._tensor, padded(prompts))
        options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": count, "do_sample": False}
        if mode == "prompt lookup":
            options["prompt_lookup_num_tokens"] = 10  # as in transformers' documentation
        elif mode == "draft model":
            options["assistant_model"] = self.drafts
        answers: list[list[int]] = self.model.generate(inputs, **options)[:, inputs.shape[1] :].tolist()
        return answers

    def _tensor(self, rows: list[list[int]]) -> Any:
        return self.torch.tensor(rows, device=self.setup.device)
