"""The homes of all alias groups: `settle` moves weights to where a plan wants them, `restore` moves all back.

Residents go to the device. Weights that stream stay where they are, or move to pinned memory if the device can copy
only from that, or to the offload folder if RAM is short. Weights that left their file and were not written to can go
back to it: then copies start at the file's pages again, and the memory is freed. sources.py holds the kinds of places,
and how bytes are copied from each. Knows no schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from traceback import clear_frames

import torch

from weightstream.codec.format import Layout
from weightstream.errors import StoreError
from weightstream.plan.plan import Plan
from weightstream.plan.units import some
from weightstream.runtime.devices.backend import Backend, Copy
from weightstream.runtime.tensors.guarded import Access
from weightstream.runtime.tensors.thread_state import unrecorded
from weightstream.runtime.weights.alias_groups import Group, Member
from weightstream.runtime.weights.home import Home
from weightstream.runtime.weights.relocation import CPU_ALIGNMENT, BlockPart, CodeOverflow, Goal, Moves
from weightstream.runtime.weights.sources import (
    Mapped,
    Pageable,
    PageWindow,
    Pinned,
    Resident,
    Tier,
    WeightSource,
    ZeroCopy,
    in_file,
    written,
)
from weightstream.store.arena import Arena
from weightstream.store.folder import OffloadFolder
from weightstream.store.lazy import DecodedMemory
from weightstream.store.mapping import FileMapping, Memory
from weightstream.store.pages import PageCache


class Homes:
    """All homes of a model on one backend. `plan` is the plan that the homes were last moved for."""

    def __init__(
        self,
        groups: dict[str, Group],
        backend: Backend,
        *,
        empty: Sequence[torch.Tensor] = (),
        mappings: Sequence[Memory] = (),
        arena: Arena | None = None,
        pages: PageCache | None = None,
        spill: OffloadFolder | None = None,
        by_row: frozenset[str] = frozenset(),
    ) -> None:
        self.plan: Plan | None = None
        self.by_row = by_row  # alias groups of which a step reads a few rows
        self.can_map = True  # until pinning is refused
        self.sources_changed = False  # since the last capture: captured graphs copy from old sources
        self._backend = backend
        self._arena = arena
        self._pages = pages
        self._can_spill = spill is not None
        self._moves = Moves(backend, arena, spill)
        self._empty = [(tensor, tensor.device) for tensor in empty]
        self._memories = tuple(mappings)
        for memory in (m for m in mappings if isinstance(m, DecodedMemory)):
            memory.decode = self._moves.decode
        self.homes = {alias: self._home_of(group) for alias, group in groups.items()}

    def _home_of(self, group: Group) -> Home:
        """The home of a group where it is now."""
        view, device = group.home, group.home.device
        if device.type != "cpu":
            return Home(group=group, origin=device, source=Resident(view=view))
        if (memory := next((m for m in self._memories if m.locate(view.data_ptr()) is not None), None)) is None:
            return Home(group=group, origin=device, source=Pageable(view=view))
        if (file := in_file(view, memory)) is None:
            memory.populate(0, memory.nbytes)  # a group that is only a part of a compressed tensor is used decoded
        return Home(group=group, origin=device, source=file or Pageable(view=view), file=file)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of groups whose file holds them compressed."""
        files = ((alias, home.file) for alias, home in self.homes.items())
        return {alias: file.layout for alias, file in files if file is not None and file.layout is not None}

    @property
    def in_parts(self) -> dict[str, list[torch.Tensor]]:
        """The pieces of groups that are uncompressed in several ranges of files, and that no read has gathered yet."""
        sources = {a: h.source for a, h in self.homes.items() if h.is_undecoded and h.layout is None}
        files = ((alias, source.extents) for alias, source in sources.items() if isinstance(source, Mapped))
        return {a: [extent.bytes() for extent in extents] for a, extents in files}

    @property
    def movable(self) -> frozenset[str]:
        """Alias groups that can be on disk now: those in files, and with an offload folder all."""
        homes = self.homes.items()
        return frozenset(a for a, h in homes if self._can_spill or h.source.is_in_file or h.has_file)

    @property
    def files(self) -> tuple[FileMapping, ...]:
        """The files that weights are in."""
        return tuple(memory for memory in self._memories if isinstance(memory, FileMapping))

    # -- between plans ---------------------------------------------------------------------------------------------

    def settle(self, plan: Plan) -> None:
        """Move each group that this plan has in another place or form. No copy may be under way.

        On an error all groups move back to where the previous plan had them; if that fails, too, to where they came
        from. Raises `StoreError`, before any move, if weights that are to be on disk cannot be. Raises `CodeOverflow`,
        once all groups are in place, if compressed forms are larger than planned.
        """
        goal, self._moves.too_large = Goal(plan), {}
        self._see_writes()
        if self.plan is not None and goal.is_settled_by(self.plan):  # only the order differs
            self.plan = plan
            return
        self._check_files(goal)
        try:
            self._place(goal)
        except BaseException as error:
            # frames of the error hold device memory, which has no room for these weights twice
            clear_frames(error.__traceback__)
            self._put_back()
            raise
        self.plan = plan
        if self._moves.too_large:
            raise CodeOverflow(self._moves.too_large)

    def _put_back(self) -> None:
        if self.plan is not None:
            with suppress(Exception):  # the caller raises the first error
                self._place(Goal(self.plan))
                return
        self.restore(decode=False)

    def restore(self, *, decode: bool = True) -> None:
        """Bring every group back to where it came from: its file, if that holds its bytes, or memory of its own.

        Without `decode`, compressed groups of a file that no read has decoded yet stay undecoded, for another plan.
        Raises `StoreError` where a file with weights cannot be read any more, once all others are back.
        """
        self.unguard()
        self.plan, errors = None, []
        for home in self.homes.values():
            if isinstance(home.source, ZeroCopy):
                home.show(home.source.host)
        if self._pages is not None:
            self._pages.close()
        if self._arena is not None:
            self._arena.close()  # before the moves: each block is then freed as soon as its last group has left it
        for tensor, origin in self._empty:
            tensor.data = tensor.data.to(origin)
        for home in self.homes.values():
            try:
                self._bring_home(home, decode)
            except StoreError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _bring_home(self, home: Home, decode: bool) -> None:
        """Bring a group back to the model's file if that still holds its bytes; else to memory on its first device.

        Memory from the arena or the offload folder is left in any case, as it goes with the streamer.
        """
        if home.file is not None and self._is_in_model_file(home.file) and home.holds_same(home.file):
            home.show(home.file)
            if not home.source.lazy or (home.is_undecoded and not decode):
                return
        elif self._is_in_model_file(home.source):
            return
        kind = Pageable if home.origin.type == "cpu" else Resident
        is_in_arena = isinstance(home.source, Pinned) and home.layout is None
        if home.source.view.device == home.origin and not is_in_arena and (home.source.lazy or not home.source.place):
            home.check()
            home.source = kind(view=home.source.view)
        else:
            self._moves.move(home, kind(view=torch.empty(home.group.nbytes, dtype=torch.uint8, device=home.origin)))
        if home.file is not None and not self._is_in_model_file(home.file):
            home.file = None  # it is in the offload folder

    def _is_in_model_file(self, source: WeightSource) -> bool:
        """Whether the source is in a file that the weights came from, not in the offload folder, which is deleted."""
        return source.place is not None and source.is_in_file and source.place.memory in self._memories

    def _see_writes(self) -> None:
        """Find groups that were written to in any way: no file holds their bytes any more."""
        files = {alias: home.file.place for alias, home in self.homes.items() if home.file is not None}
        written_files = written(files)
        for alias, home in self.homes.items():
            lazy = home.source.lazy
            # the kernel reports no writes to memory that a first read has filled: compare its bytes
            has_other_bytes = lazy is not None and lazy.is_filled and not home.holds_same_as(lazy.write)
            if has_other_bytes or (alias in written_files and home.source.place == files[alias]):
                home.after_write()
            elif alias in written_files:
                home.file = None

    def _check_files(self, goal: Goal) -> None:
        """Before weights go back to their files: forget files that hold other bytes.

        Raises `StoreError` if weights that are to be on disk cannot be there.
        """
        unplaceable = []
        for alias, home in self.homes.items():
            on_disk, coded = alias in goal.plan.disk, alias in goal.coded
            if (on_disk or (alias not in goal.plan.resident and self._keeps_files())) and home.fits(coded) is not None:
                home.forget_other_file()
            spills = self._can_spill or (home.source.is_in_file and home.layout is None)
            if on_disk and home.fits(coded) is None and (coded or not spills):
                unplaceable.append(alias)
        if unplaceable:
            raise StoreError(
                f"{len(unplaceable)} weights cannot be on disk, such as {some(unplaceable)}: no file holds "
                "them as they are now, as they were updated or never were in one. Raise host_budget, or name an "
                "offload_folder"
            )

    def _place(self, goal: Goal) -> None:
        plan, units = goal.plan, range(len(goal.plan.manifest.units))
        self.unguard()
        self.sources_changed = True
        for alias in plan.manifest.aliases:
            self._return_to_file(goal, alias)
        for unit in units:  # first units with weights that leave the device, which makes room there
            if any(self.homes[alias].tier is Tier.DEVICE for alias in plan.hosted(unit)):
                self._settle_unit(goal, unit)
        self._settle_residents(goal)
        for tensor, _ in self._empty:
            tensor.data = tensor.data.to(self._backend.device)
        self._keep_blocks()
        self._hold_pages(plan)
        self._map([self.homes[alias] for alias in plan.manifest.aliases if alias in plan.mapped])
        for unit in units:
            self._settle_unit(goal, unit)
        self._keep_blocks()

    def _return_to_file(self, goal: Goal, alias: str) -> None:
        """Have a weight copied from its file again if the plan does not keep it on the device, and its file fits."""
        home, plan = self.homes[alias], goal.plan
        if isinstance(home.source, ZeroCopy) and (home.source.is_read_only or alias not in plan.mapped):
            home.show(home.source.host)
        if alias in plan.resident or (file := home.fits(alias in goal.coded)) is None:
            return
        if alias in plan.mapped - self.by_row and not self._moves.reads_in_place(file):
            return
        if file.layout is not None and file.layout.nbytes > plan.manifest.aliases[alias]:
            self._moves.too_large[alias] = file.layout.nbytes
        if alias in plan.disk:
            home.show(file)
        elif self._keeps_files() and not isinstance(home.source, PageWindow):
            home.show(file.mapped())

    def _keeps_files(self) -> bool:
        """Whether weights that stream from host memory and have a file are copied from the file's pages."""
        return self._pages is not None or not self._moves.pins

    def _keep_blocks(self) -> None:
        """Free pinned memory that holds no weight any more."""
        if self._arena is not None:
            self._arena.keep(part for home in self.homes.values() for part in home.source.parts)

    # -- where a plan wants weights ----------------------------------------------------------------------------------

    def _settle_residents(self, goal: Goal) -> None:
        homes = ((alias, home) for alias, home in self.homes.items() if alias in goal.plan.resident)
        moving = {alias: home for alias, home in homes if not self._moves.is_resident(home, alias in goal.coded)}
        coded = [(home, goal.coded[alias]) for alias, home in moving.items() if alias in goal.coded]
        for (home, spec), memory in zip(coded, self._moves.memory_of_coded(coded), strict=True):
            self._moves.to_code(home, spec, Resident, memory)
        self._moves.to_device([home for alias, home in moving.items() if alias not in goal.coded])

    def _settle_unit(self, goal: Goal, unit: int) -> None:
        """Move a unit's groups to where the device can copy from, into one block, so that one copy fills them all."""
        waiting = []
        for alias, offset in goal.plan.hosted(unit).items():
            home, spec = self.homes[alias], goal.coded.get(alias)
            if alias in goal.plan.disk:
                if not home.source.is_in_file or home.is_coded != (spec is not None):
                    self._moves.to_folder(home)
            elif home.is_coded != (spec is not None) or not self._streams(home):
                waiting.append(BlockPart(home, spec, offset, goal.plan.manifest.aliases[alias]))
        if waiting and self._moves.pins:
            self._moves.to_block(waiting)
            return
        for home, spec, _, _ in waiting:
            if spec is None:
                self._moves.to_host(home)
            else:
                self._moves.to_code(home, spec, Pageable)

    def _streams(self, home: Home) -> bool:
        """Whether a group is where the device can copy from."""
        is_paged = self._pages is not None and home.file is not None
        return home.tier is Tier.HOST and (isinstance(home.source, Pinned) or is_paged or not self._moves.pins)

    def _hold_pages(self, plan: Plan) -> None:
        """Pin the pages of weights that stay in files, in the order of need, and copy the weights from these pages."""
        if self._pages is None:
            return
        streamed = dict.fromkeys(alias for unit in plan.manifest.order for alias in plan.hosted(unit))
        in_order = dict.fromkeys([*plan.mapped, *streamed, *plan.manifest.aliases])
        kept: dict[str, Mapped] = {}
        for alias in in_order:
            source = self.homes[alias].source
            in_place = self._moves.reads_in_place(source) or alias not in plan.mapped - self.by_row
            if isinstance(source, Mapped) and source.tier is Tier.HOST and self.homes[alias].file and in_place:
                kept[alias] = source
        held = iter(self._pages.hold([extent.range for s in kept.values() for extent in s.extents], self._moves.tell))
        for alias, source in kept.items():
            self.homes[alias].source = source.windowed([next(held) for _ in source.extents])

    def _map(self, homes: list[Home]) -> None:
        """Have kernels read these from pinned host memory of exact size; on the CPU, from where they are."""
        if self._backend.device.type == "cpu":
            for home in homes:
                self._moves.map_on_host(home)
            return
        try:
            self._moves.map_to_device(homes)
        except StoreError as error:
            self.can_map = False
            self._moves.tell(error)
            raise

    # -- while a plan is in force --------------------------------------------------------------------------------------

    def copies(self, plan: Plan, unit: int, ring: torch.Tensor) -> list[Copy]:
        """The copies of a fill of the unit, as few as possible. Waits for pages that are being pinned."""
        found: list[Copy] = []
        for alias, offset in plan.streamed(unit).items():
            home, start = self.homes[alias], plan.extents[unit].offset + offset
            if home.layout is None and alias in plan.manifest.codes:
                continue  # it was updated: its uncompressed bytes do not fit into its part of the ring
            for copy in home.source.copies(ring[start : start + plan.manifest.aliases[alias]], self._backend):
                if found and (joined := found[-1].joined(copy)):
                    found[-1] = joined
                else:
                    found.append(copy)
        return found

    def in_files(self, aliases: Iterable[str]) -> set[str]:
        """The subset of these groups whose copies read a file or a compressed form."""
        return {alias for alias in aliases if self.homes[alias].source.reads_file}

    def leave_files(self, aliases: Iterable[str]) -> None:
        """Copy these groups from memory from now on, as they were updated. Call `UnitCopies.forget` for them before."""
        for alias in aliases:
            self.homes[alias].after_write()

    def written(self) -> set[str]:
        """Groups copied from files whose pages this process wrote to in any way, as the kernel reports."""
        places = {alias: home.source.place for alias, home in self.homes.items() if home.source.place is not None}
        return written({alias: place for alias, place in places.items() if self.homes[alias].source.reads_file})

    def read(self, alias: str, member: Member) -> torch.Tensor:
        """The tensor with its true bytes, on the device; if that is the CPU, mostly a view of the home itself."""
        self.homes[alias].check()
        data = self.homes[alias].group.home.to(self._backend.device)
        # kernels of PyTorch depend on alignment, and so do the last bits
        return member.view(data.clone() if data.data_ptr() % CPU_ALIGNMENT else data, 0)

    def held_nbytes(self) -> dict[str, int]:
        """Bytes of weights whose home is on each tier."""
        held = sum((home.source.held() for home in self.homes.values()), Counter[Tier]())
        return {tier.value: held[tier] for tier in Tier}

    def guard(self) -> None:
        """Guard weights that kernels read from read-only pages of a file: before a write they get their own memory."""
        for home, member in self._read_only():
            member.guard(partial(self._make_writable, home))

    def unguard(self) -> None:
        for _, member in self._read_only():
            member.unguard()

    def _read_only(self) -> Iterator[tuple[Home, Member]]:
        for alias in () if self.plan is None else self.plan.mapped:
            home = self.homes[alias]
            if isinstance(home.source, ZeroCopy) and home.source.is_read_only:
                yield from ((home, member) for member in home.group.members)

    def _make_writable(self, home: Home, access: Access) -> None:
        if access is Access.READ:
            return
        with torch.inference_mode(False), torch.no_grad():
            for member in home.group.members:
                member.unguard()
            self._moves.make_writable(home)
            self.sources_changed = True


class UnitCopies(dict[int, list[Copy]]):
    """The copies of every unit of a plan, made at the first fill of the unit."""

    def __init__(self, homes: Homes, plan: Plan, ring: torch.Tensor) -> None:
        self._homes = homes
        self._plan = plan
        self._ring = ring

    def __missing__(self, unit: int) -> list[Copy]:
        self[unit] = copies = unrecorded(partial(self._homes.copies, self._plan, unit, self._ring))
        return copies

    def forget(self, aliases: set[str]) -> list[int]:
        """Forget the copies of units with any of these groups, whose sources changed; returns these units."""
        units = [u for u in range(len(self._plan.manifest.units)) if aliases & self._plan.streamed(u).keys()]
        for unit in units:
            self.pop(unit, None)
        return units
