"""Compressed packs: the same weights bit for bit in fewer bytes, and damage that is detected before use."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import re
import resource
import shutil
import threading
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_pack import assert_same_state, bits, run
from test_pack import read as header_of

from weightstream.adapters.hf.load import LoadedModel, load_pretrained
from weightstream.codec import coding, reference
from weightstream.codec.format import ELEMENTS, TILE, Layout
from weightstream.errors import CheckpointError, StoreError
from weightstream.store import pack as store
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.lazy import DecodedMemory
from weightstream.store.pack import Shard, choose

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("no_loading_bars")

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 304,  # whole pages
    "max_position_embeddings": 64,
}
UP = "model.layers.1.mlp.up_proj.weight"


def saved(folder: Path, dtype: str = "bfloat16", **facts: Any) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": False, **facts})
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture(scope="module")
def packs(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs")
    transformers.utils.logging.disable_progress_bar()
    packed(source, folder / "auto", "--codec", "auto")
    return folder


@pytest.fixture
def pack(packs: Path, tmp_path: Path) -> Path:
    """A pack to damage."""
    return Path(shutil.copytree(packs / "auto", tmp_path / "auto"))


def packed(model: Path, out: Path, *flags: str) -> str:
    result = run(model, out, *flags)
    assert result.exit_code == 0, result.output
    phases = r"weightstream: (measuring compressed sizes|writing|verifying): .*"
    assert all(re.fullmatch(phases, line) for line in result.stderr.splitlines())
    return result.stdout


def refused(model: Path, out: Path, *flags: str) -> str:
    result = run(model, out, *flags)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def read(path: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The offset of the data, the header, and its entries about compressed tensors."""
    begin, header = header_of(path)
    return begin, header, json.loads(header["__metadata__"].get("weightstream", "{}"))


def populate(loaded: LoadedModel) -> None:
    for memory in loaded.lazy:
        memory.populate(0, memory.nbytes)


def memory_of(checkpoint: Checkpoint, name: str) -> DecodedMemory:
    checkpoint.tensor(name)
    memory = checkpoint.lazy[name]
    assert isinstance(memory, DecodedMemory)
    return memory


def assert_same(loaded: LoadedModel, reference: Any) -> None:
    assert_same_state(loaded.model.state_dict(), reference.state_dict())
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        assert torch.equal(loaded.model(ids)[0], reference(ids)[0])


