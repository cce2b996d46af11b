"""Lanes: the devices that compute the blocks of one model in turn, each with a plan of its own. Pure values.

A *deal* says which lane computes which block.

[Note: whose block]
Several links divide the time of a step among them only if all of them copy all of the time. While one device computes,
the others fill their rings, and a ring holds a few blocks. So if weights stream, neighbouring blocks go to different
devices (round-robin). If the weights of all devices fit, nothing streams, and neighbours stay together. In between,
where a step computes longer than the links copy, either can be faster: both are planned, and the predicted step of the
whole model decides.

Neighbours together are planned only where that can be faster, for which there is a lower bound. Each device then has a
single turn in a step. When it begins, residents and a full ring are on the device: as many bytes as the budget. All
bytes over the budget are copied during the turn, so it takes at least as long as these copies, and as its compute.

A ring has to hold all streamed weights of a block: the rest would be copied in the block's own turn, while the other
devices wait. With whole blocks as units, rings are that large, and blocks are decompressed before their turn. Finer
units need a smaller ring and decode buffer. So each lane has two plans to choose from, one with blocks as units and one
with any units, and the step of the whole model decides.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from weightstream.errors import PlanError
from weightstream.plan import cost
from weightstream.plan.manifest import Profile, Workload
from weightstream.plan.plan import Plan, in_a_graph
from weightstream.plan.planner import Planner
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.report import PlanReport
from weightstream.plan.schedule import Cursor
from weightstream.plan.units import human

HOP_S = 20e-6  # fixed time of moving a block's inputs or outputs to another device [H200, NVLink]
_STEPS = 3  # from the second step on, the fills that wrap around are in their steady state
_BISECTIONS = 60
_WORTH = 0.99  # another deal is taken only if it lowers a step to this share: round-robin leaves links more spare time


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One device of several: its plan, and the times that a simulation of all devices needs.

    Attributes:
        plan: the plan of its weights.
        simulated: the plan without the weights that kernels read from host memory or from an expert cache.
        profile: the rates of the device, and the seconds of its units without ops that other devices run in between.
        read_s: seconds of a step in which kernels read weights from host memory.
        hop_s: seconds to move the inputs of a block from the first device to this one, or its outputs back.
    """

    plan: Plan
    simulated: Plan
    profile: Profile
    read_s: float = 0.0
    hop_s: float = HOP_S

    @classmethod
    def of(cls, plan: Plan, planner: Planner) -> Lane:
        """The lane of a plan.

        Ops that other devices run between two units of this one count there, and are left out.
        """
        work, captured = (
            {name: tuple(op for op in ops if not op.elsewhere) for name, ops in every.items()}
            for every in (planner.demand.work, planner.demand.captured)
        )
        planner = replace(planner, demand=replace(planner.demand, work=work, captured=captured))
        simulated, profile = planner.simulated(plan)
        link = planner.machine.profile.link_bytes_per_s
        read_s = planner.read_nbytes(plan.manifest, plan.mapped) / link
        hop_s = HOP_S + planner.demand.states_nbytes / link  # over the PCIe link, as devices need not be peers
        return cls(plan=plan, simulated=simulated, profile=profile, read_s=read_s, hop_s=hop_s)


def whose(
    nbytes: Sequence[int], budgets: Sequence[int], rates: Sequence[float], outside_nbytes: int = 0
) -> list[list[int]]:
    """The deals that are worth a try: for each block, the index of the device that computes it. [Note: whose block]

    Args:
        nbytes: bytes of each block, in the order in which the blocks run.
        budgets: bytes of each device for weights.
        rates: bytes per second of the link of each device.
        outside_nbytes: bytes of the weights outside of the blocks, which the first device holds.
    """
    if (resident := _resident(nbytes, budgets, outside_nbytes)) is not None:
        return [resident]
    quotas = _quotas(sum(nbytes), [budgets[0] - outside_nbytes, *budgets[1:]], rates)
    held, in_turn = [0] * len(budgets), []
    for size in nbytes:  # goes to the device that is furthest below its quota
        lane = min((lane for lane, quota in enumerate(quotas) if quota), key=lambda k: (held[k] + size) / quotas[k])
        held[lane] += size
        in_turn.append(lane)
    contiguous = _contiguous(nbytes, held)
    return [in_turn, contiguous] if contiguous != in_turn and set(contiguous) == set(in_turn) else [in_turn]


