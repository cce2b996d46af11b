"""vLLM's plug-in: engines whose `additional_config` has a key "weightstream" stream their layers.

[Note: one point of attachment]
All executors (in this process, in others, through Ray) drive a `WorkerWrapperBase`, which passes to its worker what it
lacks. Methods that are added to it stand around those of every worker, of both model runners, from 0.24 on. vLLM's own
calls of `wrap_modules`, `sync_prev_onload` and `join_after_forward` reach the offloader that is set before the model is
built. Its `post_init` comes from some runners only, and before the model is whole: the layers are taken over when
`load_model` has ended.

[Note: the compile cache]
vLLM keeps what it compiled under a hash of its configuration, in which `additional_config` is. Compiled code waits for
the units that were there when it was traced. So the units of the plan are put into `additional_config` before anything
is compiled: a plan with others, as a different GPU may have, does not find that code.
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
from torch import nn
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.offloader import base as theirs

import weightstream
from weightstream.adapters.hf.ranks import Ranks, errors_stay_local, ranks_together
from weightstream.api import offloaders
from weightstream.errors import ConfigError, PlanError, UnsupportedError
from weightstream.integrations.vllm.experts import enter_by_forward
from weightstream.integrations.vllm.memory import Room, allocated, is_cuda
from weightstream.plan.units import human
from weightstream.runtime.streamer.streamer import Streamer
from weightstream.settings.config import OffloadConfig

logger = logging.getLogger("weightstream")

KEY = "weightstream"  # in `additional_config`
_UNITS = "units"  # in its settings, [Note: the compile cache]
_PREFETCH = ("offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_params")
_UVA = ("cpu_offload_gb", "cpu_offload_params")
_CHOOSES = frozenset(
    ("device_budget", "max_memory", "offload_backend", "prefetch", "uva", "offload_group_size", "cpu_offload_gb")
)
_WIDTHS = 8  # activations of hidden size that are alive in a layer beside its widest, twice; a guess
_GUESS = 1.5


def register() -> None:
    """The entry point of `vllm.general_plugins`; may be called twice. Changes no engine that does not ask for it."""
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
    """Let `method(inner, wrapper, …)` stand around a method of workers; `inner` is the wrapper's own, if it has one."""
    inner = kind.__dict__.get(name) or (lambda wrapper, *args, **kw: getattr(wrapper.worker, name)(*args, **kw))
    setattr(kind, name, lambda wrapper, *args, **kw: method(partial(inner, wrapper), wrapper, *args, **kw))


class Offloader(theirs.BaseOffloader):  # type: ignore[misc]
    """What vLLM calls: hands layers to the engine that is being built, and graphs of all engines to their streamers.

    vLLM knows one offloader per process, and an engine's graphs do not tell whose they are. Making compute wait for the
    copies of another engine, too, is right.
    """

    def __init__(self) -> None:
        self._engines: list[ref[offloaders.StreamingOffloader]] = []
        self._built: offloaders.BaseOffloader = offloaders.NoopOffloader()

    @property
    def streamers(self) -> list[Streamer]:
        """Of all engines, in the order in which they were built."""
        return [engine.streamer for engine in self._alive() if engine.streamer is not None]

    @property
    def supports_tower_offload(self) -> bool:
        return self._built.supports_tower_offload

    @contextmanager
    def building(self, offloader: offloaders.StreamingOffloader) -> Iterator[None]:
        """Be vLLM's offloader; the model that is built inside is this one's."""
        self._engines = [*(engine for engine in self._engines if engine() is not None), ref(offloader)]
        self._built = offloader
        theirs.set_offloader(self)
        try:
            yield
        except BaseException:
            self._engines.pop()
            raise
        finally:
            self._built = offloaders.NoopOffloader()

    def wrap_modules(self, modules_generator: Iterator[nn.Module], prefix: str = "") -> list[nn.Module]:
        return self._built.wrap_modules(modules_generator, prefix)

    def sync_prev_onload(self) -> None:
        for engine in self._alive():
            engine.sync_prev_onload()

    def join_after_forward(self) -> None:
        for engine in self._alive():
            engine.join_after_forward()

    def _alive(self) -> Iterator[offloaders.StreamingOffloader]:
        return (engine for engine in (found() for found in self._engines) if engine is not None)

    def stand_by(self) -> None:
        """Be vLLM's offloader as long as an engine streams: runners set another as they start or end."""
        if self.streamers:
            theirs.set_offloader(self)
        elif theirs.get_offloader() is self:
            theirs.set_offloader(theirs.NoopOffloader())


