"""Any `nn.Module`: which of its modules are units. Found by structure; knows no architecture.

Blocks are the repeated children of a ModuleList, Sequential or ModuleDict, the inner ones where they hold most of the
outer. Outside of blocks the largest subtrees without blocks are units, and a model without blocks falls to its leaf
modules. A module whose own tensors surround other units gets a unit of just those, which encloses the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from weightstream.runtime.weights import Scope, UnitModule, own_tensors

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(model: nn.Module, *, leaves: bool = False) -> list[UnitModule]:
    """The units of a model in declared order; `leaves`: every module with tensors of its own, the finest grain."""
    blocks = {} if leaves else _blocks(model)
    units = list(_units("", model, blocks, whole=bool(blocks)))
    seen: set[int] = set()
    unique = [u for u in units if not (id(u.module) in seen or seen.add(id(u.module)))]  # type: ignore[func-returns-value]
    for layer, unit in enumerate(u for u in unique if id(u.module) in blocks):
        unit.layer = layer
    return unique


def _units(name: str, module: nn.Module, blocks: dict[int, str], whole: bool) -> Iterator[UnitModule]:
    if not any(True for m in module.modules() for _ in own_tensors(m)):
        return
    children = [(f"{name}.{n}".lstrip("."), child) for n, child in module.named_children()]
    split = name == "" or isinstance(module, _CONTAINERS) or any(id(m) in blocks for m in module.modules())
    if not children or id(module) in blocks or (whole and not split):
        yield UnitModule(name=name, module=module)
        return
    if any(True for _ in own_tensors(module)):
        yield UnitModule(name=name, module=module, scope=Scope.OWN, enclosing=True)
    for child_name, child in children:
        yield from _units(child_name, child, blocks, whole)


def _blocks(model: nn.Module) -> dict[int, str]:
    """id of every block -> class name: children of a container that has at least two of one class."""
    found: dict[int, str] = {}
    for container in model.modules():
        if isinstance(container, _CONTAINERS):
            children = [c for c in container.children() if _nbytes(c)]
            repeated = Counter(type(c) for c in children)
            found |= {id(c): type(c).__name__ for c in children if repeated[type(c)] > 1}
    by_id = {id(m): m for m in model.modules()}
    for outer in list(found):
        inner = [m for m in by_id[outer].modules() if id(m) in found and id(m) != outer]
        if not inner:
            continue
        if 2 * sum(_nbytes(m) for m in _outermost(inner)) > _nbytes(by_id[outer]):
            del found[outer]  # its own blocks hold most of it
        else:
            for module in inner:
                found.pop(id(module), None)
    return found


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inside = {id(d) for m in modules for d in m.modules() if d is not m}
    return [m for m in modules if id(m) not in inside]


def _nbytes(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for m in module.modules() for _, t in own_tensors(m))
