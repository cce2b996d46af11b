"""Crafted checkpoints and configs are read right, or refused by our own errors. They never cause a crash, or a read
outside of the folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

import weightstream
from judge import Judge, Verdict
from models import TEXT
from weightstream.errors import CheckpointError, WeightstreamError
from weightstream.store.checkpoint import Checkpoint

FUZZ = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.close()


# One file. Its header is built of pieces of JSON text, so that it can contain what no JSON writer writes.

SIZES = {"U8": 1, "BOOL": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I64": 8, "C64": 8, "F8_E4M3": 1, "F8_E8M0": 1}
NUMBERS = ["-1", "-0", "0", "1", "00", "0.5", "1e3", "1e999", "NaN", "-Infinity", "true", "null", '"8"', "9" * 4300]
NUMBERS += [str(2**power + more) for power in (22, 23, 31, 32, 53, 62, 63, 64) for more in (-1, 0)]
VALUES = [*NUMBERS, "{}", "[]", "[[0]]", '"\\ud800"', '{"a":1,"a":2}', "[" * 10_000 + "]" * 10_000, '{"a":' * 10_000]
DTYPES = [f'"{code}"' for code in (*SIZES, "F4", "F6_E2M3", "f32", "", "float32", "os.system", "\\u0000")]
NAMES = ['""', '"a"', '"\\ud800"', '"\\u0000"', '"\\ud83d\\ude00"', '"__metadata__"', '"../x"', f'"{"long" * 30_000}"']
METADATA = ['{"format":"pt"}', "{}", "null", "0", "false", '""', "[]", '{"a":1}', '{"a":NaN}', '{"a":"\\ud800"}']
METADATA += ['{"\\udfff":"x"}', '{"a":{}}', '{"a":"b","a":"c"}', '{"a":"\\ud83d\\ude00"}']


@dataclass(slots=True, kw_only=True)
class Piece:
    """The pieces of JSON that describe one tensor."""

    name: str
    dtype: str
    shape: list[str]
    offsets: list[str]
    more: str = ""
    whole: str | None = None

    def __str__(self) -> str:
        facts = f'"dtype":{self.dtype},"shape":[{",".join(self.shape)}],"data_offsets":[{",".join(self.offsets)}]'
        return f"{self.name}:{self.whole or f'{{{facts}{self.more}}}'}"


@st.composite
def valid_pieces(draw: st.DrawFn) -> tuple[list[Piece], int]:
    shapes = st.lists(st.integers(0, 4) | st.just(1), max_size=3)
    tensors = draw(st.lists(st.tuples(st.text(max_size=5), st.sampled_from(list(SIZES)), shapes), max_size=4))
    pieces, end = [], 0
    for name, (_, code, shape) in {tensor[0]: tensor for tensor in tensors}.items():
        begin, end = end, end + SIZES[code] * int(torch.Size(shape).numel())
        offsets = [str(begin), str(end)]
        pieces.append(Piece(name=json.dumps(name), dtype=f'"{code}"', shape=[*map(str, shape)], offsets=offsets))
    return pieces, end


@st.composite
def crafted_headers(draw: st.DrawFn) -> tuple[bytes, int]:
    """A header, and the number of data bytes that its tensors had before they were changed."""
    pieces, nbytes = draw(valid_pieces())
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 1, 2, 3])) if pieces else 0):
        piece = draw(st.sampled_from(pieces))
        number, value = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(VALUES))
        match draw(st.integers(0, 9)):
            case 0:
                piece.shape.insert(draw(st.integers(0, len(piece.shape))), number)
            case 1:
                piece.shape[:] = [number, *piece.shape[1:]]
            case 2:
                piece.offsets[draw(st.integers(0, 1))] = number
            case 3:
                piece.offsets = draw(st.sampled_from(pieces)).offsets[:]
            case 4:
                piece.dtype = draw(st.sampled_from(DTYPES) | st.just(value))
            case 5:
                piece.name = draw(st.sampled_from([*NAMES, pieces[0].name]))
            case 6:
                piece.whole = value
            case 7:
                piece.more = f',"more":{value}'
            case 8:  # empty, with sizes whose product torch would compute
                piece.shape = draw(st.permutations(["0", number, str(2**40)]))
                piece.offsets = [piece.offsets[0]] * 2
            case 9:
                piece.shape += ["1"] * draw(st.sampled_from([30, 70, 5000]))
    rows = [str(piece) for piece in draw(st.permutations(pieces))]
    rows += [f'"__metadata__":{draw(st.sampled_from(METADATA))}'] * draw(st.sampled_from([0, 0, 1, 2]))
    return ("{" + ",".join(rows) + "}").encode(), nbytes


@st.composite
def crafted_files(draw: st.DrawFn) -> bytes:
    text, nbytes = draw(crafted_headers())
    text += b" " * draw(st.sampled_from([-len(text) % 8, 0, 1]))
    lies = [0, 1, len(text) - 1, len(text) + 1, 100_000_001, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
    length = draw(st.sampled_from([len(text)] * 20 + lies))
    data = bytearray(struct.pack("<Q", length) + text + bytes(index * 7 % 251 for index in range(nbytes)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        at = draw(st.integers(0, len(data)))
        new = draw(
            st.binary(max_size=4) | st.sampled_from([b'"', b"{", b"]", b",", b"0", b"-", b"\\u", b"\xc3", b"NaN"])
        )
        data[at : at + draw(st.sampled_from([0, 1, 1, 4]))] = new
    end = draw(st.sampled_from([len(data)] * 6 + [len(data) + 1]) | st.integers(0, len(data)))
    return bytes(data[:end]) + b"+" * (end - len(data))


# Files that safetensors' reader accepts and ours refuses, each for a reason: a duplicate name may mean either tensor;
# torch has no such dtype, or the strides of a tensor overflow; the header has keys that the format does not have.
STRICTER = r"occurs twice|is not supported|more than torch can hold|needs exactly"


def assert_agrees(verdict: Verdict) -> None:
    if verdict.tensors is None:
        refused_too = verdict.theirs is None or None in verdict.theirs.values()
        assert refused_too or re.search(STRICTER, verdict.refusal), verdict
    else:
        assert verdict.tensors == verdict.theirs


def test_crafted_files_are_read_right_or_refused(judge: Judge, tmp_path: Path) -> None:
    path, outcomes = tmp_path / "crafted.safetensors", Counter[str]()

    @settings(FUZZ, max_examples=300)
    @given(crafted_files())
    def check(file: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(file)
        verdict = judge.ask(path)
        assert set(verdict.opened) <= {str(path)}
        assert_agrees(verdict)
        outcomes["refused" if verdict.tensors is None else "empty" if not verdict.tensors else "read"] += 1

    check()
    assert outcomes["read"] > 15, outcomes
    assert outcomes["refused"] > 15, outcomes


def test_nesting_of_any_depth_is_refused(judge: Judge, tmp_path: Path) -> None:
    """JSON just below the interpreter's limit of nesting is read, and code that prints or checks it must not exceed
    the limit."""
    path = tmp_path / "deep.safetensors"
    for depth in (127, 128, *range(930, 1000, 7), 10_000, 1_000_000):
        text = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        assert judge.ask(path).refusal


@pytest.mark.parametrize(
    ("header", "message"),
    [
        *[(text, "not an object") for text in ("5", "[1]", "null", "true", "NaN", '"text"', '["a"]')],
        *[
            (f'{{"a":{{"dtype":"U8","shape":[],"data_offsets":[{at},{at}]}}}}', "not safe")
            for at in ("9" * 4300, 2**63)
        ],
        (f'{{"a":{{"dtype":"U8","shape":[0,{2**40},{2**23}],"data_offsets":[0,0]}}}}', "more than torch can hold"),
        *[(f'{{"__metadata__":{text}}}', "not safetensors") for text in ('{"a":1}', "0", '""', "[]")],
        ('{"__metadata__":{"a":"\\ud800"}}', "not valid JSON"),
        ('{"a":{"dtype":"\\udfff"}}', "not valid JSON"),
    ],
)
def test_other_headers_than_objects_are_refused(tmp_path: Path, header: str, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors.*{message}"):
        Checkpoint.open(path)


def test_metadata_as_safetensors_writes_it_is_accepted(tmp_path: Path) -> None:
    for metadata in (None, {}, {"format": "pt", "ключ": "\U0001f600"}):
        save_file({"a": torch.arange(3)}, tmp_path / "a.safetensors", metadata)
        assert Checkpoint.open(tmp_path / "a.safetensors").tensor("a").tolist() == [0, 1, 2]
    header = json.dumps({"__metadata__": {"a": "\U0001f600"}}).encode()  # escaped, as a pair of surrogates
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert not Checkpoint.open(tmp_path / "b.safetensors").entries


@pytest.mark.parametrize("shrink", ["mapped", "opened"])
def test_a_file_truncated_while_it_is_read_is_an_error_not_a_signal(judge: Judge, tmp_path: Path, shrink: str) -> None:
    """Header and misaligned tensors are copied out of the map. A missing page would kill the process."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}}).encode()
    header += b" " * (8190 - 8 - len(header))
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16384))
    assert judge.ask(path).tensors
    assert re.search(r"failed.*now holds 0 bytes|changed since it was mapped", judge.ask(path, shrink=shrink).refusal)


