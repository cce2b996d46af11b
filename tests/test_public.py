"""The public names, their signatures, and their documentation. Each change belongs into the changelog."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import weightstream

DEVICE = "device: torch.device | str | int | None = None, device_budget: int | str | None = None"
DEVICES = DEVICE.replace("int | str | None", "int | str | Mapping[int, int | str] | None")
CONFIG = "config: OffloadConfig | str | Path | None = None"
ANY_CONFIG = "config: OffloadConfig | Any | None = None"  # also a model's config
DTYPE = "dtype: str | torch.dtype | None = None, torch_dtype: str | torch.dtype | None = None"
FUNCTIONS = {
    "create_offloader": "(config: OffloadConfig) -> BaseOffloader",
    "from_pretrained": f"(path_or_repo_id: str | Path, *, {DEVICES}, {DTYPE}, {ANY_CONFIG}, "
    "offload_folder: str | Path | None = None, host_budget: int | str | None = None, progress: bool | None = None, "
    "allow_missing: bool = False, speculate: Speculate | None = None, draft: str | Path | None = None, "
    "**kwargs: Any) -> Any",
    "generate": "(model: Any, inputs: Any = None, *, bits: Bits | None = None, tree_nodes: int | None = None, "
    "speculate: Speculate | None = None, on_decoding: Callable[[DecodeReport], None] | None = None, "
    "**kwargs: Any) -> Any",
    "get_offloader": "() -> BaseOffloader",
    "offload": f"(model: nn.Module | Any, *, {DEVICES}, example_inputs: Any = None, {CONFIG}, **settings: Any) -> Any",
    "offload_pipeline": f"(pipe: Any, *, {DEVICE}, example_inputs: Mapping[str, Any] | None = None, {CONFIG}, "
    "**settings: Any) -> Any",
    "pipeline_from_pretrained": f"(path_or_repo_id: str | Path, *, {DEVICE}, {DTYPE}, "
    "variant: str | None = None, base: str | Path | None = None, "
    f"example_inputs: Mapping[str, Any] | None = None, {CONFIG}, offload_folder: str | Path | None = None, "
    "progress: bool | None = None, **kwargs: Any) -> Any",
    "plan_model": f"(path_or_repo_id: str | Path, *, {DEVICES}, {DTYPE}, "
    "profile: Profile | str | Path | None = None, gpu: str | None = None, link: str | None = None, "
    f"target: str | None = None, {ANY_CONFIG}, trust_remote_code: bool = False, "
    "variant: str | None = None, example_inputs: Mapping[str, Any] | None = None, "
    "speculate: Speculate | None = None, draft: str | Path | None = None, **settings: Any) "
    "-> Plan | PipelinePlan | StripedPlan",
    "set_offloader": "(instance: BaseOffloader | None) -> None",
}
METHODS = {
    "BaseOffloader.join_after_forward": "(self) -> None",
    "BaseOffloader.post_init": "(self, step: EngineStep | None = None, *, is_compiled: bool = False, "
    "in_graphs: bool = False) -> None",
    "BaseOffloader.sync_prev_onload": "(self) -> None",
    "BaseOffloader.wrap_modules": "(self, modules: Iterable[nn.Module], prefix: str = ) -> list[nn.Module]",
    "Plan.from_json": "(text: str | bytes) -> Plan",
    "Plan.to_json": "(self) -> str",
    "PrefetchOffloader.__init__": "(self, group_size: int, num_in_group: int, prefetch_step: int, "
    "offload_params: Iterable[str] | None = None, mode: Literal[cpu] = cpu) -> None",
    "Streamer.capture": "(self, graph: Any, **options: Any) -> Iterator[None]",
    "Streamer.compile": "(self, scope: Literal[model, blocks] = model, **options: Any) -> None",
    "Streamer.remove": "(self) -> None",
    "Streamer.replay": "(self, graph: Any) -> None",
    "Streamer.stats": "(self) -> Stats",
    "Streamer.step": "(self) -> Iterator[None]",
    "Streamer.switch": "(self, plan: Plan) -> None",
    "Streamer.trace": "(self) -> Iterator[Trace]",
    "Stripes.remove": "(self) -> None",
    "Stripes.stats": "(self) -> Stats",
    "Stripes.trace": "(self) -> Iterator[Trace]",
    "UVAOffloader.__init__": "(self, cpu_offload_max_bytes: int, cpu_offload_params: Iterable[str] | None = None) "
    "-> None",
}
SETTINGS = {
    "OffloadConfig": "offload_backend uva prefetch device_budget host_budget max_memory gpus batch context tokens "
    "train offload_folder pin_memory use_uva zero_copy_params codec verify_checksums",
    "PrefetchOffloadConfig": "offload_group_size offload_num_in_group offload_prefetch_step offload_params",
    "UVAOffloadConfig": "cpu_offload_gb cpu_offload_params",
}
ERRORS = {  # and their builtin base, which callers may catch instead
    "CheckpointError": ValueError,
    "ConfigError": ValueError,
    "InvariantError": RuntimeError,
    "OffloadError": RuntimeError,
    "PlanError": ValueError,
    "StoreError": OSError,
    "UnsupportedError": weightstream.OffloadError,
    "WeightstreamError": Exception,
}
CLASSES = {
    "BaseOffloader",
    "ConfigWarning",
    "NoopOffloader",
    "Plan",
    "PrefetchOffloader",
    "Stats",
    "Streamer",
    "Stripes",
}
CLASSES |= {"UVAOffloader", *SETTINGS, *ERRORS}


def test_completion_shows_the_public_names() -> None:
    assert dir(weightstream) == sorted([*FUNCTIONS, *CLASSES, "__version__"])
    assert sorted(weightstream.__all__) == sorted([*FUNCTIONS, *CLASSES])
    for name in dir(weightstream):
        assert getattr(weightstream, name) is not None


def test_all_names_are_imported_by_a_star() -> None:
    found: dict[str, Any] = {}
    exec("from weightstream import *", found)
    assert found.keys() - {"__builtins__"} == set(weightstream.__all__)


def find(name: str) -> Any:
    first, *rest = name.split(".")
    found = getattr(weightstream, first)
    for part in rest:
        found = getattr(found, part)
    return found


def signature(function: Callable[..., Any]) -> str:
    """The signature without quotes: versions of Python differ in how they quote annotations."""
    return re.sub("['\"]", "", str(inspect.signature(function)))


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_signatures_are_as_released(name: str) -> None:
    assert signature(find(name)) == (FUNCTIONS | METHODS)[name]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_as_released(name: str) -> None:
    assert list(find(name).model_fields) == SETTINGS[name].split()


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_their_documented_bases(name: str) -> None:
    assert issubclass(find(name), (weightstream.WeightstreamError, ERRORS[name]))
    assert issubclass(find(name), ERRORS[name])


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *CLASSES, *METHODS} - {"PrefetchOffloader", "UVAOffloader"}))
def test_documentation_names_arguments_and_errors(name: str) -> None:
    """The documentation of an `__init__` is that of its class. If nothing is raised, the documentation says so."""
    text = inspect.getdoc(find(name.removesuffix(".__init__"))) or ""
    assert text.split("\n")[0].endswith((".", ":")), "the first line is a sentence"
    if name in FUNCTIONS or name.endswith(".__init__"):
        named = {word for line in re.findall(r"^    (\w[\w, ]*): ", text, re.MULTILINE) for word in line.split(", ")}
        taken = inspect.signature(find(name)).parameters.values()
        missing = {p.name for p in taken if p.kind is not p.VAR_KEYWORD and p.name != "self"} - named
        assert not missing, text
        assert "Raises" in text
