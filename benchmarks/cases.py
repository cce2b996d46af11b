"""A case: one way to load the checkpoint and run it, in a process that does nothing else; prints a line of JSON.

    python benchmarks/cases.py '{"way": "mapped", "folder": "…", "device": "cuda", …}'     as `alone.py` starts it

The clock starts after all imports, before anything is initialised. With `hold` the process keeps its model until
its input is closed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import host
import timing
import torch
from host import GIB
from rows import percentiles

import weightstream
from weightstream.plan.plan import Plan

PROMPT_TOKENS = 8
NEW_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """`steps` of one token are timed, or with `generates` those of a greedy generation. `reference` holds the resident
    model's logits; the case named "resident" writes it."""

    way: str
    folder: str
    device: str
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 15
    generates: bool = False
    hold: bool = False
    reference: str | None = None


def mapped(case: Case) -> Any:
    return weightstream.from_pretrained(case.folder, device=case.device, progress=False, codec="none", **case.settings)


def compressed(case: Case) -> Any:
    return weightstream.from_pretrained(case.folder, device=case.device, progress=False, codec="auto", **case.settings)


def arena(case: Case) -> Any:
    model = plain(case)
    weightstream.offload(model, device=case.device, codec="none", **case.settings)
    return model


def resident(case: Case) -> Any:
    return plain(case, device_map=case.device) if case.device != "cpu" else plain(case)


def accelerate(case: Case, tier: str = "cpu") -> Any:
    """All but the norm offloaded: 1200 MiB have room for the head, the largest matrix, and no more."""
    if case.device == "cpu":
        raise RuntimeError("accelerate places modules on a GPU, and there is none")
    num = json.loads(Path(case.folder, "config.json").read_text())["num_hidden_layers"]
    away = ["model.embed_tokens", *(f"model.layers.{index}" for index in range(num)), "lm_head"]
    places: dict[str, Any] = {"model.norm": 0, "model.rotary_emb": 0} | dict.fromkeys(away, tier)
    return plain(case, device_map=places, offload_folder=tempfile.mkdtemp())


def accelerate_disk(case: Case) -> Any:
    return accelerate(case, "disk")


def diffusers_block(case: Case) -> Any:
    return diffusers(case, leaf=False)


def diffusers_leaf(case: Case) -> Any:
    return diffusers(case, leaf=True)


def diffusers(case: Case, *, leaf: bool) -> Any:
    """All but the head offloaded."""
    from systems import group_offload

    model = plain(case)
    group_offload(model.model, torch.device(case.device), leaf=leaf)
    model.lm_head.to(case.device)
    return model


def flextensor(case: Case) -> Any:
    """In its memory mode, at the least share of the GPU that was tried; all outside of the layers on the GPU."""
    import flextensor as ft

    model = plain(case)
    proxy = ft.offload(model, ft.OffloadConfig(include_patterns=["model.layers.*"], max_gpu_mem_fraction=0.02))
    for _ in range(ft.get_offload_manager().iters_before_inference + 1):
        proxy(prompt(torch.device(case.device))[:, :1], use_cache=False)
    return proxy


def plain(case: Case, **options: Any) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(case.folder, dtype="auto", **options).eval()


def no_model(case: Case) -> None:
    """The memory of the libraries themselves: a process that only multiplies two matrices."""
    a = torch.ones(256, 256, dtype=torch.bfloat16, device=case.device)
    (a @ a).sum().item()


WAYS: dict[str, Callable[[Case], Any]] = {
    "mapped": mapped,
    "compressed": compressed,
    "arena": arena,
    "resident": resident,
    "accelerate": accelerate,
    "accelerate_disk": accelerate_disk,
    "diffusers_block": diffusers_block,
    "diffusers_leaf": diffusers_leaf,
    "flextensor": flextensor,
    "no_model": no_model,
}


def import_everything(folder: str) -> None:
    import transformers

    if "quantization_config" in json.loads(Path(folder, "config.json").read_text()):
        for name in ("bitsandbytes", "transformers.integrations.bitsandbytes", "transformers.quantizers.auto"):
            importlib.import_module(name)

    for name in ("AutoConfig", "AutoModelForCausalLM", "GenerationConfig", "LlamaForCausalLM"):
        getattr(transformers, name)  # transformers imports a module on first access
    importlib.import_module("weightstream.adapters.hf.load")
    importlib.import_module("weightstream.api.offload")  # as `weightstream.from_pretrained` does
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def run(case: Case) -> dict[str, Any]:
    """Load, run steps, compare with the reference; returns the figures of a row."""
    device, modules = torch.device(case.device), set(sys.modules)
    anon, private, used = host.anon_nbytes(), host.private_nbytes(), host.used_nbytes()
    held_before = host.held_nbytes()
    with host.Peak() as peak, host.Peak(host.held_nbytes) as held:
        laps = [time.perf_counter()]
        torch.zeros(1, device=device)
        timing.synchronize(device)
        laps.append(time.perf_counter())
        device_anon = host.anon_nbytes()
        model = WAYS[case.way](case)
        laps.append(time.perf_counter())
        work = Generation(model, device) if case.generates else Steps(model, device)
        laps.append(work.first())
    found = dict(zip(("device_s", "load_s", "first_s"), map(_seconds, itertools.pairwise(laps)), strict=True))
    found |= {
        "total_s": round(laps[-1] - laps[0], 3),
        "modules_imported_late": len(set(sys.modules) - modules),
        "anon_device_gib": round((device_anon - anon) / GIB, 3),
        "anon_growth_gib": round((host.anon_nbytes() - anon) / GIB, 3),
        "anon_peak_growth_gib": round((peak.nbytes - anon) / GIB, 3),
        "held_peak_growth_gib": round((held.nbytes - held_before) / GIB, 3),
        "used_growth_nbytes": host.used_nbytes() - used,
        "private_growth_gib": round((host.private_nbytes() - private) / GIB, 3),
    }
    if model is None:
        return found
    found |= work.rest(case)
    found["peak_gib"] = round(timing.peak_nbytes(device) / GIB, 3)
    found["rss_peak_gib"] = round(host.peak_rss_nbytes() / GIB, 3)
    found["anon_end_growth_gib"] = round((host.anon_nbytes() - anon) / GIB, 3)
    if (streamer := getattr(model, "weightstream", None)) is not None:
        found |= streaming(streamer)
    if case.reference is not None:
        found |= work.compare(case)
    return found


