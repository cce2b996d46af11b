"""Training adapters over frozen weights: streamed, resident, and in other systems, with bounds and predictions.

    python benchmarks/train.py [--only 8b,70b,flux,wan] [--systems resident,ours,plain,fsdp2,deepspeed,diffusers,
        accelerate] [--tokens 2048,8192] [--budgets 2GiB] [--steps 8] [--deterministic] [--device cpu --tiny]

A step is a forward, a loss, the backward and AdamW, with rank-16 adapters in float32 on all linear layers of the
blocks, in bfloat16 autocast, with non-reentrant checkpoints. Weights and inputs are random, the same for all systems.

ms             of a step, from its end to the next one's
peak_nbytes    the most device memory that was allocated, all included
same_losses    the losses of all steps are those of the resident model, bit for bit; same_adapters: the adapters at the
               end, where both took as many steps. Only with --deterministic: else kernels of the backward do not
               repeat themselves, which is measured with the system "resident" again ("again")
filled_nbytes  that a step moved, on average; step_nbytes: by the plan; unplanned: fills in all timed steps
bound_ms       max(resident step, 2 (bytes - budget) / link), or with compressed bytes, a decode buffer and decoding
bound_passes_ms  the same for the forward and for the backward, added: bytes of the backward have no room before it
ratio_bound    ms over bound_ms; ratio_passes: over bound_passes_ms; ratio_resident: over that of the resident model
bound_of       "blocks": the resident step of a model that does not fit is extrapolated from those with fewer blocks

Systems: ours with codec="auto", "plain" with codec="none". The 70B shape has four distinct layers in a file (huge.py),
and no peers: its weights are more than the host's memory. Diffusers' group offloading is for its own models.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bound
import huge
import kinds
import rows
import timing
import torch
from torch import nn

import weightstream
from weightstream.adapters.modules.partition import find_blocks
from weightstream.measure.profile import load_profile
from weightstream.runtime.devices.opening import opened_backend

GIB = 2**30
RANK, LEARNING_RATE, SETTLING = 16, 1e-4, 3
EIGHT = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 16384}  # fmt: skip
SEVENTY = EIGHT | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
TINY = EIGHT | {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 8, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
FEWER = (8, 16)  # blocks of the resident models from which a larger one's step is extrapolated
SYSTEMS = ("resident", "again", "ours", "plain", "fsdp2", "deepspeed", "diffusers", "accelerate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, the arguments of its steps, and budgets.

    `make(device)` draws the model there; `inputs(k, device)` are the arguments of step k.
    """

    name: str
    make: Callable[[torch.device], Any]
    inputs: Callable[[int, torch.device], dict[str, Any]]
    budgets: tuple[int | str, ...]
    train: dict[str, Any]
    tokens: int
    peers: tuple[str, ...] = SYSTEMS
    is_text: bool = True


def llama(shape: dict[str, Any], device: torch.device, layers: int | None = None) -> Any:
    import transformers

    changed = {} if layers is None else {"num_hidden_layers": layers}
    config = transformers.LlamaConfig(**shape | changed, tie_word_embeddings=False, dtype="bfloat16")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    random = torch.Generator(device).manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=random) if parameter.dim() > 1 else parameter.fill_(1)
    return model.requires_grad_(False)


def token_inputs(words: int, tokens: int) -> Callable[[int, torch.device], dict[str, Any]]:
    def inputs(k: int, device: torch.device) -> dict[str, Any]:
        random = torch.Generator().manual_seed(100 + k)
        ids = torch.randint(0, words, (1, tokens), generator=random).to(device)
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    return inputs


def wan(**sizes: Any) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**sizes)


def wan_inputs(model: Any, batch: int, draw: kinds.Draw) -> dict[str, Any]:
    """A step of a video of 832 x 480 pixels and 33 frames: 14,040 tokens."""
    side = (9, 60, 104) if model.config.num_layers > 8 else (2, 8, 8)
    return {
        "hidden_states": draw(batch, model.config.in_channels, *side),
        "encoder_hidden_states": draw(batch, 512 if model.config.num_layers > 8 else 8, model.config.text_dim),
        "timestep": torch.full_like(draw(batch), 500),
        "return_dict": False,
    }


