"""The main entry points: `offload()` for any module, `from_pretrained()` for a checkpoint. Moves no bytes itself."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from weightstream.adapters.hf.ranks import join, ranks_of, ranks_together
from weightstream.adapters.modules.moe import PicksOf, picks_of
from weightstream.adapters.modules.partition import Grain
from weightstream.adapters.modules.split_weights import SplitModel, split_model
from weightstream.adapters.tracing.meta_copy import copied
from weightstream.api.drafts import Describe, DraftModel, describe_draft, plan_with_draft
from weightstream.api.multi_gpu import Stripes, stripe
from weightstream.api.self_draft import SELF, plan_self_drafted, with_split
from weightstream.errors import ConfigError, PlanError, UnsupportedError
from weightstream.inputs.builder import CallerFacts, assembled, rooted
from weightstream.inputs.gathering import Example, LayerSubset
from weightstream.inputs.machine import Kernels, dtypes_of, machine_with_rates
from weightstream.measure.progress import bars, lasting
from weightstream.plan.speculation import MOST_ROWS
from weightstream.plan.units import human
from weightstream.runtime.devices import cuda
from weightstream.runtime.devices.backend import Backend
from weightstream.runtime.devices.opening import opened_backend
from weightstream.runtime.devices.warmup import preloading
from weightstream.runtime.streamer.drafting import Speculate
from weightstream.runtime.streamer.streamer import Streamer
from weightstream.runtime.tensors.leaves import Role, leaves_of
from weightstream.settings.arguments import check_source, of_model, refuse_training, requested_dtype, resolve_config
from weightstream.settings.config import OffloadConfig

logger = logging.getLogger("weightstream")


def offload(
    model: nn.Module | Any,
    *,
    device: torch.device | str | int | None = None,
    device_budget: int | str | Mapping[int, int | str] | None = None,
    example_inputs: Any = None,
    config: OffloadConfig | str | Path | None = None,
    **settings: Any,
) -> Any:
    """Stream the weights of a model through a small part of the device's memory, in place and bit for bit.

    Args:
        model: any module whose weights are loaded, or a diffusers pipeline. It stays the same object.
        device: the device that computes, such as "cuda:1", or the index of a GPU. Default: the current CUDA GPU, or the
            CPU if there is no GPU.
        device_budget: bytes of device memory for weights, as an int or as text such as `"6GiB"`. Activations come on
            top. Default: the free memory minus headroom. With `{0: "6GiB", 1: "6GiB"}`, or `gpus=2`, several GPUs share
            the model.
        example_inputs: the arguments of a typical call: a tensor, a tuple of positional arguments, or a dict of
            keyword arguments. Only their shapes matter. Without them the work of a step is unknown before the first
            call.
        config: all settings in one object, or the path of a TOML file that has them. Keyword arguments
            (`device_budget`, `host_budget`, `offload_group_size`, …) override it.
        settings: any other setting of `OffloadConfig`, such as `train=True`, to plan for training adapters.

    Returns:
        The streamer, which is also at `model.weightstream`. `remove()`, or the end of a `with` block, restores the
        model. For a pipeline: a `PipelineStreamer`. On several GPUs: `Stripes`.

    Raises:
        PlanError: the model cannot run within the budget; the message holds the arithmetic.
        ConfigError: a setting is unknown or wrong.
        OffloadError: the model is offloaded already, or has a kind of tensor that cannot be streamed.

    Examples:
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
    facts = CallerFacts(example=_example(model, example_inputs), ranks=ranks_of(model))
    refuse_training(config, ranks=facts.ranks is not None)
    with ranks_together(facts.ranks), _opened(device, config) as backends:
        return _placed(model, backends, config, facts)


@contextmanager
def _opened(
    device: torch.device | str | int | None, config: OffloadConfig, *, loads: bool = False
) -> Iterator[list[Backend]]:
    """The backends of all devices of a model, the first of which is the current device inside of the block."""
    if not config.stripes:
        with opened_backend(config.device_for(device), config, loads=loads) as backend:
            yield [backend]
        return
    if device is None and not cuda.is_available():
        wanted = f"gpus={config.gpus}" if config.gpus > 1 else f"max_memory for {len(config.stripes)} GPUs"
        raise ConfigError(f"{wanted}: this torch ({torch.__version__}) sees no CUDA GPU; leave it out to use the CPU")
    kind = torch.device(device if device is not None else "cuda")
    if kind.index is not None:
        raise ConfigError(
            f"device = {device!r}, but the settings spread the model over {len(config.stripes)} GPUs: leave out device"
        )
    with ExitStack() as stack:
        names = [kind.type if kind.type == "cpu" else f"{kind.type}:{index}" for index in config.stripes]
        backends = [stack.enter_context(opened_backend(name, config, loads=loads)) for name in reversed(names)]
        yield backends[::-1]  # opened in reverse, so that the first device is the current one


