"""Global state: places outside of a model that may keep tensors of a followed forward, and give them up afterwards.

Code keeps tables in globals, on classes and functions, in closures and caches, in containers, and in objects that any
of these hold. A snapshot notes their entries. After a forward on meta, an entry that holds one of its tensors gets its
former value back, or is removed. All other entries stay: another thread may have changed them.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import threading
from abc import ABC, abstractmethod
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import SequenceMatcher
from queue import Queue
from types import (
    CellType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from weightstream.adapters.hf.lazy_dequant import UnpackingForward
from weightstream.adapters.tracing import meta_copy
from weightstream.errors import UnsupportedError

_TESTING = ("pytest", "_pytest", "pluggy", "hypothesis")  # a walk from the module of a test would reach all tests
_NEVER = frozenset(("torch", "weightstream", "numpy", *_TESTING, *sys.stdlib_module_names))  # they keep no tensors
# Only their modules that define a class of the model are searched. The modules that these import are most of all
# modules, and hold no tensors of a forward.
_LIBRARIES = frozenset(("transformers", "diffusers", "huggingface_hub", "accelerate", "peft"))
_HOPS = 2  # from a module to those that it imports from
_MOST = 10_000  # entries of a container whose values are searched
_MOST_NOTED = 100_000  # objects
_ROUNDS = 100  # over a list that other threads change meanwhile
_MISSING: Any = object()
_ROWS = (list, tuple, set, frozenset, deque)
_HOLDERS = (  # classes of the standard library whose objects are searched
    *(SimpleNamespace, threading.local, UserDict, UserList, ChainMap, WeakKeyDictionary, WeakValueDictionary, Queue),
)
_HOOKS = frozenset(vars(nn.Module())) - {"_modules", "_buffers", "_parameters"}


def _is_own(module: nn.Module, forward: Any) -> bool:
    """Whether a copy of the module has a copy of this forward, which runs the copy."""
    if isinstance(forward, UnpackingForward):
        return forward.runs_class_of(module)
    return isinstance(forward, MethodType) and forward.__self__ is module


def refuse_side_effects(model: nn.Module, values: Iterable[Any]) -> None:
    """Raise `UnsupportedError` if hooks or modes would see a forward of a copy, or if it would run the model itself."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        raise UnsupportedError("global module hooks are in force, which would see it")
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise UnsupportedError("torch function or dispatch modes are in force, which would see it")
    for module in model.modules():
        for forward in meta_copy.forwards_of(module):
            if not _is_own(module, forward) and not meta_copy.is_hooked(module, forward):
                raise UnsupportedError(f"{type(module).__name__} has a forward that may run the model itself")
    if any(isinstance(value, FunctionType | MethodType | functools.partial | Iterator) for value in _flat(values)):
        raise UnsupportedError("it takes functions or iterators")


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, dict):
            yield from _flat(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def forget_cached(model: nn.Module) -> None:
    """Clear the caches of its classes' methods: cached results may be on the device where the weights were."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for kind in kinds:
        if not _is_foreign(kind):
            for value in tuple(vars(kind).values()):
                for cache in _caches(value):
                    cache.cache_clear()


def _caches(value: Any) -> Iterator[Any]:
    """The caches of a function, also inside of decorators."""
    if isinstance(value, functools._lru_cache_wrapper):
        yield value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # not set yet
                if isinstance(cell.cell_contents, functools._lru_cache_wrapper):
                    yield cell.cell_contents


# -- the walk ----------------------------------------------------------------------------------------------------------

Holds = Callable[[Any], bool]


class _Noted(NamedTuple):
    """An object, which is kept so that its id stays its own, and the places in it."""

    value: Any
    places: list[_Place]


@contextmanager
def without(storages: meta_copy.Storages, model: nn.Module) -> Iterator[None]:
    """Inside, a forward of a copy of the model may run; afterwards no place here holds tensors of these storages."""
    around = Surroundings(model)
    try:
        yield
    finally:
        if storages:
            around.put_back(storages)


class Surroundings:
    """The places in which the code of a model may keep tensors, with their entries now."""

    def __init__(self, model: nn.Module) -> None:
        self._finders: dict[type, _Finder | None] = {}
        self._noted: dict[int, _Noted] = {}  # by id
        ahead = deque[Any](vars(sys.modules[name]) for name in _modules_of(model))
        while ahead and len(self._noted) < _MOST_NOTED:
            value = ahead.popleft()
            if (finder := self._finder_of(value)) is not None and id(value) not in self._noted:
                places = [place(value) for place in finder.places]
                self._noted[id(value)] = _Noted(value, places)
                for place in places:
                    ahead.extend(place.inside())
                ahead.extend(finder.inside(value))

    def put_back(self, storages: Container[int]) -> None:
        """Restore or remove each entry that now holds a tensor of these storages, which are identified by `_cdata`."""
        for noted in self._noted.values():
            for place in noted.places:
                place.put_back(lambda value: self._holds(value, storages))

    def _holds(self, value: Any, storages: Container[int]) -> bool:
        """Whether a value holds such a tensor. Objects that were noted are skipped: they have places of their own."""
        ahead, seen = [value], dict[int, Any]()
        while ahead and len(seen) < _MOST:
            value = ahead.pop()
            if issubclass(type(value), torch.Tensor):
                if meta_copy.meta_storage(value) in storages:
                    return True
                continue
            finder = self._finder_of(value)
            if finder is not None and id(value) not in seen and id(value) not in self._noted:
                seen[id(value)] = value
                for place in finder.places:
                    ahead.extend(place(value).inside())
                ahead.extend(finder.inside(value))
        return False

    def _finder_of(self, value: Any) -> _Finder | None:
        kind = type(value)
        try:
            return self._finders[kind]
        except KeyError:
            finder = _finder(kind)
            return self._finders.setdefault(kind, finder if finder.places or finder.inside is not _nothing else None)


def _modules_of(model: nn.Module) -> set[str]:
    """The Python modules with the code of a model, and those that they import from."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    names.update(name for module in model.modules() for name in _forwards_of(module))
    modules = _loaded(names)
    for _ in range(_HOPS):
        imported = {name for n in modules if not _is_of_library(n) for name in _imported(vars(sys.modules[n]))}
        modules |= _loaded(name for name in imported if not _is_of_library(name))
    return modules


def _loaded(names: Iterable[str]) -> set[str]:
    """The loaded ones of these modules that are searched."""
    return {n for n in names if n.partition(".")[0] not in _NEVER and isinstance(sys.modules.get(n), ModuleType)}


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _imported(table: dict[str, Any]) -> Iterator[str]:
    for value in dict.copy(table).values():
        if issubclass(type(value), type | FunctionType):
            yield str(value.__module__)
        elif type(value) is ModuleType:
            yield value.__name__


def _forwards_of(module: nn.Module) -> Iterator[str]:
    """The Python modules of an instance's own forward, and of functions that it wraps."""
    forward, seen = vars(module).get("forward"), set[int]()
    while forward is not None and id(forward) not in seen:
        seen.add(id(forward))
        function = getattr(forward, "__func__", forward)
        if isinstance(function, FunctionType):
            yield str(function.__globals__.get("__name__", ""))
        forward = getattr(function, "__wrapped__", None)


def _is_foreign(value: Any) -> bool:
    """Whether a class or a function is from a package that keeps no tensors."""
    return str(value.__module__).partition(".")[0] in _NEVER


class _Finder(NamedTuple):
    """How to find the places in a value of a type, and other values that it holds but that no place can restore."""

    places: tuple[Callable[[Any], _Place], ...] = ()
    inside: Callable[[Any], Iterable[Any]] = lambda _: ()


_nothing = _Finder().inside


def _finder(kind: type) -> _Finder:
    """Judged by the type only, as asking an object would run code of its class."""
    if issubclass(kind, type):
        return _Finder((_Class,), lambda value: (type(value), *value.__mro__))
    if kind in _FINDERS:
        return _FINDERS[kind]
    places: list[Callable[[Any], _Place]] = []
    inside = _nothing
    if issubclass(kind, dict):
        places.append(_Keyed)
    elif issubclass(kind, (list, deque)):
        places.append(_Row)
    elif issubclass(kind, set):
        places.append(_Set)
    elif issubclass(kind, (tuple, frozenset)):
        inside = _of_row
    if issubclass(kind, threading.local):
        places.append(lambda value: _Keyed(threading.local.__getattribute__(value, "__dict__")))
    elif kind.__dictoffset__ and (issubclass(kind, (nn.Module, torch.Tensor, *_HOLDERS)) or not _is_foreign(kind)):
        places.append(_Attributes)
    if not _is_foreign(kind) and (slots := _slots_of(kind)):
        places.append(lambda value: _Slots(value, slots))
    return _Finder(tuple(places), inside)


def _slots_of(kind: type) -> list[Any]:
    slotted = [cls for cls in kind.__mro__ if "__slots__" in vars(cls)]
    return [slot for cls in slotted for slot in vars(cls).copy().values() if type(slot) is MemberDescriptorType]


def _row(value: Any) -> list[Any]:
    kind = next(kind for kind in _ROWS if issubclass(type(value), kind))
    return list(kind.__iter__(value))


def _few(values: Collection[Any]) -> Collection[Any]:
    """These values, or none if they are too many to be searched."""
    return values if len(values) <= _MOST else ()


def _of_row(value: Any) -> Collection[Any]:
    return _few(_row(value))


def _of_function(function: FunctionType) -> Iterable[Any]:
    if _is_foreign(function):
        return ()
    return (*(function.__closure__ or ()), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _of_variable(variable: ContextVar[Any]) -> Iterable[Any]:
    try:
        return (variable.get(),)
    except LookupError:
        return ()


def _cached(cache: Any) -> list[Any]:
    """The keys and results of a cache; of one without a limit, its dictionary."""
    held = gc.get_referents(cache)
    if cache.cache_info().maxsize is not None:
        held = [value for value in held if value is cache.__dict__ or type(value) is not dict]
    return held


# -- places ------------------------------------------------------------------------------------------------------------
#
# Dictionaries, lists and cells are compared and written without a call in between: CPython switches to no other thread
# there, so none of its writes is lost.


class _Place(ABC):
    """An object that holds others, with its entries when it was noted."""

    __slots__ = ()

    @abstractmethod
    def inside(self) -> Iterable[Any]:
        """The values that it held then."""

    @abstractmethod
    def put_back(self, holds: Holds) -> None:
        """Remove each new entry that holds a tensor of the forward, or restore its former value."""


class _Keyed(_Place):
    """Entries with keys, such as those of a dictionary or the attributes of an object."""

    __slots__ = ("_before", "_owner")

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before = self._now()

    def _now(self) -> dict[Any, Any]:
        if self._reads_by_dict():
            return dict.copy(self._owner)
        # a copy would get each value by that method, which in transformers' table of activations makes an object
        return dict(dict.items(self._owner))

    def _reads_by_dict(self) -> bool:
        return type(self._owner).__getitem__ is dict.__getitem__

    def inside(self) -> Iterable[Any]:
        return (*self._before, *self._before.values()) if _few(self._before) else ()

    def put_back(self, holds: Holds) -> None:
        for key, value in self._now().items():
            old = self._before.get(key, _MISSING)
            if value is not old and (holds(value) or (old is _MISSING and holds(key))):
                with suppress(LookupError, AttributeError, ValueError):  # another thread has removed it
                    self._replace(key, value, old)

    def _replace(self, key: Any, value: Any, old: Any) -> None:
        owner = self._owner
        if not self._reads_by_dict():  # its values are read by a call, so a write of another thread may be lost
            if dict.get(owner, key, _MISSING) is not value:
                return
        elif owner[key] is not value:
            return
        if old is _MISSING:
            del owner[key]
        else:
            owner[key] = old


class _Attributes(_Keyed):
    """The attributes of an object, without running code of its class."""

    __slots__ = ()

    def __init__(self, owner: Any) -> None:
        super().__init__(object.__getattribute__(owner, "__dict__"))

    def inside(self) -> Iterable[Any]:
        return [value for name, value in self._before.items() if name not in _HOOKS]


class _Class(_Keyed):
    __slots__ = ()

    def inside(self) -> Iterable[Any]:
        return self._before.values()

    def _now(self) -> dict[Any, Any]:
        return {} if _is_foreign(self._owner) else vars(self._owner).copy()

    def _replace(self, key: Any, value: Any, old: Any) -> None:
        table = vars(self._owner)
        if old is _MISSING:
            if table[key] is value:
                type.__delattr__(self._owner, key)
        elif table[key] is value:
            type.__setattr__(self._owner, key, old)


class _Slots(_Keyed):
    __slots__ = ("_slots",)

    def __init__(self, owner: Any, slots: list[Any]) -> None:
        self._slots = slots
        super().__init__(owner)

    def inside(self) -> Iterable[Any]:
        return self._before.values()

    def _now(self) -> dict[Any, Any]:
        values = {}
        for slot in self._slots:
            with suppress(AttributeError):  # not set
                values[slot] = slot.__get__(self._owner)
        return values

    def _replace(self, key: Any, value: Any, old: Any) -> None:
        if key.__get__(self._owner) is value:
            key.__delete__(self._owner) if old is _MISSING else key.__set__(self._owner, old)


class _Cell(_Keyed):
    """The cell of a closure, as one entry without a key."""

    __slots__ = ()

    def _now(self) -> dict[Any, Any]:
        try:
            return {None: self._owner.cell_contents}
        except ValueError:  # not set
            return {}

    def _replace(self, key: Any, value: Any, old: Any) -> None:
        cell = self._owner
        if old is _MISSING:
            if cell.cell_contents is value:
                del cell.cell_contents
        elif cell.cell_contents is value:
            cell.cell_contents = old


class _Row(_Place):
    """A list or a deque.

    A run of new entries at the place of former ones counts as their replacement if it is at least as long. Then the
    former entries are restored in place of unwanted new ones; other unwanted entries are deleted.
    """

    __slots__ = ("_before", "_owner")

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before = _row(owner)

    def inside(self) -> Iterable[Any]:
        return _few(self._before)

    def put_back(self, holds: Holds) -> None:
        known = set(map(id, self._before))
        for _ in range(_ROUNDS):
            now = _row(self._owner)
            if len(now) == len(self._before) and all(map(operator.is_, now, self._before)):
                return
            new = {id(value): value for value in now if id(value) not in known}
            unwanted = {key for key, value in new.items() if holds(value)}
            if not unwanted:
                return
            self._replace(now, unwanted)

    def _replace(self, now: list[Any], unwanted: set[int]) -> None:
        row, former = self._owner, self._former(now)
        for place in reversed(range(len(now))):  # backwards, so that a removal moves no entry that is still to come
            value = now[place]
            if id(value) not in unwanted:
                continue
            with suppress(IndexError):  # another thread has made it shorter
                if place in former:
                    old = former[place]
                    if row[place] is value:
                        row[place] = old
                elif row[place] is value:
                    del row[place]

    def _former(self, now: list[Any]) -> dict[int, Any]:
        """The former entries, by the indices of the new ones that replaced them."""
        matcher = SequenceMatcher(None, list(map(id, self._before)), list(map(id, now)))
        former: dict[int, Any] = {}
        for change, i, i_end, j, j_end in matcher.get_opcodes():
            if change == "replace" and j_end - j >= i_end - i:
                former |= dict(zip(range(j, j_end), self._before[i:i_end], strict=False))
        return former


class _Set(_Place):
    __slots__ = ("_before", "_owner")

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before = {id(value): value for value in _row(owner)}

    def inside(self) -> Iterable[Any]:
        return _few(self._before.values())

    def put_back(self, holds: Holds) -> None:
        for value in _row(self._owner):
            if id(value) not in self._before and holds(value):
                set.discard(self._owner, value)


class _Cache(_Place):
    """A cache with a limit: it may lose results at any time, but a single one cannot be removed, so it is cleared. A
    cache without a limit keeps a dictionary, which is a place of its own."""

    __slots__ = ("_misses", "_owner")

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._misses = owner.cache_info().misses

    def inside(self) -> Iterable[Any]:
        return _cached(self._owner)

    def put_back(self, holds: Holds) -> None:
        info = self._owner.cache_info()
        if info.maxsize is not None and info.misses != self._misses and any(map(holds, _cached(self._owner))):
            self._owner.cache_clear()


_FINDERS: Mapping[type, _Finder] = MappingProxyType(
    {
        FunctionType: _Finder((_Attributes,), _of_function),
        CellType: _Finder((_Cell,)),
        functools._lru_cache_wrapper: _Finder((_Cache, _Attributes)),
        ContextVar: _Finder((), _of_variable),
    }
    | dict.fromkeys(
        (
            *(staticmethod, classmethod, property, MethodType),
            functools.partial,
            functools.partialmethod,
            MappingProxyType,
        ),
        _Finder((), gc.get_referents),
    )
)
