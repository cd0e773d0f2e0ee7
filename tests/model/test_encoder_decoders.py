"""Encoder-decoders compute what transformers computes, alone, in batches, and whatever drafts for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from encoder_decoders import (
    BART_CASES,
    CASES,
    FIRST,
    PAD,
    PLACES,
    START,
    VOCAB,
    oracle_answer,
    oracle_logits,
    random_sequence_oracle,
)
from families import load, random_oracle, random_tokens, read_config

from soothsay import LLM, DrafterError, ModelError, RequestError, SamplingParams
from soothsay.core.batch import Rows
from soothsay.core.tree import DraftTree
from soothsay.model.families.parsing import parse_model_config
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.load import load_model
from soothsay.tokenizer import Tokenizer

LENGTHS = (5, 16, 33, 70, 1)
GREEDY = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=5, logprobs=2)
DRAFTERS = ("none", "suffix", "layer-skip(depth=2,width=2)", "auto")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    oracle = random_sequence_oracle(request.param)
    oracle.save_pretrained(directory)
    return oracle, directory


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("t5")
    random_sequence_oracle("t5").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same vocabulary."""
    directory = tmp_path_factory.mktemp("small")
    random_sequence_oracle("t5_1.1").save_pretrained(directory)
    return directory


def test_logits_are_those_of_transformers(case: tuple[Any, Path], rng: np.random.Generator) -> None:
    oracle, directory = case
    model = load(directory)
    pairs = [tokens_for(oracle, rng, length, 40) for length in LENGTHS]
    rows = [
        Rows(np.array([*source, START, *target]), 0, None, DraftTree(target[-1]), source=len(source))
        for source, target in pairs
    ]
    with torch.no_grad():
        hidden, _ = model(model.pack(rows))
        parts = torch.split(model.logits(hidden), [own.num_rows for own in rows])
    for (source, target), logits in zip(pairs, parts, strict=True):
        expected = oracle_logits(oracle, source, [START, *target])
        assert expected.std() > 0.2
        found = logits[len(source) :]
        if (never := model.spec.head.never) is not None:
            assert (found[:, never] == -1e6).all()
            found[:, never] = expected[:, never]
        assert (found - expected).abs().max() < 1e-4


def test_answers_are_those_of_transformers(case: tuple[Any, Path], rng: np.random.Generator) -> None:
    oracle, directory = case
    llm = LLM(load(directory), drafter="none", kv_tokens=1024)
    sources = tokens_for(oracle, rng, *LENGTHS)
    expected = [oracle_answer(oracle, source, GREEDY.max_tokens or 0) for source in sources]
    assert len({token for answer in expected for token in answer}) > 8
    assert [llm.generate(source, GREEDY).token_ids for source in sources] == expected
    for drafter in ("suffix", "prompt-lookup", f"draft-model(model={directory})"):
        results = llm.generate(sources, GREEDY, drafter=drafter)
        assert [result.token_ids for result in results] == expected, drafter
        assert sum(result.stats.drafted for result in results) > 0
        assert "draft-model" not in drafter or sum(result.stats.accepted for result in results) > 80


def tokens_for(oracle: Any, rng: np.random.Generator, *lengths: int) -> list[list[int]]:
    """Random tokens without padding, which is a token here, and is not in transformers."""
    padding = PAD if oracle.config.pad_token_id == PAD else None
    return [[5 if token == padding else token for token in ids] for ids in random_tokens(rng, *lengths)]


@pytest.mark.parametrize("case", ["t5", *BART_CASES], indirect=True)
def test_drafters_and_preemption_change_no_bit(
    case: tuple[Any, Path], small: Path, rng: np.random.Generator
) -> None:
    _, directory = case
    sources = random_tokens(rng, *LENGTHS) * 2
    modes = [replace(mode, max_tokens=14) for mode in (GREEDY, SAMPLED)] * len(LENGTHS)
    llm = LLM(load(directory), drafter="none", kv_tokens=2048, prefix_caching=False)
    plain = [llm.generate(source, mode) for source, mode in zip(sources, modes, strict=True)]
    tight = LLM(load(directory), drafter="none", kv_tokens=112, block_size=8, max_rows=24)
    requests = []
    add = tight.engine.add
    tight.engine.add = lambda request: (requests.append(request), add(request))[1]  # type: ignore[method-assign]
    drafters = (*DRAFTERS, f"draft-model(model={small})", f"suffix | draft-model(model={directory},depth=3)")
    for drafter in drafters:
        results = tight.generate(sources, modes, drafter=drafter)
        for result, expected in zip(results, plain, strict=True):
            assert result.token_ids == expected.token_ids, drafter
            assert result.logprobs == expected.logprobs, drafter
    assert sum(request.num_preemptions for request in requests) > 0


