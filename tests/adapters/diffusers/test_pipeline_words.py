"""Messages to users of pipelines, and changes of components through their classes, compilers and embeddings."""

from __future__ import annotations

import logging
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pipelines
import weightstream
from weightstream.errors import OffloadError, PlanError, UnsupportedError

CHECKED = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}


def offloaded(pipe: Any, kind: str, budget: int | str = "550KiB") -> Any:
    call = pipelines.arguments(kind)
    weightstream.offload_pipeline(pipe, device="cpu", device_budget=budget, example_inputs=call)
    return pipe.weightstream


def test_textual_inversion_while_a_pipeline_streams() -> None:
    pipe, plain = pipelines.build("checked"), pipelines.build("checked")
    pipe.safety_checker = plain.safety_checker = None
    vector = torch.randn(1, 32)

    def image(of: Any, prompt: str) -> torch.Tensor:
        found: torch.Tensor = of(prompt, **CHECKED, generator=torch.Generator().manual_seed(0)).images
        return found

    weightstream.offload_pipeline(pipe, device="cpu", device_budget="2MiB", example_inputs={"prompt": "w5", **CHECKED})
    with torch.no_grad():
        image(pipe, "w5")
        for each in (pipe, plain):
            each.load_textual_inversion({"w200": vector.clone()}, token="w200")
        for prompt in ("w5 w200", "w5"):
            assert torch.equal(image(pipe, prompt), image(plain, prompt))
        for each in (pipe, plain):
            each.unload_textual_inversion()
        assert torch.equal(image(pipe, "w5"), image(plain, "w5"))
        with pytest.raises(Exception, match=r"w200|token"):  # of diffusers: the token is unknown
            pipe.unload_textual_inversion("w200")
        assert torch.equal(image(pipe, "w5"), image(plain, "w5"))
        pipe.weightstream.remove()
        assert torch.equal(image(pipe, "w5"), image(plain, "w5"))


@pytest.mark.stress
def test_modular_pipelines_have_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    modular = pytest.importorskip("diffusers.modular_pipelines")
    pipe = modular.StableDiffusionXLAutoBlocks().get_workflow("text2image").init_pipeline()
    pipe.update_components(**{k: v for k, v in pipelines.sdxl_parts().items() if k in pipe.component_names})
    log = logging.getLogger("diffusers")
    log.addHandler(caplog.handler)
    try:
        weightstream.offload_pipeline(pipe, device="cpu", device_budget="4MiB")
        plan = pipe.weightstream.plan(steps=2, height=32, width=32)
        assert {"text_encoder", "unet", "vae"} <= {turn.component for turn in plan.turns}
        with pytest.raises(OffloadError, match=r"are not known before it runs: .*Give the keyword arguments"):
            pipe.weightstream.plan(prompt=5)
    finally:
        log.removeHandler(caplog.handler)
        pipe.weightstream.remove()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.stress
def test_a_class_that_is_changed_through_a_component() -> None:
    """Step caches do this, since they have only the pipeline."""
    pipe, plain = pipelines.build("flux"), pipelines.build("flux")
    kind = type(plain.transformer)
    forward = kind.forward
    streamer = offloaded(pipe, "flux")
    try:
        type(pipe.transformer).forward = lambda self, *args, **kw: (forward(self, *args, **kw)[0] * 0.5,)
        assert kind.forward is not forward
        assert torch.equal(pipelines.image(pipe, "flux"), pipelines.image(plain, "flux"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(pipe.transformer), "forward", forward)
            assert torch.equal(pipelines.image(pipe, "flux"), pipelines.image(plain, "flux"))
        assert kind.forward is not forward
        streamer.remove()
        assert torch.equal(pipelines.image(pipe, "flux"), pipelines.image(plain, "flux"))
    finally:
        kind.forward = forward
    assert torch.equal(pipelines.image(pipe, "flux"), pipelines.image(plain, "flux"))


def test_a_class_that_is_assigned_stays() -> None:
    pipe, plain = pipelines.build("flux"), pipelines.build("flux")
    streamer = offloaded(pipe, "flux")
    for each in (pipe, plain):
        kind = type(each.transformer)

        class Mine(kind):  # type: ignore[misc, valid-type]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return (super().forward(*args, **kwargs)[0] * 2,)

        each.transformer.__class__ = Mine
    assert torch.equal(pipelines.image(pipe, "flux"), pipelines.image(plain, "flux"))
    streamer.remove()
    assert type(pipe.transformer).__name__ == "Mine"
    assert torch.equal(pipelines.image(pipe, "flux"), pipelines.image(plain, "flux"))
    assert pipe.transformer.to(torch.float64).dtype == torch.float64
    assert isinstance(type(pipe.transformer)(**pipe.transformer.config), type(pipe.transformer))


@pytest.mark.stress
def test_a_method_that_is_changed_on_the_class() -> None:
    pipe, plain = pipelines.build("flux"), pipelines.build("flux")
    kind = type(plain.vae)
    decode = kind.decode
    offloaded(pipe, "flux")
    with torch.no_grad():
        try:
            kind.decode = lambda self, *args, **kwargs: (decode(self, *args, **kwargs)[0] + 1,)
            assert torch.equal(pipelines.image(pipe, "flux"), pipelines.image(plain, "flux"))
        finally:
            kind.decode = decode
        assert torch.equal(pipelines.image(pipe, "flux"), pipelines.image(plain, "flux"))


@pytest.mark.stress
def test_a_component_that_is_compiled_later_is_planned() -> None:
    pipe = pipelines.build("flux")
    streamer = offloaded(pipe, "flux")
    before = streamer.plan(**pipelines.arguments("flux"))
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    plan = streamer.plan(**pipelines.arguments("flux"))
    assert [(turn.component, turn.num) for turn in plan.turns] == [(turn.component, turn.num) for turn in before.turns]
    assert plan.notes == before.notes


def test_an_error_names_a_budget_that_works() -> None:
    pipe = pipelines.build("flux")
    with pytest.raises(PlanError, match="that all components must keep on the device") as caught:
        offloaded(pipe, "flux", "20KiB")
    (needed,) = re.findall(r"= \S+ \((\d+) bytes\)", str(caught.value))
    offloaded(pipe, "flux", int(needed)).remove()
    with pytest.raises(PlanError):
        offloaded(pipe, "flux", int(needed) // 2)


def test_offloading_twice_names_the_right_call() -> None:
    pipe, other = pipelines.build("flux"), pipelines.build("flux")
    other.text_encoder = pipe.text_encoder
    with offloaded(pipe, "flux"), pytest.raises(OffloadError, match=r"^text_encoder of .*offload\(pipe\.transformer\)"):
        offloaded(other, "flux")


@pytest.mark.stress
def test_a_second_attempt_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    try:
        weightstream.offload(model, device="cpu", device_budget="10KiB")
    except PlanError:
        weightstream.offload(model, device="cpu", device_budget="50KiB").remove()
    pipe = pipelines.build("flux")
    with offloaded(pipe, "flux"):
        pipe.text_encoder.half()
    assert not [record for record in caplog.records if "outside of the model" in record.message]


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.randn(3, 4)])


@pytest.mark.parametrize(
    ("made", "text"), [(nn.UninitializedParameter, "0.odd has no shape yet"), (nested, "0.odd is a nested tensor")]
)
def test_tensors_without_a_size_are_refused_by_name(made: Any, text: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].odd = made()
    with pytest.raises(UnsupportedError, match=text):
        weightstream.offload(model, device="cpu", device_budget="1MiB")
