"""The offload folder: what is written is mapped and equal, nothing half-written stays, an index never lies."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from weightstream.errors import CheckpointError, StoreError
from weightstream.store.folder import OffloadFolder, file_name

NAMES = [
    "model.layers.0.weight",
    "a/b",
    "a%2Fb",
    "../../escape",
    "..",
    "",
    "nul\0 and ü",
    "x" * 500,
    "x" * 501,
    "A",
    "A,B",
]


def test_written_tensors_are_equal_mapped_and_contiguous(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = OffloadFolder(tmp_path / "new" / "folder")
    tensors = {
        "plain": torch.randn(5, 7),
        "turned": torch.randn(5, 7).t(),
        "half": torch.randn(9).bfloat16(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    for name, tensor in tensors.items():
        found = folder.write(name, tensor)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.is_contiguous()
        assert not found.requires_grad
        bits, expected = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (found, tensor))
        assert torch.equal(bits, expected)
        if found.numel():
            assert folder.mappings[-1].locate(found.data_ptr()) is not None
    assert len(folder.mappings) == len(tensors)
    assert folder.nbytes == sum(path.stat().st_size for path in folder.path.iterdir())
    assert torch.equal(OffloadFolder(folder.path).read("turned"), tensors["turned"])


def test_any_name_is_a_plain_distinct_file(tmp_path: Path) -> None:
    folder = OffloadFolder(tmp_path / "inner")
    for number, name in enumerate(NAMES):
        folder.write(name, torch.tensor([number]))
    assert [folder.read(name).item() for name in NAMES] == list(range(len(NAMES)))
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(map(file_name, NAMES))
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]


def test_private_folder_goes_at_close_and_at_exit() -> None:
    folder = OffloadFolder(None)
    tensor = folder.write("a", torch.arange(5))
    assert folder.path.is_dir()
    folder.close()
    assert not folder.path.exists()
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    code = (
        "import torch; from weightstream.store.folder import OffloadFolder; f = OffloadFolder(None);"
        "f.write('a', torch.zeros(3)); print(f.path)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "weightstream-" in done.stdout
    assert not Path(done.stdout.strip()).exists()


def test_a_folder_that_was_given_stays(tmp_path: Path) -> None:
    folder = OffloadFolder(tmp_path)
    folder.write("a", torch.zeros(1))
    folder.close()
    del folder
    assert (tmp_path / file_name("a")).is_file()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/x: cannot create"):
        OffloadFolder(tmp_path / "file" / "x")


def test_a_disk_that_fills_while_writing_leaves_nothing(tmp_path: Path) -> None:
    folder = OffloadFolder(tmp_path)
    kept = folder.write("kept", torch.arange(8))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(StoreError, match=rf"{tmp_path}: cannot write 'big': needs 40000 bytes, \d+ are free"):
            folder.write("big", torch.zeros(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == [file_name("kept")]
    assert len(folder.mappings) == 1
    assert kept.tolist() == list(range(8))


def test_a_full_disk_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 39})())
    folder = OffloadFolder(tmp_path)
    with pytest.raises(StoreError, match=r"'big': needs 40 bytes, 39 are free: not enough space"):
        folder.write("big", torch.zeros(10))
    assert list(tmp_path.iterdir()) == []


def test_index_returns_what_was_saved(tmp_path: Path) -> None:
    folder = OffloadFolder(tmp_path)
    folder.save_index("key/1", {"x": [1, "two"]})
    assert OffloadFolder(tmp_path).load_index("key/1") == {"x": [1, "two"]}
    assert OffloadFolder(tmp_path).load_index("key/2") is None
    assert os.listdir(tmp_path) == ["key%2F1.index.json"]


@pytest.mark.parametrize("text", [b'{"x": ', b"[1, 2]", b"\xff"])
def test_a_damaged_index_counts_as_absent(tmp_path: Path, text: bytes) -> None:
    folder = OffloadFolder(tmp_path)
    folder.save_index("key", {"x": 1})
    (tmp_path / "key.index.json").write_bytes(text)
    assert folder.load_index("key") is None


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot open"):
        OffloadFolder(tmp_path).read("absent")


def test_the_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    events: list[str] = []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with OffloadFolder(tmp_path).lock():
            events.append("second in")

    with OffloadFolder(tmp_path).lock():
        thread = threading.Thread(target=second)
        thread.start()
        assert entered.wait(10)
        thread.join(0.2)
        events.append("first out")
    thread.join(10)
    assert events == ["first out", "second in"]


def test_a_folder_that_vanished_cannot_be_locked(tmp_path: Path) -> None:
    folder = OffloadFolder(tmp_path / "f")
    folder.path.rmdir()
    with pytest.raises(StoreError, match="pass another offload_folder"), folder.lock():
        pass
