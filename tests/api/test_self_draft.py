"""`draft="self"`: a model drafts with the high parts of its own weights, and its text stays the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from generating import STATIC, build
from models import TEXT
from weightstream import ConfigError
from weightstream.api.plan_model import plan_drafted
from weightstream.api.self_draft import plan_self_drafted
from weightstream.errors import PlanError, UnsupportedError
from weightstream.inputs.machine import machine_with_rates
from weightstream.plan.manifest import Profile
from weightstream.settings.config import OffloadConfig

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.modules.split_weights import SplitWeight  # noqa: E402

SLOW = Profile(machine="Slow link", device_nbytes=1 << 30, link_bytes_per_s=1e8, overhead_s=0.0, copy_latency_s=0.0)
SIZES = TEXT | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "max_position_embeddings": 256}
NUM, KEPT = 24, {"return_dict_in_generate": True, "output_logits": True}
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "tied": lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, num_key_value_heads=2),  # with biases
    "gemma3": lambda: transformers.Gemma3TextConfig(  # scaled embeddings, windows longer than the text
        **SIZES, num_key_value_heads=2, head_dim=32, sliding_window=128
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind, config in KINDS.items():
        made[kind] = tmp_path_factory.mktemp("checkpoint") / kind
        build(config()).save_pretrained(made[kind])
    return made


def nbytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def prompt() -> torch.Tensor:
    return torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(7))


def load(folder: Path, share: float = 0.75, **more: Any) -> Any:
    return weightstream.from_pretrained(
        folder, device="cpu", device_budget=int(share * nbytes(folder)), draft="self", progress=False, **more
    )


def generated(model: Any, **more: Any) -> tuple[Any, DecodeReport]:
    found: list[DecodeReport] = []
    torch.manual_seed(5)
    options = {"max_new_tokens": NUM, "pad_token_id": 0, "eos_token_id": None, **KEPT, **more}
    output = weightstream.generate(model, prompt(), on_decoding=found.append, **options)
    return output, found[0]


@pytest.mark.few(1)
@pytest.mark.usefixtures("no_loading_bars")
@pytest.mark.parametrize(
    ("kind", "sample"),
    [*((kind, {"do_sample": False}) for kind in KINDS), ("llama", {"do_sample": True, "temperature": 0.7})],
)
def test_a_text_has_the_bits_of_the_plain_model(kind: str, sample: dict[str, Any], folders: dict[str, Path]) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.bfloat16).eval()
    torch.manual_seed(5)
    want = plain.generate(prompt(), max_new_tokens=NUM, pad_token_id=0, eos_token_id=None, **KEPT, **sample, **STATIC)
    model = load(folders[kind], speculate="draft")
    assert type(model.model.layers[0].mlp.up_proj.weight) is SplitWeight
    for _ in range(2 if kind == "llama" else 1):  # the second time the streamer knows the order
        got, decoding = generated(model, bits="token", **sample)
        assert torch.equal(got.sequences, want.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
        report = decoding.speculation
        assert report is not None
        assert (report.draft, report.bits) == ("self draft", "token")
        assert report.tokens_per_pass > (1 if sample["do_sample"] else 1.5)
    stats = model.weightstream.stats()
    assert stats.unplanned_fills == 0
    assert stats.filled_nbytes > 0
    assert stats.speculation.draft_s > 0


@pytest.mark.usefixtures("no_loading_bars")
def test_a_removed_model_is_plain(folders: dict[str, Path]) -> None:
    model = load(folders["llama"], speculate="draft")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    streamer = model.weightstream
    streamer.remove()
    assert streamer.drafting.model is None
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.usefixtures("no_loading_bars")
@pytest.mark.stress
def test_other_drafts_and_none_work_with_split_weights(folders: dict[str, Path]) -> None:
    model = load(folders["llama"], speculate="draft")
    want, decoding = generated(model, speculate="off", do_sample=False)
    assert decoding.speculation is None
    for more in ({"speculate": "lookup"}, {"prompt_lookup_num_tokens": 7}):
        got, decoding = generated(model, bits="token", do_sample=False, **more)
        assert decoding.speculation is not None
        assert decoding.speculation.draft == "prompt lookup"
        assert torch.equal(got.sequences, want.sequences)


@pytest.mark.usefixtures("no_loading_bars")
def test_a_write_to_a_split_weight_is_refused(folders: dict[str, Path]) -> None:
    model = load(folders["llama"], speculate="draft")
    with pytest.raises(UnsupportedError, match="draft='self'"), torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)


@pytest.mark.stress
def test_the_most_bits_that_fit_are_taken(folders: dict[str, Path]) -> None:
    found = []
    for share in (0.4, 0.45, 0.5, 0.55, 0.9):
        config = OffloadConfig(device_budget=int(share * nbytes(folders["llama"])), context=64, codec="none")
        try:
            planned = plan_drafted(folders["llama"], config, "self", "draft", profile=SLOW)
        except PlanError:
            found.append(0)
            continue
        assert planned.is_drafted
        assert planned.plan.device_nbytes + planned.inputs.reserved_nbytes <= config.within(10**9).device_budget
        assert "tokens/s are expected with" in planned.reason
        found.append(int(planned.reason.partition(" bits of")[0][-1]))
    config = OffloadConfig(device_budget=nbytes(folders["llama"]) // 4, context=64, codec="none")
    with pytest.raises(PlanError, match="draft='self': no part of the weights that could draft fits"):
        plan_drafted(folders["llama"], config, "self", "draft", profile=SLOW)
    assert found == sorted(found)
    assert found[-1] == 3
    assert len(set(found)) > 2


@pytest.mark.stress
def test_it_is_left_out_where_the_plan_without_is_faster(folders: dict[str, Path]) -> None:
    config = OffloadConfig(device_budget=2 * nbytes(folders["llama"]), context=64)
    planned = plan_drafted(folders["llama"], config, "self", "auto", profile=SLOW)
    assert not planned.is_drafted
    assert "not drafting by itself" in planned.reason
    config = OffloadConfig(device_budget=nbytes(folders["llama"]) // 3, context=64)
    planned = plan_drafted(folders["llama"], config, "self", "auto", profile=SLOW)
    assert not planned.is_drafted
    assert "do not fit" in planned.reason


@pytest.mark.usefixtures("no_loading_bars")
def test_a_split_that_does_not_fit_in_host_memory_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(*args: Any) -> Any:
        return replace(machine_with_rates(*args), host_free_nbytes=300 << 10)

    def plan(shapes: Any, checkpoint: Any, config: Any, machine: Any, *more: Any) -> Any:
        return plan_self_drafted(shapes, checkpoint, config, replace(machine, host_free_nbytes=1 << 40), *more)

    monkeypatch.setattr("weightstream.api.offload.machine_with_rates", small)
    monkeypatch.setattr("weightstream.api.offload.plan_self_drafted", plan)  # there would be no room for the low parts
    with pytest.raises(PlanError, match=r"the split weights take \d+\.\dKiB of host memory .* and 300.0KiB are free"):
        load(folders["llama"], speculate="draft")


@pytest.mark.usefixtures("no_loading_bars")
def test_a_draft_that_a_mode_does_not_use_is_named(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    model = load(folders["llama"], speculate="lookup")
    assert "draft is ignored: speculate='lookup'" in caplog.text
    assert model.weightstream.drafting.model is None


@pytest.mark.usefixtures("no_loading_bars")
def test_a_draft_that_is_not_worth_its_memory_is_named(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = load(folders["llama"], share=1 / 3, speculate="auto")
    assert [record.levelname for record in caplog.records if "not drafting by itself" in record.message] == ["WARNING"]
    assert model.weightstream.drafting.model is None


@pytest.mark.usefixtures("no_loading_bars")
def test_models_without_matrices_in_bfloat16_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedError, match=r"linear layers in bfloat16.*dtype='bfloat16'"):
        load(folders["llama"], speculate="draft", dtype=torch.float32)
    with pytest.raises(ConfigError, match="only a model on one GPU"):
        weightstream.from_pretrained(folders["llama"], device="cpu", device_budget={0: 1, 1: 1}, draft="self")
