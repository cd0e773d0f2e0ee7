"""Sampling parameters of a request. `sampling.py` applies them, and needs torch; this file does not."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.typing as npt

from soothsay.config import checks_names
from soothsay.core.grammar import Grammar
from soothsay.core.verify import VERIFIERS, Verifier, match
from soothsay.errors import RequestError, shown, type_of

MAX_WHOLE = 2**63 - 1
"""Limit of whole numbers. Clients send it where they mean "no limit"; seeds are hashed as 64 bits."""

MAX_LOGIT_CHANGE = 1e6
"""Limit of what one parameter adds to a logit. Logits of models are below 1e3, so it decides alone."""

MIN_TEMPERATURE = 1e-20
"""Temperatures below count as this, which leaves only the likeliest token. Logits / less would overflow."""

MIN_TOP_P = 1e-9
"""Values of `top_p` below count as this, which leaves only the likeliest token."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number."""

    low: float
    high: float
    what: str  # for the message
    whole: bool = False  # only whole numbers
    optional: bool = False  # None is allowed

    def accept(self, name: str, value: object) -> int | float | None:
        """A value as a number of Python. Raises `RequestError` if it is not in the range. NaN never is."""
        if value is None and self.optional:
            return None
        if isinstance(value, Real) and not isinstance(value, bool):
            number = int(value) if isinstance(value, Integral) else float(value)
            if self.low <= number <= self.high and (isinstance(number, int) or not self.whole):
                return number
        raise RequestError(f"{name}={shown(value)} is not possible: it must be {self.what}")


BOUNDS = {
    "temperature": Bounds(0.0, 1e6, "a number between 0 and 1e6"),
    "top_k": Bounds(-1, MAX_WHOLE, "an integer, at least 1, or 0 for all tokens", whole=True),
    "top_p": Bounds(0.0, 1.0, "a number between 0 and 1"),
    "min_p": Bounds(0.0, 1.0, "a number between 0 and 1"),
    "repetition_penalty": Bounds(1e-3, 1e3, "a number between 0.001 and 1000"),
    "presence_penalty": Bounds(-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE, "a number between -1e6 and 1e6"),
    "frequency_penalty": Bounds(-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE, "a number between -1e6 and 1e6"),
    "max_tokens": Bounds(0, MAX_WHOLE, "an integer, at least 0, or None", whole=True, optional=True),
    "min_tokens": Bounds(0, MAX_WHOLE, "an integer, at least 0", whole=True),
    "n": Bounds(1, 1024, "an integer between 1 and 1024", whole=True),
    "logprobs": Bounds(0, MAX_WHOLE, "an integer, at least 0, or None", whole=True, optional=True),
    "prompt_logprobs": Bounds(0, MAX_WHOLE, "an integer, at least 0, or None", whole=True, optional=True),
    "seed": Bounds(0, MAX_WHOLE, "an integer between 0 and 2**63 - 1, or None", whole=True, optional=True),
}
"""Within these bounds, float32 arithmetic neither overflows nor gives NaN.

A logit below 1e6 stays below 1e9 after the repetition penalty, and below 1e14 after a frequency penalty for
1e8 tokens. Divided by `MIN_TEMPERATURE`, it is below 1e34; float32 ends at 3e38. A temperature of 1e6 makes
all tokens about equally likely; an infinite one would make NaN of a token with probability 0."""


FLAGS = ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos")
"""Parameters that are true or false."""

ELSEWHERE = dict.fromkeys(
    [*(f"guided_{form}" for form in ("json", "regex", "choice", "grammar")), "response_format"],
    "give grammar=Grammar.json_schema(...), or another Grammar",
)
"""What to give in place of other libraries' parameters."""


