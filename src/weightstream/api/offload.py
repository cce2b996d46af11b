"""The front door: `offload()` for any module, `from_pretrained()` for a checkpoint. Chooses parts; moves no bytes."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightstream.adapters.hf.ranks import join, ranks_of, ranks_together
from weightstream.adapters.modules.partition import Grain
from weightstream.api.multi_gpu import Stripes, stripe
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.inputs.builder import CallerFacts, assembled, rooted
from weightstream.inputs.gathering import Example, LayerSubset
from weightstream.inputs.machine import Kernels
from weightstream.measure.progress import lasting
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.devices.opening import opened_backend
from weightstream.runtime.devices.warmup import preloading
from weightstream.runtime.streamer.streamer import Streamer
from weightstream.runtime.tensors.leaves import Role, leaves_of
from weightstream.settings.arguments import of_model, requested_dtype, resolve_config
from weightstream.settings.config import OffloadConfig

logger = logging.getLogger("weightstream")


def offload(
    model: nn.Module | Any,
    *,
    device: torch.device | str | None = None,
    device_budget: int | str | Mapping[int, int | str] | None = None,
    example_inputs: Any = None,
    config: OffloadConfig | None = None,
    **settings: Any,
) -> Any:
    """Stream the weights of a model through a small part of the device's memory, in place and bit for bit.

    Args:
        model: any module whose weights are loaded, or a pipeline of diffusers. It stays the same object.
        device: where it computes; default: the current CUDA GPU, else the CPU.
        device_budget: bytes of device memory for weights, as an int or such as `"6GiB"`; activations come on top.
            Default: what is free, less headroom. `{0: "6GiB", 1: "6GiB"}`, or `gpus=2`: several GPUs share the model.
        example_inputs: arguments of a call as it will be: a tensor, a tuple of positional ones, or a dict of keywords.
            Only their shapes are looked at. Without them the first call tells what a call takes.
        config: every setting; keyword arguments (`device_budget`, `host_budget`, `offload_group_size`, …) go over it.

    Returns:
        The streamer, also at `model.weightstream`; `remove()`, or the end of a `with` block, undoes everything. Of a
        pipeline what `offload_pipeline` puts there; on several GPUs `Stripes`.

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
    config = resolve_config(config, device_budget=device_budget, **settings)
    if not isinstance(model, nn.Module):
        from weightstream.api.pipelines import offload_pipeline

        return offload_pipeline(model, device=device, config=config, example_inputs=example_inputs).weightstream
    given = CallerFacts(example=_example(model, example_inputs), ranks=ranks_of(model))
    with ranks_together(given.ranks), _opened(device, config) as backends:
        return _placed(model, backends, config, given)


@contextmanager
def _opened(
    device: torch.device | str | None, config: OffloadConfig, *, loads: bool = False
) -> Iterator[list[Backend]]:
    """The backends of all devices that a model is to be on."""
    if not config.stripes:
        with opened_backend(config.device_for(device), config, loads=loads) as backend:
            yield [backend]
        return
    kind = torch.device(device or ("cuda" if cuda.is_available() else "cpu"))
    if kind.index is not None:
        raise ConfigError(
            f"device = {device!r}, and the model is to be on {len(config.stripes)} GPUs: leave out device"
        )
    with ExitStack() as stack:
        names = [kind.type if kind.type == "cpu" else f"{kind.type}:{index}" for index in config.stripes]
        found = [stack.enter_context(opened_backend(name, config, loads=loads)) for name in reversed(names)]
        yield found[::-1]  # so the first device is the current one


def _example(model: nn.Module, inputs: Any) -> Example | None:
    """Positional and keyword arguments of a forward; raises `ConfigError` where it does not take them."""
    if inputs is None:
        return None
    if isinstance(inputs, Mapping):
        example = Example((), dict(inputs))
    else:
        example = Example(tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), {})
    try:
        inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    except ValueError:  # a builtin has no signature
        pass
    except TypeError as error:
        raise ConfigError(
            f"example_inputs: {type(model).__name__}.forward() does not take them: {error}; give a tensor, a tuple of "
            "positional arguments, or a dict of keywords"
        ) from error
    return example


