"""Mapped files and safetensors checkpoints: valid files are viewed, false headers are refused by our own errors."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from weightstream.errors import CheckpointError, StoreError
from weightstream.store import mapping as mapping_module
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.mapping import FileMapping

OPENED: list[str] = []


def _note_open(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)) and "safetensors" in os.fsdecode(args[0]):
        OPENED.append(os.fsdecode(args[0]))


sys.addaudithook(_note_open)  # an audit hook cannot be removed


def craft(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def shards(folder: Path, weight_map: dict[str, Any], **files: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


# FileMapping


def test_writes_stay_in_this_process(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(200)))
    mapping = FileMapping(path)
    view = mapping.bytes(10, 20)
    view[0] = 77
    assert mapping.bytes(0, 200).tolist() == [*range(10), 77, *range(11, 200)]
    assert path.read_bytes() == bytes(range(200))
    assert mapping.locate(view.data_ptr()) == 10
    assert mapping.locate(view.data_ptr() + 190) is None
    assert mapping.locate(view.data_ptr() - 11) is None


def test_tensors_outlive_the_mapping_and_no_descriptor_stays(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abcd" * 5000)
    descriptors = len(os.listdir("/proc/self/fd"))
    views = [FileMapping(path).bytes(4, 8) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert {bytes(view.tolist()) for view in views} == {b"abcd"}
    maps = Path("/proc/self/maps").read_text().count(str(path))
    assert maps >= 1
    del views
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_empty_file_maps(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    mapping = FileMapping(tmp_path / "f")
    mapping.populate(0, 0)
    assert (mapping.nbytes, mapping.bytes(0, 0).numel(), mapping.locate(0)) == (0, 0, None)


def test_populate_makes_pages_resident(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * (1 << 22))
    mapping = FileMapping(path)
    before = _rss_file_kib()
    mapping.populate(5000, (1 << 22) - 5000)
    assert _rss_file_kib() - before >= 4000


def _rss_file_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssFile:")[1].split()[0])


@pytest.mark.parametrize("span", [(-1, 3), (0, 11), (5, 4)])
def test_ranges_outside_the_file_are_refused(tmp_path: Path, span: tuple[int, int]) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    mapping = FileMapping(tmp_path / "f")
    for method in (mapping.bytes, mapping.populate):
        with pytest.raises(StoreError, match=r"not inside its 10 bytes"):
            method(*span)


def test_truncated_replaced_or_removed_files_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 9000)
    mapping = FileMapping(path)
    mapping.check()
    os.truncate(path, 100)
    with pytest.raises(StoreError, match=r"changed since.*\(9000, .*\(100, "):
        mapping.populate(0, 9000)
    path.unlink()
    with pytest.raises(StoreError, match="now gone"):
        mapping.check()
    path.write_bytes(b"y" * 9000)
    with pytest.raises(StoreError, match="changed since"):
        mapping.check()


def test_populate_past_the_end_is_an_error_not_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 9000)
    mapping = FileMapping(path)
    monkeypatch.setattr(mapping, "check", lambda: os.truncate(path, 100))  # truncated after the check
    with pytest.raises(StoreError, match=r"f: reading 4000 bytes at offset 5000 failed.*EFAULT.*now holds 100 bytes"):
        mapping.populate(5000, 9000)


def test_interrupted_advice_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"x" * 9000)
    mapping = FileMapping(tmp_path / "f")
    codes = [errno.EINTR, errno.EAGAIN, 0, errno.EINVAL, errno.EIO]

    def madvise(*_: Any) -> int:
        ctypes.set_errno(codes.pop(0))
        return -1 if ctypes.get_errno() else 0

    monkeypatch.setattr(mapping_module, "_LIBC", type("Libc", (), {"madvise": staticmethod(madvise)}))
    mapping.populate(0, 10)
    assert codes == [errno.EINVAL, errno.EIO]
    mapping.populate(0, 10)  # a kernel without this advice
    with pytest.raises(StoreError, match="EIO"):
        mapping.populate(0, 10)
    assert codes == []


def test_only_regular_files_are_mapped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # a blocking open would hang here
    for path, message in [
        (tmp_path / "fifo", "not a regular"),
        (tmp_path, "not a reg"),
        (tmp_path / "no", "cannot open"),
    ]:
        with pytest.raises(StoreError, match=message):
            FileMapping(path)


# Checkpoint: valid files


def test_every_dtype_reads_as_the_library_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64"
    names = text.split()
    names += ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    tensors = {n: torch.randint(0, 2, (3, 40), dtype=torch.uint8).to(getattr(torch, n)) for n in names}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(4, 0, 2), "other empty": torch.empty(0)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path)
    (mapping,) = checkpoint.mappings
    found = {name: checkpoint.tensor(name) for name in checkpoint.entries}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
        if tensor.numel():
            assert mapping.locate(found[name].data_ptr()) == checkpoint.entries[name].begin
    assert checkpoint.entries["float16"].dtype == "float16"
    assert {name: entry.nbytes for name, entry in checkpoint.entries.items()} == {
        n: t.nbytes for n, t in tensors.items()
    }


def test_float8_scale_dtype(tmp_path: Path) -> None:
    path = craft(tmp_path / "a.safetensors", {"s": entry("F8_E8M0", [4], 0, 4)}, bytes([1, 2, 3, 4]))
    tensor = Checkpoint.open(path).tensor("s")
    assert tensor.dtype == torch.float8_e8m0fnu
    assert tensor.view(torch.uint8).tolist() == [1, 2, 3, 4]


def test_misaligned_tensors_are_copied(tmp_path: Path) -> None:
    header = json.dumps({"b": entry("U8", [1], 0, 1), "f": entry("F32", [2], 1, 9)}).encode()
    data = b"\7" + struct.pack("<2f", 1.5, -2.5)
    path = craft(tmp_path / "a.safetensors", header + b" " * (-len(header) % 8), data)
    checkpoint = Checkpoint.open(path)
    tensor = checkpoint.tensor("f")
    assert tensor.tolist() == [1.5, -2.5]
    assert tensor.data_ptr() % 4 == 0
    assert checkpoint.mappings[0].locate(tensor.data_ptr()) is None


def test_folder_with_one_file_of_any_name(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3)}, tmp_path / "weights.safetensors")
    assert Checkpoint.open(str(tmp_path)).tensor("a").tolist() == [0, 1, 2]
    save_file({"a": torch.arange(3)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"2 safetensors files and no .*index\.json"):
        Checkpoint.open(tmp_path)


def test_sharded_index(tmp_path: Path) -> None:
    a, b, c = torch.randn(3, 4), torch.arange(5), torch.randn(2)
    shards(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"}, x={"a": a, "unlisted": c}, y={"b": b})
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        checkpoint = Checkpoint.open(path)
        assert torch.equal(checkpoint.tensor("a"), a)
        assert torch.equal(checkpoint.tensor("b"), b)
        assert torch.equal(checkpoint.tensor("unlisted"), c)
        assert [m.path.name for m in checkpoint.mappings] == ["x.safetensors", "y.safetensors"]
        assert checkpoint.entries["b"].path == tmp_path / "y.safetensors"


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1 << 22)}, tmp_path / "model.safetensors")  # 16 MiB
    before = _rss_file_kib()
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint.entries:
        checkpoint.tensor(name)
    assert _rss_file_kib() - before < 1024


# Checkpoint: invalid files

GOOD = entry("F32", [2], 0, 8)
LIBRARY = "truncated, damaged or not safetensors: "
BAD_FILES: dict[str, tuple[Any, bytes, int | None, str]] = {
    "header length past the end": ({"a": GOOD}, bytes(8), 10_000, f"{LIBRARY}its header would end at byte 10008, and"),
    "huge header length": ({"a": GOOD}, bytes(8), 2**64 - 1, f"{LIBRARY}its header would end at byte {2**64 + 7}"),
    "not json": (b"{nope", b"", None, "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", None, "not valid JSON"),
    "deep json": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", None, "not valid JSON"),
    "huge number": (b'{"a":' + b"9" * 5000 + b"}", b"", None, "not valid JSON"),
    "lone surrogate": (b'{"\\ud800": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"", None, "not valid JSON"),
    "a list": (b"[]", b"", None, "holds a list"),
    "name twice": (b'{"a": {}, "a": {}}', b"", None, "'a' occurs twice"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8), None, LIBRARY),
    "more": ({"a": GOOD | {"more": 1}}, bytes(8), None, "'a'.*needs exactly"),
    "facts in a list": ({"a": ["F32", [2], [0, 8]]}, bytes(8), None, "'a'.*needs exactly"),
    "unknown dtype": ({"a": entry("F3", [2], 0, 8)}, bytes(8), None, LIBRARY),
    "dtype that torch does not hold": ({"a": entry("F4", [16], 0, 8)}, bytes(8), None, "'a'.*'F4' is not supported"),
    "dtype no text": ({"a": GOOD | {"dtype": ["F32"]}}, bytes(8), None, LIBRARY),
    "negative size": ({"a": entry("F32", [-2], 0, 8)}, bytes(8), None, LIBRARY),
    "size no integer": ({"a": entry("F32", [2.0], 0, 8)}, bytes(8), None, LIBRARY),
    "size a bool": ({"a": entry("F32", [2, True], 0, 8)}, bytes(8), None, LIBRARY),
    "product overflows": ({"a": entry("F32", [2**62, 2**62, 2**62], 0, 8)}, bytes(8), None, LIBRARY),
    "empty overflows": ({"a": entry("F32", [0, 2**62, 2**62], 0, 0)}, b"", None, "'a'.*more than torch can hold"),
    "offsets turned": ({"a": entry("F32", [0], 8, 0)}, bytes(8), None, LIBRARY),
    "offsets three": ({"a": GOOD | {"data_offsets": [0, 4, 8]}}, bytes(8), None, LIBRARY),
    "offset past the end": ({"a": entry("F32", [4], 0, 16)}, bytes(8), None, LIBRARY),
    "offset huge": ({"a": entry("U8", [2**63 - 1], 0, 2**63 - 1)}, bytes(8), None, LIBRARY),
    "size lies": ({"a": entry("F32", [3], 0, 8)}, bytes(8), None, LIBRARY),
    "overlap": ({"a": GOOD, "b": entry("U8", [8], 4, 12)}, bytes(12), None, LIBRARY),
    "same range": ({"a": GOOD, "b": entry("U8", [8], 0, 8)}, bytes(8), None, LIBRARY),
    "gap": ({"a": GOOD, "b": entry("U8", [1], 9, 10)}, bytes(10), None, LIBRARY),
    "trailing bytes": ({"a": GOOD}, bytes(9), None, LIBRARY),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_crafted_files_are_refused(tmp_path: Path, case: str) -> None:
    header, data, length, message = BAD_FILES[case]
    path = craft(tmp_path / "bad.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors.*{message}"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269062784\n", "run `git lfs pull`"),
        (b"<!DOCTYPE html><title>404</title>", "not safetensors"),
    ],
)
def test_files_that_were_not_downloaded_are_named_as_such(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        Checkpoint.open(path)


def test_header_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(path, 200_000_000)  # sparse
    with pytest.raises(CheckpointError, match="100000001 bytes of JSON, over the limit of 100000000"):
        Checkpoint.open(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 30, 199])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(40)}, path)
    os.truncate(path, min(keep, path.stat().st_size - 1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_a_file_that_changes_between_checks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library opens the path again: it must find the file that is mapped."""
    save_file({"a": torch.zeros(4)}, tmp_path / "a.safetensors")
    save_file({"a": torch.zeros(4)}, tmp_path / "b.safetensors")

    def swapped(path: Path, framework: str) -> Any:
        os.replace(tmp_path / "b.safetensors", path)
        return safe_open(path, framework)

    monkeypatch.setattr("weightstream.store.header.safe_open", swapped)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: changed since it was mapped"):
        Checkpoint.open(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "sub/../../secret.safetensors",
        "ABSOLUTE",
        "..",
        ".",
        "",
        "a\\b",
        "a\0b",
        "link.safetensors",
    ],
)
def test_an_index_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret.safetensors"
    save_file({"a": torch.zeros(2)}, secret)
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "link.safetensors").symlink_to(secret)
    shards(folder, {"a": str(secret) if name == "ABSOLUTE" else name})
    OPENED.clear()
    with pytest.raises(CheckpointError, match=r"refused|missing"):
        Checkpoint.open(folder)
    assert any(path.endswith("index.json") for path in OPENED)
    assert not [path for path in OPENED if Path(path).name in ("secret.safetensors", "link.safetensors")]


