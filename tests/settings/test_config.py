"""The configuration: accepted values, refusals and their texts, warnings, and the hash."""

from __future__ import annotations

import copy
import doctest
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightstream.errors import ConfigError, WeightstreamError
from weightstream.settings import config as config_module
from weightstream.settings.arguments import name_matches, unmatched_patterns
from weightstream.settings.config import ConfigWarning, OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

GIB = 2**30
PIN, UVA = "WEIGHTSTREAM_DISABLE_PIN_MEMORY", "WEIGHTSTREAM_DISABLE_UVA"
BUILDERS: dict[str, Callable[..., OffloadConfig]] = {
    "direct": OffloadConfig,
    "validate": lambda **values: OffloadConfig.model_validate(values),
    "kwargs": OffloadConfig.from_kwargs,
    "merged": lambda **values: OffloadConfig().merged(**values),
}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PIN, raising=False)
    monkeypatch.delenv(UVA, raising=False)


def refusal(build: Callable[..., object], *args: Any, **values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build(*args, **values)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, WeightstreamError)
    return str(caught.value)


def warned(build: Callable[..., object], *args: Any, **values: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(*args, **values)
    assert all(issubclass(w.category, ConfigWarning) for w in caught)
    return caught


def quiet(**values: Any) -> OffloadConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return OffloadConfig.from_kwargs(**values)


def write(folder: Path, text: str) -> Path:
    path = folder / "offload.toml"
    path.write_text(text, encoding="utf-8")
    return path


# --- fields and defaults


def test_defaults() -> None:
    assert OffloadConfig().model_dump() == {
        "offload_backend": "auto",
        "uva": {"cpu_offload_gb": 0.0, "cpu_offload_params": frozenset()},
        "prefetch": {
            "offload_group_size": 0,
            "offload_num_in_group": 1,
            "offload_prefetch_step": 1,
            "offload_params": frozenset(),
        },
        "device_budget": None,
        "host_budget": None,
        "max_memory": {},
        "gpus": 1,
        "batch": 1,
        "context": None,
        "tokens": 1,
        "train": None,
        "offload_folder": None,
        "pin_memory": True,
        "use_uva": True,
        "zero_copy_params": frozenset(),
        "codec": "auto",
        "verify_checksums": True,
    }


@pytest.mark.parametrize("field", ["device_budget", "host_budget"])
@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("96MiB", 96 * 2**20),
        ("12GiB", 12 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("12GB", 12 * 10**9),
        (7, 7),
        (GIB, GIB),
        ("512", 512),
    ],
)
def test_byte_sizes(field: str, size: object, nbytes: int) -> None:
    value = getattr(OffloadConfig(**{field: size}), field)
    assert value == nbytes
    assert type(value) is int


def test_host_budget_may_be_zero_and_device_budget_may_not() -> None:
    assert OffloadConfig(host_budget=0).host_budget == 0
    assert OffloadConfig(host_budget=None, device_budget=None) == OffloadConfig()
    text = refusal(OffloadConfig, device_budget=0)
    assert text.startswith("device_budget = 0: ")
    assert "a number of bytes >= 1" in text


@pytest.mark.parametrize("size", [-1, 0, "lots", "-1", "abc", 0.5])
def test_an_invalid_size_is_refused_in_one_line_without_pydantics_words(size: object) -> None:
    text = refusal(OffloadConfig, device_budget=size)
    assert text.startswith(f"device_budget = {size!r}: not a number of bytes >= 1; give bytes, a size")
    assert "\n" not in text


# --- shares, and a map of budgets


@pytest.mark.parametrize("share", ["80%", " 80 %", "80.0%"])
@pytest.mark.parametrize("field", ["device_budget", "host_budget"])
def test_a_share_stays_a_share_and_applies_to_the_existing_memory(field: str, share: str) -> None:
    config = OffloadConfig(**{field: share})
    assert getattr(config, field) == "80%"
    resolve = config.device_nbytes if field == "device_budget" else config.host_nbytes
    assert [resolve(total) for total in (1000, 999, 0)] == [800, 799, 0]
    assert config.compute_hash() == OffloadConfig(**{field: "80%"}).compute_hash()


