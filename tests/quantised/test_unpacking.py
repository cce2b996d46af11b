"""Modules that unpack their own weight, with other forwards, errors, threads, and a second offload()."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CHECKPOINTS
from formats import FORMATS, build, held_nbytes, inputs
from torch import nn

import weightstream
from weightstream.adapters.hf import hub
from weightstream.errors import OffloadError, UnsupportedError


def made(name: str) -> nn.Module:
    pytest.importorskip(FORMATS[name].library or "torch")
    return build(name)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bnb nf4", "compressed w8a8", "layerwise casting"])
def test_a_second_offload_is_refused_and_harms_nothing(name: str) -> None:
    plain, model = made(name), made(name)
    (x,) = inputs(model, (2,))
    wanted = plain(x)
    streamer = weightstream.offload(model, device="cpu", device_budget=int(0.4 * held_nbytes(model)))
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        with pytest.raises(OffloadError, match="already offloaded"):
            weightstream.offload(model, device=device, device_budget="1MiB")
    model.state_dict()
    assert torch.equal(model(x), wanted)
    streamer.remove()
    assert torch.equal(model(x), wanted)


def test_a_budget_that_is_too_small_leaves_a_model_that_can_be_offloaded() -> None:
    plain, model = made("compressed w4a16"), made("compressed w4a16")
    (x,) = inputs(model, (2,))
    wanted = plain(x)
    with pytest.raises(weightstream.PlanError):
        weightstream.offload(model, device="cpu", device_budget=100)
    with weightstream.offload(model, device="cpu", device_budget=int(0.4 * held_nbytes(model))):
        assert torch.equal(model(x), wanted)
    assert torch.equal(model(x), wanted)


def test_a_model_in_training_mode_is_not_packed_for_the_cpu() -> None:
    """bitsandbytes packs in modules that do not train. A module that trained when it was offloaded stays unpacked."""
    plain, model = made("bnb nf4").train(), made("bnb nf4").train()
    (x,) = inputs(model, (2,))
    wanted = plain(x)
    with weightstream.offload(model, device="cpu", device_budget=int(0.4 * held_nbytes(model))):
        assert torch.equal(model(x), wanted)
        model.eval()
        assert torch.equal(model(x), wanted)
    assert torch.equal(model(x), plain.eval()(x))


@pytest.mark.parametrize("name", ["compressed w8a8", "fp8 scaled"])
def test_a_forward_that_a_user_replaced_stays(name: str) -> None:
    plain, model = made(name), made(name)
    (x,) = inputs(model, (2,))
    wanted, calls = plain(x), []
    streamer = weightstream.offload(model, device="cpu", device_budget=int(0.4 * held_nbytes(model)))
    inner = model[0].up.forward
    model[0].up.forward = wrapper = lambda *args: (calls.append(1), inner(*args))[1]
    assert torch.equal(model(x), wanted)
    assert calls
    streamer.remove()
    assert model[0].up.forward is wrapper


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_kernels_that_repack_weights_in_memory_are_refused(method: str, tmp_path: Path) -> None:
    """gptqmodel's default on a CPU repacks. A model with such kernels is refused, and so is a config that requests
    them."""
    pytest.importorskip("gptqmodel")
    transformers = pytest.importorskip("transformers")
    CHECKPOINTS[method][1](tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())

    def rewrite(**quantization: str) -> None:
        facts["quantization_config"] = {k: v for k, v in facts["quantization_config"].items() if k != "backend"}
        facts["quantization_config"] |= quantization
        (tmp_path / "config.json").write_text(json.dumps(facts))

    rewrite()
    model: Any = weightstream.from_pretrained(tmp_path, device="cpu", device_budget="150KiB", dtype="bfloat16")
    model(torch.arange(9)[None])
    assert not any(hasattr(module, "transform_cpu") for module in model.modules())
    assert held_nbytes(model) <= 1.01 * model.weightstream.stats().model_nbytes
    rewrite(backend="gptq_torch_aten" if method == "gptq" else "torch_fused_awq")
    with pytest.raises(UnsupportedError, match="choose another kernel, such as 'torch'"):
        weightstream.from_pretrained(tmp_path, device="cpu", device_budget="150KiB")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    with pytest.raises(UnsupportedError, match="choose another kernel"):
        weightstream.offload(theirs, device="cpu", device_budget="150KiB")


def test_libraries_of_gptq_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    CHECKPOINTS["gptq"][1](tmp_path)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="quantised with gptq: pip install gptqmodel optimum"):
        weightstream.from_pretrained(tmp_path, device="cpu", device_budget="150KiB")


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_unpacked_tensors_are_not_kept(name: str) -> None:
    """gptqmodel keeps zero points and row indices unpacked, besides the weights."""
    plain, model = made(name), made(name)
    (x,) = inputs(model, (2,))
    wanted, nbytes = plain(x), held_nbytes(model)
    if name == "gptq":
        assert held_nbytes(plain) > nbytes
    with weightstream.offload(model, device="cpu", device_budget=int(0.4 * nbytes)):
        assert torch.equal(model(x), wanted)
        assert held_nbytes(model) <= nbytes
    assert torch.equal(model(x), wanted)
    if name == "gptq":
        assert held_nbytes(model) > nbytes


def test_a_forward_that_is_not_a_method_is_called_unchanged() -> None:
    plain, model = made("compressed w8a8"), made("compressed w8a8")
    (x,) = inputs(model, (2,))
    wanted = plain(x)
    model[0].up.forward = functools.partial(model[0].up.forward)
    with weightstream.offload(model, device="cpu", device_budget=int(0.4 * held_nbytes(model))):
        assert torch.equal(model(x), wanted)


def test_float8_without_kernels_runs_in_several_threads_once_it_is_plain_again(tmp_path: Path) -> None:
    CHECKPOINTS["fp8"][1](tmp_path)
    model: Any = weightstream.from_pretrained(tmp_path, device="cpu", device_budget="300KiB")
    batches = [torch.arange(3 + i, 12 + i)[None] for i in range(2)]
    wanted = [model(ids).logits for ids in batches]
    model.weightstream.remove()

    def run(index: int) -> bool:
        with torch.no_grad():
            return all(torch.equal(model(batches[index]).logits, wanted[index]) for _ in range(15))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, range(2)))
