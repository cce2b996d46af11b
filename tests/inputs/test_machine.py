"""The planner's inputs for compression: sizes from weights, files and shapes; plans and screens of real models."""

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
from weightstream.cli import app
from weightstream.codec import reference
from weightstream.codec.estimate import ASSUMED_BITS
from weightstream.codec.format import ELEMENTS, Layout
from weightstream.inputs import gathering, machine
from weightstream.inputs.gathering import Gatherer, sizes_of
from weightstream.inputs.machine import can_decompress
from weightstream.measure import checks
from weightstream.measure import profile as profiles
from weightstream.plan.check import prove
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.weights.alias_groups import groups
from weightstream.settings.config import OffloadConfig

transformers = pytest.importorskip("transformers")

KIB = 1024
WIDTH = 256


class Several(nn.Module):
    """Weights of every kind: compressible ones, and others."""

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


def test_float_parameters_can_be_compressed() -> None:
    by_alias = groups(Several())
    sizes = sizes_of(by_alias, {}, {}, frozenset({"table"}))
    assert sizes.keys() == {*(f"of_{name}" for name in ELEMENTS), "tied"}
    for alias, nbytes in sizes.items():
        layout, _ = reference.encode(by_alias[alias].home, by_alias[alias].members[0].spec.dtype)
        assert layout.nbytes == nbytes < by_alias[alias].nbytes


def test_missing_weights_have_assumed_sizes() -> None:
    by_alias = groups(Several().to("meta"), allow_meta=True)
    codes = sizes_of(by_alias, {}, {}, frozenset())
    for name in ELEMENTS:
        assert 0 <= codes[f"of_{name}"] - ASSUMED_BITS[name] * WIDTH**2 / 8 < 512
    with torch.device("meta"):
        little = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
    (nbytes,) = sizes_of(groups(little, allow_meta=True), {}, {}, frozenset()).values()
    assert nbytes == Layout(dtype="bfloat16", count=15, num_escapes=0).nbytes, "tiles are whole"


