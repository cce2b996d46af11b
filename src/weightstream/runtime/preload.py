"""Kernels that a first call would wait for, loaded while a model is made: that takes the host, and these the device.

A GPU loads a kernel when it is first launched, and a library with its first product. For a language model that is most
of a second, in which the host waits. What is launched here is what nearly all of them launch, in bfloat16; kernels
that it leaves out are loaded when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch.nn import functional

_TOKENS, _HEADS, _WIDTH = 64, 4, 256


@contextmanager
def preloading(device: torch.device) -> Iterator[None]:
    """Meanwhile a thread loads kernels."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():  # then some raise, or warn
        yield
        return
    with ThreadPoolExecutor(1, "weightstream-preload") as pool:
        pool.submit(_launch, device)  # what it fails with, such as no memory, the first call will tell
        yield


@torch.inference_mode()
def _launch(device: torch.device) -> None:
    """A layer of attention and experts, with what goes before and behind it."""
    weight = torch.zeros(_WIDTH, _WIDTH, dtype=torch.bfloat16, device=device)
    ids = torch.arange(_TOKENS, device=device)[None]
    hidden = functional.embedding(ids, weight)
    exact = hidden.to(torch.float32)
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)
    hidden = weight[0] * exact.to(hidden.dtype)
    heads = functional.linear(hidden, weight).view(1, _TOKENS, _HEADS, -1).transpose(1, 2)
    half = heads.shape[-1] // 2
    angles = ids[0, :, None].float() * torch.ones(2 * half, device=device)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    heads = heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sin
    mask = (ids[0, :, None] >= ids) & torch.ones(1, _TOKENS, dtype=torch.bool, device=device)
    attended = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask[None, None])
    attended = attended + functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    hidden = hidden + functional.linear(attended.transpose(1, 2).reshape(1, _TOKENS, -1), weight)
    hidden = functional.silu(hidden) * hidden
    scores, experts = functional.linear(hidden, weight).float().softmax(-1).topk(8, dim=-1)
    scores = (scores / scores.sum(-1, keepdim=True)).to(hidden.dtype)
    order = experts.flatten().sort().indices
    hidden[0, order // 8].mul_(scores.flatten()[order, None]).sum(0)
    torch.cumsum(torch.histc(experts.int().float(), _WIDTH, 0, _WIDTH - 1), 0)
    functional.linear(hidden[:, -1], weight).float().argmax(-1)
