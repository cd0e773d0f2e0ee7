"""A draft model: what it refuses, and that its guesses are its own, whatever became of its memory."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_shot import bound_of, check_children, log_q
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import Tensor

from soothsay import LLM, DrafterError, DraftTree, SamplingParams, Target, Tokenizer
from soothsay.config import EngineConfig
from soothsay.core.batch import Batch, Rows
from soothsay.core.request import Request
from soothsay.core.sampling import Nodes
from soothsay.drafters.models.draft_model import DraftModel, common_tokens
from soothsay.model.transformer import Transformer
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.result import Result

Make = Callable[..., Transformer]

VOCAB = 97
SAMPLED = SamplingParams(max_tokens=30, temperature=0.9, seed=11)
GREEDY = SamplingParams(max_tokens=30, temperature=0)
PENALIZED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2, top_p=0.95)


def prompts(lengths: Sequence[int] = (40, 3, 17, 64, 30, 8)) -> list[list[int]]:
    """The longer ones begin like the first."""
    common = np.random.default_rng(9).integers(0, VOCAB, 24).tolist()
    return [
        [
            *common[: length - 1],
            *np.random.default_rng(length).integers(0, VOCAB, max(length - 24, 1)).tolist(),
        ]
        for length in lengths
    ]


def logits_of(model: Transformer, rows: Sequence[Rows]) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Compute the logits of the trees' nodes in one pass without a cache. Also returns each tree's rows."""
    batch = Batch.pack(rows, group=model.spec.group, windows=model.spec.windows)
    hidden, _ = model(batch)
    return model.logits(hidden[batch.logit_rows]), batch.spans


def with_vocab(model: Transformer, size: int) -> Transformer:
    """The same model, its vocabulary cut or padded with random rows."""
    torch.manual_seed(size)
    other = Transformer(replace(model.spec, vocab_size=size)).eval().requires_grad_(False)
    weights = model.state_dict()
    for name in ("embedding.weight", "head.weight"):
        padding = torch.randn(size, model.spec.hidden_size) * weights[name].std()
        padding[: len(weights[name])] = weights[name][:size]
        weights[name] = padding
    other.load_state_dict(weights)
    return other


def noisy(model: Transformer, amount: float) -> Transformer:
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    for parameter in other.parameters():
        parameter.add_(torch.randn_like(parameter) * parameter.std() * amount if parameter.ndim > 1 else 0)
    return other


@dataclass(frozen=True)
class Guess:
    """One proposal, and what it was made for."""

    request: Request
    tokens: list[int]
    max_nodes: int
    max_depth: int
    tree: DraftTree


class Watched(DraftModel):
    """Notes its proposals, and how many committed tokens it runs for them, in all and at most in one pass."""

    def __init__(self, target: Target, **options: Any):
        super().__init__(target, **options)
        self.guesses: list[Guess] = []
        self.num_run = self.most_run = 0

    def run(self, rows: Sequence[Rows]) -> Tensor:
        count = sum(len(row.tokens) for row in rows)
        self.num_run, self.most_run = self.num_run + count, max(self.most_run, count)
        return super().run(rows)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = super().propose(requests)
        self.guesses += [
            Guess(request, request.tokens.tolist(), request.max_nodes, request.max_depth, tree)
            for request, tree in zip(requests, trees, strict=True)
        ]
        return trees


def serve(
    target: Transformer, *, first_without: bool = False, engine: dict[str, Any] | None = None, **options: Any
) -> tuple[Watched, list[Result], list[Request]]:
    """Answer all prompts with a watched drafter; also what plain decoding says must come out."""
    llm = LLM(target, drafter="none", **{"kv_tokens": 4096, **(engine or {})})
    made: list[Watched] = []

    def make(t: Target) -> Watched:
        made.append(Watched(t, **options))
        return made[0]

    many = [replace(p, seed=i) for i, p in enumerate([SAMPLED, GREEDY, PENALIZED] * 2)]
    plain = LLM(target, drafter="none", kv_tokens=4096).generate(prompts(), many)
    if first_without:
        llm.generate(prompts(), GREEDY)
    requests: list[Request] = []
    add = llm.engine.add
    llm.engine.add = lambda request: (requests.append(request), add(request))[1]  # type: ignore[method-assign]
    results = llm.generate(prompts(), many, drafter=make)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    return made[0], results, requests


