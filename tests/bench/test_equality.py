"""The check of the guarantee: it finds nothing where all is well, and each fault where it begins."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from soothsay import LLM, Drafter, DraftTree, Observation, Request, RequestError, SamplingParams, Target
from soothsay.bench.equality import Divergence, Emitted, EqualityReport, compare
from soothsay.cli.app import app
from soothsay.core.request import RequestDrafter
from soothsay.core.verify import VERIFIERS, Chance, Verdict, Walk
from soothsay.engine.engine import Engine
from soothsay.model.transformer import Transformer

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.9, seed=3)
TEXTS = [
    "one two three four " * 5,
    "The river rises in the hills. In spring the river floods the meadows. " * 3,
    "Hello!",
]
WRONG = 7  # a token that the sibyl never says here


@pytest.fixture(scope="module")
def pilot_tokens(sibyl: LLM) -> list[list[int]]:
    assert sibyl.tokenizer is not None
    return [sibyl.tokenizer.encode(text) for text in TEXTS]


def make(batch: int = 4, **options: object) -> LLM:
    return LLM("sibyl", dtype="float32", drafter="none", max_requests=batch, **{"kv_tokens": 2048, **options})


def watch(llm: LLM) -> list[Request]:
    """Notes the requests that an engine is given."""
    seen: list[Request] = []
    add = llm.engine.add
    llm.engine.add = lambda request: (seen.append(request), add(request))[1]  # type: ignore[method-assign]
    return seen


class Late(Drafter):
    """Guesses wrongly: nothing at first, one token from position 5 on, two from position 9 on."""

    max_nodes = 3

    def __init__(self, target: Target):
        self.target = target

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        for request, tree in zip(requests, trees, strict=True):
            tree.extend([WRONG] * sum(request.num_output >= begin for begin in (5, 9)))
        return trees


class RowsMatter(nn.Module):
    """A head whose logits depend on how many rows there are: by little for two, by much for three."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head, self.dtype = head, head.dtype

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        logits[:, WRONG] += {1: 0.0, 2: 1e-3}.get(len(x), 1000.0)
        return logits


class OneBit(nn.Module):
    """A head whose logits of one token are one float32 further up where there is more than one row."""

    def __init__(self, head: nn.Module, token: int):
        super().__init__()
        self.head, self.dtype, self.token = head, head.dtype, token

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        if len(x) > 1:
            logits[:, self.token] = logits[:, self.token].nextafter(torch.tensor(math.inf))
        return logits


def only(report: EqualityReport, drafter: str) -> Divergence:
    """The one divergence that there is."""
    (found,) = report.divergences
    assert found.drafter == drafter
    return found


# what is well


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_nothing_differs_where_the_guarantee_is_kept(
    params: SamplingParams, pilot_tokens: list[list[int]]
) -> None:
    llm = make(max_rows=24)
    seen = watch(llm)
    drafters = {
        "lookup": "prompt-lookup(min_ngram=1)",
        "tree": "draft-model(model=sibyl, dtype=float32, depth=3, width=2, branch=2)",
    }
    answers: list[int] = []
    report = compare(llm, pilot_tokens, drafters, params, advance=answers.append)
    assert report.divergences == []
    assert answers == [16] * 12
    none, _, tree = report.comparisons
    assert [c.drafter for c in report.comparisons] == ["none", *drafters]
    assert [(c.prompts, c.tokens) for c in report.comparisons] == [(3, 48)] * 3
    assert none.mean_accepted == 1.0
    assert tree.mean_accepted > 2.5
    assert len(seen) == 9
    assert sum(request.stats.drafted > 0 for request in seen) >= 5  # guesses were made
    assert sum(request.num_prefix_hits > 0 for request in seen) >= 4  # the cache was in play
    assert len({request.seed for request in seen}) == 3  # one for each prompt


def test_plain_decoding_shares_nothing_and_everyone_comes_first_at_times(
    monkeypatch: pytest.MonkeyPatch, pilot_tokens: list[list[int]]
) -> None:
    seen: list[tuple[Engine, Request, RequestDrafter]] = []
    add = Engine.add

    def note(engine: Engine, request: Request) -> None:
        seen.append((engine, request, request.drafter))
        add(engine, request)

    monkeypatch.setattr(Engine, "add", note)
    llm = make()
    compare(llm, [pilot_tokens[1]] * 2, {"prompt-lookup": "prompt-lookup"}, replace(GREEDY, max_tokens=2))
    alone = [request for engine, request, _ in seen if engine is not llm.engine]
    mixed = [(request, drafter) for engine, request, drafter in seen if engine is llm.engine]
    assert [request.num_prefix_hits for request in alone] == [0, 0]
    assert all(request.num_prefix_hits for request, _ in mixed[1:])
    assert mixed[0][1] is mixed[3][1]
    assert mixed[1][1] is mixed[2][1]


