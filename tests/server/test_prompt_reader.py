"""Texts that cannot fit the context are refused before they are tokenized, and no other ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Running
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from soothsay import LLM
from soothsay.server.apis.llamacpp.llama_bodies import LlamaCompletionRequest
from soothsay.server.apis.llamacpp.llama_routes import read_prompts
from soothsay.server.engines.engine_messages import LoadedModel
from soothsay.server.generation import request_prompts
from soothsay.server.generation.request_bodies import ChatRequest
from soothsay.server.generation.request_prompts import CUT, PIECE, PromptReader, exceeds
from soothsay.server.http.api_errors import ApiError
from soothsay.tokenizer import Tokenizer
from soothsay.vocabulary.byte_level import byte_text

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(normalizer: Any = None, cutter: Any = None) -> Tokenizer:
    """A byte-level tokenizer. Without a normalizer it has a token of eight spaces."""
    spaces, merges = ["ĠĠ", "ĠĠĠĠ", "ĠĠĠĠĠĠĠĠ"], [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠĠĠ")]
    if normalizer is not None:  # then a long token would hide what the normalizer does
        spaces, merges = [], []
    backend = Backend(models.BPE({token: i for i, token in enumerate([*BYTES, *spaces])}, merges))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = last if cutter is None else pre_tokenizers.Sequence([cutter, last])
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(backend)


def with_bytes(normalizer: Any = None, **options: Any) -> Tokenizer:
    """A tokenizer with tokens for characters, and for the bytes of all others."""
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    options = {"byte_fallback": True, **options}
    model = models.BPE({token: i for i, token in enumerate(vocabulary)}, [("▁", "a")], **options)
    backend = Backend(model)
    backend.normalizer = normalizer or normalizers.Replace(" ", "▁")
    backend.decoder = decoders.ByteFallback()
    return Tokenizer(backend)


TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": byte_level(),
    "composed": byte_level(normalizers.NFC()),
    "composed and compatible": byte_level(
        normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("x")])
    ),
    "composed and replaced": byte_level(
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\u1f8d\u1f8d\u1f8d", "b")])
    ),
    "cut": byte_level(cutter=pre_tokenizers.Split(Regex("a+"), "isolated")),
    "replaced": byte_level(normalizers.Replace("aaa", "b")),
    "replaced by two": byte_level(normalizers.Replace("aaa", "bc")),
    "fallback": with_bytes(),
    "unknown": with_bytes(byte_fallback=False, unk_token="a"),
    "dropped": byte_level(cutter=pre_tokenizers.Split(Regex("a+"), "removed")),
    "dropped by a normalizer": byte_level(normalizers.Replace("a", "")),
    "replaced by a pattern": byte_level(normalizers.Replace(Regex("a+"), "b")),
    "stripped": byte_level(normalizers.Strip()),
    "unknown ones are joined": with_bytes(byte_fallback=False, unk_token="a", fuse_unk=True),
    "unknown ones are dropped": with_bytes(byte_fallback=False),
    "words": Tokenizer(Backend(models.WordLevel({"a": 0}, unk_token="a"))),
}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts have many pieces, and none is short."""
    monkeypatch.setattr(request_prompts, "PIECE", 250)
    monkeypatch.setattr(request_prompts, "SHORT", 0)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="a \n\u0301\u0345\u0391\u0314é😀ffi\u1100\u1161\u11a8", max_size=60))
def test_no_text_that_fits_is_refused(tokenizer: Tokenizer, text: str) -> None:
    long = (text * 20, text + "a" * 1000, text * 20 + "Ab \u00e9" * 90, "\u0391\u0314\u0301\u0345" * 200)
    for whole in (text, " " * 64 + text, *long):
        assert not exceeds(tokenizer, whole, len(tokenizer.encode(whole)))


@pytest.mark.parametrize("name", ["bytes", "composed", "cut", "fallback", "stripped", "dropped"])
def test_a_text_that_is_too_long_is_refused_whatever_the_tokenizer_drops(name: str) -> None:
    assert exceeds(TOKENIZERS[name], "x" * 4_000_000, 10_000)
    assert not exceeds(TOKENIZERS[name], "x" * 10_000, 10_000)


