"""Ranks: the processes that share one model by tensor parallelism, and their agreements.

Their plans need not be equal for correct results. But the slowest rank sets the time of a step, and a rank that refuses
would leave the others waiting in a collective. So all ranks plan with the least memory and the slowest link of any of
them, and a refusal is sent to all.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed, nn

from weightstream import errors
from weightstream.errors import ConfigError, OffloadError
from weightstream.plan.planner import Machine
from weightstream.settings.config import OffloadConfig

NAMES = ("distributed_config", "tp_plan", "tp_size")  # keywords that ask for tensor parallelism
_IMAGINING = threading.RLock()  # torch has one default process group, so one thread at a time replaces it
_TIMEOUT = timedelta(hours=2)  # as in transformers: one rank may load for minutes longer than another
_OTHERS = ("pp_size", "fsdp_size", "dp_replicate_size", "ep_size")
_EXPERTS = "enable_expert_parallel"  # up to transformers 5.17, which has no `ep_size`
_SHARED = "_weightstream_is_shared"  # an attribute of an error that is not to be sent to other ranks (again)
_RATES = ("link_bytes_per_s", "ranks_bytes_per_s")
_FACTS = ("free_nbytes", "total_nbytes", "host_free_nbytes", "host_total_nbytes", "maps_host_memory", "fetches_rows")

T = TypeVar("T")


class _Refusal(NamedTuple):
    """The answer of a rank that raised an error."""

    rank: int
    kind: str
    text: str


class Agreement(NamedTuple):
    """The settings and the machine that all ranks plan with."""

    config: OffloadConfig
    machine: Machine


class Ranks:
    """The processes of a group. `num_here` processes of the job are on this machine and share its memory."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self._group = group
        self.num = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)
        self.num_here = int(os.environ.get("LOCAL_WORLD_SIZE", self.num))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order; raises the error of the first rank that refused."""
        found: list[Any] = [None] * self.num
        distributed.all_gather_object(found, value, group=self._group)
        refusals = (answer for answer in found if isinstance(answer, _Refusal))
        if not isinstance(value, _Refusal) and (refusal := next(refusals, None)) is not None:
            kind = getattr(errors, refusal.kind, OffloadError)
            raise _mark_shared(kind(f"rank {refusal.rank} refused: {refusal.text}"))
        return found

    def least(self, number: int) -> int:
        """The smallest number of any rank. Cheap enough for each step."""
        # in host memory if the group can exchange that
        on_host = "cpu:" in distributed.get_backend_config(self._group)
        found = torch.tensor(int(number), device="cpu" if on_host else torch.accelerator.current_accelerator())
        distributed.all_reduce(found, op=distributed.ReduceOp.MIN, group=self._group)
        return int(found)

    def common(self, reason: str | None) -> str | None:
        """The reason of the first rank that has one, with its number unless all ranks have the same; None: none has."""
        reasons = self.gather(reason)
        numbered = (f"on rank {rank}: {why}" for rank, why in enumerate(reasons) if why is not None)
        return reason if len(set(reasons)) == 1 else next(numbered)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send an error that is raised inside to all ranks: their next `gather` or `confirm` inside raises it, too."""
        try:
            yield
        except Exception as error:
            if not _is_shared(error):
                _mark_shared(error).add_note(f"on rank {self.rank} of {self.num}")
                self.gather(_Refusal(self.rank, type(error).__name__, str(error)))
            raise

    def confirm(self) -> None:
        """Wait until all ranks are here; raises the error of a rank that failed before."""
        self.gather(None)

    def apart(self, uuid: str, device: object) -> None:
        """Wait until all ranks are here; raises `ConfigError` on all of them if two have one device, by its `uuid`."""
        every = self.gather(uuid)
        shared = [str(rank) for rank, found in enumerate(every) if every.count(found) > 1]
        if shared:
            raise ConfigError(
                f"ranks {', '.join(shared)} have one device, on rank {self.rank} {device}: give device='cuda', or none"
            )

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over all ranks."""
        distributed.all_reduce(tensor, group=self._group)

    def agreed(self, config: OffloadConfig, machine: Machine) -> Agreement:
        """The agreement of all ranks.

        Its machine has the least memory of any rank, the slowest link and all-reduce of any rank, the other speeds as
        the first rank measured them, and an equal share of the host's memory.
        """
        every = self.gather((config.device_nbytes(machine.total_nbytes, on_cpu=machine.on_cpu), machine))
        budgets, machines = [budget for budget, _ in every if budget is not None], [found for _, found in every]
        least = {name: min(getattr(found, name) for found in machines) for name in _FACTS}
        least |= {name: bool(least[name]) for name in ("maps_host_memory", "fetches_rows")}
        rates = {name: min(getattr(found.profile, name) for found in machines) for name in _RATES}
        profile = replace(machines[0].profile, **rates)
        agreed = replace(machine, profile=profile, **least)
        return _divided(config.within(min(budgets, default=None)), agreed, self.num_here)


def alike(config: OffloadConfig, machine: Machine, num: int) -> Agreement:
    """The agreement of `num` processes that all run on this machine, without asking them."""
    budget = config.device_nbytes(machine.total_nbytes, on_cpu=machine.on_cpu)
    return _divided(config.within(budget), machine, num)


def _divided(config: OffloadConfig, machine: Machine, num: int) -> Agreement:
    """An agreement on one of `num` equal shares of the host's memory, which may be the device's."""
    names = ("host_free_nbytes", *(("free_nbytes", "total_nbytes") if machine.on_cpu else ()))
    shares = {name: getattr(machine, name) // num for name in names}
    return Agreement(config.within(config.device_budget, 1 / num), replace(machine, **shares))


def _mark_shared(error: Exception) -> Exception:
    """Mark an error, so that `together` does not send it to other ranks, and return it."""
    vars(error)[_SHARED] = True
    return error


def _is_shared(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is marked."""
    return error is not None and (_SHARED in vars(error) or _is_shared(error.__cause__ or error.__context__))


