"""Profiles of GPUs by name: names that people write, links, and rates that a GPU can have."""

from __future__ import annotations

import pytest

from weightstream.errors import ConfigError
from weightstream.measure.known_gpus import known_gpu
from weightstream.measure.profile import from_json, to_json
from weightstream.plan.manifest import NOT_MEASURED
from weightstream.settings.speeds import Link, Target

NAMES = ("RTX 3090", "RTX 4080", "RTX 4090", "RTX 5080", "RTX 5090", "A10", "A100 40GB", "A100 80GB", "L4", "L40S")
NAMES += ("H100", "H200")


@pytest.mark.parametrize("name", NAMES)
def test_each_profile_is_that_of_a_gpu_with_assumed_rates(name: str) -> None:
    found = known_gpu(name)
    assert found.machine.startswith(f"{name}, PCIe ")
    assert found.basis == ("data sheet and measurements" if name in ("H100", "H200") else "data sheet")
    assert not found.on_cpu
    assert 14 < found.device_nbytes / 2**30 < 141
    assert NOT_MEASURED < 10 * found.link_bytes_per_s / 2 < found.device_bytes_per_s < 5e12
    assert found.link_bytes_per_s < found.decode_bfloat16_bytes_per_s < found.device_bytes_per_s
    assert found.attention_flops_per_s < found.half_flops_per_s
    assert found.single_flops_per_s < found.half_flops_per_s < 1e15
    assert from_json(to_json(found)) == found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("RTX 4090 24 GB", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("a100 40gb", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("l40s", "L40S"),
        ("RTX 4090, PCIe 4 x16", "RTX 4090"),
        ("RTX 4090 (PCIe Gen4)", "RTX 4090"),
        ("H200 (PCIe 5)", "H200"),
    ],
)
def test_a_gpu_has_several_spellings(text: str, name: str) -> None:
    assert known_gpu(text) == known_gpu(name)


@pytest.mark.parametrize("text", ["", "A100", "RTX 4090 Ti", "H100 PCIe", "4090 16GB", "RTX 4090 Laptop", "5"])
def test_any_other_name_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=f"There are {', '.join(NAMES)}"):
        known_gpu(text)


@pytest.mark.parametrize(
    ("text", "name", "rate"),
    [
        ("PCIe 3", "PCIe 3 x16", 13.4e9),
        ("pcie4x8", "PCIe 4 x8", 13.4e9),
        ("PCIe Gen 5", "PCIe 5 x16", 53.6e9),
        ("pcie 4.0 x4", "PCIe 4 x4", 6.7e9),
        ("25GB/s", "a link of 25 GB/s", 25e9),
        ("800 MB/s", "a link of 800 MB/s", 8e8),
    ],
)
def test_a_link_is_a_generation_or_a_rate(text: str, name: str, rate: float) -> None:
    found = Link.parse(text)
    assert found.text == name
    assert found.bytes_per_s == pytest.approx(rate, rel=0.01)
    other = known_gpu("RTX 5090", text)
    assert (other.machine, other.link_bytes_per_s) == (f"RTX 5090, {name}", found.bytes_per_s)


def test_a_link_is_named_once() -> None:
    with pytest.raises(ConfigError, match="names a link: leave that out, or link = 'PCIe 4'"):
        known_gpu("RTX 4090 (PCIe 3)", "PCIe 4")


def test_a_gpu_has_the_memory_that_drivers_report() -> None:
    assert known_gpu("L40S").device_nbytes <= 44.4 * 2**30


@pytest.mark.parametrize("text", ["", "PCIe", "PCIe 2", "PCIe 4 x3", "25", "0GB/s", "25GiB", "-1GB/s"])
def test_any_other_link_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="link"):
        Link.parse(text)


@pytest.mark.parametrize(
    ("text", "step_s", "shown"),
    [
        ("10tok/s", 0.2, "10 tokens/s"),
        ("0.5 tokens/s", 4.0, "0.5 tokens/s"),
        ("100ms", 0.1, "100 ms"),
        ("2.5 s", 2.5, "2.5 s"),
    ],
)
def test_a_target_is_a_rate_or_a_time(text: str, step_s: float, shown: str) -> None:
    target = Target.parse(text)
    assert target.step_s(num_tokens=2) == pytest.approx(step_s)
    assert str(target) == shown


@pytest.mark.parametrize("text", ["", "10", "0tok/s", "10tok", "0ms", "1m", "-5ms"])
def test_any_other_target_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="10tok/s or 100ms"):
        Target.parse(text)


def test_tokens_are_no_target_of_a_step_without_any() -> None:
    with pytest.raises(ConfigError, match="give a time"):
        Target.parse("10tok/s").step_s(0)
