"""Offloaders for inference engines: take layers while the engine builds the model, stream them once it is loaded.

The selected weights go to host memory, layer by layer. `post_init` hands all layers to a streamer, in which weights
have fixed addresses. The offloader inside of vLLM is `weightstream.integrations.vllm.plugin`.
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

from weightstream.adapters.modules.moe import PicksOf, picks_of
from weightstream.adapters.modules.partition import GRAINS, Grain
from weightstream.api.offload import offload_layers
from weightstream.errors import ConfigError, OffloadError, PlanError
from weightstream.runtime.streamer.streamer import Streamer
from weightstream.runtime.tensors.leaves import leaves_of, storage_of
from weightstream.settings.arguments import selects
from weightstream.settings.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

logger = logging.getLogger("weightstream")

EngineStep = Callable[[], int | None]  # runs a step; may return the bytes of device memory that are left for weights


class BaseOffloader(ABC):
    """The interface that an engine calls: `wrap_modules`, then `post_init`; the other two methods around graphs.

    If a step is captured as several graphs, they must be launched in the order of their capture, up to the one with the
    last offloaded layer.
    """

    supports_tower_offload: ClassVar[bool] = False  # for modules that only some steps run, such as vision towers

    _current: ClassVar[BaseOffloader | None] = None

    @abstractmethod
    def wrap_modules(self, modules: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        """Take layers one by one. A generator builds each layer after those before it have been offloaded.

        Weights may be loaded, replaced, added or deleted until `post_init`.

        Args:
            modules: the layers.
            prefix: the name of modules that are not layers, such as `visual`. Settings select by it, followed by the
                name of the parameter.

        Returns:
            Every module, in order.
        """

    @abstractmethod
    def post_init(self, step: EngineStep | None = None, *, is_compiled: bool = False, in_graphs: bool = False) -> None:
        """Take the final value, shape, stride and dtype of every weight, allocate memory, and start the first copies.

        Args:
            step: runs an eager step of the model. With it units may be parts of layers, if a plan for a budget is
                faster with them: the step is watched for weights that are read outside of their unit. It may return the
                bytes of device memory that are left for weights; the plan is then made again for these.
            is_compiled: the layers will be compiled. With a `step`, units are single matrices then. The compiler fuses
                the operators between matrices; if it also fused operators across the edge of a layer, results would be
                rounded differently with and without a unit that ends there.
            in_graphs: steps will be CUDA graphs, in which launches take no time.

        Raises:
            PlanError, ConfigError, OffloadError: as for `weightstream.offload`. The layers are restored.
        """

    @abstractmethod
    def sync_prev_onload(self) -> None:
        """Make compute wait for the copies in flight. To be called before a graph is captured or launched."""

    @abstractmethod
    def join_after_forward(self) -> None:
        """Join the copies that a capture started and did not wait for. To be called inside the capture, at its end."""


class NoopOffloader(BaseOffloader):
    """Offloads nothing."""

    def wrap_modules(self, modules: Iterable[nn.Module], prefix: str = "") -> list[nn.Module]:
        return list(modules)

    def post_init(self, step: EngineStep | None = None, *, is_compiled: bool = False, in_graphs: bool = False) -> None:
        pass

    def sync_prev_onload(self) -> None:
        pass

    def join_after_forward(self) -> None:
        pass


class StreamingOffloader(BaseOffloader):
    """Base of all offloaders that stream: it takes layers, and hands them to a streamer."""

    streamer: Streamer | None = None

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self.picks_of: PicksOf = picks_of  # how a module of the engine reads single rows of its stacks
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
            self._to_host(module, self._selected(index, module, prefix))
        return taken

    def hold_on_host(self, module: nn.Module) -> None:
        """Move the weights of a part of a layer to the host again, after its engine replaced them."""
        self._to_host(module, module.parameters())

    def _to_host(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        viewed = _viewed(module)
        for parameter in parameters:
            # Vectors stay on the device: some are computed while they are loaded (Mamba's A), and a CPU rounds `exp`
            # differently.
            if parameter.dim() > 1 and not parameter.is_meta and id(parameter) not in viewed:
                parameter.data = parameter.data.cpu()

    def give_back(self, names: Collection[str]) -> None:
        """Move layers back to the device that are not to be offloaded after all."""
        for name in names:
            self.layers.pop(name).to(self._device)

    def post_init(self, step: EngineStep | None = None, *, is_compiled: bool = False, in_graphs: bool = False) -> None:
        if self.streamer is not None:
            raise OffloadError("post_init() was called before")
        if not any(True for layer in self.layers.values() for _ in layer.parameters()):
            return  # another rank has the weights
        if step is not None and (is_compiled or self.config.backend == "none"):
            self.streamer = self._learned(GRAINS[-1:] if is_compiled else GRAINS, step, in_graphs)
            return
        self.streamer = self._whole(self.config, step, in_graphs)
        if self.streamer is None and step is not None:
            logger.info("layers are entered by other methods than forward, so each matrix is one unit")
            self.streamer = self._learned(GRAINS[-1:], step, in_graphs)

    def _whole(self, config: OffloadConfig, step: EngineStep | None, in_graphs: bool) -> Streamer | None:
        """A streamer whose units are layers; None if the step reads weights of a layer outside of its forward."""
        with self._attached(config, ("block",), in_graphs) as streamer:
            if step is None or not streamer.reads_outside(step):
                streamer.fix()
                return streamer
            streamer.remove()
        return None

    def _learned(self, grains: tuple[Grain, ...], step: EngineStep, in_graphs: bool) -> Streamer:
        """A streamer that has watched steps, in the budget that `step` returned.

        With finer units, weights that a step reads outside of its unit, or does not reach, stay on the device. If these
        do not fit, each layer is one unit.
        """
        room: int | None = None
        refused: PlanError | None = None
        is_in_step = False  # an error of the engine, such as one of another rank, is no refusal of a plan

        def watched() -> None:
            nonlocal room, is_in_step
            is_in_step = True
            left_nbytes = step()
            is_in_step = False
            room = None if left_nbytes is None else max(1, left_nbytes)

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
            if room is None or is_in_step:
                raise
            refused = error  # weights that must stay on the device do not fit, or no plan does
        try:
            whole = self._whole(self.config if room is None else self.config.within(room), step, in_graphs)
        except PlanError as error:
            raise refused or error from None
        if whole is None:
            raise refused or PlanError(
                "weights are read outside of their modules, and do not fit on the device for good: raise the budget"
            )
        logger.warning(
            "weights that are read outside of their modules do not fit on the device for good, so each layer is one "
            "unit: compiled code may round differently at the edges of layers"
        )
        return whole

    @contextmanager
    def _attached(self, config: OffloadConfig, grains: tuple[Grain, ...], in_graphs: bool) -> Iterator[Streamer]:
        """A streamer of all layers; if the block fails they are restored."""
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as on_failure:
            streamer = offload_layers(
                self.layers,
                device=self._device,
                config=config,
                grains=grains,
                in_graphs=in_graphs,
                picks_of=self.picks_of,
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
    """The ids of tensors that share their memory with another tensor of the module, which would not move with them."""
    by_memory: defaultdict[int, set[int]] = defaultdict(set)
    for leaf in leaves_of(module):
        if (storage := storage_of(leaf.tensor)) is not None:
            by_memory[storage.data_ptr()].add(id(leaf.tensor))
    return {key for keys in by_memory.values() if len(keys) > 1 for key in keys}


class BudgetOffloader(StreamingOffloader):
    """Streams the weights that do not fit in a budget, by a plan: see `weightstream.offload`.

    Args:
        device_budget: bytes of device memory for the weights of the layers, the ring and the decode buffer: an int, a
            size such as "6GiB" or a share such as "40%". Default: the free memory minus headroom.
        settings: other settings of `OffloadConfig`, such as `host_budget`, `codec`, `batch` and `tokens`.
    """

    def __init__(self, device_budget: int | str | None = None, **settings: Any) -> None:
        super().__init__(OffloadConfig.from_kwargs(device_budget=device_budget, **settings))

    def _selected(self, layer: int, module: nn.Module, prefix: str) -> Iterator[nn.Parameter]:
        yield from module.parameters()  # there is no plan yet


class PrefetchOffloader(StreamingOffloader):
    """Streams the last `num_in_group` layers of every `group_size`, through a ring of `prefetch_step` layers.

    Args:
        group_size: layers in a group. Layer i is offloaded if `i % group_size >= group_size - num_in_group`.
        num_in_group: layers of each group that are offloaded, the last ones.
        prefetch_step: the number of offloaded layers that the device holds at once.
        offload_params: segments of parameter names. Other parameters of an offloaded layer stay resident. None: all
            parameters are offloaded.
        mode: where the weights go; only "cpu", pinned host memory.

    Raises:
        ConfigError: the numbers contradict each other, or the mode is unknown.
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
    """Moves parameters to pinned host memory, in order, up to a number of bytes. Kernels read them there (zero-copy).

    Args:
        cpu_offload_max_bytes: bytes to place on the host. The parameter that reaches this number is the last one.
        cpu_offload_params: segments of parameter names; other parameters stay resident. None: all are offloaded.

    Raises:
        ConfigError: the number of bytes is negative.
    """

    supports_tower_offload = True  # weights that are read in place need no order of steps

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
    """Create the offloader that a configuration selects; a `NoopOffloader` if it offloads nothing.

    Args:
        config: the classic settings select `PrefetchOffloader` or `UVAOffloader`, a budget selects a planned one.

    Raises nothing: a configuration is checked when it is made.
    """
    offloader: StreamingOffloader
    if config.backend == "none":
        if not config.has_budget:
            return NoopOffloader()
        offloader = BudgetOffloader(config.device_budget)
    elif config.backend == "prefetch":
        part = config.prefetch
        size, num, step = part.offload_group_size, part.offload_num_in_group, part.offload_prefetch_step
        offloader = PrefetchOffloader(size, num, step, part.offload_params)
    else:
        offloader = UVAOffloader(config.uva.nbytes, config.uva.cpu_offload_params)
    offloader.config = config
    return offloader


def get_offloader() -> BaseOffloader:
    """Return the offloader of this process; a `NoopOffloader` until one is set. Raises nothing."""
    return BaseOffloader._current or NoopOffloader()


def set_offloader(instance: BaseOffloader | None) -> None:
    """Set the offloader of this process.

    Args:
        instance: the offloader that `get_offloader` returns from now on; None: unset it.

    Raises nothing.
    """
    BaseOffloader._current = instance
