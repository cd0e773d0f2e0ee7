"""Training examples: conversations and texts as token ids, in batches of similar length."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from soothsay.core.arrays import IntArray
from soothsay.corpus import Tally, encode_text, plain, read_entries
from soothsay.errors import RequestError, TrainingError
from soothsay.tokenizer import Message, Tokenizer

BoolArray = npt.NDArray[np.bool_]

AT_ONCE = 1000
"""Conversations that are encoded in one call: enough to use all cores, and few enough for the memory."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation or piece of text."""

    tokens: IntArray  # [n]
    answer: BoolArray  # [n], the tokens to learn: the assistant's, or all tokens of a plain text
    features: Path | None = None  # the file of its features, if they were kept while the target answered

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first answer. For a plain text: its first half."""
        first = int(self.answer.argmax())
        prompt: list[int] = self.tokens[: first or len(self.tokens) // 2].tolist()
        return prompt


@dataclass(slots=True)
class Skipped:
    """Counts what was read and is not trained on."""

    entries: Tally = field(default_factory=Tally)
    silent: int = 0  # conversations without an answer, and empty texts
    long: int = 0  # conversations whose first answer begins after the part that is kept
    shortened: int = 0  # conversations that lost their last turns, or the end of their only answer

    def __str__(self) -> str:
        """One line for each count that is not 0."""
        kinds = {
            "without an answer, left out": self.silent,
            "too long before the first answer, left out": self.long,
            "too long, cut": self.shortened,
            "malformed, left out": self.entries.bad,
        }
        lines = [f"{count:,} of {self.entries.read:,} {what}" for what, count in kinds.items() if count]
        return "\n".join([*lines, *(f"  {name}" for name in self.entries.named)])


def read_examples(
    files: Sequence[Path], tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[Example], Skipped]:
    """Read conversations and texts from files, and encode them.

    The tokenizer's chat template lays a conversation out. The tokens from the end of the prompt to the end of
    the answer are the assistant's. Some templates write a turn differently once it is an earlier turn: they
    leave out thoughts, for example. Then each answer has an example of its own, in the context in which it
    was given. Without a template, a conversation is treated as a text.

    A conversation longer than `max_tokens` keeps the turns that fit whole, or else a part of its first
    answer. A text is cut into pieces of `max_tokens`.

    Args:
        files: see `soothsay.corpus.read_entries`.
        tokenizer: the target's.
        max_tokens: largest length of an example, at least 2.

    Returns:
        The examples, and counts of what was left out.

    Raises:
        RequestError: a file cannot be read, or more than 1% of the entries are malformed.
        TrainingError: nothing is left to train on.
    """
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
    """A conversation as the template writes it."""

    text: str
    answers: list[tuple[int, int]]  # first character of each answer, and the one after its last


def _lay_out(messages: Sequence[Message], tokenizer: Tokenizer) -> list[_Layout]:
    """Lay out a conversation up to its last answer; see `read_examples`.

    A first message of the assistant is context, not an answer.

    Raises `RequestError` if the template refuses the messages.
    """
    layouts: list[_Layout] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i == 0:
            continue
        prompt = tokenizer.render(messages[:i])
        text = tokenizer.render(messages[: i + 1], add_generation_prompt=False)
        # a line feed after the end of a turn belongs to the template
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False))
        begin = len(prompt) if text.startswith(prompt) else sum(1 for _ in equal)
        answer = begin, len(text.rstrip())
        before: list[tuple[int, int]] = []
        if layouts and text.startswith(layouts[-1].text):
            before = layouts.pop().answers
        layouts.append(_Layout(text, [*before, answer]))
    return layouts


def _encode(
    layouts: Sequence[_Layout], tokenizer: Tokenizer, max_tokens: int, skipped: Skipped
) -> Iterator[Example]:
    """Turn layouts into examples, and count in `skipped` what is left out or cut."""
    # the template writes the special tokens itself
    encoded = tokenizer.backend.encode_batch([layout.text for layout in layouts], add_special_tokens=False)
    for layout, encoding in zip(layouts, encoded, strict=True):
        tokens = np.array(encoding.ids, dtype=np.int64)
        begins = np.fromiter((begin for begin, _ in encoding.offsets), np.int64, len(tokens))
        # A token that covers the border belongs to the prompt: the model never generates it.
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
    """Cut a text into pieces of `max_tokens`. A last piece of one token is dropped: it teaches nothing."""
    ids = encode_text(text, tokenizer)
    while len(tokens := list(islice(ids, max_tokens))) > 1:
        yield Example(np.array(tokens, dtype=np.int64), np.ones(len(tokens), dtype=np.bool_))


def split(examples: Sequence[Example], held_out: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Shuffle the examples and split them: those to train on, and `held_out` others to evaluate on.

    The same `seed` gives the same split. Raises `TrainingError` if nothing would be left to train on.
    """
    if held_out >= len(examples):
        raise TrainingError(
            f"the data has {len(examples)} conversations, and {held_out} are kept for evaluation: give more "
            "data, or a smaller --held-out"
        )
    order = list(range(len(examples)))
    random.Random(seed).shuffle(order)
    return [examples[i] for i in order[held_out:]], [examples[i] for i in order[:held_out]]


def batches(examples: Sequence[Example], batch_tokens: int, seed: int) -> Iterator[list[Example]]:
    """Yield batches of at most `batch_tokens` tokens, padding included, without end.

    Each epoch is shuffled. Then each stretch of about fifty batches is sorted by length, so that there is
    little padding, and the batches of a stretch are shuffled. An example longer than `batch_tokens` is a
    batch of its own. The same `seed` gives the same batches.

    Raises `TrainingError` if there are no examples.
    """
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


def common_tokens(examples: Iterable[Example], count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that are most frequent in answers, in order of their ids.

    If fewer tokens occur, the others with the lowest ids are added.
    """
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(np.asarray(example.tokens)[example.answer].tolist())
    said = [token for token, _ in counts.most_common(count)]
    others = (token for token in range(vocab_size) if token not in counts)
    said += [token for token, _ in zip(others, range(count - len(said)), strict=False)]
    return sorted(said)


LEAD = 3
"""Tokens of the prompt that are kept before an answer, so that its first tokens can be drafted too."""


def answer_texts(examples: Iterable[Example], most: int) -> list[IntArray]:
    """The answers of some examples, each with the `LEAD` tokens before it.

    Args:
        examples: conversations with one or more answers, or plain texts.
        most: limit of tokens in all. Further examples are not read.

    Returns:
        `[n]` token ids of each answer, in order.
    """
    texts: list[IntArray] = []
    left = most
    for example in examples:
        edges = np.flatnonzero(np.diff(example.answer.astype(np.int8), prepend=0, append=0))  # [2 * answers]
        for begin, end in edges.reshape(-1, 2).tolist():
            text = example.tokens[max(begin - LEAD, 0) : end][:left]
            left -= len(text)
            texts.append(text)
            if not left:
                return texts
    return texts
