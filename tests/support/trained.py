"""SmolLM2-135M-Instruct, a trained model. `scripts/test` fetches it, and tests fail if it could not; elsewhere they are
skipped where it is absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_NAME = "WEIGHTSTREAM_SMOLLM2"  # set by scripts/test
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")  # of the user: tests have another one
_FOLDER = Path(os.environ.get(_NAME) or _CACHE / "weightstream" / "smollm2-135m-instruct")


def smollm2() -> Path:
    if not _FOLDER.is_dir():
        message = f"SmolLM2 is not in {_FOLDER}: run scripts/fetch-smollm2"
        if _NAME in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    return _FOLDER
