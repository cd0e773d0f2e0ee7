"""The server's process does not import heavy packages."""

from __future__ import annotations

import subprocess
import sys


def test_the_servers_process_does_without_torch() -> None:
    code = (
        "import sys; import soothsay.server.http_server, soothsay.server.runner;"
        "import soothsay.server.http.json_log;"
        "import soothsay.server.batch.batch_run;"
        "print([name for name in ('torch', 'transformers', 'soothsay.llm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
