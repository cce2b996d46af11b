"""Packed checkpoints: the same model bit for bit, laid out for streaming, and never half of one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import models
from weightstream import from_pretrained
from weightstream.adapters.transformers import load_pretrained
from weightstream.cli import app
from weightstream.errors import StoreError, UnsupportedError
from weightstream.store import pack as store
from weightstream.store.folder import OffloadFolder
from words import tokenizer

transformers = pytest.importorskip("transformers")

RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [2, 2, 2], "layer_type": "basic"}
LOCAL = {"resnet": models.build_transformers("ResNetModel", lambda seed: pixels(seed), **RESNET)}


def pixels(seed: int) -> dict[str, Any]:
    return models.pixel_inputs(seed, torch.float32)


def build(name: str) -> models.Model:
    return {**models.MODELS, **LOCAL}[name]()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def saved(name: str, folder: Path, **options: Any) -> Path:
    build(name).module.save_pretrained(folder, **options)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved("llama", tmp_path / "llama")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "packs" / "out"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["pack", *map(str, arguments)])


def packed(model: Path, out: Path, *flags: str) -> str:
    result = run(model, out, *flags)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert os.listdir(out.parent) == [out.name], "something is left beside the pack"
    return result.stdout


def refused(model: object, out: object, *flags: str) -> str:
    result = run(model, out, *flags)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def read(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begins, and its header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return 8 + length, json.loads(raw[8 : 8 + length])


def layout(folder: Path) -> list[tuple[str, str, int, int]]:
    """Shard, tensor, first byte and end, in the order of the bytes; checked to be without gaps."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        begin, header = read(path)
        assert begin % 4096 == 0
        del header["__metadata__"]
        places = sorted((*facts["data_offsets"], name) for name, facts in header.items())
        assert [a for a, _, _ in places] == [0, *(b for _, b, _ in places[:-1])]
        assert begin + places[-1][1] == path.stat().st_size
        found += [(path.name, name, begin + a, begin + b) for a, b, name in places]
    return found


def held(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by the reference reader."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


# The same model


@pytest.mark.parametrize(
    "name", ["llama", "llama-bf16", "bart-bf16", "resnet", "vit", "gpt2", "mixtral", "qwen3_moe-bf16"]
)
def test_a_pack_is_the_same_model(name: str, tmp_path: Path, out: Path) -> None:
    """Untied, tied, with buffers, renamed, and two that transformers converts."""
    source, original = saved(name, tmp_path / "source"), build(name)
    packed(source, out, "--verify")
    expected = type(original.module).from_pretrained(source)
    plain, info = type(original.module).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_state(plain.state_dict(), expected.state_dict())
    budget = models.model_nbytes(expected) // 2
    streamed = from_pretrained(out, device="cpu", device_budget=budget)
    assert streamed.weightstream.plan.host_nbytes > 0
    assert_same_state(streamed.state_dict(), expected.state_dict())
    for seed in range(2):
        inputs = original.inputs(seed)
        models.assert_same(models.step(streamed, inputs), models.step(expected, inputs))
    streamed.weightstream.remove()


def test_what_was_converted_is_not_converted_again(
    tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("qwen3_moe-bf16", tmp_path / "source")
    folders: list[Path] = []
    keep = OffloadFolder.write
    monkeypatch.setattr(OffloadFolder, "write", lambda self, *rest: folders.append(self.path) or keep(self, *rest))
    packed(source, out)
    assert set(folders) == {out.with_name(".out.partial") / "converted"}
    caplog.clear()
    loaded = load_pretrained(out, offload_folder=tmp_path / "offload")
    assert loaded.folder is None
    assert os.listdir(tmp_path / "offload") == [".lock"]
    assert not caplog.records
    for name, tensor in loaded.model.named_parameters():
        assert [m for m in loaded.mappings if m.locate(tensor.data_ptr()) is not None], name


@pytest.mark.parametrize("name", ["llama-bf16", "bart-bf16", "t5"])
def test_ties_whose_tensors_are_not_the_files(name: str, tmp_path: Path, out: Path) -> None:
    """Where all of a file is an odd byte off, nothing can be viewed; the pack is aligned."""
    source = saved(name, tmp_path / "source")
    file = source / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :])
    packed(source, out, "--verify")
    model_class = type(build(name).module)
    plain, info = model_class.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_state(plain.state_dict(), model_class.from_pretrained(source).state_dict())
    assert held(out).keys() == load_file(file).keys()
    assert load_pretrained(out).folder is None


