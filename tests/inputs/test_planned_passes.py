"""Passes of several tokens in a plan: their predicted seconds and their memory, from the shapes of real models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from generating import MODELS
from models import TEXT
from weightstream.inputs.gathering import Sketch, sketch_of
from weightstream.inputs.machine import machine_elsewhere
from weightstream.plan.manifest import Profile
from weightstream.plan.plan import Plan
from weightstream.plan.speculation import Passes, choose_width
from weightstream.settings.config import OffloadConfig

transformers = pytest.importorskip("transformers")

CONTEXT = 64
SLOW_LINK = Profile(link_bytes_per_s=1e9, device_bytes_per_s=1e12, half_flops_per_s=1e14, op_s=1e-7, op_launch_s=0.0)
NO_OVERHEAD = replace(SLOW_LINK, overhead_s=0.0, copy_latency_s=0.0)


def sketch(config: Any, budget: int | None = None, profile: Profile = NO_OVERHEAD, **settings: Any) -> Sketch:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    machine = replace(machine_elsewhere(profile), free_nbytes=1 << 34, total_nbytes=1 << 34)
    return sketch_of(
        model, None, OffloadConfig(device_budget=budget, context=CONTEXT, codec="none", **settings), machine
    )


def planned(config: Any, share: float, most: int = 256, profile: Profile = NO_OVERHEAD) -> Plan:
    found = sketch(config, 1 << 33, profile)
    nbytes = found.inputs.grains[0].nbytes
    inputs = found.gatherer.with_passes(found.inputs.at_budget(int(share * nbytes)), most)
    return inputs.plan().plan


def ratios(plan: Plan) -> dict[int, float]:
    return {each.tokens: each.graph_s / plan.passes[0].graph_s for each in plan.passes}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_knows_the_seconds_of_passes(name: str) -> None:
    plan = planned(MODELS[name](), 0.9)
    assert [each.tokens for each in plan.passes] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    seconds = [each.graph_s for each in plan.passes]
    assert seconds == sorted(seconds)
    assert all(each.step_s >= each.graph_s > 0 for each in plan.passes)
    assert plan == Plan.from_json(plan.to_json())
    assert "256 tokens" in plan.predictions()["passes"]


def test_passes_are_free_where_the_link_is_the_limit_and_not_where_nothing_streams() -> None:
    config = transformers.LlamaConfig(**TEXT | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 1024})
    slow = replace(NO_OVERHEAD, half_flops_per_s=1e12)
    streamed, resident = (ratios(planned(config, share, profile=slow)) for share in (0.5, 2.0))
    assert streamed[16] < 1.02
    assert resident[16] > 2


def test_passes_of_a_mixture_read_more_experts() -> None:
    sizes = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "hidden_size": 256}
    config = transformers.Qwen3MoeConfig(**TEXT | sizes, num_key_value_heads=2, head_dim=16)
    plan = planned(config, 0.5, most=16)
    assert plan.cached, "the experts are not cached, so nothing is tested"
    # of 64 experts 2 tokens touch up to 4, 16 tokens about 25
    assert ratios(plan)[2] > 1.2
    assert ratios(plan)[16] > 4
    # so a draft is worth it only if nearly all of its tokens are accepted
    chosen = [choose_width(Passes(plan.passes, in_graphs=True), acceptance).tokens for acceptance in (0.2, 0.42, 0.99)]
    assert chosen[:2] == [1, 1]
    assert chosen[2] > 1


def test_windows_that_become_full_length_and_logits_are_in_the_memory_of_a_plan() -> None:
    found = sketch(MODELS["gemma2"](), 1 << 20)
    inputs = found.gatherer.with_passes(found.inputs, 16)
    spec = inputs.with_memory_of(16)
    demand, before = spec.demands[0], inputs.demands[0]
    settings = MODELS["gemma2"]()
    of_position = 2 * settings.num_hidden_layers * settings.num_key_value_heads * settings.head_dim * 2
    assert before.cache_nbytes < of_position * CONTEXT  # half of the layers keep their window only
    assert demand.cache_nbytes >= of_position * (CONTEXT + 16)
    assert demand.activation_nbytes >= 2 * 4 * 16 * settings.vocab_size
    assert demand.work == before.work  # the step that is planned for is that of one token


def test_the_memory_of_passes_is_taken_from_free_memory() -> None:
    found = sketch(MODELS["llama"]())
    inputs = found.gatherer.with_passes(found.inputs, 16)
    spec = inputs.with_memory_of(16)
    more = [getattr(spec.demands[0], n) - getattr(inputs.demands[0], n) for n in ("activation_nbytes", "cache_nbytes")]
    assert sum(more) > 0
    assert inputs.budget is not None
    assert spec.budget == inputs.budget - sum(more)


def test_bytes_of_another_model_are_taken_from_the_budget_once() -> None:
    sizes = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "hidden_size": 256}
    config = transformers.Qwen3MoeConfig(**TEXT | sizes, num_key_value_heads=2, head_dim=16)
    for model in (MODELS["llama"](), config):
        inputs = sketch(model, 1 << 33).inputs
        budget = inputs.grains[0].nbytes * 2 // 3
        reserved = budget // 8
        whole, less = inputs.at_budget(budget), replace(inputs.at_budget(budget), reserved_nbytes=reserved)
        assert less.budget == budget - reserved
        plan = less.plan().plan
        assert plan.device_nbytes <= budget - reserved
        assert plan.acts_as(inputs.at_budget(budget - reserved).plan().plan)
        assert whole.plan().plan.device_nbytes > plan.device_nbytes


def test_no_passes_where_the_cache_cannot_be_cropped() -> None:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8)
    found = sketch(config, 1 << 20)
    assert found.gatherer.with_passes(found.inputs) == found.inputs
