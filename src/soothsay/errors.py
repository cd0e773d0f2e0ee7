"""What soothsay raises when something outside it is wrong. Each message names the thing and the way out."""


class SoothsayError(Exception):
    """Base of every error that soothsay raises on purpose."""


class ModelError(SoothsayError):
    """A model cannot be loaded: a file, a shape, an architecture or a dtype does not fit."""


class RequestError(SoothsayError, ValueError):
    """A request cannot be served as asked: a parameter, the prompt's length or the memory it needs."""


class DrafterError(SoothsayError, ValueError):
    """A drafter is unknown, misconfigured or does not fit its target."""


class TrainingError(SoothsayError):
    """A training cannot start, go on or be written: its data, its checkpoint or its numbers."""
