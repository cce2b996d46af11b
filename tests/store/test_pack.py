"""Packed checkpoints: the same model bit for bit, in streaming order, and never half of one."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
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
from repeats import thinned
from weightstream import from_pretrained
from weightstream.adapters.hf.load import load_pretrained
from weightstream.api.pack import pack
from weightstream.cli import app
from weightstream.errors import StoreError, UnsupportedError, WeightstreamError
from weightstream.plan.units import human
from weightstream.store import pack as store
from weightstream.store.folder import OffloadFolder
from weightstream.store.pack import Shard
from words import tokenizer

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("no_loading_bars")

RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [2, 2, 2], "layer_type": "basic"}
LOCAL = {"resnet": models.build_transformers("ResNetModel", lambda seed: pixels(seed), **RESNET)}


def pixels(seed: int) -> dict[str, Any]:
    return models.pixel_inputs(seed, torch.float32)


def build(name: str) -> models.Model:
    return {**models.MODELS, **LOCAL}[name]()


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
    said = [line for line in result.stderr.splitlines() if not line.startswith("weightstream: ")]
    assert not said, "besides warnings of the library"
    assert os.listdir(out.parent) == [out.name], "something is left next to the pack"
    return result.stdout


def refused(model: object, out: object, *flags: str) -> str:
    result = run(model, out, *flags)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def read(path: Path) -> tuple[int, dict[str, Any]]:
    """The offset of the data of a safetensors file, and its header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return 8 + length, json.loads(raw[8 : 8 + length])


def layout(folder: Path) -> list[tuple[str, str, int, int]]:
    """Shard, tensor, first byte and end, in the order of the bytes. Checks that there are no gaps."""
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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", thinned(["llama", "llama-bf16", "resnet", "bart-bf16", "gpt2", "vit", "mixtral", "qwen3_moe-bf16"])
)
def test_a_pack_is_the_same_model(name: str, tmp_path: Path, out: Path) -> None:
    """Untied, tied, with buffers, renamed, and two models that transformers converts."""
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