def test_linked_weights_of_another_folder_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    OPENED.clear()
    with pytest.raises(CheckpointError, match="outside the model folder"):
        Checkpoint.open(folder)
    assert not [path for path in OPENED if path.endswith(".safetensors")]


@pytest.mark.parametrize("component", ["", "transformer"])
def test_hub_cache_links_are_followed_into_its_own_blobs_only(component: str, tmp_path: Path) -> None:
    repo = tmp_path / "models--o--m"
    snapshot, blobs, other = repo / "snapshots" / "abc" / component, repo / "blobs", tmp_path / "models--x" / "blobs"
    up = "../" * len(snapshot.relative_to(repo).parts)
    for folder in (snapshot, blobs, other):
        folder.mkdir(parents=True)
    save_file({"a": torch.arange(4)}, blobs / "123")
    (blobs / "456").write_text(json.dumps({"weight_map": {"a": "s.safetensors"}}))
    (snapshot / "s.safetensors").symlink_to(f"{up}blobs/123")
    (snapshot / "model.safetensors.index.json").symlink_to(f"{up}blobs/456")
    assert Checkpoint.open(snapshot).tensor("a").tolist() == [0, 1, 2, 3]
    assert Checkpoint.open(snapshot / "model.safetensors.index.json").tensor("a").tolist() == [0, 1, 2, 3]
    save_file({"a": torch.arange(4)}, other / "123")
    (snapshot / "s.safetensors").unlink()
    (snapshot / "s.safetensors").symlink_to(f"{up}../models--x/blobs/123")
    with pytest.raises(CheckpointError, match="outside the model folder"):
        Checkpoint.open(snapshot)


