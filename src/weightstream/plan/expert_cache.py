"""Expert caches: the stacks that are worth slots on the device, the number of slots, and the predicted hit rate.

A step reads some rows of each stack. The share of hits is larger than the share of rows that have slots, as consecutive
tokens use the same experts. How much larger it is was measured on other models; the counts of a cache that ran correct
that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import ceil, exp, factorial, log, prod
from typing import NamedTuple

from weightstream.plan import cost
from weightstream.plan.hit_curves import HitCurve, curve_of
from weightstream.plan.manifest import Manifest, Profile, TensorSpec, Workload
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import aligned

_MANAGED_S = 7.5e-6  # seconds to look up the slots of a unit's rows if all are hits [H100: 7.2 to 7.7 us]
_LAUNCHES = 2  # more Triton kernels per unit; each costs the host as much as a launch of decompression
_FETCH_RATE = 0.92  # share of the link's rate that the fetching kernel reaches [H200: 51 of 55 GB/s]
_HEADROOM = 1.02  # a compressed row may have more escapes than the mean of its stack
# of the buffer for rows that are read in waves: the larger it is, the more of them come during attention
_WAVES_NBYTES, _WAVES_SHARE = 512 << 20, 1 / 32  # at least, and of the budget
_LEAST_ROWS = 4  # of a unit, so that a stack is read in two waves or more
_SLOT_NBYTES = 1024  # bytes of a slot that may be lost to alignment
MAX_PREFETCHED_ROWS = 8  # per unit
LEAST_USED = 0.25  # share of prefetched rows that are used; below it the device prefetches no longer
_WORTH = 100  # a measured curve weighs as much as this many counted rows
NEARLY_ALL = 2  # ids per row: drawn evenly they name 86 % of the rows, so whole stacks are read
_TILE = 4096  # weights: a compressed row that is read alone has a multiple of these


class Counts(NamedTuple):
    """Counts of an expert cache that ran.

    Attributes:
        num_slots: slots for each stack.
        found: hits: rows that were in a slot when a step named them, and had not been prefetched for it.
        fetched: misses, with the rows that were hits only because they had been prefetched.
        workload: the workload of the steps; None: unknown.
        ahead: rows that were prefetched.
        used: prefetched rows that a step then named.
    """

    num_slots: int
    found: int
    fetched: int
    workload: Workload | None = None
    ahead: int = 0
    used: int = 0

    @property
    def num_rows(self) -> int:
        return self.found + self.fetched


class Cached(NamedTuple):
    """An expert cache: stacks in host memory, and slots on the device for some of their rows.

    Attributes:
        sizes: bytes of each stack in host memory, by alias group.
        coded: the same of the stacks that are compressed; all of them, or none.
        num_slots: slots for each stack.
        slots_nbytes: bytes of the slots of all stacks.
        buffer_nbytes: bytes of the buffer, besides slots: for the whole stacks of a unit, uncompressed; or for waves of
            their rows, and the rest of the buffer lies in slots.
        ahead: rows that each unit prefetches for the next one; 0: none.
    """

    sizes: Mapping[str, int]
    coded: Mapping[str, int]
    num_slots: int
    slots_nbytes: int
    buffer_nbytes: int
    ahead: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.slots_nbytes + self.buffer_nbytes


def stacks_of(manifest: Manifest, profile: Profile) -> dict[int, list[TensorSpec]]:
    """The stacks of each unit that picks rows of them in a step, by the index of the unit."""
    stacks_by_unit = {}
    for index, unit in enumerate(manifest.units):
        stacks = [t for t in unit.tensors if t.alias in unit.stacks and len(manifest.users[t.alias]) == 1]
        is_alone = not unit.enclosing  # else units inside of it would use the buffer
        if is_alone and stacks and profile.picked and 0 < profile.picked[index].share <= NEARLY_ALL:
            stacks_by_unit[index] = stacks
    return stacks_by_unit


def caches(
    manifest: Manifest,
    sizes: Mapping[str, int],
    profile: Profile,
    budget: int,
    workload: Workload | None,
    counts: Counts | None = None,
) -> Iterator[Cached]:
    """Caches for all stacks of an uncompressed manifest: uncompressed, and compressed if all stacks can be.

    A cache has as many slots as leave room for all other weights, but at least those for the rows of one token. Kernels
    that read rows in their slots need uncompressed ones, and read whole stacks for more ids than rows.
    """
    stacks = stacks_of(manifest, profile)
    if not stacks:
        return
    every = [t for of_unit in stacks.values() for t in of_unit]
    rest = manifest.nbytes - sum(t.nbytes for t in every)
    buffer = max(sum(aligned(t.nbytes) for t in of_unit) for of_unit in stacks.values())
    picked = max(round(profile.picked[u].share * of_unit[0].shape[0]) for u, of_unit in stacks.items())
    least = -(-picked // _num_tokens(workload))
    most = min(t.shape[0] for t in every)
    in_waves = all(manifest.units[index].in_waves for index in stacks)
    in_slots = any(manifest.units[index].ids_per_token for index in stacks)
    largest = max(sum(t.nbytes for t in of_unit) // of_unit[0].shape[0] for of_unit in stacks.values())
    waves = aligned(max(_WAVES_NBYTES, int(_WAVES_SHARE * budget), _LEAST_ROWS * largest))  # slots follow
    for coded in ({}, {t.alias: sizes[t.alias] for t in every if t.alias in sizes and prod(t.shape[1:]) % _TILE == 0}):
        held = {t.alias: t.nbytes for t in every} | coded
        if 0 < len(coded) < len(held) or (in_slots and (coded or picked > most)):
            continue
        per_slot = _per_slot(every, held, coded)
        room = min(buffer, waves) if in_waves and not coded else buffer
        num = max(least, (budget - room - rest) // per_slot)
        if num < picked:  # a step places rows in whole stacks
            room, num = buffer, max(least, (budget - buffer - rest) // per_slot)
        room = max(room, buffer - num * per_slot)  # whole stacks have to fit into both
        if num < most and num * per_slot + room < budget:  # if all rows fit they are resident, without a cache
            cached = Cached(held, coded, num, num * per_slot, room)
            # If other weights stream, the link is busy, and the next router's weights may not be there yet.
            fits = num * per_slot + room + rest <= budget and not in_slots  # of their kernels no router is known
            yield cached._replace(ahead=_best_ahead(manifest, cached, profile, workload, counts) if fits else 0)


def of_plan(plan: Plan) -> Cached | None:
    """The expert cache of a plan; None if it has none."""
    manifest = plan.manifest
    sizes = {alias: manifest.aliases[alias] for alias in plan.cached}
    coded = {alias: nbytes for alias, nbytes in manifest.codes.items() if alias in sizes}
    own_nbytes = plan.own_buffer_nbytes
    return Cached(sizes, coded, plan.num_slots, plan.slots_nbytes, own_nbytes, plan.ahead) if sizes else None


def _per_slot(stacks: Iterable[TensorSpec], sizes: Mapping[str, int], coded: Collection[str]) -> int:
    """Bytes of one slot for each of these stacks together."""
    total = 0
    for t in stacks:
        headroom = _HEADROOM if t.alias in coded else 1.0
        total += aligned(round(sizes[t.alias] / t.shape[0] * headroom) + _SLOT_NBYTES)
    return total


def profile_with_cache(
    manifest: Manifest,
    cached: Cached | None,
    profile: Profile,
    workload: Workload | None,
    counts: Counts | None = None,
) -> Profile:
    """The profile for an uncompressed manifest whose stacks are cached: with the seconds to look up, fetch and
    decompress rows. Without a cache, the same profile."""
    if cached is None:
        return profile
    coded = manifest.coded(cached.coded)
    decoding = profile.decoding(coded)
    unit_s, host_s = list(decoding.unit_s), list(decoding.host_s)
    captured_s = list(decoding.captured_s or [0.0] * len(unit_s))
    fetches = _fetched(manifest, cached, profile, workload, counts)
    hidden_s = sum(unit_s) / max(1, len(fetches))
    for index, waited in _fetched(manifest, cached._replace(ahead=0), profile, workload, counts).items():
        unit_s[index] += waited.seconds(profile, 0.0)
        captured_s[index] += fetches[index].seconds(profile, hidden_s) - waited.seconds(profile, 0.0)
        if host_s:
            shown = len(coded.units[index].tensors)
            opening_s = (
                profile.times_s(index, coded.units[index], shown=shown, streams=False).host_s - profile.host_s[index]
            )
            host_s[index] += opening_s + _LAUNCHES * profile.decoding_launch_s
    captured = tuple(captured_s) if cached.ahead else decoding.captured_s  # only captured steps prefetch rows
    return replace(decoding, unit_s=tuple(unit_s), host_s=tuple(host_s), captured_s=captured)


def device_s(profile: Profile) -> float:
    """Seconds of the device for a step in a CUDA graph, in which each unit runs once."""
    return sum(profile.unit_s) + sum(profile.captured_s)


def with_predictions(
    plan: Plan,
    manifest: Manifest,
    cached: Cached,
    profile: Profile,
    workload: Workload | None,
    counts: Counts | None = None,
) -> Plan:
    """A plan of the other weights with the cached stacks added, and the predictions for these: hit rate, fetched bytes.

    A step takes at least as long as the link needs for fetches and streamed weights together.
    """
    fetches = _fetched(manifest, cached, profile, workload, counts).values()
    empty = cached._replace(num_slots=0, ahead=0)
    waited_nbytes = sum(fetch.nbytes for fetch in fetches)
    read_nbytes = sum(fetch.nbytes for fetch in _fetched(manifest, empty, profile, workload, counts).values())
    fetched_nbytes = round(waited_nbytes + sum(fetch.ahead_nbytes for fetch in fetches))
    link_s = cost.copy_s(plan, profile) + fetched_nbytes / (_FETCH_RATE * profile.link_bytes_per_s)
    found = replace(plan, manifest=manifest, cached=frozenset(cached.sizes), slots_nbytes=cached.slots_nbytes)
    return replace(
        found,
        step_s=max(plan.step_s, link_s),
        graph_s=max(plan.graph_s, link_s),
        decode_s=sum(profile.decode_s(u, manifest.units[u]) for u in manifest.order),
        num_slots=cached.num_slots,
        shared_nbytes=max(0, min(found.buffer_nbytes - cached.buffer_nbytes, cached.slots_nbytes)),
        ahead=cached.ahead,
        found_share=1 - waited_nbytes / read_nbytes if read_nbytes else 0.0,
        hit_curve=_curve_names(manifest, profile, workload),
        counted_rows=counts.num_rows if counts else 0,
        fetched_nbytes=fetched_nbytes,
    )


class _Prefetch(NamedTuple):
    """The prefetch for a call.

    Attributes:
        odds: the probability of each number of rows, from 0.
        used: rows that the call uses.
    """

    odds: tuple[float, ...]
    used: float

    @property
    def fetched(self) -> float:
        """The mean number of rows."""
        return sum(num * odds for num, odds in enumerate(self.odds))


_NOTHING = _Prefetch((1.0,), 0.0)


class _Fetch(NamedTuple):
    """Fetches of a unit in a step.

    Attributes:
        row_nbytes: bytes of a row.
        num_rows: rows that are fetched when the unit needs them.
        ahead: rows that are prefetched.
        calls: calls of the cache, each for at most as many rows as there are slots.
    """

    row_nbytes: float
    num_rows: float
    ahead: _Prefetch
    calls: int

    @property
    def nbytes(self) -> float:
        """Bytes that are fetched when the unit needs them."""
        return self.num_rows * self.row_nbytes

    @property
    def ahead_nbytes(self) -> float:
        """Bytes that are prefetched."""
        return self.ahead.fetched * self.row_nbytes

    def seconds(self, profile: Profile, hidden_s: float) -> float:
        """Seconds of the unit's fetches, if compute hides `hidden_s` seconds of each prefetch."""
        row_s = self.row_nbytes / (_FETCH_RATE * profile.link_bytes_per_s)
        late_s = sum(odds * max(0.0, num * row_s - hidden_s) for num, odds in enumerate(self.ahead.odds))
        return self.calls * _MANAGED_S + self.num_rows * row_s + late_s


