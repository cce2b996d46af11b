"""Captured generation on a GPU: the tokens of the plain model, from real graphs, resident and offloaded."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import weightstream
from generating import MODELS, STATIC, build, options

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.generation.generation import generate  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LONG = 1500
WINDOWED = ("gemma2", "mistral")


def halved(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters()) // 2


def prompt(length: int = 5, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(length)).cuda()


def captured(model: Any, ids: torch.Tensor, **more: Any) -> tuple[Any, DecodeReport]:
    found: list[DecodeReport] = []
    return generate(model, ids, on_decoding=found.append, **options(**more)), found[0]


CALLS: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((5, 1), {}),
    ((5, 1), {}),
    ((9, 3), {}),
    ((1, 1), {}),
    ((7, 2), {"do_sample": True, "temperature": 1.5}),
]


@pytest.mark.parametrize("offloaded", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logits_equal_the_plain_models(name: str, offloaded: bool) -> None:
    kept = {"return_dict_in_generate": True, "output_logits": True}
    plain, model = build(MODELS[name]()).cuda(), build(MODELS[name]())
    if offloaded:
        weightstream.offload(model, device="cuda", device_budget=halved(model))
    else:
        model.cuda()
    for call, (shape, more) in enumerate(CALLS):
        ids = prompt(*shape)
        torch.manual_seed(5)
        want = plain.generate(ids, **options(**kept, **more), **STATIC)
        torch.manual_seed(5)
        got, decoding = captured(model, ids, **kept, **more)
        assert torch.equal(got.sequences, want.sequences)
        assert torch.equal(torch.stack(got.logits), torch.stack(want.logits))
        learned = offloaded and not call  # in the step after the first prompt
        assert decoding == DecodeReport(replays=(21 if name in WINDOWED else 22) - learned), (shape, decoding)
    if offloaded:
        stats = model.weightstream.stats()
        assert stats.filled_nbytes > 0
        assert stats.unplanned_fills == 0
        model.weightstream.remove()


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("offloaded", [False, True], ids=["resident", "offloaded"])
def test_a_text_that_ends_early(sampled: bool, offloaded: bool) -> None:
    """The loop checks for end-of-text one step late, with one more step in flight."""
    plain, model = build(MODELS["llama"]()).cuda(), build(MODELS["llama"]())
    if offloaded:
        weightstream.offload(model, device="cuda", device_budget=halved(model))
    else:
        model.cuda()
    for at in (3, 11, 18):
        options = {"max_new_tokens": 24, "pad_token_id": 0, "repetition_penalty": 2.0, "eos_token_id": None}
        options |= {"do_sample": True, "temperature": 1.5} if sampled else {"do_sample": False}
        torch.manual_seed(at)
        options["eos_token_id"] = int(plain.generate(prompt(), **options, **STATIC)[0, 4 + at])
        torch.manual_seed(at)
        want, then = plain.generate(prompt(), **options, **STATIC), torch.rand(4, device="cuda")
        found: list[DecodeReport] = []
        torch.manual_seed(at)
        got, now = generate(model, prompt(), on_decoding=found.append, **options), torch.rand(4, device="cuda")
        assert torch.equal(got, want)
        assert torch.equal(now, then)
        steps, learned = got.shape[1] - 5 - 1, offloaded and at == 3
        assert found == [
            DecodeReport(replays=steps - learned if steps > 1 + learned else 0)
        ]  # one more than plain steps
    if offloaded:
        assert model.weightstream.stats().unplanned_fills == 0
        model.weightstream.remove()


def test_padding_and_stopping_criteria() -> None:
    plain, model = build(MODELS["llama"]()).cuda(), build(MODELS["llama"]())
    weightstream.offload(model, device="cuda", device_budget=halved(model))
    ids = prompt(6, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :1] = 0
    done = torch.ones(3, dtype=torch.bool, device="cuda")
    stop = transformers.StoppingCriteriaList([lambda ids, scores, **_: done & (ids.shape[1] >= 15)])
    more = {"attention_mask": mask, "stopping_criteria": stop}
    want = plain.generate(ids, **options(**more), **STATIC)
    got, decoding = captured(model, ids, **more)
    model.weightstream.remove()
    assert torch.equal(got, want)
    assert got.shape[1] == 15
    assert decoding == DecodeReport(replays=15 - 6 - 1 - 1 - 1)


class Reading(transformers.LlamaForCausalLM):
    """A forward that reads a value on the host."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        output = super().forward(*args, **kwargs)
        if output.logits.argmax().item() % 2:
            output.logits = output.logits.flip(-1)
        return output


