"""The host memory that this process may take: fake trees of every kind of cgroup, and real cgroups."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import psutil
import pytest
from hypothesis import HealthCheck, given

from cgroups import limited
from repeats import examples
from rig import KIB
from weightstream.store.limits import available_nbytes, describe_limits

MIB = 1 << 20
GIB = 1 << 30
RAM = 8 * GIB
V1_UNLIMITED = "9223372036854771712"

V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "31 23 0:28 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
OTHERS = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"


@pytest.fixture(autouse=True)
def _ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=RAM))


def grow(root: Path, cgroup: str, *mounts: str, **groups: dict[str, Any]) -> Path:
    """Write a tree of proc and sys files below `root`. `v1` and `v2` create the groups."""
    files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join([OTHERS, *mounts, ""])}
    for group in groups.values():
        files |= {f"{group['folder']}/{name}": text for name, text in group["files"].items()}
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="surrogateescape")
    return root


def v1(folder: str, limit: int | str, usage: int | str, cache: int = 0) -> dict[str, Any]:
    stat = f"cache 1\ninactive_file 7\nactive_file 7\ntotal_inactive_file {cache}\ntotal_active_file {cache}\n"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    files = dict(zip(names, (f"{limit}\n", f"{usage}\n", stat), strict=True))
    return {"folder": f"/sys/fs/cgroup/memory{folder}", "files": files}


def v2(folder: str, limit: int | str, usage: int | str, cache: int = 0, high: int | str = "max") -> dict[str, Any]:
    stat = f"anon 5\ninactive_file {cache}\nactive_file {cache}\nunevictable 0\n"
    names = ("memory.max", "memory.high", "memory.current", "memory.stat")
    files = dict(zip(names, (f"{limit}\n", f"{high}\n", f"{usage}\n", stat), strict=True))
    return {"folder": f"/sys/fs/cgroup{folder}", "files": files}


def test_version_1(tmp_path: Path) -> None:
    root = grow(
        tmp_path,
        "5:cpu:/elsewhere\n4:memory,hugetlb:/docker/ab12\n0::/\n",
        V1_MOUNT.format(top="/"),
        UNIFIED,
        group=v1("/docker/ab12", 2 * GIB, GIB, cache=100 * MIB),
        parent=v1("/docker", V1_UNLIMITED, 5 * GIB),
        top=v1("", V1_UNLIMITED, 9 * GIB),
    )
    assert available_nbytes(root) == GIB + 200 * MIB
    assert describe_limits(root).endswith(
        ", cgroup /docker/ab12 2.0GiB of which 1.2GiB are free, 8.0GiB of RAM available"
    )


@pytest.mark.parametrize(
    ("limit", "high", "free"),
    [
        (3 * GIB, "max", 2 * GIB + 64 * MIB),
        ("max", 2 * GIB, GIB + 64 * MIB),
        (3 * GIB, 2 * GIB, GIB + 64 * MIB),
        (2 * GIB, 3 * GIB, GIB + 64 * MIB),
        ("max", "max", RAM),
        (20 * GIB, "max", RAM),
    ],
)
def test_version_2(tmp_path: Path, limit: int | str, high: int | str, free: int) -> None:
    """The smaller one of memory.max and memory.high, and never more than RAM."""
    group = v2("/system.slice/run.scope", limit, GIB, cache=32 * MIB, high=high)
    root = grow(tmp_path, "0::/system.slice/run.scope\n", V2_MOUNT.format(top="/"), group=group)
    assert available_nbytes(root) == free
    assert ("cgroup /system.slice/run.scope" in describe_limits(root)) == ((limit, high) != ("max", "max"))


def test_hybrid_counts_both(tmp_path: Path) -> None:
    cgroup = "4:memory:/a\n0::/b\n"
    mounts = (V1_MOUNT.format(top="/"), UNIFIED)
    for number, (old, new) in enumerate([(1, 2), (2, 1)]):
        root = grow(tmp_path / str(number), cgroup, *mounts, a=v1("/a", old * GIB, 0), b=v2("/unified/b", new * GIB, 0))
        assert available_nbytes(root) == GIB
        assert f"cgroup {'/a' if old == 1 else '/b'} 1.0GiB" in describe_limits(root)


def test_an_ancestors_limit_may_apply(tmp_path: Path) -> None:
    root = grow(
        tmp_path,
        "0::/pod/app/worker\n",
        V2_MOUNT.format(top="/"),
        worker=v2("/pod/app/worker", 3 * GIB, GIB),
        app=v2("/pod/app", "max", 2 * GIB),
        pod=v2("/pod", 4 * GIB, 3 * GIB + 512 * MIB, cache=16 * MIB),
        sibling=v2("/pod/other", MIB, MIB),
    )
    assert available_nbytes(root) == 512 * MIB + 32 * MIB
    assert "cgroup /pod 4.0GiB of which 544.0MiB are free" in describe_limits(root)


@pytest.mark.parametrize("path", ["/docker/ab12", "/../../elsewhere", "/host/only/path", "/" + "long" * 2000])
def test_a_container_sees_its_group_as_the_root_of_the_mount(tmp_path: Path, path: str) -> None:
    """The mount's root is the group if /proc/self/cgroup has a path that is not below it."""
    outside = v2("/../../elsewhere", MIB, 0)
    one = grow(tmp_path / "1", f"4:memory:{path}\n", V1_MOUNT.format(top="/docker/ab12"), group=v1("", GIB, 256 * MIB))
    two = grow(tmp_path / "2", f"0::{path}\n", V2_MOUNT.format(top="/docker/ab12"), group=v2("", GIB, 256 * MIB))
    group = v2("", GIB, 256 * MIB)
    private = grow(tmp_path / "3", f"0::{path}\n", V2_MOUNT.format(top="/"), group=group, outside=outside)
    assert [available_nbytes(root) for root in (one, two, private)] == [768 * MIB] * 3
    assert "cgroup /docker/ab12 1.0GiB of which 768.0MiB are free" in describe_limits(one)


