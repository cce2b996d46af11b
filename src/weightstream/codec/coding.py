"""The codec on a device: Triton kernels if they run there, else plain torch, a few tiles at a time on several cores.

Tiles are independent: the compressed forms of parts are joined by concatenating words, bases and escapes, and adding up
starts. Knows no model and no plan.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import TypeVar

import torch

from weightstream.codec import reference
from weightstream.codec.device import on
from weightstream.codec.format import ELEMENTS, TILE, Layout
from weightstream.codec.reference import CodedPart, Encoded
from weightstream.errors import StoreError

logger = logging.getLogger("weightstream")

_STARTING = threading.RLock()  # as `cache` would let two threads start the same trial at once
_STARTING_TRITON = threading.Lock()
_TRIED = 3 * 4096 + 5  # weights of a trial: three whole tiles and a partial one
_COMPILERS = 3  # threads, one kernel each
_NUM_TILES = 64  # a core's cache holds them, and Python's share of the time stays small
_DEVICE_TILES = 2048  # 16 MiB of bfloat16
_CPU = torch.device("cpu")
_A = TypeVar("_A")
_T = TypeVar("_T")


def available(device: torch.device, dtype: str, *, is_ragged: bool = False) -> bool:
    """Whether the kernels for a dtype run on a device; if not, the reason is logged once.

    `is_ragged`: weights whose last tile is partial, which have a kernel of their own. Few models have such weights.
    """
    return _available(device, dtype, is_ragged)


@cache
def _available(device: torch.device, dtype: str, is_ragged: bool) -> bool:
    reason = why_not(device, dtype, is_ragged=is_ragged)
    if reason is not None:
        subject = "weights with a partial tile" if is_ragged else "weights"
        effect = "are decoded by plain torch" if is_ragged else "are not compressed"
        logger.warning("%s: %s in %s %s: %s", device, subject, dtype, effect, reason)
    return reason is None


def why_not(device: torch.device, dtype: str, *, is_ragged: bool = False) -> str | None:
    """The reason why the kernels do not run on a device; None: they ran in a trial, and every bit was right."""
    if device.type != "cuda":
        return "the kernels need a CUDA GPU"
    return prepare(device, dtype, is_ragged=is_ragged).result()


def prepare(device: torch.device, dtype: str, *, is_ragged: bool = False) -> Future[str | None]:
    """Start the kernels' trial once per process, in a thread, as compiling takes seconds. `why_not` waits for it."""
    with _STARTING:
        return _trial(device, dtype, is_ragged)


@cache
def _trial(device: torch.device, dtype: str, is_ragged: bool) -> Future[str | None]:
    pool = ThreadPoolExecutor(1, "weightstream-kernels")
    try:
        return pool.submit(_tried, device, dtype, is_ragged)
    finally:
        pool.shutdown(wait=False)


