"""Dry runs of pipelines: they predict the calls to come, and change nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import weightstream

pipelines = pytest.importorskip("pipelines")
diffusers = pytest.importorskip("diffusers")

from weightstream.adapters.diffusers.dry_run import rehearse  # noqa: E402

# diffusers' own, of numpy
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`callback_steps` is deprecated:FutureWarning"),
]


def state_of(pipe: Any) -> dict[str, Any]:
    """The device, dtype and owner of each tensor."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return {
        f"{name}.{key}": (id(tensor), tensor.data_ptr(), tensor.dtype)
        for name, part in parts.items()
        for key, tensor in (*part.named_parameters(), *part.named_buffers())
    }


def test_a_cast_component_stays_unchanged() -> None:
    """SDXL's VAE is in float32 while it decodes. The predicted calls are those of the cast one."""
    pipe = pipelines.build("upcast")
    before = state_of(pipe)
    calls, reason = rehearse(pipe, pipelines.arguments("upcast"))
    assert not reason
    assert state_of(pipe) == before
    assert {call.component for call in calls if call.cast is not None} == {"vae"}
    cast = next(call.cast for call in calls if call.cast is not None)
    assert {param.dtype for param in cast.parameters()} == {torch.float32}
    assert all(param.is_meta for param in cast.parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["float", "half", "to", "device"])
def test_ways_to_cast(way: str) -> None:
    """Cast and cast back, in the pipeline's own part of a call. A move to a device changes nothing."""
    pipe = pipelines.build("flux")
    before = state_of(pipe)
    seen: list[Any] = []
    kind = type(pipe)

    class Casting(kind):  # type: ignore[misc, valid-type]
        def check_inputs(self, *args: Any, **kwargs: Any) -> None:
            vae = self.vae
            if way == "device":
                vae.to("cpu")
                vae.cpu()
            else:
                vae.to(torch.float16) if way == "to" else getattr(vae, way)()
            seen.append((vae.dtype, next(vae.decoder.parameters()).dtype, vae.device.type))
            vae.to(dtype=torch.float32)
            seen.append(vae.dtype)

    pipe.__class__ = Casting
    calls, reason = rehearse(pipe, pipelines.arguments("flux"))
    assert not reason
    assert all(call.cast is None for call in calls)
    dtype = torch.float16 if way in ("half", "to") else torch.float32
    assert seen == [(dtype, dtype, "cpu"), torch.float32]
    assert state_of(pipe) == before


def test_it_does_not_affect_generators_callbacks_and_random_states() -> None:
    pipe = pipelines.build("flux")
    generators = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)]
    called: list[Any] = []

    def callback(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        called.append(step)
        return kwargs

    latents = torch.randn(2, 64, 16)
    more = {"generator": generators, "num_images_per_prompt": 2, "callback_on_step_end": callback, "latents": latents}
    states = [generator.get_state() for generator in generators]
    values = latents.clone()
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    outside = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state()
    calls, reason = rehearse(pipe, pipelines.arguments("flux") | more)
    assert (len(calls), reason) == (6, "")
    assert not called
    assert all(torch.equal(g.get_state(), state) for g, state in zip(generators, states, strict=True))
    assert torch.equal(latents, values)
    assert (random.getstate(), str(numpy.random.get_state())) == outside[:2]
    assert torch.equal(torch.get_rng_state(), outside[2])


def test_the_call_of_the_example_gives_the_plain_image() -> None:
    call = pipelines.arguments("flux") | {"output_type": "pt"}
    want = pipelines.build("flux")(**call, generator=torch.Generator().manual_seed(5)).images
    pipe = pipelines.build("flux")
    call["generator"] = torch.Generator().manual_seed(5)
    weightstream.offload_pipeline(pipe, device="cpu", device_budget="300KiB", example_inputs=call)
    pipe.weightstream.plan(**call)
    assert torch.equal(pipe(**call).images, want)


@pytest.mark.stress
def test_a_pipeline_of_pipelines() -> None:
    """The inner pipelines are rehearsed, not run. The image is the plain one."""
    pipe = pipelines.build("combined")
    call, ran = pipelines.arguments("combined"), []
    want = pipelines.image(pipelines.build("combined"), "combined")
    for part in (pipe.unet, pipe.prior_prior, pipe.movq):
        part.register_forward_pre_hook(lambda *_: ran.append(1))
    calls, reason = rehearse(pipe, call)
    assert (reason, ran) == ("", [])
    assert {"unet", "movq", "prior_prior", "prior_text_encoder"} <= {call.component for call in calls}
    weightstream.offload_pipeline(pipe, device="cpu", device_budget="500KiB", example_inputs=call)
    assert not ran
    messages = {turn.component for turn in pipe.weightstream.plan(**call).turns}
    assert messages == {call.component for call in calls}
    for _ in range(2):
        assert torch.equal(pipelines.image(pipe, "combined"), want)


def test_a_call_without_components_is_reported() -> None:
    class Empty:
        def __init__(self) -> None:
            self.components = {"net": nn.Linear(4, 4)}

        def __call__(self) -> None:
            pass

    assert rehearse(Empty(), {}) == ([], "it calls none of its components")
