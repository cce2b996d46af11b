"""`weightstream serve` as a process: it starts, answers, and ends on SIGTERM while a client reads."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import weightstream
from chat_model import saved
from models import TEXT
from weightstream.cli import app
from weightstream.errors import ConfigError
from words import tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TEXT | {"max_position_embeddings": 100_000}
    return saved(tmp_path_factory.mktemp("tiny-llama"), sizes, eos_token_id=None)  # texts do not end


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server's process and its port."""
    given = ("--device", "cpu", "--device-budget", "512KiB", "--port", "0", *flags)
    command = [sys.executable, "-m", "weightstream", "serve", str(folder), *given]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "/v1" in line)
            assert line.startswith(f"weightstream: {folder.name} at http://127.0.0.1:")
            yield process, int(line.partition("127.0.0.1:")[2].partition("/")[0])
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> None:
    """Check that the process ends as it should."""
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


@pytest.mark.stress
def test_it_ends_on_sigterm_while_a_client_reads(folder: Path) -> None:
    with serving(folder, "--context", "90000") as (process, port):
        body = {"model": folder.name, "prompt": "w5 w9", "max_tokens": 80_000, "stream": True}
        with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert json.loads(response.readline().removeprefix(b"data: "))["choices"][0]["text"].startswith("w")
            process.send_signal(signal.SIGTERM)
            *_, last, _ = response.read().split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "The server is shutting down"
        ended(process)


class Client(threading.Thread):
    """Asks for answers until the end, whole or as a stream, and leaves some of them."""

    def __init__(self, port: int, name: str, seed: int, until: float) -> None:
        super().__init__()
        self._port, self._name, self._draw, self._until = port, name, random.Random(seed), until
        self.answers: list[tuple[str, str]] = []  # prompts and texts
        self.num_left = 0
        self.num_refused = 0

    def run(self) -> None:
        while time.monotonic() < self._until:
            prompt = f"w{self._draw.randrange(3, 20)} w{self._draw.randrange(3, 6)}"
            body = {"model": self._name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            stream, leaves = self._draw.random() < 0.5, self._draw.random() < 0.4
            with closing(HTTPConnection("127.0.0.1", self._port, timeout=120)) as connection:
                data = json.dumps(body | {"stream": stream})
                connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
                if leaves:
                    time.sleep(self._draw.random() * 0.3)
                    self.num_left += 1
                    continue
                response = connection.getresponse()
                text = response.read()
            if response.status == 429:
                self.num_refused += 1
                time.sleep(0.05)
                continue
            assert response.status == 200, text
            events = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: {")] if stream else [text]
            self.answers.append((prompt, "".join(json.loads(each)["choices"][0]["text"] for each in events)))


def resident_nbytes(process: subprocess.Popen[str]) -> int:
    return psutil.Process(process.pid).memory_info().rss


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [20, 300])
def test_many_clients_get_the_answers_of_generate(folder: Path, seconds: int) -> None:
    with serving(folder, "--context", "64", "--queue", "8") as (process, port):
        until = time.monotonic() + seconds
        clients = [Client(port, folder.name, seed, until) for seed in range(16)]
        for client in clients:
            client.start()
        time.sleep(seconds / 4)
        before = resident_nbytes(process)
        for client in clients:
            client.join()
        assert resident_nbytes(process) <= before + (16 << 20)
        process.send_signal(signal.SIGTERM)
        ended(process)
    answers = {answer for client in clients for answer in client.answers}
    assert len(answers) == len({prompt for prompt, _ in answers}) > 20
    assert min(sum(getattr(client, name) for client in clients) for name in ("num_left", "num_refused")) > 5
    model = weightstream.from_pretrained(folder, device="cpu", device_budget="512KiB")
    words = tokenizer()
    for prompt, text in answers:
        ids = words(prompt, return_tensors="pt")["input_ids"]
        made = weightstream.generate(model, ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
        assert text == words.decode(made[0, 2:], skip_special_tokens=True)


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