class Copying(transformers.LlamaForCausalLM):
    """A forward that copies pageable memory to the device."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * torch.tensor([3.0, 5.0]).to("cuda").prod()
        return output


class Hiding(transformers.LlamaForCausalLM):
    """A forward that synchronises without an operator, so that the capture itself fails."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        output = super().forward(*args, **kwargs)
        torch.cuda.current_stream().synchronize()
        return output


@pytest.mark.parametrize("offloaded", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Reading, "the model waits for the device in aten._local_scalar_dense.default"),
        (Copying, "the model waits for the device in aten._to_copy.default"),
        (Hiding, "the capture failed: "),
    ],
)
def test_a_forward_that_cannot_be_captured_runs_eager(cls: Any, reason: str, offloaded: bool) -> None:
    config = MODELS["llama"]()
    plain, model = build(config, cls).cuda(), build(config, cls)
    other = build(config).cuda()
    if offloaded:
        weightstream.offload(model, device="cuda", device_budget=halved(model))
    else:
        model.cuda()
    stream = torch.cuda.current_stream()
    for _ in range(2):
        torch.manual_seed(5)
        want = plain.generate(prompt(), **options(do_sample=True), **STATIC)
        torch.manual_seed(5)
        got, decoding = captured(model, prompt(), do_sample=True)  # random numbers work after a failed capture
        assert torch.equal(got, want)
        assert decoding.reason is not None
        assert decoding.reason.startswith(reason), decoding
        assert decoding.replays == 0
        assert torch.cuda.current_stream() == stream
    if offloaded:
        model.weightstream.remove()
    # nothing is left that would prevent the capture of another model, or the release of memory
    want = other.generate(prompt(), **options(), **STATIC)
    got, decoding = captured(other, prompt())
    assert torch.equal(got, want)
    assert decoding == DecodeReport(replays=22)
    reserved = []
    for _ in range(5):  # memory that another stream used is released only while torch sees no capture in progress
        torch.empty(64 << 20, device="cuda").record_stream(torch.cuda.Stream())
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[0]


def deep() -> Any:
    return transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


class Memory(transformers.StoppingCriteria):
    """Device memory after each token."""

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.allocated.append(torch.cuda.memory_allocated())
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def test_long_generation_captured_and_eager_with_flat_memory() -> None:
    plain, model = build(deep()).cuda(), build(deep())
    for each in (plain, model):  # the plain model's bf16 SDPA is not repeatable over so many tokens on an H200
        each.set_attn_implementation("eager")
    want, again = (plain.generate(prompt(), **options(LONG), **STATIC) for _ in range(2))
    assert torch.equal(again, want)
    del plain
    with weightstream.offload(model, device="cuda", device_budget=halved(model)) as streamer:
        model(prompt())
        with streamer.step():
            eager = model.generate(prompt(), **options(LONG), **STATIC)
        steps = streamer.stats().steps
        memory = Memory()
        got, decoding = captured(
            model, prompt(), num=LONG, stopping_criteria=transformers.StoppingCriteriaList([memory])
        )
        assert streamer.stats().steps - steps in (LONG, LONG + 1)  # the captured forward ran nothing
    assert torch.equal(eager, want)
    assert torch.equal(got, want)
    assert len(set(want[0].tolist())) > 100
    assert decoding == DecodeReport(replays=LONG - 2)
    grown = max(memory.allocated[2:]) - memory.allocated[2]
    assert grown <= 64 * LONG  # the tokens themselves, and as many masks


def test_repeated_calls_hold_no_more_memory() -> None:
    model = build(deep())
    held = []
    with weightstream.offload(model, device="cuda", device_budget=halved(model)):
        for length in (5, 9, 5, 9):
            captured(model, prompt(length))
            gc.collect()
            held.append(torch.cuda.memory_allocated())
    assert len(set(held[1:])) == 1
