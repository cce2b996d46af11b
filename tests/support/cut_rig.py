"""Models whose calls are cut at lines of the library, on the CPU and on a GPU, and the checks afterwards."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame
from torch.utils.checkpoint import checkpoint

import weightstream
import weightstream.runtime.devices.opening
from cutting import Cut, Lines, interrupted, is_free, num_lines
from fake_cuda import Graph, Lane, Lanes
from models import randomise
from weightstream.api.multi_gpu import stripe
from weightstream.inputs.builder import CallerFacts
from weightstream.runtime.ring.engine import State
from weightstream.runtime.ring.state import StepState
from weightstream.settings.config import OffloadConfig

WIDTH = 32
WIDTH_CODED = 128  # wide enough that compressed matrices are smaller
SHARE = 0.45  # of the weights' bytes, on the device


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Checkpointed(nn.Sequential):
    """Computes some blocks again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self):
            x = checkpoint(block, x, use_reentrant=index == 1) if index % 2 and torch.is_grad_enabled() else block(x)
        return x


@dataclass
class Case:
    """A streaming model, the call that is cut (`act`), and the `output` to compare with the plain model."""

    parts: list[tuple[nn.Module, nn.Module, Any]]  # offloaded, plain, and the streamer of each
    act: Callable[[], object]
    output: Callable[[bool], list[torch.Tensor]]  # of the plain model if True
    num_cuts: int = 24  # in one test
    removal: Callable[[], None] | None = None  # default: that of each streamer

    def check(self, where: str) -> None:
        self._check_state(where)
        with torch.no_grad():
            wanted = self.output(True)
            for _ in range(2):
                assert all(map(torch.equal, self.output(False), wanted)), f"other outputs, {where}"
            before = self._unplanned()
            assert all(map(torch.equal, self.output(False), wanted)), f"other outputs, {where}"
        assert self._unplanned() == before, f"units are filled on demand, {where}"
        self._check_state(where)

    def _check_state(self, where: str) -> None:
        for model, plain, streamer in self.parts:
            own, wanted = model.state_dict(), plain.state_dict()
            wrong = [name for name in wanted if not torch.equal(own[name].cpu(), wanted[name].cpu())]
            assert not wrong, f"{wrong} are wrong, {where}"
            binding, gate = streamer._binding, streamer._gate
            assert gate.mode is StepState.IDLE, f"{gate.mode}, {where}"
            assert not binding.open_units, f"units are open, {where}"
            left = [u.index for u in binding.units if u.opened or u.in_buffer or u.is_picked or u.borrowed]
            assert not left, f"units {left} are open, {where}"
            assert not any(fence.state is State.IN_USE for fence in binding.engine.fences), f"in use, {where}"
            assert not any(binding._is_ours(streamed.tensor) for streamed in binding.tensors), (
                f"the ring is shown, {where}"
            )

    def _unplanned(self) -> int:
        return sum(streamer.stats().unplanned_fills for _, _, streamer in self.parts)

    def locks(self) -> list[Any]:
        return [lock for _, _, s in self.parts for lock in (s._gate.turn._lock, s._gate.lock)]

    def remove(self) -> None:
        if self.removal is not None:
            self.removal()
        for _, _, streamer in self.parts:
            streamer.remove()


def offloaded(model: nn.Module, device: str = "cpu", codec: str = "none") -> Any:
    nbytes = sum(p.nbytes for p in model.parameters())
    streamer = weightstream.offload(model, device=device, device_budget=int(SHARE * nbytes), codec=codec)
    assert streamer.plan.host_nbytes > 0
    assert bool(streamer.plan.manifest.codes) is (codec != "none")
    return streamer


