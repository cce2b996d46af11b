"""Where the true bytes of every alias group are: moved when a plan settles, moved back when it is undone.

Residents go to the device. What streams stays where it is (RAM, or a file), or moves into pinned memory where the
device copies from that alone, or into the offload folder where RAM is short. What stays in a file has two sources: its
pages in the page cache, or, if the plan has it on disk, direct reads; once it was written to in this process, its true
bytes are no longer in the file, and it is copied from the map in which they are. Knows no schedule.

What a plan wants coded is encoded on the device, and its plain bytes are let go: the tensors then view memory that is
decoded when somebody reads it. Once it was written to, it is coded no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from weightstream.codec import coding
from weightstream.codec.format import Layout
from weightstream.errors import StoreError
from weightstream.plan.manifest import TensorSpec
from weightstream.plan.plan import Plan
from weightstream.plan.ring import ALIGN_NBYTES, aligned
from weightstream.runtime import bench, readonly
from weightstream.runtime.backend import Backend, Copy
from weightstream.runtime.weights import Group, Member
from weightstream.store.arena import Arena
from weightstream.store.decoded import DecodedMemory
from weightstream.store.file import DirectFile
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import FileMapping
from weightstream.store.pages import PageCache, Pages

logger = logging.getLogger("weightstream")

_STAGED = "Copies go through a small staging ring instead: the CPU copies each byte once more."
_MEASURED_NBYTES = 256 << 20
_CPU_ALIGNMENT = 64  # what PyTorch gives tensors on the CPU
_SAMPLES = 64


class CodeOverflow(Exception):
    """Coded forms that are larger than was planned for: alias group -> bits -> bytes."""

    def __init__(self, sizes: dict[str, dict[int, int]]) -> None:
        super().__init__(f"coded weights take more than planned: {sizes}")
        self.sizes = sizes


class Tier(Enum):
    """Where a home is."""

    DEVICE = "device"
    HOST = "host"  # RAM, pages of a file in the page cache included
    DISK = "disk"  # a file of which nothing is meant to be in RAM


@dataclass(kw_only=True, slots=True)
class Home:
    """The true bytes of one alias group. `origin` is the device they came from; `moved` says that they left it.

    With a `layout` the group is coded in force: as `coded`, or as a file has it. `left`: it was, and was written to.
    """

    group: Group
    origin: torch.device
    tier: Tier
    mapping: FileMapping | DecodedMemory | None = None
    layout: Layout | None = None
    coded: torch.Tensor | None = None
    left: bool = False
    sample: bytes | None = None  # of memory that was decoded, from then
    pages: Pages | None = None  # where copies find the bytes of a mapped file
    file: DirectFile | None = None  # or what reads them
    pinned: bool = False
    moved: bool = False
    host: torch.Tensor | None = None  # what `group.home` is a view of, where that is of the device

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes of the file that this is."""
        assert self.mapping is not None
        if isinstance(self.mapping, DecodedMemory):  # whose storage may have been put into shared memory since
            return 0, self.group.nbytes
        begin = self.mapping.locate((self.group.home if self.host is None else self.host).data_ptr())
        assert begin is not None
        return begin, begin + self.group.nbytes

    @property
    def in_file(self) -> tuple[FileMapping, int, int] | None:
        """Where copies find the bytes in a file: the file, begin and end."""
        mapping = self.mapping
        if isinstance(mapping, DecodedMemory):
            if self.layout is None or mapping.mapping is None or mapping.extent is None:
                return None
            return mapping.mapping, *mapping.extent
        return None if mapping is None else (mapping, *self.extent)

    @property
    def is_undecoded(self) -> bool:
        """Whether the tensors view memory that holds nothing yet."""
        return isinstance(self.mapping, DecodedMemory) and not self.mapping.is_decoded

    def check(self) -> None:
        """Make sure that the bytes can be read here and now; raises `StoreError`."""
        if (prepare := self.prepare()) is not None:
            prepare()
        if isinstance(self.mapping, DecodedMemory) and self.sample is None:
            self.sample = words(self.group.home).tobytes()

    def prepare(self) -> Callable[[], None] | None:
        """What makes sure that the bytes can be read: a mapped file may have changed."""
        return None if self.mapping is None else partial(self.mapping.populate, *self.extent)

    def copy_into(self, ring: torch.Tensor, backend: Backend) -> Copy:
        """The copy of the bytes from the best source there is; waits for pages that are on their way."""
        if self.coded is not None:
            return Copy(dst=ring, src=self.coded, pinned=self.pinned)
        if (where := self.in_file) is not None:
            mapping, begin, end = where
            src = self.group.home if self.layout is None else mapping.bytes(begin, end)
            if self.file is not None:
                return Copy(dst=ring, src=src, read=(self.file, begin, end))
            if self.pages is not None and (memory := self.pages.source(begin, end)) is not None:
                return Copy(dst=ring, src=memory, pinned=True, prepare=mapping.check)
            if backend.device.type != "cpu":
                return Copy(dst=ring, src=src, read=where)
            return Copy(dst=ring, src=src, prepare=partial(mapping.populate, begin, end))
        return Copy(dst=ring, src=self.group.home, pinned=self.pinned, prepare=self.prepare())

    def was_written(self) -> bool:
        """Whether memory that was decoded differs from then."""
        if self.sample is None:
            return isinstance(self.mapping, DecodedMemory) and self.mapping.is_decoded  # by others: nobody knows
        return words(self.group.home).tobytes() != self.sample

    @property
    def is_copied_from_file(self) -> bool:
        """Whether copies take the bytes from a file or the coded form, where updates made in this process are not."""
        if self.layout is not None:
            return True
        on_its_way = self.pages is not None and not self.pages.done.is_set()
        return self.file is not None or on_its_way or (self.pages is not None and self.pages.window is not None)

    @property
    def is_read_only(self) -> bool:
        """Whether kernels read it from pages of a file: a write would be an error of the device."""
        return self.host is not None and self.pages is not None

    def leave_file(self) -> bool:
        """The bytes in the file are not the true ones any more; whether copies took them from there."""
        found = self.is_copied_from_file
        if self.layout is not None:
            self.left, self.tier = True, Tier.HOST
        self.pages = self.file = self.coded = self.layout = None
        return found


