"""`weightstream serve` as a process: it starts, answers, and ends on SIGTERM while a client reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from models import TEXT
from weightstream.cli import app
from weightstream.errors import ConfigError
from words import CHAT, tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**TEXT | {"max_position_embeddings": 100_000}, initializer_range=0.3)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None  # texts do not end
    model.save_pretrained(path)
    tokenizer(CHAT).save_pretrained(path)
    return path


def test_it_ends_on_sigterm_while_a_client_reads(folder: Path) -> None:
    flags = ("--device", "cpu", "--device-budget", "512KiB", "--context", "90000", "--port", "0")
    command = [sys.executable, "-m", "weightstream", "serve", str(folder), *flags]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "/v1" in line)
        assert line.startswith(f"weightstream: {folder.name} at http://127.0.0.1:")
        port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
        body = {"model": folder.name, "prompt": "w5 w9", "max_tokens": 80_000, "stream": True}
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert json.loads(response.readline().removeprefix(b"data: "))["choices"][0]["text"].startswith("w")
            process.send_signal(signal.SIGTERM)
            *_, last, _ = response.read().split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "The server is shutting down"
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_port_in_use_is_an_error_before_the_load(tmp_path: Path) -> None:
    from weightstream.serving.server import bound_socket

    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing"), "--port", str(port)])
    assert result.exit_code == 2
    assert f"--port {port}: Address already in use" in result.stderr
    for host in ("no-such-host.invalid", "a" * 64):  # a label that is too long for a name
        result = CliRunner().invoke(app, ["serve", str(tmp_path / "nothing"), "--host", host])
        assert result.exit_code == 2
        assert f"--host {host}" in result.stderr


def test_of_two_servers_that_load_the_second_is_refused() -> None:
    """A port that is bound can be bound again, until one of both listens."""
    from weightstream.serving.server import bound_socket, serve_forever

    with bound_socket("127.0.0.1", 0) as first, bound_socket("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        with pytest.raises(ConfigError, match="Address already in use"):
            serve_forever(None, second, 1)  # type: ignore[arg-type]  # no request comes


def test_an_empty_key_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--api-key", " "])
    assert result.exit_code == 2
    assert "--api-key is empty" in result.stderr
