"""Drafters in files of the user: `"path/to/file.py:Class"` names the class in this file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from soothsay.drafters.base import Drafter
from soothsay.errors import DrafterError
from soothsay.files import user_path


def drafter_in_file(name: str) -> Callable[..., Drafter]:
    """The class or function that `name`, `FILE.py:CLASS`, names. The file is run when it is first named.

    The file's folder is added to `sys.path`, so that the file can import others beside it.

    Raises `DrafterError` if there is no such file or class, or the file fails.
    """
    file, _, wanted = name.rpartition(":")
    module = _run(user_path(file).resolve())
    made = getattr(module, wanted, None)
    if not callable(made):
        there = ", ".join(
            one.__name__
            for one in vars(module).values()
            if inspect.isclass(one) and issubclass(one, Drafter) and one.__module__ == module.__name__
        )
        raise DrafterError(f"{file} has no class {wanted!r}; its drafters are: {there or 'none'}")
    return made  # type: ignore[no-any-return]


@cache
def _run(path: Path) -> ModuleType:
    """Run a file once, as a module of its own. Raises `DrafterError`."""
    spec = importlib.util.spec_from_file_location(f"soothsay_drafters_of_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DrafterError(f"there is no file {path}, where a drafter should be")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise DrafterError(f"{where}: {type(error).__name__}: {error}") from error
    return module
