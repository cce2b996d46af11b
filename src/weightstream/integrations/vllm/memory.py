"""What an engine may take of a device, and what its KV cache leaves of that for weights."""

from __future__ import annotations

import gc
from typing import Any

from weightstream.plan.units import human
from weightstream.runtime.devices import cuda

_LEFT_SHARE, _LEFT_NBYTES = 50, 512 << 20  # of the device: for graphs and what is allocated late


class Room:
    """What vLLM may take of a device, `gpu_memory_utilization`, and what is left of it. Bytes."""

    def __init__(self, worker: Any, plain_nbytes: int) -> None:
        self._worker = worker
        self._plain_nbytes = plain_nbytes  # allocated before weights of layers came
        config = worker.vllm_config
        given = config.cache_config.kv_cache_memory_bytes
        specs = worker.get_kv_cache_spec().values()
        self.cache_nbytes = int(given or sum(spec.max_memory_usage_bytes(config) for spec in specs))

    def left(self, activation_nbytes: int) -> int:
        """For the KV cache, beside activations and what CUDA graphs may take."""
        gc.collect()
        cuda.give_back(workspaces=False)
        free, total = cuda.memory(self._worker.device)
        used = int(self._worker.init_snapshot.free_memory) - free
        kept = max(total // _LEFT_SHARE, _LEFT_NBYTES)
        return int(self._worker.requested_memory) - used - activation_nbytes - kept

    def nbytes(self, activation_nbytes: int) -> int:
        """For weights of layers, those that are there included, beside the KV cache that is asked for."""
        taken = allocated(self._worker.device) - self._plain_nbytes
        return self.left(activation_nbytes) + taken - self.cache_nbytes

    def arithmetic(self, activation_nbytes: int) -> str:
        """Why there is no more for weights of layers."""
        utilization = self._worker.vllm_config.cache_config.gpu_memory_utilization
        left = human(max(0, self.nbytes(activation_nbytes)))
        return (
            f"gpu_memory_utilization = {utilization} leaves {left} for layers, beside {human(self.cache_nbytes)} of KV "
            f"cache and {human(activation_nbytes)} of activations: raise it, or lower max_model_len, max_num_seqs or "
            "max_num_batched_tokens, or give a device_budget"
        )


def is_cuda(device: Any) -> bool:
    return getattr(device, "type", "cpu") == "cuda"


def allocated(device: Any) -> int:
    return cuda.allocated_nbytes(device) if is_cuda(device) else 0
