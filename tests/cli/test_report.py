"""A plan as a table: a row per kind of unit, whatever the units' names, in 100 columns."""

from __future__ import annotations

import importlib
import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from weightstream.api.other_budgets import AtBudget
from weightstream.cli.plan_output import faster_note
from weightstream.plan.manifest import Manifest, TensorSpec, UnitSpec
from weightstream.plan.plan import Plan
from weightstream.plan.search import map_to_host
from weightstream.text.stream import Answer

# in the package the commands have these names
report, run = (importlib.import_module(f"weightstream.cli.{name}") for name in ("plan", "run"))

MIB = 1 << 20


def unit_of(index: int, *sizes: int) -> UnitSpec:
    name = f"blocks.{index}"
    specs = (
        TensorSpec(name=f"{name}.{j}", shape=(n,), stride=(1,), dtype="uint8", alias=f"{name}.{j}", nbytes=n)
        for j, n in enumerate(sizes)
    )
    return UnitSpec(name=name, layer=index, tensors=tuple(specs))


def printed(plan: Plan) -> list[str]:
    """The lines of a plan's table, in a pipe."""
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with console.capture() as shown:
        console.print(report.table(plan))
    lines = shown.get().splitlines()
    assert all(len(line) <= 100 for line in lines), max(lines, key=len)
    return lines


def cells(lines: list[str]) -> list[list[str]]:
    return [[c.strip() for c in line.strip("│┃").replace("┃", "│").split("│")] for line in lines if line[0] in "│┃"]


def test_the_table_has_a_row_for_each_run_of_equal_units() -> None:
    units = (
        UnitSpec(name="", tensors=(replace(unit_of(90, MIB).tensors[0]),)),
        *(unit_of(i, 2 * MIB, MIB) for i in range(3)),
        unit_of(3, 3 * MIB),
        unit_of(4, 3 * MIB, MIB),
    )
    manifest = Manifest(units=units, order=tuple(range(len(units))))
    resident = frozenset({"blocks.90.0", "blocks.0.1", "blocks.1.1", "blocks.2.1"})
    plan = Plan.build(manifest, resident, 4 * MIB)
    assert cells(printed(plan)) == [
        ["unit", "units", "resident each", "streams each"],
        ["(root)", "1", "1.0MiB", "0B"],
        ["blocks.0…2", "3", "1.0MiB", "2.0MiB"],
        ["blocks.3", "1", "0B", "3.0MiB"],
        ["blocks.4", "1", "0B", "4.0MiB"],
    ]
    assert plan.summary() == "4.0MiB resident + 4.0MiB ring of 17.0MiB; 5 units stream 13.0MiB per step"


def test_a_hundred_large_units_print_within_100_columns() -> None:
    """126 blocks of 5.9 GiB each, and a budget of a third."""
    units = tuple(unit_of(i, 1600 << 20, 4321 << 20) for i in range(126))
    manifest = Manifest(units=units, order=tuple(range(126)))
    resident = frozenset(f"blocks.{i}.0" for i in range(126))
    printed(Plan.build(manifest, resident, 2 * (4321 << 20)))
    printed(Plan.build(manifest, frozenset(), 2 * (5921 << 20)))


def test_long_names_wrap() -> None:
    units = tuple(replace(unit_of(i, MIB), name="transformer." * 12 + str(i)) for i in range(3))
    printed(Plan.build(Manifest(units=units, order=(0, 1, 2)), frozenset(), MIB))


