"""A draft model whose tokenizer is not the target's: what they have in common is text.

Universal assisted generation; Timor et al. 2025 (arXiv 2502.05202) call the two ways string-level exact match
and token-level intersection. Here the draft model reads the target's text in its own tokens, and what it says
is written in the target's. In between, a token of its own stands for the first token of the target's in which
it is written, itself if both have it; so its distribution becomes one over the target's tokens, and it can
guess with the target's own noise, as any draft model does. If both have all tokens, whatever their numbers,
nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from soothsay.drafters.base import Drafter, Target, check_at_least_one
from soothsay.drafters.context import pack
from soothsay.drafters.guesses import likeliest
from soothsay.engine.batch import Rows
from soothsay.engine.cache import BlockAllocator
from soothsay.engine.request import Request
from soothsay.engine.sampling import Nodes
from soothsay.engine.tree import DraftTree
from soothsay.errors import DrafterError
from soothsay.model.transformer import Transformer
from soothsay.tokenizer import Tokenizer

REREAD = 8
"""Tokens of the draft model's that are read again with what the target has said since: a word is seldom
longer, and how it is cut depends on all of it."""

_SPACE = "\u2581"  # how SentencePiece writes a space


class Pieces:
    """A tokenizer's tokens as bytes.

    It must be byte-level (GPT-2's kind), or SentencePiece's with tokens for single bytes: then any bytes can
    be written in its tokens. Raises `DrafterError` for others.
    """

    def __init__(self, tokenizer: Tokenizer):
        vocabulary = tokenizer.vocabulary()
        added = tokenizer.backend.get_added_tokens_decoder()
        alphabet, single = _byte_alphabet(), {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        byte_level = alphabet.keys() <= vocabulary.keys()
        if not byte_level and not single.keys() <= vocabulary.keys():
            raise DrafterError("it has no tokens for single bytes, so there are texts that it cannot write")
        self.tokenizer = tokenizer
        self.bytes = [b""] * (1 + max(vocabulary.values()))
        """What each token says."""
        for token, number in vocabulary.items():
            if number in added:
                self.bytes[number] = added[number].content.encode()
            elif byte_level:
                self.bytes[number] = b"".join([alphabet.get(c, c.encode()) for c in token])
            else:
                self.bytes[number] = single.get(token, token.replace(_SPACE, " ").encode())
        self.special = {self.bytes[number]: number for number, token in added.items() if token.special}
        """Tokens that are no text, by what is written for them."""
        special, spelt = set(self.special.values()), set(map(vocabulary.get, single))
        plain = sorted(set(vocabulary.values()) - special, key=lambda number: (number not in spelt, number))
        self.ids = {self.bytes[number]: number for number in plain if self.bytes[number]}
        """All others; of two that say the same, the one that is not spelt as a byte."""
        self._longest = max(map(len, self.ids))
        text = tokenizer.encode("a", special=False)
        self.first = [*takewhile(lambda number: number not in text, tokenizer.encode("a"))]
        """What goes before a text."""

    def join(self, ids: Sequence[int]) -> bytes:
        """What tokens say; one that the tokenizer does not have says nothing."""
        return b"".join([self.bytes[number] for number in ids if number < len(self.bytes)])

    def encode(self, said: bytes) -> list[int]:
        """Tokens that say just that: as the tokenizer cuts it, where that says it and it is text."""
        ids: list[int] = []
        while said:
            try:
                text, broken, left = said.decode(), b"", b""
            except UnicodeDecodeError as error:
                text, broken = said[: error.start].decode(), said[error.start : error.end]
                left = said[error.end :]
            ids += self._encode(text) + self._spell(broken)
            said = left
        return ids

    def is_usual(self, ids: Sequence[int]) -> bool:
        """Whether the tokenizer itself would cut what `ids` say like this. What is sampled need not be."""
        begins = next((i for i, number in enumerate(ids) if not _is_within(self.join([number]))), len(ids))
        return self.encode(self.join(ids[begins:])) == ids[begins:]

    def token(self, says: bytes, special: bool) -> int | None:
        """The token that says just this."""
        return (self.special if special else self.ids).get(says)

    def _encode(self, text: str) -> list[int]:
        ids, said = self.tokenizer.encode(text, special=False), text.encode()
        written = self.join(ids)
        if written == said:
            return ids
        if written == b" " + said:  # some put a space before any text
            return self._spell(self.bytes[ids[0]][1:]) + ids[1:]
        return self._spell(said)

    def _spell(self, said: bytes) -> list[int]:
        """The longest token first, again and again."""
        ids: list[int] = []
        at = 0
        while at < len(said):
            ends = range(min(at + self._longest, len(said)), at, -1)
            end = next(end for end in ends if said[at:end] in self.ids)
            ids.append(self.ids[said[at:end]])
            at = end
        return ids


class Translation:
    """From a draft model's tokens to the target's, and back.

    Raises `DrafterError` where one of the tokenizers cannot write every text; see `Pieces`.
    """

    def __init__(self, draft: Tokenizer, target: Tokenizer):
        self.draft, self.target = Pieces(draft), Pieces(target)
        self.stands_for = [self._stands_for(number) for number in range(len(self.draft.bytes))]
        """For each token of the draft model's, the first token of the target's in which it is written; -1:
        it cannot be."""

    def write(self, guesses: Sequence[int]) -> list[int]:
        """What the draft model guesses, in the target's tokens."""
        if self.draft.is_usual(guesses):
            return self.target.encode(self.draft.join(guesses))
        return _each(guesses, self.draft, self.target)

    def read(self, own: Sequence[int], before: Sequence[int], new: Sequence[int]) -> list[int]:
        """What the target says, in the draft model's tokens.

        Args:
            own: the draft model's last tokens.
            before: the target's last tokens up to there.
            new: and those behind.

        Returns:
            The tokens that take the place of `own`: what all of it says, cut anew; or where the target has
            cut it in an unusual way, which tells what may come next, `own` and each of `new`.
        """
        if self.target.is_usual([*before, *new]):
            return self.draft.encode(self.draft.join(own) + self.target.join(new))
        return [*own, *_each(new, self.target, self.draft)]

    def _stands_for(self, number: int) -> int:
        says = self.draft.bytes[number]
        special = number == self.draft.special.get(says)
        same = self.target.token(says, special)
        if same is not None or special:
            return -1 if same is None else same
        return next(iter(self.target.encode(says)), -1)


def _each(ids: Sequence[int], source: Pieces, into: Pieces) -> list[int]:
    """Tokens of one tokenizer in those of another, one by one."""
    written: list[int] = []
    for number in ids:
        says = source.join([number])
        same = into.token(says, number == source.special.get(says))
        written += into.encode(says) if same is None else [same]
    return written


@dataclass(slots=True)
class _View:
    """A request as the draft model sees it."""

    tokens: list[int]  # its own, of all that is committed; then those that it guessed last
    committed: int  # of these
    cached: int = 0  # of these, those whose keys and values are there
    read: int = 0  # of the request's tokens
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Growth:
    """A guess on its way."""

    request: Request
    view: _View
    tree: DraftTree  # of what is said
    place: int  # of the request among all
    steps: list[tuple[int, float]] = field(default_factory=list)  # of each guess: bytes, log-probability


class UniversalDraftModel(Drafter):
    """A model with another vocabulary proposes a chain.

    Its keys and values have blocks of their own, as many as the target's: a text has other lengths in its
    tokens. While there are none left, or where a text is longer than its context, it guesses nothing.

    Args:
        target: the model to draft for; with a tokenizer.
        model: the draft model.
        translation: of its tokens.
        depth: of its tokens, those that are guessed in a row.

    Raises `DrafterError` for a depth below 1.
    """

    trained = True

    def __init__(self, target: Target, model: Transformer, translation: Translation, depth: int = 4):
        check_at_least_one("draft-model", depth=depth)
        self.target, self.model, self.translation, self.depth = target, model, translation, depth
        self.max_nodes = 1 + 2 * depth  # it may say more with a token than the target, hardly more than that
        size = target.num_blocks, target.config.block_size
        self.pool, self.allocator = model.new_cache(*size), BlockAllocator(*size, share=False)
        self._views: dict[Request, _View] = {}
        vocab_size = target.model.config.vocab_size
        stands_for = torch.full((model.config.vocab_size,), vocab_size)  # which stands for none
        known = torch.tensor(translation.stands_for[: model.config.vocab_size])
        stands_for[: len(known)] = torch.where((known < 0) | (known >= vocab_size), vocab_size, known)
        self._stands_for = stands_for.to(model.device)  # [D] int64

    def propose(self, requests: Sequence[Request]) -> list[DraftTree]:
        """A chain for each request, all of them token by token together."""
        trees = [DraftTree(int(request.tokens[-1])) for request in requests]
        growths = [
            _Growth(request, self._read(request), tree, place)
            for place, (request, tree) in enumerate(zip(requests, trees, strict=True))
            if self._useful(request) > 0
        ]
        growing = [growth for growth in growths if self._has_room(growth.view)]
        for _ in range(self.depth):
            if not growing:
                break
            growing = self._grow(growing, self._run([growth.view for growth in growing]))
        for growth in growths:
            trees[growth.place] = growth.tree
        return trees

    def release(self, request: Request) -> None:
        """Forget a request."""
        view = self._views.pop(request, None)
        if view is not None:
            self.allocator.release(view.blocks)

    def project(self, logits: Tensor) -> Tensor:
        """The draft model's logits `[R, D]` -> log-probabilities of the target's tokens, `[R, V]` float32."""
        vocab_size = self.target.model.config.vocab_size
        probs = logits.new_zeros(len(logits), vocab_size + 1)
        probs.index_add_(1, self._stands_for, logits.softmax(-1))
        return probs[:, :vocab_size].log()

    def _read(self, request: Request) -> _View:
        """The request in the draft model's tokens; what follows from what is new is read again."""
        draft, tokens = self.translation.draft, request.tokens
        view = self._views.get(request)
        if view is None:
            view = self._views[request] = _View([*draft.first], len(draft.first))
        keep = max(view.committed - REREAD, len(draft.first))
        while keep > len(draft.first) and _is_within(draft.bytes[view.tokens[keep]]):
            keep -= 1
        before, new = tokens[max(view.read - REREAD, 0) : view.read].tolist(), tokens[view.read :].tolist()
        ids = self.translation.read(view.tokens[keep : view.committed], before, new)
        if view.read == 0 and ids[: len(draft.first)] == draft.first:  # the target writes it too
            del ids[: len(draft.first)]
        pairs = zip(view.tokens[keep:], ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        view.tokens[keep:] = ids
        view.read, view.committed = len(tokens), len(view.tokens)
        view.cached = min(view.cached, keep + same, max(view.committed - 1, 0))  # the last one gives logits
        return view

    def _useful(self, request: Request) -> int:
        """How long a chain can be of use."""
        return min(self.max_nodes - 1, request.max_nodes - 1, request.max_depth)

    def _has_room(self, view: _View) -> bool:
        """Whether there is room for what is committed and guesses, once blocks are allocated for them."""
        size = view.committed + self.depth
        missing = -(-size // self.allocator.block_size) - len(view.blocks)
        if not 0 < view.committed <= size <= self.model.config.max_positions:
            return False
        if missing > self.allocator.num_free:
            return False
        view.blocks += self.allocator.allocate(max(missing, 0))
        return True

    def _run(self, views: Sequence[_View]) -> Tensor:
        """`[R, D]` logits behind the last token of each view, once those before it have their keys."""
        c, hidden = self.model.config, dict[int, Tensor]()
        waiting = dict(enumerate(views))
        while waiting:
            rows, ends, room = list[Rows](), list[int](), self.target.config.max_rows
            for i, view in list(waiting.items()):
                pending = view.tokens[view.cached : view.cached + room]
                at_end = view.cached + len(pending) == len(view.tokens)
                if pending:
                    tokens = np.array(pending, dtype=np.int64).clip(max=c.vocab_size - 1)
                    tree = DraftTree(int(tokens[-1])) if at_end else None
                    rows.append(Rows(tokens, view.cached, np.array(view.blocks, dtype=np.int64), tree))
                    view.cached += len(pending)
                    room -= len(pending)
                    if at_end:
                        ends.append(i)
                        del waiting[i]
            batch = pack(rows, self.target, c.group, c.windows)
            states = self.model(batch, self.pool)[0].index_select(0, batch.logit_rows)
            hidden.update(zip(ends, states, strict=True))
        return self.model.logits(torch.stack([hidden[i] for i in range(len(views))]))

    def _grow(self, growing: Sequence[_Growth], logits: Tensor) -> list[_Growth]:
        """Add a token of the draft model's to every guess; return those that go on."""
        draft = self.translation.draft
        asked = [Nodes(growth.request, growth.tree, [len(growth.tree) - 1]) for growth in growing]
        values, tokens, _ = likeliest(self.project(logits), asked, 1)
        # of all its tokens that stand for the one that is guessed, the likeliest
        own = logits.masked_fill(self._stands_for != tokens, -math.inf).argmax(-1)
        going = []
        guesses = zip(growing, values[:, 0].tolist(), tokens[:, 0].tolist(), own.tolist(), strict=True)
        for growth, log_prob, token, number in guesses:
            if log_prob == -math.inf:
                continue
            growth.view.tokens.append(number)
            growth.steps.append((len(draft.bytes[number]), log_prob))
            growth.tree = self._chain(growth)
            goes_on = len(growth.tree) <= self._useful(growth.request)
            if goes_on and token not in growth.request.end_tokens:
                going.append(growth)
        return going

    def _chain(self, growth: _Growth) -> DraftTree:
        """What was guessed so far in the target's tokens: how it is cut may change with what comes behind.

        A token is right if all guesses are that say a part of it.
        """
        target, tree, node = self.translation.target, DraftTree(growth.tree.tokens[0]), 0
        steps, said, reached = iter(growth.steps), 0, 0
        guesses = growth.view.tokens[growth.view.committed :]
        for token in self.translation.write(guesses)[: self.max_nodes - 1]:
            log_prob, said = 0.0, said + len(target.bytes[token])
            while reached < said:
                size, step = next(steps)
                reached, log_prob = reached + size, log_prob + step
            node = tree.add(node, token, log_prob)
        return tree


def _is_within(said: bytes) -> bool:
    """Whether a token begins inside of a character."""
    return said[:1] != b"" and said[0] & 0xC0 == 0x80


def _byte_alphabet() -> dict[str, bytes]:
    """The characters that stand for bytes in byte-level vocabularies (GPT-2): themselves if they can be seen,
    else one beyond 255.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    named = {chr(byte): bytes([byte]) for byte in seen}
    return named | {chr(256 + i): bytes([byte]) for i, byte in enumerate(hidden)}