def test_a_preempted_request_is_compared_and_counted_once(pilot_tokens: list[list[int]]) -> None:
    llm = make(kv_tokens=96, block_size=8)
    seen = watch(llm)
    answers: list[int] = []
    report = compare(
        llm, pilot_tokens[:2], {"prompt-lookup": "prompt-lookup"}, GREEDY, advance=answers.append
    )
    assert report.divergences == []
    assert answers == [16] * 6
    assert sum(request.num_preemptions for request in seen) > 0


def test_a_fresh_seed_is_reported(pilot_tokens: list[list[int]]) -> None:
    params = replace(SAMPLED, seed=None, max_tokens=2)
    llm = make()
    first, second = (compare(llm, pilot_tokens[2:], {}, params) for _ in range(2))
    assert first.divergences == []
    assert first.seed != second.seed


def test_answers_end_where_they_end(sibyl: LLM) -> None:
    prompt = sibyl.chat_prompt([{"role": "user", "content": "Hello!"}])
    plain = sibyl.generate(prompt, replace(GREEDY, ignore_eos=False, max_tokens=60))
    assert plain.finish_reason == "stop"
    drafters = {"tree": "draft-model(model=sibyl, dtype=float32)"}
    for max_tokens in (60, None):
        report = compare(make(), [prompt], drafters, replace(GREEDY, ignore_eos=False, max_tokens=max_tokens))
        assert report.divergences == []
        assert {c.tokens for c in report.comparisons} == {len(plain.token_ids)}


def test_a_drafter_is_shown_all_that_it_asks_for(pilot_tokens: list[list[int]]) -> None:
    shown: list[tuple[int, ...]] = []
    released: list[Request] = []

    class Tapping(Late):
        taps = (0, 8)

        def observe(self, observations: Sequence[Observation]) -> None:
            shown.extend(tuple(tap.shape[1] for tap in seen.taps) for seen in observations)

        def release(self, request: Request) -> None:
            released.append(request)

    report = compare(make(), pilot_tokens, {"tapping": Tapping}, GREEDY)
    assert report.divergences == []
    assert report.comparisons[1].tokens == 48
    assert set(shown) == {(384, 384)}
    assert len(released) == 3


def test_prompts_without_room_are_skipped(pilot_tokens: list[list[int]]) -> None:
    prompts = [[5] * 40, pilot_tokens[2], [5] * 39]
    report = compare(make(max_context=40, kv_tokens=160), prompts, {}, GREEDY)
    assert (report.skipped, report.comparisons[0].prompts) == (1, 2)
    assert report.comparisons[0].tokens == 16 + 1  # the context ends the last answer
    small = compare(make(max_context=64, kv_tokens=48), prompts, {}, GREEDY)  # the pool is what is short
    assert (small.skipped, small.comparisons[0].prompts) == (2, 1)
    with pytest.raises(RequestError, match="none of 1 prompts fits"):
        compare(make(max_context=40, kv_tokens=160), prompts[:1], {}, GREEDY)


# what is broken


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_layer_whose_rows_depend_on_their_number(
    params: SamplingParams, pilot_tokens: list[list[int]]
) -> None:
    llm = make(batch=1)  # so that the drafter alone decides how many rows there are
    llm.model.head = RowsMatter(llm.model.head)
    plain = llm.generate(pilot_tokens[0], replace(params, seed=5)).token_ids
    report = compare(llm, pilot_tokens[:1], {"late": Late}, replace(params, seed=5))
    assert [len(comparison.divergences) for comparison in report.comparisons] == [0, 1]
    found = only(report, "late")
    assert (found.prompt, found.first.position, found.first.what) == (0, 5, "logits")
    assert found.first.plain is not None
    assert found.first.drafted is not None
    assert found.first.plain.token == found.first.drafted.token == plain[5]
    assert found.first.plain.margin == pytest.approx(found.first.drafted.margin)
    assert found.token is not None
    assert (found.token.position, found.token.what) == (9, "both")
    assert found.token.plain is not None
    assert found.token.drafted is not None
    assert (found.token.plain.token, found.token.drafted.token) == (plain[9], WRONG)
    assert 0 < found.token.plain.margin < 30
    assert found.token.drafted.margin > 900


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_one_bit_of_one_logit_is_found(place: float, pilot_tokens: list[list[int]]) -> None:
    """Wherever it is in the row. All tokens are equal, and every position whose bits differ is told."""
    llm = make(batch=1)
    token = round(place * (llm.model.spec.vocab_size - 1))
    llm.model.head = OneBit(llm.model.head, token)
    found = only(compare(llm, pilot_tokens[:1], {"late": Late}, GREEDY), "late")
    assert (found.first.position, found.first.what, found.token) == (5, "logits", None)
    assert found.first.plain is not None
    assert token != found.first.plain.token, "or else the margin would differ too"
    assert found.first.drafted is not None
    assert found.first.plain.margin == found.first.drafted.margin


