"""`LLM`: generating, streaming, stopping, and requests that cannot be served."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from soothsay import (
    LLM,
    DrafterError,
    FinishReason,
    ModelError,
    Request,
    RequestError,
    SamplingParams,
    Stream,
    Tokenizer,
)
from soothsay.config import EngineConfig
from soothsay.core.batch import Batch, Rows
from soothsay.core.tree import DraftTree
from soothsay.model.transformer import Transformer

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, seed=0)
STORY = """\
, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, \
red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. She said, \
"I want to play with your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she"""


@pytest.mark.filterwarnings("ignore:max_context=512 is more than the 128 tokens:UserWarning")
@pytest.mark.parametrize("drafter", ["none", "prompt-lookup"])
def test_stories260k_says_what_llama_cpp_says(shared: Path, drafter: str) -> None:
    llm = LLM(shared / "data" / "stories260K.gguf", drafter=drafter, max_context=512)
    result = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=196))
    assert result.prompt_token_ids == [1, 403, 407, 261, 378]
    assert len(result.token_ids) == 196
    assert result.text == STORY


class TestShapesOfCalls:
    def test_one_prompt_gives_a_result_and_a_list_gives_a_list(self, sibyl: LLM) -> None:
        text = "Once upon a time"
        one = sibyl.generate(text, GREEDY)
        assert sibyl.generate([text, text], GREEDY) == [one, one]
        ids = sibyl.tokenizer.encode(text) if sibyl.tokenizer else []
        assert sibyl.generate(ids, GREEDY) == one
        assert sibyl.generate(np.array(ids).tolist(), GREEDY) == one
        assert sibyl.generate(list(np.array(ids)), GREEDY) == one
        assert sibyl.generate([], GREEDY) == []

    def test_parameters_and_drafters_for_each_prompt(self, sibyl: LLM) -> None:
        params = [GREEDY, replace(GREEDY, max_tokens=3)]
        first, second = sibyl.generate(["Hello", "Hello"], params, drafter=["none", "prompt-lookup"])
        assert len(first.token_ids) == 24
        assert second.token_ids == first.token_ids[:3]
        with pytest.raises(RequestError, match="2 params for 3 prompts"):
            sibyl.generate(["a", "b", "c"], params)

    def test_chat_is_generate_on_the_template(self, sibyl: LLM) -> None:
        messages = [{"role": "user", "content": "Hello!"}]
        prompt = sibyl.chat_prompt(messages)
        assert sibyl.tokenizer is not None
        assert prompt == sibyl.tokenizer.encode("<|user|>Hello!<|end|><|assistant|>", special=False)
        assert sibyl.chat(messages, GREEDY) == sibyl.generate(prompt, GREEDY)

    def test_chat_passes_variables_to_the_template(self, sibyl: LLM) -> None:
        assert sibyl.tokenizer is not None
        source = "{{ messages[0].content }}{% if not enable_thinking %} no{% endif %}{{ tools | length }}"
        llm = LLM(sibyl.model, tokenizer=Tokenizer(sibyl.tokenizer.backend, source), drafter="none")
        messages = [{"role": "user", "content": "Hi"}]
        result = llm.chat(messages, GREEDY, enable_thinking=False, tools=[{}])
        assert result == llm.generate(llm.tokenizer.encode("Hi no1", special=False), GREEDY)

    def test_a_model_object_without_tokenizer(self, tiny: Callable[..., Transformer]) -> None:
        llm = LLM(tiny())
        assert len(llm.generate([1, 2, 3], GREEDY).token_ids) == 24
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate("text", GREEDY)
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "Hi"}])
        with pytest.raises(RequestError, match="stop_token_ids"):
            llm.generate([1], replace(GREEDY, stop="x"))


