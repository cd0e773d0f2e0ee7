"""Grammars: what an answer may say, as masks on p.

A token is allowed where the answer with it is still the beginning of something that the grammar accepts; an
end token is allowed where the grammar accepts the answer as it stands, and nothing else is where it is
complete. How text is cut into tokens is left to the model. The work is done by llguidance, an Earley parser
over a lexer of regular expressions; here is what a tree of guesses needs of it: the mask of a node is that of
the answer so far and the node's path, whatever has been asked before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from soothsay.engine.tree import DraftTree
from soothsay.errors import RequestError
from soothsay.tokenizer import Tokenizer

MAX_SOURCE = 1 << 18
"""Characters of the largest grammar; compiling it takes about a second."""

KEPT = 64
"""Compiled grammars that are kept; each holds up to a few MB once it has been used for long."""

MAX_LEXER_STATES = 100_000
"""Of one grammar, 1 to 2 KB each; usual ones have a few hundred."""

WHITESPACE = r" |\n {0,32}"
"""Between the tokens of JSON, where there is any: a space, or a line break and an indentation. Without a
bound, a model that is unsure goes on with it for ever."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may say. Made by one of the class methods, each of which raises `RequestError` for what
    cannot be meant; whether a grammar can be compiled shows when a request comes with it.

    Example:
        >>> SamplingParams(grammar=Grammar.choice(["yes", "no"]))
    """

    source: str
    """Its rules, in llguidance's JSON."""

    def __post_init__(self) -> None:
        """Raise `RequestError` for a grammar that is too large."""
        if len(self.source) > MAX_SOURCE:
            raise RequestError(
                f"the grammar has {len(self.source)} characters; {MAX_SOURCE} are possible: make it shorter"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that fits a schema, given as a mapping or as its text.

        Properties come in the schema's order. Keywords that are not supported are refused when the schema is
        compiled. Between tokens there may be `WHITESPACE`, unless the schema has llguidance's own options,
        such as `"x-guidance": {"whitespace_flexible": false}`.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(parsed, Mapping):
                raise TypeError("it must be an object, such as {}")
            usual = {} if "x-guidance" in parsed else {"x-guidance": {"whitespace_pattern": WHITESPACE}}
            source = json.dumps({"json_schema": {**parsed, **usual}}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is not possible: {error}") from None
        return cls(source)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole: the syntax of Rust's `regex`, without anchors
        inside, lookaround and backreferences.
        """
        _check_text("regex", pattern)
        return cls.lark(f"start: /{regex_to_lark(pattern)}/")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts."""
        if isinstance(texts, str) or not texts:
            raise RequestError(f"choice={texts!r} is not possible: give one text or more, in a list")
        for text in texts:
            _check_text("choice", text)
        return cls.lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    @classmethod
    def lark(cls, rules: str) -> Grammar:
        """A context-free grammar in llguidance's dialect of Lark, beginning at the rule `start`."""
        _check_text("lark", rules)
        return cls(json.dumps({"lark_grammar": rules}))


class Grammars:
    """Grammars compiled for one model; those used last are kept.

    Args:
        tokenizer: whose tokens the answers are made of.
        vocab_size: rows of the model's vocabulary; those that the tokenizer does not have are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._compiled = lru_cache(KEPT)(self._compile)

    def constraint(self, grammar: Grammar) -> Constraint:
        """What holds one answer to a grammar.

        Raises `RequestError` if the grammar cannot be compiled, or this model's tokens cannot say it.
        """
        return Constraint(self, grammar, self._compiled(grammar).deep_copy())

    def fresh(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of an answer that shares nothing with any other."""
        # the usual way to cut a text is not forced: p alone decides among those that there are
        start = {"name": "start", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @answer'}
        answer = {**json.loads(grammar.source), "name": "answer"}
        return LLMatcher(
            self._vocabulary,
            json.dumps({"grammars": [start, answer]}),
            log_level=0,
            limits=LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False),
        )

    def _compile(self, grammar: Grammar) -> LLMatcher:
        compiled = self.fresh(grammar)
        if compiled.is_error():
            raise RequestError(f"the grammar cannot be compiled: {compiled.get_error().strip()}")
        first = compiled.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise RequestError(
                "no answer can begin as the grammar wants it: it accepts nothing, or nothing that this model "
                "has tokens for"
            )
        return compiled

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """What each token says, and behind them one more, which says that the answer ends."""
        try:
            known = LLTokenizer(self.tokenizer.backend.to_str())
        except ValueError as error:
            raise RequestError(
                f"grammars need a byte-level tokenizer, or one with tokens for single bytes: {error}"
            ) from None
        size = min(known.vocab_size, self.vocab_size)
        padding = [b""] * (self.vocab_size - size)
        added = self.tokenizer.backend.get_added_tokens_decoder()
        special = [token for token, text in added.items() if text.special and token < self.vocab_size]
        tokens = [known.decode_bytes([token]) for token in range(size)] + padding + [b"<end>"]
        return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, special)))


