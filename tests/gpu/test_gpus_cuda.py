"""Two GPUs: one model over both, and a model on the one that is not current. The bits are those of one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import streaming
import weightstream
from coded_rig import random_model, rows
from expert_rig import built, generated, held, prompt
from models import BLOCKLESS, MODELS, assert_same, model_nbytes
from streaming import plain, run
from weightstream import ConfigError
from weightstream.runtime import lent
from weightstream.runtime.backend import Copy, Event
from weightstream.striping import Stripes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices"),
]

BLOCKED = [name for name in MODELS if name not in BLOCKLESS]


def striped(module: Any, **settings: Any) -> Stripes:
    return streaming.striped(module, 2, (3, 4, 6, 8, 12, 20), **settings)


@pytest.mark.parametrize("name", BLOCKED)
def test_the_bits_are_those_of_one_gpu(name: str) -> None:
    model, reference = MODELS[name](), plain(name, "cuda:0")
    with striped(model.module, codec="none"):
        for seed in range(6):
            assert_same(on_host(run(model, "cuda:0", seed)), on_host(run(reference, "cuda:0", seed)))


def on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a block keeps, such as its keys, stays where it computes."""
    return [tensor.cpu() for tensor in tensors]


@torch.no_grad()
def test_coded_weights() -> None:
    model, reference = (random_model(num_blocks=8, width=512) for _ in range(2))
    reference.to("cuda:0")
    with striped(model, codec="small") as stripes:
        assert all(part.plan.manifest.codes for part in stripes.parts.values())
        for seed in range(6):
            x = rows(seed, 512).cuda(0)
            assert torch.equal(model(x), reference(x))


def test_a_mixture_generates_over_two() -> None:
    model, reference = built(), built().to("cuda:0")
    with striped(model) as stripes:
        assert len(stripes.parts) == 2
        for _ in range(2):
            assert_same(generated(model, prompt(7).cuda(0)), generated(reference, prompt(7).cuda(0)))
            found = weightstream.generate(model, prompt(7).cuda(0), max_new_tokens=6, do_sample=False, pad_token_id=0)
            wanted = reference.generate(prompt(7).cuda(0), max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("form", ["cached", "coded", "coded, streams", "cached, coded"])
def test_the_gpu_that_is_not_current(form: str) -> None:
    assert torch.cuda.current_device() == 0
    model, reference = built(), built().to("cuda:1")
    with held(model, form, 6, device="cuda:1"):
        for _ in range(2):
            assert_same(generated(model, prompt(5).cuda(1)), generated(reference, prompt(5).cuda(1)))
            options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            found = weightstream.generate(model, prompt(5).cuda(1), **options)
            assert torch.equal(found, reference.generate(prompt(5).cuda(1), **options))
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("name", ["Stack", "llama", "llama-bf16", "CalledTwice", "mixtral"])
def test_a_link_that_is_lent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "PIECE_NBYTES", 4096)
    monkeypatch.setattr(lent, "_LEAST_NBYTES", 512)
    bring, brought = lent.Neighbour.bring, []

    def counted(neighbour: lent.Neighbour, copies: Sequence[Copy], released: Event) -> None:
        brought.append(len(copies))
        bring(neighbour, copies, released)

    monkeypatch.setattr(lent.Neighbour, "bring", counted)
    model, reference = MODELS[name](), plain(name, "cuda:0")
    budget = model_nbytes(model.module) // 2
    with weightstream.offload(model.module, device="cuda:0", device_budget=budget, lent_links=[1], codec="none") as s:
        for seed in range(20):
            assert_same(run(model, "cuda:0", seed), run(reference, "cuda:0", seed))
        assert s.plan.step_nbytes
        assert brought
        if name.startswith("llama"):
            ids = torch.arange(1, 9, device="cuda:0").view(1, 8)
            options = {"max_new_tokens": 12, "do_sample": False}
            want = reference.module.generate(ids, cache_implementation="static", disable_compile=True, **options)
            told: list[Any] = []
            for _ in range(5):
                assert torch.equal(weightstream.generate(model.module, ids, on_decoding=told.append, **options), want)
            assert all("with lent_links steps run eager" in str(decoding) for decoding in told)


def test_a_link_cannot_be_lent_to_itself() -> None:
    with pytest.raises(ConfigError, match="name others"):
        weightstream.offload(MODELS["Stack"]().module, device="cuda:0", device_budget=1 << 20, lent_links=[0])
