"""Two GPUs: one model over both, and a model on the one that is not current. The bits are those of one GPU."""

from __future__ import annotations

import copy
import gc
from itertools import cycle
from typing import Any

import pytest
import torch

import generating
import streaming
import weightstream
from coded_rig import random_model, rows
from expert_rig import built, generated, held, prompt
from models import BLOCKLESS, MODELS, assert_same
from stack import Stack, assert_equal, captured, floats, slow
from streaming import plain, run
from weightstream.adapters.steps import graph_runner
from weightstream.api.multi_gpu import Stripes

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices"),
]

BLOCKED = [name for name in MODELS if name not in BLOCKLESS]


def striped(module: Any, **settings: Any) -> Stripes:
    return streaming.striped(module, 2, (3, 4, 6, 8, 12, 20), **settings)


@pytest.mark.parametrize("name", BLOCKED)
def test_outputs_equal_those_of_one_gpu(name: str) -> None:
    model, reference = MODELS[name](), plain(name, "cuda:0")
    with striped(model.module, codec="none"):
        for seed in range(6):
            assert_same(on_host(run(model, "cuda:0", seed)), on_host(run(reference, "cuda:0", seed)))


def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """State of a block, such as its keys, stays where the block computes."""
    return [tensor.cpu() for tensor in tensors]


@torch.no_grad()
def test_coded_weights() -> None:
    model, reference = (random_model(num_blocks=8, width=512) for _ in range(2))
    reference.to("cuda:0")
    with striped(model, codec="compressed") as stripes:
        assert all(part.plan.manifest.codes for part in stripes.parts.values())
        for seed in range(6):
            x = rows(seed, 512).cuda(0)
            assert torch.equal(model(x), reference(x))


def test_a_mixture_generates_over_two_gpus() -> None:
    model, reference = built(), built().to("cuda:0")
    with striped(model) as stripes:
        assert len(stripes.parts) == 2
        for _ in range(2):
            assert_same(generated(model, prompt(7).cuda(0)), generated(reference, prompt(7).cuda(0)))
            options, reports = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}, []
            found = weightstream.generate(model, prompt(7).cuda(0), on_decoding=reports.append, **options)
            assert torch.equal(found, reference.generate(prompt(7).cuda(0), **options))
            assert reports[0].replays, reports[0]


def text(name: str, cls: Any = None) -> Any:
    return generating.build(generating.MODELS[name](), cls)


@pytest.mark.parametrize("codec", ["none", "compressed"])
@pytest.mark.parametrize("name", generating.MODELS)
def test_text_comes_from_one_graph_over_both(name: str, codec: str) -> None:
    model, reference, reports = text(name), text(name).cuda(0), []
    with striped(model, codec=codec) as stripes:
        assert len(stripes.parts) == 2
        held, reserved = [], []
        for length, batch, more in (5, 1, {}), (9, 3, {}), (5, 1, {"do_sample": True}), (5, 1, {}), (9, 3, {}):
            ids, options = prompt(length, batch).cuda(0), generating.options(**more)
            torch.manual_seed(5)
            want = reference.generate(ids, **options, **generating.STATIC)
            torch.manual_seed(5)
            assert torch.equal(weightstream.generate(model, ids, on_decoding=reports.append, **options), want)
            assert reports[-1].reason is None, reports[-1]
            assert reports[-1].replays > 8
            gc.collect()
            torch.cuda.empty_cache()
            held.append([torch.cuda.memory_allocated(device) for device in range(2)])
            reserved.append([torch.cuda.memory_reserved(device) for device in range(2)])
        assert (held[4], held[3]) == (held[1], held[2]), "a graph's memory is released with it, on both"
        assert all(last - first <= 2 << 20 for first, last in zip(reserved[1], reserved[4], strict=True)), "pools too"
        assert stripes.stats().unplanned_fills < stripes.stats().fills / 4
        torch.manual_seed(5)
        assert torch.equal(model.generate(ids, **options, **generating.STATIC), want), "eager"
    assert torch.equal(model.cuda(0).generate(ids, **options, **generating.STATIC), want)


