"""Run a PyTorch model bigger than the GPU: weights stream through a small ring of device memory, bit for bit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from weightstream.settings.config import ConfigWarning, OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from weightstream.settings.log import prefix_last_resort

if TYPE_CHECKING:
    from weightstream.adapters.generation.generation import generate
    from weightstream.api.multi_gpu import Stripes
    from weightstream.api.offload import from_pretrained, offload
    from weightstream.api.offloaders import (
        BaseOffloader,
        NoopOffloader,
        PrefetchOffloader,
        UVAOffloader,
        create_offloader,
        get_offloader,
        set_offloader,
    )
    from weightstream.api.pipelines import offload_pipeline, pipeline_from_pretrained
    from weightstream.api.plan_model import plan_model
    from weightstream.runtime.streamer.stats import Stats
    from weightstream.runtime.streamer.streamer import Streamer

__version__ = "0.1.0"
prefix_last_resort()

__all__ = [
    "BaseOffloader",
    "CheckpointError",
    "ConfigError",
    "ConfigWarning",
    "InvariantError",
    "NoopOffloader",
    "OffloadConfig",
    "OffloadError",
    "Plan",
    "PlanError",
    "PrefetchOffloadConfig",
    "PrefetchOffloader",
    "Stats",
    "StoreError",
    "Streamer",
    "Stripes",
    "UVAOffloadConfig",
    "UVAOffloader",
    "UnsupportedError",
    "WeightstreamError",
    "create_offloader",
    "from_pretrained",
    "generate",
    "get_offloader",
    "offload",
    "offload_pipeline",
    "pipeline_from_pretrained",
    "plan_model",
    "set_offloader",
]


def __getattr__(name: str) -> Any:  # what needs torch waits for its first use: `weightstream --help` is immediate
    if name in ("Stats", "Streamer"):
        return getattr(import_module(f"weightstream.runtime.streamer.{name.lower()}"), name)
    if name == "Stripes":
        return import_module("weightstream.api.multi_gpu").Stripes
    if name == "generate":
        return import_module("weightstream.adapters.generation.generation").generate
    if name in ("offload_pipeline", "pipeline_from_pretrained"):
        return getattr(import_module("weightstream.api.pipelines"), name)
    if name == "plan_model":
        return import_module("weightstream.api.plan_model").plan_model
    if name in ("from_pretrained", "offload"):
        return getattr(import_module("weightstream.api.offload"), name)
    if name in __all__:
        return getattr(import_module("weightstream.api.offloaders"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:  # what completion shows: else what is imported here, and nothing that waits
    return [*__all__, "__version__"]
