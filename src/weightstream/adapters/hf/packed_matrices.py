"""Packed matrices: a substitute for a stack that its module holds packed, which unpacks the rows that a forward reads.

The forward of the plain class runs over it: it indexes the stack with ids (batched_mm), takes one matrix after another
(eager), or multiplies groups of rows by it (grouped_mm). Any other use unpacks the whole stack.

[Note: waves]
A prompt names nearly all matrices of a stack, and unpacked they may be larger than the budget. So a product of groups
runs in waves: a few matrices are unpacked, and multiplied by their rows, in the order in which matrices come. Kernels
are chosen by the numbers of rows and of groups. So all waves of a call have equal shapes: as many rows as the call,
of which those after the last group are not read, and as many groups, of which the last may be empty. A trial compares
a wave with the whole call, for each shape. It uses one matrix for all groups, so it needs no memory for a stack.
Where bits differ, there is one wave only.

[Note: one launch]
batched_mm indexes both stacks of a layer with the same ids: one before the first product, the other one before the
second. A launch takes a GPU some microseconds, and its last programs leave most of it idle. So the first index unpacks
the rows of both stacks, those of the other one early. The other index uses them if it names the same rows: by the same
tensor, whose version counter shows no write in between; or if the rows of both stacks are fixed. Otherwise it unpacks
its rows itself. The counter misses writes through `ids.data`, as it does for autograd. The peak of memory is the same:
batched_mm holds the first matrices until it has the second ones. A loop over experts does not, so matrices that are
picked one by one are not unpacked early.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.adapters.hf import private
from weightstream.adapters.hf.packed_formats import PackedFormat, PackedStack, packed_leaves, packed_stacks
from weightstream.codec import unpacking
from weightstream.errors import WeightstreamError
from weightstream.runtime.devices import cuda
from weightstream.runtime.weights.picks import RowWave, RowWaves

WAVE_NBYTES = 512 << 20  # of unpacked matrices of a wave
PART_NBYTES = 64 << 20  # of matrices that a function of a library unpacks at a time
KERNELS_ON = "cuda"  # the kind of device with kernels; Triton's interpreter runs them on a CPU, too
_EQUAL: dict[_Product | _Unpacking, bool] = {}  # results of trials


class _Product(NamedTuple):
    """All that kernels of a product of groups are chosen by."""

    function: str
    device: torch.device
    dtype: torch.dtype
    shape: torch.Size  # of the rows
    stack: tuple[int, ...]
    is_transposed: bool
    num_in_wave: int


class _Unpacking(NamedTuple):
    """All that the kernel for a stack is chosen by."""

    format: PackedFormat
    device: torch.device
    dtype: torch.dtype
    leaves: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]


def _by_library(packing: PackedFormat, *leaves_and_dtype: Any) -> torch.Tensor:
    *leaves, dtype = leaves_and_dtype
    return packing.unpacked(tuple(leaves), dtype)


def _without_autocast(device: torch.device) -> torch.autocast:
    """Inside, operators take the dtypes that they are given, as in a load: matrices and rows may have any."""
    return torch.autocast(device.type, enabled=False)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    with _without_autocast(parts[0].device):
        return torch.cat(tuple(parts))


class _Early(NamedTuple):
    """Matrices that were unpacked before their index, and the ids that it has to have: a tensor, and its writes."""

    ids: torch.Tensor
    num_writes: int
    matrices: torch.Tensor


class PackedLayer:
    """The packed stacks that a call of a module indexes: [Note: one launch]."""

    def __init__(self) -> None:
        # Stacks that were not indexed yet. Weak, as they refer to this: in a cycle, matrices would stay until garbage
        # is collected
        self._early = weakref.WeakKeyDictionary[PackedMatrices, _Early | None]()

    def add(self, stack: PackedMatrices) -> None:
        self._early[stack] = None

    def unpacked(self, stack: PackedMatrices, ids: torch.Tensor, num_writes: int, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a stack that are named by ids, to which so many writes were counted, as matrices."""
        early = self._early.pop(stack, None)
        if early is not None and early.ids is ids and early.num_writes == num_writes:
            return early.matrices
        for other, present in self._early.items():
            if present is None and stack.goes_with(other):
                matrices, found = stack.unpacked_with(other, rows)
                self._early[other] = _Early(ids, num_writes, matrices)
                return found
        return stack.unpacked(rows)


