"""Where the true bytes of every alias group are: moved when a plan settles, moved back when it is undone.

Residents go to the device. What streams stays where it is (RAM, or a mapped file), or moves into pinned memory where
the device copies from that alone, or into the offload folder where RAM is short. Knows no schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate

import torch

from weightstream.errors import PlanError, StoreError
from weightstream.plan.plan import Plan, human
from weightstream.plan.ring import ALIGN_NBYTES, aligned
from weightstream.runtime import cpu
from weightstream.runtime.backend import Backend, Copy
from weightstream.runtime.weights import Group
from weightstream.store.arena import Arena
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import FileMapping

logger = logging.getLogger("weightstream")


class Tier(Enum):
    """Where a home is."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(kw_only=True, slots=True)
class Home:
    """The true bytes of one alias group. `origin` is the device they came from; `moved` says that they left it."""

    group: Group
    origin: torch.device
    tier: Tier
    mapping: FileMapping | None = None
    pinned: bool = False
    moved: bool = False
    host: torch.Tensor | None = None  # what `group.home` is a view of, where that is of the device

    def check(self) -> None:
        """Make sure that the bytes can be read here and now; raises `StoreError`."""
        if (prepare := self.prepare()) is not None:
            prepare()

    def prepare(self) -> Callable[[], None] | None:
        """What makes sure that the bytes can be read: a mapped file may have changed."""
        if self.mapping is None:
            return None
        begin = self.mapping.locate(self.group.home.data_ptr())
        assert begin is not None
        return partial(self.mapping.populate, begin, begin + self.group.nbytes)


