"""The profile kept: what this machine can do, in a file per machine and device, measured once. JSON both ways."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection
from concurrent.futures import Future, wait
from dataclasses import fields, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from pydantic import TypeAdapter

from weightstream.codec import coding
from weightstream.errors import ConfigError
from weightstream.measure import bench, machine, nvml
from weightstream.measure.progress import announce, reporting, say
from weightstream.plan.manifest import Profile, decode_rate
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.store.atomic import replacing

logger = logging.getLogger("weightstream")

_FORMAT = 12  # of what is kept; to be raised whenever a number is measured in another way
_FRESH_S = 3600.0
QUIET = 0.2  # what others may use of a device that is measured


def profile_for(
    backend: Backend, dtypes: Collection[str] = (), *, anew: bool = False, progress: bool | None = None
) -> Profile:
    """The profile kept for this machine and device; if there is none, or `anew`, it is measured and kept.

    A terminal shows a bar meanwhile, but with `progress=False`. Never raises: without a measurement the backend's own
    profile is assumed, with a warning. It has the rates of decoding these `dtypes`; others may be missing.
    """
    found = _profile_for(backend, dtypes, anew=anew, progress=progress)
    return with_decoding(backend, found, dtypes, progress=progress)


def _profile_for(backend: Backend, dtypes: Collection[str], *, anew: bool, progress: bool | None) -> Profile:
    try:
        if not anew and (found := load_profile(backend.device)) is not None:
            return found
        if backend.device.type == "cuda":
            for dtype in dtypes:
                _compile(backend.device, dtype, progress)  # while other numbers are measured
        started, others = time.time(), _load(backend.device)
        with backend.pinning, reporting(f"measuring {backend.device}", progress, bench.NUM_STEPS) as advance:
            found, complete = bench.measure(backend, advance, dtypes)
        found = replace(found, measured_at=started, load=others)
        logger.info("measured in %.1f s: %s", time.time() - started, found)
        if complete:
            save_profile(backend.device, found)
        return found
    except Exception as error:  # whatever a driver thinks of: a plan from assumed numbers is better than none
        logger.warning("%s cannot be measured (%s): its speed is assumed.", backend.device, error)
        return backend.profile


def with_decoding(
    backend: Backend, found: Profile, dtypes: Collection[str], *, progress: bool | None = None
) -> Profile:
    """A profile with the rates of decoding these dtypes, where kernels for them run. Those that it lacks are measured
    and kept. Never raises, as `profile_for`."""
    lacking = [dtype for dtype in dtypes if found.decode_bytes_per_s(dtype) <= bench.NOT_MEASURED]
    if backend.device.type == "cuda":
        lacking = [dtype for dtype in lacking if kernels_run(backend.device, [dtype], progress=progress)]
    if not lacking:
        return found
    assumed = {name: getattr(backend.profile, name) for name in (*map(decode_rate, lacking), "decoding_s")}
    try:
        with reporting(f"measuring how fast {backend.device} decodes", progress, bench.NUM_ROUNDS) as advance:
            rates = bench.measure_decoding(backend, advance, lacking)
        if rates and (kept := load_profile(backend.device)) is not None:
            save_profile(backend.device, replace(kept, **rates))
        return replace(found, **(assumed | rates))
    except Exception as error:
        logger.warning("%s: how fast it decodes cannot be measured (%s) and is assumed.", backend.device, error)
        return replace(found, **assumed)


def prepare_decoding(device: torch.device, dtypes: Collection[str], progress: bool | None = None) -> None:
    """Start to compile what decodes weights of these dtypes, in threads.

    Says when a device is used for the first time, which takes seconds.
    """
    if not _path(device).exists():
        _first_use(device, progress)
    if device.type == "cuda":
        for dtype in sorted(dtypes):
            _compile(device, dtype, progress)


def kernels_run(device: torch.device, dtypes: Collection[str], *, progress: bool | None = None) -> bool:
    """`coding.available` for all of these; says so, as `profile_for`, where that takes a while."""
    if device.type == "cuda":
        wait([_compile(device, dtype, progress) for dtype in dtypes])
    return all(coding.available(device, dtype) for dtype in dtypes)


def _compile(device: torch.device, dtype: str, progress: bool | None) -> Future[str | None]:
    """The trial of a device's kernels, which is announced once."""
    trial = coding.prepare(device, dtype)
    if not trial.done():
        _announced(device, dtype, trial, progress)
    return trial