class TestStreams:
    def test_pieces_add_up_to_the_result(self, sibyl: LLM) -> None:
        stream = sibyl.stream("Once upon a time", GREEDY, drafter="prompt-lookup(min_ngram=1)")
        pieces = list(stream)
        assert "".join(piece.text for piece in pieces) == stream.result.text
        assert [piece.token for piece in pieces] == stream.result.token_ids
        assert sum(piece.drafted for piece in pieces) == stream.result.stats.accepted
        assert stream.result == sibyl.generate(
            "Once upon a time", GREEDY, drafter="prompt-lookup(min_ngram=1)"
        )

    def test_async_streams_share_the_engine(self, sibyl: LLM) -> None:
        async def read(prompt: str) -> str:
            return "".join([piece.text async for piece in sibyl.stream(prompt, GREEDY)])

        async def together() -> list[str]:
            return await asyncio.gather(
                *(read(prompt) for prompt in ("Hello", "What is rain?", "Write code"))
            )

        expected = [sibyl.generate(p, GREEDY).text for p in ("Hello", "What is rain?", "Write code")]
        assert asyncio.run(together()) == expected

    def test_a_piece_is_not_lost_when_waiting_for_it_is_cancelled(self, sibyl: LLM) -> None:
        async def impatient() -> list[int]:
            stream, tokens = sibyl.stream("Once upon a time", GREEDY), list[int]()
            while True:
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)  # it has begun to wait
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
                try:
                    tokens.append((await anext(stream)).token)
                except StopAsyncIteration:
                    return tokens

        assert asyncio.run(impatient()) == sibyl.generate("Once upon a time", GREEDY).token_ids

    def test_threads_share_the_engine(self, sibyl: LLM) -> None:
        texts: dict[str, str] = {}
        prompts = ["Hello", "What is rain?", "Write code", "One two three"]
        threads = [
            threading.Thread(target=lambda p=p: texts.update({p: sibyl.generate(p, GREEDY).text}))
            for p in prompts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert texts == {p: sibyl.generate(p, GREEDY).text for p in prompts}

    def test_cancel_frees_memory_at_once_and_keeps_what_was_said(self, sibyl: LLM) -> None:
        free = sibyl.engine.allocator.num_free
        stream = sibyl.stream("Once upon a time", GREEDY)
        said = [next(iter(stream)).text for _ in range(5)]
        assert sibyl.engine.allocator.num_free < free
        stream.cancel()
        assert sibyl.engine.allocator.num_free == free
        assert stream.result.finish_reason is FinishReason.CANCELLED
        assert stream.result.text == "".join(said)
        stream.cancel()  # a second call does nothing

    @pytest.mark.parametrize("prompts", ["Once upon a time", ["Once upon a time", "Hello", "One two three"]])
    def test_an_interrupt_leaves_no_request(
        self, sibyl: LLM, monkeypatch: pytest.MonkeyPatch, prompts: str | list[str]
    ) -> None:
        advance, calls = sibyl.engine.advance, iter(range(5))

        def interrupted(request: Request) -> None:
            if next(calls) == 4:
                raise KeyboardInterrupt
            advance(request)

        free = sibyl.engine.allocator.num_free
        monkeypatch.setattr(sibyl.engine, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sibyl.generate(prompts, GREEDY)
        assert not sibyl.engine.has_work
        assert sibyl.engine.allocator.num_free == free

    def test_an_unknown_drafter_leaves_no_request(self, sibyl: LLM) -> None:
        with pytest.raises(DrafterError, match="unknown"):
            sibyl.generate(["Hello", "Hello"], GREEDY, drafter=["none", "no-such-drafter"])
        assert not sibyl.engine.has_work

    def test_a_dropped_stream_ends(self, sibyl: LLM) -> None:
        free = sibyl.engine.allocator.num_free
        for _ in sibyl.stream("Once upon a time", GREEDY):
            break
        dropped = sibyl.stream("Hello", GREEDY)
        del dropped
        kept = sibyl.stream("One two three", GREEDY)
        assert next(iter(kept)).text
        assert sibyl.engine.load.running == 1
        kept.cancel()
        assert sibyl.engine.allocator.num_free == free

    def test_a_stream_has_one_answer(self, sibyl: LLM) -> None:
        with pytest.raises(RequestError, match="one answer"):
            sibyl.stream("Hello", replace(GREEDY, n=2))


class TestEnds:
    def test_max_tokens(self, sibyl: LLM) -> None:
        result = sibyl.generate("Hello", replace(GREEDY, max_tokens=1))
        assert len(result.token_ids) == 1
        assert result.finish_reason is FinishReason.LENGTH

    def test_an_end_token_stops_and_has_no_text(self, sibyl: LLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=400)
        result = sibyl.chat([{"role": "user", "content": "Hello!"}], params)
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids[-1] == sibyl.eos_ids[0]
        assert "<|end|>" not in result.text
        longer = sibyl.chat([{"role": "user", "content": "Hello!"}], replace(params, ignore_eos=True))
        assert longer.token_ids[: len(result.token_ids)] == result.token_ids
        assert len(longer.token_ids) == 400

    def test_min_tokens_holds_end_tokens_back(self, sibyl: LLM) -> None:
        short = sibyl.chat(
            [{"role": "user", "content": "Hello!"}], SamplingParams(temperature=0, max_tokens=400)
        )
        count = len(short.token_ids)
        params = SamplingParams(temperature=0, max_tokens=count + 5, min_tokens=count + 5)
        result = sibyl.chat([{"role": "user", "content": "Hello!"}], params)
        assert len(result.token_ids) == count + 5
        assert sibyl.eos_ids[0] not in result.token_ids

    def test_min_tokens_holds_stop_strings_back(self, sibyl: LLM) -> None:
        pieces = list(sibyl.stream("a b c a b c. The weather today is", GREEDY))
        said = ["".join(piece.text for piece in pieces[:i]) for i in range(len(pieces))]
        place = next(i for i in range(3, 20) if pieces[i].text and pieces[i].text not in said[i])
        for min_tokens in (place, place + 1):  # the stop string is complete with the token at `place`
            params = replace(GREEDY, stop=pieces[place].text, min_tokens=min_tokens)
            tokens = sibyl.generate("a b c a b c. The weather today is", params).token_ids
            assert (len(tokens) == place + 1) == (min_tokens == place)

    def test_stop_token_ids(self, sibyl: LLM) -> None:
        tokens = sibyl.generate("Once upon a time", GREEDY).token_ids
        result = sibyl.generate("Once upon a time", replace(GREEDY, stop_token_ids=[tokens[7]]))
        assert result.token_ids == tokens[: tokens.index(tokens[7]) + 1]
        assert result.finish_reason is FinishReason.STOP

    @pytest.mark.parametrize("drafter", ["none", "prompt-lookup(min_ngram=1)", "draft-model(model=sibyl)"])
    def test_stop_strings_cut_the_text_wherever_tokens_end(self, sibyl: LLM, drafter: str) -> None:
        whole = sibyl.generate("Once upon a time", GREEDY).text
        for begin, end in ((10, 13), (17, 30), (len(whole) - 3, len(whole))):
            stop = whole[begin:end]
            stream = sibyl.stream(
                "Once upon a time", replace(GREEDY, stop=[stop, "never said"]), drafter=drafter
            )
            text = "".join(piece.text for piece in stream)
            assert text == stream.result.text == whole[: whole.index(stop)]
            assert stream.result.finish_reason is FinishReason.STOP

    def test_text_that_only_begins_like_a_stop_string_comes_out_in_the_end(self, sibyl: LLM) -> None:
        whole = sibyl.generate("Once upon a time", GREEDY).text
        result = sibyl.generate("Once upon a time", replace(GREEDY, stop=whole[-4:] + "\0"))
        assert result.text == whole
        assert result.finish_reason is FinishReason.LENGTH

    def test_the_context_ends_an_answer(self, tiny: Callable[..., Transformer]) -> None:
        llm = LLM(tiny(), max_context=40, drafter="prompt-lookup(min_ngram=1)")
        result = llm.generate([1, 2, 3], replace(GREEDY, max_tokens=None))
        assert len(result.token_ids) == 37
        assert result.finish_reason is FinishReason.LENGTH


class TestLogprobs:
    def test_are_the_model_s_own(self, sibyl: LLM) -> None:
        params = replace(GREEDY, temperature=0.7, seed=3, top_p=0.5, logprobs=4)
        result = sibyl.generate("Once upon a time", params, drafter="prompt-lookup(min_ngram=1)")
        tokens = result.prompt_token_ids + result.token_ids
        rows = Rows(np.array(tokens), 0, tree=DraftTree(tokens[-1]))
        config = sibyl.model.spec
        with torch.inference_mode():
            hidden, _ = sibyl.model(Batch.pack([rows], group=config.group, windows=config.windows))
            expected = sibyl.model.logits(hidden).log_softmax(-1)
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids)
        for position, entry in enumerate(result.logprobs, start=len(result.prompt_token_ids) - 1):
            assert entry.token == tokens[position + 1]
            assert entry.logprob == pytest.approx(expected[position, entry.token].item(), abs=1e-5)
            values, ids = expected[position].topk(4)
            assert list(entry.top) == ids.tolist()
            assert list(entry.top.values()) == pytest.approx(values.tolist(), abs=1e-5)

    def test_zero_gives_the_token_s_own_only(self, sibyl: LLM) -> None:
        result = sibyl.generate("Hello", replace(GREEDY, logprobs=0))
        assert result.logprobs is not None
        assert all(entry.top == {} and entry.logprob <= 0 for entry in result.logprobs)
        assert sibyl.generate("Hello", GREEDY).logprobs is None


class TestStatistics:
    def test_plain_decoding_is_one_token_a_step(self, sibyl: LLM) -> None:
        stats = sibyl.generate("Hello", GREEDY).stats
        assert (stats.steps, stats.emitted, stats.drafted, stats.accepted) == (24, 24, 0, 0)
        assert stats.mean_accepted == 1.0
        assert stats.acceptance == []

    def test_counts_of_a_drafter_add_up(self, sibyl: LLM) -> None:
        prompt = "a b c a b c a b c a b c"
        stats = sibyl.generate(prompt, GREEDY, drafter="prompt-lookup").stats
        assert stats.emitted == 24
        assert stats.accepted <= stats.emitted <= stats.accepted + stats.steps
        assert sum(stats.accepted_at) == stats.accepted
        assert stats.mean_accepted > 1
        assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))


