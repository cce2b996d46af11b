"""Findings: what is the case on this machine, how good that is, and the remedy. Shows nothing."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
import torch

from weightstream.codec import coding
from weightstream.codec.format import ELEMENTS
from weightstream.errors import ConfigError
from weightstream.measure import links, machine, nvml
from weightstream.measure.bench import backend_of, copies_s, disk_bytes_per_s, host_memory
from weightstream.measure.nvml import PciLink
from weightstream.measure.profile import QUIET, profile_for
from weightstream.plan.amounts import human, milliseconds, per_second
from weightstream.plan.manifest import Profile
from weightstream.runtime import cuda
from weightstream.runtime.backend import Backend
from weightstream.runtime.driver import pins_read_only
from weightstream.store import near
from weightstream.store.file import DirectFile
from weightstream.store.limits import available_nbytes, describe_limits
from weightstream.store.mapping import FileMapping

_REMEDIES = MappingProxyType(  # by label, where a finding could be better
    {
        "memory": "Others hold the rest: see nvidia-smi.",
        "PCIe": "Try another slot; look at the riser, and in the BIOS at generation and bifurcation.",
        "host to GPU": "85 to 90% are usual. Look at the NUMA node below, and at who else copies or shares a PCIe "
        "switch; then measure again: weightstream doctor --measure",
        "links": "They share a PCIe switch, or host memory is too slow for all: several GPUs gain less.",
        "hops": "Not directly, but through host memory: look at nvidia-smi topo -p2p r, and in the BIOS at ACS.",
        "NUMA": "numactl --cpunodebind={node} --membind={node} weightstream ...",
        "pinning": "Raise the memlock limit (ulimit -l), or the memory of the container.",
        "huge pages": "Pinning is faster with them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        "measured": "Measure again while nothing else runs there: weightstream doctor --measure",
        "kernels": "Measure again when idle: weightstream doctor --measure",
        "waiting": "export OMP_WAIT_POLICY=passive",
        "compressed weights": "Weights move as they are, 1.4 times the bytes. pip install -U triton, or a torch "
        "that brings it.",
        "reads": "This file system takes no direct reads: keep weights on a local disk.",
    }
)
_NVML = "nvidia-ml-py"
_OPTIONAL = MappingProxyType(
    {
        "triton": "for compressed weights and compiled models on a GPU",
        _NVML: "for what is said of driver and PCIe link, and of who else uses the GPU",
        "transformers": "for language models by name, and weightstream run",
        "diffusers": "for pipelines for images and video",
        "matplotlib": "for figures",
    }
)
_QUANTISING = MappingProxyType(  # a library, and what it is needed for
    {
        "bitsandbytes": "NF4, FP4, int8",
        "torchao": "int8, float8, int4",
        "compressed-tensors": "checkpoints of LLM Compressor",
        "gguf": "GGUF in diffusers",
        "gptqmodel": "checkpoints of GPTQ and AWQ; GPTQ needs optimum, too",
        "kernels": "float8 of transformers as it is, where each module unpacks its own otherwise",
    }
)
_OF_A_GPU = frozenset({"triton", _NVML})
_GOOD_SHARE = 0.75  # of the link's rate
_LAUNCH_S = 300e-6  # of a kernel from Python, at most; an idle machine takes 5 to 30 us
_FEW_CORES = 4
_FILE_NBYTES = 256 << 20
_LINKS_S = 0.3


class Finding(NamedTuple):
    """One line: what is the case, how good that is, and the remedy; and the bare number.

    A mark is `ok`, `note`, `better` (there is something to gain), `missing` or `broken`.
    """

    label: str
    text: str
    mark: str = "ok"
    remedy: str = ""
    value: Any = None


Sections = dict[str, list[Finding]]


def _judged(label: str, text: str, is_good: bool, value: Any = None, *, otherwise: str = "better") -> Finding:
    mark, remedy = ("ok", "") if is_good else (otherwise, _REMEDIES[label])
    return Finding(label, text, mark, remedy, value)


def examine(device: str | None, path: Path, *, anew: bool) -> tuple[Sections, Profile]:
    """What is to be said of this machine, and its profile."""
    wanted = device or ("cuda" if cuda.available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        raise ConfigError(f"device {device!r}: give cuda, cuda:1 or cpu")
    on_gpu = wanted != "cpu" and cuda.available()
    with closing(backend_of(torch.device(wanted if on_gpu else "cpu"))) as backend:
        backend.profile = profile = profile_for(backend, ELEMENTS.keys(), anew=anew)
        return {
            "GPU": [*_gpu(backend)] if on_gpu else [_no_gpu(is_wanted=wanted != "cpu")],
            "link": [*_link(backend)] if on_gpu else [],
            "several": [*_several(backend)] if on_gpu and wanted == "cuda" else [],
            "host": [*_host()],
            "speed": [*_speed(profile, on_gpu=on_gpu), _codec(backend)],
            "disk": [_disk(path)],
            "software": [*_software(on_gpu=on_gpu)],
        }, profile


def _gpu(backend: Backend) -> Iterator[Finding]:
    found, free = cuda.facts(backend.device), cuda.allocatable_nbytes(backend.device)
    yield Finding("device", f"{found.name}, compute capability {found.capability}", value=asdict(found))
    yield _judged("memory", f"{human(free)} of {human(found.total_nbytes)} free", free > found.total_nbytes / 2, free)
    driver, built = nvml.driver_version() or "unknown", f"torch {torch.__version__} of CUDA {torch.version.cuda}"
    yield Finding("driver", f"{driver} (up to CUDA {found.driver}), {built}", value=driver)


def _no_gpu(*, is_wanted: bool) -> Finding:
    gpus, driver, visible = machine.nvidia_gpus(), nvml.driver_version(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and driver is None and _version(_NVML) is None:
        text, remedy = f"a GPU by NVIDIA ({', '.join(gpus)}), and nothing is known of a driver", f"pip install {_NVML}"
    else:
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
    address = cuda.facts(backend.device).pci
    copies_s(backend, [64 << 20], 0.2)  # an idle link runs slower
    now, best, node = nvml.link_now(address), nvml.link_at_best(address), near.node_of(address)
    yield from link_findings(now, best, backend.profile.link_bytes_per_s)
    yield numa_finding(node, near.cores_of(node or 0), frozenset(os.sched_getaffinity(0)))
    with host_memory(backend.device, 64 << 20) as memory:
        pins = memory.is_pinned()
    yield _judged("pinning", "works" if pins else "refused", pins, pins, otherwise="broken")
    if pins_read_only(backend.device.index):
        yield Finding("file pages", "can be pinned where they are, in the page cache")
    else:
        yield Finding("file pages", "cannot be pinned by this device: checkpoints are staged through RAM", "note")


def link_findings(now: PciLink | None, best: PciLink | None, measured: float) -> Iterator[Finding]:
    """The PCIe link at work and at best, and what copies reach of it, in bytes per second."""
    text = f"{per_second(measured)} from pinned memory"
    if now is None or measured > now.bytes_per_s:  # a virtual machine may show another link than there is
        said = "" if now is None else f" (it says {now})"
        why = "as in many virtual machines" if _version(_NVML) else f"as {_NVML} is missing"
        yield Finding("PCIe", f"generation and width are not shown, {why}{said}", "note")
        yield Finding("host to GPU", text, value=measured)
        return
    is_best = best is None or best.bytes_per_s <= now.bytes_per_s
    found = f"{now}, the best of this GPU and slot" if is_best else f"{now} under load, where {best} could be"
    yield _judged("PCIe", found, is_best, asdict(now))
    share = measured / now.bytes_per_s
    text += f", {share:.0%} of the link's {per_second(now.bytes_per_s)}"
    yield _judged("host to GPU", text, share >= _GOOD_SHARE, measured)


def numa_finding(node: int | None, near: frozenset[int], allowed: frozenset[int]) -> Finding:
    """Whether this process may run on cores of the GPU's node."""
    if node is None or not near:
        return Finding("NUMA", "one node, or not shown here", "note")
    num = len(near & allowed)
    found = _judged("NUMA", f"the GPU is at node {node}, as are {num} of {len(allowed)} usable cores", num > 0)
    return found._replace(remedy=found.remedy.format(node=node))


