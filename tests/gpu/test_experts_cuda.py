"""Experts on a GPU: rows selected by ids on the device, decoded or cached, in captured generation, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from weightstream.adapters.modules import moe as adapter
from weightstream.runtime.devices.cuda import CudaBackend
from weightstream.runtime.experts.prefetch import Ahead
from weightstream.runtime.experts.slot_cache import Lru, RowPiece, SlotCache, SlotStack, _OnDevice
from weightstream.runtime.trace import total

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_ROWS, NUM_SLOTS, LENGTHS = 64, 24, (24576, 8200)  # bytes of a row's parts: whole chunks, and part of one
NUM_EXPERTS, TOP_K, LAYERS = 128, 4, 8  # of 1.5 MiB, so the link takes longer than the host
PROMPT, NEW = 40, 24


def test_ten_thousand_steps_equal_a_plain_lru() -> None:
    """Compare slots, owners, counters and the bytes in the slots after each step."""
    backend = CudaBackend(torch.device("cuda", torch.cuda.current_device()))
    generator, rng = torch.Generator().manual_seed(5), random.Random(5)
    host = [torch.randint(256, (NUM_ROWS, n), dtype=torch.uint8, generator=generator).pin_memory() for n in LENGTHS]
    shown = [backend.device_view(memory.view(-1)).view(NUM_ROWS, -1) for memory in host]
    stride = sum(LENGTHS) + 512
    memory = torch.full((NUM_SLOTS, stride), 77, dtype=torch.uint8, device="cuda")
    pieces = [RowPiece(rows=tuple(shown[0]), at=0), RowPiece(rows=tuple(shown[1]), at=LENGTHS[0])]
    slots, table = SlotCache([SlotStack(memory, pieces)], NUM_ROWS), Lru(NUM_SLOTS)
    wanted = torch.full((NUM_SLOTS, stride), 77, dtype=torch.uint8)
    order = list(range(NUM_ROWS))
    for step in range(10_000):
        if step % 9 == 0:
            rng.shuffle(order)
        num = rng.choice((1, 4, 8, NUM_SLOTS))
        rows = [order[min(NUM_ROWS - 1, int(rng.expovariate(1 / 12)))] for _ in range(num)]
        if step % 3 == 0:
            guess, most = rng.choices(rows, k=4) + rng.choices(order, k=2), rng.choice((1, 2, 8))
            slots.fetch_ahead(torch.tensor(guess, device="cuda"), most)
            for row, slot in table.guess(guess, most):
                wanted[slot, : sum(LENGTHS)] = torch.cat([memory[row] for memory in host])
        found = slots.resolve(torch.tensor(rows, device="cuda"))
        places, missed = table.resolve(rows)
        for row, slot in missed:
            wanted[slot, : sum(LENGTHS)] = torch.cat([memory[row] for memory in host])
        if step < 50 or step % 50 == 0:
            assert found.tolist() == places, step
            assert slots.counts() == table.counts(), step
        if step % 500 == 0:
            assert torch.equal(memory.cpu(), wanted), step
    assert min(table.counts()) > 0
    backend.close()


def mixture(kind: str = "Qwen3Moe") -> Any:
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
    sizes |= {"vocab_size": 512, "num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "intermediate_size": 512}
    sizes |= {"moe_intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False, "pad_token_id": 0}
    if kind == "GptOss":
        sizes |= {"num_local_experts": NUM_EXPERTS}
    config = getattr(transformers, f"{kind}Config")(**sizes, eos_token_id=None)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    generator = torch.Generator("cuda").manual_seed(3)
    with torch.no_grad():  # buffers are not in the checkpoint, and experts should matter
        for param in model.parameters():
            scale = 4 * min(param.shape[-2:]) ** -0.5 if param.dim() > 2 else 0.2
            param.copy_(torch.randn(param.shape, generator=generator, device="cuda") * scale)
    return model


def nbytes(model: Any) -> tuple[int, int]:
    """Bytes of the model, and of its experts."""
    return sum(p.nbytes for p in model.parameters()), sum(
        p.nbytes for n, p in model.named_parameters() if "experts" in n
    )


def generated(model: Any, ids: torch.Tensor, replays: int = 1, **more: Any) -> list[torch.Tensor]:
    reports: list[Any] = []
    options = {
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        **more,
    }
    torch.manual_seed(7)
    out = weightstream.generate(model, ids, on_decoding=reports.append, output_logits=True, **options)
    assert reports[0].replays >= replays, reports
    return [logits.cpu() for logits in out.logits]


def prompt(batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 500, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).cuda()


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted) == NEW
    different = [index for index, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]
    assert not different, different


FORMS = {
    "coded": ("compressed", 0.92),
    "cached": ("none", 0.4),
    "cached, coded": ("compressed", 0.4),
    "few slots": ("auto", 0.22),
}


@contextmanager
def offloaded(model: Any, form: str) -> Iterator[Any]:
    """Offload with a share of the experts' bytes on the device, and a buffer for one layer of them."""
    codec, share = FORMS[form]
    whole, experts = nbytes(model)
    budget = int(whole - experts + experts * share + experts / LAYERS)
    with weightstream.offload(model, device_budget=budget, codec=codec, context=128) as streamer:
        assert bool(streamer.plan.cached) is (form != "coded"), streamer.plan
        assert bool(streamer.plan.manifest.codes) is (codec != "none"), streamer.plan
        yield streamer


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("form", FORMS)
def test_captured_generation_has_the_plain_bits(form: str, kind: str) -> None:
    model, ids = mixture(kind), prompt()
    wanted = generated(model, ids)
    with offloaded(model, form) as streamer:
        for _ in range(2):
            assert_same(generated(model, ids), wanted)
        stats = streamer.stats()
        assert (stats.experts.fetched > 0) is (form != "coded"), stats
        assert stats.fills == 0
    assert_same(generated(model, ids), wanted)


