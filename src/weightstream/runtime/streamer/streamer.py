"""The streamer of a model: runs steps one at a time, and opens and closes their units.

A unit is open while its module's forward runs; a step is a forward of the whole model.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd import profiler
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.errors import OffloadError
from weightstream.plan.multi_device import Lane
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import FORWARD, TRAIN
from weightstream.plan.speculation import PassSeconds
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.ring.binding import Binding
from weightstream.runtime.ring.graphs import CAPTURED
from weightstream.runtime.ring.shared_memory import SharedMemory
from weightstream.runtime.ring.state import StepState
from weightstream.runtime.ring.timeline import Kind, kind_of, profiler_range
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.streamer.active_plan import Installation
from weightstream.runtime.streamer.attachment import Attachment
from weightstream.runtime.streamer.backward import NO_TASK, Backward, Followed, graph_task
from weightstream.runtime.streamer.base import BaseStreamer
from weightstream.runtime.streamer.compiled import Compiled
from weightstream.runtime.streamer.drafting import Drafting
from weightstream.runtime.streamer.learning import Learning
from weightstream.runtime.streamer.replanning import Replanning
from weightstream.runtime.streamer.stats import Stats, stats_of
from weightstream.runtime.tensors.pytree import moved, tensors_in
from weightstream.runtime.tensors.thread_state import quietly, restored_block, restoring
from weightstream.runtime.trace import Trace
from weightstream.runtime.weights.alias_groups import UnitModule
from weightstream.runtime.weights.homes import Homes
from weightstream.runtime.weights.picks import ForwardCall
from weightstream.settings.config import OffloadConfig

logger = logging.getLogger("weightstream")

_casts = torch._C._is_any_autocast_enabled


def _is_traced() -> bool:
    """Whether `torch.jit.trace` records this thread. If the plan changed meanwhile, the trace would record its moves of
    weights as operators of the model, and fail, or crash."""
    return torch._C._get_tracing_state() is not None


class Streamer(BaseStreamer):
    """Streams the weights of one model. Made by `weightstream.offload`; a context manager that ends with `remove()`."""

    def __init__(
        self,
        model: nn.Module,
        grains: Sequence[Sequence[UnitModule]],
        homes: Homes,
        backend: Backend,
        replanning: Replanning,
        plan: Plan,
        blocks: Sequence[nn.Module] = (),
        on_close: Callable[[], None] = lambda: None,
        block: SharedMemory | None = None,
        entries: Sequence[str] = (),
        inner_forward: forward_patch.InnerForward = forward_patch.outermost,
    ) -> None:
        units = grains[replanning.inputs.grain_of(plan.manifest)]
        self._backend = backend
        self._modules = Attachment(
            model, units, self, self._run_step, self._run_unit, entries, backend.device, inner_forward
        )
        self._compiled = Compiled(model, blocks)
        self._homes = homes
        self._installed = Installation(
            self._modules, self._compiled, homes, backend, replanning, grains, on_close, block
        )
        self._gate = self._installed.gate
        self.graphs = self._installed.graphs
        self._learning = Learning(self._installed)
        self._backward = Backward(
            self._installed, self._learning, self._close_again, heal=self._heal, heal_if_cut=self._heal_if_cut
        )
        self._why_no_backward = ""
        if any(member.blind for home in homes.homes.values() for member in home.group.members):
            self.refuse_backward("training with tensor parallelism is not supported")
        self._has_made_graph = False  # the last forward has, for which an argument may have required a gradient
        self.drafting = Drafting()
        self._installed.start(plan)

    # -- the plan, statistics and traces -----------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in force. It is replaced when a step shows another order of units."""
        return self._binding.plan

    def pass_seconds(self) -> tuple[PassSeconds, ...]:
        """Predicted seconds of passes of several tokens of one text, by the plan in force; empty: unknown."""
        with self._gate.lock:
            return self._installed.replanning.pass_seconds(self.plan)

    @property
    def lane(self) -> Lane:
        """The plan in force, and its units' seconds for the simulation of several devices."""
        return self._installed.replanning.lane(self.plan)

    @property
    def _binding(self) -> Binding:
        return self._installed.binding

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._backend.device

    @property
    def learned(self) -> bool:
        """Whether a step has shown the order of the weights."""
        return not self._learning.watches

    def watch(self) -> None:
        """Watch the next step, even if earlier ones were watched: it may read other weights outside of their units."""
        self._learning.watching = True

    def __str__(self) -> str:
        return f"{type(self._modules.model).__name__} on {self.device}\n{self.plan}"

    def stats(self) -> Stats:
        """Counters and bytes held, as of now, from any thread. Waits for the device where it caches experts."""
        with self._gate.lock:  # the plan may not change meanwhile
            return replace(stats_of(self._installed), speculation=self.drafting.stats())

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record when every unit is waited for, computed and copied inside of the block; both its ends synchronise.

        Examples:
            >>> import torch, weightstream
            >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
            >>> with weightstream.offload(model, device="cpu", device_budget="48KiB") as streamer:
            ...     with streamer.trace() as trace:
            ...         y = model(torch.randn(1, 64))
            >>> [span.name for span in trace.spans if span.kind == "step"]
            ['forward 1', 'forward 1']
        """
        trace = Trace(f"{type(self._modules.model).__name__} on {self.device}")
        with self._installed.traced(trace):
            yield trace

    # -- the end -----------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Bring every weight back to where it was and set the model free; may be called twice."""
        self.refuse_inside()
        with self._turn(), self._gate.lock, torch.inference_mode(False), torch.no_grad():
            if self._gate.mode is StepState.HELD:
                self.unfix()
            if self._gate.is_removed:
                return
            try:
                self._installed.remove()
            except BaseException:
                if not self._gate.is_removed:  # it was cut short: the weights come back all the same
                    self._installed.remove()
                raise
            finally:
                self.drafting.model = None  # its memory is on the device

    def refuse_inside(self) -> None:
        self._gate.refuse_inside()

    def switch(self, plan: Plan) -> None:
        """Put another plan of the same model in force, between steps; only weights whose place changes are moved.

        Graphs of `capture` must be captured again, and the code of `compile` is compiled again.
        Raises `InvariantError` for a plan that breaks a rule; `OffloadError` where the addresses of weights are held;
        `StoreError`, `torch.OutOfMemoryError` where weights cannot be moved. On every error the plan in force stays.
        """
        with self._turn():
            self._learning.switch(plan)

    def refuse_backward(self, reason: str) -> None:
        """Have backward passes through streamed weights raise `OffloadError` with this reason."""
        self._why_no_backward = reason

    def on_added(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever tensors that are not in the plan, such as adapters, come to the device or leave."""
        self._modules.on_adopted = callback

    def place_added(self, device: torch.device | None) -> None:
        """Move tensors that were added to the model, such as adapters, to a device; None: to their neighbours'."""
        self._modules.adopt(device, again=True)

    # -- a step ------------------------------------------------------------------------------------------------------

    def _run_step(self, forward: Callable[..., Any], args: Any, kwargs: Any, what: str = "forward") -> Any:
        self._gate.refuse_forked()
        has_grad = not self._gate.is_fixed and torch.is_grad_enabled()
        if has_grad and graph_task() != NO_TASK and self._backward.admits():
            self._learning.recompute_all()
            return forward(*args, **kwargs)
        return self._in_turn(partial(self._step, forward, args, kwargs, what, has_grad))

    def _step(self, forward: Callable[..., Any], args: Any, kwargs: Any, what: str, has_grad: bool) -> Any:
        if self._gate.is_running or self._gate.is_removed:  # a call from inside its own step, or after `remove()`
            return forward(*args, **kwargs)
        args, kwargs = moved((args, kwargs), self.device)  # `model.device` may say "cpu" between steps
        if self._modules.model.training and not self._learning.keeps_trained and not self._gate.is_fixed:
            with torch.inference_mode(False), torch.no_grad():
                quietly(self._learning.keep_trained)
        trains = has_grad and self._expects_backward((args, kwargs))
        is_training = trains and self._modules.model.training
        if is_training and self._compiled.is_wanted:
            self._compiled.runs("it trains. Compile the forwards of its blocks before you offload it, which works")
        if self._gate.is_fixed or (what == "forward" and not is_training and self._is_compiled()):
            step = partial(self._compiled.entry(forward), *args, **kwargs)  # compiled, if `compile` was called
            return self.run_fixed(step, kind_of(args, kwargs, "compiled"))
        if self._backend.capturing():
            if self._modules.session.streams:
                raise OffloadError(CAPTURED)
            return forward(*args, **kwargs)
        forward_patch.refuse_transforms()
        kind = kind_of(args, kwargs, TRAIN if trains and what == FORWARD else what)
        if not _is_traced():
            self.foresee(kind, args, kwargs)
        return self.run(partial(forward, *args, **kwargs), kind, trains=trains)

    def _expects_backward(self, arguments: Any) -> bool:
        """Whether a backward pass may follow a forward that begins now; not where a streamed weight is trained."""
        if torch.is_inference_mode_enabled() or _is_traced() or self._why_no_backward:
            return False
        if self._modules.has_new:  # such as adapters
            self._learning.watching |= self._modules.has_other_code()
            self._modules.adopt(self.device)
        return quietly(self._requires_grad, arguments)  # type: ignore[no-any-return]

    def _requires_grad(self, arguments: Any) -> bool:
        if any(streamed.requires_grad for streamed in self._binding.tensors):
            self._learning.keeps_trained = False  # it was unfrozen since
            return False
        return (
            self._has_made_graph
            or self._modules.trains_any()
            or any(tensor.requires_grad for tensor in tensors_in(arguments))
        )

    def foresee(self, kind: Kind, args: Any, kwargs: Any) -> None:
        """Prepare a call that runs these units: plan for its work, and bring tensors that were added to the device."""
        with self._turn():
            self._modules.refuse_foreign()
            self._learning.watching |= self._modules.has_other_code()
            self._modules.adopt(self.device)
            self._learning.foresee(kind, args, kwargs)

    def run(self, step: Callable[[], Any], kind: Kind, *, trains: bool = False) -> Any:
        """Run an eager step, and learn from it. `trains`: a backward pass may follow."""
        return self._in_turn(partial(self._run_and_learn, step, kind, trains))

    def _run_and_learn(self, step: Callable[[], Any], kind: Kind, trains: bool) -> Any:
        is_traced = _is_traced()
        if is_traced and (self.device.type != "cpu" or self._installed.plan.manifest.codes):
            raise OffloadError(
                "torch.jit.trace makes a function that reads weights without the model, where they are between steps: "
                "call model.weightstream.remove() first"
            )
        if self._learning.has_trained:
            with torch.inference_mode(False), torch.no_grad():
                self._learning.learn_training()
        watches = self._learning.watches or (trains and self._learning.watches_training)
        mode = StepState.LEARNING if watches else StepState.EAGER
        kind = kind._replace(what=TRAIN) if trains else kind
        with self._installed.timeline.step(kind, ends=not trains):
            output = self._run_eager(step, mode, trains=trains)
        if torch.is_grad_enabled():
            self._has_made_graph = bool(self._installed.graphs_alive)
        if is_traced:
            return output
        if mode is StepState.LEARNING:
            self._modules.watched()
        with torch.inference_mode(False), torch.no_grad():
            self._learning.learn(watched=mode is StepState.LEARNING)
        return output

    def _run_eager(self, step: Callable[[], Any], mode: StepState, *, trains: bool = False) -> Any:
        def whole() -> Any:
            self._learning.begin_step(trains=trains)
            self._installed.counters.steps += 1
            return step()

        try:
            return self._awake(whole, mode)
        except RuntimeError as error:
            if re.search("device|weight type", str(error)):
                self._learning.watching = True  # a weight may have been read outside of its unit: watch the next step
            if self._modules.was_replaced():
                raise OffloadError(
                    "parameters or modules of the model were replaced while it is offloaded: call remove(), "
                    "change it, and offload again"
                ) from error
            raise

    def _in_turn(self, work: Callable[[], Any], progress: Callable[[], int | None] | None = None) -> Any:
        """Run `work` in the turn, after a step that was cut short is healed.

        Not a context manager: one that an interrupt skips is closed only when the traceback is freed.
        """
        return self._gate.turn.run(partial(self._healed, work), progress)

    def _healed(self, work: Callable[[], Any], is_first: bool) -> Any:
        def healed() -> Any:
            self._heal_if_cut()
            return work()

        return restoring(healed, self.device) if is_first else work()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """As `_in_turn`, for a `with` block."""
        with self._gate.turn.taken() as is_first:
            if not is_first:
                yield
                return
            with restored_block(self.device):
                self._heal_if_cut()
                yield

    def _awake(self, work: Callable[[], Any], mode: StepState) -> Any:
        """Run `work` in this mode, in which units may open. First take in the updates made since the last step."""
        try:
            with self._gate.lock:
                self._binding.wake()
                self._gate.change(mode)
            if mode is StepState.LEARNING:
                with self._learning.watched():
                    output = work()
            else:
                output = work()
            self._gate.turn.end(self._gate.end_forward)
            with self._gate.lock:
                self._binding.rest()
            return output
        except BaseException:
            self._gate.turn.end(self._gate.end_forward, has_failed=True)
            self._heal()
            raise

    def _heal_if_cut(self) -> None:
        """Heal if a step seems to be under way. None can be, so the call that should have healed it was cut short."""
        if self._gate.is_cut or (self._binding.is_awake and not self._gate.is_held):
            self._heal()

    def _heal(self) -> None:
        """Close every unit and show the true bytes of every weight, after an error or an interrupt at any line."""
        with self._gate.lock, torch.inference_mode(False), torch.no_grad():
            if self._gate.is_held:  # the inference engine keeps these addresses
                self._binding.abandon()
                self._gate.end_forward()
                return
            self.graphs.heal()
            self._learning.heal()
            self._modules.session.fixed = False
            lost = self._binding.heal(self._modules.trains)
            self._installed.timeline.heal()
            self._gate.reset()
            if lost:
                logger.warning("%s changed inside of step(), which failed: these updates are lost", ", ".join(lost))

    def _run_unit(self, unit: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if get_ident() in self._gate.threads:
            return self._run_opened(unit, forward, args, kwargs)
        self._gate.refuse_forked()
        if graph_task() != NO_TASK and self._backward.admits():
            return self._run_opened(unit, forward, args, kwargs)
        return self._in_turn(partial(self._run_alone, self._modules.units, unit, forward, args, kwargs), self._progress)

    def _run_alone(
        self, units: Sequence[UnitModule], unit: int, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a unit that was called from a thread that runs no step as a step of its own.

        If the thread has joined the step of another thread, the unit is a part of that step: runtime/ring/turn.py,
        [Note: whose call it is]. `units`: the units that `unit` is an index of. If the plan has other units by now,
        call the module again.
        """

        def alone() -> Any:
            if self._binding.engine.is_behind(unit):
                self._binding.engine.begin_step()
            self._learning.begin_alone()
            return self._run_opened(unit, forward, args, kwargs)

        if self._gate.is_removed:
            return forward(*args, **kwargs)
        if self._modules.units is not units:
            return forward_patch.anew(forward)(*args, **kwargs)
        if self._gate.is_running:
            args, kwargs = moved((args, kwargs), self.device)  # the thread may be unrelated to the step
            return self._run_opened(unit, forward, args, kwargs)
        if self._gate.is_fixed:
            try:
                return self._run_opened(unit, forward, args, kwargs)
            except BaseException:
                self._binding.abandon()
                raise
        args, kwargs = moved((args, kwargs), self.device)
        self._modules.learn_entry()  # a public method of the model that called the unit is a step from now on
        return self._awake(alone, StepState.EAGER)

    def _progress(self) -> int | None:
        """The number of units that the forward under way has opened; None if no forward is under way.

        If it does not change for a while, a call of a unit from another thread joins the forward: runtime/ring/turn.py,
        [Note: whose call it is]. At fixed addresses it is the present time, so that the forward never seems to stall: a
        unit of a joining thread may have no room in the ring there.
        """
        if not self._gate.is_running or (self._gate.mode is StepState.BACKWARD and not self._backward.is_recomputing):
            return None
        return time.monotonic_ns() if self._gate.is_fixed else len(self._learning.sequence)

    def _run_opened(self, unit: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output, has_ended, fixed = None, False, self._gate.is_fixed
        in_pass = self._gate.mode is StepState.BACKWARD
        is_picked = False
        if self._modules.units[unit].picks and not (in_pass or (self._learning.trains and self._modules.trains(unit))):
            with self._gate.lock:
                picked = self._binding.picked(unit, ForwardCall(forward, args, kwargs), not fixed)
            is_picked, forward = picked is not None, picked or forward
        followed: Followed | None = None
        with self._gate.lock:
            if fixed:
                self.graphs.wait(unit)
            elif in_pass:
                self._backward.open_again(unit)
            elif self._installed.binding.open(unit):
                self._learning.sequence.append(unit)
        try:
            if torch.is_grad_enabled() or profiler._is_profiler_enabled or _casts():
                name = self._modules.units[unit].name
                hooks: AbstractContextManager[None] = nullcontext()
                trained = next((s for s in self._binding.units[unit].views.tensors if s.requires_grad), None)
                if torch.is_grad_enabled():
                    if fixed or is_picked or trained is not None or self._why_no_backward or _is_traced():
                        reason = f"{trained.member.names[0]} is trained (requires_grad) and streams" if trained else ""
                        reason = self._why_no_backward or reason
                        hooks = forward_patch.refuse_backward(name, reason)
                    elif (followed := self._backward.follow(unit)) is not None:
                        hooks = followed.hooks
                # autocast keeps casts of weights that require a gradient, as in the plain model where none streams
                with hooks, profiler_range(name), nullcontext() if trained is None else _uncached():
                    output = forward(*args, **kwargs)
            else:
                output = forward(*args, **kwargs)
            has_ended = True
            return output
        finally:
            if followed is not None:
                followed.end(output)
            if in_pass:
                with _disable_current_modes():
                    self._close_unit(unit, output, has_ended)
                self._backward.end_again()
            elif fixed:
                self.release_unit(unit, output)
            else:
                self._close_unit(unit, output, has_ended)

    def _close_again(self, unit: int) -> None:
        """Close a unit that was opened for a backward pass, which updates no weight."""
        self._installed.binding.close(unit, None, training=False, watched=True)

    def _close_unit(self, unit: int, output: object, has_ended: bool) -> None:
        watched = self._gate.mode is StepState.LEARNING or not has_ended  # the watch, or the traceback, holds views
        binding = self._installed.binding
        with self._gate.lock:
            training = binding.units[unit].has_buffers and self._modules.trains(unit)
            if binding.close(unit, output, training=training, watched=watched):  # outputs were views of its weights
                self._modules.hide(unit)

    # -- fixed addresses -----------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, weights show fixed addresses in the ring, for code that is compiled or captured.

        Any number of forwards and graph launches may run inside. They take less time than outside, as updates of
        weights are looked for at the entry only. Gradients are off. Other threads wait.
        Where classes, forwards or hooks of the model have changed since the last step, forwards inside run eager, and
        the first one is watched: weights may be read outside of their modules now.
        Raises `OffloadError` where weights cannot have fixed addresses; the message says why.
        """
        self._gate.refuse_forked()
        with self._turn(), torch.no_grad():
            if self.sees_other_code():
                yield
            else:
                with self._fixed():
                    yield

    def sees_other_code(self) -> bool:
        """Whether the model's code has changed, so that the next step is to be watched."""
        if self._gate.mode is not StepState.IDLE or self._backend.capturing():
            return False
        if not self._modules.has_other_code(looks_closely=True):
            return False
        self._compiled.renew()
        self._learning.watching = True
        return True

    @contextmanager
    def _fixed(self) -> Iterator[None]:
        """Have fixed addresses inside of the block, even if the model's code has changed."""
        with self._turn(), torch.no_grad():
            if self._gate.is_fixed:
                yield
                return
            self._refuse_fixed()
            try:
                self._fix(StepState.STEP)
                yield
                self.unfix()
            except BaseException:
                self._heal()
                raise
            self._learning.correct()

    def learn(self, step: Callable[[], object]) -> bool:
        """Watch steps of an inference engine until one shows nothing new. The plan changes for the reads they show.

        Returns whether units may have fixed addresses: not if a weight is read outside of its unit, and has no room to
        stay on the device.
        """
        with self._turn():
            for _ in self._learning.steps():
                self._run_eager(step, StepState.LEARNING)
                with torch.inference_mode(False), torch.no_grad():
                    self._learning.learn(watched=True, is_whole=False)
            return not self._learning.watches

    def reads_outside(self, step: Callable[[], object]) -> list[str]:
        """Watch a step of an inference engine, and name the streamed weights that it reads outside of their units.

        The plan stays as it is.
        """
        with self._turn():
            self._run_eager(step, StepState.LEARNING)
            return self._learning.read_outside

    def rebudget(self, device_budget: int | str | None) -> None:
        """Switch to the plan of another budget, given as to `offload`.

        Raises `ConfigError` for a wrong one, `PlanError` where there is no plan, else as `switch`.
        """
        budget = OffloadConfig(device_budget=device_budget).device_budget
        with self._turn():
            self._learning.rebudget(budget)

    def fix(self) -> None:
        """Enter `step` until `unfix`.

        For an inference engine that owns the model and reads no weight outside of its unit.
        """
        self._learning.watching = False
        self._refuse_fixed()
        try:
            self._fix(StepState.HELD)
        except BaseException:
            self._gate.reset()
            self._heal()
            raise

    def _refuse_fixed(self) -> None:
        if reason := self.why_not_fixed():
            raise OffloadError(f"the weights cannot have fixed addresses now: {reason}")

    def _fix(self, mode: StepState) -> None:
        with self._gate.lock, torch.inference_mode(False), torch.no_grad():
            self._binding.wake()
            # captured graphs copy from the old sources, and have the old layouts
            if self._homes.sources_changed or any(tensor.relaid for tensor in self._binding.tensors):
                self.graphs.clear()
                self._homes.sources_changed = False
            self._binding.engine.prime()  # now: a capture by the user may be under way later
            self._binding.fix()
            self._modules.session.fixed = True
            self._gate.change(mode)

    def unfix(self) -> None:
        """Undo `fix`."""
        with self._gate.lock, torch.inference_mode(False), torch.no_grad():
            self.graphs.resume_eager()
            self._modules.session.fixed = False
            try:
                self._binding.unfix()
            finally:
                self._gate.change(StepState.IDLE)

    def why_not_fixed(self) -> str | None:
        """Why `step` would raise; None if it would not."""
        return self._learning.why_not_fixed()

    def compile(self, scope: Literal["model", "blocks"] = "model", **options: Any) -> None:
        """Run the model through `torch.compile` from now on, whole or block by block; `remove()` undoes it.

        The first call of a fresh streamer still runs eager, as it shows the order of the weights.

        Args:
            scope: "model" makes one graph; "blocks" one for all blocks of a kind, which compiles faster.
            options: for `torch.compile`, such as `fullgraph=True`, as offloading breaks no graph.
        """
        self._compiled.request(scope, options)

    def _is_compiled(self) -> bool:
        """Whether this step runs compiled. If not, log the reason once."""
        if self._compiled.is_wanted:
            self.sees_other_code()
        is_due = self._compiled.is_wanted and (self.learned or bool(self._learning.outside))
        return is_due and self._compiled.runs(self.why_not_fixed())

    def run_fixed(self, step: Callable[[], Any], kind: Kind) -> Any:
        """Run a step at fixed addresses."""
        with self._installed.timeline.step(kind), self._fixed():
            try:
                self._gate.change(StepState.FORWARD)
                output = step()
                self._gate.turn.end(self._gate.end_forward)
                return output
            except BaseException:
                self._gate.turn.end(self._gate.end_forward, has_failed=True)
                self._binding.abandon()  # compiled code does not release units that an error leaves in use
                raise

    def wait_unit(self, unit: int) -> None:
        """The operator `weightstream::wait`: order compute after the unit's fill."""
        self._modules.session.traced = True
        with self._gate.lock:
            self.graphs.wait(unit)

    def release_unit(self, unit: int, output: object = None) -> None:
        """The operator `weightstream::release`: the unit's last kernel is queued."""
        with self._gate.lock:
            if output is not None:
                self._installed.binding.clone_views(unit, output)
            self.graphs.release(unit)

    @contextmanager
    def capture(self, graph: Any, **options: Any) -> Iterator[None]:
        """Capture a step, or a piece of one, instead of `torch.cuda.graph(graph, **options)`, or inside of it.

        All forks and joins of streams are made here. Launch the graph with `replay`; a streamer may have any number of
        graphs.
        `options` are `torch.cuda.graph`'s, for which `graph` is made: `pool`, `stream`, `capture_error_mode`.
        """
        with self._turn():
            self.sees_other_code()
        with self._fixed(), self.graphs.capture(graph, partial(self._backend.capture, graph, **options)):
            yield

    def replay(self, graph: Any) -> None:
        """Launch a captured graph: the fills that it needs are queued before, those of the next step after it."""
        with self._fixed() if graph in self.graphs.recordings else nullcontext(), self._gate.lock:
            self.graphs.replay(graph, graph.replay)

    def sync(self) -> None:
        """Before an inference engine captures or launches a graph: make compute wait for every copy in flight."""
        with self._gate.lock:
            self.graphs.sync()

    def join(self) -> None:
        """Inside an inference engine's capture, before it ends: make the copies that are due, and join them."""
        with self._gate.lock:
            self.graphs.join()


@contextmanager
def _uncached() -> Iterator[None]:
    """Inside, autocast keeps no copies of the weights that it casts: they would stay until it ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
