"""Thoughts are split from the answer, however it is cut into pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tool_cases import CALL

from soothsay import LLM, Tokenizer
from soothsay.core.constraint import Grammars
from soothsay.core.grammar import Grammar
from soothsay.server.tools.harmony import HarmonyCalls, HarmonyFormat
from soothsay.server.tools.reasoning import ANSWER_TAGS, TAGS, ReasoningFormat, Thoughts
from soothsay.server.tools.tool_calls import PlainParser, ToolCallParser
from soothsay.server.tools.tool_format import ChatGrammars, ToolFormat
from soothsay.server.tools.tool_readers import HermesParser

THINK = ReasoningFormat(*TAGS[0])

CLOSED: dict[str, tuple[str, str, int]] = {
    "Hello": ("", "Hello", 0),
    " \n Hello <think>": ("", " \n Hello <think>", 0),
    "<thi": ("", "<thi", 0),
    "<think>": ("", "", 0),
    "<think>\nI see. \n\n Yes.\n</think>\n\nFine. \n": ("I see. \n\n Yes.", "Fine. \n", 0),
    "  <think></think> A </think>": ("", "A </think>", 0),
    "<think> a <think> b </thin": ("a <think> b </thin", "", 0),
    f"<think>{CALL}</think>B {CALL}": (CALL, "B", 1),
    f"<think>a</think>\n{CALL}\n": ("a", "", 1),
}
"""Thoughts, text and the number of calls."""

OPENED: dict[str, tuple[str, str, int]] = {
    "I see.\n</think>\n\nFine.": ("I see.", "Fine.", 0),
    "\n</think>Fine.": ("", "Fine.", 0),
    "It goes on \n": ("It goes on", "", 0),
    "a</think>b</think>c": ("a", "b</think>c", 0),
    "": ("", "", 0),
}
"""The same where the prompt has opened the thoughts."""


COMMAND = ReasoningFormat(*TAGS[4], answer=ANSWER_TAGS)

ANSWERED: dict[str, tuple[str, str, int]] = {
    "<|START_THINKING|>I see.<|END_THINKING|><|START_RESPONSE|>Fine.<|END_RESPONSE|>": ("I see.", "Fine.", 0),
    " <|START_TEXT|> Fine. <|END_TEXT|> \n": ("", " Fine.  \n", 0),
    "<|START_RESPONSE|>Fine. <|END_": ("", "Fine. <|END_", 0),
    f"<|START_THINKING|>a<|END_THINKING|>{CALL}": ("a", "", 1),
    "a <response>b</response>": ("", "a <response>b</response>", 0),
    "<|START_THINKING|>a<|END_THINKING|>\n<respon": ("a", "<respon", 0),
    "<response>a</response></response>\0": ("", "a</response>\0", 0),
    "<|START_": ("", "<|START_", 0),
    "": ("", "", 0),
}
"""The same with tags around the answer."""

ANALYSIS, NEXT = "<|channel|>analysis<|message|>", "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HARMONY: dict[str, tuple[str, str, int]] = {
    f"{ANALYSIS}I see.<|end|>{NEXT}{FINAL}Fine.<|return|>": ("I see.", "Fine.", 0),
    f"{ANALYSIS}a<|end|>{NEXT}{ANALYSIS}b<|channel|>commentary<|message|>c<|end|>{NEXT}{FINAL}d": (
        "a\n\nb",
        "c\n\nd",
        0,
    ),
    f"{ANALYSIS}a<|end|>{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}": ("a", "", 1),
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "<|"}<|call|>': ("", "", 1),
    f" to=functions.f<|channel|>commentary<|message|>{{}}<|end|>{NEXT}{FINAL}b": ("", "b", 1),
    "Fine. <|channel|>": ("", "Fine. <|channel|>", 0),
    " \n": ("", " \n", 0),
    "<|chan": ("", "<|chan", 0),
    f"{ANALYSIS}a<|end": ("a<|end", "", 0),
    f"{ANALYSIS}a<|end|>{NEXT[:12]}": ("a", "", 0),  # cut by max_tokens
    f"{ANALYSIS}a<|end|>b": ("a", "b", 0),
    "<|channel|>commentary to=f<|message|>no": ("", "<|channel|>commentary to=f<|message|>no", 0),
    f"<|start|>{'x' * 1100}<|message|>a": ("", f"<|start|>{'x' * 1100}<|message|>a", 0),
}
"""The same with messages in channels."""


def read(
    pieces: list[str],
    *,
    opened: bool,
    form: Thoughts = THINK,
    calls: type[ToolCallParser] = HermesParser,
) -> tuple[str, str, int]:
    reader = form.wrapped(calls(), opened=opened)
    parts = [reader.push(piece) for piece in pieces] + [reader.end()]
    thoughts, content = ("".join(getattr(part, name) for part in parts) for name in ("reasoning", "content"))
    return thoughts, content, sum(len(part.calls) for part in parts)


@pytest.mark.parametrize(
    ("text", "told", "form"),
    [
        *(pytest.param(*case, COMMAND, id=f"answer-{i}") for i, case in enumerate(ANSWERED.items())),
        *(
            pytest.param(*case, HarmonyFormat(True), id=f"harmony-{i}")
            for i, case in enumerate(HARMONY.items())
        ),
    ],
)
def test_other_formats_do_not_depend_on_pieces(text: str, told: tuple[str, str, int], form: Thoughts) -> None:
    calls = HarmonyCalls if isinstance(form, HarmonyFormat) else HermesParser
    assert read([text], opened=False, form=form, calls=calls) == told
    assert read([*text], opened=False, form=form, calls=calls) == told
    for place in range(len(text)):
        assert read([text[:place], text[place:]], opened=False, form=form, calls=calls) == told


def test_harmony_without_tools_keeps_calls_in_the_text() -> None:
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert read([call], opened=False, form=HarmonyFormat(True), calls=PlainParser) == ("", call, 0)


def test_a_prompt_that_opens_thoughts_of_harmony() -> None:
    form = HarmonyFormat(True)
    begun = f"{NEXT}{ANALYSIS}I"
    assert form.is_open(begun)
    assert not form.is_open(f"{begun}<|end|>{NEXT}")
    assert not form.is_open(f"{NEXT}<|channel|>analysis")
    assert read([" see.<|end|>", "b"], opened=True, form=form) == (" see.", "b", 0)


@pytest.mark.parametrize(
    ("text", "told", "opened"),
    [
        *(pytest.param(text, told, False, id=f"closed-{i}") for i, (text, told) in enumerate(CLOSED.items())),
        *(pytest.param(text, told, True, id=f"opened-{i}") for i, (text, told) in enumerate(OPENED.items())),
    ],
)
def test_thoughts_do_not_depend_on_pieces(text: str, told: tuple[str, str, int], opened: bool) -> None:
    assert read([text], opened=opened) == told
    assert read([*text], opened=opened) == told
    for first in range(len(text)):
        for second in range(first, len(text)):
            assert read([text[:first], text[first:second], text[second:]], opened=opened) == told


def test_thoughts_stream() -> None:
    reader = THINK.wrapped(PlainParser(), opened=False)
    said = [
        reader.push(piece) for piece in ("<think>\nI", " see", ". \n", "</", "b</think>", "\n", "Yes", "!")
    ]
    assert [part.reasoning for part in said] == ["I", " see", ".", "", " \n</b", "", "", ""]
    assert [part.content for part in said] == ["", "", "", "", "", "", "Yes", "!"]


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{ messages[0].content }}", None),
        ("{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}", TAGS[0]),
        ("{{ messages[0].content.split('</think>')[-1] }}", TAGS[0]),
        ("[THINK]{{ messages[0].thinking }}[/THINK]", TAGS[1]),
        ("<seed:think>{{ messages[0].thinking }}</seed:think>", TAGS[2]),
        ("<|channel>thought\n<channel|>", TAGS[3]),
        ("<|START_THINKING|><|END_THINKING|>", TAGS[4]),
    ],
)
def test_the_format_is_read_off_the_template(sibyl: LLM, template: str, tags: tuple[str, str] | None) -> None:
    assert sibyl.tokenizer is not None
    found = ReasoningFormat.of(Tokenizer(sibyl.tokenizer.backend, template))
    assert found == (None if tags is None else ReasoningFormat(*tags))
    assert ReasoningFormat.of(None) is None


def test_formats_with_channels_or_tags_around_the_answer(sibyl: LLM) -> None:
    assert sibyl.tokenizer is not None
    backend = sibyl.tokenizer.backend
    assert ReasoningFormat.of(Tokenizer(backend, "<|channel|>analysis<|message|>")) == HarmonyFormat(False)
    granite = ReasoningFormat.of(Tokenizer(backend, "between <think></think>, then <response></response>"))
    assert granite == ReasoningFormat(*TAGS[0], answer=ANSWER_TAGS[:1])


@pytest.mark.parametrize("special", [True, False])
def test_tags_may_be_special_tokens(sibyl: LLM, special: bool) -> None:
    assert sibyl.tokenizer is not None
    backend = Backend.from_str(sibyl.tokenizer.backend.to_str())
    tag = AddedToken("[/THINK]", special=special)
    _ = backend.add_special_tokens([tag]) if special else backend.add_tokens([tag])
    found = ReasoningFormat.of(Tokenizer(backend, "[/THINK]"))
    assert found is not None
    assert found.hidden is special


@pytest.mark.parametrize(
    ("prompt", "continued", "is_open"),
    [
        ("<|user|>Hi<|assistant|>", "", False),
        ("<|assistant|><think>\n", "", True),
        ("<|assistant|><think>\n\n</think>\n\n", "", False),
        ("<|user|>What is <think>?<|assistant|>", "", False),
        ("<|assistant|><think>I am", "<think>I am", True),
        ("<|assistant|><think>I</think> am", "<think>I</think> am", False),
    ],
)
def test_whether_an_answer_begins_in_thoughts(prompt: str, continued: str, is_open: bool) -> None:
    assert THINK.is_open(prompt, continued) is is_open


JSON = '{"answer": "x"}'
OBJECT = Grammar.json_object()
THOUGHT = "hm < {]\n<|\n "
"""Thoughts with much of what tags and JSON have."""


TAGS_OF_ALL = sorted({tag for pair in TAGS + ANSWER_TAGS for tag in pair})


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "special"])
def accepts(request: pytest.FixtureRequest, sibyl: LLM) -> Callable[..., bool]:
    """Whether a grammar of any JSON object lets an answer to a prompt be a text."""
    assert sibyl.tokenizer is not None
    backend = Backend.from_str(sibyl.tokenizer.backend.to_str())
    channels = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"]
    backend.add_special_tokens([*channels, *TAGS_OF_ALL] if request.param else ["<|end|>"])
    tokenizer = Tokenizer(backend, "")
    all_grammars = Grammars(tokenizer, len(tokenizer))

    def accepts(form: Thoughts, prompt: str, text: str, continued: str = "") -> bool:
        grammars = ChatGrammars(ToolFormat(False), form, tokenizer.special_ids, prompt, continued)
        matcher = all_grammars.fresh(grammars.answer(OBJECT, ()))
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, special=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    return accepts


@pytest.mark.parametrize("tags", TAGS)
def test_a_grammar_begins_after_the_thoughts(accepts: Callable[..., bool], tags: tuple[str, str]) -> None:
    form, (opening, closing) = ReasoningFormat(*tags, answer=ANSWER_TAGS), tags
    rest = f"{THOUGHT}{closing}\n\n{JSON}"
    may_be = partial(accepts, form)
    for prompt, first in (("Hi", f"\n{opening}\n"), (f"Hi{opening}\n", ""), (opening, "")):
        assert may_be(prompt, first + rest)
        assert may_be(prompt, f"{first}{closing}{JSON}")
        assert not may_be(prompt, f"{first}{THOUGHT}{closing}Hello")
        assert not may_be(prompt, first + THOUGHT)  # an answer does not end in thoughts
        for before, after in ANSWER_TAGS:
            assert may_be(prompt, f"{first}{THOUGHT}{closing}{before}{JSON}{after}")
    assert may_be("Hi", JSON)
    assert not may_be(f"Hi{opening}", JSON)
    for closed in (f"{opening}\n\n{closing}\n\n", f"{opening}a{closing}"):  # the prompt wants no thoughts
        assert may_be(f"Hi{closed}", JSON)
        assert not may_be(f"Hi{closed}", f"{opening}{rest}")
    assert may_be(f"Hi{opening}I", rest, continued=f"{opening}I")
    assert not may_be("HiI", f"{opening}{rest}", continued="I")


def test_a_grammar_begins_after_the_thoughts_of_harmony(accepts: Callable[..., bool]) -> None:
    may_be = partial(accepts, HarmonyFormat(True))
    thoughts = f"{THOUGHT}<|end|>{NEXT}"
    for prompt, first in ((NEXT, ""), (NEXT, ANALYSIS + thoughts), (NEXT + ANALYSIS, thoughts)):
        assert may_be(prompt, f"{first}{ANALYSIS}{thoughts}{FINAL}{JSON}")
        assert may_be(prompt, f"{first}<|channel|>final <|constrain|>json<|message|>{JSON}")
        assert may_be(prompt, first + JSON)
        assert not may_be(prompt, f"{first}{FINAL}Hello")
        assert not may_be(prompt, f"{first}{ANALYSIS}{THOUGHT}")
    assert not may_be(NEXT + ANALYSIS, JSON)


def test_spelled_tags_do_not_end_thoughts_whose_tag_is_a_token(sibyl: LLM) -> None:
    """The parser reads the text, and would take the rest of the thoughts for the answer."""
    form, (opening, closing) = ReasoningFormat(*TAGS[0]), TAGS[0]
    special = {opening: 8192, closing: 8193}
    grammar = ChatGrammars(ToolFormat(False), form, special, opening, "").answer(OBJECT, ())
    assert sibyl.tokenizer is not None
    backend = Backend.from_str(sibyl.tokenizer.backend.to_str())
    spelled = backend.encode(closing, add_special_tokens=False).ids
    backend.add_special_tokens([opening, closing])
    matcher = Grammars(Tokenizer(backend, ""), 8194).fresh(grammar)
    assert matcher.try_consume_tokens(spelled) < len(spelled)
