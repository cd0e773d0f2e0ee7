"""What callers may give to `LLM`, and what they are told about anything else."""

from __future__ import annotations

import re
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from soothsay import LLM, RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=0)
IDS = [17, 266, 300]
HIDDEN = {"skip_special_tokens": False}


class TestPrompts:
    @pytest.mark.parametrize(
        "prompt",
        [
            tuple(IDS),
            array("i", IDS),
            np.array(IDS),
            np.array(IDS, dtype=np.uint16),
            torch.tensor(IDS),
            [*np.array(IDS)],
        ],
        ids=lambda prompt: type(prompt).__name__,
    )
    def test_token_ids_in_any_sequence(self, sibyl: LLM, prompt: Any) -> None:
        expected = sibyl.generate(IDS, GREEDY)
        assert sibyl.generate(prompt, GREEDY) == expected
        assert sibyl.generate([prompt, IDS], GREEDY) == [expected, expected]
        assert sibyl.stream(prompt, GREEDY).result == expected

    def test_a_range_is_one_prompt(self, sibyl: LLM) -> None:
        assert sibyl.generate(range(17, 20), GREEDY) == sibyl.generate([17, 18, 19], GREEDY)

    @pytest.mark.parametrize("make", [tuple, iter, np.array], ids=["tuple", "iterator", "array"])
    def test_many_prompts_in_any_collection(self, sibyl: LLM, make: Any) -> None:
        expected = sibyl.generate(IDS, GREEDY)
        assert sibyl.generate(make([IDS, IDS]), GREEDY) == [expected, expected]
        assert sibyl.generate(make(["Hello", "Hello"]), GREEDY) == [sibyl.generate("Hello", GREEDY)] * 2

    @pytest.mark.parametrize(
        ("prompt", "match"),
        [
            (b"abc", "bytes"),
            ({"prompt": "a"}, "dict"),
            ({17, 266}, "set"),
            (None, "must not be None"),
            (5, "must not be an int"),
            (1.5, "float"),
            ([1.5, 2.5], "float"),
            (np.array([1.5, 2.5]), "float"),
            (torch.tensor(3), "int"),
            ([[1, 2.5]], "2.5 is not a token id"),
            ([[True, False]], "True is not a token id"),
            (["Hello", 5], "int"),
            ([[IDS]], "is not a token id"),
        ],
        ids=str,
    )
    def test_anything_else_is_refused(self, sibyl: LLM, prompt: Any, match: str) -> None:
        with pytest.raises(TypeError, match=rf"{match}.*: give text, or a sequence of token ids"):
            sibyl.generate(prompt, GREEDY)
        assert not sibyl.engine.has_work

    def test_a_stream_has_one_prompt(self, sibyl: LLM) -> None:
        with pytest.raises(TypeError, match=r"'Hello' is not a token id: give .* ids \(integers\)$"):
            sibyl.stream(["Hello", "Hello"], GREEDY)  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"^'aaa.*aaa\.\.\. is not a token id"):
            sibyl.stream(["a" * 100], GREEDY)  # type: ignore[list-item]

    def test_messages_are_no_prompt(self, sibyl: LLM) -> None:
        message: Any = {"role": "user", "content": "Hello!"}
        for call in (sibyl.stream, sibyl.generate):
            for given in ([message], message):
                with pytest.raises(TypeError, match=r"^messages are no prompt: .* llm\.chat_prompt"):
                    call(given, GREEDY)
        with pytest.raises(TypeError, match=r"llm\.chat_prompt"):
            sibyl.generate([[message], [message]], GREEDY)
        assert sibyl.stream(sibyl.chat_prompt([message]), GREEDY).result == sibyl.chat([message], GREEDY)