STRESSES: dict[str, dict[str, Any]] = {
    "at ease": {},
    "preempted": {"engine": {"kv_tokens": 104, "block_size": 8}},
    "after prefixes it never saw": {"first_without": True},
    "in small chunks": {"engine": {"max_rows": 11, "block_size": 4}},
    "with a tree cut short": {"engine": {"max_tree": 3}},
}


def seen_to_be(stress: str, requests: Sequence[Request]) -> None:
    if stress == "preempted":
        assert sum(request.num_preemptions for request in requests) > 2
    if stress == "after prefixes it never saw":
        assert all(request.num_prefix_hits > 0 for request in requests if request.num_prompt > 16)


@pytest.mark.parametrize("stress", STRESSES)
def test_a_model_that_drafts_for_itself_is_always_right(stress: str, tiny: Make) -> None:
    target = tiny(0)
    drafter, results, requests = serve(target, model=target, depth=4, **STRESSES[stress])
    seen_to_be(stress, requests)
    for result in results:
        assert set(result.stats.acceptance) == {1.0}
    deepest = max(len(result.stats.acceptance) for result in results)
    assert deepest == (2 if "cut" in stress else 4)
    assert drafter.max_nodes == 5


@pytest.mark.parametrize("shape", [(6, 1, 1), (5, 2, 3), (4, 3, 4)])
def test_what_is_not_grown_would_not_have_been_verified(shape: tuple[int, int, int], tiny: Make) -> None:
    depth, width, branch = shape
    pruned: list[dict[tuple[int, ...], DraftTree]] = []
    sizes = []
    for most in (12, 64):
        options = {"depth": depth, "width": width, "branch": branch, "engine": {"max_tree": most}}
        drafter, _, _ = serve(tiny(0), model=noisy(tiny(0), 0.3), **options)
        asked = [guess for guess in drafter.guesses if guess.max_depth >= depth]
        pruned.append({(guess.request.seed, *guess.tokens): guess.tree.prune(12, depth) for guess in asked})
        sizes.append(sum(len(guess.tree) for guess in asked) / len(asked))
    common = pruned[0].keys() & pruned[1].keys()
    assert len(common) > 20
    for key in common:
        few, many = pruned[0][key], pruned[1][key]
        assert (few.tokens, few.parents) == (many.tokens, many.parents)
        assert few.scores == pytest.approx(many.scores, abs=1e-4)
    assert width == 1 or sizes[0] < 0.8 * sizes[1]


