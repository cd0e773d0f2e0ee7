"""Answers with tool calls, and the text and the calls that a client must get for each."""

from __future__ import annotations

Told = tuple[str, list[tuple[str, str]]]
"""Text, and the name and arguments of each call."""

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "a < b"}}\n</tool_call>'
ARGUMENTS = '{"x": "a < b"}'

HERMES: dict[str, Told] = {
    "Hello": ("Hello", []),
    "a < b <tool": ("a < b <tool", []),
    CALL: ("", [("f", ARGUMENTS)]),
    f"Let me see.\n\n{CALL}\n{CALL}": ("Let me see.", [("f", ARGUMENTS)] * 2),
    f"A {CALL} \n B ": ("AB ", [("f", ARGUMENTS)]),
    CALL.removesuffix("</tool_call>"): ("", [("f", ARGUMENTS)]),  # ended instead of closing
    "<tool_call>{not json}</tool_call> and": ("<tool_call>{not json}</tool_call> and", []),
    '<tool_call>{"name": 3}</tool_call>': ('<tool_call>{"name": 3}</tool_call>', []),
    '<tool_call>{"name": "g"': ('<tool_call>{"name": "g"', []),  # cut by max_tokens
    f"<tool_call>[1]</tool_call>{CALL}": ("<tool_call>[1]</tool_call>", [("f", ARGUMENTS)]),
}

LLAMA: dict[str, Told] = {
    "Hello {you}": ("Hello {you}", []),
    '{"name": "f", "parameters": {"x": 1}}': ("", [("f", '{"x": 1}')]),
    '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": "};{"}}': (
        "",
        [("f", "{}"), ("g", '{"y": "};{"}')],
    ),
    '{"name": "f", "parameters": {}} and so': ('{"name": "f", "parameters": {}} and so', []),
    '{"name": "f"; }': ('{"name": "f"; }', []),
    '{"answer": 42}': ('{"answer": 42}', []),
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "string"},
                    "n": {"type": "integer"},
                    "o": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
                    "sure": {"type": "boolean"},
                    "either": {"type": ["number", "string"]},
                    "kind": {"enum": ["a", 2]},
                },
                "$defs": {"Place": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]
"""The tools of the calls below. The values of their arguments have the types that are here."""

XML = """<tool_call>
<function=f>
<parameter=x>
5 < 6

</parameter>
<parameter=n>
7
</parameter>
<parameter=o>
{"a": [1]}
</parameter>
<parameter=sure>
True
</parameter>
</function>
</tool_call>"""
XML_ARGUMENTS = '{"x": "5 < 6\\n", "n": 7, "o": {"a": [1]}, "sure": true}'
NO_ARGUMENTS = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
ODD_VALUES = (
    "<function=f><parameter=n>x</parameter><parameter=o>None</parameter><parameter=either>1e999</parameter>"
    "<parameter=kind>2</parameter><parameter=other>3</parameter></function>"
)

QWEN_CODER: dict[str, Told] = {
    "Hello <b> <function": ("Hello <b> <function", []),
    XML: ("", [("f", XML_ARGUMENTS)]),
    f"Let me see.\n\n{XML}\n{NO_ARGUMENTS}\n": ("Let me see.", [("f", XML_ARGUMENTS), ("g", "{}")]),
    f"A{XML.removeprefix('<tool_call>')} B": ("AB", [("f", XML_ARGUMENTS)]),  # without the first tag
    XML.removesuffix("</tool_call>"): ("", [("f", XML_ARGUMENTS)]),
    XML.removesuffix("</function>\n</tool_call>"): (XML.removesuffix("</function>\n</tool_call>"), []),  # cut
    ODD_VALUES: ("", [("f", '{"n": "x", "o": null, "either": "1e999", "kind": 2, "other": "3"}')]),
    "<function=f><parameter=o>{'a': (1, None)}</parameter></function>": (
        "",
        [("f", '{"o": {"a": [1, null]}}')],
    ),
    "<function=f><parameter=x>a</parameter>": ("<function=f><parameter=x>a</parameter>", []),
    "<function=f>text</function>!": ("<function=f>text</function>!", []),
    "<function=f g></function>": ("<function=f g></function>", []),
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>': ("", [("g", "{}")]),  # forced by a grammar
    "<tool_call>no</tool_call></tool_call>": ("<tool_call>no</tool_call></tool_call>", []),
}

