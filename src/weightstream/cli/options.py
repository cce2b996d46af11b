"""The options that name a model and its settings, the same in every command. Reads them; loads no model."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from annotated_types import Ge
from pydantic.fields import FieldInfo

from weightstream.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from weightstream.errors import UnsupportedError

_ON_REQUEST = ("batch", "context", "tokens")
_CLASSIC = "Classic flags, instead of a budget"


class Chosen(NamedTuple):
    """The model that a command is about, and how to load it: settings, `device`, `dtype`, `trust_remote_code`."""

    model: str
    config: OffloadConfig
    options: dict[str, Any]

    @property
    def loading(self) -> dict[str, Any]:
        """The keywords of `from_pretrained` and `plan_model` that this stands for."""
        return {"config": self.config, **self.options}


def switch(flag: str, text: str) -> Any:
    """An option that is on or off and has no opposite."""
    return typer.Option(flag, help=text)


def require(package: str, extra: str, what: str) -> Any:
    """A package that what is asked for needs; to be called before anything that takes time."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        remedy = f"pip install 'weightstream[{extra}]'"
        raise UnsupportedError(f"{what} needs the package {error.name}: {remedy}") from error


def takes_model(*on_request: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `command(chosen, *, own options)` take MODEL and all settings; of `_ON_REQUEST`, those that are named."""
    left_out = set(_ON_REQUEST) - set(on_request)
    model, *loading = inspect.signature(_loading, eval_str=True).parameters.values()
    shared = [*loading, *(setting for setting in _settings() if setting.name not in left_out)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**values: Any) -> None:
            rest = {p.name: values.pop(p.name) for p in own}
            command(_chosen(values), **rest)

        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (model, *own, *shared)]
        run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def _chosen(values: dict[str, Any]) -> Chosen:
    model, file = values.pop("model"), values.pop("config")
    options = {name: values.pop(name) for name in ("device", "dtype", "trust_remote_code")}
    given = {name: value for name, value in values.items() if value not in (None, [])}
    config = OffloadConfig.from_toml(file, **given) if file else OffloadConfig.from_kwargs(**given)
    return Chosen(model, config, options)


def _flag(name: str, field: FieldInfo, panel: str | None) -> inspect.Parameter:
    """The option of a setting; None where it is not given. What is wrong with its value, the configuration says."""
    kinds: dict[Any, Any] = {frozenset[str]: list[str], int | str | None: str}  # as typer can read them
    least: Any = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
    option = typer.Option(help=field.description, rich_help_panel=panel, min=least)
    kind: Any = kinds.get(field.annotation, field.annotation)
    kind = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _settings() -> Iterator[inspect.Parameter]:
    """An option for each setting that has a description."""
    classic = PrefetchOffloadConfig.model_fields | UVAOffloadConfig.model_fields
    for name, field in (OffloadConfig.model_fields | classic).items():
        if field.description:
            yield _flag(name, field, _CLASSIC if name in (*classic, "offload_backend") else None)


def _loading(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its repository id on the hub.")],
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(help="Of the weights; auto is the checkpoint's own."),
    ] = "auto",
    trust_remote_code: Annotated[bool, switch("--trust-remote-code", "Run code that the checkpoint brings.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; cuda if there is one.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; flags win over it.")] = None,
) -> None:
    """Never called: its signature is what every command shares beside the settings."""
