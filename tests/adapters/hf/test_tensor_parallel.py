"""Tensor parallelism of transformers: each of two processes streams its shards. Their checks are in
sharded_checks.py."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

import weightstream
from models import TEXT
from weightstream import ConfigError, Plan, PlanError
from weightstream.adapters.hf import hub, tensor_parallel
from weightstream.adapters.hf.checkpoint_ranges import Gathered, TensorRange
from weightstream.api.pack import pack
from weightstream.api.plan_model import planner_inputs_of
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.store import pack as store
from weightstream.store.checkpoint import Checkpoint

transformers = pytest.importorskip("transformers")

from transformers.distributed import DistributedConfig  # noqa: E402
from transformers.distributed.sharding_utils import DtensorShardOperation  # noqa: E402

RANKS = 2
SCRIPT = Path(__file__).parents[2] / "support" / "sharded_checks.py"
CHECKS: list[tuple[str, str]] = re.findall(r"^@check(.*)\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
FAILING = "an_error_on_one_rank"
SHAPE = TEXT | {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3}
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True, "vocab_size": 132, "num_key_value_heads": 2}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_key_value_heads": 2}),
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="no two CUDA devices")],
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, shared by all workers of pytest: several jobs at once would take long on the same devices."""
    root = tmp_path_factory.getbasetemp()
    path = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "sharded"
    with FileLock(f"{path}.lock"):
        if not (path / "made").exists():
            make_checkpoints(path)
            (path / "made").touch()
    return path