def test_margins_are_those_of_the_logits(sibyl: LLM, pilot_tokens: list[list[int]]) -> None:
    llm = make(batch=1)
    llm.model.head = RowsMatter(llm.model.head)
    found = only(compare(llm, pilot_tokens[:1], {"late": Late}, GREEDY), "late")
    logprobs = sibyl.generate(pilot_tokens[0], replace(GREEDY, logprobs=2)).logprobs
    assert logprobs is not None
    for difference in (found.first, found.token):
        assert difference is not None
        assert difference.plain is not None
        best, second = logprobs[difference.position].top.values()
        assert difference.plain.margin == pytest.approx(best - second, abs=1e-5)


def test_margins_are_those_of_the_draw(pilot_tokens: list[list[int]]) -> None:
    llm = make(batch=1)
    llm.model.head = RowsMatter(llm.model.head)
    found = only(compare(llm, pilot_tokens[:1], {"late": Late}, replace(SAMPLED, top_k=1)), "late")
    assert found.first.plain is not None
    assert found.first.plain.margin == math.inf  # there was no second to choose


def test_a_margin_is_told_and_not_compared() -> None:
    assert Emitted(1, b"bits", math.nan) == Emitted(1, b"bits", 0.0)
    assert Emitted(1, b"bits", 0.0) != Emitted(1, b"other", 0.0)


def accept_first_guess(tree: DraftTree, chance: Chance) -> Walk:
    """Takes a guess for right that nobody checked."""
    seen = yield range(len(tree))
    if len(tree) == 1:
        return Verdict([], [seen.draws[0]])
    return Verdict([1], [tree.tokens[1], seen.draws[1]])


def test_a_guess_that_is_wrongly_accepted(
    monkeypatch: pytest.MonkeyPatch, pilot_tokens: list[list[int]]
) -> None:
    monkeypatch.setitem(VERIFIERS, "match", replace(VERIFIERS["match"], verify=accept_first_guess))
    report = compare(make(), pilot_tokens, {"late": Late}, GREEDY)
    assert [len(comparison.divergences) for comparison in report.comparisons] == [0, 3]
    assert [found.prompt for found in report.divergences] == [0, 1, 2]
    for found in report.divergences:
        assert (found.first.position, found.first.what) == (5, "token")
        assert found.token == found.first
        assert found.first.drafted is not None
        assert found.first.drafted.token == WRONG


def test_keys_that_were_overwritten(pilot_tokens: list[list[int]]) -> None:
    class Vandal(Late):
        """Erases the keys and values of the last block at position 6."""

        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            for request in requests:
                if request.num_output == 6:
                    for layer in llm.engine.cache.layers:
                        layer[:, request.blocks[0] * llm.config.block_size] = 0
            return [DraftTree(int(request.tokens[-1])) for request in requests]

    llm = make(batch=1, prefix_caching=False)
    found = only(compare(llm, pilot_tokens[:1], {"vandal": Vandal}, GREEDY), "vandal")
    assert found.first.position == 6


def test_an_answer_that_ends_too_soon(pilot_tokens: list[list[int]]) -> None:
    class Impatient(Late):
        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            for request in requests:
                request.limit = request.num_prompt + 6
            return [DraftTree(int(request.tokens[-1])) for request in requests]

    found = only(compare(make(), pilot_tokens[:1], {"impatient": Impatient}, GREEDY), "impatient")
    assert (found.first.position, found.first.what) == (6, "end")
    assert found.token == found.first
    assert found.first.plain is not None
    assert found.first.drafted is None


def test_the_batch_itself_is_checked(pilot_tokens: list[list[int]]) -> None:
    """If the drafter `none` differs too, the batch is the cause and not a drafter."""
    llm = make(batch=3)
    llm.model.head = RowsMatter(llm.model.head)
    report = compare(llm, pilot_tokens, {}, GREEDY)
    assert [(found.drafter, found.first.position, found.first.what) for found in report.divergences] == [
        ("none", 0, "both")
    ] * 3


# the command


def verify(*args: str, **env: str) -> Result:
    return CliRunner().invoke(app, ["verify", *args], env={"COLUMNS": "200", **env})


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(TEXTS))
    return file


