"""The options that name a model and its settings, the same in every command. Reads them; loads no model."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import typer
from annotated_types import Ge

from weightstream.config import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig
from weightstream.errors import UnsupportedError

Model = Annotated[str, typer.Argument(help="Folder of a checkpoint, or its repository id on the hub.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; cuda if there is one.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]
_Dtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    typer.Option(help="Of the weights; auto is the checkpoint's own."),
]
_File = Annotated[Path | None, typer.Option(help="TOML file of settings; flags win over it.")]
_LOADING = MappingProxyType(  # beside the settings: annotation and default
    {"dtype": (_Dtype, "auto"), "trust_remote_code": (TrustRemoteCode, False), "device": (Device, None)}
)
_READ_AS: MappingProxyType[Any, Any] = MappingProxyType({frozenset[str]: list[str], int | str | None: str})


def require(package: str, extra: str, what: str) -> Any:
    """A package that what is asked for needs; to be called before anything that takes time."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        remedy = f"pip install 'weightstream[{extra}]'"
        raise UnsupportedError(f"{what} needs the package {error.name}: {remedy}") from error


def takes_model(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `command(model, loading, *, own options)` take MODEL and all settings but those `left_out`.

    `loading` are the keywords of `from_pretrained` and `plan_model`: `config`, `device`, `dtype`, `trust_remote_code`.
    """
    settings = {name: kind for name, kind in _settings().items() if name not in left_out}
    shared = {**_LOADING, "config": (_File, None), **{name: (kind, None) for name, kind in settings.items()}}
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=d, annotation=kind) for name, (kind, d) in shared.items()]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        model, _, *own = signature.parameters.values()

        @functools.wraps(command)
        def run(model: str, config: Path | None, **values: Any) -> None:
            loading = {name: values.pop(name) for name in _LOADING}
            given = {name: value for name in settings if (value := values.pop(name)) not in (None, [])}
            loading["config"] = (
                OffloadConfig.from_toml(config, **given) if config else OffloadConfig.from_kwargs(**given)
            )
            command(model, loading, **values)

        run.__signature__ = signature.replace(parameters=[model, *own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def _settings() -> dict[str, Any]:
    """The option of each setting that has a description, as an annotation; the configuration judges the value."""
    classic, options = PrefetchOffloadConfig.model_fields | UVAOffloadConfig.model_fields, {}
    for name, field in (OffloadConfig.model_fields | classic).items():
        if field.description:
            least: Any = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
            panel = "Classic flags, instead of a budget" if name in {*classic, "offload_backend"} else None
            option = typer.Option(help=field.description, rich_help_panel=panel, min=least)
            options[name] = Annotated[_READ_AS.get(field.annotation, field.annotation) | None, option]
    return options
