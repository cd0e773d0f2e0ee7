"""A draft model with another tokenizer: what it reads, what it says, and that nothing else changes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from soothsay import LLM, DrafterError, DraftTree, SamplingParams, Target, Tokenizer
from soothsay.core.batch import Batch, Rows
from soothsay.core.request import Request
from soothsay.drafters.models.draft_model import DraftModel
from soothsay.drafters.models.translation import TokenBytes, Translation
from soothsay.drafters.models.universal import DraftView, UniversalDraftModel, written_chain
from soothsay.drafters.registry import build_drafter
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint

Make = Callable[..., Transformer]

pytestmark = pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")  # of random models

ENGLISH = (
    "The river rises in the hills north of the town and flows through farmland. In spring the river floods "
    "the low meadows, and the farmers move their cattle to higher ground. I'll tell you: it's 1871!\n"
)
GERMAN = (
    "Der Fluss entspringt in den Hügeln nördlich der Stadt. Ein Mann steht auf einer Leiter und repariert "
    "das Dach. \n\nthe meadows and the hills, the river and the town; naïve café 東京\n"
)
SPECIAL = ("<|end|>", "<|user|>")


def byte_level(text: str, size: int, special: Sequence[str] = SPECIAL, **options: Any) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text] * 3, trainer)
    return backend


def normalized() -> Backend:
    backend = byte_level(GERMAN, 330)
    backend.normalizer = normalizers.NFC()
    return backend


def sentencepiece() -> Backend:
    """Make a backend that adds a first token and a leading space, and spells unknown text in bytes."""
    words = ["▁", "t", "h", "e", "▁t", "▁th", "▁the", "r", "i", "v", "er", "▁river", "s", "in", "A", "🦊"]
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Backend(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("▁", "t"), ("▁t", "h"), ("▁th", "e")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    replace_space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace_space])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<unk>", normalized=False), AddedToken("<s>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "english": lambda: byte_level(ENGLISH, 400),
    "german": lambda: byte_level(GERMAN, 340),
    "with a space in front": lambda: byte_level(ENGLISH, 330, add_prefix_space=True),
    "normalized": normalized,
    "sentencepiece": sentencepiece,
}


@pytest.fixture(scope="module")
def made() -> dict[str, Tokenizer]:
    return {name: Tokenizer(make()) for name, make in KINDS.items()}


TEXTS = [
    ENGLISH,
    GERMAN,
    "",
    " ",
    "a",
    "  the\n\n\n river",
    "🦊 the <|user|>café<|end|>",
    "e\u0301 NFD",
    "\u2581",
]


class TestPieces:
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_writes_any_bytes(self, kind: str, made: dict[str, Tokenizer]) -> None:
        pieces, rng = TokenBytes(made[kind]), np.random.default_rng(0)
        for text in TEXTS:
            said = text.encode()
            assert pieces.join(pieces.encode(said)) == said
            for _ in range(20):
                begin, end = sorted(rng.integers(0, len(said) + 1, 2))
                assert pieces.join(pieces.encode(said[begin:end])) == said[begin:end]
        for _ in range(50):
            said = rng.bytes(int(rng.integers(1, 30)))
            assert pieces.join(pieces.encode(said)) == said

    @pytest.mark.parametrize("kind", ["english", "german"])
    def test_it_cuts_text_as_the_tokenizer_does(self, kind: str, made: dict[str, Tokenizer]) -> None:
        pieces = TokenBytes(made[kind])
        for text in TEXTS:
            assert pieces.encode(text.encode()) == made[kind].encode(text)
            assert pieces.is_usual(made[kind].encode(text))

    @pytest.mark.parametrize("kind", ["with a space in front", "sentencepiece"])
    def test_no_space_is_put_in_front(self, kind: str, made: dict[str, Tokenizer]) -> None:
        pieces = TokenBytes(made[kind])
        with_space = made[kind].encode("the the", special=False)
        assert pieces.join(with_space) == b" the the"
        assert pieces.encode(b" the the") == with_space
        assert pieces.encode(b"the the")[-1:] == with_space[-1:], "only the first word is cut in another way"
        assert pieces.join(pieces.encode(b"the the")) == b"the the"

    def test_but_for_the_first_word_it_is_cut_as_the_tokenizer_does(self) -> None:
        """Which need not be the longest tokens: here b and c come together before a and b could."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: i for i, token in enumerate([*alphabet, "bc", "ab"])}
        backend = Backend(models.BPE(vocabulary, [("b", "c"), ("a", "b")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        pieces = TokenBytes(Tokenizer(backend))
        assert [pieces.bytes[token] for token in pieces.encode(b"abc abc")] == [
            b"a",
            b"bc",
            b" ",
            b"a",
            b"bc",
        ]
        assert [pieces.bytes[token] for token in pieces.spell(b"abc")] == [b"ab", b"c"]

    def test_other_ways_to_cut_are_not_usual(self, made: dict[str, Tokenizer]) -> None:
        pieces = TokenBytes(made["english"])
        letters = [pieces.ids[bytes([byte])] for byte in b" the"]
        assert len(pieces.encode(b" the")) == 1
        assert not pieces.is_usual(letters)
        assert pieces.is_usual([])
        fox = pieces.encode("🦊 the".encode())
        assert pieces.is_usual(fox[1:]), "the rest of a character does not count"

    def test_special_tokens_are_no_text(self, made: dict[str, Tokenizer]) -> None:
        pieces = TokenBytes(made["english"])
        assert pieces.special.keys() == {b"<|end|>", b"<|user|>"}
        assert not pieces.special.keys() & pieces.ids.keys()
        assert pieces.token(b"<|end|>", special=True) is not None
        assert pieces.token(b"<|end|>", special=False) is None

    def test_what_goes_before_a_text(self, made: dict[str, Tokenizer]) -> None:
        assert [TokenBytes(made[kind]).first for kind in ("english", "sentencepiece")] == [[], [1]]

    def test_a_byte_that_is_a_token_too_is_written_as_that(self, made: dict[str, Tokenizer]) -> None:
        assert TokenBytes(made["sentencepiece"]).ids[b"A"] == 2 + 256 + 14

    def test_a_tokenizer_without_bytes_is_refused(self) -> None:
        with pytest.raises(DrafterError, match="has no tokens for single bytes"):
            TokenBytes(Tokenizer(Backend(models.WordLevel({"?": 0, "one": 1}, unk_token="?"))))


LACKING = {"\u0104": 0x04, "\u011f": 0x1F, "\xc0": 0xC0, "\xc1": 0xC1, "\xf1": 0xF1, "\xff": 0xFF}
"""Bytes without a token, as SmolLM2's vocabulary has some, by the characters that stand for it."""


def lacking(text: str = ENGLISH) -> Tokenizer:
    """Make a byte-level tokenizer without tokens for some bytes."""
    written = json.loads(byte_level(text, 400).to_str())
    kept = [token for token in written["model"]["vocab"] if token not in LACKING]
    renumbered = {token: number for number, token in enumerate(kept)}
    for added in written["added_tokens"]:
        added["id"] = renumbered[added["content"]]
    written["model"]["vocab"] = renumbered
    return Tokenizer(Backend.from_str(json.dumps(written)))


class TestBytesWithoutATokens:
    def test_they_are_left_out_of_what_is_written(self) -> None:
        pieces, rng = TokenBytes(lacking()), np.random.default_rng(0)
        for text in TEXTS:
            said = text.encode()
            assert pieces.join(pieces.encode(said)) == said
        for said in [b"\x04", b"the \x04river\xff", *(rng.bytes(20) for _ in range(50))]:
            assert pieces.join(pieces.encode(said)) == said.translate(None, bytes(LACKING.values()))
        assert pieces.encode(b"the river\x04 and") == pieces.encode(b"the river and")
        assert pieces.spell(b"\xff\xffa") == pieces.spell(b"a")

    def test_a_token_that_begins_with_one_stands_for_nothing(self, made: dict[str, Tokenizer]) -> None:
        translation = Translation(made["english"], lacking())
        for byte in LACKING.values():
            assert translation.stands_for[translation.draft.ids[bytes([byte])]] == -1
        known = [number for number in translation.stands_for if number >= 0]
        assert len(known) > len(translation.draft.ids) - 2 * len(LACKING)

    @pytest.mark.parametrize("lacks", ["draft", "target"])
    def test_texts_with_them_are_drafted_for(
        self, lacks: str, tiny: Make, made: dict[str, Tokenizer]
    ) -> None:
        few, all_ = lacking(GERMAN), made["english"]
        own, tokenizer = (few, all_) if lacks == "draft" else (all_, few)
        target = tiny(0, vocab_size=len(tokenizer))
        llm = LLM(target, tokenizer=tokenizer, drafter="none", kv_tokens=2048)
        translation = Translation(own, tokenizer)
        drafter = universal(tiny(0, vocab_size=len(own)), translation)(llm.engine.target)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for text in (ENGLISH, "\x04", "the \x04\x1f river", f"{GERMAN}\x1f"):
            prompt = tokenizer.encode(text) or [5]
            drafted = llm.generate(prompt, params, drafter=drafter)
            assert drafted.token_ids == llm.generate(prompt, params).token_ids
            assert drafted.stats.drafted > 0


class TestTranslation:
    def test_what_a_token_stands_for(self, made: dict[str, Tokenizer]) -> None:
        translation = Translation(made["german"], made["english"])
        draft, target = translation.draft, translation.target
        shared = 0
        for number, stands_for in enumerate(translation.stands_for):
            says = draft.bytes[number]
            assert target.bytes[stands_for] == says[: len(target.bytes[stands_for])] != b""
            if says in target.bytes:
                assert target.bytes[stands_for] == says
                shared += 1
            elif says.decode(errors="ignore").encode() == says:
                assert stands_for == made["english"].encode(says.decode())[0]
        assert 256 < shared < len(draft.bytes)

    def test_special_tokens_stand_for_their_likes_alone(self, made: dict[str, Tokenizer]) -> None:
        other = Tokenizer(byte_level(GERMAN, 340, special=["<|eot|>", "<|user|>"]))
        translation = Translation(other, made["english"])
        target = translation.target
        assert translation.stands_for[:2] == [-1, target.special[b"<|user|>"]]
        assert translation.write([1]) == [target.special[b"<|user|>"]]

    def test_what_was_cut_in_the_usual_way_is_so_again(self, made: dict[str, Tokenizer]) -> None:
        translation = Translation(made["german"], made["english"])
        draft, target = translation.draft, translation.target
        assert translation.write(draft.encode(b" the river")) == target.encode(b" the river")
        letters = [draft.ids[bytes([byte])] for byte in b" the river"]
        assert translation.write(letters) == [target.ids[bytes([byte])] for byte in b" the river"]
        own, before = draft.encode(b" the riv"), target.encode(b" the riv")
        assert translation.read(own, before, [target.ids[b"x"]]) == draft.encode(b" the rivx")
        # the target does not say " ri" and "ver" where it means " river"
        assert translation.read(own, before, target.encode(b"er")) == [*own, *draft.encode(b"er")]


@dataclass
class Growing:
    """A request of which nothing but its tokens matters."""

    tokens: np.ndarray

    __hash__ = object.__hash__


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(
    ("kind", "other"), [("german", "english"), ("english", "german"), ("english", "bundled")]
)
def test_a_text_that_grows_is_read_as_the_draft_models_tokenizer_cuts_it(
    kind: str, other: str, step: int, made: dict[str, Tokenizer], tiny: Make, sibyl: LLM
) -> None:
    assert sibyl.tokenizer is not None
    tokenizer = sibyl.tokenizer if other == "bundled" else made[other]
    text = f"{ENGLISH} 🦊🦊🦊 naïve 東京 {GERMAN}"
    drafter = UniversalDraftModel(
        sibyl.engine.target, tiny(0, vocab_size=len(made[kind])), Translation(made[kind], tokenizer)
    )
    ids = np.array(tokenizer.encode(text))
    request = Growing(ids[:1])
    for end in [*range(1, len(ids), step), len(ids)]:
        request.tokens = ids[:end]
        view = drafter.view_of(request)  # type: ignore[arg-type]
    assert view.tokens == made[kind].encode(text)


def test_what_goes_before_a_text_goes_there_once(made: dict[str, Tokenizer], tiny: Make, sibyl: LLM) -> None:
    own = made["sentencepiece"]
    for tokenizer in (own, made["english"]):
        drafter = UniversalDraftModel(
            sibyl.engine.target, tiny(0, vocab_size=len(own)), Translation(own, tokenizer)
        )
        view = drafter.view_of(Growing(np.array(tokenizer.encode(" the"))))  # type: ignore[arg-type]
        assert view.tokens.count(1) == 1
        assert view.tokens[0] == 1


class Cut(UniversalDraftModel):
    """Has but one of its guesses checked."""

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        return [tree.prune(2, 1) for tree in super().propose(requests)]


def test_tokens_that_it_has_run_already_may_come_as_the_targets_own(
    made: dict[str, Tokenizer], tiny: Make
) -> None:
    """After the first draft token, the target also says the second one."""
    tokenizer = made["english"]
    target = tiny(0, vocab_size=len(tokenizer))
    llm = LLM(target, tokenizer=tokenizer, drafter="none", kv_tokens=512)
    drafter = universal(target, Translation(tokenizer, tokenizer), Cut)(llm.engine.target)
    params = SamplingParams(temperature=0, max_tokens=40)
    drafted = llm.generate(ENGLISH[:40], params, drafter=drafter)
    assert drafted.token_ids == llm.generate(ENGLISH[:40], params).token_ids
    assert drafted.stats.acceptance == [1.0]


def universal(
    draft: Transformer, translation: Translation, kind: type[UniversalDraftModel] = UniversalDraftModel
) -> Callable[[Target], UniversalDraftModel]:
    return lambda target: kind(target, draft, translation)


class Watched(UniversalDraftModel):
    """Is asked for guesses in two of three steps only. What it reads and computes is looked at."""

    asked = written = 0
    most_run = 0

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        self.asked += 1
        if self.asked % 3 == 0:
            return [DraftTree(int(request.tokens[-1])) for request in requests]
        trees = super().propose(requests)
        draft, target = self.translation.draft, self.translation.target
        for request, tree in zip(requests, trees, strict=True):
            assert len(tree) <= self.max_nodes
            view = self.views.get(request)
            if view is None or view.read < len(request.tokens):
                assert len(tree) == 1
                continue
            text = target.join(request.tokens.tolist())
            assert draft.join(view.tokens[len(draft.first) : view.committed]) == text
            assert view.tokens[: len(draft.first)] == draft.first
            guessed = draft.join(view.tokens[view.committed :])
            said = target.join(tree.tokens[1:])
            assert said == guessed[: len(said)]
            assert said == guessed or len(tree) == self.max_nodes
            self.written += len(said) > 0
        return trees

    def run(self, views: Sequence[DraftView]) -> Tensor:
        self.most_run = max(self.most_run, max(len(view.tokens) - view.cached for view in views))
        logits = super().run(views)
        rows = [Rows(np.array(v.tokens), 0, None, DraftTree(v.tokens[-1])) for v in views]
        batch = Batch.pack(rows, group=self.model.spec.group, windows=self.model.spec.windows)
        alone = self.model.logits(self.model(batch)[0][batch.logit_rows])
        assert torch.allclose(logits, alone, atol=1e-3), "as in a pass without a cache"
        return logits


STRESSES: dict[str, dict[str, Any]] = {
    "at ease": {},
    "preempted": {"kv_tokens": 120, "block_size": 8},
    "in small chunks": {"max_rows": 11, "block_size": 4},
    "with a tree cut short": {"max_tree": 3},
}
MANY = [
    SamplingParams(max_tokens=20, temperature=0.9, seed=1),
    SamplingParams(max_tokens=20, temperature=0),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=3),
] * 2


@pytest.mark.parametrize("stress", STRESSES)
@pytest.mark.parametrize("kind", ["german", "normalized", "sentencepiece"])
def test_tokens_are_those_of_plain_decoding(
    stress: str, kind: str, made: dict[str, Tokenizer], tiny: Make
) -> None:
    """Random models say anything, broken characters and unusual cuts too."""
    tokenizer, own = made["english"], made[kind]
    target, draft = tiny(0, vocab_size=len(tokenizer)), tiny(1, vocab_size=len(own))
    prompts = [
        tokenizer.encode(text) for text in ("The river", GERMAN[:70], "🦊", ENGLISH[:90], " ", "<|user|>")
    ]
    plain = LLM(target, tokenizer=tokenizer, drafter="none", kv_tokens=4096).generate(prompts, MANY)
    llm = LLM(target, tokenizer=tokenizer, drafter="none", **{"kv_tokens": 4096, **STRESSES[stress]})
    drafter = universal(draft, Translation(own, tokenizer), Watched)(llm.engine.target)
    assert isinstance(drafter, Watched)
    requests: list[Request] = []
    add = llm.engine.add
    llm.engine.add = lambda request: (requests.append(request), add(request))[1]  # type: ignore[method-assign]
    for _ in range(2):
        results = llm.generate(prompts, MANY, drafter=drafter)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert drafter.written > 20
    assert drafter.most_run > 20
    assert (stress == "preempted") == (sum(request.num_preemptions for request in requests) > 0)
    assert drafter.allocator.num_free == drafter.allocator.num_blocks
    assert not drafter.views


class Scripted(UniversalDraftModel):
    """Knows the text."""

    text = b""

    def run(self, views: Sequence[DraftView]) -> Tensor:
        draft = self.translation.draft
        logits = torch.full((len(views), self.model.spec.vocab_size), -1e9)
        for row, view in enumerate(views):
            said = draft.join(view.tokens)
            assert self.text.startswith(said)
            (next_token, *_), view.cached = draft.encode(self.text[len(said) :]), len(view.tokens)
            logits[row, next_token] = 0.0
        return logits


@pytest.mark.parametrize(("kind", "least"), [("english", 1.5), ("german", 1.4), ("bundled", 4.9)])
def test_whoever_knows_the_text_is_right(
    kind: str, least: float, made: dict[str, Tokenizer], tiny: Make, sibyl: LLM
) -> None:
    """Short tokens against long ones: four of them seldom make more than a word."""
    assert sibyl.tokenizer is not None
    own = sibyl.tokenizer if kind == "bundled" else made[kind]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain = sibyl.generate(ENGLISH, params)
    translation = Translation(own, sibyl.tokenizer)
    drafter = Scripted(sibyl.engine.target, tiny(0, vocab_size=len(own)), translation)
    drafter.text = translation.target.join(plain.prompt_token_ids + plain.token_ids) + b" and so on." * 9
    drafted = sibyl.generate(ENGLISH, params, drafter=drafter)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.mean_accepted > least


def test_a_chain_is_as_likely_as_the_guesses_that_it_is_made_of(
    made: dict[str, Tokenizer], tiny: Make, sibyl: LLM
) -> None:
    own, tokenizer = made["german"], made["english"]
    translation = Translation(own, tokenizer)
    llm = LLM(tiny(0, vocab_size=len(tokenizer)), tokenizer=tokenizer, drafter="none", kv_tokens=64)
    drafter = universal(tiny(1, vocab_size=len(own)), translation)(llm.engine.target)
    draft, target = translation.draft, translation.target
    guesses = draft.encode(b" farmland. In spring")
    steps = [(len(draft.bytes[token]), -float(i + 1)) for i, token in enumerate(guesses)]
    tree = written_chain(translation, 5, guesses, [log_prob for _, log_prob in steps], drafter.max_nodes)
    expected = target.encode(b" farmland. In spring")[: drafter.max_nodes - 1]
    assert tree.tokens == [5, *expected]
    assert tree.parents == list(range(-1, len(expected)))
    end = 0
    for node, token in enumerate(expected, 1):
        end += len(target.bytes[token])
        begins = np.cumsum([0, *(size for size, _ in steps)])
        assert tree.scores[node] == sum(
            p for begin, (_, p) in zip(begins, steps, strict=False) if begin < end
        )


def test_probabilities_add_up_to_those_of_the_targets_tokens(made: dict[str, Tokenizer], tiny: Make) -> None:
    own, tokenizer = Tokenizer(byte_level(GERMAN, 340, special=["<|eot|>"])), made["english"]
    translation = Translation(own, tokenizer)
    small = len(tokenizer) - 5  # a model with fewer tokens than its tokenizer
    llm = LLM(tiny(0, vocab_size=small), tokenizer=tokenizer, drafter="none", kv_tokens=64)
    drafter = universal(tiny(1, vocab_size=len(own) + 7), translation)(llm.engine.target)
    logits = torch.randn(3, len(own) + 7)
    expected = torch.zeros(3, small)
    for number, stands_for in enumerate(translation.stands_for):
        if 0 <= stands_for < small:
            expected[:, stands_for] += logits.softmax(-1)[:, number]
    assert torch.allclose(drafter.project(logits).exp(), expected, atol=1e-6)
    assert (expected == 0).any()


def test_without_room_it_guesses_nothing(made: dict[str, Tokenizer], tiny: Make) -> None:
    """Long words of the target's are many tokens of the draft model's."""
    tokenizer, own = made["english"], made["german"]
    target = tiny(0, vocab_size=len(tokenizer))
    prompt = tokenizer.encode(ENGLISH)
    assert len(prompt) < 80 < len(own.encode(ENGLISH))
    params = SamplingParams(temperature=0, max_tokens=8)
    for engine, context in (({"kv_tokens": 80, "block_size": 8}, 512), ({"kv_tokens": 512}, 80)):
        llm = LLM(target, tokenizer=tokenizer, drafter="none", **engine)
        draft = tiny(1, vocab_size=len(own), max_positions=context)
        drafter = universal(draft, Translation(own, tokenizer))(llm.engine.target)
        drafted = llm.generate(prompt, params, drafter=drafter)
        assert drafted.token_ids == llm.generate(prompt, params).token_ids
        assert drafted.stats.drafted == 0
        assert llm.generate(prompt[:20], params, drafter=drafter).stats.drafted > 0


def test_nothing_is_guessed_below_an_end_token(made: dict[str, Tokenizer], tiny: Make) -> None:
    tokenizer = made["english"]
    llm = LLM(tiny(0, vocab_size=len(tokenizer)), tokenizer=tokenizer, drafter="none", kv_tokens=512)
    drafter = universal(tiny(0, vocab_size=len(tokenizer)), Translation(tokenizer, tokenizer))(
        llm.engine.target
    )
    trees: list[DraftTree] = []
    propose = drafter.propose
    drafter.propose = lambda requests: trees.extend(made := propose(requests)) or made  # type: ignore[method-assign]
    ends = range(0, len(tokenizer), 3)
    for seed in range(6):
        params = SamplingParams(max_tokens=20, seed=seed, stop_token_ids=list(ends))
        llm.generate([seed + 3, 1], params, drafter=drafter)
    reached = [(tree, node) for tree in trees for node in range(1, len(tree)) if tree.tokens[node] in ends]
    assert reached
    assert all(node == len(tree) - 1 for tree, node in reached)


@pytest.fixture(scope="module")
def permuted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with other numbers for its tokens."""
    source = open_checkpoint("sibyl").path
    path = tmp_path_factory.mktemp("permuted") / "sibyl"
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("drafters"))
    raw = json.loads((source / "tokenizer.json").read_text())
    order = list(range(8192))
    random.Random(0).shuffle(order)  # from a token's number to its new one
    raw["model"]["vocab"] = {token: order[number] for token, number in raw["model"]["vocab"].items()}
    for token in raw["added_tokens"]:
        token["id"] = order[token["id"]]
    raw["added_tokens"].sort(key=lambda token: token["id"])
    (path / "tokenizer.json").write_text(json.dumps(raw))
    weights = load_file(source / "model.safetensors")
    rows = torch.empty(8192, dtype=torch.int64)
    rows[torch.tensor(order)] = torch.arange(8192)
    changed = {name: weight[rows] for name, weight in weights.items() if len(weight) == 8192}
    assert changed
    save_file({**weights, **changed}, path / "model.safetensors", metadata={"format": "pt"})
    return path


class TestTheSameModelWithOtherNumbers:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_it_is_right_nearly_always(self, temperature: float, permuted: Path, sibyl: LLM) -> None:
        """Sampled text may have an unusual tokenization. The draft model reads the same tokens."""
        params = SamplingParams(temperature=temperature, max_tokens=60, seed=5, ignore_eos=True)
        spec = f"draft-model(model={permuted}, dtype=float32)"
        assert isinstance(build_drafter(spec, sibyl.engine.target), UniversalDraftModel)
        accepted = []
        for i, question in enumerate(("Write a short story about a fox.", "Übersetze: Straße 🦊", ENGLISH)):
            prompt = sibyl.chat_prompt([{"role": "user", "content": question}])
            drafted = sibyl.generate(prompt, replace(params, seed=i), drafter=spec)
            assert drafted.token_ids == sibyl.generate(prompt, replace(params, seed=i)).token_ids
            accepted += [drafted.stats.accepted / drafted.stats.drafted]
        assert min(accepted) > 0.95

    def test_a_tree_needs_the_same_vocabulary(self, permuted: Path, sibyl: LLM) -> None:
        for option in ("width", "branch"):
            with pytest.raises(DrafterError, match=r"another vocabulary .*only guess a chain: leave"):
                build_drafter(f"draft-model(model={permuted}, {option}=2)", sibyl.engine.target)

    def test_the_same_numbers_are_no_other_vocabulary(self, sibyl: LLM) -> None:
        assert isinstance(build_drafter("draft-model(model=sibyl)", sibyl.engine.target), DraftModel)

    def test_a_text_beyond_its_context_is_left_undrafted(self, permuted: Path) -> None:
        config = json.loads((permuted / "config.json").read_text())
        short = permuted.with_name("short")
        shutil.copytree(permuted, short)
        (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
        llm = LLM("sibyl", dtype="float32", drafter="none", kv_tokens=256, max_context=100)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        plain = llm.generate(list(range(100, 130)), params)
        drafted = llm.generate(list(range(100, 130)), params, drafter=f"draft-model(model={short})")
        assert drafted.token_ids == plain.token_ids
        assert 10 < drafted.stats.accepted < 40


def test_a_number_below_1(made: dict[str, Tokenizer], tiny: Make, sibyl: LLM) -> None:
    translation = Translation(made["german"], made["english"])
    with pytest.raises(DrafterError, match=r"^draft-model\(depth=0\).*at least 1"):
        UniversalDraftModel(sibyl.engine.target, tiny(0), translation, depth=0)