def settings_of(vllm_config: Any) -> OffloadConfig | None:
    """The settings of an engine, None where it does not ask for weightstream. Without any, vLLM's own flags hold.

    A step is planned for `max_num_seqs` sequences, unless `batch` or `tokens` say otherwise. Raises `ConfigError`.
    """
    asked = vllm_config.additional_config
    if not isinstance(asked, Mapping) or KEY not in asked:
        return None
    given = asked[KEY]
    if not isinstance(given, Mapping):
        raise ConfigError(f'additional_config["{KEY}"] = {given!r}: give a map of settings; {{}} takes vLLM\'s flags')
    flags, known = vllm_config.offload_config, {key: value for key, value in given.items() if key != _UNITS}
    if not known.keys() & _CHOOSES:
        backend = flags.offload_backend
        is_prefetch = backend == "prefetch" or (backend == "auto" and flags.prefetch.offload_group_size > 0)
        names, part = (_PREFETCH, flags.prefetch) if is_prefetch else (_UVA, flags.uva)
        if others := known.keys() & {*_PREFETCH, *_UVA} - set(names if getattr(part, names[0]) else ()):
            raise ConfigError(f"{', '.join(sorted(others))}: give offload_group_size or cpu_offload_gb with it")
        known = {name: getattr(part, name) for name in names} | {"offload_backend": backend} | known
    known.setdefault("pin_memory", not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY)
    known.setdefault("use_uva", not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA)
    known.setdefault("batch", vllm_config.scheduler_config.max_num_seqs)
    known.setdefault("context", max(vllm_config.model_config.max_model_len, known.get("tokens") or 1))
    return OffloadConfig.from_kwargs(**known)


def why_refused(vllm_config: Any) -> str | None:
    """Why an engine of this configuration cannot stream, None if it can."""
    parallel = vllm_config.parallel_config
    if parallel.enable_eplb or parallel.enable_elastic_ep:
        return "expert load balancing and elastic expert parallelism move weights between ranks while the engine runs"
    if parallel.use_ubatching:
        return "dual batch overlap runs two batches through a layer at once, out of the order of the plan"
    if vllm_config.weight_transfer_config is not None:
        return "weight transfer writes weights of a running engine past their homes"
    if parallel.data_parallel_size > 1:  # engines of a dense model know nothing of each other
        return "with data parallelism the experts of one engine work for all, at the pace of the slowest"
    return None


_WRITES = "it writes new weights into memory through which the old ones stream"
_READS = "it reads weights that are not on the device"
_MOVES = "it moves experts between ranks"
_REFUSED = MappingProxyType(
    dict.fromkeys(("reload_weights", "update_weights", "start_weight_update", "start_draft_weight_update"), _WRITES)
    | dict.fromkeys(("init_weight_transfer_engine", "reset_weights"), _WRITES)
    | dict.fromkeys(("save_sharded_state", "save_tensorized_model", "compute_weight_checksums"), _READS)
    | {"elastic_ep_execute": _MOVES}
)


