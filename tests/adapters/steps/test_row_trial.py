"""Probes show sums in another order, of each kind of operator, and none where rows are alone anyway."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from weightstream.adapters.steps import row_split, row_trial
from weightstream.adapters.steps.row_trial import RowTrial

aten = torch.ops.aten
WIDTH = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Step = Callable[[torch.Tensor], Any]


def differences(step: Step, x: torch.Tensor, width: int = WIDTH) -> list[str]:
    """What a trial finds in `step(x)`, whose rows are the entries of the first dimension of `x` but one."""
    trial = RowTrial(width)
    with torch.no_grad():
        trial.run_single(lambda: step(x[:, :1].clone(memory_format=torch.contiguous_format)))
        return trial.run_wide(lambda: step(x))[1].differences


# -- sums in another order ---------------------------------------------------------------------------------------------


def bounds(size: int, num: int) -> Iterator[tuple[int, int]]:
    return pairwise(size * part // num for part in range(num + 1))


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def products(left: torch.Tensor, right: torch.Tensor, num: int) -> torch.Tensor:
    """A product whose terms are added in `num` parts, and these one after the other."""
    left, right = left.float(), right.float()
    terms = left.shape[-1]
    return added([left[..., a:b] @ right[..., a:b, :] for a, b in bounds(terms, min(num, terms))])


def biased(args: Any, num: int) -> torch.Tensor:
    return args[0].float() + products(args[1], args[2], num)


def linear(args: Any, num: int) -> torch.Tensor:
    return args[2].float() + products(args[0], args[1].T, num)


def sums(x: torch.Tensor, num: int) -> torch.Tensor:
    return added([x[..., a:b].float().sum(-1, keepdim=True) for a, b in bounds(x.shape[-1], min(num, x.shape[-1]))])


def attention(args: Any, num_scores: int, num_values: int) -> torch.Tensor:
    queries, keys, values = (each.float() for each in args[:3])
    scores = products(queries, keys.mT, num_scores) / queries.shape[-1] ** 0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return products(weights, values, num_values) / weights.sum(-1, keepdim=True)


def softmax(x: torch.Tensor, num: int) -> torch.Tensor:
    found = (x.float() - x.float().amax(-1, keepdim=True)).exp()
    return found / sums(found, num)


def layer_norm(args: Any, num: int) -> torch.Tensor:
    return sums(args[0], num) / args[0].shape[-1]  # the mean, which it returns


def squares(x: torch.Tensor, num: int) -> torch.Tensor:
    return sums(x.float() ** 2, num)


def variance(x: torch.Tensor, num: int) -> torch.Tensor:
    return squares(x - x.mean(-1, keepdim=True), num)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


QKV = [normal(1, 2, WIDTH, 64), normal(1, 2, 48, 64), normal(1, 2, 48, 64)]
ADDING: dict[str, tuple[Any, list[Any], Callable[[Any, int], torch.Tensor]]] = {
    "mm": (aten.mm, [normal(WIDTH, 192), normal(192, 160)], lambda args, num: products(*args, num)),
    "mm-few": (aten.mm, [normal(WIDTH, 64), normal(64, 2)], lambda args, num: products(*args, num)),
    "bmm": (aten.bmm, [normal(6, WIDTH, 96), normal(6, 96, 40)], lambda args, num: products(*args, num)),
    "bmm-experts": (aten.bmm, [normal(WIDTH, 96, 40), normal(WIDTH, 40, 1)], lambda args, num: products(*args, num)),
    "addmm": (aten.addmm, [normal(160), normal(WIDTH, 192), normal(192, 160)], biased),
    "linear": (aten.linear, [normal(WIDTH, 192), normal(160, 192), normal(160)], linear),
    "scores": (aten._scaled_dot_product_efficient_attention, QKV, lambda args, num: attention(args, num, 1)),
    "values": (aten._scaled_dot_product_cudnn_attention, QKV, lambda args, num: attention(args, 1, num)),
    "sum": (aten.sum, [normal(WIDTH, 96), [-1]], lambda args, num: sums(args[0], num)),
    "mean": (aten.mean, [normal(WIDTH, 8, 96), [1]], lambda args, num: sums(args[0].mT, num)),
    "layer_norm": (aten.native_layer_norm, [normal(WIDTH, 96), [96], None, None, 1e-5], layer_norm),
    "softmax": (aten._softmax, [normal(WIDTH, 96), -1, False], lambda args, num: softmax(args[0], num)),
    "vector_norm": (aten.linalg_vector_norm, [normal(WIDTH, 96), 2, [-1]], lambda args, num: squares(args[0], num)),
    "var": (aten.var, [normal(WIDTH, 96), [-1]], lambda args, num: variance(args[0], num)),
}


@pytest.mark.parametrize(("num", "other"), [(1, 2), (2, 4), (2, 1000)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ADDING)
def test_probes_show_another_order(name: str, dtype: torch.dtype, num: int, other: int) -> None:
    packet, args, function = ADDING[name]
    probe = row_trial._PROBES[packet]
    out = torch.float32 if probe.needs_float32 else dtype
    args = [each.to(dtype) if isinstance(each, torch.Tensor) else each for each in args]
    chance, differs = torch.Generator().manual_seed(num), 0
    for turn in range(row_trial._NUM_TURNS):
        made = probe.fill(args, {}, turn, chance)
        assert made is not None
        first, second = (function(made[0], parts).to(out) for parts in (num, other))
        assert first.isfinite().all()
        assert all(a.shape == b.shape for a, b in zip(args, made[0], strict=True) if isinstance(a, torch.Tensor))
        differs += not torch.equal(first, second)
    assert differs >= row_trial._NUM_TURNS // 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_weights_of_a_model_are_probed_as_they_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_trial, "_MAX_NBYTES", 0)
    weight = (normal(160, 1024) / 32).to(dtype).T
    weight[:, -40:] = 0  # of words that do not exist
    probe, chance, differs = row_trial._PROBES[aten.mm], torch.Generator().manual_seed(0), 0
    for turn in range(0, 2 * row_trial._NUM_TURNS, 2):
        made = probe.fill((normal(WIDTH, 1024).to(dtype), weight), {}, turn, chance)
        assert made is not None
        assert made[0][1] is weight
        differs += not torch.equal(products(*made[0], 1).to(dtype), products(*made[0], 2).to(dtype))
    assert differs > row_trial._NUM_TURNS // 2
    unlike = torch.linspace(1, 1.9, 64).to(dtype)[:, None].expand(64, 2).contiguous()  # no two terms cancel
    few = probe.fill((normal(WIDTH, 64).to(dtype), unlike), {}, 0, chance)
    assert few is None


# -- operators ---------------------------------------------------------------------------------------------------------

library = torch.library.Library("rowtrial", "DEF")
library.define("mm(Tensor left, Tensor right) -> Tensor")
library.define("own(Tensor left, Tensor right) -> Tensor")
library.define("alone(Tensor left, Tensor right) -> Tensor")


def by_width(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return products(left, right, 1 if len(left) == 1 else 2).to(left.dtype)


def alone(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.cat([products(row[None], right, 1) for row in left]).to(left.dtype)


for each, implementation in (("mm", by_width), ("own", by_width), ("alone", alone)):
    library.impl(each, implementation, "CompositeExplicitAutograd")


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of the tests have the probe of a product."""
    own = {torch.ops.rowtrial.mm: row_trial._PROBES[aten.mm], torch.ops.rowtrial.alone: row_trial._PROBES[aten.mm]}
    monkeypatch.setattr(row_trial, "_PROBES", row_trial._PROBES | own)