@cache
def _first_use(device: torch.device, progress: bool | None) -> None:
    say(f"{device} is used for the first time: it is measured, once per machine", progress)


@cache
def _announced(device: torch.device, dtype: str, trial: Future[str | None], progress: bool | None) -> None:
    announce(trial, f"preparing kernels for {dtype} on {device} (compiled once per machine)", progress)


def doubt(device: torch.device) -> None:
    """Steps were far from what the kept profile predicts: the next `profile_for` measures again. Never raises.

    One that was measured a moment ago, on an idle machine, stays: then it is the steps that others disturb.
    """
    try:
        found = load_profile(device)
        if found is None or (time.time() - found.measured_at < _FRESH_S and 0 <= found.load <= QUIET):
            return
        _path(device).unlink(missing_ok=True)
        logger.info("%s is not as fast as its profile says: it is measured again when that is next needed", device)
    except Exception as error:  # whatever a driver thinks of, as above
        logger.info("%s is not as fast as its profile says, which cannot be removed: %s", device, error)


def _load(device: torch.device) -> float:
    return machine.cpu_load() if device.type == "cpu" else nvml.gpu_load(cuda.facts(device).pci)


def to_json(profile: Profile) -> str:
    return TypeAdapter(Profile).dump_json(profile, indent=2).decode()


def from_json(text: str | bytes) -> Profile:
    """Read a profile; what it leaves out has its default. Raises `ConfigError` when the text is none."""
    try:
        profile, given = TypeAdapter(Profile).validate_json(text), json.loads(text).keys()
        if unknown := given - {field.name for field in fields(Profile)}:
            raise ValueError(
                f"this version knows no {' or '.join(sorted(unknown))}: measure it again there (weightstream doctor "
                "--save FILE)"
            )
        _check(profile)
    except ValueError as error:  # pydantic's is one
        raise ConfigError(f"not a profile: {error}") from error
    return profile


def read_profile(path: Path) -> Profile:
    """The profile in a file; raises `ConfigError` that names it."""
    try:
        return from_json(path.read_bytes())
    except (OSError, ConfigError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"profile {path}: {cause}; name a file of `weightstream doctor --save`") from error


def _check(profile: Profile) -> None:
    for field in fields(profile):
        value = getattr(profile, field.name)
        values = value if isinstance(value, tuple) else (value,)
        least = 1.0 if field.name.endswith("_per_s") else -1.0 if field.name == "load" else 0.0
        if wrong := [v for v in values if not isinstance(v, str) and not least <= v < float("inf")]:
            raise ValueError(f"{field.name} is {wrong[0]}; at least {least:g} and finite is needed")


def load_profile(device: torch.device) -> Profile | None:
    """The profile kept for this machine and device as they are now."""
    path = _path(device)
    try:
        return from_json(path.read_bytes())
    except OSError:
        return None
    except ConfigError as error:
        logger.warning("%s is ignored, and written anew: %s", path, str(error).splitlines()[0])
        return None


def save_profile(device: torch.device, profile: Profile) -> None:
    """Keep a profile for this machine and device as they are now; a folder that cannot be written is no error."""
    path = _path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(to_json(profile))
    except OSError as error:
        logger.info("%s is not written, so the next process measures again: %s", path, error)


def _path(device: torch.device) -> Path:
    """The name tells all that a measurement depends on."""
    key = [_FORMAT, machine.machine_id(), machine.cpu_name(), os.cpu_count(), torch.__version__]
    if device.type == "cpu":
        key += ["cpu", torch.get_num_threads()]
    else:
        found = cuda.facts(device)
        driver = nvml.driver_version() or found.driver
        key += [found.name, found.uuid, found.pci, found.capability, driver, torch.version.cuda]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return folder / "weightstream" / "profiles" / f"{sha256(repr(key).encode()).hexdigest()[:16]}.json"