@pytest.mark.parametrize(("left", "right"), [(True, True), (True, False), (False, True)])
def test_a_token_that_takes_the_spaces_beside_it(left: bool, right: bool) -> None:
    tokenizer = byte_level()
    tokenizer.backend.add_tokens([AddedToken("<mask>", lstrip=left, rstrip=right)])
    text = " " * 5000 * left + "<mask>" + "\n" * 5000 * right
    count = len(tokenizer.encode(text * 2))
    assert count == 2
    assert not exceeds(tokenizer, text * 2, count)
    assert exceeds(tokenizer, "x" * 5000, 10)


def test_a_tokenizer_that_cuts_texts_off_has_no_bound() -> None:
    tokenizer = byte_level()
    tokenizer.backend.enable_truncation(5)
    assert not exceeds(tokenizer, "x" * 50_000, 10)


@pytest.mark.usefixtures("small_pieces")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="ab\0\x04 \né", max_size=60))
def test_bytes_without_a_token_may_stand_between_those_of_one(text: str) -> None:
    letters = [letter for letter in BYTES if letter not in {byte_text(b"\0"), byte_text(b"\x04")}]
    tokens = [*letters, "ab", "abab", "abababab"]
    merges = [("a", "b"), ("ab", "ab"), ("abab", "abab")]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(backend)
    for whole in (text * 20, "a\0b\x04" * 400, text * 9 + "ab" * 900 + text * 9):
        assert not exceeds(tokenizer, whole, len(tokenizer.encode(whole)))
    assert not exceeds(tokenizer, "\0" * 1_000_000, 1)
    assert exceeds(tokenizer, "a" * 300, 100)


