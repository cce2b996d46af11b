"""`OffloadConfig` and its parts: every setting, checked once at the edge; knows no torch, model or device."""

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
from weightstream.settings.budgets import checked, checked_map, nbytes_of


class ConfigWarning(UserWarning):
    """A setting that is given but ignored."""


# The text beside a type is what an error tells the user to give; a field's description is the help of its flag.
_SIZE_TEXT = 'bytes, a size such as "12GiB", or a share such as "80%"'
_Budget = Annotated[int | str | None, BeforeValidator(lambda v: None if v is None else checked(v)), _SIZE_TEXT]
_OverZero = Annotated[int | str | None, BeforeValidator(lambda v: None if v is None else checked(v, 1)), _SIZE_TEXT]
_MaxMemory = Annotated[
    tuple[tuple[str, int | str], ...],  # hashable
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
    """A frozen part of the configuration, whose errors are `ConfigError`."""

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
    """Zero-copy: GiB to place on the host per GPU, and the name segments eligible for it (none given: all)."""

    cpu_offload_gb: _Gib = _setting(0.0, "GiB of weights to place on the host.")
    cpu_offload_params: _Names = _setting(frozenset(), "Place only parameters with this name segment.")

    @property
    def nbytes(self) -> int:
        return int(self.cpu_offload_gb * 2**30)


class PrefetchOffloadConfig(_Settings):
    """Prefetch: the last `num_in_group` of every `group_size` layers, copied `prefetch_step` of them ahead."""

    offload_group_size: _Count = _setting(0, "Layers in a group; 0 is off.")
    offload_num_in_group: _Positive = _setting(1, "How many of a group's last layers to offload.")
    offload_prefetch_step: _Count = _setting(1, "How many offloaded layers ahead to copy.")
    offload_params: _Names = _setting(frozenset(), "Offload only parameters with this name segment.")

    def offloads(self, layer: int) -> bool:
        """Whether a layer is one of the last of its group."""
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


class OffloadConfig(_Settings):
    """All settings of one offloaded model; a bad value, an unknown key or a contradiction is a `ConfigError`.

    >>> OffloadConfig(device_budget="96MiB").device_budget
    100663296
    >>> OffloadConfig(max_memory={0: "80%", "cpu": "30GiB"}).device_nbytes(total_nbytes=1000)
    800
    >>> OffloadConfig.from_kwargs(offload_group_size=8, offload_num_in_group=2).backend
    'prefetch'
    """

    offload_backend: Literal["auto", "uva", "prefetch"] = _setting("auto", "Default: by which flags are set.")
    uva: UVAOffloadConfig = UVAOffloadConfig()
    prefetch: PrefetchOffloadConfig = PrefetchOffloadConfig()
    device_budget: _OverZero = _setting(None, "Device memory for weights, such as 8GiB or 80%. Default: what is free.")
    host_budget: _Budget = _setting(None, "Host memory for weights, such as 30GiB or 50%.")
    max_memory: _MaxMemory = ()
    gpus: _Positive = _setting(1, "GPUs that share the model, each with --device-budget. Default: 1.")
    batch: _Positive = _setting(1, "Sequences in a step. Default: 1.")
    context: _OptionalPositive = _setting(None, "Positions in the KV cache that a step is planned for.")
    tokens: _Positive = _setting(1, "New tokens per sequence in a step. Default: 1.")
    offload_folder: Path | None = _setting(None, "Where to keep weights that need converting.")
    pin_memory: _Switch = True
    use_uva: _Switch = True
    zero_copy_params: _Names = _setting(frozenset(), "Read matching weights from host memory.")
    codec: Literal["auto", "compressed", "none"] = _setting(
        "auto",
        "Compress weights without loss, and decode them on the GPU as they are needed: auto (the default) where that "
        "is predicted to be faster, compressed always, none never.",
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
        """Build from fields, `uva=` and `prefetch=`, and their keys given flat; None means not given."""
        return cls(**_nested(values))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], /, **overrides: Any) -> Self:
        """Read the file `path`, lay `overrides` (as for `from_kwargs`) over it, and check the result."""
        over = f" with {', '.join(overrides)} laid over it" if overrides else ""
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**_laid_over(_nested(table), _nested(overrides)))
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror}; give a TOML file that can be read") from error
        except ValueError as error:  # not UTF-8, not TOML (the text holds line and column), or a bad setting
            raise ConfigError(f"config file {path}{over}: {error}") from error

    def merged(self, /, **overrides: Any) -> Self:
        """A copy with `overrides` (as for `from_kwargs`) laid over it; a `uva` or `prefetch` dict merges by key."""
        over = _nested(overrides)
        return type(self)(**_laid_over(self.model_dump(), over)) if over else self

    def within(self, device_budget: int | str | None, host_share: float = 1.0) -> Self:
        """The same on one device, with another budget of it in place of any, and such a share of the host's bytes."""
        host = dict(self.max_memory).get("cpu", self.host_budget)
        if host_share < 1.0 and host is not None:
            host = f"{host_share * float(host[:-1])}%" if isinstance(host, str) else int(host_share * host)
            own: dict[str, Any] = {"host_budget": host, "max_memory": ()}
        else:
            own = {"max_memory": tuple(entry for entry in self.max_memory if entry[0] == "cpu")}
        return self.model_copy(update={"device_budget": device_budget, "gpus": 1, **own})

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
        """Whether the device's memory for weights is given."""
        return self.device_budget is not None or self._of_map is not None

    @property
    def uses_codes(self) -> bool:
        return self.codec != "none" and self.backend != "uva"

    def device_for(self, device: object | None) -> str | None:
        """`device`, else the one that `max_memory` has a budget for; a `ConfigError` where these are two."""
        given = None if device is None else str(device)
        if self.stripes:
            raise ConfigError("this computes on one GPU: several are for the models of offload() and from_pretrained()")
        if self._of_map is None:
            return given
        named = f"cuda:{self._of_map[0]}"
        if given not in (None, "cuda", named):
            raise ConfigError(f"max_memory is for {named}, and device = {given!r}: name the same in both")
        return named

    def device_nbytes(self, total_nbytes: int, *, on_cpu: bool = False) -> int | None:
        """Bytes that weights may take of a device with `total_nbytes` of memory; None: whatever is free.

        `on_cpu`: the device is the host. A `max_memory` of "cpu" alone then bounds what both budgets bound together.
        """
        budget = self._of_map[1] if self._of_map else self.device_budget
        return nbytes_of(dict(self.max_memory).get("cpu") if on_cpu and budget is None else budget, total_nbytes)

    def host_nbytes(self, total_nbytes: int, *, on_cpu: bool = False) -> int | None:
        """Bytes of a host with `total_nbytes` of memory that weights may take beside the device's; None: no bound."""
        budget = dict(self.max_memory).get("cpu")
        if on_cpu and budget is not None and self.device_budget is None and self._of_map is None:
            return 0
        return nbytes_of(self.host_budget if budget is None else budget, total_nbytes)

    @property
    def stripes(self) -> dict[int, int | str | None]:
        """The GPUs that share a model, by index, with their budgets; none where it computes on one."""
        found: dict[int, int | str | None] = {int(key): budget for key, budget in self.max_memory if key != "cpu"}
        found = found or dict.fromkeys(range(self.gpus), self.device_budget)
        return found if len(found) > 1 else {}

    @property
    def _of_map(self) -> tuple[str, int | str] | None:
        return next((entry for entry in self.max_memory if entry[0] != "cpu"), None)

    def resolved(self) -> Self:
        """A copy with `pin_memory` and `use_uva` as the environment leaves them now."""
        pinned = self.pin_memory and not _switched_on("WEIGHTSTREAM_DISABLE_PIN_MEMORY")
        mapped = self.use_uva and not _switched_on("WEIGHTSTREAM_DISABLE_UVA")
        return self.model_copy(update={"pin_memory": pinned, "use_uva": mapped})

    def compute_hash(self) -> str:
        """Hex digest over every field of `resolved()`: equal in all processes, whatever the order of sets."""
        text = json.dumps(self.resolved().model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def model_post_init(self, context: object, /) -> None:  # a validator would run, and warn, twice
        if self.offload_backend == "prefetch" and self.prefetch.offload_group_size == 0:
            num = self.prefetch.offload_num_in_group
            raise ConfigError(
                f"prefetch.offload_num_in_group = {num} > prefetch.offload_group_size = 0, with offload_backend = "
                f"'prefetch': set prefetch.offload_group_size to {num} or more"
            )
        for key, given in self.max_memory:
            name = "host_budget" if key == "cpu" else "device_budget"
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"max_memory = {{{key}: {given!r}}} and {name} = {getattr(self, name)!r} are budgets for the same "
                    f"memory: remove {name}, or {key} from max_memory"
                )
        if self._of_map is not None and self.gpus not in (1, len(self.stripes) or 1):
            raise ConfigError(f"gpus = {self.gpus}, and max_memory has budgets of another number: remove gpus")
        for text in self._ignored():
            warnings.warn(text, ConfigWarning, stacklevel=_caller_depth())

    def _ignored(self) -> Iterable[str]:
        given = self.model_dump(mode="json", exclude_defaults=True)
        why = f"offload_backend = {self.offload_backend!r} selects {self.backend!r}"
        for section, switch in ("uva", "cpu_offload_gb"), ("prefetch", "offload_group_size"):
            if section in given and self.backend != section:
                listed = ", ".join(f"{section}.{name} = {value!r}" for name, value in given[section].items())
                yield (
                    f"{listed} ignored: {why}. Remove to silence this; to use, set "
                    f"offload_backend = {section!r} and {section}.{switch} > 0"
                )
        if self.codec == "compressed" and self.backend == "uva":
            yield f"codec = {self.codec!r} ignored: {why}, whose weights are read as they are. Remove to silence this"
        budget = f"max_memory[{self._of_map[0]}] = {self._of_map[1]}" if self._of_map else None
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
            f"environment variable {variable} = {value!r} is no switch: set 1 or 0, or unset it"
        ) from None


