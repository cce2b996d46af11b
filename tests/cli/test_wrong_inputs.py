"""Wrong inputs of all commands: one line that names the input, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from models import TEXT
from weightstream.adapters.steps.decode_steps import DecodeSteps
from weightstream.cli import app
from weightstream.measure import checks
from words import tokenizer

transformers = pytest.importorskip("transformers")

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269062784\n"
Spoil = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path, no_loading_bars: None) -> Path:
    folder = tmp_path / "model"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def config(**facts: object) -> Spoil:
    return lambda model: (model / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | facts)
    )


def written(name: str, text: str) -> Spoil:
    return lambda model: (model / name).write_text(text)


def halved(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


DAMAGED: dict[str, tuple[Spoil, str]] = {
    "git-lfs": (written("model.safetensors", LFS), "git lfs pull"),
    "empty weights": (written("model.safetensors", ""), "is empty"),
    "half of the weights": (halved, "download it again"),
    "config no JSON": (written("config.json", "{nope"), "config.json is not valid JSON: Expecting property name"),
    "config a list": (written("config.json", "[]"), "config.json"),
    "config without a type": (written("config.json", "{}"), "model_type"),
    "an unknown type": (config(model_type="nope"), "nope"),
    "a size of the wrong kind": (config(hidden_size="x"), "hidden_size"),
    "other shapes": (config(vocab_size=10), "shapes differ"),
    "more layers": (config(num_hidden_layers=99), "lacks"),
    "tokenizer no JSON": (written("tokenizer.json", "nope"), "tokenizer"),
    "git-lfs tokenizer": (written("tokenizer.json", LFS), "tokenizer.json is a pointer of git-lfs"),
    "a pickle": (lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"), "pickle"),
}


def refused(*arguments: object) -> str:
    """The line about the error."""
    result = CliRunner().invoke(app, list(map(str, arguments)), input="")
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    *said, error = result.stderr.splitlines()
    assert all(line.startswith("weightstream: ") for line in said)
    assert error.startswith("error: ")
    return error


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_models(kind: str, model: Path) -> None:
    spoil, named = DAMAGED[kind]
    spoil(model)
    assert named in refused("run", model, "--device", "cpu", "--device-budget", "256KiB", "--prompt", "w5")


@pytest.mark.parametrize("command", ["bench", "pack", "plan", "run", "serve", "trace"])
@pytest.mark.parametrize(("name", "said"), [("", "MODEL is empty"), ("a/b/c", "'a/b/c'"), ("x" * 5000, "no local")])
def test_names_of_no_model(command: str, name: str, said: str, tmp_path: Path) -> None:
    assert said in refused(command, name, *([tmp_path / "out"] if command == "pack" else []))


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "{model}", "--device", "tpu"), "'tpu'"),
        (("run", "{model}", "--jsonl", "{tmp}/bad.jsonl"), "bad.jsonl, line 2"),
        (("run", "{model}", "--jsonl", "{tmp}/none.jsonl"), "No such file"),
        (("run", "{model}", "--config", "{tmp}"), "Is a directory"),
        (("run", "{model}", "--draft", "{tmp}/none", "--device", "cpu"), "no such file or folder"),
        (("run", "{model}", "--temperature", "1", "--seed", str(10**30)), "--seed"),
        (("plan", "{model}", "--profile", "{tmp}/bad.jsonl"), "not a profile: Invalid JSON"),
        (("bench", "{model}", "--plot", "{tmp}/none/x.png"), "--plot"),
        (("pack", "{model}", "{model}/inside"), "name a folder outside of it"),
        (("pack", "{model}", "{tmp}/out", "--codec", "gzip"), "'gzip'"),
        (("serve", "{model}", "--port", "{port}"), "--port"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], said: str, model: Path, tmp_path: Path, used_port: int) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "w5"}\n{nope\n')
    places = {"model": model, "tmp": tmp_path, "port": used_port}
    error = refused(*(argument.format_map(places) for argument in arguments))
    assert said in error
    assert "errors.pydantic.dev" not in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("doctor", "--save", "/sys/x"), "--save /sys/x"),
        (("plan", "{tmp}/no-model", "--save", "{tmp}/none/x.json"), "--save {tmp}/none/x.json"),
        (("pack", "nobody/nothing", "/sys/none/x"), "/sys/none/x cannot be written"),
        (("pack", "nobody/nothing", "{tmp}"), "{tmp} exists"),
        (("trace", "{tmp}/no-model", "--out", "/sys/x.json"), "--out /sys/x.json"),
    ],
)
def test_places_that_cannot_be_written_come_before_the_work(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "examine", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").touch()
    assert said.format(tmp=tmp_path) in refused(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_gpus_that_the_machine_lacks(model: Path) -> None:
    assert "--gpus 2: " in refused("run", model, "--gpus", 2, "--prompt", "w5")
    assert "sees no CUDA GPU" in refused("run", model, "--device", "cuda", "--prompt", "w5")


@pytest.mark.parametrize("error", [RuntimeError("first\nsecond"), KeyError("first")])
def test_an_error_that_nobody_expected_is_a_line(
    error: Exception, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(DecodeSteps, "__init__", fail)
    arguments = ["bench", str(model), "--device", "cpu", "--device-budget", "256KiB"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: {type(error).__name__}: ")
    assert "first" in result.stderr
    assert CliRunner().invoke(app, [*arguments, "-v"]).exception is error


def test_a_cache_for_which_there_is_no_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        torch.empty(2**62, dtype=torch.uint8)

    monkeypatch.setattr(DecodeSteps, "__init__", fail)
    error = refused("bench", model, "--device", "cpu", "--device-budget", "256KiB")
    assert "no memory left for a step besides the weights: lower --device-budget, --batch or --context" in error
