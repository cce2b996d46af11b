"""The home of one alias group: where its true bytes are. Knows no device and no plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weightstream.codec.format import Layout
from weightstream.errors import OffloadError, StoreError
from weightstream.runtime.weights.alias_groups import Group
from weightstream.runtime.weights.sources import OnDisk, Pageable, Tier, WeightSource


@dataclass(kw_only=True, slots=True, eq=False)
class Home:
    """The true bytes of one alias group: where they are, and where they came from."""

    group: Group
    origin: torch.device  # the device before the model was offloaded
    source: WeightSource  # where the bytes are
    file: OnDisk | None = None  # a file that holds the same bytes; None once they are written to
    version: int = 0  # of the tensors when `source` was shown; they were updated since if theirs is another

    @property
    def tier(self) -> Tier:
        return self.source.tier

    @property
    def layout(self) -> Layout | None:
        """The layout of the compressed form; None where the bytes are uncompressed."""
        return self.source.layout

    @property
    def is_coded(self) -> bool:
        return self.layout is not None

    @property
    def coded(self) -> torch.Tensor | None:
        """The compressed form, if it is in memory."""
        return self.source.coded

    @property
    def is_undecoded(self) -> bool:
        """Whether the tensors view memory that is filled by the first read, and no read has come yet."""
        return self.source.is_unread

    def check(self) -> None:
        """Make sure that the bytes can be read; raises `StoreError`."""
        self.source.check()

    def show(self, source: WeightSource) -> None:
        """Have every tensor of the group view this source; tensors with assigned data keep it."""
        before, self.source = self.group.home, source
        if source.view is before:
            return
        shown = [(m, m.tensor.data, m.view(before, 0)) for m in self.group.members]
        self.group.home, self.version = source.view, self.versions()
        for member, data, view in shown:
            is_own = data.data_ptr() != view.data_ptr()
            member.show(data.to(source.view.device) if is_own else member.view(source.view, 0))

    def versions(self) -> int:
        """Grows with every update in place that torch sees."""
        return sum(member.version for member in self.group.members)

    @property
    def has_file(self) -> bool:
        """Whether a file may still hold the bytes: no tensor was updated in place since they left it."""
        return self.file is not None and self.version == self.versions()

    def leave_pages(self) -> None:
        """Unmap the pages of the file that were read: the bytes are held elsewhere."""
        for extent in () if self.file is None else self.file.extents:
            extent.mapping.leave(extent.begin, extent.end)

    def after_write(self) -> None:
        """Use the view as the source, as the tensors were written to: no file holds their bytes any more.

        Raises `OffloadError` if they were written to before their memory was filled: to fill it would lose the write.
        """
        if self.source.was_read_early:
            raise OffloadError(
                f"{self.group.alias} was read or written to before it was decoded, while the classes of tensors saw "
                "no calls (torch._C.DisableTorchFunctionSubclass): its bytes were zeros. Call remove(), and change "
                "it then"
            )
        if self.is_undecoded:
            self.check()
        self.source, self.file = self.source.after_write(), None

    def fits(self, coded: bool) -> OnDisk | None:
        """The file, if it holds the bytes in this form."""
        return self.file if self.file is not None and (self.file.layout is not None) == coded else None

    @property
    def readable(self) -> OnDisk | None:
        """The file, if it holds the uncompressed bytes as they are now, in whole rows."""
        file = self.fits(coded=False) if self.source.is_in_file else None
        return file if file is not None and not any(extent.pitch for extent in file.extents) else None

    def forget_other_file(self) -> None:
        """Forget the file if its bytes, compared one by one, are different, or if they cannot be read."""
        if self.file is not None and not self.holds_same(self.file):
            self.file = None

    def forget(self) -> None:
        """Drop all references to memory: a streamer that is kept must not keep the weights, which are the model's."""
        self.source, self.file = Pageable(view=torch.empty(0, dtype=torch.uint8, device="cpu")), None
        self.group.home = self.source.view

    def holds_same(self, source: WeightSource) -> bool:
        """Whether the home has the uncompressed bytes of a source; False if the source cannot be read."""
        if source.view is self.source.plain or self.is_undecoded:  # no read has come yet, so no write
            return True
        return self.holds_same_as(source.plain_into)

    def holds_same_as(self, write: Callable[[torch.Tensor], None]) -> bool:
        """Whether the home has the bytes that `write` writes; False if `write` raises `StoreError`."""
        plain = torch.empty(self.group.nbytes, dtype=torch.uint8, device="cpu")
        try:
            write(plain)
        except StoreError:
            return False
        return torch.equal(plain, self.source.plain.cpu())
