"""Pipelines of diffusers, offloaded as a whole: the images of the plain pipeline, bit for bit, and their other
behaviour."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from repeats import only
from streaming import DEVICES

pipelines = pytest.importorskip("pipelines")
diffusers = pytest.importorskip("diffusers")

pytestmark = [
    pytest.mark.usefixtures("few_plans"),
    # diffusers' own, of numpy
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`upcast_vae` is deprecated:FutureWarning"),
]
SHARES = (0.35, 0.6, 1.2)  # of the bytes of all components
TIGHT = "900KiB"  # little more than the least for the largest convolution below


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def parts(pipe: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}


@functools.cache
def plain_image(name: str) -> torch.Tensor:
    """The plain pipeline's output on the CPU."""
    return pipelines.image(pipelines.build(name), name)


def nbytes(pipe: Any) -> int:
    return sum(t.nbytes for part in parts(pipe).values() for t in (*part.parameters(), *part.buffers()))


def offloaded(name: str, device: str = "cpu", share: float = 0.5, **settings: Any) -> Any:
    pipe = pipelines.build(name, device)
    example = pipelines.arguments(name)
    budget = int(nbytes(pipe) * share)
    return weightstream.offload_pipeline(pipe, device=device, device_budget=budget, example_inputs=example, **settings)


@pytest.fixture(scope="module")
def pipe() -> Any:
    """A pipeline for all tests that do not change it."""
    return offloaded("flux")


# others are loaded from files
@pytest.mark.few(1)
@pytest.mark.parametrize("name", only(pipelines.PIPELINES, "flux", "controlnet", "wan"))
def test_images_are_the_same_bits(name: str, device: str) -> None:
    """At three budgets: after a plain call, in the first and the second call, with other steps, and after
    `remove()`."""
    plain = pipelines.build(name, device)
    want, other = pipelines.image(plain, name), pipelines.image(plain, name, num_inference_steps=2, seed=6)
    assert torch.isfinite(want).all()
    assert not torch.equal(want, other)
    pipe = pipelines.build(name, device)
    kind = type(pipe)
    for share in SHARES if device == "cuda" else SHARES[::2] if name == "flux" else SHARES[:1]:
        assert torch.equal(pipelines.image(pipe, name), want)
        budget = int(nbytes(pipe) * share)
        found = weightstream.offload(
            pipe, device=device, device_budget=budget, example_inputs=pipelines.arguments(name)
        )
        assert found is pipe.weightstream
        assert found.device.type == device
        for _ in range(2):
            assert torch.equal(pipelines.image(pipe, name), want)
        assert torch.equal(pipelines.image(pipe, name, num_inference_steps=2, seed=6), other)
        stats = found.stats()
        assert 0 < stats.held_nbytes["device"] <= budget
        if share < 1:
            assert sum(part.fills for part in stats.components.values()) > 0
        found.remove()
        assert type(pipe) is kind
        assert not hasattr(pipe, "weightstream")
    assert torch.equal(pipelines.image(pipe, name), want)
    for part in parts(pipe).values():
        assert all(tensor.device.type == device for tensor in part.parameters())


@pytest.mark.stress  # CI runs it from files
@pytest.mark.parametrize("name", ["upcast", "svd"])
def test_a_component_that_is_cast_while_the_pipeline_runs(name: str, device: str) -> None:
    """A VAE in float16 that computes in float32: the plain bits, predicted counts for both, and memory for the
    larger."""
    plain = pipelines.build(name, device)
    want = pipelines.image(plain, name)
    pipe = pipelines.build(name, device)
    budget = int(nbytes(pipe) * 0.5)
    weightstream.offload(pipe, device=device, device_budget=budget, example_inputs=pipelines.arguments(name))
    for _ in range(2):
        assert torch.equal(pipelines.image(pipe, name), want)
        assert pipe.vae.dtype == plain.vae.dtype
    plan = pipe.weightstream.plan(**pipelines.arguments(name))
    called = [turn.plan.manifest.nbytes for turn in plan.turns if turn.component == "vae"]
    assert max(called) > 1.9 * plan.plans["vae"].manifest.nbytes
    stats = pipe.weightstream.stats()
    assert stats.components["vae"].steps == 2 * len(called)
    assert 0 < stats.held_nbytes["device"] <= budget
    pipe.weightstream.remove()
    assert torch.equal(pipelines.image(pipe, name), want)
    with pytest.raises(AttributeError):
        pipe.vae.weightstream  # noqa: B018