def test_impossible_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("a" * 5000, "a\0b", tmp_path / ("b" * 300) / "c", "\ud800"):
        with pytest.raises(CheckpointError, match="cannot open"):
            Checkpoint.open(path)
    monkeypatch.setattr(os, "listdir", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(CheckpointError, match=r"cannot be listed: .*Permission denied"):
        Checkpoint.open(tmp_path)


# A folder of shards. `secret` is outside of it, and no index may cause it to be opened.

COMPOSED, DECOMPOSED = "caf\u00e9.safetensors", "cafe\u0301.safetensors"


def make_hostile(path: Path, kind: str) -> None:
    """Put something at `path` that is not a file of the folder."""
    secret = path.parent.parent / "secret.safetensors"
    match kind:
        case "link out":
            path.symlink_to(secret)
        case "relative link out":
            path.symlink_to(f"../{secret.name}")
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("gone")
        case "link to folder":
            path.symlink_to(".")
        case "link to memory":
            path.symlink_to("/proc/self/mem")
        case "link to device":
            path.symlink_to("/dev/zero")
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)  # bind() takes at most 107 bytes of path
        case "device":
            try:
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
            except PermissionError:
                pytest.skip("only root makes device files")


KINDS = ["link out", "relative link out", "loop", "dangling", "link to folder", "link to memory", "link to device"]
KINDS += ["fifo", "folder", "socket", "device"]


