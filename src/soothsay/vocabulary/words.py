"""Rules that cut a text into words before byte-level BPE, by the names that GGUF files have for them.

The regular expressions are those of the models' own tokenizers (tokenizer.json, or the code of the model's
author). llama.cpp lists which name (`tokenizer.ggml.pre`) means which model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Words:
    """How a text is cut into words, and whether words are cut further."""

    patterns: tuple[str, ...]
    """Regular expressions, applied one after the other. What matches is a word, and so is the rest."""

    ignore_merges: bool = False
    """Whether a word that is a token is never cut."""

    compose: bool = False
    """Whether Unicode NFC comes first."""

    add_bos: bool = False
    """Whether a text begins with the token BOS if the file does not say."""


_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
"""Ends of English words, such as `'ll`."""

_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
"""White space up to the last line break, or up to the space before a word."""

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4(digits: str, letters: str = r"\p{L}", others: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """GPT-4's expression (cl100k), which most models change in one place."""
    return rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?{others}{_SPACE}"


def _gpt4o(digits: str, english: str = f"{_ENGLISH}?", breaks: str = r"[\r\n/]*", but: str = "") -> str:
    """GPT-4o's expression (o200k), which also cuts before a capital letter. `but` leaves letters out."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    words = "|".join(
        rf"[^\r\n\p{{L}}\p{{N}}]?{cased}{english}" for cased in (f"{upper}*{lower}+", f"{upper}+{lower}*")
    )
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{breaks}{_SPACE}"


_THREE = r"\p{N}{1,3}"
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that have a case, in the Unicode of the first DeepSeek."""

_DEEPSEEK_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
"""Punctuation, and everything from `:` to `~`: capital and small Latin letters too."""

_DEEPSEEK_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACE}"
)

_GPT2_WORDS = Words((_GPT2,))
_DIGIT_WORDS = Words((r"\p{N}", _GPT2))
_GPT4_WORDS = Words((_gpt4(_THREE),))
_GPT4O_WORDS = Words((_gpt4o(_THREE),))
_LLAMA3 = replace(_GPT4_WORDS, ignore_merges=True, add_bos=True)
_ONE_DIGIT = Words((_gpt4(r"\p{N}"),))
_QWEN2 = replace(_ONE_DIGIT, compose=True)
_QWEN35 = Words((_gpt4(r"\p{N}", r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), compose=True)
_DEEPSEEK3 = Words((_THREE, "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3))
_KIMI = r"\p{Han}+|" + _gpt4o(_THREE, breaks=r"[\r\n]*", but=r"&&[^\p{Han}]")

WORDS: Mapping[str, Words] = {
    **dict.fromkeys(
        ("default", "gpt-2", "a.x-4.0", "gigachat", "granite-docling", "mellum", "trillion"), _GPT2_WORDS
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), _DIGIT_WORDS),
    "command-r": replace(_DIGIT_WORDS, compose=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _GPT4_WORDS),
    "glm4": replace(_GPT4_WORDS, ignore_merges=True),
    "minicpm5": Words((_THREE, _gpt4(r"\p{N}+")), ignore_merges=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("megrez", "solar-open"), _ONE_DIGIT),
    "qwen35": _QWEN35,
    "seed-coder": Words((_gpt4(r"\p{N}", others=r"[^\s\p{L}\p{N}]+"),)),
    "tekken": Words((_gpt4o(r"\p{N}", english=""),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O_WORDS),
    "kimi-k2": Words((_KIMI,), ignore_merges=True),
    "deepseek-llm": Words(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            rf"\s?[{_DEEPSEEK_MARKS}]+",
            r"\s+$",
            _DEEPSEEK_ASIAN,
            r"\p{N}",
        )
    ),
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), _DEEPSEEK3),
}
"""Rules by the names that GGUF files of soothsay's families have for them."""
