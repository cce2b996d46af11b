"""Stripes: one model over several devices of a process. What streams takes turns, so every link carries a share of it.

Each device has a streamer of its own, over the blocks that it computes; the first one has everything else, too. Nothing
is summed up across devices, so the bits are those of one. A block's tensors go to its device when it is called, and
what it returns comes back to the first: whatever runs between blocks sees tensors of one device. The block's weights
are open, and decoded, before its tensors go there. Whose each block is: plan/lanes.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from weightstream import prospects
from weightstream.adapters import device_map
from weightstream.adapters.module import GRAINS, find_blocks, find_units
from weightstream.adapters.shapes import observe
from weightstream.assembly import Assembly, Given, assembled, rooted
from weightstream.codec.device import on
from weightstream.config import OffloadConfig
from weightstream.errors import ConfigError, OffloadError
from weightstream.plan import lanes
from weightstream.plan.lanes import StripedPlan
from weightstream.plan.planner import Machine
from weightstream.runtime import guards, ops
from weightstream.runtime.backend import Backend
from weightstream.runtime.crossing import Way, crossing
from weightstream.runtime.leaves import leaves, leaves_of
from weightstream.runtime.mode import Gate, Mode
from weightstream.runtime.stats import Stats
from weightstream.runtime.streamer import Streamer
from weightstream.runtime.timeline import kind_of
from weightstream.runtime.values import moved
from weightstream.runtime.weights import Scope
from weightstream.store.checkpoint import Checkpoint
from weightstream.trace import Trace

_FREE = 0.9  # of what is free, where no budget is given: activations and caches take the rest
_WHY = "the model is spread over several devices, whose steps run eager"


class Stripes:
    """A model over several devices: a streamer for each, and what moves between them. At `model.weightstream`.

    `parts` are the streamers, by device. A context manager that ends with `remove()`.
    """

    def __init__(self, model: nn.Module, backends: Sequence[Backend]) -> None:
        self.model, self.devices = model, tuple(backend.device for backend in backends)
        self.parts: dict[str, Streamer] = {}
        self._gate, self._capturing = Gate(), backends[0].capturing
        self._places = {name: place for place, (name, _) in enumerate(model.named_modules())}
        self._ways = [Way(self.devices[0], device) for device in self.devices]
        self._undo = ExitStack()

    def attach(self, assemblies: Mapping[str, Assembly], lane_of: Mapping[nn.Module, int]) -> None:
        """Put a plan in force for each device, and stand around the model; `lane_of` tells whose each block is.

        On an error nothing is in force, while what the assemblies hold is still there.
        """
        try:
            self._attach(assemblies, lane_of)
        except BaseException:
            self.remove()
            raise

    def _attach(self, assemblies: Mapping[str, Assembly], lane_of: Mapping[nn.Module, int]) -> None:
        planned = lanes.chosen({name: a.prospect for name, a in assemblies.items()}, self._places)  # before one moves
        for block, index in lane_of.items():
            if index:
                self._undo.callback(guards.put(block, "forward", crossing(block, self._ways[index])))
        for name, assembly in assemblies.items():
            prospect, lane = planned[name]
            assembly.narrow(prospect)
            with on(assembly.device):
                self.parts[name] = part = assembly.attach(lane.plan)
            self._undo.callback(part.remove)
        session = ops.Session(self)
        self._undo.callback(session.close)
        self._undo.callback(guards.surround(self.model, self._run, session))
        self._undo.callback(guards.refuse_moves(self.model))
        names = {id(module): name for name, module in self.model.named_modules()}
        map_of = {"": self.devices[0]} | {names[id(block)]: self.devices[index] for block, index in lane_of.items()}
        self._undo.callback(device_map.attach(self.model, self.devices[0], devices=map_of))
        setattr(self.model, guards.ATTRIBUTE, self)
        self._undo.callback(self.model.__dict__.pop, guards.ATTRIBUTE, None)

    def keep(self, module: nn.Module) -> None:
        """Bring the tensors of a module that surrounds blocks to where it computes."""
        for leaf in leaves(module):
            tensor, before = leaf.tensor, leaf.tensor.data
            with torch.no_grad():
                tensor.data = before.to(self.devices[0])
            self._undo.callback(_put_back, tensor, before)

    def on_removal(self, callback: Callable[[], Any]) -> None:
        """Call it once all else is undone."""
        self._undo.callback(callback)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._gate.refuse_forked()
        with self._gate.turn:
            if self._gate.is_running or self._gate.mode is Mode.REMOVED:  # the model calls itself; or it was let go
                return forward(*args, **kwargs)
            if self._capturing():
                raise OffloadError(f"a capture is under way, and {_WHY}")
            guards.refuse_transforms()
            args, kwargs = moved((args, kwargs), self.devices[0])
            step, kind = partial(forward, *args, **kwargs), kind_of(args, kwargs)
            for part in self.parts.values():
                part.foresee(kind, args, kwargs)
            for part in reversed(self.parts.values()):
                step = partial(part.run, step, kind)
            try:
                with self._gate.entered(Mode.EAGER):
                    return step()
            finally:
                for way in self._ways:
                    way.clear()

    # -- what it tells ---------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where inputs go and outputs come from."""
        return self.devices[0]

    @property
    def plan(self) -> StripedPlan:
        """The plans in force, and what a step is predicted to take."""
        return lanes.predicted({name: part.lane for name, part in self.parts.items()}, self._places)

    @property
    def learned(self) -> bool:
        """Whether a step has taught the order of the weights."""
        return all(part.learned for part in self.parts.values())

    def stats(self) -> Stats:
        """As `Streamer.stats`, of all devices: counters and bytes are sums, and a step is one of the model."""
        found = [part.stats() for part in self.parts.values()]
        steps = [stats.step_s for stats in found if stats.step_s is not None]
        sums = {f.name: sum(getattr(s, f.name) for s in found) for f in fields(Stats) if f.type == "int"}
        return replace(
            found[0],
            **sums | {"steps": max(stats.steps for stats in found)},
            stall_s=sum(stats.stall_s for stats in found),
            held_nbytes=dict(sum((Counter(stats.held_nbytes) for stats in found), Counter())),
            predicted_step_s=self.plan.step_s,
            step_s=max(steps, default=None),
            units=tuple(unit for stats in found for unit in stats.units),
            read_in_place=tuple(nbytes for stats in found for nbytes in stats.read_in_place),
        )

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """As `Streamer.trace`, with rows for each device."""
        whole = Trace(f"{type(self.model).__name__} on {', '.join(self.parts)}")
        with ExitStack() as stack:
            traces = {name: stack.enter_context(part.trace()) for name, part in self.parts.items()}
            yield whole
        for name, trace in traces.items():
            whole.spans.extend(replace(span, device=name) for span in trace.spans)
            whole.experts |= trace.experts
        whole.spans.sort(key=lambda span: span.begin_s)

    # -- the end -----------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Bring every weight back to where it was and set the model free; may be called twice."""
        self._gate.refuse_inside()
        with self._gate.turn:
            for part in self.parts.values():
                part.refuse_inside()
            self._gate.change(Mode.REMOVED)
            for way in self._ways:
                way.close()
            self._undo.close()

    def __enter__(self) -> Stripes:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model is a plain model

    # -- fixed addresses, of which there are none ---------------------------------------------------------------------

    def why_not_fixed(self) -> str:
        """Why no step has fixed addresses."""
        return _WHY

    def step(self) -> Any:
        """Raises `OffloadError`, as the next do."""
        raise OffloadError(f"the weights cannot have fixed addresses: {_WHY}")

    def capture(self, graph: Any, **options: Any) -> Any:
        return self.step()

    def compile(self, scope: str = "model", **options: Any) -> Any:
        return self.step()

    def replay(self, graph: Any) -> Any:
        return self.step()

    def wait_unit(self, unit: int) -> None:
        self.step()

    release_unit = wait_unit