def make_checkpoints(path: Path) -> None:
    for seed, (name, (kind, facts)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        config = kind(**SHAPE | facts, initializer_range=0.3)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(path / name)
    for name in ("tied", "untied"):
        shutil.copytree(path / "qwen2", path / name)
        tensors = load_file(path / name / "model.safetensors")
        head = tensors["model.embed_tokens.weight"].clone()
        if name == "untied":  # nor does any tensor begin at a multiple of 8 bytes
            head, tensors["a"] = head.flip(0).contiguous(), torch.zeros(1, dtype=torch.bfloat16)
        tensors["lm_head.weight"] = head
        save_file(tensors, path / name / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(path / "mixtral", path / "renamed")
    tensors = load_file(path / "renamed" / "model.safetensors")
    tensors = {re.sub("^model", "transformer", name): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "renamed" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "mixtral" / "config.json").read_text())  # its dtype is that of its tensors
    (path / "mixtral" / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    with patch.object(store, "_LEAST_CODED", 8192):
        pack(str(path / "llama"), path / "pack", codec="compressed")


def launched(device: str, folder: Path, *checks: str, by_torchrun: bool = True) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    run = [sys.executable, *torchrun * by_torchrun]
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    alone |= {"PYTHONPATH": os.pathsep.join(sys.path)} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    command = [*run, str(SCRIPT), device, str(folder), *checks]
    about: dict[str, Any] = {"env": os.environ | alone, "cwd": folder, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **about) as job:
        try:
            output = job.communicate(timeout=200)
        except subprocess.TimeoutExpired:  # the checks that hold, and the place where it hung, are printed all the same
            for process in (*psutil.Process(job.pid).children(recursive=True), job):
                process.kill()
            output = job.communicate()
    return subprocess.CompletedProcess(command, job.returncode, *output)


@pytest.fixture(scope="module", params=DEVICES)
def done(request: pytest.FixtureRequest, folder: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Output of all checks of a kind, from one job, which one worker of pytest runs."""

    @cache
    def checked(kind: str) -> subprocess.CompletedProcess[str]:
        results = folder / f"checked-{kind.strip(' #')}-{request.param}"
        with FileLock(f"{results}.lock"):
            if not results.exists():
                names = [name for of, name in CHECKS if of == kind and name != FAILING]
                # each process of torchrun imports the checks' modules; in CI they are imported only once
                by_torchrun = bool(kind) or request.param != "cpu"
                results.write_bytes(pickle.dumps(launched(request.param, folder, *names, by_torchrun=by_torchrun)))
        found: subprocess.CompletedProcess[str] = pickle.loads(results.read_bytes())
        return found

    return checked


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*each, marks=[pytest.mark.stress] * bool(each[0])) for each in CHECKS if each[1] != FAILING],
)
def test_on_each_rank(kind: str, name: str, done: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    for rank in range(RANKS):
        assert f"rank {rank}: {name} holds" in done(kind).stdout, done(kind).stderr[-4000:]


@pytest.mark.stress
@pytest.mark.parametrize("done", ["cpu"], indirect=True)
def test_one_process_makes_the_plan_of_all(folder: Path, done: Callable[[str], Any]) -> None:
    for kind in dict(CHECKS):
        done(kind)
    for name in ("qwen2", "mixtral"):
        found = Plan.from_json((folder / f"{name}.plan").read_text())
        about: dict[str, Any] = {"device": "cpu", "device_budget": found.budget, "host_budget": "1GiB"}
        assert found.offloaded_nbytes
        wanted = {"qwen2": {"tp_plan": "auto", "tp_size": RANKS}, "mixtral": {"distributed_config": {"tp_size": RANKS}}}
        planned = weightstream.plan_model(folder / name, **wanted[name], **about)
        for field in fields(Plan):
            if not field.name.endswith("_s"):  # the machine may have been measured again
                assert getattr(planned, field.name) == getattr(found, field.name), field.name
        assert not torch.distributed.is_initialized()
        whole = weightstream.plan_model(folder / name, tp_size=1, **about | {"device_budget": 4 * found.budget})
        assert whole.manifest.nbytes > 1.7 * found.manifest.nbytes
    in_codes = weightstream.plan_model(folder / "pack", tp_size=RANKS, device_budget="1MiB")
    assert (
        in_codes.manifest.decoded_nbytes
        == weightstream.plan_model(folder / "llama", tp_size=RANKS, device_budget="1MiB").manifest.decoded_nbytes
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "tokens"), [("llama", 1), ("llama", 16), ("qwen2", 1), ("mixtral", 1)])
def test_the_all_reduces_of_a_step_are_predicted(name: str, tokens: int, folder: Path) -> None:
    """Their number and sizes equal those of a step. Which modules make one depends on the version of transformers."""
    config = weightstream.OffloadConfig(device_budget="1MiB", tokens=tokens, context=32)
    (planner, *_) = planner_inputs_of(folder / name, config, device="cpu", tp_size=RANKS).planners
    ops = [op for ops in planner.demand.work.values() for op in ops if op.rate == "ranks"]
    made = all_reduces(transformers.AutoConfig.from_pretrained(folder / name), tokens)
    assert len(made) >= 2 * SHAPE["num_hidden_layers"]
    if name == "qwen2":  # its head reads the embedding's weight again: the mean of these two calls
        assert len(made) == 2 * SHAPE["num_hidden_layers"] + 1
        made[0] //= 2
    assert sorted(op.nbytes for op in ops) == sorted(made)
    (alone, *_) = planner_inputs_of(folder / name, config, device="cpu", tp_size=1).planners
    assert not [op for ops in alone.demand.work.values() for op in ops if op.rate == "ranks"]


class AllReduces(TorchDispatchMode):
    """The bytes of each all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its operators are seen next
            return NotImplemented
        if func in (torch.ops._c10d_functional.all_reduce.default, torch.ops.c10d.allreduce_.default):
            self.nbytes += [tensor.nbytes for tensor in tensors_in(args[0])]
        return func(*args, **kwargs or {})


def all_reduces(config: Any, tokens: int) -> list[int]:
    """The bytes of each all-reduce of one of several ranks."""
    distributed.init_process_group("fake", rank=0, world_size=RANKS)
    try:
        kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        model = hub.build(kind, config, torch.bfloat16, DistributedConfig(tp_size=RANKS))
        with torch.no_grad(), AllReduces() as found:
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device="meta"))
    finally:
        distributed.destroy_process_group()
    return found.nbytes


@pytest.mark.parametrize(
    ("shape", "placement", "module", "adds_up"),
    [
        ((8, 6), Shard(1), nn.Linear, True),
        ((8, 6), Shard(0), nn.Linear, False),
        ((8, 6), Replicate(), nn.Linear, False),
        ((8, 6), Shard(0), nn.Embedding, True),
        ((8, 6), Shard(-1), nn.Embedding, False),
        ((4, 8, 6), Shard(1), nn.Module, True),
        ((8,), Shard(0), nn.Module, False),  # heads have such tensors besides their weights
    ],
)
def test_modules_whose_outputs_are_all_reduced(
    shape: tuple[int, ...], placement: Any, module: Any, adds_up: bool
) -> None:
    distributed.init_process_group("fake", rank=0, world_size=2)
    try:
        mesh = distributed.init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.zeros(shape), mesh, [placement], src_data_rank=None)
        layer = module(*shape[::-1]) if module is not nn.Module else module()
        assert tensor_parallel.adds_up(layer, [weight, torch.zeros(shape)]) is adds_up
    finally:
        distributed.destroy_process_group()


