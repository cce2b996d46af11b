"""Where the true bytes of every alias group are: moved when a plan settles, moved back when it is undone.

Residents go to the device. What streams stays where it is (RAM, or a file), or moves into pinned memory where the
device copies from that alone, or into the offload folder where RAM is short. What stays in a file has two sources: its
pages in the page cache, or, if the plan has it on disk, direct reads; once it was written to in this process, its true
bytes are no longer in the file, and it is copied from the map in which they are. Knows no schedule.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import accumulate

import torch

from weightstream.errors import StoreError
from weightstream.plan.plan import Plan
from weightstream.plan.ring import ALIGN_NBYTES, aligned
from weightstream.runtime import bench, readonly
from weightstream.runtime.backend import Backend, Copy
from weightstream.runtime.weights import Group, Member
from weightstream.store.arena import Arena
from weightstream.store.file import DirectFile
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import FileMapping
from weightstream.store.pages import PageCache, Pages

logger = logging.getLogger("weightstream")

_STAGED = "Copies go through a small staging ring instead: the CPU copies each byte once more."
_MEASURED_NBYTES = 256 << 20
_CPU_ALIGNMENT = 64  # what PyTorch gives tensors on the CPU


class Tier(Enum):
    """Where a home is."""

    DEVICE = "device"
    HOST = "host"  # RAM, pages of a file in the page cache included
    DISK = "disk"  # a file of which nothing is meant to be in RAM


@dataclass(kw_only=True, slots=True)
class Home:
    """The true bytes of one alias group. `origin` is the device they came from; `moved` says that they left it."""

    group: Group
    origin: torch.device
    tier: Tier
    mapping: FileMapping | None = None
    pages: Pages | None = None  # where copies find the bytes of a mapped file
    file: DirectFile | None = None  # or what reads them
    pinned: bool = False
    moved: bool = False
    host: torch.Tensor | None = None  # what `group.home` is a view of, where that is of the device

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes of the file that this is."""
        assert self.mapping is not None
        begin = self.mapping.locate((self.group.home if self.host is None else self.host).data_ptr())
        assert begin is not None
        return begin, begin + self.group.nbytes

    def check(self) -> None:
        """Make sure that the bytes can be read here and now; raises `StoreError`."""
        if (prepare := self.prepare()) is not None:
            prepare()

    def prepare(self) -> Callable[[], None] | None:
        """What makes sure that the bytes can be read: a mapped file may have changed."""
        return None if self.mapping is None else partial(self.mapping.populate, *self.extent)

    def copy_into(self, ring: torch.Tensor, backend: Backend) -> Copy:
        """The copy of the bytes from the best source there is; waits for pages that are on their way."""
        if self.file is not None:
            return Copy(dst=ring, src=self.group.home, read=(self.file, *self.extent))
        if self.pages is not None and self.mapping is not None:
            memory = self.pages.source(*self.extent)
            if memory is not None:
                return Copy(dst=ring, src=memory, pinned=True, prepare=self.mapping.check)
        if self.mapping is not None and backend.device.type != "cpu":
            return Copy(dst=ring, src=self.group.home, read=(self.mapping, *self.extent))
        return Copy(dst=ring, src=self.group.home, pinned=self.pinned, prepare=self.prepare())

    @property
    def is_copied_from_file(self) -> bool:
        """Whether copies take the bytes from the file itself, where updates made in this process are not."""
        on_its_way = self.pages is not None and not self.pages.done.is_set()
        return self.file is not None or on_its_way or (self.pages is not None and self.pages.window is not None)

    @property
    def is_read_only(self) -> bool:
        """Whether kernels read it from pages of a file: a write would be an error of the device."""
        return self.host is not None and self.pages is not None

    def leave_file(self) -> bool:
        """The bytes in the file are not the true ones any more; whether copies took them from there."""
        found = self.is_copied_from_file
        self.pages = self.file = None
        return found


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
        pages: PageCache | None = None,
        spill: OffloadFolder | None = None,
        by_row: frozenset[str] = frozenset(),
    ) -> None:
        self._backend = backend
        self.by_row = by_row  # alias groups of which a step reads a few rows
        self.can_map = True  # until pinning is refused
        self._told = False
        self.sources_changed = False  # graphs that were captured before read old ones
        self._empty = [(tensor, tensor.device) for tensor in empty]
        self._mappings = tuple(mappings)
        self._spilled: list[FileMapping] = []
        self._arena = arena
        self._pinnable = arena is not None
        self._pages = pages
        self._spill_folder = spill
        self.homes = {
            alias: Home(group=group, origin=group.home.device, tier=Tier.HOST) for alias, group in groups.items()
        }
        for home in self.homes.values():
            self._locate(home)

    @property
    def movable(self) -> frozenset[str]:
        """Alias groups that can live on disk: those in files, and with an offload folder all."""
        return frozenset(a for a, h in self.homes.items() if h.mapping is not None or self._spill_folder is not None)

    @property
    def came_from_host(self) -> bool:
        """Whether bringing everything home takes no device memory."""
        return all(home.origin.type == "cpu" for home in self.homes.values())

    def disk_bytes_per_s(self) -> float | None:
        """What direct reads of the largest file reach, in a tenth of a second; None where there is no file of size."""
        mapping = max(self._mappings, key=lambda mapping: mapping.nbytes, default=None)
        if mapping is None or mapping.nbytes < _MEASURED_NBYTES:
            return None
        return bench.disk_bytes_per_s(DirectFile(mapping), _MEASURED_NBYTES)

    def settle(self, plan: Plan) -> None:
        """Move everything to where the plan wants it; on failure everything is moved back first."""
        try:
            for alias in plan.manifest.aliases:  # residents first: what leaves the host makes room there
                if alias in plan.resident:
                    self._make_resident(self.homes[alias])
            for tensor, _ in self._empty:
                tensor.data = tensor.data.to(self._backend.device)
            written = self._written(self.homes) if self._pages is not None or plan.disk else set()
            self._hold_pages(plan, written)
            self._map([self.homes[alias] for alias in plan.manifest.aliases if alias in plan.mapped])
            for unit in range(len(plan.manifest.units)):
                self._settle_unit(plan, unit)
            for alias in plan.disk:
                self._read_directly(self.homes[alias], alias in written)
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Bring every group back to the device it came from, into memory of its own.

        Raises `StoreError` where a file with weights cannot be read any more, once all others are back.
        """
        self.unguard()
        errors: list[StoreError] = []
        if self._pages is not None:
            self._pages.close()
        for home in self.homes.values():
            home.leave_file()
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
            bytes_left = home.pinned or home.group.home.device != home.origin or home.mapping is not None
            if home.moved and bytes_left:
                try:
                    self._move(home, torch.empty(home.group.nbytes, dtype=torch.uint8, device=home.origin), Tier.HOST)
                except StoreError as error:
                    errors.append(error)
            self._locate(home)
            home.moved = home.pinned = False
        self._spilled = [m for m in self._spilled if any(home.mapping is m for home in self.homes.values())]
        if errors:
            raise errors[0]

    def copies(self, plan: Plan, unit: int, ring: torch.Tensor) -> list[Copy]:
        """What a fill of the unit moves into the ring, as few copies as possible. Waits for pages on their way."""
        found: list[Copy] = []
        for alias, offset in plan.streamed(unit).items():
            start = plan.extents[unit].offset + offset
            copy = self.homes[alias].copy_into(ring[start : start + self.homes[alias].group.nbytes], self._backend)
            if found and (joined := _joined(found[-1], copy)):
                found[-1] = joined
            else:
                found.append(copy)
        return found

    def leave_files(self, aliases: Iterable[str]) -> set[str]:
        """These were updated; returns those that copies took from a file until now."""
        return {alias for alias in aliases if self.homes[alias].leave_file()}

    def leave_written(self) -> set[str]:
        """The same for whatever was written to in this process, by whom and how ever: the kernel knows."""
        copied = [a for a, home in self.homes.items() if home.host is None and home.is_copied_from_file]
        return self.leave_files(self._written(copied))

    def _written(self, aliases: Iterable[str]) -> set[str]:
        """Those whose file does not hold their bytes, or may not: loading may update them too."""
        ranges: dict[FileMapping, list[tuple[int, int]] | None] = {}
        found: set[str] = set()
        for alias in aliases:
            if (mapping := self.homes[alias].mapping) is None:
                continue
            if mapping not in ranges:
                ranges[mapping] = mapping.written()
            (begin, end), where = self.homes[alias].extent, ranges[mapping]
            if where is None or any(start < end and begin < stop for start, stop in where):
                found.add(alias)
        return found

    def read(self, alias: str, member: Member) -> torch.Tensor:
        """A tensor's true bytes on the device, as it would have them there; on the CPU mostly the home itself."""
        self.homes[alias].check()
        data = self.homes[alias].group.home.to(self._backend.device)
        # kernels choose their way by alignment, and with it the last bits
        return member.view(data.clone() if data.data_ptr() % _CPU_ALIGNMENT else data, 0)

    def held_nbytes(self) -> dict[str, int]:
        """Bytes of weights whose home is on each tier."""
        held = dict.fromkeys((tier.value for tier in Tier), 0)
        for home in self.homes.values():
            held[home.tier.value] += home.group.nbytes
        return held

    def _hold_pages(self, plan: Plan, written: set[str]) -> None:
        """Bring what stays in files into the page cache, in the order of need, and let copies start there."""
        if self._pages is None:
            return
        streamed = dict.fromkeys(alias for unit in plan.manifest.order for alias in plan.streamed(unit))
        everything = dict.fromkeys([*plan.mapped, *streamed, *plan.manifest.aliases])
        kept = [a for a in everything if a not in plan.resident | plan.disk | written and self.homes[a].mapping]
        if plan.mapped:  # kernels choose their way by alignment, and with it the last bits
            computed = plan.mapped - self.by_row
            kept = [a for a in kept if a not in computed or self.homes[a].extent[0] % ALIGN_NBYTES == 0]
        ranges = [(mapping, *self.homes[a].extent) for a in kept if (mapping := self.homes[a].mapping) is not None]
        for alias, pages in zip(kept, self._pages.hold(ranges, self._tell), strict=True):
            self.homes[alias].pages, self.homes[alias].tier = pages, Tier.HOST

    def _map(self, homes: list[Home]) -> None:
        """Let kernels read these from host memory: of exact size and pinned; where the host is the device, in place."""
        for home in homes:
            home.tier = Tier.HOST
            # as in `read`
            if self._backend.device.type == "cpu" and home.mapping and home.group.home.data_ptr() % _CPU_ALIGNMENT:
                self._move(home, torch.empty(home.group.nbytes, dtype=torch.uint8, device="cpu"), Tier.HOST)
        if not homes or self._backend.device.type == "cpu":
            return
        assert self._arena is not None
        for home in [home for home in homes if home.pages is not None]:
            assert home.pages is not None
            if (memory := home.pages.source(*home.extent)) is not None:
                self._show_mapped(home, memory)
                homes.remove(home)
        starts = list(accumulate((aligned(home.group.nbytes) for home in homes), initial=0))
        if not homes:
            return
        block = self._arena.take(starts[-1])
        parts = [block[start : start + home.group.nbytes] for start, home in zip(starts, homes, strict=False)]
        for home, part in zip(homes, parts, strict=True):
            self._move(home, part, Tier.HOST)
        try:
            self._arena.pin(block)
        except StoreError as error:
            self.can_map = False
            self._tell(error)
            raise
        for home, part in zip(homes, parts, strict=True):
            self._show_mapped(home, part)

    def guard(self) -> None:
        """Between steps nobody writes to pages of a file, which the device may not: they get memory of their own."""
        for home in self.homes.values():
            for member in home.group.members if home.is_read_only else ():
                readonly.guard(member.tensor, partial(self._make_writable, home))

    def unguard(self) -> None:
        for home in self.homes.values():
            for member in home.group.members if home.is_read_only else ():
                readonly.unguard(member.tensor)

    def _make_writable(self, home: Home) -> None:
        assert self._arena is not None
        assert home.host is not None
        with torch.inference_mode(False), torch.no_grad():
            block = self._arena.take(home.group.nbytes)
            part = block[: home.group.nbytes].copy_(home.host)
            self._arena.pin(block)
            for member in home.group.members:
                readonly.unguard(member.tensor)
            home.group.home, home.mapping, home.pages, home.moved = part, None, None, True
            self._show_mapped(home, part)
            self.sources_changed = True

    def _show_mapped(self, home: Home, memory: torch.Tensor) -> None:
        view = self._backend.device_view(memory)
        if view is None:
            raise StoreError("the device cannot read the host memory that was pinned for it: set use_uva=False")
        home.host, home.pinned = home.group.home, True
        home.group.home = view
        self._point(home)

    def _settle_unit(self, plan: Plan, unit: int) -> None:
        """Give a unit's groups a home that the device can copy from: together, so that one copy moves them all."""
        waiting = {
            alias: offset
            for alias, offset in plan.streamed(unit).items()
            if not self.homes[alias].moved and self.homes[alias].pages is None
        }
        for alias in [alias for alias in waiting if alias in plan.disk]:
            del waiting[alias]
            if self.homes[alias].mapping is None:
                self._spill(self.homes[alias], alias)
        if waiting and self._pinnable:
            assert self._arena is not None
            block = self._arena.take(max(waiting[a] + self.homes[a].group.nbytes for a in waiting))
            for alias, offset in waiting.items():
                home = self.homes[alias]
                self._move(home, block[offset : offset + home.group.nbytes], Tier.HOST)
            pinned = self._pin(block)
            for alias in waiting:
                self.homes[alias].pinned = pinned
            return
        for home in (self.homes[alias] for alias in waiting):
            if home.tier is Tier.DEVICE:
                self._move(home, torch.empty(home.group.nbytes, dtype=torch.uint8, device="cpu"), Tier.HOST)
            home.tier = Tier.HOST

    def _read_directly(self, home: Home, written: bool) -> None:
        assert home.mapping is not None
        if not written:
            home.file = DirectFile(home.mapping)

    def _pin(self, block: torch.Tensor) -> bool:
        assert self._arena is not None
        try:
            self._arena.pin(block)
        except StoreError as error:
            self._tell(error)
            self._pinnable = False
            return False
        return block.is_pinned()

    def _tell(self, error: Exception) -> None:
        """Pinning was refused, or pages could not be brought in: said once."""
        if not self._told:
            logger.warning("%s %s", str(error), _STAGED)  # text alone: a record must not hold the error's frames
        self._told = True

    def _spill(self, home: Home, alias: str) -> None:
        assert self._spill_folder is not None  # the planner moves to disk what can be there
        mapped = self._spill_folder.write(alias, home.group.home.cpu())
        self._spilled.append(self._spill_folder.mappings[-1])
        home.group.home = mapped
        self._point(home)
        self._locate(home)
        home.moved = True

    def _make_resident(self, home: Home) -> None:
        in_place = home.origin == self._backend.device and home.mapping is None
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
        inside = (m for m in (*self._mappings, *self._spilled) if on_host and m.locate(data.data_ptr()) is not None)
        home.mapping = next(inside, None)
        home.tier = Tier.DISK if home.mapping else Tier.HOST if on_host else Tier.DEVICE


