"""Backend wrappers that slow down, poison, fail, limit or check."""

from wrapped.clock import ClockBackend
from wrapped.queued import QueueBackend
from wrapped.wrappers import Delay, Fault, Limit, Poison, Wrapper

__all__ = ["ClockBackend", "Delay", "Fault", "Limit", "Poison", "QueueBackend", "Wrapper"]
