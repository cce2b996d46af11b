"""Footprints: work, activations and cache from shapes equal hand arithmetic, and the model does not change."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import models
from weightstream.adapters.hf import private
from weightstream.adapters.modules.partition import find_units
from weightstream.adapters.tracing import footprint as shapes
from weightstream.adapters.tracing import forward as forwards
from weightstream.adapters.tracing.footprint import Footprint, observe
from weightstream.adapters.tracing.op_cost import Launch
from weightstream.errors import UnsupportedError
from weightstream.plan.manifest import Op, Workload
from weightstream.runtime.streamer.read_watch import OperatorMode
from weightstream.runtime.weights.alias_groups import Scope, UnitModule

BF16 = torch.bfloat16
GQA = {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}


def watched(model: nn.Module, *args: Any, **kwargs: Any) -> Footprint:
    """The footprint of one forward with these arguments."""
    return shapes.follow(model, args, kwargs)


def ops_of(footprint: Footprint, rate: str) -> list[Op]:
    return [op for _, _, op in footprint.ops if op.rate == rate]


def text(name: str, dtype: torch.dtype = torch.float32, **config: Any) -> nn.Module:
    pytest.importorskip("transformers")
    return models.text(name, dtype, **config)().module


@pytest.mark.parametrize(("dtype", "rate"), [(BF16, "half"), (torch.float16, "half"), (torch.float32, "single")])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_one_op(dtype: torch.dtype, rate: str, bias: bool) -> None:
    linear = nn.Linear(48, 80, bias=bias, dtype=dtype)
    (op,) = ops_of(found := watched(linear, torch.randn(3, 5, 48, dtype=dtype)), rate)
    elements = 15 * 48 + 48 * 80 + 80 * bias + 15 * 80
    least = 5.5 if bias else 1.0  # a kernel of its own adds the bias to a small product
    assert op == Op(rate=rate, flops=2 * 15 * 48 * 80, nbytes=elements * dtype.itemsize, least=least)  # type: ignore[arg-type]
    assert found.work([UnitModule(name="", module=linear)]) == ((op,),)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)


def heads(num_heads: int, length: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(2, num_heads, length, 64).to(dtype)


@pytest.mark.parametrize(
    ("rows", "positions", "causal", "products"),
    [(1, 33, False, 4), (33, 33, True, 2), (33, 33, False, 4), (5, 33, True, 4)],
)
def test_fused_attention_is_one_op(rows: int, positions: int, causal: bool, products: int) -> None:
    q, k = heads(8, rows), heads(2, positions)
    found = watched(Attention(), q, k, k.clone(), is_causal=causal, enable_gqa=True)
    ((_, _, op),) = found.ops
    assert op.rate == "attention"
    assert op.flops == products * 2 * 8 * rows * positions * 64
    assert op.nbytes == 2 * (2 * q.numel() + 2 * k.numel())
    input_nbytes = 2 * (q.numel() + 2 * k.numel())
    assert found.activation_nbytes == input_nbytes + 2 * q.numel() + 512 * -(-2 * 8 * rows * 4 // 512)


def test_operators_of_several_kernels_take_longer() -> None:
    """These are attention, more so with a mask, and top-k."""

    class Picking(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return torch.topk(y.exp(), 4).values

    q = heads(8, 1)
    for mask, wanted in ((None, 4.0), (torch.zeros(2, 1, 1, 1).bool(), 8.0), (torch.zeros(2, 1, 1, 1).to(BF16), 4.0)):
        attention, exp, topk = (op for _, _, op in watched(Picking(), q, mask).ops)
        assert (attention.least, exp.least, topk.least) == (wanted, 1.0, 6.0)


def test_a_mask_becomes_a_bias_temporarily() -> None:
    q, mask = heads(8, 32), torch.ones(2, 1, 32, 32, dtype=torch.bool)
    found = watched(Attention(), q, q.clone(), q.clone(), attn_mask=mask)
    assert found.activation_nbytes == 4 * 2 * q.numel() + mask.numel() + (2 * 8 * 32 * 4 + 2 * mask.numel())


def test_attention_without_a_fused_kernel_is_several_ops() -> None:
    """Grouped heads in float32: the scores are stored in full."""
    q, k = heads(8, 64, torch.float32), heads(2, 64, torch.float32)
    found = watched(Attention(), q, k, k, enable_gqa=True)
    assert ops_of(found, "attention") == []
    assert [op.flops for op in ops_of(found, "single")] == [2 * 2 * 8 * 64 * 64 * 64] * 2
    assert found.activation_nbytes > 2 * (2 * 8 * 64 * 64 * 4)


def test_activations_are_the_largest_sum_that_is_alive() -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    input_nbytes, small, large = 8 * 1024 * 4, 8 * 1024 * 4, 8 * 4096 * 4
    assert watched(model, torch.randn(8, 1024)).activation_nbytes == input_nbytes + 2 * large
    assert watched(model[:1], torch.randn(8, 1024)).activation_nbytes == input_nbytes + large
    assert watched(model[2:], torch.randn(8, 4096)).activation_nbytes == large + small
    assert watched(nn.Linear(3, 5), torch.randn(1, 3)).activation_nbytes == 512 + 512  # blocks


def test_views_cost_nothing_and_an_embedding_reads_only_rows() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.table(ids)
            return rows.transpose(0, 1)[1:].unsqueeze(0).expand(3, -1, -1, -1)

    ((_, _, op),) = watched(Model(), torch.zeros(2, 7, dtype=torch.long)).ops
    assert op == Op(nbytes=2 * (14 * 16 * 4) + 14 * 8)


def test_in_place_writes_casts_and_copying_reshapes_count_each_time() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                y = x.to(torch.float32)
                assert y.add_(1) is y
                y.div_(y)
                y.reshape(4, 48).to(torch.float32)  # a view, and no work
                y.t().reshape(-1)
                x = y.to(torch.bfloat16, copy=True)
            return x

    input_nbytes, single = 8 * 24 * 2, 8 * 24 * 4
    found = watched(Model(), torch.randn(8, 24, dtype=BF16))
    of_one = [input_nbytes + single, 2 * single, 3 * single, 2 * single, single + input_nbytes]
    assert [op.nbytes for _, _, op in found.ops] == 3 * of_one
    nums = sorted((launch.op.nbytes, num) for launch, num in found.launches if launch.op is not None)
    assert nums == sorted((nbytes, 3) for nbytes in of_one)
    assert all(launch.is_in_place != launch.is_repeatable for launch, _ in found.launches)
    assert found.activation_nbytes == 2 * 512 + 2 * 1024  # the input, x, y, and the next y


class Reordered(nn.Module):
    """Declares a, b, c and runs c, a, a, b. Its own computations belong to no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        x = self.c(x).cos()
        x = self.a(x)
        x = self.a(torch.cat([x, x]))
        return self.b(x)  # type: ignore[no-any-return]


