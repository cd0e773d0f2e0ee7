"""End to end: each sequence occurs at the rate of its probability, with every drafter.

The model has five tokens, so that all sequences of three can be listed with their exact probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice, product

import numpy as np
import pytest
from scipy import stats

from soothsay import LLM, SamplingParams
from soothsay.core.batch import Batch, Rows
from soothsay.core.verify import VERIFIERS, Promise
from soothsay.drafters.models.draft_model import DraftModel
from soothsay.drafters.registry import DrafterSpec
from soothsay.model.transformer import Transformer

VOCAB, LENGTH, PROMPT, SAMPLES = 5, 3, [1, 3, 1, 2, 1], 2500
CHANCE = 1e-5  # a correct law fails in so many runs; seeds are fixed, so it fails never or always
SAMPLINGS = {
    "temperature 1": SamplingParams(max_tokens=LENGTH),
    "temperature 0.7, top_p 0.9": SamplingParams(max_tokens=LENGTH, temperature=0.7, top_p=0.9),
}

LAWFUL = [name for name, verifier in VERIFIERS.items() if verifier.promise is Promise.LAW]

Make = Callable[..., Transformer]
Said = tuple[int, ...]


@pytest.fixture(scope="module")
def models(tiny: Make) -> list[Transformer]:
    """The target and another one, smaller than the usual ones and unsure of themselves."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    made = [tiny(seed, vocab_size=VOCAB, **sizes) for seed in (1, 2)]
    for model in made:
        model.head.weight.mul_(0.4)
    return made


@pytest.fixture(scope="module")
def drafters(models: list[Transformer]) -> dict[str, DrafterSpec]:
    """Prompt lookup, and a chain and a grown tree of what another random model thinks."""
    return {
        "prompt-lookup": "prompt-lookup(min_ngram=1)",
        "chain": lambda target: DraftModel(target, model=models[1], depth=3),
        "tree": lambda target: DraftModel(target, model=models[1], depth=3, width=2, branch=3),
    }


def enumerate_law(model: Transformer, params: SamplingParams) -> dict[Said, float]:
    """Every sequence and its probability, from the model's logits in one pass without a cache."""
    law = dict.fromkeys(product(range(VOCAB), repeat=LENGTH), 1.0)
    batch = Batch.pack([Rows(np.array([*PROMPT, *said[:-1]]), 0) for said in law], group=model.spec.group)
    hidden, _ = model(batch)
    logits = model.logits(hidden).double().view(len(law), -1, VOCAB)[:, len(PROMPT) - 1 :]
    p = (logits / params.temperature).softmax(-1).numpy()  # [sequences, LENGTH, V]
    for row, said in enumerate(law):
        for step, token in enumerate(said):
            own = p[row, step]
            likelier = own[own > own[token]].sum()
            nucleus = [q for q in own if own[own > q].sum() < params.top_p]
            law[said] *= own[token] / sum(nucleus) if likelier < params.top_p else 0.0
    assert sum(law.values()) == pytest.approx(1)
    return law


def sample(
    model: Transformer, params: SamplingParams, drafters: Sequence[DrafterSpec]
) -> tuple[list[Said], float]:
    """Sequences by seed, and how many guesses were right, of those made."""
    llm = LLM(model, drafter="none", kv_tokens=8192, max_requests=256, max_rows=4096)
    many = [replace(params, seed=seed) for seed in range(SAMPLES)]
    results = llm.generate([PROMPT] * SAMPLES, many, drafter=[*islice(cycle(drafters), SAMPLES)])
    drafted = sum(result.stats.drafted for result in results)
    accepted = sum(result.stats.accepted for result in results)
    return [tuple(result.token_ids) for result in results], accepted / max(drafted, 1)


def fits(said: list[Said], law: dict[Said, float]) -> None:
    """Pearson's chi-square, rare sequences together, and nothing impossible among them."""
    counts = Counter(said)
    assert all(law[each] > 0 for each in counts)
    common = {each: p for each, p in law.items() if p * SAMPLES >= 8}
    rare = 1 - sum(common.values())
    observed = [counts[each] for each in common] + [SAMPLES - sum(counts[each] for each in common)]
    expected = [p * SAMPLES for p in common.values()] + [rare * SAMPLES]
    assert len(common) > 10
    assert stats.chisquare(observed, expected).pvalue > CHANCE


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sequences_come_as_often_as_they_should_whoever_drafts(
    name: str, models: list[Transformer], drafters: dict[str, DrafterSpec]
) -> None:
    model, params = models[0], SAMPLINGS[name]
    law = enumerate_law(model, params)
    plain, _ = sample(model, params, ["none"])
    fits(plain, law)
    said, acceptance = sample(model, params, [*drafters.values()])
    assert said == plain
    assert 0.02 < acceptance < 0.9, "guesses were made, some right and some wrong"


@pytest.mark.parametrize("verifier", LAWFUL)
def test_sequences_come_as_often_as_they_should_whoever_verifies(
    verifier: str, models: list[Transformer], drafters: dict[str, DrafterSpec]
) -> None:
    """Not the same ones as with another drafter, but as many of each. The drafters take turns."""
    params = replace(SAMPLINGS["temperature 0.7, top_p 0.9"], verifier=verifier)
    law = enumerate_law(models[0], params)
    said, acceptance = sample(models[0], params, [*drafters.values()])
    fits(said, law)
    assert 0.02 < acceptance < 0.9, "guesses were made, some right and some wrong"


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_an_answer_goes_on_where_a_longer_prompt_ends(
    verifier: str, models: list[Transformer], drafters: dict[str, DrafterSpec]
) -> None:
    """The first tokens of an answer, added to the prompt, leave the rest of the answer as it was.

    What is drawn depends on the seed and on the position in the whole text, not in the answer. With drafters
    that holds for verifiers that promise the tokens of plain decoding.
    """
    llm = LLM(models[0], drafter="none", kv_tokens=2048)
    params = SamplingParams(max_tokens=24, temperature=1.3, seed=8, verifier=verifier)
    answer = llm.generate(PROMPT, params).token_ids
    assert len({*answer}) > 3, "unsure enough for noise to matter"
    same_tokens = VERIFIERS[verifier].promise is Promise.TOKENS
    for drafter in ["none", *drafters.values()] if same_tokens else ["none"]:
        for known in (1, 2, 7, 16, 23):
            rest = replace(params, max_tokens=24 - known)
            assert llm.generate(PROMPT + answer[:known], rest, drafter=drafter).token_ids == answer[known:]
