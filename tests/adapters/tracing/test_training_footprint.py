"""Footprints of training steps: order of units, arithmetic by hand, and memory, also of blocks that were left out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightstream.adapters.modules.partition import Grain, called, find_blocks, find_units
from weightstream.adapters.tracing import training
from weightstream.adapters.tracing.block_series import series_of
from weightstream.adapters.tracing.forward import run_on_copy
from weightstream.adapters.tracing.training import TrainingFootprint, follow_training
from weightstream.errors import UnsupportedError
from weightstream.plan.schedule import aligned
from weightstream.runtime.tensors.pytree import tensors_in
from weightstream.settings.config import TrainConfig

transformers = pytest.importorskip("transformers")
RANK, TOKENS = 4, 48
TRAIN = TrainConfig(batch=2, tokens=TOKENS, rank=RANK)


def llama(layers: int = 6, **config: Any) -> Any:
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = {"num_key_value_heads": 2, "num_hidden_layers": layers} | sizes | config
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).bfloat16()


def gemma() -> Any:
    """Two kinds of layers, of which only every third attends to all positions."""
    config = transformers.Gemma3TextConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=11, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, sliding_window=16, layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 3
        + ["sliding_attention"] * 2,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.Gemma3ForCausalLM(config).bfloat16()


def flux() -> tuple[nn.Module, dict[str, Any]]:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        made = diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=5, num_single_layers=7, attention_head_dim=16, num_attention_heads=4,
            joint_attention_dim=32, pooled_projection_dim=24, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
        ).bfloat16()  # fmt: skip
        call = {
            "hidden_states": torch.empty(1, 64, 16), "encoder_hidden_states": torch.empty(1, 24, 32),
            "pooled_projections": torch.empty(1, 24), "timestep": torch.empty(1), "guidance": torch.empty(1),
        }  # fmt: skip
        call = {name: value.bfloat16() for name, value in call.items()}
        call |= {"img_ids": torch.empty(64, 3), "txt_ids": torch.empty(24, 3)}
    return made, call


def followed(model: nn.Module, train: TrainConfig = TRAIN, *, whole: bool = False, **call: Any) -> TrainingFootprint:
    blocks = called(find_blocks(model))
    if not whole:
        return follow_training(model, train, blocks, () if call else None, call or None)
    series = tuple(each.whole() for each in series_of(model, blocks))
    values = ((), call) if call else ()
    return run_on_copy(model, partial(training._trained, model, train, series, values, torch.bfloat16), values)


@pytest.mark.few(1)
@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("build", [llama, gemma, flux])
def test_a_step_of_few_blocks_gives_that_of_all(build: Any, checkpoints: bool) -> None:
    model, call = built if isinstance(built := build(), tuple) else (built, {})
    train = replace_config(TRAIN, checkpoints=checkpoints)
    short, whole = followed(model, train, **call), followed(model, train, whole=True, **call)
    assert any(series.missing for series in short.series)
    assert short.step.activation_nbytes == pytest.approx(whole.step.activation_nbytes, rel=0.02)
    assert short.loss_nbytes == pytest.approx(whole.loss_nbytes, rel=0.02, abs=4096)
    grains: list[Grain] = ["block", "half", "matrix"]
    assert not short.step.outside(find_units(model, "block"))
    for units in (find_units(model, grain) for grain in grains):
        few, all_of = short.turns(units), whole.turns(units)
        assert few.order == all_of.order
        for ours, theirs in ((few.forward, all_of.forward), (few.backward, all_of.backward)):
            assert [sum(op.flops for op in ops) for ops in ours] == [sum(op.flops for op in ops) for ops in theirs]


def replace_config(train: TrainConfig, **changes: Any) -> TrainConfig:
    return TrainConfig(**train.model_dump() | changes)


def test_arithmetic_is_that_of_products_by_hand() -> None:
    """The backward of a frozen matrix is one product, that of an adapter's two; a checkpoint computes a forward again,
    up to its last tensor that is saved."""
    model = llama()
    found = followed(model)
    units = find_units(model, "block")
    layers = [i for i, unit in enumerate(units) if unit.layer is not None]
    turns, rows = found.turns(units), 2 * TOKENS
    matrices = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    frozen = sum(2 * rows * a * b for a, b in matrices)
    adapters = sum(2 * rows * RANK * (a + b) for a, b in matrices)
    pairs = 2 * 4 * TOKENS**2 * 16  # of positions, in all heads; half of them are masked
    for layer in layers:
        assert flops(turns.forward[layer]) == frozen + adapters + 2 * pairs
    last = 2 * rows * RANK * 64  # of the last adapter, the product whose output nothing saves
    for layer in layers[1:]:
        recompute, backward = frozen + adapters + 2 * pairs - last, frozen + 2 * adapters + 5 * pairs
        assert flops(turns.backward[layer]) == recompute + backward
    assert found.trained.num == found.trained.num_added == 6 * sum(RANK * (a + b) for a, b in matrices)


def flops(ops: Any) -> float:
    return sum(op.flops for op in ops)


def test_units_turn_around() -> None:
    """Blocks run back in reverse. The parts of a checkpointed block run forward again before they run back."""
    model = llama()
    blocks = [i for i, unit in enumerate(find_units(model, "block")) if unit.layer is not None]
    order = [unit for unit in followed(model).turns(find_units(model, "block")).order if unit in blocks]
    assert order == [*blocks, *reversed(blocks)]
    units = find_units(model, "half")
    names = [units[i].name for i in followed(model).turns(units).order if units[i].layer == 3]
    parts = [f"model.layers.3.{name}" for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")]
    assert names[:4] == parts
    assert names[-4:] == [*reversed(parts)] or names[-3:] == [*reversed(parts)][:3]
    plain = followed(model, replace_config(TRAIN, checkpoints=False)).turns(units)
    assert [units[i].name for i in plain.order if units[i].layer == 3] == [*parts, *reversed(parts)]


def test_checkpoints_and_rank_show_in_the_memory() -> None:
    model = llama(12)
    with_checkpoints, without = followed(model), followed(model, replace_config(TRAIN, checkpoints=False))
    assert with_checkpoints.step.activation_nbytes < without.step.activation_nbytes / 2
    deeper = followed(llama(24))
    states = 2 * TOKENS * 64 * 2  # a checkpoint keeps the states before its block
    assert deeper.step.activation_nbytes - with_checkpoints.step.activation_nbytes == 12 * states
    many_words = followed(llama(12, vocab_size=4096))
    assert many_words.loss_nbytes > 2 * TOKENS * 4096 * (4 + 4)  # at least logits and their gradient in float32


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_that_a_model_has_are_the_trained_ones() -> None:
    peft = pytest.importorskip("peft")
    model = llama()
    model.requires_grad_(False)
    plain = followed(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))
    found = followed(adapted)
    assert found.trained == (plain.trained.num, 0)
    assert found.step.activation_nbytes == pytest.approx(plain.step.activation_nbytes, rel=0.25)
    assert all(parameter.grad is None for parameter in adapted.parameters())


class Storages(TorchDispatchMode):
    """The most bytes that were alive at once in tensors that operators made."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._held = {tensor.untyped_storage()._cdata for tensor in held}
        self._alive: dict[int, Any] = {}
        self.nbytes: dict[int, int] = {}
        self.peak_nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tensors_in(output)):
            if (key := storage._cdata) not in self._held and key not in self._alive:
                self._alive[key] = weakref.ref(storage, partial(self._drop, key))
                self.nbytes[key] = aligned(storage.nbytes())
                self.peak_nbytes = max(self.peak_nbytes, sum(self.nbytes.values()))
        return output

    def _drop(self, key: int, _: Any) -> None:
        del self._alive[key], self.nbytes[key]

    def leave_out(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.nbytes[parameter.grad.untyped_storage()._cdata] = 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("checkpoints", [True, False])
def test_the_peak_is_that_of_a_real_step(checkpoints: bool) -> None:
    """Of peft's adapters under autocast, on the CPU, where attention is a fused kernel as well."""
    peft = pytest.importorskip("peft")
    model = llama(8, vocab_size=2000, max_position_embeddings=256).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    found = followed(model, replace_config(TRAIN, batch=1, tokens=256, checkpoints=checkpoints))
    if checkpoints:
        model.activation_checkpointing_enable()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))
    adapted.train()
    ids = torch.randint(0, 2000, (1, 256))
    storages = Storages((*adapted.parameters(), *adapted.buffers(), ids))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(storages.leave_out)
    with storages:
        with torch.autocast("cpu", torch.bfloat16):
            loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    assert found.step.activation_nbytes == pytest.approx(storages.peak_nbytes, rel=0.01)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="nothing of it is trainable"):
        follow_training(nn.Sequential(nn.ReLU(), nn.ReLU()), TRAIN, [], (torch.empty(2, device="meta"),))