def test_readers_see_the_sources_names_and_metadata(tmp_path: Path, out: Path) -> None:
    """Names that transformers changes as it loads are those of the file; ties are written once."""
    for name in ("vit", "llama-bf16"):
        source = saved(name, tmp_path / name)
        file = source / "model.safetensors"
        tensors = load_file(file)
        save_file(tensors, file, metadata={"format": "pt", "made": "here"})
        packed(source, out)
        assert_same_state(held(out), tensors)
        for path in out.glob("*.safetensors"):
            with safe_open(path, "pt") as found:
                assert found.metadata() == {"format": "pt", "made": "here"}
        shutil.rmtree(out)


def test_unused_tensors_are_kept_at_the_end(tmp_path: Path, out: Path) -> None:
    source = saved("mixtral", tmp_path / "source")
    file = source / "model.safetensors"
    surplus = {
        "surplus.weight": torch.arange(3.0),
        "model.layers.9.block_sparse_moe.experts.0.w1.weight": torch.randn(160, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(8),  # expected by transformers to be unexpected
    }
    save_file(load_file(file) | surplus, file, metadata={"format": "pt"})
    packed(source, out, "--verify")
    entries = [(shard, name) for shard, name, _, _ in layout(out)]
    assert {name for _, name in entries[-3:]} == set(surplus)
    assert_same_state({name: held(out)[name] for name in surplus}, surplus)
    assert not [name for _, name in entries[:-3] if ".w1." in name]
    load = transformers.MixtralForCausalLM.from_pretrained
    assert_same_state(load(out).state_dict(), load(source).state_dict())


def test_files_beside_the_weights(llama: Path, out: Path) -> None:
    beside = {"tokenizer.json": "{}", "chat_template.jinja": "x", "code.py": "y", "vocab.txt": "z", "sp.model": "w"}
    beside |= {name: (llama / name).read_text() for name in ("config.json", "generation_config.json")}
    weights = ("pytorch_model.bin", "a.pt", "b.gguf", "c.h5", "d.safetensors", "x.safetensors.index.json", ".hidden")
    for name, text in (beside | dict.fromkeys(weights, "no")).items():
        (llama / name).write_text(text)
    (llama / "folder").mkdir()
    packed(llama, out)
    assert set(os.listdir(out)) == {*beside, "model.safetensors", "weightstream.json"}
    assert {name: (out / name).read_text() for name in beside} == beside


def test_run_takes_it(llama: Path, out: Path) -> None:
    tokenizer(None).save_pretrained(llama)
    packed(llama, out)
    flags = ["--prompt", "w5 w9", "--device", "cpu", "--device-budget", "512KiB", "--max-new-tokens", "4", "--json"]
    ran = [CliRunner().invoke(app, ["run", str(folder), *flags]) for folder in (llama, out)]
    assert [result.exit_code for result in ran] == [0, 0], ran
    assert json.loads(ran[0].stdout)["tokens"] == json.loads(ran[1].stdout)["tokens"]


# Layout


def test_units_are_contiguous_aligned_and_in_streaming_order(tmp_path: Path, out: Path) -> None:
    source = saved("llama", tmp_path / "source", max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    packed(source, out)
    entries = layout(out)
    assert {shard for shard, *_ in entries} == {"model.safetensors"}
    names = [name for _, name, _, _ in entries]
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    blocks = [f"model.layers.{i}.{part}.weight" for i in range(6) for part in parts]
    large = ["model.embed_tokens.weight", *blocks, "lm_head.weight"]
    assert names[: len(large)] == large
    norms = [f"model.layers.{i}.{part}_layernorm.weight" for i in range(6) for part in ("input", "post_attention")]
    assert sorted(names[len(large) :]) == sorted([*norms, "model.norm.weight"])
    begins = {name: begin for _, name, begin, _ in entries}
    firsts = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(6)]
    assert all(begins[name] % 4096 == 0 for name in ["model.embed_tokens.weight", *firsts, "lm_head.weight"])


def test_a_unit_that_would_begin_inside_of_a_page_begins_a_shard(tmp_path: Path, out: Path) -> None:
    """Blocks of qwen3_moe hold a matrix of 768 bytes, which is too large here to go to the end."""
    packed(saved("qwen3_moe-bf16", tmp_path / "source"), out)
    entries = layout(out)
    for index in range(6):
        held = [(s, b) for s, name, b, _ in entries if f"layers.{index}." in name and "norm" not in name]
        assert len({shard for shard, _ in held}) == 1
        assert held[0][1] % 4096 == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: shard for shard, name, _, _ in entries}
    assert index["metadata"]["total_size"] == sum(end - begin for _, _, begin, end in entries)
    names = sorted({shard for shard, *_ in entries})
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]


