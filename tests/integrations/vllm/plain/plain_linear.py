"""A plug-in of vLLM for these tests: linear layers on the CPU keep their weights, as they do on a GPU.

On the CPU vLLM packs them into handles of oneDNN, and deletes them, so there would be nothing to stream.
"""

import torch


def register() -> None:
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