@contextmanager
def errors_stay_local() -> Iterator[None]:
    """An error that is raised inside is not sent by `together`: the other ranks wait in a collective of the model, and
    could not receive it."""
    try:
        yield
    except Exception as error:
        _mark_shared(error)
        raise


def ranks_together(ranks: Ranks | None) -> AbstractContextManager[None]:
    """As `Ranks.together`; does nothing for one process."""
    return nullcontext() if ranks is None else ranks.together()


def least(ranks: Ranks | None, number: int) -> int:
    """As `Ranks.least`."""
    return number if ranks is None else ranks.least(number)


def common(ranks: Ranks | None, reason: str | None) -> str | None:
    """As `Ranks.common`."""
    return reason if ranks is None else ranks.common(reason)


def num_processes() -> int:
    """Number of processes of this job."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that hold the shards of a model; None: it has no shards."""
    if num_processes() == 1:
        return None
    from torch.distributed.tensor import DTensor  # half a second

    meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    if all(mesh.size() == 1 for mesh in meshes):
        return None
    (mesh, *others) = meshes
    return Ranks(mesh.get_group() if mesh.ndim == 1 and not others else None)


def is_wanted(wanted: Any | None, config: OffloadConfig) -> bool:
    """Whether `wanted`, a `distributed_config` of transformers, asks for several processes. Raises `ConfigError` for
    options that are not supported."""
    if wanted is None:
        return False
    others = [name for name in _OTHERS if (getattr(wanted, name, 1) or 1) > 1]
    if not others and getattr(wanted, _EXPERTS, False):
        others = [_EXPERTS]
    if others:
        raise ConfigError(f"distributed_config: {', '.join(others)}: only tp_size shards a model that streams")
    if wanted.tp_size == 1:
        return False
    if config.stripes:
        raise ConfigError("each process of tensor parallelism has one GPU: leave out gpus and device_map")
    return True


@contextmanager
def imagined(num: int) -> Iterator[bool]:
    """Inside, this process counts as rank 0 of `num`, in torch's fake process group: the other ranks do not exist, and
    collectives exchange nothing. So a model can be sharded for a plan without starting processes.

    If the job has a process group already, that is used instead; yields whether it has. Raises `ConfigError` if that
    group has another number of processes.
    """
    with _IMAGINING:
        if (of_job := num_processes()) not in (1, num):
            raise ConfigError(f"distributed_config: tp_size = {num}, and {of_job} processes run")
        if distributed.is_initialized():
            yield True
            return
        distributed.init_process_group("fake", rank=0, world_size=num)
        try:
            yield False
        finally:
            distributed.destroy_process_group()


def join(wanted: Any | None, config: OffloadConfig) -> Ranks | None:
    """The processes of this job, for a model that is to be loaded with `wanted`, a `distributed_config` of
    transformers; None if it asks for one process.

    Makes a process group if there is none. That group also exchanges tensors in host memory, where streamed weights are
    between steps. Raises `ConfigError`.
    """
    if not is_wanted(wanted, config):
        return None
    assert wanted is not None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and "LOCAL_RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if not distributed.is_initialized():
        if "RANK" not in os.environ:
            raise ConfigError(
                f"distributed_config: tp_size = {wanted.tp_size} needs as many processes: start them with "
                f"torchrun --nproc-per-node {wanted.tp_size} script.py"
            )
        backends = "gloo"
        if accelerator is not None:
            of_accelerator = distributed.get_default_backend_for_device(accelerator)
            backends = f"cpu:gloo,{accelerator.type}:{of_accelerator}"
        distributed.init_process_group(backends, timeout=_TIMEOUT)
    if distributed.get_world_size() != wanted.tp_size:
        raise ConfigError(
            f"distributed_config: tp_size = {wanted.tp_size}, and {distributed.get_world_size()} processes run"
        )
    return Ranks()