def simple(seed: int, device: str = "cpu", codec: str = "none") -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A streaming model, its plain twin, and an input."""
    width, dtype = (WIDTH, torch.float32) if codec == "none" else (WIDTH_CODED, torch.bfloat16)
    model = randomise(nn.Sequential(*[Block(width) for _ in range(4)]).to(dtype), seed).eval()
    x = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return model, copy.deepcopy(model).to(device), x


def training(device: str = "cpu", codec: str = "none", *, is_watched: bool = False) -> Case:
    """A training step: the gradient of the input."""
    model, plain, x = simple(3, device, codec)
    for each in (model, plain):
        each.__class__ = Checkpointed
        each.requires_grad_(False)
    streamer = offloaded(model, device, codec)

    def gradient(each: nn.Module) -> torch.Tensor:
        with torch.enable_grad():
            given = x.clone().requires_grad_()
            each(given).float().square().mean().backward()
        assert given.grad is not None
        return given.grad

    def output(is_plain: bool) -> list[torch.Tensor]:
        each = plain if is_plain else model
        found = [gradient(each)]
        with torch.no_grad():
            return [*found, each(x)]

    def watched() -> None:
        streamer.watch()
        gradient(model)

    return Case([(model, plain, streamer)], watched if is_watched else lambda: gradient(model), output)


def case(name: str, request: pytest.FixtureRequest, device: str = "cpu") -> Case:
    """The path with that name. On the CPU, a capture is of a graph that repeats operators."""
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    if name == "pipeline":
        return pipeline()
    if name.startswith("training"):
        return training(device, "compressed" if "coded" in name else "none", is_watched="watched" in name)
    if name == "striped":
        return striped()
    if name == "experts":
        return mixture(request, device)
    if name == "waves":
        return prompts(request, device)
    if name == "generation":
        return language_model(monkeypatch, device)
    if name in ("capture", "replay"):
        captures_on_the_cpu(monkeypatch)
    codec = "compressed" if "coded" in name else "none"
    model, plain, x = simple(3, device, codec)
    streamer = offloaded(model, device, codec)

    def output(is_plain: bool) -> list[torch.Tensor]:
        return [(plain if is_plain else model)(x)]

    def step() -> None:
        with streamer.step():
            model(x)
            model(x)

    def watched() -> None:
        streamer.watch()
        model(x)

    def alone() -> None:
        for block in model:
            block(x)

    graphs: list[Any] = []

    def capture() -> None:
        with streamer.capture(graph := new_graph(device)):
            y = model(x)
        graphs[:] = graph, y  # the previous graph is freed, which must not happen during a capture

    def replay() -> None:
        if not graphs or graphs[0] not in streamer.graphs.recordings:
            capture()
        streamer.replay(graphs[0])
        assert torch.equal(graphs[1], plain(x))

    def updates() -> None:
        for index in (0, 3):
            for own, other in zip(model[index].parameters(), plain[index].parameters(), strict=True):
                new = other.detach() + 1
                try:
                    own.data = new.to(own.device, copy=True)  # a step adopts this data at its entry
                finally:
                    with torch._C.DisableTorchFunctionSubclass():  # the library sees none of this
                        if torch.equal(own.cpu(), new.cpu()):  # otherwise the error came before the write
                            other.data = new
        model(x)

    act = {"step": step, "watched": watched, "alone": alone, "capture": capture, "replay": replay, "updates": updates}
    return Case([(model, plain, streamer)], act.get(name, lambda: model(x)), output)


def captures_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes()
    monkeypatch.setattr(weightstream.runtime.devices.opening, "CpuBackend", lambda *_: Lane(lanes))


def new_graph(device: str) -> Any:
    return Graph() if device == "cpu" else torch.cuda.CUDAGraph()


def language_model(monkeypatch: pytest.MonkeyPatch, device: str) -> Case:
    """Captured generation: the prompt and the first tokens run eager, the others from a graph."""
    import expert_rig
    import generating
    from weightstream.adapters.generation.generation import decode_with
    from weightstream.adapters.steps.graph_runner import Recorder

    captures_on_the_cpu(monkeypatch)
    model, ids = generating.build(generating.MODELS["llama"]()), expert_rig.prompt().to(device)
    plain = copy.deepcopy(model).to(device)
    streamer = offloaded(model, device)

    def generate() -> int:
        recorder = Recorder(new=lambda: new_graph(device), record=streamer.capture, replay=streamer.replay)
        found, decoding = decode_with(model, ids, generating.options(6), recorder)
        assert torch.equal(found, plain.generate(ids, **generating.options(6)))
        return decoding.replays  # 0 after an error that may be the model's own: generation then goes on without a graph

    def output(is_plain: bool) -> list[torch.Tensor]:
        return [(plain if is_plain else model)(input_ids=ids, use_cache=False).logits]

    assert generate()
    return Case([(model, plain, streamer)], generate, output)


def mixture(request: pytest.FixtureRequest, device: str) -> Case:
    """Experts whose rows are cached in slots, and prefetched."""
    import expert_rig

    model, ids = expert_rig.built(), expert_rig.prompt().to(device)
    plain = copy.deepcopy(model).to(device)
    holding = expert_rig.held(model, "cached", 4, device, ahead=2)
    streamer = holding.__enter__()
    request.addfinalizer(lambda: holding.__exit__(None, None, None))

    def output(is_plain: bool) -> list[torch.Tensor]:
        return [(plain if is_plain else model)(input_ids=ids[:, :1], use_cache=False).logits]

    return Case([(model, plain, streamer)], lambda: output(False), output)


def prompts(request: pytest.FixtureRequest, device: str) -> Case:
    """Packed experts that pass their slots in waves, those of the next layer ahead."""
    import expert_rig
    import packed_rig
    from weightstream.adapters.hf import packed_matrices

    model, unpacked = packed_rig.both("mxfp4", "grouped_mm")
    packed, plain, ids = copy.deepcopy(model), unpacked.to(device), expert_rig.prompt(12).to(device)
    matrix = expert_rig.experts_of(plain)[0].gate_up_proj[0].nbytes
    request.getfixturevalue("monkeypatch").setattr(packed_matrices, "WAVE_NBYTES", 2 * matrix)
    holding = expert_rig.held(model, "cached", 4, device)
    streamer = holding.__enter__()
    request.addfinalizer(lambda: holding.__exit__(None, None, None))

    def output(is_plain: bool) -> list[torch.Tensor]:
        found = [(plain if is_plain else model)(input_ids=ids, use_cache=False).logits]
        assert not streamer._binding.waves._begun
        return found

    return Case([(model, packed, streamer)], lambda: output(False), output)


def striped() -> Case:
    """Blocks over two devices."""
    model, plain, x = simple(8)
    nbytes = sum(p.nbytes for p in model.parameters())
    lanes, config = Lanes(), OffloadConfig(max_memory=dict.fromkeys(range(2), int(0.6 * nbytes) // 2), codec="none")
    stripes = stripe(model, [Lane(lanes) for _ in range(2)], config, CallerFacts())
    assert stripes.plan.step_nbytes

    def output(is_plain: bool) -> list[torch.Tensor]:
        return [(plain if is_plain else model)(x)]

    parts = [(model, plain, part) for part in stripes.parts.values()]
    return Case(parts, lambda: output(False), output, removal=stripes.remove)


def pipeline() -> Case:
    """Two components that use one ring in turn, as in a denoising loop."""
    import diffusers

    class Pipe(diffusers.DiffusionPipeline):  # type: ignore[misc]
        def __init__(self, encoder: nn.Module, net: nn.Module) -> None:
            super().__init__()
            self.register_modules(encoder=encoder, net=net)

        def __call__(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
            x = self.encoder(x)
            for _ in range(steps):
                x = self.net(x)
            return x

    (encoder, plain_encoder, x), (net, plain_net, _) = simple(5), simple(6)
    pipe, plain = Pipe(encoder, net), Pipe(plain_encoder, plain_net)
    nbytes = sum(p.nbytes for part in (encoder, net) for p in part.parameters())
    weightstream.offload_pipeline(
        pipe, device="cpu", device_budget=int(0.4 * nbytes), codec="none", example_inputs={"x": x}
    )
    parts = [(pipe.components[n], plain.components[n], s) for n, s in pipe.weightstream.components.items()]

    def output(is_plain: bool) -> list[torch.Tensor]:
        return [(plain if is_plain else pipe)(x)]

    return Case(parts, lambda: output(False), output)


def thread_state(device: str = "cpu") -> tuple[object, ...]:
    """State that torch keeps for the calling thread, and that a cut might change."""
    streams = () if device == "cpu" else (torch.accelerator.current_stream(), torch.accelerator.current_device_index())
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    sees_classes, keeps_casts = torch._C._is_torch_function_enabled(), torch.is_autocast_cache_enabled()
    stance = eval_frame._stance.stance  # of the process
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), sees_classes, keeps_casts
    return torch._C._autograd._top_saved_tensors_default_hooks(True), stance, *flags, *modes, *streams


def cut_once(
    act: Callable[[], object], num: int, draw: random.Random, seed: int, device: str = "cpu"
) -> tuple[bool, str]:
    """Cut `act` at one of `num` lines, and check that the thread's state is as before.

    Returns whether that line was reached, and its place.
    """
    error, before = draw.choice((Cut, KeyboardInterrupt, RuntimeError)), thread_state(device)
    try:
        with Lines(draw.randint(1, num), error) as lines:
            act()
    except error:
        pass
    where = f"cut at {lines.where} by {error.__name__}, seed {seed}"
    assert thread_state(device) == before, where
    return bool(lines.where), where


def cut(path: Case, num_cuts: int, seed: int, device: str = "cpu") -> None:
    """Cut `act` at `num_cuts` lines. Steps that are timed or plan again have more lines than others."""
    draw, num_reached = random.Random(seed), 0
    with torch.no_grad():
        num = sorted(num_lines(path.act) for _ in range(3))[1]
        for _ in range(4 * num_cuts):
            with torch.set_grad_enabled(draw.random() < 0.5):
                is_reached, where = cut_once(path.act, num, draw, seed, device)
            num_reached += is_reached
            path.check(where)
            if num_reached == num_cuts:
                return
    raise AssertionError(f"{num_reached} of {num_cuts} lines were reached")


def interrupt(num: int, seed: int, device: str = "cpu") -> None:
    """Send `num` real signals, each at a random moment of some steps."""
    model, plain, x = simple(4, device=device)
    streamer = offloaded(model, device)
    case = Case([(model, plain, streamer)], lambda: model(x), lambda is_plain: [(plain if is_plain else model)(x)])
    draw = random.Random(seed)
    with torch.no_grad():
        for _ in range(6):
            model(x)
        begin_s = time.perf_counter()
        for _ in range(20):
            model(x)
        step_s = (time.perf_counter() - begin_s) / 20
        for index in range(num):
            try:
                with interrupted(draw.uniform(0.1, 3) * step_s):
                    for _ in range(1000):
                        if index % 2:
                            model(x)
                        else:
                            with streamer.step():
                                model(x)
            except KeyboardInterrupt:
                pass
            case.check(f"interrupt {index}, seed {seed}")
            assert all(map(is_free, case.locks()))
    streamer.remove()
    assert all(torch.equal(own.cpu(), p.cpu()) for own, p in zip(model.parameters(), plain.parameters(), strict=True))
