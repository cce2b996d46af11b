"""What an engine asks for, in `additional_config` and in vLLM's own flags; what is refused before a model is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engines import group

from weightstream.errors import ConfigError
from weightstream.hosts.vllm import settings_of, why_refused

FLAGS: dict[str, Any] = {"offload_group_size": 0, "offload_num_in_group": 1, "offload_prefetch_step": 1}


def config(settings: Any, *, gib: float = 0.0, backend: str = "auto", **flags: Any) -> Any:
    """What of vLLM's configuration is looked at, with its own classes where it has any."""
    from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig, UVAOffloadConfig

    offload = OffloadConfig(
        offload_backend=backend,
        prefetch=PrefetchOffloadConfig(**{**FLAGS, **flags}),
        uva=UVAOffloadConfig(cpu_offload_gb=gib),
    )
    return SimpleNamespace(
        additional_config=settings,
        offload_config=offload,
        scheduler_config=SimpleNamespace(max_num_seqs=32),
        model_config=SimpleNamespace(max_model_len=8192),
    )


def asked(**settings: Any) -> Any:
    return {"weightstream": settings}


@pytest.mark.parametrize("settings", [None, {}, {"other": {}}])
def test_without_the_key_nothing_is_asked_for(settings: Any) -> None:
    assert settings_of(config(settings)) is None


def test_a_step_is_planned_for_the_largest_batch() -> None:
    found = settings_of(config(asked(device_budget="6GiB")))
    assert found is not None
    assert (found.batch, found.tokens, found.context, found.device_budget) == (32, 1, 8192, 6 << 30)
    found = settings_of(config(asked(device_budget="6GiB", batch=2, tokens=512)))
    assert found is not None
    assert (found.batch, found.tokens) == (2, 512)


@pytest.mark.parametrize(
    ("given", "backend"),
    [(group(2, 4, 2), "prefetch"), ({"gib": 3.0}, "uva"), ({}, "none"), (group(1) | {"gib": 1.0}, "prefetch")],
)
def test_vllms_flags_hold_where_nothing_else_is_chosen(given: dict[str, Any], backend: str) -> None:
    for settings in (asked(), asked(codec="none")):
        found = settings_of(config(settings, **given))
        assert found is not None
        assert found.backend == backend
        if backend == "prefetch":
            assert found.prefetch.offload_group_size == given["offload_group_size"]


def test_own_settings_go_over_vllms_flags() -> None:
    found = settings_of(config(asked(device_budget="6GiB"), **group(2, 4, 2)))
    assert found is not None
    assert found.backend == "none"
    found = settings_of(config(asked(offload_group_size=1), **group(2, 4, 2)))
    assert found is not None
    assert (found.prefetch.offload_group_size, found.prefetch.offload_num_in_group) == (1, 1)


def test_what_the_plan_adds_to_the_settings_is_none_of_them() -> None:
    assert settings_of(config(asked(device_budget="6GiB", units="0123"))) is not None


@pytest.mark.parametrize(
    ("settings", "text"),
    [(asked(device_budgt="6GiB"), "device_budgt.*device_budget"), ({"weightstream": "6GiB"}, "give a map of settings")],
)
def test_a_misspelt_setting_is_told_by_its_name(settings: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings_of(config(settings))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"enable_eplb": True}, "expert load balancing"),
        ({"enable_elastic_ep": True}, "elastic"),
        ({"use_ubatching": True}, "dual batch overlap"),
        ({"weight_transfer_config": object()}, "weight transfer"),
    ],
)
def test_what_cannot_stream_is_refused_with_the_reason(changes: dict[str, Any], text: str | None) -> None:
    parallel = {"enable_eplb": False, "enable_elastic_ep": False, "use_ubatching": False}
    given = SimpleNamespace(**{"weight_transfer_config": None, **changes})
    given.parallel_config = SimpleNamespace(**{**parallel, **changes})
    found = why_refused(given)
    assert found is None if text is None else text in (found or "")
