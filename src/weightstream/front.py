"""The front door: `offload()` for any module, `from_pretrained()` for a checkpoint. Chooses parts; moves no bytes."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightstream import prospects
from weightstream.adapters import device_map
from weightstream.adapters.module import Grain, find_blocks
from weightstream.adapters.unpacking import unpack_late
from weightstream.config import OffloadConfig, unmatched_patterns
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.measure.profile import doubt, prepare, read_profile
from weightstream.plan.manifest import Profile
from weightstream.plan.plan import Plan
from weightstream.plan.prospect import Prospect
from weightstream.runtime import cuda, guards, weights
from weightstream.runtime.backend import Backend
from weightstream.runtime.devices import backend_of, opened, pinned
from weightstream.runtime.homes import Homes
from weightstream.runtime.leaves import Role, leaves_of
from weightstream.runtime.refinement import Refinement
from weightstream.runtime.streamer import Streamer
from weightstream.store.folder import OffloadFolder
from weightstream.store.mapping import Memory

logger = logging.getLogger("weightstream")

_NAMED = 8  # tensors in a warning


def offload(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    device_budget: int | str | None = None,
    example_inputs: Any = None,
    config: OffloadConfig | None = None,
    **settings: Any,
) -> Streamer:
    """Stream the weights of a model through a small part of the device's memory, in place and bit for bit.

    Args:
        model: any module whose weights are loaded. It stays the same object.
        device: where it computes; default: the current CUDA GPU, else the CPU.
        device_budget: bytes of device memory for weights, as an int or such as `"6GiB"`; activations come on top.
            Default: what is free, less headroom.
        example_inputs: arguments of a call as it will be: a tensor, a tuple of positional ones, or a dict of keywords.
            Only their shapes are looked at. Without them the first call tells what a call takes.
        config: every setting; keyword arguments (`device_budget`, `host_budget`, `offload_group_size`, …) go over it.

    Returns:
        The streamer, also at `model.weightstream`; `remove()`, or the end of a `with` block, undoes everything.

    Raises:
        PlanError: the budget cannot work; the message holds the arithmetic.
        ConfigError: a setting is unknown or wrong.
        OffloadError: the model is offloaded already, or holds a kind of tensor that cannot be streamed.

    Example:
        >>> import torch, weightstream
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> with weightstream.offload(model, device="cpu", device_budget="48KiB") as streamer:
        ...     y = model(torch.randn(1, 64))
        >>> streamer.plan.host_nbytes > 0
        True
    """
    config = (config or OffloadConfig()).merged(device_budget=device_budget, **settings).resolved()
    with opened(config.device_for(device), config) as backend, torch.no_grad():
        return _offload(model, backend, config, example=_example(model, example_inputs))


def _example(model: nn.Module, inputs: Any) -> prospects.Example | None:
    """Positional and keyword arguments of a forward; raises `ConfigError` where it does not take them."""
    if inputs is None:
        return None
    args: tuple[Any, ...] = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (args, {})
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except ValueError:  # a builtin has no signature
        pass
    except TypeError as error:
        raise ConfigError(
            f"example_inputs: {type(model).__name__}.forward() does not take them: {error}; give a tensor, a tuple of "
            "positional arguments, or a dict of keywords"
        ) from error
    return args, kwargs


def from_pretrained(
    path_or_repo_id: str | Path,
    *,
    device: torch.device | str | None = None,
    device_budget: int | str | None = None,
    dtype: str | torch.dtype = "auto",
    config: OffloadConfig | None = None,
    offload_folder: str | Path | None = None,
    host_budget: int | str | None = None,
    progress: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Load a transformers model straight from its safetensors and stream it; no second copy of it in RAM.

    Args:
        path_or_repo_id: a folder, or the name of a repository on the Hugging Face Hub.
        device, device_budget, config, host_budget: as for `offload`; its other settings may be given too.
        dtype: "auto" keeps the checkpoint's; another casts once, into `offload_folder`.
        offload_folder: where weights are written that have to be converted; default: a temporary folder.
        progress: show (True) or hide (False) the loading bar; None leaves it as it is.
        kwargs: passed on to the model class, such as `trust_remote_code`, `revision`, `attn_implementation`.

    Returns:
        The transformers model, in eval mode; its streamer is at `model.weightstream`.

    Raises:
        CheckpointError: a file is missing, malformed or of an unsupported format; the message names it.
        PlanError, ConfigError, OffloadError: as for `offload`.
    """
    try:
        from weightstream.adapters.transformers import load_pretrained
    except ImportError as error:
        raise UnsupportedError(
            f"from_pretrained needs transformers: pip install 'weightstream[transformers]' ({error})"
        ) from error
    settings = OffloadConfig.take_from(kwargs)
    settings |= {"device_budget": device_budget, "offload_folder": offload_folder, "host_budget": host_budget}
    config = (config or OffloadConfig()).merged(**settings).resolved()
    # the device first: a wrong one is told before gigabytes are read
    with opened(config.device_for(device), config, loads=True) as backend, ExitStack() as on_failure:
        prepare(backend.device, config.uses_codes)
        with cuda.libraries(backend.device):
            loaded = load_pretrained(
                path_or_repo_id,
                dtype=dtype,
                offload_folder=config.offload_folder,
                progress=progress,
                verify_checksums=config.verify_checksums,
                decode=lambda: not prospects.can_decode(backend, config, progress),
                device=backend.device,
                **kwargs,
            )
        if config.uses_codes:  # nothing is left to a thread that might use the device later, in a capture
            prospects.can_decode(backend, config, progress)
        if loaded.folder is not None:
            on_failure.callback(loaded.folder.close)
        with torch.no_grad():
            _offload(loaded.model, backend, config, (*loaded.mappings, *loaded.lazy), loaded.folder)
        on_failure.pop_all()
    return loaded.model


