"""One forward on meta tensors: the calls of its modules, its kernels, and the memory that is alive. Knows no unit."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from contextvars import copy_context
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from weightstream.adapters.steps.decode_steps import cache_in, cached
from weightstream.adapters.tracing import global_state, meta_copy, op_cost, process_states
from weightstream.adapters.tracing.known_values import UNKNOWN, KnownValues
from weightstream.adapters.tracing.op_cost import Launch
from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Op
from weightstream.plan.schedule import aligned
from weightstream.runtime.streamer.read_watch import OperatorMode
from weightstream.runtime.tensors.pytree import tensors_in

logger = logging.getLogger("weightstream")

_CPU = torch.device("cpu")
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
Returned = TypeVar("Returned")


class ModuleCall(NamedTuple):
    """A module that ran, the index of the call that it ran in (-1: none), and the bytes of tensors that it returned."""

    module: nn.Module
    caller: int
    returned_nbytes: int


class KernelLaunch(NamedTuple):
    """A kernel, the index of the call that launched it (-1: none), and the number of calls that had begun by then."""

    call: int
    num_calls: int
    op: Op


class StorageRead(NamedTuple):
    """A read of a weight while the forward runs: the index of the call, and the copied storage on meta, by `_cdata`."""

    call: int
    storage: int


def run_on_copy(
    model: nn.Module,
    run: Callable[[meta_copy.Copied, float, meta_copy.Storages], Returned],
    values: tuple[Any, ...] = (),
    limit_s: float = math.inf,
    device: torch.device = _CPU,
) -> Returned:
    """Copy a model to meta, and return what `run(copy, until, storages)` finds there. Nothing of the copy is left.

    Args:
        run: runs forwards of the copy, until the clock shows `until` seconds at most. It keeps no tensors.
        values: the arguments of the real call, which are copied to meta, too.
        limit_s: seconds that the copying and `run` may take.
        device: the device of a real call. Its random state is restored.

    Raises:
        UnsupportedError: the copying or `run` failed.
    """
    storages = meta_copy.Storages()
    until_s = time.perf_counter() + limit_s

    def copy_and_run() -> Returned:
        with torch.no_grad():
            made = meta_copy.copied(model, *values, storages=storages)
            try:
                return run(made, until_s, storages)
            finally:
                meta_copy.untie(made)

    found: list[Returned] = []
    failed = ""
    try:
        global_state.refuse_side_effects(model, values)
        with global_state.without(storages, model), process_states.kept(device):
            found.append(copy_context().run(copy_and_run))
    except UnsupportedError as error:
        failed = str(error)
    except Exception as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        failed = f"{type(model).__name__}: its work cannot be found from shapes before it runs: {message}"
    if storages.are_kept():  # the copy is gone now, and so are the frames of an error
        logger.warning("%s keeps tensors outside of its modules: one without values may be left", type(model).__name__)
    if not found:
        raise UnsupportedError(failed)
    return found[0]


class Forward(OperatorMode):
    """One forward on meta tensors: the calls of modules, the launches of operators, and the memory that was alive.

    A forward may also make small tensors with values on the CPU, such as constants. Operators on these alone are run,
    and do not count as launches. They may write only to tensors that this forward made: any other is not a copy, and
    belongs to the model or its caller.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Collection[int],
        until_s: float,
        storages: meta_copy.Storages,
        args: Any,
        kwargs: dict[str, Any],
        entry: str = "forward",
        known: KnownValues | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._known = known if known is not None else KnownValues()
        self.reads: dict[StorageRead, None] = {}  # each once, in order
        self._own_storages = weakref.WeakValueDictionary[int, Any]()  # of tensors with values that this forward made
        self.calls: list[ModuleCall] = []
        self.ops: list[KernelLaunch] = []
        self.launches: dict[Any, Launch] = {}
        self.memory = LiveMemory((*model.parameters(), *model.buffers()), storages)
        self._draws = process_states.Draws()
        self.cache_nbytes = 0
        self.captured: Forward | None = None  # the same step, with another cache
        self._open: list[int] = []  # calls that have not returned
        self._until_s = until_s
        for tensor in (*tensors_in((args, kwargs)), *cached(cache_in(kwargs))):
            self.memory.hold(tensor)
        with ExitStack() as hooks, self:
            for module in model.modules():
                hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                # a checkpoint stops recomputing by an exception
                hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            self.output = self._compute(model if entry == "forward" else getattr(model, entry), args, kwargs)

    def _compute(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs)

    def _place(self) -> int:
        """The index of the call that operators count for now; -1: none."""
        return self._open[-1] if self._open else -1

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.calls.append(ModuleCall(module, self._place(), 0))
        self._open.append(len(self.calls) - 1)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        index = self._open.pop()
        returned_nbytes = sum(map(op_cost.touched_nbytes, tensors_in(output)))
        self.calls[index] = self.calls[index]._replace(returned_nbytes=returned_nbytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = self._known.answer(func, args, kwargs)
        if output is UNKNOWN:
            output = self._run(func, args, kwargs)
            self._known.follow(func, args, kwargs, output)
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors, place = list(tensors_in((args, kwargs))), self._place()
        for tensor in tensors:
            if (storage := _memory_of(tensor)) in self._weights:
                self.reads[StorageRead(place, storage)] = None
        if time.perf_counter() > self._until_s:
            raise UnsupportedError("following it takes too long")
        real = [tensor for tensor in tensors if not tensor.is_meta]
        writes = func._schema.is_mutable and func.overloadpacket is not torch.ops.aten.detach_
        is_foreign = writes and any(_memory_of(tensor) not in self._own_storages for tensor in real)
        if is_foreign or kwargs.get("generator") is not None:
            raise UnsupportedError(f"{func} writes to a tensor that is not a copy")
        if len(real) == len(tensors) and _device_of(kwargs) != "meta":
            if process_states.draws(func) and not process_states.takes_generator(func) and _is_composite(func):
                with self:  # a random operator without a generator argument: the operators that it consists of take one
                    return func.decompose(*args, **kwargs)
            # the model may keep the result, and later use it in calls with gradients, which refuse inference tensors
            with torch.inference_mode(False):
                output = self._draws.run(func, args, kwargs)
            for tensor in tensors_in(output):
                self._own_storages[_memory_of(tensor)] = tensor.untyped_storage()
            return output
        # the most frequent composite operators as a kernel or a view: decomposing them would take longer
        func, args, kwargs = op_cost.simpler(func, args, kwargs)
        if _is_composite(func) and not op_cost.is_kernel(func, args, kwargs):
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        key = func, _signed(args), _signed(tuple(kwargs.items()))
        seen = self.launches.get(key)
        # `repeat` makes results of the same shapes, or returns the first argument of an operator that works in place
        if seen is not None and (seen.is_repeatable or seen.is_in_place):
            output = seen.repeat(args)
        else:
            output = op_cost.run_on_meta(func, args, kwargs)
            seen = self.launches[key] = Launch(func, args, kwargs, output)
        for tensor in tensors_in(output):
            self.memory.hold(tensor)
        if seen.op is not None:
            self.ops.append(KernelLaunch(place, len(self.calls), seen.op))
            self.memory.touch(seen.workspace_nbytes)
            seen.alive_nbytes = max(seen.alive_nbytes, self.memory.live_nbytes)
        return output


def _memory_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _device_of(kwargs: dict[str, Any]) -> str:
    device = kwargs.get("device")
    return "" if device is None else torch.device(device).type


@cache
def _is_composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(_COMPOSITE))


