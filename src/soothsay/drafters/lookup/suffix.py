"""Suffix matching: propose what followed earlier occurrences of the last tokens, in this or other requests.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) grows a tree by the counts of continuations.
SAM-Decoding (Hu et al. 2024, arXiv 2411.10666) updates the longest match in a suffix automaton with each
token. It needs no model and no training, and is strong if answers repeat their prompts, themselves or each
other, as with agents.
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

from soothsay.core.automaton import NOWHERE, Automaton, Place, Reading, Start
from soothsay.core.request import Request
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import SignalingDrafter, Target, check_at_least_one
from soothsay.drafters.lookup.stock_automaton import new_automaton
from soothsay.errors import DrafterError
from soothsay.files import replacing

FORMAT = "soothsay suffix store 1"

OWN_DOUBT, STORE_DOUBT = 2.0, 8.0
"""Match lengths at which half of a lone occurrence is believed, in a request's own text and in the texts of
others. A request repeats its own text more often. With 1 and 8 sibyl gets 0.5 % more tokens a step; with
these values, estimated and measured acceptance are close."""

PIECE = 512
"""Maximum number of tokens of ended requests that a step reads before it drafts. It bounds the delay of a
step; texts are read only while requests run."""


class TextGeneration:
    """Texts of one period, read piece by piece and forgotten together.

    Attributes:
        automaton: has read part of the texts.
        texts: all texts.
        size: number of their tokens, read or not.
    """

    __slots__ = ("_unread", "automaton", "size", "texts")

    def __init__(self, automaton: Automaton):
        self.automaton = automaton
        self.texts: list[npt.NDArray[np.int32]] = []
        self.size = 0
        self._unread: deque[tuple[Reading, npt.NDArray[np.int32]]] = deque()

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """Add a text, to be read later."""
        self.texts.append(tokens.astype(np.int32))
        self.size += len(tokens)
        self._unread.append((Reading(), self.texts[-1]))

    def read(self, most: int) -> int:
        """Read up to `most` more tokens, the oldest text first. Returns their number."""
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
    """The text of a request, as far as it has been read."""

    __slots__ = ("_automaton", "_known", "_matches", "_places", "_reading", "_size")

    def __init__(self, automaton: Automaton):
        self._automaton = automaton
        self._reading = Reading()
        self._size = 0
        self._places: dict[TextGeneration, Place] = {}
        self._known: list[tuple[TextGeneration, int]] = []  # those of `_matches`, and tokens read then
        self._matches: list[Start] = []

    def matches(self, tokens: npt.NDArray[np.int64], generations: Sequence[TextGeneration]) -> list[Start]:
        """The longest matches of the text's end, in the text itself and in each generation.

        Args:
            tokens: the whole text; it extends that of the last call.
            generations: need not be those of the last call.
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


class Suffix(SignalingDrafter):
    """Proposes the followers of the longest matches of the last tokens, in this request and in ended ones.

    Each request has an automaton for its prompt and answer. The texts of ended requests are in two
    generations with an automaton each: when the younger one has half of `memory`, the older one is dropped.
    A token takes 0.2 microseconds to read and 100 bytes to keep; without native kernels, 1.5 and 480.

    Args:
        target: the model to draft for.
        nodes: maximum size of a tree, the root included.
        factor: maximum number of nodes for each token of the longest match.
        longest: maximum length of a match in tokens.
        memory: number of tokens of ended requests to keep; the oldest are dropped. 0 keeps none.
        store: a file written by `save`, to start with.
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
        """The likeliest continuations of each request; only the root if nothing matches."""
        left = PIECE
        for generation in self._generations:
            left -= generation.read(left)
        return [self._propose(request) for request in requests]

    def signal(self, request: Request) -> int:
        """The bit length of the longest match's length."""
        return _longest(self._matches(request)).bit_length()

    def release(self, request: Request) -> None:
        """Keep the text of an ended request. A preempted request keeps its automaton."""
        if request.finish_reason is not None:
            self._texts.pop(request, None)
            self._keep(request.tokens)

    def reset(self) -> None:
        """Forget all requests, and load `store` again."""
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()
        self._generations = [TextGeneration(self._new_automaton())]
        if self.store:
            self.load(self.store)

    def save(self, path: str | Path) -> None:
        """Write the texts of ended requests to a safetensors file with `tokens` and `lengths`."""
        texts = [text for generation in self._generations for text in generation.texts]
        tensors = {
            "tokens": np.concatenate([np.empty(0, dtype=np.int32), *texts]),  # [sum of lengths]
            "lengths": np.array([len(text) for text in texts], dtype=np.int64),  # [texts], the oldest first
        }
        with replacing(Path(path)) as temporary:
            save_file(tensors, temporary, {"format": FORMAT, "vocabulary": self._vocabulary()})

    def load(self, path: str | Path) -> None:
        """Add the texts of a file written by `save`, as if their requests had ended now.

        Raises `DrafterError` if the file is missing or damaged, or was written for another vocabulary.
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
        """The longest matches of the request's text, after reading all of it."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(self._new_automaton())
        return text.matches(request.tokens, self._generations)

    def _keep(self, tokens: npt.NDArray[np.integer]) -> None:
        """Add an ended text to the younger generation; only its last tokens if it is too long."""
        half = self.memory // 2
        tokens = tokens[max(len(tokens) - half, 0) :]
        if not len(tokens):
            return
        if self._generations[-1].size + len(tokens) > half:
            self._generations = [self._generations[-1], TextGeneration(self._new_automaton())]
        self._generations[-1].add(tokens)

    def _new_automaton(self) -> Automaton:
        """An empty automaton for matches of `longest` tokens and their followers."""
        return new_automaton(self.longest + 1, self.target.model.kernels)

    def _vocabulary(self) -> str:
        """A string that identifies the target's vocabulary."""
        if self.target.tokenizer is None:
            return f"{self.target.model.config.vocab_size} tokens"
        return self.target.tokenizer.fingerprint.hex()


def _longest(matches: Sequence[Start]) -> int:
    """Length of the longest match in tokens; 0 without matches."""
    return max((length for _, _, (_, length) in matches), default=0)
