"""Finalizers run once, and never in a forked process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from weightstream.store.ending import finalize


class Owner:
    pass


def test_it_runs_once() -> None:
    done: list[str] = []
    owner = Owner()
    ending = finalize(owner, done.append, "now")
    assert ending.alive
    ending()
    ending()
    assert done == ["now"]
    assert not ending.alive
    other = Owner()
    finalize(other, done.append, "freed")
    del other
    assert done == ["now", "freed"]


def test_a_fork_ends_though_a_thread_of_its_parent_held_a_lock() -> None:
    script = """
        import os, sys, threading
        from weightstream.store.ending import finalize

        class Owner: pass

        lock, owner = threading.Lock(), Owner()
        finalize(owner, lock.acquire)
        lock.acquire()  # as a thread would that is not in the fork
        if (child := os.fork()) == 0:
            del owner
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        lock.release()
        del owner
        assert lock.locked()
        print("fine")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "fine\n", done.stderr
