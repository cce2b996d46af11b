"""Packed experts: stacks of matrices that a module holds as packed tensors, its *leaves*, and how these unpack.

In each format all that unpacks a matrix lies in its own row of every leaf: its packed weights and its scales. Unpacking
works element by element, so rows may be picked before they are unpacked. Knows no library, no plan and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightstream.errors import UnsupportedError

_PACKED = "_weightstream_packed"  # an attribute of a module: its packed stacks, by name


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFormat:
    """How matrices are packed. Formats are values: equal ones unpack alike.

    Attributes:
        name: for messages.
        suffixes: of the names of its leaves, after the name of the stack.
        unpack: the function of the library that loads the format. From rows of all leaves, each of shape (rows, ...),
            the dtype of a weight, and `settings`, it makes the matrices, of shape (rows, ...).
        settings: sizes that the leaves do not show, such as that of a group.
        kernel: the name of the format in codec/unpacking.py, which has a kernel for it; None: there is none.
    """

    name: str
    suffixes: tuple[str, ...]
    unpack: Callable[..., torch.Tensor]
    settings: tuple[Any, ...] = ()
    kernel: str | None = None

    def unpacked(self, rows: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
        """These rows as matrices."""
        return self.unpack(*rows, dtype, *self.settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStack:
    """A stack of matrices, which its module holds packed.

    Attributes:
        format: how it is packed.
        leaves: names of the module's parameters that hold it, in the order of the format's suffixes.
        shape: of the unpacked stack.
        dtype: of the unpacked stack.
    """

    format: PackedFormat
    leaves: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def packed_stacks(module: torch.nn.Module) -> Mapping[str, PackedStack]:
    """The packed stacks of a module, by the names that they have unpacked; empty for any other module."""
    found: Mapping[str, PackedStack] = module.__dict__.get(_PACKED, {})
    return found


def unpack_kernels_of(model: torch.nn.Module) -> frozenset[str]:
    """The kernels that unpack stacks of a model."""
    kernels = {stack.format.kernel for module in model.modules() for stack in packed_stacks(module).values()}
    return frozenset(kernel for kernel in kernels if kernel is not None)


def packed_leaves(module: torch.nn.Module, stack: PackedStack) -> list[torch.Tensor]:
    """The tensors of the module that hold this stack.

    Raises `UnsupportedError` if they are no longer its parameters.
    """
    parameters: dict[str, Any] = module._parameters
    if missing := [leaf for leaf in stack.leaves if parameters.get(leaf) is None]:
        raise UnsupportedError(
            f"{missing[0]} is no longer a parameter of {type(module).__name__}, which unpacks {stack.format.name} from "
            "it: packed experts take no parametrisation, such as LoRA by target_parameters. Load the model with "
            "transformers and dequantise it first"
        )
    return [parameters[leaf] for leaf in stack.leaves]


def hold_packed(
    module: torch.nn.Module, name: str, packed_format: PackedFormat, leaves: Mapping[str, torch.nn.Parameter]
) -> None:
    """Have a module hold the stack of this name as these leaves, by name, in place of its parameter."""
    plain = module._parameters.pop(name)
    assert plain is not None
    for leaf, parameter in leaves.items():
        module.register_parameter(leaf, parameter)
    stack = PackedStack(format=packed_format, leaves=tuple(leaves), shape=tuple(plain.shape), dtype=plain.dtype)
    module.__dict__.setdefault(_PACKED, {})[name] = stack
