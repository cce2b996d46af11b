"""The partition of any `nn.Module` into units, by its structure. Knows no architecture.

Blocks are the repeated children of a ModuleList, Sequential or ModuleDict; where inner blocks hold most of the outer
ones, these are the blocks. Outside of blocks the largest subtrees without blocks are units, and a model without blocks
is cut into its leaf modules. A module with tensors of its own and other units inside gets a unit of its own tensors,
which encloses the others. A module without a forward is never called, so its children are units in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

from torch import nn

from weightstream.adapters.modules.moe import PicksOf, picks_of
from weightstream.runtime.tensors.leaves import leaves
from weightstream.runtime.weights.alias_groups import Scope, UnitModule

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Grain = Literal["block", "half", "matrix"]
GRAINS: tuple[Grain, ...] = ("block", "half", "matrix")

_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # their forward reads weights of their children


def find_units(
    model: nn.Module, grain: Grain = "block", blocks: list[nn.Module] | None = None, picks_of: PicksOf = picks_of
) -> list[UnitModule]:
    """The units of a model in declared order: blocks; their children, such as attention and MLP ("half"); or every
    module with tensors of its own ("matrix").

    `blocks` default to those of `find_blocks`. A unit that is a block, or part of one, carries the block's index.
    `picks_of` tells how a module reads single rows.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    # modules that are one unit each; for "matrix" there are none, and every module is cut down to its leaf modules
    kept_whole = {
        "block": {id(block) for block in called(blocks)},
        "half": _halves(blocks),
        "matrix": set[int](),
    }[grain]
    layers = {id(module): layer for layer, block in enumerate(blocks) for module in block.modules()}
    unique: dict[int, UnitModule] = {}
    for unit in _units("", model, kept_whole, picks_of):
        unit.layer = layers.get(id(unit.module))
        unique.setdefault(id(unit.module), unit)
    return list(unique.values())


def called(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """These modules, where one without a forward is replaced by its children."""
    found: list[nn.Module] = []
    for module in modules:
        is_called = type(module).forward is not nn.Module.forward or "forward" in vars(module)
        children = [child for child in module.children() if _holds_tensors(child)]
        found += [module] if is_called or not children else called(children)
    return found


def _halves(blocks: list[nn.Module]) -> set[int]:
    """The ids of the blocks' children, and of blocks that have none."""
    halves = (m for block in blocks for m in [c for c in block.children() if _holds_tensors(c)] or [block])
    return {id(module) for module in called(halves)}


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for m in module.modules() for _ in leaves(m))


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model in declared order: children of a container that has at least two of one class."""
    found: set[int] = set()
    for container in model.modules():
        if isinstance(container, _CONTAINERS):
            children = [c for c in container.children() if _nbytes(c)]
            repeated = Counter(type(c) for c in children)
            found |= {id(c) for c in children if repeated[type(c)] > 1}
    by_id = {id(m): m for m in model.modules()}
    for outer in [key for key in by_id if key in found]:
        inner = [m for m in by_id[outer].modules() if id(m) in found and id(m) != outer]
        if not inner:
            continue
        nested = {id(d) for m in inner for d in m.modules() if d is not m}  # counted with the block around them
        if 2 * sum(_nbytes(m) for m in inner if id(m) not in nested) > _nbytes(by_id[outer]):
            found.discard(outer)  # the blocks inside hold most of it
        else:
            found -= {id(module) for module in inner}
    return [module for module in by_id.values() if id(module) in found]


def row_tables(model: nn.Module) -> set[int]:
    """The ids of tensors that only embeddings hold, of which a step reads a few rows."""
    tables: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        by_row = isinstance(module, nn.Embedding) and module.max_norm is None
        for leaf in leaves(module):  # a subclass of Parameter may read more of itself than some rows
            (tables if by_row and type(leaf.tensor) is nn.Parameter else others).add(id(leaf.tensor))
    return tables - others


def _units(
    name: str, module: nn.Module, kept_whole: set[int], picks_of: PicksOf, parent: nn.Module | None = None
) -> Iterator[UnitModule]:
    """The units of a subtree. `kept_whole`: ids of modules that are one unit each. Unless it is empty, the largest
    subtrees without such modules are one unit each, too."""
    if not _holds_tensors(module):
        return
    children = [(f"{name}.{n}".lstrip("."), child) for n, child in module.named_children() if _holds_tensors(child)]
    is_called = called([module]) == [module]
    must_split = name == "" or isinstance(module, _CONTAINERS) or any(id(m) in kept_whole for m in module.modules())
    must_split |= not is_called
    is_whole = isinstance(module, _WHOLE) or id(module) in kept_whole or (bool(kept_whole) and not must_split)
    picks = picks_of(module, parent)
    if not children or is_whole or picks is not None:
        yield UnitModule(name=name, module=module, picks=picks)
        return
    if any(True for _ in leaves(module)):
        yield UnitModule(name=name, module=module, scope=Scope.OWN, enclosing=True)
    for child_name, child in children:
        yield from _units(child_name, child, kept_whole, picks_of, module)


def _nbytes(module: nn.Module) -> int:
    return sum(leaf.tensor.nbytes for m in module.modules() for leaf in leaves(m))
