"""The log on stderr: one line of JSON for each event."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

log = logging.getLogger("soothsay.server")
"""The log of the server and of its engines."""

KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
"""Attributes that every log record has. All others are facts of the event."""


class JsonLines(logging.Formatter):
    """Formats a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """`time` in UTC, `level`, `event`, the facts of the event, and the `trace` of an exception."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in KNOWN}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


LEVEL = "SOOTHSAY_SERVE_LOG_LEVEL"
"""The variable with the least level of what is logged, which the server passes on to its engines."""


def log_to_stderr() -> None:
    """Send log records of soothsay to stderr as lines of JSON, from a level on, and uvicorn's warnings."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LEVEL, "info").upper(), logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("soothsay", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "soothsay" else max(level, logging.WARNING))
