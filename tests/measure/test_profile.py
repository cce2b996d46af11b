"""The profile: measured once per machine, device and software, stored in a file, and never a reason to fail."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import weightstream
from weightstream.codec import coding
from weightstream.codec.format import ELEMENTS
from weightstream.errors import ConfigError
from weightstream.measure import bench, kernels, machine, nvml, profile, progress
from weightstream.measure.sample_block import SampleBlock
from weightstream.plan.manifest import NOT_MEASURED, Profile, decode_rate
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.cpu import CPU_PROFILE, CpuBackend

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MEASURED = replace(CPU_PROFILE, machine="a machine", link_bytes_per_s=7e9, measured_at=1.8e9, load=0.25)
FACTS = cuda.Facts(name="A GPU", uuid="u-1", pci="0000:01:00.0", capability="9.0", driver="13.0", total_nbytes=80 << 30)


RATES = [decode_rate(dtype) for dtype in ELEMENTS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weightstream" / "profiles"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a clock that stands still, and other processes that use a quarter of the CPU. Nothing has been announced
    yet."""
    profile._say_unmeasured.cache_clear()
    monkeypatch.setattr(machine, "cpu_load", lambda: MEASURED.load)
    monkeypatch.setattr(profile.time, "time", lambda: MEASURED.measured_at)


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    found = CpuBackend()
    yield found
    found.close()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """Measuring takes no time here. Each measurement is recorded."""
    found: list[Profile] = []

    def measure(*_: object) -> tuple[Profile, bool]:
        found.append(replace(MEASURED, copy_latency_s=len(found) * 1e-6))
        return found[-1], True

    monkeypatch.setattr(bench, "measure", measure)
    return found


def test_a_cpu_is_measured_and_left_unchanged(backend: CpuBackend, caplog: pytest.LogCaptureFixture) -> None:
    before, state = set(threading.enumerate()), torch.get_rng_state()
    found, _ = bench.measure(backend, dtypes=["bfloat16", "float8_e4m3fn"])
    assert set(threading.enumerate()) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert not caplog.records
    assert found.machine == machine.cpu_name()
    bounds = {
        "link_bytes_per_s": (1e8, 1e12),
        "device_bytes_per_s": (1e8, 1e12),
        "half_flops_per_s": (1e8, 1e15),
        "single_flops_per_s": (1e8, 1e15),
        "attention_flops_per_s": (1e8, 1e15),
        "decode_bfloat16_bytes_per_s": (1e6, 1e13),
        "decode_float16_bytes_per_s": (NOT_MEASURED, NOT_MEASURED),
        "decode_float8_e4m3fn_bytes_per_s": (1e6, 1e13),
        "copy_latency_s": (0, 1e-2),
        "handover_s": (0, 1e-1),
        "op_s": (1e-8, 1e-3),
        "product_s": (1e-7, 1e-2),
        "compute_lost": (0, 1),
        "op_launch_s": (1e-7, 1e-2),
        "device_nbytes": (1 << 28, 1 << 50),
    }
    for name, (least, most) in bounds.items():
        assert least <= getattr(found, name) <= most, name
    changed = {field.name for field in fields(found) if getattr(found, field.name) != getattr(CPU_PROFILE, field.name)}
    assert changed | {"handover_s"} == bounds.keys() | {"machine"}


