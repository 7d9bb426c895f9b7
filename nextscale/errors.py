"""Errors that a user can cause or meet. Each message has the given value, the expected one and a remedy."""


class NextscaleError(Exception):
    """Base of all errors that nextscale raises on purpose."""


class UnknownModel(NextscaleError):
    """The model name is not in the table of presets."""


class CheckpointError(NextscaleError):
    """A weights file is missing, damaged, refused, or belongs to another model."""


class WeightsMismatch(CheckpointError):
    """A checkpoint that belongs to another module."""


class DownloadError(CheckpointError):
    """A file could not be fetched from the hub."""


class ProfileError(NextscaleError):
    """A profile is missing, damaged, or of another model."""


class PromptError(NextscaleError):
    """A prompt or class label that the model does not accept."""


class SizeError(NextscaleError):
    """No schedule offers the requested size or aspect ratio."""


class SettingError(NextscaleError, ValueError):
    """A generation setting is out of range or does not apply to this model."""


class MissingExtra(NextscaleError):
    """An optional package is needed for this call and is not installed."""


class TextEncoderUnavailable(NextscaleError):
    """The text encoder's files are neither on disk nor reachable."""


class NonFiniteLogits(NextscaleError):
    """The network produced NaN or infinity."""


class OutOfMemory(NextscaleError):
    """The request does not fit on the device."""


class Overloaded(NextscaleError):
    """The queue is full; `retry_after` is the number of seconds until there should be room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShuttingDown(NextscaleError):
    """The server accepts no further jobs and finishes the accepted ones."""


class JobCancelled(NextscaleError):
    """The client has disconnected."""


class DeadlinePassed(NextscaleError):
    """The images were not ready before their deadline."""
