"""`offload_pipeline()`: all components of a diffusers pipeline in one budget. Moves no bytes itself."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from weightstream.adapters.diffusers import pipeline
from weightstream.adapters.diffusers.dry_run import ComponentCall
from weightstream.errors import (
    ConfigError,
    InvariantError,
    OffloadError,
    PlanError,
    UnsupportedError,
    WeightstreamError,
)
from weightstream.inputs.builder import BudgetCheck, CallerFacts, OffloadBuilder, assembled
from weightstream.inputs.gathering import Sketch, sketch_of
from weightstream.inputs.machine import Kernels, machine_of
from weightstream.inputs.pipeline_planning import (
    Components,
    Shared,
    SharedBudget,
    budget_of,
    check_given,
    heaviest,
    known_of,
    plan_of_call,
    plan_of_shares,
    rehearse_for_plan,
    rehearsed,
    share_budget,
)
from weightstream.measure.progress import bars
from weightstream.plan.candidates import Share
from weightstream.plan.pipeline import PipelinePlan
from weightstream.plan.units import human
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.devices.opening import opened_backend
from weightstream.runtime.devices.warmup import preloading
from weightstream.runtime.ring.shared_memory import SharedMemory
from weightstream.runtime.ring.timeline import Kind
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.streamer.base import StreamerGroup
from weightstream.runtime.streamer.stats import Stats, continued
from weightstream.runtime.streamer.streamer import Streamer
from weightstream.runtime.tensors.leaves import leaves_of, storage_of
from weightstream.runtime.tensors.thread_state import restored
from weightstream.runtime.trace import Trace
from weightstream.runtime.weights.alias_groups import shared_between
from weightstream.settings.arguments import check_source, refuse_training, requested_dtype, resolve_config
from weightstream.settings.config import OffloadConfig
from weightstream.store.ending import finalize
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import Memory

logger = logging.getLogger("weightstream")


def offload_pipeline(
    pipe: Any,
    *,
    device: torch.device | str | int | None = None,
    device_budget: int | str | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    config: OffloadConfig | str | Path | None = None,
    **settings: Any,
) -> Any:
    """Stream the weights of all components of a diffusers pipeline within one budget, bit for bit.

    Components run one after another, so they share one ring of device memory. The rest of the budget holds resident
    weights, first of the component that moves most bytes in a call.

    Args:
        pipe: a pipeline whose components are loaded. It stays the same object.
        device: the device that computes. Default: the current CUDA GPU, or the CPU if there is no GPU.
        device_budget: bytes of device memory for the weights of all components, as an int or as text such as `"6GiB"`.
            Activations come on top. Default: the free memory, minus headroom and the activations of the component that
            needs most.
        example_inputs: keyword arguments of a typical call, such as `{"prompt": …, "height": 768,
            "num_inference_steps": 20}`. The call is traced with meta tensors. Default: a call with only a prompt.
        config: all settings in one object; keyword arguments override it, as for `offload`.
        settings: other settings, as for `offload`.

    Returns:
        The pipeline. Its `PipelineStreamer` is at `pipe.weightstream`.

    Raises:
        PlanError: the components cannot run within the budget; the message holds the arithmetic.
        ConfigError, OffloadError: as for `offload`.

    Examples:
        >>> import weightstream
        >>> pipe = weightstream.offload_pipeline(pipe, device_budget="6GiB")  # doctest: +SKIP
        >>> pipe("a cat on the moon", height=768, width=768).images[0].save("cat.png")  # doctest: +SKIP
    """
    config = resolve_config(config, device_budget=device_budget, **settings)
    refuse_training(config, of=type(pipe).__name__)
    _refuse(pipe)
    check_given(config, example_inputs)
    with opened_backend(config.device_for(device), config) as backend, torch.no_grad():
        _offloaded(pipe, backend, config, example_inputs or {})
    return pipe


def pipeline_from_pretrained(
    path_or_repo_id: str | Path,
    *,
    device: torch.device | str | int | None = None,
    device_budget: int | str | None = None,
    dtype: str | torch.dtype | None = None,
    torch_dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    base: str | Path | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    config: OffloadConfig | str | Path | None = None,
    offload_folder: str | Path | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Load a diffusers pipeline directly from its safetensors files, and stream it. There is no second copy in RAM.

    Args:
        path_or_repo_id: a folder, a repository on the Hugging Face Hub, or a single file with all components.
        device: as for `offload_pipeline`.
        device_budget: as for `offload_pipeline`, whose other settings are keyword arguments here, too.
        dtype: the dtype of all components. "auto", the default, keeps the dtypes of the files. Any other casts the
            weights once, into `offload_folder`.
        torch_dtype: an older name of `dtype`.
        variant: the variant of the files, such as "fp16". Components without it are loaded from their plain files.
        base: for a single file, the folder or repository with the configs of such a pipeline. Default: diffusers
            recognises the pipeline by the names of its weights.
        example_inputs: as for `offload_pipeline`.
        config: as for `offload_pipeline`.
        offload_folder: as for `from_pretrained`.
        progress: as for `from_pretrained`.
        kwargs: arguments of diffusers, such as `revision`; and components by name: a module, None, or the path of a
            folder or of a single file (.safetensors or .gguf) from which the component is loaded.

    Returns:
        The pipeline, of the class that diffusers would return. Its `PipelineStreamer` is at `pipe.weightstream`.

    Raises:
        CheckpointError: a file is missing, malformed or of an unsupported format; the message names it.
        UnsupportedError: diffusers is not installed, or a kind of component is not supported.
        PlanError, ConfigError, OffloadError: as for `offload_pipeline`.

    Examples:
        >>> import weightstream
        >>> pipe = weightstream.pipeline_from_pretrained("./FLUX.1-dev", device_budget="6GiB")  # doctest: +SKIP
        >>> pipe("a cat on the moon").images[0].save("cat.png")  # doctest: +SKIP
    """
    try:
        from weightstream.adapters.diffusers.load import load_pipeline
    except ImportError as error:
        raise UnsupportedError(
            f"pipeline_from_pretrained needs diffusers: pip install 'weightstream[diffusers]' ({error})"
        ) from error
    settings = OffloadConfig.take_from(kwargs) | {"device_budget": device_budget, "offload_folder": offload_folder}
    check_source(path_or_repo_id)
    config = resolve_config(config, **settings)
    refuse_training(config, of=str(path_or_repo_id))
    check_given(config, example_inputs)
    with opened_backend(config.device_for(device), config, loads=True) as backend, ExitStack() as on_failure:
        dtype = requested_dtype(dtype, torch_dtype)
        kernels = Kernels(backend, config, progress)
        with preloading(backend.device, generates=False):
            loaded = load_pipeline(
                path_or_repo_id,
                dtype=dtype,
                variant=variant,
                base=base,
                offload_folder=config.offload_folder,
                progress=bars(progress),
                verify_checksums=config.verify_checksums,
                expect=kernels.expect,
                decode=kernels.are_missing,
                device=backend.device,
                **kwargs,
            )
        kernels.wait()
        for owned in loaded.folders:
            on_failure.callback(owned.close)
        _refuse(loaded.pipe)
        with torch.no_grad():
            _offloaded(loaded.pipe, backend, config, example_inputs or {}, loaded.of, loaded.folders, progress)
        on_failure.pop_all()
    return loaded.pipe


