"""The errors that soothsay raises for wrong input. Each message names what is wrong and how to fix it."""


class SoothsayError(Exception):
    """Base of every error that soothsay raises on purpose."""


class ModelError(SoothsayError):
    """A model cannot be loaded: a file, a shape, an architecture or a dtype does not fit."""


class RequestError(SoothsayError, ValueError):
    """A request cannot be served: because of a parameter, the prompt's length or the memory it needs."""


class DrafterError(SoothsayError, ValueError):
    """A drafter is unknown, has wrong options, or does not fit its target."""


class MissingDrafterError(DrafterError):
    """A drafter's files are not there."""


class VerifierError(SoothsayError, ValueError):
    """A verifier is unknown, cannot be called as it must be, or gave something that is no verdict."""


class TrainingError(SoothsayError):
    """A training cannot start, continue or be saved: because of its data, its checkpoint or its numbers."""


class StepError(SoothsayError):
    """The engine failed at a request, which has ended. `__cause__` is the error that the step raised."""


class StageError(SoothsayError):
    """A process that runs some layers of a model has ended, or does not answer. The engine cannot go on."""
