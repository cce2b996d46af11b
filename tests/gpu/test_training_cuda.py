"""Training of adapters on a GPU: autograd's thread opens the units, under delays on both streams and poison."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightstream
from stack import slow
from training import Net, Recompute, adapters, assert_equal, inputs, moved, net, offloaded, square, trained
from weightstream.runtime.devices.backend import Side
from weightstream.runtime.ring.binding import Binding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
recomputes = pytest.mark.parametrize("recompute", ["kept", "recomputed", "reentrant"])
MOST_CYCLES = 400_000  # as long as a copy of a small block


@pytest.fixture(autouse=True)
def _same_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that add in the same order each time."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


def both(recompute: Recompute, dtype: torch.dtype = torch.bfloat16) -> tuple[Net, Net]:
    return net(recompute, dtype=dtype), net(recompute, dtype=dtype).cuda()


@recomputes
@pytest.mark.parametrize("codec", ["none", "compressed"])
def test_twenty_steps(recompute: Recompute, codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, most_cycles=MOST_CYCLES)
    model, plain = both(recompute)
    with offloaded(model, device="cuda", codec=codec) as streamer:
        assert streamer.plan.opened_units()
        assert_equal(trained(model, 20, device="cuda"), trained(plain, 20, device="cuda"))


@pytest.mark.alone
@pytest.mark.parametrize("side", [Side.COMPUTE, Side.COPY])
def test_an_omitted_wait_is_detected(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, side)
    model, plain = both("kept")
    with offloaded(model, device="cuda"), pytest.raises(AssertionError):
        assert_equal(trained(model, 20, device="cuda"), trained(plain, 20, device="cuda"))


@recomputes
def test_a_pass_runs_in_a_thread_of_autograd(recompute: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread opens units and computes them again while the caller waits; the bytes of a step are the plan's."""
    threads, open_unit = set[int](), Binding.open

    def opened(binding: Binding, index: int) -> bool:
        threads.add(threading.get_ident())
        return open_unit(binding, index)

    monkeypatch.setattr(Binding, "open", opened)
    model, _ = both(recompute)
    with offloaded(model, device="cuda") as streamer:
        for step in range(4):
            with moved(streamer) as found:
                square(model, inputs(step, model, "cuda")).backward()
            with torch.no_grad():
                model(inputs(step, model, "cuda"))
        assert len(threads) == 2
        assert found["unplanned_fills"] == 0
        assert found["filled_nbytes"] == streamer.plan.step_nbytes_of("train")


def test_an_error_in_a_pass_and_two_threads() -> None:
    model, plain = both("recomputed")

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in a hook")

    with offloaded(model, device="cuda") as streamer:
        hook = model.blocks[1].query.down.weight.register_hook(fail)
        with pytest.raises(ValueError, match="in a hook"):
            square(model, inputs(0, model, "cuda")).backward()
        hook.remove()
        model.zero_grad()
        assert not any(unit.opened for unit in streamer._binding.units)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(trained(model, 3, device="cuda")))
        thread.start()
        thread.join(120)
        assert_equal(found[0], trained(plain, 3, device="cuda"))


def llama(recompute: Recompute) -> Any:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(1)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes)).to(torch.bfloat16)
    return model.requires_grad_(False), peft, recompute


def with_adapters(model: Any, peft: Any, recompute: Recompute) -> Any:
    torch.manual_seed(2)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    adapted.enable_input_require_grads()
    if recompute != "kept":
        adapted.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    return adapted.train()


def tokens_trained(model: Any, num_steps: int = 20) -> list[torch.Tensor]:
    found, own = [], adapters(model)
    optimizer = torch.optim.AdamW(own, lr=0.01)
    for seed in range(num_steps):
        ids = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(seed)).cuda()
        found.append(model(input_ids=ids, labels=ids).loss)
        found[-1].backward()
        found += [parameter.grad.clone() for parameter in own if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in (*found, *own)]


def to_nf4(model: nn.Module) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "lm_head" not in name:
            packed = bitsandbytes.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            packed.load_state_dict(layer.state_dict())
            model.set_submodule(name, packed)
    return model.cuda().requires_grad_(False)


@recomputes
@pytest.mark.parametrize("kind", ["plain", "compressed", "nf4", "compiled"])
def test_a_language_model(recompute: Recompute, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()  # it compiles the code of a layer a limited number of times
    slow(monkeypatch, most_cycles=MOST_CYCLES)
    model, peft, _ = llama(recompute)
    if kind == "nf4":
        model = to_nf4(model)
    plain = copy.deepcopy(model).cuda()
    if kind == "compiled":
        for each in (model, plain):
            for layer in each.model.layers:
                layer.forward = torch.compile(layer.forward)
    wanted = tokens_trained(with_adapters(plain, peft, recompute))
    budget = int(0.5 * sum(p.nbytes for p in model.parameters()))
    codec = "compressed" if kind == "compressed" else "none"
    with weightstream.offload(model, device="cuda", device_budget=budget, codec=codec) as streamer:
        assert streamer.plan.opened_units()
        adapted = with_adapters(model, peft, recompute)
        if kind == "compiled":  # the first step is watched, so that it runs eager, with other bits
            ids = torch.ones(2, 48, dtype=torch.long, device="cuda")
            adapted(input_ids=ids, labels=ids).loss.backward()
            adapted.zero_grad()
        assert_equal(tokens_trained(adapted), wanted)
