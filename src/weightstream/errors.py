"""The exception tree. Every error that weightstream raises on purpose derives from `WeightstreamError`."""

from __future__ import annotations


class WeightstreamError(Exception):
    """Base of all errors raised by weightstream."""


class ConfigError(WeightstreamError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class PlanError(WeightstreamError, ValueError):
    """No plan fits the budget; the message holds the arithmetic."""


class CheckpointError(WeightstreamError, ValueError):
    """A checkpoint is missing, malformed or of a kind that is not supported; the message names file and key."""


class StoreError(WeightstreamError, OSError):
    """Reading a weight from its home failed; the message names file, offset and sizes."""


class OffloadError(WeightstreamError, RuntimeError):
    """An operation that a model cannot do while it is offloaded."""


class UnsupportedError(OffloadError):
    """A kind of parameter, module or device that is refused by name."""


class InvariantError(WeightstreamError, RuntimeError):
    """A rule of weightstream's own was broken; please report it with the message."""
