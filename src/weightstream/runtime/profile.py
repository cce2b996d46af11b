"""The profile kept: what this machine can do, in a file per machine and device, measured once. JSON both ways."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from weightstream.errors import ConfigError
from weightstream.plan.manifest import Profile
from weightstream.runtime import bench, cuda, machine
from weightstream.runtime.backend import Backend

logger = logging.getLogger("weightstream")

_FORMAT = 1  # of what is kept; to be raised whenever a number is measured in another way


def measure(backend: Backend) -> Profile:
    """What the backend's machine can do; a number that cannot be measured is the backend's own, with a warning."""
    return bench.measure(backend)[0]


def profile_for(backend: Backend, *, anew: bool = False) -> Profile:
    """The profile kept for this machine and device; if there is none, or `anew`, it is measured and kept.

    Never raises: without a measurement the backend's own profile is assumed, with a warning.
    """
    try:
        if not anew and (found := load(backend.device)) is not None:
            return found
        started = time.perf_counter()
        found, complete = bench.measure(backend)
        logger.info("measured in %.1f s: %s", time.perf_counter() - started, found)
        if complete:
            save(backend.device, found)
        return found
    except Exception as error:  # whatever a driver thinks of: a plan from assumed numbers is better than none
        logger.warning("%s cannot be measured (%s): its speed is assumed.", backend.device, error)
        return backend.profile


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """What a file of the cache holds."""

    key: Mapping[str, str | int]
    profile: Profile


def to_json(profile: Profile) -> str:
    return _adapter(Profile).dump_json(profile, indent=2).decode()


def from_json(text: str | bytes) -> Profile:
    """Read a profile; what it leaves out has its default. Raises `ConfigError` when the text is none."""
    try:
        profile: Profile = _adapter(Profile).validate_json(text)
        if unknown := json.loads(text).keys() - {field.name for field in fields(Profile)}:
            raise ValueError(f"there is no {' or '.join(sorted(unknown))} in it")
        _check(profile)
    except ValueError as error:  # pydantic's is one
        raise ConfigError(f"not a profile: {error}") from error
    return profile


def _check(profile: Profile) -> None:
    for field in fields(profile):
        value = getattr(profile, field.name)
        values = value if isinstance(value, tuple) else (value,)
        least = 1.0 if field.name.endswith("_per_s") else 0.0
        if wrong := [v for v in values if not isinstance(v, str) and not least <= v < float("inf")]:
            raise ValueError(f"{field.name} is {wrong[0]}; at least {least:g} and finite is needed")


def load(device: torch.device) -> Profile | None:
    """The profile kept for this machine and device as they are now."""
    key = _key(device)
    path = _path(key)
    try:
        entry: _Entry = _adapter(_Entry).validate_json(path.read_bytes())
        _check(entry.profile)
        return entry.profile if entry.key == key else None
    except OSError:
        return None
    except ValueError as error:
        logger.warning("%s is ignored, and written anew: %s", path, str(error).splitlines()[0])
        return None


def save(device: torch.device, profile: Profile) -> None:
    """Keep a profile for this machine and device as they are now; a folder that cannot be written is no error."""
    key = _key(device)
    path = _path(key)
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(_adapter(_Entry).dump_json(_Entry(key=key, profile=profile), indent=2))
        part.replace(path)  # never half a file, whoever else writes it now
    except OSError as error:
        logger.info("%s is not written, so the next process measures again: %s", path, error)
        with suppress(OSError):
            part.unlink()


def _key(device: torch.device) -> dict[str, str | int]:
    """All that a measurement depends on."""
    key: dict[str, str | int] = {
        "format": _FORMAT,
        "machine": machine.machine_id(),
        "processor": machine.processor(),
        "cores": os.cpu_count() or 0,
        "torch": torch.__version__,
    }
    if device.type == "cpu":
        return key | {"device": "cpu", "threads": torch.get_num_threads()}
    found = cuda.facts(device)
    return key | {
        "device": found.name,
        "uuid": found.uuid,
        "pci": found.pci,
        "capability": found.capability,
        "driver": machine.driver_version() or found.driver,
        "cuda": torch.version.cuda or "",
    }


def _path(key: Mapping[str, str | int]) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    digest = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "weightstream" / "profiles" / f"{digest[:16]}.json"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
