"""The guarantee: drafters, trees, batches, caches, chunks and preemption change no token or bit of logits.

Each drafter in the registry is tested, and the variants in `every_drafter.py`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bundled import bundled
from every_drafter import DRAFTERS, resolve
from families import load, random_oracle
from heads import write_assistant
from mxfp4_models import quantized_oracle
from slow import distinct

from soothsay import LLM, Grammar, Result, SamplingParams, Stream
from soothsay.core.request import Request
from soothsay.core.turn import Turn
from soothsay.drafters.heads.checkpoints.head_directory import write_head
from soothsay.model.ops.linear import Dense, stock_linear
from soothsay.model.specs.attention_spec import QueryGrowthSpec, RopeSpec
from soothsay.model.specs.model_spec import PositionsSpec
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.train.new_heads import medusa
from soothsay.train.sequences import TrainingKernels

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # untrained heads cause it


@pytest.fixture
def drafter(request: pytest.FixtureRequest) -> str:
    """A drafter's specification."""
    return resolve(request.param)


GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.9, seed=7)
PENALIZED = replace(
    SAMPLED,
    temperature=0.8,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    logit_bias={11: 2.0, 12: -3.0},
    min_tokens=10,
    min_p=0.01,
    ignore_eos=False,
)
REPORT = {
    "title": {"type": "string", "maxLength": 30},
    "kind": {"enum": ["story", "sum", "translation"]},
    "words": {"type": "array", "items": {"type": "string"}},
}
JSON = Grammar.json_schema({"type": "object", "properties": REPORT, "required": ["title", "kind", "words"]})
CONSTRAINED = replace(SAMPLED, grammar=JSON, ignore_eos=False, top_p=0.95)
MODES = {"greedy": GREEDY, "sampled": SAMPLED, "penalized": PENALIZED, "constrained": CONSTRAINED}
GREEDY_JSON = replace(GREEDY, grammar=JSON, ignore_eos=False)
BANNED = replace(
    SAMPLED,
    allowed_token_ids=[*range(3000)],
    bad_words=["the", "a man", "is going", "."],
    stop=["and"],
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    prompt_logprobs=2,
)
MIXED = [GREEDY, SAMPLED, PENALIZED, CONSTRAINED, GREEDY_JSON, BANNED, PENALIZED, GREEDY]  # one a prompt

RIVER = (
    "The river rises in the hills north of the town and flows through farmland. In spring the river "
    "floods the low meadows, and farmers move their cattle to higher ground. The river rises in the hills. "
)
PROMPTS = [
    f"Summarize: {RIVER * 2}",
    "Hello!",
    "Translate German to English: Ein Mann steht auf einer Leiter und repariert das Dach.",
    f"Which words are repeated here? {'one two three one two three ' * 6}",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell?",
    f"{RIVER} What happens in spring?",
    "Write a Python function that adds two numbers.",
    f"{RIVER * 3} Where does the river rise?",
]


@dataclass(frozen=True)
class Served:
    """An answer, with the requests that produced it."""

    result: Result
    requests: list[Request]


def same(result: Result, expected: Result) -> None:
    """Assert equal tokens, text, finish reason, and bits of the log-probabilities."""
    assert result.token_ids == expected.token_ids
    assert result.text == expected.text
    assert result.finish_reason == expected.finish_reason
    assert result.logprobs == expected.logprobs
    assert result.prompt_logprobs == expected.prompt_logprobs


def make(dtype: str = "float32", **options: object) -> LLM:
    return bundled(dtype, drafter="none", **{"kv_tokens": 8192, **options})


@cache
def prompts() -> list[list[int]]:
    llm = make(max_context=64)
    return [llm.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS]


@cache
def plain(dtype: str = "float32") -> list[Result]:
    """Return the reference answers: plain decoding of each prompt alone, without prefix caching."""
    llm = make(dtype, prefix_caching=False)
    return [llm.generate(prompt, params) for prompt, params in zip(prompts(), MIXED, strict=True)]


SECOND = distinct("int8", "bfloat16")[-1]
"""A format beside float32 and int4. It is not bfloat16 where that would be float32."""


def all_same(results: list[Result], dtype: str = "float32") -> None:
    for result, expected in zip(results, plain(dtype), strict=True):
        same(result, expected)


