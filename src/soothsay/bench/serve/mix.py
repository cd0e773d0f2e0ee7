"""Makes the conversations that are sent under load: real questions, alone or after long texts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from soothsay.bench.journal import short_hash
from soothsay.bench.prompt_files import read_prompts
from soothsay.bench.spec.questions import read_questions
from soothsay.bench.texts import TOPICS
from soothsay.errors import RequestError
from soothsay.tokenizer import Message

REQUESTS = (
    "Tell me a story about {topic}.",
    "Write a poem about {topic}, in four verses.",
    "Explain {topic} to a child of eight, in a few sentences.",
    "Name ten facts about {topic}, one a line, each with a number.",
    "Write a Python class that represents {topic}, with a method that describes it, and show how it is used.",
    "Translate into German: the children talked about {topic} all day, and then they drew pictures.",
    "Write a letter to a newspaper about {topic}, with three reasons to care.",
    "A shop sells {topic} for 7 dollars a dozen. Work out, step by step, what 60 of them cost.",
)
"""What the default conversations ask; they differ in how well they can be drafted."""


@dataclass(frozen=True, slots=True)
class UserTurns:
    """The user's side of a conversation; the server gives the answers."""

    turns: tuple[str, ...]
    before: tuple[Message, ...] = ()  # messages before the first turn


def default_conversations() -> list[UserTurns]:
    """Return 256 conversations: eight short requests, all about one of 32 topics. No two begin alike."""
    return [
        UserTurns(tuple(text.format(topic=topic) for text in (*REQUESTS[first:], *REQUESTS[:first])))
        for topic in TOPICS.split()
        for first in range(len(REQUESTS))
    ]


def read_conversations(path: Path) -> list[UserTurns]:
    """Read a file of prompts; see `soothsay.bench.prompt_files.read_prompts`.

    Each conversation has one turn: the user's last message.

    Raises `RequestError` for other files, and for a conversation without a message of the user.
    """
    conversations = []
    for entry in read_prompts(path):
        if isinstance(entry.prompt, str):
            conversations.append(UserTurns((entry.prompt,)))
            continue
        spoken = [place for place, message in enumerate(entry.prompt) if message["role"] == "user"]
        if not spoken:
            raise RequestError(f"{path}, prompt {entry.id}: no message is the user's")
        last = spoken[-1]
        conversations.append(UserTurns((entry.prompt[last]["content"],), entry.prompt[:last]))
    return conversations


def read_spec_bench(path: Path) -> list[UserTurns]:
    """Read a Spec-Bench file, with all turns. Raises `RequestError` for other files."""
    return [UserTurns(question.turns) for question in read_questions(path)]


class Mix:
    """An endless sequence of conversations, determined by the arguments.

    All conversations come once, in an order drawn with the seed, before the first comes again.

    Args:
        conversations: the conversations. Their words, in the order given, also make the long texts.
        seed: seed of the order, and of the choice of long prompts.
        turns: largest number of turns of a conversation.
        shared_prefix: number of words of a system message that all conversations have.
        long_share: share of conversations that begin with a long text. The texts differ.
        long_words: number of words of a long text.

    Raises `RequestError` if there is no conversation or a number is out of range.
    """

    def __init__(
        self,
        conversations: Sequence[UserTurns],
        seed: int = 0,
        *,
        turns: int = 1,
        shared_prefix: int = 0,
        long_share: float = 0.0,
        long_words: int = 1000,
    ):
        if not conversations:
            raise RequestError("there is nothing to ask")
        if turns < 1 or shared_prefix < 0 or long_words < 1 or not 0 <= long_share <= 1:
            raise RequestError(
                "a mix needs turns and long_words of at least 1, shared_prefix of at least 0, and long_share "
                f"from 0 to 1; there are {turns}, {long_words}, {shared_prefix} and {long_share}"
            )
        self._seed, self._turns = seed, turns
        self._long_share, self._long_words = long_share, long_words
        self._order = list(conversations)
        self._words = list(chain.from_iterable(turn.split() for one in conversations for turn in one.turns))
        self._prefix = self._passage(0, shared_prefix)
        random.Random(seed).shuffle(self._order)

    def __len__(self) -> int:
        """Return the number of different conversations."""
        return len(self._order)

    def __getitem__(self, index: int) -> UserTurns:
        """Return the conversation at a place, 0 or above."""
        one = self._order[index % len(self._order)]
        first, *later = one.turns[: self._turns]
        rng = random.Random(f"{self._seed} {index}")
        if rng.random() < self._long_share:
            first = f"{self._passage(rng.randrange(len(self._words)), self._long_words)}\n\n{first}"
        before = list(one.before)
        if self._prefix:
            own = before.pop(0)["content"] if before and before[0]["role"] == "system" else ""
            before.insert(0, {"role": "system", "content": f"{self._prefix}\n\n{own}".rstrip()})
        return UserTurns((first, *later), tuple(before))

    @property
    def digest(self) -> str:
        """A short hash of all that the mix is made of."""
        said = [(one.before, one.turns[: self._turns]) for one in self._order]
        facts = (said, self._prefix, self._long_share, self._long_words, self._seed)
        return short_hash(json.dumps(facts))

    def _passage(self, begin: int, words: int) -> str:
        """Return `words` words from word `begin` on, cyclically."""
        return " ".join(self._words[(begin + i) % len(self._words)] for i in range(words))
