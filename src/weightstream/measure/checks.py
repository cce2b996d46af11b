"""The checks of `weightstream doctor`: facts about this machine, verdicts and remedies. Prints nothing."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
import torch

from weightstream.codec import coding, unpacking
from weightstream.codec.format import ELEMENTS
from weightstream.errors import ConfigError
from weightstream.measure import machine, multi_gpu_links, nvml
from weightstream.measure.bench import copies_s, disk_bytes_per_s, host_memory, private_backend
from weightstream.measure.profile import profile_for, with_unpacking
from weightstream.plan.manifest import QUIET, Profile
from weightstream.plan.units import human, milliseconds, per_second
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.devices.cuda_driver import pins_read_only
from weightstream.store import numa
from weightstream.store.limits import available_nbytes, describe_limits
from weightstream.store.mapping import FileMapping
from weightstream.store.readers import DirectFile

_NVML = "nvidia-ml-py"


class _Optional(NamedTuple):
    """A package that adds something, and the extra that installs it in a version that fits."""

    purpose: str
    extra: str = ""


_OPTIONAL = MappingProxyType(
    {
        "triton": _Optional("for compressed weights and compiled models on a GPU"),
        _NVML: _Optional("for the driver's version, the PCIe link, and the GPU's load", "gpu"),
        "transformers": _Optional("for language models by name, and weightstream run", "transformers"),
        "diffusers": _Optional("for pipelines for images and video", "diffusers"),
        "matplotlib": _Optional("for figures", "plot"),
    }
)
_QUANTISING = MappingProxyType(
    {
        "bitsandbytes": "NF4, FP4, int8",
        "torchao": "int8, float8, int4",
        "compressed-tensors": "checkpoints of LLM Compressor",
        "gguf": "GGUF in diffusers",
        "gptqmodel": "checkpoints of GPTQ and AWQ; GPTQ also needs optimum",
        "kernels": "float8 of transformers as stored; else each module is dequantised as it runs",
    }
)
_GOOD_SHARE = 0.75  # of the link's rate
_LAUNCH_S = 300e-6  # a good launch of a kernel from Python takes less; an idle machine takes 5 to 30 us
_FEW_CORES = 4
_FILE_NBYTES = 256 << 20
_LINKS_S = 0.3  # time of each measurement between several GPUs


class Finding(NamedTuple):
    """A fact as text, its mark, a remedy, and the value in bytes, seconds or rates, for JSON.

    A mark is `ok`, `note`, `better` (it could be) or `broken`.
    """

    label: str
    text: str
    mark: str = "ok"
    remedy: str = ""
    value: Any = None


class SectionFinding(NamedTuple):
    section: str
    finding: Finding


class Examination(NamedTuple):
    """All findings in the order of their sections, and the machine's profile."""

    findings: list[SectionFinding]
    profile: Profile


def _judged(label: str, text: str, is_good: bool, remedy: str, value: Any = None) -> Finding:
    return Finding(label, text, "ok" if is_good else "better", "" if is_good else remedy, value)


@dataclass(kw_only=True)
class CheckedSystem:
    """The device, GPUs and folder that checks examine."""

    backend: Backend
    gpus: Sequence[torch.device]  # in use
    folder: Path
    wants_gpu: bool

    @cached_property
    def facts(self) -> cuda.Facts:
        return cuda.facts(self.backend.device)

    @property
    def cores(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))


Check = Callable[[CheckedSystem], Iterator[Finding]]


