"""Stripes: one model over several devices of a process, which compute its blocks in turn.

Each link carries only the weights of its own device, so the links add up.

Each device has a streamer of its own for the blocks that it computes; the first device also has all other modules.
No operator is split between devices, so results have the same bits as on one. When a block is called, its inputs are
copied to its device, and its outputs back to the first device: code between blocks sees tensors of one device. The
weights of the block are opened, and decompressed, before its inputs are copied. plan/multi_device.py decides which
device computes which block; such an assignment is a *deal*, and the index of a device is its *lane*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from weightstream.adapters.modules import device_map
from weightstream.adapters.steps import static_cache
from weightstream.adapters.steps.decode_steps import cache_in
from weightstream.codec.device import on
from weightstream.errors import OffloadError
from weightstream.inputs.builder import CallerFacts, OffloadBuilder, assembled
from weightstream.inputs.device_split import DeviceSplit, split_over_devices
from weightstream.inputs.gathering import Example, sketch_of
from weightstream.inputs.machine import machine_of
from weightstream.measure import multi_gpu_links
from weightstream.plan import multi_device
from weightstream.plan.multi_device import StripedPlan
from weightstream.plan.planner import Machine, Weights
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.runtime.devices import multi_device_graph
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.ring.graphs import CAPTURED
from weightstream.runtime.ring.state import Gate, StepState
from weightstream.runtime.ring.timeline import Kind, kind_of
from weightstream.runtime.streamer import custom_ops, forward_patch
from weightstream.runtime.streamer.activation_transfer import DeviceCrossing, crossing
from weightstream.runtime.streamer.base import StreamerGroup
from weightstream.runtime.streamer.stats import Stats, over_devices
from weightstream.runtime.streamer.streamer import Streamer
from weightstream.runtime.tensors.leaves import leaves
from weightstream.runtime.tensors.pytree import moved
from weightstream.runtime.tensors.thread_state import restored, restored_block
from weightstream.runtime.tensors.undo import Undo
from weightstream.runtime.trace import Trace
from weightstream.settings.config import OffloadConfig
from weightstream.store.checkpoint import Checkpoint


class Stripes(StreamerGroup):
    """A model over several devices: a streamer per device, and the copies between them. It is at `model.weightstream`.

    A context manager that ends with `remove()`. Nothing is compiled: steps are eager, or captured.

    Attributes:
        model: the model.
        backends: the backend of each device.
        devices: the devices; the first one also computes everything outside of the blocks.
        parts: the streamers, by name of the device.
        names: the name of each device.
        places: the position of each module in the model, by name.
    """

    def __init__(self, model: nn.Module, backends: Sequence[Backend]) -> None:
        self.model = model
        self.backends = backends
        self.devices = tuple(backend.device for backend in backends)
        self.parts: dict[str, Streamer] = {}
        self._gate = Gate()
        self._capturing = backends[0].capturing
        self.names = [str(d) if d.type != "cpu" else f"cpu:{lane}" for lane, d in enumerate(self.devices)]
        self.places = _places(model)
        self._crossings = [DeviceCrossing(self.devices[0], device) for device in self.devices]
        self._undo = Undo()

    def attach(
        self, builders: Mapping[str, OffloadBuilder], planned: multi_device.Planned, lane_of: Mapping[nn.Module, int]
    ) -> None:
        """Put a plan in force for each device, and wrap the forwards of the model and of its blocks.

        On an error nothing is in force, and the builders can be used again.

        Args:
            builders: the builder of each device, by name.
            planned: the plan of each device, by name.
            lane_of: the index of the device that computes each block.
        """
        try:
            self._attach(builders, planned, lane_of)
        except BaseException:
            self.remove()
            raise

    def _attach(
        self, builders: Mapping[str, OffloadBuilder], planned: multi_device.Planned, lane_of: Mapping[nn.Module, int]
    ) -> None:
        session = custom_ops.OpSession()
        self._undo.add(session.close)
        # before the builders wrap the blocks as units: so a unit opens before its block's inputs are copied
        for block, index in lane_of.items():
            if index:
                self._undo.add(forward_patch.surround(block, crossing(self._crossings[index]), session))
        for name, builder in builders.items():
            inputs, lane = planned[name]
            builder.plan_with(inputs)
            with on(builder.device):
                self.parts[name] = part = builder.attach(lane.plan)
            part.refuse_backward("training over several GPUs of one process is not supported: start a process for each")
            self._undo.add(part.remove)
        self._undo.add(forward_patch.surround(self.model, self._run, session))
        self._undo.add(forward_patch.refuse_moves(self.model))
        names = {id(module): name for name, module in self.model.named_modules()}
        map_of = {"": self.devices[0]} | {names[id(block)]: self.devices[index] for block, index in lane_of.items()}
        self._undo.add(device_map.attach_device_map(self.model, self.devices[0], devices=map_of))
        setattr(self.model, forward_patch.ATTRIBUTE, self)
        self._undo.add(self.model.__dict__.pop, forward_patch.ATTRIBUTE, None)

    def keep(self, module: nn.Module) -> None:
        """Move the tensors that a module outside of the blocks holds itself to the first device, until `remove()`."""
        for leaf in leaves(module):
            tensor, before = leaf.tensor, leaf.tensor.data
            with torch.no_grad():
                tensor.data = before.to(self.devices[0])
            self._undo.add(_put_back, tensor, before)

    def on_removal(self, callback: Callable[[], Any]) -> None:
        """Call `callback` at the end of `remove()`."""
        self._undo.add(callback)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._gate.refuse_forked()
        with self._turn():
            # a call of the model from inside its own step, or after `remove()`
            if self._gate.is_running or self._gate.mode is StepState.REMOVED:
                return forward(*args, **kwargs)
            args, kwargs = moved((args, kwargs), self.devices[0])
            step, is_fixed = partial(forward, *args, **kwargs), self._gate.is_fixed
            kind = kind_of(args, kwargs, "fixed" if is_fixed else "forward")
            if not is_fixed:
                self._foresee_call(kind, args, kwargs)
            # nested: the one step is a step of each part, which opens its own units
            for part in reversed(self.parts.values()):
                step = partial(part.run_fixed if is_fixed else part.run, step, kind)
            try:
                self._gate.change(StepState.FORWARD if is_fixed else StepState.EAGER)
                output = step()
            finally:
                self._gate.end_forward()
                self._forget_sent()
            # layers of a static cache report their length on the first device, where positions and masks are computed
            static_cache.tell_lengths_at(cache_in(kwargs), self.devices[0])
            return output

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._gate.turn.taken() as is_first:
            if not is_first:
                yield
                return
            with restored_block(self.device):
                if self._gate.is_cut:
                    self._gate.reset()  # a step was interrupted; the streamers heal themselves
                yield

    def _forget_sent(self) -> None:
        """Drop the copies of blocks' inputs.

        A launched graph writes to tensors without raising their version, so an outdated copy would seem up to date.
        """
        for device_crossing in self._crossings:
            device_crossing.clear()

    def _foresee_call(self, kind: Kind, args: Any, kwargs: Any) -> None:
        if self._capturing():
            raise OffloadError(CAPTURED)
        forward_patch.refuse_transforms()
        for part in self.parts.values():
            part.foresee(kind, args, kwargs)

    # -- plan and statistics ---------------------------------------------------------------------------------------

    @property
    def streamers(self) -> Mapping[str, Streamer]:
        return self.parts

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def plan(self) -> StripedPlan:
        """The plans in force, and the predicted time of a step."""
        return multi_device.predicted_lanes({name: part.lane for name, part in self.parts.items()}, self.places)

    @property
    def learned(self) -> bool:
        """Whether a step was watched, which shows the order of the weights."""
        return all(part.learned for part in self.parts.values())

    def stats(self) -> Stats:
        """Counters and times as in `Streamer.stats`: counters and bytes are sums, and a step is one of the model."""
        return over_devices([part.stats() for part in self.parts.values()], self.plan.step_s)

    def __str__(self) -> str:
        return f"{self._title()}\n{self.plan}"

    def _title(self) -> str:
        return f"{type(self.model).__name__} on {', '.join(self.parts)}"

    def _add_trace(self, whole: Trace, name: str, part: Trace) -> None:
        whole.spans.extend(replace(span, device=name) for span in part.spans)
        whole.experts |= part.experts

    # -- removal -----------------------------------------------------------------------------------------------------

    @restored
    def remove(self) -> None:
        self._gate.refuse_inside()
        with self._turn():
            self.refuse_inside()
            self._gate.change(StepState.REMOVED)
            for device_crossing in self._crossings:
                device_crossing.close()
            self._undo()

    # -- fixed addresses -----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Watch the next step, even if earlier ones were watched: it may read weights that they did not read."""
        for part in self.parts.values():
            part.watch()

    def why_not_fixed(self) -> str | None:
        """The reason why `step` would raise; None if it would not."""
        return next((reason for part in self.parts.values() if (reason := part.why_not_fixed())), None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """As `Streamer.step`, on all devices."""
        self._gate.refuse_forked()
        with self._turn(), ExitStack() as stack:
            # a list, not a generator for `any`: each part has to look for changed code, and then watches its next step
            others = [] if self._gate.is_fixed else [part.sees_other_code() for part in self.parts.values()]
            if not self._gate.is_fixed and not any(others):
                for part in self.parts.values():
                    stack.enter_context(part.step())
                stack.callback(self._gate.reset)
                stack.callback(self._forget_sent)
                self._gate.change(StepState.STEP)
            yield

    @contextmanager
    def capture(self, graph: Any, **options: Any) -> Iterator[None]:
        """As `Streamer.capture`: one graph of the work of all devices."""
        # nested: each part records its own fills and reads of the one graph
        capture: Callable[[], AbstractContextManager[object]] = partial(self._captured, graph, **options)
        for part in self.parts.values():
            capture = partial(part.graphs.capture, graph, capture)
        with self.step(), capture():
            yield

    @contextmanager
    def _captured(self, graph: Any, **options: Any) -> Iterator[None]:
        self._forget_sent()
        try:
            with multi_device_graph.captured(self._computing, graph, **options):
                yield
        finally:
            self._forget_sent()

    def replay(self, graph: Any) -> None:
        """As `Streamer.replay`."""
        # nested: each part queues its own fills before and after the one launch
        launch = partial(multi_device_graph.launch, self._computing, graph)
        for part in self.parts.values():
            launch = partial(part.graphs.replay, graph, launch)
        every = [part.graphs for part in self.parts.values()]
        with self.step() if all(graph in graphs.recordings for graphs in every) else nullcontext():
            for graphs in every:
                graphs.recording_of(graph)  # raises for a graph that it does not know
            self._forget_sent()
            launch()

    @property
    def _computing(self) -> list[Backend]:
        """The backends of the first device, and of all others that compute blocks."""
        others = zip(self.names[1:], self.backends[1:], strict=True)
        return [self.backends[0], *(backend for name, backend in others if name in self.parts)]

    def compile(self, scope: str = "model", **options: Any) -> None:
        """Raises `OffloadError`."""
        raise OffloadError(
            "a model that is spread over several devices cannot be compiled: run its steps eager, or capture them"
        )


def _put_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Make the tensor show its earlier memory again, with its present values, which may have been updated."""
    with torch.no_grad():
        if tensor.data.device != before.device:
            before.copy_(tensor.data)
        tensor.data = before


def stripe(model: nn.Module, backends: Sequence[Backend], config: OffloadConfig, facts: CallerFacts) -> Stripes:
    """Spread a model over the devices of these backends, each with its budget in `config.stripes`.

    Raises the errors of `offload`, and `ConfigError` for a model without repeated blocks.
    """
    forward_patch.refuse_twice(model)
    stripes = Stripes(model, backends)
    try:
        if facts.folder is not None:
            stripes.on_removal(facts.folder.close)
        rates = _rates(backends)
        machines = (machine_of(backend, config, progress=facts.progress) for backend in backends)
        deals = split_over_devices(model, list(map(multi_gpu_links.at_most, machines, rates)), config)
        for module in deals[0].around:
            stripes.keep(module)
        with ExitStack() as assembling:

            def build(deal: DeviceSplit) -> dict[str, OffloadBuilder]:
                builders = {}
                for lane in deal.used:
                    # the folder is closed with the stripes, not with a part
                    lane_facts = replace(facts, folder=None, subset=deal.subset(lane, model))
                    part = _assembled(deal.roots[lane], backends[lane], deal.settings(lane, config), lane_facts)
                    builders[stripes.names[lane]] = builder = assembling.enter_context(part)
                    machine = multi_gpu_links.at_most(builder.inputs.machine, rates[lane])
                    builder.plan_with(replace(builder.inputs, machine=machine))
                return builders

            def inputs_of_deals() -> Iterator[dict[str, PlannerInputs]]:
                yield (first := {name: builder.inputs for name, builder in builders.items()})
                for deal in deals[1:]:
                    yield _inputs_of_other_deal(deal, stripes, config, facts.example, first)

            builders = build(deals[0])
            best, planned = multi_device.fastest_deal(inputs_of_deals(), stripes.places)  # before any weight moves
            if best:  # another deal: its modules need builders of their own
                for builder in builders.values():
                    builder.close()
                builders = build(deals[best])
                inputs = {name: builder.inputs for name, builder in builders.items()}
                planned = multi_device.chosen(inputs, stripes.places)
            stripes.attach(builders, planned, deals[best].lane_of)
    except BaseException:
        stripes.remove()
        raise
    return stripes


def _rates(backends: Sequence[Backend]) -> Sequence[float]:
    """Upper bound of the bytes per second of each link while all of them copy; infinite where that is not measured."""
    devices = tuple(backend.device for backend in backends)
    rates = () if devices[0].type == "cpu" else multi_gpu_links.rates_together(devices)
    return rates or [math.inf] * len(devices)


def _inputs_of_other_deal(
    deal: DeviceSplit,
    stripes: Stripes,
    config: OffloadConfig,
    example: Example | None,
    first: Mapping[str, PlannerInputs],
) -> dict[str, PlannerInputs]:
    """The planner's inputs for another deal, with the weights and machines of the `first` deal.

    Nothing is measured again. The sketch is made without a codec, so that it samples no weights: the compressed sizes
    of the first deal are used.
    """
    weights = reduce(_both, (inputs.weights for inputs in first.values()))
    model, inputs_of = stripes.model, {}
    for lane in deal.used:
        name, settings = stripes.names[lane], deal.settings(lane, config)
        uncompressed = settings.model_copy(update={"codec": "none"})
        subset = deal.subset(lane, model)
        sketch = sketch_of(deal.roots[lane], None, uncompressed, first[name].machine, subset)
        inputs = sketch.inputs
        if example is not None:
            gatherer = replace(sketch.gatherer, backend=stripes.backends[lane])
            inputs = gatherer.for_call(inputs, "forward", example.args, example.kwargs) or inputs
        inputs_of[name] = replace(inputs, config=settings, weights=weights)
    return inputs_of


def _both(one: Weights, other: Weights) -> Weights:
    """The weights of two devices: unions of all fields."""
    return Weights(**{f.name: getattr(one, f.name) | getattr(other, f.name) for f in fields(Weights)})


@contextmanager
def _assembled(
    root: nn.Module, backend: Backend, config: OffloadConfig, facts: CallerFacts
) -> Iterator[OffloadBuilder]:
    with on(backend.device), assembled(root, backend, config, facts) as builder:
        yield builder


def sketch_striped(
    model: nn.Module, checkpoint: Checkpoint | None, machines: Sequence[Machine], config: OffloadConfig
) -> StripedPlan:
    """The plans that `stripe` would make for a model on meta; `machines` has one for each device. Raises its errors."""
    deals = split_over_devices(model, machines, config)

    def inputs_of(deal: DeviceSplit) -> dict[str, PlannerInputs]:
        inputs = {}
        for lane in deal.used:
            subset, settings = deal.subset(lane, model), deal.settings(lane, config)
            sketch = sketch_of(deal.roots[lane], checkpoint, settings, machines[lane], subset)
            inputs[f"cuda:{lane}"] = sketch.inputs
        return inputs

    _, planned = multi_device.fastest_deal(map(inputs_of, deals), places := _places(model))
    return multi_device.predicted_lanes({name: planned_lane.lane for name, planned_lane in planned.items()}, places)


def _places(model: nn.Module) -> dict[str, int]:
    return {name: place for place, (name, _) in enumerate(model.named_modules())}
