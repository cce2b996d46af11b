"""`weightstream doctor`: shows what this machine can do, what is in the way, and how to fix it."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from weightstream.errors import ConfigError, StoreError

if TYPE_CHECKING:
    import torch

    from weightstream.plan.manifest import Profile
    from weightstream.runtime.backend import Backend
    from weightstream.runtime.machine import PciLink

Mark = Literal["ok", "better", "missing", "broken", "note"]
COLUMNS = 100
_SYMBOLS: MappingProxyType[Mark, tuple[str, str]] = MappingProxyType(
    {
        "ok": ("ok", "green"),
        "better": ("!", "yellow"),
        "missing": ("-", "yellow"),
        "broken": ("X", "bold red"),
        "note": ("", ""),
    }
)
_PACKAGES = (  # and what they are for
    ("torch", "everything"),
    ("safetensors", "checkpoints"),
    ("triton", "compiled models on a GPU"),
    ("transformers", "language models by name, and weightstream run"),
    ("diffusers", "pipelines for images and video"),
    ("matplotlib", "figures"),
)
_GOOD_SHARE, _IMPOSSIBLE = 0.75, 1.0  # of the link's rate; a virtual machine may show another link than there is
_INDENT = 20
_PINNED_NBYTES, _FILE_NBYTES = 64 << 20, 256 << 20
_WRITE_S = 3.0
_MODEL_NBYTES, _STREAMED_NBYTES = 16.1e9, 10e9  # 8 billion weights in bf16, of which 6 GB stay


class Finding(NamedTuple):
    """One line: what is the case, how good that is, and the remedy."""

    label: str
    text: str
    mark: Mark = "ok"
    remedy: str = ""


def doctor(
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; cuda if there is one.")] = None,
    path: Annotated[
        Path, typer.Option(help="Measure the disk of this folder, with a scratch file of 256 MiB.", show_default="here")
    ] = Path(),
    measure: Annotated[bool, typer.Option("--measure", help="Measure again what was measured before.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the measured profile, for `weightstream plan --profile`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
) -> None:
    """Show what this machine can do, what is in the way, and how to fix it.

    Speeds are measured the first time, in a few seconds, and kept until the driver, torch or the device changes.
    Exits with 1 if something is broken.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("measuring ...") if console.is_terminal else nullcontext():
        numbers, sections, profile = examine(device, path.expanduser(), anew=measure)
    if save is not None:
        _save(profile, save)
    if as_json:
        found = [finding._asdict() | {"section": name} for name, part in sections.items() for finding in part]
        typer.echo(json.dumps(numbers | {"profile": dataclasses.asdict(profile), "findings": found}, indent=2))
    else:
        show(sections, profile)
        if save is not None:
            typer.echo(f"The profile is in {save}: weightstream plan MODEL --profile {save}")
    is_broken = any(finding.mark == "broken" for part in sections.values() for finding in part)
    raise typer.Exit(1 if is_broken else 0)


