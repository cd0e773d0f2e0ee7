"""Prompts of benchmarks: texts of their own, files of prompts, and the questions of Spec-Bench."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from soothsay.corpus import PromptEntry, as_prompt, encode_entry, prompt_items
from soothsay.errors import RequestError

if TYPE_CHECKING:
    from soothsay.tokenizer import Tokenizer

T = TypeVar("T")

BUNDLED = Path(__file__).parents[1] / "bundled"

DEMO = BUNDLED / "demo" / "prompts.jsonl"
"""The prompts of `soothsay demo`."""

SPEC_BENCH = BUNDLED / "spec-bench" / "questions.jsonl.gz"
"""The questions of Spec-Bench (Xia et al. 2024, arXiv 2401.07851)."""


def read_prompts(path: Path) -> list[PromptEntry]:
    """Read the prompts of a file, in order.

    See `soothsay.corpus.prompt_items` for the files, and `soothsay.corpus.as_prompt` for what is in them.

    Raises `RequestError` if the file cannot be read or has no prompts, or for an entry that cannot be used,
    which is named.
    """
    entries = list[PromptEntry]()
    for number, (where, item) in enumerate(prompt_items(path), 1):
        try:
            entries.append(as_prompt(item, number))
        except ValueError as error:
            raise RequestError(f"{where}: {error}") from None
    if not entries:
        raise RequestError(f"{path} has no prompts")
    return entries


def by_task(entries: Sequence[PromptEntry], limit: int | None = None) -> dict[str, list[PromptEntry]]:
    """At most `limit` entries of each task, evenly spread over the file.

    They are shuffled, so that a run that ends early has some of every kind. The order is always the same.
    """
    tasks: dict[str, list[PromptEntry]] = {}
    for entry in entries:
        tasks.setdefault(entry.task, []).append(entry)
    chosen = {task: spread(own, limit or len(own)) for task, own in tasks.items()}
    for own in chosen.values():
        random.Random(0).shuffle(own)
    return chosen


def in_turns(groups: Iterable[Sequence[T]]) -> list[T]:
    """The first of each group, then the second of each, and so on."""
    return [one for several in zip_longest(*groups) for one in several if one is not None]


def spread(entries: Sequence[PromptEntry], limit: int) -> list[PromptEntry]:
    """Return at most `limit` entries in their order, evenly spread over each category.

    Every category with at least one entry in `limit` is represented.
    """
    if limit >= len(entries):
        return list(entries)
    seen = {entry.category: None for entry in entries}
    rank = {category: i for i, category in enumerate(seen)}
    order = sorted(range(len(entries)), key=lambda i: rank[entries[i].category])
    middles = [(2 * i + 1) * len(order) // (2 * limit) for i in range(limit)]
    return [entries[index] for index in sorted(order[middle] for middle in middles)]


def encode(entry: PromptEntry, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt; see `encode_entry`.

    Raises `RequestError` if there is no tokenizer, or the template refuses the conversation.
    """
    if tokenizer is None:
        raise RequestError("this model has no tokenizer, and the prompts are text")
    try:
        return encode_entry(entry.prompt, tokenizer)
    except RequestError as error:
        raise RequestError(f"prompt {entry.id}: {error}") from error


QUESTION = "Tell me a story about a river, a bridge and a town."
PASSAGE = (
    "The river Alder rises in the hills north of Marden and flows for forty miles through farmland before "
    "it meets the sea at Kelby. In spring the river floods the low meadows, and farmers move their cattle "
    "to higher ground. The bridge at Marden was built in 1887 by the county to replace a wooden bridge "
    "that had been washed away twice. Today the bridge carries more traffic than the county ever planned "
    "for, and the council wants to build a second bridge two miles downstream. Farmers say that a second "
    "bridge would cut through the low meadows, and that the river would flood the road in spring."
)
TOPICS = (
    "cats dogs fish birds cows pigs rats bats trees rain snow wind fire iron gold salt sand wool silk "
    "corn rice milk bread soup tea cups maps ships roads bells clocks stars"
)
"""32 words."""