def _standing_by(ours: Offloader, inner: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """An engine that fails to start may have set another offloader by then."""
    try:
        return inner(*args, **kwargs)
    except BaseException:
        ours.stand_by()
        raise


def _load_model(ours: Offloader, inner: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    config = settings_of(wrapper.vllm_config)
    if config is None:
        result = inner(*args, **kwargs)
        found = theirs.get_offloader()
        ours.stand_by()
        if ours.streamers and not isinstance(found, theirs.NoopOffloader | Offloader):
            raise UnsupportedError(
                "vLLM's own offloader in a process in which weightstream offloads: give each its own"
            )
        return result
    if reason := why_refused(wrapper.vllm_config):
        raise UnsupportedError(f"weightstream cannot offload this engine: {reason}. Remove one of the two settings")
    logger.parent = logging.getLogger("vllm")  # its level, and its handlers
    engine = VllmWorker(wrapper.worker, config)
    with ours.building(engine.offloader):
        result = inner(*args, **kwargs)
        with set_current_vllm_config(wrapper.vllm_config):
            engine.take_over()
    setattr(wrapper, KEY, engine)
    return result


def _refuse(name: str, reason: str, inner: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    if settings_of(wrapper.vllm_config) is not None:
        raise UnsupportedError(f"{name}() of an engine whose weights stream: {reason}. Start the engine anew")
    return inner(*args, **kwargs)


def _sleep(inner: Callable[..., Any], wrapper: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    """What the plan has on the device stays there at level 1."""
    if level != 1 and settings_of(wrapper.vllm_config) is not None:
        raise UnsupportedError(f"sleep(level={level}) drops weights that stay on the device: use level 1")
    return inner(level, *args, **kwargs)


def _discard(inner: Callable[..., Any], wrapper: Any, tags: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    """A KV cache may go."""
    if "weights" in tags and settings_of(wrapper.vllm_config) is not None:
        raise UnsupportedError("discard() of weights drops those that stay on the device: start the engine anew")
    return inner(tags, *args, **kwargs)


def _shutdown(ours: Offloader, inner: Callable[..., Any], wrapper: Any) -> None:
    try:
        inner()
    finally:
        setattr(wrapper, KEY, None)
        ours.stand_by()


def _ranks() -> Ranks | None:
    """Those of the engine; None: it has one."""
    world = get_world_group()
    return None if world.world_size == 1 else Ranks(world.cpu_group)


def _asks_any_rank(asks: bool) -> bool:
    """Whether any rank of the engine asks; all are asked at once. Raises the error of one that failed meanwhile."""
    ranks = _ranks()
    return asks if ranks is None else any(ranks.gather(asks))


class VllmWorker:
    """One engine's worker, and the offloader of its layers."""

    def __init__(self, worker: Any, config: OffloadConfig) -> None:
        found = offloaders.create_offloader(config)
        # without a budget there will be one
        self.offloader = found if isinstance(found, offloaders.StreamingOffloader) else offloaders.BudgetOffloader()
        self.offloader.config = config
        self._worker = worker
        self._peak_nbytes = 0  # of activations

    def take_over(self) -> None:
        """Plan, and let the layers stream from now on. Raises as `weightstream.offload`, on all ranks if on one."""
        worker = self._worker
        runner, before = worker.model_runner, allocated(worker.device)
        with ranks_together(_ranks()):
            room = self._stream()
            self._follow()
        if hasattr(runner, "model_memory_usage"):  # of which the KV cache's size follows
            runner.model_memory_usage += allocated(worker.device) - before
        self._tell(room)

    def _stream(self) -> Room | None:
        """Let the layers of this rank stream; returns the room that they have on a GPU."""
        worker, offloader = self._worker, self.offloader
        self._give_back_drafts()
        enter_by_forward(offloader.layers.values())
        room = Room(worker, allocated(worker.device)) if is_cuda(worker.device) else None
        mode = worker.vllm_config.compilation_config.mode
        is_compiled = mode is not None and mode.name != "NONE"
        if room is not None:
            _move_adapters(offloader.layers.values(), worker.device)
        asked = None if offloader.config.has_budget or offloader.config.backend != "none" else room
        if asked is not None:
            offloader.config = offloader.config.merged(device_budget=max(1, asked.nbytes(self._guess())))
        try:
            offloader.post_init(lambda: self._step(asked), is_compiled=is_compiled, in_graphs=self._in_graphs())
        except PlanError as error:
            if asked is None:
                raise
            raise PlanError(f"{asked.arithmetic(self._peak_nbytes or self._guess())}. {error}") from error
        return room

    def _give_back_drafts(self) -> None:
        layers = self.offloader.layers
        modules = {id(module) for module in self._worker.model_runner.get_model().modules()}
        if others := [name for name, layer in layers.items() if id(layer) not in modules]:
            logger.info("%d layers are of a draft model, which stays on the device", len(others))
            self.offloader.give_back(others)

    def _in_graphs(self) -> bool:
        mode = self._worker.vllm_config.compilation_config.cudagraph_mode
        return is_cuda(self._worker.device) and mode is not None and mode.name != "NONE"

    def _step(self, asked: Room | None) -> int | None:
        """A step that is watched; returns what the device has for weights, where that is asked.

        All ranks run as many, as the steps of one wait for those of the others.
        """
        _asks_any_rank(True)
        device = self._worker.device
        if not is_cuda(device):
            self._profile()
            return None
        torch.accelerator.reset_peak_memory_stats(device)
        before = allocated(device)
        self._profile()
        self._peak_nbytes = max(self._peak_nbytes, torch.accelerator.max_memory_allocated(device) - before)
        return None if asked is None else asked.nbytes(self._peak_nbytes)

    def _follow(self) -> None:
        """Run steps with ranks that learn still."""
        while _asks_any_rank(False):
            self._profile()

    def _profile(self) -> None:
        """Run vLLM's own profiling step, eager."""
        runner = self._worker.model_runner
        drafts = (getattr(getattr(runner, name, None), "model", None) for name in ("drafter", "speculator"))
        models = [runner.get_model(), *(draft for draft in drafts if isinstance(draft, nn.Module))]
        with errors_stay_local(), _uncompiled(models), torch.inference_mode():
            runner.profile_run()

    def _guess(self) -> int:
        """Bytes of activations, before a step has shown them: of a layer, and of the logits in single precision."""
        config = self._worker.vllm_config
        model, scheduler = config.model_config, config.scheduler_config
        hidden, layers = model.get_hidden_size(), self.offloader.layers.values()
        widest = max((p.shape[0] for layer in layers for p in layer.parameters() if p.dim() == 2), default=hidden)
        a_token = model.dtype.itemsize * (2 * widest + _WIDTHS * hidden)
        logits_nbytes = 3 * 4 * scheduler.max_num_seqs * model.get_vocab_size()
        return int(_GUESS * (scheduler.max_num_batched_tokens * a_token + logits_nbytes))

    def _tell(self, room: Room | None) -> None:
        """Write the plan to the log, and put its units into the compile key, [Note: the compile cache]."""
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
        batch = self.offloader.config.batch
        told = f"predicted step of {batch} sequences {1e3 * plan.step_s:.1f} ms"
        if room is not None:
            left = human(max(0, room.left(self._peak_nbytes)))
            told += f"; KV cache: {human(room.cache_nbytes)} asked for, {left} remain"
        logger.info("weightstream: %s; %s", plan.summary(), told)


def _move_adapters(layers: Iterable[nn.Module], device: torch.device) -> None:
    """LoRA's own tensors were made where the weights of their layer were then: on the host."""
    modules = [module for layer in layers for module in layer.modules() if hasattr(module, "lora_a_stacked")]
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to(device))
            elif isinstance(value, tuple | list) and any(isinstance(t, torch.Tensor) for t in value):
                setattr(module, name, type(value)(t.to(device) if isinstance(t, torch.Tensor) else t for t in value))


@contextmanager
def _uncompiled(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, vLLM compiles nothing and runs the models eager."""
    modules = [module for model in models for module in model.modules()]
    compiled = [module for module in modules if getattr(module, "do_not_compile", True) is False]
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # small functions are compiled, too
        for module in compiled:
            module.do_not_compile = True  # type: ignore[assignment]
            stack.callback(setattr, module, "do_not_compile", False)
        yield
