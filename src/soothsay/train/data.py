"""What is trained on: conversations and texts as token ids, in batches of about equal length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from soothsay.corpus import Tally, plain, read_entries
from soothsay.errors import RequestError, TrainingError
from soothsay.tokenizer import Message, Tokenizer

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

AT_ONCE = 1000
"""Conversations that are encoded together: enough for all cores, few enough to be held twice in memory."""

STRETCH = 2**16
"""Characters of a text that are encoded together, at least, where it has ends of lines."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation or piece of text."""

    tokens: IntArray  # [n]
    answer: BoolArray  # [n], tokens that the model should say: the assistant's, or all of a plain text

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first that the model should say; of a plain text, the first half."""
        first = int(self.answer.argmax())
        prompt: list[int] = self.tokens[: first or len(self.tokens) // 2].tolist()
        return prompt


@dataclass(slots=True)
class Skipped:
    """What was read, and what is not trained on."""

    entries: Tally = field(default_factory=Tally)
    silent: int = 0  # conversations in which nobody answers, and empty texts
    long: int = 0  # conversations whose first answer begins beyond what is kept
    shortened: int = 0  # conversations that lost their last turns, or the end of their only answer

    def __str__(self) -> str:
        """One line for each kind of loss; none if there is none."""
        kinds = {
            "without an answer, left out": self.silent,
            "longer than that before an answer begins, left out": self.long,
            "too long, cut": self.shortened,
            "malformed, left out": self.entries.bad,
        }
        lines = [f"{count:,} of {self.entries.read:,} {what}" for what, count in kinds.items() if count]
        return "\n".join([*lines, *(f"  {name}" for name in self.entries.named)])


def read_examples(
    files: Sequence[Path], tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[Example], Skipped]:
    """Conversations and texts of `files`, for what they may be see `soothsay.corpus.read_entries`.

    A conversation is laid out by the tokenizer's chat template, whatever it is; what stands between the
    prompt that asks for an answer and the answer's end is the assistant's. Where a template writes earlier
    turns in another way than when they were new (leaving thoughts out, say), each answer has an example of
    its own, in the context in which it is given. Without a template, a conversation is a text.

    A conversation of more than `max_tokens` keeps the whole turns that fit, or at least a part of its first
    answer. A text is cut into pieces of `max_tokens`.

    Returns:
        The examples, and what was left out.

    Raises:
        RequestError: a file cannot be read, or more than one entry in a hundred is malformed.
        TrainingError: nothing is left to train on.
    """
    if max_tokens < 2:
        raise TrainingError(f"max_tokens={max_tokens} is not possible: it must be at least 2")
    examples: list[Example] = []
    skipped = Skipped()
    waiting: list[_Layout] = []
    for file in files:
        for where, entry in read_entries(file, skipped.entries):
            if isinstance(entry, str) or not tokenizer.has_chat_template:
                text = entry if isinstance(entry, str) else plain(entry)
                pieces = list(_pieces(text, tokenizer, max_tokens))
                skipped.silent += not pieces
                examples += pieces
                continue
            try:
                layouts = _lay_out(entry, tokenizer)
            except RequestError as error:
                skipped.entries.refuse(where, error)
                continue
            skipped.silent += not layouts
            waiting += layouts
            if len(waiting) >= AT_ONCE:
                examples += _encode(waiting, tokenizer, max_tokens, skipped)
                waiting = []
    examples += _encode(waiting, tokenizer, max_tokens, skipped)
    skipped.entries.check()
    if not examples:
        names = ", ".join(map(str, files))
        raise TrainingError(f"nothing to train on in {names}: {str(skipped) or 'there are no entries'}")
    return examples, skipped


@dataclass(frozen=True, slots=True)
class _Layout:
    text: str
    answers: list[tuple[int, int]]  # begin and end of each, in characters


def _lay_out(messages: Sequence[Message], tokenizer: Tokenizer) -> list[_Layout]:
    """A conversation up to its last answer, as the template writes it; see `read_examples`.

    What the assistant says before anybody has asked is context, no answer.

    Raises `RequestError` if the template refuses it.
    """
    layouts: list[_Layout] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        prompt = tokenizer.render(messages[:i])
        text = tokenizer.render(messages[: i + 1], add_generation_prompt=False)
        # a line feed behind the end of a turn is the template's
        answer = _equal_characters(prompt, text), len(text.rstrip())
        before: list[tuple[int, int]] = []
        if layouts and text.startswith(layouts[-1].text):
            before = layouts.pop().answers
        layouts.append(_Layout(text, [*before, answer]))
    return layouts


def _equal_characters(left: str, right: str) -> int:
    """The length of the common beginning."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (own, other) in pairs if own != other), len(right))


