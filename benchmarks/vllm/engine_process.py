"""A process of a script that builds an engine, writes READY, waits for a line of stdin, and writes RESULT and a JSON
object, the last of which counts. Engines are built concurrently, and then measured one after another. They end with the
process that started them."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """The exit code, the lines that the process wrote, and its result; None if it has none."""

    code: int
    lines: list[str]
    result: dict[str, Any] | None


class EngineProcess:
    """`script one …`. Output goes to `log`; `cache` is the folder of its compile cache, cold the first time."""

    def __init__(self, script: str, arguments: Sequence[str], log: Path, cache: Path, **environ: str) -> None:
        self.log = log
        environ |= {"VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, script, "one", *arguments],
                env=os.environ | environ,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self._kill)

    def is_starting(self) -> bool:
        return self._process.poll() is None and "READY" not in self._lines()

    def ended(self, until: float) -> Ended:
        """Have the engine measured, and wait for the end; a process that runs longer than until this time is killed."""
        try:
            self._process.communicate(b"\n", timeout=max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            self._kill()
        lines = self._lines()
        result = next((json.loads(line[7:]) for line in reversed(lines) if line.startswith("RESULT ")), None)
        return Ended(self._process.returncode, lines, result)

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()


def passed(options: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The command line of these options."""
    return [part for name in names for part in (f"--{name}", str(options[name]))]


def wait_while_starting(processes: Sequence[EngineProcess], until: float) -> None:
    while any(process.is_starting() for process in processes) and time.time() < until:
        time.sleep(0.2)
