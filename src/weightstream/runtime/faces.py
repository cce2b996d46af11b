"""The two faces of a streamed tensor: its home outside a unit's forward, its ring bytes inside. Switching is a pointer.

Whoever reads, saves or updates a weight between steps sees the true bytes. Two kinds of change must not be missed: an
update of the home after the ring was filled ahead (it would compute with stale bytes), and an update of the ring
inside a forward (it would be lost at the next fill). In-place operations raise a tensor's version counter. `.data`
hides from it, so between steps a streamed tensor is of a class that notices who takes its memory out; and aliases
that were taken before are found by comparing samples of the home, which sees whole updates and may miss single
elements.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from weightstream.errors import OffloadError, StoreError
from weightstream.runtime import lazy
from weightstream.runtime.homes import Home, words
from weightstream.runtime.readonly import plainly
from weightstream.runtime.weights import Member, span

_DATA: Any = torch.Tensor.data  # the descriptor itself: what we do must not count as an update
_HANDED_OUT = "_weightstream_handed_out"
_DOORS = ("numpy", "__array__", "__dlpack__")


def _door(base: type, name: str) -> Any:
    plain = getattr(base, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.__dict__[_HANDED_OUT] = True
        return plain(self, *args, **kwargs)

    return method


def _watched(base: type) -> type:
    """A class like `base` whose instances remember that their memory was handed out."""

    def get(self: torch.Tensor) -> Any:
        self.__dict__[_HANDED_OUT] = True
        return _DATA.__get__(self)

    members: dict[str, Any] = {name: _door(base, name) for name in _DOORS}
    members["data"] = property(get, lambda self, value: _DATA.__set__(self, value))
    members["__deepcopy__"] = plainly(base, copy.deepcopy)
    members["__reduce_ex__"] = plainly(base, lambda tensor, protocol: tensor.__reduce_ex__(protocol))
    members["__torch_function__"] = torch._C._disabled_torch_function_impl
    members["__module__"] = base.__module__
    return type(base.__name__, (base,), members)


_WATCHED: Mapping[type, type] = MappingProxyType({base: _watched(base) for base in (nn.Parameter, torch.Tensor)})


@dataclass(kw_only=True, slots=True)
class Face:
    """One tensor object of a unit: both views, and its version when they last agreed. `source` is its home's."""

    member: Member
    source: Home
    home: torch.Tensor
    ring: torch.Tensor
    alone: bool  # no other tensor views the bytes
    version: int = 0
    relaid: bool = False  # `adopt` took over another layout, which no graph knows
    resting: bool = False  # outside of steps

    def current_version(self) -> int:
        return self.member.tensor._version

    def show(self, view: torch.Tensor) -> None:
        _DATA.__set__(self.member.tensor, view)

    def watch(self) -> None:
        """Outside of steps: notice who takes the memory out."""
        self.resting = True
        self.guard()

    def unwatch(self) -> None:
        self.resting = False
        self.guard()

    def free(self) -> None:
        """Be a plain tensor, whatever is in the memory."""
        lazy.unguard(self.member.tensor, self.member.kind)
        self.member.tensor.__class__ = self.member.kind

    def guard(self) -> None:
        """The home is shown: decode it before it is read, where it holds nothing yet."""
        tensor, kind = self.member.tensor, self.member.kind
        if self.source.is_undecoded:
            lazy.guard(tensor, kind, self._decode)
        else:
            lazy.unguard(tensor, kind)
            tensor.__class__ = _WATCHED[kind] if self.resting else kind

    def _decode(self, takes_memory: bool) -> None:
        self.source.check()
        if takes_memory:
            self.lend()
        self.guard()

    def changed(self) -> bool:
        """Whether the tensor was updated in place through itself or a view of it since the versions agreed."""
        return self.current_version() != self.version

    def in_ring(self) -> bool:
        return bool(_DATA.__get__(self.member.tensor).data_ptr() == self.ring.data_ptr())

    def handed_out(self) -> bool:
        """Whether somebody may hold the memory: for good, as nobody can tell when they write to it."""
        return _HANDED_OUT in self.member.tensor.__dict__

    def lend(self) -> None:
        """Somebody holds the memory."""
        self.member.tensor.__dict__[_HANDED_OUT] = True

    def forget_holders(self) -> None:
        """The model is let go: whoever holds the memory is no concern any more."""
        self.member.tensor.__dict__.pop(_HANDED_OUT, None)

    def agree(self) -> None:
        self.version = self.current_version()

    def adopt(self) -> bool:
        """Take over data that somebody assigned (`tensor.data = new`): copied into the home. False if none was."""
        data: torch.Tensor = _DATA.__get__(self.member.tensor)
        same_memory = data.data_ptr() == self.home.data_ptr() and data.device == self.home.device
        if same_memory and (data.stride(), data.dtype, data.shape) == (
            self.home.stride(),
            self.home.dtype,
            self.home.shape,
        ):
            return False
        if (data.shape, data.dtype) != (self.home.shape, self.home.dtype) or not self._fits(data):
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
        self._words = [(home, words(home.group.home)) for home in homes]
        self._mappings = {home.mapping for home in homes if home.mapping is not None}
        self._samples: list[bytes] | None = None
        for face in faces:
            face.agree()

    def to_ring(self) -> None:
        for face in self.faces:
            lazy.unguard(face.member.tensor, face.member.kind)
            face.show(face.ring)

    def to_home(self, training: bool) -> list[Face]:
        """Back to the home; what the forward changed in the ring is written to the home first, and returned.

        A norm in training mode updates its buffers without raising their version.
        """
        updated = []
        for face in self.faces:
            if face.changed() or (training and face.member.kind is torch.Tensor):
                face.source.check()
                face.home.copy_(face.ring)
                updated.append(face)
            face.show(face.home)
            face.guard()
        return updated

    def sample(self) -> None:
        """Remember a sample of the home bytes, to tell later whether somebody wrote to them."""
        try:
            self._samples = self._read()
        except StoreError:  # told when the next step needs the bytes
            self._samples = None

    def home_was_written(self) -> bool:
        """Whether the home differs from what the ring was filled with, or may."""
        return any(face.handed_out() for face in self.faces) or self._read() != self._samples

    def coded_written(self) -> set[str]:
        """Alias groups that are coded, and of which somebody may have changed the plain bytes."""
        coded = [home for home in self._homes if home.layout is not None]
        if not coded:
            return set()
        lent = {face.source.group.alias for face in self.faces if face.handed_out()}
        return {home.group.alias for home in coded if home.group.alias in lent or home.was_written()}

    def _read(self) -> list[bytes]:
        for mapping in self._mappings:
            mapping.check()  # reading what a file no longer has would kill the process
        # What copies take from a file is left alone: the kernel tells of writes, and reading would bring in the pages.
        return [words.tobytes() for home, words in self._words if not home.is_copied_from_file]
