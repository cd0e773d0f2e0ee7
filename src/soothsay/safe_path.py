"""Python processes that this one starts do not search the current folder, which may be a downloaded model's.

`python -m` and `python -c` look there first, for modules of the standard library too: a model's folder with a
file `socket.py` would run code. multiprocessing starts its processes with `python -c`.
"""

import os
import sys

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""The variable that forbids it, to the processes of a process too."""


def module_environment() -> dict[str, str]:
    """Variables for a process `python -m MODULE`. It finds the modules that this process finds."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, "PYTHONPATH": path, **SAFE_PATH}