def test_the_command_shows_one_table_where_all_is_equal(questions: Path) -> None:
    result = verify("sibyl", "-d", "prompt-lookup", "-n", "24", "--prompts", str(questions))
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"none +3 +(\d+) +1\.00 +0 *\n +prompt-lookup +3 +\1 +[\d.]+ +0", result.stdout)
    assert (
        "✓ Every token, and every bit of the logits it was drawn from, is plain decoding's." in result.stdout
    )
    assert "seed" not in result.stdout


@pytest.mark.parametrize("others", [[], ["-d", "draft-model(model=sibyl)"]])
def test_a_tick_needs_accepted_tokens(others: list[str], questions: Path, tmp_path: Path) -> None:
    file = tmp_path / "idle.py"
    file.write_text("from soothsay.drafters.base import NoDrafter\n\n\nclass Idle(NoDrafter):\n    pass\n")
    result = verify("-d", f"{file}:Idle", *others, "-n", "8", "--prompts", str(questions))
    assert result.exit_code == 0, result.output
    assert f"{file}:Idle: nothing was accepted, so this shows little: use more tokens" in result.stdout
    assert ("✓" in result.stdout) == bool(others)


def test_the_command_has_prompts_and_drafters_of_its_own() -> None:
    result = verify("-n", "2", "-t", "1", "--seed", "9", "--limit", "5", "--batch", "3", FORCE_COLOR="1")
    assert result.exit_code == 0, result.output
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", result.stdout)
    assert re.search(r"prompt-lookup +5 +\d+ ", plain)
    assert "seed 9" in plain
    assert "answers," in result.stderr  # a terminal sees the bar


def test_the_command_skips_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "questions.txt"
    file.write_text("Hello!\n" + "word " * 3000)
    result = verify("-d", "none", "-n", "2", "--prompts", str(file))
    assert result.exit_code == 0
    assert "1 of 2 prompts were skipped: too long for the context." in result.stdout
    assert re.search(r"none +1 +\d+ ", result.stdout)


def test_the_command_fails_loudly_and_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question_id": 81, "category": "counting", "turns": ["Count: one two one two"]}\n')
    monkeypatch.setitem(VERIFIERS, "match", replace(VERIFIERS["match"], verify=accept_first_guess))
    result = verify("-d", "prompt-lookup(min_ngram=1)", "-n", "24", "--prompts", str(file))
    assert result.exit_code == 1
    number, text = r"\d+ '[^']*'", r"[\d.e-]+"
    row = rf"81 \(counting\) +prompt-lookup\(min_ngram=1\) +token +\d+ +{number} +{text} +{number} +{text}"
    assert re.search(row, result.stdout), result.stdout
    assert "DIFFERENT ANSWERS  1 of 2 answers differ from plain decoding." in result.stdout
    assert "✓" not in result.stdout


def test_the_command_finds_one_bit_of_one_logit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last bit of the last logit of the first row, wherever a pass has several."""
    logits = Transformer.logits

    def one_bit_off(model: Transformer, hidden: Tensor) -> Tensor:
        rows = logits(model, hidden)
        if len(rows) > 1:
            rows[0, -1] = rows[0, -1].nextafter(torch.tensor(math.inf))
        return rows

    monkeypatch.setattr(Transformer, "logits", one_bit_off)
    file = tmp_path / "questions.txt"
    file.write_text("Count: one two one two one two")
    result = verify("-d", "prompt-lookup(min_ngram=1)", "-n", "16", "--batch", "1", "--prompts", str(file))
    assert result.exit_code == 1
    assert re.search(r"none +1 +\d+ +1\.00 +0 *\n +prompt-lookup\(min_ngram=1\) +1 .* 1 *\n", result.stdout)
    assert re.search(r"prompt-lookup\(min_ngram=1\) +logits +\d+ ", result.stdout), result.stdout


@pytest.mark.parametrize("method", ["propose", "observe"])
def test_a_drafter_that_fails_is_not_a_difference(tmp_path: Path, method: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from soothsay.drafters.base import NoDrafter\n\n\n"
        f"class Mine(NoDrafter):\n    def {method}(self, given):\n        return given[0].nothing\n"
    )
    result = verify("-d", f"{file}:Mine", "-n", "4", "--limit", "1")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"Error: drafter {file}:Mine: the engine failed")
    assert "'nothing'" in result.stderr
    assert "DIFFERENT" not in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nope"], "no model at 'nope'"),
        (["-d", "bogus"], "drafter 'bogus' is unknown"),
        (["-t", "-1"], "temperature=-1.0 is not possible"),
    ],
)
def test_errors_are_one_line(args: list[str], message: str) -> None:
    result = verify(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "Hello!"}\n{"prompt": 3}\n')
    result = verify("--prompts", str(file))
    assert result.exit_code == 2
    assert result.stderr == f"Error: {file}, line 2: prompt must be text, and not empty\n"
    assert verify("--prompts", "/no/such/file").exit_code == 2
