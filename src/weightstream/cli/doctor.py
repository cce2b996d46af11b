"""`weightstream doctor`: shows what this machine can do, what is in the way, and how to fix it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from weightstream.cli.screen import print_folded, screen, write
from weightstream.errors import ConfigError
from weightstream.plan.shown import human, milliseconds, per_second

if TYPE_CHECKING:
    from weightstream.plan.manifest import Profile
    from weightstream.runtime.backend import Backend
    from weightstream.runtime.machine import PciLink

_MARKS = MappingProxyType(  # symbol, style, and what the last line counts
    {
        "ok": ("ok", "green", ""),
        "note": ("", "", ""),
        "broken": ("X", "bold red", "broken"),
        "better": ("!", "yellow", "could be better"),
        "missing": ("-", "yellow", "missing"),
    }
)
_OPTIONAL = MappingProxyType(
    {
        "triton": "for coded weights and compiled models on a GPU",
        "transformers": "for language models by name, and weightstream run",
        "diffusers": "for pipelines for images and video",
        "matplotlib": "for figures",
    }
)
_GOOD_SHARE = 0.75  # of the link's rate
_FILE_NBYTES = 256 << 20


class Finding(NamedTuple):
    """One line: what is the case, how good that is (a key of the marks), and the remedy; and the bare number."""

    label: str
    text: str
    mark: str = "ok"
    remedy: str = ""
    value: Any = None


Sections = dict[str, list[Finding]]


def _judged(label: str, text: str, is_good: bool, remedy: str, value: Any = None) -> Finding:
    return Finding(label, text, "ok", "", value) if is_good else Finding(label, text, "better", remedy, value)


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
    from weightstream.runtime.profile import to_json

    with Console(stderr=True).status("measuring ..."):
        sections, profile = examine(device, path.expanduser(), anew=measure)
    if save is not None:
        write("--save", save, to_json(profile) + "\n")
    findings = [finding._asdict() | {"section": name} for name, part in sections.items() for finding in part]
    if as_json:
        typer.echo(json.dumps({"profile": asdict(profile), "findings": findings}, indent=2))
    else:
        show(sections)
        if save is not None:
            typer.echo(f"The profile is in {save}: weightstream plan MODEL --profile {save}")
    raise typer.Exit(1 if any(finding["mark"] == "broken" for finding in findings) else 0)


def examine(device: str | None, path: Path, *, anew: bool) -> tuple[Sections, Profile]:
    """What is to be said of this machine, and its profile."""
    import torch

    from weightstream.runtime import cuda
    from weightstream.runtime.bench import backend_of
    from weightstream.runtime.profile import profile_for

    wanted = device or ("cuda" if cuda.available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        raise ConfigError(f"device {device!r} is none: name cpu, cuda or cuda:N")
    on_gpu = wanted != "cpu" and cuda.available()
    with closing(backend_of(torch.device(wanted if on_gpu else "cpu"))) as backend:
        backend.profile = profile = profile_for(backend, anew=anew)
        sections = {
            "GPU": [*_gpu(backend)] if on_gpu else [_no_gpu(is_wanted=wanted != "cpu")],
            "link": [*_link(backend)] if on_gpu else [],
            "host": [*_host()],
            "speed": [*_speed(profile), _codec(backend)],
            "disk": [_disk(path)],
            "software": [*_software(on_gpu=on_gpu)],
        }
    return sections, profile


def _gpu(backend: Backend) -> Iterator[Finding]:
    import torch

    from weightstream.runtime import cuda, machine

    found, free = cuda.facts(backend.device), cuda.allocatable_nbytes(backend.device)
    yield Finding("device", f"{found.name}, compute capability {found.capability}", value=asdict(found))
    text = f"{human(free)} of {human(found.total_nbytes)} free"
    yield _judged("memory", text, free > found.total_nbytes / 2, "Others hold the rest: see nvidia-smi.", free)
    driver, built = machine.driver_version() or "unknown", f"torch {torch.__version__} of CUDA {torch.version.cuda}"
    yield Finding("driver", f"{driver} (up to CUDA {found.driver}), {built}", value=driver)


def _no_gpu(*, is_wanted: bool) -> Finding:
    import torch

    from weightstream.runtime import machine

    gpus, driver, visible = machine.nvidia_gpus(), machine.driver_version(), os.environ.get("CUDA_VISIBLE_DEVICES")
    text, remedy = why_no_gpu(gpus, driver, torch.__version__, torch.version.cuda, visible)
    is_broken = bool(gpus) or driver is not None or is_wanted
    return Finding("device", f"{text}: weightstream runs on the CPU", "broken" if is_broken else "note", remedy)


def why_no_gpu(
    gpus: tuple[str, ...], driver: str | None, version: str, cuda_version: str | None, visible: str | None
) -> tuple[str, str]:
    """Why torch of a version sees no GPU, and the remedy: hardware first, then driver, torch, environment."""
    container = "in a container, pass the GPU in: docker run --gpus all ..."
    if driver is None and not gpus:
        return "no GPU by NVIDIA, and no driver", f"If there is one, install NVIDIA's driver; {container}"
    if driver is None:
        return f"a GPU by NVIDIA ({', '.join(gpus)}), and no driver", f"Install NVIDIA's driver; {container}"
    if cuda_version is None:
        index = "cu130" if int(driver.split(".")[0]) >= 580 else "cu126"  # the newest that the driver runs
        remedy = f"pip install -U torch --index-url https://download.pytorch.org/whl/{index}"
        return f"driver {driver}, but torch {version} is built without CUDA", remedy
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    remedy = "Does nvidia-smi work? Else update the driver, or install a torch that is built for an older CUDA."
    return f"driver {driver}, but torch {version} (CUDA {cuda_version}) cannot use it", remedy


def _link(backend: Backend) -> Iterator[Finding]:
    from weightstream.runtime import cuda, machine
    from weightstream.runtime.bench import host_memory
    from weightstream.runtime.pace import copies_s

    address = cuda.facts(backend.device).pci
    copies_s(backend, [64 << 20], 0.2)  # an idle link runs slower
    now, best, node = machine.link_now(address), machine.link_at_best(address), machine.numa_node(address)
    yield from link_findings(now, best, backend.profile.link_bytes_per_s)
    yield numa_finding(node, machine.cores_of_node(node or 0), frozenset(os.sched_getaffinity(0)))
    with host_memory(backend.device, 64 << 20) as memory:
        pins = memory.is_pinned()
    remedy = "Raise the memlock limit (ulimit -l), or the memory of the container."
    yield Finding("pinning", "works", value=True) if pins else Finding("pinning", "refused", "broken", remedy, False)
    if cuda.reads_pages(backend.device):
        yield Finding("file pages", "can be pinned where they are, in the page cache")
    else:
        yield Finding("file pages", "cannot be pinned by this device: checkpoints are staged through RAM", "note")


def link_findings(now: PciLink | None, best: PciLink | None, measured: float) -> Iterator[Finding]:
    """The PCIe link at work and at best, and what copies reach of it, in bytes per second."""
    text = f"{per_second(measured)} from pinned memory"
    if now is None or measured > now.bytes_per_s:  # a virtual machine may show another link than there is
        said = "" if now is None else f" (it says {now})"
        yield Finding("PCIe", f"generation and width are not shown, as in many virtual machines{said}", "note")
        yield Finding("host to GPU", text, value=measured)
        return
    is_best = best is None or best.bytes_per_s <= now.bytes_per_s
    found = f"{now}, the best of this GPU and slot" if is_best else f"{now} under load, where {best} could be"
    remedy = "Try another slot; look at the riser, and in the BIOS at generation and bifurcation."
    yield _judged("PCIe", found, is_best, remedy, asdict(now))
    share = measured / now.bytes_per_s
    remedy = (
        "85 to 90% are usual. Look at the NUMA node below, and at who else copies or shares a PCIe switch; then "
        "measure again: weightstream doctor --measure"
    )
    text += f", {share:.0%} of the link's {per_second(now.bytes_per_s)}"
    yield _judged("host to GPU", text, share >= _GOOD_SHARE, remedy, measured)


def numa_finding(node: int | None, near: frozenset[int], allowed: frozenset[int]) -> Finding:
    """Whether this process may run on cores of the GPU's node."""
    if node is None or not near:
        return Finding("NUMA", "one node, or not shown here", "note")
    num, remedy = len(near & allowed), f"numactl --cpunodebind={node} --membind={node} weightstream ..."
    return _judged("NUMA", f"the GPU is at node {node}, as are {num} of {len(allowed)} usable cores", num > 0, remedy)


