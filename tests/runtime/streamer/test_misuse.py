"""Unexpected uses: views that leave a unit, threads in a forward, forks, interrupts, patches."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import weightstream
from models import TEXT
from weightstream.errors import CheckpointError, OffloadError, UnsupportedError
from weightstream.runtime.ring.tensor_views import UnitTensors
from weightstream.runtime.tensors.pytree import moved

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def chain(block: type[nn.Module] = Block, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(depth))).eval()


def offloaded(model: nn.Module, blocks: float = 2.2) -> weightstream.Streamer:
    """Offload with a budget of about two blocks, so that the ring wraps in every step."""
    size = sum(t.nbytes for t in [*model[0].parameters(), *model[0].buffers()])
    streamer = weightstream.offload(model, device="cpu", device_budget=int(blocks * size) + 1024)
    assert streamer.plan.host_nbytes
    return streamer


def test_an_output_that_is_a_view_of_a_weight_outlives_the_unit() -> None:
    class Rows(Block):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.weight[:4], self.weight.expand(2, WIDTH, WIDTH)

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(chain(Rows))

        def forward(self, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [block(x) for block in self.blocks]

    model = All()
    want = [tuple(t.detach().clone() for t in pair) for pair in model(torch.ones(1))]
    for grad in (False, True):
        with torch.set_grad_enabled(grad), weightstream.offload(model, device="cpu", device_budget=9 << 10):
            for _ in range(3):
                for got, expected in zip(model(torch.ones(1)), want, strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_pre_hook_that_updates_the_weight_is_followed() -> None:
    def grow(block: Block, args: object) -> None:
        block.weight.mul_(1.25)

    model, plain = chain(), chain()
    for m in (model, plain):
        for block in m:
            block.register_forward_pre_hook(grow)
    with torch.no_grad(), offloaded(model):
        for _ in range(4):
            x = torch.randn(3, WIDTH)
            assert torch.equal(model(x), plain(x))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_norms_in_training_mode_inside_a_unit_in_eval_mode() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x))

    model = chain(Normed)
    for block in model:
        block.norm.train()
    plain = copy.deepcopy(model)
    with torch.no_grad(), offloaded(model):
        for _ in range(4):
            x = torch.randn(5, WIDTH)
            assert torch.equal(model(x), plain(x))
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


@pytest.mark.parametrize("view", [torch.Tensor.conj, lambda z: z.conj().imag], ids=["conjugated", "negated"])
def test_lazily_conjugated_tensors_are_refused_by_name(view: object) -> None:
    model = chain()
    model[2].register_buffer("turned", view(torch.randn(WIDTH, WIDTH, dtype=torch.complex64)))
    with pytest.raises(UnsupportedError, match=r"2\.turned .*resolve_conj"):
        weightstream.offload(model, device="cpu", device_budget=12 << 10)
    assert model[0].weight.equal(chain()[0].weight)


def test_backward_is_refused_however_the_output_is_hidden() -> None:
    class Hidden(Block):
        def forward(self, x: types.SimpleNamespace) -> types.SimpleNamespace:
            return types.SimpleNamespace(x=torch.tanh(x.x @ self.weight))

    model = chain(Hidden)
    with offloaded(model):
        x = torch.randn(2, WIDTH, requires_grad=True)
        output = model(types.SimpleNamespace(x=x)).x
        with pytest.raises(OffloadError, match="backward"):
            output.sum().backward()
    model(types.SimpleNamespace(x=x)).x.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_function_transforms() -> None:
    """A trace is right. An export and gradients of functions are refused with the reason, and break nothing."""
    model, x = chain(), torch.randn(2, WIDTH)
    want = model(x)
    with weightstream.offload(model, device="cpu", device_budget=3 * WIDTH * WIDTH * 4), torch.no_grad():
        for _ in range(3):
            with pytest.raises(OffloadError, match=r"torch\.export copies weights: call model\.weightstream\.remove"):
                torch.export.export(model, (x,))
            with pytest.raises(OffloadError, match=r"gradients by torch\.func"):
                torch.func.jacrev(model)(x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the tracer's warnings, and that there is a tracer at all
                traced = torch.jit.trace(model, (x,))
            assert torch.equal(traced(x), want)
            assert torch.equal(model(x), want)


@pytest.mark.filterwarnings("ignore")  # the tracer's, and that there is a tracer at all
@pytest.mark.parametrize("convert", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(2, WIDTH))])
def test_torchscript_is_refused_by_name(convert: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    with pytest.raises(UnsupportedError, match="the model is TorchScript: offload the model that it was made from"):
        weightstream.offload(convert(model), device="cpu", device_budget="1MiB")
    model[1] = convert(model[1])
    with pytest.raises(UnsupportedError, match="1 is TorchScript"):
        weightstream.offload(model, device="cpu", device_budget="1MiB")


@pytest.mark.filterwarnings("ignore")  # that there is a tracer at all
def test_a_trace_of_compressed_weights_is_refused() -> None:
    """The traced function would read zeros."""
    model, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))).bfloat16(), torch.randn(1, 128).bfloat16()
    want = model(x)
    with weightstream.offload(model, device="cpu", device_budget="64KiB", codec="compressed"):
        for _ in range(2):
            with pytest.raises(OffloadError, match=r"torch\.jit\.trace .*remove\(\) first"):
                torch.jit.trace(model, (x,))
            assert torch.equal(model(x), want)


class Backwards(nn.Sequential):
    """Calls its modules from the last to the first, which only a step can show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in reversed(list(self)):
            x = module(x)
        return x


