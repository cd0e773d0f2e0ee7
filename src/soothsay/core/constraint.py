"""Constraints: grammars as masks on p.

llguidance does the work: an Earley parser over a lexer of regular expressions. This module adds what a draft
tree needs, and limits. The mask of a node depends on the answer and the node's path alone, not on earlier
calls. Nor does it depend on the load of the machine whether an answer ends at a limit: limits count work.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from soothsay.core.arrays import IntArray
from soothsay.core.grammar import Grammar
from soothsay.core.tenant import EVERYBODY, Tenant, make_room
from soothsay.core.tree import DraftTree
from soothsay.errors import RequestError
from soothsay.tokenizer import Tokenizer

log = logging.getLogger("soothsay.engine")

KEPT = 1 << 20
"""Characters of the grammars that are kept compiled. A compiled grammar takes up to 160 bytes for each."""

LEAST_SIZE = 1 << 14
"""Characters that a small grammar counts as in `KEPT`, since its lexer grows while answers use it."""

MAX_LEXER_STATES = 20_000
"""Maximum of lexer states for a grammar, 1 to 2 KB each; usual grammars have a few hundred."""

MAX_ITEMS = 10_000
"""Maximum of new parser items for a mask. Its time grows with their square: at this limit, ambiguous grammars
take 50 to 300 ms. An object with 300 optional properties needs 7,000, and takes 1 ms."""

MAX_ROW = 2_000
"""Maximum of parser items after a token."""

MAX_LEXER_FUEL = 200_000
"""Maximum of lexer work for a mask, in llguidance's unit. It lasts about 15 ms."""

MASK_SECONDS = 1.0
"""Limit of CPU time for a mask. The other limits keep masks below a third of it, so the load of the machine
does not decide whether an answer ends here. It is there for grammars that those limits do not foresee."""

MAX_REASON = 256
"""Characters of the log's line that says which part of a grammar is not enforced."""

TOO_SLOW = "the grammar takes too long for a token; make it simpler"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Compiled:
    """A compiled grammar: a matcher at the beginning of an answer. It is copied and stays as it is."""

    matcher: LLMatcher


