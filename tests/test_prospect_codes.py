"""What planners are told of codes: sizes from weights, files and shapes; and plans and screens of real models."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import Result
from test_plan_cli import MACHINE, SHAPE
from torch import nn
from typer.testing import CliRunner

import weightstream
from weightstream import prospects
from weightstream.cli import app
from weightstream.codec import reference
from weightstream.codec.estimate import ASSUMED_BITS
from weightstream.codec.format import BITS, ELEMENTS, Layout, can_code
from weightstream.config import OffloadConfig
from weightstream.measure import profile as profiles
from weightstream.plan.check import prove
from weightstream.prospects import can_decode, sizes_of
from weightstream.runtime.cpu import CpuBackend
from weightstream.runtime.weights import groups

transformers = pytest.importorskip("transformers")

KIB = 1024
WIDTH = 256


class Several(nn.Module):
    """Weights of every kind: that can be coded, and that cannot."""

    def __init__(self) -> None:
        super().__init__()
        for name in ELEMENTS:
            self.register_parameter(f"of_{name}", nn.Parameter(_random(name), requires_grad=False))
        self.wide = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("kept", _random("bfloat16"))
        self.table = nn.Parameter(_random("bfloat16"))
        self.mixed = nn.Parameter(_random("bfloat16"))
        self.other = nn.Parameter(self.mixed.data[:1].view(torch.float16))  # the same bytes as another dtype
        self.tied = nn.Parameter(_random("bfloat16"))
        self.head = nn.Parameter(self.tied.data.t())


def _random(dtype: str) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))


def test_parameters_of_floats_can_be_coded() -> None:
    by_alias = groups(Several())
    found = sizes_of(by_alias, {}, {}, frozenset({"table"}))
    sizes = {alias: codes for alias, codes in found.items() if codes}
    assert sizes.keys() == {*(f"of_{name}" for name in ELEMENTS), "tied"}
    for alias, codes in sizes.items():
        dtype = by_alias[alias].members[0].spec.dtype
        assert set(codes) == {bits for bits in BITS if can_code(dtype, bits)}
        for bits, nbytes in codes.items():
            layout, _ = reference.encode(by_alias[alias].home, dtype, bits)
            assert layout.nbytes == nbytes < by_alias[alias].nbytes


def test_weights_that_are_not_there_are_assumed() -> None:
    by_alias = groups(Several().to("meta"), allow_meta=True)
    codes = sizes_of(by_alias, {}, {}, frozenset())
    for name in ELEMENTS:
        for bits, share in ASSUMED_BITS[name].items():
            assert 0 <= codes[f"of_{name}"][bits] - share * WIDTH**2 / 8 < 512
    with torch.device("meta"):
        little = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
    (sizes,) = sizes_of(groups(little, allow_meta=True), {}, {}, frozenset()).values()
    for bits, nbytes in sizes.items():
        assert nbytes == Layout(dtype="bfloat16", bits=bits, count=15, num_escapes=0).nbytes, "a tile is whole"


def test_what_is_coded_in_a_file_has_one_form() -> None:
    layout = Layout(dtype="bfloat16", count=WIDTH**2, num_escapes=77)
    found = sizes_of(groups(Several()), {"of_bfloat16": layout}, {}, frozenset())
    assert found["of_bfloat16"] == {4: layout.nbytes}
    assert found["tied"].keys() == set(BITS)


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [
        ({"device_budget": 10**9, "codec": "auto"}, False),
        ({"device_budget": 10**6, "codec": "none"}, False),
        ({"device_budget": 10**9, "codec": "compressed"}, True),
    ],
)
def test_weights_are_read_where_a_plan_depends_on_them(
    settings: dict[str, Any], is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(prospects, "sizes_of", lambda *_: asked.append(1) or {})
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(8)])
    weightstream.offload(model, device="cpu", **settings).remove()
    assert bool(asked) == is_asked


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, False), ({"codec": "compressed"}, True), ({"codec": "none"}, False), ({"cpu_offload_gb": 1}, False)],
)
def test_the_cpu_decodes_on_request(settings: dict[str, Any], expected: bool) -> None:
    backend = CpuBackend()
    assert can_decode(backend, OffloadConfig.from_kwargs(**settings)) is expected
    backend.close()


@pytest.mark.parametrize(
    ("settings", "dtypes", "expected"),
    [
        ({"device_budget": 64 * KIB}, ["float16"], {"float16"}),
        ({"device_budget": 64 * KIB}, ["bfloat16", "float32"], {"bfloat16"}),
        ({"device_budget": 64 * KIB}, ["float32"], set()),
        ({"device_budget": 64 * KIB, "codec": "none"}, ["bfloat16"], set()),
        ({"device_budget": 1 << 30}, ["bfloat16"], set()),
        ({"device_budget": 1 << 30, "codec": "compressed"}, ["bfloat16"], {"bfloat16"}),
        ({}, ["bfloat16"], set()),
        ({"cpu_offload_gb": 1}, ["bfloat16"], set()),
    ],
)
def test_kernels_are_compiled_early_for_what_a_plan_may_code(
    settings: dict[str, Any], dtypes: list[str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with 1 GiB free; on a CPU none are."""
    monkeypatch.setattr(prospects.cuda, "memory", lambda _: (1 << 30, 2 << 30))
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=getattr(torch, dtype)) for dtype in dtypes])
    config = OffloadConfig.from_kwargs(**settings)
    gpu, by_alias = SimpleNamespace(device=torch.device("cuda", 0)), groups(model)
    assert prospects.dtypes_to_code(by_alias, gpu, config) == expected  # type: ignore[arg-type]
    backend = CpuBackend()
    assert not prospects.dtypes_to_code(by_alias, backend, config)
    backend.close()


