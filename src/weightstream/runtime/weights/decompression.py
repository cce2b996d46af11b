"""The compressed weights of a unit: where their bytes are, and how all of them get into the decode buffer.

Knows no ids and no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from weightstream.codec import coding
from weightstream.codec.reference import CodedPart
from weightstream.errors import OffloadError
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import aligned
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.weights.home import Home


class PlanMemory(NamedTuple):
    """The device memory of a plan, without its resident weights: each part is flat uint8."""

    ring: torch.Tensor  # streamed units pass through it
    buffer: torch.Tensor  # compressed weights are decompressed into it, those of one unit at a time
    slots: torch.Tensor  # rows of cached stacks

    @classmethod
    def allocate(cls, plan: Plan, backend: Backend) -> PlanMemory:
        both, ring = backend.alloc(plan.own_buffer_nbytes + plan.slots_nbytes), backend.alloc(plan.ring_nbytes)
        if plan.shared_nbytes:
            return cls(ring=ring, buffer=both[: plan.buffer_nbytes], slots=both[plan.own_buffer_nbytes :])
        # slots first: a stack of all rows that begins at its slots ends inside the buffer, which holds whole stacks
        return cls(ring=ring, buffer=both[plan.slots_nbytes :], slots=both[: plan.slots_nbytes])


@dataclass(frozen=True, kw_only=True, eq=False)
class BufferedUnit:
    """One unit whose compressed weights and cached stacks are read from the decode buffer."""

    plan: Plan
    index: int
    homes: Mapping[str, Home]
    memory: PlanMemory
    backend: Backend

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Its alias groups that have a place in the buffer -> byte offset there."""
        return self.plan.decoded(self.index)

    @cached_property
    def _streamed(self) -> Mapping[str, int]:
        return self.plan.streamed(self.index)

    def room(self, alias: str) -> torch.Tensor:
        """The place of a group in the buffer, up to the next aligned address."""
        offset = self.offsets[alias]
        return self.memory.buffer[offset : offset + aligned(self.homes[alias].group.nbytes)]

    def compressed(self, alias: str) -> torch.Tensor:
        """The compressed bytes of a group: in the ring where it is streamed, else where its home holds them."""
        home = self.homes[alias]
        assert home.layout is not None
        if alias in self._streamed:
            begin = self.plan.extents[self.index].offset + self._streamed[alias]
            return self.memory.ring[begin : begin + home.layout.nbytes]
        assert home.coded is not None
        return home.coded[: home.layout.nbytes]


def unit_decoder(unit: BufferedUnit, aliases: Collection[str]) -> Callable[[], None]:
    """A function that brings these groups of the unit to the buffer.

    Compressed groups are decompressed. Groups that were updated are no longer compressed, and are copied. A graph
    cannot hold such a copy: the function raises `OffloadError` in a capture.
    """
    compressed: list[CodedPart] = []
    updated: list[tuple[Home, torch.Tensor]] = []
    for alias in aliases:
        home, room = unit.homes[alias], unit.room(alias)
        if home.layout is None:
            updated.append((home, room[: home.group.nbytes]))
        else:
            compressed.append(CodedPart(unit.compressed(alias), home.layout, room))
    decompress = coding.decoding(compressed) if compressed else None
    capturing = unit.backend.capturing

    def decode() -> None:
        if updated and capturing():
            raise OffloadError(
                f"{updated[0][0].group.alias} was updated since it was compressed: offload the model again"
            )
        for home, target in updated:
            home.source.plain_into(target)
        if decompress is not None:
            decompress()

    return decode
