"""The bytes of a checkpoint that form a tensor which transformers stacks, joins or splits while it loads.

transformers' own code runs on tokens instead of weights: each row of a tensor is replaced by a few 64-bit numbers that
no other row has, so the numbers in a result show where its rows come from. A result of computed values, or of rows in
another order or of another length inside, has no valid tokens, and then no ranges. No weight is read.
"""

from __future__ import annotations

import copy
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, chain, pairwise, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from weightstream.adapters.hf import private
from weightstream.store.checkpoint import Checkpoint, Columns
from weightstream.store.header import torch_dtype

_WIDTH = 3  # tokens of a row: odd, so that half a row has no valid tokens
# A token is the number of a place in the checkpoint times this factor. Without the factor, `clamp(min=0)` would leave
# all tokens unchanged, and `+ 1` would turn an element of a vector into the next one. The factor is odd, so that
# multiplying by it is a bijection of 64-bit numbers, and it spreads them over both signs.
_FACTOR = 0x1E3779B97F4A7C15
_INVERSE = (pow(_FACTOR, -1, 1 << 64) + (1 << 63)) % (1 << 64) - (1 << 63)
_MAX_RANGES = 4096  # more would be rows in another order, and single rows are slower to read than to convert


class TensorRange(NamedTuple):
    """Bytes `begin` to `end` of the tensor `name` of a checkpoint."""

    name: str
    begin: int
    end: int


