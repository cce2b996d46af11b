"""Messages between the ranks of an engine, with stand-ins for the imported modules of vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys, types
from datetime import timedelta

import torch
import torch.multiprocessing as multiprocessing
from torch import distributed

for name in ("vllm", "vllm.envs", "vllm.config", "vllm.distributed", "vllm.distributed.parallel_state",
             "vllm.model_executor", "vllm.model_executor.offloader", "vllm.model_executor.offloader.base",
             "vllm.model_executor.model_loader", "vllm.model_executor.model_loader.utils",
             "vllm.model_executor.model_loader.reload"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["vllm"].envs = sys.modules["vllm.envs"]
sys.modules["vllm.config"].set_current_vllm_config = None
sys.modules["vllm.distributed.parallel_state"].get_world_group = None
sys.modules["vllm.model_executor.model_loader"].utils = sys.modules["vllm.model_executor.model_loader.utils"]
sys.modules["vllm.model_executor.model_loader.reload"].layerwise = None
base = sys.modules["vllm.model_executor.offloader"].base = sys.modules["vllm.model_executor.offloader.base"]
base.BaseOffloader = base.NoopOffloader = object

from weightstream.errors import PlanError
from weightstream.integrations.vllm import plugin as host



def taken_over(rank, where):
    engine = object.__new__(host.VllmWorker)
    engine._worker = types.SimpleNamespace(device=torch.device("cpu"), model_runner=None)
    engine._profile = distributed.barrier
    engine._report = lambda _: None

    def fail(at):
        if at == where and rank:
            raise PlanError("this rank has had enough")

    def stream():  # rank 0 learns for a step more
        fail("at once")
        for step in range(3 - rank):
            engine._step(None)
            fail("after a step")
        fail("at the end")

    engine._stream = stream
    try:
        engine.take_over()
        return "taken over"
    except PlanError as error:
        return str(error)


def run(rank):
    store = distributed.FileStore(sys.argv[1], 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    world = types.SimpleNamespace(world_size=2, cpu_group=distributed.group.WORLD)
    host.get_world_group = lambda: world
    for where in ("nowhere", "at once", "after a step", "at the end"):
        os.write(1, f"{where}: rank {rank}: {taken_over(rank, where)}\\n".encode())  # at once, as the other writes too
        distributed.barrier()
    os._exit(0)  # threads of gloo may abort an interpreter that ends


multiprocessing.start_processes(run, nprocs=2, start_method="fork")
"""


def test_a_failing_rank_reports_to_the_others(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
    refused = "this rank has had enough"
    messages = {"nowhere: rank 0: taken over", "nowhere: rank 1: taken over"}
    for where in ("at once", "after a step", "at the end"):
        messages |= {f"{where}: rank 0: rank 1 refused: {refused}", f"{where}: rank 1: {refused}"}
    assert set(done.stdout.splitlines()) == messages, done.stderr
