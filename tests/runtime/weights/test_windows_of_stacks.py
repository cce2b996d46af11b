"""Stacks whose matrices are stored one by one in files: they are copied from pinned pages of each place."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import weightstream  # noqa: E402
import weightstream.adapters.hf.load  # noqa: E402
import weightstream.api.offload  # noqa: E402
import weightstream.inputs.builder  # noqa: E402
from models import TEXT  # noqa: E402
from weightstream.runtime.weights.sources import PageWindow, Tier  # noqa: E402
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

NBYTES = 40000  # of a file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a matrix for each expert, in shards, with names in alphabetical order."""
    path = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size=EXPERTS_NBYTES // 3)
    return path


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In its files the last matrix of an expert is followed by the first of the next, and both belong to one stack."""
    path = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(1)
    config = transformers.MixtralConfig(**TEXT | {"num_key_value_heads": 2, "num_local_experts": 4})
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each block that a pinning device was asked to pin."""
    found: list[int] = []

    def given(backend: Any, config: Any) -> tuple[None, PageCache]:
        return None, PageCache(lambda memory: found.append(memory.numel()), lambda memory: None)

    monkeypatch.setattr(weightstream.inputs.builder, "pinned", given)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_copies_start_from_the_files_and_bits_are_the_same(
    name: str, share: float, request: pytest.FixtureRequest, pinned: list[int]
) -> None:
    folder: Path = request.getfixturevalue("folder" if name == "qwen3" else "mixtral")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    experts = sum(p.nbytes for title, p in plain.named_parameters() if ".experts." in title)
    ids = torch.randint(0, CONFIG["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(4))
    model = weightstream.from_pretrained(
        folder, device="cpu", device_budget=int(share * experts), codec="none", progress=False
    )
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(ids).logits, plain(ids).logits)
    streamer = model.weightstream
    pages = streamer._homes._pages
    assert pages is not None
    homes = [home for alias, home in streamer._homes.homes.items() if ".experts." in alias]
    windows = [home.source for home in homes if isinstance(home.source, PageWindow)]
    assert windows
    assert all(source.window(index) is not None for source in windows for index in range(len(source.pages)))
    held = sum(home.group.nbytes for home in streamer._homes.homes.values() if home.tier is Tier.HOST)
    assert held < pages.nbytes + mmap.PAGESIZE
    sources = [home.source for home in streamer._homes.homes.values() if isinstance(home.source, PageWindow)]
    ranges = {(id(part.mapping), part.begin, part.end) for source in sources for part in source.extents}
    copied = {(file, n) for file, a, b in ranges for n in range(a // mmap.PAGESIZE, -(-b // mmap.PAGESIZE))}
    shared = len(pages._pages)  # a page with ranges of two may be pinned by both
    assert pages.nbytes <= mmap.PAGESIZE * (len(copied) + shared), "no page is pinned of which nothing is copied"
    assert sum(pinned) < 1.6 * experts, "ranges that are still needed stay pinned"
    streamer.remove()
    assert pages.nbytes == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("layer", ["2", r"\d+"])
def test_a_mapping_that_distinguishes_blocks_is_followed(layer: str, folder: Path) -> None:
    """Gate and up are exchanged, in one layer or in all."""
    kept = rf"(layers\.{layer}\.mlp\.experts\.\d+)\."
    pairs = (("gate", "held"), ("up", "gate"), ("held", "up"))
    mapping = {f"{kept}{old}_proj": rf"\1.{new}_proj" for old, new in pairs}
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", key_mapping=mapping)
    about: dict[str, Any] = {"device_budget": "1MiB", "codec": "none", "progress": False}
    model = weightstream.from_pretrained(folder, device="cpu", key_mapping=mapping, **about)
    model.weightstream.remove()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    exchanged = plain.state_dict()["model.layers.2.mlp.experts.gate_up_proj"]
    as_saved = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert not torch.equal(exchanged, as_saved["model.layers.2.mlp.experts.gate_up_proj"])
