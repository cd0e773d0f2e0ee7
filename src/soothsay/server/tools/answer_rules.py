"""Rules in Lark for thoughts, after which an answer follows a grammar; see `chat_grammar.py`."""

from __future__ import annotations

from collections.abc import Mapping

from soothsay.core.grammar import quoted, spelled

SPACE = r"space: /[ \t\r\n]{1,16}/"
"""White space around thoughts. It is bounded, since an uncertain model could write it for ever."""

ANY = r"ANY: /(.|\n)*/"


def rules_up_to(tag: str, special: Mapping[str, int]) -> str:
    """Rules of `thoughts`: any text up to a tag, and the tag. The text does not contain the tag.

    Args:
        tag: a special token, or text without any.
        special: ids of the model's special tokens.
    """
    if tag in special:
        return f"thoughts: INSIDE {spelled(tag, special)}\nINSIDE: ANY & ~(ANY {quoted(tag)} ANY)\n{ANY}"
    return f"thoughts[lazy]: ANY {quoted(tag)}\n{ANY}"