def test_a_cast_that_does_not_fit() -> None:
    """It is refused with the remedy, and the pipeline continues unchanged."""
    pipe = pipelines.build("flux")
    options = {"block_out_channels": (16, 128), "layers_per_block": 1, "norm_num_groups": 4}
    pipe.vae = type(pipe.vae).from_config({**pipe.vae.config, **options})
    want = pipelines.image(pipe, "flux")
    weightstream.offload(pipe, device="cpu", device_budget=TIGHT, example_inputs=pipelines.arguments("flux"))
    for _ in range(2):
        with pytest.raises(weightstream.OffloadError, match=r"vae is cast.*example_inputs="):
            pipe.vae.to(torch.float64)
        assert pipe.vae.dtype == torch.float32
        assert torch.equal(pipelines.image(pipe, "flux"), want)
    with pytest.raises(weightstream.OffloadError, match=r"pipe\.weightstream\.remove"):
        pipe.to(torch.float64)
    pipe.weightstream.remove()
    assert torch.equal(pipelines.image(pipe, "flux"), want)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", only(pipelines.PIPELINES, "flux", "wan"))
def test_a_dry_run_finds_the_calls(name: str) -> None:
    """It predicts how often the call runs each component."""
    pipe = offloaded(name)
    call = {key: value for key, value in pipelines.arguments(name).items() if key != "num_inference_steps"}
    before = {part: stats.steps for part, stats in pipe.weightstream.stats().components.items()}
    plan = pipe.weightstream.plan(steps=3, **call)
    assert {part: stats.steps for part, stats in pipe.weightstream.stats().components.items()} == before
    messages = dict.fromkeys(before, 0)
    for turn in plan.turns:
        messages[turn.component] += turn.num
    pipelines.image(pipe, name)
    after = pipe.weightstream.stats().components
    assert {part: after[part].steps - before[part] for part in before} == messages
    assert plan.seconds > 0
    assert plan.activation_nbytes > 0
    assert plan.device_nbytes <= int(nbytes(pipe) * 0.5)
    text = str(plan)
    assert all(part in text for part in messages)
    assert f"{plan.seconds_text(plan.seconds)} per call" in text


@pytest.mark.stress
def test_more_steps_and_larger_images_take_longer() -> None:
    pipe = offloaded("flux")
    few, many, large = (
        pipe.weightstream.plan(steps=steps, height=size, width=size, prompt="w5", max_sequence_length=48)
        for steps, size in ((3, 32), (9, 32), (3, 96))
    )
    turns = [[turn for turn in plan.turns if turn.component == "transformer"] for plan in (few, many, large)]
    assert [sum(turn.num for turn in found) for found in turns] == [3, 9, 3]
    seconds = [sum(turn.seconds for turn in found) for found in turns]
    assert 2 * seconds[0] < seconds[1]
    assert seconds[0] < seconds[2]
    assert large.activation_nbytes > 4 * few.activation_nbytes


def test_components_use_one_ring_in_turn(pipe: Any) -> None:
    """Device memory is less than for components that are offloaded one by one."""
    plans = [streamer.plan for streamer in pipe.weightstream.components.values()]
    rings = [plan.ring_nbytes + plan.buffer_nbytes for plan in plans]
    held = pipe.weightstream.stats().held_nbytes["device"]
    assert held == max(rings) + sum(plan.resident_nbytes for plan in plans)
    assert held < sum(rings) + sum(plan.resident_nbytes for plan in plans)


@pytest.mark.stress
@pytest.mark.parametrize("name", only(["flux", "controlnet", "wan"], "flux", "wan"))
def test_no_unplanned_fill_and_no_useless_fill(name: str) -> None:
    """After some calls, a turn begins with the weights it needs first, and ends without fills that another would
    overwrite."""
    pipe = offloaded(name, share=0.35)
    planned = pipe.weightstream.plan(**pipelines.arguments(name))
    taken: list[list[int]] = []
    for _ in range(4):
        pipelines.image(pipe, name)
        parts = pipe.weightstream.stats().components.values()
        taken.append([sum(p.unplanned_fills for p in parts), sum(p.filled_nbytes for p in parts)])
    (_, before), (unplanned, nbytes_before), (still, nbytes_after) = taken[1:]
    assert still == unplanned
    assert nbytes_after - nbytes_before <= 1.02 * planned.copied_nbytes
    assert nbytes_after - nbytes_before <= nbytes_before - before


