"""Devices that cannot run the kernels: one warning that says why, and the reference instead of them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightstream.codec import coding, reference
from weightstream.codec.format import ELEMENTS, Layout

Encoded = tuple[Layout, torch.Tensor]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """Clear the cached results of devices."""
    coding._available.cache_clear()
    coding._trial.cache_clear()


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("kernels", "triton_codec"):
        monkeypatch.delitem(sys.modules, f"weightstream.codec.{name}", raising=False)
        monkeypatch.delattr(f"weightstream.codec.{name}", raising=False)


def weights() -> torch.Tensor:
    return torch.randn(5000, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).view(torch.uint8)


@pytest.mark.usefixtures("without_triton")
def test_without_triton_the_reason_and_the_remedy_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="weightstream"):
        assert [coding.available(CUDA, "bfloat16") for _ in range(3)] == [False] * 3
    assert len(caplog.messages) == 1
    assert "cuda:0: weights in bfloat16 are not compressed" in caplog.messages[0]
    assert "pip install triton" in caplog.messages[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_cannot_run_them_is_distinguished_from_one_that_can(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="weightstream"):
        assert not coding.available(CUDA, "bfloat16")
    assert "its kernels do not run here" in caplog.text


def test_the_cpu_uses_the_reference() -> None:
    data = weights()
    assert "CUDA GPU" in str(coding.why_not(data.device, "bfloat16"))
    layout, coded = coding.encode(data, "bfloat16")
    expected, same = reference.encode(data, "bfloat16")
    assert layout == expected
    assert torch.equal(coded, same)
    out = torch.full((layout.raw_nbytes,), 0xFF, dtype=torch.uint8)
    coding.decode(coded, layout, out)
    assert torch.equal(out, data)


def test_ragged_weights_without_a_kernel_are_decoded_besides_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the calling thread, in whose stream the others are decoded, and only these."""
    parts, threads = [], []
    for count in (2 * 4096, 5000):
        data = weights()[: 2 * count] if count == 5000 else torch.cat([weights(), weights()])[: 2 * count]
        layout, coded = coding.encode(data, "bfloat16")
        parts.append((coded.to("meta"), layout, torch.empty(layout.raw_nbytes, dtype=torch.uint8, device="meta")))
    by_kernel: list[Any] = []

    def decoding(found: Any) -> Callable[[], None]:
        by_kernel.extend(found)
        return lambda: None

    monkeypatch.setattr(coding, "_available", lambda device, dtype, is_ragged: not is_ragged)
    monkeypatch.setattr("weightstream.codec.triton_codec", SimpleNamespace(DecodeLaunch=decoding), raising=False)
    monkeypatch.setattr(reference, "decode", lambda *_: threads.append(threading.current_thread()))
    coding.decoding(parts)()
    assert [layout.count for _, layout, _ in by_kernel] == [2 * 4096]
    assert threads == [threading.current_thread()]


# The trial, on a CPU, with the reference instead of the kernels


class Launches:
    """`triton_codec` with the reference as kernels. `wrong` names the kernel that misbehaves."""

    def __init__(self, wrong: str) -> None:
        self.calls: list[str] = []
        self._wrong = wrong

    def _called(self, name: str) -> bool:
        self.calls.append(name)
        if self._wrong == f"{name} fails":
            raise RuntimeError(f"{name}: no such instruction")
        return self._wrong == f"{name} differs"

    def warm_triton(self) -> None:
        assert not self.calls, "it runs before all others"

    def histograms(self, data: torch.Tensor, dtype: str) -> torch.Tensor:
        differs = self._called("histogram")
        return reference.histograms(data, dtype) + differs

    def encode(self, data: torch.Tensor, dtype: str, counts: torch.Tensor) -> Encoded:
        differs = self._called("encode")
        assert torch.equal(counts, reference.histograms(data, dtype)), (
            "no kernel waits for the compilation of another one"
        )
        layout, coded = reference.encode(data, dtype)
        return layout, coded ^ 1 if differs else coded

    def DecodeLaunch(self, parts: Sequence[reference.CodedPart]) -> Callable[[], None]:
        ((coded, layout, out),) = parts

        def run() -> None:
            differs = self._called("decode")
            coding._decode_on_cores(coded, layout, out)
            if differs:
                out[7] ^= 1

        return run


KERNELS = ["histogram", "encode", "decode"]
WRONG = [f"{name} {how}" for name in KERNELS for how in ("fails", "differs")]


@pytest.mark.parametrize(
    ("dtype", "wrong", "is_ragged"),
    [
        *((dtype, "nothing", is_ragged) for dtype in ELEMENTS for is_ragged in (False, True)),
        *(("bfloat16", wrong, False) for wrong in WRONG),
        ("float16", "decode fails", False),
        ("bfloat16", "decode differs", True),
    ],
)
def test_a_trial_runs_every_kernel_and_compares_every_bit(
    dtype: str, wrong: str, is_ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, threads = Launches(wrong), set(threading.enumerate())
    monkeypatch.setattr("weightstream.codec.triton_codec", launches, raising=False)  # it may not be imported yet
    found = coding._tried(torch.device("cpu"), dtype, is_ragged)
    assert set(threading.enumerate()) == threads
    if wrong == "nothing":
        assert found is None
        assert sorted(launches.calls) == (["decode"] * 2 if is_ragged else sorted([*KERNELS, "decode"])), (
            "the second call is of another kind"
        )
    elif "fails" in wrong:
        assert "its kernels do not run here (RuntimeError" in str(found)
        assert "no such instruction" in str(found)
    else:
        assert found == "a trial gave other bits"


def test_each_dtype_and_ragged_weights_are_tried_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that a model does not need are not compiled."""
    tried: list[tuple[str, bool]] = []
    monkeypatch.setattr(coding, "_tried", lambda _, dtype, is_ragged: tried.append((dtype, is_ragged)))
    assert coding.available(CUDA, "float16")
    assert coding.available(CUDA, "float16")
    assert tried == [("float16", False)]
    assert coding.available(CUDA, "bfloat16")
    assert coding.available(CUDA, "bfloat16", is_ragged=True)
    assert tried == [("float16", False), ("bfloat16", False), ("bfloat16", True)]


def test_a_device_is_tried_once_by_a_thread_that_all_callers_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, tried = threading.Event(), []

    def slow(device: torch.device, dtype: str, is_ragged: bool) -> None:
        tried.append((device, threading.current_thread()))
        assert goes_on.wait(20)

    monkeypatch.setattr(coding, "_tried", slow)
    with ThreadPoolExecutor(8) as pool:
        futures = list(pool.map(coding.prepare, [CUDA] * 8, ["bfloat16"] * 8))
        asked = [pool.submit(coding.available, CUDA, "bfloat16") for _ in range(4)]
        assert not any(future.done() for future in (*futures, *asked))
        goes_on.set()
        assert [future.result(20) for future in asked] == [True] * 4
    assert len({id(future) for future in futures}) == 1
    ((device, thread),) = tried
    assert device == CUDA
    thread.join(20)
    assert not thread.is_alive(), "no thread stays"


def test_an_error_of_the_thread_is_raised_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(coding, "_tried", fail)
    coding.prepare(CUDA, "bfloat16")
    with pytest.raises(KeyboardInterrupt):
        coding.available(CUDA, "bfloat16")


def test_a_cpu_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "prepare", lambda *_: pytest.fail("tried"))
    assert not coding.available(torch.device("cpu"), "bfloat16")