class TestImpossibleRequests:
    def test_a_prompt_beyond_the_context(self, sibyl: LLM) -> None:
        with pytest.raises(RequestError, match=r"3000 tokens.*context of 2048.*max_context"):
            sibyl.generate([5] * 3000, GREEDY)

    def test_more_than_the_pool_can_ever_hold(self) -> None:
        llm = LLM("sibyl", kv_tokens=64)
        with pytest.raises(RequestError, match=r"room for 105 tokens.*pool has 64.*kv_tokens=105"):
            llm.generate([5] * 5, replace(GREEDY, max_tokens=100))
        assert len(llm.generate([5] * 5, replace(GREEDY, max_tokens=None)).token_ids) == 59

    def test_tokens_that_do_not_exist(self, sibyl: LLM) -> None:
        for prompt, params, match in (
            ([1, 9000], GREEDY, "token 9000"),
            ([1, -1], GREEDY, "token -1"),
            ([1], replace(GREEDY, logit_bias={8192: 1.0}), "logit_bias names token 8192"),
            ([1], replace(GREEDY, stop_token_ids=[-5]), "stop_token_ids names token -5"),
            ([1], replace(GREEDY, logprobs=9000), "logprobs=9000"),
            ("", GREEDY, "empty"),
        ):
            with pytest.raises(RequestError, match=match):
                sibyl.generate(prompt, params)

    def test_in_a_list_a_bad_request_fails_alone(self, sibyl: LLM) -> None:
        good, bad, also_good = sibyl.generate(["Hello", [9000], "Hello"], GREEDY)
        assert bad.finish_reason is FinishReason.ERROR
        assert bad.error is not None
        assert "token 9000" in bad.error
        assert good == also_good == sibyl.generate("Hello", GREEDY)

    def test_engine_numbers_that_cannot_work(self, tiny: Callable[..., Transformer]) -> None:
        with pytest.raises(ModelError, match="max_context=1 "):
            LLM(tiny(), max_context=1)
        with pytest.raises(ModelError, match="max_stall=0 "):
            LLM(tiny(), max_stall=0)
        with pytest.raises(ModelError, match="block_size=0 "):
            LLM(tiny(), block_size=0)
        for share in (-0.1, 1.5, float("nan")):
            with pytest.raises(ModelError, match=f"learn={share} .*from 0 to 1"):
                LLM(tiny(), learn=share)
        with pytest.raises(TypeError, match=r"no option 'blocksize'.*block_size"):
            LLM(tiny(), blocksize=16)
        assert LLM(tiny(), config=EngineConfig(block_size=8)).config.block_size == 8

    def test_a_failing_drafter_leaves_no_request_behind(self, sibyl: LLM) -> None:
        def broken(target: object) -> object:
            raise RuntimeError("no such thing")

        with pytest.raises(RuntimeError, match="no such thing"):
            sibyl.generate("Hello", GREEDY, drafter=broken)  # type: ignore[arg-type]
        assert not sibyl.engine.has_work