def from_pretrained(
    path_or_repo_id: str | Path,
    *,
    device: torch.device | str | None = None,
    device_budget: int | str | Mapping[int, int | str] | None = None,
    dtype: str | torch.dtype | None = None,
    torch_dtype: str | torch.dtype | None = None,
    config: OffloadConfig | Any | None = None,
    offload_folder: str | Path | None = None,
    host_budget: int | str | None = None,
    progress: bool | None = None,
    allow_missing: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a transformers model straight from its safetensors and stream it; no second copy of it in RAM.

    Args:
        path_or_repo_id: a folder, or the name of a repository on the Hugging Face Hub.
        device, device_budget, host_budget: as for `offload`; its other settings may be given too.
        dtype: "auto", the default, keeps the checkpoint's; another casts once, into `offload_folder`.
        torch_dtype: an older name of `dtype`.
        config: an `OffloadConfig`, as for `offload`; or a config of transformers, in place of config.json.
        offload_folder: where weights are written that have to be converted; default: a temporary folder.
        progress: show (True) or hide (False) the loading bar; None leaves it as it is.
        allow_missing: give weights that the checkpoint lacks random values; else it is refused.
        kwargs: what the model's config has, such as `use_cache`, is set there; the hub and transformers take
            `revision`, `subfolder`, `trust_remote_code`, `attn_implementation` and the like. `device_map="auto"`: on
            all GPUs. `distributed_config`: under torchrun, each process streams its shards of tensor parallelism.

    Returns:
        The transformers model, in eval mode; its streamer is at `model.weightstream`.

    Raises:
        CheckpointError: a file is missing, malformed or of an unsupported format; the message names it.
        UnsupportedError: transformers is not installed, or the weights are quantised in a way that is not supported.
        PlanError, ConfigError, OffloadError: as for `offload`.
    """
    tensor_parallel, load_pretrained = _loader()
    settings = _spread(kwargs) | OffloadConfig.take_from(kwargs)
    settings |= {"device_budget": device_budget, "offload_folder": offload_folder, "host_budget": host_budget}
    config, model_config = of_model(config)
    config = resolve_config(config, **settings)
    ranks = join(tensor_parallel.wanted(kwargs), config)
    # the device first: a wrong one is told before gigabytes are read
    with ranks_together(ranks), _opened(device, config, loads=True) as backends, ExitStack() as on_failure:
        backend, dtype = backends[0], requested_dtype(dtype, torch_dtype)
        kernels = Kernels(backend, config, progress)
        with preloading(backend.device, generates=True):
            loaded = load_pretrained(
                path_or_repo_id,
                dtype=dtype,
                model_config=model_config,
                allow_missing=allow_missing,
                offload_folder=config.offload_folder,
                progress=progress,
                verify_checksums=config.verify_checksums,
                expect=kernels.expect,
                decode=kernels.are_missing,
                device=backend.device,
                **kwargs,
            )
        kernels.wait()
        if loaded.folder is not None:
            on_failure.callback(loaded.folder.close)
        memories = *loaded.mappings, *loaded.lazy
        given = CallerFacts(memories=memories, folder=loaded.folder, ranks=ranks, progress=progress)
        _placed(loaded.model, backends, config, given)
        on_failure.pop_all()
    return loaded.model


def _loader() -> tuple[Any, Any]:
    """What needs transformers."""
    try:
        import transformers  # noqa: F401  what follows may be imported already

        from weightstream.adapters.hf import tensor_parallel
        from weightstream.adapters.hf.load import load_pretrained
    except ImportError as error:
        raise UnsupportedError(
            f"from_pretrained needs transformers: pip install 'weightstream[transformers]' ({error})"
        ) from error
    return tensor_parallel, load_pretrained


def _spread(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Removes `device_map="auto"` from keywords, and returns the settings that it stands for: all GPUs."""
    if kwargs.get("device_map") != "auto":
        return {}
    del kwargs["device_map"]
    return {} if kwargs.get("max_memory") else {"gpus": max(1, torch.accelerator.device_count())}


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
    if config.stripes:
        raise ConfigError("an engine's layers stream on one GPU: leave out gpus, and all but one of max_memory")
    root = rooted(layers)
    kept = _shared_or_buffers(list(layers.values()), root)
    subset = LayerSubset(blocks=tuple(layers.values()), kept=kept, grains=tuple(grains), in_graphs=in_graphs)
    with opened_backend(device, config) as backend, torch.no_grad():
        return _offload(root, backend, config, CallerFacts(subset=subset))


@torch.no_grad()
def _placed(
    model: nn.Module, backends: Sequence[Backend], config: OffloadConfig, given: CallerFacts
) -> Streamer | Stripes:
    """Offload a model to one device, or to several."""
    if backends[1:] and given.ranks is not None:
        raise ConfigError("each process of tensor parallelism computes on one GPU: leave out gpus")
    return stripe(model, backends, config, given) if backends[1:] else _offload(model, backends[0], config, given)


def _offload(model: nn.Module, backend: Backend, config: OffloadConfig, given: CallerFacts) -> Streamer:
    """Find the weights, give each a home, plan, and attach the plan to the model."""
    with assembled(model, backend, config, given) as assembly:
        logger.debug("planning %s with\n%s", type(model).__name__, assembly.inputs)
        with lasting("planning", given.progress):
            plan = assembly.inputs.plan().plan
        streamer = assembly.attach(plan)
    if given.ranks is not None:
        try:
            given.ranks.confirm()
        except BaseException:
            streamer.remove()
            raise
    return streamer


def _shared_or_buffers(layers: Sequence[nn.Module], root: nn.Module) -> frozenset[str]:
    """Names of tensors that have no fixed address of their own, as several layers or modules hold them, and of those
    that a forward may write to."""
    holders = Counter(found for layer in layers for found in {id(leaf.tensor) for leaf in leaves_of(layer)})
    owners = Counter(id(p) for module in root.modules() for p in set(module.parameters(recurse=False)))
    holders |= owners
    found = leaves_of(root)
    return frozenset(f.path for f in found if holders[id(f.tensor)] > 1 or f.role is not Role.PARAMETER)
