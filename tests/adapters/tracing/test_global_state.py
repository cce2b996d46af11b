"""State outside of a model while a call of it is traced: the user's state, and that of other threads."""

from __future__ import annotations

import contextvars
import functools
import queue
import random
import sys
import threading
import time
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import transformers
from torch import nn

import weightstream
from weightstream.adapters.tracing import global_state, process_states
from weightstream.adapters.tracing.footprint import follow
from weightstream.errors import UnsupportedError

WIDTH = 8
OURS = "of another thread"


def table_of(x: torch.Tensor) -> torch.Tensor:
    """Whether a call is being traced on meta."""
    return torch.ones(WIDTH, device=x.device)


class Calls(nn.Module):
    """Runs a function in its forward, and ignores its result."""

    def __init__(self, function: Callable[[torch.Tensor], Any], device: str = "cpu") -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.function = [function]  # as an attribute it would be an argument of `deepcopy`

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.function[0](x)
        return self.linear(x)  # type: ignore[no-any-return]


def followed(function: Callable[[torch.Tensor], Any]) -> None:
    follow(Calls(function, device="meta"), (torch.ones(2, WIDTH),))  # creating weights would draw numbers


def in_a_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# -- places in which code keeps tensors ----------------------------------------------------------------------------


class Pair(NamedTuple):
    cos: Any
    sin: Any


@dataclass
class Rope:
    table: Any = None
    label: Any = "rope"


class Slotted:
    __slots__ = ("__hidden", "label", "table")

    def __init__(self) -> None:
        self.table = self.__hidden = self.label = None

    def fill(self, value: Any) -> None:
        self.table = self.__hidden = value

    def held(self) -> Any:
        return self.table, self.__hidden


class Registry(dict[Any, Any]):
    """A dict of a class of its own."""


class Shared:
    table: Any = None
    by_shape: dict[Any, Any] = {}  # noqa: RUF012
    log: list[Any] = []  # noqa: RUF012
    label: Any = None


class State(threading.local):
    def __init__(self) -> None:
        self.table: Any = None


