"""Properties that only a GPU shows: pinned homes, one copy per unit, the allocator's figures, real races, clean
refusals."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import weightstream
from stack import WIDTH, Stack, assert_equal, nbytes, references, slow
from weightstream.errors import ConfigError, PlanError
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Side
from weightstream.runtime.devices.cuda import CudaBackend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(params=["cpu", "cuda"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A stack whose weights start on the host, or on the device."""
    yield Stack().eval().to(request.param)
    gc.collect()


@pytest.mark.alone
@pytest.mark.parametrize("share", [0.3, 0.45, 0.8, 1.1])
def test_bitwise_within_the_budget(stack: Stack, share: float) -> None:
    inputs, want = references(stack)
    origin = next(stack.parameters()).device
    budget = int(nbytes(stack) * share)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - (nbytes(stack) if origin.type == "cuda" else 0)
    with weightstream.offload(stack, device="cuda", device_budget=budget) as streamer:
        assert torch.cuda.memory_allocated() - before <= budget + 512 * len(list(stack.parameters()))
        assert_equal(stack, inputs, want)
        stats = streamer.stats()
        assert stats.held_nbytes["device"] <= budget
        assert stats.filled_nbytes >= (stats.steps - 1) * streamer.plan.step_nbytes
        assert (stats.fills > 0) == (share < 1)
        assert stats.unplanned_fills == 0
    assert {p.device.type for p in stack.parameters()} == {origin.type}
    assert_equal(stack.cuda(), inputs, want, rounds=1)


def test_streamed_homes_are_pinned_and_a_unit_is_one_copy(stack: Stack) -> None:
    with weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3) as streamer:
        plan = streamer.plan
        streamed = [u for u in range(len(plan.manifest.units)) if plan.streams(u)]
        assert streamed
        for unit in streamed:
            copies = streamer._homes.copies(plan, unit, streamer._binding.memory[0])
            assert [c.pinned for c in copies] == [True]
        assert stack.blocks[3].up.weight.is_pinned()
        assert streamer.stats().held_nbytes["host"] == plan.host_nbytes


@pytest.mark.parametrize("where", ["config", "environment"])
def test_without_pinned_memory_copies_are_staged(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack().eval()
    inputs, want = references(stack)
    settings = {}
    if where == "config":
        settings["pin_memory"] = False
    else:
        monkeypatch.setenv("WEIGHTSTREAM_DISABLE_PIN_MEMORY", "1")
    with weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3, **settings) as streamer:
        assert not stack.blocks[3].up.weight.is_pinned()
        assert_equal(stack, inputs, want)
        assert streamer.stats().fills > 0


def test_a_refused_registration_is_our_error_and_leaves_no_trace() -> None:
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    cuda.pin_in_place(memory)
    try:
        with pytest.raises(weightstream.StoreError, match=r"refused to pin 1048576 bytes.*memlock"):
            cuda.pin_in_place(memory)
        assert torch.ones(3, device="cuda").sum().item() == 3
    finally:
        cuda.unregister(memory)


def test_pinning_refused_falls_back_to_staging(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(memory: torch.Tensor, device: torch.device, *, read_only: bool) -> None:
        raise weightstream.StoreError(f"the system refused to pin {memory.numel()} bytes")

    monkeypatch.setattr("weightstream.runtime.devices.cuda.pin_in_place", refuse)
    stack = Stack().eval()
    inputs, want = references(stack)
    with weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3):
        assert_equal(stack, inputs, want)
    assert [r.levelname for r in caplog.records if "refused to pin" in r.message] == ["WARNING"]


def test_delays_and_poison_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    stack = Stack().eval()
    inputs, want = references(stack)
    with weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3):
        assert_equal(stack, inputs, want, rounds=25)


@pytest.mark.alone
@pytest.mark.parametrize("side", [Side.COMPUTE, Side.COPY])
def test_a_dropped_wait_is_caught(monkeypatch: pytest.MonkeyPatch, side: Side) -> None:
    """The harness of the test above detects the races that it looks for."""
    slow(monkeypatch, side)
    stack = Stack().eval()
    inputs, want = references(stack)
    with (
        weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3),
        pytest.raises(AssertionError),
    ):
        assert_equal(stack, inputs, want, rounds=25)


def test_compute_on_another_stream(stack: Stack) -> None:
    inputs, want = references(stack)
    with weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert_equal(stack, inputs, want)
        torch.cuda.current_stream().wait_stream(side)
        assert_equal(stack, inputs, want)


