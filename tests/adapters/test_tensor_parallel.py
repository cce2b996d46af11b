"""Tensor parallelism of transformers: each of two processes offloads its shards. The bits are those of the same model
in the same processes before that."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from models import TEXT

transformers = pytest.importorskip("transformers")

RANKS = 2
SCRIPT = """
import os, sys, torch, transformers, weightstream
from transformers.distributed import DistributedConfig

folder, rank = sys.argv[1], int(os.environ["RANK"])
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.bfloat16, distributed_config=DistributedConfig(tp_size=2)
)
ids = torch.arange(1, 9).view(1, 8)
options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

def steps():
    with torch.no_grad():
        return [model(ids + k).logits for k in range(4)] + [weightstream.generate(model, ids, **options)]

def same(found):
    return all(map(torch.equal, found, want))

want = steps()
shards = [p.to_local() for p in model.parameters() if hasattr(p, "to_local")]
assert len(shards) > 30
nbytes = sum(shard.nbytes for shard in shards)
whole = model.lm_head.weight.full_tensor()
for codec, share in (("none", 2), ("none", 3), ("small", 2)):
    with weightstream.offload(model, device="cpu", device_budget=nbytes // share, codec=codec) as streamer:
        assert streamer.plan.step_nbytes > nbytes // 4
        assert bool(streamer.plan.manifest.codes) is (codec == "small")
        for _ in range(3):
            assert same(steps()), codec
        assert torch.equal(model.lm_head.weight.full_tensor(), whole)
    assert same(steps())
if "fails" in sys.argv and rank == 1:
    raise RuntimeError("rank 1 has had enough")
if "fails" in sys.argv:
    steps()  # waits for the other
print(f"rank {rank} is done")
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**TEXT | {"num_hidden_layers": 6}, initializer_range=0.3)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def launched(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [*run, str(script), str(folder), *flags],
        env=os.environ | alone,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_bits_are_those_of_the_same_ranks_before(folder: Path) -> None:
    done = launched(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n"))[-RANKS:] == ["rank 0 is done", "rank 1 is done"]


@pytest.mark.stress
def test_a_rank_that_fails_ends_the_job(folder: Path) -> None:
    started = time.monotonic()
    done = launched(folder, "fails")
    assert done.returncode != 0
    assert "rank 1 has had enough" in done.stderr
    assert "is done" not in done.stdout
    assert time.monotonic() - started < 60
