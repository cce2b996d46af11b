"""vLLM's plug-in: engines whose `additional_config` has a key "weightstream" stream their layers.

[Note: one point of attachment]
All executors (in this process, in others, through Ray) drive a `WorkerWrapperBase`, which passes calls of methods that
it lacks to its worker. Methods that are added to it wrap those of every worker, of both model runners, from vLLM 0.24
on. vLLM's own calls of `wrap_modules`, `sync_prev_onload` and `join_after_forward` reach the offloader that is set
before the model is built. Only some runners call its `post_init`, and before the model is complete: the layers are
taken over after `load_model`.

[Note: the compile cache]
vLLM caches compiled code under a hash of its configuration, including `additional_config`. Compiled code waits for the
units that streamed when it was traced. So the units of the plan are added to `additional_config` before anything is
compiled: a plan with other units, for a different GPU for example, does not find that code.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
import vllm
from torch import nn
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.offloader import base as theirs

import weightstream
from weightstream.adapters.hf.ranks import Ranks, errors_stay_local, ranks_together
from weightstream.api import offloaders
from weightstream.errors import ConfigError, PlanError, UnsupportedError
from weightstream.integrations.vllm.experts import enter_by_forward, routed_picks
from weightstream.integrations.vllm.loading import processed_on_host
from weightstream.integrations.vllm.memory import Room, allocated, is_cuda, report_cache_offload
from weightstream.integrations.vllm.versions import why_untried
from weightstream.plan.units import human
from weightstream.runtime.streamer.streamer import Streamer
from weightstream.settings.config import OffloadConfig

logger = logging.getLogger("weightstream")

KEY = "weightstream"  # in `additional_config`
_UNITS = "units"  # in its settings, [Note: the compile cache]
_PREFETCH = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_params")
_UVA = ("cpu_offload_gb", "cpu_offload_params")
_CHOOSES = frozenset(  # where one of these is set, vLLM's own flags are not read
    ("device_budget", "max_memory", "offload_backend", "prefetch", "uva", "offload_group_size", "cpu_offload_gb")
)
# A guess of the activations of a layer for a token: two of the layer's widest size, and `_WIDTHS` of hidden size.
_WIDTHS = 8
_GUESS = 1.5  # by which the guess of all activations is multiplied


def register() -> None:
    """The entry point of `vllm.general_plugins`; may be called twice. Changes only engines that are set to use it."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if hasattr(WorkerWrapperBase, KEY):
        return
    setattr(WorkerWrapperBase, KEY, None)  # the engine, in workers that have one
    ours = Offloader()
    _around(WorkerWrapperBase, "load_model", partial(_load_model, ours))
    for name in ("init_device", "load_model"):
        _around(WorkerWrapperBase, name, partial(_standing_by, ours))
    _around(WorkerWrapperBase, "sleep", _sleep)
    _around(WorkerWrapperBase, "discard", _discard)
    _around(WorkerWrapperBase, "shutdown", partial(_shutdown, ours))
    for name, reason in _REFUSED.items():
        _around(WorkerWrapperBase, name, partial(_refuse, name, reason))


def _around(kind: Any, name: str, method: Callable[..., Any]) -> None:
    """Replace the method `name` of worker wrappers by `method(inner, wrapper, …)`.

    `inner` is the replaced method of the wrapper. If the wrapper has none of this name, it is the worker's.
    """
    inner = kind.__dict__.get(name) or (lambda wrapper, *args, **kw: getattr(wrapper.worker, name)(*args, **kw))
    setattr(kind, name, lambda wrapper, *args, **kw: method(partial(inner, wrapper), wrapper, *args, **kw))