def _put_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.data.device != before.device:
            before.copy_(tensor.data)
        tensor.data = before


class Shares(NamedTuple):
    """What each device is given: modules under one root, their bytes, a budget; whose each block is; what is around."""

    roots: list[nn.Module]
    nbytes: list[int]
    budgets: list[int | None]
    lane_of: dict[nn.Module, int]
    around: list[nn.Module]
    observe: prospects.Observe

    def settings(self, lane: int, config: OffloadConfig) -> OffloadConfig:
        """Those of one device, with a share of the host's budget."""
        return config.within(self.budgets[lane], self.nbytes[lane] / sum(self.nbytes))

    def hosted(self, lane: int, model: nn.Module) -> prospects.Hosted:
        """What is planned for one device."""
        own = tuple(block for block, of in self.lane_of.items() if of == lane)
        share = len(own) / len(self.lane_of)
        return prospects.Hosted(blocks=own, grains=GRAINS, model=model, share=share, observe=self.observe)

    @property
    def used(self) -> list[int]:
        """The devices that have any weights."""
        return [lane for lane, nbytes in enumerate(self.nbytes) if nbytes]


def stripe(model: nn.Module, backends: Sequence[Backend], config: OffloadConfig, given: Given) -> Stripes:
    """Spread a model over the devices of these backends, each with its budget of `config.stripes`.

    Raises as `offload` does, and `ConfigError` for a model without repeated blocks.
    """
    guards.refuse_twice(model)
    stripes = Stripes(model, backends)
    try:
        if given.folder is not None:
            stripes.on_removal(given.folder.close)
        shares = shared_out(model, [prospects.machine_of(backend, config) for backend in backends], config)
        for module in shares.around:
            stripes.keep(module)
        with ExitStack() as assembling:
            assemblies: dict[str, Assembly] = {}
            for lane in shares.used:
                about = replace(given, folder=None, hosted=shares.hosted(lane, model))
                part = _assembled(shares.roots[lane], backends[lane], shares.settings(lane, config), about)
                name = str(stripes.devices[lane]) if stripes.device.type != "cpu" else f"cpu:{lane}"
                assemblies[name] = assembling.enter_context(part)
            stripes.attach(assemblies, shares.lane_of)
    except BaseException:
        stripes.remove()
        raise
    return stripes