def watch(llm: LLM) -> list[Request]:
    """Record the requests that are added to an engine."""
    seen: list[Request] = []
    add = llm.engine.add
    llm.engine.add = lambda request: (seen.append(request), add(request))[1]  # type: ignore[method-assign]
    return seen


def preempt_often(llm: LLM) -> None:
    """Preempt the last running request before each fourth step that has one, even if memory suffices.

    Whether memory runs out depends on drafts, and drafts of a controller depend on the clock.
    """
    scheduler, steps = llm.engine.scheduler, itertools.count(1)
    schedule = scheduler.schedule

    def preempt_and_schedule(alone: Request | None = None) -> list[Turn]:
        if scheduler.running and next(steps) % 4 == 0:
            scheduler.preempt(scheduler.running[-1])
        return schedule(alone)

    scheduler.schedule = preempt_and_schedule  # type: ignore[method-assign]


def alone(drafter: str, places: Sequence[int]) -> None:
    llm = make()
    for i in places:
        same(llm.generate(prompts()[i], MIXED[i], drafter=drafter), plain()[i])


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS, indirect=True)
def test_every_prompt_alone(drafter: str) -> None:
    alone(drafter, range(len(PROMPTS)))


@pytest.mark.parametrize("drafter", DRAFTERS, indirect=True)
class TestEveryDrafter:
    """Each test in another numeric mode. A batch of all drafters has all modes, below."""

    def test_alone(self, drafter: str, request: pytest.FixtureRequest) -> None:
        """At T = 0, and above in one of five ways; the drafters take turns. The slow test has all eight."""
        number = DRAFTERS.index(request.node.callspec.params["drafter"])
        alone(drafter, ((0, 4, 7)[number % 3], (1, 2, 3, 5, 6)[number % 5]))

    def test_again_after_prefix_hits(self, drafter: str) -> None:
        llm = make("int8")
        llm.generate(
            prompts(), replace(GREEDY, max_tokens=1)
        )  # plain decoding: the drafter has not seen these blocks
        requests = watch(llm)
        for _ in range(2):  # where a drafter needs the features of all tokens, it has hits the second time
            all_same(llm.generate(prompts(), MIXED, drafter=drafter), "int8")
        scored = [request for request in requests if request.params.prompt_logprobs is not None]
        assert [request.num_prefix_hits for request in scored] == [
            0,
            0,
        ]  # all rows of their prompts are needed
        assert sum(request.num_prefix_hits > 0 for request in requests[len(MIXED) :]) == 5

    def test_in_small_chunks_with_so_little_memory_that_requests_are_preempted(
        self, drafter: str, request: pytest.FixtureRequest
    ) -> None:
        number = DRAFTERS.index(request.node.callspec.params["drafter"])
        dtype = (SECOND, "int4")[number % 2]
        longest = max(len(prompt) for prompt in prompts()) + (GREEDY.max_tokens or 0)
        llm = make(dtype, kv_tokens=longest + 100, block_size=8, max_rows=24)
        requests = watch(llm)
        preempt_often(llm)
        all_same(llm.generate(prompts(), MIXED, drafter=drafter), dtype)
        assert sum(request.num_preemptions for request in requests) >= 3  # reading prompts takes 19 steps


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_with_keys_and_values_in_int8(dtype: str) -> None:
    """After prefix hits, in small chunks, preempted, with drafters that share the pool or have their own."""
    longest = max(len(prompt) for prompt in prompts()) + (GREEDY.max_tokens or 0)
    small = {"kv_tokens": longest + 100, "block_size": 8, "max_rows": 24}
    llm = make(dtype, kv_dtype="int8", **small)
    alone = make(dtype, kv_dtype="int8", prefix_caching=False)
    assert "KV pool int8" in llm.numeric_mode
    expected = [alone.generate(*one) for one in zip(prompts(), MIXED, strict=True)]
    assert any(a.logprobs != b.logprobs for a, b in zip(expected, plain(dtype), strict=True))
    requests = watch(llm)
    preempt_often(llm)
    names = ["suffix", "mtp", "layer-skip", "draft-model(model=sibyl)", "prompt-lookup | mtp"]
    for shift in range(2):
        drafters = [names[(i + shift) % len(names)] for i in range(len(PROMPTS))]
        results = llm.generate(prompts(), MIXED, drafter=drafters)
        for result, one in zip(results, expected, strict=True):
            same(result, one)
    assert sum(request.num_preemptions for request in requests) >= 3
    assert any(request.num_prefix_hits for request in requests)