def test_groups_below_a_container_s_mount(tmp_path: Path) -> None:
    root = grow(
        tmp_path,
        "0::/docker/ab12/job\n",
        V2_MOUNT.format(top="/docker/ab12"),
        job=v2("/job", 2 * GIB, 0),
        container=v2("", GIB, 0),
    )
    assert available_nbytes(root) == GIB
    assert "cgroup /docker/ab12 1.0GiB" in describe_limits(root)


def test_the_mount_with_the_group_counts(tmp_path: Path) -> None:
    """The group of another container, mounted as well, limits nothing here. Spaces in a mount point are escaped."""
    other = "50 23 0:28 /docker/other /other rw,relatime - cgroup2 cgroup2 rw"
    ours = r"51 23 0:28 / /my\040groups rw,relatime - cgroup2 cgroup2 rw"
    small, group = v2("", MIB, 0), v2("", GIB, 0)
    small["folder"], group["folder"] = "/other", "/my groups/docker/ab12"
    assert available_nbytes(grow(tmp_path, "0::/docker/ab12\n", other, ours, small=small, group=group)) == GIB


def test_the_kernel_s_statistics_may_lag(tmp_path: Path) -> None:
    """If the page cache is larger than the usage, the whole limit is free, and no more. A full group has 0 bytes
    free."""
    lagging = grow(tmp_path / "1", "0::/a\n", V2_MOUNT.format(top="/"), a=v2("/a", GIB, MIB, cache=64 * MIB))
    full = grow(tmp_path / "2", "0::/a\n", V2_MOUNT.format(top="/"), a=v2("/a", GIB, GIB + MIB))
    assert (available_nbytes(lagging), available_nbytes(full)) == (GIB, 0)
    assert "1.0GiB of which 0B are free" in describe_limits(full)


