"""Placement: which weights stay on the device and how large the ring is. Decides; touches no memory.

From a byte budget, every choice of ring depth is tried: residents are taken in columns (the same tensor of every
block), largest first, so that all blocks stream about the same share; the last, partial column is spread over the
depth of the model. The plan with the least predicted time wins, then the one with the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from weightstream.errors import PlanError
from weightstream.plan import cost
from weightstream.plan.manifest import Manifest, Profile, TensorSpec, UnitSpec
from weightstream.plan.plan import Plan, human
from weightstream.plan.ring import aligned

_SMALL = 256  # a tensor below 1/256 of the largest unit is not worth a copy of its own
_DEPTHS = (1, 2, 3, 4)

Eligible = Callable[[str], bool]


def place(manifest: Manifest, *, budget: int | None, profile: Profile | None = None) -> Plan:
    """The fastest plan, by prediction, whose residents and ring fit `budget` bytes; None: everything stays.

    Raises `PlanError` with the arithmetic when even the smallest ring does not fit.
    """
    profile = profile or Profile()
    if budget is None or manifest.nbytes <= budget:
        return _predicted(Plan.build(manifest, frozenset(manifest.aliases), 0, budget), profile)
    forced = _forced(manifest)
    choices = [
        _predicted(Plan.build(manifest, residents, ring, budget), profile)
        for residents, ring in _choices(manifest, forced, budget)
    ]
    if not choices:
        raise PlanError(_arithmetic(manifest, forced, budget))
    return min(choices, key=lambda plan: (plan.step_s, plan.device_nbytes))


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
    `prefetch_step`; everything else is resident."""
    streamed: set[str] = set()
    for unit in manifest.units:
        if unit.layer is not None and not unit.enclosing and unit.layer % group_size >= group_size - num_in_group:
            streamed |= _eligible_aliases(unit.tensors, eligible)
    return _with_slots(manifest, streamed, prefetch_step, profile)


def place_host_bytes(
    manifest: Manifest,
    *,
    host_nbytes: int,
    eligible: Eligible = lambda name: True,
    profile: Profile | None = None,
) -> Plan:
    """Tensors in order until `host_nbytes` are on the host; they pass through a ring of one slot per neighbour pair."""
    streamed: set[str] = set()
    taken = 0
    for tensor in manifest.tensors():
        if taken >= host_nbytes:
            break
        if tensor.alias not in streamed and eligible(tensor.name):
            streamed.add(tensor.alias)
            taken += tensor.nbytes
    enclosing = {alias for unit in manifest.units if unit.enclosing for alias in unit.aliases()}
    return _with_slots(manifest, streamed - enclosing, 2, profile)


def _with_slots(manifest: Manifest, streamed: set[str], slots: int, profile: Profile | None) -> Plan:
    resident = frozenset(manifest.aliases.keys() - streamed)
    ring = slots * max(_ring_units(manifest, resident), default=0)
    return _predicted(Plan.build(manifest, resident, ring), profile or Profile())


def _predicted(plan: Plan, profile: Profile) -> Plan:
    return replace(plan, step_s=cost.simulate_s(plan, profile))


def _eligible_aliases(tensors: Iterable[TensorSpec], eligible: Eligible) -> set[str]:
    return {t.alias for t in tensors if eligible(t.name)}


def _forced(manifest: Manifest) -> frozenset[str]:
    """What stays whatever the budget: tensors too small to be worth a copy, and units that enclose others."""
    largest = max(unit.nbytes for unit in manifest.units)
    small = {alias for alias, nbytes in manifest.aliases.items() if nbytes * _SMALL <= largest}
    enclosing = {alias for unit in manifest.units if unit.enclosing for alias in unit.aliases()}
    return frozenset(small | enclosing)


def _choices(manifest: Manifest, forced: frozenset[str], budget: int) -> Iterable[tuple[frozenset[str], int]]:
    """For every ring depth, the residents that fit beside it: complete columns first, then what fills the rest."""
    columns = _columns(manifest.units, forced)
    states = list(_column_states(manifest, forced, columns))
    for depth in _DEPTHS:
        fitting = [k for k, (held, unit_nbytes) in enumerate(states) if held + depth * unit_nbytes <= budget]
        if not fitting:
            continue
        complete = fitting[-1]
        held, unit_nbytes = states[complete]
        rest = [alias for column in columns[complete:] for alias in _spread(column)]
        extra = _fitting(manifest, rest, budget - held - depth * unit_nbytes)
        yield forced.union(*columns[:complete], extra), depth * unit_nbytes


def _column_states(
    manifest: Manifest, forced: frozenset[str], columns: Sequence[Sequence[str]]
) -> Iterable[tuple[int, int]]:
    """Resident bytes and the largest unit's streamed bytes, with no column resident, with the first, and so on."""
    users: dict[str, list[int]] = {}
    for index, unit in enumerate(manifest.units):
        for alias in unit.aliases():
            users.setdefault(alias, []).append(index)
    sizes = list(_ring_units(manifest, forced))
    held = _nbytes(manifest, forced)
    yield held, max(sizes, default=0)
    for column in columns:
        for alias in column:
            nbytes = aligned(manifest.aliases[alias])
            held += nbytes
            for index in users[alias]:
                sizes[index] -= nbytes
        yield held, max(sizes, default=0)


def _columns(units: Sequence[UnitSpec], forced: frozenset[str]) -> list[list[str]]:
    """Alias groups that play the same part in every block, largest (times uses per step) first."""
    columns: dict[tuple[object, ...], list[str]] = {}
    uses: dict[str, int] = {}
    for unit in units:
        for tensor in {t.alias: t for t in reversed(unit.tensors)}.values():
            uses[tensor.alias] = uses.get(tensor.alias, 0) + 1
            if tensor.alias in forced or uses[tensor.alias] > 1:
                continue
            part = tensor.name.removeprefix(unit.name) if unit.layer is not None else tensor.name
            columns.setdefault((part, tensor.nbytes), []).append(tensor.alias)
    sizes = {t.alias: t.nbytes for unit in units for t in unit.tensors}
    return sorted(columns.values(), key=lambda column: -sizes[column[0]] * uses[column[0]])


def _spread(column: Sequence[str]) -> list[str]:
    """The column in bit-reversed order: any prefix of it is spread evenly over the depth."""
    bits = max(1, (len(column) - 1).bit_length())
    return [column[i] for i in sorted(range(len(column)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))]


def _fitting(manifest: Manifest, aliases: Iterable[str], spare: int) -> set[str]:
    taken: set[str] = set()
    for alias in aliases:
        nbytes = aligned(manifest.aliases[alias])
        if nbytes <= spare:
            taken.add(alias)
            spare -= nbytes
    return taken


def _nbytes(manifest: Manifest, aliases: Iterable[str]) -> int:
    return sum(aligned(manifest.aliases[alias]) for alias in aliases)


def _ring_units(manifest: Manifest, resident: frozenset[str]) -> Iterable[int]:
    for unit in manifest.units:
        yield sum(aligned(n) for alias, n in unit.aliases().items() if alias not in resident)


def _arithmetic(manifest: Manifest, forced: frozenset[str], budget: int) -> str:
    sizes = list(_ring_units(manifest, forced))
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    held = _nbytes(manifest, forced)
    return (
        f"device budget {human(budget)} ({budget} bytes) < resident {human(held)} + ring {human(sizes[largest])} "
        f"= {human(held + sizes[largest])} ({held + sizes[largest]} bytes): the ring must hold the largest unit, "
        f"{manifest.units[largest].name or '(root)'}. Raise the budget, or use a smaller dtype."
    )
