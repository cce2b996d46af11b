"""A plan bound to memory: the engine, the ring and the faces of every unit. Opens and closes units; knows no module.

An open unit's tensors show their ring bytes, and what is coded is decoded first, into a buffer of all units. Between
steps they show their homes, and updates of those are found before the next step reads what was filled ahead. While the
addresses are fixed all of them show their ring bytes, and units are held and let go without a look at them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from weightstream.codec import coding
from weightstream.errors import OffloadError
from weightstream.plan.plan import Plan
from weightstream.plan.ring import aligned
from weightstream.runtime.backend import Backend, Side
from weightstream.runtime.engine import Counters, Engine
from weightstream.runtime.faces import Face, UnitFaces
from weightstream.runtime.homes import Homes, UnitCopies
from weightstream.runtime.timeline import Timeline
from weightstream.runtime.values import tensors_in

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(eq=False, slots=True)
class Opening:
    """One opening of a unit; `waited` once the engine holds the unit for it."""

    unit: int
    waited: bool = False


def _unseen(method: _Method) -> _Method:
    """What is done to tensors in here, their classes do not see."""

    @wraps(method)
    def quietly(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return method(*args, **kwargs)

    return cast(_Method, quietly)


class Binding:
    """One plan over one ring. Not thread-safe."""

    def __init__(
        self,
        plan: Plan,
        ring: torch.Tensor,
        buffer: torch.Tensor,
        homes: Homes,
        backend: Backend,
        counters: Counters,
        timeline: Timeline,
    ) -> None:
        self.plan = plan
        self.openings: list[Opening] = []
        self._in_buffer: Counter[int] = Counter()  # units at fixed addresses whose decoded weights are in the buffer
        self.updated: set[str] = set()  # tensors that a forward updated, which only an eager step can follow
        self._homes = homes
        self._backend = backend
        self._counters = counters
        self._ring, self._buffer = ring, buffer
        num = range(len(plan.manifest.units))
        self._faces = [self._unit_faces(unit, ring, plan.extents[unit].offset, buffer) for unit in num]
        self._coded = [frozenset(plan.decoded(unit)) for unit in num]
        self._decodings = [self._decoding(unit) for unit in num]
        self._borrowed: dict[int, UnitFaces] = {}
        self._step_end = backend.event()
        self._copies = UnitCopies(homes, plan, ring)
        self.engine = Engine(plan, backend, self._copies, counters, timeline)
        self.engine.prime()
        self.rest()

    def faces(self) -> Iterable[Face]:
        """Every streamed tensor object of every unit; a tied one once per unit."""
        return (face for unit in self._faces for face in unit.faces)

    def begin_step(self) -> None:
        """Go back to the start of the order."""
        self.wake()
        self.engine.begin_step()

    @_unseen
    def wake(self) -> None:
        """See updates that were made since `rest`."""
        self._homes.unguard()
        self._backend.wait(Side.COMPUTE, self._step_end)
        for face in self.faces():
            face.unwatch()
        self._leave_written()
        self._stale([face for face in self.faces() if face.adopt() or face.changed()])
        for faces in self._faces:
            self._leave(self._homes.leave_files(faces.coded_written()))
        self.engine.forget(unit for unit in self.engine.held() if self._faces[unit].home_was_written())

    @_unseen
    def rest(self, units: Iterable[int] | None = None) -> None:
        """The step is over: users may read and update weights until the next, which may run on another stream."""
        self._backend.record(Side.COMPUTE, self._step_end)
        self._homes.guard()
        for unit in self.engine.held():
            self._faces[unit].sample()
        for unit in range(len(self._faces)) if units is None else units:
            for face in self._faces[unit].faces:
                face.watch()

    def moving(self) -> list[str]:
        """Tensors without a fixed address: several units hold them, each in its own extent."""
        places: dict[int, set[int]] = {}
        for face in self.faces():
            places.setdefault(id(face.member.tensor), set()).add(face.ring.data_ptr())
        return sorted({f.member.names[0] for f in self.faces() if len(places[id(f.member.tensor)]) > 1})

    @_unseen
    def fix(self) -> None:
        """Show the ring bytes of every unit, whatever they hold just now."""
        for unit in self._faces:
            unit.to_ring()

    @_unseen
    def unfix(self) -> None:
        """Show the homes again; raises if a weight was updated meanwhile, for the update is lost."""
        self.abandon()
        updated = sorted({face.member.names[0] for face in self.faces() if face.changed() or not face.in_ring()})
        for face in self.faces():
            face.show(face.home)
            face.agree()
        self.rest()
        if updated:
            self.engine.forget(self.engine.held())
            raise OffloadError(
                f"{', '.join(updated)} changed inside of a compiled or captured step, where updates are lost: update "
                "weights outside of it, and run modules that update their own, such as norms in training mode, eager"
            )

    def hold(self, unit: int) -> None:
        """Order compute after the unit's fill; its addresses are fixed."""
        if not self.plan.streams(unit):
            return
        self.engine.begin_if_behind(unit)
        if self.engine.is_blocked(unit):
            raise OffloadError(
                f"unit {self.plan.manifest.units[unit].name} runs inside of another that holds its bytes of the ring: "
                "run this model eager, or give a larger budget"
            )
        self.engine.wait(unit)

    def enter(self, unit: int) -> None:
        """Take the buffer for a unit that computes at fixed addresses."""
        if self._coded[unit] and self._in_buffer.keys() - {unit}:
            raise OffloadError(
                f"unit {self.plan.manifest.units[unit].name} runs inside of another, and both are coded: run this "
                "model eager, or set codec='none'"
            )
        if self._coded[unit]:
            self._in_buffer[unit] += 1

    def leave(self, unit: int) -> None:
        """Undo `enter`: the unit's last kernel is queued."""
        self._in_buffer -= Counter([unit])

    def abandon(self) -> None:
        """Release what an error kept from being released."""
        self.engine.abandon()
        self._in_buffer.clear()

    def decode(self, unit: int) -> None:
        """Queue the decoding of the unit's coded weights, ordered after their fill, behind whoever used the buffer."""
        if self._coded[unit] and self._in_buffer[unit] <= 1:  # else it is there
            self._backend.launch(self._decodings[unit])

    def let_go(self, unit: int) -> None:
        """The unit's last kernel is queued."""
        if self.plan.streams(unit):
            self.engine.release(unit)

    @_unseen
    def open(self, opening: Opening, alone: bool) -> None:
        """Make the unit's tensors show its bytes, ordered after their fill. `alone`: outside of a step."""
        unit = opening.unit
        again = self._is_open(unit)  # called from inside its own forward
        self.openings.append(opening)
        faces = self._faces[unit]
        if alone:
            self._backend.wait(Side.COMPUTE, self._step_end)
            for face in faces.faces:
                face.unwatch()
            self._leave_written()
        if alone:
            self._leave(self._homes.leave_files(faces.coded_written()))
        if alone and faces.home_was_written():
            self.engine.forget([unit])
        if not again:  # whoever ran before this unit may have updated what was filled ahead
            self._stale([face for face in faces.faces if face.adopt() or face.changed()])
        if alone and self.engine.is_behind(unit):
            self.engine.begin_step()
        if unit not in self._borrowed and (self.engine.is_blocked(unit) or self._buffer_is_used(unit)):
            self._borrowed[unit] = self._borrow(unit)
        elif unit not in self._borrowed:
            if self.plan.streams(unit):
                self.engine.wait(unit)
            opening.waited = True
            if not again:
                self.decode(unit)
        (self._borrowed.get(unit) or faces).to_ring()

    @_unseen
    def close(self, opening: Opening, alone: bool, training: bool) -> None:
        """Show the homes again and let the unit's bytes go, however far `open` came."""
        if opening not in self.openings:
            return
        self.openings.remove(opening)
        unit, borrowed = opening.unit, self._borrowed.get(opening.unit)
        last = not self._is_open(unit)
        if last and (opening.waited or borrowed):
            updated = (borrowed or self._faces[unit]).to_home(training)
            self.updated |= {face.member.names[0] for face in updated}
            self._stale(updated)
        if opening.waited:
            self.let_go(unit)
        elif last:
            self._borrowed.pop(unit, None)
        if alone:
            self.rest([unit])

    def own_outputs(self, output: object) -> bool:
        """Give outputs that are views of streamed weights memory of their own: the next fill overwrites the ring."""
        found = False
        borrowed = [faces.faces[0].ring for faces in self._borrowed.values()]
        ours = {memory.untyped_storage().data_ptr() for memory in (self._ring, self._buffer, *borrowed)}
        for tensor in tensors_in(output):
            with suppress(RuntimeError, NotImplementedError):  # wrappers of functorch have no storage
                if tensor.untyped_storage().data_ptr() in ours:
                    tensor.data = tensor.data.clone()
                    found = True
        return found

    def has_buffers(self, unit: int) -> bool:
        """Whether the unit streams buffers, which its forward may update unseen."""
        return any(face.member.kind is torch.Tensor for face in self._faces[unit].faces)

    def _is_open(self, unit: int) -> bool:
        return any(opening.unit == unit for opening in self.openings)

    def _buffer_is_used(self, unit: int) -> bool:
        """Whether the decoded weights of another unit are in the buffer that this one needs."""
        others = (o.unit for o in self.openings if o.unit != unit and o.unit not in self._borrowed)
        return bool(self._coded[unit]) and any(self._coded[other] for other in others)

    def close_all(self) -> None:
        """Let go of the ring and of every tensor object."""
        self._homes.unguard()
        for face in self.faces():
            face.free()
        self._faces.clear()
        self.engine.close()
        self._copies = UnitCopies(self._homes, self.plan, torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._ring = self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._decodings.clear()

    def shows(self, tensor: torch.Tensor) -> bool:
        """Whether an open unit shows this tensor object."""
        return any(face.member.tensor is tensor for o in self.openings for face in self._faces[o.unit].faces)

    def _unit_faces(self, unit: int, base: torch.Tensor, start: int, buffer: torch.Tensor) -> UnitFaces:
        """The faces of a unit over memory of the device, its bytes at `start`, those that are decoded in `buffer`."""
        faces: list[Face] = []
        homes = []
        mine = {spec.name for spec in self.plan.manifest.units[unit].tensors}
        decoded = self.plan.decoded(unit)
        plain = {alias: start + at for alias, at in self.plan.streamed(unit).items() if alias not in decoded}
        for alias, offset in (plain | decoded).items():
            home_of, memory = self._homes.homes[alias], buffer if alias in decoded else base
            group = home_of.group
            homes.append(home_of)
            for member in group.members:
                if member.spec.name in mine:
                    ring, home = member.view(memory, offset), member.view(group.home, 0)
                    alone = len(group.members) == 1
                    faces.append(Face(member=member, source=home_of, home=home, ring=ring, alone=alone))
        return UnitFaces(faces, homes)

    def _decoding(self, unit: int) -> Callable[[], None]:
        """What decodes the coded weights of a unit; those that are coded no more are copied as they are."""
        parts, left = [], []
        streamed, start = self.plan.streamed(unit), self.plan.extents[unit].offset
        for alias, offset in self.plan.decoded(unit).items():
            home = self._homes.homes[alias]
            out = self._buffer[offset : offset + aligned(home.group.nbytes)]
            if home.layout is None:
                left.append((home, out[: home.group.nbytes]))
                continue
            memory = self._ring[start + streamed[alias] :] if alias in streamed else home.coded
            assert memory is not None
            parts.append((memory[: home.layout.nbytes], home.layout, out))
        run = coding.decoding(parts) if parts else None

        def decode() -> None:
            if left and self._backend.capturing():
                raise OffloadError(f"{left[0][0].group.alias} was updated since it was coded: offload the model again")
            for home, out in left:
                self._homes.plain_into(home, out)
            if run is not None:
                run()

        return decode

    def _borrow(self, unit: int) -> UnitFaces:
        """Faces over memory of their own, filled at once: a unit in use holds the unit's bytes of the ring."""
        with torch.inference_mode(False), torch.no_grad():
            decoded = self.plan.decoded(unit)
            memory = self._backend.alloc(self.plan.extents[unit].nbytes)
            spans = (offset + aligned(self._homes.homes[alias].group.nbytes) for alias, offset in decoded.items())
            buffer = self._backend.alloc(max(spans, default=0))
            for alias, offset in (self.plan.streamed(unit) | decoded).items():
                home, target = self._homes.homes[alias], buffer if alias in decoded else memory
                self._homes.plain_into(home, target[offset : offset + home.group.nbytes])
            self._counters.fills += 1
            self._counters.unplanned_fills += 1
            self._counters.filled_nbytes += self.plan.unit_nbytes[unit]
            return self._unit_faces(unit, memory, 0, buffer)

    def _leave(self, aliases: set[str]) -> None:
        """The files of these no longer hold their bytes: from now on their copies come from where the bytes are."""
        if aliases:
            self._homes.sources_changed = True
            self.engine.forget(self._copies.forget(aliases))
            for unit in [unit for unit, coded in enumerate(self._coded) if coded & aliases]:
                self._decodings[unit] = self._decoding(unit)

    def _leave_written(self) -> None:
        """What was written past every counter of versions may be again, by whoever holds the memory."""
        left = self._homes.leave_written()
        for face in self.faces() if left else ():
            if face.member.spec.alias in left and not face.changed():
                face.lend()
        self._leave(left)

    def _stale(self, updated: list[Face]) -> None:
        """The homes of these tensors changed: every unit that holds them elsewhere must be filled again."""
        if not updated:
            return
        aliases = {face.member.spec.alias for face in updated}
        self._leave(self._homes.leave_files(aliases))
        for unit, faces in enumerate(self._faces):
            mine = [face for face in faces.faces if face.member.spec.alias in aliases]
            for face in mine:
                face.agree()
            if mine:
                self.engine.forget([unit])
