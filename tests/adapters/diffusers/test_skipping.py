"""Hooks of diffusers that may skip a module: which of them read no weights, and what an offloaded model fills then."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from weightstream.adapters.diffusers import skipping
from weightstream.adapters.diffusers.skipping import SKIPPING, inner_forward
from weightstream.adapters.tracing import global_state, meta_copy
from weightstream.runtime.streamer import forward_patch

hooks = pytest.importorskip("diffusers.hooks.hooks")
layer_skip = pytest.importorskip("diffusers.hooks.layer_skip")


class Reading(hooks.ModelHook):  # type: ignore[misc]
    """Computes with a weight of the module before its forward runs."""

    def new_forward(self, module: nn.Module, x: torch.Tensor) -> Any:
        return self.fn_ref.original_forward(x * module.weight.sum())


def skip(module: nn.Module, name: str = "skip", dropout: float = 1.0) -> None:
    registry = hooks.HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(layer_skip.FeedForwardSkipHook(dropout), name)


def read(module: nn.Module) -> None:
    hooks.HookRegistry.check_if_exists_or_initialize(module).register_hook(Reading(), "read")


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))


@pytest.mark.parametrize("place", sorted(SKIPPING), ids=lambda place: place[1])
def test_hooks_that_may_skip_read_no_weights(place: tuple[str, str]) -> None:
    """In the installed version, they replace the forward by code that uses the module for no more than the classes of
    its parameters, and have no code before and after it."""
    kind = getattr(importlib.import_module(place[0]), place[1])
    assert not {"pre_forward", "post_forward"} & vars(kind).keys()
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.new_forward))))
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "module"]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and any(used[:1] == [a] for a in node.args)]
    assert len(used) == len(calls) <= 1
    assert all(ast.unparse(call.func) == "_is_parameter_sharded" for call in calls)
    assert "self.fn_ref.original_forward(*args, **kwargs)" in ast.unparse(tree)


@pytest.mark.parametrize("other", ["none", "hook", "forward", "other kind between", "hook outside"])
def test_hooks_are_lifted_and_put_back(other: str) -> None:
    """The same hooks in the same order, also after an error; those that are not alone stay where they are."""
    model, x = net(), torch.randn(2, 16)
    block = model[3]
    skip(block, "a", 0.0)
    if other == "other kind between":
        read(block)
    skip(block, "b", 0.0)
    if other == "hook outside":
        read(block)
    if other == "forward":
        inner = block.forward
        block.forward = lambda given: 2 * inner(given)
    if other == "hook":  # of another module
        read(model[4])
    registry = block._diffusers_hook
    before, order, hooks_before = block.forward, list(registry._hook_order), dict(registry.hooks)
    want = model(x)
    is_lifted = other in ("none", "hook")
    with suppress(ValueError), skipping.lifted(model):
        assert (block.forward is before) is not is_lifted
        assert bool(registry.hooks) is not is_lifted
        raise ValueError("as from a plan that does not attach")
    assert (block.forward is before) is not is_lifted
    assert registry._hook_order == order
    assert registry.hooks == hooks_before
    assert torch.equal(model(x), want)


def test_the_forward_inside_of_hooks() -> None:
    """Known hooks lead to the forward that they replaced; a hook that reads weights stays, even once it is removed from
    between two others; so does a forward that was assigned over the hooks."""
    block = nn.Linear(2, 2)
    plain = block.forward = block.forward
    assert inner_forward(block, plain) is plain
    skip(block, "a")
    skip(block, "b")
    assert inner_forward(block, block.forward) is plain
    read(block)
    reading = block.forward
    assert inner_forward(block, reading) is reading
    skip(block, "c")
    assert inner_forward(block, block.forward) is reading
    block._diffusers_hook.remove_hook("read")
    assert inner_forward(block, block.forward) is reading
    block.forward = functools.wraps(plain)(lambda x: x)  # type: ignore[method-assign]
    assert inner_forward(block, block.forward) is block.forward


def test_skipped_units_are_not_filled() -> None:
    x, plain, model = torch.randn(2, 16), net(), net()
    fills = []
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget=3000) as streamer:

        def compare() -> None:
            want = plain(x)
            for _ in range(3):
                before = streamer.stats()
                assert torch.equal(model(x), want)
            after = streamer.stats()
            assert after.unplanned_fills == before.unplanned_fills
            fills.append(after.fills - before.fills)

        compare()
        for each in (plain, model):
            for index in range(2, 10):
                skip(each[index])
            skip(each[10], dropout=0.0)  # it runs
        compare()
        for each in (plain, model):
            for index in range(4, 8):
                read(each[index])  # outside of the hook that skips: the weight is needed
        compare()
        for each in (plain, model):
            for module in each:
                for name in ("skip", "read"):
                    if hasattr(module, "_diffusers_hook"):
                        module._diffusers_hook.remove_hook(name)
        compare()
    assert fills[0] == fills[3] >= fills[2] + 2 >= fills[1] + 4
    assert torch.equal(model(x), plain(x))


def test_a_call_that_is_made_again_runs_no_hook_twice() -> None:
    """A unit that waited for another plan is called again, after the hook that may skip it has run."""
    x, plain, model = torch.randn(2, 16), net(), net()
    with weightstream.offload(model, device="cpu", device_budget=3000), torch.no_grad():
        model(x)
        skip(model[2])
        model(x)
        assert model[2](x) is x
        assert torch.equal(forward_patch.present_forward(model[2])(x), plain[2](x))


@pytest.mark.parametrize("add", [skip, read])
def test_a_copy_on_meta_skips_nothing(add: Any) -> None:
    """As a plan is for calls that run all units, hooks are left out of the copy that is traced."""
    model = net()
    with weightstream.offload(model, device="cpu", device_budget=3000), torch.no_grad():
        model(torch.randn(2, 16))
        add(model[2])
        model(torch.randn(2, 16))
        global_state.refuse_side_effects(model, ())
        made = meta_copy.copied(model).model
        assert not any("forward" in vars(module) for module in made.modules())
        assert made(torch.empty(2, 16, device="meta")).shape == (2, 16)
