"""A comparison: the offloaded model, the link alone, and the whole model on the device, timed one after another."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, replace
from functools import partial
from operator import eq, itemgetter, sub
from typing import Any, NamedTuple

import torch

from weightstream.errors import OffloadError, UnsupportedError
from weightstream.measure import bench
from weightstream.plan.manifest import Workload
from weightstream.plan.multi_device import AnyPlan
from weightstream.plan.plan import Plan
from weightstream.plan.units import human
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.streamer.stats import of_cache
from weightstream.runtime.trace import ExpertTraffic
from weightstream.store import limits

ComparedSystem = dict[str, Any]  # of JSON: a system's name, seconds of a step, and bytes that it holds
ComparedStep = Callable[[], torch.Tensor]  # the same step at each call
Phase = Callable[[str], AbstractContextManager[object]]  # shows the text while a part of a comparison runs
NUM_COMPARED = 4  # consecutive steps whose outputs are compared: enough for the ring to wrap


class _Floor(NamedTuple):
    """The link alone, with the bytes that a step moves (None: it moves none), and the rate of the link."""

    system: ComparedSystem | None
    bytes_per_s: float


class _Resident(NamedTuple):
    """The plain model with all weights on the device, and its outputs; or the reason for leaving it out."""

    system: ComparedSystem | None
    outputs: list[torch.Tensor]
    why_skipped: str = ""


def compare(
    model: Any,
    steps_of: Callable[..., ComparedStep],
    seconds: float,
    phase: Phase = lambda _: nullcontext(),
) -> tuple[AnyPlan, dict[str, Any]]:
    """Time an offloaded model, which is plain and on the device afterwards.

    `steps_of(model, workload, device)` returns a step.

    Returns the plan that was timed, and all numbers in bytes and seconds. `predicted_s` is the prediction from before
    the run. `first_difference` is the 1-based index of the first output that differs; it is known only if the resident
    model repeats its own outputs.
    """
    streamer = model.weightstream
    planned, device = streamer.plan, streamer.device
    if (workload := planned.workload) is None:
        raise UnsupportedError(f"{type(model).__name__} takes more than token ids: bench times language models")
    steps = partial(steps_of, model, workload, device)
    try:
        with closing(bench.private_backend(device)) as backend:  # the streamer closes its own
            with phase(filling := _filling(workload)):
                step, begun = steps(), streamer.stats()
            with phase("timing the offloaded model"):
                offloaded, ours = _timed("offloaded", step, backend, seconds)
            plan, ended = streamer.plan, streamer.stats()
            offloaded["weights_nbytes"] = ended.held_nbytes["device"]
            num_tokens = (ended.steps - begun.steps) * workload.batch * workload.tokens
            experts = of_cache(plan, ExpertTraffic(*map(sub, ended.experts, begun.experts)), num_tokens)
            del step
            timed_passes: list[dict[str, Any]] = []
            if isinstance(planned, Plan) and planned.passes and (workload.batch, workload.tokens) == (1, 1):
                with phase("timing passes of several tokens"):
                    timed_passes = _timed_passes(planned, steps_of, model, backend, seconds, offloaded["p50_s"])
            streamer.remove()
            with phase("timing the link alone"):
                floor, bytes_per_s = _floor_of(plan, ended.read_in_place, backend, seconds)

            def filled() -> ComparedStep:
                with phase(f"{filling}, with all weights on the device"):
                    return steps()

            resident, theirs, why_skipped = _resident(model, filled, plan, backend, seconds, phase)
            verdict = Verdict(None)
            if resident:
                verdict = verdict_of(ours, theirs, lambda: _outputs(steps()), torch.equal)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise OffloadError(
            f"{device} has no memory left for a step besides the weights: lower --device-budget, --batch or --context "
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
        "is_rough": planned.is_rough,
        "link_bytes_per_s": bytes_per_s,
        "whole_floor_s": plan.decoded_nbytes / bytes_per_s,
        "experts": experts,
        "timed_passes": timed_passes,
        "systems": systems,
        "skipped": why_skipped or None,
        "num_compared": NUM_COMPARED,
        "reproducible": not resident or verdict.equal is not None,
        **verdict._asdict(),
    }


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # as the CPU's says


def _filling(workload: Workload) -> str:
    past = max(workload.context, workload.tokens) - workload.tokens
    return f"filling a cache of {past:,} positions" if past else "preparing a step"


def _timed_passes(
    planned: Plan,
    steps_of: Callable[..., ComparedStep],
    model: Any,
    backend: Backend,
    seconds: float,
    one_s: float,
) -> list[dict[str, Any]]:
    """Time passes of the numbers of tokens that are planned for. `one_s`: seconds of a step of one token."""
    found: list[dict[str, Any]] = []
    for each in planned.passes[1:]:
        workload = replace(planned.workload or Workload(), tokens=each.tokens)
        system, _ = _timed("pass", steps_of(model, workload, backend.device), backend, seconds / len(planned.passes))
        found.append(
            {
                "tokens": each.tokens,
                "p50_s": system["p50_s"],
                "x_one": system["p50_s"] / one_s,
                "predicted_s": each.step_s,
                "predicted_x_one": each.step_s / (planned.passes[0].step_s or 1.0),
            }
        )
    return found


def timed_calls(
    name: str, call: Callable[[], tuple[torch.Tensor, float]], seconds: float, device: torch.device
) -> tuple[ComparedSystem, list[torch.Tensor]]:
    """Time whole calls, at least two after one that is not counted. Returns the system and the outputs of all calls.

    `call()` returns a tensor, and the seconds that it took.
    """
    on_gpu = device.type != "cpu"
    if on_gpu:
        torch.accelerator.reset_peak_memory_stats(device)
    calls = [call()]
    while len(calls) < 3 or sum(taken_s for _, taken_s in calls[1:]) < seconds:
        calls.append(call())
    peak_nbytes = torch.accelerator.max_memory_allocated(device) if on_gpu else None
    return _system(name, [taken_s for _, taken_s in calls[1:]], peak_nbytes), [output for output, _ in calls]


def floor_of_calls(plans: Sequence[tuple[int, Plan]], seconds: float, device: torch.device) -> ComparedSystem | None:
    """Time the link alone with all bytes, uncompressed, that the steps of a call move; None if they move none.

    `plans`: each plan, with its number of steps in the call.
    """
    with closing(bench.private_backend(device)) as backend:
        floors = [(num, _floor(plan, (), backend, seconds / len(plans)).system) for num, plan in plans]
    moving = [(num, floor) for num, floor in floors if floor is not None]
    if not moving:
        return None
    sums = {key: sum(num * floor[key] for num, floor in moving) for key in ("p20_s", "p50_s", "p80_s")}
    return {**moving[0][1], **sums}


def _system(name: str, taken: Sequence[float], peak_nbytes: int | None = None) -> ComparedSystem:
    tenths = statistics.quantiles(taken, n=10, method="inclusive")
    times = {"p20_s": tenths[1], "p50_s": tenths[4], "p80_s": tenths[7], "num_steps": len(taken)}
    return {"name": name, **times, "weights_nbytes": None, "peak_nbytes": peak_nbytes}


def _timed(
    name: str, step: ComparedStep, backend: Backend, seconds: float
) -> tuple[ComparedSystem, list[torch.Tensor]]:
    """Time a step. Returns the system and the outputs of its first steps."""
    on_gpu = backend.device.type != "cpu"
    if on_gpu:
        torch.accelerator.reset_peak_memory_stats(backend.device)
    outputs = _outputs(step)
    taken = bench.rounds_s(backend, step, seconds)
    return _system(name, taken, torch.accelerator.max_memory_allocated(backend.device) if on_gpu else None), outputs


def _outputs(step: ComparedStep) -> list[torch.Tensor]:
    return [output.cpu() for output in [step().clone() for _ in range(NUM_COMPARED)]]


def _floor_of(plan: AnyPlan, read: Sequence[int], backend: Backend, seconds: float) -> _Floor:
    """As `_floor`. Several devices are timed one after another; the floor has the slowest link's times and the sum of
    all rates."""
    if isinstance(plan, Plan):
        return _floor(plan, read, backend, seconds)
    floors: list[_Floor] = []
    for name, part in plan.plans.items():
        with closing(bench.private_backend(torch.device(name))) as own:
            floors.append(_floor(part, () if floors else read, own, seconds / len(plan.plans)))
    systems = [floor.system for floor in floors if floor.system is not None]
    slowest = max(systems, key=itemgetter("p50_s"), default=None)
    return _Floor(slowest, sum(floor.bytes_per_s for floor in floors))


def _floor(plan: Plan, read: Sequence[int], backend: Backend, seconds: float) -> _Floor:
    """Time the link alone with all bytes that a step moves, uncompressed, and the bytes `read` in place by kernels."""
    plain = plan.manifest.plain()
    nbytes = replace(plan, manifest=plain).unit_nbytes
    sizes = [*(nbytes[unit] for fills in plan.after for unit in fills), *read]
    moved = sizes or [unit.nbytes for unit in plain.units if unit.nbytes]
    floor = _system("raw link floor", bench.copies_s(backend, moved, seconds))
    return _Floor(floor if sizes else None, sum(moved) / floor["p50_s"])


def _resident(
    model: Any, steps: Callable[[], ComparedStep], plan: AnyPlan, backend: Backend, seconds: float, phase: Phase
) -> _Resident:
    device, nbytes, others_nbytes = backend.device, plan.decoded_nbytes, plan.beside_nbytes
    free_nbytes = limits.available_nbytes() if device.type == "cpu" else cuda.allocatable_nbytes(device)
    if nbytes + others_nbytes > free_nbytes:
        needed = f"{human(nbytes)} of weights + {human(others_nbytes)} besides them"
        return _Resident(None, [], f"{needed} > {human(free_nbytes)} free on {device}")
    try:
        with phase("moving all weights to the device"):
            if device.type == "cpu":  # to an allocator's aligned memory: kernels on a file's pages may give other bits
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.data = tensor.data.clone()
            model.to(device)
        step = steps()
        with phase("timing the resident model"):
            system, outputs = _timed("resident", step, backend, seconds)
        return _Resident(system | {"weights_nbytes": nbytes}, outputs)
    except torch.OutOfMemoryError as error:
        return _Resident(None, [], str(error).partition("\n")[0])


class Verdict(NamedTuple):
    """Whether outputs are the plain model's; None: not known, as that does not repeat its own outputs."""

    equal: bool | None
    first_difference: int | None = None  # 1-based


def verdict_of(
    ours: Sequence[Any],
    theirs: Sequence[Any],
    again: Callable[[], Sequence[Any]],
    same: Callable[[Any, Any], bool] = eq,
) -> Verdict:
    """Compare outputs with those of the plain model.

    `again` computes the plain model's once more, for outputs that differ: some kernels add in the order they finish.
    """
    difference = first_difference(ours, theirs, same)
    if difference is not None and first_difference(theirs, again(), same) is not None:
        return Verdict(None)
    return Verdict(difference is None, difference)


def first_difference(ours: Sequence[Any], theirs: Sequence[Any], same: Callable[[Any, Any], bool] = eq) -> int | None:
    """The 1-based index of the first item that differs or that only one of both has."""
    pairs = enumerate(itertools.zip_longest(ours, theirs), 1)
    return next((place for place, (a, b) in pairs if not same(a, b)), None)
