"""The turn: the right to run a step, owned by the threads of one step at a time. Knows no model and no device.

[Note: whose call it is]
A unit may be called from a thread that does not run the step: one that the step's forward started or gave work to, and
then waits for; autograd's; or one that is unrelated to the step. The first two belong to the step, the last has to wait
for its end, and Python does not record which thread works for which. But a step that needs another thread waits for
it: in a join, on a future, on a queue, in a backward pass. So a call joins the step once all threads of the step are in
such a wait, and otherwise takes the turn once the step is over. A forward that waits in a way that its frames do not
show, such as a loop that polls, is recognised because it opens no unit for a while. A thread that joins by mistake
causes unplanned copies but changes no bits: the step does not end before every thread that joined it has left.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar

from weightstream.runtime.devices.collector import uncollected

_Result = TypeVar("_Result")

_POLL_S = 100e-6, 2e-3  # the first pause of a thread that waits to join, and the longest
_STALLED_S = 1.0  # after this time without a unit, a step counts as waiting, though its frames do not show it
_GIVES_WAY_S = 20e-3  # longest pause between steps of one thread, for threads that wait for their turn
_LOST_LOOKS = 200  # polls of the lock while no thread has the turn, after which its release counts as cut short
_LEAVES_S = 10.0  # longest wait for threads to leave a step that they joined and that failed
# Modules whose functions wait for other threads: a thread whose innermost frame is one of theirs is blocked.
_WAITING = frozenset(
    (
        "concurrent.futures._base",
        "concurrent.futures.thread",
        "multiprocessing.pool",
        "queue",
        "selectors",
        "threading",
        "torch.autograd.graph",
        "torch.futures",
    )
)


class StepTurn:
    """Gives the turn to one step at a time; of two threads, to the one that came first.

    `threads` are the threads of the step that has the turn; none between steps. The set object never changes.
    `holder`: the object that has the turn where no call has it. It has it until `finish`, or until it is freed.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.holder: weakref.ref[Any] | None = None
        self._lock = threading.Lock()  # held for a whole step; any thread may release it
        self._joining = threading.RLock()
        self._owner = 0  # the thread that took it last
        self._waiting: set[int] = set()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread belongs to the step that has the turn."""
        self._finish_lost()
        return get_ident() in self.threads and self._lock.locked()

    def run(self, work: Callable[[bool], _Result], progress: Callable[[], int | None] | None = None) -> _Result:
        """Run `work(is_first)` in the turn; `is_first` is False for a part of a step that has the turn already.

        `progress()`: how many units the step under way has opened, None if no other thread may join it. Without
        `progress` the calling thread does not join, [Note: whose call it is].
        """
        if self.is_mine:
            return work(False)
        me = get_ident()
        try:
            if self._joins(progress):
                return work(False)
        finally:
            self.threads.discard(me)  # it is there if it joined
            self._waiting.discard(me)
        with self._lock:  # a lock of C: no signal comes between acquiring it and what releases it
            try:
                self._begin()
                return work(True)
            finally:
                self.threads.clear()

    @contextmanager
    def taken(self) -> Iterator[bool]:
        """Have the turn inside of the block; yields `is_first`, as for `run`."""
        if self.is_mine:
            yield False
            return
        self._joins(None)  # it waits
        with self._lock:
            try:
                self._begin()
                yield True
            finally:
                self.threads.clear()

    def begin(self, holder: weakref.ref[Any], progress: Callable[[], int | None]) -> bool:
        """Have the turn belong to an object until `finish`, or join the step that has it.

        Returns whether the turn was taken. `progress`: as for `run`. The caller is in no step.
        """
        me = get_ident()
        try:
            if self._joins(progress):
                return False
        except BaseException:
            self.threads.discard(me)
            raise
        finally:
            self._waiting.discard(me)
        self._lock.acquire()
        self.holder = holder  # first: after an interrupt, a turn that neither an object nor a thread has is free
        self._begin()
        return True

    def finish(self, holder: weakref.ref[Any]) -> None:
        """End what `begin` began, in any thread; nothing if the object does not have the turn."""
        with self._joining:  # of two threads that find it lost, one releases the lock
            if self.holder is holder:
                self.threads.clear()
                self.holder = None
                self._lock.release()

    def _finish_lost(self) -> None:
        holder = self.holder
        if holder is not None and holder() is None:
            self.finish(holder)

    def end(self, close: Callable[[], None], *, has_failed: bool = False) -> None:
        """Call `close`, after which no thread joins, once all threads that joined have left.

        After a failure, wait for them at most `_LEAVES_S`.
        """
        deadline = time.monotonic() + _LEAVES_S
        while True:
            with self._joining:
                if not self._guests() or (has_failed and time.monotonic() > deadline):
                    close()
                    return
            time.sleep(_POLL_S[0])

    def _guests(self) -> set[int]:
        """Living threads that joined, without the calling one."""
        others = self.threads - {self._owner, get_ident()}
        return others & _frames().keys() if others else others

    def _begin(self) -> None:
        self._owner = get_ident()
        self._waiting.discard(self._owner)
        self.threads.clear()
        self.threads.add(self._owner)

    def _joins(self, progress: Callable[[], int | None] | None) -> bool:
        """Wait until the turn is free, or this thread has joined the step that has it; returns whether it has."""
        me = get_ident()
        if self._owner == me and self._waiting:
            self._give_way(me)
        self._finish_lost()
        if not self._lock.locked():
            return False
        self._waiting.add(me)
        pause_s, seen, since_s, num_lost = _POLL_S[0], None, time.monotonic(), 0
        # A call that cannot join blocks in the lock, but where the release may be lost: by the thread that had the turn
        # last, or by an object.
        while self._lock.locked() and (progress is not None or self._owner == me or self.holder is not None):
            now_s, found = time.monotonic(), None if progress is None else progress()
            if found != seen:
                seen, since_s = found, now_s
            may_join = found is not None and (now_s - since_s > _STALLED_S or self._is_waiting())
            if may_join and self._has_joined(me, progress):
                return True
            self._finish_lost()
            num_lost = 0 if self.threads or self.holder is not None else num_lost + 1
            if num_lost > _LOST_LOOKS:
                self._lock.release()
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        return False

    def _has_joined(self, me: int, progress: Callable[[], int | None] | None) -> bool:
        with self._joining:
            if progress is None or progress() is None:
                return False
            self.threads.add(me)
            self._waiting.discard(me)
            return True

    def _give_way(self, me: int) -> None:
        """Pause so that waiting threads get the turn before this thread, which runs step after step."""
        deadline = time.monotonic() + _GIVES_WAY_S
        while self._waiting and self._owner == me and time.monotonic() < deadline:
            time.sleep(_POLL_S[0])
        if self._owner == me:
            self._waiting.clear()  # they wait no more

    def _is_waiting(self) -> bool:
        """Whether all threads of the step wait for others."""
        frames = _frames()
        innermost = [frames[thread] for thread in list(self.threads) if thread in frames]
        return bool(innermost) and all(frame.f_globals.get("__name__") in _WAITING for frame in innermost)


def _frames() -> dict[int, FrameType]:
    """The innermost frame of each thread.

    The garbage collector is off meanwhile: it would run while the interpreter's list of threads is locked, and a
    finalizer that waits for the GIL would never get it from a thread that reads frames, too.
    """
    with uncollected():
        return sys._current_frames()
