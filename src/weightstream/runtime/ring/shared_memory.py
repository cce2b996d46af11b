"""Device memory that the streamed weights of several models pass through in turn: one ring, and one buffer, for all.

Whoever fills the ring, or decodes into the buffer, takes the block over from the model that had it: what that one left
there is gone, and its next step fills anew. All of them copy on one stream, so copies need no further order; the copy
stream waits once for what was computed before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from weightstream.errors import InvariantError
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import aligned
from weightstream.runtime.devices.backend import Backend, Side
from weightstream.runtime.ring.turn import StepTurn


class User(Protocol):
    """Of one model: what has parts of a block."""

    open_units: Sequence[object]  # those whose forwards run now

    def yield_up(self) -> None:
        """Take note that nothing of the model is in the block any more."""


class Tenure:
    """The steps of one model until another one has the memory; it is taken to have as many as the last time."""

    def __init__(self) -> None:
        self._steps = 0
        self._usual = -1  # how many there were the last time; -1: this is the first

    @property
    def is_last_step(self) -> bool:
        """Whether another model is expected to be next."""
        return self._steps == self._usual

    def step(self) -> None:
        """A step begins."""
        self._steps += 1

    def end(self) -> None:
        """Another model has the memory."""
        if self._steps:
            self._steps, self._usual = 0, self._steps


class SharedMemory:
    """Device memory for any number of models on one backend, of which one at a time has it."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self.turn = StepTurn()  # held for a whole step of any of the models
        self.memory = backend.alloc(aligned(nbytes))
        self._backend = backend
        self._event = backend.event()
        self._has_user: weakref.ref[User] | None = None  # a model that nobody else has is let go of

    def parts(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The ring and the buffer of a plan, which has no slots here. Raises `InvariantError` where the block is too
        small for them."""
        begin = aligned(plan.ring_nbytes)
        end = begin + plan.buffer_nbytes
        if end > self.memory.numel():
            raise InvariantError(f"a ring and a buffer of {end} bytes in a block of {self.memory.numel()}")
        return self.memory[: plan.ring_nbytes], self.memory[begin:end], self.memory[:0]

    @property
    def _user(self) -> User | None:
        return None if self._has_user is None else self._has_user()

    def is_held_against(self, user: User) -> bool:
        """Whether another model computes with weights in the block just now."""
        return self._user is not None and self._user is not user and len(self._user.open_units) > 0

    def enter(self, user: User, *, decodes: bool = False) -> None:
        """The user is about to queue a fill; or a kernel that decodes, which copies in flight must not overtake."""
        had = self._user
        if had is user:
            return
        if self.is_held_against(user):
            raise InvariantError("a model fills memory that another one computes with")
        if had is not None:
            had.yield_up()
        self._backend.record(Side.COMPUTE, self._event)
        self._backend.wait(Side.COPY, self._event)
        if decodes:
            copied = self._backend.event()
            self._backend.record(Side.COPY, copied)
            self._backend.wait(Side.COMPUTE, copied)
        self._has_user = weakref.ref(user)

    def close(self) -> None:
        """Let go of the memory."""
        self.memory, self._has_user = torch.empty(0, dtype=torch.uint8, device="cpu"), None
