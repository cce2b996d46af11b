"""The forwards of one `generate`: those that are alike run as steps, which may be captured. Knows no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

from weightstream.adapters.generation.call import CapturableStreamer
from weightstream.adapters.generation.speculation import SpeculationReport
from weightstream.adapters.hf.ranks import Ranks, common, least
from weightstream.adapters.steps import static_cache
from weightstream.adapters.steps.decode_steps import cache_in
from weightstream.adapters.steps.graph_runner import GraphRunner, run_step
from weightstream.runtime.streamer import forward_patch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport:
    """How the steps after the prompt ran: `replays` of them from a graph; `reason`: why others did not."""

    replays: int = 0
    reason: str | None = None
    speculation: SpeculationReport | None = None
    """How several tokens a pass went; None: there was one a pass."""

    def __str__(self) -> str:
        steps = self._steps()
        return steps if self.speculation is None else f"{steps}; {self.speculation}"

    def _steps(self) -> str:
        captured = f"captured, {self.replays} replays"
        eager = f"eager ({self.reason or 'too few steps to capture one'})"
        return eager if not self.replays else captured if self.reason is None else f"{captured}, then {eager}"


class LongStep:
    """One long step of the streamer, if there is one. It is entered in a `generate` once the order of the units is
    known, and lasts until that ends."""

    def __init__(self, streamer: CapturableStreamer | None, stack: ExitStack) -> None:
        self.is_entered = streamer is None
        self._streamer = streamer
        self._stack = stack
        self._num_forwards = 0  # before the step was entered

    def is_due(self) -> bool:
        """Called before each forward: whether to enter the step now.

        If the order of the units is not known, two eager forwards are watched first: the prompt, and the token after
        it, which may read other weights.
        """
        if self._streamer is None:
            return False
        self._num_forwards += 1
        if self._num_forwards == 2:
            self._streamer.watch()
        return self._num_forwards > 2 or (self._num_forwards == 1 and self._streamer.learned)

    def enter(self) -> str | None:
        """Enter the step. Returns the reason if that fails, else None."""
        self.is_entered = True
        try:
            if self._streamer is not None:
                self._stack.enter_context(self._streamer.step())
        except Exception as error:  # whatever it is, `generate` can run eagerly
            return str(error)
        return None


@contextmanager
def standing_in(model: Any, decoder: Decoder) -> Iterator[None]:
    """Inside, `model.forward` is the decoder's. It keeps the signature of the forward, which transformers reads."""
    patched, forward = model.__dict__.get("forward"), model.forward

    @wraps(forward)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return decoder.run(forward, args, kwargs)

    setattr(stand_in, forward_patch.OUTER, decoder)
    model.__dict__["forward"] = stand_in
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if patched is not None:
            model.__dict__["forward"] = patched


class _Steps(Protocol):
    """The steps of a `generate` that are alike, so that they may be captured."""

    def owns(self, kwargs: dict[str, Any], /) -> bool:
        """Whether a forward is such a step."""

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, /, *, may_capture: bool) -> Any:
        """The output of a step. `may_capture`: it may run in a graph."""


class Decoder:
    """The forwards of one `generate`. `steps` run those that are alike, once the streamer's long step is entered."""

    def __init__(self, runner: GraphRunner | None, step: LongStep, ranks: Ranks | None, steps: _Steps) -> None:
        self._runner = runner  # of graphs; None: the device has none
        self._step = step
        self._ranks = ranks
        self._steps = steps
        self.is_replaying = False  # whether the last forward was a replay

    def report(self) -> DecodeReport:
        runner = self._runner
        if runner is None:
            return DecodeReport()
        if runner.reason is None and not runner.num_replays and runner.num_steps > 2:
            return DecodeReport(reason="no two steps in a row were alike")
        return DecodeReport(replays=runner.num_replays, reason=runner.reason)

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.is_replaying = False
        runner = self._runner
        num_replays = 0 if runner is None else runner.num_replays
        if runner is not None and runner.reason is None and not self._step.is_entered:  # noqa: SIM102 - ranks agree
            if least(self._ranks, self._step.is_due()):
                runner.reason = common(self._ranks, self._step.enter())
        if not self._steps.owns(kwargs):
            return forward(*args, **kwargs)
        output = self._steps.run(forward, args, kwargs, may_capture=self._step.is_entered)
        self.is_replaying = runner is not None and runner.num_replays > num_replays
        return output


class TokenSteps:
    """Steps of one token on a static cache that the prompt has filled."""

    def __init__(self, runner: GraphRunner) -> None:
        self._runner = runner

    def owns(self, kwargs: dict[str, Any]) -> bool:
        cache, ids = cache_in(kwargs), kwargs.get("input_ids")
        if self._runner.reason is not None or not static_cache.is_static(cache) or ids is None or ids.shape[-1] != 1:
            return False
        return all(layer.is_initialized for layer in cache.layers)  # else it is a prompt of one token

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, may_capture: bool) -> Any:
        return run_step(self._runner, forward, args, kwargs, may_capture=may_capture)
