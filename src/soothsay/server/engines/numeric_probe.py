"""Finds out the numeric mode of an engine. It runs in the engine's process."""

from __future__ import annotations

import hashlib

from soothsay.core.numerics import Numerics
from soothsay.core.params import SamplingParams
from soothsay.core.tenant import Tenant
from soothsay.llm import LLM
from soothsay.server.http.json_log import log

PROBE = 32
"""Tokens of the prompt whose log-probabilities show which bits an engine computes."""


def numerics(llm: LLM) -> Numerics:
    """The numeric mode of an engine that has nothing to do. It reads a short prompt to find out."""
    capacity = llm.engine.allocator.num_blocks * llm.engine.allocator.block_size
    return Numerics(llm.numeric_mode, min(llm.config.max_context or 0, capacity), _probe(llm))


def _probe(llm: LLM) -> str:
    """A digest of the log-probabilities of a fixed prompt and of the token after it."""
    size = min(PROBE, (llm.config.max_context or 2) // 2)
    prompt = [index * 37 % llm.model.config.vocab_size for index in range(size)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    tenant = Tenant("numeric mode")  # whose blocks nobody shares
    try:
        (request,) = llm.requests(prompt, params, drafter="none", tenant=tenant)
        llm.engine.add(request)
        llm.engine.advance(request)
    except Exception:  # the engine may still serve other requests; a canary tells what is wrong
        log.error("probe failed", exc_info=True)
        return ""
    computed = [*request.prompt_logprobs, *(piece.logprobs for piece in request.pieces)]
    return hashlib.blake2b(repr(computed).encode(), digest_size=8).hexdigest()
