"""Checks the guarantee on a model: compares answers with drafters to those of plain decoding."""

from __future__ import annotations

import hashlib
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

from soothsay import LLM, Drafter, EngineConfig, Observation, Request, Result, SamplingParams
from soothsay.bench.measure import rotated
from soothsay.core.sampling import Nodes, perturb
from soothsay.core.sampling_ops import SamplingOps
from soothsay.drafters.base import DrafterProxy
from soothsay.drafters.registry import DrafterSpec, build_drafter
from soothsay.errors import RequestError, StepError


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token of an answer and its logits. Equal if the token and all bits of the logits are equal."""

    token: int
    digest: bytes  # hash of the whole row of the target's logits, [V] float32
    margin: float = field(compare=False)
    """Best score minus second best. Scores are the logits, above temperature 0 after sampling parameters and
    noise."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A position at which two answers differ."""

    position: int  # in the answer, from 0
    plain: Emitted | None  # None: the answer had ended
    drafted: Emitted | None

    @property
    def what(self) -> Literal["logits", "token", "both", "end"]:
        """What differs: "logits" (bits only), "token" (drawn or accepted differently), "both",
        or "end" (one answer had ended).
        """
        if self.plain is None or self.drafted is None:
            return "end"
        if self.plain.token == self.drafted.token:
            return "logits"
        return "token" if self.plain.digest == self.drafted.digest else "both"


@dataclass(frozen=True, slots=True)
class Divergence:
    """An answer that is not plain decoding's."""

    prompt: int  # index
    drafter: str
    first: Difference  # the first difference of token or bits
    token: Difference | None  # the first difference of tokens, if there is one


@dataclass(frozen=True, slots=True)
class DrafterCheck:
    """One drafter's answers against plain decoding's."""

    drafter: str
    prompts: int
    tokens: int  # emitted and compared
    steps: int  # forward passes that emitted them
    divergences: tuple[Divergence, ...]

    @property
    def mean_accepted(self) -> float:
        """Tokens a step: 1.0 for plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class EqualityReport:
    """What `compare` found."""

    comparisons: tuple[DrafterCheck, ...]
    skipped: int  # prompts that do not fit into the context or the KV pool
    seed: int  # the first prompt's; prompt i has seed + i

    @property
    def divergences(self) -> list[Divergence]:
        """All divergences. The guarantee says that there are none."""
        return [divergence for comparison in self.comparisons for divergence in comparison.divergences]


def compare(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    drafters: Mapping[str, DrafterSpec],
    params: SamplingParams,
    adapters: Sequence[str | None] = (None,),
    *,
    advance: Callable[[int], None] = lambda tokens: None,
) -> EqualityReport:
    """Answer every prompt by plain decoding and with each drafter, and compare token by token.

    Plain decoding runs each prompt alone, on a separate engine without drafter and prefix caching. All other
    requests run together on `llm` as it is configured, with each drafter and with `none`, and share the
    prefix cache. If `none` differs too, the drafter is not the cause.

    At each position the token and a hash of the whole row of its logits, [V] float32, are compared, so one
    different bit is found.

    Args:
        llm: the model, and the engine to check.
        prompts: token ids.
        drafters: by their names in the report.
        params: for all prompts; prompt i gets the seed plus i.
        adapters: of the prompts, which take turns; None: the model alone.
        advance: called after each answer with its number of tokens. Each prompt has an answer by plain
            decoding, one by `none`, and one by each drafter.

    Raises:
        RequestError: a prompt or a parameter is invalid, or no prompt fits.
        DrafterError: a drafter is unknown or does not fit the model.
        StepError: a drafter failed.
    """
    witnesses = {
        name: _Witness(build_drafter(spec, llm.engine.target), advance, llm.engine.model.kernels.sampling)
        for name, spec in ({"none": "none"} | dict(drafters)).items()
    }
    most = llm.config.kv_tokens or 0
    kept = [i for i, one in enumerate(prompts) if len(one) < _most_tokens(llm, one, params) <= most]
    if not kept:
        raise RequestError(f"none of {len(prompts)} prompts fits into the context with its answer")
    seed = secrets.randbits(48) if params.seed is None else params.seed
    own = [adapters[i % len(adapters)] for i in range(len(prompts))]
    asked = {i: (prompts[i], replace(params, seed=seed + i), own[i]) for i in kept}
    plain = _answer_plainly(llm, asked, advance)
    mixed = _answer_mixed(llm, asked, witnesses)
    comparisons = []
    for name, witness in witnesses.items():
        results = mixed[name]
        found = [_find(i, name, plain[i], witness.answer(asked[i][1], results[i])) for i in kept]
        tokens, steps = (sum(getattr(one.stats, n) for one in results.values()) for n in ("emitted", "steps"))
        divergences = tuple(divergence for divergence in found if divergence is not None)
        comparisons.append(DrafterCheck(name, len(kept), tokens, steps, divergences))
    return EqualityReport(tuple(comparisons), skipped=len(prompts) - len(kept), seed=seed)


class _Witness(DrafterProxy):
    """Notes the row of logits that each emitted token was drawn from.

    The engine shows a drafter the logits of every node, so it needs no other hook. Notes are kept by the
    request's seed.
    """

    def __init__(self, drafter: Drafter, advance: Callable[[int], None], ops: SamplingOps):
        super().__init__(drafter)
        self.advance, self.ops = advance, ops
        self._notes: dict[int, list[tuple[bytes, float]]] = defaultdict(list)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Note the rows of the accepted path. Token i of a verdict was drawn from row i of the path."""
        for seen in observations:
            if seen.tree is None or seen.logits is None or seen.verdict is None:
                continue
            path = [0, *seen.verdict.path]
            rows = seen.logits[path]  # [emitted, V]
            best = perturb(rows, [Nodes(seen.request, seen.tree, path)], self.ops).topk(2).values
            digests = [hashlib.blake2b(row, digest_size=16).digest() for row in rows.cpu().numpy()]
            self._notes[seen.request.seed] += zip(digests, (best[:, 0] - best[:, 1]).tolist(), strict=True)
        self.drafter.observe(observations)

    def release(self, request: Request) -> None:
        """Report the end of a request. A preempted request has not ended: it runs again later."""
        if request.finish_reason is not None:
            self.advance(request.num_output)
        self.drafter.release(request)

    def answer(self, params: SamplingParams, result: Result) -> list[Emitted]:
        """Pair the tokens of a result with the notes. The last step may have drawn more than was emitted."""
        notes = self._notes[params.seed or 0]
        tokens = result.token_ids
        return [Emitted(token, *note) for token, note in zip(tokens, notes[: len(tokens)], strict=True)]