def _offloaded(
    pipe: Any,
    backend: Backend,
    config: OffloadConfig,
    arguments: Mapping[str, Any],
    memories: Callable[[str], Sequence[Memory]] = lambda component: (),
    folders: Sequence[OffloadFolder] = (),
    progress: bool | None = None,
) -> PipelineStreamer:
    """Plan every component in its share of the budget, and put the plans in force."""
    modules = pipeline.modules_of(pipe)
    common = shared_between(modules)
    elsewhere = {name: frozenset(t for t, owner in common.get(name, {}).items() if owner != name) for name in modules}
    # a component whose tensors all belong to other components has nothing to stream
    modules = {
        name: m for name, m in modules.items() if any(id(leaf.tensor) not in elsewhere[name] for leaf in leaves_of(m))
    }
    calls = [call for call in rehearsed(pipe, arguments) if call.component in modules]
    with ExitStack() as stack:
        facts = {
            name: CallerFacts(memories=memories(name), elsewhere=elsewhere[name], progress=progress) for name in modules
        }
        assemblies = {
            name: stack.enter_context(assembled(module, backend, config, facts[name]))
            for name, module in modules.items()
        }
        parts = Components(assemblies, calls, lambda module: _sketch(module, backend, config))
        budget, shared_budget = _shares(parts, assemblies, calls, common)
        with suppress(PlanError):  # a component has no room once it is cast: reported when that happens
            if short := plan_of_shares(calls, parts, shared_budget).shortage:
                logger.warning("device memory may run out: %s", short)
        block = SharedMemory(backend, shared_budget.block_nbytes)
        streamer = PipelineStreamer(pipe, backend, config, block, folders, tuple(modules), budget)
        with ExitStack() as on_failure:
            on_failure.callback(streamer.remove)
            for name, shared in shared_budget.components.items():  # the component that moves most bytes first
                kinds = frozenset(call.kind for call in heaviest(parts, calls).values() if call.component == name)
                streamer.stream(name, assemblies[name], shared, kinds)
            on_failure.pop_all()
    logger.info("%s", streamer)
    return streamer


