"""A stream of rows brings the rows that are asked for, in order, in waves that fit its memory."""

from __future__ import annotations

import pytest
import torch

from stream_rig import NUM_ROWS, host_stacks
from weightstream.runtime.devices.cpu import CpuBackend
from weightstream.runtime.experts.row_stream import RowStream

EVERY = list(range(NUM_ROWS))


@pytest.mark.parametrize("rows", [EVERY, [7], [0, 1, 2, 5, 6, 11], [3, 3, 2], []], ids=str)
@pytest.mark.parametrize("most", [1, 4, 100])
def test_waves_hold_their_rows(rows: list[int], most: int) -> None:
    stacks, backend = host_stacks(), CpuBackend()
    memory = torch.full((4 * (136 * 5 + 3 * 512),), 255, dtype=torch.uint8)
    stream = RowStream([stack.leaf for stack in stacks], memory, backend)
    assert 5 <= stream.most < NUM_ROWS * 3
    found: list[int] = []
    for of_wave, leaves in stream.waves(rows, most):
        assert 0 < len(of_wave) <= min(most, stream.most)
        for stack, leaf in zip(stacks, leaves, strict=True):
            assert torch.equal(leaf.view(torch.uint8), stack.values[list(of_wave)].view(torch.uint8))
        found += of_wave
    assert found == rows
    backend.close()
