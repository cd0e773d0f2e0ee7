"""The seconds that a step of an engine takes, measured by running the engine's own steps."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.drafters.base import NoDrafter
from soothsay.errors import RequestError
from soothsay.model.pass_times import PassTimes
from soothsay.model.pass_times_file import measurements_as_json, parse_measurements

if TYPE_CHECKING:
    from soothsay.llm import LLM

ANSWERS = (1, 2, 4, 8, 16, 32)
"""Numbers of answers under way in the measured steps."""

CHUNKS = (1, 16, 64, 256)
"""Numbers of rows of a prompt in the measured steps."""

CONTEXTS = (128, 1024)
"""Numbers of tokens before the measured rows."""

ROOM = (ANSWERS[-1] + 4) * (CONTEXTS[-1] + 512)
"""Tokens of the KV pool that `measure_steps` needs."""

STEPS = 6
"""Steps of each kind. The first one does not count."""

TABLES = ("decoding", "sharing", "reading")
"""Names of the tables in a file of times."""

MAX_FILE = 1 << 16
"""Limit of bytes in a file of times."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of a step, by what is in it.

    Rows of a prompt beside answers cost what they cost beside a single row: the weights are read once. A
    draft tree's nodes cost what rows of a prompt cost. Answers with a common context take less time than
    others, because its keys and values are in the processor's cache after the first one.
    """

    decoding: PassTimes  # of n answers with one row each, by the context of each
    sharing: PassTimes  # the same, of answers with the same context
    reading: PassTimes  # of m rows of one prompt, by the context before them

    def __call__(self, answers: int, decoded: float, shared: float, rows: int, read: float) -> float:
        """Seconds of a step.

        Args:
            answers: answers that get a token.
            decoded: their mean context, in tokens.
            shared: how much of it others have too, in tokens.
            rows: rows of prompts, and nodes of draft trees below their roots.
            read: the mean context of the prompts' rows.
        """
        if not answers:
            return self.reading(rows, read)
        seconds = self.decoding(answers, decoded)
        if shared:
            seconds -= max(self.decoding(answers, shared) - self.sharing(answers, shared), 0.0)
        further = self.reading(rows + 1, read) - self.reading(1, read) if rows else 0.0
        return seconds + max(further, 0.0)

    def save(self, path: Path) -> None:
        """Write the times as JSON."""
        tables = {name: getattr(self, name) for name in TABLES}
        content = {name: measurements_as_json([table]) for name, table in tables.items()}
        path.write_text(json.dumps(content) + "\n", "utf-8")

    @classmethod
    def read(cls, path: Path) -> StepTimes:
        """Read what `save` wrote. Raises `RequestError` for other files."""
        try:
            with path.open("rb") as file:
                content: Any = json.loads(file.read(MAX_FILE))
            ((decoding,), (sharing,), (reading,)) = (parse_measurements(content[name]) for name in TABLES)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RequestError(
                f"{path} has no times of steps: {error!r}. Write it with --save-times"
            ) from None
        return cls(decoding, sharing, reading)


def measure_steps(llm: LLM) -> StepTimes:
    """Measure steps of an engine that does nothing else and does not draft.
    The engine needs a KV pool of `ROOM` tokens and a context of `2 * CONTEXTS[-1]`.
    """
    reading = [[_reading(llm, context, rows) for rows in CHUNKS] for context in CONTEXTS]
    decoding = [_decoding(llm, context, shared=False) for context in CONTEXTS]
    sharing = [_decoding(llm, context, shared=True) for context in CONTEXTS]
    return StepTimes(
        PassTimes(ANSWERS, CONTEXTS, decoding),
        PassTimes(ANSWERS, CONTEXTS, sharing),
        PassTimes(CHUNKS, CONTEXTS, reading),
    )


def _decoding(llm: LLM, context: int, *, shared: bool) -> list[float]:
    """Seconds of steps with `ANSWERS` answers, whose contexts are about `context` tokens long, and alike if
    `shared`."""
    common = _text(llm, context)
    seconds: list[float] = []
    requests: list[Request] = []
    for count in ANSWERS:
        texts = [common if shared else _text(llm, context) for _ in range(count - len(requests))]
        new = [_request(llm, text, context) for text in texts]
        requests += new
        while any(request.num_output == 0 for request in new):
            llm.engine.step()
        seconds.append(median(_timed(llm) for _ in range(STEPS)))
    for request in requests:
        llm.engine.cancel(request)
    return seconds


def _reading(llm: LLM, context: int, rows: int) -> float:
    """Seconds of a step that reads the last `rows` tokens of a prompt, whose beginning is cached."""
    seconds = []
    size = llm.engine.config.block_size
    begin = -(-context // size) * size
    text = _text(llm, begin)
    _finish(llm, _request(llm, [*text, 1], 1))
    for _ in range(STEPS):
        request = _request(llm, [*text, *_text(llm, rows)], 1)
        seconds.append(_timed(llm))
        _finish(llm, request)
    return median(seconds[1:])


def _timed(llm: LLM) -> float:
    begin = time.perf_counter()
    llm.engine.step()
    return time.perf_counter() - begin


def _finish(llm: LLM, request: Request) -> None:
    while request.finish_reason is None:
        llm.engine.step()


def _text(llm: LLM, count: int) -> list[int]:
    """Random token ids; no two texts are alike."""
    found: list[int] = np.random.default_rng().integers(llm.model.config.vocab_size, size=count).tolist()
    return found


def _request(llm: LLM, text: Sequence[int], answer: int) -> Request:
    """A request in the engine's line."""
    engine = llm.engine
    params, size = SamplingParams(temperature=1.0, ignore_eos=True), engine.config.block_size
    drafter = NoDrafter(engine.target)
    request = Request(
        text,
        params,
        seed=0,
        limit=len(text) + answer,
        drafter=drafter,
        tokenizer=llm.tokenizer,
        block_size=size,
    )
    engine.add(request)
    return request
