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
