"""Compiled steps by the default compiler: the bits of the plain model compiled alike, and one graph for equal blocks.

Inductor keeps wider values between kernels that it fuses. `emulate_precision_casts` makes fusion invisible in the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import nn

from stack import ALL, Block, Stack, Taught, slow, taught

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

Scope = Literal["model", "blocks"]
SCOPES: tuple[Scope, ...] = ("model", "blocks")
# Otherwise a compiler that times its choices may choose differently for the plain model and for ours.
OPTIONS: dict[str, Any] = {"fullgraph": True, "options": {"emulate_precision_casts": True, "deterministic": True}}
SMALL: dict[str, Any] = {"depth": 5, "width": 1024, "dtype": torch.bfloat16}
PLANS: dict[str, dict[str, Any]] = {"all": SMALL | ALL, "share": SMALL | {"share": 0.45}}


@pytest.fixture(autouse=True)
def counters() -> Iterator[Any]:
    """The compiler's counters, starting at zero."""
    import torch._dynamo.utils

    start_anew()
    yield torch._dynamo.utils.counters
    start_anew()


def start_anew() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(model: Taught, scope: Scope) -> int:
    """Make both models run compiled, and return the number of graphs of the plain one."""
    step: Any = model.plain
    if scope == "model":
        step = torch.compile(model.plain, **OPTIONS)
    else:
        for block in model.plain.blocks:
            block.compile(**OPTIONS)
    for want, x in zip(model.want, model.inputs, strict=True):
        want.copy_(step(x))
    if scope == "blocks":
        for block in model.plain.blocks:
            block._compiled_call_impl = None
    num_graphs: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    start_anew()
    model.streamer.compile(scope, **OPTIONS)
    return num_graphs


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scope", SCOPES)
def test_steps_equal_the_plain_model_compiled_alike(
    scope: Scope, plan: str, counters: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with taught(**PLANS[plan]) as model:
        compiled(model, scope)
        before = model.streamer.stats()
        model.assert_equal()
        with model.streamer.step():
            model.assert_equal()
        model.assert_equal(model.captured(), rounds=5)
        model.assert_equal()
        assert counters["stats"]["unique_graphs"] >= 1
        assert not counters["graph_break"]
        assert not [record for record in caplog.records if "eager and not compiled" in record.message]
        after = model.streamer.stats()
        assert after.unplanned_fills == before.unplanned_fills
        assert after.filled_nbytes > before.filled_nbytes


class Residual(Block):
    """Called like the layers of inference engines: with None, by position and by keyword."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, **context: Any) -> Any:
        return super().forward(x if residual is None else x + residual), x, context["cache"]


class ResidualStack(Stack):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__(0, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = None
        for i, block in enumerate(self.blocks):
            arguments = {"residual": residual} if i % 2 else {}
            x, residual, _ = block(x, *([] if i % 2 else [residual]), cache=None, **arguments)
        return x


@pytest.mark.parametrize("scope", SCOPES)
def test_layers_that_are_called_with_none(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stack.Stack", ResidualStack)
    with taught(**PLANS["all"]) as model:
        compiled(model, scope)
        model.assert_equal()
        model.assert_equal(model.captured(), rounds=2)


def test_equal_blocks_share_one_graph(counters: Any) -> None:
    with taught(**PLANS["all"]) as model:
        num_graphs = compiled(model, "blocks")
        model.assert_equal(rounds=1)
        assert counters["stats"]["unique_graphs"] == num_graphs == 1
        with torch._dynamo.config.patch(error_on_recompile=True):
            model.assert_equal()
            with model.streamer.step():
                model.assert_equal()


def test_another_scope_and_remove() -> None:
    with taught(**PLANS["all"]) as model:
        eager = [want.clone() for want in model.want]
        compiled(model, "blocks")
        model.assert_equal()
        compiled(model, "model")
        model.assert_equal()
        model.streamer.remove()
        got = [model.stack.cuda()(x) for x in model.inputs]
        assert all(torch.equal(a, b) for a, b in zip(got, eager, strict=True))


@pytest.mark.parametrize("scope", SCOPES)
def test_under_delays_and_poison(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=800_000)
    with taught(**PLANS["all"]) as model:
        compiled(model, scope)
        model.assert_equal(rounds=25)
        for _ in range(5):
            step = model.captured()
            with model.streamer.step():
                model.assert_equal(step, rounds=10)
                model.assert_equal(rounds=2)