@pytest.mark.filterwarnings("ignore")  # the tracer's
def test_a_trace_changes_no_plan() -> None:
    model, x = Backwards(*chain()), torch.randn(2, WIDTH)
    want = model(x)
    with weightstream.offload(model, device="cpu", device_budget=3 * WIDTH * WIDTH * 4) as streamer, torch.no_grad():
        before = streamer.plan
        for _ in range(2):
            traced = torch.jit.trace(model, (x,), check_trace=False)
            assert streamer.plan is before
            assert torch.equal(traced(x), want)
        for _ in range(3):
            assert torch.equal(model(x), want)
        assert streamer.plan.manifest.order != before.manifest.order
        assert torch.equal(traced(x), want)


def test_a_patched_forward_is_copied_and_survives() -> None:
    def doubled(self: Block, x: torch.Tensor) -> torch.Tensor:
        return 2 * Block.forward(self, x)

    model, x = chain(), torch.randn(2, WIDTH)
    model[1].forward = types.MethodType(doubled, model[1])
    want = model(x)
    with torch.no_grad(), offloaded(model):
        assert torch.equal(model(x), want)
        assert torch.equal(copy.deepcopy(model)(x), want)
        model[4].forward = types.MethodType(doubled, model[4])  # bypasses the unit: only its weight is read
        changed = model(x)
    assert torch.equal(model(x), changed)
    assert not torch.equal(changed, want)


@pytest.mark.parametrize("where", ["model", "unit"])
def test_a_forward_that_is_wrapped_meanwhile_survives_changes_of_the_plan(where: str) -> None:
    calls: list[str] = []
    model, x = chain(), torch.randn(2, WIDTH)
    want = model(x).detach()
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget=9 << 10) as streamer:
        first, found = streamer.plan, streamer._installed.replanning.inputs
        wrapped = model if where == "model" else model[2]
        inner = wrapped.forward

        def wrapper(*args: Any) -> Any:
            calls.append(where)
            return inner(*args)

        wrapped.forward = wrapper
        for num, manifest in enumerate((found.grains[-1], first.manifest, found.grains[-1]), 1):
            assert torch.equal(model(x), want)
            streamer.switch(found.planners[0](manifest))
            assert torch.equal(model(x), want)
            assert len(calls) == 2 * num
    assert torch.equal(model(x), want)
    assert len(calls) == 7
    del wrapped.forward
    assert torch.equal(model(x), want)


def test_units_may_run_in_threads_of_the_models_own() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(chain())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(3) as pool:
                return torch.stack(list(pool.map(lambda block: block(x), self.blocks)))

    model = Parallel()
    x = torch.randn(4, WIDTH)
    want = model(x).detach()
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget=9 << 10) as streamer:
        for _ in range(20):
            assert torch.equal(model(x), want)
        assert streamer.stats().fills > 0


