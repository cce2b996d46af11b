"""Small modules with one awkward structure or call style each; every one takes `x` of 32 features."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional

WIDTH = 32


class Block(nn.Module):
    """A residual pair of linears: the ordinary case."""

    def __init__(self, width: int = WIDTH, inner: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Five blocks of one class, run in order: the frame of fixtures with an unusual block."""

    block_class: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block_class() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stack(nn.Module):
    """A plain stack of blocks between two linears."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.tail = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


class ReadingBlock(Block):
    """Reads the weights of its children without calling them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(functional.linear(x, self.up.weight, self.up.bias))
        return x + functional.linear(inner, self.down.weight, self.down.bias)


class ParentReadsChildren(nn.Module):
    """Blocks that read their children's weights, under a root that reads the weight of a linear and of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadingBlock() for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = functional.linear(x, self.head.weight, self.head.bias)
        return functional.linear(x, self.blocks[3].up.weight)


class DeclaredOutOfOrder(nn.Module):
    """The list runs 4, 1, 5, 0, 3, 2."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for index in (4, 1, 5, 0, 3, 2):
            x = self.blocks[index](x)
        return self.tail(x)


class OptionalBranch(nn.Module):
    """A second path of blocks that only some passes take."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.control = nn.ModuleList(Block() for _ in range(4))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        for block, control in zip(self.blocks, self.control, strict=True):
            x = block(x) + self.gate(control(x)) if branch else block(x)
        return x


class OrderByInput(nn.Module):
    """Skips, repeats and reverses its blocks from pass to pass, so that no learnt order lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        orders = ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (0, 0, 2, 2, 5), (3,))
        for index in orders[len(x) % len(orders)]:
            x = self.blocks[index](x)
        return x


class Group(nn.Module):
    """A list of blocks with weights of its own before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.mix = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.post = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x) @ self.mix
        return self.post(x) * self.scale


class NestedLists(nn.Module):
    """Lists in lists, with parameters between them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.empty(WIDTH))
        self.groups = nn.ModuleList(Group() for _ in range(3))
        self.between = nn.ParameterList(nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.before
        for group, between in zip(self.groups, self.between, strict=True):
            x = torch.tanh(group(x) @ between)
        return x


class NoModuleList(nn.Module):
    """Attributes of different shapes, and no container."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 96)
        self.second = nn.Linear(96, 40)
        self.norm = nn.LayerNorm(40)
        self.third = nn.Bilinear(40, 40, 16)
        self.last = nn.Linear(16, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.second(torch.relu(self.first(x))))
        return self.last(self.third(x, x.flip(-1)))


class BareParameters(nn.Module):
    """No child module at all: the root reads its own parameters, by name and from a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(WIDTH, 64))
        self.second = nn.Parameter(torch.empty(64, WIDTH))
        self.named = nn.ParameterDict({"third": nn.Parameter(torch.empty(WIDTH, WIDTH))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.first) @ self.second @ self.named["third"]


@dataclasses.dataclass
class State:
    """Input and output of a `DataclassBlock`."""

    hidden: torch.Tensor
    history: list[torch.Tensor]


class TupleBlock(Block):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, total = pair
        x = super().forward(x)
        return x, total + x


class DictBlock(Block):
    def forward(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = super().forward(state["hidden"])
        return {"hidden": x, "total": state["total"] + x}


class DataclassBlock(Block):
    def forward(self, state: State) -> State:
        x = super().forward(state.hidden)
        return State(hidden=x, history=[*state.history, x])


class TupleOutputs(Chain):
    block_class = TupleBlock

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward((x, x))


class DictOutputs(Chain):
    block_class = DictBlock

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward({"hidden": x, "total": x})


class DataclassOutputs(Chain):
    block_class = DataclassBlock

    def forward(self, x: torch.Tensor) -> State:
        return super().forward(State(hidden=x, history=[]))


class KeywordBlock(Block):
    def forward(self, *, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return super().forward(x * factor)


class KeywordOnly(nn.Module):
    """Root and blocks take keywords only, and no output is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(WIDTH))
        self.blocks = nn.ModuleList(KeywordBlock() for _ in range(5))

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(factor=self.factor, x=x)
        return x


class CalledTwice(nn.Module):
    """Every block runs twice in a forward: the whole list again, and the last one at once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks, self.blocks[3], self.blocks[3]):
            x = block(x)
        return x


class Tower(nn.Module):
    """Blocks of its own around one that another tower also has."""

    def __init__(self, shared: Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), shared, Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SharedBlock(nn.Module):
    """One block is a child of two parents."""

    def __init__(self) -> None:
        super().__init__()
        shared = Block()
        self.left = Tower(shared)
        self.right = Tower(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x * 0.5)


BRANCHING = (OptionalBranch,)
FIXTURES = (
    Stack,
    ParentReadsChildren,
    DeclaredOutOfOrder,
    OptionalBranch,
    OrderByInput,
    NestedLists,
    NoModuleList,
    BareParameters,
    TupleOutputs,
    DictOutputs,
    DataclassOutputs,
    KeywordOnly,
    CalledTwice,
    SharedBlock,
)
