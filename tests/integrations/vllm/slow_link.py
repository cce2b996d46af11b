"""A machine on which experts of small models are worth slots, for engines and for the ranks that they start."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from gpu_plans import Assign, plan_for_a_slow_link
from weightstream.integrations.vllm import experts
from weightstream.integrations.vllm.experts import IdsBecomeSlots


def install(assign: Assign) -> None:
    """A link as slow for these sizes as a real one for real ones. On a CPU also a plan as for a GPU, vLLM's kernel for
    CPUs, which takes ids, and its operator, which compiled code for CPUs inlines."""
    plan_for_a_slow_link(assign, 1e8)
    if torch.cuda.is_available():
        return
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    def select_forward(self: Any) -> Any:
        name = "moe_forward" if self._shared_experts is None else "moe_forward_shared"
        return getattr(torch.ops.vllm, name)

    assign(moe_runner.MoERunner, "_select_forward", select_forward)
    kinds = ("CPUUnquantizedExperts", "X86CPUUnquantizedExperts")
    assign(experts, "PROVED", MappingProxyType(dict.fromkeys(kinds, IdsBecomeSlots.AT_ONCE)))