class Homes:
    """All homes of a model on one backend."""

    def __init__(
        self,
        groups: dict[str, Group],
        backend: Backend,
        *,
        empty: Sequence[torch.Tensor] = (),
        mappings: Sequence[FileMapping | DecodedMemory] = (),
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
        for mapping in mappings:
            if isinstance(mapping, DecodedMemory):
                mapping.decode = self._decode
        for home in self.homes.values():
            if isinstance(home.mapping, DecodedMemory) and home.mapping.nbytes != home.group.nbytes:
                home.mapping.populate(0, home.mapping.nbytes)  # a part of a coded tensor cannot be taken as it is
                home.mapping = None

    @property
    def layouts(self) -> dict[str, Layout]:
        """Of the groups whose file holds them coded."""
        lazy = ((alias, home.mapping) for alias, home in self.homes.items() if home.is_undecoded)
        return {alias: mapping.layout for alias, mapping in lazy if isinstance(mapping, DecodedMemory)}

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
        files = (mapping for mapping in self._mappings if isinstance(mapping, FileMapping))
        mapping = max(files, key=lambda mapping: mapping.nbytes, default=None)
        if mapping is None or mapping.nbytes < _MEASURED_NBYTES:
            return None
        return bench.disk_bytes_per_s(DirectFile(mapping), _MEASURED_NBYTES)

    def settle(self, plan: Plan) -> None:
        """Move everything to where the plan wants it; on failure everything is moved back first."""
        try:
            coded = {t.alias: t for t in plan.manifest.tensors() if t.bits}
            memory = self._memory_of_coded([t for t in coded.values() if t.alias in plan.resident])
            for alias in plan.manifest.aliases:  # residents first: what leaves the host makes room there
                if alias in plan.resident and alias in coded:
                    self._make_coded(self.homes[alias], coded[alias], memory.get(alias), Tier.DEVICE)
                elif alias in plan.resident:
                    self._make_resident(self.homes[alias])
            for alias, spec in coded.items():
                if alias not in plan.resident:
                    self._take_coded_file(self.homes[alias], spec)
            for tensor, _ in self._empty:
                tensor.data = tensor.data.to(self._backend.device)
            written = self._written(self.homes) if self._pages is not None or plan.disk else set()
            self._hold_pages(plan, written)
            self._map([self.homes[alias] for alias in plan.manifest.aliases if alias in plan.mapped])
            for unit in range(len(plan.manifest.units)):
                self._settle_unit(plan, unit, coded)
            for alias in plan.disk:
                self._read_directly(self.homes[alias], alias in written)
            for home in self.homes.values():
                if isinstance(home.mapping, DecodedMemory):
                    home.mapping.poison()
        except BaseException:
            self.restore()
            raise

    def restore(self, *, decode: bool = True) -> None:
        """Bring every group back to the device it came from, into memory of its own.

        Without `decode`, what a file holds coded and nobody has read may stay so: it is to be settled again.
        Raises `StoreError` where a file with weights cannot be read any more, once all others are back.
        """
        self.unguard()
        errors: list[StoreError] = []
        for home in self.homes.values():
            if decode and home.is_undecoded and not home.moved:  # while there still is what it is decoded from
                try:
                    home.check()
                except StoreError as error:
                    errors.append(error)
        if self._pages is not None:
            self._pages.close()
        for home in self.homes.values():
            home.pages = home.file = None
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
            home.layout = home.coded = None
            if decode or home.moved:
                home.sample = None
            self._locate(home)
            home.moved = home.pinned = home.left = False
        self._spilled = [m for m in self._spilled if any(home.mapping is m for home in self.homes.values())]
        if errors:
            raise errors[0]

    def copies(self, plan: Plan, unit: int, ring: torch.Tensor) -> list[Copy]:
        """What a fill of the unit moves into the ring, as few copies as possible. Waits for pages on their way."""
        found: list[Copy] = []
        for alias, offset in plan.streamed(unit).items():
            if self.homes[alias].left and alias in plan.manifest.coded_aliases:
                continue  # its plain bytes do not fit here
            start = plan.extents[unit].offset + offset
            copy = self.homes[alias].copy_into(ring[start : start + plan.manifest.aliases[alias]], self._backend)
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
            mapping = self.homes[alias].mapping
            if mapping is None or isinstance(mapping, DecodedMemory):
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
            held[home.tier.value] += home.group.nbytes if home.layout is None else home.layout.nbytes
            if home.layout is not None and home.sample is not None:
                held[Tier.HOST.value] += home.group.nbytes
        return held

    def _hold_pages(self, plan: Plan, written: set[str]) -> None:
        """Bring what stays in files into the page cache, in the order of need, and let copies start there."""
        if self._pages is None:
            return
        streamed = dict.fromkeys(alias for unit in plan.manifest.order for alias in plan.streamed(unit))
        everything = dict.fromkeys([*plan.mapped, *streamed, *plan.manifest.aliases])
        out, coded = plan.resident | plan.disk | written, plan.manifest.coded_aliases
        kept = [a for a in everything if a not in out and self.homes[a].in_file]
        kept = [a for a in kept if (a in coded) == (self.homes[a].layout is not None)]
        if plan.mapped:  # kernels choose their way by alignment, and with it the last bits
            computed = plan.mapped - self.by_row
            kept = [a for a in kept if a not in computed or self.homes[a].extent[0] % ALIGN_NBYTES == 0]
        ranges = [where for a in kept if (where := self.homes[a].in_file) is not None]
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

    def _settle_unit(self, plan: Plan, unit: int, coded: Mapping[str, TensorSpec]) -> None:
        """Give a unit's groups a home that the device can copy from: together, so that one copy moves them all."""
        waiting = {
            alias: offset
            for alias, offset in plan.streamed(unit).items()
            if not self.homes[alias].moved and self.homes[alias].pages is None and self.homes[alias].coded is None
        }
        for alias in [alias for alias in waiting if alias in plan.disk]:
            del waiting[alias]
            if self.homes[alias].mapping is None:
                self._spill(self.homes[alias], alias)
        if waiting and self._pinnable:
            assert self._arena is not None
            sizes = plan.manifest.aliases
            block = self._arena.take(max(waiting[alias] + sizes[alias] for alias in waiting))
            if coded.keys() & waiting.keys():
                block.zero_()  # all cores touch it, where a copy from the device would page by page
            for alias, offset in waiting.items():
                memory = block[offset : offset + sizes[alias]]
                if alias in coded:
                    self._make_coded(self.homes[alias], coded[alias], memory, Tier.HOST)
                else:
                    self._move(self.homes[alias], memory, Tier.HOST)
            pinned = self._pin(block)
            for alias in waiting:
                self.homes[alias].pinned = pinned
            return
        for alias, home in ((alias, self.homes[alias]) for alias in waiting):
            if alias in coded:
                memory = torch.empty(plan.manifest.aliases[alias], dtype=torch.uint8, device="cpu")
                self._make_coded(home, coded[alias], memory, Tier.HOST)
            elif home.is_undecoded:
                home.check()  # now: readers ahead of a copy begin before it prepares its source
            elif home.tier is Tier.DEVICE:
                self._move(home, torch.empty(home.group.nbytes, dtype=torch.uint8, device="cpu"), Tier.HOST)
            home.tier = Tier.HOST

    def _take_coded_file(self, home: Home, spec: TensorSpec) -> None:
        """Let copies take the coded form from the file, if it is there as the plan wants it."""
        lazy = home.mapping
        if isinstance(lazy, DecodedMemory) and lazy.mapping is not None and not home.was_written():
            if lazy.layout.bits == spec.bits and lazy.layout.nbytes > spec.nbytes:
                raise CodeOverflow({spec.alias: {spec.bits: lazy.layout.nbytes}})
            home.layout = lazy.layout if lazy.layout.bits == spec.bits else None

    def _memory_of_coded(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        """Memory of the device in one piece, as its allocator rounds up each; where plain weights are to make room for
        coded ones, each has to find its own."""
        if any(self.homes[spec.alias].origin == self._backend.device for spec in specs) or not specs:
            return {}
        starts = list(accumulate((aligned(spec.nbytes) for spec in specs), initial=0))
        block = self._backend.alloc(starts[-1])
        return {s.alias: block[start : start + s.nbytes] for start, s in zip(starts, specs, strict=False)}

    def _make_coded(self, home: Home, spec: TensorSpec, memory: torch.Tensor | None, tier: Tier) -> None:
        """Hold a group in coded form, in `memory` or else in its own on the device; raises `CodeOverflow`."""
        layout, coded = self._coded(home, spec)
        if layout.nbytes > spec.nbytes:
            raise CodeOverflow({spec.alias: {spec.bits: layout.nbytes}})
        memory = self._backend.alloc(spec.nbytes) if memory is None else memory
        memory[: layout.nbytes].copy_(coded)
        memory[layout.nbytes :].zero_()
        home.coded, home.layout, home.tier, home.sample = memory, layout, tier, None
        if home.mapping is None or (isinstance(home.mapping, DecodedMemory) and home.mapping.is_decoded):
            replaced = self._replaced(home)
            source = partial(torch.narrow, memory, 0, 0, layout.nbytes)
            home.mapping = DecodedMemory(spec.name, Path(spec.name), layout, source, decode=self._decode)
            home.group.home, home.moved = home.mapping.bytes(0, home.group.nbytes), True
            self._point(home)
            for tensor, data in replaced:
                tensor.data = data.cpu()

    def _coded(self, home: Home, spec: TensorSpec) -> tuple[Layout, torch.Tensor]:
        lazy = home.mapping
        if isinstance(lazy, DecodedMemory) and not lazy.is_decoded and lazy.layout.bits == spec.bits:
            lazy.check()
            return lazy.layout, lazy.source()
        plain = home.group.home
        if lazy is not None or plain.device != self._backend.device:
            plain = torch.empty(home.group.nbytes, dtype=torch.uint8, device=self._backend.device)
            self.plain_into(home, plain)
        elif plain.data_ptr() % ALIGN_NBYTES:
            plain = plain.clone()  # kernels read whole words
        return coding.encode(plain, spec.dtype, spec.bits)

    def plain_into(self, home: Home, target: torch.Tensor) -> None:
        """Copy the plain bytes of a group; what nobody has read yet is not decoded on the host for it."""
        if isinstance(home.mapping, DecodedMemory) and not home.mapping.is_decoded:
            home.mapping.check()
            self._decode(home.mapping.source(), home.mapping.layout, target)
        else:
            home.check()
            target.copy_(home.group.home)

    def _decode(self, coded: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
        """Decode on the device, wherever the bytes are."""
        with torch.inference_mode(False), torch.no_grad():
            if self._backend.device.type == "cpu":
                coding.decode(coded, layout, out)
                return
            found = torch.empty(-(-layout.raw_nbytes // 4) * 4, dtype=torch.uint8, device=self._backend.device)
            coding.decode(coded.to(self._backend.device), layout, found)
            if out.device.type == "cpu":
                out.zero_()  # as above
            out.copy_(found[: layout.raw_nbytes])

    def _read_directly(self, home: Home, written: bool) -> None:
        if home.in_file is None:
            raise StoreError(f"{home.group.alias} was updated, and its file holds it coded: raise host_budget")
        if not written:
            home.file = DirectFile(home.in_file[0])

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
        replaced = self._replaced(home)
        self.plain_into(home, target)
        home.group.home = target
        self._point(home)
        for tensor, data in replaced:
            tensor.data = data.to(target.device)
        home.mapping, home.tier, home.moved = None, tier, True
        home.layout = home.coded = None

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


def words(home: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Up to 64 rows of up to 8 bytes, evenly spread over memory of the host."""
    flat: npt.NDArray[np.uint8] = home.numpy()
    stride = max(8, flat.size // _SAMPLES)
    rows = max(1, flat.size // stride)
    return np.lib.stride_tricks.as_strided(flat, (rows, min(8, flat.size)), (stride, 1), writeable=False)


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
