"""soothsay: speculative decoding that never changes a word.

Example:
    >>> from soothsay import LLM, SamplingParams
    >>> llm = LLM("sibyl")
    >>> result = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(temperature=0))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from soothsay.openmp import limit_spinning

if TYPE_CHECKING:
    from soothsay.api import *  # noqa: F403

__version__ = "0.1.0"

limit_spinning()


def __getattr__(name: str) -> Any:
    """Import the public names at their first use, so that `soothsay --help` does not wait for torch."""
    return getattr(import_module("soothsay.api"), name)


def __dir__() -> list[str]:
    """The public names too, as completion shows them."""
    return [*globals(), *import_module("soothsay.api").__all__]