def _joined(first: Copy, second: Copy) -> Copy | None:
    """One copy for two that are neighbours at both ends, the alignment gap between them included."""
    if not (first.pinned and second.pinned and first.prepare == second.prepare):
        return None
    if first.src.untyped_storage().data_ptr() != second.src.untyped_storage().data_ptr():
        return None
    distance = second.src.storage_offset() - first.src.storage_offset()
    if second.dst.storage_offset() - first.dst.storage_offset() != distance:
        return None
    if not first.src.numel() <= distance < first.src.numel() + ALIGN_NBYTES:
        return None
    size = (distance + second.src.numel(),)
    return replace(first, dst=first.dst.as_strided(size, (1,)), src=first.src.as_strided(size, (1,)))


class UnitCopies:
    """The copies of every unit of a plan, made when the first fill of the unit needs them."""

    def __init__(self, homes: Homes, plan: Plan, ring: torch.Tensor) -> None:
        self._homes, self._plan, self._ring = homes, plan, ring
        self._made: dict[int, list[Copy]] = {}

    def __getitem__(self, unit: int) -> list[Copy]:
        if unit not in self._made:
            self._made[unit] = self._homes.copies(self._plan, unit, self._ring)
        return self._made[unit]

    def forget(self, aliases: set[str]) -> list[int]:
        """The sources of these changed; returns the units that hold them."""
        units = [u for u in range(len(self._plan.manifest.units)) if aliases & self._plan.streamed(u).keys()]
        for unit in units:
            self._made.pop(unit, None)
        return units
