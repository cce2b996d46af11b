"""A block of a model in eager code, for timing how long the host takes to launch kernels from a model's code.

Importing a block of transformers would take longer (2.5 s) than all measurements together.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F


class _Linear(nn.Linear):
    """Not initialised: the user's random state stays, and PyTorch does not import its meta kernels of random numbers,
    which takes 2 s."""

    def reset_parameters(self) -> None: ...


class SampleBlock(nn.Module):
    """A decoder block: norms in single operators, rotary positions, a growing cache, a gated MLP."""

    width, heads = 64, 4
    num_kernels = 40  # in bf16

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        w, linear = self.width, partial(_Linear, bias=False, device=device, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.empty(w, device=device, dtype=torch.bfloat16))
        self.q, self.k, self.v, self.o = (linear(w, w) for _ in range(4))
        self.gate = linear(w, 2 * w)
        self.up = linear(w, 2 * w)
        self.down = linear(2 * w, w)
        self.act = nn.SiLU()

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.scale * y.to(x.dtype)

    def forward(self, x: torch.Tensor, turn: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        y = self._norm(x)
        q, k, v = (part(y).view(1, 1, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (p * turn + torch.cat((-p.chunk(2, -1)[1], p.chunk(2, -1)[0]), -1) * turn for p in (q, k))
        k, v = (torch.cat((past, p), -2) for p in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.o(y.transpose(1, 2).reshape(1, 1, -1))
        y = self._norm(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]