def test_steps_that_alternate_between_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream waited for the bytes; another reads and releases them."""
    slow(monkeypatch)
    stack = Stack().eval()
    inputs, want = references(stack)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3), torch.no_grad():
        torch.cuda.synchronize()
        got = []
        for step in range(40):
            with torch.cuda.stream(streams[step % 2]):
                got.append(stack(inputs[step % len(inputs)]))
        torch.cuda.synchronize()
        assert all(torch.equal(y, want[step % len(inputs)]) for step, y in enumerate(got))


@pytest.mark.parametrize("pin_memory", [True, False])
def test_remove_waits_for_a_step_on_another_stream(pin_memory: bool) -> None:
    class Tail(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Stack().blocks
            self.tail = nn.Linear(WIDTH, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            torch.cuda._sleep(200_000_000)
            return self.tail(x)

    model = Tail().eval()
    plain = copy.deepcopy(model).cuda()
    x = torch.randn(3, WIDTH, device="cuda")
    with torch.no_grad():
        want = plain(x)
        streamer = weightstream.offload(model, device="cuda", device_budget=nbytes(model) // 3, pin_memory=pin_memory)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
            got = model(x)
        streamer.remove()
        poison = [torch.full((WIDTH * 64,), float("nan"), device="cuda") for _ in range(64)]
        torch.cuda.synchronize()
        assert torch.equal(got, want)
        del poison


def test_out_of_memory_at_attach_leaves_the_model_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack().eval()
    before = {n: (p, p.data_ptr(), p.device) for n, p in stack.named_parameters()}
    values = {n: p.detach().clone() for n, p in stack.named_parameters()}
    real = CudaBackend.alloc

    def alloc(self: CudaBackend, size: int) -> torch.Tensor:
        if size >= 8 << 20:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return real(self, size)

    monkeypatch.setattr(CudaBackend, "alloc", alloc)
    with pytest.raises(torch.OutOfMemoryError):
        weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3)
    for name, parameter in stack.named_parameters():
        assert parameter is before[name][0]
        assert parameter.device == before[name][2]
        assert torch.equal(parameter, values[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in stack.modules())
    monkeypatch.undo()
    inputs, want = references(stack)
    with weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3):
        assert_equal(stack, inputs, want)


@pytest.mark.alone
def test_memory_is_flat_and_returns(stack: Stack) -> None:
    inputs, _ = references(stack)
    gc.collect()
    start = torch.cuda.memory_allocated()
    with weightstream.offload(stack, device="cuda", device_budget=nbytes(stack) // 3), torch.no_grad():
        seen = set()
        for _ in range(6):
            stack(inputs[0])
            torch.cuda.synchronize()
            seen.add(torch.cuda.memory_allocated())
        assert len(seen) <= 2  # the first step may load libraries
    gc.collect()
    assert torch.cuda.memory_allocated() <= start


def test_classic_flags_and_errors() -> None:
    stack = Stack().eval()
    inputs, want = references(stack)
    for group, num, step in ((1, 1, 1), (1, 1, 2), (3, 2, 2), (7, 7, 9)):
        with weightstream.offload(
            stack, device="cuda", offload_group_size=group, offload_num_in_group=num, offload_prefetch_step=step
        ):
            assert_equal(stack, inputs, want, rounds=2)
    with weightstream.offload(stack, device="cuda", cpu_offload_gb=nbytes(stack) / 2**31):
        assert_equal(stack, inputs, want, rounds=2)
    with pytest.raises(PlanError, match="budget"):
        weightstream.offload(stack, device="cuda", device_budget=4096)
    with pytest.raises(ConfigError, match="CUDA devices"):
        weightstream.offload(stack, device="cuda:99")


def test_a_weight_read_only_by_the_parent() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.first.weight) + self.second(x)

    model = nn.Sequential(Reader(), Reader()).eval()
    plain = copy.deepcopy(model).cuda()
    x = torch.randn(2, WIDTH, device="cuda")
    with torch.no_grad():
        want = plain(x)
        with weightstream.offload(model, device="cuda", device_budget=int(nbytes(model) * 0.6)):
            for _ in range(4):
                assert torch.equal(model(x), want)


def test_from_pretrained_on_the_gpu(tmp_path: object) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4, vocab_size=512,
        tie_word_embeddings=True,
    )  # fmt: skip
    plain = transformers.LlamaForCausalLM(config).eval().bfloat16()
    plain.save_pretrained(tmp_path)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path).cuda()
    size = sum(p.nbytes for p in plain.parameters())
    model = weightstream.from_pretrained(tmp_path, device="cuda", device_budget=size // 2)
    tokens = torch.randint(0, 512, (1, 9), device="cuda")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(tokens).logits, plain(tokens).logits)
    want = plain.generate(tokens, max_new_tokens=12, do_sample=False)
    for _ in range(3):
        assert torch.equal(model.generate(tokens, max_new_tokens=12, do_sample=False), want)
    assert model.weightstream.stats().held_nbytes["disk"] == 0
    model.weightstream.remove()
    small = weightstream.from_pretrained(tmp_path, device="cuda", device_budget=size // 2, host_budget=1)
    assert small.weightstream.stats().held_nbytes["disk"] > 0  # little RAM is free: straight from the mapped file
    assert torch.equal(small.generate(tokens, max_new_tokens=12, do_sample=False), want)


def test_a_graph_among_the_garbage_does_not_break_a_capture() -> None:
    """Its destruction would make the capture under way in the same thread invalid."""
    x = torch.zeros(1, device="cuda")
    x + 1  # loads the kernel
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(10_000)
    try:
        unused = [torch.cuda.CUDAGraph()]
        with cuda.recording(unused[0]):
            x + 1
        unused.append(unused)  # type: ignore[arg-type]
        del unused
        graph = torch.cuda.CUDAGraph()
        with cuda.recording(graph):
            gc.set_threshold(1)
            made: list[list[int]] = [[number] for number in range(100)]  # collections begin here, if they may
            y = x + len(made)
        graph.replay()
        assert y.item() == 100
    finally:
        gc.set_threshold(*before)
        gc.collect()
