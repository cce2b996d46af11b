"""Experts by ids inside of vLLM: kernels read them in slots, and the tokens are those of the engine without offload."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import slow_link
import torch
from engines import NUM_TOKENS, PROMPTS, asked, engine, scored, streamer

from gpu_plans import poison_plans
from weightstream.integrations.vllm import experts
from weightstream.integrations.vllm.experts import IdsBecomeSlots
from weightstream.runtime.experts.rows import Rows

Folder = Callable[[str], Path]

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_SLOTS = 8, 8, 2, 5
BUDGET = 13_700_000  # bytes: attention, whole stacks of one layer, and 5 slots of 8 in each


@pytest.fixture(autouse=True)
def _slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_link.install(monkeypatch.setattr)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How rows are brought from now on, by the call."""
    found: list[str] = []
    for name in ("slots", "place"):
        inner = getattr(Rows, name)

        def spy(rows: Rows, ids: torch.Tensor, name: str = name, inner: Any = inner) -> Any:
            found.append(name)
            return inner(rows, ids)

        monkeypatch.setattr(Rows, name, spy)
    return found


@pytest.fixture(scope="module")
def plain(folder: Folder) -> Callable[..., list[list[Any]]]:
    """Output of the same engine without offloading, made once for each mode and batch."""
    made: dict[Any, list[list[Any]]] = {}

    def found(compiled: bool, batch: int) -> list[list[Any]]:
        if (compiled, batch) not in made:
            with engine(folder("moe"), compiled=compiled, max_num_seqs=batch) as llm:
                made[compiled, batch] = scored(llm)
        return made[compiled, batch]

    return found


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of plans that begins as NaN."""
    poison_plans(monkeypatch.setattr)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What the plug-in logs; vLLM keeps it from other handlers."""
    logger = logging.getLogger("weightstream")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    return caplog


BUDGETS = {"mixtral": 13_700_000, "shared": 15_800_000, "biased": 15_000_000, "gpt_oss": 14_300_000}
SETTINGS = asked(device_budget=BUDGET, codec="none", batch=1)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kernels_read_experts_in_their_slots(
    folder: Folder, plain: Any, ways: list[str], logged: pytest.LogCaptureFixture, compiled: bool, batch: int
) -> None:
    """A batch of 2 has a slot for each id. Experts of a batch of 4 are placed in whole stacks; prompts read all."""
    wanted = plain(compiled, batch)
    with engine(folder("moe"), compiled=compiled, max_num_seqs=batch, **SETTINGS) as llm:
        found = streamer()
        assert any(f"experts: {NUM_SLOTS} slots for those of a layer" in text for text in logged.messages)
        assert not any("reads all experts" in text for text in logged.messages)
        assert len(found.plan.cached) == 2 * NUM_LAYERS
        assert found.plan.num_slots == NUM_SLOTS
        ways.clear()
        before = found.stats().experts
        assert scored(llm) == wanted
        is_captured = compiled and torch.cuda.is_available()  # then only captures call Python
        way = "slots" if batch * TOP_K <= NUM_SLOTS else "place"
        assert ways.count(way) >= len(PROMPTS) // batch * (NUM_TOKENS - 2) * NUM_LAYERS or is_captured
        after = found.stats().experts
        fetched = after.fetched - before.fetched
        assert fetched > NUM_LAYERS * NUM_SLOTS, "slots were filled more than once"
        assert after.found > before.found
        assert after.fetched_nbytes == after.fetched * 3 * 256 * 128 * 2  # bytes of an expert
        assert found.stats().held_nbytes["device"] <= BUDGET


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("name", "compiled"),
    [("mixtral", False), ("shared", False), ("biased", False), ("gpt_oss", False), ("gpt_oss", True)],
)
def test_other_mixtures(folder: Folder, ways: list[str], name: str, compiled: bool) -> None:
    """With shared experts, with a bias for each expert that the router reads and the layer holds, and with biases that
    the kernel reads. Compiled code for gpt_oss reads a table of rotations in float32, which eager steps cast."""
    settings = asked(device_budget=BUDGETS[name], codec="none", batch=1)
    with engine(folder(name), compiled=compiled, max_num_seqs=2) as llm:
        wanted = scored(llm)
    with engine(folder(name), compiled=compiled, max_num_seqs=2, **settings) as llm:
        ways.clear()
        before = streamer().stats().experts
        assert scored(llm) == wanted
        after = streamer().stats().experts
        assert after.found > before.found
        assert after.fetched > before.fetched
        if not (compiled and torch.cuda.is_available()):  # else only captures call Python
            assert len(ways) >= len(PROMPTS) // 2 * (NUM_TOKENS - 2) * (NUM_LAYERS - 1)  # some layers are dense
            assert set(ways) == {"slots"}


