"""The seam between a forward that reads single rows of its stacks and the code that brings these rows to the device.

A stack is a weight of which ids on the device name the rows, such as the matrices of a layer's experts. `Picks` is the
side of the model: adapters implement it for the classes that they know. `RowProvider` is the side of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch


class ForwardCall(NamedTuple):
    """A call of a module's forward, which may be any Python function, with its arguments."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class IndexedStack(Protocol):
    """A substitute for a stack, which a forward indexes with the ids that were selected."""

    @property
    def memory(self) -> torch.Tensor | None:
        """Memory of shape (slots, *row) with the selected rows at `slots`; None where they are compressed."""

    @property
    def slots(self) -> torch.Tensor:
        """The place in `memory` of each id that was selected."""

    def __getitem__(self, ids: torch.Tensor, /) -> torch.Tensor:
        """The rows that were selected, of shape (ids, *row)."""


class RowsAt(Enum):
    """Where the rows of a wave are when it is cut."""

    HOST = "host memory"
    COMING = "on their way to the device"
    SLOTS = "slots"


class RowWave(NamedTuple):
    """Rows that a forward reads together, and their places in the memory where they are then."""

    rows: Sequence[int]
    places: Sequence[int]
    at: RowsAt = RowsAt.HOST


class RowWaves(Protocol):
    """Rows of some stacks that are in host memory, which come to the device a few at a time."""

    @property
    def device(self) -> torch.device:
        """Where they come to."""

    @property
    def most(self) -> int:
        """The rows that may come at a time."""

    def cut(self, rows: Sequence[int], most: int) -> Sequence[RowWave]:
        """These rows, all different, in waves of up to `most`, to be brought next. The order of the rows may change."""

    def bring(self, waves: Sequence[RowWave]) -> Iterator[tuple[torch.Tensor, ...]]:
        """For each of the waves of a `cut`, in order, memory of shape (places, *row) for each stack.

        Work that is queued before the next wave is asked for may read that memory. Ask until the waves end: only then
        is all memory free for later waves.
        """


class RowProvider(Protocol):
    """Brings rows of the stacks of one unit to the device. Stacks are known by the `id()` of their tensor objects."""

    @property
    def stacks(self) -> Collection[int]:
        """All stacks of which it brings rows."""

    @property
    def most(self) -> int:
        """The largest number of ids that `select` takes."""

    @property
    def look_ahead(self) -> Callable[[torch.Tensor], None] | None:
        """A function to call with the hidden states of a call, after its rows are selected; None: no prefetching."""

    def capturing(self) -> bool:
        """Whether a graph is being captured, in which the host must not wait for the device."""

    @property
    def has_places(self) -> bool:
        """Whether there is memory for whole stacks besides that of selected rows."""

    def places(self, num_ids: int) -> bool:
        """Whether a call with this many ids may use `place`.

        Ask before every such call: the answer depends on the number of ids in the call before.
        """

    def select(self, ids: torch.Tensor) -> Mapping[int, IndexedStack]:
        """Substitutes for the stacks that give the rows of these ids. The next selection overwrites these rows."""

    def place(self, ids: torch.Tensor) -> None:
        """Bring the rows of these ids to their places in the whole stacks, which the weights show."""

    @property
    def has_slots(self) -> bool:
        """Whether kernels may read rows in their slots, as `slots` and `in_slots` offer."""

    def slots(self, ids: torch.Tensor) -> torch.Tensor:
        """The slots of the rows of these ids, of the same shape and dtype. Takes up to `most` ids."""

    def slot_of(self) -> torch.Tensor:
        """The slot of each row, int32, after a call of `slots`; the slot of a row that has none is -1."""

    def in_slots(self) -> AbstractContextManager[None]:
        """Inside, the stacks show their slots: a stack of all rows has slot i at i. What follows the slots is
        undefined, and must not be read."""

    def streams(self) -> bool:
        """Whether a call that names nearly all rows may use `stream`, as the host may wait for its ids."""

    def stream(self, stacks: Sequence[int]) -> RowWaves:
        """Brings rows of these stacks to the device in waves, in memory that those of other stacks use next."""


class Picks(Protocol):
    """How the forward of a module reads single rows of its stacks."""

    @property
    def stacks(self) -> Collection[torch.Tensor]:
        """The tensors of which it reads rows: all have as many."""

    @property
    def streams(self) -> Sequence[Sequence[torch.Tensor]]:
        """The tensors of each call of `RowProvider.stream` by which it reads all rows a few at a time, in the order in
        which it reads them; empty if it does not."""

    @property
    def ids_per_token(self) -> int:
        """The rows that a token names to kernels, which read them in their slots; 0 for a forward that copies rows."""

    def why_whole(self) -> str | None:
        """Reason why every call reads whole stacks, or None."""

    def forward(self, call: ForwardCall, rows: RowProvider) -> Callable[..., Any] | None:
        """A function with the same results as `call.forward` for these arguments; None if it would read whole stacks.

        It reads the rows of `rows.select(ids)`, those of `rows.slots(ids)` inside of `rows.in_slots()`, or only rows
        that it has brought by `rows.place(ids)`, and then passes its hidden states to `rows.look_ahead`.
        """

    @property
    def guesses(self) -> bool:
        """Whether `guess` is known to work for this module."""

    def guess(self, states: torch.Tensor) -> torch.Tensor | None:
        """Ids of rows that the forward would probably read for these hidden states, the likeliest first; None if
        they cannot be predicted."""