def _tried(device: torch.device, dtype: str, is_ragged: bool) -> str | None:
    try:
        from weightstream.codec import triton_codec

        # weights with different bits and every exponent, or with all bit patterns of 8 bits
        numbers = torch.arange(_TRIED, dtype=torch.int32, device="cpu").mul_(40503)
        data = numbers.to(torch.int16 if ELEMENTS[dtype].nbytes == 2 else torch.uint8).view(torch.uint8)
        counts = reference.histograms(data, dtype)

        def encodes() -> bool:
            layout, coded = triton_codec.encode(data.to(device), dtype, counts.to(device))
            wanted, expected = reference.encode(data, dtype)
            return layout == wanted and torch.equal(coded.cpu(), expected)

        def decodes(data: torch.Tensor) -> bool:
            layout, coded = reference.encode(data, dtype)
            out = torch.zeros(-(-data.numel() // 4) * 4, dtype=torch.uint8, device=device)  # in whole words
            decode, right = triton_codec.DecodeLaunch([CodedPart(coded.to(device), layout, out)]), True
            for _ in range(2):  # the first call looks the kernel up, the second reuses it
                decode()
                right &= torch.equal(out[: data.numel()].cpu(), data)
                out.zero_()
            return right

        def on_device(work: Callable[[], _T]) -> _T:
            with on(device):
                return work()

        def are_counts() -> bool:
            return torch.equal(triton_codec.histograms(data.to(device), dtype).cpu(), counts)

        with _STARTING_TRITON:  # trials of several dtypes may start at once
            on_device(triton_codec.warm_triton)
        whole = data[: -(_TRIED % TILE) * ELEMENTS[dtype].nbytes]
        # the longest to compile first
        works = [partial(decodes, data)] if is_ragged else [partial(decodes, whole), encodes, are_counts]
        with ThreadPoolExecutor(_COMPILERS) as pool:
            right = all([*pool.map(on_device, works)])
    except ImportError as error:
        return f"Triton is missing ({error}): pip install triton"
    except Exception as error:  # any error of a compiler or driver: plain torch decodes instead
        return f"its kernels do not run here ({type(error).__name__}: {str(error).strip()[-200:]})"
    return None if right else "a trial gave other bits"


def counted_layout(data: torch.Tensor, dtype: str, device: torch.device = _CPU) -> Layout:
    """The layout of the compressed form of flat bytes, whose escapes are counted on a device."""

    def num_escapes(part: torch.Tensor) -> int:
        return int(reference.windows(reference.histograms(part.to(device), dtype), dtype).num_escapes.sum())

    count = data.numel() // ELEMENTS[dtype].nbytes
    return Layout(dtype=dtype, count=count, num_escapes=sum(_each(num_escapes, _parts(data, dtype, device))))


def pieces(data: torch.Tensor, layout: Layout, device: torch.device = _CPU) -> Iterator[torch.Tensor]:
    """Yield the compressed form in pieces, made on a device; raises `StoreError` if it does not have this layout."""
    layout.check()
    encode_part = encode if _has_kernels(device, layout.dtype) else reference.encode

    def encoded(part: torch.Tensor) -> Encoded:
        part_layout, coded = encode_part(part.to(device), layout.dtype)
        return Encoded(part_layout, coded.cpu())

    # in the format the words of all parts come first, so they are yielded at once; starts, bases and escapes follow
    starts, bases, escapes, total = [torch.zeros(1, dtype=torch.int64, device="cpu")], [], [], 0
    for part, coded in _each(encoded, _parts(data, layout.dtype, device)):
        yield coded[: part.starts_at]
        starts.append(coded[part.starts_at : part.bases_at].view(torch.int32)[1:].to(torch.int64) + total)
        bases.append(coded[part.bases_at :][: part.num_tiles].clone())
        escapes.append(coded[part.escapes_at : part.escapes_at + part.num_escapes].clone())
        total += part.num_escapes
    if total != layout.num_escapes:
        raise StoreError(f"{total} escapes, but {layout.num_escapes} when they were counted: the weights have changed")
    heads = torch.cat([torch.cat(starts).to(torch.int32).view(torch.uint8), *bases])
    heads = torch.nn.functional.pad(heads, (0, layout.escapes_at - layout.starts_at - heads.numel()))
    rest = torch.cat([heads, *escapes])
    yield torch.nn.functional.pad(rest, (0, layout.nbytes - layout.starts_at - rest.numel()))


def _parts(data: torch.Tensor, dtype: str, device: torch.device) -> list[torch.Tensor]:
    num_tiles = _NUM_TILES if device.type == "cpu" else _DEVICE_TILES
    return list(data.split(num_tiles * TILE * ELEMENTS[dtype].nbytes))


def _has_kernels(device: torch.device, dtype: str, *, is_ragged: bool = False) -> bool:
    return device.type != "cpu" and available(device, dtype, is_ragged=is_ragged)


def _is_ragged(layout: Layout) -> bool:
    return layout.count % TILE != 0


def encode(data: torch.Tensor, dtype: str) -> Encoded:
    """The compressed form of flat bytes, on their device."""
    if not _has_kernels(data.device, dtype):
        layout = counted_layout(data, dtype, data.device)
        return Encoded(layout, torch.cat([piece.to(data.device) for piece in pieces(data, layout, data.device)]))
    from weightstream.codec import triton_codec

    return triton_codec.encode(data, dtype)


def decode(coded: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    """Decode to `out`, which is on the same device. On a GPU, `out` must have room for whole words of 4 bytes.

    Damaged bytes give wrong weights.
    """
    decoding([CodedPart(coded, layout, out)])()


def decoding(parts: Sequence[CodedPart]) -> Callable[[], None]:
    """A call that decodes all parts at once, any number of times, from the same bytes into the same memory."""
    with_kernels = list[CodedPart]()
    calls = list[Callable[[], None]]()
    for coded, layout, out in parts:
        if _has_kernels(out.device, layout.dtype, is_ragged=_is_ragged(layout)):
            with_kernels.append(CodedPart(coded, layout, out))
        else:
            calls.append(partial(_decode_in_torch, coded, layout, out))
    if with_kernels:
        from weightstream.codec import triton_codec

        kinds = sorted({_kind(layout) for _, layout, _ in with_kernels})
        calls += [triton_codec.DecodeLaunch(p for p in with_kernels if _kind(p.layout) == kind) for kind in kinds]
    return calls[0] if len(calls) == 1 else partial(_run, calls)


def _kind(layout: Layout) -> tuple[str, bool]:
    """Tensors of one kind are decoded by one kernel."""
    return layout.dtype, _is_ragged(layout)


def picking(
    coded: torch.Tensor,
    layout: Layout,
    out: torch.Tensor,
    num_rows: int,
    slots: torch.Tensor | None = None,
    heads: torch.Tensor | None = None,
) -> Callable[..., None]:
    """A call that decodes some rows of a tensor, each of whole tiles, to the beginning of `out`, any number of times.

    It takes the ids of the rows, int64 and on the same device. The keyword `places`, one per id, puts the rows at other
    places of `out`. The place of a negative id is left unchanged.

    With `slots`, of shape (slots, bytes), the call also takes the slots of the rows, and needs kernels. A slot has the
    words of a row, followed by its escapes at the same offset modulo 8 as in the compressed form; `coded` is then the
    rest of the compressed form after the words. `heads`: a copy of starts and bases, if `coded` is host memory.
    """
    if _has_kernels(out.device, layout.dtype) or slots is not None:
        from weightstream.codec import triton_codec

        return triton_codec.Picking(coded, layout, out, num_rows, slots, heads)
    return partial(_picked, coded, layout, out, num_rows)


def _picked(
    coded: torch.Tensor,
    layout: Layout,
    out: torch.Tensor,
    num_rows: int,
    ids: torch.Tensor,
    _: None = None,
    *,
    places: torch.Tensor | None = None,
) -> None:
    tiles, nbytes = layout.num_tiles // num_rows, layout.raw_nbytes // num_rows
    # the reference decodes a tile to its place in the whole tensor
    whole = torch.empty(layout.raw_nbytes, dtype=torch.uint8, device=out.device)
    for row in {row for row in ids.tolist() if row >= 0}:
        reference.decode(coded, layout, whole, row * tiles, (row + 1) * tiles)
    for index, row in zip(range(ids.numel()) if places is None else places.tolist(), ids.tolist(), strict=True):
        if row >= 0:
            out[index * nbytes : (index + 1) * nbytes] = whole[row * nbytes : (row + 1) * nbytes]


def _run(works: Sequence[Callable[[], None]]) -> None:
    for work in works:
        work()


def _decode_in_torch(coded: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    if out.device.type == "cpu":
        _decode_on_cores(coded, layout, out)
        return
    # On this thread: later work is ordered after its current stream.
    for first in range(0, layout.num_tiles, _DEVICE_TILES):
        reference.decode(coded, layout, out, first, min(first + _DEVICE_TILES, layout.num_tiles))


def _decode_on_cores(coded: torch.Tensor, layout: Layout, out: torch.Tensor) -> None:
    def decoded(first: int) -> None:
        reference.decode(coded, layout, out, first, min(first + _NUM_TILES, layout.num_tiles))

    deque(_each(decoded, range(0, layout.num_tiles, _NUM_TILES)), maxlen=0)


def _each(work: Callable[[_A], _T], items: Sequence[_A]) -> Iterator[_T]:
    """Yield the results in order. They are computed on all cores, a few ahead of the consumer."""
    workers = min(len(os.sched_getaffinity(0)), len(items))
    if workers < 2:
        yield from map(work, items)
        return
    before = torch.get_num_threads()
    try:
        # One compute thread per worker, else each worker would use all cores.
        with ThreadPoolExecutor(workers, initializer=partial(torch.set_num_threads, 1)) as pool:
            waiting: deque[Future[_T]] = deque()
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            yield from (future.result() for future in waiting)
    finally:
        torch.set_num_threads(before)  # the default of new threads
