"""Grammars: masks against a language that is listed, the law, answers that can be checked from outside."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from kernels import OPS
from llguidance import LLMatcher
from scipy import stats
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from soothsay import LLM, DraftTree, Grammar, RequestError, SamplingParams, Tokenizer
from soothsay.core import constraint as module
from soothsay.core.batch import Batch, Rows
from soothsay.core.constraint import Constraint, Grammars
from soothsay.core.grammar import FORMATS, MAX_RULES, MAX_SOURCE, bounded_json, spelled
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes, perturb
from soothsay.core.tenant import Tenant
from soothsay.core.verify import VERIFIERS, Promise
from soothsay.drafters.base import NoDrafter, Target
from soothsay.drafters.models.draft_model import DraftModel
from soothsay.drafters.registry import DrafterSpec
from soothsay.errors import StepError
from soothsay.model.transformer import Transformer

Make = Callable[..., Transformer]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {
            "type": "array",
            "maxItems": 1,
            "items": {
                "type": "object",
                "properties": {"kind": {"enum": ["cat", "dog"]}, "kilos": {"type": "number", "maximum": 80}},
                "required": ["kind"],
                "additionalProperties": False,
            },
        },
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def is_person(text: str) -> bool:
    """Check a person against the schema by hand, without the library's code."""
    found = json.loads(text)
    assert found.keys() <= {"name", "age", "pets", "alive"}
    assert re.fullmatch("[A-Z][a-z]{1,8}", found["name"])
    assert type(found["age"]) is int
    assert 0 <= found["age"] <= 120
    assert len(found["pets"]) <= 1
    for pet in found["pets"]:
        assert pet.keys() <= {"kind", "kilos"}
        assert pet["kind"] in ("cat", "dog")
        assert type(pet.get("kilos", 0)) in (int, float)
        assert pet.get("kilos", 0) <= 80
    return type(found.get("alive", True)) is bool