def _counted(_: Any) -> tuple[int, int]:
    found = streamer().stats().experts
    return found.found, found.fetched


def test_each_rank_reads_its_part_of_an_expert(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    settings: dict[str, Any] = {"max_num_seqs": 2, "tensor_parallel_size": 2}
    with engine(folder("moe"), **settings) as llm:
        wanted = scored(llm)
    settings |= asked(device_budget=BUDGET // 2, codec="none", batch=1) | {"worker_extension_cls": "ranks.Extension"}
    with engine(folder("moe"), **settings) as llm:
        assert scored(llm) == wanted
        ranks = llm.collective_rpc(_counted)
    assert len(ranks) == 2
    assert all(found > 0 and fetched > NUM_LAYERS * NUM_SLOTS for found, fetched in ranks), ranks


def test_ids_that_do_not_become_slots_give_other_tokens(
    folder: Folder, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests here can fail."""

    def unmapped(kwargs: dict[str, Any], ids: torch.Tensor, _: torch.Tensor) -> dict[str, Any]:
        return kwargs | {"topk_ids": ids.clamp(max=NUM_SLOTS - 1)}

    monkeypatch.setattr(experts, "_replaced", unmapped)
    with engine(folder("moe"), max_num_seqs=2, **SETTINGS) as llm:
        assert scored(llm) != plain(False, 2)


def test_other_kernels_read_whole_layers(
    folder: Folder, plain: Any, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "PROVED", MappingProxyType({"MarlinExperts": IdsBecomeSlots.SORTED}))
    wanted = plain(False, 2)
    with engine(folder("moe"), max_num_seqs=2, **SETTINGS) as llm:
        assert scored(llm) == wanted
        assert not streamer().plan.cached
    (message,) = {text for text in logged.messages if "reads all experts of 0." in text}
    assert "Experts takes whole stacks; MarlinExperts would read single experts" in message


class Choosing:
    """A kernel that leaves some batches to another, as vLLM's `FallbackExperts`."""

    def __init__(self, few: Any, many: Any, most: int) -> None:
        self.experts, self.fallback_experts, self._most = many, few, most

    def _select_experts_impl(self, states: torch.Tensor, *_: torch.Tensor) -> Any:
        return self.fallback_experts if len(states) <= self._most else self.experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fallback_experts, name)


class Unproved: ...


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], None]:
    """Replaces the kernel of each layer, once the layers' weights are processed."""

    def install(made: Callable[[Any], Any]) -> None:
        inner, replaced = experts._kernel_of, set[int]()

        def kernel_of(module: Any) -> Any:
            if id(module) not in replaced:
                impl = module.quant_method.moe_kernel.impl
                impl.fused_experts = made(impl.fused_experts)
                replaced.add(id(module))
            return inner(module)

        monkeypatch.setattr(experts, "_kernel_of", kernel_of)

    return install


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_kernel_that_chooses_by_the_batch_reads_slots_where_its_choice_does(
    folder: Folder, plain: Any, ways: list[str], logged: pytest.LogCaptureFixture, kernels: Any, most: int
) -> None:
    """Of 2 sequences at a time; the choice for one of them decides the plan."""
    experts._warn_once.cache_clear()
    kernels(lambda plain: Choosing(plain, Unproved(), most))
    with engine(folder("moe"), max_num_seqs=2, **SETTINGS) as llm:
        assert bool(streamer().plan.cached) == (most > 0)
        ways.clear()
        assert scored(llm) == plain(False, 2)
    assert set(ways) == ({"slots"} if most == 2 else set())
    said = {text for text in logged.messages if "Unproved takes whole stacks" in text}
    assert any("would read single experts" in text for text in said) == (most == 0)
    assert any("some batches read all experts" in text for text in said) == (most == 1)


@pytest.mark.parametrize("is_same", [True, False], ids=["strides", "scales"])
def test_a_kernel_with_rows_of_its_own_reads_whole_stacks_unless_they_are_equal(
    folder: Folder, plain: Any, logged: pytest.LogCaptureFixture, kernels: Any, is_same: bool
) -> None:
    def with_rows(plain: Any) -> Any:
        plain.rows = torch.full((NUM_EXPERTS,), 7) if is_same else torch.arange(NUM_EXPERTS)
        return plain

    kernels(with_rows)
    with engine(folder("moe"), max_num_seqs=2, **SETTINGS) as llm:
        assert bool(streamer().plan.cached) == is_same
        assert scored(llm) == plain(False, 2)
    assert any("holds tensors of its own" in text for text in logged.messages) != is_same