def examine(device: str | None, path: Path, *, anew: bool) -> tuple[dict[str, Any], dict[str, list[Finding]], Profile]:
    """What there is: numbers with their units in their names, what is to be said of them, and the profile."""
    import torch

    from weightstream.runtime import cuda
    from weightstream.runtime.cpu import CpuBackend
    from weightstream.runtime.profile import profile_for

    try:
        wanted = torch.device(device or ("cuda" if cuda.available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is none: name cpu, cuda or cuda:N") from error
    if wanted.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {wanted}: weightstream runs on 'cuda' and 'cpu'")
    on_gpu = wanted.type == "cuda" and cuda.available()
    backend: Backend = cuda.CudaBackend(wanted) if on_gpu else CpuBackend()
    numbers: dict[str, Any] = {"device": str(backend.device)}
    try:
        backend.profile = profile = profile_for(backend, anew=anew)
        sections = {
            "GPU": [*_gpu(backend, numbers)] if on_gpu else [_no_gpu(is_wanted=wanted.type == "cuda")],
            "link": [*_link(backend, numbers)] if on_gpu else [],
            "host": [*_host(numbers)],
            "speed": [*_speed(profile)],
            "disk": [_disk(path, numbers)],
            "software": [*_software(numbers, on_gpu=on_gpu)],
        }
    finally:
        backend.close()
    return numbers, sections, profile


# -- the GPU -----------------------------------------------------------------------------------------------------------


def _gpu(backend: Backend, numbers: dict[str, Any]) -> Iterator[Finding]:
    import torch

    from weightstream.plan.plan import human
    from weightstream.runtime import cuda, machine

    found, free = cuda.facts(backend.device), cuda.allocatable_nbytes(backend.device)
    driver = machine.driver_version() or "unknown"
    numbers["gpu"] = dataclasses.asdict(found) | {"free_nbytes": free, "driver_version": driver}
    yield Finding("device", f"{found.name}, compute capability {found.capability}")
    text = f"{human(free)} of {human(found.total_nbytes)} free"
    if free > found.total_nbytes / 2:
        yield Finding("memory", text)
    else:
        yield Finding("memory", text, "better", "Other processes hold the rest: see nvidia-smi.")
    yield Finding(
        "driver", f"{driver} (up to CUDA {found.driver}), torch {torch.__version__} of CUDA {torch.version.cuda}"
    )


def _no_gpu(*, is_wanted: bool) -> Finding:
    import torch

    from weightstream.runtime import machine

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus, driver = machine.nvidia_gpus(), machine.driver_version()
    text, remedy = why_no_gpu(gpus, driver, torch.__version__, torch.version.cuda, visible)
    is_broken = bool(gpus) or driver is not None or is_wanted
    return Finding("device", f"{text}: weightstream runs on the CPU", "broken" if is_broken else "note", remedy)


def why_no_gpu(
    gpus: tuple[str, ...], driver: str | None, version: str, cuda_version: str | None, visible: str | None
) -> tuple[str, str]:
    """Why torch of a version sees no GPU, and the remedy: hardware first, then driver, torch, environment."""
    if driver is None and not gpus:
        return "no GPU by NVIDIA, and no driver", "Is there one? In a container, pass it in: docker run --gpus all ..."
    if driver is None:
        text = f"a GPU by NVIDIA ({', '.join(gpus)}), and no driver"
        return text, "Install NVIDIA's driver; in a container, pass the GPU in: docker run --gpus all ..."
    if cuda_version is None:
        index = "cu130" if int(driver.split(".")[0]) >= 580 else "cu126"  # the newest that the driver runs
        remedy = f"pip install -U torch --index-url https://download.pytorch.org/whl/{index}"
        return f"driver {driver}, but torch {version} is built without CUDA", remedy
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    remedy = "Does nvidia-smi work? Else update the driver, or install a torch that is built for an older CUDA."
    return f"driver {driver}, but torch {version} (CUDA {cuda_version}) cannot use it", remedy


def _link(backend: Backend, numbers: dict[str, Any]) -> Iterator[Finding]:
    from weightstream.runtime import bench, cuda, machine

    address, device = cuda.facts(backend.device).pci, backend.device
    with bench.busy_link(backend):
        time.sleep(0.05)  # until the link has left its state of rest
        now = machine.link_now(address)
    best, node = machine.link_at_best(address), machine.numa_node(address)
    pinning, reads_pages = _pinning(device), cuda.reads_pages(device)
    numbers["link"] = {
        "now": now and dataclasses.asdict(now) | {"bytes_per_s": now.bytes_per_s},
        "best": best and dataclasses.asdict(best) | {"bytes_per_s": best.bytes_per_s},
        "measured_bytes_per_s": backend.profile.link_bytes_per_s,
        "numa_node": node,
        "pins_memory": pinning.mark == "ok",
        "pins_file_pages": reads_pages,
    }
    yield from link_findings(now, best, backend.profile.link_bytes_per_s)
    yield numa_finding(node, machine.cores_of_node(node or 0), frozenset(os.sched_getaffinity(0)))
    yield pinning
    if reads_pages:
        yield Finding("file pages", "can be pinned where they are, in the page cache")
    else:
        yield Finding("file pages", "cannot be pinned by this device: checkpoints are staged through RAM", "note")


def link_findings(now: PciLink | None, best: PciLink | None, measured: float) -> Iterator[Finding]:
    """The PCIe link at work and at best, and what copies reach of it, in bytes per second."""
    text = f"{_rate(measured)} from pinned memory"
    if now is None or measured > _IMPOSSIBLE * now.bytes_per_s:
        said = "" if now is None else f" (it says {now})"
        yield Finding("PCIe", f"generation and width are not shown, as in many virtual machines{said}", "note")
        yield Finding("host to GPU", text)
        return
    if best is None or best.bytes_per_s <= now.bytes_per_s:
        yield Finding("PCIe", f"{now}, the best of this GPU and slot")
    else:
        remedy = "Try another slot; look at the riser, and in the BIOS at generation and bifurcation."
        yield Finding("PCIe", f"{now} under load, where {best} could be", "better", remedy)
    share = measured / now.bytes_per_s
    text += f", {100 * share:.0f} % of the link's {_rate(now.bytes_per_s)}"
    if share >= _GOOD_SHARE:
        yield Finding("host to GPU", text)
        return
    remedy = "85 to 90 % are usual. Look at the NUMA node below, and at who else copies or shares a PCIe switch; then "
    yield Finding("host to GPU", text, "better", f"{remedy}measure again: weightstream doctor --measure")


def numa_finding(node: int | None, near: frozenset[int], allowed: frozenset[int]) -> Finding:
    """Whether this process may run on cores of the GPU's node."""
    if node is None or not near:
        return Finding("NUMA", "one node, or not shown here", "note")
    if both := near & allowed:
        return Finding("NUMA", f"the GPU is at node {node}, as are {len(both)} of {len(allowed)} usable cores")
    remedy = f"numactl --cpunodebind={node} --membind={node} weightstream ..."
    return Finding("NUMA", f"the GPU is at node {node}, and no core that may be used is there", "better", remedy)


def _pinning(device: torch.device) -> Finding:
    from weightstream.plan.plan import human
    from weightstream.runtime import cuda
    from weightstream.store.arena import Arena

    arena = Arena(partial(cuda.register, device=device), cuda.unregister)
    try:
        arena.pin(arena.take(_PINNED_NBYTES).fill_(1))
    except StoreError as error:
        return Finding("pinning", "refused", "broken", str(error))
    finally:
        arena.close()
    return Finding("pinning", f"works ({human(_PINNED_NBYTES)} tried)")


# -- everything else ---------------------------------------------------------------------------------------------------


def _host(numbers: dict[str, Any]) -> Iterator[Finding]:
    import psutil

    from weightstream.plan.plan import human
    from weightstream.runtime import machine
    from weightstream.store.limits import available_nbytes, describe_limits

    total, free, cores = psutil.virtual_memory().total, available_nbytes(), len(os.sched_getaffinity(0))
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    anonymous, shared = machine.huge_pages()
    numbers["host"] = {
        "processor": machine.processor(),
        "num_cores": cores,
        "ram_nbytes": total,
        "available_nbytes": free,
        "memlock_nbytes": None if memlock == resource.RLIM_INFINITY else memlock,
        "limits": describe_limits(),
        "huge_pages": anonymous,
        "huge_pages_shared": shared,
    }
    yield Finding("processor", f"{machine.processor()}, {cores} cores usable")
    yield Finding("memory", f"{human(free)} of {human(total)} can be taken by this process")
    yield Finding("limits", describe_limits())
    text = f"{anonymous or 'unknown'}, in shared memory {shared or 'unknown'}"
    remedy = "Pinning is faster with them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    yield Finding("huge pages", text, "better", remedy) if anonymous == "never" else Finding("huge pages", text)


def _speed(profile: Profile) -> Iterator[Finding]:
    if not profile.machine:
        yield Finding("measured", "nothing, for the reason above: these speeds are assumed", "broken")
    copies = f"{_rate(profile.link_bytes_per_s)}, {_us(profile.copy_latency_s)} more for each"
    yield Finding("copies", f"{copies}, {_us(profile.handover_s)} to hand over")
    yield Finding("weights", f"read at {_rate(profile.device_bytes_per_s)}")
    products = f"{_flops(profile.half_flops_per_s)} in bf16, {_flops(profile.single_flops_per_s)} in float32"
    yield Finding("products", f"{products}, {_flops(profile.attention_flops_per_s)} in attention")
    kernels = f"{_us(profile.op_s)} at least, {_us(profile.op_launch_s)} to launch from Python"
    yield Finding("kernels", kernels)


def _disk(path: Path, numbers: dict[str, Any]) -> Finding:
    from weightstream.runtime.bench import disk_bytes_per_s
    from weightstream.store.file import DirectFile
    from weightstream.store.mapping import FileMapping

    place = path.resolve()
    numbers["disk"] = {"path": str(place), "free_nbytes": None, "bytes_per_s": None, "is_direct": None}
    try:
        numbers["disk"]["free_nbytes"] = free = shutil.disk_usage(place).free
        if free < 2 * _FILE_NBYTES:
            raise OSError(f"a scratch file takes {_FILE_NBYTES} bytes, and {free} are free")
        with NamedTemporaryFile(dir=place, prefix=".weightstream-doctor-") as scratch:
            _fill(scratch.fileno())
            file = DirectFile(mapping := FileMapping(Path(scratch.name)))
            rate = disk_bytes_per_s(file, mapping.nbytes)
    except OSError as error:
        return Finding("reads", f"not measured: {error}", "note", "Name a folder to write to: --path FOLDER")
    numbers["disk"] |= {"bytes_per_s": rate, "is_direct": file.is_direct}
    if file.is_direct:
        return Finding("reads", f"{_rate(rate)} in {place}")
    remedy = "This file system takes no direct reads: keep weights on a local disk."
    return Finding("reads", f"{_rate(rate)} in {place}, through the page cache", "better", remedy)


def _fill(descriptor: int) -> None:
    """Write up to 256 MiB of noise, which no file system compresses, and see it onto the disk."""
    noise, until = os.urandom(8 << 20), time.perf_counter() + _WRITE_S
    for _ in range(_FILE_NBYTES // len(noise)):
        os.write(descriptor, noise)
        os.fdatasync(descriptor)
        if time.perf_counter() > until:
            break
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _software(numbers: dict[str, Any], *, on_gpu: bool) -> Iterator[Finding]:
    found = {name: _version(name) for name, _ in _PACKAGES}
    numbers["software"] = {"python": sys.version.split()[0], **found}
    yield Finding("installed", ", ".join(f"{name} {version}" for name, version in found.items() if version))
    for name, purpose in _PACKAGES:
        if found[name] is None and (on_gpu or name != "triton"):
            yield Finding(name, f"for {purpose}", "missing", f"pip install {name}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- the screen --------------------------------------------------------------------------------------------------------


def show(sections: dict[str, list[Finding]], profile: Profile) -> None:
    """One line per finding, the remedy below it."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    width = min(COLUMNS, console.width) if console.is_terminal else COLUMNS
    fold = partial(textwrap.fill, width=width, subsequent_indent=" " * _INDENT, break_on_hyphens=False)
    for name, part in sections.items():
        if part:
            console.print(Text(name, style="bold"))
        for finding in part:
            symbol, style = _SYMBOLS[finding.mark]
            line = fold(f"{symbol:>4}  {finding.label:<{_INDENT - 6}}{finding.text}")
            console.print(Text.assemble((line[:4], style), line[4:]))
            if finding.remedy:
                console.print(Text(fold(f"{' ' * (_INDENT - 3)}-> {finding.remedy}"), style="italic"))
    marks = [finding.mark for part in sections.values() for finding in part]
    words: dict[Mark, str] = {"broken": "broken", "better": "could be better", "missing": "missing"}
    verdict = ", ".join(f"{marks.count(mark)} {word}" for mark, word in words.items() if mark in marks)
    step_s = max(_STREAMED_NBYTES / profile.link_bytes_per_s, _MODEL_NBYTES / profile.device_bytes_per_s)
    meaning = (
        f"Here a model of {_MODEL_NBYTES / 1e9:.1f} GB of which {_STREAMED_NBYTES / 1e9:.0f} GB stream takes about "
        f"{step_s:.2f} s per step."
    )
    console.print("\n" + textwrap.fill(f"{verdict or 'All is well'}. {meaning}", width))


def _save(profile: Profile, path: Path) -> None:
    from weightstream.runtime.profile import to_json

    try:
        path.write_text(to_json(profile) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: the profile cannot be written: {error.strerror}") from error


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e12:.2f} TB/s" if bytes_per_s >= 1e12 else f"{bytes_per_s / 1e9:.1f} GB/s"


def _flops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.0f} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.0f} GFLOP/s"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us"