def test_a_share_is_exact() -> None:
    assert OffloadConfig(device_budget="12.5%").device_nbytes(8 * GIB) == GIB
    assert OffloadConfig(device_budget="100%").device_nbytes(141 * GIB + 1) == 141 * GIB + 1
    assert OffloadConfig(device_budget="0.1%").device_nbytes(1000) == 1


def test_a_budget_in_bytes_is_the_same_on_every_machine() -> None:
    config = OffloadConfig(device_budget="6GiB", host_budget=0)
    assert config.device_nbytes(GIB) == 6 * GIB
    assert config.host_nbytes(GIB) == 0
    assert OffloadConfig().device_nbytes(GIB) is None
    assert OffloadConfig().host_nbytes(GIB) is None


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("key", [1, "1", "cuda:1"])
def test_max_memory_is_both_budgets(builder: str, key: object) -> None:
    config = BUILDERS[builder](max_memory={key: "10GB", "cpu": "50%"})
    assert config.device_nbytes(GIB) == 10 * 10**9
    assert config.host_nbytes(1000) == 500
    assert config.device_for(None) == config.device_for("cuda") == config.device_for("cuda:1") == "cuda:1"
    assert hash(config) == hash(OffloadConfig(max_memory={1: "10GB", "cpu": "50%"}))
    assert config == OffloadConfig(max_memory=config.model_dump()["max_memory"])


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:11"])
def test_max_memory_is_for_the_device_that_computes(device: str) -> None:
    text = refusal(OffloadConfig(max_memory={1: "10GiB"}).device_for, device)
    assert text == f"max_memory is for cuda:1, and device = {device!r}: name the same in both"


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:3"])
def test_without_a_device_in_max_memory_any_is_accepted(device: str | None) -> None:
    assert OffloadConfig().device_for(device) == device
    assert OffloadConfig(max_memory={"cpu": 5}).device_for(device) == device


def test_only_cpu_in_max_memory_bounds_all_memory_of_a_model_on_the_cpu() -> None:
    config = OffloadConfig(max_memory={"cpu": "4GiB"})
    assert (config.device_nbytes(GIB), config.host_nbytes(GIB)) == (None, 4 * GIB)
    assert (config.device_nbytes(GIB, on_cpu=True), config.host_nbytes(GIB, on_cpu=True)) == (4 * GIB, 0)
    both = config.merged(device_budget=7)
    assert (both.device_nbytes(GIB, on_cpu=True), both.host_nbytes(GIB, on_cpu=True)) == (7, 4 * GIB)


def test_several_gpus_share_a_model() -> None:
    assert OffloadConfig().stripes == {}
    assert OffloadConfig(max_memory={1: "10GiB", "cpu": 5}).stripes == {}
    assert OffloadConfig(gpus=3, device_budget="50%").stripes == {0: "50%", 1: "50%", 2: "50%"}
    config = OffloadConfig(max_memory={10: 7, 2: 5, "cpu": "50%"})
    assert list(config.stripes.items()) == [(2, 5), (10, 7)]
    assert "one GPU" in refusal(config.device_for, None)
    assert "remove gpus" in refusal(OffloadConfig, max_memory={0: 5, 1: 5}, gpus=3)
    part = config.within(5, 0.25)
    assert (part.stripes, part.device_budget, part.host_nbytes(1000)) == ({}, 5, 125)
    assert OffloadConfig(gpus=2, host_budget=1000).within(None, 0.5).host_nbytes(9) == 500
    assert OffloadConfig(gpus=2).within(None, 0.5).host_nbytes(9) is None


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(
    ("values", "names"),
    [
        (
            {"max_memory": {0: "1GiB"}, "device_budget": 5},
            ("device_budget = 5", "{0: 1073741824}", "remove device_budget"),
        ),
        ({"max_memory": {"cpu": 7}, "host_budget": "50%"}, ("host_budget = '50%'", "cpu: 7", "cpu from max_memory")),
    ],
)
def test_two_budgets_for_one_memory(builder: str, values: dict[str, Any], names: tuple[str, ...]) -> None:
    text = refusal(BUILDERS[builder], **values)
    assert all(name in text for name in names)


def test_budgets_for_two_memories_may_be_passed_either_way() -> None:
    config = OffloadConfig(max_memory={"cpu": 7}, device_budget=5)
    assert (config.device_nbytes(GIB), config.host_nbytes(GIB)) == (5, 7)


