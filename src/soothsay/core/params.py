"""Sampling parameters of a request. `sampling.py` applies them, and needs torch; this file does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soothsay.core.grammar import Grammar
from soothsay.core.verify import VERIFIERS, Verifier
from soothsay.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, in vLLM's names. They change p alone, so all are valid under speculation."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1: all
    top_p: float = (
        1.0  # keep the smallest set of tokens with this probability (Holtzman et al. 2019, 1904.09751)
    )
    min_p: float = (
        0.0  # keep tokens at least this likely relative to the likeliest (Nguyen et al. 2024, 2407.01082)
    )
    seed: int | None = None  # None: a random one, which the result reports
    repetition_penalty: float = (
        1.0  # divide (or multiply) logits of tokens seen in prompt or output (1909.05858)
    )
    presence_penalty: float = 0.0  # subtract from tokens seen in the output
    frequency_penalty: float = 0.0  # subtract for each occurrence of a token in the output
    logit_bias: Mapping[int, float] | None = None  # added to the logits of token ids
    allowed_token_ids: Sequence[int] | None = None  # no other token comes; None: all may
    bad_words: Sequence[str] = ()  # texts that the answer does not contain, as the tokenizer spells them
    stop: str | Sequence[str] = ()  # strings that end the text and are left out of it
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False  # whether the text ends with the stop string or token
    skip_special_tokens: bool = True  # whether special tokens have no text
    ignore_eos: bool = False
    max_tokens: int | None = 256  # None: until the context is full; 0: only read the prompt
    min_tokens: int = 0  # tokens before an end token may come
    n: int = 1  # independent answers to the same prompt
    logprobs: int | None = (
        None  # report log-probabilities: of each token and of this number of likeliest tokens
    )
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, except the first
    grammar: Grammar | None = None  # what the answer may say; it overrides all other parameters
    verifier: str = "match"  # a name of `VERIFIERS`; at temperature 0 always match

    def __post_init__(self) -> None:
        """Raise `RequestError` for an impossible value."""
        for name in ("stop", "bad_words"):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, (text,))
        for name, kind, low, high, what in (
            ("temperature", (int, float), 0.0, math.inf, "at least 0"),
            ("top_k", int, -1, math.inf, "an integer, at least 1, or 0 for all tokens"),
            ("top_p", (int, float), 1e-9, 1.0, "above 0 and at most 1"),
            ("min_p", (int, float), 0.0, 1.0, "between 0 and 1"),
            ("repetition_penalty", (int, float), 1e-3, math.inf, "above 0"),
            ("presence_penalty", (int, float), -math.inf, math.inf, "a number"),
            ("frequency_penalty", (int, float), -math.inf, math.inf, "a number"),
            ("min_tokens", int, 0, math.inf, "an integer, at least 0"),
            ("n", int, 1, 1024, "an integer between 1 and 1024"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) or not low <= value <= high or math.isinf(value):
                raise RequestError(f"{name}={value!r} is not possible: it must be {what}")
        for name, low in (("max_tokens", 0), ("logprobs", 0), ("prompt_logprobs", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < low):
                raise RequestError(
                    f"{name}={value!r} is not possible: it must be an integer, at least {low}, or None"
                )
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(bias, (int, float)) or not bias < math.inf:
                raise RequestError(f"logit_bias of token {token} is {bias!r}: it must be a number")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(
                f"grammar={self.grammar!r} is not possible: make one, such as Grammar.choice(['yes', 'no'])"
            )
        if self.verifier not in VERIFIERS:
            raise RequestError(f"verifier={self.verifier!r} is not known; choose from {', '.join(VERIFIERS)}")
        for name in ("stop", "bad_words"):
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                message = f"{name}={getattr(self, name)!r} is not possible: give strings that are not empty"
                raise RequestError(message)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids=[] is not possible: it must allow at least one token")

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

    def check_tokens(self, vocab_size: int) -> None:
        """Raise `RequestError` for token ids that the model lacks."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if not 0 <= int(token) < vocab_size:
                    raise RequestError(
                        f"{name} names token {token}; this model has tokens 0 to {vocab_size - 1}"
                    )