def test_order_and_work_of_units() -> None:
    model = Reordered()
    units = [UnitModule(name=name, module=module) for name, module in model.named_children()]
    found = watched(model, torch.randn(4, 8))
    assert [call.module for call in found.calls] == [model, model.c, model.a, model.a, model.b]
    a, b, c = found.work(units)
    linear = [Op(rate="single", flops=2 * n * 64, nbytes=4 * (n * 8 + 64 + 8 + n * 8), least=5.5) for n in (4, 8)]
    tiny = [Op(nbytes=2 * 4 * 8 * n) for n in (4, 8)]
    assert c == (linear[0], replace(tiny[0], after=True))
    # the sine comes before any unit, that is after the last one of the previous step
    assert b == (linear[1], replace(tiny[0], after=True))
    flops, nbytes = sum(op.flops for op in linear) / 2, sum(op.nbytes for op in linear) // 2
    mean = Op(rate="single", flops=flops, nbytes=nbytes, least=5.5)
    assert a == (mean, Op(nbytes=(2 * 4 * 8 * 8) // 2, after=True))  # half of the copy between both
    assert found.work([]) == ()


@pytest.mark.parametrize("is_outside_away", [False, True])
def test_ops_of_other_devices_are_marked(is_outside_away: bool) -> None:
    """Of one device's units, a and b: c runs elsewhere, and perhaps the model's own computations."""
    model = Reordered()
    units = [UnitModule(name=name, module=getattr(model, name)) for name in "ab"]
    found = watched(model, torch.randn(4, 8)).work(units, {None: is_outside_away, model.c: True, model.a: False})
    own = {(op.rate, op.after): op.elsewhere for ops in found for op in ops if not (op.after and op.rate == "single")}
    assert own == {("single", False): False, ("none", True): is_outside_away}
    assert [op.elsewhere for ops in found for op in ops if op.after and op.rate == "single"] == [True]


def test_an_op_counts_for_the_innermost_unit() -> None:
    model = Reordered()
    outer = UnitModule(name="", module=model, scope=Scope.OWN, enclosing=True)
    units = [outer, *(UnitModule(name=name, module=module) for name, module in model.named_children())]
    found = watched(model, torch.randn(4, 8))
    assert [len(ops) for ops in found.work(units)] == [3, 1, 1, 1]
    tied = UnitModule(name="a", module=model.a, also=(model.b,))
    assert sum(op.flops for op in found.work([tied])[0]) == pytest.approx(2 * (4 + 4 + 8 + 8) * 64 / 3)  # three calls


def test_work_equals_pytorchs_flop_count() -> None:
    """The matrix products of a real forward. Repeated operators are traced once, and count each time."""
    model = text("LlamaForCausalLM", BF16, **GQA | {"num_hidden_layers": 4})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 24, dtype=torch.long), use_cache=True, logits_to_keep=1)
    found = observe(model, Workload(batch=2, tokens=24, context=24))
    counted = counter.get_flop_counts()["Global"]  # since torch 2.15 it includes attention
    products = sum(num for op, num in counted.items() if "attention" not in str(op))
    assert sum(op.flops for op in ops_of(found, "half") + ops_of(found, "single")) == products > 0
    assert [op.flops for op in ops_of(found, "attention")] == [2 * 2 * 4 * 24 * 24 * 16] * 4
    units = find_units(model)
    assert sum(op.flops for ops in found.work(units) for op in ops) == sum(op.flops for _, _, op in found.ops)


