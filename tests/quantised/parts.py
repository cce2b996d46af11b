"""Weights that save themselves in parts, as those of quanto do: tensors that are not plain are taken apart, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Part(torch.Tensor):
    """A wrapper that saves its inner tensors by their own names, if they are of exactly the plain class."""

    names: tuple[str, ...]

    def __new__(cls, *inside: torch.Tensor) -> Part:
        first = inside[0]
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)  # type: ignore[no-any-return, attr-defined]

    def __init__(self, *inside: torch.Tensor) -> None:
        for name, tensor in zip(self.names, inside, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.names), None

    @classmethod
    def __tensor_unflatten__(cls, inside: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Part:
        return cls(*(inside[name] for name in cls.names))

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.detach.default:
            return cls(*(op(getattr(args[0], name)) for name in cls.names))
        raise NotImplementedError(str(op))

    def save_to(self, destination: dict[str, Any], prefix: str) -> None:
        for name in self.__tensor_flatten__()[0]:
            inner: Any = getattr(self, name)
            if type(inner) is torch.Tensor:
                destination[prefix + name] = inner.detach()
            else:
                inner.save_to(destination, f"{prefix}{name}.")


class Packed(Part):
    """A wrapper of one tensor, which kernels get without this class seeing it."""

    names = ("data_",)
    __torch_function__ = torch._C._disabled_torch_function_impl


class Quantised(Part):
    names = ("packed", "scale")


class PartsLinear(nn.Module):
    """A linear layer in int8 with a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        values = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(Quantised(Packed(values), scale), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return nn.functional.linear(x, weight.packed.data_.to(x.dtype) * weight.scale, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        weight: Any = self.weight
        weight.save_to(destination, f"{prefix}weight.")
        destination[f"{prefix}bias"] = self.bias.detach()
