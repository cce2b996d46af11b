"""The queued CPU: kernels run on a thread of their own, as on a GPU. It knows no model and no schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from weightstream.plan.manifest import Profile
from weightstream.runtime.devices.backend import Event, Side
from weightstream.runtime.devices.cpu import CPU_PROFILE, CpuBackend, CpuStamp
from weightstream.runtime.devices.host_stream import Worker


class QueueBackend(CpuBackend):
    """The CPU backend with a queue of its own for compute, so that both hazards are real: a kernel that runs before its
    fill,
    and a fill that runs before the last kernel. The caller is ahead of both queues.

    An error that reaches compute (a copy that failed before an event that compute waited for, or a kernel that raised)
    is
    raised by the next `synchronize()`, once.
    """

    def __init__(self, profile: Profile = CPU_PROFILE) -> None:
        super().__init__()
        self.profile = profile
        self._kernels = Worker("weightstream-compute")
        self._errors: list[BaseException] = []
        self._stop = weakref.finalize(self, self._kernels.stop)

    def launch(self, kernel: Callable[[], None]) -> None:
        self._kernels.submit(lambda: self._run(kernel))

    def record(self, side: Side, event: Event) -> None:
        event.point = (self._copies if side is Side.COPY else self._kernels).point()

    def wait(self, side: Side, event: Event) -> None:
        if side is Side.COPY:
            super().wait(side, event)
        elif (point := event.point) is not None:  # the point at this moment: recording again does not move it
            self.launch(point.wait)

    def stamp(self, side: Side) -> CpuStamp:
        stamp = CpuStamp()
        (self._copies if side is Side.COPY else self._kernels).submit(stamp.reach)
        return stamp

    def synchronize(self) -> None:
        if self._stop.alive:
            self._kernels.join()
        super().synchronize()
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._stop()  # before the copies: a kernel may wait for one
        super().close()

    def _run(self, kernel: Callable[[], None]) -> None:
        try:
            kernel()
        except BaseException as error:  # raised by synchronize, of any kind
            self._errors.append(error)