def make_folder(root: Path) -> Path:
    folder = root / "model"
    folder.mkdir()
    save_file({"s": torch.ones(3)}, root / "secret.safetensors")
    save_file({"a": torch.arange(5), "b": torch.ones(2, 3)}, folder / "x.safetensors")
    save_file({"c": torch.arange(2.0), "empty": torch.empty(0, 7)}, folder / "y.safetensors")
    save_file({"d": torch.arange(4)}, folder / COMPOSED)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "only.safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_files_of_the_folder(judge: Judge, tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "model").mkdir()
    save_file({"s": torch.ones(3)}, tmp_path / "secret.safetensors")
    make_hostile(tmp_path / "model" / name, kind)
    verdict = judge.ask(tmp_path / "model")
    assert re.search("not a regular file|outside the model folder|missing|cannot open", verdict.refusal), verdict
    assert_inside(verdict, tmp_path / "model")


def assert_inside(verdict: Verdict, folder: Path) -> None:
    for path in verdict.opened:
        assert Path(path).resolve().is_relative_to(folder.resolve()), path


SHARDS = ["x.safetensors", "y.safetensors", COMPOSED, DECOMPOSED, "alias.safetensors", "hard.safetensors"]
SHARDS += [
    "X.safetensors",
    "x.safetensors/",
    "./x.safetensors",
    "..",
    ".",
    "",
    "a\0b",
    "/etc/passwd",
    "../secret.safetensors",
]
SHARDS += ["model.safetensors.index.json", "sub/x.safetensors", "n" * 300, "\ud800", "\udcff", "~", "C:\\x", "gone"]
KEYS = ["a", "b", "c", "d", "s", "empty", "", "\ud800", "__metadata__", "k" * 1000]
OTHER = st.none() | st.booleans() | st.integers() | st.floats() | st.lists(st.just("x.safetensors"), max_size=2)


