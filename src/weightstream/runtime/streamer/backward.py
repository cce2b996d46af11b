"""Backward passes: opens units again, at the same addresses, for the nodes of autograd that read their weights.

[Note: backward passes]
Every unit has one extent of the ring and one place in the decode buffer. So whatever a graph keeps of a weight, such as
`weight.t()`, is right again as soon as its unit is open again. Nothing is packed or copied. Only the time is missing:
each node that may read a weight must find its unit open. Two hooks ensure that:

  unpacking  A forward under gradients runs inside of saved-tensor hooks. A node that needs a saved tensor opens the
             unit that saved it, whatever led to the node: an output of the unit, or a tensor that its forward stored
             elsewhere. Hooks that are in force around the unit, such as those of a checkpoint, get all tensors except
             weights, and run first: a checkpoint computes its part of the forward again, which opens other units.
  nodes      Nodes in Python, such as those of bitsandbytes, keep tensors without saving them. Of these, and of the
             nodes of the unit's outputs, a hook opens the unit before they run. Autograd runs the nodes of one forward
             in the reverse order of their creation, so the nodes of a unit follow each other.

One unit is open at a time: it closes where the next one opens, in the backward pass or in a forward that is computed
again inside of it, and at the end of the pass. A node that still needs it opens it again.

Not seen: nodes that the forward of a unit creates in threads of its own, and nodes in Python that keep weights without
saving them and are only reached by a tensor that the forward has stored elsewhere. A watched forward finds the latter,
and their unit stays on the device. In its backward pass, operators of the units' nodes that are given memory of a
closed unit raise.

[Note: whose backward pass it is]
On an accelerator a backward pass runs in a thread of autograd, and the thread that called it waits. So no thread has
the turn during a pass, but the pass itself: it takes it at its first node, and gives it back when its graph task has
ended, in whatever thread that is. Threads belong to the pass if they run one of its graph tasks. A task inside of it,
as a reentrant checkpoint has, belongs to it if it reads what was computed in the pass. Any other thread waits. A task
that fails calls nothing at its end, but it frees the function that it would have called. That function is given to
autograd before the pass takes the turn, and has the turn as long as it lives: so an interrupt at any line of the pass,
or of its end, leaves no turn behind.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.errors import OffloadError
from weightstream.runtime.ring.binding import Binding
from weightstream.runtime.ring.state import StepState
from weightstream.runtime.streamer.active_plan import Installation
from weightstream.runtime.streamer.learning import Learning
from weightstream.runtime.streamer.read_watch import EagerStance, MemoryWatch, ReadWatch, address_of
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.runtime.tensors.thread_state import innermost_hooks

logger = logging.getLogger("weightstream")

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # of the node that this thread runs
_engine: Any = torch.autograd.Variable._execution_engine
NO_TASK = -1


class _Place:
    """The unit that the nodes of one forward need."""

    __slots__ = ("__weakref__", "binding", "is_running", "origin", "unit")

    def __init__(self, unit: int, binding: Binding, origin: _Pass | None) -> None:
        self.unit = unit
        self.binding = weakref.ref(binding)
        self.origin = origin  # the pass that the forward is computed again in
        self.is_running = True  # the forward


class _Alive:
    """Lives as long as a graph keeps tensors of one forward."""


class _Packed(NamedTuple):
    """A saved tensor and its version; or what the hooks of a unit around this one have made of it, and None."""

    kept: Any
    version: int | None
    alive: _Alive
    place: _Place


class _Saving:
    """The saved-tensor hooks of one forward of a unit.

    They run for each tensor that autograd saves, so they do little: what the hooks of a checkpoint around the unit make
    of a tensor is kept as it is.

    `theirs`: the hooks in force around the unit. `on_alive(alive)` is called if a graph keeps a tensor.
    """

    def __init__(
        self,
        place: _Place,
        enter: Callable[[_Place], None],
        spans: list[tuple[int, int]],
        theirs: Any,
        on_alive: Callable[[_Alive], None],
    ) -> None:
        self.place = place
        self.theirs = theirs
        around = getattr(theirs[0], "__self__", None) if theirs is not None else None
        self._around = around if isinstance(around, _Saving) else None  # that of a unit which calls this one
        # the hooks around, unless a unit has made them
        self._others = theirs if self._around is None else None
        self._enter = enter
        self._spans = spans  # addresses of the unit's weights, which lie between these two
        self._begin, self._end = (min(b for b, _ in spans), max(e for _, e in spans)) if spans else (0, 0)
        self._on_alive = on_alive
        self._alive: weakref.ref[_Alive] | None = None
        self._held: _Alive | None = None  # with others' hooks: autograd keeps the hooks as long as the tensors

    def pack(self, tensor: torch.Tensor) -> Any:
        if self._others is not None and not self._is_weight(tensor):
            if self._held is None:
                self._held = self._kept_alive()
            return self._others[0](tensor)
        if self._around is not None and self._around._is_weight(tensor):  # an argument of this unit
            return self._around.pack(tensor)
        alive = self._kept_alive()
        if self._around is not None and not self._is_weight(tensor):
            return _Packed(self.theirs[0](tensor), None, alive, self.place)
        # detached: the node's own output would keep the node
        return _Packed(tensor.detach(), tensor._version, alive, self.place)

    def unpack(self, packed: Any) -> torch.Tensor:
        if self._others is not None and type(packed) is not _Packed:
            kept = self._others[1](packed)  # first: it may compute other units again
            self._enter(self.place)
            return kept  # type: ignore[no-any-return]
        kept, version, _, place = packed
        if version is None:
            kept = self.theirs[1](kept)
        elif kept._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{kept.dtype} of shape {tuple(kept.shape)} is at version {kept._version}, expected {version}"
            )
        self._enter(place)
        return kept  # type: ignore[no-any-return]

    def _kept_alive(self) -> _Alive:
        alive = self._alive() if self._alive is not None else None
        if alive is None:
            alive = _Alive()
            self._alive = weakref.ref(alive)
            self._on_alive(alive)
        return alive

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        at = address_of(tensor)
        if self._begin <= at < self._end and any(begin <= at < end for begin, end in self._spans):
            return True
        return self._around is not None and self._around._is_weight(tensor)


class _End:
    """Calls `end(True)` when it is freed, unless `end(False)` has returned."""

    end: Callable[[bool], None] | None = None  # of the class: an interrupt may come before an object has one

    def __init__(self, end: Callable[[bool], None]) -> None:
        self.end = end

    def __del__(self) -> None:
        if self.end is not None:
            self.end(True)


def _at_end(end: Callable[[bool], None]) -> weakref.ref[_End]:
    """Have autograd call `end(has_failed)` after the graph task that this thread runs.

    Returns a reference that lives until then. No frame holds what it refers to, as tracebacks hold frames.
    """
    found = weakref.ref(kept := _End(end))
    callback = partial(_end_well, found)
    callback.kept = kept  # type: ignore[attr-defined]  # autograd frees it after the task
    _engine.queue_callback(callback)
    return found


def _end_well(kept: Callable[[], Any]) -> None:
    """The graph task has not failed. `kept()`: its `_End`."""
    kept().end(False)
    kept().end = None


class _Watches:
    """The watches of the nodes that run now in one graph task."""

    def __init__(self) -> None:
        self._running: list[MemoryWatch] = []
        self._eager = EagerStance()

    def begin(self, watch: MemoryWatch) -> None:
        if not self._running:
            self._eager.begin()
        self._running.append(watch)
        watch.begin()

    def end(self, watch: MemoryWatch) -> None:
        watch.end()
        self._running.remove(watch)
        if not self._running:
            self._eager.end()

    def cancel(self) -> None:
        """The graph task has ended; if an error cut it short, watches are in force still."""
        while self._running:
            self._running.pop().cancel()
        self._eager.end()


class _Pass:
    """A backward pass. Inside of a forward, which has the turn, it is an inner one."""

    def __init__(self, task: int) -> None:
        self.tasks = {task}
        self.end: weakref.ref[_End] | None = None
        self.guest: int | None = None  # a thread that joined the forward


class Backward:
    """The backward passes of one model: [Note: backward passes], [Note: whose backward pass it is].

    `heal()` closes all units, and `heal_if_cut()` does where a step was cut short. `close(unit)` ends an opening.
    """

    def __init__(
        self,
        installed: Installation,
        learning: Learning,
        close: Callable[[int], None],
        heal: Callable[[], None],
        heal_if_cut: Callable[[], None],
    ) -> None:
        self._installed = installed
        self._gate = installed.gate
        self._learning = learning
        self._close = close
        self._heal = heal
        self._heal_if_cut = heal_if_cut
        self._begun: _Pass | None = None  # the last that began, until its end
        self._current: int | None = None  # the unit that is open for nodes
        self._opened_task = NO_TASK  # the graph task that it is open for
        self._opened_binding: object = None
        self._plain_of, self._plain = installed.modules.units, set[int]()
        self._watches: dict[int, _Watches] = {}  # by graph task
        self._depth = 0  # forwards of units that are computed again now

    @property
    def is_recomputing(self) -> bool:
        """Whether a forward is computed again inside of a pass."""
        return self._depth > 0

    @property
    def _pass(self) -> _Pass | None:
        """The pass under way. One whose end was cut short, as by a second interrupt, is not."""
        begun = self._begun
        return begun if begun is not None and begun.end is not None and begun.end() is not None else None

    def _is_inner(self, of: _Pass) -> bool:
        return of.end is None or self._gate.turn.holder is not of.end

    # -- forwards ----------------------------------------------------------------------------------------------------

    def follow(self, unit: int) -> Followed | None:
        """Follow the unit's forward, which begins now; None if one around it is followed for the same unit."""
        theirs = innermost_hooks()
        around = getattr(theirs[0], "__self__", None) if theirs is not None else None
        if isinstance(around, _Saving) and around.place.unit == unit and around.place.is_running:
            return None
        binding = self._installed.binding
        place = _Place(unit, binding, self._pass)
        graphs = self._installed.graphs_alive
        saving = _Saving(place, self._enter, binding.addresses(unit), theirs, graphs.add)
        return Followed(saving, self)

    def open_again(self, unit: int) -> None:
        """Open the unit for its forward, which is computed again in a pass; close the one that is open for nodes, if it
        is another. The caller holds the gate's lock, and calls `end_again` after the forward."""
        self._depth += 1
        with _disable_current_modes():  # the node that has it computed may be watched
            if self._current != unit:
                self._close_current()
            if self._installed.binding.open(unit):
                self._learning.sequence.append(unit)

    def end_again(self) -> None:
        self._depth -= 1

    def watch(self) -> ReadWatch | None:
        """The watch of the step under way; None if it is not watched, or is a backward pass."""
        return None if self._pass is not None else self._learning.watch

    def watches_nodes(self) -> bool:
        """Whether the operators of nodes that are made now are watched."""
        return self._learning.watches_pass

    def hook(self, node: Any, place: _Place) -> None:
        """Have the unit open before the node runs."""
        node.register_prehook(partial(self._before_node, place))
        if isinstance(node, BackwardCFunction):
            self._installed.nodes_alive.add(place)

    def hook_watched(self, node: Any, place: _Place) -> None:
        """Watch the operators of the node."""
        # compiled code may be compiled when it runs, where modes change what is compiled; the node of a parameter leads
        # to no other, and may outlive the step
        if type(node).__name__.startswith("CompiledFunction") or not node.next_functions:
            return
        watch = MemoryWatch(self._installed.binding.spans, partial(self._refuse_closed, place))
        node.register_prehook(lambda *_: self._watches_of_task().begin(watch))
        node.register_hook(lambda *_: self._watches_of_task().end(watch))

    def _watches_of_task(self) -> _Watches:
        task = graph_task()
        if task not in self._watches:
            _at_end(partial(self._end_watches, task))
            self._watches[task] = _Watches()
        return self._watches[task]

    def _end_watches(self, task: int, has_failed: bool) -> None:
        if (watches := self._watches.pop(task, None)) is not None:
            watches.cancel()

    def found_stale(self, place: _Place) -> None:
        """A node of the unit would not find it open, were it not watched."""
        self._learning.found_stale(place.unit)

    def _refuse_closed(self, place: _Place, tensor: torch.Tensor) -> None:
        binding, units = self._installed.binding, self._installed.modules.units
        if place.binding() is not binding or (owner := binding.closed_owner(tensor)) is None:
            return
        self._learning.found_stale(owner)
        raise OffloadError(
            f"the backward pass of {units[place.unit].name} reads weights of {units[owner].name}, which is closed. They"
            " stay on the device from the next forward on, if there is room: run this step again"
        )

    # -- passes ------------------------------------------------------------------------------------------------------

    def admits(self) -> bool:
        """Whether the calling thread, which runs a graph task, computes a forward again: it belongs to a pass then.

        Otherwise a forward is a step, or belongs to the step under way.
        """
        task = graph_task()
        if not torch.is_grad_enabled() or self._gate.is_removed:
            return False
        self._join(task, None)
        return True

    def _before_node(self, place: _Place, *_: Any) -> None:
        self._enter(place)

    def _enter(self, place: _Place) -> None:
        """Have the unit open: a node that may read its weights runs next."""
        task = graph_task()
        if self._current == place.unit and self._opened_task == task and self._opened_binding is place.binding:
            return  # as for most nodes
        if place.is_running or task == NO_TASK:  # inside of the unit's own forward; or saved tensors are inspected
            return
        if torch.is_grad_enabled():
            raise OffloadError(
                "second derivatives (create_graph=True) through streamed weights are not supported: call "
                "model.weightstream.remove() first"
            )
        self._refuse_other_plan(place)
        self._join(task, place.origin)
        if self._current != place.unit:
            with self._gate.lock, torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
                self._refuse_other_plan(place)
                self._close_current()
                self._open(place.unit)
        self._opened_task, self._opened_binding = task, place.binding

    def _refuse_other_plan(self, place: _Place) -> None:
        if self._gate.is_removed or place.binding() is not self._installed.binding:
            raise OffloadError(
                "the plan has changed, or remove() was called, between a forward and its backward pass: weights are "
                "not where the graph reads them. Run the forward again"
            )

    def _open(self, unit: int) -> None:
        binding = self._installed.binding
        if binding.open(unit):
            self._learning.sequence.append(unit)
        self._current = unit
        if binding.units[unit].borrowed is not None:
            name = self._installed.modules.units[unit].name
            raise OffloadError(
                f"a backward pass inside of a forward needs the weights of {name}, whose memory a unit of that forward "
                "uses: give a larger budget, or call backward() after the forward"
            )

    def _close_current(self) -> None:
        unit, self._current, self._opened_task, self._opened_binding = self._current, None, NO_TASK, None
        if unit is not None:
            self._close(unit)

    def _join(self, task: int, origin: _Pass | None) -> None:
        """Have the calling thread, which runs this graph task, belong to the pass; begin one if there is none."""
        me, under_way = get_ident(), self._pass
        if under_way is not None and (task in under_way.tasks or origin is under_way):
            under_way.tasks.add(task)
            self._gate.turn.threads.add(me)
            return
        is_inner = me in self._gate.threads
        if is_inner and under_way is not None:
            raise OffloadError(
                "two backward passes at once over the streamed weights of one model, in one thread: call them one "
                "after the other"
            )
        if not is_inner and self._gate.turn.is_mine:  # it would wait for itself
            raise OffloadError(
                f"a backward pass cannot run here: the streamer is {self._gate.mode.value}, and this thread is inside "
                "of its step(), or computes with another model that shares its device memory"
            )
        begun = _Pass(task)
        begun.end = _at_end(partial(self._end, begun))
        try:
            if not is_inner and self._gate.turn.begin(begun.end, self._progress):
                self._heal_if_cut()
                self._wake()
            elif not is_inner:
                begun.guest = me
            self._begun, self._current, self._depth = begun, None, 0
        except BaseException:
            self._fail(begun)
            raise

    def _progress(self) -> int | None:
        """As `Streamer._progress`, for a pass that would join a forward, which may have called `backward()` itself."""
        is_forward = self._gate.mode in (StepState.LEARNING, StepState.EAGER)
        return len(self._learning.sequence) if is_forward else None

    def _wake(self) -> None:
        with self._gate.lock, torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            self._installed.binding.wake()
            self._gate.change(StepState.BACKWARD)
            self._learning.begin_backward()

    def _end(self, ended: _Pass, has_failed: bool) -> None:
        """The graph task of the pass has ended, in any thread."""
        if has_failed or self._begun is not ended:
            self._fail(ended)
            return
        try:
            with self._gate.lock, torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
                self._close_current()
                if not self._is_inner(ended):
                    self._installed.binding.rest()
                    self._gate.end_forward()
                    self._learning.end_backward()
            self._begun = None
            self._leave(ended)
        except BaseException:
            self._fail(ended)
            raise

    def _fail(self, failed: _Pass) -> None:
        """The pass was cut short: its units close, and the turn is free again. Does nothing for one that has ended."""
        unit = None
        if self._begun is failed:
            unit, self._begun, self._current, self._depth = self._current, None, None, 0
        try:
            if not self._is_inner(failed):
                self._learning.end_backward(has_failed=True)
                self._heal()
            elif unit is not None:
                with self._gate.lock, torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
                    self._close(unit)
        finally:
            self._leave(failed)

    def _leave(self, ended: _Pass) -> None:
        if ended.guest is not None:
            self._gate.turn.threads.discard(ended.guest)
        if ended.end is not None:
            self._gate.turn.finish(ended.end)