PAIRS = (
    "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>a < b</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
)
PAIRS_ARGUMENTS = '{"x": "a < b", "n": 7}'

GLM: dict[str, Told] = {
    "Hello": ("Hello", []),
    PAIRS: ("", [("f", PAIRS_ARGUMENTS)]),
    f"So.\n{PAIRS}\n{PAIRS}": ("So.", [("f", PAIRS_ARGUMENTS)] * 2),
    "<tool_call>g</tool_call>": ("", [("g", "{}")]),
    "<tool_call>well</tool_call>": ("<tool_call>well</tool_call>", []),
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>': ("", [("g", "{}")]),
    PAIRS.removesuffix("</tool_call>"): (PAIRS.removesuffix("</tool_call>"), []),  # cut by max_tokens
    "<tool_call>f<arg_key>x</arg_key>no</tool_call>": ("<tool_call>f<arg_key>x</arg_key>no</tool_call>", []),
}

MISTRAL: dict[str, Told] = {
    "Hello [TOOL": ("Hello [TOOL", []),
    '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}, "id": "abcdefghi"}]': ("", [("f", '{"x": "]"}')]),
    'So.\n[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]\n': (
        "So.",
        [("f", "{}"), ("g", "{}")],
    ),
    '[TOOL_CALLS]f[ARGS]{"x": "[ARGS]"}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}': (
        "",
        [("f", '{"x": "[ARGS]"}'), ("g", "{}")],
    ),
    '[TOOL_CALLS]g{"y": 1}': ("", [("g", '{"y": 1}')]),
    '[TOOL_CALLS]f[ARGS]{"x": 1': ('[TOOL_CALLS]f[ARGS]{"x": 1', []),
    "[TOOL_CALLS] [{}]": ("[TOOL_CALLS] [{}]", []),
    "[TOOL_CALLS] []": ("[TOOL_CALLS] []", []),
    "[TOOL_CALLS]f[ARGS]{} so": ("[TOOL_CALLS]f[ARGS]{} so", []),
    "[TOOL_CALLS] no [TOOL_CALLS]f[ARGS]{}": ("[TOOL_CALLS] no ", [("f", "{}")]),
}

KIMI_CALL = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": "a"}<|tool_call_end|>'
KIMI_OTHER = "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|> {} <|tool_call_end|>"
KIMI_SECTION = f"<|tool_calls_section_begin|>{KIMI_CALL}{KIMI_OTHER}<|tool_calls_section_end|>"

KIMI: dict[str, Told] = {
    "Hello <|tool_call": ("Hello <|tool_call", []),
    KIMI_SECTION: ("", [("f", '{"x": "a"}'), ("g", "{}")]),
    f"So. {KIMI_SECTION} \n": ("So.", [("f", '{"x": "a"}'), ("g", "{}")]),
    KIMI_CALL: ("", [("f", '{"x": "a"}')]),
    KIMI_SECTION.removesuffix("<|tool_call_end|><|tool_calls_section_end|>"): (
        "",
        [("f", '{"x": "a"}'), ("g", "{}")],
    ),
    KIMI_CALL.replace("}", ""): (KIMI_CALL.replace("}", ""), []),
    "<|tool_calls_section_begin|> none": ("<|tool_calls_section_begin|> none", []),
}


def wide(text: str) -> str:
    """Tags as DeepSeek writes them."""
    for tag in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        text = text.replace(f"<|tool_{tag}|>", f"<\uff5ctool\u2581{tag.replace('_', chr(0x2581))}\uff5c>")
    return text


DEEPSEEK: dict[str, Told] = {
    wide(text): (wide(told[0]), told[1])
    for text, told in {
        "Hello": ("Hello", []),
        '<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"x": 1}<|tool_call_end|><|tool_calls_end|>': (
            "",
            [("f", '{"x": 1}')],
        ),
        "So.<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f\n```json\n{}\n```<|tool_call_end|>\n"
        "<|tool_call_begin|>function<|tool_sep|>g\n```json\n{}\n```<|tool_call_end|><|tool_calls_end|>": (
            "So.",
            [("f", "{}"), ("g", "{}")],
        ),
        "<|tool_call_begin|>f<|tool_sep|>no<|tool_call_end|>": (
            "<|tool_call_begin|>f<|tool_sep|>no<|tool_call_end|>",
            [],
        ),
    }.items()
}
