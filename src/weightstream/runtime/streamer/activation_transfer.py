"""Transfers between the devices of one model: a block's arguments to its device, and its output back.

Code that runs between blocks sees tensors of the first device. If a block writes to its arguments, tensors or
containers, the writes are repeated on the first device; the version of a tensor shows that it was written to. Arguments
that share memory also share memory on the other device, and an output that shares memory with an argument's copy comes
back as a view of the argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from weightstream.codec.device import on
from weightstream.runtime.streamer.forward_patch import Run
from weightstream.runtime.tensors.pytree import attributes_of, items_of, set_items, tensors_in, with_tensors
from weightstream.runtime.weights.alias_groups import span

_ALIGN = 16  # bytes: a multiple of every dtype's size, so that views of a copy begin at whole elements


class DeviceCrossing:
    """Transfers from the first device to another and back. An argument of several blocks is sent once."""

    def __init__(self, home: torch.device, device: torch.device) -> None:
        self.home = home
        self.device = device
        self.is_open = True
        self._sent = WeakIdKeyDictionary()  # a tensor -> its version, and the copy there

    def goes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is to be copied to the device."""
        return tensor.device == self.home != self.device

    def comes(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is to be copied from the device."""
        return tensor.device == self.device != self.home

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's copy on the device, the same one until the tensor or the copy is written to."""
        version: int
        copy: torch.Tensor | None
        version, copy = self._sent.get(tensor, (-1, None))
        if copy is None or tensor.is_inference() or version != tensor._version:
            copy = self.copied(tensor, self.device)
            if not tensor.is_inference():  # these have no version
                self._sent[tensor] = tensor._version, copy
        return copy

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the copy of a tensor: the block wrote to it."""
        self._sent.pop(tensor, None)

    def clear(self) -> None:
        """Drop all copies, at the end of a step."""
        self._sent.clear()

    def close(self) -> None:
        """End the transfers: blocks compute on the device of their arguments from now on."""
        self.is_open = False
        self.clear()

    @staticmethod
    def copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)


class SentTensor(NamedTuple):
    """A tensor of the first device, its copy on the other, and the copy's version when it was sent."""

    source: torch.Tensor
    copy: torch.Tensor
    version: int


class CopiedContainer(NamedTuple):
    """A list, dict or object that was passed to the block, and its copy that holds tensors of the block's device."""

    original: Any
    copy: Any


class BroughtTensor(NamedTuple):
    """A tensor that the block returned, and the tensor of the first device that replaces it."""

    tensor: torch.Tensor
    copy: torch.Tensor


class TransferredCall:
    """The arguments of one call of a block on its device, and its output on the first device."""

    def __init__(self, device_crossing: DeviceCrossing) -> None:
        self._crossing = device_crossing
        self._sent: dict[int, SentTensor] = {}  # by the id of the source
        self._containers: list[CopiedContainer] = []
        self._brought: dict[int, BroughtTensor] = {}  # by the id of the tensor that the block returned

    def there(self, value: Any) -> Any:
        """The arguments, copied to the device of the block."""
        arguments = {id(tensor): tensor for tensor in tensors_in(value) if self._crossing.goes(tensor)}
        with torch.inference_mode(False), torch.no_grad():  # where copies count how often they are written to
            for group in _overlapping(list(arguments.values())):
                self._send_together(group)
            for tensor in arguments.values():
                if id(tensor) not in self._sent:
                    self._send(tensor, self._crossing.sent(tensor))
        return with_tensors(value, self._there, {}, lambda *both: self._containers.append(CopiedContainer(*both)))

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._sent[id(tensor)].copy if id(tensor) in self._sent else tensor

    def _send(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        self._sent[id(tensor)] = SentTensor(tensor, copy, copy._version)

    def _send_together(self, tensors: list[torch.Tensor]) -> None:
        """Send tensors that show the same memory as views of one copy of it."""
        begin = min(_begin(tensor) for tensor in tensors) // _ALIGN * _ALIGN
        nbytes = max(_end(tensor) for tensor in tensors) - begin
        flat = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
        memory = self._crossing.copied(
            flat.set_(tensors[0].untyped_storage(), begin, (nbytes,), (1,)), self._crossing.device
        )
        for tensor in tensors:
            at = _begin(tensor) - begin
            shown = memory[at : at + _end(tensor) - _begin(tensor)].view(tensor.dtype)
            self._send(tensor, shown.as_strided(tensor.shape, tensor.stride()))

    def back(self, value: Any) -> Any:
        """The output, copied to the first device, after the block's writes to its arguments are repeated there."""
        for source, copy, version in self._sent.values():
            if copy._version != version:
                source.copy_(copy)
                self._crossing.forget(source)
        memo = {id(made): original for original, made in self._containers}
        for original, made in self._containers:
            set_items(original, {key: with_tensors(item, self._back, memo) for key, item in items_of(made).items()})
            if attributes := attributes_of(made):
                now = {key: with_tensors(item, self._back, memo) for key, item in attributes.items()}
                vars(original).update(now)
        return with_tensors(value, self._back, memo)

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._crossing.comes(tensor):
            return tensor
        if id(tensor) not in self._brought:
            found = self._shown(tensor)
            copy = self._crossing.copied(tensor, self._crossing.home) if found is None else found
            self._brought[id(tensor)] = BroughtTensor(tensor, copy)
        return self._brought[id(tensor)].copy

    def _shown(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A view of an argument like this view of its copy; None where the tensor shares memory with no copy."""
        memory = tensor.untyped_storage()._cdata
        source = next((source for source, copy, _ in self._sent.values() if copy is tensor), None)
        if source is not None:
            return source
        for source, copy, _ in self._sent.values():
            is_alike = copy.stride() == source.stride() and copy.dtype is source.dtype is tensor.dtype
            if is_alike and copy.untyped_storage()._cdata == memory:
                at = source.storage_offset() + tensor.storage_offset() - copy.storage_offset()
                if at >= 0:
                    return source.as_strided(tensor.shape, tensor.stride(), at)
        return None


def _begin(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _end(tensor: torch.Tensor) -> int:
    return _begin(tensor) + span(tensor.shape, tensor.stride()) * tensor.element_size()


def _overlapping(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of tensors in which some may share bytes."""
    by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel() and tensor.layout is torch.strided:
            by_storage[tensor.untyped_storage()._cdata].append(tensor)
    for group in by_storage.values():
        ordered = sorted(group, key=_begin)
        if any(_end(a) > _begin(b) for a, b in pairwise(ordered)):
            yield ordered


def crossing(device_crossing: DeviceCrossing) -> Run:
    """The call around the forward of a block that another device computes, inside of its unit."""

    def run(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not device_crossing.is_open:
            return forward(*args, **kwargs)
        call = TransferredCall(device_crossing)
        args, kwargs = call.there((args, kwargs))
        try:
            with on(device_crossing.device):
                output = forward(*args, **kwargs)
        except BaseException:
            call.back(None)  # repeat the writes that the block made before the error
            raise
        return call.back(output)

    return run
