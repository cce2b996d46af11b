"""The search: chooses residents and a ring for a byte budget, or follows the classic settings. Moves no weights.

Every choice of residents and a ring (candidates.py) is a candidate. The plan with the shortest predicted step wins;
of equally fast plans, the one with the fewest bytes. If the host takes longer than the device, only
`Profile.host_share` of the difference counts. For text from CUDA graphs, in which the host launches nothing, that share
is small.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from weightstream.errors import PlanError
from weightstream.plan import cost
from weightstream.plan.candidates import Choice, Share, aligned_nbytes, choices, columns_of, fitting, plain_nbytes
from weightstream.plan.manifest import Manifest, Profile, Seconds
from weightstream.plan.plan import Plan, buffer_nbytes, num_shown, streamed_nbytes
from weightstream.plan.units import human
from weightstream.settings.arguments import selects
from weightstream.settings.config import PrefetchOffloadConfig, UVAOffloadConfig

_SMALL = 256  # a tensor below 1/256 of the largest unit is not worth a copy of its own
_SMALL_NBYTES = 1 << 20  # from this size on, the fixed 13 us of a copy are negligible
_SMALL_TOTAL = 64  # all small tensors together may take 1/64 of the model
_FEW_NBYTES = 1 << 10  # a budget of fewer bytes is probably a number of GiB
_TIE_S = 1e-9  # plans that differ by less are equally fast
_MOST_PLANS = 500  # takes 2 s for a model of 700 units whose plans are alike
_ASSUMED = Profile()

Names = frozenset[str]
_NONE = Names()


class Candidate(NamedTuple):
    """A plan that is not made yet, or a set of candidates.

    Attributes:
        bound_s: lower bound of the seconds of a step, of this plan or of all plans in the set.
        make: makes the plan, or the candidates of the set; None: the plan does not fit.
    """

    bound_s: float
    make: Callable[[], Plan | Iterable[Candidate] | None]

    def plan(self) -> Plan:
        """The plan of a candidate that is a single plan."""
        found = self.make()
        assert isinstance(found, Plan)
        return found


def search(candidates: Iterable[Candidate]) -> Plan | None:
    """The plan with the shortest predicted step; if equal, that with the fewest device bytes. None: no plan fits.

    The candidate with the lowest bound is made next, until no bound is below the best step so far. Steps that differ by
    less than a nanosecond are equally fast. At most 500 plans are made.
    """
    best, least, num_plans = None, (math.inf, math.inf), 0
    number = itertools.count()  # orders candidates with equal bounds, which cannot be compared
    waiting = [(candidate.bound_s, next(number), candidate) for candidate in candidates]
    heapq.heapify(waiting)
    while waiting and waiting[0][0] <= least[0] + _TIE_S and num_plans < _MOST_PLANS:
        found = heapq.heappop(waiting)[2].make()
        if isinstance(found, Plan):
            num_plans += 1
            key = round(found.step_s / _TIE_S) * _TIE_S, found.device_nbytes
            if key < least:
                best, least = found, key
        elif found is not None:
            for candidate in found:
                heapq.heappush(waiting, (candidate.bound_s, next(number), candidate))
    return best


def place_within(manifest: Manifest, *, budget: int | None, profile: Profile = _ASSUMED) -> Plan:
    """The plan with the shortest predicted step whose residents, ring and decode buffer fit in `budget` bytes.

    `budget=None`: all weights are resident. Raises `PlanError` with the arithmetic if even the smallest ring does not
    fit.
    """
    if budget is None or fits(manifest, budget):
        return replace(cost.predicted(Plan.build(manifest, frozenset(manifest.aliases), 0), profile), budget=budget)
    plan = search(candidates(manifest, budget, profile))
    assert plan is not None
    return cost.predicted(plan, profile)


def fits(manifest: Manifest, budget: int) -> bool:
    """Whether all weights can be resident."""
    return manifest.nbytes + buffer_nbytes(manifest) <= budget


def candidates(manifest: Manifest, budget: int, profile: Profile, share: Share | None = None) -> Iterator[Candidate]:
    """Every choice of residents and a ring for a budget in which not all weights fit, and of alignments in the ring.

    A `share` bounds residents and ring separately. Raises `PlanError` if there is no choice.
    """
    forced = always_resident(manifest)

    def plan_of(choice: Choice, slot: int) -> Plan:
        plan = Plan.build(manifest, choice.residents, choice.ring_nbytes, slot_nbytes=slot, by_ends=choice.by_ends)
        return replace(plan, budget=budget, step_s=searched_s(plan, profile))

    counts_tensors = bool(profile.show_s and profile.host_s)  # each tensor that streams costs time of the host
    buffer = buffer_nbytes(manifest)
    # the ring of a share includes the decode buffer
    share = share and share._replace(ring_nbytes=share.ring_nbytes - buffer)
    unit_s = [profile.times_s(u, unit).device_s for u, unit in enumerate(manifest.units)] if profile.unit_s else []
    found = list(choices(manifest, forced, budget - buffer, counts_tensors, share, unit_s))
    if not found:
        raise PlanError(_arithmetic(manifest, forced, budget))
    device_s, most_s = _resident_s(manifest, profile).device_s, _launched_s(manifest, forced, profile)
    for choice in found:
        bound_s = max(device_s, _least_nbytes(manifest, choice) / profile.link_bytes_per_s)
        if bound_s < most_s:  # else the host, which takes at most this long, adds nothing
            bound_s = _counted_s(bound_s, _launched_s(manifest, choice.residents, profile), profile)
        slots = (0,) if choice.by_ends else (0, choice.unit_nbytes)
        yield from (Candidate(bound_s, partial(plan_of, choice, slot)) for slot in slots)


def _least_nbytes(manifest: Manifest, choice: Choice) -> int:
    """A lower bound of the bytes that a step copies."""
    streamed = [sum(map(read.__getitem__, read.keys() - choice.residents)) for read in manifest.sweeps]
    if len(streamed) > 1:  # a forward and its backward each find in the ring what the other one has left there
        return sum(max(0, nbytes - choice.ring_nbytes) for nbytes in streamed)
    # Bytes that stay in the ring from step to step are not copied again: at most all of the ring. If the step fills the
    # ring more than twice, these are less than one unit: only the end of the ring may be used just once.
    return sum(n - (choice.unit_nbytes if n > 2 * choice.ring_nbytes else choice.ring_nbytes) for n in streamed)


def searched_s(plan: Plan, profile: Profile) -> float:
    """The predicted seconds of a step by which the search compares plans."""
    seconds = cost.simulated_s(plan, profile)
    return _counted_s(seconds.graph_s, seconds.step_s, profile)


def least_s(manifest: Manifest, profile: Profile) -> float:
    """As `searched_s`, for a step that streams nothing: a lower bound."""
    seconds = _resident_s(manifest, profile)
    return _counted_s(seconds.device_s, seconds.host_s, profile)


def _resident_s(manifest: Manifest, profile: Profile) -> Seconds:
    """Seconds of the device and of the host for a step that streams nothing."""
    return cost.sums_s(manifest, [profile.times_s(u, unit) for u, unit in enumerate(manifest.units)])


def _counted_s(device_s: float, host_s: float, profile: Profile) -> float:
    """Seconds of a step on the device, plus `host_share` of the seconds that the host adds."""
    return device_s + profile.host_share * max(0.0, host_s - device_s)


def _launched_s(manifest: Manifest, residents: frozenset[str], profile: Profile) -> float:
    """Seconds of the host for a step in which all weights but `residents` stream."""
    units = zip(manifest.units, num_shown(manifest, residents), streamed_nbytes(manifest, residents), strict=True)
    times = [profile.times_s(u, unit, shown=num, streams=nbytes > 0) for u, (unit, num, nbytes) in enumerate(units)]
    return cost.sums_s(manifest, times).host_s


def place_layers(
    manifest: Manifest, prefetch: PrefetchOffloadConfig, *, kept: Names = _NONE, profile: Profile = _ASSUMED
) -> Plan:
    """The plan of the classic rule: the layers that `prefetch` offloads stream, through `offload_prefetch_step` slots.

    All other weights are resident; so are the tensors named in `kept`, and units too small to be worth a copy, such as
    a norm.
    """
    streamed: set[str] = set()
    limit = _small_nbytes(manifest)
    for unit in manifest.units:
        if unit.nbytes > limit and unit.layer is not None and prefetch.offloads(unit.layer):
            names = (t for t in unit.tensors if t.name not in kept and selects(prefetch.offload_params, t.name))
            streamed.update(t.alias for t in names)
    return _with_slots(manifest, streamed, prefetch.offload_prefetch_step, profile)


def place_host_bytes(
    manifest: Manifest,
    uva: UVAOffloadConfig,
    *,
    zero_copy: bool = False,
    kept: Names = _NONE,
    profile: Profile = _ASSUMED,
) -> Plan:
    """The plan of the classic rule: tensors are offloaded in order until `uva.nbytes` are on the host.

    Kernels read them there (`zero_copy`); else they stream through two slots.
    """
    streamed: set[str] = set()
    always_in_use = _NONE if zero_copy else _enclosing(manifest)
    taken = 0
    for tensor in manifest.tensors():
        is_free = tensor.name not in kept and tensor.alias not in streamed and tensor.alias not in always_in_use
        if is_free and taken < uva.nbytes and selects(uva.cpu_offload_params, tensor.name):
            streamed.add(tensor.alias)
            taken += tensor.nbytes
    if zero_copy:
        plan = place_within(manifest.without(streamed), budget=None, profile=profile)
        return map_to_host(plan, manifest, taken, profile)
    return _with_slots(manifest, streamed, 2, profile)


def map_to_host(plan: Plan, manifest: Manifest, read_nbytes: int, profile: Profile = _ASSUMED) -> Plan:
    """Add weights in host memory to a plan of all others: kernels read `read_nbytes` of them over the link per step."""
    mapped = plan.mapped | (manifest.aliases.keys() - plan.manifest.aliases.keys())
    read_s = read_nbytes / profile.link_bytes_per_s
    times = {name: getattr(plan, name) + read_s for name in ("step_s", "graph_s", "copy_s")}
    return replace(plan, manifest=manifest, mapped=mapped, **times)


def place_homes(
    plan: Plan, *, host_budget: int, movable: frozenset[str], remedy: str, profile: Profile = _ASSUMED
) -> Plan:
    """The plan of a search, with so many `movable` weights on disk that the rest fits in `host_budget` bytes of RAM.

    The weights that stay in RAM are spread over the depth, so that disk and link are busy at the same time. Raises
    `PlanError`, with `remedy`, if host memory is too small even with all `movable` weights on disk.
    """
    aliases = plan.manifest.aliases
    if plan.offloaded_nbytes <= host_budget:
        return plan
    movable &= aliases.keys() - plan.placed
    immovable = frozenset(aliases.keys() - movable)
    fixed_nbytes = sum(aliases[alias] for alias in immovable - plan.resident)
    if fixed_nbytes > host_budget:
        raise PlanError(
            f"host budget {human(host_budget)} ({host_budget} bytes) < {human(fixed_nbytes)} ({fixed_nbytes} bytes) of "
            f"weights that must be in host memory, of {human(plan.offloaded_nbytes)} outside of the device. {remedy}"
        )
    columns = columns_of(plan.manifest, immovable)
    plain = plain_nbytes(plan.manifest, immovable)
    kept = fitting(plan.manifest, plain, columns, host_budget - fixed_nbytes, exact=True)
    placed = replace(plan, disk=movable - kept)
    step_s = plan.step_s + (searched_s(placed, profile) - searched_s(plan, profile))
    return replace(placed, step_s=step_s, disk_s=cost.disk_s(placed, profile))


def _with_slots(manifest: Manifest, streamed: set[str], slots: int, profile: Profile) -> Plan:
    """The plan whose ring has this many slots; a slot holds the streamed bytes of any layer, or of any other unit."""
    resident = frozenset((manifest.aliases.keys() - streamed) | _enclosing(manifest))
    sizes = streamed_nbytes(manifest, resident)
    owners = [unit.name if unit.layer is None else unit.layer for unit in manifest.units]
    together: Counter[str | int] = Counter()
    for owner, nbytes in zip(owners, sizes, strict=True):
        together[owner] += nbytes
    slot_nbytes = max(together.values(), default=0)
    # aligned to slots only if each layer is one unit
    is_whole = all(together[owner] == n for owner, n in zip(owners, sizes, strict=True) if not isinstance(owner, str))
    plan = Plan.build(manifest, resident, slots * slot_nbytes, slot_nbytes=slot_nbytes if is_whole else 0)
    return cost.predicted(plan, profile)


def _enclosing(manifest: Manifest) -> frozenset[str]:
    return frozenset(alias for unit in manifest.units if unit.enclosing for alias in unit.aliases())


def _small_nbytes(manifest: Manifest) -> int:
    return min(_SMALL_NBYTES, max(unit.nbytes for unit in manifest.units) // _SMALL)


def always_resident(manifest: Manifest) -> frozenset[str]:
    """Alias groups that are resident at any budget: too small to be worth a copy, or of units that enclose others."""
    limit = _small_nbytes(manifest)
    small: set[str] = set()
    spare_nbytes = manifest.nbytes // _SMALL_TOTAL
    for alias, nbytes in sorted(manifest.aliases.items(), key=lambda item: item[1]):
        spare_nbytes -= nbytes
        if nbytes > limit or spare_nbytes < 0:
            break
        small.add(alias)
    return _enclosing(manifest) | small


def _arithmetic(manifest: Manifest, forced: frozenset[str], budget: int) -> str:
    """The text of a budget that is too small: the bytes that are needed, what takes most of them, and the remedy."""
    sizes = streamed_nbytes(manifest, forced)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    resident, ring, buffer = aligned_nbytes(manifest, forced), sizes[largest], buffer_nbytes(manifest)
    needed = resident + ring + buffer
    decode_buffer = f" + decode buffer {human(buffer)}" if buffer else ""
    if resident > ring + buffer:
        name = next(t.name for t in manifest.tensors() if t.alias == max(forced, key=manifest.aliases.__getitem__))
        others = f" and {len(forced) - 1} more" * (len(forced) > 1)
        cause = f"{name!r}{others} must stay on the device, as they are small or in use while other modules run"
    else:
        cause = f"the ring must hold the largest unit, {manifest.units[largest].name or '(root)'!r}"
    wide = {t.alias for t in manifest.tensors() if t.dtype in ("float32", "float64")}
    is_wide = 2 * sum(map(manifest.aliases.__getitem__, wide)) > manifest.nbytes
    remedies = ["Raise the budget", *["use bfloat16"] * is_wide, *["set codec='auto' or 'none'"] * bool(buffer)]
    meant = f" Did you mean device_budget='{budget}GiB'?" if 0 < budget < _FEW_NBYTES else ""
    return (
        f"device budget {human(budget)} ({budget} bytes) < resident {human(resident)} + ring {human(ring)}"
        f"{decode_buffer} = {human(needed)} ({needed} bytes): {cause}. {', or '.join(remedies)}.{meant}"
    )
