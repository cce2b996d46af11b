"""The CUDA driver through ctypes: what PyTorch has no call for, or takes longer for. It knows addresses alone."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_READ_ONLY_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE
_END = (
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
    found = ctypes.CDLL("libcuda.so.1")
    found.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    found.cuMemcpy2DAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return found


def copy(dst: torch.Tensor, src: torch.Tensor, stream: int) -> bool:
    """Queue a copy of pinned host memory, flat or rows that lie apart, into flat memory of the current device. False
    where the driver refuses."""
    if src.dim() == 1:
        return not _driver().cuMemcpyAsync(dst.data_ptr(), src.data_ptr(), src.numel(), stream)
    height, width = src.shape
    rows = _Rows(src_type=_HOST, src_host=src.data_ptr(), src_pitch=src.stride(0), width=width, height=height)
    rows.dst_type, rows.dst_device, rows.dst_pitch = _DEVICE, dst.data_ptr(), width
    return not _driver().cuMemcpy2DAsync_v2(ctypes.byref(rows), stream)


def on_device(memory: torch.Tensor) -> int | None:
    """The address at which the device reads pinned host memory, if it can."""
    pointer = ctypes.c_uint64()
    code = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(memory.data_ptr()), 0)
    return None if code else pointer.value


def pins_read_only(index: int) -> bool:
    """Whether a device takes pages that nobody may write."""
    found = ctypes.c_int()
    code = _driver().cuDeviceGetAttribute(ctypes.byref(found), _READ_ONLY_SUPPORTED, index)
    return code == 0 and found.value == 1


def version() -> str:
    """The newest CUDA that the driver can run."""
    found = ctypes.c_int()
    _driver().cuDriverGetVersion(ctypes.byref(found))
    return f"{found.value // 1000}.{found.value % 1000 // 10}"
