"""Runs 64 MiB of weights through 16 MiB of device memory, and shows that the results are the same."""

import torch

import weightstream

model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))
x = torch.randn(1, 1024)
with torch.inference_mode():
    plain = model(x)
    with weightstream.offload(model, device="cpu", device_budget="16MiB") as streamer:
        print(streamer.plan)
        streamed = [model(x) for _ in range(3)]
        print(streamer.stats())
print("identical:", all(torch.equal(y, plain) for y in streamed))