def weights(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return values.to(getattr(torch, dtype))


def write(folder: Path, tensors: dict[str, torch.Tensor], codec: str = "auto", **options: Any) -> list[Shard]:
    layouts = choose(tensors, codec, [], torch.device("cpu"), lambda nbytes: None)
    units = [{name: tensor} for name, tensor in tensors.items()] if options else [tensors]
    shards = store.lay_out(units, {}, layouts=layouts, **options)
    store.write_pack(folder, shards, [], lambda nbytes: None)
    return shards


# The same weights


@pytest.mark.few(1)
@pytest.mark.parametrize("codec", ["none", "auto", "compressed"])
def test_a_pack_is_the_same_model(codec: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    output = packed(source, out, "--codec", codec, "--verify")
    entries = Checkpoint.open(out).entries
    large = {name for name, tensor in load_file(source / "model.safetensors").items() if tensor.dim() == 2}
    coded = {name for name, entry in entries.items() if entry.layout is not None}
    ratio = (out / "model.safetensors").stat().st_size / (source / "model.safetensors").stat().st_size
    if codec == "none":
        assert (coded, " of " in output) == (set(), False)
    else:
        assert coded == large
        assert ratio < 0.69
        assert f", {ratio:.2f} of 2.4MiB, in a file" in output
    expected = transformers.LlamaForCausalLM.from_pretrained(source)
    loaded = load_pretrained(out, decode=lambda dtypes: True, offload_folder=tmp_path / "offload")
    assert_same(loaded, expected)
    assert loaded.lazy == ()
    for name, tensor in loaded.model.named_parameters():
        assert [m for m in loaded.mappings if m.locate(tensor.data_ptr()) is not None], name
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (codec != "none")
    assert all(
        re.search(
            rf"compressed weights are decompressed into {tmp_path}/offload/\S+ for this process only \([\d.]+[KM]iB",
            m,
        )
        for m in messages
    )
    again = load_pretrained(out, decode=lambda dtypes: True, offload_folder=tmp_path / "offload")
    assert_same(again, expected)
    assert_same(loaded, expected)


def test_other_readers_see_bytes_with_checksums_in_streaming_order(packs: Path, source: Path) -> None:
    path = packs / "auto" / "model.safetensors"
    data_begin, header, record = read(path)
    assert record["codec"] == 1
    with safe_open(path, "pt") as file:
        for name, facts in record["tensors"].items():
            found = file.get_tensor(name)
            assert (found.dtype, found.dim(), found.numel() % 512) == (torch.uint8, 1, 0)
            assert zlib.crc32(found.numpy()) == facts["crc32"]
            layout = Layout(dtype="bfloat16", count=torch.Size(facts["shape"]).numel(), num_escapes=facts["escapes"])
            decoded = torch.empty(layout.raw_nbytes, dtype=torch.uint8)
            reference.decode(found, layout, decoded)
            with safe_open(source / "model.safetensors", "pt") as original:
                expected = original.get_tensor(name)
            assert facts == {"bits": 2, "escapes": layout.num_escapes} | {
                "dtype": "BF16",
                "shape": [*expected.shape],
                "crc32": facts["crc32"],
            }
            assert torch.equal(decoded, bits(expected))
    del header["__metadata__"]
    names = sorted(header, key=lambda name: header[name]["data_offsets"])
    parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    blocks = [f"model.layers.{i}.{part}.weight" for i in range(2) for part in parts]
    assert names[:16] == list(record["tensors"]) == ["model.embed_tokens.weight", *blocks, "lm_head.weight"]
    assert data_begin % 4096 == 0


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("count", [64 << 10, (64 << 10) + 4097])
def test_every_dtype_next_to_plain_tensors(count: int, sharded: bool, tmp_path: Path) -> None:
    tensors = {
        "bf16": weights(count),
        "f16": weights(count, dtype="float16", seed=1),
        "f8": weights(count, dtype="float8_e4m3fn", seed=2),
        "f32": weights(count, dtype="float32"),
        "few": weights((64 << 10) - 1),
        "random": torch.randint(0, 256, (2 * count,), dtype=torch.uint8).view(torch.bfloat16),
        "constant": torch.ones(count, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
    }
    shards = write(tmp_path, tensors, **({"shard_nbytes": 10**5} if sharded else {}))
    assert len(shards) > 5 if sharded else len(shards) == 1
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    layouts = {name: entry.layout for name, entry in checkpoint.entries.items()}
    assert {name for name, layout in layouts.items() if layout is not None} == {"bf16", "f16", "f8", "constant"}
    assert "weightstream" not in checkpoint.metadata
    found = {name: checkpoint.tensor(name) for name in checkpoint.entries}
    assert checkpoint.lazy.keys() == {"bf16", "f16", "f8", "constant"}
    for name in checkpoint.lazy:
        assert not bits(found[name]).any()
        memory = checkpoint.lazy[name]
        entry = checkpoint.entries[name]
        (mapping,) = (m for m in checkpoint.mappings if m.path == entry.path)
        assert [extent.range for extent in memory.extents] == [(mapping, entry.begin, entry.end)]
        memory.populate(0, 1)
    assert_same_state(found, tensors)


def test_compression_must_save_enough(tmp_path: Path) -> None:
    """Spread exponents save little, and then nothing."""

    def chosen(codec: str) -> bool:
        return bool(choose({"w": values}, codec, [], torch.device("cpu"), lambda nbytes: None))

    for spread, least, most, wanted in (
        (10, 0.75, 0.97, {"auto": True, "compressed": True}),
        (17, 0.97, 1.0, {"auto": False, "compressed": True}),
        (20, 1.0, 1.2, {"auto": False, "compressed": False}),
    ):
        values = weights(1 << 17) * (2.0 ** (torch.arange(1 << 17) % spread)).to(torch.bfloat16)
        assert least < coding.counted_layout(bits(values), "bfloat16").nbytes / values.nbytes < most
        assert {codec: chosen(codec) for codec in wanted} == wanted
        assert not chosen("none")


@pytest.mark.few(2)
@pytest.mark.parametrize("count", [1, TILE, 64 * TILE, 64 * TILE + 1, 150 * TILE - 7])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_chunks_equal_the_reference(count: int, dtype: str) -> None:
    data = bits(weights(count, dtype=dtype))
    layout, expected = reference.encode(data, dtype)
    assert coding.counted_layout(data, dtype) == layout
    assert torch.equal(torch.cat(list(coding.pieces(data, layout))), expected)
    out = torch.empty_like(data)
    coding.decode(expected, layout, out)
    assert torch.equal(out, data)


def test_weights_that_change_during_encoding() -> None:
    data = bits(weights(TILE))
    layout = coding.counted_layout(data, "bfloat16")
    data[: TILE // 2] = torch.randint(0, 256, (TILE // 2,), dtype=torch.uint8)
    with pytest.raises(StoreError, match="the weights have changed"):
        list(coding.pieces(data, layout))


def test_memory_stays_flat() -> None:
    data = bits(weights(200 * TILE))
    layout = coding.counted_layout(data, "bfloat16")
    sizes = [piece.numel() for piece in coding.pieces(data, layout)]
    assert sizes == [64 * layout.tile_nbytes] * 3 + [8 * layout.tile_nbytes, layout.nbytes - layout.starts_at]


# Verification


def test_shards_of_a_coded_pack(source: Path, packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("weightstream.api.pack.lay_out", partial(store.lay_out, shard_nbytes=500_000))
    assert "packed and verified" in packed(source, out, "--codec", "auto", "--verify")
    assert len(list(out.glob("*.safetensors"))) > 3
    assert_same_state(decoded(out), load_file(source / "model.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    whole = Checkpoint.open(packs / "auto").entries.values()
    assert index["metadata"]["total_size"] == sum(entry.nbytes for entry in whole)


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(folder)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.entries}
    for memory in checkpoint.lazy.values():
        memory.populate(0, 0)
    return tensors


def test_a_pack_of_a_pack(pack: Path, source: Path, tmp_path: Path) -> None:
    packed(pack, tmp_path / "again", "--codec", "auto", "--verify")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (pack / "model.safetensors").read_bytes()
    packed(pack, tmp_path / "plain", "--verify")
    packed(source, tmp_path / "expected")
    files = [tmp_path / name / "model.safetensors" for name in ("plain", "expected")]
    assert files[0].read_bytes() == files[1].read_bytes()


SECTIONS = ["tiles", "starts", "bases", "escapes"]


def flip(pack: Path, section: str, name: str = UP) -> None:
    """Flip one bit in the middle of a section."""
    entry = Checkpoint.open(pack).entries[name]
    layout = entry.layout
    assert layout is not None
    ends = [0, layout.starts_at, layout.bases_at, layout.escapes_at, layout.escapes_at + layout.num_escapes]
    begin, end = ends[SECTIONS.index(section)], ends[SECTIONS.index(section) + 1]
    assert begin < end
    with open(entry.path, "r+b") as file:
        file.seek(entry.begin + (begin + end) // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


@pytest.mark.few(3)
@pytest.mark.parametrize("section", [*SECTIONS, "checksum", "plain", "other weights"])
def test_verify_reports_differences(
    section: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes with another checksum, and valid compressed bytes of other weights."""
    verify = Shard.verify

    def damaged(self: Shard, path: Path, *rest: Any) -> None:
        entry, crc32 = Checkpoint.open(path).entries["model.norm.weight"], Checkpoint.open(path).entries[UP].crc32 or 0
        if section == "checksum":
            path.write_bytes(path.read_bytes().replace(str(crc32).encode(), str(crc32 ^ 1).encode()))
        elif section == "plain":
            raw = bytearray(path.read_bytes())
            raw[entry.begin] ^= 1
            path.write_bytes(raw)
        elif section == "other weights":
            with torch.no_grad():
                self.tensors[UP].view(-1)[0] += 1
        else:
            flip(path.parent, section)
        verify(self, path, *rest)

    monkeypatch.setattr(Shard, "verify", damaged)
    message = refused(source, tmp_path / "out", "--codec", "auto", "--verify")
    if section in ("plain", "other weights"):
        name = "model.norm.weight" if section == "plain" else UP
        assert f"model.safetensors: {name} differs from the source" in message
    else:
        assert re.search(f"tensor '{UP}', .* checksum .* when it was packed", message)
    assert os.listdir(tmp_path) == []


# Damage


@pytest.mark.few(1)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_flipped_bit_is_detected(section: str, pack: Path, tmp_path: Path) -> None:
    flip(pack, section)
    message = rf"model\.safetensors: tensor '{re.escape(UP)}', bytes \[\d+, \d+\): checksum [0-9a-f]{{8}}, was"
    with pytest.raises(
        CheckpointError, match=message + r".*damaged: download it again, or write it again from the uncompressed model"
    ):
        load_pretrained(pack)
    loaded = load_pretrained(
        pack, verify_checksums=False, decode=lambda dtypes: True, offload_folder=tmp_path / "offload"
    )
    original = load_pretrained(pack, verify_checksums=False)
    populate(original)
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(bits(tensor), bits(original.model.state_dict()[name]))


def test_decoding_any_bytes_stays_inside(tmp_path: Path) -> None:
    write(tmp_path, {"w": weights(70 * TILE + 5)})
    memory = memory_of(Checkpoint.open(tmp_path), "w")
    layout, generator = memory.layout, torch.Generator().manual_seed(0)
    for _ in range(5):
        coded = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8, generator=generator)
        out = torch.full((layout.raw_nbytes + 64,), 7, dtype=torch.uint8)
        coding.decode(coded, layout, out[32:-32])
        assert bool((out[:32] == 7).all() and (out[-32:] == 7).all())


@pytest.mark.parametrize("cut", [1, 512, 10**6])
def test_truncation_is_detected(cut: int, pack: Path) -> None:
    path = pack / "model.safetensors"
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        load_pretrained(pack)


def test_a_file_truncated_while_it_is_open(pack: Path) -> None:
    checkpoint = Checkpoint.open(pack)
    memory = memory_of(checkpoint, UP)
    os.truncate(pack / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match="changed since it was mapped"):
        checkpoint.verify()
    for _ in range(2):
        with pytest.raises(StoreError, match="changed since it was mapped"):
            memory.populate(0, 1)
    assert not memory.is_filled


def respell(pack: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write the record again, with the result of `change` in its place if that is a text."""
    path = pack / "model.safetensors"
    begin, header, record = read(path)
    data = path.read_bytes()[begin:]
    changed = change(record)
    header["__metadata__"]["weightstream"] = changed if isinstance(changed, str) else json.dumps(record)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def fact(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record["tensors"][UP].update(changed)


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record["tensors"][UP].pop(key) and None


def whole(**changed: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record.update(changed)


REMEDY = "write it again from the uncompressed model with `weightstream pack`, or use the version of weightstream that"
OLD = f"bits for each exponent of bfloat16: .*{REMEDY} wrote it"
LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    **{
        f"bits {v!r}": (fact(bits=v), "bits for each exponent of bfloat16")
        for v in (0, 5, -3, "3", 3.0, None, True, [3], 10**4000)
    },
    **{f"bits of an old code, {v}": (fact(bits=v), OLD) for v in (3, 4)},
    **{f"escapes {v!r}": (fact(escapes=v), "escapes among") for v in (-1, 2**62, True, "1", None, 1.0, 159748)},
    "escapes of no words": (fact(escapes=98305), "98305 bytes of escapes are no whole words"),
    "escapes of another size": (fact(escapes=98304), r"with 98304 escapes take \d+ bytes, the file has \d+"),
    **{f"shape {v!r}"[:30]: (fact(shape=v), "shape .*needs integers") for v in ("x", None, [0, 5], [-1, 2], [True])},
    "shape of a scalar": (fact(shape=[]), "escapes among 1 weights"),
    "shape too large": (fact(shape=[2**62, 2**62]), "product below"),
    "long shape": (fact(shape=[2] * 10**6), "product below"),
    "shape of others": (fact(shape=[384, 257]), r"\[384, 257\]: 98688 weights"),
    **{f"dtype {v!r}": (fact(dtype=v), "dtype .* is not known") for v in ("bfloat16", "", None, 3, ["BF16"])},
    "dtype without a code": (fact(dtype="F32"), "bits for each exponent of float32"),
    "dtype of another code": (fact(dtype="F16"), "'2' bits for each exponent of float16"),
    "dtype of another size": (fact(dtype="F16", bits=3), "weights of float16"),
    **{f"crc32 {v!r}": (fact(crc32=v), "crc32 .*: needs an integer of 32 bits") for v in (-1, 2**32, "1", None, 1.0)},
    **{
        f"no {key}": (without(key), "needs exactly bits, crc32")
        for key in ("dtype", "shape", "bits", "escapes", "crc32")
    },
    "more": (fact(more=1), "needs exactly bits, crc32"),
    **{
        f"codec {v!r}": (whole(codec=v), rf"codec .*this version reads 1: {REMEDY} wrote it")
        for v in (2, 0, True, "1", None, 1.0)
    },
    "more beside": (whole(more=1), "needs exactly codec and tensors"),
    "tensors in a list": (whole(tensors=[]), "needs exactly codec and tensors"),
    "facts in a list": (lambda record: record["tensors"].update({UP: [1]}), "needs exactly bits, crc32"),
    "a name that is not there": (lambda r: r["tensors"].update(other=r["tensors"][UP]), "'other', which the file does"),
    "a name of weights": (
        lambda r: r["tensors"].update({"model.norm.weight": r["tensors"][UP]}),
        "must be flat bytes",
    ),
    "no JSON": (lambda record: "{", "not valid JSON"),
    "no object": (lambda record: "[]", "holds a list"),
    "empty": (lambda record: "", "not valid JSON"),
    "deep": (lambda record: "[" * 10**5, "not valid JSON"),
    "huge": (lambda record: json.dumps({"codec": 1, "tensors": {f"t{i}": i for i in range(10**5)}}), "does not hold"),
    "twice": (lambda record: '{"codec":1,"codec":1,"tensors":{}}', "occurs twice"),
    "surrogate": (lambda record: '{"codec":1,"tensors":{"\\ud800":{}}}', "not valid JSON"),
    "long number": (lambda record: '{"codec":' + "1" * 5000 + "}", "not valid JSON"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_false_header_is_refused(lie: str, pack: Path) -> None:
    change, message = LIES[lie]
    respell(pack, change)
    with pytest.raises(CheckpointError, match=rf"(?s)model\.safetensors.*{message}") as caught:
        load_pretrained(pack, verify_checksums=False)
    assert len(str(caught.value)) < 1000


def test_a_compressed_tensor_may_begin_anywhere(pack: Path, source: Path) -> None:
    """Another writer may not align it."""
    path = pack / "model.safetensors"
    begin, header, _ = read(path)
    text = json.dumps(header).encode()
    text += b" " * ((1 - len(text)) % 4)
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[begin:])
    assert Checkpoint.open(path).entries[UP].begin % 4 == 1
    assert_same_state(decoded(pack), load_file(source / "model.safetensors"))


# Loading without decoding


def test_parameters_view_undecoded_memory(pack: Path, source: Path, tmp_path: Path) -> None:
    loaded = load_pretrained(pack, offload_folder=tmp_path / "offload")
    assert loaded.folder is None
    assert len(loaded.lazy) == 16
    for name, entry in loaded.checkpoint.entries.items():
        address = loaded.model.get_parameter(name).data_ptr()
        (home,) = [m for m in (*loaded.mappings, *loaded.lazy) if m.locate(address) is not None]
        assert isinstance(home, DecodedMemory) == (entry.layout is not None)
    assert not any(memory.is_filled for memory in loaded.lazy)
    populate(loaded)
    assert_same(loaded, transformers.LlamaForCausalLM.from_pretrained(source))


def hide(folder: Path, target: Path) -> Path:
    """The checkpoint with all compressible tensors compressed, under the same names."""
    target.mkdir()
    write(target, load_file(folder / "model.safetensors"))
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    return target


def test_a_cast_weight_is_decoded_first(pack: Path, source: Path, tmp_path: Path) -> None:
    expected = transformers.LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    loaded = load_pretrained(pack, dtype="float32", offload_folder=tmp_path / "offload")
    assert_same(loaded, expected)
    assert not any(memory.is_filled for memory in loaded.lazy)


def test_a_config_of_another_dtype(pack: Path, source: Path) -> None:
    """Without a dtype argument, transformers casts."""
    for folder in (pack, shutil.copytree(source, pack.with_name("source"))):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    loaded = load_pretrained(pack)
    expected = load_pretrained(pack.with_name("source"))
    assert expected.model.dtype == torch.float16
    assert_same(loaded, expected.model)


def test_weights_that_transformers_fuses_are_decoded_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**{**SMALL, "num_hidden_layers": 1, "num_local_experts": 2})
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    folder = hide(tmp_path / "plain", tmp_path / "coded")
    expected = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "plain")
    for kept in (None, tmp_path / "offload"):
        loaded = load_pretrained(folder, offload_folder=kept)
        for name, tensor in loaded.model.named_parameters():
            inside = loaded.folder is not None and any(
                m.locate(tensor.data_ptr()) is not None for m in loaded.folder.mappings
            )
            assert inside == (".experts." in name), name
        populate(loaded)
        assert_same(loaded, expected)
        assert loaded.folder is not None
        assert len(loaded.folder.mappings) == len(list(loaded.folder.path.glob("*.safetensors"))) == 2
    assert len([r for r in caplog.records if "transformers converted 2 tensors" in r.getMessage()]) == 2


@pytest.mark.parametrize("equal", [False, True])
def test_ties_are_detected_from_values(equal: bool, tmp_path: Path) -> None:
    """transformers ties an embedding and a head that are both in the file if they are equal. Undecoded zeros would
    be."""
    plain = saved(tmp_path / "plain", tie_word_embeddings=True)
    tensors = load_file(plain / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head if equal else head * 2
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    expected = load_pretrained(plain).model
    loaded = load_pretrained(hide(plain, tmp_path / "coded"))
    populate(loaded)
    assert_same(loaded, expected)
    for model in (expected, loaded.model):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == equal


def test_ties_are_detected_from_values_if_experts_are_converted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**{**SMALL, "num_hidden_layers": 1, "num_local_experts": 2})
    config.tie_word_embeddings = False
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    facts = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps(facts | {"tie_word_embeddings": True}))
    folder = hide(tmp_path / "plain", tmp_path / "coded")
    gathered = load_pretrained(tmp_path / "plain")
    populate(gathered)
    expected = gathered.model
    assert expected.lm_head.weight is not expected.model.embed_tokens.weight
    loaded = load_pretrained(folder, offload_folder=tmp_path / "offload")
    populate(loaded)
    assert_same(loaded, expected)


def test_an_unused_compressed_tensor_is_not_decoded(tmp_path: Path) -> None:
    plain = saved(tmp_path / "plain", num_hidden_layers=1)
    surplus = {"surplus.weight": weights(256, 256)}
    save_file(load_file(plain / "model.safetensors") | surplus, plain / "model.safetensors", metadata={"format": "pt"})
    loaded = load_pretrained(hide(plain, tmp_path / "coded"))
    assert loaded.folder is None
    assert not any(memory.is_filled for memory in loaded.lazy)
    packed(tmp_path / "coded", tmp_path / "again", "--codec", "auto", "--verify")
    found = decoded(tmp_path / "again")
    assert Checkpoint.open(tmp_path / "again").entries["surplus.weight"].layout is None
    assert_same_state({"surplus.weight": found["surplus.weight"]}, surplus)


def test_loading_takes_no_memory_for_the_weights(tmp_path: Path) -> None:
    """Of the model's 64 MiB, only the pages that torch reads are loaded."""
    folder = saved(tmp_path / "plain", num_hidden_layers=1, vocab_size=1000)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 1 << 16}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    row = weights(256)
    tensors |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), row.expand(1 << 16, 256).contiguous())
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    coded = hide(folder, tmp_path / "coded")
    del tensors
    load_pretrained(coded)
    gc.collect()
    before = rss_nbytes()
    loaded = load_pretrained(coded, verify_checksums=False)
    assert rss_nbytes() - before < 16 << 20
    populate(loaded)
    assert rss_nbytes() - before > 50 << 20


# Decoded memory


def rss_nbytes() -> int:
    """Private memory of the process, without pages of files."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * resource.getpagesize()


def made(count: int = 3 * TILE + 5) -> tuple[DecodedMemory, torch.Tensor]:
    data = bits(weights(count))
    layout, coded = reference.encode(data, "bfloat16")
    return DecodedMemory("w", Path("file"), layout, lambda: coded), data


def test_nothing_is_decoded_until_it_is_read() -> None:
    calls: list[str] = []
    memory, data = made()
    memory.check = lambda: calls.append("check")  # type: ignore[method-assign]
    decode = memory.decode
    memory.decode = lambda *rest: calls.append("decode") or decode(*rest)
    view = memory.bytes(2, 100).view(torch.bfloat16).view(7, 7)
    assert (memory.nbytes, memory.is_filled) == (data.numel(), False)
    assert memory.locate(view.data_ptr()) == 2
    assert memory.locate(view.data_ptr() + memory.nbytes - 3) == memory.nbytes - 1
    assert memory.locate(view.data_ptr() - 3) is memory.locate(view.data_ptr() + memory.nbytes - 2) is None
    assert calls == []
    memory.populate(4, 5)
    memory.populate(0, memory.nbytes)
    assert calls == ["check", "decode", "check"]
    assert memory.is_filled
    assert torch.equal(bits(view), data[2:100])
    assert torch.equal(memory.bytes(0, memory.nbytes), data)
    target = torch.zeros(50, dtype=torch.uint8)
    assert torch.equal(memory.read(5, 45, target), data[5:45])
    view.zero_()  # writable, and private to the process
    memory.forget()
    assert not memory.bytes(0, memory.nbytes).any()
    assert torch.equal(memory.read(0, 50, target), data[:50])
    assert calls == ["check", "decode", "check", "check", "check", "decode"]


@pytest.mark.parametrize(("begin", "end"), [(-1, 0), (2, 1), (0, 10**9)])
def test_outside_is_refused(begin: int, end: int) -> None:
    memory, _ = made()
    for read_range in (memory.bytes, memory.populate):
        with pytest.raises(StoreError, match=rf"file: 'w': bytes \[{begin}, {end}\) are not inside its 24586"):
            read_range(begin, end)
    assert not memory.is_filled


def test_a_failed_check_decodes_nothing() -> None:
    def gone() -> None:
        raise StoreError("gone")

    memory, _ = made()
    memory.check = gone  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="gone"):
        memory.populate(0, 1)
    assert not memory.is_filled


def test_many_threads_decode_once() -> None:
    memory, data = made(70 * TILE)
    calls: list[int] = []
    decode, ready, wrong = memory.decode, threading.Barrier(8), []

    def counted(*rest: Any) -> None:
        calls.append(1)
        decode(*rest)

    def reader(seed: int) -> None:
        begin = random.Random(seed).randrange(memory.nbytes - 100)
        target = torch.empty(100, dtype=torch.uint8)
        ready.wait()
        if not torch.equal(memory.read(begin, begin + 100, target), data[begin : begin + 100]):
            wrong.append(seed)

    memory.decode = counted
    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (calls, wrong) == ([1], [])


def test_a_large_memory_takes_only_addresses_and_is_freed_at_the_end() -> None:
    layout = Layout(dtype="bfloat16", count=1 << 35, num_escapes=0)

    def fill(coded: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
        out[: 64 << 20] = 1

    before, maps = rss_nbytes(), mapped_nbytes()
    memory = DecodedMemory("w", Path("file"), layout, lambda: torch.empty(0), decode=fill)
    view = memory.bytes(0, memory.nbytes).view(torch.bfloat16)
    assert view.numel() == 1 << 35
    assert rss_nbytes() - before < 4 << 20
    assert mapped_nbytes() - maps > 1 << 35
    memory.populate(0, 1)
    assert rss_nbytes() - before > 40 << 20  # of 64 MiB; others may free some
    del memory
    assert bool(view[0])
    assert mapped_nbytes() - maps > 1 << 35
    del view
    gc.collect()
    assert mapped_nbytes() - maps < 1 << 30
    assert rss_nbytes() - before < 16 << 20


def mapped_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_no_warning_remains(pack: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_pretrained(pack)
    assert not caplog.records