class Making(OrderedDict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise AssertionError("it makes an object")


class Meta(type):
    pass


class Descriptor:
    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def __get__(self, owner: Any, kind: Any = None) -> Descriptor:
        return self


class Described(metaclass=Meta):
    table = Descriptor()


GLOBAL: Any = None
QUEUE: queue.Queue[Any] = queue.Queue()
TENSOR = torch.zeros(1)
LABEL: Any = None
DICT: dict[Any, Any] = {"kept": 1}
NESTED: dict[str, Any] = {"rope": {"by": {}}, "list": [1, [2, None]]}
LIST: list[Any] = [1, None, 2]
POPPED = [1, 2, 3]
DEQUE: deque[Any] = deque([1, None, 2], maxlen=9)
RECENT: deque[Any] = deque(maxlen=50)
SET: set[Any] = {1}
ORDERED = OrderedDict({"kept": 1})
DEFAULT: Any = defaultdict(dict)
OWN = Registry(kept=1)
MAKING = Making(kept=1)
USER = UserDict({"kept": 1})
SPACE = types.SimpleNamespace(inner=types.SimpleNamespace(table=None))
SLOTTED = Slotted()
ROPE = Rope()
OUTER = types.SimpleNamespace(ropes=[Rope(), {"deep": Rope()}])
STATE = State()
PLAIN_LOCAL = threading.local()
WEAK: Any = weakref.WeakKeyDictionary()
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE", default=None)
IN_VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("IN_VARIABLE", default={})  # noqa: B039
MODULE = nn.Linear(2, 2)
PARTIAL = functools.partial(lambda kept, **_: kept, {})


@functools.lru_cache(maxsize=4)
def bounded(width: int, device: str) -> Any:
    return torch.ones(width, device=device), width


@functools.cache
def unbounded(width: int, device: str) -> Any:
    return {"table": torch.ones(width, device=device)}


@functools.cache
def registry() -> dict[str, Any]:
    return {"kept": 1}


def with_attribute() -> Any:
    return with_attribute.__dict__.get("table")


def with_default(key: Any = None, value: Any = None, kept: dict[Any, Any] = {}) -> Any:  # noqa: B006
    if key is not None:
        kept[key] = value
    return kept


def closure() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    table, tables = None, dict[str, Any]()

    def fill(value: Any) -> None:
        nonlocal table
        table = tables["x"] = value

    return fill, lambda: (table, tables)


FILL, FILLED = closure()


def to_global(value: Any) -> None:
    global GLOBAL
    GLOBAL = value


def to_variable(value: Any) -> None:
    VARIABLE.set(value)
    IN_VARIABLE.get()["x"] = value


def to_row(row: Any) -> Callable[[Any], None]:
    def fill(value: Any) -> None:
        row[1] = value
        row.append((value, 3))

    return fill


MANY = 10_001
BIG, GROWN, BIG_LIST, BIG_SET = dict.fromkeys(range(MANY)), dict[Any, Any](), list(range(MANY)), set[Any](range(MANY))
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "a global": (to_global, lambda: GLOBAL),
    "a tuple": (lambda value: to_global(Pair(value, 1)), lambda: GLOBAL),
    "a new object": (lambda value: to_global(Rope({"a": [value]})), lambda: GLOBAL),
    "a new function": (lambda value: to_global(lambda: value), lambda: GLOBAL),
    "a key": (lambda value: DICT.update({value: 1, (2, value): 1}), lambda: dict(DICT)),
    "a dictionary": (lambda value: DICT.update(kept=value, new=value), lambda: dict(DICT)),
    "a big one": (lambda value: BIG.update({0: value, "new": value}), lambda: dict(BIG)),
    "one that grows": (
        lambda value: GROWN.update({"new": value, **({} if GROWN.get(1) else dict.fromkeys(range(MANY), 1))}),
        lambda: "new" in GROWN,
    ),
    "a big list": (lambda value: BIG_LIST.append(value), lambda: BIG_LIST[-1]),
    "a big set": (lambda value: BIG_SET.add(value), lambda: len(BIG_SET)),
    "a nested one": (lambda value: NESTED["rope"]["by"].update(x=value), lambda: dict(NESTED["rope"]["by"])),
    "a nested list": (lambda value: NESTED["list"][1].append(value), lambda: list(NESTED["list"][1])),
    "a list": (to_row(LIST), lambda: list(LIST)),
    "a list's begin": (lambda value: LIST.insert(0, value), lambda: list(LIST)),
    "a deque": (to_row(DEQUE), lambda: list(DEQUE)),
    "a set": (lambda value: SET.update({value, (1, value)}), lambda: set(SET)),
    "ordered": (lambda value: ORDERED.update(kept=value, new=value), lambda: list(ORDERED.items())),
    "with a default": (lambda value: DEFAULT["x"].update(x=value), lambda: dict(DEFAULT)),
    "a derived one": (lambda value: OWN.update(kept=value, new=value), lambda: dict(OWN)),
    "one that makes values": (lambda value: MAKING.update(kept=value, new=value), lambda: dict(dict.items(MAKING))),
    "a wrapped one": (lambda value: USER.update(kept=value, new=value), lambda: dict(USER)),
    "weak keys": (lambda value: WEAK.update({ROPE_KEY: value}), lambda: dict(WEAK)),
    "a class": (lambda value: setattr(Shared, "table", value), lambda: Shared.table),
    "a new attribute": (lambda value: setattr(Shared, "made", value), lambda: hasattr(Shared, "made")),
    "by shape": (lambda value: Shared.by_shape.update({value.shape: value}), lambda: dict(Shared.by_shape)),
    "a list of a class": (lambda value: Shared.log.append(value), lambda: list(Shared.log)),
    "an object": (lambda value: setattr(ROPE, "table", value), lambda: vars(ROPE).copy()),
    "deep objects": (
        lambda value: setattr(OUTER.ropes[1]["deep"], "table", value),
        lambda: OUTER.ropes[1]["deep"].table,
    ),
    "namespaces": (lambda value: setattr(SPACE.inner, "table", value), lambda: SPACE.inner.table),
    "slots": (SLOTTED.fill, SLOTTED.held),
    "a thread's state": (lambda value: setattr(STATE, "table", value), lambda: STATE.table),
    "a plain one": (lambda value: setattr(PLAIN_LOCAL, "table", value), lambda: hasattr(PLAIN_LOCAL, "table")),
    "a variable": (to_variable, lambda: (VARIABLE.get(), dict(IN_VARIABLE.get()))),
    "a cache": (lambda value: bounded(WIDTH, str(value.device)), lambda: bounded.cache_info().currsize),
    "a cache of all": (lambda value: unbounded(WIDTH, str(value.device)), lambda: unbounded.cache_info().currsize),
    "a cached registry": (lambda value: registry().update(x=value), lambda: dict(registry())),
    "a function": (lambda value: setattr(with_attribute, "table", value), with_attribute),
    "a default": (lambda value: with_default("x", value), lambda: dict(with_default())),
    "a partial": (lambda value: PARTIAL().update(x=value), lambda: dict(PARTIAL())),
    "cells": (FILL, FILLED),
    "a queue": (lambda value: QUEUE.put(value), lambda: list(QUEUE.queue)),
    "a metaclass": (lambda value: setattr(Meta, "table", value), lambda: hasattr(Meta, "table")),
    "a tensor": (lambda value: setattr(TENSOR, "table", value), lambda: hasattr(TENSOR, "table")),
    "a descriptor": (lambda value: Described.table.held.update(x=value), lambda: dict(Described.table.held)),
    "a module": (lambda value: setattr(MODULE, "table", value), lambda: hasattr(MODULE, "table")),
    "a parameter": (lambda value: setattr(MODULE, "bias", nn.Parameter(value)), lambda: id(MODULE.bias)),
}
ROPE_KEY = Slotted  # a class can be referred to weakly