def _host() -> Iterator[Finding]:
    import psutil

    from weightstream.runtime import machine
    from weightstream.store.limits import available_nbytes, describe_limits

    total, free, cores = psutil.virtual_memory().total, available_nbytes(), len(os.sched_getaffinity(0))
    yield Finding("processor", f"{machine.processor()}, {cores} cores usable", value=cores)
    yield Finding("memory", f"{human(free)} of {human(total)} can be taken by this process", value=free)
    yield Finding("limits", describe_limits())
    anonymous, shared = machine.huge_pages()
    remedy = "Pinning is faster with them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    text = f"{anonymous or 'unknown'}, in shared memory {shared or 'unknown'}"
    yield _judged("huge pages", text, anonymous != "never", remedy)


def _speed(profile: Profile) -> Iterator[Finding]:
    if not profile.machine:
        yield Finding("measured", "nothing, for the reason above: these speeds are assumed", "broken")
    rates = (profile.half_flops_per_s, profile.single_flops_per_s, profile.attention_flops_per_s)
    half, single, attention = (per_second(rate, "FLOP") for rate in rates)
    latency, handover = milliseconds(profile.copy_latency_s), milliseconds(profile.handover_s)
    kernels = f"{milliseconds(profile.op_s)} at least, {milliseconds(profile.op_launch_s)} to launch from Python"
    yield Finding("copies", f"{per_second(profile.link_bytes_per_s)}, {latency} more for each, {handover} to hand over")
    yield Finding("weights", f"read at {per_second(profile.device_bytes_per_s)}")
    yield Finding("products", f"{half} in bf16, {single} in float32, {attention} in attention")
    yield Finding("kernels", kernels)


