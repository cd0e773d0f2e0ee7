"""What the target itself answers to the users of a file of conversations.

A drafter guesses what its target will say, so it learns best from what its target says (DistillSpec, Zhou et
al. 2023, arXiv 2310.08461).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from soothsay.corpus import NAMED, Tally, read_entries
from soothsay.drafters import Drafter, Observation, build_drafter
from soothsay.engine.answer import FinishReason
from soothsay.engine.params import SamplingParams
from soothsay.engine.request import Request
from soothsay.engine.sampling import derive_seed
from soothsay.engine.tree import DraftTree
from soothsay.errors import RequestError, TrainingError
from soothsay.llm import LLM
from soothsay.result import Choice, Stream
from soothsay.tokenizer import Message

Progress = Callable[[int, int, int], None]
"""Called with the conversations that are done, how many there are, and the tokens written by this run."""

_BEGIN = b'{"prompt": '  # of every line that is written


@dataclass(frozen=True, slots=True)
class Asked:
    """What a conversation's users say, and what else is not the assistant's."""

    number: int  # of the conversation among those of its file, from 0
    messages: tuple[Message, ...]


@dataclass(slots=True)
class Report:
    """What `write_answers` did."""

    before: int = 0  # conversations that were in the file already
    written: int = 0  # conversations
    answers: int = 0
    tokens: int = 0  # in them
    cut: int = 0  # answers that `max_tokens` ended
    unfinished: int = 0  # conversations whose later turns could not be answered; the earlier ones are written
    left_out: int = 0  # conversations that could not be answered at all
    reasons: list[str] = field(default_factory=list)  # why, of the first few


def read_questions(file: Path) -> tuple[list[Asked], Tally]:
    """The conversations of a file without what the assistant says, shuffled, always the same way: whoever
    stops early has some of every kind. See `soothsay.corpus.read_entries` for files that can be read.

    Raises `RequestError` if there are none, or too many that cannot be used.
    """
    tally, asked = Tally(), []
    for where, entry in read_entries(file, tally):
        messages = () if isinstance(entry, str) else tuple(m for m in entry if m["role"] != "assistant")
        if any(message["role"] == "user" for message in messages):
            asked.append(Asked(tally.read - 1, messages))
        else:
            tally.refuse(where, "nobody asks anything: 'messages' with the role 'user' are needed")
    tally.check()
    if not asked:
        raise RequestError(f"{file} has no conversations")
    random.Random(0).shuffle(asked)
    return asked, tally


def write_answers(
    llm: LLM,
    asked: Sequence[Asked],
    out: Path,
    params: SamplingParams,
    *,
    limit: int | None = None,
    progress: Progress = lambda *_: None,
) -> Report:
    """Let the model answer, turn by turn in the context of its own answers, and write what is finished.

    As many conversations are on their way as the engine takes requests at once (`max_requests`); when one
    ends, the next comes in. Each has seeds of its own, so neither the order nor an interruption matters.

    Args:
        llm: with a tokenizer and a chat template.
        asked: all of `read_questions`, in its order.
        out: a file of JSON lines, each with the conversation's number as `prompt`, and its `messages`. What
            is there already is kept and not asked again; a last line that was cut short is dropped.
        params: for all answers; its seed, or 0, is what theirs are derived from.
        limit: conversations to have in the end; the same ones come first in any run.
        progress: see `Progress`.

    Raises:
        TrainingError: the file holds something else, or cannot be written; what was finished is in it. Or no
            conversation could be answered: they are too long, or the chat template refuses them.
        RequestError: the model has no chat template.
    """
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise RequestError("this model has no chat template, so it cannot answer conversations")
    done, size = _read_answers(out, asked)
    todo = [one for one in asked[:limit] if one.number not in done]
    report = Report(before=min(len(asked), limit or len(asked)) - len(todo))
    total = report.before + len(todo)
    progress(report.before, total, 0)
    with _opened(out, size) as file:
        for answered in _Desk(llm, params, report).answers(todo):
            if answered.messages:
                _write(file, out, answered)
                report.written += 1
            progress(report.before + report.written + report.left_out, total, report.tokens)
    if todo and not report.written:
        raise TrainingError(f"none of {len(todo)} conversations could be answered: {report.reasons[0]}")
    return report


# answering


@dataclass(slots=True)
class _Conversation:
    number: int
    waiting: list[Message]  # what is still to be said by others
    messages: list[Message] = field(default_factory=list)  # what was said, answers included
    turn: int = 0  # of the user who spoke last, from 1
    heard: int = 0  # messages up to the last answer

    def ask(self) -> bool:
        """Let others speak until a user has asked something; whether one has."""
        while self.waiting:
            self.messages.append(self.waiting.pop(0))
            if self.messages[-1]["role"] == "user":
                self.turn += 1
                return True
        return False

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
        self.heard = len(self.messages)


class _Desk:
    """Keeps the engine's batch full of conversations."""

    def __init__(self, llm: LLM, params: SamplingParams, report: Report):
        self.llm, self.params, self.report = llm, params, report
        self.drafter = _Ended(build_drafter(llm.drafter, llm.engine.target))
        self.running: dict[int, tuple[_Conversation, Stream]] = {}  # by the request's seed

    def answers(self, asked: Sequence[Asked]) -> Iterator[Asked]:
        """The conversations with their answers as they are finished; without messages where none can be."""
        waiting = iter(asked)
        try:
            while True:
                while len(self.running) < self.llm.config.max_requests and (one := next(waiting, None)):
                    conversation = _Conversation(one.number, list(one.messages))
                    if not self._go_on(conversation):
                        yield self._finished(conversation)
                if not self.running:
                    return
                self.llm.engine.step()
                for seed in self.drafter.take():
                    conversation, stream = self.running.pop(seed)
                    self._note(stream.choice)
                    conversation.answer(stream.choice.text)
                    if not self._go_on(conversation):
                        yield self._finished(conversation)
        finally:
            for _, stream in self.running.values():
                stream.cancel()

    def _go_on(self, conversation: _Conversation) -> bool:
        """Have the next question answered. False: there is none, or it cannot be."""
        if not conversation.ask():
            return False
        seed = derive_seed(self.params.seed or 0, (conversation.number << 16) + conversation.turn)
        try:
            prompt = self.llm.chat_prompt(conversation.messages)
            stream = self.llm.stream(prompt, replace(self.params, seed=seed), drafter=self.drafter)
        except RequestError as error:
            if len(self.report.reasons) < NAMED:
                self.report.reasons.append(f"conversation {conversation.number}: {error}")
            return False
        self.running[seed] = conversation, stream
        return True

    def _note(self, choice: Choice) -> None:
        self.report.answers += 1
        self.report.tokens += len(choice.token_ids)
        self.report.cut += choice.finish_reason is FinishReason.LENGTH

    def _finished(self, conversation: _Conversation) -> Asked:
        """Without questions that could not be answered."""
        unanswered = len(conversation.messages) > conversation.heard
        self.report.left_out += not conversation.heard
        self.report.unfinished += bool(conversation.heard) and unanswered
        return Asked(conversation.number, tuple(conversation.messages[: conversation.heard]))