def byte_level(pieces: Sequence[str], special: Sequence[str] = ()) -> Tokenizer:
    """Make a tokenizer of these pieces, letters first, in this order, then the special tokens."""
    merges = [(piece[:-1], piece[-1]) for piece in pieces if len(piece) > 1]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    backend = Backend(
        models.BPE(
            {token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<unk>", normalized=False), AddedToken("<s>", normalized=False)])
    return Tokenizer(backend)


def grow(rng: random.Random, vocab: int, size: int, tokens: Sequence[int] = ()) -> DraftTree:
    tree = DraftTree(0)
    while len(tree) < size:
        tree.add(rng.randrange(len(tree)), rng.choice(tokens) if tokens else rng.randrange(vocab))
    return tree


def said_at(tree: DraftTree, node: int) -> list[int]:
    return [tree.tokens[n] for n in tree.path(node)[1:]]


PIECES = ("a", "b", "c", "ab", "abc", "bc", "cc")
TAILS = ("c", "ab", "cc", "cab", "abc", "abab")
LANGUAGES = {
    "ab(c|ab){1,2}c?": ["ab" + tail + end for tail in TAILS for end in ("", "c")],
    "a|abc|abcc|b": ["a", "abc", "abcc", "b"],
    "(abc)?": ["", "abc"],
    "a(bx|cc)|bcxa": ["abx", "acc", "bcxa"],  # there is no token for x, so nothing can follow ab and bc
}


class TestMasks:
    VOCAB, ENDS = 12, frozenset({6, 10})  # token 7 is special, 8 to 11 are nobody's; 6 would be text

    def expected(self, language: Sequence[str], said: Sequence[int]) -> list[bool]:
        texts = dict(enumerate(PIECES))
        if any(token not in texts for token in said):
            return [True] * self.VOCAB
        text = "".join(texts[token] for token in said)
        if not any(word.startswith(text) for word in language):
            return [True] * self.VOCAB
        may = [
            token in texts and any(word.startswith(text + texts[token]) for word in language)
            for token in range(self.VOCAB)
        ]
        for token in self.ENDS:
            may[token] = text in language
        return may if any(may) else [token in self.ENDS for token in range(self.VOCAB)]

    @pytest.mark.parametrize("pattern", LANGUAGES)
    def test_a_token_is_allowed_if_the_answer_can_still_become_a_word(self, pattern: str) -> None:
        """Trees of right and wrong guesses, their nodes asked for in any order, again and again."""
        grammars = Grammars(byte_level(PIECES, ["<|x|>"]), self.VOCAB)
        rng, language = random.Random(0), LANGUAGES[pattern]
        for _ in range(60):
            constraint, output = grammars.constraint(Grammar.regex(pattern)), np.empty(0, dtype=np.int64)
            while True:
                for _ in range(2):
                    tree = grow(rng, self.VOCAB, rng.randint(1, 25), rng.choice([(), (0, 1, 2, 3)]))
                    nodes = rng.choices(range(len(tree)), k=rng.randint(1, 12))
                    rows = constraint.allowed(output, tree, nodes, self.ENDS).tolist()
                    for node, row in zip(nodes, rows, strict=True):
                        assert row == self.expected(language, [*output, *said_at(tree, node)])
                may = self.expected(language, output)
                new = [token for token in range(self.VOCAB) if may[token] and token not in self.ENDS]
                if not new:
                    break
                output = np.append(output, rng.choice(new))

    @pytest.mark.parametrize("source", [PERSON, {"type": "object"}])
    def test_what_was_asked_before_makes_no_difference(self, source: dict[str, Any], sibyl: LLM) -> None:
        assert sibyl.tokenizer is not None
        tokenizer, rng = sibyl.tokenizer, random.Random(1)
        grammar, ends = Grammar.json_schema(source), frozenset({0})
        used, untouched = (Grammars(tokenizer, 8192) for _ in range(2))
        text = '{"name":"Natalia","age":48,"pets":[{"kind":"cat","kilos":4.5}],"alive":true}'
        ids = tokenizer.encode(text)
        constraint = used.constraint(grammar)
        for count in range(0, len(ids) + 1, 3):
            output, tree = np.array(ids[:count]), DraftTree(0)
            tree.extend(ids[count : count + 5])
            for _ in range(12):
                tree.add(rng.randrange(len(tree)), rng.choice([*ids, rng.randrange(8192)]))
            rows = constraint.allowed(output, tree, range(len(tree)), ends)
            for node in rng.sample(range(len(tree)), 4):
                said, alone = np.array([*output, *said_at(tree, node)]), untouched.constraint(grammar)
                row = alone.allowed(said, DraftTree(0), [0], ends)[0]
                possible = all(
                    alone_allows(untouched, grammar, said[:n], said[n]) for n in range(count, len(said))
                )
                assert np.array_equal(rows[node], row if possible else np.ones(8192, dtype=np.bool_))

    def test_a_lexer_that_is_full_is_replaced(self, monkeypatch: pytest.MonkeyPatch, sibyl: LLM) -> None:
        """Answers share what their lexer has learnt; that others have filled it shows in nothing."""
        assert sibyl.tokenizer is not None
        tokenizer, made = sibyl.tokenizer, []
        fresh = Grammars.fresh
        monkeypatch.setattr(Grammars, "fresh", lambda *given: (made.append(given), fresh(*given))[1])
        monkeypatch.setattr(module, "MAX_LEXER_STATES", 75)  # enough for one of the answers, not for all
        grammar = Grammar.regex("1 [a-z ]{1,90}z|2 [0-9 ]{1,90}y|x[a-y ]{1,90}z|4+ [b-z a]{1,90}!")
        shared = Grammars(tokenizer, 8192)
        for text in ("1 zebra and river", "2 3", "x yes", "44 apples in town"):
            ids, rows, alone = tokenizer.encode(text), [], Grammars(tokenizer, 8192)
            for constraint in (alone.constraint(grammar), shared.constraint(grammar)):
                given = [(np.array(ids[:n]), DraftTree(0), [0], frozenset({0})) for n in range(len(ids))]
                rows.append(np.concatenate([constraint.allowed(*each) for each in given]))
            assert np.array_equal(*rows)
            assert rows[0].sum(1).min() > 1
        assert len(made) > 5, "which is one for each, and for all of them"

    def test_padding_and_special_tokens_are_no_text(self, sibyl: LLM) -> None:
        assert sibyl.tokenizer is not None
        constraint = Grammars(sibyl.tokenizer, 8200).constraint(Grammar.regex("(?s:.*)"))
        row = constraint.allowed(np.empty(0, np.int64), DraftTree(0), [0], frozenset({3}))[0]
        assert not row[[0, 1, 2, 4]].any()
        assert row[3], "which is what this answer ends with"
        assert row[5:8192].mean() > 0.9
        assert not row[8192:].any()

    def test_a_grammar_can_ask_for_special_tokens(self, sibyl: LLM) -> None:
        assert sibyl.tokenizer is not None
        constraint = Grammars(sibyl.tokenizer, 8192).constraint(Grammar.lark('start: <|user|> "a"'))
        row = constraint.allowed(np.empty(0, np.int64), DraftTree(0), [0], frozenset({0}))[0]
        assert row.nonzero()[0].tolist() == [1]

    def test_bytes_and_spaces_of_sentencepiece(self) -> None:
        tokenizer = sentencepiece()
        numbers, ends = tokenizer.vocabulary(), frozenset({1})
        grammar = Grammar.choice([" ab", "ü"])

        def after(*tokens: str) -> set[int]:
            said = np.array([numbers[token] for token in tokens], dtype=np.int64)
            constraint = Grammars(tokenizer, len(tokenizer)).constraint(grammar)
            return set(constraint.allowed(said, DraftTree(0), [0], ends)[0].nonzero()[0].tolist())

        assert after() == {numbers[token] for token in ("▁", "▁a", "<0x20>", "<0xC3>")}
        assert after("▁") == {numbers[token] for token in ("a", "ab", "<0x61>")}
        assert after("▁", "ab") == {1}
        assert after("<0xC3>") == {numbers["<0xBC>"]}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 0.7},
        {"temperature": 1.5, "top_k": 3, "min_p": 0.02},
        {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.3, "top_p": 0.9},
        {"logit_bias": {0: 3.0, 2: -2.0, 5: 9.0}, "top_p": 0.6},
        {"verifier": "traversal", "top_p": 0.8},
    ],
)
def test_what_is_forbidden_is_as_if_biased_away(asked: dict[str, Any]) -> None:
    """Before anything is cut: the nucleus is of what is left."""
    grammars = Grammars(byte_level(PIECES, ["<|x|>"]), 12)
    constraint = grammars.constraint(Grammar.regex("ab(c|ab){1,2}c?"))
    params = SamplingParams(stop_token_ids=[8], **asked)
    tree = DraftTree(3)
    tree.extend([2, 2])
    tree.extend([3, 2])
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(len(tree), 12))).float() * 3

    def scores(params: SamplingParams, constraint: Constraint | None, row: Tensor, node: int) -> Tensor:
        drafter = NoDrafter(Target(None, None, None, 0))  # type: ignore[arg-type]
        request = Request([5, 1], params, seed=3, limit=20, drafter=drafter, constraint=constraint)
        request.emit([3])  # ab
        return perturb(row, [Nodes(request, tree, [node])], OPS)

    for node in range(len(tree)):
        said = np.array([3, *said_at(tree, node)])
        may = grammars.constraint(Grammar.regex("ab(c|ab){1,2}c?")).allowed(
            said, DraftTree(0), [0], frozenset({8})
        )[0]
        away = dict.fromkeys((~may).nonzero()[0].tolist(), -math.inf)
        biased = replace(params, logit_bias={**(params.logit_bias or {}), **away})
        row = rows[node : node + 1]
        assert 0 < len(away) < 12
        assert torch.equal(scores(params, constraint, row, node), scores(biased, None, row, node))


