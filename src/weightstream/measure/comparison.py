"""A comparison: a model offloaded, the link alone, and the whole model on the device, timed one after the other."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from operator import eq, itemgetter, sub
from typing import Any

import torch

from weightstream.errors import OffloadError, UnsupportedError
from weightstream.measure import bench
from weightstream.plan.multi_device import AnyPlan
from weightstream.plan.plan import Plan
from weightstream.plan.units import human
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.streamer.stats import of_cache
from weightstream.runtime.trace import Experts
from weightstream.store import limits

System = dict[str, Any]  # its name, seconds of a step, and bytes that it holds
Step = Callable[[], torch.Tensor]  # the same step, over and over
NUM_COMPARED = 4  # steps without a pause between them, so that the ring wraps


def compare(
    model: Any, steps_of: Callable[..., Step], seconds: float, on_phase: Callable[[str], object] = lambda _: None
) -> tuple[AnyPlan, dict[str, Any]]:
    """Time an offloaded model, which is plain and on the device in the end; `steps_of(model, workload, device)`.

    `on_phase` is told the name of each system before it is timed.

    Gives the plan that was timed, and all numbers, in bytes and seconds. `predicted_s` is from before it ran, and
    `first_difference` the 1-based place of the first output that differs, if the resident model repeats its own.
    """
    streamer = model.weightstream
    planned, device = streamer.plan, streamer.device
    if (workload := planned.workload) is None:
        raise UnsupportedError(f"{type(model).__name__} takes more than token ids: bench times language models")
    steps = partial(steps_of, model, workload, device)
    try:
        with closing(bench.backend_of(device)) as backend:  # the streamer's ends with the streamer
            on_phase("offloaded")
            step, begun = steps(), streamer.stats()
            offloaded, ours = _timed("offloaded", step, backend, seconds)
            plan, ended = streamer.plan, streamer.stats()
            offloaded["weights_nbytes"] = ended.held_nbytes["device"]
            num_tokens = (ended.steps - begun.steps) * workload.batch * workload.tokens
            experts = of_cache(plan, Experts(*map(sub, ended.experts, begun.experts)), num_tokens)
            del step
            streamer.remove()
            on_phase("raw link floor")
            floor, bytes_per_s = _floor_of(plan, ended.read_in_place, backend, seconds)
            on_phase("resident")
            resident, theirs, skipped = _resident(model, steps, plan, backend, seconds)
            verdict = {"reproducible": True, "equal": None, "first_difference": None}
            verdict |= _verdict(ours, theirs, steps) if resident else {}
    except torch.OutOfMemoryError as error:
        raise OffloadError(
            f"{device} has no memory left for a step beside the weights: lower --device-budget, --batch or --context "
            f"({error})"
        ) from error
    systems = [system for system in (floor, offloaded, resident) if system]
    for system in systems:
        system["x_floor"] = system["p50_s"] / floor["p50_s"] if floor else None
        system["x_resident"] = system["p50_s"] / resident["p50_s"] if resident else None
        system["tokens_per_s"] = None if system is floor else workload.batch * workload.tokens / system["p50_s"]
    return plan, {
        "device": str(device),
        "workload": asdict(workload),
        "plan": plan.summary(),
        **plan.numbers(),
        "predicted_s": planned.step_s,
        "link_bytes_per_s": bytes_per_s,
        "whole_floor_s": plan.decoded_nbytes / bytes_per_s,
        "experts": experts,
        "systems": systems,
        "skipped": skipped or None,
        "num_compared": NUM_COMPARED,
        **verdict,
    }


def timed_calls(
    name: str, call: Callable[[], tuple[torch.Tensor, float]], seconds: float, device: torch.device
) -> tuple[System, list[torch.Tensor]]:
    """A system of whole calls, two at least, behind one that is not counted; and what all of them gave.

    `call()` gives a tensor, and the seconds that it took.
    """
    on_gpu = device.type != "cpu"
    if on_gpu:
        torch.accelerator.reset_peak_memory_stats(device)
    made = [call()]
    while len(made) < 3 or sum(taken_s for _, taken_s in made[1:]) < seconds:
        made.append(call())
    peak_nbytes = torch.accelerator.max_memory_allocated(device) if on_gpu else None
    return _system(name, [taken_s for _, taken_s in made[1:]], peak_nbytes), [output for output, _ in made]


def floor_of_calls(plans: Sequence[tuple[int, Plan]], seconds: float, device: torch.device) -> System | None:
    """The link alone with all that calls of these plans move, each so often, in plain form; None: nothing."""
    with closing(bench.backend_of(device)) as backend:
        floors = [(num, _floor(plan, (), backend, seconds / len(plans))[0]) for num, plan in plans]
    found = [(num, floor) for num, floor in floors if floor is not None]
    if not found:
        return None
    sums = {key: sum(num * floor[key] for num, floor in found) for key in ("p20_s", "p50_s", "p80_s")}
    return {**found[0][1], **sums}


def _system(name: str, taken: Sequence[float], peak_nbytes: int | None = None) -> System:
    tenths = statistics.quantiles(taken, n=10, method="inclusive")
    found = {"name": name, "p20_s": tenths[1], "p50_s": tenths[4], "p80_s": tenths[7], "num_steps": len(taken)}
    return found | {"weights_nbytes": None, "peak_nbytes": peak_nbytes}


def _timed(name: str, step: Step, backend: Backend, seconds: float) -> tuple[System, list[torch.Tensor]]:
    """A system, and the outputs of its first steps."""
    on_gpu = backend.device.type != "cpu"
    if on_gpu:
        torch.accelerator.reset_peak_memory_stats(backend.device)
    outputs = _outputs(step)
    taken = bench.rounds_s(backend, step, seconds)
    return _system(name, taken, torch.accelerator.max_memory_allocated(backend.device) if on_gpu else None), outputs


def _outputs(step: Step) -> list[torch.Tensor]:
    return [output.cpu() for output in [step().clone() for _ in range(NUM_COMPARED)]]


def _floor_of(plan: AnyPlan, read: Sequence[int], backend: Backend, seconds: float) -> tuple[System | None, float]:
    """As `_floor`; of several devices the longest of what each link takes alone, and the bytes per second of all."""
    if isinstance(plan, Plan):
        return _floor(plan, read, backend, seconds)
    found: list[tuple[System | None, float]] = []
    for name, part in plan.plans.items():
        with closing(bench.backend_of(torch.device(name))) as own:
            found.append(_floor(part, () if found else read, own, seconds / len(plan.plans)))
    floors = [floor for floor, _ in found if floor is not None]
    return max(floors, key=itemgetter("p50_s"), default=None), sum(rate for _, rate in found)


def _floor(plan: Plan, read: Sequence[int], backend: Backend, seconds: float) -> tuple[System | None, float]:
    """The link alone with all that a step moves (None: nothing), in plain form, and its bytes per second.

    `read` are the bytes that kernels read in place.
    """
    plain = plan.manifest.plain()
    nbytes = replace(plan, manifest=plain).unit_nbytes
    sizes = [*(nbytes[unit] for fills in plan.after for unit in fills), *read]
    moved = sizes or [unit.nbytes for unit in plain.units if unit.nbytes]
    floor = _system("raw link floor", bench.copies_s(backend, moved, seconds))
    return floor if sizes else None, sum(moved) / floor["p50_s"]


def _resident(
    model: Any, steps: Callable[[], Step], plan: AnyPlan, backend: Backend, seconds: float
) -> tuple[System | None, list[torch.Tensor], str]:
    """The plain model with all weights on the device, and its outputs; or why it cannot be."""
    device, nbytes, beside = backend.device, plan.decoded_nbytes, plan.beside_nbytes
    free = limits.available_nbytes() if device.type == "cpu" else cuda.allocatable_nbytes(device)
    if nbytes + beside > free:
        return None, [], f"{human(nbytes)} of weights + {human(beside)} beside them > {human(free)} free on {device}"
    try:
        if device.type == "cpu":  # into memory as allocators align it: kernels give other bits in a file's pages
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.data.clone()
        model.to(device)
        system, outputs = _timed("resident", steps(), backend, seconds)
        return system | {"weights_nbytes": nbytes}, outputs, ""
    except torch.OutOfMemoryError as error:
        return None, [], str(error).partition("\n")[0]


def _verdict(ours: Sequence[Any], theirs: Sequence[Any], steps: Callable[[], Step]) -> dict[str, Any]:
    """What the outputs say; nothing if the model does not repeat its own: some kernels add in the order they finish."""
    difference = first_difference(ours, theirs, torch.equal)
    if difference is not None and first_difference(theirs, _outputs(steps()), torch.equal) is not None:
        return {"reproducible": False}
    return {"equal": difference is None, "first_difference": difference}


def first_difference(ours: Sequence[Any], theirs: Sequence[Any], same: Callable[[Any, Any], bool] = eq) -> int | None:
    """The 1-based place of the first that differs, or that only one has."""
    pairs = enumerate(itertools.zip_longest(ours, theirs), 1)
    return next((place for place, (a, b) in pairs if not same(a, b)), None)
