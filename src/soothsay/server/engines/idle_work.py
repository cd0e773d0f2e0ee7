"""What an engine does without requests: it finds out its numeric mode, its drafters learn, and it saves."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from soothsay.core.numerics import Numerics
from soothsay.core.params import SamplingParams
from soothsay.core.tenant import Tenant
from soothsay.engine.engine import Engine
from soothsay.errors import SoothsayError
from soothsay.llm import LLM
from soothsay.own_process import TIDY_INTERVAL, return_freed_memory
from soothsay.server.http.json_log import log

PROBE = 32
"""Tokens of the prompt whose log-probabilities show which bits an engine computes."""


def numerics(llm: LLM) -> Numerics:
    """The numeric mode of an engine that has nothing to do. It reads a short prompt to find out."""
    capacity = llm.engine.allocator.num_blocks * llm.engine.allocator.block_size
    return Numerics(llm.numeric_mode, min(llm.config.max_context or 0, capacity), _probe(llm))


def _probe(llm: LLM) -> str:
    """A digest of the log-probabilities of a fixed prompt and of the token after it, by each adapter too."""
    size = min(PROBE, (llm.config.max_context or 2) // 2)
    prompt = [index * 37 % llm.model.spec.vocab_size for index in range(size)]
    scored = 0 if llm.model.spec.source is None else None  # an encoder gives no probabilities
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1, prompt_logprobs=scored)
    tenant = Tenant("numeric mode")  # whose blocks nobody shares
    try:
        computed = list[object]()
        for adapter in (None, *sorted(llm.adapters)):
            (request,) = llm.requests(prompt, params, drafter="none", tenant=tenant, adapter=adapter)
            llm.engine.add(request)
            llm.engine.advance(request)
            computed += [*request.prompt_logprobs, *(piece.logprobs for piece in request.pieces)]
    except Exception:  # the engine may still serve other requests; a canary tells what is wrong
        log.error("probe failed", exc_info=True)
        return ""
    return hashlib.blake2b(repr(computed).encode(), digest_size=8).hexdigest()


SAVE_INTERVAL = 300.0
"""Seconds of serving after which what was learned is saved, at the next moment without requests."""

BUSY_FACTOR = 4
"""An engine that is never idle saves after this many intervals. That delays its answers by some 0.1 s."""


STUDY_PAUSE = 0.05
"""Seconds between two moments of learning, in which the drafters' share of time adds up."""


class IdleWork:
    """Keeps the time of the work between requests.

    Args:
        engine: the engine, stepped by this thread only.
        clock: returns seconds since an arbitrary moment.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic):
        self._engine, self._clock = engine, clock
        self._saved = self._tidied = clock()
        self._served = False  # since the last save
        self._studies = True  # whether drafters have more to learn, or passes are to be measured

    def seconds_to_next(self) -> float | None:
        """Seconds until `run` has something to do, at least 0; None: not before the next request."""
        if self._studies:
            return STUDY_PAUSE
        if self._engine.kept is None or not self._served:
            return None
        return max(self._saved + SAVE_INTERVAL - self._clock(), 0.0)

    def run(self) -> None:
        """Do what is due. Call it while there are no requests."""
        if self._studies:
            self._studies = self._engine.study()
        due = self.seconds_to_next()
        if due is not None and due <= 0:
            self.save()

    def after_step(self) -> None:
        """Note a step. Return freed memory now and then, and save if that was put off for too long."""
        self._served = self._studies = True
        if self._clock() - self._tidied >= TIDY_INTERVAL:
            return_freed_memory()
            self._tidied = self._clock()
        if self._engine.kept is not None and self._clock() - self._saved > BUSY_FACTOR * SAVE_INTERVAL:
            self.save()

    def save(self) -> None:
        """Save what was learned. A failure is logged, and does no harm."""
        try:
            self._engine.save_learned()
        except SoothsayError as error:
            log.error("what drafters learned was not saved", extra={"reason": str(error)})
        self._saved, self._served = self._clock(), False
