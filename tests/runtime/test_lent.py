"""Lent links: parts of a copy go by neighbours, and whoever asked for it sees one stream."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import MODELS, assert_same, model_nbytes
from streaming import plain, run
from weightstream import ConfigError, OffloadConfig, OffloadError, StoreError
from weightstream.assembly import Given
from weightstream.front import _offload
from weightstream.measure.profile import profile_for
from weightstream.runtime import lent
from weightstream.runtime.backend import Copy, Side
from weightstream.runtime.cpu import CpuBackend
from weightstream.runtime.devices import backend_of
from weightstream.runtime.lent import Borrowing, Neighbour, shares
from wrapped import Delay, Poison, Wrapper

MOST_S = 0.001
PIECE, LEAST = 2048, 512
OF_8B = [2 * 4096 * n for n in (4096, 1024, 1024, 4096, 14336, 14336, 14336)] + [2 * 4096] * 2


class Counted(Wrapper):
    """Counts calls, and bytes that it copies; refuses to while it `fails`."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.nbytes = self.num_calls = 0
        self.fails = False

    def record(self, side: Side, event: Any) -> None:
        self.num_calls += 1
        super().record(side, event)

    def wait(self, side: Side, event: Any) -> None:
        self.num_calls += 1
        super().wait(side, event)

    def copy(self, copies: Sequence[Copy]) -> None:
        if self.fails:
            raise RuntimeError("the driver refuses")
        self.num_calls += len(copies)
        self.nbytes += sum(copy.src.numel() for copy in copies)
        super().copy(copies)


class Still(Wrapper):
    """Does nothing, however large a copy is."""

    def record(self, side: Side, event: Any) -> None: ...

    def wait(self, side: Side, event: Any) -> None: ...

    def copy(self, copies: Sequence[Copy]) -> None: ...


class Pinned(Wrapper):
    """Takes all sources for pinned, as those of a GPU are."""

    def copy(self, copies: Sequence[Copy]) -> None:
        self.backend.copy([replace(copy, pinned=True) for copy in copies])


def borrowing(num: int = 1, slow: str = "own there pull", seed: int = 0) -> tuple[Pinned, list[Counted]]:
    """A backend with so many neighbours, some late; and what copies over each link, the own one first."""

    def made(name: str, seed: int) -> Any:
        backend = CpuBackend()
        return Poison(Delay(backend, seed, MOST_S) if name in slow else backend)

    links = [Counted(made("own" if k == 0 else "there", seed + 10 * k)) for k in range(num + 1)]
    neighbours = [Neighbour(there, made("pull", seed + 10 * k + 1)) for k, there in enumerate(links[1:])]
    return Pinned(Borrowing(links[0], neighbours)), links


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "PIECE_NBYTES", PIECE)
    monkeypatch.setattr(lent, "_LEAST_NBYTES", LEAST)


def some(nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8)


def arrive(backend: Any) -> None:
    """Wait for all copies so far, as compute does."""
    filled = backend.event()
    backend.record(Side.COPY, filled)
    backend.wait(Side.COMPUTE, filled)


@pytest.mark.few(2)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("slow", ["own", "there", "pull", "own there pull"])
@pytest.mark.parametrize("num", [1, 3])
def test_random_copies_arrive_whole_and_in_order(num: int, slow: str) -> None:
    """Over what is being copied or was read right before; a piece is as likely to be the last as to be one of many."""
    backend, links = borrowing(num, slow)
    rng, ring, moved = random.Random(num), torch.zeros(1 << 16, dtype=torch.uint8), 0
    sizes = (0, 1, LEAST - 1, LEAST, 2 * LEAST + 1, PIECE, 2 * PIECE + 1, 7 * PIECE, 9001)
    for step in range(40):
        wanted = ring.clone()
        for _ in range(rng.randint(1, 3)):
            begin, copies = rng.randrange(0, 4096), []
            for _ in range(rng.randint(1, 3)):
                src = some(rng.choice(sizes))
                copies.append(Copy(dst=ring[begin : begin + src.numel()], src=src))
                wanted[begin : begin + src.numel()] = src
                begin += src.numel() + rng.choice((0, 512))
                moved += src.numel()
            backend.copy(copies)
        arrive(backend)
        assert torch.equal(ring, wanted), step
    assert sum(link.nbytes for link in links) == moved
    assert max(link.nbytes for link in links) - min(link.nbytes for link in links) < moved / len(links) / 100
    backend.close()
    backend.close()