def _contiguous(nbytes: Sequence[int], held: Sequence[int]) -> list[int]:
    """The deal of neighbours together in which each device has about the bytes in `held`."""
    *ends, _ = accumulate(held)
    middles = (end - size / 2 for end, size in zip(accumulate(nbytes), nbytes, strict=True))
    return [bisect(ends, middle) for middle in middles]


def _resident(nbytes: Sequence[int], budgets: Sequence[int], outside_nbytes: int) -> list[int] | None:
    """The deal of neighbours together in which nothing streams; None if something has to."""
    if outside_nbytes > budgets[0]:
        return None
    held, deal, lane = outside_nbytes, [], 0
    for size in nbytes:
        while held + size > budgets[lane]:
            lane, held = lane + 1, 0
            if lane == len(budgets):
                return None
        held += size
        deal.append(lane)
    return deal


def _quotas(total: int, budgets: Sequence[int], rates: Sequence[float]) -> list[float]:
    """Bytes of `total` for each device, so that all links are busy equally long.

    A device has the bytes of its budget, and the bytes that its link moves in that time.
    """

    def held(seconds: float) -> list[float]:
        return [max(0.0, budget + seconds * rate) for budget, rate in zip(budgets, rates, strict=True)]

    low, high = 0.0, (total + sum(abs(budget) for budget in budgets)) / min(rates)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(held(middle)) >= total else (middle, high)
    return held(high)


def walk(orders: Sequence[Sequence[str]], places: Mapping[str, int]) -> list[int]:
    """The lane of each unit, in the order in which a step reaches the units of all lanes.

    Args:
        orders: for each lane, the names of its units in the order of a step.
        places: for each unit, the position of its module in the model. Blocks run in this order. Other units may be
            defined anywhere in the model. So a unit counts as placed no later than the units after it in its lane.
    """
    coming = [list(accumulate((places[name] for name in reversed(order)), min)) for order in orders]
    turns = []
    while any(coming):
        lane = min((lane for lane, units in enumerate(coming) if units), key=lambda k: coming[k][-1])
        coming[lane].pop()
        turns.append(lane)
    return turns


def step_s(lanes: Sequence[Lane], turns: Sequence[int], *, captured: bool = False) -> float:
    """Seconds of a step in the steady state, over several lanes; as `cost.simulated_s` for one, without `compute_lost`.

    Each lane has a link of its own. The inputs of a block come from the first lane, and its outputs go back there. The
    first unit of a block is opened, and decompressed, before the inputs arrive: so a lane decompresses while it waits
    for its turn. One host launches the kernels of all lanes.

    Args:
        lanes: the lanes.
        turns: for each unit of the step, the index of its lane, as from `walk`.
        captured: the step is in a CUDA graph, in which the host launches nothing.
    """
    states = [_State(lane, captured=captured) for lane in lanes]
    hops = [0.0, *(lane.hop_s for lane in lanes[1:])]
    now = started = launched = disk_free = 0.0
    for state in states:
        disk_free = state.fill(state.plan.first, 0.0, disk_free)
    for _ in range(_STEPS):
        started = now
        steps = [state.step() for state in states]
        block: tuple[int, int | None] = 0, None  # the lane, and the index of its block
        for lane in turns:
            state = states[lane]
            unit, fills = next(steps[lane])
            if (coming := (lane, state.plan.manifest.units[unit].layer)) != block:
                now += hops[block[0]] + hops[lane]
                block = coming
            launched += state.hosts[unit]
            ended = max(state.opened(unit), now) + state.computes[unit]
            state.free = max(ended, launched)
            disk_free = state.fill(fills, state.free - state.afters[unit], disk_free)
            now = state.free
        now += hops[block[0]]
    return max(now - started, launched / _STEPS) + sum(lane.read_s for lane in lanes)


