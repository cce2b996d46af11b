"""A model over several devices: the bits of one, whose block each is, and what goes from one device to another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import weightstream
from models import MODELS, Model, assert_same, model_nbytes, weights
from streaming import plain, run
from weightstream import ConfigError, OffloadError, PlanError
from weightstream.plan.lanes import whose
from weightstream.striping import Crossing, Stripes, Way, sharing

BLOCKLESS = frozenset({"NoModuleList", "BareParameters", "LinearBatchNormLinear", "Recurrent"})


def striped(model: Model, num: int, **settings: Any) -> Stripes:
    """Over so many devices, at the smallest of some budgets that plans."""
    nbytes = model_nbytes(model.module)
    for sixteenths in (2, 3, 4, 5, 6, 8, 12, 20):
        try:
            budgets = dict.fromkeys(range(num), nbytes * sixteenths // 16)
            return weightstream.offload(model.module, device="cpu", device_budget=budgets, **settings)  # type: ignore[no-any-return]
        except PlanError:
            continue
    raise AssertionError("no budget plans")


@pytest.mark.parametrize(
    ("name", "num"),
    [
        pytest.param(name, num, marks=[pytest.mark.stress] * ((i + num) % 3 > 0))
        for i, name in enumerate(n for n in MODELS if n not in BLOCKLESS)
        for num in (2, 3)
    ],
)
def test_the_bits_are_those_of_one_device(name: str, num: int) -> None:
    model, reference = MODELS[name](), plain(name, "cpu")
    with striped(model, num) as stripes:
        assert 1 <= len(stripes.parts) <= num
        for seed in range(4):
            assert_same(run(model, "cpu", seed), run(reference, "cpu", seed))
        assert all(part.stats().steps == 4 for part in stripes.parts.values())
    for key, tensor in weights(reference.module).items():
        assert torch.equal(weights(model.module)[key], tensor), key
    assert_same(run(model, "cpu", 9), run(reference, "cpu", 9))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(0, 30),
)
def test_whose_block_each_is(nbytes: list[int], budgets: list[int], beside: int) -> None:
    found = whose(nbytes, budgets, [1.0] * len(budgets), beside)
    assert len(found) == len(nbytes)
    held = [beside * (lane == 0) for lane in range(len(budgets))]
    for size, lane in zip(nbytes, found, strict=True):
        held[lane] += size
    if all(h <= budget for h, budget in zip(held, budgets, strict=True)):
        return
    room = [budgets[0] - beside, *budgets[1:]]
    ideal = next(more for more in range(sum(nbytes) + 60) if sum(max(0, r + more) for r in room) >= sum(nbytes))
    for lane in set(found):  # with blocks that cannot be cut nobody streams much more than with some that can
        assert held[lane] - budgets[lane] <= ideal + 2 * max(nbytes)


def test_blocks_that_stream_take_turns_and_those_that_fit_stay_together() -> None:
    assert whose([4] * 6, [4, 4], [1, 1]) == [0, 1, 0, 1, 0, 1]
    assert whose([4] * 6, [8, 4], [1, 1]) == [0, 1, 0, 1, 0, 0]
    assert whose([4] * 6, [12, 12], [1, 1]) == [0, 0, 0, 1, 1, 1]
    assert whose([4] * 6, [16, 20], [1, 1], beside=8) == [0, 0, 1, 1, 1, 1]


def test_a_slower_link_has_fewer_blocks() -> None:
    found = whose([4] * 12, [1, 1], [50e9, 25e9])
    assert found.count(0) == 8
    assert found[:3].count(1) == 1


def test_blocks_that_share_a_tensor_are_found() -> None:
    blocks = [nn.Linear(2, 2) for _ in range(4)]
    blocks[3].weight = blocks[1].weight
    model = nn.ModuleList(blocks)
    assert sharing(model, blocks) == [0, 1, 2, 1]
    model.weight = blocks[2].weight
    assert sharing(model, blocks) == [0, 1, None, 1]


class Elsewhere(Way):
    """A lane whose copies are on the same device, told by a mark."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.device("cpu"))
        self.copies: list[int] = []
        self.there_ids: dict[int, torch.Tensor] = {}

    def goes(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self.there_ids

    def comes(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.there_ids

    def copied(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        made = tensor.clone()
        if self.goes(tensor):
            self.there_ids[id(made)] = made
        self.copies.append(tensor.numel())
        return made


def test_what_several_blocks_are_given_goes_once_and_what_is_written_comes_back() -> None:
    lane = Elsewhere()

    def block(x: torch.Tensor, *, mask: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(map(lane.comes, (x, mask, cache)))
        cache.add_(1)
        return lane_made(x + mask), cache

    def lane_made(tensor: torch.Tensor) -> torch.Tensor:
        lane.there_ids[id(tensor)] = tensor
        return tensor

    module = nn.Identity()
    module.forward = block
    crossing = Crossing(module, lane)
    mask, cache = torch.ones(3), torch.zeros(5)
    for step in range(3):
        x = torch.full((3,), float(step))
        y, same = crossing(x, mask=mask, cache=cache)
        assert lane.goes(y)
        assert same is cache
        assert torch.equal(y, x + 1)
        assert torch.equal(cache, torch.full((5,), step + 1.0))
    assert lane.copies.count(5) == 3, "it was written to"
    mask.add_(1)
    assert torch.equal(crossing(torch.zeros(3), mask=mask, cache=cache)[0], torch.full((3,), 2.0))


def test_a_copy_of_the_model_is_plain() -> None:
    model, reference = MODELS["Stack"](), plain("Stack", "cpu")
    with striped(model, 2):
        run(model, "cpu", 0)
        copied = Model(module=copy.deepcopy(model.module), inputs=model.inputs)
        assert copied.module.weightstream is None
    model.module.zero_grad()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
    assert_same(run(copied, "cpu", 3), run(reference, "cpu", 3))


def test_it_generates_as_the_plain_model() -> None:
    model, reference = MODELS["llama"]().module, plain("llama", "cpu").module
    ids = torch.arange(1, 9).view(1, 8)
    with striped(Model(module=model, inputs=MODELS["llama"]().inputs), 2):
        found = weightstream.generate(model, ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, reference.generate(ids, max_new_tokens=8, do_sample=False))


def test_it_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no repeated blocks"):
        striped(MODELS["NoModuleList"](), 2)
    model = MODELS["Stack"]()
    with striped(model, 2) as stripes:
        with pytest.raises(OffloadError, match="already offloaded"):
            striped(model, 2)
        with pytest.raises(OffloadError, match="move a model"):
            model.module.to(torch.float64)
        stripes.remove()
        stripes.remove()
    with pytest.raises(PlanError):
        weightstream.offload(model.module, device="cpu", device_budget={0: 1, 1: 1})
    assert "forward" not in vars(model.module)
    assert not any("forward" in vars(module) for module in model.module.modules())
