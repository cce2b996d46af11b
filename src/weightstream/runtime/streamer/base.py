"""The base of all streamers: of a model, of a model over several devices, of a pipeline. Knows no plan and no ring."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self

import torch

from weightstream.runtime.trace import Trace


class BaseStreamer(ABC):
    """A context manager that ends with `remove()`. Copies and pickles of its model have None instead."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where inputs go and outputs come from."""

    @abstractmethod
    def stats(self) -> object:
        """Counters and bytes held, as of now."""

    @abstractmethod
    def trace(self) -> AbstractContextManager[Trace]:
        """Record when every unit is waited for, computed and copied inside of the block; both its ends synchronise."""

    @abstractmethod
    def remove(self) -> None:
        """Bring every weight back to where it was, and undo all changes of the model. May be called twice."""

    @abstractmethod
    def refuse_inside(self) -> None:
        """Raise `OffloadError` if this thread is in a step, as `remove` does. Wait for the steps of other threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # When Python exits, it closes generators that were left open inside of the block. No weight is read any more
        # then, and torch may abort in `remove`.
        if not sys.is_finalizing():
            self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model is a plain model


class StreamerGroup(BaseStreamer):
    """A streamer that consists of several streamers, each of a model or a part of one."""

    @property
    @abstractmethod
    def streamers(self) -> Mapping[str, BaseStreamer]:
        """The streamers, by the name of a device or a component."""

    @abstractmethod
    def _title(self) -> str:
        """The name of the combined trace. Raises `OffloadError` after `remove`."""

    @abstractmethod
    def _add_trace(self, whole: Trace, name: str, part: Trace) -> None:
        """Add the trace `part` of the streamer of that name to the combined trace `whole`."""

    def refuse_inside(self) -> None:
        for streamer in self.streamers.values():
            streamer.refuse_inside()

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """As `Streamer.trace`, of all streamers: rows for each device, spans that name the component."""
        whole = Trace(self._title())
        with ExitStack() as stack:
            parts = {name: stack.enter_context(streamer.trace()) for name, streamer in self.streamers.items()}
            yield whole
        for name, part in parts.items():
            self._add_trace(whole, name, part)
        whole.spans.sort(key=lambda span: span.begin_s)
