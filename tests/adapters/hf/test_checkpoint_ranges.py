"""The bytes in the ranges are those that transformers loads. A conversion that does not move whole rows has no
ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import conversion_mapping  # noqa: E402
from transformers.core_model_loading import (  # noqa: E402
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from models import TEXT  # noqa: E402
from weightstream.adapters.hf import checkpoint_ranges as ranges_module  # noqa: E402
from weightstream.adapters.hf import private  # noqa: E402
from weightstream.adapters.hf.checkpoint_ranges import TensorRange, byte_ranges  # noqa: E402
from weightstream.adapters.hf.hub import skeleton  # noqa: E402

KINDS = ("gate", "up", "down")
SMALL: dict[str, Any] = TEXT | {"num_hidden_layers": 2, "num_key_value_heads": 2}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
QWEN: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 8}
# The model, and how many ranges its converted parameters have: the same number in each layer of experts.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, int], int]] = {
    "Mixtral": (
        lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
        {"gate_up_proj": 8, "down_proj": 4},
        2,
    ),
    "Qwen3Moe": (lambda: transformers.Qwen3MoeConfig(**SMALL, **QWEN), {"gate_up_proj": 8, "down_proj": 4}, 2),
    "DeepseekV3": (
        lambda: transformers.DeepseekV3Config(**SMALL | DEEPSEEK),
        {"gate_up_proj": 8, "down_proj": 4},
        1,
    ),
    "GptOss": (lambda: transformers.GptOssConfig(**SMALL, num_local_experts=4, head_dim=8), {}, 2),
}


def gathered(tensors: Mapping[str, torch.Tensor], ranges: tuple[TensorRange, ...]) -> torch.Tensor:
    return torch.cat([tensors[r.name].reshape(-1).view(torch.uint8)[r.begin : r.end] for r in ranges])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_that_transformers_loads(name: str, tmp_path: Path) -> None:
    config, converted, num_layers = MODELS[name]
    cls = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = cls(config()).to(torch.bfloat16)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    built = skeleton(tmp_path)[0]
    found = byte_ranges(built, tensors)
    assert all(tensor.is_meta for tensor in built.parameters())
    state = cls.from_pretrained(tmp_path, dtype="auto").state_dict()
    for title, ranges in found.items():
        assert torch.equal(gathered(tensors, ranges), raw(state[title])), title
    # transformers 5.24 has routers in float32, whose bytes are not in a file of bf16
    cast = {title for title in tensors.keys() & state.keys() if tensors[title].dtype is not state[title].dtype}
    assert {title for title, _ in built.named_parameters()} <= found.keys() | cast
    several = [title.rpartition(".")[2] for title, ranges in found.items() if len(ranges) > 1]
    assert sorted(several) == sorted([*converted] * num_layers)
    for title, ranges in found.items():
        assert len(ranges) == converted.get(title.rpartition(".")[2], 1) or title in tensors, title


@pytest.mark.parametrize("odd", [None, "Qwen3Moe, layer 1", "Qwen3Moe, layer 2, last"])
def test_middle_layers_are_assumed_to_equal_the_first_and_the_last(odd: str | None, tmp_path: Path) -> None:
    """If those two differ, or a layer has other shapes, each layer is converted by itself."""
    config = transformers.Qwen3MoeConfig(**SMALL | {"num_hidden_layers": 4}, **QWEN)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    names = [f"model.layers.{k}.mlp.experts.{e}.{m}_proj.weight" for k in range(4) for e in range(4) for m in KINDS]
    wide = {name for name in names if odd == "Qwen3Moe, layer 1" and ".1.mlp" in name}
    tensors = {
        name: torch.empty(
            (64, 24) if "down" in name else (24, 64), dtype=torch.float32 if name in wide else torch.bfloat16
        )
        for name in names
    }
    places = {n: f"{n.partition('.experts')[0]}.experts.{'down' if 'down' in n else 'gate_up'}_proj" for n in names}
    asked: list[int] = []
    real = ranges_module.byte_ranges

    def counted(model: Any, tensors: Any, mapping: Any = None) -> Any:
        asked.append(len(tensors))
        found = real(model, tensors, mapping)
        # as if the converter had joined them in another way
        if odd == "Qwen3Moe, layer 2, last" and len(tensors) < len(names):
            last = "model.layers.3.mlp.experts.gate_up_proj"
            found[last] = found[last][::-1]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges_module, "byte_ranges", counted)
        found = ranges_module._by_kinds(model, tensors, places, None)
    assert found == real(model, tensors)
    assert len(found) == 8 - 2 * bool(wide)
    whole, two = len(names), len(names) // 2
    assert asked == {None: [two], "Qwen3Moe, layer 1": [whole * 3 // 4]}.get(odd, [two, whole])


class Computed(ConversionOps):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.function = function

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: self.function(tensors[0] if isinstance(tensors, list) else tensors)}


class Made(transformers.LlamaForCausalLM):
    """A llama with one more weight, for conversions of our own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.made = nn.Parameter(torch.empty(config.made))


