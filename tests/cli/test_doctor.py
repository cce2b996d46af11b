"""`weightstream doctor`: facts of the system, checks of them, and the screen. Without a GPU, on made-up files."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from weightstream.cli import app
from weightstream.measure import bench, checks, machine, multi_gpu_links, nvml, profile
from weightstream.measure.checks import Finding
from weightstream.measure.nvml import PciLink
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.cpu import CPU_PROFILE
from weightstream.store import numa

PROFILE = replace(CPU_PROFILE, machine="a machine", link_bytes_per_s=7e9, device_nbytes=1 << 34, load=0.0)
ADDRESS = "0000:18:00.0"
NOW = 1.8e9
BEST = PciLink(generation=5, width=16)


# -- facts of the system -----------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with one GPU."""
    gpu = write(tmp_path / "sys/devices" / ADDRESS, numa_node="1", vendor="0x10de", **{"class": "0x030200"})
    devices = tmp_path / "sys/bus/pci/devices"
    write(devices / "0000:00:02.0", vendor="0x1af4", **{"class": "0x030000"})
    write(devices / "0000:00:03.0", vendor="0x10de", **{"class": "0x040300"})
    (devices / ADDRESS).symlink_to(gpu)
    for node, cores in enumerate(((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 14))):
        folder = write(tmp_path / f"sys/devices/system/node/node{node}", cpulist="", cpumap="")
        for core in cores:
            (folder / f"cpu{core}").symlink_to(folder)
    write(
        tmp_path / "sys/kernel/mm/transparent_hugepage", enabled="always [madvise] never", shmem_enabled="[never] deny"
    )
    write(tmp_path / "etc", **{"machine-id": "0123abcd"})
    return tmp_path


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def device(root: Path) -> Path:
    return (root / "sys/bus/pci/devices" / ADDRESS).resolve()


def test_memory_nodes(root: Path) -> None:
    assert numa.node_of(ADDRESS.upper(), root) == 1
    assert numa.cores_of(0, root) == {0, 1, 2, 3, 8, 9, 10, 11}
    assert numa.cores_of(1, root) == {4, 5, 6, 7, 12, 14}
    assert numa.cores_of(7, root) == frozenset()
    write(device(root), numa_node="-1")
    assert numa.node_of(ADDRESS, root) is None
    assert numa.node_of("0000:99:00.0", root) is None


def test_gpus_are_found_without_a_driver(root: Path) -> None:
    assert machine.nvidia_gpus(root) == (ADDRESS,)
    assert machine.nvidia_gpus(root / "nothing") == ()


def test_other_facts_of_the_machine(root: Path) -> None:
    assert machine.huge_pages(root) == ("madvise", "never")
    assert machine.huge_pages(root / "nothing") == (None, None)
    assert machine.machine_id(root) == "0123abcd"
    assert machine.machine_id(root / "nothing")
    write(root / "proc", cpuinfo="processor\t: 0\nmodel name\t: A Processor @ 3 GHz\n\nmodel name\t: Another")
    assert machine.cpu_name(root) == "A Processor @ 3 GHz"
    assert machine.cpu_name(root / "nothing")


# -- checks ------------------------------------------------------------------------------------------------------------


def checked(
    check: checks.Check, device: str = "cuda:0", cores: Iterable[int] = range(2), **facts: Any
) -> list[Finding]:
    """The result of a check on a machine whose profile has these facts."""
    place = torch.device(device)
    backend: Any = SimpleNamespace(device=place, profile=replace(PROFILE, **facts))
    system: Any = SimpleNamespace(
        backend=backend,
        gpus=[place] if place.type == "cuda" else [],
        facts=SimpleNamespace(pci=ADDRESS),
        cores=frozenset(cores),
    )
    return [*check(system)]


def has_link(monkeypatch: pytest.MonkeyPatch, now: PciLink | None, best: PciLink | None, version: str | None) -> None:
    monkeypatch.setattr(checks, "copies_s", lambda *_: None)
    monkeypatch.setattr(checks, "_version", lambda _: version)
    monkeypatch.setattr(nvml, "link_now", lambda _: now)
    monkeypatch.setattr(nvml, "link_at_best", lambda _: best)