@contextmanager
def _assembled(root: nn.Module, backend: Backend, config: OffloadConfig, given: Given) -> Iterator[Assembly]:
    with on(backend.device), assembled(root, backend, config, given) as assembly:
        yield assembly


def sketched(
    model: nn.Module, checkpoint: Checkpoint | None, machines: Sequence[Machine], config: OffloadConfig
) -> StripedPlan:
    """The plans that `stripe` would make for a model on meta, on these machines' devices. Raises as that."""
    shares = shared_out(model, machines, config)
    found = {}
    for lane in shares.used:
        hosted, own = shares.hosted(lane, model), shares.settings(lane, config)
        sketch = prospects.sketch_of(shares.roots[lane], checkpoint, own, machines[lane], hosted)
        found[f"cuda:{lane}"] = sketch.prospect
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return lanes.predicted({name: lane for name, (_, lane) in lanes.chosen(found, places).items()}, places)


def shared_out(model: nn.Module, machines: Sequence[Machine], config: OffloadConfig) -> Shares:
    """What each device is given of a model."""
    if config.backend != "none":
        raise ConfigError(f"the {config.backend} settings are for one GPU: several have a device_budget each")
    if not (blocks := find_blocks(model)):
        raise ConfigError(f"{type(model).__name__} has no repeated blocks to spread over {len(machines)} devices")
    settings = [config.within(budget) for budget in config.stripes.values()]
    known = [own.device_nbytes(machine.total_nbytes) for own, machine in zip(settings, machines, strict=True)]
    budgets = [int(_FREE * m.free_nbytes) if n is None else n for n, m in zip(known, machines, strict=True)]
    rates = [machine.profile.link_bytes_per_s for machine in machines]
    nbytes, first = [_nbytes(block) for block in blocks], sharing(model, blocks)
    whose = lanes.whose(nbytes, budgets, rates, max(0, _nbytes(model) - sum(nbytes)))
    lane_of = {block: 0 if root is None else whose[root] for block, root in zip(blocks, first, strict=True)}
    layers: list[dict[str, nn.Module]] = [{} for _ in machines]
    around = []
    for unit in find_units(model, "block", blocks):
        if unit.scope is Scope.TREE:
            layers[lane_of.get(unit.module, 0)][unit.name] = unit.module
        else:
            around.append(unit.module)
    if known[0] is not None:
        known[0] = max(1, known[0] - sum(leaf.tensor.nbytes for module in around for leaf in leaves(module)))
    roots = [rooted(named) for named in layers]
    return Shares(roots, [_nbytes(root) for root in roots], known, lane_of, around, cache(observe))


def _nbytes(module: nn.Module) -> int:
    return sum({id(leaf.tensor): leaf.tensor.nbytes for leaf in leaves_of(module)}.values())


def sharing(model: nn.Module, blocks: Sequence[nn.Module]) -> list[int | None]:
    """For each block the first that shares memory with it, which it is to be with; None: with what is in no block."""
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {_memory(leaf.tensor) for m in model.modules() if id(m) not in inside for leaf in leaves(m)}
    held = [{_memory(leaf.tensor) for leaf in leaves_of(block)} for block in blocks]
    found: list[int | None] = []
    for index, own in enumerate(held):
        roots = [found[before] for before in range(index) if own & held[before]]
        found.append(
            None if own & outside or None in roots else min((r for r in roots if r is not None), default=index)
        )
    return found


def _memory(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return (storage.data_ptr() if not tensor.is_meta and tensor.numel() else 0) or storage._cdata