@pytest.mark.parametrize("form", ["cached", "cached, coded"])
def test_hits_and_fetches_in_graphs_are_in_traces_and_in_the_plan(form: str) -> None:
    model, ids = mixture(), prompt()
    with offloaded(model, form) as streamer:
        generated(model, ids)
        before = streamer.stats().experts
        with streamer.trace() as trace:
            generated(model, ids.flip(-1))  # with the same prompt all experts would be hits
        during = streamer.stats().experts
        assert total(trace.experts.values()) == tuple(b - a for a, b in zip(before, during, strict=True))
        assert len(trace.experts) == LAYERS
        assert min(found + fetched for found, fetched, *_ in trace.experts.values()) >= (NEW - 2) * TOP_K
        assert min(total(trace.experts.values())[:3]) > 0
        while sum(streamer.stats().experts[:2]) < 40 * LAYERS * streamer.plan.num_slots:
            generated(model, ids)
        found, fetched, *_ = streamer.stats().experts
        assert streamer._installed.replanning.inputs.planners[0].counts is not None
        assert streamer.plan.found_share == pytest.approx(found / (found + fetched), abs=0.1)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("form", FORMS)
def test_batches_of_more_ids_than_there_are_slots(form: str, kind: str) -> None:
    """12 ids, which may all have slots; 160 ids of 128 experts, in waves; and 320, which read whole stacks."""
    model, seen = mixture(kind), []
    wanted = {batch: generated(model, prompt(batch)) for batch in (3, 40, 80)}
    with offloaded(model, form) as streamer:
        for batch in (3, 40, 80, 3):
            assert_same(generated(model, prompt(batch)), wanted[batch])
            seen.append(sum(streamer.stats().experts[:2]))
    is_cached = form != "coded"
    assert (0 < seen[0] < seen[1] == seen[2] < seen[3]) if is_cached else seen == [0] * 4, seen


def test_several_tokens_are_multiplied_in_groups() -> None:
    """Where torch has a kernel for that with the same bits, as on an H100 and an H200."""
    if not adapter.cuda.multiplies_groups(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this GPU multiplies group by group")
    model, ids = mixture(), prompt(8)
    with offloaded(model, "cached"):
        adapter._EQUAL.clear()
        generated(model, ids)
        assert {shapes[1]: equal for (_, _, shapes, _), equal in adapter._EQUAL.items()} == {(8, TOP_K): True}


# -- look-ahead --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def alike(kind: str) -> Any:
    """Layers that route by one matrix and add little to the states, so that predictions are mostly right. Words
    differ."""
    model = mixture(kind)
    router = next(p for n, p in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))).clone()
    for name, param in model.named_parameters():
        if param.shape == router.shape:
            param.copy_(8 * router)
        elif "layernorm" in name:
            param.fill_(1.0)
        elif ".down_proj" in name or ".o_proj" in name:
            param.mul_(0.002)
        elif name.endswith("router.bias"):
            param.zero_()
    return model


