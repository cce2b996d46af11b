"""Shapes of mixtures of experts with random weights, and tables of ids instead of the choices of their routers.

A table is drawn by stack distances, so that an LRU cache has the hit rates that were measured on a real model
(weightstream/plan/hit_curves.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers

from weightstream.adapters.hf import private_quantised
from weightstream.adapters.hf.packed_formats import PackedFormat, hold_packed, packed_leaves, packed_stacks
from weightstream.adapters.modules.moe import ExpertForward
from weightstream.plan.hit_curves import CURVES, HitCurve
from weightstream.runtime.experts.slot_cache import Lru

NUM_STEPS = 512
FEW_STEPS = 160  # for a batch: drawing more takes long, and no run is longer
UNIFORM = HitCurve("uniform", 1, 1, ())
HITS = {curve.name: curve for curve in (*CURVES, UNIFORM)}
_SHARES = (0.125, 0.25, 0.5)  # of the experts in slots, for which a table reports its hit rates
_NOISE = 1 << 25  # random weights, drawn once and repeated for a model in host memory, as drawing all takes too long
_STD = 0.02
_STACKS = ("gate_up_proj", "down_proj")


class Shape(NamedTuple):
    """A mixture: the class and the arguments of its config."""

    kind: str
    num_layers: int
    num_experts: int
    top_k: int
    sizes: Mapping[str, Any]

    def config(self, layers: int) -> Any:
        """The config of the model with so many layers."""
        sizes = dict(self.sizes)
        if "first_k_dense_replace" in sizes:
            sizes["first_k_dense_replace"] = min(sizes["first_k_dense_replace"], 1 + 2 * (layers == self.num_layers))
        kind = getattr(transformers, f"{self.kind}Config")
        return kind(**sizes, num_hidden_layers=layers, num_experts_per_tok=self.top_k, tie_word_embeddings=False)


_GPT_OSS = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "sliding_window": 128,
}
SHAPES = {
    "qwen3": Shape(
        kind="Qwen3Moe",
        num_layers=48,
        num_experts=128,
        top_k=8,
        sizes={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "vocab_size": 151936,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
    ),
    "mixtral": Shape(
        kind="Mixtral",
        num_layers=32,
        num_experts=8,
        top_k=2,
        sizes={
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
        },
    ),
    "gpt_oss": Shape(
        kind="GptOss", num_layers=36, num_experts=128, top_k=4, sizes=_GPT_OSS | {"num_local_experts": 128}
    ),
    "gpt_oss_20b": Shape(
        kind="GptOss", num_layers=24, num_experts=32, top_k=4, sizes=_GPT_OSS | {"num_local_experts": 32}
    ),
    "deepseek_v3": Shape(
        kind="DeepseekV3",
        num_layers=61,
        num_experts=256,
        top_k=8,
        sizes={
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
    ),
}


def drawn(curve: HitCurve, shape: Shape, num_steps: int, seed: int) -> list[list[int]]:
    """The experts of a token, step by step.

    They are drawn by their positions in the stack of the last used ones. A cache with N slots holds the first N, so
    the probability of each position follows from the curve. Drawing is Pareto sampling, which has these probabilities
    without replacement, too (Rosén, 1997).
    """
    num, most = shape.num_experts, 0.99  # a token uses an expert once; a curve of sparser models may ask for more
    edges = torch.tensor([curve.at(position / num) for position in range(num + 1)], dtype=torch.double)
    odds = (edges.diff() * shape.top_k).clamp(max=most).logit()
    noise = torch.rand(num_steps, num, dtype=torch.double, generator=torch.Generator().manual_seed(seed)).logit()
    rng, stack, found = random.Random(seed), list(range(num)), []
    rng.shuffle(stack)
    for places in (noise - odds).topk(shape.top_k, largest=False).indices.tolist():
        used = [stack[place] for place in places]
        rng.shuffle(used)
        among = set(used)
        stack = used + [expert for expert in stack if expert not in among]
        found.append(used)
    return found


def hits(steps: Sequence[Sequence[int]], num_slots: int) -> float:
    """The hit rate of a plain LRU cache that has seen these steps before."""
    table = Lru(num_slots)
    for used in steps:
        table.resolve(used)
    cold = table.hits
    for used in steps:
        table.resolve(used)
    return (table.hits - cold) / sum(map(len, steps))


def slots_of(shape: Shape) -> list[int]:
    """The numbers of slots for which a table reports its hit rates."""
    return sorted({max(shape.top_k, round(share * shape.num_experts)) for share in _SHARES})


class Sizes(NamedTuple):
    """The bytes of all weights, in bfloat16, and of one expert."""

    model_nbytes: int
    expert_nbytes: int


def nbytes_of(shape: Shape, layers: int) -> Sizes:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shape.config(layers), dtype=torch.bfloat16)
    stacks = list(experts_of(model)[-1].parameters())
    expert_nbytes = sum(p.nbytes for p in stacks) // shape.num_experts
    return Sizes(sum(p.nbytes for p in model.parameters()), expert_nbytes)


def experts_of(model: Any) -> list[Any]:
    """The modules that hold the stacks."""
    every = (module for module in model.modules() if hasattr(module, "num_experts"))
    return [module for module in every if hasattr(module, "down_proj") or packed_stacks(module)]


def _bytes(shape: Sequence[int], generator: torch.Generator, span: range) -> torch.Tensor:
    made = {"dtype": torch.uint8, "generator": generator, "device": generator.device}
    return torch.randint(span.start, span.stop, tuple(shape), **made)


def _mxfp4(shape: Sequence[int], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    experts, inner, columns = shape
    groups = experts, columns, inner // 32
    return _bytes((*groups, 16), generator, range(256)), _bytes(groups, generator, range(117, 122))


def _float8(shape: Sequence[int], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    experts, height, width = shape
    weights = _bytes(shape, generator, range(256))
    weights[weights & 127 == 127] = 0  # NaN
    blocks = experts, -(-height // 128), -(-width // 128)
    scales = 2e-4 * torch.rand(blocks, generator=generator, device=generator.device)
    return weights.view(torch.float8_e4m3fn), scales


# for each format: random leaves for a stack of a shape
PACKED: Mapping[str, tuple[PackedFormat, Callable[..., tuple[torch.Tensor, ...]]]] = {
    "mxfp4": (private_quantised.MXFP4, _mxfp4),
    "float8": (private_quantised.FP8_BLOCKS, _float8),
}


def packed(model: Any, name: str, device: str) -> Any:
    """The model with random packed stacks in place of its own."""
    packed_format, leaves_of = PACKED[name]
    generator = torch.Generator(device).manual_seed(5)
    for module in experts_of(model):
        for stack in [each for each in _STACKS if module._parameters.get(each) is not None]:
            leaves = leaves_of(module._parameters[stack].shape, generator)
            named = zip(packed_format.suffixes, leaves, strict=True)
            parameters = {stack + suffix: torch.nn.Parameter(leaf, requires_grad=False) for suffix, leaf in named}
            hold_packed(module, stack, packed_format, parameters)
    return model


def unpacked(model: Any) -> Any:
    """The plain model, with the stacks that the library makes of packed ones, and all other tensors of the model."""
    with torch.device("meta"):
        plain = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    modules = dict(model.named_modules())
    for path, module in plain.named_modules():
        own, stacks = modules[path], packed_stacks(modules[path])
        module._buffers.update(own._buffers)
        for name in module._parameters:
            if name not in stacks:
                module._parameters[name] = own._parameters[name]
                continue
            stack = stacks[name]
            parts = zip(*(own._parameters[leaf].split(8) for leaf in stack.leaves), strict=True)
            whole = torch.cat([stack.format.unpacked(part, stack.dtype) for part in parts])  # 8 rows need much memory
            module._parameters[name] = torch.nn.Parameter(whole, requires_grad=False)
    plain.generation_config = model.generation_config
    return plain.eval()


def build(shape: Shape, layers: int, device: str, packing: str | None = None) -> Any:
    """The model with random weights, its experts packed in a format, on a device or in host memory."""
    config = shape.config(layers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if packing is not None:
        packed(model, packing, device)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    with torch.device(device):  # buffers are not in checkpoints
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    for name, buffer in model.named_buffers():
        if "rotary" not in name:
            buffer.zero_()
    torch.manual_seed(0)
    noise = torch.randn(_NOISE, dtype=torch.bfloat16) * _STD if device == "cpu" else None
    stacks = ((module, stack) for module in experts_of(model) for stack in packed_stacks(module).values())
    drawn = {id(leaf) for module, stack in stacks for leaf in packed_leaves(module, stack)}
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if id(parameter) in drawn:
                continue  # packed
            if parameter.ndim < 2:
                parameter.uniform_(0.5, 1.5)
            elif noise is None:
                parameter.normal_(std=_STD)
            else:  # each starts at another offset
                shifted = noise.roll(index * 7919)
                for part in parameter.view(-1).split(_NOISE):
                    part.copy_(shifted[: part.numel()])
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model.eval()


class Table:
    """Passes ids from a table to experts instead of those of their routers, the next row in each step.

    Its hooks are only on the modules of this model: a copy on meta, which is followed for shapes, routes by itself.

    Attributes:
        hits: the hit rates of a plain LRU cache, by the number of slots.
    """

    def __init__(self, model: Any, shape: Shape, batch: int, device: str, curve: HitCurve) -> None:
        every = experts_of(model)
        self._shape, self._num_steps = shape, NUM_STEPS if batch == 1 else FEW_STEPS
        # layer, step, sequence, k: graphs read them, so they are only written in place
        self._table = torch.zeros(len(every), self._num_steps, batch, shape.top_k, dtype=torch.long, device=device)
        self._guesses = torch.zeros_like(self._table).flatten(2)
        self._recall: float | None = None
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self.draw(curve)
        self._layer_of = {id(module): layer for layer, module in enumerate(every)}
        for layer, module in enumerate(every):
            module.register_forward_pre_hook(partial(self._route, layer))

    def draw(self, curve: HitCurve) -> None:
        """Draw other ids, and the guesses for them."""
        layers, _, batch, _ = self._table.shape
        tables = [
            [drawn(curve, self._shape, self._num_steps, 1000 * layer + b) for b in range(batch)]
            for layer in range(layers)
        ]
        self._table.copy_(torch.tensor(tables).transpose(1, 2))
        long = drawn(curve, self._shape, NUM_STEPS, 0)
        self.hits = {num: round(hits(long, num), 3) for num in slots_of(self._shape)}
        if self._recall is not None:
            self._guess(self._recall)

    def _route(self, layer: int, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, ids, scores = args
        if layer == 0 and self._is_prompt(ids):
            self._step.zero_()
        elif layer == 0:
            self._step.add_(1).remainder_(self._num_steps)
        return hidden, self._named(layer, ids).to(ids.dtype), scores

    def _is_prompt(self, tokens: torch.Tensor) -> bool:
        return tokens.shape[0] != self._table.shape[2]

    def _named(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """The ids for experts of this layer, instead of these. For a prompt any will do; steps that teach a streamer
        before it do not count."""
        table = self._table[layer]
        if self._is_prompt(tokens):
            return table.flatten(0, 1)[torch.arange(tokens.shape[0], device=table.device) % self._num_steps]
        return table.index_select(0, self._step)[0]

    @contextmanager
    def guessed(self, recall: float) -> Iterator[None]:
        """Inside, guesses are the next ids of the table, except a share of them, which are drawn at random.

        The routers run as usual, but do not know the table. Outside of a capture, where a guess is checked, it gets the
        ids of the table.
        """
        self._recall = recall
        self._guess(recall)
        before = ExpertForward.guess

        def guess(picks: Any, states: torch.Tensor) -> torch.Tensor | None:
            before(picks, states)
            layer = self._layer_of.get(id(picks._module))
            if layer is None:  # a copy that is followed for shapes
                return None
            if not torch.cuda.is_current_stream_capturing():
                return self._named(layer, states.flatten(0, -2))
            return self._guesses[layer].index_select(0, self._step)[0]

        ExpertForward.guess = guess  # type: ignore[method-assign]
        try:
            yield
        finally:
            ExpertForward.guess = before  # type: ignore[method-assign]
            self._recall = None

    def _guess(self, recall: float) -> None:
        generator = torch.Generator(self._table.device).manual_seed(2)
        shape, device, most = self._table.shape, self._table.device, int(self._table.max()) + 1
        others = torch.randint(most, shape, generator=generator, device=device)
        is_right = torch.rand(shape, generator=generator, device=device) < recall
        drawn = torch.where(is_right, self._table, others).flatten(2)
        order = torch.rand(drawn.shape, generator=generator, device=device).argsort(-1)
        self._guesses.copy_(drawn.gather(-1, order))
