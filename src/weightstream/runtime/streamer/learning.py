"""Learning from calls and steps: their work, the order of the units, weights that are read outside of their units.

For each of these the plan may change. Measured times only correct the plan's predictions. A call of a new kind is
traced with meta tensors before it runs. The first step is watched, and so are those after it, until one reads no weight
outside of its unit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from weightstream.errors import OffloadError, PlanError, StoreError
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import FORWARD, TRAIN
from weightstream.runtime.ring import tensor_views
from weightstream.runtime.ring.state import StepState
from weightstream.runtime.ring.timeline import Kind, kind_of_workload
from weightstream.runtime.streamer.active_plan import Installation
from weightstream.runtime.streamer.read_watch import EagerStance, ReadWatch
from weightstream.runtime.weights.alias_groups import UnitModule

logger = logging.getLogger("weightstream")

_KINDS = 8  # most kinds of calls that are traced
_WATCHED = 4  # most steps of an engine that are watched for one budget


def _class_of(kind: Kind) -> Kind:
    """One kind for calls whose first tensors are of about the same size: prompts have any length."""
    return Kind(kind.what, kind.size.bit_length())


def _ordered(plan: Plan, what: str, order: tuple[int, ...]) -> Plan:
    """The plan with another order in steps of this kind. Extents follow that of the kind which it is planned for."""
    return plan.reordered(order) if what == plan.what else plan.scheduled(what, order)


class _Orders:
    """The orders in which steps ran the units."""

    def __init__(self) -> None:
        self._before: tuple[int, ...] | None = None
        self._ran: tuple[int, ...] | None = None  # the planned order, if a step has run in it

    @property
    def is_confirmed(self) -> bool:
        """Whether a step has run in the planned order."""
        return self._ran is not None

    def new(
        self, plan: Plan, sequence: tuple[int, ...], *, is_part: bool = False, what: str = FORWARD
    ) -> tuple[int, ...] | None:
        """The order of the step of the kind `what` that ended, if the plan is to take it over; else None.

        The plan takes over the order of the first step, or one that two steps in a row had. It does not if a step has
        run in the planned order and this one only left out some of the units, as steps do with caches, or in a model
        with several entries. Then steps of both kinds go on, and the cursor skips the fills of units that are left out.

        `is_part`: the step began at another entry than the forward.
        """
        before, self._before = self._before, sequence
        planned = plan.opened_units(what)
        if is_part or sequence == planned:
            self._ran = planned
        rest = iter(planned)  # consumed by `in`: so these are units of `planned` in the same order
        if sequence == planned or (self._ran == planned and all(unit in rest for unit in sequence)):
            return None
        return sequence if before in (None, sequence) else None

    def forget(self) -> None:
        self._before = None


@dataclass(eq=False, slots=True)
class _TrainingStep:
    """The units of a training step, in their order: its forwards, and then its backward passes."""

    units: list[int] = field(default_factory=list)
    forward: tuple[int, ...] | None = None  # those before the first backward pass
    is_whole: bool = False  # its first forward was computed without gradients, and again in the backward pass
    has_ended: bool = False  # a backward pass has ended
    is_watched: bool = False  # one of its forwards was watched, and so are its backward passes


class Learning:
    """Keeps which units the steps ran and which weights they read, and changes the plan accordingly."""

    def __init__(self, installed: Installation) -> None:
        self.watching = True  # the next step is watched
        self.outside: dict[str, set[str]] = {}  # reading module -> alias groups read outside of their units
        self.sequence: list[int] = []
        self._installed = installed
        self._to_take_over = False  # forwards of training steps were watched, and the plan could not change yet
        self.watch: ReadWatch | None = None  # that of the step under way
        self._eager = EagerStance()
        self._stale: set[int] = set()  # units whose weights a backward pass would read while they are closed
        self.trains = False  # the forward under way is of a training step
        self._training: _TrainingStep | None = None  # the last one, until the plan takes over what it has shown
        self._orders, self._training_orders = _Orders(), _Orders()
        self._to_stay: frozenset[str] = frozenset()  # alias groups that are to stay on the device
        self.keeps_trained = False  # whether trained weights were looked for since the plan changed
        self._refused = frozenset[str]()  # trained alias groups for which the device has no room
        self._has_room = True  # the device has room for all of `_to_stay`
        self._seen: frozenset[str] = frozenset()  # alias groups whose reads were watched, with the units of this grain
        self._seen_trained = self._seen  # of these, those whose reads in a training step were watched
        self._has_warned = False  # whether it warned that reads outside of units are slow
        self._foreseen = set(map(_class_of, installed.replanning.known))
        self._last: Kind | None = None
        workload = installed.replanning.inputs.workload
        self._planned = None if workload is None else _class_of(kind_of_workload(workload))

    @property
    def watches(self) -> bool:
        """Whether the next step is watched: on request, or because a weight opens whose reads no step has watched."""
        return self.watching or not self._installed.plan.opened <= self._seen

    @property
    def watches_training(self) -> bool:
        """Whether the next training step is watched, at least."""
        return not self._installed.plan.opened <= self._seen_trained

    @property
    def read_outside(self) -> list[str]:
        """Streamed alias groups that watched steps read outside of their units."""
        return sorted({alias for aliases in self.outside.values() for alias in aliases})

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the step inside. A tensor that is read outside of its unit shows its true bytes until the step ends."""
        binding, modules = self._installed.binding, self._installed.modules
        by_id = {id(streamed.tensor): streamed for streamed in binding.tensors}
        shown: set[int] = set()

        def on_read(tensor: torch.Tensor) -> None:
            streamed = by_id[id(tensor)]
            if id(tensor) in shown or binding.is_shown_by_open_unit(tensor):
                return
            alias = streamed.alias
            self.outside.setdefault(modules.reader(), set()).add(alias)
            shown.add(id(tensor))
            binding.serve(streamed, self._installed.homes.read(alias, streamed.member))
            self._installed.counters.count(streamed.home.nbytes, planned=False)

        def on_early() -> None:
            # compiled code could run this operator before the unit's fill: hide the innermost unit from compilers
            for unit in binding.open_units[-1:]:
                modules.hide(unit.index)

        # reads of earlier steps may come again: a prompt runs other code than a token
        streaming = {tensor.alias for tensor in binding.tensors}
        self.outside = {name: read & streaming for name, read in self.outside.items() if read & streaming}
        try:
            watch = ReadWatch([s.tensor for s in by_id.values()], modules.tensors(), on_read, on_early)
            self._eager.begin()
            with watch as self.watch:
                yield
        finally:
            self.heal()
            binding.withdraw()

    def heal(self) -> None:
        """End the watch of a step, which an error may have cut short."""
        self._eager.end()
        self.watch = None

    def steps(self) -> Iterator[None]:
        """Yield once for each step that an engine is to run watched.

        That is until one shows nothing new, or the device has no room for a weight that is to stay.
        """
        for _ in range(_WATCHED):
            if not (self.watches and self._has_room):
                return
            yield

    def why_not_fixed(self) -> str | None:
        """Why weights cannot have fixed addresses now; None if they can."""
        installed = self._installed
        if installed.gate.mode is StepState.REMOVED:
            return "the model is not offloaded any more"
        if installed.gate.mode is not StepState.IDLE:
            return "a step is under way"
        if installed.backend.capturing():
            return "a capture is under way; enter step() before it"
        if self.outside:
            return f"{', '.join(self.read_outside)} are read outside of their module's forward"
        if self.watching:
            return "the order of the weights is not known yet; call the model once first"
        if updated := sorted(installed.binding.updated):
            return f"{', '.join(updated)} are updated by the model's own forward"
        if moving := tensor_views.moving(installed.binding.tensors):
            return f"{', '.join(moving)} stand in several units; raise the budget, or name them in zero_copy_params"
        units = enumerate(installed.modules.units)
        writing = (unit for i, unit in units if installed.binding.units[i].has_buffers and installed.modules.trains(i))
        if training := [unit.name for unit in writing]:
            return f"{', '.join(training)} may update buffers in training mode; call model.eval()"
        return None

    # -- the kind of a step ------------------------------------------------------------------------------------------

    def begin_step(self, *, trains: bool) -> None:
        """Begin a forward, which may be one of several in a training step. `trains`: a backward pass may follow it."""
        engine, training = self._installed.binding.engine, self._training
        self.trains = trains
        is_open = training is not None and not training.has_ended and bool(self._installed.graphs_alive)
        is_planned = is_open and engine.comes_to_forward(TRAIN)
        if not is_open:
            self._training = training = _TrainingStep() if trains else None
        if training is not None and self.watch is not None:
            training.is_watched = True
        self.sequence = training.units if training is not None and (trains or is_planned) else []
        if is_planned:
            engine.resume(TRAIN)
        else:
            engine.begin_step(TRAIN if trains else FORWARD)

    def begin_alone(self) -> None:
        """Begin a step that is one unit, which was called by itself."""
        self.trains, self.sequence = False, []

    def begin_backward(self) -> None:
        """A backward pass begins, of the last training step."""
        engine = self._installed.binding.engine
        if self._training is None:
            self._training = _TrainingStep()
            engine.begin_step(TRAIN)
        else:
            engine.resume(TRAIN)
        if self._training.forward is None:
            self._training.forward = tuple(self._training.units)
        self.sequence = self._training.units

    def recompute_all(self) -> None:
        """The whole forward is computed again in the backward pass under way."""
        if self._training is not None:
            self._training.is_whole = True

    def end_backward(self, *, has_failed: bool = False) -> None:
        if has_failed:
            self._training = None
        elif self._training is not None:
            self._training.has_ended = True
            self._installed.timeline.end_step()

    @property
    def has_trained(self) -> bool:
        """Whether a training step has ended, and is to be learned from."""
        return self._training is not None and self._training.has_ended

    @property
    def watches_pass(self) -> bool:
        """Whether the backward passes of the training step under way are watched."""
        return self._training is not None and self._training.is_watched

    def found_stale(self, unit: int) -> None:
        """A node that no hook precedes needs the weights of the unit: they are to stay on the device."""
        self._stale.add(unit)
        self._to_take_over = True

    def _streams_stale(self) -> bool:
        """Whether such a unit streams, as it has no room on the device: then every step is watched."""
        return any(map(self._installed.plan.opens, self._stale))

    def learn_training(self) -> None:
        """Before a step: learn from the training step that has ended."""
        training, self._training = self._training, None
        if training is None:
            return
        units, found = self._installed.modules.units, None
        if training.forward or training.is_whole:
            found = self._training_orders.new(self._installed.plan, tuple(training.units), what=TRAIN)
        if self._to_take_over and not self._installed.graphs_alive:
            self._look_for_kept()
            self._take_over(None, frozenset())
            self._to_take_over = False
        if found is not None and self._installed.modules.units is units:
            self._reschedule(found, training.forward or ())
        elif not self.watching:
            self.correct()

    def _reschedule(self, order: tuple[int, ...], forward: tuple[int, ...]) -> None:
        """Have training steps follow this order, and extents the order of their forwards, which no step has run yet."""
        plan = self._installed.plan
        logger.debug("a training step runs the units in the order %s", order)
        is_open = not self._orders.is_confirmed and not self._installed.graphs_alive
        if plan.what == FORWARD and forward and is_open and [*dict.fromkeys(forward)] != [*plan.opened_units()]:
            plan = plan.reordered(forward)
        self._put_in_order(_ordered(plan, TRAIN, order))

    def _put_in_order(self, plan: Plan) -> None:
        """Put a plan in force that differs in its orders, without a move of weights where they keep their addresses."""
        if plan.has_memory_of(self._installed.plan):
            self._installed.reschedule(plan)
        else:
            self._try_switch(plan)

    def keep_trained(self) -> None:
        """Have the weights that are trained stay on the device, if most of the model is frozen."""
        installed, nbytes = self._installed, self._installed.plan.manifest.aliases
        self.keeps_trained = True
        members = ((alias, m) for alias, home in installed.homes.homes.items() for m in home.group.members)
        trained = frozenset(alias for alias, m in members if m.requires_grad) - self._refused
        is_held = bool(installed.graphs) or bool(installed.graphs_alive)
        if trained <= self._to_stay or is_held or 2 * sum(map(nbytes.__getitem__, trained)) > sum(nbytes.values()):
            return
        before, self._to_stay = self._to_stay, self._to_stay | trained
        self._keep(None)
        self.keeps_trained = True
        if left := trained - installed.plan.resident:
            self._refused, self._to_stay = self._refused | left, before
            logger.warning("%s are trained, and there is no room for them on the device", ", ".join(sorted(left)))

    def foresee(self, kind: Kind, args: Any, kwargs: Any) -> None:
        """Before a call of a new kind: trace it with meta tensors, and change the plan for its work and its order.

        If the plan is for a workload, as that of a language model always is, only kinds that come twice in a row count.
        """
        exact, kind, last = kind, _class_of(kind), self._last
        self._last = kind
        is_new = kind not in self._foreseen and kind != self._planned and (self._planned is None or kind == last)
        if not is_new or self._installed.graphs or self._installed.graphs_alive or len(self._foreseen) >= _KINDS:
            return
        self._foreseen.add(kind)
        with torch.inference_mode(False), torch.no_grad():
            try:
                plan = self._installed.replanning.foresee(self._installed.plan, exact, args, kwargs)
            except Exception:  # the call itself is not at fault
                logger.warning("the work of this call is not known before it runs", exc_info=True)
                return
            if plan is None:
                return
            self._change(plan)
            inputs, now = self._installed.replanning.inputs, self._installed.plan
            # the trace showed reads outside of units, of weights that the plan in force could not keep on the device
            self.watching |= not inputs.grains[inputs.grain_of(now.manifest)].kept <= now.resident

    def _change(self, plan: Plan) -> None:
        """Put a plan in force that is predicted to be better for a call."""
        if plan.acts_as(self._installed.plan):
            self._installed.binding.plan = plan
        else:
            self._try_switch(plan, any_error=True)

    def learn(self, *, watched: bool, is_whole: bool = True) -> None:
        """After a step, change the plan: which weights are to stay on the device, and the order of units.

        `is_whole`: the step runs all of the model. If not, weights of units that it did not reach are to stay on the
        device, as code that was not watched may read them outside of their units.
        """
        plan, training = self._installed.plan, self._training
        missed = frozenset[str]() if is_whole else self._unreached(plan)
        if watched:
            self._seen |= plan.opened
            if self.trains:
                self._seen_trained |= plan.opened
            self.watching = bool(self.outside or missed or self._streams_stale())
        if training is not None:
            if self.sequence is training.units:  # the rest is learned once its backward pass has ended
                self._to_take_over |= watched
                return
            if not training.has_ended:  # a forward without gradients between a forward and its backward pass
                training.units += self.sequence
        is_part = self._last is not None and self._last.what not in (FORWARD, TRAIN)
        order = self._orders.new(plan, tuple(self.sequence), is_part=is_part)
        if watched:
            self._look_for_kept()
            if (found := self._installed.without_cache()) is not None:
                self._try_switch(found)
                return
        self._take_over(order, missed)

    def _look_for_kept(self) -> None:
        if not self._installed.has_graphs():  # a graph keeps views, which its backward pass reads in time
            for unit in self._installed.binding.units:
                self._installed.binding.look_for_kept(unit)

    def _take_over(self, order: tuple[int, ...] | None, missed: frozenset[str]) -> None:
        """Change the plan for what steps have shown: weights that are to stay on the device, and an order of units."""
        if self._installed.graphs or self._installed.graphs_alive:  # they hold the addresses of this plan
            self.correct()
            return
        if not (wanted := missed.union(self._to_keep())) <= self._to_stay:
            self._to_stay |= wanted
            self._keep(order)
        elif order is not None and not self.outside:
            logger.debug("units run in another order than planned: %s", order)
            self._put_in_order(_ordered(self._installed.plan, FORWARD, order))
        elif not self.watching:
            self.correct()

    def _to_keep(self) -> frozenset[str]:
        """Alias groups that steps have shown to need memory of their own: read outside of units, or kept as a view."""
        units = {*self._installed.binding.kept, *self._stale}
        streamed = (self._installed.plan.manifest.units[unit].aliases() for unit in units)
        return frozenset(self.read_outside).union(*streamed)

    def _unreached(self, plan: Plan) -> frozenset[str]:
        """Alias groups that do not show their homes in their unit, and whose unit the step that ended did not reach."""
        units = enumerate(plan.manifest.units)
        found = (unit.aliases() for u, unit in units if u not in self.sequence)
        return plan.opened.intersection(chain(*found))

    def _keep(self, order: tuple[int, ...] | None) -> None:
        """Plan again with the groups in `_to_stay` on the device for good.

        If they do not fit, a tensor is copied for each read outside of its unit.
        """
        installed = self._installed
        units = ", ".join(installed.modules.units[unit].name for unit in installed.binding.kept)
        stale = ", ".join(installed.modules.units[unit].name for unit in self._stale)
        if self.outside:
            logger.info("weights read outside of their module's forward: %s", self.outside)
        reason: Exception | None = None
        try:
            movable = installed.homes.movable
            plan = installed.replanning.replan(installed.manifest(), kept=self._to_stay, movable=movable)
            reason = self._try_switch(_ordered(plan, FORWARD, order) if order is not None else plan)
        except PlanError as error:
            reason = self._cut_finer(error)
            if reason is not None and self.outside and not self._has_warned:
                names = ", ".join(self.read_outside)
                logger.warning(
                    "%s are read outside of their module's forward: they are copied for each read, which is slow. They "
                    "would stay on the device with more room: %s",
                    *(names, error),
                )
                self._has_warned = True
        self._has_room = reason is None
        if stale and reason is not None:
            logger.warning(
                "nodes of autograd keep weights of %s where only a watched step finds them, which is slow. These "
                "would stay on the device with more room: %s",
                *(stale, reason),
            )
        if units:
            logger.warning(
                "a view of the weights of %s outlived its forward: it shows other weights from the next fill on. %s",
                units,
                "The unit has memory of its own from now on; make the view again"
                if reason is None
                else f"The unit cannot have memory of its own: {reason}",
            )

    def _cut_finer(self, reason: Exception) -> Exception | None:
        """If weights that are read outside of units have no room to stay: plan in the grain whose units enclose most of
        these reads. Returns `reason` if no grain encloses more of them than the present one."""
        installed = self._installed
        nbytes = installed.plan.manifest.aliases
        left = {index: self._outside_of(units) for index, units in enumerate(installed.grains)}
        now = sum(nbytes[alias] for alias in self.read_outside)
        for index in sorted(left, key=lambda index: sum(nbytes[alias] for alias in left[index])):
            if sum(nbytes[alias] for alias in left[index]) >= now:
                break
            try:
                plan = installed.replanning.plan(installed.replanning.inputs.grains[index])
            except PlanError:
                continue
            return self._try_switch(plan)
        return reason

    def _outside_of(self, units: Sequence[UnitModule]) -> frozenset[str]:
        """Alias groups that the watched reads would read outside of these units.

        A unit is open around a read if its module is, or contains, the reading module, unless the step skipped it.
        """
        homes = self._installed.homes.homes.items()
        aliases = {id(member.tensor): alias for alias, home in homes for member in home.group.members}
        passed = {unit.name for i, unit in enumerate(self._installed.modules.units) if i not in self.sequence}
        left: set[str] = set()
        for reader, read in self.outside.items():
            around = (unit for unit in units if f"{reader}.".startswith(f"{unit.name}.") and unit.name not in passed)
            left |= read - {aliases.get(id(leaf.tensor)) for unit in around for leaf in unit.leaves()}
        return frozenset(left)

    def correct(self) -> None:
        """Correct the predictions of the plan in force by measured times; nothing moves."""
        installed, kind = self._installed, self._installed.timeline.kind
        if kind is None or (kind.what == TRAIN) != (installed.plan.what == TRAIN):
            return  # the plan predicts steps of another kind
        plan = installed.replanning.correct(installed.plan, installed.counters.steps, installed.timeline)
        if plan is not None:
            installed.binding.plan = plan

    def switch(self, plan: Plan) -> None:
        """As `Installation.switch`. If the units are of another grain, the next step is watched."""
        units, before = self._installed.modules.units, self._installed.plan
        every = zip(plan.manifest.units, before.manifest.units, strict=False)  # one may end with weights that are kept
        if all(unit.name == known.name for unit, known in every):
            for schedule in before.schedules:
                if plan.schedule(schedule.what).what != schedule.what:
                    plan = plan.scheduled(schedule.what, schedule.order)
        self._installed.switch(plan)
        self.keeps_trained = False
        self._orders.forget()
        self._training_orders.forget()
        if self._installed.modules.units is not units:
            self._seen = self._seen_trained = frozenset()
            self._training = None  # it has the units of the former grain
            self._stale.clear()
            self.outside = {}
            self.watching = True

    def rebudget(self, device_budget: int | str | None) -> None:
        """Switch to the plan of another budget, and try again to keep the groups that had no room."""
        replanning = self._installed.replanning
        self.switch(replanning.rebudget(device_budget))
        self._to_stay, self._has_room = replanning.kept, True

    def _try_switch(self, plan: Plan, *, any_error: bool = False) -> Exception | None:
        """Switch if possible, else keep the plan in force; returns the error in that case.

        After a switch, units may stream whose reads no step has watched: then the next step is watched before addresses
        are fixed. `any_error`: keep the plan on any error, as the change is an improvement that a call can do without.
        """
        try:
            self.switch(plan)
            self.watching = self.watches or self._streams_stale()
        except (OffloadError, StoreError, PlanError, torch.OutOfMemoryError) as error:
            if self._installed.gate.mode is StepState.REMOVED:
                raise
            logger.warning("the plan stays as it is: %s", error)
            return error
        except Exception as error:
            if not any_error or self._installed.gate.mode is StepState.REMOVED:
                raise
            logger.warning("the plan stays as it is", exc_info=True)
            return error
        return None
