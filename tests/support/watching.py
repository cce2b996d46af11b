"""Accesses of kernels to memory, as Triton's interpreter makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter


class Watch:
    """Checks that the interpreter's accesses are inside of the tensors that are passed for them. Replaces
    `triton.runtime.interpreter._interpreter`."""

    def __init__(self, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        self._real, self._reads, self._writes = triton.runtime.interpreter._interpreter, reads, writes
        self.num = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _check(self, places: Any, nbytes: int, tensors: list[torch.Tensor]) -> None:
        self.num += places.size
        inside = np.zeros(places.shape, dtype=bool)
        for tensor in tensors:
            inside |= (places >= tensor.data_ptr()) & (places + nbytes <= tensor.data_ptr() + tensor.nbytes)
        assert inside.all(), places[~inside][:4]

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(ptrs[mask.astype(bool)].astype(np.int64), np.dtype(dtype).itemsize, self._reads)
        return self._real.load(ptrs, mask, other, dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        self._check(ptrs[mask.astype(bool)].astype(np.int64), value.dtype.itemsize, self._writes)
        return self._real.store(ptrs, value, mask)
