"""The Triton kernels: exactly the reference's bytes, and no access out of bounds, also with damaged bytes.

Without a GPU they run in Triton's interpreter, at 0.1 s per tile. So there are few cases of each kind, and all values
are in stress tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton.runtime.interpreter

from patterns import PATTERNS, flat, gaussian, noise, spread
from repeats import only, thinned
from triton_counting import COMPILES_NOTHING, PRINTS_COUNTS
from weightstream.codec import reference, triton_codec
from weightstream.codec.format import ELEMENTS, Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD, GUARD_NBYTES = 77, 8192  # a whole tile
Part = tuple[torch.Tensor, Layout, torch.Tensor]
kinds = pytest.mark.parametrize("dtype", ELEMENTS)
# in the interpreter these take seconds each: CI runs every second one
some_kinds = pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=[pytest.mark.stress] * (i % 2)) for i, dtype in enumerate(ELEMENTS)]
)
interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter's accesses can be watched")


class Compiled:
    """`kernels.decode` as Triton compiles it. Records the launches, their arguments, and the look-ups."""

    def __init__(self) -> None:
        self.looked_up: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def look_up(*args: Any, **options: int) -> Any:
            self.looked_up.append((grid, options, *args))
            return self._kernel

        return look_up

    @property
    def _kernel(self) -> Any:
        outer = self

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                return lambda *args: outer.launched.append((grid, *args))

        return Kernel()


@pytest.mark.parametrize(("dtype", "more"), [("bfloat16", {"maxnreg": 32}), ("float16", {})])
def test_a_kernel_is_looked_up_once(dtype: str, more: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Later it is launched as compiled, with the same arguments, and with the table's address."""
    compiled = Compiled()
    monkeypatch.setattr(triton_codec.kernels, "decode", compiled)
    layout, coded = reference.encode(gaussian(dtype, 3001), dtype)
    decode = triton_codec.DecodeLaunch([(coded, layout, target(layout))] * (triton_codec._MOST + 1))
    for _ in range(3):
        decode()
    assert len(compiled.looked_up) == 2, "a launch takes a limited number of tensors"
    assert len(compiled.launched) == 4
    for (grid, options, table, *facts), (again, address, *same) in zip(
        compiled.looked_up, compiled.launched[:2], strict=True
    ):
        assert options == {"num_warps": triton_codec.WARPS} | more
        assert len(grid) == 3
        assert (again, address, same) == (grid, table.data_ptr(), facts)
    assert compiled.launched[:2] == compiled.launched[2:]


def excerpt(pattern: str, dtype: str, count: int = 3001) -> torch.Tensor:
    """Some of the weights of a pattern, from all parts of it."""
    data = PATTERNS[pattern](dtype).view(-1, ELEMENTS[dtype].nbytes)
    return data[torch.linspace(0, len(data) - 1, min(count, len(data))).long()].reshape(-1)


