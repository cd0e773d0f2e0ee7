"""What is known of the times of a model's passes on this machine: predicted, measured briefly, or measured.

Nothing is measured while a request runs. A brief measurement belongs to the loading of a model, and all sizes
are measured in idle time. What other processes disturbed is kept until something better is there.
"""

import hashlib
import os
import platform
import time
import warnings
from pathlib import Path

import torch

from soothsay import __version__
from soothsay.machine import cache_directory, processor_name, processor_seconds_of_others
from soothsay.model.timing import pass_measuring
from soothsay.model.timing.pass_measuring import Measuring, measure_briefly, measuring
from soothsay.model.timing.pass_predicting import predicted_times
from soothsay.model.timing.pass_times import KEPT_MEASUREMENTS, Measurements, PassTimes
from soothsay.model.transformer import Transformer
from soothsay.processors import granted_processors

DISTURBANCE = 0.25
"""Processors that other processes may use while passes are measured, beyond those that this process leaves
free. If they use more, the measurement is disturbed: while other servers started, 8 rows of a model of 1.5B
parameters seemed to cost as much as 1.1 rows, and cost as much as 2."""

CLOCK_ERROR = 0.05
"""Seconds by which the system's account of processor time may be wrong."""

REMEASURE_BELOW = 1.0
"""Seconds of all passes together below which all sizes are measured `KEPT_MEASUREMENTS` times."""

IDLE_TRIES = 3
"""Measurements of all sizes in the idle time of one process, at most."""


class KnownTimes:
    """The times of a model's passes on this machine, in its dtype and with this number of threads.

    They are kept on disk, see `Measurements`. If the file is damaged, or cannot be read or written, there is
    one warning.

    Args:
        model: the model, on the device where it will run.
        context: the longest context that a request may have.
    """

    def __init__(self, model: Transformer, context: int):
        self._model, self._context = model, context
        self._known = Measurements()
        self._times: PassTimes | None = None
        self._watch = _Watch()
        self._pieces: Measuring | None = None
        self._tries = IDLE_TRIES
        self._has_warned = False

    def __call__(self, *, may_measure: bool = False) -> PassTimes:
        """The best that is known. The first call reads the file.

        Args:
            may_measure: whether the first call may take the time of a brief measurement.
        """
        if self._times is None:
            self._known = self._read()
            self._times = self._known.agreed or predicted_times(self._model, self._context)
            if may_measure and not self._has_all_sizes and len(self._known.passes) < KEPT_MEASUREMENTS:
                self._watch = _Watch()
                self._keep(measure_briefly(self._model, self._context))
        return self._times

    def study(self) -> bool:
        """Measure the next size in idle time, if a drafter asks for times. Returns whether more lack."""
        if self._times is None or not self._tries or self._is_complete:
            return False
        if self._pieces is None:
            self._pieces, self._watch = measuring(self._model, self._context), _Watch()
        try:
            next(self._pieces)
        except StopIteration as end:
            self._keep(end.value)
            self._pieces, self._tries = None, self._tries - 1
        return True

    @property
    def _has_all_sizes(self) -> bool:
        sizes = pass_measuring.all_sizes(self._context)
        return any((known.contexts, known.rows) == sizes for known in self._known.passes)

    @property
    def _is_complete(self) -> bool:
        known = self._known.passes
        enough = len(known) == KEPT_MEASUREMENTS or (known and known[-1].total >= REMEASURE_BELOW)
        return self._has_all_sizes and self._known.is_quiet and bool(enough)

    def _keep(self, measured: PassTimes | None) -> None:
        """Use a measurement from now on, and keep it for later starts. None: nothing was measured."""
        if measured is None:
            return
        self._known = self._known.with_newest(measured, self._watch.was_quiet())
        self._times = self._known.agreed
        try:
            if (file := self._file()) is not None:
                self._known.write(file)
        except OSError as error:
            where = error.filename or file
            self._warn(f"{where}: {error.strerror}; the variable XDG_CACHE_HOME names another folder")

    def _read(self) -> Measurements:
        file = self._file()
        if file is None:
            self._warn("there is no home directory to keep them in")
            return Measurements()
        try:
            return Measurements.read(file)
        except (OSError, ValueError, RecursionError) as error:
            self._warn(f"{file}: {error}")
            return Measurements()

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"the times of passes are measured anew ({reason})", stacklevel=4)

    def _file(self) -> Path | None:
        """The file for what is known; None if there is no home directory. Its name is a digest of everything
        that times depend on."""
        directory, model = cache_directory(), self._model
        kinds = sorted({f"{type(one).__name__} {getattr(one, 'name', '')}" for one in model.modules()})
        facts = [
            model.spec,
            model.dtype,
            model.kv_dtype,
            model.device,
            kinds,
            model.kernels.name,
            *pass_measuring.all_sizes(self._context),
            platform.node(),
            processor_name(),
            torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "",
            granted_processors(),
            torch.get_num_threads(),
            __version__,
            torch.__version__,
        ]
        name = hashlib.blake2b("\n".join(map(str, facts)).encode(), digest_size=12).hexdigest()
        return None if directory is None else directory / "step-times" / f"{name}.json"


class _Watch:
    """Tells whether other processes used much of the processors since it was made."""

    def __init__(self) -> None:
        self._begin, self._others = time.perf_counter(), processor_seconds_of_others()

    def was_quiet(self) -> bool:
        """Whether they did not, or the system does not say."""
        seconds, now = time.perf_counter() - self._begin, processor_seconds_of_others()
        if self._others is None or now is None:
            return True
        free = (os.cpu_count() or 1) - granted_processors()
        return now - self._others <= (free + DISTURBANCE) * seconds + CLOCK_ERROR
