"""Run a PyTorch model bigger than the GPU: weights stream through a small ring of device memory, bit for bit."""

from importlib import import_module
from types import MappingProxyType
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
    from weightstream.plan.plan import Plan
    from weightstream.runtime.streamer.stats import Stats
    from weightstream.runtime.streamer.streamer import Streamer
    from weightstream.settings.config import ConfigWarning, OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

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


_MODULES = MappingProxyType(  # of names that load at their first use: the command line starts within milliseconds
    {
        "BaseOffloader": "api.offloaders",
        "ConfigWarning": "settings.config",
        "NoopOffloader": "api.offloaders",
        "OffloadConfig": "settings.config",
        "Plan": "plan.plan",
        "PrefetchOffloadConfig": "settings.config",
        "PrefetchOffloader": "api.offloaders",
        "Stats": "runtime.streamer.stats",
        "Streamer": "runtime.streamer.streamer",
        "Stripes": "api.multi_gpu",
        "UVAOffloadConfig": "settings.config",
        "UVAOffloader": "api.offloaders",
        "create_offloader": "api.offloaders",
        "from_pretrained": "api.offload",
        "generate": "adapters.generation.generation",
        "get_offloader": "api.offloaders",
        "offload": "api.offload",
        "offload_pipeline": "api.pipelines",
        "pipeline_from_pretrained": "api.pipelines",
        "plan_model": "api.plan_model",
        "set_offloader": "api.offloaders",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"weightstream.{_MODULES[name]}"), name)


def __dir__() -> list[str]:  # what completion shows: else what is imported here, and nothing that waits
    return [*__all__, "__version__"]