class Offloader(theirs.BaseOffloader):  # type: ignore[misc]
    """vLLM's offloader: passes layers to the engine that is being built, and calls of graphs to all engines.

    vLLM has one offloader per process, and a graph does not say which engine it is of. Waiting also for the copies of
    another engine is correct.
    """

    def __init__(self) -> None:
        self._engines: list[ref[offloaders.StreamingOffloader]] = []
        self._delegate: offloaders.BaseOffloader = offloaders.NoopOffloader()

    @property
    def streamers(self) -> list[Streamer]:
        """The streamers of all engines, in the order in which these were built."""
        return [engine.streamer for engine in self._alive() if engine.streamer is not None]

    @property
    def supports_tower_offload(self) -> bool:
        return self._delegate.supports_tower_offload

    @contextmanager
    def building(self, offloader: offloaders.StreamingOffloader) -> Iterator[None]:
        """Inside, this is vLLM's offloader, and passes the layers of the model that is built to `offloader`."""
        self._engines = [*(engine for engine in self._engines if engine() is not None), ref(offloader)]
        self._delegate = offloader
        theirs.set_offloader(self)
        try:
            yield
        except BaseException:
            self._engines.pop()
            raise
        finally:
            self._delegate = offloaders.NoopOffloader()

    def wrap_modules(self, modules_generator: Iterator[nn.Module], prefix: str = "") -> list[nn.Module]:
        return self._delegate.wrap_modules(modules_generator, prefix)

    def sync_prev_onload(self) -> None:
        for engine in self._alive():
            engine.sync_prev_onload()

    def join_after_forward(self) -> None:
        for engine in self._alive():
            engine.join_after_forward()

    def _alive(self) -> Iterator[offloaders.StreamingOffloader]:
        return (engine for engine in (reference() for reference in self._engines) if engine is not None)

    def stand_by(self) -> None:
        """Become vLLM's offloader again if an engine streams, else stop being it. Runners set another offloader when
        they start or end."""
        if self.streamers:
            theirs.set_offloader(self)
        elif theirs.get_offloader() is self:
            theirs.set_offloader(theirs.NoopOffloader())


def settings_of(vllm_config: Any) -> OffloadConfig | None:
    """The settings of an engine; None if it does not use weightstream.

    If the settings do not say how much memory to use, vLLM's own flags for offloading do.

    A step is planned for `max_num_seqs` sequences of one token and the drafts that it verifies, unless `batch` or
    `tokens` are set. Raises `ConfigError`.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping) or KEY not in additional:
        return None
    settings = additional[KEY]
    if not isinstance(settings, Mapping):
        raise ConfigError(f'additional_config["{KEY}"] = {settings!r}: pass a map; {{}} takes vLLM\'s flags')
    flags, known = vllm_config.offload_config, {key: value for key, value in settings.items() if key != _UNITS}
    if not known.keys() & _CHOOSES:
        backend = flags.offload_backend
        is_prefetch = backend == "prefetch" or (backend == "auto" and flags.prefetch.offload_group_size > 0)
        names, part = (_PREFETCH, flags.prefetch) if is_prefetch else (_UVA, flags.uva)
        if others := known.keys() & {*_PREFETCH, *_UVA} - set(names if getattr(part, names[0]) else ()):
            raise ConfigError(f"{', '.join(sorted(others))}: pass offload_group_size or cpu_offload_gb with it")
        known = {name: getattr(part, name) for name in names} | {"offload_backend": backend} | known
    known.setdefault("pin_memory", not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY)
    known.setdefault("use_uva", not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA)
    known.setdefault("batch", vllm_config.scheduler_config.max_num_seqs)
    known.setdefault("tokens", 1 + _num_drafted(vllm_config))
    known.setdefault("context", max(vllm_config.model_config.max_model_len, known.get("tokens") or 1))
    return OffloadConfig.from_kwargs(**known)


def _num_drafted(vllm_config: Any) -> int:
    """Tokens of a sequence that a step verifies, besides the one that it always computes."""
    return getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0


def why_refused(vllm_config: Any) -> str | None:
    """Reason that an engine of this configuration cannot stream, or None."""
    parallel = vllm_config.parallel_config
    if parallel.enable_eplb or parallel.enable_elastic_ep:
        return "expert load balancing and elastic expert parallelism move weights between ranks while the engine runs"
    if parallel.use_ubatching:
        return "dual batch overlap runs two batches through a layer at once, which breaks the order of the plan"
    if vllm_config.weight_transfer_config is not None:
        return "weight transfer writes weights of a running engine, but not their host copies"
    if parallel.data_parallel_size > 1:  # engines of a dense model do not know of each other
        return "with data parallelism the experts of an engine serve all engines, at the pace of the slowest"
    return None


_WRITES = "it writes new weights into memory that the old ones stream through"
_READS = "it reads weights that are not on the device"
_MOVES = "it moves experts between ranks"
_REFUSED = MappingProxyType(
    dict.fromkeys(("reload_weights", "update_weights", "start_weight_update", "start_draft_weight_update"), _WRITES)
    | dict.fromkeys(("init_weight_transfer_engine", "reset_weights"), _WRITES)
    | dict.fromkeys(("save_sharded_state", "save_tensorized_model", "compute_weight_checksums"), _READS)
    | {"elastic_ep_execute": _MOVES}
)


def _standing_by(ours: Offloader, inner: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a method, and become vLLM's offloader again if it fails: the engine may have set another one by then."""
    try:
        return inner(*args, **kwargs)
    except BaseException:
        ours.stand_by()
        raise


