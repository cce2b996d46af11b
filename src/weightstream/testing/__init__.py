"""Backend wrappers that slow down, poison, fail, limit or check: for tests of weightstream and of other backends."""

from weightstream.testing.clock import ClockBackend
from weightstream.testing.queued import QueueBackend
from weightstream.testing.wrappers import Delay, Fault, Limit, Poison, Wrapper

__all__ = ["ClockBackend", "Delay", "Fault", "Limit", "Poison", "QueueBackend", "Wrapper"]
