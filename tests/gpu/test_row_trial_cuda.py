"""Where probes find equal bits on a GPU, no random values show others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from weightstream.adapters.steps.row_trial import RowTrial

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
NUM_DRAWS = 300
WEIGHT = torch.randn(1536, 2048, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(1536, generator=torch.Generator().manual_seed(2))
KEYS, VALUES = (torch.randn(1, 16, 96, 128, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))


def attention(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(1, 1, x.shape[1], 96, dtype=torch.bool, device=x.device)
    found = functional.scaled_dot_product_attention(x.view(1, -1, 16, 128).transpose(1, 2), keys, values, mask)
    return found.transpose(1, 2)


def eager_attention(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = x.view(1, -1, 16, 128).transpose(1, 2) @ keys.mT / 11
    return (scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ values).transpose(1, 2)


STEPS: dict[str, Callable[..., torch.Tensor]] = {
    "product": lambda x, weight, *_: functional.linear(x, weight),
    "product and bias": lambda x, weight, bias, *_: functional.linear(x, weight, bias),
    "norm": lambda x, *_: x * x.float().pow(2).mean(-1, keepdim=True).rsqrt(),
    "layer norm": lambda x, *_: functional.layer_norm(x, x.shape[-1:]),
    "attention": lambda x, weight, bias, keys, values: attention(x, keys, values),
    "eager attention": lambda x, weight, bias, keys, values: eager_attention(x, keys, values),
    "experts": lambda x, weight, *_: torch.bmm(weight.repeat(x.shape[1], 1, 1), x[0, :, :, None])[None, ..., 0],
}


@pytest.mark.parametrize("cudnn", [True, False], ids=["cudnn", "no cudnn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("name", STEPS)
def test_no_row_differs_where_probes_do_not(name: str, width: int, dtype: torch.dtype, cudnn: bool) -> None:
    weights = [each.to(DEVICE, dtype) for each in (WEIGHT, BIAS, KEYS, VALUES)]
    chance = torch.Generator(DEVICE).manual_seed(width)

    def step(x: torch.Tensor) -> torch.Tensor:
        return STEPS[name](x, *weights)

    def draw() -> torch.Tensor:
        return torch.randn(1, width, 2048, generator=chance, device=DEVICE).to(dtype)

    plain = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        with torch.no_grad():
            trial, x = RowTrial(width), draw()
            trial.run_single(lambda: step(torch.stack([x[0, :1]])))
            if trial.run_wide(lambda: step(x))[1].differences:
                return
            for _ in range(NUM_DRAWS):
                x = draw()
                rows = step(x)
                alone = torch.cat([step(torch.stack([x[0, row : row + 1]])) for row in range(width)], 1)
                assert torch.equal(rows, alone)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(plain)
