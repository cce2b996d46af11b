"""Rates of kernels that unpack matrices: measured by their own launches, once per machine, and else assumed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from weightstream.codec import unpack_kernels, unpacking
from weightstream.measure import bench, profile, unpack_rates
from weightstream.measure.unpack_rates import ExpertLayer
from weightstream.plan.manifest import NOT_MEASURED, Profile, unpack_rate
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.cpu import CPU_PROFILE, CpuBackend

GPU = torch.device("cuda", 0)
FACTS = cuda.Facts(name="A GPU", uuid="u-1", pci="0000:01:00.0", capability="9.0", driver="13.0", total_nbytes=80 << 30)
LACKING: dict[str, Any] = {unpack_rate(kernel): NOT_MEASURED for kernel in unpacking.FORMATS}
MEASURED = replace(CPU_PROFILE, machine="a machine", measured_at=1.8e9, load=0.0, **LACKING)
TINY = (ExpertLayer(((128, 256), (128, 384)), 1), ExpertLayer(((128, 256), (128, 384)), 2))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda, "facts", lambda _: FACTS)


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    found = CpuBackend()
    yield found
    found.close()


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Measuring takes no time here. The kernels of each measurement are recorded."""
    found: list[list[str]] = []

    def measure_unpacking(_: object, __: object, kernels: Collection[str]) -> dict[str, float]:
        found.append(list(kernels))
        return {unpack_rate(kernel): 5e9 for kernel in kernels}

    monkeypatch.setattr(bench, "measure_unpacking", measure_unpacking)
    return found


def on_gpu() -> Any:
    return SimpleNamespace(device=GPU, profile=CPU_PROFILE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for Triton's interpreter")
def test_the_launches_of_a_forward_are_measured(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stacks in one, for each kernel."""
    launches: list[tuple[str, int]] = []
    launch = unpacking._launch

    def counted(rows: torch.Tensor, first: Any, second: Any) -> None:
        assert second is not None
        launches.append((first.kernel, len(rows)))
        launch(rows, first, second)

    monkeypatch.setattr(unpacking, "_launch", counted)
    monkeypatch.setattr(unpack_rates, "LAYERS", TINY[:1])
    monkeypatch.setattr(bench, "_CPU", bench._CPU._replace(out_width=1024))
    monkeypatch.setattr(bench, "_SAMPLE_S", 1e-6)
    monkeypatch.setattr(bench, "NUM_ROUNDS", 1)
    monkeypatch.setattr(unpack_kernels, "MXFP4_SHAPE", {"TILES": 16, "GROUPS": 16, "num_warps": 2})
    monkeypatch.setattr(unpack_kernels, "UNPACK_SHAPE", {"ROWS": 64, "WORDS": 64, "STEPS": 2, "num_warps": 4})
    rounds: list[int] = []
    with np.errstate(all="ignore"):
        found = bench.measure_unpacking(backend, lambda: rounds.append(1), unpacking.FORMATS)
    assert found.keys() == {unpack_rate(kernel) for kernel in unpacking.FORMATS}
    assert all(1e3 < rate < 1e12 for rate in found.values())
    assert len(rounds) == 1
    assert set(launches) == {(f"unpack_{kernel}", 1) for kernel in unpacking.FORMATS}


def test_a_rate_is_that_of_all_layers() -> None:
    """The fixed time of a kernel is left out, but at most half of the time. A work unpacks two sets of rows."""
    first, second = (layer.nbytes for layer in TINY)
    assert (first, second) == (2 * 128 * 640, 2 * 2 * 128 * 640)
    seconds = {f"int4, {first}": 2 * 3e-6, f"int4, {second}": 2 * 8e-6}
    seconds |= {f"mxfp4, {first}": 2e-6, f"mxfp4, {second}": 2e-6}
    found = unpack_rates.unpack_fields(seconds, TINY, op_s=1e-6)
    assert found == {
        "unpack_int4_bytes_per_s": pytest.approx((first + second) / 9e-6),
        "unpack_mxfp4_bytes_per_s": pytest.approx((first + second) / 1e-6),
    }


def test_missing_rates_are_measured_once_and_saved(requested: list[list[str]]) -> None:
    profile.save_profile(GPU, MEASURED)
    assert profile.with_unpacking(on_gpu(), MEASURED, ()) == MEASURED
    assert not requested
    found = profile.with_unpacking(on_gpu(), MEASURED, ["mxfp4"])
    assert found == replace(MEASURED, unpack_mxfp4_bytes_per_s=5e9) == profile.load_profile(GPU)
    assert profile.with_unpacking(on_gpu(), found, ["mxfp4"]) == found
    found = profile.with_unpacking(on_gpu(), found, ["mxfp4", "float8"])
    assert found == profile.load_profile(GPU)
    assert requested == [["mxfp4"], ["float8"]]


def test_a_cpu_measures_none(backend: CpuBackend, requested: list[list[str]]) -> None:
    """There the libraries' functions unpack, which are slower than memory by far."""
    found = profile.with_unpacking(backend, MEASURED, unpacking.FORMATS)
    assert found == replace(MEASURED, **{rate: getattr(CPU_PROFILE, rate) for rate in LACKING})
    for kernel in unpacking.FORMATS:
        assert 1e7 < found.unpack_bytes_per_s(kernel) < CPU_PROFILE.device_bytes_per_s / 10
    assert not requested


@pytest.mark.parametrize("fails", [True, False])
def test_rates_that_cannot_be_measured_are_assumed(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not measured again with this profile, but with the next one."""
    monkeypatch.setattr(bench, "measure_unpacking", lambda *_: 1 / 0 if fails else {})
    profile.save_profile(GPU, MEASURED)
    found = profile.with_unpacking(on_gpu(), MEASURED, ["int4"])
    assert found == replace(MEASURED, unpack_int4_bytes_per_s=MEASURED.unpack_bytes_per_s("int4"))
    assert found.unpack_int4_bytes_per_s > 1e9
    assert profile.load_profile(GPU) == MEASURED
    text = "unpacking cannot be measured (division by zero): its speed is assumed"
    assert (text in caplog.text) is fails


def test_a_profile_without_rates_loads() -> None:
    """Of an earlier version. Each format has a field."""
    fields = json.loads(profile.to_json(MEASURED))
    for kernel in unpacking.FORMATS:
        assert fields.pop(unpack_rate(kernel)) == NOT_MEASURED
    found = profile.from_json(json.dumps(fields))
    assert found == MEASURED
    faster = replace(found, device_bytes_per_s=2 * found.device_bytes_per_s)
    for kernel in unpacking.FORMATS:
        assert 0 < 2 * found.unpack_bytes_per_s(kernel) == faster.unpack_bytes_per_s(kernel) < faster.device_bytes_per_s
        assert Profile(**{unpack_rate(kernel): 3e9}).unpack_bytes_per_s(kernel) == 3e9
