"""What every test has: a cache of its own that holds a profile, so that none measures or writes to the home.

Triton's kernels run in its interpreter where there is no GPU; Triton reads that when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from weightstream.measure import profile
from weightstream.runtime.cpu import CPU_PROFILE


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        profile.save(torch.device("cpu"), CPU_PROFILE)
        yield
