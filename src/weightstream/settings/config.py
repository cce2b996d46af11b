"""`OffloadConfig` and its parts: every setting, checked once when it is set. Knows no torch, model or device."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import sys
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from weightstream.errors import ConfigError
from weightstream.settings.budgets import MemoryBudget, budget_nbytes, checked, checked_map


class ConfigWarning(UserWarning):
    """A setting that is set but ignored."""


# Error messages quote the text in a field's type, which names the values that can be set. The field's description is
# the help of its flag.
_SIZE_TEXT = 'bytes, a size such as "12GiB", or a share such as "80%"'
_Budget = Annotated[int | str | None, BeforeValidator(lambda v: None if v is None else checked(v)), _SIZE_TEXT]
_OverZero = Annotated[int | str | None, BeforeValidator(lambda v: None if v is None else checked(v, 1)), _SIZE_TEXT]
_MaxMemory = Annotated[
    tuple[MemoryBudget, ...],  # hashable
    BeforeValidator(checked_map),
    PlainSerializer(dict, return_type=dict[str, int | str]),
    'the budgets of GPUs and of the host, such as {0: "10GiB", 1: "10GiB", "cpu": "30GiB"}',
]
_Gib = Annotated[float, Field(strict=True, ge=0), "GiB (2**30 bytes) as a finite number >= 0"]
_Count = Annotated[int, Field(strict=True, ge=0), "a whole number >= 0"]
_Positive = Annotated[int, Field(strict=True, ge=1), "a whole number >= 1"]
_OptionalPositive = Annotated[int | None, Field(strict=True, ge=1), "a whole number >= 1"]
_Switch = Annotated[bool, "true or false"]
_Names = Annotated[
    frozenset[str],
    PlainSerializer(sorted, return_type=list[str], when_used="json"),
    'a list of name segments such as ["experts"]',
]


def _setting(default: Any, description: str) -> Any:
    return Field(default=default, description=description)


class _Settings(BaseModel):
    """A frozen part of the configuration; its errors are `ConfigError`."""

    model_config = {"frozen": True, "extra": "forbid", "allow_inf_nan": False}

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _config_error(type(self), error) from None

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _config_error(cls, error) from None


class UVAOffloadConfig(_Settings):
    """Zero-copy offloading: kernels read part of the weights from host memory over PCIe.

    `cpu_offload_gb`: GiB of weights to place in host memory, per GPU; 0 (the default) is off.
    `cpu_offload_params`: segments of parameter names that may be placed there, such as "experts"; empty (the default):
    all.
    """

    cpu_offload_gb: _Gib = _setting(0.0, "GiB of weights to place in host memory, per GPU. Default: 0.")
    cpu_offload_params: _Names = _setting(frozenset(), "Place only parameters with this name segment in host memory.")

    @property
    def nbytes(self) -> int:
        return int(self.cpu_offload_gb * 2**30)


class PrefetchOffloadConfig(_Settings):
    """Prefetch offloading: the last layers of each group are in host memory, and copied ahead of use.

    `offload_group_size`: layers in a group; 0 (the default) is off. `offload_num_in_group`: how many layers of a group
    are offloaded, the last ones (default 1). `offload_prefetch_step`: how many offloaded layers ahead a copy starts
    (default 1). `offload_params`: segments of parameter names that are offloaded; empty (the default): all.
    """

    offload_group_size: _Count = _setting(0, "Layers in a group; 0 (the default) is off.")
    offload_num_in_group: _Positive = _setting(1, "Layers of a group to offload, the last ones. Default: 1.")
    offload_prefetch_step: _Count = _setting(1, "Copy so many offloaded layers ahead of use. Default: 1.")
    offload_params: _Names = _setting(frozenset(), "Offload only parameters with this name segment.")

    def offloads(self, layer: int) -> bool:
        """Whether the layer is among the last of its group, which are offloaded."""
        return layer % self.offload_group_size >= self.offload_group_size - self.offload_num_in_group

    def model_post_init(self, context: object, /) -> None:
        size, num, step = self.offload_group_size, self.offload_num_in_group, self.offload_prefetch_step
        if 0 < size < num:
            raise ConfigError(
                f"offload_num_in_group = {num} > offload_group_size = {size}: a group of {size} layers cannot "
                f"offload {num}; set offload_group_size to {num} or more, or lower offload_num_in_group"
            )
        if size > 0 and step < 1:
            raise ConfigError(
                f"offload_prefetch_step = {step} < 1: a copy must start before its layer runs; set 1 or more"
            )


class TrainConfig(_Settings):
    """A training step of adapters over frozen weights, to plan for.

    `batch`, `tokens`: sequences, and tokens of each (default 1 and 2048). `rank`: of the adapters of a model that has
    none yet, one for each linear layer of its blocks (default 16). `checkpoints`: activations of a block are recomputed
    in the backward (default: on). `parameter_nbytes`: bytes for each trainable parameter, with its gradient and the
    state of the optimizer (default 16: float32 and Adam).
    """

    batch: _Positive = 1
    tokens: _Positive = 2048
    rank: _Positive = 16
    checkpoints: _Switch = True
    parameter_nbytes: _Positive = 16


def _train(value: Any) -> Any:
    """The training step for a setting: True is the default one, False is none."""
    if isinstance(value, bool) or value is None:
        return TrainConfig() if value else None
    if isinstance(value, Mapping):
        return TrainConfig(**value)
    return value


_Train = Annotated[
    TrainConfig | None,
    BeforeValidator(_train),
    'True, or the step to plan for, such as {"batch": 1, "tokens": 2048, "rank": 16}',
]


class OffloadConfig(_Settings):
    """All settings of one offloaded model. A bad value, an unknown key or a contradiction raises `ConfigError`.

    - `offload_backend`: "uva" or "prefetch" selects one of the classic backends. "auto" (the default) selects the
      classic backend whose settings are set; if none are, weightstream plans by budgets.
    - `uva`, `prefetch`: the settings of the classic backends.
    - `device_budget`: device memory that weights may take, ring and decode buffer included: bytes, a size such as
      "8GiB", or a share such as "80%" of the device's memory. Default: all that is free.
    - `host_budget`: host memory that weights may take, in the same units; the rest is read from disk in each step.
      Default: 80 % of what is available.
    - `max_memory`: budgets by memory, instead of these two, such as {0: "10GiB", 1: "10GiB", "cpu": "30GiB"}. If it
      names several GPUs, they share the model.
    - `gpus`: number of GPUs that share the model, each with `device_budget`. Default: 1.
    - `batch`, `context`, `tokens`: the step that is planned for: sequences (default 1), positions in the KV cache
      (default 4096, or the model's limit if that is less), and new tokens per sequence (default 1). Other steps run,
      too.
    - `train`: plan for training adapters over the frozen model: true, or a `TrainConfig` such as {"batch": 1,
      "tokens": 2048, "rank": 16}. Default: off.
    - `offload_folder`: folder for converted or decoded weights, and for weights that `host_budget` leaves out. Default:
      a temporary folder.
    - `pin_memory`: pin host memory, so that copies overlap with compute; off, copies are slower. Default: on.
    - `use_uva`: let kernels read from pinned host memory where that is faster. Default: on.
    - `zero_copy_params`: segments of names of weights that kernels read from host memory. Default: none.
    - `codec`: "auto" (the default) compresses weights without loss where a step is predicted to be faster,
      "compressed" always, "none" never.
    - `verify_checksums`: check the checksums of compressed checkpoints when they are loaded. Default: on.

    Examples:
        >>> OffloadConfig(device_budget="96MiB").device_budget
        100663296
        >>> OffloadConfig(max_memory={0: "80%", "cpu": "30GiB"}).device_nbytes(total_nbytes=1000)
        800
        >>> OffloadConfig.from_kwargs(offload_group_size=8, offload_num_in_group=2).backend
        'prefetch'
    """

    offload_backend: Literal["auto", "uva", "prefetch"] = _setting(
        "auto", "vLLM's offloader: uva or prefetch. Default: by the flags that are set."
    )
    uva: UVAOffloadConfig = UVAOffloadConfig()
    prefetch: PrefetchOffloadConfig = PrefetchOffloadConfig()
    device_budget: _OverZero = _setting(
        None,
        "Device memory for weights and what they stream through, such as 8GiB or 80%. Default: all that is free.",
    )
    host_budget: _Budget = _setting(
        None, "Host memory for weights, such as 30GiB or 50%. Default: 80 % of what is available."
    )
    max_memory: _MaxMemory = ()
    gpus: _Positive = _setting(1, "GPUs that share the model, each with --device-budget. Default: 1.")
    batch: _Positive = _setting(1, "Sequences in a step. Default: 1.")
    context: _OptionalPositive = _setting(None, "Positions in the KV cache that a step is planned for.")
    tokens: _Positive = _setting(1, "New tokens per sequence in a step. Default: 1.")
    train: _Train = None
    offload_folder: Path | None = _setting(
        None,
        "Folder for converted or decoded weights, and for those beyond --host-budget. Default: a temporary folder.",
    )
    pin_memory: _Switch = True
    use_uva: _Switch = True
    zero_copy_params: _Names = _setting(
        frozenset(), "Let kernels read weights with this name segment from host memory."
    )
    codec: Literal["auto", "compressed", "none"] = _setting(
        "auto",
        "Compress weights without loss, and decode them on the GPU when they are needed: auto (the default) if that is "
        "predicted to be faster, compressed always, none never.",
    )
    verify_checksums: _Switch = True

    @classmethod
    def take_from(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Remove every setting from `values`, flat ones included, and return them."""
        return {key: values.pop(key) for key in _known_keys(cls) if key in values}

    @classmethod
    def names(cls) -> frozenset[str]:
        """Every setting, flat ones included."""
        return frozenset(_known_keys(cls))

    @classmethod
    def from_kwargs(cls, /, **values: Any) -> Self:
        """Build from fields, `uva=` and `prefetch=`, or the keys of these two passed flat; None means not set."""
        return cls(**_nested(values))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], /, **overrides: Any) -> Self:
        """Read the TOML file `path`, lay `overrides` (as for `from_kwargs`) over it, and check the result."""
        over = f" with {', '.join(overrides)} laid over it" if overrides else ""
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**_laid_over(_nested(table), _nested(overrides)))
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror}; pass a TOML file that can be read") from error
        except ValueError as error:  # not UTF-8, not TOML (the text has line and column), or a bad setting
            raise ConfigError(f"config file {path}{over}: {error}") from error

    def merged(self, /, **overrides: Any) -> Self:
        """A copy with `overrides` (as for `from_kwargs`) laid over it; a `uva` or `prefetch` dict merges by key."""
        over = _nested(overrides)
        return type(self)(**_laid_over(self.model_dump(), over)) if over else self

    def within(self, device_budget: int | str | None, host_share: float = 1.0) -> Self:
        """The settings for one device of several: its own device budget, and its share of the host budget."""
        host = dict(self.max_memory).get("cpu", self.host_budget)
        if host_share < 1.0 and host is not None:
            host = f"{host_share * float(host[:-1])}%" if isinstance(host, str) else int(host_share * host)
            # the share replaces the budget of the host, which `max_memory` may have held
            update: dict[str, Any] = {"host_budget": host, "max_memory": ()}
        else:
            update = {"max_memory": tuple(entry for entry in self.max_memory if entry.memory == "cpu")}
        return self.model_copy(update={"device_budget": device_budget, "gpus": 1, **update})

    @property
    def backend(self) -> Literal["none", "uva", "prefetch"]:
        """The classic backend in force, after resolving "auto"."""
        if self.offload_backend != "auto":
            return self.offload_backend
        if self.prefetch.offload_group_size > 0:
            return "prefetch"
        return "uva" if self.uva.cpu_offload_gb > 0 else "none"

    @property
    def has_budget(self) -> bool:
        """Whether a budget of the device is set."""
        return self.device_budget is not None or self._gpu_entry is not None

    @property
    def uses_codes(self) -> bool:
        """Whether weights may be compressed."""
        return self.codec != "none" and self.backend != "uva"

    def device_for(self, device: object | None) -> str | None:
        """`device`, else the GPU that `max_memory` has a budget for.

        Raises `ConfigError` if these are different, or if several GPUs share the model.
        """
        is_index = isinstance(device, int) and not isinstance(device, bool)
        name = None if device is None else f"cuda:{device}" if is_index else str(device)
        if self.stripes:
            raise ConfigError("this call uses one GPU: offload() and from_pretrained() of a model can use several")
        if self._gpu_entry is None:
            return name
        named = f"cuda:{self._gpu_entry.memory}"
        if name not in (None, "cuda", named):
            raise ConfigError(f"max_memory is for {named}, and device = {name!r}: name the same in both")
        return named

    def device_nbytes(self, total_nbytes: int, *, on_cpu: bool = False) -> int | None:
        """Bytes that weights may take of a device with `total_nbytes` of memory; None: all that is free.

        `on_cpu`: the device is the CPU, so both budgets are of host memory. If `max_memory` then names only "cpu" and
        there is no device budget, that budget bounds all weights: the device gets all of it, and the host nothing.
        """
        budget = self._gpu_entry.budget if self._gpu_entry else self.device_budget
        return budget_nbytes(dict(self.max_memory).get("cpu") if on_cpu and budget is None else budget, total_nbytes)

    def host_nbytes(self, total_nbytes: int, *, on_cpu: bool = False) -> int | None:
        """Bytes that weights outside of the device may take of a host with `total_nbytes` of memory; None: no bound.

        `on_cpu`: as for `device_nbytes`.
        """
        budget = dict(self.max_memory).get("cpu")
        if on_cpu and budget is not None and self.device_budget is None and self._gpu_entry is None:
            return 0  # the device has all of it
        return budget_nbytes(self.host_budget if budget is None else budget, total_nbytes)

    @property
    def stripes(self) -> dict[int, int | str | None]:
        """The GPUs that share a model, by index, with their budgets; empty if one GPU computes."""
        budgets: dict[int, int | str | None] = {int(key): budget for key, budget in self.max_memory if key != "cpu"}
        budgets = budgets or dict.fromkeys(range(self.gpus), self.device_budget)
        return budgets if len(budgets) > 1 else {}

    @property
    def _gpu_entry(self) -> MemoryBudget | None:
        """The first GPU in `max_memory`, with its budget; None if it names no GPU."""
        return next((entry for entry in self.max_memory if entry.memory != "cpu"), None)

    def resolved(self) -> Self:
        """A copy in which the present environment may have switched off `pin_memory` and `use_uva`."""
        pinned = self.pin_memory and not _switched_on("WEIGHTSTREAM_DISABLE_PIN_MEMORY")
        mapped = self.use_uva and not _switched_on("WEIGHTSTREAM_DISABLE_UVA")
        return self.model_copy(update={"pin_memory": pinned, "use_uva": mapped})

    def compute_hash(self) -> str:
        """Hex digest over every field of `resolved()`: equal in all processes, as sets are sorted."""
        text = json.dumps(self.resolved().model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def model_post_init(self, context: object, /) -> None:  # not a validator, which would run twice, and so warn twice
        if self.offload_backend == "prefetch" and self.prefetch.offload_group_size == 0:
            num = self.prefetch.offload_num_in_group
            raise ConfigError(
                f"prefetch.offload_num_in_group = {num} > prefetch.offload_group_size = 0, with offload_backend = "
                f"'prefetch': set prefetch.offload_group_size to {num} or more"
            )
        for key, value in self.max_memory:
            name = "host_budget" if key == "cpu" else "device_budget"
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"max_memory = {{{key}: {value!r}}} and {name} = {getattr(self, name)!r} are budgets for the same "
                    f"memory: remove {name}, or {key} from max_memory"
                )
        if self._gpu_entry is not None and self.gpus not in (1, len(self.stripes) or 1):
            num = len(self.stripes) or 1
            raise ConfigError(f"gpus = {self.gpus}, and max_memory has budgets for {num}: remove gpus")
        for text in self._ignored():
            warnings.warn(text, ConfigWarning, stacklevel=_caller_depth())

    def _ignored(self) -> Iterable[str]:
        """A warning for each setting that is ignored."""
        changed = self.model_dump(mode="json", exclude_defaults=True)
        why = f"offload_backend = {self.offload_backend!r} selects {self.backend!r}"
        for section, switch in ("uva", "cpu_offload_gb"), ("prefetch", "offload_group_size"):
            if section in changed and self.backend != section:
                listed = ", ".join(f"{section}.{name} = {value!r}" for name, value in changed[section].items())
                yield (
                    f"{listed} ignored: {why}. Remove to silence this; to use, set "
                    f"offload_backend = {section!r} and {section}.{switch} > 0"
                )
        if self.codec == "compressed" and self.backend == "uva":
            yield f"codec = {self.codec!r} ignored: {why}, whose weights are read uncompressed. Remove to silence this"
        budget = f"max_memory[{self._gpu_entry.memory}] = {self._gpu_entry.budget}" if self._gpu_entry else None
        if self.device_budget is not None:
            budget = f"device_budget = {self.device_budget}"
        if budget is not None and self.backend != "none":
            yield (
                f"{budget} ignored: {why}, which places weights by its own settings. "
                f"Remove it to silence this; to use it, remove the settings of {self.backend!r}"
            )


