"""A graph that records and repeats operators on the CPU, instead of a CUDA graph.

Like a CUDA graph it records no Python: values that a step computes outside of tensors are constants in it. Recording
executes nothing, and refuses the same operators as a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from weightstream.adapters.steps.graph_runner import Recorder
from weightstream.runtime.devices.backend import Copy, Side
from weightstream.runtime.devices.cpu import CpuBackend, CpuEvent

DEVICE = object()  # stands for an operator: a call of a device


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in `tree`. Waits for those of a collective."""
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [leaf.trigger_wait() if isinstance(leaf, AsyncCollectiveTensor) else leaf for leaf in leaves]


class Graph(TorchDispatchMode):
    """A list of operators, with the tensors that they read and write."""

    supports_higher_order_operators = True
    refused: str | None = None  # part of an operator's name

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storage -> all of it, its bytes
        self._made: list[torch.Tensor] = []
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types or AsyncCollectiveTensor in types:  # its operators on the shards are recorded
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default or (self.refused and self.refused in str(func)):
            raise RuntimeError("operation not permitted when stream is capturing\nlong explanation")
        for tensor in _tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own and storage.data_ptr() not in self._before:
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[storage.data_ptr()] = flat, flat.clone()
        output = func(*args, **kwargs)
        for tensor in _tensors(output):
            if tensor.untyped_storage().data_ptr() not in self._before:
                self._own.add(tensor.untyped_storage().data_ptr())
                self._made.append(tensor)
        self.calls.append((func, args, kwargs, output))
        return output

    def undo(self) -> None:
        for flat, was in self._before.values():
            flat.copy_(was)
        for tensor in self._made:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)  # so only a launch can produce values
        self._before.clear()

    def replay(self) -> None:
        for func, args, kwargs, output in self.calls:
            if func is DEVICE:
                args()
                continue
            again = func(*args, **kwargs)
            for work in (leaf for leaf in tree_leaves(again) if isinstance(leaf, torch.ScriptObject)):
                distributed.Work.unbox(work).wait()  # an all-reduce that Python waited for
            if func.namespace == "_c10d_functional":
                again = tree_map_only(torch.Tensor, wait_tensor, again)
            for own, new in zip(_tensors(output), _tensors(again), strict=True):
                if own.data_ptr() != new.data_ptr():
                    own.copy_(new)


class _Event(CpuEvent):
    """An event that knows its lane."""

    lane: Lane | None = None


class Lanes:
    """State that several devices share: the graph that they capture, and their memory."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.all: list[Lane] = []
        self.orders: list[tuple[Lane, Lane]] = []  # outside of captures: (waiting device, device that it waited for)

    @contextmanager
    def captured(self, graph: Graph) -> Iterator[None]:
        """A capture runs nothing: all effects of the block are undone."""
        assert self.graph is None, "a capture is under way"
        for lane in self.all:
            lane.synchronize()
        memories = [memory for lane in self.all for memory in lane.memories]
        before = [memory.clone() for memory in memories]
        self.graph = graph
        try:
            with graph:
                yield
        finally:
            self.graph = None
            graph.undo()
            for lane in self.all:
                lane.synchronize()
            for memory, was in zip(memories, before, strict=True):
                memory.copy_(was)


class Lane(CpuBackend):
    """One of several devices, whose copies and events are recorded in the graph too."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        lanes.all.append(self)
        self.memories: list[torch.Tensor] = []
        self.joins = 0
        self._lanes = lanes
        self._missing: set[str] | None = None  # in a capture of another device: the missing orderings with it

    def event(self) -> Any:
        return _Event()

    edge = event

    def alloc(self, nbytes: int) -> torch.Tensor:
        self.memories.append(super().alloc(nbytes))
        return self.memories[-1]

    def capturing(self) -> bool:
        return self._lanes.graph is not None

    def capture(self, graph: Any, **options: Any) -> AbstractContextManager[None]:
        return self._lanes.captured(graph)

    @contextmanager
    def joined(self, graph: Any) -> Iterator[None]:
        assert self._lanes.graph is graph, "there is no capture to join"
        self._missing, self.joins = {"begin", "end"}, self.joins + 1
        yield
        assert not self._missing, "this device's work is not ordered with the capture"
        self._missing = None

    def record(self, side: Side, event: Any) -> None:
        self._tell(partial(super().record, side, event))
        event.lane = self

    def wait(self, side: Side, event: Any) -> None:
        if event.lane is not self and event.lane is not None:
            if self._lanes.graph is None:
                self._lanes.orders.append((self, event.lane))
            for lane, what in ((self, "begin"), (event.lane, "end")):
                if lane._missing is not None:
                    lane._missing.discard(what)
        self._tell(partial(super().wait, side, event))

    def copy(self, copies: Sequence[Copy]) -> None:
        self._tell(partial(super().copy, copies))

    def _tell(self, call: Callable[[], None]) -> None:
        call()
        if self._missing is not None:
            assert "begin" not in self._missing, "the device is not in the capture yet"
            self._missing.add("end")
        if self._lanes.graph is not None:
            self._lanes.graph.calls.append((DEVICE, call, None, None))


class FakeCuda:
    """A recorder of such graphs, which counts them and their replays."""

    def __init__(self, refused: str | None = None) -> None:
        self.graphs: list[Graph] = []
        self.replays = 0
        self._refused = refused
        self.recorder = Recorder(new=self._new, record=self._record, replay=self._replay)

    def _new(self) -> Graph:
        self.graphs.append(Graph())
        self.graphs[-1].refused = self._refused
        return self.graphs[-1]

    @contextmanager
    def _record(self, graph: Graph) -> Iterator[None]:
        try:
            with graph:
                yield
        finally:
            graph.undo()

    def _replay(self, graph: Graph) -> None:
        self.replays += 1
        graph.replay()
