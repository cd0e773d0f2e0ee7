"""The errors that soothsay raises for wrong input. Each message names what is wrong and how to fix it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

WORDS = {
    "Field required": "it is missing",
    "a valid string": "a string",
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid list": "a list",
    "a valid boolean": "true or false",
    "a valid dictionary": "an object",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    " after validation": "",
    "Value error, ": "",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
}
"""Words of pydantic, which typer uses too, and ours."""


def type_of(value: object) -> str:
    """The type of a wrong value, with its article, such as "an int". That of None is "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def reason_of(error: BaseException) -> str:
    """What an error says: its kind, its message, and its notes, which may name a drafter."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def shown(value: object, most: int = 80) -> str:
    """A value as a message shows it: at most so many characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "(a very long number)"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: which known one is close; empty: none is."""
    return "".join(f". Did you mean {one}?" for one in get_close_matches(name, [*known], n=1))


def our_words(text: str) -> str:
    """A message of pydantic or typer about a value, in our words."""
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    return re.sub(r"^\w+ should (be|have) ", r"it must \1 ", text)


class SoothsayError(Exception):
    """Base of every error that soothsay raises on purpose.

    Example:
        >>> try:
        ...     LLM("sibyl", drafter="sufix")
        ... except SoothsayError as error:
        ...     print(type(error).__name__)
        DrafterError
    """


class ModelError(SoothsayError, ValueError):
    """A model cannot be loaded: a file, a shape, an architecture or a dtype does not fit.

    Example:
        >>> EngineConfig(max_rows=0)
        Traceback (most recent call last):
        soothsay.errors.ModelError: max_rows=0 is not possible: it must be an integer, at least 1
    """


class RequestError(SoothsayError, ValueError):
    """A request cannot be served: because of a parameter, the prompt's length or the memory it needs.

    Example:
        >>> SamplingParams(max_tokens=1, min_tokens=2)
        Traceback (most recent call last):
        soothsay.errors.RequestError: min_tokens=2 is more than max_tokens=1
    """


class DrafterError(SoothsayError, ValueError):
    """A drafter is unknown, has wrong options, or does not fit its target.

    Example:
        >>> llm.generate("Once upon a time", drafter="sufix")
        Traceback (most recent call last):
        soothsay.errors.DrafterError: ... Did you mean suffix?
    """


class MissingDrafterError(DrafterError):
    """A drafter's files are not there."""


class VerifierError(SoothsayError, ValueError):
    """A verifier is unknown, cannot be called as it must be, or gave something that is no verdict.

    Example:
        >>> Verifier("greedy")
        Traceback (most recent call last):
            ...
        soothsay.errors.VerifierError: a verifier is a function of a tree and a chance, not 'greedy'
    """


class TrainingError(SoothsayError):
    """A training cannot start, continue or be saved: because of its data, its checkpoint or its numbers."""


class StepError(SoothsayError):
    """The engine failed at a request, which has ended. `__cause__` is the error that the step raised.

    Example:
        >>> class Broken(Drafter):
        ...     max_nodes = 2
        ...
        ...     def propose(self, requests):
        ...         raise KeyError("oops")
        >>> try:
        ...     llm.generate("Once upon a time", drafter=Broken)
        ... except StepError as error:
        ...     print(repr(error.__cause__))
        KeyError('oops')
    """


class StageError(SoothsayError):
    """A process that runs some layers of a model has ended, or does not answer. The engine cannot go on."""
