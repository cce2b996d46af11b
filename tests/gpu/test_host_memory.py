"""Weights straight from a checkpoint on a GPU: pinned pages of the file, direct reads, and files that change."""

from __future__ import annotations

import copy
import errno
import gc
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import weightstream
from stack import slow
from weightstream.errors import OffloadError, StoreError
from weightstream.runtime.devices import cuda, cuda_driver
from weightstream.runtime.devices.backend import Side

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

STEPS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of about 120 MiB in two shards, so that copies outlast their launch."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=8, vocab_size=2048,
        initializer_range=0.05,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="80MB")
    return folder


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(checkpoint).eval().cuda()


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2048, (1, 9), generator=torch.Generator().manual_seed(seed)).cuda()


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@contextmanager
def streamed(folder: Path, share: float = 0.4, **settings: Any) -> Iterator[Any]:
    settings = {
        "codec": "none"
    } | settings  # weights that are compressed at load are in pinned memory, and auto may compress
    model = weightstream.from_pretrained(folder, device="cuda", device_budget=int(size(folder) * share), **settings)
    try:
        yield model
    finally:
        model.weightstream.remove()


def assert_equal(model: Any, plain: Any, steps: int = STEPS) -> None:
    with torch.no_grad():
        for seed in range(steps):
            assert torch.equal(model(tokens(seed)).logits, plain(tokens(seed)).logits), seed


def maps_of(folder: Path) -> set[str]:
    gc.collect()
    return {m.path for m in psutil.Process().memory_maps() if m.path.startswith(str(folder))}


# -- pages of the file -------------------------------------------------------------------------------------------------


@pytest.mark.alone  # whether a table is read in place depends on measured rates
@pytest.mark.usefixtures("own_profile")
def test_copies_start_in_the_page_cache_and_no_weight_is_held_twice(checkpoint: Path, plain: Any) -> None:
    with streamed(checkpoint) as model:
        assert_equal(model, plain)
        streamer = model.weightstream
        homes, plan = streamer._homes, streamer.plan
        assert homes._arena.nbytes == 0
        assert streamer.stats().held_nbytes["host"] == plan.host_nbytes
        pinned = homes._pages.nbytes  # including the embedding, of which kernels read rows
        assert plan.mapped_nbytes == 2048 * 1024 * 2
        assert plan.host_nbytes <= pinned <= plan.host_nbytes + 4096 * 2 * len(plan.manifest.aliases)
        streams = [u for u in range(len(plan.manifest.units)) if plan.streams(u)]
        assert all(copy.pinned for u in streams for copy in homes.copies(plan, u, streamer._binding.memory[0]))
        pages = homes._pages
    assert pages.nbytes == 0
    del model, streamer, homes, streams
    assert maps_of(checkpoint) == set()


def test_captured_and_generated_from_the_page_cache(checkpoint: Path, plain: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    want = weightstream.generate(plain, tokens(), **options)
    with streamed(checkpoint) as model:
        reports: list[Any] = []
        assert torch.equal(weightstream.generate(model, tokens(), **options, on_decoding=reports.append), want)
        assert reports[0].replays > 0
        assert torch.equal(model.generate(tokens(), **options), plain.generate(tokens(), **options))


def test_two_models_of_one_file(checkpoint: Path, plain: Any) -> None:
    with streamed(checkpoint) as one, streamed(checkpoint, 0.6) as two:
        for _ in range(2):
            assert_equal(one, plain)
            assert_equal(two, plain)


def _in_place(weight: torch.Tensor) -> None:
    weight.mul_(1.5)


def _data(weight: torch.Tensor) -> None:
    weight.data[3, 5] = 2.0


def _numpy(weight: torch.Tensor) -> None:
    weight.detach().view(torch.int16).numpy()[7, 11] ^= 0x40  # one bit of one element, unseen by every version counter


def _assigned(weight: torch.Tensor) -> None:
    weight.data = torch.full_like(weight, 0.01)


@pytest.mark.parametrize("update", [_in_place, _data, _numpy, _assigned])
@pytest.mark.parametrize("host_budget", [None, 0])
def test_updates_reach_the_next_step(
    checkpoint: Path, update: Callable[[torch.Tensor], None], host_budget: int | None
) -> None:
    other = transformers.LlamaForCausalLM.from_pretrained(checkpoint).eval()
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(6) for part in ("down", "up")]
    with streamed(checkpoint, host_budget=host_budget) as model, torch.no_grad():
        assert_equal(model, other.cuda())
        streamed_names = model.weightstream.plan.manifest.aliases.keys() - model.weightstream.plan.resident
        for name in [name for name in names if name in streamed_names][::3]:
            update(model.get_parameter(name))
            other.cpu()
            update(other.get_parameter(name))
            assert_equal(model, other.cuda(), 2)
            assert torch.equal(model.get_parameter(name).detach(), other.get_parameter(name).detach().cpu())