class Followed:
    """One forward of a unit that is followed: `hooks` are to be in force around it."""

    def __init__(self, saving: _Saving, backward: Backward) -> None:
        self._place = saving.place
        # with hooks around, such as a checkpoint's, an output's node need not open the unit: it would close again for
        # the forward that is computed first
        self._before_outputs = saving.theirs is None
        self._backward = backward
        self._since: int = torch._C._autograd._get_sequence_nr()
        self._watch = backward.watch()
        self._watches_nodes = backward.watches_nodes()
        self._num_made = len(self._watch.made) if self._watch is not None else 0
        self.hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(saving.pack, saving.unpack)

    def end(self, output: object) -> None:
        """The forward has ended: have its nodes open the unit before they run."""
        self._place.is_running = False
        outputs = {node for node in _nodes_of(tensors_in(output)) if node._sequence_nr() >= self._since}
        nodes = self._nodes(outputs)  # takes a few percent of the forward's time
        in_python = {node for node in nodes if isinstance(node, BackwardCFunction)}
        for node in in_python | outputs if self._before_outputs else in_python:
            self._backward.hook(node, self._place)
        if self._watches_nodes:
            self._end_watched(nodes)

    def _end_watched(self, nodes: set[Any]) -> None:
        """Watch the nodes, and those that only tensors lead to which the forward has stored elsewhere."""
        made = self._watch.made[self._num_made :] if self._watch is not None else []
        alive = (tensor for found in made if (tensor := found()) is not None)
        others = self._nodes(set(_nodes_of(alive))) - nodes
        for node in others:
            if isinstance(node, BackwardCFunction):
                self._backward.hook(node, self._place)
                self._backward.found_stale(self._place)
        for node in nodes | others:
            self._backward.hook_watched(node, self._place)

    def _nodes(self, first: set[Any]) -> set[Any]:
        """The nodes that the forward has made, as far as these lead to them."""
        todo, seen, found = list(first), set(first), set()
        while todo:
            node = todo.pop()
            if node._sequence_nr() < self._since:
                continue
            found.add(node)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
        return found


def _nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    for tensor in tensors:
        if tensor.grad_fn is not None:
            yield tensor.grad_fn
        # a view that was updated in place has a node of its own; that of the update is its base's
        if tensor._base is not None and tensor._base.grad_fn is not None:
            yield tensor._base.grad_fn
