"""Arguments that newcomers try: indices of GPUs, files of settings, and what names nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weightstream
from models import TEXT
from weightstream.errors import ConfigError, UnsupportedError
from weightstream.settings.config import OffloadConfig


def stack() -> torch.nn.Sequential:
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])


@pytest.mark.parametrize("name", [None, 3, "", b"x"])
@pytest.mark.parametrize("function", ["from_pretrained", "plan_model", "pipeline_from_pretrained"])
def test_what_names_nothing_is_refused(function: str, name: Any) -> None:
    with pytest.raises(ConfigError, match=r"path_or_repo_id = .*: give a folder, or the name of a repository"):
        getattr(weightstream, function)(name)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"draft": 3}, "draft = 3: give a folder"), ({"quantization_config": 3}, "int is no config of a quantisation")],
)
def test_arguments_of_other_types_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        weightstream.from_pretrained(tmp_path, device="cpu", **given)


def test_a_device_may_be_an_index() -> None:
    assert OffloadConfig().device_for(1) == "cuda:1"
    assert OffloadConfig(max_memory={1: "1GiB"}).resolved().device_for(1) == "cuda:1"
    with pytest.raises(ConfigError, match="device 'True': give cuda"):
        weightstream.offload(stack(), device=True)


def test_settings_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('device_budget = "48KiB"\ncodec = "none"\n')
    with weightstream.offload(stack(), device="cpu", config=str(path)) as streamer:
        assert 0 < streamer.plan.device_nbytes <= 48 << 10
        assert streamer.plan.offloaded_nbytes
    with weightstream.offload(stack(), device="cpu", config=path, device_budget="200KiB") as streamer:
        assert not streamer.plan.offloaded_nbytes
    with pytest.raises(ConfigError, match=r"config file .*none\.toml: No such file"):
        weightstream.from_pretrained("nothing", config=str(tmp_path / "none.toml"))


def test_models_that_do_not_generate_are_named() -> None:
    with pytest.raises(UnsupportedError, match="Sequential has no generate and no device and no generation_config"):
        weightstream.generate(stack(), torch.ones(1, 3))


def test_streamers_and_statistics_print_in_a_few_lines() -> None:
    model = stack()
    with weightstream.offload(model, device="cpu", device_budget="48KiB") as streamer:
        assert "not timed yet" in str(streamer.stats())
        for _ in range(6):
            model(torch.randn(1, 64))
        assert str(streamer) == f"Sequential on cpu\n{streamer.plan}"
        stats = streamer.stats()
    lines = str(stats).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["steps", "fills", "waits", "held", "units"]
    assert lines[0].startswith("steps: 6; ")
    assert f"fills: {stats.fills}, " in lines[1]
    assert max(map(len, lines)) <= 100
