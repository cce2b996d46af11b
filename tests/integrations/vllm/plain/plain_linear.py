"""A plug-in of vLLM for these tests: linear layers on the CPU keep their weights, as they do on a GPU.

On the CPU vLLM packs them into handles of oneDNN, and deletes them, so there would be nothing to stream.

vLLM has an NVFP4 kernel in plain torch, but does not choose it on the CPU.

It also mends speculation on the CPU: vLLM 0.32 and 0.33 replace Triton's kernels wherever a module holds one, and fail
on objects of llvmlite, which the n-gram proposer imports.
"""

import sys
from typing import Any

import torch


def register() -> None:
    _keep_linears()
    _choose_emulation()
    _pass_over_llvmlite()


def _keep_linears() -> None:
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def _choose_emulation() -> None:
    try:
        from vllm.model_executor.kernels import linear
        from vllm.platforms import PlatformEnum

        linear.register_linear_kernel(linear.EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    except (ImportError, AttributeError, ValueError):  # vLLM before 0.33
        return


def _pass_over_llvmlite() -> None:
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # vLLM 0.24
        return
    rebind = dispatcher._rebind_kernels

    def without_llvmlite(overrides: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("llvmlite")}
        try:
            rebind(overrides)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = without_llvmlite