def test_a_later_map_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = write(tmp_path, '[max_memory]\n0 = "10GiB"\ncpu = "30GiB"\n')
    config = OffloadConfig.from_toml(path)
    assert (config.device_nbytes(0), config.host_nbytes(0)) == (10 * GIB, 30 * GIB)
    for over in OffloadConfig.from_toml(path, max_memory={1: 5}), config.merged(max_memory={1: 5}):
        assert over == OffloadConfig(max_memory={1: 5})
    assert "remove device_budget" in refusal(OffloadConfig.from_toml, path, device_budget=5)


# --- values as they are


def test_values_are_coerced_to_their_types() -> None:
    config = OffloadConfig.from_kwargs(cpu_offload_gb=3, cpu_offload_params=["b", "a", "b"], offload_folder="/tmp/x")
    assert type(config.uva.cpu_offload_gb) is float
    assert config.uva.cpu_offload_params == frozenset({"a", "b"})
    assert config.offload_folder == Path("/tmp/x")


def test_configurations_are_frozen_hashable_and_survive_copies() -> None:
    config = OffloadConfig.from_kwargs(offload_group_size=4, offload_params={"a"})
    with pytest.raises(ValueError, match="frozen"):
        config.pin_memory = False  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.prefetch.offload_group_size = 8  # type: ignore[misc]
    for twin in copy.deepcopy(config), pickle.loads(pickle.dumps(config)):
        assert twin == config
        assert hash(twin) == hash(config)


# --- refusals


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("device_budget", "12 parsecs", '"12GiB"'),
        ("device_budget", -1, '"12GiB"'),
        ("device_budget", True, '"12GiB"'),
        ("device_budget", 1.5, '"12GiB"'),
        ("device_budget", "0.2B", '"12GiB"'),
        ("host_budget", -1, '"12GiB"'),
        ("host_budget", "lots", '"12GiB"'),
        ("device_budget", "0%", '"80%"'),
        ("device_budget", "100.5%", '"80%"'),
        ("device_budget", "-5%", '"80%"'),
        ("host_budget", "0 %", "up to 100 %"),
        ("host_budget", "8 of 10%", '"80%"'),
        ("device_budget", "%", '"80%"'),
        ("batch", 0, ">= 1"),
        ("batch", True, ">= 1"),
        ("context", 0, ">= 1"),
        ("context", 1.5, ">= 1"),
        ("tokens", 0, ">= 1"),
        ("tokens", "many", ">= 1"),
        ("offload_folder", 3, "path"),
        ("max_memory", "10GiB", '"cpu": "30GiB"'),
        ("max_memory", {"disk": "1GiB"}, "set offload_folder"),
        ("gpus", 0, ">= 1"),
        ("max_memory", {0: "1GiB", "cuda:0": "1GiB"}, "two budgets for one memory"),
        ("max_memory", {"mps": "1GiB"}, "'mps' is no memory"),
        ("max_memory", {True: "1GiB"}, "True is no memory"),
        ("max_memory", {-1: "1GiB"}, "-1 is no memory"),
        ("max_memory", {0: "1 parsec"}, "0: '1 parsec'"),
        ("max_memory", {0: 0}, "0: 0: not a number of bytes >= 1"),
        ("max_memory", {"cpu": "101%"}, "'cpu': '101%'"),
        ("offload_backend", "none", "'auto', 'uva' or 'prefetch'"),
        ("offload_backend", 1, "'auto', 'uva' or 'prefetch'"),
        ("pin_memory", "maybe", "true or false"),
        ("use_uva", 2, "true or false"),
        ("uva", 5, "UVAOffloadConfig"),
        ("prefetch", [1], "PrefetchOffloadConfig"),
    ],
)
def test_a_bad_value_is_refused_with_field_value_and_remedy(
    builder: str, field: str, value: object, remedy: str
) -> None:
    text = refusal(BUILDERS[builder], **{field: value})
    assert text.startswith(f"{field} = {value!r}: ")
    assert remedy in text


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(
    ("section", "field", "value", "remedy"),
    [
        ("uva", "cpu_offload_gb", -1, ">= 0"),
        ("uva", "cpu_offload_gb", float("inf"), "finite"),
        ("uva", "cpu_offload_gb", float("nan"), "finite"),
        ("uva", "cpu_offload_gb", True, ">= 0"),
        ("uva", "cpu_offload_params", "experts", '["experts"]'),
        ("prefetch", "offload_group_size", -1, ">= 0"),
        ("prefetch", "offload_group_size", 1.5, ">= 0"),
        ("prefetch", "offload_group_size", False, ">= 0"),
        ("prefetch", "offload_num_in_group", 0, ">= 1"),
        ("prefetch", "offload_num_in_group", True, ">= 1"),
        ("prefetch", "offload_prefetch_step", -1, ">= 0"),
        ("prefetch", "offload_params", "experts", '["experts"]'),
    ],
)
def test_a_bad_value_in_a_section(builder: str, section: str, field: str, value: object, remedy: str) -> None:
    text = refusal(BUILDERS[builder], **{section: {field: value}})
    assert text.startswith(f"{section}.{field} = {value!r}: ")
    assert remedy in text


