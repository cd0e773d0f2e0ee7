"""What a tenant sees does not depend on the requests of other tenants."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain
from statistics import NormalDist
from time import perf_counter

import pytest
from bundled import bundled
from every_drafter import DRAFTERS, resolve
from slow import mostly_slow

from soothsay import LLM, Grammar, Request, SamplingParams
from soothsay.core.tenant import EVERYBODY, Tenant
from soothsay.request_builder import Prompt

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # untrained heads cause it

VICTIM, ATTACKER = Tenant("victim"), Tenant("attacker")

KNOWN = "Ward 7, notes of the night. The patient Jonathan "
SECRET = "Abernathy was given nine grams of colchicine because his left knee hurt since Thursday evening."

PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=1)

CLOCKED = ("auto", "prompt-lookup | mtp | draft-model")
"""Drafters that look at the clock, so that no two runs are the same. The ranks below test these."""

LEARNERS = ("suffix", "ngram", "recycling", "lookahead", "recycling(tree=measured, branch=4)")
"""Drafters that learn from requests that have ended."""


def serve(llm: LLM, prompt: Prompt, tenant: Tenant, params: SamplingParams = PLAIN) -> Request:
    """Answer a prompt, with traces."""
    (request,) = llm.requests(prompt, params, tenant=tenant, traced=True)
    llm.engine.add(request)
    while request.finish_reason is None:
        llm.engine.step()
    return request


def seen(request: Request) -> tuple[object, ...]:
    """Everything that is reported of a request."""
    assert request.traces is not None
    return request.tokens.tolist(), list(request.traces), request.stats, request.num_prefix_hits


def attack(llm: LLM, tenant: Tenant) -> list[tuple[object, ...]]:
    """What somebody sees who knows a part of the secret text, and tries more and more of it."""
    sampled = replace(PLAIN, temperature=0.8, seed=3)
    cuts = (len(KNOWN), len(KNOWN) + 12, len(KNOWN) + 40)
    return [
        seen(serve(llm, (KNOWN + SECRET)[:cut], tenant, params))
        for cut in cuts
        for params in (PLAIN, sampled)
    ]


def after_the_victim(spec: str, victim: Tenant | None) -> list[tuple[object, ...]]:
    """What an attacker sees after a victim's requests. None: there are none."""
    llm = bundled("int8", drafter=spec, kv_tokens=4096)
    if victim is not None:
        for _ in range(2):
            serve(llm, KNOWN + SECRET, victim)
            serve(llm, f"Repeat: {KNOWN + SECRET}", victim)
    return attack(llm, ATTACKER)


@pytest.mark.parametrize("spec", mostly_slow([spec for spec in DRAFTERS if spec not in CLOCKED], 2))
def test_nothing_that_a_tenant_sees_depends_on_others(spec: str) -> None:
    alone, beside = (after_the_victim(resolve(spec), victim) for victim in (None, VICTIM))
    assert alone == beside
    shared = after_the_victim(resolve(spec), ATTACKER)
    assert shared != alone, "in one tenant, cached tokens at least tell"
    if spec in LEARNERS:
        drafts = [[trace for _, traces, *_ in what for trace in traces] for what in (alone, shared)]
        assert drafts[0] != drafts[1], "in one tenant, drafts tell too"


@pytest.mark.parametrize("tenant", [EVERYBODY, VICTIM, VICTIM._replace(salt="x")])
def test_answers_do_not_depend_on_the_tenant(tenant: Tenant) -> None:
    llm = LLM("sibyl", dtype="int8", kv_tokens=4096)
    params = replace(PLAIN, temperature=1.0, seed=5)
    expected = llm.generate(KNOWN, params).token_ids
    for _ in range(2):
        request = serve(llm, KNOWN, tenant, params)
        assert request.tokens[request.num_prompt :].tolist() == expected


def test_a_salt_keeps_requests_of_one_name_apart() -> None:
    llm = LLM("sibyl", dtype="int8", kv_tokens=4096)
    serve(llm, KNOWN + SECRET, Tenant("a", "1"))
    assert serve(llm, KNOWN + SECRET, Tenant("a", "2")).num_prefix_hits == 0
    assert serve(llm, KNOWN + SECRET, Tenant("a")).num_prefix_hits == 0
    assert serve(llm, KNOWN + SECRET, Tenant("a", "1")).num_prefix_hits > 0