def test_a_plan_wakes_no_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch for CUDA names an accelerator even if there is none."""

    def fail(*_: Any) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", fail)
    planned = weightstream.plan_model(folder / "llama", device="cpu", device_budget="1MiB", tp_size=4)
    assert planned.manifest.nbytes
    assert torch._C._get_accelerator() == torch.device("cuda")


def test_impossible_plans_are_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    about: dict[str, Any] = {"device": "cpu", "tp_size": 2}
    with pytest.raises(ConfigError, match="each process of tensor parallelism has one GPU"):
        weightstream.plan_model(folder / "llama", device_budget={0: "1MiB", 1: "1MiB"}, **about)
    known = {field.name for field in fields(DistributedConfig)}  # these differ between versions of transformers
    experts = {"ep_size": 2} if "ep_size" in known else {"enable_expert_parallel": True}
    for others in ({"fsdp_size": 2}, {"pp_size": 2}, experts):
        with pytest.raises(ConfigError, match=f"{next(iter(others))}: only tp_size shards a model that streams"):
            weightstream.plan_model(folder / "mixtral", distributed_config={"tp_size": 2, **others})
    with pytest.raises(PlanError):
        weightstream.plan_model(folder / "llama", device_budget="1KiB", **about)
    with pytest.raises(ConfigError, match=r"tp_size = 2\.5 is not a number of processes"):
        weightstream.plan_model(folder / "llama", tp_size=2.5)
    unknown = {"tp_size": 2, "tp_plan": {"nowhere": "colwise"}}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        refused = None
        try:
            weightstream.plan_model(folder / "llama", device="cpu", device_budget="1MiB", distributed_config=unknown)
        except ConfigError as error:
            refused = str(error)
    said = [str(warning.message) for warning in found] if refused is None else [refused]
    # transformers up to 5.17 warns of it, later versions refuse it
    assert ["nowhere" in text for text in said] == [True]
    caplog.clear()
    weightstream.plan_model(folder / "llama", device="cpu", device_budget="1MiB", tp_size=8)
    assert ["cannot be traced" in message and "heads" in message for message in caplog.messages] == [True]
    for alone in ({"tp_size": 1}, {"tp_size": None}):
        several = weightstream.plan_model(folder / "llama", gpu="H200", gpus=2, device_budget="1MiB", **alone)
        assert len(several.plans) == 2
    assert not torch.distributed.is_initialized()


@pytest.mark.stress
@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_fails_ends_the_job(device: str, folder: Path) -> None:
    done, ended = launched(device, folder, FAILING), time.time()
    assert done.returncode != 0
    assert "the disk is gone" in done.stderr
    assert re.search(r"rank +: 1 \(local_rank: 1\)", done.stderr)
    assert "holds" not in done.stdout
    assert ended - float(re.findall(r"fails at ([\d.]+)", done.stdout)[0]) < 10


def test_without_other_processes(folder: Path) -> None:
    for settings in ({"distributed_config": {"tp_size": 2}}, {"tp_plan": "auto", "tp_size": 2}):
        with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
            weightstream.from_pretrained(folder / "llama", device="cpu", **settings)
    with pytest.raises(ConfigError, match="fsdp_size: only tp_size shards a model that streams"):
        weightstream.from_pretrained(folder / "llama", device="cpu", distributed_config={"fsdp_size": 2})
    with pytest.raises(ConfigError, match="tp_size as well as distributed_config"):
        weightstream.from_pretrained(folder / "llama", device="cpu", distributed_config={"tp_size": 2}, tp_size=2)
    for wrong in ({"tp_sise": 2}, "auto", {"tp_size": "two"}):
        with pytest.raises(ConfigError, match="distributed_config = "):
            weightstream.from_pretrained(folder / "llama", device="cpu", distributed_config=wrong)
    for more in ({"gpus": 2}, {"device_budget": {0: "1MiB", 1: "1MiB"}}):
        with pytest.raises(ConfigError, match="each process of tensor parallelism has one GPU"):
            weightstream.from_pretrained(folder / "llama", distributed_config={"tp_size": 2}, **more)
    model = weightstream.from_pretrained(folder / "llama", device="cpu", distributed_config={"tp_size": 1})
    model.weightstream.remove()


CUTS = {
    "rows": ((7, 12), lambda: Shard(0)),
    "columns": ((7, 12), lambda: Shard(1)),
    "elements": ((10,), lambda: Shard(0)),
    "matrices": ((4, 6, 8), lambda: Shard(0)),
    "rows of matrices": ((4, 7, 8), lambda: Shard(1)),
    "columns of matrices": ((4, 6, 10), lambda: Shard(-1)),
    "rows of halves": ((4, 12, 8), lambda: _StridedShard(1, split_factor=2)),
    "rows of halves of one": ((12, 8), lambda: _StridedShard(0, split_factor=2)),
    "columns of halves": ((4, 6, 12), lambda: _StridedShard(-1, split_factor=2)),
    "all": ((4, 6, 8), Replicate),
}
READ_AT_ONCE = {"columns of halves"}


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("name", CUTS)
def test_shards_are_cut_as_transformers_cuts_them(name: str, rank: int, tmp_path: Path) -> None:
    """The shards of tensors that a file has in pieces, in any order."""
    shape, placement = CUTS[name]
    whole = torch.randn(shape).to(torch.bfloat16)
    pieces = list(whole.split(1 if len(shape) == 3 else 5))
    order = torch.randperm(len(pieces)).tolist()
    save_file({f"{order.index(i):02}": piece.clone() for i, piece in enumerate(pieces)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    ranges = [TensorRange(f"{order.index(i):02}", 0, piece.nbytes) for i, piece in enumerate(pieces)]
    distributed.init_process_group("fake", rank=rank, world_size=3)
    try:
        mesh = distributed.init_device_mesh("cpu", (3,))
        with torch.device("meta"):
            param = distribute_tensor(torch.empty(shape), mesh, [placement()], src_data_rank=None)
        wanted = DtensorShardOperation(param).shard_tensor(whole)
        with tensor_parallel.on_host(transformers.LlamaForCausalLM):
            found = DtensorShardOperation(param).shard_tensor(Gathered("w", ranges, whole, checkpoint))
    finally:
        distributed.destroy_process_group()
    memories = [*checkpoint.mappings, *checkpoint.lazy.values()]
    is_there = any(memory.locate(found.data_ptr()) is not None for memory in memories)
    assert is_there is (name not in READ_AT_ONCE and wanted.numel() > 0)
    for memory in checkpoint.lazy.values():
        memory.populate(0, memory.nbytes)
    assert found.is_contiguous()
    assert torch.equal(found, wanted)