def test_sections_on_their_own_refuse_too() -> None:
    assert refusal(UVAOffloadConfig, cpu_offload_gb=-2).startswith("cpu_offload_gb = -2: ")
    assert refusal(PrefetchOffloadConfig.model_validate, {"offload_group_sise": 2}).endswith(
        "did you mean offload_group_size?"
    )
    assert refusal(UVAOffloadConfig.model_validate, 5).startswith("UVAOffloadConfig = 5: ")


def test_all_faults_are_reported_at_once() -> None:
    lines = refusal(OffloadConfig, device_budget=0, uva={"cpu_offload_gb": -1, "oops": 1}, pin_memory="x").splitlines()
    names = {line.split(" = ")[0] for line in lines}
    assert names == {"device_budget", "uva.cpu_offload_gb", "uva.oops", "pin_memory"}


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("device_budgt", "device_budget"),
        ("device-budget", "device_budget"),
        ("pin_memry", "pin_memory"),
        ("cpu_offload_gbs", "uva.cpu_offload_gb"),
        ("offload_groupsize", "prefetch.offload_group_size"),
        ("self", None),
    ],
)
@pytest.mark.parametrize("value", [3, None])
def test_a_misspelt_option_is_refused(builder: str, key: str, nearest: str | None, value: object) -> None:
    text = refusal(BUILDERS[builder], **{key: value})
    assert text.startswith(f"{key} = {value}: there is no such option; ")
    if nearest:
        assert text.endswith(f"did you mean {nearest}?")


def test_an_option_without_a_similar_one_is_answered_with_the_list() -> None:
    text = refusal(UVAOffloadConfig, zzz=1)
    assert text == "zzz = 1: there is no such option; the options are cpu_offload_gb, cpu_offload_params"


def test_a_flat_name_passed_directly_is_pointed_to_its_section() -> None:
    assert refusal(OffloadConfig, cpu_offload_gb=3).endswith("did you mean uva.cpu_offload_gb?")


@pytest.mark.parametrize("backend", ["auto", "uva", "prefetch"])
def test_more_layers_than_the_group_has(backend: str) -> None:
    prefetch = {"offload_group_size": 2, "offload_num_in_group": 3}
    text = refusal(OffloadConfig, offload_backend=backend, prefetch=prefetch)
    assert text.startswith("prefetch.offload_num_in_group = 3 > offload_group_size = 2")
    assert "3 or more" in text


@pytest.mark.parametrize("backend", ["auto", "uva", "prefetch"])
def test_a_prefetch_step_of_zero(backend: str) -> None:
    prefetch = {"offload_group_size": 2, "offload_prefetch_step": 0}
    text = refusal(OffloadConfig, offload_backend=backend, prefetch=prefetch)
    assert text.startswith("prefetch.offload_prefetch_step = 0 < 1")


def test_prefetch_selected_without_groups() -> None:
    text = refusal(OffloadConfig, offload_backend="prefetch", prefetch={"offload_num_in_group": 2})
    assert text.startswith("prefetch.offload_num_in_group = 2 > prefetch.offload_group_size = 0")
    assert text.endswith("set prefetch.offload_group_size to 2 or more")


def test_prefetch_fields_are_not_checked_while_prefetch_is_off() -> None:
    assert PrefetchOffloadConfig(offload_num_in_group=3, offload_prefetch_step=0).offload_group_size == 0
    assert PrefetchOffloadConfig(offload_group_size=3, offload_num_in_group=3).offload_num_in_group == 3