class TestParams:
    @pytest.mark.parametrize("prompt", ["Hello", ["Hello", "Hello"]])
    @pytest.mark.parametrize("params", [{"temperature": 0}, {}, 5, "greedy"])
    def test_only_sampling_params(self, sibyl: LLM, prompt: Any, params: Any) -> None:
        match = rf"params.* {type(params).__name__}.*SamplingParams\("
        with pytest.raises(TypeError, match=match):
            sibyl.generate(prompt, params)
        with pytest.raises(TypeError, match=match):
            sibyl.generate(["Hello", "Hello"], [GREEDY, params])
        with pytest.raises(TypeError, match=match):
            sibyl.stream("Hello", params)
        assert not sibyl.engine.has_work

    def test_a_list_has_one_for_each_prompt(self, sibyl: LLM) -> None:
        expected = sibyl.generate("Hello", GREEDY)
        assert sibyl.generate("Hello", [GREEDY], drafter=["none"]) == expected  # type: ignore[call-overload]
        default = replace(GREEDY, max_tokens=1)
        assert sibyl.generate(["Hello"], (default,))[0].token_ids == expected.token_ids[:1]
        for prompt in ("Hello", []):
            with pytest.raises(RequestError, match=r"2 params for [01] prompts?: give one for all, or one"):
                sibyl.generate(prompt, [GREEDY, GREEDY])  # type: ignore[call-overload]

    @pytest.mark.parametrize(
        ("given", "plain"),
        [
            ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
            ({"temperature": np.int64(0), "top_p": np.float64(0.5)}, {"temperature": 0, "top_p": 0.5}),
            ({"seed": np.int64(3), "top_k": np.uint8(5)}, {"seed": 3, "top_k": 5}),
            ({"max_tokens": np.int32(7), "n": np.int16(2)}, {"max_tokens": 7, "n": 2}),
            ({"ignore_eos": np.True_, "skip_special_tokens": np.False_}, {"ignore_eos": True} | HIDDEN),
            ({"stop": None, "stop_token_ids": None, "bad_words": None}, {}),
        ],
    )
    def test_numbers_of_numpy_and_none_mean_what_they_say(self, given: Any, plain: Any) -> None:
        params, expected = SamplingParams(**given), SamplingParams(**plain)
        assert params == expected
        assert repr(params) == repr(expected)  # the values are Python's own

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ({"temperature": "0"}, "temperature='0' .* must be a number between 0 and 1e6"),
            ({"temperature": True}, "must be a number"),
            ({"temperature": np.float32("nan")}, "must be a number"),
            ({"temperature": None}, "must be a number"),
            ({"max_tokens": 5.0}, "must be an integer"),
            ({"seed": np.float64(3)}, "must be an integer"),
            ({"ignore_eos": "no"}, "ignore_eos='no' .* must be True or False"),
            ({"include_stop_str_in_output": None}, "must be True or False"),
            ({"skip_special_tokens": 2}, "must be True or False"),
            ({"stop": 5}, "^stop=5 is not possible: give strings, not an int$"),
            ({"stop": ["a", 1]}, r"^stop=\['a', 1\] .* not an int$"),
            ({"bad_words": [None]}, "^bad_words=.* not None$"),
            ({"stop": ["a", ""]}, "not an empty one$"),
        ],
    )
    def test_other_values_are_refused(self, given: Any, match: str) -> None:
        with pytest.raises(RequestError, match=match):
            SamplingParams(**given)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("temprature", "did you mean temperature?"),
            ("max_new_tokens", "did you mean max_tokens?"),
            ("guided_json", "give grammar=Grammar.json_schema(...)"),
        ],
    )
    def test_unknown_ones_are_refused_by_name(self, name: str, words: str) -> None:
        with pytest.raises(TypeError, match=re.escape(f"SamplingParams has no option {name!r}; {words}")):
            SamplingParams(**{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temperature", "SamplingParams(temperature=...)"),
        ("max_tokens", "SamplingParams(max_tokens=...)"),
        ("drafer", "did you mean 'drafter'"),
        ("param", "did you mean 'params'"),
    ],
)
def test_a_chat_refuses_what_is_meant_for_other_arguments(sibyl: LLM, name: str, words: str) -> None:
    for call in (sibyl.chat, sibyl.chat_prompt):
        with pytest.raises(TypeError, match=re.escape(words)):
            call("Hello", **{name: 1})  # type: ignore[arg-type]
    assert sibyl.chat_prompt("Hello", enable_thinking=False) == sibyl.chat_prompt("Hello")


def test_generate_and_stream_know_the_arguments_of_others(sibyl: LLM) -> None:
    for call in (sibyl.generate, sibyl.stream):
        with pytest.raises(TypeError, match=r"'temperature'; give SamplingParams\(temperature=\.\.\.\)$"):
            call("Hello", temperature=0)  # type: ignore[call-overload, operator]
        with pytest.raises(TypeError, match=r"'drafer'; did you mean drafter\?$"):
            call("Hello", drafer="none")  # type: ignore[call-overload, operator]