def _encode(
    layouts: Sequence[_Layout], tokenizer: Tokenizer, max_tokens: int, skipped: Skipped
) -> Iterator[Example]:
    # the template writes its own special tokens
    encoded = tokenizer.backend.encode_batch([layout.text for layout in layouts], add_special_tokens=False)
    for layout, encoding in zip(layouts, encoded, strict=True):
        tokens = np.array(encoding.ids, dtype=np.int64)
        begins = np.fromiter((begin for begin, _ in encoding.offsets), np.int64, len(tokens))
        # a token that reaches from the prompt into the answer is not said: prompts end before answers begin
        answers = np.searchsorted(begins, np.array(layout.answers))  # [answers, 2]
        size = len(tokens)
        if size > max_tokens:
            fitting = answers[answers[:, 1] <= max_tokens, 1]
            size = int(fitting[-1]) if len(fitting) else max_tokens
        answer = np.zeros(size, dtype=np.bool_)
        for begin, end in answers:
            answer[begin:end] = True
        if not answer[1:].any():  # nothing predicts the first token
            skipped.long += 1
            continue
        skipped.shortened += bool(answers[-1, 1] > size)
        yield Example(tokens[:size], answer)


def _pieces(text: str, tokenizer: Tokenizer, max_tokens: int) -> Iterator[Example]:
    """A text in pieces of `max_tokens`; a last one of a single token teaches nothing."""
    tokens: list[int] = []
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + STRETCH) + 1 or len(text)
        tokens += tokenizer.encode(text[begin:end], special=begin == 0)
        begin = end
        while len(tokens) >= max_tokens:
            yield _said(tokens[:max_tokens])
            del tokens[:max_tokens]
    if len(tokens) > 1:
        yield _said(tokens)


def _said(tokens: Sequence[int]) -> Example:
    return Example(np.array(tokens, dtype=np.int64), np.ones(len(tokens), dtype=np.bool_))


def split(examples: Sequence[Example], held_out: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Shuffled, the same way for the same `seed`: all but `held_out` of the examples, and those.

    Raises `TrainingError` if none would be left to train on.
    """
    if held_out >= len(examples):
        raise TrainingError(f"of {len(examples)} examples, {held_out} cannot be held out; hold out fewer")
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    return [examples[i] for i in order[held_out:]], [examples[i] for i in order[:held_out]]


def batches(examples: Sequence[Example], batch_tokens: int, seed: int) -> Iterator[list[Example]]:
    """Batches of at most `batch_tokens`, padding counted, without end; the same ones for the same `seed`.

    Each epoch is shuffled, and in stretches of fifty batches sorted by length, so that little is padding. An
    example longer than `batch_tokens` is a batch of its own.

    Raises `TrainingError` if there are no examples.
    """
    if not examples:
        raise TrainingError("there are no examples to make batches of")
    epoch = 0
    while True:
        rng = random.Random(f"{seed}/{epoch}")
        order = list(range(len(examples)))
        rng.shuffle(order)
        mean = sum(len(example.tokens) for example in examples) / len(examples)
        stretch = max(1, round(50 * batch_tokens / mean))
        for first in range(0, len(order), stretch):
            part = sorted(order[first : first + stretch], key=lambda i: len(examples[i].tokens))
            made: list[list[int]] = [[]]
            for i in part:
                if made[-1] and (len(made[-1]) + 1) * len(examples[i].tokens) > batch_tokens:
                    made.append([])
                made[-1].append(i)
            rng.shuffle(made)
            for batch in made:
                yield [examples[i] for i in batch]
        epoch += 1