@pytest.mark.parametrize("shape", [(4, 1, 1), (3, 2, 3), (2, 4, 1)])
@pytest.mark.parametrize("stress", STRESSES)
def test_a_tree_says_what_the_draft_model_thinks(
    stress: str, shape: tuple[int, int, int], tiny: Make
) -> None:
    """Every proposal, against the draft model's own logits in a pass without a cache."""
    depth, width, branch = shape
    draft = noisy(tiny(0), 0.3)
    drafter, _, requests = serve(
        tiny(0), model=draft, depth=depth, width=width, branch=branch, **STRESSES[stress]
    )
    seen_to_be(stress, requests)
    guesses = [guess for guess in drafter.guesses if guess.max_nodes > 1]
    assert len(guesses) > 20
    logits, spans = logits_of(draft, [Rows(np.array(g.tokens), 0, None, g.tree) for g in guesses])
    for guess, (begin, end) in zip(guesses, spans, strict=True):
        tree, said = guess.tree, guess.request
        committed = copy.copy(said)
        committed.length = len(guess.tokens)  # as the request was
        scores = log_q(logits[begin:end], Nodes(committed, tree, range(len(tree))))
        expanded = [node for node, children in enumerate(tree.children) if children]
        for node in range(1, len(tree)):
            above = tree.parents[node]
            own = scores[above, tree.tokens[node]].item()
            assert tree.scores[node] == pytest.approx(tree.scores[above] + own, abs=1e-3)
        for node in expanded:
            check_children(tree, node, scores[node], branch, guess.max_nodes)
        bound = bound_of(tree, guess.max_nodes)
        for level in range(1, depth):
            grown = [node for node in expanded if tree.depths[node] == level]
            others = [
                n
                for n in range(len(tree))
                if tree.depths[n] == level and n not in grown and tree.scores[n] + scores[n].max() > bound
            ]
            assert len(grown) <= width
            worst = min((tree.scores[node] for node in grown), default=math.inf)
            assert all(tree.scores[node] <= worst for node in others), "the best are explored further"
        assert max(tree.depths) <= min(depth, guess.max_depth) or guess.max_depth < 1
        assert len(expanded) <= max(guess.max_nodes, 1), "no KV beyond the slots that were granted"
        assert len(tree) <= drafter.max_nodes


def test_it_explores_as_wide_and_deep_as_it_may(tiny: Make) -> None:
    drafter, _, _ = serve(tiny(0), model=tiny(1), depth=3, width=2, branch=3)
    assert drafter.max_nodes == 1 + 3 + 2 * 2 * 3
    assert max(len(guess.tree) for guess in drafter.guesses) == drafter.max_nodes
    assert max(max(guess.tree.depths) for guess in drafter.guesses) == 3


def test_what_it_has_to_catch_up_with_goes_in_as_many_passes_as_it_takes(tiny: Make) -> None:
    drafter, _, _ = serve(tiny(0), model=tiny(1), engine={"max_rows": 11})
    assert drafter.most_run == 11


def test_where_no_guess_is_wanted_nothing_is_run(tiny: Make) -> None:
    drafter, results, _ = serve(tiny(0), model=tiny(1), engine={"max_tree": 1})
    assert len(drafter.guesses) > 20
    assert drafter.num_run == sum(result.stats.drafted for result in results) == 0


def test_nothing_is_guessed_below_an_end_token(tiny: Make) -> None:
    target = tiny(0)
    ends = range(0, VOCAB, 3)
    llm = LLM(target, drafter="none", kv_tokens=1024)
    made: list[Watched] = []
    maker = lambda t: made.append(Watched(t, model=target, depth=5)) or made[-1]  # noqa: E731
    llm.generate(prompts(), replace(SAMPLED, stop_token_ids=list(ends)), drafter=maker)
    trees = [guess.tree for guess in made[0].guesses]
    reached = [(tree, node) for tree in trees for node in range(1, len(tree)) if tree.tokens[node] in ends]
    assert reached
    assert not any(tree.children[node] for tree, node in reached)


def test_a_model_that_drafts_for_itself_is_right_whoever_used_its_memory_before(tiny: Make) -> None:
    """Blocks go from request to request, some drafted for and some not, some found and some written anew."""
    rng = np.random.default_rng(0)
    target = tiny(0, num_layers=1, windows=(None,))
    llm = LLM(target, drafter="none", kv_tokens=36, block_size=4)
    drafter = DraftModel(llm.engine.target, model=target, depth=3)
    params = SamplingParams(temperature=0, max_tokens=6)
    found = 0
    for _ in range(150):
        many = [[int(rng.integers(2))] * int(rng.integers(1, 10)) + [int(rng.integers(2))] for _ in range(3)]
        chosen = [drafter if rng.random() < 0.6 else "none" for _ in many]
        for result in llm.generate(many, params, drafter=chosen):
            assert set(result.stats.acceptance) <= {1.0}
            found += result.stats.drafted
    assert found > 500


