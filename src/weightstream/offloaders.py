"""The life cycle that an inference engine drives: wrap layers while the model is built, take over once it is loaded.

A thin face: what is selected goes to host memory layer by layer; `post_init` hands all layers to a streamer, whose
weights keep their fixed addresses from then on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

import torch
from torch import nn

from weightstream.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig, selects
from weightstream.errors import ConfigError, OffloadError
from weightstream.front import offload_layers
from weightstream.runtime.streamer import Streamer


class BaseOffloader(ABC):
    """What an engine calls: `wrap_modules`, then `post_init`; around graphs `sync_prev_onload`, `join_after_forward`.

    Graphs that are pieces of a step are launched in the order of their capture, and reach its last offloaded layer.
    """

    _current: ClassVar[BaseOffloader | None] = None

    @abstractmethod
    def wrap_modules(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Take the layers one by one, so that a generator builds each when those before it are offloaded already.

        Returns every module, in order. Weights may be loaded, replaced, added or deleted until `post_init`.
        """

    @abstractmethod
    def post_init(self) -> None:
        """Take the final value, shape, stride and dtype of every weight; allocate; start the first copies.

        Raises what `weightstream.offload` raises, and leaves the layers as they were then.
        """

    @abstractmethod
    def sync_prev_onload(self) -> None:
        """Make compute wait for the copies in flight: before a graph is captured or launched."""

    @abstractmethod
    def join_after_forward(self) -> None:
        """Join every copy that a capture started and nobody waited for: inside the capture, before it ends."""


class NoopOffloader(BaseOffloader):
    """Offloads nothing."""

    def wrap_modules(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        return list(modules)

    def post_init(self) -> None:
        pass

    def sync_prev_onload(self) -> None:
        pass

    def join_after_forward(self) -> None:
        pass


class _StreamingOffloader(BaseOffloader):
    """What both backends share: layers that are taken in, and the streamer that takes them over."""

    streamer: Streamer | None = None

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self._layers: list[nn.Module] = []
        self._device: torch.device | None = None

    def wrap_modules(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        if self.streamer is not None:
            raise OffloadError("wrap_modules() after post_init(): the layers have a plan already")
        first = len(self._layers)
        for layer, module in enumerate(modules, first):
            self._layers.append(module)
            if self._device is None:
                self._device = next((p.device for p in module.parameters() if not p.is_meta), None)
            for parameter in self._selected(layer, module):
                if not parameter.is_meta:
                    parameter.data = parameter.data.cpu()
        return self._layers[first:]

    def post_init(self) -> None:
        if self.streamer is not None:
            raise OffloadError("post_init() was called before")
        if not any(True for layer in self._layers for _ in layer.parameters()):
            return  # another rank has them
        self.streamer = offload_layers(self._layers, device=self._device, config=self.config)

    def sync_prev_onload(self) -> None:
        if self.streamer is not None:
            self.streamer.sync()

    def join_after_forward(self) -> None:
        if self.streamer is not None:
            self.streamer.join()

    @abstractmethod
    def _selected(self, layer: int, module: nn.Module) -> Iterator[nn.Parameter]:
        """The parameters of a layer that go to the host while the model is built."""


class PrefetchOffloader(_StreamingOffloader):
    """Streams the last `num_in_group` of every `group_size` layers, through as many layers' bytes as `prefetch_step`.

    Args:
        group_size, num_in_group: layer i is offloaded when `i % group_size >= group_size - num_in_group`.
        prefetch_step: how many offloaded layers the device holds at once.
        offload_params: name segments; unmatched parameters of an offloaded layer stay resident. None: all match.
        mode: where they go; "cpu" is pinned host memory.
    """

    def __init__(
        self,
        group_size: int,
        num_in_group: int,
        prefetch_step: int,
        offload_params: Iterable[str] | None = None,
        mode: Literal["cpu"] = "cpu",
    ) -> None:
        if mode != "cpu":
            raise ConfigError(f"mode = {mode!r}: there is only 'cpu'")
        part = PrefetchOffloadConfig(
            offload_group_size=group_size,
            offload_num_in_group=num_in_group,
            offload_prefetch_step=prefetch_step,
            offload_params=frozenset(offload_params or ()),
        )
        super().__init__(OffloadConfig(offload_backend="prefetch", prefetch=part))

    def _selected(self, layer: int, module: nn.Module) -> Iterator[nn.Parameter]:
        part = self.config.prefetch
        if part.offloads(layer):
            yield from (p for name, p in module.named_parameters() if selects(part.offload_params, name))


class UVAOffloader(_StreamingOffloader):
    """Zero-copy: parameters go to pinned host memory in order, up to a number of bytes, and kernels read them there.

    Args:
        cpu_offload_max_bytes: bytes to place on the host; the parameter that reaches them is the last.
        cpu_offload_params: name segments; others stay resident. None: all match.
    """

    def __init__(self, cpu_offload_max_bytes: int, cpu_offload_params: Iterable[str] | None = None) -> None:
        gib, names = cpu_offload_max_bytes / 2**30, frozenset(cpu_offload_params or ())
        part = UVAOffloadConfig(cpu_offload_gb=gib, cpu_offload_params=names)
        super().__init__(OffloadConfig(offload_backend="uva", uva=part))
        self._left_nbytes = cpu_offload_max_bytes

    def _selected(self, layer: int, module: nn.Module) -> Iterator[nn.Parameter]:
        for name, parameter in module.named_parameters():
            if self._left_nbytes > 0 and selects(self.config.uva.cpu_offload_params, name):
                self._left_nbytes -= parameter.nbytes
                yield parameter


def create_offloader(config: OffloadConfig) -> BaseOffloader:
    """The offloader that a configuration selects; `NoopOffloader` where it offloads nothing."""
    if config.backend == "none":
        return NoopOffloader()
    found: _StreamingOffloader
    if config.backend == "prefetch":
        part = config.prefetch
        size, num, step = part.offload_group_size, part.offload_num_in_group, part.offload_prefetch_step
        found = PrefetchOffloader(size, num, step, part.offload_params)
    else:
        found = UVAOffloader(config.uva.nbytes, config.uva.cpu_offload_params)
    found.config = config
    return found


def get_offloader() -> BaseOffloader:
    """The offloader of this process, where an engine keeps one; `NoopOffloader` until one is set."""
    return BaseOffloader._current or NoopOffloader()


def set_offloader(instance: BaseOffloader | None) -> None:
    """Make an offloader the one of this process; None: none."""
    BaseOffloader._current = instance
