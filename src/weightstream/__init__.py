"""Run a PyTorch model bigger than the GPU: weights stream through a small ring of device memory, bit for bit."""

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
from weightstream.offload import from_pretrained, offload
from weightstream.plan.plan import Plan
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
