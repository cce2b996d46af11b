"""A call that is traced leaves no trace in the model, its arguments, caches, random states and other code."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import threading
import time
import weakref
from threading import Thread
from types import MethodType
from typing import Any
from weakref import finalize

import numpy
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weightstream.adapters.tracing import process_states
from weightstream.adapters.tracing.footprint import follow
from weightstream.errors import UnsupportedError
from weightstream.runtime.weights.alias_groups import Scope, UnitModule

WIDTH = 8
KEPT: dict[str, Any] = {}
LISTED: list[Any] = []


@functools.lru_cache
def turned(width: int, device: str) -> torch.Tensor:
    return torch.arange(width, device=device).float()


@functools.lru_cache
def scale_of(key: str, x: Any) -> tuple[torch.Tensor, str]:
    return x * 2, key


class Counting(nn.Module):
    """Counts its calls, keeps its results, and draws random numbers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0
        self.seen: list[Any] = []
        self.cache: dict[str, Any] = {"last": None}
        self.state = type("State", (), {})()
        self.state.step = 0

    def forward(self, x: torch.Tensor, past: Any = None) -> torch.Tensor:
        self.calls += 1
        self.state.step += 1
        self.seen.append(x)
        self.cache["last"] = x + random.random() + numpy.random.rand() + torch.rand(())
        self.mean.mul_(0.9).add_(x.mean(0))
        if past is not None:
            past["keys"].append(x)
            past["length"] += len(x)
        return nn.functional.dropout(self.linear(x), 0.5, True) + torch.randn(WIDTH, device=x.device)


def states() -> list[Any]:
    """State of torch's generators. Python's and NumPy's are in `test_global_state.py`: threads decide if they are
    restored."""
    return torch.get_rng_state().tolist()  # type: ignore[no-any-return]


def test_the_model_and_its_arguments_do_not_change() -> None:
    model, x, past = Counting(), torch.randn(2, WIDTH), {"keys": [torch.ones(1)], "length": 1}
    called: list[Any] = []
    model.linear.register_forward_hook(lambda *_: called.append("after"))
    model.register_forward_pre_hook(lambda *_: called.append("before"))
    before = states(), {name: value.clone() for name, value in model.state_dict().items()}
    found = follow(model, (x,), {"past": past})
    assert [call.module for call in found.calls] == [model, model.linear]
    assert called == []
    assert states() == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    assert (model.calls, model.seen, model.cache, model.state.step) == (0, [], {"last": None}, 0)
    assert (len(past["keys"]), past["length"]) == (1, 1)
    assert x._version == 0
    model(x, past)
    assert (model.calls, called) == (1, ["before", "after"])


def test_hooks_of_all_modules_prevent_tracing() -> None:
    called: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: called.append(1))
    try:
        with pytest.raises(UnsupportedError, match="global module hooks"):
            follow(nn.Linear(2, 2), (torch.ones(1, 2),))
    finally:
        handle.remove()
    assert called == []


