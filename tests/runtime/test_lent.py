"""Lent links: pieces of a copy go by neighbours, and whoever asked for it sees one stream."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from models import MODELS, assert_same, model_nbytes
from streaming import plain, run
from weightstream import ConfigError, OffloadConfig
from weightstream.assembly import Given
from weightstream.front import _offload
from weightstream.measure.profile import profile_for
from weightstream.runtime import lent
from weightstream.runtime.backend import Copy, Side
from weightstream.runtime.cpu import CpuBackend
from weightstream.runtime.devices import backend_of
from weightstream.runtime.lent import Borrowing, Neighbour
from wrapped import Delay, Poison, Wrapper

MOST_S = 0.001


class Pinned(Wrapper):
    """Takes all sources for pinned, as those of a GPU are."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.nbytes = 0

    def copy(self, copies: Sequence[Copy]) -> None:
        self.nbytes += sum(copy.src.numel() for copy in copies)
        self.backend.copy([replace(copy, pinned=True) for copy in copies])


def borrowing(num: int = 1, seed: int = 0) -> tuple[Pinned, list[Pinned]]:
    """A backend with so many neighbours, all of them late; and what fills their buffers."""

    def late(seed: int) -> Any:
        return Poison(Delay(CpuBackend(), seed, MOST_S))

    there = [Pinned(late(seed + 10 * k + 1)) for k in range(num)]
    neighbours = [Neighbour(each, late(seed + 10 * k + 2)) for k, each in enumerate(there)]
    return Pinned(Borrowing(late(seed), neighbours)), there


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "PIECE_NBYTES", 128)
    monkeypatch.setattr(lent, "_LEAST_NBYTES", 24)


@pytest.mark.parametrize("num", [1, 3])
def test_random_copies_arrive_whole_and_in_order(num: int) -> None:
    """Into memory that is read right before; some wait for a release that comes late."""
    backend, there = borrowing(num)
    rng, ring = random.Random(num), torch.zeros(4096, dtype=torch.uint8)
    released, filled = backend.event(), backend.event()
    moved = 0
    for step in range(60):
        copies, wanted = [], ring.clone()
        for _ in range(rng.randint(1, 4)):
            begin = rng.randrange(0, 3000)
            src = torch.randint(256, (rng.choice((0, 1, 23, 24, 127, 128, 129, 700, 1000)),), dtype=torch.uint8)
            copies.append(Copy(dst=ring[begin : begin + src.numel()], src=src))
            wanted[begin : begin + src.numel()] = src
            moved += src.numel()
        backend.record(Side.COMPUTE, released)
        backend.wait(Side.COPY, released)
        if _overlap(copies):
            for copy in copies:
                backend.copy([copy])
        else:
            backend.copy(copies)
        backend.record(Side.COPY, filled)
        backend.wait(Side.COMPUTE, filled)
        assert torch.equal(ring, wanted), step
    assert all(moved / (2 * num + 2) < each.nbytes < moved / num for each in there)
    backend.close()
    backend.close()


def _overlap(copies: Sequence[Copy]) -> bool:
    spans = sorted((c.dst.storage_offset(), c.dst.storage_offset() + c.dst.numel()) for c in copies)
    return any(a[1] > b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("name", ["Stack", "llama", "CalledTwice"])
def test_the_bits_of_a_model(name: str) -> None:
    model, reference = MODELS[name](), plain(name, "cpu")
    backend, there = borrowing(2)
    config = OffloadConfig(device_budget=model_nbytes(model.module) // 2, codec="none")
    with _offload(model.module, backend, config, Given()) as streamer:
        for seed in range(12):
            assert_same(run(model, "cpu", seed), run(reference, "cpu", seed))
        assert streamer.plan.step_nbytes
        assert all(each.nbytes > 4 * streamer.plan.step_nbytes // 4 for each in there)


def test_what_is_not_pinned_takes_the_own_link() -> None:
    backend, there = borrowing()
    own = backend.backend
    dst = torch.zeros(900, dtype=torch.uint8)
    own.copy([Copy(dst=dst, src=torch.ones(900, dtype=torch.uint8))])
    own.synchronize()
    assert dst.all()
    assert there[0].nbytes == 0
    assert own.num_links == 2
    assert profile_for(own).link_bytes_per_s == 2 * profile_for(CpuBackend()).link_bytes_per_s
    backend.close()


def test_wrong_neighbours() -> None:
    with pytest.raises(ConfigError, match="sees no CUDA GPU" if not torch.cuda.is_available() else "name others"):
        backend_of("cuda:0", OffloadConfig(lent_links=(0,)))