LADDER = "A man in a blue shirt is standing on a ladder."


def test_the_stop_string_and_special_tokens_are_text_if_asked_for(sibyl: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20)
    text = sibyl.generate(LADDER, greedy).text
    stop = text[6:9]
    assert sibyl.generate(LADDER, replace(greedy, stop=stop)).text == text[: text.index(stop)]
    kept = sibyl.generate(
        LADDER,
        replace(greedy, stop=stop, include_stop_str_in_output=True),
    )
    assert kept.text == text[: text.index(stop) + len(stop)]
    end = replace(greedy, logit_bias={sibyl.eos_ids[0]: 100.0})
    assert sibyl.generate(LADDER, end).text == ""
    shown = replace(end, skip_special_tokens=False)
    assert sibyl.generate(LADDER, shown).text == ""
    spelled = sibyl.tokenizer.decode([sibyl.eos_ids[0]], skip_special=False)
    assert sibyl.generate(LADDER, replace(shown, include_stop_str_in_output=True)).text == spelled


def test_bad_words_do_not_come(sibyl: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    text = sibyl.generate(LADDER, greedy).text
    first, second, third, *_ = text.split()
    words = [first, f"{second} {third}"]
    other = sibyl.generate(LADDER, replace(greedy, bad_words=words)).text
    assert not any(word in other for word in words)
    assert sibyl.generate(LADDER, replace(greedy, bad_words="xylophone")).text == text


def test_memory_is_free_again_after_everything(sibyl: LLM) -> None:
    assert not sibyl.engine.has_work
    assert sibyl.engine.allocator.num_free == sibyl.engine.allocator.num_blocks


def test_a_shared_prefix_is_computed_once_even_when_requests_come_together() -> None:
    llm = LLM("sibyl", dtype="float32", kv_tokens=4096)
    prompts = [*range(100, 164)], [*range(100, 164), 5, 6]
    requests = [request for prompt in prompts for request in llm.requests(prompt, GREEDY)]
    for request in requests:
        llm.engine.add(request)
    for request in requests:
        assert len(Stream(llm.engine, request).result.token_ids) == 24
    assert [request.num_prefix_hits for request in requests] == [0, 64]
    answers = llm.generate([*range(200, 300)], replace(GREEDY, temperature=1.0, n=3))
    assert len(answers.choices) == 3


def test_a_stream_is_an_iterator(sibyl: LLM) -> None:
    stream = sibyl.stream("Hello", GREEDY)
    first = next(stream)
    assert [first.token, *(piece.token for piece in stream)] == stream.result.token_ids
    assert next(stream, None) is None

    async def read() -> list[int]:
        again = sibyl.stream("Hello", GREEDY)
        return [(await anext(again)).token, *[piece.token async for piece in again]]

    assert asyncio.run(read()) == stream.result.token_ids
