"""Byte-level BPE: words become tokens of bytes. Mistral's `tekken.json` has such tokens by rank.

Rules cut a text into words before, by the names that GGUF files have for them. The regular expressions are
those of the models' own tokenizers (tokenizer.json, or the code of the model's author). llama.cpp lists which
name (`tokenizer.ggml.pre`) means which model.
"""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from soothsay.vocabulary.merges import Merges, check_lengths


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

_BEFORE_WORD = r"|\s+(?!\S)|\s+"
"""White space up to the space before a word."""

_SPACE = r"|\s*[\r\n]+" + _BEFORE_WORD
"""White space up to the last line break, or up to the space before a word."""

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4(
    digits: str,
    letters: str = r"\p{L}",
    others: str = r"[^\s\p{L}\p{N}]+[\r\n]*",
    *,
    english: str = f"{_ENGLISH}|",
    space: str = _SPACE,
) -> str:
    """GPT-4's expression (cl100k), which most models change in one place."""
    return rf"{english}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?{others}{space}"


def _gpt4o(digits: str, english: str = f"{_ENGLISH}?", breaks: str = r"[\r\n/]*", but: str = "") -> str:
    """GPT-4o's expression (o200k), which also cuts before a capital letter. `but` leaves letters out."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    words = "|".join(
        rf"[^\r\n\p{{L}}\p{{N}}]?{cased}{english}" for cased in (f"{upper}*{lower}+", f"{upper}+{lower}*")
    )
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{breaks}{_SPACE}"


_THREE = r"\p{N}{1,3}"
_THOUSANDS = r"(?<!\d)\d{1,3}(?=(?:\d{3})*+(?!\w))|\G(?<=\d)\d{3}"
"""Digits in threes from the end of a number that no letter follows. `\\G` is the end of the match before.
It looks ahead only from a number's start, so long numbers take linear time."""

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
_CHINESE_OR_KANA = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"


def _deepseek(breaks: str = rf"[\r\n]*{_SPACE}") -> str:
    """DeepSeek-V3's expression for what is left of digits, Chinese and Japanese."""
    marks = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    return rf"{marks}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+{breaks}"


_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
"""BLOOM's expression: words up to white space or a mark that ends a part of a sentence."""

_GPT2_WORDS = Words((_GPT2,))
_DIGIT_WORDS = Words((r"\p{N}", _GPT2))
_GPT4_WORDS = Words((_gpt4(_THREE),))
_GPT4O_WORDS = Words((_gpt4o(_THREE),))
_JAIS_SPACE = (
    r"|\s*[\r\n]+"
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s"
)
"""White space in pieces of powers of two."""

