"""Counts the launches of the kernels that unpack packed matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightstream.codec import unpacking


def launches_from_now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of stacks, 1 or 2, of each launch."""
    found: list[int] = []
    launch = unpacking._launch

    def counted(rows: torch.Tensor, first: Any, second: Any) -> None:
        found.append(1 + (second is not None))
        launch(rows, first, second)

    monkeypatch.setattr(unpacking, "_launch", counted)
    return found