@pytest.mark.parametrize("place", PLACES)
def test_no_place_keeps_a_meta_tensor(place: str, caplog: pytest.LogCaptureFixture) -> None:
    fill, held = PLACES[place]
    registry()
    before, found = held(), list[str]()

    def fills(x: torch.Tensor) -> None:
        fill(table := table_of(x))
        found.append(table.device.type)

    followed(fills)
    assert found == ["meta"]
    assert held() == before
    assert "without values" not in caplog.text


def test_interrupts_leave_no_meta_tensor() -> None:
    def interrupted(x: torch.Tensor) -> None:
        for fill, _ in PLACES.values():
            fill(table_of(x))
        raise KeyboardInterrupt

    before = [held() for _, held in PLACES.values()]
    with pytest.raises(KeyboardInterrupt):
        followed(interrupted)
    assert [held() for _, held in PLACES.values()] == before


def test_a_module_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("some_tables")
    exec("TABLES = {}\ndef table(x):\n    return TABLES.setdefault('x', x * 1)\n", other.__dict__)
    monkeypatch.setitem(sys.modules, "some_tables", other)
    monkeypatch.setitem(globals(), "some_tables", other)
    followed(other.table)
    assert other.TABLES == {}


def test_real_tensors_stay() -> None:
    DICT["real"] = None
    followed(lambda _: DICT.update(real=torch.linspace(0, 1, WIDTH)))
    assert torch.equal(DICT.pop("real"), torch.linspace(0, 1, WIDTH))


def test_meta_tensors_of_other_code_stay() -> None:
    made = torch.empty(3, device="meta")
    followed(lambda _: in_a_thread(lambda: DICT.update(made=made)))
    assert DICT.pop("made") is made


