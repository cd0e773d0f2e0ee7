"""Grammars: which texts an answer may be.

A token is allowed if the answer with it is a prefix of a text that the grammar accepts. An end token is
allowed if the grammar accepts the answer, and only end tokens are allowed if no longer text exists. The model
chooses how text is cut into tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from soothsay.errors import RequestError

MAX_SOURCE = 1 << 18
"""Maximum size of a grammar in characters; compiling takes about a second."""

MAX_LEVELS = 300
"""Maximum number of JSON values in each other in a schema, through references too. The compiler calls itself
for each level, and 900 levels overflow a stack of 2 MiB."""

MAX_VALUES = 50_000
"""Maximum number of JSON values in a schema. Ordinary schemas have some hundred."""

MAX_RULES = 1_000
"""Maximum number of rules in a Lark grammar. 3,000 rules that call each other overflow a stack of 8 MiB."""

WHITESPACE = r" |\n {0,32}"
"""Whitespace allowed between JSON tokens: nothing, a space, or a line break with an indentation. Without a
bound, an uncertain model emits whitespace for ever."""


FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Values of `format` that the compiler enforces. Others are annotations (JSON Schema 2020-12, 7.2.3)."""

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose values are schemas by name."""

DATA = ("const", "enum", "default", "examples")
"""Keywords of a schema whose values are data."""

RULE = re.compile(r"^[ \t]*+[?!]?\w++[^\n:]*+:", re.MULTILINE)
"""The beginning of a rule in Lark."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A set of texts that an answer may be. Its class methods make one.

    They raise `RequestError` for impossible arguments. A grammar is compiled when a request uses it, and
    errors of compilation come then.

    Example:
        >>> params = SamplingParams(grammar=Grammar.choice(["yes", "no"]))
        >>> llm.generate("Is the sky blue?", params).text in ("yes", "no")
        True
    """

    source: str
    """The rules, in llguidance's JSON, with the grammars that they are joined of, see `sources`."""

    def __post_init__(self) -> None:
        """Raise `RequestError` for a grammar that is too large."""
        _check_size(len(self.source))

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that fits a schema, given as a mapping or as JSON text.

        Properties come in the schema's order. Compilation fails for unsupported keywords; a `format` that is
        not in `FORMATS` has no effect. `WHITESPACE` may stand between tokens, unless the schema has
        llguidance's own options, for example `"x-guidance": {"whitespace_flexible": false}`.
        """
        if isinstance(schema, str):
            _check_size(len(schema))
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(parsed, Mapping):
                raise TypeError("it must be an object, such as {}")
            _check_levels(parsed)
            bounded_json(parsed)  # before it is copied
            usual = {} if "x-guidance" in parsed else {"x-guidance": {"whitespace_pattern": WHITESPACE}}
            return cls(bounded_json({"json_schema": {**_without_annotations(parsed), **usual}}))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is not possible: {error}") from None

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole.

        The syntax is that of Rust's `regex`, without inner anchors, lookaround and backreferences.
        """
        _check_text("regex", pattern)
        return cls.lark(f"start: /{regex_to_lark(pattern)}/")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of some texts."""
        if isinstance(texts, str) or not texts:
            raise RequestError(f"choice={texts!r} is not possible: give one text or more, in a list")
        for text in texts:
            _check_text("choice", text)
        _check_size(sum(map(len, texts)))
        # one terminal: the lexer reads thousands of texts faster than the parser reads a hundred
        return cls.lark("start: TEXT\nTEXT: " + " | ".join(map(quoted, texts)))

    @classmethod
    def lark(cls, rules: str) -> Grammar:
        """A context-free grammar in llguidance's dialect of Lark. The first rule is `start`."""
        _check_text("lark", rules)
        if (count := len(RULE.findall(rules))) > MAX_RULES:
            raise RequestError(f"the grammar has {count} rules; {MAX_RULES} are possible: make it shorter")
        return cls(json.dumps({"lark_grammar": rules}))

    @classmethod
    def joined(cls, rules: str, **parts: Grammar) -> Grammar:
        """Texts that consist of texts of other grammars.

        Args:
            rules: in Lark. `@name` stands for a text of the part with this name.
            parts: grammars that are not joined themselves, by name.
        """
        inner = {name: json.loads(part.source) for name, part in parts.items()}
        return cls(json.dumps({"lark_grammar": rules, "parts": inner}))

    def or_else(self, looser: Grammar) -> Grammar:
        """This grammar, or another one where this one cannot be compiled."""
        return Grammar(json.dumps({**json.loads(self.source), "otherwise": json.loads(looser.source)}))

    @property
    def parts(self) -> list[Grammar]:
        """The grammars that this one is joined of, or itself."""
        parts = json.loads(self.source).get("parts", {})
        return [Grammar(json.dumps(part)) for part in parts.values()] or [self]

    def sources(self, *, loose: bool) -> list[dict[str, Any]]:
        """The rules by the name `answer`, and those of the parts by their names, in llguidance's JSON.

        Args:
            loose: whether each grammar that has another one for this case (`or_else`) is that one.
        """
        whole = json.loads(self.source)
        named = {"answer": whole, **whole.pop("parts", {})}
        chosen = {name: one.pop("otherwise", one) if loose else one for name, one in named.items()}
        return [
            {"name": name, **{key: value for key, value in one.items() if key != "otherwise"}}
            for name, one in chosen.items()
        ]


