"""The tally: how often caches of experts found what a step asked for, by unit, since the model was offloaded.

Counts are on the device. They are read where somebody asks, or where predictions are corrected, once in many steps:
each time the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import sub
from typing import NamedTuple
from weakref import WeakKeyDictionary

from weightstream.plan.expert_cache import Counts
from weightstream.runtime.experts.slot_cache import Found, Slots
from weightstream.runtime.trace import Experts, total

_WARM = 8  # times as many rows as there are slots: before, slots were empty


class Cache(NamedTuple):
    """The cache of a unit, its slots, and the bytes of a row in one."""

    unit: str
    slots: Slots
    num_slots: int
    row_nbytes: float


class Tally:
    """Reads the caches of one plan after the other; `caches()` are those of the one in force."""

    def __init__(self, caches: Callable[[], Iterable[Cache]] = tuple) -> None:
        self._caches = caches
        self._before: Mapping[str, Experts] = {}  # of plans that were in force
        self._warm: WeakKeyDictionary[Slots, Found] = WeakKeyDictionary()  # what they had counted by then

    def read(self) -> dict[str, Experts]:
        """What was found and fetched so far, by unit."""
        found = dict(self._before)
        for cache in self._caches():
            hits, misses, ahead, used = cache.slots.counts()
            now = Experts(hits, misses, round((misses + ahead) * cache.row_nbytes), ahead, used)
            found[cache.unit] = total([now, found.get(cache.unit, Experts())])
        return found

    def keep(self) -> None:
        """The plan in force ends, and its caches with it."""
        self._before = self.read()

    def counts(self) -> Counts | None:
        """Sums over the caches of the plan in force, of each since a look found it warm; None: of nothing."""
        num_slots, since_warm = 0, [Found()]
        for cache in self._caches():
            now = cache.slots.counts()
            if cache.slots not in self._warm and now.hits + now.misses >= _WARM * cache.num_slots:
                self._warm[cache.slots] = now
            since_warm.append(Found(*map(sub, now, self._warm.get(cache.slots, now))))
            num_slots = cache.num_slots
        hits, misses, ahead, used = map(sum, zip(*since_warm, strict=True))
        # What a guess brought would have been missed.
        return Counts(num_slots, hits - used, misses + used, ahead=ahead, used=used) if hits + misses else None


def since(begin: Mapping[str, Experts], end: Mapping[str, Experts]) -> dict[str, Experts]:
    """What came from one reading to the next, of units where something did; what began anew tells of a part."""
    found = {unit: Experts(*map(_more, now, begin.get(unit, Experts()))) for unit, now in end.items()}
    return {unit: counts for unit, counts in found.items() if any(counts)}


def _more(now: int, then: int) -> int:
    return max(0, now - then)