class Gathered:
    """A tensor of a model that consists of ranges of a checkpoint's tensors, in the form that transformers takes.

    It has the shape and the dtype of `like`.
    """

    def __init__(self, name: str, ranges: Sequence[TensorRange], like: torch.Tensor, checkpoint: Checkpoint) -> None:
        self.shape = like.shape
        self.dtype = like.dtype
        self._name = name
        self._ranges = ranges
        self._checkpoint = checkpoint

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """`[...]` is the whole tensor, which holds nothing until it is read; any other index is read now."""
        whole = self._of(self._ranges)
        if index is Ellipsis:
            return whole.view(self.shape)
        memory = self._checkpoint.lazy.pop(self._name, None)
        if memory is not None:
            memory.populate(0, memory.nbytes)
        return whole.view(self.shape)[index].clone()

    def shard(self, cut: Callable[[torch.Tensor], torch.Tensor], dims: Collection[int]) -> torch.Tensor | None:
        """The part that `cut` takes of a tensor of this shape, which it cuts along `dims`, read from its own ranges.

        Along the last dimension `cut` must take consecutive columns. None where the part is empty, and for a tensor
        without dimensions.
        """
        if not self.shape or 0 in self.shape:
            return None
        is_flat, width, first = len(self.shape) == 1, _row_size(self.shape), 0
        # `cut` runs on the numbers of rows, and on those of columns, to find which ones it takes
        rows = torch.arange(prod(self.shape) // width).view(self.shape if is_flat else (*self.shape[:-1], 1))
        is_cut = not is_flat and len(self.shape) - 1 in dims
        nbytes = width * self.dtype.itemsize
        rows = cut(rows.expand(self.shape) if is_cut else rows)  # `expand` makes a view, which takes no memory
        if not rows.numel():
            return None
        if is_cut:
            columns = cut(torch.arange(width).expand(self.shape))
            first, width = int(columns.flatten()[0]), columns.shape[-1]
        parts = self._rows((rows if is_flat else rows[..., 0]).flatten(), nbytes)
        of_row = Columns(first * self.dtype.itemsize, (first + width) * self.dtype.itemsize, nbytes) if is_cut else None
        return self._of(parts, of_row).view(rows.shape if is_flat else (*rows.shape[:-1], width))

    def _rows(self, numbers: torch.Tensor, nbytes: int) -> list[TensorRange]:
        """The ranges of the rows with these numbers."""
        bounds = [0, *(numbers.diff() != 1).nonzero().flatten().add(1).tolist(), len(numbers)]
        firsts = list(accumulate(((part.end - part.begin) // nbytes for part in self._ranges), initial=0))
        found: list[TensorRange] = []
        for start, stop in pairwise(bounds):
            row, end = int(numbers[start]), int(numbers[stop - 1]) + 1
            while row < end:
                index = bisect(firsts, row) - 1
                part, to = self._ranges[index], min(end, firsts[index + 1])
                begin = part.begin + (row - firsts[index]) * nbytes
                found.append(TensorRange(part.name, begin, begin + (to - row) * nbytes))
                row = to
        return found

    def _of(self, ranges: Sequence[TensorRange], columns: Columns | None = None) -> torch.Tensor:
        return self._checkpoint.gather(self._name, ranges, columns).view(self.dtype)


class Decoded:
    """A compressed tensor for transformers to shard: decompressed in memory only while it is indexed."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._tensor = checkpoint.tensor(name)
        self._memory = checkpoint.lazy.pop(name)
        self.shape = self._tensor.shape

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        self._memory.populate(0, self._memory.nbytes)
        found = self._tensor[index].clone()
        self._memory.forget()
        return found


class GatheredTensors(NamedTuple):
    """Tensors of a model, by name, and the names in the checkpoint that no other tensor needs."""

    tensors: dict[str, Gathered]
    used: set[str]


def gather(
    model: nn.Module,
    checkpoint: Checkpoint,
    places: Mapping[str, private.LoadTarget],
    mapping: Mapping[str, str] | None = None,
) -> GatheredTensors:
    """The tensors of a model on meta that transformers would join from whole rows of uncompressed tensors in a file.

    Tensors that are joined from the same ones are gathered together, and only if they take all of their bytes.
    """
    converted = {name: place for name, (place, is_converted) in places.items() if place and is_converted}
    plain = [entry for entry in map(checkpoint.entries.__getitem__, converted) if entry.layout is None]
    if not plain:
        return GatheredTensors({}, set())
    shown = {e.name: torch.empty(e.shape, dtype=torch_dtype(e.dtype), device="meta") for e in plain}
    found = _by_kinds(model, shown, {name: converted[name] for name in shown}, mapping)
    # transformers gets these tensors under the names of the model, and must take them unchanged to the same names
    targets = private.places(model, found).by_name
    found = {n: ranges for n, ranges in found.items() if targets[n] == private.LoadTarget(n, is_converted=False)}
    unused_nbytes = Counter({name: checkpoint.entries[name].nbytes for name in converted})
    for part in chain.from_iterable(found.values()):
        unused_nbytes[part.name] -= part.end - part.begin
    incomplete = {place for name, place in converted.items() if unused_nbytes[name]}
    used = {name for name, place in converted.items() if place not in incomplete}
    state = model.state_dict()
    kept = {name: ranges for name, ranges in found.items() if used.issuperset(part.name for part in ranges)}
    return GatheredTensors({n: Gathered(n, ranges, state[n], checkpoint) for n, ranges in kept.items()}, used)


def as_they_are(
    model: nn.Module, checkpoint: Checkpoint, places: Mapping[str, private.LoadTarget]
) -> dict[str, Gathered]:
    """The tensors that transformers takes unchanged, by their names in the checkpoint.

    Tensors for the same parameter are left out, as transformers may compare them.
    """
    found, state = {}, model.state_dict(keep_vars=True)
    sources = Counter(id(state[place]) for place, _ in places.values() if place is not None)
    for name, (place, is_converted) in places.items():
        entry = checkpoint.entries[name]
        is_plain = entry.layout is None and entry.nbytes and not entry.begin % torch_dtype(entry.dtype).itemsize
        if place is None or is_converted or not is_plain or sources[id(state[place])] > 1:
            continue
        made = state[place]
        if (made.shape, made.dtype) == (torch.Size(entry.shape), torch_dtype(entry.dtype)):
            found[name] = Gathered(name, [TensorRange(name, 0, entry.nbytes)], made, checkpoint)
    return found


def byte_ranges(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], mapping: Mapping[str, str] | None = None
) -> dict[str, tuple[TensorRange, ...]]:
    """The bytes, in order, of every tensor of the model that consists of whole rows of a checkpoint's tensors.

    Args:
        model: a transformers model on meta, in the dtypes that it will have.
        tensors: the tensors of the checkpoint by name; only their shapes and dtypes are used.
        mapping: the `key_mapping` of the load.
    """
    sources = _Sources(tensors)
    tokens: Any = copy.deepcopy(model)
    for module in tokens.modules():
        for name, param in module._parameters.items():
            if param is not None:
                empty = torch.empty(_token_shape(param.shape), dtype=torch.int64, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
    names = {id(module): name for name, module in tokens.named_modules()}
    wanted = model.state_dict()
    found: dict[str, tuple[TensorRange, ...]] = {}

    def on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
        """Read the tokens of a parameter at once, so that those of one parameter are in memory at a time."""
        if param is None or param.is_meta or id(module) not in names:
            return None
        full = f"{names[id(module)]}.{name}".lstrip(".")
        if ranges := sources.ranges(param, wanted[full]):
            found[full] = ranges
        return nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)

    with register_module_parameter_registration_hook(on_parameter):
        private.convert_into(tokens, sources.tokens, torch.int64, mapping)
    return found


class _Conversion(NamedTuple):
    """Tensors of a checkpoint that are converted together."""

    numbers: tuple[str, ...]  # in the name of the result: those of blocks
    names: dict[str, str]  # of the tensors, by their names without these numbers


def _by_kinds(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], places: Mapping[str, str], mapping: Mapping[str, str] | None
) -> dict[str, tuple[TensorRange, ...]]:
    """As `byte_ranges`, for tensors that go to these places.

    Of conversions that differ only by the numbers of their blocks, the first and the last are tried. If these two are
    alike, all between them count as alike.
    """
    if mapping:  # it may treat blocks differently
        return byte_ranges(model, tensors, mapping)
    kinds = _kinds(tensors, places)
    tried = [conversion for kind in kinds for conversion in (kind[0], kind[-1])]
    found = byte_ranges(model, {name: tensors[name] for conversion in tried for name in conversion.names.values()})
    owners = {name: (conversion, alike) for conversion in tried for alike, name in conversion.names.items()}
    by_pattern: dict[int, dict[str, list[TensorRange]]] = {id(conversion): {} for conversion in tried}
    for full, ranges in found.items():
        conversion, _ = owners[ranges[0].name]
        pattern, owned = _without(full, conversion.numbers), [owners[part.name] for part in ranges]
        if pattern is None or any(other is not conversion for other, _ in owned):
            return byte_ranges(model, tensors)
        parts = [part._replace(name=alike) for part, (_, alike) in zip(ranges, owned, strict=True)]
        by_pattern[id(conversion)][pattern] = parts
    state = model.state_dict()
    for kind in (kind for kind in kinds if kind[2:]):
        first, last = by_pattern[id(kind[0])], by_pattern[id(kind[-1])]
        for conversion, (pattern, parts) in product(kind[1:-1], first.items()):
            full, example = (_with(pattern, numbers) for numbers in (conversion.numbers, kind[0].numbers))
            if first != last or full not in state or not _is_like(state[full], state[example]):
                return byte_ranges(model, tensors)
            found[full] = tuple(part._replace(name=conversion.names[part.name]) for part in parts)
    return found


def _kinds(tensors: Mapping[str, torch.Tensor], places: Mapping[str, str]) -> list[list[_Conversion]]:
    """The conversions, in lists whose members differ only by the numbers of their blocks."""
    names: dict[str, list[str]] = {}
    for name, place in places.items():
        names.setdefault(place, []).append(name)
    kinds: dict[tuple[object, ...], list[_Conversion]] = {}
    for place, of_place in names.items():
        numbers = tuple(part for part in place.split(".") if part.isdigit())
        named = {_without(name, numbers): name for name in of_place}
        if None in named:
            numbers, named = (), {name: name for name in of_place}
        kind = (
            _without(place, numbers),
            *((alike, tensors[name].shape, tensors[name].dtype) for alike, name in named.items()),
        )
        kinds.setdefault(kind, []).append(_Conversion(numbers, named))  # type: ignore[arg-type]
    return list(kinds.values())


def _without(name: str, numbers: tuple[str, ...]) -> str | None:
    """A name with stars in place of its first numbers; None where it has other numbers."""
    parts = name.split(".")
    at = [index for index, part in enumerate(parts) if part.isdigit()][: len(numbers)]
    if tuple(parts[index] for index in at) != numbers:
        return None
    for index in at:
        parts[index] = "*"
    return ".".join(parts)


def _with(pattern: str, numbers: tuple[str, ...]) -> str:
    """The name that has this pattern and these numbers in place of its stars."""
    remaining = iter(numbers)
    return ".".join(next(remaining) if part == "*" else part for part in pattern.split("."))


def _is_like(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


class _Sources:
    """The tensors of a checkpoint as tokens, and the way back from tokens to ranges."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = list(tensors.items())
        self._firsts: list[int] = []
        self.tokens: dict[str, _Tokens] = {}
        end = 0
        for name, tensor in self._tensors:
            self._firsts.append(end)
            self.tokens[name] = _Tokens(end, _token_shape(tensor.shape))
            end += prod(self.tokens[name].shape) + 1  # a gap, so that no range crosses the end of a tensor

    def ranges(self, made: torch.Tensor, wanted: torch.Tensor) -> tuple[TensorRange, ...]:
        """The ranges of the checkpoint that the tokens `made` stand for, in a tensor like `wanted`.

        Empty if they do not form whole rows.
        """
        if made.dtype is not torch.int64 or made.shape != _token_shape(wanted.shape) or not made.numel():
            return ()
        numbers = made.detach().reshape(-1) * _INVERSE
        bounds = [0, *(numbers.diff() != 1).nonzero().flatten().add(1).tolist(), len(numbers)]
        if len(bounds) > _MAX_RANGES:
            return ()
        runs = zip(numbers[bounds[:-1]].tolist(), (b - a for a, b in pairwise(bounds)), strict=True)
        ranges = [found for run in runs if (found := self._range(*run, wanted)) is not None]
        return tuple(ranges) if len(ranges) == len(bounds) - 1 else ()

    def _range(self, number: int, length: int, wanted: torch.Tensor) -> TensorRange | None:
        """The range of a run of consecutive tokens. None if they belong to no tensor, or to one whose rows differ."""
        at = bisect(self._firsts, number) - 1
        if at < 0:
            return None
        (name, tensor), begin = self._tensors[at], number - self._firsts[at]
        size = _row_size(wanted.shape)
        width = min(_WIDTH, size)
        if begin + length > prod(self.tokens[name].shape) or begin % width or length % width:
            return None
        if tensor.dtype is not wanted.dtype or _row_size(tensor.shape) != size:
            return None
        nbytes = size * tensor.element_size()
        return TensorRange(name, begin // width * nbytes, (begin + length) // width * nbytes)


class _Tokens:
    """A tensor of tokens, made when transformers takes it."""

    def __init__(self, first: int, shape: torch.Size) -> None:
        self.shape = shape
        self._first = first

    def __getitem__(self, _: object) -> torch.Tensor:
        return (torch.arange(self._first, self._first + prod(self.shape)) * _FACTOR).view(self.shape)


def _row_size(shape: torch.Size) -> int:
    return shape[-1] if len(shape) > 1 else 1


def _token_shape(shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:-1], min(_WIDTH, shape[-1]))) if len(shape) > 1 else shape
