"""What goes between the devices of one model: a block's tensors to where it computes, and what it gives back again.

Whatever runs between blocks sees tensors of the first device. What a block writes into its arguments, tensors and
containers, is written there, too.
"""

from __future__ import annotations

from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from weightstream.runtime.values import items_of, put, with_tensors


class Sent:
    """What a block was given on its device: copies of tensors, each with its source and its version; of containers."""

    def __init__(self) -> None:
        self.tensors: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self.containers: list[tuple[Any, Any]] = []


class Way:
    """The way from the first device to another and back. What several blocks are given goes once."""

    def __init__(self, home: torch.device, device: torch.device) -> None:
        self.home, self.device = home, device
        self._sent = WeakIdKeyDictionary()  # a tensor -> its version, and the copy there

    def there(self, value: Any, sent: Sent) -> Any:
        """The same arguments on the device."""
        return with_tensors(value, partial(self._send, sent), lambda *both: sent.containers.append(both))

    def _send(self, sent: Sent, tensor: torch.Tensor) -> torch.Tensor:
        if not self.goes(tensor):
            return tensor
        version: int
        copy: torch.Tensor | None
        version, copy = self._sent.get(tensor, (-1, None))
        if copy is None or tensor.is_inference() or version != tensor._version:
            with torch.inference_mode(False), torch.no_grad():  # whose copies count how often they are written to
                copy = self.copied(tensor, self.device)
            if not tensor.is_inference():
                self._sent[tensor] = tensor._version, copy
        sent.tensors.append((tensor, copy, copy._version))
        return copy

    def back(self, value: Any, sent: Sent) -> Any:
        """The same output on the first device; what the block wrote into its arguments is written there, too."""
        sources = {id(copy): source for source, copy, _ in sent.tensors}
        for source, copy, version in sent.tensors:
            if copy._version != version:
                source.copy_(copy)
                self._sent.pop(source, None)

        def take(tensor: torch.Tensor) -> torch.Tensor:
            if not self.comes(tensor):
                return tensor
            found = sources.get(id(tensor))
            return self.copied(tensor, self.home) if found is None else found

        known = {id(made): original for original, made in sent.containers}
        for original, made in sent.containers:
            put(original, {key: with_tensors(item, take, known=known) for key, item in items_of(made).items()})
        return with_tensors(value, take, known=known)

    def goes(self, tensor: torch.Tensor) -> bool:
        """Whether it is to be copied to the device."""
        return tensor.device == self.home != self.device

    def comes(self, tensor: torch.Tensor) -> bool:
        """Whether it is to be copied from there."""
        return tensor.device == self.device != self.home

    def clear(self) -> None:
        """Keep nothing of a step that ended."""
        self._sent.clear()

    @staticmethod
    def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)


def crossing(block: nn.Module, way: Way) -> MethodType:
    """A forward for a block that another device computes; a unit is open around it. A copy runs its own."""
    plain = block.forward
    of_class = getattr(plain, "__func__", plain)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not block:
            return of_class(self, *args, **kwargs)
        sent = Sent()
        args, kwargs = way.there((args, kwargs), sent)
        return way.back(plain(*args, **kwargs), sent)

    update_wrapper(forward, plain)
    forward.__name__ = "forward"  # by which a pickle finds the plain one
    return MethodType(forward, block)
