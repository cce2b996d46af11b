"""The two faces of a streamed tensor: its home outside a unit's forward, its ring bytes inside. Switching is a pointer.

Whoever reads, saves or updates a weight between steps sees the true bytes. Two kinds of change must not be missed: an
update of the home after the ring was filled ahead (it would compute with stale bytes), and an update of the ring
inside a forward (it would be lost at the next fill). In-place operations raise a tensor's version counter, and data
that is assigned shows by its address. Memory that was handed out (`.data`, numpy) raises no version, so between steps
a streamed tensor is guarded: it remembers that, and from then on counts as updated before every step. Of a view
(`w.detach()`) nobody knows whether numpy took it out in turn: the tensor counts as updated once, before the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.errors import OffloadError
from weightstream.runtime import parameter
from weightstream.runtime.leaves import Role, Shell
from weightstream.runtime.moves import Home
from weightstream.runtime.parameter import Access
from weightstream.runtime.weights import Member, span

_DATA: Any = torch.Tensor.data  # the descriptor itself: what we do must not count as an update


@dataclass(kw_only=True, slots=True)
class Face:
    """One tensor object of a unit: both views, and its version when they last agreed. `source` is its home's."""

    member: Member
    source: Home
    home: torch.Tensor
    ring: torch.Tensor
    alone: bool  # no other tensor views the bytes
    tensor: torch.Tensor = field(init=False)
    version: int = 0
    relaid: bool = False  # `adopt` took over another layout, which no graph knows
    resting: bool = False  # outside of steps
    compared: bool = False  # the forward's writes that raise no version were looked for

    def __post_init__(self) -> None:
        self.tensor = self.member.tensor

    def show(self, view: torch.Tensor) -> None:
        self.member.show(view)

    def watch(self) -> None:
        """Outside of steps: notice who takes the memory out."""
        self.resting, self.member.touched = True, False
        self.guard()

    def unwatch(self) -> None:
        self.resting = False
        self.guard()

    def free(self) -> None:
        """Be a plain tensor, whatever is in the memory."""
        parameter.unguard(self.tensor, self.member.kind)

    def guard(self) -> None:
        """The home is shown: decode it before it is read, where it holds nothing yet."""
        if self.resting or self.source.is_undecoded:
            parameter.guard(self.tensor, self.member.kind, self._before)
        elif type(self.tensor) is not self.member.kind:
            self.free()

    def _before(self, access: Access) -> None:
        self.member.touched |= access in (Access.WRITE, Access.VIEW)
        self.member.lent |= access is Access.TAKE
        if self.source.is_undecoded:
            self.source.check()
            self.guard()

    def changed(self) -> bool:
        """Whether the tensor was updated in place through itself or a view of it since the versions agreed."""
        return self.tensor._version != self.version

    def shows(self, view: torch.Tensor) -> bool:
        """Whether it is this view, and no data that somebody assigned."""
        return (self.tensor.data_ptr(), self.tensor.stride()) == (view.data_ptr(), view.stride())

    def in_ring(self) -> bool:
        return self.shows(self.ring)

    def lend(self) -> None:
        """Somebody holds the memory: for good, as nobody can tell when they write to it."""
        self.member.lent = True

    def agree(self) -> None:
        self.version = self.tensor._version

    def adopt(self) -> bool:
        """Take over data that somebody assigned (`tensor.data = new`): copied into the home. False if none was."""
        with _disable_current_modes():  # the watch of the first step would take this for a read of the model's
            return self._adopt(_DATA.__get__(self.tensor))

    def _adopt(self, data: torch.Tensor) -> bool:
        same_memory = data.data_ptr() == self.home.data_ptr() and data.device == self.home.device
        layouts = [(view.shape, view.dtype, view.stride()) for view in (data, self.home)]
        if same_memory and layouts[0] == layouts[1]:
            return False
        if layouts[0][:2] != layouts[1][:2] or not self._fits(data):
            raise OffloadError(
                f"{self.member.names[0]} was replaced by a {data.dtype} tensor of shape {tuple(data.shape)}, stride "
                f"{data.stride()}, while it is offloaded (it was {self.home.dtype}, {tuple(self.home.shape)}, stride "
                f"{self.home.stride()}): call remove(), change it, and offload again"
            )
        self.relaid = self.relaid or data.stride() != self.home.stride()
        self.source.check()
        source = data.clone() if same_memory else data
        self.home = self.home.as_strided(data.shape, data.stride())
        self.ring = self.ring.as_strided(data.shape, data.stride())
        self.member.stride = data.stride()
        self.home.copy_(source)
        self.show(self.home)
        return True

    def take_update(self, training: bool) -> bool:
        """At the end of a forward: write what it changed in the ring to the home; whether it did."""
        if not self.in_ring():  # it shows data that was assigned inside; or the home, and so true bytes
            return self.adopt() or self.changed()
        if self.changed() or (self.member.role is not Role.PARAMETER and self._was_written(training)):
            self.source.check()
            self.home.copy_(self.ring)
            return True
        return False

    def _was_written(self, training: bool) -> bool:
        """Whether a forward may have written without a version: norms in training mode do, and kernels with caches of
        their own. Whether those do is seen in the first forward, where the bytes are compared."""
        if not self.compared:
            self.compared = True
            self.source.check()
            shown, home = (view.contiguous().view(-1).view(torch.uint8) for view in (self.ring, self.home))
            self.member.written |= not torch.equal(shown.to(home.device), home)
        return training or self.member.written

    def _fits(self, data: torch.Tensor) -> bool:
        """Whether data of this layout can take the place: the same layout, or nobody else's bytes are among these."""
        return data.stride() == self.home.stride() or (
            self.alone and span(data.shape, data.stride()) * data.element_size() <= self.member.spec.nbytes
        )


class UnitFaces:
    """The faces of one unit's streamed tensors."""

    def __init__(self, faces: list[Face], homes: list[Home]) -> None:
        self.faces = faces
        self._homes = homes
        self._shells: list[Shell] = list({id(shell): shell for f in faces for shell in f.member.shells}.values())
        for face in faces:
            face.agree()

    def to_ring(self) -> None:
        for face in self.faces:
            if type(face.tensor) is not face.member.kind:
                face.free()
            _DATA.__set__(face.tensor, face.ring)
        for shell in self._shells:
            shell.follow()

    def to_home(self, training: bool) -> list[Face]:
        """Back to the home; what the forward changed in the ring is written to the home first, and returned."""
        try:
            return [face for face in self.faces if face.take_update(training)]
        finally:
            for face in self.faces:
                _DATA.__set__(face.tensor, face.home)
                face.guard()
            for shell in self._shells:
                shell.follow()

    def updated(self) -> list[Face]:
        """Those whose homes were updated since the versions agreed; assigned data is taken over."""
        found = [face for face in self.faces if face.member.touched or face.changed() or not face.shows(face.home)]
        return [face for face in found if face.adopt() or face.changed()]

    def home_was_written(self) -> bool:
        """Whether somebody may have written to the homes unseen."""
        return any(face.member.lent or face.member.touched for face in self.faces)

    def coded_written(self) -> set[str]:
        """Alias groups that are coded, and of which somebody may have changed the plain bytes."""
        lent = {face.source.group.alias for face in self.faces if face.member.lent}
        return {home.group.alias for home in self._homes if home.layout is not None and home.group.alias in lent}
