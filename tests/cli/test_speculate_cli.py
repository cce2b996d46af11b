"""`--speculate` and `--draft` of `plan`, `run` and `bench`."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from models import TEXT
from plain_model import prefer_in_plain_model
from weightstream.adapters.generation import drafted
from weightstream.adapters.generation.speculation import VerifySteps
from weightstream.cli import app
from weightstream.measure.profile import to_json
from weightstream.plan.manifest import Profile
from words import tokenizer

transformers = pytest.importorskip("transformers")
run_module = importlib.import_module("weightstream.cli.run")  # the package has a command of this name

PROMPT = "w5 w9 w23 w5 w9 w23 w5 w9"
NUM_TOKENS = 25  # with the prompt of 8 tokens, 32 positions: kernels on a CPU look at their alignment


def save(path: Path, layers: int, seed: int) -> Path:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**TEXT | {"num_hidden_layers": layers}, initializer_range=0.3)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"), 6, 3)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("draft"), 1, 4)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of a machine with a slow link, where passes of several tokens are free."""
    path = tmp_path_factory.mktemp("profile") / "slow.json"
    slow = Profile(machine="Slow link", device_nbytes=1 << 30, link_bytes_per_s=1e8, overhead_s=0.0)
    path.write_text(to_json(slow))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def call_json(*arguments: object) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def planned(folder: Path, profile: Path, *more: object) -> tuple[Any, ...]:
    return "plan", folder, "--device-budget", "700KiB", "--context", 64, "--profile", profile, *more