def units_of(*sizes: int, dtype: torch.dtype = torch.uint8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {f"t{i}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype)}
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((4096, 8192, 4096), 10**6, [3]),
        ((4096, 8192, 4096), 12288, [2, 1]),
        ((4096, 8192, 4096), 4096, [1, 1, 1]),
        ((4096, 100, 4096), 10**6, [2, 1]),
        ((100, 4096, 8192, 1), 10**6, [1, 3]),
        ((20000,), 4096, [1]),
    ],
)
def test_shards(sizes: tuple[int, ...], limit: int, expected: list[int]) -> None:
    shards = store.lay_out(units_of(*sizes), {}, shard_nbytes=limit)
    assert [len(shard.tensors) for shard in shards] == expected
    assert all(len(shard.header) % 4096 == 0 for shard in shards)
    assert sum(shard.nbytes - len(shard.header) for shard in shards) == sum(sizes)
    assert [name for shard in shards for name in shard.tensors] == [f"t{i}" for i in range(len(sizes))]


def test_items_begin_at_multiples_of_their_size() -> None:
    unit = {"odd": torch.zeros(3, dtype=torch.uint8), "wide": torch.zeros(2, dtype=torch.float64), "e": torch.zeros(0)}
    (shard,) = store.lay_out([unit], {})
    assert list(shard.tensors) == ["wide", "e", "odd"]


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "float16", "float64", "complex64", "float8_e4m3fn"])
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    value = torch.tensor([[0, 1], [1, 1]]).to(getattr(torch, dtype))
    unit = {
        "matrix": value,
        "turned": value.clone()[:, :1].t(),
        "scalar": value.clone()[0, 1],
        "empty": value[:0].clone(),
    }
    shards = store.lay_out([unit], {"made": "here"})
    write(tmp_path, shards)
    with safe_open(tmp_path / "model.safetensors", "pt") as found:
        assert found.metadata() == {"format": "pt", "made": "here"}
        assert_same_state({key: found.get_tensor(key) for key in found.keys()}, unit)  # noqa: SIM118
    store.verify(tmp_path, shards, [], ignore)


def test_a_dtype_without_a_code_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="t0 is complex128"):
        store.lay_out(units_of(16, dtype=torch.complex128), {})


# Whole or nothing


def ignore(nbytes: int) -> None:
    """Progress that nobody looks at."""


def write(folder: Path, shards: list[store.Shard], **origin: str) -> None:
    store.write(folder, shards, [], {"source": "s", **origin}, ignore)


KILLED = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from weightstream.store import pack as store
from test_pack import contents, ignore, units_of

root, seed = Path(sys.argv[1]), int(sys.argv[2])
source = root / "source"
source.mkdir()
(source / "config.json").write_text("{{}}")
out = root / "out"
shards = store.lay_out(units_of(*[4097 + i for i in range(12)]), {{}})
fsync = os.fsync

def pack(out, pause):
    def slow(descriptor):
        time.sleep(pause)
        fsync(descriptor)
        time.sleep(pause)
    os.fsync = slow
    with store.growing(out) as folder:
        store.write(folder, shards, [], {{"source": "s"}}, ignore)
        store.finish(folder, out, source)

began = time.perf_counter()
pack(root / "plain", 0.004)
took = time.perf_counter() - began
expected = contents(root / "plain")
chance = random.Random(seed)
early = 0
for _ in range(10):
    shutil.rmtree(out, ignore_errors=True)
    while not out.exists():
        child = os.fork()
        if not child:
            pack(out, 0.004)
            os._exit(0)
        time.sleep(chance.uniform(0, took))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if out.exists():
            break
        early += 1
        if chance.random() < 0.5:
            pack(out, 0)
    assert store.is_packed(out, "s")
    store.verify(out, shards, [], ignore)
    assert contents(out) == expected
    assert not (root / ".out.partial").exists()
