"""`weightstream serve`: the OpenAI API for a model whose weights stream."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from weightstream.cli import pipelines
from weightstream.cli.messages import shows_bars
from weightstream.cli.run import as_text, opened
from weightstream.cli.terminal import DraftOption, Loading, Model, is_on_cpu, print_message, require, takes_model
from weightstream.errors import ConfigError

_USUAL_CONTEXT = 4096


@takes_model("batch", "tokens")
def serve(
    model: Model,
    loading: Loading,
    *,
    host: Annotated[str, typer.Option(help="Address to listen at. 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at. 0 is any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model for clients. Default: that of MODEL.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="WEIGHTSTREAM_API_KEY", help="Key that clients must send. Default: none is needed."),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; others get status 429.")] = 16,
    speculate: Annotated[
        Literal["auto", "off", "lookup", "draft"] | None,
        typer.Option(help="As of `run`; answers keep their bits. Default: auto on one GPU or with --draft, else off."),
    ] = None,
    draft: DraftOption = None,
) -> None:
    """Answer OpenAI's API with MODEL while its weights stream: chat completions, completions, models.

    Requests take turns. /health and /metrics report on the server. Tokens are drafted where that is
    faster, unless --speculate off. Ctrl-C or SIGTERM ends it. For many requests at a time use vLLM,
    with weightstream as its plug-in.
    """
    if api_key is not None and not (api_key := as_text(api_key).strip()):
        raise ConfigError("--api-key is empty: leave it out, or give a key that clients send")
    require("uvicorn", "serve", "weightstream serve")
    require("starlette", "serve", "weightstream serve")
    if pipelines.is_diffusers(model):
        raise ConfigError(f"{model} is a pipeline of diffusers: weightstream serve answers with text")
    from weightstream.serving.server import bound_socket, is_local, serve_forever

    with bound_socket(host, port) as bound:
        text_model = opened(model, loading, "weightstream serve")
        config = loading["config"].resolved()
        context = min(config.context or _USUAL_CONTEXT, text_model.num_positions or sys.maxsize)
        loading["config"] = config.model_copy(update={"context": context})
        is_on_one_gpu = not is_on_cpu(loading["device"]) and not config.stripes
        speculate = speculate or ("auto" if draft is not None or is_on_one_gpu else "off")
        text_model.load(progress=shows_bars(), speculate=speculate, draft=draft, **loading)

        from weightstream.serving.app import ServedModel

        served = ServedModel(
            model=text_model,
            name=as_text(name or _name_of(model)),
            context=context,
            drafts=text_model.exact_drafts(context),
            api_key=api_key,
        )
        shown, at = bound.getsockname()[:2]
        address = f"http://[{shown}]:{at}" if ":" in shown else f"http://{shown}:{at}"
        if api_key is None and not is_local(bound):
            print_message(f"warning: any machine that reaches {address} may use the model: set --api-key")
        about = f"weightstream: {served.name} at {address}/v1, with a context of {context} tokens"
        serve_forever(served, bound, queue, on_start=lambda: print_message(about))


def _name_of(model: str) -> str:
    """A repository's id, or the name of a folder, or of a link to one."""
    return Path(os.path.abspath(model)).name if Path(model).is_dir() else model