class Steps:
    """A first forward of a few tokens, then forwards of one, without a cache."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.logits = torch.empty(0)

    def first(self) -> float:
        """The first forward; returns when it ended."""
        if self.model is not None:
            self.logits = self._forward(prompt(self.device))
        timing.synchronize(self.device)
        return time.perf_counter()

    def rest(self, case: Case) -> dict[str, Any]:
        if not case.steps:
            return {}
        values = timing.steps_ms(self._forward, prompt(self.device)[:, :1], case.steps)
        return {"steps": len(values), "ms": percentiles(values), "steps_ms": [round(ms, 3) for ms in values]}

    def compare(self, case: Case) -> dict[str, Any]:
        """Compare logits with the resident model's; if this is the resident model, save them."""
        assert case.reference is not None
        if case.way == "resident":
            generation = Generation(self.model, self.device)
            generation.first()
            outcome = {"logits": self.logits.cpu(), "generated": generation.logits, "tokens": generation.tokens}
            torch.save(outcome, f"{case.reference}.partial")
            os.replace(f"{case.reference}.partial", case.reference)
            return {"equal": True}
        return {"equal": torch.equal(self.logits.cpu(), torch.load(case.reference)["logits"])}

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


class Generation:
    """A greedy generation: the prompt's step, then a step per token, all logits kept."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.logits = torch.empty(0)
        self.tokens = torch.empty(0)
        self._ends: list[float] = []
        self._reads: list[int] = []

    def put(self, ids: torch.Tensor) -> None:
        """Called by `generate` with the prompt, and with each token once it is on the host."""
        self._ends.append(time.perf_counter())
        self._reads.append(host.read_nbytes())

    def end(self) -> None:
        pass

    def first(self) -> float:
        """The whole generation; returns when its first step ended."""
        found = self.model.generate(
            prompt(self.device),
            attention_mask=torch.ones_like(prompt(self.device)),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            streamer=self,
        )
        self.logits = torch.stack(found.logits).cpu()
        self.tokens = found.sequences.cpu()
        return self._ends[1]

    def rest(self, case: Case) -> dict[str, Any]:
        """The steps after the prompt's, without the settling ones."""
        start = 1 + timing.SETTLING
        values = [1e3 * (b - a) for a, b in itertools.pairwise(self._ends[start:])]
        return {
            "steps": len(values),
            "ms": percentiles(values),
            "steps_ms": [round(ms, 3) for ms in values],
            "read_nbytes": (self._reads[-1] - self._reads[start]) // len(values),
        }

    def compare(self, case: Case) -> dict[str, Any]:
        assert case.reference is not None
        want = torch.load(case.reference)
        return {
            "equal": torch.equal(self.logits, want["generated"]),
            "equal_tokens": torch.equal(self.tokens, want["tokens"]),
        }


def streaming(streamer: weightstream.Streamer) -> dict[str, Any]:
    """The memory that the streamer holds and plans, by its statistics and by that of pinned memory."""
    plan, stats, homes = streamer.plan, streamer.stats(), streamer._homes
    pinned = {name: getattr(getattr(homes, f"_{name}", None), "nbytes", 0) for name in ("pages", "arena")}
    in_ram = max(stats.held_nbytes["host"], sum(pinned.values()))
    return {
        "plan": plan.summary(),
        "ring_gib": round(plan.ring_nbytes / GIB, 4),
        "model_nbytes": stats.model_nbytes,
        "host_nbytes": stats.held_nbytes["host"],
        "host_gib": round(stats.held_nbytes["host"] / GIB, 4),
        "pages_nbytes": pinned["pages"],
        "arena_nbytes": pinned["arena"],
        "disk_nbytes": plan.disk_nbytes,
        "step_nbytes": plan.step_nbytes,
        "step_disk_nbytes": step_disk_nbytes(plan),
        "predicted_ms": round(1e3 * plan.step_s, 2),
        "unplanned_fills": stats.unplanned_fills,
        "stall_ms": round(1e3 * stats.stall_s / stats.steps, 2),
        **({"x_host": round(in_ram / plan.host_nbytes, 5)} if plan.host_nbytes else {}),
    }


def step_disk_nbytes(plan: Plan) -> int:
    return sum(plan.unit_disk_nbytes[unit] for fills in plan.after for unit in fills)


def prompt(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 1 + PROMPT_TOKENS, device=device)[None] * 7


def _seconds(lap: tuple[float, float]) -> float:
    return round(lap[1] - lap[0], 3)


if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to stderr
    given = Case(**json.loads(sys.argv[1]))
    import_everything(given.folder)
    try:
        with torch.no_grad():
            figures = run(given)
    except Exception as error:  # a peer may raise anything
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(figures), file=answer, flush=True)
    if given.hold:
        sys.stdin.read()
