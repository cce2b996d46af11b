"""A streamer whose weights have fixed addresses: what compiled and captured code needs.

While addresses are fixed every streamed tensor shows its ring bytes, whatever they hold, and a unit is right only
between its wait and its release. So it takes a step that was watched before: no weight may be read elsewhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from weightstream.errors import ConfigError, OffloadError
from weightstream.runtime import guards, ops
from weightstream.runtime.backend import Backend, Side
from weightstream.runtime.binding import Binding
from weightstream.runtime.engine import Counters
from weightstream.runtime.homes import Homes
from weightstream.runtime.marks import Kind, kind_of
from weightstream.runtime.recording import Recording
from weightstream.runtime.timeline import profiled
from weightstream.runtime.weights import UnitModule

logger = logging.getLogger("weightstream")

CAPTURED = "this model is being captured by torch.cuda.graph alone: use model.weightstream.capture(graph) in its place"


class FixedAddresses:
    """The part of a streamer that compiled and captured code talks to."""

    _model: nn.Module
    _units: list[UnitModule]
    _backend: Backend
    _homes: Homes
    _binding: Binding
    _counters: Counters
    _turn: threading.RLock
    _lock: threading.RLock
    _strays: dict[str, set[str]]
    _in_step: bool
    _removed: bool
    _watching: bool

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._session = ops.Session(self)
        self._recording: Recording | None = None
        self._before: Recording | None = None  # the graph captured last, if nothing ran since
        self._stepping = False
        self._graphs: WeakKeyDictionary[Any, Recording] = WeakKeyDictionary()
        self._compile: dict[str, Any] | None = None  # the options of `compile`
        self._entry: Callable[..., Any] | None = None  # the model's compiled forward
        self._told = False
        self._uncompiled: list[Callable[[], None]] = []
        self._alone = False  # graphs are launched by somebody who tells nobody
        self._stale = False  # they may have been: nobody knows what the ring holds

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, weights show their fixed addresses in the ring, for code that is compiled or captured.

        Any number of forwards and graph launches may run inside, and cost less than outside: weights are looked at for
        updates at the entry alone. Gradients are off. Other threads wait.

        Raises `OffloadError` where the model cannot run so; the message says why.
        """
        self._refuse_forked()
        with self._turn, torch.no_grad():
            if self._session.fixed:
                yield
                return
            self.fix()
            self._stepping = True
            try:
                yield
            finally:
                self._stepping = False
                self.unfix()

    def fix(self, *, learned: bool = False) -> None:
        """Enter `step` until `unfix`: for an engine that owns the model. Raises `OffloadError` as `step` does.

        `learned` says that no weight is read outside of its unit, so that no step has to be watched.
        """
        self._watching = self._watching and not learned
        if reason := self.why_not_fixed():
            raise OffloadError(f"the weights cannot have fixed addresses now: {reason}")
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._binding.wake()
            if self._homes.sources_changed or any(face.relaid for face in self._binding.faces()):
                self._graphs.clear()
                self._homes.sources_changed = False
            self._primed()  # now, as a capture by hand may be under way later
            self._binding.fix()
            self._session.fixed = True

    def unfix(self) -> None:
        """Undo `fix`."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._forget_unseen()
            self._before = None
            self._session.fixed = False
            self._binding.unfix()

    @property
    def learned(self) -> bool:
        """Whether a step has taught the order of the weights."""
        return not self._watching

    def why_not_fixed(self) -> str | None:
        """Why `step` would raise; None if it would not."""
        if self._removed:
            return "the model is not offloaded any more"
        if self._in_step or self._binding.openings:
            return "a step is under way"
        if self._backend.capturing():
            return "a capture is under way; enter step() before it"
        if self._strays:
            names = ", ".join(sorted(alias for aliases in self._strays.values() for alias in aliases))
            return f"{names} are read outside of their module's forward"
        if self._watching:
            return "the order of the weights is not known yet; call the model once first"
        if updated := sorted(self._binding.updated):
            return f"{', '.join(updated)} are updated by the model's own forward"
        if moving := self._binding.moving():
            return f"{', '.join(moving)} stand in several units; raise the budget, or name them in zero_copy_params"
        if training := [unit.name for index, unit in enumerate(self._units) if self._trains(index)]:
            return f"{', '.join(training)} may update buffers in training mode; call model.eval()"
        return None

    # -- graphs --------------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self, graph: Any, **options: Any) -> Iterator[None]:
        """Capture a step, or a piece of one, in place of `torch.cuda.graph(graph, **options)`, or inside of it.

        All forks and joins are made here. Launch the graph with `replay`; a streamer may have any number of graphs.

        Args:
            graph: a `torch.cuda.CUDAGraph`.
            options: for `torch.cuda.graph`: `pool`, `stream`, `capture_error_mode`.
        """
        with self.step():
            with self._lock:
                self._forget_unseen()
                held = self._before.left if self._before is not None else self._primed()
            with self._backend.capture(graph, **options):
                self._recording = recording = Recording(self._binding.engine, self._backend, held, self._before)
                try:
                    yield
                finally:
                    self._recording = None
                    recording.end()
            self._before = self._graphs[graph] = recording

    def replay(self, graph: Any) -> None:
        """Launch a captured graph: the fills that it needs go before, those for the next step behind it."""
        with self.step() if graph in self._graphs else nullcontext(), self._lock:
            if (recording := self._graphs.get(graph)) is None:
                raise OffloadError(
                    "no graph of this streamer's capture(), or since then came remove(), a new layout, or an update of "
                    "a weight that copies took from its file: capture it again"
                )
            self._forget_unseen()
            self._counters.steps += recording.begins
            timeline, kind = self._binding.engine.timeline, Kind("graph", id(graph))
            with timeline.step(kind, inside=False, whole=recording.is_whole):
                recording.before_launch()
                graph.replay()
                recording.after_launch()

    def _primed(self) -> set[int]:
        """The units in the ring at the start of a step."""
        self._binding.engine.end_step()
        self._binding.engine.prime()
        return set(self._binding.engine.held())

    # -- graphs that somebody else launches --------------------------------------------------------------------------

    def sync(self) -> None:
        """Before a graph is captured or launched: make compute wait for every copy in flight."""
        with self._lock:
            if not self._stale:
                self._primed()
                self._binding.engine.settle()
            self._alone = self._stale = True

    def join(self) -> None:
        """Inside a capture, before it ends: make the copies that are due, and join them."""
        if self._recording is not None:
            self._before, self._recording = self._recording, None
            self._before.end()

    def _record_alone(self) -> None:
        if not self._alone:
            raise OffloadError(CAPTURED)
        held = self._before.held if self._before is not None else set(self._binding.engine.held())
        self._recording = Recording(self._binding.engine, self._backend, held, self._before, deferred=False)

    def _forget_unseen(self) -> None:
        """Graphs may have run that told nobody: what they left is not known, and copies must wait for their reads."""
        if self._stale:
            self._stale, end = False, self._backend.event()
            self._backend.record(Side.COMPUTE, end)
            self._backend.wait(Side.COPY, end)
            self._binding.engine.forget(self._binding.engine.held())

    # -- units -----------------------------------------------------------------------------------------------------

    def wait_unit(self, unit: int) -> None:
        """What `weightstream::wait` does: order compute after the unit's fill."""
        if self._recording is not None and not self._recording.deferred and not self._backend.capturing():
            self._recording, self._before, self._stale = None, None, True  # its capture failed before join()
        if self._recording is None and self._backend.capturing():
            self._record_alone()
        self._binding.enter(unit)
        if self._recording is not None:
            self._recording.wait(unit)
            self._binding.decode(unit)
            return
        with self._lock:
            self._forget_unseen()
            self._before = None
            self._binding.hold(unit)
            self._binding.decode(unit)

    def release_unit(self, unit: int) -> None:
        """What `weightstream::release` does: the unit's last kernel is queued."""
        self._binding.leave(unit)
        if self._recording is not None:
            self._recording.release(unit)
            return
        with self._lock:
            self._binding.let_go(unit)

    def _run_held(self, unit: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit's forward at fixed addresses, eager or captured."""
        self.wait_unit(unit)
        try:
            name = self._units[unit].name
            with guards.refuse_backward(name), profiled(name) if self._recording is None else nullcontext():
                output = forward(*args, **kwargs)
            self._binding.own_outputs(output)
            return output
        finally:
            self.release_unit(unit)

    # -- torch.compile -----------------------------------------------------------------------------------------------

    def compile(self, scope: Literal["model", "blocks"] = "model", **options: Any) -> None:
        """Run the model through `torch.compile` from now on, whole or block by block; `remove()` undoes it.

        The first call of a fresh streamer still runs eager, as it teaches the order of the weights.

        Args:
            scope: "model" makes one graph; "blocks" one for all blocks of a kind, which compiles faster.
            options: for `torch.compile`, such as `fullgraph=True`: nothing of ours breaks a graph.
        """
        if scope not in ("model", "blocks") or (scope == "blocks" and not self._blocks):
            raise ConfigError(f"scope = {scope!r}: give 'model', or 'blocks' where a model has repeated blocks")
        self._uncompile()
        self._compile = {"scope": scope} | options

    def _is_compiled(self) -> bool:
        """Whether this step runs compiled; says once why not."""
        if self._compile is None or (self._watching and not self._strays):
            return False
        if reason := self.why_not_fixed():
            if not self._told:
                logger.warning("the model runs eager and not compiled: %s", reason)
            self._told = True
            return False
        return True

    def _run_fixed(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The model's forward at fixed addresses: compiled if that was asked for."""
        if self._compile is not None and self._entry is None:
            self._entry = self._compiled_entry(forward, **self._compile)
        with self._binding.engine.timeline.step(kind_of(args, kwargs)), self.step():
            self._in_step = True
            try:
                return (self._entry or forward)(*args, **kwargs)
            except BaseException:
                self._binding.abandon()  # compiled code does not release what an error leaves in use
                raise
            finally:
                self._in_step = False

    def _compiled_entry(self, forward: Callable[..., Any], scope: str, **options: Any) -> Callable[..., Any]:
        if scope == "model":
            return torch.compile(self._model.forward, **options)
        for block in self._blocks:
            self._uncompiled.append(partial(_put_back, block, block.__dict__.get("_compiled_call_impl")))
            block.compile(**options)
        return forward

    def _uncompile(self) -> None:
        """Let go of what was compiled; the next step compiles again if that is still wanted."""
        self._entry = None
        while self._uncompiled:
            self._uncompiled.pop()()

    # -- what a streamer gives -----------------------------------------------------------------------------------------

    def _refuse_forked(self) -> None:
        raise NotImplementedError

    def _trains(self, unit: int) -> bool:
        raise NotImplementedError


def _put_back(block: nn.Module, compiled: Any) -> None:
    block.__dict__.pop("_compiled_call_impl", None)
    if compiled is not None:
        block._compiled_call_impl = compiled
