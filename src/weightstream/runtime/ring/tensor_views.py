"""The two views of a streamed tensor: its home outside of its unit's forward, its bytes in the ring inside.

Switching between them sets one pointer. Code that reads, saves or updates a weight between steps sees the true bytes.
Two kinds of change must not be missed: an update of the home after the ring was filled ahead (the step would compute
with stale bytes), and an update of the ring inside a forward (the next fill would overwrite it).

- In-place operations raise the tensor's version counter.
- Assigned data (`w.data = new`) shows by its address.
- Writes to memory that was handed out (`.data`, numpy) raise no version. So between steps a tensor is guarded: the
  guard notices that its memory is handed out, and from then on the tensor counts as updated before every step (`lent`).
- A view (`w.detach()`) may be handed to numpy in turn, which no guard sees. So a tensor of which a view was made counts
  as updated once, before the next step (`touched`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.errors import OffloadError
from weightstream.runtime.devices.backend import StepEnd, owners
from weightstream.runtime.experts.rows import Rows
from weightstream.runtime.ring.opening import Opening
from weightstream.runtime.tensors.guarded import Access
from weightstream.runtime.tensors.leaves import Role, Shell
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.weights.alias_groups import Member, span
from weightstream.runtime.weights.home import Home

_DATA: Any = torch.Tensor.data  # the descriptor itself: its `__set__` raises no version


@dataclass(eq=False, kw_only=True, slots=True)
class StreamedTensor:
    """One tensor object of a unit: both views, where they are, and its version when they last agreed.

    Checks that run for every tensor at every step compare plain fields: a call would take longer than all of them.
    """

    member: Member
    source: Home
    unit: int
    home: torch.Tensor  # the view of the true bytes
    ring: torch.Tensor  # the view of the ring, or of the buffer
    on_access: Callable[[Access], None]  # called by the guard, before the memory is used
    tensor: torch.Tensor = field(init=False)
    home_at: int = field(init=False)  # its address
    ring_at: tuple[int, tuple[int, ...]] = field(init=False)  # its address and strides
    version: int = field(init=False)
    relaid: bool = False  # it took over assigned data of another layout, which no captured graph has
    is_lazy: bool = field(init=False)  # the home is in memory that is filled by its first read

    @classmethod
    def of(cls, member: Member, source: Home, unit: int, ring: torch.Tensor, step_end: StepEnd) -> StreamedTensor:
        """The streamed tensor of a member that shows `ring` in this unit."""
        home = member.view(source.group.home, 0)
        on_access = partial(_before, member, source, step_end)  # holds no views, whose owners are counted
        return cls(member=member, source=source, unit=unit, home=home, ring=ring, on_access=on_access)

    def __post_init__(self) -> None:
        self.tensor = self.member.tensor
        self.version = self.member.version
        self.is_lazy = self.source.source.lazy is not None
        self._locate()

    def _locate(self) -> None:
        self.home_at = self.home.data_ptr()
        self.ring_at = self.ring.data_ptr(), self.ring.stride()

    @property
    def alias(self) -> str:
        """The alias group of the tensor."""
        return self.member.spec.alias

    def guard_unread(self) -> None:
        """Guard the tensor inside a step if its home is not filled yet, so that a read fills it first.

        All other tensors are plain in a step: torch runs other kernels, with other bits, for guarded classes.
        """
        if self.source.is_undecoded:
            self.member.guard(self.on_access)

    @property
    def requires_grad(self) -> bool:
        """As `Member.requires_grad`."""
        return self.member.requires_grad

    def changed(self) -> bool:
        """Whether the tensor was updated in place through itself or a view of it since the versions agreed."""
        return self.member.version != self.version

    def in_ring(self) -> bool:
        """Whether it shows its bytes of the ring, and no assigned data."""
        return (self.tensor.data_ptr(), self.tensor.stride()) == self.ring_at

    def is_past_file(self) -> bool:
        """Whether the home may hold other bytes than its file or compressed form. Only for tensors from `noticed`."""
        if self.source.layout is not None:
            return self.member.lent
        return self.is_lazy and not self.source.is_undecoded  # filled memory is no page of a file: no write is reported

    def agree(self) -> None:
        self.version = self.member.version

    def is_assigned(self) -> bool:
        """Whether it shows assigned data (`tensor.data = new`). Changes nothing.

        Raises `OffloadError` for data that cannot replace the weight.
        """
        data, home = self._data(), self.home
        layouts = [(view.shape, view.dtype, view.stride()) for view in (data, home)]
        if self._is_at_home(data) and layouts[0] == layouts[1]:
            return False
        if layouts[0][:2] != layouts[1][:2] or not self._fits(data):
            raise OffloadError(
                f"{self.member.names[0]} was replaced by a {data.dtype} tensor of shape {tuple(data.shape)}, stride "
                f"{data.stride()}, while it is offloaded (it was {home.dtype}, {tuple(home.shape)}, stride "
                f"{home.stride()}): call remove(), change it, and offload again"
            )
        return True

    def has_update(self, training: bool) -> bool:
        """Whether the forward that ends now has changed the weight. Changes nothing; raises as `is_assigned` does."""
        if (self.tensor.data_ptr(), self.tensor.stride()) != self.ring_at:
            return self.is_assigned() or self.changed()  # assigned inside the forward; or it shows the home
        if self.member.version != self.version:
            return True
        return self.member.role is not Role.PARAMETER and self._was_written(training)

    def take(self) -> None:
        """Take over an update: write the bytes of the ring, or assigned data, to the home. May be repeated."""
        with _disable_current_modes():
            if self.in_ring():
                self.source.check()
                self.home.copy_(self.ring)
            elif self.is_assigned():
                self._adopt(self._data())

    def _data(self) -> torch.Tensor:
        with _disable_current_modes():  # the watch of the first step would count this as a read by the model
            found: torch.Tensor = _DATA.__get__(self.tensor)
            return found

    def _is_at_home(self, data: torch.Tensor) -> bool:
        return data.data_ptr() == self.home.data_ptr() and data.device == self.home.device

    def _adopt(self, data: torch.Tensor) -> None:
        if data.stride() != self.home.stride():
            self.relaid = self.member.touched = True  # units that share the tensor take the layout over, too
        self.source.check()
        source = data.clone() if self._is_at_home(data) else data
        self.home = self.home.as_strided(data.shape, data.stride())
        self.ring = self.ring.as_strided(data.shape, data.stride())
        self.member.stride = data.stride()
        self._locate()
        self.home.copy_(source)
        self.member.show(self.home)

    def _was_written(self, training: bool) -> bool:
        """Whether a forward may have written without raising the version.

        Norms in training mode do, and so do kernels with caches of their own. To find those, the bytes are compared
        after the first forward.
        """
        if self.member.written is None:
            self.source.check()
            shown, home = (view.contiguous().view(-1).view(torch.uint8) for view in (self.ring, self.home))
            self.member.written = not torch.equal(shown.to(home.device), home)
        return training or self.member.written

    def _fits(self, data: torch.Tensor) -> bool:
        """Whether data of this layout can replace the weight: its layout is the same, or it fits in the tensor's own
        bytes and no other tensor shares them."""
        is_alone = len(self.source.group.members) == 1
        return data.stride() == self.home.stride() or (
            is_alone and span(data.shape, data.stride()) * data.element_size() <= self.member.spec.nbytes
        )


def _before(member: Member, home: Home, step_end: StepEnd, access: Access) -> None:
    """Take note that the memory of a tensor, which shows its home, is about to be used. Unless it is only read,
    wait for copies from it."""
    if access is not Access.READ:
        step_end.wait()
    member.touched |= access in (Access.WRITE, Access.VIEW)
    # a write to several tensors at once, such as `torch._foreach_mul_`, raises no version of a blind shell
    member.lent |= access is Access.TAKE or (access is Access.WRITE and bool(member.blind))
    if home.is_undecoded:
        home.check()


class UnitTensors:
    """The streamed tensors of one unit."""

    def __init__(self, tensors: list[StreamedTensor]) -> None:
        self.tensors = tensors
        self._shells: list[Shell] = list({id(shell): shell for f in tensors for shell in f.member.shells}.values())

    def to_ring(self) -> None:
        for streamed in self.tensors:
            if streamed.is_lazy:  # all others are plain in a step
                streamed.member.unguard()
            _DATA.__set__(streamed.tensor, streamed.ring)
        for shell in self._shells:
            shell.follow()

    def updated(self, training: bool) -> list[StreamedTensor]:
        """The tensors that a forward has changed. Call `take` for these before `to_home`."""
        found = []
        for streamed in self.tensors:  # calls nothing for an unchanged parameter
            tensor, member = streamed.tensor, streamed.member
            version = member.version if member.blind else tensor._version
            is_in_ring = (tensor.data_ptr(), tensor.stride()) == streamed.ring_at
            if is_in_ring and version == streamed.version and member.role is Role.PARAMETER:
                continue
            if streamed.has_update(training):
                found.append(streamed)
        return found

    def to_home(self) -> None:
        for streamed in self.tensors:
            _DATA.__set__(streamed.tensor, streamed.home)
            if streamed.is_lazy:
                streamed.guard_unread()
        for shell in self._shells:
            shell.follow()

    def clone_views(self, output: object) -> bool:
        """Give outputs that are views of these weights memory of their own; returns whether there were any."""
        ours, found = {streamed.ring.untyped_storage().data_ptr() for streamed in self.tensors}, False
        for tensor in tensors_in(output):
            with suppress(RuntimeError, NotImplementedError):  # wrappers of functorch have no storage
                if tensor.untyped_storage().data_ptr() in ours:
                    tensor.data = tensor.data.clone()
                    found = True
        return found


def noticed(tensors: Iterable[StreamedTensor]) -> list[StreamedTensor]:
    """The tensors whose homes may have been written to since the versions last agreed, or that show assigned data."""
    found = []
    for streamed in tensors:
        tensor, member = streamed.tensor, streamed.member
        version = member.version if member.blind else tensor._version
        if member.touched or member.lent or version != streamed.version or tensor.data_ptr() != streamed.home_at:
            found.append(streamed)
    return found


def moving(tensors: Sequence[StreamedTensor]) -> list[str]:
    """Tensors without a fixed address: several units hold them, each in its own extent."""
    places: dict[int, set[int]] = {}
    for streamed in tensors:
        places.setdefault(id(streamed.member.tensor), set()).add(streamed.ring.data_ptr())
    return sorted({streamed.member.names[0] for streamed in tensors if len(places[id(streamed.member.tensor)]) > 1})


class CountedStorage(NamedTuple):
    """A storage, and the number of its owners while no tensor of the model shows it."""

    storage: torch.UntypedStorage
    num_owners: int


@dataclass(eq=False, slots=True)
class BoundUnit:
    """A unit bound to memory, and whether it is open."""

    index: int
    streams: bool  # it has bytes of the ring
    views: UnitTensors
    storages: tuple[CountedStorage, ...]  # its own, over its bytes in the ring and the buffer
    coded: frozenset[str]  # alias groups that are decoded or copied into the buffer
    opening: Opening
    has_buffers: bool  # tensors that are no parameters, which a forward may update
    opened: int = 0  # forwards under way
    in_buffer: int = 0  # forwards under way at fixed addresses that use the buffer
    is_picked: bool = False  # its forward reads single rows of its weights only
    is_kept: bool = False  # a view of its bytes outlived a forward
    borrowed: UnitTensors | None = None  # views of memory of its own, which it has until it closes

    @property
    def rows(self) -> Rows | None:
        return self.opening.rows

    def num_views(self) -> int:
        """How many tensors show the bytes, of the model and of any other holder."""
        found = 0
        for storage, num_owners in self.storages:
            found += owners(storage) - num_owners
        return found