@pytest.mark.stress
def test_the_component_that_runs_most_gets_most_of_the_budget() -> None:
    pipe = offloaded("flux", share=0.5)
    kept = {name: s.plan.resident_nbytes for name, s in pipe.weightstream.components.items()}
    assert kept["transformer"] > 2 * sum(kept[name] for name in kept if name != "transformer")


def test_a_component_may_call_another() -> None:
    """A component that runs inside another finds the ring in use, and gets memory of its own."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
            self.call = [inner]  # in a list, so that it is not a child

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.call[0](self.first(x)))

    class Nested(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))
            self.call = [inner]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call[0](x @ self.weight) @ self.weight

    class Pipe:
        model_cpu_offload_seq = "inner->outer"

        def __init__(self) -> None:
            torch.manual_seed(3)
            self.inner = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
            self.outer = nn.Sequential(*(Nested(self.inner) for _ in range(4)), Outer(self.inner))

        @property
        def components(self) -> dict[str, Any]:
            return {"inner": self.inner, "outer": self.outer}

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return self.outer(self.inner(x))

    x = torch.randn(2, 16)
    want, pipe = Pipe()(x), Pipe()
    weightstream.offload_pipeline(pipe, device="cpu", device_budget=5000, example_inputs={"x": x})
    for _ in range(3):
        assert torch.equal(pipe(x), want)
    assert pipe.weightstream.stats().components["outer"].fills > 4


@pytest.mark.stress
def test_threads_wait_for_each_other() -> None:
    pipe = offloaded("flux", share=0.35)
    encoder, transformer = pipe.text_encoder_2, pipe.text_encoder
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        want = [part(ids).last_hidden_state for part in (encoder, transformer)]
        failed: list[bool] = []

        def run(part: Any, expected: torch.Tensor) -> None:
            with torch.no_grad():
                failed.extend(not torch.equal(part(ids).last_hidden_state, expected) for _ in range(20))

        threads = [threading.Thread(target=run, args=a) for a in zip((encoder, transformer), want, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(failed) == 40
    assert not any(failed)


@pytest.mark.stress
def test_other_methods_than_forward_are_steps() -> None:
    """Those of a VAE are known by name, others once a unit runs in them."""
    pipe = offloaded("sdxl", share=0.35)
    with torch.no_grad():
        for _ in range(3):
            pipe.vae.decode(torch.randn(1, 4, 8, 8))
            pipe.vae.encode(torch.randn(1, 3, 16, 16))
    stats = pipe.weightstream.stats().components["vae"]
    assert stats.steps == 6

    class Net(nn.Sequential):
        def compute(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    torch.manual_seed(2)
    net = Net(*(nn.Linear(16, 16) for _ in range(6)))
    x = torch.randn(2, 16)
    with torch.no_grad():
        want = net.compute(x)
        with weightstream.offload(net, device="cpu", device_budget=3000) as streamer:
            assert [torch.equal(net.compute(x), want) for _ in range(4)] == [True] * 4
            assert streamer.stats().steps == 3
            twin = copy.deepcopy(net)
            assert torch.equal(twin.compute(x), want)
    assert "compute" not in vars(net)


def test_a_cache_that_skips_blocks_does_not_change_the_plan(device: str) -> None:
    from diffusers import FirstBlockCacheConfig

    def cached() -> Any:
        pipe = pipelines.build("flux", device)
        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
        return pipe

    calls = {"num_inference_steps": 8}
    want = pipelines.image(cached(), "flux", **calls)
    plain = pipelines.image(pipelines.build("flux", device), "flux", **calls)
    assert not torch.equal(want, plain), "blocks were skipped"
    pipe = cached()
    weightstream.offload_pipeline(
        pipe, device=device, device_budget=nbytes(pipe) // 2, example_inputs=pipelines.arguments("flux")
    )
    assert torch.equal(pipelines.image(pipe, "flux", **calls), want)
    order = pipe.weightstream.components["transformer"].plan.manifest.order
    assert torch.equal(pipelines.image(pipe, "flux", **calls), want)
    assert pipe.weightstream.components["transformer"].plan.manifest.order == order
    assert len(set(order)) == len(pipe.weightstream.components["transformer"].plan.manifest.units)
    assert pipe.weightstream.plan(**pipelines.arguments("flux", steps=8)).turns[2].num == 8, "as if none were skipped"


CACHES = ("first block", "magnitudes", "Taylor")


def cache_config(cache: str) -> Any:
    """A cache that skips blocks in most of six steps of the tiny Flux."""
    if cache == "first block":
        return diffusers.FirstBlockCacheConfig(threshold=5.0)
    if cache == "magnitudes":
        return diffusers.MagCacheConfig(threshold=0.5, mag_ratios=[1.0] * 6, num_inference_steps=6)
    blocks = [r"(single_)?transformer_blocks\.\d"]
    return diffusers.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=2, cache_identifiers=blocks)


@pytest.mark.parametrize("cache", only(CACHES, "first block"))
def test_a_cache_that_comes_later_moves_less(cache: str) -> None:
    """Skipped blocks are not filled, nothing is filled on demand, and images are those of the plain pipeline with the
    same cache; also in another size, and without the cache again."""
    plain, pipe, moved = pipelines.build("flux"), offloaded("flux", share=0.35), list[int]()

    def compare(**call: Any) -> None:
        want = pipelines.image(plain, "flux", num_inference_steps=6, **call)
        for _ in range(2):
            before = pipe.weightstream.stats().components["transformer"]
            assert torch.equal(pipelines.image(pipe, "flux", num_inference_steps=6, **call), want)
        after = pipe.weightstream.stats().components["transformer"]
        assert after.unplanned_fills == before.unplanned_fills
        moved.append(after.filled_nbytes - before.filled_nbytes)

    compare()
    for each in (plain, pipe):
        each.transformer.enable_cache(cache_config(cache))
    compare()
    compare(height=24, width=24)
    for each in (plain, pipe):
        each.transformer.disable_cache()
    compare()
    assert moved[1] == moved[2] < 0.8 * moved[0]
    assert moved[3] == moved[0]


@pytest.mark.parametrize("cache", only(CACHES, "first block"))
def test_a_cache_that_was_there_before_moves_less(cache: str) -> None:
    """As one that comes later, also once it is disabled, and enabled again; and it stays when the offload ends."""
    plain, pipe, moved = pipelines.build("flux"), pipelines.build("flux"), list[int]()
    for each in (plain, pipe):
        each.transformer.enable_cache(cache_config(cache))
    weightstream.offload_pipeline(
        pipe, device="cpu", device_budget=int(0.35 * nbytes(pipe)), example_inputs=pipelines.arguments("flux")
    )
    for change in (None, "disable_cache", "enable_cache"):
        for each in (plain, pipe) if change else ():
            getattr(each.transformer, change)(*[cache_config(cache)] * (change == "enable_cache"))
        want = pipelines.image(plain, "flux", num_inference_steps=6)
        for _ in range(2):
            before = pipe.weightstream.stats().components["transformer"]
            assert torch.equal(pipelines.image(pipe, "flux", num_inference_steps=6), want)
        after = pipe.weightstream.stats().components["transformer"]
        assert after.unplanned_fills == before.unplanned_fills
        moved.append(after.filled_nbytes - before.filled_nbytes)
    assert moved[0] == moved[2] < 0.8 * moved[1]
    pipe.weightstream.remove()
    assert torch.equal(pipelines.image(pipe, "flux", num_inference_steps=6), want)


def lora(pipe: Any) -> dict[str, torch.Tensor]:
    """Random weights of an adapter for the transformer's attention."""
    from peft import LoraConfig

    other = copy.deepcopy(pipe.transformer)
    other.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False))
    from peft.utils import get_peft_model_state_dict

    generator = torch.Generator().manual_seed(9)
    found = get_peft_model_state_dict(other)
    return {f"transformer.{key}": torch.randn(value.shape, generator=generator) * 0.3 for key, value in found.items()}


