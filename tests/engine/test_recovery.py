"""Steps that fail: the request that is to blame ends, and all others get the tokens that they get alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from soothsay import LLM, FinishReason, RequestError, Result, SamplingParams, StepError
from soothsay.config import EngineConfig
from soothsay.core.cache import BlockAllocator
from soothsay.core.request import Observation, Request
from soothsay.core.tree import DraftTree
from soothsay.core.turn import Turn
from soothsay.core.verify import Verdict
from soothsay.drafters.base import Drafter, DrafterProxy, NoDrafter
from soothsay.drafters.registry import build_drafter
from soothsay.engine import engine as engine_module
from soothsay.engine.recovery import MAX_DOUBLINGS, Recovery
from soothsay.engine.scheduler import Scheduler
from soothsay.model.transformer import Transformer

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=5)
PENALIZED = replace(SAMPLED, presence_penalty=0.5, repetition_penalty=1.3, seed=6)
MODES = [GREEDY, SAMPLED, PENALIZED, GREEDY]
BAD = 300
"""First token of the prompt that makes steps fail."""

PROMPTS = [[5, *range(40, 80)], [6, *range(90, 97)], [7, 8, 9] * 12, [11, *range(40, 80)]]
AFTER = 6
"""Tokens of the bad request's answer before steps fail."""

