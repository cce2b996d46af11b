"""Whether a pass of several rows has the bits of one row at a time, decided from the operators that it runs.

Sums in another order round to the same bfloat16 in all but one of 10,000 to 1,000,000 cases, so outputs of a model are
no evidence. Instead each operator that adds is run on probes: values that cancel, so that its result is the residue of
rounding, which another order changes. The assumption is that kernels are chosen by operator, shapes, strides, dtypes
and alignment, not by values, and that elementwise kernels of a GPU compute each element alike; those of a CPU do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from weightstream.adapters.steps.row_split import (
    Cut,
    Place,
    RowPlan,
    Split,
    TensorLayout,
    attention_cuts,
    cuts_of,
    key_of,
    row_of,
)
from weightstream.runtime.streamer.read_watch import OperatorMode

_aten = torch.ops.aten
_WAITING = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_NUM_TURNS = 16  # probes of an operator, at least
_MAX_NBYTES = 16 << 20  # of a matrix that is made for a probe; a larger one is that of the model
_MIN_PAIRS = 16  # terms of a sum that cancel
_CHUNK = 4096  # bytes

_MOVES = frozenset(  # copies that strides may need for several rows only, and those of streamed weights
    (
        *("clone", "copy_", "_unsafe_view", "_reshape_alias", "lift_fresh", "lift_fresh_copy", "expand_copy", "empty"),
        *("empty_like", "empty_strided", "new_empty", "new_empty_strided", "_has_compatible_shallow_copy_type"),
    )
)
_ROW_WISE = frozenset(  # besides elementwise operators
    (
        *("embedding", "cat", "stack", "index", "index_select", "gather", "index_copy", "index_put", "_index_put_impl"),
        *("_unsafe_index", "scatter", "slice_scatter", "select_scatter", "masked_fill", "_to_copy", "fill", "zero"),
        *("full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"),
        *("arange", "scalar_tensor", "rsub", "tril", "triu", "flip", "repeat", "constant_pad_nd", "glu"),
        *("polar", "split_with_sizes_copy", "split_copy"),
    )
)


_EXACT = frozenset(  # elementwise operators that round correctly, in whatever code
    (
        *("add", "sub", "rsub", "mul", "div", "neg", "abs", "sign", "sqrt", "relu", "where", "masked_fill", "fill"),
        *("clamp", "clamp_min", "clamp_max", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "isin"),
        *("logical_and", "logical_or", "logical_not", "floor", "ceil", "round", "trunc", "isnan", "isinf", "copy"),
    )
)


class _Call(NamedTuple):
    """An operator with its arguments and outputs, flat, and tensors by their layouts. `sums`: of the tensors among its
    arguments, for an operator that has no probe."""

    function: Any
    spec: TreeSpec
    leaves: list[object]
    outputs: list[object]
    sums: list[torch.Tensor | None]

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: Any, output: Any) -> _Call:
        leaves, spec = tree_flatten((args, kwargs))
        outputs = [TensorLayout.of(leaf) for leaf in tree_flatten(output)[0]]
        is_opaque = _is_functional(function) and not _is_known(function, args, _name(function))
        sums = [_sum_of_bits(leaf) if is_opaque else None for leaf in leaves]
        return cls(function, spec, [TensorLayout.of(leaf) for leaf in leaves], outputs, sums)

    def __str__(self) -> str:
        return f"{self.function} of {[tuple(leaf.shape) for leaf in self.leaves if isinstance(leaf, TensorLayout)]}"

    def is_as(self, other: _Call) -> bool:
        return (self.spec, self.leaves) == (other.spec, other.leaves)


class _Tried(NamedTuple):
    """A call in a trial: `difference` of its rows at once from single ones, `split` if it can run row by row, else the
    `reason` against that. `nbytes`: of arguments without rows, which a split call reads for each row."""

    difference: str | None = None
    split: Split | None = None
    reason: str | None = None
    nbytes: int = 0


class RowTrial:
    """Compares the operators of a pass of `width` tokens with those of a pass of one."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._single: list[_Call] = []
        self._known: dict[object, str | None] = {}  # what probes have found
        self._tried: dict[Any, dict[object, list[_Tried]]] = {}  # by operator and arguments
        self._differences: dict[str, None] = {}  # in order
        self._reasons: dict[str, None] = {}  # against splits

    def run_single(self, step: Callable[[], Any]) -> Any:
        """Run the pass of one token."""

        def note(function: Any, args: Any, kwargs: Any, output: Any) -> None:
            with _disable_current_modes(), torch.no_grad():
                self._single.append(_Call.of(function, args, kwargs, output))

        with _Watch(note):
            return step()

    def run_wide(self, step: Callable[[], Any]) -> tuple[Any, RowPlan]:
        """Run the pass of `width` tokens. Returns its output, and how later passes have the bits of single tokens.
        Waits for the device."""
        singles = iter(self._single)
        is_aligned = True

        def check(function: Any, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal is_aligned
            if not is_aligned:
                return  # later operators have no partner
            single = next(singles, None)
            if single is None or single.function is not function:
                is_aligned = False
                self._refuse(f"operators of a row differ in {function}")
                return
            with _disable_current_modes(), torch.no_grad():
                self._note(single, args, kwargs, output)

        with _Watch(check) as watch:
            output = step()
        if watch.unseen is not None:
            self._refuse(watch.unseen)
        if is_aligned and (rest := next(singles, None)) is not None:
            self._refuse(f"operators of a row differ in {rest.function}")
        return output, self._plan()

    def _refuse(self, reason: str) -> None:
        self._differences[reason] = self._reasons[reason] = None

    def _note(self, single: _Call, args: Any, kwargs: Any, output: Any) -> None:
        wide = _Call.of(single.function, args, kwargs, output)
        tried = self._try(single, wide, args, kwargs, output)
        leaves = tree_flatten((args, kwargs))[0]
        cuts = () if tried.split is None else tried.split.cuts
        pairs = zip(leaves, cuts, strict=False)
        nbytes = sum(leaf.nbytes for leaf, cut in pairs if isinstance(leaf, torch.Tensor) and not isinstance(cut, Cut))
        by_key = self._tried.setdefault(wide.function, {})
        by_key.setdefault(key_of(wide.spec, leaves), []).append(tried._replace(nbytes=nbytes))
        if tried.difference is not None:
            self._differences[tried.difference] = None
        if tried.reason is not None:
            self._reasons[tried.reason] = None

    def _plan(self) -> RowPlan:
        """What the tried calls give. A call that differs is split, and so is each one of equal arguments."""
        splits: dict[Any, dict[object, Split | None]] = {}
        calls: Counter[str] = Counter()
        reasons = list(self._reasons)
        nbytes = 0
        for function, by_key in self._tried.items():
            if not any(each.difference is not None for found in by_key.values() for each in found):
                continue
            splits[function] = {}
            for key, found in by_key.items():
                splits[function][key] = None
                differing = next((each for each in found if each.difference is not None), None)
                if differing is None:
                    continue
                splits[function][key] = differing.split
                calls[_name(function) or str(function)] += len(found)
                nbytes += sum(each.nbytes for each in found)
                if any(each.split != differing.split for each in found):
                    reasons.append(f"{differing.difference}, and two such calls have unlike single rows")
        differences = list(self._differences)
        if reasons:
            return RowPlan(reason=reasons[0], differences=differences)
        return RowPlan(differences=differences, splits=splits, calls=calls, nbytes=nbytes)

    def _try(self, single: _Call, wide: _Call, args: Any, kwargs: Any, output: Any) -> _Tried:
        function, name = wide.function, _name(wide.function)
        if _WAITING & set(getattr(function, "tags", ())) and not (name == "index" and not _has_masks(args[1])):
            reason = f"the shapes of {function} depend on values"
            return _Tried(reason, reason=reason)
        tensors = [leaf for leaf in tree_flatten((args, kwargs, output))[0] if isinstance(leaf, torch.Tensor)]
        if wide.is_as(single):
            return _Tried()  # no rows
        has_floats = any(each.is_floating_point() or each.is_complex() for each in tensors)
        is_pointwise = torch.Tag.pointwise in getattr(function, "tags", ())
        is_on_cpu = any(each.device.type == "cpu" for each in tensors)
        is_exact = not (has_floats and is_on_cpu) or name.rstrip("_") in _EXACT
        if is_exact if is_pointwise else _is_row_wise(function, args, name):
            return _Tried()
        # sums of integers are exact, but may mix rows
        probe = _PROBES.get(getattr(function, "overloadpacket", None)) if has_floats else None
        find = cuts_of if probe is None else probe.cuts
        cuts = find(wide.leaves, single.leaves, self._width) if single.spec == wide.spec else None
        if cuts is None:
            reason = f"arguments of {wide} are not those of a row several times"
            return _Tried(reason, reason=reason)
        has_rows = any(isinstance(cut, Cut) for cut in cuts)
        if is_pointwise and not has_rows and _are_alike(wide.leaves, single.leaves):
            return _Tried()  # alignment is nothing to it
        if is_pointwise:
            difference: str | None = f"{function} computes the last elements in other code on a CPU"
        elif probe is None or _writes(function):
            difference = f"{function} is not known to treat rows alone"
        else:
            difference = None  # not known yet
        can_split = has_rows and _is_functional(function)
        if difference is not None and not can_split:
            return _Tried(difference, reason=difference)
        places = self._places(probe, wide, single)
        if has_rows and places is None:
            reason = f"outputs of {wide} have no entry for each row"
            return _Tried(reason, reason=reason)
        if probe is not None and difference is None:
            key = function, wide.spec, tuple(map(str, wide.leaves)), tuple(map(str, single.leaves))
            if key not in self._known:
                self._known[key] = self._difference(probe, wide, single, cuts, args, kwargs)
            difference = self._known[key]
        if not can_split:
            return _Tried(difference, reason=difference)
        if any(
            cut is None and a is not None and b is not None and not torch.equal(a, b)
            for cut, a, b in zip(cuts, single.sums, wide.sums, strict=True)
        ):
            return _Tried(difference, reason=f"{difference}, and its arguments without rows depend on other tokens")
        split = Split(
            tuple(cuts),
            tuple(None if cut is None else each for cut, each in zip(cuts, single.leaves, strict=True)),
            tuple(places or ()),
        )
        return _Tried(difference, split)

    def _places(self, probe: _Probe | None, wide: _Call, single: _Call) -> list[tuple[object, Place]] | None:
        """The layouts of outputs of all rows, and where a row is in each; None: one has no entry for each row."""
        found: list[tuple[object, Place]] = []
        num = None if probe is None else probe.num_outputs
        if len(wide.outputs) != len(single.outputs):
            return None
        for index, (whole, one) in enumerate(zip(wide.outputs, single.outputs, strict=True)):
            find = probe.cuts if probe is not None and index == 0 else cuts_of
            cuts = find([whole], [one], self._width)
            place = None if cuts is None else cuts[0]
            if not isinstance(whole, TensorLayout):
                found.append((None, None))
                continue
            is_split = isinstance(place, Cut) and not whole.overlaps
            if not is_split and (num is None or index < num):
                return None
            found.append((whole._replace(offset=0), place if is_split else None))
        return found

    def _difference(
        self, probe: _Probe, wide: _Call, single: _Call, cuts: list[Place], args: Any, kwargs: Any
    ) -> str | None:
        """How rows at once differ from single ones in an operator, or None."""
        try:
            return self._probe(probe, wide, single, cuts, args, kwargs)
        except torch.OutOfMemoryError:
            return f"there is no memory for a probe of {wide}"

    def _probe(
        self, probe: _Probe, wide: _Call, single: _Call, cuts: list[Place], args: Any, kwargs: Any
    ) -> str | None:
        function = wide.function
        originals = tree_flatten((args, kwargs))[0]
        devices = [leaf.device for leaf in wide.leaves if isinstance(leaf, TensorLayout)]
        chance = torch.Generator(devices[0]).manual_seed(self._width)
        is_same: list[torch.Tensor] = []
        for turn in range(max(_NUM_TURNS, probe.num_kinds * self._width)):
            values = probe.fill(args, kwargs, turn, chance)
            if values is None:
                return f"{wide} has no probe for its weights"
            row = (turn // probe.num_kinds) % self._width
            ours, own = [], []
            for value, original, cut, a, b in zip(
                tree_flatten(values)[0], originals, cuts, wide.leaves, single.leaves, strict=True
            ):
                is_kept = value is original  # whatever it is, its address does not depend on the number of rows
                whole = value if is_kept else a.holding(value)  # type: ignore[attr-defined]
                ours.append(whole)
                own.append(whole if is_kept and cut is None else row_of(whole, cut, row, b))
            outputs = [
                [t for t in tree_flatten(function(*more, **named))[0] if isinstance(t, torch.Tensor)][
                    : probe.num_outputs
                ]
                for more, named in (tree_unflatten(leaves, wide.spec) for leaves in (ours, own))
            ]
            for rows, one in zip(*outputs, strict=True):
                place = (probe.cuts([TensorLayout.of(rows)], [TensorLayout.of(one)], self._width) or [None])[0]
                part = row_of(rows, place, row, TensorLayout.of(one))
                is_same.append(torch.isfinite(one).all() & (_bits(part) == _bits(one)).all())
            floats = [one for one in outputs[1] if one.is_floating_point()]
            if probe.needs_float32 and not any(one.dtype.itemsize >= 4 for one in floats):
                return f"{wide} rounds too much to be probed"
        return None if bool(torch.stack(is_same).all()) else f"{wide} differs"


class _Watch(OperatorMode):
    """Calls `note(function, args, kwargs, output)` after each operator that computes.

    `unseen`: an operator that read memory for floats which no operator has written. So a kernel has that torch does not
    see. Weights are streamed into memory for bytes.
    """

    def __init__(self, note: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._unwritten: dict[int, torch.UntypedStorage] = {}  # alive, so that no other has their addresses
        self.unseen: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # wrapped tensors: the operators on the inner ones are seen later
        output = func(*args, **(kwargs or {}))
        is_view, name = getattr(func, "is_view", False), _name(func)
        if not is_view:
            self._follow(func, (args, kwargs), output, name)
            if name not in _MOVES:
                self._note(func, args, kwargs or {}, output)
        return output

    def _follow(self, func: Any, arguments: Any, output: Any, name: str) -> None:
        """Note whether memory is written, or read before it is."""
        if "empty" in name:
            if output.is_floating_point():
                self._unwritten |= {storage._cdata: storage for storage in _storages(output)}
            return
        for storage in _storages(arguments) if self._unwritten else ():
            if self._unwritten.pop(storage._cdata, None) is not None and not _writes(func):
                self.unseen = f"{func} reads what no operator has written"


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage() for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor) and leaf.numel()
    ]


def _writes(function: Any) -> bool:
    """Whether an operator writes to an argument."""
    schema = getattr(function, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _name(function: Any) -> str:
    """The name of an operator of torch, else ""."""
    packet = getattr(function, "overloadpacket", None)
    return str(packet.__name__) if packet is not None and function.namespace in ("aten", "prims") else ""


def _is_row_wise(function: Any, args: Any, name: str) -> bool:
    if name.startswith("index_put") or name == "_index_put_impl_":
        return not any(args[3:4])  # accumulates
    return name.rstrip("_") in _ROW_WISE and "reduce" not in function._overloadname


def _is_known(function: Any, args: Any, name: str) -> bool:
    """Whether something is known of an operator, so that no arguments of it are more than its probe handles."""
    is_pointwise = torch.Tag.pointwise in getattr(function, "tags", ())
    return is_pointwise or getattr(function, "overloadpacket", None) in _PROBES or _is_row_wise(function, args, name)


def _is_functional(function: Any) -> bool:
    """Whether an operator only computes its output from its arguments. Attention has no randomness without dropout."""
    schema, packet = getattr(function, "_schema", None), getattr(function, "overloadpacket", None)
    if schema is None or schema.is_mutable or any(each.alias_info is not None for each in schema.returns):
        return False
    return packet in _PROBES or not {torch.Tag.nondeterministic_seeded, *_WAITING} & set(function.tags)


def _are_alike(wide: list[object], single: list[object]) -> bool:
    """Whether arguments differ at most in their alignment, and strides of dimensions of one entry."""
    return all(
        a.is_like(b._replace(offset=a.offset))
        if isinstance(a, TensorLayout) and isinstance(b, TensorLayout)
        else a == b
        for a, b in zip(wide, single, strict=True)
    )


def _sum_of_bits(leaf: object) -> torch.Tensor | None:
    """By which the values of a tensor are compared."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_quantized:
        return None
    flat = leaf.contiguous().view(-1).view(torch.uint8)
    num = len(flat) // _CHUNK
    whole, rest = flat[: num * _CHUNK].view(num, _CHUNK), flat[num * _CHUNK :]
    parts = whole.sum(1, dtype=torch.int64), whole.sum(0, dtype=torch.int64), rest.to(torch.int64)
    # weighted by places, so that the same values in another order have another sum
    return torch.stack([(part * torch.arange(1, len(part) + 1, device=part.device)).sum() for part in parts])


def _has_masks(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


# -- values --------------------------------------------------------------------------------------------------------


class _Probe(NamedTuple):
    """Arguments in which another order of adding shows.

    `fill(args, kwargs, turn, chance)` returns arguments of the same shapes; those that it leaves as they are, are the
    model's own. None: there is no probe. `num_kinds` of values take turns. `needs_float32`: terms have one sign, so
    that an order shows in the last bits of a sum alone.
    """

    fill: Callable[[Any, Any, int, torch.Generator], tuple[Any, Any] | None]
    num_kinds: int = 1
    num_outputs: int | None = None
    needs_float32: bool = False
    cuts: Callable[[list[object], list[object], int], list[Place] | None] = cuts_of


def _normal(like: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Random values of a shape, as that dtype rounds them."""
    found = torch.randn(like.shape, generator=chance, device=like.device, dtype=torch.float32)
    return found.to(like.dtype)


def _wide_ranging(like: torch.Tensor, chance: torch.Generator, low: int = -10, high: int = 10) -> torch.Tensor:
    """Random values of many magnitudes, so that a sum of them rounds."""
    exponents = torch.randint(low, high + 1, like.shape, generator=chance, device=like.device)
    return torch.ldexp(_normal(like, chance), exponents).to(like.dtype)


def _cancelling(factors: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Values `x` of many magnitudes by which `(x * factors).sum(-1)` is exactly zero, if it does not round.

    Factors of equal size are paired, at random places; those without a partner get zero.
    """
    mixed = torch.rand(factors.shape, generator=chance, device=factors.device).argsort(-1)
    size, order = factors.gather(-1, mixed).abs().sort(-1)
    index = mixed.gather(-1, order)
    place = torch.arange(size.shape[-1], device=size.device).expand_as(size)
    is_new = torch.ones_like(size, dtype=torch.bool)
    is_new[..., 1:] = size[..., 1:] != size[..., :-1]
    begin = torch.where(is_new, place, 0).cummax(-1).values
    has_partner = ~is_new[..., 1:] & ((place - begin)[..., :-1] % 2 == 0)
    signs = factors.gather(-1, index).sign()
    values = _wide_ranging(factors[..., 1:], chance) * has_partner
    found = torch.zeros_like(factors)
    found[..., :-1] += values * signs[..., :-1]
    found[..., 1:] -= values * signs[..., 1:]
    return torch.zeros_like(factors).scatter_(-1, index, found)


def _factors(matrix: torch.Tensor, turn: int, chance: torch.Generator) -> torch.Tensor:
    """A matrix of such a shape for a probe: made up, or if that would be large the model's own."""
    if matrix.nbytes > _MAX_NBYTES:
        return matrix
    if turn % 2:
        return _normal(matrix, chance)
    few = _normal(matrix.new_empty(8), chance)
    return few[torch.randint(8, matrix.shape, generator=chance, device=matrix.device)]


def _against(matrix: torch.Tensor, like: torch.Tensor, turn: int, chance: torch.Generator) -> torch.Tensor | None:
    """Rows whose products with columns of a matrix (…, terms, columns) cancel, each with another column."""
    if turn % 2:
        return _normal(like, chance)
    num_rows = like.shape[-2]
    columns = torch.randint(matrix.shape[-1], (3 * num_rows,), generator=chance, device=like.device)
    factors = matrix.index_select(-1, columns).mT.contiguous()
    found = _cancelling(factors, chance)
    num_pairs = ((found * factors) != 0).sum(-1).reshape(-1, len(columns)).amin(0) // 2
    most, best = num_pairs.topk(num_rows)  # some columns may be zero, such as those of words that do not exist
    found = found.index_select(-2, best)
    if like.dtype.itemsize >= 4:  # its sums show an order anyway
        return torch.where(found == 0, _normal(like, chance), found)
    return found if int(most[-1]) >= min(_MIN_PAIRS, like.shape[-1] // 4) else None


def _product(first: int, *, is_linear: bool = False) -> _Probe:
    """The probe of a product of matrices, whose arguments begin at `first`, after one that is added."""

    def fill(args: Any, kwargs: Any, turn: int, chance: torch.Generator) -> tuple[Any, Any] | None:
        left, right = args[first], args[first + 1]
        right = right.mT if is_linear else right
        new_left: torch.Tensor | None
        new_right: torch.Tensor | None
        if right.numel() >= left.numel():
            new_right = _factors(right, turn, chance)
            new_left = _against(new_right, left, turn, chance)
            is_kept = new_right is right
        else:
            new_left = _factors(left, turn, chance)
            other = _against(new_left.mT, right.mT, turn, chance)
            new_right, is_kept = None if other is None else other.mT, False
        if new_left is None or new_right is None:
            return None
        new_right = args[first + 1] if is_kept else new_right.mT if is_linear else new_right
        made = list(args)
        made[first], made[first + 1] = new_left, new_right
        for index in (0,) if first else (2,) if is_linear and len(args) > 2 and args[2] is not None else ():
            made[index] = _normal(args[index], chance) if turn % 2 else torch.zeros_like(args[index])
        return tuple(made), kwargs

    return _Probe(fill, 2)


def _attention(args: Any, kwargs: Any, turn: int, chance: torch.Generator) -> tuple[Any, Any]:
    """Values that cancel, of equal scores; scores that cancel in large products; and random ones. Keys and values are
    those of one head."""
    queries, keys, values = args[:3]
    kind = turn % 3
    new_queries, new_keys, new_values = (_normal(each, chance) for each in (queries, keys[:, :1], values[:, :1]))
    if kind == 0:
        new_queries = torch.zeros_like(new_queries)
        new_values = _cancelling(torch.ones_like(new_values.mT), chance).mT
    elif kind == 1:
        order = torch.randperm(queries.shape[-1] // 2 * 2, generator=chance, device=queries.device)
        here, there = order.view(2, -1)
        new_queries = _wide_ranging(queries, chance, 0, 12)
        new_queries[..., there] = -new_queries[..., here]
        new_keys = new_keys * 2**12
        new_keys[..., there] = new_keys[..., here]
    rest, named = tree_map(_all_visible, (tuple(args[3:]), kwargs))
    return (new_queries, new_keys.expand_as(keys), new_values.expand_as(values), *rest), named


def _all_visible(leaf: Any) -> Any:
    """A mask that hides nothing."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.ones_like(leaf) if leaf.dtype is torch.bool else torch.zeros_like(leaf)


def _reduced_dim(args: Any) -> int:
    """A dimension over which an operator adds: its second argument has them, or the sizes of the last ones."""
    dims = args[1] if len(args) > 1 else None
    return int(dims[-1] if isinstance(dims, (list, tuple)) and dims else dims if isinstance(dims, int) else -1)


def _sum(args: Any, kwargs: Any, turn: int, chance: torch.Generator) -> tuple[Any, Any]:
    dim = _reduced_dim(args)
    values = _cancelling(torch.ones_like(args[0].movedim(dim, -1), memory_format=torch.contiguous_format), chance)
    return (values.movedim(-1, dim), *args[1:]), kwargs


def _norm(args: Any, kwargs: Any, turn: int, chance: torch.Generator) -> tuple[Any, Any]:
    values = _cancelling(torch.ones_like(args[0], memory_format=torch.contiguous_format), chance)
    return (values if turn % 2 else _normal(values, chance), *args[1:]), kwargs


def _positive(args: Any, kwargs: Any, turn: int, chance: torch.Generator) -> tuple[Any, Any]:
    return (_normal(args[0], chance), *args[1:]), kwargs


def _order(args: Any, kwargs: Any, turn: int, chance: torch.Generator) -> tuple[Any, Any]:
    """Many equal values: which of them comes first?"""
    values = torch.randint(4, args[0].shape, generator=chance, device=args[0].device).to(args[0].dtype)
    return (values, *args[1:]), kwargs


def _probes() -> Iterator[tuple[Any, _Probe]]:
    yield from ((packet, _product(0)) for packet in (_aten.mm, _aten.bmm))
    yield from ((packet, _product(1)) for packet in (_aten.addmm, _aten.baddbmm))
    yield _aten.linear, _product(0, is_linear=True)
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        yield getattr(_aten, f"_scaled_dot_product_{name}"), _Probe(_attention, 3, 1, cuts=attention_cuts)
    yield from ((packet, _Probe(_sum)) for packet in (_aten.sum, _aten.mean, _aten.cumsum))
    yield _aten.native_layer_norm, _Probe(_norm, 2)
    if hasattr(_aten, "_fused_rms_norm"):
        yield _aten._fused_rms_norm, _Probe(_norm, 2, needs_float32=True)
    for packet in (_aten._softmax, _aten._safe_softmax, _aten._log_softmax, _aten.logsumexp, _aten.linalg_vector_norm):
        yield packet, _Probe(_positive, needs_float32=True)
    yield from ((packet, _Probe(_positive, needs_float32=True)) for packet in (_aten.var, _aten.var_mean, _aten.std))
    yield from ((packet, _Probe(_positive)) for packet in (_aten.amax, _aten.amin))
    yield from ((packet, _Probe(_order)) for packet in (_aten.topk, _aten.sort, _aten.argmax, _aten.max, _aten.min))


_PROBES: Mapping[Any, _Probe] = MappingProxyType(dict(_probes()))