class PackedMatrices:
    """Stands in for a stack of shape (E, ...) that is held packed.

    Args:
        stack: how it is held.
        held: the tensors that hold it, whose first dimension has an entry for each row; or where rows come from.
        rows: the rows of these tensors that every index reads, such as slots of a cache; None: those that it names.
        layer: the stacks that the same call reads.
    """

    def __init__(
        self,
        stack: PackedStack,
        held: Sequence[torch.Tensor] | RowWaves,
        rows: torch.Tensor | None = None,
        *,
        layer: PackedLayer | None = None,
        is_transposed: bool = False,
    ) -> None:
        self._stack = stack
        self._held = held
        self._rows = rows
        self._layer = layer
        self._is_transposed = is_transposed
        if layer is not None:
            layer.add(self)
        self.dtype = stack.dtype
        self.device: torch.device = held[0].device if isinstance(held, Sequence) else held.device
        num, *matrix = stack.shape
        self.shape = torch.Size((num, *(reversed(matrix) if is_transposed else matrix)))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    def data_ptr(self) -> int:
        """An aligned address, as memory that is unpacked into has."""
        return 0

    def transpose(self, first: int, second: int) -> Any:
        if {first % self.ndim, second % self.ndim} != {self.ndim - 2, self.ndim - 1}:
            return self.whole().transpose(first, second)
        return PackedMatrices(self._stack, self._held, self._rows, is_transposed=not self._is_transposed)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._rows is not None:
            return self._with_others(self._rows, 0, self._rows)
        if isinstance(index, int) and not isinstance(index, bool):
            if not -len(self) <= index < len(self):  # also ends an iteration
                raise IndexError(f"index {index} is out of bounds for a stack of {len(self)} matrices")
            index = torch.tensor(index % len(self), device=self.device)
        if not isinstance(index, torch.Tensor) or index.dtype in (torch.bool, torch.uint8):
            return self.whole()[index]
        rows = index.reshape(-1).to(self.device)
        is_counted = index.is_meta or not index.is_inference()
        if index.dim() == 1 and is_counted:
            return self._with_others(index, 0 if index.is_meta else index._version, rows)
        return self.unpacked(rows).view(*index.shape, *self.shape[1:])

    def _with_others(self, ids: torch.Tensor, num_writes: int, rows: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        return self.unpacked(rows) if layer is None else layer.unpacked(self, ids, num_writes, rows)

    def goes_with(self, other: PackedMatrices) -> bool:
        """Whether one kernel unpacks both stacks; fixed rows have to be the same ones."""
        ours, theirs = ((s._stack.format.kernel, s.dtype, s.device, id(s._rows)) for s in (self, other))
        are_like = self is not other and ours == theirs
        return are_like and all(isinstance(s._held, Sequence) and s._has_kernel(s._held) for s in (self, other))

    def unpacked_with(self, other: PackedMatrices, rows: torch.Tensor) -> list[torch.Tensor]:
        """The same rows of the other stack and of this one, as matrices. One launch unpacks them, these last."""
        both = [(each._stack, each._held) for each in (other, self) if isinstance(each._held, Sequence)]
        return _by_kernel(both, rows)

    def whole(self) -> torch.Tensor:
        """The unpacked stack."""
        return self.unpacked(torch.arange(len(self), device=self.device))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if private.is_grouped_product(func):
            named = dict(zip(("rows", "stack", "offs"), args, strict=False)) | kwargs
            rows, stack, offs = (named.pop(name, None) for name in ("rows", "stack", "offs"))
            has_more = any(value is not None for value in named.values())  # a bias, or another dtype
            if isinstance(stack, cls) and isinstance(rows, torch.Tensor) and offs is not None and not has_more:
                return stack._multiply(func, rows, offs)
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.whole, (args, kwargs))
        return func(*args, **kwargs)

    def unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        """These rows as matrices, of shape (rows, ...)."""
        if isinstance(self._held, Sequence):
            return self._unpack(self._held, rows)
        if not len(rows):
            return self._unpack((), rows)
        every = range(len(self))
        asked = [every[row] for row in rows.tolist()]  # negative ones count from the end
        waves = self._held.cut(list(dict.fromkeys(asked)), len(self))
        coming = zip(waves, self._held.bring(waves), strict=True)
        found = _joined([self._unpack(leaves, self._places(wave.places)) for wave, leaves in coming])
        place_of = {row: place for place, row in enumerate(row for wave in waves for row in wave.rows)}
        if list(place_of) == asked:
            return found
        return found[self._places([place_of[row] for row in asked])]

    def _places(self, rows: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _unpack(self, leaves: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        matrix = self._stack.shape[1:]
        if not len(rows):  # functions of some libraries take no empty tensors
            found = torch.empty(0, *matrix, dtype=self.dtype, device=self.device)
        elif self._has_kernel(leaves):
            (found,) = _by_kernel([(self._stack, leaves)], rows)
        else:
            found = self._unpack_by_library(leaves, rows)
        return found.transpose(-2, -1) if self._is_transposed else found

    def _unpack_by_library(self, leaves: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """The rows as matrices, some at a time: functions of libraries take several times their memory."""
        matrix, unpacked = self._stack.shape[1:], self._stack.format.unpacked
        if self.device.type == "meta":  # one pass over the packed rows, and one over the result
            _ = [leaf[rows] for leaf in leaves]
            return torch.zeros(len(rows), *matrix, dtype=self.dtype, device=self.device)
        most = max(1, PART_NBYTES // (prod(matrix) * self.dtype.itemsize))
        with _without_autocast(self.device):
            if len(rows) <= most:
                return unpacked(tuple(leaf[rows] for leaf in leaves), self.dtype)
            found = torch.empty(len(rows), *matrix, dtype=self.dtype, device=self.device)
            for some, part in zip(rows.split(most), found.split(most), strict=True):
                part.copy_(unpacked(tuple(leaf[some] for leaf in leaves), self.dtype))
        return found

    def _has_kernel(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether a kernel unpacks the stack to the bits of the library's function: a trial shows it, once."""
        packing, matrix = self._stack.format, self._stack.shape[1:]
        if packing.kernel is None or self.device.type not in (KERNELS_ON, "meta"):
            return False
        if self.device.type == "meta":  # no bits
            return unpacking.has_kernel(packing.kernel, self.dtype)
        dtypes = tuple(leaf.dtype for leaf in leaves)
        case = _Unpacking(packing, self.device, self.dtype, dtypes, (*matrix, *leaves[-1].shape[1:]))
        if case not in _EQUAL and not cuda.is_capturing():
            with _disable_current_modes(), torch.no_grad():  # they would see operators that are not the model's
                try:
                    _EQUAL[case] = unpacking.unpacks_equally(
                        packing.kernel, (), leaves, matrix, self.dtype, partial(_by_library, packing)
                    )
                except WeightstreamError:  # sizes that the kernel does not know
                    _EQUAL[case] = False
        return _EQUAL.get(case, False)

    # -- products of groups --------------------------------------------------------------------------------------------

    def _multiply(self, func: Callable[..., torch.Tensor], rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """`func(rows, stack, offs=offs)`: [Note: waves]."""
        num = max(1, WAVE_NBYTES // (prod(self.shape[1:]) * self.dtype.itemsize))
        if not isinstance(self._held, Sequence):
            num = min(num, self._held.most)
        # a gradient needs all matrices again, and has values for rows of no group
        is_recorded = torch.is_grad_enabled() and rows.requires_grad
        if num >= len(self) or self._rows is not None or is_recorded or cuda.is_capturing():
            return func(rows, self.whole(), offs=offs)
        if self.device.type == "meta":
            return self._multiply_evenly(func, rows, offs, num)
        if not self._may_cut(func, rows, num):
            return func(rows, self.whole(), offs=offs)
        ends: list[int] = [*offs.tolist(), 0]  # the host waits; the last entry is where the first group begins
        named = [group for group in range(len(self)) if ends[group] > ends[group - 1]]
        if not named:
            return rows.new_zeros(len(rows), self.shape[-1])
        waves = self._cut(named, num)
        table = self._places([self._places_and_ends(wave, ends, num) for wave in waves]).unflatten(-1, (2, num))
        order = self._order([group for wave in waves for group in wave.rows], ends)
        padded = rows.new_zeros(2 * len(rows), rows.shape[1])
        if order is None:
            padded[: len(rows)] = rows
        else:
            torch.index_select(rows, 0, order, out=padded[: len(order)])
        begin, output = 0, None
        for wave, leaves, (places, own) in zip(waves, self._leaves_of(waves), table, strict=True):
            end = begin + sum(ends[group] - ends[group - 1] for group in wave.rows)
            matrices = self._unpack(leaves, places)
            part = func(padded[begin : begin + len(rows)], matrices, offs=own.to(offs.dtype))[: end - begin]
            del matrices  # before the next ones are made
            if output is None:
                output = part.new_zeros(len(rows), part.shape[1])  # also for rows that go to no matrix
            if order is None:
                output[begin:end] = part
            else:
                output.index_copy_(0, order[begin:end], part)
            begin = end
        assert output is not None
        return output

    def _cut(self, rows: Sequence[int], num: int) -> Sequence[RowWave]:
        if not isinstance(self._held, Sequence):
            return self._held.cut(rows, num)
        return [RowWave(part, part) for part in (rows[first : first + num] for first in range(0, len(rows), num))]

    def _order(self, groups: Sequence[int], ends: Sequence[int]) -> torch.Tensor | None:
        """The rows of these groups, one group after another; None if they are so already."""
        if all(before < after for before, after in pairwise(groups)):
            return None
        sizes = [ends[group] - ends[group - 1] for group in groups]
        total = sum(sizes)
        begins = (end - size for end, size in zip(accumulate(sizes), sizes, strict=True))
        moves = [ends[group - 1] - begin for group, begin in zip(groups, begins, strict=True)]
        by_group = self._places([moves, sizes])
        every = torch.arange(total, device=self.device)
        return every + by_group[0].repeat_interleave(by_group[1], output_size=total)

    def _leaves_of(self, waves: Sequence[RowWave]) -> Iterator[Sequence[torch.Tensor]]:
        """The tensors that hold each wave."""
        if isinstance(self._held, Sequence):
            yield from [self._held] * len(waves)
        else:
            yield from self._held.bring(waves)

    def _places_and_ends(self, wave: RowWave, ends: Sequence[int], num: int) -> list[int]:
        """Where the matrices of a wave are in its leaves, and where their groups end in its rows: `num` of each."""
        more = num - len(wave.rows)  # empty groups
        own = list(accumulate(ends[group] - ends[group - 1] for group in wave.rows))
        return [*wave.places, *[wave.places[-1]] * more, *own, *[own[-1]] * more]

    def _may_cut(self, func: Callable[..., torch.Tensor], rows: torch.Tensor, num: int) -> bool:
        """Whether waves of `num` matrices have the bits of the whole call: [Note: waves]."""
        if self.device.type == "cpu":
            return True  # one group after another is multiplied
        shapes = rows.shape, self._stack.shape
        product = _Product(str(func), self.device, self.dtype, *shapes, self._is_transposed, num)
        if product not in _EQUAL:
            with _disable_current_modes(), torch.no_grad():  # as in `_has_kernel`
                _EQUAL[product] = self._is_equal(func, rows, num)
        return _EQUAL[product]

    def _multiply_evenly(self, func: Any, rows: torch.Tensor, offs: torch.Tensor, num: int) -> torch.Tensor:
        """The same on meta, where no value is known: as if the same number of rows went to each matrix."""
        num_waves = -(-len(self) // num)
        parts = rows.tensor_split(num_waves)
        return torch.cat(
            [func(part, self.unpacked(offs.new_empty(num, dtype=torch.int64)), offs=offs[:num]) for part in parts]
        )

    def _is_equal(self, func: Any, rows: torch.Tensor, num: int) -> bool:
        """Whether a wave has the bits of the whole call, of random values: [Note: waves]."""
        generator = torch.Generator(self.device).manual_seed(len(rows))
        states = torch.randn(rows.shape, generator=generator, device=self.device).to(rows.dtype)
        matrix = torch.randn(self._stack.shape[1:], generator=generator, device=self.device).to(self.dtype)
        matrix = matrix.transpose(-2, -1) if self._is_transposed else matrix
        # twice as many groups as in a wave share the rows, so that a wave has some of the rows, even if there are few
        num_used = min(2 * num, len(self))
        ends = [-(-min(index, num_used) * len(rows) // num_used) for index in range(1, len(self) + 1)]
        offs, end = torch.tensor(ends, dtype=torch.int32, device=self.device), ends[num - 1]
        try:
            whole = func(states, matrix.expand(len(self), -1, -1), offs=offs)
            wave = func(states, matrix.expand(num, -1, -1), offs=offs[:num])
        except RuntimeError:  # a kernel that takes no such strides
            return False
        return end > 0 and torch.equal(whole[:end].view(torch.uint8), wave[:end].view(torch.uint8))


def _by_kernel(stacks: Sequence[tuple[PackedStack, Sequence[torch.Tensor]]], rows: torch.Tensor) -> list[torch.Tensor]:
    """The same rows of stacks in one format, as matrices."""
    (first, *_), shapes = stacks[0], [stack.shape[1:] for stack, _ in stacks]
    kernel, held = str(first.format.kernel), [leaves for _, leaves in stacks]
    if rows.is_meta:
        sizes = [size for shape in shapes for size in shape]
        every = [leaf for leaves in held for leaf in leaves]
        found: list[torch.Tensor] = UNPACK(every, rows, len(stacks), sizes, first.dtype, kernel)
        return found
    return unpacking.unpack_stacks(kernel, (), held, rows.to(torch.int64).contiguous(), shapes, first.dtype)


def _unpack_on_meta(
    leaves: list[torch.Tensor], rows: torch.Tensor, num: int, sizes: list[int], dtype: torch.dtype, kernel: str
) -> list[torch.Tensor]:
    """New matrices of shapes (rows, ...) of `num` stacks, whose shapes follow each other in `sizes`."""
    length = len(sizes) // num
    shapes = [sizes[begin : begin + length] for begin in range(0, len(sizes), length)]
    return [rows.new_empty(len(rows), *shape, dtype=dtype) for shape in shapes]


# On meta the work of the kernels is one operator, so that its cost is known (adapters/tracing/op_cost.py)
_LIBRARY = torch.library.Library("weightstream", "FRAGMENT")
_LIBRARY.define("unpack(Tensor[] leaves, Tensor rows, int num, int[] sizes, ScalarType dtype, str kernel) -> Tensor[]")
_LIBRARY.impl("unpack", _unpack_on_meta, "Meta")
UNPACK = torch.ops.weightstream.unpack


def packed_matrices(module: torch.nn.Module) -> dict[str, PackedMatrices]:
    """Substitutes for the packed stacks of a module, over all of their leaves; empty for any other module."""
    layer = PackedLayer()
    return {
        name: PackedMatrices(stack, packed_leaves(module, stack), layer=layer)
        for name, stack in packed_stacks(module).items()
    }
