"""Run a PyTorch model bigger than the GPU: weights stream through a small ring of device memory, bit for bit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightstream.config import ConfigWarning, OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from weightstream.errors import (
    CheckpointError,
    ConfigError,
    InvariantError,
    OffloadError,
    PlanError,
    StoreError,
    UnsupportedError,
    WeightstreamError,
)
from weightstream.plan.plan import Plan

if TYPE_CHECKING:
    from weightstream.front import from_pretrained, offload
    from weightstream.runtime.streamer import Stats, Streamer

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ConfigWarning",
    "InvariantError",
    "OffloadConfig",
    "OffloadError",
    "Plan",
    "PlanError",
    "PrefetchOffloadConfig",
    "Stats",
    "StoreError",
    "Streamer",
    "UVAOffloadConfig",
    "UnsupportedError",
    "WeightstreamError",
    "from_pretrained",
    "offload",
]


def __getattr__(name: str) -> Any:  # what needs torch waits for its first use: `weightstream --help` is immediate
    if name in ("Stats", "Streamer"):
        return getattr(import_module("weightstream.runtime.streamer"), name)
    if name in ("from_pretrained", "offload"):
        return getattr(import_module("weightstream.front"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
