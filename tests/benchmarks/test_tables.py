"""The tables of ids that replace the choices of routers in the benchmark of experts, at tiny shapes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from weightstream.plan.hit_curves import CURVES, curve_of

transformers = pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1024,
    "sliding_window": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
NAMES = ("qwen3", "mixtral", "gpt_oss", "deepseek_v3")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = importlib.import_module("experts_shapes")
    yield found
    sys.modules.pop("experts_shapes")


def tiny(shape: Any) -> Any:
    return shape._replace(sizes=dict(shape.sizes) | {name: TINY[name] for name in shape.sizes if name in TINY})


@pytest.mark.parametrize("hits", ["uniform", *(curve.name for curve in CURVES)])
def test_lru_has_the_hit_rates_of_the_table(hits: str, shapes: Any) -> None:
    curve = shapes.HITS[hits]
    num_rows, per_token = (128, 8) if hits == "uniform" else (curve.num_rows, curve.per_token)
    shape = shapes.SHAPES["qwen3"]._replace(num_experts=num_rows, top_k=per_token)
    steps = shapes.drawn(curve, shape, 2 * shapes.NUM_STEPS, 3)
    assert all(len(set(used)) == per_token and set(used) <= set(range(num_rows)) for used in steps)
    for num_slots in {*shapes.slots_of(shape), *(round(share * num_rows) for share, _ in curve.points)}:
        if num_slots >= per_token:
            found = shapes.hits(steps, num_slots)
            assert found == pytest.approx(curve.at(num_slots / num_rows), abs=0.03), num_slots


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_has_a_table_of_its_own(name: str, shapes: Any) -> None:
    """Each is drawn by a curve of a model like it, so that no probability is cut off."""
    shape = shapes.SHAPES[name]
    curve = curve_of(shape.num_experts, shape.top_k)
    for num_slots in shapes.slots_of(shape):
        found = shapes.hits(shapes.drawn(curve, shape, shapes.NUM_STEPS, 1), num_slots)
        assert found == pytest.approx(curve.at(num_slots / shape.num_experts), abs=0.03)


@pytest.mark.stress
@pytest.mark.parametrize(("name", "batch"), list(zip(NAMES, (1, 2, 2, 1), strict=True)))
def test_experts_get_the_ids_of_the_table(name: str, batch: int, shapes: Any) -> None:
    shape = tiny(shapes.SHAPES[name])
    model = shapes.build(shape, 3, "cpu")
    table = shapes.Table(model, shape, batch, "cpu", curve_of(shape.num_experts, shape.top_k))
    seen: list[torch.Tensor] = []
    every = shapes.experts_of(model)
    for module in every:
        module.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    ids = torch.randint(3, 1000, (batch, 5))
    plain = [model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False) for _ in range(2)]
    assert torch.equal(*plain)
    num = len(every)
    nbytes, expert_nbytes = shapes.nbytes_of(shape, 3)
    assert nbytes == sum(p.nbytes for p in model.parameters())
    assert expert_nbytes >= 2 * 3 * 64 * 64
    assert num == (2 if name == "deepseek_v3" else 3)
    assert [len(each) for each in seen] == 2 * ([5 * batch] * num + [batch] * num * 3)
    for step in range(3):
        for layer in range(num):
            wanted = table._table[layer, step + 1]
            assert torch.equal(seen[num * (1 + step) + layer], wanted), (step, layer)
    with weightstream.offload(model, device="cpu", device_budget="50%"):
        assert torch.equal(model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False), plain[0])