def target(layout: Layout) -> torch.Tensor:
    """Memory for whole words between guards."""
    room = -(-layout.raw_nbytes // 4) * 4
    whole = torch.full((room + 2 * GUARD_NBYTES,), GUARD, dtype=torch.uint8, device=DEVICE)
    return whole[GUARD_NBYTES:-GUARD_NBYTES]


def part(data: torch.Tensor, dtype: str) -> Part:
    layout, coded = reference.encode(data, dtype)
    return coded.to(DEVICE), layout, target(layout)


def assert_guards_hold(out: torch.Tensor) -> None:
    whole = torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(out.untyped_storage())
    assert (whole[:GUARD_NBYTES] == GUARD).all()
    assert (whole[GUARD_NBYTES + out.numel() :] == GUARD).all()


def decoded(parts: list[Part]) -> list[torch.Tensor]:
    """The kernel's output. Checks that it writes nothing next to its targets."""
    triton_codec.DecodeLaunch(parts)()
    for _, _, out in parts:
        assert_guards_hold(out)
    return [out[: layout.raw_nbytes].cpu() for _, layout, out in parts]


def by_reference(coded: torch.Tensor, layout: Layout) -> torch.Tensor:
    out = torch.empty(layout.raw_nbytes, dtype=torch.uint8)
    reference.decode(coded.cpu(), layout, out)
    return out


def assert_encoded_as_reference(data: torch.Tensor, dtype: str) -> Part:
    layout, coded = reference.encode(data, dtype)
    found_layout, found = triton_codec.encode(data.to(DEVICE), dtype)
    assert found_layout == layout
    assert torch.equal(found.cpu(), coded)
    return found, layout, target(layout)


class Watch:
    """Checks that the interpreter's loads and stores are inside the tensors that are passed for them."""

    def __init__(self, real: ModuleType, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        self._real, self._reads, self._writes = real, reads, writes
        self.num_reads = self.num_writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @staticmethod
    def _check(places: npt.NDArray[Any], nbytes: int, tensors: list[torch.Tensor], what: str) -> int:
        inside = np.zeros(places.shape, dtype=bool)
        for tensor in tensors:
            begin = tensor.data_ptr()
            inside |= (places >= begin) & (places + np.uint64(nbytes) <= begin + tensor.nbytes)
        if not inside.all():
            raise AssertionError(f"{what} of {nbytes} bytes at {places[~inside][:4]}")
        return places.size

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.num_reads += self._check(ptrs[mask.astype(bool)], np.dtype(dtype).itemsize, self._reads, "a read")
        return self._real.load(ptrs, mask, other, dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        self.num_writes += self._check(ptrs[mask.astype(bool)], value.dtype.itemsize, self._writes, "a write")
        return self._real.store(ptrs, value, mask)

    def atomic_rmw(self, what: Any, ptrs: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check(ptrs[mask.astype(bool)], value.dtype.itemsize, self._writes, "a change")
        return self._real.atomic_rmw(what, ptrs, value, mask, order)


def watch(monkeypatch: pytest.MonkeyPatch, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Watch:
    watch = Watch(triton.runtime.interpreter._interpreter, reads, writes)
    monkeypatch.setattr(triton.runtime.interpreter, "_interpreter", watch)
    return watch


def again(dtype: str, out: torch.Tensor) -> list[torch.Tensor]:
    """Loads from a target: in bfloat16, a lane writes several bytes of a word one by one."""
    return [out] if dtype == "bfloat16" else []


def each_is_written(seen: Watch, dtype: str, out: torch.Tensor) -> bool:
    """Each word of a target, and once if nothing of it is loaded."""
    num_words = out.numel() // 4
    return seen.num_writes >= num_words if dtype == "bfloat16" else seen.num_writes == num_words


def tables(decoding: triton_codec.DecodeLaunch) -> list[torch.Tensor]:
    return [args[0] for _, args in decoding._launches]


# Valid bytes


@pytest.mark.parametrize(
    ("dtype", "pattern"),
    only(
        [
            (kind, name)
            for kind, name in product(ELEMENTS, PATTERNS)
            if "shuffled" not in name and "Gaussian," not in name
        ],
        ("bfloat16", "outlier rows"),
    ),
)
def test_encode_gives_the_bytes_of_the_reference(dtype: str, pattern: str) -> None:
    assert_encoded_as_reference(excerpt(pattern, dtype), dtype)


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "count"), thinned(ELEMENTS, [1, 2, 4095, 4096, 4097]))
def test_encode_any_number(dtype: str, count: int) -> None:
    assert_encoded_as_reference(spread(dtype, count, 0.5, 2.0, seed=count), dtype)


@pytest.mark.stress
@some_kinds
def test_every_value(dtype: str) -> None:
    data = PATTERNS["every value, shuffled"](dtype)
    assert torch.equal(decoded([assert_encoded_as_reference(data, dtype)])[0], data)


@pytest.mark.few(24)
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_histograms(dtype: str, pattern: str) -> None:
    data = PATTERNS[pattern](dtype)
    assert torch.equal(triton_codec.histograms(data.to(DEVICE), dtype).cpu(), reference.histograms(data, dtype))


@pytest.mark.parametrize("what", only(["patterns", "sizes"], "sizes"))
@pytest.mark.parametrize("dtype", only(ELEMENTS, "bfloat16"))
def test_decode_several_at_once(dtype: str, what: str) -> None:
    """Every pattern, or sizes around those of words, lanes and tiles, in one launch."""
    if what == "patterns":
        data = [excerpt(pattern, dtype) for pattern in PATTERNS]
    else:
        data = [gaussian(dtype, count) for count in (1, 2, 3, 255, 4095, 4096, 4097)]
    found = decoded([part(values, dtype) for values in data])
    assert all(torch.equal(*pair) for pair in zip(found, data, strict=True))


@pytest.mark.stress
def test_more_tensors_than_a_launch_takes() -> None:
    """A full table, and one more launch. The last one has a single tensor."""
    data = [gaussian("bfloat16", count) for count in range(1, 34)]
    parts = [part(values, "bfloat16") for values in data]
    assert [grid[0] for grid, _ in triton_codec.DecodeLaunch(parts)._launches] == [32, 1]
    assert all(torch.equal(*pair) for pair in zip(decoded(parts), data, strict=True))


@pytest.mark.parametrize("dtype", only(ELEMENTS, "bfloat16", "float16"))
def test_decoding_again_reads_again(dtype: str) -> None:
    """All addresses are fixed. The bytes at them may change."""
    first, second = (excerpt(pattern, dtype, 200) for pattern in ("random bits", "constant"))
    coded, layout, out = part(first, dtype)
    decoding = triton_codec.DecodeLaunch([(coded, layout, out)])
    decoding()
    assert torch.equal(out[: layout.raw_nbytes].cpu(), first)
    _, other = reference.encode(second, dtype)  # without escapes: right with any number of escapes
    coded.copy_(torch.nn.functional.pad(other, (0, coded.numel() - other.numel())))
    decoding()
    assert torch.equal(out[: layout.raw_nbytes].cpu(), second)


# No access out of bounds


@interpreted
@pytest.mark.parametrize(
    ("dtype", "count"),
    only([(kind, count) for kind, count in product(ELEMENTS, [4, 5000])], ("bfloat16", 5000)),
)
def test_encode_has_no_access_out_of_bounds(dtype: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = spread(dtype, count, 0.5, 2.0, seed=1)
    layout, expected = reference.encode(data, dtype)
    made, real = [torch.empty(0)], torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(real(*args, **kwargs))
        reads.append(made[-1])
        return made[-1]

    with monkeypatch.context() as patch:
        reads = [data]
        patch.setattr(torch, "empty", empty)
        seen = watch(patch, reads, made)
        found_layout, found = triton_codec.encode(data, dtype)
    assert found_layout == layout
    assert torch.equal(found, expected)
    num_counts = layout.num_tiles * 2**layout.element.exponent_bits
    num_bytes = layout.num_escapes
    if dtype == "bfloat16":  # its digits are differences
        exponents = data.view(torch.int16).to(torch.int32) >> 7 & 255
        bases = found[layout.bases_at :][: layout.num_tiles].repeat_interleave(4096)[:count]
        num_bytes = int(((exponents < bases.int() - 8) | (exponents > bases.int() + 4)).sum())
        assert num_bytes > 0 or count == 4
    assert seen.num_writes == num_counts + layout.starts_at // 4 + num_bytes


DAMAGES = ["nothing", "flipped bits", "planes", "symbols", "starts", "starts of 255", "starts of 127", "a start by one"]
DAMAGES += ["bases", "bases of 255", "escapes", "all", "all of 255"]


def damaged(coded: torch.Tensor, layout: Layout, how: str, seed: int) -> torch.Tensor:
    ranges = {
        "nothing": (0, 0),
        "planes": (0, layout.starts_at),
        "symbols": (512 * layout.element.raw_bits, layout.starts_at),
        "starts": (layout.starts_at, layout.bases_at),
        "bases": (layout.bases_at, layout.escapes_at),
        "escapes": (layout.escapes_at, layout.nbytes),
    }
    where, _, fill = how.partition(" of ")
    begin, end = ranges.get(where, (0, layout.nbytes))
    coded = coded.cpu().clone()
    if how == "flipped bits":
        source = torch.Generator().manual_seed(seed)
        places = torch.randint(0, layout.bases_at, (40,), generator=source)
        places[-4:] = places[-4:] % (layout.bases_at - layout.starts_at) + layout.starts_at
        coded[places] ^= (1 << torch.randint(0, 8, places.shape, generator=source)).to(torch.uint8)
    elif how == "a start by one":
        coded[layout.starts_at] = 1
    elif fill:
        coded[begin:end] = int(fill)
    else:
        coded[begin:end] = noise("float8_e4m3fn", end - begin, seed)
    return coded.to(DEVICE)


def damaged_parts(dtype: str, how: str) -> list[Part]:
    """Many escapes, and none in a whole tile, for which the kernel has a separate path."""
    whole = [part(spread(dtype, *shape, seed=3), dtype) for shape in ((3001, 0.5, 2.5), (4096, 0.5, 0.2))]
    assert whole[0][1].num_escapes > 0 == whole[1][1].num_escapes
    return [(damaged(coded, layout, how, seed), layout, out) for seed, (coded, layout, out) in enumerate(whole)]


@pytest.mark.parametrize(
    ("dtype", "how"),
    only([(kind, how) for kind, how in product(ELEMENTS, DAMAGES)], ("bfloat16", "flipped bits")),
)
def test_damaged_bytes(dtype: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output equals the reference's, no access is out of bounds, and each word of a target is written once."""
    for coded, layout, out in damaged_parts(dtype, how):
        decoding = triton_codec.DecodeLaunch([(coded, layout, out)])
        with monkeypatch.context() as patch:
            there = coded[: layout.escapes_at + layout.num_escapes]
            seen = watch(patch, [there, *tables(decoding), *again(dtype, out)], [out]) if DEVICE == "cpu" else None
            decoding()
        assert seen is None or each_is_written(seen, dtype, out)
        assert_guards_hold(out)
        assert torch.equal(out[: layout.raw_nbytes].cpu(), by_reference(coded, layout))


@interpreted
@pytest.mark.parametrize(
    ("coded_nbytes", "out_nbytes", "text"), [(7176, 200, "a read of 1 bytes"), (7177, 196, "a write of 4 bytes")]
)
def test_the_bounds_check_detects_violations(
    coded_nbytes: int, out_nbytes: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded, layout, out = part(flat(torch.zeros(100), "float16"), "float16")
    decoding = triton_codec.DecodeLaunch([(coded, layout, out)])
    watch(monkeypatch, [coded[:coded_nbytes], *tables(decoding)], [out[:out_nbytes]])
    with pytest.raises(Exception, match=text):
        decoding()


# Compilation

COUNTING = f"""{COMPILES_NOTHING}
from weightstream.codec import reference, triton_codec

triton_codec_histograms = triton_codec.histograms
triton_codec.histograms = lambda *args: (triton_codec_histograms(*args), reference.histograms(*args))[1]
memory = torch.zeros(1 << 19, dtype=torch.uint8)
for num in (1, 2, 7, 33):
    for nbytes in (2, 32, 4096, 8192, 32768, 10002, 77778):
        for offset in (0, 2, 4, 16, 18):
            for dtype in ("bfloat16", "float16"):
                layout, coded = triton_codec.encode(memory[offset : offset + nbytes], dtype)
                triton_codec.DecodeLaunch([(coded, layout, memory[4 * offset :])] * num)()
{PRINTS_COUNTS}"""


@pytest.mark.stress
def test_each_kernel_is_compiled_once_for_each_dtype() -> None:
    """For all sizes, numbers and addresses. Each compilation takes seconds."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COUNTING], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"histogram": 2, "encode": 2, "decode": 4}, "for whole tiles, and others"


COMPILING = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weightstream.codec import kernels, triton_codec
from weightstream.codec.format import ELEMENTS

ALIGNED = [["tt.divisibility", 16]]


def compiled(kernel, signature, constants, options):
    names = kernel.arg_names
    facts = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): ALIGNED for name, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(kernel, {name: signature.get(name, "constexpr") for name in names}, facts, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


encode = {"data": "*u8", "coded": "*u8", "count": "i64"}
found = {}
for dtype, element in ELEMENTS.items():
    facts = {"EXPONENT": element.exponent_bits}
    encoder = compiled(kernels.encode, encode, facts, {"num_warps": 4})
    facts |= {"NUM": 32, "WHOLE": 1}
    decoder = compiled(kernels.decode, {"table": "*i64"}, facts, triton_codec._options(element))
    counts = [asm["ttir"].count("tt.load") + asm["ttir"].count("tt.store") for asm in (encoder, decoder)]
    found[dtype] = [*counts, decoder["ptx"].count("st.global")]
print(json.dumps(found))
"""


@pytest.mark.stress
def test_kernels_are_short_for_the_compiler_and_unrolled_in_the_end(tmp_path: Path) -> None:
    """A pass of Triton's takes time for each load and store, quadratic in all operations, so it must see loops.
    Those of
    the decoder are unrolled at the end: a store for each of 16 words."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILING]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    for dtype, (in_encoder, in_decoder, stores) in json.loads(run.stdout).items():
        assert in_encoder <= 30, dtype
        assert in_decoder <= (40 if dtype == "bfloat16" else 100), dtype
        assert stores >= (8 if dtype == "float8_e4m3fn" else 16), dtype


def test_known_counts_are_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = gaussian("bfloat16", 5000)
    counts = reference.histograms(data, "bfloat16").to(DEVICE)
    monkeypatch.setattr(triton_codec, "histograms", None)
    layout, coded = triton_codec.encode(data.to(DEVICE), "bfloat16", counts)
    wanted, expected = reference.encode(data, "bfloat16")
    assert layout == wanted
    assert torch.equal(coded.cpu(), expected)