def test_a_block_that_was_written_over_is_not_taken_for_what_it_held(tiny: Make) -> None:
    """The target has the old content in it again, computed while somebody else drafted."""
    target, old = tiny(0), [*range(11, 20)]
    llm = LLM(target, drafter="none", kv_tokens=24, block_size=8)
    drafter = DraftModel(llm.engine.target, model=target, depth=1)
    first_blocks: list[list[int]] = []
    for prompt, max_tokens, own in [
        (old, 3, drafter),  # block 0 holds the old content, in both pools
        ([*range(21, 30)], 3, "none"),
        ([*range(31, 39)], 2, "none"),  # from now on, block 0 is the next to go
        ([41, 42, 43], 4, drafter),  # it goes, and is written over in part
        (old, 2, "none"),  # it is given its old content in the target's pool
        (old, 8, drafter),
    ]:
        stream = llm.stream(prompt, replace(SAMPLED, max_tokens=max_tokens), drafter=own)
        next(iter(stream))
        first_blocks += [request.blocks[:1] for request in llm.engine.scheduler.running]
        result = stream.result
    assert first_blocks == [[0], [1], [2], [0], [0], [0]]
    assert set(result.stats.acceptance) == {1.0}


@pytest.mark.parametrize("depth", [1, 3, 4, 6])
def test_what_it_has_run_for_one_request_it_does_not_run_again_for_another(depth: int, tiny: Make) -> None:
    """A conversation's next turn: all but the last few tokens of the answer are there already."""
    target = tiny(0)
    llm = LLM(target, drafter="none", kv_tokens=512, block_size=4)
    drafter = Watched(llm.engine.target, model=target, depth=depth)
    first = llm.generate(prompts()[3], GREEDY, drafter=drafter)
    said = first.prompt_token_ids + first.token_ids
    assert drafter.num_run <= 64 + 2 * first.stats.steps, "the bonus, and the last guess, which was not run"
    drafter.num_run = 0
    second = llm.generate([*said, 1, 2, 3], replace(GREEDY, max_tokens=2), drafter=drafter)
    assert second.stats.drafted == 1
    assert 3 < drafter.num_run < 3 + 4 + 8
    assert set(second.stats.acceptance) == {1.0}


def test_a_request_that_has_ended_is_forgotten(tiny: Make) -> None:
    drafter, _, _ = serve(tiny(0), model=tiny(1))
    assert not drafter.kv.states


class TestPaddedVocabulary:
    """Checkpoints of one family share a tokenizer and pad the vocabulary differently."""

    def test_a_larger_one_proposes_only_what_the_target_has(self, tiny: Make) -> None:
        target = tiny(0)
        drafter, results, _ = serve(target, model=with_vocab(target, 128), depth=3)
        assert all(max(guess.tree.tokens) < VOCAB for guess in drafter.guesses)
        assert all(set(result.stats.acceptance) == {1.0} for result in results)

    def test_a_smaller_one_lives_with_tokens_that_it_does_not_know(self, tiny: Make) -> None:
        small = tiny(0)
        target = with_vocab(small, 128)
        drafter, results, _ = serve(target, model=small, depth=3, width=2, branch=2)
        unknown = {token for result in results for token in result.token_ids if token >= VOCAB}
        assert unknown, "or this would test nothing"
        assert all(max(guess.tree.tokens[1:], default=0) < VOCAB for guess in drafter.guesses)
        assert sum(result.stats.accepted for result in results) > 0

    def test_more_branches_than_tokens_are_all_of_them(self, tiny: Make) -> None:
        target = tiny(0, vocab_size=5)
        llm = LLM(target, drafter=lambda t: DraftModel(t, model=target, depth=2, branch=9), kv_tokens=256)
        result = llm.generate([1, 2, 3], SAMPLED)
        assert result.token_ids == llm.generate([1, 2, 3], SAMPLED, drafter="none").token_ids
        assert result.stats.acceptance[0] == 1.0