def plan_model(
    path_or_repo_id: str | Path,
    *,
    device: torch.device | str | None = None,
    device_budget: int | str | None = None,
    dtype: str | torch.dtype = "auto",
    profile: Profile | str | Path | None = None,
    config: OffloadConfig | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> Plan:
    """The plan that `from_pretrained` would make, and its predicted speed, without loading the model.

    Needs config.json, and the headers of the shards if there are any; of a quantised model its files, unread.

    Args:
        path_or_repo_id, device, device_budget, dtype, config: as for `from_pretrained`; its other settings may be given
            too, such as `host_budget`, `batch`, `context` and `tokens`.
        profile: of another machine, or the file that `weightstream doctor --save` wrote there, to plan for that;
            default: this one's GPU, or where there is none a GPU with assumed bandwidths.

    Raises:
        CheckpointError, PlanError, ConfigError: as for `from_pretrained`.

    Example:
        >>> import weightstream
        >>> plan = weightstream.plan_model("./Llama-3.1-8B", device_budget="6GiB")  # doctest: +SKIP
        >>> print(plan)  # doctest: +SKIP
    """
    config = (config or OffloadConfig()).merged(device_budget=device_budget, **settings).resolved()
    return prospect(
        path_or_repo_id, config, device=device, dtype=dtype, profile=profile, trust_remote_code=trust_remote_code
    ).plan()[1]


def prospect(
    path_or_repo_id: str | Path,
    config: OffloadConfig,
    *,
    device: torch.device | str | None = None,
    profile: Profile | str | Path | None = None,
    **options: Any,
) -> Prospect:
    """What `plan_model` plans with, for several budgets; `options` are `dtype` and `trust_remote_code`."""
    device = config.device_for(device)
    if isinstance(profile, str | Path):
        profile = read_profile(Path(profile))
    if profile is None and (device is not None or cuda.available()):
        with closing(backend_of(device, config)) as backend:
            can_decode = prospects.can_decode(backend, config)
            machine = replace(prospects.machine_of(backend, config), can_decode=can_decode)
    else:
        machine = prospects.machine_elsewhere(profile or cuda.CUDA_PROFILE)
        given = config.device_nbytes(machine.total_nbytes or -1)
        if config.backend == "none" and not machine.total_nbytes and (given is None or given < 0):
            raise ConfigError(
                "no GPU here and none profiled, so that its memory is not known: give device_budget in bytes, such as "
                "--device-budget 8GiB, or a profile of the GPU (weightstream doctor --save FILE, on its machine)"
            )
    return prospects.prospect_of_checkpoint(path_or_repo_id, config, machine, **options)


def offload_layers(
    layers: Mapping[str, nn.Module],
    *,
    device: torch.device | None,
    config: OffloadConfig,
    grains: Sequence[Grain] = ("block",),
    in_graphs: bool = False,
) -> Streamer:
    """Stream named layers of a model that an engine owns. Weights have fixed addresses from `Streamer.fix` on.

    Units have the one of `grains` that the plan finds faster: parts of layers, if steps are watched first
    (`Streamer.learn`). What several layers share stays resident, and so do buffers. Raises as `offload`; the layers are
    restored then.
    """
    config = config.resolved()
    root = nn.Module()
    for name, layer in layers.items():
        *outer, last = name.split(".")
        parent = root
        for part in outer:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, layer)
    kept = _shared_or_buffers(list(layers.values()), root)
    hosted = prospects.Hosted(kept=kept, grains=tuple(grains), in_graphs=in_graphs)
    with opened(device, config) as backend, torch.no_grad():
        return _offload(root, backend, config, hosted=hosted, layers=list(layers.values()))