DRAWN = {"do_sample": True, "temperature": 8.0, "top_k": 0}  # tokens vary


@contextmanager
def looking_ahead(model: Any, form: str, most: int) -> Iterator[Any]:
    with offloaded(model, form) as streamer:
        streamer.switch(replace(streamer.plan, ahead=most))
        yield streamer


@pytest.mark.usefixtures("nothing_foreseen")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("form", ["cached", "few slots"])
def test_prefetched_experts_change_no_bit(form: str, kind: str, most: int, batch: int) -> None:
    model, ids = alike(kind), prompt(batch)
    wanted = generated(model, ids, **DRAWN)
    with looking_ahead(model, form, most) as streamer:
        for _ in range(2):
            assert_same(generated(model, ids, **DRAWN), wanted)
        stats = streamer.stats()
        assert stats.experts.ahead_used > 0.4 * stats.experts.ahead, stats
        cached = [unit for unit in streamer._binding.units if unit.rows is not None and unit.rows.cache]
        assert cached[0].rows.cache.counts().ahead == 0, "nothing is prefetched for the first layer"
        assert min(unit.rows.cache.counts().ahead for unit in cached[1:]) > 0


@pytest.mark.usefixtures("nothing_foreseen")
@pytest.mark.parametrize("drops", [False, True])
def test_a_unit_that_does_not_wait_for_its_prefetch_is_detected(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots hold poison, and prefetched rows come late, after the tables list them.

    The poison is finite: a kernel of torch ends the process if probabilities are NaN.
    """
    fetch = _OnDevice._fetch

    def late(self: Any, missed: torch.Tensor, count: torch.Tensor) -> None:
        if missed is self._tables.ahead:
            torch.cuda._sleep(3_000_000)
        fetch(self, missed, count)

    monkeypatch.setattr(_OnDevice, "_fetch", late)
    model, ids = alike("Qwen3Moe"), prompt()
    wanted = generated(model, ids, **DRAWN)
    with looking_ahead(model, "cached", 4) as streamer:
        streamer._binding.memory[2].fill_(0x3F)
        reach = Ahead.reach

        def reaches(self: Any, *args: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(Ahead, "join", lambda _: None)
                return reach(self, *args)

        if drops:
            monkeypatch.setattr(Ahead, "reach", reaches)
        found = generated(model, ids, **DRAWN)
        assert streamer.stats().experts.ahead_used > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) is not drops


@pytest.mark.parametrize("form", FORMS)
def test_updates_are_seen(form: str) -> None:
    model, ids = mixture(), prompt()
    with offloaded(model, form):
        before = generated(model, ids)
        with torch.no_grad():
            model.model.layers[2].mlp.experts.down_proj.mul_(-2)
        found = generated(model, ids, replays=0)
        assert not torch.equal(found[0], before[0])
    assert_same(found, generated(model, ids))


@pytest.mark.parametrize("shards", ["5GB", "100MB"])
@pytest.mark.parametrize("form", ["cached", "cached, coded"])
def test_rows_are_fetched_from_the_page_cache(form: str, shards: str, tmp_path: Path) -> None:
    """A checkpoint that stores matrices one by one has each row in three places, in one file or in several."""
    model, ids = mixture(), prompt()
    model.save_pretrained(tmp_path, max_shard_size=shards)
    whole, experts = nbytes(model)
    wanted = generated(model, ids)
    del model
    codec, share = FORMS[form]
    budget = int(whole - experts + experts * share + experts / LAYERS)
    loaded = weightstream.from_pretrained(tmp_path, device_budget=budget, codec=codec, context=128, progress=False)
    with loaded.weightstream as streamer:
        assert streamer.plan.cached, streamer.plan
        assert_same(generated(loaded, ids), wanted)
        assert streamer.stats().experts.fetched > 0