@pytest.mark.parametrize(
    "layout", ["blobs is a link", "blobs are links", "snapshots is a link", "the repository is a link"]
)
@pytest.mark.parametrize("component", ["", "transformer"])
def test_a_hub_cache_may_be_on_another_disk(layout: str, component: str, tmp_path: Path) -> None:
    repo, disk = tmp_path / "models--o--m", tmp_path / "disk"
    disk.mkdir()
    if layout == "the repository is a link":
        repo.symlink_to(disk)
    else:
        repo.mkdir()
    for name in ("blobs", "snapshots"):
        if layout == f"{name} is a link":
            (disk / name).mkdir()
            (repo / name).symlink_to(disk / name)
            if name == "snapshots":  # its entries link to blobs next to it
                (disk / "blobs").symlink_to(repo / "blobs")
        else:
            (repo / name).mkdir()
    snapshot = repo / "snapshots" / "abc" / component
    snapshot.mkdir(parents=True)
    save_file({"a": torch.arange(4)}, disk / "123")
    if layout == "blobs are links":
        (repo / "blobs" / "123").symlink_to(disk / "123")
    else:
        (disk / "123").rename(repo / "blobs" / "123")
    up = "../" * (3 if component else 2)
    (snapshot / "model.safetensors").symlink_to(f"{up}blobs/123")
    assert Checkpoint.open(snapshot).tensor("a").tolist() == [0, 1, 2, 3]
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(repo / "blobs" / "123")
    assert Checkpoint.open(snapshot).tensor("a").tolist() == [0, 1, 2, 3]
    save_file({"a": torch.arange(4)}, tmp_path / "456")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "456")
    with pytest.raises(CheckpointError, match=rf"outside the model folder.*pass {tmp_path} if all .*cp -L model"):
        Checkpoint.open(snapshot)


