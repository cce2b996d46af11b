"""A comparison: a model offloaded, the link alone, and the whole model on the device, timed one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from weightstream.errors import OffloadError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from weightstream.plan.plan import Plan
    from weightstream.plan.work import Workload
    from weightstream.runtime.backend import Backend

NUM_COMPARED = 4  # steps without a pause between them, so that the ring wraps


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """What was timed: steps as seconds, the weights on the device, and on a GPU the most memory that was allocated."""

    name: str
    p20_s: float
    p50_s: float
    p80_s: float
    num_steps: int
    weights_nbytes: int | None = None
    peak_nbytes: int | None = None

    @classmethod
    def of(cls, name: str, seconds: Sequence[float], **memory: int | None) -> System:
        tenths = statistics.quantiles(seconds, n=10, method="inclusive")
        return cls(name=name, p20_s=tenths[1], p50_s=tenths[4], p80_s=tenths[7], num_steps=len(seconds), **memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The systems of one run. `planned` is the plan before it ran, `plan` the one that was timed."""

    planned: Plan
    plan: Plan
    workload: Workload
    device: str
    link_bytes_per_s: float
    offloaded: System
    floor: System | None  # None: nothing streams
    resident: System | None
    skipped: str  # why there is no resident one
    difference: int | None  # the 1-based place of the first output that differs

    @property
    def systems(self) -> list[System]:
        return [system for system in (self.floor, self.offloaded, self.resident) if system is not None]

    def tokens_per_s(self, system: System) -> float | None:
        return None if system is self.floor else self.workload.batch * self.workload.tokens / system.p50_s

    def times(self, system: System, over: System | None) -> float | None:
        """How many times as long as another a system takes."""
        return None if over is None else system.p50_s / over.p50_s

    @property
    def off_by(self) -> float:
        """The measured step over the one predicted before it ran, less 1."""
        return self.offloaded.p50_s / self.planned.step_s - 1 if self.planned.step_s else 0.0

    def facts(self) -> dict[str, Any]:
        """All numbers, in bytes and seconds."""
        from weightstream.cli.plan import numbers

        systems = [
            asdict(system)
            | {
                "x_floor": self.times(system, self.floor),
                "x_resident": self.times(system, self.resident),
                "tokens_per_s": self.tokens_per_s(system),
            }
            for system in self.systems
        ]
        return {
            "device": self.device,
            "workload": asdict(self.workload),
            "plan": self.plan.summary(),
            **numbers(self.plan),
            "predicted_s": self.planned.step_s,
            "link_bytes_per_s": self.link_bytes_per_s,
            "whole_floor_s": self.plan.manifest.nbytes / self.link_bytes_per_s,
            "systems": systems,
            "skipped": self.skipped or None,
            "equal": None if self.resident is None else self.difference is None,
            "first_difference": self.difference,
        }


def compare(model: Any, seconds: float) -> Comparison:
    """Time an offloaded model, which is plain and on the device in the end."""
    import torch

    streamer = model.weightstream
    planned, device = streamer.plan, streamer.device
    if planned.workload is None:
        raise UnsupportedError(f"{type(model).__name__} takes more than token ids: bench times language models")
    backend = _backend(device)
    try:
        offloaded, ours = _timed("offloaded", model, planned.workload, backend, seconds)
        plan = streamer.plan
        held = streamer.stats().held_nbytes["device"]
        streamer.remove()
        floor, bytes_per_s = _floor(plan, backend, seconds)
        resident, theirs, skipped = _resident(model, plan, backend, seconds)
    except torch.OutOfMemoryError as error:
        raise OffloadError(
            f"{device} has no memory left for a step beside the weights: lower --device-budget, --batch or --context "
            f"({error})"
        ) from error
    finally:
        backend.close()
    return Comparison(
        planned=planned,
        plan=plan,
        workload=planned.workload,
        device=str(device),
        link_bytes_per_s=bytes_per_s,
        offloaded=replace(offloaded, weights_nbytes=held),
        floor=floor,
        resident=resident,
        skipped=skipped,
        difference=_first_difference(ours, theirs) if resident else None,
    )


def _backend(device: torch.device) -> Backend:
    """A backend of its own: the streamer's ends with the streamer."""
    from weightstream.runtime.cpu import CpuBackend
    from weightstream.runtime.cuda import CudaBackend

    return CpuBackend() if device.type == "cpu" else CudaBackend(device)


def _timed(
    name: str, model: Any, workload: Workload, backend: Backend, seconds: float
) -> tuple[System, list[torch.Tensor]]:
    """A system, and the outputs of its first steps."""
    import torch

    from weightstream.adapters.steps import Steps
    from weightstream.runtime.pace import rounds_s

    on_gpu = backend.device.type != "cpu"
    if on_gpu:
        torch.accelerator.reset_peak_memory_stats(backend.device)
    steps = Steps(model, workload, backend.device)
    outputs = [steps().clone() for _ in range(NUM_COMPARED)]
    taken = rounds_s(backend, steps, seconds)
    peak = torch.accelerator.max_memory_allocated(backend.device) if on_gpu else None
    return System.of(name, taken, peak_nbytes=peak), [output.cpu() for output in outputs]


def _floor(plan: Plan, backend: Backend, seconds: float) -> tuple[System | None, float]:
    """The link alone, with what a step of the plan streams, and its bytes per second."""
    from weightstream.runtime.pace import copies_s

    sizes = [plan.unit_nbytes[unit] for fills in plan.after for unit in fills]
    moved = sizes or [unit.nbytes for unit in plan.manifest.units if unit.nbytes]
    floor = System.of("link floor", copies_s(backend, moved, seconds))
    return floor if sizes else None, sum(moved) / floor.p50_s


def _resident(
    model: Any, plan: Plan, backend: Backend, seconds: float
) -> tuple[System | None, list[torch.Tensor], str]:
    """The plain model with all weights on the device, and its outputs; or why it cannot be."""
    import torch

    from weightstream.plan.plan import human
    from weightstream.runtime import cuda
    from weightstream.store.limits import available_nbytes

    device, beside = backend.device, plan.activation_nbytes + plan.cache_nbytes
    free = available_nbytes() if device.type == "cpu" else cuda.allocatable_nbytes(device)
    needed = plan.manifest.nbytes + beside
    skipped = f"{human(plan.manifest.nbytes)} of weights + {human(beside)} beside them > {human(free)} free on {device}"
    if needed <= free and plan.workload is not None:
        try:
            if device.type == "cpu":  # into memory as allocators align it: kernels give other bits in a file's pages
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.data = tensor.data.clone()
            system, outputs = _timed("resident", model.to(device), plan.workload, backend, seconds)
            return replace(system, weights_nbytes=plan.manifest.nbytes), outputs, ""
        except torch.OutOfMemoryError as error:
            skipped = str(error).partition("\n")[0]
    return None, [], skipped


def _first_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> int | None:
    import torch

    pairs = enumerate(zip(ours, theirs, strict=True), 1)
    return next((place for place, (a, b) in pairs if not torch.equal(a, b)), None)
