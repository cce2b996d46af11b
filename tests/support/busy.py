"""Keeps a GPU and its link busy until it is killed: copies 1 GiB to it and multiplies 8192 x 8192, again and again."""

import torch

host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
device = torch.empty_like(host, device="cuda")
factor = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
while True:
    device.copy_(host, non_blocking=True)
    torch.mm(factor, factor)
    torch.cuda.synchronize()
