"""What a forward may change outside of its model and its arguments: looked at before, and put back after.

Random states, torch's defaults, and what lies in the Python modules of the packages that the model's code is from:
their globals, what their classes and objects hold one level below, and caches of functions. Values are put back one by
one, by assignment, where another object is there now; nothing else is touched.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from weightstream.adapters import meta
from weightstream.errors import UnsupportedError

# No state of a forward; other threads, and finalizers, change what the standard library holds at any time.
_NEVER = frozenset(("torch", "weightstream", "numpy", *sys.stdlib_module_names))
_MOST = 10_000  # items of a container that is looked at
_HOPS = 2  # from a module to those that its functions and classes are from
_MISSING = object()
_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


def refuse(model: nn.Module, values: Iterable[Any]) -> None:
    """Raise `UnsupportedError` where others would be told of a forward of a copy, or it would run the model itself."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        raise UnsupportedError("hooks of all modules are in force, which would see it")
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise UnsupportedError("modes of torch are in force, which would see it")
    for module in model.modules():
        for forward in meta.forwards_of(module):
            is_own = isinstance(forward, MethodType) and forward.__self__ is module
            if not is_own and not meta.is_hooked(module, forward):
                raise UnsupportedError(f"{type(module).__name__} has a forward that may run the model itself")
    if any(isinstance(value, FunctionType | MethodType | functools.partial | Iterator) for value in _flat(values)):
        raise UnsupportedError("it takes functions or iterators")


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a forward may run that nobody asked for; what it left in its surroundings is put back at the end."""
    numpy: Any = sys.modules.get("numpy")
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        for undo in _state_of(model):
            stack.callback(undo)
        yield


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, dict):
            yield from _flat(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _state_of(model: nn.Module) -> Iterator[Callable[[], None]]:
    """What puts back the state of the code around a model, piece by piece."""
    seen: set[int] = set()
    for name in _modules_of(model):
        module = sys.modules[name]
        yield from _attributes(module, vars(module))
        for value in tuple(vars(module).values()):
            if id(value) not in seen:
                seen.add(id(value))
                yield from _held(value, name)


def _modules_of(model: nn.Module) -> set[str]:
    """The Python modules that the code of a model is from, and those of the same packages that they import from."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    names.update(name for module in model.modules() for name in _forwards_of(module))
    packages = {name.partition(".")[0] for name in names} - _NEVER

    def loaded(names: Iterable[str]) -> set[str]:
        return {n for n in names if n.partition(".")[0] in packages and isinstance(sys.modules.get(n), ModuleType)}

    found = loaded(names)
    for _ in range(_HOPS):
        values = [value for name in found for value in tuple(vars(sys.modules[name]).values())]
        found |= loaded(str(value.__module__) for value in values if isinstance(value, type | FunctionType))
    return found


def _forwards_of(module: nn.Module) -> Iterator[str]:
    """Where a forward of its own is from, and those that it wraps."""
    forward, seen = vars(module).get("forward"), set[int]()
    while forward is not None and id(forward) not in seen:
        seen.add(id(forward))
        function = getattr(forward, "__func__", forward)
        if isinstance(function, FunctionType):
            yield str(function.__globals__.get("__name__", ""))
        forward = getattr(function, "__wrapped__", None)


def _held(value: Any, module: str) -> Iterator[Callable[[], None]]:
    """The same of what a global refers to."""
    if isinstance(value, type):
        if value.__module__ == module:
            yield from _attributes(value, vars(value))
            for inner in tuple(vars(value).values()):
                yield from _contents(inner)
                yield from map(_uncached, _caches(inner))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield _uncached(value)
    elif isinstance(value, FunctionType):
        yield from map(_uncached, _caches(value))
        for cell in value.__closure__ or ():
            yield from _cell(cell)
    elif not isinstance(value, ModuleType | torch.Tensor):
        yield from _contents(value)
        if isinstance(value, nn.Module) or type(value).__module__ != module:
            return
        table = _table_of(value)
        yield from _attributes(value, table)
        for inner in tuple(table.values()):
            yield from _contents(inner)


def forget_cached(model: nn.Module) -> None:
    """Clear the caches of its classes' methods: what they computed of tensors may be where these were."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for kind in kinds:
        if kind.__module__.partition(".")[0] not in _NEVER:
            for value in tuple(vars(kind).values()):
                for cache in _caches(value):
                    cache.cache_clear()


def _caches(value: Any) -> Iterator[Any]:
    """The caches of a function, behind decorators too."""
    if isinstance(value, functools._lru_cache_wrapper):
        yield value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # not set yet
                if isinstance(cell.cell_contents, functools._lru_cache_wrapper):
                    yield cell.cell_contents


def _uncached(cache: Any) -> Callable[[], None]:
    """What clears a cache that has more then than now."""
    size = cache.cache_info().misses
    return lambda: cache.cache_clear() if cache.cache_info().misses != size else None


def _table_of(value: Any) -> Mapping[str, Any]:
    """The attributes of an object, past whatever its class makes of them."""
    try:
        return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return _Slots(value)


class _Slots(Mapping[str, Any]):
    """The attributes of an object that has no dictionary, as they are now."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._names = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._value, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._value, name)


def _attributes(owner: Any, table: Any) -> Iterator[Callable[[], None]]:
    before = dict(table)

    def undo() -> None:
        for name in {*before, *table}:
            old, now = before.get(name, _MISSING), table.get(name, _MISSING)
            if now is not old and name != "__slotnames__":
                (delattr if old is _MISSING else setattr)(owner, name, *(() if old is _MISSING else (old,)))

    yield undo


def _contents(value: Any) -> Iterator[Callable[[], None]]:
    """Of a plain container."""
    if type(value) not in _CONTAINERS or len(value) > _MOST:  # classes of their own may do anything when looked at
        return
    is_dict = isinstance(value, dict)
    before: Any = list(value.items()) if is_dict else list(value)

    def undo() -> None:
        now: Any = list(value.items()) if is_dict else list(value)
        if len(now) == len(before) and all(_is_same(a, b) for a, b in zip(now, before, strict=True)):
            return
        value.clear()
        value.extend(before) if isinstance(value, list | deque) else value.update(before)

    yield undo


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2 and a[0] is b[0] and a[1] is b[1])


def _cell(cell: Any) -> Iterator[Callable[[], None]]:
    try:
        before = cell.cell_contents
    except ValueError:  # not set yet
        return
    yield from _contents(before)

    def undo() -> None:
        if cell.cell_contents is not before:
            cell.cell_contents = before

    yield undo
