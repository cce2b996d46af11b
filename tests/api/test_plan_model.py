"""`plan_model` compared with the plan that `from_pretrained` makes of the same folder, and the facts of a GPU that
it needs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import weightstream
from models import MODELS
from repeats import thinned
from weightstream import ConfigError
from weightstream.api import plan_model
from weightstream.errors import CheckpointError, PlanError
from weightstream.plan.check import prove
from weightstream.plan.manifest import Profile, Workload
from weightstream.plan.plan import Plan
from weightstream.runtime.devices.cpu import CPU_PROFILE
from weightstream.runtime.devices.cuda import CUDA_PROFILE

transformers = pytest.importorskip("transformers")

KIB = 1024
ELSEWHERE = Profile(machine="Elsewhere", device_nbytes=1 << 30, link_bytes_per_s=20e9, overhead_s=60e-6)
# the least budget that works is nearly that of the largest matrix, or of a layer's experts
BUDGETS = {"llama": 140 * KIB, "llama-bf16": 80 * KIB, "mixtral": 600 * KIB, "qwen3_moe-bf16": 140 * KIB}


@pytest.fixture(autouse=True)
def reasons(caplog: pytest.LogCaptureFixture) -> None:
    """Log why work or an order is unknown, for failing tests."""
    caplog.set_level(logging.INFO, "weightstream")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    made = {name: tmp_path_factory.mktemp("checkpoint") / name for name in BUDGETS}
    for name, path in made.items():
        MODELS[name]().module.save_pretrained(path, max_shard_size="200KB")
    return made


@contextmanager
def loaded(path: Path, **settings: Any) -> Iterator[Plan]:
    model = weightstream.from_pretrained(path, device="cpu", progress=False, **settings)
    try:
        yield model.weightstream.plan
    finally:
        model.weightstream.remove()


def planned(path: Path, **settings: Any) -> Plan:
    plan = weightstream.plan_model(path, device="cpu", **settings)
    prove(plan)
    return plan


def assert_same_plan(path: Path, **settings: Any) -> Plan:
    with loaded(path, **settings) as wanted:
        plan = planned(path, **settings)
        for field in fields(Plan):
            assert getattr(plan, field.name) == getattr(wanted, field.name), field.name
    return plan


def test_the_text_of_an_encoder_is_one_step(tmp_path: Path) -> None:
    """512 tokens by default, since a T5 config has no number of positions."""
    options = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 4, "num_heads": 4, "vocab_size": 128}
    config = transformers.T5Config(**options)
    transformers.T5EncoderModel(config).save_pretrained(tmp_path / "encoder")
    for workload, length in (({}, 512), ({"context": 32}, 32), ({"tokens": 48}, 512), ({"tokens": 600}, 600)):
        planned = weightstream.plan_model(tmp_path / "encoder", device="cpu", device_budget="200KiB", **workload)
        assert planned.workload == Workload(batch=1, tokens=length, context=length)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "times"), thinned(BUDGETS, [1.0, 1.5, 99]))
def test_the_plan_equals_that_of_the_loaded_model(folders: Mapping[str, Path], name: str, times: float) -> None:
    plan = assert_same_plan(folders[name], device_budget=int(times * BUDGETS[name]))
    assert (plan.step_nbytes > 0) == (times < 99)
    assert plan.step_s > 0


WORKLOADS = [
    ({}, Workload(batch=1, tokens=1, context=64)),  # all positions of the model
    ({"batch": 3}, Workload(batch=3, tokens=1, context=64)),
    ({"batch": 2, "context": 32}, Workload(batch=2, tokens=1, context=32)),
    ({"tokens": 48, "context": 48}, Workload(batch=1, tokens=48, context=48)),
    ({"tokens": 40, "context": 8}, Workload(batch=1, tokens=40, context=40)),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "settings", "workload"), thinned(["llama", "mixtral"], WORKLOADS))
def test_the_workload_affects_the_plan(
    folders: Mapping[str, Path], name: str, settings: Mapping[str, int], workload: Workload
) -> None:
    plan = assert_same_plan(folders[name], device_budget=BUDGETS[name], **settings)
    assert plan.workload == workload
    positions = workload.batch * workload.context
    assert plan.cache_nbytes == 2 * 4 * 2 * 16 * 4 * positions  # keys and values: layers, heads, their width, float32
    assert plan.activation_nbytes > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"offload_group_size": 2},
        {"cpu_offload_gb": 0.0002, "use_uva": False},
        {"device_budget": "200KiB", "zero_copy_params": ["embed_tokens"]},
        {"max_memory": {"cpu": "1GiB"}},
        {"device_budget": "200KiB", "dtype": "bfloat16"},
        {"device_budget": "200KiB", "host_budget": "400KiB"},
    ],
)
def test_every_setting_affects_the_plan(folders: Mapping[str, Path], settings: Mapping[str, Any]) -> None:
    plan = assert_same_plan(folders["llama"], **settings)
    assert (len(plan.disk) > 0) == ("host_budget" in settings)
    assert (len(plan.mapped) > 0) == ("zero_copy_params" in settings)


def test_weights_are_not_needed(folders: Mapping[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folders["llama"] / "config.json").read_bytes())
    assert planned(tmp_path, device_budget="200KiB") == planned(folders["llama"], device_budget="200KiB")
    assert os.listdir(tmp_path) == ["config.json"]


# -- a GPU that this machine lacks --------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightstream.runtime.devices.cuda.is_available", lambda: False)


@pytest.mark.parametrize("settings", [{}, {"device_budget": "80%"}])
def test_a_profile_without_memory_needs_a_budget_in_bytes(
    folders: Mapping[str, Path], settings: Mapping[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="give device_budget in bytes"):
        weightstream.plan_model(folders["llama"], profile=Profile(), **settings)
    plan = weightstream.plan_model(folders["llama"], profile=Profile(), device_budget="200KiB")
    assert (plan.basis, plan.on_cpu) == ("assumed", False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_plan_is_for_the_cpu(folders: Mapping[str, Path]) -> None:
    plan = weightstream.plan_model(folders["llama"], device_budget="200KiB")
    assert plan.on_cpu
    assert plan == planned(folders["llama"], device_budget="200KiB")
    assert weightstream.plan_model(folders["llama"]).budget is not None, "the free memory"


def test_the_profile_of_a_cpu_is_one_of_a_cpu(folders: Mapping[str, Path]) -> None:
    profile = replace(CPU_PROFILE, machine="Another CPU", device_nbytes=1 << 30)
    plan = weightstream.plan_model(folders["llama"], device_budget="200KiB", profile=profile)
    assert plan.on_cpu
    assert "the CPU (Another CPU)" in str(plan)
    assert "graph" not in str(plan)


def test_another_link_is_refused_before_a_cpu_is_measured(
    folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_model, "machine_with_rates", lambda *_: pytest.fail("it is measured"))
    with pytest.raises(ConfigError, match="a CPU, which has no link"):
        weightstream.plan_model(folders["llama-bf16"], device="cpu", link="PCIe 4")


def test_another_link_of_a_measured_machine_is_said_to_be_given(folders: Mapping[str, Path]) -> None:
    measured = replace(CUDA_PROFILE, machine="A GPU", device_nbytes=1 << 30)
    plan = weightstream.plan_model(folders["llama-bf16"], profile=measured, link="25GB/s")
    assert plan.machine == "A GPU, a link of 25 GB/s as given"


def test_a_gpu_by_name_and_a_target(folders: Mapping[str, Path]) -> None:
    plan = weightstream.plan_model(folders["llama-bf16"], gpu="3090", link="PCIe 3", target="1s")
    assert plan.machine == "RTX 3090, PCIe 3 x16"
    assert plan.budget < 200 * KIB
    assert "assumed from the data sheet" in str(plan)
    plan = weightstream.plan_model(folders["llama"], profile=ELSEWHERE, device_budget="200KiB", link="2GB/s")
    assert plan.machine == "Elsewhere, a link of 2 GB/s as given"
    for wrong in ({"gpu": "H200", "profile": ELSEWHERE}, {"gpus": 2, "target": "1s"}, {"link": "1GB/s"}):
        with pytest.raises(ConfigError):
            weightstream.plan_model(folders["llama-bf16"], **({"device": "cpu"} if "link" in wrong else {}), **wrong)


@pytest.mark.usefixtures("no_gpu")
def test_the_profile_of_another_machine_is_used(folders: Mapping[str, Path]) -> None:
    path = folders["llama"]
    plan = weightstream.plan_model(path, profile=ELSEWHERE, device_budget="200KiB")
    assert plan.machine == "Elsewhere"
    slow = weightstream.plan_model(
        path, profile=replace(ELSEWHERE, link_bytes_per_s=1e7), device_budget="200KiB", zero_copy_params=[]
    )
    assert slow.step_s > plan.step_s
    assert weightstream.plan_model(path, profile=ELSEWHERE, device_budget="50%").budget == 1 << 29
    everything = weightstream.plan_model(path, profile=ELSEWHERE)
    assert not everything.offloaded_nbytes
    small = replace(ELSEWHERE, device_nbytes=(256 << 20) + 600 * KIB, workspace_nbytes=0)
    found = weightstream.plan_model(path, profile=small)
    assert found.budget == 600 * KIB - found.activation_nbytes - found.cache_nbytes
    assert found.device_nbytes + found.activation_nbytes + found.cache_nbytes <= 600 * KIB


# -- folders without a model, and impossible plans ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_moe-bf16"])
def test_a_graph_has_the_kernels_of_a_static_cache(folders: Mapping[str, Path], name: str) -> None:
    """On a GPU whose host takes no time, only these kernels distinguish a step in a graph."""
    op_s = 1e-3
    quick = replace(ELSEWHERE, op_s=op_s, op_launch_s=0.0, overhead_s=0.0, device_nbytes=1 << 30)
    plan = weightstream.plan_model(folders[name], device_budget="100MiB", profile=quick)
    config = transformers.AutoConfig.from_pretrained(folders[name])
    # arange, add, add_ and twice index_copy_ instead of two cat, and attention with a mask; the mask counts once
    in_layers = round((plan.graph_s - plan.step_s) / op_s - 7)
    assert 3 * config.num_hidden_layers <= in_layers <= 10 * config.num_hidden_layers
    prompt = weightstream.plan_model(folders[name], device_budget="100MiB", profile=quick, tokens=8)
    assert prompt.graph_s == pytest.approx(prompt.step_s)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        planned(tmp_path, device_budget="1GiB")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(CheckpointError, match="no such model"):
        planned(tmp_path, device_budget="1GiB")


def test_an_impossible_budget_is_refused_as_at_load(folders: Mapping[str, Path]) -> None:
    errors = []
    for make in (planned, lambda path, **settings: loaded(path, **settings).__enter__()):
        with pytest.raises(PlanError, match="must hold the largest unit") as error:
            make(folders["llama"], device_budget="4KiB")  # type: ignore[operator]
        errors.append(str(error.value))
    assert errors[0] == errors[1]
