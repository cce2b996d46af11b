"""Plans of models that are not loaded, for this machine or another one. Reads no weight, and moves no byte."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch

from weightstream.adapters.hf import ranks
from weightstream.adapters.hf.packed_formats import unpack_kernels_of
from weightstream.api.drafts import DraftedPlan, describe_draft, plan_with_draft
from weightstream.api.multi_gpu import sketch_striped
from weightstream.api.other_budgets import AtBudget, P, Planning, reaching
from weightstream.api.self_draft import SELF, plan_self_drafted
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.inputs.gathering import sketch_of
from weightstream.inputs.machine import dtypes_of, machine_elsewhere, machine_with_rates
from weightstream.measure.known_gpus import known_gpu
from weightstream.measure.profile import read_profile
from weightstream.plan.manifest import Profile
from weightstream.plan.multi_device import StripedPlan
from weightstream.plan.pipeline import PipelinePlan
from weightstream.plan.plan import Plan
from weightstream.plan.planner import Machine
from weightstream.plan.planner_inputs import PlannerInputs
from weightstream.plan.speculation import MOST_ROWS, WIDTHS
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.opening import backend_of
from weightstream.runtime.streamer.drafting import Speculate
from weightstream.settings.arguments import check_source, of_model, refuse_training, requested_dtype, resolve_config
from weightstream.settings.config import OffloadConfig
from weightstream.settings.speeds import Link, Target

if TYPE_CHECKING:
    from weightstream.inputs.pipeline_planning import PipelineSketch

logger = logging.getLogger("weightstream")


def plan_model(
    path_or_repo_id: str | Path,
    *,
    device: torch.device | str | int | None = None,
    device_budget: int | str | Mapping[int, int | str] | None = None,
    dtype: str | torch.dtype | None = None,
    torch_dtype: str | torch.dtype | None = None,
    profile: Profile | str | Path | None = None,
    gpu: str | None = None,
    link: str | None = None,
    target: str | None = None,
    config: OffloadConfig | Any | None = None,
    trust_remote_code: bool = False,
    variant: str | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    speculate: Speculate | None = None,
    draft: str | Path | None = None,
    **settings: Any,
) -> Plan | PipelinePlan | StripedPlan:
    """Make the plan that `from_pretrained` would make here, with its predicted speed, without loading the model.

    Reads config.json, and the headers of the shards if there are any. A quantised model needs its files, which are not
    read. For a diffusers pipeline it is the plan of `pipeline_from_pretrained`.

    Args:
        path_or_repo_id: as for `from_pretrained`.
        device: as for `from_pretrained`.
        device_budget: as for `from_pretrained`.
        dtype: as for `from_pretrained`.
        torch_dtype: as for `from_pretrained`.
        config: as for `from_pretrained`.
        profile: the profile of another machine to plan for, or the file that `weightstream doctor --save` wrote there.
        gpu: another GPU to plan for, by name, such as "RTX 4090". Its rates are assumed from its data sheet, and its
            host has as much memory as the plan needs. Default: the device that `from_pretrained` would use here.
        link: another link to the GPU, such as "PCIe 3", "PCIe 4 x8" or "25GB/s".
        target: a speed, such as "10tok/s" or "100ms" for a step: the plan has the least budget that reaches it.
            `device_budget` is then the most.
        trust_remote_code: run Python code that comes with the model, as for transformers.
        variant: for pipelines only, as for `pipeline_from_pretrained`.
        example_inputs: for pipelines only, as for `pipeline_from_pretrained`.
        speculate: as for `from_pretrained`. The plan then has the seconds of passes of several tokens.
        draft: as for `from_pretrained`. The plan is the faster one of that with room for the draft and that without.
        settings: other settings of `from_pretrained`, such as `host_budget`, `batch`, `context` and `tokens`, or
            `train={"tokens": 2048, "rank": 16}` for the plan of a training step. With
            `distributed_config`, or `tp_plan` and `tp_size`, the plan is for the first of that many processes, each on
            a machine like this.

    Returns:
        The plan, which can be printed: a `PipelinePlan` for a pipeline, a `StripedPlan` for several GPUs.

    Raises:
        CheckpointError, UnsupportedError, PlanError, ConfigError: as for `from_pretrained`. `PlanError` also if no
            budget reaches the target.

    Examples:
        >>> import weightstream
        >>> plan = weightstream.plan_model("./Llama-3.1-8B", gpu="RTX 4090", device_budget="6GiB")  # doctest: +SKIP
        >>> print(plan)  # doctest: +SKIP
    """
    check_source(path_or_repo_id)
    config, model_config = of_model(config)
    sharded = {name: value for name in ranks.NAMES if (value := settings.pop(name, None)) is not None}
    config, dtype = resolve_config(config, device_budget=device_budget, **settings), requested_dtype(dtype, torch_dtype)
    where = machine_choice(config, device=device, profile=profile, gpu=gpu, link=link)
    wanted = requested_target(target, config, speculate, draft)
    drafts = {name: value for name, value in (("speculate", speculate), ("draft", draft)) if value is not None}
    if is_pipeline_checkpoint(path_or_repo_id):
        refuse_training(config, of=str(path_or_repo_id))
        if sharded or drafts:
            raise ConfigError(f"{path_or_repo_id} is a diffusers pipeline: leave out {', '.join([*sharded, *drafts])}")
        sketch = sketch_pipeline(
            path_or_repo_id, config, **where, dtype=dtype, variant=variant, call=example_inputs or {}
        )
        return _at_target(sketch, AtBudget(sketch.budget, sketch.plan()), wanted)
    if variant is not None or example_inputs is not None:
        raise ConfigError(f"{path_or_repo_id} is not a diffusers pipeline: leave out variant and example_inputs")
    refuse_training(config, options=drafts, ranks=bool(sharded))
    loading = {"dtype": dtype, "trust_remote_code": trust_remote_code, "model_config": model_config}
    if sharded:
        from weightstream.adapters.hf import tensor_parallel

        is_sharded = ranks.is_wanted(tensor_parallel.wanted(sharded), config)
        loading |= sharded if is_sharded else {}
    if config.stripes:
        if drafts:
            raise ConfigError(f"{', '.join(drafts)}: only for a model on one GPU; leave out gpus and max_memory")
        return plan_stripes(path_or_repo_id, config, **where, **loading)
    mode = speculate or ("auto" if draft is not None else "off")
    if draft is not None:
        return plan_drafted(path_or_repo_id, config, draft, mode, **where, **loading).plan
    inputs = planner_inputs_of(path_or_repo_id, config, speculates=mode != "off", **where, **loading)
    planned = inputs.plan().plan
    return _at_target(inputs, AtBudget(planned.budget or planned.device_nbytes, planned), wanted)


def requested_target(
    target: str | None, config: OffloadConfig, speculate: Speculate | None, draft: str | Path | None
) -> Target | None:
    """The target, if there is one. Raises `ConfigError` with settings that leave no budget to choose."""
    if target is None:
        return None
    parsed, speculates = Target.parse(target), speculate not in (None, "off")
    others = {"gpus": config.stripes, "draft": draft, "speculate": speculates}
    if flags := [name for name, value in others.items() if value]:
        raise ConfigError(f"target: only for steps of a model on one GPU without drafts; leave out {', '.join(flags)}")
    if config.backend != "none":
        raise ConfigError(f"target: the settings of {config.backend!r} choose what streams; leave them out")
    return parsed


def _at_target(planning: Planning[P], first: AtBudget[P], target: Target | None) -> P:
    """The plan, or, with a target, that with the least budget that reaches it."""
    return first.plan if target is None else reaching(planning, first, target).plan


class MachineChoice(TypedDict):
    """The machine that a plan is for: a device here, or that of a profile; and another link to its GPU."""

    device: torch.device | str | int | None
    profile: Profile | str | Path | None
    link: str | None


def machine_choice(
    config: OffloadConfig,
    *,
    device: torch.device | str | int | None,
    profile: Profile | str | Path | None,
    gpu: str | None,
    link: str | None,
) -> MachineChoice:
    """The machine that the arguments of `plan_model` name. Raises `ConfigError` if they contradict each other."""
    if gpu is None:
        return MachineChoice(device=device, profile=profile, link=link)
    if profile is not None or device is not None:
        raise ConfigError(f"gpu = {gpu!r} is a machine of its own: leave out profile= and device=")
    host = dict(config.max_memory).get("cpu", config.host_budget)
    if isinstance(host, str):
        raise ConfigError(f"host_budget = {host!r}: a GPU by name has any host: give bytes, such as 64GiB")
    return MachineChoice(device=None, profile=known_gpu(gpu, link), link=None)


def is_pipeline_checkpoint(path_or_repo_id: str | Path) -> bool:
    """Whether a folder, or a repository on the Hub, holds a diffusers pipeline.

    Raises `UnsupportedError` if transformers is not installed.
    """
    try:
        from weightstream.adapters.hf import hub
    except ImportError as error:
        raise UnsupportedError(
            f"reading a checkpoint needs transformers: pip install 'weightstream[transformers]' ({error})"
        ) from error
    return hub.names_pipeline(path_or_repo_id)


def sketch_pipeline(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    *,
    device: torch.device | str | int | None = None,
    profile: Profile | str | Path | None = None,
    link: str | None = None,
    **options: Any,
) -> PipelineSketch:
    """The sketch of a pipeline from which `plan_model` makes plans, at any budget.

    `options` are `dtype`, `variant` and `call`, the keyword arguments of a call.
    """
    from weightstream.inputs.pipeline_planning import sketch_of_files

    machine = partial(_machine, config, device, profile, link)
    return sketch_of_files(path_or_repo_id, config, machine, **options)


def plan_stripes(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    *,
    device: torch.device | str | int | None = None,
    profile: Profile | str | Path | None = None,
    link: str | None = None,
    **options: Any,
) -> StripedPlan:
    """The plan of `plan_model` for several GPUs that are alike; `options` as for `planner_inputs_of`."""
    from weightstream.adapters.hf.load import described

    if device is None and profile is None and not cuda.is_available():
        raise ConfigError("several GPUs: this machine has none; pass gpu=NAME, such as 'RTX 4090', to plan for these")
    model, checkpoint = described(path_or_repo_id, **options)
    first_settings = config.within(next(iter(config.stripes.values())))
    machine = _machine(first_settings, device, profile, link, dtypes_of(model), unpack_kernels_of(model))
    return sketch_striped(model, checkpoint, [machine] * len(config.stripes), config)


def plan_drafted(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    draft: str | Path,
    mode: Speculate,
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> DraftedPlan:
    """The plan of `plan_model` with a draft model, or the plan without, whichever has more tokens per second.

    `options` as for `planner_inputs_of`.
    """
    options["trust_remote_code"] = trust_remote_code
    if draft == SELF:
        return _plan_self_drafted(path_or_repo_id, config, mode, **options)
    sketched = _sketched(path_or_repo_id, config, speculates=True, **options)
    model = describe_draft(draft, config, sketched.inputs.machine, trust_remote_code=trust_remote_code)
    return plan_with_draft(sketched.inputs, model, mode, sketched.num_words)


def _plan_self_drafted(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    mode: Speculate,
    *,
    device: torch.device | str | int | None = None,
    profile: Profile | str | Path | None = None,
    link: str | None = None,
    **options: Any,
) -> DraftedPlan:
    from weightstream.adapters.hf.load import described

    model, checkpoint = described(path_or_repo_id, **options)
    machine = _machine(config, device, profile, link, dtypes_of(model), unpack_kernels_of(model))
    found = plan_self_drafted(model, checkpoint, config, machine, mode, WIDTHS[-1])
    return DraftedPlan(found.inputs, found.plan, found.bits is not None, found.reason)


def planner_inputs_of(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    *,
    speculates: bool = False,
    **options: Any,
) -> PlannerInputs:
    """The planner's inputs of `plan_model`, from which plans can be made at any budget.

    `options` are those of a `MachineChoice`, `dtype`, `trust_remote_code`, `model_config` and the arguments of tensor
    parallelism. `speculates`: with passes of several tokens.
    """
    return _sketched(path_or_repo_id, config, speculates=speculates, **options).inputs


class _Sketched(NamedTuple):
    """The planner's inputs of a model, and the size of its vocabulary; 0: it has none."""

    inputs: PlannerInputs
    num_words: int


