"""The systems that are compared with the plain model: each a context manager that yields a function to call.

A peer gets a model whose weights are in pageable host memory, shared with the next peer, as none of them writes there,
and an input in host memory for profiling. Memory that a peer does not free is freed with its model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from model import Decoder
from steps import Step
from timing import Run
from torch import nn

from weightstream import Streamer

# Fusion across a block's end keeps more digits there; with this, rounding does not depend on fusion.
COMPILE: dict[str, Any] = {"fullgraph": True, "options": {"emulate_precision_casts": True}}


@contextmanager
def captured(step: Step, streamer: Streamer | None = None) -> Iterator[Step]:
    """A step in a CUDA graph, launched back to back; the output is one static tensor."""
    graph = torch.cuda.CUDAGraph()
    with nullcontext() if streamer is None else streamer.step():
        with torch.cuda.graph(graph) if streamer is None else streamer.capture(graph):
            y = step()

        def run() -> torch.Tensor:
            if streamer is None:
                graph.replay()
            else:
                streamer.replay(graph)
            return y

        yield run


@contextmanager
def graphed(model: nn.Module, x: torch.Tensor, streamer: Streamer | None = None) -> Iterator[Run]:
    """The model in a CUDA graph."""
    static = x.clone()
    with captured(lambda: model(static), streamer) as step:

        def run(x: torch.Tensor) -> torch.Tensor:
            static.copy_(x)
            return step()

        yield run


def compiled(model: Decoder, scope: Literal["model", "blocks"]) -> Run:
    """The resident model, compiled as `Streamer.compile` does with the same scope."""
    if scope == "model":
        return torch.compile(model, **COMPILE)
    for layer in model.layers:
        layer.compile(**COMPILE)
    return model


@contextmanager
def accelerate(model: Decoder, x: torch.Tensor, device: torch.device) -> Iterator[Run]:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=device)
    yield model


@contextmanager
def diffusers(model: Decoder, x: torch.Tensor, device: torch.device, *, leaf: bool) -> Iterator[Run]:
    group_offload(model, device, leaf=leaf)
    yield model


def group_offload(model: nn.Module, device: torch.device, *, leaf: bool) -> None:
    """diffusers' own, with a copy stream, in its fastest form: `record_stream` trades memory for fewer waits."""
    from diffusers.hooks import apply_group_offloading

    level: dict[str, Any] = {"offload_type": "leaf_level"}
    if not leaf:
        level = {"offload_type": "block_level", "num_blocks_per_group": 1}
    stream = device.type == "cuda"
    apply_group_offloading(
        model, onload_device=device, offload_device="cpu", use_stream=stream, record_stream=stream, **level
    )


@contextmanager
def flextensor(model: Decoder, x: torch.Tensor, device: torch.device, **settings: Any) -> Iterator[Run]:
    """Profiled on the input that is measured; `max_gpu_mem_fraction` selects its memory mode, else latency."""
    import flextensor as ft

    proxy = ft.offload(model, ft.OffloadConfig(include_patterns=["layers.*"], **settings))
    try:
        for _ in range(ft.get_offload_manager().iters_before_inference + 1):
            proxy(x.to(device))
        yield proxy
    finally:
        ft.release(preserve_model=False)