class Works:
    """Work with a clock of its own: each measurement takes a second, or more in some rounds."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)

    def seconds(self, work: Any, repeats: int) -> float:
        work()
        return next(self._seconds)

    def repeats(self, work: Any, sample_s: float) -> int:
        return round(sample_s)


def test_a_number_is_the_best_of_its_samples() -> None:
    """Disturbances of a round, here of the first and the third, spoil no number."""
    sent: list[dict[str, float]] = []

    def measuring() -> Any:
        sent.append((yield {"a": (lambda: None, 3.0), "b": (lambda: None, 5.0)}))
        yield {"number": sent[0]["a"]}

    works = Works([9.0, 8.0, 1.5, 2.0, 7.0, 1.0])
    part = bench._Part(measuring, works, works.seconds)  # type: ignore[arg-type]
    for _ in range(3):
        assert part.sample() is part
    assert part.numbers() == {"number": 1.5}
    assert sent == [{"a": 1.5, "b": 1.0}]


@pytest.mark.stress
def test_rounds_cover_all_numbers(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    sample = bench._Part.sample
    monkeypatch.setattr(bench._Part, "sample", lambda part: names.append(part.name) or sample(part))
    rounds: list[int] = []
    bench.measure(backend, lambda: rounds.append(len(names)), ["bfloat16"])
    assert rounds == [2 * num for num in range(1, 6)] + [10 + 5 * num for num in range(1, 6)]
    assert len(rounds) == bench.NUM_STEPS
    assert names[:10] == ["products", "attention"] * 5, "they need no kernel of ours, while these are compiled"
    rest = ["link", "modules", "decoding", "kernels", "sharing"]  # these hardly use the device, so they follow products
    assert names[10:] == rest * 5, "a graph is captured only after all compilations"


def test_a_late_host_does_not_lengthen_times_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is queued on the GPU while the host is late, and the GPU's own clock starts when that delay ends."""
    calls: list[str] = []

    class Gpu(CpuBackend):
        def stamp(self, side: Any) -> Any:
            calls.append("stamp")
            return len(calls)

        def seconds(self, begin: Any, end: Any) -> float:
            return float(end - begin)

    monkeypatch.setattr(bench, "_CPU", bench._CPU._replace(out_width=1024, rows=4))
    monkeypatch.setattr(bench._Bench, "_num_ahead", 3)
    monkeypatch.setattr(bench._Bench, "_bf16_product", lambda _: calls.append("ahead"))
    found = bench._Bench(Gpu())
    work = partial(calls.append, "work")
    assert found.queued_s(work, 2) >= 0
    assert calls == ["work"] * 2, "a CPU computes at once"
    calls.clear()
    found._on_gpu = True
    assert found.queued_s(work, 4) == 5 / 4
    assert calls == ["ahead"] * 3 + ["stamp"] + ["work"] * 4 + ["stamp"]