@pytest.mark.parametrize("garbage", ["", "max", "-1", "many", "1 2", "\0", "9" * 5000, "1e9", "\ud800"])
def test_garbage_limits_nothing(tmp_path: Path, garbage: str) -> None:
    good = v2("/a", GIB, 0)
    for number, name in enumerate(good["files"]):
        root = grow(tmp_path / str(number), "0::/a/b\n", V2_MOUNT.format(top="/"), a=good, b=v2("/a/b", 2 * GIB, 0))
        (root / f"sys/fs/cgroup/a/{name}").write_bytes(garbage.encode(errors="surrogatepass"))
        assert available_nbytes(root) == (2 * GIB if name == "memory.max" else GIB)
        (root / f"sys/fs/cgroup/a/{name}").unlink()
        assert available_nbytes(root) == (2 * GIB if name == "memory.max" else GIB)
        (root / f"sys/fs/cgroup/a/{name}").mkdir()
        assert available_nbytes(root) == (2 * GIB if name == "memory.max" else GIB)


def test_any_bytes_can_name_a_group(tmp_path: Path) -> None:
    root = grow(tmp_path, "0::/a\udcff\n", V2_MOUNT.format(top="/"), group=v2("/a\udcff", GIB, 0))
    assert available_nbytes(root) == GIB
    assert "cgroup /a\ufffd 1.0GiB" in describe_limits(root)


def test_an_invalid_mount_point_limits_nothing(tmp_path: Path) -> None:
    mount = V2_MOUNT.format(top="/").replace("/cgroup", r"/cgroup\000")
    assert available_nbytes(grow(tmp_path, "0::/a\n", mount, group=v2("/a", GIB, 0))) == RAM


def test_without_cgroups_ram_is_the_limit(tmp_path: Path) -> None:
    assert available_nbytes(tmp_path) == RAM
    assert describe_limits(tmp_path).endswith("8.0GiB of RAM available")
    assert "cgroup" not in describe_limits(tmp_path)


def garbled(text: str) -> st.SearchStrategy[str]:
    """`text` with a part of it replaced. Most of it stays, so that every line of a parser is reached."""
    spot = st.integers(0, len(text))
    pieces = st.text(max_size=12) | st.sampled_from(
        ["/", "..", ":", " - ", "\0", "\n", "\\777", "\\000", "-", "9" * 30]
    )
    return st.builds(lambda a, b, new: text[: min(a, b)] + new + text[max(a, b) :], spot, spot, pieces)


CGROUP = "4:memory:/a/b\n0::/a/b\n"
MOUNTS = "\n".join([OTHERS, V1_MOUNT.format(top="/"), UNIFIED, ""])
STATISTICS = "anon 5\ninactive_file 1024\nactive_file 1024\n"


@examples(120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cgroup=garbled(CGROUP), mounts=garbled(MOUNTS), number=garbled("4096\n"), statistics=garbled(STATISTICS))
def test_garbage_never_raises(tmp_path: Path, cgroup: str, mounts: str, number: str, statistics: str) -> None:
    root = tmp_path
    if not any(root.iterdir()):
        grow(root, "", a=v1("/a/b", 4 * GIB, GIB), b=v2("/unified/a/b", 4 * GIB, GIB))
    for name, text in {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mounts,
        "sys/fs/cgroup/unified/a/b/memory.current": number,
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": number,
        "sys/fs/cgroup/memory/a/b/memory.stat": statistics,
    }.items():
        (root / name).unlink()  # ext4 flushes a file that is truncated and written again
        (root / name).write_bytes(text.encode(errors="surrogatepass"))
    assert 0 <= available_nbytes(root) <= RAM
    assert describe_limits(root).startswith("memlock ")


@pytest.mark.parametrize(("limit", "text"), [(64 * KIB, "memlock 64.0KiB, "), (-1, "memlock unlimited, ")])
def test_memlock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, text: str) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (limit, limit)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, (resource.RLIM_INFINITY,) * 2))
    root = grow(tmp_path, "4:memory:/docker/ab12\n", V1_MOUNT.format(top="/"), a=v1("/docker/ab12", 2 * GIB, GIB))
    expected = "cgroup /docker/ab12 2.0GiB of which 1.0GiB are free, 8.0GiB of RAM available"
    assert describe_limits(root) == text + expected


