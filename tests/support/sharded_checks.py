"""Checks of each process of tensor parallelism. `tests/adapters/hf/test_tensor_parallel.py` starts them.

torchrun --nproc-per-node 2 sharded_checks.py DEVICE FOLDER CHECK…

Without torchrun the script starts two processes by itself, which inherit its imports.

The reference is the same model in the same processes, as transformers runs it without weightstream. Each check that
holds prints `rank N: CHECK holds`; a check that fails ends its process. Checks with the same comment are one job.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import distributed, multiprocessing
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

import weightstream
from fake_cuda import FakeCuda
from weightstream import CheckpointError, ConfigError, Plan, PlanError
from weightstream.adapters.generation import call, deferred_stop, generation
from weightstream.adapters.generation.decoder import DecodeReport
from weightstream.adapters.hf.ranks import Ranks, join, ranks_of
from weightstream.adapters.steps import graph_runner
from weightstream.api.offload import _offload
from weightstream.inputs.builder import CallerFacts, OffloadBuilder
from weightstream.runtime.devices.opening import backend_of
from weightstream.settings.arguments import resolve_config
from weightstream.store.lazy import LazyMemory
from weightstream.store.limits import available_nbytes
from weightstream.store.mapping import FileMapping
from wrapped import Delay, Wrapper


def again(rank: int, num: int, port: int) -> None:
    """Set up a process as torchrun would start it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    runpy.run_path(__file__, run_name="__main__")


if "RANK" not in os.environ:
    for kind in ("Llama", "Qwen2"):
        getattr(transformers, f"{kind}ForCausalLM")  # which imports it
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    multiprocessing.start_processes(again, args=(2, port), nprocs=2, start_method="fork")
    sys.exit()
DEVICE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, NUM = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WHERE = "cpu" if DEVICE == "cpu" else f"cuda:{RANK}"
SHARDED = {"distributed_config": {"tp_size": NUM}}
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def plain(name: str) -> Any:
    """The model as transformers shards it."""
    config = transformers.distributed.DistributedConfig(tp_size=NUM)
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER / name, distributed_config=config)


def streamed(name: str, **settings: Any) -> Any:
    return weightstream.from_pretrained(FOLDER / name, device=WHERE, progress=False, **SHARDED, **settings)


def steps(model: Any, num: int = 2) -> list[torch.Tensor]:
    ids = torch.arange(1, 9, device=WHERE).view(1, 8)
    options = {"max_new_tokens": 3 if DEVICE == "cpu" else 8, "do_sample": False, "pad_token_id": 0}
    found = [model(ids).logits.detach()]  # with gradients: another way of transformers
    with torch.no_grad():
        found += [model(ids + k).logits for k in range(num)]
        return [*found, weightstream.generate(model, ids, **options)]


def assert_same(found: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(found) == len(want)
    for index, (a, b) in enumerate(zip(found, want, strict=True)):
        assert torch.equal(a, b), index


def local_nbytes(model: Any) -> int:
    return sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in model.parameters())


@cache
def plain_nbytes(name: str) -> int:
    return local_nbytes(plain(name))


def whole(tensor: Any) -> torch.Tensor:
    """The whole tensor. If torch 2.11 cannot join its pieces, the piece of this rank."""
    if any(type(placement).__name__ == "_StridedShard" for placement in getattr(tensor, "placements", ())):
        return tensor.to_local().cpu()
    return tensor.full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor.cpu()


def in_files(model: Any) -> tuple[int, int]:
    """Bytes of weights in the checkpoint's own files, and in the offload folder."""
    nbytes = {True: 0, False: 0}
    for home in model.weightstream._homes.homes.values():
        memory = None if home.file is None else home.file.place.memory
        if isinstance(memory, FileMapping):
            nbytes[FOLDER in memory.path.parents] += home.group.nbytes
        elif isinstance(memory, LazyMemory):
            nbytes[FOLDER in memory.extents[0].mapping.path.parents] += home.group.nbytes
    return nbytes[True], nbytes[False]


