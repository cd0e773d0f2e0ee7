"""Suffix matching: propose what followed earlier occurrences of the last tokens, in this request or in others
of its tenant.

SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975) grows a tree by the counts of continuations.
SAM-Decoding (Hu et al. 2024, arXiv 2411.10666) updates the longest match in a suffix automaton with each
token. It needs no model and no training, and is strong if answers repeat their prompts, themselves or each
other, as with agents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from soothsay.core.arrays import IntArray
from soothsay.core.request import Request
from soothsay.core.tenant import EVERYBODY, PerTenant, State, Tenant
from soothsay.core.tree import DraftTree
from soothsay.drafters.base import RememberingDrafter, SignalingDrafter, Target, check_at_least_one
from soothsay.drafters.learned_files import read_learned
from soothsay.drafters.lookup.text_store import KIND, text_arrays, texts_in, write_texts
from soothsay.drafters.ops.automaton import Automaton, Matcher, Reading
from soothsay.drafters.ops.continuations import known_noise
from soothsay.errors import DrafterError

OWN_DOUBT, MEMORY_DOUBT, STORE_DOUBT = 2.0, 8.0, 16.0
"""Match lengths at which the estimated acceptance of a single occurrence is a half: in a request's own text,
in ended requests of its tenant, and in a store. A request repeats its own text more often. With these
values, estimated and measured acceptance are close, with sibyl and with SmolLM2."""

SAMPLED_GAIN = 0.4
"""Right nodes for each token of a match if the request samples. Greedy answers have one for each token."""

PIECE = 512
"""Maximum number of tokens of ended requests that a step reads before it drafts. It bounds the delay of a
step; texts are read only while requests run."""


class MemoryGeneration:
    """Texts of one period, read piece by piece and forgotten together.

    Attributes:
        automaton: has read part of the texts.
        doubt: match length at which half of a lone occurrence is believed.
        texts: all texts.
        size: number of their tokens, read or not.
        unread: texts of which a part has not been read.
    """

    __slots__ = ("automaton", "doubt", "size", "texts", "unread")

    def __init__(self, automaton: Automaton, doubt: float):
        self.automaton, self.doubt = automaton, doubt
        self.texts: list[npt.NDArray[np.int32]] = []
        self.size = 0
        self.unread = deque[tuple[Reading, npt.NDArray[np.int32]]]()

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """Add a text, to be read later."""
        self.texts.append(tokens.astype(np.int32))
        self.size += len(tokens)
        self.unread.append((Reading(), self.texts[-1]))

    def read(self, most: int) -> int:
        """Read up to `most` more tokens, the oldest text first. Returns their number."""
        left = most
        while left and self.unread:
            reading, tokens = self.unread.popleft()
            piece, rest = tokens[:left], tokens[left:]
            self.automaton.read(reading, piece.astype(np.int64))
            if len(rest):
                self.unread.appendleft((reading, rest))
            left -= len(piece)
        return most - left


class TextMemory:
    """Ended texts in two generations. When the younger one has half of `size`, the older one is dropped.

    Args:
        size: number of tokens to keep; 0 keeps none.
        doubt: of its generations.
        new_automaton: makes the automaton of a generation.
    """

    __slots__ = ("_doubt", "_half", "_new_automaton", "generations", "size")

    def __init__(self, size: int, doubt: float, new_automaton: Callable[[], Automaton]):
        self.size, self._half = size, size // 2
        self._doubt, self._new_automaton = doubt, new_automaton
        self.generations = [MemoryGeneration(new_automaton(), doubt)]

    @property
    def texts(self) -> list[npt.NDArray[np.int32]]:
        """All texts, the oldest first."""
        return [text for generation in self.generations for text in generation.texts]

    def state(self) -> State:
        """`tokens` int32 and `lengths` int64 of the texts, the oldest first."""
        return text_arrays(self.texts)

    def merge(self, other: TextMemory) -> None:
        """Add the texts of another memory that this one lacks, and read all."""
        known = {text.tobytes() for text in self.texts}
        for text in other.texts:
            if text.tobytes() not in known:
                self.add(text)
        self.read(self.size)

    def add(self, tokens: npt.NDArray[np.integer]) -> None:
        """Add a text to the younger generation; only its last tokens if it is too long."""
        tokens = tokens[max(len(tokens) - self._half, 0) :]
        if not len(tokens):
            return
        if self.generations[-1].size + len(tokens) > self._half:
            self.generations = [self.generations[-1], MemoryGeneration(self._new_automaton(), self._doubt)]
        self.generations[-1].add(tokens)

    def read(self, most: int) -> int:
        """Read up to `most` more tokens, the oldest text first. Returns their number."""
        left = most
        for generation in self.generations:
            left -= generation.read(left)
        return most - left


class _Text:
    """The text of a request, as far as it has been read."""

    __slots__ = ("_counted", "_generations", "matcher", "size")

    def __init__(self, automaton: Automaton):
        self.matcher, self._counted = automaton.matcher(OWN_DOUBT), automaton.counted
        self.size = 0  # tokens that have been read
        self._generations: list[MemoryGeneration] = []  # those that are watched

    def matches(self, tokens: IntArray, generations: list[MemoryGeneration]) -> Matcher:
        """The matches of the text's end, in the text itself and in each generation.

        Args:
            tokens: the whole text; it extends that of the last call.
            generations: need not be those of the last call.
        """
        size = self.size
        if self._generations != generations:
            watched = [(one.automaton, one.doubt) for one in generations]
            self.matcher.watch(watched, tokens[max(size - self._counted, 0) : size])
            self._generations = generations
        if size < len(tokens):
            self.matcher.read(tokens[size:])
            self.size = len(tokens)
        return self.matcher


class Suffix(SignalingDrafter, RememberingDrafter[TextMemory]):
    """Proposes the followers of the longest matches of the last tokens, in this request and in ended ones.

    Each request has an automaton for its prompt and answer. The texts of a tenant's ended requests are in a
    memory of its own. The texts of `store` serve all tenants. A token takes 0.2 microseconds to read and 100
    bytes to keep; without native kernels, 1.5 and 480.

    Args:
        target: the model to draft for.
        nodes: maximum size of a tree, the root included.
        factor: maximum number of nodes for each token of the longest match.
        longest: maximum length of a match in tokens.
        memory: number of tokens of ended requests to keep for each tenant; the oldest are dropped. 0 keeps
            none.
        store: a file written by `save` or `write_texts`. Every tenant's drafts may come from it.

    Attributes:
        memories: each tenant's texts of ended requests.
    """

    kind = KIND

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
        self._stored: list[MemoryGeneration] = []
        self._reader: Thread | None = None
        self.reset()
        if store:
            self.load(store)

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """The likeliest continuations of each request; only the root if nothing matches."""
        left = PIECE
        for tenant in dict.fromkeys(request.tenant for request in requests):
            left -= self.memories[tenant].read(left)
        return [self._propose(request) for request in requests]

    def signal(self, request: Request) -> int:
        """The bit length of the longest match's length."""
        return self._matches(request).longest.bit_length()

    def first_gain(self, signal: int, sampled: bool) -> float:
        """About as many nodes as the match has tokens: measured with SmolLM2."""
        return 2.0 ** (signal - 1) * (SAMPLED_GAIN if sampled else 1.0)

    def release(self, request: Request) -> None:
        """Keep the text of an ended request. A preempted request keeps its automaton."""
        if request.finish_reason is not None:
            self._texts.pop(request, None)
            self.memories[request.tenant].add(request.tokens)

    def reset(self) -> None:
        """Forget all requests. Texts that were loaded stay, and from now on no thread reads them."""
        self.finish_loading()
        self._texts: WeakKeyDictionary[Request, _Text] = WeakKeyDictionary()
        self.memories = PerTenant(self._new_memory)

    def save(self, path: str | Path, tenant: Tenant = EVERYBODY) -> None:
        """Write what is stored to a file: the texts that were loaded, and one tenant's ended requests.

        Raises `DrafterError` if the file cannot be written.
        """
        loaded = [text for generation in self._stored for text in generation.texts]
        write_texts(Path(path), [*loaded, *self.memories[tenant].texts], self.identity)

    def load(self, path: str | Path) -> None:
        """Use the texts of a file written by `save` for all tenants, in place of those loaded before.

        All of them are kept; `memory` limits ended requests only. They are read in a thread of their own, and
        the first draft waits for its end: meanwhile the first request can read its prompt.

        Raises `DrafterError` if the file is missing or damaged, or was written for another vocabulary.
        """
        state = read_learned(Path(path), self.kind, self.identity)
        room = 2 * np.size(state.get("tokens", ()))  # so that one generation holds all
        memory = self._restored(state, TextMemory(room, STORE_DOUBT, self._new_automaton))
        self._stored = memory.generations
        self._reader = Thread(target=memory.read, args=(room,), name="soothsay suffix store")
        self._reader.start()

    def finish_loading(self) -> None:
        """Wait until the texts that were loaded have been read."""
        if self._reader is not None:
            self._reader.join()
            self._reader = None

    def restored(self, state: State) -> TextMemory:
        """A memory with the texts in arrays, still unread."""
        return self._restored(state, self._new_memory())

    def _restored(self, state: State, memory: TextMemory) -> TextMemory:
        """A memory with the texts in arrays, still unread. Raises `DrafterError` if these are impossible."""
        texts = texts_in(state, self.target.model.spec.vocab_size)
        after = np.cumsum([0, *(len(text) for text in texts[:0:-1])])[::-1]  # tokens after each text
        for text, newer in zip(texts, after.tolist(), strict=False):
            if newer < memory.size:  # older ones do not fit
                memory.add(text)
        return memory

    def _propose(self, request: Request) -> DraftTree:
        tree = DraftTree(request.last_token)
        nodes, depth = min(request.max_nodes, self.max_nodes), request.max_depth
        if nodes > 1 and depth > 0:
            matches = self._matches(request)
            if matches.longest:
                nodes = min(nodes, 1 + self.factor * matches.longest)
                matches.grow(tree, nodes, depth, known_noise(request))
        return tree

    def _matches(self, request: Request) -> Matcher:
        """The matches of the request's text, after reading all of it."""
        text = self._texts.get(request)
        if text is not None and text.size == request.length:  # a draft follows its signal
            return text.matcher
        self.finish_loading()
        if text is None:
            text = self._texts[request] = _Text(self._new_automaton())
        generations = self._stored + self.memories[request.tenant].generations
        return text.matches(request.tokens, [one for one in generations if one.automaton.size])

    def _new_memory(self) -> TextMemory:
        return TextMemory(self.memory, MEMORY_DOUBT, self._new_automaton)

    def _new_automaton(self) -> Automaton:
        """An empty automaton for matches of `longest` tokens and their followers."""
        return self.target.ops.automaton(self.longest + 1)
