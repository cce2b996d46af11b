"""The machine to plan for: free memory, and rates that are measured or from a profile; and the decompression kernels.

These kernels take seconds to compile. So for the dtypes that a plan may compress, compilation starts while a model
loads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from weightstream.codec.format import ELEMENTS
from weightstream.measure.profile import kernels_run, prepare_decoding, profile_for, with_decoding, with_unpacking
from weightstream.plan.manifest import Profile, decode_rate
from weightstream.plan.planner import Machine
from weightstream.runtime.devices import cpu, cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.tensors.leaves import Role
from weightstream.runtime.weights.alias_groups import Group
from weightstream.runtime.weights.homes import Homes
from weightstream.settings.config import OffloadConfig
from weightstream.store.limits import available_nbytes

_ANY_NBYTES = 1 << 50


def machine_elsewhere(profile: Profile, held_nbytes: int = 0) -> Machine:
    """The device of a profile, which this machine may not have.

    The host memory is that of this machine, with `held_nbytes` that would become free. If the profile is that of no
    machine, but of a GPU that anyone may have, the host has as much memory as any plan needs.
    """
    has_any_host = bool(profile.assumed_from)
    return Machine(
        profile=profile,
        on_cpu=profile.on_cpu,
        free_nbytes=profile.device_nbytes,
        total_nbytes=profile.device_nbytes,
        host_free_nbytes=_ANY_NBYTES if has_any_host else cpu.free_nbytes() + held_nbytes,
        host_total_nbytes=_ANY_NBYTES if has_any_host else available_nbytes() + held_nbytes,
    )


def machine_of(
    backend: Backend,
    config: OffloadConfig,
    homes: Homes | None = None,
    progress: bool | None = None,
    dtypes: Collection[str] = (),
) -> Machine:
    """This machine. Memory that the weights of a model take now counts as free, as a plan places them anew.

    Args:
        backend: the device.
        config: all settings.
        homes: the homes of the model's weights; None: the model is not loaded.
        progress: whether to show progress of a measurement; None: only if stderr is a terminal.
        dtypes: dtypes of weights that a plan may compress, as far as they are known.
    """
    there = [home for home in homes.homes.values() if home.file is None] if homes else []
    held_nbytes = sum(home.group.nbytes for home in there if home.origin.type == "cpu")
    on_cpu, profile = backend.device.type == "cpu", profile_for(backend, dtypes=dtypes, progress=progress)
    machine = machine_elsewhere(profile, held_nbytes)
    free, total = machine.host_free_nbytes, machine.host_total_nbytes
    if not on_cpu:
        free, total = cuda.memory(backend.device)
        free += sum(home.group.nbytes for home in there if home.origin == backend.device)
    return replace(
        machine,
        on_cpu=on_cpu,
        free_nbytes=free,
        total_nbytes=total,
        maps_host_memory=(homes is None or homes.can_map) and _reads_host(backend, config),
        can_decode=False,  # found out only where a plan can depend on it, as that compiles kernels
    )


def _reads_host(backend: Backend, config: OffloadConfig) -> bool:
    """Whether kernels can read host memory: pinned memory over the link, or any memory if the CPU is the device."""
    if backend.device.type == "cpu":
        return True
    is_allowed = config.pin_memory and config.use_uva
    return is_allowed and backend.device_view(torch.empty(1, pin_memory=True, device="cpu")) is not None


def can_decompress(
    backend: Backend, config: OffloadConfig, dtypes: Collection[str], progress: bool | None = None
) -> bool:
    """Whether weights of these dtypes may be compressed: on a GPU that runs the kernels; on a CPU only if `codec` is
    "compressed", as that is slow there. Waits for the kernels to compile."""
    if backend.device.type == "cpu":
        return config.uses_codes and config.codec != "auto"
    return config.uses_codes and kernels_run(backend.device, dtypes, progress=progress)


def with_decode_rates(
    machine: Machine, backend: Backend, dtypes: Collection[str], progress: bool | None = None
) -> Machine:
    """The machine with the measured rates of decompressing these dtypes."""
    found = with_decoding(backend, machine.profile, dtypes, progress=progress)
    rates = {name: getattr(found, name) for name in (*map(decode_rate, dtypes), "decoding_s")}
    return replace(machine, can_decode=True, profile=replace(machine.profile, **rates))


def with_unpack_rates(
    machine: Machine, backend: Backend, kernels: Collection[str], progress: bool | None = None
) -> Machine:
    """The machine with the measured rates of these kernels, which unpack packed experts."""
    return replace(machine, profile=with_unpacking(backend, machine.profile, kernels, progress=progress))


def machine_with_rates(
    backend: Backend, config: OffloadConfig, dtypes: Collection[str], unpacked: Collection[str] = ()
) -> Machine:
    """This machine with its rates of decompressing these dtypes, if it can, and of the kernels that unpack experts.
    Kernels compile while it is measured."""
    may_compress = config.uses_codes and not (backend.device.type == "cpu" and config.codec == "auto")
    dtypes = dtypes if may_compress else ()
    machine = with_unpack_rates(machine_of(backend, config, dtypes=dtypes), backend, unpacked)
    if not dtypes or not can_decompress(backend, config, dtypes):
        return machine
    return with_decode_rates(machine, backend, dtypes)


class Kernels:
    """The decompression kernels for a model that is being loaded. They compile from when its headers are read."""

    def __init__(self, backend: Backend, config: OffloadConfig, progress: bool | None) -> None:
        self._backend = backend
        self._config = config
        self._progress = progress
        self._expected: set[str] = set()  # dtypes
        prepare_decoding(backend.device, (), progress)

    def expect(self, dtype: torch.dtype, nbytes: int) -> None:
        """Start to compile the kernels for a model of `nbytes` that is about to be loaded in this dtype."""
        self._expected |= dtypes_to_load(dtype, nbytes, self._backend, self._config)
        prepare_decoding(self._backend.device, self._expected, self._progress)

    def are_missing(self, dtypes: Collection[str]) -> bool:
        """Whether weights of these dtypes cannot be compressed."""
        return not can_decompress(self._backend, self._config, dtypes, self._progress)

    def wait(self) -> None:
        """Wait for all kernels: a compiling thread may use the device, which would break a capture."""
        if self._expected:
            can_decompress(self._backend, self._config, self._expected, self._progress)


def dtypes_to_compress(
    by_alias: Mapping[str, Group], backend: Backend, config: OffloadConfig, *, among: bool = False
) -> frozenset[str]:
    """The dtypes of weights that a plan may compress, found before the planner's inputs so that kernels compile early.

    Empty where only `PlannerInputs.may_compress` can say. `among`: this is one of several tensor-parallel processes,
    which agree on a machine before they plan; then any dtype that can be compressed counts.
    """
    nbytes = sum(group.nbytes for group in by_alias.values())
    here_nbytes = sum(group.nbytes for group in by_alias.values() if group.home.device == backend.device)
    may_compress = _may_compress(nbytes, backend, config, here_nbytes)
    may_compress |= among and config.uses_codes and backend.device.type != "cpu"
    return compressible_dtypes(by_alias) if may_compress else frozenset()


def dtypes_to_load(dtype: torch.dtype, nbytes: int, backend: Backend, config: OffloadConfig) -> frozenset[str]:
    """As `dtypes_to_compress`, for a model of `nbytes` that is about to be loaded in this dtype."""
    found = {str(dtype).removeprefix("torch.")} & ELEMENTS.keys()
    return frozenset(found) if _may_compress(nbytes, backend, config) else frozenset()


def dtypes_of(model: nn.Module) -> frozenset[str]:
    """The dtypes of a model's parameters that can be compressed."""
    return frozenset({str(p.dtype).removeprefix("torch.") for p in model.parameters()} & ELEMENTS.keys())


def _may_compress(nbytes: int, backend: Backend, config: OffloadConfig, here_nbytes: int = 0) -> bool:
    """Whether a plan for weights of `nbytes`, `here_nbytes` of them on the device now, may compress them."""
    if backend.device.type == "cpu" or not config.uses_codes:
        return config.uses_codes and config.codec != "auto"
    free, total = cuda.memory(backend.device)
    budget = config.device_nbytes(total)
    is_over = nbytes > (free + here_nbytes if budget is None else budget)
    return config.codec != "auto" or (config.backend == "none" and is_over)


def compressible_dtypes(by_alias: Mapping[str, Group]) -> frozenset[str]:
    """The dtypes of weights that can be compressed."""
    members = (group.members[0] for group in by_alias.values())
    return frozenset(m.spec.dtype for m in members if m.spec.dtype in ELEMENTS and m.role is Role.PARAMETER)
