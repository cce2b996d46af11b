"""Predictions of training steps on a GPU: the peak of memory, and the time of a step, are those of the plan."""

from __future__ import annotations

import itertools
import statistics
from typing import Any, NamedTuple

import pytest
import torch

import weightstream
from weightstream.measure.profile import load_profile

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

RANK, STEPS, SETTLING = 16, 8, 4
# wide enough that a step of 4,096 tokens takes the GPU longer than any host needs to launch it
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6, "num_attention_heads": 32,
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


class Found(NamedTuple):
    """Seconds and peak of a step, and the predictions; no model, so that a failed test keeps no memory."""

    measured_s: float
    predicted_s: float
    peak: int
    predicted_peak: int
    nbytes: int
    step_nbytes: int


def found(tokens: int, *, checkpoints: bool) -> Found:
    model = llama()
    profile = load_profile(torch.device("cuda", torch.cuda.current_device()))
    step = {"tokens": tokens, "rank": RANK, "checkpoints": checkpoints}
    with weightstream.offload(model, device_budget="0.5GiB", train=step) as streamer:
        plan = streamer.plan
        assert plan.offloaded_nbytes > GIB // 2
        training = Training(model, tokens, checkpoints=checkpoints)
        training.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        measured_s = statistics.median(training.seconds())
        peak = torch.cuda.max_memory_allocated()
        nbytes_before = streamer.stats().filled_nbytes
        training.step()
        torch.cuda.synchronize()
        workspace = profile.workspace_nbytes if profile is not None else 0
        gradients = sum(adapter.nbytes for adapter in training.adapters)  # they come after the peak
        return Found(
            measured_s=measured_s,
            predicted_s=plan.step_s,
            peak=peak,
            predicted_peak=plan.device_nbytes + plan.beside_nbytes + workspace - gradients,
            nbytes=streamer.stats().filled_nbytes - nbytes_before,
            step_nbytes=streamer.plan.step_nbytes,
        )


@pytest.mark.parametrize(("tokens", "checkpoints"), [(4096, True), (8192, True), (4096, False)])
def test_peak_and_time_are_those_of_the_plan(tokens: int, checkpoints: bool) -> None:
    of = found(tokens, checkpoints=checkpoints)
    times = f"{1e3 * of.measured_s:.1f} ms, predicted {1e3 * of.predicted_s:.1f}"
    print(f"{tokens} tokens: {times}; peak {of.peak / GIB:.3f} GiB, predicted {of.predicted_peak / GIB:.3f}")
    assert of.nbytes == of.step_nbytes
    assert of.peak == pytest.approx(of.predicted_peak, rel=0.05)
    assert of.measured_s == pytest.approx(of.predicted_s, rel=0.07)
