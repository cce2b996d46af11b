"""The two faces of a streamed tensor: its home outside a unit's forward, its ring bytes inside. Switching is a pointer.

Whoever reads, saves or updates a weight between steps sees the true bytes. Two kinds of change must not be missed: an
update of the home after the ring was filled ahead (it would compute with stale bytes), and an update of the ring
inside a forward (it would be lost at the next fill). In-place operations raise a tensor's version counter, and data
that is assigned shows by its address. Memory that was handed out (`.data`, numpy) raises no version, so between steps
a tensor is guarded: it remembers that, and from then on counts as updated before every step. Of a view
(`w.detach()`) nobody knows whether numpy took it out in turn: the tensor counts as updated once, before the next step.
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
from weightstream.runtime.experts.unit_decode import Opening, Rows
from weightstream.runtime.tensors.guarded import Access
from weightstream.runtime.tensors.leaves import Role, Shell
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.weights.alias_groups import Member, span
from weightstream.runtime.weights.home import Home

_DATA: Any = torch.Tensor.data  # the descriptor itself: what we do must not count as an update


@dataclass(eq=False, kw_only=True, slots=True)
class StreamedTensor:
    """One tensor object of a unit: both views, where they are, and its version when they last agreed.

    What runs for every tensor at every step compares plain fields: a call costs as much as all of the rest.
    """

    member: Member
    source: Home
    unit: int
    home: torch.Tensor
    ring: torch.Tensor
    on_access: Callable[[Access], None]
    tensor: torch.Tensor = field(init=False)
    home_at: int = field(init=False)
    ring_at: tuple[int, tuple[int, ...]] = field(init=False)
    version: int = field(init=False)
    relaid: bool = False  # `adopt` took over another layout, which no graph knows
    is_lazy: bool = field(init=False)  # the home may hold nothing until it is read

    @classmethod
    def of(cls, member: Member, source: Home, unit: int, ring: torch.Tensor, step_end: StepEnd) -> StreamedTensor:
        """That of a tensor which shows `ring` in this unit."""
        home = member.view(source.group.home, 0)
        tells = partial(_before, member, source, step_end)  # a guard holds no views
        return cls(member=member, source=source, unit=unit, home=home, ring=ring, on_access=tells)

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
        """The group that the tensor is of."""
        return self.member.spec.alias

    def guard_unread(self) -> None:
        """The home is shown in a step: decode it before it is read, where it holds nothing yet.

        All others are plain then, as torch takes other ways, with other bits, where a class sees its calls.
        """
        if self.source.is_undecoded:
            self.member.guard(self.on_access)

    def changed(self) -> bool:
        """Whether the tensor was updated in place through itself or a view of it since the versions agreed."""
        return self.member.version != self.version

    def in_ring(self) -> bool:
        """Whether it shows its bytes of the ring, and no data that somebody assigned."""
        return (self.tensor.data_ptr(), self.tensor.stride()) == self.ring_at

    def is_past_file(self) -> bool:
        """Whether the home, once noticed, may hold other bytes than copies take from a file or a coded form."""
        if self.source.layout is not None:
            return self.member.lent
        return self.is_lazy and not self.source.is_undecoded  # gathered: no kernel tells of writes to that memory

    def agree(self) -> None:
        self.version = self.member.version

    def is_assigned(self) -> bool:
        """Whether it shows data that was assigned (`tensor.data = new`). Changes nothing.

        Raises `OffloadError` for data that cannot take the place of the weight.
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
        """At the end of a forward: whether it has changed the weight. Changes nothing; raises as `is_assigned`."""
        if (self.tensor.data_ptr(), self.tensor.stride()) != self.ring_at:
            return self.is_assigned() or self.changed()  # data that was assigned inside; or the home, the true bytes
        if self.member.version != self.version:
            return True
        return self.member.role is not Role.PARAMETER and self._was_written(training)

    def take(self) -> None:
        """Write to the home what a forward changed in the ring, or data that was assigned; may be repeated."""
        with _disable_current_modes():
            if self.in_ring():
                self.source.check()
                self.home.copy_(self.ring)
            elif self.is_assigned():
                self._adopt(self._data())

    def _data(self) -> torch.Tensor:
        with _disable_current_modes():  # the watch of the first step would take this for a read of the model's
            found: torch.Tensor = _DATA.__get__(self.tensor)
            return found

    def _is_at_home(self, data: torch.Tensor) -> bool:
        return data.data_ptr() == self.home.data_ptr() and data.device == self.home.device

    def _adopt(self, data: torch.Tensor) -> None:
        if data.stride() != self.home.stride():
            self.relaid = self.member.touched = True  # other faces of the tensor are to take it over too
        self.source.check()
        source = data.clone() if self._is_at_home(data) else data
        self.home = self.home.as_strided(data.shape, data.stride())
        self.ring = self.ring.as_strided(data.shape, data.stride())
        self.member.stride = data.stride()
        self._locate()
        self.home.copy_(source)
        self.member.show(self.home)

    def _was_written(self, training: bool) -> bool:
        """Whether a forward may have written without a version: norms in training mode do, and kernels with caches of
        their own. Whether those do is seen in the first forward, where the bytes are compared."""
        if self.member.written is None:
            self.source.check()
            shown, home = (view.contiguous().view(-1).view(torch.uint8) for view in (self.ring, self.home))
            self.member.written = not torch.equal(shown.to(home.device), home)
        return training or self.member.written

    def _fits(self, data: torch.Tensor) -> bool:
        """Whether data of this layout can take the place: the same layout, or nobody else's bytes are among these."""
        is_alone = len(self.source.group.members) == 1
        return data.stride() == self.home.stride() or (
            is_alone and span(data.shape, data.stride()) * data.element_size() <= self.member.spec.nbytes
        )


