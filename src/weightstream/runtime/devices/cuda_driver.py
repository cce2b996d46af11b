"""The CUDA driver through ctypes: calls that PyTorch lacks, or that take longer in PyTorch. Knows only addresses."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_READ_ONLY_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE
_END = (  # the fields of the source, and again of the destination, in CUDA_MEMCPY2D
    ("x", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("type", ctypes.c_uint),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"{end}_{name}", kind) for end in ("src", "dst") for name, kind in _END),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    library.cuMemcpy2DAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library


def copy(dst: torch.Tensor, src: torch.Tensor, stream: int) -> bool:
    """Queue a copy of pinned host memory, flat or strided rows, into flat memory of the current device. False if the
    driver refuses."""
    if src.dim() == 1:
        return not _driver().cuMemcpyAsync(dst.data_ptr(), src.data_ptr(), src.numel(), stream)
    height, width = src.shape
    rows = _Rows(src_type=_HOST, src_host=src.data_ptr(), src_pitch=src.stride(0), width=width, height=height)
    rows.dst_type, rows.dst_device, rows.dst_pitch = _DEVICE, dst.data_ptr(), width
    return not _driver().cuMemcpy2DAsync_v2(ctypes.byref(rows), stream)


def device_address(memory: torch.Tensor) -> int | None:
    """The address at which the device reads pinned host memory; None if it cannot."""
    pointer = ctypes.c_uint64()
    code = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(memory.data_ptr()), 0)
    return None if code else pointer.value


def pins_read_only(index: int) -> bool:
    """Whether read-only pages can be pinned for a device."""
    value = ctypes.c_int()
    code = _driver().cuDeviceGetAttribute(ctypes.byref(value), _READ_ONLY_SUPPORTED, index)
    return code == 0 and value.value == 1


def version() -> str:
    """The newest CUDA version that the driver supports."""
    number = ctypes.c_int()
    _driver().cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