def test_priorities_and_bounds_on_guesses_in_a_mixed_batch() -> None:
    """Memory is so small that requests are preempted, and their order decides which.

    The first two begin together and draft nothing, so both grow by one token a step. There is memory for
    their prompts and not for their answers, whatever the others draft.
    """
    bounds = {0: 0, 7: 0, 1: None, 2: 1, 3: 3, 4: None, 5: 1, 6: 3}  # number -> most nodes, by arrival
    llm = make(kv_tokens=len(prompts()[0]) + len(prompts()[7]) + 16, block_size=8)
    requests: dict[int, Request] = {}
    for i, most in bounds.items():
        asked = {"drafter": resolve(DRAFTERS[-i]), "max_nodes": most, "priority": -i % 3}
        (requests[i],) = llm.requests(prompts()[i], MIXED[i], **asked, traced=i > 4)  # type: ignore[arg-type]
        llm.engine.add(requests[i])
        if len(requests) > 1:
            llm.engine.step()
    for i, expected in enumerate(plain()):
        same(Stream(llm.engine, requests[i]).result, expected)
    assert {request.priority for request in requests.values()} == {0, 1, 2}
    assert requests[7].num_preemptions > requests[0].num_preemptions == 0  # priorities 2 and 0
    for i, request in requests.items():
        assert request.stats.drafted <= request.stats.steps * (99 if bounds[i] is None else bounds[i])


BATCHES = [
    pytest.param(dtype, shift, marks=() if (number + place) % 4 == 0 else pytest.mark.slow)
    for number, dtype in enumerate(("float32", "bfloat16", "int8", "int4"))
    for place, shift in enumerate(range(0, len(DRAFTERS), len(PROMPTS)))
]
"""Number formats, and the first of eight drafters. The quick ones have each drafter and each format once."""


@pytest.mark.parametrize(("dtype", "shift"), BATCHES)
def test_mixed_batch_of_mixed_drafters(dtype: str, shift: int) -> None:
    drafters = [resolve(DRAFTERS[(i + shift) % len(DRAFTERS)]) for i in range(len(PROMPTS))]
    all_same(make(dtype).generate(prompts(), MIXED, drafter=drafters), dtype)


@pytest.mark.parametrize("shift", range(0, len(DRAFTERS), len(PROMPTS)))
def test_an_answer_that_another_engine_has_begun_goes_on_at_its_next_token(shift: int) -> None:
    """As when a replica dies: the other engine has the tokens so far and nothing else. If the replica is only
    drained, it goes on, and the other one reads what came meanwhile."""
    llm = make("int8")
    for cut in (6, 1000):
        requests: list[Request] = []
        for i, (prompt, params, expected) in enumerate(zip(prompts(), MIXED, plain("int8"), strict=True)):
            drafter = resolve(DRAFTERS[(i + shift) % len(DRAFTERS)])
            (request,) = llm.requests(prompt, params, drafter=drafter)
            begun = expected.token_ids[:cut]
            request.resume(begun, ended=len(begun) == len(expected.token_ids))
            requests.append(request)
            if len(begun) < len(expected.token_ids):
                llm.engine.add(request)
        for _ in range(4):
            llm.engine.step()
        for request, expected in zip(requests, plain("int8"), strict=True):
            said = expected.token_ids[: 2 * cut]
            llm.engine.catch_up(request, said, ended=len(said) == len(expected.token_ids))
            count = request.num_output - len(request.pieces)
            while request.finish_reason is None:
                llm.engine.step()
            assert request.finish_reason == expected.finish_reason
            assert request.answer.text == expected.text
            assert [piece.token for piece in request.pieces] == expected.token_ids[count:]
            assert expected.logprobs is not None
            assert [piece.logprobs for piece in request.pieces] == expected.logprobs[count:]


def test_with_chunks_that_depend_on_the_time() -> None:
    """The boundaries of prefill chunks differ between runs, because they depend on measured times."""
    for max_stall in (1e-9, 0.02):
        llm = make("int8", max_stall=max_stall)
        drafters = [resolve(DRAFTERS[i % len(DRAFTERS)]) for i in range(len(PROMPTS))]
        all_same(llm.generate(prompts(), MIXED, drafter=drafters), "int8")