# --- the backend


@pytest.mark.parametrize(
    ("values", "backend"),
    [
        ({}, "none"),
        ({"device_budget": GIB}, "none"),
        ({"cpu_offload_gb": 0.5}, "uva"),
        ({"offload_group_size": 1}, "prefetch"),
        ({"offload_group_size": 1, "cpu_offload_gb": 1}, "prefetch"),
        ({"offload_group_size": 1, "cpu_offload_gb": 1, "offload_backend": "uva"}, "uva"),
        ({"offload_group_size": 1, "cpu_offload_gb": 1, "offload_backend": "prefetch"}, "prefetch"),
        ({"offload_backend": "uva"}, "uva"),
    ],
)
def test_backend(values: dict[str, Any], backend: str) -> None:
    assert quiet(**values).backend == backend


# --- warnings


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"offload_backend": "uva", "cpu_offload_gb": 1, "offload_group_size": 8}, ["prefetch.offload_group_size = 8"]),
        (
            {"offload_backend": "uva", "cpu_offload_gb": 1, "offload_params": ["b", "a"]},
            ["offload_params = ['a', 'b']"],
        ),
        ({"offload_backend": "prefetch", "offload_group_size": 2, "cpu_offload_gb": 1}, ["uva.cpu_offload_gb = 1.0"]),
        ({"offload_group_size": 2, "cpu_offload_gb": 1}, ["uva.cpu_offload_gb = 1.0", "'auto' selects 'prefetch'"]),
        ({"cpu_offload_params": ["a"]}, ["uva.cpu_offload_params = ['a']", "'auto' selects 'none'"]),
        ({"offload_num_in_group": 2}, ["prefetch.offload_num_in_group = 2", "prefetch.offload_group_size > 0"]),
        ({"device_budget": 5, "cpu_offload_gb": 1}, ["device_budget = 5", "'uva'"]),
        ({"device_budget": 5, "offload_group_size": 1}, ["device_budget = 5", "'prefetch'"]),
        ({"device_budget": "8%", "offload_group_size": 1}, ["device_budget = 8%", "'prefetch'"]),
        ({"max_memory": {0: 5, "cpu": 7}, "cpu_offload_gb": 1}, ["max_memory[0] = 5", "'uva'"]),
        ({"codec": "compressed", "cpu_offload_gb": 1}, ["codec = 'compressed'", "'auto' selects 'uva'"]),
    ],
)
def test_an_ignored_setting_warns_once_and_says_how_to_silence_it(values: dict[str, Any], named: list[str]) -> None:
    caught = warned(OffloadConfig.from_kwargs, **values)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert all(part in text for part in [*named, "ignored", "silence"])


def test_a_budget_and_both_backends_give_a_warning_each() -> None:
    caught = warned(OffloadConfig.from_kwargs, device_budget=5, cpu_offload_gb=1, offload_group_size=1)
    starts = [str(w.message).split(" = ")[0] for w in caught]
    assert starts == ["uva.cpu_offload_gb", "device_budget"]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"cpu_offload_gb": 1, "cpu_offload_params": ["a"]},
        {"offload_backend": "uva"},
        {"offload_group_size": 4, "offload_num_in_group": 2, "offload_prefetch_step": 2, "offload_params": ["a"]},
        {"offload_group_size": 4, "batch": 8, "context": 100, "tokens": 2},
        {"max_memory": {"cpu": 7}, "offload_group_size": 4},
        {
            "device_budget": 5,
            "host_budget": 6,
            "offload_folder": "/tmp",
            "batch": 8,
            "pin_memory": False,
        },
        {"device_budget": GIB, "host_budget": 0, "offload_folder": "/tmp", "pin_memory": False, "use_uva": False},
        {"codec": "none", "cpu_offload_gb": 1},
        {"codec": "compressed", "offload_group_size": 1},
    ],
)
def test_a_configuration_without_conflict_is_silent(values: dict[str, Any]) -> None:
    assert warned(OffloadConfig.from_kwargs, **values) == []


def test_warnings_point_at_the_users_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[uva]\ncpu_offload_params = ['a']\n")
    values = {"uva": {"cpu_offload_params": ["a"]}}
    builds = [*(lambda b=b: b(**values) for b in BUILDERS.values()), lambda: OffloadConfig.from_toml(path)]
    for build in builds:
        (caught,) = warned(build)
        assert caught.filename == __file__


