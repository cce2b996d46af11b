"""The rig of the engine tests: small plans over bytes, an engine on any backend, and kernels that check the ring."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from weightstream.plan.manifest import Manifest, TensorSpec, UnitSpec
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import ALIGN_NBYTES
from weightstream.runtime.devices.backend import Copy
from weightstream.runtime.ring.engine import Engine
from wrapped import ClockBackend, Wrapper

KIB = 1024


def small_plan(sizes: Sequence[int], ring_nbytes: int, order: Sequence[int] | None = None) -> Plan:
    """Units of one tensor each, all streamed, run in `order` (default: as listed)."""
    units = []
    for index, nbytes in enumerate(sizes):
        name = f"u{index}.w"
        tensor = TensorSpec(name=name, shape=(nbytes,), stride=(1,), dtype="uint8", alias=name, nbytes=nbytes)
        units.append(UnitSpec(name=f"u{index}", tensors=(tensor,)))
    manifest = Manifest(units=tuple(units), order=tuple(range(len(sizes)) if order is None else order))
    return Plan.build(manifest, frozenset(), ring_nbytes)


def equal_plan(num_units: int, num_slots: int, order: Sequence[int] | None = None) -> Plan:
    return small_plan([ALIGN_NBYTES] * num_units, num_slots * ALIGN_NBYTES, order)


class Rig:
    """An engine over homes of random bytes. `clock` checks its order; `mismatches` has the wrong bytes that kernels
    read."""

    def __init__(self, plan: Plan, backend: Any, engine_class: Callable[..., Any] = Engine) -> None:
        self.plan = plan
        self.clock = ClockBackend(backend)
        self.ring = self.clock.alloc(plan.ring_nbytes)
        generator = torch.Generator().manual_seed(0)
        self.homes = [
            torch.randint(0, 255, (plan.unit_nbytes[u],), dtype=torch.uint8, generator=generator)
            for u in range(len(plan.extents))
        ]
        self.copies = [
            [Copy(dst=self.ring[e.offset : e.offset + home.numel()], src=home)]
            for e, home in zip(plan.extents, self.homes, strict=True)
        ]
        self.engine = engine_class(plan, self.clock, self.copies)
        self.num_kernels = 0
        self.mismatches: list[str] = []

    def kernel(self, unit: int) -> None:
        """Queue a kernel that reads the unit's bytes twice, a moment apart."""
        self.clock.read([copy for copy in self.copies[unit] if copy.dst.numel()])
        seen, home = self.copies[unit][0].dst, self.homes[unit]

        def kernel() -> None:
            self.num_kernels += 1
            early = torch.equal(seen, home)
            time.sleep(0.00005)
            if not (early and torch.equal(seen, home)):
                self.mismatches.append(f"kernel {self.num_kernels} of unit {unit}: early={early}")

        self.clock.launch(kernel)

    def use(self, unit: int) -> None:
        self.engine.wait(unit)
        self.kernel(unit)
        self.engine.release(unit)

    def step(self, order: Sequence[int] | None = None) -> None:
        self.engine.begin_step()
        for unit in self.plan.manifest.order if order is None else order:
            self.use(unit)

    def close(self) -> None:
        self.clock.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def spied(backend: Any, calls: list[str]) -> Wrapper:
    """A backend that logs the calls that order the streams."""

    class Spy(Wrapper):
        def record(self, side: Any, event: Any) -> None:
            calls.append(f"record {side.value}")
            super().record(side, event)

        def wait(self, side: Any, event: Any) -> None:
            calls.append(f"wait {side.value}")
            super().wait(side, event)

        def copy(self, copies: Any) -> None:
            calls.append("copy")
            super().copy(copies)

    return Spy(backend)


def edited(original: ModuleType, edits: Iterable[tuple[str, str]]) -> str:
    """The source of a module with these edits. Each must match exactly once."""
    source = inspect.getsource(original)
    for old, new in edits:
        assert source.count(old) == 1, f"{original.__name__} holds {source.count(old)} times: {old}"
        source = source.replace(old, new)
    return source


def mutated(monkeypatch: pytest.MonkeyPatch, original: ModuleType, edits: list[tuple[str, str]]) -> ModuleType:
    """A module made of the original's source with these edits."""
    source = edited(original, edits)
    module = ModuleType(f"mutated_{original.__name__.rpartition('.')[2]}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, f"{module.__name__}.py", "exec"), module.__dict__)
    return module
