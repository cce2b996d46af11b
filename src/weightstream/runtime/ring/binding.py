"""A plan bound to memory: the engine, the ring and the views of every unit. Opens and closes units; knows no module.

[Note: two ways to show a weight]
A streamed tensor shows its home, where its true bytes are, or its bytes in the ring. There are two ways to switch:
- Eager steps switch per unit: a unit's tensors show the ring from its `open` to its `close`, all others their homes.
  A weight that is read outside of its unit then shows true bytes on the CPU; for a GPU these are memory of another
  device, so that the read raises. It never shows other weights' bytes in the ring. The first, watched step finds such
  reads.
- Steps at fixed addresses switch all at once (`fix`, `unfix`): compiled code and graphs hold addresses, so a tensor
  may not move inside of them. Units then only `wait` and `release`. A weight read outside of its unit would be stale
  there, so such steps are refused until a watched step has shown that there is none.
Both order the bytes by `wait` and `release`; eager steps add two assignments per tensor.

[Note: the decode buffer]
Compressed weights cross the link compressed and are decoded after the wait of their unit, into one buffer of all
units. The kernels of a unit are queued before the next unit's decoding on the same stream, so no event is needed. Two
such units cannot be open at once: in an eager step the inner one borrows memory of its own; at fixed addresses it
raises.

[Note: a step that is cut]
An error or an interrupt may end a step at any line, of this file too. Three rules keep the weights right:
- Calls that may raise come before changes (`has_update` before `take`, `Opening.find` before `to_ring`).
- Before a home is written to, copies of it elsewhere count as stale, and versions agree last (`_stale`). After a cut
  in between, the update is seen again, and made again, at the next entry.
- `heal` brings every tensor that shows the ring, the buffer or borrowed memory back to its home, and closes all units.
  The streamer calls it when a step fails, and again before the next step if that call was cut short, too.
So between steps no tensor shows memory of the ring. One that does raises, and never counts as an update.

[Note: views that outlive their unit]
Every unit has a storage object of its own for its bytes in the ring, and one for those in the buffer. While no tensor
of the unit shows it, its use count is known: a higher one at `close` means that a forward kept a view, which the next
fill would change. Outputs get memory of their own. Views kept elsewhere cannot be given any: `kept` reports the unit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch

from weightstream.errors import InvariantError, OffloadError, StoreError
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import aligned
from weightstream.runtime.devices.backend import Backend, StepEnd, owners
from weightstream.runtime.experts.prefetch import Ahead
from weightstream.runtime.experts.row_stream import RowStream, StreamBuffer
from weightstream.runtime.ring.engine import Counters, Engine, State
from weightstream.runtime.ring.opening import Opening, in_turn
from weightstream.runtime.ring.shared_memory import SharedMemory
from weightstream.runtime.ring.tensor_views import BoundUnit, CountedStorage, StreamedTensor, UnitTensors, noticed
from weightstream.runtime.ring.timeline import Timeline
from weightstream.runtime.tensors.leaves import Role
from weightstream.runtime.tensors.thread_state import unseen
from weightstream.runtime.weights.decompression import BufferedUnit, PlanMemory
from weightstream.runtime.weights.homes import Homes, UnitCopies
from weightstream.runtime.weights.picks import ForwardCall, Picks


class Binding:
    """One plan over one ring. Not thread-safe: callers hold the gate's lock."""

    def __init__(
        self,
        plan: Plan,
        memory: PlanMemory,
        homes: Homes,
        backend: Backend,
        counters: Counters,
        timeline: Timeline,
        block: SharedMemory | None = None,
        picks: Mapping[int, Picks] = MappingProxyType({}),
        has_graphs: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plan = plan
        self.memory = memory
        self._ours = [(part.data_ptr(), part.data_ptr() + part.numel()) for part in memory if part.numel()]
        self.updated: set[str] = set()  # tensors that a forward updated, which works in eager steps only
        self.open_units: list[BoundUnit] = []  # the innermost last
        self.is_awake = False  # from the begin of `wake` to the end of `rest`
        # tensors that show the true bytes outside of their unit until a watched step ends
        self._served: list[StreamedTensor] = []
        self._has_graphs = has_graphs  # whether autograd may hold views
        self._homes = homes
        self._backend = backend
        self._step_end = StepEnd(backend)
        self._copies = UnitCopies(homes, plan, memory.ring)
        self._picks = picks
        self.waves = StreamBuffer(memory.buffer[: plan.own_buffer_nbytes], backend, self._streams_from)
        self.units = [self._bound(unit) for unit in range(len(plan.manifest.units))]
        # of a tensor that several units share, one for each unit
        self.tensors = [streamed for unit in self.units for streamed in unit.views.tensors]
        self._by_storage = {counted.storage._cdata: unit.index for unit in self.units for counted in unit.storages}
        self._addresses = [_spans(counted.storage for counted in unit.storages) for unit in self.units]
        in_turn(plan, [unit.opening for unit in self.units])
        self.ahead = Ahead(backend, plan.ahead, picks, lambda index: self.units[index].opening.found_rows)
        self.engine = Engine(plan, backend, self._copies, counters, timeline, block, self.open_units)
        self.engine.prime()
        self.rest()

    # -- between steps ---------------------------------------------------------------------------------------------

    @unseen
    def wake(self) -> None:
        """Begin a step: unguard the tensors, and take in updates made since the last step."""
        self.is_awake = True
        self._homes.unguard()
        self._step_end.follow()
        self._leave_written()
        found = self._see(self.tensors)
        # these may have been written to without raising a version: from now on they are copied from memory
        self._leave({streamed.alias for streamed in found if streamed.is_past_file()})
        self._forget({streamed.alias for streamed in found})
        for streamed in found:
            streamed.member.touched = False
        for streamed in self.tensors:
            streamed.member.unguard()
            if streamed.is_lazy:
                streamed.guard_unread()

    @unseen
    def rest(self) -> None:
        """End a step: users may read and update weights until the next one, which may run on another stream."""
        self.waves.drop()
        self._step_end.mark()
        self._homes.guard()
        for streamed in self.tensors:
            streamed.member.guard(streamed.on_access)
        self.is_awake = False

    @unseen
    def heal(self, trains: Callable[[int], bool]) -> list[str]:
        """Close all units that a cut step has left open, [Note: a step that is cut]; may be called at any time.

        `trains`: whether a unit is in training mode, in which norms update buffers without raising a version. Returns
        the names of tensors that were updated at fixed addresses, where updates are lost.
        """
        for unit in self.units:
            if unit.opened or unit.borrowed is not None:
                shown = unit.borrowed or unit.views
                # assigned data that does not fit, or a file that is gone: the weight stays as it was
                with suppress(OffloadError, StoreError):
                    self._stale(shown.updated(unit.has_buffers and trains(unit.index)))
                shown.to_home()
            unit.opened, unit.borrowed = 0, None
        self.open_units.clear()
        self.withdraw()
        lost = [streamed for streamed in self.tensors if self._is_ours(streamed.tensor) and streamed.changed()]
        self._show_homes()
        self.abandon()
        if lost:
            self.engine.forget(self.engine.held())
        self.rest()
        return sorted({streamed.member.names[0] for streamed in lost})

    def _show_homes(self) -> None:
        """Show the homes of all tensors that show the ring or the buffer."""
        for streamed in self.tensors:
            if self._is_ours(streamed.tensor):
                streamed.member.show(streamed.home)
                streamed.agree()

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shows memory of the ring, the buffer or slots."""
        at = tensor.data_ptr()
        return any(begin <= at < end for begin, end in self._ours)

    def addresses(self, index: int) -> list[tuple[int, int]]:
        """Ranges of addresses in which the open unit shows its weights, and no activations are."""
        if (borrowed := self.units[index].borrowed) is None:
            return self._addresses[index]
        return _spans(streamed.ring.untyped_storage() for streamed in borrowed.tensors)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Ranges of addresses of the ring, the buffer and slots."""
        return self._ours

    def closed_owner(self, tensor: torch.Tensor) -> int | None:
        """The unit whose bytes of the ring or the buffer the tensor shows, if that unit is closed now; else None."""
        index = self._by_storage.get(tensor.untyped_storage()._cdata)
        if index is None or (self.units[index].opened and self.units[index].borrowed is None):
            return None
        return index

    def reschedule(self, plan: Plan) -> None:
        """Follow the schedules of a plan that has all weights at the same addresses, from the next step on."""
        self.plan = plan
        self.engine.reschedule(plan)

    # -- units of eager steps --------------------------------------------------------------------------------------

    @unseen
    def open(self, index: int) -> bool:
        """Make the unit's tensors show its bytes in the ring; kernels queued from now on run after their fill.

        Returns whether the unit was closed before.
        """
        unit = self.units[index]
        unit.opened += 1
        self.open_units.append(unit)
        try:
            if unit.opened == 1:  # else the unit calls itself, and its bytes are there
                self._bring(unit)
            (unit.borrowed or unit.views).to_ring()
        except BaseException:  # an interrupt may come anywhere
            self._forget_opening(unit)
            if not unit.opened:
                (unit.borrowed or unit.views).to_home()
                unit.borrowed = None
                if self.engine.fences[index].state is State.IN_USE:
                    self.engine.release(index)
            raise
        return unit.opened == 1

    def _bring(self, unit: BoundUnit) -> None:
        """Order compute after the fill of the unit, and decode; if its memory is in use, fill memory of its own."""
        self._see(unit.views.tensors)  # an earlier unit of this step may have updated weights that were filled ahead
        if self._is_blocked(unit):
            unit.borrowed = self._borrow(unit)
            return
        if unit.streams:
            self.engine.wait(unit.index)
        if unit.coded:
            self.decode(unit.index)

    def _forget_opening(self, unit: BoundUnit) -> None:
        unit.opened -= 1
        unit.is_picked = False
        if self.open_units[-1] is unit:
            self.open_units.pop()
            return
        place = max(place for place, other in enumerate(self.open_units) if other is unit)
        del self.open_units[place]  # threads of one forward close in any order

    @unseen
    def close(self, index: int, output: object, *, training: bool, watched: bool) -> bool:
        """Show the homes again and release the unit's bytes; returns whether outputs were views of its weights.

        `training`: the forward may have updated buffers without raising a version. `watched`: the watch of the step
        holds views itself, so that kept ones cannot be counted.
        """
        unit = self.units[index]
        if unit.opened != 1:  # called from inside its own forward; or the step was healed meanwhile
            if unit.opened:
                self._forget_opening(unit)
            return False
        borrowed = unit.borrowed
        shown = borrowed or unit.views
        has_views = False
        try:
            try:
                if updated := shown.updated(training):
                    self.updated |= {streamed.member.names[0] for streamed in updated}
                    self._stale(updated)
            finally:
                shown.to_home()
            unit.borrowed = None
            # before the release: the outputs' new memory is copied from the ring before the next fill
            has_views = borrowed is not None or unit.num_views() > 0
            return has_views and shown.clone_views(output)
        finally:
            if has_views and borrowed is None and not watched and not self._has_graphs():
                self.look_for_kept(unit)
            self._forget_opening(unit)
            if borrowed is None and unit.streams:
                self.engine.release(index)
            if unit.opening.following is not None and (following := unit.opening.then()) is not None:
                self.units[following].opening.find_early()

    def serve(self, streamed: StreamedTensor, view: torch.Tensor) -> None:
        """Show the true bytes until `withdraw`, for a read outside of the tensor's unit."""
        self._served.append(streamed)
        streamed.member.show(view)

    def withdraw(self) -> None:
        """Show the homes of all served tensors again; updates that the model made meanwhile are taken over."""
        for streamed in self._served:
            if streamed.changed():
                streamed.take()
            streamed.member.show(streamed.home)
        self._served.clear()

    def look_for_kept(self, unit: BoundUnit) -> None:
        """Report the unit if a view of its bytes is held elsewhere, now that its own tensors show their homes."""
        # An unreachable cycle of objects may hold the view; most are young. In a capture, only what it has made itself
        # may be freed, which is the youngest generation: an older graph among it would make the capture invalid.
        for generation in (0,) if self._backend.capturing() else (1, 2):
            if unit.is_kept or not unit.num_views():
                return
            gc.collect(generation)
        if unit.num_views():
            unit.is_kept = True

    @property
    def kept(self) -> list[int]:
        """Units of which a view outlived their forward."""
        return [unit.index for unit in self.units if unit.is_kept]

    def is_shown_by_open_unit(self, tensor: torch.Tensor) -> bool:
        return any(streamed.member.tensor is tensor for unit in self.open_units for streamed in unit.views.tensors)

    @unseen
    def picked(self, index: int, call: ForwardCall, eager: bool) -> Callable[..., Any] | None:
        """The forward to run instead of the unit's own. It brings only those rows of the weights that it reads.

        None: the unit's own forward is to run, with all rows.
        """
        unit = self.units[index]
        if eager:
            self._see(unit.views.tensors)  # an earlier unit of this step may have updated them
        rows = None if self._is_blocked(unit) else unit.rows
        found = None if rows is None else self.ahead.reach(index, call, rows)
        unit.is_picked = found is not None
        return found

    def _streams_from(self, index: int) -> list[RowStream]:
        """The streams of rows of a unit, and those of the next unit that picks rows if no unit in between uses the
        buffer, in the order in which they are read."""
        coming = min((other for other in self._picks if other > index), default=index)
        is_free = not any(self.units[other].coded for other in range(index + 1, coming))
        found: list[RowStream] = []
        for unit in (index, coming)[: 1 + (is_free and coming != index)]:
            if (rows := self.units[unit].opening.found_rows) is not None:
                found += rows.streams_of(self._picks[unit])
        return found

    def _is_blocked(self, unit: BoundUnit) -> bool:
        """Whether another open unit uses bytes of the ring that this unit needs, or the buffer."""
        if self.engine.is_blocked(unit.index):
            return True
        return bool(unit.coded) and any(o.coded for o in self.open_units if o is not unit and o.borrowed is None)

    # -- units at fixed addresses ------------------------------------------------------------------------------------

    @unseen
    def fix(self) -> None:
        """Show the ring bytes of every unit, filled or not."""
        for unit in self.units:
            unit.opening.find()  # now: it waits for pages, allocates and may raise, and a capture may follow
        for unit in self.units:
            unit.views.to_ring()

    @unseen
    def unfix(self) -> None:
        """Show the homes again. Raises `OffloadError` if a weight was updated meanwhile, as the update is lost."""
        self.abandon()
        updated = sorted(
            {streamed.member.names[0] for streamed in self.tensors if streamed.changed() or not streamed.in_ring()}
        )
        for streamed in self.tensors:
            streamed.member.show(streamed.home)
            streamed.agree()
        self.rest()
        if updated:
            self.engine.forget(self.engine.held())
            raise OffloadError(
                f"{', '.join(updated)} changed inside of a compiled or captured step, where updates are lost: update "
                "weights outside of it, and run modules that update their own, such as norms in training mode, eager"
            )

    def enter(self, index: int) -> None:
        """Reserve the buffer for a unit that computes at fixed addresses."""
        unit = self.units[index]
        if unit.coded and any(other.in_buffer for other in self.units if other is not unit):
            raise OffloadError(
                f"unit {self.plan.manifest.units[index].name} runs inside of another, and both are compressed: run "
                "this model eager, or set codec='none'"
            )
        unit.in_buffer += bool(unit.coded)

    def leave(self, index: int) -> None:
        """Undo `enter`: the unit's last kernel is queued."""
        self.units[index].in_buffer -= bool(self.units[index].coded)
        self.units[index].is_picked = False

    def hold(self, index: int) -> None:
        """Order compute after the fill of a unit whose addresses are fixed."""
        if not self.units[index].streams:
            return
        self.engine.begin_if_behind(index)
        if self.engine.is_blocked(index):
            raise OffloadError(
                f"unit {self.plan.manifest.units[index].name} runs inside of another that holds its bytes of the ring: "
                "run this model eager, or give a larger budget"
            )
        self.engine.wait(index)

    def decode(self, index: int) -> None:
        """Queue the decoding of the unit's compressed weights, after their fill and earlier reads of the buffer."""
        if self.units[index].coded and self.units[index].in_buffer <= 1:  # else the unit calls itself, and is decoded
            self.engine.take_over(decodes=True)  # the buffer may be part of memory that several models share
            if not self.units[index].is_picked:
                self.waves.drop()
                self._forget_slots(index)
                self._backend.launch(self.units[index].opening.decode)

    def _forget_slots(self, index: int) -> None:
        """Empty the slots in the part of the buffer that the unit is about to use."""
        nbytes = sum(aligned(self._homes.homes[alias].group.nbytes) for alias in self.units[index].coded)
        if not self.plan.shared_nbytes or nbytes <= self.plan.own_buffer_nbytes:
            return
        self.ahead.join()  # rows may be on their way to these slots
        end = self.memory.buffer.data_ptr() + nbytes
        for unit in self.units:
            rows = unit.opening.found_rows
            if rows is not None and rows.cache is not None and rows.cache.begins_at < end:
                rows.forget()

    def let_go(self, index: int) -> None:
        """Release the unit's bytes: its last kernel is queued."""
        if self.units[index].streams:
            self.engine.release(index)

    def clone_views(self, index: int, output: object) -> None:
        """Give outputs that are views of the unit's weights memory of their own: the next fill overwrites these."""
        unit = self.units[index]
        if unit.num_views() > len(unit.views.tensors):  # at fixed addresses the unit's own tensors show the ring
            unit.views.clone_views(output)

    def abandon(self) -> None:
        """Release all units that an error has left in use."""
        self.ahead.drop()
        self.waves.drop()
        self.engine.abandon()
        for unit in self.units:
            unit.in_buffer, unit.is_picked = 0, False

    @unseen
    def close_all(self) -> None:
        """Drop the ring and every tensor object."""
        self._show_homes()
        self._homes.unguard()
        for streamed in self.tensors:
            streamed.member.unguard()
        self.engine.close()
        self.waves.close()
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copies, self.memory = UnitCopies(self._homes, self.plan, empty), PlanMemory(empty, empty, empty)
        self.units.clear()
        self.tensors.clear()
        self._by_storage.clear()

    # -- making units ------------------------------------------------------------------------------------------------

    def _bound(self, index: int) -> BoundUnit:
        plan, ring, buffer = self.plan, self.memory.ring, self.memory.buffer
        extent = plan.extents[index]
        coded = frozenset(plan.decoded(index))
        views = self._unit_views(
            index,
            self._backend.part(ring, extent.offset, extent.offset + extent.nbytes),
            self._backend.part(buffer, 0, buffer.numel()) if coded else buffer[:0],
        )
        storages = {
            streamed.ring.untyped_storage().data_ptr(): streamed.ring.untyped_storage() for streamed in views.tensors
        }
        return BoundUnit(
            index=index,
            streams=plan.streams(index),
            views=views,
            storages=tuple(CountedStorage(storage, owners(storage)) for storage in storages.values()),
            coded=coded,
            opening=Opening(
                BufferedUnit(
                    plan=plan, index=index, homes=self._homes.homes, memory=self.memory, backend=self._backend
                ),
                self.waves,
            ),
            has_buffers=any(streamed.member.role is not Role.PARAMETER for streamed in views.tensors),
        )

    def _unit_views(self, index: int, streamed: torch.Tensor, decoded: torch.Tensor) -> UnitTensors:
        """The views of a unit: of its bytes in the ring, and of the buffer that its weights are decoded into."""
        tensors: list[StreamedTensor] = []
        mine = {spec.name for spec in self.plan.manifest.units[index].tensors}
        in_buffer = self.plan.decoded(index)
        places = {alias: (streamed, at) for alias, at in self.plan.streamed(index).items() if alias not in in_buffer}
        places |= {alias: (decoded, at) for alias, at in in_buffer.items()}
        for alias, (memory, offset) in places.items():
            home = self._homes.homes[alias]
            for member in home.group.members:
                if member.spec.name in mine:
                    tensors.append(StreamedTensor.of(member, home, index, member.view(memory, offset), self._step_end))
        return UnitTensors(tensors)

    def _borrow(self, unit: BoundUnit) -> UnitTensors:
        """Views of new memory, filled now, as an open unit uses the buffer, or this unit's bytes of the ring."""
        index, plan = unit.index, self.plan
        with torch.inference_mode(False), torch.no_grad():
            decoded = plan.decoded(index)
            memory = self._backend.alloc(plan.extents[index].nbytes)
            spans = (offset + aligned(self._homes.homes[alias].group.nbytes) for alias, offset in decoded.items())
            buffer = self._backend.alloc(max(spans, default=0))
            for alias, offset in (plan.streamed(index) | decoded).items():
                home, target = self._homes.homes[alias], buffer if alias in decoded else memory
                home.source.plain_into(target[offset : offset + home.group.nbytes])
            self.engine.counters.count(plan.unit_nbytes[index], planned=False)
            return self._unit_views(index, memory, buffer)

    # -- updates -----------------------------------------------------------------------------------------------------

    def _leave(self, aliases: set[str]) -> None:
        """Copy these alias groups from memory from now on. They were updated: no file or compressed form holds them."""
        if left := self._homes.in_files(aliases):
            self._homes.sources_changed = True
            self.engine.forget(self._copies.forget(left))
            for unit in self.units:
                if unit.coded & left:
                    unit.opening = unit.opening.again()
        self._homes.leave_files(aliases)

    def _leave_written(self) -> None:
        """Find groups whose pages of a file were written to without raising a version; copy them from memory now."""
        if left := self._homes.written():
            for streamed in self.tensors:  # not reset: the writer still has the memory, and may write at any time
                streamed.member.lent |= streamed.alias in left and not streamed.changed()
            self._leave(left)

    def _see(self, tensors: list[StreamedTensor]) -> list[StreamedTensor]:
        """Take in updates of the homes of these tensors; returns the tensors that may have been updated.

        Raises `InvariantError` for a tensor that shows the ring outside of an open unit: these bytes are no weight.
        """
        if found := noticed(tensors):
            shown = [streamed for streamed in found if self._is_ours(streamed.tensor)]
            if lost := [
                streamed.member.names[0] for streamed in shown if not self.is_shown_by_open_unit(streamed.tensor)
            ]:
                raise InvariantError(
                    f"{', '.join(sorted(set(lost)))} show memory that weights are streamed through, outside of the "
                    "forward that they are there for: data that a forward saw was assigned to them, or a step was cut. "
                    "What is there now belongs to other weights"
                )
            # a tensor that shows the ring in another open unit shows no assigned data
            found = [streamed for streamed in found if streamed not in shown or streamed.changed()]
            self._stale([streamed for streamed in found if streamed.is_assigned() or streamed.changed()])
        return found

    def _stale(self, updated: list[StreamedTensor]) -> None:
        """Take over updates of these tensors, from the ring or from assigned data, in an order that may be cut short:
        copies of their homes elsewhere count as stale first, and the versions agree last."""
        if not updated:
            return
        aliases = {streamed.alias for streamed in updated}
        self._leave(aliases)
        self._forget(aliases)
        for streamed in updated:
            streamed.take()
        for streamed in self.tensors:
            if streamed.alias in aliases:
                streamed.agree()

    def _forget(self, aliases: set[str]) -> None:
        """Have these alias groups filled again in every unit: their bytes in the ring are stale."""
        if aliases:  # most steps update nothing
            self.ahead.join()
            self.waves.drop()
            self.engine.forget({streamed.unit for streamed in self.tensors if streamed.alias in aliases})
            for unit in self.units:
                if unit.coded & aliases and unit.opening.found_rows is not None:
                    unit.opening.found_rows.forget()


def _spans(storages: Iterable[torch.UntypedStorage]) -> list[tuple[int, int]]:
    """The begin and the end of their memory."""
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