@pytest.mark.stress
def test_a_number_that_fails_in_a_later_round_is_assumed(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sample = bench._Part.sample
    names: list[str] = []

    def fail(part: bench._Part) -> bench._Part:
        names.append(part.name)
        if names.count("link") == 3 and part.name == "link":
            raise RuntimeError("the link went away")
        return sample(part)

    monkeypatch.setattr(bench._Part, "sample", fail)
    threads = set(threading.enumerate())
    found, complete = bench.measure(backend)
    assert not complete
    assert found.link_bytes_per_s == CPU_PROFILE.link_bytes_per_s
    assert found.op_s != CPU_PROFILE.op_s
    assert names.count("link") == 3
    assert names.count("kernels") == 5
    (record,) = caplog.records
    assert "the link cannot be measured: the link went away" in record.getMessage()
    assert set(threading.enumerate()) == threads


class Count(TorchDispatchMode):
    """Counts kernels."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view and func is not torch.ops.aten._unsafe_view.default
        return func(*args, **(kwargs or {}))


def num_kernels(work: Any) -> int:
    with torch.no_grad(), Count() as count:
        work()
    return count.num


def test_the_number_of_kernels_of_a_block_is_right() -> None:
    block = SampleBlock(torch.device("cpu"))
    x, turn, past = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((1, 1, 64), (1, 1, 1, 16), (1, 4, 15, 16)))
    assert num_kernels(partial(block, x, turn, past)) == SampleBlock.num_kernels


def test_least_times_are_derived_from_sums(backend: CpuBackend) -> None:
    """The fake device: each kernel takes 2 us besides its bytes at 1 TB/s. A product takes 5 us at least. A copy out
    of a stack
    has half of that rate. Products with copied matrices take 10 us besides bytes at a quarter of it."""
    small, large = kernels.SMALL_EXPERTS.nbytes, kernels.LARGE_EXPERTS.nbytes
    copies = {name: 2e-6 + 2 * nbytes / 0.5e12 for name, nbytes in (("small", small), ("large", large))}
    products = {"small": 10e-6 + small / 0.25e12, "large": 10e-6 + large / 0.25e12}
    seconds = {"norms": 200 * 2e-6, "products": 50 * 5e-6, "read": 3 * 2e-6 + 300e6 / 1e12}
    seconds |= {name: kernels.TURNS * copies[name] for name in copies}
    seconds |= {f"{name} multiplied": kernels.TURNS * (copies[name] + products[name]) for name in copies}
    found = kernels.kernel_fields(seconds, 300_000_000, 3)
    want = {"op_s": 2e-6, "product_s": 5e-6, "device_bytes_per_s": 1e12}
    assert found == pytest.approx(want | {"gather_share": 0.5, "stack_s": 10e-6, "stack_share": 0.25})
    on_cpu = {name: s for name, s in seconds.items() if name in kernels.kernel_works(backend, [torch.ones(4, 4)])}
    assert kernels.kernel_fields(on_cpu, 300_000_000, 3) == pytest.approx(want)


@pytest.mark.parametrize(("both_s", "lost"), [(0.010, 0.0), (0.012, 0.5), (0.009, 0.0), (0.020, 1.0)])
def test_what_compute_loses_to_a_copy_is_a_share_of_its_time(both_s: float, lost: float, backend: CpuBackend) -> None:
    """Products take 10 ms alone, and the copy takes 4 ms."""
    measuring = bench._Bench(backend).sharing()
    works = next(measuring)
    assert works.keys() == {"copy", "reads", "both"}
    for work, _ in works.values():
        work()
    assert measuring.send({"copy": 0.004, "reads": 0.010, "both": both_s}) == {"compute_lost": pytest.approx(lost)}


def test_decoding_takes_time_besides_its_bytes() -> None:
    """A launch takes 7 us, or 6 and 9 for other dtypes, and the rates are 2, 1 and 0.5 TB/s."""
    sizes = {"bfloat16": [120_000_000, 30_000_000]}
    sizes |= {"float16": sizes["bfloat16"], "float8_e4m3fn": [60_000_000, 15_000_000]}
    codes = {"bfloat16": (7e-6, 2e12), "float16": (9e-6, 1e12), "float8_e4m3fn": (6e-6, 0.5e12)}
    seconds = {dtype: [begin + nbytes / rate for nbytes in sizes[dtype]] for dtype, (begin, rate) in codes.items()}
    rates = {decode_rate(dtype): sizes[dtype][0] / (found[0] - 7e-6) for dtype, found in seconds.items()}
    assert rates["decode_bfloat16_bytes_per_s"] == pytest.approx(2e12)
    assert bench.decoding_parts(seconds, sizes) == pytest.approx({"decoding_s": 7e-6} | rates)
    whole = {dtype: found[:1] for dtype, found in seconds.items()}
    rates = {decode_rate(dtype): sizes[dtype][0] / found for dtype, (found,) in whole.items()}
    most = {dtype: nbytes[:1] for dtype, nbytes in sizes.items()}
    assert bench.decoding_parts(whole, most) == pytest.approx({"decoding_s": 0.0} | rates)


def test_two_sizes_are_decoded_over_the_same_weight(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_CPU", bench._CPU._replace(out_width=1024, decoded_rows=(64, 16)))
    found = bench._Bench(backend, ELEMENTS)
    before = [weight.clone() for weight in found._weights]
    numbers = bench._Part(found.decoding, found, found.seconds).sample().numbers()
    assert numbers.keys() == {"decoding_s", *RATES}
    assert min(numbers[rate] for rate in RATES) > 1e6
    assert all(torch.equal(weight, other) for weight, other in zip(found._weights, before, strict=True))


@pytest.mark.parametrize(("all_s", "part_s"), [(3.0, 0.2), (3.0, 3.0), (3.0, 9.0), (9.0, 1.0)])
def test_a_slow_host_or_noise_makes_no_rate_infinite(all_s: float, part_s: float) -> None:
    seconds = {"bfloat16": (all_s, part_s), "float16": (all_s, part_s), "float8_e4m3fn": (8.0, part_s)}
    found = bench.decoding_parts(seconds, dict.fromkeys(ELEMENTS, (16, 4)))
    assert 0 <= found["decoding_s"] <= min(all_s, 8.0) / 4
    assert all(16 / s <= found[decode_rate(dtype)] <= 16 / s * 4 / 3 for dtype, (s, _) in seconds.items())


def test_the_number_of_kernels_equals_the_divisor_of_their_time(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = kernels.kernel_works(backend, [torch.ones(4, 4)])
    assert {name: num_kernels(work) for name, work in works.items()} == {
        "norms": kernels.NUM_NORMS * kernels.NUM_IN_NORM,
        "products": kernels.NUM_PRODUCTS,
        "read": 1,
    }
    monkeypatch.setattr(kernels, "SMALL_EXPERTS", kernels.PickedMatrices(2, 3, 4))
    monkeypatch.setattr(kernels, "LARGE_EXPERTS", kernels.PickedMatrices(1, 6, 4))
    weight, other = torch.arange(96.0).view(16, 6), torch.zeros(16, 6)
    picking = dict(kernels.picked_products(weight, other))
    num = {name: num_kernels(work) for name, work in picking.items()}
    assert num == {name: kernels.TURNS * (1 + ("multiplied" in name)) for name in picking}
    for name, (num_picked, rows) in {"small": (2, 3), "large": (1, 6)}.items():
        stack = weight.view(-1, rows, 4)
        places = torch.arange(num_picked) * (len(stack) // num_picked)
        picking[name]()
        copied = other.view(-1, rows, 4)[:num_picked]
        assert torch.equal(copied, stack[places + kernels.TURNS - 1]), "another matrix each time"


def test_it_is_measured_once(backend: CpuBackend, measured: list[Profile], cache: Path) -> None:
    assert profile.load_profile(CPU) is None
    first = profile.profile_for(backend)
    assert profile.profile_for(backend) == first == measured[0]
    assert len(measured) == 1
    assert profile.profile_for(backend, anew=True) == measured[1] != first
    assert profile.load_profile(CPU) == measured[1]
    assert len(list(cache.iterdir())) == 1


def test_the_measured_numbers_are_logged(
    backend: CpuBackend, measured: list[Profile], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "weightstream"):
        profile.profile_for(backend)
    assert "measured in" in caplog.text
    assert "link_bytes_per_s=7000000000.0" in caplog.text


@pytest.mark.parametrize("what", ["driver", "device", "uuid", "capability", "torch", "cuda", "machine", "cores"])
def test_another_driver_device_or_software_is_measured_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "facts", lambda _: FACTS)
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.95.05")
    profile.save_profile(GPU, MEASURED)
    assert profile.load_profile(GPU) == MEASURED
    match what:
        case "driver":
            monkeypatch.setattr(nvml, "driver_version", lambda: "590.1.0")
        case "torch":
            monkeypatch.setattr(torch, "__version__", "9.9.9")
        case "cuda":
            monkeypatch.setattr(torch.version, "cuda", "99.9")
        case "machine":
            monkeypatch.setattr(machine, "machine_id", lambda: "another")
        case "cores":
            monkeypatch.setattr("os.cpu_count", lambda: 999)
        case _:
            other = {"device": "name"}.get(what, what)
            monkeypatch.setattr(cuda, "facts", lambda _: replace(FACTS, **{other: "another"}))
    assert profile.load_profile(GPU) is None


def test_another_number_of_threads_is_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    profile.save_profile(CPU, MEASURED)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    assert profile.load_profile(CPU) is None


def broken(text: str, what: str) -> str:
    entry = json.loads(text)
    match what:
        case "empty":
            return ""
        case "cut short":
            return text[: len(text) // 2]
        case "no object":
            return "[1, 2]"
        case "a rate of zero":
            entry["link_bytes_per_s"] = 0
        case "not a number":
            entry["handover_s"] = math.nan
        case "another format":
            entry = {"profile": entry}
    return json.dumps(entry)


@pytest.mark.parametrize(
    "what", ["empty", "cut short", "no object", "a rate of zero", "not a number", "another format"]
)
def test_a_broken_file_is_reported_once_and_written_again(
    what: str, backend: CpuBackend, measured: list[Profile], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile.save_profile(CPU, MEASURED)
    (path,) = cache.iterdir()
    path.write_text(broken(path.read_text(), what))
    assert profile.profile_for(backend) == measured[0]
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()
    caplog.clear()
    assert profile.profile_for(backend) == measured[0]
    assert len(measured) == 1
    assert not caplog.records


def test_a_folder_that_cannot_be_written_is_no_error(
    backend: CpuBackend, measured: list[Profile], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file in the place of the folder")
    with caplog.at_level(logging.INFO, "weightstream"):
        assert profile.profile_for(backend) == measured[0]
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 3
    assert "measures again" in caplog.text


def test_a_failed_write_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile.save_profile(CPU, MEASURED)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        profile.save_profile(CPU, replace(MEASURED, link_bytes_per_s=1e9))
    assert profile.load_profile(CPU) == MEASURED
    assert len(list(cache.iterdir())) == 1


def test_a_number_that_cannot_be_measured_is_assumed_and_not_stored(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> Any:
        raise torch.OutOfMemoryError("none left")
        yield

    def products(_: object) -> Any:
        yield {}
        yield {"half_flops_per_s": 3e9}

    monkeypatch.setattr(bench._Bench, "attention", fail)
    monkeypatch.setattr(bench._Bench, "products", products)
    found = profile.profile_for(backend)
    assert found.half_flops_per_s == 3e9
    assert found.attention_flops_per_s == CPU_PROFILE.attention_flops_per_s
    assert found.link_bytes_per_s != CPU_PROFILE.link_bytes_per_s
    (record,) = caplog.records
    assert "none left" in record.getMessage()
    assert found.load == 0.25
    assert profile.load_profile(CPU) is None


def test_without_any_measurement_the_backends_assumptions_are_used(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a clock that stands still")

    monkeypatch.setattr(bench, "measure", fail)
    assert profile.profile_for(backend) is backend.profile
    assert "clock that stands still" in caplog.text


def test_a_profile_is_json_both_ways() -> None:
    found = replace(MEASURED, unit_s=(0.1, 0.2), handover_s=1 / 3)
    assert profile.from_json(profile.to_json(found)) == found
    assert profile.from_json('{"link_bytes_per_s": 5e9}') == Profile(link_bytes_per_s=5e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"link_gbps": 3}', "link_gbps"),
        ('{"decode2_bytes_per_s": 1e12}', "knows no decode2_bytes_per_s: measure again on that machine"),
        ('{"link_bytes_per_s": 0}', "link_bytes_per_s is 0"),
        ('{"handover_s": -1}', "handover_s is -1"),
        ('{"disk_bytes_per_s": Infinity}', "disk_bytes_per_s is inf"),
        ('{"op_s": NaN}', "op_s is nan"),
        ('{"unit_s": [0.1, -2]}', "unit_s is -2"),
        ('{"op_s": "soon"}', "op_s"),
        ('{"load": -2}', "load is -2"),
        ("[]", "object"),
        ("{", "JSON"),
    ],
)
def test_an_invalid_profile_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="not a profile") as error:
        profile.from_json(text)
    assert said in str(error.value)


def test_an_older_profile_has_no_time_of_measurement() -> None:
    found = profile.from_json('{"machine": "a machine"}')
    assert (found.measured_at, found.load) == (0.0, -1.0)


def test_a_profile_has_its_time_of_measurement_and_the_load_of_others(
    backend: CpuBackend, measured: list[Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cpu_load", lambda: 0.75)
    assert profile.profile_for(backend) == replace(measured[0], load=0.75)
    monkeypatch.setattr(machine, "cpu_load", lambda: 0.0)
    assert profile.profile_for(backend).load == 0.75, "it is stored"


def test_the_load_of_a_gpu_comes_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "facts", lambda _: FACTS)
    monkeypatch.setattr(nvml, "gpu_load", lambda address: 0.5 if address == FACTS.pci else -1.0)
    assert profile._load(GPU) == 0.5


def test_the_load_of_a_cpu_is_that_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("psutil.cpu_count", lambda: 4)
    clocks = {"perf_counter": [0.0, 0.1], "process_time": [5.0, 5.1]}
    for name, values in clocks.items():
        monkeypatch.setattr(machine.time, name, partial(next, iter(values)))
    monkeypatch.setattr("psutil.cpu_percent", lambda seconds: 75.0)
    assert machine.cpu_load() == pytest.approx(0.5), "this process used one of four cores"


@pytest.mark.parametrize("changed", [{"measured_at": 1.0, "load": 0.0}, {"load": 0.5}, {"load": -1.0}])
def test_a_doubted_profile_is_measured_again(
    changed: dict[str, float], backend: CpuBackend, measured: list[Profile], caplog: pytest.LogCaptureFixture
) -> None:
    found = profile.profile_for(backend)
    profile.save_profile(CPU, replace(found, measured_at=time.time(), load=0.1))
    profile.doubt(CPU)
    assert profile.load_profile(CPU) is not None, "it is new, and of an idle machine"
    profile.save_profile(CPU, replace(found, **changed))
    with caplog.at_level(logging.INFO, "weightstream"):
        profile.doubt(CPU)
    assert "the next load measures it again" in caplog.text
    assert profile.load_profile(CPU) is None
    assert profile.profile_for(backend) == measured[1]
    assert len(measured) == 2


@pytest.mark.parametrize("why", ["nothing is kept", "it cannot be removed", "no driver"])
def test_a_doubt_never_raises(
    why: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(why) if why == "it cannot be removed" else RuntimeError(why)

    if why == "it cannot be removed":
        monkeypatch.setattr(Path, "unlink", fail)
    elif why == "no driver":
        monkeypatch.setattr(profile, "_path", fail)
    if why == "it cannot be removed":
        profile.save_profile(CPU, Profile())
    with caplog.at_level(logging.INFO, "weightstream"):
        profile.doubt(CPU)
    assert (why in caplog.text) is (why != "nothing is kept")
    assert [record.levelno for record in caplog.records] == [logging.INFO] * (why != "nothing is kept")


# -- the first use -----------------------------------------------------------------------------------------------------


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Future[str | None]]]:
    """A GPU whose trials start here, and end when a test ends them."""
    found: list[Future[str | None]] = []

    def prepare(_: object, dtype: str, **__: object) -> Future[str | None]:
        found.append(found[0] if found else Future())
        return found[-1]

    monkeypatch.setattr(coding, "prepare", prepare)
    monkeypatch.setattr(cuda, "facts", lambda _: FACTS)
    coding._available.cache_clear()
    yield found
    coding._available.cache_clear()
    for trial in {id(trial): trial for trial in found}.values():
        if not trial.done():
            trial.set_result(None)


@pytest.mark.parametrize("uses_codes", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_kernels_are_prepared_if_they_will_be_needed(
    uses_codes: bool, is_kept: bool, trials: list[Future[str | None]]
) -> None:
    if is_kept:
        profile.save_profile(GPU, MEASURED)
    dtypes = ["float16"] if uses_codes else []
    profile.prepare_decoding(CPU, dtypes)
    assert not trials
    profile.prepare_decoding(GPU, dtypes)
    assert bool(trials) is uses_codes


def test_kernels_that_are_ready_are_not_reported(
    trials: list[Future[str | None]], caplog: pytest.LogCaptureFixture
) -> None:
    profile.prepare_decoding(GPU, ["bfloat16"])
    trials[0].set_result(None)
    with caplog.at_level(logging.INFO, "weightstream"):
        assert profile.kernels_run(GPU, ["bfloat16"])
    assert not caplog.records


def test_slow_compilation_is_reported_once(
    trials: list[Future[str | None]],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_NOTICED_S", 0.01)
    profile.save_profile(GPU, MEASURED)
    with caplog.at_level(logging.INFO, "weightstream"):
        profile.prepare_decoding(GPU, ["bfloat16"])
        ends = threading.Timer(0.2, trials[0].set_result, ["no"])
        ends.start()
        assert [profile.kernels_run(GPU, ["bfloat16"]) for _ in range(3)] == [False] * 3
    ends.join()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "preparing kernels for bfloat16 on cuda:0" in caplog.messages[0]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.usefixtures("trials")
def test_a_measurement_is_announced_at_once(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If the log does not show INFO, the line is on stderr, even if that is not a terminal."""
    for _ in range(2):
        profile.prepare_decoding(torch.device(device), ())
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"weightstream: no profile of {device} yet, or an outdated one: measuring it" in said
    profile.save_profile(torch.device(device), MEASURED)
    profile._say_unmeasured.cache_clear()
    profile.prepare_decoding(torch.device(device), ())
    assert not capsys.readouterr().err


def test_kernels_are_compiled_during_other_preparations(
    trials: list[Future[str | None]], measured: list[Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "gpu_load", lambda _: 0.5)
    backend: Any = SimpleNamespace(device=GPU, profile=CPU_PROFILE, pinning=nullcontext())
    assert profile.profile_for(backend).load == 0.5
    assert not trials, "nothing will be decoded"
    assert profile.profile_for(backend, ["float16", "bfloat16"], anew=True).load == 0.5
    assert len(trials) == 2
    assert not trials[0].done(), "only decoding waits for them"
    assert len(measured) == 2


def test_missing_rates_of_a_stored_profile_are_measured_for_the_requested_dtypes(
    trials: list[Future[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if their kernels run. The host's time for them is measured as well."""
    asked: list[list[str]] = []

    def measure_decoding(_: object, __: object, dtypes: list[str]) -> dict[str, float]:
        asked.append(dtypes)
        return dict.fromkeys(map(decode_rate, dtypes), 5e9) | {"decoding_s": 1e-6, "decoding_launch_s": 2e-6}

    monkeypatch.setattr(bench, "measure_decoding", measure_decoding)
    backend: Any = SimpleNamespace(device=GPU, profile=CPU_PROFILE)
    lacks = replace(MEASURED, **dict.fromkeys((decode_rate("float16"), decode_rate("bfloat16")), NOT_MEASURED))
    profile.save_profile(GPU, lacks)
    assert profile.profile_for(backend) == lacks
    assert profile.profile_for(backend, ["float8_e4m3fn"]) == lacks
    assert not trials
    threading.Timer(0.1, lambda: trials[0].set_result(None)).start()
    found = profile.profile_for(backend, ["float8_e4m3fn", "float16"])
    assert asked == [["float16"]]
    wanted = {"decode_float16_bytes_per_s": 5e9, "decoding_s": 1e-6, "decoding_launch_s": 2e-6}
    assert found == replace(lacks, **wanted) == profile.load_profile(GPU)
    assert profile.profile_for(backend, ["float16"]) == found
    assert len(asked) == 1


def test_no_rate_is_measured_if_kernels_do_not_run(trials: list[Future[str | None]]) -> None:
    backend: Any = SimpleNamespace(device=GPU, profile=CPU_PROFILE)
    lacks = replace(MEASURED, decode_float16_bytes_per_s=NOT_MEASURED)
    profile.save_profile(GPU, lacks)
    threading.Timer(0.1, lambda: trials[0].set_result("no")).start()
    assert profile.profile_for(backend, ["float16"]) == lacks


def test_measuring_is_reported_once(
    backend: CpuBackend, measured: list[Profile], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each measurement has one line, whether it was announced before or not."""
    with caplog.at_level(logging.INFO, "weightstream"):
        profile.prepare_decoding(CPU, (), progress=False)
        for _ in range(2):
            profile.profile_for(backend, progress=False)
        assert "".join(caplog.messages).count("measuring") == 1
        profile.profile_for(backend, anew=True, progress=False)
        assert "".join(caplog.messages).count("measuring") == 2
        profile._path(CPU).write_text(profile.to_json(replace(MEASURED, measured_at=0.0)))
        profile.doubt(CPU)
        profile.profile_for(backend, progress=False)
        assert "".join(caplog.messages).count("measuring") == 3
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("is_terminal", "asked", "shown"),
    [(True, None, True), (True, True, True), (True, False, False), (False, None, False), (False, True, False)],
)
@pytest.mark.parametrize("total", [None, 3])
def test_a_bar_is_only_for_terminals(
    is_terminal: bool,
    asked: bool | None,
    shown: bool,
    total: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream := Terminal() if is_terminal else io.StringIO())
    threads = set(threading.enumerate())
    with caplog.at_level(logging.INFO, "weightstream"), progress.reporting("measuring it", asked, total) as advance:
        assert ("measuring it" in stream.getvalue()) is shown
        for _ in range(3):
            advance()
        assert set(threading.enumerate()) == threads
    assert caplog.messages == ([] if shown else ["measuring it"])
    assert bool(stream.getvalue()) is shown


def test_an_error_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with pytest.raises(ZeroDivisionError), progress.reporting("measuring it"):
        raise ZeroDivisionError
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1, (
        "the cursor is visible again"
    )


# -- a CPU decodes on request only ---------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records how often decoding was measured, which takes no time here."""
    found: list[int] = []

    def measure_decoding(_: object, __: object, dtypes: list[str]) -> dict[str, float]:
        found.append(1)
        return dict.fromkeys(map(decode_rate, dtypes), 5e6) | {"decoding_s": 0.0}

    monkeypatch.setattr(bench, "measure_decoding", measure_decoding)
    return found


def linears(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64, dtype=dtype) for _ in range(4)])


@pytest.mark.few(1)
@pytest.mark.usefixtures("own_profile")
@pytest.mark.parametrize("settings", [{}, {"codec": "none"}], ids=str)
def test_a_cpu_measures_no_decoding_that_no_plan_uses(
    settings: dict[str, Any], encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench._Bench, "decoding", lambda _: pytest.fail("decoding is measured"))
    monkeypatch.setattr(bench, "_SAMPLE_S", 1e-4)
    with weightstream.offload(linears(), device="cpu", device_budget="20KiB", **settings) as streamer:
        assert streamer.plan.budget
    kept = profile.load_profile(CPU)
    assert kept is not None
    assert kept.measured_at > 0
    assert {getattr(kept, rate) for rate in RATES} == {NOT_MEASURED}
    assert not encoded


@pytest.mark.usefixtures("own_profile")
def test_decoding_is_measured_when_it_is_first_requested(encoded: list[int]) -> None:
    """For all dtypes."""
    profile.save_profile(CPU, replace(MEASURED, **dict.fromkeys(RATES, NOT_MEASURED)))
    for num, dtype in enumerate((torch.bfloat16, torch.float16), 1):
        for _ in range(2):
            with weightstream.offload(linears(dtype), device="cpu", device_budget="64KiB", codec="compressed"):
                pass
            assert encoded == [1] * num
    with weightstream.offload(linears(torch.float32), device="cpu", device_budget="64KiB", codec="compressed"):
        assert encoded == [1] * 2
    kept = profile.load_profile(CPU)
    assert kept is not None
    assert [getattr(kept, rate) for rate in RATES] == [5e6, 5e6, NOT_MEASURED]
    assert kept.link_bytes_per_s == MEASURED.link_bytes_per_s
    with weightstream.offload(linears(), device="cpu", device_budget="20KiB"):
        assert encoded == [1] * 2


@pytest.mark.usefixtures("own_profile")
def test_rates_of_decoding_that_cannot_be_measured_are_assumed(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bench, "measure_decoding", lambda *_: 1 / 0)
    lacks = replace(MEASURED, **dict.fromkeys(RATES, NOT_MEASURED))
    found = profile.with_decoding(backend, lacks, ["float16"])
    assert found == replace(lacks, decode_float16_bytes_per_s=backend.profile.decode_float16_bytes_per_s)
    assert "decoding cannot be measured (division by zero): its speed is assumed" in caplog.text


def test_only_decoding_is_measured(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_CPU", bench._CPU._replace(out_width=1024, decoded_rows=(16,)))
    monkeypatch.setattr(bench, "_SAMPLE_S", 1e-4)
    rounds: list[int] = []
    found = bench.measure_decoding(backend, lambda: rounds.append(1), ["float16", "bfloat16"])
    assert found.keys() == {"decoding_s", "decode_bfloat16_bytes_per_s", "decode_float16_bytes_per_s"}
    assert min(found[rate] for rate in RATES[:2]) > 1e6
    assert len(rounds) == bench.NUM_ROUNDS
