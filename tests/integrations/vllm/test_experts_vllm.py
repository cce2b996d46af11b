"""Mixtures whose experts are one operator of vLLM: they are units, which stream, eager and compiled, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LAYER_NBYTES
from engines import asked, engine, group, scored, streamer

Folder = Callable[[str], Path]

KINDS = ("moe", "mixtral", "shared")
STACKS = ("w13_weight", "w2_weight")


@pytest.fixture(autouse=True)
def _no_kernel_takes_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too, kernels read whole stacks, as those of a CPU do. test_experts_by_ids.py has the others."""
    monkeypatch.setattr("weightstream.integrations.vllm.experts.PROVED", {})


@pytest.fixture(scope="module")
def plain(folder: Folder) -> Callable[..., list[list[Any]]]:
    """Output of the same engine without offloading, made once for each model and mode."""
    made: dict[Any, list[list[Any]]] = {}

    def found(name: str, compiled: bool) -> list[list[Any]]:
        if (name, compiled) not in made:
            with engine(folder(name), compiled=compiled) as llm:
                made[name, compiled] = scored(llm)
        return made[name, compiled]

    return found


def streamed_stacks(plan: Any) -> dict[str, set[str]]:
    """Names of the stacks of experts, by the unit in which they stream."""
    units = [unit for index, unit in enumerate(plan.manifest.units) if plan.streams(index)]
    found = {u.name: {t.name.rpartition(".")[2] for t in u.tensors if t.alias not in plan.placed} for u in units}
    return {name: stacks & {*STACKS} for name, stacks in found.items() if stacks & {*STACKS}}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", KINDS)
def test_experts_stream(
    folder: Folder,
    plain: Any,
    name: str,
    compiled: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = plain(name, compiled)
    logger = logging.getLogger("weightstream")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    with engine(folder(name), compiled=compiled, **asked(device_budget=3 * LAYER_NBYTES, codec="none")) as llm:
        messages = [text for text in caplog.messages if "reads all experts of 0." in text]
        assert len({*messages}) == 1
        assert all(".experts and 7 more: the kernel " in text for text in messages)
        assert all("Experts takes whole stacks; " in text for text in messages)
        for _ in range(2):
            assert scored(llm) == wanted
        found = streamer()
        stats, stacks = found.stats(), streamed_stacks(found.plan)
        assert stats.fills > 0
        assert stats.unplanned_fills == 0 or torch.cuda.is_available()
        assert stats.held_nbytes["device"] <= 3 * LAYER_NBYTES
        assert len(stacks) >= 5
        assert not compiled or all(unit.endswith("routed_experts") for unit in stacks)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_bias_that_the_router_and_the_gate_hold(folder: Folder, plain: Any, compiled: bool) -> None:
    """Only stacks stream. Compiled for a CPU, experts are no operator, and this model's shared experts end in a sum."""
    wanted, names = plain("biased", compiled), {"offload_params": list(STACKS)} if compiled else {}
    with engine(folder("biased"), compiled=compiled, **asked(**group(1), **names)) as llm:
        assert scored(llm) == wanted
        plan = streamer().plan
        assert len(streamed_stacks(plan)) == 7  # its first layer is dense
        assert sum(alias.endswith("e_score_correction_bias") for alias in plan.resident) == 7


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("settings", [group(2), group(1) | {"codec": "compressed"}], ids=["plain", "coded"])
def test_layers_of_experts_in_groups(folder: Folder, plain: Any, settings: dict[str, Any], compiled: bool) -> None:
    wanted = plain("shared", compiled)
    with engine(folder("shared"), compiled=compiled, **asked(**settings)) as llm:
        assert scored(llm) == wanted
        assert len(streamed_stacks(streamer().plan)) >= 7
        assert bool(streamer().plan.manifest.codes) is ("codec" in settings)