def _several(first: Backend) -> Iterator[Finding]:
    """The other GPUs that this process sees, and how they work together."""
    every = [torch.device("cuda", index) for index in range(torch.accelerator.device_count())]
    if len(every) < 2:
        return
    with ExitStack() as stack:
        backends = [stack.enter_context(closing(backend_of(device))) for device in every]
        alone = [links.rates([backend], _LINKS_S)[0] for backend in backends]
        together = links.rates(backends, _LINKS_S)
    yield together_finding(alone, together)
    others = [device for device in every if device != first.device]
    hops = [statistics.median(links.hops_s(first, device, _LINKS_S)) for device in others]
    yield hops_finding(hops, cuda.peers(first.device, others))
    nodes = [near.node_of(cuda.facts(device).pci) for device in every]
    if len(set(nodes)) > 1:
        yield Finding("NUMA nodes", f"the GPUs are at {', '.join(map(str, nodes))}", "note", value=nodes)


def together_finding(alone: Sequence[float], together: Sequence[float]) -> Finding:
    """What links reach when all copy, beside what each reaches by itself, in bytes per second."""
    share = sum(together) / sum(alone)
    text = f"{' + '.join(map(per_second, together))} at once, {share:.0%} of what they reach one by one"
    return _judged("links", text, share >= _GOOD_SHARE, {"alone": list(alone), "together": list(together)})


def hops_finding(seconds: Sequence[float], peers: Sequence[bool]) -> Finding:
    """How long states take to the other GPUs, and whether these are reached directly."""
    text = f"{milliseconds(max(seconds))} for a token's states to be on another GPU"
    return _judged("hops", text, all(peers), list(seconds))