def test_a_graph_captured_before_an_update_is_refused_after_it(checkpoint: Path, plain: Any) -> None:
    static = tokens()
    with streamed(checkpoint) as model, torch.no_grad():
        streamer, graph = model.weightstream, torch.cuda.CUDAGraph()
        for _ in range(2):
            model(static, use_cache=False)
        with streamer.capture(graph):
            logits = model(static, use_cache=False).logits
        streamer.replay(graph)
        assert torch.equal(logits, plain(static, use_cache=False).logits)
        placed = streamer.plan.placed
        name = next(n for n, p in model.named_parameters() if n.startswith("model.layers") and n not in placed)
        model.get_parameter(name).mul_(2)
        with pytest.raises(OffloadError, match="an update of a weight"):
            streamer.replay(graph)
        plain.get_parameter(name).mul_(2)
        assert_equal(model, plain)
        plain.get_parameter(name).mul_(0.5)


def test_refused_pinning_costs_one_warning_and_no_bit(
    checkpoint: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(memory: torch.Tensor, device: torch.device, *, read_only: bool = False) -> None:
        raise StoreError("the system refused to pin.")

    monkeypatch.setattr(cuda, "pin_in_place", refuse)
    with caplog.at_level(logging.WARNING, "weightstream"), streamed(checkpoint) as model:
        assert_equal(model, plain)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "refused to pin" in messages[0]
    assert "staging" in messages[0]


def test_with_a_memlock_limit_of_64_kib(checkpoint: Path, plain: Any, tmp_path: Path) -> None:
    """A driver that does not count pinned bytes works as always. With one that does, copies are staged, with a
    warning."""
    with torch.no_grad():
        torch.save(plain(tokens()).logits.cpu(), tmp_path / "want.pt")
    code = f"""
import resource, sys, torch, weightstream
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
budget = {int(size(checkpoint) * 0.4)}
model = weightstream.from_pretrained({str(checkpoint)!r}, device="cuda", device_budget=budget, codec="none")
x = torch.randint(0, 2048, (1, 9), generator=torch.Generator().manual_seed(0)).cuda()
want = torch.load({str(tmp_path / "want.pt")!r})
with torch.no_grad():
    assert all(torch.equal(model(x).logits.cpu(), want) for _ in range(3))
model.weightstream.remove()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_without_pinned_memory(checkpoint: Path, plain: Any) -> None:
    with streamed(checkpoint, pin_memory=False) as model:
        assert_equal(model, plain)


def test_a_device_that_cannot_pin_pages_gets_a_copy_of_exact_size(
    checkpoint: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "pins_read_only", lambda index: False)
    with streamed(checkpoint) as model:
        assert_equal(model, plain)
        host, arena = model.weightstream.plan.host_nbytes, model.weightstream._homes._arena.nbytes
        assert host <= arena <= 1.01 * host


def test_a_replaced_file_is_an_error_and_remove_still_works(checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    budget = int(size(tmp_path) * 0.4)
    model = weightstream.from_pretrained(tmp_path, device="cuda", device_budget=budget, codec="none")
    with torch.no_grad():
        model(tokens())
        for shard in tmp_path.glob("*.safetensors"):  # all weights of a single shard may be resident
            os.utime(shard, ns=(0, 0))
        with pytest.raises(StoreError, match="changed since it was mapped"):
            model(tokens())
    model.weightstream.remove()


# -- zero-copy ---------------------------------------------------------------------------------------------------------


def aligned_copy(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with data at multiples of 4096."""
    from safetensors.torch import load_file

    from weightstream.store.checkpoint import Checkpoint

    for path in checkpoint.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    for path in checkpoint.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        pad = -(8 + length) % 4096
        (folder / path.name).write_bytes(
            (length + pad).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * pad + raw[8 + length :]
        )
        assert load_file(folder / path.name).keys() == load_file(path).keys()
    sizes = [sum(e.nbytes for e in Checkpoint.open(p).entries.values()) for p in (folder, checkpoint)]
    assert sizes[0] == sizes[1]
    return folder


def test_kernels_read_an_aligned_file_in_place(checkpoint: Path, plain: Any, tmp_path: Path) -> None:
    folder = aligned_copy(checkpoint, tmp_path)
    with streamed(folder, zero_copy_params={"down_proj"}) as model:
        assert_equal(model, plain)
        streamer = model.weightstream
        assert streamer.plan.mapped_nbytes == (6 * 2816 + 2048) * 1024 * 2
        assert streamer._homes._arena.nbytes == 0
        weight = model.model.layers[0].mlp.down_proj.weight
        assert weight.is_cuda
        original = {name: tensor.cpu().clone() for name, tensor in plain.state_dict().items()}
        with torch.no_grad():
            assert torch.equal(weight, plain.model.layers[0].mlp.down_proj.weight)
            assert streamer._homes._arena.nbytes == 0
            for update in _in_place, _data:  # the first one moves it to memory of its own
                update(weight)
                update(plain.model.layers[0].mlp.down_proj.weight)
                assert weight.is_cuda
                assert streamer._homes._arena.nbytes == weight.nbytes
                assert_equal(model, plain)
        graph, x = torch.cuda.CUDAGraph(), tokens()
        with torch.no_grad(), streamer.capture(graph):
            logits = model(x, use_cache=False).logits
        streamer.replay(graph)
        assert torch.equal(logits, plain(x, use_cache=False).logits)
        copied = copy.deepcopy(model)
        assert type(copied.model.layers[1].mlp.down_proj.weight) is torch.nn.Parameter
        model.load_state_dict(original)
        plain.load_state_dict(original)
        with pytest.raises(OffloadError, match="an update of a weight"):
            streamer.replay(graph)
        assert_equal(model, plain)
    assert model.model.layers[0].mlp.down_proj.weight.device.type == "cpu"
    model.load_state_dict(plain.state_dict())


def test_kernels_read_a_copy_if_the_file_is_not_aligned(checkpoint: Path, plain: Any) -> None:
    with streamed(checkpoint, zero_copy_params={"down_proj"}) as model:
        assert_equal(model, plain)
        assert model.weightstream._homes._arena.nbytes == 6 * 2816 * 1024 * 2  # rows of the embedding need no copy
        model.load_state_dict(plain.state_dict())
        assert_equal(model, plain)


# -- direct reads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, 0.3, 0.7])
def test_weights_beyond_the_host_budget_are_read_each_step(checkpoint: Path, plain: Any, share: float) -> None:
    budget = int(size(checkpoint) * 0.6 * share)
    with streamed(checkpoint, host_budget=budget) as model:
        assert_equal(model, plain, 5)
        streamer = model.weightstream
        held = streamer.stats().held_nbytes
        assert held["host"] == streamer.plan.host_nbytes <= budget
        assert held["disk"] == streamer.plan.disk_nbytes > 0
        assert streamer._homes._pages.nbytes <= budget + 4096 * 2 * len(streamer.plan.manifest.aliases)
        before = streamer.stats()
        assert_equal(model, plain, 4)
        after = streamer.stats()
        assert after.filled_nbytes - before.filled_nbytes == 4 * streamer.plan.step_nbytes
        assert after.unplanned_fills == before.unplanned_fills


def test_generation_from_disk_runs_eager_and_says_why(checkpoint: Path, plain: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    want = weightstream.generate(plain, tokens(), **options)
    with streamed(checkpoint, host_budget=0) as model:
        reports: list[Any] = []
        assert torch.equal(weightstream.generate(model, tokens(), **options, on_decoding=reports.append), want)
        assert reports[0].replays == 0
        assert "read from disk" in reports[0].reason
        assert_equal(model, plain)


def test_a_model_is_captured_once_nothing_unpinned_streams(checkpoint: Path, plain: Any) -> None:
    with streamed(checkpoint) as model, torch.no_grad():
        streamer = model.weightstream
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(1)  # from now on the file may differ
        assert_equal(model, plain)
        with pytest.raises(OffloadError, match="a captured graph cannot"), streamer.capture(torch.cuda.CUDAGraph()):
            model(tokens(), use_cache=False)
        assert_equal(model, plain)
        streamer.rebudget(2 * size(checkpoint))
        assert_equal(model, plain)
        graph, plain_graph, ids = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), tokens()
        with streamer.capture(graph):
            logits = model(ids, use_cache=False).logits
        assert "weightstream-feed" not in [thread.name for thread in threading.enumerate()]
        with torch.cuda.graph(plain_graph):  # its kernels are not always those of an eager step
            wanted = plain(ids, use_cache=False).logits
        for seed in range(STEPS):
            ids.copy_(tokens(seed))
            streamer.replay(graph)
            plain_graph.replay()
            assert torch.equal(logits, wanted)


def test_fixed_addresses_from_disk(checkpoint: Path, plain: Any) -> None:
    with streamed(checkpoint, host_budget=0) as model, torch.no_grad():
        want = plain(tokens(), use_cache=False).logits
        assert torch.equal(model(tokens(), use_cache=False).logits, want)
        with model.weightstream.step():
            for _ in range(3):
                assert torch.equal(model(tokens(), use_cache=False).logits, want)


def test_a_failed_read_is_an_error_and_the_next_step_works(
    checkpoint: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed(checkpoint, host_budget=0) as model:
        assert_equal(model, plain)
        real, left = os.preadv, [5]

        def fails(*args: Any) -> int:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(os, "preadv", fails)
            with pytest.raises(StoreError, match="EIO"):
                model(tokens())
        assert_equal(model, plain)


def test_slow_reads_and_slow_copies_change_no_bit(
    checkpoint: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, pause = os.preadv, random.Random(5)

    def late(*args: Any) -> int:
        time.sleep(pause.uniform(0, 0.004))
        return real(*args)

    monkeypatch.setattr(os, "preadv", late)
    slow(monkeypatch)
    with streamed(checkpoint, 0.25, host_budget=0) as model:
        assert_equal(model, plain, 8)


@pytest.mark.alone
@pytest.mark.parametrize("side", [Side.COMPUTE, Side.COPY])
def test_a_dropped_wait_is_caught(checkpoint: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, side: Side) -> None:
    """The harness of the test above detects the races that it looks for."""
    slow(monkeypatch, side, most_cycles=20_000_000)  # for one of the sides compute must be slower than the disk
    with streamed(checkpoint, 0.25, host_budget=0) as model, pytest.raises(AssertionError):
        assert_equal(model, plain, 8)
