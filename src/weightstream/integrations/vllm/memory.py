"""The memory of an engine: what its KV cache leaves of the device for weights, and what it takes of the host."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import Any

from weightstream.plan.units import human
from weightstream.runtime.devices import cuda
from weightstream.store.limits import available_nbytes, describe_limits

logger = logging.getLogger("weightstream")

# Memory that stays free for CUDA graphs and late allocations: a 50th of the device, and 512 MiB at least.
_RESERVE_DIVISOR, _RESERVE_NBYTES = 50, 512 << 20


class Room:
    """The device memory that vLLM may use, which `gpu_memory_utilization` limits, and what is left of it."""

    def __init__(self, worker: Any, plain_nbytes: int) -> None:
        self._worker = worker
        self._plain_nbytes = plain_nbytes  # allocated before weights of layers came to the device
        config = worker.vllm_config
        configured_nbytes = config.cache_config.kv_cache_memory_bytes
        specs = worker.get_kv_cache_spec().values()
        self.cache_nbytes = int(configured_nbytes or sum(spec.max_memory_usage_bytes(config) for spec in specs))

    def left(self, activation_nbytes: int) -> int:
        """The bytes that are left for the KV cache, after everything on the device now, activations, and a reserve for
        CUDA graphs."""
        gc.collect()
        cuda.give_back(workspaces=False)
        free, total = cuda.memory(self._worker.device)
        used = int(self._worker.init_snapshot.free_memory) - free
        reserve_nbytes = max(total // _RESERVE_DIVISOR, _RESERVE_NBYTES)
        return int(self._worker.requested_memory) - used - activation_nbytes - reserve_nbytes

    def nbytes(self, activation_nbytes: int) -> int:
        """The bytes that weights of layers may take, so that the wanted KV cache fits as well."""
        held_nbytes = allocated(self._worker.device) - self._plain_nbytes  # weights of layers that are on the device
        return self.left(activation_nbytes) + held_nbytes - self.cache_nbytes

    def arithmetic(self, activation_nbytes: int) -> str:
        """The arithmetic of the memory for weights of layers, and the remedy, for an error."""
        utilization = self._worker.vllm_config.cache_config.gpu_memory_utilization
        left = human(max(0, self.nbytes(activation_nbytes)))
        return (
            f"gpu_memory_utilization = {utilization} leaves {left} for layers, after {human(self.cache_nbytes)} of KV "
            f"cache and {human(activation_nbytes)} of activations: raise it, or lower max_model_len, max_num_seqs or "
            "max_num_batched_tokens, or pass a device_budget"
        )


def is_cuda(device: Any) -> bool:
    return getattr(device, "type", "cpu") == "cuda"


def allocated(device: Any) -> int:
    return cuda.allocated_nbytes(device) if is_cuda(device) else 0


def cache_offload_nbytes(settings: Mapping[str, Any], num_ranks: int) -> int:
    """The bytes of host memory that a rank's KV connector takes for blocks that it offloads; 0 if it does not say."""
    inner = settings.get("connectors") or ()  # of a connector that combines others
    nested = (cache_offload_nbytes(part.get("kv_connector_extra_config") or {}, num_ranks) for part in inner)
    own = settings.get("cpu_bytes_to_use_per_rank") or int(settings.get("cpu_bytes_to_use") or 0) // num_ranks
    return int(own) + sum(nested)


def report_cache_offload(vllm_config: Any) -> None:
    """Log what a KV connector takes of the resources of weights. It allocates its memory once these have theirs."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    nbytes = cache_offload_nbytes(transfer.kv_connector_extra_config or {}, vllm_config.parallel_config.world_size)
    taken = f"will take {human(nbytes)} of host memory" if nbytes else "may take host memory"
    logger.info(
        "weightstream: %s %s beside host_budget, and shares the link with the weights", transfer.kv_connector, taken
    )
    if nbytes > (available := available_nbytes()):
        logger.warning(
            "weightstream: %s of host memory are left for the %s that %s will take (%s): lower kv_offloading_size, or "
            "raise device_budget",
            *(human(available), human(nbytes), transfer.kv_connector, describe_limits()),
        )
