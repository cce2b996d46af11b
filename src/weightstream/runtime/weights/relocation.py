"""Moves of single homes: to memory of the device, pinned memory, a compressed form, the offload folder. Knows no plan.

A `Home` says where the bytes of one alias group are; `Moves` makes the source that they go to, copies them there and
has the tensors view it. A home has a complete source before and after every move, and so also after an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from weightstream.codec import coding
from weightstream.codec.format import Layout
from weightstream.errors import StoreError
from weightstream.plan.manifest import TensorSpec
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import ALIGN_NBYTES, aligned
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.devices.host_stream import STAGING_NBYTES
from weightstream.runtime.weights.home import Home
from weightstream.runtime.weights.sources import (
    Mapped,
    MemoryPlace,
    Pageable,
    PageWindow,
    Pinned,
    Resident,
    Tier,
    WeightSource,
    ZeroCopy,
    in_file,
)
from weightstream.store.arena import Arena
from weightstream.store.folder import OffloadFolder
from weightstream.store.lazy import DecodedMemory

logger = logging.getLogger("weightstream")

CPU_ALIGNMENT = 64  # what PyTorch gives tensors on the CPU
_STAGED = "Copies go through a small staging ring instead: the CPU copies each byte once more."


class CodeOverflow(Exception):
    """Compressed forms that are larger than was planned for: alias group -> bytes.

    All homes are where the plan has them, but some take more bytes. So the caller has to settle a plan with these
    sizes, or the previous plan.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(f"compressed weights take more than planned: {sizes}")
        self.sizes = sizes


