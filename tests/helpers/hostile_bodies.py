"""Bodies of requests that follow an OpenAPI description, with hostile values in some places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]

NUMBERS = [0, -1, 1, 2, 0.5, -0.0, 1e-300, 1e308, -1e308, 2**31, -(2**31), 2**53 + 1, 2**63, 2**64, 10**40]
TEXTS = [
    *(
        "",
        " ",
        "\0",
        "\n" * 50,
        "a" * 3000,
        "\U0010ffff",
        "‮abc",
        "e\u0301" * 40,
        "{{7*7}}",
        "{% raw %}",
        "%s%n",
    ),
    *(
        "../../etc/passwd",
        "sibyl",
        "auto",
        "none",
        "suffix(store=/etc/passwd)",
        "[[[[[[[[",
        "(a+)+$",
        "(" * 60,
    ),
    *(
        "<|im_end|>",
        "<tool_call>",
        "[1]" * 40,
        '{"a":' * 40,
        "start: start",
        "start: /(a|b)*c/",
        "NaN",
        "1e999",
    ),
]
NESTED: Any = "x"
for _ in range(40):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "items": [NESTED]} if _ % 8 == 0 else [NESTED]
OTHERS = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [{}],
    [None],
    {"": {}},
    NESTED,
    [0] * 200,
    ["a"] * 200,
    {"type": 5},
]

SCHEMAS = [
    {"type": "object"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"$ref": "#/$defs/nowhere"},
    {"$ref": "http://127.0.0.1:9/x.json"},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 10**9},
    {"type": "string", "pattern": "(a|aa)+$", "maxLength": 10**12},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"anyOf": [{"$ref": "#/anyOf/0"}]},
    {"type": "object", "properties": {f"p{i}": {} for i in range(100)}},
    {"type": "object", "patternProperties": {".*": False}, "additionalProperties": False},
    {"enum": []},
    False,
]
"""JSON schemas that are hard, wrong or endless."""

ANYTHING = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.sampled_from(OTHERS), st.sampled_from(SCHEMAS)
)

ORDINARY: dict[str, Any] = {
    "model": "sibyl",
    "max_tokens": 4,
    "max_completion_tokens": 4,
    "max_output_tokens": 4,
    "options": {"num_predict": 4},
    "input": "Once upon a time",
    "prompt": "Once upon a time",
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0.7,
    "n": 1,
}
"""Values with which a request is likely to be served, by the name of their field."""

HOSTILE_SHARE = 15
"""One field in so many has a value of any kind."""

ALWAYS = ("model", "messages", "prompt", "input", "max_tokens", "max_output_tokens", "options")
"""Fields that are rarely left out, so that most bodies get beyond the first check, and answers are short."""


def bodies(description: Mapping[str, Any]) -> st.SearchStrategy[tuple[str, Any]]:
    """Paths with a POST, each with a body for it.

    Args:
        description: what `GET /openapi.json` gives.
    """
    schemas = description["components"]["schemas"]
    posts = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, methods in description["paths"].items()
        if "post" in methods
    }
    return st.one_of(
        *[st.tuples(st.just(path), _values(schema, schemas, 0)) for path, schema in posts.items()]
    )


def _values(schema: Schema, schemas: Mapping[str, Schema], depth: int) -> st.SearchStrategy[Any]:
    """Values that fit a schema."""
    if "$ref" in schema:
        return st.deferred(lambda: _values(schemas[schema["$ref"].rpartition("/")[2]], schemas, depth))
    if depth > 6:
        return ANYTHING
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return st.one_of(*[_values(one, schemas, depth + 1) for one in schema[several]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            return st.deferred(lambda: _objects(schema, schemas, depth))
        case "object":
            return st.one_of(
                st.sampled_from([one for one in SCHEMAS if isinstance(one, dict)]),
                st.dictionaries(st.sampled_from(["1", "a", "", "x-guidance"]), ANYTHING, max_size=2),
            )
        case "array":
            items = schema.get("items", {})
            return st.lists(_values(items, schemas, depth + 1) if items else ANYTHING, max_size=4)
        case "string":
            return st.one_of(st.sampled_from(TEXTS), st.text(max_size=8))
        case "integer":
            return st.one_of(st.integers(-2, 20), st.sampled_from([n for n in NUMBERS if isinstance(n, int)]))
        case "number":
            return st.one_of(st.floats(-3, 3), st.sampled_from(NUMBERS))
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return ANYTHING


def _objects(schema: Schema, schemas: Mapping[str, Schema], depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Objects: a few of the fields, each ordinary, fitting or hostile; rarely one that is not known."""
    names = list(schema["properties"])
    required = [name for name in names if name in ALWAYS or name in schema.get("required", ())]

    @st.composite
    def build(draw: st.DrawFn) -> dict[str, Any]:
        chosen = [name for name in required if draw(st.integers(0, 19))]
        optional = [name for name in names if name not in required]
        if optional:
            chosen += draw(st.lists(st.sampled_from(optional), max_size=3, unique=True))
        made: dict[str, Any] = {}
        for name in chosen:
            kind = draw(st.integers(0, HOSTILE_SHARE))
            if kind == 0:
                made[name] = draw(ANYTHING)
            elif depth == 0 and name in ORDINARY and kind > 2:
                made[name] = ORDINARY[name]
            else:
                made[name] = draw(_values(schema["properties"][name], schemas, depth + 1))
        if not draw(st.integers(0, 29)):
            made[draw(st.sampled_from(["foo", "", "__class__", "\0"]))] = draw(ANYTHING)
        return made

    return build()