class Reading(transformers.LlamaForCausalLM):
    """Every second layer synchronises with its device, wherever it is."""

    waits = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers[1::2]:
            layer.register_forward_hook(self.look)

    @classmethod
    def look(cls, _: Any, args: Any, __: Any) -> None:
        if cls.waits:
            float(args[0].sum())


def test_a_failed_capture_leaves_both_gpus_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference, reports, ids = text("llama", Reading), text("llama").cuda(0), [], prompt(5).cuda(0)
    want = reference.generate(ids, **generating.options(), **generating.STATIC)
    with striped(model, codec="none") as stripes:
        assert len(stripes.parts) == 2
        for waits in (True, False, True, False):
            with monkeypatch.context() as within:
                if waits:
                    within.setattr(Reading, "waits", True)
                    within.setattr(graph_runner, "_HostWatch", Blind)
                options = generating.options()
                assert torch.equal(weightstream.generate(model, ids, on_decoding=reports.append, **options), want)
            assert (reports[-1].reason is not None) == waits, reports[-1]
            assert torch.equal(model.generate(ids, **options, **generating.STATIC), want)
            reserved = []
            # memory that another stream used is released only while torch sees no capture in progress
            for _ in range(3):
                for device in range(2):
                    torch.empty(64 << 20, device=f"cuda:{device}").record_stream(torch.cuda.Stream(device))
                    torch.cuda.synchronize(device)
                reserved.append([torch.cuda.memory_reserved(device) for device in range(2)])
            assert reserved[-1] == reserved[0]


class Blind(graph_runner._HostWatch):
    """Sees no host wait before the capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def launched(codec: str, num_graphs: int = 12, rounds: int = 20) -> None:
    """Graphs of both, and eager steps between them, under late copies into poisoned memory."""
    with torch.device("cuda:0"):
        reference = Stack(8, 512).eval().to(torch.float32 if codec == "none" else torch.bfloat16)
    model, inputs = copy.deepcopy(reference).cpu(), floats(reference)
    with torch.no_grad(), striped(model, codec=codec) as stripes:
        want = [reference(x) for x in inputs]
        assert torch.equal(model(inputs[0]), want[0])
        assert len(stripes.parts) == 2
        assert all(part.plan.step_nbytes for part in stripes.parts.values())
        assert all(bool(part.plan.manifest.codes) == (codec != "none") for part in stripes.parts.values())
        for _ in range(num_graphs):
            step = captured(stripes, model, inputs[0])
            turns = cycle((step, step, model, model, step, model))
            with stripes.step():
                assert_equal(lambda x, turns=turns: next(turns)(x), inputs, want, rounds)
            assert_equal(model, inputs, want, 1)


@pytest.mark.parametrize("codec", ["none", "compressed"])
def test_late_copies_in_graphs_of_both(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=400_000)
    launched(codec)


@pytest.mark.parametrize("form", ["cached", "coded", "coded, streams", "cached, coded"])
def test_the_gpu_that_is_not_current(form: str) -> None:
    assert torch.cuda.current_device() == 0
    model, reference = built(), built().to("cuda:1")
    with held(model, form, 6, device="cuda:1"):
        for _ in range(2):
            assert_same(generated(model, prompt(5).cuda(1)), generated(reference, prompt(5).cuda(1)))
            options, reports = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}, []
            found = weightstream.generate(model, prompt(5).cuda(1), on_decoding=reports.append, **options)
            assert reports[0].replays, reports[0]
            assert torch.equal(found, reference.generate(prompt(5).cuda(1), **options))
    assert torch.cuda.current_device() == 0


def test_models_on_both_gpus_are_captured_alternately() -> None:
    """In either order: PyTorch's capture stream is on the device of the first capture."""
    for index in (1, 0, 1):
        for offloads in (False, True):
            model, reference, reports = text("llama"), text("llama").cuda(index), []
            if offloads:
                budget = sum(param.nbytes for param in model.parameters()) // 2
                weightstream.offload(model, device=f"cuda:{index}", device_budget=budget)
            else:
                model.cuda(index)
            ids, options = prompt(5).to(f"cuda:{index}"), generating.options()
            with torch.cuda.device(index):
                want = reference.generate(ids, **options, **generating.STATIC)
            assert torch.equal(weightstream.generate(model, ids, on_decoding=reports.append, **options), want)
            assert reports[0].replays > 8, reports[0]
