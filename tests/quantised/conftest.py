"""Formats and checkpoints. Nothing here needs gradients. The libraries' modules are imported first and exempt from
garbage collection."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from checkpoints import CHECKPOINTS
from formats import FORMATS

_LIBRARIES = (
    "transformers.models.llama.modeling_llama",
    "transformers.quantizers.auto",
    "bitsandbytes",
    "compressed_tensors.compressors",
    "diffusers.hooks",
    "torchao.quantization",
    "gptqmodel",
)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    for library in _LIBRARIES:
        with suppress(ImportError):  # tests that need it are skipped
            importlib.import_module(library)
    gc.collect()
    gc.freeze()


@pytest.fixture(params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    """A format, if its library is installed."""
    library = FORMATS[request.param].library
    if library is not None:
        pytest.importorskip(library)
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of the checkpoint of a name, made at first use."""
    made: dict[str, Path] = {}

    def found(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("checkpoint")
            CHECKPOINTS[name][1](made[name])
        return made[name]

    return found
