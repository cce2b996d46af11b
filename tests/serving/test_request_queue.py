"""Jobs that fail or are cut short, of which nothing may be left: no memory, no waiting client, no dead thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from weightstream.serving.request_queue import ClosingError, Job, JobError, RequestQueue


class Activations:
    """What the frames of a failed step hold."""


@pytest.mark.parametrize("kind", [OSError, StopIteration, SystemExit, KeyboardInterrupt])
def test_a_failed_job_keeps_nothing_alive_and_the_next_one_runs(kind: type[BaseException]) -> None:
    held: list[weakref.ref[Activations]] = []

    def step() -> None:
        activations = Activations()
        held.append(weakref.ref(activations))
        raise kind("gone")

    def work(_: Job[None, int]) -> int:
        try:
            step()
        except BaseException as error:
            raise RuntimeError("the step failed") from error
        return 0

    def fail(_: Job[None, int]) -> int:
        raise kind("gone")

    async def run() -> None:
        queue = RequestQueue(most_waiting=3)
        jobs: list[Job[None, int]] = [Job(work), Job(fail), Job(lambda _: 7)]
        for job in jobs:
            queue.submit(job)
        with pytest.raises(JobError, match="RuntimeError: the step failed"):
            await jobs[0].result()
        assert held[0]() is None
        assert await jobs[1].next_piece() is None
        with pytest.raises(JobError, match=f"{kind.__name__}: gone"):
            await jobs[1].result()
        assert await jobs[2].result() == 7
        assert queue.is_alive
        queue.close()
        queue.join(10)

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        gc.enable()


def test_clients_need_not_wait_for_the_step_in_which_a_queue_is_closed() -> None:
    goes_on, began = threading.Event(), threading.Event()
    failures: list[dict[str, Any]] = []

    def work(job: Job[str, int]) -> int:
        began.set()
        assert goes_on.wait(30)
        assert job.is_cancelled
        job.add("late")
        return 0

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        queue = RequestQueue(most_waiting=1)
        jobs: list[Job[str, int]] = [Job(work), Job(work)]
        for job in jobs:
            queue.submit(job)
        await asyncio.to_thread(began.wait, 30)
        queue.close()
        for job in jobs:
            assert await job.next_piece() is None
            with pytest.raises(ClosingError):
                await job.result()
        goes_on.set()
        await asyncio.to_thread(queue.join, 30)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not failures