@pytest.mark.parametrize(
    ("dtype", "settings", "expected"),
    [
        ("auto", {}, {"bfloat16"}),
        (torch.float16, {}, {"float16"}),
        ("float16", {}, {"float16"}),
        ("float32", {}, set()),
        ("auto", {"codec": "none"}, set()),
    ],
)
def test_kernels_are_compiled_early_for_the_dtype_of_a_load(
    dtype: Any, settings: dict[str, Any], expected: set[str]
) -> None:
    assert prospects.dtypes_to_load(dtype, OffloadConfig.from_kwargs(**settings)) == expected


@pytest.mark.parametrize(("dtype", "is_asked"), [("bfloat16", True), ("float32", False)])
def test_no_kernel_is_waited_for_that_has_nothing_to_decode(
    dtype: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(prospects, "can_decode", lambda *about: asked.append(about[-1]) or False)
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=getattr(torch, dtype)) for _ in range(8)])
    weightstream.offload(model, device="cpu", device_budget=10**6, codec="compressed").remove()
    assert asked == [frozenset({"bfloat16"})] * is_asked


def test_operators_are_tried_when_nothing_compiles_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are of the same device: a trial of `example_inputs` waits for the kernels."""
    calls: list[str] = []
    foreseen = prospects.foreseen
    monkeypatch.setattr(prospects, "can_decode", lambda *_: calls.append("kernels") or True)
    monkeypatch.setattr(prospects, "foreseen", lambda *args: calls.append("trial") or foreseen(*args))
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(8)])
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    weightstream.offload(model, device="cpu", device_budget=10**6, codec="compressed", example_inputs=x).remove()
    assert calls == ["kernels", "trial"]


# -- plans of models and checkpoints --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    small = SHAPE | {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "vocab_size": 304,
        "num_key_value_heads": 8,
    }
    shape = {name: value for name, value in small.items() if name not in ("architectures", "model_type", "dtype")}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packs") / "coded"
    done = CliRunner().invoke(app, ["pack", str(folder), str(path), "--codec", "compressed"])
    assert done.exit_code == 0, done.output
    return path


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", ["900KiB", "2MiB", "16MiB"])
@pytest.mark.parametrize("codec", ["compressed", "compressed"])
def test_a_packed_checkpoint_is_planned_as_it_is_loaded(packed: Path, codec: str, budget: str) -> None:
    """Its coded bytes are known from the headers, and there is no other form of them."""
    settings = {"device": "cpu", "device_budget": budget, "codec": codec}
    plan = weightstream.plan_model(packed, **settings)
    prove(plan)
    assert {bits for bits, _ in plan.manifest.codes.values()} == {3}
    loaded = weightstream.from_pretrained(packed, progress=False, **settings)
    try:
        assert loaded.weightstream.plan == plan
    finally:
        loaded.weightstream.remove()


def test_codes_of_a_checkpoint_are_assumed(folder: Path) -> None:
    plan = weightstream.plan_model(folder, device="cpu", device_budget="2MiB", codec="compressed")
    codes = plan.manifest.codes
    assert "model.layers.0.mlp.up_proj.weight" in codes
    assert "model.embed_tokens.weight" not in codes
    assert all(bits == 4 and n < plan.manifest.spans[alias] for alias, (bits, n) in codes.items())
    assert weightstream.plan_model(folder, device="cpu", device_budget="2MiB").manifest.codes == {}, "not asked for"


# -- screens -------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    machine = tmp_path / "profile.json"
    machine.write_text(profiles.to_json(MACHINE))

    def run(*flags: str) -> dict[str, Any]:
        given = ["plan", str(folder), "--profile", str(machine), "--host-budget", "1GiB", "--device-budget", "2MiB"]
        done: Result = CliRunner().invoke(app, [*given, "--json", *flags])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.mark.stress
def test_the_flag_chooses_the_code(plan: Callable[..., dict[str, Any]]) -> None:
    found = {codec: plan("--codec", codec) for codec in ("none", "compressed", "compressed", "auto")}
    assert [found[codec]["code"] for codec in ("none", "compressed", "compressed")] == [None, "small", "fast"]
    assert found["none"]["nbytes"] == found["none"]["held_nbytes"] == found["compressed"]["nbytes"]
    assert found["compressed"]["held_nbytes"] < found["compressed"]["held_nbytes"] < found["none"]["nbytes"]
    assert found["compressed"]["buffer_nbytes"] > 0 == found["none"]["buffer_nbytes"]
    assert found["compressed"]["decode_s"] > 0 == found["none"]["decode_s"]
    assert found["auto"] == plan()


@pytest.mark.stress
def test_bench_has_the_raw_link_as_its_floor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = importlib.import_module("weightstream.measure.bench")
    sizes: list[int] = []
    plain = bench.copies_s
    monkeypatch.setattr(bench, "copies_s", lambda backend, s, seconds: sizes.extend(s) or plain(backend, s, seconds))
    flags = ["--device", "cpu", "--device-budget", "2MiB", "--codec", "compressed", "--seconds", "0.05", "--context", "8"]
    done = CliRunner().invoke(app, ["bench", str(folder), *flags, "--json"])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert row["equal"] is True
    assert row["code"] == "small"
    assert [system["name"] for system in row["systems"]] == ["raw link floor", "offloaded", "resident"]
    assert row["step_nbytes"] < 0.8 * sum(sizes), "the floor moves what the step streams as it is without a code"
    assert sum(sizes) < row["nbytes"]
    assert row["whole_floor_s"] == row["nbytes"] / row["link_bytes_per_s"]
    assert row["systems"][2]["weights_nbytes"] == row["nbytes"]


def test_doctor_tells_how_fast_codes_are() -> None:
    backend = CpuBackend()
    backend.profile = MACHINE
    finding = importlib.import_module("weightstream.measure.findings")._codec(backend)
    backend.close()
    assert finding.text.startswith("lossless: decoded at 1.1 TB/s (dense), 1.2 TB/s (small), 1.7 TB/s (fast)")
    assert "--codec small" in finding.text
    assert finding.value == {"dense": 1.15e12, "small": 1.2e12, "fast": 1.7e12}
    assert "a launch" not in finding.text


def test_doctor_tells_what_a_launch_takes_where_codes_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = importlib.import_module("weightstream.measure.findings")
    monkeypatch.setattr(findings.coding, "why_not", lambda device: None)
    backend = SimpleNamespace(device=torch.device("cuda", 0), profile=replace(MACHINE, decoding_s=7.46e-6))
    assert findings._codec(backend).text.endswith("1.7 TB/s (fast), beside 7.46 us a launch")
