"""Tool calls are found in a text, however it is cut into pieces. Broken ones stay in the text."""

from __future__ import annotations

import itertools
import json
import random
import time

import pytest
from slow import mostly_slow
from tool_cases import (
    BARE,
    BARE_CALL,
    CALL,
    COMMAND,
    DEEPSEEK,
    GEMMA,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MINIMAX,
    MISTRAL,
    QWEN_CODER,
    TOOLS,
    Told,
)

from soothsay.server.tools.harmony import HarmonyCalls
from soothsay.server.tools.notation_readers import (
    Gemma4Parser,
    GlmParser,
    Lfm2Parser,
    MiniMaxParser,
    QwenCoderParser,
    SeedParser,
    typed,
)
from soothsay.server.tools.tool_calls import FramedParser, ToolCallParser
from soothsay.server.tools.tool_readers import (
    AprielParser,
    CommandParser,
    DeepSeekParser,
    GraniteParser,
    HermesParser,
    KimiParser,
    Llama3Parser,
    MistralParser,
)

Family = type[FramedParser] | type[Llama3Parser]

FAMILIES: dict[Family, dict[str, Told]] = {
    HermesParser: {**HERMES, **BARE},
    QwenCoderParser: QWEN_CODER,
    SeedParser: {
        text.replace("tool_call>", "seed:tool_call>"): told for text, told in list(QWEN_CODER.items())[1:5]
    },
    GlmParser: GLM,
    MistralParser: MISTRAL,
    KimiParser: KIMI,
    DeepSeekParser: DEEPSEEK,
    AprielParser: {f"A <tool_calls>[{CALL[12:-13]}]</tool_calls>": ("A", [("f", '{"x": "a < b"}')])},
    Llama3Parser: LLAMA,
    Gemma4Parser: GEMMA,
    Lfm2Parser: LFM,
    GraniteParser: GRANITE,
    CommandParser: COMMAND,
    MiniMaxParser: MINIMAX,
    HarmonyCalls: HARMONY,
}
CASES = [
    pytest.param(family, text, told, id=f"{family.__name__}-{number}")
    for family, cases in FAMILIES.items()
    for number, (text, told) in enumerate(cases.items())
]


def read(reader: ToolCallParser, pieces: list[str]) -> Told:
    said = [reader.push(piece) for piece in pieces] + [reader.end()]
    calls = [(call.name, call.arguments) for part in said for call in part.calls]
    return "".join(part.content for part in said), calls


def cut(text: str, rng: random.Random) -> list[str]:
    """The text in pieces of random lengths."""
    places = sorted(rng.sample(range(len(text) + 1), min(rng.randint(0, 12), len(text))))
    return [text[first:last] for first, last in itertools.pairwise([0, *places, len(text)])]


@pytest.mark.parametrize(("family", "text", "told"), CASES)
def test_calls_do_not_depend_on_pieces(family: Family, text: str, told: Told) -> None:
    assert read(family(TOOLS), [text]) == told
    assert read(family(TOOLS), list(text)) == told
    for place in range(len(text)):
        assert read(family(TOOLS), [text[:place], text[place:]]) == told


@pytest.mark.parametrize("family", FAMILIES)
def test_broken_calls_do_not_depend_on_pieces_either(family: Family) -> None:
    """Texts made of parts of right answers. What is lost is at most a call's tags and the space around it."""
    rng = random.Random(0)
    whole = "".join(FAMILIES[family])
    tags = [tag for pair in getattr(family, "frames", [("{", "}")]) for tag in pair]
    for _ in range(300):
        parts = []
        for _ in range(rng.randint(1, 6)):
            begin = rng.randrange(len(whole))
            parts.append(rng.choice([whole[begin : begin + rng.randint(1, 60)], *tags, " \n", "x"]))
        text = "".join(parts)
        content, calls = read(family(TOOLS), [text])
        assert read(family(TOOLS), cut(text, rng)) == (content, calls)
        assert all(json.loads(arguments) is not Ellipsis for _, arguments in calls)
        if not calls:
            assert content == text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "inside",
    mostly_slow(["[" * 50_000, " " * 100_000 + "!", "{" * 50_000, '"' + "\\" * 50_000, "<" * 50_000], 2),
)
def test_hostile_texts_end_in_time(family: Family, inside: str) -> None:
    tags = getattr(family, "frames", [("{", "}")])
    texts = [
        f"{first}{middle}{inside}{last}"
        for first, last in tags
        for middle in ("", "f", "f[ARGS]", "f>", "call:f", "call:f{x:", "[f(x=", "f<|message|>")
    ]
    begin = time.process_time()
    for text in texts:
        assert read(family(TOOLS), [text])[1] == []
        pieces = [text[place : place + 50] for place in range(0, len(text), 50)]
        assert read(family(TOOLS), pieces)[1] == []
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_that_are_nested_too_deep_are_text(family: Family) -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    for open_tag, close_tag in getattr(family, "frames", [("", "")]):
        text = f'{open_tag}{{"name": "f", "arguments": {deep}, "parameters": {deep}}}{close_tag}'
        content, calls = read(family(TOOLS), [text])
        assert (content == text) is (not calls)