def test_tokens_count_and_not_characters() -> None:
    tokenizer = byte_level()
    assert not exceeds(tokenizer, " " * 790, 100)  # these are 99 tokens and more
    assert exceeds(tokenizer, "x" * 300, 100)
    assert exceeds(tokenizer, " x" * 150, 100)
    words = "x" * PIECE * 3
    assert exceeds(tokenizer, words, 3 * PIECE // 2 - 1), "all pieces count"
    assert not exceeds(tokenizer, words, 3 * PIECE)


def test_tokenizing_lets_other_threads_run(sibyl: LLM) -> None:
    text = "".join(chr(33 + i * 7919 % 90) for i in range(400_000))
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(sibyl.tokenizer.encode, text)
        while not work.done():
            turns += 1
            time.sleep(0.001)
    assert turns > 10


class Counting(Tokenizer):
    """Counts what it encodes, and fails if that is long."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        assert len(text) < 10_000, "a text beyond the context was tokenized"
        return super().encode(text, special=special)


def reader(max_context: int = 100) -> PromptReader:
    template = "{% for message in messages %}{{ message.content * message.times }}{% endfor %}"
    tokenizer = Counting(byte_level().backend, template)
    return PromptReader(LoadedModel(tokenizer, 260, max_context, 1, 16, 50, "none", ()))


def refusal(work: Callable[[], Any]) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as error:
        work()
    assert error.value.status == 400
    return error.value.code, error.value.param


def test_texts_beyond_the_context_are_not_tokenized() -> None:
    one = reader()
    assert one.encode("Hi") == one.tokenizer.encode("Hi")
    assert refusal(lambda: one.encode("x" * 4_000_000)) == ("context_length_exceeded", "prompt")
    assert refusal(lambda: one.encode("x" * 400)) == ("context_length_exceeded", "prompt")
    many = [{"role": "user", "content": "x", "times": 1_000_000}]
    assert refusal(lambda: one.encode(one.render(many, {}), field="messages")) == (
        "context_length_exceeded",
        "messages",
    )
    assert refusal(lambda: one.check_prompt([0] * 100)) == ("context_length_exceeded", "prompt")
    assert one.check_prompt([0] * 99) == [0] * 99


def test_a_text_of_which_the_end_is_wanted_may_be_longer() -> None:
    one = reader()
    assert len(one.encode("x" * (100 * CUT), cut=True)) == 100 * CUT
    with pytest.raises(ApiError, match=f"more than {100 * CUT} tokens; cut it") as refused:
        one.encode("x" * 1000, field="messages", cut=True)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    parts = LlamaCompletionRequest(prompt="x", truncate_prompt_tokens=5)
    assert read_prompts(one, parts, [["x" * 150] * 2]) == [one.encode("xxxxx")]
    with pytest.raises(ApiError, match="at least 450 tokens"):
        read_prompts(one, parts, [["x" * 150] * 9])


@pytest.mark.parametrize("bad", [-1, 260, 2**63])
def test_unknown_token_ids_are_refused(bad: int) -> None:
    assert refusal(lambda: reader().check_prompt([1, bad])) == ("invalid_value", "prompt")
    assert refusal(lambda: reader().check([bad], "tokens")) == ("invalid_value", "tokens")


@pytest.mark.parametrize("times", ["x", None, [], {}, -1.5, "{{ 1 // 0 }}"])
def test_whatever_a_template_raises_is_the_clients_error(times: object) -> None:
    messages = [{"role": "user", "content": {}, "times": times}]
    assert refusal(lambda: reader().render(messages, {})) == ("invalid_value", "messages")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"model": "sibyl", "prompt": "word " * 800_000}, "prompt"),
        ("/v1/completions", {"model": "sibyl", "prompt": ["Hi", "x" * 40_000]}, "prompt"),
        ("/v1/completions", {"model": "sibyl", "prompt": [1] * 1_000_000}, "prompt"),
        ("/detokenize", {"tokens": [1] * 9000}, "tokens"),
        ("/tokenize", {"prompt": "x" * 4_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 4_000_000}]}, "messages"),
        (
            "/v1/chat/completions",
            {"model": "sibyl", "messages": [{"role": "user", "content": "x" * 4_000_000}]},
            "messages",
        ),
    ],
)
def test_the_server_refuses_them(running: Running, path: str, body: dict[str, Any], param: str) -> None:
    reply = httpx.post(f"{running.url}{path}", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert running.free


def test_a_later_message_of_the_system_goes_where_the_template_takes_it() -> None:
    """Claude Code writes one after the user's first message, and many templates want it first or nowhere."""

    def said(*messages: str) -> list[dict[str, Any]]:
        roles = {"s": "system", "u": "user", "a": "assistant"}
        return [{"role": roles[text[0]], "content": text} for text in messages]

    def laid_out(template: str, messages: list[dict[str, Any]]) -> str:
        tokenizer = Tokenizer(byte_level().backend, template)
        reader = PromptReader(LoadedModel(tokenizer, 260, 100, 1, 16, 50, "none", ()))
        body = ChatRequest.model_validate({"messages": messages, "add_generation_prompt": False})
        return reader.read_chat(body, [])[1]

    plain = "{% for m in messages %}[{{ m.role[0] }} {{ m.content }}]{% endfor %}"
    strict = (
        "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('first only') }}{% endfor %}"
    )
    never = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system') }}{% endfor %}"
    for texts, expected in (
        (("s1", "u1", "s2", "a1", "u2"), "[s s1][u u1\n\ns2][a a1][u u2]"),
        (("s1", "s2", "u1"), "[s s1\n\ns2][u u1]"),
        (("s1", "u1", "a1", "s2", "u2", "u3"), "[s s1][u u1][a a1][u s2\n\nu2][u u3]"),
        (("u1", "a1", "s2", "s3"), "[u u1][a a1][u s2\n\ns3]"),
    ):
        messages = said(*texts)
        assert laid_out(strict + plain, messages) == expected
        assert laid_out(plain, messages) == "".join(f"[{text[0]} {text}]" for text in texts)
    assert laid_out(never + plain, said("u1", "s1", "a1")) == "[u u1\n\ns1][a a1]"
    with pytest.raises(ApiError, match="no system"):
        laid_out(never + plain, said("s1", "u1"))
    begin = time.perf_counter()
    assert len(laid_out(strict, said("s1", *["s" * 50] * 20_000))) == 0
    assert time.perf_counter() - begin < 10