def test_converted_weights_are_not_converted_again(
    tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are copied from their places. Converted weights, here a cast, are made in the folder that is being
    written."""
    source = saved("qwen3_moe-bf16", tmp_path / "source")
    file, cast = source / "model.safetensors", "model.layers.0.mlp.experts.1.down_proj.weight"
    tensors = load_file(file)
    save_file({name: t.float() if name == cast else t for name, t in tensors.items()}, file, metadata={"format": "pt"})
    written: list[tuple[str, Path]] = []
    keep = OffloadFolder.write
    monkeypatch.setattr(
        OffloadFolder, "write", lambda self, name, t: written.append((name, self.path)) or keep(self, name, t)
    )
    packed(source, out)
    ((name, folder),) = written
    assert name == "down_proj"
    assert (folder.parent.parent, folder.parent.name[:5]) == (out.parent, ".out.")
    caplog.clear()
    loaded = load_pretrained(out, offload_folder=tmp_path / "offload")
    assert loaded.folder is None
    assert os.listdir(tmp_path / "offload") == []
    assert not caplog.records
    assert not loaded.lazy
    for name, tensor in loaded.model.named_parameters():
        assert [m for m in loaded.mappings if m.locate(tensor.data_ptr()) is not None], name


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama-bf16", "bart-bf16", "t5"])
def test_ties_with_tensors_that_do_not_view_the_file(name: str, tmp_path: Path, out: Path) -> None:
    """If all of a file is one byte off, nothing can be viewed. The pack is aligned."""
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
    """Names that transformers changes at load stay those of the file. Ties are written once."""
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
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(8),  # transformers ignores this name
    }
    save_file(load_file(file) | surplus, file, metadata={"format": "pt"})
    packed(source, out, "--verify")
    entries = [(shard, name) for shard, name, _, _ in layout(out)]
    assert {name for _, name in entries[-3:]} == set(surplus)
    assert_same_state({name: held(out)[name] for name in surplus}, surplus)
    assert not [name for _, name in entries[:-3] if ".w1." in name]
    load = transformers.MixtralForCausalLM.from_pretrained
    assert_same_state(load(out).state_dict(), load(source).state_dict())


def test_other_files_of_the_folder(llama: Path, out: Path) -> None:
    beside = {"tokenizer.json": "{}", "chat_template.jinja": "x", "code.py": "y", "vocab.txt": "z", "sp.model": "w"}
    beside |= {name: (llama / name).read_text() for name in ("config.json", "generation_config.json")}
    beside |= {"spk_dict.pt": "p", "folder/generate.py": "q"}
    (llama / "folder").mkdir()
    weights = (
        "pytorch_model.bin",
        "model.pt",
        "folder/a.pt",
        "b.gguf",
        "c.h5",
        "d.safetensors",
        "x.safetensors.index.json",
        ".hidden",
    )
    for name, text in (beside | dict.fromkeys(weights, "no")).items():
        (llama / name).write_text(text)
    packed(llama, out)
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {*beside, "model.safetensors"}
    assert {name: (out / name).read_text() for name in beside} == beside


def test_run_accepts_it(llama: Path, out: Path) -> None:
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
    blocks = [f"model.layers.{i}.{part}.weight" for i in range(4) for part in parts]
    large = ["model.embed_tokens.weight", *blocks, "lm_head.weight"]
    assert names[: len(large)] == large
    norms = [f"model.layers.{i}.{part}_layernorm.weight" for i in range(4) for part in ("input", "post_attention")]
    assert sorted(names[len(large) :]) == sorted([*norms, "model.norm.weight"])
    begins = {name: begin for _, name, begin, _ in entries}
    firsts = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(4)]
    assert all(begins[name] % 4096 == 0 for name in ["model.embed_tokens.weight", *firsts, "lm_head.weight"])


def test_a_unit_that_would_begin_inside_a_page_begins_a_shard(tmp_path: Path, out: Path) -> None:
    """Blocks of qwen3_moe have a matrix of 768 bytes, too large here to be moved to the end."""
    packed(saved("qwen3_moe-bf16", tmp_path / "source"), out)
    entries = layout(out)
    for index in range(4):
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
    assert all(len(shard.header({})) % 4096 == 0 for shard in shards)
    assert sum(shard.nbytes - len(shard.header({})) for shard in shards) == sum(sizes)
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
    for shard in shards:
        shard.verify(tmp_path / shard.name, [], ignore)


def test_a_dtype_without_a_code_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="t0 is complex128"):
        write(tmp_path, store.lay_out(units_of(16, dtype=torch.complex128), {}))
    assert os.listdir(tmp_path) == []


# Whole or nothing


def ignore(nbytes: int) -> None:
    """Progress that is not shown."""


def write(folder: Path, shards: list[Shard]) -> None:
    store.write_pack(folder, shards, [], ignore)


KILLED = """
import itertools, os, shutil, signal, sys
from pathlib import Path
import torch
from weightstream.errors import CheckpointError
from weightstream.store import pack as store
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.pack import Shard

root = Path(sys.argv[1])
(root / "source").mkdir()
(root / "source" / "config.json").write_text("{}")
units = [{f"t{i}": torch.full((4097 + i,), i, dtype=torch.uint8)} for i in range(5)]
shards = store.lay_out(units, {})
pieces, left = Shard.pieces, -1

def pack(out):
    with store.growing(out) as folder:
        store.write_pack(folder, shards, [], lambda nbytes: None)
        store.copy_beside(root / "source", folder)

def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}

def step():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

def stepping(function):
    def call(*rest):
        step()
        function(*rest)
        step()
    return call

def stepped(*rest):
    for piece in pieces(*rest):
        step()
        yield piece

out = root / "out"
pack(out)
expected = contents(out)
Shard.pieces, os.fsync, os.replace = stepped, stepping(os.fsync), stepping(os.replace)
for number in itertools.count(1):
    shutil.rmtree(out)
    child = os.fork()
    if not child:
        try:
            left = number
            pack(out)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    if not out.exists():
        assert len(os.listdir(root)) == 2
        try:
            Checkpoint.open(out)
        except CheckpointError:
            pack(out)
    assert contents(out) == expected, number
    assert sorted(os.listdir(root)) == ["out", "source"], number
    if not status:
        break
