"""The two faces of a streamed tensor: its home outside a unit's forward, its ring bytes inside. Switching is a pointer.

Whoever reads, saves or updates a weight between steps sees the true bytes. Two kinds of change must not be missed:
an update of the home after the ring was filled ahead (it would compute with stale bytes), and an update of the ring
inside a forward (it would be lost at the next fill). In-place operations raise a tensor's version counter, which
`.data` hides; so what lies in the ring between two steps is also compared with its home by samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightstream.errors import OffloadError
from weightstream.runtime.weights import Group, Member

_SAMPLES = 64


@dataclass(kw_only=True, slots=True)
class Face:
    """One tensor object of a unit: both views, and its version when they last agreed."""

    member: Member
    home: torch.Tensor
    ring: torch.Tensor
    version: int = 0

    def current_version(self) -> int:
        tensor = self.member.tensor
        return 0 if tensor.is_inference() else tensor._version

    def show(self, view: torch.Tensor) -> None:
        self.member.tensor.data = view

    def changed(self) -> bool:
        """Whether the tensor was updated in place through itself or a view of it since the versions agreed."""
        return self.current_version() != self.version

    def agree(self) -> None:
        self.version = self.current_version()

    def adopt(self) -> bool:
        """Take over data that somebody assigned (`tensor.data = new`): copied into the home. False if none was."""
        data = self.member.tensor.data
        same_memory = data.data_ptr() == self.home.data_ptr() and data.device == self.home.device
        if same_memory and data.stride() == self.home.stride() and data.dtype == self.home.dtype:
            return False
        name = self.member.names[0]
        if (data.shape, data.dtype) != (self.home.shape, self.home.dtype):
            raise OffloadError(
                f"{name} was replaced by a {data.dtype} tensor of shape {tuple(data.shape)} while it is offloaded (it "
                f"was {self.home.dtype} {tuple(self.home.shape)}): call remove(), change it, and offload again"
            )
        self.home.copy_(data.clone() if same_memory else data)
        self.show(self.home)
        return True


class UnitFaces:
    """The faces of one unit's streamed tensors."""

    def __init__(self, faces: list[Face], groups: list[Group]) -> None:
        self.faces = faces
        self._words = [_words(group.home) for group in groups]
        self._samples: list[bytes] | None = None
        for face in faces:
            face.agree()

    def to_ring(self) -> None:
        for face in self.faces:
            face.show(face.ring)

    def to_home(self) -> None:
        """Back to the home; what the forward changed in the ring is written to the home first."""
        for face in self.faces:
            if face.changed():
                face.home.copy_(face.ring)
            face.show(face.home)

    def dirty(self) -> list[Face]:
        return [face for face in self.faces if face.changed()]

    def sample(self) -> None:
        """Remember a sample of the home bytes, to tell later whether somebody wrote to them."""
        self._samples = [words.tobytes() for words in self._words]

    def home_was_written(self) -> bool:
        if self._samples is None:
            return False
        return any(w.tobytes() != s for w, s in zip(self._words, self._samples, strict=True))


def _words(home: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Up to 64 rows of up to 8 bytes, evenly spread over the home."""
    flat: npt.NDArray[np.uint8] = home.numpy()
    stride = max(8, flat.size // _SAMPLES)
    rows = max(1, flat.size // stride)
    return np.lib.stride_tricks.as_strided(flat, (rows, min(8, flat.size)), (stride, 1), writeable=False)
