"""Operators that run once for each row have the bits and the layouts that they have for single rows."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from weightstream.adapters.steps import row_trial
from weightstream.adapters.steps.row_split import RowPlan, RowSplit, Split, plans
from weightstream.adapters.steps.row_trial import RowTrial

aten = torch.ops.aten
WIDTH = 4
Step = Callable[[torch.Tensor], Any]

library = torch.library.Library("rowsplitting", "DEF")
library.define("by_width(Tensor x, Tensor weight) -> Tensor")
library.define("strided(Tensor x) -> (Tensor, Tensor)")
library.define("expanded(Tensor x) -> Tensor")
library.define("writes(Tensor(a!) x) -> ()")
library.define("attends(Tensor queries, Tensor keys) -> Tensor")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_width(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Has other values for each number of rows and for each layout."""
    return x @ weight * len(x) + x.stride(0) + x.data_ptr() % 64


def strided(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x * x.shape[1]).mT.contiguous().mT, x.sum(-1) * x.shape[1]


def writes(x: torch.Tensor) -> None:
    x.mul_(len(x))


library.impl("by_width", by_width, "CompositeExplicitAutograd")
library.impl("strided", strided, "CompositeExplicitAutograd")
library.impl("expanded", lambda x: x[..., :1].clone().expand_as(x), "CompositeExplicitAutograd")
library.impl("writes", writes, "CompositeExplicitAutograd")
library.impl("attends", lambda queries, keys: queries @ keys.mT, "CompositeExplicitAutograd")
own = torch.ops.rowsplitting


def planned(step: Step, x: torch.Tensor) -> RowPlan:
    """The plan for `step(x)`, whose rows are the entries of the second dimension of `x`."""
    trial, one = RowTrial(x.shape[1]), alone(x, 0)
    with torch.no_grad():
        trial.run_single(lambda: step(one))
        return trial.run_wide(lambda: step(x))[1]


def alone(x: torch.Tensor, row: int) -> torch.Tensor:
    return torch.stack([x[:, row]], 1)


def split(step: Step, x: torch.Tensor, plan: RowPlan) -> Any:
    assert plan.reason is None
    mode = RowSplit(plan, x.shape[1])
    with torch.no_grad():
        output = mode.around(step)(x)
    assert mode.unknown is None
    return output


STEPS: dict[str, Step] = {
    "an operator of its own": lambda x: own.by_width(x[0], TABLE)[None],
    "with keywords": lambda x: own.by_width(x=x[0], weight=TABLE)[None],
    "of a part": lambda x: own.by_width(x[0, :, 3:7], TABLE[:4])[None],
    "one after the other": lambda x: own.by_width(own.by_width(x[0], TABLE), TABLE.mT)[None],
    "several rows of a token": lambda x: own.by_width(x.view(-1, 4), TABLE[:4]).view(1, x.shape[1], 12),
    "several outputs": lambda x: torch.cat([own.strided(x)[0], own.strided(x)[1][..., None]], -1),
    "products": lambda x: functional.linear(functional.silu(functional.linear(x, WEIGHT)), WEIGHT.mT),
    "norms": lambda x: functional.layer_norm(x, x.shape[-1:]) * x.pow(2).mean(-1, keepdim=True).rsqrt(),
    "attention": lambda x: functional.scaled_dot_product_attention(
        x.view(1, -1, 2, 4).transpose(1, 2), KEYS, KEYS, torch.ones(1, 1, x.shape[1], 9, dtype=torch.bool)
    ).transpose(1, 2).flatten(2),
    "scores": lambda x: ((x[:, None] @ SCORES).softmax(-1) @ SCORES.mT).transpose(1, 2),
}  # fmt: skip
TABLE, WEIGHT, KEYS, SCORES = normal(8, 6), normal(64, 8), normal(1, 2, 9, 4), normal(1, 2, 8, 9)