def test_plan_shows_passes_and_what_drafts_gain(folder: Path, profile: Path) -> None:
    shown = call(*planned(folder, profile, "--speculate", "auto"))
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.stdout.split())
    assert "16 tokens 1.0" in text
    assert "passes of 16 tokens are expected to make" in text
    found = call_json(*planned(folder, profile, "--speculate", "auto"))
    assert [each["tokens"] for each in found["passes"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert found["speculation"]["tokens"] == 16
    assert found["speculation"]["tokens_per_s"] > 1.5 * found["speculation"]["plain_tokens_per_s"]
    plain = call_json(*planned(folder, profile))
    assert plain["passes"] == []
    assert "speculation" not in plain


@pytest.mark.stress
def test_plan_compares_the_plans_with_and_without_a_draft(folder: Path, draft: Path, profile: Path) -> None:
    shown = call(*planned(folder, profile, "--draft", draft))
    assert shown.exit_code == 0, shown.output
    assert "tokens/s are expected with the draft" in " ".join(shown.stdout.split())
    found = call_json(*planned(folder, profile, "--draft", draft))
    assert found["draft"]["is_loaded"] in (True, False)
    assert ("loading" in found["draft"]["reason"]) is found["draft"]["is_loaded"]
    forced = call_json(*planned(folder, profile, "--draft", draft, "--speculate", "draft"))
    assert forced["draft"]["is_loaded"] is True
    assert forced["budget"] < 700 << 10


@pytest.mark.stress
def test_run_generates_the_plain_tokens_and_reports_passes(folder: Path, draft: Path) -> None:
    flags = ("--device", "cpu", "--device-budget", "1MiB", "--prompt", PROMPT, "--max-new-tokens", NUM_TOKENS)
    plain = call_json("run", folder, *flags)
    assert plain["stats"]["speculation"] is None
    for more in (("--speculate", "lookup"), ("--draft", draft, "--speculate", "draft")):
        found = call_json("run", folder, *flags, *more)
        assert found["tokens"] == plain["tokens"]
        stats = found["stats"]["speculation"]
        assert stats["tokens"] == NUM_TOKENS - 1
        assert stats["tokens_per_pass"] == stats["tokens"] / stats["passes"]
        assert found["decoding"]["speculation"]["passes"] == stats["passes"]
        assert found["tokens_per_s"] > 0
        shown = call("run", folder, *flags, *more)
        assert shown.exit_code == 0, shown.output
        assert "tokens per pass" in shown.stderr
        assert f"({NUM_TOKENS} generated" in shown.stderr


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights can be split."""
    path = tmp_path_factory.mktemp("rounded")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**TEXT | {"intermediate_size": 192}, initializer_range=0.3)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def test_drafts_are_verified_with_the_bits_that_they_have(rounded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a static cache changes bits, and with them a token of this text; so do wide passes."""
    plain, given = run_module._plain, list[Any]()

    def noted(*args: Any) -> Any:
        given.append(args[-1])
        return plain(*args)

    monkeypatch.setattr(run_module, "_plain", noted)
    flags = ("--device", "cpu", "--device-budget", "300KiB", "--prompt", PROMPT, "--max-new-tokens", NUM_TOKENS)
    for is_free, bits in ((True, "token"), (False, "rows")):
        monkeypatch.setattr(drafted, "_splits_are_free", lambda *_, is_free=is_free: is_free)
        found = call_json("run", rounded, *flags, "--speculate", "lookup", "--verify")
        assert found["identical"] is True
        width = found["decoding"]["speculation"]["width"]
        if found["decoding"]["speculation"]["bits"] == "token":  # on some machines wide passes have these bits
            assert given.pop() == {"cache_implementation": "static", "disable_compile": True}
        else:
            assert bits == "rows"
            assert given.pop() == {"prompt_lookup_num_tokens": width - 1, "bits": "rows"}


@pytest.mark.parametrize(("singles", "code"), [(0, 1), (3, 0)])
def test_bits_of_passes_of_two_widths_are_no_difference(
    singles: int, code: int, rounded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = VerifySteps.report
    flags = ("--device", "cpu", "--device-budget", "300KiB", "--prompt", PROMPT, "--max-new-tokens", NUM_TOKENS)
    prefer_in_plain_model(monkeypatch, 5)
    monkeypatch.setattr(VerifySteps, "report", lambda self: replace(report(self), bits="rows", singles=singles))
    result = call("run", rounded, *flags, "--speculate", "lookup", "--verify")
    assert result.exit_code == code, result.output
    said = "no (first" if code else 'not known: bits="rows" in passes of two widths (first'
    assert f"{said} difference at token 1)" in result.stderr
    assert "plain: w5 w5" in " ".join(result.stderr.split())


@pytest.mark.stress
def test_a_model_drafts_for_itself(rounded: Path, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafted, "_splits_are_free", lambda *_: True)
    flags = ("--device-budget", "300KiB", "--context", 64, "--profile", profile)
    shown = call("plan", rounded, *flags, "--draft", "self")
    assert shown.exit_code == 0, shown.output
    assert "bits of each mantissa as the draft" in " ".join(shown.stdout.split())
    found = call_json("plan", rounded, *flags, "--draft", "self", "--speculate", "draft")
    assert found["draft"]["is_loaded"] is True
    flags = ("--device", "cpu", "--device-budget", "300KiB", "--prompt", PROMPT, "--max-new-tokens", NUM_TOKENS)
    found = call_json("run", rounded, *flags, "--draft", "self", "--speculate", "draft", "--verify")
    assert found["identical"] is True
    assert found["decoding"]["speculation"]["draft"] == "self draft"
    assert found["stats"]["speculation"]["accepted"] > 0


@pytest.mark.stress
def test_bench_times_passes_of_several_tokens(folder: Path) -> None:
    flags = ("--device", "cpu", "--device-budget", "1MiB", "--context", 64, "--seconds", 0.05)
    found = call_json("bench", folder, *flags, "--speculate", "auto")
    assert [each["tokens"] for each in found["timed_passes"]] == [2, 4, 8, 16]
    assert all(each["p50_s"] > 0 and each["predicted_s"] > 0 for each in found["timed_passes"])
    assert found["equal"] is True
    shown = call("bench", folder, *flags, "--speculate", "auto")
    assert "x one token" in shown.stdout
    assert call_json("bench", folder, *flags)["timed_passes"] == []


@pytest.mark.parametrize("command", ["plan", "run"])
def test_several_gpus_have_no_draft(command: str, folder: Path, draft: Path) -> None:
    result = call(command, folder, "--gpus", 2, "--device-budget", "1MiB", "--draft", draft)
    assert result.exit_code == 2
    assert "one GPU" in result.stderr


def test_a_draft_is_needed_to_draft_with_it(folder: Path) -> None:
    result = call("run", folder, "--device", "cpu", "--speculate", "draft")
    assert result.exit_code == 2
    assert "needs a draft model" in result.stderr