def write_tokenizer(folder: Path, words: Sequence[str]) -> Tokenizer:
    """A checkpoint's folder with a tokenizer, and a model that nobody could load."""
    folder.mkdir()
    backend = Backend(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return Tokenizer.from_directory(folder)


class TestRefusals:
    WORDS = ("?", "one", "two", "three")

    @pytest.mark.parametrize(
        ("words", "what"),
        [
            (("?", "one", "two", "four"), r"2 tokens differ, for example 'four' \(3 against None\)"),
            (("?", "two", "one", "three"), r"2 tokens differ, for example 'one' \(2 against 1\)"),
            (("?", "one", "two"), r"1 tokens differ, for example 'three' \(None against 3\)"),
        ],
    )
    def test_another_vocabulary(self, words: tuple[str, ...], what: str, tiny: Make, tmp_path: Path) -> None:
        own = write_tokenizer(tmp_path / "target", self.WORDS)
        write_tokenizer(tmp_path / "draft", words)
        message = rf"draft model .*draft has another vocabulary .*: {what}; .*prompt-lookup"
        with pytest.raises(DrafterError, match=message):
            LLM(tiny(0), tokenizer=own, drafter=f"draft-model(model={tmp_path / 'draft'})", kv_tokens=64)

    def test_the_same_vocabulary_is_not_what_is_refused(self, tiny: Make, tmp_path: Path) -> None:
        own = write_tokenizer(tmp_path / "target", self.WORDS)
        write_tokenizer(tmp_path / "draft", self.WORDS)
        with pytest.raises(Exception, match=r"hidden_size|num_hidden_layers"):  # it goes on to load the model
            LLM(tiny(0), tokenizer=own, drafter=f"draft-model(model={tmp_path / 'draft'})", kv_tokens=64)

    def test_a_smaller_context(self, tiny: Make) -> None:
        draft = tiny(0, max_positions=64)

        def build(max_context: int) -> LLM:
            return LLM(
                tiny(0), drafter=lambda t: DraftModel(t, draft), kv_tokens=128, max_context=max_context
            )

        with pytest.raises(DrafterError, match="context of 64 tokens, the target's is 65: set max_context"):
            build(65)
        assert build(64).generate([1], max_tokens_(4)).token_ids

    @pytest.mark.parametrize("option", ["depth", "width", "branch"])
    def test_a_number_below_1(self, option: str, tiny: Make) -> None:
        with pytest.raises(DrafterError, match=rf"^draft-model\(.*{option}=0.*at least 1"):
            DraftModel(Target(tiny(0), None, EngineConfig(), 4), tiny(0), **{option: 0})


def max_tokens_(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)


def test_shared_noise_is_accepted_as_often_as_theory_says(tiny: Make) -> None:
    """The rate is that of equal Gumbel argmaxes, at least (1 - TV) / (1 + TV) (arXiv 2408.07978)."""
    target = tiny(0)
    draft = noisy(target, 0.05)
    llm = LLM(target, drafter=lambda t: DraftModel(t, draft, depth=1), kv_tokens=8192)
    params = SamplingParams(max_tokens=60)
    streams = [llm.stream([seed % VOCAB, 3], replace(params, seed=seed)) for seed in range(50)]
    right: list[bool] = []  # by guess
    p, q = [], []  # what target and draft model thought
    for stream in streams:
        pieces = list(stream)
        said = [*stream.result.prompt_token_ids, *(piece.token for piece in pieces)]
        rows = [Rows(np.array(said[:2]), 0, None, DraftTree(said[1]))]
        rows[0].tree.extend(said[2:])
        own, others = (logits_of(model, rows)[0].double().softmax(-1) for model in (target, draft))
        at = 0
        while at < len(pieces) - 1:  # the last token of an answer is not guessed
            right.append(pieces[at].drafted)
            p.append(own[at])
            q.append(others[at])
            at += 1 + pieces[at].drafted
    p, q = torch.stack(p), torch.stack(q)
    distance = (p - q).abs().sum(-1) / 2
    bound = (1 - distance) / (1 + distance)
    agree = torch.zeros(len(p), dtype=torch.float64)
    for x in range(VOCAB):
        agree += 1 / torch.maximum(p / p[:, x : x + 1], q / q[:, x : x + 1]).sum(-1)
    error = (agree * (1 - agree)).sum().sqrt().item() / len(p)
    accepted = sum(right) / len(right)
    assert 0.1 < distance.mean() < 0.6
    assert abs(accepted - agree.mean().item()) < 4.5 * error
    assert accepted > bound.mean().item()


class TestCommonTokens:
    """A draft model whose output head has the rows of some tokens only."""

    KNOWN = torch.tensor([*range(40), 77, 90, 96])

    def test_those_of_a_model_are_its_first_and_its_control_tokens(self) -> None:
        checkpoint = open_checkpoint("sibyl")
        tokenizer = checkpoint.tokenizer()
        assert tokenizer is not None
        common = common_tokens(checkpoint, 1000)
        assert common is not None
        assert common[:1000].tolist() == list(range(1000))
        assert {t for t in tokenizer.backend.get_added_tokens_decoder() if t >= 1000} == {
            *common[1000:].tolist()
        }
        assert common_tokens(checkpoint, 0) is None
        assert common_tokens(checkpoint, 100_000) is None

    @pytest.mark.parametrize("dtype", ["float32", "int8"])
    def test_a_model_that_guesses_few_tokens_changes_no_answer(self, dtype: Any) -> None:
        llm, params = LLM("sibyl", dtype=dtype, drafter="none", kv_tokens=2048), max_tokens_(24)
        plain = llm.generate("The old house", params)
        drafter = "draft-model(model=sibyl, vocabulary=2000)"
        drafted = llm.generate("The old house", params, drafter=drafter)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.steps < 20

    def test_less_than_none_are_refused(self) -> None:
        with pytest.raises(DrafterError, match=r"vocabulary=-1\) cannot be below 0"):
            LLM("sibyl", drafter="draft-model(model=sibyl, vocabulary=-1)", kv_tokens=512)

    def test_it_guesses_these_tokens_and_as_it_would_among_them(self, tiny: Make) -> None:
        draft = tiny(1)
        short = copy.deepcopy(draft)
        short.head.weight = torch.nn.Parameter(draft.head.weight[self.KNOWN], requires_grad=False)
        drafter, _, _ = serve(draft, model=short, width=1, branch=1, tokens=self.KNOWN)
        assert len(drafter.guesses) > 20
        for guess in drafter.guesses:
            if guess.request.params != replace(GREEDY, seed=guess.request.params.seed):
                continue
            logits, _ = logits_of(draft, [Rows(np.array(guess.tokens), 0, None, guess.tree)])
            below = logits[: len(guess.tree) - 1, self.KNOWN].argmax(-1)
            assert guess.tree.tokens[1:] == self.KNOWN[below].tolist()

    def test_it_reads_apart_up_to_the_last_token(self, tiny: Make) -> None:
        class ReadsFirst(Watched):
            def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
                behind.append([self.unread(request) for request in requests])
                self.catch_up(requests)
                before = self.num_run
                trees = super().propose(requests)
                in_drafts.append(self.num_run - before)
                return trees

        behind: list[list[int]] = []
        in_drafts: list[int] = []
        model, made = tiny(1), list[ReadsFirst]()
        llm = LLM(model, drafter="none", kv_tokens=4096, max_rows=16)
        plain = llm.generate(prompts()[:1], GREEDY)[0]
        result = llm.generate(
            prompts()[:1], GREEDY, drafter=lambda t: made.append(ReadsFirst(t, model=model)) or made[0]
        )[0]
        assert result.token_ids == plain.token_ids
        assert behind[0] == [39]
        assert made[0].most_run <= 16
        assert set(in_drafts) == {1}  # the root alone