def test_a_warning_may_be_made_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigWarning):
            OffloadConfig.from_kwargs(offload_group_size=1, cpu_offload_gb=1)


# --- flat names, overrides, files


def test_from_kwargs_takes_nested_and_flat_names() -> None:
    flat = OffloadConfig.from_kwargs(offload_group_size=8, offload_num_in_group=2, offload_params={"a"})
    prefetch = PrefetchOffloadConfig(offload_group_size=8, offload_num_in_group=2, offload_params=frozenset({"a"}))
    assert flat == OffloadConfig(prefetch=prefetch)
    assert flat == OffloadConfig.from_kwargs(prefetch=prefetch)
    assert flat == OffloadConfig.from_kwargs(
        prefetch={"offload_group_size": 8}, offload_num_in_group=2, offload_params=["a"]
    )


def test_from_kwargs_treats_none_as_not_passed() -> None:
    config = OffloadConfig.from_kwargs(cpu_offload_gb=None, device_budget=None, uva=None, pin_memory=None)
    assert config == OffloadConfig()


@pytest.mark.parametrize("uva", [{"cpu_offload_gb": 2}, UVAOffloadConfig(cpu_offload_gb=2), 5])
def test_from_kwargs_refuses_a_key_passed_twice(uva: object) -> None:
    text = refusal(OffloadConfig.from_kwargs, uva=uva, cpu_offload_gb=1)
    assert text.startswith("cpu_offload_gb = 1 contradicts uva = ")
    assert text.endswith("set only one of the two")


def test_from_kwargs_does_not_change_its_arguments() -> None:
    prefetch = {"offload_group_size": 4}
    OffloadConfig.from_kwargs(prefetch=prefetch, offload_num_in_group=2)
    assert prefetch == {"offload_group_size": 4}


def test_merged_overrides_only_the_passed_settings() -> None:
    base = OffloadConfig.from_kwargs(offload_group_size=8, offload_num_in_group=2, host_budget="1GiB", pin_memory=False)
    over = base.merged(offload_group_size=4, prefetch={"offload_prefetch_step": 3}, host_budget=None, pin_memory=True)
    assert over == OffloadConfig.from_kwargs(
        offload_group_size=4, offload_num_in_group=2, offload_prefetch_step=3, host_budget=GIB, pin_memory=True
    )
    assert base.prefetch.offload_group_size == 8
    replaced = base.merged(prefetch=PrefetchOffloadConfig(offload_group_size=3))
    assert replaced.prefetch == PrefetchOffloadConfig(offload_group_size=3)


def test_merged_with_nothing_is_the_same_and_does_not_warn_again() -> None:
    config = quiet(offload_group_size=1, cpu_offload_gb=1)
    assert config.merged(device_budget=None, uva=None) is config


def test_merged_checks_the_result() -> None:
    base = OffloadConfig.from_kwargs(offload_group_size=8, offload_num_in_group=2)
    assert "offload_num_in_group = 2 > offload_group_size = 1" in refusal(base.merged, offload_group_size=1)


def test_from_toml(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'offload_backend = "prefetch"\nhost_budget = "30GiB"\noffload_folder = "/tmp/x"\nuse_uva = false\n'
        '[prefetch]\noffload_group_size = 8\noffload_params = ["experts"]\n',
    )
    expected = OffloadConfig.from_kwargs(
        offload_backend="prefetch",
        host_budget=30 * GIB,
        offload_folder="/tmp/x",
        use_uva=False,
        offload_group_size=8,
        offload_params={"experts"},
    )
    assert OffloadConfig.from_toml(path) == expected
    assert OffloadConfig.from_toml(str(path), offload_group_size=4, use_uva=None) == expected.merged(
        offload_group_size=4
    )


