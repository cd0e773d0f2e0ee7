"""Tokenizers: text to ids and back, piece by piece, and chat templates in a sandbox."""

from __future__ import annotations

import pickle
import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.utils.chat_template_utils import render_jinja_template

from soothsay import LLM, RequestError, Tokenizer
from soothsay.tokenizer import Detokenizer


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    backend.train_from_iterator(["the river and the bridge and the town"] * 10, trainer)
    return Tokenizer(backend)


def test_pieces_add_up_to_the_text_and_no_character_is_cut(byte_level: Tokenizer) -> None:
    rng = random.Random(0)
    alphabet = "the river äöü 漢字 🙂👩‍👩‍👧 \n\t ,.é"
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        ids = byte_level.encode(text)
        detokenizer = Detokenizer(byte_level, byte_level.encode("prompt "))
        pieces = []
        while ids:
            count = rng.randint(1, 4)
            pieces.append(detokenizer.push(ids[:count]))
            ids = ids[count:]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join([*pieces, detokenizer.push([], final=True)]) == text


def test_a_cut_character_comes_out_at_the_end_only(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.push(byte_level.encode("🙂")[:2]) == ""
    assert detokenizer.push([], final=True) == "\ufffd"


def test_word_boundaries_survive_streaming(sibyl: LLM) -> None:
    assert sibyl.tokenizer is not None
    text = "Once upon a time, there was a river; it ran 40 miles. " * 3
    ids = sibyl.tokenizer.encode(text)
    detokenizer = Detokenizer(sibyl.tokenizer, ids[:1])
    first = sibyl.tokenizer.decode(ids[:1])
    assert first + "".join(detokenizer.push([token]) for token in ids[1:]) == text


class TestTemplates:
    def template(self, byte_level: Tokenizer, source: str | None) -> Tokenizer:
        return Tokenizer(byte_level.backend, source, {"eos_token": "<end>"})

    def test_variables_special_tokens_and_generation_prompt(self, byte_level: Tokenizer) -> None:
        source = (
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}{{ extra | default('') }}"
        )
        tokenizer = self.template(byte_level, source)
        messages = [{"role": "user", "content": "<b> & 'ü'"}]
        assert tokenizer.render(messages) == "user: <b> & 'ü'<end>assistant: "
        assert tokenizer.render(messages, add_generation_prompt=False, extra="!") == "user: <b> & 'ü'<end>!"
        ids = tokenizer.encode_chat(messages)
        assert tokenizer.decode(ids, skip_special=False) == tokenizer.render(messages)

    def test_json_is_not_escaped_for_html(self, byte_level: Tokenizer) -> None:
        tokenizer = self.template(byte_level, "{{ messages | tojson }}")
        assert tokenizer.render([{"a": "<ü>"}]) == '[{"a": "<ü>"}]'

    def test_a_template_can_refuse(self, byte_level: Tokenizer) -> None:
        tokenizer = self.template(byte_level, "{{ raise_exception('roles must alternate') }}")
        with pytest.raises(RequestError, match="roles must alternate"):
            tokenizer.render([])

    def test_a_template_cannot_reach_out(self, byte_level: Tokenizer) -> None:
        for source in (
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{{ cycler.__init__.__globals__ }}",
        ):
            with pytest.raises(RequestError, match="template refused"):
                self.template(byte_level, source).render([])

    def test_tools_choose_the_template_for_them(self, byte_level: Tokenizer) -> None:
        both = Tokenizer(byte_level.backend, {"default": "plain", "tool_use": "{{ tools | length }} tools"})
        assert (both.render([]), both.render([], tools=[{}])) == ("plain", "1 tools")
        assert self.template(byte_level, "{{ tools | length }}").render([], tools=[{}]) == "1"
        only = Tokenizer(byte_level.backend, {"tool_use": "tools"})
        assert only.render([], tools=[{}]) == "tools"
        with pytest.raises(RequestError, match="no chat template"):
            only.render([])
        again = pickle.loads(pickle.dumps(both))
        assert again.render([], tools=[{}]) == "1 tools"

    @pytest.mark.parametrize(
        "source",
        [
            "{{ tools is defined }}{{ documents is defined }}{{ tools is none }}",
            "{% if tools is not none %}{{ tools }}{% endif %}",
            "{{ messages[0].thinking }}|{{ messages[0].reasoning_content }}|{{ messages[0].reasoning }}",
            "{{ messages[1].thinking is defined }}{{ messages | length }}",
        ],
    )
    @pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
    def test_what_every_template_is_given(self, byte_level: Tokenizer, source: str, field: str) -> None:
        """As transformers gives it: lists that are None, and thoughts under the names that templates read."""
        messages = [
            {"role": "assistant", "content": "", field: "Hm."},
            {"role": "assistant", "content": "", field: None},
        ]
        rendered, _ = render_jinja_template([messages], chat_template=source)
        assert self.template(byte_level, source).render(messages) == rendered[0]

    def test_no_template(self, byte_level: Tokenizer) -> None:
        assert not self.template(byte_level, None).has_chat_template
        with pytest.raises(RequestError, match="no chat template"):
            self.template(byte_level, None).render([])


@pytest.mark.parametrize("skip_special", [True, False])
def test_tokens_one_by_one_have_the_text_that_they_have_together(
    byte_level: Tokenizer, skip_special: bool
) -> None:
    """Also those that end in the middle of a character, for which the text of a lone token is no answer."""
    rng, count = random.Random(1), len(byte_level)
    for _ in range(300):
        ids = [rng.randrange(count) for _ in range(rng.randint(1, 40))]
        context = [rng.randrange(count) for _ in range(rng.randint(0, 8))]
        fast, slow = (Detokenizer(byte_level, context, skip_special=skip_special) for _ in range(2))
        expected = [slow.push((token,), final=place == len(ids)) for place, token in enumerate(ids, start=1)]
        found = list[str]()
        while len(found) < len(ids):
            some = ids[len(found) : len(found) + rng.randint(1, 4)]
            found += fast.push_each(some, final=len(found) + len(some) == len(ids))
        assert found == expected