class _Shares(NamedTuple):
    """Bytes of device memory for the weights of all components, and how these share them."""

    budget: int
    shared: SharedBudget


def _shares(
    parts: Components,
    assemblies: Mapping[str, OffloadBuilder],
    calls: Sequence[ComponentCall],
    common: Mapping[str, Collection[int]],
) -> _Shares:
    """The budget, and the part of each component in it.

    Weights that components have in `common` stay on the device if they fit, as the turns of several components read
    them.
    """
    before = {name: assembly.inputs for name, assembly in assemblies.items()}
    for kept in (True, False) if common else (False,):
        for name, assembly in assemblies.items():
            aliases = assembly.gatherer.aliases_of(common.get(name, ())) if kept else frozenset[str]()
            assembly.inputs = before[name].keeping(aliases)
        known = known_of(parts, calls)
        budget = budget_of({name: planned_for.inputs for name, planned_for in known.items()}, calls)
        try:
            return _Shares(budget, share_budget(parts, known, calls, budget))
        except PlanError:
            if not kept:
                raise
    raise InvariantError("no part of the budget was tried")


def _sketch(module: nn.Module, backend: Backend, config: OffloadConfig) -> Sketch:
    return sketch_of(module, None, config, machine_of(backend, config))


def _refuse(pipe: Any) -> None:
    if not pipeline.is_pipeline(pipe):
        raise ConfigError(f"{type(pipe).__name__} is neither a torch module nor a diffusers pipeline")
    if isinstance(getattr(pipe, "weightstream", None), PipelineStreamer):
        raise OffloadError(f"{type(pipe).__name__} is offloaded already: call pipe.weightstream.remove() first")
    if not (parts := pipeline.modules_of(pipe)):
        raise ConfigError(f"{type(pipe).__name__} has no component with weights")
    there = [name for name, module in parts.items() if getattr(module, forward_patch.ATTRIBUTE, None) is not None]
    if there:
        others = [f"weightstream.offload(pipe.{name})" for name in parts if name not in there]
        raise OffloadError(
            f"{', '.join(there)} of this {type(pipe).__name__} are offloaded already, each with a budget of its own. "
            + (f"Offload the others one by one: {', '.join(others)}; or " if others else "To plan all in one budget, ")
            + "first call remove() of the streamers of those components"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStats:
    """Counters of a pipeline's streamers.

    Attributes:
        components: the counters of each component, by name, as `Streamer.stats` returns them.
        held_nbytes: bytes held by place, as in `Stats`; the memory that all components share counts once.
    """

    components: Mapping[str, Stats]
    held_nbytes: dict[str, int]


class _Part(NamedTuple):
    """A component that streams, held weakly: the component keeps its streamer alive, and the streamer its builder.

    Attributes:
        streamer: its streamer.
        assembly: the builder of the streamer.
        share: its share of the budget.
        settle: waits for copies in flight when the streamer is freed.
    """

    streamer: weakref.ref[Streamer]
    assembly: weakref.ref[OffloadBuilder]
    share: Share
    settle: weakref.finalize[..., Streamer]


class _HeldTensor(NamedTuple):
    """A tensor of a module, its dict and key in the module, and a function that returns its data from before."""

    holder: dict[str, Any]
    key: str
    tensor: torch.Tensor
    values: Callable[[], torch.Tensor]

    def put_back(self) -> None:
        """Have the module hold the tensor again, with its data."""
        self.holder[self.key], self.tensor.data = self.tensor, self.values()


def _tensors(model: nn.Module) -> list[_HeldTensor]:
    """Every tensor of a model."""
    holders = [named for module in model.modules() for named in (module._parameters, module._buffers)]
    return [
        _HeldTensor(holder, key, tensor, _values_of(tensor))
        for holder in holders
        for key, tensor in holder.items()
        if tensor is not None
    ]


def _append(found: list[Any], change: Callable[[], Any]) -> None:
    found.append(change())


def _values_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that returns, at any later time, the data that the tensor shows now.

    It holds no tensor, which would look like a view that is held outside of the model.
    """
    if (storage := storage_of(tensor)) is None:
        data = tensor.data
        return lambda: data
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    dtype, device = tensor.dtype, tensor.device
    return lambda: torch.empty(0, dtype=dtype, device=device).set_(storage, *place)


def _settle(backend: Backend) -> None:
    """Wait for copies in flight. Not in a capture, which a wait would break: a capture copies nothing that is freed."""
    if not backend.capturing():
        backend.synchronize()


class PipelineStreamer(StreamerGroup):
    """Streams the weights of a pipeline's components. Made by `offload_pipeline`.

    A context manager that ends with `remove()`. It does not keep components alive: a component that the pipeline drops,
    and that nothing else refers to, is freed with its weights.
    """

    def __init__(
        self,
        pipe: Any,
        backend: Backend,
        config: OffloadConfig,
        block: SharedMemory,
        folders: Sequence[OffloadFolder],
        names: Sequence[str],
        budget: int,
    ) -> None:
        self._pipe, self._backend, self._config, self._block = pipe, backend, config, block
        self._folders = folders  # folders of weights that had to be converted
        self._names = names  # in the order in which components are expected to run
        self._parts: dict[str, _Part] = {}
        self._past: dict[str, Stats] = {}  # of earlier streamers of components that were cast since
        self._budget_check = BudgetCheck(lambda: self.stats().held_nbytes["device"], lambda: budget)
        self._detach = pipeline.attach_pipeline(pipe, self, backend.device)

    @property
    def components(self) -> dict[str, Streamer]:
        """The streamers, by the pipeline's names of the components."""
        found = {name: self._parts[name].streamer() for name in self._names if name in self._parts}
        return {name: streamer for name, streamer in found.items() if streamer is not None}

    def _assemblies(self) -> dict[str, OffloadBuilder]:
        found = {name: self._parts[name].assembly() for name in self._names if name in self._parts}
        return {name: assembly for name, assembly in found.items() if assembly is not None}

    @property
    def streamers(self) -> Mapping[str, Streamer]:
        return self.components

    @property
    def device(self) -> torch.device:
        return self._backend.device

    def stream(self, name: str, assembly: OffloadBuilder, shared: Shared, kinds: frozenset[Kind]) -> None:
        """Stream a component by its plan, which was made for calls of these kinds."""
        assembly.inputs, assembly.known = shared.inputs, kinds
        assembly.recast = partial(self._recast, name)
        entries = pipeline.entries_of(assembly.model)
        streamer = assembly.attach(shared.plan, self._block, entries, self._budget_check.check)
        settle = finalize(streamer, _settle, self._backend)  # no copy may be in flight from what is freed
        settle.atexit = False
        self._parts[name] = _Part(weakref.ref(streamer), weakref.ref(assembly), shared.share, settle)

    @restored
    def _recast(self, name: str, cast: Callable[[], object]) -> None:
        """Run `cast`, which casts or resizes a component, and stream it again. Pipelines cast a VAE around its calls.

        On an error the component streams as before.
        """
        streamer, assembly, share = self.components[name], self._assemblies()[name], self._parts[name].share
        before = continued(streamer.stats(), self._past.get(name))
        streamer.remove()
        self._parts[name].settle.detach()
        with torch.inference_mode(False), torch.no_grad():
            tensors = _tensors(assembly.model)
            try:
                cast()
                self._stream_again(name, assembly, share)
            except BaseException as error:
                for tensor in tensors:
                    tensor.put_back()
                self._stream_again(name, assembly, share)
                if not isinstance(error, WeightstreamError):
                    raise
                raise OffloadError(
                    f"{name} is cast or resized while the pipeline is offloaded, and does not fit in its share of the "
                    "budget then: do it before, or give offload_pipeline() example_inputs= of a call that casts it, or "
                    f"a larger device_budget= ({error})"
                ) from error
        self._past[name] = before

    def _stream_again(self, name: str, past: OffloadBuilder, share: Share) -> None:
        with assembled(past.model, self._backend, self._config, CallerFacts(elsewhere=past.elsewhere)) as assembly:
            inputs = replace(assembly.inputs, share=share)
            self.stream(name, assembly, Shared(inputs, inputs.plan().plan), past.known)

    def plan(
        self, *, steps: int | None = None, height: int | None = None, width: int | None = None, **call: Any
    ) -> PipelinePlan:
        """Predict the time and memory of a call of the pipeline, before it runs, from a trace on shapes.

        Args:
            steps: denoising steps (`num_inference_steps`). Default: the pipeline's.
            height, width: size of the image in pixels. Default: the pipeline's.
            call: more keyword arguments of the call, such as `prompt` or `num_images_per_prompt`.

        Returns:
            The plan of the call.

        Raises:
            ConfigError: the pipeline does not take these keyword arguments.
            OffloadError: the call cannot be traced on shapes, or the pipeline is not offloaded any more.
        """
        if not self._parts:
            raise OffloadError("plan() after remove(): nothing streams any more")
        named = {"num_inference_steps": steps, "height": height, "width": width}
        calls, notes = rehearse_for_plan(self._pipe, call | {k: v for k, v in named.items() if v is not None})
        now, plain = pipeline.modules_of(self._pipe), self._assemblies()
        for name in dict.fromkeys(call.component for call in calls):
            if name not in plain or pipeline.plain_of(now[name]) is not pipeline.plain_of(plain[name].model):
                calls = [call for call in calls if call.component != name]
                notes += (f"{name} is not in this plan: it was set after offload_pipeline(), and does not stream",)
        plans = {name: streamer.plan for name, streamer in self.components.items()}
        shared = {name: part.share for name, part in self._parts.items()}
        parts = Components(plain, calls, lambda module: _sketch(module, self._backend, self._config))
        return plan_of_call(calls, parts, plans, shared, self._block.memory.numel(), notes)

    def stats(self) -> PipelineStats:
        """Counters and bytes held, as of now."""
        found = {name: continued(s.stats(), self._past.get(name)) for name, s in self.components.items()}
        held = Counter[str]()
        plans = {name: streamer.plan for name, streamer in self.components.items()}
        for name, stats in found.items():
            plan = plans[name]
            held.update(stats.held_nbytes)
            held["device"] -= plan.ring_nbytes + plan.buffer_nbytes
        held["device"] += self._block.memory.numel()
        return PipelineStats(components=found, held_nbytes=dict(held))

    def _title(self) -> str:
        if not self._parts:
            raise OffloadError("trace() after remove(): nothing streams any more")
        return f"{type(self._pipe).__name__} on {self.device}"

    def _add_trace(self, whole: Trace, name: str, part: Trace) -> None:
        whole.spans.extend(replace(span, name=f"{name}: {span.name}") for span in part.spans)

    def changing(self, change: Callable[[], Any]) -> Any:
        """Run `change`, which computes with adapters and weights between steps, such as fusing.

        Meanwhile each added tensor is where the weights are.
        """
        for streamer in self.components.values():
            streamer.place_added(None)
        try:
            return change()
        finally:
            for streamer in self.components.values():
                streamer.place_added(self.device)

    def resizing(self, change: Callable[[], Any]) -> Any:
        """Run `change`, which resizes the embedding tables of text encoders, and stream these again."""
        found: list[Any] = []
        work: Callable[[], object] = partial(_append, found, change)
        # nested: no text encoder streams while `change` runs, and if it fails, all of them stream as before
        for name in self.components:
            if name.startswith("text_encoder"):
                work = partial(self._recast, name, work)
        work()
        return found[0]

    def remove(self) -> None:
        """Bring every weight back to where it was, and restore the pipeline. May be called twice."""
        self.refuse_inside()
        for streamer in self.components.values():
            streamer.remove()
        for part in self._parts.values():
            part.settle.detach()
        self._detach()
        self._parts = {}
        self._block.close()
        self._backend.close()
        for folder in self._folders:
            folder.close()

    def __str__(self) -> str:
        lines = [f"{name}: {streamer.plan.summary()}" for name, streamer in self.components.items()]
        return "\n".join([*lines, f"one ring of {human(self._block.memory.numel())} for all"])