def _before(member: Member, home: Home, step_end: StepEnd, access: Access) -> None:
    """Somebody is about to use the memory of a tensor that shows its home."""
    if access is not Access.READ:
        step_end.wait()
    member.touched |= access in (Access.WRITE, Access.VIEW)
    # several tensors that are written at once, as `torch._foreach_mul_` does, raise no version of a blind wrapper
    member.lent |= access is Access.TAKE or (access is Access.WRITE and bool(member.blind))
    if home.is_undecoded:
        home.check()


class UnitTensors:
    """The faces of one unit's streamed tensors."""

    def __init__(self, faces: list[StreamedTensor]) -> None:
        self.faces = faces
        self._shells: list[Shell] = list({id(shell): shell for f in faces for shell in f.member.shells}.values())

    def to_ring(self) -> None:
        for face in self.faces:
            if face.is_lazy:  # all others are plain while a step is under way
                face.member.unguard()
            _DATA.__set__(face.tensor, face.ring)
        for shell in self._shells:
            shell.follow()

    def updated(self, training: bool) -> list[StreamedTensor]:
        """Those that a forward has changed, which are to be taken over before the homes are shown. Changes nothing."""
        found = []
        for face in self.faces:  # nothing is called for a parameter that shows its bytes of the ring as they were
            tensor, member = face.tensor, face.member
            version = member.version if member.blind else tensor._version
            is_in_ring = (tensor.data_ptr(), tensor.stride()) == face.ring_at
            if is_in_ring and version == face.version and member.role is Role.PARAMETER:
                continue
            if face.has_update(training):
                found.append(face)
        return found

    def to_home(self) -> None:
        for face in self.faces:
            _DATA.__set__(face.tensor, face.home)
            if face.is_lazy:
                face.guard_unread()
        for shell in self._shells:
            shell.follow()

    def own(self, output: object) -> bool:
        """Give outputs that are views of these weights memory of their own; whether there were any."""
        ours, found = {face.ring.untyped_storage().data_ptr() for face in self.faces}, False
        for tensor in tensors_in(output):
            with suppress(RuntimeError, NotImplementedError):  # wrappers of functorch have no storage
                if tensor.untyped_storage().data_ptr() in ours:
                    tensor.data = tensor.data.clone()
                    found = True
        return found


def noticed(faces: Iterable[StreamedTensor]) -> list[StreamedTensor]:
    """Those whose homes may have been written to since the versions agreed, or that show data which was assigned."""
    found = []
    for face in faces:
        tensor, member = face.tensor, face.member
        version = member.version if member.blind else tensor._version
        if member.touched or member.lent or version != face.version or tensor.data_ptr() != face.home_at:
            found.append(face)
    return found


def moving(faces: Sequence[StreamedTensor]) -> list[str]:
    """Tensors without a fixed address: several units hold them, each in its own extent."""
    places: dict[int, set[int]] = {}
    for face in faces:
        places.setdefault(id(face.member.tensor), set()).add(face.ring.data_ptr())
    return sorted({face.member.names[0] for face in faces if len(places[id(face.member.tensor)]) > 1})


class CountedStorage(NamedTuple):
    """A storage, and the number of its owners while no tensor of the model shows it."""

    storage: torch.UntypedStorage
    num_owners: int


@dataclass(eq=False, slots=True)
class BoundUnit:
    """A unit bound to memory.

    `storages` are its own over its bytes in the ring and the buffer. `opened` counts how often the unit is open;
    `in_buffer` how often its decoded weights are in use at fixed addresses; `is_picked`: its forward reads rows of them
    alone; `borrowed` are views of memory until it closes; `is_kept`: a view of the bytes outlived a forward.
    """

    index: int
    streams: bool
    faces: UnitTensors
    storages: tuple[CountedStorage, ...]
    coded: frozenset[str]
    opening: Opening
    has_buffers: bool
    opened: int = 0
    in_buffer: int = 0
    is_picked: bool = False
    is_kept: bool = False
    borrowed: UnitTensors | None = None

    @property
    def rows(self) -> Rows | None:
        return self.opening.rows

    def num_views(self) -> int:
        """How many tensors of the model, and of whoever else, show the bytes."""
        found = 0
        for storage, num_owners in self.storages:
            found += owners(storage) - num_owners
        return found