def _fetched(
    manifest: Manifest, cached: Cached, profile: Profile, workload: Workload | None, counts: Counts | None
) -> dict[int, _Fetch]:
    """The fetches of a step for each unit, by index. There is no prefetch for the first unit."""
    found: dict[int, _Fetch] = {}
    for index, of_unit in stacks_of(manifest, profile).items():
        num_rows = of_unit[0].shape[0]
        num_picked = profile.picked[index].share * num_rows
        missed = _missed(num_rows, num_picked, cached.num_slots, workload, counts)
        prefetch = _NOTHING
        if found and cached.ahead:
            different = _hits(num_rows, num_picked, cached.num_slots, workload).num_different
            recall = _curve(num_rows, num_picked, workload).recall
            prefetch = _guessed(missed, different, cached.num_slots, num_rows, cached.ahead, recall, counts)
        row_nbytes = sum(cached.sizes[t.alias] for t in of_unit if t.alias in cached.sizes) / num_rows
        calls = ceil(min(num_picked, num_rows) / max(1, cached.num_slots))
        found[index] = _Fetch(row_nbytes, missed - prefetch.used, prefetch, calls)
    return found


def _guessed(
    missed: float,
    different: float,
    num_slots: int,
    num_rows: int,
    most: int,
    recall: float,
    counts: Counts | None,
) -> _Prefetch:
    """The prefetch for a call that names `different` rows, `missed` of them in no slot.

    Wrong guesses are in slots as often as any rows. The number of guesses that are in no slot is random (Poisson), and
    `most` of them at most are fetched. Slots of rows that the last call used are not overwritten.
    """
    right, most = recall * missed, min(most, max(0, num_slots - ceil(different)))
    guessed = right + (1 - recall) * different * (1 - num_slots / num_rows)
    fewer = [exp(-guessed) * guessed**num / factorial(num) for num in range(most)]
    ahead = _Prefetch((*fewer, 1 - sum(fewer)), 0.0)
    share = right / guessed if guessed else 0.0
    if counts is not None:
        share = (counts.used + _WORTH * share) / (counts.ahead + _WORTH)
    return ahead._replace(used=min(missed, ahead.fetched * share)) if share >= LEAST_USED else _NOTHING


