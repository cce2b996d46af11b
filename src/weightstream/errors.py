"""The exception tree. Every error that weightstream raises on purpose derives from `WeightstreamError`."""

from __future__ import annotations


class WeightstreamError(Exception):
    """Base of all errors raised by weightstream."""


class ConfigError(WeightstreamError, ValueError):
    """A setting is unknown, out of range, or contradicts another; the message names the remedy."""


class PlanError(WeightstreamError, ValueError):
    """No plan fits the budget; the message holds the arithmetic."""


class CheckpointError(WeightstreamError, ValueError):
    """A checkpoint is missing, malformed or of an unsupported kind; the message names file and key."""


class StoreError(WeightstreamError, OSError):
    """A weight cannot be read, written or pinned; the message names file, offset and sizes."""


class OffloadError(WeightstreamError, RuntimeError):
    """An operation that an offloaded model does not support."""


class UnsupportedError(OffloadError):
    """A kind of parameter, module or device that is not supported; the message names it."""


class InvariantError(WeightstreamError, RuntimeError):
    """An internal invariant of weightstream is violated: please report the message."""
