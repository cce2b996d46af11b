"""The choice of weights to compress: sets that are worth a plan, and weights that need no compression after all.

`sizes` are the compressed bytes of each alias group that may be compressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weightstream.plan.manifest import Manifest, Profile
from weightstream.plan.plan import Plan

Sizes = Mapping[str, int]


def codings(manifest: Manifest, sizes: Sizes) -> list[Sizes]:
    """The sets that are worth a try: all without the few units that make the decode buffer large; all; and none."""
    tried = [_worth_the_buffer(manifest, sizes), sizes, {}]
    return [codes for index, codes in enumerate(tried) if codes not in tried[:index]]


def _worth_the_buffer(manifest: Manifest, codes: Sizes) -> Sizes:
    """The groups of all units up to the size at which the bytes saved, minus the buffer for that size, are the most."""
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
    """From a plan in which all weights are resident: a plan with as many of them uncompressed as fit in its budget.

    Units of which a step decompresses a larger share come first, one whole unit after another: an uncompressed unit
    has nothing to wait for.
    """
    codes, spans = dict(plan.manifest.codes), plan.manifest.spans
    spare = (plan.budget or 0) - plan.device_nbytes

    def read_share(alias: str) -> float:
        """The share of an alias group that a step decompresses."""
        return max(profile.read_share(unit) for unit in plan.manifest.users[alias])

    for alias in sorted(codes, key=read_share, reverse=True):
        if (more := spans[alias] - codes[alias]) <= spare:
            spare -= more
            del codes[alias]
    manifest = plan.manifest.coded(codes)
    return replace(Plan.build(manifest, frozenset(manifest.aliases), 0), budget=plan.budget)