def _host() -> Iterator[Finding]:
    total, free, cores = psutil.virtual_memory().total, available_nbytes(), len(os.sched_getaffinity(0))
    yield Finding("processor", f"{machine.processor()}, {cores} cores usable", value=cores)
    yield Finding("memory", f"{human(free)} of {human(total)} can be taken by this process", value=free)
    if cores <= _FEW_CORES:
        yield waiting_finding(cores, os.environ.get("OMP_WAIT_POLICY"))
    yield Finding("limits", describe_limits())
    anonymous, shared = machine.huge_pages()
    text = f"{anonymous or 'unknown'}, in shared memory {shared or 'unknown'}"
    yield _judged("huge pages", text, anonymous != "never")


def waiting_finding(cores: int, policy: str | None) -> Finding:
    """Whether compute threads that wait leave a core to the thread that copies."""
    is_passive = (policy or "").strip().lower() == "passive"
    told = f"OMP_WAIT_POLICY={policy}" if policy else "OMP_WAIT_POLICY is not set"
    does = "leave their core to copies" if is_passive else f"may spin, and few of {cores} cores are left to copies"
    return _judged("waiting", f"{told}: compute threads that wait {does}", is_passive, policy)


def measured_finding(profile: Profile, device: str, now: float) -> Finding:
    """When these speeds were measured, and what others did then."""
    if not profile.machine:
        return Finding("measured", "nothing, for the reason above: these speeds are assumed", "broken")
    others = f"while others used {profile.load:.0%}" if profile.load >= 0 else "while others used an unknown share"
    when = _ago(now - profile.measured_at) if profile.measured_at else "nobody knows when"
    return _judged("measured", f"{when}, {others} of the {device}", profile.load <= QUIET, profile.measured_at)


def _ago(seconds: float) -> str:
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (num := int(seconds // length)) > 0:
            return f"{num} {name}{'s' if num > 1 else ''} ago"
    return "just now"


def _speed(profile: Profile, *, on_gpu: bool) -> Iterator[Finding]:
    yield measured_finding(profile, "GPU" if on_gpu else "processor", time.time())
    rates = (profile.half_flops_per_s, profile.single_flops_per_s, profile.attention_flops_per_s)
    half, single, attention = (per_second(rate, "FLOP") for rate in rates)
    latency, handover = map(milliseconds, (profile.copy_latency_s, profile.handover_s))
    yield Finding("copies", f"{per_second(profile.link_bytes_per_s)}, {latency} more for each, {handover} to hand over")
    yield Finding("weights", f"read at {per_second(profile.device_bytes_per_s)}")
    yield Finding("products", f"{half} in bf16, {single} in float32, {attention} in attention")
    yield kernels_finding(profile)


def kernels_finding(profile: Profile) -> Finding:
    """What a kernel takes at least; a launch that takes long was measured beside others."""
    text = f"{milliseconds(profile.op_s)} at least, {milliseconds(profile.op_launch_s)} to launch from Python"
    return _judged("kernels", text, profile.op_launch_s <= _LAUNCH_S, profile.op_launch_s)


def _codec(backend: Backend) -> Finding:
    """Whether compressed weights can be used, and how fast they are decoded."""
    rates = {dtype: backend.profile.decode_bytes_per_s(dtype) for dtype in ELEMENTS}
    text = "lossless: decoded at " + ", ".join(f"{per_second(rate)} ({dtype})" for dtype, rate in rates.items())
    if backend.device.type == "cpu":
        return Finding("compressed weights", f"{text}: used on request only, --codec compressed", "note", value=rates)
    reasons = [reason for dtype in ELEMENTS if (reason := coding.why_not(backend.device, dtype)) is not None]
    if not reasons:
        launch = milliseconds(backend.profile.decoding_s)
        return Finding("compressed weights", f"{text}, besides {launch} a launch", value=rates)
    return _judged("compressed weights", f"cannot be used: {reasons[0]}", is_good=False)


def _disk(path: Path) -> Finding:
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
    return _judged("reads", text, file.is_direct, rate)


def _software(*, on_gpu: bool) -> Iterator[Finding]:
    found = {name: _version(name) for name in ("torch", "safetensors", *_OPTIONAL)}
    found["torch"] = str(torch.__version__)  # tells the CUDA that it was built for
    versions = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Finding("installed", versions, value=found)
    for name, purpose in _OPTIONAL.items():
        if found[name] is None and (on_gpu or name not in _OF_A_GPU):
            yield Finding(name, purpose, "missing", f"pip install {name}")
    libraries = {name: _version(name) for name in _QUANTISING}
    has = ", ".join(f"{name} {version}" for name, version in libraries.items() if version) or "no library of theirs"
    lacks = [f"{name} ({_QUANTISING[name]})" for name, version in libraries.items() if not version]
    remedy = f"Where checkpoints need it, pip install {', '.join(lacks)}" if lacks else ""
    yield Finding("quantised", has, "note" if lacks else "ok", remedy, libraries)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
