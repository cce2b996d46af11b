"""Placement: which weights stay on the device and how large the ring is. Decides; touches no memory.

From a byte budget, every choice of ring depth is tried: residents are taken in columns (the same tensor of every
block), largest first, so that all blocks stream about the same share; the last, partial column is spread over the
depth of the model. The plan with the least predicted time wins, then the one with the fewest bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from weightstream.errors import PlanError
from weightstream.plan import cost
from weightstream.plan.manifest import Manifest, Profile, UnitSpec
from weightstream.plan.plan import Plan, buffer_nbytes, by_unit, human, streamed_nbytes
from weightstream.plan.ring import aligned

_SMALL = 256  # a tensor below 1/256 of the largest unit is not worth a copy of its own
_SMALL_NBYTES = 1 << 20  # from here on a copy's fixed 13 us are lost in its bytes
_SMALL_TOTAL = 64  # and all small ones together may take 1/64 of the model
_DEPTHS = (1, 2, 3, 4, 6, 8)
_PARTS = (0, 2, 3, 4)  # quarters of the spare bytes to fill: an even share may beat a smaller one
_TIE_S = 1e-9  # plans that differ by less are equally fast
_STATES = 3  # how many column states are tried per depth, from the one with most residents

Eligible = Callable[[str], bool]


def place(manifest: Manifest, *, budget: int | None, profile: Profile | None = None) -> Plan:
    """The fastest plan, by prediction, whose residents and ring fit `budget` bytes; None: everything stays.

    Raises `PlanError` with the arithmetic when even the smallest ring does not fit.
    """
    profile, buffer = profile or Profile(), buffer_nbytes(manifest)
    if budget is None or manifest.nbytes + buffer <= budget:
        return cost.predicted(Plan.build(manifest, frozenset(manifest.aliases), 0, budget=budget), profile)
    forced = always_resident(manifest)
    choices = list(_choices(manifest, forced, budget - buffer))
    if not choices:
        raise PlanError(_arithmetic(manifest, forced, budget))
    best: tuple[float, int, Plan] | None = None
    for bound_s, residents, ring, slot in _soonest_first(manifest, choices, profile):
        if best is not None and bound_s > best[0] + _TIE_S:
            break  # none behind is faster
        plan = Plan.build(manifest, residents, ring, slot_nbytes=slot, budget=budget)
        held = plan.resident_nbytes + plan.ring_nbytes
        found = (round(cost.simulate_s(plan, profile) / _TIE_S) * _TIE_S, held, plan)
        best = found if best is None or found[:2] < best[:2] else best
    assert best is not None
    return cost.predicted(best[2], profile)


def _soonest_first(
    manifest: Manifest, choices: Iterable[tuple[frozenset[str], int, int]], profile: Profile
) -> list[tuple[float, frozenset[str], int, int]]:
    """The choices, in a ring without and with slots, by the least time of a step: it computes, and copies what the ring
    cannot hold for good. A ring that goes around twice holds less than a unit: only its end may be used once."""
    aliases = {alias: n for u in set(manifest.order) for alias, n in manifest.units[u].aliases().items()}  # a step's
    compute_s = sum(profile.compute_s(u, manifest.units[u]) for u in manifest.order)
    found: list[tuple[float, frozenset[str], int, int]] = []
    for residents, ring, unit_nbytes in choices:
        streamed = sum(map(aliases.__getitem__, aliases.keys() - residents))
        held = unit_nbytes if streamed > 2 * ring else ring
        bound_s = max(compute_s, (streamed - held) / profile.link_bytes_per_s)
        found += [(bound_s, residents, ring, slot) for slot in (0, unit_nbytes)]
    return sorted(found, key=lambda choice: choice[0])


def decoding_less(plan: Plan, sizes: Mapping[str, Mapping[int, int]], profile: Profile) -> Plan:
    """A plan in which nothing streams, with as much as there is room for in a form that takes less time to decode.

    `sizes` are the bytes of each alias group in each of its codes. The faster code comes first, where it saves more
    time per byte than no code; then none. Whole units one after the other: one that is plain has nothing to wait for.
    """
    codes, spans = dict(plan.manifest.codes), plan.manifest.spans
    spare = (plan.budget or 0) - plan.device_nbytes

    def seconds_per_byte(alias: str, bits: int) -> float:
        """What is saved with these bits in place of those that it has, by each byte that it takes more."""
        more = (sizes[alias][bits] if bits else spans[alias]) - codes[alias][1]
        left_s = 1 / profile.decode_bytes_per_s(bits) if bits else 0.0
        return (1 / profile.decode_bytes_per_s(codes[alias][0]) - left_s) / more if more > 0 else -1.0

    for bits in (3, 4, 0):
        for alias, (_, nbytes) in list(codes.items()):
            if bits and (bits not in sizes[alias] or seconds_per_byte(alias, bits) <= seconds_per_byte(alias, 0)):
                continue
            more = (sizes[alias][bits] if bits else spans[alias]) - nbytes
            if more <= spare:
                spare -= more
                codes[alias] = bits, nbytes + more
    manifest = plan.manifest.plain().coded({alias: code for alias, code in codes.items() if code[0]})
    return Plan.build(manifest, frozenset(manifest.aliases), 0, budget=plan.budget)


def place_layers(
    manifest: Manifest,
    *,
    group_size: int,
    num_in_group: int,
    prefetch_step: int,
    eligible: Eligible = lambda name: True,
    profile: Profile | None = None,
) -> Plan:
    """The classic rule: layer i streams when `i % group_size >= group_size - num_in_group`, through as many slots as
    `prefetch_step`; everything else is resident, and so are units too small to be worth a copy (a norm on its own)."""
    streamed: set[str] = set()
    limit = _small_nbytes(manifest)
    for unit in manifest.units:
        if unit.nbytes > limit and unit.layer is not None and unit.layer % group_size >= group_size - num_in_group:
            streamed |= {t.alias for t in unit.tensors if eligible(t.name)}
    return _with_slots(manifest, streamed, prefetch_step, profile)


def place_host_bytes(
    manifest: Manifest,
    *,
    host_nbytes: int,
    eligible: Eligible = lambda name: True,
    zero_copy: bool = False,
    profile: Profile | None = None,
) -> Plan:
    """Tensors in order until `host_nbytes` are on the host: read from there (`zero_copy`), else through two slots."""
    streamed: set[str] = set()
    kept = frozenset[str]() if zero_copy else _enclosing(manifest)
    taken = 0
    for tensor in manifest.tensors():
        if taken >= host_nbytes:
            break
        if tensor.alias not in streamed and tensor.alias not in kept and eligible(tensor.name):
            streamed.add(tensor.alias)
            taken += tensor.nbytes
    if zero_copy:
        plan = place(manifest.without(frozenset(streamed)), budget=None, profile=profile)
        return map_to_host(plan, manifest, taken, profile)
    return _with_slots(manifest, streamed, 2, profile)


def map_to_host(plan: Plan, manifest: Manifest, read_nbytes: int, profile: Profile | None = None) -> Plan:
    """The plan of a manifest without some weights, as one of all: a step reads `read_nbytes` of those from the host."""
    mapped = frozenset(manifest.aliases.keys() - plan.manifest.aliases.keys())
    read_s = read_nbytes / (profile or Profile()).link_bytes_per_s
    times = {"step_s": plan.step_s + read_s, "copy_s": plan.copy_s + read_s}
    return replace(plan, manifest=manifest, mapped=mapped | plan.mapped, **times)  # type: ignore[arg-type]


def place_homes(
    plan: Plan, *, host_budget: int, movable: frozenset[str], remedy: str, profile: Profile | None = None
) -> Plan:
    """The plan with as much of `movable` on disk as must be for the rest to fit `host_budget` bytes of host memory.

    What stays is spread over the depth, so that the disk and the link are busy side by side. Raises `PlanError`, with
    `remedy`, where even all of it is not enough.
    """
    aliases = plan.manifest.aliases
    if plan.offloaded_nbytes <= host_budget:
        return plan
    movable &= aliases.keys() - plan.resident - plan.mapped
    elsewhere = frozenset(aliases.keys() - movable)
    held = sum(aliases[alias] for alias in elsewhere - plan.resident)
    if held > host_budget:
        raise PlanError(
            f"host budget {human(host_budget)} ({host_budget} bytes) < {human(held)} ({held} bytes) of weights that "
            f"must be in host memory, of {human(plan.offloaded_nbytes)} outside of the device. {remedy}"
        )
    columns = _columns(plan.manifest, elsewhere)
    plain = _plain_nbytes(plan.manifest, elsewhere)
    kept = _fitting(plan.manifest, plain, columns, host_budget - held, exact=True)
    profile, placed = profile or Profile(), replace(plan, disk=movable - kept)
    step_s = plan.step_s + cost.simulate_s(placed, profile) - cost.simulate_s(plan, profile)
    return replace(placed, step_s=step_s, disk_s=cost.disk_s(placed, profile))


def _with_slots(manifest: Manifest, streamed: set[str], slots: int, profile: Profile | None) -> Plan:
    """A slot holds the most that a layer streams, or a unit outside of the layers."""
    resident = frozenset((manifest.aliases.keys() - streamed) | _enclosing(manifest))
    sizes: Counter[object] = Counter()
    for unit, nbytes in _sized(manifest, resident):
        sizes[unit.name if unit.layer is None else unit.layer] += nbytes
    slot = max(sizes.values(), default=0)
    whole = all(unit.layer is None or sizes[unit.layer] == nbytes for unit, nbytes in _sized(manifest, resident))
    plan = Plan.build(manifest, resident, slots * slot, slot_nbytes=slot if whole else 0)
    return cost.predicted(plan, profile or Profile())


def _sized(manifest: Manifest, resident: frozenset[str]) -> Iterable[tuple[UnitSpec, int]]:
    return zip(manifest.units, streamed_nbytes(manifest, resident), strict=True)


def _enclosing(manifest: Manifest) -> frozenset[str]:
    return frozenset(alias for unit in manifest.units if unit.enclosing for alias in unit.aliases())


def _small_nbytes(manifest: Manifest) -> int:
    return min(_SMALL_NBYTES, max(unit.nbytes for unit in manifest.units) // _SMALL)


def always_resident(manifest: Manifest) -> frozenset[str]:
    """What stays whatever the budget: tensors too small to be worth a copy, and units that enclose others."""
    limit = _small_nbytes(manifest)
    small: set[str] = set()
    left = manifest.nbytes // _SMALL_TOTAL
    for alias, nbytes in sorted(manifest.aliases.items(), key=lambda item: item[1]):
        left -= nbytes
        if nbytes > limit or left < 0:
            break
        small.add(alias)
    return _enclosing(manifest) | small


def _choices(manifest: Manifest, forced: frozenset[str], budget: int) -> Iterable[tuple[frozenset[str], int, int]]:
    """Residents, bytes of the ring and of a unit that fit: complete columns, with and without what fills the rest."""
    columns = _columns(manifest, forced)
    states = list(_column_states(manifest, forced, columns))
    for depth in _DEPTHS:
        fitting = [k for k, (held, unit_nbytes) in enumerate(states) if held + depth * unit_nbytes <= budget]
        for complete in fitting[-_STATES:]:
            held, unit_nbytes = states[complete]
            residents = forced.union(*columns[:complete])
            ring = depth * unit_nbytes
            spare = budget - held - ring
            plain = _plain_nbytes(manifest, residents)
            extras = (_fitting(manifest, plain, columns[complete:], spare * part // 4) for part in _PARTS)
            yield from ((residents | extra, ring, unit_nbytes) for extra in dict.fromkeys(extras))
    yield from _few_streaming(manifest, columns, budget)


def _few_streaming(
    manifest: Manifest, columns: Sequence[Sequence[str]], budget: int
) -> Iterable[tuple[frozenset[str], int, int]]:
    """Where nearly all fits: everything stays but as many tensors of one column, evenly apart, as must make room."""
    everything = frozenset(manifest.aliases)
    missing = _nbytes(manifest, everything) - budget
    for column in columns:
        sizes = [aligned(manifest.aliases[alias]) for alias in column]
        least, most = min(sizes), max(sizes)
        for depth in _DEPTHS:
            num = -(-(missing + depth * most) // least) if least else 0
            if depth <= num <= len(column):
                residents = everything.difference(_evenly(column, num))
                if max(streamed_nbytes(manifest, residents)) <= most:  # else several are of one unit
                    yield residents, depth * most, most


def _column_states(
    manifest: Manifest, forced: frozenset[str], columns: Sequence[Sequence[str]]
) -> Iterable[tuple[int, int]]:
    """Resident bytes and the largest unit's streamed bytes, with no column resident, with the first, and so on."""
    sizes = streamed_nbytes(manifest, forced)
    held = _nbytes(manifest, forced)
    yield held, max(sizes, default=0)
    for column in columns:
        for alias in column:
            nbytes = aligned(manifest.aliases[alias])
            held += nbytes
            for index in manifest.users[alias]:
                sizes[index] -= nbytes
        yield held, max(sizes, default=0)


