"""Is the guarantee kept on this model, with these prompts? Every answer is compared with plain decoding's."""

from __future__ import annotations

import hashlib
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

from soothsay.config import EngineConfig
from soothsay.drafters import Drafter, DrafterSpec, Observation, build_drafter
from soothsay.engine.params import SamplingParams
from soothsay.engine.request import Request
from soothsay.engine.sampling import Nodes, perturb
from soothsay.engine.tree import DraftTree
from soothsay.errors import RequestError
from soothsay.llm import LLM
from soothsay.result import Result


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token of an answer, and what it was drawn from. Equal if the token and all bits of the logits are."""

    token: int
    digest: bytes  # of the whole row of the target's logits, V float32
    margin: float = field(compare=False)
    """How far the best score stands above the second: logits at temperature 0, else with noise and sampling
    parameters."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where two answers differ."""

    position: int  # in the answer, from 0
    plain: Emitted | None  # None: the answer had ended
    drafted: Emitted | None

    @property
    def what(self) -> Literal["logits", "token", "both", "end"]:
        """What differs. "logits": their bits alone. "token": it alone, drawn or accepted in another way from
        the same row. "end": one of the answers had ended.
        """
        if self.plain is None or self.drafted is None:
            return "end"
        if self.plain.token == self.drafted.token:
            return "logits"
        return "token" if self.plain.digest == self.drafted.digest else "both"


@dataclass(frozen=True, slots=True)
class Divergence:
    """An answer that is not plain decoding's."""

    prompt: int  # its index among those given
    drafter: str
    first: Difference  # where token or bits first differ
    token: Difference | None  # where the tokens first do: the same place, a later one, or nowhere


@dataclass(frozen=True, slots=True)
class Comparison:
    """One drafter's answers against plain decoding's."""

    drafter: str
    prompts: int
    tokens: int  # emitted, and compared
    steps: int  # forward passes that emitted them
    divergences: tuple[Divergence, ...]

    @property
    def mean_accepted(self) -> float:
        """Tokens a step: 1.0 for plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What `compare` found."""

    comparisons: tuple[Comparison, ...]
    skipped: int  # prompts that the context, or the KV pool, has no room for
    seed: int  # of the first prompt; each later one has the next

    @property
    def divergences(self) -> list[Divergence]:
        """All of them; an empty list is what was promised."""
        return [divergence for comparison in self.comparisons for divergence in comparison.divergences]


