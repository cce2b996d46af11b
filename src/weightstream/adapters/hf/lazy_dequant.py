"""Quantised weights that their library would unpack for good: here each module unpacks its own while it runs.

compressed-tensors unpacks a whole model at its first forward, transformers unpacks float8 as it loads where it finds no
kernel, and diffusers' layerwise casting gives a module other weights around each of its forwards. Here the packed
tensors stay the parameters, so they are what is held and moved. From the begin of a forward to its end the module also
has the tensors that the library's own functions make of them. Knows no plan.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from weightstream.adapters.hf import gptq, private_quantised
from weightstream.adapters.hf.packed_matrices import packed_matrices
from weightstream.runtime.streamer import forward_patch
from weightstream.runtime.tensors.pytree import tensors_in

Restore = Callable[[], None]
Unpacked = Callable[[nn.Module, torch.Tensor], Mapping[str, Any]]  # (module, input) -> weights by name, or substitutes
_CASTING = "layerwise_casting"  # the name of a hook of diffusers
_UNPACKS = "_weightstream_unpacks"  # the name of a forward of ours


def unpack_late(model: nn.Module, device: torch.device) -> Restore:
    """Have every module of the model unpack its own weights, on the device where the model is going to compute.

    Returns a function that undoes it.
    """
    gptq.refuse_kernels(model, device)
    has_kernels = functools.cache(lambda: private_quantised.has_fp8_kernels(device))  # a call may ask the hub
    with ExitStack() as undo:
        for module in model.modules():
            private_quantised.refuse_swizzled(module)
            _without_kernels(module, device, has_kernels)
            for found in (
                _whole_model(module),
                _compressed(module),
                _cast(module),
                _packed_for_cpu(module, device),
                gptq.without_caches(module),
            ):
                if found is not None:
                    undo.callback(found)
        return undo.pop_all().close


@contextmanager
def _showing(module: nn.Module, tensors: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the module has these tensors, which hide its own ones of the same names."""
    module.__dict__.update(tensors)
    try:
        yield
    finally:
        for name in tensors:
            module.__dict__.pop(name, None)  # another thread may have removed them


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def _whole_model(module: nn.Module) -> Restore | None:
    """Keep the library from unpacking all modules below this one."""
    handle = module.__dict__.get("ct_decompress_hook")
    hooks = module._forward_pre_hooks
    if handle is None or handle.id not in hooks:
        return None
    hook = hooks.pop(handle.id)
    # a copy of the module has the hook again
    copied = forward_patch.copied_as(module, "_forward_pre_hooks", lambda now: OrderedDict({handle.id: hook, **now}))

    def undo() -> None:
        copied()
        hooks[handle.id] = hook

    return undo


def _compressed(module: nn.Module) -> Restore | None:
    status = module.__dict__.get("quantization_status")
    if status is None or status.name != "COMPRESSED":
        return None
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.utils import get_direct_state_dict

    scheme: Any = module.quantization_scheme
    decompress = BaseCompressor.get_value_from_registry(scheme.format.value).decompress
    # the host reads the shape: from a tensor on a GPU it would have to wait for it, which no graph allows
    sizes = module._parameters.get("weight_shape")
    shape = {} if sizes is None else {"weight_shape": torch.Size(sizes.tolist())}
    return _unpacking(
        module, lambda self, _: {"weight": decompress(get_direct_state_dict(self) | shape, scheme)["weight"]}
    )


