"""Chat templates in the styles of published models, written for tests, and messages for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FILES = Path(__file__).parent / "templates"
STYLES = {file.stem: file.read_text() for file in sorted(FILES.glob("*.jinja"))}
"""hermes: as Qwen3's. headers: Llama 3's. turns: Gemma 3's. instruct: Mistral's. marks: DeepSeek's.
macros: much of what Jinja offers, as gpt-oss and others use it."""

SNIPPETS = (FILES / "snippets.txt").read_text().splitlines()
"""A template in each line."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather <today> & "tomorrow" in Zürich',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {
                        "type": "array",
                        "items": {"type": "object", "properties": {"n": {"type": "integer"}}},
                    },
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "noop", "description": "", "parameters": {"type": "object"}}},
]
SYSTEM = {"role": "system", "content": " You are <helpful> & 'kind'.\n"}
QUESTION = {"role": "user", "content": "What is the weather? \n 漢字 🙂"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "id": "abcdefghi",
            "function": {"name": "get_weather", "arguments": {"place": "Zürich"}},
        }
    ],
}
RESULT = {"role": "tool", "content": '{"degrees": 21}', "tool_call_id": "abcdefghi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [QUESTION],
    "a system prompt": [SYSTEM, QUESTION],
    "turns": [SYSTEM, QUESTION, ANSWER, QUESTION],
    "tools": [SYSTEM, QUESTION, CALL, RESULT],
    "tools and turns": [QUESTION, ANSWER, QUESTION, CALL, RESULT, ANSWER, QUESTION],
    "parts": [PARTS],
    "the wrong order": [ANSWER, ANSWER],
    "an unknown role": [{"role": "wizard", "content": "x"}],
    "nothing": [],
    "no content": [{"role": "user"}],
    "a number": [{"role": "user", "content": 5}],
}
