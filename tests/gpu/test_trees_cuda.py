"""Trees of drafted tokens on a GPU: real graphs, offloaded and resident, and how often the host waits."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any

import pytest
import torch

import weightstream
from generating import MODELS, add_noise, build, options

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation import tree_loop as loop  # noqa: E402
from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.generation.generation import decode_with, generate  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NODES, TOKENS = 12, 40
KEPT = {"return_dict_in_generate": True, "output_logits": True}


def prompt() -> torch.Tensor:
    return torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(9)).repeat(1, 2).cuda()


def noised(model: Any) -> Any:
    """A draft that is often right."""
    draft = copy.deepcopy(model).cuda()
    add_noise(draft)
    return draft


def drafts(kind: str, model: Any) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": 6} if kind == "lookup" else {"assistant_model": noised(model)}


def grown(model: Any, **more: Any) -> tuple[Any, DecodeReport]:
    found: list[DecodeReport] = []
    torch.manual_seed(5)
    result = generate(model, prompt(), tree_nodes=NODES, on_decoding=found.append, **options(TOKENS, **KEPT, **more))
    return result, found[0]


@pytest.mark.parametrize("sample", [{}, {"do_sample": True, "temperature": 0.3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_and_offloaded_have_the_bits_of_eager_and_resident(
    name: str, kind: str, sample: dict[str, Any]
) -> None:
    resident, model = build(MODELS[name]()).cuda(), build(MODELS[name]())
    more = drafts(kind, model) | sample
    torch.manual_seed(5)
    want, eager = decode_with(resident, prompt(), options(TOKENS, **KEPT, **more), None, tree_nodes=NODES)
    assert eager.speculation.passes > 5
    runs = [grown(resident, **more)]
    with weightstream.offload(
        model, device="cuda", device_budget=int(sum(p.nbytes for p in model.parameters()) * 0.7)
    ) as streamer:
        runs += [grown(model, **more) for _ in range(2)]
        assert streamer.stats().unplanned_fills == 0
    for got, report in runs:
        assert torch.equal(got.sequences, want.sequences)
        assert torch.equal(torch.stack(got.logits), torch.stack(want.logits))
        assert report.reason is None
        assert report.replays
        assert report.speculation == eager.speculation


@pytest.mark.parametrize("more", [{}, {"do_sample": True, "top_k": 50}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_the_host_waits_once_a_round(kind: str, more: dict[str, Any]) -> None:
    model = build(MODELS["llama"]()).cuda()
    more = drafts(kind, model) | more
    others: dict[int, Counter[str]] = {}
    for num in (30, 40, 80):  # an assistant's tree may be made anew after 16 rounds
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                _, report = decode_with(model, prompt(), options(num, **more), None, tree_nodes=NODES)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [warning for warning in seen if "synchroniz" in str(warning.message)]
        assert len(waits) >= report.speculation.passes > 0
        others[len(waits) - report.speculation.passes] = Counter(f"{w.filename}:{w.lineno}" for w in waits)
    assert len(others) == 1, f"waits besides those of the passes grow with the text: {others}"


def test_a_draw_is_that_of_multinomial() -> None:
    for seed in range(30):
        probabilities = torch.randn(1, 5000, device="cuda").mul(3).softmax(-1)
        torch.manual_seed(seed)
        want, state = torch.multinomial(probabilities, 1)[0], torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(loop.draw(probabilities), want)
        assert torch.equal(torch.cuda.get_rng_state(), state)
