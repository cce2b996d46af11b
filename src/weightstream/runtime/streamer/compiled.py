"""The part of a model that runs through `torch.compile`: its forward, or its blocks. Knows no weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from weightstream.errors import ConfigError

logger = logging.getLogger("weightstream")


class Compiled:
    """The compiled forward of a model, compiled when a step first needs it, and again after it was dropped."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._model = model
        self._blocks = blocks
        self._options: dict[str, Any] | None = None  # None: nothing is to be compiled
        self._entry: Callable[..., Any] | None = None
        self._undo: list[Callable[[], None]] = []
        self._has_warned = False

    @property
    def is_wanted(self) -> bool:
        return self._options is not None

    def request(self, scope: Literal["model", "blocks"], options: dict[str, Any]) -> None:
        """Compile from the next step on; raises `ConfigError` for a scope that the model does not have."""
        if scope not in ("model", "blocks") or (scope == "blocks" and not self._blocks):
            raise ConfigError(f"scope = {scope!r}: give 'model', or 'blocks' where a model has repeated blocks")
        self.drop()
        self._options = {"scope": scope} | options

    def runs(self, reason: str | None) -> bool:
        """Whether steps can run compiled, that is, there is no reason against it; the first reason is logged."""
        if reason is not None and not self._has_warned:
            logger.warning("the model runs eager and not compiled: %s", reason)
            self._has_warned = True
        return reason is None

    def entry(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The function to run instead of the plain `forward`."""
        if self._options is None:
            return forward
        if self._entry is None:
            self._entry = self._compile(**self._options)
        return forward if self._entry is _run else self._entry

    def _compile(self, scope: str, **options: Any) -> Callable[..., Any]:
        if scope == "model":
            return torch.compile(self._model.forward, **options)
        for block in self._blocks:
            self._undo.append(partial(_put_back, block, block.__dict__.get("_compiled_call_impl")))
            block.compile(**options)
        return _run

    def renew(self) -> None:
        """Compile again after a change of the model's code, which compiled code notices in part only."""
        if self._entry is not None:
            self.drop()
            torch._dynamo.reset()

    def drop(self) -> None:
        """Drop the compiled code; the next step compiles again if that is still requested."""
        self._entry = None
        while self._undo:
            self._undo.pop()()


def _run(*args: Any, **kwargs: Any) -> None:
    """The entry if blocks are compiled, not the model: runs the plain forward."""


def _put_back(block: nn.Module, compiled: Any) -> None:
    block.__dict__.pop("_compiled_call_impl", None)
    if compiled is not None:
        block._compiled_call_impl = compiled