class _State:
    """A lane in a simulation: the times at which it is free, its link is free, and its units are filled."""

    def __init__(self, lane: Lane, *, captured: bool = False) -> None:
        self.plan, self.profile = plan, profile = lane.simulated, lane.profile
        times, units = cost.times_s(plan, profile, captured=captured), plan.manifest.units
        self.decodes = [profile.decode_s(u, unit) for u, unit in enumerate(units)]
        self.computes = [max(0.0, s - decode_s) for (s, _), decode_s in zip(times, self.decodes, strict=True)]
        self.hosts = [host_s for _, host_s in times]
        self.afters = cost.afters_s(times, profile)
        self.free = self._link_free = 0.0
        self._filled = [0.0] * len(units)

    def step(self) -> Iterator[tuple[int, Sequence[int]]]:
        return Cursor(self.plan.manifest.order, self.plan.after).step()

    def opened(self, unit: int) -> float:
        """The time at which the weights of a unit can be read."""
        return max(self._filled[unit], self.free) + self.decodes[unit]

    def fill(self, fills: Iterable[int], released: float, disk_free: float) -> float:
        """Queue copies; returns the time at which the disk is free again, which all lanes share."""
        plan, profile = self.plan, self.profile
        for unit in fills:
            begun = max(self._link_free, released + profile.handover_s)
            self._link_free = begun + profile.copy_s(plan.unit_nbytes[unit])
            if plan.disk and plan.unit_disk_nbytes[unit]:
                disk_free = max(disk_free, released) + plan.unit_disk_nbytes[unit] / profile.disk_bytes_per_s
                self._link_free = max(self._link_free, disk_free)
            self._filled[unit] = self._link_free
        return disk_free


@dataclass(frozen=True, kw_only=True, slots=True)
class StripedPlan(PlanReport):
    """The plans of one model over several devices.

    Attributes:
        plans: the plan of each device, by name.
        step_s: predicted seconds of an eager step of the model.
        graph_s: predicted seconds of a step of the model in a CUDA graph.
    """

    NUMBERS: ClassVar[tuple[str, ...]] = ("step_s", "graph_s", "step_nbytes")

    plans: Mapping[str, Plan]
    step_s: float
    graph_s: float

    @property
    def every(self) -> tuple[Plan, ...]:
        """The plans."""
        return tuple(self.plans.values())

    @property
    def workload(self) -> Workload | None:
        """The step of a language model that is predicted; None for any other model."""
        return self.every[0].workload

    @property
    def machine_text(self) -> str:
        return f"{len(self.plans)} of {self.every[0].machine_text}"

    @property
    def is_rough(self) -> bool:
        """Whether predicted times may be wrong by tens of percent."""
        return self.every[0].is_rough

    @property
    def step_nbytes(self) -> int:
        """Bytes that all links move in a step."""
        return sum(plan.step_nbytes for plan in self.every)

    @property
    def decoded_nbytes(self) -> int:
        """Uncompressed bytes of all weights."""
        return sum(plan.decoded_nbytes for plan in self.every)

    @property
    def cached(self) -> frozenset[str]:
        """Alias groups whose rows are cached on any device."""
        return frozenset().union(*(plan.cached for plan in self.every))

    @property
    def num_slots(self) -> int:
        """Slots of each layer with an expert cache: the smallest number of any device."""
        return min((plan.num_slots for plan in self.every if plan.cached), default=0)

    @property
    def beside_nbytes(self) -> int:
        """Bytes of activations and KV cache if one device computed the whole model."""
        return max(plan.activation_nbytes for plan in self.every) + sum(plan.cache_nbytes for plan in self.every)

    def summary(self) -> str:
        """One line for each device."""
        return "\n".join(f"{name}: {plan.summary()}" for name, plan in self.plans.items())

    def predictions(self) -> dict[str, str]:
        links_s = max(plan.copy_s for plan in self.every)
        num = sum(plan.step_nbytes > 0 for plan in self.every)
        text = self.every[0].seconds_text
        step = f"{text(self.step_s)} per step; the links are busy {text(links_s)} of it"
        return {
            "predicted": step if self.every[0].on_cpu else step + in_a_graph(self.graph_s, self.step_s, text),
            "streamed": f"{human(self.step_nbytes)} per step over {num} links",
        }

    def numbers(self) -> dict[str, Any]:
        return {
            "machine": self.every[0].machine or None,
            "nbytes": self.decoded_nbytes,
            **PlanReport.numbers(self),  # not `super()`: it refers to the class that `slots=True` has replaced
            "devices": {name: plan.numbers() for name, plan in self.plans.items()},
        }