def _sketched(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    *,
    device: torch.device | str | int | None = None,
    profile: Profile | str | Path | None = None,
    link: str | None = None,
    speculates: bool = False,
    **options: Any,
) -> _Sketched:
    from weightstream.adapters.hf import tensor_parallel
    from weightstream.adapters.hf.load import described

    wanted = tensor_parallel.wanted(options)
    is_sharded = ranks.is_wanted(wanted, config)
    model, checkpoint = described(path_or_repo_id, **options)
    machine = _machine(config, device, profile, link, dtypes_of(model), unpack_kernels_of(model))
    if wanted is not None and is_sharded:
        config, machine = ranks.alike(config, machine, wanted.tp_size)
    sketch = sketch_of(model, checkpoint, config, machine)
    inputs = sketch.inputs
    if speculates:
        inputs = sketch.gatherer.with_passes(inputs, WIDTHS[-1]).with_memory_of(MOST_ROWS)
    if wanted is not None and is_sharded and not inputs.demands[0].work:
        logger.warning(
            "%s: a step of one of %d processes cannot be traced (the log has the reason). It may fail, for example "
            "because the heads cannot be divided among the processes",
            path_or_repo_id,
            wanted.tp_size,
        )
    return _Sketched(inputs, getattr(model.config.get_text_config(), "vocab_size", 0))