def _switched_on(variable: str) -> bool:
    value = os.environ.get(variable, "")
    try:
        return TypeAdapter(bool).validate_python(value.strip() or "0")
    except ValidationError:
        raise ConfigError(
            f"environment variable {variable} = {value!r} is not a switch: set 1 or 0, or unset it"
        ) from None


def _known_keys(cls: type[BaseModel]) -> dict[str, str]:
    """Each key of `cls` and of its sections with its full name: cpu_offload_gb -> uva.cpu_offload_gb."""
    known = {name: name for name in cls.model_fields}
    for section, field in cls.model_fields.items():
        if isinstance(field.default, _Settings):
            known |= {key: f"{section}.{key}" for key in type(field.default).model_fields}
    return known


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without None, with sections as dicts, and with flat keys moved into their section."""
    known = _known_keys(OffloadConfig)
    # an unknown key stays even if its value is None, so that it is refused
    present = {key: value for key, value in values.items() if value is not None or key not in known}
    nested = {k: v.model_dump() if isinstance(v, BaseModel) else v for k, v in present.items()}
    for key in [key for key in present if "." in known.get(key, "")]:
        section, value = known[key].partition(".")[0], nested.pop(key)
        table = nested.get(section, {})
        if not isinstance(table, dict) or key in table:
            raise ConfigError(f"{key} = {value!r} contradicts {section} = {table!r}: set only one of the two")
        nested[section] = table | {key: value}
    return nested


def _laid_over(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` overridden by `over`; sections are merged key by key."""
    tables = [key for key in over if isinstance(over[key], dict) and isinstance(base.get(key), dict)]
    tables = [key for key in tables if key != "max_memory"]  # a map of budgets counts as one setting
    return base | over | {key: base[key] | over[key] for key in tables}


