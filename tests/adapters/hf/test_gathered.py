"""Experts that a checkpoint stores one by one stream from their places in it, bit for bit, and are not written
anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from models import MODELS, assert_same, model_nbytes, step
from repeats import thinned
from weightstream.runtime.weights.sources import OnDisk
from weightstream.store.folder import OffloadFolder

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("no_loading_bars", "few_plans")

NAMES = ("mixtral", "qwen3_moe-bf16")


@pytest.fixture(autouse=True)
def _nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: OffloadFolder, name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"{name} is written")

    monkeypatch.setattr(OffloadFolder, "write", write)


@pytest.fixture(params=NAMES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model, and the folder of its checkpoint, in several shards."""
    original = MODELS[request.param]()
    original.module.save_pretrained(tmp_path / "model", max_shard_size="200KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return original, tmp_path / "model"


def reference(original: Any, folder: Path) -> Any:
    return type(original.module).from_pretrained(folder, dtype="auto").eval()


def assert_streams(model: Any, original: Any, expected: Any) -> None:
    assert model.weightstream.plan.step_nbytes > 0
    for seed in range(3):
        assert_same(step(model, original.inputs(seed)), step(expected, original.inputs(seed)))


def in_parts(model: Any) -> dict[str, Any]:
    """The homes of weights that stream from several places of files, by name."""
    homes, resident = model.weightstream._homes.homes, model.weightstream.plan.resident
    found = {a: home for a, home in homes.items() if a not in resident and home.source.lazy is not None}
    assert found
    assert all(".experts." in alias and len(home.source.extents) > 1 for alias, home in found.items())
    return found


def assert_equal_weights(model: Any, expected: Any) -> None:
    assert list(model.state_dict()) == list(expected.state_dict())
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.few(1)
@pytest.mark.parametrize(("saved", "share"), thinned(NAMES, [0.3, 0.6, 2]), indirect=["saved"])
def test_streams_from_parts_of_files(share: float, saved: Any, tmp_path: Path, caplog: Any) -> None:
    original, folder = saved
    expected = reference(original, folder)
    budget = int(model_nbytes(expected) * share)
    model = weightstream.from_pretrained(
        folder, device="cpu", device_budget=budget, offload_folder=tmp_path / "offload", codec="none"
    )
    if share < 1:
        assert_streams(model, original, expected)
        assert all(home.is_undecoded for home in in_parts(model).values()), "copied without a copy in RAM"
    assert_equal_weights(model, expected)
    model.weightstream.remove()
    assert_equal_weights(model, expected)
    assert not [record for record in caplog.records if "converted" in record.getMessage()]
    assert os.listdir(tmp_path / "offload") == []


@pytest.mark.few(1)
def test_streams_from_disk(saved: Any, tmp_path: Path) -> None:
    original, folder = saved
    expected = reference(original, folder)
    nbytes = model_nbytes(expected)
    model = weightstream.from_pretrained(
        folder, device="cpu", device_budget=nbytes // 2, host_budget=nbytes // 8, codec="none"
    )
    disk = [home for alias, home in in_parts(model).items() if alias in model.weightstream.plan.disk]
    assert disk
    assert all(isinstance(home.source, OnDisk) for home in disk)
    assert_streams(model, original, expected)
    assert all(home.is_undecoded for home in disk), "none of them is in RAM"
    model.weightstream.remove()


@pytest.mark.few(1)
def test_updates_arrive(saved: Any) -> None:
    original, folder = saved
    expected = reference(original, folder)
    model = weightstream.from_pretrained(folder, device="cpu", device_budget=model_nbytes(expected) // 2, codec="none")
    assert_streams(model, original, expected)
    with torch.no_grad():
        for one in (model, expected):
            for index, parameter in enumerate(one.parameters()):
                if index % 2:
                    parameter.mul_(1.25)
    assert_streams(model, original, expected)
    model.weightstream.remove()
    assert_equal_weights(model, expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("saved", ["qwen3_moe-bf16"], indirect=True)
def test_gathered_weights_can_be_compressed(saved: Any, caplog: Any) -> None:
    original, folder = saved
    expected = reference(original, folder)
    model = weightstream.from_pretrained(
        folder, device="cpu", device_budget=model_nbytes(expected) // 2, codec="compressed"
    )
    coded = {name for name in model.weightstream.plan.manifest.codes if ".experts." in name}
    assert coded
    for alias in coded:
        spec = next(t for t in model.weightstream.plan.manifest.tensors() if t.alias == alias)
        layout = model.weightstream._homes.homes[alias].layout
        assert layout.nbytes <= spec.nbytes <= 1.05 * layout.nbytes + 512, "the estimate used its true bytes"
    assert_streams(model, original, expected)
    model.weightstream.remove()
    assert_equal_weights(model, expected)


@pytest.mark.few(1)
def test_a_model_is_saved_unchanged(saved: Any, tmp_path: Path) -> None:
    original, folder = saved
    expected = reference(original, folder)
    model = weightstream.from_pretrained(folder, device="cpu", device_budget=model_nbytes(expected) // 2)
    model.save_pretrained(tmp_path / "again", max_shard_size="200KB")
    index = "model.safetensors.index.json"
    assert (tmp_path / "again" / index).read_bytes() == (folder / index).read_bytes()
    for shard in folder.glob("*.safetensors"):
        assert (tmp_path / "again" / shard.name).read_bytes() == shard.read_bytes()
    assert_streams(model, original, expected)


UPDATES: dict[str, Any] = {
    "data": lambda weight: weight.data.mul_(2),
    "numpy of a view": lambda weight: weight.detach().view(torch.uint8).numpy().__ixor__(1),
    "storage": lambda weight: weight.untyped_storage().__setitem__(1, 60),
    "in place": lambda weight: weight.mul_(2),
    "assigned": lambda weight: setattr(weight, "data", weight.data * 2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("saved", "update"), thinned(NAMES, UPDATES), indirect=["saved"])
def test_updates_between_steps_by_any_way(update: str, saved: Any) -> None:
    """The kernel does not report which pages of gathered memory were written to."""
    original, folder = saved
    expected = reference(original, folder)
    model = weightstream.from_pretrained(folder, device="cpu", device_budget=int(0.4 * model_nbytes(expected)))
    with torch.no_grad():
        assert_streams(model, original, expected)
        name = next(iter(in_parts(model)))
        for _ in range(2):
            for either in (model, expected):
                UPDATES[update](either.get_parameter(name))
            assert_streams(model, original, expected)
    model.weightstream.remove()
    assert_equal_weights(model, expected)