def python(prefix: list[str], code: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": ":".join(sys.path)})


def numbers(result: subprocess.CompletedProcess[str]) -> list[int]:
    assert result.returncode == 0, result.stderr
    return [int(line) for line in result.stdout.split()]


BEGIN = """
    import mmap, os, resource, sys
    from pathlib import Path
    from weightstream.store.limits import available_nbytes, describe_limits

    def take(nbytes):
        memory = mmap.mmap(-1, nbytes)
        for page in range(0, nbytes, mmap.PAGESIZE):
            memory[page] = 1
        return memory
"""


@pytest.mark.parametrize(("kind", "name"), [("RLIMIT_AS", "ulimit -v"), ("RLIMIT_DATA", "ulimit -d")])
def test_limits_of_the_process_count(kind: str, name: str) -> None:
    """The free bytes can be mapped, and an eighth more cannot."""
    code = f"""
        resource.setrlimit(resource.{kind}, (1 << 30, 1 << 30))
        free = available_nbytes()
        print(free)
        try:
            mmap.mmap(-1, free + (128 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            print(error.errno)
        with mmap.mmap(-1, free - (1 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
            print(available_nbytes())
        assert "{name} 1.0GiB of which" in describe_limits(), describe_limits()
    """
    free, errno, left = numbers(python([], code))
    assert 500 * MIB < free < GIB
    assert (errno, left < 16 * MIB) == (12, True)


def test_a_real_group_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    code = f"""
        def used():
            names = ("memory.usage_in_bytes", "memory.current")
            return next(int((group / name).read_text()) for name in names if (group / name).exists())

        group, path = Path({{group!r}}), Path({str(tmp_path / "large")!r})
        print(available_nbytes())
        before = used()
        with path.open("wb") as file:
            for _ in range(128):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path.read_bytes()
        print(used() - before)
        print(available_nbytes())
        memory = take(96 << 20)
        print(available_nbytes())
        assert f"cgroup /{{{{group.name}}}} 256.0MiB of which" in describe_limits(), describe_limits()
    """
    with limited(256 * MIB) as prefix:
        at_first, cached, with_cache, with_memory = numbers(python(prefix, code.format(group=prefix[-1])))
    assert 160 * MIB < at_first <= 256 * MIB
    assert cached > 100 * MIB  # otherwise the rest would prove nothing
    assert abs(with_cache - at_first) < 24 * MIB
    assert 90 * MIB < with_cache - with_memory < 112 * MIB


@pytest.mark.few(1)
@pytest.mark.parametrize(("more", "code"), [(-24 * MIB, 0), (24 * MIB, -9)])
def test_the_kernel_agrees(tmp_path: Path, more: int, code: int) -> None:
    """With 64 MiB of page cache, nearly all free bytes can be used. With a little more, the kernel kills the
    process."""
    write = f"""
        with open({str(tmp_path / "file")!r}, "wb") as file:
            file.write(bytes(64 << 20))
            os.fsync(file.fileno())
        take(available_nbytes() + {more})
    """
    with limited(192 * MIB) as prefix:
        result = python(prefix, write)
    assert result.returncode == code, result.stderr


def test_groups_are_gone_afterwards() -> None:
    with limited(64 * MIB) as prefix:
        folder = Path(prefix[-1])
        sleeper = subprocess.Popen([*prefix, "sleep", "600"])
        while folder.joinpath("cgroup.procs").read_text() != f"{sleeper.pid}\n":
            assert sleeper.poll() is None
    assert sleeper.wait(timeout=30) == -9
    assert not folder.exists()


def test_a_group_is_removed_when_the_test_fails() -> None:
    context = limited(64 * MIB)
    folder = Path(context.__enter__()[-1])
    assert folder.is_dir()
    assert not context.__exit__(KeyError, KeyError("x"), None)
    assert not folder.exists()
