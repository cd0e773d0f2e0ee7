"""The engine soothsay, under the same conditions as the others."""

from __future__ import annotations

from typing import Any

from .peer import Peer, Setup, need, timed


class Soothsay(Peer):
    """soothsay, without prefix caching."""

    def __init__(self, setup: Setup):
        torch, self.soothsay = need("torch"), need("soothsay")
        torch.set_num_threads(setup.threads)
        self.step = need("soothsay.model.timing.pass_measuring")
        self.setup = setup
        self.version = self.soothsay.__version__
        self.modes = ("plain", *setup.drafters)

    def load(self) -> None:
        """See `Peer`."""
        own = {name: getattr(self.setup, name) for name in ("dtype", "device", "kernels")}
        engine = {"max_context": self.setup.context, "prefix_caching": False}
        self.llm = self.soothsay.LLM(self.setup.model, drafter="none", **own, **engine)

    def decode(self, ids: list[int], count: int) -> tuple[float, list[int]]:
        """See `Peer`."""
        stream = self.llm.stream(ids, self._params(count + 1))
        tokens = iter(stream)
        next(tokens)
        seconds, _ = timed(lambda: list(tokens))
        return seconds, stream.choice.token_ids

    def prompt(self, ids: list[int]) -> float:
        """See `Peer`."""
        return self.generate(ids, 1, "plain")[0]

    def verify(self, ids: list[int], rows: int, times: int) -> list[float] | None:
        """See `Peer`. It times the pass alone, as for other engines; `decode` times whole steps."""
        cache = self.step.filled_cache(self.llm.model, len(ids), rows)
        step = self.step.VerifyPass(self.llm.model, cache, rows, len(ids))
        step()
        return [timed(lambda: float(step()[0, 0]))[0] for _ in range(times)]  # behind a wait for the device

    def answers(self, prompts: list[list[int]], count: int, mode: str) -> list[list[int]]:
        """See `Peer`."""
        drafter = "none" if mode == "plain" else mode
        streams = [self.llm.stream(prompt, self._params(count), drafter=drafter) for prompt in prompts]
        return [stream.choice.token_ids for stream in streams]

    def _params(self, count: int) -> Any:
        return self.soothsay.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
