"""Experts that are pinned while their model is made: which, when, and that the plan's copies start from there."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import weightstream  # noqa: E402
import weightstream.adapters.transformers  # noqa: E402
import weightstream.assembly  # noqa: E402
import weightstream.front  # noqa: E402
from models import TEXT  # noqa: E402
from weightstream.config import OffloadConfig  # noqa: E402
from weightstream.runtime import devices  # noqa: E402
from weightstream.runtime.cpu import CpuBackend  # noqa: E402
from weightstream.runtime.moves import Moves  # noqa: E402
from weightstream.runtime.sources import PageWindow, Tier  # noqa: E402
from weightstream.store.mapping import FileMapping  # noqa: E402
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
    """A checkpoint with a matrix for each expert, in shards, of which names stand in the order of text."""
    path = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size=EXPERTS_NBYTES // 3)
    return path


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In its files the last matrix of an expert is followed by the first of the next, and both are of one stack."""
    path = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(1)
    config = transformers.MixtralConfig(**TEXT | {"num_key_value_heads": 2, "num_local_experts": 4})
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each block that a device which can pin was asked to pin."""
    found: list[int] = []

    def given(backend: Any, config: Any) -> tuple[None, PageCache]:
        return None, PageCache(lambda memory: found.append(memory.numel()), lambda memory: None)

    monkeypatch.setattr(devices, "pinned", given)
    monkeypatch.setattr(weightstream.assembly, "pinned", given)
    return found


@pytest.mark.parametrize(
    ("settings", "pins"),
    [
        ({"device_budget": NBYTES // 2}, True),
        ({"device_budget": NBYTES // 2, "host_budget": NBYTES}, True),
        ({"device_budget": NBYTES // 2, "host_budget": NBYTES - 1}, False),
        ({"device_budget": NBYTES}, False),
        ({"device_budget": NBYTES // 2, "codec": "auto"}, False),
    ],
)
def test_they_are_pinned_where_they_are_sure_to_stay(
    settings: dict[str, Any], pins: bool, folder: Path, pinned: list[int]
) -> None:
    (file, *_) = sorted(folder.glob("*.safetensors"))
    mapping = FileMapping(file)
    ranges = [(mapping, 0, NBYTES // 2), (mapping, NBYTES // 2, NBYTES)]
    pages = devices.pinned_early(ranges, CpuBackend(), OffloadConfig(**{"codec": "none", **settings}))
    assert (pages is not None) == pins
    if pages is not None:
        assert pages._thread is not None
        pages._thread.join(30)
        assert sum(pinned) == NBYTES
        pages.close()


def test_a_device_that_pins_nothing_is_left_alone(folder: Path) -> None:
    mapping = FileMapping(next(folder.glob("*.safetensors")))
    config = OffloadConfig(device_budget=1 << 10, codec="none")
    assert devices.pinned_early([(mapping, 0, NBYTES)], CpuBackend(), config) is None


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_copies_start_from_there_and_bits_are_the_same(
    name: str, share: float, request: pytest.FixtureRequest, pinned: list[int]
) -> None:
    folder: Path = request.getfixturevalue("folder" if name == "qwen3" else "mixtral")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    experts = sum(p.nbytes for title, p in plain.named_parameters() if ".experts." in title)
    ids = torch.randint(0, CONFIG["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(4))
    told: list[tuple[list[Any], PageCache]] = []
    real = devices.pinned_early

    def kept(ranges: Any, *about: Any) -> PageCache:
        pages = real(ranges, *about)
        assert pages is not None
        told.append((ranges, pages))
        assert pages._thread is not None
        pages._thread.join(30)
        return pages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weightstream.front, "pinned_early", kept)
        model = weightstream.from_pretrained(
            folder, device="cpu", device_budget=int(share * experts), codec="none", progress=False
        )
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(ids).logits, plain(ids).logits)
    streamer = model.weightstream
    ((ranges, pages),) = told
    asked = sum(end - begin for _, begin, end in ranges)
    assert 0.9 * experts <= asked <= experts, "but for a stack that lies in a file as it is"
    assert streamer._homes._pages is pages
    homes = [home for alias, home in streamer._homes.homes.items() if ".experts." in alias]
    windows = [home.source for home in homes if isinstance(home.source, PageWindow)]
    assert windows
    assert all(source.window(index) is not None for source in windows for index in range(len(source.pages)))
    held = sum(home.group.nbytes for home in streamer._homes.homes.values() if home.tier is Tier.HOST)
    assert pages.nbytes <= held + 2 * mmap.PAGESIZE * len(pages._pages), "no byte is pinned that is not copied"
    if share < 0.5:
        assert sum(pinned) < 1.6 * experts, "what was pinned stays where it is wanted"
    streamer.remove()
    assert pages.nbytes == 0


@pytest.mark.parametrize("layer", ["2", r"\d+"])
def test_a_mapping_that_tells_blocks_apart_is_followed(layer: str, folder: Path) -> None:
    """Gate and up exchanged, in one layer and in all."""
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


def test_a_load_that_fails_lets_them_go(folder: Path, pinned: list[int]) -> None:
    """While the error, and with it all that its frames hold, is alive."""
    made: list[PageCache] = []
    real = devices.pinned_early

    def kept(*args: Any) -> Any:
        made.append(real(*args))  # type: ignore[arg-type]
        return made[-1]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more")

    for what in ("a plan", "a load"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weightstream.front, "pinned_early", kept)
            if what == "a load":
                patch.setattr(weightstream.adapters.transformers._Load, "_build", fail)
            with pytest.raises((weightstream.PlanError, weightstream.CheckpointError)) as error:
                weightstream.from_pretrained(folder, device="cpu", device_budget=1 << 10, codec="none", progress=False)
        assert error.value.__traceback__ is not None
        assert made[-1] is not None
        assert made[-1].nbytes == 0
        assert made[-1]._thread is None
    with pytest.raises(weightstream.ConfigError, match="nonsense"):
        weightstream.from_pretrained(folder, device="cpu", device_budget=1 << 10, codec="none", nonsense=1)
    assert len(made) == 2, "before a word is read nothing is pinned"


def test_what_is_cast_is_not_pinned(folder: Path, pinned: list[int], tmp_path: Path) -> None:
    told: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weightstream.front, "pinned_early", lambda ranges, *_: told.append(ranges))
        model = weightstream.from_pretrained(
            folder, device="cpu", dtype="float16", codec="none", offload_folder=tmp_path, progress=False
        )
    assert told == [[]]
    model.weightstream.remove()


def test_nothing_is_pinned_while_residents_are_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the driver would wait for a registration: of 400 weights that takes seconds."""
    lock, told, made = threading.Lock(), list[bool](), CpuBackend.__init__
    copy = Moves.to_device

    def locking(self: CpuBackend) -> None:
        made(self)
        self.pinning = lock  # type: ignore[assignment]

    def copied(self: Moves, home: Any) -> None:
        told.append(lock.locked())
        copy(self, home)

    monkeypatch.setattr(CpuBackend, "__init__", locking)
    monkeypatch.setattr(Moves, "to_device", copied)
    model = weightstream.from_pretrained(folder, device="cpu", device_budget=1 << 30, codec="none", progress=False)
    assert told
    assert all(told)
    assert not lock.locked()
    model.weightstream.remove()