@pytest.mark.usefixtures("probed")
@pytest.mark.parametrize("width", [2, 3, 4, 16])
def test_a_kernel_that_adds_in_another_order_is_found_though_outputs_are_equal(width: int) -> None:
    weight = normal(192, 16).bfloat16()
    x = normal(1, width, 192).bfloat16()
    one, rows = products(x[0], weight, 1).bfloat16(), torch.ops.rowtrial.mm(x[0], weight)
    assert torch.equal(one, rows), "values of a model show nothing"
    assert not differences(lambda x: torch.ops.rowtrial.alone(x[0], weight), x, width)
    (reason,) = differences(lambda x: torch.ops.rowtrial.mm(torch.ops.rowtrial.mm(x[0], weight), weight.T), x, width)[
        :1
    ]
    assert reason == f"rowtrial.mm.default of [({width}, 192), (192, 16)] differs"


def test_an_operator_without_a_probe_counts_as_unequal() -> None:
    weight = normal(64, 16)
    (reason,) = differences(lambda x: torch.ops.rowtrial.own(x[0], weight), normal(1, WIDTH, 64))
    assert reason == "rowtrial.own.default is not known to treat rows alone"


TABLE = normal(9, 6)
MOVING: dict[str, Step] = {
    "elementwise": lambda x: functional.relu(x * 2 + 1).clamp_(-1, 1).sqrt() / 3,
    "copies": lambda x: x.transpose(1, 2).contiguous().flatten(1).clone().to(torch.float64).view(-1),
    "joins": lambda x: torch.stack(torch.cat([x, -x], -1).chunk(2, -1)),
    "rotation": lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1) * x.abs(),
    "embedding": lambda x: functional.embedding((x[..., 0] > 0).long(), TABLE) + TABLE[(x[..., 1] > 0).long()],
    "cache": lambda x: torch.zeros(1, 9, 6).index_copy_(1, torch.arange(x.shape[1]), x).narrow(1, 0, 3),
    "scatter": lambda x: torch.zeros_like(x).scatter_(-1, x.argsort(-1), x),
    "masks": lambda x: x.masked_fill(x > 0, -1.0).where(x > 1, 0.0).tril(),
    "largest": lambda x: (x.amax(-1), x.max(-1), x.topk(2, -1), x.argmax(-1), x.sort(dim=-1, stable=True)),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "sums without rows": lambda x: x * TABLE.sum(0) + (TABLE @ TABLE.T).mean(),
}  # fmt: skip