def test_a_source_is_shared_as_a_whole_or_not_at_all(t5: Path) -> None:
    llm = LLM(load(t5), drafter="none", kv_tokens=512, block_size=8)
    first = [*range(2, 26)]  # three blocks
    others = [first, [*first, 30], [*first[:16], *range(40, 48)], first[:16]]
    alone = [llm.generate(source, GREEDY).token_ids for source in others]
    fresh = LLM(load(t5), drafter="none", kv_tokens=512, block_size=8, prefix_caching=False)
    assert alone == [fresh.generate(source, GREEDY).token_ids for source in others]
    hits = []
    for source in others:
        [request] = llm.requests(source, GREEDY)
        llm.engine.add(request)
        while llm.engine.has_work:
            llm.engine.step()
        hits.append(request.num_prefix_hits)
    assert hits == [24, 0, 24, 16]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("case", ["t5", "bart", "m2m_100"], indirect=True)
@pytest.mark.filterwarnings("ignore:.*bfloat16:UserWarning")
def test_other_numbers_keep_bits_too(case: tuple[Any, Path], dtype: Any, rng: np.random.Generator) -> None:
    model, sources = load(case[1], dtype), random_tokens(rng, *LENGTHS)
    llm = LLM(model, drafter="none", kv_tokens=1024)
    plain = [llm.generate(source, SAMPLED) for source in sources]
    for drafter in ("suffix", "layer-skip"):
        for result, expected in zip(llm.generate(sources, SAMPLED, drafter=drafter), plain, strict=True):
            assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)


