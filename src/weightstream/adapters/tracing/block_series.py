"""Series of repeated blocks, of which a training step is followed through the first few only.

[Note: depth] Blocks of one kind do the same work and keep the same memory. So of each series the followed copy has the
first blocks only, with two neighbours of each kind, and every other block counts as a like one among these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from weightstream.plan.manifest import Op
from weightstream.runtime.weights.alias_groups import UnitModule

_NEIGHBOURS = 2  # blocks of a kind that follow each other, from the second block on: the first one may keep more


class Visit(NamedTuple):
    """A turn of a unit: its index, whether it is of the backward, and the ops that run until the next one's."""

    unit: int
    is_backward: bool
    ops: list[Op]


class Series(NamedTuple):
    """A list of repeated blocks, of which the first ones are followed ([Note: depth]).

    Attributes:
        blocks: the blocks, of the model itself.
        kinds: a number for each block; blocks with the same one are alike.
        num_followed: the number of blocks that the copy has.
    """

    blocks: tuple[nn.Module, ...]
    kinds: tuple[int, ...]
    num_followed: int

    @classmethod
    def of(cls, blocks: Sequence[nn.Module]) -> Series:
        """The series of these blocks, with as few of them followed as show all kinds."""
        signs = [_signature(block) for block in blocks]
        kinds = [signs.index(sign) for sign in signs]
        for num in range(1 + _NEIGHBOURS, len(blocks)):
            if set(kinds[num:]) <= set(kinds[1 : num - 1]):
                return cls(tuple(blocks), tuple(kinds), num)
        return cls(tuple(blocks), tuple(kinds), len(blocks))

    def whole(self) -> Series:
        """The same series with all blocks followed."""
        return self._replace(num_followed=len(self.blocks))

    @property
    def missing(self) -> range:
        return range(self.num_followed, len(self.blocks))

    def like(self, block: int) -> int:
        """The followed block that stands for this one: the last one of its kind that another one follows."""
        if block < self.num_followed:
            return block
        return max(i for i in range(1, self.num_followed - 1) if self.kinds[i] == self.kinds[block])

    def last(self, block: int) -> int:
        """The last block of the same kind as a followed one; the last followed block is the last of all."""
        if block == self.num_followed - 1:
            return len(self.blocks) - 1
        return max(i for i, kind in enumerate(self.kinds) if kind == self.kinds[block])

    def completed(
        self, visits: Sequence[Visit], units: Sequence[UnitModule], index: Mapping[int, int]
    ) -> Iterator[Visit]:
        """The turns, with those of blocks that were not followed: after the others in the forward, before them in the
        backward."""
        block_of = {id(m): i for i, block in enumerate(self.blocks[: self.num_followed]) for m in block.modules()}

        def key(visit: Visit) -> tuple[int, bool]:
            return block_of.get(id(units[visit.unit].module), -1), visit.is_backward

        runs = [(found, list(run)) for found, run in groupby(visits, key)]
        of_block: dict[tuple[int, bool], list[Visit]] = {}
        for found, run in runs:
            of_block.setdefault(found, []).extend(run)
        last = max((n for n, (found, _) in enumerate(runs) if found == (self.num_followed - 1, False)), default=-1)
        first = next((n for n, (found, _) in enumerate(runs) if found[0] >= 0 and found[1]), -1)
        for number, (_, run) in enumerate(runs):
            if number == first:
                for block in reversed(self.missing):
                    yield from self._as_if(block, of_block.get((self.like(block), True), []), index)
            yield from run
            if number == last:
                for block in self.missing:
                    yield from self._as_if(block, of_block.get((self.like(block), False), []), index)

    def _as_if(self, block: int, visits: Sequence[Visit], index: Mapping[int, int]) -> Iterator[Visit]:
        """The turns of a block, from those of the one that stands for it."""
        pairs = zip(self.blocks[self.like(block)].modules(), self.blocks[block].modules(), strict=True)
        twins = {index[id(a)]: index[id(b)] for a, b in pairs if id(a) in index and id(b) in index}
        return (Visit(twins[v.unit], v.is_backward, v.ops) for v in visits if v.unit in twins)


def _signature(block: nn.Module) -> Any:
    """A value that is equal for blocks that do the same work."""
    return tuple(
        (
            name,
            type(module),
            tuple((n, p.shape, p.dtype) for n, p in module._parameters.items() if p is not None),
            tuple((n, v) for n, v in sorted(vars(module).items()) if isinstance(v, (str, bool)) or v is None),
        )
        for name, module in block.named_modules()
    )


def series_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Series]:
    """The series of a model: its blocks by the module that holds them."""
    known = {id(block) for block in blocks}
    held = ([child for child in module.children() if id(child) in known] for module in model.modules())
    return [Series.of(children) for children in held if children]
