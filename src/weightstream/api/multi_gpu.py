"""Stripes: one model over several devices of a process, so that every link carries a share of the streamed weights.

Each device has a streamer of its own, over the blocks that it computes; the first one has everything else, too. Nothing
is summed up across devices, so the bits are those of one device. A block's arguments go to its device when it is
called, and its output comes back to the first device: code between blocks sees tensors of one device. The block's
weights are open, and decoded, before its arguments are sent. plan/multi_device.py says which device computes a block.
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

from weightstream.adapters.hf import static_cache
from weightstream.adapters.hf.decode_steps import cache_in
from weightstream.adapters.modules import device_map
from weightstream.codec.device import on
from weightstream.errors import OffloadError
from weightstream.inputs import planner_inputs
from weightstream.inputs.builder import CallerFacts, OffloadBuilder, assembled
from weightstream.inputs.device_split import DeviceSplit, split_over_devices
from weightstream.measure import multi_gpu_links
from weightstream.plan import multi_device
from weightstream.plan.multi_device import StripedPlan
from weightstream.plan.planner import Machine, Weights
from weightstream.plan.problem import Prospect
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
from weightstream.runtime.tensors.thread_state import restored
from weightstream.runtime.tensors.undo import Undo
from weightstream.runtime.trace import Trace
from weightstream.settings.config import OffloadConfig
from weightstream.store.checkpoint import Checkpoint


class Stripes(StreamerGroup):
    """A model over several devices: a streamer for each, and the transfers between them. At `model.weightstream`.

    `parts` are the streamers, by device. A context manager that ends with `remove()`. Nothing is compiled: steps run
    eager, or are captured.
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
        self._ways = [DeviceCrossing(self.devices[0], device) for device in self.devices]
        self._undo = Undo()

    def attach(
        self, assemblies: Mapping[str, OffloadBuilder], planned: multi_device.Planned, lane_of: Mapping[nn.Module, int]
    ) -> None:
        """Put a plan in force for each device, and replace the model's forward.

        `lane_of`: the index of the device of each block. On an error no plan is in force; the builders keep what they
        hold.
        """
        try:
            self._attach(assemblies, planned, lane_of)
        except BaseException:
            self.remove()
            raise

    def _attach(
        self, assemblies: Mapping[str, OffloadBuilder], planned: multi_device.Planned, lane_of: Mapping[nn.Module, int]
    ) -> None:
        session = custom_ops.OpSession()
        self._undo.add(session.close)
        for block, index in lane_of.items():
            if index:
                self._undo.add(forward_patch.surround(block, crossing(self._ways[index]), session))
        for name, assembly in assemblies.items():
            prospect, lane = planned[name]
            assembly.narrow(prospect)
            with on(assembly.device):
                self.parts[name] = part = assembly.attach(lane.plan)
            self._undo.add(part.remove)
        self._undo.add(forward_patch.surround(self.model, self._run, session))
        self._undo.add(forward_patch.refuse_moves(self.model))
        names = {id(module): name for name, module in self.model.named_modules()}
        map_of = {"": self.devices[0]} | {names[id(block)]: self.devices[index] for block, index in lane_of.items()}
        self._undo.add(device_map.attach_device_map(self.model, self.devices[0], devices=map_of))
        setattr(self.model, forward_patch.ATTRIBUTE, self)
        self._undo.add(self.model.__dict__.pop, forward_patch.ATTRIBUTE, None)

    def keep(self, module: nn.Module) -> None:
        """Bring the tensors of a module that holds blocks to the first device."""
        for leaf in leaves(module):
            tensor, before = leaf.tensor, leaf.tensor.data
            with torch.no_grad():
                tensor.data = before.to(self.devices[0])
            self._undo.add(_put_back, tensor, before)

    def on_removal(self, callback: Callable[[], Any]) -> None:
        """Call it at the end of `remove`."""
        self._undo.add(callback)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._gate.refuse_forked()
        with self._turn():
            # the model calls itself; or nothing streams any more
            if self._gate.is_running or self._gate.mode is StepState.REMOVED:
                return forward(*args, **kwargs)
            args, kwargs = moved((args, kwargs), self.devices[0])
            step, is_fixed = partial(forward, *args, **kwargs), self._gate.is_fixed
            kind = kind_of(args, kwargs, "fixed" if is_fixed else "forward")
            if not is_fixed:
                self._foresee(kind, args, kwargs)
            for part in reversed(self.parts.values()):
                step = partial(part.run_fixed if is_fixed else part.run, step, kind)
            try:
                self._gate.change(StepState.FORWARD if is_fixed else StepState.EAGER)
                output = step()
            finally:
                self._gate.end_forward()
                self._forget_sent()
            static_cache.tell_lengths_at(cache_in(kwargs), self.devices[0])
            return output

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._gate.turn.taken() as is_first:
            if is_first and self._gate.is_cut:
                self._gate.reset()  # a step was cut short; the streamers heal themselves
            yield

    def _forget_sent(self) -> None:
        """Drop the copies of blocks' arguments: a launched graph writes to tensors without raising their versions."""
        for way in self._ways:
            way.clear()

    def _foresee(self, kind: Kind, args: Any, kwargs: Any) -> None:
        if self._capturing():
            raise OffloadError(CAPTURED)
        forward_patch.refuse_transforms()
        for part in self.parts.values():
            part.foresee(kind, args, kwargs)

    # -- the plan, statistics and traces -----------------------------------------------------------------------------

    @property
    def streamers(self) -> Mapping[str, Streamer]:
        return self.parts

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def plan(self) -> StripedPlan:
        """The plans in force, and the predicted seconds of a step."""
        return multi_device.predicted_lanes({name: part.lane for name, part in self.parts.items()}, self.places)

    @property
    def learned(self) -> bool:
        """Whether a step has shown the order of the weights."""
        return all(part.learned for part in self.parts.values())

    def stats(self) -> Stats:
        """As `Streamer.stats`, of all devices: counters and bytes are sums, and a step is one of the model."""
        return over_devices([part.stats() for part in self.parts.values()], self.plan.step_s)

    def _title(self) -> str:
        return f"{type(self.model).__name__} on {', '.join(self.parts)}"

    def _add_trace(self, whole: Trace, name: str, part: Trace) -> None:
        whole.spans.extend(replace(span, device=name) for span in part.spans)
        whole.experts |= part.experts

    # -- the end -----------------------------------------------------------------------------------------------------

    @restored
    def remove(self) -> None:
        self._gate.refuse_inside()
        with self._turn():
            self.refuse_inside()
            self._gate.change(StepState.REMOVED)
            for way in self._ways:
                way.close()
            self._undo()

    # -- fixed addresses -----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Watch the next step, too: it may read weights outside of their units that no step before did."""
        for part in self.parts.values():
            part.watch()

    def why_not_fixed(self) -> str | None:
        """Why `step` would raise; None if it would not."""
        return next((reason for part in self.parts.values() if (reason := part.why_not_fixed())), None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """As `Streamer.step`, on all devices."""
        self._gate.refuse_forked()
        with self._turn(), ExitStack() as stack:
            # a list: each part is to look
            has_changed = [] if self._gate.is_fixed else [part.sees_other_code() for part in self.parts.values()]
            if not self._gate.is_fixed and not any(has_changed):
                for part in self.parts.values():
                    stack.enter_context(part.step())
                stack.callback(self._gate.reset)
                stack.callback(self._forget_sent)
                self._gate.change(StepState.STEP)
            yield

    @contextmanager
    def capture(self, graph: Any, **options: Any) -> Iterator[None]:
        """As `Streamer.capture`: one graph of the work of all devices."""
        within: Callable[[], AbstractContextManager[object]] = partial(self._captured, graph, **options)
        for part in self.parts.values():
            within = partial(part.graphs.capture, graph, within)
        with self.step(), within():
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
        launch = partial(multi_device_graph.launch, self._computing, graph)
        for part in self.parts.values():
            launch = partial(part.graphs.replay, graph, launch)
        every = [part.graphs for part in self.parts.values()]
        with self.step() if all(graph in graphs.recordings for graphs in every) else nullcontext():
            for graphs in every:
                graphs.recording_of(graph)
            self._forget_sent()
            launch()

    @property
    def _computing(self) -> list[Backend]:
        """The backends of the first device, and of the others that compute blocks."""
        others = zip(self.names[1:], self.backends[1:], strict=True)
        return [self.backends[0], *(backend for name, backend in others if name in self.parts)]

    def compile(self, scope: str = "model", **options: Any) -> None:
        """Raises `OffloadError`."""
        raise OffloadError(
            "the model is spread over several devices, where nothing is compiled: its steps run eager, or are captured"
        )


def _put_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.data.device != before.device:
            before.copy_(tensor.data)
        tensor.data = before


def stripe(model: nn.Module, backends: Sequence[Backend], config: OffloadConfig, given: CallerFacts) -> Stripes:
    """Spread a model over the devices of these backends, each with its budget of `config.stripes`.

    Raises as `offload` does, and `ConfigError` for a model without repeated blocks.
    """
    forward_patch.refuse_twice(model)
    stripes = Stripes(model, backends)
    try:
        if given.folder is not None:
            stripes.on_removal(given.folder.close)
        rates = _rates(backends)
        machines = (planner_inputs.machine_of(backend, config, progress=given.progress) for backend in backends)
        deals = split_over_devices(model, list(map(multi_gpu_links.at_most, machines, rates)), config)
        for module in deals[0].around:
            stripes.keep(module)
        with ExitStack() as assembling:

            def assemble(shares: DeviceSplit) -> dict[str, OffloadBuilder]:
                found = {}
                for lane in shares.used:
                    about = replace(given, folder=None, hosted=shares.hosted(lane, model))
                    part = _assembled(shares.roots[lane], backends[lane], shares.settings(lane, config), about)
                    found[stripes.names[lane]] = assembly = assembling.enter_context(part)
                    known, rate = assembly.prospect, rates[lane]
                    planners = (replace(p, machine=multi_gpu_links.at_most(p.machine, rate)) for p in known.planners)
                    assembly.narrow(replace(known, planners=tuple(planners)))
                return found

            def known() -> Iterator[dict[str, Prospect]]:
                yield (first := {name: assembly.prospect for name, assembly in assemblies.items()})
                for shares in deals[1:]:
                    yield _dealt_anew(shares, stripes, config, given.example, first)

            assemblies = assemble(deals[0])
            best, planned = multi_device.fastest_deal(known(), stripes.places)  # before one moves
            if best:
                for assembly in assemblies.values():
                    assembly.close()
                assemblies = assemble(deals[best])
                planned = multi_device.chosen({name: a.prospect for name, a in assemblies.items()}, stripes.places)
            stripes.attach(assemblies, planned, deals[best].lane_of)
    except BaseException:
        stripes.remove()
        raise
    return stripes


def _rates(backends: Sequence[Backend]) -> Sequence[float]:
    """Bytes per second that each link has at most while all of them copy."""
    devices = tuple(backend.device for backend in backends)
    found = () if devices[0].type == "cpu" else multi_gpu_links.rates_together(devices)
    return found or [math.inf] * len(devices)


def _dealt_anew(
    shares: DeviceSplit,
    stripes: Stripes,
    config: OffloadConfig,
    example: planner_inputs.Example | None,
    known: Mapping[str, Prospect],
) -> dict[str, Prospect]:
    """What is planned with in another deal, of weights and machines as they are `known`: nothing is found out anew."""
    weights = reduce(_both, (prospect.planners[0].weights for prospect in known.values()))
    model, found = stripes.model, {}
    for lane in shares.used:
        name, own = stripes.names[lane], shares.settings(lane, config)
        machine, uncoded = known[name].planners[0].machine, own.model_copy(update={"codec": "none"})
        sketch = planner_inputs.sketch_of(shares.roots[lane], None, uncoded, machine, shares.hosted(lane, model))
        prospect = sketch.prospect
        if example is not None:
            about = sketch.by_alias, sketch.grains, model, stripes.backends[lane]
            prospect = planner_inputs.foreseen(prospect, *about, *example) or prospect
        planners = (replace(planner, config=own, weights=weights) for planner in prospect.planners)
        found[name] = replace(prospect, planners=tuple(planners))
    return found


def _both(one: Weights, other: Weights) -> Weights:
    return Weights(**{f.name: getattr(one, f.name) | getattr(other, f.name) for f in fields(Weights)})


@contextmanager
def _assembled(
    root: nn.Module, backend: Backend, config: OffloadConfig, given: CallerFacts
) -> Iterator[OffloadBuilder]:
    with on(backend.device), assembled(root, backend, config, given) as assembly:
        yield assembly


def sketch_striped(
    model: nn.Module, checkpoint: Checkpoint | None, machines: Sequence[Machine], config: OffloadConfig
) -> StripedPlan:
    """The plans that `stripe` would make for a model on meta, on these machines' devices. Raises as that."""
    deals = split_over_devices(model, machines, config)

    def known(shares: DeviceSplit) -> dict[str, Prospect]:
        found = {}
        for lane in shares.used:
            hosted, own = shares.hosted(lane, model), shares.settings(lane, config)
            sketch = planner_inputs.sketch_of(shares.roots[lane], checkpoint, own, machines[lane], hosted)
            found[f"cuda:{lane}"] = sketch.prospect
        return found

    _, planned = multi_device.fastest_deal(map(known, deals), places := _places(model))
    return multi_device.predicted_lanes({name: planned_lane.lane for name, planned_lane in planned.items()}, places)


def _places(model: nn.Module) -> dict[str, int]:
    return {name: place for place, (name, _) in enumerate(model.named_modules())}
