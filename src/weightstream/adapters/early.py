"""Early: experts are pinned in their files while their model is made. It knows names of checkpoints, no model.

To make a model of 18,000 matrices takes as long as to pin them, and neither needs the other. That experts will be
copied from host memory is known before there is a plan where they are more than what the device may take.
"""

from __future__ import annotations

from itertools import groupby

from weightstream.config import OffloadConfig
from weightstream.runtime import cpu, cuda
from weightstream.runtime.backend import Backend
from weightstream.runtime.devices import pinned
from weightstream.store.checkpoint import Checkpoint
from weightstream.store.header import TensorEntry
from weightstream.store.limits import available_nbytes
from weightstream.store.pages import PageCache, Range


def pin_experts(checkpoint: Checkpoint, backend: Backend, config: OffloadConfig) -> PageCache | None:
    """Starts to, layer by layer; None where they may be coded, fit the device, or do not fit the host.

    A plan that has other uses for them lets them go, and tells what could not be pinned.
    """
    _, pages = pinned(backend, config)
    found = experts_in(checkpoint)
    nbytes = sum(end - begin for _, begin, end in found)
    if pages is None or not pages.pins or config.uses_codes:
        return None
    free, total = cuda.memory(backend.device) if backend.device.type == "cuda" else (0, 0)
    room = config.device_nbytes(total)
    host, host_room = cpu.free_nbytes(), config.host_nbytes(available_nbytes())
    if nbytes <= (free if room is None else room) or nbytes > (host if host_room is None else min(host, host_room)):
        return None
    pages.hold(found, lambda error: None)
    return pages


def experts_in(checkpoint: Checkpoint) -> list[Range]:
    """Where experts lie whose matrices are one by one, as published, in the order of layers: an expert's in one range,
    if they lie together.

    Their names have two numbers, of the layer and of the expert.
    """
    found: dict[Range, int] = {}
    entries = sorted(checkpoint.entries.values(), key=lambda entry: (str(entry.path), entry.begin))
    for (_, numbers), group in groupby(entries, key=lambda entry: (entry.path, _numbers(entry))):
        if numbers[1:]:
            first, *_, last = [*group] * 2
            found[first.mapping, first.begin, last.end] = numbers[0]
    return sorted(found, key=lambda each: found[each])


def _numbers(entry: TensorEntry) -> list[int]:
    """The first two in the name of a plain tensor."""
    return [int(part) for part in entry.name.split(".") if part.isdigit()][:2] if entry.layout is None else []
