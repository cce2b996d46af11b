"""Profiles as JSON files: the measured speeds of a device, one file per machine and device, measured once."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from dataclasses import fields, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError

from weightstream.codec import coding
from weightstream.errors import ConfigError
from weightstream.measure import bench, machine, nvml
from weightstream.measure.progress import announce, reporting, say
from weightstream.plan.manifest import NOT_MEASURED, QUIET, Profile, decode_rate, unpack_rate
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.store.atomic import replacing

logger = logging.getLogger("weightstream")

_FORMAT = 12  # of the files; raise it whenever a number is measured in another way
_CPU_FORMAT = 1  # the same, for numbers of a CPU alone
_FRESH_S = 3600.0


def profile_for(
    backend: Backend, dtypes: Collection[str] = (), *, anew: bool = False, progress: bool | None = None
) -> Profile:
    """Return the saved profile of this machine and device; if there is none, or with `anew`, measure and save it.

    A terminal shows a bar meanwhile, except with `progress=False`. Never raises: if the measurement fails, a warning is
    logged, and the backend's own profile is assumed. It includes the decode rates of `dtypes`; others may be missing.
    """
    profile = _profile_for(backend, dtypes, anew=anew, progress=progress)
    return with_decoding(backend, profile, dtypes, progress=progress)


def _profile_for(backend: Backend, dtypes: Collection[str], *, anew: bool, progress: bool | None) -> Profile:
    try:
        if not anew:
            if (saved := load_profile(backend.device)) is not None:
                return saved
            _say_unmeasured(backend.device, progress)
        if backend.device.type == "cuda":
            for dtype in dtypes:
                _compile(backend.device, dtype, progress)  # while other numbers are measured
        started = time.time()
        load = _load(backend.device)
        phase = reporting(f"measuring {backend.device}", progress, bench.NUM_STEPS, is_announced=not anew)
        with backend.pinning, phase as advance:
            profile, is_complete = bench.measure(backend, advance, dtypes)
        profile = replace(profile, measured_at=started, load=load)
        logger.info("measured in %.1f s: %s", time.time() - started, profile)
        if is_complete:
            save_profile(backend.device, profile)
        return profile
    except Exception as error:  # any error of a driver: a plan from assumed speeds is better than none
        logger.warning("%s cannot be measured (%s): its speeds are assumed.", backend.device, error)
        return backend.profile


def with_decoding(
    backend: Backend, profile: Profile, dtypes: Collection[str], *, progress: bool | None = None
) -> Profile:
    """Return the profile with the decode rates of those `dtypes` whose kernels run. Missing rates are measured and
    saved. Never raises, as `profile_for`."""
    lacking = [dtype for dtype in dtypes if profile.decode_bytes_per_s(dtype) <= NOT_MEASURED]
    if backend.device.type == "cuda":
        lacking = [dtype for dtype in lacking if kernels_run(backend.device, [dtype], progress=progress)]
    if not lacking:
        return profile
    assumed = {name: getattr(backend.profile, name) for name in (*map(decode_rate, lacking), "decoding_s")}
    return _with_rates(backend, profile, assumed, "decoding", bench.measure_decoding, lacking, progress)


def with_unpacking(
    backend: Backend, profile: Profile, kernels: Collection[str], *, progress: bool | None = None
) -> Profile:
    """Return the profile with the rates of these kernels, which unpack matrices. Missing rates are measured and saved.
    On a CPU they are assumed, as functions of the libraries unpack there. Never raises, as `profile_for`."""
    lacking = [kernel for kernel in kernels if getattr(profile, unpack_rate(kernel)) <= NOT_MEASURED]
    on_cpu = backend.device.type == "cpu"
    like = backend.profile if on_cpu else profile
    assumed: dict[str, Any] = {unpack_rate(kernel): like.unpack_bytes_per_s(kernel) for kernel in lacking}
    if on_cpu or not lacking:
        return replace(profile, **assumed)
    return _with_rates(backend, profile, assumed, "unpacking", bench.measure_unpacking, lacking, progress)


def _with_rates(
    backend: Backend,
    profile: Profile,
    assumed: dict[str, Any],
    what: str,
    measure: Callable[[Backend, Callable[[], object], Collection[str]], dict[str, Any]],
    lacking: Collection[str],
    progress: bool | None,
) -> Profile:
    """The profile with the rates of those that are `lacking`: measured and saved, or `assumed` if that fails."""
    try:
        with reporting(f"measuring {what} on {backend.device}", progress, bench.NUM_ROUNDS) as advance:
            rates = measure(backend, advance, lacking)
        if rates and (saved := load_profile(backend.device)) is not None:
            save_profile(backend.device, replace(saved, **rates))
        return replace(profile, **(assumed | rates))
    except Exception as error:  # any error of a driver, as for the whole profile
        logger.warning("%s: %s cannot be measured (%s): its speed is assumed.", backend.device, what, error)
        return replace(profile, **assumed)


def prepare_decoding(device: torch.device, dtypes: Collection[str], progress: bool | None = None) -> None:
    """Start threads that compile the kernels for these dtypes.

    Announces the measurement of a device without a profile, which takes seconds.
    """
    if not _path(device).exists():
        _say_unmeasured(device, progress)
    if device.type == "cuda":
        for dtype in sorted(dtypes):
            _compile(device, dtype, progress)


def kernels_run(device: torch.device, dtypes: Collection[str], *, progress: bool | None = None) -> bool:
    """Whether the kernels of all these dtypes run on the device (`coding.available`); compiling them is announced."""
    if device.type == "cuda":
        wait([_compile(device, dtype, progress) for dtype in dtypes])
    return all(coding.available(device, dtype) for dtype in dtypes)


def _compile(device: torch.device, dtype: str, progress: bool | None) -> Future[str | None]:
    """Start the trial of the kernels of a dtype, and announce it once."""
    trial = coding.prepare(device, dtype)
    if not trial.done():
        _announced(device, dtype, trial, progress)
    return trial


@cache
def _say_unmeasured(device: torch.device, progress: bool | None) -> None:
    """Announce the measurement once: before a model is loaded if it is known by then, else when it begins."""
    say(f"no profile of {device} yet, or an outdated one: measuring it", progress)


@cache
def _announced(device: torch.device, dtype: str, trial: Future[str | None], progress: bool | None) -> None:
    announce(trial, f"preparing kernels for {dtype} on {device} (compiled once per machine)", progress)


def doubt(device: torch.device) -> None:
    """Remove the saved profile, as steps took far from the predicted time: the next `profile_for` measures again.

    A profile of the last hour from an idle machine stays: then other processes disturb the steps. Never raises.
    """
    try:
        saved = load_profile(device)
        if saved is None or (time.time() - saved.measured_at < _FRESH_S and 0 <= saved.load <= QUIET):
            return
        _path(device).unlink(missing_ok=True)
        _say_unmeasured.cache_clear()  # the next measurement is announced again
        logger.info("%s is not as fast as its profile says: the next load measures it again", device)
    except Exception as error:  # any error of a driver, as above
        logger.info("%s is not as fast as its profile says, and the profile cannot be removed: %s", device, error)


def _load(device: torch.device) -> float:
    """The share of the device that other processes use; -1: unknown."""
    return machine.cpu_load() if device.type == "cpu" else nvml.gpu_load(cuda.facts(device).pci)


def to_json(profile: Profile) -> str:
    return TypeAdapter(Profile).dump_json(profile, indent=2).decode()


def from_json(text: str | bytes) -> Profile:
    """Read a profile; missing fields get their defaults. Raises `ConfigError` if the text is not a profile."""
    try:
        profile = TypeAdapter(Profile).validate_json(text)
        if unknown := json.loads(text).keys() - {field.name for field in fields(Profile)}:
            raise ValueError(
                f"this version knows no {' or '.join(sorted(unknown))}: measure again on that machine, with this "
                "version (weightstream doctor --save FILE)"
            )
        _check(profile)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise ConfigError(f"not a profile: {where}{first['msg']}") from error
    except ValueError as error:
        raise ConfigError(f"not a profile: {error}") from error
    return profile


def read_profile(path: Path) -> Profile:
    """Read the profile in a file; a `ConfigError` names the file."""
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
            raise ValueError(f"{field.name} is {wrong[0]}; it must be finite and at least {least:g}")


def load_profile(device: torch.device) -> Profile | None:
    """The saved profile of this machine and device as they are now, or None."""
    path = _path(device)
    try:
        return from_json(path.read_bytes())
    except OSError:
        return None
    except ConfigError as error:
        logger.warning("%s is ignored, and will be replaced: %s", path, str(error).splitlines()[0])
        return None


def save_profile(device: torch.device, profile: Profile) -> None:
    """Save a profile of this machine and device as they are now; a folder that cannot be written is no error."""
    path = _path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(to_json(profile))
    except OSError as error:
        logger.info("%s cannot be written, so the next process measures again: %s", path, error)


class StoredProfile(NamedTuple):
    """A file of the profiles' folder. The profile is None if it is of another version, or damaged."""

    path: Path
    profile: Profile | None


def stored_profiles() -> list[StoredProfile]:
    """All stored profiles, also those of earlier drivers and versions, the newest first."""
    found = []
    for path in profiles_folder().glob("*.json"):
        try:
            found.append(StoredProfile(path, from_json(path.read_bytes())))
        except (OSError, ConfigError):
            found.append(StoredProfile(path, None))
    return sorted(found, key=lambda each: each.profile.measured_at if each.profile else 0.0, reverse=True)


def profiles_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "weightstream" / "profiles"


def _path(device: torch.device) -> Path:
    """The file of a profile: its name is a hash of everything that a measurement depends on."""
    key = [_FORMAT, machine.machine_id(), machine.cpu_name(), os.cpu_count(), torch.__version__]
    if device.type == "cpu":
        key += ["cpu", _CPU_FORMAT, torch.get_num_threads()]
    else:
        facts = cuda.facts(device)
        driver = nvml.driver_version() or facts.driver
        key += [facts.name, facts.uuid, facts.pci, facts.capability, driver, torch.version.cuda]
    return profiles_folder() / f"{sha256(repr(key).encode()).hexdigest()[:16]}.json"
