"""The streamer: a plan bound to a backend, homes and a model. Attaches hooks, lets steps in one at a time, detaches.

A unit opens before its module's forward (wait, then the tensors show their ring bytes) and closes after it (home bytes
again, then release). A step is a forward of the whole model. The order of units is learned: after the first step, and
whenever two steps in a row agree on another order than the plan's.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from weightstream.errors import InvariantError
from weightstream.plan.check import prove
from weightstream.plan.manifest import Manifest
from weightstream.plan.plan import Plan
from weightstream.runtime import guards
from weightstream.runtime.backend import Backend
from weightstream.runtime.engine import Counters, Engine
from weightstream.runtime.faces import Face, UnitFaces
from weightstream.runtime.homes import Homes
from weightstream.runtime.learning import ReadWatch, reading_module
from weightstream.runtime.weights import Scope, UnitModule, manifest

logger = logging.getLogger("weightstream")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What a streamer has done so far, and what it holds.

    `fills` moved `filled_nbytes` bytes; `unplanned_fills` of them were made on demand because a unit was skipped,
    repeated or out of order. `stall_s` is the time that compute waited for copies. `held_nbytes` counts weights by
    tier: "device" (residents and the ring), "host" (RAM) and "disk" (mapped files); `model_nbytes` counts them once.
    """

    steps: int
    fills: int
    filled_nbytes: int
    unplanned_fills: int
    stall_s: float
    held_nbytes: dict[str, int]
    model_nbytes: int


