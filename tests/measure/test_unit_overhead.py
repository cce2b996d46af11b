"""The host's time for opening a unit, derived from steps of small units."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightstream.measure import unit_overhead
from weightstream.plan.manifest import Profile, TensorSpec, UnitSpec
from weightstream.runtime.devices.cpu import CpuBackend

US = 1e-6


def test_the_parts_are_derived_from_differences() -> None:
    num = unit_overhead.NUM_UNITS
    seconds = {"few": num * 55 * US, "many": num * 95 * US, "coded": num * 37 * US, "launches": num * 12 * US}
    found = {name: s / unit_overhead._BETWEEN for name, s in unit_overhead.overhead_fields(seconds).items()}
    wanted = {"overhead_s": 50 * US, "show_s": 5 * US, "fill_s": 30 * US, "decoding_launch_s": 12 * US}
    assert found == pytest.approx(wanted)
    without = unit_overhead.overhead_fields({name: seconds[name] for name in ("few", "many")})
    assert without == pytest.approx(unit_overhead.overhead_fields(seconds) | {"fill_s": 0.0, "decoding_launch_s": 0.0})


def test_noise_gives_no_negative_costs() -> None:
    found = unit_overhead.overhead_fields({"few": 2.0, "many": 1.0, "coded": 3.0, "launches": 9.0})
    assert all(s >= 0 for s in found.values())
    assert found["fill_s"] <= found["overhead_s"]


@pytest.mark.stress
def test_it_works_in_inference_mode() -> None:
    backend = CpuBackend()
    with torch.inference_mode(), unit_overhead.overhead_works(backend, "bfloat16") as works:
        for work in works.values():
            work()
            work()
    backend.close()


@torch.no_grad()
@pytest.mark.parametrize("coded", [None, "bfloat16", "float16", "float8_e4m3fn"])
def test_every_unit_of_a_step_is_filled_and_opened(coded: str | None) -> None:
    backend = CpuBackend()
    with unit_overhead.overhead_works(backend, coded) as works:
        for work in works.values():
            work()
        assert works.keys() == {"few", "many"} | ({"coded", "launches"} if coded else set())
    for num_tensors in (unit_overhead.FEW_TENSORS, unit_overhead.MANY_TENSORS):
        with unit_overhead.steps(backend, num_tensors) as step:
            counters = step.__closure__[0].cell_contents.engine.counters  # type: ignore[attr-defined]
            step()
            before = counters.fills
            step()
            assert counters.fills - before == unit_overhead.NUM_UNITS
            assert counters.unplanned_fills == 0
    backend.close()


@pytest.mark.parametrize(
    ("is_coded", "streams", "wanted_s"),
    [(False, True, 10 + 50 + 2 * 5), (True, True, 10 + 50 + 2 * 5 + 12), (True, False, 10 + 20 + 2 * 5 + 12)],
)
def test_the_overhead_of_a_unit(is_coded: bool, streams: bool, wanted_s: float) -> None:
    profile = Profile(unit_s=(1.0,), host_s=(10.0,), overhead_s=50.0, fill_s=30.0, show_s=5.0, decoding_launch_s=12.0)
    form: dict[str, Any] = {"shape": (8,), "stride": (1,), "dtype": "bfloat16"}
    form |= {"nbytes": 8, "decoded_nbytes": 16} if is_coded else {"nbytes": 16}
    unit = UnitSpec(name="unit", tensors=tuple(TensorSpec(name=name, alias=name, **form) for name in "ab"))
    assert max(profile.times_s(0, unit, shown=2, streams=streams)) == wanted_s
    assert max(profile.times_s(0, unit)) == 10.0
