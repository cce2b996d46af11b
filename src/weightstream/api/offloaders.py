"""The life cycle that an inference engine drives: wrap layers while the model is built, take over once it is loaded.

A thin face: what is selected goes to host memory layer by layer; `post_init` hands all layers to a streamer, whose
weights keep their fixed addresses from then on. The offloader inside of vLLM is
`weightstream.integrations.vllm.plugin`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from weightstream.adapters.modules.partition import GRAINS, Grain
from weightstream.api.offload import offload_layers
from weightstream.errors import ConfigError, OffloadError, PlanError
from weightstream.runtime.streamer.streamer import Streamer
from weightstream.runtime.tensors.leaves import leaves_of, storage_of
from weightstream.settings.arguments import selects
from weightstream.settings.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

logger = logging.getLogger("weightstream")

Step = Callable[[], int | None]  # runs a step, and may tell the bytes that the device has for weights beside it


class BaseOffloader(ABC):
    """What an engine calls: `wrap_modules`, then `post_init`; around graphs `sync_prev_onload`, `join_after_forward`.

    Graphs that are pieces of a step are launched in the order of their capture, and reach its last offloaded layer.
    """

    supports_tower_offload: ClassVar[bool] = False  # modules that not every step runs, such as vision towers

    _current: ClassVar[BaseOffloader | None] = None

    @abstractmethod
    def wrap_modules(self, modules: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        """Take the layers one by one, so that a generator builds each when those before it are offloaded already.

        `prefix` is the name of modules that are no layers, such as `visual`: settings select by it and what follows.
        Returns every module, in order. Weights may be loaded, replaced, added or deleted until `post_init`.
        """

    @abstractmethod
    def post_init(self, step: Step | None = None, *, is_compiled: bool = False, in_graphs: bool = False) -> None:
        """Take the final value, shape, stride and dtype of every weight; allocate; start the first copies.

        Args:
            step: runs a step of the model, eager. Units may be finer than layers then, where a plan for a budget finds
                that faster: the step is watched for weights that are read outside of them. It may return the bytes that
                the device has for weights beside what it took: the plan is made again for these.
            is_compiled: layers will be compiled. With a `step` units are single matrices: a compiler fuses what lies
                between those, and at the edge of a layer, with other roundings than without a unit there.
            in_graphs: steps will be CUDA graphs, so that launches take no time.

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

    def wrap_modules(self, modules: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        return list(modules)

    def post_init(self, step: Step | None = None, *, is_compiled: bool = False, in_graphs: bool = False) -> None:
        pass

    def sync_prev_onload(self) -> None:
        pass

    def join_after_forward(self) -> None:
        pass


class StreamingOffloader(BaseOffloader):
    """What all share that offload: layers that are taken in, and the streamer that takes them over."""

    streamer: Streamer | None = None

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self.layers: dict[str, nn.Module] = {}
        self._device: torch.device | None = None

    def wrap_modules(self, modules: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        if self.streamer is not None:
            raise OffloadError("wrap_modules() after post_init(): the layers have a plan already")
        taken: list[nn.Module] = []
        for module in modules:
            index, name = len(self.layers), prefix or str(len(self.layers))
            is_taken = any(f"{other}.".startswith(f"{name}.") or name.startswith(f"{other}.") for other in self.layers)
            self.layers[f"more_{index}.{name}" if is_taken else name] = module
            taken.append(module)
            if self._device is None:
                self._device = next((p.device for p in module.parameters() if not p.is_meta), None)
            viewed = _viewed(module)
            for parameter in self._selected(index, module, prefix):
                # A vector stays: some are computed as they are loaded (Mamba's A), and a CPU rounds `exp` otherwise.
                if parameter.dim() > 1 and not parameter.is_meta and id(parameter) not in viewed:
                    parameter.data = parameter.data.cpu()
        return taken

    def give_back(self, names: Collection[str]) -> None:
        """Layers that are not to be offloaded after all go back to the device."""
        for name in names:
            self.layers.pop(name).to(self._device)

    def post_init(self, step: Step | None = None, *, is_compiled: bool = False, in_graphs: bool = False) -> None:
        if self.streamer is not None:
            raise OffloadError("post_init() was called before")
        if not any(True for layer in self.layers.values() for _ in layer.parameters()):
            return  # another rank has them
        if step is not None and (is_compiled or self.config.backend == "none"):
            self.streamer = self._learned(GRAINS[-1:] if is_compiled else GRAINS, step, in_graphs)
        else:
            self.streamer = self._whole(self.config, in_graphs)

    def _whole(self, config: OffloadConfig, in_graphs: bool) -> Streamer:
        """A streamer whose units are layers."""
        with self._attached(config, ("block",), in_graphs) as streamer:
            streamer.fix()
            return streamer

    def _learned(self, grains: tuple[Grain, ...], step: Step, in_graphs: bool) -> Streamer:
        """A streamer that has watched steps, in the budget that these tell. Each layer is one unit where what they read
        outside of finer ones, or do not reach, has no room to stay on the device."""
        room: int | None = None
        refused: PlanError | None = None

        def watched() -> None:
            nonlocal room
            told = step()
            room = None if told is None else max(1, told)

        try:
            with self._attached(self.config, grains, in_graphs) as streamer:
                has_learned = streamer.learn(watched)
                if room is not None:
                    streamer.rebudget(room)
                    has_learned = streamer.learn(watched)
                if has_learned:
                    streamer.fix()
                    return streamer
                streamer.remove()
        except PlanError as error:
            if room is None:
                raise
            refused = error  # because of what must stay, or there is no room for anything
        try:
            streamer = self._whole(self.config if room is None else self.config.within(room), in_graphs)
        except PlanError as error:
            raise refused or error from None
        logger.warning(
            "weights that are read outside of their modules have no room to stay: each layer is one unit, at whose "
            "edges compiled code may round otherwise"
        )
        return streamer

    @contextmanager
    def _attached(self, config: OffloadConfig, grains: tuple[Grain, ...], in_graphs: bool) -> Iterator[Streamer]:
        """A streamer of all layers; where the block fails they are as they were."""
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as on_failure:
            streamer = offload_layers(
                self.layers, device=self._device, config=config, grains=grains, in_graphs=in_graphs
            )
            on_failure.callback(streamer.remove)
            yield streamer
            on_failure.pop_all()

    def sync_prev_onload(self) -> None:
        if self.streamer is not None:
            self.streamer.sync()

    def join_after_forward(self) -> None:
        if self.streamer is not None:
            self.streamer.join()

    @abstractmethod
    def _selected(self, layer: int, module: nn.Module, prefix: str) -> Iterator[nn.Parameter]:
        """The parameters of a layer that go to the host while the model is built."""


def _viewed(module: nn.Module) -> set[int]:
    """The ids of tensors whose memory another tensor of the module shows: that would go on to show the old one."""
    by_memory: defaultdict[int, set[int]] = defaultdict(set)
    for leaf in leaves_of(module):
        if (storage := storage_of(leaf.tensor)) is not None:
            by_memory[storage.data_ptr()].add(id(leaf.tensor))
    return {key for keys in by_memory.values() if len(keys) > 1 for key in keys}


class BudgetOffloader(StreamingOffloader):
    """Streams what a budget has no room for, planned for it: see `weightstream.offload`.

    Args:
        device_budget: bytes of the device for the weights of the layers, the ring and the decode buffer, as an int, a
            size such as "6GiB" or a share such as "40%". Default: what is free, less headroom.
        settings: others of `OffloadConfig`, such as `host_budget`, `codec`, `batch` and `tokens`.
    """

    def __init__(self, device_budget: int | str | None = None, **settings: Any) -> None:
        super().__init__(OffloadConfig.from_kwargs(device_budget=device_budget, **settings))

    def _selected(self, layer: int, module: nn.Module, prefix: str) -> Iterator[nn.Parameter]:
        yield from module.parameters()  # there is no plan yet


class PrefetchOffloader(StreamingOffloader):
    """Streams the last `num_in_group` of every `group_size` layers, through as many layers' bytes as `prefetch_step`.

    Args:
        group_size, num_in_group: layer i is offloaded when `i % group_size >= group_size - num_in_group`.
        prefetch_step: how many offloaded layers the device holds at once.
        offload_params: name segments; unmatched parameters of an offloaded layer stay resident. None: all match.
        mode: where they go; "cpu" is pinned host memory.

    Raises:
        ConfigError: a number contradicts another, or there is no such mode.
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

    def _selected(self, layer: int, module: nn.Module, prefix: str) -> Iterator[nn.Parameter]:
        part = self.config.prefetch
        if part.offloads(layer):
            yield from (p for name, p in module.named_parameters() if selects(part.offload_params, name))


class UVAOffloader(StreamingOffloader):
    """Zero-copy: parameters go to pinned host memory in order, up to a number of bytes, and kernels read them there.

    Args:
        cpu_offload_max_bytes: bytes to place on the host; the parameter that reaches them is the last.
        cpu_offload_params: name segments; others stay resident. None: all match.

    Raises:
        ConfigError: the number of bytes is negative.
    """

    supports_tower_offload = True  # what is read in place has no order

    def __init__(self, cpu_offload_max_bytes: int, cpu_offload_params: Iterable[str] | None = None) -> None:
        gib, names = cpu_offload_max_bytes / 2**30, frozenset(cpu_offload_params or ())
        part = UVAOffloadConfig(cpu_offload_gb=gib, cpu_offload_params=names)
        super().__init__(OffloadConfig(offload_backend="uva", uva=part))
        self._left_nbytes = cpu_offload_max_bytes

    def _selected(self, layer: int, module: nn.Module, prefix: str) -> Iterator[nn.Parameter]:
        for name, parameter in module.named_parameters(prefix):
            if self._left_nbytes > 0 and selects(self.config.uva.cpu_offload_params, name):
                self._left_nbytes -= parameter.nbytes
                yield parameter


def create_offloader(config: OffloadConfig) -> BaseOffloader:
    """The offloader that a configuration selects; `NoopOffloader` where it offloads nothing.

    Args:
        config: its classic settings select prefetch or zero-copy, else a budget one that is planned. Raises nothing, as
            settings are checked when they are made.
    """
    found: StreamingOffloader
    if config.backend == "none":
        if not config.has_budget:
            return NoopOffloader()
        found = BudgetOffloader(config.device_budget)
    elif config.backend == "prefetch":
        part = config.prefetch
        size, num, step = part.offload_group_size, part.offload_num_in_group, part.offload_prefetch_step
        found = PrefetchOffloader(size, num, step, part.offload_params)
    else:
        found = UVAOffloader(config.uva.nbytes, config.uva.cpu_offload_params)
    found.config = config
    return found


def get_offloader() -> BaseOffloader:
    """The offloader of this process, where an engine keeps one; `NoopOffloader` until one is set. Raises nothing."""
    return BaseOffloader._current or NoopOffloader()


def set_offloader(instance: BaseOffloader | None) -> None:
    """Make an offloader the one of this process.

    Args:
        instance: what `get_offloader` returns from now on; None: none. Raises nothing.
    """
    BaseOffloader._current = instance