def _machine(
    config: OffloadConfig,
    device: torch.device | str | int | None,
    profile: Profile | str | Path | None,
    link: str | None,
    dtypes: Collection[str],
    unpacked: Collection[str] = (),
) -> Machine:
    """The machine to plan for: that of `profile`, else this machine with the device that `from_pretrained` would use.

    `dtypes` are those of weights that a plan may compress, `unpacked` the kernels that unpack experts.
    """
    device = config.device_for(device)
    if profile is None:
        with closing(backend_of(device, config)) as backend:
            _check_link(link, on_cpu=backend.device.type == "cpu")
            return _over(machine_with_rates(backend, config, dtypes, unpacked), link)
    if isinstance(profile, str | Path):
        profile = read_profile(Path(profile))
    _check_link(link, on_cpu=profile.on_cpu)
    machine = _over(machine_elsewhere(profile), link)
    budget = config.device_nbytes(machine.total_nbytes or -1)  # -1: a share of an unknown size becomes negative
    if config.backend == "none" and not machine.total_nbytes and (budget is None or budget < 0):
        raise ConfigError(
            "the profile lacks the size of the GPU's memory: give device_budget in bytes, such as --device-budget 8GiB"
        )
    return machine


def _check_link(link: str | None, *, on_cpu: bool) -> None:
    if link is not None and on_cpu:
        raise ConfigError(f"link = {link!r}: the plan is for a CPU, which has no link: pass gpu=NAME, too")


def _over(machine: Machine, link: str | None) -> Machine:
    """The machine with another link to its GPU; None: with its own."""
    if link is None:
        return machine
    other, profile = Link.parse(link), machine.profile
    name = f"{profile.machine or 'a GPU'}, {other.text} as given"
    return replace(machine, profile=replace(profile, link_bytes_per_s=other.bytes_per_s, machine=name))
