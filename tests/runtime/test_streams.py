"""A stream whose jobs run at once, until one has to wait: then all run on a thread, in order, until there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from weightstream.errors import StoreError
from weightstream.runtime.streams import Feeder

NAME = "weightstream-test-feed"


@pytest.fixture
def feeder() -> Iterator[Feeder]:
    made = Feeder(NAME)
    yield made
    made.stop()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == NAME]


def test_jobs_run_where_they_are_given(feeder: Feeder) -> None:
    ran: list[int] = []
    feeder.do(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    assert feeder.end() is None
    assert feeder.is_idle
    assert not threads(), "for a stream that never waits there is no thread"


def test_behind_a_job_that_waits_all_keep_their_order_and_then_run_at_once_again(feeder: Feeder) -> None:
    ran: list[tuple[str, bool]] = []

    def note(name: str, here: int, gate: threading.Event | None = None) -> None:
        assert gate is None or gate.wait(30)
        ran.append((name, threading.get_ident() == here))

    for _ in range(3):
        gate, here = threading.Event(), threading.get_ident()
        ran.clear()
        feeder.submit(partial(note, "waits", here, gate))
        feeder.do(partial(note, "behind", here))
        point = feeder.end()
        assert point is not None
        assert not feeder.is_idle
        assert ran == []
        gate.set()
        point.wait()
        assert ran == [("waits", False), ("behind", False)]
        assert feeder.is_idle, "as soon as the point is reached"
        feeder.do(partial(note, "at once", here))
        assert ran[2:] == [("at once", True)]
    assert threads() == [NAME], "one thread for all"


def test_an_error_waits_for_a_point_and_no_job_overtakes_it(feeder: Feeder) -> None:
    ran: list[str] = []

    def fail() -> None:
        raise StoreError("the source is gone")

    feeder.submit(fail)
    feeder.join()
    feeder.join()
    assert not feeder.is_idle, "somebody is to be told"
    feeder.do(lambda: ran.append("behind"))
    point = feeder.end()
    assert point is not None
    with pytest.raises(StoreError, match="gone"):
        point.wait()
    assert ran == ["behind"]
    assert feeder.is_idle
    assert feeder.end() is None


def test_many_jobs_of_both_kinds_keep_their_order(feeder: Feeder) -> None:
    ran: list[int] = []
    for number in range(2000):
        (feeder.submit if number % 7 == 3 else feeder.do)(partial(ran.append, number))
        if number % 50 == 0:
            time.sleep(0.0005)
    feeder.join()
    assert ran == list(range(2000))


def test_the_thread_ends() -> None:
    feeder = Feeder(NAME)
    feeder.submit(lambda: None)
    assert threads() == [NAME]
    feeder.stop()
    feeder.stop()
    assert not threads()
    ran: list[int] = []
    feeder.do(lambda: ran.append(1))
    assert ran == [1]
