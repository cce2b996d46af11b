"""`offload_pipeline()`: all components of a diffusers pipeline in one budget. Chooses parts; moves no bytes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightstream.adapters import diffusers
from weightstream.adapters.diffusers import Call
from weightstream.assembly import Assembly, Given, assembled
from weightstream.config import OffloadConfig
from weightstream.errors import ConfigError, OffloadError
from weightstream.plan.amounts import human
from weightstream.plan.plan import Plan
from weightstream.plan.prospect import Prospect
from weightstream.plan.schedule import aligned
from weightstream.plan.turns import PipelinePlan, Turn, shares
from weightstream.runtime.backend import Backend
from weightstream.runtime.block import Block
from weightstream.runtime.devices import opened
from weightstream.runtime.stats import Stats
from weightstream.runtime.streamer import Streamer
from weightstream.trace import Trace

logger = logging.getLogger("weightstream")

_STEPS = 28  # that a denoiser is taken to run where nothing tells
_DENOISERS = ("transformer", "transformer_2", "unet", "controlnet", "prior")


def offload_pipeline(
    pipe: Any,
    *,
    device: torch.device | str | None = None,
    device_budget: int | str | None = None,
    example_inputs: Mapping[str, Any] | None = None,
    config: OffloadConfig | None = None,
    **settings: Any,
) -> Any:
    """Stream the weights of all components of a diffusers pipeline through one budget, bit for bit.

    Components run one after another, so they have one ring of device memory in turn; what the budget leaves beside
    that holds weights of the component that runs most often.

    Args:
        pipe: a pipeline whose components are loaded. It stays the same object.
        device: where it computes; default: the current CUDA GPU, else the CPU.
        device_budget: bytes of device memory for the weights of all components; activations come on top. Default: what
            is free, less the most activations that a component takes, and headroom.
        example_inputs: keywords of a call as it will be, such as `{"prompt": …, "height": 768, "num_inference_steps":
            20}`. The call is rehearsed on shapes; default: a call with a prompt alone.
        config: every setting; keyword arguments go over it, as for `offload`.

    Returns:
        The pipeline; what streams it is at `pipe.weightstream`, a `PipelineStreamer`.

    Raises:
        PlanError: the budget cannot work; the message holds the arithmetic.
        ConfigError, OffloadError: as for `offload`.
    """
    config = (config or OffloadConfig()).merged(device_budget=device_budget, **settings).resolved()
    _refuse(pipe, config)
    modules = diffusers.modules_of(pipe)
    with opened(config.device_for(device), config) as backend, torch.no_grad(), ExitStack() as stack:
        calls = _rehearsed(pipe, dict(example_inputs or {}))
        assemblies = {
            name: stack.enter_context(assembled(module, backend, config, Given())) for name, module in modules.items()
        }
        streamers, block = _attached(assemblies, backend, calls)
        found = PipelineStreamer(pipe, streamers, assemblies, block, backend)
        logger.info("%s", found)
    return pipe


def _refuse(pipe: Any, config: OffloadConfig) -> None:
    if not diffusers.is_pipeline(pipe):
        raise ConfigError(f"{type(pipe).__name__} is neither a torch module nor a pipeline of diffusers")
    if isinstance(getattr(pipe, "weightstream", None), PipelineStreamer):
        raise OffloadError(f"{type(pipe).__name__} is offloaded already: call pipe.weightstream.remove() first")
    if config.backend != "none" or config.host_budget is not None or dict(config.max_memory).get("cpu") is not None:
        raise ConfigError("a pipeline takes device_budget; not host_budget, nor the classic settings of layers")
    if not diffusers.modules_of(pipe):
        raise ConfigError(f"{type(pipe).__name__} has no component with weights")


def _rehearsed(pipe: Any, arguments: Mapping[str, Any]) -> list[Call]:
    calls, reason = diffusers.rehearse(pipe, arguments)
    if reason:
        logger.info("the calls of %s are known up to here only (%s): %s", type(pipe).__name__, len(calls), reason)
    return calls


def _heaviest(calls: Sequence[Call]) -> dict[str, Call]:
    """Of each component the kind of call that comes most often, then takes most memory."""
    nums = Counter(id(call.work) for call in calls)
    found: dict[str, Call] = {}
    for call in sorted(calls, key=lambda call: (nums[id(call.work)], call.work.activation_nbytes)):
        found[call.component] = call
    return found


def _attached(
    assemblies: Mapping[str, Assembly], backend: Backend, calls: Sequence[Call]
) -> tuple[dict[str, Streamer], Block]:
    """Plan every component in its share of the budget, and put the plans in force."""
    for name, call in _heaviest(calls).items():
        assemblies[name].prospect = assemblies[name].knowing(call.work, call.kind.what)
        assemblies[name].known = frozenset((call.kind,))
    times = {name: _STEPS if name in _DENOISERS else 1 for name in assemblies}
    times |= Counter(call.component for call in calls)
    prospects = {name: assembly.prospect for name, assembly in assemblies.items()}
    budget = _budget(prospects, calls)
    for name, (share, _) in shares(prospects, times, budget).items():  # a plan within it may depend on more facts
        prospects[name] = assemblies[name].with_facts(prospects[name].sharing(share))
    found = shares(prospects, times, budget)
    plans = {name: plan for name, (_, plan) in found.items()}
    block = Block(backend, max(aligned(plan.ring_nbytes) + plan.buffer_nbytes for plan in plans.values()))
    ring = block.memory.numel()
    streamers: dict[str, Streamer] = {}
    with ExitStack() as on_failure:
        for name, (share, plan) in found.items():
            assemblies[name].prospect = prospects[name].sharing(share._replace(ring_nbytes=ring))
            streamers[name] = assemblies[name].attach(plan, block, diffusers.entries_of(assemblies[name].model))
            on_failure.callback(streamers[name].remove)
        on_failure.pop_all()
    return {name: streamers[name] for name in assemblies}, block


def _budget(prospects: Mapping[str, Prospect], calls: Sequence[Call]) -> int:
    """Bytes for the weights of all: as given, else what the component leaves that needs most beside them."""
    most = max((call.work.activation_nbytes for call in calls), default=0)
    found = []
    for prospect in prospects.values():
        planner = prospect.planners[0]
        demand = replace(planner.demand, activation_nbytes=max(most, planner.demand.activation_nbytes))
        budget = replace(planner, demand=demand).budget
        if budget is not None:
            found.append(budget)
    return min(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStats:
    """What the streamers of a pipeline have done and hold; `held_nbytes` counts the block that they share once."""

    components: Mapping[str, Stats]
    held_nbytes: dict[str, int]


class PipelineStreamer:
    """Streams the weights of a pipeline's components. Made by `offload_pipeline`; a context manager that ends with
    `remove()`. `components` are the streamers, by the names that the pipeline has for them."""

    def __init__(
        self,
        pipe: Any,
        components: Mapping[str, Streamer],
        assemblies: Mapping[str, Assembly],
        block: Block,
        backend: Backend,
    ) -> None:
        self.components = dict(components)
        self._pipe, self._assemblies, self._block, self._backend = pipe, assemblies, block, backend
        self._detach = diffusers.attach(pipe, self, backend.device, self._matching())

    @property
    def device(self) -> torch.device:
        """Where the components compute."""
        return self._backend.device

    def _matching(self) -> dict[str, str]:
        """For each way to offload of diffusers the budget that takes as much."""
        manifests = [streamer.plan.manifest for streamer in self.components.values()]
        blocks = [unit.nbytes for manifest in manifests for unit in manifest.units]
        return {
            "enable_model_cpu_offload": human(max(manifest.nbytes for manifest in manifests)),
            "enable_sequential_cpu_offload": human(max(blocks)),
            "enable_group_offload": human(2 * max(blocks)),
        }

    def plan(
        self, *, steps: int | None = None, height: int | None = None, width: int | None = None, **call: Any
    ) -> PipelinePlan:
        """What a call of the pipeline is predicted to take, before it runs: a rehearsal on shapes.

        Args:
            steps: denoising steps (`num_inference_steps`); default: the pipeline's.
            height, width: of the image, in pixels; default: the pipeline's.
            call: more keywords of the call, such as `prompt` or `num_images_per_prompt`.

        Raises:
            ConfigError: the pipeline does not take these keywords.
            OffloadError: its calls cannot be told from shapes, or it is not offloaded any more.
        """
        if not self.components:
            raise OffloadError("plan() after remove(): nothing streams any more")
        named = {"num_inference_steps": steps, "height": height, "width": width}
        calls, reason = diffusers.rehearse(self._pipe, call | {k: v for k, v in named.items() if v is not None})
        if reason:
            raise OffloadError(f"the calls of {type(self._pipe).__name__} cannot be told before it runs: {reason}")
        priced: dict[int, Plan] = {}
        turns: list[Turn] = []
        for first, num in diffusers.runs(calls):
            if id(first.work) not in priced:
                priced[id(first.work)] = self._priced(first)
            plan = priced[id(first.work)]
            is_next = bool(turns) and turns[-1].component == first.component
            cold_s = 0.0 if is_next else self._cold_s(first.component, plan)
            turns.append(Turn(component=first.component, entry=first.kind.what, num=num, plan=plan, cold_s=cold_s))
        plans = {name: streamer.plan for name, streamer in self.components.items()}
        return PipelinePlan(turns=tuple(turns), plans=plans, block_nbytes=self._block.memory.numel())

    def _priced(self, call: Call) -> Plan:
        """The plan in force as it is predicted for a call."""
        plan = self.components[call.component].plan
        prospect = self._assemblies[call.component].knowing(call.work, call.kind.what)
        index = prospect.grain_of(plan.manifest)
        order = prospect.grains[index].order
        return prospect.planners[index].priced(plan if order == plan.manifest.order else plan.reordered(order))

    def _cold_s(self, component: str, plan: Plan) -> float:
        """Seconds of the copy that a turn begins with, which nothing hides."""
        profile = self._assemblies[component].prospect.planners[0].machine.profile
        return profile.copy_s(plan.unit_nbytes[plan.first[0]]) if plan.first else 0.0

    def stats(self) -> PipelineStats:
        """Counters and bytes held, as of now."""
        found = {name: streamer.stats() for name, streamer in self.components.items()}
        held = Counter[str]()
        for name, stats in found.items():
            plan = self.components[name].plan
            held.update(stats.held_nbytes)
            held["device"] -= plan.ring_nbytes + plan.buffer_nbytes
        held["device"] += self._block.memory.numel()
        return PipelineStats(components=found, held_nbytes=dict(held))

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """As `Streamer.trace`, of all components; the names of spans begin with that of the component."""
        whole = Trace(f"{type(self._pipe).__name__} on {self.device}")
        with ExitStack() as stack:
            traces = {name: stack.enter_context(s.trace()) for name, s in self.components.items()}
            yield whole
        for name, trace in traces.items():
            whole.spans.extend(replace(span, name=f"{name}: {span.name}") for span in trace.spans)
        whole.spans.sort(key=lambda span: span.begin_s)

    def changing(self, change: Callable[[], Any]) -> Any:
        """Runs what computes with adapters and weights between steps, such as fusing: where each weight is then."""
        for streamer in self.components.values():
            streamer.place_added(None)
        try:
            return change()
        finally:
            for streamer in self.components.values():
                streamer.place_added(self.device)

    def remove(self) -> None:
        """Bring every weight back to where it was and set the pipeline free; may be called twice."""
        for streamer in self.components.values():
            streamer.remove()
        self._detach()
        self.components, self._assemblies = {}, {}
        self._block.close()
        self._backend.close()

    def __enter__(self) -> PipelineStreamer:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the pipeline is a plain one

    def __str__(self) -> str:
        lines = [f"{name}: {streamer.plan.summary()}" for name, streamer in self.components.items()]
        return "\n".join([*lines, f"one ring of {human(self._block.memory.numel())} for all"])
