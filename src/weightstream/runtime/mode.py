"""The mode of a streamer, and the turn that a step takes. Knows no model and no device."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType

from weightstream.errors import InvariantError, OffloadError
from weightstream.runtime.block import Block


class Mode(Enum):
    """What a streamer is doing. Weights have fixed addresses in STEP, HELD and FORWARD."""

    IDLE = "between steps"
    LEARNING = "in a watched step"
    EAGER = "in a step"
    STEP = "inside of step()"
    HELD = "driven by an engine"  # from `fix` to `unfix`
    FORWARD = "in a forward at fixed addresses"
    REMOVED = "removed"


_NEXT = MappingProxyType(
    {
        Mode.IDLE: (Mode.LEARNING, Mode.EAGER, Mode.STEP, Mode.HELD, Mode.REMOVED),
        Mode.LEARNING: (Mode.IDLE,),
        Mode.EAGER: (Mode.IDLE,),
        Mode.STEP: (Mode.IDLE, Mode.FORWARD),
        Mode.HELD: (Mode.IDLE, Mode.FORWARD),
        Mode.FORWARD: (Mode.STEP, Mode.HELD),
        Mode.REMOVED: (Mode.REMOVED,),
    }
)
_RUNNING = (Mode.LEARNING, Mode.EAGER, Mode.FORWARD)
_FIXED = (Mode.STEP, Mode.HELD, Mode.FORWARD)


class Gate:
    """Lets one step in at a time, in the process that made it, and guards the changes of its mode."""

    def __init__(self, block: Block | None = None) -> None:
        self.block = block  # of device memory, which other models have in turn
        self.turn = threading.RLock() if block is None else block.turn  # held for a whole step
        self.lock = threading.RLock()  # held while units open and close, which several threads of a forward may do
        self.mode = Mode.IDLE
        self._pid = os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether a forward of the model is under way."""
        return self.mode in _RUNNING

    @property
    def is_fixed(self) -> bool:
        """Whether weights have fixed addresses."""
        return self.mode in _FIXED

    def change(self, mode: Mode) -> None:
        if mode not in _NEXT[self.mode]:
            raise InvariantError(f"a streamer {self.mode.value} cannot be {mode.value}")
        self.mode = mode

    @contextmanager
    def entered(self, mode: Mode) -> Iterator[None]:
        """Be in this mode inside of the block, and in the one before after it."""
        before = self.mode
        self.change(mode)
        try:
            yield
        finally:
            self.change(before)

    def refuse_forked(self) -> None:
        """Raise `OffloadError` in a process that was forked: threads do not come along."""
        if os.getpid() != self._pid:
            raise OffloadError(
                "this model was offloaded before the process forked: the thread that copies its weights is not here. "
                "Use the start method 'spawn', or offload in the child."
            )

    def refuse_inside(self) -> None:
        """Raise `OffloadError` inside a step of this thread; another thread waits for the step to end."""
        self.refuse_forked()
        with self.turn:
            if self.is_running or self.mode is Mode.STEP:
                raise OffloadError("remove() inside a step: the model is computing with these weights; call it after")