WAN = kinds.Kind(  # one of the two experts of Wan 2.2 A14B
    build=wan,
    full={"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40},
    tiny={"num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 128, "num_layers": 8, "text_dim": 32},
    inputs=wan_inputs,
)


def drawn(kind: kinds.Kind, tiny: bool, device: torch.device) -> Any:
    """A diffusion model with random weights; buffers are computed."""
    with torch.device("meta"):
        shapes = kind.build(**(kind.tiny if tiny else kind.full)).to(torch.bfloat16)
    random = torch.Generator(device).manual_seed(5)
    if any(True for _ in shapes.buffers()):
        with torch.device(device):
            model = kind.build(**(kind.tiny if tiny else kind.full)).to(torch.bfloat16)
    else:
        model = shapes.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5, generator=random)
            else:
                parameter.normal_(0, 0.02, generator=random)
    return model.requires_grad_(False)


def diffusion_inputs(kind: kinds.Kind, tiny: bool) -> Callable[[int, torch.device], dict[str, Any]]:
    with torch.device("meta"):
        shapes = kind.build(**(kind.tiny if tiny else kind.full))

    def inputs(k: int, device: torch.device) -> dict[str, Any]:
        return kind.inputs(shapes, 1, kinds.draw_with(torch.Generator(device).manual_seed(100 + k)))

    return inputs


# -- adapters and steps ------------------------------------------------------------------------------------------------


def adapt(model: Any) -> list[nn.Parameter]:
    """Add adapters at all linear layers of the blocks, in float32, and checkpoints; returns the adapters."""
    import peft

    blocks = {id(module) for block in find_blocks(model) for module in block.modules()}
    linears = [name for name, m in model.named_modules() if id(m) in blocks and isinstance(m, nn.Linear)]
    config = peft.LoraConfig(r=RANK, target_modules=linears)
    torch.manual_seed(7)
    peft.inject_adapter_in_model(config, model)
    adapters = [(name, parameter) for name, parameter in model.named_parameters() if "lora_" in name]
    for _, parameter in adapters:
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable", "enable_gradient_checkpointing"):
        if enable := getattr(model, name, None):
            enable()
            break
    model.train()
    return [parameter for _, parameter in adapters]


def loss_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    output = model(**inputs)
    if (loss := getattr(output, "loss", None)) is not None:
        return loss
    prediction = output[0].float()
    random = torch.Generator(prediction.device).manual_seed(9)
    target = torch.randn(prediction.shape, generator=random, device=prediction.device)
    return torch.nn.functional.mse_loss(prediction, target)


class Steps:
    """Training steps of one system: their losses, adapters, times (of the forward as well) and peak of memory."""

    def __init__(self, case: Case, model: Any, adapters: list[nn.Parameter], device: torch.device) -> None:
        self.losses: list[torch.Tensor] = []
        self._adapters, self._forwards = adapters, []
        self._case, self._model, self._device = case, model, device
        self._optimizer = torch.optim.AdamW(adapters, lr=LEARNING_RATE)
        self._count = itertools.count()

    def step(self, _: torch.Tensor) -> torch.Tensor:
        inputs = self._case.inputs(next(self._count), self._device)
        began = timing.mark(self._device)
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = loss_of(self._model, inputs)
        self._forwards.append((began, timing.mark(self._device)))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())
        return loss

    def measured(self, num: int) -> dict[str, Any]:
        """A row with times and peak, after steps that are not counted."""
        x = torch.empty(0, device=self._device)
        for _ in range(SETTLING):
            self.step(x)
        timing.reset_peak(self._device)
        taken = timing.steps_ms(self.step, x, num)
        return self.times(taken) | {"peak_nbytes": timing.peak_nbytes(self._device)}

    def times(self, taken: list[float]) -> dict[str, Any]:
        """Of steps, and of their forwards."""
        forwards = [timing.between_ms(*marks) for marks in self._forwards[-len(taken) :]]
        return {"ms": rows.percentiles(taken), "forward_ms": rows.percentiles(forwards)}

    def reached(self, known: dict[str, Any] | None) -> dict[str, Any]:
        """What was computed, and whether it is what the resident model computed, whose row is `known`."""
        digest = hashlib.sha256()
        for adapter in self._adapters:
            digest.update(adapter.detach().cpu().numpy())
        row: dict[str, Any] = {"losses": [float(loss) for loss in self.losses], "adapters_sha256": digest.hexdigest()}
        if known is not None and "losses" in known:
            num = min(len(row["losses"]), len(known["losses"]))
            row["same_losses"] = row["losses"][:num] == known["losses"][:num]
            if len(row["losses"]) == len(known["losses"]):
                row["same_adapters"] = row["adapters_sha256"] == known["adapters_sha256"]
        return row


