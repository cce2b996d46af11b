"""Kernels that take ids of experts run over slots: the outputs are those of whole stacks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpu_plans import plan_for_a_slow_link, poison_plans
from models import floats, randomise
from weightstream.api.offloaders import BudgetOffloader
from weightstream.integrations.vllm import experts
from weightstream.integrations.vllm.experts import enter_by_forward, routed_picks
from weightstream.runtime.experts.rows import Rows

NUM_LAYERS, NUM_EXPERTS, TOP_K, WIDTH, NUM_SLOTS = 4, 8, 2, 64, 4


def moe_align_block_size(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The places of ids sorted by experts, and the expert of each block; as in vLLM, one more is any number."""
    order = ids.flatten().argsort(stable=True)
    named = torch.cat([ids.flatten()[order], torch.tensor([10**6])]).to(torch.int32)
    return order, named, torch.tensor(len(order))


@dataclass
class Weights:
    scale: Any = None
    bias: Any = None
    zp: Any = None


@dataclass
class Config:
    _w1: Weights
    _w2: Weights


class Method(nn.Module):
    """A module in the layer, which refers to tensors of the layer, as some of vLLM's methods do."""

    is_monolithic = False

    def __init__(self, kernel: _Kernel) -> None:
        super().__init__()
        self.moe_quant_config = kernel.quant_config
        self.moe_kernel = SimpleNamespace(fused_experts=kernel)


class _Kernel:
    def __init__(self, module: Any) -> None:
        first = Weights(module.w13_scale, module.w13_bias)
        self.quant_config = Config(first, Weights(module.w2_scale))
        self.sizes: set[int] = set()  # rows of the stacks that it was given

    def expert(self, module: Any, x: torch.Tensor, index: Any) -> torch.Tensor:
        first, second = self.quant_config._w1, self.quant_config._w2
        gate, up = ((module.w13_weight[index] * first.scale[index][:, None]) @ x + first.bias[index]).chunk(2)
        self.sizes |= {len(module.w13_weight), len(second.scale)}
        return (module.w2_weight[index] * second.scale[index].flatten()[0]) @ (gate.tanh() * up)


