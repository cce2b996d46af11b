"""Warmup: load kernels that a first call would wait for, while the host builds a model and the device is idle.

A GPU loads a kernel when it is first launched, and a library with its first product. For `generate` these are some
hundred megabytes, which take a second, or three while another thread pins memory, as the driver asks the system for
memory piece by piece. The operators launched here are those of nearly all language models, in bfloat16. Other kernels
are loaded when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import torch
from torch.nn import functional

_TOKENS, _HEADS, _WIDTH, _CHOSEN = 64, 4, 256, 8
_HALF, _SINGLE = torch.bfloat16, torch.float32  # dtypes are explicit: a load changes the default dtype of the process


@contextmanager
def preloading(device: torch.device, *, generates: bool) -> Iterator[None]:
    """Load kernels in a thread while the block runs; it has ended when the block does. Loads the library of products,
    and the kernels of `generate` if the model may generate."""
    if device.type != "cuda":
        yield
        return
    failed = Event()
    with ThreadPoolExecutor(1, "weightstream-preload") as pool:
        # an error, such as no memory, is ignored here: the first call raises it
        pool.submit(_launch, device, failed, generates=generates)
        try:
            yield
        except BaseException:
            failed.set()
            raise


@torch.inference_mode()
def _launch(device: torch.device, failed: Event, *, generates: bool) -> None:
    weight = torch.zeros(_WIDTH, _WIDTH, dtype=_HALF, device=device)
    functional.linear(weight, weight)  # first, as it takes longest
    if not generates or torch.are_deterministic_algorithms_enabled():  # then some of these operators raise or warn
        return
    ids = torch.arange(_TOKENS, device=device)[None]
    hidden = functional.embedding(ids, weight)
    positions = _inputs(ids)
    if not failed.is_set():
        hidden = hidden + _attention(_normed(hidden, weight), weight, positions)
    if not failed.is_set():
        hidden = hidden + _experts(_normed(hidden, weight)[0], weight)
        _token(ids, functional.linear(hidden[:, -1:], weight).float()[:, -1])


def _inputs(ids: torch.Tensor) -> torch.Tensor:
    """The operators that `generate` runs on ids: the padding mask, and positions."""
    padding, ones = torch.zeros((), dtype=ids.dtype, device=ids.device), torch.ones_like(ids)
    is_padded = torch.isin(ids, padding).any() * ~torch.isin(padding, padding).any()
    mask = ids.ne(padding).long() * is_padded + ones * ~is_padded
    positions = mask.cumsum(-1) - 1
    positions.masked_fill_(mask == 0, 1)
    bool((mask == 1).all() | (mask < 0).any())
    return positions.clone()


def _normed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    exact = hidden.to(_SINGLE)
    return weight[0] * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)


def _attention(hidden: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    heads = functional.linear(hidden, weight).view(1, _TOKENS, _HEADS, -1).transpose(1, 2)
    half = heads.shape[-1] // 2
    rates = torch.ones(half, dtype=_SINGLE, device=hidden.device)
    angles = positions[..., None].to(_SINGLE) * rates
    angles = angles + (rates[:, None] @ positions.to(_SINGLE)).transpose(0, 1)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = (angles.cos() * 1.0).to(_HALF), (angles.sin() * 1.0).to(_HALF)
    heads = heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sin
    places = torch.arange(_TOKENS, device=hidden.device)
    places += 0
    cache = torch.zeros_like(heads).index_copy_(2, places, heads)
    mask = (places[:, None] >= places) & torch.ones(1, _TOKENS, dtype=torch.bool, device=hidden.device)
    attended = functional.scaled_dot_product_attention(heads, cache, cache, attn_mask=mask[None, None])
    attended = attended + functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return functional.linear(attended.transpose(1, 2).reshape(1, _TOKENS, -1), weight)


def _experts(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scores, chosen = functional.linear(hidden, weight).softmax(-1, dtype=_SINGLE).topk(_CHOSEN, dim=-1)
    scores = (scores / scores.sum(-1, keepdim=True)).to(_HALF)
    chosen, order = chosen.flatten().sort()
    torch.cumsum(torch.histc(chosen.to(_SINGLE), _WIDTH, 0, _WIDTH - 1), 0, dtype=torch.int32)
    rows = hidden[order // _CHOSEN]
    rows = functional.silu(rows) * rows * scores.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return rows[back].view(_TOKENS, _CHOSEN, -1).sum(1)


def _token(ids: torch.Tensor, logits: torch.Tensor) -> None:
    """The operators that `generate` runs on logits."""
    going = torch.ones(1, dtype=ids.dtype, device=ids.device)
    token = logits.argmax(-1) * going + 0 * (1 - going)
    torch.cat((ids, token[:, None]), dim=-1)
    ends = torch.full((1,), False, device=ids.device) | torch.isin(token, going)
    bool((going & ~ends).max() == 0)
