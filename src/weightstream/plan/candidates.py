"""Choices of residents and a ring for a byte budget, each worth a plan.

Residents are chosen in columns, largest first. A column is the same tensor of every block, such as all down
projections. So all blocks stream about the same share. If only a part of a column fits, it is spread evenly over the
depth of the model. A *state* is a number of complete columns that are resident, counted from the first one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from weightstream.plan.manifest import Manifest
from weightstream.plan.plan import by_unit, streamed_nbytes
from weightstream.plan.schedule import aligned, neighbours_nbytes

_DEPTHS = (1, 2, 3, 4, 6, 8)  # sizes of the ring, as multiples of the largest unit
_DEEP = (12, 16, 24, 32)  # of a step with a backward, where a byte of the ring saves as much as a resident one
_BY_ENDS = 0  # instead of a depth: a ring for any two neighbours, which may be smaller than two of the largest units
_SHALLOW = (1, 2, 4)
# Quarters of the bytes left over by complete columns that a partial column fills. Not always all of them: units that
# stream unequal shares may be slower, though fewer bytes move.
_PARTS = (0, 2, 3, 4)
_STATES = 3  # states with a choice per depth, those with most residents first
_MOST_STATES = 12  # states tried for these, as the ring that `_BY_ENDS` needs may not fit
_RATES = 12  # bisections of the rate at which bytes stream
_LEAST_S = 1e-9


class Share(NamedTuple):
    """One model's part of device memory that several models use in turn.

    Attributes:
        kept_nbytes: bytes for weights that stay resident while other models run.
        ring_nbytes: bytes of the ring and the decode buffer, which all models share.
    """

    kept_nbytes: int
    ring_nbytes: int


class Choice(NamedTuple):
    """Residents, and a ring for all other weights.

    Attributes:
        residents: alias groups that stay on the device.
        ring_nbytes: bytes of the ring.
        unit_nbytes: bytes of the largest unit that streams.
        by_ends: units lie at the two ends of the ring in turn.
    """

    residents: frozenset[str]
    ring_nbytes: int
    unit_nbytes: int
    by_ends: bool = False


def choices(
    manifest: Manifest,
    forced: frozenset[str],
    budget: int,
    counts_tensors: bool = False,
    share: Share | None = None,
    unit_s: Sequence[float] = (),
) -> Iterator[Choice]:
    """Choices that fit: complete columns resident, and the rest of the budget filled or not with a partial column.

    Args:
        manifest: the weights.
        forced: alias groups that are resident in every choice.
        budget: bytes for residents and the ring.
        counts_tensors: each streamed tensor costs time of the host: also try choices in which few tensors stream.
        share: bounds residents and ring separately.
        unit_s: seconds of the units. If passed, also try choices in which copies keep pace with compute.
    """
    room = _Room(budget, share.kept_nbytes, share.ring_nbytes) if share else _Room(budget, budget, budget)
    columns = columns_of(manifest, forced)
    depths = (*_DEPTHS, *_DEEP) if len(manifest.sweeps) > 1 else _DEPTHS
    yield from _columns_choices(manifest, forced, columns, room, (*depths, _BY_ENDS))
    if counts_tensors:  # smallest columns first, so that few, large tensors stream
        yield from _columns_choices(manifest, forced, columns[::-1], room, (*_SHALLOW, _BY_ENDS))
    yield from _few_streaming(manifest, columns, room)
    if unit_s:
        yield from _in_step(manifest, forced, room, unit_s)


class _Room(NamedTuple):
    """Upper bounds, in bytes.

    Attributes:
        nbytes: of residents and the ring together.
        kept_nbytes: of residents.
        ring_nbytes: of the ring.
    """

    nbytes: int
    kept_nbytes: int
    ring_nbytes: int

    def has(self, kept_nbytes: int, ring_nbytes: int) -> bool:
        is_each = kept_nbytes <= self.kept_nbytes and ring_nbytes <= self.ring_nbytes
        return is_each and kept_nbytes + ring_nbytes <= self.nbytes


def _columns_choices(
    manifest: Manifest, forced: frozenset[str], columns: list[list[str]], room: _Room, depths: Sequence[int]
) -> Iterator[Choice]:
    """Choices in which the first so many columns are resident, in this order, for each depth of the ring.

    Each is tried with several parts of the remaining bytes filled with tensors of the other columns.
    """
    states = list(_column_states(manifest, forced, columns))
    for depth in depths:
        for num_columns, ring_nbytes in islice(_rings(manifest, forced, columns, states, room, depth), _STATES):
            state = states[num_columns]
            residents = forced.union(*columns[:num_columns])
            spare = min(room.nbytes - state.held_nbytes - ring_nbytes, room.kept_nbytes - state.held_nbytes)
            plain = plain_nbytes(manifest, residents)
            extras = (fitting(manifest, plain, columns[num_columns:], spare * part // 4) for part in _PARTS)
            for chosen in (residents | extra for extra in dict.fromkeys(extras)):
                nbytes = ring_nbytes if depth else min(ring_nbytes, _neighbours_nbytes(manifest, chosen))
                yield Choice(chosen, nbytes, state.unit_nbytes, by_ends=depth == _BY_ENDS)


class _ColumnState(NamedTuple):
    """Bytes in a state: of all residents, and of the largest unit that streams."""

    held_nbytes: int
    unit_nbytes: int


class _Ring(NamedTuple):
    """A ring, and the number of columns that are resident besides it."""

    num_columns: int
    nbytes: int


def _rings(
    manifest: Manifest,
    forced: frozenset[str],
    columns: list[list[str]],
    states: list[_ColumnState],
    room: _Room,
    depth: int,
) -> Iterator[_Ring]:
    """The states that fit with a ring of this depth, and that ring; those with most residents first."""
    fitting_states = [
        num_columns
        for num_columns, state in enumerate(states)
        if room.has(state.held_nbytes, (depth or 1) * state.unit_nbytes)
    ]
    for num_columns in fitting_states[: -_MOST_STATES - 1 : -1]:
        state = states[num_columns]
        if depth:
            nbytes = depth * state.unit_nbytes
        else:
            nbytes = _neighbours_nbytes(manifest, forced.union(*columns[:num_columns]))
        if room.has(state.held_nbytes, nbytes):
            yield _Ring(num_columns, nbytes)


def _neighbours_nbytes(manifest: Manifest, residents: frozenset[str]) -> int:
    return neighbours_nbytes(manifest.order, streamed_nbytes(manifest, residents))


def _few_streaming(manifest: Manifest, columns: Sequence[Sequence[str]], room: _Room) -> Iterator[Choice]:
    """For a budget in which nearly all fits: some tensors of one column stream, evenly apart; as few as possible."""
    everything = frozenset(manifest.aliases)
    nbytes = aligned_nbytes(manifest, everything)
    for column in columns:
        sizes = [aligned(manifest.aliases[alias]) for alias in column]
        least, most = min(sizes), max(sizes)
        for depth in _DEPTHS:
            missing = max(nbytes + depth * most - room.nbytes, nbytes - room.kept_nbytes)
            num = -(-missing // least) if least else 0
            if depth <= num <= len(column) and depth * most <= room.ring_nbytes:
                residents = everything.difference(_evenly(column, num))
                if max(streamed_nbytes(manifest, residents)) <= most:  # else a unit holds several tensors of the column
                    yield Choice(residents, depth * most, most)


def _in_step(manifest: Manifest, forced: frozenset[str], room: _Room, unit_s: Sequence[float]) -> Iterator[Choice]:
    """Choices in which copies keep pace with compute: all units stream the same bytes per second of compute.

    Columns let all units stream the same bytes. If units compute unequally long, copies then wait for compute in one
    part of the model, and compute for copies in another. A ring evens this out only up to its size, which is too
    little where many units of one kind follow each other.
    """
    largest = max(streamed_nbytes(manifest, forced), default=0)
    forced_nbytes = aligned_nbytes(manifest, forced)
    positions: list[_Position] = []
    seen = set(forced)
    for index in manifest.order:
        new = {alias: aligned(n) for alias, n in manifest.units[index].aliases().items() if alias not in seen}
        seen.update(new)
        positions.append(_Position(unit_s[index], new))
    shared = {room.ring_nbytes} if room.ring_nbytes < room.nbytes else set()  # a shared ring exists at its full size
    for ring in sorted({depth * largest for depth in _DEPTHS} | shared):
        kept = min(room.kept_nbytes, room.nbytes - ring)
        if not largest or not room.has(forced_nbytes, ring):
            continue
        low, high = 0.0, 2 * manifest.nbytes / max(_LEAST_S, sum(unit_s))
        residents: frozenset[str] | None = None
        for _ in range(_RATES):
            rate = (low + high) / 2
            tried = forced | _kept_in_step(positions, rate, ring)
            if aligned_nbytes(manifest, tried) <= kept:
                residents, high = tried, rate
            else:
                low = rate
        if residents is not None and 0 < (most := max(streamed_nbytes(manifest, residents))) <= ring:
            yield Choice(residents, ring, most)


class _Position(NamedTuple):
    """Seconds of a position, and the bytes of the alias groups that it is the first to read."""

    seconds: float
    new: Mapping[str, int]


def _kept_in_step(positions: Iterable[_Position], rate: float, ring_nbytes: int) -> frozenset[str]:
    """The residents if `rate` bytes stream per second of compute.

    Bytes that a unit does not use carry over to the next ones, up to the size of the ring.
    """
    kept: set[str] = set()
    due = 0.0
    for position in positions:
        due = min(due + rate * position.seconds, float(ring_nbytes))
        for alias, nbytes in position.new.items():
            if due < nbytes / 2:
                kept.add(alias)
            else:
                due -= nbytes
    return frozenset(kept)


def _column_states(
    manifest: Manifest, forced: frozenset[str], columns: Sequence[Sequence[str]]
) -> Iterator[_ColumnState]:
    """The states in order: no column resident, the first one, the first two, and so on."""
    sizes = streamed_nbytes(manifest, forced)
    held = aligned_nbytes(manifest, forced)
    yield _ColumnState(held, max(sizes, default=0))
    for column in columns:
        for alias in column:
            nbytes = aligned(manifest.aliases[alias])
            held += nbytes
            for index in manifest.users[alias]:
                sizes[index] -= nbytes
        yield _ColumnState(held, max(sizes, default=0))


def columns_of(manifest: Manifest, forced: frozenset[str]) -> list[list[str]]:
    """Columns: the alias groups with the same part in every block and the same form. Largest first, weighted by reads
    per step.

    Compressed groups of a column have nearly, but not exactly, the same bytes.
    """
    positions = Counter(manifest.order)
    columns: dict[tuple[object, ...], list[str]] = {}
    reads: Counter[str] = Counter()
    for index, unit in enumerate(manifest.units):
        for tensor in {t.alias: t for t in reversed(unit.tensors)}.values():
            if tensor.alias not in reads and tensor.alias not in forced:
                part = re.sub(r"\d+", "", tensor.name) if unit.layer is not None else tensor.name
                form = tensor.is_coded, tensor.decoded_nbytes or tensor.nbytes
                columns.setdefault((part, *form), []).append(tensor.alias)
            reads[tensor.alias] += positions[index]
    return sorted(columns.values(), key=lambda column: -manifest.aliases[column[0]] * reads[column[0]])


def fitting(
    manifest: Manifest, streamed: Sequence[int], columns: Sequence[Sequence[str]], spare: int, *, exact: bool = False
) -> frozenset[str]:
    """Alias groups to keep resident, too, as far as they fit, column by column.

    Of a column, groups of the units that stream most come first; among units that stream alike, the groups are evenly
    apart.

    Args:
        manifest: the weights.
        streamed: uncompressed bytes that each unit streams. Compressed sizes of equal units differ a little, so they
            could not be compared.
        columns: the alias groups to choose from.
        spare: the bytes that they may take.
        exact: count exact bytes instead of aligned ones.
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


def plain_nbytes(manifest: Manifest, placed: frozenset[str]) -> list[int]:
    """For each unit, the uncompressed bytes of its alias groups that are not placed."""
    return by_unit(manifest, {alias: aligned(n) for alias, n in manifest.spans.items() if alias not in placed})


def _evenly(column: Sequence[str], num: int) -> list[str]:
    """This many alias groups of a column, evenly apart."""
    return [column[(2 * i + 1) * len(column) // (2 * num)] for i in range(num)]


def aligned_nbytes(manifest: Manifest, aliases: Iterable[str]) -> int:
    return sum(aligned(manifest.aliases[alias]) for alias in aliases)