def test_from_toml_checks_file_and_overrides_together(tmp_path: Path) -> None:
    path = write(tmp_path, "[uva]\ncpu_offload_gb = 1\n[prefetch]\noffload_group_size = 2\n")
    assert OffloadConfig.from_toml(path, cpu_offload_gb=0).backend == "prefetch"
    text = refusal(OffloadConfig.from_toml, path, cpu_offload_gb=0, offload_num_in_group=3)
    assert text.startswith(f"config file {path} with cpu_offload_gb, offload_num_in_group laid over it: ")
    assert "offload_num_in_group = 3 > offload_group_size = 2" in text


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("device_budgt = 3\n", "device_budgt = 3: there is no such option; did you mean device_budget?"),
        ("[uva]\ncpu_offload_gb = -1\n", "uva.cpu_offload_gb = -1: "),
        ("device_budget = true\n", "device_budget = True: "),
        ("self = 1\n", "self = 1: there is no such option"),
        ("[prefetch]\noffload_group = 8\n", "prefetch.offload_group = 8: there is no such option"),
    ],
)
def test_from_toml_refuses_bad_settings_and_names_the_file(tmp_path: Path, toml: str, named: str) -> None:
    path = write(tmp_path, toml)
    assert refusal(OffloadConfig.from_toml, path).startswith(f"config file {path}: {named}")


def test_from_toml_names_the_invalid_line(tmp_path: Path) -> None:
    text = refusal(OffloadConfig.from_toml, write(tmp_path, "pin_memory = true\nhost_budget 3\n"))
    assert str(tmp_path / "offload.toml") in text
    assert "line 2" in text


def test_from_toml_refuses_an_unreadable_file(tmp_path: Path) -> None:
    missing = tmp_path / "absent.toml"
    assert f"config file {missing}: No such file" in refusal(OffloadConfig.from_toml, missing)
    assert f"config file {tmp_path}: Is a directory" in refusal(OffloadConfig.from_toml, tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"pin_memory = \xff\n")
    assert f"config file {binary}: 'utf-8' codec" in refusal(OffloadConfig.from_toml, binary)


# --- the environment


@pytest.mark.parametrize(("variable", "field"), [(PIN, "pin_memory"), (UVA, "use_uva")])
@pytest.mark.parametrize("value", ["1", "true", "YES", "On", " 1 "])
def test_the_environment_switches_off(monkeypatch: pytest.MonkeyPatch, variable: str, field: str, value: str) -> None:
    config = OffloadConfig()
    monkeypatch.setenv(variable, value)  # after construction: read when used
    assert config.resolved() == OffloadConfig(**{field: False})
    assert getattr(config, field) is True


@pytest.mark.parametrize("value", ["", "0", "false", "NO", "Off"])
def test_a_clear_false_does_not_change_the_configuration(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(PIN, value)
    monkeypatch.setenv(UVA, value)
    for config in OffloadConfig(), OffloadConfig(pin_memory=False, use_uva=False):
        assert config.resolved() == config


@pytest.mark.parametrize("variable", [PIN, UVA])
def test_an_unclear_switch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "maybe")
    text = refusal(OffloadConfig().resolved)
    assert f"{variable} = 'maybe'" in text
    assert "set 1 or 0" in text


def test_the_environment_is_part_of_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PIN, "1")
    switched = OffloadConfig().compute_hash()
    monkeypatch.delenv(PIN)
    assert switched == OffloadConfig(pin_memory=False).compute_hash() != OffloadConfig().compute_hash()


# --- the hash

OTHER_VALUES: dict[str, Any] = {
    "offload_backend": "uva",
    "cpu_offload_gb": 1,
    "cpu_offload_params": {"a"},
    "offload_group_size": 3,
    "offload_num_in_group": 2,
    "offload_prefetch_step": 2,
    "offload_params": {"a"},
    "device_budget": 5,
    "host_budget": 5,
    "max_memory": {0: 5},
    "gpus": 2,
    "batch": 2,
    "context": 5,
    "tokens": 2,
    "offload_folder": "/tmp/x",
    "pin_memory": False,
    "use_uva": False,
    "zero_copy_params": {"a"},
    "codec": "compressed",
    "train": {"rank": 8},
    "verify_checksums": False,
}


def test_the_table_below_has_every_field() -> None:
    own = OffloadConfig.model_fields.keys() - {"uva", "prefetch"}
    assert OTHER_VALUES.keys() == own | UVAOffloadConfig.model_fields.keys() | PrefetchOffloadConfig.model_fields.keys()


def test_changing_any_single_field_changes_the_hash() -> None:
    hashes = [OffloadConfig().compute_hash()]
    hashes += [quiet(**{field: value}).compute_hash() for field, value in OTHER_VALUES.items()]
    assert len(set(hashes)) == len(OTHER_VALUES) + 1
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes)


