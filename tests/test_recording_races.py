"""Races of recordings: every fence that is taken out of one is seen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import weightstream.runtime.fixed as fixed_module
import weightstream.runtime.recording as recording_module
from graph_rig import ODD, PLANS, GraphRig, take_turns
from rig import mutated
from weightstream.errors import InvariantError
from weightstream.runtime.recording import Recording

# Each takes one fence out of the recording's source.
MUTATIONS = {
    "the copies of a graph do not wait for its launch": [("backend.wait(Side.COPY, fork)", "pass")],
    "compute does not wait for a fill inside": [("self._backend.wait(Side.COMPUTE, self._inside[unit])", "pass")],
    "compute does not wait for a fill outside": [
        (
            "if self.deferred:\n                    self._backend.wait(Side.COMPUTE",
            "if False:\n                    self._backend.wait(Side.COMPUTE",
        )
    ],
    "a fill that the graph needs is not made": [("self._engine.fill(unit, planned=False)", "pass")],
    "a graph does not tell what it needs": [("self.entry.add(unit)\n                if", "if")],
    "a fill on its way is not waited for by the launch": [
        (
            "self._engine.settle(self.entry)",
            "pass",
        )
    ],
    "a fill inside does not wait for the last read": [("self._backend.wait(Side.COPY, self._reads[last])", "pass")],
    "a fill inside does not wait for a fill outside": [
        ("self._backend.wait(Side.COPY, self._engine.fences[other].filled)", "pass")
    ],
    "a read inside is not recorded": [("self._backend.record(Side.COMPUTE, self._reads[unit])", "pass")],
    "a fill inside is not recorded": [("self._backend.record(Side.COPY, self._inside[unit])", "pass")],
    "a read is not recorded for the fills behind": [
        ("self._backend.record(Side.COMPUTE, self._external[unit])", "pass")
    ],
    "the last of two reads is not recorded for the fills behind": [("self._external.pop(unit, None)", "pass")],
    "reads are not kept in order": [("self._reads.pop(unit, None)", "pass")],
    "the end is not recorded": [("self._backend.record(Side.COMPUTE, end)", "pass")],
    "the end is not remembered": [
        ("engine.fences[unit].last_read, engine.fences[unit].reads_pending = end, True", "pass")
    ],
    "the copies are not joined": [("self._backend.wait(Side.COMPUTE, join)", "pass")],
    "what a graph overwrites is not forgotten": [("engine.forget(overwritten - self.held)", "pass")],
    "what a graph overwrites outside is not forgotten": [("self._outside.discard(other)", "pass")],
    "what a graph overwrites inside is not forgotten": [("self._inside.pop(other, None)", "pass")],
    "a second fill inside is not waited for": [("self._ordered.discard(other)", "pass")],
}


def use_mutated(monkeypatch: pytest.MonkeyPatch, edits: list[tuple[str, str]]) -> None:
    """Make streamers use a recording of its own source with these edits."""
    monkeypatch.setattr(fixed_module, "Recording", mutated(monkeypatch, recording_module, edits).Recording)


def is_seen(name: str, scenario: Callable[[GraphRig], int]) -> bool:
    """Whether something is wrong in a scenario that has nothing wrong."""
    with GraphRig(PLANS[name]) as rig:
        try:
            num_kernels = scenario(rig)
            rig.clock.synchronize()
        except (AssertionError, InvariantError):
            return True
        assert rig.num_kernels == num_kernels
        return bool(rig.clock.races or rig.mismatches)


SCENARIOS: list[tuple[str, Callable[[GraphRig], int]]] = [
    *ODD.items(),
    *(
        (name, partial(take_turns, seed=seed))
        for seed in range(3)
        for name in ("5 units in 2 slots", "uneven extents", "a unit that no position names")
    ),
]


def test_the_unedited_source_passes_where_mutations_must_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    use_mutated(monkeypatch, [])
    assert fixed_module.Recording is not Recording
    assert not any(is_seen(name, scenario) for name, scenario in SCENARIOS)


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_removed_fence_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_mutated(monkeypatch, MUTATIONS[name])
    assert any(is_seen(name, scenario) for name, scenario in SCENARIOS)
