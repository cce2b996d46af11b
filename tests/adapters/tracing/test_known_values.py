"""Calls whose control flow depends on masks, ids and positions are traced on meta. Those that depend on activations
are
not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from models import randomise
from weightstream.adapters.tracing.footprint import follow
from weightstream.errors import UnsupportedError

WIDTH = 16


def first_zero(mask: torch.Tensor) -> int:
    return int((mask == 0).long().argmax())


def counted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[: int(mask.sum().item())]


def written(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = mask.clone()
    kept[1:] = 0
    view = kept.view(1, -1)
    kept[0] += 4
    return x[: int(view.max())]


def overwritten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values that are written to it become unknown, also in other views of its memory."""
    kept = torch.ones_like(mask)
    view = kept[:2]
    kept.copy_(x[:, 0].long())
    return x if view.all() else x[:1]


def overwritten_in_a_list(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As above, by an operator that returns nothing."""
    kept = torch.ones_like(mask)
    torch._foreach_copy_([kept], [x[:, 0].long()])
    return x if kept.all() else x[:1]


def filled_in_a_list(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros_like(mask)
    torch._foreach_copy_([kept], [mask])
    return x if kept.all() else x[:1]


def masked_by_ones(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As OPT and others make a missing mask."""
    ones = torch.ones(len(x), device=x.device)
    is_seen = torch.cat([ones, mask.float()]).bool()
    return x if is_seen.all() else x[:1]


def masked_by_a_bias(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = torch.full((len(x),), torch.finfo(x.dtype).min, device=x.device).masked_fill(mask.bool(), 0.0)
    return x[: int((bias.softmax(0) > 0).sum())]


def cached(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A buffer of zeros has no known values after activations are written to it."""
    kept = torch.zeros(2, *x.shape, device=x.device)
    kept[1] = x
    return x if kept[1].any() else x[:1]


def counted_on_the_cpu(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """An operator that writes to a tensor with memory runs once."""
    num = torch.zeros((), dtype=torch.int64, device="cpu")
    while int(num) != int(mask.sum()):
        num += 1
    kept = torch.zeros(2, dtype=torch.int64, device="cpu")
    kept[:1] += num
    return x[: int(kept.sum())]


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "all": lambda x, mask: x if mask.all() else x[:1],
    "any": lambda x, mask: x[:2] if (mask == 0).any() else x,
    "count": counted,
    "first": lambda x, mask: x[: first_zero(mask)],
    "rows of a mask": lambda x, mask: x[mask.bool()],
    "nonzero": lambda x, mask: x[mask.nonzero().flatten()],
    "on the CPU": lambda x, mask: x[: sum(mask.tolist())],
    "equal": lambda x, mask: x if torch.equal(mask, torch.ones_like(mask)) else x[:3],
    "unique": lambda x, mask: x[: len(torch.unique(mask))],
    "positions": lambda x, mask: x if (torch.arange(len(x), device=x.device) > 3).any() else x[:1],
    "written": written,
    "written on the CPU": counted_on_the_cpu,
    "written in a list": filled_in_a_list,
    "ones": masked_by_ones,
    "bias": masked_by_a_bias,
    "where": lambda x, mask: x[torch.where(mask == 0)[0]],
}


class Model(nn.Module):
    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(self.way(self.linear(x), mask))


def shape_of(model: Model, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Size, list[bool]]:
    shapes, asked = list[torch.Size](), list[bool]()
    follow(model, (x, mask), on_output=lambda output: shapes.append(output.shape), on_values=asked.append)
    return shapes[0], asked


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("num", [2, 5, 6])
def test_control_flow_by_values_of_a_mask_is_traced(name: str, num: int) -> None:
    model, x, mask = Model(WAYS[name]), torch.randn(6, WIDTH), torch.tensor([1] * num + [0] * (6 - num))
    original = mask.clone()
    with torch.no_grad():
        assert shape_of(model, x, mask) == (model(x, mask).shape, [True])
    assert torch.equal(mask, original)


@pytest.mark.parametrize(
    "way",
    [
        overwritten,
        overwritten_in_a_list,
        cached,
        lambda x, mask: x if x.max() > 0 else x[:1],
        lambda x, mask: x[x[:, 0] > 0],
    ],
)
def test_values_of_activations_are_unknown(way: Any) -> None:
    with pytest.raises(UnsupportedError):
        follow(Model(way), (torch.randn(6, WIDTH), torch.ones(6, dtype=torch.long)))


def test_a_call_that_reads_no_value_says_so() -> None:
    model = Model(lambda x, mask: x * mask[:, None])
    assert shape_of(model, torch.randn(6, WIDTH), torch.ones(6, dtype=torch.long)) == ((6, WIDTH), [False])


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ENCODERS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {"head_dim": 16, "sliding_window": 8},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 8},
    "Glm": {"head_dim": 16},
    "Glm4": {"head_dim": 16},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("masked", [None, 9, 16])
@pytest.mark.parametrize("name", ENCODERS)
def test_pipelines_with_a_language_model_for_prompts_are_planned(name: str, masked: int | None) -> None:
    """Like FLUX.2, Z-Image, HunyuanVideo, LTX-2 and CogView4, which use all hidden states, and no cache."""
    diffusers, transformers = pytest.importorskip("diffusers"), pytest.importorskip("transformers")

    class Pipe(diffusers.DiffusionPipeline):  # type: ignore[misc, name-defined]
        def __init__(self, text_encoder: Any, transformer: Any) -> None:
            super().__init__()
            self.register_modules(text_encoder=text_encoder, transformer=transformer)

        def __call__(self, prompt: str = "", steps: int = 3) -> torch.Tensor:
            ids = torch.arange(3, 19)[None]
            options = {} if masked is None else {"attention_mask": (torch.arange(16) < masked)[None].long()}
            found = self.text_encoder(input_ids=ids, **options, output_hidden_states=True, use_cache=False)
            x: torch.Tensor = found.hidden_states[-1]
            for _ in range(steps):
                x = torch.tanh(self.transformer(x))
            return x

    config = getattr(transformers, f"{name}Config")(**TEXT | ENCODERS[name])
    encoder = randomise(getattr(transformers, f"{name}Model")(config), 0).eval()
    pipe = Pipe(encoder, randomise(nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)]), 1))
    nbytes = sum(p.nbytes for module in pipe.components.values() for p in module.parameters())
    with torch.no_grad():
        want = pipe("w5")
        weightstream.offload_pipeline(
            pipe, device="cpu", device_budget=int(0.6 * nbytes), example_inputs={"prompt": "w5"}
        )
        plan = pipe.weightstream.plan(prompt="w5")
        assert [(turn.component, turn.num) for turn in plan.turns] == [("text_encoder", 1), ("transformer", 3)]
        assert plan.turns[0].plan.activation_nbytes > 0
        for _ in range(2):
            assert torch.equal(pipe("w5"), want)