def test_the_hash_does_not_depend_on_process_or_set_order() -> None:
    names = [f"layer{i}.weight" for i in range(12)]
    values = "cpu_offload_gb=1, cpu_offload_params="
    here = OffloadConfig.from_kwargs(cpu_offload_gb=1, cpu_offload_params=set(names)).compute_hash()
    code = (
        "import sys; from weightstream.settings.config import OffloadConfig\n"
        f"names = {{{', '.join(map(repr, names))}}}\n"
        f"print(OffloadConfig.from_kwargs({values}names).compute_hash(), *names)"
    )
    runs = [run_python(code, PYTHONHASHSEED=seed).split() for seed in ("1", "2")]
    assert runs[0][1:] != runs[1][1:], "the seeds gave one set order, so the test shows nothing"
    assert [run[0] for run in runs] == [here, here]


def run_python(code: str, **environment: str) -> str:
    """Output of `code` in a fresh interpreter, with an empty `__init__.py` in the package."""
    folder = Path(config_module.__file__).parents[1]
    stub = (
        "import sys, types; package = types.ModuleType('weightstream')\n"
        f"package.__path__ = [{str(folder)!r}]; sys.modules['weightstream'] = package\n"
    )
    command = [sys.executable, "-c", stub + code]
    return subprocess.run(
        command, env=os.environ | environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_the_module_imports_no_framework() -> None:
    code = "import weightstream.settings.config; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(run_python(code).split())
    assert "pydantic" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "safetensors"}


# --- name segments


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("experts", "mlp.experts.w2_weight", True),
        ("experts.w2_weight", "mlp.experts.w2_weight", True),
        ("mlp", "mlp.experts.w2_weight", True),
        ("w2_weight", "mlp.experts.w2_weight", True),
        ("mlp.experts.w2_weight", "mlp.experts.w2_weight", True),
        ("expert", "mlp.experts.w2_weight", False),
        ("w2", "mlp.experts.w2_weight", False),
        ("mlp.w2_weight", "mlp.experts.w2_weight", False),
        ("w2_weight", "mlp.experts.w2_weight_scale", False),
        ("1", "layers.11.weight", False),
        ("", "mlp.weight", False),
        ("e.perts", "mlp.experts.w", False),
    ],
)
def test_name_matches(pattern: str, name: str, matches: bool) -> None:
    assert name_matches(pattern, name) is matches


def test_unmatched_patterns_are_each_reported_once() -> None:
    names = iter(["mlp.experts.w2_weight", "attn.q.weight"])
    assert unmatched_patterns(["w2", "experts", "zzz", "w2", "q"], names) == ["w2", "zzz"]
    assert unmatched_patterns([], ["a"]) == []
    assert unmatched_patterns(["a"], []) == ["a"]


def test_the_examples_run() -> None:
    result = doctest.testmod(config_module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_table_of_settings_has_every_setting_with_its_default() -> None:
    """docs/usage.md has one row for each field, with the field's default if it has one."""
    text = (Path(__file__).parents[2] / "docs" / "usage.md").read_text()
    table = text[text.index("| setting | default |") : text.index("```toml")]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:] if line.startswith("|")]
    named = {name: row[1].strip() for row in rows for name in re.findall(r"`([\w.]+)`", row[0])}
    fields = _fields(OffloadConfig())
    assert named.keys() == fields.keys()
    for name, default in fields.items():
        if isinstance(default, bool | int | float) and default is not None:
            assert named[name] == str(default).lower().removesuffix(".0"), name
        elif isinstance(default, str):
            assert named[name] == f"`{default}`", name


def _fields(config: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        found |= _fields(value, f"{name}.") if hasattr(type(value), "model_fields") else {prefix + name: value}
    return found


@pytest.mark.parametrize("name", ["3bit", "4bit", "small", "fast", "dense", "5bit", None, 3])
def test_an_unknown_codec_is_refused_with_the_known_names(name: Any) -> None:
    for codec in ("auto", "compressed", "none"):
        assert OffloadConfig(codec=codec).codec == codec
    with pytest.raises(ConfigError, match=rf"codec = {name!r}.*'auto', 'compressed' or 'none'"):
        OffloadConfig(codec=name)