def test_cached_results_of_other_code_stay() -> None:
    """A cache without a limit may be a registry."""
    unbounded.cache_clear()

    def fills(x: torch.Tensor) -> None:
        in_a_thread(lambda: unbounded(3, "cpu"))
        unbounded(3, str(x.device))

    followed(fills)
    assert unbounded.cache_info().currsize == 1
    assert unbounded(3, "cpu")["table"].tolist() == [1, 1, 1]
    unbounded.cache_clear()


# -- other threads -------------------------------------------------------------------------------------------------


def label_global() -> None:
    global LABEL
    LABEL = OURS


WRITES: dict[str, tuple[Callable[[], Any], Callable[[], bool]]] = {
    "a global": (label_global, lambda: LABEL == OURS),
    "a class": (lambda: setattr(Shared, "label", OURS), lambda: Shared.label == OURS),
    "an object": (lambda: setattr(ROPE, "label", OURS), lambda: ROPE.label == OURS),
    "slots": (lambda: setattr(SLOTTED, "label", OURS), lambda: SLOTTED.label == OURS),
    "a dictionary": (lambda: DICT.update(ours=OURS), lambda: DICT.pop("ours") == OURS),
    "a removed key": (lambda: ORDERED.pop("gone"), lambda: "gone" not in ORDERED),
    "a list": (lambda: LIST.append(OURS), lambda: (LIST[-1] == OURS, LIST.remove(OURS))[0]),
    "a popped entry": (lambda: POPPED.pop(0), lambda: (POPPED == [2, 3], POPPED.insert(0, 1))[0]),
    "a deque": (lambda: DEQUE.appendleft(OURS), lambda: DEQUE.popleft() == OURS),
    "a set": (lambda: SET.add(OURS), lambda: (OURS in SET, SET.discard(OURS))[0]),
    "a function": (lambda: setattr(with_attribute, "ours", OURS), lambda: with_attribute.__dict__.pop("ours") == OURS),
    "a registry": (lambda: registry().update(ours=OURS), lambda: registry().pop("ours") == OURS),
    "a closure": (lambda: FILL(OURS), lambda: (FILLED()[0] == OURS, FILL(None))[0]),
}


@pytest.mark.parametrize("place", WRITES)
@pytest.mark.parametrize("order", ["alone", "before", "after"])
def test_writes_of_another_thread_stay(place: str, order: str) -> None:
    """It writes while a call is traced that leaves tensors in the same places, or in none."""
    write, is_there = WRITES[place]
    ORDERED["gone"] = 1
    fills = [PLACES[name][0] for name in ("a dictionary", "a list", "a deque", "a set", "a nested list", "an object")]

    def forward(x: torch.Tensor) -> None:
        if order == "before":
            in_a_thread(write)
        for fill in fills if order != "alone" else ():
            fill(table_of(x))
        if order != "before":
            in_a_thread(write)

    followed(forward)
    assert is_there()
    ORDERED.pop("gone", None)
    held = [*LIST, *DEQUE, *DICT.values(), *SET, ROPE.table, *NESTED["list"][1]]
    assert not any(isinstance(value, torch.Tensor) for value in held)


COUNT = 0


def test_a_dictionary_is_written_without_a_call_after_it_was_compared() -> None:
    """CPython may switch to another thread at the end of a call, whose write would then be lost."""
    called: list[str] = []

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and frame.f_code.co_name == "_replace":
            called.append(argument.__name__)

    sys.setprofile(note)
    try:
        followed(lambda x: DICT.update(kept=table_of(x), new=table_of(x)))
    finally:
        sys.setprofile(None)
    assert "new" not in DICT
    assert called == []


