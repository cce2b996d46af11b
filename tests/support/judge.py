"""Opens crafted checkpoints in a process of its own: a crash of the reader is a result, and does not end the test
run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weightstream.errors import CheckpointError, StoreError
from weightstream.store import checkpoint as checkpoint_module
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.mapping import FileMapping

TIMEOUT_S = 60
MEMORY = 16 << 30  # of address space: a header that makes the reader take more fails the test


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result for a path: `tensors` (name -> dtype, shape, digest), or the message of the refusal."""

    tensors: dict[str, list[Any]] | None
    refusal: str
    opened: list[str]
    theirs: dict[str, list[Any] | None] | None


class Judge:
    """The process. It is restarted after a crash, so that Hypothesis can shrink a failing example."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, path: Path, *, shrink: str = "") -> Verdict:
        """Open `path` and read every tensor. `shrink` truncates the file at that moment: "mapped" or "opened"."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(path), shrink]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        answer = process.stdout.readline() if ready else ""
        if not answer:
            self.close()
            raise AssertionError(f"{path}: the reader hung or died, exit status {process.returncode}")
        answers = json.loads(answer)
        assert not answers["raised"], answers["raised"]
        return Verdict(**{name: answers[name] for name in ("tensors", "refusal", "opened", "theirs")})

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main() -> None:
    """Answer each line of JSON with a line of JSON, until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(os.fsdecode(args[0])) if _is_open(event, args) else None)
    for line in sys.stdin:
        path, shrink = json.loads(line)
        opened.clear()
        answer: dict[str, Any] = {"tensors": None, "refusal": "", "raised": ""}
        try:
            answer["tensors"] = _read(path, shrink)
        except CheckpointError as error:
            answer["refusal"] = str(error)
        except StoreError as error:
            answer["refusal" if shrink else "raised"] = f"StoreError: {error}"
        except BaseException:
            answer["raised"] = traceback.format_exc()
        answer["opened"] = list(opened)
        answer["theirs"] = _read_theirs(path) if os.path.isfile(path) and path.endswith(".safetensors") else None
        print(json.dumps(answer), flush=True)


def _is_open(event: str, args: tuple[Any, ...]) -> bool:
    return event == "open" and isinstance(args[0], (str, bytes)) and not os.fsdecode(args[0]).endswith((".py", ".pyc"))


def _read(path: str, shrink: str) -> dict[str, list[Any]]:
    with _cut_once_mapped() if shrink == "mapped" else contextlib.nullcontext():
        checkpoint = Checkpoint.open(path)
    if shrink == "opened":
        os.truncate(path, 0)
    found = {}
    for name, tensor in ((name, checkpoint.tensor(name)) for name in checkpoint.entries):
        entry = checkpoint.entries[name]
        mapping = next(mapping for mapping in checkpoint.mappings if mapping.path == entry.path)
        nbytes, first = tensor.numel() * tensor.element_size(), tensor.data_ptr()
        if nbytes and entry.begin % tensor.element_size() == 0:
            places = mapping.locate(first), mapping.locate(first + nbytes - 1)
            assert places == (entry.begin, entry.end - 1), f"{name!r}: {places}, not {entry}"
        data = _bytes(tensor)
        with entry.path.open("rb") as file:
            file.seek(entry.begin)
            assert file.read(entry.end - entry.begin) == data, f"{name!r} does not hold its bytes"
        found[name] = _facts(tensor)
    return found


@contextlib.contextmanager
def _cut_once_mapped() -> Iterator[None]:
    def mapped(path: Path) -> FileMapping:
        mapping = FileMapping(path)
        os.truncate(path, 0)
        mapping.check = lambda: None  # type: ignore[method-assign]  # cut after the check, not before  # truncated after the check, not before
        return mapping

    before: Callable[[Path], FileMapping] = checkpoint_module.FileMapping
    checkpoint_module.FileMapping = mapped  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        checkpoint_module.FileMapping = before  # type: ignore[assignment,misc]


def _read_theirs(path: str) -> dict[str, list[Any] | None] | None:
    """The tensors that safetensors' own reader finds: None if it refuses the file, or cannot make a tensor."""
    found: dict[str, list[Any] | None] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping  # not a mapping
                found[name] = None
                with contextlib.suppress(Exception):
                    found[name] = _facts(file.get_tensor(name))
    except (SafetensorError, OSError):
        return None
    return found


def _facts(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(_bytes(tensor)).hexdigest()]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


if __name__ == "__main__":
    main()