def test_names_are_whole_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The column of uncompressed sizes goes first."""
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"model.layers.10.self_attn.{name}_proj" for name in "qkvo"]
    units = tuple(replace(unit_of(i, MIB, MIB), name=name) for i, name in enumerate(names))
    manifest = Manifest(units=units, order=tuple(range(4)))
    manifest = manifest.coded(dict.fromkeys(manifest.aliases, 700_000))
    plan = map_to_host(Plan.build(manifest.without({"blocks.0.0"}), frozenset({"blocks.1.0"}), 4 * MIB), manifest, 0)
    report.show_plan("m", "a GPU", plan, {})
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [cell[0] for cell in cells([line for line in lines if "proj" in line])] == names


@pytest.mark.parametrize(
    ("device", "measured_s", "policy", "is_shown"),
    [("cpu", 6.0, None, True), ("cpu", 4.0, None, False), ("cpu", 6.0, "passive", False), ("cuda:0", 6.0, None, False)],
)
def test_a_run_on_a_busy_cpu_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, device: str, measured_s: float, policy: str | None, is_shown: bool
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    stats = {"held_nbytes": {"device": MIB}, "filled_nbytes": 0, "speculation": None, "unplanned_fills": 0}
    found = {"plan": "p", "device": device, "first_token_s": 1.0, "seconds": 9.0, "experts": None, "is_rough": False}
    found |= {"stats": stats | {"stall_s": 0.0, "steps": 9, "step_s": measured_s}, "predicted_s": 1.0, "step": ""}
    assert ("hint" in run.report_lines(found, Answer(tokenizer=None))) is is_shown


@pytest.mark.parametrize("name", ["experts[bold]", "a[/b]", "[red]x[/red]", ":smile:", "日本語"])
def test_names_are_printed_as_they_are(name: str) -> None:
    plan = Plan.build(Manifest(units=(replace(unit_of(0, MIB), name=name),), order=(0,)), frozenset(), MIB)
    assert any(name in line for line in printed(plan))


def test_reads_from_disk_are_a_column_next_to_the_streamed_bytes() -> None:
    """The larger tensors of the last three of four blocks are on disk."""
    manifest = Manifest(units=tuple(unit_of(i, MIB, 2 * MIB) for i in range(4)), order=(0, 1, 2, 3, 0))
    plan = Plan.build(manifest, frozenset({"blocks.0.0"}), 6 * MIB)
    assert cells(printed(replace(plan, disk=frozenset(f"blocks.{i}.1" for i in (1, 2, 3))))) == [
        ["unit", "units", "resident each", "streams each", "from disk each"],
        ["blocks.0", "1", "1.0MiB", "2.0MiB", "0B"],
        ["blocks.1…3", "3", "0B", "3.0MiB", "2.0MiB"],
    ]
    assert not any("disk" in line for line in printed(plan))


def test_zero_copy_reads_are_a_column() -> None:
    manifest = Manifest(units=(unit_of(0, MIB),), order=(0,))
    plan = map_to_host(Plan.build(manifest.without({"blocks.0.0"}), frozenset(), 0), manifest, 0)
    assert cells(printed(plan))[1] == ["blocks.0", "1", "0B", "1.0MiB", "0B"]


def test_blocks_of_slightly_different_compressed_sizes_are_one_kind() -> None:
    manifest = Manifest(units=tuple(unit_of(i, MIB) for i in range(9)), order=tuple(range(9)))
    codes = {alias: 700_000 + 512 * i for i, alias in enumerate(manifest.aliases)}
    plan = Plan.build(manifest.coded(codes), frozenset(), 4 * MIB)
    assert cells(printed(plan)) == [
        ["unit", "units", "plain each", "resident each", "streams each"],
        ["blocks.0…8", "9", "1.0MiB", "0B", "685.6KiB"],
    ]


def test_a_faster_plan_for_less_memory_is_named() -> None:
    plan = Plan.build(Manifest(units=(unit_of(0, MIB),), order=(0,)), frozenset(), MIB)
    fast, slow = (AtBudget(budget * MIB, replace(plan, step_s=s)) for budget, s in ((3, 0.9), (4, 1.0)))
    assert faster_note(slow, [fast, slow]) == {"note": "a plan for less memory is faster: --device-budget 3MiB"}
    assert not faster_note(fast, [fast, slow])
    assert not faster_note(slow, [fast._replace(plan=replace(plan, step_s=0.995)), slow])