def test_the_size_of_compressed_weights_in_a_file_is_known() -> None:
    layout = Layout(dtype="bfloat16", count=WIDTH**2, num_escapes=76)
    found = sizes_of(groups(Several()), {"of_bfloat16": layout}, {}, frozenset())
    assert found["of_bfloat16"] == layout.nbytes < found["tied"]


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [
        ({"device_budget": 10**9, "codec": "auto"}, False),
        ({"device_budget": 10**6, "codec": "none"}, False),
        ({"device_budget": 10**9, "codec": "compressed"}, True),
    ],
)
def test_weights_are_read_only_if_a_plan_depends_on_them(
    settings: dict[str, Any], is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(gathering, "sizes_of", lambda *_: asked.append(1) or {})
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(8)])
    weightstream.offload(model, device="cpu", **settings).remove()
    assert bool(asked) == is_asked


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, False), ({"codec": "compressed"}, True), ({"codec": "none"}, False), ({"cpu_offload_gb": 1}, False)],
)
def test_the_cpu_decodes_on_request(settings: dict[str, Any], expected: bool) -> None:
    backend = CpuBackend()
    assert can_decompress(backend, OffloadConfig.from_kwargs(**settings), ["bfloat16"]) is expected
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
def test_kernels_are_compiled_early_for_dtypes_that_a_plan_may_compress(
    settings: dict[str, Any], dtypes: list[str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with 1 GiB free. On a CPU rates are measured only on request."""
    monkeypatch.setattr(machine.cuda, "memory", lambda _: (1 << 30, 2 << 30))
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=getattr(torch, dtype)) for dtype in dtypes])
    config = OffloadConfig.from_kwargs(**settings)
    gpu, by_alias = SimpleNamespace(device=torch.device("cuda", 0)), groups(model)
    assert machine.dtypes_to_compress(by_alias, gpu, config) == expected  # type: ignore[arg-type]
    backend = CpuBackend()
    assert machine.dtypes_to_compress(by_alias, backend, config) == (
        expected if config.codec == "compressed" else set()
    )
    codable = {dtype for dtype in dtypes if dtype in ELEMENTS}
    among = machine.dtypes_to_compress(by_alias, gpu, config, among=True)  # type: ignore[arg-type]
    assert among == (codable if config.uses_codes else set()), "all ranks know the same rates before they plan"
    backend.close()


@pytest.mark.parametrize(
    ("dtype", "nbytes", "settings", "expected"),
    [
        (torch.bfloat16, 2 << 30, {}, {"bfloat16"}),
        (torch.float16, 2 << 30, {}, {"float16"}),
        (torch.float32, 2 << 30, {}, set()),
        (torch.bfloat16, 2 << 30, {"codec": "none"}, set()),
        (torch.bfloat16, 1 << 20, {}, set()),
        (torch.bfloat16, 1 << 20, {"device_budget": 1 << 19}, {"bfloat16"}),
        (torch.bfloat16, 1 << 20, {"codec": "compressed"}, {"bfloat16"}),
        (torch.bfloat16, 2 << 30, {"offload_group_size": 2}, set()),
    ],
)
def test_kernels_are_compiled_early_for_the_dtype_of_a_load(
    dtype: torch.dtype, nbytes: int, settings: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.cuda, "memory", lambda _: (1 << 30, 2 << 30))
    gpu: Any = SimpleNamespace(device=torch.device("cuda", 0))
    assert machine.dtypes_to_load(dtype, nbytes, gpu, OffloadConfig.from_kwargs(**settings)) == expected


@pytest.mark.parametrize(("dtype", "codec"), [("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "none")])
def test_a_load_announces_the_dtypes_that_it_needs(
    dtype: str, codec: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a weight is read, with the dtype and bytes of the checkpoint. Nothing else is compiled."""
    asked: list[tuple[torch.dtype, int]] = []
    prepared: list[set[str]] = []
    monkeypatch.setattr(machine, "dtypes_to_load", lambda *about: asked.append(about[:2]) or {"bfloat16"})
    monkeypatch.setattr(machine, "prepare_decoding", lambda _, dtypes, __: prepared.append(set(dtypes)))
    model = weightstream.from_pretrained(folder, device="cpu", dtype=dtype, codec=codec, progress=False)
    nbytes = sum(parameter.numel() for parameter in model.parameters()) * 2
    model.weightstream.remove()
    assert asked == [(getattr(torch, dtype), nbytes)]
    assert prepared == [set(), {"bfloat16"}]


@pytest.mark.parametrize(("dtype", "is_asked"), [("bfloat16", True), ("float32", False)])
def test_no_kernel_is_awaited_if_nothing_is_decoded(
    dtype: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(gathering, "can_decompress", lambda *about: asked.append(about[2]) or False)
    model = nn.Sequential(*[nn.Linear(256, 256, dtype=getattr(torch, dtype)) for _ in range(8)])
    weightstream.offload(model, device="cpu", device_budget=10**6, codec="compressed").remove()
    assert asked == [frozenset({"bfloat16"})] * is_asked


def test_operators_are_timed_after_all_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use the same device: timing for `example_inputs` waits for the kernels."""
    calls: list[str] = []
    for_call = Gatherer.for_call
    monkeypatch.setattr(gathering, "can_decompress", lambda *_: calls.append("kernels") or True)
    monkeypatch.setattr(Gatherer, "for_call", lambda *args: calls.append("trial") or for_call(*args))
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
def test_a_packed_checkpoint_is_planned_as_it_is_loaded(packed: Path, budget: str) -> None:
    """Its compressed bytes are known from the headers."""
    settings: dict[str, Any] = {"device": "cpu", "device_budget": budget, "codec": "compressed"}
    plan = weightstream.plan_model(packed, **settings)
    prove(plan)
    assert plan.manifest.codes
    loaded = weightstream.from_pretrained(packed, progress=False, **settings)
    try:
        assert loaded.weightstream.plan == plan
    finally:
        loaded.weightstream.remove()


def test_compressed_sizes_of_a_checkpoint_are_assumed(folder: Path) -> None:
    plan = weightstream.plan_model(folder, device="cpu", device_budget="2MiB", codec="compressed")
    codes = plan.manifest.codes
    assert "model.layers.0.mlp.up_proj.weight" in codes
    assert "model.embed_tokens.weight" not in codes
    assert all(nbytes < plan.manifest.spans[alias] for alias, nbytes in codes.items())
    assert weightstream.plan_model(folder, device="cpu", device_budget="2MiB").manifest.codes == {}, "not requested"


# -- screens -------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(folder: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    machine = tmp_path / "profile.json"
    machine.write_text(profiles.to_json(MACHINE))

    def run(*flags: str) -> dict[str, Any]:
        arguments = ["plan", str(folder), "--profile", str(machine), "--host-budget", "1GiB", "--device-budget", "2MiB"]
        done: Result = CliRunner().invoke(app, [*arguments, "--json", *flags])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.mark.stress
def test_the_flag_selects_the_codec(plan: Callable[..., dict[str, Any]]) -> None:
    found = {codec: plan("--codec", codec) for codec in ("none", "compressed", "auto")}
    assert found["compressed"]["compressed_nbytes"] > 0 == found["none"]["compressed_nbytes"]
    assert found["none"]["nbytes"] == found["none"]["held_nbytes"] == found["compressed"]["nbytes"]
    assert found["compressed"]["held_nbytes"] < found["none"]["nbytes"]
    assert found["compressed"]["buffer_nbytes"] > 0 == found["none"]["buffer_nbytes"]
    assert found["compressed"]["decode_s"] > 0 == found["none"]["decode_s"]
    assert found["auto"] == plan()


@pytest.mark.stress
def test_bench_has_the_raw_link_as_its_floor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = importlib.import_module("weightstream.measure.bench")
    sizes: list[int] = []
    plain = bench.copies_s
    monkeypatch.setattr(bench, "copies_s", lambda backend, s, seconds: sizes.extend(s) or plain(backend, s, seconds))
    flags = [
        "--device",
        "cpu",
        "--device-budget",
        "2MiB",
        "--codec",
        "compressed",
        "--seconds",
        "0.05",
        "--context",
        "8",
    ]
    done = CliRunner().invoke(app, ["bench", str(folder), *flags, "--json"])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)
    assert row["equal"] is True
    assert row["compressed_nbytes"] > 0
    assert [system["name"] for system in row["systems"]] == ["raw link floor", "offloaded", "resident"]
    assert row["step_nbytes"] < 0.8 * sum(sizes), "the floor moves the uncompressed bytes that the step streams"
    assert sum(sizes) < row["nbytes"]
    assert row["whole_floor_s"] == row["nbytes"] / row["link_bytes_per_s"]
    assert row["systems"][2]["weights_nbytes"] == row["nbytes"]


def test_doctor_reports_decoding_rates() -> None:
    backend = CpuBackend()
    backend.profile = MACHINE
    (finding,) = checks.compressed(SimpleNamespace(backend=backend))
    backend.close()
    assert finding.text.startswith(
        "decoded without loss at 1.1 TB/s (bfloat16), 1.1 TB/s (float16), 750.0 GB/s (float8"
    )
    assert "--codec compressed" in finding.text
    assert finding.value == {"bfloat16": 1.15e12, "float16": 1.05e12, "float8_e4m3fn": 0.75e12}
    assert "per launch" not in finding.text


def test_doctor_reports_the_launch_time_if_weights_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.coding, "why_not", lambda device, dtype: None)
    backend = SimpleNamespace(device=torch.device("cuda", 0), profile=replace(MACHINE, decoding_s=7.46e-6))
    (finding,) = checks.compressed(SimpleNamespace(backend=backend))
    assert finding.text.endswith("(float8_e4m3fn), plus 7.46 us per launch")
