"""A terminal, as far as rich's live displays use one: what stands on it and in its history."""

from __future__ import annotations

import re

TOKENS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\](.*?)(?:\x07|\x1b\\)|([\n\r])|([^\x1b\n\r]+)")


class Screen:
    """Obeys what is written to it. Fails for what it does not know.

    Args:
        height: lines that the cursor can reach.
    """

    def __init__(self, height: int):
        self._height = height
        self.lines, self._row, self._column = [""], 0, 0

    def feed(self, written: str) -> None:
        """Read output."""
        at = 0
        for match in TOKENS.finditer(written):
            assert match.start() == at, repr(written[at : match.start()])
            at = match.end()
            number, command, _, move, text = match.groups()
            if move == "\n":
                self._row, self._column = self._row + 1, 0
                if self._row == len(self.lines):
                    self.lines.append("")
            elif move == "\r":
                self._column = 0
            elif text:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
                self._column += len(text)
            elif command == "A":
                self._row = max(self._row - int(number or 1), len(self.lines) - self._height, 0)
            elif command == "K":
                self.lines[self._row] = ""
            else:
                assert command in ("m", "h", "l"), match.group()
        assert at == len(written)

    @property
    def text(self) -> str:
        """All lines, without spaces at their ends and empty lines at the end."""
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")