def examine(device: str | None, folder: Path, *, anew: bool) -> Examination:
    """Run all checks on this machine. `folder` is where disk reads are measured; `anew` measures the profile again."""
    wanted = device or ("cuda" if cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", wanted):
        raise ConfigError(f"device {device!r}: give cuda, cuda:1 or cpu")
    is_on_gpu = wanted != "cpu" and cuda.is_available()
    with closing(private_backend(torch.device(wanted if is_on_gpu else "cpu"))) as backend:
        found = profile_for(backend, ELEMENTS.keys(), anew=anew)
        backend.profile = with_unpacking(backend, found, unpacking.FORMATS)
        gpus = [backend.device] * is_on_gpu
        if is_on_gpu and wanted == "cuda":
            gpus = [torch.device("cuda", index) for index in range(torch.accelerator.device_count())]
        system = CheckedSystem(backend=backend, gpus=gpus, folder=folder.resolve(), wants_gpu=wanted != "cpu")
        findings = [
            SectionFinding(section.name, finding)
            for section in SECTIONS
            if section.num_gpus <= len(gpus)
            for check in section.checks
            for finding in check(system)
        ]
        return Examination(findings, backend.profile)


def no_gpu(*, is_wanted: bool) -> Finding:
    """Why torch sees no GPU: hardware first, then driver, torch, environment."""
    gpus, driver, visible = machine.nvidia_gpus(), nvml.driver_version(), os.environ.get("CUDA_VISIBLE_DEVICES")
    hardware = f"an NVIDIA GPU ({', '.join(gpus)})" if gpus else "no NVIDIA GPU"
    if driver is None and gpus and _version(_NVML) is None:
        text, remedy = f"{hardware}, driver unknown", f"pip install {_NVML}"
    elif driver is None:
        text = f"{hardware}, no driver"
        remedy = "Install NVIDIA's driver" if gpus else "If there is one, install NVIDIA's driver"
        remedy += "; in a container, pass the GPU in: docker run --gpus all ..."
    elif torch.version.cuda is None:
        text = f"driver {driver}, but torch {torch.__version__} is built without CUDA"
        index = "cu130" if int(driver.split(".")[0]) >= 580 else "cu126"  # the newest that the driver runs
        remedy = f"pip install -U torch --index-url https://download.pytorch.org/whl/{index}"
    elif visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        text, remedy = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    else:
        text = f"driver {driver}, but torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it"
        remedy = "If nvidia-smi fails, update the driver; else install a torch that is built for an older CUDA."
    mark = "broken" if gpus or driver is not None or is_wanted else "note"
    return Finding("device", f"{text}: weightstream runs on the CPU", mark, remedy)


def gpu(system: CheckedSystem) -> Iterator[Finding]:
    if not system.gpus:
        yield no_gpu(is_wanted=system.wants_gpu)
        return
    facts, free = system.facts, cuda.allocatable_nbytes(system.backend.device)
    yield Finding("device", f"{facts.name}, compute capability {facts.capability}", value=asdict(facts))
    text, is_free = f"{human(free)} of {human(facts.total_nbytes)} free", free > facts.total_nbytes / 2
    yield _judged("memory", text, is_free, "Other processes hold the rest: see nvidia-smi.", free)
    driver = nvml.driver_version() or "unknown"
    built = f"torch {torch.__version__} built for CUDA {torch.version.cuda}"
    yield Finding("driver", f"{driver} (up to CUDA {facts.driver}), {built}", value=driver)


def link(system: CheckedSystem) -> Iterator[Finding]:
    copies_s(system.backend, [64 << 20], 0.2)  # an idle link runs slower
    now, best = nvml.link_now(system.facts.pci), nvml.link_at_best(system.facts.pci)
    rate = system.backend.profile.link_bytes_per_s
    text = f"{per_second(rate)} from pinned memory"
    if now is None or rate > now.bytes_per_s:  # a virtual machine may report a wrong link
        shown = "" if now is None else f" (shown: {now})"
        why = "as in many virtual machines" if _version(_NVML) else f"as {_NVML} is not installed"
        yield Finding("PCIe", f"generation and width unknown, {why}{shown}", "note")
        yield Finding("host to GPU", text, value=rate)
        return
    is_best = best is None or best.bytes_per_s <= now.bytes_per_s
    verdict = f"{now}, the best of this GPU and slot" if is_best else f"{now} under load, where {best} is possible"
    remedy = "Try another slot; check the riser, and generation and bifurcation in the BIOS."
    yield _judged("PCIe", verdict, is_best, remedy, asdict(now))
    share = rate / now.bytes_per_s
    text += f", {share:.0%} of the link's {per_second(now.bytes_per_s)}"
    remedy = "85 to 90% are usual. Check the NUMA node below, other processes that copy, and devices that share a PCIe "
    remedy += "switch; then measure again: weightstream doctor --measure"
    yield _judged("host to GPU", text, share >= _GOOD_SHARE, remedy, rate)


def numa_node(system: CheckedSystem) -> Iterator[Finding]:
    node, cores = numa.node_of(system.facts.pci), system.cores
    local = numa.cores_of(node or 0)
    if node is None or not local:
        yield Finding("NUMA", "one node, or unknown", "note")
        return
    text = f"the GPU is on node {node}, as are {len(local & cores)} of {len(cores)} usable cores"
    remedy = f"numactl --cpunodebind={node} --membind={node} weightstream ..."
    yield _judged("NUMA", text, bool(local & cores), remedy)


def pinning(system: CheckedSystem) -> Iterator[Finding]:
    with host_memory(system.backend.device, 64 << 20) as memory:
        if memory.is_pinned():
            yield Finding("pinning", "works", value=True)
        else:
            remedy = "Raise the memlock limit (ulimit -l), or the memory of the container."
            yield Finding("pinning", "refused", "broken", remedy, value=False)
    if pins_read_only(system.backend.device.index):
        yield Finding("file pages", "can be pinned in place, in the page cache")
    else:
        yield Finding("file pages", "cannot be pinned for this device: checkpoints are staged through RAM", "note")


def links_at_once(system: CheckedSystem) -> Iterator[Finding]:
    with ExitStack() as stack:
        backends = [stack.enter_context(closing(private_backend(device))) for device in system.gpus]
        alone = [multi_gpu_links.rates([backend], _LINKS_S)[0] for backend in backends]
        together = multi_gpu_links.rates(backends, _LINKS_S)
    share = sum(together) / sum(alone)
    text = f"{' + '.join(map(per_second, together))} at once, {share:.0%} of their rates one at a time"
    remedy = "The GPUs share a PCIe switch, or host memory is too slow for all of them: several GPUs gain less."
    yield _judged("links", text, share >= _GOOD_SHARE, remedy, {"alone": alone, "together": together})


def hops(system: CheckedSystem) -> Iterator[Finding]:
    first, others = system.backend, [device for device in system.gpus if device != system.backend.device]
    seconds = [statistics.median(multi_gpu_links.hops_s(first, device, _LINKS_S)) for device in others]
    text = f"{milliseconds(max(seconds))} to move the hidden states of a token to another GPU"
    remedy = "The copies go through host memory, not directly: check nvidia-smi topo -p2p r, and ACS in the BIOS."
    yield _judged("hops", text, all(cuda.peers(first.device, others)), remedy, seconds)


def numa_nodes(system: CheckedSystem) -> Iterator[Finding]:
    nodes = [numa.node_of(cuda.facts(device).pci) for device in system.gpus]
    if len(set(nodes)) > 1:
        yield Finding("NUMA nodes", f"the GPUs are on nodes {', '.join(map(str, nodes))}", "note", value=nodes)


def processor(system: CheckedSystem) -> Iterator[Finding]:
    total, free, num_cores = psutil.virtual_memory().total, available_nbytes(), len(system.cores)
    yield Finding("processor", f"{machine.cpu_name()}, {num_cores} cores usable", value=num_cores)
    yield Finding("memory", f"{human(free)} of {human(total)} available to this process", value=free)


def waiting(system: CheckedSystem) -> Iterator[Finding]:
    """On a host with few cores, whether waiting compute threads leave a core to the copy thread."""
    policy, num_cores = os.environ.get("OMP_WAIT_POLICY"), len(system.cores)
    if num_cores > _FEW_CORES:
        return
    if torch.get_num_threads() == 1:
        yield Finding("waiting", "one compute thread: none waits for others", value=policy)
        return
    is_passive = not machine.threads_may_spin(torch.get_num_threads())
    setting = f"OMP_WAIT_POLICY={policy}" if policy else "OMP_WAIT_POLICY is not set"
    effect = "sleep" if is_passive else f"may spin, which takes cores (of {num_cores}) from copies"
    text = f"{setting}: waiting compute threads {effect}"
    yield _judged("waiting", text, is_passive, machine.NO_SPINNING, policy)


def pinning_limits(_: CheckedSystem) -> Iterator[Finding]:
    yield Finding("limits", describe_limits())
    anonymous, shared = machine.huge_pages()
    text = f"{anonymous or 'unknown'}, in shared memory {shared or 'unknown'}"
    remedy = "Huge pages make pinning faster: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    yield _judged("huge pages", text, anonymous != "never", remedy)


def measured(system: CheckedSystem) -> Iterator[Finding]:
    profile, device = system.backend.profile, "GPU" if system.gpus else "processor"
    if not profile.machine:
        yield Finding("measured", "nothing, for the reason logged above: these speeds are assumed", "broken")
        return
    others = f"{profile.load:.0%}" if profile.load >= 0 else "an unknown share"
    when = _ago(time.time() - profile.measured_at) if profile.measured_at else "at an unknown time"
    text = f"{when}, while other processes used {others} of the {device}"
    remedy = f"Measure again while nothing else uses the {device}: weightstream doctor --measure"
    yield _judged("measured", text, profile.load <= QUIET, remedy, profile.measured_at)


def _ago(seconds: float) -> str:
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if (num := int(seconds // length)) > 0:
            return f"{num} {name}{'s' if num > 1 else ''} ago"
    return "just now"


def speeds(system: CheckedSystem) -> Iterator[Finding]:
    profile = system.backend.profile
    mark = "ok" if profile.load <= QUIET else "note"  # other programs may have slowed the measurement
    latency, handover = map(milliseconds, (profile.copy_latency_s, profile.handover_s))
    yield Finding(
        "copies",
        f"{per_second(profile.link_bytes_per_s)}, plus {latency} per copy and {handover} per handover to a kernel",
        mark,
    )
    yield Finding("weights", f"read at {per_second(profile.device_bytes_per_s)}", mark)
    rates = (profile.half_flops_per_s, profile.single_flops_per_s, profile.attention_flops_per_s)
    half, single, attention = (per_second(rate, "FLOP") for rate in rates)
    yield Finding("products", f"{half} in bf16, {single} in float32, {attention} in attention", mark)
    text = f"at least {milliseconds(profile.op_s)}, {milliseconds(profile.op_launch_s)} to launch from Python"
    remedy = "Measure again when idle: weightstream doctor --measure"  # a busy machine launches slowly
    yield _judged("kernels", text, profile.op_launch_s <= _LAUNCH_S, remedy, profile.op_launch_s)


def compressed(system: CheckedSystem) -> Iterator[Finding]:
    device, profile = system.backend.device, system.backend.profile
    rates = {dtype: profile.decode_bytes_per_s(dtype) for dtype in ELEMENTS}
    text = "decoded without loss at " + ", ".join(f"{per_second(rate)} ({dtype})" for dtype, rate in rates.items())
    label = "compressed weights"
    if device.type == "cpu":
        yield Finding(label, f"{text}: used with --codec compressed only", "note", value=rates)
    elif reasons := [reason for dtype in ELEMENTS if (reason := coding.why_not(device, dtype)) is not None]:
        remedy = "Weights move uncompressed: 1.4 times the bytes. pip install -U triton, or a torch that includes it."
        yield Finding(label, f"cannot be used: {reasons[0]}", "better", remedy)
    else:
        yield Finding(label, f"{text}, plus {milliseconds(profile.decoding_s)} per launch", value=rates)


def packed(system: CheckedSystem) -> Iterator[Finding]:
    """Nothing on a CPU, where functions of the libraries unpack, whose rates are not measured."""
    if system.backend.device.type != "cpu":
        rates = {kernel: system.backend.profile.unpack_bytes_per_s(kernel) for kernel in unpacking.FORMATS}
        text = ", ".join(f"{per_second(rate)} ({kernel})" for kernel, rate in rates.items())
        yield Finding("packed experts", f"unpacked at {text}", value=rates)


def reads(system: CheckedSystem) -> Iterator[Finding]:
    folder = system.folder
    try:
        if (free := shutil.disk_usage(folder).free) < 2 * _FILE_NBYTES:
            raise OSError(f"a scratch file takes {human(_FILE_NBYTES)}, and {human(free)} are free")
        with NamedTemporaryFile(dir=folder, prefix=".weightstream-doctor-") as scratch:
            noise = os.urandom(8 << 20)  # not compressible by a file system
            for _ in range(_FILE_NBYTES // len(noise)):
                scratch.write(noise)
            scratch.flush()
            os.fdatasync(scratch.fileno())
            os.posix_fadvise(scratch.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file = DirectFile(mapping := FileMapping(Path(scratch.name)))
            rate = disk_bytes_per_s(file, mapping.nbytes)
    except OSError as error:
        yield Finding("reads", f"not measured: {error}", "note", "Name a folder to write to: --path FOLDER")
        return
    text = f"{per_second(rate)} in {folder}{'' if file.is_direct else ', through the page cache'}"
    remedy = "This file system refuses direct reads: keep weights on a local disk."
    yield _judged("reads", text, file.is_direct, remedy, rate)


def installed(system: CheckedSystem) -> Iterator[Finding]:
    versions = {name: _version(name) for name in ("torch", "safetensors", *_OPTIONAL)}
    versions["torch"] = str(torch.__version__)  # includes the CUDA version that it was built for
    yield Finding("installed", _listed(versions), value=versions)
    for name, (purpose, extra) in _OPTIONAL.items():
        if versions[name] is None and (system.gpus or name not in ("triton", _NVML)):
            package = f"'weightstream[{extra}]'" if extra else name
            yield Finding(name, f"not installed; it is {purpose}", "note", f"pip install {package}")


def quantised(_: CheckedSystem) -> Iterator[Finding]:
    versions = {name: _version(name) for name in _QUANTISING}
    missing = [f"{name} ({_QUANTISING[name]})" for name, version in versions.items() if not version]
    remedy = f"Where checkpoints need it, pip install {', '.join(missing)}" if missing else ""
    text = _listed(versions) or "no library is installed"
    yield Finding("quantised", text, "note" if missing else "ok", remedy, versions)


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class Section(NamedTuple):
    """Checks under one heading, run if at least `num_gpus` are in use."""

    name: str
    num_gpus: int
    checks: tuple[Check, ...]


SECTIONS = (
    Section("GPU", 0, (gpu,)),
    Section("link", 1, (link, numa_node, pinning)),
    Section("several", 2, (links_at_once, hops, numa_nodes)),
    Section("host", 0, (processor, waiting, pinning_limits)),
    Section("speed", 0, (measured, speeds, compressed, packed)),
    Section("disk", 0, (reads,)),
    Section("software", 0, (installed, quantised)),
)
