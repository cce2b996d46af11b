"""Experts that every step reads whole: the outputs of float8 experts, whose kernels take stacks, and the reported
reason.

transformers' float8 kernels need a GPU. Here functions of torch with the same arguments replace them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import weightstream
from expert_rig import built, experts_of, generated, prompt, same
from models import model_nbytes
from repeats import thinned
from weightstream.adapters.hf import private_quantised
from weightstream.adapters.modules.moe import picks_of, why_whole
from weightstream.plan.check import prove
from weightstream.plan.plan import Plan
from weightstream.plan.schedule import aligned

transformers = pytest.importorskip("transformers")
finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")

pytestmark = pytest.mark.usefixtures("nothing_foreseen")

BLOCK = (32, 32)


def unpacked(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    assert type(weight) in (torch.Tensor, nn.Parameter), "a kernel takes addresses"
    return weight.float() * scale.repeat_interleave(BLOCK[0], -2).repeat_interleave(BLOCK[1], -1)


def batched_matmul(x: torch.Tensor, weight: Any, scale: Any, block_size: Any, expert_ids: Any) -> torch.Tensor:
    return torch.einsum("sk,snk->sn", x.float(), unpacked(weight, scale)[expert_ids]).to(x.dtype)


def grouped_matmul(x: torch.Tensor, weight: Any, scale: Any, offsets: Any, **_: Any) -> torch.Tensor:
    ids = torch.searchsorted(offsets, torch.arange(len(x), dtype=offsets.dtype), right=True)
    return batched_matmul(x, weight, scale, None, ids)


def matmul(x: torch.Tensor, weight: Any, scale: Any, block_size: Any, dtype: Any, **_: Any) -> torch.Tensor:
    return torch.einsum("sk,nk->sn", x.float(), unpacked(weight, scale)).to(dtype)


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(matmul=matmul, batched_matmul=batched_matmul, grouped_matmul=grouped_matmul)
    monkeypatch.setattr(finegrained, "load_finegrained_fp8_kernel", lambda: kernels)
    monkeypatch.setattr(private_quantised, "has_fp8_kernels", lambda device: True)
    monkeypatch.setattr(finegrained, "is_deepgemm_loadable", lambda: False)


def in_float8(implementation: str = "batched_mm") -> Any:
    """A mixture with transformers' own float8 experts, as its quantiser creates them."""
    from transformers.integrations.moe import use_experts_implementation

    model, generator = built(implementation=implementation), torch.Generator().manual_seed(9)
    kind = use_experts_implementation(
        experts_class=type("FP8Experts", (finegrained.FP8Experts,), {}),
        experts_interface=finegrained.ALL_FP8_EXPERTS_FUNCTIONS,
        has_bias=False,
        has_gate=True,
    )
    for layer in model.model.layers:
        experts = kind(config=model.config, block_size=BLOCK)
        with torch.no_grad():
            for name, p in experts.named_parameters():
                values = torch.randn(p.shape, generator=generator)
                p.copy_((values.abs() / 8 if "scale" in name else values).to(p.dtype))
        layer.mlp.experts = experts.eval()
    return model


def plan_in_matrices(streamer: weightstream.Streamer) -> Plan:
    """Plans in which experts are units of their own, and stream."""
    grain = streamer._installed.replanning.inputs.grains[-1].coded(streamer.plan.manifest.codes)
    units = [unit for unit in grain.units if unit.name.endswith("experts")]
    stacks = frozenset(t.alias for unit in units for t in unit.tensors)
    ring_nbytes = 2 * max(sum(aligned(t.nbytes) for t in unit.tensors) for unit in units)
    return Plan.build(grain, frozenset(grain.aliases) - stacks, ring_nbytes)


