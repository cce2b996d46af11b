"""The thread that queues a GPU's copies while their bytes are read, on streams that record their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import pytest
import torch

from graph_rig import PLANS, GraphRig
from weightstream.errors import OffloadError, StoreError
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Copy, Side
from weightstream.runtime.devices.cuda import CudaBackend


class Stream:
    """Records the queued calls and their threads."""

    cuda_stream = 7

    def __init__(self) -> None:
        self.queued: list[tuple[str, Any, str]] = []

    def note(self, what: str, about: Any = None) -> None:
        self.queued.append((what, about, threading.current_thread().name))

    def wait_event(self, event: Any) -> None:
        self.note("wait", event)

    def synchronize(self) -> None:
        pass

    def record_event(self) -> Stream:
        return self


class Event:
    def record(self, stream: Stream) -> None:
        stream.note("record", self)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaBackend]:
    """A backend whose copies and waits are reported to such streams. It starts no thread before one is needed."""
    found: Any = object.__new__(CudaBackend)
    found.device, found.pinning, found._pin = torch.device("cuda", 0), Lock(), False
    found._copies, found._computes, found._feeder, found._was_fed = Stream(), {}, None, False
    compute, capturing = Stream(), [False]
    found.compute, found.is_capturing = compute, capturing

    def queue(dst: torch.Tensor, src: torch.Tensor, _: int) -> bool:
        found._copies.note("copy", src)
        return True

    monkeypatch.setattr(cuda.cuda_driver, "copy", queue)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(CudaBackend, "_stream", lambda _, side: found._copies if side is Side.COPY else compute)
    monkeypatch.setattr(CudaBackend, "_staging_memory", lambda _, nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(cuda, "node", lambda _: None)
    yield found
    found.close()


def copies(*pinned: bool, prepare: Callable[[], None] | None = None) -> list[Copy]:
    def memory(value: int) -> torch.Tensor:
        return torch.full((512,), value, dtype=torch.uint8)

    return [Copy(dst=memory(0), src=memory(i + 1), pinned=p, prepare=prepare) for i, p in enumerate(pinned)]


def feeders() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "weightstream-feed"]


def test_it_ends_when_nothing_unpinned_is_left(backend: CudaBackend) -> None:
    (unpinned,) = copies(False)
    backend.copy([unpinned])
    assert feeders()
    backend.prepare_graph(copies(True, True))
    assert not feeders()
    assert torch.equal(unpinned.dst, unpinned.src), "queued copies are made first"
    stream: Any = backend._copies
    stream.queued.clear()
    event = Event()
    backend.wait(Side.COPY, Event())
    backend.copy(copies(True))
    backend.record(Side.COPY, event)
    assert [what for what, _, _ in stream.queued] == ["wait", "copy", "record"]
    assert {name for _, _, name in stream.queued} == {threading.current_thread().name}
    backend.copy(copies(False))
    assert feeders(), "it starts again"
    backend.synchronize()
    assert feeders(), "it survives: a finalizer may call at any line"
    backend.prepare_graph()
    assert not feeders()


def test_a_graph_is_refused_copies_that_it_cannot_make(backend: CudaBackend) -> None:
    with pytest.raises(OffloadError, match="a captured graph cannot"):
        backend.prepare_graph(copies(True, False))
    backend.prepare_graph(copies(True, True))
    backend.is_capturing[0] = True  # type: ignore[attr-defined]
    with pytest.raises(OffloadError, match="a captured graph cannot"):
        backend.copy(copies(False))
    backend.copy(copies(True))


def test_copies_of_a_graph_are_queued_by_the_capturing_thread(backend: CudaBackend) -> None:
    """Also after another model used the thread for the same device."""
    backend.copy(copies(False))
    backend.prepare_graph(copies(True))
    backend.is_capturing[0] = True  # type: ignore[attr-defined]
    edge = Event()
    backend.wait(Side.COPY, edge)
    backend.copy(copies(True))
    backend.record(Side.COPY, edge)
    backend.wait(Side.COMPUTE, edge)
    compute: Any = backend.compute  # type: ignore[attr-defined]
    assert compute.queued[-1][:2] == ("wait", edge)


def test_an_event_that_is_recorded_again_has_no_old_error(backend: CudaBackend) -> None:
    def fails() -> None:
        raise StoreError("it cannot be read")

    event: Any = Event()
    backend.copy(copies(False, prepare=fails))
    backend.record(Side.COPY, event)
    with pytest.raises(StoreError, match="it cannot be read"):
        backend.wait(Side.COMPUTE, event)
    backend.prepare_graph()
    backend.record(Side.COPY, event)
    backend.wait(Side.COMPUTE, event)


def test_captures_and_launches_are_announced_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with GraphRig(PLANS["5 units in 2 slots"]) as rig:
        calls: list[Any] = []
        monkeypatch.setattr(
            rig.graphs, "prepare_graph", lambda copies=(): calls.append(sum(1 for _ in copies)), raising=False
        )
        capture = rig.graphs.capture

        @contextmanager
        def noted(graph: Any, **options: Any) -> Iterator[None]:
            calls.append("capture")
            with capture(graph, **options):
                yield

        monkeypatch.setattr(rig.graphs, "capture", noted)
        graph = rig.captured()
        num_copies = sum(len(rig.copies[unit]) for unit in range(5))
        assert calls == [num_copies, "capture"]
        launch = graph.replay
        graph.replay = lambda: (calls.append("launch"), launch())  # type: ignore[method-assign]
        rig.replay(graph)
        assert calls[2:] == [0, "launch"]
        rig.sync()
        assert calls[4:] == [0]


def test_a_capture_that_is_refused_leaves_the_graphs_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    with GraphRig(PLANS["5 units in 2 slots"]) as rig:

        def refuse(copies: Any = ()) -> None:
            raise OffloadError("no")

        with monkeypatch.context() as patch:
            patch.setattr(rig.graphs, "prepare_graph", refuse)
            with pytest.raises(OffloadError, match="no"):
                rig.captured()
        graph = rig.captured()
        rig.replay(graph)
        rig.assert_right(5)