def _best_ahead(
    manifest: Manifest, cached: Cached, profile: Profile, workload: Workload | None, counts: Counts | None
) -> int:
    """The number of rows to prefetch with which a step is shortest; 0 for steps of several tokens."""
    if workload is not None and workload.tokens > 1:
        return 0
    numbers = range(min(MAX_PREFETCHED_ROWS, cached.num_slots) + 1)
    return min(
        numbers,
        key=lambda num: device_s(profile_with_cache(manifest, cached._replace(ahead=num), profile, workload, counts)),
    )


def _missed(
    num_rows: int, num_picked: float, num_slots: int, workload: Workload | None, counts: Counts | None = None
) -> float:
    """Rows of a stack that a step has to fetch: of the rows that it picks, those that differ and are in no slot."""
    hits = _hits(num_rows, num_picked, num_slots, workload)
    bend = 1.0 if counts is None else _bend(counts, num_rows, num_picked / _num_tokens(workload))
    missed: float = hits.num_different * (1 - hits.share) ** bend
    return missed


class _Hits(NamedTuple):
    """Different rows of a stack that a step picks, and the share of them that is in slots."""

    num_different: float
    share: float


def _hits(num_rows: int, num_picked: float, num_slots: int, workload: Workload | None) -> _Hits:
    """The rows of a step, by a measured curve.

    Sequences of a batch use different experts. So the more there are, the closer is the hit rate to the share of rows
    that have slots.
    """
    num_tokens, batch = _num_tokens(workload), workload.batch if workload else 1
    different = num_rows * (1 - (1 - 1 / num_rows) ** num_picked) if num_tokens > 1 else num_picked
    share = num_slots / num_rows
    alone = _curve(num_rows, num_picked, workload).at(share)
    return _Hits(different, share + (alone - share) / batch**0.5)


def _curve(num_rows: int, num_picked: float, workload: Workload | None) -> HitCurve:
    """The measured curve for a stack of which a step picks so many rows."""
    return curve_of(num_rows, num_picked / _num_tokens(workload))


def _curve_names(manifest: Manifest, profile: Profile, workload: Workload | None) -> str:
    """The models whose curves are used for the stacks of this one; usually one."""
    shapes = {(of_unit[0].shape[0], profile.picked[u].share) for u, of_unit in stacks_of(manifest, profile).items()}
    return ", ".join(sorted({_curve(rows, share * rows, workload).name for rows, share in shapes}))


def _bend(counts: Counts, num_rows: int, per_token: float) -> float:
    """The exponent of the miss rate with which the curve agrees with the counts; nearly 1 if few rows were counted."""
    hits = _hits(num_rows, per_token * _num_tokens(counts.workload), counts.num_slots, counts.workload)
    if not 0 < hits.share < 1:
        return 1.0
    missed = (counts.fetched + _WORTH * (1 - hits.share)) / (counts.num_rows + _WORTH)
    return log(missed) / log(1 - hits.share)


def _num_tokens(workload: Workload | None) -> int:
    return workload.batch * workload.tokens if workload else 1
