"""`weightstream pack`: writes a checkpoint in the order in which its weights stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from weightstream.cli.messages import shows_bars
from weightstream.cli.terminal import Model, TrustRemoteCode, Variant, print_message, require
from weightstream.measure.progress import lasting, reporting
from weightstream.plan.units import human


def pack(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write: the same model, to use instead of MODEL.")],
    codec: Annotated[
        str,
        typer.Option(
            "--codec",
            help="Compress weights without loss: auto, if that saves 3 %; compressed, if it saves anything; none.",
        ),
    ] = "none",
    verify: Annotated[bool, typer.Option("--verify", help="Read OUT again and compare it with MODEL.")] = False,
    variant: Variant = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write MODEL's weights to OUT in the order in which they stream.

    OUT is an ordinary safetensors checkpoint, and appears when it is complete. A compressed one is
    smaller, and only weightstream reads it.
    """
    with lasting("loading libraries"):
        require("transformers", "transformers", "weightstream pack")
        from weightstream.api.pack import pack as pack_checkpoint

    began, shown = time.perf_counter(), shows_bars()
    with ExitStack() as stack:
        advances: dict[str, Callable[..., object]] = {}

        def advance(phase: str, total: int, nbytes: int) -> None:
            if phase not in advances:
                stack.close()  # one bar at a time
                advances[phase] = stack.enter_context(reporting(f"{phase}: {human(total)}", shown, total))
            advances[phase](advance=nbytes)

        shards = pack_checkpoint(
            model,
            out,
            progress=shown,
            advance=advance,
            codec=codec,
            verify=verify,
            variant=variant,
            trust_remote_code=trust_remote_code,
        )
    tensors = [tensor for shard in shards for tensor in shard.tensors.values()]
    nbytes, raw = sum(shard.nbytes for shard in shards), sum(tensor.nbytes for tensor in tensors)
    count = f"{len(tensors)} tensors, {human(nbytes)} ({nbytes} bytes)"
    count += f", {nbytes / raw:.2f} of {human(raw)}," if any(shard.layouts for shard in shards) else ""
    done, seconds = "packed and verified" if verify else "packed", time.perf_counter() - began
    files = f"{len(shards)} files" if len(shards) > 1 else "a file"
    print_message(f"{out}: {done} {count} in {files}, {seconds:.1f} s", err=False)
