"""The options that name a model and its settings, the same in every command. Reads them; loads no model."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from weightstream.config import OffloadConfig
from weightstream.errors import UnsupportedError

_ON_REQUEST = ("batch", "context", "tokens", "plan_file")


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
    given = inspect.signature(_options, eval_str=True).parameters
    model, *shared = (p for name, p in given.items() if name not in left_out)

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


def _classic(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Classic flags, instead of a budget")


def _options(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its repository id on the hub.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a step. Default: 1.")] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Positions in the KV cache that a step is planned for.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="New tokens per sequence in a step. Default: 1.")] = None,
    plan_file: Annotated[
        Path | None, typer.Option(help="Use this plan (`weightstream plan --save`); refined plans go there.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(help="Of the weights; auto is the checkpoint's own."),
    ] = "auto",
    trust_remote_code: Annotated[bool, switch("--trust-remote-code", "Run code that the checkpoint brings.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; cuda if there is one.")] = None,
    device_budget: Annotated[
        str | None, typer.Option(help="Device memory for weights, such as 8GiB or 80%. Default: what is free.")
    ] = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory for weights, such as 30GiB or 50%.")] = None,
    offload_folder: Annotated[Path | None, typer.Option(help="Where to keep weights that need converting.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings; flags win over it.")] = None,
    codec: Annotated[
        Literal["auto", "none", "3bit", "4bit"] | None,
        typer.Option(
            help="Compress weights without loss, and decode them on the GPU as they are needed: auto (the default) "
            "where that is predicted to be faster, 3bit and 4bit always, none never."
        ),
    ] = None,
    zero_copy_params: Annotated[list[str] | None, typer.Option(help="Read matching weights from host memory.")] = None,
    offload_backend: Annotated[
        Literal["auto", "uva", "prefetch"] | None, _classic("Default: by which flags are set.")
    ] = None,
    offload_group_size: Annotated[int | None, _classic("Layers in a group; 0 is off.")] = None,
    offload_num_in_group: Annotated[int | None, _classic("How many of a group's last layers to offload.")] = None,
    offload_prefetch_step: Annotated[int | None, _classic("How many offloaded layers ahead to copy.")] = None,
    offload_params: Annotated[list[str] | None, _classic("Offload only parameters with this name segment.")] = None,
    cpu_offload_gb: Annotated[float | None, _classic("GiB of weights to place on the host.")] = None,
    cpu_offload_params: Annotated[list[str] | None, _classic("Place only parameters with this name segment.")] = None,
) -> None:
    """Never called: its signature is what every command shares."""
