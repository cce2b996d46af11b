"""Extents that follow each other are read as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repeats import examples
from weightstream.errors import StoreError
from weightstream.store.file_slice import FileSlice, Joined
from weightstream.store.mapping import FileMapping

NBYTES = 20_000


@examples(100)
@given(data=st.data())
def test_any_range_of_any_extents(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Extents of two files, some of them empty."""
    mappings = []
    for name in ("one", "two"):
        path = tmp_path_factory.getbasetemp() / f"extent-{name}"
        path.write_bytes(torch.randint(0, 256, (NBYTES,), dtype=torch.uint8).numpy().tobytes())
        mappings.append(FileMapping(path))
    extents = []
    for _ in range(data.draw(st.integers(1, 6))):
        mapping, begin = data.draw(st.sampled_from(mappings)), data.draw(st.integers(0, NBYTES))
        extents.append(FileSlice(mapping, begin, data.draw(st.integers(begin, NBYTES))))
    whole = torch.cat([extent.bytes() for extent in extents])
    joined = Joined(extents)
    assert joined.nbytes == len(whole)
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    memory = torch.full((len(whole) + 2,), 7, dtype=torch.uint8)
    assert torch.equal(joined.read(begin, end, memory[1:]), whole[begin:end])
    assert memory[0] == 7
    assert memory[1 + end - begin :].unique().tolist() == [7]


def test_the_failing_file_is_named(tmp_path: Path) -> None:
    mappings = []
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(bytes(NBYTES))
        mappings.append(FileMapping(tmp_path / name))
    joined = Joined([FileSlice(mapping, 0, 100) for mapping in mappings])
    (tmp_path / "two").unlink()
    memory = torch.empty(200, dtype=torch.uint8)
    joined.read(0, 100, memory)
    with pytest.raises(StoreError, match="two: cannot open"):
        joined.read(0, 101, memory)
