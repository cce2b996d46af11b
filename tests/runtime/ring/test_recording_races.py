"""Races of recordings: every fence that is removed from one, or from its launch's report to the engine, is detected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

import graph_rig
import weightstream.runtime.ring.engine as engine_module
import weightstream.runtime.ring.graphs as graphs_module
import weightstream.runtime.ring.recording as recording_module
from graph_rig import ODD, PLANS, GraphRig, serve, serve_again, take_turns
from rig import edited, mutated
from weightstream.errors import InvariantError
from weightstream.runtime.ring.recording import Recording

# Each takes one fence out of the recording's source.
MUTATIONS = {
    "the copies of a graph do not wait for its launch": ("backend.wait(Side.COPY, fork)", "pass"),
    "compute does not wait for a fill": ("self._backend.wait(Side.COMPUTE, filled)", "pass"),
    "compute does not wait for a fill outside": ("fences[unit].filled if self._deferred else None", "fences and None"),
    "a graph does not tell what it needs": ("            self.entry.add(unit)", "            pass"),
    "a fill inside does not wait for the last read": ("self._backend.wait(Side.COPY, self._reads[last])", "pass"),
    "a read inside is not recorded": ("self._backend.record(Side.COMPUTE, self._reads[unit])", "pass"),
    "a fill inside is not recorded": ("self._backend.record(Side.COPY, self._held[unit])", "pass"),
    "a read is not recorded for the fills behind": (
        "self._backend.record(Side.COMPUTE, self._external[unit])",
        "pass",
    ),
    "the last of two reads is not recorded for the fills behind": ("self._external.pop(unit, None)", "pass"),
    "reads are not kept in order": ("self._reads.pop(unit, None)", "pass"),
    "the copies are not joined": ("self._backend.wait(Side.COMPUTE, join)", "pass"),
    "what a graph overwrites is not forgotten in it": ("self._held.pop(other, None)", "pass"),
    "a graph that stands alone does not fill for the next": ("if not self._deferred:", "if False:"),
    "a piece does not know what is in use": ("before._in_use.copy()", "Counter()"),
    "a step that begins midway takes its start for granted": (" if unit in assumed}", "}"),
}
# The same for the engine's source, in the report of a launched graph.
ENGINE_MUTATIONS = {
    "a fill that the graph needs is not made": (
        "self.fill(unit, planned=False)\n        self.settle",
        "pass\n        self.settle",
    ),
    "a fill on its way is not waited for by the launch": ("self.settle(reads)", "pass"),
    "the end is not recorded": ("self._backend.record(Side.COMPUTE, end)", "pass"),
    "the end is not remembered": ("self.fences[unit].last_read = end", "pass"),
    "what a graph overwrites is not forgotten": ("self.forget(outcome.gone)", "pass"),
}


def use_mutated(monkeypatch: pytest.MonkeyPatch, *edits: tuple[str, str]) -> None:
    """Make rigs use a recording of its own source with these edits."""
    monkeypatch.setattr(graphs_module, "Recording", mutated(monkeypatch, recording_module, [*edits]).Recording)


def is_seen(name: str, scenario: Callable[[GraphRig], int]) -> bool:
    """Whether an error is found in a scenario that has none by itself."""
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
    ("5 units in 2 slots", serve),
    ("5 units in 2 slots", serve_again),
    *(
        (name, partial(take_turns, seed=seed))
        for seed in range(3)
        for name in ("5 units in 2 slots", "uneven extents", "a unit that no position names")
    ),
]


def test_the_unedited_source_passes_where_mutations_must_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    use_mutated(monkeypatch)
    monkeypatch.setattr(graph_rig, "Engine", mutated(monkeypatch, engine_module, []).Engine)
    assert graphs_module.Recording is not Recording
    assert not any(is_seen(name, scenario) for name, scenario in SCENARIOS)


def test_every_mutation_matches_the_source() -> None:
    for edit in MUTATIONS.values():
        edited(recording_module, [edit])
    for edit in ENGINE_MUTATIONS.values():
        edited(engine_module, [edit])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_removed_fence_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_mutated(monkeypatch, MUTATIONS[name])
    assert any(is_seen(name, scenario) for name, scenario in SCENARIOS)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ENGINE_MUTATIONS)
def test_every_removed_fence_around_a_launch_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_rig, "Engine", mutated(monkeypatch, engine_module, [ENGINE_MUTATIONS[name]]).Engine)
    assert any(is_seen(name, scenario) for name, scenario in SCENARIOS)