def test_a_limit_counts_only_where_it_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same path after more tokens is another place."""
    constraint = Grammars(byte_level(PIECES, ["<|x|>"]), 12).constraint(Grammar.regex("ab(c|ab){1,9}"))
    output, tree, ends = np.array([3]), DraftTree(3), frozenset({8})
    tree.extend([3])
    with monkeypatch.context() as patched:
        patched.setattr(module, "MASK_SECONDS", -1.0)
        constraint.allowed(output, tree, [1], ends)
    assert constraint.limit([2, 3]) is None, "the draft was wrong"
    assert constraint.limit([3, 3]) == (1, module.TOO_SLOW)
    constraint.allowed(np.array([3, 2]), tree, [0, 1], ends)
    assert constraint.limit([3, 3]) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_is_cut_to_what_is_allowed(seed: int) -> None:
    """The cut tree agrees with the masks, node by node. The masks decide on end tokens."""
    rng = np.random.default_rng(seed)
    grammars = Grammars(byte_level(PIECES, ["<|x|>"]), 12)
    grammar = Grammar.regex("ab(c|ab){1,4}c?")
    constraint, ends, said = grammars.constraint(grammar), frozenset({8}), np.array([3])
    tree = DraftTree(3)
    for _ in range(40):
        tree.add(int(rng.integers(0, len(tree))), int(rng.integers(0, 9)), float(-rng.random()))
    cut = constraint.cut(said, tree, ends)
    masks = grammars.constraint(grammar).allowed(said, tree, range(len(tree)), ends)
    kept = {0: True}
    for node in range(1, len(tree)):
        above, token = tree.parents[node], tree.tokens[node]
        kept[node] = kept[above] and tree.tokens[above] not in ends
        kept[node] &= token in ends or bool(masks[above, token])

    def paths(tree: DraftTree, nodes: Sequence[int]) -> dict[tuple[int, ...], float]:
        return {tuple(tree.tokens[n] for n in tree.path(node)): tree.scores[node] for node in nodes}

    expected = paths(tree, [node for node in range(len(tree)) if kept[node]])
    assert paths(cut, range(len(cut))) == pytest.approx(expected)
    assert 1 < len(cut) < len(tree)
    assert constraint.cut(said, cut, ends) is cut
    mask = constraint.allowed(said, tree, range(len(tree)), ends)
    assert np.array_equal(mask, masks), "it has left no trace"


def alone_allows(grammars: Grammars, grammar: Grammar, said: Any, token: int) -> bool:
    row = grammars.constraint(grammar).allowed(said, DraftTree(0), [0], frozenset({0}))[0]
    return bool(row[token]) and token != 0


class TestAnswers:
    """Answers of the bundled model with speculation."""

    def test_many_of_json_fit_their_schema(self, sibyl: LLM) -> None:
        prompt = sibyl.chat_prompt([{"role": "user", "content": "Natalia and her pets?"}])
        params = SamplingParams(temperature=1.0, max_tokens=200, grammar=Grammar.json_schema(PERSON))
        asked = [replace(params, seed=seed) for seed in range(48)]
        drafters = ["draft-model(model=sibyl)", "none", "none", "none", "prompt-lookup", "mtp"] * 8
        results = sibyl.generate([prompt] * 48, asked, drafter=drafters)
        assert all(is_person(result.text) for result in results)
        assert {result.finish_reason for result in results} == {"stop"}
        assert len({result.text for result in results}) > 40
        assert sum(result.stats.emitted for result in results) > 1.3 * sum(r.stats.steps for r in results)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize(
        "pattern", [r"[A-Z][a-z]{2,8} (is|was) \d{1,3}!", "(the |a )*end", "[^a-z]{3,20}"]
    )
    def test_a_regex_matches_all_of_it(self, pattern: str, temperature: float, sibyl: LLM) -> None:
        params = SamplingParams(temperature=temperature, max_tokens=400, grammar=Grammar.regex(pattern))
        many = [replace(params, seed=seed) for seed in range(8)]
        for result in sibyl.generate(["Once upon a time"] * 8, many, drafter="draft-model(model=sibyl)"):
            assert re.fullmatch(pattern, result.text) or result.finish_reason == "length"
            assert result.finish_reason == "stop" or "*" in pattern

    def test_choices(self, sibyl: LLM) -> None:
        texts = ['say "yes"\n', "back\\slash /", "🙂 ünïcode", "no", "nobody", ""]
        params = SamplingParams(grammar=Grammar.choice(texts), temperature=3.0, logit_bias={0: -5.0})
        many = [replace(params, seed=seed) for seed in range(60)]
        results = sibyl.generate(["Well?"] * 60, many, drafter="prompt-lookup")
        assert {result.text for result in results} <= {*texts}
        assert len({result.text for result in results}) >= 4
        assert {result.finish_reason for result in results} == {"stop"}

    def test_a_choice_may_have_any_character(self, sibyl: LLM) -> None:
        texts = [chr(code) for code in range(1, 0xA1)] + ["\u2028", "\u2029", "\ufeff", "\uffff", "\\u007f"]
        many = [SamplingParams(grammar=Grammar.choice([text]), max_tokens=8, temperature=0) for text in texts]
        assert [result.text for result in sibyl.generate(["Well?"] * len(many), many)] == texts

    def test_json_objects_and_lark(self, sibyl: LLM) -> None:
        sums = Grammar.lark('start: num ("+" num)~1..3 "=" num\nnum: /[0-9]{1,3}/')
        for seed in range(5):
            params = SamplingParams(seed=seed, max_tokens=60, grammar=sums)
            assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}=\d{1,3}", sibyl.generate("1+1", params).text)
        greedy = SamplingParams(temperature=0, max_tokens=80, grammar=Grammar.json_object())
        assert isinstance(json.loads(sibyl.generate("A JSON object:", greedy).text), dict)

    def test_max_tokens_cuts(self, sibyl: LLM) -> None:
        params = SamplingParams(max_tokens=3, seed=0, grammar=Grammar.regex("[a-z]{100}"))
        result = sibyl.generate("Hello", params, drafter="mtp")
        assert (result.finish_reason, len(result.token_ids)) == ("length", 3)

    def test_n_answers_have_a_state_each(self, sibyl: LLM) -> None:
        params = SamplingParams(n=6, seed=1, temperature=2.0, grammar=Grammar.regex("[a-f]{5}-[0-9]{5}"))
        texts = [choice.text for choice in sibyl.generate("Hello", params, drafter="suffix").choices]
        assert all(re.fullmatch("[a-f]{5}-[0-9]{5}", text) for text in texts)
        assert len({*texts}) == 6

    def test_the_grammar_stands_above_the_other_parameters(self, sibyl: LLM) -> None:
        assert sibyl.tokenizer is not None
        yes = {token: -math.inf for text in ("y", "ye", "yes") for token in sibyl.tokenizer.encode(text)}
        for temperature in (0.0, 1.0):
            for asked in (
                {"logit_bias": yes},
                {"min_tokens": 8},
                {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "presence_penalty": 2.0},
                {"logit_bias": {5: 100.0, 0: 100.0}},
            ):
                params = SamplingParams(
                    temperature=temperature, grammar=Grammar.choice(["yes"]), seed=3, **asked
                )
                for verifier in ("match", "traversal", "typical"):
                    result = sibyl.generate("Well?", replace(params, verifier=verifier), drafter="mtp")
                    assert (result.text, result.finish_reason) == ("yes", "stop")

    def test_min_tokens_holds_where_there_is_more_to_say(self, sibyl: LLM) -> None:
        params = SamplingParams(min_tokens=30, temperature=0, grammar=Grammar.regex("(no )*"), max_tokens=60)
        result = sibyl.generate("Well?", params, drafter="draft-model(model=sibyl)")
        assert len(result.token_ids) >= 30
        assert re.fullmatch("(no ){5,}n?o?", result.text)

    def test_a_stop_token_can_end_it(self, sibyl: LLM) -> None:
        params = SamplingParams(
            ignore_eos=True, stop_token_ids=[7], grammar=Grammar.choice(["yes"]), max_tokens=9
        )
        result = sibyl.generate("Well?", params)
        assert (result.text, result.token_ids[-1], result.finish_reason) == ("yes", 7, "stop")

    def test_compiled_once(self, sibyl: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        compiled = []
        fresh = Grammars.fresh
        monkeypatch.setattr(Grammars, "fresh", lambda *a: (compiled.append(a[1]), fresh(*a))[1])
        for _ in range(3):
            params = SamplingParams(grammar=Grammar.regex("once|twice"), n=2)
            sibyl.generate("How often?", params, drafter="mtp")
        assert len(compiled) == 1


AMBIGUOUS = Grammar.lark('start: "ab" s\ns: s s s | s s | /[a-z]/')
"""Its masks take more and more work, and its end is far away."""


class TestLimits:
    @pytest.mark.parametrize("limit", ["MAX_ITEMS", "MAX_ROW"])
    def test_an_answer_whose_masks_take_too_much_work_ends_with_the_reason(
        self, limit: str, sibyl: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each drafter and verifier gets as far. Others in the batch do not notice."""
        monkeypatch.setattr(module, limit, {"MAX_ITEMS": 1000, "MAX_ROW": 100}[limit])
        grammar = replace(AMBIGUOUS, source=AMBIGUOUS.source + " " * len(limit))  # not compiled before
        failed = sibyl.engine.recovery.num_failed
        asked = [
            SamplingParams(seed=1, max_tokens=60, grammar=grammar, temperature=0.8),
            SamplingParams(seed=1, max_tokens=9, grammar=Grammar.choice(["yes"])),
        ]
        texts = set()
        for drafter in ("none", "prompt-lookup", "draft-model(model=sibyl)"):
            ended, fine = sibyl.generate(["Hello"] * 2, asked, drafter=drafter)
            assert ended.finish_reason == "error"
            assert "make it simpler" in (ended.error or "")
            assert fine.text == "yes"
            texts.add(ended.text)
        assert len(texts) == 1
        assert texts.pop().startswith("ab")
        assert sibyl.engine.recovery.num_failed == failed, "no step was repeated"

    def test_an_answer_whose_masks_take_too_long_ends(
        self, sibyl: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MASK_SECONDS", -1.0)
        with pytest.raises(StepError, match="takes too long for a token"):
            sibyl.generate("Hello", SamplingParams(grammar=Grammar.choice(["yes", "no"])))
        assert not sibyl.engine.has_work

    def test_a_limit_at_a_draft_token_that_was_not_accepted_is_forgotten(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grammars = Grammars(byte_level(PIECES), 12)
        constraint, ends = grammars.constraint(Grammar.regex("(a|b)*")), frozenset({8})
        tree = DraftTree(0)
        tree.extend([1])
        with monkeypatch.context() as slow:
            slow.setattr(module, "MASK_SECONDS", -1.0)
            constraint.allowed(np.array([0]), tree, [1], ends)
        assert constraint.limit([0]) is None
        assert constraint.limit([1, 0]) == (1, module.TOO_SLOW)
        constraint.allowed(np.array([0, 0]), tree, [1], ends)
        assert constraint.limit([1, 0]) is None

    def test_a_first_mask_with_too_much_work_is_refused(
        self, sibyl: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_ITEMS", 20)
        wide = Grammar.lark("start: a b\na: " + " | ".join(f'"{i}" a' for i in range(99)) + ' | "x"\nb: "y"')
        with pytest.raises(RequestError, match=r"make it simpler .*limit"):
            sibyl.generate("Hello", SamplingParams(grammar=wide))

    def test_one_text_of_thousands(self, sibyl: LLM) -> None:
        texts = [f"{number} {number**5}" for number in range(5000)]
        params = SamplingParams(seed=2, grammar=Grammar.choice(texts), max_tokens=40)
        assert sibyl.generate("Which?", params).text in texts

    def test_a_name_cannot_drop_the_compiled_grammars_of_others(
        self, sibyl: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert sibyl.tokenizer is not None
        made: list[Grammar] = []
        fresh = Grammars.fresh
        monkeypatch.setattr(Grammars, "fresh", lambda *given: (made.append(given[1]), fresh(*given))[1])
        monkeypatch.setattr(module, "KEPT", 4 * module.LEAST_SIZE)
        grammars, honest = Grammars(sibyl.tokenizer, 8192), Grammar.choice(["honest"])
        in_use = grammars.constraint(Grammar.choice(["0"]), Tenant("greedy", "0"))
        grammars.constraint(honest, Tenant("other"))
        for number in range(1, 20):
            grammars.constraint(Grammar.choice([str(number)]), Tenant("greedy", str(number)))
        assert len(made) == 21
        grammars.constraint(honest, Tenant("other"))
        grammars.constraint(Grammar.choice(["0"]), Tenant("greedy", "0"))
        assert len(made) == 21, "kept, and in use"
        grammars.constraint(Grammar.choice(["2"]), Tenant("greedy", "2"))
        grammars.constraint(honest, Tenant("other", "salt"))
        assert len(made) == 23
        del in_use


VOCAB, LENGTH, SAMPLES, CHANCE, END = 5, 4, 1500, 1e-5, 4
PROMPT = [1, 3, 1, 2, 1]
PATTERN = "(a|ab|b(c|a))*b?"  # of a, b, c and ab; not all sequences, and many ways to end
LAWFUL = ["match"] + [name for name, verifier in VERIFIERS.items() if verifier.promise is Promise.LAW]


@pytest.fixture(scope="module")
def small(tiny: Make) -> list[Transformer]:
    """The target and another one, unsure of themselves."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    made = [tiny(seed, vocab_size=VOCAB, **sizes) for seed in (1, 2)]
    for model in made:
        model.head.weight.mul_(0.4)
    return made


class TestLaw:
    """Each answer occurs at the rate of its p: the model's distribution over the allowed tokens."""

    TEXTS = ("a", "b", "c", "ab", "")

    def may(self, said: Sequence[int], token: int) -> bool:
        """Whether some word of the language goes on like this, by trying all of what could follow."""
        text = "".join(self.TEXTS[t] for t in said)
        if token == END:
            return re.fullmatch(PATTERN, text) is not None
        text += self.TEXTS[token]
        return any(
            re.fullmatch(PATTERN, text + "".join(rest))
            for count in range(3)
            for rest in product("abc", repeat=count)
        )

    def law(self, model: Transformer) -> dict[tuple[int, ...], float]:
        answers: dict[tuple[int, ...], float] = {}
        open_: dict[tuple[int, ...], float] = {(): 1.0}
        while open_:
            said, chance = open_.popitem()
            batch = Batch.pack([Rows(np.array([*PROMPT, *said]), 0)], group=model.spec.group)
            logits = model.logits(model(batch)[0]).double()[-1]
            weights = [math.exp(x) * self.may(said, t) for t, x in enumerate(logits.tolist())]
            for token, weight in enumerate(weights):
                if weight:
                    longer = (*said, token)
                    done = token == END or len(longer) == LENGTH
                    (answers if done else open_)[longer] = chance * weight / sum(weights)
        assert sum(answers.values()) == pytest.approx(1)
        return answers

    @pytest.mark.parametrize("verifier", LAWFUL)
    def test_answers_come_as_often_as_they_should(self, verifier: str, small: list[Transformer]) -> None:
        target, other = small
        llm = LLM(
            target,
            tokenizer=byte_level(self.TEXTS[:4]),
            drafter="none",
            kv_tokens=8192,
            max_requests=256,
            max_rows=4096,
        )
        params = SamplingParams(
            max_tokens=LENGTH,
            stop_token_ids=[END],
            verifier=verifier,
            grammar=Grammar.regex(PATTERN),
        )
        drafters: list[DrafterSpec] = [
            "none",
            "prompt-lookup(min_ngram=1)",
            lambda target: DraftModel(target, model=other, depth=3),
            lambda target: DraftModel(target, model=other, depth=3, width=2, branch=3),
        ]
        results = llm.generate(
            [PROMPT] * SAMPLES,
            [replace(params, seed=seed) for seed in range(SAMPLES)],
            drafter=[drafters[seed % 4] for seed in range(SAMPLES)],
        )
        assert 0.02 < sum(r.stats.accepted for r in results) / sum(r.stats.drafted for r in results) < 0.9
        counts, law = Counter(tuple(result.token_ids) for result in results), self.law(target)
        assert counts.keys() <= law.keys()
        common = {said: p for said, p in law.items() if p * SAMPLES >= 8}
        assert len(common) > 10
        observed = [counts[said] for said in common]
        expected = [p * SAMPLES for p in common.values()]
        rest = SAMPLES - sum(expected)
        if rest > 1:
            observed, expected = [*observed, SAMPLES - sum(observed)], [*expected, rest]
        assert stats.chisquare(observed, np.array(expected) / sum(expected) * SAMPLES).pvalue > CHANCE


def said_by(llm: LLM, grammar: Grammar) -> Callable[[str], bool]:
    """Whether a grammar accepts a text."""
    assert llm.tokenizer is not None
    tokenizer, matcher = llm.tokenizer, Grammars(llm.tokenizer, 8192).fresh(grammar)
    assert not matcher.is_error(), matcher.get_error()

    def accepts(text: str) -> bool:
        one, ids = matcher.deep_copy(), tokenizer.encode(text, special=False)
        return bool(one.try_consume_tokens(ids) == len(ids) and one.is_accepting())

    return accepts


class TestFormats:
    """JSON Schema 2020-12, 7.2.3: a format that is not known is an annotation."""

    @pytest.mark.parametrize("kind", ["path", "binary", "password", "uri-reference", "int64", "", "x" * 99])
    def test_unknown_ones_have_no_effect(self, sibyl: LLM, kind: str) -> None:
        odd = {"type": "string", "format": kind}
        either = [{"$ref": "#/$defs/format"}, {"type": "array", "items": odd}]
        places: dict[str, dict[str, Any]] = {
            '"?"': odd,
            '{"format": "?"}': {"type": "object", "properties": {"format": odd}, "required": ["format"]},
            '["?"]': {"$defs": {"format": odd}, "anyOf": either},
            '{"p": "?"}': {"type": "object", "additionalProperties": odd, "patternProperties": {"^p": odd}},
            '[ "?"]': {"type": "array", "prefixItems": [odd], "items": False},
        }
        for text, schema in places.items():
            assert said_by(sibyl, Grammar.json_schema(schema))(text), schema

    @pytest.mark.parametrize("kind", sorted(FORMATS))
    def test_known_ones_are_enforced(self, sibyl: LLM, kind: str) -> None:
        assert not said_by(sibyl, Grammar.json_schema({"type": "string", "format": kind}))('"?"')

    def test_the_list_is_that_of_the_library(self) -> None:
        for kind in ("iri", "regex", "json-pointer", "uri-template", "idn-email", "iri-reference", "byte"):
            schema = {"json_schema": {"type": "string", "format": kind}}
            assert LLMatcher.validate_grammar(json.dumps({"grammars": [schema]}))

    def test_data_stays_as_it_is(self, sibyl: LLM) -> None:
        data = {"format": "phone", "properties": {"format": "phone"}}
        for schema in ({"const": data}, {"enum": [data]}, {"properties": {"const": {"const": data}}}):
            written = json.loads(Grammar.json_schema(schema).source)["json_schema"]
            assert {**written, "x-guidance": None} == {**schema, "x-guidance": None}
        assert said_by(sibyl, Grammar.json_schema({"const": data}))(json.dumps(data))


class TestJoined:
    def test_texts_of_parts_are_put_together(self, sibyl: LLM) -> None:
        parts = {"a": Grammar.choice(["yes", "no"]), "b": Grammar.json_schema({"const": 1})}
        accepts = said_by(sibyl, Grammar.joined('start: "<" @a ">" @b | @b', **parts))
        assert [*map(accepts, ["<yes>1", "1", "<no>1", "yes", "<yes>", "<1>1"])] == [True] * 3 + [False] * 3

    def test_another_one_is_there_if_one_cannot_be_compiled(self, sibyl: LLM) -> None:
        good, bad = Grammar.choice(["good"]), Grammar.json_schema({"uniqueItems": True})
        for grammar in (bad.or_else(good), Grammar.joined("start: @one", one=bad.or_else(good))):
            assert said_by(sibyl, grammar)("good")
            assert sibyl.generate("Hi", SamplingParams(grammar=grammar)).text == "good"
        assert not said_by(sibyl, good.or_else(Grammar.choice(["other"])))("other")
        with pytest.raises(RequestError, match="uniqueItems"):
            sibyl.generate("Hi", SamplingParams(grammar=Grammar.joined("start: @one", one=bad)))

    def test_special_tokens_are_named_by_their_ids(self) -> None:
        special = {"<|a|>": 5, "<|a": 6, "[B]": 7, "": 8}
        assert spelled('<|a|>x"[B]<|a', special) == '<[5]> "x\\"" <[7]> <[6]>'
        assert (spelled("plain", special), spelled("<|a|>", {})) == ('"plain"', '"<|a|>"')


class TestRefused:
    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: Grammar.regex("(a"), "cannot be compiled: .*unclosed group"),
            (lambda: Grammar.regex("(?=a)b"), "cannot be compiled"),
            (lambda: Grammar.json_schema({"type": "foo"}), "cannot be compiled: .*foo"),
            (lambda: Grammar.json_schema({"type": "object", "if": {}}), "cannot be compiled: .*if"),
            (lambda: Grammar.lark("start: nobody"), "cannot be compiled: .*nobody"),
            (lambda: Grammar.lark("start: <|nobody|>"), "cannot be compiled: .*nobody"),
            (lambda: Grammar.lark(""), "cannot be compiled"),
            (lambda: Grammar.regex("[^\\x00-\\x{10FFFF}]"), "no answer can begin"),
            (lambda: Grammar.json_schema("{"), "JSON schema is not possible"),
            (lambda: Grammar.json_schema("[1]"), "must be an object"),
            (lambda: Grammar.json_schema({"const": math.nan}), "JSON schema is not possible"),
            (lambda: Grammar.json_schema({"const": object()}), "JSON schema is not possible"),
            (lambda: Grammar.json_schema("[" * 100_000), "JSON schema is not possible"),
            (lambda: Grammar.choice([]), "one text or more"),
            (lambda: Grammar.choice("yes"), "in a list"),
            (lambda: Grammar.choice([1]), "must be text"),  # type: ignore[list-item]
            (lambda: Grammar.regex("\ud800"), "half a character"),
            (lambda: Grammar.regex(5), "must be text"),  # type: ignore[arg-type]
            (lambda: Grammar.lark("a" * MAX_SOURCE), "make it shorter"),
            (lambda: Grammar.lark("start: a\n" + '\t a: "b"\n' * MAX_RULES), "has 1001 rules"),
            (lambda: "yes|no", "make one, such as"),
        ],
    )
    def test_with_a_reason(self, make: Callable[[], Grammar], says: str, sibyl: LLM) -> None:
        with pytest.raises(RequestError, match=f"(?s){says}"):
            sibyl.generate("Hello", SamplingParams(grammar=make()))
        assert not sibyl.engine.has_work

    def test_others_in_the_batch_are_not_disturbed(self, sibyl: LLM) -> None:
        asked = [SamplingParams(grammar=Grammar.regex(text), max_tokens=9) for text in ("(", "yes")]
        refused, fine = sibyl.generate(["Hello"] * 2, asked)
        assert refused.finish_reason == "error"
        assert "unclosed" in (refused.error or "")
        assert fine.text == "yes"

    def test_without_an_end_token(self, sibyl: LLM) -> None:
        with pytest.raises(RequestError, match="leave out ignore_eos"):
            sibyl.generate("Hello", SamplingParams(grammar=Grammar.json_object(), ignore_eos=True))

    def test_without_a_tokenizer(self, tiny: Make) -> None:
        llm = LLM(tiny(), drafter="none", kv_tokens=64)
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate(
                [1, 2], SamplingParams(grammar=Grammar.json_object(), stop_token_ids=[3], max_tokens=5)
            )

    def test_with_a_tokenizer_whose_bytes_nobody_knows(self, tiny: Make) -> None:
        tokenizer = Tokenizer(Backend(models.WordLevel({"?": 0, "one": 1}, unk_token="?")))
        llm = LLM(tiny(), tokenizer=tokenizer, drafter="none", kv_tokens=64)
        with pytest.raises(RequestError, match="byte-level"):
            llm.generate(
                [1, 2], SamplingParams(grammar=Grammar.json_object(), stop_token_ids=[3], max_tokens=5)
            )

    def test_what_the_tokenizer_cannot_say(self, tiny: Make) -> None:
        """At once if it is how all answers begin; later on, the answer ends."""
        llm = LLM(tiny(), tokenizer=byte_level(["a", "b"]), drafter="none", kv_tokens=64)
        params = SamplingParams(stop_token_ids=[3], max_tokens=20)
        with pytest.raises(RequestError, match="has tokens for"):
            llm.generate([1, 0], replace(params, grammar=Grammar.regex("[x-z]a")))
        for drafter in ("none", "prompt-lookup(min_ngram=1)"):
            result = llm.generate([1, 0], replace(params, grammar=Grammar.regex("abx")), drafter=drafter)
            assert result.token_ids == [0, 1, 3]
            assert result.finish_reason == "stop"


def test_a_request_that_is_preempted_goes_on_where_it_was(sibyl: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, grammar=Grammar.json_schema(PERSON))
    free = SamplingParams(max_tokens=40)
    asked = [replace(params if seed % 2 else free, seed=seed) for seed in range(8)]
    prompts = [sibyl.chat_prompt([{"role": "user", "content": f"Who is number {i}?"}]) for i in range(8)]
    alone = [sibyl.generate(prompt, own) for prompt, own in zip(prompts, asked, strict=True)]
    tight = LLM("sibyl", dtype="float32", drafter="none", kv_tokens=160, block_size=8)
    requests: list[Request] = []
    add = tight.engine.add
    tight.engine.add = lambda request: (requests.append(request), add(request))[1]  # type: ignore[method-assign]
    drafters = ["mtp", "prompt-lookup", "draft-model(model=sibyl)"]
    results = tight.generate(prompts, asked, drafter=[drafters[i % 3] for i in range(8)])
    assert [result.token_ids for result in results] == [result.token_ids for result in alone]
    assert sum(request.num_preemptions for request in requests if request.constraint) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.json_schema("[" + "[]," * MAX_SOURCE + "1]"),
        lambda: Grammar.regex("a" * (MAX_SOURCE + 1)),
        lambda: Grammar.choice(["a" * 100] * (MAX_SOURCE // 100 + 1)),
        lambda: Grammar.lark("start: " + '"a" ' * MAX_SOURCE),
    ],
    ids=["schema", "regex", "choice", "lark"],
)
def test_texts_of_large_grammars_are_not_read(
    make: Callable[[], Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(*_: object) -> None:
        raise AssertionError("it was read")

    for name in ("regex_to_lark", "quoted", "RULE"):
        monkeypatch.setattr(f"soothsay.core.grammar.{name}", reading)
    monkeypatch.setattr(json, "loads", reading)
    with pytest.raises(RequestError, match=r"^the grammar has \d+ characters; \d+ are possible"):
        make()


class Counted(dict[str, Any]):
    """Counts how often it is written as JSON."""

    written = 0

    def items(self) -> Any:
        self.written += 1
        return super().items()


def test_a_schema_is_written_up_to_the_limit() -> None:
    part = Counted({"const": "x" * (MAX_SOURCE // 10)})
    with pytest.raises(RequestError, match="characters"):
        Grammar.json_schema({"anyOf": [part] * 4000})
    assert 0 < part.written < 20
    assert json.loads(bounded_json({"a": [part] * 9})) == {"a": [{**part}] * 9}


def test_values_are_counted_before_they_are_looked_at() -> None:
    class Endless(list[int]):
        def __len__(self) -> int:
            return 10**9

        def __iter__(self) -> Any:
            raise AssertionError("it was looked at")

    with pytest.raises(RequestError, match="more than 50000 values"):
        Grammar.json_schema({"enum": Endless()})
