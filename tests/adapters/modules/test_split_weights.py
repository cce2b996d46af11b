"""Weights in two parts: whatever reads them gets the exact bits, the high parts alone make the draft."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from generating import build
from models import TEXT

transformers = pytest.importorskip("transformers")

from weightstream.adapters.modules.split_weights import (  # noqa: E402
    BITS,
    DraftWeight,
    SplitWeight,
    split_model,
    why_not_split,
)
from weightstream.codec import planes  # noqa: E402
from weightstream.errors import UnsupportedError  # noqa: E402
from weightstream.runtime.tensors.leaves import leaves_of  # noqa: E402

CPU = torch.device("cpu")


def weight(rows: int = 96, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns).mul_(0.1).to(torch.bfloat16)


def split(plain: torch.Tensor, bits: int = 2) -> nn.Parameter:
    return nn.Parameter(SplitWeight(*planes.split(plain, bits)), requires_grad=False)


def llama(*, tied: bool = False, **more: Any) -> Any:
    sizes = TEXT | {"intermediate_size": 192} | more
    return build(transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=tied))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_has_the_bits_of_the_plain_one(bits: int, bias: bool) -> None:
    layer = nn.Linear(128, 96, bias=bias, dtype=torch.bfloat16)
    plain, x = copy.deepcopy(layer), torch.randn(3, 128, dtype=torch.bfloat16)
    layer.weight = split(layer.weight.detach(), bits)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w + 1,
        lambda w: w.float(),
        lambda w: w.t() @ w,
        lambda w: w[3:7],
        lambda w: torch.cat([w, w]),
        lambda w: w.detach().clone(),
        lambda w: w.data.sum(),
        lambda w: functional.embedding(torch.tensor([[3, 1]]), w),
        lambda w: functional.linear(input=torch.ones(2, 128, dtype=torch.bfloat16), weight=w),
        copy.deepcopy,
    ],
)
def test_every_function_reads_the_exact_matrix(read: Any) -> None:
    plain = weight()
    assert torch.equal(read(split(plain)), read(plain))


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.copy_(torch.zeros_like(w)),
        lambda w: w.data.add_(1),
        lambda w: w.zero_(),
        lambda w: torch.add(w, 1, out=w),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: setattr(w, "data", torch.zeros(96, 128, dtype=torch.bfloat16)),
    ],
)
def test_a_write_is_refused_and_changes_nothing(write: Any) -> None:
    plain = weight()
    both = split(plain)
    with pytest.raises(UnsupportedError, match="two parts"):
        write(both)
    assert torch.equal(both + 0, plain)


def test_a_write_to_another_tensor_may_read_it() -> None:
    plain, out = weight(), torch.zeros(96, 128, dtype=torch.bfloat16)
    out.copy_(split(plain))
    assert torch.equal(out, plain)


@pytest.mark.parametrize("tied", [False, True])
def test_the_draft_has_the_high_parts_and_shares_all_else(tied: bool) -> None:
    model = llama(tied=tied)
    plain = copy.deepcopy(model)
    originals = dict(model.named_parameters())
    found = split_model(model, 2, CPU)
    inside = {name for name, p in model.named_parameters() if type(p) is SplitWeight}
    assert inside == {name for name in originals if name.endswith("proj.weight")}
    assert all(torch.equal(p + 0, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    drafts = dict(found.draft.named_parameters())
    lossy = {name for name, p in drafts.items() if type(p) is DraftWeight}
    assert lossy == inside | ({"model.embed_tokens.weight"} if tied else {"lm_head.weight"})
    assert all(drafts[name] is originals[name] for name in drafts.keys() - lossy)
    assert all(drafts[name].high is model.get_parameter(name).high for name in inside)
    assert len(found.copies) == 1
    ids = torch.randint(3, 128, (1, 9))
    rounded = copy.deepcopy(plain)
    for name, value in rounded.named_parameters():
        if name in lossy:
            value.data = drafts[name].dense()
    assert torch.allclose(found.draft(ids).logits, rounded(ids).logits, rtol=0.1, atol=0.1)
    assert not torch.equal(found.draft(ids).logits, plain(ids).logits)
    found.undo()
    assert all(p is originals[name] for name, p in model.named_parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_what_the_draft_reads_is_kept_on_the_device(tied: bool) -> None:
    model = llama(tied=tied)
    found = split_model(model, 1, CPU)
    streamed = {leaf.path for leaf in leaves_of(model) if id(leaf.tensor) not in found.kept | found.tables}
    assert {path for path in streamed if not path.endswith("proj.weight.low")} == {
        "model.embed_tokens.weight" if tied else "lm_head.weight"
    } | ({"lm_head.weight"} if tied else set())
    tables = {leaf.path for leaf in leaves_of(model) if id(leaf.tensor) in found.tables}
    assert tables == (set() if tied else {"model.embed_tokens.weight"})


def test_a_state_dict_and_a_saved_model_hold_plain_matrices() -> None:
    model = llama()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    found = split_model(model, 2, CPU)
    for part, prefix in ((model, ""), (model.model, "model."), (model.model.layers[1].mlp, "model.layers.1.mlp.")):
        state, file = part.state_dict(), io.BytesIO()
        assert {type(value) for value in state.values()} == {torch.Tensor}
        assert all(torch.equal(value, plain[prefix + name]) for name, value in state.items())
        torch.save(state, file)
    found.undo()
    assert model.state_dict().keys() == plain.keys()


def test_shapes_are_split_on_meta() -> None:
    model, on_meta = llama(), llama().to("meta")
    for bits in BITS:
        found, shapes = split_model(model, bits, CPU), split_model(on_meta, bits, torch.device("meta"))
        for mine, theirs in zip(leaves_of(model), leaves_of(on_meta), strict=True):
            assert mine.path == theirs.path
            assert theirs.tensor.is_meta
            assert mine.tensor.nbytes == pytest.approx(theirs.tensor.nbytes, rel=0.1, abs=64)
        found.undo()
        shapes.undo()


def test_models_that_cannot_be_split_say_why() -> None:
    assert why_not_split(llama()) is None
    reason = why_not_split(llama().float())
    assert reason is not None
    assert reason.startswith("0% of the blocks of LlamaForCausalLM are linear layers in bfloat16")
    experts = transformers.Qwen3MoeConfig(**TEXT, num_key_value_heads=2, head_dim=16, num_experts=6)
    with pytest.raises(UnsupportedError, match=r"draft='self': .*all other weights would have to stay on the device"):
        split_model(build(experts), 2, CPU)
    assert why_not_split(nn.Linear(64, 64, dtype=torch.bfloat16)) is not None