print(early)
"""


def test_kill_at_random_moments(tmp_path: Path) -> None:
    """A killed pack is nothing or whole; what goes on after it ends with the very bytes of one that was left alone."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    code = KILLED.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, str(seed)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert int(done.stdout) >= 5, f"seed {seed}: only {done.stdout} of the kills came before the end"


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are written."""
    names: list[str] = []
    replace = store._replace

    def noting(path: Path, *rest: Any) -> str:
        names.append(path.name)
        return replace(path, *rest)

    monkeypatch.setattr(store, "_replace", noting)
    return names


@pytest.mark.parametrize("change", ["none", "flipped", "cut", "removed", "record", "source", "layout"])
def test_what_an_earlier_run_left(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = store.lay_out(units_of(100, 200, 300), {})
    write(tmp_path, shards)
    expected = contents(tmp_path)
    (tmp_path / "model-00009-of-00009.safetensors.tmp").write_text("of a killed run")
    damaged = tmp_path / shards[1].name
    if change == "flipped":
        flip(damaged, 4100)
    elif change == "cut":
        os.truncate(damaged, 4200)
    elif change == "removed":
        damaged.unlink()
    elif change == "record":
        (tmp_path / "weightstream.json").write_text("{")
    elif change == "layout":
        shards = store.lay_out(units_of(100, 200, 300), {"made": "anew"})
    names = noted(monkeypatch)
    write(tmp_path, shards, **({"source": "another"} if change == "source" else {}))
    again = {"none": [], "record": shards, "source": shards, "layout": shards}.get(change, shards[1:2])
    assert [name for name in names if name.endswith("safetensors")] == [shard.name for shard in again]
    if change in ("source", "layout"):
        assert contents(tmp_path).keys() == expected.keys()
        store.verify(tmp_path, shards, [], ignore)
    else:
        assert contents(tmp_path) == expected


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def fail_at(monkeypatch: pytest.MonkeyPatch, count: int, error: int) -> None:
    """The count-th fsync fails."""
    fsync, calls = os.fsync, iter(range(count))

    def failing(descriptor: int) -> None:
        if next(calls, None) is None:
            raise OSError(error, os.strerror(error))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("count", range(11))
def test_a_write_that_fails_is_gone_on_with(
    count: int, error: int, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three shards with a record each, the index, two files beside them, the folder; then, renamed, its parent."""
    source = saved("bart-bf16", tmp_path / "source")
    with monkeypatch.context() as patch:
        fail_at(patch, count, error)
        message = refused(source, out)
    assert os.strerror(error) in message
    assert "run it again to continue" in message
    left = out.with_name(".out.partial")
    if count == 10:
        assert "already packed" in packed(source, out)
    else:
        assert not out.exists()
        assert left.exists() == (count > 1)
        assert not list(left.glob("*.tmp"))
        names = noted(monkeypatch)
        packed(source, out)
        assert len([name for name in names if name.endswith(".safetensors")]) == 3 - min(count // 2, 3)
    packed(source, out, "--verify")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=1m"):
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    yield folder
    libc.umount2(bytes(folder), 2)


def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_disk / "pack"
    folder.mkdir()
    shards = store.lay_out(units_of(300_000, 300_000, 300_000, 300_000), {})
    needed, free = sum(shard.nbytes for shard in shards), shutil.disk_usage(folder).free
    with pytest.raises(StoreError, match=f"{needed} bytes to write > {free} bytes free: make room for {needed - free}"):
        write(folder, shards)
    assert os.listdir(folder) == []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 30})())
        with (
            pytest.raises(StoreError, match=r"No space left.*run it again"),
            store.growing(small_disk / "out") as growing,
        ):
            write(growing, shards)
        done = json.loads((growing / "weightstream.json").read_text())["shards"]
        assert [facts["name"] for facts in done] == [shard.name for shard in shards[:3]]
        assert {*os.listdir(growing)} == {"weightstream.json", *(shard.name for shard in shards[:3])}
    ctypes.CDLL(None).mount(b"tmpfs", bytes(small_disk), b"tmpfs", 32, b"size=4m")  # MS_REMOUNT
    names = noted(monkeypatch)
    with store.growing(small_disk / "out") as growing:
        write(growing, shards)
    assert [name for name in names if name.endswith(".safetensors")] == [shards[3].name]
    store.verify(growing, shards, [], ignore)


