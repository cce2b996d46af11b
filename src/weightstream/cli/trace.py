"""`weightstream trace`: records when every unit of a model is copied, waited for and computed, for Perfetto."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from weightstream.cli.options import Chosen, takes_model
from weightstream.cli.report import grid
from weightstream.cli.run import DEFAULT_PROMPT, Session
from weightstream.cli.screen import print_labelled, screen
from weightstream.errors import ConfigError
from weightstream.plan.amounts import milliseconds
from weightstream.trace import Span, SpanKind, Trace

if TYPE_CHECKING:
    from rich.table import Table

_MOST_WAITS = 5
_GIB = 2**30


@takes_model("context")
def trace(
    chosen: Chosen,
    *,
    out: Annotated[Path, typer.Option(help="Write the trace here.")] = Path("trace.json"),
    steps: Annotated[int, typer.Option(min=1, help="Tokens to decode, one a step, behind the prompt's step.")] = 4,
    prompt: Annotated[str, typer.Option(help="What to go on from.")] = DEFAULT_PROMPT,
) -> None:
    """Record when each of MODEL's units is copied, waited for and computed, while it reads a prompt and decodes.

    Opens in https://ui.perfetto.dev or chrome://tracing: a row for the host, one for compute and one for copies. The
    steps run eager, as a graph does not show its units.
    """
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    session = Session(chosen.model, chosen.options["trust_remote_code"])
    inputs = session.encode(prompt)
    session.load(progress=sys.stderr.isatty(), **chosen.loading)
    placed = {name: value.to(session.streamer.device) for name, value in inputs.items()}
    greedy = {"do_sample": False, "num_beams": 1}
    session.model.generate(**placed, **greedy, max_new_tokens=2)  # teaches the order of the units
    with session.streamer.trace() as recorded:
        session.model.generate(**placed, **greedy, max_new_tokens=steps + 1, min_new_tokens=steps + 1)
    recorded.save(out)
    _show(session, recorded, out)


def _show(session: Session, recorded: Trace, out: Path) -> None:
    steps = [span.seconds for span in _spans(recorded, "step")]
    measured, predicted = milliseconds(median(steps[1:])), milliseconds(session.streamer.plan.step_s)
    decode = f"{len(steps) - 1} steps of {measured} each (median; predicted: {predicted})"
    about = {"plan": session.streamer.plan.summary(), "prompt": f"1 step of {milliseconds(steps[0])}"}
    print_labelled(about | {"decode": decode})
    screen().print(_streams(recorded))
    if _spans(recorded, "wait"):
        screen().print(_waits(recorded))
    print_labelled({"trace": f"{out} ({len(recorded.spans)} spans); open it in https://ui.perfetto.dev"})


def _spans(recorded: Trace, kind: SpanKind) -> list[Span]:
    """Those of the device."""
    return [span for span in recorded.spans if span.kind == kind and span.row != "host"]


def _streams(recorded: Trace) -> Table:
    """What the two streams did, in the time from the first span to the last."""
    steps, waits, fills = (_spans(recorded, kind) for kind in ("step", "wait", "fill"))
    whole_s = max(s.end_s for s in steps + fills) - min(s.begin_s for s in steps + fills)
    ran_s, waited_s, copied_s = (sum(span.seconds for span in found) for found in (steps, waits, fills))
    nbytes = sum(fill.nbytes for fill in fills)
    moved = (f"{nbytes / _GIB:.2f}", f"{nbytes / copied_s / 1e9:.1f}") if fills else ()
    table = grid("stream", "does", "ms", "% of all", "GiB", "GB/s", align_left=("stream", "does"))
    for stream, does, seconds, more in (
        ("compute", "computes", ran_s - waited_s, ()),
        ("", "waits for copies", waited_s, ()),
        ("copy", "copies", copied_s, moved),
    ):
        table.add_row(stream, does, f"{1e3 * seconds:,.1f}", f"{100 * seconds / whole_s:.1f}", *more)
    return table


def _waits(recorded: Trace) -> Table:
    """The units that compute waited for longest."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for wait in _spans(recorded, "wait"):
        found[wait.name].append(wait.seconds)
    table = grid("waited for longest", "waits", "longest ms", "all ms", align_left=("waited for longest",))
    for name, waits in sorted(found.items(), key=lambda item: -sum(item[1]))[:_MOST_WAITS]:
        table.add_row(name or "(root)", str(len(waits)), f"{1e3 * max(waits):,.2f}", f"{1e3 * sum(waits):,.2f}")
    return table
