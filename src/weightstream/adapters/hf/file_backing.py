"""File backing: tensors that a library makes while it loads a model become views of files. Knows no model.

A tensor that views a mapped file, or memory that is filled from one, stays as it is. Any other tensor is written to the
offload folder and then views the file there, so that one tensor at a time is in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

from weightstream.runtime.tensors.leaves import Role, Shell, behind
from weightstream.store import malloc
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import Memory

_TRIM_NBYTES = 32 << 20
_SMALL_NBYTES = 4096  # tensors besides a quantised weight, such as scales, stay in memory up to this size


class Homing:
    """The file backing of one load, for the thread that constructs it.

    A tensor that views one of `memories` stays as it is. Without a `folder` the model is only described, so a tensor
    that would have to be written gets memory without values, which takes no RAM.
    """

    def __init__(
        self,
        memories: Callable[[], Iterable[Memory]],
        folder: OffloadFolder | None,
    ) -> None:
        self.num_without_values = 0
        self._memories = memories
        self._folder = folder
        self._written: set[int] = set()  # addresses in the folder
        self._thread = threading.get_ident()
        self._freed_nbytes = 0

    @property
    def may_write(self) -> bool:
        """Whether tensors may be written."""
        return self._folder is not None

    @property
    def num_written(self) -> int:
        """Number of tensors that were written to the folder."""
        return len(self._written)

    @property
    def is_of_this_thread(self) -> bool:
        """Whether this thread runs the load; other threads may load other models."""
        return threading.get_ident() == self._thread

    def home(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it views a file or lazy memory, else an equal one in a file of the folder."""
        address = tensor.data_ptr()
        is_homed = address in self._written or any(m.locate(address) is not None for m in self._memories())
        if not tensor.numel() or (tensor.is_contiguous() and is_homed):
            return tensor
        if self._folder is None:
            self.num_without_values += 1
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        self._freed_nbytes += tensor.nbytes
        if self._freed_nbytes >= _TRIM_NBYTES:
            malloc.trim()
            self._freed_nbytes = 0
        home = self._folder.write(name, tensor)
        self._written.add(home.data_ptr())
        return home

    def take(self, name: str, param: torch.Tensor) -> None:
        """Have the plain tensors of a parameter view files."""
        if not self.is_of_this_thread:
            return
        homes: dict[tuple[int, torch.Size], torch.Tensor] = {}  # several tensors may view the same memory
        is_no_parameter = not isinstance(param, torch.nn.Parameter)
        for path, tensor, shells, _ in behind(name, param, Role.PARAMETER):
            is_small = tensor.nbytes <= _SMALL_NBYTES and (is_no_parameter or path != name)
            place = (tensor.data_ptr(), tensor.shape)
            if place not in homes:
                homes[place] = tensor.detach().cpu() if is_small else self.home(path, tensor.detach())
            if homes[place].data_ptr() != tensor.data_ptr():
                tensor.data = homes[place]
            for shell in shells:
                Shell(shell).follow()

    def take_all(self, module: torch.nn.Module) -> None:
        """As `take`, for the loaded parameters and buffers of a module itself, without its children."""
        for named in (module._parameters, module._buffers):
            for name, tensor in named.items():
                if tensor is not None and not tensor.is_meta:
                    self.take(name, tensor)