print(number)
"""


def test_a_kill_at_every_step(tmp_path: Path) -> None:
    """After a kill there is no pack or a whole one, and the next run removes all leftovers."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_two_concurrent_packs(tmp_path: Path) -> None:
    """The first that is whole stays, and the other one reports it."""
    shards = store.lay_out(units_of(100), {})

    def second(first: Path) -> None:
        write(first, shards)
        with store.growing(tmp_path / "out") as folder:
            assert first.is_dir()
            write(folder, shards)
        (tmp_path / "out" / "theirs").touch()

    with pytest.raises(StoreError, match="out cannot be written"), store.growing(tmp_path / "out") as first:
        second(first)
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "theirs"]


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(("count", "error"), [(0, errno.ENOSPC), (2, errno.EIO), (3, errno.EIO), (4, errno.EIO)])
def test_a_failed_write_leaves_nothing(
    count: int, error: int, llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failing path: a shard, two other files, their folder, or, after the rename, its parent."""
    fsync, calls = os.fsync, iter(range(count))

    def failing(descriptor: int) -> None:
        if next(calls, None) is None:
            raise OSError(error, os.strerror(error))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        message = refused(llama, out)
    assert f"{out} cannot be written: " in message
    assert os.strerror(error) in message
    assert os.listdir(out.parent) == (["out"] if count == 4 else [])
    if count < 4:
        packed(llama, out, "--verify")


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


def test_phases_count_the_bytes_of_the_model(llama: Path, tmp_path: Path) -> None:
    counted: Counter[tuple[str, int]] = Counter()
    count = lambda phase, total, nbytes: counted.update({(phase, total): nbytes})  # noqa: E731
    pack(str(llama), tmp_path / "p", codec="compressed", verify=True, advance=count)
    assert [phase for phase, _ in counted] == ["measuring compressed sizes", "writing", "verifying"]
    assert all(total == done for (_, total), done in counted.items())
    (nbytes,) = {total for phase, total in counted if phase != "measuring compressed sizes"}
    assert nbytes == sum(tensor.nbytes for tensor in load_file(llama / "model.safetensors").values())


def test_a_conversion_that_the_pack_keeps_is_no_warning(llama: Path, tmp_path: Path) -> None:
    facts = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(facts | {"dtype": "bfloat16"}))
    result = run(llama, tmp_path / "p")
    assert {tensor.dtype for tensor in load_file(tmp_path / "p" / "model.safetensors").values()} == {torch.bfloat16}
    assert re.fullmatch(r"weightstream: writing: [\d.]+KiB\n", result.stderr)


def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_disk / "pack"
    folder.mkdir()
    shards = store.lay_out(units_of(300_000, 300_000, 300_000, 300_000), {})
    needed, free = sum(shard.nbytes for shard in shards), shutil.disk_usage(folder).free
    out = small_disk / "out"
    arithmetic = rf"{out} cannot be written: {human(needed)} to write > {human(free)} free: free {human(needed - free)}"
    with pytest.raises(StoreError, match=arithmetic), store.growing(out) as growing:
        write(growing, shards)
    assert os.listdir(folder) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 30})())
    with pytest.raises(StoreError, match=r"No space left"), store.growing(small_disk / "out") as growing:
        write(growing, shards)
    assert os.listdir(small_disk) == ["pack"]
    shards = store.lay_out(units_of(300_000), {})
    with store.growing(small_disk / "out") as growing:
        write(growing, shards)
    shards[0].verify(small_disk / "out" / shards[0].name, [], ignore)


@pytest.mark.parametrize("how", ["cut", "rewritten", "replaced", "removed", "after the last piece"])
def test_a_source_that_changes_meanwhile(how: str, llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = llama / "model.safetensors"
    pieces, written = Shard.pieces, []

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

    def changing(self: Shard, name: str, mappings: Any) -> Iterator[Any]:
        yield from pieces(self, name, mappings)
        written.append(name)
        if len(written) == (len(self.tensors) if how == "after the last piece" else 20):
            change()

    monkeypatch.setattr(Shard, "pieces", changing)
    message = refused(llama, out)
    assert str(file) in message
    assert re.search("changed since it was mapped|now gone", message)
    assert os.listdir(out.parent) == []
    monkeypatch.undo()
    if how in ("rewritten", "replaced", "after the last piece"):
        packed(llama, out, "--verify")


def test_memory_stays_flat(tmp_path: Path) -> None:
    """Bytes are copied in pieces of at most 16 MiB, and no tensor is copied whole."""
    tensor = torch.arange(5 << 20, dtype=torch.int64)
    (shard,) = store.lay_out([{"large": tensor}], {})
    sizes = [(len(piece), piece.ctypes.data) for piece in shard.pieces("large", [])]
    assert [size for size, _ in sizes] == [16 << 20, 16 << 20, 8 << 20]
    assert [address for _, address in sizes] == [tensor.data_ptr() + (i * 16 << 20) for i in range(3)]


# Verification


def test_verify_reports_differences(llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(
        r".*/out: packed and verified 39 tensors, 742.2KiB \(\d+ bytes\) in a file, \d+\.\d s\n",
        packed(llama, out, "--verify"),
    )
    places = {name: begin for _, name, begin, _ in layout(out)}
    shutil.rmtree(out)
    verify = Shard.verify
    for name in ("model.layers.3.mlp.up_proj.weight", "model.norm.weight"):

        def damaged(self: Shard, path: Path, *rest: Any, offset: int = places[name] + 5) -> None:
            flip(path, offset)
            verify(self, path, *rest)

        monkeypatch.setattr(Shard, "verify", damaged)
        assert f"model.safetensors: {name} differs from the source" in refused(llama, out, "--verify")
        assert os.listdir(out.parent) == []
    monkeypatch.undo()
    packed(llama, out, "--verify")


@pytest.mark.parametrize("damage", ["longer", "cut", "header", "metadata", "name", "dtype", "shape"])
def test_verify_reads_the_whole_file(damage: str, tmp_path: Path) -> None:
    (shard,) = shards = store.lay_out([{"a": torch.arange(100).view(25, 4), "b": torch.arange(8)}], {})
    write(tmp_path, shards)
    path = tmp_path / shard.name
    raw = path.read_bytes()
    changes = {
        "header": (b"{", b"["),
        "name": (b'"b"', b'"c"'),
        "metadata": (b"pt", b"tf"),
        "dtype": (b"I64", b"U64"),
        "shape": (b"25,4", b"4,25"),
    }
    if damage in changes:
        path.write_bytes(raw.replace(*changes[damage], 1))
    else:
        path.write_bytes(raw + b"more" if damage == "longer" else raw[:-1])
    with pytest.raises(WeightstreamError, match=r"model\.safetensors"):
        shard.verify(path, [], ignore)


# Refusals


def packed_before(llama: Path, out: Path) -> tuple[Path, Path]:
    packed(llama, out)
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
        (packed_before, "exists: name a new folder"),
        (foreign, "exists: name a new folder"),
        (a_file, "exists: name a new folder"),
        (a_link, "is a link to"),
        (lambda llama, out: (llama, llama), "exists: name a new folder"),
        (lambda llama, out: (llama, llama / "deep" / "out"), "is in the model's folder"),
        (lambda llama, out: (llama / "model.safetensors", llama / "out"), "is in the model's folder"),
        (lambda llama, out: (out, out.with_name("new")), "no such file or folder"),
        (only_bin, "PyTorch pickle"),
        (no_config, "no config.json there"),
    ],
)
def test_refused(arrange: Callable[[Path, Path], tuple[Path, Path]], expected: str, llama: Path, out: Path) -> None:
    model, target = arrange(llama, out)
    before = contents(target) if target.is_dir() and target != llama else None
    assert expected in refused(model, target)
    assert not list(target.parent.glob(".*.partial*"))
    if before is not None:
        assert contents(target) == before


def test_an_empty_folder_and_a_path_of_the_file(llama: Path, out: Path) -> None:
    out.mkdir(parents=True)
    packed(llama / "model.safetensors", out, "--verify")
    assert_same_state(load_file(out / "model.safetensors"), load_file(llama / "model.safetensors"))


def test_a_pack_of_a_pack(llama: Path, out: Path, tmp_path: Path) -> None:
    packed(llama, out)
    packed(out, tmp_path / "again" / "out", "--verify")
    assert contents(out) == contents(tmp_path / "again" / "out")


def test_without_transformers(llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'weightstream[transformers]'" in refused(llama, out)
