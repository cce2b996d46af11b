"""The decode steps of one text, run eagerly, captured or replayed from graphs. Knows no weights and no loop.

A graph repeats kernels, not Python. So a step is replayed only if all that its Python looks at is as it was in the
capture: shapes, objects and plain values of the arguments, addresses in the cache, and whether a sliding window is
full. The number of tokens that a window has counted is advanced by hand; a forward that reads this number runs eagerly,
as the graph would keep the value of its capture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from weightstream.adapters.hf import private
from weightstream.adapters.hf.ranks import Ranks, common, least
from weightstream.adapters.steps import static_cache
from weightstream.adapters.steps.decode_steps import cache_in
from weightstream.errors import WeightstreamError
from weightstream.runtime.streamer.read_watch import OperatorMode

_COUNT = private.STATIC_WINDOW_COUNT
_INDEXED = tuple(getattr(torch.ops.aten, name) for name in ("index", "index_put", "index_put_", "_index_put_impl_"))
_COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy)
_STREAMLESS = frozenset(("quanto.unpack",))  # its kernel is queued in the default stream, whatever the current one is
_WAITING = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class LaunchableGraph(Protocol):
    """A graph of a device, such as `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Queue its work."""


class Recorder(NamedTuple):
    """How a graph is made, recorded and launched."""

    new: Callable[[], LaunchableGraph]
    record: Callable[[LaunchableGraph], AbstractContextManager[object]]
    replay: Callable[[LaunchableGraph], None]


class _Signature(NamedTuple):
    """All that the Python code of a step may depend on: steps of equal signatures queue the same kernels."""

    spec: TreeSpec
    leaves: list[object]  # of the arguments
    layers: list[dict[str, object]]  # of the cache

    @classmethod
    def of(cls, spec: TreeSpec, leaves: Sequence[object], layers: Sequence[Any]) -> _Signature:
        return cls(spec, [_sign(leaf) for leaf in leaves], [_layer_state(layer) for layer in layers])


class _Readiness(IntEnum):
    """What can be done with a step. Ranks do what all of them can do: a graph repeats their collectives as well."""

    WATCH = 1  # no step that was watched was alike
    CAPTURE = 2  # one was
    REPLAY = 3  # a captured step was alike


class GraphRunner:
    """Runs decode steps: of steps that are alike the first is watched, the second captured, all others replayed.

    `num_graphs`: as many kinds of steps are known at a time, such as steps of one token and of two.
    """

    def __init__(self, recorder: Recorder, device: torch.device, ranks: Ranks | None, num_graphs: int = 1) -> None:
        self._recorder = recorder
        self._device = device
        self._ranks = ranks
        self._watched: deque[_Signature] = deque(maxlen=num_graphs)
        self._captured: deque[_CapturedStep] = deque(maxlen=num_graphs)
        self.num_steps = 0
        self.num_replays = 0
        self.reason: str | None = None  # why a step cannot be captured; all later ones run eagerly, too

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any, layers: Sequence[Any]) -> Any:
        """The output of `forward` for these arguments. `layers` are those of the static cache among them."""
        self.num_steps += 1
        leaves, spec = tree_flatten((args, kwargs))
        signature = _Signature.of(spec, leaves, layers)
        captured = next((step for step in self._captured if step.signature == signature), None)
        readiness = _Readiness(least(self._ranks, self._readiness(signature, captured)))
        if readiness is _Readiness.WATCH:
            self._watched.append(signature)
            with _HostWatch() as watch:  # type: ignore[no-untyped-call]
                output = forward(*args, **kwargs)
            self.reason = common(self._ranks, watch.found)
            return output
        if readiness is _Readiness.CAPTURE:
            self.reason = common(self._ranks, self._capture(signature, forward, leaves, layers))
            captured = self._captured[-1] if self._captured else None
        if captured is None or self.reason is not None:
            self._captured.clear()
            return forward(*args, **kwargs)
        self.num_replays += 1
        return captured.replay(leaves)

    def _readiness(self, signature: _Signature, captured: _CapturedStep | None) -> _Readiness:
        if captured is not None:
            return _Readiness.REPLAY
        return _Readiness.CAPTURE if signature in self._watched else _Readiness.WATCH

    def _capture(
        self, signature: _Signature, forward: Callable[..., Any], leaves: Sequence[Any], layers: Sequence[Any]
    ) -> str | None:
        """Capture the step. Returns the reason if that fails, else None.

        Not the error: its traceback would keep the tensors of the failed capture alive.
        """
        if len(self._captured) == self._captured.maxlen:
            self._captured.popleft()  # its memory is freed before the next graph takes some
        errors: list[Exception] = []  # a capture that fails at its end hides the error that broke it

        def step() -> Any:
            try:
                return forward(*own_args, **own_kwargs)
            except Exception as error:
                errors.append(error)
                raise

        try:
            inputs = [leaf.to(self._device, copy=True) if torch.is_tensor(leaf) else leaf for leaf in leaves]
            own_args, own_kwargs = tree_unflatten(inputs, signature.spec)
            self._captured.append(_CapturedStep(self._recorder, signature, inputs, step, layers))
        except Exception as error:  # whatever the forward, the capture or the driver raises
            reason = _reason([*errors, error][0])
            errors.clear()  # their tracebacks hold this frame
            return reason
        return None


def run_step(
    runner: GraphRunner | None, forward: Callable[..., Any], args: Any, kwargs: Any, *, may_capture: bool
) -> Any:
    """The output of a step on a static cache, from a graph where there can be one."""
    if runner is None or runner.reason is not None or not may_capture:
        return forward(*args, **kwargs)
    return runner.run(forward, args, kwargs, cache_in(kwargs).layers)


def _reason(error: Exception) -> str:
    message = str(error).partition("\n")[0]
    return message if isinstance(error, WeightstreamError) else f"the capture failed: {type(error).__name__}: {message}"


class _WindowAdvance(NamedTuple):
    """A sliding window of the cache, and the number of tokens that a step adds to its count."""

    window: Any
    num_tokens: int


class _CapturedStep:
    """A step in a graph: the tensors that it reads its arguments from, its output, and the counts of its windows."""

    def __init__(
        self,
        recorder: Recorder,
        signature: _Signature,
        inputs: Sequence[Any],
        step: Callable[[], Any],
        layers: Sequence[Any],
    ) -> None:
        self.signature = signature
        self._inputs = inputs
        self._recorder = recorder
        self._graph = recorder.new()
        windows = [layer for layer in layers if _COUNT in vars(layer)]
        with static_cache.guarded(windows) as counts, recorder.record(self._graph):
            self._output = step()
            self._advances = [
                _WindowAdvance(window, getattr(window, _COUNT) - count)
                for window, count in zip(windows, counts, strict=True)
            ]

    def replay(self, leaves: Sequence[Any]) -> Any:
        """The output for these leaves of the arguments, copied: the next replay overwrites the original."""
        for own, leaf in zip(self._inputs, leaves, strict=True):
            if torch.is_tensor(leaf):
                own.copy_(leaf)
        self._recorder.replay(self._graph)
        for window, num_tokens in self._advances:
            setattr(window, _COUNT, getattr(window, _COUNT) + num_tokens)
        return tree_map_only(torch.Tensor, torch.clone, self._output)


def _sign(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return leaf if isinstance(leaf, (bool, int, float, str, torch.dtype, type(None))) else id(leaf)


def _layer_state(layer: Any) -> dict[str, object]:
    """Attributes of a layer of the cache that a step's Python may look at: values, and tensors by address."""
    state = {name: v.data_ptr() if isinstance(v, torch.Tensor) else v for name, v in vars(layer).items()}
    # of a sliding window's count `update` only uses whether the window is full
    return state | {_COUNT: state.get(_COUNT, -1) >= layer.max_cache_len}


class _HostWatch(OperatorMode):
    """Finds an operator that a capture forbids, or that a graph would leave out, before it is captured.

    A capture that fails half-way leaves PyTorch's stream, memory pool and random state broken.
    """

    found: str | None = None  # the reason against a capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # wrapped tensors: the operators of their class on the inner ones are seen later
        output = func(*args, **(kwargs or {}))
        if self.found is None and _waits(func, args, output):
            self.found = f"the model waits for the device in {func}"
        elif self.found is None and str(getattr(func, "overloadpacket", "")) in _STREAMLESS:
            self.found = f"{func} ignores CUDA streams, so that a graph would compute without it"
        return output


def _waits(func: Any, args: Any, output: Any) -> bool:
    """Whether the host waits for the device: for a value, a number of elements, or a copy of pageable memory."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _INDEXED:
        if len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu" and not any(args[3:4]):
            return False  # a fill by a mask, which needs no number of elements
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if packet in _COPIES:
        sides = (output, args[packet is torch.ops.aten.copy_])
        host = [side for side in sides if side.device.type == "cpu"]
        return len(host) == 1 and not host[0].is_pinned()
    return bool(_WAITING & set(getattr(func, "tags", ())))
