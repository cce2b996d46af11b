"""Memory rises with the budget, not with the model: a checkpoint of 600 MiB in a budget of 256 MiB."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from itertools import groupby
from pathlib import Path

import pytest
from safetensors.torch import save_file

from models import llama_tensors

transformers = pytest.importorskip("transformers")

LAYERS = 6
BUDGET = 256 << 20


def shard_of(name: str) -> str:
    return f"shard-{name.split('.')[2] if 'layers' in name else name}.safetensors"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded Llama of 600 MiB, one shard per layer, written without holding all of it."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": LAYERS, "num_attention_heads": 16}
    weight_map: dict[str, str] = {}
    for shard, members in groupby(llama_tensors(folder, **sizes, vocab_size=1024), key=lambda pair: shard_of(pair[0])):
        tensors = dict(members)
        weight_map |= dict.fromkeys(tensors, shard)
        save_file(tensors, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


RUN = """
    import json, sys, threading, time
    import torch, transformers, weightstream
    import transformers.models.llama.modeling_llama

    def anonymous():
        with open("/proc/self/status") as status:
            return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))

    own, peak, stop = anonymous(), 0, threading.Event()

    def sample():
        global peak
        while not stop.wait(0.004):
            peak = max(peak, anonymous())

    sampler = threading.Thread(target=sample)
    sampler.start()
    model = weightstream.from_pretrained(sys.argv[1], device="cpu", device_budget=int(sys.argv[2]), progress=False)
    loaded = anonymous()
    prompt = torch.arange(1, 9)[None]
    tokens = model.generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    stop.set(); sampler.join()
    stats = model.weightstream.stats()
    print(json.dumps(dict(own=own, loaded=loaded, peak=peak, tokens=tokens.tolist(), held=stats.held_nbytes,
                          model=stats.model_nbytes, steps=stats.steps, filled=stats.filled_nbytes)))
"""


@pytest.mark.slow
def test_peak_memory_follows_the_budget(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), str(checkpoint), str(BUDGET)],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["model"] > 2 * BUDGET
    assert found["steps"] == 3
    assert found["filled"] > 2 * (found["model"] - BUDGET)
    assert found["held"]["device"] <= BUDGET
    assert found["held"]["host"] + found["held"]["device"] >= found["model"]
    assert found["peak"] < 1.15 * (BUDGET + found["own"]), f"{found} MiB: {found['peak'] >> 20}"