def _codec(backend: Backend) -> Finding:
    """Whether coded weights can be used, and how fast they are decoded."""
    from weightstream.codec import coding

    profile = backend.profile
    rates = {f"{bits}bit": profile.decode_bytes_per_s(bits) for bits in (3, 4)}
    text = f"decoded at {per_second(rates['3bit'])} in the 3-bit code, {per_second(rates['4bit'])} in the 4-bit code"
    if backend.device.type == "cpu":
        return Finding("coded weights", f"{text}: used on request alone, --codec 3bit", "note", value=rates)
    if (reason := coding.why_not(backend.device)) is None:
        return Finding("coded weights", text, value=rates)
    remedy = "Weights move as they are, 1.4 times the bytes. pip install -U triton, or a torch that brings it."
    return Finding("coded weights", f"cannot be used: {reason}", "better", remedy)


def _disk(path: Path) -> Finding:
    from weightstream.runtime.bench import disk_bytes_per_s
    from weightstream.store.file import DirectFile
    from weightstream.store.mapping import FileMapping

    place = path.resolve()
    try:
        if (free := shutil.disk_usage(place).free) < 2 * _FILE_NBYTES:
            raise OSError(f"a scratch file takes {_FILE_NBYTES} bytes, and {free} are free")
        with NamedTemporaryFile(dir=place, prefix=".weightstream-doctor-") as scratch:
            noise = os.urandom(8 << 20)  # which no file system compresses
            for _ in range(_FILE_NBYTES // len(noise)):
                scratch.write(noise)
            scratch.flush()
            os.fdatasync(scratch.fileno())
            os.posix_fadvise(scratch.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file = DirectFile(mapping := FileMapping(Path(scratch.name)))
            rate = disk_bytes_per_s(file, mapping.nbytes)
    except OSError as error:
        return Finding("reads", f"not measured: {error}", "note", "Name a folder to write to: --path FOLDER")
    text = f"{per_second(rate)} in {place}{'' if file.is_direct else ', through the page cache'}"
    remedy = "This file system takes no direct reads: keep weights on a local disk."
    return _judged("reads", text, file.is_direct, remedy, rate)


def _software(*, on_gpu: bool) -> Iterator[Finding]:
    found = {name: _version(name) for name in ("torch", "safetensors", *_OPTIONAL)}
    versions = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Finding("installed", versions, value=found)
    for name, purpose in _OPTIONAL.items():
        if found[name] is None and (on_gpu or name != "triton"):
            yield Finding(name, purpose, "missing", f"pip install {name}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def show(sections: Sections) -> None:
    """One line per finding, the remedy below it."""
    for name, part in sections.items():
        if part:
            screen().print(name, style="bold")
        for finding in part:
            symbol, style, _ = _MARKS[finding.mark]
            print_folded(Text.assemble((f"{symbol:>4}", style), f"  {finding.label:<14}"), finding.text)
            if finding.remedy:
                print_folded(Text(f"{'-> ':>20}", "italic"), finding.remedy, "italic")
    counts = Counter(finding.mark for part in sections.values() for finding in part)
    verdict = ", ".join(f"{counts[mark]} {text}" for mark, (_, _, text) in _MARKS.items() if text and counts[mark])
    typer.echo(f"\n{verdict or 'All is well'}.")
