"""Predictions of training steps on a GPU: the peak of memory, and the time of a step, are those of the plan."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
import torch

import weightstream
from weightstream.measure.profile import load_profile

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

RANK, STEPS, SETTLING = 16, 8, 4
SHAPE = {"hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 12, "num_attention_heads": 16,
         "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192}  # fmt: skip
GIB = 2**30


def llama() -> Any:
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return model.requires_grad_(False)


def enable_checkpoints(model: Any) -> None:
    name = "activation_checkpointing_enable"
    (getattr(model, name) if hasattr(model, name) else model.gradient_checkpointing_enable)()


class Training:
    """Steps of adapters in float32 under autocast, as transformers' Trainer runs them with `bf16=True`."""

    def __init__(self, model: Any, tokens: int, *, checkpoints: bool) -> None:
        if checkpoints:
            enable_checkpoints(model)
        torch.manual_seed(3)
        self.model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))
        self.model.train()
        self.adapters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        assert {adapter.dtype for adapter in self.adapters} == {torch.float32}
        self.optimizer = torch.optim.AdamW(self.adapters, lr=1e-4)
        self.ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens), device="cuda")

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self) -> list[float]:
        """The seconds of each step, from its end to that of the next one."""
        for _ in range(SETTLING):
            self.step()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.step()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


@pytest.mark.parametrize(("tokens", "checkpoints"), [(2048, True), (4096, True), (2048, False)])
def test_peak_and_time_are_those_of_the_plan(tokens: int, checkpoints: bool) -> None:
    step = {"tokens": tokens, "rank": RANK, "checkpoints": checkpoints}
    model = llama()
    profile = load_profile(torch.device("cuda", torch.cuda.current_device()))
    with weightstream.offload(model, device_budget="0.5GiB", train=step) as streamer:
        plan = streamer.plan
        assert plan.offloaded_nbytes > GIB // 2
        training = Training(model, tokens, checkpoints=checkpoints)
        training.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        measured = statistics.median(training.seconds())
        peak = torch.cuda.max_memory_allocated()
        stats = streamer.stats()
        bytes_before = stats.filled_nbytes
        training.step()
        torch.cuda.synchronize()
        assert streamer.stats().filled_nbytes - bytes_before == streamer.plan.step_nbytes
        workspace = profile.workspace_nbytes if profile is not None else 0
        gradients = sum(adapter.nbytes for adapter in training.adapters)  # they come after the peak
        predicted = plan.device_nbytes + plan.beside_nbytes + workspace - gradients
        times = f"{1e3 * measured:.1f} ms, predicted {1e3 * plan.step_s:.1f}"
        print(f"{tokens} tokens: {times}; peak {peak / GIB:.3f} GiB, predicted {predicted / GIB:.3f}")
        assert peak == pytest.approx(predicted, rel=0.05)
        assert measured == pytest.approx(plan.step_s, rel=0.07)
