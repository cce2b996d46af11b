"""The names that tools look for on a model of accelerate: present while a model is offloaded, and on nothing else."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import weightstream
from models import MODELS, Model, assert_same, step
from streaming import open_streamer
from weightstream.adapters.modules import device_map
from weightstream.runtime.streamer.forward_patch import refuse_foreign

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
NAMES = ("hf_device_map", "_hf_hook")


def save_and_load(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": save_and_load,
    "its class": lambda model: type(model)(model.config),
}


@pytest.fixture
def made() -> Iterator[Model]:
    model = MODELS["t5"]()
    with open_streamer(model, "cpu"):
        yield model


@pytest.fixture
def model(made: Model) -> Any:
    return made.module


def test_names_the_device_that_computes(model: Any) -> None:
    assert model.hf_device_map == {"": CPU}
    assert model.device == model._hf_hook.execution_device == CPU
    assert model.encoder.device == model.encoder._hf_hook.execution_device == CPU
    assert not hasattr(model.lm_head, "_hf_hook")


def test_the_map_contains_no_offloaded_device(model: Any) -> None:
    """Such an entry means meta tensors and accelerate's hooks: transformers saves such a model shard by shard, and
    warns."""
    assert not {"cpu", "disk"} & set(model.hf_device_map.values())


def test_a_gpu_is_a_number() -> None:
    model = MODELS["llama"]().module
    detach = device_map.attach_device_map(model, torch.device("cuda", 3))
    assert model.hf_device_map == {"": 3}
    assert model.device == torch.device("cuda", 3)
    detach()
    assert model.device == CPU


def test_the_class_looks_like_the_models_own(model: Any) -> None:
    own = transformers.T5ForConditionalGeneration
    assert isinstance(model, own)
    assert repr(type(model)) == repr(own)
    assert type(model).__name__ == "T5ForConditionalGeneration"


def test_remove_deletes_the_names() -> None:
    made = MODELS["t5"]()
    kinds = [type(module) for module in made.module.modules()]
    with open_streamer(made, "cpu"):
        assert hasattr(made.module, "hf_device_map")
    assert [type(module) for module in made.module.modules()] == kinds
    assert not any(hasattr(module, name) for module in made.module.modules() for name in NAMES)
    with open_streamer(made, "cpu"):
        assert hasattr(made.module, "hf_device_map")


@pytest.mark.few(1)
@pytest.mark.parametrize("how", COPIES)
def test_copies_do_not_have_the_names(made: Model, how: str) -> None:
    twin = COPIES[how](made.module)
    assert type(twin) is transformers.T5ForConditionalGeneration
    assert not hasattr(twin, "hf_device_map")
    if how == "copy":  # shares its modules with the model
        return
    assert not any(hasattr(module, name) for module in twin.modules() for name in NAMES)
    assert twin.encoder.device == CPU
    if how != "its class":  # this one has random weights
        assert_same(step(twin, made.inputs(0)), step(made.module, made.inputs(0)))


def test_generate_leaves_the_encoder_unchanged(made: Model) -> None:
    """With a map and without a hook, transformers adds a hook of accelerate, which the next step would refuse."""
    ids = made.inputs(0)["input_ids"]
    plain = MODELS["t5"]().module
    for _ in range(2):
        assert torch.equal(made.module.generate(ids, max_new_tokens=6), plain.generate(ids, max_new_tokens=6))
    assert "_hf_hook" not in made.module.encoder.__dict__


def test_a_hook_of_accelerate_is_refused_and_ours_is_not_removed(model: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    with pytest.raises(weightstream.OffloadError, match=r"T5ForConditionalGeneration.*weightstream.remove\(\)"):
        hooks.remove_hook_from_module(model, recurse=True)
    hooks.add_hook_to_module(model.encoder, hooks.AlignDevicesHook(io_same_device=True))
    with pytest.raises(weightstream.OffloadError, match="managed by accelerate"):
        refuse_foreign({"encoder": model.encoder})
    hooks.remove_hook_from_module(model.encoder)


def test_a_model_that_compressed_tensors_offloads_is_refused_before_and_after(model: Any) -> None:
    """Also by llm-compressor, which offloads by it: with an offloaded model it ends before it moves a weight."""
    theirs = pytest.importorskip("compressed_tensors.offload")
    with pytest.raises(weightstream.OffloadError, match=r"T5ForConditionalGeneration .*remove\(\) first"):
        theirs.from_accelerate(model)
    assert hasattr(model, "hf_device_map")
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    x = torch.randn(1, 32)
    theirs.dispatch_with_map(net, {"1": (CPU, CPU)}, show_progress=False)
    with pytest.raises(weightstream.OffloadError, match=r"1 is already managed by compressed_tensors \(CPUCache\)"):
        weightstream.offload(net, device="cpu", device_budget="8KiB")
    theirs.remove_dispatch(net)
    net.forward = net.forward  # as some code does, which is no offloading
    with weightstream.offload(net, device="cpu", device_budget="8KiB"):
        net(x)
        theirs.dispatch_with_map(net, {"1": (CPU, CPU)}, show_progress=False)
        with pytest.raises(weightstream.OffloadError, match=r"1 is already managed by compressed_tensors \(CPUCache\)"):
            net(x)
        theirs.remove_dispatch(net)
        net(x)


def test_parts_of_a_model_of_another_class_have_the_names() -> None:
    wrapped = torch.nn.Sequential(MODELS["llama"]().module)
    with weightstream.offload(wrapped, device="cpu"):
        assert not hasattr(wrapped, "hf_device_map")
        assert wrapped[0].hf_device_map == {"": CPU}


def test_a_diffusers_pipeline_finds_the_device() -> None:
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (32,)}
    unet = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, **blocks)
    pipe, plain = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()), type(unet)
    detach = device_map.attach_device_map(unet, torch.device("cuda", 1))
    assert unet.hf_device_map == {"": 1}
    assert pipe._execution_device == torch.device("cuda", 1)
    detach()
    assert type(unet) is plain
    assert pipe._execution_device == CPU
