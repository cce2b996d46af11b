"""Op timing: a trial runs the operators of a model's call a few times on the device, with their shapes in that call.

Rates give the time of products in general; a trial gives that of one shape. It takes at most half a second, in rounds
over all operators, because a GPU lowers its clock under a load like the model's. No weights are read: the operands are
random numbers, which share memory.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from weightstream.adapters.tracing.op_cost import CountedLaunch, Launch, Spec
from weightstream.plan.manifest import Profile
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend, Side, Stamp
from weightstream.runtime.weights.alias_groups import span

logger = logging.getLogger("weightstream")

# An operator is timed if its predicted work takes at least this long (the smallest kernel and the stamps around it take
# about as long), and all its launches take at least this share of the call.
_LEAST_S = 3e-6
_LEAST_SHARE = 0.001
_TRIAL_S, _ROUNDS = 0.5, 200
_SETTLED = 3  # first rounds, which are not counted
_LAUNCH_S = 30e-6  # host time to launch an operator and the stamp after it; any host is faster
_WIDTH = 4096  # rows and columns of the products before each round
_SEED = 7


class Trial(NamedTuple):
    """The time of an operator, by the device's clock, and its device memory besides operands and result."""

    device_s: float
    workspace_nbytes: int


def time_ops(launches: Iterable[CountedLaunch], profile: Profile, backend: Backend) -> dict[Launch, Trial]:
    """Time the launches that take a noticeable part of the call.

    Operators that cannot run on this device, or for which memory is short, are left out.
    """
    known = [(launch, launch.op, num) for launch, num in launches if launch.op is not None]
    least_s = _LEAST_SHARE * sum(op.seconds(profile) * num for _, op, num in known)
    worth = [k for k, op, num in known if op.work_s(profile) >= _LEAST_S and op.seconds(profile) * num >= least_s]
    operands = _Operands(backend.device)
    for launch in worth:
        launch.call(operands.note)
        operands.rewind()
    # attention that is trained is timed with gradients, which inference mode does not allow
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(backend.device.type, enabled=False):
        try:
            found = {launch: _runnable(launch, operands, backend) for launch in worth}
            runnable = {launch: work for launch, work in found.items() if work is not None}
            if not runnable:
                return {}
            with backend.pinning:
                seconds = _rounds(backend, [work.run for work in runnable.values()], operands)
            workspaces = [work.workspace_nbytes for work in runnable.values()]
            return dict(zip(runnable, map(Trial, seconds, workspaces), strict=True))
        except RuntimeError as error:  # mostly out of memory
            logger.debug("operators are not timed: %s", error)
            return {}


class _Runnable(NamedTuple):
    """A function that runs an operator, and its device memory besides operands and result."""

    run: Callable[[], Any]
    workspace_nbytes: int


def _runnable(launch: Launch, operands: _Operands, backend: Backend) -> _Runnable | None:
    """Make an operator ready to run, and load its kernels; None where it cannot be run here."""
    try:
        work = launch.call(operands.take)
        if work is None:
            return None
        work()
        return _Runnable(work, cuda.workspace_nbytes(backend.device, work) if backend.device.type == "cuda" else 0)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        logger.debug("an operator is not timed: %s", error)
        return None
    finally:
        operands.rewind()


def _rounds(backend: Backend, works: Sequence[Callable[[], Any]], operands: _Operands) -> list[float]:
    """The median seconds of each work, without the first rounds.

    Before each round, matrix products are queued that take the device as long as the host needs to launch the round.
    Otherwise short operators would wait for the host. The products also keep a GPU as warm, and its clock as low, as
    the model does.
    """
    rounds: list[list[float]] = []
    until_s = time.perf_counter() + _TRIAL_S
    ahead = operands.products()
    while len(rounds) < _ROUNDS and (len(rounds) <= _SETTLED or time.perf_counter() < until_s):
        begin = backend.stamp(Side.COMPUTE)
        ahead()
        one_s = max(1e-6, backend.seconds(begin, _synchronized(backend)) or 0.0)
        for _ in range(math.ceil(_LAUNCH_S * len(works) / one_s)):
            ahead()
        stamps = [backend.stamp(Side.COMPUTE)]
        for work in works:
            work()
            stamps.append(backend.stamp(Side.COMPUTE))
        backend.synchronize()
        rounds.append([backend.seconds(a, b) or 0.0 for a, b in pairwise(stamps)])
    return [median(seconds) for seconds in zip(*rounds[_SETTLED:], strict=True)]


def _synchronized(backend: Backend) -> Stamp:
    stamp = backend.stamp(Side.COMPUTE)
    backend.synchronize()
    return stamp


class _Operands:
    """Operands of any shape. All operators share the same random bytes; the operands of one operator do not overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._random = torch.Generator(device).manual_seed(_SEED)  # the user's stays as it is
        self._sizes: Counter[tuple[torch.dtype, int]] = Counter()
        self._pools: dict[tuple[torch.dtype, int], torch.Tensor] = {}
        self._taken: Counter[torch.dtype] = Counter()

    def rewind(self) -> None:
        """Begin the operands of another operator, which may share the memory of those before."""
        self._taken.clear()

    def note(self, spec: Spec) -> torch.Tensor:
        """Reserve memory for a later `take`; nothing is allocated yet."""
        key = self._next(spec)
        self._sizes[key] = max(self._sizes[key], span(spec.shape, spec.stride))
        return torch.empty(0, device="meta")

    def take(self, spec: Spec) -> torch.Tensor:
        """A tensor of random floats, or of zeros in other dtypes, which are valid indices."""
        key = self._next(spec)
        if key not in self._pools:
            self._pools[key] = self._filled(self._sizes[key], spec.dtype)
        return self._pools[key].as_strided(spec.shape, spec.stride)

    def _next(self, spec: Spec) -> tuple[torch.dtype, int]:
        self._taken[spec.dtype] += 1
        return spec.dtype, self._taken[spec.dtype]

    def products(self) -> Callable[[], Any]:
        """A product that takes a GPU about 0.2 ms."""
        width = _WIDTH if self._device.type == "cuda" else 1
        left, right = (self._filled(width**2, torch.bfloat16).view(width, width) for _ in range(2))
        return partial(torch.mm, left, right)

    def _filled(self, num: int, dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_floating_point:
            return torch.zeros(num, dtype=dtype, device=self._device)
        made = torch.empty(num, dtype=torch.float32 if dtype.itemsize < 2 else dtype, device=self._device)
        return made.normal_(generator=self._random).to(dtype)
