"""The states of a streamer, and the gate through which they change. Knows no model and no device."""

from __future__ import annotations

import os
import threading
from collections.abc import Set as AbstractSet
from enum import Enum
from types import MappingProxyType

from weightstream.errors import InvariantError, OffloadError
from weightstream.runtime.ring.shared_memory import SharedMemory
from weightstream.runtime.ring.turn import StepTurn


class StepState(Enum):
    """The state of a streamer. Weights have fixed addresses in STEP, HELD and FORWARD."""

    IDLE = "between steps"
    LEARNING = "in a watched step"
    EAGER = "in a step"
    STEP = "inside of step()"
    HELD = "driven by an engine"  # an inference engine such as vLLM's, from `fix` to `unfix`
    FORWARD = "in a forward at fixed addresses"
    BACKWARD = "in a backward pass"
    REMOVED = "removed"


_NEXT = MappingProxyType(
    {
        StepState.IDLE: (
            *(StepState.LEARNING, StepState.EAGER, StepState.BACKWARD, StepState.STEP, StepState.HELD),
            StepState.REMOVED,
        ),
        StepState.BACKWARD: (StepState.IDLE,),
        StepState.LEARNING: (StepState.IDLE,),
        StepState.EAGER: (StepState.IDLE,),
        StepState.STEP: (StepState.IDLE, StepState.FORWARD),
        StepState.HELD: (StepState.IDLE, StepState.FORWARD),
        StepState.FORWARD: (StepState.STEP, StepState.HELD),
        StepState.REMOVED: (StepState.REMOVED,),
    }
)
_RUNNING = (StepState.LEARNING, StepState.EAGER, StepState.FORWARD, StepState.BACKWARD)
_FIXED = (StepState.STEP, StepState.HELD, StepState.FORWARD)
_NONE: frozenset[int] = frozenset()


class Gate:
    """Runs one step at a time, in the process that created it, and checks changes of its mode.

    `threads` are the threads whose calls of units belong to the forward under way.
    """

    def __init__(self, block: SharedMemory | None = None) -> None:
        self.block = block  # device memory that several models use in turn; None: the model has its own
        self.turn = StepTurn() if block is None else block.turn  # held for a whole step
        self.lock = threading.RLock()  # held while a unit opens or closes, as a forward may have several threads
        self.mode = StepState.IDLE
        self.is_fixed = False  # weights have fixed addresses
        self.threads: AbstractSet[int] = _NONE
        self._between = StepState.IDLE  # the mode outside of forwards
        self._pid = os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether a forward of the model is under way."""
        return self.mode in _RUNNING

    @property
    def is_removed(self) -> bool:
        return self.mode is StepState.REMOVED

    @property
    def is_cut(self) -> bool:
        """Whether a forward or step() seems to be under way. If the caller knows that none is, one was cut short."""
        return self.is_running or self.mode is StepState.STEP

    @property
    def is_held(self) -> bool:
        """Whether an inference engine drives the layers, in a forward or between two."""
        return self._between is StepState.HELD

    def change(self, mode: StepState) -> None:
        if mode not in _NEXT[self.mode]:
            raise InvariantError(f"a streamer {self.mode.value} cannot be {mode.value}")
        self._set(mode)

    def end_forward(self) -> None:
        """Return to the mode outside of forwards, after a forward that ended or failed."""
        self._set(self._between)

    def reset(self) -> None:
        """Back to IDLE after a step that was cut short, in any mode except REMOVED."""
        if self._between is not StepState.REMOVED:
            self._set(StepState.IDLE)

    def _set(self, mode: StepState) -> None:
        is_running = mode in _RUNNING
        if not is_running:
            self._between = mode
        self.threads = self.turn.threads if is_running else _NONE
        self.is_fixed = mode in _FIXED
        self.mode = mode

    def refuse_forked(self) -> None:
        """Raise `OffloadError` in a forked process: threads are not copied to it."""
        if os.getpid() != self._pid:
            raise OffloadError(
                "this model was offloaded before the process forked: the thread that copies its weights is not here. "
                "Use the start method 'spawn', or offload in the child."
            )

    def refuse_inside(self) -> None:
        """Raise `OffloadError` if this thread is inside a step. Other threads wait for the step to end."""
        self.refuse_forked()
        if self.turn.is_mine and (self.is_running or self.mode is StepState.STEP):
            raise OffloadError("remove() inside a step: the model is computing with these weights; call it after")