def _unpacking(module: nn.Module, unpacked: Unpacked) -> Restore:
    """Have `unpacked(module, input)` make a module's weights, by name, in each of its forwards."""
    lock = threading.RLock()  # the tensors are for one forward at a time

    def run(self: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with lock, _showing(self, unpacked(self, next(tensors_in((args, kwargs))))):
            return forward(*args, **kwargs)

    return forward_patch.wrap_forward(module, run)


# -- fine-grained float8 and mxfp4 of transformers ---------------------------------------------------------------------


class UnpackingForward:
    """The forward of a module that the library cannot run packed. Copies and pickles of the module have it, too.

    Compilers do not trace it: the library's functions, or kernels, unpack to the bits of eager code.
    """

    __name__ = _UNPACKS

    def __init__(self, module: nn.Module, unpacked: Unpacked, replaced: Callable[..., Any] | None = None) -> None:
        self._module = module
        self._unpacked = unpacked
        self._replaced = replaced  # the forward that the instance had
        self._lock = threading.RLock()  # the tensors are for one forward at a time
        self.__wrapped__ = replaced or MethodType(type(module).forward, module)  # gives this one its signature

    def runs_class_of(self, module: nn.Module) -> bool:
        """Whether it runs the forward of the class of this module."""
        return self._module is module and self._replaced is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _eager(self._run, args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        module = self._module
        with self._lock, _showing(module, self._unpacked(module, next(tensors_in((args, kwargs))))):
            if self._replaced is not None:
                return self._replaced(*args, **kwargs)
            return type(module).forward(module, *args, **kwargs)

    @property
    def __func__(self) -> _Unbound:
        return _Unbound(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnpackingForward, (self._module, self._unpacked, self._replaced)


@forward_patch.untraced("this module unpacks its weights in its forward. It runs eager: leave out fullgraph=True")
def _eager(run: Callable[..., Any], *args: Any) -> Any:
    return torch.compiler.disable(run)(*args)


class _Unbound:
    """The function of a forward, for libraries that call it with the module. It is copied with the module."""

    def __init__(self, forward: UnpackingForward) -> None:
        self._forward = forward

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _without_kernels(module: nn.Module, device: torch.device, has_kernels: Callable[[], bool]) -> None:
    """Have a module unpack its weights where the library finds no kernels for packed ones.

    This is not undone, as the library cannot run a packed module without kernels.
    """
    forward = module.__dict__.get("forward")
    is_done = getattr(forward, "__name__", "") == _UNPACKS
    if packed_matrices(module) and not is_done:  # raises an error if leaves are missing
        module.__dict__["forward"] = UnpackingForward(module, _packed_matrices, forward)
        return
    if is_done or not private_quantised.fp8_use(module).is_linear or has_kernels():
        return
    module.__dict__["forward"] = UnpackingForward(module, _fp8_unpacked, forward)


def _packed_matrices(module: nn.Module, x: torch.Tensor) -> Mapping[str, Any]:
    return packed_matrices(module)


def _fp8_unpacked(module: nn.Module, x: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"weight": private_quantised.fp8_unpacked(module, x.dtype)}


# -- layerwise casting of diffusers ------------------------------------------------------------------------------------


def _cast(module: nn.Module) -> Restore | None:
    registry = module.__dict__.get("_diffusers_hook")
    hook = None if registry is None else registry.get_hook(_CASTING)
    if hook is None:
        return None
    shown = ExitStack()

    def before(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shown.close()  # of a forward that failed
        for part in module.modules():
            named = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
            cast = {name: tensor.to(hook.compute_dtype) for name, tensor in named if tensor.is_floating_point()}
            shown.enter_context(_showing(part, cast))
        return args, kwargs

    def after(module: nn.Module, output: Any) -> Any:
        shown.close()
        return output

    functions = hook.fn_ref
    pre_forward, post_forward = functions.pre_forward, functions.post_forward
    functions.pre_forward, functions.post_forward = before, after

    def undo() -> None:
        shown.close()
        functions.pre_forward, functions.post_forward = pre_forward, post_forward

    return undo


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def _packed_for_cpu(module: Any, device: torch.device) -> Restore | None:
    """Bring 4-bit weights into the order that CPUs with AVX-512 read. The library would do so in their first forward.

    For any other device bring them out of that order, which it would read wrong.
    """
    supports_cpu_order = getattr(module, "support_avx512bf16_for_cpu", False)
    if not supports_cpu_order or getattr(module.weight, "quant_state", None) is None:
        return None
    from bitsandbytes import functional

    weight = module.weight
    if device.type != "cpu":
        if _is_packed(weight):
            weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu_inverse(
                weight.data, weight.quant_state
            )
        return None
    if module.training:  # the library packs once the module does not train
        module.support_avx512bf16_for_cpu = False
        return lambda: setattr(module, "support_avx512bf16_for_cpu", True)
    kind, unrounded = type(weight), dict[str, Any]()
    if not _is_packed(weight):
        unrounded |= vars(weight.quant_state)  # the library rounds scales as it packs, in the first forward
        weight.data, weight.quant_state = functional._convert_weight_packed_for_cpu(weight.data, weight.quant_state)

    def saved(weight: Any) -> Any:
        """A copy of a weight in the order that the library saves. The first forward rounds the scales; before it, the
        copy has the unrounded ones."""
        data, state = weight.detach().as_subclass(torch.Tensor), copy.copy(weight.quant_state)
        if unrounded:
            data, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
            vars(state).clear()
            vars(state).update(unrounded)
        copied = torch.Tensor._make_subclass(kind, data, False)
        attributes = {name: value for name, value in vars(weight).items() if not name.startswith("_weightstream")}
        copied.__dict__.update(attributes)
        copied.quant_state = state
        return copied

    def save(self: Any, destination: Any, prefix: str, keep_vars: bool) -> None:
        weight = self._parameters["weight"]
        self._parameters["weight"] = saved(weight)
        try:
            type(self)._save_to_state_dict(self, destination, prefix, keep_vars)
        finally:
            self._parameters["weight"] = weight

    def copied(parameters: dict[str, Any]) -> dict[str, Any]:
        return parameters | {"weight": saved(parameters["weight"])} if unrounded else parameters

    def run(self: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if unrounded and self is module:  # not a copy
            unrounded.clear()
        return forward(*args, **kwargs)

    def undo() -> None:
        for each in undo_functions:
            each()
        if unrounded:
            was = saved(module.weight)
            module.weight.data = was.data
            vars(module.weight.quant_state).clear()
            vars(module.weight.quant_state).update(unrounded)
            unrounded.clear()

    undo_functions = (
        forward_patch.set_attribute(module, "_save_to_state_dict", MethodType(save, module)),
        forward_patch.copied_as(module, "_parameters", copied),
        forward_patch.wrap_forward(module, run),
    )
    return undo


def _is_packed(weight: Any) -> bool:
    return bool(getattr(weight.quant_state, "packing_format_for_cpu", False))
