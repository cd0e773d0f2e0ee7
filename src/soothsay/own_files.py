"""Runs Python files of the user's own, where drafters and verifiers may be: `FILE.py:NAME`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from soothsay.errors import SoothsayError
from soothsay.files import user_path

_MODULES: dict[Path, ModuleType] = {}


def named_in_file(name: str, kind: str, error: type[SoothsayError]) -> tuple[ModuleType, Any]:
    """What `FILE.py:NAME` names, and the module; None if it has no such name.

    A file is run when it is first named. Its folder is added to `sys.path`, so that it can import others
    beside it.

    Raises `error` if there is no such file, or it fails. `kind` says what should be there: "drafter".
    """
    file, _, wanted = name.rpartition(":")
    path = user_path(file).resolve()
    module = _MODULES.get(path)
    if module is None:
        module = _MODULES[path] = _run(path, kind, error)
    return module, getattr(module, wanted, None)


def _run(path: Path, kind: str, error: type[SoothsayError]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"soothsay_file_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise error(f"there is no file {path}, where a {kind} should be")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as failure:
        del sys.modules[spec.name]
        lines = [frame.lineno for frame in extract_tb(failure.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise error(f"{where}: {type(failure).__name__}: {failure}") from failure
    return module
