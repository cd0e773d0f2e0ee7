"""The prompts of `soothsay demo` and `soothsay verify`: one of each kind, written for this project."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and how to sample its answer."""

    name: str
    prompt: str
    temperature: float = 0.0
    seed: int = 0


_LIGHTHOUSE = (
    "The lighthouse at Cape Marrow was built in 1871 by a small company of masons from the mainland. For the "
    "first forty years the lighthouse was lit with whale oil, and its keeper climbed the stairs three times "
    "a night to trim the wick. In 1911 the lighthouse was fitted with an electric lamp, and the keeper's "
    "work became much easier. The last keeper of the lighthouse, Edith Vane, retired in 1968, and since then "
    "the lamp has been controlled from the harbour office in Marrow. Today the lighthouse is a museum, and "
    "visitors can climb the stairs that the keeper climbed."
)

_CAPTIONS = (
    "Ein Mann in einem blauen Hemd steht auf einer Leiter und putzt ein Fenster. Zwei Frauen sitzen auf "
    "einer Bank und lesen eine Zeitung. Ein kleines Kind spielt mit einem roten Ball auf einer Wiese."
)

_BAKER = (
    "A baker makes 12 loaves of bread every morning and 8 loaves every afternoon. He sells each loaf for $3. "
    "How much money does he earn in 5 days if he sells all of them?"
)

TASKS = (
    Task("chat", "Can you explain why the sky is blue?"),
    Task("summary", f"Summarize: {_LIGHTHOUSE}"),
    Task("translation", f"Translate German to English: {_CAPTIONS}"),
    Task("maths", _BAKER),
    Task("code", "Write a C++ program that reads a number n and prints the numbers from 1 to n."),
    Task("sampled", "Write a short story about a fox.", temperature=1.0, seed=1),
)
