"""The plan in force on a model: moves homes, binds units to memory, replaces forwards; and changes to another plan.

[Note: a change of plan]
`switch` changes the plan, for the work and the order of a call, or for weights that were read outside of their unit.
The units of the new plan may be of another grain. Measured times never change the plan. The change happens between
steps, with the device idle. The modules are detached and the ring is freed; then homes move, only those whose place or
form changes, a ring is made, and units are bound to it. On an error the same steps restore the plan before.

The addresses of weights change with the plan, and graphs and compiled code hold addresses. So the code of `compile` is
compiled again, and graphs of `capture` are forgotten (`replay` raises, and names a new capture as the remedy). If an
engine, or code that the user compiled, holds addresses, `switch` raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch

from weightstream.errors import InvariantError, OffloadError, StoreError
from weightstream.plan.check import prove
from weightstream.plan.manifest import Manifest
from weightstream.plan.plan import Plan
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.experts.counters import Cache, Tally
from weightstream.runtime.experts.stacks import unread
from weightstream.runtime.ring.binding import Binding
from weightstream.runtime.ring.engine import Counters
from weightstream.runtime.ring.graphs import Graphs
from weightstream.runtime.ring.shared_memory import SharedMemory
from weightstream.runtime.ring.state import Gate, StepState
from weightstream.runtime.ring.timeline import Timeline
from weightstream.runtime.streamer.attachment import Attachment
from weightstream.runtime.streamer.compiled import Compiled
from weightstream.runtime.streamer.replanning import Replanning
from weightstream.runtime.trace import Trace
from weightstream.runtime.weights.alias_groups import UnitModule, manifest
from weightstream.runtime.weights.decompression import PlanMemory
from weightstream.runtime.weights.homes import Homes
from weightstream.runtime.weights.picks import Picks
from weightstream.runtime.weights.relocation import CodeOverflow

logger = logging.getLogger("weightstream")


class Installation:
    """One plan at a time, from `start` to `remove`. Not thread-safe, except for `switch`."""

    def __init__(
        self,
        modules: Attachment,
        compiled: Compiled,
        homes: Homes,
        backend: Backend,
        replanning: Replanning,
        grains: Sequence[Sequence[UnitModule]],
        on_close: Callable[[], None],
        block: SharedMemory | None = None,
    ) -> None:
        self.binding: Binding
        self.modules = modules
        self.compiled = compiled
        self.homes = homes
        self.backend = backend
        self.gate = Gate(block)
        self.replanning = replanning
        self.grains = [tuple(units) for units in grains]
        self.graphs = Graphs(backend, self)
        self.counters = Counters()
        self.timeline = Timeline(backend, Tally(self._caches))
        self.graphs_alive: WeakSet[object] = WeakSet()  # of forwards, whose backward passes may still come
        self.nodes_alive: WeakSet[object] = WeakSet()  # of forwards; nodes in Python may keep weights after their pass
        self._on_close = on_close

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self.binding.plan

    def manifest(self) -> Manifest:
        """All units and weights, plain, in the order of the modules."""
        return manifest(self.modules.units, {alias: home.group for alias, home in self.homes.homes.items()})

    def _caches(self) -> Iterator[Cache]:
        """The caches of experts of the plan in force."""
        held = self.plan.manifest.aliases
        for unit in self.binding.units:
            if (rows := unit.opening.found_rows) is not None and rows.cache is not None:
                spec = self.plan.manifest.units[unit.index]
                stacks = {t.alias: t.shape[0] for t in spec.tensors if t.alias in self.plan.cached}
                row_nbytes = sum(held[alias] / num_rows for alias, num_rows in stacks.items())
                yield Cache(spec.name, rows.cache, rows.most, row_nbytes)

    def start(self, plan: Plan | None) -> None:
        """Put the first plan in force; None: make one now. On an error the model is as it was."""
        try:
            try:
                self._bind(plan or self.replanning.plan(self.manifest()))
            except StoreError:
                if self.homes.can_map:
                    raise
                self._detach()  # pinning was refused: weights that kernels would read from pinned memory stream instead
                self.replanning.cannot_map()
                self._bind(self.replanning.plan(self.manifest()))
        except BaseException:
            self.remove()
            raise

    def switch(self, plan: Plan) -> None:
        """Put another plan in force, [Note: a change of plan]; errors are those of `Streamer.switch`."""
        prove(plan)
        names = [unit.name for unit in plan.manifest.units]
        units = next((own for own in self.grains if [unit.name for unit in own] == names[: len(own)]), None)
        if units is None:
            raise InvariantError("the plan is of other units than the model has in any grain")
        with self.gate.turn.taken(), self.gate.lock, torch.inference_mode(False), torch.no_grad():
            if reason := self._why_not_switched():
                raise OffloadError(f"the plan cannot change now: {reason}")
            plan_before, units_before = self.plan, self.modules.units
            end_hold = self.modules.hold(self.gate.turn)
            try:
                self._detach()
                if [unit.name for unit in units] != [unit.name for unit in self.modules.units]:
                    self.modules.units = units  # another object: the next step is watched again
                self._bind(plan)
            except BaseException:
                self._detach()
                self.modules.units = units_before
                self._bind_again(plan_before)
                raise
            finally:
                end_hold()

    def reschedule(self, plan: Plan) -> None:
        """Follow the schedules of a plan that has all weights at the same addresses: nothing moves."""
        prove(plan)
        if not plan.has_memory_of(self.plan):
            raise InvariantError("the plan has weights at other addresses")
        with self.gate.lock:
            self.binding.reschedule(plan)

    def has_graphs(self) -> bool:
        """Whether autograd may hold views of weights."""
        return bool(self.graphs_alive) or bool(self.nodes_alive)

    def _why_not_switched(self) -> str | None:
        if self.gate.mode is StepState.HELD:
            return "the engine that drives the layers holds the addresses of their weights"
        if self.gate.mode is not StepState.IDLE:
            return f"the streamer is {self.gate.mode.value}"
        if self.graphs_alive:
            return "the graph of a forward is alive, whose backward pass would find the weights at other addresses"
        if self.modules.session.traced and not self.compiled.is_wanted:
            return "code that torch.compile made of this model holds the addresses of its weights"
        return None

    def _bind(self, plan: Plan) -> None:
        """Move the weights that the plan has elsewhere, bind units to memory, and replace the forwards."""
        try:
            plan = self._settled(plan)
            block = self.gate.block
            memory = PlanMemory.allocate(plan, self.backend) if block is None else block.parts(plan)
            self.binding = Binding(
                plan,
                memory,
                self.homes,
                self.backend,
                self.counters,
                self.timeline,
                block,
                self._picks(),
                self.has_graphs,
            )
            self.graphs.clear()  # they read other addresses
            self.modules.attach(plan)
        except torch.OutOfMemoryError as error:
            error.add_note(f"weightstream: the plan is {plan.summary()}; the model is as it was. Offload more of it")
            raise

    def _picks(self) -> dict[int, Picks]:
        """How units read single rows of their stacks, for those that do."""
        return {index: unit.picks for index, unit in enumerate(self.modules.units) if unit.picks is not None}

    def _settled(self, plan: Plan) -> Plan:
        """Move homes for the plan, and return it. If a compressed weight is larger than estimated, or rows of a stack
        cannot be fetched from its place, plan again, and return that plan."""
        while True:
            try:
                self.homes.settle(plan)
                if not self._is_unread(plan):
                    return plan
            except CodeOverflow as error:
                logger.info("%s", error)
                self.replanning.learn_sizes(error.sizes)
            plan = self.replanning.plan(plan.manifest.plain())

    def _is_unread(self, plan: Plan, *, waits: bool = False) -> bool:
        """Whether rows cannot be fetched from their place, as far as is known; `waits`: wait for all pages."""
        why = unread(plan.cached, self.homes.homes, self.backend, waits=waits)
        if why is not None:
            logger.warning("experts are planned without a cache: %s", why)
            self.replanning.cannot_fetch()
        return why is not None

    def without_cache(self) -> Plan | None:
        """A plan without the cache of experts, if pages that it needs could not be pinned after all; else None."""
        plan = self.plan
        return self.replanning.plan(plan.manifest.plain()) if self._is_unread(plan, waits=True) else None

    def _bind_again(self, plan: Plan) -> None:
        """Restore the plan that was in force; if that fails, too, remove the offloading."""
        try:
            self._bind(plan)
        except BaseException:
            self.remove()
            raise

    @contextmanager
    def traced(self, trace: Trace) -> Iterator[None]:
        """Record all steps inside of the block in the trace; both its ends wait for the device."""
        if self.gate.mode is StepState.REMOVED:
            raise OffloadError("trace() after remove(): nothing streams any more")
        with self.gate.turn.taken():
            self.backend.synchronize()
            self.timeline.refuse_second_trace()
            try:
                self.timeline.begin_trace(trace)
            except BaseException:  # an interrupt: nothing is recorded, so that the next trace can begin
                self.timeline.end_trace()
                raise
        try:
            yield
        finally:
            with self.gate.turn.taken():
                self.backend.synchronize()
                self.timeline.end_trace()

    def _detach(self) -> None:
        """Make the modules plain and free the ring; weights stay where they are."""
        self.backend.synchronize()
        self.compiled.drop()
        self.modules.detach()
        if hasattr(self, "binding"):
            self.timeline.tally.keep()
            self.binding.close_all()

    def remove(self) -> None:
        """Make the model plain again, with every weight where it was. If it was interrupted, call it again to go on."""
        lost: StoreError | None = None
        try:
            self._detach()
            self.homes.restore()
        except StoreError as error:
            lost = error  # of weights that cannot be read any more; all others are back
        for home in self.homes.homes.values():
            home.forget()
        self.graphs.clear()
        self.modules.session.close()
        self.timeline.close()
        if self.gate.block is None:  # else the owner of the shared memory closes the backend
            self.backend.close()
        self._on_close()
        self.gate.change(StepState.REMOVED)
        if lost is not None:
            raise lost