def _known_keys(cls: type[BaseModel]) -> dict[str, str]:
    """Every key of `cls` and of its sections, with its full name: cpu_offload_gb -> uva.cpu_offload_gb."""
    known = {name: name for name in cls.model_fields}
    for section, field in cls.model_fields.items():
        if isinstance(field.default, _Settings):
            known |= {key: f"{section}.{key}" for key in type(field.default).model_fields}
    return known


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without None, models as dicts, and flat keys moved into their section."""
    known = _known_keys(OffloadConfig)
    given = {key: value for key, value in values.items() if value is not None or key not in known}
    nested = {k: v.model_dump() if isinstance(v, BaseModel) else v for k, v in given.items()}
    for key in [key for key in given if "." in known.get(key, "")]:
        section, value = known[key].partition(".")[0], nested.pop(key)
        table = nested.get(section, {})
        if not isinstance(table, dict) or key in table:
            raise ConfigError(f"{key} = {value!r} contradicts {section} = {table!r}: give one of the two")
        nested[section] = table | {key: value}
    return nested


def _laid_over(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    tables = [key for key in over if isinstance(over[key], dict) and isinstance(base.get(key), dict)]
    tables = [key for key in tables if key != "max_memory"]  # a map of budgets is one setting
    return base | over | {key: base[key] | over[key] for key in tables}


def _config_error(cls: type[BaseModel], error: ValidationError) -> ConfigError:
    return ConfigError("\n".join(_explained(cls, fault) for fault in error.errors()))


def _explained(cls: type[BaseModel], fault: ErrorDetails) -> str:
    """Field, value and remedy, one line per fault."""
    name, value = ".".join(map(str, fault["loc"])), fault["input"]
    if isinstance(cause := fault.get("ctx", {}).get("error"), ConfigError):  # of a check, or the part at `name`: whole
        return "\n".join(f"{name}.{line}" if name else line for line in str(cause).splitlines())
    if fault["type"] == "extra_forbidden":
        return no_such_option(name, value, _known_keys(cls))
    field = cls.model_fields.get(str(fault["loc"][0])) if fault["loc"] else None
    wanted = [text for text in (field.metadata if field else ()) if isinstance(text, str)]
    message = "; give ".join([fault["msg"].removeprefix("Value error, "), *wanted])
    return f"{name or cls.__name__} = {value!r}: {message}"


def no_such_option(name: str, value: object, known: Mapping[str, str]) -> str:
    """What is said of a keyword that is none of these, each with its full name."""
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {known[near[0]]}?" if near else f"the options are {', '.join(known.values())}"
    return f"{name} = {value!r}: there is no such option; {remedy}"


def _caller_depth() -> int:
    """The `stacklevel` at which a warning issued by our caller points at the user's own line."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in ("weightstream", "pydantic"):
        frame, depth = frame.f_back, depth + 1
    return depth