def _config_error(cls: type[BaseModel], error: ValidationError) -> ConfigError:
    return ConfigError("\n".join(_explained(cls, fault) for fault in error.errors()))


def _explained(cls: type[BaseModel], fault: ErrorDetails) -> str:
    """Field, value and remedy, one line per fault."""
    name, value = ".".join(map(str, fault["loc"])), fault["input"]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # raised by `model_post_init`, or by a section: its text is complete
        return "\n".join(f"{name}.{line}" if name else line for line in str(cause).splitlines())
    if fault["type"] == "extra_forbidden":
        return no_such_option(name, value, _known_keys(cls))
    field = cls.model_fields.get(str(fault["loc"][0])) if fault["loc"] else None
    wanted = [text for text in (field.metadata if field else ()) if isinstance(text, str)]
    message = "; give ".join([fault["msg"].removeprefix("Value error, "), *wanted])
    return f"{name or cls.__name__} = {value!r}: {message}"


def no_such_option(name: str, value: object, known: Mapping[str, str]) -> str:
    """The text of an error about an unknown keyword; `known` maps keys to full names."""
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {known[near[0]]}?" if near else f"the options are {', '.join(known.values())}"
    return f"{name} = {value!r}: there is no such option; {remedy}"


def _caller_depth() -> int:
    """The `stacklevel` at which a warning issued by our caller points at the user's own line."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in ("weightstream", "pydantic"):
        frame, depth = frame.f_back, depth + 1
    return depth
