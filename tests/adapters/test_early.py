"""Experts that are pinned while their model is made: which, when, and that the plan's copies start from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import weightstream  # noqa: E402
import weightstream.assembly  # noqa: E402
import weightstream.front  # noqa: E402
from models import TEXT  # noqa: E402
from weightstream.adapters import early  # noqa: E402
from weightstream.adapters.early import experts_in, pin_experts  # noqa: E402
from weightstream.config import OffloadConfig  # noqa: E402
from weightstream.runtime.cpu import CpuBackend  # noqa: E402
from weightstream.runtime.sources import PageWindow  # noqa: E402
from weightstream.store.checkpoint import Checkpoint  # noqa: E402
from weightstream.store.pages import PageCache  # noqa: E402

LAYERS, EXPERTS = 12, 4
CONFIG: dict[str, Any] = TEXT | {
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "num_experts": EXPERTS,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
EXPERTS_NBYTES = LAYERS * EXPERTS * 3 * 24 * CONFIG["hidden_size"] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a matrix for each expert, in shards, of which names stand in the order of text."""
    path = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size=EXPERTS_NBYTES // 3)
    return path


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each block that a device which can pin was asked to pin."""
    found: list[int] = []

    def given(backend: Any, config: Any) -> tuple[None, PageCache]:
        return None, PageCache(lambda memory: found.append(memory.numel()), lambda memory: None)

    monkeypatch.setattr(early, "pinned", given)
    monkeypatch.setattr(weightstream.assembly, "pinned", given)
    return found


def test_experts_are_found_layer_by_layer(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert len(checkpoint.mappings) > 2
    found = experts_in(checkpoint)
    assert sum(end - begin for _, begin, end in found) == EXPERTS_NBYTES
    layers = []
    for mapping, begin, end in found:
        inside = [e for e in checkpoint.entries.values() if e.mapping is mapping and begin <= e.begin and e.end <= end]
        assert sum(entry.nbytes for entry in inside) == end - begin
        assert all(".experts." in entry.name for entry in inside)
        layers += list({int(entry.name.split(".")[2]) for entry in inside})
    assert layers == sorted(layers), "2 comes before 10"
    assert set(layers) == set(range(LAYERS))


@pytest.mark.parametrize(
    ("settings", "pins"),
    [
        ({"device_budget": EXPERTS_NBYTES // 2}, True),
        ({"device_budget": EXPERTS_NBYTES // 2, "host_budget": EXPERTS_NBYTES}, True),
        ({"device_budget": EXPERTS_NBYTES // 2, "host_budget": EXPERTS_NBYTES - 1}, False),
        ({"device_budget": EXPERTS_NBYTES}, False),
        ({"device_budget": EXPERTS_NBYTES // 2, "codec": "auto"}, False),
    ],
)
def test_they_are_pinned_where_they_are_sure_to_stay(
    settings: dict[str, Any], pins: bool, folder: Path, pinned: list[int]
) -> None:
    config = OffloadConfig(**{"codec": "none", **settings})
    pages = pin_experts(Checkpoint.open(folder), CpuBackend(), config)
    assert (pages is not None) == pins
    if pages is not None:
        assert pages._thread is not None
        pages._thread.join(30)
        assert sum(pinned) >= EXPERTS_NBYTES
        pages.close()


def test_a_device_that_pins_nothing_is_left_alone(folder: Path) -> None:
    assert (
        pin_experts(Checkpoint.open(folder), CpuBackend(), OffloadConfig(device_budget=1 << 10, codec="none")) is None
    )


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_copies_start_from_there_and_bits_are_the_same(share: float, folder: Path, pinned: list[int]) -> None:
    """Where some experts are on the device, their pages are let go."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.randint(0, CONFIG["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(4))
    budget = int(share * EXPERTS_NBYTES)
    model = weightstream.from_pretrained(folder, device="cpu", device_budget=budget, codec="none", progress=False)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(ids).logits, plain(ids).logits)
    streamer = model.weightstream
    homes = [home for alias, home in streamer._homes.homes.items() if ".experts." in alias]
    assert len(homes) == 2 * LAYERS
    windows = [home.source for home in homes if isinstance(home.source, PageWindow)]
    assert windows
    assert all(source.window(index) is not None for source in windows for index in range(len(source.pages)))
    streamer.remove()


def test_a_load_that_fails_lets_them_go(folder: Path, monkeypatch: pytest.MonkeyPatch, pinned: list[int]) -> None:
    made: list[PageCache] = []
    real: Callable[..., Any] = early.pin_experts

    def kept(*args: Any) -> Any:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(weightstream.front, "pin_experts", kept)
    with pytest.raises(weightstream.PlanError):
        weightstream.from_pretrained(folder, device="cpu", device_budget=1 << 10, codec="none", progress=False)
    assert made
    assert made[0] is not None
    assert made[0].nbytes == 0
