"""What the tests keep of a model that was followed is what following the next one would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import following
from expert_rig import CONFIGS, built, experts_of
from models import MODELS
from weightstream.adapters.shapes import Footprint, observe
from weightstream.plan.manifest import Workload

transformers = pytest.importorskip("transformers")

WORKLOAD = Workload(context=32)


class Counting:
    def __init__(self) -> None:
        self.num, self.once = 0, following.once(self)

    def __call__(self, model: nn.Module, workload: Workload) -> Footprint:
        self.num += 1
        return observe(model, workload)


def told(found: Footprint) -> tuple[Any, ...]:
    return (
        (found.activation_nbytes, found.cache_nbytes),
        [(id(module), caller) for module, caller in found.calls],
        [(call, num, repr(op)) for call, num, op in found.ops],
        [(call, id(tensor)) for call, tensor in found.reads],
        told(found.captured) if found.captured is not None else (),
    )


@pytest.mark.parametrize("name", [*CONFIGS, "llama", "gpt2", "jamba"])
def test_what_is_kept_is_what_following_gives(name: str) -> None:
    counting = Counting()
    one, two = (built(name) if name in CONFIGS else MODELS[name]().module for _ in range(2))
    for model in (one, two):
        assert told(counting.once(model, WORKLOAD)) == told(observe(model, WORKLOAD))
    assert counting.num == 1


def hooked(model: Any) -> None:
    experts_of(model)[0].register_forward_hook(lambda *_: None)


def with_a_forward(model: Any) -> None:
    experts_of(model)[1].forward = experts_of(model)[1].forward


def in_groups(model: Any) -> None:
    model.set_experts_implementation("grouped_mm")


def in_float32(model: Any) -> None:
    model.float()


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def with_another_module(model: Any) -> None:
    model.lm_head = nn.Sequential(model.lm_head)


@pytest.mark.parametrize("change", [hooked, with_a_forward, in_groups, in_float32, tied, with_another_module])
def test_others_are_followed(change: Any) -> None:
    counting, one, two = Counting(), built(), built()
    change(two)
    for model, workload, num in ((one, WORKLOAD, 1), (two, WORKLOAD, 2), (one, Workload(context=64), 3)):
        counting.once(model, workload)
        assert counting.num == num


def test_nothing_is_kept_alive() -> None:
    counting, model = Counting(), built()
    found = counting.once(model, WORKLOAD)
    kept = following._bare(found)
    assert not any(isinstance(part, (nn.Module, torch.Tensor)) for pair in (*kept.calls, *kept.reads) for part in pair)
    assert found.calls