class LiveMemory:
    """The bytes of live storages except weights, in blocks as PyTorch's CUDA allocator takes them."""

    def __init__(self, weights: Iterable[torch.Tensor], storages: meta_copy.Storages) -> None:
        self._storages = storages  # of all forwards
        self._held: dict[int, weakref.ref[Any]] = {}
        self._nbytes: dict[int, int] = {}
        self.live_nbytes = self.peak_nbytes = 0
        for weight in weights:
            self.hold(weight, counts=False)

    def hold(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        storage, key = tensor.untyped_storage(), _memory_of(tensor)
        if not tensor.is_meta or key in self._held:
            return

        def drop(_: Any) -> None:
            self.live_nbytes -= self._nbytes.pop(key)
            del self._held[key]

        self._storages.note(tensor)
        self._held[key] = weakref.ref(storage, drop)
        self._nbytes[key] = aligned(storage.nbytes()) * counts
        self.live_nbytes += self._nbytes[key]
        self.touch()

    def discount(self, tensor: torch.Tensor) -> None:
        """Count the bytes of a tensor no longer, although it stays alive."""
        if (key := _memory_of(tensor)) in self._nbytes:
            self.live_nbytes -= self._nbytes[key]
            self._nbytes[key] = 0

    def touch(self, nbytes: int = 0) -> None:
        """Count `nbytes` more at this moment, such as the workspace of a kernel, for the peak only."""
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes + aligned(nbytes))


def _signed(value: Any) -> Any:
    """The properties of an argument that an operator may depend on, as a key."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_signed, value))
    return type(value), value