@st.composite
def indexes(draw: st.DrawFn, hostile: list[str]) -> bytes:
    names = st.sampled_from([*SHARDS, *hostile])
    held = {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors", "d": COMPOSED}
    weight_map: dict[str, Any] = {key: held[key] for key in draw(st.sets(st.sampled_from(list(held))))}
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        weight_map[draw(st.sampled_from(KEYS))] = draw(names | names | names | st.text(max_size=4) | OTHER)
    whole = draw(st.sampled_from([weight_map] * 9 + [[weight_map], list(weight_map), "x", 5, None, {"x": weight_map}]))
    index = {"weight_map": whole, "metadata": draw(st.sampled_from([{}, {"total_size": float("nan")}, None, 5]))}
    data = json.dumps(draw(st.sampled_from([index] * 9 + [whole]))).encode()
    at, count = draw(st.integers(0, len(data))), draw(st.sampled_from([0] * 9 + [1, 3]))
    return data[:at] + draw(st.binary(max_size=count)) + data[at + count :]


def test_hostile_indexes_are_read_right_or_refused(judge: Judge, tmp_path: Path) -> None:
    folder, outcomes = make_folder(tmp_path), Counter[bool]()
    (folder / "alias.safetensors").symlink_to("x.safetensors")
    os.link(folder / "x.safetensors", folder / "hard.safetensors")
    hostile = [f"{kind}.safetensors" for kind in KINDS]
    for name, kind in zip(hostile, KINDS, strict=True):
        make_hostile(folder / name, kind)
    held = {shard: judge.ask(folder / shard).tensors or {} for shard in (*SHARDS[:3], *SHARDS[4:6])}

    @settings(FUZZ, max_examples=100)
    @given(indexes(hostile))
    def check(index: bytes) -> None:
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        (folder / "model.safetensors.index.json").write_bytes(index)
        verdict = judge.ask(folder)
        assert_inside(verdict, folder)
        outcomes[verdict.tensors is None] += 1
        if verdict.tensors is not None:
            shards = sorted(set(json.loads(index)["weight_map"].values()))  # the last shard with a tensor counts
            assert verdict.tensors == {key: facts for shard in shards for key, facts in held[shard].items()}

    check()
    assert min(outcomes[True], outcomes[False]) > 10, outcomes


def test_a_tensor_of_another_shard_is_found(judge: Judge, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    weight_map = {"a": "y.safetensors", "b": "x.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    verdict = judge.ask(folder)
    assert_inside(verdict, folder)
    assert {"a", "b"} <= (verdict.tensors or {}).keys()


def test_similar_names_are_different_files(judge: Judge, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for shard, message in ((COMPOSED, ""), (DECOMPOSED, "is missing")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"d": shard}}))
        assert message in judge.ask(folder).refusal
    save_file({"d": torch.arange(9)}, folder / DECOMPOSED)
    assert (judge.ask(folder).tensors or {})["d"][1] == [9]


@pytest.mark.parametrize("second", ["link", "hard link"])
def test_one_shard_under_two_names_is_read(judge: Judge, tmp_path: Path, second: str) -> None:
    folder = make_folder(tmp_path)
    if second == "link":
        (folder / "z.safetensors").symlink_to("x.safetensors")
    else:
        os.link(folder / "x.safetensors", folder / "z.safetensors")
    weight_map = {"a": "x.safetensors", "b": "z.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    verdict = judge.ask(folder)
    assert_inside(verdict, folder)
    assert {"a", "b"} <= (verdict.tensors or {}).keys()


def test_huge_maps(judge: Judge, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    many = {f"layers.{number}": "x.safetensors" for number in range(200_000)}
    apart = {f"layers.{number}": f"{number}.safetensors" for number in range(50_000)}
    for weight_map, message in ((many, ""), (apart, "is missing")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert message in judge.ask(folder).refusal


# A model's config

transformers = pytest.importorskip("transformers")

RAW_CONFIGS = [
    "",
    "{",
    "[]",
    "5",
    "null",
    '"text"',
    '{"a": NaN}',
    "[" * 100_000,
    "\0",
    '{"model_type": "llama"',
    "\ufeff{}",
]
CONFIGS: list[dict[str, Any]] = [
    *[{"architectures": value} for value in (["LlamaConfig"], ["pipeline"], ["__class__"], ["logging"])],
    *[{"architectures": value} for value in ([5], [["x"]], {"a": 1}, 5, [None], [], None, ["PreTrainedModel"])],
    *[{"model_type": value} for value in ("nope", 5, ["llama"], None, "../../etc", "\ud800")],
    *[{"hidden_size": value} for value in ("64", None, [], -64, 0, 63.5, float("nan"), float("inf"), 2**63, 10**400)],
    *[{"num_attention_heads": value} for value in (0, 3, -1, "x", 2**40)],
    *[{"num_key_value_heads": 0}, {"num_hidden_layers": "two"}, {"num_hidden_layers": 1e300}, {"head_dim": 2**62}],
    *[{"vocab_size": -1}, {"vocab_size": 2**62}, {"hidden_act": "os.system"}, {"hidden_act": ["silu"]}],
    *[{"rope_parameters": value} for value in (5, {"rope_type": "nope"}, {"rope_theta": "x"})],
    *[{"dtype": "float77"}, {"dtype": 5}, {"dtype": "Tensor"}, {"pad_token_id": 10**12}, {"id2label": 5}],
    *[{"quantization_config": value} for value in ("x", 5, [1], {}, {"quant_method": "nope"}, {"quant_method": ["x"]})],
    *[{"auto_map": {"AutoConfig": 5}}, {"auto_map": {"AutoConfig": "r/x--evil.C"}, "model_type": "evil"}],
    *[{"__class__": "x"}, {"self": 1}, {"to_dict": 5}, {"get_text_config": 5}, {"text_config": 5}],
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config") / "llama"
    config = transformers.LlamaConfig(**TEXT | {"num_hidden_layers": 1})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def model_folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def load(folder: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    return weightstream.from_pretrained(folder, device="cpu", local_files_only=True)


def test_the_unchanged_config_loads(model_folder: Path) -> None:
    model = load(model_folder)
    with model.weightstream:
        assert isinstance(model, transformers.LlamaForCausalLM)


@pytest.mark.parametrize("text", RAW_CONFIGS, ids=lambda text: repr(text[:12]))
def test_an_invalid_config_is_refused(model_folder: Path, text: str) -> None:
    (model_folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="model"):
        load(model_folder)


@pytest.mark.parametrize("change", CONFIGS, ids=lambda change: repr(change)[:40])
def test_hostile_configs_are_refused_by_our_own_errors(model_folder: Path, change: dict[str, Any]) -> None:
    spoil(model_folder, change)
    with pytest.raises(WeightstreamError, match="model"):
        load(model_folder)


def spoil(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))


@pytest.mark.parametrize("name", ["os.system", "os", "system", "../os", "\ud800", "a\0b"])
def test_an_architecture_names_classes_of_transformers_only(
    model_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(os, "system", called.append)
    spoil(model_folder, {"architectures": [name]})
    with pytest.raises(CheckpointError, match=r"names the architecture .*no class of this name; pass model_class="):
        load(model_folder)
    assert not called


def test_code_next_to_the_weights_is_not_run(model_folder: Path) -> None:
    for name in ("evil.py", "configuration_evil.py", "modeling_evil.py"):
        (model_folder / name).write_text(f"open({str(model_folder / 'ran')!r}, 'w')\nclass C: pass\n")
    spoil(model_folder, {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}, "model_type": "evil"})
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        load(model_folder)
    assert not (model_folder / "ran").exists()