def test_of_two_tensors_with_one_name_that_of_the_last_file_is_used(tmp_path: Path) -> None:
    """As in transformers, whatever the index says. A note reports it."""
    for listed, addition in (("x", r", though the index lists it in x\.safetensors"), ("y", "")):
        folder = tmp_path / listed
        weight_map = {"a": f"{listed}.safetensors", "b": "x.safetensors", "c": "y.safetensors"}
        shards(
            folder, weight_map, x={"a": torch.zeros(1), "b": torch.ones(1)}, y={"a": torch.ones(2), "c": torch.ones(1)}
        )
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.tensor("a").tolist() == [1, 1]
        (note,) = checkpoint.notes
        assert re.search(
            rf"1 tensors are in several files.*: 'a' is read from y\.safetensors, not from x\.safetensors{addition}$",
            note,
        )


def test_a_stale_index_is_reported(tmp_path: Path) -> None:
    weight_map = {"a": "y.safetensors", "gone": "x.safetensors", "b": "x.safetensors"}
    checkpoint = Checkpoint.open(shards(tmp_path, weight_map, x={"a": torch.zeros(1), "b": torch.ones(1)}, y={}))
    assert checkpoint.entries.keys() == {"a", "b"}
    (note,) = checkpoint.notes
    assert re.search(r"stale: 2 tensors are not where.* 'a' in y\.safetensors: it is in x\.safetensors$", note)


