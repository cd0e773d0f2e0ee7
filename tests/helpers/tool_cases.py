"""Answers with tool calls, and the text and calls that a client must get for each. A template for tools."""

from __future__ import annotations

TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}Say <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or () %}{{ call.function.arguments.n }}{% endfor %}\n{% endfor %}"
)
"""A chat template that knows tools."""

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

BARE_CALL = '{"name": "f", "arguments": {"x": "a < b"}}'

BARE: dict[str, Told] = {
    BARE_CALL: ("", [("f", ARGUMENTS)]),
    f" \n{BARE_CALL}\n{BARE_CALL} ": ("", [("f", ARGUMENTS)] * 2),
    f"```json\n{BARE_CALL}\n```": ("", [("f", ARGUMENTS)]),
    '```json\n{\n  "name": "f",\n  "arguments": {}\n}': ("", [("f", "{}")]),
    f"{BARE_CALL}\n</tool_call>": ("", [("f", ARGUMENTS)]),
    f"{BARE_CALL} and so": (f"{BARE_CALL} and so", []),
    f"So: {BARE_CALL}": (f"So: {BARE_CALL}", []),
    f"{BARE_CALL[:-1]}": (BARE_CALL[:-1], []),
    f"{BARE_CALL}\n{CALL}": (BARE_CALL, [("f", ARGUMENTS)]),
    '{"name": "h", "arguments": {}}': ('{"name": "h", "arguments": {}}', []),  # no such tool
    '{"name": "f"}': ('{"name": "f"}', []),
    "```python\nf()\n```": ("```python\nf()\n```", []),
}
"""Answers of a family with tags that has left them out."""

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


GEMMA_CALL = (
    '<|tool_call>call:f{x:<|"|>a < "b", {c}<|"|>,n:-7,o:{a:[1,true,null],"k k":<|"|><|"|>},s:word}'
    "<tool_call|>"
)
GEMMA_ARGUMENTS = '{"x": "a < \\"b\\", {c}", "n": -7, "o": {"a": [1, true, null], "k k": ""}, "s": "word"}'

GEMMA: dict[str, Told] = {
    "Hello <|tool": ("Hello <|tool", []),
    GEMMA_CALL: ("", [("f", GEMMA_ARGUMENTS)]),
    f"So.\n{GEMMA_CALL}<|tool_call>call:g{{}}<tool_call|>": ("So.", [("f", GEMMA_ARGUMENTS), ("g", "{}")]),
    "<|tool_call> call: g { } <tool_call|>": ("", [("g", "{}")]),
    '<|tool_call>call:f{"x":"a\\"b", <|"|>y<|"|>: [ ]}<tool_call|>': ("", [("f", '{"x": "a\\"b", "y": []}')]),
    '<|tool_call>{"name": "g", "arguments": {}}<tool_call|>': ("", [("g", "{}")]),  # forced by a grammar
    GEMMA_CALL.removesuffix("<tool_call|>"): ("", [("f", GEMMA_ARGUMENTS)]),
    **{
        f"<|tool_call>{wrong}<tool_call|>": (f"<|tool_call>{wrong}<tool_call|>", [])
        for wrong in (
            *("call:f", "call:f{", "call:f{x}", "call:f{x:}", "call:f{x:1 y:2}", "call:f{x:1}}", "f{x:1}"),
            *('call:f{x:<|"|>a}', 'call:f{x:"a}', "call:f g{}", "call:f{x:[1}", "call:f{x:1,,y:2}"),
        )
    },
}

LFM_CALL = "<|tool_call_start|>[f(x='a < b', n=-3, o={\"a\": true, 'b': [None, 1.5]}), g()]<|tool_call_end|>"
LFM_CALLS = [("f", '{"x": "a < b", "n": -3, "o": {"a": true, "b": [null, 1.5]}}'), ("g", "{}")]

LFM: dict[str, Told] = {
    "Hello <|tool_call": ("Hello <|tool_call", []),
    LFM_CALL: ("", LFM_CALLS),
    f"So. {LFM_CALL} done": ("So.done", LFM_CALLS),
    "<|tool_call_start|>[f(x='def f():\n  pass')]<|tool_call_end|>": (
        "",
        [("f", '{"x": "def f():\\n  pass"}')],
    ),
    '<|tool_call_start|>[\n  my.f(x="1"),\n]<|tool_call_end|>': ("", [("my.f", '{"x": "1"}')]),
    '<|tool_call_start|>[{"name": "g", "arguments": {}}]<|tool_call_end|>': ("", [("g", "{}")]),
    LFM_CALL.removesuffix("<|tool_call_end|>"): ("", LFM_CALLS),
    **{
        f"<|tool_call_start|>{wrong}<|tool_call_end|>": (f"<|tool_call_start|>{wrong}<|tool_call_end|>", [])
        for wrong in (
            *(
                "[]",
                "[f(1)]",
                "[f(**x)]",
                "[f(x=g())]",
                "[f(x=y)]",
                "[f(x=b'1')]",
                "[f]",
                "f()",
                "[f()",
                "[f()()]",
            ),
            *("[f(x={1: 2})]", "[f(x={**{}})]", "[f(x=1j)]", "[f(x=...)]", "[f(x=1 + 1)]", "[(lambda: 1)()]"),
        )
    },
}

