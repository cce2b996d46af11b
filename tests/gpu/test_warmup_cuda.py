"""Kernels that are loaded ahead: every warm-up launch runs on a GPU, and leaves nothing allocated."""

from __future__ import annotations

from threading import Event

import pytest
import torch

from weightstream.runtime.devices import warmup

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_warmup_launches_run(dtype: torch.dtype) -> None:
    device, before = torch.device("cuda", torch.cuda.current_device()), torch.get_default_dtype()
    warmup._launch(device, Event(), generates=True)  # libraries keep a workspace
    state, held = torch.cuda.get_rng_state(device), torch.cuda.memory_allocated(device)
    torch.set_default_dtype(dtype)
    try:
        warmup._launch(device, Event(), generates=True)
    finally:
        torch.set_default_dtype(before)
    torch.cuda.synchronize(device)
    assert torch.equal(torch.cuda.get_rng_state(device), state)
    assert torch.cuda.memory_allocated(device) == held
