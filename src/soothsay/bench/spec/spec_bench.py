"""`soothsay bench spec`: plain decoding and each drafter answer every question, in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from soothsay import LLM, DrafterError, EngineConfig, RequestError, SamplingParams, SoothsayError
from soothsay.bench.bench_plans import SpecOptions
from soothsay.bench.journal import conditions, short_hash
from soothsay.bench.measure import Meter, Progress, rotated
from soothsay.bench.prompts import QUESTION, encode, in_turns
from soothsay.bench.spec.contenders import AskedTurn, Contender, TurnAnswer
from soothsay.bench.spec.run_times import RunTimes
from soothsay.bench.spec.spec_results import PLAIN, Key, Lap, Setting, SpecResults
from soothsay.core.sampling import derive_seed
from soothsay.core.verify import named_verifier
from soothsay.corpus import PromptEntry, user_message
from soothsay.drafters.registry import Composed, DrafterSpec, Named, build_drafter, named_drafter, parse
from soothsay.model.timing.pass_times import PassTimes
from soothsay.tokenizer import Message

WARM_UP_TOKENS = 48


@dataclass(frozen=True)
class SpecPlan(SpecOptions):
    """What to measure. `drafters`: by their names in reports. Plain decoding is always measured too."""

    drafters: Mapping[str, DrafterSpec]


def serving(batch: int, max_tree: int, max_context: int | None = None) -> EngineConfig:
    """Return the configuration of an engine for `SpecBench`, for batches of at most `batch` questions.

    Prefix caching is off, so that no contender profits from a prompt that another has read.
    """
    config = EngineConfig(max_requests=batch, max_tree=max_tree, max_context=max_context)
    return replace(config, max_rows=max(config.max_rows, batch * max_tree), prefix_caching=False)


class SpecBench:
    """Measures what a plan says.

    Each task's questions are split into groups of one batch. Every contender answers the first turns of a
    group; the contender that starts rotates. Then every contender answers the second turns, after plain
    decoding's answers to the first turns. Before each answer, drafters forget what they learnt from others.

    Args:
        llm: the target's engine, configured by `serving`, without other requests.
        questions: see `read_prompts` and `by_task`. Their numbers differ.
        plan: what to measure.
        about: further conditions, such as the model's name.
        path: the file for results; an existing file with the same conditions is continued.
        progress: see `Progress`.
        times: measures the target's passes, once for each setting and round, so that speed-ups can be
            predicted. None: nothing is predicted.

    Raises:
        DrafterError: a drafter's name is unknown or malformed, or no drafter can be built.
        VerifierError: a verifier is unknown, or its file cannot be used.
        SoothsayError: the file has other conditions.
    """

    def __init__(
        self,
        llm: LLM,
        questions: Sequence[PromptEntry],
        plan: SpecPlan,
        about: Mapping[str, Any] | None = None,
        path: Path | None = None,
        progress: Progress = lambda *_: None,
        times: Callable[[], PassTimes] | None = None,
    ):
        self.llm, self.questions, self.plan = llm, questions, plan
        self.contenders, left_out = _build(llm, plan)
        self.results = SpecResults(self._conditions(about or {}, left_out), path)
        self._times = times
        self._meter = Meter(progress, limit=plan.limit)
        self._refusal: RequestError | None = None  # of the last question that did not fit into the context

    def run(self) -> SpecResults:
        """Measure what is not in the file yet. Raises `RequestError` if no question fits into the context."""
        plan = self.plan
        settings = [*product(plan.temperatures, plan.batches, range(1, plan.rounds + 1))]
        self._meter.total = _turns(self.questions) * len(self.contenders) * len(settings)
        if any(self._lacks(setting) for setting in settings):
            self._warm_up()
        self._meter.begin = time.perf_counter()
        self._meter.advance()
        for place, setting in enumerate(settings):
            self._round(setting, self._meter.left / (len(settings) - place))
        if not self.results.rows():
            raise RequestError(f"none of {len(self.questions)} questions can be answered: {self._refusal}")
        return self.results

    def _conditions(self, about: Mapping[str, Any], left_out: Mapping[str, str]) -> dict[str, Any]:
        asked = json.dumps([(one.number, one.prompt, one.later) for one in self.questions])
        own = conditions(
            *(self.plan, "max_tokens", "seed", "trees"),
            contenders=[contender.name for contender in self.contenders],
            left_out=left_out,
            questions=len(self.questions),
            questions_digest=short_hash(asked),
            verifiers=self.plan.verifiers or ["match"],
            nodes=self.llm.config.max_tree,
            max_context=self.llm.config.max_context,
            threads=torch.get_num_threads(),
        )
        return {**about, **own}

    def _warm_up(self) -> None:
        """Let every contender answer once, since a first answer also allocates and compiles."""
        params = SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS, seed=0)
        asked = self._asked(user_message(QUESTION), params)
        if asked is not None:
            for contender in self.contenders:
                contender.answer([asked])

    def _round(self, setting: Setting, seconds: float) -> None:
        """Measure questions at one setting, turn by turn, for so many seconds; one at least."""
        end = time.perf_counter() + seconds
        if self._times is not None and self._lacks(setting):
            self.results.add_times(setting, self._times())
        groups = _groups(self.questions, setting[1])
        for number, group in enumerate(groups):
            if number and time.perf_counter() >= end:
                left = [question for group in groups[number:] for question in group]
                self._meter.advance(dropped=_turns(left) * len(self.contenders))
                return
            for turn, key in enumerate(_keys(setting, group)):
                lap = self.results.by_key.get(key)
                if lap is None:
                    lap = self._lap(setting, group, turn, number)
                    self.results.add(lap)
                else:
                    self._meter.advance(len(lap.answered) * len(self.contenders))
                self._meter.advance(dropped=lap.left_out * len(self.contenders))

    def _lacks(self, setting: Setting) -> bool:
        """Return whether a measurement of this setting is missing."""
        keys = (key for group in _groups(self.questions, setting[1]) for key in _keys(setting, group))
        return any(key not in self.results for key in keys)

    def _lap(self, setting: Setting, group: Sequence[PromptEntry], turn: int, number: int) -> Lap:
        asked, left_out, temperature = dict[int, AskedTurn](), 0, setting[0]
        for question in group:
            prompt = self._prompt(temperature, question, turn)
            if prompt is None:
                continue
            seed = derive_seed(self.plan.seed + question.number, turn)
            params = SamplingParams(temperature=temperature, max_tokens=self.plan.max_tokens, seed=seed)
            if one := self._asked(prompt, params):
                asked[question.number] = one
            else:
                left_out += len(question.turns) - turn
        runs, answers = self._answers([*asked.values()], number + setting[2])
        known = [self.results.plain(temperature, number, turn) for number in asked]
        plain = [old or new for old, new in zip(known, answers.get(PLAIN) or (), strict=True)]
        return Lap(
            *setting,
            task=group[0].task,
            group=[question.number for question in group],
            turn=turn,
            answered=[*asked],
            left_out=left_out,
            runs={name: _compared(run, answers.get(name), plain) for name, run in runs.items()},
            answers=[] if all(known) else [answer.token_ids for answer in plain],
            texts=[] if all(known) else [answer.text for answer in plain],
        )

    def _prompt(
        self, temperature: float, question: PromptEntry, turn: int
    ) -> str | tuple[Message, ...] | None:
        """What a turn asks: all that was said before, with plain decoding's answers.

        None: the question has no such turn, or an earlier one did not fit into the context.
        """
        said = [self.results.plain(temperature, question.number, earlier) for earlier in range(turn)]
        if turn >= len(question.turns) or not all(said):
            return None
        messages = list(question.messages)
        for answer, text in zip(said, question.later, strict=False):
            assert answer is not None
            messages.append({"role": "assistant", "content": answer.text})
            messages.append({"role": "user", "content": text})
        return tuple(messages) if turn else question.prompt

    def _answers(
        self, asked: Sequence[AskedTurn], first: int
    ) -> tuple[dict[str, RunTimes], dict[str, list[TurnAnswer]]]:
        """Let all contenders answer, starting with number `first`. Returns times and answers by name."""
        runs: dict[str, RunTimes] = {}
        answers: dict[str, list[TurnAnswer]] = {}
        for contender in rotated(self.contenders, first) if asked else ():
            contender.reset()
            runs[contender.name], said = contender.answer(asked)
            if said is not None:
                answers[contender.name] = said
            self._meter.advance(len(asked), runs[contender.name].tokens)
        return {contender.name: runs[contender.name] for contender in self.contenders if asked}, answers

    def _asked(self, asked: str | tuple[Message, ...], params: SamplingParams) -> AskedTurn | None:
        """Return a turn as a request, or None if it does not fit into the context."""
        prompt = encode(PromptEntry(asked), self.llm.tokenizer)
        try:
            self.llm.stream(prompt, params, drafter=PLAIN).cancel()
        except RequestError as refusal:
            self._refusal = refusal
            return None
        return prompt, params


def _build(llm: LLM, plan: SpecPlan) -> tuple[list[Contender], dict[str, str]]:
    """Build plain decoding and the drafters, each once for each verifier.

    Returns contenders, and the reasons why other drafters cannot be built. Raises `DrafterError` for unknown
    names, before anything is built, and if only plain decoding can be built although drafters were named.
    """
    for spec in plan.drafters.values():
        if isinstance(spec, str):
            _check_names(parse(spec))
    verifiers = plan.verifiers or ["match"]
    for verifier in verifiers:
        named_verifier(verifier)
    target = llm.engine.target
    built, left_out = [Contender(PLAIN, llm, build_drafter(PLAIN, target))], dict[str, str]()
    for name, spec in plan.drafters.items():
        for verifier in verifiers:
            full_name = name if verifier == "match" else f"{name}, {verifier}"
            try:
                drafter = build_drafter(spec, target)
            except SoothsayError as error:
                left_out[name] = str(error)
                break
            built.append(Contender(full_name, llm, drafter, verifier, plan.trees))
    if len(built) == 1 and left_out:
        raise DrafterError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    return built, left_out


def _check_names(spec: Named | Composed) -> None:
    if isinstance(spec, Composed):
        for part in spec.parts:
            _check_names(part)
    else:
        named_drafter(spec.name)


def _turns(questions: Sequence[PromptEntry]) -> int:
    return sum(len(question.turns) for question in questions)


def _groups(questions: Sequence[PromptEntry], size: int) -> list[list[PromptEntry]]:
    """Groups of at most `size` questions of one task. The tasks take turns."""
    tasks: dict[str, list[list[PromptEntry]]] = {}
    for question in questions:
        groups = tasks.setdefault(question.task, [[]])
        if len(groups[-1]) == size:
            groups.append([])
        groups[-1].append(question)
    return in_turns(tasks.values())


def _keys(setting: Setting, group: Sequence[PromptEntry]) -> list[Key]:
    """Return the keys of a group's laps, turn by turn."""
    turns = max(len(question.turns) for question in group)
    return [(setting, group[0].number, turn) for turn in range(turns)]


def _compared(run: RunTimes, answers: Sequence[TurnAnswer] | None, plain: Sequence[TurnAnswer]) -> RunTimes:
    if answers is None:
        return run
    pairs = zip(answers, plain, strict=True)
    return replace(run, different=sum(own.token_ids != other.token_ids for own, other in pairs))