def compare(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    drafters: Mapping[str, DrafterSpec],
    params: SamplingParams,
    *,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Report:
    """Answer every prompt plainly and with each drafter, and compare token by token.

    Plainly means on an engine of its own: alone, without a drafter, without prefix caching. The others run on
    `llm` as it is configured, all together: requests of all drafters, and of none, come and go beside each
    other, and find each other's prompts in the prefix cache. Where `none` differs too, it is not the drafter.

    What is compared at each position is the token and a digest of the whole row of logits that it was drawn
    from, as the target gave it: a single bit of any of its V float32 values shows.

    Args:
        llm: the model, and the engine that is checked.
        prompts: token ids.
        drafters: by the name that the report calls them.
        params: for all prompts; each has a seed of its own, counted up from theirs.
        advance: called after each answer with its number of tokens: one answer of each prompt plainly, one
            without a drafter in the batch, and one of each drafter.

    Raises:
        RequestError: a prompt or a parameter cannot be, or no prompt fits.
        DrafterError: a drafter is unknown or does not fit.
    """
    witnesses = {
        name: _Witness(build_drafter(spec, llm.engine.target), advance)
        for name, spec in ({"none": "none"} | dict(drafters)).items()
    }
    kept = [
        i
        for i, prompt in enumerate(prompts)
        if len(prompt) < _most_tokens(llm, prompt, params) <= (llm.config.kv_tokens or 0)
    ]
    if not kept:
        raise RequestError(f"none of {len(prompts)} prompts fits into the context with its answer")
    seed = secrets.randbits(48) if params.seed is None else params.seed
    asked = {i: replace(params, seed=seed + i) for i in kept}
    fitting = {i: prompts[i] for i in kept}
    plain = _answer_plainly(llm, fitting, asked, advance)
    mixed = _answer_mixed(llm, fitting, asked, witnesses)
    comparisons = []
    for name, witness in witnesses.items():
        results = mixed[name]
        found = [_find(i, name, plain[i], witness.answer(asked[i], results[i])) for i in kept]
        comparisons.append(
            Comparison(
                name,
                prompts=len(kept),
                tokens=sum(result.stats.emitted for result in results.values()),
                steps=sum(result.stats.steps for result in results.values()),
                divergences=tuple(divergence for divergence in found if divergence is not None),
            )
        )
    return Report(tuple(comparisons), skipped=len(prompts) - len(kept), seed=seed)


class _Witness(Drafter):
    """Guesses as another drafter does, and notes what each emitted token was drawn from.

    Drafters are shown the logits of every node, so that no part of the engine needs to know of this. A
    request is known by its seed.
    """

    def __init__(self, drafter: Drafter, advance: Callable[[int], None]):
        self.drafter, self.advance = drafter, advance
        self.taps, self.max_nodes = drafter.taps, drafter.max_nodes
        self._notes: dict[int, list[tuple[bytes, float]]] = defaultdict(list)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The other's guesses."""
        return self.drafter.propose(requests)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Note the rows on the accepted path: token i of a verdict was drawn from the i-th of them."""
        for seen in observations:
            if seen.tree is None or seen.logits is None or seen.verdict is None:
                continue
            path = [0, *seen.verdict.path]
            rows = seen.logits[path]  # [emitted, V]
            best = perturb(rows, [Nodes(seen.request, seen.tree, path)]).topk(2).values
            digests = [hashlib.blake2b(row, digest_size=16).digest() for row in rows.cpu().numpy()]
            self._notes[seen.request.seed] += zip(digests, (best[:, 0] - best[:, 1]).tolist(), strict=True)
        self.drafter.observe(observations)

    def release(self, request: Request) -> None:
        """Tell that a request has ended; a preempted one comes again."""
        if request.finish_reason is not None:
            self.advance(request.num_output)
        self.drafter.release(request)

    def answer(self, params: SamplingParams, result: Result) -> list[Emitted]:
        """The tokens of a result with what was noted; the last step may have drawn more than was emitted."""
        notes = self._notes[params.seed or 0]
        tokens = result.token_ids
        return [Emitted(token, *note) for token, note in zip(tokens, notes[: len(tokens)], strict=True)]


def _most_tokens(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> int:
    """Tokens of prompt and answer that a request may come to have."""
    context = llm.config.max_context or 0
    if params.max_tokens is None:
        return min(context, llm.config.kv_tokens or 0)
    return min(len(prompt) + params.max_tokens, context)


def _answer_plainly(
    llm: LLM,
    prompts: Mapping[int, Sequence[int]],
    params: Mapping[int, SamplingParams],
    advance: Callable[[int], None],
) -> dict[int, list[Emitted]]:
    """One prompt after the other, each as if there had been no other."""
    config = replace(
        llm.config,
        max_rows=EngineConfig.max_rows,
        kv_tokens=max(_most_tokens(llm, prompt, params[i]) for i, prompt in prompts.items()),
        prefix_caching=False,
    )
    alone = LLM(llm.model, drafter="none", tokenizer=llm.tokenizer, config=config)
    alone.eos_ids = llm.eos_ids
    witness = _Witness(build_drafter("none", alone.engine.target), advance)
    return {
        i: witness.answer(params[i], alone.generate(prompt, params[i], drafter=witness))
        for i, prompt in prompts.items()
    }


def _answer_mixed(
    llm: LLM,
    prompts: Mapping[int, Sequence[int]],
    params: Mapping[int, SamplingParams],
    witnesses: Mapping[str, _Witness],
) -> dict[str, dict[int, Result]]:
    """Each prompt with all drafters in turn; who comes first, and finds nothing cached, changes."""
    names = list(witnesses)
    order = []
    for turn, i in enumerate(prompts):
        first = turn % len(names)
        order += [(i, name) for name in names[first:] + names[:first]]
    results = llm.generate(
        [prompts[i] for i, _ in order],
        [params[i] for i, _ in order],
        drafter=[witnesses[name] for _, name in order],
    )
    by_drafter: dict[str, dict[int, Result]] = {name: {} for name in names}
    for (i, name), result in zip(order, results, strict=True):
        by_drafter[name][i] = result
    return by_drafter


def _find(
    prompt: int, drafter: str, plain: Sequence[Emitted], drafted: Sequence[Emitted]
) -> Divergence | None:
    differences = [
        Difference(position, *pair)
        for position, pair in enumerate(zip_longest(plain, drafted))
        if pair[0] != pair[1]
    ]
    if not differences:
        return None
    token = next((difference for difference in differences if difference.what != "logits"), None)
    return Divergence(prompt, drafter, differences[0], token)
