"""Which weights to compress: the sets that are worth planning with, and what can be plain again.

`sizes` are the compressed bytes of each alias group that may be compressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightstream.plan.manifest import Manifest, Profile
from weightstream.plan.plan import Plan

Sizes = Mapping[str, int]


def codings(manifest: Manifest, sizes: Sizes) -> list[Sizes]:
    """The sets that are worth a try: all, without large units that would set the size of the buffer alone; all of
    them; and none."""
    tried = [_worth_the_buffer(manifest, sizes), sizes, {}]
    return [codes for index, codes in enumerate(tried) if codes not in tried[:index]]


def _worth_the_buffer(manifest: Manifest, codes: Sizes) -> Sizes:
    """Those of the units up to the size with which most is saved, less a buffer for the largest of them."""
    sizes = manifest.aliases
    units = [[alias for alias in unit.aliases() if alias in codes] for unit in manifest.units]
    units.sort(key=lambda unit: sum(map(sizes.__getitem__, unit)))
    saved, most, num, taken = 0, 0, 0, set[str]()
    for index, unit in enumerate(units, 1):
        saved += sum(sizes[alias] - codes[alias] for alias in unit if alias not in taken)
        taken.update(unit)
        if (gain := saved - sum(map(sizes.__getitem__, unit))) > most:
            most, num = gain, index
    return {alias: codes[alias] for unit in units[:num] for alias in unit}


def decoding_less(plan: Plan, profile: Profile) -> Plan:
    """A plan in which nothing streams, with as much in plain form as there is room for.

    Units of which a step decodes more come first. Whole units one after the other: one that is plain has nothing to
    wait for.
    """
    codes, spans = dict(plan.manifest.codes), plan.manifest.spans
    spare = (plan.budget or 0) - plan.device_nbytes

    def read(alias: str) -> float:
        """The share of it that a step decodes."""
        return max(profile.read_share(unit) for unit in plan.manifest.users[alias])

    for alias in sorted(codes, key=read, reverse=True):
        if (more := spans[alias] - codes[alias]) <= spare:
            spare -= more
            del codes[alias]
    manifest = plan.manifest.coded(codes)
    return replace(Plan.build(manifest, frozenset(manifest.aliases), 0), budget=plan.budget)