def test_on_several_threads() -> None:
    """The number of threads may change the numeric mode. Within one mode, drafters change nothing."""
    torch.set_num_threads(2)
    try:
        llm = make()
        expected = [llm.generate(prompts()[i], MIXED[i]) for i in (0, 3)]
        together = llm.generate(
            [prompts()[i] for i in (0, 3)], [MIXED[i] for i in (0, 3)], drafter="prompt-lookup"
        )
        for result, plainly in zip(together, expected, strict=True):
            same(result, plainly)
    finally:
        torch.set_num_threads(1)


BLOCKS: dict[str, dict[str, Any]] = {  # one of each kind of computation that the bundled model does not have
    "layers that rotate otherwise, or not": {
        "second_rope": RopeSpec(kind="none"),
        "second_rope_layers": (1,),
        "rotary_dim": 8,
        "windows": (9, None),
    },
    "multipliers": {"residual_multiplier": 0.22, "embedding_scale": 12.0, "logit_scale": 2.0},
    "norms after blocks": {
        "pre_norms": False,
        "post_norms": True,
        "qk_norm": True,
        "qk_norm_over_heads": True,
    },
    "norms around blocks": {"post_norms": True},
    "queries that grow": {"query_growth": QueryGrowthSpec(0.3, 16, 512)},
    "chunks": {"windows": (-9, None), "qk_unit_norm": True},
    "parallel blocks": {"parallel": True, "centred_norms": True},
    "layer norms, learned positions, norms after the rotation": {
        **dict.fromkeys(("parallel", "parallel_norms", "centred_norms", "norm_biases", "head_bias"), True),
        **{"positions": PositionsSpec(512, 2), "qk_norm": True, "qk_norm_last": True, "qkv_clip": 1.0},
        "activation": "plain_gelu",
    },
    **{
        activation: {"activation": activation, "intermediate_size": 75}
        for activation in ("silu", "gelu", "gelu_tanh", "clipped_swiglu", "relu2", "xielu")
    },
}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_other_kinds_of_blocks(blocks: str, tiny: Callable[..., Transformer]) -> None:
    """Alone without a drafter, then together, with drafters, in chunks, with preemption and prefix hits."""
    model = tiny(3, **BLOCKS[blocks])
    for name, part in list(model.named_modules()):
        if isinstance(part, Dense):  # whose bits may depend on the number of rows
            model.set_submodule(name, stock_linear(part.weight.detach(), None, torch.float32))
    assert_answers_stay(model, ("prompt-lookup", "suffix", "layer-skip(exit=1)"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if place % 3 == number else pytest.mark.slow)
        for place, name in enumerate(("deepseek_v2", "deepseek_v3", "llama4", "phimoe", "mistral4"))
        for number, dtype in enumerate(("float32", "bfloat16", "int8"))
    ],
)
def test_latent_attention_and_chunks(name: str, dtype: Any, tmp_path: Path) -> None:
    """As above, with the fastest kernels, a model of the same kind that drafts, and heads on its features."""
    random_oracle(name, max_position_embeddings=128).save_pretrained(tmp_path)
    heads = medusa(load_model(open_checkpoint(tmp_path), "float32", kernels=TrainingKernels()), heads=2)
    write_head(heads, tmp_path / "medusa", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a machine without fast bfloat16
        model = load(tmp_path, dtype)
    models = f"draft-model(model={tmp_path})", f"medusa(model={tmp_path / 'medusa'})"
    assert_answers_stay(model, ("suffix", "layer-skip(exit=1)", *models))


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_sinks_in_chunks_of_any_size(tmp_path: Path, dtype: Any) -> None:
    """The window and the sinks reach over the borders of chunks."""
    quantized_oracle(tmp_path, intermediate_size=96, max_position_embeddings=1024)
    model, prompt, mode = load(tmp_path, dtype), [*range(90)] * 6, replace(SAMPLED, max_tokens=4)
    whole, *others = (
        LLM(model, drafter="none", kv_tokens=1024, max_rows=rows).generate(prompt, mode)
        for rows in (512, 1, 7, 64)
    )
    for result in others:
        same(result, whole)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*(("gemma4", dtype) for dtype in distinct("float32", "bfloat16", "int8")), ("gemma4_all", "bfloat16")],
)
def test_shared_keys_and_values(name: str, dtype: Any, tmp_path: Path) -> None:
    """As above, with an assistant that reads the target's keys and values. Chunks have several sizes."""
    random_oracle(name, max_position_embeddings=128).save_pretrained(tmp_path)
    trained = load_model(open_checkpoint(tmp_path), "float32", kernels=TrainingKernels())
    write_head(medusa(trained, heads=2), tmp_path / "medusa", str(tmp_path))
    write_assistant(trained.spec, tmp_path / "assistant")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a machine without fast bfloat16
        model = load(tmp_path, dtype)
    heads = [f"{name}(model={tmp_path / name})" for name in ("medusa", "assistant")]
    models = f"draft-model(model={tmp_path})", *heads, f"suffix + {heads[1]}"
    assert_answers_stay(model, ("suffix", "recycling", "lookahead", "layer-skip(exit=1)", *models))
    prompt, modes = [*range(20, 32)] * 7, [replace(GREEDY, max_tokens=8), replace(SAMPLED, max_tokens=8)]
    expected = LLM(model, drafter="none", kv_tokens=512).generate([prompt] * 2, modes)
    for rows in (1, 7, 64, 512):
        chunked = LLM(model, drafter=heads[1], kv_tokens=512, max_rows=rows, max_tree=min(rows, 8))
        for result, reference in zip(chunked.generate([prompt] * 2, modes), expected, strict=True):
            same(result, reference)


