"""Device memory that the streamed weights of several models pass through in turn: one ring, and one buffer, for all.

A model that fills the ring, or decodes into the buffer, takes the memory over from the model that had it. The weights
of that model are gone, and its next step fills them again. All models copy on one stream, so their copies are in order;
the copy stream waits once for the kernels queued before.
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
from weightstream.runtime.weights.decompression import PlanMemory


class User(Protocol):
    """The engine of one of the models."""

    open_units: Sequence[object]  # units whose forwards run now

    def yield_up(self) -> None:
        """Take note that no weights of the model are in the memory any more."""


class Tenure:
    """The steps of one model until another model takes the memory; assumed to be as many as the last time."""

    def __init__(self) -> None:
        self._steps = 0
        self._usual = -1  # the number of steps the last time; -1: this is the first time

    @property
    def is_last_step(self) -> bool:
        """Whether another model is expected to be next."""
        return self._steps == self._usual

    def step(self) -> None:
        """Count a step that begins."""
        self._steps += 1

    def end(self) -> None:
        """Keep the count for the next time, as another model takes the memory."""
        if self._steps:
            self._steps, self._usual = 0, self._steps


class SharedMemory:
    """Device memory that any number of models on one backend use, one model at a time."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self.turn = StepTurn()  # held for a whole step of any of the models
        self.memory = backend.alloc(aligned(nbytes))
        self._backend = backend
        self._event = backend.event()
        self._has_user: weakref.ref[User] | None = None  # weak: a model that is in use nowhere else is freed

    def parts(self, plan: Plan) -> PlanMemory:
        """The ring and the buffer of a plan in this memory; no slots.

        Raises `InvariantError` where the memory is too small for them.
        """
        begin = aligned(plan.ring_nbytes)
        end = begin + plan.buffer_nbytes
        if end > self.memory.numel():
            raise InvariantError(f"a ring and a buffer of {end} bytes in a block of {self.memory.numel()}")
        return PlanMemory(self.memory[: plan.ring_nbytes], self.memory[begin:end], self.memory[:0])

    @property
    def _user(self) -> User | None:
        return None if self._has_user is None else self._has_user()

    def is_held_against(self, user: User) -> bool:
        """Whether a model other than this user computes with weights in the memory now."""
        return self._user is not None and self._user is not user and len(self._user.open_units) > 0

    def enter(self, user: User, *, decodes: bool = False) -> None:
        """Give the memory to a user that is about to queue a fill, or, with `decodes`, a kernel that decodes.

        Such a kernel also waits for copies in flight, which may be into the same bytes.
        """
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
