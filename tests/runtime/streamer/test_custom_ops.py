"""The operators in compiled code: wait < every kernel that reads the unit's weights < release, in the plan's order."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import weightstream
from fixtures_structure import Block
from models import floats, randomise
from repeats import thinned
from weightstream.runtime.streamer import custom_ops

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor on the CPU needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # PyTorch's own, as it imports Inductor
]

WIDTH = 32
NUM_BLOCKS = 3


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.linear(x * (1 + self.weight.float()))


class Dequantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8))
        self.scale = nn.Parameter(torch.empty(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.scale * self.q.to(x.dtype))


class Table(nn.Module):
    """Takes integers, and returns floats for the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[..., 0] * 7).to(torch.int64).clamp(0, 63))


class Words(NamedTuple):
    tensor: torch.Tensor
    name: str


@dataclasses.dataclass
class Out:
    hidden: torch.Tensor
    extra: dict[str, tuple[torch.Tensor, int]]


class Nested(Block):
    def forward(self, *, state: Any) -> Out:
        x = super().forward(state["hidden"] if isinstance(state, dict) else state.hidden)
        return Out(hidden=x, extra={"twice": (2 * x, 3)})


class Residual(Block):
    """Takes and returns other objects than tensors, as the layers of inference engines do."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, **context: Any) -> Any:
        y = super().forward(x if residual is None else x + residual)
        return y, x, None, {"kind": context["kind"], "cache": context["cache"]}


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str = "decode"
    bias: torch.Tensor | None = None


class Cache:
    """A container of an unknown class."""

    def __init__(self) -> None:
        self.length = 3


class Chain(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class NestedChain(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = {"hidden": x}
        for block in self.blocks:
            state = block(state=state)
        return state.hidden + state.extra["twice"][0]


class ResidualChain(Chain):
    """Every call has another style: `None` by position and by keyword, and values of other types than tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        x, residual, nothing, _ = self.blocks[0](x, None, kind=None, cache=cache)
        x, *_ = self.blocks[1](
            x, residual=nothing, kind=Kind(bias=x), cache=(None, [Words(x, "a"), {"dtype": x.dtype}])
        )
        x, residual, *_ = self.blocks[2](x, residual, kind=Kind, cache=OrderedDict(size=x.shape, axis=slice(3)))
        return x + residual


class Siblings(Chain):
    """All units read the same input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum(0)


class Tables(Chain):
    """No unit takes a float, so only the output can hold a kernel back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[..., 0] * 7).to(torch.int64).clamp(0, 63)
        return sum(torch.tanh(block(ids)) for block in self.blocks)  # type: ignore[return-value]


class Masked(Block):
    """Returns only integers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).argsort(-1)


MODELS = {
    "linears": lambda: Chain(Block),
    "norms": lambda: Chain(Norm),
    "dequantised": lambda: Chain(Dequantised),
    "embeddings": lambda: Chain(Table),
    "keywords and dataclasses": lambda: NestedChain(Nested),
    "no tensors": lambda: ResidualChain(Residual),
    "integers in": lambda: Tables(lambda: nn.Embedding(64, WIDTH)),
    "integers out": lambda: Chain(Masked),
    "one input": lambda: Siblings(Block),
}


@pytest.fixture(autouse=True)
def no_stored_code() -> Iterator[None]:
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


def build(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = randomise(MODELS[name](), 1)
    torch.manual_seed(0)
    return model, randomise(MODELS[name](), 1)


def opened(model: nn.Module) -> weightstream.Streamer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightstream.inputs.gathering.GRAINS", ("block",))
        return weightstream.offload(model, device="cpu", offload_group_size=1, offload_prefetch_step=1)


def emitted(model: nn.Module, streamer: weightstream.Streamer, x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """The output, and the lines of the compiled code's body that contain calls."""
    from torch._inductor.utils import run_and_get_code

    step = torch.compile(model, fullgraph=True, dynamic=False)
    with streamer.step():
        result, [code] = run_and_get_code(step, x)
    body = code[code.index("def call(") :]
    return result, [line.strip() for line in body.splitlines() if "(" in line]


OPERATOR = re.compile(r"torch\.ops\.weightstream\.(wait|release)\.default\(")


def is_kernel(line: str) -> bool:
    return re.match(r"(buf\d+ = )?(cpp_|extern_kernels|torch\.ops\.|aten\.)", line) is not None