@pytest.mark.parametrize(
    ("now", "best", "measured", "marks", "said"),
    [
        (BEST, BEST, 55.4e9, ["ok", "ok"], "88% of the link's 63.0 GB/s"),
        (BEST, None, 55.4e9, ["ok", "ok"], "generation 5 x16"),
        (BEST, BEST, 40e9, ["ok", "better"], "63% of the link's 63.0 GB/s"),
        (PciLink(generation=4, width=8), BEST, 14e9, ["better", "ok"], "generation 5 x16 is possible"),
        (PciLink(generation=5, width=16), PciLink(generation=4, width=16), 55e9, ["ok", "ok"], "87%"),
        (None, None, 55e9, ["note", "ok"], "virtual machines"),
        (PciLink(generation=1, width=1), BEST, 55e9, ["note", "ok"], "shown: generation 1 x1"),
    ],
)
def test_messages_about_a_link(
    now: PciLink | None,
    best: PciLink | None,
    measured: float,
    marks: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_link(monkeypatch, now, best, "13.6")
    found = checked(checks.link, link_bytes_per_s=measured)
    assert [finding.mark for finding in found] == marks
    assert said in " ".join(finding.text for finding in found)
    assert [bool(finding.remedy) for finding in found] == [mark == "better" for mark in marks]


def test_a_link_without_information(monkeypatch: pytest.MonkeyPatch) -> None:
    has_link(monkeypatch, None, None, None)
    found, _ = checked(checks.link, link_bytes_per_s=55e9)
    assert found.text.endswith("as nvidia-ml-py is not installed")
    assert found.mark == "note"


@pytest.mark.parametrize(
    ("node", "local", "allowed", "mark", "said"),
    [
        (None, set(), {0, 1}, "note", "one node, or unknown"),
        (1, set(), {0, 1}, "note", "one node, or unknown"),
        (0, {0, 1, 2}, {1, 2, 3, 4}, "ok", "2 of 4 usable cores"),
        (1, {8, 9}, {0, 1}, "better", "0 of 2 usable cores"),
    ],
)
def test_messages_about_nodes(
    node: int | None, local: set[int], allowed: set[int], mark: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "node_of", lambda _: node)
    monkeypatch.setattr(numa, "cores_of", lambda _: frozenset(local))
    (found,) = checked(checks.numa_node, cores=allowed)
    assert found.mark == mark
    assert said in found.text
    assert ("--cpunodebind=1" in found.remedy) == (mark == "better")


@pytest.mark.parametrize(("together", "mark"), [([49e9, 48e9], "ok"), ([30e9, 25e9], "better")])
def test_links_that_share_something(together: list[float], mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "private_backend", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(multi_gpu_links, "rates", lambda backends, _: [50e9] if len(backends) == 1 else together)
    system: Any = SimpleNamespace(gpus=[torch.device("cuda", index) for index in range(2)])
    (found,) = checks.links_at_once(system)
    assert found.mark == mark
    assert f"{sum(together) / 1e11:.0%} of their rates one at a time" in found.text
    assert ("switch" in found.remedy) is (mark == "better")
    assert found.value == {"alone": [50e9, 50e9], "together": together}


@pytest.mark.parametrize(("peers", "mark"), [([True, True], "ok"), ([True, False], "better")])
def test_gpus_that_do_not_reach_each_other(peers: list[bool], mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", index) for index in range(3)]
    monkeypatch.setattr(multi_gpu_links, "hops_s", lambda first, device, _: [device.index * 1e-5] * 3)
    monkeypatch.setattr(cuda, "peers", lambda first, others: peers if others == gpus[1:] else [])
    system: Any = SimpleNamespace(backend=SimpleNamespace(device=gpus[0]), gpus=gpus)
    (found,) = checks.hops(system)
    assert (found.mark, found.value) == (mark, [1e-5, 2e-5])
    assert "20 us" in found.text
    assert ("host memory" in found.remedy) is (mark == "better")


@pytest.mark.parametrize(("nodes", "texts"), [([0, 0], []), ([0, 1], ["the GPUs are on nodes 0, 1"])])
def test_nodes_of_gpus(nodes: list[int], texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "facts", lambda device: SimpleNamespace(pci=device.index))
    monkeypatch.setattr(numa, "node_of", lambda pci: nodes[pci])
    system: Any = SimpleNamespace(gpus=[torch.device("cuda", index) for index in range(2)])
    assert [found.text for found in checks.numa_nodes(system)] == texts


@pytest.mark.parametrize(
    ("pins", "read_only", "marks"),
    [(True, True, ["ok", "ok"]), (True, False, ["ok", "note"]), (False, True, ["broken", "ok"])],
)
def test_messages_about_pinning(pins: bool, read_only: bool, marks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = nullcontext(SimpleNamespace(is_pinned=lambda: pins))
    monkeypatch.setattr(checks, "host_memory", lambda *_: memory)
    monkeypatch.setattr(checks, "pins_read_only", lambda index: read_only)
    found = checked(checks.pinning)
    assert [finding.mark for finding in found] == marks
    assert found[0].value is pins
    assert ("memlock" in found[0].remedy) is not pins


@pytest.mark.stress
def test_links_are_measured_one_by_one_and_together() -> None:
    backends = [bench.private_backend(torch.device("cpu")) for _ in range(2)]
    try:
        assert all(
            rate > 1e6 for rate in multi_gpu_links.rates(backends[:1], 0.01) + multi_gpu_links.rates(backends, 0.01)
        )
        assert min(multi_gpu_links.hops_s(backends[0], torch.device("cpu"), 0.01)) > 0
    finally:
        for backend in backends:
            backend.close()


@pytest.mark.parametrize(
    ("age", "load", "mark", "said"),
    [
        (0, 0.0, "ok", "just now, while other processes used 0% of the GPU"),
        (-5, 0.2, "ok", "just now, while other processes used 20% of the GPU"),
        (61, 0.21, "better", "1 minute ago, while other processes used 21% of the GPU"),
        (2 * 3600, 0.0, "ok", "2 hours ago"),
        (3.5 * 86400, 1.0, "better", "3 days ago, while other processes used 100%"),
        (60, -1.0, "ok", "an unknown share of the GPU"),
        (NOW, 0.0, "ok", "at an unknown time"),
    ],
)
def test_messages_about_a_profile(
    age: float, load: float, mark: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    (found,) = checked(checks.measured, measured_at=NOW - age, load=load)
    assert found.mark == mark
    assert said in found.text
    assert ("weightstream doctor --measure" in found.remedy) is (mark == "better")


@pytest.mark.parametrize(
    ("policy", "mark", "said"),
    [
        ("passive", "ok", "OMP_WAIT_POLICY=passive: waiting compute threads sleep"),
        ("PASSIVE", "ok", "OMP_WAIT_POLICY=PASSIVE"),
        ("active", "better", "OMP_WAIT_POLICY=active: waiting compute threads may spin"),
        (None, "better", "OMP_WAIT_POLICY is not set"),
    ],
)
def test_messages_about_waiting_threads(
    policy: str | None, mark: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    (found,) = checked(checks.waiting)
    assert found.mark == mark
    assert said in found.text
    assert ("export OMP_WAIT_POLICY=passive" in found.remedy) is (mark == "better")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (found,) = checked(checks.waiting)
    assert (found.mark, found.remedy) == ("ok", "")


@pytest.mark.parametrize(("cores", "num"), [(2, 1), (4, 1), (5, 0)])
def test_threads_that_wait_matter_where_cores_are_few(cores: int, num: int) -> None:
    assert len(checked(checks.waiting, cores=range(cores))) == num


@pytest.mark.parametrize(("load", "mark"), [(-1.0, "ok"), (0.2, "ok"), (0.9, "note")])
def test_speeds_that_were_measured_under_load_are_not_ok(load: float, mark: str) -> None:
    *found, _ = checked(checks.speeds, load=load)
    assert [each.mark for each in found] == [mark] * 3


@pytest.mark.parametrize(("launch_s", "mark"), [(20e-6, "ok"), (301e-6, "better")])
def test_a_slow_launch_is_to_be_measured_again(launch_s: float, mark: str) -> None:
    *_, found = checked(checks.speeds, op_launch_s=launch_s)
    assert found.label == "kernels"
    assert found.mark == mark
    assert found.remedy == "Measure again when idle: weightstream doctor --measure" * (mark == "better")


@pytest.mark.parametrize(
    ("gpus", "driver", "built", "visible", "said", "remedy"),
    [
        ((), None, None, None, "no driver", "--gpus all"),
        ((ADDRESS,), None, "13.0", None, ADDRESS, "Install NVIDIA's driver"),
        ((ADDRESS,), "580.95.05", None, None, "built without CUDA", "pip install -U torch --index-url"),
        ((ADDRESS,), "580.95.05", None, None, "driver 580.95.05", "whl/cu130"),
        ((ADDRESS,), "535.1", None, None, "driver 535.1", "whl/cu126"),
        ((ADDRESS,), "580.95.05", "13.0", "", "hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
        ((ADDRESS,), "580.95.05", "13.0", "-1,0", "hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
        ((), "535.1", "13.0", "0", "cannot use it", "nvidia-smi"),
    ],
)
def test_messages_without_a_gpu(
    gpus: tuple[str, ...],
    driver: str | None,
    built: str | None,
    visible: str | None,
    said: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: gpus)
    monkeypatch.setattr(nvml, "driver_version", lambda: driver)
    monkeypatch.setattr(checks, "_version", lambda _: "1")
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = checks.no_gpu(is_wanted=False)
    assert said in found.text
    assert remedy in found.remedy
    assert found.mark == ("broken" if gpus or driver else "note")


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a small scratch file, on a machine without a GPU whose CPU is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: ())
    monkeypatch.setattr(nvml, "driver_version", lambda: None)
    monkeypatch.setattr(checks, "_FILE_NBYTES", 16 << 20)
    profile.save_profile(torch.device("cpu"), PROFILE)
    return write(tmp_path / "disk")


def run(disk: Path, *flags: object) -> Result:
    return CliRunner().invoke(app, ["doctor", "--path", str(disk), *map(str, flags)])


def value(result: Result, label: str) -> Any:
    """The number of a check, without its unit."""
    return next(found["value"] for found in json.loads(result.stdout)["findings"] if found["label"] == label)


def test_the_screen(disk: Path) -> None:
    result = run(disk)
    assert result.exit_code == 0, result.output
    assert not result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in result.stdout
    assert [line for line in lines if line and line[0] != " "][:-1] == ["GPU", "host", "speed", "disk", "software"]
    assert "7.0 GB/s" in result.stdout
    assert re.fullmatch(r"All is well\.|It works; \d+ could be better\.", lines[-1])
    assert list(disk.iterdir()) == []


def test_colours_are_for_terminals(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in run(disk).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in run(disk).stdout.replace("\x1b[3m", "")


def test_json_is_whole_and_raw(disk: Path) -> None:
    result = run(disk, "--json")
    found = json.loads(result.stdout)
    lists = ("unit_s", "host_s", "more_s", "after_share", "picked", "captured_s")
    assert found["profile"] == asdict(PROFILE) | {key: [] for key in lists}
    values = {(finding["section"], finding["label"]): finding["value"] for finding in found["findings"]}
    assert values["host", "processor"] == len(os.sched_getaffinity(0))
    assert 0 < values["host", "memory"] <= psutil.virtual_memory().total
    assert 1e6 < values["disk", "reads"] < math.inf
    assert values["software", "installed"]["torch"] == torch.__version__
    assert values["software", "quantised"].keys() >= {"bitsandbytes", "torchao", "compressed-tensors"}
    assert {section for section, _ in values} == {"GPU", "host", "speed", "disk", "software"}
    keys = {"section", "label", "text", "mark", "remedy", "value"}
    assert all(set(finding) == keys for finding in found["findings"])


def test_a_profile_is_saved_for_planning(disk: Path, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    result = run(disk, "--save", path)
    assert str(path) in result.stdout
    assert profile.from_json(path.read_text()) == PROFILE
    assert json.loads(run(disk, "--save", path, "--json").stdout)["profile"]["machine"] == "a machine"
    refused = run(disk, "--save", tmp_path / "nowhere" / "machine.json")
    assert refused.exit_code == 2
    assert "No such file" in refused.stderr


def test_measuring_again(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_load", lambda: 0.5)
    again = replace(PROFILE, link_bytes_per_s=8e9)
    monkeypatch.setattr("weightstream.measure.bench.measure", lambda *_: (again, True))
    assert "7.0 GB/s" in run(disk).stdout
    assert "8.0 GB/s" in run(disk, "--measure").stdout
    shown = run(disk)
    assert "8.0 GB/s" in shown.stdout
    assert "just now, while other processes used 50% of the processor" in shown.stdout
    assert shown.exit_code == 0


def test_a_failed_measurement_is_broken(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("weightstream.measure.bench.measure", fail)
    result = run(disk, "--measure")
    assert result.exit_code == 1
    assert "1 broken" in result.stdout


def test_a_requested_gpu_that_is_missing_is_broken(disk: Path) -> None:
    result = run(disk, "--device", "cuda:0")
    assert result.exit_code == 1
    assert "   X  device" in result.stdout
    assert "7.0 GB/s" in result.stdout, "everything else is shown"


def test_a_gpu_that_cannot_be_used_is_broken(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: (ADDRESS,))
    monkeypatch.setattr(checks, "_version", lambda _: "1")
    result = run(disk)
    assert result.exit_code == 1
    assert ADDRESS in result.stdout


def test_a_driver_without_information(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: (ADDRESS,))
    monkeypatch.setattr(checks, "_version", lambda name: None if name == "nvidia-ml-py" else "1")
    result = run(disk)
    assert result.exit_code == 1
    assert "driver unknown" in result.stdout
    assert "pip install nvidia-ml-py" in result.stdout


@pytest.mark.parametrize("name", ["gpu", "tpu:0", "cuda:x", "meta"])
def test_another_device_is_refused(disk: Path, name: str) -> None:
    result = run(disk, "--device", name)
    assert result.exit_code == 2
    assert "cpu" in result.stderr
    assert "cuda" in result.stderr


@pytest.fixture(params=["unwritable", "missing", "full"])
def no_disk(request: pytest.FixtureRequest, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    if request.param == "unwritable":
        monkeypatch.setattr(checks, "NamedTemporaryFile", refuse)
    elif request.param == "full":
        monkeypatch.setattr(checks, "_FILE_NBYTES", 1 << 60)
    else:
        return disk / "missing"
    return disk


def test_a_disk_that_cannot_be_measured_is_no_error(no_disk: Path) -> None:
    result = run(no_disk)
    assert result.exit_code == 0
    assert "not measured" in result.stdout
    assert "--path FOLDER" in result.stdout
    assert value(run(no_disk, "--json"), "reads") is None


def test_the_only_argument_may_be_a_models_folder(disk: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(disk)])
    assert result.exit_code == 0, result.output
    assert f"in {disk}" in "".join(line.strip() for line in result.stdout.splitlines()).replace("in/", "in /")


def test_missing_packages_are_named_with_their_command(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = checks._version
    monkeypatch.setattr(checks, "_version", lambda name: None if name == "diffusers" else version(name))
    result = run(disk)
    assert result.exit_code == 0
    assert "not installed; it is for pipelines for images and video" in result.stdout
    assert "pip install 'weightstream[diffusers]'" in result.stdout
    assert "missing" not in result.stdout.splitlines()[-1]
    assert value(run(disk, "--json"), "installed")["diffusers"] is None


def test_help_has_the_first_steps() -> None:
    text = CliRunner().invoke(app, ["doctor", "--help"]).stdout
    assert all(flag in text for flag in ("--device", "--path", "--measure", "--save", "--json"))