def test_no_depth_of_arguments_is_an_exception() -> None:
    for depth in range(600, 1000):
        deep = '{"a":' * depth + "1" + "}" * depth
        for reader, text in (
            (MistralParser(), f"[TOOL_CALLS]f[ARGS]{deep}"),
            (QwenCoderParser(TOOLS), f"<function=f><parameter=o>{deep}</parameter></function>"),
            (Gemma4Parser(), f"<|tool_call>call:f{deep}<tool_call|>"),
            (Lfm2Parser(), f"<|tool_call_start|>[f(x={deep})]<|tool_call_end|>"),
        ):
            content, calls = read(reader, [text])
            assert content == ("" if calls else text)


def test_text_is_held_back_only_as_long_as_it_may_be_a_call() -> None:
    reader = HermesParser()
    assert reader.push("a <").content == "a"
    assert reader.push("b").content == " <b"
    assert reader.push(f"\n{CALL[:-1]}").calls == []
    assert len(reader.push(">").calls) == 1


def test_text_is_held_back_only_as_long_as_it_may_be_a_call_without_tags() -> None:
    reader = HermesParser(TOOLS)
    assert reader.push(BARE_CALL[:10]).content == ""
    assert reader.push("goal").content == f"{BARE_CALL[:10]}goal"  # no name of a tool
    assert reader.push("```json").content == "```json"


def test_each_call_comes_when_it_is_complete() -> None:
    names = ["f", "g"]
    text = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for i, name in enumerate(names)
    )
    reader, seen = KimiParser(), list[str]()
    for place, letter in enumerate(text):
        for call in reader.push(letter).calls:
            seen.append(call.name)
            assert text[: place + 1].endswith("<|tool_call_end|>")
    assert seen == names


def test_ids_are_as_the_family_wants_them() -> None:
    given = MistralParser().push("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]")
    assert given.calls[0].id == "abcdefghi"
    assert len(given.calls[1].id) == 9
    assert given.calls[1].id.isalnum()
    listed = MistralParser()
    listed.push('[TOOL_CALLS] [{"name": "f", "id": "abcdefghi"}, {"name": "g", "id": "no"}]')
    first, second = listed.end().calls
    assert (first.id, len(second.id)) == ("abcdefghi", 9)
    (call,) = KimiParser().push(next(text for text in KIMI if text.startswith("<|tool_call_begin|>f"))).calls
    assert (call.name, call.id) == ("f", "functions.f:0")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": "number"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {}, "5"),
        (" 5 ", {"type": ["null", "integer"]}, 5),
        ("true", {"type": "integer"}, "true"),
        ("FALSE", {"type": "boolean"}, False),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("", {"type": ["integer", "null"]}, ""),
        ("[1,", {"type": "array"}, "[1,"),
        ("[1, 'a', True]", {"type": "array"}, [1, "a", True]),
        ("{1, 2}", {"type": "object"}, "{1, 2}"),
        ("NaN", {"type": "number"}, "NaN"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("2", {"enum": ["a", 2]}, 2),
        ("a", {"enum": ["a", 2]}, "a"),
        ('{"b": 1}', {"allOf": [{"$ref": "#/$defs/P"}]}, {"b": 1}),
        ("5", {"$ref": "#/$defs/loop"}, "5"),
        ("5", {"type": 7, "anyOf": 3, "enum": "x"}, "5"),
        ("[" * 10_000, {"type": "array"}, "[" * 10_000),
    ],
)
def test_values_have_the_types_of_the_schema(text: str, schema: object, value: object) -> None:
    loop = {"$ref": "#/$defs/loop", "anyOf": [{"$ref": "#/$defs/loop"}] * 3}
    whole = {"properties": {"x": schema}, "$defs": {"P": {"type": "object"}, "loop": loop}}
    found = typed(text, "x", whole)
    assert (found, type(found)) == (value, type(value))