class Homes:
    """All homes of a model on one backend."""

    def __init__(
        self,
        groups: dict[str, Group],
        backend: Backend,
        *,
        empty: Sequence[torch.Tensor] = (),
        mappings: Sequence[FileMapping] = (),
        arena: Arena | None = None,
        spill: OffloadFolder | None = None,
        host_budget: int | None = None,
    ) -> None:
        self._backend = backend
        self._empty = [(tensor, tensor.device) for tensor in empty]
        self._mappings = list(mappings)
        self._arena = arena
        self._pinnable = arena is not None
        self._spill_folder = spill
        self._strict = host_budget is not None
        self.homes = {
            alias: Home(group=group, origin=group.home.device, tier=Tier.HOST) for alias, group in groups.items()
        }
        for home in self.homes.values():
            self._locate(home)
        if host_budget is None:  # what is in RAM already may stay there
            host_budget = cpu.free_nbytes() + self.held_nbytes()[Tier.HOST.value]
        self._host_budget = host_budget

    def settle(self, plan: Plan) -> None:
        """Move everything to where the plan wants it; on failure everything is moved back first."""
        try:
            for alias in plan.manifest.aliases:  # residents first: what leaves the host makes room there
                if alias in plan.resident:
                    self._make_resident(self.homes[alias])
            for tensor, _ in self._empty:
                tensor.data = tensor.data.to(self._backend.device)
            self._map([self.homes[alias] for alias in plan.manifest.aliases if alias in plan.mapped])
            for unit in range(len(plan.manifest.units)):
                self._settle_unit(plan.streamed(unit), plan.extents[unit].nbytes)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Bring every group back to the device it came from, into memory of its own."""
        for home in self.homes.values():
            if home.host is not None:
                replaced = self._replaced(home)
                home.group.home, home.host = home.host, None
                self._point(home)
                for tensor, data in replaced:
                    tensor.data = data.cpu()
        if self._arena is not None:
            self._arena.close()  # first: each block then goes back as soon as its last group has left it
        for tensor, origin in self._empty:
            tensor.data = tensor.data.to(origin)
        for home in self.homes.values():
            bytes_left = home.pinned or home.group.home.device != home.origin or home.tier is Tier.DISK
            if home.moved and bytes_left:
                self._move(home, torch.empty(home.group.nbytes, dtype=torch.uint8, device=home.origin), Tier.HOST)
            self._locate(home)
            home.moved = home.pinned = False

    def copies(self, plan: Plan, unit: int, ring: torch.Tensor) -> list[Copy]:
        """What a fill of the unit moves into the ring, as few copies as possible."""
        found: list[Copy] = []
        for alias, offset in plan.streamed(unit).items():
            home = self.homes[alias]
            start = plan.extents[unit].offset + offset
            copy = Copy(
                dst=ring[start : start + home.group.nbytes],
                src=home.group.home,
                pinned=home.pinned,
                prepare=home.prepare(),
            )
            if found and (joined := _joined(found[-1], copy)):
                found[-1] = joined
            else:
                found.append(copy)
        return found

    def held_nbytes(self) -> dict[str, int]:
        """Bytes of weights whose home is on each tier."""
        held = dict.fromkeys((tier.value for tier in Tier), 0)
        for home in self.homes.values():
            held[home.tier.value] += home.group.nbytes
        return held

    def _map(self, homes: list[Home]) -> None:
        """Let kernels read these from host memory: of exact size and pinned; where the host is the device, in place."""
        if not homes or self._backend.device.type == "cpu":
            return
        assert self._arena is not None
        starts = list(accumulate((aligned(home.group.nbytes) for home in homes), initial=0))
        block = self._arena.take(starts[-1])
        parts = [block[start : start + home.group.nbytes] for start, home in zip(starts, homes, strict=False)]
        for home, part in zip(homes, parts, strict=True):
            self._move(home, part, Tier.HOST)
        self._arena.pin(block)
        view = self._backend.device_view(block)
        if view is None:
            raise StoreError("the device cannot read the host memory that was pinned for it: set use_uva=False")
        for home, start in zip(homes, starts, strict=False):
            home.host, home.pinned = home.group.home, True
            home.group.home = view[start : start + home.group.nbytes]
            self._point(home)

    def _settle_unit(self, streamed: dict[str, int], nbytes: int) -> None:
        """Give a unit's groups a home that the device can copy from: together, so that one copy moves them all."""
        waiting = {alias: offset for alias, offset in streamed.items() if not self.homes[alias].moved}
        incoming = [h for h in (self.homes[a] for a in waiting) if h.tier is not Tier.HOST]
        needed = sum(h.group.nbytes for h in incoming)
        fits = self.held_nbytes()[Tier.HOST.value] + needed <= self._host_budget
        if waiting and self._pinnable and fits:
            assert self._arena is not None
            block = self._arena.take(nbytes)
            for alias, offset in waiting.items():
                home = self.homes[alias]
                self._move(home, block[offset : offset + home.group.nbytes], Tier.HOST)
            pinned = self._pin(block)
            for alias in waiting:
                self.homes[alias].pinned = pinned
            return
        for alias in waiting:
            home = self.homes[alias]
            if not fits and (home.tier is Tier.DEVICE or (home.tier is Tier.HOST and self._strict)):
                self._spill(home, alias)
            elif home.tier is Tier.DEVICE:
                self._move(home, torch.empty(home.group.nbytes, dtype=torch.uint8, device="cpu"), Tier.HOST)

    def _pin(self, block: torch.Tensor) -> bool:
        assert self._arena is not None
        try:
            self._arena.pin(block)
        except StoreError as error:
            logger.warning("%s Copies go through a small pinned buffer instead, which costs overlap.", error)
            self._pinnable = False
            return False
        return block.is_pinned()

    def _spill(self, home: Home, alias: str) -> None:
        if self._spill_folder is None:
            held = self.held_nbytes()[Tier.HOST.value]
            raise PlanError(
                f"host budget {human(self._host_budget)} < {human(held)} of weights on the host, and {alias} needs "
                f"{human(home.group.nbytes)}. Raise host_budget, or name an offload_folder to keep the rest on disk."
            )
        mapped = self._spill_folder.write(alias, home.group.home.cpu())
        self._mappings.append(self._spill_folder.mappings[-1])
        home.group.home = mapped
        self._point(home)
        self._locate(home)
        home.moved = True

    def _make_resident(self, home: Home) -> None:
        in_place = home.origin == self._backend.device and home.tier is not Tier.DISK
        if not in_place:
            self._move(home, self._backend.alloc(home.group.nbytes), Tier.DEVICE)
        home.tier = Tier.DEVICE

    def _move(self, home: Home, target: torch.Tensor, tier: Tier) -> None:
        """Copy the bytes and point every tensor of the group at the copy."""
        home.check()
        replaced = self._replaced(home)
        target.copy_(home.group.home)
        home.group.home = target
        self._point(home)
        for tensor, data in replaced:
            tensor.data = data.to(target.device)
        home.mapping, home.tier, home.moved = None, tier, True

    def _point(self, home: Home) -> None:
        for member in home.group.members:
            member.tensor.data = member.view(home.group.home, 0)

    def _replaced(self, home: Home) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors of the group that show other bytes, because somebody assigned to their `.data`."""
        shown = [(m.tensor, m.tensor.data, m.view(home.group.home, 0)) for m in home.group.members]
        return [(tensor, data) for tensor, data, view in shown if data.data_ptr() != view.data_ptr()]

    def _locate(self, home: Home) -> None:
        """Tell the tier of the bytes from where they are."""
        data = home.group.home
        on_host = data.device.type == "cpu"
        inside = (m for m in self._mappings if on_host and m.locate(data.data_ptr()) is not None)
        home.mapping = next(inside, None)
        home.tier = Tier.DISK if home.mapping else Tier.HOST if on_host else Tier.DEVICE


def _joined(first: Copy, second: Copy) -> Copy | None:
    """One copy for two that are neighbours at both ends, the alignment gap between them included."""
    if not (first.pinned and second.pinned):
        return None
    if first.src.untyped_storage().data_ptr() != second.src.untyped_storage().data_ptr():
        return None
    distance = second.src.storage_offset() - first.src.storage_offset()
    if second.dst.storage_offset() - first.dst.storage_offset() != distance:
        return None
    if not first.src.numel() <= distance < first.src.numel() + ALIGN_NBYTES:
        return None
    size = (distance + second.src.numel(),)
    return Copy(dst=first.dst.as_strided(size, (1,)), src=first.src.as_strided(size, (1,)), pinned=True)