class Goal:
    """A plan for which homes are to be moved. `coded`: one tensor of each group that is compressed in the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.coded = {tensor.alias: tensor for tensor in plan.manifest.tensors() if tensor.is_coded}

    def is_settled_by(self, other: Plan) -> bool:
        """Whether another plan has all weights in the same places and forms."""
        places = ("resident", "mapped", "cached", "disk")
        is_same = all(getattr(self.plan, name) == getattr(other, name) for name in places)
        return is_same and self.plan.manifest.units == other.manifest.units


class BlockPart(NamedTuple):
    """The place of a group in a block of memory, in bytes; `spec` is a tensor of it where it is to be compressed."""

    home: Home
    spec: TensorSpec | None
    begin: int
    nbytes: int


class Moves:
    """Moves homes on one backend."""

    def __init__(self, backend: Backend, arena: Arena | None, folder: OffloadFolder | None) -> None:
        self._backend = backend
        self._arena = arena
        self._folder = folder
        self._alignment = CPU_ALIGNMENT if backend.device.type == "cpu" else ALIGN_NBYTES
        self._has_warned = False
        self.too_large: dict[str, int] = {}  # alias group -> bytes, if more than planned
        self.pins = arena is not None  # False once the system refuses to pin

    def move(self, home: Home, source: WeightSource) -> None:
        """Copy the uncompressed bytes to the view of the source, and have the tensors show it."""
        home.source.plain_into(source.view)
        home.show(source)
        home.leave_pages()

    def to_device(self, homes: Sequence[Home]) -> None:
        """Hold groups uncompressed on the device; if that is the CPU, in place.

        Groups in files are read by several threads: mapping their pages takes several times as long. Not if
        these groups have few bytes.
        """
        files = {home: file for home in homes if (file := home.readable) is not None}
        if sum(home.group.nbytes for home in files) < STAGING_NBYTES:
            files.clear()
        read: dict[Home, Resident] = {}
        for home in homes:
            is_plain = isinstance(home.source, Pageable) and home.layout is None
            if is_plain and home.source.view.device == self._backend.device:
                home.source = Resident(view=home.source.view)
                continue
            made = Resident(view=self._backend.alloc(home.group.nbytes))
            if home in files:
                read[home] = made
            else:
                self.move(home, made)
        if read:
            self._backend.bring([files[home].cached_copy(made.view) for home, made in read.items()])
        for home, made in read.items():
            was_read = not home.is_undecoded
            home.show(made)
            if was_read:  # not for a stack that was never read: it has hundreds of parts, and each takes a system call
                home.leave_pages()

    def is_resident(self, home: Home, coded: bool) -> bool:
        """Whether a group is on the device that the model computes on, in this form."""
        is_here = home.layout is not None or home.source.view.device == self._backend.device
        return home.tier is Tier.DEVICE and home.is_coded == coded and is_here

    def to_host(self, home: Home, memory: torch.Tensor | None = None) -> None:
        """Hold a group uncompressed in RAM: in `memory`, if passed; else where its view is, if that is in RAM."""
        if memory is None and home.source.view.device.type == "cpu":
            home.check()
            home.source = home.source.of_view()
        else:
            self.move(home, Pageable(view=_host_memory(home.group.nbytes) if memory is None else memory))

    def to_block(self, parts: Sequence[BlockPart]) -> None:
        """Hold groups in one block of pinned memory, so that one copy moves them all."""
        if self._arena is None:
            raise StoreError("no memory is pinned here")
        block = self._arena.take(max(part.begin + part.nbytes for part in parts))
        if any(part.spec is not None for part in parts):
            block.zero_()  # all cores touch its pages; a copy from the device would touch them one by one
        for home, spec, begin, nbytes in parts:
            if spec is None:
                self.to_host(home, block[begin : begin + nbytes])
            else:
                self.to_code(home, spec, Pageable, block[begin : begin + nbytes])
        try:
            self._arena.pin(block)
        except StoreError as error:
            self.tell(error)
            self.pins = False
            return
        for part in parts:
            home, source = part.home, part.home.source
            if isinstance(source, Pageable) and source.data.untyped_storage().data_ptr() == block.data_ptr():
                home.source = source.pinned()

    # -- coded forms -------------------------------------------------------------------------------------------------

    def to_code(
        self, home: Home, spec: TensorSpec, kind: type[Resident | Pageable], memory: torch.Tensor | None = None
    ) -> None:
        """Hold a group compressed, in `memory` if that has room."""
        layout, coded = self._coded(home, spec)
        if layout.nbytes > spec.nbytes:
            self.too_large[spec.alias], memory = layout.nbytes, None
        if memory is None:
            alloc = self._backend.alloc if kind is Resident else _host_memory
            memory = alloc(max(layout.nbytes, spec.nbytes))
        memory[: layout.nbytes].copy_(coded)
        memory[layout.nbytes :].zero_()
        source, view, place = partial(torch.narrow, memory, 0, 0, layout.nbytes), home.source.view, home.source.place
        lazy = home.source.lazy
        if place is None or (lazy is not None and lazy.is_filled and home.layout != layout):
            made = DecodedMemory(spec.name, Path(spec.name), layout, source, decode=self.decode)
            view, place = made.bytes(0, made.nbytes), MemoryPlace(made, 0, made.nbytes)
        elif isinstance(lazy, DecodedMemory) and not lazy.extents:
            lazy.hold(source, layout)
        home.show(kind(view=view, place=place, layout=layout, coded=memory))
        home.leave_pages()

    def memory_of_coded(self, coded: Sequence[tuple[Home, TensorSpec]]) -> list[torch.Tensor | None]:
        """Device memory for the compressed form of each of these, from one allocation, as each would be rounded up.

        None for all if uncompressed weights are on the device: these are then compressed one by one, to make room.
        """
        if any(home.origin == self._backend.device for home, _ in coded) or not coded:
            return [None] * len(coded)
        starts = list(accumulate((aligned(spec.nbytes) for _, spec in coded), initial=0))
        block = self._backend.alloc(starts[-1])
        return [block[start : start + spec.nbytes] for start, (_, spec) in zip(starts, coded, strict=False)]

    def _coded(self, home: Home, spec: TensorSpec) -> tuple[Layout, torch.Tensor]:
        """The compressed form of a group: the present one, or one that is made on the device."""
        lazy = home.source.lazy
        if home.layout is not None:
            if home.coded is not None:
                return home.layout, home.coded[: home.layout.nbytes]
            if isinstance(lazy, DecodedMemory):
                lazy.check()
                return home.layout, lazy.source()
        plain = home.source.view
        if home.source.place is not None or plain.device != self._backend.device:
            plain = self._plain(home)
        elif plain.data_ptr() % ALIGN_NBYTES:
            plain = plain.clone()  # kernels read whole words
        return coding.encode(plain, spec.dtype)

    def _plain(self, home: Home) -> torch.Tensor:
        """The uncompressed bytes, in memory of the device that is free once the caller drops it."""
        plain = self._backend.alloc(home.group.nbytes)
        if home.group.nbytes >= STAGING_NBYTES and (file := home.readable) is not None:
            self._backend.bring([file.cached_copy(plain)])
        else:
            home.source.plain_into(plain)
        return plain

    def decode(self, coded: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
        """Decode on the device, wherever the bytes are."""
        with torch.inference_mode(False), torch.no_grad():
            if self._backend.device.type == "cpu":
                coding.decode(coded, layout, out)
                return
            plain = torch.empty(-(-layout.raw_nbytes // 4) * 4, dtype=torch.uint8, device=self._backend.device)
            coding.decode(coded.to(self._backend.device), layout, plain)
            if out.device.type == "cpu":
                out.zero_()  # as in `to_block`
            out.copy_(plain[: layout.raw_nbytes])

    # -- files and zero-copy -----------------------------------------------------------------------------------------

    def to_folder(self, home: Home) -> None:
        """Write a group's uncompressed bytes to a file of the offload folder, which is its file from now on."""
        if self._folder is None:
            raise StoreError(f"{home.group.alias} cannot be on disk without an offload_folder")
        plain = home.source.view
        if home.source.place is not None:
            home.source.plain_into(plain := _host_memory(home.group.nbytes))
        view = self._folder.write(home.group.alias, plain)
        if (file := in_file(view, self._folder.mappings[-1])) is not None:
            home.show(file)
        home.file = file

    def reads_in_place(self, source: WeightSource) -> bool:
        """Whether kernels give the same bits from a file's pages, which depends on alignment."""
        return source.place is not None and source.lazy is None and source.place.begin % self._alignment == 0

    def map_on_host(self, home: Home) -> None:
        """Have kernels read a group where it is, as the device is the host."""
        source = home.source
        if source.place is not None and source.lazy is None and not self.reads_in_place(source):
            self.to_host(home, _host_memory(home.group.nbytes))
        elif isinstance(source, Mapped) and source.lazy is None:
            home.source = source.mapped()
        else:
            self.to_host(home)

    def map_to_device(self, homes: Sequence[Home]) -> None:
        """Have kernels read groups from host memory: from pages of their files, or pinned memory of exact size."""
        for home in homes:
            source = home.source
            if isinstance(source, PageWindow) and source.lazy is None and (memory := source.window()) is not None:
                self._show_mapped(home, source, memory)
        homes = [home for home in homes if not isinstance(home.source, ZeroCopy)]
        if homes and self._arena is not None:
            starts = list(accumulate((aligned(home.group.nbytes) for home in homes), initial=0))
            block = self._arena.take(starts[-1])
            for start, home in zip(starts, homes, strict=False):
                self.to_host(home, block[start : start + home.group.nbytes])
            self._arena.pin(block)
            for home in homes:
                self._show_mapped(home, Pinned(view=home.source.view), home.source.view)

    def make_writable(self, home: Home) -> None:
        """Give a group that kernels read from pages of its file memory of its own."""
        if self._arena is None:
            raise StoreError("no memory is pinned here")
        part = self._arena.take(home.group.nbytes)[: home.group.nbytes].copy_(home.source.plain)
        self._arena.pin(part)
        self._show_mapped(home, Pinned(view=part), part)
        home.file = None

    def _show_mapped(self, home: Home, host: PageWindow | Pinned, memory: torch.Tensor) -> None:
        view = self._backend.device_view(memory)
        if view is None:
            raise StoreError("the device cannot read the host memory that was pinned for it: set use_uva=False")
        home.show(ZeroCopy(view=view, host=host))

    def tell(self, error: Exception) -> None:
        """Warn, only once, that pinning was refused, or that pages could not be brought into memory."""
        if not self._has_warned:
            logger.warning("%s %s", str(error), _STAGED)  # only the text: a log record must not hold the error's frames
        self._has_warned = True


def _host_memory(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