def test_adapters_are_refused(t5: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    with pytest.raises(ModelError, match="encoder-decoders cannot have adapters"):
        LLM(t5, adapters={"own": tmp_path})


def test_texts_and_draft_models_of_other_kinds(t5: Path, tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    llm = LLM(load(t5), tokenizer=tokenizer, drafter="none", kv_tokens=256, max_context=128)
    result = llm.generate("w5 w6 w7 w5", GREEDY)
    assert result.prompt_token_ids == [5, 6, 7, 5, 1, START]
    expected = oracle_answer(random_sequence_oracle("t5"), [5, 6, 7, 5, 1], len(result.token_ids))
    assert result.token_ids == expected
    assert result.text == tokenizer.decode(expected)
    random_oracle("llama1").save_pretrained(tmp_path)
    decoder = LLM(load(tmp_path), drafter="none", kv_tokens=256)
    with pytest.raises(DrafterError, match="encoder-decoders"):
        decoder.generate([5], GREEDY, drafter=f"draft-model(model={t5})")
    plain = llm.generate("w9 w4", SAMPLED)
    drafted = llm.generate("w9 w4", SAMPLED, drafter=f"draft-model(model={tmp_path})")
    assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)


def word_tokenizer() -> Tokenizer:
    """Words w2, w3, ... and an end token after a text, as T5 has it."""
    words = {"<pad>": 0, "</s>": 1} | {f"w{number}": number for number in range(2, VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<pad>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return Tokenizer(backend)


def test_weights_that_are_untied_in_the_file_stay_so(small: Path, tmp_path: Path) -> None:
    """transformers 5 writes that all heads of T5 are tied."""
    assert read_config(small)["tie_word_embeddings"] is True
    assert not load(small).spec.head.tied


def test_what_cannot_be_is_refused(t5: Path, tmp_path: Path) -> None:
    llm = LLM(load(t5), drafter="none", kv_tokens=256)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        llm.generate([5, 6], replace(GREEDY, prompt_logprobs=1))
    with pytest.raises(ModelError, match="does not score texts"):
        llm.model(llm.model.pack([Rows(np.array([5, 6]), 0)]))
    with pytest.raises(ModelError, match="stages"):
        load_model(open_checkpoint(t5), layers=range(1))
    config = read_config(t5)
    for change, words in (
        ({"decoder_start_token_id": VOCAB}, "decoder_start_token_id"),
        ({"feed_forward_proj": "gated-tanh"}, "gated-tanh"),
        ({"relative_attention_num_buckets": 64}, "buckets"),
    ):
        with pytest.raises(ModelError, match=words):
            parse_model_config({**config, **change})
    del config["d_ff"]
    with pytest.raises(ModelError, match="intermediate_size"):
        parse_model_config(config)


@pytest.mark.parametrize("case", ["bart", "m2m_100"], indirect=True)
def test_each_side_has_positions_of_its_own(case: tuple[Any, Path], rng: np.random.Generator) -> None:
    oracle, directory = case
    llm = LLM(load(directory), drafter="layer-skip(depth=3)", kv_tokens=512)
    short, source = tokens_for(oracle, rng, 9, PLACES)
    begun = len(llm.model.spec.source.start) if llm.model.spec.source else 0
    for ids in (short, source):
        result = llm.generate(ids, replace(GREEDY, max_tokens=None))
        assert result.finish_reason == "length"
        assert result.token_ids == oracle_answer(oracle, ids, PLACES - begun)
    with pytest.raises(RequestError, match=f"prompt has {PLACES + 1} tokens.*encoder has {PLACES} positions"):
        llm.generate([*source, 5], GREEDY)
    with pytest.raises(RequestError, match=f"decoder has {PLACES} positions; shorten answer_start"):
        llm.generate([5, 6], replace(GREEDY, answer_start=source))


@pytest.mark.parametrize("case", ["m2m_100", "bart", "t5"], indirect=True)
def test_an_answer_begins_as_a_request_says(case: tuple[Any, Path], rng: np.random.Generator) -> None:
    """The target language of NLLB, or a target to continue."""
    oracle, directory = case
    llm = LLM(load(directory), tokenizer=word_tokenizer(), drafter="suffix", kv_tokens=512)
    [source] = tokens_for(oracle, rng, 12)
    plain = llm.generate(source, GREEDY)
    begun = replace(GREEDY, max_tokens=20, answer_start=plain.token_ids[:6])
    assert llm.generate(source, begun).token_ids == plain.token_ids[6:]
    languages = [replace(GREEDY, answer_start=start) for start in ([40], "w41")]
    results = llm.generate([source, source], languages)
    for language, result in zip((40, 41), results, strict=True):
        if oracle.config.model_type == "m2m_100":
            expected = oracle_answer(oracle, source, 27, forced_bos_token_id=language)[1:]
            assert result.token_ids == expected
        assert result.token_ids != plain.token_ids
    given = replace(begun, answer_start=np.array(plain.token_ids[:6]))
    assert llm.generate(source, given).token_ids == plain.token_ids[6:]
    with pytest.raises(RequestError, match=f"answer_start has token {VOCAB}"):
        llm.generate(source, replace(GREEDY, answer_start=[VOCAB]))
    with pytest.raises(RequestError, match="answer_start"):
        replace(GREEDY, answer_start=[0.5])


def test_decoders_have_no_start_of_answers() -> None:
    with pytest.raises(RequestError, match="end the prompt with it"):
        LLM("sibyl", drafter="none", kv_tokens=64).generate("a", replace(GREEDY, answer_start="b"))


@pytest.mark.parametrize("case", ["bart"], indirect=True)
def test_first_tokens_are_in_either_file(case: tuple[Any, Path], tmp_path: Path) -> None:
    config = read_config(case[1])
    assert "forced_bos_token_id" not in config  # it is in generation_config.json
    spec = parse_model_config({**config, "forced_bos_token_id": FIRST})
    assert load(case[1]).spec == spec
    assert spec.source is not None
    assert spec.source.start == (START, FIRST)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("bart", {"forced_bos_token_id": VOCAB}, "forced_bos_token_id"),
        ("bart", {"activation_function": "tanh"}, "tanh"),
        ("bart", {"encoder_attention_heads": 3}, "do not divide"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "only as true"),
        ("marian", {"pad_token_id": VOCAB}, "pad_token_id"),
        ("m2m_100", {"decoder_layers": 0}, "decoder_layers"),
        ("pegasus", {"decoder_start_token_id": None}, "no 'decoder_start_token_id'"),
    ],
    indirect=["case"],
)
def test_configurations_of_bart_that_cannot_be(
    case: tuple[Any, Path], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        parse_model_config({**read_config(case[1]), **change})
