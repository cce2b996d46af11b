"""A plug-in of vLLM for these tests: linear layers on the CPU keep their weights, as they do on a GPU.

vLLM packs them into handles of oneDNN there, and deletes them: nothing would be left to stream.
"""

import torch


def register() -> None:
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