_EXAONE = _gpt4(
    r"\p{N}",
    r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)",
    r"[^\s\p{L}\p{N}]+[\r\n/]?",
    space=rf"|\s*[\r\n]{_BEFORE_WORD}",
)
_YOUTU_ASIAN = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+" + f"|[{_CHINESE_OR_KANA}]+"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    rf"\s?[{_DEEPSEEK_MARKS}]+",
    r"\s+$",
    _DEEPSEEK_ASIAN,
    r"\p{N}",
)
_LLAMA3 = replace(_GPT4_WORDS, ignore_merges=True, add_bos=True)
_ONE_DIGIT = Words((_gpt4(r"\p{N}"),))
_QWEN2 = replace(_ONE_DIGIT, compose=True)
_QWEN35 = Words((_gpt4(r"\p{N}", r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), compose=True)
_DEEPSEEK3 = Words((_THREE, f"[{_CHINESE_OR_KANA}]+", _deepseek()))
_TEKKEN = Words((_gpt4o(r"\p{N}", english=""),), ignore_merges=True, add_bos=True)
_BLOOM_WORDS = Words((_BLOOM,))
_KIMI = r"\p{Han}+|" + _gpt4o(_THREE, breaks=r"[\r\n]*", but=r"&&[^\p{Han}]")

_SPLIT: Mapping[Words, tuple[str, ...]] = {  # a rule, and its names
    _GPT2_WORDS: (
        *("default", "gpt-2", "a.x-4.0", "exaone4", "gigachat", "granite-docling", "jais", "mellum", "mpt"),
        *("olmo", "phi-2", "trillion"),
    ),
    _DIGIT_WORDS: ("smollm", "codeshell", "exaone", "mellum2", "minerva-7b", "refact", "starcoder"),
    replace(_DIGIT_WORDS, compose=True): ("command-r",),
    _LLAMA3: ("llama-bpe", "falcon-h1", "falcon3", "lfm2", "llama-v3", "llama3", "midm-2.0"),
    _GPT4_WORDS: ("dbrx", "chatglm-bpe", "smaug-bpe"),
    replace(_GPT4_WORDS, ignore_merges=True): ("glm4", "glm5"),
    Words((_gpt4(_THREE, space=_JAIS_SPACE),)): ("jais-2",),
    Words((_THREE, _gpt4(r"\p{N}+")), ignore_merges=True): ("minicpm5",),
    _QWEN2: ("qwen2", "deepseek-r1-qwen"),
    _ONE_DIGIT: ("megrez", "grok-2", "hunyuan", "kormo", "solar-open", "stablelm2"),
    Words((r"[^\n]+|\n+", _gpt4(r"\p{N}"))): ("laguna",),
    Words((_gpt4(r"\p{N}", english=""),)): ("ufakzeka",),
    _QWEN35: ("qwen35",),
    Words((_gpt4(r"\p{N}", others=r"[^\s\p{L}\p{N}]+"),)): ("seed-coder",),
    Words((_gpt4(r"\p{N}", space=rf"|\s*[\r\n]{_BEFORE_WORD}"),)): ("bailingmoe", "bailingmoe2"),
    Words((_EXAONE,)): ("exaone-moe",),
    _TEKKEN: ("tekken", "pixtral"),
    _GPT4O_WORDS: ("gpt-4o", "kanana2", "llama4", "minimax-m2", "talkie"),
    Words((_YOUTU_ASIAN, _gpt4o(r"\p{N}")), ignore_merges=True): ("youtu",),
    Words((_THOUSANDS, _gpt4o(_THREE))): ("tiny_aya", "cohere2moe"),
    Words((_KIMI,), ignore_merges=True): ("kimi-k2",),
    Words(_DEEPSEEK_LLM): ("deepseek-llm",),
    Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, r"\p{N}")): ("deepseek-coder",),
    _DEEPSEEK3: ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"),
    Words((*_DEEPSEEK3.patterns[:2], _deepseek(rf"|[\r\n]{_BEFORE_WORD}"), r"\p{N}")): ("spark2_5",),
    Words((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")): ("falcon",),
    _BLOOM_WORDS: ("bloom", "gpt3-finnish", "poro-chat"),
    Words((_BLOOM, r"\p{N}")): ("viking",),
}
WORDS: Mapping[str, Words] = {name: words for words, names in _SPLIT.items() for name in names}
"""Rules by the names that GGUF files have for them."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("f2llmv2", "granite-embed-multi-311m", "granite-embed-multi-97m", "jina-de", "jina-es"),
            *("jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-v5-nano", "mmbert"),
            *("modern-bert", "roberta-bpe", "whitespace"),
        ),
        "it belongs to models that make embeddings, not texts",
    ),
    **dict.fromkeys(("gemma4", "sarvam-moe"), "its tokens are texts, and a byte-level vocabulary has bytes"),
    "afmoe": "which Asian letters it cuts apart is not known",
    "chameleon": "it has words for images",
    "llada-moe": "it belongs to a diffusion model",
    "superbpe": "its words take quadratic time for long numbers",
}
"""Names that llama.cpp knows too, and why texts are not cut by them."""


def byte_level(ids: dict[str, int], merges: Sequence[tuple[str, str]], words: Words) -> Backend:
    """A tokenizer of the tokens `ids`, whose texts have a character for each byte (`byte_text`).

    Raises `Exception`, or a panic of the library, if the merges do not belong to the tokens.
    """
    backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=words.ignore_merges))
    if words.compose:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_text(token: bytes) -> str:
    """The text of a token: each byte as a character that can be printed (GPT-2, 2019)."""
    return token.decode("latin-1").translate(_UNPRINTABLE)


_UNPRINTABLE = {
    byte: 256 + place
    for place, byte in enumerate(byte for byte in range(256) if not chr(byte).isprintable() or byte == 32)
}
"""Bytes that stand for no printable character of Latin-1, and the characters in their place."""

BYTE_LETTERS = {byte_text(bytes([byte])): byte for byte in range(256)}
"""The byte that each character stands for."""


MAX_TOKENS = 2**20
"""Limit of tokens. Mistral's files list 150,000."""

MAX_PATTERN = 4096
"""Limit of the expression that cuts words, in characters. Mistral's has 260."""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Special tokens by the names that templates have for them."""

_OLD_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens of files that do not list them, those before version 11."""


def tekken(content: Mapping[str, Any]) -> Backend:
    """The tokenizer of a `tekken.json`.

    The first ids are those of special tokens. The others follow by rank, as many as the file says.

    Raises `ValueError` for a damaged file.
    """
    config = content.get("config")
    if not isinstance(config, dict):
        raise ValueError("it has no 'config'")
    pattern = config.get("pattern")
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise ValueError(f"'pattern' is not a text of at most {MAX_PATTERN:,} characters")
    size, num_special = (_count(config, key) for key in ("default_vocab_size", "default_num_special_tokens"))
    special = _special(content.get("special_tokens"), num_special)
    tokens = [byte_text(token) for token in _tokens(content.get("vocab"), size - num_special)]
    check_lengths([*special, *tokens])
    ids = {text: i for i, text in enumerate([*special, *tokens])}
    if len(ids) != size:
        raise ValueError("several tokens have the same text")
    if max(map(len, tokens)) < 2:
        raise ValueError("it has no tokens of several bytes")
    backend = byte_level(ids, Merges(tokens), Words((pattern,), ignore_merges=True))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return backend


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{key!r} is {value!r:.40}, and should be a number up to {MAX_TOKENS:,}")
    return value


def _special(given: Any, count: int) -> list[str]:
    """The texts of special tokens by id. Those that the file does not name have a number."""
    names = dict(enumerate(_OLD_SPECIAL))
    if given is not None:
        names = {_entry(one, "rank", int): _entry(one, "token_str", str) for one in _entries(given)}
    if names and not (min(names) >= 0 and max(names) < count):
        raise ValueError(f"its special tokens do not fit {count:,} ids")
    return [names.get(i, f"<SPECIAL_{i}>") for i in range(count)]


def _tokens(given: Any, count: int) -> list[bytes]:
    """The bytes of the first `count` tokens by rank."""
    found = {}
    for one in _entries(given):
        if (rank := _entry(one, "rank", int)) < count:
            found[rank] = b64decode(_entry(one, "token_bytes", str), validate=True)
    if count <= 0 or sorted(found) != [*range(count)]:
        raise ValueError(f"its ranks are not those from 0 to {count - 1:,}")
    return [found[rank] for rank in range(count)]


def _entries(given: Any) -> Sequence[Any]:
    if not isinstance(given, list):
        raise ValueError("'vocab' and 'special_tokens' should be lists")
    return given


def _entry(one: Any, key: str, kind: type) -> Any:
    value = one.get(key) if isinstance(one, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"a token has no {key!r}")
    return value
