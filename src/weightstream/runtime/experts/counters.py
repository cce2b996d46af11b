"""Hits and misses of the caches of experts, by unit, since the model was offloaded.

The counts are on the device, and to read them the host waits for it. So they are read for `stats()` and, once in many
steps, to correct predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import sub
from typing import NamedTuple
from weakref import WeakKeyDictionary

from weightstream.plan.expert_cache import Counts
from weightstream.runtime.experts.slot_cache import Found, SlotCache
from weightstream.runtime.trace import ExpertTraffic, total

_WARM = 8  # a cache is warm after this number of rows per slot: earlier misses are those of empty slots


class Cache(NamedTuple):
    """The cache of a unit, the number of its slots, and the bytes of a row in one slot."""

    unit: str
    slots: SlotCache
    num_slots: int
    row_nbytes: float


class Tally:
    """Sums the counts of all plans so far; `caches()` are the caches of the plan in force."""

    def __init__(self, caches: Callable[[], Iterable[Cache]] = tuple) -> None:
        self._caches = caches
        self._before: Mapping[str, ExpertTraffic] = {}  # of earlier plans
        self._warm: WeakKeyDictionary[SlotCache, Found] = WeakKeyDictionary()  # counts when first seen warm

    def read(self) -> dict[str, ExpertTraffic]:
        """Hits, misses and fetched bytes so far, by unit."""
        found = dict(self._before)
        for cache in self._caches():
            hits, misses, ahead, used = cache.slots.counts()
            now = ExpertTraffic(hits, misses, round((misses + ahead) * cache.row_nbytes), ahead, used)
            found[cache.unit] = total([now, found.get(cache.unit, ExpertTraffic())])
        return found

    def keep(self) -> None:
        """Keep the counts of the plan in force, whose caches end with it."""
        self._before = self.read()

    def counts(self) -> Counts | None:
        """The summed counts of the caches in force, each from when it was first seen warm; None if all are 0."""
        num_slots, since_warm = 0, [Found()]
        for cache in self._caches():
            now = cache.slots.counts()
            if cache.slots not in self._warm and now.hits + now.misses >= _WARM * cache.num_slots:
                self._warm[cache.slots] = now
            since_warm.append(Found(*map(sub, now, self._warm.get(cache.slots, now))))
            num_slots = cache.num_slots  # a plan has one number of slots for all cached stacks
        hits, misses, ahead, used = map(sum, zip(*since_warm, strict=True))
        # a row that was prefetched would have been a miss
        return Counts(num_slots, hits - used, misses + used, ahead=ahead, used=used) if hits + misses else None


def since(begin: Mapping[str, ExpertTraffic], end: Mapping[str, ExpertTraffic]) -> dict[str, ExpertTraffic]:
    """The difference of two readings, for units whose counts changed; too small for counts that restarted."""
    found = {unit: ExpertTraffic(*map(_more, now, begin.get(unit, ExpertTraffic()))) for unit, now in end.items()}
    return {unit: counts for unit, counts in found.items() if any(counts)}


def _more(now: int, then: int) -> int:
    return max(0, now - then)
