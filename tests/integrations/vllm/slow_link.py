"""A machine on which experts of small models are worth slots, for engines and for the ranks that they start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from weightstream.inputs import builder
from weightstream.integrations.vllm import experts
from weightstream.integrations.vllm.experts import IdsBecomeSlots


def install(assign: Callable[[Any, str, Any], None]) -> None:
    """A link as slow for these sizes as a real one for real ones. On a CPU also a plan as for a GPU, vLLM's kernel for
    CPUs, which takes ids, and its operator, which compiled code for CPUs inlines."""
    inner, is_cpu = builder.machine_of, not torch.cuda.is_available()

    def machine_of(*args: Any, **kwargs: Any) -> Any:
        machine = inner(*args, **kwargs)
        machine = replace(machine, profile=replace(machine.profile, link_bytes_per_s=1e8))
        return replace(machine, on_cpu=False, total_nbytes=machine.host_total_nbytes) if is_cpu else machine

    assign(builder, "machine_of", machine_of)
    if not is_cpu:
        return
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    def select_forward(self: Any) -> Any:
        name = "moe_forward" if self._shared_experts is None else "moe_forward_shared"
        return getattr(torch.ops.vllm, name)

    assign(moe_runner.MoERunner, "_select_forward", select_forward)
    kinds = ("CPUUnquantizedExperts", "X86CPUUnquantizedExperts")
    assign(experts, "PROVED", MappingProxyType(dict.fromkeys(kinds, IdsBecomeSlots.AT_ONCE)))
