"""The arena: anonymous host memory of exactly the requested size, pinned in place. Knows no model.

PyTorch's pinned allocator rounds each block up to a power of two; this one does not. Weights are written before the
pages are pinned: pinning untouched memory takes ten times as long.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from weightstream.store.ending import finalize
from weightstream.store.numa import Node

_PAGE = mmap.PAGESIZE
Pin = Callable[[torch.Tensor], None]


class Arena:
    """Blocks of host memory, at the NUMA `node` if there is one. `pin` and `unpin` are the device's; without them the
    memory stays pageable."""

    def __init__(self, pin: Pin | None = None, unpin: Pin | None = None, node: Node | None = None) -> None:
        self._pin = pin
        self._unpin = unpin
        self._node = node
        self._pinned: list[torch.Tensor] = []
        finalize(self, _unpin_all, self._pinned, unpin)  # before the memory is unmapped, also without a close()

    @property
    def nbytes(self) -> int:
        """Bytes pinned so far."""
        return sum(block.numel() for block in self._pinned)

    def take(self, nbytes: int) -> torch.Tensor:
        """New memory: flat uint8, page-aligned, rounded up to a page. Not pinned yet."""
        size = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # a kernel without huge pages refuses the advice
            memory.madvise(mmap.MADV_HUGEPAGE)
        block = torch.frombuffer(memory, dtype=torch.uint8)
        return block if self._node is None else self._node.hold(block)

    def pin(self, block: torch.Tensor) -> None:
        """Pin a block, which the caller has written already; raises `StoreError` if the system refuses."""
        if self._pin is not None:
            self._pin(block)
            self._pinned.append(block)

    def keep(self, used: Iterable[torch.Tensor]) -> None:
        """Unpin and drop the blocks in which none of the tensors `used` is."""
        addresses = {tensor.untyped_storage().data_ptr() for tensor in used}
        others = [block for block in self._pinned if block.data_ptr() not in addresses]
        self._pinned[:] = [block for block in self._pinned if block.data_ptr() in addresses]
        _unpin_all(others, self._unpin)

    def close(self) -> None:
        """Unpin everything. A block is freed with its last tensor. May be called twice."""
        _unpin_all(self._pinned, self._unpin)


def _unpin_all(blocks: list[torch.Tensor], unpin: Pin | None) -> None:
    with suppress(IndexError):  # two threads may call this at once
        while True:
            block = blocks.pop()
            if unpin is not None:
                unpin(block)