@checks_names(ELSEWHERE)
@dataclass(frozen=True)
class SamplingParams:
    """How to sample a request's tokens, by vLLM's names.

    All parameters change the target's distribution p, and nothing else. So all of them work with speculation,
    and no drafter changes what they give.

    Args:
        temperature: divides the logits. 0: always the likeliest token.
        top_k: keep the k likeliest tokens. 0 or -1: all.
        top_p: keep the smallest set of likeliest tokens whose probabilities reach this sum (Holtzman et al.
            2019, 1904.09751). 0: only the likeliest token.
        min_p: keep tokens at least this likely, relative to the likeliest one (Nguyen et al. 2024,
            2407.01082).
        seed: the same seed gives the same tokens. None: a random one, which the result reports.
        repetition_penalty: divides the logits of tokens seen in prompt or output if they are positive, else
            multiplies them (Keskar et al. 2019, 1909.05858).
        presence_penalty: subtracted from the logits of tokens seen in the output.
        frequency_penalty: subtracted for each occurrence of a token in the output.
        logit_bias: added to the logits of these token ids. -inf bans a token.
        allowed_token_ids: no other token comes. None: all may.
        bad_words: texts that the answer does not contain, as the tokenizer spells them.
        stop: strings that end the text. They are left out of it.
        stop_token_ids: tokens that end the answer.
        include_stop_str_in_output: whether the text ends with the stop string or the stop token.
        skip_special_tokens: whether special tokens have no text.
        ignore_eos: whether the answer goes on after an end token of the model.
        max_tokens: limit of tokens in the answer. None: until the context is full. 0: only read the prompt.
        min_tokens: number of tokens before an end token may come.
        n: number of independent answers to the same prompt.
        logprobs: report the log-probability of each token, and of this number of likeliest tokens, before any
            sampling parameter. None: report nothing.
        prompt_logprobs: the same for the prompt's tokens, except the first.
        answer_start: how the answer begins, text or token ids, which are read and not written. Only for
            encoder-decoders: NLLB's target language, such as "fra_Latn", or a target to continue.
        grammar: what the answer may say. It overrides all other parameters.
        verifier: how draft tokens are accepted, a name of `VERIFIERS`; see docs/guarantee.md. "match" keeps
            the tokens. At temperature 0 all verifiers are "match".

    Raises:
        RequestError: a value is impossible.

    Example:
        >>> params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5, seed=1)
        >>> llm.generate("Once upon a time", params).text == llm.generate("Once upon a time", params).text
        True
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    max_tokens: int | None = 256
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    answer_start: str | Sequence[int] = ()
    grammar: Grammar | None = None
    verifier: str = "match"

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        if self.stop_token_ids is None:
            object.__setattr__(self, "stop_token_ids", ())
        for name, bounds in BOUNDS.items():
            object.__setattr__(self, name, bounds.accept(name, getattr(self, name)))
        object.__setattr__(self, "top_p", max(self.top_p, MIN_TOP_P))
        for name in FLAGS:
            object.__setattr__(self, name, _flag(name, getattr(self, name)))
        _check_bias(self.logit_bias)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        if not isinstance(self.answer_start, str):
            _check_token_ids("answer_start", self.answer_start)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _distinct(self.allowed_token_ids))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(
                f"grammar={self.grammar!r} is not possible: make one, such as Grammar.choice(['yes', 'no'])"
            )
        if not isinstance(self.verifier, str) or self.verifier not in VERIFIERS:
            known = ", ".join(VERIFIERS)
            raise RequestError(f"verifier={shown(self.verifier)} is not known; choose from {known}")

    @property
    def rule(self) -> Verifier:
        """The verifier in use: at temperature 0 `match`, to which all verifiers are then equivalent."""
        return VERIFIERS[self.verifier if self.temperature > 0 else "match"]

    @property
    def has_penalties(self) -> bool:
        """Whether p depends on earlier tokens through penalties too."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def changes_logits(self) -> bool:
        """Whether the model's logits are changed before temperature and truncation, without a grammar."""
        bans = self.min_tokens or self.bad_words or self.allowed_token_ids is not None
        return bool(bans or self.logit_bias or self.has_penalties)

    @cached_property
    def draws_plainly(self) -> bool:
        """Whether a draw needs the model's logits, the temperature and noise alone, without a grammar."""
        cuts = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return not (cuts or self.changes_logits) and self.rule.verify is match

    @cached_property
    def allowed_mask(self) -> npt.NDArray[np.bool_] | None:
        """`[largest + 1]`: which tokens `allowed_token_ids` has; None: all may come. Do not change it.

        It is made once for all steps of all answers.
        """
        if self.allowed_token_ids is None:
            return None
        ids = np.asarray(self.allowed_token_ids)
        mask = np.zeros(ids[-1] + 1, dtype=np.bool_)
        mask[ids] = True
        return mask

    def check_tokens(self, vocab_size: int) -> None:
        """Raise `RequestError` for token ids that the model lacks."""
        allowed = self.allowed_token_ids
        ends = () if allowed is None else (allowed[0], allowed[-1])
        for name, tokens in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", ends),
        ):
            for token in tokens:
                if not 0 <= int(token) < vocab_size:
                    raise RequestError(
                        f"{name} names token {token}; this model has tokens 0 to {vocab_size - 1}"
                    )


def _texts(name: str, value: Any) -> Collection[str]:
    """A text, or a collection of texts, as a collection. None: there are none."""
    texts = () if value is None else (value,) if isinstance(value, str) else value
    for text in texts if isinstance(texts, Collection) else (texts,):
        if not isinstance(text, str) or not text:
            found = "an empty one" if isinstance(text, str) else type_of(text)
            raise RequestError(f"{name}={shown(value)} is not possible: give strings, not {found}")
    return texts


def _flag(name: str, value: Any) -> bool:
    """A value as a bool of Python. NumPy's equal those of Python."""
    if value not in (True, False):
        raise RequestError(f"{name}={shown(value)} is not possible: it must be True or False")
    return bool(value)


def _check_bias(logit_bias: Any) -> None:
    if logit_bias is None:
        return
    if not isinstance(logit_bias, Mapping):
        raise RequestError(f"logit_bias={shown(logit_bias)} is not possible: map token ids to numbers")
    _check_token_ids("logit_bias", list(logit_bias))
    for token, bias in logit_bias.items():
        number = isinstance(bias, Real) and not isinstance(bias, bool)
        if not number or not (abs(bias) <= MAX_LOGIT_CHANGE or bias == -math.inf):
            raise RequestError(
                f"logit_bias of token {token} is {shown(bias)}: it must be between -1e6 and 1e6, or -inf"
            )


def _check_token_ids(name: str, ids: Any) -> None:
    """Raise `RequestError` unless `ids` is a collection of whole numbers."""
    if not isinstance(ids, Collection) or not all(
        isinstance(token, Integral) and not isinstance(token, bool) for token in ids
    ):
        raise RequestError(f"{name}={shown(ids)} is not possible: token ids are integers")


def _distinct(ids: Any) -> array[int]:
    """The token ids of a collection, each once, in order. Four bytes each, since there may be many."""
    if isinstance(ids, array) and ids and ids.typecode == "i" and bool((np.diff(ids) > 0).all()):
        return ids  # from other parameters
    _check_token_ids("allowed_token_ids", ids)
    try:
        distinct = array("i", sorted({int(token) for token in ids}))
    except OverflowError:
        raise RequestError("allowed_token_ids names a token that no model has") from None
    if not distinct:
        raise RequestError("allowed_token_ids=[] is not possible: it must allow at least one token")
    return distinct
