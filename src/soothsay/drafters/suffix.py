"""Suffix matching: wherever the last tokens stood before, in this request or any other, what came next?

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) grows a tree by how often each continuation came;
SAM-Decoding (Hu et al. 2024, arXiv 2411.10666) carries the longest match along in a suffix automaton, token
by token. No model, no training: strong wherever answers repeat their prompts, themselves or each other, as
those of agents do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from soothsay.drafters.automaton import NOWHERE, Place, Reading, Start, new_automaton
from soothsay.drafters.base import Drafter, Target, check_at_least_one
from soothsay.engine.request import Request
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError

FORMAT = "soothsay suffix store 1"

OWN_DOUBT, STORE_DOUBT = 2.0, 8.0
"""Match lengths at which half of a lone occurrence is believed, in a request's own text and in others'. What
a request has said itself it says again more often. With 1 and 8 sibyl gets 0.5 % more tokens a step; with
these, guesses are right nearly as often as they say."""

PIECE = 512
"""Tokens of ended requests that are read before a step's guesses, at most: nobody waits long for it, and
where nobody asks, nothing is read."""


class Generation:
    """Texts that were said one after the other and will be forgotten together. They are read bit by bit.

    Attributes:
        automaton: what has been read.
        texts: all of them.
        size: their tokens, read or not.
    """

    __slots__ = ("_unread", "automaton", "size", "texts")

    def __init__(self, longest: int):
        self.automaton = new_automaton(longest + 1)  # a match, and what comes behind it
        self.texts: list[npt.NDArray[np.int32]] = []
        self.size = 0
        self._unread: deque[tuple[Reading, npt.NDArray[np.int32]]] = deque()

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """Keep a text, to be read later."""
        self.texts.append(tokens.astype(np.int32))
        self.size += len(tokens)
        self._unread.append((Reading(), self.texts[-1]))

    def read(self, most: int) -> int:
        """Read on, the oldest text first. Returns how many tokens it was."""
        left = most
        while left and self._unread:
            reading, tokens = self._unread.popleft()
            piece, rest = tokens[:left], tokens[left:]
            self.automaton.read(reading, piece.astype(np.int64))
            if len(rest):
                self._unread.appendleft((reading, rest))
            left -= len(piece)
        return most - left


class _Text:
    """A request as far as it has been read."""

    __slots__ = ("_automaton", "_known", "_matches", "_places", "_reading", "_size")

    def __init__(self, longest: int):
        self._automaton = new_automaton(longest + 1)
        self._reading = Reading()
        self._size = 0
        self._places: dict[Generation, Place] = {}
        self._known: list[tuple[Generation, int]] = []  # what `_matches` is of, and how much they had read
        self._matches: list[Start] = []

    def matches(self, tokens: npt.NDArray[np.int64], generations: Sequence[Generation]) -> list[Start]:
        """The longest match of a text in itself and in each generation, where there is one.

        Args:
            tokens: of the text, which goes on from call to call.
            generations: some may have come since, others have gone.
        """
        known = [(generation, generation.automaton.size) for generation in generations]
        if self._size == len(tokens) and self._known == known:
            return self._matches
        new = tokens[self._size :]
        self._automaton.read(self._reading, new)
        self._size, self._known = len(tokens), known
        before, self._places = self._places, {}
        for generation in generations:
            automaton, place = generation.automaton, before.get(generation)
            unseen = tokens[-automaton.counted :] if place is None else new
            self._places[generation] = automaton.follow(place or NOWHERE, unseen)
        starts = [(self._automaton, OWN_DOUBT, self._automaton.repeated(self._reading))]
        starts += [(generation.automaton, STORE_DOUBT, place) for generation, place in self._places.items()]
        self._matches = [start for start in starts if start[2] != NOWHERE]
        return self._matches


class Suffix(Drafter):
    """Proposes what followed the longest matches of the last tokens, in this request and in those before it.

    Each request has an automaton of its own, of prompt and answer. The texts of requests that have ended are
    in two generations of a common one: when the younger has half of `memory`, the older is dropped. A token
    takes 0.2 microseconds to read and 100 bytes to keep; without native kernels, 1.5 and 480.

    Args:
        target: the model to draft for.
        nodes: of a tree, the root included, at most.
        factor: nodes, at most, for each token of the longest match.
        longest: tokens of a match that are looked at.
        memory: tokens of ended requests that are kept, the oldest forgotten first; 0 keeps none.
        store: a file that `save` has written, to begin with.
    """

    def __init__(
        self,
        target: Target,
        nodes: int = 32,
        factor: int = 16,
        longest: int = 32,
        memory: int = 200_000,
        store: str | Path = "",
    ):
        check_at_least_one("suffix", nodes=nodes, factor=factor, longest=longest)
        if memory < 0:
            raise DrafterError(f"suffix(memory={memory}): it must be at least 0")
        self.target, self.max_nodes = target, nodes
        self.factor, self.longest, self.memory, self.store = factor, longest, memory, store
        self.reset()

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The likeliest continuations of each request; the root alone where nothing matches."""
        left = PIECE
        for generation in self._generations:
            left -= generation.read(left)
        return [self._propose(request) for request in requests]

    def signal(self, request: Request) -> int:
        """The number of bits of the longest match's length."""
        return _longest(self._matches(request)).bit_length()

    def release(self, request: Request) -> None:
        """Keep the text of a request that has ended. One that comes again goes on where it was."""
        if request.finish_reason is not None:
            self._texts.pop(request, None)
            self._keep(request.tokens)

    def reset(self) -> None:
        """Forget all requests, and begin with `store` again."""
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()
        self._generations = [Generation(self.longest)]
        if self.store:
            self.load(self.store)

    def save(self, path: str | Path) -> None:
        """Write the texts of ended requests to a file, a safetensors of `tokens` and `lengths`."""
        texts = [text for generation in self._generations for text in generation.texts]
        tensors = {
            "tokens": np.concatenate([np.empty(0, dtype=np.int32), *texts]),  # [sum of lengths]
            "lengths": np.array([len(text) for text in texts], dtype=np.int64),  # [texts], the oldest first
        }
        save_file(tensors, path, {"format": FORMAT, "vocabulary": self._vocabulary()})

    def load(self, path: str | Path) -> None:
        """Read what `save` has written, as if those requests had ended now.

        Raises `DrafterError` if the file is not there or damaged, or was made with another vocabulary.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                about = file.metadata() or {}
                tokens, lengths = file.get_tensor("tokens"), file.get_tensor("lengths")
        except (OSError, SafetensorError) as error:
            raise DrafterError(
                f"suffix: the store {path} cannot be read ({error}); name a file that save() has written"
            ) from None
        if about.get("format") != FORMAT or (tokens.dtype, lengths.dtype) != (np.int32, np.int64):
            raise DrafterError(f"suffix: {path} is not a store that save() has written")
        if about.get("vocabulary") != self._vocabulary():
            raise DrafterError(
                f"suffix: the store {path} was made with another vocabulary; its tokens mean something else "
                "here. Begin without it, and save a new one"
            )
        if tokens.ndim != 1 or lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != len(tokens):
            raise DrafterError(
                f"suffix: the store {path} is damaged: its texts do not have the stated lengths"
            )
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.target.model.config.vocab_size:
            raise DrafterError(f"suffix: the store {path} is damaged: it has tokens that do not exist")
        ends = np.cumsum(lengths)
        for text in np.split(tokens, ends[:-1]):
            self._keep(text)
        for generation in self._generations:
            generation.read(generation.size)

    def _propose(self, request: Request) -> DraftTree:
        tree = DraftTree(int(request.tokens[-1]))
        nodes, depth = min(request.max_nodes, self.max_nodes), request.max_depth
        if nodes > 1 and depth > 0:
            matches = self._matches(request)
            if matches:
                nodes = min(nodes, 1 + self.factor * _longest(matches))
                matches[0][0].grow(tree, matches, nodes, depth)
        return tree

    def _matches(self, request: Request) -> list[Start]:
        """Those of the request's text, read to its end."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(self.longest)
        return text.matches(request.tokens, self._generations)

    def _keep(self, tokens: npt.NDArray[np.integer]) -> None:
        """Put an ended text into the younger generation, its last tokens if all are too many."""
        half = self.memory // 2
        tokens = tokens[max(len(tokens) - half, 0) :]
        if not len(tokens):
            return
        if self._generations[-1].size + len(tokens) > half:
            self._generations = [self._generations[-1], Generation(self.longest)]
        self._generations[-1].add(tokens)

    def _vocabulary(self) -> str:
        """What tells the target's vocabulary from others."""
        if self.target.tokenizer is None:
            return f"{self.target.model.config.vocab_size} tokens"
        return self.target.tokenizer.fingerprint.hex()


def _longest(matches: Sequence[Start]) -> int:
    """Tokens of the longest match; 0 where there is none."""
    return max((length for _, _, (_, length) in matches), default=0)
