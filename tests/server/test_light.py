"""The server's process does not import heavy packages."""

from __future__ import annotations

import subprocess
import sys


def test_the_servers_process_does_without_torch() -> None:
    code = (
        "import sys; import soothsay.server.app, soothsay.server.runner, soothsay.server.log;"
        "import soothsay.server.batch;"
        "print([name for name in ('torch', 'transformers', 'soothsay.llm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
