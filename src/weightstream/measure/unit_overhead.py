"""Unit overhead: host time to open and close units, measured on small units through the binding itself.

Three kinds of steps are timed: units that stream one tensor each, units with several tensors, and units that are
decoded. Their differences are the costs of a unit, a tensor, a copy and a decoding. The tensors have so few bytes that
the device waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import torch
from torch import nn

from weightstream.codec import coding
from weightstream.codec.format import ELEMENTS, Layout
from weightstream.codec.reference import CodedPart
from weightstream.errors import StoreError
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import aligned
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.ring.binding import Binding
from weightstream.runtime.ring.engine import Counters
from weightstream.runtime.ring.timeline import Timeline
from weightstream.runtime.weights.alias_groups import UnitModule, groups, manifest
from weightstream.runtime.weights.decompression import PlanMemory
from weightstream.runtime.weights.homes import Homes
from weightstream.store.arena import Arena

FEW_TENSORS, MANY_TENSORS = 1, 9  # of a unit
NUM_UNITS, _SLOTS = 16, 4
# Between a model's own kernels the processor has less of this code cached than in a loop. A unit takes 2.6 to 4 times
# as long there (one H200, steps with and without units: Whisper's encoder, T5-XXL's and SDXL's UNet).
_BETWEEN = 3.0
_COUNT = 4096  # weights of a tensor: a copy takes the device less than the host


@contextmanager
def steps(backend: Backend, num_tensors: int, coded: str | None = None) -> Iterator[Callable[[], object]]:
    """Yield a step of `NUM_UNITS` units of `num_tensors` each. The units stream, or, with a dtype `coded`, are decoded
    from device memory."""
    with torch.inference_mode(False):
        binding, homes = _bound(backend, num_tensors, coded)

    def step() -> None:
        binding.wake()
        binding.engine.begin_step()
        for unit in range(NUM_UNITS):
            binding.open(unit)
            binding.close(unit, None, training=False, watched=False)
        binding.rest()

    try:
        yield step
    finally:
        backend.synchronize()
        with torch.inference_mode(False), suppress(StoreError):
            binding.close_all()
            homes.restore()


def _bound(backend: Backend, num_tensors: int, coded: str | None) -> tuple[Binding, Homes]:
    weight = partial(torch.zeros, _COUNT, dtype=getattr(torch, coded or "bfloat16"), device="cpu")
    lists = [[nn.Parameter(weight(), requires_grad=False) for _ in range(num_tensors)] for _ in range(NUM_UNITS)]
    model = nn.ModuleList(map(nn.ParameterList, lists))
    by_alias = groups(model)
    units = manifest([UnitModule(name=name, module=unit) for name, unit in model.named_children()], by_alias)
    plan = Plan.build(units, frozenset(), _SLOTS * num_tensors * aligned(2 * _COUNT))
    if coded is not None:
        nbytes = Layout(dtype=coded, count=_COUNT, num_escapes=0).nbytes
        plan = Plan.build(units.coded(dict.fromkeys(units.aliases, nbytes)), frozenset(units.aliases), 0)
    pin = partial(cuda.pin_in_place, device=backend.device)
    homes = Homes(by_alias, backend, arena=None if backend.device.type == "cpu" else Arena(pin, cuda.unregister))
    homes.settle(plan)
    return Binding(plan, PlanMemory.allocate(plan, backend), homes, backend, Counters(), Timeline(backend)), homes


@contextmanager
def overhead_works(backend: Backend, coded: str | None = None) -> Iterator[dict[str, Callable[[], object]]]:
    """Yield named works to be timed; `coded` and `launches` are among them if a dtype is decoded."""
    with ExitStack() as stack:
        works: dict[str, Callable[[], object]] = {
            "few": stack.enter_context(steps(backend, FEW_TENSORS)),
            "many": stack.enter_context(steps(backend, MANY_TENSORS)),
        }
        if coded is not None:
            works["coded"] = stack.enter_context(steps(backend, FEW_TENSORS, coded))
            plain = torch.zeros(ELEMENTS[coded].nbytes * _COUNT, dtype=torch.uint8, device=backend.device)
            layout, data = coding.encode(plain, coded)
            decode = coding.decoding([CodedPart(data, layout, plain)])
            works["launches"] = lambda: [decode() for _ in range(NUM_UNITS)]
        yield works


def overhead_fields(seconds: Mapping[str, float]) -> dict[str, float]:
    """Fields of a profile from the seconds of each work of `overhead_works`."""
    unit_s = {name: _BETWEEN * step_s / NUM_UNITS for name, step_s in seconds.items()}
    launch_s = unit_s.get("launches", 0.0)
    show_s = max(0.0, unit_s["many"] - unit_s["few"]) / (MANY_TENSORS - FEW_TENSORS)
    overhead_s = max(0.0, unit_s["few"] - show_s)
    in_memory_s = unit_s.get("coded", unit_s["few"]) - show_s - launch_s
    fill_s = overhead_s - min(overhead_s, max(0.0, in_memory_s))
    return {"overhead_s": overhead_s, "show_s": show_s, "fill_s": fill_s, "decoding_launch_s": launch_s}