class TritonExperts(_Kernel):
    def apply(self, module: Any, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        outputs = [[self.expert(module, row, index) for index in of_row] for row, of_row in zip(x, ids, strict=True)]
        return torch.stack([(torch.stack(each) * s[:, None]).sum(0) for each, s in zip(outputs, scores, strict=True)])


class MarlinExperts(_Kernel):
    """Its sums depend on the order of the blocks, also over tokens."""

    def apply(self, module: Any, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        order, named, num = moe_align_block_size(ids)
        output, carried = torch.zeros_like(x), torch.zeros(WIDTH)
        for place, index in zip(order[: int(num)].tolist(), named[: int(num)], strict=True):
            token, k = divmod(place, ids.shape[1])
            carried = 0.5 * carried + self.expert(module, x[token], index)
            output[token] += scores[token, k] * carried
        return output


KERNELS: dict[str, type[_Kernel]] = {"TritonExperts": TritonExperts, "MarlinExperts": MarlinExperts}


@pytest.fixture(autouse=True)
def both_are_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"TritonExperts": experts.IdsBecomeSlots.AT_ONCE, "MarlinExperts": experts.IdsBecomeSlots.SORTED}
    monkeypatch.setattr(experts, "PROVED", ways)


class Routed(nn.Module):
    """As vLLM's RoutedExperts. A row of one of its scales has 4 bytes, or 8: a whole word."""

    def __init__(self, kernel: type[_Kernel], row_nbytes: int) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.empty(NUM_EXPERTS, 2 * WIDTH, WIDTH))
        self.w2_weight = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, WIDTH))
        self.w13_scale = nn.Parameter(torch.empty(NUM_EXPERTS, 2 * WIDTH))
        self.w13_bias = nn.Parameter(torch.empty(NUM_EXPERTS, 2 * WIDTH))
        self.w2_scale = nn.Parameter(torch.empty((NUM_EXPERTS, 2)[: row_nbytes // 4]))
        self.local_num_experts = self.global_num_experts = NUM_EXPERTS
        self.top_k, self.hidden_size, self.expert_map = TOP_K, WIDTH, None
        self.moe_config = SimpleNamespace(is_lora_enabled=False)
        self.kernel = kernel(self)
        self.quant_method = Method(self.kernel)

    def forward_modular(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return self.kernel.apply(self, x, topk_weights, topk_ids)

    def forward_monolithic(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("its kernel takes ids")


class Layer(nn.Module):
    def __init__(self, kernel: type[_Kernel], row_nbytes: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = Routed(kernel, row_nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = self.gate(x).topk(TOP_K)
        return x + self.experts.forward_modular(x, topk_weights=scores, topk_ids=ids.to(torch.int32)).tanh()


def layers(kernel: str, row_nbytes: int = 8) -> list[nn.Module]:
    return [randomise(Layer(KERNELS[kernel], row_nbytes), index) for index in range(NUM_LAYERS)]


def run(modules: list[nn.Module], seed: int, num_tokens: int) -> torch.Tensor:
    x = floats(seed, num_tokens, WIDTH)
    with torch.no_grad():
        for module in modules:
            x = module(x)
    return x.clone()


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan as for a GPU with a slow link, and memory that begins as NaN."""
    plan_for_a_slow_link(monkeypatch.setattr, 1e6)
    poison_plans(monkeypatch.setattr)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How rows are brought from now on, by the call."""
    found: list[str] = []

    def spied(name: str) -> Callable[..., Any]:
        inner = getattr(Rows, name)

        def spy(rows: Rows, ids: torch.Tensor) -> Any:
            found.append(name)
            return inner(rows, ids)

        return spy

    for name in ("slots", "place"):
        monkeypatch.setattr(Rows, name, spied(name))
    return found


def offloaded(modules: list[nn.Module], batch: int = 1) -> BudgetOffloader:
    """Layers with `NUM_SLOTS` slots for the experts of each."""
    row_nbytes = sum(p.nbytes for p in modules[0].experts.parameters()) // NUM_EXPERTS
    dense_nbytes = sum(p.nbytes for module in modules for p in module.gate.parameters())
    slots_nbytes = NUM_LAYERS * NUM_SLOTS * (row_nbytes + 5 * 1500)
    offloader = BudgetOffloader(dense_nbytes + NUM_EXPERTS * row_nbytes + slots_nbytes, codec="none", batch=batch)
    offloader.picks_of = routed_picks
    assert offloader.wrap_modules(modules) == modules
    enter_by_forward(modules)

    def step() -> None:
        run(modules, 0, 6)

    offloader.post_init(step, is_compiled=True)
    return offloader


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("row_nbytes", [8, 4])
def test_outputs_are_those_of_whole_stacks(kernel: str, row_nbytes: int, ways: list[str]) -> None:
    """2 tokens name as many rows as there are slots; those of 3 are placed in whole stacks, and 6 read all. So do 3 if
    rows are not whole words, which cannot be placed."""
    plain, modules = layers(kernel, row_nbytes), layers(kernel, row_nbytes)
    found = offloaded(modules).streamer
    assert found is not None
    assert (found.plan.num_slots, len(found.plan.cached)) == (NUM_SLOTS, 5 * NUM_LAYERS)
    before = found.stats().experts
    assert before is not None
    for num_tokens, way in (
        (1, ["slots"]),
        (2, ["slots"]),
        (3, ["place"] * (row_nbytes == 8)),
        (6, []),
        (2, ["slots"]),
    ):
        for seed in range(3):
            ways.clear()
            output = run(modules, seed, num_tokens)
            assert torch.isfinite(output).all()
            assert torch.equal(output, run(plain, seed, num_tokens)), (num_tokens, seed)
            assert ways == way * NUM_LAYERS
    assert all(module.experts.kernel.sizes == {NUM_EXPERTS} for module in modules)
    counted = found.stats().experts
    assert counted is not None
    assert counted.found > 0
    assert counted.fetched > NUM_LAYERS * NUM_SLOTS


def test_blocks_that_get_their_slots_before_they_are_sorted_give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests of Marlin's order can fail."""
    monkeypatch.setattr(experts, "PROVED", dict.fromkeys(KERNELS, experts.IdsBecomeSlots.AT_ONCE))
    plain, modules = layers("MarlinExperts"), layers("MarlinExperts")
    offloaded(modules)
    assert not all(torch.equal(run(modules, seed, 2), run(plain, seed, 2)) for seed in range(8))


class TwoExperts(_Kernel):
    """Leaves batches of one token to another kernel, as vLLM's FallbackExperts, and both hold a stride per expert."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.few, self.strides = TritonExperts(module), torch.full((NUM_EXPERTS,), WIDTH)
        self.few.strides = self.strides

    def _select_experts_impl(self, states: torch.Tensor, *weights: torch.Tensor) -> Any:
        assert [len(weight) for weight in weights] == [NUM_EXPERTS, NUM_EXPERTS]
        return self.few if len(states) == 1 else self

    def apply(self, *args: Any) -> torch.Tensor:
        return self.few.apply(*args)


def test_a_kernel_that_chooses_by_the_batch_reads_slots_where_its_choice_does(
    ways: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    experts._warn_once.cache_clear()
    plain, modules = ([randomise(Layer(TwoExperts, 8), index) for index in range(NUM_LAYERS)] for _ in range(2))
    offloaded(modules)
    for num_tokens, way in ((1, ["slots"]), (3, []), (2, []), (1, ["slots"])):
        ways.clear()
        assert torch.equal(run(modules, 1, num_tokens), run(plain, 1, num_tokens))
        assert ways == way * NUM_LAYERS
    (warning,) = {text for text in caplog.messages if "takes whole stacks" in text}
    assert "some batches read all experts: their kernel TwoExperts takes" in warning


def test_ids_are_read_one_after_another() -> None:
    """As a kernel does, which knows no strides."""
    ids = torch.arange(12, dtype=torch.int32).view(6, 2)[:, 1:]
    cache = SimpleNamespace(resolve=lambda flat: flat.as_strided(flat.shape, (1,)))
    buffer: Any = SimpleNamespace(drop=lambda: None)
    rows = Rows(unit=0, num_rows=12, capturing=lambda: False, buffer=buffer, readings={}, cache=cache)  # type: ignore[arg-type]
    assert torch.equal(rows.slots(ids), ids)


def _other_kernel(module: Any) -> None:
    module.kernel.__class__ = type("OtherExperts", (TritonExperts,), {})


def _spread(module: Any) -> None:
    module.global_num_experts = 2 * NUM_EXPERTS


def _adapted(module: Any) -> None:
    module.moe_config.is_lora_enabled = True


def _monolithic(module: Any) -> None:
    module.quant_method.is_monolithic = True


def _unnamed(module: Any) -> None:
    module.quant_method.moe_kernel = None


def _with_copy(module: Any) -> None:
    module.kernel.quant_config._w2.scale = 2 * module.w2_scale.detach()


def _with_order(module: Any) -> None:
    module.kernel.w13_g_idx = torch.arange(NUM_EXPERTS * 4).view(NUM_EXPERTS, 4)


def _with_config(module: Any) -> None:
    module.kernel.quant_config._w1.scale = object()


def _with_another_row(module: Any) -> None:
    module.w13_weight = nn.Parameter(torch.empty(NUM_EXPERTS + 1, 2 * WIDTH, WIDTH))


def _renamed(module: Any) -> None:
    module.w13_qweight = module.w13_weight
    del module.w13_weight


def _choosing_another(module: Any) -> None:
    module.kernel._select_experts_impl = lambda *_: SimpleNamespace()


def _with_choice_that_has_rows(module: Any) -> None:
    other = TritonExperts(module)
    other.scales = torch.arange(NUM_EXPERTS)
    module.kernel.fallback_experts = other


REASONS = {
    _other_kernel: "the kernel OtherExperts takes whole stacks; MarlinExperts or TritonExperts would read single",
    _spread: "with expert parallelism",
    _adapted: "with LoRA",
    _monolithic: "routes tokens itself",
    _unnamed: "Method does not name its kernel",
    _with_copy: "TritonExperts holds tensors of its own with a row for each expert",
    _with_order: "TritonExperts holds tensors of its own with a row for each expert",
    _with_config: "TritonExperts holds tensors of its own with a row for each expert",
    _renamed: "the stacks of Method are not w13_weight and w2_weight",
    _choosing_another: "the kernel SimpleNamespace takes whole stacks",
    _with_choice_that_has_rows: "TritonExperts holds tensors of its own with a row for each expert",
    _with_another_row: "have more rows than the layer has routed experts",
}


@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_other_layers_read_whole_stacks_and_say_why(change: Callable[[Any], None]) -> None:
    module = Routed(TritonExperts, 8)
    assert routed_picks(module) is not None
    assert routed_picks(module).ids_per_token == TOP_K
    change(module)
    found = routed_picks(module)
    assert found is not None
    assert (list(found.stacks), found.ids_per_token) == ([], 0)
    assert REASONS[change] in (found.why_whole() or "")
