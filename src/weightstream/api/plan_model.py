"""Plans of models that are not loaded, for this machine or another one. Reads no weight, and moves no byte."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weightstream.adapters.hf import ranks
from weightstream.adapters.hf.packed_formats import unpack_kernels_of
from weightstream.api.drafts import DraftedPlan, describe_draft, plan_with_draft
from weightstream.api.multi_gpu import sketch_striped
from weightstream.api.self_draft import SELF, plan_self_drafted
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.inputs.gathering import sketch_of
from weightstream.inputs.machine import dtypes_of, machine_elsewhere, machine_with_rates
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
    config: OffloadConfig | Any | None = None,
    trust_remote_code: bool = False,
    variant: str | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    speculate: Speculate | None = None,
    draft: str | Path | None = None,
    **settings: Any,
) -> Plan | PipelinePlan | StripedPlan:
    """Make the plan that `from_pretrained` would make, with its predicted speed, without loading the model.

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
            Default: the GPU of this machine; without one, a GPU with assumed rates.
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
        CheckpointError, UnsupportedError, PlanError, ConfigError: as for `from_pretrained`.

    Examples:
        >>> import weightstream
        >>> plan = weightstream.plan_model("./Llama-3.1-8B", device_budget="6GiB")  # doctest: +SKIP
        >>> print(plan)  # doctest: +SKIP
    """
    check_source(path_or_repo_id)
    config, model_config = of_model(config)
    sharded = {name: value for name in ranks.NAMES if (value := settings.pop(name, None)) is not None}
    config, dtype = resolve_config(config, device_budget=device_budget, **settings), requested_dtype(dtype, torch_dtype)
    drafts = {name: value for name, value in (("speculate", speculate), ("draft", draft)) if value is not None}
    if is_pipeline_checkpoint(path_or_repo_id):
        refuse_training(config, of=str(path_or_repo_id))
        if sharded or drafts:
            raise ConfigError(f"{path_or_repo_id} is a diffusers pipeline: leave out {', '.join([*sharded, *drafts])}")
        sketch = sketch_pipeline(
            path_or_repo_id,
            config,
            device=device,
            profile=profile,
            dtype=dtype,
            variant=variant,
            call=example_inputs or {},
        )
        return sketch.plan()
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
        return plan_stripes(path_or_repo_id, config, device=device, profile=profile, **loading)
    mode = speculate or ("auto" if draft is not None else "off")
    if draft is not None:
        return plan_drafted(path_or_repo_id, config, draft, mode, device=device, profile=profile, **loading).plan
    loading["speculates"] = mode != "off"
    return planner_inputs_of(path_or_repo_id, config, device=device, profile=profile, **loading).plan().plan


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
    **options: Any,
) -> PipelineSketch:
    """The sketch of a pipeline from which `plan_model` makes plans, at any budget.

    `options` are `dtype`, `variant` and `call`, the keyword arguments of a call.
    """
    from weightstream.inputs.pipeline_planning import sketch_of_files

    machine = partial(_machine, config, device, profile)
    return sketch_of_files(path_or_repo_id, config, machine, **options)


def plan_stripes(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    *,
    device: torch.device | str | int | None = None,
    profile: Profile | str | Path | None = None,
    **options: Any,
) -> StripedPlan:
    """The plan of `plan_model` for several GPUs like the one of this machine; `options` as for `planner_inputs_of`."""
    from weightstream.adapters.hf.load import described

    model, checkpoint = described(path_or_repo_id, **options)
    first_settings = config.within(next(iter(config.stripes.values())))
    machine = _machine(first_settings, device, profile, dtypes_of(model), unpack_kernels_of(model))
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
    **options: Any,
) -> DraftedPlan:
    from weightstream.adapters.hf.load import described

    model, checkpoint = described(path_or_repo_id, **options)
    machine = _machine(config, device, profile, dtypes_of(model), unpack_kernels_of(model))
    found = plan_self_drafted(model, checkpoint, config, machine, mode, WIDTHS[-1])
    return DraftedPlan(found.inputs, found.plan, found.bits is not None, found.reason)


def planner_inputs_of(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    *,
    device: torch.device | str | int | None = None,
    profile: Profile | str | Path | None = None,
    speculates: bool = False,
    **options: Any,
) -> PlannerInputs:
    """The planner's inputs of `plan_model`, from which plans can be made at any budget.

    `options` are `dtype`, `trust_remote_code`, `model_config` and the arguments of tensor parallelism. `speculates`:
    with passes of several tokens.
    """
    return _sketched(path_or_repo_id, config, device=device, profile=profile, speculates=speculates, **options).inputs


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
    speculates: bool = False,
    **options: Any,
) -> _Sketched:
    from weightstream.adapters.hf import tensor_parallel
    from weightstream.adapters.hf.load import described

    wanted = tensor_parallel.wanted(options)
    is_sharded = ranks.is_wanted(wanted, config)
    model, checkpoint = described(path_or_repo_id, **options)
    machine = _machine(config, device, profile, dtypes_of(model), unpack_kernels_of(model))
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
    dtypes: Collection[str],
    unpacked: Collection[str] = (),
) -> Machine:
    """The machine to plan for: that of `profile`, else this machine with its GPU, else one with assumed rates.

    `dtypes` are those of weights that a plan may compress, `unpacked` the kernels that unpack experts.
    """
    device = config.device_for(device)
    if isinstance(profile, str | Path):
        profile = read_profile(Path(profile))
    if profile is None and (device is not None or cuda.is_available()):
        with closing(backend_of(device, config)) as backend:
            return machine_with_rates(backend, config, dtypes, unpacked)
    machine = machine_elsewhere(profile or cuda.CUDA_PROFILE)
    budget = config.device_nbytes(machine.total_nbytes or -1)  # -1: a share of an unknown size becomes negative
    if config.backend == "none" and not machine.total_nbytes and (budget is None or budget < 0):
        raise ConfigError(
            "this machine has no GPU, and there is no profile of one, so the size of its memory is unknown: give "
            "device_budget in bytes, such as --device-budget 8GiB, or a profile of the GPU (weightstream doctor --save "
            "FILE, on its machine)"
        )
    return machine
