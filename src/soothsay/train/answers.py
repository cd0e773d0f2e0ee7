"""Lets a target answer the users' messages of a file of conversations, as data to train drafters on.

A drafter predicts its target, so it learns best from its target's own answers (DistillSpec, Zhou et al. 2023,
arXiv 2310.08461).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from soothsay.core.answer import FinishReason
from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.core.sampling import derive_seed
from soothsay.corpus import NAMED, Tally, as_prompt, prompt_items, user_message
from soothsay.drafters.registry import build_drafter
from soothsay.errors import RequestError, TrainingError, reason_of
from soothsay.files import lock
from soothsay.llm import LLM
from soothsay.tokenizer import Message
from soothsay.train.features import FeatureFolder, FeatureRecorder

Progress = Callable[[int, int, int], None]
"""Called with the number of finished conversations, of all conversations, and of tokens of this run."""

_BEGIN = b'{"prompt": '  # of every line in the file


@dataclass(frozen=True, slots=True)
class NumberedMessages:
    """Messages of a conversation, and its number."""

    number: int  # place among the conversations of the file, from 0
    messages: tuple[Message, ...]


@dataclass(slots=True)
class AnswersReport:
    """Counts what `write_answers` did."""

    before: int = 0  # conversations that were in the file already
    written: int = 0  # conversations of this run
    answers: int = 0
    tokens: int = 0  # of the answers
    cut: int = 0  # answers that `max_tokens` ended
    unfinished: int = 0  # conversations whose later turns could not be answered; the earlier ones are written
    left_out: int = 0  # conversations without a single answer
    reasons: list[str] = field(default_factory=list)  # why the first few could not be answered


def read_unanswered(file: Path) -> tuple[list[NumberedMessages], Tally]:
    """Read the conversations of a file without the assistant's messages.

    They are shuffled, so that a run that stops early has some of every kind. The order is always the same.
    The files are those of `bench spec`: see `soothsay.corpus.prompt_items` and `soothsay.corpus.as_prompt`.

    Returns:
        The conversations, and counts of the entries that were read.

    Raises `RequestError` if there are no conversations, or too many that cannot be used.
    """
    tally, asked = Tally(), []
    for where, item in prompt_items(file):
        tally.read += 1
        try:
            entry = as_prompt(item, tally.read)
        except ValueError as error:
            tally.refuse(where, error)
            continue
        later = chain(*map(user_message, entry.later))
        messages = tuple(m for m in (*entry.messages, *later) if m["role"] != "assistant")
        if any(message["role"] == "user" for message in messages):
            asked.append(NumberedMessages(tally.read - 1, messages))
        else:
            tally.refuse(where, "nobody asks anything: 'messages' with the role 'user' are needed")
    tally.check()
    if not asked:
        raise RequestError(f"{file} has no conversations")
    random.Random(0).shuffle(asked)
    return asked, tally


def write_answers(
    llm: LLM,
    asked: Sequence[NumberedMessages],
    out: Path,
    params: SamplingParams,
    *,
    limit: int | None = None,
    features: FeatureFolder | None = None,
    progress: Progress = lambda *_: None,
) -> AnswersReport:
    """Let the model answer turn by turn, in the context of its own answers, and write what is finished.

    `max_requests` of the engine is the number of conversations that run at the same time. When one ends, the
    next begins. Each answer has a seed of its own, so neither the order nor an interruption changes it.

    Args:
        llm: has a tokenizer with a chat template.
        asked: all that `read_unanswered` returned, in its order.
        out: a file of JSON lines, each with a conversation's number as `prompt`, and its `messages`. Complete
            lines that are there already are kept, and their conversations are not answered again.
        params: for all answers. The seeds of the answers are derived from its seed, or from 0.
        limit: number of conversations that the file has in the end. They are the same in every run.
        features: also gets the target's states at every token. Then the model answers without drafts, and the
            engine has no prefix caching.
        progress: see `Progress`.

    Raises:
        TrainingError: the file has other content, or cannot be written. Finished conversations are in it. Or
            no conversation could be answered: they are too long, or the chat template refuses them.
        RequestError: the model has no chat template.
    """
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise RequestError("this model has no chat template, so it cannot answer conversations")
    done, size = _read_answers(out, asked)
    todo = [one for one in asked[:limit] if one.number not in done]
    report = AnswersReport(before=min(len(asked), limit or len(asked)) - len(todo))
    total = report.before + len(todo)
    progress(report.before, total, 0)
    with _opened(out, size) as file:
        for answered in _AnswerRun(llm, params, report, features).answers(todo):
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
    """A conversation that is being answered."""

    number: int
    waiting: list[Message]  # messages of others that come later
    messages: list[Message] = field(default_factory=list)  # messages so far, answers included
    turn: int = 0  # number of the last user's message, from 1
    heard: int = 0  # number of messages up to the last answer

    def ask(self) -> bool:
        """Append messages up to and including the next of a user. Returns whether there is one."""
        while self.waiting:
            self.messages.append(self.waiting.pop(0))
            if self.messages[-1]["role"] == "user":
                self.turn += 1
                return True
        return False


class _AnswerRun:
    """Runs conversations through the engine, as many at a time as it takes requests."""

    def __init__(
        self, llm: LLM, params: SamplingParams, report: AnswersReport, features: FeatureFolder | None
    ):
        self.llm, self.params, self.report, self.features = llm, params, report, features
        target = llm.engine.target
        self.recorder = None if features is None else FeatureRecorder(target, features.taps)
        self.drafter = self.recorder or build_drafter(llm.drafter, target)
        self.running: dict[Request, _Conversation] = {}

    def answers(self, asked: Sequence[NumberedMessages]) -> Iterator[NumberedMessages]:
        """Yield each conversation with its answers when it ends. It has no messages if it has no answer."""
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
                for request in [one for one in self.running if one.finish_reason is not None]:
                    conversation = self.running.pop(request)
                    if request.failure is not None:
                        reason = reason_of(request.failure)
                        raise TrainingError(f"the engine failed at a conversation: {reason}")
                    self.report.answers += 1
                    self.report.tokens += request.num_output
                    self.report.cut += request.finish_reason is FinishReason.LENGTH
                    if self.recorder is not None and self.features is not None:
                        name = f"{conversation.number:07}-{conversation.turn}"
                        tokens = request.tokens.tolist()
                        self.features.write(name, tokens, request.num_prompt, *self.recorder.take(request))
                    conversation.messages.append({"role": "assistant", "content": request.answer.text})
                    conversation.heard = len(conversation.messages)
                    if not self._go_on(conversation):
                        yield self._finished(conversation)
        finally:
            for request in self.running:
                self.llm.engine.cancel(request)

    def _go_on(self, conversation: _Conversation) -> bool:
        """Start the next answer. Returns False if there is no further question, or it cannot be answered."""
        if not conversation.ask():
            return False
        seed = derive_seed(self.params.seed or 0, (conversation.number << 16) + conversation.turn)
        try:
            prompt, params = self.llm.chat_prompt(conversation.messages), replace(self.params, seed=seed)
            (request,) = self.llm.requests(prompt, params, drafter=self.drafter)
        except RequestError as error:
            if len(self.report.reasons) < NAMED:
                self.report.reasons.append(f"conversation {conversation.number}: {error}")
            return False
        self.llm.engine.add(request)
        self.running[request] = conversation
        return True

    def _finished(self, conversation: _Conversation) -> NumberedMessages:
        """Count a conversation that has ended, and drop the questions after its last answer."""
        unanswered = len(conversation.messages) > conversation.heard
        self.report.left_out += not conversation.heard
        self.report.unfinished += bool(conversation.heard) and unanswered
        return NumberedMessages(conversation.number, tuple(conversation.messages[: conversation.heard]))


# the file


def _read_answers(path: Path, asked: Sequence[NumberedMessages]) -> tuple[set[int], int]:
    """Return the numbers of the conversations in a file, and the size of its complete lines in bytes.

    Raises `TrainingError` if the file has anything but answers to the conversations `asked`.
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
    """Open a file to append after its first `size` bytes; the rest is cut off. Writes are not buffered."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
        try:
            lock(file.fileno())
            file.truncate(size)
        except OSError:
            file.close()
            raise
    except BlockingIOError:
        raise TrainingError(
            f"another process writes {path}; wait for its end, or name another file"
        ) from None
    except OSError as error:
        raise TrainingError(f"{path} cannot be written ({error.strerror})") from None
    return file


def _write(file: BinaryIO, path: Path, answered: NumberedMessages) -> None:
    """Append a conversation as one line. Raises `TrainingError` if it cannot be written."""
    line = _BEGIN + json.dumps(answered.number).encode() + b', "messages": '
    line += json.dumps(answered.messages, ensure_ascii=False).encode() + b"}\n"
    try:
        while line:
            line = line[file.write(line) :]
    except OSError as error:
        raise TrainingError(
            f"{path} cannot be written ({error.strerror}): make room, and run this again; "
            "the conversations in it are not answered again"
        ) from None
