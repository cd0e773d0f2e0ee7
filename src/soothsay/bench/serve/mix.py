"""What is asked under load: real questions, alone or behind long real texts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from soothsay.bench.prompts import read_prompts
from soothsay.bench.spec.questions import read_questions
from soothsay.errors import RequestError
from soothsay.tokenizer import Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says, turn by turn; the answers are the server's."""

    turns: tuple[str, ...]
    before: tuple[Message, ...] = ()  # messages that come before the first turn


def read_conversations(path: Path) -> list[Conversation]:
    """Those of any file that `soothsay.bench.prompts.read_prompts` reads, each with one turn: what the user
    says last.

    Raises `RequestError` for what is no such file, and for a conversation in which no user speaks.
    """
    conversations = []
    for entry in read_prompts(path):
        if isinstance(entry.prompt, str):
            conversations.append(Conversation((entry.prompt,)))
            continue
        spoken = [place for place, message in enumerate(entry.prompt) if message["role"] == "user"]
        if not spoken:
            raise RequestError(f"{path}, prompt {entry.id}: no message is the user's")
        last = spoken[-1]
        conversations.append(Conversation((entry.prompt[last]["content"],), entry.prompt[:last]))
    return conversations


def read_spec_bench(path: Path) -> list[Conversation]:
    """Those of a file of Spec-Bench, with all their turns. Raises `RequestError` if it is none."""
    return [Conversation(question.turns) for question in read_questions(path)]


class Mix:
    """An endless sequence of conversations; the same arguments give the same.

    All of them come in an order drawn by the seed before the first comes again.

    Args:
        conversations: to be drawn from. Their own words, in the order given, are also the long texts.
        seed: of the order, and of which prompts are long.
        turns: of a conversation, at most.
        shared_prefix: words of a system message that all have.
        long_share: share of conversations that begin with a long text, each another one.
        long_words: words of such a text.

    Raises `RequestError` if there is no conversation, or a number makes no sense.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
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
        """Conversations that differ."""
        return len(self._order)

    def __getitem__(self, index: int) -> Conversation:
        """Of any place from 0 on."""
        one = self._order[index % len(self._order)]
        first, *later = one.turns[: self._turns]
        rng = random.Random(f"{self._seed} {index}")
        if rng.random() < self._long_share:
            first = f"{self._passage(rng.randrange(len(self._words)), self._long_words)}\n\n{first}"
        before = list(one.before)
        if self._prefix:
            own = before.pop(0)["content"] if before and before[0]["role"] == "system" else ""
            before.insert(0, {"role": "system", "content": f"{self._prefix}\n\n{own}".rstrip()})
        return Conversation((first, *later), tuple(before))

    @property
    def digest(self) -> str:
        """Tells mixes apart."""
        said = [(one.before, one.turns[: self._turns]) for one in self._order]
        facts = (said, self._prefix, self._long_share, self._long_words, self._seed)
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=4).hexdigest()

    def _passage(self, begin: int, words: int) -> str:
        """So many words from there on, and from the first again where they end."""
        return " ".join(self._words[(begin + i) % len(self._words)] for i in range(words))