def holds(name: str, *, written: bool, **settings: Any) -> None:
    """Check bits, memory, values that users read between steps, and the plain model after `remove()`."""
    reference = plain("llama" if name == "pack" else name)
    want, nbytes = steps(reference), local_nbytes(reference)
    tensors = {key: whole(value) for key, value in reference.state_dict().items()}
    model = streamed(name, device_budget=nbytes // 3, **settings)
    streamer = model.weightstream
    assert streamer.plan.step_nbytes > nbytes // 4
    assert bool(streamer.plan.manifest.codes) is (settings.get("codec") == "compressed")
    in_place, in_folder = in_files(model)
    assert bool(in_folder) is written, (in_place, in_folder)
    assert in_place + in_folder <= nbytes
    assert in_place > nbytes // 2 or written
    for _ in range(2):
        assert_same(steps(model), want)
    for key, value in model.state_dict().items():
        assert torch.equal(whole(value), tensors[key]), key
    streamer.remove()
    if DEVICE == "cpu":  # on a GPU, the model is then on the CPU
        assert_same(steps(model), want)


@check
def llama() -> None:
    holds("llama", written=False, codec="none")


@check  # slow: models
def llama_coded() -> None:
    holds("llama", written=False, codec="compressed")


@check  # slow: models
def llama_in_a_pack() -> None:
    """Each rank decodes only its own shard."""
    holds("pack", written=True, codec="none")


@check  # slow: models
def tied_with_biases() -> None:
    holds("qwen2", written=False, codec="none")


@check  # slow: models
def experts() -> None:
    """Experts that transformers joins from rows and columns of several tensors stay in the checkpoint's files."""
    holds("mixtral", written=False, codec="none")


OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def tokens(model: Any) -> torch.Tensor:
    """Tokens with a static cache, as transformers generates them."""
    ids = torch.arange(1, 9, device=WHERE).view(1, 8)
    return model.generate(ids, cache_implementation="static", disable_compile=True, **OPTIONS)


def decoded(model: Any, **more: Any) -> tuple[torch.Tensor, DecodeReport]:
    """The same tokens, decoded from graphs, and the report of the decode steps."""
    recorder = FakeCuda().recorder if DEVICE == "cpu" else call.recorder_of(model)
    return generation.decode_with(model, torch.arange(1, 9, device=WHERE).view(1, 8), OPTIONS | more, recorder)


@check
def steps_from_graphs() -> None:
    """All ranks watch, capture and replay together, even if one rank finds a step that is unlike all before."""
    model, sign = plain("llama"), graph_runner._sign
    want = tokens(model)
    found, decoding = decoded(model)
    assert torch.equal(found, want)
    assert decoding == DecodeReport(replays=10), decoding

    def strange(leaf: Any) -> Any:
        signed.append(leaf)
        return object() if RANK == 1 and torch.is_tensor(leaf) and len(signed) in range(30, 40) else sign(leaf)

    signed: list[Any] = []
    with patch.object(graph_runner, "_sign", strange):
        found, decoding = decoded(model)
    assert torch.equal(found, want)
    assert 0 < decoding.replays < 10, decoding
    assert Ranks().gather(decoding) == [decoding] * NUM


@contextmanager
def events() -> Iterator[None]:
    """End texts a step late on the CPU too, which has no events and is never late."""
    if DEVICE != "cpu":
        yield
        return
    with patch.object(deferred_stop, "_has_events", lambda device: True), patch.object(torch, "Event", Mock):
        yield


@check
def a_text_that_ends_early() -> None:
    """A text ends a step late on all ranks, or on none: a rank would never return from a step that only it runs."""
    model = plain("llama")
    generated: list[int] = tokens(model)[0, 8:].tolist()
    num = max(i for i, token in enumerate(generated[:-1]) if token not in generated[:i]) + 1
    assert num > 4, generated
    ends = {"eos_token_id": generated[num - 1], "min_new_tokens": None}
    want, replays = tokens(model)[:, : 8 + num], []
    for spares in (True, RANK == 0):
        with events(), patch.object(generation, "_may_spare_a_step", lambda *_, spares=spares: spares):
            found, decoding = decoded(model, **ends)
        assert torch.equal(found, want)
        replays.append(decoding.replays)
    assert replays == [num - 1, num - 2], replays
    with events():  # one rank returns its cache, which cannot be cut
        _, decoding = decoded(model, **ends, return_dict_in_generate=RANK == 0)
    assert decoding == DecodeReport(replays=num - 2), decoding


@check  # slow: settings, updates
def a_capture_that_one_rank_refuses() -> None:
    """If one rank refuses a capture, none replays, and all report the reason."""
    model = streamed("llama", device_budget="200KiB", codec="none")
    want = tokens(model)
    for _ in range(2):
        with patch.object(graph_runner.GraphRunner, "_capture", lambda *_: "of this test" if RANK == 1 else None):
            found, decoding = decoded(model)
        assert torch.equal(found, want)
        assert decoding == DecodeReport(reason="on rank 1: of this test"), decoding


@check  # slow: settings, updates
def classic_settings() -> None:
    want = steps(plain("llama"))
    for settings in (
        {"offload_backend": "prefetch", "offload_group_size": 2, "offload_num_in_group": 1},
        {"offload_backend": "uva", "cpu_offload_gb": 0.0005},
    ):
        model = streamed("llama", **settings)
        assert_same(steps(model), want)
        assert model.weightstream.plan.offloaded_nbytes
        model.weightstream.remove()


@check
def saving() -> None:
    """All ranks gather and one writes: the files equal the checkpoint."""
    model = streamed("llama", device_budget="200KiB", codec="compressed")
    target = FOLDER / "saved"
    model.save_pretrained(target)
    distributed.barrier()
    found, original = load_file(target / "model.safetensors"), load_file(FOLDER / "llama" / "model.safetensors")
    assert found.keys() == original.keys()
    for key, value in original.items():
        assert torch.equal(found[key], value), key
    model.weightstream.remove()


def update(model: Any) -> None:
    with torch.no_grad():
        layers = model.model.layers
        layers[1].mlp.down_proj.weight.mul_(1.5)  # a matrix that is cut by columns
        layers[1].mlp.gate_proj.weight.mul_(0.5)
        layers[1].mlp.up_proj.weight.data.add_(0.25)  # without a new version
        layers[1].self_attn.o_proj.weight.to_local().zero_()
        torch._foreach_mul_([layers[2].mlp.down_proj.weight, layers[2].mlp.up_proj.weight], 0.75)
        torch.nn.init.constant_(layers[2].self_attn.q_proj.weight, 0.125)
        layers[0].mlp.up_proj.weight.detach().mul_(2.0)


def updated(model: Any, reference: Any) -> None:
    """Update shards through the DTensor, between steps and in a step."""
    assert_same(steps(model), steps(reference))
    for of in (model, reference):
        update(of)
    want = steps(reference)
    for _ in range(2):
        assert_same(steps(model), want)

    @torch.no_grad()
    def shrink(mlp: Any, *_: Any) -> None:
        if DEVICE != "cpu":  # copies of this step may still be on their way, see docs/usage.md
            torch.accelerator.synchronize()
        mlp.up_proj.weight.mul_(0.5)
        mlp.down_proj.weight.mul_(1.25)

    hooks = [of.model.layers[k].mlp.register_forward_hook(shrink) for of in (model, reference) for k in (0, 2)]
    ids = torch.arange(1, 9, device=WHERE).view(1, 8)  # eager: a graph would not repeat the writes of the hooks
    for k in range(2):
        assert_same([model(ids + k).logits], [reference(ids + k).logits])
    for hook in hooks:
        hook.remove()
    want = steps(reference)
    assert_same(steps(model), want)
    model.weightstream.remove()
    if DEVICE == "cpu":
        assert_same(steps(model), want)


@check  # slow: settings, updates
def updates() -> None:
    updated(streamed("llama", device_budget="200KiB", codec="none"), plain("llama"))


@check  # slow: settings, updates
def updates_of_codes() -> None:
    updated(streamed("llama", device_budget="200KiB", codec="compressed"), plain("llama"))


@check  # slow: settings, updates
def updates_of_what_is_sharded_already() -> None:
    for codec in ("none", "compressed"):
        model = plain("llama")
        weightstream.offload(model, device=WHERE, device_budget="200KiB", codec=codec)
        updated(model, plain("llama"))


@check  # slow: settings, updates
def what_is_sharded_already() -> None:
    model = plain("llama")
    want = steps(model)
    with weightstream.offload(model, device=WHERE, device_budget=local_nbytes(model) // 2, codec="none"):
        assert_same(steps(model), want)
    assert_same(steps(model), want)


@check
def budgets_are_agreed() -> None:
    nbytes = plain_nbytes("llama")
    model = streamed("llama", device_budget=nbytes // (2 + RANK), host_budget=10 * nbytes, codec="none")
    plan = model.weightstream.plan
    found = Ranks().gather((plan.summary(), plan.budget, plan.step_s))
    assert all(each == found[0] for each in found), found
    assert plan.budget == nbytes // (1 + NUM)
    planner = model.weightstream._installed.replanning.inputs.planners[0]
    assert planner._host_budget == 10 * nbytes // NUM
    model.weightstream.remove()
    model = streamed("llama", device_budget=nbytes // 2, host_budget="50%", codec="none")
    planner = model.weightstream._installed.replanning.inputs.planners[0]
    assert planner._host_budget == pytest.approx(available_nbytes() / 2 / NUM, rel=0.2)
    model.weightstream.remove()


def planned_ahead(name: str) -> None:
    """The plan of these processes equals the plan that a single process makes, which rank 0 writes for the test."""
    settings = {"device_budget": plain_nbytes(name) // 2, "host_budget": "1GiB"}
    model = streamed(name, **settings)
    plan = model.weightstream.plan
    if DEVICE == "cpu":  # on a GPU, plans may use zero-copy
        ahead = weightstream.plan_model(FOLDER / name, device=WHERE, tp_size=NUM, **settings)
        for field in fields(Plan):
            if not field.name.endswith("_s"):  # another process may measure the machine again meanwhile
                assert getattr(ahead, field.name) == getattr(plan, field.name), field.name
    if RANK == 0:
        (FOLDER / f"{name}.plan").write_text(plan.to_json())
    model.weightstream.remove()


@check  # slow: settings, updates
def plans_made_ahead_of_experts() -> None:
    planned_ahead("mixtral")


@check
def plans_made_ahead() -> None:
    planned_ahead("qwen2")
    with pytest.raises(ConfigError, match=f"tp_size = {NUM + 1}, and {NUM} processes run"):
        weightstream.plan_model(FOLDER / "llama", device=WHERE, tp_size=NUM + 1, device_budget="1MiB")


@check
def ranks_that_have_one_device() -> None:
    """Ranks that all pass device="cuda:0" are refused. Equal numbers are fine if each process sees a GPU of its own."""
    ranks = Ranks()
    ranks.apart(f"GPU-{RANK}", "cuda:0")
    try:
        with ranks.together():
            ranks.apart("GPU-0", "cuda:0")
    except ConfigError as error:
        message = str(error)
    assert f"ranks 0, 1 have one device, on rank {RANK} cuda:0: give device='cuda', or none" in message
    if DEVICE == "cuda":
        nbytes = plain_nbytes("llama")
        try:
            weightstream.from_pretrained(
                FOLDER / "llama", device="cuda:0", device_budget=nbytes // 2, progress=False, **SHARDED
            )
        except ConfigError as error:
            message = str(error)
        assert "have one device" in message
    ranks.confirm()


@check
def a_refusal_is_reported_by_all_ranks() -> None:
    nbytes = plain_nbytes("llama")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PlanError("this rank has had enough")

    broken = (
        patch.object(OffloadBuilder, "attach", refuse)
        if RANK == 1
        else patch.object(OffloadBuilder, "_", 0, create=True)
    )
    with broken:
        try:
            streamed("llama", device_budget=nbytes // 2)
        except PlanError as error:
            message = str(error)
    assert ("rank 1 refused: " if RANK != 1 else "") + "this rank has had enough" == message
    try:
        streamed("llama" if RANK != 1 else "nowhere", device_budget=nbytes // 2)
    except (CheckpointError, weightstream.UnsupportedError, ValueError, OSError) as error:
        message = str(error)
    assert "nowhere" in message
    model = streamed("llama", device_budget=nbytes // 2)
    model.weightstream.remove()


@check
def a_refusal_while_tied_weights_are_compared() -> None:
    """A refusal while other ranks compare tied weights that the files have twice: no rank waits in an all-reduce."""
    message = ""
    try:
        streamed("tied" if RANK != 1 else "nowhere", device_budget="200KiB")
    except (CheckpointError, weightstream.UnsupportedError, ValueError, OSError) as error:
        message = str(error)
    assert "nowhere" in message
    model, want = streamed("tied", device_budget="200KiB"), steps(plain("tied"))
    assert_same(steps(model), want)
    model.weightstream.remove()


def compared(name: str, **plan: Any) -> None:
    """A head that transformers compares with the embedding before it reads anything is tied only if both are equal."""
    about = {"distributed_config": transformers.distributed.DistributedConfig(tp_size=NUM, **plan)}
    want = steps(transformers.AutoModelForCausalLM.from_pretrained(FOLDER / name, **about))
    settings = {"device": WHERE, "device_budget": "200KiB", "codec": "none", "progress": False}
    model = weightstream.from_pretrained(FOLDER / name, **about, **settings)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is (name == "tied")
    assert_same(steps(model), want)
    model.weightstream.remove()


@check  # slow: models
def a_head_that_is_not_the_embedding() -> None:
    compared("untied")


@check  # slow: models
def heads_by_columns() -> None:
    columns = {"model.embed_tokens": "embedding_colwise", "lm_head": "rowwise_split_input"}
    for name in ("tied", "untied") if "embedding_colwise" in ALL_PARALLEL_STYLES else ():  # not up to 5.20
        compared(name, tp_plan=columns)


@check  # slow: models
def names_that_are_mapped() -> None:
    """With the caller's `key_mapping`, joined tensors and columns stay in the files."""
    about = {"key_mapping": {"^transformer": "model"}}
    want = steps(transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "mixtral", **SHARDED))
    model = streamed("renamed", device_budget=2**20, codec="none", **about)
    assert not in_files(model)[1]
    assert_same(steps(model), want)
    model.weightstream.remove()


def slow(wrap: Callable[[Any], Any]) -> tuple[Any, list[torch.Tensor], Any]:
    """A model whose second rank has a wrapped backend, its outputs without the wrapper, and its streamer."""
    model = plain("llama")
    want, config = steps(model), resolve_config(None, device_budget=local_nbytes(model) // 2, codec="none")
    backend = backend_of(WHERE, config)
    backend = wrap(backend) if RANK == 1 else backend
    with torch.no_grad():
        return model, want, _offload(model, backend, config, CallerFacts(ranks=ranks_of(model)))


@check  # slow: settings, updates
def delays_on_one_rank() -> None:
    model, want, streamer = slow(lambda backend: Delay(backend, 3, 0.0005))
    with streamer:
        for _ in range(34):
            assert_same(steps(model), want)  # six steps each


@check
def an_error_on_one_rank() -> None:
    """The process of that rank ends. The others wait for it in an all-reduce, and torchrun ends them."""

    class Broken(Wrapper):
        num_left = 40

        def copy(self, copies: Any) -> None:
            self.num_left -= 1
            if not self.num_left:
                print(f"fails at {time.time()}", flush=True)
                raise weightstream.StoreError("the disk is gone")
            super().copy(copies)

    model, want, streamer = slow(Broken)
    with streamer:
        for _ in range(100):
            assert_same(steps(model), want)


def main() -> None:
    faulthandler.dump_traceback_later(150, exit=True)  # a rank that hangs prints its stacks
    wanted = transformers.distributed.DistributedConfig(**SHARDED["distributed_config"])
    join(wanted, weightstream.OffloadConfig())  # so that host tensors gather
    for name in sys.argv[3:]:
        CHECKS[name]()
        os.write(1, f"rank {RANK}: {name} holds\n".encode())  # print would make two calls
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
