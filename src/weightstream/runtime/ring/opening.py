"""The opening of a unit, besides its fill: brings its compressed and cached weights to the buffer, all or single rows.

The functions for that are made when a unit first needs them, and not for all units at once: making them waits until the
unit's pages of a file are pinned. They cannot be made in a capture, as this waits, allocates and copies tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import pairwise

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightstream.plan.plan import Plan
from weightstream.runtime.experts.row_stream import StreamBuffer
from weightstream.runtime.experts.rows import Rows, rows_of
from weightstream.runtime.experts.stacks import copy_function
from weightstream.runtime.weights.decompression import BufferedUnit, unit_decoder
from weightstream.runtime.weights.sources import PageWindow


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide the block, which makes thousands of views, from the watch of a step and from the modes of its caller."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


class Opening:
    """How the compressed and cached weights of one unit come to the device."""

    def __init__(self, unit: BufferedUnit, streams: StreamBuffer) -> None:
        self._unit = unit
        self._streams = streams
        self.found_rows: Rows | None = None  # `rows` once it is made: before, there are no slots to report or empty
        self.following: int | None = None  # the unit that opens after this one, until `then` was called

    def again(self) -> Opening:
        """A new opening of the same unit, whose functions are made again, as its homes have changed."""
        opening = Opening(self._unit, self._streams)
        opening.following = self.following
        return opening

    def then(self) -> int | None:
        """At the first call the unit that opens after this one, at any later call None."""
        following, self.following = self.following, None
        return following

    @cached_property
    def decode(self) -> Callable[[], None]:
        """Brings all compressed and cached weights of the unit to the buffer."""
        unit = self._unit
        with _unseen():
            copies = [
                copy_function(unit.homes[alias], unit.room(alias), unit.backend)
                for alias in unit.offsets
                if alias in unit.plan.cached
            ]
            decode = unit_decoder(unit, [alias for alias in unit.offsets if alias not in unit.plan.cached])
        if not copies:
            return decode

        def decode_and_copy() -> None:
            decode()
            for copy in copies:
                copy()

        return decode_and_copy

    @cached_property
    def rows(self) -> Rows | None:
        """Brings single rows of the unit's stacks; None if its stacks can only be read whole."""
        with _unseen():
            self.found_rows = rows_of(self._unit, self._streams)
        return self.found_rows

    def find(self) -> None:
        """Make `decode` and `rows` now."""
        _ = self.decode, self.rows

    def find_early(self) -> None:
        """Make `decode` and `rows` before the unit opens, while the device is busy, unless that would wait for pages.

        Errors are ignored: the unit may never open, and if it does, they are raised then.
        """
        unit = self._unit
        sources = (unit.homes[alias].source for alias in unit.offsets)
        waits = any(isinstance(source, PageWindow) and source.is_coming for source in sources)
        if not waits and not unit.backend.capturing():
            with suppress(Exception):
                self.find()


def in_turn(plan: Plan, openings: Sequence[Opening]) -> None:
    """Set `following` of all openings: of units with bytes in the buffer, by their first position in a step."""
    for index, following in pairwise(unit for unit in dict.fromkeys(plan.manifest.order) if plan.decoded(unit)):
        openings[index].following = following
