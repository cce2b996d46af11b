"""`weightstream pack`: writes a checkpoint in the order in which its weights stream."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from weightstream.cli.terminal import Model, TrustRemoteCode, Variant, print_message, require
from weightstream.measure.progress import lasting


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
    from rich import progress
    from rich.console import Console

    from weightstream.plan.units import human

    with lasting("loading libraries"):
        require("transformers", "transformers", "weightstream pack")
        from weightstream.api.pack import pack as pack_checkpoint

    began, shown = time.perf_counter(), sys.stderr.isatty()
    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    bar = progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)
    task = bar.add_task("", total=None)

    def advance(total: int, nbytes: int) -> None:
        bar.start()  # only now: loading the model showed a bar of its own
        bar.update(task, advance=nbytes, total=total)

    try:
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
    finally:
        bar.stop()
    tensors = [tensor for shard in shards for tensor in shard.tensors.values()]
    nbytes, raw = sum(shard.nbytes for shard in shards), sum(tensor.nbytes for tensor in tensors)
    count = f"{len(tensors)} tensors, {human(nbytes)} ({nbytes} bytes)"
    count += f", {nbytes / raw:.2f} of {human(raw)}," if any(shard.layouts for shard in shards) else ""
    done, seconds = "packed and verified" if verify else "packed", time.perf_counter() - began
    files = f"{len(shards)} files" if len(shards) > 1 else "a file"
    print_message(f"{out}: {done} {count} in {files}, {seconds:.1f} s", err=False)