class Names(OperatorMode):
    """Calls of each operator that writes or extends a cache, without attention's own calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nums = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.nums[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


CACHING = ("cat", "index_copy_", "add_", "arange", "roll", "index_put_", "copy_", "le", "gt")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("LlamaForCausalLM", {}),
        ("MistralForCausalLM", {"sliding_window": 9}),
        ("MixtralForCausalLM", {"num_local_experts": 8}),
    ],
)
def test_a_captured_step_runs_the_operators_of_a_static_cache(
    name: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traced cache operators are those of a real step, whose prompt is in a static cache."""
    transformers = pytest.importorskip("transformers")
    made: list[tuple[str, Launch]] = []

    class Named(Launch):
        def __init__(self, func: Any, *rest: Any) -> None:
            super().__init__(func, *rest)
            made.append((func.overloadpacket.__name__, self))

    monkeypatch.setattr(forwards, "Launch", Named)
    model = text(name, BF16, **GQA, **config)
    model.config._experts_implementation = "batched_mm"  # type: ignore[union-attr]  # as generate() decodes on a GPU  # as generate() decodes on a GPU
    found = observe(model, Workload(batch=2, tokens=1, context=24))
    names = {id(launch.op): name for name, launch in made}
    assert found.captured is not None
    for step, cache in (
        (found, transformers.DynamicCache(config=model.config)),
        (found.captured, transformers.StaticCache(config=model.config, max_cache_len=24)),
    ):
        ids = torch.zeros(2, 23, dtype=torch.long)
        caching = {models.cache_name(model): cache, "logits_to_keep": 1}
        with torch.no_grad():
            model(input_ids=ids, **caching)
            with private.decode_step(model, 1), Names() as real:
                model(input_ids=ids[:, :1], **caching)
        counted = Counter(names[id(op)] for _, _, op in step.ops)
        assert {n: counted[n] for n in CACHING} == {n: real.nums[n] for n in CACHING}
    assert [call.module for call in found.captured.calls] == [call.module for call in found.calls]
    assert found.captured.ops != found.ops
    for workload in (Workload(batch=2, tokens=2, context=24), Workload(batch=2, tokens=1, context=1)):
        assert observe(model, workload).captured is None


def test_a_step_with_a_cache() -> None:
    model = text("LlamaForCausalLM", BF16, **GQA)
    found = observe(model, Workload(batch=3, tokens=1, context=40))
    assert [op.flops for op in ops_of(found, "attention")] == [4 * 3 * 4 * 40 * 16] * 2
    assert found.cache_nbytes == 2 * 2 * (3 * 2 * 40 * 16 * 2)
    units = find_units(model)
    assert all(found.work(units))  # every unit computes
    prompt = observe(model, Workload(batch=3, tokens=40, context=40))
    assert prompt.cache_nbytes == found.cache_nbytes
    assert found.activation_nbytes == prompt.activation_nbytes  # the prompt's is larger
    states = [step.states_nbytes(units) for step in (found, prompt)]
    assert states == [3 * 1 * model.config.hidden_size * 2, 3 * 40 * model.config.hidden_size * 2], "of a block"
    assert found.states_nbytes([unit for unit in units if unit.layer is None]) == 0
    assert observe(model, Workload(batch=3, tokens=1, context=1)).activation_nbytes < prompt.activation_nbytes


