"""Where the kernels cannot run: one warning that says why, and the reference in their place."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from weightstream.codec import coding, reference

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    coding.available.cache_clear()
    yield
    coding.available.cache_clear()


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
def test_without_triton_the_reason_and_the_remedy_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="weightstream"):
        assert [coding.available(CUDA) for _ in range(3)] == [False] * 3
    assert len(caplog.messages) == 1
    assert "weights are not coded on cuda:0" in caplog.messages[0]
    assert "pip install triton" in caplog.messages[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_does_not_run_them_is_told_from_one_that_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="weightstream"):
        assert not coding.available(CUDA)
    assert "its kernels do not run here" in caplog.text


def test_the_cpu_has_the_reference() -> None:
    data = weights()
    assert "CUDA GPU" in str(coding.why_not(data.device))
    layout, coded = coding.encode(data, "bfloat16", 3)
    expected, same = reference.encode(data, "bfloat16", 3)
    assert layout == expected
    assert torch.equal(coded, same)
    out = torch.full((layout.raw_nbytes,), 0xFF, dtype=torch.uint8)
    coding.decode(coded, layout, out)
    assert torch.equal(out, data)
