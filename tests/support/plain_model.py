"""Changes the plain model that `weightstream run --verify` compares with."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch


def prefer_in_plain_model(
    monkeypatch: pytest.MonkeyPatch, token: int, prefers: Callable[[int], bool] = lambda _: True
) -> None:
    """The plain model's forward n, counted from 0 over all its texts, prefers a token to all others if `prefers(n)`."""
    run = importlib.import_module("weightstream.cli.run")  # the package has a command of this name
    plain = run._plain

    def changed(model: Any, *args: Any) -> Any:
        calls = itertools.count()

        def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            is_token = torch.arange(output.shape[-1]) == token
            return output + 1e6 * is_token * prefers(next(calls))

        model.model.lm_head.register_forward_hook(hook)
        return plain(model, *args)

    monkeypatch.setattr(run, "_plain", changed)