def predicted_lanes(lanes: Mapping[str, Lane], places: Mapping[str, int]) -> StripedPlan:
    """The plans of the lanes, with the predicted seconds of a step; `places` as for `walk`."""
    plans = {name: lane.plan for name, lane in lanes.items()}
    step_s, graph_s = _times_s(lanes, places)
    return StripedPlan(plans=plans, step_s=step_s, graph_s=graph_s)


def _times_s(lanes: Mapping[str, Lane], places: Mapping[str, int]) -> tuple[float, float]:
    """Seconds of a step, eager and in a CUDA graph."""
    found = list(lanes.values())
    orders = [[lane.plan.manifest.units[unit].name for unit in lane.plan.manifest.order] for lane in found]
    turns = walk(orders, places)
    return step_s(found, turns), step_s(found, turns, captured=True)


class PlannedLane(NamedTuple):
    """The plan of one device, and the inputs that it was made from."""

    inputs: PlannerInputs
    lane: Lane


Planned = dict[str, PlannedLane]  # by the name of the device


def chosen(inputs: Mapping[str, PlannerInputs], places: Mapping[str, int]) -> Planned:
    """The plans of all devices, by name, with which the step of the model is fastest. [Note: whose block]

    Raises `PlanError` if a device has no plan.
    """
    options = {name: _lane_options(each) for name, each in inputs.items()}
    in_blocks, finer = ({name: lanes[index] for name, lanes in options.items()} for index in (0, -1))
    best, least_s = in_blocks, _taken_s(in_blocks, places)
    # then change all lanes to finer units, and after that one lane at a time, to either
    single_changes = ({name: planned[name]} for planned in (finer, in_blocks) for name in options)
    for change in (finer, *single_changes):
        if (found_s := _taken_s(changed := best | change, places)) < least_s:
            best, least_s = changed, found_s
    return best


def fastest_deal(deals: Iterable[Mapping[str, PlannerInputs]], places: Mapping[str, int]) -> tuple[int, Planned]:
    """The index of the deal with which the step of the model is fastest, and what `chosen` returns for it.

    The first of `deals` is round-robin. The others, with neighbours together, are made and planned only if they can be
    faster: [Note: whose block]. Raises `PlanError` if the first deal has no plan.
    """
    coming = enumerate(deals)
    best, planned = 0, chosen(next(coming)[1], places)
    least_s = _WORTH * _taken_s(planned, places)
    if sum(_one_turn_s(lane) for _, lane in planned.values()) >= least_s:
        return best, planned
    for index, inputs in coming:
        try:
            found = chosen(inputs, places)
        except PlanError:
            continue
        if (found_s := _taken_s(found, places)) < least_s:
            best, planned, least_s = index, found, found_s
    return best, planned


def _taken_s(planned: Planned, places: Mapping[str, int]) -> float:
    """Seconds by which plans are compared: those of a step in a CUDA graph, plus `host_share` of what the host adds."""
    step_s, graph_s = _times_s(lanes := {name: lane for name, (_, lane) in planned.items()}, places)
    host_share = max(lane.profile.host_share for lane in lanes.values())
    return graph_s + host_share * max(0.0, step_s - graph_s)


def _one_turn_s(lane: Lane) -> float:
    """Lower bound of the turn of this device if neighbours were together, so that it had about as many blocks as here.

    It is the longer one of the compute and the copies of all bytes over the budget: [Note: whose block].
    """
    plan, states = lane.simulated, [_State(lane, captured=captured) for captured in (False, True)]
    over = sum(plan.manifest.read.values()) - (plan.budget or math.inf)
    computes_s = min(sum(state.computes[unit] for unit in plan.manifest.order) for state in states)
    return max(computes_s, over / lane.profile.link_bytes_per_s)


def _lane_options(whole: PlannerInputs) -> list[PlannedLane]:
    """The plans of one device to choose from: with blocks as units first, and last with any units."""
    coarse, options = whole.coarse(), []
    for inputs in (coarse,) if coarse is whole else (coarse, whole):
        index, plan = inputs.plan()
        options.append(PlannedLane(inputs, Lane.of(plan, inputs.planner(index))))
    return options


AnyPlan = Plan | StripedPlan