def _example(model: nn.Module, inputs: Any) -> Example | None:
    """The arguments of a call of `model`, from `example_inputs`. Raises `ConfigError` if its forward refuses any."""
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
    device: torch.device | str | int | None = None,
    device_budget: int | str | Mapping[int, int | str] | None = None,
    dtype: str | torch.dtype | None = None,
    torch_dtype: str | torch.dtype | None = None,
    config: OffloadConfig | Any | None = None,
    offload_folder: str | Path | None = None,
    host_budget: int | str | None = None,
    progress: bool | None = None,
    allow_missing: bool = False,
    speculate: Speculate | None = None,
    draft: str | Path | None = None,
    **kwargs: Any,
) -> Any:
    """Load a transformers model directly from its safetensors files, and stream it. There is no second copy in RAM.

    Args:
        path_or_repo_id: a folder, or the name of a repository on the Hugging Face Hub.
        device: as for `offload`.
        device_budget: as for `offload`, whose other settings are keyword arguments here, too.
        dtype: "auto", the default, keeps the dtype of the checkpoint. Any other casts the weights once, into
            `offload_folder`.
        host_budget: host memory for weights, as an int or as text such as `"30GiB"`; the rest is read from disk in each
            step. Default: 80 % of what is available.
        torch_dtype: an older name of `dtype`.
        config: an `OffloadConfig` or the path of a TOML file, as for `offload`; or a transformers config, which
            replaces config.json.
        offload_folder: the folder for weights that have to be converted. Default: a temporary folder.
        progress: show (True) or hide (False) the loading bar. None: show it if stderr is a terminal.
        allow_missing: initialise weights that are missing in the checkpoint at random, instead of refusing it.
        speculate: what `weightstream.generate` does with this model unless a call says otherwise: "auto" drafts where
            that is faster, "lookup" and "draft" always, "off" never. Memory for passes of several tokens is then part
            of the plan. Default: "auto" with a `draft`, else "off".
        draft: the folder or repository of a small model with the same tokens. It is loaded to the device, inside of
            `device_budget`, if more tokens per second are expected with it than without; a log line has both figures.
            "self": the model drafts for itself, with the sign, exponent and first mantissa bits of its weights, which
            then stay on the device while the other bits stream.
        kwargs: attributes of the model's config, such as `use_cache`, and arguments of the Hub and of transformers,
            such as `revision`, `subfolder`, `trust_remote_code` and `attn_implementation`. `device_map="auto"` uses
            all GPUs. With `distributed_config`, under torchrun, each process streams its tensor-parallel shards.

    Returns:
        The transformers model, in eval mode; with `train`, its parameters are frozen. Its streamer is at
        `model.weightstream`.

    Raises:
        CheckpointError: a file is missing, malformed or of an unsupported format; the message names it.
        UnsupportedError: transformers is not installed, or the quantisation of the weights is not supported.
        PlanError, ConfigError, OffloadError: as for `offload`.

    Examples:
        >>> import weightstream
        >>> model = weightstream.from_pretrained("./Llama-3.1-8B", device_budget="6GiB")  # doctest: +SKIP
        >>> model.weightstream.plan  # doctest: +SKIP
    """
    check_source(path_or_repo_id)
    tensor_parallel, load_pretrained = _loader()
    settings = _spread(kwargs) | OffloadConfig.take_from(kwargs)
    settings |= {"device_budget": device_budget, "offload_folder": offload_folder, "host_budget": host_budget}
    config, model_config = of_model(config)
    config = resolve_config(config, **settings)
    drafts = {"draft": draft is not None, "speculate": speculate not in (None, "off")}
    wanted = tensor_parallel.wanted(kwargs)
    refuse_training(config, options=[name for name, is_set in drafts.items() if is_set], ranks=wanted is not None)
    ranks = join(wanted, config)
    speculate = speculate or ("auto" if draft is not None else "off")
    if draft is not None and (config.stripes or ranks is not None):
        raise ConfigError("draft: only a model on one GPU has a draft model inside of its budget; leave it out")
    if speculate == "draft" and draft is None:
        raise ConfigError("speculate='draft' needs a draft model: pass draft='FOLDER', or draft='self'")
    if draft is not None and speculate in ("lookup", "off"):
        logger.warning("draft is ignored: speculate=%r drafts without it", speculate)
    # the device first: a wrong one is reported before gigabytes are read
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
                progress=bars(progress),
                verify_checksums=config.verify_checksums,
                expect=kernels.expect,
                decode=kernels.are_missing,  # asked once the dtypes are known: without kernels, decompress into files
                device=backend.device,
                **kwargs,
            )
        kernels.wait()
        if config.train is not None:
            loaded.model.requires_grad_(False)
        if loaded.folder is not None:
            on_failure.callback(loaded.folder.close)
        memories = *loaded.mappings, *loaded.lazy
        most_rows = MOST_ROWS if speculate != "off" and not config.stripes else 1
        facts = CallerFacts(
            memories=memories, folder=loaded.folder, ranks=ranks, progress=progress, most_rows=most_rows
        )
        describe, self_draft = None, None
        if draft == SELF and speculate in ("auto", "draft"):
            self_draft = _self_draft(loaded, config, backend, speculate, facts)
            if self_draft is not None:
                facts = replace(facts, restored=self_draft.split.undo)
        elif draft is not None and speculate in ("auto", "draft"):
            trusts = bool(kwargs.get("trust_remote_code"))
            describe = partial(describe_draft, draft, config, trust_remote_code=trusts, progress=progress)
        if speculate != "off" and (config.stripes or ranks is not None):
            logger.warning("speculate=%r is ignored: a model on several GPUs has one token a pass", speculate)
        _placed(loaded.model, backends, config, facts, speculate, describe, self_draft)
        on_failure.pop_all()
    return loaded.model