INTEGERS: dict[str, tuple[Step, str]] = {  # sums of integers are exact: they run row by row, unless they mix rows
    "of a row": (lambda x: x * (x > 0).long().cumsum(-1).sum(-1, keepdim=True), "is not known to treat rows alone"),
    "largest of all": (lambda x: x * torch.where((x > 0).long().sum(-1).max() > 6, 2, 1), "have no entry for each row"),
    "any of all": (lambda x: x * ((x > 5).any() + 1), "have no entry for each row"),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_mix_rows(name: str) -> None:
    step, reason = INTEGERS[name]
    found = differences(step, normal(1, WIDTH, 6))
    assert any(each.endswith(reason) for each in found)


@pytest.mark.parametrize("name", MOVING)
def test_operators_that_treat_rows_alone(name: str) -> None:
    assert not differences(MOVING[name], normal(1, WIDTH, 6))


def experts(x: torch.Tensor) -> torch.Tensor:
    """Each expert computes the tokens that chose it."""
    chosen, out = (x[0, :, 0] > 0).long(), torch.zeros_like(x[0])
    for expert in range(2):
        rows = (chosen == expert).nonzero()[:, 0]
        out[rows] = x[0, rows] @ TABLE[:6] * expert
    return out


def unseen(x: torch.Tensor) -> torch.Tensor:
    """Computes by the address of memory, as kernels in Triton and many extensions do."""
    out = torch.empty_like(x)
    ctypes.memset(out.data_ptr(), 0, out.nbytes)
    return out.view(-1) + 1


MIXING: dict[str, tuple[Step, str]] = {
    "mean of rows": (lambda x: x.mean(1), "outputs of aten.mean.dim of .* have no entry for each row"),
    "sum of rows before": (lambda x: x.cumsum(1), "aten.cumsum.default of .* differs"),
    "normed over rows": (lambda x: x / x.norm(dim=1, keepdim=True), "have no entry for each row"),
    "experts": (experts, "the shapes of aten.nonzero.default depend on values"),
    "other code": (functional.silu, "aten.silu.default computes the last elements in other code on a CPU"),
    "a branch": (lambda x: x + 1 if x.shape[1] > 1 else x * 2, "operators of a row differ in aten.add.Tensor"),
    "more for one": (lambda x: x if x.shape[1] > 1 else x * 2, "operators of a row differ in aten.mul.Tensor"),
    "another scale": (lambda x: x.sum(-1 if x.shape[1] > 1 else -2), "are not those of a row several times"),
    "added to one place": (lambda x: torch.zeros(6).index_put_((torch.zeros(x.shape[1]).long(),), x[0, :, 0], True),
                           "aten.index_put_.default is not known"),
    "scaled by the largest of all": (lambda x: x / x.abs().amax(), "outputs of aten.amax.default of .* have no entry"),
    "a kernel that torch does not see": (unseen, "aten.add.Tensor reads what no operator has written"),
    "written by an operator": (lambda x: torch.mm(x[0], TABLE[:6], out=torch.empty(x.shape[1], 6)),
                               "aten.mm.out is not known"),
    "reads a value": (lambda x: x * float(x[0, 0, 0]), "depend on values"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_operators_that_do_not(name: str) -> None:
    step, reason = MIXING[name]
    (found, *_) = differences(step, normal(1, WIDTH, 6))
    assert re.search(reason, found), found


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("packs", [False, True])
def test_attention_of_heads_that_share_keys(packs: bool, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers packs the heads that share keys, where there is one token. A plain sum has equal bits either way."""
    plain = row_trial._PROBES
    keys, values = normal(1, 2, 16, 8), normal(1, 2, 16, 8)
    library_op = torch.ops.rowtrial_attention.exact
    monkeypatch.setattr(row_trial, "_PROBES", plain | {library_op: plain[aten._scaled_dot_product_efficient_attention]})

    def step(x: torch.Tensor) -> torch.Tensor:
        queries = x.view(1, x.shape[1], 4, 8).transpose(1, 2)
        if packs and x.shape[1] == 1:
            return library_op(queries.reshape(1, 2, 2, 8), keys, values)
        more = (each.repeat_interleave(2, 1) for each in (keys, values))
        return library_op(queries, *more)

    assert not differences(step, normal(1, width, 32), width)


exact = torch.library.Library("rowtrial_attention", "DEF")
exact.define("exact(Tensor queries, Tensor keys, Tensor values) -> Tensor")


def by_query(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of one query at a time."""
    rows = [
        [attention((q[None], k, v), 1, 1)[0] for q in head]
        for head, k, v in zip(queries[0], keys[0], values[0], strict=True)
    ]
    return torch.stack([torch.stack(row) for row in rows])[None]


exact.impl("exact", by_query, "CompositeExplicitAutograd")


def test_equal_layers_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, probes = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), []
    plain = RowTrial._probe
    monkeypatch.setattr(RowTrial, "_probe", lambda *args: probes.append(args) or plain(*args))
    differences(layers, normal(1, WIDTH, 8))
    assert len(probes) == 1


LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "states": (lambda x: x, 1),
    "queries": (lambda x: x.view(1, -1, 4, 8).transpose(1, 2), 2),
    "queries of a joint product": (lambda x: x.view(1, -1, 8, 4)[:, :, :, :4].transpose(1, 2).clone(), 2),
    "masks": (lambda x: x[:, None], 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_entry_of_a_tensor_is_laid_out_as_it_is_alone(name: str) -> None:
    make, dim = LAYOUTS[name]
    x = normal(1, WIDTH, 32)
    alone = make(x[:, :1].clone(memory_format=torch.contiguous_format))
    found = row_split.first_entry(make(x), dim)
    assert torch.equal(found, alone)
    assert found.stride() == alone.stride()
