"""Arguments of passes that are moved on from an earlier pass: equal to those of transformers, or not used."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from generating import MODELS, STATIC, build

transformers = pytest.importorskip("transformers")

from weightstream.adapters.generation.generation import generate  # noqa: E402

NUM, KEPT = 24, {"return_dict_in_generate": True, "output_logits": True}
OPTIONS = {"max_new_tokens": NUM, "min_new_tokens": NUM, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that returns a list, to which the arguments that transformers makes for forwards are added from then
    on; `change` may change them."""
    mixin = transformers.GenerationMixin
    prepare = mixin.prepare_inputs_for_generation

    def count(change: Any = lambda arguments: arguments) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []

        @functools.wraps(prepare)
        def prepared(*args: Any, **kwargs: Any) -> Any:
            made.append(change(prepare(*args, **kwargs)))
            return made[-1]

        monkeypatch.setattr(mixin, "prepare_inputs_for_generation", prepared)
        return made

    return count


def passes(model: Any) -> list[dict[str, Any]]:
    """The arguments with which the model's forward is called."""
    seen: list[dict[str, Any]] = []
    forward = model.forward

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = {name: value.clone() for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        seen.append({"layouts": {name: value.stride() for name, value in tensors.items()}, **tensors})
        return forward(*args, **kwargs)

    model.forward = called
    return seen


def prompt(padding: int) -> dict[str, torch.Tensor]:
    words = torch.randint(3, 128, (1, 9 - padding), generator=torch.Generator().manual_seed(7))
    mask = torch.cat([torch.zeros(1, padding), torch.ones(1, 9 - padding)], 1).long()
    return {"input_ids": torch.nn.functional.pad(words, (padding, 0)), "attention_mask": mask}


@pytest.mark.few(4)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "qwen3-moe"])
def test_passes_get_what_transformers_would_pass(
    name: str, padding: int, counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for grows in (True, False):
        model = build(MODELS[name]())
        made, seen = counted(), passes(model)
        if not grows:
            monkeypatch.setattr(
                "weightstream.adapters.generation.speculation.VerifySteps._sees_all", lambda self: False
            )
        result = generate(model, **prompt(padding), prompt_lookup_num_tokens=3, bits="rows", **OPTIONS, **KEPT)
        assert len(made) == (3 if grows else len(seen))  # the prompt and two passes
        runs.append((seen, result))
    (moved, result), (plain, want) = runs
    assert len(moved) == len(plain) > 6
    for own, other in zip(moved, plain, strict=True):
        assert list(own) == list(other)
        assert own["layouts"] == other["layouts"]
        assert all(torch.equal(value, other[key]) for key, value in own.items() if key != "layouts")
    assert torch.equal(result.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(result.logits, want.logits, strict=True))


def later(arguments: dict[str, Any]) -> dict[str, Any]:
    """Positions that do not grow by one for each token."""
    return arguments | {"position_ids": arguments["position_ids"] // 2}


def more(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"output_router_logits": torch.zeros(1)}


@pytest.mark.parametrize(("name", "change"), [("llama", later), ("qwen3-moe", more), ("mistral", lambda found: found)])
def test_arguments_that_do_not_only_grow_are_made_anew(name: str, change: Any, counted: Any) -> None:
    """Positions of another kind, unknown tensors, and masks with a window."""
    model = build(MODELS[name]())
    made, seen = counted(change), passes(model)
    generate(model, **prompt(0), prompt_lookup_num_tokens=3, bits="rows", **OPTIONS)
    assert len(made) == len(seen) > 6


class OwnLlama(transformers.LlamaForCausalLM):
    """Its arguments change at a length of the text, as those of Phi-3 do."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        found = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return found | {"position_ids": found["position_ids"].clamp(max=20)}


def test_a_method_of_the_models_own_is_called_for_each_pass(counted: Any) -> None:
    config = MODELS["llama"]()
    plain, model = build(config, OwnLlama), build(config, OwnLlama)
    want = plain.generate(prompt(0)["input_ids"], **OPTIONS, **KEPT, **STATIC)
    made = counted()
    got = generate(model, prompt(0)["input_ids"], prompt_lookup_num_tokens=3, bits="token", **OPTIONS, **KEPT)
    assert len(made) > 6
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))


def test_a_text_has_the_bits_of_the_plain_model_behind_padding() -> None:
    plain, model = build(MODELS["llama"]()), build(MODELS["llama"]())
    want = plain.generate(**prompt(4), **OPTIONS, **KEPT, **STATIC)
    got = generate(model, **prompt(4), prompt_lookup_num_tokens=3, bits="token", **OPTIONS, **KEPT)
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