def test_a_grammar_is_compiled_for_each_tenant() -> None:
    llm = LLM("sibyl", dtype="int8", kv_tokens=4096)
    compiled = []
    builder = llm._builder._grammars
    assert builder is not None
    fresh = builder.fresh
    builder.fresh = lambda grammar: (compiled.append(grammar), fresh(grammar))[1]  # type: ignore[method-assign]
    params = replace(PLAIN, ignore_eos=False, grammar=Grammar.choice(["yes", "no"]))
    for tenant in (VICTIM, VICTIM, ATTACKER):
        serve(llm, KNOWN, tenant, params)
    assert len(compiled) == 2


# 10,000 probes

CANDIDATES = 5
"""Words that may be at each secret place. The attacker knows them all."""

PLACES = 10
"""Secret words in the victim's prompt. Each is the last of a block of 16 tokens, where the prefix cache tells
most; the attacker knows the other 15."""


def probe(llm: LLM, prompt: list[int], tenant: Tenant) -> dict[str, float]:
    """Send a guess twice. Returns everything that may tell whether it is right.

    The second time, all of the prompt but its last token is cached. So a draft follows the prompt at once.
    """
    begin = perf_counter()
    first, second = (serve(llm, prompt, tenant, replace(PLAIN, max_tokens=3)) for _ in range(2))
    seconds = perf_counter() - begin
    assert second.traces is not None
    return {
        "text": float(sum(second.tokens[second.num_prompt :])),
        "draft tokens": float(sum(len(trace.tokens) - 1 for trace in second.traces)),
        "draft tokens of suffix": float(sum(trace.authors.count("suffix") for trace in second.traces)),
        "accepted": float(first.stats.accepted + second.stats.accepted),
        "cached tokens": float(first.num_prefix_hits),
        "time": -seconds,
    }


def ranks_of_right_guesses(trials: int, victim: Tenant, attacker: Tenant) -> dict[str, list[float]]:
    """The rank of the right guess among all guesses, 0 to 1, for each way to look at them.

    The secret is drawn anew for each trial, so the rank is uniform if nothing is seen of it. Equal values
    share their ranks at random.
    """
    chance = random.Random(0)
    llm = LLM("sibyl", dtype="int8", drafter="auto", kv_tokens=16_384)
    ranks: dict[str, list[float]] = {}
    for _ in range(trials):
        known = [[chance.randrange(300, 8000) for _ in range(15)] for _ in range(PLACES + 1)]
        choices = [chance.sample(range(300, 8000), CANDIDATES) for _ in range(PLACES)]
        secret = [chance.choice(tokens) for tokens in choices]
        blocks = [[*words, token] for words, token in zip(known, secret, strict=False)]
        serve(llm, [*chain(*blocks), *known[-1]], victim)
        for place, tokens in enumerate(choices):
            before = [*chain(*blocks[:place]), *known[place]]
            shown = {
                token: probe(llm, [*before, token, known[place + 1][0]], attacker)
                for token in chance.sample(tokens, len(tokens))
            }
            for name in shown[tokens[0]]:
                values = {token: (seen[name], chance.random()) for token, seen in shown.items()}
                below = sum(values[token] < values[secret[place]] for token in tokens)
                ranks.setdefault(name, []).append((below + chance.random()) / len(tokens))
    return ranks


def p_value(ranks: list[float]) -> float:
    """Probability of a mean rank as far from 1/2 as this one, or farther, if ranks are uniform."""
    z = (sum(ranks) / len(ranks) - 0.5) * (12 * len(ranks)) ** 0.5
    return 2 * NormalDist().cdf(-abs(z))


def test_in_one_tenant_probes_tell_what_others_wrote() -> None:
    ranks = ranks_of_right_guesses(6, ATTACKER, ATTACKER)
    assert min(p_value(own) for own in ranks.values()) < 1e-6, "the attack works where nothing is kept apart"


def test_between_tenants_some_probes_tell_nothing() -> None:
    ranks = ranks_of_right_guesses(6, VICTIM, ATTACKER)
    del ranks["time"]  # a busy machine delays some
    assert min(p_value(own) for own in ranks.values()) > 1e-5  # `auto` goes by the clock: the ranks are new


@pytest.mark.slow
def test_between_tenants_ten_thousand_probes_tell_nothing() -> None:
    ranks = ranks_of_right_guesses(10_000 // (PLACES * CANDIDATES), VICTIM, ATTACKER)
    for name, own in ranks.items():
        right = sum(rank > 1 - 1 / CANDIDATES for rank in own) / len(own)
        print(f"{name}: {right:.1%} right, p = {p_value(own):.3f}")
    assert min(p_value(own) for own in ranks.values()) > 0.01