class _Cache:
    """Compiled grammars that answers use, and those used last, at most `KEPT` characters of grammars.

    See `make_room`. Threads may share a cache.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._in_use: WeakValueDictionary[tuple[Tenant, Grammar], Compiled] = WeakValueDictionary()
        self._kept: OrderedDict[tuple[Tenant, Grammar], Compiled] = OrderedDict()  # the newest last

    def get(self, tenant: Tenant, grammar: Grammar) -> Compiled | None:
        with self._lock:
            compiled = self._in_use.get((tenant, grammar))
            if compiled is not None:
                self._keep(tenant, grammar, compiled)
            return compiled

    def put(self, tenant: Tenant, grammar: Grammar, compiled: Compiled) -> None:
        with self._lock:
            self._in_use[tenant, grammar] = compiled
            self._keep(tenant, grammar, compiled)

    def _keep(self, tenant: Tenant, grammar: Grammar, compiled: Compiled) -> None:
        self._kept[tenant, grammar] = compiled
        self._kept.move_to_end((tenant, grammar))
        make_room(self._kept, KEPT, lambda key: key[0].name, lambda key: max(len(key[1].source), LEAST_SIZE))


class Grammars:
    """Compiles grammars for one model, and caches those used last.

    Args:
        tokenizer: the model's.
        vocab_size: size of the model's vocabulary. Tokens that the tokenizer lacks are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._cache = _Cache()

    def constraint(self, grammar: Grammar, tenant: Tenant = EVERYBODY) -> Constraint:
        """The constraint of one answer to a grammar. Tenants do not see what others have compiled.

        Raises `RequestError` if the grammar cannot be compiled, or if this model's tokens cannot spell it.
        """
        compiled = self._cache.get(tenant, grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            self._cache.put(tenant, grammar, compiled)
        return Constraint(self, grammar, compiled)

    def fresh(self, grammar: Grammar) -> LLMatcher:
        """A new matcher at the beginning of an answer. It shares nothing with other matchers.

        It has an error if the grammar cannot be compiled.
        """
        strict, loose = grammar.sources(loose=False), grammar.sources(loose=True)
        matcher = self._matcher(strict)
        reasons = "; ".join(matcher.get_grammar_warnings()) or matcher.get_error()
        if matcher.is_error() and loose != strict:
            matcher = self._matcher(loose)
        if reasons and not matcher.is_error():
            log.warning("a part of a schema is not enforced", extra={"reason": reasons[:MAX_REASON]})
        return matcher

    def problem_at_start(self, matcher: LLMatcher) -> str | None:
        """Why no answer can begin as a compiled grammar wants it. None: one can."""
        first = matcher.deep_copy()
        first.compute_bitmask()
        if not first.is_error():
            return None
        return limit_problem(first) or (
            "no answer can begin as the grammar wants it: it accepts nothing, or nothing that this model "
            "has tokens for"
        )

    def _matcher(self, sources: Sequence[Mapping[str, Any]]) -> LLMatcher:
        # do not force the usual cut into tokens: p alone decides
        start = {"name": "start", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @answer'}
        return LLMatcher(
            self._vocabulary,
            json.dumps({"grammars": [start, *sources]}),
            log_level=0,
            limits=LLParserLimits(
                max_items_in_row=MAX_ROW,
                step_max_items=MAX_ITEMS,
                step_lexer_fuel=MAX_LEXER_FUEL,
                max_lexer_states=MAX_LEXER_STATES,
                verbose_errors=False,
            ),
        )

    def _compile(self, grammar: Grammar) -> Compiled:
        compiled = self.fresh(grammar)
        if compiled.is_error():
            raise RequestError(f"the grammar cannot be compiled: {compiled.get_error().strip()}")
        if (problem := self.problem_at_start(compiled)) is not None:
            raise RequestError(problem)
        return Compiled(compiled)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The bytes of each token, then one more token that means the end of the answer."""
        try:
            known = LLTokenizer(self.tokenizer.backend.to_str())
        except ValueError as error:
            raise RequestError(
                f"grammars need a byte-level tokenizer, or one with tokens for single bytes: {error}"
            ) from None
        size = min(known.vocab_size, self.vocab_size)
        padding = [b""] * (self.vocab_size - size)
        special = [token for token in self.tokenizer.special_ids.values() if token < self.vocab_size]
        tokens = [known.decode_bytes([token]) for token in range(size)] + padding + [b"<end>"]
        return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, special)))


class _Vocabulary:
    """Tokens in the form that llguidance needs; the last one is the end."""

    def __init__(self, tokens: list[bytes], special: list[int]):
        self.tokens, self.bos_token_id, self.eos_token_id = tokens, None, len(tokens) - 1
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Cut a text into tokens. Only forced text would need it, and none is forced."""
        return []


class Constraint:
    """Applies a grammar to one answer: follows its tokens, then the paths of a tree.

    Args:
        grammars: of the answer's model.
        grammar: the texts that the answer may be.
        compiled: the grammar, compiled.

    Attributes:
        seconds: of CPU time that masks of the answer's next token took.
    """

    def __init__(self, grammars: Grammars, grammar: Grammar, compiled: Compiled):
        self.seconds = 0.0
        self._grammars, self._grammar, self._compiled = grammars, grammar, compiled
        self._base, self._num_base = compiled.matcher, 0  # has read this many of the committed tokens
        self._matcher = self._base.deep_copy()
        self._problems: dict[tuple[int, ...], str] = {}  # by path: why it cannot go on there
        self._said: list[int] = []  # committed tokens
        self._ahead: list[int] = []  # tokens after them that the matcher has read
        self._follows = True  # whether the matcher could read the committed tokens

    def allowed(
        self,
        output: IntArray,
        tree: DraftTree,
        nodes: Sequence[int],
        end_tokens: frozenset[int],
    ) -> npt.NDArray[np.bool_]:
        """The tokens that may follow some nodes of a tree.

        Below a draft token that is not allowed, and below an end token, all tokens are allowed, since nothing
        there is accepted. If no token is possible, because the tokenizer has none or a limit was reached,
        only end tokens are allowed. `limit` tells of the limit.

        Args:
            output: the answer's committed tokens; they extend those of the last call.
            tree: its root is the last committed token.
            nodes: of the tree.
            end_tokens: tokens that may end the answer.

        Returns:
            `[nodes, V]` bool, with at least one token allowed in every row.
        """
        begin = time.thread_time()
        self._commit(output)
        masks = np.stack([self._mask([tree.tokens[n] for n in tree.path(node)[1:]]) for node in nodes])
        self.seconds += time.thread_time() - begin
        size = self._grammars.vocab_size
        bits = np.unpackbits(masks, axis=1, count=size + 1, bitorder="little")  # [nodes, V + 1]
        bits[:, sorted(end_tokens)] = bits[:, size:]
        return bits[:, :size].astype(np.bool_)

    def cut(self, output: IntArray, tree: DraftTree, end_tokens: frozenset[int]) -> DraftTree:
        """The tree without the draft tokens that are not allowed. The target would reject them.

        Arguments are those of `allowed`.
        """
        begin = time.thread_time()
        self._commit(output)
        tree = self._cut(tree, end_tokens)
        self.seconds += time.thread_time() - begin
        return tree

    def limit(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """How many of a verdict's tokens come before one whose mask reached a limit, and which limit it was.

        None: there was no such mask. Call it before the tokens are committed.
        """
        for count in range(len(tokens) if self._problems else 0):
            if (problem := self._problems.get(tuple(tokens[:count]))) is not None:
                return count, problem
        return None

    def _cut(self, tree: DraftTree, end_tokens: frozenset[int]) -> DraftTree:
        kept: set[int] = set()
        for path in tree.paths() if self._follows else ():
            tokens = [tree.tokens[node] for node in path[1:]]
            whole = self._move(tokens)
            if self._matcher.is_error():
                self._restart()
                return tree
            count = len(self._ahead)
            ends = not whole and tokens[count] in end_tokens  # the matcher has no such token, allowed or not
            kept.update(path[1 : 1 + count + ends])
        return tree.subtree(kept) if self._follows and len(kept) < len(tree) - 1 else tree

    def _commit(self, output: IntArray) -> None:
        new = output[len(self._said) :].tolist()
        if new:
            self.seconds = 0.0
            self._problems.clear()
            self._said += new
            if not self._move(new):
                self._restart()
            self._ahead = []
            if self._follows:
                self._base, self._num_base = self._matcher.deep_copy(), len(self._said)

    def _mask(self, path: list[int]) -> npt.NDArray[np.uint8]:
        """`[V // 8 + 1]`: a bit for each token that may follow a path, and a bit for the end."""
        size, begin = self._grammars.vocab_size, time.thread_time()
        for _ in range(2):
            reached = self._follows and self._move(path)
            mask = self._matcher.compute_bitmask() if reached else b"\xff" * (size // 8 + 1)
            if time.thread_time() - begin > MASK_SECONDS:
                self._problems[tuple(path)] = TOO_SLOW
            if self._follows and not self._matcher.is_error():
                return np.frombuffer(mask, dtype=np.uint8)[: size // 8 + 1]
            problem = limit_problem(self._matcher)
            if not self._restart():  # a new lexer may have room
                break
        if problem is not None:
            self._problems[tuple(path)] = problem
        end = np.zeros(size // 8 + 1, dtype=np.uint8)
        end[size // 8] = 1 << size % 8
        return end

    def _move(self, path: list[int]) -> bool:
        """Move the matcher along a path as far as it can. Returns whether it read the whole path."""
        shared = 0
        while shared < min(len(self._ahead), len(path)) and self._ahead[shared] == path[shared]:
            shared += 1
        self._matcher.rollback(len(self._ahead) - shared)
        count = self._matcher.try_consume_tokens(path[shared:])
        self._ahead = path[: shared + count]
        return len(self._ahead) == len(path)

    def _restart(self) -> bool:
        """Replace the matcher, since after an error it cannot roll back. Returns whether it has a new lexer.

        Copies share what their lexer has learned. If that is full, only a new matcher has room.
        """
        renewed = "lexer error" in self._matcher.get_error()
        if renewed:
            self._compiled = Compiled(self._grammars.fresh(self._grammar))
            self._base, self._num_base = self._compiled.matcher, 0
        self._matcher, self._ahead = self._base.deep_copy(), []
        rest = self._said[self._num_base :]
        self._follows = self._matcher.try_consume_tokens(rest) == len(rest)
        return renewed


def limit_problem(matcher: LLMatcher) -> str | None:
    """What to tell about a matcher that has reached a limit. None: it has not."""
    error = matcher.get_error().partition("\n")[0]
    if not error.lower().startswith(("parser error", "lexer error")):
        return None
    return f"the grammar takes too much work for a token; make it simpler ({error})"
