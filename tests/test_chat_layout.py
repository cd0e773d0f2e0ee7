"""Conversations in a model's templates: begun answers, ends of turns, and templates that cannot be used."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from chat_styles import ANSWER, QUESTION, STYLES, SYSTEM
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.utils.chat_template_utils import render_jinja_template

from soothsay import LLM, ModelError, SamplingParams
from soothsay.chat_layout import ChatLayout, templates_in
from soothsay.errors import RequestError
from soothsay.tokenizer import Tokenizer, with_layout

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("m.content", "m.content | trim")
JOINED = "{{ messages | map(attribute='content') | join('\n') }}\nEnd."
LATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }} x Sure <"
BROKEN = ("{% for %}", "{{ 'a' | nosuchfilter }}", "{% if %}" * 9, "x" * (2**18 + 1), 5, ["x"], None)
BEGUN = (
    "<",
    "i",
    "_",
    "|",
    "m",
    "end",
    "\n",
    "x",
    "Sure <",
    "OK ",
    "  OK\n",
    "<|im_end|>",
    "assistant",
    "</s>",
)
MARKS = [
    *("</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|start|>", "<|message|>", "<|part|>"),
    *(f"<|{role}|>" for role in ("user", "assistant", "system")),
]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def backend() -> Backend:
    """A tokenizer of bytes, with the marks of chats."""
    one = Backend(models.BPE({text: i for i, text in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    one.decoder = decoders.ByteLevel()
    one.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return one


@pytest.mark.parametrize("begun", [*BEGUN, "", str(QUESTION["content"]), str(ANSWER["content"])])
def test_an_answer_goes_on_where_transformers_lets_it(begun: str) -> None:
    """The text of the last message also stands before it, or in what the template writes after it."""
    messages = [SYSTEM, QUESTION, {"role": "assistant", "content": begun}]
    for source in (*STYLES.values(), CHATML, TRIMMED, JOINED, LATE):
        layout = ChatLayout({"default": source}, SPECIAL)
        try:
            ((expected,), _) = render_jinja_template(
                [messages], chat_template=source, continue_final_message=True, **SPECIAL
            )
        except Exception:  # it refuses texts that a template changes, and so may we
            continue
        assert layout.render(messages, continue_final_message=True) == expected


@pytest.mark.parametrize("begun", [one for one in BEGUN if one.strip()])
def test_most_begun_answers_are_compared(begun: str) -> None:
    for source in (CHATML, STYLES["hermes"], STYLES["headers"]):
        rendered = ChatLayout({"default": source}, SPECIAL).render(
            [QUESTION, {"role": "assistant", "content": begun}], continue_final_message=True
        )
        assert rendered.endswith(begun) or rendered.endswith(begun.strip())


def test_a_message_that_cannot_be_continued() -> None:
    for messages, problem in (
        ([], "continues the last message"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}]}], "must be a text"),
        ([QUESTION, ANSWER], "leaves out"),
    ):
        layout = ChatLayout({"default": "{{ messages[:1] | map(attribute='role') | join }}"}, {})
        with pytest.raises(RequestError, match=problem):
            layout.render(messages, continue_final_message=True)


def test_an_llm_continues_a_message(sibyl: LLM) -> None:
    assert sibyl.tokenizer is not None
    begun = [*HELLO, {"role": "assistant", "content": "Hi <"}]
    prompt = sibyl.tokenizer.render(HELLO) + "Hi <"
    params = SamplingParams(temperature=0, max_tokens=4)
    meant = sibyl.generate(sibyl.tokenizer.encode(prompt, special=False), params)
    assert sibyl.chat(begun, params, continue_final_message=True).token_ids == meant.token_ids


PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
)
PLAIN_ENDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
NEXT_TURN = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
TWO_MARKS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|part|><|end|>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "known", "end"),
    [
        (CHATML, ["</s>"], "<|im_end|>"),
        (TRIMMED, [], "<|im_end|>"),
        (CHATML, ["<|im_end|>"], None),
        (PHI, ["</s>"], "<|end|>"),
        (CHANNELS, ["<|return|>"], None),
        (CHANNELS, [], None),
        (PLAIN_ENDS, ["</s>"], None),
        (NEXT_TURN, ["</s>"], None),
        (TWO_MARKS, ["<|end|>"], None),
        ("{% for m in messages %}{{ m.content }} {{ eos_token }}\n{% endfor %}", [], "</s>"),
        ("{{ raise_exception('no') }}", ["</s>"], None),
        ("{% for %}", ["</s>"], None),
        ("", ["</s>"], None),
    ],
)
def test_the_end_of_a_turn_ends_an_answer(
    backend: Backend, source: str, known: list[str], end: str | None
) -> None:
    tokenizer = Tokenizer(backend, source, SPECIAL)
    ids = tuple(backend.token_to_id(one) for one in known)
    assert tokenizer.end_ids(ids) == ids + (() if end is None else (backend.token_to_id(end),))


@pytest.mark.parametrize("source", BROKEN, ids=lambda source: str(source)[:20])
def test_a_broken_template_is_as_good_as_none(backend: Backend, source: Any) -> None:
    tokenizer = Tokenizer(backend, {"default": source})
    assert not tokenizer.has_chat_template
    assert tokenizer.layout.problem is not None
    assert tokenizer.decode(tokenizer.encode("still here")) == "still here"
    for one in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        with pytest.raises(RequestError, match="chat template"):
            one.render(HELLO)
    both = Tokenizer(backend, {"default": "fine", "tool_use": source})
    assert both.render(HELLO) == both.render(HELLO, tools=[{}]) == "fine"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.jinja", b"\n"),
        ("chat_template.json", b"{"),
        ("chat_template.json", b'{"chat_template": 5}'),
        ("additional_chat_templates/tool_use.jinja", b"\xff"),
    ],
)
def test_a_template_that_cannot_be_read(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    layout = ChatLayout(templates_in(tmp_path, {}), {})
    assert layout.problem is not None
    assert not layout.compiled


def test_completions_go_on_without_a_template(sibyl: LLM) -> None:
    assert sibyl.tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=4)
    with pytest.warns(UserWarning, match="not valid Jinja"):
        llm = LLM(sibyl.model, drafter="none", tokenizer=Tokenizer(sibyl.tokenizer.backend, "{% for %}"))
    with llm:
        assert llm.generate("Once", params).token_ids == sibyl.generate("Once", params).token_ids
        with pytest.raises(RequestError, match="not valid Jinja"):
            llm.chat("hello", params)


def test_a_template_that_writes_nothing(sibyl: LLM) -> None:
    """`generate` takes no tokens at all for a list of no prompts."""
    assert sibyl.tokenizer is not None
    tokenizer = Tokenizer(sibyl.tokenizer.backend, "{{ messages[0].content }}")
    with LLM(sibyl.model, drafter="none", tokenizer=tokenizer) as llm:
        with pytest.raises(RequestError, match="the chat template makes an empty prompt"):
            llm.chat("")
        assert llm.chat("hello", SamplingParams(max_tokens=1)).token_ids


def test_a_template_of_a_file(sibyl: LLM, tmp_path: Path) -> None:
    file = tmp_path / "my.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}!")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm = LLM(sibyl.model, drafter="none", tokenizer=sibyl.tokenizer, chat_template=file)
    with llm:
        assert llm.tokenizer is not None
        assert llm.tokenizer.render(HELLO, tools=[{}]).endswith("hello!")
    for content in (b"{% for %}", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=r"my\.jinja"):
            LLM(sibyl.model, drafter="none", tokenizer=sibyl.tokenizer, chat_template=file)
    with pytest.raises(ModelError, match=r"nosuch\.jinja"):
        with_layout(sibyl.tokenizer, tmp_path / "nosuch.jinja")
    with pytest.raises(ModelError, match="no tokenizer"):
        with_layout(None, file)