def _columns(manifest: Manifest, forced: frozenset[str]) -> list[list[str]]:
    """Alias groups that play the same part in every block, in the same form, largest (times reads per step) first.

    In coded form they take nearly, and not exactly, the same bytes.
    """
    positions = Counter(manifest.order)
    columns: dict[tuple[object, ...], list[str]] = {}
    reads: Counter[str] = Counter()
    for index, unit in enumerate(manifest.units):
        for tensor in {t.alias: t for t in reversed(unit.tensors)}.values():
            if tensor.alias not in reads and tensor.alias not in forced:
                part = re.sub(r"\d+", "", tensor.name) if unit.layer is not None else tensor.name
                form = tensor.bits, tensor.decoded_nbytes or tensor.nbytes
                columns.setdefault((part, *form), []).append(tensor.alias)
            reads[tensor.alias] += positions[index]
    return sorted(columns.values(), key=lambda column: -manifest.aliases[column[0]] * reads[column[0]])


def _fitting(
    manifest: Manifest, streamed: Sequence[int], columns: Sequence[Sequence[str]], spare: int, *, exact: bool = False
) -> frozenset[str]:
    """What else fits, column by column: from the units that stream most first, else spread over the depth.

    `streamed` are the bytes of each unit in plain form: coded ones are never quite the same.
    """
    padded: Callable[[int], int] = int if exact else aligned
    streamed, sizes, users, spans = list(streamed), manifest.aliases, manifest.users, manifest.spans
    taken: set[str] = set()
    for column in columns:
        most = padded(max(map(sizes.__getitem__, column)))
        if not 0 < most <= spare:
            continue
        alike: dict[int, list[str]] = {}
        for alias in column:
            alike.setdefault(-streamed[users[alias][0]], []).append(alias)
        for _, aliases in sorted(alike.items()):
            for alias in _evenly(aliases, min(len(aliases), spare // most)):
                taken.add(alias)
                streamed[users[alias][0]] -= aligned(spans[alias])
                spare -= padded(sizes[alias])
    return frozenset(taken)


def _plain_nbytes(manifest: Manifest, placed: frozenset[str]) -> list[int]:
    """Of each unit, the bytes in plain form of what is not placed."""
    return by_unit(manifest, {alias: aligned(n) for alias, n in manifest.spans.items() if alias not in placed})


def _evenly(column: Sequence[str], num: int) -> list[str]:
    """That many of a column, evenly apart."""
    return [column[(2 * i + 1) * len(column) // (2 * num)] for i in range(num)]


def _nbytes(manifest: Manifest, aliases: Iterable[str]) -> int:
    return sum(aligned(manifest.aliases[alias]) for alias in aliases)


def _arithmetic(manifest: Manifest, forced: frozenset[str], budget: int) -> str:
    sizes = streamed_nbytes(manifest, forced)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    held, buffer = _nbytes(manifest, forced), buffer_nbytes(manifest)
    needed, more = held + sizes[largest] + buffer, f" + decode buffer {human(buffer)}" if buffer else ""
    codec = ", or codec='auto' or 'none'" if buffer else ""
    return (
        f"device budget {human(budget)} ({budget} bytes) < resident {human(held)} + ring {human(sizes[largest])}{more} "
        f"= {human(needed)} ({needed} bytes): the ring must hold the largest unit, "
        f"{manifest.units[largest].name or '(root)'}. Raise the budget, or use a smaller dtype{codec}."
    )