class Global(nn.Module):
    """Keeps its results in Python modules, as code with tables of positions does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "table" not in KEPT:
            KEPT["table"] = torch.arange(x.shape[-1], device=x.device).float()
        LISTED.append((x, KEPT["table"]))
        return scale_of("a", KEPT["table"])[0] + turned(x.shape[-1], str(x.device)) + x


def test_caches_of_python_keep_no_meta_tensor() -> None:
    KEPT.clear()
    LISTED.clear()
    model, x = Global(), torch.randn(2, WIDTH)
    follow(model, (x,))
    assert "table" not in KEPT
    assert all(tensor.device.type == "cpu" for pair in LISTED for tensor in pair)
    LISTED.clear()
    expected = torch.arange(WIDTH).float()
    assert torch.equal(model(x), expected * 2 + expected + x)
    assert [tensor.device.type for pair in LISTED for tensor in pair] == ["cpu", "cpu"]


def test_a_kept_view_of_a_weight_is_dropped() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            KEPT["view"] = self.linear.weight.detach()
            return x

    KEPT.clear()
    follow(Keeps(), (torch.ones(1, WIDTH),))
    assert KEPT == {}


def test_state_of_the_standard_library_stays() -> None:
    """Other threads start and end meanwhile, and garbage is collected."""
    done = threading.Event()
    finalized: list[int] = []
    threads = [Thread(target=done.wait, args=(60,)) for _ in range(2)]
    kept = [type("Dies", (), {})()]

    class Busy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            threads[1].start()
            done.set()
            threads[0].join()
            finalize(kept[0], finalized.append, 1)
            return super().forward(x)

    threads[0].start()
    done.clear()
    follow(Busy(WIDTH, WIDTH), (torch.ones(1, WIDTH),))
    assert threads[0] not in threading.enumerate()
    threads[1].join()
    kept.clear()
    assert finalized == [1]


def test_an_error_of_the_copy_is_reported() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"Linear: its work cannot be found .* TypeError"):
        follow(model, (torch.ones(1, WIDTH),))


class Own:
    """Its copies are the object itself."""

    def __deepcopy__(self, memo: Any) -> Own:
        return self


@pytest.mark.parametrize("value", [Own(), weakref.ref(Own)], ids=["object", "reference"])
def test_objects_that_are_their_own_copies_prevent_tracing(value: Any) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.state = value
    with pytest.raises(UnsupportedError, match="Linear or an object in it cannot be copied"):
        follow(model, (torch.ones(1, WIDTH),))


def test_a_generator_draws_nothing() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return x + torch.randn(x.shape, generator=generator, device="cpu")

    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    with pytest.raises(UnsupportedError):
        follow(Noisy(), (torch.ones(2), generator))
    assert torch.equal(generator.get_state(), before)


def test_tracing_ends_at_its_time_limit() -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(1000):
                time.sleep(0.03)
                x = x + 1
            return x

    started = time.perf_counter()
    with pytest.raises(UnsupportedError, match="takes too long"):
        follow(Slow(), (torch.ones(2),), limit_s=0.1)
    assert time.perf_counter() - started < 20  # the whole forward would take 30 s


def test_the_copy_has_no_weights() -> None:
    """16 GiB of weights, more than the machine may have."""
    model = nn.Linear(1 << 16, 1 << 16, bias=False, device="meta")
    assert follow(model, (torch.empty(1, 1 << 16, device="meta"),)).activation_nbytes == 2 * 4 * (1 << 16)


class Parent(nn.Module):
    """Reads a child's weight without calling the child. One of these weights is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.a(x) * self.scale, self.b.weight.t()) + self.c.weight[0]


def test_weights_that_are_read_outside_of_their_unit() -> None:
    model = Parent()
    found = follow(model, (torch.ones(1, WIDTH),))
    units = [UnitModule(name=name, module=module) for name, module in model.named_children()]
    assert {id(tensor) for tensor in found.outside(units)} == {id(model.b.weight), id(model.c.weight)}
    whole = UnitModule(name="", module=model)
    assert found.outside([whole]) == []
    own = UnitModule(name="", module=model, scope=Scope.OWN, enclosing=True)
    assert {id(tensor) for tensor in found.outside([own, *units])} == {id(model.b.weight), id(model.c.weight)}
    assert found.order([own, *units]) == (0, 1)


# -- state outside of a model --------------------------------------------------------------------------------------


class Rope:
    table: Any = None


class Context:
    def __init__(self) -> None:
        self.table: Any = None


class Slots:
    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: Any = None


CONTEXT, SLOTS = Context(), Slots()
PLACES: list[Any] = [None, None]
TABLE: Any = None
STEP = torch.zeros(1)
GENERATOR = torch.Generator().manual_seed(1)


def closure() -> Any:
    table = None

    def cached(x: torch.Tensor) -> torch.Tensor:
        nonlocal table
        if table is None:
            table = torch.ones(WIDTH, device=x.device)
        return table

    return cached


CACHED = closure()


@functools.lru_cache
def real(width: int) -> torch.Tensor:
    return torch.linspace(0, 1, width)


def on_a_class(x: torch.Tensor) -> torch.Tensor:
    if Rope.table is None:
        Rope.table = torch.ones(WIDTH, device=x.device)
    return Rope.table  # type: ignore[no-any-return]


def in_an_object(x: torch.Tensor) -> torch.Tensor:
    if CONTEXT.table is None:
        CONTEXT.table = torch.ones(WIDTH, device=x.device)
    return CONTEXT.table  # type: ignore[no-any-return]


def in_slots(x: torch.Tensor) -> torch.Tensor:
    if SLOTS.table is None:
        SLOTS.table = torch.ones(WIDTH, device=x.device)
    return SLOTS.table  # type: ignore[no-any-return]


def in_a_list(x: torch.Tensor) -> torch.Tensor:
    if PLACES[1] is None:
        PLACES[1] = torch.ones(WIDTH, device=x.device)
    return PLACES[1]  # type: ignore[no-any-return]