@pytest.mark.few(1)
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("implementation", "codec"), thinned(["batched_mm", "grouped_mm", "eager"], ["compressed", "none"], every=3)
)
def test_experts_in_float8_stream_whole(implementation: str, codec: str) -> None:
    model, plain = in_float8(implementation), in_float8(implementation)
    wanted = [generated(plain, prompt(length), 4) for length in (1, 2, 9)]
    assert all(picks_of(experts) is None for experts in experts_of(model))
    room = 4 * model_nbytes(model) + (1 << 20)
    with weightstream.offload(model, device="cpu", device_budget=room, codec=codec) as streamer:
        plan = plan_in_matrices(streamer)
        prove(plan)
        streamer.switch(plan)
        codes = streamer.plan.manifest.codes
        assert any(name.endswith("experts.gate_up_proj") for name in codes) is (codec == "compressed")
        for _ in range(2):
            for length, found in zip((1, 2, 9), wanted, strict=True):
                assert same(generated(model, prompt(length), 4), found)
        assert streamer.plan.step_nbytes > 0
        assert streamer.stats().fills > 0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of the same mixture: a file has the matrices of each expert, and their scales, one by one."""
    model, state = in_float8(), {}
    for name, tensor in model.state_dict().items():
        module, _, stack = name.rpartition(".experts.")
        leaf = "weight_scale_inv" if stack.endswith("_scale_inv") else "weight"
        for index, rows in enumerate(tensor if module else ()):
            is_joint = stack.startswith("gate_up")
            parts = zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True) if is_joint else [("down_proj", rows)]
            state |= {f"{module}.experts.{index}.{kind}.{leaf}": part.contiguous() for kind, part in parts}
        if not module:
            state[name] = tensor.contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    model.config.architectures = [type(model).__name__]
    others = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head", "gate"]
    about = {"quant_method": "fp8", "weight_block_size": BLOCK, "modules_to_not_convert": others}
    model.config.quantization_config = about | {"activation_scheme": "dynamic"}
    model.config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("_kernels", "no_loading_bars")
def test_experts_in_float8_stream_from_their_places_in_the_file(checkpoint: Path, tmp_path: Path) -> None:
    """As the dequantised model, also where kernels for packed experts are installed."""
    options = {"experts_implementation": "batched_mm"}
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype="auto", quantization_config=transformers.FineGrainedFP8Config(dequantize=True), **options
    ).eval()
    plan = weightstream.plan_model(checkpoint, device_budget=1 << 20)
    assert {t.dtype for t in plan.manifest.tensors() if "experts" in t.name} == {"float8_e4m3fn", "float32"}
    folder = tmp_path / "folder"
    model = weightstream.from_pretrained(
        checkpoint, device="cpu", device_budget=120_000, offload_folder=folder, progress=False, **options
    )
    with model.weightstream as streamer:
        assert streamer.plan.step_nbytes > 0
        assert not [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]
        assert same(generated(model, prompt(5), 4), generated(plain, prompt(5), 4))
        model.save_pretrained(tmp_path / "saved")
    saved, original = (load_file(path / "model.safetensors") for path in (tmp_path / "saved", checkpoint))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name].view(torch.uint8), original[name].view(torch.uint8)) for name in saved)


# -- the reason --------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Stacks that a loop reads, as in models whose experts transformers does not decorate."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 64))


def undecorated() -> Any:
    model = built()
    for layer in model.model.layers:
        layer.mlp.experts = Gated()
    return model


def one_by_one() -> Any:
    model = built()
    for layer in model.model.layers:
        layer.mlp.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(8, 8) for i in range(4)})
    return model


def replaced() -> Any:
    model = built()
    for experts in experts_of(model):
        experts.forward = lambda *args, forward=experts.forward: forward(*args)
    return model


REASONS = {
    "eager": (lambda: built(implementation="eager"), 'experts_implementation "eager" reads whole stacks'),
    "undecorated": (undecorated, "Gated does not take rows of stacks by ids"),
    "one by one": (one_by_one, "ModuleDict does not take rows"),
    "replaced": (replaced, "their forward is not that of Qwen3MoeExperts"),
    "float8": (in_float8, "FP8Experts gives its kernels whole stacks of float8_e4m3fn"),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_for_reading_all_experts_is_reported(name: str) -> None:
    make, reason = REASONS[name]
    found = why_whole(make())
    assert found is not None
    assert found.startswith(f"each step reads all experts of model.layers.0.mlp.experts and 2 more: {reason}")
    assert "\n" not in found


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_no_reason_is_reported_for_experts_that_generate_picks(name: str, implementation: str) -> None:
    assert why_whole(built(name, implementation)) is None


@pytest.mark.parametrize("share", [0.5, 4.0])
def test_the_reason_is_logged_once_if_weights_stream(share: float, caplog: pytest.LogCaptureFixture) -> None:
    model = built(implementation="eager")
    with weightstream.offload(model, device="cpu", device_budget=int(share * model_nbytes(model)), codec="none"):
        for _ in range(2):
            generated(model, prompt(2), 4)
    lines = [record for record in caplog.records if "reads all experts" in record.getMessage()]
    assert [record.levelname for record in lines] == ["WARNING"] * (share < 1)
