"""The first offload of a process, by phase: a Llama of 2.1 GiB in bf16, with 512 MiB of device memory for weights.

    python benchmarks/first.py [--trials 3] [--device cuda] [--width 2048] [--out FILE]

Each trial is a process with CUDA initialised and the model in host memory. Cold: its caches have no profile of the
machine and no compiled kernels; warm: they have both, from a cold trial. `second_s` is the time of a second offload of
the same model in the same process, which only moves weights; `beyond_s` is the difference of both. `phases` exclude
each other, and their sum is `first_s`; `kernels` are the seconds that Triton took for each, several concurrently;
`said_s` is the time from the call to the first line on stderr, which is not a terminal; -1 without any line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import IO, Any

import rows
import torch

BEGIN = "offload begins"
LAYERS, WIDTH, PARTS = 16, 2048, 4  # the budget is a quarter of the weights


class Phases:
    """Seconds of phases on the main thread; those of an inner phase do not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._names = ["rest"]
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._turn()
        self._names.append(name)
        try:
            yield
        finally:
            self._turn()
            self._names.pop()

    def time(self, name: str, owner: Any, attribute: str) -> None:
        """Count calls of a function for a phase."""
        plain: Callable[..., Any] = getattr(owner, attribute)

        @wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return plain(*args, **kwargs)

        setattr(owner, attribute, timed)

    def taken(self) -> dict[str, float]:
        """The seconds counted since the last call."""
        self._turn()
        found, self.seconds = dict(self.seconds), defaultdict(float)
        return found

    def _turn(self) -> None:
        now = time.perf_counter()
        self.seconds[self._names[-1]] += now - self._since
        self._since = now


def watched(phases: Phases) -> None:
    """Time the parts of an offload."""
    from weightstream.codec import coding
    from weightstream.inputs import gathering, machine
    from weightstream.measure import bench
    from weightstream.plan.planner_inputs import PlannerInputs
    from weightstream.runtime.devices import opening
    from weightstream.runtime.weights.homes import Homes

    phases.time("open", opening, "backend_of")
    phases.time("measure", bench, "measure")
    phases.time("measure", bench, "measure_decoding")
    phases.time("wait for kernels", coding, "why_not")
    phases.time("wait for kernels", machine, "kernels_run")
    phases.time("follow a step", gathering, "observe")
    phases.time("sample weights", gathering, "sizes_of")
    phases.time("plan", PlannerInputs, "plan")
    phases.time("move", Homes, "settle")


def compiled() -> dict[str, float]:
    """A table that gets the seconds of each kernel that Triton compiles from now on."""
    found: dict[str, float] = {}

    def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        constants = [v for k, v in src.constants.items() if isinstance(v, int)]
        found[f"{src.name} {constants}"] = 0.0 if cache_hit else round(times.total / 1e6, 2)

    try:
        import triton

        triton.knobs.compilation.listener = listen
    except (ImportError, AttributeError):  # another version of Triton: the table stays empty
        pass
    return found


def child(device: torch.device, width: int) -> None:
    """Offload a model twice, and print the times."""
    import transformers

    import weightstream

    vocabulary = 32000 * width // WIDTH
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": LAYERS}
    config = transformers.LlamaConfig(
        **shape, vocab_size=vocabulary, num_attention_heads=width // 64, num_key_value_heads=width // 256
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    model = model.cpu().eval()
    ids = torch.randint(0, vocabulary, (1, 1), device=device)
    budget = sum(p.nbytes for p in model.parameters()) // PARTS
    kernels, phases = compiled(), Phases()
    synchronize(device)
    print(BEGIN, flush=True)
    phases.taken()
    with phases.phase("import"):
        offload = weightstream.offload
        watched(phases)
    streamer = offload(model, device=device, device_budget=budget)
    synchronize(device)
    taken = phases.taken()
    found: dict[str, Any] = {"first_s": sum(taken.values()), "phases": taken, "plan": streamer.plan.summary()}
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    synchronize(device)
    found |= {"step_s": sum(phases.taken().values()), "kernels": dict(kernels)}
    streamer.remove()
    phases.taken()
    weightstream.offload(model, device=device, device_budget=budget)
    synchronize(device)
    taken = phases.taken()
    print(json.dumps(found | {"second_s": sum(taken.values()), "second_phases": taken}), flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()


def trial(args: argparse.Namespace, caches: Path) -> dict[str, Any]:
    names = {"XDG_CACHE_HOME": "cache", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    env = os.environ | {name: str(caches / folder) for name, folder in names.items()}
    command = [sys.executable, __file__, "--child", "--device", args.device, "--width", str(args.width)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said: list[tuple[float, str]] = []
        reader = threading.Thread(target=_read, args=(process.stderr, said))
        reader.start()
        begun, last = 0.0, ""
        for line in process.stdout:
            begun, last = (time.perf_counter() if line.strip() == BEGIN else begun), line
        reader.join()
    if process.returncode:
        raise RuntimeError("".join(line for _, line in said)[-2000:])
    lines = [(at - begun, line.strip()) for at, line in said if at >= begun and line.startswith("weightstream: ")]
    found: dict[str, Any] = json.loads(last)
    return found | {"said_s": lines[0][0] if lines else -1.0, "said": [f"{at:.1f} s: {line}" for at, line in lines]}


def _read(stream: IO[str], lines: list[tuple[float, str]]) -> None:
    for line in stream:
        lines.append((time.perf_counter(), line))


def row_of(which: str, width: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    names = sorted({name for one in found for name in one["phases"]})
    return {
        "bench": "first",
        "system": f"first offload, {which}",
        "model": f"Llama, {LAYERS} layers of {width}",
        "trials": len(found),
        **{
            name: rows.percentiles([one[name] for one in found]) for name in ("first_s", "second_s", "step_s", "said_s")
        },
        "beyond_s": rows.percentiles([one["first_s"] - one["second_s"] for one in found]),
        "phases": {name: rows.percentiles([one["phases"].get(name, 0.0) for one in found]) for name in names},
        "kernels": found[-1]["kernels"],
        "said": found[-1]["said"],
        "plan": found[-1]["plan"],
    }


def show(row: dict[str, Any]) -> None:
    beyond, second = row["beyond_s"]["p50"], row["second_s"]["p50"]
    print(
        f"{row['system']}: {row['first_s']['p50']:.2f} s, {beyond:.2f} beyond the second's {second:.2f}; first step ",
        end="",
    )
    print(f"{row['step_s']['p50']:.2f} s; first line after {row['said_s']['p50']:.2f} s; {row['plan']}")
    for name, seconds in sorted(row["phases"].items(), key=lambda item: -item[1]["p50"]):
        print(f"  {name:18s} {seconds['p50']:6.2f} s")
    for name, taken_s in row["kernels"].items():
        print(f"    {name:36s} {taken_s:6.2f} s")
    print(*(f"  {line}" for line in row["said"]), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3, help="of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=WIDTH, help="a multiple of 256; for a small try")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "first.jsonl")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(torch.device(args.device), args.width)
        return
    with tempfile.TemporaryDirectory() as folder:
        caches = [Path(folder, str(index)) for index in range(args.trials)]
        for which in ("cold", "warm"):
            row = row_of(which, args.width, [trial(args, path) for path in caches])
            rows.append(args.out, [row])
            show(row)


if __name__ == "__main__":
    main()
