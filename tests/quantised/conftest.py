"""Nothing here needs gradients. What the libraries bring along is imported first, and stays: no collection of garbage
looks at it again.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

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
