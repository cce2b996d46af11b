"""The proof of a plan: every rule of a schedule, checked by a walk over three steps. Trusts no planner."""

from __future__ import annotations

from collections.abc import Iterator

from weightstream.errors import InvariantError
from weightstream.plan.expert_cache import MAX_PREFETCHED_ROWS
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import ALIGN_NBYTES, Cursor

_STEPS = 3  # the first one, one that wraps around, and one in the steady state


def prove(plan: Plan) -> None:
    """Raise `InvariantError` with every rule that the plan breaks."""
    if broken := list(violations(plan)):
        raise InvariantError("the plan is wrong: " + "; ".join(broken))


def violations(plan: Plan) -> Iterator[str]:
    """The rules that a plan breaks, a sentence each."""
    shape = list(_shape(plan))
    yield from shape
    if not shape:
        yield from _homes(plan)
        yield from _schedule(plan)


def _shape(plan: Plan) -> Iterator[str]:
    num = len(plan.manifest.units)
    if len(plan.extents) != num:
        yield f"{len(plan.extents)} extents for {num} units"
    if len(plan.after) != len(plan.manifest.order):
        yield f"fills after {len(plan.after)} positions of {len(plan.manifest.order)}"
    for unit in (*plan.first, *(u for fills in plan.after for u in fills)):
        if not 0 <= unit < num:
            yield f"a fill names unit {unit} of {num}"


def _homes(plan: Plan) -> Iterator[str]:
    if plan.budget is not None and plan.device_nbytes > plan.budget:
        yield f"device bytes {plan.device_nbytes} > budget {plan.budget}"
    aliases = plan.manifest.aliases
    if unknown := plan.resident - aliases.keys():
        yield f"resident alias groups that no unit has: {sorted(unknown)}"
    if wrong := (plan.mapped - aliases.keys()) | (plan.mapped & plan.resident):
        yield f"zero-copy alias groups that no unit has, or that are resident: {sorted(wrong)}"
    if not 0 <= plan.ahead <= MAX_PREFETCHED_ROWS:
        yield f"{plan.ahead} rows are prefetched; at most {MAX_PREFETCHED_ROWS} can be"
    if wrong := (plan.cached - aliases.keys()) | (plan.cached & (plan.resident | plan.mapped)):
        yield f"cached alias groups that no unit has, or that are elsewhere: {sorted(wrong)}"
    if not 0 <= plan.shared_nbytes <= min(plan.buffer_nbytes, plan.slots_nbytes):
        yield f"{plan.shared_nbytes} bytes of the buffer are slots, of {plan.buffer_nbytes} and {plan.slots_nbytes}"
    if plan.own_buffer_nbytes % ALIGN_NBYTES:
        yield f"slots start at byte {plan.own_buffer_nbytes} of the buffer, which is not aligned"
    if shared := [alias for alias in sorted(plan.cached & aliases.keys()) if len(plan.manifest.users[alias]) > 1]:
        yield f"cached alias groups of several units, of which each would have slots: {shared}"
    if wrong := (plan.disk - aliases.keys()) | (plan.disk & plan.placed):
        yield f"alias groups on disk that no unit has, or that do not stream: {sorted(wrong)}"
    for index, (unit, extent) in enumerate(zip(plan.manifest.units, plan.extents, strict=True)):
        if extent.offset < 0 or extent.offset + extent.nbytes > plan.ring_nbytes:
            yield f"unit {index} lies at {extent} in a ring of {plan.ring_nbytes}"
        if extent.offset % ALIGN_NBYTES:
            yield f"unit {index} starts at byte {extent.offset}, which is not aligned"
        if unit.enclosing and extent.nbytes:  # it is in use while they run, so its weights must be resident
            yield f"unit {index} encloses others and streams"
        end = 0
        for alias, offset in plan.streamed(index).items():
            if offset < end or offset % ALIGN_NBYTES:
                yield f"{alias} of unit {index} at {offset} overlaps its neighbour or is not aligned"
            end = offset + aliases[alias]
        coded = unit.coded()
        if mixed := coded.keys() & plan.mapped:
            yield f"{sorted(mixed)} of unit {index} are compressed and zero-copy"
        if unit.enclosing and coded:
            yield f"unit {index} encloses others and is compressed: they share the buffer"
        if unit.enclosing and (cached := sorted(plan.cached & unit.aliases().keys())):
            yield f"unit {index} encloses others, which use the buffer, and has {cached} cached"
        if end > extent.nbytes:
            yield f"unit {index} needs {end} bytes, its extent has {extent.nbytes}"


def _schedule(plan: Plan) -> Iterator[str]:
    """Walk the steps: a fill destroys the units that it overwrites, and a position must find its unit intact."""
    intact: set[int] = set()
    unread: set[int] = set()

    def fill(unit: int, when: str) -> Iterator[str]:
        if not plan.streams(unit):
            yield f"{when}: unit {unit} is filled but does not stream"
        if unit in intact:
            yield f"{when}: unit {unit} is filled though it is in the ring"
        for other in [o for o in intact if o != unit and plan.extents[o].overlaps(plan.extents[unit])]:
            if other in unread:
                yield f"{when}: unit {unit} overwrites unit {other}, which is not read yet"
            intact.discard(other)
        intact.add(unit)
        unread.add(unit)

    named = set(plan.manifest.order)
    for unit in {*plan.first, *(u for fills in plan.after for u in fills)} - named:
        yield f"unit {unit} is filled, but no position reads it"
    for unit in plan.first:
        yield from fill(unit, "before the first step")
    cursor = Cursor(plan.manifest.order, plan.after)
    for step in range(_STEPS):
        for position, (unit, fills) in enumerate(cursor.step()):
            when = f"step {step}, position {position}"
            if plan.streams(unit) and unit not in intact:
                yield f"{when}: unit {unit} is read before it is filled"
            unread.discard(unit)
            for refill in fills:
                yield from fill(refill, when)
