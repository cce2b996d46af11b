"""The streamer: a model whose weights stream. Attaches to the modules, lets steps in one at a time, learns, detaches.

A unit is open while its module's forward runs; a step is a forward of the whole model. The order of units is learned:
after the first step, and whenever two steps in a row agree on another order than the plan's.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from weightstream.errors import InvariantError, OffloadError, PlanError, StoreError
from weightstream.plan.check import prove
from weightstream.plan.manifest import Manifest
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Planner
from weightstream.plan.refine import Times, refine
from weightstream.runtime import guards
from weightstream.runtime.backend import Backend
from weightstream.runtime.binding import Binding, Opening
from weightstream.runtime.engine import Counters
from weightstream.runtime.fixed import CAPTURED, FixedAddresses
from weightstream.runtime.homes import CodeOverflow, Homes
from weightstream.runtime.learning import ReadWatch, reading_module
from weightstream.runtime.marks import Kind, kind_of
from weightstream.runtime.timeline import Timeline, UnitTimes, profiled
from weightstream.runtime.values import moved
from weightstream.runtime.weights import Scope, UnitModule, manifest, own_tensors
from weightstream.trace import Trace

logger = logging.getLogger("weightstream")

_REFINED_EVERY = 4  # steps
_REFINED_FROM = 3  # timed steps of one kind
_MOVES = 2  # to a better plan, at most: workloads that alternate must not move weights for ever


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """What a streamer has done so far, and what it holds.

    `fills` moved `filled_nbytes` bytes; `unplanned_fills` of them were made on demand because a unit was skipped,
    repeated or out of order. `held_nbytes` counts weights by tier, coded ones as they are held: "device" (residents,
    the ring and the decode buffer), "host" (RAM, pages of mapped files included) and "disk" (read in every step);
    `model_nbytes` counts them once, and plain.

    Times are of the device, from the steps that were timed: the 2nd to the 5th of a kind in a row, and one in 17.
    `step_s` and `units` are medians over the last of them that are of one kind (calls with as many elements in their
    first tensor, launches of one graph): None and empty before any. The units of a graph are not timed. `stall_s` is
    the time that compute waited for copies in all steps, taking one that was not timed for the last that was.
    """

    steps: int
    fills: int
    filled_nbytes: int
    unplanned_fills: int
    stall_s: float
    held_nbytes: dict[str, int]
    model_nbytes: int
    predicted_step_s: float
    step_s: float | None
    units: tuple[UnitTimes, ...]


class Streamer(FixedAddresses):
    """Streams the weights of one model. Made by `weightstream.offload`; a context manager that ends with `remove()`."""

    def __init__(
        self,
        model: nn.Module,
        units: list[UnitModule],
        homes: Homes,
        backend: Backend,
        planner: Callable[[Manifest], Plan],
        blocks: Sequence[nn.Module] = (),
        on_close: Callable[[], None] = lambda: None,
        plan: Plan | None = None,
        on_plan: Callable[[Plan], None] = lambda plan: None,
    ) -> None:
        self._model = model
        self._units = units
        self._homes = homes
        self._backend = backend
        self._planner = planner
        self._on_close = on_close
        self._on_plan = on_plan  # told of every plan whose weights are in place
        self._turn = threading.RLock()  # held for a whole step
        self._lock = threading.RLock()  # held while units open and close
        self._pid = os.getpid()
        self._in_step = False
        self._counters = Counters()
        self._timeline = Timeline(backend)
        self._undo: list[Callable[[], None]] = []
        self._names = {id(m): name for name, m in model.named_modules()}
        self._removed = False
        self._sequence: list[int] = []
        self._last_sequence: tuple[int, ...] | None = None
        self._watching = True  # for reads outside of units
        self._warned = False
        self._refined: Kind | None = None  # the kind of steps that the plan was held against last
        self._num_moves = 0
        self._strays: dict[str, set[str]] = {}  # reading module -> alias groups that it reads outside of their units
        FixedAddresses.__init__(self, blocks)
        try:
            try:
                self._attach_coded(plan or self._plan_units())
            except StoreError:
                if self._homes.can_map:
                    raise
                self._attach(self._plan_units())  # what kernels were to read from pinned memory streams
            self._on_plan(self.plan)
        except BaseException:
            self._close()
            raise

    @property
    def plan(self) -> Plan:
        """The plan in force; learning the order replaces it."""
        return self._binding.plan

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._backend.device

    @property
    def _opens(self) -> bool:
        """Whether any unit must be opened before it computes."""
        return any(map(self.plan.opens, range(len(self._units))))

    @property
    def read_in_place(self) -> tuple[int, ...]:
        """Bytes of each zero-copy weight that kernels read whole in a step; of tables they read a few rows."""
        whole = self.plan.mapped - self._homes.by_row
        return tuple(nbytes for alias, nbytes in self.plan.manifest.aliases.items() if alias in whole)

    def stats(self) -> Stats:
        """Counters and bytes held, as of now. Cheap; does not wait for the device."""
        held = self._homes.held_nbytes()
        held["device"] += self._ring.numel() + self._buffer.numel()
        measured = self._timeline.measured()
        return Stats(
            **asdict(self._counters),
            stall_s=self._timeline.stall_s,
            held_nbytes=held,
            model_nbytes=self.plan.manifest.decoded_nbytes,
            predicted_step_s=self.plan.step_s,
            step_s=measured.step_s if measured else None,
            units=tuple(unit for unit in measured.units if unit.nbytes) if measured else (),
        )

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record when every unit is waited for, computed and copied inside of the block; both its ends synchronise.

        Example:
            >>> import torch, weightstream
            >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
            >>> with weightstream.offload(model, device="cpu", device_budget="48KiB") as streamer:
            ...     with streamer.trace() as trace:
            ...         y = model(torch.randn(1, 64))
            >>> [span.name for span in trace.spans if span.kind == "step"]
            ['forward 1', 'forward 1']
            >>> trace.save("trace.json")  # for https://ui.perfetto.dev
        """
        if self._removed:
            raise OffloadError("trace() after remove(): nothing streams any more")
        trace = Trace(f"{type(self._model).__name__} on {self.device}")
        with self._turn:
            self._backend.synchronize()
            self._timeline.begin_trace(trace)
        try:
            yield trace
        finally:
            with self._turn:
                self._backend.synchronize()
                self._timeline.end_trace()

    def remove(self) -> None:
        """Bring every weight back to where it was and set the model free; may be called twice.

        Raises `OffloadError` inside a step of the same thread; another thread waits for the step to end.
        """
        self._refuse_forked()
        with self._turn, self._lock, torch.inference_mode(False), torch.no_grad():
            if self._in_step or self._stepping or self._binding.openings:
                raise OffloadError("remove() inside a step: the model is computing with these weights; call it after")
            if self._session.fixed:
                self.unfix()
            if not self._removed:
                for face in self._binding.faces():
                    face.forget_holders()
                try:
                    self._detach()
                finally:
                    self._close()

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

    def _attach_coded(self, plan: Plan) -> None:
        """Attach; sizes of coded weights are estimates, and where one was too small the plan is made again."""
        while True:
            try:
                return self._attach(plan)
            except CodeOverflow as error:
                if not isinstance(self._planner, Planner):
                    raise InvariantError(str(error)) from error
                logger.info("%s", error)
                known = dict(self._planner.weights.codes())
                known |= {alias: {**known.get(alias, {}), **sizes} for alias, sizes in error.sizes.items()}
                weights = replace(self._planner.weights, codes=partial(dict, known))
                self._planner = replace(self._planner, weights=weights)
                plan = self._plan_units()

    def _attach(self, plan: Plan) -> None:
        try:
            self._homes.settle(plan)
            self._ring, self._buffer = self._backend.alloc(plan.ring_nbytes), self._backend.alloc(plan.buffer_nbytes)
            self._binding = self._bind(plan)
            self._surround()
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(
                    f"weightstream: the plan is {plan.summary()}; the model is as it was. Offload more of it"
                )
            self._detach()
            raise

    def _bind(self, plan: Plan) -> Binding:
        memory = (self._ring, self._buffer)
        return Binding(plan, *memory, self._homes, self._backend, self._counters, self._timeline)

    def _surround(self) -> None:
        self._session.streams = self._opens
        self._undo.append(self._uncompile)
        for index, unit in enumerate(self._units):
            if self.plan.opens(index):
                for module in (unit.module, *unit.also):
                    run = partial(self._run_unit, index)
                    self._undo.append(guards.surround(module, run, self._session, index))
        self._undo.append(guards.surround(self._model, self._run_step, self._session))
        self._undo.append(guards.refuse_moves(self._model))
        self._known_ids = self._tensor_ids()
        setattr(self._model, guards.ATTRIBUTE, self)
        self._undo.append(lambda: self._model.__dict__.pop(guards.ATTRIBUTE, None))

    def _tensor_ids(self) -> set[int]:
        return {id(tensor) for module in self._model.modules() for _, tensor in own_tensors(module)}

    def _detach(self, *, decode: bool = True) -> None:
        self._backend.synchronize()
        while self._undo:
            self._undo.pop()()
        if hasattr(self, "_binding"):
            self._binding.close_all()
        self._ring = self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._homes.restore(decode=decode)

    def _close(self) -> None:
        self._removed = True
        self._graphs.clear()
        self._session.close()
        self._timeline.close()
        self._backend.close()
        self._on_close()

    # -- a step --------------------------------------------------------------------------------------------------

    def _run_step(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._refuse_forked()
        with self._turn:
            if self._in_step or self._removed:  # the model calls itself, or was let go while this thread waited
                return forward(*args, **kwargs)
            args, kwargs = self._placed(args, kwargs)
            if self._session.fixed or self._is_compiled():
                return self._run_fixed(forward, args, kwargs)
            if self._backend.capturing():
                if self._opens:
                    raise OffloadError(CAPTURED)
                return forward(*args, **kwargs)
            guards.refuse_foreign({unit.name: unit.module for unit in self._units})
            self._sequence.clear()
            with self._timeline.step(kind_of(args, kwargs)):
                output = self._run_eager(forward, args, kwargs)
            with torch.inference_mode(False), torch.no_grad():
                self._learn()
                if self._counters.steps % _REFINED_EVERY == 0 and not (self._watching or self._graphs):
                    self._refine()
            return output

    def _run_eager(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            self._in_step = True
            with self._lock:
                self._binding.begin_step()
            self._counters.steps += 1
            with self._watched() if self._watching else nullcontext():
                return forward(*args, **kwargs)
        except RuntimeError as error:
            if re.search("device|weight type", str(error)):
                self._watching = True  # it may have read a weight outside of its unit: the next step will see it
            if self._tensor_ids() != self._known_ids:
                raise OffloadError(
                    "parameters or modules of the model were replaced while it is offloaded: call remove(), "
                    "change it, and offload again"
                ) from error
            raise
        finally:
            self._in_step = False
            with self._lock:
                self._binding.rest()

    def _run_unit(self, unit: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._refuse_forked()
        # Outside of a step a unit takes a turn of its own. Inside, threads of the model's may run units side by side.
        with nullcontext() if self._in_step else self._turn:
            if self._session.fixed:
                return self._run_held(unit, forward, args, kwargs)
            if self._removed:
                return forward(*args, **kwargs)
            opening, alone = Opening(unit), not self._in_step and not self._binding.openings
            if alone:
                args, kwargs = self._placed(args, kwargs)
            try:
                with self._lock:
                    self._binding.open(opening, alone)
                    if not alone:
                        self._sequence.append(unit)
                name = self._units[unit].name
                with guards.refuse_backward(name), profiled(name):
                    output = forward(*args, **kwargs)
                if self._binding.own_outputs(output):
                    self._hide()
                return output
            finally:
                with self._lock:
                    self._binding.close(opening, alone, self._trains(unit))

    def _trains(self, unit: int) -> bool:
        """Whether a module of the unit may update buffers in its forward, as norms do in training mode."""
        return self._binding.has_buffers(unit) and any(m.training for m in self._units[unit].module.modules())

    def _refuse_forked(self) -> None:
        if os.getpid() != self._pid:
            raise OffloadError(
                "this model was offloaded before the process forked: the thread that copies its weights is not here. "
                "Use the start method 'spawn', or offload in the child."
            )

    def _placed(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Inputs on the device. `model.device` may say "cpu" between steps, and that is where callers put them then."""
        if self._backend.device.type == "cpu":
            return args, kwargs
        return moved(args, self._backend.device), moved(kwargs, self._backend.device)

    # -- learning ------------------------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """See reads of streamed tensors that no open unit shows; give them the true bytes until the step ends."""
        streamed = {id(face.member.tensor): face for face in self._binding.faces()}
        shown: dict[int, torch.Tensor] = {}

        def on_read(tensor: torch.Tensor) -> None:
            face = streamed[id(tensor)]
            alias = face.member.spec.alias
            if id(tensor) in shown or self._binding.shows(tensor):
                return
            reader = reading_module(self._names)
            self._strays.setdefault(reader or "", set()).add(alias)
            shown[id(tensor)] = face.home
            face.show(self._homes.read(alias, face.member))
            self._counters.fills += 1
            self._counters.unplanned_fills += 1
            self._counters.filled_nbytes += face.home.nbytes

        self._strays = {}
        try:
            weights = (tensor for module in self._model.modules() for _, tensor in own_tensors(module))
            with ReadWatch((face.member.tensor for face in streamed.values()), weights, on_read, self._hide):
                yield
        finally:
            for key in shown:
                streamed[key].show(shown[key])

    def _hide(self) -> None:
        """Compilers may not look into the unit that is open: its kernels might run before its weights are there."""
        for opening in self._binding.openings[-1:]:
            unit = self._units[opening.unit]
            for module in (unit.module, *unit.also):
                guards.hide(module)

    def _learn(self) -> None:
        """Take over the order of the step that ended, if it is the first or the second of its kind in a row."""
        sequence = tuple(self._sequence)
        planned = tuple(u for u in self.plan.manifest.order if self.plan.opens(u))
        first, self._last_sequence = self._last_sequence is None, self._last_sequence
        if self._watching and self._strays:
            self._regroup(first)
        else:
            self._watching = False
        moved = sequence != planned and (first or sequence == self._last_sequence)
        if moved and not self._strays and not self._graphs:  # a graph holds the addresses of its plan
            self._reorder(sequence)
        self._last_sequence = sequence

    def _refine(self) -> None:
        """Hold the plan against the measured times of the steps that run now, and move to a better one if there is."""
        if not isinstance(self._planner, Planner) or self._timeline.kind in (None, self._refined):
            return
        measured = self._timeline.measured()
        if measured is None or measured.num_steps < _REFINED_FROM:
            return
        streamed = {index: unit for index, unit in enumerate(measured.units) if unit.nbytes}
        times = Times(
            step_s=measured.step_s,
            computes={index: unit.compute_s for index, unit in streamed.items()},
            copies={index: (unit.nbytes, unit.copy_s) for index, unit in streamed.items() if unit.copy_s},
        )
        refined, self._refined = refine(self._planner, self.plan, times), measured.kind
        told = f"{1e3 * measured.step_s:.1f} ms per step, {1e3 * self.plan.step_s:.1f} predicted"
        self._binding.plan = refined.plan
        coded = refined.plan.manifest.coded_aliases  # of which the plain bytes may not fit the host
        if refined.better is None or self._num_moves >= _MOVES or not self._homes.came_from_host or coded:
            logger.info("%s; from what was measured %.1f", told, 1e3 * refined.plan.step_s)
        else:
            logger.info("%s; moving to a plan of %.1f: %s", told, 1e3 * refined.better.step_s, refined.better.summary())
            self._num_moves += 1
            self._move(refined.better)
            self._refined = None  # its own steps are to be measured
        self._on_plan(self.plan)

    def _move(self, plan: Plan) -> None:
        """Bring every weight home and settle again."""
        prove(plan)
        self._detach(decode=False)
        try:
            self._attach_coded(plan)
        except BaseException:
            self._close()
            raise

    def _reorder(self, sequence: tuple[int, ...]) -> None:
        plan = self.plan.reordered(sequence)
        prove(plan)
        logger.debug("units run in another order than planned: %s", sequence)
        self._backend.synchronize()
        self._binding.close_all()
        try:
            self._binding = self._bind(plan)
        except BaseException:
            self._detach()
            self._close()
            raise

    def _regroup(self, first: bool) -> None:
        """Plan again, each weight that a module reads outside of its unit's forward in a unit of the reader.

        Where that does not help, or does not fit, the watch stays on: such reads are served one by one.
        """
        units = self._units
        try:
            if not first:
                raise PlanError("a hook or a function outside of the model's forwards reads them")
            self._units = self._with_strays()
            plan = self._plan_units()
        except PlanError as error:
            self._units = units
            names = ", ".join(sorted(alias for aliases in self._strays.values() for alias in aliases))
            if not self._warned:
                logger.warning("%s are read outside of their module's forward, which is slow here: %s", names, error)
            self._warned = True
            return
        logger.info("weights read outside of their module's forward: %s", self._strays)
        self._move(plan)
        self._on_plan = lambda plan: None  # of other units than the next load begins with

    def _with_strays(self) -> list[UnitModule]:
        modules = dict(self._model.named_modules())
        opened = {id(m) for unit in self._sequence for m in (self._units[unit].module, *self._units[unit].also)}
        units = list(self._units)
        for reader, aliases in self._strays.items():
            inside = next((i for i, u in enumerate(units) if _contains(u, modules[reader])), None)
            if inside is not None:
                units[inside] = replace(units[inside], adopted=units[inside].adopted | aliases)
                continue
            enclosing = any(id(m) in opened for m in modules[reader].modules())
            added = UnitModule(
                name=reader,
                module=modules[reader],
                scope=Scope.NONE,
                adopted=frozenset(aliases),
                enclosing=enclosing,
            )
            units.append(added)
        return units


def _contains(unit: UnitModule, module: nn.Module) -> bool:
    return unit.scope is Scope.TREE and any(m is module for m in unit.module.modules())
