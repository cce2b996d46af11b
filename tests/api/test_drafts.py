"""A draft model inside of the device budget: both plans are made, and the one with more tokens per second is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from models import TEXT
from weightstream import ConfigError, Plan
from weightstream.api.plan_model import plan_drafted
from weightstream.errors import PlanError
from weightstream.plan.manifest import Profile
from weightstream.settings.config import OffloadConfig

transformers = pytest.importorskip("transformers")

KIB = 1024
# so slow a link that the bytes of the weights decide
SLOW = Profile(machine="Slow link", device_nbytes=1 << 30, link_bytes_per_s=1e8, overhead_s=0.0, copy_latency_s=0.0)
CONTEXT = {"context": 64, "codec": "none"}
SIZES = {"target": (8, 128), "small": (1, 32), "large": (7, 128), "other words": (1, 32)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for index, (name, (layers, width)) in enumerate(SIZES.items()):
        torch.manual_seed(index)
        words = 96 if name == "other words" else TEXT["vocab_size"]
        sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 4 * width, "vocab_size": words}
        config = transformers.LlamaConfig(**TEXT | sizes, initializer_range=0.2)
        made[name] = tmp_path_factory.mktemp("checkpoint") / name
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made[name])
    return made


def nbytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def drafted(folders: dict[str, Path], draft: str, budget: int, mode: Any = "auto", profile: Profile = SLOW) -> Any:
    config = OffloadConfig(device_budget=budget, **CONTEXT)
    return plan_drafted(folders["target"], config, folders[draft], mode, profile=profile)


def test_a_small_draft_is_worth_its_bytes(folders: dict[str, Path]) -> None:
    budget = nbytes(folders["target"]) // 2
    found = drafted(folders, "small", budget)
    assert found.is_drafted, found.reason
    assert found.plan.device_nbytes <= budget - nbytes(folders["small"]) // 2  # besides its cache and logits
    assert found.plan.budget == budget - found.inputs.reserved_nbytes
    alone = weightstream.plan_model(folders["target"], device_budget=budget, profile=SLOW, **CONTEXT)
    assert isinstance(alone, Plan)
    assert found.plan.resident_nbytes < alone.resident_nbytes
    assert "tokens/s are expected with the draft" in found.reason


@pytest.mark.stress
def test_a_draft_that_takes_most_of_the_budget_is_left_out_with_both_figures(folders: dict[str, Path]) -> None:
    budget = nbytes(folders["target"]) * 95 // 100 + 64 * KIB
    found = drafted(folders, "large", budget)
    assert not found.is_drafted
    assert found.plan.budget == budget
    assert "left out" in found.reason
    assert "tokens/s are expected with the draft" in found.reason
    forced = drafted(folders, "large", budget, "draft")
    assert forced.is_drafted
    assert forced.plan.step_s > found.plan.step_s


def test_a_draft_whose_tokens_are_slow_is_left_out(folders: dict[str, Path]) -> None:
    # kernels take so long that a drafted token takes as long as a pass
    slow = replace(SLOW, link_bytes_per_s=50e9, op_s=1e-3)
    found = drafted(folders, "large", 2 * nbytes(folders["target"]), profile=slow)
    assert not found.is_drafted, found.reason


def test_a_draft_that_leaves_no_room_is_left_out_or_refused(folders: dict[str, Path]) -> None:
    budget = nbytes(folders["large"])
    found = drafted(folders, "large", budget)
    assert not found.is_drafted
    assert "leave no room" in found.reason
    with pytest.raises(PlanError, match="leaves no room"):
        drafted(folders, "large", budget, "draft")


def test_other_words_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="96 words, and the model has 128"):
        drafted(folders, "other words", nbytes(folders["target"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculate": "draft"}, "speculate='draft' needs a draft model"),
        ({"draft": "small", "gpus": 2}, "one GPU"),
    ],
)
def test_settings_that_contradict_are_refused(folders: dict[str, Path], settings: dict[str, Any], message: str) -> None:
    if "draft" in settings:
        settings = settings | {"draft": folders[settings["draft"]]}
    with pytest.raises(ConfigError, match=message):
        weightstream.from_pretrained(folders["target"], device="cpu", progress=False, **settings)


@pytest.mark.stress
def test_a_loaded_model_drafts_by_the_draft_that_was_loaded_with_it(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    budget = nbytes(folders["target"]) // 2 + nbytes(folders["small"])
    ids = torch.randint(3, 128, (1, 21), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = transformers.AutoModelForCausalLM.from_pretrained(folders["target"]).eval()
    want = plain.generate(ids, **options, cache_implementation="static", disable_compile=True)
    with caplog.at_level("INFO", logger="weightstream"):
        model = weightstream.from_pretrained(
            folders["target"],
            device="cpu",
            device_budget=budget,
            progress=False,
            speculate="draft",
            draft=folders["small"],
            **CONTEXT,
        )
    assert "loading" in caplog.text
    assert "tokens/s are expected with the draft" in caplog.text
    with model.weightstream as streamer:
        own, theirs = streamer.drafting.model, transformers.AutoModelForCausalLM.from_pretrained(folders["small"])
        assert all(torch.equal(own.state_dict()[name], value) for name, value in theirs.state_dict().items())
        assert not hasattr(own, "weightstream")  # it is resident
        assert streamer.plan.device_nbytes <= budget - nbytes(folders["small"]) // 2
        assert len(streamer.plan.passes) == 5  # of 1 to 16 tokens
        reports: list[Any] = []
        got = weightstream.generate(model, ids, **options, bits="token", on_decoding=reports.append)
        assert torch.equal(got, want)
        assert reports[0].speculation.draft == "assistant"
        lookup = weightstream.generate(
            model, ids, **options, speculate="lookup", bits="token", on_decoding=reports.append
        )
        assert torch.equal(lookup, want)
        assert reports[1].speculation.draft == "prompt lookup"


def test_a_plan_with_passes_costs_the_memory_of_their_cache_and_logits(folders: dict[str, Path]) -> None:
    plans = [
        weightstream.plan_model(folders["target"], device_budget="1MiB", profile=SLOW, speculate=mode, **CONTEXT)
        for mode in (None, "off", "auto")
    ]
    assert all(isinstance(plan, Plan) for plan in plans)
    assert plans[0] == plans[1]
    assert not plans[0].passes
    assert [each.tokens for each in plans[2].passes] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert plans[2].cache_nbytes > plans[0].cache_nbytes
    assert plans[2].numbers()["passes"][0]["tokens"] == 1
    assert "passes" in plans[2].predictions()