class _Ended(Drafter):
    """Guesses as another drafter does, and notes which requests have ended."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.taps, self.max_nodes = drafter, drafter.taps, drafter.max_nodes
        self._seeds: list[int] = []

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The other's guesses."""
        return self.drafter.propose(requests)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Let the other see."""
        self.drafter.observe(observations)

    def release(self, request: Request) -> None:
        """Note an end; a request that lost its blocks comes again."""
        if request.finish_reason is not None:
            self._seeds.append(request.seed)
        self.drafter.release(request)

    def take(self) -> list[int]:
        """The seeds of those that have ended since it was asked last."""
        seeds, self._seeds = self._seeds, []
        return seeds


# the file


def _read_answers(path: Path, asked: Sequence[Asked]) -> tuple[set[int], int]:
    """The numbers of the conversations in a file, and the bytes that its whole lines have.

    Raises `TrainingError` if it holds anything but answers to these.
    """
    questions = {one.number: one.messages for one in asked}
    done, size = set[int](), 0
    try:
        if not path.exists():
            return done, size
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                whole = line.endswith(b"\n")
                if not (_answers(line, questions) if whole else line.startswith(_BEGIN[: len(line)])):
                    raise TrainingError(
                        f"{path}, line {number}: this is no answer to these conversations; name another file"
                    )
                if whole:
                    done.add(json.loads(line)["prompt"])
                    size += len(line)
    except OSError as error:
        raise TrainingError(f"{path} cannot be read ({error.strerror})") from None
    return done, size


def _answers(line: bytes, questions: dict[int, tuple[Message, ...]]) -> bool:
    """Whether a line of a file answers one of the questions."""
    try:
        entry: Any = json.loads(line)
        said = [message for message in entry["messages"] if message["role"] != "assistant"]
        asked = [dict(message) for message in questions[entry["prompt"]]]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(said) and said == asked[: len(said)]


def _opened(path: Path, size: int) -> BinaryIO:
    """The file, cut to `size` bytes, to be written to behind them; what is written is on its way at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
        file.truncate(size)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written ({error.strerror})") from None
    return file


def _write(file: BinaryIO, path: Path, answered: Asked) -> None:
    line = _BEGIN + json.dumps(answered.number).encode() + b', "messages": '
    line += json.dumps(answered.messages, ensure_ascii=False).encode() + b"}\n"
    try:
        while line:
            line = line[file.write(line) :]
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written ({error.strerror}): make room, and run this again; "
            "what is finished is in it, and is not asked again"
        ) from None