def convert(
    shape: tuple[int, ...], sources: list[torch.Tensor], operation: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor], tuple[TensorRange, ...] | None]:
    """The tensor that transformers makes of the sources, these by name, and the ranges."""
    tensors = {f"part.{i}.weight": source for i, source in enumerate(sources)}
    operations = operation if isinstance(operation, list) else [Computed(operation)]
    with torch.device("meta"):
        model = Made(transformers.LlamaConfig(**SMALL, made=shape)).to(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        mapping = [WeightConverter("part.*.weight", "made", operations)]
        patch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model, **about: mapping)
        ranges = byte_ranges(model, tensors).get("made")
        private.convert_into(model, tensors, torch.float32)
    assert not model.made.is_meta, "the conversion itself failed"
    return model.made, tensors, ranges


Case = tuple[list[torch.Tensor], tuple[int, ...], Any]


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


WHOLE: dict[str, tuple[Case, int]] = {
    "a stack": (([floats(4, 6), floats(4, 6)], (2, 4, 6), [MergeModulelist()]), 2),
    "joined rows": (([floats(4, 6), floats(2, 6)], (6, 6), [Concatenate(dim=0)]), 2),
    "one of two halves": (([floats(8, 6)], (4, 6), lambda t: t[4:]), 1),
    "rows in another order": (
        ([floats(8, 6)], (8, 6), lambda t: t.unflatten(0, (4, 2)).transpose(0, 1).flatten(0, 1)),
        8,
    ),
    "experts in another order": (([floats(3, 5, 6)], (2, 5, 6), lambda t: t[[2, 0]]), 2),
    "outer dimensions": (([floats(3, 5, 6)], (5, 3, 6), [Transpose(0, 1)]), 15),
    "a vector": (([floats(9)], (6,), lambda t: t[3:]), 1),
    "a column": (([floats(9, 1)], (9,), lambda t: t.squeeze(1)), 1),
    "columns of one": (([floats(9, 1), floats(4, 1)], (13, 1), [Concatenate(dim=0)]), 2),
    "unlike neighbours": (([floats(4, 6), floats(3, 2), floats(5)], (4, 6), lambda t: t), 1),
}
CHANGED: dict[str, Case] = {
    "transposed": ([floats(4, 6)], (6, 4), [Transpose(0, 1)]),
    "a transposed square": ([floats(6, 6)], (6, 6), [Transpose(0, 1)]),
    "a small transposed square": ([floats(3, 3)], (3, 3), [Transpose(0, 1)]),
    "joined columns": ([floats(4, 6), floats(4, 2)], (4, 8), [Concatenate(dim=1)]),
    "half of the columns": ([floats(4, 6)], (4, 3), lambda t: t.chunk(2, dim=1)[0]),
    "columns in another order": ([floats(4, 6)], (4, 6), lambda t: t.unflatten(1, (t.shape[1] // 2, 2)).mT.flatten(1)),
    "columns the other way": ([floats(4, 6)], (4, 6), lambda t: t.flip(-1)),
    "another length of rows": ([floats(4, 6)], (6, 4), lambda t: t.reshape(6, -1) if t.shape[1] == 6 else t),
    "cast": ([floats(4, 6).double()], (4, 6), lambda t: t),
    "cast there and back": ([floats(4, 6)], (4, 6), lambda t: t.half().to(t.dtype)),
    "one more": ([floats(4, 6)], (4, 6), lambda t: t + 1),
    "positive": ([floats(4, 6)], (4, 6), lambda t: t.clamp(min=0)),
    "negative": ([floats(4, 6)], (4, 6), lambda t: -t),
    "padded": ([floats(4, 6)], (5, 6), lambda t: torch.cat([t, torch.zeros_like(t[:1])])),
    "row by row": ([floats(6000, 1)], (6000, 1), lambda t: t.flip(0)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_conversions_that_move_whole_rows(name: str) -> None:
    (sources, shape, operation), num_ranges = WHOLE[name]
    result, tensors, ranges = convert(shape, sources, operation)
    assert ranges is not None
    assert len(ranges) == num_ranges
    assert torch.equal(gathered(tensors, ranges), raw(result))


@pytest.mark.parametrize("name", CHANGED)
def test_conversions_without_ranges(name: str) -> None:
    sources, shape, operation = CHANGED[name]
    assert convert(shape, sources, operation)[2] is None


def test_a_conversion_that_fails_has_no_ranges() -> None:
    with pytest.raises(AssertionError, match="itself failed"):
        convert((4, 6), [floats(4, 6)], lambda t: 1 / 0)
