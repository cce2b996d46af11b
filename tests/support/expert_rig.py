"""Shared parts of the tests of experts: small mixtures whose rows are whole tiles, and the ways to store their
stacks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

import weightstream
from models import model_nbytes, randomise
from weightstream.plan.check import prove
from weightstream.plan.expert_cache import NEARLY_ALL
from weightstream.plan.manifest import TensorSpec
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import aligned
from weightstream.runtime.experts.rows import Rows

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2
FORMS = ("coded", "coded, streams", "cached")
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "num_experts_per_tok": TOP_K,
        "tie_word_embeddings": False,
    }
)
# Rows of 8192 and 4096 elements: two tiles, and one.
QWEN = {**SIZES, "head_dim": 16, "num_experts": NUM_EXPERTS, "moe_intermediate_size": 64, "intermediate_size": 96}
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "qwen3_moe": ("Qwen3Moe", QWEN),
        "mixtral": ("Mixtral", {**SIZES, "num_local_experts": NUM_EXPERTS, "intermediate_size": 64}),
        "gpt_oss": (
            "GptOss",
            {
                **SIZES,
                "head_dim": 16,
                "num_local_experts": NUM_EXPERTS,
                "intermediate_size": 64,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "sliding_window": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        "deepseek_v3": (
            "DeepseekV3",
            {
                **SIZES,
                "num_key_value_heads": 4,
                "intermediate_size": 96,
                "moe_intermediate_size": 64,
                "n_routed_experts": NUM_EXPERTS,
                "n_shared_experts": 1,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "kv_lora_rank": 16,
                "q_lora_rank": 24,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 16,
            },
        ),
        "qwen2_moe": ("Qwen2Moe", {**QWEN, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1}),
    }
)
NUM_PICKING = {"deepseek_v3": NUM_LAYERS - 1}  # its first layer is dense


def built(name: str = "qwen3_moe", implementation: str = "batched_mm", **settings: Any) -> Any:
    """A mixture in bfloat16 with seeded weights. Building it twice gives the same bits."""
    transformers = pytest.importorskip("transformers")
    kind, sizes = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **settings})
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation=implementation
    )
    return randomise(model, zlib.crc32(name.encode()))


def prompt(length: int = 3, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(length))


def generated(model: Any, ids: torch.Tensor, num: int = 10, **more: Any) -> list[torch.Tensor]:
    """Tokens, and the logits of each."""
    options = {"max_new_tokens": num, "min_new_tokens": num, "do_sample": False, "pad_token_id": 0}
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), **options | more, output_logits=True, return_dict_in_generate=True
    )
    assert len(output.logits) >= min(num, 3)
    return [output.sequences, *output.logits]


def same(results: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    assert all(torch.isfinite(x).all() for x in wanted), "a NaN differs from itself"
    return len(results) == len(wanted) and all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def plan_of(
    streamer: weightstream.Streamer,
    form: str,
    num_slots: int,
    codes: Mapping[str, tuple[int, int]] | None = None,
    ahead: int = 0,
    *,
    shared: bool = False,
) -> Plan:
    """A plan in which experts are units of their own, with their stacks in one of `FORMS` and all else on the
    device."""
    grains = streamer._installed.replanning.inputs.grains
    grain = next(grain for grain in grains if any(unit.stacks for unit in grain.units))
    grain = grain.coded(streamer.plan.manifest.codes if codes is None else codes)
    users = [[t for t in unit.tensors if t.alias in unit.stacks] for unit in grain.units if unit.stacks]
    stacks = frozenset(t.alias for of_unit in users for t in of_unit)
    if form == "coded":
        return Plan.build(grain, frozenset(grain.aliases), 0)
    if form == "coded, streams":
        largest = max(sum(aligned(t.nbytes) for t in of_unit) for of_unit in users)
        ring_nbytes = largest * min(2, len(users) - 1)
        return Plan.build(grain, frozenset(grain.aliases) - stacks, ring_nbytes)
    per_slot = max(sum(aligned(_row_nbytes(t) + 8) for t in of_unit) for of_unit in users)
    rest = grain.without(stacks)
    plan = Plan.build(rest, frozenset(rest.aliases), 0)
    slots = {"num_slots": num_slots, "slots_nbytes": num_slots * per_slot * len(users), "ahead": ahead}
    plan = replace(plan, manifest=grain, cached=stacks, **slots)
    waves = 4 * max(sum(aligned(_row_nbytes(t)) for t in of_unit) for of_unit in users) + 4096
    return replace(plan, shared_nbytes=min(plan.slots_nbytes, plan.buffer_nbytes - waves)) if shared else plan


def _row_nbytes(stack: TensorSpec) -> int:
    """Bytes of a slot. A row of a compressed stack may have more escapes than the mean."""
    mean = stack.nbytes // stack.shape[0]
    return mean * 11 // 10 + 2048 if stack.is_coded else mean


@contextmanager
def held(
    model: Any, form: str, num_slots: int = 4, device: str = "cpu", ahead: int = 0, *, shared: bool = False
) -> Iterator[weightstream.Streamer]:
    """Offload a model in one of `FORMS`, or, on a GPU, as "cached, coded". `shared`: part of the buffer is slots."""
    room, codec = 4 * model_nbytes(model) + (1 << 20), "none" if form == "cached" else "compressed"
    with weightstream.offload(model, device=device, device_budget=room, codec=codec) as streamer:
        plan = plan_of(streamer, form, num_slots, ahead=ahead, shared=shared)
        assert (plan.shared_nbytes > 0) is shared
        prove(plan)
        streamer.switch(plan)
        assert bool(streamer.plan.manifest.codes) is (form != "cached")
        assert (streamer.plan.step_nbytes > 0) is (form == "coded, streams")
        yield streamer


def caches(streamer: weightstream.Streamer) -> list[Any]:
    """The caches of all units that have one."""
    return [unit.rows.cache for unit in streamer._binding.units if unit.rows is not None and unit.rows.cache]


def counts(streamer: weightstream.Streamer) -> tuple[int, int]:
    """Cache hits and fetched rows, summed over all caches."""
    counters = [cache.counts() for cache in caches(streamer)]
    return sum(counted.hits for counted in counters), sum(counted.misses for counted in counters)


class Selected(list[int]):
    """Number of ids in each selection of rows; empty if all stacks were read whole. `ways` has the kind of each."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[str] = []


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> Selected:
    """The selections of rows from now on."""
    found = Selected()

    def spied(way: str, most: Any) -> Any:
        inner = getattr(Rows, way)

        def spy(rows: Rows, ids: torch.Tensor) -> Any:
            assert ids.numel() <= most(rows)
            found.append(ids.numel())
            found.ways.append(way)
            return inner(rows, ids)

        return spy

    monkeypatch.setattr(Rows, "select", spied("select", lambda rows: rows.most))
    monkeypatch.setattr(Rows, "place", spied("place", lambda rows: NEARLY_ALL * rows.num_rows))
    return found


def experts_of(model: Any) -> list[Any]:
    """The modules that own the stacks."""
    return [module for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "num_experts")]
