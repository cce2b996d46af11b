"""Caches of experts: which stacks are worth slots of the device, how many, and how often a row is found in one.

A step reads some rows of each stack. With slots for a share of them it finds more than that share there, as tokens in a
row use the same experts: how much more is a law of what others measured, bent through what was counted here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import ceil, exp, factorial, log, prod
from typing import NamedTuple

from weightstream.plan import cost
from weightstream.plan.manifest import Manifest, Profile, TensorSpec, Workload
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import aligned

_MANAGED_S = 7.5e-6  # to find the slots of a unit's rows once, with nothing to fetch [H100: 7.2 to 7.7 us]
_LAUNCHES = 2  # of kernels beside those of a unit, by Triton, as those that decode are
_FETCH_RATE = 0.92  # of the link, that the kernel which fetches rows reaches [H200: 51 of 55 GB/s]
_HEADROOM = 1.02  # of a coded row: one of a stack may have more escapes than the mean
_SLOT_NBYTES = 1024  # that alignment takes of a slot
MAX_PREFETCHED_ROWS = 8  # rows that are fetched before a unit asks for them
# Of the rows that a token uses, those that the router of a layer names for the states of the layer before: 0.66 to 0.88
# (github.com/Helldez/BigMoeOnEdge/issues/9).
_RECALL = 0.75
LEAST_USED = 0.25  # of them: below, the device leaves guesses out
# Share of the rows in slots -> share of a token's rows found there, least recently used ones going first. Where a token
# takes few of many (Qwen3-30B-A3B; github.com/kekzl/imp/issues/1359), and where it takes more of few (Mixtral;
# arXiv 2312.17238).
_OF_MANY = ((0.0, 0.0), (0.094, 0.46), (0.25, 0.77), (0.5, 0.92), (1.0, 1.0))
_OF_FEW = ((0.0, 0.0), (0.25, 0.40), (0.5, 0.67), (0.75, 0.87), (1.0, 1.0))
_MANY = 8
_WORTH = 100  # counted rows: the law weighs as much
NEARLY_ALL = 2  # ids for each row: if they are drawn evenly they name 86 % of the rows, and whole stacks are read
_TILE = 4096  # weights, of which a row is a multiple where rows are read


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
        buffer_nbytes: bytes of the buffer for the whole stacks of a unit, uncompressed.
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
    """Of each unit that picks rows of its stacks in a step, these."""
    found = {}
    for index, unit in enumerate(manifest.units):
        stacks = [t for t in unit.tensors if _is_stack(t) and len(manifest.users[t.alias]) == 1]
        picks = unit.picks and not unit.enclosing  # units inside of it would use the buffer
        if picks and stacks and profile.picked and 0 < profile.picked[index][0] <= NEARLY_ALL:
            found[index] = stacks
    return found


def _is_stack(tensor: TensorSpec) -> bool:
    return len(tensor.shape) == 3 and prod(tensor.shape[1:]) % _TILE == 0


def caches(
    manifest: Manifest,
    sizes: Mapping[str, int],
    profile: Profile,
    budget: int,
    workload: Workload | None,
    counts: Counts | None = None,
) -> Iterator[Cached]:
    """Caches for all stacks of a plain manifest, plain and, where each has a size for that, compressed: as large as
    leaves room for all other weights, or else with slots for what a token picks."""
    stacks = stacks_of(manifest, profile)
    if not stacks:
        return
    every = [t for of_unit in stacks.values() for t in of_unit]
    rest = manifest.nbytes - sum(t.nbytes for t in every)
    buffer = max(sum(aligned(t.nbytes) for t in of_unit) for of_unit in stacks.values())
    picked = max(round(profile.picked[u][0] * of_unit[0].shape[0]) for u, of_unit in stacks.items())
    least = -(-picked // _num_tokens(workload))
    most = min(t.shape[0] for t in every)
    for coded in ({}, {t.alias: sizes[t.alias] for t in every if t.alias in sizes}):
        held = {t.alias: t.nbytes for t in every} | coded
        if 0 < len(coded) < len(held):
            continue
        per_slot = _per_slot(every, held, coded)
        num = max(least, (budget - buffer - rest) // per_slot)
        if num < most and num * per_slot + buffer < budget:  # where all have room they stay without a cache
            cached = Cached(held, coded, num, num * per_slot, buffer)
            # Where others stream, the link is not free meanwhile, nor is what routes there when it is asked.
            fits = num * per_slot + buffer + rest <= budget
            yield cached._replace(ahead=_best_ahead(manifest, cached, profile, workload, counts) if fits else 0)


def of_plan(plan: Plan) -> Cached | None:
    """The cache of a plan, if it has one."""
    manifest = plan.manifest
    sizes = {alias: manifest.aliases[alias] for alias in plan.cached}
    coded = {alias: nbytes for alias, nbytes in manifest.codes.items() if alias in sizes}
    return Cached(sizes, coded, plan.num_slots, plan.slots_nbytes, plan.buffer_nbytes, plan.ahead) if sizes else None


def _per_slot(stacks: Iterable[TensorSpec], sizes: Mapping[str, int], coded: Collection[str]) -> int:
    """Bytes of one slot for each of these."""
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
    """The profile of a plain manifest whose stacks are cached: with what units take to find, fetch and decode rows."""
    if cached is None:
        return profile
    coded = manifest.coded(cached.coded)
    decoding = profile.decoding(coded)
    unit_s, host_s = list(decoding.unit_s), list(decoding.host_s)
    captured_s = list(decoding.captured_s or [0.0] * len(unit_s))
    fetches = _fetched(manifest, cached, profile, workload, counts)
    beside_s = sum(unit_s) / max(1, len(fetches))
    for index, waited in _fetched(manifest, cached._replace(ahead=0), profile, workload, counts).items():
        unit_s[index] += waited.seconds(profile, 0.0)
        captured_s[index] += fetches[index].seconds(profile, beside_s) - waited.seconds(profile, 0.0)
        if host_s:
            shown = len(coded.units[index].tensors)
            opening_s = (
                profile.times_s(index, coded.units[index], shown=shown, streams=False).host_s - profile.host_s[index]
            )
            host_s[index] += opening_s + _LAUNCHES * profile.decoding_launch_s
    captured = tuple(captured_s) if cached.ahead else decoding.captured_s  # only there are rows fetched ahead
    return replace(decoding, unit_s=tuple(unit_s), host_s=tuple(host_s), captured_s=captured)


def device_s(profile: Profile) -> float:
    """Seconds of the device for a step in a CUDA graph, of which each unit is there once."""
    return sum(profile.unit_s) + sum(profile.captured_s)


def with_predictions(
    plan: Plan,
    manifest: Manifest,
    cached: Cached,
    profile: Profile,
    workload: Workload | None,
    counts: Counts | None = None,
) -> Plan:
    """What a plan of the other weights, as one of all, tells of its slots: the share of the rows that a step finds in
    them, and bytes that it fetches; and its times, as these share the link with what streams."""
    fetches = _fetched(manifest, cached, profile, workload, counts).values()
    empty = cached._replace(num_slots=0, ahead=0)
    waited_nbytes = sum(fetch.nbytes for fetch in fetches)
    read_nbytes = sum(fetch.nbytes for fetch in _fetched(manifest, empty, profile, workload, counts).values())
    fetched_nbytes = round(waited_nbytes + sum(fetch.ahead_nbytes for fetch in fetches))
    link_s = cost.copy_s(plan, profile) + fetched_nbytes / (_FETCH_RATE * profile.link_bytes_per_s)
    return replace(
        plan,
        manifest=manifest,
        step_s=max(plan.step_s, link_s),
        graph_s=max(plan.graph_s, link_s),
        decode_s=sum(profile.decode_s(u, manifest.units[u]) for u in manifest.order),
        cached=frozenset(cached.sizes),
        num_slots=cached.num_slots,
        slots_nbytes=cached.slots_nbytes,
        ahead=cached.ahead,
        found_share=1 - waited_nbytes / read_nbytes if read_nbytes else 0.0,
        fetched_nbytes=fetched_nbytes,
    )


class _Fetch(NamedTuple):
    """Bytes that a step fetches for a unit when it is asked for rows, and those ahead; and the calls of its cache, each
    for as many rows as there are slots."""

    nbytes: float
    ahead_nbytes: float
    calls: int

    def seconds(self, profile: Profile, beside_s: float) -> float:
        """What it takes, where what is fetched ahead is hidden for so long."""
        rate = _FETCH_RATE * profile.link_bytes_per_s
        return self.calls * _MANAGED_S + self.nbytes / rate + max(0.0, self.ahead_nbytes / rate - beside_s)


def _fetched(
    manifest: Manifest, cached: Cached, profile: Profile, workload: Workload | None, counts: Counts | None
) -> dict[int, _Fetch]:
    """What a step fetches for each unit. Nobody guesses for the first."""
    found: dict[int, _Fetch] = {}
    for index, of_unit in stacks_of(manifest, profile).items():
        num_rows = of_unit[0].shape[0]
        num_picked = profile.picked[index][0] * num_rows
        missed = _missed(num_rows, num_picked, cached.num_slots, workload, counts)
        prefetch = _Prefetch(0.0, 0.0)
        if found and cached.ahead:
            different = _law(num_rows, num_picked, cached.num_slots, workload).num_different
            prefetch = _guessed(missed, different, cached.num_slots, num_rows, cached.ahead, counts)
        row_nbytes = sum(cached.sizes[t.alias] for t in of_unit if t.alias in cached.sizes) / num_rows
        calls = ceil(min(num_picked, num_rows) / max(1, cached.num_slots))
        found[index] = _Fetch((missed - prefetch.used) * row_nbytes, prefetch.fetched * row_nbytes, calls)
    return found


class _Prefetch(NamedTuple):
    """Rows that are fetched ahead of a call, and those of them that the call uses."""

    fetched: float
    used: float


def _guessed(
    missed: float, different: float, num_slots: int, num_rows: int, most: int, counts: Counts | None
) -> _Prefetch:
    """Rows that are fetched ahead of a call that names `different` ones, of which `missed` are in no slot, and those of
    them that it uses. Of wrong guesses as many are in one as of all rows; how many are in none varies by chance. The
    slots of the last call are left alone."""
    right, most = _RECALL * missed, min(most, max(0, num_slots - ceil(different)))
    guessed = right + (1 - _RECALL) * different * (1 - num_slots / num_rows)
    ahead = most - sum((most - num) * exp(-guessed) * guessed**num / factorial(num) for num in range(most))
    share = right / guessed if guessed else 0.0
    if counts is not None:
        share = (counts.used + _WORTH * share) / (counts.ahead + _WORTH)
    return _Prefetch(ahead, min(missed, ahead * share)) if share >= LEAST_USED else _Prefetch(0.0, 0.0)


def _best_ahead(
    manifest: Manifest, cached: Cached, profile: Profile, workload: Workload | None, counts: Counts | None
) -> int:
    """How many rows to fetch ahead: what takes least time, if a step is of single tokens."""
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
    """Rows of a stack that a step has to fetch: fewer than it picks are different, and of these some are there."""
    law = _law(num_rows, num_picked, num_slots, workload)
    bend = 1.0 if counts is None else _bend(counts, num_rows, num_picked / _num_tokens(workload))
    missed: float = law.num_different * (1 - law.hit_share) ** bend
    return missed


class _Hits(NamedTuple):
    """Different rows of a stack that a step picks, and the share of them that is in slots."""

    num_different: float
    hit_share: float


def _law(num_rows: int, num_picked: float, num_slots: int, workload: Workload | None) -> _Hits:
    """Different rows of a stack that a step picks, and the share of them that is there.

    Sequences do not share what they use: the more there are, the nearer is what is found to the share of the slots.
    """
    num_tokens, batch = _num_tokens(workload), workload.batch if workload else 1
    different = num_rows * (1 - (1 - 1 / num_rows) ** num_picked) if num_tokens > 1 else num_picked
    share = num_slots / num_rows
    law = _OF_MANY if num_rows * num_tokens >= _MANY * num_picked else _OF_FEW
    return _Hits(different, share + (_at(law, share) - share) / batch**0.5)


def _bend(counts: Counts, num_rows: int, per_token: float) -> float:
    """The power of what the law misses that goes through what was counted; of few rows nearly 1, the law itself."""
    law = _law(num_rows, per_token * _num_tokens(counts.workload), counts.num_slots, counts.workload)
    if not 0 < law.hit_share < 1:
        return 1.0
    missed = (counts.fetched + _WORTH * (1 - law.hit_share)) / (counts.num_rows + _WORTH)
    return log(missed) / log(1 - law.hit_share)


def _num_tokens(workload: Workload | None) -> int:
    return workload.batch * workload.tokens if workload else 1


def _at(law: tuple[tuple[float, float], ...], x: float) -> float:
    """Between the points of a law in straight lines."""
    for (x0, y0), (x1, y1) in pairwise(law):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return 1.0