def test_an_alias_taken_before_a_reorder_is_still_remembered() -> None:
    """The order is learned in the first step. An alias from before offloading may still be written to."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(chain())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in reversed(self.blocks):
                x = block(x)
            return x

    model = Backwards()
    plain, x = copy.deepcopy(model), torch.randn(2, WIDTH)
    with torch.no_grad(), weightstream.offload(model, device="cpu", device_budget=9 << 10) as streamer:
        aliases = [block.weight.data for block in model.blocks]
        declared = streamer.plan.manifest.order
        model(x)
        assert streamer.plan.manifest.order == declared[::-1]
        for step in range(3):
            for alias, block in zip(aliases, plain.blocks, strict=True):
                alias[3, 5] = block.weight.data[3, 5] = step
            assert torch.equal(model(x), plain(x))
    assert not any(p.__dict__ for p in model.parameters())


def test_an_interrupt_while_a_unit_opens_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = chain(), torch.randn(2, WIDTH)
    want = model(x).detach()
    real, calls = UnitTensors.to_ring, []

    def interrupted(self: UnitTensors) -> None:
        real(self)
        calls.append(self)
        if len(calls) in (3, 11):
            raise KeyboardInterrupt

    monkeypatch.setattr(UnitTensors, "to_ring", interrupted)
    streamer = offloaded(model)

    def steps() -> None:
        for _ in range(3):
            model(x)

    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                steps()
        for _ in range(3):
            assert torch.equal(model(x), want)
    streamer.remove()
    assert torch.equal(model(x), want)


def test_models_with_streamed_buffers_pickle_as_plain_ones() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(WIDTH, WIDTH) / 6)

        forward = Block.forward

    globals()["Buffered"] = Buffered
    Buffered.__qualname__ = "Buffered"
    model, x = chain(Buffered), torch.randn(2, WIDTH)
    with torch.no_grad(), offloaded(model):
        want = model(x)
        twin = pickle.loads(pickle.dumps(model))
        assert torch.equal(twin(x), want)
        assert type(twin[0].weight) is torch.Tensor
        assert twin.weightstream is None


def test_a_fork_is_refused_and_does_not_affect_its_parent(tmp_path: Path) -> None:
    script = """
        import os, sys, torch, weightstream
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
        x = torch.randn(1, 32)
        with torch.no_grad():
            want = model(x)
            streamer = weightstream.offload(model, device="cpu", device_budget=10 << 10, host_budget=0,
                                            offload_folder=sys.argv[1])
            assert torch.equal(model(x), want)
            if (child := os.fork()) == 0:
                for call in (lambda: model(x), streamer.remove):
                    try:
                        call()
                    except weightstream.OffloadError as error:
                        print("refused:", "spawn" in str(error), flush=True)
                sys.exit(0)  # runs the finalizers
            assert os.waitpid(child, 0)[1] == 0
            for _ in range(3):
                assert torch.equal(model(x), want)
        streamer.remove()
        print("parent: fine")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["refused: True", "refused: True", "parent: fine"]


@pytest.mark.stress
def test_an_open_generator_ends_with_its_process() -> None:
    script = """
        import torch, weightstream
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).bfloat16()

        def tokens():
            with weightstream.offload(model, device="cpu", device_budget="60%", codec="compressed"), torch.no_grad():
                while True:
                    yield model(torch.ones(2, 256).bfloat16())

        found = tokens()
        assert torch.equal(next(found), next(found))
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


class Pair(NamedTuple):
    first: Any
    second: Any


class Cache:
    def __init__(self) -> None:
        self.keys = torch.ones(1)


def test_arguments_that_need_no_move_stay_the_same_objects() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    state = [torch.ones(1), {"a": (torch.ones(2), 3)}]
    assert moved(state, cpu) is state
    there = [torch.ones(1, device="meta")]
    assert moved(there, meta) is there
    cache, names = Cache(), ["a"]
    args = [torch.ones(1), {"a": Pair(torch.ones(2), None), "cache": cache, "names": names, "there": there}]
    first, rest = moved(args, meta)
    assert first.is_meta
    assert isinstance(rest["a"], Pair)
    assert rest["a"].first.is_meta
    assert rest["a"].second is None
    assert all(new is old for new, old in ((rest["cache"], cache), (rest["names"], names), (rest["there"], there)))
    assert not args[0].is_meta


class TestCheckpoints:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        transformers = pytest.importorskip("transformers")
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(tmp_path)
        return tmp_path

    @pytest.mark.parametrize(
        "change",
        [{"hidden_size": "x"}, {"hidden_act": "nope"}, {"architectures": [5]}, {"architectures": ["logging"]}],
        ids=lambda change: next(iter(change)),
    )
    def test_a_config_that_transformers_cannot_use_is_our_error(self, folder: Path, change: dict[str, object]) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(CheckpointError):
            weightstream.from_pretrained(folder, device="cpu", progress=False)

    def test_classic_settings_are_accepted_as_keywords(self, folder: Path) -> None:
        model = weightstream.from_pretrained(folder, device="cpu", offload_group_size=2, progress=False)
        streams = [model.weightstream.plan.streams(u) for u in range(len(model.weightstream.plan.manifest.units))]
        assert sum(streams) == TEXT["num_hidden_layers"] // 2

    def test_weights_that_the_file_lacks_are_named(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        path, there = folder / "config.json", TEXT["num_hidden_layers"]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": there + 1}))
        with pytest.raises(CheckpointError, match=rf"lacks 9 weights of .*layers\.{there}.*allow_missing=True"):
            weightstream.from_pretrained(folder, device="cpu", progress=False)
        weightstream.from_pretrained(folder, device="cpu", progress=False, allow_missing=True)
        assert any("9 weights" in r.getMessage() and f"layers.{there}" in r.getMessage() for r in caplog.records)


def test_fsdp_shards() -> None:
    class FSDPModule:
        pass

    class Sharded(FSDPModule, nn.Linear):
        pass

    with pytest.raises(OffloadError, match="1 is sharded by FSDP"):
        weightstream.offload(nn.Sequential(nn.Linear(4, 4), Sharded(4, 4)), device="cpu", device_budget="1KiB")