def in_a_global(x: torch.Tensor) -> torch.Tensor:
    global TABLE
    if TABLE is None:
        TABLE = torch.ones(WIDTH, device=x.device)
    return TABLE  # type: ignore[no-any-return]


def counted(x: torch.Tensor) -> torch.Tensor:
    return STEP.add_(1).to(x.device)


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(WIDTH, generator=GENERATOR)


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = [function]  # as an attribute it would be an argument of `deepcopy`

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.function[0](x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "function", [on_a_class, in_an_object, in_slots, in_a_list, in_a_global, CACHED, lambda x: real(WIDTH)]
)
def test_state_outside_of_a_model_is_restored(function: Any) -> None:
    model, x = Calls(function), torch.randn(2, WIDTH)
    with contextlib.suppress(UnsupportedError):
        follow(model, (x,))
    output = model(x)
    output.sum().backward()
    assert function(x).device.type == "cpu"
    assert len(PLACES) == 2


@pytest.mark.parametrize("function", [counted, drawn])
def test_a_forward_that_changes_shared_objects_is_not_traced(function: Any) -> None:
    state = STEP.clone(), GENERATOR.get_state()
    with pytest.raises(UnsupportedError, match="writes to a tensor that is not a copy"):
        follow(Calls(function), (torch.randn(2, WIDTH),))
    assert torch.equal(STEP, state[0])
    assert torch.equal(GENERATOR.get_state(), state[1])


def test_a_wrapped_forward_is_not_traced() -> None:
    model, calls = nn.Sequential(Counting()), []
    plain = model[0].forward
    model[0].forward = lambda x: calls.append(1) or plain(x)
    with pytest.raises(UnsupportedError, match="may run the model itself"):
        follow(model, (torch.randn(2, WIDTH),))
    assert (calls, model[0].calls) == ([], 0)


@pytest.mark.parametrize("value", [print, iter([1]), functools.partial(print)])
def test_a_call_with_functions_is_not_traced(value: Any) -> None:
    if value is print:
        value = lambda: None  # noqa: E731
    with pytest.raises(UnsupportedError, match="takes functions or iterators"):
        follow(nn.Linear(2, 2), (torch.ones(1, 2),), {"then": [value]})


def test_active_modes_see_no_operator() -> None:
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with Mode(), pytest.raises(UnsupportedError, match="torch function or dispatch modes"):
        follow(model, (x,))
    assert not any("linear" in str(func) for func in seen)


def test_an_interrupt_leaves_nothing() -> None:
    def interrupts(x: torch.Tensor) -> torch.Tensor:
        in_an_object(x)
        raise KeyboardInterrupt

    CONTEXT.table = None
    with pytest.raises(KeyboardInterrupt):
        follow(Calls(interrupts), (torch.randn(2, WIDTH),))
    assert CONTEXT.table is None


def test_torch_defaults_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    # otherwise threads of the test runner decide whether they are restored
    monkeypatch.setattr(process_states._OtherThreads, "may_have_run", lambda _: False)

    def sets(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        return x.sum().item()  # type: ignore[return-value]

    with pytest.raises(UnsupportedError):
        follow(Calls(sets), (torch.randn(2, WIDTH),))
    found = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # for the next tests
    assert found is torch.float32


@functools.cache
def shared() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Attaching(nn.Module):
    """Its forward attaches a module that also belongs to others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "other"):
            self.other = shared()
        return self.inner(x) + self.other.bias.to(x.device)


def test_a_module_that_a_forward_attaches_stays_whole() -> None:
    model = Attaching()
    before = dict(vars(shared()))
    follow(model, (torch.ones(1, WIDTH),))
    assert vars(shared()) == before
    assert not hasattr(model, "other")


def test_a_method_on_an_instance_keeps_no_copy_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    model.forward = MethodType(nn.Linear.forward, model)  # type: ignore[method-assign]
    monkeypatch.setattr(gc, "collect", lambda *_: pytest.fail("nothing is left to be collected"))
    follow(model, (torch.ones(1, WIDTH),))


def test_a_forward_that_wraps_itself() -> None:
    model = nn.Linear(WIDTH, WIDTH)

    def fast(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    fast.__wrapped__ = fast  # type: ignore[attr-defined]
    model.forward = MethodType(fast, model)  # type: ignore[method-assign]
    assert follow(model, (torch.ones(1, WIDTH),)).ops