def assert_answers_stay(model: Transformer, drafters: Sequence[str]) -> None:
    """Assert equal answers alone, and together with drafters, in chunks, with preemption and prefix hits."""
    repeated = [*range(20, 32)] * 4
    asked = [repeated, [5, 6, 7], [*repeated[:30], 9], [*range(60)]]
    modes = [replace(mode, max_tokens=24) for mode in (GREEDY, SAMPLED, GREEDY, SAMPLED)]
    alone = LLM(model, drafter="none", kv_tokens=512, prefix_caching=False)
    expected = [alone.generate(ids, mode) for ids, mode in zip(asked, modes, strict=True)]
    together = LLM(model, drafter="none", kv_tokens=128, block_size=8, max_rows=40)
    for drafter in drafters:
        results = together.generate(asked, modes, drafter=drafter)
        for result, reference in zip(results, expected, strict=True):
            same(result, reference)
        drafts = drafter.startswith(("suffix", "draft-model", "medusa", "assistant"))
        assert not drafts or sum(result.stats.drafted for result in results) > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_drafts_for_itself_is_always_right(mode: str) -> None:
    """Same bits and same noise give the same draws. An error in the drafter's KV cache makes this fail."""
    llm = make(max_tree=5)
    result = llm.generate(
        prompts()[0], MODES[mode], drafter="draft-model(model=sibyl, dtype=float32, width=1, branch=1)"
    )
    assert set(result.stats.acceptance[:3]) == {1.0}


def test_requests_that_come_and_go_between_steps() -> None:
    llm = make()
    streams = []
    for prompt, params, drafter in zip(prompts(), MIXED, map(resolve, DRAFTERS), strict=False):
        streams.append(llm.stream(prompt, params, drafter=drafter))
        for stream in streams[:-1]:
            next(iter(stream))
    streams[1].cancel()
    for i, stream in enumerate(streams):
        if i != 1:
            same(stream.result, plain()[i])
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others() -> None:
    llm = make()
    free = replace(SAMPLED, seed=None)
    first, second = (llm.generate(prompts()[1], free) for _ in range(2))
    assert first.token_ids != second.token_ids
    again = llm.generate(prompts()[1], replace(free, seed=first.choices[0].seed), drafter="prompt-lookup")
    same(again, first)


def test_n_answers_are_independent_and_do_not_depend_on_the_drafter() -> None:
    llm = make()
    params = replace(SAMPLED, n=4)
    answers = [llm.generate(prompts()[0], params, drafter=resolve(drafter)) for drafter in DRAFTERS[::12]]
    tokens = [[choice.token_ids for choice in answer.choices] for answer in answers]
    assert all(other == tokens[0] for other in tokens)
    assert len({tuple(choice) for choice in tokens[0]}) == 4
    assert tokens[0][0] == llm.generate(prompts()[0], SAMPLED).token_ids
