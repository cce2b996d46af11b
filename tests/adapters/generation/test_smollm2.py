"""Several tokens a pass with a trained model, SmolLM2-135M: real text, of which drafts guess a part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from drafting import assert_equal, drafts  # noqa: E402
from trained import smollm2  # noqa: E402
from weightstream.adapters.generation.decoder import DecodeReport  # noqa: E402
from weightstream.adapters.generation.drafted import speculate_with  # noqa: E402

NUM = 28  # tokens of a text at least
WIDTH = 8

NOTICE = """The library opens on Monday at nine. Members may borrow six books for three weeks. Books that are late cost
ten cents a day. On Monday evening there is a reading for children in the small hall."""
PROGRAM = """```python
def mean(values):
    n = 0
    total = 0.0
    for value in values:
        n = n + 1
        total = total + value
    if n == 0:
        return 0.0
    return total / n
```"""
PROMPTS = {
    "edit": f"Copy the following text, but write every number in digits and change nothing else.\n\n{NOTICE}",
    "code": f"Rename the variable `n` to `count` in this Python code and print the whole code again.\n\n{PROGRAM}",
    "chat": "Why is the sky blue during the day and red at sunset? Explain it to a child.",
}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20}


def load(dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2(), dtype=dtype).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return load(torch.bfloat16)


def ids_of(prompt: str) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2())
    chat = [{"role": "user", "content": PROMPTS[prompt]}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids: torch.Tensor = encoded["input_ids"]
    return ids


@torch.no_grad()
def rounded(model: Any, bits: int = 4, group: int = 64) -> Any:
    """A copy with each group of weights rounded to 2**bits values."""
    made = copy.deepcopy(model)
    for module in made.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            weights = module.weight.float().view(-1, group)
            low, high = weights.aminmax(dim=1, keepdim=True)
            step = ((high - low) / (2**bits - 1)).clamp_min(1e-8)
            module.weight.copy_((((weights - low) / step).round() * step + low).view(module.weight.shape))
    return made


def options(ids: torch.Tensor, num: int, **more: Any) -> dict[str, Any]:
    """At least `num` new tokens. The length of the cache is a multiple of 16, where attention on the CPU computes the
    same bits in each process."""
    num += -(ids.shape[1] + num - 1) % 16
    kept = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    return kept | {"max_new_tokens": num, "do_sample": False} | more


def plainly(model: Any, ids: torch.Tensor, num: int = NUM, **more: Any) -> Any:
    torch.manual_seed(1)
    return model.generate(ids, cache_implementation="static", disable_compile=True, **options(ids, num, **more))


def drafted(model: Any, ids: torch.Tensor, bits: Any, num: int = NUM, **more: Any) -> tuple[Any, DecodeReport]:
    torch.manual_seed(1)
    return speculate_with(model, ids, options(ids, num, **more), None, bits)


LOOKUP = {"prompt_lookup_num_tokens": WIDTH - 1}


@pytest.mark.stress
@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["edit", "code"])
def test_an_edited_text_takes_few_passes(model: Any, prompt: str) -> None:
    ids = ids_of(prompt)
    want = plainly(model, ids)
    got, decoding = drafted(model, ids, "token", **LOOKUP)
    assert_equal(got, want)
    assert decoding.speculation.bits == "token"
    num = got.sequences.shape[1] - ids.shape[1]
    assert num > NUM // 2  # it ends elsewhere with transformers 5.17
    assert decoding.speculation.passes <= 0.6 * num


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.stress
def test_a_rounded_copy_as_assistant(model: Any, how: dict[str, Any]) -> None:
    ids, draft = ids_of("chat"), drafts(rounded(model), 4)
    num = 12
    want = plainly(model, ids, num, **how)
    got, decoding = drafted(model, ids, "token", num, **draft, **how)
    assert_equal(got, want)
    assert decoding.speculation.tokens_per_pass > 1.1
    if not how:
        scores, _ = drafted(model, ids, "rows", num, **draft)
        assert scores.sequences.tolist() == want.sequences.tolist(), "as the best words are far apart"
        assert_equal(drafted(model, ids, "rows", num, prompt_lookup_num_tokens=4)[0], scores)


@pytest.mark.stress
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_long_texts(prompt: str, how: dict[str, Any], dtype: torch.dtype) -> None:
    model, ids = load(dtype), ids_of(prompt)
    want, rows = plainly(model, ids, 64, **how), []
    for draft in (LOOKUP, drafts(rounded(model), WIDTH - 1)):
        assert_equal(drafted(model, ids, "token", 64, **draft, **how)[0], want)
        rows.append(drafted(model, ids, "rows", 64, **draft, **how)[0])
    assert_equal(*rows)