def _load_model(ours: Offloader, inner: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    config = settings_of(wrapper.vllm_config)
    if config is None:
        result = inner(*args, **kwargs)
        current = theirs.get_offloader()
        ours.stand_by()
        if ours.streamers and not isinstance(current, theirs.NoopOffloader | Offloader):
            raise UnsupportedError(
                "vLLM's own offloader and weightstream cannot share a process: run these engines in two processes"
            )
        return result
    if reason := why_refused(wrapper.vllm_config):
        raise UnsupportedError(f"weightstream cannot offload this engine: {reason}. Remove one of the two settings")
    logger.parent = logging.getLogger("vllm")  # so that vLLM's level and handlers apply
    if warning := why_untried(vllm.__version__):
        logger.warning(warning)
    engine = VllmWorker(wrapper.worker, config)
    with ours.building(engine.offloader):
        with processed_on_host(engine.offloader):
            result = inner(*args, **kwargs)
        with set_current_vllm_config(wrapper.vllm_config):
            engine.take_over()
    setattr(wrapper, KEY, engine)
    return result


def _refuse(name: str, reason: str, inner: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    if settings_of(wrapper.vllm_config) is not None:
        raise UnsupportedError(f"{name}() of an engine whose weights stream: {reason}. Start the engine again instead")
    return inner(*args, **kwargs)


def _sleep(inner: Callable[..., Any], wrapper: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    """Level 1 is vLLM's own: weights that the plan has on the device stay there."""
    if level != 1 and settings_of(wrapper.vllm_config) is not None:
        raise UnsupportedError(f"sleep(level={level}) drops the weights that stay on the device: use level 1")
    return inner(level, *args, **kwargs)


def _discard(inner: Callable[..., Any], wrapper: Any, tags: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    """Discard a KV cache; weights stay."""
    if "weights" in tags and settings_of(wrapper.vllm_config) is not None:
        raise UnsupportedError("discard() drops the weights that stay on the device: start the engine again instead")
    return inner(tags, *args, **kwargs)


def _shutdown(ours: Offloader, inner: Callable[..., Any], wrapper: Any) -> None:
    try:
        inner()
    finally:
        setattr(wrapper, KEY, None)
        ours.stand_by()


def _ranks() -> Ranks | None:
    """The ranks of the engine; None if it has one."""
    world = get_world_group()
    return None if world.world_size == 1 else Ranks(world.cpu_group)


def _any_rank_steps(steps: bool) -> bool:
    """Whether any rank of the engine will run a watched step now; `steps`: whether this rank will.

    All ranks call this at the same point. Raises the error of a rank that failed meanwhile.
    """
    ranks = _ranks()
    return steps if ranks is None else any(ranks.gather(steps))


class VllmWorker:
    """One engine's worker, and the offloader of its layers."""

    def __init__(self, worker: Any, config: OffloadConfig) -> None:
        made = offloaders.create_offloader(config)
        # without a budget in the settings, one is computed from the free memory
        self.offloader = made if isinstance(made, offloaders.StreamingOffloader) else offloaders.BudgetOffloader()
        self.offloader.config = config
        self._worker = worker
        self._peak_nbytes = 0  # of activations

    def take_over(self) -> None:
        """Plan, and stream the layers from now on. Raises as `weightstream.offload` does, on all ranks if on one."""
        worker = self._worker
        runner, before = worker.model_runner, allocated(worker.device)
        with ranks_together(_ranks()):
            room = self._stream()
            self._follow()
        if hasattr(runner, "model_memory_usage"):  # vLLM derives the size of the KV cache from it
            runner.model_memory_usage += allocated(worker.device) - before
        self._report(room)

    def _stream(self) -> Room | None:
        """Stream the layers of this rank; returns the memory for them on a GPU."""
        worker, offloader = self._worker, self.offloader
        self._give_back_drafts()
        enter_by_forward(offloader.layers.values())
        is_compiled = self._is_compiled()
        offloader.picks_of = routed_picks
        room = Room(worker, allocated(worker.device)) if is_cuda(worker.device) else None
        if room is not None:
            _move_adapters(offloader.layers.values(), worker.device)
        is_budget_set = offloader.config.has_budget or offloader.config.backend != "none"
        # without a budget in the settings, it is computed from this room; watched steps correct it
        budget_room = None if is_budget_set else room
        if budget_room is not None:
            offloader.config = offloader.config.merged(device_budget=max(1, budget_room.nbytes(self._guess())))
        try:
            offloader.post_init(lambda: self._step(budget_room), is_compiled=is_compiled, in_graphs=self._in_graphs())
        except PlanError as error:
            if budget_room is None:
                raise
            raise PlanError(f"{budget_room.arithmetic(self._peak_nbytes or self._guess())}. {error}") from error
        return room

    def _give_back_drafts(self) -> None:
        layers, target = self.offloader.layers, self._worker.model_runner.get_model()
        modules = {id(module) for module in target.modules()}
        self.offloader.give_back([name for name, layer in layers.items() if id(layer) not in modules])
        shared = {id(parameter) for parameter in target.parameters()}  # such as the embeddings
        own = {id(p): p.nbytes for draft in self._drafts() for p in draft.parameters() if id(p) not in shared}
        if own:
            nbytes = human(sum(own.values()))
            logger.info("weightstream: the draft model stays on the device, %s beside the budget of the layers", nbytes)

    def _drafts(self) -> list[nn.Module]:
        """The draft models of both runners' kinds of speculation."""
        holders = (getattr(self._worker.model_runner, name, None) for name in ("drafter", "speculator"))
        models = (getattr(holder, "model", None) for holder in holders)
        return [model for model in models if isinstance(model, nn.Module)]

    def _is_compiled(self) -> bool:
        mode = self._worker.vllm_config.compilation_config.mode
        return mode is not None and mode.name != "NONE"

    def _in_graphs(self) -> bool:
        mode = self._worker.vllm_config.compilation_config.cudagraph_mode
        return is_cuda(self._worker.device) and mode is not None and mode.name != "NONE"

    def _step(self, budget_room: Room | None) -> int | None:
        """Run a watched step. Returns the budget for weights that follows from its activations, or None if the settings
        have a budget.

        All ranks run equally many steps, as a step of one rank waits for the same step of the others.
        """
        _any_rank_steps(True)
        device = self._worker.device
        if not is_cuda(device):
            self._profile()
            return None
        torch.accelerator.reset_peak_memory_stats(device)
        before = allocated(device)
        self._profile()
        self._peak_nbytes = max(self._peak_nbytes, torch.accelerator.max_memory_allocated(device) - before)
        return None if budget_room is None else budget_room.nbytes(self._peak_nbytes)

    def _follow(self) -> None:
        """Run steps as long as another rank still runs watched ones, which need all ranks."""
        while _any_rank_steps(False):
            self._profile()

    def _profile(self) -> None:
        """Run vLLM's own profiling step, eager."""
        runner = self._worker.model_runner
        modules = [module for model in (runner.get_model(), *self._drafts()) for module in model.modules()]
        with errors_stay_local(), _attributes_kept(modules), _uncompiled(modules), torch.inference_mode():
            runner.profile_run()

    def _guess(self) -> int:
        """Estimated bytes of activations before the first step: those of a layer, and logits in single precision."""
        config = self._worker.vllm_config
        model, scheduler = config.model_config, config.scheduler_config
        hidden, layers = model.get_hidden_size(), self.offloader.layers.values()
        widest = max((p.shape[0] for layer in layers for p in layer.parameters() if p.dim() == 2), default=hidden)
        a_token = model.dtype.itemsize * (2 * widest + _WIDTHS * hidden)
        logits_nbytes = 3 * 4 * scheduler.max_num_seqs * (1 + _num_drafted(config)) * model.get_vocab_size()
        return int(_GUESS * (scheduler.max_num_batched_tokens * a_token + logits_nbytes))

    def _report(self, room: Room | None) -> None:
        """Log the plan, and add its units to the key of compiled code, [Note: the compile cache]."""
        config, streamer = self._worker.vllm_config, self.offloader.streamer
        if streamer is None:
            logger.warning("weightstream offloads nothing: this rank has no layers with parameters")
            return
        plan = streamer.plan
        opened = sorted(unit.name for index, unit in enumerate(plan.manifest.units) if plan.opens(index))
        units = hashlib.sha256("\n".join([weightstream.__version__, *opened]).encode()).hexdigest()[:16]
        added = dict(config.additional_config)
        config.additional_config = added | {KEY: {**added[KEY], _UNITS: units}}
        if not plan.offloaded_nbytes:
            logger.warning("weightstream offloads nothing: all layers (%s) fit", human(plan.manifest.nbytes))
        batch, tokens = self.offloader.config.batch, self.offloader.config.tokens
        each = "" if tokens == 1 else f" of {tokens} tokens"
        prediction = f"predicted step of {batch} sequences{each} {1e3 * plan.step_s:.1f} ms"
        if plan.cached:
            prediction = f"experts: {plan.predictions()['experts']}; {prediction}"
        if room is not None:
            left = human(max(0, room.left(self._peak_nbytes)))
            prediction += f"; KV cache: {human(room.cache_nbytes)} wanted, {left} remain"
        logger.info("weightstream: %s; %s", plan.summary(), prediction)
        report_cache_offload(config)


def _move_adapters(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Move LoRA's own tensors to the device: they were made where the weights of their layer were then, on the host."""
    modules = [module for layer in layers for module in layer.modules() if hasattr(module, "lora_a_stacked")]
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to(device))
            elif isinstance(value, tuple | list) and any(isinstance(t, torch.Tensor) for t in value):
                setattr(module, name, type(value)(t.to(device) if isinstance(t, torch.Tensor) else t for t in value))


@contextmanager
def _attributes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """What is assigned inside to attributes and buffers of these modules is undone.

    vLLM's eager steps keep some results in modules, such as a table of rotations that they cast to the model's dtype.
    Compiled code casts it each time and so computes with more digits, unless an eager step ran before.
    """
    kept = [(held, dict(held)) for module in modules for held in (vars(module), module._buffers)]
    try:
        yield
    finally:
        for held, before in kept:
            held.update(before)


@contextmanager
def _uncompiled(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, vLLM compiles nothing, and runs these modules eager."""
    compiled = [module for module in modules if getattr(module, "do_not_compile", True) is False]
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # vLLM compiles small functions, too
        for module in compiled:
            module.do_not_compile = True  # type: ignore[assignment]
            stack.callback(setattr, module, "do_not_compile", False)
        yield