def _loader() -> tuple[Any, Any]:
    """The modules that need transformers."""
    try:
        import transformers  # noqa: F401  our modules below may be imported already

        from weightstream.adapters.hf import tensor_parallel
        from weightstream.adapters.hf.load import load_pretrained
    except ImportError as error:
        raise UnsupportedError(
            f"from_pretrained needs transformers: pip install 'weightstream[transformers]' ({error})"
        ) from error
    return tensor_parallel, load_pretrained


def _spread(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove `device_map="auto"` from the keyword arguments, and return the equivalent settings: all GPUs."""
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
    picks_of: PicksOf = picks_of,
) -> Streamer:
    """Stream named layers of a model that an engine owns. Weights have fixed addresses from `Streamer.fix` on.

    Tensors that several layers share stay resident, and so do buffers. Raises the errors of `offload`, and restores the
    layers then.

    Args:
        layers: the layers by name.
        device: as for `offload`.
        config: all settings.
        grains: how layers may be cut into units; the plan takes the fastest. Parts of layers are only possible if steps
            are watched first (`Streamer.learn`).
        in_graphs: steps run as CUDA graphs, so the host launches no kernels.
        picks_of: how a module of the engine reads single rows of its stacks.
    """
    config = config.resolved()
    if config.train is not None:
        raise ConfigError("an engine's layers are not trained: leave out train")
    if config.stripes:
        raise ConfigError("an engine's layers stream on one GPU: leave out gpus, and give max_memory for one GPU only")
    root = rooted(layers)
    kept = _shared_or_buffers(list(layers.values()), root)
    subset = LayerSubset(
        blocks=tuple(layers.values()), kept=kept, grains=tuple(grains), in_graphs=in_graphs, picks_of=picks_of
    )
    with opened_backend(device, config) as backend, torch.no_grad():
        return _offload(root, backend, config, CallerFacts(subset=subset))


@torch.no_grad()
def _placed(
    model: nn.Module,
    backends: Sequence[Backend],
    config: OffloadConfig,
    facts: CallerFacts,
    speculate: Speculate = "off",
    describe: Describe | None = None,
    self_draft: _SelfDraft | None = None,
) -> Streamer | Stripes:
    """Offload a model to one device, or to several."""
    if backends[1:] and facts.ranks is not None:
        raise ConfigError("each process of tensor parallelism computes on one GPU: leave out gpus")
    if backends[1:]:
        return stripe(model, backends, config, facts)
    return _offload(model, backends[0], config, facts, speculate, describe, self_draft)


def _offload(
    model: Any,
    backend: Backend,
    config: OffloadConfig,
    facts: CallerFacts,
    speculate: Speculate = "off",
    describe: Describe | None = None,
    self_draft: _SelfDraft | None = None,
) -> Streamer:
    """Find the weights, give each a home, plan, and attach the plan to the model. `describe` describes its draft."""
    draft: DraftModel | None = None
    with assembled(model, backend, config, facts) as builder:
        logger.debug("planning %s with\n%s", type(model).__name__, builder.inputs)
        if self_draft is not None:
            builder.plan_with(with_split(builder.inputs, self_draft.split, builder.gatherer))
        with lasting("planning", facts.progress):
            if describe is None:
                plan = builder.inputs.plan().plan
            else:
                draft = describe(builder.inputs.machine)
                found = plan_with_draft(builder.inputs, draft, speculate, model.config.get_text_config().vocab_size)
                logger.log(logging.INFO if found.is_drafted else logging.WARNING, "draft: %s", found.reason)
                builder.plan_with(found.inputs)
                plan, draft = found.plan, draft if found.is_drafted else None
        streamer = builder.attach(plan)
    has_draft = draft is not None or self_draft is not None
    streamer.drafting.mode = "auto" if speculate == "draft" and not has_draft else speculate
    if self_draft is not None:
        self_draft.split.follow(streamer.device)
        streamer.drafting.model, streamer.drafting.kind = self_draft.split.draft, "self draft"
        streamer.drafting.prior, streamer.drafting.token_s = self_draft.prior, self_draft.token_s
    if draft is not None:
        try:
            streamer.drafting.model = draft.load(streamer.device)
            streamer.drafting.token_s = draft.needs.token_s
        except BaseException:
            streamer.remove()
            raise
    if facts.ranks is not None:
        try:
            facts.ranks.confirm()
        except BaseException:
            streamer.remove()
            raise
    return streamer


class _SelfDraft(NamedTuple):
    """A model whose weights are split, and what is expected of it as a draft."""

    split: SplitModel
    prior: float
    token_s: float


@torch.no_grad()
def _self_draft(
    loaded: Any, config: OffloadConfig, backend: Backend, speculate: Speculate, facts: CallerFacts
) -> _SelfDraft | None:
    """Split the weights of a loaded model; None: without that it is expected to be faster."""
    model = loaded.model
    with lasting("planning drafts", facts.progress):
        machine, shapes = machine_with_rates(backend, config, dtypes_of(model)), copied(model).model
        found = plan_self_drafted(shapes, loaded.checkpoint, config, machine, speculate, facts.most_rows)
    logger.log(logging.WARNING if found.bits is None else logging.INFO, "draft: %s", found.reason)
    if found.bits is None:
        return None
    needed = found.plan.manifest.nbytes
    if needed > machine.host_free_nbytes:
        raise PlanError(
            f"draft='self': the split weights take {human(needed)} of host memory while they are made, and "
            f"{human(machine.host_free_nbytes)} are free: leave it out, or free host memory"
        )
    for memory in loaded.lazy:
        memory.populate(0, memory.nbytes)
    with lasting(f"splitting the weights of {type(model).__name__}", facts.progress):
        split = split_model(model, found.bits, backend.device)
    return _SelfDraft(split, found.prior, found.token_s)


def _shared_or_buffers(layers: Sequence[nn.Module], root: nn.Module) -> frozenset[str]:
    """Names of tensors that cannot stream at a fixed address: those that several layers or modules share, as each unit
    has its own bytes in the ring; and buffers and attributes, which a forward may write to. An attribute that refers to
    a parameter is none of its own."""
    holders = Counter(tensor for layer in layers for tensor in {id(leaf.tensor) for leaf in leaves_of(layer)})
    holders |= Counter(id(p) for module in root.modules() for p in set(module.parameters(recurse=False)))
    leaves = list(leaves_of(root))
    parameters = {id(leaf.tensor) for leaf in leaves if leaf.role is Role.PARAMETER}
    return frozenset(leaf.path for leaf in leaves if holders[id(leaf.tensor)] > 1 or id(leaf.tensor) not in parameters)