def bounded_json(value: Any) -> str:
    """A value as JSON, in the spacing of `json.dumps`. Raises `RequestError` for more than `MAX_SOURCE`.

    It stops there. A value may be much larger than what it was made of, if parts of it occur many times.
    """
    parts, size = list[str](), 0
    for part in json.JSONEncoder(allow_nan=False).iterencode(value):
        parts.append(part)
        size += len(part)
        _check_size(size)
    return "".join(parts)


def spelled(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark. Special tokens in it are named by their ids, since texts never match them.

    Args:
        text: for example a tag of a chat template.
        special: ids of the model's special tokens.

    Example:
        >>> spelled("<|channel|>final", {"<|channel|>": 5})
        '<[5]> "final"'
    """
    found = [re.escape(token) for token in sorted(special, key=len, reverse=True) if token and token in text]
    pieces = re.split(f"({'|'.join(found)})", text) if found else [text]
    return " ".join(
        f"<[{special[piece]}]>" if piece in special else quoted(piece) for piece in pieces if piece
    )


def quoted(text: str) -> str:
    """A text as Lark writes it: as JSON does, but for one control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_size(size: int) -> None:
    """Raise `RequestError` for a grammar that has too many characters, or is made of too many."""
    if size > MAX_SOURCE:
        raise RequestError(f"the grammar has {size} characters; {MAX_SOURCE} are possible: make it shorter")


def _check_text(name: str, text: object) -> None:
    """Raise `RequestError` unless `text` is a text of a possible size that UTF-8 can encode."""
    if not isinstance(text, str):
        raise RequestError(f"{name}={text!r} is not possible: it must be text")
    _check_size(len(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name}={text!r} is not possible: it contains half a character") from error


def _check_levels(schema: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a schema with too many values, or with too many in each other.

    References are followed where they are met first, as a compiler does.
    """
    followed: set[str] = set()
    stack: list[tuple[Any, int]] = [(schema, 1)]
    count = 1
    while stack:
        value, level = stack.pop()
        if level > MAX_LEVELS:
            raise ValueError(f"it is nested deeper than {MAX_LEVELS} values, references included")
        inner: Collection[Any] = ()
        if isinstance(value, Mapping):
            inner = value.values()
            target = value.get("$ref")
            if isinstance(target, str) and target not in followed:
                followed.add(target)
                inner = [*inner, _resolve(schema, target)]
        elif isinstance(value, list):
            inner = value
        count += len(inner)
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values; make it smaller")
        stack += [(one, level + 1) for one in inner]


def _without_annotations(schema: Any) -> Any:
    """A schema without the values of `format` that are annotations only."""
    if isinstance(schema, list):
        return [_without_annotations(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, Mapping):
            kept[key] = {name: _without_annotations(one) for name, one in value.items()}
        elif key != "format" or (isinstance(value, str) and value in FORMATS):
            kept[key] = value if key in DATA else _without_annotations(value)
    return kept


def _resolve(schema: Mapping[str, Any], reference: str) -> Any:
    """What a reference within a schema points to; None if it points elsewhere or nowhere."""
    found: Any = schema
    for name in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#") else ():
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name:
            found = found.get(name.replace("~1", "/").replace("~0", "~"))
        elif name:
            return None
    return found if reference.startswith("#") else None
