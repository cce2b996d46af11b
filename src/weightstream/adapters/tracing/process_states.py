"""Process states that a followed forward may change by accident: random generators and the default dtype.

Operators draw from private generators while a call is followed. Python's and numpy's generators, `manual_seed` and
`set_default_dtype` cannot be redirected: a forward's changes of them are undone if no other thread ran meanwhile, as
that thread might have used them, too.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.runtime.streamer.read_watch import OperatorMode
from weightstream.runtime.tensors.pytree import tensors_in

_THREAD_CLOCK = 6  # the kernel's CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED
# A thread that starts and ends takes at least this CPU time. The bounds below are closer together than that, as reading
# the clocks takes less.
_LIFE_NS = 40_000


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Inside, this thread may change the states. `device`: the one whose generator it may use, besides the CPU."""
    others = _OtherThreads()  # before the states are read, as threads may run in between
    before = [(state, state.read()) for state in _states(device)]
    try:
        yield
    finally:
        changed = [(state, value) for state, value in before if state.read() != value]
        if changed and not others.may_have_run():
            for state, value in changed:
                state.write(value)


class _State(NamedTuple):
    """How to read a state, as a value that can be compared, and how to write it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _states(device: torch.device) -> Iterator[_State]:
    yield _State(torch.get_default_dtype, torch.set_default_dtype)
    yield _State(random.getstate, random.setstate)
    if (numpy := sys.modules.get("numpy")) is not None:
        yield _State(
            lambda: pickle.dumps(numpy.random.get_state()), lambda value: numpy.random.set_state(pickle.loads(value))
        )
    yield _State(lambda: _bytes(torch.get_rng_state()), lambda value: torch.set_rng_state(_tensor(value)))
    if device.type == "cuda":
        module = torch.get_device_module(device)
        yield _State(
            lambda: _bytes(module.get_rng_state(device)), lambda value: module.set_rng_state(_tensor(value), device)
        )


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


class _OtherThreads:
    """The CPU time in ns of the other threads of the process so far, to see later whether one of them ran.

    The time of the whole process minus that of this thread also counts threads that have ended. The two clocks cannot
    be read at once, so that difference is known within bounds only.
    """

    def __init__(self) -> None:
        self._of_each = _cpu_times()
        own = time.thread_time_ns()
        all_threads = time.process_time_ns()
        own_later = time.thread_time_ns()
        self._at_least = all_threads - own_later
        self._at_most = all_threads - own

    def may_have_run(self) -> bool:
        """Whether another thread had any CPU time since then; True if that is unknown."""
        now = _OtherThreads()
        # a thread that began and ended in between is in neither list of living threads
        may_have_ended = now._at_most - self._at_least >= _LIFE_NS
        return self._of_each is None or now._of_each != self._of_each or may_have_ended


def _cpu_times() -> dict[int, int] | None:
    """The CPU time of each living thread; None if that is unknown."""
    try:
        threads = {int(name) for name in os.listdir("/proc/self/task")} - {threading.get_native_id()}
        return {thread: time.clock_gettime_ns((~thread << 3) | _THREAD_CLOCK) for thread in threads}
    except OSError:  # one has ended meanwhile
        return None


class Draws:
    """Private generators, instead of the default ones of each device."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator; its random numbers come from here, unless a generator was passed."""
        if not draws(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        first = next(tensors_in((args, kwargs)), None)
        generator = self._of(torch.device(kwargs.get("device") or ("cpu" if first is None else first.device)))
        if func is torch.ops.aten.native_dropout.default:  # it takes no generator
            tensor, share, is_training = args
            kept = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(
                1 - share * bool(is_training), generator=generator
            )
            return tensor * kept / max(1 - share, 1e-9), kept  # not 0 / 0 where all elements are dropped
        return func.overloadpacket(*args, **kwargs | ({"generator": generator} if takes_generator(func) else {}))

    def _of(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device]


class OwnDraws(OperatorMode):
    """Inside, random operators of this thread do not use the default generators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = Draws()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._draws.run(func, args, kwargs or {})


def no_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode of this thread is in force."""
    return _disable_current_modes()


def draws(func: Any) -> bool:
    """Whether an operator may draw from a default generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def takes_generator(func: Any) -> bool:
    packet = func.overloadpacket
    schemas = (getattr(packet, name)._schema for name in packet.overloads())
    return any(argument.name == "generator" for schema in schemas for argument in schema.arguments)