GRANITE_CALL = '<|tool_call|>[{"name": "f", "arguments": {"x": "]"}}, {"name": "g", "arguments": {}}]'
GRANITE: dict[str, Told] = {
    "Hello <|tool_call": ("Hello <|tool_call", []),
    GRANITE_CALL: ("", [("f", '{"x": "]"}'), ("g", "{}")]),
    f"So.\n{GRANITE_CALL}<|/tool_call|>": ("So.", [("f", '{"x": "]"}'), ("g", "{}")]),  # Phi-4-mini
    '<|tool_call|> {"name": "g", "arguments": {}}\n<|tool_call|>[]': ("<|tool_call|>[]", [("g", "{}")]),
    f"{GRANITE_CALL} and": (f"{GRANITE_CALL} and", []),
}

COMMAND_CALL = """<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": "a < b"}},
    {"tool_call_id": "1", "tool_name": "g", "parameters": {}}
]<|END_ACTION|>"""
COMMAND: dict[str, Told] = {
    "Hello <|START_": ("Hello <|START_", []),
    COMMAND_CALL: ("", [("f", ARGUMENTS), ("g", "{}")]),
    f"So. {COMMAND_CALL}": ("So.", [("f", ARGUMENTS), ("g", "{}")]),
    '<|START_ACTION|>{"name": "g", "arguments": {}}<|END_ACTION|>': ("", [("g", "{}")]),
    "<|START_ACTION|>[]<|END_ACTION|>": ("<|START_ACTION|>[]<|END_ACTION|>", []),
    '<|START_ACTION|>[{"tool_name": 1}]<|END_ACTION|>': (
        '<|START_ACTION|>[{"tool_name": 1}]<|END_ACTION|>',
        [],
    ),
}

INVOKE = """<minimax:tool_call>
<invoke name="f">
<parameter name="x">a < b</parameter>
<parameter name="n">7</parameter>
</invoke>
<invoke name="g">
</invoke>
</minimax:tool_call>"""
MINIMAX: dict[str, Told] = {
    "Hello <minimax:": ("Hello <minimax:", []),
    INVOKE: ("", [("f", PAIRS_ARGUMENTS), ("g", "{}")]),
    f"So.\n\n{INVOKE}\n": ("So.", [("f", PAIRS_ARGUMENTS), ("g", "{}")]),
    '<minimax:tool_call>{"name": "g", "arguments": {}}</minimax:tool_call>': ("", [("g", "{}")]),
    INVOKE.removesuffix("</minimax:tool_call>"): ("", [("f", PAIRS_ARGUMENTS), ("g", "{}")]),
    **{
        f"<minimax:tool_call>{wrong}</minimax:tool_call>": (
            f"<minimax:tool_call>{wrong}</minimax:tool_call>",
            [],
        )
        for wrong in (
            *("", "f", '<invoke name="f">x</invoke>', '<invoke name="f g"></invoke>', '<invoke name="f">'),
            *('<invoke name="f"></invoke> and', '<invoke name="f"><parameter name="x">1</invoke>'),
        )
    },
}

HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "a < b"}<|call|>'
HARMONY: dict[str, Told] = {
    "Hello <|channel": ("Hello <|channel", []),
    HARMONY_CALL: ("", [("f", ARGUMENTS)]),
    HARMONY_CALL.removesuffix("<|call|>"): ("", [("f", ARGUMENTS)]),  # the tag is the end token
    "<|channel|>commentary to=my.g<|message|><|call|>": ("", [("my.g", "{}")]),
    '<|channel|>commentary to=functions<|message|>{"name": "g", "arguments": {}}<|call|>': (
        "",
        [("g", "{}")],
    ),
    "<|channel|>commentary to=f<|message|>no<|call|>": (
        "<|channel|>commentary to=f<|message|>no<|call|>",
        [],
    ),
    "<|channel|>commentary to=f{}<|call|>": ("<|channel|>commentary to=f{}<|call|>", []),
}
"""Without thoughts, which `harmony.HarmonyParser` reads."""