DRAFTERS = ["none", "suffix", "eagle3", "mtp", "draft-model", "suffix + recycling", "suffix > mtp"]
DRAFTERS += ["prompt-lookup | mtp | draft-model", "lookahead"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("sibyl", dtype="int8", drafter="none", kv_tokens=4096)


@cache
def alone() -> list[Result]:
    plain = LLM("sibyl", dtype="int8", drafter="none", kv_tokens=4096, prefix_caching=False)
    return [plain.generate(prompt, params) for prompt, params in zip(PROMPTS, MODES, strict=True)]


def same(result: Result, expected: Result) -> None:
    assert result.error is None
    assert result.token_ids == expected.token_ids
    assert result.text == expected.text
    assert result.logprobs == expected.logprobs
    assert result.finish_reason == expected.finish_reason


def is_bad(request: Request) -> bool:
    return bool(request.tokens[0] == BAD and request.num_output >= AFTER)


def check(requests: Sequence[Request]) -> None:
    if any(map(is_bad, requests)):
        raise RuntimeError("broken")


class Failing(DrafterProxy):
    """A drafter that fails in one of its methods, after it did its work."""

    def __init__(self, drafter: Any, stage: str):
        super().__init__(drafter)
        self.stage = stage

    def propose(self, requests: Sequence[Request]) -> Any:
        trees = self.drafter.propose(requests)
        if self.stage == "propose":
            check(requests)
        return trees

    def observe(self, observations: Sequence[Observation]) -> None:
        self.drafter.observe(observations)
        if self.stage == "observe":
            check([seen.request for seen in observations])

    def release(self, request: Request) -> None:
        self.drafter.release(request)
        if request.tokens[0] == BAD:
            raise RuntimeError("broken, too")


def sabotage(llm: LLM, stage: str, patch: pytest.MonkeyPatch) -> None:
    """Make the engine fail in a stage, once that has done its work for all requests."""
    real_forward, real_verify = llm.engine._forward, engine_module.verify
    digest, emit = Request.digest, Request.emit

    def forward(turns: Sequence[Turn], *rest: Any) -> Any:
        output = real_forward(turns, *rest)
        check([turn.request for turn in turns])
        return output

    def verify(turns: Sequence[Turn], *rest: Any) -> None:
        real_verify(turns, *rest)
        check([turn.request for turn in turns])

    def failing_digest(request: Request, block: int) -> bytes:
        if request.tokens[0] == BAD:
            raise RuntimeError("broken")
        return digest(request, block)

    def failing_emit(request: Request, *rest: Any) -> int:
        count = emit(request, *rest)
        check([request])
        return count

    if stage == "forward":
        patch.setattr(llm.engine, "_forward", forward)
    elif stage == "verify":
        patch.setattr(engine_module, "verify", verify)
    elif stage == "schedule":
        patch.setattr(Request, "digest", failing_digest)
    elif stage == "update":
        patch.setattr(Request, "emit", failing_emit)


def run(llm: LLM, drafter: str, stage: str) -> list[Result]:
    """Serve the prompts, with the bad one in their middle."""
    prompts = [*PROMPTS[:2], [BAD, *range(40, 70)], *PROMPTS[2:]]
    failing = Failing(build_drafter(drafter, llm.engine.target), stage)
    return llm.generate(prompts, [*MODES[:2], GREEDY, *MODES[2:]], drafter=lambda _: failing)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("stage", ["propose", "forward", "verify", "observe", "update", "schedule"])
@pytest.mark.filterwarnings("ignore:.*guessed right in:UserWarning")
def test_the_request_that_fails_ends_and_the_others_keep_their_tokens(
    llm: LLM, drafter: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(llm, stage, monkeypatch)
    results = run(llm, drafter, stage)
    bad = results.pop(2)
    for result, expected in zip(results, alone(), strict=True):
        same(result, expected)
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error is not None
    said, *notes = bad.error.split("; ")
    assert said == "the engine failed at this request: RuntimeError: broken"
    assert [note.startswith("drafter '") for note in notes] == [True] * (stage in ("propose", "observe"))
    assert len(bad.token_ids) == 0 if stage == "schedule" else len(bad.token_ids) >= AFTER
    assert not llm.engine.has_work
    assert llm.engine.allocator.num_free == llm.engine.allocator.num_blocks


def test_a_failure_that_does_not_come_back_ends_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, steps = llm.engine._forward, iter(range(1000))

    def forward(turns: Sequence[Turn], *rest: Any) -> Any:
        if next(steps) in (0, 6, 13):  # steps of the whole batch
            raise MemoryError
        return real(turns, *rest)

    before = llm.engine.recovery.num_failed
    monkeypatch.setattr(llm.engine, "_forward", forward)
    for result, expected in zip(llm.generate(PROMPTS, MODES, drafter="suffix"), alone(), strict=True):
        same(result, expected)
    assert llm.engine.recovery.num_failed == before + 3


@pytest.mark.parametrize("options", [{}, {"prefix_caching": False, "max_rows": 8}])
def test_a_batch_that_fails_only_together_ends_with_the_right_tokens(options: dict[str, Any]) -> None:
    """It fails on and on, more and more rarely. Prompts of several chunks get further, too."""
    llm = LLM("sibyl", dtype="int8", drafter="suffix", kv_tokens=4096, **options)
    real, steps = llm.engine._forward, [0, 0]

    def forward(turns: Sequence[Turn], *rest: Any) -> Any:
        steps[len(turns) > 1] += 1
        if len(turns) > 1:
            raise MemoryError
        return real(turns, *rest)

    llm.engine._forward = forward  # type: ignore[method-assign]
    for result, expected in zip(llm.generate(PROMPTS, MODES), alone(), strict=True):
        same(result, expected)
    passed, failed = steps
    assert failed <= MAX_DOUBLINGS + 1 < passed / 4


def test_a_trace_is_told_once_for_each_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sabotage(llm, "forward", monkeypatch)
    caplog.set_level("INFO")
    for _ in range(2):
        with pytest.raises(StepError):
            llm.generate([BAD, 17], GREEDY)
    told = [record.exc_info is not None for record in caplog.records if record.message == "step failed"]
    assert told == [True, False] * 2  # together with others, then alone


def test_a_drafter_s_mistake_is_told_without_frames_of_the_engine(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Drafter):
        def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
            return []

    with caplog.at_level("INFO"), pytest.raises(StepError):
        llm.generate([BAD, 17], GREEDY, drafter=Wrong)
    told = [one for one in caplog.records if one.message == "step failed"]
    assert [(one.levelname, one.exc_info) for one in told] == [("ERROR", None), ("INFO", None)]
    assert "'Wrong': propose gave 0 trees for 1 requests" in vars(told[0])["reason"]


def test_one_prompt_and_a_stream_raise_what_happened(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(llm, "forward", monkeypatch)
    with pytest.raises(StepError, match="failed at this request: RuntimeError: broken") as raised:
        llm.generate([BAD, 17], GREEDY)
    assert isinstance(raised.value.__cause__, RuntimeError)
    stream, pieces = llm.stream([BAD, 17], GREEDY), []
    with pytest.raises(StepError):
        pieces += [pieces.append(piece) for piece in stream]
    assert len([piece for piece in pieces if piece]) == AFTER, "what there was comes first"
    with pytest.raises(StepError):
        _ = stream.result
    assert not llm.engine.has_work


def test_a_suspect_that_is_cancelled_holds_nobody_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = llm.engine._forward, []

    def forward(turns: Sequence[Turn], *rest: Any) -> Any:
        if not failed:
            failed.append(len(turns))
            raise RuntimeError
        return real(turns, *rest)

    monkeypatch.setattr(llm.engine, "_forward", forward)
    streams = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS, MODES, strict=True)]
    while not failed:
        llm.engine.step()
    assert llm.engine.recovery.alone is not None
    streams[0].cancel()
    streams[2].cancel()
    for index in (1, 3):
        same(streams[index].result, alone()[index])
    assert llm.engine.recovery.alone is None


def test_parameters_that_forbid_every_token_are_the_request_s_own_fault(
    tiny: Callable[..., Transformer],
) -> None:
    llm = LLM(tiny(), drafter="none", max_context=64)
    nothing = replace(GREEDY, logit_bias=dict.fromkeys(range(97), float("-inf")))
    for verifier, temperature in (("match", 0), ("match", 1), ("rejection", 1), ("traversal", 1)):
        params = replace(nothing, verifier=verifier, temperature=temperature)
        good = llm.generate([3, 4], GREEDY)
        first, bad, last = llm.generate([[3, 4], [3, 4], [3, 4]], [GREEDY, params, GREEDY])
        assert first.token_ids == last.token_ids == good.token_ids
        assert bad.error is not None
        assert "parameters forbid all" in bad.error
        with pytest.raises(StepError) as raised:
            llm.generate([3, 4], params)
        assert isinstance(raised.value.__cause__, RequestError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("verifier", ["match", "rejection", "block", "typical"])
def test_a_damaged_model_gives_an_error_for_each_request(
    tiny: Callable[..., Transformer], value: float, verifier: str
) -> None:
    model = tiny()
    llm = LLM(model, drafter="none", max_context=64)
    model.register_forward_hook(lambda _module, _args, out: (out[0].fill_(value), out[1]))
    for temperature in (0.0, 1.0):
        params = replace(GREEDY, temperature=temperature, verifier=verifier)
        for result in llm.generate([[3, 4], [5, 6]], params):
            assert result.finish_reason is FinishReason.ERROR
            assert result.token_ids == []
    assert not llm.engine.has_work


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_are_not_the_fault_of_parameters(
    tiny: Callable[..., Transformer], temperature: float
) -> None:
    model = tiny()
    model.head.register_forward_hook(lambda _module, _args, out: out.fill_(float("-inf")))
    result = LLM(model, drafter="none", max_context=64).generate(
        [[3, 4]], replace(GREEDY, temperature=temperature)
    )[0]
    assert "the model's logits are not finite numbers" in (result.error or "")


class Alone:
    """A scheduler of prompts, and steps that fail or not, without a model."""

    def __init__(self, *lengths: int, num_blocks: int = 100, **config: Any):
        self.scheduler = Scheduler(EngineConfig(block_size=4, **config), BlockAllocator(num_blocks, 4))
        self.recovery = Recovery(self.scheduler)
        drafter = NoDrafter(None)  # type: ignore[arg-type]
        self.requests = [
            Request([10 * number] * length, GREEDY, seed=0, limit=200, drafter=drafter, block_size=4)
            for number, length in enumerate(lengths)
        ]
        for request in self.requests:
            self.scheduler.add(request)

    def step(self, *, fails: bool = False) -> Request | None:
        """A step that emits one token for each request that reaches its end. Returns who was alone in it."""
        alone = self.recovery.alone
        turns = self.scheduler.schedule(alone)
        if fails:
            try:
                raise RuntimeError
            except RuntimeError as error:
                self.recovery.failed(error, alone, turns)
            return alone
        for turn in turns:
            if turn.reaches_end:
                turn.tree, turn.verdict = DraftTree(int(turn.request.tokens[-1])), Verdict([], [1])
        self.scheduler.update(turns)
        self.recovery.passed(alone, turns)
        return alone

    def steps_alone(self) -> list[int]:
        """The numbers of the requests in the steps until all run together again."""
        found = []
        while self.recovery.alone is not None:
            alone = self.step()
            assert alone is not None
            found.append(self.requests.index(alone))
        return found


def test_steps_alone_double_with_each_joint_step_that_fails_in_a_row() -> None:
    world = Alone(9, 9)
    for doublings in (0, 1, 2):
        assert world.step(fails=True) is None
        assert world.steps_alone() == [0, 1] * 2**doublings
    assert world.step() is None
    world.step(fails=True)
    assert world.steps_alone() == [0, 1], "a joint step that passes ends the row"


def test_a_step_without_turns_does_not_end_a_row_of_failures() -> None:
    world = Alone(9, 9)
    world.step(fails=True)
    world.steps_alone()
    world.recovery.passed(None, [])
    world.step(fails=True)
    assert world.steps_alone() == [0, 1] * 2


def test_the_number_of_steps_alone_is_bounded() -> None:
    world = Alone(5)
    for _ in range(MAX_DOUBLINGS + 3):
        world.recovery.failed(RuntimeError(), None, [])
    world.step(fails=True)
    assert len(world.steps_alone()) == 2**MAX_DOUBLINGS


def test_a_suspect_runs_alone_until_it_is_further_than_before() -> None:
    """Its prompt was read up to 20 tokens. It is read again in chunks of 10, and must pass these tokens."""
    world = Alone(60, max_rows=10)
    world.scheduler.allocator.share = False
    world.step()
    world.step()
    assert world.requests[0].cached == 20
    world.step(fails=True)
    assert world.requests[0].cached == 0
    assert world.steps_alone() == [0, 0, 0]


def test_a_suspect_that_gets_no_turn_does_not_hold_up_the_others() -> None:
    world = Alone(9, 9)
    world.step(fails=True)
    first = world.recovery.alone
    world.recovery.passed(first, [])
    assert world.recovery.alone is world.requests[1]


def test_a_request_that_is_scheduled_first_when_that_fails_is_a_suspect_too() -> None:
    """The error came before there were turns. Those that run and the next one to be admitted may cause it."""
    world = Alone(9, 9, 9, 9, max_requests=2)
    world.step()
    world.recovery.failed(RuntimeError(), None, None)
    assert world.steps_alone() == [0, 1, 2]
    assert [request.finish_reason for request in world.requests] == [None] * 4


def test_a_request_that_fails_alone_ends_and_the_next_suspect_goes_on() -> None:
    world = Alone(9, 9)
    world.step(fails=True)
    world.step(fails=True)
    first, second = world.requests
    assert (first.finish_reason, second.finish_reason) == (FinishReason.ERROR, None)
    assert world.steps_alone() == [1]
    assert world.recovery.num_failed == 2
    assert first.failure is not None
    assert first.failure.__traceback__ is None, "it would keep the step's tensors"
