"""The offload folder: written tensors are mapped and equal, incomplete files are removed, and so is the folder at
the end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from weightstream.errors import StoreError
from weightstream.store.folder import OffloadFolder

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
    assert folder.path.parent == tmp_path / "new" / "folder"
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


def test_any_name_is_a_file_in_the_folder(tmp_path: Path) -> None:
    folder = OffloadFolder(tmp_path / "inner")
    found = [folder.write(name, torch.tensor([number])) for number, name in enumerate([*NAMES, *NAMES])]
    assert [tensor.item() for tensor in found] == list(range(2 * len(NAMES)))
    assert len(list(folder.path.glob("*.safetensors"))) == 2 * len(NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_folder_is_removed_at_close(inside: bool, tmp_path: Path) -> None:
    folder = OffloadFolder(tmp_path if inside else None)
    tensor = folder.write("a", torch.arange(5))
    assert folder.path.is_dir()
    folder.close()
    assert not folder.path.exists()
    assert list(tmp_path.iterdir()) == []
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_a_folder_is_removed_at_exit() -> None:
    code = (
        "import torch; from weightstream.store.folder import OffloadFolder; f = OffloadFolder();"
        "f.write('a', torch.zeros(3)); print(f.path)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "weightstream-" in done.stdout
    assert not Path(done.stdout.strip()).exists()


def test_folders_of_killed_processes_are_removed_by_the_next(tmp_path: Path) -> None:
    """Folders of live processes stay, and so does everything that only has such a name."""
    code = """
import os, signal, sys, time, torch
from pathlib import Path
from weightstream.store.folder import OffloadFolder

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what is killed is gone at once
any(not os.fork() for _ in range(2))  # three processes, and torch is imported once
f = OffloadFolder(Path(sys.argv[1]))
f.write("a", torch.zeros(3))
os.write(1, f"{os.getpid()} {f.path}\\n".encode())  # print makes two calls
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as alive:
        assert alive.stdout
        printed = dict(alive.stdout.readline().split() for _ in range(3))
        paths = {int(pid): Path(path) for pid, path in printed.items()}
        dead = [pid for pid in paths if pid != alive.pid]
        try:
            (tmp_path / "weightstream-llama70b").mkdir()
            assert all(path.is_dir() for path in paths.values())
            for pid, number in zip(dead, (signal.SIGTERM, signal.SIGKILL), strict=True):
                os.kill(pid, number)
            while any(map(psutil.pid_exists, dead)):
                time.sleep(0.01)
            assert all(path.is_dir() for path in paths.values())
            folder, kept = OffloadFolder(tmp_path), paths[alive.pid]
            assert sorted(tmp_path.iterdir()) == sorted([kept, folder.path, tmp_path / "weightstream-llama70b"])
            assert list(kept.glob("*.safetensors"))
        finally:
            for pid in (*filter(psutil.pid_exists, dead), alive.pid):
                os.kill(pid, signal.SIGKILL)
    folder.close()
    OffloadFolder(tmp_path).close()
    assert list(tmp_path.iterdir()) == [tmp_path / "weightstream-llama70b"]


def test_two_folders_in_one_place_are_separate(tmp_path: Path) -> None:
    first, second = OffloadFolder(tmp_path), OffloadFolder(tmp_path)
    kept = first.write("a", torch.zeros(1))
    second.write("a", torch.ones(1))
    second.close()
    assert list(tmp_path.iterdir()) == [first.path]
    first.mappings[0].check()
    assert kept.item() == 0


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/x: cannot create"):
        OffloadFolder(tmp_path / "file" / "x")


def test_a_disk_that_fills_up_while_writing_leaves_nothing(tmp_path: Path) -> None:
    folder = OffloadFolder(tmp_path)
    kept = folder.write("kept", torch.arange(8))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(StoreError, match=r"'big' of shape \(10000,\): it needs 39.1KiB, and"):
            folder.write("big", torch.zeros(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.stat().st_size < 4096 for path in folder.path.glob("*.safetensors")] == [True]
    assert len(folder.mappings) == 1
    assert kept.tolist() == list(range(8))


def test_a_full_disk_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 39})())
    folder = OffloadFolder(tmp_path)
    with pytest.raises(StoreError, match=r"'big' of .* needs 40B, and 39B are free: not enough"):
        folder.write("big", torch.zeros(10))
    assert list(folder.path.glob("*.safetensors")) == []
