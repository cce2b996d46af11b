"""Backends by the names of devices, and the host memory that devices copy from."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch

from weightstream.codec.device import on
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.runtime.devices import cuda, cuda_driver
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.devices.collector import uncollected
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.tensors.thread_state import ThreadState
from weightstream.settings.config import OffloadConfig
from weightstream.store.arena import Arena
from weightstream.store.pages import PageCache

# backends of live models, and of unused ones that are not collected yet
_LEFT: WeakValueDictionary[int, Backend] = WeakValueDictionary()


@contextmanager
def opened_backend(
    device: torch.device | str | None, config: OffloadConfig, *, loads: bool = False
) -> Iterator[Backend]:
    """Yield a backend, outside inference mode; it is closed if the block fails.

    `loads`: a model is loaded inside. Unused models, which are cycles with their streamers, are collected first to free
    their memory.
    """
    if loads and _LEFT:
        gc.collect()
    with _loading(), ExitStack() as on_failure:
        with torch.inference_mode(False):
            backend = backend_of(device, config)
        _LEFT[id(backend)] = backend
        on_failure.callback(backend.close)
        on_failure.callback(ThreadState(backend.device).restore)
        with torch.inference_mode(False), on(backend.device):
            yield backend
        on_failure.pop_all()


@contextmanager
def _loading() -> Iterator[None]:
    """Switch the cycle collector off inside, and move new objects to the oldest generation, which is collected rarely.

    Loading makes hardly any garbage, and a collection over all loaded objects takes a quarter of a second.
    """
    with uncollected() as was_enabled:
        try:
            yield
        finally:
            if was_enabled and not gc.get_freeze_count():  # else this would unfreeze what the caller has frozen
                gc.freeze()
                gc.unfreeze()


def device_of(device: torch.device | str | None) -> torch.device:
    """A device by name; by default the current CUDA GPU, or the CPU if there is no GPU."""
    try:
        return torch.device(device if device is not None else "cuda" if cuda.is_available() else "cpu")
    except RuntimeError as error:
        # torch's own text lists device types that are not supported here
        raise ConfigError(f"device {device!r}: give cuda, cuda:1 or cpu") from error


def backend_of(device: torch.device | str | None, config: OffloadConfig) -> Backend:
    """The backend of a device, as for `device_of`."""
    device = device_of(device)
    if device.type == "cpu":
        return CpuBackend()
    if device.type == "cuda":
        return cuda.CudaBackend(device, pin_memory=config.pin_memory)
    raise UnsupportedError(f"device {device}: weightstream runs on 'cuda' and 'cpu'")


class HostPlaces(NamedTuple):
    """Host memory that a device copies from: an arena, and the page cache. None: not to be used."""

    arena: Arena | None
    pages: PageCache | None


def pinned(backend: Backend, config: OffloadConfig) -> HostPlaces:
    """The host memory that the device copies from: an arena if pinning is allowed, and the page cache.

    Its pages are pinned in place, or only read ahead if nothing is pinned. There is no page cache if pinning is allowed
    and read-only pages cannot be pinned for the GPU.
    """
    if backend.device.type != "cuda" or not config.pin_memory:
        return HostPlaces(None, PageCache())
    node, index = cuda.node(backend.device), backend.device.index

    def pin(memory: torch.Tensor, *, read_only: bool = False) -> None:
        with backend.pinning:
            cuda.pin_in_place(memory, backend.device, read_only=read_only)

    pages: PageCache | None = None
    if cuda_driver.pins_read_only(index):
        pages = PageCache(partial(pin, read_only=True), cuda.unregister, node, backend.device_view)
    return HostPlaces(Arena(pin, cuda.unregister, node), pages)