def with_lora(pipe: Any, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Images with an adapter, at half of its weight, without it, and after it is unloaded."""
    pipe.load_lora_weights(dict(state), adapter_name="a")
    images = [pipelines.image(pipe, "flux")]
    pipe.set_adapters("a", 0.5)
    images.append(pipelines.image(pipe, "flux"))
    pipe.disable_lora()
    images.append(pipelines.image(pipe, "flux"))
    pipe.enable_lora()
    pipe.unload_lora_weights()
    return [*images, pipelines.image(pipe, "flux")]


@pytest.mark.stress
def test_adapters_that_are_loaded_later(device: str) -> None:
    pytest.importorskip("peft")
    plain = pipelines.build("flux", device)
    state = lora(pipelines.build("flux"))
    want = with_lora(plain, state)
    assert not torch.equal(want[0], want[1])
    assert torch.equal(want[2], want[3])
    pipe = offloaded("flux", device, 0.4)
    before = pipe.weightstream.stats().held_nbytes["device"]
    pipe.load_lora_weights(dict(state), adapter_name="a")
    assert torch.equal(pipelines.image(pipe, "flux"), want[0])
    grown = pipe.weightstream.stats().held_nbytes["device"] - before
    assert grown == sum(tensor.nbytes for tensor in state.values())
    pipe.unload_lora_weights()
    assert all(torch.equal(*pair) for pair in zip(with_lora(pipe, state), want, strict=True))


def test_adapters_that_are_fused(device: str) -> None:
    """As close as fusing itself is. Bit for bit on the CPU, where it is fused."""
    pytest.importorskip("peft")
    state, images = lora(pipelines.build("flux")), []
    for pipe in (pipelines.build("flux", device), offloaded("flux", device, 0.4)):
        pipe.load_lora_weights(dict(state), adapter_name="a")
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        images.append(pipelines.image(pipe, "flux"))
    if device == "cpu":
        assert torch.equal(*images)
    torch.testing.assert_close(*images, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(images[0], pipelines.image(pipelines.build("flux", device), "flux"), atol=1e-3)


@pytest.mark.stress
def test_a_pipeline_of_the_same_components() -> None:
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(3))

    def painted(pipe: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(4)
        arguments = {"image": picture, "strength": 0.8, "num_inference_steps": 4, "output_type": "pt"}
        return pipe("w5 w9", generator=generator, **arguments).images

    want = painted(diffusers.StableDiffusionXLImg2ImgPipeline.from_pipe(pipelines.build("sdxl")))
    pipe = offloaded("sdxl", share=0.4)
    other = diffusers.StableDiffusionXLImg2ImgPipeline.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    for _ in range(2):
        assert torch.equal(painted(other), want)
    assert torch.equal(pipelines.image(pipe, "sdxl"), plain_image("sdxl"))
    with pytest.raises(weightstream.OffloadError, match=r"vae of this .* are offloaded already, each with a budget"):
        weightstream.offload_pipeline(other, device="cpu", device_budget="1MiB")


@pytest.mark.stress
@pytest.mark.parametrize("form", ["gguf q8_0", "layerwise casting"])
def test_quantised_components(form: str, device: str) -> None:
    pytest.importorskip("gguf")
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2] / "quantised"))
    import formats

    def build() -> Any:
        pipe = pipelines.build("flux", device)
        pipe.to(torch.bfloat16)
        if form == "layerwise casting":
            pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
        else:
            blocks = nn.ModuleList([*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks])
            formats.FORMATS[form].quantise(blocks)
        return pipe

    want, pipe = pipelines.image(build(), "flux"), build()
    weightstream.offload_pipeline(
        pipe, device=device, device_budget="500KiB", example_inputs=pipelines.arguments("flux")
    )
    for _ in range(2):
        assert torch.equal(pipelines.image(pipe, "flux"), want)


@pytest.mark.stress
def test_another_call_than_the_planned_one() -> None:
    plain, pipe = pipelines.build("flux"), offloaded("flux", share=0.4)
    calls: list[dict[str, Any]] = [
        {"num_images_per_prompt": 2},
        {"height": 64, "width": 48},
        {},
        {"prompt": ["w5", "w9 w10"]},
    ]
    for call in calls:
        assert torch.equal(pipelines.image(pipe, "flux", **call), pipelines.image(plain, "flux", **call))


def test_a_call_that_is_interrupted(pipe: Any) -> None:
    plain = pipelines.build("flux")

    def stop(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step == 1
        return {}

    calls = {"callback_on_step_end": stop, "num_inference_steps": 5}
    assert torch.equal(pipelines.image(pipe, "flux", **calls), pipelines.image(plain, "flux", **calls))

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipelines.image(pipe, "flux", callback_on_step_end=fail)
    assert torch.equal(pipelines.image(pipe, "flux"), plain_image("flux"))


@pytest.mark.stress
def test_last_calls_that_cannot_be_predicted() -> None:
    """A safety checker reads values. The plan ends before it, with a note; images are flagged as by the plain
    pipeline."""
    call = {key: value for key, value in pipelines.arguments("checked").items() if key != "prompt"}

    def painted(pipe: Any) -> Any:
        found = pipe("w5 w9", generator=torch.Generator().manual_seed(4), output_type="pt", **call)
        return found.images, found.nsfw_content_detected

    want, flags = painted(pipelines.build("checked"))
    pipe = offloaded("checked")
    for _ in range(2):
        image, found = painted(pipe)
        assert torch.equal(image, want)
        assert found == flags
    plan = pipe.weightstream.plan(**call)
    assert [turn.component for turn in plan.turns][-1] == "vae"
    assert any("the calls after vae are not known" in note for note in plan.notes)
    assert plan.notes[0] in str(plan)


def test_components_that_come_later() -> None:
    """They do not stream, and the plan has a note. `to` moves only them."""
    pipe, other = offloaded("flux"), pipelines.build("flux").vae
    pipe.vae = other
    plan = pipe.weightstream.plan(**pipelines.arguments("flux"))
    assert "vae" not in {turn.component for turn in plan.turns}
    assert any(note.startswith("vae is not in this plan") for note in plan.notes)
    assert pipe.to("cpu") is pipe
    pipe.vae = pipelines.build("flux").vae.to("meta")
    with pytest.raises(NotImplementedError, match="meta tensor"):
        pipe.to("cpu")
    pipe.vae = pipelines.build("flux").vae
    assert torch.equal(pipelines.image(pipe, "flux"), plain_image("flux"))
    pipe.weightstream.remove()


@pytest.mark.stress
def test_every_budget_from_the_least_on_plans() -> None:
    pipe = offloaded("flux")
    example, refused = pipelines.arguments("flux"), []
    pipe.weightstream.remove()
    shares = [4, 8, 11, 14, 22, 35]
    for share in shares:
        try:
            weightstream.offload_pipeline(
                pipe, device="cpu", device_budget=nbytes(pipe) * share // 100, example_inputs=example
            )
        except weightstream.PlanError:
            refused.append(share)
        else:
            pipe.weightstream.remove()
    assert refused == shares[: len(refused)], "a larger budget than one that plans"
    assert 0 < len(refused) < 6


# -- other behaviour ---------------------------------------------------------------------------------------------------


@pytest.mark.stress
@pytest.mark.parametrize("args", [("cpu",), (torch.device("cpu"),), ("cpu", torch.float32), (torch.float32,)])
def test_a_move_to_the_same_device_does_nothing(pipe: Any, args: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weightstream"):
        assert pipe.to(*args) is pipe
        assert [record.levelname for record in caplog.records if "to()" in record.message] == ["DEBUG"]
        assert pipe.transformer.to(*args) is pipe.transformer
    assert pipe.transformer.weightstream.stats().steps >= 0


@pytest.mark.parametrize("args", [("meta",), (torch.float16,), ("cpu", torch.bfloat16)])
def test_other_moves_are_refused_with_the_remedy(pipe: Any, args: Any) -> None:
    with pytest.raises(weightstream.OffloadError, match=r"pipe\.weightstream\.remove\(\)"):
        pipe.to(*args)
    for move in (("meta",), ("meta", torch.float16)):
        with pytest.raises(weightstream.OffloadError, match=r"weightstream\.remove\(\)"):
            pipe.transformer.to(*move)


@pytest.mark.parametrize("way", ["half", "to"])
def test_a_component_is_cast_and_cast_back(pipe: Any, way: str) -> None:
    want = plain_image("flux")
    plain = pipelines.build("flux").vae.half().float()
    before = pipe.weightstream.stats().components["vae"].steps
    assert (pipe.vae.half() if way == "half" else pipe.vae.to("cpu", torch.float16)) is pipe.vae
    assert pipe.vae.dtype == torch.float16
    assert {p.dtype for p in pipe.vae.parameters()} == {torch.float16}
    assert pipe.vae.float() is pipe.vae
    assert pipe.weightstream.components["vae"] is pipe.vae.weightstream
    assert all(torch.equal(a, b) for a, b in zip(pipe.vae.parameters(), plain.parameters(), strict=True))
    with torch.no_grad():
        for param, value in zip(pipe.vae.parameters(), pipelines.build("flux").vae.parameters(), strict=True):
            param.copy_(value)
    assert torch.equal(pipelines.image(pipe, "flux"), want)
    assert pipe.weightstream.stats().components["vae"].steps == before + 1


@pytest.mark.parametrize("name", ["enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"])
def test_other_ways_to_offload_are_refused_with_the_remedy(pipe: Any, name: str) -> None:
    with pytest.raises(weightstream.OffloadError, match=r"remove\(\) first.*device_budget="):
        getattr(pipe, name)(torch.device("cpu"))


@pytest.mark.stress
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_a_plain_pipeline(way: str) -> None:
    want, pipe = plain_image("flux"), offloaded("flux")
    pipelines.image(pipe, "flux")
    other = copy.deepcopy(pipe) if way == "deepcopy" else pickle.loads(pickle.dumps(pipe))
    assert type(other) is diffusers.FluxPipeline
    assert other.weightstream is None
    assert torch.equal(pipelines.image(other, "flux"), want)
    assert torch.equal(pipelines.image(pipe, "flux"), want)
    assert other.to(torch.float64).transformer.dtype == torch.float64
    other.to(torch.float32)
    if way == "deepcopy":  # an unpickled pipeline was never offloaded in this process
        weightstream.offload_pipeline(other, device="cpu", device_budget="500KiB")
    pipe.weightstream.remove()
    assert torch.equal(pipelines.image(other, "flux"), want)


def test_remove_inside_a_call_is_refused_completely() -> None:
    """Inside a component's forward nothing is removed; between its calls everything is."""
    want, pipe = plain_image("flux"), offloaded("flux", share=0.4)
    owner = pipe.weightstream
    hook = pipe.transformer.single_transformer_blocks[1].register_forward_hook(lambda *_: owner.remove())
    with pytest.raises(weightstream.OffloadError, match="inside a step"):
        pipelines.image(pipe, "flux")
    hook.remove()
    assert all(hasattr(part, "weightstream") for part in parts(pipe).values())
    assert torch.equal(pipelines.image(pipe, "flux"), want)
    owner.plan(**pipelines.arguments("flux"))

    def leave(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        owner.remove()
        return kwargs

    assert torch.equal(pipelines.image(pipe, "flux", callback_on_step_end=leave), want)
    assert not any(hasattr(part, "weightstream") for part in parts(pipe).values())
    with pytest.raises(weightstream.OffloadError, match="nothing streams any more"), owner.trace():
        pass


def test_removing_absent_hooks_does_nothing(pipe: Any) -> None:
    want = plain_image("flux")
    pipe.remove_all_hooks()
    pipe.maybe_free_model_hooks()
    pipe.reset_device_map()
    assert torch.equal(pipelines.image(pipe, "flux"), want)


def test_it_is_saved_as_the_plain_one(pipe: Any, tmp_path: Path) -> None:
    pipe.transformer.save_pretrained(tmp_path)
    again = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)
    plain = pipelines.build("flux").transformer.state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("when", only(["before", "after"], "before"))
def test_compiled_blocks(when: str) -> None:
    """`compile_repeated_blocks` on an offloaded component, before its first call or after: close to the plain
    outputs."""
    pipe = offloaded("flux", share=0.4)
    want = plain_image("flux")
    if when == "after":
        assert torch.equal(pipelines.image(pipe, "flux"), want)
    pipe.transformer.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(pipelines.image(pipe, "flux"), want, atol=1e-4, rtol=1e-4)
    block = pipe.transformer.single_transformer_blocks[0]
    assert block._compiled_call_impl is not None
    pipe.weightstream.remove()
    assert block._compiled_call_impl is None
    assert torch.equal(pipelines.image(pipe, "flux"), want)


@pytest.mark.stress
@pytest.mark.parametrize("compiled", ["before", "after"])
@pytest.mark.parametrize("cache", CACHES)
def test_compiled_blocks_with_a_cache(cache: str, compiled: str) -> None:
    """Compiled before or after the cache is enabled, skipped blocks are not filled."""
    plain, pipe = pipelines.build("flux"), offloaded("flux", share=0.35)
    pipelines.image(pipe, "flux", num_inference_steps=6)
    uncached = pipe.weightstream.stats().components["transformer"].filled_nbytes
    if compiled == "before":
        pipe.transformer.compile_repeated_blocks(backend="aot_eager")
        pipelines.image(pipe, "flux", num_inference_steps=6)
    for each in (plain, pipe):
        each.transformer.enable_cache(cache_config(cache))
    if compiled == "after":
        pipe.transformer.compile_repeated_blocks(backend="aot_eager")
    want = pipelines.image(plain, "flux", num_inference_steps=6)
    for _ in range(3):
        before = pipe.weightstream.stats().components["transformer"]
        torch.testing.assert_close(pipelines.image(pipe, "flux", num_inference_steps=6), want, atol=1e-4, rtol=1e-4)
    after = pipe.weightstream.stats().components["transformer"]
    assert after.unplanned_fills == before.unplanned_fills
    assert after.filled_nbytes - before.filled_nbytes < 0.8 * uncached
    pipe.weightstream.remove()
    pipe.transformer.disable_cache()
    assert torch.equal(pipelines.image(pipe, "flux"), plain_image("flux"))


def test_a_trace_is_of_all_components(pipe: Any) -> None:
    with pipe.weightstream.trace() as trace:
        pipelines.image(pipe, "flux")
    names = {span.name.partition(":")[0] for span in trace.spans}
    assert names == {"text_encoder", "text_encoder_2", "transformer", "vae"}


# -- wrong input -------------------------------------------------------------------------------------------------------


def test_other_objects_than_pipelines_are_refused() -> None:
    for value in (3, "flux", object()):
        with pytest.raises(weightstream.ConfigError, match="neither a torch module nor a diffusers pipeline"):
            weightstream.offload(value)


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"device_budget": "10KiB"}, weightstream.PlanError, "that all components must keep"),
        ({"device_budget": "1MiB", "host_budget": "1GiB"}, weightstream.ConfigError, "neither host_budget"),
        ({"offload_group_size": 2}, weightstream.ConfigError, "takes device_budget"),
        ({"device_budget": "1MiB", "example_inputs": {"hight": 3}}, weightstream.ConfigError, "takes no hight"),
        ({"device_budget": "1MiB", "example_inputs": "a cat"}, weightstream.ConfigError, "of a call.*not str"),
        ({"device_budget": "1MiB", "example_inputs": ("a",)}, weightstream.ConfigError, "keyword arguments of a call"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], kind: type[Exception], text: str) -> None:
    pipe = pipelines.build("flux")
    with pytest.raises(kind, match=text):
        weightstream.offload_pipeline(pipe, device="cpu", **settings)
    assert torch.equal(pipelines.image(pipe, "flux"), plain_image("flux"))
    assert not any(hasattr(part, "weightstream") for part in parts(pipe).values())


@pytest.mark.stress
def test_offloading_twice() -> None:
    pipe = offloaded("flux")
    with pytest.raises(weightstream.OffloadError, match="offloaded already"):
        weightstream.offload_pipeline(pipe, device="cpu", device_budget="1MiB")
    with pipe.weightstream as found:
        pass
    found.remove()
    with pytest.raises(weightstream.OffloadError, match="nothing streams any more"):
        found.plan()


def test_a_call_that_cannot_be_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is offloaded all the same, and its first call shows the order."""
    want = plain_image("flux")
    pipe = pipelines.build("flux")

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no call like this")

    with monkeypatch.context() as patch:
        patch.setattr(type(pipe), "check_inputs", refuse)
        weightstream.offload_pipeline(pipe, device="cpu", device_budget=nbytes(pipe) // 2)
        with pytest.raises(weightstream.OffloadError, match="no call like this"):
            pipe.weightstream.plan()
    assert torch.equal(pipelines.image(pipe, "flux"), want)