@pytest.mark.usefixtures("small")
def test_rows_that_lie_apart_take_the_own_link() -> None:
    backend, links = borrowing()
    rows = some(9000).view(90, 100)[:, 10:60]
    ring = torch.zeros(10_000, dtype=torch.uint8)
    backend.copy([Copy(dst=ring[:4500], src=rows), Copy(dst=ring[4500:9500], src=(flat := some(5000)))])
    arrive(backend)
    assert torch.equal(ring[:9500], torch.cat([rows.reshape(-1), flat]))
    assert [link.nbytes for link in links] == [4500, 5000]  # the neighbour makes up for the rows
    backend.close()


@pytest.mark.few(1)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["Stack", "llama", "CalledTwice"])
def test_the_bits_of_a_model_and_equal_shares_of_its_links(name: str) -> None:
    model, reference = MODELS[name](), plain(name, "cpu")
    backend, links = borrowing(2)
    config = OffloadConfig(device_budget=model_nbytes(model.module) // 2, codec="none")
    with _offload(model.module, backend, config, Given()) as streamer:
        for seed in range(12):
            assert_same(run(model, "cpu", seed), run(reference, "cpu", seed))
        assert streamer.plan.step_nbytes
        moved = [link.nbytes for link in links]
        assert sum(moved) >= 12 * streamer.plan.step_nbytes
        assert max(moved) - min(moved) < sum(moved) / 3 / 100, moved


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("grain", ["matrix", "block"])
def test_a_step_of_8b_in_true_sizes(num: int, grain: str) -> None:
    """Every fill is shared to within what is too small to be, and queued by a few calls for each 8 MiB."""
    links = [Counted(Still(CpuBackend())) for _ in range(num + 1)]
    pulls = [Counted(Still(CpuBackend())) for _ in range(num)]
    backend = Borrowing(links[0], [Neighbour(there, pull) for there, pull in zip(links[1:], pulls, strict=True)])
    memory = torch.empty(sum(OF_8B), dtype=torch.uint8)  # nobody touches it
    whole, at = [], 0
    for nbytes in OF_8B:
        whole.append(Copy(dst=memory[at : at + nbytes], src=memory[at : at + nbytes], pinned=True))
        at += nbytes
    for copies in [whole] if grain == "block" else [[copy] for copy in whole]:
        before = [link.nbytes for link in links]
        backend.copy(copies)
        moved = [link.nbytes - nbytes for link, nbytes in zip(links, before, strict=True)]
        assert max(moved) - min(moved) <= 2 * lent._LEAST_NBYTES, moved
    for _ in range(31):
        backend.copy(whole)
    moved = [link.nbytes for link in links]
    assert sum(moved) == 32 * sum(OF_8B)
    assert max(moved) - min(moved) < sum(moved) / len(moved) / 1000
    assert sum(each.num_calls for each in (*links, *pulls)) < 6 * sum(moved[1:]) / (8 << 20)
    backend.close()


def test_shares_make_the_sums_equal() -> None:
    least, align = lent._LEAST_NBYTES, lent._ALIGN_NBYTES
    leads = (0, 1, least - 1, least, 5 * least)
    for num in range(1, 5):
        for ahead in itertools.product(leads, repeat=num):
            for nbytes in (0, 1, least - 1, least, 2 * least, 3 * least + 1, 100 * least + 255):
                found = shares(nbytes, ahead)
                after = [a + b for a, b in zip(ahead, found, strict=True)]
                busy = [link for link, share in enumerate(found) if share]
                assert sum(found) == nbytes
                if nbytes < least:
                    assert busy in ([], [0])
                    continue
                level = [after[link] for link in busy]
                assert all(found[link] > least - align for link in busy), (ahead, nbytes)
                assert all(found[link] % align == 0 for link in busy[:-1])
                assert max(level) - min(level) < (num + 1) * align
                for link in set(range(num)) - set(busy):  # a share of it would be too small
                    assert (sum(level) + ahead[link]) / (len(level) + 1) - ahead[link] < least
    assert shares(100, (7,)) == [100]


@pytest.mark.usefixtures("small")
def test_small_copies_take_the_own_link_and_later_ones_make_up_for_it() -> None:
    backend, (own, there) = borrowing()
    ring = torch.zeros(1 << 16, dtype=torch.uint8)
    for _ in range(8):
        backend.copy([Copy(dst=ring[:511], src=some(511))])
    assert (own.nbytes, there.nbytes) == (8 * 511, 0)
    backend.copy([Copy(dst=ring[:20480], src=some(20480))])
    assert abs(own.nbytes - there.nbytes) <= 512
    for _ in range(200):
        backend.copy([Copy(dst=ring[:511], src=some(511))])
    before = own.nbytes
    backend.copy([Copy(dst=ring, src=some(1 << 16))])  # not all of it by the neighbour, which has buffers for less
    assert own.nbytes - before > (1 << 15) - lent._BUFFERS * PIECE
    backend.close()


@pytest.mark.usefixtures("small")
def test_a_neighbour_works_ahead_while_the_device_waits() -> None:
    backend, (own, there) = borrowing(slow="")
    ring = torch.zeros(2 * lent._BUFFERS * PIECE, dtype=torch.uint8)
    src, gate = torch.ones_like(ring), threading.Event()

    def hold() -> None:
        assert gate.wait(60)

    own.backend.copy([Copy(dst=ring[:1], src=src[:1], prepare=hold)])
    backend.copy([Copy(dst=ring, src=src)])
    there.synchronize()  # all of its share is in buffers
    assert there.nbytes == lent._BUFFERS * PIECE
    assert not ring[1:].any()  # which may be read until then
    gate.set()
    arrive(backend)
    assert torch.equal(ring, src)
    backend.close()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("which", [1, 2])
def test_an_error_of_a_neighbour_is_raised_and_nothing_runs_on(which: int) -> None:
    backend, links = borrowing(2)
    ring, src = torch.zeros(60000, dtype=torch.uint8), some(60000)
    links[which].fails = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the driver refuses"):
            backend.copy([Copy(dst=ring, src=src)])
        arrive(backend)
        assert torch.equal(ring[:10000], src[:10000])  # the own link's
        ring.zero_()
        backend.synchronize()
        assert not ring.any()  # no pull of the copy that failed came after that
    links[which].fails = False
    src = some(60000)
    backend.copy([Copy(dst=ring, src=src)])
    arrive(backend)
    assert torch.equal(ring, src)
    backend.close()


@pytest.mark.usefixtures("small")
def test_a_source_is_checked_before_anything_is_copied() -> None:
    backend, links = borrowing()
    ring, asked = torch.zeros(9000, dtype=torch.uint8), []

    def refuse() -> None:
        raise StoreError("the file changed")

    good = Copy(dst=ring, src=some(9000), prepare=lambda: asked.append(len(asked)))
    with pytest.raises(StoreError, match="the file changed"):
        backend.copy([good, replace(good, prepare=refuse)])
    assert (len(asked), sum(link.nbytes for link in links)) == (1, 0)
    backend.copy([good])
    arrive(backend)
    assert torch.equal(ring, good.src)
    assert len(asked) == 2
    assert all(link.nbytes == pytest.approx(4500, abs=256) for link in links)
    backend.close()


@pytest.mark.usefixtures("small")
def test_nothing_is_lent_once_a_source_is_not_pinned(caplog: pytest.LogCaptureFixture) -> None:
    wrapped, (_, there) = borrowing()
    backend = wrapped.backend
    dst, src = torch.zeros(9000, dtype=torch.uint8), some(9000)
    wrapped.copy([Copy(dst=dst, src=src)])
    before = there.nbytes
    assert before
    with caplog.at_level(logging.WARNING, "weightstream"):
        for is_pinned in (False, False, True):
            backend.copy([Copy(dst=dst, src=(src := some(9000)), pinned=is_pinned)])
    arrive(backend)
    assert torch.equal(dst, src)
    assert there.nbytes == before
    assert [record.message.split(":")[0] for record in caplog.records] == ["lent_links are not used any more"]
    backend.close()


def test_links_add_up_in_the_profile() -> None:
    backend, _ = borrowing(2)
    own = backend.backend
    assert own.num_links == 3
    assert profile_for(own).link_bytes_per_s == 3 * profile_for(CpuBackend()).link_bytes_per_s
    backend.close()


def test_wrong_neighbours() -> None:
    with pytest.raises(ConfigError, match="name each GPU once"):
        OffloadConfig(lent_links=(1, 1))
    with pytest.raises(ConfigError, match="device = cpu has no link"):
        backend_of("cpu", OffloadConfig(lent_links=(1,)))
    with pytest.raises(ConfigError, match="sees no CUDA GPU" if not torch.cuda.is_available() else "name others"):
        backend_of("cuda:0", OffloadConfig(lent_links=(0,)))


def test_no_step_is_captured() -> None:
    class Capturing(Wrapper):
        def capturing(self) -> bool:
            return True

    own, there, pull = (CpuBackend() for _ in range(3))
    backend = Borrowing(Capturing(own), [Neighbour(there, pull)])
    memory = torch.zeros(8, dtype=torch.uint8)
    for refused in (lambda: backend.capture(None), lambda: backend.copy([Copy(dst=memory, src=memory, pinned=True)])):
        with pytest.raises(OffloadError, match="with lent_links steps run eager"):
            refused()
    backend.close()
