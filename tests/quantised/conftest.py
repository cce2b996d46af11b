"""Formats and checkpoints. Nothing here needs gradients. What the libraries bring along is imported first, and stays:
no collection of garbage looks at it again.
"""

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
    """A format, where its library is there."""
    library = FORMATS[request.param].library
    if library is not None:
        pytest.importorskip(library)
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the checkpoint of a name is, made when it is first asked for."""
    made: dict[str, Path] = {}

    def found(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("checkpoint")
            CHECKPOINTS[name][1](made[name])
        return made[name]

    return found
