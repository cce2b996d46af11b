"""Which weights to code, and in which code: the sets that are worth planning with, and what can be plain again.

`sizes` are the bytes of each alias group in each code that may be used, by its bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter

from weightstream.config import CODES
from weightstream.plan.manifest import Manifest, Profile
from weightstream.plan.plan import Plan

Sizes = Mapping[str, Mapping[int, int]]
Codes = dict[str, tuple[int, int]]  # of each alias group that is coded: bits, and bytes


def codings(manifest: Manifest, sizes: Sizes, profile: Profile) -> list[Codes]:
    """The sets that are worth a try: all in the smallest code of each, or in the one that saves most in the time that
    it takes, without large units that would set the size of the buffer alone; all of them; and none."""
    plain = manifest.aliases

    def saved_in_time(alias: str, code: tuple[int, int]) -> float:
        bits, nbytes = code
        return (plain[alias] - nbytes) * profile.decode_bytes_per_s(bits)

    smallest = {alias: min(codes.items(), key=itemgetter(1)) for alias, codes in sizes.items()}
    cheapest = {alias: max(codes.items(), key=partial(saved_in_time, alias)) for alias, codes in sizes.items()}
    tried = [*(_worth_the_buffer(manifest, codes) for codes in (smallest, cheapest)), smallest, {}]
    return [codes for index, codes in enumerate(tried) if codes not in tried[:index]]


def _worth_the_buffer(manifest: Manifest, codes: Codes) -> Codes:
    """Those of the units up to the size with which most is saved, less a buffer for the largest of them."""
    sizes = manifest.aliases
    units = [[alias for alias in unit.aliases() if alias in codes] for unit in manifest.units]
    units.sort(key=lambda unit: sum(map(sizes.__getitem__, unit)))
    saved, most, num, taken = 0, 0, 0, set[str]()
    for index, unit in enumerate(units, 1):
        saved += sum(sizes[alias] - codes[alias][1] for alias in unit if alias not in taken)
        taken.update(unit)
        if (gain := saved - sum(map(sizes.__getitem__, unit))) > most:
            most, num = gain, index
    return {alias: codes[alias] for unit in units[:num] for alias in unit}


def decoding_less(plan: Plan, sizes: Sizes, profile: Profile) -> Plan:
    """A plan in which nothing streams, with as much as there is room for in a form that takes less time to decode.

    Units of which a step decodes more come first. The faster code, where it saves more time per byte than no code; then
    none. Whole units one after the other: one that is plain has nothing to wait for.
    """
    codes, spans = dict(plan.manifest.codes), plan.manifest.spans
    spare = (plan.budget or 0) - plan.device_nbytes

    def more_nbytes(alias: str, bits: int) -> int:
        """What these bits take more than those that it has; 0 bits: plain."""
        return (sizes[alias][bits] if bits else spans[alias]) - codes[alias][1]

    def saved_per_byte(alias: str, bits: int) -> float:
        """Seconds of decoding that go away, by each byte that it takes more."""
        more = more_nbytes(alias, bits)
        rates = [profile.decode_bytes_per_s(b) for b in (codes[alias][0], bits) if b]
        return (1 / rates[0] - sum(1 / rate for rate in rates[1:])) / more if more > 0 else -1.0

    def read(alias: str) -> float:
        """The share of it that a step decodes."""
        return max(profile.read_share(unit) for unit in plan.manifest.users[alias])

    def best(alias: str) -> int:
        """The bits with which each byte more saves most."""
        return max((0, *sizes[alias]), key=partial(saved_per_byte, alias))

    for share, bits in product(sorted(set(map(read, codes)), reverse=True), (*CODES.values(), 0)):
        for alias in [alias for alias in codes if read(alias) == share]:
            if bits and bits != best(alias):
                continue
            if (more := more_nbytes(alias, bits)) <= spare:
                spare -= more
                codes[alias] = bits, codes[alias][1] + more
    manifest = plan.manifest.coded({alias: code for alias, code in codes.items() if code[0]})
    return replace(Plan.build(manifest, frozenset(manifest.aliases), 0), budget=plan.budget)
