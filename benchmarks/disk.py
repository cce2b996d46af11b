"""A model bigger than the RAM that it may use: step time, and its disk reads against sequential direct reads.

    python benchmarks/disk.py [--only disk,budget,cgroup,half,accelerate_disk] [--folder FOLDER] [--out FILE]

The floor is measured before, between and after the cases, on the same files: requests of 8 MiB past the page cache,
one or two in flight, whichever is faster. Each case generates eight tokens, greedily.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import host
from alone import HERE, Process, Trials, main

SHARE = 1.5  # of the model's bytes to the RAM that it may use


def disk(trials: Trials) -> None:
    """No weight is kept in RAM."""
    _generation(trials, "weightstream, all on disk", host_budget=0)


def budget(trials: Trials) -> None:
    _generation(trials, f"weightstream, {SHARE} x the host budget", host_budget=int(trials.nbytes / SHARE))


def cgroup(trials: Trials, share: float = SHARE) -> None:
    """No budget is passed: the limit is the kernel's, for the whole process with its libraries."""
    libraries_nbytes = 2**30 if trials.smoke else 0
    with _limited(int(trials.nbytes / share) + libraries_nbytes) as prefix:
        _generation(trials, f"weightstream, {share} x a cgroup's memory", prefix, Path(prefix[-1]))


def half(trials: Trials) -> None:
    cgroup(trials, 2.0)


def accelerate_disk(trials: Trials) -> None:
    """One step, which is enough to compare."""
    system, share = "accelerate, weights on disk", host.evict(trials.files)
    case = trials.case("accelerate_disk", steps=0)
    with trials.guarded(system), Process(case, timeout_s=75) as process:
        found = process.result()
        ms = dict.fromkeys(("p20", "p50", "p80"), 1e3 * found["first_s"])
        gbps = trials.nbytes / found["first_s"] / 1e9
        fields = {"cached_share": share, "ms": ms, "steps": 1, "read_gbps": round(gbps, 3)}
        trials.add(system, **found, **fields, x_direct=round(gbps / _floor(trials), 4))


def _generation(
    trials: Trials, system: str, prefix: Sequence[str] = (), group: Path | None = None, **settings: Any
) -> None:
    before, share = _floor(trials), host.evict(trials.files)
    case = trials.case("mapped", generates=True, settings=settings)
    with trials.guarded(system):
        with Process(case, timeout_s=150, prefix=prefix) as process:
            found = process.result()
        if group is not None:
            found |= _group_memory(group)
        floors = [before, trials.floor_gbps()]
        nbytes, floor = found["step_disk_nbytes"], statistics.mean(floors)
        gbps, p50_gbps = (nbytes / ms / 1e6 for ms in (statistics.mean(found["steps_ms"]), found["ms"]["p50"]))
        trials.add(
            system,
            settings=case.settings,
            cached_share=share,
            read_gbps=round(gbps, 3),
            floors_gbps=floors,
            x_direct=round(gbps / floor, 4),
            x_direct_p50=round(p50_gbps / floor, 4),
            x_read=round(found["read_nbytes"] / nbytes, 4) if nbytes else None,
            x_predicted=round(found["predicted_ms"] / found["ms"]["p50"], 4),
            **found,
        )


def _floor(trials: Trials) -> float:
    """The last measurement, or the first one now."""
    return trials.reads.medians[-1] if trials.reads.medians else trials.floor_gbps()


@contextmanager
def _limited(nbytes: int) -> Iterator[list[str]]:
    """The limit of the tests, where a missing cgroup is an error instead of a skip."""
    sys.path.append(str(HERE.parent / "tests" / "support"))
    import pytest

    from cgroups import limited

    try:
        with limited(nbytes) as prefix:
            yield prefix
    except pytest.skip.Exception as reason:
        raise RuntimeError(f"no cgroup: {reason}") from reason


def _group_memory(folder: Path) -> dict[str, float]:
    """The peak memory of the group, in either version of cgroups, if the kernel reports it."""
    for path in (folder / "memory.peak", folder / "memory.max_usage_in_bytes"):
        if path.exists():
            return {"cgroup_peak_gib": round(int(path.read_text()) / host.GIB, 3)}
    return {}


GROUPS = {"disk": disk, "budget": budget, "cgroup": cgroup, "half": half, "accelerate_disk": accelerate_disk}

if __name__ == "__main__":
    main("disk", __doc__, GROUPS)