@pytest.mark.parametrize("context", [3, 40])
def test_a_sliding_window_bounds_the_cache(context: int) -> None:
    model = text("MistralForCausalLM", BF16, **GQA, sliding_window=9)
    found = observe(model, Workload(batch=1, tokens=1, context=context))
    kept = min(context, 8)
    assert found.cache_nbytes == 2 * 2 * max(512, 512 * -(-2 * kept * 16 * 2 // 512))
    assert [op.flops for op in ops_of(found, "attention")] == [4 * 4 * min(context, 9) * 16] * 2


def test_only_the_chosen_experts_are_read() -> None:
    model = text("MixtralForCausalLM", BF16, **GQA, num_local_experts=8)
    expert = 64 * 2 * 160
    for batch, experts in ((1, 4), (3, 8), (32, 8)):
        found = observe(model, Workload(batch=batch, tokens=2, context=16))
        rows = 4 * batch
        assert [op.nbytes for op in ops_of(found, "half") if op.flops == 2 * rows * expert] == [
            2 * (experts * expert + rows * (64 + 2 * 160)) + 8 * 4
        ] * 2


def test_a_token_copies_the_experts_that_it_uses() -> None:
    """As `generate` decodes on a GPU: one matrix for each choice of a token, whichever experts these are."""
    model = text("MixtralForCausalLM", BF16, **GQA, num_local_experts=8)
    expert = 64 * 2 * 160
    for batch in (1, 3):
        found = observe(model, Workload(batch=batch, tokens=1, context=16))
        rows = 2 * batch
        products = [op.nbytes for op in ops_of(found, "half") if op.flops == 2 * rows * expert]
        assert products == [2 * rows * (expert + 64 + 2 * 160)] * 2
        # positions are not of this rate
        stacked = [op.nbytes for _, _, op in found.ops if op.stacked and op.rate == "half"]
        assert stacked[::2] == products, "each matrix is multiplied by its own row"
        copies = [op for _, _, op in found.ops if op.picked]
        assert {op.picked for op in copies} == {rows / 8}
        assert max(op.nbytes for op in copies) == 2 * 2 * rows * expert


ONLY_IDS = [name for name in models.ARCHITECTURES if name not in ("t5", "bart-bf16", "whisper", "clip", "siglip")]
ONLY_IDS = [name for name in ONLY_IDS if name not in ("vit", "swin", "convnext-bf16")]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ONLY_IDS)
def test_models_are_traced_and_stay_unchanged(name: str) -> None:
    pytest.importorskip("transformers")
    model = models.ARCHITECTURES[name]().module
    before, config = state(model), vars(model.config).copy()
    found = observe(model, Workload(batch=2, tokens=1, context=32))
    assert found.activation_nbytes > 0
    assert any(op.flops for _, _, op in found.ops)
    units = find_units(model)
    assert len(found.work(units)) == len(units)
    assert state(model) == before
    assert vars(model.config) == config


@pytest.mark.few(12)
@pytest.mark.parametrize("name", sorted(models.FIXTURES))
def test_any_module_is_traced_with_its_inputs(name: str) -> None:
    made = models.FIXTURES[name]()
    before = state(made.module)
    found = watched(made.module, **made.inputs(0))
    assert found.ops
    assert found.cache_nbytes == 0
    assert state(made.module) == before


def state(model: nn.Module) -> list[Any]:
    """The objects that a model holds, and the versions of its tensors."""
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        for table in (vars(module), module._parameters, module._buffers):
            for key, value in table.items():
                version = value._version if isinstance(value, torch.Tensor) else None
                found.append((name, key, id(value), version))
        found.append((len(module._forward_hooks), len(module._forward_pre_hooks)))
    return found


class Careless(nn.Module):
    """Writes to a buffer, replaces another, adds attributes, and then reads a value or fails."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight
        self.plain = torch.ones(4)
        self.register_buffer("written", torch.zeros(4))
        self.register_buffer("replaced", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        self.plain = self.plain + x
        self.new = nn.Linear(4, 4, device="meta")
        assert self.tied.weight is self.linear.weight
        x = self.tied(x) + self.plain
        if self.error is not None:
            raise self.error
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("error", [None, ValueError("no such branch"), KeyboardInterrupt()])
def test_all_changes_of_a_forward_are_undone(error: Exception | None) -> None:
    model = Careless(error)
    before = state(model)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            watched(model, torch.ones(4))
    else:
        match = r"Careless: .* ValueError: no such branch" if error else r"Careless: .* meta tensor"
        with pytest.raises(UnsupportedError, match=match):
            watched(model, torch.ones(4))
    assert state(model) == before
    assert not hasattr(model, "new")
    assert torch.equal(model.get_buffer("written"), torch.zeros(4))
    assert model(torch.ones(4)).shape == (4,) if error is None else True


def test_inputs_are_not_written() -> None:
    x = torch.randn(2, 8)
    before = (x.clone(), x._version)
    watched(nn.ReLU(inplace=True), x)
    assert torch.equal(x, before[0])
    assert x._version == before[1]


@pytest.mark.parametrize("name", ["t5", "vit"])
def test_a_request_for_other_inputs(name: str) -> None:
    pytest.importorskip("transformers")
    made = models.ARCHITECTURES[name]()
    with pytest.raises(UnsupportedError, match="no steps can be made up for it"):
        observe(made.module, Workload())
    assert watched(made.module, **made.inputs(0)).ops
    with pytest.raises(UnsupportedError, match=r"Linear takes more than token ids"):
        observe(nn.Linear(2, 2), Workload())