def test_no_update_is_lost() -> None:
    """Updates are made while traced calls fill the same containers."""
    global COUNT
    COUNT, num, stop = 0, 0, threading.Event()
    fills = [PLACES["a dictionary"][0], PLACES["a list"][0], RECENT.append]
    counts: dict[str, int] = {"num": 0}
    DICT["counts"] = counts

    def update() -> None:
        global COUNT
        nonlocal num
        while not stop.is_set():
            COUNT += 1
            Shared.label = num = num + 1
            counts["num"] += 1
            LIST.append(num)
            RECENT.append(num)
            DICT[num % 7] = num
            time.sleep(0)

    thread = threading.Thread(target=update)
    thread.start()
    try:
        for _ in range(10):
            followed(lambda x: [fill(table_of(x)) for fill in fills])
        last = num
        while num < last + 50:  # a full deque drops an entry for each new one
            time.sleep(0)
    finally:
        stop.set()
        thread.join()
    assert num > 0
    assert (COUNT, Shared.label, counts["num"]) == (num, num, num)
    assert [1, None, 2, *range(1, num + 1)] == LIST
    # an entry of the forward replaces the oldest one, and is removed
    assert min(num, 50) - len(fills) <= len(RECENT) <= 50
    assert list(RECENT) == list(range(num - len(RECENT) + 1, num + 1))
    assert {key: DICT.pop(key) for key in range(7) if key in DICT} == {
        n % 7: n for n in range(max(1, num - 6), num + 1)
    }
    del DICT["counts"], LIST[3:]


def test_a_served_model_during_requests() -> None:
    """Requests are counted while a model is offloaded and called for the first time."""
    requests, stop = 0, threading.Event()
    log: list[int] = []
    DICT["log"] = log

    def serve() -> None:
        nonlocal requests
        while not stop.is_set():
            requests += 1
            log.append(requests)
            time.sleep(0.0002)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for _ in range(3):
            model = Calls(lambda x: x).eval()
            with weightstream.offload(model, device="cpu", device_budget="1KiB"), torch.no_grad():
                model(torch.randn(1, WIDTH))
    finally:
        stop.set()
        thread.join()
    del DICT["log"]
    assert log == list(range(1, requests + 1))


# -- states of the process -----------------------------------------------------------------------------------------


def states() -> list[Any]:
    arrays = [numpy.random.get_state()[1].tolist(), numpy.random.get_state()[2]]
    return [random.getstate(), *arrays, torch.get_rng_state().tolist(), torch.get_default_dtype()]


@pytest.fixture
def process() -> Iterator[None]:
    """Restores the states of the process. A second thread exists, and does nothing."""
    before, stop = (random.getstate(), numpy.random.get_state(), torch.get_rng_state()), threading.Event()
    waiting = threading.Thread(target=stop.wait)
    waiting.start()
    time.sleep(0.01)
    yield
    stop.set()
    waiting.join()
    torch.set_default_dtype(torch.float32)
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.set_rng_state(before[2])


CHANGES: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "a seed": lambda: random.seed(5),
    "numpy": lambda: numpy.random.rand(3),
    "torch": lambda: torch.rand(3),
    "manual_seed": lambda: torch.manual_seed(5),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_states_by_a_forward_are_undone(change: str, process: None) -> None:
    """Sometimes a thread of the test runner does run meanwhile."""

    def is_undone() -> bool:
        before = states()
        followed(lambda _: CHANGES[change]())
        return states() == before

    assert any(is_undone() for _ in range(20))


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_states_by_another_thread_stay(change: str, process: None) -> None:
    after = list[Any]()

    def changes() -> None:
        CHANGES[change]()
        after.append(states())

    before = states()
    followed(lambda _: in_a_thread(changes))
    assert states() == after[0] != before


DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "a condition": lambda: bool(torch.rand([]) < 0.5),  # as in layer dropout
    "randn": lambda: torch.randn(3, dtype=torch.float64),
    "randperm": lambda: torch.randperm(4),
    "randint": lambda: (torch.randint(9, (3,)), torch.randint(2, 9, (3,))),
    "like": lambda: (torch.rand_like(torch.ones(3)), torch.randint_like(torch.ones(3), 5)),
    "in place": lambda: (torch.empty(3).normal_(), torch.empty(3).uniform_(), torch.empty(3).exponential_()),
    "truncated": lambda: nn.init.trunc_normal_(torch.empty(3)),
    "normal": lambda: (torch.normal(torch.ones(3), 1.0), torch.normal(0.0, 1.0, (3,))),
    "bernoulli": lambda: torch.bernoulli(torch.ones(3) / 2),
    "multinomial": lambda: torch.multinomial(torch.ones(4), 2),
    "dropout": lambda: nn.functional.dropout(torch.ones(4), 0.5, True),
    "channels": lambda: nn.functional.dropout2d(torch.ones(1, 2, 2, 2), 0.5, True),
    "alpha": lambda: nn.functional.alpha_dropout(torch.ones(4), 0.5, True),
    "attention": lambda: nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 4)] * 3, dropout_p=0.5),
    "gumbel": lambda: nn.functional.gumbel_softmax(torch.ones(3)),
    "gamma": lambda: torch.distributions.Gamma(torch.ones(2), 1.0).sample(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_operators_draw_from_generators_of_their_own(draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_states, "kept", lambda _: nullcontext())  # nothing is restored
    before, drawn = torch.get_rng_state(), []
    followed(lambda _: drawn.append(DRAWS[draw]()))
    assert drawn
    with process_states.OwnDraws(), torch.no_grad():  # as in a dry run
        DRAWS[draw]()
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_of_another_thread_are_drawn_once_each(process: None) -> None:
    drawn, stop = list[int](), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            drawn.append(int(torch.randint(1 << 60, ())))

    torch.manual_seed(3)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(5):
            followed(lambda _: [DRAWS[name]() for name in ("rand", "randperm", "dropout", "in place")])
    finally:
        stop.set()
        thread.join()
    torch.manual_seed(3)
    assert drawn == [int(torch.randint(1 << 60, ())) for _ in drawn]


def test_a_seeded_call_draws_the_numbers_of_the_plain_model(process: None) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.randn(x.shape) * random.random() + torch.from_numpy(numpy.random.rand(*x.shape)).float()
            return self.layers(x + noise.to(x.device))  # type: ignore[no-any-return]

    def outputs() -> list[torch.Tensor]:
        random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
        return [model(x) for _ in range(3)]

    def is_equal() -> bool:
        with weightstream.offload(model, device="cpu", device_budget="1KiB"):
            return all(map(torch.equal, outputs(), plain))

    model, x = Noisy().eval(), torch.randn(2, WIDTH)
    with torch.no_grad():
        plain = outputs()
        assert any(is_equal() for _ in range(5))  # sometimes a thread of the test runner runs meanwhile


def test_forwards_that_cannot_be_traced_leave_nothing() -> None:
    def forward(x: torch.Tensor) -> None:
        for fill, _ in PLACES.values():
            fill(table_of(x))
        x.sum().item()

    before = [held() for _, held in PLACES.values()]
    with pytest.raises(UnsupportedError):
        followed(forward)
    assert [held() for _, held in PLACES.values()] == before


def test_of_libraries_only_the_modules_of_a_models_classes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their imports are a hundred modules, which would be searched for each call."""
    other = types.ModuleType("some_tables")
    other.TABLES = {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_tables", other)
    monkeypatch.setitem(globals(), "some_tables", other)

    class Served(Calls, transformers.PreTrainedModel):
        pass

    found = global_state._modules_of(_bare(Served))
    assert {__name__, "some_tables", "transformers.modeling_utils"} <= found
    assert len([name for name in found if name.startswith("transformers.")]) < 15
    assert not [name for name in found if name.startswith(("huggingface_hub", "httpx"))]


def test_the_test_runner_is_not_searched(request: pytest.FixtureRequest) -> None:
    """Its test items are thousands of objects, which would be noted for each traced call."""
    model = _bare(Calls)
    assert global_state._modules_of(model) == {__name__}
    noted = {id(noted.value) for noted in global_state.Surroundings(model)._noted.values()}
    assert id(DICT) in noted
    assert not noted.intersection(map(id, (*map(vars, request.session.items), request.session.items)))


def _bare(kind: type[nn.Module]) -> nn.Module:
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    return model