@pytest.mark.parametrize("how", ["cut", "rewritten", "replaced", "removed", "after the last piece"])
def test_the_source_changes_meanwhile(how: str, llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = llama / "model.safetensors"
    pieces = store.Shard.pieces

    def change() -> None:
        if how == "cut":
            os.truncate(file, 5000)
        elif how == "replaced":
            shutil.copy(file, file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)
        elif how == "removed":
            file.unlink()
        else:
            flip(file, file.stat().st_size - 1)

    def changing(self: store.Shard, mappings: Any) -> Iterator[Any]:
        count = len(self.tensors) if how == "after the last piece" else 20
        for number, piece in enumerate(pieces(self, mappings)):
            yield piece
            if number == count:
                change()

    monkeypatch.setattr(store.Shard, "pieces", changing)
    message = refused(llama, out)
    assert str(file) in message
    assert re.search("changed since it was mapped|now gone", message)
    assert not out.exists()
    monkeypatch.undo()
    if how in ("rewritten", "replaced", "after the last piece"):
        packed(llama, out, "--verify")


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Bytes go in pieces: none is larger than 16 MiB, and no tensor is copied."""
    tensor = torch.arange(5 << 20, dtype=torch.int64)
    (shard,) = store.lay_out([{"large": tensor}], {})
    sizes = [(len(piece), piece.ctypes.data) for _, piece in shard.pieces([])][1:]
    assert [size for size, _ in sizes] == [16 << 20, 16 << 20, 8 << 20]
    assert [address for _, address in sizes] == [tensor.data_ptr() + (i * 16 << 20) for i in range(3)]


# Verifying and going on


def test_verify_tells_what_differs(llama: Path, out: Path) -> None:
    assert re.fullmatch(
        r".*/out: packed and verified 57 tensors, 1.1MiB \(\d+ bytes\) in 1 files in \d+\.\d s\n",
        packed(llama, out, "--verify"),
    )
    assert re.match(r".*/out: verified 57 tensors", packed(llama, out, "--verify"))
    assert "already packed" in packed(llama, out)
    places = {name: begin for _, name, begin, _ in layout(out)}
    before = contents(out)
    for name in ("model.layers.3.mlp.up_proj.weight", "model.norm.weight"):
        flip(out / "model.safetensors", places[name] + 5)
        message = refused(llama, out, "--verify")
        assert f"{out / 'model.safetensors'}: {name} differs from the source, and the checksum is not" in message
        flip(out / "model.safetensors", places[name] + 5)
    flip(out / "model.safetensors", 9)
    assert "the header differs" in refused(llama, out, "--verify")
    assert not out.with_name(".out.partial").exists()
    (out / "model.safetensors").write_bytes(before["model.safetensors"])
    record = json.loads(before["weightstream.json"])
    record["shards"][0]["sha256"] = "0" * 64
    (out / "weightstream.json").write_text(json.dumps(record))
    assert "nothing differs from the source, and the checksum is not" in refused(llama, out, "--verify")


def test_verify_reads_to_the_end(tmp_path: Path) -> None:
    shards = store.lay_out(units_of(100), {})
    write(tmp_path, shards)
    with open(tmp_path / "model.safetensors", "ab") as file:
        file.write(b"more")
    with pytest.raises(StoreError, match="nothing differs from the source, and the checksum is not"):
        store.verify(tmp_path, shards, [], ignore)


def test_verify_finds_a_source_that_changed_unseen(llama: Path, out: Path) -> None:
    packed(llama, out)
    file, status = llama / "model.safetensors", os.stat(llama / "model.safetensors")
    flip(file, status.st_size - 1)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "differs from the source, and the checksum is that of when" in refused(llama, out, "--verify")


def test_verify_before_it_is_put_in_place(llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = store.verify

    def verify(folder: Path, *rest: Any) -> None:
        flip(folder / "model.safetensors", 5000)
        checked(folder, *rest)

    monkeypatch.setattr(store, "verify", verify)
    assert "differs from the source" in refused(llama, out, "--verify")
    assert not out.exists()
    monkeypatch.undo()
    packed(llama, out, "--verify")


def test_record(llama: Path, out: Path) -> None:
    packed(llama, out)
    record = json.loads((out / "weightstream.json").read_text())
    assert record["format"] == 1
    assert record["source"] == load_pretrained(llama).checkpoint.fingerprint()
    (facts,) = record["shards"]
    path = out / facts["name"]
    assert facts["size"] == path.stat().st_size
    assert facts["sha256"] == subprocess.run(["sha256sum", path], capture_output=True, text=True).stdout.split()[0]


def test_two_at_once(llama: Path, out: Path) -> None:
    left = out.with_name(".out.partial")
    left.mkdir(parents=True)
    descriptor = os.open(left, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert f"{out} is being packed by another process" in refused(llama, out)
    assert left.exists()
    os.close(descriptor)
    packed(llama, out)


def test_a_damaged_pack_is_not_called_finished(llama: Path, out: Path) -> None:
    packed(llama, out)
    os.truncate(out / "model.safetensors", 5000)
    assert "model.safetensors missing or cut" in refused(llama, out)
    (out / "model.safetensors").unlink()
    assert "model.safetensors missing or cut" in refused(llama, out)
    for text in ("", "[]", '{"shards": 3}', '{"shards": [{}]}', "\udcff".encode("utf-8", "surrogateescape")):
        (out / "weightstream.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        assert "weightstream.json is damaged" in refused(llama, out)


# What is refused


def other_pack(llama: Path, out: Path) -> tuple[Path, Path]:
    packed(llama, out)
    flip(llama / "model.safetensors", (llama / "model.safetensors").stat().st_size - 1)
    return llama, out


def foreign(llama: Path, out: Path) -> tuple[Path, Path]:
    out.mkdir(parents=True)
    (out / "thesis.txt").write_text("mine")
    return llama, out


def a_file(llama: Path, out: Path) -> tuple[Path, Path]:
    out.parent.mkdir()
    out.write_text("mine")
    return llama, out


def a_link(llama: Path, out: Path) -> tuple[Path, Path]:
    out.parent.mkdir()
    out.symlink_to(llama)
    return llama, out


def only_bin(llama: Path, out: Path) -> tuple[Path, Path]:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    return llama, out


def no_config(llama: Path, out: Path) -> tuple[Path, Path]:
    (llama / "config.json").unlink()
    return llama, out


@pytest.mark.parametrize(
    ("arrange", "expected"),
    [
        (other_pack, "is a pack of other weights, or these changed"),
        (foreign, "exists and is no pack: name another folder, or empty it"),
        (a_file, "exists and is no pack"),
        (a_link, "is a link to"),
        (lambda llama, out: (llama, llama), "is in the model's folder"),
        (lambda llama, out: (llama, llama / "deep" / "out"), "is in the model's folder"),
        (lambda llama, out: (llama / "model.safetensors", llama / "out"), "is in the model's folder"),
        (lambda llama, out: (out, llama), "no such file or folder"),
        (only_bin, "PyTorch pickle"),
        (no_config, "cannot read config.json"),
    ],
)
def test_refused(arrange: Callable[[Path, Path], tuple[Path, Path]], expected: str, llama: Path, out: Path) -> None:
    model, target = arrange(llama, out)
    before = contents(target) if target.is_dir() and target != llama else None
    assert expected in refused(model, target)
    assert not target.with_name(f".{target.name}.partial").exists()
    if before is not None:
        assert contents(target) == before


def test_an_empty_folder_and_a_path_of_the_file(llama: Path, out: Path) -> None:
    out.mkdir(parents=True)
    packed(llama / "model.safetensors", out, "--verify")
    assert_same_state(load_file(out / "model.safetensors"), load_file(llama / "model.safetensors"))


def test_a_link_where_it_grows_is_not_followed(llama: Path, out: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    out.parent.mkdir()
    out.with_name(".out.partial").symlink_to(elsewhere)
    assert ".out.partial" in refused(llama, out)
    assert os.listdir(elsewhere) == []


def test_a_pack_of_a_pack(llama: Path, out: Path, tmp_path: Path) -> None:
    packed(llama, out)
    packed(out, tmp_path / "again" / "out", "--verify")
    first, second = contents(out), contents(tmp_path / "again" / "out")
    assert first.pop("weightstream.json") != second.pop("weightstream.json")
    assert first == second


def test_without_transformers(llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'weightstream[transformers]'" in refused(llama, out)