def test_named_files_and_additional_ones(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("model", "in/other", "head"):
        save_file({name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    for name, extra, found in (
        (None, (), {"model"}),
        ("in/other.safetensors", (), {"in/other"}),
        (None, ("head.safetensors", "none.safetensors"), {"model", "head"}),
    ):
        assert Checkpoint.open(tmp_path, name, extra).entries.keys() == found
    for name in ("../x.safetensors", "in/../../x.safetensors", "/x.safetensors", "in//other.safetensors"):
        with pytest.raises(CheckpointError, match="not the name of a file inside"):
            Checkpoint.open(tmp_path, name)


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"is an adapter, and there are no weights.*load_adapter"):
        Checkpoint.open(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    assert Checkpoint.open(tmp_path).tensor("a").numel() == 2


def test_bad_indexes_are_refused(tmp_path: Path) -> None:
    one, two, x = torch.zeros(1), torch.ones(1), "x.safetensors"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"a": x, "b": "z.safetensors"}, r"'z\.safetensors' is missing"),
        ({"a": 5}, "'a' maps to 5"),
        ({}, "'weight_map' is absent or empty"),
    ]
    for number, (weight_map, message) in enumerate(cases):
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(shards(tmp_path / str(number), weight_map, x={"a": one}, y={"b": two}))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(CheckpointError, match="'a' occurs twice"):
        Checkpoint.open(tmp_path)


def test_a_missing_shard_is_reported_before_any_is_opened(tmp_path: Path) -> None:
    shards(tmp_path, {"a": "x.safetensors", "b": "gone.safetensors"}, x={"a": torch.zeros(1)})
    OPENED.clear()
    with pytest.raises(CheckpointError, match="gone"):
        Checkpoint.open(tmp_path)
    assert not [path for path in OPENED if path.endswith("x.safetensors")]


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("pytorch_model.bin", "pickle"),
        ("model.pt", "pickle"),
        ("m.gguf", "GGUF"),
        ("tf_model.h5", "TensorFlow"),
        ("flax_model.msgpack", "Flax"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, file: str, word: str) -> None:
    (tmp_path / file).write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(CheckpointError, match=rf"unsupported.*{word}.*{file}.*save_pretrained"):
            Checkpoint.open(path)


def test_folder_without_weights(tmp_path: Path) -> None:
    for path, message in [(tmp_path, r"no model\.safetensors"), (tmp_path / "none.safetensors", "cannot open")]:
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(path)