class Streamer:
    """Streams the weights of one model. Made by `weightstream.offload`; a context manager that ends with `remove()`."""

    def __init__(
        self,
        model: nn.Module,
        units: list[UnitModule],
        homes: Homes,
        backend: Backend,
        planner: Callable[[Manifest], Plan],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._units = units
        self._homes = homes
        self._backend = backend
        self._planner = planner
        self._on_close = on_close
        self._lock = threading.RLock()
        self._owner: int | None = None  # the thread that is inside a step
        self._counters = Counters()
        self._undo: list[Callable[[], None]] = []
        self._names = {id(m): name for name, m in model.named_modules()}
        self._removed = False
        self._learning = True
        self._last_sequence: tuple[int, ...] | None = None
        try:
            self._attach(self._plan_units())
        except BaseException:
            self._backend.close()
            self._on_close()
            raise

    # -- what users see ------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in force; learning the order replaces it."""
        return self._plan

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._backend.device

    def stats(self) -> Stats:
        """Counters and bytes held, as of now. Cheap; does not wait for the device."""
        held = self._homes.held_nbytes()
        if not self._removed:
            held["device"] += self._ring.numel()
        return Stats(
            steps=self._counters.steps,
            fills=self._counters.fills,
            filled_nbytes=self._counters.filled_nbytes,
            unplanned_fills=self._counters.unplanned_fills,
            stall_s=self._backend.stall_s(),
            held_nbytes=held,
            model_nbytes=self._plan.manifest.nbytes,
        )

    def remove(self) -> None:
        """Bring every weight back to where it was and take all hooks off; may be called twice."""
        with self._lock:
            if self._removed:
                return
            self._detach()
            self._removed = True
            self._backend.close()
            self._on_close()

    def __enter__(self) -> Streamer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model is a plain model: its streamer is None

    # -- attach and detach ---------------------------------------------------------------------------------------

    def _plan_units(self) -> Plan:
        plan = self._planner(manifest(self._units, {a: h.group for a, h in self._homes.homes.items()}))
        prove(plan)
        return plan

    def _attach(self, plan: Plan) -> None:
        self._plan = plan
        self._homes.settle(plan)
        try:
            self._ring = self._backend.alloc(plan.ring_nbytes)
            self._bind(plan)
            self._hook()
        except BaseException:
            self._detach()
            raise

    def _bind(self, plan: Plan) -> None:
        """Point an engine and the faces of all units at the extents of a plan; the ring keeps its memory."""
        self._plan = plan
        num = range(len(plan.manifest.units))
        self._faces = [self._unit_faces(plan, unit) for unit in num]
        self._open: list[int] = []
        self._overflow: dict[int, UnitFaces] = {}
        self._sequence: list[int] = []
        copies = [self._homes.copies(plan, unit, self._ring) for unit in num]
        self._engine = Engine(plan, self._backend, copies, self._counters)
        self._engine.prime()
        self._sample()

    def _unit_faces(self, plan: Plan, unit: int, base: torch.Tensor | None = None) -> UnitFaces:
        """The faces of a unit over its extent, or over `base`, memory of its own."""
        start = plan.extents[unit].offset if base is None else 0
        base = self._ring if base is None else base
        faces: list[Face] = []
        groups = []
        mine = {spec.name for spec in plan.manifest.units[unit].tensors}
        for alias, offset in plan.streamed(unit).items():
            group = self._homes.homes[alias].group
            groups.append(group)
            for member in group.members:
                if member.spec.name in mine:
                    ring = member.view(base, start + offset)
                    faces.append(Face(member=member, home=member.view(group.home, 0), ring=ring))
        return UnitFaces(faces, groups)

    def _hook(self) -> None:
        for index, unit in enumerate(self._units):
            if not self._plan.streams(index):
                continue
            opening = guards.Hook(lambda module, args, index=index: self._open_unit(index))
            closing = guards.Hook(lambda module, args, output, index=index: self._close_unit(index, output))
            self._undo.append(unit.module.register_forward_pre_hook(opening, prepend=True).remove)
            self._undo.append(unit.module.register_forward_hook(closing, always_call=True).remove)
        entering = guards.Hook(lambda module, args: self._enter_step())
        leaving = guards.Hook(lambda module, args, output: self._leave_step())
        self._undo.append(self._model.register_forward_pre_hook(entering, prepend=True).remove)
        self._undo.append(self._model.register_forward_hook(leaving, always_call=True).remove)
        self._undo.append(guards.refuse_moves(self._model))
        setattr(self._model, guards.ATTRIBUTE, self)
        self._undo.append(lambda: self._model.__dict__.pop(guards.ATTRIBUTE, None))

    def _detach(self) -> None:
        self._backend.synchronize()
        while self._undo:
            self._undo.pop()()
        self._ring = torch.empty(0, dtype=torch.uint8)
        self._faces, self._overflow = [], {}
        self._homes.restore()

    # -- a step --------------------------------------------------------------------------------------------------

    def _enter_step(self) -> None:
        if self._owner != threading.get_ident():
            self._lock.acquire()
            self._owner = threading.get_ident()
        else:
            self._abandon()  # an interrupt ended the last step before its hooks ran
        self._entry_error = sys.exc_info()[1]
        try:
            guards.refuse_foreign({unit.name: unit.module for unit in self._units})
            self._begin()
            if self._learning:
                self._watch()
        except BaseException:
            self._let_go()
            raise

    def _leave_step(self) -> None:
        if self._owner != threading.get_ident():
            return
        try:
            self._unwatch()
            if sys.exc_info()[1] is self._entry_error:
                self._learn()
            self._sample()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._unwatch()
        self._owner = None
        self._lock.release()

    def _abandon(self) -> None:
        self._unwatch()
        for unit in reversed(self._open.copy()):
            self._close_unit(unit, None)

    def _begin(self) -> None:
        self._forget_updated()
        self._sequence.clear()
        self._engine.begin_step()
        self._counters.steps += 1

    def _open_unit(self, unit: int) -> None:
        self._lock.acquire()
        try:
            if self._owner is None:  # a part of the model runs by itself
                if self._engine.is_behind(unit):
                    self._engine.begin_step()
                self._forget_updated()
            self._sequence.append(unit)
            if self._engine.is_blocked(unit):
                self._overflow[unit] = self._borrow(unit)
            else:
                self._engine.wait(unit)
            self._open.append(unit)
            (self._overflow.get(unit) or self._faces[unit]).to_ring()
        except BaseException:
            self._lock.release()
            raise

    def _close_unit(self, unit: int, output: object) -> None:
        if unit not in self._open:
            return
        try:
            self._open.remove(unit)
            borrowed = self._overflow.pop(unit, None)
            faces = borrowed or self._faces[unit]
            updated = faces.dirty()
            faces.to_home()
            if updated:
                self._stale(updated)
            if borrowed is None:
                self._engine.release(unit)
            if self._owner is None:
                self._sample()
            if torch.is_grad_enabled():
                guards.refuse_backward(output, self._units[unit].name)
        finally:
            self._lock.release()

    def _borrow(self, unit: int) -> UnitFaces:
        """Faces over memory of their own, filled at once: a unit in use holds the unit's bytes of the ring."""
        memory = self._backend.alloc(self._plan.extents[unit].nbytes)
        for alias, offset in self._plan.streamed(unit).items():
            home = self._homes.homes[alias].group.home
            memory[offset : offset + home.numel()].copy_(home)
        self._counters.fills += 1
        self._counters.unplanned_fills += 1
        self._counters.filled_nbytes += self._plan.unit_nbytes[unit]
        return self._unit_faces(self._plan, unit, memory)

    # -- updates of the home between steps -----------------------------------------------------------------------

    def _sample(self) -> None:
        for unit in self._engine.held():
            self._faces[unit].sample()

    def _forget_updated(self) -> None:
        """What the ring holds of weights that were updated since the last step is stale."""
        updated = [f for faces in self._faces for f in faces.faces if f.changed() or f.adopt()]
        if updated:
            self._stale(updated)
        self._engine.forget(unit for unit in self._engine.held() if self._faces[unit].home_was_written())

    def _stale(self, updated: Iterable[Face]) -> None:
        aliases = {face.member.spec.alias for face in updated}
        for unit, faces in enumerate(self._faces):
            mine = [face for face in faces.faces if face.member.spec.alias in aliases]
            for face in mine:
                face.agree()
            if mine and unit not in self._open:
                self._engine.forget([unit])

    # -- learning ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._strays: dict[str, set[str]] = {}  # reading module -> alias groups that it reads outside of their units
        streamed = {id(f.member.tensor): f.member for faces in self._faces for f in faces.faces}
        self._shown: list[tuple[torch.Tensor, torch.Tensor]] = []

        def on_read(tensor: torch.Tensor) -> None:
            alias = streamed[id(tensor)].spec.alias
            if any(alias in self._plan.streamed(unit) for unit in self._open):
                return
            reader = reading_module(self._names)
            if reader is None:
                raise InvariantError(f"{streamed[id(tensor)].names[0]} is read in a step by no module of the model")
            self._strays.setdefault(reader, set()).add(alias)
            if tensor.device != self._backend.device:
                self._shown.append((tensor, tensor.data))
                tensor.data = tensor.data.to(self._backend.device)

        self._mode: ReadWatch | None = ReadWatch((m.tensor for m in streamed.values()), on_read)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _unwatch(self) -> None:
        if getattr(self, "_mode", None) is None:
            return
        assert self._mode is not None
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._mode = None
        for tensor, data in self._shown:
            tensor.data = data

    def _learn(self) -> None:
        """Take over the order of the step that ended, if it is the first or the second of its kind in a row."""
        sequence = tuple(self._sequence)
        planned = tuple(u for u in self._plan.manifest.order if self._plan.streams(u))
        first, self._learning = self._learning, False
        if first and self._strays:
            self._regroup()
        elif sequence != planned and (first or sequence == self._last_sequence):
            self._reorder(sequence)
        self._last_sequence = sequence

    def _reorder(self, sequence: tuple[int, ...]) -> None:
        plan = self._plan.reordered(sequence)
        prove(plan)
        logger.debug("units run in another order than planned: %s", sequence)
        self._backend.synchronize()
        self._bind(plan)

    def _regroup(self) -> None:
        """Plan again with the weights that a module reads outside of their unit's forward in a unit of the reader."""
        logger.info("weights read outside of their module's forward: %s", self._strays)
        modules = dict(self._model.named_modules())
        opened = {id(self._units[unit].module) for unit in self._sequence}
        for reader, aliases in self._strays.items():
            inside = [u for u in self._units if _contains(u, modules[reader])]
            if inside:
                inside[0].adopted |= aliases
                continue
            enclosing = any(id(m) in opened for m in modules[reader].modules())
            self._units.append(
                UnitModule(
                    name=reader,
                    module=modules[reader],
                    scope=Scope.NONE,
                    adopted=frozenset(aliases),
                    enclosing=enclosing,
                )
            )
        self._detach()
        try:
            self._attach(self._plan_units())
        except BaseException:
            self._removed = True
            self._backend.close()
            self._on_close()
            raise


def _contains(unit: UnitModule, module: nn.Module) -> bool:
    return unit.scope is Scope.TREE and any(m is module for m in unit.module.modules())
