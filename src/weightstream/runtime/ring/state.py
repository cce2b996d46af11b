"""The mode of a streamer, and who may change it. Knows no model and no device."""

from __future__ import annotations

import os
import threading
from collections.abc import Set as AbstractSet
from enum import Enum
from types import MappingProxyType

from weightstream.errors import InvariantError, OffloadError
from weightstream.runtime.ring.shared_memory import Block
from weightstream.runtime.ring.turn import Turn


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
_NONE: frozenset[int] = frozenset()


class Gate:
    """Lets one step in at a time, in the process that made it, and guards the changes of its mode.

    `threads` are those whose calls of units belong to the forward under way.
    """

    def __init__(self, block: Block | None = None) -> None:
        self.block = block  # of device memory, which other models have in turn
        self.turn = Turn() if block is None else block.turn  # held for a whole step
        self.lock = threading.RLock()  # held while units open and close, which several threads of a forward may do
        self.mode = Mode.IDLE
        self.is_fixed = False  # weights have fixed addresses
        self.threads: AbstractSet[int] = _NONE
        self._between = Mode.IDLE  # the mode outside of forwards
        self._pid = os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether a forward of the model is under way."""
        return self.mode in _RUNNING

    @property
    def is_removed(self) -> bool:
        return self.mode is Mode.REMOVED

    @property
    def is_cut(self) -> bool:
        """Whether a forward or step() seems under way, for whoever knows that none is."""
        return self.is_running or self.mode is Mode.STEP

    @property
    def is_held(self) -> bool:
        """Whether an engine drives the layers, in a forward or between two."""
        return self._between is Mode.HELD

    def change(self, mode: Mode) -> None:
        if mode not in _NEXT[self.mode]:
            raise InvariantError(f"a streamer {self.mode.value} cannot be {mode.value}")
        self._set(mode)

    def end_forward(self) -> None:
        """Back to the mode outside of forwards, whatever came of the one that was under way."""
        self._set(self._between)

    def reset(self) -> None:
        """Back to IDLE, whatever was cut short."""
        if self._between is not Mode.REMOVED:
            self._set(Mode.IDLE)

    def _set(self, mode: Mode) -> None:
        is_running = mode in _RUNNING
        if not is_running:
            self._between = mode
        self.threads = self.turn.threads if is_running else _NONE
        self.is_fixed = mode in _FIXED
        self.mode = mode

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
        if self.turn.is_mine and (self.is_running or self.mode is Mode.STEP):
            raise OffloadError("remove() inside a step: the model is computing with these weights; call it after")
