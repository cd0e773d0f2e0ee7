"""The container and the service run commands that exist, and end later than the server does."""

from __future__ import annotations

import json
import re
import shlex
from configparser import ConfigParser

from places import ROOT
from test_docs import parse

from soothsay.server.server_config import ServerConfig

UNIT = ConfigParser(interpolation=None)
UNIT.read(ROOT / "deploy" / "soothsay.service")


def test_the_service_runs_a_command() -> None:
    program, *arguments = shlex.split(UNIT["Service"]["ExecStart"])
    assert program.endswith("/bin/soothsay")
    parse(arguments)


def test_the_service_waits_for_running_answers() -> None:
    assert float(UNIT["Service"]["TimeoutStopSec"]) > ServerConfig.drain


def test_the_container_runs_a_command() -> None:
    text = (ROOT / "Dockerfile").read_text()
    entry, command = (
        json.loads(*re.findall(rf"^{word} (\[.*\])$", text, re.MULTILINE)) for word in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["soothsay"]
    parse(command)
