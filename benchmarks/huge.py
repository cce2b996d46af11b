"""A model without a checkpoint: a rank's shards, drawn and compressed on its GPU. Layers share the bytes of a few.

Each rank writes the compressed shards of `DISTINCT` layers to a file. Layer *i* has those of layer *i* modulo that: as
many bytes move and are decoded as for distinct layers, while the file has only the bytes of a few.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import transformers
from torch import nn

from weightstream.adapters.hf import tensor_parallel
from weightstream.api.offload import _offload
from weightstream.codec import coding
from weightstream.inputs.builder import CallerFacts
from weightstream.runtime.devices.opening import opened_backend
from weightstream.store.file_slice import FileSlice
from weightstream.store.lazy import DecodedMemory
from weightstream.store.mapping import FileMapping

SHAPE = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "vocab_size": 128256,
}
DISTINCT, CODEC = 4, "compressed"
_ALIGNMENT = 4096


def drawn(config: Any, wanted: Any, device: torch.device, file: Path) -> tuple[Any, CallerFacts]:
    """The model with this process's shards as `wanted` says, or the whole one, and the facts for `_offload`."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    rank = 0
    if wanted is not None:
        tensor_parallel.shard(model, wanted)
        rank = torch.distributed.get_rank()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed
    params = dict(model.named_parameters())
    random = torch.Generator(device)
    written: dict[str, tuple[Any, int]] = {}
    with file.open("wb") as out:
        for name in (name for name in params if _like(name) == name and params[name].dim() > 1):
            local = here(params[name])
            random.manual_seed(crc32(name.encode()) + (local is not params[name]) * rank)
            plain = torch.randn(local.shape, generator=random, device=device, dtype=torch.bfloat16).mul_(0.02)
            layout, coded = coding.encode(plain.view(-1).view(torch.uint8), "bfloat16")
            out.seek(-(-out.tell() // _ALIGNMENT) * _ALIGNMENT)
            written[name] = layout, out.tell()
            out.write(coded.cpu().numpy())
    mapping, memories = FileMapping(file), []
    for name, param in params.items():
        if param.dim() == 1:
            made = torch.ones(param.shape, dtype=torch.bfloat16)
        else:
            layout, begin = written[_like(name)]
            memory = DecodedMemory(name, file, layout, extents=[FileSlice(mapping, begin, begin + layout.nbytes)])
            memories.append(memory)
            made = memory.bytes(0, memory.nbytes).view(torch.bfloat16).view(here(param).shape)
            if here(param) is not param:
                made = tensor_parallel._like(made, param.data)
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module)._parameters[attribute] = nn.Parameter(made, requires_grad=False)
    return model.eval(), CallerFacts(memories=(mapping, *memories))


def here(param: torch.Tensor) -> torch.Tensor:
    """The part of a parameter on this rank: a shard, or all of it."""
    return param.to_local() if tensor_parallel.is_shard(param.data) else param


def _like(name: str) -> str:
    """The name of the weight whose bytes this one shares."""
    head, _, rest = name.partition(".layers.")
    index, _, tail = rest.partition(".")
    return f"{head}.layers.{int(index) % DISTINCT}.{tail}" if rest else name


@contextmanager
def streamed(model: Any, given: CallerFacts, device: torch.device, config: Any, *, removes: bool) -> Iterator[Any]:
    """The streamer of the model. With `removes` the model is plain again at the end; weights are decoded when read."""
    with opened_backend(device, config) as backend, torch.no_grad():
        streamer = _offload(model, backend, config, given)
    try:
        yield streamer
    finally:
        if removes:
            streamer.remove()