# -- systems -----------------------------------------------------------------------------------------------------------


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """One process by itself, as FSDP2 and DeepSpeed want it."""
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29517",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def sharded(model: Any, adapters: list[nn.Parameter], device: torch.device) -> None:
    """FSDP2 with the weights in pinned host memory; adapters stay on the device."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    for adapter in adapters:
        adapter.data = adapter.data.to(device)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"), "ignored_params": set(adapters)}
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (1,))
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for module in model.modules():  # FSDP2 moves no buffers
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


class Train:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.common = rows.environment()
        self.table: list[tuple[Any, ...]] = []
        self.link: float = 0.0
        self.resident: dict[tuple[str, int], dict[str, Any]] = {}

    def write(self, **row: Any) -> None:
        row = {"bench": "train", "rank": RANK, "deterministic": self.args.deterministic} | row
        rows.append(self.args.out, [row], self.common)
        shown = {key: value for key, value in row.items() if key not in ("bench", "losses")}
        print(shown, flush=True)
        ms, peak = row.get("ms", {}).get("p50"), row.get("peak_nbytes", 0)
        budget = f"{row['budget_nbytes'] / GIB:.3g}" if row.get("budget_nbytes") else "-"
        self.table.append((
            row["model"], row.get("tokens"), budget, row["system"], ms and f"{ms:.1f}", row.get("predicted_ms"),
            row.get("bound_ms"), row.get("ratio_bound"), row.get("ratio_passes"), row.get("ratio_resident"),
            f"{peak / GIB:.2f}", f"{row.get('predicted_peak_nbytes', 0) / GIB:.2f}", row.get("same_losses"),
            row.get("unplanned"),
            row.get("error", "")[:60],
        ))  # fmt: skip

    def print_table(self) -> None:
        heads = ("model", "tokens", "GiB", "system", "ms", "predicted", "bound", "x bound", "x passes", "x resident",
                 "peak GiB", "predicted", "same", "unplanned", "error")  # fmt: skip
        lines = [[str("" if cell is None else cell) for cell in line] for line in (heads, *self.table)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)

    def measure_link(self) -> None:
        """The rate of large copies, in this run."""
        nbytes = 1 << (20 if self.args.tiny else 29)
        taken_ms = rows.percentiles(timing.floor_ms(4, nbytes, self.device))["p50"]
        self.link = 4 * nbytes / (taken_ms / 1e3)

    # -- one case ----------------------------------------------------------------------------------------------------

    def run(self, case: Case) -> None:
        key = case.name, case.tokens
        about = {"model": case.name, "tokens": case.tokens}
        systems = [name for name in SYSTEMS if name in self.args.systems and name in case.peers]
        if "resident" in systems:
            with rows.guarded(self.write, "resident", **about):
                self.resident[key] = self.plain(case)
                self.write(system="resident", **about, **self.resident[key])
            timing.clear(self.device)
        if "again" in systems:
            with rows.guarded(self.write, "again", **about):
                self.write(system="again", **about, **self.plain(case))
            timing.clear(self.device)
        for budget in case.budgets:
            for name, codec in (("ours", "auto"), ("plain", "none")):
                if name in systems:
                    with rows.guarded(self.write, name, **about, budget=str(budget)):
                        self.write(system=name, **about, **self.streamed(case, budget, codec))
                    timing.clear(self.device)
        for name in systems:
            if name in ("fsdp2", "deepspeed", "diffusers", "accelerate"):
                with rows.guarded(self.write, name, **about):
                    self.write(system=name, **about, **self.peer(case, name))
                timing.clear(self.device)

    def steps(self, case: Case, model: Any, adapters: list[nn.Parameter]) -> dict[str, Any]:
        steps = Steps(case, model, adapters, self.device)
        row = steps.measured(self.args.steps)
        row |= {"tokens_per_s": round(case.tokens / row["ms"]["p50"] * 1e3, 1)}
        known = self.resident.get((case.name, case.tokens))
        row |= steps.reached(known)
        if known is not None:
            row |= {"ratio_resident": round(row["ms"]["p50"] / known["ms"]["p50"], 4)}
        return row

    def plain(self, case: Case) -> dict[str, Any]:
        model = case.make(self.device)
        adapters = adapt(model)
        return self.steps(case, model, adapters) | {"weights_nbytes": sum(p.nbytes for p in model.parameters())}

    def streamed(self, case: Case, budget: int | str, codec: str) -> dict[str, Any]:
        model = case.make(self.device)
        about: dict[str, Any] = {}
        with opened_backend(self.device, weightstream.OffloadConfig()) as backend:
            found = bound.bounds_of(model, [weightstream.OffloadConfig(device_budget=budget).device_nbytes(0)], backend)
        for each in found.values():
            resident = self.resident.get((case.name, case.tokens))
            if resident is not None and self.link:
                forward_s = resident["forward_ms"]["p50"] / 1e3
                about |= each.row(resident["ms"]["p50"] / 1e3, self.link, forward_s)
            about |= {"budget_nbytes": each.budget}
        example = None if case.is_text else case.inputs(0, self.device)
        streamer = weightstream.offload(
            model, device=self.device, device_budget=budget, codec=codec, train=case.train, example_inputs=example
        )
        try:
            return about | self.followed(case, model, streamer, about)
        finally:
            streamer.remove() if self.args.tiny else None
            del streamer, model

    def followed(self, case: Case, model: Any, streamer: Any, bounds: dict[str, Any]) -> dict[str, Any]:
        """The row of an offloaded model, for these bounds of its step."""
        plan = streamer.plan
        adapters = adapt(model)
        steps = Steps(case, model, adapters, self.device)
        x = torch.empty(0, device=self.device)
        for _ in range(SETTLING):
            steps.step(x)
        timing.synchronize(self.device)
        before = streamer.stats()
        timing.reset_peak(self.device)
        taken = timing.steps_ms(steps.step, x, self.args.steps)
        timing.synchronize(self.device)
        after, num = streamer.stats(), self.args.steps + timing.SETTLING
        row: dict[str, Any] = steps.times(taken) | {"peak_nbytes": timing.peak_nbytes(self.device)}
        row["tokens_per_s"] = round(case.tokens / row["ms"]["p50"] * 1e3, 1)
        profile = load_profile(self.device) if self.device.type == "cuda" else None
        workspace = profile.workspace_nbytes if profile is not None else 0
        # nothing accumulates here: gradients come after the peak, which is in the loss or in the last block
        besides = plan.beside_nbytes + workspace - sum(adapter.nbytes for adapter in adapters)
        row |= {
            "predicted_ms": round(1e3 * plan.step_s, 2),
            "predicted_peak_nbytes": plan.device_nbytes + besides,
            "step_nbytes": streamer.plan.step_nbytes,
            "filled_nbytes": round((after.filled_nbytes - before.filled_nbytes) / num),
            "unplanned": after.unplanned_fills - before.unplanned_fills,
            "held_nbytes": after.held_nbytes,
            "plan": plan.summary(),
        }
        known = self.resident.get((case.name, case.tokens))
        row |= steps.reached(known)
        if known is not None:
            row["ratio_resident"] = round(row["ms"]["p50"] / known["ms"]["p50"], 4)
        for name, bound_ms in (("ratio_bound", "bound_ms"), ("ratio_passes", "bound_passes_ms")):
            if bound_ms in bounds:
                row[name] = round(row["ms"]["p50"] / bounds[bound_ms], 4)
        return row

    def peer(self, case: Case, name: str) -> dict[str, Any]:
        host = torch.device("cpu")
        with ExitStack() as stack:
            if name in ("fsdp2", "deepspeed"):
                stack.enter_context(process_group(self.device))
            model = case.make(self.device).to(host)
            adapters = adapt(model)
            if name == "fsdp2":
                sharded(model, adapters, self.device)
            elif name == "deepspeed":
                return self.deepspeed(case, model)
            elif name == "diffusers":
                from diffusers.hooks import apply_group_offloading

                for adapter in adapters:
                    adapter.data = adapter.data.to(self.device)
                stream = self.device.type == "cuda"
                apply_group_offloading(
                    model, onload_device=self.device, offload_device=host, offload_type="block_level",
                    num_blocks_per_group=1, use_stream=stream, record_stream=stream,
                )  # fmt: skip
            else:
                return self.accelerate(case, model, adapters)
            return self.steps(case, model, adapters)

    def deepspeed(self, case: Case, model: Any) -> dict[str, Any]:
        """ZeRO-3 with its parameters in pinned host memory, and the optimizer of the other systems."""
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
        }
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        steps = Steps(case, engine, trained, self.device)

        def step(_: torch.Tensor) -> torch.Tensor:
            loss = loss_of(engine, case.inputs(next(steps._count), self.device))
            engine.backward(loss)
            engine.step()
            return loss

        x = torch.empty(0, device=self.device)
        timing.reset_peak(self.device)
        taken = timing.steps_ms(step, x, self.args.steps)
        row = {"ms": rows.percentiles(taken), "peak_nbytes": timing.peak_nbytes(self.device)}
        if (known := self.resident.get((case.name, case.tokens))) is not None:
            row["ratio_resident"] = round(row["ms"]["p50"] / known["ms"]["p50"], 4)
        return row

    def accelerate(self, case: Case, model: Any, adapters: list[nn.Parameter]) -> dict[str, Any]:
        """Whether gradients arrive: accelerate's hooks replace the parameters that the optimizer has."""
        from accelerate import cpu_offload

        cpu_offload(model, execution_device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = loss_of(model, case.inputs(0, self.device))
        loss.backward()
        arrived = sum(adapter.grad is not None for adapter in adapters)
        return {"gradients": arrived, "adapters": len(adapters), "loss": float(loss)}

    # -- the 70B shape -----------------------------------------------------------------------------------------------

    def extrapolated(self, case: Case, shape: dict[str, Any]) -> dict[str, Any]:
        """The resident step of a model that does not fit, from two with fewer blocks."""
        found, forwards = [], []
        for layers in FEWER:
            model = llama(shape, self.device, layers)
            steps = Steps(case, model, adapt(model), self.device)
            row = steps.measured(self.args.steps)
            found.append(row["ms"]["p50"])
            forwards.append(row["forward_ms"]["p50"])
            del model, steps
            timing.clear(self.device)
        more = (shape["num_hidden_layers"] - FEWER[0]) / (FEWER[1] - FEWER[0])
        step_ms, forward_ms = (first + more * (second - first) for first, second in (found, forwards))
        return {"ms": {"p50": round(step_ms, 3)}, "forward_ms": {"p50": round(forward_ms, 3)}, "bound_of": "blocks"}

    def seventy(self, case: Case, shape: dict[str, Any]) -> None:
        import transformers

        about, key = {"model": case.name, "tokens": case.tokens}, (case.name, case.tokens)
        if "resident" in self.args.systems:
            with rows.guarded(self.write, "resident", **about):
                self.resident[key] = self.extrapolated(case, shape)
                self.write(system="resident", **about, **self.resident[key])
        if "ours" not in self.args.systems:
            return
        for budget in case.budgets:
            with rows.guarded(self.write, "ours", **about, budget=str(budget)), tempfile.TemporaryDirectory() as folder:
                config = transformers.LlamaConfig(**shape, tie_word_embeddings=False, dtype="bfloat16")
                model, given = huge.drawn(config, None, self.device, Path(folder) / "weights")
                model.requires_grad_(False)
                nbytes = sum(parameter.nbytes for parameter in model.parameters())
                settings = weightstream.OffloadConfig(
                    device_budget=budget, host_budget=nbytes, codec=huge.CODEC, train=case.train
                )
                with huge.streamed(model, given, self.device, settings, removes=self.args.tiny) as streamer:
                    plan, budget_nbytes = streamer.plan, settings.device_nbytes(0)
                    over = plan.manifest.nbytes - plan.mapped_nbytes - budget_nbytes + plan.buffer_nbytes
                    row = {"budget_nbytes": budget_nbytes, "link_gbps": round(self.link / 1e9, 2)}
                    if (known := self.resident.get(key)) is not None:
                        step_ms, forward_ms = known["ms"]["p50"], known["forward_ms"]["p50"]
                        link_ms, decode_ms = 1e3 * over / self.link, 1e3 * plan.decode_s
                        passes = (forward_ms, step_ms - forward_ms)
                        row["bound_ms"] = round(max(2 * link_ms, step_ms + 2 * decode_ms), 2)
                        row["bound_passes_ms"] = round(sum(max(link_ms, each + decode_ms) for each in passes), 2)
                    self.write(system="ours", **about, **row, **self.followed(case, model, streamer, row))
                del model, given, streamer
            timing.clear(self.device)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    tiny, device = args.tiny, torch.device(args.device)
    shape, large = (TINY, TINY) if tiny else (EIGHT, SEVENTY)
    small = ("0.3MiB",)
    tokens = [int(text) for text in args.tokens.split(",")] if args.tokens else [32] if tiny else [2048, 8192]
    budgets = tuple(args.budgets.split(",")) if args.budgets else ()

    def text(name: str, shape: dict[str, Any], num: int, default: tuple[str, ...], **more: Any) -> Case:
        step = {"batch": 1, "tokens": num, "rank": RANK}
        return Case(name=name, make=lambda on: llama(shape, on), inputs=token_inputs(shape["vocab_size"], num),
                    budgets=budgets or (small if tiny else default), train=step, tokens=num, **more)  # fmt: skip

    for num in tokens:
        peers = SYSTEMS if num == tokens[0] else ("resident", "again", "ours")  # peers once: they take minutes
        yield text("8b", shape, num, ("2GiB",), peers=tuple(name for name in peers if name != "diffusers"))
    for num in tokens:
        yield text("70b", large, num, ("8GiB", "60GiB"))
    for name, kind, default in (("flux", kinds.KINDS["flux"], ("6GiB", "2GiB")), ("wan", WAN, ("6GiB",))):
        if name not in args.only:
            continue
        peers = ("resident", "again", "ours", *(("plain", "fsdp2", "diffusers") if name == "flux" else ()))
        yield Case(
            name=name, make=lambda on, kind=kind: drawn(kind, tiny, on), inputs=diffusion_inputs(kind, tiny),
            budgets=budgets or (small if tiny else default), train={"rank": RANK}, peers=peers, is_text=False,
            tokens=4608 if name == "flux" else 14040,
        )  # fmt: skip
    del device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="8b,70b,flux,wan", help="models")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--tokens", help="tokens of a text, such as 2048,8192")
    parser.add_argument("--budgets", help="device budgets, such as 2GiB")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--deterministic", action="store_true", help="kernels that repeat themselves, which are slower")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=rows.RESULTS / "train.jsonl")
    args = parser.parse_args()
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    args.only, args.systems = args.only.split(","), args.systems.split(",")
    train = Train(args)
    train.measure_link()
    for case in cases(args):
        if case.name not in args.only:
            continue
        # the backward of cuDNN's attention, which PyTorch chooses, makes illegal accesses for FLUX [torch 2.11, H200]
        torch.backends.cuda.enable_cudnn_sdp(case.is_text)
        if case.name == "70b":
            train.seventy(case, TINY if args.tiny else SEVENTY)
        else:
            train.run(case)
        gc.collect()
        timing.clear(train.device)
    train.print_table()


if __name__ == "__main__":
    main()