def _most_tokens(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> int:
    """Return the largest number of tokens of prompt and answer together."""
    context = llm.config.max_context or 0
    if params.max_tokens is None:
        return min(context, llm.config.kv_tokens or 0)
    return min(len(prompt) + params.max_tokens, context)


_Asked = Mapping[int, tuple[Sequence[int], SamplingParams, str | None]]
"""Prompts with their parameters and adapters, by the index of the prompt."""


def _answer_plainly(llm: LLM, asked: _Asked, advance: Callable[[int], None]) -> dict[int, list[Emitted]]:
    """Answer the prompts one after the other, on a new engine that shares nothing between them."""
    most = max(_most_tokens(llm, *one[:2]) for one in asked.values())
    config = replace(llm.config, max_rows=EngineConfig.max_rows, kv_tokens=most, prefix_caching=False)
    alone = LLM(llm.model, drafter="none", tokenizer=llm.tokenizer, config=config)
    alone.eos_ids = llm.eos_ids
    ops = alone.engine.model.kernels.sampling
    witness = _Witness(build_drafter("none", alone.engine.target), advance, ops)
    return {
        i: witness.answer(params, alone.generate(prompt, params, drafter=witness, adapter=own))
        for i, (prompt, params, own) in asked.items()
    }


def _answer_mixed(llm: LLM, asked: _Asked, witnesses: Mapping[str, _Witness]) -> dict[str, dict[int, Result]]:
    """Answer each prompt with all drafters in one batch. The drafter that meets an empty cache rotates."""
    names = list(witnesses)
    order = [(i, name) for turn, i in enumerate(asked) for name in rotated(names, turn)]
    prompts, params, adapters = zip(*(asked[i] for i, _ in order), strict=True)
    drafters = [witnesses[name] for _, name in order]
    results = llm.generate(list(prompts), params, drafter=drafters, adapter=adapters)
    by_drafter: dict[str, dict[int, Result]] = {name: {} for name in names}
    for (i, name), result in zip(order, results, strict=True):
        if result.error is not None:  # an answer that was cut off would look like a difference
            raise StepError(f"drafter {name}: {result.error}")
        by_drafter[name][i] = result
    return by_drafter


def _find(prompt: int, drafter: str, plain: Sequence[Emitted], own: Sequence[Emitted]) -> Divergence | None:
    pairs = enumerate(zip_longest(plain, own))
    differences = [Difference(position, *pair) for position, pair in pairs if pair[0] != pair[1]]
    if not differences:
        return None
    token = next((difference for difference in differences if difference.what != "logits"), None)
    return Divergence(prompt, drafter, differences[0], token)