def _offload(
    model: nn.Module,
    backend: Backend,
    config: OffloadConfig,
    mappings: Sequence[Memory] = (),
    folder: OffloadFolder | None = None,
    *,
    example: prospects.Example | None = None,
    layers: Sequence[nn.Module] = (),
    hosted: prospects.Hosted | None = None,
) -> Streamer:
    """Find the weights, give each a home, plan, and attach the plan to the model."""
    guards.refuse_twice(model)
    guards.refuse_foreign(dict(model.named_modules()))
    weights.leave_inference(model)
    closing = ExitStack()
    try:
        closing.callback(unpack_late(model, backend.device))
        return _attached(model, backend, config, mappings, folder, closing, example, layers, hosted)
    except BaseException:
        closing.close()
        raise


def _attached(
    model: nn.Module,
    backend: Backend,
    config: OffloadConfig,
    mappings: Sequence[Memory],
    folder: OffloadFolder | None,
    closing: ExitStack,
    example: prospects.Example | None,
    layers: Sequence[nn.Module],
    hosted: prospects.Hosted | None,
) -> Streamer:
    """What `closing` is given is closed once the model is plain again."""
    by_alias = _weights(model)
    # of its own: another model may have weights of the same names
    spill = OffloadFolder(config.offload_folder) if config.offload_folder is not None else None
    arena, pages = pinned(backend, config)
    pages = pages if mappings else None  # nothing else is in files
    empty, by_row = weights.empty_tensors(model), prospects.tables_of(model, by_alias)
    homes = Homes(
        by_alias, backend, empty=empty, mappings=mappings, arena=arena, pages=pages, spill=spill, by_row=by_row
    )
    blocks = list(layers) if hosted else find_blocks(model)
    grains = prospects.grains_of(model, by_alias, hosted.grains if hosted else None, blocks)
    prospect = prospects.prospect_of_model(model, homes, backend, config, mappings, grains, example, hosted)
    _, plan = prospect.plan()
    if short := prospect.shortage(plan):
        logger.warning("device memory may run out: %s", short)

    def foresee(known: Prospect, args: Any, kwargs: Any) -> Prospect | None:
        found = prospects.foreseen(known, by_alias, grains, model, backend, args, kwargs)
        return found and prospects.with_facts(found, homes, backend, mappings)

    refinement = Refinement(prospect, foresee, partial(doubt, backend.device))
    for owned in (folder, spill):
        if owned is not None:
            closing.callback(owned.close)
    streamer = Streamer(model, grains, homes, backend, refinement, plan, blocks, closing.close)
    if streamer.plan.manifest.codes and backend.device.type == "cuda":
        cuda.give_back(workspaces=False)  # what encoding took
    closing.callback(device_map.attach(model, backend.device))
    _report(streamer.plan, config)
    return streamer


def _weights(model: nn.Module) -> dict[str, weights.Group]:
    """The weights of a model that can be offloaded, by alias group."""
    by_alias = weights.groups(model)
    if not by_alias:
        raise ConfigError(f"{type(model).__name__} has no weights to offload")
    if held := weights.held_elsewhere(by_alias):
        logger.warning(
            "%s are also shown by tensors or arrays outside of the model: what is written through those from now on is "
            "not seen. Write through the model's own, or drop the others before offload()",
            ", ".join(held) if len(held) <= _NAMED else f"{', '.join(held[:_NAMED])} and {len(held) - _NAMED} more",
        )
    return by_alias


def _shared_or_buffers(layers: Sequence[nn.Module], root: nn.Module) -> frozenset[str]:
    """Names of tensors that have no fixed address of their own, and of those that a forward may write to."""
    holders = Counter(found for layer in layers for found in {id(leaf.tensor) for leaf in leaves_of(layer)})
    found = leaves_of(root)
    return frozenset(f.path for f in found if holders[id(f.tensor)] > 1 or f.role is not Role.PARAMETER)


def _report(plan: Plan, config: OffloadConfig) -> None:
    patterns = {"prefetch": config.prefetch.offload_params, "uva": config.uva.cpu_offload_params}.get(config.backend)
    names = [tensor.name for tensor in plan.manifest.tensors()]
    for pattern in unmatched_patterns((*(patterns or ()), *config.zero_copy_params), names):
        logger.warning("pattern %r matches no parameter of the model: it selects nothing", pattern)
    if config.zero_copy_params and not plan.mapped:
        logger.warning("zero_copy_params ignored, these weights stream: the device cannot read pinned host memory")
    if config.backend == "uva" and config.use_uva and not plan.mapped:
        logger.warning(
            "the device cannot read pinned host memory, so what cpu_offload_gb places there streams through a ring "
            "(set use_uva=False to say that this is meant)"
        )
    logger.info("%s", plan.summary())
    if not plan.offloaded_nbytes and config.backend != "none":
        logger.warning("the %s settings offload nothing of this model", config.backend)
