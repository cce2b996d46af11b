"""Small modules with one awkward kind of weight each: tied, strided, viewed, quantised, kept in buffers, written."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from fixtures_structure import WIDTH, Block, Chain


class LinearBatchNormLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(WIDTH, 48)
        self.batchnorm = nn.BatchNorm1d(48)
        self.linear2 = nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


class TiedLinears(nn.Module):
    """The first linear of every second block is one Parameter; so are head and tail."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.tail = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tail.weight = self.head.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[4].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


class Reader(nn.Module):
    """Multiplies by a Parameter that is passed to it."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table
        self.own = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.table) @ self.own


class ChildrenShareParameter(nn.Module):
    """Every child holds the same Parameter, and so does the parent, which reads it after them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.readers = nn.ModuleList(Reader(self.table) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for reader in self.readers:
            x = reader(x)
        return x @ self.table


class BufferBlock(nn.Module):
    """All its weights are buffers, one kept out of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("up", torch.empty(64, WIDTH))
        self.register_buffer("down", torch.empty(WIDTH, 64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.linear(torch.tanh(functional.linear(x, self.up)), self.down)


class WeightsInBuffers(Chain):
    block_class = BufferBlock


class StridedBlock(nn.Module):
    """Weights that are not contiguous: a transpose, a slice with a step, a channels-last kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.empty(WIDTH, 64).t())
        self.stepped = nn.Parameter(torch.zeros(WIDTH, 128)[:, ::2])  # the bytes in between are compressed too
        self.kernel = nn.Parameter(torch.empty(4, 4, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.linear(torch.tanh(functional.linear(x, self.transposed)), self.stepped)
        image = x.reshape(len(x), 4, 2, 4)
        return x + functional.conv2d(image, self.kernel, padding=1).reshape(x.shape)


class StridedParameters(Chain):
    block_class = StridedBlock


class QuantisedBlock(nn.Module):
    """Integer and float8 weights in buffers, dequantised in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("int8", torch.randint(-127, 128, (64, WIDTH), dtype=torch.int8))
        self.register_buffer("packed", torch.randint(0, 256, (WIDTH, 32), dtype=torch.uint8))
        self.register_buffer("float8", torch.zeros(WIDTH, WIDTH, dtype=torch.float8_e4m3fn))
        self.register_buffer("order", torch.randperm(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.2)
        self.scale = nn.Parameter(torch.empty(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.int8.to(x.dtype) * self.scale * 0.01
        nibbles = torch.stack((self.packed & 15, self.packed >> 4), dim=-1).reshape(WIDTH, 64)
        inner = torch.tanh(functional.linear(x, up))
        x = x + functional.linear(inner, (nibbles.to(x.dtype) - 8) * 0.02)
        return x + functional.linear(x[:, self.order] * self.mask, self.float8.to(x.dtype))


class QuantisedWeights(Chain):
    block_class = QuantisedBlock


class ViewsBlock(nn.Module):
    """Two parameters that are the halves of one storage, and a third that sees it all, transposed."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.empty(2 * WIDTH, WIDTH)
        self.upper = nn.Parameter(both[:WIDTH])
        self.lower = nn.Parameter(both[WIDTH:])
        self.whole = nn.Parameter(both.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.linear(torch.tanh(x), self.upper) + functional.linear(x, self.lower)
        return x + functional.linear(functional.linear(inner, self.whole.t()), self.whole)


class ViewsOfOneStorage(Chain):
    block_class = ViewsBlock


class OddBlock(nn.Module):
    """A scalar, an empty tensor, complex, double and half numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.empty(()))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.turn = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.complex64))
        self.float64 = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=torch.float64))
        self.float16 = nn.Parameter(torch.empty(WIDTH, 33, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat((x, functional.linear(x, self.empty)), dim=-1) * self.scalar
        x = torch.view_as_real(x.to(torch.complex64) @ self.turn).sum(-1)
        return functional.linear(x.double(), self.float64).float() + self.float16.float().sum(-1)


class OddTensors(Chain):
    block_class = OddBlock


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights besides its parameters, and a GRU cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=3, bidirectional=True, batch_first=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.tail = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, (state, _) = self.lstm(x.reshape(1, -1, WIDTH))
        for item in hidden.unbind(1):
            x = self.cell(item.expand(len(x), -1), x)
        return self.tail(x), state


class FusedEncoder(nn.Module):
    """PyTorch's own encoder, whose inference path passes its children's weights to one fused operator."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x.reshape(1, -1, WIDTH))


class NormedBlock(nn.Module):
    """A linear whose weight is computed from two parameters each time it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Parametrised(Chain):
    block_class = NormedBlock


class CountingBlock(Block):
    """Writes to its buffers as it runs: the next step must see these writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.empty(WIDTH, WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) + torch.tanh(x) @ self.mean / (self.count + 1)
        self.mean.mul_(0.9).add_(torch.tanh(x.detach()).mean(0))
        self.count += 1
        return x


class WrittenBuffers(Chain):
    """Blocks that keep a running mean, under a root that replaces its buffer by another tensor."""

    block_class = CountingBlock

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) + self.last
        self.last = x[0].detach().clone()
        return x


FIXTURES = (
    LinearBatchNormLinear,
    TiedLinears,
    ChildrenShareParameter,
    WeightsInBuffers,
    StridedParameters,
    QuantisedWeights,
    ViewsOfOneStorage,
    OddTensors,
    Recurrent,
    FusedEncoder,
    Parametrised,
    WrittenBuffers,
)