class _Vocabulary:
    """Tokens in the form that llguidance asks for; the last one is the end."""

    def __init__(self, tokens: list[bytes], special: list[int]):
        self.tokens, self.bos_token_id, self.eos_token_id = tokens, None, len(tokens) - 1
        self.special_token_ids = [*special, self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Texts are cut only where they are forced, which here none is."""
        return []


class Constraint:
    """Holds one answer to a grammar: follows its tokens, and from there the paths of a tree.

    Args:
        grammars: whose tokens they are.
        grammar: what the answer may say.
        matcher: at the beginning of an answer; it is moved from now on.
    """

    def __init__(self, grammars: Grammars, grammar: Grammar, matcher: LLMatcher):
        self._grammars, self._grammar, self._matcher = grammars, grammar, matcher
        self._said: list[int] = []  # committed tokens
        self._ahead: list[int] = []  # tokens behind them where the matcher stands
        self._follows = True  # whether the matcher could read what was said

    def allowed(
        self,
        output: npt.NDArray[np.int64],
        tree: DraftTree,
        nodes: Sequence[int],
        end_tokens: frozenset[int],
    ) -> npt.NDArray[np.bool_]:
        """What may follow the nodes of a tree.

        Below a guess that is not allowed itself, and below an end, everything is: nothing of it is kept.
        Where nothing is, because the tokenizer has no token for it or the work is too much, the answer ends.

        Args:
            output: the answer's committed tokens: those of the call before, and more.
            tree: its root is the last of them.
            nodes: those that are asked for.
            end_tokens: what the answer may end with.

        Returns:
            `[nodes, V]` bool, with something allowed in every row.
        """
        self._commit(output)
        masks = np.stack([self._mask([tree.tokens[n] for n in tree.path(node)[1:]]) for node in nodes])
        size = self._grammars.vocab_size
        bits = np.unpackbits(masks, axis=1, count=size + 1, bitorder="little")  # [nodes, V + 1]
        bits[:, sorted(end_tokens)] = bits[:, size:]
        return bits[:, :size].astype(np.bool_)

    def cut(self, output: npt.NDArray[np.int64], tree: DraftTree, end_tokens: frozenset[int]) -> DraftTree:
        """A tree without the guesses that are not allowed, which could only be wrong.

        Args: as in `allowed`.
        """
        self._commit(output)
        kept: set[int] = set()
        for path in tree.paths() if self._follows else ():
            tokens = [tree.tokens[node] for node in path[1:]]
            whole = self._move(tokens)
            if self._matcher.is_error():
                self._restart()
                return tree
            count = len(self._ahead)
            ends = not whole and tokens[count] in end_tokens  # allowed or not, the matcher has no such token
            kept.update(path[1 : 1 + count + ends])
        return tree.only(kept) if self._follows and len(kept) < len(tree) - 1 else tree

    def _commit(self, output: npt.NDArray[np.int64]) -> None:
        new = output[len(self._said) :].tolist()
        if new:
            self._said += new
            if not self._move(new):
                self._restart()
            self._ahead = []

    def _mask(self, path: list[int]) -> npt.NDArray[np.uint8]:
        """`[V // 8 + 1]`: a bit for each token that may follow a path, and one for the end."""
        size = self._grammars.vocab_size
        for _ in range(2):
            reached = self._follows and self._move(path)
            mask = self._matcher.compute_bitmask() if reached else b"\xff" * (size // 8 + 1)
            if self._follows and not self._matcher.is_error():
                return np.frombuffer(mask, dtype=np.uint8)[: size // 8 + 1]
            self._restart()
        end = np.zeros(size // 8 + 1, dtype=np.uint8)
        end[size // 8] = 1 << size % 8
        return end

    def _move(self, path: list[int]) -> bool:
        """Let the matcher stand behind a path, or as far along it as it can; whether that is all of it."""
        shared = 0
        while shared < min(len(self._ahead), len(path)) and self._ahead[shared] == path[shared]:
            shared += 1
        self._matcher.rollback(len(self._ahead) - shared)
        count = self._matcher.try_consume_tokens(path[shared:])
        self._ahead = path[: shared + count]
        return len(self._ahead) == len(path)

    def _restart(self) -> None:
        """A matcher that has failed cannot go back, and its lexer may be full: take one that is new."""
        self._matcher, self._ahead = self._grammars.fresh(self._grammar), []
        self._follows = self._matcher.try_consume_tokens(self._said) == len(self._said)


def _check_text(name: str, text: object) -> None:
    """Raise `RequestError` for what is no text that can be written in UTF-8."""
    if not isinstance(text, str):
        raise RequestError(f"{name}={text!r} is not possible: it must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}={text!r} is not possible: half a character stands in it") from error