def assert_in_order(lines: list[str], num_units: int) -> None:
    """Check the order wait, kernels, release, wait, …, and that no kernel of a unit is outside of its pair."""
    calls = [(i, found.group(1)) for i, line in enumerate(lines) if (found := OPERATOR.search(line))]
    assert [what for _, what in calls] == ["wait", "release"] * num_units
    for (begin, _), (end, _) in zip(calls[::2], calls[1::2], strict=True):
        assert any(is_kernel(line) for line in lines[begin + 1 : end]), lines[begin : end + 1]


HIDDEN = ("norms", "dequantised")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HIDDEN)
def test_a_unit_that_computes_only_with_its_weights_is_not_compiled(name: str) -> None:
    """A kernel that depends on no activation could run before the wait."""
    model, reference = build(name)
    x = floats(1, 3, WIDTH)
    with opened(model) as streamer, torch.no_grad():
        want = reference(x)
        assert torch.equal(model(x), want)
        streamer.compile(fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="computes with its weights alone"):
            model(x)
        torch._dynamo.reset()
        streamer.compile(backend="aot_eager")
        for _ in range(3):
            assert torch.equal(model(x), want)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", thinned([name for name in MODELS if name not in HIDDEN]))
def test_kernels_are_between_wait_and_release(name: str) -> None:
    """Every unit's bytes are poisoned outside of its pair, so a kernel that was moved out computes with NaN."""
    model, reference = build(name)
    x = floats(1, 3, WIDTH)
    with opened(model) as streamer, torch.no_grad():
        assert torch.equal(model(x), reference(x))
        log: list[tuple[str, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            for what in ("wait", "release"):
                patch.setattr(streamer, f"{what}_unit", logged(streamer, what, log))
            got, lines = emitted(model, streamer, x)
        plain = torch.compile(reference, fullgraph=True, dynamic=False)(x)
        assert log[-2 * NUM_BLOCKS :] == [(what, unit) for unit in range(NUM_BLOCKS) for what in ("wait", "release")]
    assert_in_order(lines, NUM_BLOCKS)
    torch.testing.assert_close(got, plain, rtol=1e-5, atol=1e-5)  # Inductor may round as it fuses
    assert not got.isnan().any()


def logged(streamer: Any, what: str, log: list[tuple[str, int]]) -> Callable[[int], None]:
    plain = getattr(streamer, f"{what}_unit")

    def call(unit: int) -> None:
        plain(unit)
        log.append((what, unit))
        if what == "release":
            streamer._backend.synchronize()
            streamer._binding.memory[0].fill_(0xFF)
            streamer._binding.engine.forget(streamer._binding.engine.held())

    return call


@pytest.mark.stress
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["linears", "one input", "keywords and dataclasses"])
def test_no_copies_of_activations_are_added(name: str) -> None:
    model, _ = build(name)
    x = floats(1, 3, WIDTH)
    with opened(model) as streamer, torch.no_grad():
        model(x)
        _, lines = emitted(model, streamer, x)
    assert any("addmm" in line for line in lines)
    assert [line for line in lines if re.search("clone|copy_", line)] == []


def test_blocks_share_one_piece_of_code() -> None:
    model, reference = build("linears")
    x = floats(1, 3, WIDTH)
    with opened(model) as streamer, torch.no_grad():
        streamer.compile(scope="blocks")
        want = reference(x)
        for _ in range(3):
            torch.testing.assert_close(model(x), want)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Listener:
    """Replaces a streamer."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def wait_unit(self, unit: int) -> None:
        self.calls.append(("wait", unit))

    def release_unit(self, unit: int) -> None:
        self.calls.append(("release", unit))


@pytest.mark.parametrize("name", ["wait", "release"])
@pytest.mark.parametrize("tensors", [[], [torch.ones(2, 3)], [torch.ones(2), torch.zeros(3, dtype=torch.bfloat16)]])
def test_opcheck(name: str, tensors: list[torch.Tensor]) -> None:
    session = custom_ops.OpSession(listener := Listener())
    operator = getattr(torch.ops.weightstream, name).default
    torch.library.opcheck(operator, (tensors, session.token, session.tensor_of(3)))
    assert set(listener.calls) == {(name, 3)}


def test_a_closed_session_is_reported() -> None:
    session = custom_ops.OpSession(listener := Listener())
    custom_ops.wait(session, session.tensor_of(1), ([torch.ones(1)], {"a": torch.ones(1, dtype=torch.int64)}))
    session.close()
    with pytest.raises(weightstream.OffloadError, match="streamer was removed"):
        custom_ops.release(session, session.tensor_of(1), ())
    assert listener.calls == [("wait", 1)]