@pytest.mark.parametrize("width", [2, 3, 8])
@pytest.mark.parametrize("splits_all", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_rows_have_the_bits_of_single_ones(
    name: str, splits_all: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if splits_all:
        monkeypatch.setattr(RowTrial, "_probe", lambda _, probe, wide, *rest: f"{wide} differs")
    step, x = STEPS[name], normal(1, width, 8)
    found = split(step, x, planned(step, x))
    plain = step(x)
    assert (found.shape, found.stride()) == (plain.shape, plain.stride())
    for row in range(width):
        assert torch.equal(found[:, row : row + 1], step(alone(x, row)))


def test_only_calls_that_differ_are_split() -> None:
    x = normal(1, WIDTH, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        own.by_width(TABLE[:, :4].mT, TABLE)  # has no rows
        return own.by_width(own.by_width(x[0], TABLE), TABLE.mT)[None] + 1

    plan = planned(step, x)
    assert plan.calls == {"rowsplitting.by_width.default": 2}
    assert str(plan) == "at once, except 2 calls of rowsplitting.by_width.default"
    assert plan.nbytes == 2 * TABLE.nbytes
    assert str(planned(lambda x: x + 1, x)) == "at once"
    assert [split is None for each in plan.splits.values() for split in each.values()].count(True) == 1


def test_layouts_of_outputs_are_those_of_rows_at_once() -> None:
    x = normal(1, WIDTH, 8)
    plan = planned(own.strided, x)
    for found, plain in zip(split(own.strided, x, plan), own.strided(x), strict=True):
        assert found.stride() == plain.stride()
        assert found.dtype == plain.dtype


def test_a_call_that_was_not_tried_is_named() -> None:
    x = normal(1, WIDTH, 8)
    mode = RowSplit(planned(STEPS["an operator of its own"], x), WIDTH)
    with mode:
        own.by_width(x[0].double(), TABLE.double())
    assert (
        mode.unknown
        == "rowsplitting.by_width.default of [(4, 8), (8, 6)] was not in the pass that was tried; call generate again"
    )


def test_wrapped_tensors_are_seen_inside() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return own.by_width(x[0], TwoTensor(TABLE, -TABLE)).a[None]

    x = normal(1, WIDTH, 8)
    plan = planned(step, x)
    assert plan.calls.total() == 2
    found = split(step, x, plan)
    assert all(torch.equal(found[:, row : row + 1], step(alone(x, row))) for row in range(WIDTH))


def cached(x: torch.Tensor) -> torch.Tensor:
    """Keys of all tokens are there before the first of them attends."""
    keys = torch.zeros(9, 8).index_copy(0, torch.arange(x.shape[1]), x[0])
    return own.attends(x[0], keys)[None]


def unlike(x: torch.Tensor) -> torch.Tensor:
    """Two calls whose layouts are equal for several rows only."""
    packed = torch.empty(1, x.shape[1], 8).copy_(x)
    other = torch.empty(1, 8).copy_(x[0]) if x.shape[1] == 1 else x[0]
    spread = other.mT.contiguous().mT if x.shape[1] > 1 else torch.empty(1, 16)[:, ::2].copy_(other)
    packed = packed[0].mT.contiguous().mT
    return own.by_width(packed, TABLE) + own.by_width(spread, TABLE)


REFUSED: dict[str, tuple[Step, str]] = {
    "writes": (lambda x: own.writes(x.clone()), "rowsplitting.writes.default is not known to treat rows alone"),
    "in place": (lambda x: x.clone().sigmoid_(), "aten.sigmoid_.default computes the last elements in other code"),
    "random": (lambda x: functional.dropout(x, 0.5), "aten.native_dropout.default is not known to treat rows alone|"
                                                      "aten.bernoulli_.float is not known"),
    "out": (lambda x: torch.mm(x[0], TABLE, out=torch.empty(x.shape[1], 6)), "aten.mm.out is not known"),
    "expanded": (own.expanded, "outputs of rowsplitting.expanded.default of .* have no entry for each row"),
    "mixes rows": (lambda x: own.attends(x[0], x[0]), "have no entry|are not those of a row"),
    "a later call": (lambda x: (own.attends(x[0], WEIGHT), cached(x)), "arguments without rows depend on"),
    "a cache": (cached, "attends.default .*, and its arguments without rows depend on other tokens"),
    "unlike single rows": (unlike, "rowsplitting.by_width.default .*, and two such calls have unlike single rows"),
    "another argument": (lambda x: own.by_width(x[0], TABLE * 1)[None].mul(2).cumsum(-1 if x.shape[1] > 1 else 2),
                         "arguments of aten.cumsum.default .* are not those of a row several times"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_named(name: str) -> None:
    step, reason = REFUSED[name]
    plan = planned(step, normal(1, WIDTH, 8))
    assert not plan.splits
    assert re.search(reason, str(plan.reason)), plan.reason


def test_heads_that_share_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers packs the heads that share keys, where there is one token."""
    probe = row_trial._PROBES[aten._scaled_dot_product_efficient_attention]
    monkeypatch.setattr(row_trial, "_PROBES", {**row_trial._PROBES, own.attends: probe})
    monkeypatch.setattr(RowTrial, "_probe", lambda _, probe, wide, *rest: f"{wide} differs")
    keys = normal(1, 2, 16, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        queries = x.view(1, x.shape[1], 4, 8).transpose(1, 2)
        if x.shape[1] == 1:
            return own.attends(queries.reshape(1, 2, 2, 8), keys).view(1, 1, 4, 16)
        return own.attends(queries, keys.repeat_interleave(2, 1)).transpose(1, 2)

    x = normal(1, WIDTH, 32)
    plan = planned(step, x)
    assert plan.calls == {"rowsplitting.attends.default": 1}
    found = split(step, x, plan)
    assert all(torch.equal(found[:, row : row + 1], step(alone(x, row))) for row in range(WIDTH))


def test_copies_of_a_model_have_no_plans() -> None:
    model = nn.Linear(2, 2)
    plans(model)["key"] = RowPlan(splits={aten.mm.default: {"key": Split((), (), ())}})
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert plans(other) == {}
    assert plans(model)
